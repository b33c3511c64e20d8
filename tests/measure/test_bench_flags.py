"""Flags that reduce the validity of a cell; a good cell has none."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.runs import make_cell

from bedplate.measure.flags import flag_cell
from bedplate.values import replace_fields
from bedplate.values.run import Cell, ClientAccuracy, EngineSeries, Load, Quality, ResourceUse, Sample

GOOD = make_cell("vllm", 4, 100.0)


def change_cell(cell: Cell = GOOD, samples: Any = lambda sample: sample, **changes: Any) -> Cell:
    """Changes all repeats and samples in the same way."""
    repeats = tuple(
        replace_fields(repeat, samples=tuple(samples(sample) for sample in repeat.samples), **changes)
        for repeat in cell.repeats
    )
    return replace_fields(cell, repeats=repeats)


def find_flags(cell: Cell, **more: Any) -> dict[str, bool]:
    """The kinds of flags, and whether each makes the cell invalid."""
    return {flag.kind: flag.invalid for flag in flag_cell(cell, **more)}


def change_sample(**changes: Any) -> Any:
    return lambda sample: replace_fields(sample, **changes)


def test_a_good_cell_has_no_flags() -> None:
    assert find_flags(GOOD) == {} and find_flags(GOOD, quantizations=[("vllm", "Q4_1"), ("sglang", "Q4_1")]) == {}


def test_a_client_bottleneck_is_invalid() -> None:
    cell = change_cell(client=ClientAccuracy(limit=True, reasons=("the client used 97% of a core",)))
    assert find_flags(cell) == {"client": True}
    assert "in 3 of 3 repeats: the client used 97% of a core" in flag_cell(cell)[0].text


@pytest.mark.parametrize(("every", "invalid"), [(2, True), (30, False)])
def test_flags_failed_requests(every: int, invalid: bool) -> None:
    numbers = iter(range(1000))
    cell = change_cell(
        samples=lambda sample: (
            replace_fields(sample, outcome="error", error="HTTP 500: oops") if next(numbers) % every == 0 else sample
        )
    )
    assert find_flags(cell) == {"errors": invalid} and "HTTP 500: oops" in flag_cell(cell)[0].text


def test_flags_truncated_streams() -> None:
    assert find_flags(change_cell(samples=change_sample(outcome="cut"))) == {"truncated": True, "short": False}


def test_flags_a_cell_without_ended_requests() -> None:
    empty = replace_fields(GOOD, repeats=tuple(replace_fields(repeat, samples=()) for repeat in GOOD.repeats))
    assert find_flags(empty) == {"short": True} and "no request ended within 10 s" in flag_cell(empty)[0].text
    assert find_flags(replace_fields(GOOD, repeats=())) == {}


@pytest.mark.parametrize(
    ("changes", "exact", "kind"),
    [
        ({"output_tokens": 60}, False, "length"),
        ({"output_tokens": 60}, True, "truncated"),
        ({"output_tokens": 200}, False, "length"),
        ({"output_tokens": None}, False, "length"),
        ({"prompt_tokens": 700}, False, "length"),
    ],
)
def test_flags_other_lengths_than_requested(changes: dict[str, Any], exact: bool, kind: str) -> None:
    cell = replace_fields(change_cell(samples=change_sample(**changes)), exact_output=exact)
    assert find_flags(cell) == {kind: False}


def test_does_not_check_the_lengths_of_a_replay() -> None:
    cell = change_cell(samples=change_sample(output_tokens=60, cached_tokens=400))
    assert find_flags(replace_fields(cell, load=Load(arrivals="replay", trace="t 1"))) == {}


@pytest.mark.parametrize(
    ("cached", "shared", "flags"),
    [(0, 0, {}), (40, 0, {"cache": False}), (400, 0, {"cache": True}), (400, 400, {}), (480, 256, {"cache": True})],
)
def test_flags_unintended_cache_hits(cached: int, shared: int, flags: dict[str, bool]) -> None:
    cell = change_cell(samples=change_sample(cached_tokens=cached))
    assert find_flags(replace_fields(cell, load=replace_fields(cell.load, shared_prefix_tokens=shared))) == flags


def test_flags_cache_hits_from_engine_metrics() -> None:
    assert find_flags(change_cell(engine=EngineSeries(scrapes=3, cache_hit_share=0.5))) == {"cache": True}


@pytest.mark.parametrize(
    ("use", "device", "flags"),
    [
        (ResourceUse(other_cpu_share=0.05), "cpu", {}),
        (ResourceUse(other_cpu_share=0.15), "cpu", {"busy": False}),
        (ResourceUse(other_cpu_share=0.6), "cpu", {"busy": True}),
        (ResourceUse(other_cpu_share=0.6), "cuda", {"busy": False}),
        (ResourceUse(clock_share=0.7), "cuda", {"throttled": False}),
        (ResourceUse(clock_share=0.95, throttled=("power limit",)), "cuda", {}),
        (ResourceUse(throttled=("heat",)), "cuda", {"throttled": False}),
        (ResourceUse(swapped_bytes=1_000_000), "cpu", {}),
        (ResourceUse(swapped_bytes=50_000_000), "cpu", {"swapped": False}),
        (ResourceUse(swapped_bytes=5_000_000_000), "cpu", {"swapped": True}),
    ],
)
def test_flags_a_disturbed_machine(use: ResourceUse, device: Any, flags: dict[str, bool]) -> None:
    assert (
        find_flags(change_cell(replace_fields(GOOD, subject=replace_fields(GOOD.subject, device=device)), use=use))
        == flags
    )


def test_flags_wrong_and_garbled_answers() -> None:
    quality = Quality(agreement=0.1, verdict="broken", note="5 of 48 agree", garbled="the text is garbled: 'x'")
    assert find_flags(replace_fields(GOOD, quality=quality)) == {"broken": False, "garbled": False}


def test_flags_mixed_quantizations() -> None:
    flags = flag_cell(GOOD, [("vllm", "Q4_1"), ("pytorch", "BF16"), ("x", None)])
    assert [flag.kind for flag in flags] == ["mixed"] and "pytorch BF16" in flags[0].text


samples = st.builds(
    Sample,
    at_s=st.floats(0, 10),
    ttft_ms=st.none() | st.floats(0, 1e6),
    duration_ms=st.floats(0, 1e6),
    prompt_tokens=st.none() | st.integers(0, 10**6),
    output_tokens=st.none() | st.integers(0, 10**6),
    cached_tokens=st.none() | st.integers(0, 10**6),
    outcome=st.sampled_from(["ok", "error", "cut", "timeout", "refused"]),
    error=st.none() | st.text(max_size=5),
)


@given(st.lists(samples, max_size=20), st.booleans())
def test_any_samples_are_flagged_without_errors(some: list[Sample], exact: bool) -> None:
    cell = replace_fields(GOOD, repeats=(replace_fields(GOOD.repeats[0], samples=tuple(some)),), exact_output=exact)
    kinds = [flag.kind for flag in flag_cell(cell)]
    ended = sum(sample.outcome == "ok" for sample in some)
    assert ("short" in kinds) == (ended < 8)
    assert len(set(kinds)) >= len(kinds) - 1  # answers and prompts may both have a length flag
