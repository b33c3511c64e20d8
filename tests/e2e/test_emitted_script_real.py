"""An emitted script with real programs: it installs the engine and bedplate's helper, and the engine answers."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.commands import run
from tests.conftest import post_json, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.skipif(sys.platform == "win32", reason="the script is for bash")]


def pick_port() -> int:
    """A port that the system gives to no other program while the script installs: it gives them from 32768 on."""
    for port in random.sample(range(20_000, 32_000), 1_000):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port from 20000 to 32000 is free")


def test_script_installs_what_it_needs_and_answers(builtin_gguf: Path, tmp_path: Path) -> None:
    port = pick_port()
    printed = run("plan", str(builtin_gguf), "--engine", "llama.cpp", "--emit", "command")
    assert printed.code == 0 and len(printed.out.splitlines()) < 80, printed.err
    (tmp_path / "serve.sh").write_text(printed.out.replace("--port 8080", f"--port {port}"))
    env = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            ["bash", "serve.sh"], cwd=tmp_path, env={**env, "HOME": str(tmp_path)}, stdout=log, stderr=log
        )
    try:
        body = {"messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 4}

        def ask() -> int | None:
            assert process.poll() is None, (tmp_path / "log").read_text()
            try:
                status, answer = post_json(f"http://127.0.0.1:{port}/v1/chat/completions", body)
            except OSError:
                return None
            return int(answer["usage"]["completion_tokens"]) if status == 200 else None

        assert wait_for(ask, "an answer") > 0
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
    installed = sorted(path.name for path in (tmp_path / ".cache" / "bedplate-scripts").iterdir())
    assert len(installed) == 2 and installed[0].startswith("bedplate-") and installed[1].startswith("llama.cpp-")
