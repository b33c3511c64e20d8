"""Snapshots: a summary of the emitted files of every intent, and all files of one intent per target."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from syrupy.assertion import SnapshotAssertion
from tests.deploy.intents import INTENTS, REFUSED, TARGETS, WRITTEN, emit_files
from tests.deploy.walk import iterate_pods, read_manifests

from bedplate.errors import NotPossible

WHOLE = [("h100-chat", "kubernetes"), ("one-pool", "compose"), ("fleet-apart", "dynamo"), ("h100-chat", "ray")]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", list(INTENTS))
def test_summary_of_emitted_files_matches_snapshot(name: str, target: str, snapshot: SnapshotAssertion) -> None:
    assert "\n".join(summarize(name, target)) == snapshot


@pytest.mark.parametrize(("name", "target"), WHOLE)
def test_emitted_files_match_snapshot(name: str, target: str, snapshot: SnapshotAssertion) -> None:
    files = emit_files(name, target)
    whole = "".join(f"=== {path}\n{text}" for path, text in files.items() if "images/" not in path)
    # Leave out the prefill time: it changes when the estimator does.
    assert re.sub(r"# By the estimate[^\n]*(?:\n +# [^\n]*)?", "# By the estimate …", whole) == snapshot


def test_at_least_forty_intents_are_emitted_and_the_others_refused() -> None:
    assert len(WRITTEN) >= 40
    for name, target in REFUSED:
        with pytest.raises(NotPossible):
            emit_files(name, target)


def summarize(name: str, target: str) -> list[str]:
    """Write one line per manifest, then its containers: image, GPUs, timeouts and engine options."""
    try:
        files = emit_files(name, target)
    except NotPossible as refusal:
        return [f"refused: {refusal.message}"]
    if target == "compose":
        return [line for path, text in files.items() if path.endswith("compose.yaml")
                for line in [path, *_describe_compose(yaml.safe_load(text))]]  # fmt: skip
    found = [path for path in files if "/" in path]
    for tree in read_manifests(files):
        found.append(f"{tree['kind']} {tree['metadata']['name']}{_describe_figures(tree)}")
        if tree["kind"] == "Job":
            found += [f"  {step['name']}: {step['image']}" for step in next(iterate_pods(tree))[1]["initContainers"]]
        elif tree["kind"] != "Deployment" or "picker" not in tree["metadata"]["name"]:
            for _, pod in iterate_pods(tree):
                found += _describe_pod(pod)
    return found


def _describe_figures(tree: dict[str, Any]) -> str:
    spec, kind = tree.get("spec", {}), tree["kind"]
    if kind == "ScaledObject":
        thresholds = [trigger["metadata"]["threshold"] for trigger in spec["triggers"]]
        return f" {spec['minReplicaCount']}..{spec['maxReplicaCount']} at {', '.join(thresholds)}"
    if kind == "PersistentVolumeClaim":
        return f" {spec['accessModes'][0]} {spec['resources']['requests']['storage']}"
    if kind == "ClusterQueue":
        flavors = [
            f"{flavor['name']} " + "/".join(str(one["nominalQuota"]) for one in flavor["resources"])
            for flavor in spec["resourceGroups"][0]["flavors"]
        ]
        return f" {'; '.join(flavors)}"
    if kind == "LeaderWorkerSet":
        return f" size {spec['leaderWorkerTemplate']['size']}"
    if kind == "DynamoGraphDeployment":
        return " " + ", ".join(
            f"{one['name']} {one.get('replicas', 'scaled')}"
            + (f" of {one['multinode']['nodeCount']} nodes" if "multinode" in one else "")
            for one in spec["components"]
        )
    if kind == "RayService":
        config = yaml.safe_load(spec["serveConfigV2"])["applications"][0]["args"]["llm_configs"][0]
        return f" {config['accelerator_type']} {config['engine_kwargs']} {config['deployment_config']}"
    return f" {spec['replicas']}" if "replicas" in spec else ""


def _describe_pod(pod: dict[str, Any]) -> list[str]:
    found = []
    for container in pod["containers"]:
        asked = container["resources"]["requests"]
        wanted = " ".join(f"{name}={value}" for name, value in asked.items())
        probe = container.get("startupProbe")
        start = f" start {probe['failureThreshold'] * probe['periodSeconds']}s" if probe else ""
        found.append(f"  {container['image']} {wanted}{start} grace {pod['terminationGracePeriodSeconds']}s")
        found.append(f"    {' '.join(container.get('command', []))} {' '.join(container.get('args', []))}".rstrip())
    return found


def _describe_compose(tree: dict[str, Any]) -> list[str]:
    found = []
    for name, one in tree["services"].items():
        devices = one.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [{}])[0]
        cards = devices.get("count") or devices.get("device_ids") or one.get("devices") or ""
        times = f"{one.get('healthcheck', {}).get('start_period', '')} {one.get('stop_grace_period', '')}".strip()
        found.append(f"  {name} {one['image']} {cards} {times}".rstrip())
        if "healthcheck" in one:
            found.append(f"    {' '.join(one['entrypoint'])} {' '.join(one['command'])}")
    return found
