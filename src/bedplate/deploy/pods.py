"""Pods: containers, probes, volumes, security contexts and node selection."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from bedplate.deploy.images import Image
from bedplate.deploy.service_containers import (
    ARCH_LABEL,
    DRAIN_S,
    GIB,
    PORT,
    SETTINGS,
    ServiceContainers,
    VolumeStep,
    name_architecture,
)
from bedplate.deploy.yaml_writer import CommentedValue, annotate, strip_comments
from bedplate.engines.traits import MODELS
from bedplate.values.intent import DeployTarget
from bedplate.values.quoting import escape_kubernetes, quote_posix_shell
from bedplate.values.units import format_seconds

Tree = dict[str, Any]
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
TOKEN = "hf-token"  # noqa: S105 - the name of a Secret, not one
KEY = "engine-key"
NAMESPACE = "inference"
FIRST = {"bedplate/apply": "first"}
"""Label of what `kubectl apply -l` creates before the engines: volumes, the Jobs that fill them, and their queues."""


def write_metadata(name: str, deploy: DeployTarget, labels: Mapping[str, object] | None = None) -> Tree:
    return {"name": name, "namespace": deploy.namespace or NAMESPACE, "labels": dict(labels) if labels else None}


def make_labels(unit: ServiceContainers, queue: str | None = None) -> Tree:
    found = make_selector(unit) | {"app.kubernetes.io/version": unit.plan.engine_version}
    return found | ({QUEUE_LABEL: queue} if queue else {})


def make_selector(unit: ServiceContainers, leader: bool = False) -> Tree:
    """Return the labels that select the pods of a service; with `leader`, only pods that answer requests."""
    found = _make_name_labels(unit) | {"app.kubernetes.io/component": "engine"}
    return found | ({"role": "leader"} if leader and unit.nodes > 1 else {})


def make_model_labels(unit: ServiceContainers) -> Tree:
    """Return the labels of the pods that fill the volume."""
    return _make_name_labels(unit) | {"app.kubernetes.io/component": "model"}


def _make_name_labels(unit: ServiceContainers) -> Tree:
    return {"app.kubernetes.io/name": unit.engine.id.replace(".", "-"), "app.kubernetes.io/instance": unit.name}


def write_pod_spec(unit: ServiceContainers, deploy: DeployTarget, engine: Tree) -> Tree:
    spec: Tree = {
        "serviceAccountName": unit.name,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": annotate(unit.grace_s, unit.grace_words),
        "securityContext": write_security_context(unit.image),
        **select_nodes(unit),
        "initContainers": [write_wait_container(unit)],
        "containers": [engine],
        "volumes": write_volumes(unit),
    }
    if unit.replicas > 1 and unit.nodes == 1:
        spec["topologySpreadConstraints"] = [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": make_selector(unit)},
            }
        ]
    return spec


def write_engine_container(unit: ServiceContainers, argv: tuple[Sequence[str], Sequence[str]] | None = None, *,
answers: bool = True,
                     rdma: str | None = None) -> Tree:  # fmt: skip
    """Write the engine's container. If a replica has several pods, only the leader answers requests and probes."""
    command, arguments = argv or unit.program
    container: Tree = {
        "name": "engine",
        "image": annotate(unit.image.name, unit.image.note) if unit.image.note else unit.image.name,
        "imagePullPolicy": "IfNotPresent",
        "command": [escape_word(word) for word in command],
        "args": annotate_arguments(unit, [escape_word(word) for word in arguments]),
        "env": write_environment(unit),
        "ports": [{"name": "http", "containerPort": PORT}] if answers else None,
        "resources": write_resources(unit, rdma),
        **(write_probes(unit) if answers else {}),
        "lifecycle": write_lifecycle(unit) if answers else None,
        "securityContext": write_container_security(rdma is not None),
        "volumeMounts": write_mounts(unit),
    }
    return container


def annotate_arguments(unit: ServiceContainers, arguments: Sequence[str]) -> list[object]:
    """Annotate slots, context length and tensor parallelism with the reasons for their values."""
    layout, decision = unit.plan.parallelism, unit.placed.decision
    work = unit.plan.workload
    replicas = format_count(max(1, decision.parallelism.data), "replica")
    each = f"{format_count(decision.in_flight, 'concurrent request')} over {replicas}"
    noted, renames = unit.engine.noted, unit.engine.dynamo.renames if unit.engine.dynamo is not None else {}
    reasons = {
        noted.slots: f"{each}; one replica has capacity for {unit.request_capacity:,} of "
        f"{work.request_tokens:,} tokens",
        noted.context: f"longest request; usual: {work.prompt_tokens:,} prompt, {work.output_tokens:,} output tokens",
        noted.tensor: f"the weights and KV cache of one replica need {layout.tensor} GPUs",
    }
    reasons |= {renames[name]: text for name, text in reasons.items() if name is not None and name in renames}
    found: list[object] = []
    for argument in arguments:
        reason = reasons.get(argument.partition("=")[0])
        found.append(annotate(argument, reason) if reason is not None else argument)
    return found


def format_count(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def write_environment(unit: ServiceContainers) -> list[Tree]:
    """Return the engine's variables; HOME is the cache volume, because the weights are read-only."""
    fixed = {"HOME": "/cache", "USER": "engine", **unit.launch.env}
    found: list[Tree] = [{"name": name, "value": escape_word(value)} for name, value in fixed.items()]
    if unit.engine.key_variable is not None:
        found.append(refer_to_secret(unit.engine.key_variable, KEY, "key"))
    return found


def escape_word(word: str) -> str:
    """Escape `$(NAME)`, which Kubernetes substitutes, except where bedplate refers to LeaderWorkerSet's variables."""
    return escape_kubernetes(word).replace("$$(LWS_", "$(LWS_")


def refer_to_secret(variable: str, name: str, key: str) -> Tree:
    """Read a variable from a Secret that the user creates; it is optional."""
    return {"name": variable, "valueFrom": {"secretKeyRef": {"name": name, "key": key, "optional": True}}}


def write_resources(unit: ServiceContainers, rdma: str | None = None) -> Tree:
    memory = f"{unit.memory_bytes // GIB}Gi"
    own: Tree = {unit.selector.resource: unit.cards} if unit.selector.resource is not None else {}
    own |= {rdma: 1} if rdma is not None else {}
    words = "processes, /dev/shm and page cache for loading" if unit.cards else "weights, KV cache and overhead"
    return {
        "requests": {"cpu": unit.cpu_cores, "memory": annotate(memory, words), **own},
        # No CPU limit: a throttled engine leaves its GPUs idle between two steps.
        "limits": {"memory": memory, **own},
    }


def write_probes(unit: ServiceContainers) -> Tree:
    get = {"httpGet": {"path": unit.launch.health_path, "port": "http"}}
    allowed = format_seconds(unit.start_failures * 10)
    return {
        "startupProbe": annotate(
            {**get, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": unit.start_failures},
            f"{unit.load_words}. The pod restarts if it is not ready after {allowed}",
        ),
        "readinessProbe": {**get, "periodSeconds": 5, "timeoutSeconds": 5, "failureThreshold": 3},
        "livenessProbe": annotate(
            {**get, "periodSeconds": 15, "timeoutSeconds": 10, "failureThreshold": 8},
            "a full batch may delay the response; the engine restarts after two minutes without one",
        ),
    }


def write_lifecycle(unit: ServiceContainers) -> Tree:
    if unit.engine.container.drains:
        return {"preStop": {"sleep": {"seconds": DRAIN_S}}}
    wait_s = max(DRAIN_S, unit.grace_s - 15)
    words = f"{unit.engine.name} stops without draining: this delay lets running requests finish"
    return {"preStop": annotate({"sleep": {"seconds": wait_s}}, words)}


def write_security_context(image: Image) -> Tree:
    return {
        "runAsNonRoot": True,
        "runAsUser": image.user,
        "runAsGroup": image.group,
        "fsGroup": image.user,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def write_container_security(locks_memory: bool = False) -> Tree:
    capabilities: Tree = {"drop": ["ALL"]}
    if locks_memory:
        capabilities["add"] = [annotate("IPC_LOCK", "RDMA pins memory, which needs this capability")]
    return {"allowPrivilegeEscalation": False, "capabilities": capabilities}


def select_nodes(unit: ServiceContainers) -> Tree:
    """Select only nodes with the GPUs that the plan was made for."""
    chosen = unit.selector
    found: Tree = {}
    if len(chosen.values) == 1:
        found["nodeSelector"] = {chosen.label: chosen.values[0]}
    wanted: list[Tree] = [{"key": label, "operator": "DoesNotExist"} for label in chosen.avoids]
    if len(chosen.values) > 1:
        wanted.append({"key": chosen.label, "operator": "In", "values": list(chosen.values)})
    if wanted:
        terms = {"nodeSelectorTerms": [{"matchExpressions": wanted}]}
        found["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    if chosen.resource is not None:
        found["tolerations"] = [{"key": chosen.resource, "operator": "Exists", "effect": "NoSchedule"}]
    return found


def select_architecture(units: Sequence[ServiceContainers], queue: str | None = None) -> Tree:
    """Select nodes for pods without GPUs whose image is for the nodes of these services; nothing if those differ.

    With a queue, Kueue adds the labels of a flavor. A selector of the architecture would leave only flavors of CPU
    nodes, whose quota the queue of a service with GPUs would have to borrow.
    """
    found = {name_architecture(unit.placed.node) for unit in units}
    return {"nodeSelector": {ARCH_LABEL: found.pop()}} if len(found) == 1 and queue is None else {}


def write_volumes(unit: ServiceContainers, settings: str | None = None) -> list[object]:
    claim = {"claimName": name_model_claim(unit), "readOnly": True}
    found: list[object] = [
        {"name": "models", "persistentVolumeClaim": claim},
        {"name": "cache", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
    ]
    if unit.shm_bytes:
        limit = f"{unit.shm_bytes // GIB}Gi"
        words = (
            "shared memory between the ranks of one replica"
            if unit.cards > 1
            else "shared memory between its processes"
        )
        found.append(annotate({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": limit}}, words))
    if unit.files:
        found.append({"name": "settings", "configMap": {"name": settings or unit.name}})
    return found


def write_mounts(unit: ServiceContainers) -> list[Tree]:
    found: list[Tree] = [
        {"name": "models", "mountPath": MODELS, "readOnly": True},
        {"name": "cache", "mountPath": "/cache"},
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - a folder of the container
    ]
    found += [{"name": "shm", "mountPath": "/dev/shm"}] if unit.shm_bytes else []  # noqa: S108
    return found + ([{"name": "settings", "mountPath": SETTINGS, "readOnly": True}] if unit.files else [])


def write_wait_container(unit: ServiceContainers) -> Tree:
    """Write the init container that waits until the model is on the volume."""
    script = f"until [ -e {quote_posix_shell(name_marker(unit))} ]; do echo waiting for the model; sleep 10; done"
    return {
        "name": "model",
        "image": unit.image.name,
        "command": ["sh", "-c", script],
        "resources": {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"memory": "64Mi"}},
        "securityContext": write_container_security(),
        "volumeMounts": [{"name": "models", "mountPath": MODELS, "readOnly": True}],
    }


def name_marker(unit: ServiceContainers) -> str:
    return f"{unit.model_path}.complete"


def name_model_claim(unit: ServiceContainers) -> str:
    """Name the volume by what it is and contains: a claim cannot be changed, and old pods keep the old model."""
    steps = [(step.name, step.command, step.env) for step in unit.steps]
    what = [unit.access_mode, unit.storage_class, unit.volume_bytes, unit.model_path, steps]
    return f"{name_model(unit)}-{_compute_digest(what)}"


def name_model(unit: ServiceContainers) -> str:
    return f"{unit.name}-model"


def _compute_digest(content: object) -> str:
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:8]


def write_model_job(unit: ServiceContainers, deploy: DeployTarget, queue: str | None) -> Tree:
    """Write the Job that downloads the model and converts it if planned.

    Its name changes with its content and its queue, because neither can be changed. Kueue: validateUpdateForQueueName
    in pkg/controller/jobframework/validation.go.
    """
    labels = make_model_labels(unit)
    path, marker = quote_posix_shell(unit.model_path), quote_posix_shell(name_marker(unit))
    last = {
        "name": "complete",
        "image": unit.steps[-1].image,
        "command": ["sh", "-c", f"test -e {path} && touch {marker}"],
        "resources": {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"memory": "64Mi"}},
        "securityContext": write_container_security(),
        "volumeMounts": [{"name": "models", "mountPath": MODELS}],
    }
    spec: Tree = {
        "restartPolicy": "OnFailure",
        "serviceAccountName": unit.name,
        "automountServiceAccountToken": False,
        "securityContext": write_security_context(unit.image),
        **_select_job_nodes(unit),
        "initContainers": [_write_step(unit, step) for step in unit.steps],
        "containers": [last],
        "volumes": [
            {"name": "models", "persistentVolumeClaim": {"claimName": name_model_claim(unit)}},
            {"name": "cache", "emptyDir": {}},
        ],
    }
    template: Tree = {"metadata": {"labels": labels}, "spec": spec}
    content = strip_comments(template)
    name = f"{name_model(unit)}-{_compute_digest(content if queue is None else [content, queue])}"
    own = write_metadata(name, deploy, labels | FIRST | ({QUEUE_LABEL: queue} if queue else {}))
    return {
        "apiVersion": "batch/v1", "kind": "Job", "metadata": own, "spec": {"backoffLimit": 4, "template": template},
    }  # fmt: skip


def _select_job_nodes(unit: ServiceContainers) -> Tree:
    """Select the nodes of the engine: a volume is often created where the first pod uses it, and stays there."""
    found = select_nodes(unit)
    if unit.access_mode == "ReadWriteOnce":
        # Such a volume is attached to one node: a pod that waits for the model there must not keep the Job out.
        term = {"labelSelector": {"matchLabels": make_selector(unit)}, "topologyKey": "kubernetes.io/hostname"}
        near = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": term}]}
        found["affinity"] = {**found.get("affinity", {}), "podAffinity": near}
    return found


def _write_step(unit: ServiceContainers, step: VolumeStep) -> CommentedValue:
    memory = 8 * GIB
    if step.name == "convert":
        # A converter holds the source weights in host memory, also when it computes on a GPU.
        memory = unit.memory_bytes + unit.plan.model.weight_bytes // GIB * GIB
    own: Tree = {unit.selector.resource: step.cards} if step.cards and unit.selector.resource is not None else {}
    cpu = unit.cpu_cores if step.cards or step.name == "convert" else 2
    values = {"HOME": "/cache", "USER": "engine", **step.env}
    env = [{"name": name, "value": escape_word(value)} for name, value in values.items()]
    container = {
        "name": step.name,
        "image": step.image,
        "command": [escape_word(word) for word in step.command],
        "env": [*env, *([refer_to_secret("HF_TOKEN", TOKEN, "token")] if step.name == "fetch" else [])],
        "resources": {
            "requests": {"cpu": cpu, "memory": f"{memory // GIB}Gi", **own},
            "limits": {"memory": f"{memory // GIB}Gi", **own},
        },
        "securityContext": write_container_security(),
        "volumeMounts": [{"name": "models", "mountPath": MODELS}, {"name": "cache", "mountPath": "/cache"}],
    }
    return annotate(container, step.note)
