"""A wave of requests against a null server whose timing is known."""

from __future__ import annotations

from bedplate.measure.load import Target, prepare, run, serve_null
from bedplate.measure.wave import APART_S, wave
from bedplate.values.run import Load

LOAD = Load(concurrency=4, prompt_tokens=32, output_tokens=8)


def test_each_stream_is_asked_once_and_they_do_not_begin_at_once() -> None:
    with serve_null(first_ms=50, interval_ms=5, tokens=8, overhead=3) as null:
        target = Target.of(null.url)
        repeat = run(wave(target, LOAD, run(prepare(target, LOAD)), 1, 30.0))
    assert repeat is not None and [one.outcome for one in repeat.samples] == ["ok"] * 4
    begun = [one.at_s for one in repeat.samples]
    assert max(begun) - min(begun) >= APART_S, begun
    assert all(one.ttft_ms is not None and one.ttft_ms >= 50 for one in repeat.samples), (
        "waiting to begin is not counted"
    )
    assert repeat.seconds >= 0.085 + 3 * APART_S


def test_one_that_takes_longer_than_it_may_is_given_up() -> None:
    with serve_null(first_ms=50, interval_ms=5, tokens=8, overhead=3) as null:
        target = Target.of(null.url)
        prepared = run(prepare(target, LOAD))
        assert run(wave(target, LOAD, prepared, 1, 0.02)) is None
