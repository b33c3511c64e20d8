"""Gateway API inference extension: routes a request to the replica with the longest cached prefix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from bedplate.deploy.images import ENDPOINT_PICKER
from bedplate.deploy.pods import Tree, escape_word, make_selector, write_container_security, write_metadata
from bedplate.deploy.service_containers import PORT, ServiceContainers, find_engines
from bedplate.deploy.yaml_writer import annotate, write_document
from bedplate.engines import MetricNames
from bedplate.errors import NotPossible
from bedplate.values.intent import DeployTarget

PICKER_PORT, HEALTH_PORT, METRICS_PORT = 9002, 9003, 9090
CONFIG = "picker.yaml"


def write_gateway(
    units: Sequence[ServiceContainers],
    deploy: DeployTarget,
    backends: Mapping[str, tuple[str, int]],
    plain: Sequence[ServiceContainers],
) -> Iterator[Tree]:
    """Yield a route for each service: to an InferencePool if the picker can read it, or else to its Service."""
    picked = [unit for unit in plain if unit.metrics is not None and unit.metrics.picker is not None]
    if len(units) == 1 and plain and not picked:
        unit = units[0]
        read = [one.id for one in find_engines(lambda one: one.metric_names and one.metric_names.picker)]
        raise NotPossible(
            f"{unit.name}: the endpoint picker cannot read the metrics of {unit.engine.name}",
            hint=f"deploy.gateway supports {', '.join(read)}; without it, a plain Service balances the load",
        )
    for unit in units:
        if unit in picked:
            yield from write_inference_pool(unit, deploy, len(units))
        else:
            name, port = backends[unit.name]
            yield _write_route(unit, deploy, len(units), {"kind": "Service", "name": name, "port": port})


def select_data_planes(deploy: DeployTarget) -> list[Tree]:
    """Select the pods that implement the Gateway: in its namespace, or elsewhere with the label of Gateway API.

    gateway.networking.k8s.io/gateway-name: GEP-1762; Envoy Gateway runs the pods in its own namespace, with a label of
    its own.
    """
    if deploy.gateway is None:
        return []
    namespace, _, name = deploy.gateway.rpartition("/")
    found: list[Tree] = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}]
    labels = ("gateway.networking.k8s.io/gateway-name", "gateway.envoyproxy.io/owning-gateway-name")
    found += [{"namespaceSelector": {}, "podSelector": {"matchLabels": {label: name}}} for label in labels]
    return found if namespace else found[1:]


def write_inference_pool(unit: ServiceContainers, deploy: DeployTarget, services: int) -> list[Tree]:
    """Write a service's InferencePool, its endpoint picker and the route to it."""
    picker = f"{unit.name}-picker"
    return [
        {
            "apiVersion": "inference.networking.k8s.io/v1",
            "kind": "InferencePool",
            "metadata": write_metadata(unit.name, deploy, make_selector(unit)),
            "spec": {
                "selector": {"matchLabels": make_selector(unit, leader=True)},
                "targetPorts": [{"number": PORT}],
                "endpointPickerRef": {
                    "name": picker,
                    "port": {"number": PICKER_PORT},
                    "failureMode": annotate("FailOpen", "without the picker, requests go to any replica"),
                },
            },
        },
        _write_route(
            unit, deploy, services, {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": unit.name}
        ),
        *_write_provider_objects(unit, picker, deploy),
        *_write_role(picker, deploy),
        _write_config(unit, picker, deploy),
        _write_deployment(unit, picker, deploy),
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": write_metadata(picker, deploy),
            "spec": {
                "selector": {"app.kubernetes.io/name": picker},
                "ports": [{"name": "grpc", "port": PICKER_PORT, "targetPort": "grpc", "appProtocol": "http2"}],
            },
        },
        _write_policy(picker, deploy),
    ]


def _write_provider_objects(unit: ServiceContainers, picker: str, deploy: DeployTarget) -> Iterator[Tree]:
    """Yield what a Gateway's implementation needs: llm-d-router ebab6879, charts/llm-d-router-gateway/templates."""
    if deploy.gateway_provider == "istio":
        namespace = write_metadata(picker, deploy)["namespace"]
        yield {
            "apiVersion": "networking.istio.io/v1",
            "kind": "DestinationRule",
            "metadata": write_metadata(picker, deploy),
            "spec": {
                "host": f"{picker}.{namespace}.svc.cluster.local",
                "trafficPolicy": annotate(
                    {"tls": {"mode": "SIMPLE", "insecureSkipVerify": True}}, "the picker's certificate is self-signed"
                ),
            },
        }
    if deploy.gateway_provider == "gke":
        target = {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": unit.name}
        check = {"type": "HTTP", "httpHealthCheck": {"requestPath": unit.launch.health_path, "port": PORT}}
        for kind, default in (
            ("HealthCheckPolicy", {"timeoutSec": 2, "checkIntervalSec": 2, "config": check}),
            ("GCPBackendPolicy", {"timeoutSec": annotate(unit.grace_s, unit.grace_words)}),
        ):
            yield {
                "apiVersion": "networking.gke.io/v1",
                "kind": kind,
                "metadata": write_metadata(unit.name, deploy),
                "spec": {"targetRef": target, "default": default},
            }


def _write_route(unit: ServiceContainers, deploy: DeployTarget, services: int, backend: Tree) -> Tree:
    namespace, _, name = (deploy.gateway or "").rpartition("/")
    parent = {"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": name, "namespace": namespace or None}
    rule: Tree = {"matches": [{"path": {"type": "PathPrefix", "value": "/"}}]}
    if services > 1:
        rewrite = {"path": {"type": "ReplacePrefixMatch", "replacePrefixMatch": "/"}}
        rule = {
            "matches": [{"path": {"type": "PathPrefix", "value": f"/{unit.name}"}}],
            "filters": [{"type": "URLRewrite", "urlRewrite": rewrite}],
        }
    rule["backendRefs"] = [backend]
    if deploy.gateway_provider != "gke":
        # GKE does not support timeouts of routes: the backend policy has it.
        rule["timeouts"] = {"request": annotate(f"{unit.grace_s}s", unit.grace_words)}
    return {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": write_metadata(unit.name, deploy),
        "spec": {"parentRefs": [parent], "rules": [rule]},
    }


def _write_role(picker: str, deploy: DeployTarget) -> list[Tree]:
    api = "rbac.authorization.k8s.io/v1"
    look = ["get", "list", "watch"]
    rules = [
        {"apiGroups": [""], "resources": ["pods"], "verbs": look},
        {"apiGroups": ["inference.networking.k8s.io"], "resources": ["inferencepools"], "verbs": look},
        {"apiGroups": ["llm-d.ai"], "resources": ["inferenceobjectives", "inferencemodelrewrites"], "verbs": look},
    ]
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": picker}
    account = {"kind": "ServiceAccount", "name": picker, "namespace": write_metadata(picker, deploy)["namespace"]}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": write_metadata(picker, deploy)},
        {"apiVersion": api, "kind": "Role", "metadata": write_metadata(picker, deploy), "rules": rules},
        {
            "apiVersion": api, "kind": "RoleBinding", "metadata": write_metadata(picker, deploy), "roleRef": role,
            "subjects": [account],
        },
    ]  # fmt: skip


def _write_config(unit: ServiceContainers, picker: str, deploy: DeployTarget) -> Tree:
    weights = {"queue-scorer": 2, "kv-cache-utilization-scorer": 2, "prefix-cache-scorer": 3}
    metrics = unit.metrics or MetricNames()
    extractor: Tree = {"type": "core-metrics-extractor"}
    if metrics.picker:
        extractor["parameters"] = {"defaultEngine": metrics.picker}
    config = {
        "apiVersion": "llm-d.ai/v1alpha1",
        "kind": "EndpointPickerConfig",
        "plugins": [
            *({"type": name} for name in weights),
            {"type": "metrics-data-source", "parameters": {"scheme": "http", "path": metrics.path}},
            extractor,
        ],
        "schedulingProfiles": [
            {
                "name": "default",
                "plugins": [{"pluginRef": name, "weight": weight} for name, weight in weights.items()],
            }
        ],
    }
    return {
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": write_metadata(picker, deploy),
        "data": {CONFIG: write_document(config)},
    }  # fmt: skip


def _write_deployment(unit: ServiceContainers, picker: str, deploy: DeployTarget) -> Tree:
    own = {"app.kubernetes.io/name": picker}
    probe = {"grpc": {"port": HEALTH_PORT, "service": "inference-extension"}}
    container: Tree = {
        "name": "picker",
        "image": ENDPOINT_PICKER,
        "args": [
            f"--pool-name={unit.name}", escape_word(f"--pool-namespace={write_metadata('', deploy)['namespace']}"),
            "--pool-group=inference.networking.k8s.io", f"--config-file=/config/{CONFIG}",
            f"--grpc-health-port={HEALTH_PORT}", "--zap-encoder=json", "--tracing=false",
            "--metrics-endpoint-auth=false",
            *(["--secure-serving=false"] if deploy.gateway_provider == "agentgateway" else []),
        ],
        "env": [
            {"name": "NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}},
            {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        ],
        "ports": [
            {"name": "grpc", "containerPort": PICKER_PORT},
            {"name": "grpc-health", "containerPort": HEALTH_PORT},
            {"name": "metrics", "containerPort": METRICS_PORT},
        ],
        "livenessProbe": {**probe, "initialDelaySeconds": 5, "periodSeconds": 10},
        "readinessProbe": {**probe, "periodSeconds": 2},
        # The project's chart requests 8 cores and 8 GiB; the limit is that chart's.
        "resources": {"requests": {"cpu": 2, "memory": "4Gi"}, "limits": {"memory": "16Gi"}},
        "securityContext": write_container_security(),
        "volumeMounts": [{"name": "config", "mountPath": "/config", "readOnly": True}],
    }  # fmt: skip
    spec: Tree = {
        "serviceAccountName": picker,
        "terminationGracePeriodSeconds": annotate(unit.grace_s, "as long as the pods in its pool"),
        "securityContext": {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [{"name": "config", "configMap": {"name": picker}}],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": write_metadata(picker, deploy, own),
        "spec": {
            "replicas": annotate(
                1, "its prefix cache index is in memory: each of two pickers would see only half of the requests"
            ),
            "selector": {"matchLabels": own},
            "template": {"metadata": {"labels": own}, "spec": spec},
        },
    }


def _write_policy(picker: str, deploy: DeployTarget) -> Tree:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": write_metadata(picker, deploy),
        "spec": {
            "podSelector": {"matchLabels": {"app.kubernetes.io/name": picker}},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [
                {"ports": [{"port": PICKER_PORT, "protocol": "TCP"}, {"port": METRICS_PORT, "protocol": "TCP"}]}
            ],
            "egress": annotate([{}], "the API server, and the pods whose metrics it reads"),
        },
    }
