"""The interface between the server and an engine: requests and the pieces that a step returns."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    import argparse

    from .tools import ToolFormat

UNLIMITED_TOKENS = 1 << 30
Finish = Literal["stop", "length"]


class BackendError(Exception):
    """A rejected request, with the reason in the form of OpenAI's errors."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code

    def to_body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, eq=False, kw_only=True)
class GenerationRequest:
    """A request to a backend. Compared by identity, so that it can be a dictionary key."""

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    prompt: list[int] = field(default_factory=list)
    """Token ids, special tokens included."""
    text: str = ""
    """The prompt as text, after the chat template."""
    messages: list[dict[str, Any]] | None = None
    max_tokens: int = UNLIMITED_TOKENS
    temperature: float = 1.0
    """0: greedy."""
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    """Number of alternatives per token; `None`: no logprobs."""
    schema: str | None = None
    """A JSON schema that the output must match."""
    ignore_eos: bool = False


@dataclass(frozen=True)
class Piece:
    """The output of one step for one request."""

    request: GenerationRequest
    _: KW_ONLY
    token: int | None = None
    text: str | None = None
    """`None`: the server decodes `token`."""
    tokens: int = 1
    finish: Finish | None = None
    error: str | None = None
    """Why the engine failed on this request; other requests continue."""
    logprob: float | None = None
    top: tuple[tuple[int | str, float], ...] = ()
    prompt_tokens: int | None = None
    cached_tokens: int | None = None


class TokenPair(list[int]):
    """The tokens of two texts that are read together, and which of the two each belongs to."""

    def __init__(self, tokens: Sequence[int], types: Sequence[int]) -> None:
        super().__init__(tokens)
        self.types = types


class Text:
    """A model's tokenizer and chat template."""

    max_token: int = (1 << 31) - 1
    """The largest token id. An engine may stop at a larger one."""

    tool_format: ToolFormat | None = None
    """How the model writes calls; `None`: tools are not supported."""

    def encode(self, text: str, special: bool) -> list[int]:
        """Token ids. Special tokens in the text are parsed; `special` adds the default ones around the text."""
        raise NotImplementedError

    def encode_pair(self, first: str, second: str) -> TokenPair:
        """Two texts as one input, with the special tokens between them."""
        raise NotImplementedError

    def decode(self, tokens: Sequence[int]) -> str:
        """The text without special tokens."""
        raise NotImplementedError

    def chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, more: dict[str, Any]) -> str:
        raise NotImplementedError


class EngineBackend:
    """The engine as seen by the server. Only the worker thread calls its methods, one at a time."""

    engine: ClassVar[str]
    tasks: frozenset[str] = frozenset(["generate"])
    """Supported tasks: generate, embed, classify."""
    slots: int = 1
    """Maximum number of concurrent requests; others wait in the queue."""
    context_tokens: int | None = None
    text: Text | None = None
    logprobs: bool = False
    structured: frozenset[str] = frozenset()
    """Supported kinds of structured output: json_schema, json_object."""
    labels: tuple[str, ...] = ()
    """Class labels of a classifier."""

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Add the options of this backend to the common ones such as --model."""

    def load(self, options: argparse.Namespace, progress: Callable[[float], None]) -> None:
        raise NotImplementedError

    def admit(self, request: GenerationRequest) -> None:
        """Start to compute a request."""
        raise NotImplementedError

    def step(self) -> list[Piece]:
        """Compute one step of all admitted requests."""
        raise NotImplementedError

    def cancel(self, request: GenerationRequest) -> None:
        """Stop computing an admitted request."""
        raise NotImplementedError

    def embed(self, inputs: list[list[int]]) -> list[list[float]]:
        raise NotImplementedError

    def classify(self, inputs: list[list[int]]) -> list[list[float]]:
        """The probability of each label."""
        raise NotImplementedError

    def kv_use(self) -> float | None:
        return None


class SequentialBackend(EngineBackend):
    """An engine that computes one request at a time, as an iterator of pieces."""

    def __init__(self) -> None:
        self._streams: dict[GenerationRequest, Iterator[Piece]] = {}

    def stream(self, request: GenerationRequest) -> Iterator[Piece]:
        """The pieces of one answer. The iterator is closed when the request is cancelled."""
        raise NotImplementedError

    def admit(self, request: GenerationRequest) -> None:
        self._streams[request] = self.stream(request)

    def step(self) -> list[Piece]:
        pieces = []
        for request, stream in list(self._streams.items()):
            piece = next(stream, None) or Piece(request, text="", tokens=0, finish="stop")
            pieces.append(piece)
            if piece.finish or piece.error:
                self.cancel(request)
        return pieces

    def cancel(self, request: GenerationRequest) -> None:
        stream = self._streams.pop(request, None)
        if stream is not None and hasattr(stream, "close"):
            stream.close()
