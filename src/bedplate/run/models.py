"""From what a person types to a model that an engine can be given."""

from __future__ import annotations

import re

from bedplate.errors import AnswerIsNo, BadQuestion
from bedplate.facts.gguf import read_gguf
from bedplate.facts.known_models import lookup, nearest
from bedplate.facts.library import Located, locate
from bedplate.facts.model_folder import PICKLES, pickle_refused, read_config_file, read_folder
from bedplate.progress import Progress
from bedplate.run import builtin
from bedplate.values import Model
from bedplate.values.intent import ModelNamed

BUILTIN_NAMES = frozenset(["builtin", "built-in", builtin.NAME.lower()])


def is_builtin(text: str | None) -> bool:
    return text is None or text.lower() in BUILTIN_NAMES


def local_model(text: str | None) -> Model | None:
    """The model's facts if it is built in or on this machine already; nothing is downloaded."""
    if is_builtin(text) or text is None:
        return builtin.builtin_facts()
    found = locate(text)
    return _read(found) if found else None


def _read(found: Located) -> Model:
    """The facts of what was found, by what it is."""
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
        raise pickle_refused(path.name)
    return read_gguf(path, name=None, origin=found.origin)


def known_model(text: str | None = None) -> Model:
    """As `local_model`, then by the facts of well-known models that come with bedplate; else it is an error."""
    model = local_model(text) or lookup(text or "")
    if model is None:
        raise BadQuestion(
            f"{text} is not on this machine, and not among the models that bedplate knows", hint=_way_out(str(text))
        )
    return model


def intended_model(named: ModelNamed | None) -> Model:
    """The model that an intent speaks of: by name, or by the facts that it states."""
    if isinstance(named, dict):
        from bedplate.facts.known_models import model_from_facts

        return model_from_facts(named)
    return known_model(named)


def inspected_model(text: str | None = None) -> Model:
    """As `known_model`; a hub id that is not known is read from the hub, without its weights."""
    model = local_model(text) or lookup(text or "")
    if model is None and text and re.fullmatch(r"[\w.-]+/[\w.-]+", text.strip()):
        from bedplate.run import hub

        return hub.remote_model(text.strip())
    return model or known_model(text)


def _way_out(text: str) -> str:
    near = nearest(text)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    fetch = f"`bedplate serve {text}` downloads it from the hub, if that is where it is"
    return f"{meant}{fetch}; or name a folder or a .gguf file"


def fetched_model(text: str, available_bytes: int, progress: Progress) -> Model:
    """A model of the hub, downloaded: the quantization that fits, unless `text` names one."""
    from bedplate.run import hub
    from bedplate.values.units import size

    # Only file sizes are known before it is here; a fifth is left for cache and engine.
    choice = hub.choose(text, fits=lambda size_bytes: size_bytes <= available_bytes * 0.8)
    if choice.size_bytes > available_bytes:
        raise AnswerIsNo(
            f"{choice.name} does not fit: its weights are {size(choice.size_bytes)}, {size(available_bytes)} are free",
            hint=f"a smaller quantization; `bedplate serve {choice.repo}` takes one that fits",
        )
    parts = f" in {len(choice.files)} files" if len(choice.files) > 1 else ""
    progress.note(f"downloading {choice.name} ({size(choice.size_bytes)}{parts}) to {choice.folder}")
    with progress.step(f"fetching {choice.name}", choice.size_bytes) as done:
        path = hub.download(choice, progress=lambda so_far, total: done(so_far), say=progress.note)
    return read_gguf(path, origin=f"the hub: {choice.repo}")
