"""A gateway that is replaced during a rolling update: running streams end, and readiness does not depend on engines."""

from __future__ import annotations

import json
import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path

from tests.conftest import Served, post_json, wait_for


def test_a_stream_that_runs_at_sigterm_is_not_cut(
    served: Served, serve: Callable[..., Served], own_home: Path, tmp_path: Path
) -> None:
    model = served.endpoint["model"]
    intent = tmp_path / "gateway.yaml"
    # The second service does not exist: its failure must not make the gateway unready.
    services = [{"url": served.url, "model": model}, {"url": "http://127.0.0.1:9/v1", "model": "b"}]
    intent.write_text(json.dumps({"services": services}))
    gateway = serve("--file", str(intent), "--grace", "10m")
    with urllib.request.urlopen(f"{gateway.root}/ready") as ready:
        assert json.load(ready) == {"status": "ready"}
    body = {
        "model": model, "stream": True, "max_tokens": 64, "ignore_eos": True,
        "messages": [{"role": "user", "content": "Count."}],
    }  # fmt: skip
    request = urllib.request.Request(
        f"{gateway.url}/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        first = answer.readline()
        gateway.process.send_signal(signal.SIGTERM)
        # It accepts no new connections from now on.
        wait_for(lambda: _is_refused(gateway), "the gateway to stop listening")
        rest = answer.read()
    assert first.startswith(b"data: ") and rest.rstrip().endswith(b"data: [DONE]")
    assert b'"error"' not in rest
    assert gateway.process.wait() == 0
    assert post_json(f"{served.url}/chat/completions", {**body, "stream": False, "max_tokens": 1})[0] == 200


def _is_refused(gateway: Served) -> bool:
    try:
        urllib.request.urlopen(f"{gateway.root}/ready").close()
    except OSError:
        return True
    return False
