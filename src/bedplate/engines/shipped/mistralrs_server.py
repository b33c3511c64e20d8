#!/usr/bin/env python3
"""mistral.rs behind bedplate's server: its wheel contains only the engine.

Runs in the engine's environment: mistralrs and jinja2.
"""

from __future__ import annotations

import atexit
import codecs
import json
import os
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    import argparse

    from bedplate.engines.shipped.openai_server import (
        BackendError,
        ChatTemplate,
        Finish,
        GenerationRequest,
        Piece,
        SequentialBackend,
        Text,
        find_special_tokens,
        read_json,
        read_template,
        serve,
    )
else:
    sys.path.insert(0, str(Path(__file__).resolve().parent))  # an isolated Python does not add the folder of the script
    from openai_server import (
        BackendError,
        ChatTemplate,
        Finish,
        GenerationRequest,
        Piece,
        SequentialBackend,
        Text,
        find_special_tokens,
        read_json,
        read_template,
        serve,
    )

PLAIN_TEMPLATE = "{{ messages[0]['content'] }}"
"""A template that adds nothing: the server has already applied the model's chat template."""


class MistralRsBackend(SequentialBackend):
    engine = "mistral.rs"

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--isq", help="quantize while loading: Q8_0, Q6K, Q5K, Q4K, Q3K, Q2K …")
        parser.add_argument("--threads", type=int, help="number of threads")

    def load(self, options: argparse.Namespace, progress: Callable[[float], None]) -> None:
        if options.threads:
            # Its kernels have a thread pool in addition to rayon's, and the threads of both spin.
            os.environ["RAYON_NUM_THREADS"] = os.environ["CANDLE_NUM_THREADS"] = str(options.threads)
        import mistralrs

        self._rs: Any = mistralrs
        self._one_call = threading.Lock()
        path = Path(options.model)
        progress(0.05)
        if path.suffix == ".gguf":
            tokens = read_gguf_metadata(path)
            names = tokens.get("tokenizer.chat_template"), find_gguf_special_tokens(tokens)
            which = mistralrs.Which.GGUF(quantized_model_id=str(path.parent), quantized_filename=path.name)
        else:
            config = read_json(path / "tokenizer_config.json")
            names = read_template(path, config), find_special_tokens(config)
            which = mistralrs.Which.Plain(model_id=str(make_readable(path)))
        holder = tempfile.mkdtemp(prefix="bedplate-")
        template = Path(holder) / "as-it-is.jinja"
        template.write_text(PLAIN_TEMPLATE, encoding="utf-8")
        atexit.register(template.unlink, missing_ok=True)
        try:
            self._runner: Any = mistralrs.Runner(
                which=which,
                max_seqs=1,
                in_situ_quant=options.isq,
                jinja_explicit=str(template),
                token_source="none",  # noqa: S106
            )
        except ValueError as error:
            # The first line is the message; a backtrace follows.
            raise BackendError(f"mistral.rs cannot load the model: {_get_first_line(error)}") from error
        self.text = RunnerText(self._runner, self._one_call, ChatTemplate(*names))
        own = self._runner.max_sequence_length()
        self.context_tokens = min(filter(None, (options.context, own)), default=None)
        self.slots = 1
        self.logprobs = True
        self.structured = frozenset(["json_schema", "json_object"])

    def admit(self, request: GenerationRequest) -> None:
        if request.seed is not None and request.temperature > 0:
            raise BackendError("mistral.rs does not support seed", "seed")
        if not request.text:  # it reads text only, and fails on an empty one
            raise BackendError("the prompt is empty, or its token ids are not in the vocabulary", "prompt")
        super().admit(request)

    def stream(self, request: GenerationRequest) -> Iterator[Piece]:
        try:
            asked = self._make_request(request)
            with self._one_call:
                chunks = self._runner.send_chat_completion_request(asked)
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            yield from (self._make_piece(request, chunk, decoder) for chunk in chunks)
        except ValueError as error:
            yield Piece(request, tokens=0, error=f"mistral.rs failed on the request: {_get_first_line(error)}")

    def _make_request(self, request: GenerationRequest) -> Any:
        greedy = request.temperature == 0
        return self._rs.ChatCompletionRequest(
            messages=[{"role": "user", "content": request.text}],
            model="default",
            stream=True,
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=None if greedy else request.top_p,
            top_k=1 if greedy else request.top_k if (request.top_k or 0) > 0 else None,
            min_p=request.min_p,
            presence_penalty=request.presence_penalty or None,
            frequency_penalty=request.frequency_penalty or None,
            repetition_penalty=request.repetition_penalty,
            # Only logprobs contain the exact bytes of a token; the streamed text lacks the first space.
            logprobs=True,
            top_logprobs=max(request.logprobs or 0, 1),
            grammar=request.schema,
            grammar_type="json_schema" if request.schema is not None else None,
            ignore_eos=request.ignore_eos,
        )

    def _make_piece(self, request: GenerationRequest, chunk: Any, decoder: codecs.IncrementalDecoder) -> Piece:
        choice = chunk.choices[0]
        logprobs = choice.logprobs
        usage = chunk.usage
        reason: Finish | None = None
        if choice.finish_reason is not None:
            reason = "length" if choice.finish_reason == "length" else "stop"
        top: tuple[tuple[int | str, float], ...] = ()
        text = choice.delta.content or ""
        if logprobs is not None:
            # The EOS token is not part of the text.
            text = decoder.decode(b"" if reason == "stop" else bytes(logprobs.bytes or b""), final=reason is not None)
            top = tuple((one.bytes or str(one.token), float(one.logprob)) for one in logprobs.top_logprobs)
        return Piece(
            request,
            text=text,
            finish=reason,
            logprob=float(logprobs.logprob) if logprobs is not None else None,
            top=top,
            prompt_tokens=int(usage.prompt_tokens) if usage is not None else None,
        )


def _get_first_line(error: ValueError) -> str:
    return (str(error).splitlines() or ["unknown error"])[0]


class RunnerText(Text):
    """The runner's tokenizer. A call fails ("Already borrowed") while another thread uses the runner."""

    def __init__(self, runner: Any, one_call: threading.Lock, template: ChatTemplate) -> None:
        self._runner = runner
        self._one_call = one_call
        self._template = template
        self.tool_format = template.tool_format

    def encode(self, text: str, special: bool) -> list[int]:
        with self._one_call:
            return [int(one) for one in self._runner.tokenize_text(text, special, None)]

    def decode(self, tokens: Sequence[int]) -> str:
        with self._one_call:
            return str(self._runner.detokenize_text(list(tokens), True))

    def chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, more: dict[str, Any]) -> str:
        return self._template.render(messages, tools, more)


def make_readable(folder: Path) -> Path:
    """The folder, or a copy of links with a configuration that mistral.rs can read.

    Transformers 5 writes the RoPE parameters into a nested object; mistral.rs reads them from the top level.
    """
    config = read_json(folder / "config.json")
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_theta" in config or "rope_theta" not in rope:
        return folder
    scaling = None if rope.get("rope_type") in (None, "default") else rope
    copy = Path(tempfile.mkdtemp(prefix="bedplate-"))
    for file in folder.iterdir():
        if file.name != "config.json":
            (copy / file.name).symlink_to(file.resolve())
    config |= {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}
    (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return copy


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """The metadata of a GGUF file, without numeric lists."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise BackendError(f"{path} is not a GGUF file")
        version, _, count = struct.unpack("<IQQ", _read_exactly(file, 20))
        if version < 2:
            raise BackendError(f"{path} has GGUF version {version}; at least version 2 is needed")
        return {
            _read_string(file): _read_value(file, struct.unpack("<I", _read_exactly(file, 4))[0]) for _ in range(count)
        }


_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


def _read_exactly(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise BackendError("the model file is damaged: it ends within its header")
    return data


def _read_string(file: BinaryIO) -> str:
    (size,) = struct.unpack("<Q", _read_exactly(file, 8))
    return _read_exactly(file, size).decode("utf-8", "replace")


def _read_value(file: BinaryIO, kind: int) -> Any:
    if kind == 8:
        return _read_string(file)
    if kind == 9:
        inner, count = struct.unpack("<IQ", _read_exactly(file, 12))
        if inner in _NUMBERS:
            file.seek(count * struct.calcsize(_NUMBERS[inner]), os.SEEK_CUR)
            return None
        return [_read_value(file, inner) for _ in range(count)]
    if kind not in _NUMBERS:
        raise BackendError(f"the model file is damaged: its header contains a value of type {kind}")
    return struct.unpack(_NUMBERS[kind], _read_exactly(file, struct.calcsize(_NUMBERS[kind])))[0]


def find_gguf_special_tokens(metadata: dict[str, Any]) -> dict[str, str]:
    words = metadata.get("tokenizer.ggml.tokens") or []
    found = {}
    for name in ("bos", "eos", "padding", "unknown"):
        number = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(number, int) and 0 <= number < len(words):
            found[{"padding": "pad_token", "unknown": "unk_token"}.get(name, f"{name}_token")] = str(words[number])
    return found


if __name__ == "__main__":
    serve(MistralRsBackend())
