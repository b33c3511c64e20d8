"""Services in the background, several models and replicas behind one endpoint, with the real engine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.commands import Answer, run
from tests.conftest import HANG_S, have_ended, wait_for
from tests.contract.documents import check_document

from bedplate.hosting import records
from bedplate.hosting.services import read_status
from bedplate.run.environments import EngineEnvironment
from bedplate.values.record import from_json
from bedplate.values.service import HostStatus

MODEL = "smollm2-135m-instruct"
SMALL = ("--context", "512", "--concurrency", "1")


@pytest.fixture(autouse=True)
def quiet_cores(one_core: None) -> None:
    """Idle threads block instead of spinning, since several engines share the machine."""


class Background:
    """Services that were started in the background; they are stopped with the test."""

    def __init__(self) -> None:
        self.endpoints: list[dict[str, Any]] = []

    def start(self, *arguments: str) -> dict[str, Any]:
        answer = run("serve", "-d", "--json", "--port", "0", "--no-check", *arguments)
        assert answer.code == 0, answer.err
        endpoint: dict[str, Any] = check_document("endpoint", answer.out)
        self.endpoints.append(endpoint)
        return endpoint

    def end(self) -> None:
        for endpoint in self.endpoints:
            below = list_descendants(endpoint["pid"])
            with contextlib.suppress(ProcessLookupError):
                os.kill(endpoint["pid"], signal.SIGKILL)
            wait_for(lambda below=below: have_ended(below), "the engines of a killed host to end")  # type: ignore[misc]
        records.remove_stale()


@pytest.fixture
def background(builtin_gguf: Path, llama_environment: EngineEnvironment) -> Iterator[Background]:
    one = Background()
    yield one
    one.end()


def list_descendants(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def ask(endpoint: dict[str, Any], model: str | None = None, tokens: int = 4, **more: Any) -> tuple[int, Any]:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": tokens, **more}
    if model is not None:
        body["model"] = model
    request = urllib.request.Request(
        f"{endpoint['url']}/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=HANG_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def read_named_status(name: str) -> HostStatus:
    """The output of `bedplate status`, without starting a process."""
    return read_status(records.choose_service(name))


def list_services() -> dict[str, Any]:
    return {one["record"]["name"]: one for one in check_document("services", run("ps", "--json").out)}


def read_states(name: str) -> dict[str, str]:
    return {model.model: model.state for model in read_named_status(name).models}


def assert_clear(answer: Answer, code: int, *words: str) -> None:
    assert answer.code == code, answer
    assert "error: " in answer.err and "Traceback" not in answer.err
    for word in words:
        assert word in answer.err, answer.err


def test_background_service_starts_answers_and_stops(background: Background) -> None:
    endpoint = background.start("--name", "chat", *SMALL)
    assert endpoint["name"] == "chat" and ask(endpoint)[0] == 200
    host = psutil.Process(endpoint["pid"])
    assert os.getsid(host.pid) == host.pid, "it has a session of its own"
    everything = list_descendants(endpoint["pid"])
    assert len(everything) == 3  # the host, a warden and an engine

    one = list_services()["chat"]
    assert (one["record"]["url"], one["status"]["state"]) == (endpoint["url"], "ready")
    assert "chat" in run("ps").out
    told = run("status", "chat", "--json")
    assert told.code == 0, told.err
    check_document("host", told.out)
    found = from_json(HostStatus, told.out)
    (model,) = found.models
    (engine,) = model.engines
    assert found.detached and model.model == MODEL and engine.state == "ready" and model.why
    assert engine.memory_bytes is not None and 50e6 < engine.memory_bytes < engine.planned_bytes
    assert engine.pid in {process.pid for process in everything}
    shown = run("status", "chat").out
    assert endpoint["url"] in shown and "llama.cpp-1" in shown and "planned for 1 user" in shown

    said = run("logs", "chat", "-n", "1000").out
    assert "==> chat <==" in said and "==> chat@llama.cpp-1 <==" in said and "ready at" in said

    assert_clear(
        run("serve", "-d", "--name", "chat", "--port", "0"), 2, "chat is already running", "bedplate stop chat"
    )
    port = endpoint["url"].removesuffix("/v1").rpartition(":")[2]
    assert_clear(run("serve", "-d", "--port", port), 3, f"port {port}", "by the service chat", "bedplate stop chat")

    outcome: list[tuple[int, Any]] = []
    asking = threading.Thread(target=lambda: outcome.append(ask(endpoint, tokens=150, ignore_eos=True)))
    asking.start()
    wait_for(lambda: read_named_status("chat").in_flight == 1, "an answer to be under way")
    stopped = run("stop", "chat")
    assert stopped.code == 0 and "chat stopped in" in stopped.out, stopped
    asking.join()
    assert outcome[0][0] == 200 and outcome[0][1]["usage"]["completion_tokens"] == 150, (
        "the answer under way was finished"
    )
    wait_for(lambda: have_ended(everything), "everything to end")
    assert "chat" not in list_services()
    assert_clear(run("stop", "chat"), 1, "no service named chat", "running: ")
    assert "running requests have up to" in run("logs", "chat").out


def test_sigkill_of_a_host_with_replicas_leaves_no_process(background: Background) -> None:
    endpoint = background.start("--name", "twins", "--replicas", "2", "--context", "512", "--concurrency", "2")
    everything = list_descendants(endpoint["pid"])
    assert len(everything) == 5  # the host, two wardens and two engines
    assert [engine.id for engine in read_named_status("twins").models[0].engines] == ["llama.cpp-1", "llama.cpp-2"]
    assert ask(endpoint)[0] == 200
    os.kill(endpoint["pid"], signal.SIGKILL)
    wait_for(lambda: have_ended(everything), "everything to end")
    seen = run("ps")
    assert "twins" not in seen.out and "twins" in seen.err and "ended unexpectedly" in seen.err
    assert "twins" not in run("ps").err, "it is said once"
    assert_clear(run("status", "twins"), 1, "no service named twins")


def test_two_models_on_demand_alternate_within_a_memory_budget(
    background: Background, builtin_gguf: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.gguf"
    other.symlink_to(builtin_gguf)  # a model is named after its file
    intent = tmp_path / "two.yaml"
    work = "{context_tokens: 512, concurrency: 1}"
    services = [f"{{model: builtin, workload: {work}, ttl: 10m}}", f"{{model: {other}, workload: {work}, ttl: 2s}}"]
    intent.write_text(f"services: [{', '.join(services)}]\n")
    plan = json.loads(run("plan", "--json", *SMALL, "--engine", "llama.cpp").out)
    (need,) = plan["memory"]["devices"]
    each = need["weights_bytes"] + need["kv_bytes"] + need["overhead_bytes"]["high"]

    endpoint = background.start("-f", str(intent), "--memory-budget", str(round(1.5 * each)))
    assert endpoint["name"] == "two" and len(endpoint["models"]) == 2
    first, second = endpoint["models"]
    assert (first, second) == (MODEL, "other")
    assert read_states("two") == {first: "unloaded", second: "unloaded"}
    for name in (first, second, first):
        code, body = ask(endpoint, name)
        assert code == 200 and body["choices"][0]["message"]["content"], body
        other_name = second if name == first else first
        assert read_states("two") == {name: "ready", other_name: "unloaded"}
    assert ask(endpoint, "nobody")[0] == 404 and ask(endpoint)[0] in (400, 404)
    ask(endpoint, second)
    wait_for(lambda: read_states("two")[second] == "unloaded", "the time to live to pass")
    assert len(list_descendants(endpoint["pid"])) == 1, "nothing is loaded"
    assert_clear(
        run("serve", "-f", str(intent), "--port", "0", "--memory-budget", "100MiB"), 1, "does not fit", "larger memory"
    )


def test_ctrl_c_during_start_stops_the_service(
    builtin_gguf: Path, llama_environment: EngineEnvironment, tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "bedplate", "serve", "-d", "--port", "0", "--name", "hasty", "--no-check"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    record = Path(os.environ["BEDPLATE_HOME"]) / "services" / "hasty.json"
    pid = wait_for(lambda: json.loads(record.read_text())["pid"] if record.exists() else None, "it to have begun")
    everything = list_descendants(pid)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 130 and "Ready" not in out
    wait_for(lambda: have_ended([*everything, *list_descendants(pid)]), "the service to end")
    assert not record.exists()


def test_reports_why_the_service_did_not_start(
    tmp_path: Path, builtin_gguf: Path, llama_environment: EngineEnvironment
) -> None:
    assert_clear(run("serve", "-d", str(tmp_path / "none.gguf"), "--port", "0"), 2, "none.gguf")
    assert_clear(run("serve", "-d", "--port", "0", "--context", "90000"), 1, "cannot be served here")
    (tmp_path / "home").write_text("in the way")
    blocked = run("serve", "-d", "--port", "0", env={"BEDPLATE_HOME": str(tmp_path / "home")})
    assert_clear(blocked, 3, "cannot write", "BEDPLATE_HOME")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert_clear(run("serve", "-d", "--port", str(port)), 3, f"port {port} on 127.0.0.1 is in use")
