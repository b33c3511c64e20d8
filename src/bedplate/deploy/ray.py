"""Ray Serve LLM on Kubernetes: its configuration, and a RayService that contains it.

Fields are from Ray 2.56 (ray.serve.llm, ray.serve.schema) and KubeRay's samples of August 2026.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bedplate.deploy.images import RAY_TAG, RAY_TAG_NOTE, RAY_VERSION, Image
from bedplate.deploy.kubernetes import Files, write_heading, write_manifests, write_workload
from bedplate.deploy.platform import Platform
from bedplate.deploy.pods import (
    Tree,
    make_labels,
    select_architecture,
    select_nodes,
    write_container_security,
    write_environment,
    write_metadata,
    write_mounts,
    write_resources,
    write_security_context,
    write_volumes,
    write_wait_container,
)
from bedplate.deploy.queues import choose_queue
from bedplate.deploy.scaling import FULL, QUIET_S, compute_bounds, explain_maximum, make_monitor_labels
from bedplate.deploy.service_containers import DRAIN_S, PORT, ServiceContainers, describe_containers, find_engines
from bedplate.deploy.yaml_writer import annotate, strip_comments, write_document
from bedplate.errors import NotPossible
from bedplate.facts.chips import find_accelerator_chip
from bedplate.values.intent import DeployTarget

ACCELERATORS = {
    "H100": "H100", "H200": "H200", "GH200": "GH200", "B200": "B200", "GB200": "GB200", "B300": "B300",
    "L4": "L4", "L40S": "L40S", "A10G": "A10G", "A10": "A10", "T4": "T4", "V100": "V100", "RTX 4090": "RTX-4090",
}  # fmt: skip
OPERATOR = {"matchExpressions": [{"key": "app.kubernetes.io/name", "operator": "In",
                                  "values": ["kuberay-operator", "kuberay"]}]}  # fmt: skip
"""The operator calls the dashboard of the head pod. Its labels: helm-chart/kuberay-operator/templates/_helpers.tpl and
ray-operator/config/manager/kustomization.yaml of feeaf72f."""
PORTS = {"serve": PORT, "metrics": 8080, "gcs": 6379, "dashboard": 8265, "client": 10001}


def write_ray(platform: Platform) -> Files:
    units = [describe_containers(placed, platform.deploy) for placed in platform.services]
    reasons = {unit.name: reason for unit in units if (reason := explain_refusal(unit)) is not None}
    if len(reasons) == len(units):
        first = next(iter(reasons.values()))
        runs = " or ".join(one.id for one in find_engines(lambda one: one.ray))
        raise NotPossible(first, hint=f"use --engine {runs} on NVIDIA GPUs, or --emit kubernetes")
    workloads: dict[str, Sequence[Tree]] = {}
    configs: Files = {}
    for index, unit in enumerate(units):
        worker = unit.engine.ray
        if unit.name in reasons or worker is None:
            workloads[unit.name] = write_workload(unit, platform)
            continue
        build = f"Ray {RAY_VERSION} requires {unit.engine.name} {worker.version or 'in its own build'}"
        note = f"{build}; the plan was made for {unit.plan.engine_version}; {RAY_TAG_NOTE}"
        units[index] = replace(unit, image=Image(f"{worker.image}:{RAY_TAG}", note, user=1000, group=100, python=True))
        config = write_serve_config(units[index])
        # For `serve deploy`; the RayService contains the same configuration.
        configs[f"serve/{unit.name}.yaml"] = write_document(config, write_heading(unit))
        service = _write_ray_service(units[index], platform.deploy, choose_queue(unit, platform), config)
        workloads[unit.name] = [service, _write_pod_monitor(units[index], platform.deploy)]
    return write_manifests(
        platform,
        units,
        workloads,
        plain_reasons=reasons,
        more_files=configs,
        operator=OPERATOR,
        backends={unit.name: (f"{unit.name}-serve-svc", PORT) for unit in units if unit.name not in reasons},
    )


def explain_refusal(unit: ServiceContainers) -> str | None:
    if unit.engine.ray is None:
        runs = ", ".join(one.name for one in find_engines(lambda one: one.ray))
        return f"Ray Serve LLM runs {runs}, but {unit.name} is planned with {unit.engine.name}"
    if unit.plan.settings.device != "cuda":
        on = f"{unit.name} runs on {unit.plan.settings.device}"
        return f"Ray's image with {unit.engine.name} needs NVIDIA GPUs, but {on}"
    return None


def write_serve_config(unit: ServiceContainers) -> Tree:
    """Write the Serve configuration of one service: an OpenAI-compatible application over engine replicas."""
    least, most = compute_bounds(unit)
    target = max(1, round(FULL * unit.request_capacity))
    scaling = {
        "min_replicas": annotate(
            least,
            f"{unit.placed.decision.in_flight:,} concurrent requests need {unit.replicas} replicas; half of them stay "
            f"when idle; {unit.load_words}",
        ),
        "max_replicas": annotate(most, explain_maximum(unit)),
        "target_ongoing_requests": annotate(
            target, f"{FULL:.0%} of the capacity of a replica, {unit.request_capacity:,}"
        ),
        "downscale_delay_s": QUIET_S,
    }
    deployment: Tree = {
        "autoscaling_config": scaling,
        "max_ongoing_requests": annotate(
            2 * unit.request_capacity, "twice what a replica runs concurrently: the rest queues in the engine"
        ),
        "graceful_shutdown_timeout_s": annotate(unit.grace_s - DRAIN_S, unit.grace_words),
        "health_check_timeout_s": 60,
    }
    config: Tree = {
        "model_loading_config": {"model_id": unit.plan.model.served_name, "model_source": unit.model_path},
        "accelerator_type": name_accelerator(unit),
        "engine_kwargs": collect_engine_kwargs(unit),
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


def name_accelerator(unit: ServiceContainers) -> str | None:
    """Return Ray's name of the GPU, or `None` if it has none: node labels select the pods in any case."""
    first = unit.placed.node.accelerators[0]
    chip = find_accelerator_chip(first)
    name = chip.name if chip is not None else first.name
    if "A100" in name:
        return "A100-80G" if "80" in name else "A100-40G"
    found = [known for known in ACCELERATORS if f" {known} " in f"{name} "]
    return ACCELERATORS[max(found, key=len)] if found else None


def collect_engine_kwargs(unit: ServiceContainers) -> Tree:
    """Return the options of the launch command as `engine_kwargs`, without those of the engine's server."""
    if (groups := unit.plan.parallelism.attention_data) > 1:
        raise NotPossible(
            f"{unit.name} has {groups} attention replicas, which the files for ray do not start",
            hint="--emit command, kubernetes or dynamo",
        )
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
            found[name] = _parse_value(words[index + 1]) if has_value else True
        index += 2 if has_value else 1
    if "tool_call_parser" in found:
        found["enable_auto_tool_choice"] = True
    if unit.nodes > 1:
        found["distributed_executor_backend"] = annotate("ray", f"one replica spans {unit.nodes} nodes")
    return found


def _parse_value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _write_ray_service(unit: ServiceContainers, deploy: DeployTarget, queue: str | None, config: Tree) -> Tree:
    least, most = compute_bounds(unit)
    applications = {"applications": strip_comments(config["applications"])}
    worker: Tree = {
        "groupName": "engines",
        "replicas": least,
        "minReplicas": least,
        "maxReplicas": most,
        "numOfHosts": annotate(unit.nodes, f"nodes per replica, {unit.cards} GPUs on each") if unit.nodes > 1 else 1,
        "rayStartParams": {"num-gpus": str(unit.cards)},
        "template": {"metadata": {"labels": make_labels(unit)}, "spec": _write_worker_spec(unit, deploy)},
    }
    cluster: Tree = {
        "rayVersion": RAY_VERSION,
        "enableInTreeAutoscaling": annotate(True, "Serve scales replicas; the cluster adds the pods that they need"),
        "autoscalerOptions": {
            "idleTimeoutSeconds": QUIET_S,
            "upscalingMode": "Default",
            "securityContext": annotate(write_container_security(), "of the container that the operator adds"),
        },
        "headGroupSpec": {
            "rayStartParams": annotate({"num-cpus": "0", "num-gpus": "0"}, "the head node schedules no replicas"),
            "template": {
                "metadata": {"labels": make_labels(unit) | {"app.kubernetes.io/component": "head"}},
                "spec": _write_head_spec(unit, queue),
            },
        },
        "workerGroupSpecs": [worker],
    }
    # Kueue's webhook refuses autoscaling of a RayService that it manages, unless it is an elastic job.
    elastic: Tree = {"annotations": {"kueue.x-k8s.io/elastic-job": "true"}} if queue is not None else {}
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": write_metadata(unit.name, deploy, make_labels(unit, queue)) | elastic,
        "spec": {
            "serveConfigV2": annotate(
                write_document(applications), f"the same as serve/{unit.name}.yaml, which has the comments"
            ),
            "rayClusterConfig": annotate(cluster, _explain_upgrade(unit, least)),
        },
    }


def _explain_upgrade(unit: ServiceContainers, least: int) -> str:
    """ray-operator/controllers/ray/rayservice_controller.go of KubeRay feeaf72f: shouldPrepareNewCluster."""
    words = (
        "another image or model starts a second cluster, which replaces this one when it is ready: it needs "
        f"{least * unit.nodes * unit.cards} free GPUs"
    )
    if unit.most_replicas - unit.replicas >= least:
        return words
    return f"{words}, and the pool has fewer. Delete the RayService before you apply such a change"


def _write_pod_monitor(unit: ServiceContainers, deploy: DeployTarget) -> Tree:
    labels = make_labels(unit)
    own = {name: labels[name] for name in ("app.kubernetes.io/name", "app.kubernetes.io/instance")}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": write_metadata(unit.name, deploy, make_monitor_labels(deploy)),
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


def _write_head_spec(unit: ServiceContainers, queue: str | None) -> Tree:
    container = {
        "name": "ray-head",
        "image": unit.image.name,
        "ports": [{"name": name, "containerPort": port} for name, port in PORTS.items()],
        "resources": {"requests": {"cpu": 4, "memory": "16Gi"}, "limits": {"memory": "16Gi"}},
        "securityContext": write_container_security(),
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],  # noqa: S108
    }
    return {
        "terminationGracePeriodSeconds": unit.grace_s,
        "securityContext": write_security_context(unit.image),
        **select_architecture([unit], queue),
        "containers": [container],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }


def _write_worker_spec(unit: ServiceContainers, deploy: DeployTarget) -> Tree:
    rdma = deploy.rdma if unit.nodes > 1 else None
    container: Tree = {
        "name": "ray-worker",
        "image": annotate(unit.image.name, unit.image.note),
        "env": [entry for entry in write_environment(unit) if entry["name"] != unit.engine.key_variable],
        "ports": [{"name": "serve", "containerPort": PORT}, {"name": "metrics", "containerPort": PORTS["metrics"]}],
        "resources": write_resources(unit, rdma),
        "securityContext": write_container_security(rdma is not None),
        "volumeMounts": write_mounts(unit),
    }
    return {
        "terminationGracePeriodSeconds": annotate(unit.grace_s, unit.grace_words),
        "securityContext": write_security_context(unit.image),
        **select_nodes(unit),
        "initContainers": [write_wait_container(unit)],
        "containers": [container],
        "volumes": write_volumes(unit),
    }
