"""`serve --log-format json`: each event is one line of JSON, on stderr and in the log of the service."""

from __future__ import annotations

import datetime as dt
import json
import os
import signal
from pathlib import Path

import pytest
from tests.conftest import start_serve

from bedplate.cli.terminal import JsonProgress
from bedplate.serving import serve as serving
from bedplate.values.service import EndpointOrder, Order

NOTHING_LISTENS = "http://127.0.0.1:9/v1"


def read_messages(lines: list[str], service: str) -> list[str]:
    events = [json.loads(line) for line in lines]
    for event in events:
        assert set(event) == {"time", "service", "message"} and event["service"] == service
        assert dt.datetime.fromisoformat(event["time"]).tzinfo is not None
    return [event["message"] for event in events]


def test_events_are_lines_of_json(own_home: Path, tmp_path: Path) -> None:
    file = tmp_path / "far.yaml"
    file.write_text(f"services:\n  - {{url: {NOTHING_LISTENS}, model: small}}\n")
    served = start_serve("-f", str(file), "--name", "far", "--log-format", "json")
    assert served.endpoint["name"] == "far", served.stderr
    log = Path(served.endpoint["log"])
    assert served.stop(signal.SIGTERM) == 0
    printed, kept = read_messages(served.stderr, "far"), read_messages(log.read_text().splitlines(), "far")
    for messages in (printed, kept):
        assert "the endpoint 127.0.0.1:9 cannot be used" in messages[0] and messages[-1].startswith("stopped in")
    assert any(one.startswith("ready at") for one in kept)


def test_notes_before_the_start_are_lines_of_json(
    own_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serving, "_note_gpu_users", lambda cards, progress: ("another process uses GPU 0",))
    order = Order(
        services=(), endpoints=(EndpointOrder(url=NOTHING_LISTENS, model="small"),), port=0, name="far",
        log_format="json", check=False,
    )  # fmt: skip
    hooks = serving.ServeHooks(progress=JsonProgress(), on_ready=lambda endpoint: os.kill(os.getpid(), signal.SIGTERM))
    serving.serve_order(order, hooks)
    (log,) = (own_home / "logs").glob("far.log")
    assert read_messages(log.read_text().splitlines(), "far")[0] == "another process uses GPU 0"
