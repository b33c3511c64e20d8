"""Monitoring and autoscaling by the engine's metrics, not by CPU use, which does not follow the load."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from bedplate.deploy.pods import KEY, Tree, make_selector, write_metadata
from bedplate.deploy.service_containers import MOST_TIMES, PATIENCE, ServiceContainers
from bedplate.deploy.yaml_writer import CommentedValue, annotate
from bedplate.values.intent import DeployTarget
from bedplate.values.quoting import quote_promql
from bedplate.values.units import format_seconds

MONITORING = "monitoring"
PROMETHEUS = f"http://prometheus-operated.{MONITORING}.svc:9090"
"""The Service that the Prometheus operator creates, in its usual namespace."""
FULL = 0.8
"""Target load as a share of a replica's capacity; the rest absorbs requests while the next replica starts."""
QUIET_S = 600
WAKE_S = 60
"""Until a waiting request starts a replica: Prometheus reads the gateway every 15 s, and so does KEDA Prometheus."""

METRIC_TYPE = "AverageValue"
"""KEDA's default. Stated, because the webhook of 2.17.0 refuses a fallback without it (#6696)."""
RELEASE = "kube-prometheus-stack"


def find_metrics_namespace(deploy: DeployTarget) -> str:
    """Return the namespace of Prometheus by its address, NAME.NAMESPACE[.svc…]; it scrapes the pods from there."""
    parts = (urlsplit(deploy.prometheus or PROMETHEUS).hostname or "").split(".")
    return parts[1] if len(parts) == 2 or (len(parts) > 2 and parts[2] == "svc") else MONITORING


def make_monitor_labels(deploy: DeployTarget) -> dict[str, object]:
    label = annotate(deploy.prometheus_release or RELEASE, "kube-prometheus-stack reads only monitors of its release")
    return {"release": label}


def write_pod_monitor(unit: ServiceContainers, deploy: DeployTarget, path: str) -> Tree:
    endpoint: Tree = {"port": "http", "path": path, "interval": "15s"}
    endpoints: object = [endpoint]
    if unit.engine.requires_key(path):
        words = f"{unit.engine.name} requires the key for its metrics, too"
        if deploy.endpoint:
            endpoint["authorization"] = annotate({"credentials": {"name": KEY, "key": "key"}}, words)
        else:
            # The Prometheus operator rejects a monitor whose Secret does not exist: pkg/assets/store.go, GetSecretKey.
            add = f"authorization: {{credentials: {{name: {KEY}, key: key}}}}"
            endpoints = annotate([endpoint], f"If the Secret {KEY} exists, {words}; add {add}")
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": write_metadata(unit.name, deploy, make_selector(unit) | make_monitor_labels(deploy)),
        "spec": {
            "selector": {"matchLabels": make_selector(unit, leader=True)},
            "podTargetLabels": ["app.kubernetes.io/instance"],
            "podMetricsEndpoints": endpoints,
        },
    }


def write_scaled_object(unit: ServiceContainers, deploy: DeployTarget) -> Tree | None:
    """Return `None` if the engine has no metrics to scale by or the pool has no capacity to scale into."""
    least, most = compute_bounds(unit)
    triggers = list(_write_triggers(unit, deploy))
    if least == most or not triggers:
        return None
    kind = ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet") if unit.nodes > 1 else ("apps/v1", "Deployment")
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": write_metadata(unit.name, deploy, make_selector(unit)),
        "spec": {
            "scaleTargetRef": {"apiVersion": kind[0], "kind": kind[1], "name": unit.name},
            **write_replica_bounds(unit),
            "pollingInterval": 15,
            "cooldownPeriod": write_idle_time(unit),
            "fallback": write_fallback(unit),
            "advanced": write_behavior(unit),
            "triggers": triggers,
        },
    }


def compute_bounds(unit: ServiceContainers) -> tuple[int, int]:
    least = max(1, unit.replicas // 2) if unit.placed.ttl_s is None else 0
    return least, unit.most_replicas


def write_idle_time(unit: ServiceContainers) -> object:
    """Return the seconds without a request after which the last replica stops, if it may."""
    if unit.placed.ttl_s is None:
        return QUIET_S
    return annotate(math.ceil(unit.placed.ttl_s), "ttl: the last replica stops after this time without a request")


def compute_wake_s(unit: ServiceContainers) -> int:
    """Return how long a request may wait for a service that is scaled to zero."""
    return math.ceil(WAKE_S + PATIENCE * unit.load_s)


def write_replica_bounds(unit: ServiceContainers) -> Tree:
    least, most = compute_bounds(unit)
    planned = f"{unit.placed.decision.in_flight:,} concurrent requests need {unit.replicas} replicas"
    floor = f"half of them stay when idle, because a new replica takes up to {format_seconds(unit.load_s)} to start"
    if unit.placed.ttl_s is not None:
        floor = f"none when idle (ttl); the first request then waits about {format_seconds(WAKE_S + unit.load_s)}"
    return {
        "minReplicaCount": annotate(least, f"{planned}; {floor}"),
        "maxReplicaCount": annotate(most, explain_maximum(unit)),
    }


def explain_maximum(unit: ServiceContainers) -> str:
    if unit.most_replicas == MOST_TIMES * unit.replicas:
        return f"{MOST_TIMES} times the planned replicas; pool {unit.placed.pool.name} has capacity for more"
    return f"the free capacity of pool {unit.placed.pool.name}"


def write_fallback(unit: ServiceContainers) -> CommentedValue:
    """Keep the planned replicas while Prometheus does not answer, or more if more are running."""
    fallback = {"failureThreshold": 4, "replicas": unit.replicas, "behavior": "currentReplicasIfHigher"}
    return annotate(fallback, "the planned replicas, if Prometheus fails four times in a row")


def write_behavior(unit: ServiceContainers) -> Tree:
    return {
        "horizontalPodAutoscalerConfig": {
            "behavior": {
                "scaleUp": {"stabilizationWindowSeconds": 30},
                "scaleDown": {
                    "stabilizationWindowSeconds": QUIET_S,
                    "policies": [{"type": "Pods", "value": 1, "periodSeconds": max(60, min(1800, unit.grace_s))}],
                },
            }
        }
    }


def _write_triggers(unit: ServiceContainers, deploy: DeployTarget) -> Iterator[Tree]:
    metrics = unit.metrics
    namespace = quote_promql(write_metadata("", deploy)["namespace"])
    if unit.placed.ttl_s is not None:
        yield from _write_wake_triggers(unit, deploy, namespace)
    if metrics is None:
        return
    of = f"{{namespace={namespace},app_kubernetes_io_instance={quote_promql(unit.name)}}}"
    if metrics.waiting is not None and metrics.running is not None:
        each = max(1, round(FULL * unit.request_capacity))
        query = f"sum({metrics.running}{of}) + sum({metrics.waiting}{of})"
        words = f"running and waiting requests: {FULL:.0%} of the capacity of a replica, {unit.request_capacity:,}"
        yield _write_trigger("requests", query, str(each), words, deploy)
    if metrics.kv_use is not None:
        words = "KV cache usage; above it the engine preempts requests and recomputes them"
        trigger = _write_trigger("kv-use", f"sum({metrics.kv_use}{of})", str(FULL), words, deploy)
        if unit.placed.ttl_s is not None:
            trigger["metadata"]["activationThreshold"] = annotate(str(FULL), "cached prefixes keep no replica running")
        yield trigger


def _write_wake_triggers(unit: ServiceContainers, deploy: DeployTarget, namespace: str) -> Iterator[Tree]:
    """Yield requests at bedplate's gateway, which has metrics also while no replica runs.

    A model that several services have is named by the service there.
    """
    adapters = (one.served_name for one in unit.plan.workload.adapters)
    names = dict.fromkeys([unit.plan.model.served_name, unit.name, *adapters])
    of = f"{{namespace={namespace},model=~{quote_promql('|'.join(map(re.escape, names)))}}}"
    each = max(1, round(FULL * unit.request_capacity))
    words = "requests at the gateway, where they wait while no replica runs"
    yield _write_trigger("gateway", f"sum(bedplate_requests_in_flight{of})", str(each), words, deploy)
    query = f"clamp_max(sum(increase(bedplate_requests_total{of}[1m])), 1)"
    words = "1 while requests end, also those that are too short to be seen in flight"
    yield _write_trigger("recent", query, "1", words, deploy)


def _write_trigger(name: str, query: str, threshold: str, words: str, deploy: DeployTarget) -> Tree:
    return {
        "type": "prometheus",
        "name": name,
        "metricType": METRIC_TYPE,
        "metadata": {
            "serverAddress": deploy.prometheus or PROMETHEUS,
            "query": query,
            "threshold": annotate(threshold, words),
        },
    }
