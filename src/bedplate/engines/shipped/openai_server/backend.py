"""The interface between the server and an engine: what a request asks for, what a step returns."""

from __future__ import annotations

import argparse
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, Literal

UNLIMITED_TOKENS = 1 << 30
Finish = Literal["stop", "length"]


class Refused(Exception):
    """A request that cannot be answered, and why, in OpenAI's words."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, eq=False, kw_only=True)
class Request:
    """What a backend is asked for. Equal only to itself, so that it can be a key."""

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    prompt: list[int] = field(default_factory=list)
    """Token ids, special tokens included."""
    text: str = ""
    """The prompt as text, the chat template applied."""
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    max_tokens: int = UNLIMITED_TOKENS
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    """How many alternatives to each token; `None`: no logprobs at all."""
    schema: str | None = None
    """A JSON schema that the answer must fit."""
    ignore_eos: bool = False


@dataclass(frozen=True)
class Piece:
    """What one step added to one answer."""

    request: Request
    _: KW_ONLY
    token: int | None = None
    text: str | None = None
    """`None`: the server makes it from `token`."""
    tokens: int = 1
    finish: Finish | None = None
    error: str | None = None
    """The engine gave up this one request, and no other."""
    logprob: float | None = None
    top: tuple[tuple[int | str, float], ...] = ()
    prompt_tokens: int | None = None
    cached_tokens: int | None = None


class Text:
    """A model's tokenizer and chat template."""

    def encode(self, text: str, special: bool) -> list[int]:
        """Token ids. Special tokens that stand in the text are taken for such; `special` adds the usual ones around."""
        raise NotImplementedError

    def decode(self, tokens: Sequence[int]) -> str:
        """Text, without special tokens."""
        raise NotImplementedError

    def chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, more: dict[str, Any]) -> str:
        raise NotImplementedError


class Backend:
    """What an engine is to the server. The worker thread alone calls its methods, one at a time."""

    engine: ClassVar[str]
    tasks: frozenset[str] = frozenset(["generate"])
    """generate, embed, classify"""
    slots: int = 1
    """Requests that are computed at once; the others wait in front."""
    context_tokens: int | None = None
    text: Text | None = None
    logprobs: bool = False
    structured: frozenset[str] = frozenset()
    """json_schema, json_object: what kinds of answers it can be held to."""
    labels: tuple[str, ...] = ()
    """Of a classifier."""

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Its own options, beside --model and the like."""

    def load(self, options: argparse.Namespace, progress: Callable[[float], None]) -> None:
        raise NotImplementedError

    def admit(self, request: Request) -> None:
        """Starts to compute a request."""
        raise NotImplementedError

    def step(self) -> list[Piece]:
        """One step of all that was admitted."""
        raise NotImplementedError

    def cancel(self, request: Request) -> None:
        """Forgets an admitted request."""
        raise NotImplementedError

    def embed(self, inputs: list[list[int]]) -> list[list[float]]:
        raise NotImplementedError

    def classify(self, inputs: list[list[int]]) -> list[list[float]]:
        """The probability of each label."""
        raise NotImplementedError

    def kv_use(self) -> float | None:
        return None


class OneByOne(Backend):
    """An engine that computes one request at a time, as an iterator of pieces."""

    def __init__(self) -> None:
        self._streams: dict[Request, Iterator[Piece]] = {}

    def stream(self, request: Request) -> Iterator[Piece]:
        """The pieces of one answer. Closed when nobody wants it any more."""
        raise NotImplementedError

    def admit(self, request: Request) -> None:
        self._streams[request] = self.stream(request)

    def step(self) -> list[Piece]:
        pieces = []
        for request, stream in list(self._streams.items()):
            piece = next(stream, None) or Piece(request, text="", tokens=0, finish="stop")
            pieces.append(piece)
            if piece.finish or piece.error:
                self.cancel(request)
        return pieces

    def cancel(self, request: Request) -> None:
        stream = self._streams.pop(request, None)
        if stream is not None and hasattr(stream, "close"):
            stream.close()
