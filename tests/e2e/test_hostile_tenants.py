"""Two tenants of a real engine: what is recorded is what the engine generated, and what it refused has a reason."""

from __future__ import annotations

import http.client
import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.commands import invoke
from tests.conftest import HANG_S, Served, have_ended, share_installed, start_serve, wait_for
from tests.private_ports import PrivatePort, find_private_port

from bedplate.engines import get_engine
from bedplate.run.environments import EngineEnvironment
from bedplate.run.gateway.client import REQUEST_TIMEOUT_S

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
QUESTION = {"messages": [{"role": "user", "content": "Tell me about rivers."}]}
SLOTS = 4
ABORTED_AFTER = 20
"""Events of a stream, each of which has one token."""


@dataclass
class SharedEndpoint:
    served: Served
    keys: dict[str, str]
    engine: PrivatePort

    def open(self, tenant: str, path: str, body: dict[str, Any]) -> tuple[http.client.HTTPConnection, Any]:
        host, _, port = self.served.root.removeprefix("http://").partition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=HANG_S)
        headers = {"Authorization": f"Bearer {self.keys[tenant]}", "Content-Type": "application/json"}
        connection.request("POST", path, json.dumps(body), headers)
        return connection, connection.getresponse()

    def ask(self, tenant: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        connection, answer = self.open(tenant, path, body)
        with closing(connection):
            return answer.status, json.load(answer)

    def count_generated(self) -> int:
        """Output tokens by the engine's own metrics."""
        text = self.engine.ask("GET", "/metrics", self.engine.key)[1]
        found = re.search(r"^llamacpp:tokens_predicted_total (\d+)", text, re.MULTILINE)
        assert found is not None
        return int(found[1])


def count_recorded(tenant: str | None = None) -> int:
    rows = json.loads(invoke("usage", "--since", "all", "--json").out)["rows"]
    return sum(row["completion_tokens"] for row in rows if tenant in (None, row["key"]))


@pytest.fixture(scope="module")
def shared(
    tmp_path_factory: pytest.TempPathFactory,
    bedplate_home: Path,
    builtin_gguf: Path,
    llama_environment: EngineEnvironment,
) -> Iterator[SharedEndpoint]:
    home = tmp_path_factory.mktemp("tenants")
    share_installed(home, bedplate_home)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BEDPLATE_HOME", str(home))
        keys = {name: invoke("keys", "add", name).out.strip() for name in ("alice", "bob")}
        served = start_serve("--context", "512", "--concurrency", str(SLOTS))
        assert served.endpoint, "".join(served.stderr)
        below = served.list_descendants()
        yield SharedEndpoint(served, keys, find_private_port(below, get_engine("llama.cpp")))
        assert served.stop() == 0
        wait_for(lambda: have_ended(below), "the engine's processes to end")


def test_each_sequence_is_recorded_as_the_engine_counts_it(shared: SharedEndpoint) -> None:
    """The engine reports the first sequence of a request. The text of the others is tokenized, which can give one token
    less than were sampled."""
    before, recorded, others = shared.count_generated(), count_recorded("alice"), 0
    for path, body in (
        (CHAT, {**QUESTION, "n": 3}),
        (TEXT, {"prompt": ["One", "Two", "Three", "Four"]}),
        (TEXT, {"prompt": [[253, 2353], [338, 1000]]}),
    ):
        status, answer = shared.ask("alice", path, {**body, "max_tokens": 8})
        assert status == 200 and len(answer["choices"]) > 1, answer
        others += len(answer["choices"]) - 1
    wait_for(
        lambda: abs(shared.count_generated() - before - (count_recorded("alice") - recorded)) <= others,
        "the same counts",
    )
    assert others == 2 + 3 + 1 and count_recorded("alice") - recorded > 8 * 3


def test_aborted_streams_are_recorded_as_the_engine_counts_them(shared: SharedEndpoint) -> None:
    before, recorded = shared.count_generated(), count_recorded("bob")
    streams = 4
    for _ in range(streams):
        connection, answer = shared.open("bob", CHAT, {**QUESTION, "max_tokens": 400, "stream": True})
        with closing(connection):
            events = 0
            while events < ABORTED_AFTER:
                events += answer.readline().startswith(b"data: ")
    wait_for(lambda: count_recorded("bob") - recorded >= streams * (ABORTED_AFTER - 1), "the tokens of aborted streams")
    # The engine leaves the last token of an aborted stream out of its metrics. How many it generates before it sees the
    # disconnect depends on the machine, from none to more than the gateway assumes.
    uncertain = streams * (1 + get_engine("llama.cpp").requests.unsent_tokens)
    wait_for(
        lambda: count_recorded("bob") - recorded <= shared.count_generated() - before + uncertain,
        "no more tokens recorded than generated",
    )


def test_more_sequences_than_slots_are_refused(shared: SharedEndpoint) -> None:
    status, answer = shared.ask("alice", TEXT, {"prompt": ["x"] * 60, "max_tokens": 1})
    assert (status, answer["error"]["code"]) == (400, "too_many_sequences")


def test_refused_requests_are_counted_by_reason(shared: SharedEndpoint) -> None:
    for path, body, code in (
        (CHAT, {**QUESTION, "model": "no-such-model"}, "model_not_found"),
        (CHAT, {"messages": []}, "invalid_messages"),
        (TEXT, {"prompt": ["x"] * 60}, "too_many_sequences"),
    ):
        assert shared.ask("bob", path, body)[1]["error"]["code"] == code
    connection = http.client.HTTPConnection(shared.served.root.removeprefix("http://"), timeout=HANG_S)
    with closing(connection):
        connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {shared.keys['bob']}"})
        text = connection.getresponse().read().decode()
    for code in ("model_not_found", "invalid_messages", "too_many_sequences"):
        line = re.escape(f'bedplate_tenant_requests_unanswered_total{{reason="{code}",tenant="bob"}} ')
        assert re.search(rf"^{line}[1-9]", text, re.MULTILINE), (code, text)


@pytest.mark.nightly
def test_request_byte_by_byte_gets_408(shared: SharedEndpoint) -> None:
    host, _, port = shared.served.root.removeprefix("http://").partition(":")
    began = time.monotonic()
    with socket.create_connection((host, int(port)), HANG_S) as line:
        line.settimeout(0.5)  # the pause between two bytes
        answer = b""
        for byte in b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 10_000:
            line.send(bytes([byte]))
            try:
                answer = line.recv(1000)
                break
            except TimeoutError:
                continue
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert time.monotonic() - began >= REQUEST_TIMEOUT_S - 1
