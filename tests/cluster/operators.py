"""Pods that operators make from their objects, with what they add, and the rules of their admission webhooks.

No operator runs in the tests. Each function names the source that it follows: repository, commit, file.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

Tree = dict[str, Any]
QUEUE = "kueue.x-k8s.io/queue-name"
SMALL = {"requests": {"cpu": "500m", "memory": "512Mi"}, "limits": {"cpu": "500m", "memory": "512Mi"}}


def expand_pods(tree: Tree, replicas: int | None = None) -> Iterator[Tree]:
    """Yield the pods that an operator makes from an object; `replicas` instead of those that it states."""
    expand = {
        "LeaderWorkerSet": _expand_leader_worker_set,
        "RayService": _expand_ray_service,
        "DynamoGraphDeployment": _expand_dynamo_graph,
    }.get(tree["kind"])
    for name, template, count in expand(tree, replicas) if expand is not None else ():
        for index in range(count):
            meta = template.get("metadata", {})
            yield {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": f"{tree['metadata']['name']}-{name}-{index}"[:63],
                             "namespace": tree["metadata"]["namespace"],
                             "labels": meta.get("labels", {}), "annotations": meta.get("annotations", {})},
                "spec": template["spec"],
            }  # fmt: skip


Expanded = Iterator[tuple[str, Tree, int]]


def _expand_leader_worker_set(tree: Tree, replicas: int | None) -> Expanded:
    """kubernetes-sigs/lws 060ab4d, pkg/webhooks/pod_webhook.go: one leader, size - 1 workers for each replica."""
    group = tree["spec"]["leaderWorkerTemplate"]
    count = replicas if replicas is not None else tree["spec"].get("replicas", 1)
    yield "leader", group["leaderTemplate"], count
    yield "worker", group["workerTemplate"], count * (group["size"] - 1)


def _expand_ray_service(tree: Tree, replicas: int | None) -> Expanded:
    """ray-project/kuberay feeaf72f, ray-operator/controllers/ray/common/pod.go.

    The head gets the autoscaler's container with the security context of `autoscalerOptions`; a worker gets an init
    container with that of its Ray container.
    """
    cluster = copy.deepcopy(tree["spec"]["rayClusterConfig"])
    head = cluster["headGroupSpec"]["template"]
    if cluster.get("enableInTreeAutoscaling"):
        options = cluster.get("autoscalerOptions", {})
        added = {"name": "autoscaler", "image": head["spec"]["containers"][0]["image"], "resources": SMALL}
        added |= {name: options[name] for name in ("securityContext", "resources") if name in options}
        head["spec"]["containers"].append(added)
    yield "head", head, 1
    for group in cluster["workerGroupSpecs"]:
        spec, main = group["template"]["spec"], group["template"]["spec"]["containers"][0]
        waits = {"name": "wait-gcs-ready", "image": main["image"], "securityContext": main.get("securityContext"),
                 "resources": {"limits": {"cpu": "200m", "memory": "256Mi"}}}  # fmt: skip
        spec.setdefault("initContainers", []).append(waits)
        count = replicas if replicas is not None else group["replicas"]
        yield group["groupName"], group["template"], count * group.get("numOfHosts", 1)


def _expand_dynamo_graph(tree: Tree, replicas: int | None) -> Expanded:
    """ai-dynamo/dynamo bb3100e6, deploy/operator/internal/dynamo/backend_vllm.go: UpdatePodSpec.

    Workers of vLLM on several nodes get an init container without a security context.
    """
    for component in copy.deepcopy(tree["spec"]["components"]):
        count, template = component["replicas"], component["podTemplate"]
        if replicas is not None and component["type"] == "worker":
            count = replicas
        nodes = component.get("multinode", {}).get("nodeCount", 1)
        yield component["name"], template, count
        if nodes > 1:
            worker = copy.deepcopy(template)
            if tree["spec"].get("backendFramework") == "vllm":
                image = worker["spec"]["containers"][0]["image"]
                worker["spec"].setdefault("initContainers", []).append({"name": "wait-for-leader-mp", "image": image})
            yield f"{component['name']}-ranks", worker, count * (nodes - 1)


def list_violations(trees: Sequence[Tree]) -> list[str]:
    """Return what the operators' admission webhooks and controllers would refuse."""
    rules = (check_ray_beside_kueue, check_ray_validation, check_queued_pods, check_dynamo_names)
    return [
        f"{tree['kind']} {tree['metadata']['name']}: {what}" for tree in trees for rule in rules for what in rule(tree)
    ]


def check_ray_beside_kueue(tree: Tree) -> Iterator[str]:
    """kubernetes-sigs/kueue ff69552e (0.19), pkg/controller/jobs/raycluster/raycluster_webhook.go: validateCreate."""
    if tree["kind"] != "RayService" or QUEUE not in tree["metadata"].get("labels", {}):
        return
    cluster = tree["spec"]["rayClusterConfig"]
    elastic = tree["metadata"].get("annotations", {}).get("kueue.x-k8s.io/elastic-job") == "true"
    if cluster.get("enableInTreeAutoscaling") and not elastic:
        yield "a kueue-managed RayCluster can use autoscaling only as an elastic job"
    if any(group["groupName"] == "head" for group in cluster["workerGroupSpecs"]):
        yield '"head" is reserved for the head group'
    if len(cluster["workerGroupSpecs"]) + 1 > 8:
        yield "more pod sets than a Workload has"


def check_ray_validation(tree: Tree) -> Iterator[str]:
    """ray-project/kuberay feeaf72f, ray-operator/controllers/ray/utils/validation.go, apis/ray/v1."""
    if tree["kind"] != "RayService":
        return
    if len(tree["metadata"]["name"]) > 41:
        yield "the name is longer than 41 characters"
    for field in ("serviceUnhealthySecondThreshold", "deploymentUnhealthySecondThreshold"):
        if field in tree["spec"]:
            yield f"{field} is deprecated and not used"
    for group in tree["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
        if not group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]:
            yield "replicas are outside of their bounds"


def check_queued_pods(tree: Tree) -> Iterator[str]:
    """kubernetes-sigs/kueue ff69552e, pkg/controller/jobs/pod/pod_webhook.go: validatePodGroupMetadata.

    A pod group needs its name as a label and its size as an annotation, both or neither.
    """
    if tree["kind"] != "DynamoGraphDeployment":
        return
    for component in tree["spec"]["components"]:
        meta = component["podTemplate"].get("metadata", {})
        named = "kueue.x-k8s.io/pod-group-name" in meta.get("labels", {})
        counted = "kueue.x-k8s.io/pod-group-total-count" in meta.get("annotations", {})
        if named != counted:
            yield "a pod group needs a name and a total count"


def check_dynamo_names(tree: Tree) -> Iterator[str]:
    """ai-dynamo/dynamo bb3100e6, deploy/operator/internal/webhook/validation/dynamographdeployment.go."""
    if tree["kind"] != "DynamoGraphDeployment":
        return
    names = [component["name"] for component in tree["spec"]["components"]]
    if len(set(names)) != len(names) or not names:
        yield "component names must be there and unique"
