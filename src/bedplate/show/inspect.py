"""The page of `inspect`: architecture, size, and memory per sequence of a model."""

from __future__ import annotations

from pathlib import Path

from rich.console import RenderableType

from bedplate.show.columns import SourcedTable
from bedplate.values import Hardware, Model
from bedplate.values.model import Projector
from bedplate.values.units import format_memory, format_size
from bedplate.values.workload import AUDIO_WINDOW_S

TASKS = {
    "generate": "text generation", "embed": "embeddings", "classify": "reranking or classification",
    "transcribe": "transcription", "other": "",
}  # fmt: skip
CONTEXTS = (8_192, 32_768, 131_072)
BASES = {"reported": "reported", "spec": "published configuration", "estimate": "estimate", "measured": "measured"}
PART_WORDS = {
    "attention": "attention",
    "mlp": "feed-forward",
    "experts": "routed experts",
    "output": "output",
    "vision": "vision encoder",
}


def render_model(model: Model, hardware: Hardware | None = None) -> RenderableType:
    """One page; the figures come from the files or the configuration unless a note names another source."""
    table = SourcedTable()
    add_fact = table.add_row

    def add_facts(label: str, lines: list[tuple[str, str]]) -> None:
        for position, (value, note) in enumerate(lines):
            add_fact(label if position == 0 else "", value, note)

    add_fact("Model", _join_words(model.name, model.architecture, TASKS[model.task]), _describe_origin(model))
    add_facts("Parameters", _list_parameters(model))
    add_fact(
        "Weights",
        _join_words(format_size(model.weight_bytes), _describe_storage(model), model.format.upper()),
        _format_bits(model),
    )
    add_facts("", _list_weights(model))
    add_fact("Shape", _describe_shape(model))
    add_facts("Layers", _list_layers(model))
    add_fact("Context", f"{model.max_context:,} tokens" if model.max_context else "unknown", _describe_template(model))
    add_facts("KV cache", _list_cache_sizes(model))
    add_facts("Implies", _list_implications(model, hardware))
    add_fact("Files", _describe_files(model))
    return table


def _describe_origin(model: Model) -> str:
    if model.basis == "estimate":
        return f"{model.origin or ''}, sizes estimated".strip(", ")
    return model.origin or ""


def _join_words(*parts: str | None) -> str:
    return " · ".join(part for part in parts if part)


def _list_parameters(model: Model) -> list[tuple[str, str]]:
    text = format_count(model.parameters)
    if model.num_experts and model.active_parameters is not None:
        text += f", of which {format_count(model.active_parameters)} active per token"
    lines = [(text, BASES[model.basis])]
    separate = []
    if model.vision_parameters:
        separate.append(f"{format_count(model.vision_parameters)} in a vision encoder")
    if (one := model.projector) is not None:
        separate.append(f"{format_count(one.parameters)} in a vision encoder ({_describe_images(one)})")
    if model.mtp_parameters:
        separate.append(f"{format_count(model.mtp_parameters)} in multi-token-prediction heads")
    if separate:
        lines.append(("and " + ", ".join(separate), "counted separately"))
    return lines


def _describe_images(one: Projector) -> str:
    tokens = f"{one.image_tokens:,} tokens for an image" if one.image_tokens else "tokens depend on the image"
    return f"{Path(one.file).name}, {format_size(one.weight_bytes)}, {tokens}"


def _describe_storage(model: Model) -> str | None:
    details = model.quantization_details
    if details is None or model.quantization is None:
        return model.quantization
    grain = f"groups of {details.group_size}" if details.group_size and details.group_size < 1 << 20 else None
    if details.block:
        grain = f"blocks of {details.block[0]}×{details.block[1]}"
    notes = [note for note in (grain, f"calibrated for {details.kv_cache} cache" if details.kv_cache else None) if note]
    return f"{model.quantization} ({', '.join(notes)})" if notes else model.quantization


def _list_weights(model: Model) -> list[tuple[str, str]]:
    """Weights by part of the model, and by storage type if there are several."""
    lines = []
    parts = [part for part in model.parts if part.name != "mtp" and part.bytes >= 0.001 * model.weight_bytes]
    for part in sorted(parts, key=lambda part: -part.bytes) if len(parts) > 1 else ():
        share = part.bytes / model.weight_bytes if model.weight_bytes else 0.0
        lines.append((f"{PART_WORDS.get(part.name, part.name):<18} {format_size(part.bytes):>8}  {share:>5.1%}", ""))
    if len(model.tensor_groups) > 1:
        for group in model.tensor_groups[:8]:
            share = group.bytes / model.weight_bytes if model.weight_bytes else 0.0
            tensors = f"{group.tensors:,} tensor{'' if group.tensors == 1 else 's'}"
            lines.append((f"{group.type:<8} {format_size(group.bytes):>8}  {share:>5.1%}  {tensors}", ""))
    return lines


def _describe_fixed_input(model: Model) -> str:
    """The input whose cache does not grow with the text."""
    return f"for {AUDIO_WINDOW_S} seconds of audio" if model.task == "transcribe" else "per image"


def _list_layers(model: Model) -> list[tuple[str, str]]:
    """The cache memory of each kind of layer."""
    if len(model.layers) < 2 and not any(group.kind != "full attention" for group in model.layers):
        return []
    lines = []
    for group in model.layers:
        cached = []
        if group.kv_bytes_per_token:
            cached.append(f"{format_memory(group.kv_bytes_per_token)} per token")
        if group.window and group.kv_bytes_window:
            cached.append(f"at most {format_memory(group.kv_bytes_window)} (window {group.window:,})")
        elif group.kv_bytes_window:
            cached.append(f"{format_memory(group.kv_bytes_window)} {_describe_fixed_input(model)}")
        if group.state_bytes:
            cached.append(f"{format_memory(group.state_bytes)} of state")
        lines.append((f"{group.count:>3} {group.kind:<28}  {' + '.join(cached) or 'no cache'}", ""))
    return lines


def _list_implications(model: Model, hardware: Hardware | None) -> list[tuple[str, str]]:
    """The speed limit that follows from the bytes read per token."""
    if model.task != "generate" or not model.weight_bytes:
        return []
    read = model.read_bytes_per_token
    text = f"{read / 1e9:,.1f} GB" if read >= 1e9 else format_size(read)
    text += " are read per token"
    figure = hardware.memory.bandwidth_bytes_s if hardware is not None else None
    if figure is None or figure.value <= 0:
        return [(text, "one stream, short context")]
    most = figure.value / read if read else 0.0
    speed = f"{most:,.0f}" if most >= 20 else f"{most:.1f}"
    text += f"; at {format_size(figure.value)}/s, at most {speed} tokens/s for one stream"
    return [(text, f"this machine's memory, {figure.basis}")]


def format_count(number: int) -> str:
    """In millions or billions, such as 135 M or 8.03 B."""
    for step, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if number >= 0.9995 * step:
            value = number / step
            return f"{value:.0f} {unit}" if value >= 99.5 else f"{value:.3g} {unit}"
    return f"{number:,}"


def _format_bits(model: Model) -> str:
    stored = sum(group.parameters for group in model.tensor_groups)
    return f"{8 * model.weight_bytes / stored:.2f} bits per weight" if stored else ""


def _describe_shape(model: Model) -> str:
    heads = None
    if model.num_heads:
        heads = f"{model.num_heads} heads"
        if model.num_kv_heads and model.num_kv_heads != model.num_heads:
            heads += f", {model.num_kv_heads} KV heads"
    experts = None
    if model.num_experts:
        used = f", {model.num_experts_active} active" if model.num_experts_active else ""
        experts = f"{model.num_experts} experts{used}"
    width = f"hidden size {model.hidden_size:,}" if model.hidden_size else None
    vocabulary = f"vocabulary {model.vocab_size:,}" if model.vocab_size else None
    return _join_words(f"{model.num_layers} layers", width, heads, experts, vocabulary)


def _describe_template(model: Model) -> str:
    if model.task != "generate":
        return ""
    if model.has_chat_template:
        return "has a chat template"
    # A configuration alone does not show whether there is one.
    return "no chat template: completes text only" if model.files else ""


def _list_cache_sizes(model: Model) -> list[tuple[str, str]]:
    """Memory per token, then per sequence of common lengths."""
    if not model.compute_kv_bytes(1):
        return [("none: each request is one forward pass", "")]
    rows = []
    if model.kv_bytes_per_token:
        rows.append((f"{format_memory(model.kv_bytes_per_token)} per token", "16-bit"))
    fixed = sum(group.kv_bytes_window for group in model.layers if not group.window) if model.layers else 0
    if windowed := model.kv_bytes_window - fixed:
        rows.append((f"{format_memory(windowed)} at most in sliding-window layers", "16-bit"))
    if fixed:
        rows.append((f"{format_memory(fixed)} {_describe_fixed_input(model)}", "16-bit"))
    if model.state_bytes:
        rows.append((f"{format_memory(model.state_bytes)} of recurrent state, independent of length", "32-bit"))
    limit = model.max_context or CONTEXTS[0]
    lengths = [length for length in CONTEXTS if length < limit]
    lengths.append(limit if limit <= CONTEXTS[-1] or not lengths else CONTEXTS[-1])
    sizes = (
        f"{format_memory(model.compute_kv_bytes(length))} at {_format_tokens(length)}"
        for length in dict.fromkeys(lengths)
    )
    rows.append((" · ".join(sizes), "one sequence"))
    return rows


def _format_tokens(number: int) -> str:
    return f"{number // 1024}k" if number % 1024 == 0 else f"{number:,}"


def _describe_files(model: Model) -> str:
    if not model.files:
        return "not on this machine"
    first = Path(model.files[0])
    if first.is_relative_to(Path.home()):
        first = "~" / first.relative_to(Path.home())
    if len(model.files) == 1:
        return str(first)
    return f"{first} and {len(model.files) - 1} more files in the same folder"
