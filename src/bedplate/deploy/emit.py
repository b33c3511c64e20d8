"""Writes the deployment files of a platform for one target."""

from __future__ import annotations

from collections.abc import Callable

from bedplate.deploy.compose import write_compose
from bedplate.deploy.dynamo import write_dynamo
from bedplate.deploy.kubernetes import Files, write_kubernetes
from bedplate.deploy.platform import Platform
from bedplate.deploy.ray import write_ray
from bedplate.errors import NotPossible, UsageError
from bedplate.values.quoting import write_comment

TARGETS: dict[str, Callable[[Platform], Files]] = {
    "compose": write_compose,
    "kubernetes": write_kubernetes,
    "dynamo": write_dynamo,
    "ray": write_ray,
}
WITHOUT_ADAPTERS = ("dynamo", "ray")
"""Targets with a server of their own, which loads adapters in another way than the engine's server."""


def emit_target(platform: Platform, target: str) -> Files:
    """Return the files by name. The output is deterministic: the same platform gives the same bytes."""
    if target not in TARGETS:
        raise UsageError(
            f"unknown target {target!r}",
            hint=f"choose command (a shell script), or {', '.join(TARGETS)} (a folder of files)",
        )
    with_adapters = next((one.name for one in platform.services if one.plan.workload.adapters), None)
    if target in WITHOUT_ADAPTERS and with_adapters is not None:
        raise NotPossible(
            f"{with_adapters} has LoRA adapters, which the files for {target} do not load",
            hint="--emit command, compose or kubernetes",
        )
    return TARGETS[target](platform)


def join_manifests(files: Files) -> str:
    """Join the manifests into one text for `kubectl apply -f -` or `docker compose -f -`."""
    others = [name for name in files if not name.endswith(".yaml")]
    if others or sum(name.endswith("compose.yaml") for name in files) > 1:
        some = ", ".join((others or list(files))[:3])
        raise UsageError(
            f"these {len(files)} files cannot be written as one stream: {some}",
            hint="write them to a folder with -o DIR",
        )
    kept = {name: text for name, text in files.items() if "/" not in name and name != "kustomization.yaml"}
    return "---\n".join(f"{write_comment(name)}\n{text}" if len(kept) > 1 else text for name, text in kept.items())
