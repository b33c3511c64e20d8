"""Monitoring and autoscaling by the engine's metrics, not by CPU use, which does not follow the load."""

from __future__ import annotations

from collections.abc import Iterator

from bedplate.deploy.pods import Tree, metadata, selecting
from bedplate.deploy.served import MOST_TIMES, Served
from bedplate.deploy.yaml_writer import why
from bedplate.values.intent import Deploy
from bedplate.values.units import seconds

PROMETHEUS = "http://prometheus-operated.monitoring.svc:9090"
"""The Service that the Prometheus operator creates, in its usual namespace."""
FULL = 0.8
"""Target load as a share of a replica's capacity; the rest absorbs requests while the next replica starts."""
QUIET_S = 600


def pod_monitor(unit: Served, deploy: Deploy, path: str) -> Tree:
    endpoint: Tree = {"port": "http", "path": path, "interval": "15s"}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": metadata(unit.name, deploy, selecting(unit)),
        "spec": {
            "selector": {"matchLabels": selecting(unit, leader=True)},
            "podTargetLabels": ["app.kubernetes.io/instance"],
            "podMetricsEndpoints": [endpoint],
        },
    }


def scaled_object(unit: Served, deploy: Deploy) -> Tree | None:
    """Return `None` if the engine has no metrics to scale by or the pool has no capacity to scale into."""
    least, most = bounds(unit)
    triggers = list(_triggers(unit, deploy))
    if least == most or not triggers:
        return None
    kind = ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet") if unit.nodes > 1 else ("apps/v1", "Deployment")
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": metadata(unit.name, deploy, selecting(unit)),
        "spec": {
            "scaleTargetRef": {"apiVersion": kind[0], "kind": kind[1], "name": unit.name},
            **replica_bounds(unit),
            "pollingInterval": 15,
            "cooldownPeriod": QUIET_S,
            "advanced": behaviour(unit),
            "triggers": triggers,
        },
    }


def bounds(unit: Served) -> tuple[int, int]:
    return max(1, unit.replicas // 2), unit.most_replicas


def replica_bounds(unit: Served) -> Tree:
    least, most = bounds(unit)
    planned = f"{unit.placed.decision.in_flight:,} concurrent requests need {unit.replicas} replicas"
    floor = f"half of them stay when idle, because a new replica takes up to {seconds(unit.load_s)} to start"
    return {
        "minReplicaCount": why(least, f"{planned}; {floor}"),
        "maxReplicaCount": why(most, most_words(unit)),
    }


def most_words(unit: Served) -> str:
    if unit.most_replicas == MOST_TIMES * unit.replicas:
        return f"{MOST_TIMES} times the planned replicas; pool {unit.placed.pool.name} has capacity for more"
    return f"the free capacity of pool {unit.placed.pool.name}"


def behaviour(unit: Served) -> Tree:
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


def _triggers(unit: Served, deploy: Deploy) -> Iterator[Tree]:
    metrics = unit.metrics
    if metrics is None:
        return
    of = f'{{namespace="{metadata("", deploy)["namespace"]}",app_kubernetes_io_instance="{unit.name}"}}'
    if metrics.waiting is not None and metrics.running is not None:
        each = max(1, round(FULL * unit.at_once))
        query = f"sum({metrics.running}{of}) + sum({metrics.waiting}{of})"
        words = f"running and waiting requests: {FULL:.0%} of the capacity of a replica, {unit.at_once:,}"
        yield _trigger("requests", query, str(each), words, deploy)
    if metrics.kv_use is not None:
        words = "KV cache usage; above it the engine preempts requests and recomputes them"
        yield _trigger("kv-use", f"sum({metrics.kv_use}{of})", str(FULL), words, deploy)


def _trigger(name: str, query: str, threshold: str, words: str, deploy: Deploy) -> Tree:
    return {
        "type": "prometheus",
        "name": name,
        "metadata": {
            "serverAddress": deploy.prometheus or PROMETHEUS,
            "query": query,
            "threshold": why(threshold, words),
        },
    }
