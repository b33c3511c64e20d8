"""The private port of a real engine behind `bedplate serve`."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import Served
from tests.private_ports import check_private_port

from bedplate.engines import get_engine


def test_private_port_needs_a_key_that_nobody_else_can_read(served: Served) -> None:
    log = Path(served.endpoint["log"])
    at = check_private_port(served.list_descendants(), get_engine("llama.cpp"), [log])
    body = {"prompt": "The capital of France is", "max_tokens": 1}
    assert at.ask("POST", "/v1/completions", at.key, body)[0] == 200
    assert at.ask("GET", "/metrics", at.key)[0] == 200
    assert at.ask("POST", "/v1/completions", None, body)[0] == 401
