"""Writes the deployment files of a platform for one target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from bedplate.deploy.air_gap import check_revisions, list_models, mirror_images, use_mirror_as_registry
from bedplate.deploy.compose import write_compose
from bedplate.deploy.dynamo import write_dynamo
from bedplate.deploy.kubernetes import Files, write_kubernetes
from bedplate.deploy.platform import Platform
from bedplate.deploy.ray import write_ray
from bedplate.deploy.service_containers import describe_containers
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
    _check_endpoints_elsewhere(platform, target)
    _check_scale_to_zero(platform, target)
    _check_named_cards(platform, target)
    platform = replace(platform, deploy=use_mirror_as_registry(platform.deploy))
    deploy = platform.deploy
    files = TARGETS[target](platform)
    if deploy.models == "copy" or deploy.revisions:
        units = [describe_containers(placed, deploy) for placed in platform.services]
        check_revisions(units, deploy)
        files = files | list_models(units, deploy)
    return mirror_images(files, deploy)


CLUSTER_SETTINGS = ("namespace", "gateway", "endpoint", "storage_class", "prometheus", "prometheus_release", "rdma")
"""Fields of `deploy` that have no meaning on one machine."""


def list_unused_settings(platform: Platform, target: str) -> list[str]:
    """Return the settings of the intent that the files for this target do not express."""
    deploy, found = platform.deploy, list[str]()
    if target == "compose":
        found += [f"deploy.{name}" for name in CLUSTER_SETTINGS if getattr(deploy, name)]
        found += ["tenants"] if platform.tenants else []
    if deploy.gateway_provider is not None and (deploy.gateway is None or target == "compose"):
        found.append("deploy.gateway_provider")
    if deploy.layout == "disaggregated" and target != "dynamo":
        found.append("deploy.layout")
    return found


def _check_named_cards(platform: Platform, target: str) -> None:
    """Refuse a plan for some of a node's different GPUs where something else than the files assigns them."""
    for one in platform.services if target != "compose" else ():
        if one.plan.settings.cards and one.spare:
            card = one.node.accelerators[0].name
            raise NotPossible(
                f"{one.name} is planned for {card}, but Kubernetes assigns any of a node's GPUs",
                cause="its device plugins do not distinguish the GPUs of a node",
                hint="--emit command or compose, which name the GPUs; or describe nodes with equal GPUs",
            )


def _check_endpoints_elsewhere(platform: Platform, target: str) -> None:
    """Refuse endpoints elsewhere where nothing in the files sends requests to them."""
    if not platform.elsewhere or (target != "compose" and platform.deploy.endpoint):
        return
    hint = (
        "set deploy.endpoint: true, which writes bedplate's gateway"
        if target != "compose"
        else "bedplate serve -f FILE"
    )
    raise NotPossible(
        f"{platform.elsewhere[0][1].url} is an endpoint elsewhere, and the files for {target} have no gateway that "
        "sends requests to it",
        hint=f"{hint}; or leave the endpoint out",
    )


def _check_scale_to_zero(platform: Platform, target: str) -> None:
    """Refuse a `ttl` that the files could not follow: nothing would stop the engines, or start them again."""
    asked = next((one.name for one in platform.services if one.ttl_s is not None), None)
    if asked is None:
        return
    if target == "kubernetes":
        if not platform.deploy.endpoint:
            raise NotPossible(
                f"{asked} has a ttl, and nothing would start it again when it is scaled to zero",
                hint="set deploy.endpoint: true, whose gateway keeps requests until a replica runs, or leave ttl out",
            )
        return
    hint = "bedplate serve -f FILE unloads idle models" if target == "compose" else "--emit kubernetes"
    raise NotPossible(
        f"{asked} has a ttl, but the files for {target} keep every engine running", hint=f"{hint}; or leave ttl out"
    )


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
