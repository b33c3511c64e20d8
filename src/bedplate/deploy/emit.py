"""A platform as the files of one target."""

from __future__ import annotations

from collections.abc import Callable

from bedplate.deploy.compose import compose
from bedplate.deploy.dynamo import dynamo
from bedplate.deploy.kubernetes import Files, kubernetes
from bedplate.deploy.platform import Platform
from bedplate.deploy.ray import ray
from bedplate.errors import BadQuestion

TARGETS: dict[str, Callable[[Platform], Files]] = {
    "compose": compose,
    "kubernetes": kubernetes,
    "dynamo": dynamo,
    "ray": ray,
}


def emitted(platform: Platform, target: str) -> Files:
    """File names and what is in them; the same platform gives the same bytes."""
    if target not in TARGETS:
        raise BadQuestion(
            f"nothing is emitted for {target!r}",
            hint=f"--emit command writes a shell script; {', '.join(TARGETS)} write a folder",
        )
    return TARGETS[target](platform)


def as_one_stream(files: Files) -> str:
    """What `kubectl apply -f -` or `docker compose -f -` takes: manifests alone, one after the other."""
    alone = [name for name in files if not name.endswith(".yaml")]
    if alone or sum(name.endswith("compose.yaml") for name in files) > 1:
        some = ", ".join((alone or list(files))[:3])
        raise BadQuestion(
            f"these are {len(files)} files, and not all of them go into one stream: {some}",
            hint="give a folder with -o DIR",
        )
    kept = {name: text for name, text in files.items() if "/" not in name and name != "kustomization.yaml"}
    return "---\n".join(f"# {name}\n{text}" if len(kept) > 1 else text for name, text in kept.items())
