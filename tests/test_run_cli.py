"""`bedplate run` against a server that answers as told: requests, errors and streams that break."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.commands import invoke
from tests.terminals import Terminal

from bedplate.cli.chatting import WordWrap
from bedplate.errors import BedplateError, ExternalFailure, NotPossible, UsageError
from bedplate.hosting import records
from bedplate.hosting.chat import ChatSession, find_serving


@pytest.fixture(autouse=True)
def private_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))


@dataclass
class Endpoint:
    """Answers each request with the prepared status and body, and keeps what was asked."""

    url: str = ""
    status: int = 200
    body: bytes = b""
    asked: list[dict[str, Any]] = field(default_factory=list)

    def prepare(self, *events: dict[str, Any] | str) -> None:
        lines = [f"data: {one if isinstance(one, str) else json.dumps(one)}\n\n" for one in events]
        self.status, self.body = 200, "".join(lines).encode()


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    known = Endpoint()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            known.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(known.status)
            self.send_header("content-length", str(len(known.body)))
            self.end_headers()
            self.wfile.write(known.body)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        known.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        yield known
        server.shutdown()
        thread.join()


def chunk(finish: str | None = None, **delta: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def ask(endpoint: Endpoint, prompt: str = "Hello") -> tuple[ChatSession, Any, list[tuple[str, str]]]:
    told: list[tuple[str, str]] = []
    conversation = ChatSession(endpoint.url, "m")
    return conversation, conversation.ask(prompt, lambda piece, kind: told.append((piece, kind))), told


def test_an_answer_is_told_piece_by_piece_and_kept(endpoint: Endpoint) -> None:
    usage = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}
    endpoint.prepare(
        chunk(reasoning_content="Hm"), chunk(content="Hel"), chunk(content="lo"), chunk("stop"), usage, "[DONE]"
    )
    conversation, answer, told = ask(endpoint)
    assert told == [("Hm", "reasoning"), ("Hel", "text"), ("lo", "text")]
    assert (answer.text, answer.reasoning, answer.finish_reason) == ("Hello", "Hm", "stop")
    assert (answer.prompt_tokens, answer.output_tokens) == (5, 3)
    assert not answer.stopped and 0 < answer.ttft_ms <= answer.duration_ms
    conversation.system, conversation.settings = "Be brief.", {"max_tokens": 3}
    conversation.ask("More", lambda piece, kind: None)
    assert endpoint.asked[1]["max_tokens"] == 3 and endpoint.asked[1]["stream"] is True
    assert [one["content"] for one in endpoint.asked[1]["messages"]] == ["Be brief.", "Hello", "Hello", "More"]


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        (401, UsageError, "BEDPLATE_API_KEY"),
        (400, NotPossible, "too long"),
        (404, NotPossible, "too long"),
        (429, ExternalFailure, "too long"),
        (503, ExternalFailure, "too long"),
    ],
)
def test_a_rejected_request(endpoint: Endpoint, status: int, kind: type[BedplateError], words: str) -> None:
    endpoint.status, endpoint.body = status, b'{"error": {"message": "too long"}}'
    with pytest.raises(kind) as caught:
        ask(endpoint)
    assert words in f"{caught.value.cause} {caught.value.hint}"


def test_an_answer_without_its_end_is_an_error_and_is_forgotten(endpoint: Endpoint) -> None:
    conversation = ChatSession(endpoint.url, "m")
    for broken in ([chunk(content="Hel")], [chunk(content="Hel"), {"error": {"message": "the engine died"}}]):
        endpoint.prepare(*broken)
        with pytest.raises(ExternalFailure):
            conversation.ask("Hello", lambda piece, kind: None)
    assert conversation.messages == []


def test_ctrl_c_ends_the_request_and_keeps_what_there_is(endpoint: Endpoint) -> None:
    endpoint.prepare(chunk(content="Hel"), chunk(content="lo"), "[DONE]")

    def interrupt(piece: str, kind: str) -> None:
        raise KeyboardInterrupt

    conversation = ChatSession(endpoint.url, "m")
    answer = conversation.ask("Hello", interrupt)
    assert answer.stopped and answer.text == "Hel" and answer.output_tokens is None
    assert [one["content"] for one in conversation.messages] == ["Hello", "Hel"]


def test_the_service_of_a_model_is_found_by_any_of_its_names() -> None:
    assert find_serving(None) is None
    record = records.claim_name("chat", "unused")
    records.update(
        record, state="ready", url="http://127.0.0.1:1/v1", models=("small", "large"), requested=("a/B", "c")
    )
    for name, served in ((None, "small"), ("SMALL", "small"), ("A/b", "small"), ("c", "large")):
        found = find_serving(name)
        assert found is not None and found[1] == served
    assert find_serving("a/other") is None
    records.update(records.claim_name("two", "unused"), state="ready", url="http://127.0.0.1:2/v1", models=("third",))
    with pytest.raises(UsageError) as caught:
        find_serving(None)
    assert "small, large, third" in (caught.value.hint or "")


def test_arguments_that_cannot_be_answered() -> None:
    assert "there is no prompt" in invoke("run", "builtin", stdin=b" \n").err
    assert invoke("run", "builtin", stdin=b" \n").code == 2


def test_pasted_lines_are_one_message(endpoint: Endpoint) -> None:
    """A terminal marks pasted text; readline keeps its line breaks."""
    readline = pytest.importorskip("readline")
    if "libedit" in (readline.__doc__ or ""):
        pytest.skip("libedit does not know pasted text")
    endpoint.prepare(chunk(content="Bonjour"), chunk("stop"), "[DONE]")
    code = f"""from bedplate.cli.chatting import chat
from bedplate.hosting.chat import ChatSession
chat(ChatSession({endpoint.url!r}, "m"))"""
    with Terminal(program=("-c", code)) as terminal:
        terminal.read_until(">>> ")
        terminal.type("\x1b[200~Translate:\rGood morning\x1b[201~\r")
        terminal.read_until("Bonjour")
        terminal.read_until(">>> ")
        terminal.type("/exit\r")
        assert terminal.wait() == 0
    assert [one["messages"][-1]["content"] for one in endpoint.asked] == ["Translate:\nGood morning"]


def type_on_screen(pieces: list[str], width: int) -> list[str]:
    wrap, shown = WordWrap(), ""
    for piece in pieces:
        for part in wrap.split(piece, width):
            shown = shown + part if isinstance(part, str) else shown[: len(shown) - part] if part else shown
    return shown.split("\n")


def test_streamed_answers_wrap_between_words() -> None:
    text = "The sky is blue because air scatters light. incomprehensibilities\nEnd"
    expected = ["The sky is", "blue", "because", "air", "scatters", "light.", "incomprehe", "nsibilitie", "s", "End"]
    for size in (1, 2, 3, 5, len(text)):  # a token may end within a word
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert [line.rstrip() for line in type_on_screen(pieces, 10)] == expected
