"""Names of engines and orchestrators: maps any usual spelling to an id."""

from __future__ import annotations

import functools
import re

from bedplate.engines import load_engines

ORCHESTRATORS = {
    "dynamo": ("nvidiadynamo", "aidynamo"),
    "ray": ("rayserve", "rayserv", "rayllm", "rayservellm", "kuberay"),
    "kubernetes": ("k8s", "kserve", "openshift", "eks", "gke", "aks"),
}
"""Ids, and their other names in lower-case letters and digits only."""
VERSION = re.compile(r"[\s@=_v-]*[0-9]+\.[0-9].*$|[\s@=_-]+b[0-9]{3,}$|\s*\([^()]*\)\s*$")
"""What may follow a name: a version, a build number without a dot, or a note in parentheses."""


def find_engine_id(text: str) -> str | None:
    """The id of the engine that `text` names, in any usual spelling, with or without a version."""
    for one in load_engines().values():
        if one.spelling_pattern is not None and re.match(one.spelling_pattern, text, re.IGNORECASE):
            return one.id
    found = _find_id(text)
    return found if found in load_engines() else None


def find_orchestrator_id(text: str) -> str | None:
    found = _find_id(text)
    return found if found in ORCHESTRATORS else None


def find_nearest_names(text: str, count: int = 3) -> tuple[str, ...]:
    """The ids whose names are most similar to `text`, best first."""
    import difflib

    close = difflib.get_close_matches(_normalize(text), _index_names(), n=3 * count, cutoff=0.6)
    return tuple(dict.fromkeys(_index_names()[name] for name in close))[:count]


def _find_id(text: str) -> str | None:
    return _index_names().get(_normalize(text)) or _index_names().get(_normalize(VERSION.sub("", text[:200])))


def _normalize(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text[:200].lower())


@functools.cache
def _index_names() -> dict[str, str]:
    named = {one.id: one.spellings for one in load_engines().values()} | ORCHESTRATORS
    return {_normalize(name): id for id, names in named.items() for name in (id, *names)}
