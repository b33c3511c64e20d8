"""From what a person types to a model that an engine can be given."""

from __future__ import annotations

from bedplate.errors import AnswerIsNo, BadQuestion
from bedplate.facts.gguf import read_gguf
from bedplate.facts.library import locate
from bedplate.run import builtin
from bedplate.run.progress import Progress
from bedplate.values import Model

BUILTIN_NAMES = frozenset(["builtin", "built-in", builtin.NAME.lower()])


def is_builtin(text: str | None) -> bool:
    return text is None or text.lower() in BUILTIN_NAMES


def local_model(text: str | None) -> Model | None:
    """The model's facts if it is built in or on this machine already; nothing is downloaded."""
    if is_builtin(text) or text is None:
        return builtin.builtin_facts()
    found = locate(text)
    return read_gguf(found.path, name=None, origin=found.origin) if found else None


def known_model(text: str | None = None) -> Model:
    """As `local_model`, but a model that is not here is an error."""
    model = local_model(text)
    if model is None:
        raise BadQuestion(
            f"{text} is not on this machine",
            hint=f"`bedplate serve {text}` downloads it from the hub, if that is where it is; or name a .gguf file",
        )
    return model


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
