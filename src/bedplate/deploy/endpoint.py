"""bedplate's gateway as a Deployment: one endpoint in front of all services of a platform."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from bedplate._version import __version__
from bedplate.deploy.platform import Platform
from bedplate.deploy.pods import KEY, Tree, write_container_security, write_metadata
from bedplate.deploy.scaling import compute_wake_s, find_metrics_namespace, make_monitor_labels
from bedplate.deploy.service_containers import DRAIN_S, PORT, ServiceContainers
from bedplate.deploy.yaml_writer import annotate, write_document
from bedplate.engines.traits import ANY_USER
from bedplate.values.intent import DeployTarget
from bedplate.values.units import format_seconds

NAME = "bedplate-gateway"
SELECTOR = {"app.kubernetes.io/name": "bedplate", "app.kubernetes.io/component": "gateway"}
REPLICAS = 2
OWN_KEY, STORE = "gateway-key", "usage-store"
ENGINE_KEY = "ENGINE_KEY"
FLUSH_S = 15
"""What the gateway needs after the last answer: the last records, and a margin."""
Backends = Mapping[str, tuple[str, int]]
"""The Service and its port, by service."""


def name_image(deploy: DeployTarget) -> str:
    return f"{f'{deploy.registry}/' if deploy.registry else ''}bedplate:{__version__}"


def explain_endpoint(deploy: DeployTarget) -> list[str]:
    """Return the heading of the file: what must exist before, and how keys are created."""
    create = "kubectl create secret generic"
    at = f"-n {deploy.namespace or 'inference'}"
    return [
        f"One endpoint for all models: http://{NAME}/v1. The image is built from bedplate's Dockerfile.",
        "Secrets are not included:",
        f"  {create} {STORE} {at} --from-literal=url=postgresql://…",
        f"  {create} {OWN_KEY} {at} --from-literal=key=bp-$(openssl rand -hex 32)",
        f"  {create} {KEY} {at} --from-literal=key=$(openssl rand -hex 32)",
        "Then create a key for each tenant; limits are in the ConfigMap, or set with bedplate keys set:",
        f"  kubectl exec {at} deploy/{NAME} -- bedplate keys add NAME",
    ]


def write_endpoint(
    platform: Platform, units: Sequence[ServiceContainers], backends: Backends, plain: Sequence[ServiceContainers]
) -> list[Tree]:
    deploy = platform.deploy
    config = write_document(_describe_intent(platform, units, backends, plain))
    return [
        {
            "apiVersion": "v1", "kind": "ServiceAccount", "metadata": write_metadata(NAME, deploy),
            "automountServiceAccountToken": False,
        },
        {
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": write_metadata(NAME, deploy, SELECTOR),
            "data": {"gateway.yaml": config},
        },
        _write_deployment(deploy, units, config, any(_checks_key(unit, plain) for unit in units)),
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": write_metadata(NAME, deploy, SELECTOR),
            "spec": {"selector": SELECTOR, "ports": [{"name": "http", "port": 80, "targetPort": "http"}]},
        },
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": write_metadata(NAME, deploy),
            "spec": {"maxUnavailable": 1, "selector": {"matchLabels": SELECTOR}},
        },
        _write_policy(deploy),
        _write_monitor(deploy),
    ]  # fmt: skip


def _checks_key(unit: ServiceContainers, plain: Sequence[ServiceContainers]) -> bool:
    return unit in plain and unit.engine.key_variable is not None


def _describe_intent(
    platform: Platform, units: Sequence[ServiceContainers], backends: Backends, plain: Sequence[ServiceContainers]
) -> Tree:
    """The intent file of the gateway: each service is an endpoint elsewhere."""
    served = [unit.plan.model.served_name for unit in units]
    services: list[Tree] = []
    for unit in units:
        host, port = backends[unit.name]
        url = f"http://{host}{'' if port == 80 else f':{port}'}/v1"
        own = unit.plan.model.served_name
        names = {own: own if served.count(own) == 1 else unit.name}
        names |= {one.served_name: one.served_name for one in unit.plan.workload.adapters}
        for model, name in names.items():
            services.append(
                {
                    "url": url,
                    "model": model,
                    "name": name if name != model else None,
                    "key_env": ENGINE_KEY if _checks_key(unit, plain) else None,
                    "tenants": list(unit.placed.tenants) or None,
                    "wait": f"{compute_wake_s(unit)}s" if unit.placed.ttl_s is not None else None,
                }
            )
    limits = ("share", "requests_per_minute", "tokens_per_minute", "in_flight")
    tenants = [{"name": one.name, **{name: getattr(one, name) for name in limits}} for one in platform.tenants]
    return {"services": services, "tenants": tenants or None}


def _write_deployment(
    deploy: DeployTarget, units: Sequence[ServiceContainers], config: str, with_engine_key: bool
) -> Tree:
    longest = max(units, key=lambda unit: unit.grace_s)
    grace_s = longest.grace_s
    words = (
        f"{format_seconds(grace_s)} for running answers ({longest.grace_words}), {DRAIN_S} s until no client is sent "
        f"here any more, {FLUSH_S} s for the last records"
    )
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": write_metadata(NAME, deploy, SELECTOR),
        "spec": {
            "replicas": annotate(REPLICAS, "they share keys, limits and usage in PostgreSQL: any number works"),
            "strategy": annotate(
                {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
                "a new pod is ready before an old one stops",
            ),
            "selector": {"matchLabels": SELECTOR},
            "template": {
                "metadata": {
                    "labels": SELECTOR,
                    "annotations": annotate(
                        {"bedplate/config": hashlib.sha256(config.encode()).hexdigest()[:16]},
                        "another configuration replaces the pods, one after the other",
                    ),
                },
                "spec": {
                    "serviceAccountName": NAME,
                    "automountServiceAccountToken": False,
                    "terminationGracePeriodSeconds": annotate(DRAIN_S + grace_s + FLUSH_S, words),
                    "securityContext": {
                        "runAsNonRoot": True,
                        "runAsUser": ANY_USER,
                        "runAsGroup": ANY_USER,
                        "fsGroup": ANY_USER,
                        "seccompProfile": {"type": "RuntimeDefault"},
                    },
                    "topologySpreadConstraints": [
                        {
                            "maxSkew": 1,
                            "topologyKey": "kubernetes.io/hostname",
                            "whenUnsatisfiable": "ScheduleAnyway",
                            "labelSelector": {"matchLabels": SELECTOR},
                        }
                    ],
                    "containers": [_write_container(deploy, grace_s, with_engine_key)],
                    "volumes": [
                        {"name": "config", "configMap": {"name": NAME}},
                        {"name": "state", "emptyDir": {"sizeLimit": "1Gi"}},
                        {"name": "tmp", "emptyDir": {"sizeLimit": "256Mi"}},
                    ],
                },
            },
        },
    }


def _write_container(deploy: DeployTarget, grace_s: int, with_engine_key: bool) -> Tree:
    secrets = {"BEDPLATE_USAGE_STORE": (STORE, "url"), "BEDPLATE_API_KEY": (OWN_KEY, "key")}
    if with_engine_key:
        secrets[ENGINE_KEY] = (KEY, "key")
    probe: Tree = {"httpGet": {"path": "/ready", "port": "http"}}
    return {
        "name": "gateway",
        "image": name_image(deploy),
        "imagePullPolicy": "IfNotPresent",
        "args": [
            "serve", "--file", "/config/gateway.yaml", "--name", "gateway", "--host", "0.0.0.0", "--port", str(PORT),  # noqa: S104
            "--grace", f"{grace_s}s", "--log-format", "json",
        ],
        "env": [
            {"name": "BEDPLATE_HOME", "value": "/state"},
            {"name": "HOME", "value": "/state"},
            *(
                {"name": variable, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}}
                for variable, (name, key) in secrets.items()
            ),
        ],
        "ports": [{"name": "http", "containerPort": PORT}],
        "resources": {
            "requests": {"cpu": 1, "memory": annotate("1Gi", "bodies of incomplete requests, and waiting records")},
            "limits": {"memory": "1Gi"},
        },
        "startupProbe": {**probe, "periodSeconds": 2, "failureThreshold": 60},
        "readinessProbe": {**probe, "periodSeconds": 5, "failureThreshold": 2},
        "livenessProbe": {"tcpSocket": {"port": "http"}, "periodSeconds": 10, "failureThreshold": 6},
        "lifecycle": {"preStop": {"sleep": {"seconds": DRAIN_S}}},
        "securityContext": {**write_container_security(), "readOnlyRootFilesystem": True},
        "volumeMounts": [
            {"name": "config", "mountPath": "/config", "readOnly": True},
            {"name": "state", "mountPath": "/state"},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - a volume of the pod
        ],
    }  # fmt: skip


def _write_policy(deploy: DeployTarget) -> Tree:
    http = {"port": PORT, "protocol": "TCP"}
    names = [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]
    kube = {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}
    metrics = {"matchLabels": {"kubernetes.io/metadata.name": find_metrics_namespace(deploy)}}
    inside = [{"from": [{"namespaceSelector": {}}, {"namespaceSelector": metrics}], "ports": [http]}]
    outside = [
        {"to": [{"namespaceSelector": kube}], "ports": names},
        {"to": [{"podSelector": {}}]},
        {"ports": [{"port": 5432, "protocol": "TCP"}]},
    ]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": write_metadata(NAME, deploy),
        "spec": {
            "podSelector": {"matchLabels": SELECTOR},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": annotate(inside, "clients in any namespace: every request needs a key"),
            "egress": annotate(outside, "DNS, the engines in this namespace, and PostgreSQL"),
        },
    }


def _write_monitor(deploy: DeployTarget) -> Tree:
    endpoint = {
        "port": "http",
        "path": "/metrics",
        "interval": "15s",
        "authorization": {"credentials": {"name": OWN_KEY, "key": "key"}},
    }
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": write_metadata(NAME, deploy, SELECTOR | make_monitor_labels(deploy)),
        "spec": {"selector": {"matchLabels": SELECTOR}, "podMetricsEndpoints": [endpoint]},
    }
