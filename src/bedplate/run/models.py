"""Finds a model by name, path or hub id, and downloads it if necessary."""

from __future__ import annotations

import re

from bedplate.errors import NotPossible, UsageError
from bedplate.facts.gguf import read_gguf
from bedplate.facts.known_models import find_nearest, look_up_model
from bedplate.facts.library import LocatedModel, locate
from bedplate.facts.model_folder import PICKLES, make_pickle_error, read_config_file, read_folder
from bedplate.progress import Progress
from bedplate.run import builtin
from bedplate.values import Model
from bedplate.values.intent import ModelNamed

BUILTIN_NAMES = frozenset(["builtin", "built-in", builtin.NAME.lower()])


def is_builtin(text: str | None) -> bool:
    return text is None or text.lower() in BUILTIN_NAMES


def find_local_model(text: str | None) -> Model | None:
    """The facts of a model that is built in or on this machine; downloads nothing."""
    if is_builtin(text) or text is None:
        return builtin.read_builtin_facts()
    found = locate(text)
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
    return read_gguf(path, name=None, origin=found.origin)


def find_known_model(text: str | None = None) -> Model:
    """The facts of a model on this machine, or of one whose facts come with bedplate. Raises an error for others."""
    model = find_local_model(text) or look_up_model(text or "")
    if model is None:
        raise UsageError(
            f"{text} is not on this machine, and bedplate has no facts about it", hint=_suggest_alternatives(str(text))
        )
    return model


def find_intended_model(named: ModelNamed | None) -> Model:
    """The model of an intent file: by name, or by the facts in the file."""
    if isinstance(named, dict):
        from bedplate.facts.known_models import make_model_from_facts

        return make_model_from_facts(named)
    return find_known_model(named)


def find_inspected_model(text: str | None = None) -> Model:
    """The facts of a known model; those of an unknown hub id are read from the hub, without its weights."""
    model = find_local_model(text) or look_up_model(text or "")
    if model is None and text and re.fullmatch(r"[\w.-]+/[\w.-]+", text.strip()):
        from bedplate.run import hub

        return hub.read_remote_model(text.strip())
    return model or find_known_model(text)


def _suggest_alternatives(text: str) -> str:
    similar = find_nearest(text)
    suggestion = f"did you mean {' or '.join(similar)}? " if similar else ""
    fetch = f"`bedplate serve {text}` downloads it if it is on the hub"
    return f"{suggestion}{fetch}; or give a folder or a .gguf file"


def fetch_model(text: str, available_bytes: int, progress: Progress) -> Model:
    """Downloads a model from the hub: the quantization that fits, unless `text` names one."""
    from bedplate.run import hub
    from bedplate.values.units import format_size

    # Before the download only file sizes are known; a fifth is reserved for the KV cache and the engine.
    choice = hub.choose_files(text, fits=lambda size_bytes: size_bytes <= available_bytes * 0.8)
    if choice.size_bytes > available_bytes:
        raise NotPossible(
            f"{choice.name} does not fit: its weights need {format_size(choice.size_bytes)}, "
            f"{format_size(available_bytes)} are free",
            hint=f"use a smaller quantization; `bedplate serve {choice.repo}` chooses one that fits",
        )
    parts = f" in {len(choice.files)} files" if len(choice.files) > 1 else ""
    progress.note(f"downloading {choice.name} ({format_size(choice.size_bytes)}{parts}) to {choice.folder}")
    with progress.step(f"fetching {choice.name}", choice.size_bytes) as done:
        path = hub.download(choice, progress=lambda so_far, total: done(so_far), say=progress.note)
    return read_gguf(path, origin=f"the hub: {choice.repo}")
