"""A gateway in front of a service that is scaled to zero: the request waits, and the metrics show that it does."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.conftest import HANG_S, Served, post_json, wait_for

from bedplate.run.supervisor import find_free_port

pytestmark = pytest.mark.engine
MODEL = "smollm2-135m-instruct"


def test_request_waits_until_the_service_is_started(serve: Callable[..., Served], tmp_path: Path) -> None:
    port = find_free_port()
    intent = tmp_path / "gateway.yaml"
    intent.write_text(f"services: [{{url: 'http://127.0.0.1:{port}/v1', model: {MODEL}, wait: 1h}}]\n")
    gateway = serve("--file", str(intent))

    def count_in_flight() -> float:
        """What KEDA's trigger sums."""
        with urllib.request.urlopen(f"{gateway.root}/metrics", timeout=HANG_S) as answer:
            lines = answer.read().decode().splitlines()
        start = f'bedplate_requests_in_flight{{engine="127.0.0.1:{port}",model="{MODEL}"}}'
        return sum(float(line.split()[-1]) for line in lines if line.startswith(start))

    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(post_json, f"{gateway.url}/chat/completions", body)
        wait_for(lambda: count_in_flight() == 1, "the request to wait at the gateway")
        assert not asked.done()
        serve("--port", str(port))
        status, answer = asked.result()
    assert status == 200 and answer["choices"][0]["message"]["content"]
