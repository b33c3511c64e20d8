"""Ray Serve LLM on Kubernetes: its configuration, and a RayService that contains it.

Fields are from Ray 2.56 (ray.serve.llm, ray.serve.schema) and KubeRay's samples of August 2026.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bedplate.deploy.images import RAY_TAG, RAY_TAG_NOTE, RAY_VERSION, Image
from bedplate.deploy.kubernetes import Files, head_of, manifests, workload
from bedplate.deploy.platform import Platform
from bedplate.deploy.pods import (
    Tree,
    container_rights,
    environment,
    labels_of,
    metadata,
    mounts,
    place,
    resources,
    rights,
    volumes,
    waiting,
)
from bedplate.deploy.queues import queue_of
from bedplate.deploy.scaling import FULL, QUIET_S, bounds, most_words
from bedplate.deploy.served import DRAIN_S, PORT, Served, engines_that, served
from bedplate.deploy.yaml_writer import document, plain, why
from bedplate.errors import AnswerIsNo
from bedplate.facts.chips import chip_of
from bedplate.values.intent import Deploy
from bedplate.values.units import seconds

ACCELERATORS = {
    "H100": "H100", "H200": "H200", "GH200": "GH200", "B200": "B200", "GB200": "GB200", "B300": "B300",
    "L4": "L4", "L40S": "L40S", "A10G": "A10G", "A10": "A10", "T4": "T4", "V100": "V100", "RTX 4090": "RTX-4090",
}  # fmt: skip
PORTS = {"serve": PORT, "metrics": 8080, "gcs": 6379, "dashboard": 8265, "client": 10001}


def ray(platform: Platform) -> Files:
    units = [served(placed, platform.deploy) for placed in platform.services]
    reasons = {unit.name: reason for unit in units if (reason := refused(unit)) is not None}
    if len(reasons) == len(units):
        first = next(iter(reasons.values()))
        runs = " or ".join(one.id for one in engines_that(lambda one: one.ray))
        raise AnswerIsNo(first, hint=f"use --engine {runs} on NVIDIA GPUs, or --emit kubernetes")
    workloads: dict[str, Sequence[Tree]] = {}
    configs: Files = {}
    for index, unit in enumerate(units):
        worker = unit.engine.ray
        if unit.name in reasons or worker is None:
            workloads[unit.name] = workload(unit, platform)
            continue
        build = f"Ray {RAY_VERSION} includes its own build of {unit.engine.name}"
        note = f"{build}; the plan was made for {unit.plan.engine_version}; {RAY_TAG_NOTE}"
        units[index] = replace(unit, image=Image(f"{worker.image}:{RAY_TAG}", note, user=1000, group=100, python=True))
        config = serve_config(units[index])
        # For `serve deploy`; the RayService contains the same configuration.
        configs[f"serve/{unit.name}.yaml"] = document(config, head_of(unit))
        service = _ray_service(units[index], platform.deploy, queue_of(unit, platform), config)
        workloads[unit.name] = [service, _watched(units[index], platform.deploy)]
    return manifests(platform, units, workloads, plain_reasons=reasons, more_files=configs)


def refused(unit: Served) -> str | None:
    if unit.engine.ray is None:
        runs = ", ".join(one.name for one in engines_that(lambda one: one.ray))
        return f"Ray Serve LLM runs {runs}, but {unit.name} is planned with {unit.engine.name}"
    if unit.plan.settings.device != "cuda":
        on = f"{unit.name} runs on {unit.plan.settings.device}"
        return f"Ray's image with {unit.engine.name} needs NVIDIA GPUs, but {on}"
    return None


def serve_config(unit: Served) -> Tree:
    """Write the Serve configuration of one service: an OpenAI-compatible application over engine replicas."""
    least, most = bounds(unit)
    target = max(1, round(FULL * unit.at_once))
    scaling = {
        "min_replicas": why(
            least,
            f"{unit.placed.decision.in_flight:,} concurrent requests need {unit.replicas} replicas; half of them stay "
            f"when idle, because a new replica takes up to {seconds(unit.load_s)} to start",
        ),
        "max_replicas": why(most, most_words(unit)),
        "target_ongoing_requests": why(target, f"{FULL:.0%} of the capacity of a replica, {unit.at_once:,}"),
        "downscale_delay_s": QUIET_S,
    }
    deployment: Tree = {
        "autoscaling_config": scaling,
        "max_ongoing_requests": why(
            2 * unit.at_once, "twice what a replica runs concurrently: the rest queues in the engine"
        ),
        "graceful_shutdown_timeout_s": why(unit.grace_s - DRAIN_S, unit.grace_words),
        "health_check_timeout_s": 60,
    }
    config: Tree = {
        "model_loading_config": {"model_id": unit.plan.model.served_name, "model_source": unit.model_path},
        "accelerator_type": accelerator(unit),
        "engine_kwargs": engine_arguments(unit),
        "deployment_config": deployment,
        "runtime_env": {"env_vars": dict(unit.launch.env)} if unit.launch.env else None,
        "log_engine_metrics": True,
    }
    application = {
        "name": unit.name,
        "route_prefix": "/",
        "import_path": "ray.serve.llm:build_openai_app",
        "args": {"llm_configs": [config]},
    }
    return {"http_options": {"host": "0.0.0.0", "port": PORT}, "applications": [application]}  # noqa: S104


def accelerator(unit: Served) -> str | None:
    """Return Ray's name of the GPU, or `None` if it has none: node labels select the pods in any case."""
    first = unit.placed.node.accelerators[0]
    chip = chip_of(first)
    name = chip.name if chip is not None else first.name
    if "A100" in name:
        return "A100-80G" if "80" in name else "A100-40G"
    found = [known for known in ACCELERATORS if f" {known} " in f"{name} "]
    return ACCELERATORS[max(found, key=len)] if found else None


def engine_arguments(unit: Served) -> Tree:
    """Return the options of the launch command as `engine_kwargs`, without those of the engine's server."""
    dropped = unit.engine.ray.server_options if unit.engine.ray is not None else frozenset()
    words = unit.launch.argv
    start = next(index for index, word in enumerate(words) if word.startswith("--"))
    found: Tree = {}
    index = start
    while index < len(words):
        word = words[index]
        has_value = index + 1 < len(words) and not words[index + 1].startswith("--")
        if word not in dropped:
            name = word.removeprefix("--").replace("-", "_")
            found[name] = _value(words[index + 1]) if has_value else True
        index += 2 if has_value else 1
    if "tool_call_parser" in found:
        found["enable_auto_tool_choice"] = True
    if unit.nodes > 1:
        found["distributed_executor_backend"] = why("ray", f"one replica spans {unit.nodes} nodes")
    return found


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _ray_service(unit: Served, deploy: Deploy, queue: str | None, config: Tree) -> Tree:
    least, most = bounds(unit)
    applications = {"applications": plain(config["applications"])}
    worker: Tree = {
        "groupName": "engines",
        "replicas": least,
        "minReplicas": least,
        "maxReplicas": most,
        "numOfHosts": why(unit.nodes, f"nodes per replica, {unit.cards} GPUs on each") if unit.nodes > 1 else 1,
        "rayStartParams": {"num-gpus": str(unit.cards)},
        "template": {"metadata": {"labels": labels_of(unit)}, "spec": _worker_spec(unit, deploy)},
    }
    cluster: Tree = {
        "rayVersion": RAY_VERSION,
        "enableInTreeAutoscaling": why(True, "Serve scales replicas; the cluster adds the pods that they need"),
        "autoscalerOptions": {"idleTimeoutSeconds": QUIET_S, "upscalingMode": "Default"},
        "headGroupSpec": {
            "rayStartParams": why({"num-cpus": "0", "num-gpus": "0"}, "the head node schedules no replicas"),
            "template": {
                "metadata": {"labels": labels_of(unit) | {"app.kubernetes.io/component": "head"}},
                "spec": _head_spec(unit),
            },
        },
        "workerGroupSpecs": [worker],
    }
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": metadata(unit.name, deploy, labels_of(unit, queue)),
        "spec": {
            "serviceUnhealthySecondThreshold": why(unit.start_failures * 10, unit.load_words),
            "serveConfigV2": why(document(applications), f"the same as serve/{unit.name}.yaml, which has the comments"),
            "rayClusterConfig": cluster,
        },
    }


def _watched(unit: Served, deploy: Deploy) -> Tree:
    labels = labels_of(unit)
    own = {name: labels[name] for name in ("app.kubernetes.io/name", "app.kubernetes.io/instance")}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": metadata(unit.name, deploy),
        "spec": {
            "selector": {
                "matchLabels": own,
                "matchExpressions": [
                    {"key": "app.kubernetes.io/component", "operator": "In", "values": ["head", "engine"]}
                ],
            },
            "podTargetLabels": ["app.kubernetes.io/instance", "app.kubernetes.io/component"],
            "podMetricsEndpoints": [{"port": "metrics", "interval": "15s"}],
        },
    }


def _head_spec(unit: Served) -> Tree:
    container = {
        "name": "ray-head",
        "image": unit.image.name,
        "ports": [{"name": name, "containerPort": port} for name, port in PORTS.items()],
        "resources": {"requests": {"cpu": 4, "memory": "16Gi"}, "limits": {"memory": "16Gi"}},
        "securityContext": container_rights(),
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],  # noqa: S108
    }
    return {
        "terminationGracePeriodSeconds": unit.grace_s,
        "securityContext": rights(unit.image),
        "containers": [container],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }


def _worker_spec(unit: Served, deploy: Deploy) -> Tree:
    rdma = deploy.rdma if unit.nodes > 1 else None
    container: Tree = {
        "name": "ray-worker",
        "image": why(unit.image.name, unit.image.note),
        "env": [entry for entry in environment(unit) if entry["name"] != unit.engine.key_variable],
        "ports": [{"name": "serve", "containerPort": PORT}, {"name": "metrics", "containerPort": PORTS["metrics"]}],
        "resources": resources(unit, rdma),
        "securityContext": container_rights(rdma is not None),
        "volumeMounts": mounts(unit),
    }
    return {
        "terminationGracePeriodSeconds": why(unit.grace_s, unit.grace_words),
        "securityContext": rights(unit.image),
        **place(unit),
        "initContainers": [waiting(unit)],
        "containers": [container],
        "volumes": volumes(unit),
    }
