"""A wave of requests against a null server whose timing is known."""

from __future__ import annotations

import pytest

from bedplate.errors import OutsideFailed
from bedplate.measure.load import Prepared, Target, prepare, run, serve_null
from bedplate.measure.summary import output_tok_s
from bedplate.measure.wave import APART_S, Work, wave, wave_apart
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


def test_of_several_rounds_all_tokens_count_over_the_time_that_they_took() -> None:
    with serve_null(first_ms=50, interval_ms=5, tokens=8, overhead=3) as null:
        target = Target.of(null.url)
        repeat = run(wave(target, LOAD, run(prepare(target, LOAD)), 1, 30.0, rounds=3))
    assert repeat is not None and len(repeat.samples) == 12 and repeat.in_flight_max == 4
    assert repeat.delivered_tokens == 12 * 8 and repeat.exact_output
    assert output_tok_s(repeat, LOAD) == pytest.approx(12 * 8 / repeat.seconds)
    # Three answers of 85 ms one after the other, by each of four streams that begin a little apart.
    assert repeat.seconds >= 3 * 0.085


def test_a_process_of_its_own_does_the_same_and_tells_when() -> None:
    moments: list[str] = []
    with serve_null(first_ms=50, interval_ms=5, tokens=8, overhead=3) as null:
        target = Target.of(null.url)
        prepared = run(prepare(target, LOAD))
        work = Work(target=target, load=LOAD, prepared=prepared, number=1, limit_s=30.0, rounds=2, check=True)
        repeat = wave_apart(work, moments.append)
        assert repeat is not None and len(repeat.samples) == 8 and moments == ["begin", "end"]
        assert repeat.client.error_p50_ms is not None and repeat.client.cpu_share > 0
        assert repeat.client.loop_lag_p99_ms > 0
        late = Work(target=target, load=LOAD, prepared=prepared, number=2, limit_s=0.02)
        assert wave_apart(late, moments.append) is None


def test_nobody_who_answers_is_said() -> None:
    prepared = Prepared(model="nobody", api="completions")
    work = Work(target=Target.of("http://127.0.0.1:9"), load=LOAD, prepared=prepared, number=1, limit_s=5.0)
    with pytest.raises(OutsideFailed, match="does not answer"):
        wave_apart(work, lambda moment: None)
