"""The shipped server: its protocol, with a scripted backend."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import json
import os
import random
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import HANG_S, wait_for
from tests.soak.grammar import generate_request
from tests.soak.hostile import Results, send_request

from bedplate.engines.shipped import SERVER_PACKAGES, BedplateServedEngine
from bedplate.engines.shipped.openai_server import (
    BackendError,
    ChatTemplate,
    GenerationRequest,
    Piece,
    find_special_tokens,
    read_template,
)
from bedplate.engines.shipped.openai_server.text import Detokenizer, StopStringFilter
from bedplate.engines.shipped.openai_server.worker import AnswerStream
from bedplate.run.supervisor import find_free_port

if TYPE_CHECKING:
    import openai

SCRIPT = Path(__file__).parent / "scripted_server.py"
KEY = "a key of our own"
SENT_KEY = f"POST /tokenize HTTP/1.1\r\nHost: x\r\nX-Api-Key: {KEY}\r\n".encode()
"""The beginning of a request."""
CONTEXT = 200


class Shipped(BedplateServedEngine):
    id = "shipped"
    name = "Shipped"


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    port: int
    opened: openai.OpenAI | None = None
    lines: list[socket.socket] = field(default_factory=list)
    """To be closed also where a test fails: what is left open is blamed on whichever test runs when it is collected."""

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANG_S)

    def ask(
        self, path: str, body: Any = None, method: str | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        connection = self.connect()
        with contextlib.closing(connection):
            data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            given = {"Authorization": f"Bearer {KEY}", **(headers or {})}
            connection.request(method or ("GET" if body is None else "POST"), path, data, given)
            answer = connection.getresponse()
            text = answer.read()
        kind = answer.getheader("Content-Type", "")
        return answer.status, json.loads(text) if text and "json" in kind else text.decode()

    def metrics(self) -> dict[str, float]:
        _, text = self.ask("/metrics")
        rows = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {name.removeprefix("bedplate_engine_"): float(value) for name, _, value in rows}

    def client(self) -> openai.OpenAI:
        import openai

        if self.opened is None:
            url = f"http://127.0.0.1:{self.port}/v1"
            self.opened = openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=HANG_S)
        return self.opened

    def complete(self, prompt: str, **more: Any) -> tuple[int, Any]:
        return self.ask("/v1/completions", {"prompt": prompt, **more})


def start(*arguments: str, env: dict[str, str] | None = None, wait: bool = True) -> Server:
    port = find_free_port()
    argv = [sys.executable, "-I", str(SCRIPT), "--model", "m", "--served-name", "scripted", "--port", str(port)]
    process = subprocess.Popen(
        [*argv, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "BEDPLATE_ENGINE_KEY": KEY, **(env or {})},
    )
    server = Server(process, port)

    def answers() -> bool:
        with contextlib.suppress(OSError):
            return server.ask("/health")[0] == 200 or not wait
        return False

    wait_for(lambda: answers() or process.poll() is not None, "the server")
    return server


def stop(server: Server) -> None:
    if server.opened is not None:
        server.opened.close()
    for line in server.lines:
        line.close()
    server.process.kill()
    server.process.communicate()


def read_until_closed(line: socket.socket) -> bytes:
    found = b""
    while more := line.recv(65536):
        found += more
    return found


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    one = start("--slots", "2", "--context", str(CONTEXT))
    yield one
    stop(one)


class TestAnswers:
    def test_answers_a_chat(self, server: Server) -> None:
        answer = server.client().chat.completions.create(
            model="scripted", messages=[{"role": "user", "content": "say:Grüße, 猫!"}]
        )
        assert answer.choices[0].message.content == "Grüße, 猫!" and answer.choices[0].finish_reason == "stop"
        assert answer.object == "chat.completion" and answer.model == "scripted"
        assert answer.usage is not None
        written = len("Grüße, 猫!".encode())
        # The template writes the special tokens of a chat; and the token that ends an answer is computed, so it counts.
        assert answer.usage.prompt_tokens == written + len("say:") and answer.usage.completion_tokens == written + 1

    def test_streams_whole_characters(self, server: Server) -> None:
        text = "Grüße, 猫 🙂!"
        chunks = list(
            server.client().chat.completions.create(
                model="scripted",
                messages=[{"role": "user", "content": f"say:{text}"}],
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        pieces = [
            chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content
        ]
        assert pieces == list(text)
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-2].choices[0].finish_reason == "stop" and chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == len(text.encode()) + 1
        assert len({chunk.id for chunk in chunks}) == 1

    def test_stream_has_usage_only_if_requested(self, server: Server) -> None:
        chunks = server.client().completions.create(model="scripted", prompt="say:hi", stream=True)
        assert [chunk.choices[0].text for chunk in chunks] == ["h", "i", ""]

    def test_a_completion_begins_with_the_special_token(self, server: Server) -> None:
        answer = server.client().completions.create(model="scripted", prompt="say:hi")
        assert answer.choices[0].text == "hi" and answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len("say:hi") + 1, 3)

    def test_accepts_token_ids_as_prompt(self, server: Server) -> None:
        status, answer = server.ask("/v1/completions", {"prompt": [256, *b"say:ok"]})
        assert status == 200 and answer["choices"][0]["text"] == "ok" and answer["usage"]["prompt_tokens"] == 7

    def test_max_tokens_limits_the_answer(self, server: Server) -> None:
        answer = server.client().completions.create(model="scripted", prompt="forever:", max_tokens=7)
        assert answer.choices[0].text == "aaaaaaa" and answer.choices[0].finish_reason == "length"
        assert answer.usage is not None and answer.usage.completion_tokens == 7
        wait_for(lambda: server.metrics()["requests_running"] == 0, "the engine to be idle")

    def test_limit_and_end_in_the_same_step(self, server: Server) -> None:
        # Two pieces a step: "ab", "c" and the end. The limit is met by "c", when the engine has forgotten the request.
        _, answer = server.complete("twice:abc", max_tokens=3)
        assert answer["choices"][0]["text"] == "abc" and answer["usage"]["completion_tokens"] == 3
        assert server.complete("twice:abc")[1]["usage"]["completion_tokens"] == 4

    def test_context_limits_the_answer(self, server: Server) -> None:
        _, answer = server.complete("forever:")
        assert answer["usage"]["total_tokens"] == CONTEXT and answer["choices"][0]["finish_reason"] == "length"

    def test_stop_strings_end_the_answer(self, server: Server) -> None:
        status, answer = server.complete("say:one two three", stop=["wo t", "zzz"])
        assert status == 200 and answer["choices"][0]["text"] == "one t"
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert server.complete("say:one two", stop="wo!")[1]["choices"][0]["text"] == "one two"

    def test_returns_logprobs(self, server: Server) -> None:
        answer = server.client().chat.completions.create(
            model="scripted", messages=[{"role": "user", "content": "say:ab"}], logprobs=True, top_logprobs=2
        )
        said = answer.choices[0].logprobs
        assert said is not None and said.content is not None
        assert [(one.token, one.logprob) for one in said.content] == [("a", -0.5), ("b", -0.5)]
        assert [one.token for one in said.content[0].top_logprobs] == ["a", "?"]
        _, old = server.complete("say:ab", logprobs=1)
        assert old["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -0.5}, {"b": -0.5}]

    def test_passes_the_schema_to_the_engine(self, server: Server) -> None:
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        status, answer = server.complete("schema:", response_format=form)
        assert status == 200 and json.loads(answer["choices"][0]["text"]) == schema

    def test_returns_embeddings(self, server: Server) -> None:
        # The client asks for base64 by itself.
        answer = server.client().embeddings.create(model="scripted", input=["one", "three"])
        assert [one.embedding for one in answer.data] == [[4.0, 0.5], [6.0, 0.5]]
        assert answer.usage.prompt_tokens == 10
        _, packed = server.ask("/v1/embeddings", {"input": "one", "encoding_format": "base64"})
        assert struct.unpack("<2f", base64.b64decode(packed["data"][0]["embedding"])) == (4.0, 0.5)

    def test_returns_labels(self, server: Server) -> None:
        _, answer = server.ask("/classify", {"input": ["one", "a long sentence"]})
        assert [row["label"] for row in answer["data"]] == ["short", "long"] and answer["data"][0]["probs"] == [
            0.9,
            0.1,
        ]

    def test_tokenizes_and_detokenizes(self, server: Server) -> None:
        assert server.ask("/tokenize", {"content": "hé"})[1]["tokens"] == [104, 195, 169]
        assert server.ask("/tokenize", {"prompt": "h", "add_special_tokens": True})[1]["count"] == 2
        chat = {"messages": [{"role": "user", "content": "ab"}]}
        assert server.ask("/tokenize", chat)[1]["tokens"] == [97, 98]
        assert server.ask("/detokenize", {"tokens": [104, 195, 169]})[1]["content"] == "hé"

    def test_lists_the_model(self, server: Server) -> None:
        (model,) = server.client().models.list().data
        assert model.id == "scripted" and server.ask("/v1/models/scripted")[1]["max_model_len"] == CONTEXT

    def test_answers_eight_concurrent_requests(self, server: Server) -> None:
        texts = [f"number {n} " * (n + 1) for n in range(8)]
        found: dict[int, Any] = {}

        def ask(number: int) -> None:
            found[number] = server.complete(f"say:{texts[number]}")[1]

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [found[n]["choices"][0]["text"] for n in range(8)] == texts
        assert [found[n]["usage"]["completion_tokens"] for n in range(8)] == [len(text) + 1 for text in texts]
        assert int(server.complete("most:")[1]["choices"][0]["text"]) == 2  # slots, and never more

    def test_top_k_beyond_the_vocabulary_is_the_whole_vocabulary(self, server: Server) -> None:
        for top_k, used in ((5, "5"), (2**63, "258"), (-1, "-1")):
            assert server.complete("top_k:", top_k=top_k)[1]["choices"][0]["text"] == used

    def test_surrogate_pairs_are_text(self, server: Server) -> None:
        assert (
            server.ask("/v1/completions", b'{"prompt": "say:\\ud83d\\ude42"}')[1]["choices"][0]["text"] == "\U0001f642"
        )


class TestErrors:
    @pytest.mark.parametrize(
        ("path", "body", "status", "says", "param"),
        [
            ("/v1/completions", b"{not json", 400, "not JSON", None),
            ("/v1/completions", b"\xff\xfe", 400, "not JSON", None),
            ("/v1/completions", [1], 400, "a JSON object", None),
            ("/v1/completions", {}, 400, "prompt must be", "prompt"),
            ("/v1/completions", {"prompt": ["a", "b"]}, 400, "prompt must be a text", "prompt"),
            ("/v1/completions", {"prompt": "say:x", "max_tokens": 0}, 400, "at least 1", "max_tokens"),
            ("/v1/completions", {"prompt": "say:x", "max_tokens": "9"}, 400, "an integer", "max_tokens"),
            ("/v1/completions", {"prompt": "say:x", "temperature": "hot"}, 400, "a number", "temperature"),
            ("/v1/completions", {"prompt": "say:x", "top_p": 1.5}, 400, "between 0 and 1", "top_p"),
            ("/v1/completions", {"prompt": "say:x", "top_p": 10**400}, 400, "between 0 and 1", "top_p"),
            ("/v1/completions", b'{"prompt": "say:x", "top_p": NaN}', 400, "between 0 and 1", "top_p"),
            ("/v1/completions", {"prompt": "say:\ud800"}, 400, "half of a surrogate pair", None),
            ("/v1/completions", {"prompt": "say:x", "user": {"\udfff": 1}}, 400, "half of a surrogate pair", None),
            ("/v1/completions", {"prompt": "say:x", "n": 2}, 400, "n and best_of must be 1", "n"),
            ("/v1/completions", {"prompt": "say:x", "stop": [1]}, 400, "a list of strings", "stop"),
            ("/v1/completions", {"prompt": "say:x", "stream": "yes"}, 400, "true or false", "stream"),
            ("/v1/completions", {"prompt": "say:x", "logit_bias": {"5": 1}}, 400, "logit_bias", "logit_bias"),
            ("/v1/completions", {"prompt": "say:x", "echo": True}, 400, "does not support echo", "echo"),
            ("/v1/completions", {"prompt": "x" * CONTEXT}, 400, "context length is 200 tokens", "prompt"),
            ("/v1/completions", {"prompt": "refuse:"}, 400, "not this one", "prompt"),
            ("/v1/completions", {"prompt": "fail:"}, 500, "no memory for this one", None),
            (
                "/v1/completions",
                {"prompt": "x", "response_format": {"type": "xml"}},
                400,
                "json_schema",
                "response_format",
            ),
            (
                "/v1/completions",
                {"prompt": "x", "response_format": {"type": "json_object"}},
                400,
                "does not support response_format json_object",
                None,
            ),
            ("/v1/chat/completions", {"messages": []}, 400, "non-empty", "messages"),
            ("/v1/chat/completions", {"messages": ["hi"]}, 400, "an object with a role", "messages[0]"),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}, 400, "text", "messages[0]"),
            ("/v1/chat/completions", {"messages": [{"role": "nobody", "content": "x"}]}, 400, "nobody", "messages"),
            (
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
                400,
                "image_url: this server supports only text",
                "messages[0]",
            ),
            (
                "/v1/chat/completions",
                {
                    "messages": [{"role": "user", "content": "x"}],
                    "tools": [{"type": "function", "function": {"name": "f"}}],
                },
                400,
                "has no tools",
                "tools",
            ),
            ("/v1/completions", {"prompt": [258]}, 400, "not in the vocabulary", "prompt"),
            ("/v1/completions", {"prompt": [5, -1]}, 400, "not in the vocabulary", "prompt"),
            ("/v1/embeddings", {"input": [[1], [2**70]]}, 400, "not in the vocabulary", "input"),
            ("/v1/embeddings", {"input": []}, 400, "non-empty", "input"),
            ("/v1/embeddings", {"input": "x", "encoding_format": "int8"}, 400, "float or base64", "encoding_format"),
            ("/v1/embeddings", {"input": "x" * 300}, 400, "301 tokens", "input"),
            ("/v1/nothing", {}, 404, "unknown path /v1/nothing", None),
            ("/v1/models", {}, 405, "supports GET", None),
            ("/tokenize", {"content": 5}, 400, "a text", "content"),
            ("/detokenize", {"tokens": ["x"]}, 400, "token ids", "tokens"),
        ],
    )
    def test_errors_have_openais_format(
        self, server: Server, path: str, body: Any, status: int, says: str, param: str | None
    ) -> None:
        got, answer = server.ask(path, body)
        assert got == status, answer
        error = answer["error"]
        assert says in error["message"] and set(error) == {"message", "type", "param", "code"}
        assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
        assert param is None or error["param"] == param

    def test_rejected_stream_gets_an_error_status(self, server: Server) -> None:
        import openai

        with pytest.raises(openai.BadRequestError, match="not this one"):
            server.client().completions.create(model="scripted", prompt="refuse:", stream=True)

    def test_requires_the_api_key(self, server: Server) -> None:
        for headers in ({"Authorization": "Bearer wrong"}, {"Authorization": ""}, {"Authorization": KEY}):
            assert server.ask("/v1/models", headers=headers)[0] == 401
            assert server.ask("/v1/completions", {"prompt": "say:x"}, headers=headers)[0] == 401
        assert server.ask("/v1/models", headers={"Authorization": "", "X-Api-Key": KEY})[0] == 200

    def test_probes_and_monitors_in_a_container_need_no_key(self, server: Server) -> None:
        assert [server.ask(path, headers={"Authorization": ""})[0] for path in ("/health", "/metrics")] == [200, 200]

    def test_under_the_supervisor_every_path_requires_the_key(self) -> None:
        supervised = start(env={"BEDPLATE_ENGINE_SUPERVISED": "1"})
        paths = ("/", "/health", "/health/", "/metrics", "/v1/models", "/v1/completions", "/tokenize", "/nothing")
        try:
            for method in ("GET", "POST", "OPTIONS", "HEAD"):
                for headers in ({"Authorization": ""}, {"Authorization": "Bearer wrong"}):
                    answers = {supervised.ask(path, method=method, headers=headers)[0] for path in paths}
                    assert answers == {401}
            assert supervised.ask("/health")[0] == supervised.ask("/metrics")[0] == 200
        finally:
            stop(supervised)

    def test_rejects_logprobs_if_the_engine_has_none(self) -> None:
        plain = start("--plain")
        try:
            chat = {"messages": [{"role": "user", "content": "say:x"}], "logprobs": True}
            status, answer = plain.ask("/v1/chat/completions", chat)
            assert status == 400 and answer["error"]["message"] == "scripted does not support logprobs"
            assert plain.complete("say:x", response_format={"type": "json_schema"})[0] == 400
        finally:
            stop(plain)


class TestConnections:
    def test_several_requests_on_one_connection(self, server: Server) -> None:
        connection = server.connect()
        with contextlib.closing(connection):
            for stream in (False, True, True, False):
                body = json.dumps({"prompt": "say:hello", "stream": stream})
                connection.request("POST", "/v1/completions", body, {"Authorization": f"Bearer {KEY}"})
                answer = connection.getresponse()
                text = answer.read().decode()
                assert answer.status == 200 and text.endswith("data: [DONE]\n\n") == stream
            before = connection.sock
            connection.request("GET", "/nothing", headers={"Authorization": f"Bearer {KEY}"})
            assert connection.getresponse().read() and connection.sock is before

    def raw(self, server: Server, data: bytes) -> bytes:
        """All that the server sends until it closes the connection."""
        with socket.create_connection(("127.0.0.1", server.port), timeout=HANG_S) as line:
            line.sendall(data)
            return read_until_closed(line)

    def test_pipelined_requests_are_answered_in_order(self, server: Server) -> None:
        last = f"GET /nothing HTTP/1.1\r\nHost: x\r\nX-Api-Key: {KEY}\r\nConnection: close\r\n\r\n".encode()
        got = self.raw(server, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" + last)
        assert got.index(b"200 OK") < got.index(b"404 Not Found")

    def test_http_1_0_connection_is_closed_after_one_request(self, server: Server) -> None:
        got = self.raw(server, b"GET /health HTTP/1.0\r\n\r\nGET /health HTTP/1.0\r\n\r\n")
        assert got.count(b"200 OK") == 1 and b"connection: close" in got.lower()

    def test_head_response_has_no_body(self, server: Server) -> None:
        got = self.raw(server, b"HEAD /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert b"content-length: 16" in got.lower() and got.endswith(b"\r\n\r\n")

    def test_accepts_a_chunked_body(self, server: Server) -> None:
        body = b'{"content": "hey"}'
        head = f"POST /tokenize HTTP/1.1\r\nHost: x\r\nX-Api-Key: {KEY}\r\nTransfer-Encoding: chunked\r\n".encode()
        chunks = b"5\r\n" + body[:5] + b"\r\n" + b"%x;note=1\r\n" % len(body[5:]) + body[5:] + b"\r\n0\r\nT: x\r\n\r\n"
        got = self.raw(server, head + b"Connection: close\r\nExpect: 100-continue\r\n\r\n" + chunks)
        first, _, rest = got.partition(b"\r\n\r\n")
        assert first.startswith(b"HTTP/1.1 100 Continue") and rest.startswith(b"HTTP/1.1 200 OK")
        assert b"[104, 101, 121]" in got

    def test_chunked_body_overrides_content_length(self, server: Server) -> None:
        head = f"POST /tokenize HTTP/1.1\r\nHost: x\r\nX-Api-Key: {KEY}\r\nConnection: close\r\nContent-Length: 1\r\n"
        chunks = b"12\r\n" + b'{"content": "hey"}' + b"\r\n0\r\n\r\n"
        got = self.raw(server, head.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + chunks)
        assert got.startswith(b"HTTP/1.1 200 OK") and b"[104, 101, 121]" in got and got.count(b"HTTP/1.1") == 1

    def test_chunked_body_is_limited(self, server: Server) -> None:
        head = f"POST /tokenize HTTP/1.1\r\nHost: x\r\nX-Api-Key: {KEY}\r\nTransfer-Encoding: chunked\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.port), timeout=HANG_S) as line:
            line.sendall(head.encode())
            piece = b"x" * (1 << 20)
            with contextlib.suppress(ConnectionError):  # it closes before all is sent
                for _ in range(80):
                    line.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
            with contextlib.suppress(ConnectionResetError):
                assert line.recv(100).startswith(b"HTTP/1.1 413")
        assert server.ask("/health")[0] == 200

    def test_normalizes_paths(self, server: Server) -> None:
        assert server.ask("/v1/models/")[0] == server.ask("/v1/models/scripted/?x=1")[0] == 200
        status, answer = server.ask("/v1/models/another")
        assert status == 404 and answer["error"]["code"] == "not_found"

    @pytest.mark.parametrize(
        ("data", "status"),
        [
            (b"HELO mail\r\n\r\n", b"400"),
            (b"GET / HTTP/2\r\n\r\n", b"400"),
            (b"GET / HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n", b"400"),
            (b"GET / HTTP/1.1\r\nHost: x\r\nName : x\r\n\r\n", b"400"),
            (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n", b"400"),
            (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", b"400"),
            (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n", b"400"),
            (SENT_KEY + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", b"400"),
            (SENT_KEY + b"Content-Length: 99999999999\r\n\r\n", b"413"),
            (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n", b"401"),
            (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * (1 << 20) + b"\r\n\r\n", b"400"),
        ],
    )
    def test_rejects_invalid_http(self, server: Server, data: bytes, status: bytes) -> None:
        with contextlib.suppress(ConnectionError):
            assert self.raw(server, data).startswith(b"HTTP/1.1 " + status)
        assert server.ask("/health")[0] == 200

    @pytest.mark.parametrize("method", ["POST", "HEAD"])
    def test_body_that_is_malformed_after_the_answer_closes_the_connection(self, method: str) -> None:
        one = start()
        head = f"{method} /nothing HTTP/1.1\r\nHost: x\r\nX-Api-Key: {KEY}\r\nTransfer-Encoding: chunked\r\n\r\n"
        malformed = b"zz\r\n"
        try:
            with socket.create_connection(("127.0.0.1", one.port), timeout=HANG_S) as line:
                # The response to HEAD has no body, whether the server sends it before or after it reads this one.
                line.sendall(head.encode() + (malformed if method == "HEAD" else b""))
                assert line.recv(100).startswith(b"HTTP/1.1 40")
                if method == "POST":
                    line.sendall(malformed)
                assert b"HTTP/1.1" not in read_until_closed(line)
            one.process.kill()
            assert "Traceback" not in one.process.communicate()[1].decode()
        finally:
            stop(one)

    def test_reset_connections_leave_nothing(self) -> None:
        one = start("--slots", "2")
        asked = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"

        def count() -> int:
            return int(one.complete("connections:")[1]["choices"][0]["text"])

        try:
            before = count()
            for _ in range(20):
                with socket.create_connection(("127.0.0.1", one.port), timeout=HANG_S) as line:
                    line.sendall(asked)
                    assert b"200 OK" in line.recv(65536)
                    line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # RST
            wait_for(lambda: count() <= before, "connections to be released")
        finally:
            stop(one)


class TestGeneratedRequests:
    REQUESTS, AT_ONCE = 400, 64

    def test_none_fails_and_none_is_answered_without_the_key(self) -> None:
        one = start("--slots", "2", "--context", str(CONTEXT), env={"BEDPLATE_ENGINE_SUPERVISED": "1"})
        results, numbers = Results(), iter(range(self.REQUESTS))

        async def run_client() -> None:
            for number in numbers:
                key = KEY if number % 3 else None
                sent = generate_request(random.Random(number), "scripted", key)
                answer = await send_request("127.0.0.1", one.port, sent, limit_s=1.0)
                results.add_answer(str(number), sent, answer, must_refuse=key is None)

        async def run_clients() -> None:
            await asyncio.gather(*(run_client() for _ in range(self.AT_ONCE)))

        try:
            asyncio.run(run_clients())
            assert not results.wrong, results.wrong
            assert results.statuses["200"] and results.statuses["400"] and results.statuses["401"], results.statuses
            wait_for(lambda: one.metrics()["requests_running"] == 0, "aborted requests to end")
            assert one.process.poll() is None
            one.process.kill()
            printed = one.process.communicate()[1].decode()
            assert "Traceback" not in printed, printed[printed.index("Traceback") :]
        finally:
            stop(one)


class TestCancelling:
    def open(self, server: Server, stream: bool) -> socket.socket:
        body = json.dumps({"prompt": "forever:", "stream": stream}).encode()
        line = socket.create_connection(("127.0.0.1", server.port), timeout=HANG_S)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Api-Key: {KEY}\r\nContent-Length: {len(body)}\r\n\r\n"
        server.lines.append(line)
        line.sendall(head.encode() + body)
        return line

    @pytest.fixture
    def endless(self) -> Iterator[Server]:
        one = start("--slots", "2")  # without a context: nothing but its client ends a request
        yield one
        stop(one)

    @pytest.mark.parametrize("stream", [True, False])
    def test_disconnect_cancels_the_request(self, endless: Server, stream: bool) -> None:
        line = self.open(endless, stream)
        wait_for(lambda: endless.metrics()["generation_tokens_total"] > 5, "some tokens")
        if stream:
            assert line.recv(100).startswith(b"HTTP/1.1 200 OK")
        line.close()
        wait_for(lambda: endless.metrics()["requests_running"] == 0, "the request to be cancelled")
        metrics = endless.metrics()
        assert metrics['requests_total{outcome="cancelled"}'] == 1 and metrics["kv_use_ratio"] <= 0.5

    def test_queued_requests_wait_and_can_be_cancelled(self, endless: Server) -> None:
        lines = [self.open(endless, stream=True) for _ in range(4)]

        def state() -> tuple[float | None, ...]:
            read = Shipped().read_metrics(endless.ask("/metrics")[1])
            return (read.running, read.waiting, read.kv_use)

        # The use of the cache is reported by the next step, shortly after the requests are counted.
        wait_for(lambda: state() == (2, 2, 1.0), "two to be computed and two to wait")
        # A waiting request is cancelled without having been computed; then a running one, and the last request starts.
        lines[3].close()
        wait_for(lambda: endless.metrics()["requests_waiting"] == 1, "the one that left to be forgotten")
        lines[0].close()
        wait_for(lambda: endless.metrics()["requests_waiting"] == 0, "the last to be computed")
        assert lines[2].recv(100).startswith(b"HTTP/1.1 200 OK")
        assert endless.metrics()["requests_running"] == 2
        for line in lines:
            line.close()
        wait_for(lambda: endless.metrics()["requests_running"] == 0, "all to be cancelled")


class TestLifecycle:
    def test_reports_loading(self, tmp_path: Path) -> None:
        gate = tmp_path / "gate"
        server = start("--gate", str(gate), wait=False)
        try:
            wait_for(lambda: server.ask("/health")[1]["progress"] == 0.25, "the first progress")
            assert server.ask("/health")[0] == 503
            status, answer = server.complete("say:x")
            assert status == 503 and answer["error"]["code"] == "model_loading" and "25 %" in answer["error"]["message"]
            gate.touch()
            wait_for(lambda: server.ask("/health")[0] == 200, "it to be loaded")
            assert server.complete("say:x")[0] == 200
        finally:
            server.process.kill()
        lines = server.process.communicate()[0].decode().splitlines()
        assert [Shipped().read_progress(line) for line in lines] == [0.25, 1.0]

    def test_exits_when_stdin_closes(self) -> None:
        server = start(env={"BEDPLATE_ENGINE_SUPERVISED": "1"})
        assert server.process.stdin is not None
        server.process.stdin.close()
        assert server.process.wait(HANG_S) == 0
        server.process.stdin = None
        server.process.communicate()

    def test_closed_stdin_is_ignored_without_supervisor(self) -> None:
        server = start()
        assert server.process.stdin is not None
        server.process.stdin.close()
        server.process.stdin = None
        assert server.complete("say:still here")[0] == 200
        server.process.terminate()
        assert server.process.wait(HANG_S) == 0
        server.process.communicate()

    def test_exits_when_the_engine_fails(self) -> None:
        server = start("--slots", "2")
        with contextlib.suppress(ConnectionError, http.client.HTTPException):
            status, answer = server.complete("crash:")
            assert status == 500 and "the engine failed" in answer["error"]["message"]
        assert server.process.wait(HANG_S) == 1
        assert b"RuntimeError: the engine broke" in server.process.communicate()[1]

    def test_exits_if_the_model_cannot_be_loaded(self) -> None:
        server = start("--model", "broken")
        assert server.process.wait(HANG_S) == 1
        assert server.process.communicate()[1].decode().splitlines()[-1] == "bedplate-engine: the model is broken"

    def test_reports_missing_packages(self, tmp_path: Path) -> None:
        python = tmp_path / "env" / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
        ended = subprocess.run([python, str(SCRIPT), "--model", "m"], capture_output=True, text=True, timeout=HANG_S)
        assert ended.returncode == 1
        failure = Shipped().explain(ended.stderr)
        assert failure is not None and f"are missing from {python}" in failure.message
        assert failure.hint == f"uv pip install --python {python} {' '.join(SERVER_PACKAGES)}"

    def test_reports_a_port_in_use(self) -> None:
        server = start()
        try:
            argv = [sys.executable, "-I", str(SCRIPT), "--model", "m", "--port", str(server.port)]
            second = subprocess.run(argv, capture_output=True, text=True, timeout=HANG_S)
        finally:
            stop(server)
        assert second.returncode == 1
        failure = Shipped().explain(second.stderr)
        assert failure is not None and "private port" in failure.message and not failure.lasting


class TestText:
    @given(text=st.text(), stop=st.text(min_size=1, max_size=4), sizes=st.lists(st.integers(1, 5)))
    def test_text_ends_before_a_stop_string(self, text: str, stop: str, sizes: list[int]) -> None:
        watch = StopStringFilter([stop])
        out, at = "", 0
        for size in [*sizes, len(text) + 1]:
            out += watch.feed(text[at : at + size])
            at += size
            if watch.found:
                break
        assert out + ("" if watch.found else watch.flush()) == text.partition(stop)[0]
        assert watch.found == (stop in text)

    @given(
        text=st.text(alphabet="abc", max_size=30), stops=st.lists(st.text("abc", min_size=1, max_size=3), max_size=4)
    )
    def test_no_part_of_any_stop_string_is_shown(self, text: str, stops: list[str]) -> None:
        watch = StopStringFilter(stops)
        out = ""
        for letter in text:
            out += watch.feed(letter)
            if watch.found:
                break
        out += "" if watch.found else watch.flush()
        assert text.startswith(out) and not any(stop in out for stop in stops)
        assert watch.found == any(stop in text for stop in stops)

    @given(text=st.text())
    def test_joins_tokens_that_are_parts_of_characters(self, text: str) -> None:
        tokens = list(text.encode())
        words = Detokenizer(lambda some: bytes(some).decode("utf-8", "replace"))
        out = "".join(words.feed(token) for token in tokens) + words.flush()
        assert out == text

    def test_incomplete_character_at_the_end_is_replaced(self) -> None:
        words = Detokenizer(lambda some: bytes(some).decode("utf-8", "replace"))
        assert [words.feed(token) for token in b"a\xe7\x8c"] == ["a", "", ""] and words.flush() == "\ufffd"

    def test_uses_the_text_of_the_engine(self) -> None:
        answer = AnswerStream(GenerationRequest(prompt=[1, 2], max_tokens=10), None, lambda delta: None)
        first = answer.feed(Piece(answer.request, text="two words", tokens=2, prompt_tokens=5, cached_tokens=3))
        assert first.text == "two words" and not answer.done
        answer.feed(Piece(answer.request, text="", tokens=1, finish="stop"))
        assert answer.done
        assert answer.count_usage() == {
            "prompt_tokens": 5,
            "completion_tokens": 3,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 3},
        }


class TestTemplates:
    CHAT = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'x' %}{{ raise_exception('no x') }}{% endif %}"
        "<{{ m.role }}>{{ m.content | tojson }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )

    def test_renders_as_transformers_does(self) -> None:
        template = ChatTemplate(self.CHAT, {"bos_token": "<s>"})
        assert template.render([{"role": "user", "content": "<é>"}], None, {}) == '<s><user>"<é>"<assistant>'

    def test_template_errors_are_rejected_requests(self) -> None:
        template = ChatTemplate(self.CHAT, {})
        with pytest.raises(BackendError, match="no x"):
            template.render([{"role": "x", "content": ""}], None, {})
        with pytest.raises(BackendError, match="cannot render"):
            ChatTemplate("{{ messages[0].content + 1 }}", {}).render([{"role": "user", "content": "x"}], None, {})
        with pytest.raises(BackendError, match="rejected"):
            ChatTemplate("{% for %}", {}).render([], None, {})
        with pytest.raises(BackendError, match="no chat template"):
            ChatTemplate(None, {}).render([], None, {})

    def test_template_is_sandboxed(self) -> None:
        with pytest.raises(BackendError):
            ChatTemplate("{{ messages.__class__.__mro__ }}", {}).render([], None, {})

    def test_finds_the_template_in_any_file(self, tmp_path: Path) -> None:
        assert read_template(tmp_path, {}) is None
        assert read_template(tmp_path, {"chat_template": "in the configuration"}) == "in the configuration"
        several = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}, "odd"]
        assert read_template(tmp_path, {"chat_template": several}) == "d"
        (tmp_path / "chat_template.json").write_text('{"chat_template": "in a file"}')
        assert read_template(tmp_path, {}) == "in a file"
        (tmp_path / "chat_template.jinja").write_text("in its own")
        assert read_template(tmp_path, {"chat_template": "other"}) == "in its own"

    def test_reads_special_tokens(self) -> None:
        config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None, "unk_token": 5}
        assert find_special_tokens(config) == {"bos_token": "<s>", "eos_token": "</s>"}


def test_parses_progress_lines() -> None:
    read = Shipped().read_progress
    assert read("bedplate-engine: loading 0.250") == 0.25 and read("bedplate-engine: loading 1.000\n") == 1.0
    assert read("loading 0.5") is None and read("bedplate-engine: loading x") is None


def test_missing_metrics_are_none() -> None:
    state = Shipped().read_metrics("")
    assert (state.running, state.waiting, state.kv_use) == (None, None, None)
