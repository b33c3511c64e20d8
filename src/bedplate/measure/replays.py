"""Read the requests of a trace for a replay."""

from __future__ import annotations

from pathlib import Path

from bedplate.errors import BadQuestion
from bedplate.facts.traces import BadRows, detected, opened, shapes_of
from bedplate.values.workload import RequestShape

MOST_REQUESTS = 100_000


def read_shapes(path: Path, seconds: float) -> tuple[RequestShape, ...]:
    """The requests of the first `seconds` of the trace."""
    bad = BadRows(path.name)
    found: list[RequestShape] = []
    with opened(path) as stream:
        for shape in shapes_of(stream, detected(stream, path.name), bad):
            if shape.started_s is None:
                raise BadQuestion(f"{path.name} has no arrival times", hint="use --rate instead of --trace")
            found.append(shape)
            if len(found) >= MOST_REQUESTS:
                break
    first = min((shape.started_s or 0.0 for shape in found), default=0.0)
    kept = tuple(shape for shape in found if (shape.started_s or 0.0) - first <= seconds)
    if not kept:
        raise BadQuestion(f"{path.name} contains no requests")
    return kept
