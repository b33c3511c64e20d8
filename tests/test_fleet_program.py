"""The fleet program without engines: order, time budget, table and exit code."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import have_ended, wait_for
from tests.fleet import __main__ as program
from tests.fleet import checks
from tests.fleet.checks import Endpoint, NearTie, OutOfTime, Wrong
from tests.fleet.serving import Serving
from tests.fleet.table import (
    CHECKS,
    EXPECTED_S,
    ORDER,
    USUAL_S,
    Budget,
    Fleet,
    Mark,
    Row,
    exit_code,
    list_footnotes,
    sort_engines,
    table,
)
from tests.measure.samples_of_agreement import make_plan

from bedplate.engines import load_engines
from bedplate.facts.hardware import probe
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.measure.agreement import is_position_sensitive
from bedplate.measure.reference import read_shipped_references
from bedplate.run.prepare import get_prepared_dir

OK = Mark(state="ok")
ROOT = Path(__file__).parents[1]


def make_row(engine: str = "llama.cpp", **marks: Mark) -> Row:
    return Row(engine=engine, version="1", weights="Q4_1", marks={**dict.fromkeys(CHECKS, OK), **marks})


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class TestOrder:
    def test_fast_engines_run_first_and_vllm_last(self) -> None:
        assert sort_engines(["vllm", "onnxruntime", "llama.cpp", "sglang", "mlx"]) == [
            "llama.cpp", "mlx", "onnxruntime", "sglang", "vllm",
        ]  # fmt: skip

    @given(names=st.permutations([*ORDER, "somebody's", "another"]))
    def test_unknown_engines_run_before_the_slow_ones(self, names: list[str]) -> None:
        assert sort_engines(names) == [*ORDER[:-2], "another", "somebody's", *ORDER[-2:]]

    def test_every_ordered_engine_exists_and_has_an_expected_time(self) -> None:
        assert set(ORDER) == set(EXPECTED_S) and set(ORDER) <= set(load_engines())


class TestBudget:
    def test_an_engine_runs_if_it_can_finish_in_time(self) -> None:
        clock = Clock()
        budget = Budget(EXPECTED_S["vllm"] + 100, clock)
        assert budget.why_not("vllm") is None
        clock.now += 100
        assert budget.why_not("vllm") is None
        clock.now += 1
        assert str(budget.why_not("vllm")).startswith("no time left: about ")

    def test_expected_times_grow_with_slow_engines(self) -> None:
        clock = Clock()
        budget = Budget(10_000, clock)
        budget.took("llama.cpp", 3 * EXPECTED_S["llama.cpp"])
        assert budget.expects_s("vllm") == 3 * EXPECTED_S["vllm"]
        clock.now += 10_000 - 2 * EXPECTED_S["vllm"]
        assert budget.why_not("vllm") is not None

    def test_expected_times_do_not_shrink_with_fast_engines(self) -> None:
        budget = Budget(1000)
        budget.took("llama.cpp", 1)
        assert budget.expects_s("vllm") == EXPECTED_S["vllm"] and budget.expects_s("somebody's") == USUAL_S


class TestTable:
    def test_every_engine_has_a_line_and_every_check_a_mark(self) -> None:
        found = table(
            [make_row(), make_row("mlx", schema=Mark(state="none"), agreement=Mark(state="ok", shown="301 of 560"))]
        )
        head, first, second = found.splitlines()
        assert all(name in head for name in CHECKS)
        assert first.split()[:3] == ["llama.cpp", "1", "Q4_1"] and first.count("ok") == len(CHECKS)
        assert "301 of 560" in second and "–" in second and second.count("ok") == len(CHECKS) - 2

    def test_columns_are_aligned_with_their_headings(self) -> None:
        head, first = table([make_row(restart=Mark(state="failed"))]).splitlines()
        assert head.index("restart") == first.index("FAILED")

    def test_an_engine_that_did_not_run_has_a_reason(self) -> None:
        found = table([make_row(), Row(engine="vllm", not_run="no time left: about 6 min are needed")])
        assert found.splitlines()[-1] == "vllm  not run: no time left: about 6 min are needed"

    def test_an_unreached_check_is_not_a_success(self) -> None:
        assert table([Row(engine="mlx", marks={"answer": Mark(state="failed")})]).count("not run") == len(CHECKS) - 1

    def test_unknown_figures_are_question_marks(self) -> None:
        first = table([make_row()]).splitlines()[1]
        assert first.count("?") == 6

    def test_footnotes_explain_failed_and_incomplete_checks(self) -> None:
        rows = [
            make_row(
                "mlx", schema=Mark(state="none", why="it has none"), cancel=Mark(state="failed", why="it went on")
            ),
            make_row("vllm", agreement=Mark(state="cut short", shown="80 of 80", why="no time left for 480 prefixes")),
        ]
        assert list_footnotes(rows) == [
            "mlx: cancel: it went on",
            "vllm: agreement: no time left for 480 prefixes",
        ]


class TestExitCode:
    def test_any_failed_check_gives_exit_code_1(self) -> None:
        assert exit_code([make_row(), make_row("mlx", stop=Mark(state="failed"))]) == 1

    def test_missing_features_near_ties_and_lack_of_time_are_not_failures(self) -> None:
        rows = [
            make_row(schema=Mark(state="none")),
            make_row("mlx", **{"4 at once": Mark(state="near tie"), "agreement": Mark(state="cut short")}),
            Row(engine="vllm", not_run="no time left"),
        ]
        assert exit_code(rows) == exit_code([]) == 0

    def test_the_evidence_of_a_failure_is_printed(self) -> None:
        failed = make_row(answer=Mark(state="failed", why="it said 'Rome'"))
        failed.evidence = "the last words of its log"
        fleet = Fleet(machine="a machine", rows=[failed], cannot_run={"tgi": "needs a GPU"}, seconds=121.0)
        shown = program.render(fleet)
        assert "llama.cpp: answer: it said 'Rome'" in shown and "the last words of its log" in shown
        assert "tgi cannot run here: needs a GPU" in shown and "2 min 01 s in all" in shown


class TestCandidates:
    def test_every_engine_runs_or_has_a_reason(self) -> None:
        able, unable = program.list_candidates(probe(), None)
        assert set(able) | set(unable) == set(load_engines()) and not set(able) & set(unable)
        assert "llama.cpp" in able and all(unable.values())

    def test_a_machine_without_a_gpu_runs_cpu_engines(self) -> None:
        bare = make_simulated_hardware({"cpu": "AMD EPYC 9654", "ram_gb": 64, "os": "linux"})
        able, unable = program.list_candidates(bare, None)
        assert {"llama.cpp", "mistral.rs", "mlx", "pytorch", "onnxruntime", "vllm"} <= set(able)
        assert unable["exllamav3"] == "needs an NVIDIA GPU" and "tensorrt-llm" in unable

    def test_an_unknown_engine_is_a_usage_error(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert program.main(["--engines", "llama.ccp"]) == 2
        assert "did you mean llama.cpp?" in capsys.readouterr().err


class TestTurn:
    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    def turn(self, clock: Clock) -> program.EngineRun:
        return program.EngineRun(make_plan(), Budget(100, clock), None, lambda line: None)

    def make_failing_check(self, error: Exception) -> Callable[[], None]:
        def check() -> None:
            raise error

        return check

    @pytest.mark.parametrize("error", [Wrong("it said no"), OSError("no such port"), KeyError("choices")])
    def test_any_error_is_a_failure_with_its_reason(self, turn: program.EngineRun, error: Exception) -> None:
        assert not turn.check("usage", self.make_failing_check(error))
        mark = turn.row.marks["usage"]
        assert mark.state == "failed" and str(error.args[0]) in str(mark.why) and mark.seconds is not None
        assert exit_code([turn.row]) == 1

    def test_a_near_tie_and_lack_of_time_are_not_failures(self, turn: program.EngineRun) -> None:
        assert turn.check("4 at once", self.make_failing_check(NearTie("0.1 apart")))
        assert not turn.check("answer", self.make_failing_check(OutOfTime()))
        assert [turn.row.marks[name].state for name in ("4 at once", "answer")] == ["near tie", "cut short"]
        assert exit_code([turn.row]) == 0

    def test_a_check_may_return_a_mark(self, turn: program.EngineRun) -> None:
        assert turn.check("agreement", lambda: Mark(state="ok", shown="3 of 3")) and turn.check("usage", lambda: "x")
        assert turn.row.marks["agreement"].shown == "3 of 3" and turn.row.marks["usage"].state == "ok"

    def test_no_time_for_a_prefix_is_not_a_failure(
        self, turn: program.EngineRun, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tests.fleet.checks.choose_prefixes", lambda reference: [("a", "b")])
        clock.now += 100 - program.LAST_RESERVE_S
        endpoint, reference = cast(Any, None), cast(Any, None)
        assert not turn.check("agreement", lambda: turn._agreement(endpoint, reference))
        assert turn.row.marks["agreement"].state == "cut short" and exit_code([turn.row]) == 0

    def test_only_the_stop_check_runs_after_the_time_limit(self, turn: program.EngineRun, clock: Clock) -> None:
        clock.now += 101
        assert not turn.check("schema", lambda: None) and turn.check("stop", lambda: None)
        turn._second_start()
        assert {name: mark.state for name, mark in turn.row.marks.items()} == {
            "schema": "cut short", "stop": "ok", "again": "cut short", "restart": "cut short",
        }  # fmt: skip


class TestDisk:
    @pytest.fixture
    def home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path))
        return tmp_path

    def make_prepared(self, name: str, program: str) -> Path:
        folder = get_prepared_dir() / name
        folder.mkdir(parents=True)
        (folder / "bedplate.json").write_text(json.dumps({"argv": [program], "seconds": 1.5, "disk_bytes": 7}))
        return folder

    def test_clean_up_keeps_shared_weights_until_the_last_engine(self, home: Path) -> None:
        (home / "engines" / "mlx").mkdir(parents=True)
        shared, own = self.make_prepared("a", "gguf-to-folder"), self.make_prepared("b", "mlx_lm.convert")
        program.clean_up(home, last=False)
        assert shared.exists() and not own.exists() and not (home / "engines").exists()
        program.clean_up(home, last=True)
        assert not shared.exists()

    def test_hard_links_count_once(self, tmp_path: Path) -> None:
        (tmp_path / "one").write_bytes(b"x" * 100_000)
        once = program.disk_bytes(tmp_path)
        os.link(tmp_path / "one", tmp_path / "two")
        assert 100_000 <= once == program.disk_bytes(tmp_path)

    def test_the_home_is_empty_and_removed_afterwards(self) -> None:
        before = os.environ["BEDPLATE_HOME"]
        with program.fresh_home(keep=False) as home:
            assert os.environ["BEDPLATE_HOME"] == str(home) and not list(home.iterdir())
        assert not home.exists() and os.environ["BEDPLATE_HOME"] == before


class Scripted(Endpoint):
    """An endpoint that answers from a list and repeats the last answer."""

    def __init__(self, *texts: str, gap: float | None = None) -> None:
        super().__init__("", "m", None)
        object.__setattr__(self, "texts", list(texts))
        object.__setattr__(self, "gap", gap)

    def chat(self, question: str, **more: Any) -> Any:
        texts: list[str] = self.texts  # type: ignore[attr-defined]
        gap: float | None = self.gap  # type: ignore[attr-defined]
        text = texts.pop(0) if len(texts) > 1 else texts[0]
        top = [argparse.Namespace(logprob=-0.1), argparse.Namespace(logprob=-0.1 - (gap or 0))]
        content = [argparse.Namespace(token=letter, top_logprobs=top) for letter in text]
        told = argparse.Namespace(content=content) if gap is not None else None
        message = argparse.Namespace(content=text)
        return argparse.Namespace(choices=[argparse.Namespace(message=message, logprobs=told)])


def test_the_first_prefixes_are_distinctive_and_short() -> None:
    (reference,) = read_shipped_references()
    pairs = checks.choose_prefixes(reference)
    assert len(set(pairs)) == len(pairs) == len(reference.answers) > 1000
    telling = [known for _, known in pairs if is_position_sensitive(known)]
    assert len(telling) >= 10 and all(is_position_sensitive(known) for _, known in pairs[: len(telling)])
    assert sum(known.tokens for _, known in pairs[: program.LEAST_PREFIXES]) < 3500


class TestChecks:
    def test_a_wrong_capital_fails(self) -> None:
        assert checks.knows_the_capital(Scripted("It is Paris.")) == "It is Paris."
        with pytest.raises(Wrong, match="Rome"):
            checks.knows_the_capital(Scripted("It is Rome."))

    def test_equal_answers_alone_and_under_load_pass(self) -> None:
        checks.answers_four_at_once(Scripted("yes"), ["a?", "b?"])

    def test_a_different_answer_with_a_clear_gap_fails(self) -> None:
        with pytest.raises(Wrong, match=r"3\.00 less likely"):
            checks.answers_four_at_once(Scripted("yes", "yet", "yes", gap=3.0), ["a?"])

    def test_a_different_answer_without_logprobs_fails(self) -> None:
        with pytest.raises(Wrong, match="is unknown"):
            checks.answers_four_at_once(Scripted("yes", "yet", "yes"), ["a?"])

    def test_a_near_tie_is_reported_with_its_evidence(self) -> None:
        with pytest.raises(NearTie, match=r"'yes'.*'yet'.*0\.05"):
            checks.answers_four_at_once(Scripted("yes", "yet", "yes", gap=0.05), ["a?"])

    def test_an_empty_answer_fails(self) -> None:
        with pytest.raises(Wrong, match="empty"):
            checks.answers_four_at_once(Scripted(" "), ["a?"])

    @pytest.mark.parametrize("text", ["no JSON", "[]", '{"city": "Berlin"}', '"Paris"'])
    def test_an_answer_that_violates_the_schema_fails(self, text: str) -> None:
        with pytest.raises(Wrong, match="the answer is"):
            checks.fits_a_schema(Scripted(text))
        checks.fits_a_schema(Scripted('{"city": "Paris"}'))


class Stub(Serving):
    """A Serving around a program that the test defines."""

    def __init__(self, code: str) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def stub(request: pytest.FixtureRequest) -> Iterator[Stub]:
    one = Stub(request.param)
    yield one
    one.end()


CLEAN = "import signal, sys; signal.signal(15, lambda *_: sys.exit(0)); print('on', flush=True); signal.pause()"
UNCLEAN = "import signal; print('on', flush=True); signal.pause()"
LEAVES = (
    "import signal, subprocess, sys; signal.signal(15, lambda *_: sys.exit(0));"
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); print('on', flush=True); signal.pause()"
)


class TestStopping:
    @pytest.mark.parametrize("stub", [CLEAN], indirect=True)
    def test_exit_code_0_passes(self, stub: Stub) -> None:
        stub.stop()

    @pytest.mark.parametrize("stub", [UNCLEAN], indirect=True)
    def test_another_exit_code_fails(self, stub: Stub) -> None:
        with pytest.raises(Wrong, match=f"status -{int(signal.SIGTERM)}"):
            stub.stop()

    @pytest.mark.parametrize("stub", [LEAVES], indirect=True)
    def test_leftover_processes_fail_and_are_killed(self, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tests.fleet.serving.LEFT_LIMIT_S", 0.5)
        below = stub.descendants()
        with pytest.raises(Wrong, match="left processes behind"):
            stub.stop()
        assert below
        wait_for(lambda: have_ended(below), "what was left to be ended")


def test_make_fleet_runs_this_program() -> None:
    said = subprocess.run(["make", "-n", "fleet", "ARGS=--engines mlx"], cwd=ROOT, capture_output=True, text=True)
    assert "-m tests.fleet --engines mlx" in said.stdout
