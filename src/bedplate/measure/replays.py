"""Read the requests of a trace for a replay."""

from __future__ import annotations

import itertools
from pathlib import Path

from bedplate.errors import UsageError
from bedplate.facts.traces import BadRows, detect_format, open_trace, parse_trace
from bedplate.values.workload import RequestShape

MOST_REQUESTS = 100_000
LOOKED_AT = 2000
"""Requests that show whether a trace has sessions."""


def has_trace_sessions(path: Path) -> bool:
    with open_trace(path) as stream:
        shapes = parse_trace(stream, detect_format(stream, path.name), BadRows(path.name))
        return any(shape.session is not None for shape in itertools.islice(shapes, LOOKED_AT))


def read_shapes(path: Path, seconds: float | None) -> tuple[RequestShape, ...]:
    """The requests of the first `seconds` of the trace, with all turns of their sessions; `None`: of the whole trace.

    Requests of sessions without arrival times are kept: the load says when such sessions begin.
    """
    bad = BadRows(path.name)
    found: list[RequestShape] = []
    with open_trace(path) as stream:
        for shape in parse_trace(stream, detect_format(stream, path.name), bad):
            if shape.started_s is None and shape.session is None:
                raise UsageError(f"{path.name} has no arrival times", hint="use --rate instead of --trace")
            if shape.started_s is None and shape.wait_s is None and seconds is not None:
                hint = "pass --concurrency or --rate to run its sessions"
                raise UsageError(f"{path.name} has no arrival times", hint=hint)
            found.append(shape)
            if len(found) >= MOST_REQUESTS:
                break
    first = min((shape.started_s or 0.0 for shape in found), default=0.0)
    begun = {
        shape.session
        for shape in found
        if seconds is None or shape.started_s is None or shape.started_s - first <= seconds
    }
    kept = tuple(
        shape
        for shape in found
        if (shape.session is not None and shape.session in begun)
        or (shape.session is None and (seconds is None or (shape.started_s or 0.0) - first <= seconds))
    )
    if not kept:
        raise UsageError(f"{path.name} contains no requests")
    return kept
