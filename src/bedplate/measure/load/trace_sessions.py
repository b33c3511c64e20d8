"""Sessions from the requests of a trace. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bedplate.errors import UsageError
from bedplate.values.record import replace_fields
from bedplate.values.run import Load
from bedplate.values.scenario import SessionPlan, SessionTurn
from bedplate.values.workload import RequestShape


def has_sessions(shapes: Iterable[RequestShape]) -> bool:
    return any(shape.session is not None for shape in shapes)


def group_sessions(shapes: Sequence[RequestShape], load: Load) -> list[SessionPlan]:
    """The sessions in the order of their first requests. A request without a session is one of its own."""
    first_s = min((shape.started_s for shape in shapes if shape.started_s is not None), default=0.0)
    groups: dict[object, list[RequestShape]] = {}
    for number, shape in enumerate(shapes):
        groups.setdefault(number if shape.session is None else f"session {shape.session}", []).append(shape)
    plans = [_make_plan(_order_turns(group), load, first_s) for group in groups.values()]
    return sorted(plans, key=lambda plan: plan.starts_s or 0.0)


def limit_sessions(plans: Sequence[SessionPlan], context: int | None, spare: int) -> list[SessionPlan]:
    """The sessions up to the first request that exceeds the context. Raises `UsageError` if nothing is left."""
    if context is None:
        return list(plans)
    found = []
    for plan in plans:
        lengths = [prompt + turn.output_tokens for prompt, turn in zip(plan.prompt_tokens, plan.turns, strict=True)]
        fitting = next((number for number, length in enumerate(lengths) if length + spare > context), len(lengths))
        if fitting:
            found.append(replace_fields(plan, turns=plan.turns[:fitting]))
    if not found:
        raise UsageError(f"no session of the trace fits into the context of {context:,} tokens")
    return found


def _order_turns(shapes: list[RequestShape]) -> list[RequestShape]:
    """By time if all have one, else as in the file."""
    if any(shape.started_s is None for shape in shapes):
        return shapes
    return sorted(shapes, key=lambda shape: shape.started_s or 0.0)


def _make_plan(shapes: Sequence[RequestShape], load: Load, first_s: float) -> SessionPlan:
    turns: list[SessionTurn] = []
    held = 0
    for number, shape in enumerate(shapes):
        prompt, output = shape.prompt_tokens or load.prompt_tokens, shape.output_tokens or load.output_tokens
        restarts = number > 0 and prompt <= held
        at_s = None if shape.started_s is None else shape.started_s - first_s
        turns.append(
            SessionTurn(
                new_tokens=max(1, prompt if restarts else prompt - held),
                output_tokens=max(1, output),
                wait_s=_find_wait_s(shapes[number - 1], shape) if number else 0.0,
                at_s=at_s,
                after_tool=shape.after_tool,
                restarts=restarts,
            )
        )
        held = prompt + output
    return SessionPlan(turns=tuple(turns), starts_s=turns[0].at_s)


def _find_wait_s(before: RequestShape, shape: RequestShape) -> float | None:
    """The time between an answer and the next request, if the trace has it; else the request keeps its own time."""
    if shape.wait_s is not None:
        return shape.wait_s
    if before.started_s is None or shape.started_s is None:
        return 0.0
    if before.duration_ms is None:
        return None
    return max(0.0, shape.started_s - before.started_s - before.duration_ms / 1000)
