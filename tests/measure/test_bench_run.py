"""`bench` from the command to the store: an endpoint by URL, a killed run that is resumed, a real engine."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.commands import invoke
from tests.commands import run as command
from tests.conftest import HANG_S, have_ended, wait_for
from tests.decide.test_tuned import MACHINE, make_tuning

from bedplate import store
from bedplate.engines import get_engine
from bedplate.errors import BedplateError, ExternalFailure
from bedplate.facts.hardware import probe
from bedplate.measure.bench import _choose_turns, bench, compute_longest_s, make_closed_loads
from bedplate.measure.load import serve_null
from bedplate.measure.summary import list_differences
from bedplate.progress import SilentProgress
from bedplate.run.builtin import read_builtin_facts
from bedplate.run.environments import EngineEnvironment, make_environment
from bedplate.run.ready import ModelDecision, decide_engines, list_installed_engines
from bedplate.values import from_json, replace_fields
from bedplate.values.evidence import find_exclusions
from bedplate.values.run import Run
from bedplate.values.service import ModelOrder

pytestmark = pytest.mark.timeout(900)
SHORT = ("--prompt-tokens", "24", "--output-tokens", "8", "--seconds", "0.5", "--repeats", "2")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def null() -> Iterator[str]:
    with serve_null(first_ms=10, interval_ms=1, tokens=8) as one:
        yield one.url


def test_measures_an_endpoint_by_its_url(home: Path, null: str) -> None:
    done = command("bench", "--url", null, "--concurrency", "1,3", *SHORT, "--json")
    assert done.code == 0, done.err
    run = from_json(Run, done.out)
    assert run.finished and [cell.load.concurrency for cell in run.cells] == [1, 3]
    for cell in run.cells:
        assert cell.halt in ("most", "narrow", "time") and cell.exact_output and cell.warmup > 0
        assert cell.subject.url == null and cell.subject.engine == "endpoint"
        for repeat in cell.repeats:
            assert repeat.at and repeat.samples and repeat.client.error_p99_ms is not None
            assert repeat.use.peak_memory_bytes is not None  # the server is a process of this machine
            assert all(sample.ttft_ms is not None and sample.ttft_ms > 9 for sample in repeat.samples)
    assert store.find_run().cells == run.cells and run.environment.command[:2] == ("bedplate", "bench")
    assert "null-model" in done.err and "24 in, 8 out" in done.err and run.id in done.err


def test_repeats_send_different_prompts(home: Path, null: str) -> None:
    first = command("bench", "--url", null, "--concurrency", "2", *SHORT, "--no-quality", "--json")
    run = from_json(Run, first.out)
    assert all(flag.kind != "cache" for cell in run.cells for flag in cell.flags)
    assert run.cells[0].quality is not None and run.cells[0].quality.note == "not requested"


def test_an_endpoint_that_ignores_schemas_and_tools_does_not_support_them(home: Path, null: str) -> None:
    asked = ("--concurrency", "1", *SHORT, "--no-quality", "--structured")
    run = from_json(Run, command("bench", "--url", null, *asked, "--json").out)
    (cell,) = run.cells
    assert cell.quality is not None and cell.quality.structured is not None
    found = cell.quality.structured
    assert {one.support for one in found.kinds} == {"ignored"} and len(found.kinds) == 5 and found.asked == 0
    shown = command("bench", "--resume", run.id)
    assert "does not support JSON schemas, JSON objects, tools, required tool calls, named tool calls" in shown.out


def test_writes_rows_and_summaries_to_files(home: Path, null: str, tmp_path: Path) -> None:
    done = command("bench", "--url", null, "--concurrency", "1", *SHORT, "--no-quality", "-o", str(tmp_path / "r.csv"))
    assert done.code == 0, done.err
    assert "endpoint" in done.out and "TTFT ms" in done.out
    (row,) = csv.DictReader(io.StringIO((tmp_path / "r.csv").read_text()))
    assert row["engine"] == "endpoint" and float(row["tok_per_s"]) > 0 and row["prompt_tokens"] == "24"
    shown = command("bench", "--resume", "last", "-o", str(tmp_path / "r.txt"))
    assert shown.code == 0 and "Result is : " in (tmp_path / "r.txt").read_text()
    assert command("bench", "--resume", "last", "--csv").out == (tmp_path / "r.csv").read_text()


@pytest.mark.measures
def test_measures_an_open_loop_and_a_knee(home: Path, null: str) -> None:
    opened = command("bench", "--url", null, "--rate", "20", *SHORT, "--no-quality", "--json")
    (cell,) = from_json(Run, opened.out).cells
    assert cell.load.arrivals == "poisson" and cell.load.requests_per_s == 20 and cell.repeats[0].samples
    knee = command("bench", "--url", null, "--concurrency", "1", *SHORT, "--slo", "ttft_ms=1", "--no-quality")
    assert "TTFT ≤ 1 ms is not met even with 1 in flight" in knee.out or "invalid" in knee.out


def test_rejects_invalid_options(home: Path, null: str) -> None:
    for arguments in (
        ("--url", null, "--concurrency", "0"),
        ("--url", "nonsense"),
        ("--url", null, "--key-env", "NO_SUCH_VARIABLE"),
        ("--csv", "--json"),
        ("-o", "file.pdf"),
        ("--engines", "no-such-engine"),
        ("--resume", "none"),
        ("--import", "none.json"),
        ("--build", "wrong"),
    ):
        done = command("bench", *arguments)
        assert done.code == 2 and done.err.startswith("error: "), (arguments, done)


def test_reports_an_unreachable_endpoint(home: Path) -> None:
    done = invoke("bench", "--url", "http://127.0.0.1:9", *SHORT)
    assert done.code == 3 and "cannot connect to" in done.err


def test_stores_and_shows_imported_runs(home: Path) -> None:
    file = Path(__file__).parents[1] / "captures" / "runs" / "guidellm.json"
    done = invoke("bench", "--import", str(file))
    assert done.code == 0 and "2.5/s" in done.out and len(store.find_run().cells) == 2
    again = invoke("bench", "--import", str(file), "--jsonl")
    assert again.code == 0 and len(store.read_runs()) == 1
    assert [json.loads(line)["offered_per_s"] for line in again.out.splitlines()] == [None, 2.5]


# stopped runs


def start_bench(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "bedplate", "bench", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )


def count_finished_cells() -> int:
    """Cells with a reason to stop."""
    try:
        return sum(cell.halt is not None for cell in store.read_cells())
    except BedplateError:
        return 0


def test_resumes_a_killed_run(home: Path, null: str) -> None:
    process = start_bench("--url", null, "--concurrency", "1,2,3", *SHORT, "--no-quality")
    wait_for(lambda: count_finished_cells() >= 1, "the first cell to be kept")
    below = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    wait_for(lambda: have_ended(below), "the generator to end")
    before = store.find_run()
    assert not before.finished and 1 <= len(before.cells) <= 3
    first = before.cells[0]
    done = command("bench", "--resume", before.id[:10], "--json")
    assert done.code == 0, done.err
    after = from_json(Run, done.out)
    assert after.id == before.id and after.finished and after.cells[0] == first
    assert [cell.load.concurrency for cell in after.cells] == [1, 2, 3]
    assert all(cell.halt is not None for cell in after.cells)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_keeps_finished_cells_when_stopped(home: Path, null: str, number: int) -> None:
    many = ",".join(map(str, range(1, 13)))  # more than can be measured before the signal is sent
    process = start_bench("--url", null, "--concurrency", many, *SHORT, "--no-quality", "--csv")
    wait_for(lambda: count_finished_cells() >= 1, "the first cell to be kept")
    below = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 130, err
    assert "--resume" in err and "Traceback" not in err, err
    assert out.startswith("engine,version") and len(out.splitlines()) >= 2
    wait_for(lambda: have_ended(below), "its processes to end")
    assert not store.find_run().finished


# a real engine


def test_starts_measures_checks_and_stops_a_real_engine(
    own_home: Path, builtin_gguf: Path, llama_environment: EngineEnvironment, one_core: None
) -> None:
    process = start_bench("--engines", "llama.cpp", "--concurrency", "1,2", *SHORT, "--seconds", "1", "--json")
    wait_for(lambda: count_finished_cells() >= 1, "the first cell to be kept")
    below = psutil.Process(process.pid).children(recursive=True)
    assert any("llama-server" in " ".join(one.cmdline()) for one in below)
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    wait_for(lambda: have_ended(below), "its processes to end")
    run = from_json(Run, out)
    assert [cell.load.concurrency for cell in run.cells] == [1, 2] and run.finished
    for cell in run.cells:
        subject = cell.subject
        assert subject.engine == "llama.cpp" and subject.quantization == "Q4_1" and subject.build == "wheel"
        assert subject.weights_id and subject.start_s and subject.install_bytes and subject.settings is not None
        assert subject.settings.slots >= 2 and "--model" in subject.argv
        assert cell.notes == "directly at the engine's port" and cell.machine == store.compute_fingerprint(probe())
        quality = cell.quality
        assert quality is not None and quality.verdict == "ok" and (quality.agreement or 0) > 0.9
        assert quality.divergence is not None and quality.divergence < 0.1
        assert quality.perplexity is not None and quality.reference_perplexity is not None
        assert quality.perplexity == pytest.approx(quality.reference_perplexity, rel=0.2)
        for repeat in cell.repeats:
            assert repeat.use.peak_memory_bytes is not None and repeat.use.peak_memory_bytes > 50_000_000
            assert repeat.use.engine_cpu_s is not None and repeat.use.engine_cpu_s > 0
            assert repeat.engine.scrapes >= 2 and repeat.engine.running_max is not None
    clean = [cell for cell in run.cells if not find_exclusions(cell)]
    assert len(store.read_evidence(store.compute_fingerprint(probe())).results) == len(clean)


def test_measures_through_the_gateway_and_reports_it(
    own_home: Path, builtin_gguf: Path, llama_environment: EngineEnvironment, one_core: None
) -> None:
    asked = ("--engines", "llama.cpp", "--through-gateway", "--concurrency", "2", *SHORT, "--repeats", "1")
    done = command("bench", *asked, "--no-quality", "--json")
    assert done.code == 0, done.err
    assert "through the gateway" in done.err.splitlines()[0]
    run = from_json(Run, done.out)
    (cell,) = run.cells
    (repeat,) = cell.repeats
    assert cell.subject.through_gateway and cell.notes == "through the gateway" and cell.subject.build == "wheel"
    assert repeat.samples and all(sample.outcome == "ok" for sample in repeat.samples)
    assert repeat.exact_prompt and repeat.exact_output and repeat.delivered_tokens
    # Metrics and processes are those of the engine, not of the gateway.
    assert repeat.engine.scrapes >= 2 and repeat.engine.running_max == 2
    assert repeat.use.engine_cpu_s is not None and repeat.use.engine_cpu_s > 0
    direct = replace_fields(cell, subject=replace_fields(cell.subject, through_gateway=False))
    found = list_differences(direct, cell)
    assert not found.meaningless
    assert [one.b for one in found.printed if one.what == "measured"] == ["through the gateway"]


def test_measures_installed_engines_by_default(
    home: Path, bedplate_home: Path, llama_environment: EngineEnvironment
) -> None:
    hardware = probe()
    assert list_installed_engines(hardware) == ()
    (home / "engines").symlink_to(bedplate_home / "engines")
    make_environment(get_engine("llama.cpp"))
    assert "llama.cpp" in list_installed_engines(hardware)


def test_reports_why_an_engine_cannot_serve_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bedplate_home: Path, builtin_gguf: Path
) -> None:
    if probe().accelerators:
        pytest.skip("this machine has a GPU, on which the engine may run")
    (tmp_path / "models").symlink_to(bedplate_home / "models")
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path))
    done = invoke("bench", "--engines", "exllamav3", "--concurrency", "1", *SHORT)
    assert done.code == 1 and "exllamav3" in done.err and "GPU" in done.err


@pytest.mark.measures
def test_distributes_repeats_over_interleaved_rounds(home: Path, null: str) -> None:
    loads = make_closed_loads((1, 2), prompt_tokens=24, output_tokens=8)
    run = bench(url=null, loads=loads, seconds=0.3, repeats=2, turns=2, check_quality=False)
    one, two = run.cells
    assert len(one.repeats) == len(two.repeats) == 2 and one.halt is not None
    moments = sorted((repeat.at or "", cell.id) for cell in run.cells for repeat in cell.repeats)
    assert [cell == one.id for _, cell in moments] == [True, False, True, False]


@pytest.mark.parametrize(("subjects", "repeats", "turns"), [(1, 5, 1), (2, 5, 2), (7, 5, 2), (2, 1, 1)])
def test_several_engines_have_two_rounds_by_default(subjects: int, repeats: int, turns: int) -> None:
    assert _choose_turns(subjects, repeats) == turns


def test_an_endpoint_has_one_round(home: Path, null: str) -> None:
    run = bench(url=null, loads=make_closed_loads((1,), prompt_tokens=24, output_tokens=8), seconds=0.3, repeats=2,
                check_quality=False)  # fmt: skip
    assert run.matrix is not None and run.matrix.turns == 1


def test_does_not_start_a_failed_engine_again(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines have two rounds by default; one of them fails to start, the other is measured in both."""
    from bedplate.measure import bench as module

    tried: list[tuple[str, int]] = []

    def measure(one: module.BenchRun, subject: ModelDecision, turn: int) -> None:
        tried.append((subject.engine.id, turn))
        if subject.engine.id == "pytorch":
            raise ExternalFailure("it does not start")

    monkeypatch.setattr(module, "_measure_engine", measure)
    monkeypatch.setattr(module, "fetch_facts", lambda *asked: replace_fields(read_builtin_facts(), files=()))
    loads = make_closed_loads((1,), prompt_tokens=24, output_tokens=8)
    with pytest.raises(ExternalFailure, match="nothing could be measured"):
        bench(engines=("llama.cpp", "pytorch"), loads=loads)
    assert tried == [("llama.cpp", 0), ("pytorch", 0), ("llama.cpp", 1)]
    assert [one.engine for one in store.find_run().left_out] == ["pytorch"]


def test_an_engine_without_time_is_named_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its start takes longer than the budget; the second round has even less time."""
    from bedplate.measure import bench as module

    tried: list[tuple[str, int]] = []
    monkeypatch.setattr(module, "_measure_engine", lambda one, subject, turn: tried.append((subject.engine.id, turn)))
    monkeypatch.setattr(module, "fetch_facts", lambda *asked: replace_fields(read_builtin_facts(), files=()))
    loads = make_closed_loads((1,), prompt_tokens=24, output_tokens=8)
    with pytest.raises(ExternalFailure, match="nothing could be measured"):
        bench(engines=("llama.cpp", "pytorch"), loads=loads, budget_s=30.0, check_quality=False)
    assert tried == [("llama.cpp", 0), ("llama.cpp", 1)]
    assert [one.engine for one in store.find_run().left_out] == ["pytorch"]


def test_plans_with_the_tunings_that_serve_uses(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bedplate.measure import bench as module

    store.add_tuning(replace_fields(make_tuning(ubatch="256"), machine=store.compute_fingerprint(MACHINE)))
    planned: list[ModelDecision] = []
    facts = replace_fields(read_builtin_facts(), files=())
    monkeypatch.setattr(module, "probe", lambda: MACHINE)
    monkeypatch.setattr(module, "fetch_facts", lambda *asked: facts)
    monkeypatch.setattr(module, "_measure_engine", lambda one, subject, turn: planned.append(subject))
    loads = make_closed_loads((4,), prompt_tokens=512, output_tokens=128)
    bench(engines=("llama.cpp",), loads=loads)
    bench(engines=("llama.cpp",), loads=loads, path=tmp_path / "another store")
    tuned, untuned = planned
    wanted = ModelOrder(engine="llama.cpp", workload=tuned.plan.workload)
    (served,) = decide_engines([wanted], MACHINE, SilentProgress(), models=[facts])
    assert tuned.plan == served.plan and tuned.plan.settings.turned is not None
    assert untuned.plan.settings.turned is None


def test_replays_a_trace(home: Path, null: str, tmp_path: Path) -> None:
    rows = [f"2024-05-10 00:00:00.{tenth}00000,20,{3 + tenth}" for tenth in range(6)]
    trace = tmp_path / "trace.csv"
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    done = command("bench", "--url", null, "--trace", str(trace), "--seconds", "1", "--repeats", "1", "--json")
    assert done.code == 0, done.err
    (cell,) = from_json(Run, done.out).cells
    (repeat,) = cell.repeats
    assert [sample.output_tokens for sample in repeat.samples] == [3, 4, 5, 6, 7, 8]
    assert cell.load.trace is not None and cell.load.trace.startswith("trace.csv ")


def test_extends_the_window_for_slow_engines_within_the_budget() -> None:
    assert compute_longest_s(10, 100, 1, 4) == 60 and compute_longest_s(10, 40, 1, 4) == 40
    assert compute_longest_s(5, 1000, 20, 16) == 360 and compute_longest_s(5, 100, 20, 16) == 100
    assert compute_longest_s(5, 1, 20, 1) == 60 and compute_longest_s(5, 1, 0, 1) == 5


def test_is_part_of_the_python_api(home: Path, null: str) -> None:
    import bedplate

    assert bedplate.bench is bench and "bench" in bedplate.__all__


def test_measures_the_sessions_of_a_scenario(home: Path, null: str) -> None:
    done = command(
        "bench", "--url", null, "--scenario", "batch", "--prompt-tokens", "200", "--concurrency", "2", "--seconds", "1",
        "--repeats", "1", "--budget", "40s", "--no-quality",
    )  # fmt: skip
    assert done.code == 0, done
    (cell,) = store.find_run().cells
    assert cell.load.scenario is not None and cell.load.scenario.name == "batch" and cell.load.sessions == 2
    assert all(sample.session is not None and sample.turn for repeat in cell.repeats for sample in repeat.samples)
    assert "scenario batch" in done.out and "TTFT p50 in ms by turn" in done.out
    assert "--prompt-tokens 200 replaces the 1," in done.err
    found = json.loads(command("diagnose", "--scenario", "batch", "--json").out)
    assert found["bottlenecks"][0]["loads"][0]["load"]["scenario"]["name"] == "batch"
    refused = command("diagnose", "--scenario", "chat")
    assert refused.code == 2 and "bedplate bench --scenario chat" in refused.err


def test_replays_the_sessions_of_a_trace(home: Path, null: str, tmp_path: Path) -> None:
    turns = [{"role": role, "content": "word " * 8} for role in ("user", "assistant", "user", "assistant")]
    trace = tmp_path / "chats.json"
    trace.write_text(json.dumps([{"id": str(number), "conversations": turns} for number in range(3)]))
    without = command("bench", "--url", null, "--trace", str(trace), *SHORT, "--no-quality")
    assert without.code == 2 and "--concurrency" in without.err
    done = command(
        "bench", "--url", null, "--trace", str(trace), "--concurrency", "2", "--seconds", "1", "--repeats", "1",
        "--no-quality",
    )  # fmt: skip
    assert done.code == 0, done
    (cell,) = store.find_run().cells
    assert {sample.turn for repeat in cell.repeats for sample in repeat.samples} == {1, 2}
