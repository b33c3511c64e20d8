"""`compare` and `diagnose` as people call them: names, files, pages, JSON and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.commands import invoke
from tests.judge.made_cells import Noise, make_pair
from tests.judge.made_engine import MadeEngine

from bedplate import store
from bedplate.facts.hardware import probe
from bedplate.values import from_json, replaced, to_json
from bedplate.values.diagnosis import Diagnosis
from bedplate.values.run import Cell, Environment, Quality, Run
from bedplate.values.verdict import Verdict


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path / "home"))


def run_of(*cells: Cell, id: str = "made", bandwidth: float | None = None) -> Run:
    machine = store.fingerprint(probe())
    environment = Environment(
        bedplate="0", python="3", system="linux", hardware="two cores", machine=machine, bandwidth_bytes_s=bandwidth
    )
    kept = tuple(replaced(cell, machine=machine, run=id) for cell in cells)
    return Run(id=id, at="2026-11-15T09:00:00Z", environment=environment, cells=kept, finished=True)


def pair(gain: float, engines: tuple[str, str] = ("llama.cpp", "vllm")) -> tuple[list[Cell], list[Cell]]:
    sides = make_pair(Noise(7, request=0.03, repeat=0.008, drift=0.01), gain, 5, (1, 4))
    named = [[called(name, cell) for cell in side] for name, side in zip(engines, sides, strict=True)]
    return named[0], named[1]


def called(engine: str, cell: Cell) -> Cell:
    return replaced(cell, id=f"{engine}-{cell.load.concurrency}", subject=replaced(cell.subject, engine=engine))


def kept(run: Run) -> Run:
    store.add_run(run)
    for cell in run.cells:
        store.add_cell(cell)
    return run


def file_of(path: Path, *cells: Cell, id: str = "made") -> str:
    path.write_text(to_json(run_of(*cells, id=id)))
    return str(path)


class TestCompare:
    @pytest.mark.parametrize(("gain", "code", "word"), [(1.3, 10, "Migrate to vllm"), (0.8, 0, "Stay with llama.cpp")])
    def test_engines_by_name(self, gain: float, code: int, word: str) -> None:
        one, other = pair(gain)
        kept(run_of(*one, *other))
        answer = invoke("compare", "llama.cpp", "vLLM")
        assert answer.code == code and word in answer.out and "4 in flight" in answer.out

    def test_the_last_verdict_is_kept_for_the_live_page(self) -> None:
        one, other = pair(1.3)
        run = kept(run_of(*one, *other))
        invoke("compare", "vllm", "llama.cpp")
        invoke("compare", "llama.cpp", "vllm")
        found = store.last_verdict(run.environment.machine, run.cells[0].subject.model)
        assert found is not None and (found[1].answer, found[1].b.engine) == ("migrate", "vllm")
        assert store.last_verdict("elsewhere", run.cells[0].subject.model) is None

    def test_files_and_json(self, tmp_path: Path) -> None:
        one, other = pair(1.3)
        names = file_of(tmp_path / "a.json", *one), file_of(tmp_path / "b.json", *other)
        answer = invoke("compare", *names, "--json")
        assert answer.code == 10 and from_json(Verdict, answer.out).answer == "migrate"

    def test_not_proven_is_20(self, tmp_path: Path) -> None:
        one, other = pair(1.3)
        unchecked = [replaced(cell, quality=Quality()) for cell in other]
        answer = invoke("compare", file_of(tmp_path / "a.json", *one), file_of(tmp_path / "b.json", *unchecked))
        assert answer.code == 20 and "Not proven" in answer.out and "Evidence that would settle it" in answer.out

    def test_parts_of_one_run_and_single_cells(self) -> None:
        one, other = pair(1.3)
        kept(run_of(*one, *other, id="20261115-a"))
        assert invoke("compare", "20261115-a:llama.cpp", "20261115-a:vllm").code == 10
        assert invoke("compare", one[0].id, other[0].id).code == 10
        whole = invoke("compare", "20261115-a", "vllm")
        assert whole.code == 2 and "several engines: llama.cpp, vllm" in whole.err

    def test_one_load_only(self) -> None:
        one, other = pair(1.3)
        kept(run_of(*one, *other))
        answer = invoke("compare", "llama.cpp", "vllm", "--concurrency", "4", "--json")
        assert {effect["load"]["concurrency"] for effect in json.loads(answer.out)["effects"]} == {4}
        assert invoke("compare", "llama.cpp", "vllm", "--concurrency", "64").code == 2

    def test_the_options_change_the_answer(self) -> None:
        one, other = pair(1.3)
        kept(run_of(*one, *other))
        assert invoke("compare", "llama.cpp", "vllm", "--least-gain", "50").code == 0
        answer = invoke("compare", "llama.cpp", "vllm", "--slo", "ttft_ms=1")
        assert answer.code == 20 and "Neither meets" in answer.out
        assert invoke("compare", "llama.cpp", "vllm", "--slo", "nonsense").code == 2

    def test_of_several_models_the_newest_that_both_have(self) -> None:
        one, other = pair(1.3)
        newer = [replaced(one[0], id="x", at="2026-11-16T09:00:00Z", subject=replaced(one[0].subject, model="another"))]
        kept(run_of(*one, *other))
        kept(run_of(*newer, id="later"))
        assert invoke("compare", "llama.cpp", "vllm").code == 10

    @pytest.mark.parametrize("name", ["nothing", "sglang", "nowhere.json", "made:tgi"])
    def test_what_is_not_there(self, name: str) -> None:
        kept(run_of(*pair(1.3)[0]))
        answer = invoke("compare", name, "llama.cpp")
        assert answer.code == 2 and "Traceback" not in answer.err

    @pytest.mark.parametrize("text", ["", "{}", "[1, 2]", '{"schema": "run/1"}', '{"schema": "cell/1"}', "\x00\xff"])
    def test_files_that_are_no_runs(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "odd.json"
        path.write_text(text)
        answer = invoke("compare", str(path), str(path))
        assert answer.code == 2 and "odd.json" in answer.err


class TestDiagnose:
    def test_the_newest_run_by_default_with_what_was_measured_of_the_machine(self) -> None:
        engine = MadeEngine(slots=1, token_ms=0.05)
        kept(run_of(*engine.cells(1, 8), bandwidth=20e9))
        answer = invoke("diagnose")
        assert answer.code == 0 and "Scheduler is the bottleneck with 8 in flight" in answer.out
        assert "--parallel 8" in answer.out and "GB/s measured here" in answer.out

    def test_json_and_one_engine_of_a_file(self, tmp_path: Path) -> None:
        name = file_of(tmp_path / "a.json", *MadeEngine(slots=1, token_ms=0.05).cells(1, 8), *pair(1.0)[1])
        whole = from_json(Diagnosis, invoke("diagnose", name, "--json").out)
        assert [one.engine for one in whole.bottlenecks] == ["llama.cpp", "vllm"]
        one = from_json(Diagnosis, invoke("diagnose", name, "--engine", "llama.cpp", "--json").out)
        assert [each.engine for each in one.bottlenecks] == ["llama.cpp"]
        assert invoke("diagnose", name, "--engine", "sglang").code == 2

    def test_an_engines_newest_run(self) -> None:
        kept(run_of(*MadeEngine(slots=1, token_ms=0.05).cells(8), id="old"))
        new = [replaced(cell, id="new", at="2026-11-16T09:00:00Z") for cell in MadeEngine(prompt=1024).cells(1)]
        kept(run_of(*new, id="new"))
        found = from_json(Diagnosis, invoke("diagnose", "llama.cpp", "--json").out)
        assert found.runs == ("new",) and found.bottlenecks[0].limit == "compute"

    def test_nothing_was_measured(self) -> None:
        answer = invoke("diagnose")
        assert answer.code == 2 and "bedplate bench" in answer.err

    def test_a_run_without_cells_says_so(self) -> None:
        kept(run_of())
        assert invoke("diagnose").code == 2


class TestVersions:
    def test_one_engine_in_two_versions(self) -> None:
        one, other = pair(1.3, ("vllm", "vllm"))
        older = [replaced(cell, id=f"old-{cell.id}", subject=replaced(cell.subject, engine_version="0.26.0"))
                 for cell in one]  # fmt: skip
        newer = [replaced(cell, subject=replaced(cell.subject, engine_version="0.32.0")) for cell in other]
        kept(run_of(*older, *newer))
        answer = invoke("compare", "vllm@0.26.0", "vLLM@0.32.0")
        assert answer.code == 10 and "vllm 0.26.0" in answer.out and "vllm 0.32.0" in answer.out
        assert invoke("compare", "made:vllm@0.26.0", "made:vllm@0.32.0").code == 10
        missing = invoke("compare", "vllm@0.26.0", "vllm@0.27.0")
        assert missing.code == 2 and "0.32.0, 0.26.0" in missing.err
