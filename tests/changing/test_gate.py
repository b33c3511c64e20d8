"""`gate`: the baseline that is measured again, the result of a measured run, and what is written for CI."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psutil
import pytest
from tests.commands import invoke
from tests.conftest import HANG_S, have_ended, wait_for
from tests.contract.documents import check_document
from tests.judge.made_cells import Noise, make_pair

from bedplate import store
from bedplate.changing import gate
from bedplate.changing.gate import GateRequest, find_baseline, judge_run
from bedplate.errors import ExternalFailure, UsageError
from bedplate.measure.bench import label_subject
from bedplate.run.environments import EngineEnvironment
from bedplate.show.gate import write_junit, write_markdown
from bedplate.values import Refusal, Settings, from_json, replace_fields, to_json
from bedplate.values.gate import GateResult
from bedplate.values.run import BenchMatrix, Cell, Flag, GateSide, Load, Quality, Role, Run, RunEnvironment

SETTINGS = Settings(slots=4, context_tokens=1024, threads=2)
VERSIONS = {"baseline": "1.0", "challenger": "2.0"}


@pytest.fixture
def empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def make_run(gain: float, loads: tuple[int, ...] = (4,), **changes: object) -> Run:
    """A run of a gate whose challenger is `gain` times as fast."""
    sides = make_pair(Noise(7, request=0.03, repeat=0.008, drift=0.01), gain, 8, loads)
    cells = [
        take_role(cell, role, **changes)
        for side, role in zip(sides, ("baseline", "challenger"), strict=True)
        for cell in side
    ]  # fmt: skip
    environment = RunEnvironment(bedplate="0", python="3", system="linux", hardware="two <cores>", machine="made-up")
    return Run(id="20261115-a", at="2026-11-15T09:00:00Z", environment=environment, cells=tuple(cells), finished=True)


def take_role(cell: Cell, role: str, **changes: object) -> Cell:
    subject = replace_fields(
        cell.subject, role=role, engine="llama.cpp", engine_version=VERSIONS[role], settings=SETTINGS
    )
    return replace_fields(cell, id=f"{role}-{cell.load.concurrency}", run="20261115-a", subject=subject, **changes)


def judge(run: Run, **asked: Any) -> GateResult:
    named = GateRequest("llama.cpp@1.0", **asked)
    return judge_run(run, named, find_baseline(named.baseline, "made-up"), 12.5)


# the result


@pytest.mark.parametrize(
    ("gain", "code", "head"), [(0.85, 30, "worse"), (1.0, 0, "no regression found"), (1.3, 10, "better")]
)
def test_a_result_has_the_exit_code_of_its_comparison(gain: float, code: int, head: str) -> None:
    result = judge(make_run(gain))
    assert (result.exit_code, result.rounds) == (code, 8)
    assert (result.baseline.engine_version, result.challenger.engine_version) == ("1.0", "2.0")
    assert write_markdown(result).startswith(f"### bedplate gate: {head}\n")
    assert from_json(GateResult, to_json(result)) == result


def test_markdown_lists_every_metric_and_marks_those_that_decide() -> None:
    text = write_markdown(judge(make_run(0.85), metrics=("tok_s", "ttft_p95")))
    rows = {line.split(" | ")[0].strip("| "): line for line in text.splitlines() if line.startswith("| ")}
    assert rows.keys() >= {"tok/s", "TTFT p95", "TPOT p95", "greedy-token agreement"}
    assert rows["tok/s"].endswith("| worse |") and rows["TPOT p95"].endswith("|  |")
    assert "two \\<cores\\>" in text or "two &lt;cores&gt;" in text, "names are escaped"
    assert "tolerance 5 %; decided by tok\\_s, ttft\\_p95" in text or "decided by tok_s, ttft_p95" in text


def test_junit_has_a_case_for_each_load_and_the_verdict() -> None:
    suite = ElementTree.fromstring(write_junit(judge(make_run(0.85, (1, 4)))))[0]
    cases = {case.get("name"): case for case in suite}
    assert suite.attrib | {"tests": "3", "failures": "3", "skipped": "0"} == suite.attrib
    assert list(cases) == [
        "tok/s, 1 request at a time, 64 + 32 tokens",
        "tok/s, 4 in flight, 64 + 32 tokens",
        "verdict",
    ]
    assert "% worse" in cases["verdict"][0].attrib["message"] and cases["verdict"][0].tag == "failure"
    equal = ElementTree.fromstring(write_junit(judge(make_run(1.0))))[0]
    assert equal.get("failures") == "0" and [part.tag for case in equal for part in case] == ["system-out"] * 2


def test_cells_that_cannot_be_compared_are_not_proven() -> None:
    busy = Flag(kind="busy", text="other processes used 60% of the CPU", invalid=True)
    result = judge(make_run(0.5, flags=(busy,)))
    assert (result.verdict, result.exit_code, result.effects) == (None, 20, ())
    assert "other processes used 60% of the CPU" in result.text and "other processes" in write_markdown(result)
    suite = ElementTree.fromstring(write_junit(result))[0]
    assert (suite.get("tests"), suite.get("skipped")) == ("1", "1")


def test_wrong_answers_of_the_challenger_are_worse() -> None:
    run = make_run(2.0)
    broken = Quality(asked=100, agreement=0.1, verdict="broken", note="text is garbled")
    cells = tuple(replace_fields(one, quality=broken) if one.subject.role == "challenger" else one for one in run.cells)
    result = judge(replace_fields(run, cells=cells))
    assert result.exit_code == 30 and "garbled" in write_markdown(result)


def test_a_side_without_cells_is_an_external_failure() -> None:
    run = make_run(1.0)
    left_out = (Refusal(engine="challenger", kind="impossible", why="it did not start"),)
    alone = replace_fields(run, cells=run.cells[:1], left_out=left_out)
    with pytest.raises(ExternalFailure, match="the challenger could not be measured") as caught:
        judge(alone)
    assert caught.value.cause == "it did not start"


# the baseline


def write_run(path: Path, run: Run) -> str:
    path.write_text(to_json(run))
    return str(path)


def test_an_engine_is_a_baseline_without_stored_loads() -> None:
    found = find_baseline("vLLM@v0.31.0", "here")
    assert (found.engine, found.side.engine, found.side.settings) == ("vllm@0.31.0", "vllm@0.31.0", None)
    assert find_baseline("llama.cpp", "here").loads == (Load(concurrency=4),)


def test_a_stored_baseline_gives_version_model_loads_and_settings(tmp_path: Path) -> None:
    run = make_run(1.0, (1, 4))
    run = replace_fields(run, matrix=BenchMatrix(model="some.gguf", engines=("llama.cpp",), loads=()))
    name = write_run(tmp_path / "baseline.json", replace_fields(run, cells=run.cells[2:]))
    found = find_baseline(name, "made-up")
    assert (found.engine, found.model) == ("llama.cpp@2.0", "some.gguf")
    assert [load.concurrency for load in found.loads] == [1, 4] and found.side.settings == SETTINGS
    assert all(one.output_tok_s for one in found.stored) and not found.notes
    assert find_baseline(name, "made-up", own_loads=False).side.settings is None
    elsewhere = find_baseline(name, "another machine")
    assert elsewhere.side.settings is None and "another machine" in elsewhere.notes[0]


def test_the_challenger_of_an_earlier_gate_is_a_baseline(tmp_path: Path, empty_home: Path) -> None:
    run = make_run(1.0)
    store.add_run(run)
    for cell in run.cells:
        store.add_cell(cell)
    assert find_baseline("20261115-a:llama.cpp", "made-up").engine == "llama.cpp@2.0"
    assert find_baseline(write_run(tmp_path / "gate.json", run), "made-up").engine == "llama.cpp@2.0"


def test_a_small_loss_is_within_the_tolerance_and_no_question_of_a_migration() -> None:
    """The other rows are for six metrics, whose intervals are wider than that of the verdict."""
    result = judge(make_run(0.97))
    page = write_markdown(result)
    assert result.exit_code == 0 and result.verdict is not None
    assert result.verdict.effects[0].sure_low > 0.95 > result.effects[0].sure_low
    (row,) = [line for line in page.splitlines() if line.startswith("| tok/s")]
    assert row.endswith("| within tolerance |") and "No loss of more than 5 % was found." in page
    assert "migration" not in page


@pytest.mark.parametrize("version", ["b5163", "../../x", "0.31.0 @ http://example.com/x.whl", "2.0+mine"])
def test_a_version_that_cannot_be_installed_is_refused(version: str, tmp_path: Path, empty_home: Path) -> None:
    """The pinned packages would be measured under its name."""
    run = make_run(1.0)
    cell = replace_fields(run.cells[1], subject=replace_fields(run.cells[1].subject, engine_version=version))
    for name in (write_run(tmp_path / "other.json", replace_fields(run, cells=(cell,))), f"llama.cpp@{version}"):
        with pytest.raises(UsageError, match="neither a release nor installed"):
            find_baseline(name, "made-up")


def test_a_baseline_that_cannot_be_measured_again_is_refused(tmp_path: Path, empty_home: Path) -> None:
    run = make_run(1.0)
    remote = replace_fields(
        run.cells[1], subject=replace_fields(run.cells[1].subject, engine="endpoint", url="http://x/v1")
    )
    with pytest.raises(UsageError, match="cannot be measured again"):
        find_baseline(write_run(tmp_path / "remote.json", replace_fields(run, cells=(remote,))), "made-up")
    replay = replace_fields(run.cells[1], load=Load(arrivals="replay", trace="a.jsonl 1234"))
    with pytest.raises(UsageError, match="replays a trace"):
        find_baseline(write_run(tmp_path / "replay.json", replace_fields(run, cells=(replay,))), "made-up")
    with pytest.raises(UsageError, match="does not name one engine"):
        find_baseline(write_run(tmp_path / "empty.json", replace_fields(run, cells=())), "made-up")
    with pytest.raises(UsageError, match="no run"):
        find_baseline("20261115-nothing", "made-up")


@pytest.mark.parametrize("role", ["baseline", "challenger"])
def test_both_sides_may_be_the_same_version(role: Role) -> None:
    sides = tuple(GateSide(role=one, engine="llama.cpp") for one in ("baseline", "challenger"))
    matrix = BenchMatrix(engines=("llama.cpp", "llama.cpp"), loads=(), sides=sides)
    assert label_subject(matrix, make_run(1.0).cells[role == "challenger"].subject) == role


# the command


def test_the_command_writes_markdown_junit_and_json(
    tmp_path: Path, empty_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def measure(model: str | None, **options: Any) -> Run:
        asked.update(options, model=model)
        return make_run(0.85)

    monkeypatch.setattr(gate, "bench", measure)
    junit, page = tmp_path / "gate.xml", tmp_path / "gate.md"
    done = invoke("gate", "llama.cpp@1.0.0", "--junit", str(junit), "--markdown", str(page), "--rounds", "5")
    assert done.code == 30 and done.out == page.read_text() and done.out.startswith("### bedplate gate: worse")
    assert ElementTree.parse(junit).getroot().tag == "testsuites"
    assert [(one.role, one.engine) for one in asked["sides"]] == [
        ("baseline", "llama.cpp@1.0.0"), ("challenger", "llama.cpp"),
    ]  # fmt: skip
    assert (asked["turns"], asked["repeats"], asked["budget_s"]) == (5, 5, 600.0)
    document = check_document("gate", invoke("gate", "llama.cpp", "--tolerance", "40", "--json").out)
    assert document["verdict"]["worse"] is None and document["verdict"]["tolerance"] == 0.4
    invoke("gate", "llama.cpp", "--concurrency", "1,2", "--challenger", "vLLM@v0.32.0")
    assert [load.concurrency for load in asked["loads"]] == [1, 2] and asked["sides"][1].engine == "vllm@0.32.0"


@pytest.mark.parametrize(
    "words", [("nothing.json",), ("llama.cpp", "--challenger", "x y"), ("llama.cpp", "--rounds", "2"),
              ("llama.cpp", "--metric", "speed")],
)  # fmt: skip
def test_wrong_options_are_usage_errors(words: tuple[str, ...], empty_home: Path) -> None:
    assert invoke("gate", *words).code == 2


# a real engine

SHORT = ("--rounds", "3", "--seconds", "1", "--concurrency", "1", "--prompt-tokens", "32", "--output-tokens", "8",
         "--no-quality", "--budget", "60m")  # fmt: skip


def test_a_real_gate_measures_both_sides_in_interleaved_rounds(
    own_home: Path, builtin_gguf: Path, llama_environment: EngineEnvironment, one_core: None, tmp_path: Path
) -> None:
    done = invoke("gate", "llama.cpp", *SHORT, "--junit", str(tmp_path / "gate.xml"), "--json")
    result = from_json(GateResult, done.out)
    assert done.code == result.exit_code in (0, 10, 20, 30) and result.rounds == 3, done.err
    run = store.find_run(result.run)
    moments = sorted((repeat.at or "", str(cell.subject.role)[0]) for cell in run.cells for repeat in cell.repeats)
    assert "".join(role for _, role in moments) == "bccbbc"
    assert {cell.subject.engine for cell in run.cells} == {"llama.cpp"} and len(run.cells) == 2
    assert json.loads(done.out)["schema"] == "gate/1" and (tmp_path / "gate.xml").exists()


def test_ctrl_c_stops_the_engines(
    own_home: Path, builtin_gguf: Path, llama_environment: EngineEnvironment, one_core: None
) -> None:
    command = [sys.executable, "-m", "bedplate", "gate", "llama.cpp", *SHORT, "--rounds", "50"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None and process.stdout is not None
        for line in process.stderr:
            if "round 1 of 50" in line:
                break
        below = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == 130 and "Traceback" not in errors and out == "", errors
    wait_for(lambda: have_ended(below), "its processes to end")
