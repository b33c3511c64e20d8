"""Writes the deployment files of a platform for one target."""

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
    """Return the files by name. The output is deterministic: the same platform gives the same bytes."""
    if target not in TARGETS:
        raise BadQuestion(
            f"unknown target {target!r}",
            hint=f"choose command (a shell script), or {', '.join(TARGETS)} (a folder of files)",
        )
    return TARGETS[target](platform)


def as_one_stream(files: Files) -> str:
    """Join the manifests into one text for `kubectl apply -f -` or `docker compose -f -`."""
    others = [name for name in files if not name.endswith(".yaml")]
    if others or sum(name.endswith("compose.yaml") for name in files) > 1:
        some = ", ".join((others or list(files))[:3])
        raise BadQuestion(
            f"these {len(files)} files cannot be written as one stream: {some}",
            hint="write them to a folder with -o DIR",
        )
    kept = {name: text for name, text in files.items() if "/" not in name and name != "kustomization.yaml"}
    return "---\n".join(f"# {name}\n{text}" if len(kept) > 1 else text for name, text in kept.items())
