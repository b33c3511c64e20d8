"""A model as people read it: what it is, what it weighs, and what a conversation with it takes."""

from __future__ import annotations

from pathlib import Path

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from bedplate.values import Model
from bedplate.values.units import memory, size

TASKS = {"generate": "writes text", "embed": "makes embeddings", "classify": "ranks or classifies", "other": ""}
CONTEXTS = (8_192, 32_768, 131_072)


def render_model(model: Model) -> RenderableType:
    """A compact page; every figure on it is what the file's header says."""
    table = Table.grid(padding=(0, 2, 0, 1))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(style="dim", no_wrap=True)

    def row(label: str, value: str, note: str = "") -> None:
        # As Text, since names out of files may hold brackets that would be taken for markup.
        table.add_row(label, Text(value), Text(note))

    row("Model", _joined(model.name, model.architecture, TASKS[model.task]), model.origin or "")
    row("Parameters", _parameters(model), model.basis)
    row("Weights", _joined(size(model.weight_bytes), model.quantization, model.format.upper()), _bits(model))
    if len(model.tensor_groups) > 1:
        for group in model.tensor_groups:
            share = group.bytes / model.weight_bytes if model.weight_bytes else 0.0
            tensors = f"{group.tensors} tensor{'' if group.tensors == 1 else 's'}"
            row("", f"{group.type:<8} {size(group.bytes):>8}  {share:>5.1%}  {tensors}")
    row("Shape", _shape(model))
    row("Context", f"{model.max_context:,} tokens" if model.max_context else "TBD", _template(model))
    for position, (text, note) in enumerate(_cache(model)):
        row("Cache" if position == 0 else "", text, note)
    row("Files", _files(model))
    return table


def _joined(*parts: str | None) -> str:
    return " · ".join(part for part in parts if part)


def _parameters(model: Model) -> str:
    text = count(model.parameters)
    if model.num_experts and model.active_parameters is not None:
        text += f", of which {count(model.active_parameters)} work on each token"
    return text


def count(number: int) -> str:
    """As models are named: 135 M, 8.03 B."""
    for step, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if number >= 0.9995 * step:
            value = number / step
            return f"{value:.0f} {unit}" if value >= 99.5 else f"{value:.3g} {unit}"
    return f"{number:,}"


def _bits(model: Model) -> str:
    stored = sum(group.parameters for group in model.tensor_groups)
    return f"{8 * model.weight_bytes / stored:.2f} bits a weight" if stored else ""


def _shape(model: Model) -> str:
    heads = None
    if model.num_heads:
        heads = f"{model.num_heads} heads"
        if model.num_kv_heads and model.num_kv_heads != model.num_heads:
            heads += f", {model.num_kv_heads} for keys and values"
    experts = None
    if model.num_experts:
        used = f", {model.num_experts_active} at a time" if model.num_experts_active else ""
        experts = f"{model.num_experts} experts{used}"
    width = f"{model.hidden_size:,} wide" if model.hidden_size else None
    words = f"{model.vocab_size:,} tokens known" if model.vocab_size else None
    return _joined(f"{model.num_layers} layers", width, heads, experts, words)


def _template(model: Model) -> str:
    if model.task != "generate":
        return ""
    return "has a chat template" if model.has_chat_template else "no chat template: completes text only"


def _cache(model: Model) -> list[tuple[str, str]]:
    """What a token costs, then what that makes of conversations that people have."""
    if not model.kv_bytes(1):
        return [("none: each request is computed whole", "")]
    rows = []
    if model.kv_bytes_per_token:
        rows.append((f"{memory(model.kv_bytes_per_token)} for each token", "16-bit"))
    if model.kv_bytes_window:
        rows.append((f"{memory(model.kv_bytes_window)} at most in layers that see a window only", "16-bit"))
    if model.state_bytes:
        rows.append((f"{memory(model.state_bytes)} of state, however long the text", "32-bit"))
    limit = model.max_context or CONTEXTS[0]
    lengths = [length for length in CONTEXTS if length < limit]
    lengths.append(limit if limit <= CONTEXTS[-1] or not lengths else CONTEXTS[-1])
    sizes = (f"{memory(model.kv_bytes(length))} at {_tokens(length)}" for length in dict.fromkeys(lengths))
    rows.append((" · ".join(sizes), "one conversation"))
    return rows


def _tokens(number: int) -> str:
    return f"{number // 1024}k" if number % 1024 == 0 else f"{number:,}"


def _files(model: Model) -> str:
    if not model.files:
        return "not on this machine"
    first = Path(model.files[0])
    if len(model.files) == 1:
        return str(first)
    return f"{first} and {len(model.files) - 1} more parts beside it"
