"""Requests generated from a grammar: the gateway never fails, and what reaches the engine is well-formed."""

from __future__ import annotations

import asyncio
import random
import re

from tests.soak.grammar import generate_request
from tests.soak.hostile import STATUS_LINE, WRONG_STATUSES, send_request

from bedplate.run.gateway.pages import OWN_PAGES
from bedplate.run.gateway.sse import APIS, TRANSLATED

from .scripted import make_answer, start_gateway, wait_until

REQUESTS, AT_ONCE = 400, 64
ANSWER = {
    "model": "small", "choices": [{"index": 0, "message": {"role": "assistant", "content": "a"}, "text": "a"}],
    "data": [{"index": 0, "embedding": [0.5]}], "usage": {"prompt_tokens": 1, "completion_tokens": 1},
}  # fmt: skip
"""Of each API."""
CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


async def test_no_generated_request_fails_in_the_gateway_or_reaches_the_engine_malformed() -> None:
    async with start_gateway(api_key="the key") as setup:
        setup.engine.otherwise = (make_answer(ANSWER),)
        numbers = iter(range(REQUESTS))

        async def run_client() -> None:
            for number in numbers:
                sent = generate_request(random.Random(number), "small", "the key")
                answer = await send_request("127.0.0.1", setup.port, sent, limit_s=1.0)
                statuses = {status.decode() for status in STATUS_LINE.findall(answer)}
                assert not statuses & WRONG_STATUSES, (number, answer[:500])

        await asyncio.gather(*(run_client() for _ in range(AT_ONCE)))
        await wait_until(lambda: not setup.gateway.connections, "all connections to end")
        # How many are answered within their second depends on the machine.
        assert setup.engine.seen, "no request reaches the engine: the grammar is too wild"
        for seen in setup.engine.seen:
            if (seen.method, seen.target) == ("GET", "/metrics"):  # read for /metrics/engines
                continue
            assert seen.method == "POST" and seen.target.startswith("/")
            assert len(seen.header("content-length")) == 1 and not seen.header("transfer-encoding")
            assert seen.header("host") == ["127.0.0.1"] and not seen.header("authorization")
            assert not any(CONTROLS.search(name + value) for name, value in seen.headers), seen.headers


def test_the_grammar_has_every_path_of_the_gateway() -> None:
    requests = (generate_request(random.Random(number), "small", None) for number in range(2_000))
    seen = b"".join(part for one in requests for part in one.parts)
    paths = [*APIS, *TRANSLATED, *(page.encode() for page in OWN_PAGES)]
    assert [path for path in paths if b" " + path + b" HTTP/" not in seen] == []
