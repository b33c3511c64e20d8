"""NVIDIA Dynamo on Kubernetes: a frontend with KV-aware routing, and workers.

Options and names are from Dynamo's source of August 2026 (components/src/dynamo, deploy/operator) and its recipes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from bedplate.decide.estimate import compute_expectation
from bedplate.decide.rules import STANDARD_ENGINE
from bedplate.deploy.images import DYNAMO_TAG_NOTE, DYNAMO_VERSION, Image
from bedplate.deploy.kubernetes import Files, write_manifests, write_workload
from bedplate.deploy.platform import Platform
from bedplate.deploy.pods import (
    QUEUE_LABEL,
    Tree,
    annotate_arguments,
    escape_word,
    format_count,
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
from bedplate.deploy.scaling import (
    FULL,
    METRIC_TYPE,
    PROMETHEUS,
    QUIET_S,
    compute_bounds,
    write_behavior,
    write_fallback,
    write_replica_bounds,
)
from bedplate.deploy.service_containers import (
    DRAIN_S,
    GIB,
    PORT,
    ServiceContainers,
    describe_containers,
    find_engines,
    with_slots,
)
from bedplate.deploy.yaml_writer import CommentedValue, annotate
from bedplate.engines import DynamoWorker, Engine
from bedplate.errors import NotPossible
from bedplate.values import replace_fields
from bedplate.values.intent import DeployTarget
from bedplate.values.quoting import quote_promql
from bedplate.values.units import format_seconds

SYSTEM_PORT = 9090
SERVER_OPTIONS = ("--host", "--port")
"""Options of the engine's HTTP server, which is not started: Dynamo's frontend serves HTTP."""
TOOLS = frozenset(["deepseek_v4", "qwen3_coder", "kimi_k3", "glm47", "kimi_k2", "minimax_m2", "hermes", "gemma4",
                   "minimax_m3", "llama3_json"])  # fmt: skip
REASONING = frozenset(["deepseek_v4", "qwen3", "kimi_k3", "glm45", "gemma4", "minimax_m2", "minimax_m3"])
"""Parsers that have the same name in Dynamo and in the engines."""
RENAMED = {"openai": "harmony", "openai_gptoss": "gpt_oss"}
LEAST_APART = 4
"""Fewest replicas for prefill/decode disaggregation by default; with fewer, one of the roles would often be idle."""
PROMPT_HEAVY = 2.0
UPDATE = "nvidia.com/deployment-rolling-update"
"""Annotations of the operator for workers on one node (docs.nvidia.com/dynamo, Rolling Updates). By default it starts
one worker more than there are, which never starts without free GPUs."""


@dataclass(frozen=True)
class WorkerSplit:
    """How many workers do prefill and decode, and why."""

    prefill: int
    decode: int
    words: str

    @property
    def is_disaggregated(self) -> bool:
        return self.prefill > 0


def write_dynamo(platform: Platform) -> Files:
    units = [describe_containers(placed, platform.deploy) for placed in platform.services]
    reasons = {unit.name: reason for unit in units if (reason := explain_refusal(unit)) is not None}
    if len(reasons) == len(units):
        first = next(iter(reasons.values()))
        raise NotPossible(first, hint=f"use --emit kubernetes, or --engine {STANDARD_ENGINE} on NVIDIA GPUs")
    workloads: dict[str, Sequence[Tree]] = {}
    for index, unit in enumerate(units):
        if unit.name in reasons:
            workloads[unit.name] = write_workload(unit, platform)
        else:
            units[index] = _use_dynamo_image(unit)
            workloads[unit.name] = _write_graph(units[index], platform)
    backends = {unit.name: (f"{unit.name}-frontend", PORT) for unit in units if unit.name not in reasons}
    return write_manifests(platform, units, workloads, plain_reasons=reasons, backends=backends)


def explain_refusal(unit: ServiceContainers) -> str | None:
    if unit.engine.dynamo is None:
        runs = ", ".join(one.id for one in find_engines(lambda one: one.dynamo))
        return f"Dynamo runs {runs}, but {unit.name} is planned with {unit.engine.name}"
    if unit.plan.settings.device != "cuda":
        return f"Dynamo's images need NVIDIA GPUs, but {unit.name} runs on {unit.plan.settings.device}"
    if unit.plan.workload.task == "other":
        return f"Dynamo does not serve models for the task {unit.plan.workload.task!r}"
    return None


def _use_dynamo_image(unit: ServiceContainers) -> ServiceContainers:
    worker = get_worker(unit.engine)
    brings = f"Dynamo {DYNAMO_VERSION.rpartition('.')[0]} includes {unit.engine.name} {worker.version}"
    note = f"{brings}; the plan was made for {unit.plan.engine_version}; {DYNAMO_TAG_NOTE}"
    image = Image(f"{worker.image}:{DYNAMO_VERSION}", note, user=1000, group=0, python=True)
    # The frontend runs on any node, and reads the model's tokenizer.
    return replace(unit, image=image, is_read_elsewhere=True)


def split_workers(unit: ServiceContainers, deploy: DeployTarget) -> WorkerSplit:
    """Divide the workers into prefill and decode by the share of time that prefill takes."""
    share, words = estimate_prefill_share(unit)
    work, count = unit.plan.workload, unit.replicas
    # A decode worker keeps every running request in its KV cache; a prefill worker hands each one on.
    holds = max(1, unit.placed.decision.max_concurrency // count)
    least = -(-unit.placed.decision.in_flight // holds)
    possible = work.task == "generate" and least < count
    if deploy.layout == "disaggregated" and not possible:
        requests = format_count(unit.placed.decision.in_flight, "concurrent request")
        raise NotPossible(
            f"{unit.name} cannot be disaggregated: decoding {requests} takes all of its "
            f"{format_count(count, 'worker')}",
            hint="set deploy.layout: aggregated, or use more GPUs",
        )
    heavy = work.prompt_tokens >= PROMPT_HEAVY * work.output_tokens
    worth = heavy and count >= LEAST_APART and share is not None and 0.15 < share < 0.85
    if deploy.layout == "aggregated" or not possible or (deploy.layout is None and not worth):
        shape = (
            f"{format_count(count, 'worker')}, {work.prompt_tokens:,} prompt and {work.output_tokens:,} output tokens"
        )
        why_not = "Aggregated, as requested" if deploy.layout == "aggregated" else f"Aggregated: {shape}"
        return WorkerSplit(0, count, ". ".join(part for part in (why_not, words) if part))
    prefill = max(1, round(count * (share if share is not None else 0.5)))
    decode = max(least, count - prefill)
    prefill = count - decode
    held = f"{format_count(decode, 'decode worker')} for {unit.placed.decision.in_flight:,} concurrent requests"
    return WorkerSplit(
        prefill, decode, f"{words or 'There is no estimate, so the workers are divided equally'}. {held}"
    )


def estimate_prefill_share(unit: ServiceContainers) -> tuple[float | None, str]:
    """Return the share of a request's compute time that prefill takes, and the comment for it."""
    made = unit.placed.decision.estimate.output_tok_s
    work = replace_fields(unit.plan.workload, concurrency=1, users=1, requests_per_s=None)
    alone = compute_expectation(
        unit.placed.node, unit.placed.plan.model, unit.engine.id, unit.plan.parallelism, work, slots=1
    )
    if made is None or alone is None or made.value <= 0:
        return None, ""
    request_s = work.output_tokens * max(1, unit.placed.decision.parallelism.data) / made.value
    prefill_s = alone.ttft_s - alone.accept_s
    share = min(1.0, prefill_s / request_s)
    words = (
        f"By the estimate a replica computes {format_seconds(request_s)} per request, "
        f"{format_seconds(prefill_s)} of it prefill: "
        f"{share:.0%}"
    )
    return share, words


def _write_graph(unit: ServiceContainers, platform: Platform) -> list[Tree]:
    deploy, queue = platform.deploy, choose_queue(unit, platform)
    split = split_workers(unit, deploy)
    workers = []
    if not split.is_disaggregated:
        workers.append(_write_worker(unit, deploy, queue, "worker", split.decode))
    else:
        each = -(-unit.placed.decision.in_flight // split.decode)
        workers.append(_write_worker(with_slots(unit, each), deploy, queue, "decode", split.decode))
        workers.append(_write_worker(unit, deploy, queue, "prefill", split.prefill))
    components = [_write_frontend(unit, deploy, queue), *workers]
    graph = {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": write_metadata(unit.name, deploy, make_labels(unit)),
        "spec": {
            "backendFramework": get_worker(unit.engine).framework,
            "components": annotate(components, split.words),
        },
    }
    return [*write_settings(unit, split, deploy), graph, *_write_scaling(unit, split, deploy, queue)]


def _write_frontend(unit: ServiceContainers, deploy: DeployTarget, queue: str | None) -> Tree:
    waits = unit.grace_s - DRAIN_S
    container: Tree = {
        "name": "main",
        "image": unit.image.name,
        "command": ["python3", "-m", "dynamo.frontend"],
        "env": [
            annotate({"name": "DYN_ROUTER_MODE", "value": "kv"}, "route to the worker with the longest cached prefix"),
            {"name": "DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS", "value": str(waits)},
            annotate(
                {"name": "DYN_MIGRATION_LIMIT", "value": "3"},
                "a request whose worker fails continues on another worker",
            ),
            {"name": "HOME", "value": "/cache"},
        ],
        "resources": {"requests": {"cpu": 4, "memory": "8Gi"}, "limits": {"memory": "8Gi"}},
        "securityContext": write_container_security(),
        "volumeMounts": [
            annotate(
                {"name": "models", "mountPath": "/models", "readOnly": True}, "the frontend needs the model's tokenizer"
            ),
            {"name": "cache", "mountPath": "/cache"},
        ],
    }
    kept = [
        volume
        for volume in write_volumes(unit)
        if isinstance(volume, Mapping) and volume["name"] in ("models", "cache")
    ]
    spec: Tree = {
        "terminationGracePeriodSeconds": annotate(unit.grace_s, unit.grace_words),
        "securityContext": write_security_context(unit.image),
        **select_architecture([unit], queue),
        "initContainers": [write_wait_container(unit)],
        "containers": [container],
        "volumes": kept,
    }
    labels = make_labels(unit) | {"app.kubernetes.io/component": "frontend"}
    return {
        "name": "frontend",
        "type": "frontend",
        "replicas": annotate(
            1 if unit.replicas < LEAST_APART else 2, "it only tokenizes and routes: one serves many workers"
        ),
        "podTemplate": {"metadata": {"labels": _add_queue_label(labels, queue)}, "spec": spec},
    }


def _write_worker(unit: ServiceContainers, deploy: DeployTarget, queue: str | None, role: str, count: int) -> Tree:
    scaled = role == "worker" and _is_scaled(unit, queue)
    rdma = deploy.rdma if role != "worker" or unit.nodes > 1 else None
    unit = replace(unit, files=unit.engine.list_dynamo_files(unit.plan, role))
    container: Tree = {
        "name": "main",
        "image": annotate(unit.image.name, unit.image.note),
        "command": ["python3", "-m", get_worker(unit.engine).module],
        "args": annotate_arguments(unit, [escape_word(word) for word in build_arguments(unit, role)]),
        "env": [
            *(entry for entry in write_environment(unit) if entry["name"] != unit.engine.key_variable),
            {"name": "DYN_RUNTIME_GRACEFUL_SHUTDOWN_TIMEOUT_SECS", "value": str(unit.grace_s - DRAIN_S)},
        ],
        "resources": write_resources(unit, rdma),
        "startupProbe": annotate(
            {
                "httpGet": {"path": "/live", "port": SYSTEM_PORT},
                "periodSeconds": 10,
                "timeoutSeconds": 5,
                "failureThreshold": unit.start_failures,
            },
            f"{unit.load_words}. The pod restarts if it is not ready after {format_seconds(unit.start_failures * 10)}",
        ),
        "securityContext": write_container_security(rdma is not None),
        "volumeMounts": [mount for mount in write_mounts(unit) if mount["name"] != "shm"],
    }
    settings = f"{unit.name}-{role}" if unit.files else None
    spec: Tree = {
        "terminationGracePeriodSeconds": annotate(unit.grace_s, unit.grace_words),
        "securityContext": write_security_context(unit.image),
        **select_nodes(unit),
        "initContainers": [write_wait_container(unit)],
        "containers": [container],
        "volumes": [volume for volume in write_volumes(unit, settings) if not isinstance(volume, CommentedValue)],
    }
    return {
        "name": role,
        "type": role,
        # The operator's webhook refuses another number than the adapter has set: validateReplicasChanges in
        # deploy/operator/internal/webhook/validation.
        "replicas": None if scaled else count,
        "scalingAdapter": annotate({}, "the ScaledObject below sets the number of replicas") if scaled else None,
        "sharedMemorySize": annotate(f"{unit.shm_bytes // GIB}Gi", "shared memory between the ranks of one worker"),
        "multinode": annotate({"nodeCount": unit.nodes}, f"{unit.cards} GPUs on each") if unit.nodes > 1 else None,
        "podTemplate": {"metadata": _write_worker_metadata(unit, queue, role, count), "spec": spec},
    }


def _write_worker_metadata(unit: ServiceContainers, queue: str | None, role: str, count: int) -> Tree:
    """Write labels; with a queue, the ranks of workers on several nodes are admitted together or not at all."""
    labels = _add_queue_label(make_labels(unit), queue)
    if unit.nodes == 1:
        return {"labels": labels, "annotations": _write_update_strategy(unit, role)}
    if queue is None:
        return {"labels": labels}
    group = {
        "kueue.x-k8s.io/pod-group-total-count": str(count * unit.nodes),
        "kueue.x-k8s.io/pod-group-serving": "true",
    }
    return {"labels": labels | {"kueue.x-k8s.io/pod-group-name": f"{unit.name}-{role}"}, "annotations": group}


def _write_update_strategy(unit: ServiceContainers, role: str) -> CommentedValue:
    """Replace workers as a Deployment of them would. All roles are updated together, each with one worker more."""
    can_surge = unit.most_replicas - unit.replicas >= (1 if role == "worker" else 2)
    pace = {f"{UPDATE}-max-surge": str(int(can_surge)), f"{UPDATE}-max-unavailable": str(int(not can_surge))}
    free = "the pool has capacity for one more worker" if can_surge else (
        "the pool has no free GPUs: an old worker must stop before a new one starts"
    )  # fmt: skip
    return annotate(pace, free)


def _add_queue_label(labels: Tree, queue: str | None) -> Tree:
    """Label the pods with their queue: Kueue does not know Dynamo's graphs, but admits single pods."""
    return labels | ({QUEUE_LABEL: queue} if queue is not None else {})


def build_arguments(unit: ServiceContainers, role: str) -> tuple[str, ...]:
    """Return the engine's options without those of its server, plus Dynamo's options for the role."""
    worker = get_worker(unit.engine)
    found = ["--model", unit.model_path] if worker.names_model else []
    if worker.names_served:
        found += ["--served-model-name", unit.plan.model.served_name]
    found += select_engine_options(worker, unit.launch.argv)
    own = unit.engine.get_dynamo_options(role, unit.plan.workload.task)
    return tuple(_join_values([*found, *own, *choose_parser_options(worker, unit.launch.argv)]))


def get_worker(engine: Engine) -> DynamoWorker:
    if engine.dynamo is None:
        raise NotPossible(f"Dynamo has no worker for {engine.name}")
    return engine.dynamo


def select_engine_options(worker: DynamoWorker, argv: Sequence[str]) -> list[str]:
    """Return the options of a launch command without the model and without those of the server."""
    words = list(argv)
    dropped = {*SERVER_OPTIONS, *worker.drops, worker.tool_parser, worker.reasoning_parser}
    found: list[str] = []
    index = next(index for index, word in enumerate(words) if word.startswith("--"))
    while index < len(words):
        word = words[index]
        has_value = index + 1 < len(words) and not words[index + 1].startswith("--")
        if word in dropped:
            index += 2 if has_value else 1
            continue
        found.append(worker.renames.get(word, word))
        if has_value:
            found.append(words[index + 1])
        index += 2 if has_value else 1
    return found


def choose_parser_options(worker: DynamoWorker, argv: Sequence[str]) -> list[str]:
    """Return Dynamo's options for the parsers of tool calls and reasoning that its frontend supports."""
    words = list(argv)
    found: list[str] = []
    for own, option, known in (
        (worker.tool_parser, "--dyn-tool-call-parser", TOOLS | {"harmony"}),
        (worker.reasoning_parser, "--dyn-reasoning-parser", REASONING | {"gpt_oss"}),
    ):
        value = next((words[index + 1] for index, word in enumerate(words) if word == own), None)
        name = RENAMED.get(value, value) if value is not None else None
        found += [option, name] if name in known and name is not None else []
    return found


def _join_values(words: Sequence[str]) -> list[str]:
    found: list[str] = []
    index = 0
    while index < len(words):
        if index + 1 < len(words) and not words[index + 1].startswith("--"):
            found.append(f"{words[index]}={words[index + 1]}")
            index += 2
        else:
            found.append(words[index])
            index += 1
    return found


def write_settings(unit: ServiceContainers, split: WorkerSplit, deploy: DeployTarget) -> list[Tree]:
    """Write a ConfigMap of the engine's files for each role."""
    if not unit.files:
        return []
    roles = ("decode", "prefill") if split.is_disaggregated else ("worker",)
    return [
        {
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": write_metadata(f"{unit.name}-{role}", deploy),
            "data": unit.engine.list_dynamo_files(unit.plan, role),
        }
        for role in roles
    ]  # fmt: skip


def _is_scaled(unit: ServiceContainers, queue: str | None) -> bool:
    """Kueue deletes pods beyond the size of a group, in which it admits the ranks of several nodes.

    cleanupExcessPods in pkg/controller/jobs/pod/pod_controller.go.
    """
    least, most = compute_bounds(unit)
    return least != most and (unit.nodes == 1 or queue is None)


def _write_scaling(unit: ServiceContainers, split: WorkerSplit, deploy: DeployTarget, queue: str | None) -> list[Tree]:
    """Scale aggregated workers by the frontend's active requests."""
    if split.is_disaggregated or not _is_scaled(unit, queue):
        # With prefill and decode workers the ratio matters too; Dynamo's planner controls both.
        return []
    namespace = write_metadata("", deploy)["namespace"]
    of = f"{{dynamo_namespace={quote_promql(f'{namespace}-{unit.name}')}}}"
    each = max(1, round(FULL * unit.request_capacity))
    return [
        {
            "apiVersion": "keda.sh/v1alpha1",
            "kind": "ScaledObject",
            "metadata": write_metadata(unit.name, deploy),
            "spec": {
                "scaleTargetRef": {
                    "apiVersion": "nvidia.com/v1alpha1",
                    "kind": "DynamoGraphDeploymentScalingAdapter",
                    "name": annotate(f"{unit.name}-worker", "the operator creates it for the component named worker"),
                },
                **write_replica_bounds(unit),
                "pollingInterval": 15,
                "cooldownPeriod": QUIET_S,
                "fallback": write_fallback(unit),
                "advanced": write_behavior(unit),
                "triggers": [
                    {
                        "type": "prometheus",
                        "name": "requests",
                        "metricType": METRIC_TYPE,
                        "metadata": {
                            "serverAddress": deploy.prometheus or PROMETHEUS,
                            "query": f"sum(dynamo_frontend_active_requests{of})",
                            "threshold": annotate(
                                str(each), f"{FULL:.0%} of the capacity of a worker, {unit.request_capacity:,}"
                            ),
                        },
                    }
                ],
            },
        }
    ]
