"""The bottleneck and the predicted gain from removing it, on a simulated engine with known limits.

test_real_limits.py does the same with a real engine.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.judge.made_cells import make_cell, make_repeat, make_sample
from tests.judge.made_engine import MadeEngine, exactly, the_shape

import bedplate.engines
from bedplate.engines import load_engines
from bedplate.judge.diagnose import Roofline, diagnose, diagnose_subject, group_by_subject
from bedplate.measure.flags import flag_cell
from bedplate.values import from_json, replace_fields, to_json
from bedplate.values.decision import Parallelism
from bedplate.values.diagnosis import Bottleneck, Diagnosis
from bedplate.values.run import Cell, ClientAccuracy, EngineSeries, ResourceUse

WITHIN = 0.3
"""Allowed relative error of a predicted gain."""


def find_bottleneck(engine: MadeEngine, *loads: int, cores: int = 2) -> Bottleneck:
    return diagnose_subject(engine.cells(*(loads or (1, 4, 8))), engine.ground(cores))


def find_gain(found: Bottleneck) -> float:
    return next(one.gain.value for one in found.predictions if one.metric == "output_tok_s")


class TestDisturbedCells:
    def disturb(self, cell: Cell) -> Cell:
        use = ResourceUse(other_cpu_share=0.34, peak_memory_bytes=1)
        repeats = tuple(replace_fields(repeat, use=use) for repeat in cell.repeats)
        cell = replace_fields(cell, repeats=repeats)
        return replace_fields(cell, flags=flag_cell(cell))

    def test_other_processes_are_reported_instead_of_a_bottleneck(self) -> None:
        engine = MadeEngine(token_ms=0.02, read_ms=20.0)
        assert diagnose_subject(engine.cells(1, 4), engine.ground(2)).limit == "memory bandwidth"
        found = diagnose_subject([self.disturb(cell) for cell in engine.cells(1, 4)], engine.ground(2))
        assert found.limit is None and "other processes used the machine (34% of the CPU)" in found.text
        assert [one.limit for one in found.loads] == [None, None] and not found.evidence and not found.predictions
        assert [(one.kind, "no other process" in one.text) for one in found.changes] == [("measure", True)]

    def test_an_undisturbed_load_keeps_its_bottleneck(self) -> None:
        engine = MadeEngine(token_ms=0.02, read_ms=20.0)
        light, heavy = engine.cells(1, 4)
        found = diagnose_subject([light, self.disturb(heavy)], engine.ground(2))
        assert [one.limit for one in found.loads] == ["memory bandwidth", None]
        assert found.limit == "memory bandwidth" and "1 request at a time" in found.text


class TestEachLimit:
    def test_slow_weight_reads_are_memory_bandwidth(self) -> None:
        found = find_bottleneck(MadeEngine(token_ms=0.02, read_ms=20.0), 1, 4)
        assert found.limit == "memory bandwidth"
        assert found.loads[0].bandwidth_share == pytest.approx(0.97, abs=0.04)
        assert any(one.limit == "memory bandwidth" for one in found.evidence)
        assert found.changes[-1].kind == "hardware"

    def test_long_prompts_are_compute(self) -> None:
        found = find_bottleneck(MadeEngine(prompt=1024, tokens=16))
        assert found.limit == "compute" and found.loads[0].limit == "compute" and found.loads[-1].clear
        assert "prompts" in found.changes[0].text

    def test_steps_that_grow_with_the_batch_are_compute(self) -> None:
        found = find_bottleneck(MadeEngine(token_ms=3.0, prompt=8, tokens=64))
        assert found.limit == "compute"
        assert any("for each added stream" in one.text and one.limit == "compute" for one in found.evidence)

    def test_too_few_slots_are_scheduler(self) -> None:
        found = find_bottleneck(MadeEngine(slots=1, token_ms=0.05, prompt=32), 1, 8)
        assert found.limit == "scheduler" and found.changes[0].flag == "--parallel 8"
        assert any("1 slots for 8" in one.text for one in found.evidence)

    def test_too_few_slots_are_scheduler_without_engine_metrics(self) -> None:
        engine = MadeEngine(slots=1, token_ms=0.05, prompt=32, tells=False)
        found = find_bottleneck(engine, 1, 16)
        assert found.limit == "scheduler" and any("report waiting requests" in one for one in found.unknown)

    def test_a_small_cache_is_kv_cache(self) -> None:
        found = find_bottleneck(MadeEngine(cache_requests=2, token_ms=0.05, prompt=32), 1, 8)
        assert found.limit == "KV cache" and found.changes[0].flag == "--ctx-size"
        assert any("preemptions" in one.text and one.limit == "KV cache" for one in found.evidence)

    def test_a_slow_runtime_is_runtime_overhead(self) -> None:
        found = find_bottleneck(MadeEngine(own_ms=40.0, token_ms=0.05))
        assert found.limit == "runtime overhead" and found.changes[0].kind == "engine"
        assert any("times its lower bound" in one.text and one.limit == "runtime overhead" for one in found.evidence)

    def test_more_threads_than_cores_are_runtime_overhead(self) -> None:
        found = find_bottleneck(MadeEngine(own_ms=40.0, token_ms=0.05, threads=8))
        assert found.limit == "runtime overhead" and found.changes[0].flag == "--threads 2"
        assert find_bottleneck(MadeEngine(own_ms=40.0, token_ms=0.05, threads=8), cores=8).changes[0].kind == "engine"

    def test_slow_links_are_interconnect(self) -> None:
        engine = MadeEngine(read_ms=1.0, own_ms=9.0, token_ms=0.05, prompt=8)
        cells = [
            replace_fields(cell, subject=replace_fields(cell.subject, device="cuda", parallelism=Parallelism(tensor=4)))
            for cell in engine.cells(1, 8)
        ]
        ground = engine.ground()._replace(device="cuda", link_bytes_s=5e6)
        found = diagnose_subject(cells, ground)
        assert found.limit == "interconnect" and "replicas" in found.changes[0].text
        assert any(one.limit == "interconnect" for one in found.evidence)

    def test_a_cache_that_takes_longer_to_read_than_the_weights_is_kv_cache(self) -> None:
        engine = MadeEngine(prompt=7000, tokens=64, token_ms=0.0005, read_ms=2.0, own_ms=0.1, stream_ms=4.0)
        found = find_bottleneck(engine, 1, 16)
        assert found.limit == "KV cache" and any("8-bit" in one.text for one in found.changes)


class TestNamedBefore:
    """The live page names the bottleneck that it named before, until another one is clear."""

    @pytest.mark.parametrize(("own_ms", "stays"), [(3.6, True), (4.4, True), (8.0, False)])
    def test_it_stays_until_another_one_is_clear(self, own_ms: float, stays: bool) -> None:
        engine = MadeEngine(read_ms=4.0, own_ms=own_ms, token_ms=0.01, prompt=8, tokens=64)
        cells, ground = engine.cells(1), engine.ground(2)
        first = diagnose_subject(cells, ground)
        found = diagnose_subject(cells, ground, "memory bandwidth")
        assert found.limit == ("memory bandwidth" if stays else "runtime overhead") and found.loads[0].clear != stays
        is_second = first.limit != "memory bandwidth"
        assert ("runtime overhead takes about as long" in found.text) == (stays and is_second)
        assert all(one.limit == found.limit for one in found.loads)

    def test_a_limit_that_takes_no_time_does_not_stay(self) -> None:
        engine = MadeEngine(read_ms=4.0, own_ms=3.6, token_ms=0.01, prompt=8, tokens=64)
        found = [diagnose_subject(engine.cells(1), engine.ground(2), named) for named in (None, "interconnect")]
        assert found[0] == found[1]


class TestPredictions:
    """The gain from removing the bottleneck matches the prediction."""

    @pytest.mark.parametrize("in_flight", [4, 8, 16])
    @pytest.mark.parametrize("slots", [1, 2])
    @pytest.mark.parametrize(("token_ms", "prompt"), [(0.05, 64), (1.0, 16), (0.5, 128)])
    def test_gain_from_more_slots(self, in_flight: int, slots: int, token_ms: float, prompt: int) -> None:
        engine = MadeEngine(slots=slots, token_ms=token_ms, prompt=prompt)
        found = find_bottleneck(engine, 1, in_flight)
        better = replace(engine, slots=16)
        assert found.limit == "scheduler"
        assert find_gain(found) == pytest.approx(better.tok_s(in_flight) / engine.tok_s(in_flight), rel=WITHIN)
        sooner = next(one.gain for one in found.predictions if one.metric == "ttft_ms")
        assert sooner.low <= engine.ttft_ms(in_flight) / better.ttft_ms(in_flight) <= sooner.high

    def test_gain_from_more_cache(self) -> None:
        engine = MadeEngine(cache_requests=2, token_ms=0.2, prompt=32)
        better = replace(engine, cache_requests=None)
        assert find_gain(find_bottleneck(engine, 1, 8)) == pytest.approx(better.tok_s(8) / engine.tok_s(8), rel=WITHIN)

    def test_gain_from_cached_prompts(self) -> None:
        engine = MadeEngine(prompt=512, token_ms=0.8)
        better = replace(engine, prompt=1)
        for load in (1, 4, 8):
            found = find_bottleneck(engine, *sorted({1, load}))
            assert find_gain(found) == pytest.approx(better.tok_s(load) / engine.tok_s(load), rel=WITHIN)

    def test_gain_from_less_overhead_is_within_the_band(self) -> None:
        engine = MadeEngine(own_ms=40.0, token_ms=0.05)
        real = replace(engine, own_ms=1.0).tok_s(4) / engine.tok_s(4)
        gain = find_bottleneck(engine, 1, 4).predictions[0].gain
        assert gain.low < real < gain.high * 1.05

    def test_gain_from_narrower_weights(self) -> None:
        engine = MadeEngine(token_ms=0.01, read_ms=20.0, prompt=16)
        wide = the_shape()._replace(dense_bytes=the_shape().dense_params * 2, bits=16.0)
        rate = wide.dense_bytes / (engine.read_ms / 1000)
        found = diagnose_subject(engine.cells(1), Roofline(shape=wide, bandwidth=exactly(rate), cores=2))
        assert found.limit == "memory bandwidth" and found.changes[0].kind == "quantization"
        real = replace(engine, read_ms=20.0 * 8.5 / 16).tok_s(1) / engine.tok_s(1)
        assert find_gain(found) == pytest.approx(real, rel=WITHIN)


class TestUnknown:
    def test_reports_that_the_bottleneck_is_unknown_without_a_bandwidth(self) -> None:
        engine = MadeEngine(own_ms=40.0, token_ms=0.05)
        found = diagnose_subject(engine.cells(1), Roofline(shape=the_shape()))
        assert found.limit is None and "cannot be determined" in found.text and "probe --measure" in found.text
        assert found.changes[0].kind == "measure"

    def test_reports_that_the_bottleneck_is_unknown_without_a_model_size(self) -> None:
        found = diagnose_subject(MadeEngine(own_ms=40.0).cells(1), Roofline(bandwidth=exactly(1e9)))
        assert found.limit is None and any("size of" in one for one in found.unknown)

    def test_finds_a_queue_without_bandwidth_and_model_size(self) -> None:
        assert diagnose_subject(MadeEngine(slots=1, token_ms=0.05).cells(8), Roofline()).limit == "scheduler"

    def test_reports_no_bottleneck_if_the_client_was_the_limit(self) -> None:
        cell = MadeEngine().cell(4)
        busy = replace_fields(cell, repeats=(replace_fields(cell.repeats[0], client=ClientAccuracy(limit=True)),))
        found = diagnose_subject([busy], MadeEngine().ground())
        assert found.limit is None and "the client was the bottleneck" in found.text

    @pytest.mark.parametrize(
        "cell",
        [
            make_cell("x", []),
            make_cell("x", [make_repeat([])]),
            make_cell("x", [make_repeat([make_sample(output_tokens=None)] * 9)]),
            make_cell("x", [make_repeat([make_sample(tokens=1)] * 9)]),
            make_cell("x", [make_repeat([make_sample(outcome="error")] * 9)]),
        ],
    )
    def test_reports_no_bottleneck_without_usable_requests(self, cell: Cell) -> None:
        found = diagnose_subject([cell], MadeEngine().ground())
        assert found.limit is None and found.loads[0].why

    def test_reports_that_no_single_request_was_measured(self) -> None:
        found = find_bottleneck(MadeEngine(prompt=1024, tokens=16), 8)
        assert found.limit == "compute" and any("no single request was measured" in one for one in found.unknown)

    @given(
        st.builds(
            MadeEngine, token_ms=st.floats(0.001, 5), read_ms=st.floats(0.1, 50), own_ms=st.floats(0, 50),
            slots=st.integers(1, 16), prompt=st.integers(1, 300), tokens=st.integers(2, 40), tells=st.booleans(),
        ),
        st.sampled_from([(1,), (4,), (1, 4), (1, 2, 8)]),
    )  # fmt: skip
    def test_parts_add_up_to_the_request_time_and_round_trip_as_json(
        self, engine: MadeEngine, loads: tuple[int, ...]
    ) -> None:
        cells = [engine.cell(load, requests=12) for load in loads]
        found = diagnose([(cells, engine.ground())])
        assert from_json(Diagnosis, to_json(found)) == found
        for load in found.bottlenecks[0].loads:
            assert load.request_ms is not None
            assert sum(one.ms for one in load.spent) == pytest.approx(load.request_ms, rel=0.02)
            assert all(one.ms >= 0 for one in load.spent)

    def test_groups_cells_by_settings(self) -> None:
        one, other = MadeEngine(slots=4), MadeEngine(slots=8)
        groups = group_by_subject([*one.cells(4, 1), *other.cells(1)])
        assert [[cell.load.concurrency for cell in group] for group in groups] == [[1, 4], [1]]

    def test_accepts_incomplete_engine_metrics(self) -> None:
        cell = MadeEngine(slots=2).cell(8)
        series = EngineSeries(scrapes=1, running_max=2.0)
        bare = replace_fields(cell, repeats=(replace_fields(cell.repeats[0], engine=series),))
        assert diagnose_subject([bare], MadeEngine().ground()).limit is not None


class TestFlags:
    @pytest.mark.parametrize("engine", sorted(load_engines()))
    def test_advised_flags_are_used_by_the_engine(self, engine: str) -> None:
        """Each is used elsewhere in the engine's own file, or in the server shipped into its environment."""
        folder = Path(inspect.getfile(bedplate.engines)).parent
        shipped = "".join(path.read_text() for path in (folder / "shipped").glob("*.py"))
        source = Path(inspect.getfile(type(load_engines()[engine]))).read_text()
        stated = re.search(
            r"    flags = AdviceFlags\(.*?\n    \)\n|    flags = AdviceFlags\([^\n]*\)\n", source, re.DOTALL
        )
        assert stated is not None
        used = source.replace(stated[0], "") + shipped
        flags = [flag for flag in msgspec.structs.astuple(load_engines()[engine].flags) if flag is not None]
        assert flags and [flag for flag in flags if flag.split()[0] not in used] == []

    def test_advised_flags_depend_on_the_device(self) -> None:
        vllm = load_engines()["vllm"]
        assert vllm.get_advice_flags("cpu").cache_memory == "--kv-cache-memory-bytes"
        assert vllm.get_advice_flags("cuda").cache_memory == "--gpu-memory-utilization"
        assert load_engines()["tensorrt-llm"].get_advice_flags(None).threads is None
