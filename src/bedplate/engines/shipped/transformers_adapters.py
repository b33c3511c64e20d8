"""LoRA adapters for the server of transformers: each is a model name of its own, loaded at its start or while it runs.

An adapter is a folder in the format of PEFT, with its matrices in safetensors; pickles are not read. While a request
for it is computed, forward hooks add the product of its two matrices to the output of each of its linear layers. The
weights of the model do not change, and all other requests are computed without hooks. Runs in the engine's
environment: transformers, torch and safetensors.
"""

from __future__ import annotations

import argparse
import asyncio
import contextvars
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
CHANGED_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")
"""Values of init_lora_weights whose training begins with other weights of the model than those that are served."""
UNSUPPORTED = (
    "alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "lora_bias", "modules_to_save",
    "monteclora_config", "target_parameters", "trainable_token_indices", "use_bdlora", "use_dora", "use_qalora",
)  # fmt: skip
"""Settings of PEFT 0.21.2 with which an adapter is more than two matrices for each linear layer."""


class AdapterMistake(Exception):
    """Why an adapter is not loaded or unloaded."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.message, self.status = message, status


@dataclass(frozen=True)
class LowRankUpdate:
    """What an adapter adds to one linear layer; the scale is part of `up`."""

    layer: Any
    down: Any
    up: Any

    def add_to_output(self, layer: Any, inputs: tuple[Any, ...], output: Any) -> Any:
        from torch.nn.functional import linear

        given = inputs[0].to(device=self.down.device, dtype=self.down.dtype)
        return output + linear(linear(given, self.down), self.up).to(device=output.device, dtype=output.dtype)


class LoadedAdapters:
    """The adapters of one model."""

    def __init__(self, model: Any, most: int, max_rank: int) -> None:
        self.model, self.most, self.max_rank = model, most, max_rank
        self.updates: dict[str, list[LowRankUpdate]] = {}

    def load(self, name: str, path: str) -> None:
        """Raises `AdapterMistake`; then nothing has changed."""
        if name in self.updates:
            raise AdapterMistake(f"the adapter {name} is already loaded")
        if len(self.updates) >= self.most:
            raise AdapterMistake(f"{self.most} adapters are loaded, and there is memory for no more (--max-loras)")
        self.updates[name] = read_adapter(self.model, Path(path), self.max_rank)

    def unload(self, name: str) -> None:
        if self.updates.pop(name, None) is None:
            raise AdapterMistake(f"the adapter {name} is not loaded", 404)


chosen: contextvars.ContextVar[list[LowRankUpdate] | None] = contextvars.ContextVar("chosen", default=None)
"""The adapter of the request that is handled, which keeps it if it is unloaded; `None`: the model without one."""


@contextmanager
def apply(updates: list[LowRankUpdate]) -> Iterator[None]:
    """All that the model computes until the end has the adapter; one thread computes."""
    handles = [one.layer.register_forward_hook(one.add_to_output) for one in updates]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def bind(compute: Callable[..., Any]) -> Callable[..., Any]:
    """The computation with the adapter of the request that is handled."""
    updates = chosen.get()
    if updates is None:
        return compute

    def compute_with_adapter(*given: Any, **named: Any) -> Any:
        with apply(updates):
            return compute(*given, **named)

    return compute_with_adapter


def read_config(folder: Path) -> dict[str, Any]:
    """The settings of an adapter; raises `AdapterMistake` if it is not one of low-rank matrices alone."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise AdapterMistake(f"{folder} has no {CONFIG}") from error
    except (OSError, ValueError) as error:
        raise AdapterMistake(f"{CONFIG} cannot be read: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise AdapterMistake(f"{CONFIG} is not that of a LoRA adapter: peft_type is not LORA")
    used = [one for one in UNSUPPORTED if config.get(one)]
    used += ["bias"] if config.get("bias", "none") != "none" else []
    begun = config.get("init_lora_weights")
    used += ["init_lora_weights"] if isinstance(begun, str) and begun.lower().startswith(CHANGED_BASE) else []
    if used:
        raise AdapterMistake(f"{used[0]} in {CONFIG} is not supported: {json.dumps(config[used[0]])}")
    return config


def compute_scale(config: Mapping[str, Any], layer: str, rank: int) -> float:
    """The factor of the product of both matrices of a layer, as PEFT computes it."""
    patterns: Mapping[str, float] = config.get("alpha_pattern") or {}
    own = next((alpha for key, alpha in patterns.items() if re.match(rf"(.*\.)?({key})$", layer)), None)
    alpha = float(own if own is not None else config.get("lora_alpha", 8))
    return float(alpha / (rank**0.5 if config.get("use_rslora") else rank))


def read_adapter(model: Any, folder: Path, max_rank: int) -> list[LowRankUpdate]:
    """Raises `AdapterMistake` unless every tensor belongs to a linear layer of the model and has its widths."""
    config = read_config(folder)
    tensors = _read_tensors(folder)
    layers = dict(model.named_modules())
    found = []
    for name in sorted(tensors):
        matched = re.fullmatch(r"(?:base_model\.model\.)?(.+)\.lora_(A|B)\.weight", name)
        if matched is None:
            raise AdapterMistake(f"the tensor {name} is not a LoRA matrix of a linear layer")
        path, side = matched.groups()
        other = name.removesuffix(f"{side}.weight") + ("B" if side == "A" else "A") + ".weight"
        if other not in tensors:
            raise AdapterMistake(f"the tensor {other} is missing")
        if side == "A":
            found.append(_make_update(model, layers, path, tensors[name], tensors[other], config))
    if not found:
        raise AdapterMistake(f"{WEIGHTS} has no tensors")
    rank = max(one.down.shape[0] for one in found)
    if rank > max_rank:
        raise AdapterMistake(f"its rank is {rank}, and there is memory for a rank of {max_rank} (--max-lora-rank)")
    return found


def _read_tensors(folder: Path) -> dict[str, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not (folder / WEIGHTS).is_file():
        pickled = (folder / PICKLE).exists()
        why = f"; {PICKLE} is not read, since a pickle can run code" if pickled else ""
        raise AdapterMistake(f"{folder} has no {WEIGHTS}{why}")
    try:
        tensors: dict[str, Any] = load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise AdapterMistake(f"{WEIGHTS} cannot be read: {error}") from error
    return tensors


def _make_update(
    model: Any, layers: Mapping[str, Any], path: str, down: Any, up: Any, config: Mapping[str, Any]
) -> LowRankUpdate:
    import torch

    layer: Any = layers.get(path)
    widths = _get_widths(layer)
    if widths is None:
        raise AdapterMistake(f"the model has no linear layer {path}")
    rank = down.shape[0] if down.ndim else 0
    if not rank or tuple(down.shape) != (rank, widths[0]) or tuple(up.shape) != (widths[1], rank):
        shapes = f"{list(down.shape)} and {list(up.shape)}"
        raise AdapterMistake(f"the matrices of {path} are {shapes}, and the layer has {widths[0]} × {widths[1]}")
    if not (torch.isfinite(down).all() and torch.isfinite(up).all()):
        raise AdapterMistake(f"the matrices of {path} have values that are not finite")
    scale = compute_scale(config, path, rank)
    weight = layer.weight
    # Layers that accelerate moves between devices have no data of their own meanwhile.
    device = model.device if weight.device.type == "meta" else weight.device
    to = {"device": device, "dtype": model.dtype}
    return LowRankUpdate(layer, down.to(**to), (up.float() * scale).to(**to))


def _get_widths(layer: Any) -> tuple[int, int] | None:
    """Inputs and outputs of a linear layer; `None`: it is not one."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    return (layer.nx, layer.nf) if isinstance(layer, Conv1D) else None


def take_options() -> argparse.Namespace:
    """Removes the options of adapters from the command line, which are those of vLLM."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--max-loras", type=int, default=0)
    parser.add_argument("--max-lora-rank", type=int, default=16)
    parser.add_argument("--lora-modules", nargs="+", default=[], metavar="NAME=PATH")
    options, sys.argv[1:] = parser.parse_known_args(sys.argv[1:])
    return options


def serve_adapters(options: argparse.Namespace) -> None:
    """Patches the server of transformers, if there are to be adapters."""
    from transformers.cli.serving import server
    from transformers.cli.serving.utils import BaseHandler, GenerateManager

    build = server.build_server
    resolve = BaseHandler._resolve_model

    def build_with_adapters(model_manager: Any, *given: Any, **named: Any) -> Any:
        (kept,) = model_manager.loaded_models.values()
        adapters = LoadedAdapters(kept.model, options.max_loras, options.max_lora_rank)
        for one in options.lora_modules:
            name, _, path = one.partition("=")
            try:
                adapters.load(name, path)
            except AdapterMistake as mistake:
                sys.exit(f"bedplate-engine: the LoRA adapter {name} cannot be loaded: {mistake.message}")

        def resolve_adapter(self: Any, body: dict[str, Any]) -> Any:
            chosen.set(adapters.updates.get(str(body.get("model"))))
            return resolve(self, body)

        BaseHandler._resolve_model = resolve_adapter
        app = build(model_manager, *given, **named)
        _add_paths(app, adapters)
        return app

    server.build_server = build_with_adapters
    GenerateManager.submit = _bind_submitted(GenerateManager.submit)
    GenerateManager.async_submit = _bind_submitted(GenerateManager.async_submit)


def _bind_submitted(submit: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, compute, *given, **named: submit(self, bind(compute), *given, **named)


def _add_paths(app: Any, adapters: LoadedAdapters) -> None:
    """The paths with which vLLM loads and unloads adapters."""
    from fastapi.responses import JSONResponse

    async def answer(body: dict[str, Any], change: Callable[..., None], *fields: str) -> JSONResponse:
        try:
            values = [body.get(one) for one in fields]
            if not all(isinstance(one, str) and one for one in values):
                raise AdapterMistake(f"{' and '.join(fields)} must be text")
            await asyncio.to_thread(change, *values)
        except AdapterMistake as mistake:
            error = {"message": mistake.message, "type": "invalid_request_error", "param": None, "code": None}
            return JSONResponse({"error": error}, status_code=mistake.status)
        return JSONResponse({"status": "ok"})

    async def load(body: dict[str, Any]) -> Any:
        return await answer(body, adapters.load, "lora_name", "lora_path")

    async def unload(body: dict[str, Any]) -> Any:
        return await answer(body, adapters.unload, "lora_name")

    app.post("/v1/load_lora_adapter")(load)
    app.post("/v1/unload_lora_adapter")(unload)
