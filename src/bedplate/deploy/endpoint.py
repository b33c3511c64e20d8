"""bedplate's gateway as a Deployment: one endpoint in front of all services of a platform."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import urlsplit

from bedplate._version import __version__
from bedplate.deploy.platform import Platform
from bedplate.deploy.pods import KEY, Tree, select_architecture, write_container_security, write_metadata
from bedplate.deploy.scaling import compute_wake_s, find_metrics_namespace, make_monitor_labels
from bedplate.deploy.service_containers import DRAIN_S, PORT, ServiceContainers, name_architecture
from bedplate.deploy.yaml_writer import annotate, write_document
from bedplate.engines.traits import ANY_USER
from bedplate.errors import UsageError
from bedplate.values.intent import DeployTarget, Service
from bedplate.values.tenant import is_tenant_name
from bedplate.values.units import format_seconds

NAME = "bedplate-gateway"
SELECTOR = {"app.kubernetes.io/name": "bedplate", "app.kubernetes.io/component": "gateway"}
REPLICAS = 2
OWN_KEY, STORE = "gateway-key", "usage-store"
ENGINE_KEY = "ENGINE_KEY"
ELSEWHERE_KEYS = "endpoint-keys"
"""The Secret with the API keys of endpoints elsewhere, by the names of their variables."""
OWN_VARIABLES = ("BEDPLATE_HOME", "HOME", "BEDPLATE_USAGE_STORE", "BEDPLATE_API_KEY", ENGINE_KEY)
FLUSH_S = 15
"""What the gateway needs after the last answer: the last records, and a margin."""
Backends = Mapping[str, tuple[str, int]]
"""The Service and its port, by service."""


def name_image(deploy: DeployTarget) -> str:
    return f"{f'{deploy.registry}/' if deploy.registry else ''}bedplate:{__version__}"


def explain_endpoint(platform: Platform) -> list[str]:
    """Return the heading of the file: what must exist before, and how keys are created."""
    deploy, create = platform.deploy, "kubectl create secret generic"
    at = f"-n {deploy.namespace or 'inference'}"
    keys = "".join(f" --from-literal={name}=…" for name in _list_key_variables(platform))
    images = " and ".join(sorted({f"linux/{name_architecture(one.node)}" for one in platform.services}))
    return [
        f"One endpoint for all models: http://{NAME}/v1. The image is built from bedplate's Dockerfile, for {images}.",
        "Secrets are not included:",
        f"  {create} {STORE} {at} --from-literal=url=postgresql://…",
        f"  {create} {OWN_KEY} {at} --from-literal=key=bp-$(openssl rand -hex 32)",
        f"  {create} {KEY} {at} --from-literal=key=$(openssl rand -hex 32)",
        *([f"  {create} {ELSEWHERE_KEYS} {at}{keys}"] if keys else []),
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
        _write_deployment(platform, units, config, any(_checks_key(unit, plain) for unit in units)),
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
        _write_policy(platform),
        _write_monitor(deploy),
    ]  # fmt: skip


def _checks_key(unit: ServiceContainers, plain: Sequence[ServiceContainers]) -> bool:
    return unit in plain and unit.engine.key_variable is not None


def _describe_intent(
    platform: Platform, units: Sequence[ServiceContainers], backends: Backends, plain: Sequence[ServiceContainers]
) -> Tree:
    """The intent file of the gateway: each service is an endpoint elsewhere."""
    served = [unit.plan.model.served_name for unit in units]
    groups: list[list[Tree]] = []
    joined: dict[str, Tree] = {}
    """What an endpoint elsewhere joins, by the names of the model."""
    for unit in units:
        host, port = backends[unit.name]
        own = unit.plan.model.served_name
        alone = served.count(own) == 1
        names = {own: own if alone else unit.name}
        names |= {one.served_name: one.served_name for one in unit.plan.workload.adapters}
        allowed = {one.served_name: one.tenants for one in unit.plan.workload.adapters}
        groups.append(
            [
                {
                    "url": f"http://{host}{'' if port == 80 else f':{port}'}/v1",
                    "model": model,
                    "name": name if name != model else None,
                    "key_env": ENGINE_KEY if _checks_key(unit, plain) else None,
                    "tenants": list(allowed.get(model) or unit.placed.tenants) or None,
                    "wait": f"{compute_wake_s(unit)}s" if unit.placed.ttl_s is not None else None,
                }
                for model, name in names.items()
            ]
        )
        also = [own, unit.plan.model.name, unit.placed.plan.model.name] if alone else []
        joined |= {name.lower(): groups[-1][0] for name in (unit.name, *also)}
    for position, service in platform.elsewhere:
        groups.insert(position, [_describe_elsewhere(service, joined)])
    services = [one for group in groups for one in group]
    _check_same_tenants(services)
    if odd := next((one.name for one in platform.tenants if not is_tenant_name(one.name)), None):
        hint = "use letters, digits and . _ @ -, at most 64 characters"
        raise UsageError(f"tenants: {odd!r} is not a valid tenant name for the endpoint", hint=hint)
    limits = ("share", "requests_per_minute", "tokens_per_minute", "in_flight")
    tenants = [{"name": one.name, **{name: getattr(one, name) for name in limits}} for one in platform.tenants]
    return {**platform.gateway_settings, "services": services, "tenants": tenants or None}


def _describe_elsewhere(service: Service, joined: Mapping[str, Tree]) -> Tree:
    """Describe an endpoint elsewhere for the gateway; it may have the name of a model that runs in the cluster."""
    model = service.model
    if not isinstance(model, str):
        raise UsageError(f"{service.url}: facts of a model can be planned, not served", hint="name the model there")
    host = urlsplit(service.url or "").hostname or ""
    if host in ("localhost", "::1") or host.startswith("127."):
        raise UsageError(
            f"{service.url} is the gateway's own pod there", hint="name a host that pods of the cluster can reach"
        )
    if service.key_env is not None and (
        service.key_env in OWN_VARIABLES or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", service.key_env)
    ):
        raise UsageError(
            f"key_env: {service.key_env!r} cannot be a variable of the gateway", hint="for example EXAMPLE_KEY"
        )
    local = joined.get((service.name or model).lower())
    if local is not None and local["wait"] is not None:
        raise UsageError(f"{local['model']}: ttl cannot be combined with an endpoint elsewhere of the same name")
    name = service.name if local is None else local["name"] or local["model"]
    return {
        "url": service.url,
        "model": model,
        "name": name if name != model else None,
        "key_env": service.key_env,
        "share": service.share,
        "price_per_million_tokens": service.price_per_million_tokens,
        "tenants": list(service.tenants) or (local["tenants"] if local is not None else None),
        "wait": service.wait,
    }


def _check_same_tenants(services: Sequence[Tree]) -> None:
    """The gateway does not start otherwise."""
    allowed: dict[str, set[str]] = {}
    for one in services:
        name = str(one["name"] or one["model"])
        if allowed.setdefault(name.lower(), set(one["tenants"] or ())) != set(one["tenants"] or ()):
            raise UsageError(f"the endpoints of {name} have different tenants", hint="give all the same ones")


def _list_key_variables(platform: Platform) -> list[str]:
    return list(dict.fromkeys(one.key_env for _, one in platform.elsewhere if one.key_env is not None))


def _list_ports_elsewhere(platform: Platform) -> Iterator[int]:
    for _, service in platform.elsewhere:
        parts = urlsplit(service.url or "")
        yield parts.port or (443 if parts.scheme == "https" else 80)


def _write_deployment(
    platform: Platform, units: Sequence[ServiceContainers], config: str, with_engine_key: bool
) -> Tree:
    deploy = platform.deploy
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
                    **select_architecture(units),
                    "topologySpreadConstraints": [
                        {
                            "maxSkew": 1,
                            "topologyKey": "kubernetes.io/hostname",
                            "whenUnsatisfiable": "ScheduleAnyway",
                            "labelSelector": {"matchLabels": SELECTOR},
                        }
                    ],
                    "containers": [_write_container(platform, grace_s, with_engine_key)],
                    "volumes": [
                        {"name": "config", "configMap": {"name": NAME}},
                        {"name": "state", "emptyDir": {"sizeLimit": "1Gi"}},
                        {"name": "tmp", "emptyDir": {"sizeLimit": "256Mi"}},
                    ],
                },
            },
        },
    }


def _write_container(platform: Platform, grace_s: int, with_engine_key: bool) -> Tree:
    secrets = {"BEDPLATE_USAGE_STORE": (STORE, "url"), "BEDPLATE_API_KEY": (OWN_KEY, "key")}
    if with_engine_key:
        secrets[ENGINE_KEY] = (KEY, "key")
    secrets |= {name: (ELSEWHERE_KEYS, name) for name in _list_key_variables(platform)}
    probe: Tree = {"httpGet": {"path": "/ready", "port": "http"}}
    return {
        "name": "gateway",
        "image": name_image(platform.deploy),
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


def _write_policy(platform: Platform) -> Tree:
    deploy = platform.deploy
    http = {"port": PORT, "protocol": "TCP"}
    names = [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]
    kube = {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}}
    metrics = {"matchLabels": {"kubernetes.io/metadata.name": find_metrics_namespace(deploy)}}
    inside = [{"from": [{"namespaceSelector": {}}, {"namespaceSelector": metrics}], "ports": [http]}]
    further = list(_list_ports_elsewhere(platform))
    outside = [
        {"to": [{"namespaceSelector": kube}], "ports": names},
        {"to": [{"podSelector": {}}]},
        {"ports": [{"port": port, "protocol": "TCP"} for port in dict.fromkeys((5432, *further))]},
    ]
    words = "DNS, the engines in this namespace, and PostgreSQL"
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": write_metadata(NAME, deploy),
        "spec": {
            "podSelector": {"matchLabels": SELECTOR},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": annotate(inside, "clients in any namespace: every request needs a key"),
            "egress": annotate(outside, f"{words}, and the endpoints elsewhere" if further else words),
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
