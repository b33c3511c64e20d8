"""Finds a model by name, path or hub id, and downloads it if necessary."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from bedplate.decide.intent import names_hardware
from bedplate.errors import NotPossible, UsageError
from bedplate.facts.gguf import read_gguf
from bedplate.facts.known_models import find_nearest
from bedplate.facts.library import LocatedModel, locate, split_reference
from bedplate.facts.model_folder import PICKLES, make_pickle_error, read_config_file, read_folder
from bedplate.facts.published_weights import find_gguf_repository, look_up_named_weights
from bedplate.facts.short_names import list_family, resolve_short_name
from bedplate.progress import Progress
from bedplate.run import builtin
from bedplate.values import Model, PublishedWeights, replace_fields
from bedplate.values.choices import join_with_or
from bedplate.values.intent import ModelNamed
from bedplate.values.quoting import quote_shell

if TYPE_CHECKING:
    from bedplate.run.hub import HubChoice

EXPECTED_FILES = "expected: a .gguf file, or a folder with config.json and .safetensors or ONNX files"
BUILTIN_NAMES = frozenset(["builtin", "built-in", builtin.NAME.lower(), "smollm2:135m"])


def is_builtin(text: str | None) -> bool:
    return text is None or text.lower() in BUILTIN_NAMES


def expand_name(text: str) -> str:
    """The hub name that a short name such as llama3.1:8b means; any other text unchanged."""
    return resolve_short_name(text) or text


def describe_short_name(text: str | None) -> str | None:
    """What a short name stands for, in a clause; `None`: the text is another kind of name."""
    name = resolve_short_name(text) if text is not None and not is_builtin(text) else None
    return f"{text} is {name}" if name is not None else None


def find_local_model(text: str | None) -> Model | None:
    """The facts of a model that is built in or on this machine; downloads nothing."""
    if is_builtin(text) or text is None:
        return builtin.read_builtin_facts()
    found = locate(text) or (locate(name) if (name := resolve_short_name(text)) is not None else None)
    return _read_located(found) if found else None


def _read_located(found: LocatedModel) -> Model:
    """Reads the facts of a folder or file, by its format."""
    path, ending = found.path, found.path.suffix.lower()
    if path.is_dir():
        return read_folder(path, name=found.name, origin=found.origin)
    if ending == ".json":
        if path.name == "config.json" and any(path.parent.glob("*.safetensors")):
            return read_folder(path.parent)
        return read_config_file(path)
    if ending in (".safetensors", ".onnx"):
        return read_folder(path.parent)
    if ending in PICKLES:
        raise make_pickle_error(path.name)
    if ending in (".yaml", ".yml"):
        raise UsageError(
            f"{path.name} is not a model file", hint=f"for an intent file: --file {quote_shell(str(path))}"
        )
    return read_gguf(path, name=None, origin=found.origin)


def find_known_model(text: str | None = None) -> Model:
    """The facts of a model on this machine, or of one whose facts come with bedplate. Raises an error for others."""
    model = find_local_model(text) or _look_up(text or "")
    if model is None:
        _check_is_no_path(text or "")
        raise UsageError(
            f"{text} is not on this machine, and bedplate has no facts about it", hint=_suggest_alternatives(str(text))
        )
    return model


def _check_is_no_path(text: str) -> None:
    """Raises an error for a file or folder that is not a model."""
    path = Path(text).expanduser()
    if path.is_dir():
        raise UsageError(f"the folder {text} contains no model", hint=EXPECTED_FILES)
    if path.is_file():
        raise UsageError(f"{text} is not a model file", hint=EXPECTED_FILES)


def _look_up(text: str) -> Model | None:
    """The facts that come with bedplate. Their origin names the short name that was resolved."""
    name = resolve_short_name(text)
    found = look_up_named_weights(name or text)
    return replace_fields(found, origin=f"known facts ({text})") if found is not None and name else found


def find_intended_model(named: ModelNamed | None) -> Model:
    """The model of an intent file: by name, or by the facts in the file."""
    if isinstance(named, dict):
        from bedplate.facts.known_models import make_model_from_facts

        return make_model_from_facts(named)
    return find_known_model(named)


def find_inspected_model(text: str | None = None) -> Model:
    """The facts of a known model; those of an unknown hub id are read from the hub, without its weights."""
    model = find_local_model(text) or _look_up(text or "")
    if model is None and text and re.fullmatch(r"[\w.-]+/[\w.-]+", text.strip()):
        from bedplate.run import hub

        return hub.read_remote_model(text.strip())
    return model or find_known_model(text)


def _suggest_alternatives(text: str) -> str:
    if "/" not in text and (family := list_family(text)):
        return f"did you mean {join_with_or(family)}?"
    if names_hardware(text):
        return f'this names hardware: --hardware "{text}"'
    similar = find_nearest(text)
    suggestion = f"did you mean {' or '.join(similar)}? " if similar else ""
    if "/" not in text:
        return f"{suggestion}give owner/name on the hub, a folder or a .gguf file; bedplate models lists known models"
    return f"{suggestion}`bedplate serve {text}` downloads it if it is on the hub; or give a folder or a .gguf file"


def fetch_published(name: str, published: PublishedWeights, progress: Progress) -> Model:
    """Downloads published weights of a known model, if they are not here: one GGUF file with all its parts, or a model
    folder."""
    from bedplate.run import hub

    if published.revision is None:
        inside = f"/{published.file}" if published.file is not None else ""
        if (found := locate(f"{published.repository}{inside}")) is not None:
            return replace_fields(_read_located(found), origin=f"the hub: {published.repository}")
    if published.file is not None:
        choice = hub.choose_files(f"{published.repository}/{published.file}", fits=lambda size_bytes: True)
    else:
        choice = hub.choose_folder(published.repository, published.revision)
    path, origin = _download(choice, progress), f"the hub: {choice.repo}"
    return (
        read_gguf(path, origin=origin)
        if published.file is not None
        else read_folder(path.parent, name=name, origin=origin)
    )


def fetch_model(text: str, available_bytes: int, progress: Progress) -> Model:
    """Downloads a model from the hub: the quantization that fits, unless `text` names one.

    For a known model without GGUF files of its own, it is a published conversion.
    """
    from bedplate.run import hub
    from bedplate.values.units import format_size

    text = expand_name(text)
    repo, quantization, file = split_reference(text)
    if "/" not in repo:
        _check_is_no_path(text)
        raise UsageError(f"{text} is not on this machine", hint=_suggest_alternatives(text))
    if file is None and (published := find_gguf_repository(repo)) is not None:
        text = f"{published}:{quantization}" if quantization is not None else published
    # Before the download only file sizes are known; a fifth is reserved for the KV cache and the engine.
    choice = hub.choose_files(text, fits=lambda size_bytes: size_bytes <= available_bytes * 0.8)
    if choice.size_bytes > available_bytes:
        raise NotPossible(
            f"{choice.name} does not fit: its weights need {format_size(choice.size_bytes)}, "
            f"{format_size(available_bytes)} are free",
            hint=f"use a smaller quantization; `bedplate serve {choice.repo}` chooses one that fits",
        )
    return read_gguf(_download(choice, progress), origin=f"the hub: {choice.repo}")


def _download(choice: HubChoice, progress: Progress) -> Path:
    from bedplate.run import hub
    from bedplate.values.units import format_size

    parts = f" in {len(choice.files)} files" if len(choice.files) > 1 else ""
    progress.note(f"downloading {choice.name} ({format_size(choice.size_bytes)}{parts}) to {choice.folder}")
    with progress.step(f"fetching {choice.name}", choice.size_bytes) as done:
        return hub.download(choice, progress=lambda so_far, total: done(so_far), say=progress.note)
