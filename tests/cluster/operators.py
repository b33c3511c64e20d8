"""Pods that operators make from their objects, with what they add, and the rules of their admission webhooks.

No operator runs in the tests. Each function names the source that it follows: repository, commit, file.
"""

from __future__ import annotations

import copy
import re
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
        count, template = component.get("replicas", 1), component["podTemplate"]
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
    rules = (
        check_ray_beside_kueue, check_ray_validation, check_queued_pods, check_dynamo_names, check_cluster_queue,
        check_scaled_object, check_leader_worker_set,
    )  # fmt: skip
    found = [
        f"{tree['kind']} {tree['metadata']['name']}: {what}" for tree in trees for rule in rules for what in rule(tree)
    ]
    return found + list(check_scaled_objects_together(trees))


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

    A pod group needs its name as a label and its size as an annotation, both or neither. The excess is deleted:
    cleanupExcessPods in pod_controller.go.
    """
    if tree["kind"] != "DynamoGraphDeployment":
        return
    for component in tree["spec"]["components"]:
        meta = component["podTemplate"].get("metadata", {})
        named = "kueue.x-k8s.io/pod-group-name" in meta.get("labels", {})
        counted = "kueue.x-k8s.io/pod-group-total-count" in meta.get("annotations", {})
        if named != counted:
            yield "a pod group needs a name and a total count"
        if named and "scalingAdapter" in component:
            yield "pods beyond the total count of a group are deleted"


def check_dynamo_names(tree: Tree) -> Iterator[str]:
    """ai-dynamo/dynamo bb3100e6, deploy/operator/internal/webhook/validation/dynamographdeployment.go."""
    if tree["kind"] != "DynamoGraphDeployment":
        return
    names = [component["name"] for component in tree["spec"]["components"]]
    if len(set(names)) != len(names) or not names:
        yield "component names must be there and unique"


def check_cluster_queue(tree: Tree) -> Iterator[str]:
    """kubernetes-sigs/kueue ff69552e, pkg/webhooks/clusterqueue_webhook.go: ValidateClusterQueue."""
    if tree["kind"] != "ClusterQueue":
        return
    spec, flavors, resources = tree["spec"], list[str](), list[str]()
    for group in spec["resourceGroups"]:
        resources += group["coveredResources"]
        for flavor in group["flavors"]:
            flavors.append(flavor["name"])
            if [one["name"] for one in flavor["resources"]] != group["coveredResources"]:
                yield f"resources of {flavor['name']} must match the names in coveredResources"
            for one in flavor["resources"]:
                nominal = read_quantity(one["nominalQuota"])
                limits = {name: read_quantity(one[name]) for name in ("borrowingLimit", "lendingLimit") if name in one}
                if min(nominal, *limits.values(), nominal) < 0:
                    yield "quotas must not be negative"
                if limits and not spec.get("cohortName"):
                    yield "limits must be nil when cohort is empty"
                if limits.get("lendingLimit", 0) > nominal:
                    yield "lendingLimit must be less than or equal to the nominalQuota"
    if len(set(flavors)) < len(flavors) or len(set(resources)) < len(resources):
        yield "a flavor or a resource is there twice"
    preemption = spec.get("preemption", {})
    borrows = preemption.get("borrowWithinCohort", {}).get("policy", "Never")
    if preemption.get("reclaimWithinCohort", "Never") == "Never" and borrows != "Never":
        yield "reclaimWithinCohort=Never and borrowWithinCohort.Policy!=Never"
    weight = spec.get("fairSharing", {}).get("weight", "1")
    if read_quantity(weight) < 0:
        yield "the weight must not be negative"


def read_quantity(value: object) -> float:
    """A quantity of Kubernetes as a number; those that are written here have one of these suffixes."""
    text = str(value)
    factor = {"Gi": 2.0**30, "Mi": 2.0**20, "m": 0.001}
    suffix = next((one for one in factor if text.endswith(one)), "")
    return float(text.removesuffix(suffix)) * factor.get(suffix, 1.0)


def check_scaled_object(tree: Tree) -> Iterator[str]:
    """kedacore/keda 8b4f083c, apis/keda/v1alpha1: scaledobject_webhook.go and the types of both kinds.

    The webhook of 2.17.0 counts a trigger without `metricType` as one that has no fallback.
    """
    if tree["kind"] != "ScaledObject":
        return
    spec, name = tree["spec"], tree["metadata"]["name"]
    least, most = max(1, spec.get("minReplicaCount", 0)), spec.get("maxReplicaCount", 100)
    if least > most:
        yield f"MinReplicaCount={least} must be less than MaxReplicaCount={most}"
    if "idleReplicaCount" in spec and spec["idleReplicaCount"] >= spec.get("minReplicaCount", 0):
        yield "IdleReplicaCount must be less than MinReplicaCount"
    if len(f"keda-hpa-{name}") > 63:
        yield "the name of the HPA is longer than 63 characters"
    names = [one["name"] for one in spec["triggers"] if "name" in one]
    if len(set(names)) < len(names):
        yield "a triggerName is defined multiple times"
    for one in spec["triggers"]:
        if not all(isinstance(value, str) for value in one["metadata"].values()):
            yield "metadata of a trigger must be text"
    fallback = spec.get("fallback")
    if fallback is None:
        return
    if fallback["failureThreshold"] < 0 or fallback["replicas"] < 0:
        yield "FailureThreshold and Replicas must both be greater than or equal to 0"
    if any(one["type"] in ("cpu", "memory") or one.get("metricType") != "AverageValue" for one in spec["triggers"]):
        yield "Fallback can only be enabled for triggers with metric of type AverageValue"


def check_scaled_objects_together(trees: Sequence[Tree]) -> Iterator[str]:
    """The same file: verifyScaledObjects. Two of a namespace must not scale the same workload."""
    targets = [
        (tree["metadata"]["namespace"], tree["spec"]["scaleTargetRef"].get("kind", "Deployment"),
         tree["spec"]["scaleTargetRef"]["name"])
        for tree in trees if tree["kind"] == "ScaledObject"
    ]  # fmt: skip
    for target in set(targets):
        if targets.count(target) > 1:
            yield f"{target} is already managed by a ScaledObject"


def check_leader_worker_set(tree: Tree) -> Iterator[str]:
    """kubernetes-sigs/lws 060ab4d, pkg/webhooks/leaderworkerset_webhook.go: generalValidate."""
    if tree["kind"] != "LeaderWorkerSet":
        return
    spec, name = tree["spec"], tree["metadata"]["name"]
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", name):
        yield "the name is the name of a headless Service: a DNS-1035 label"
    if spec.get("replicas", 1) < 0 or spec["leaderWorkerTemplate"]["size"] < 1:
        yield "replicas must be equal or greater than 0, and size than 1"
    rolling = spec.get("rolloutStrategy", {}).get("rollingUpdateConfiguration", {})
    if rolling.get("maxUnavailable", 1) == 0 and rolling.get("maxSurge", 0) == 0:
        yield "maxUnavailable must not be 0 when maxSurge is 0"


def list_update_violations(before: Sequence[Tree], after: Sequence[Tree]) -> list[str]:
    """Return what the operators would refuse when the objects `after` are applied over running ones."""
    known = {identify(tree): tree for tree in before}
    return [
        f"{tree['kind']} {tree['metadata']['name']}: {what}"
        for tree in after
        if identify(tree) in known
        for what in check_update(known[identify(tree)], tree)
    ]


def identify(tree: Tree) -> tuple[str, str, str]:
    return tree["kind"], tree["metadata"].get("namespace", ""), tree["metadata"]["name"]


def check_update(old: Tree, new: Tree) -> Iterator[str]:
    """kubernetes-sigs/kueue ff69552e: validateUpdateForQueueName and ValidateImmutablePodGroupPodSpec in
    pkg/controller/jobframework/validation.go, pkg/controller/jobs/deployment/deployment_webhook.go,
    pkg/controller/jobs/leaderworkerset/leaderworkerset_webhook.go.
    """
    queues = [tree["metadata"].get("labels", {}).get(QUEUE) for tree in (old, new)]
    if new["kind"] == "DynamoGraphDeployment":
        yield from check_graph_update(old, new)
    if new["kind"] in ("Job", "Deployment", "LeaderWorkerSet", "RayService") and queues[0] != queues[1]:
        yield "the queue of a running workload is immutable"
    if new["kind"] == "LeaderWorkerSet" and None not in queues:
        shapes = [list(list_shapes(tree)) for tree in (old, new)]
        if shapes[0] != shapes[1]:
            yield "requests, ports, nodes and size are immutable with a queue"


def check_graph_update(old: Tree, new: Tree) -> Iterator[str]:
    """ai-dynamo/dynamo, deploy/operator/internal/webhook/validation: validateDynamoGraphDeploymentSpecUpdate.

    The adapter may have set any number of replicas, so a file must state none.
    """
    before, after = ({one["name"]: one for one in tree["spec"]["components"]} for tree in (old, new))
    if before.keys() != after.keys():
        yield "component topology is immutable"
    for name, component in after.items():
        if "scalingAdapter" in component and "replicas" in component:
            yield "replicas cannot be modified directly when scaling adapter is enabled"
        nodes = [one.get(name, {}).get("multinode", {}).get("nodeCount") for one in (before, after)]
        if name in before and nodes[0] != nodes[1]:
            yield "multinode.nodeCount is immutable"


def list_shapes(tree: Tree) -> Iterator[object]:
    """pkg/util/pod/pod.go: SpecShape."""
    group = tree["spec"]["leaderWorkerTemplate"]
    yield group["size"]
    for name in ("leaderTemplate", "workerTemplate"):
        spec = group[name]["spec"]
        for kind in ("initContainers", "containers"):
            yield [(one["resources"]["requests"], one.get("ports")) for one in spec[kind]]
        yield [spec.get(one) for one in ("nodeSelector", "affinity", "tolerations", "topologySpreadConstraints")]
