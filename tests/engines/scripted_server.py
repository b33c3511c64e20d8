"""A backend that follows commands in its prompt, to test the server. Tokens are bytes; from 256 on they are special."""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bedplate.engines.shipped.openai_server import (
        BackendError,
        EngineBackend,
        GenerationRequest,
        Piece,
        Text,
        serve,
    )
else:
    sys.path.insert(0, str(Path(__file__).parents[2] / "src" / "bedplate" / "engines" / "shipped"))
    from openai_server import BackendError, EngineBackend, GenerationRequest, Piece, Text, serve

BEGIN, END = 256, 257
OPENING = "<tool_call>\n"
STEP_S = 0.002


class Bytes(Text):
    max_token = END

    def encode(self, text: str, special: bool) -> list[int]:
        return [*([BEGIN] if special else []), *text.encode("utf-8", "surrogatepass")]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < BEGIN).decode("utf-8", "replace")

    def chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, more: dict[str, Any]) -> str:
        if messages[-1]["role"] == "nobody":
            raise BackendError("the model's chat template rejected the messages: who is nobody?", "messages")
        content = str(messages[-1]["content"])
        if content == "offered":
            return f"say:{[tool['function']['name'] for tool in tools or ()]}"
        if content == "called":
            return f"say:{messages[-2]['tool_calls'][0]['function']['arguments']['city']}"
        return content


class Scripted(EngineBackend):
    engine = "scripted"
    tasks = frozenset(["generate", "embed", "classify"])
    labels = ("short", "long")

    def __init__(self) -> None:
        self.answers: dict[GenerationRequest, list[int] | None] = {}
        self.most_at_once = 0

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--gate", help="a file: loading goes on when it is there")
        parser.add_argument("--tools", choices=("tagged", "bare"), help="how the model writes calls")
        parser.add_argument("--plain", action="store_true", help="neither logprobs nor structured answers")

    def load(self, options: argparse.Namespace, progress: Callable[[float], None]) -> None:
        progress(0.25)
        while options.gate and not Path(options.gate).exists():
            time.sleep(STEP_S)
        if options.model == "broken":
            raise BackendError("the model is broken")
        self.text = Bytes()
        self.text.tool_format = options.tools
        self.slots, self.context_tokens = options.slots, options.context
        self.logprobs = not options.plain
        self.structured = frozenset([] if options.plain else ["json_schema"])

    def admit(self, request: GenerationRequest) -> None:
        word, _, rest = request.text.removesuffix(OPENING).partition(":")
        if word == "refuse":
            raise BackendError("not this one", "prompt")
        if word == "schema":
            rest = str(request.schema)
        if word == "top_k":
            rest = str(request.top_k)
        if word == "most":
            rest = str(self.most_at_once)
        if word == "connections":
            gc.collect()
            rest = str(sum(isinstance(one, asyncio.Protocol) for one in gc.get_objects()))
        self.answers[request] = None if word in ("forever", "crash", "fail") else list(rest.encode())
        self.most_at_once = max(self.most_at_once, len(self.answers))

    def step(self) -> list[Piece]:
        time.sleep(STEP_S)
        pieces = []
        for request in list(self.answers):
            pieces.append(self.next_piece(request))
            if request.text.startswith("twice") and request in self.answers:  # two pieces in one step
                pieces.append(self.next_piece(request))
        return pieces

    def next_piece(self, request: GenerationRequest) -> Piece:
        word, answer = request.text.partition(":")[0], self.answers[request]
        if word == "crash":
            raise RuntimeError("the engine broke")
        if word == "fail":
            del self.answers[request]
            return Piece(request, tokens=0, error="no memory for this one")
        if answer is None:
            return Piece(request, token=ord("a"))
        if not answer:
            del self.answers[request]
            return Piece(request, token=END, text="", finish="stop")
        token = answer.pop(0)
        return Piece(request, token=token, logprob=-0.5, top=((token, -0.5), (ord("?"), -1.5)))

    def cancel(self, request: GenerationRequest) -> None:
        del self.answers[request]

    def embed(self, inputs: list[list[int]]) -> list[list[float]]:
        return [[float(len(tokens)), 0.5] for tokens in inputs]

    def classify(self, inputs: list[list[int]]) -> list[list[float]]:
        return [[0.9, 0.1] if len(tokens) < 10 else [0.2, 0.8] for tokens in inputs]

    def kv_use(self) -> float | None:
        return len(self.answers) / self.slots


if __name__ == "__main__":
    serve(Scripted())
