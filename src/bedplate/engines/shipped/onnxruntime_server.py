#!/usr/bin/env python3
"""ONNX Runtime behind bedplate's server: GenAI folders generate text, other ONNX folders embed or classify it.

Runs in the engine's environment: onnxruntime, onnxruntime-genai, tokenizers and jinja2.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

    from bedplate.engines.shipped.openai_server import (
        BackendError,
        EngineBackend,
        Finish,
        GenerationRequest,
        HuggingFaceText,
        Piece,
        TokenPair,
        read_json,
        serve,
    )
else:
    sys.path.insert(0, str(Path(__file__).resolve().parent))  # an isolated Python does not add the folder of the script
    from openai_server import (
        BackendError,
        EngineBackend,
        Finish,
        GenerationRequest,
        HuggingFaceText,
        Piece,
        TokenPair,
        read_json,
        serve,
    )

SPINNING = "session.intra_op.allow_spinning"
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
BATCH_TOKENS = 16384
"""Maximum tokens of an encoder batch, padding included; larger inputs are split."""


class OnnxRuntimeBackend(EngineBackend):
    engine = "onnxruntime"

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--threads", type=int, help="number of threads")
        parser.add_argument("--spin", choices=("on", "off"), default="on", help="whether idle threads spin or block")
        parser.add_argument("--device", choices=tuple(PROVIDERS), default="cpu")
        parser.add_argument(
            "--batching",
            choices=("auto", "engine", "interleaved"),
            default="auto",
            help="batching by GenAI's engine, or interleaved requests; auto: the engine if it batches continuously",
        )

    def load(self, options: argparse.Namespace, progress: Callable[[float], None]) -> None:
        folder = Path(options.model)
        if not folder.is_dir():
            raise BackendError(f"{folder} is not a folder")
        if folder.name == "onnx" and not (folder / "config.json").exists():
            folder = folder.parent  # hub repositories keep converted graphs in a subfolder
        progress(0.05)
        if (folder / "genai_config.json").exists():
            writer = _choose_generator(folder, options)
            self.slots, self.context_tokens, self.text = writer.slots, writer.context_tokens, writer.text
            self.structured, self.logprobs = frozenset(["json_schema", "json_object"]), writer.logprobs
            self.admit, self.step, self.cancel = writer.admit, writer.step, writer.cancel  # type: ignore[method-assign]
            return
        reader = TextEncoder(folder, options)
        self.tasks, self.context_tokens, self.text = frozenset([reader.task]), reader.context_tokens, reader.text
        self.labels = reader.labels
        self.embed, self.classify = reader.embed, reader.classify  # type: ignore[method-assign]


class TextGenerator:
    """Base class of both ways to generate."""

    logprobs = False

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        import onnxruntime_genai as og

        self.og: Any = og
        config_json = read_json(folder / "genai_config.json").get("model", {})
        own = config_json.get("context_length")
        self.slots: int = options.slots
        self.context_tokens: int | None = min(filter(None, (options.context, own)), default=None)
        self.text = HuggingFaceText(folder)
        ends = config_json.get("eos_token_id")
        self.ends = frozenset(ends if isinstance(ends, list) else [ends])
        config = og.Config(str(folder))
        if options.device != "cpu":
            config.clear_providers()
            config.append_provider(options.device)
        session: dict[str, Any] = {"intra_op_num_threads": options.threads} if options.threads else {}
        if options.spin == "off":
            session[SPINNING] = "0"
        if session:
            config.overlay(json.dumps({"model": {"decoder": {"session_options": session}}}))
        self.model: Any = og.Model(config)

    def refuse(self, request: GenerationRequest) -> None:
        """Reject parameters that ONNX Runtime does not support."""
        if request.min_p:
            raise BackendError("onnxruntime does not support min_p", "min_p")
        if request.presence_penalty or request.frequency_penalty:
            name = "presence_penalty" if request.presence_penalty else "frequency_penalty"
            raise BackendError(f"onnxruntime does not support {name}; use repetition_penalty", name)


class InterleavedGenerator(TextGenerator):
    """One generator per request, one token each in turn: no request waits for the end of another.

    On a CPU the engine only supports static batches, which no request can join before all of them have ended.
    """

    logprobs = True

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        super().__init__(folder, options)
        self._active: dict[GenerationRequest, Any] = {}

    def admit(self, request: GenerationRequest) -> None:
        self.refuse(request)
        params = self.og.GeneratorParams(self.model)
        longest = len(request.prompt) + request.max_tokens
        greedy = request.temperature == 0 or request.top_k == 1
        search: dict[str, Any] = {"max_length": longest, "do_sample": not greedy}
        if not greedy:
            search |= {"temperature": request.temperature, "top_p": request.top_p, "top_k": max(request.top_k or 0, 0)}
        if request.repetition_penalty is not None:
            search["repetition_penalty"] = request.repetition_penalty
        if request.seed is not None:
            search["random_seed"] = request.seed & 0x7FFFFFFF
        if request.ignore_eos:
            search["min_length"] = longest
        try:
            params.set_search_options(**search)
            if request.schema is not None:
                params.set_guidance("json_schema", request.schema)
            generator = self.og.Generator(self.model, params)
            generator.append_tokens(request.prompt)
        except (RuntimeError, ValueError) as error:
            raise BackendError(f"onnxruntime rejected the request: {error}") from error
        self._active[request] = generator

    def step(self) -> list[Piece]:
        pieces = []
        for request, generator in list(self._active.items()):
            logits = generator.get_logits() if request.logprobs is not None else None
            generator.generate_next_token()
            token = int(generator.get_next_tokens()[0])
            ended = token in self.ends and not request.ignore_eos
            logprobs = {} if logits is None else _compute_logprobs(logits, token, request.logprobs or 0)
            # After its limit, which is that of the request, it must not be asked for another token.
            finish: Finish | None = "stop" if ended else "length" if generator.is_done() else None
            if finish:
                del self._active[request]
            pieces.append(Piece(request, token=token, text="" if ended else None, finish=finish, **logprobs))
        return pieces

    def cancel(self, request: GenerationRequest) -> None:
        self._active.pop(request, None)


class BatchedGenerator(TextGenerator):
    """GenAI's engine: continuous batching if the model was built with a paged cache."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        super().__init__(folder, options)
        self._engine: Any = self.og.Engine(self.model)
        self._dynamic = _has_dynamic_batching(folder)
        self._events: Any = self._engine.create_event_buffer(max(4 * self.slots, 16))
        self._turns: dict[GenerationRequest, tuple[Any, int]] = {}
        self._requests: dict[int, GenerationRequest] = {}

    def admit(self, request: GenerationRequest) -> None:
        import numpy as np

        self.refuse(request)
        if request.seed is not None and request.temperature > 0 and not self._dynamic:
            raise BackendError("onnxruntime does not support seed in static batches", "seed")
        limits = self.og.RequestOptions()
        limits.set_max_session_tokens(len(request.prompt) + request.max_tokens)
        try:
            turn_of = self._engine.create_request(options=limits)
            turn = self._make_turn_options(turn_of, request)
            number = turn_of.begin_turn(np.array(request.prompt, dtype=np.int32), turn)
        except (RuntimeError, ValueError) as error:
            raise BackendError(f"onnxruntime rejected the request: {error}") from error
        self._turns[request] = (turn_of, number)
        self._requests[id(turn_of)] = request

    def _make_turn_options(self, turn_of: Any, request: GenerationRequest) -> Any:
        turn = self.og.TurnOptions(turn_of)
        turn.set_do_sample(request.temperature > 0)
        if request.temperature > 0:
            turn.set_temperature(request.temperature)
            turn.set_top_p(request.top_p)
            turn.set_top_k(max(request.top_k or 0, 0))
            if request.seed is not None:
                turn.set_seed(request.seed & 0x7FFFFFFF)
        turn.set_max_generated_tokens(request.max_tokens)
        if request.ignore_eos:
            turn.set_min_generated_tokens(request.max_tokens)
        if request.repetition_penalty is not None:
            turn.set_repetition_penalty(request.repetition_penalty)
        if request.schema is not None:
            turn.set_guidance("json_schema", request.schema)
        return turn

    def step(self) -> list[Piece]:
        flags, reasons = self.og.EngineEventFlags, self.og.FinishReason
        pieces = []
        for event in self._engine.run(self._events):
            request = self._requests.get(id(event.request))
            if request is None:
                continue
            flag = int(event.flags.value)
            finished = bool(flag & flags.TURN_FINISHED.value)
            if flag & flags.FAILED.value:
                self._forget(request)
                pieces.append(Piece(request, error=f"onnxruntime failed on the request: {event.error_code}"))
                continue
            token = int(event.token) if flag & flags.TOKEN.value else None
            if not finished:
                if token is not None:
                    pieces.append(Piece(request, token=token))
                continue
            self._forget(request)
            ended = event.finish_reason == reasons.EOS
            # It does not return the EOS token, although it computed it.
            last = Piece(
                request,
                token=token,
                text="" if ended and token is None else None,
                tokens=1 if ended or token is not None else 0,
                finish="stop" if ended else "length",
                cached_tokens=int(event.usage.cached_prompt_tokens) if event.usage is not None else None,
            )
            pieces.append(last)
        return pieces

    def cancel(self, request: GenerationRequest) -> None:
        turn_of, number = self._turns[request]
        turn_of.cancel_turn(number)
        self._forget(request)

    def _forget(self, request: GenerationRequest) -> None:
        turn_of, _ = self._turns.pop(request)
        del self._requests[id(turn_of)]
        turn_of.close()


def _choose_generator(folder: Path, options: argparse.Namespace) -> InterleavedGenerator | BatchedGenerator:
    batches = options.batching == "engine" or (options.batching == "auto" and _has_dynamic_batching(folder))
    return BatchedGenerator(folder, options) if batches else InterleavedGenerator(folder, options)


def _has_dynamic_batching(folder: Path) -> bool:
    return "dynamic_batching" in (read_json(folder / "genai_config.json").get("engine") or {})


def _compute_logprobs(logits: Any, token: int, count: int) -> dict[str, Any]:
    import numpy as np

    row = np.asarray(logits, dtype=np.float64).reshape(-1, np.asarray(logits).shape[-1])[-1]
    row = row - row.max()
    row = row - np.log(np.exp(row).sum())
    best = np.argsort(row)[::-1][:count]
    return {"logprob": float(row[token]), "top": tuple((int(one), float(row[one])) for one in best)}


class TextEncoder:
    """An encoder that embeds or classifies text."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        import onnxruntime

        config = read_json(folder / "config.json")
        names = [str(name) for name in config.get("architectures") or []]
        self.task = "classify" if any(name.endswith("ForSequenceClassification") for name in names) else "embed"
        labels = config.get("id2label") or {}
        self.labels = tuple(str(labels[key]) for key in sorted(labels, key=int)) if self.task == "classify" else ()
        self.independent = config.get("problem_type") == "multi_label_classification"
        self.text = HuggingFaceText(folder)
        own = read_json(folder / "sentence_bert_config.json").get("max_seq_length")
        own = own or config.get("max_position_embeddings")
        self.context_tokens: int | None = min(filter(None, (options.context, own)), default=None)
        self.pad = int(config.get("pad_token_id") or 0)
        self.pooling, self.normalize = _read_pooling(folder)
        settings = onnxruntime.SessionOptions()
        if options.threads:
            settings.intra_op_num_threads = options.threads
        if options.spin == "off":
            settings.add_session_config_entry(SPINNING, "0")
        wanted = [PROVIDERS[options.device], "CPUExecutionProvider"]
        self._session: Any = onnxruntime.InferenceSession(str(_find_onnx_file(folder)), settings, providers=wanted)
        self._inputs = {one.name for one in self._session.get_inputs()}
        self._outputs = [one.name for one in self._session.get_outputs()]
        unknown = self._inputs - {"input_ids", "attention_mask", "token_type_ids"}
        if unknown or "input_ids" not in self._inputs:
            raise BackendError(f"this model has inputs other than text: {', '.join(sorted(unknown or self._inputs))}")

    def embed(self, inputs: list[list[int]]) -> list[list[float]]:
        import numpy as np

        def finish(found: Any, mask: Any) -> Any:
            vectors = found if found.ndim == 2 else _pool(found, mask, self.pooling)
            if self.normalize:
                vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
            return vectors

        return self._run(inputs, finish, ("sentence_embedding", "last_hidden_state", "token_embeddings"))

    def classify(self, inputs: list[list[int]]) -> list[list[float]]:
        import numpy as np

        def finish(found: Any, mask: Any) -> Any:
            if self.independent or found.shape[-1] == 1:
                return 1 / (1 + np.exp(-found))
            powers = np.exp(found - found.max(axis=1, keepdims=True))
            return powers / powers.sum(axis=1, keepdims=True)

        return self._run(inputs, finish, ("logits",))

    def _run(
        self, inputs: list[list[int]], finish: Callable[[Any, Any], Any], wanted: tuple[str, ...]
    ) -> list[list[float]]:
        import numpy as np

        name = next((one for one in wanted if one in self._outputs), self._outputs[0])
        rows: list[list[float]] = [[] for _ in inputs]
        # Texts of similar length form a batch, because padding is computed too.
        order = sorted(range(len(inputs)), key=lambda place: len(inputs[place]))
        while order:
            width = max(1, BATCH_TOKENS // max(len(inputs[order[-1]]), 1))
            batch, order = order[-width:], order[:-width]
            longest = max(len(inputs[place]) for place in batch)
            ids = np.full((len(batch), longest), self.pad, dtype=np.int64)
            mask, types = np.zeros_like(ids), np.zeros_like(ids)
            for row, place in enumerate(batch):
                if isinstance(pair := inputs[place], TokenPair):
                    types[row, : len(pair)] = pair.types
                ids[row, : len(inputs[place])] = inputs[place]
                mask[row, : len(inputs[place])] = 1
            feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
            (found,) = self._session.run([name], {key: value for key, value in feeds.items() if key in self._inputs})
            for place, vector in zip(batch, finish(found.astype(np.float32), mask), strict=True):
                rows[place] = [float(value) for value in vector]
        return rows


def _find_onnx_file(folder: Path) -> Path:
    for name in ("model.onnx", "onnx/model.onnx"):
        if (folder / name).exists():
            return folder / name
    found = sorted(folder.glob("*.onnx")) or sorted(folder.glob("onnx/*.onnx"))
    if not found:
        raise BackendError(f"there is no .onnx file in {folder}")
    return found[0]


def _read_pooling(folder: Path) -> tuple[str, bool]:
    """The pooling mode, and whether the vector is normalized, from the Sentence Transformers configuration."""
    try:
        modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "mean", False
    kinds = {str(one.get("type", "")).rpartition(".")[2]: str(one.get("path", "")) for one in modules}
    pooling = read_json(folder / kinds.get("Pooling", "1_Pooling") / "config.json")
    normalize = "Normalize" in kinds
    for name, key in (("cls", "cls_token"), ("max", "max_tokens"), ("last", "lasttoken"), ("mean", "mean_tokens")):
        if pooling.get(f"pooling_mode_{key}"):
            return name, normalize
    return str(pooling.get("pooling_mode") or "mean"), normalize


def _pool(states: Any, mask: Any, how: str) -> Any:
    import numpy as np

    weights = mask[:, :, None].astype(np.float32)
    if how == "cls":
        return states[:, 0]
    if how == "last":
        return states[np.arange(len(states)), mask.sum(axis=1) - 1]
    if how == "max":
        return np.where(weights > 0, states, -np.inf).max(axis=1)
    if how == "mean":
        return (states * weights).sum(axis=1) / np.maximum(weights.sum(axis=1), 1e-9)
    raise BackendError(f"unknown pooling mode {how}", status=500)


if __name__ == "__main__":
    serve(OnnxRuntimeBackend())
