"""Read the requests of a trace for a replay."""

from __future__ import annotations

from pathlib import Path

from bedplate.errors import UsageError
from bedplate.facts.traces import BadRows, detect_format, open_trace, parse_trace
from bedplate.values.workload import RequestShape

MOST_REQUESTS = 100_000


def read_shapes(path: Path, seconds: float) -> tuple[RequestShape, ...]:
    """The requests of the first `seconds` of the trace."""
    bad = BadRows(path.name)
    found: list[RequestShape] = []
    with open_trace(path) as stream:
        for shape in parse_trace(stream, detect_format(stream, path.name), bad):
            if shape.started_s is None:
                raise UsageError(f"{path.name} has no arrival times", hint="use --rate instead of --trace")
            found.append(shape)
            if len(found) >= MOST_REQUESTS:
                break
    first = min((shape.started_s or 0.0 for shape in found), default=0.0)
    kept = tuple(shape for shape in found if (shape.started_s or 0.0) - first <= seconds)
    if not kept:
        raise UsageError(f"{path.name} contains no requests")
    return kept
