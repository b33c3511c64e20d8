"""`compare` and `diagnose` on the command line: names, files, pages, JSON and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.commands import invoke
from tests.judge.made_cells import Noise, make_pair
from tests.judge.made_engine import MadeEngine

from bedplate import store
from bedplate.facts.hardware import probe
from bedplate.values import from_json, replace_fields, to_json
from bedplate.values.diagnosis import Diagnosis
from bedplate.values.run import Cell, Quality, Run, RunEnvironment
from bedplate.values.verdict import Verdict


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path / "home"))


def make_run(*cells: Cell, id: str = "made", bandwidth: float | None = None) -> Run:
    machine = store.compute_fingerprint(probe())
    environment = RunEnvironment(
        bedplate="0", python="3", system="linux", hardware="two cores", machine=machine, bandwidth_bytes_s=bandwidth
    )
    kept = tuple(replace_fields(cell, machine=machine, run=id) for cell in cells)
    return Run(id=id, at="2026-11-15T09:00:00Z", environment=environment, cells=kept, finished=True)


def make_sides(gain: float, engines: tuple[str, str] = ("llama.cpp", "vllm")) -> tuple[list[Cell], list[Cell]]:
    sides = make_pair(Noise(7, request=0.03, repeat=0.008, drift=0.01), gain, 5, (1, 4))
    named = [[rename_engine(name, cell) for cell in side] for name, side in zip(engines, sides, strict=True)]
    return named[0], named[1]


def rename_engine(engine: str, cell: Cell) -> Cell:
    return replace_fields(
        cell, id=f"{engine}-{cell.load.concurrency}", subject=replace_fields(cell.subject, engine=engine)
    )


def store_run(run: Run) -> Run:
    store.add_run(run)
    for cell in run.cells:
        store.add_cell(cell)
    return run


def write_run_file(path: Path, *cells: Cell, id: str = "made") -> str:
    path.write_text(to_json(make_run(*cells, id=id)))
    return str(path)


class TestCompare:
    @pytest.mark.parametrize(("gain", "code", "word"), [(1.3, 10, "Migrate to vllm"), (0.8, 30, "Stay with llama.cpp")])
    def test_engines_are_compared_by_name(self, gain: float, code: int, word: str) -> None:
        one, other = make_sides(gain)
        store_run(make_run(*one, *other))
        answer = invoke("compare", "llama.cpp", "vLLM")
        assert answer.code == code and word in answer.out and "4 in flight" in answer.out

    def test_the_last_verdict_is_stored_for_the_live_page(self) -> None:
        one, other = make_sides(1.3)
        run = store_run(make_run(*one, *other))
        invoke("compare", "vllm", "llama.cpp")
        invoke("compare", "llama.cpp", "vllm")
        found = store.read_last_verdict(run.environment.machine, run.cells[0].subject.model)
        assert found is not None and (found[1].answer, found[1].b.engine) == ("migrate", "vllm")
        assert store.read_last_verdict("elsewhere", run.cells[0].subject.model) is None

    def test_run_files_are_compared_as_json(self, tmp_path: Path) -> None:
        one, other = make_sides(1.3)
        names = write_run_file(tmp_path / "a.json", *one), write_run_file(tmp_path / "b.json", *other)
        answer = invoke("compare", *names, "--json")
        assert answer.code == 10 and from_json(Verdict, answer.out).answer == "migrate"

    def test_not_proven_exits_with_20(self, tmp_path: Path) -> None:
        one, other = make_sides(1.3)
        unchecked = [replace_fields(cell, quality=Quality()) for cell in other]
        answer = invoke(
            "compare", write_run_file(tmp_path / "a.json", *one), write_run_file(tmp_path / "b.json", *unchecked)
        )
        assert answer.code == 20 and "Not proven" in answer.out and "Evidence that would settle it" in answer.out

    def test_worse_than_the_baseline_exits_with_30(self) -> None:
        one, other = make_sides(0.9)
        store_run(make_run(*one, *other))
        answer = invoke("compare", "made:llama.cpp", "made:vllm")
        assert answer.code == 30 and "Worse than the baseline (tolerance 5 %)" in answer.out
        assert invoke("compare", "made:llama.cpp", "made:vllm", "--tolerance", "30").code == 0
        assert invoke("compare", "made:vllm", "made:llama.cpp", "--least-gain", "5").code == 10, "the other way round"

    def test_engines_of_one_file(self, tmp_path: Path) -> None:
        one, other = make_sides(0.9)
        run = write_run_file(tmp_path / "run.json", *one, *other)
        answer = invoke("compare", f"{run}:llama.cpp", f"{run}:vllm")
        assert answer.code == 30 and "Worse than the baseline (tolerance 5 %)" in answer.out
        absent = invoke("compare", f"{run}:llama.cpp", f"{run}:sglang")
        assert absent.code == 2 and "sglang was not measured in this run" in absent.err

    def test_a_metric_decides_and_its_verdict_is_not_stored(self) -> None:
        one, other = make_sides(0.4)
        run = store_run(make_run(*one, *other))
        found = from_json(Verdict, invoke("compare", "llama.cpp", "vllm", "--metric", "quality", "--json").out)
        assert (found.metrics, found.worse, found.exit_code) == (("quality",), None, 0)
        slow = invoke("compare", "llama.cpp", "vllm", "--metric", "quality", "--metric", "tpot_p95")
        assert slow.code == 30 and "TPOT p95" in slow.out
        missing = invoke("compare", "llama.cpp", "vllm", "--metric", "schema")
        assert missing.code == 20 and "one side has no result for structured output" in " ".join(missing.out.split())
        assert store.read_last_verdict(run.environment.machine, run.cells[0].subject.model) is None
        assert invoke("compare", "llama.cpp", "vllm", "--metric", "speed").code == 2

    def test_parts_of_a_run_and_single_cells_are_compared(self) -> None:
        one, other = make_sides(1.3)
        store_run(make_run(*one, *other, id="20261115-a"))
        assert invoke("compare", "20261115-a:llama.cpp", "20261115-a:vllm").code == 10
        assert invoke("compare", one[0].id, other[0].id).code == 10
        whole = invoke("compare", "20261115-a", "vllm")
        assert whole.code == 2 and "several engines: llama.cpp, vllm" in whole.err

    def test_concurrency_selects_one_load(self) -> None:
        one, other = make_sides(1.3)
        store_run(make_run(*one, *other))
        answer = invoke("compare", "llama.cpp", "vllm", "--concurrency", "4", "--json")
        assert {effect["load"]["concurrency"] for effect in json.loads(answer.out)["effects"]} == {4}
        assert invoke("compare", "llama.cpp", "vllm", "--concurrency", "64").code == 2

    def test_least_gain_and_slo_change_the_answer(self) -> None:
        one, other = make_sides(1.3)
        store_run(make_run(*one, *other))
        assert invoke("compare", "llama.cpp", "vllm", "--least-gain", "50").code == 0
        answer = invoke("compare", "llama.cpp", "vllm", "--slo", "ttft_ms=1")
        assert answer.code == 20 and "Neither meets" in answer.out
        assert invoke("compare", "llama.cpp", "vllm", "--slo", "nonsense").code == 2

    def test_the_newest_common_model_is_compared(self) -> None:
        one, other = make_sides(1.3)
        newer = [
            replace_fields(
                one[0], id="x", at="2026-11-16T09:00:00Z", subject=replace_fields(one[0].subject, model="another")
            )
        ]
        store_run(make_run(*one, *other))
        store_run(make_run(*newer, id="later"))
        assert invoke("compare", "llama.cpp", "vllm").code == 10

    @pytest.mark.parametrize("name", ["nothing", "sglang", "nowhere.json", "made:tgi"])
    def test_an_unknown_name_is_a_usage_error(self, name: str) -> None:
        store_run(make_run(*make_sides(1.3)[0]))
        answer = invoke("compare", name, "llama.cpp")
        assert answer.code == 2 and "Traceback" not in answer.err

    @pytest.mark.parametrize("text", ["", "{}", "[1, 2]", '{"schema": "run/1"}', '{"schema": "cell/1"}', "\x00\xff"])
    def test_an_invalid_run_file_is_a_usage_error(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "odd.json"
        path.write_text(text)
        answer = invoke("compare", str(path), str(path))
        assert answer.code == 2 and "odd.json" in answer.err


class TestDiagnose:
    def test_the_newest_run_is_diagnosed_with_the_measured_bandwidth(self) -> None:
        engine = MadeEngine(slots=1, token_ms=0.05)
        store_run(make_run(*engine.cells(1, 8), bandwidth=20e9))
        answer = invoke("diagnose")
        assert answer.code == 0 and "Scheduler is the bottleneck with 8 in flight" in answer.out
        assert "--parallel 8" in answer.out and "GB/s measured here" in answer.out

    def test_engine_selects_one_engine_of_a_file(self, tmp_path: Path) -> None:
        name = write_run_file(tmp_path / "a.json", *MadeEngine(slots=1, token_ms=0.05).cells(1, 8), *make_sides(1.0)[1])
        whole = from_json(Diagnosis, invoke("diagnose", name, "--json").out)
        assert [one.engine for one in whole.bottlenecks] == ["llama.cpp", "vllm"]
        one = from_json(Diagnosis, invoke("diagnose", name, "--engine", "llama.cpp", "--json").out)
        assert [each.engine for each in one.bottlenecks] == ["llama.cpp"]
        assert invoke("diagnose", name, "--engine", "sglang").code == 2

    def test_an_engine_name_selects_its_newest_run(self) -> None:
        store_run(make_run(*MadeEngine(slots=1, token_ms=0.05).cells(8), id="old"))
        new = [replace_fields(cell, id="new", at="2026-11-16T09:00:00Z") for cell in MadeEngine(prompt=1024).cells(1)]
        store_run(make_run(*new, id="new"))
        found = from_json(Diagnosis, invoke("diagnose", "llama.cpp", "--json").out)
        assert found.runs == ("new",) and found.bottlenecks[0].limit == "compute"

    def test_diagnose_without_runs_is_a_usage_error(self) -> None:
        answer = invoke("diagnose")
        assert answer.code == 2 and "bedplate bench" in answer.err

    def test_diagnose_without_cells_is_a_usage_error(self) -> None:
        store_run(make_run())
        assert invoke("diagnose").code == 2


class TestVersions:
    def test_two_versions_of_one_engine_are_compared(self) -> None:
        one, other = make_sides(1.3, ("vllm", "vllm"))
        older = [replace_fields(cell, id=f"old-{cell.id}", subject=replace_fields(cell.subject,
        engine_version="0.26.0"))
                 for cell in one]  # fmt: skip
        newer = [replace_fields(cell, subject=replace_fields(cell.subject, engine_version="0.32.0")) for cell in other]
        store_run(make_run(*older, *newer))
        answer = invoke("compare", "vllm@0.26.0", "vLLM@0.32.0")
        assert answer.code == 10 and "vllm 0.26.0" in answer.out and "vllm 0.32.0" in answer.out
        assert invoke("compare", "made:vllm@0.26.0", "made:vllm@0.32.0").code == 10
        missing = invoke("compare", "vllm@0.26.0", "vllm@0.27.0")
        assert missing.code == 2 and "0.32.0, 0.26.0" in missing.err
