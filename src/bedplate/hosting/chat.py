"""A client of a running endpoint: finds the service of a model, and streams the answers of a conversation."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from bedplate.errors import BedplateError, ExternalFailure, NotPossible, UsageError
from bedplate.facts.library import split_reference
from bedplate.hosting import records
from bedplate.hosting.services import read_status
from bedplate.run.models import expand_name, find_local_model, is_builtin
from bedplate.values.chat import ChatAnswer
from bedplate.values.record import replace_fields
from bedplate.values.service import ServiceRecord

TextKind = Literal["text", "reasoning"]
Tell = Callable[[str, TextKind], None]
"""Called with each piece of an answer as it arrives."""
REASONING_KEYS = ("reasoning_content", "reasoning")
"""Where engines put what a reasoning model writes before its answer."""


def find_serving(model: str | None) -> tuple[ServiceRecord, str] | None:
    """The running service that serves the model, and the name it has there. Without a name: of the only service."""
    ready = [one for one in records.list_running() if one.state == "ready" and one.url and one.models]
    if model is None:
        if len(ready) > 1:
            served = ", ".join(name for one in ready for name in one.models)
            raise UsageError(f"{len(ready)} services are running", hint=f"name a model: {served}")
        return (ready[0], ready[0].models[0]) if ready else None
    for record in ready:
        for served, requested in zip(record.models, record.requested or record.models, strict=False):
            if {model.lower(), expand_name(model).lower()} & {served.lower(), expand_name(requested).lower()}:
                return record, served
    names = _list_served_names(model)
    return next(((one, served) for one in ready for served in one.models if served.lower() in names), None)


def _list_served_names(model: str) -> set[str]:
    """The name under which a model on this machine is served; none if the text names one of its quantizations."""
    if not is_builtin(model) and (split_reference(model)[1] or model.lower().endswith(".gguf")):
        return set()
    found = find_local_model(model)
    return {found.served_name.lower()} if found is not None else set()


@dataclass
class ChatSession:
    """The messages so far, and the endpoint that continues them."""

    url: str
    model: str
    api_key: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of each request: max_tokens, temperature."""
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    engine: str | None = None
    record: ServiceRecord | None = None

    def clear(self) -> None:
        self.messages.clear()

    def ask(self, prompt: str, tell: Tell) -> ChatAnswer:
        """Sends the prompt after the earlier messages, and returns the complete answer, or what there is of it when
        Ctrl-C stops it. A question without an answer is not kept."""
        question = {"role": "user", "content": prompt}
        system = [{"role": "system", "content": self.system}] if self.system else []
        answer = self._request([*system, *self.messages, question], tell)
        if answer.text:
            self.messages += [question, {"role": "assistant", "content": answer.text}]
        return answer

    def _request(self, messages: Sequence[Mapping[str, str]], tell: Tell) -> ChatAnswer:
        body = {
            "model": self.model, "messages": messages, "stream": True, "stream_options": {"include_usage": True},
            **self.settings,
        }  # fmt: skip
        received = _ReceivedAnswer()
        stopped = False
        try:
            with contextlib.closing(_stream(self.url, body, self.api_key)) as events:
                for event in events:
                    received.add(event, tell)
        except KeyboardInterrupt:
            stopped = True
        return ChatAnswer(
            model=self.model,
            engine=self.engine,
            url=self.url,
            text="".join(received.text),
            reasoning="".join(received.reasoning) or None,
            finish_reason=received.finish_reason,
            stopped=stopped,
            prompt_tokens=received.usage.get("prompt_tokens"),
            output_tokens=received.usage.get("completion_tokens"),
            ttft_ms=received.compute_ttft_ms(),
            output_tok_s=received.compute_tok_s(),
            duration_ms=(time.perf_counter() - received.began) * 1e3,
        )

    def add_memory(self, answer: ChatAnswer) -> ChatAnswer:
        """The answer with the memory of the engines now, if a service of bedplate gave it and says so."""
        if self.record is None:
            return answer
        try:
            return replace_fields(answer, memory_bytes=read_status(self.record).memory_bytes)
        except (BedplateError, KeyboardInterrupt):  # Ctrl-C stops waiting for a service that does not respond
            return answer


class _ReceivedAnswer:
    """What has arrived of an answer, and when."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.finish_reason: str | None = None
        self.usage: Mapping[str, Any] = {}
        self.began = time.perf_counter()
        self._first: float | None = None
        self._last: float | None = None

    def add(self, event: Mapping[str, Any], tell: Tell) -> None:
        if (error := event.get("error")) is not None:
            raise ExternalFailure("the endpoint ended the answer with an error", cause=_read_message(error))
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            thought = next((delta[key] for key in REASONING_KEYS if delta.get(key)), None)
            pieces: tuple[tuple[str | None, list[str], TextKind], ...] = (
                (thought, self.reasoning, "reasoning"),
                (delta.get("content"), self.text, "text"),
            )
            for piece, kept, kind in pieces:
                if piece:
                    self._last = time.perf_counter()
                    self._first = self._first or self._last
                    kept.append(piece)
                    tell(piece, kind)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def compute_ttft_ms(self) -> float | None:
        return (self._first - self.began) * 1e3 if self._first is not None else None

    def compute_tok_s(self) -> float | None:
        tokens = self.usage.get("completion_tokens")
        if self._first is None or self._last is None or not tokens or self._last <= self._first:
            return None
        return (int(tokens) - 1) / (self._last - self._first) or None


def _stream(url: str, body: Mapping[str, Any], api_key: str | None) -> Generator[dict[str, Any]]:
    """The events of a streamed answer. Closing the iterator closes the connection, and so cancels the request."""
    parts = urlsplit(url)
    headers = {"content-type": "application/json", **({"authorization": f"Bearer {api_key}"} if api_key else {})}
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port)
    try:
        connection.request("POST", f"{parts.path}/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise _make_refusal(response.status, response.read())
        while line := response.readline():
            data = line.strip().removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            if line.startswith(b"data:"):
                yield json.loads(data)
        raise ExternalFailure(f"{url} closed the connection before the end of the answer")
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ExternalFailure(
            f"{url} did not answer", cause=str(error) or type(error).__name__, hint="bedplate ps lists the services"
        ) from error
    finally:
        connection.close()


def _make_refusal(status: int, body: bytes) -> BedplateError:
    try:
        why = _read_message(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        why = body.decode("utf-8", "replace").strip()[:200]
    if status == 401:
        return UsageError("the endpoint requires an API key", hint="set BEDPLATE_API_KEY to it")
    kind = NotPossible if 400 <= status < 500 and status != 429 else ExternalFailure
    return kind(f"the endpoint rejected the request ({status})", cause=why or None)


def _read_message(error: object) -> str:
    return str(error.get("message") or error) if isinstance(error, Mapping) else str(error)
