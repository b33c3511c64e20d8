"""`ps`, `status`, `logs` and `stop` with and without running services."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tests.commands import invoke

from bedplate.cli.terminal import make_console
from bedplate.hosting import records
from bedplate.show.services import format_duration, render_list, render_status
from bedplate.values import Workload, replace_fields
from bedplate.values.endpoint import StartPhaseTime
from bedplate.values.service import EngineStatus, HostStatus, ModelStatus


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def make_engine(number: int, **more: object) -> EngineStatus:
    given: dict[str, object] = {
        "id": f"llama.cpp-{number}", "engine": "llama.cpp", "version": "1.2", "state": "ready", "device": "cpu",
        "threads": 2, "slots": 4, "share": 1.0, "in_flight": 3, "restarts": 1, "uptime_s": 90.0,
        "memory_bytes": 1 << 28, "planned_bytes": 1 << 29, "log": "/x/e.log", **more,
    }  # fmt: skip
    return EngineStatus(**given)  # type: ignore[arg-type]


STATUS = HostStatus(
    name="chat", pid=77, version="0.1.0", state="ready", url="http://127.0.0.1:8080/v1", needs_key=True, detached=True,
    started_at="2026-11-15T12:00:00+00:00", uptime_s=7500, in_flight=3, memory_bytes=1 << 28, budget_bytes=1 << 33,
    log="/x/chat.log", notes=("ready at http://127.0.0.1:8080/v1",),
    models=(
        ModelStatus(
            model="small", state="ready", why=("no GPU, one user (hardware.cpu)",), quantization="Q4_1",
            context_tokens=8192, replicas=2, planned_bytes=1 << 30, workload=Workload(origin="default"),
            drift="312 requests in the last day had 3,000 prompt tokens and not 512",
            engines=(make_engine(1), make_engine(2, state="restarting", reason="it crashed (SIGSEGV)", uptime_s=None)),
        ),
        ModelStatus(
            model="other", state="unloaded", quantization="Q8_0", context_tokens=4096, replicas=1, ttl_s=600,
            planned_bytes=1 << 31, workload=Workload(users=4, concurrency=2),
        ),
    ),
)  # fmt: skip


def render_text(what: object) -> str:
    out = make_console()
    with out.capture() as captured:
        out.print(what)
    return captured.get()


def test_commands_without_a_running_service() -> None:
    assert "no service is running" in invoke("ps").out
    assert json.loads(invoke("ps", "--json").out) == []
    for verb in ("status", "stop", "logs"):
        answer = invoke(verb)
        assert answer.code == 1 and "no service is running" in answer.err and "serve -d" in answer.err
        answer = invoke(verb, "chat")
        assert answer.code == 1 and "chat" in answer.err
    assert invoke("stop", "--all").code == 0
    assert json.loads(invoke("stop", "--all", "--json").out) == []
    assert invoke("stop", "chat", "--all").code == 2


def test_a_starting_service_is_listed() -> None:
    """Its process runs and does not listen yet."""
    records.claim_name("chat", "unused")
    listed = invoke("ps")
    assert "chat" in listed.out and "starting" in listed.out and str(os.getpid()) in listed.out
    assert json.loads(invoke("ps", "--json").out)[0]["status"] is None
    answer = invoke("status", "chat")
    assert answer.code == 3 and "still starting" in answer.err


def test_ps_page() -> None:
    record = records.claim_name("chat", "unused")
    shown = render_text(render_list([(record, STATUS), (record, None)]))
    for word in ("http://127.0.0.1:8080/v1", "small, other", "llama.cpp", "256 MiB", "2 h 5 min", "starting"):
        assert word in shown, shown


def test_status_page() -> None:
    shown = render_text(render_status(STATUS))
    for word in (
        "in the background", "requires an API key", "2 replicas", "3 in flight", "256 MiB (planned: up to 512 MiB)",
        "1 restart", "it crashed (SIGSEGV)", "no GPU, one user", "planned for 1 user, 512 + 256 tokens (default)",
        "and not 512", "unloaded after 10 min without a request", "not loaded; up to 2 GiB", "a budget of 8 GiB",
        "4 users, 2 in flight", "ready at",
    ):  # fmt: skip
        assert word in shown.replace("\n", " ").replace("  ", " ") or word in shown, (word, shown)


def test_pages_show_the_phase_of_a_start() -> None:
    times = (StartPhaseTime(phase="start", seconds=75), StartPhaseTime(phase="load", seconds=4.1))
    engine = make_engine(1, engine="vllm", state="loading", uptime_s=None, phase="compile", phases=times)
    model = replace_fields(STATUS.models[0], state="loading", engines=(engine,))
    status = replace_fields(STATUS, state="starting", models=(model,))
    assert "starting, compiling" in render_text(render_list([(records.claim_name("chat", "unused"), status)]))
    shown = " ".join(render_text(render_status(status)).split())
    assert "loading compiling · 3 in flight" in shown
    assert "started in 79.1 s: processes 75.0 s, weights 4.1 s" not in shown and "processes 75.0 s" in shown


@pytest.mark.parametrize(
    ("seconds", "words"), [(5, "5 s"), (600, "10 min"), (3600, "1 h"), (3700, "1 h 1 min"), (200_000, "2 d 7 h")]
)
def test_durations_are_formatted(seconds: float, words: str) -> None:
    assert format_duration(seconds) == words


def test_logs_of_an_ended_service(own_home: Path) -> None:
    (own_home / "logs").mkdir(parents=True)
    (own_home / "logs" / "chat.log").write_text("one\ntwo\n")
    assert invoke("logs", "chat", "-n", "1").out == "two\n"
    (own_home / "logs" / "chat@llama.cpp-1.log").write_text("three\n")
    assert invoke("logs", "chat").out == "==> chat <==\none\ntwo\n\n==> chat@llama.cpp-1 <==\nthree\n"


def test_serve_rejects_invalid_options() -> None:
    for arguments, word in (
        (("--ttl", "soon"), "--ttl"),
        (("--memory-budget", "much"), "--memory-budget"),
        (("--name", "No Name"), "not a valid service name"),
        (("--ttl", "0"), "more than 0"),
    ):
        answer = invoke("serve", "--port", "0", *arguments)
        assert answer.code == 2 and word in answer.err
    records.claim_name("chat", "unused")
    answer = invoke("serve", "--port", "0", "--name", "chat")
    assert answer.code == 2 and "already running" in answer.err
