"""Short names such as llama3.1:8b or qwen3:30b-a3b, for the models in the catalogue of published weights."""

from __future__ import annotations

import re
from functools import lru_cache

from bedplate.facts.known_models import is_chat_model, parse_model_name
from bedplate.facts.published_weights import load_catalogue

_SHORT = re.compile(r"[a-z][\w.-]*:[\w.-]+", re.IGNORECASE | re.ASCII)


def resolve_short_name(text: str) -> str | None:
    """The original model that a short name means, as owner/name, with the quantization that it names, if any.

    `llama3.1:8b` and `llama3.1:8b-instruct-q8_0` mean the chat model; None for a text of another form.
    """
    text = text.strip()
    if not _SHORT.fullmatch(text):
        return None
    asked = parse_model_name(text)
    name = _index_short_names().get(asked.key)
    if name is None:
        return None
    return f"{name}:{asked.label}" if asked.label else name


def list_family(text: str) -> list[str]:
    """The short names of the same family: of `llama3.1`, or of `llama3.1:9b`."""
    family = parse_model_name(text.partition(":")[0]).key
    names = [model.short for model in load_catalogue().models.values() if model.short]
    found = [one for one in names if family and parse_model_name(one.partition(":")[0]).key == family]
    return sorted(found, key=lambda one: (len(one), one))


@lru_cache(maxsize=1)
def _index_short_names() -> dict[str, str]:
    models = load_catalogue().models
    names = {parse_model_name(model.short).key: name for name, model in models.items() if model.short}
    # The others by their hub names. Where these differ only by -Instruct, the chat model is meant.
    for name in sorted(models, key=lambda name: (not is_chat_model(name), len(name), name)):
        names.setdefault(parse_model_name(name).key, name)
    return names
