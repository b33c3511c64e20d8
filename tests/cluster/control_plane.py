"""A real Kubernetes control plane on loopback, and a stand-in for its kubelets and its volume provisioner.

The programs are in a folder next to the project (../shared/cluster); containers are never executed.
"""

from __future__ import annotations

import http.client
import json
import os
import platform
import shutil
import ssl
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.conftest import HANG_S

Tree = dict[str, Any]
PROGRAMS = Path(__file__).parents[2].parent / "shared" / "cluster"
CRDS = PROGRAMS.parent / "crds"
BUILDS = {"x86_64": "kube-amd64.xz", "aarch64": "kube-arm64.xz"}
KINDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
RETRY_S = 20.0
"""The scheduler tries an unschedulable pod again within half of this time after a pod or a volume has changed."""
ZONE = "topology.kubernetes.io/zone"
STORAGE: Tree = {
    "apiVersion": "storage.k8s.io/v1",
    "kind": "StorageClass",
    "provisioner": "example.com/disks",
    # As cloud disks: the volume is made in the zone of the first pod that uses it.
    "volumeBindingMode": "WaitForFirstConsumer",
}


def explain_absence() -> str | None:
    """Say why no control plane can be started here; `None` if one can."""
    build = BUILDS.get(platform.machine())
    if build is None:
        return f"there is no build of the control plane for {platform.machine()}"
    if not (PROGRAMS / build).is_file() or not CRDS.is_dir():
        return "the control plane's programs are not here (../shared/cluster, ../shared/crds)"
    for program, package in (("etcd", "etcd-server"), ("xz", "xz-utils"), ("openssl", "openssl"), ("curl", "curl")):
        if shutil.which(program) is None:
            return f"{program} is missing: apt-get install {package}"
    return None


class Refused(Exception):
    """The API server's answer was an error."""


class ControlPlane:
    """API server, controllers and scheduler in one folder; `stop` ends them."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port = folder, port
        if not (folder / "kubeconfig").exists():
            self._start()
        self.token = (folder / "tokens.csv").read_text().partition(",")[0]
        self._context = ssl._create_unverified_context()
        self._connection: http.client.HTTPSConnection | None = None

    def _start(self) -> None:
        folder, port = self.folder, self.port
        done = subprocess.run(
            ["bash", str(PROGRAMS / "start.sh"), str(folder), str(port)],
            capture_output=True, text=True, timeout=HANG_S,
        )  # fmt: skip
        if done.returncode:
            self.stop()
            raise RuntimeError(f"the control plane did not start: {done.stdout}{done.stderr}")

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def stop(self) -> None:
        subprocess.run(["bash", str(PROGRAMS / "stop.sh"), str(self.folder)], timeout=HANG_S, check=False)

    def kubectl(self, *words: str) -> str:
        """Run kubectl; `Refused` has what it writes when it fails."""
        config = ("--kubeconfig", str(self.folder / "kubeconfig"), "--cache-dir", str(self.folder / "cache"))
        env = {"PATH": os.environ["PATH"], "HOME": str(self.folder)}
        done = subprocess.run(
            [str(self.folder / "bin" / "kubectl"), *config, *words],
            capture_output=True, text=True, env=env, timeout=HANG_S,
        )  # fmt: skip
        if done.returncode:
            raise Refused(done.stderr.strip())
        return done.stdout

    def apply_kinds(self) -> None:
        """Apply the custom kinds that are missing. A request has a minute, and a busy machine may take longer."""
        files = {".".join(path.stem.split("_")[::-1]): path for path in CRDS.glob("*_*.yaml")}
        known = {one["metadata"]["name"] for one in self.get_items(KINDS)}
        if files.keys() <= known:
            return
        limit = time.monotonic() + HANG_S
        while True:
            try:
                self.kubectl("apply", "--server-side", "-f", str(CRDS))
                return
            except Refused as refused:
                if "(Timeout)" not in str(refused) or time.monotonic() > limit:
                    raise

    def call(self, method: str, path: str, body: Tree | None = None, kind: str = "application/json") -> Tree:
        """Send one request to the API server."""
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": kind}
        text = json.dumps(body) if body is not None else None
        for attempt in (1, 2):
            if self._connection is None:
                self._connection = http.client.HTTPSConnection("127.0.0.1", self.port, context=self._context)
            try:
                self._connection.request(method, path, text, headers)
                answer = self._connection.getresponse()
                read = answer.read()
                break
            except (OSError, http.client.HTTPException):
                self.close()
                if attempt == 2:
                    raise
        if answer.status >= 400:
            raise Refused(f"{answer.status} {json.loads(read).get('message', read)}")
        found: Tree = json.loads(read)
        return found

    def apply(self, tree: Tree, path: str) -> Tree:
        """Apply one object server-side and strictly, as `kubectl apply --server-side` does."""
        query = "?fieldManager=tests&force=true&fieldValidation=Strict"
        return self.call("PATCH", f"{path}/{tree['metadata']['name']}{query}", tree, "application/apply-patch+yaml")

    def get_items(self, path: str) -> list[Tree]:
        found: list[Tree] = self.call("GET", path)["items"]
        return found

    def get_pods(self, namespace: str | None = None) -> list[Tree]:
        return self.get_items(f"/api/v1/namespaces/{namespace}/pods" if namespace else "/api/v1/pods")

    # What kubelets and a provisioner do, once.

    def serve_pods(self, hold: Iterable[str] = ()) -> None:
        """Run placed pods, complete those of Jobs, remove deleted ones; pods of Jobs named in `hold` keep running."""
        for pod in self.get_pods():
            meta, status = pod["metadata"], pod["status"]
            path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
            if meta.get("deletionTimestamp"):
                self._ignore_missing("DELETE", path, {"gracePeriodSeconds": 0})
                continue
            if not pod["spec"].get("nodeName"):
                continue
            owner = next((one["name"] for one in meta.get("ownerReferences", ()) if one["kind"] == "Job"), None)
            phase = "Succeeded" if owner is not None and owner not in hold else "Running"
            if status.get("phase") in (phase, "Succeeded"):
                continue
            conditions = [{"type": one, "status": "True"} for one in ("PodScheduled", "Initialized")]
            if phase == "Running":
                conditions += [{"type": one, "status": "True"} for one in ("ContainersReady", "Ready")]
            made = {"phase": phase, "conditions": conditions, "podIP": "192.0.2.1", "podIPs": [{"ip": "192.0.2.1"}]}
            self._ignore_missing("PATCH", f"{path}/status", {"status": made}, "application/merge-patch+json")

    def provision_volumes(self) -> None:
        """Make a volume for each claim that the scheduler has chosen a node for, in the node's zone."""
        for claim in self.get_items("/api/v1/persistentvolumeclaims"):
            meta, spec = claim["metadata"], claim["spec"]
            node = meta.get("annotations", {}).get("volume.kubernetes.io/selected-node")
            if claim["status"].get("phase") != "Pending" or node is None:
                continue
            volume: Tree = {
                "apiVersion": "v1",
                "kind": "PersistentVolume",
                "metadata": {"name": f"pv-{meta['uid']}"},
                "spec": {
                    "capacity": spec["resources"]["requests"],
                    "accessModes": spec["accessModes"],
                    "storageClassName": spec["storageClassName"],
                    "persistentVolumeReclaimPolicy": "Retain",
                    "csi": {"driver": "example.com", "volumeHandle": meta["uid"]},
                    "claimRef": {"namespace": meta["namespace"], "name": meta["name"], "uid": meta["uid"],
                                 "apiVersion": "v1", "kind": "PersistentVolumeClaim"},
                },
            }  # fmt: skip
            if spec["accessModes"] == ["ReadWriteOnce"]:
                zone = self.call("GET", f"/api/v1/nodes/{node}")["metadata"]["labels"][ZONE]
                term = {"matchExpressions": [{"key": ZONE, "operator": "In", "values": [zone]}]}
                volume["spec"]["nodeAffinity"] = {"required": {"nodeSelectorTerms": [term]}}
            self.apply(volume, "/api/v1/persistentvolumes")

    def remove_volumes(self) -> None:
        for volume in self.get_items("/api/v1/persistentvolumes"):
            self._ignore_missing("DELETE", f"/api/v1/persistentvolumes/{volume['metadata']['name']}")

    def _ignore_missing(self, method: str, path: str, body: Tree | None = None, kind: str = "application/json") -> None:
        try:
            self.call(method, path, body, kind)
        except Refused as refused:
            if not str(refused).startswith("404"):
                raise

    def settle(self, namespace: str, *, hold: Iterable[str] = ()) -> list[Tree]:
        """Wait until controllers and scheduler have nothing more to do, and return the pods.

        Each pod is then placed or found unschedulable, and each controller has the pods that it wants. A pod that was
        found unschedulable is tried again when another one ends: it counts when nothing has changed for a while.
        """
        limit, waits, seen, since = time.monotonic() + HANG_S, "", "", 0.0
        while time.monotonic() < limit:
            self.provision_volumes()
            self.serve_pods(hold)
            pods = self.get_pods(namespace)
            waits = self._find_unsettled(namespace, pods, hold)
            if not waits and all(pod["spec"].get("nodeName") for pod in pods):
                return pods
            now = str([(pod["metadata"]["uid"], pod["spec"].get("nodeName")) for pod in pods])
            if now != seen:
                seen, since = now, time.monotonic()
            if not waits and time.monotonic() - since > RETRY_S:
                return pods
            time.sleep(0.1)
        raise TimeoutError(f"the cluster does not settle: {waits}")

    def _find_unsettled(self, namespace: str, pods: list[Tree], hold: Iterable[str]) -> str:
        alive = [pod for pod in pods if pod["status"].get("phase") != "Succeeded"]
        for pod in pods:
            name, placed = pod["metadata"]["name"], pod["spec"].get("nodeName")
            if pod["metadata"].get("deletionTimestamp"):
                return f"pod {name} is being deleted"
            if placed and pod["status"].get("phase") == "Pending":
                return f"pod {name} does not run yet"
            if not placed and not find_reason(pod):
                return f"pod {name} was not looked at by the scheduler"
        blocked = any(not pod["spec"].get("nodeName") for pod in pods)
        for one in self.get_items(f"/apis/apps/v1/namespaces/{namespace}/deployments"):
            meta, spec, status = one["metadata"], one["spec"], one.get("status", {})
            own = [pod for pod in alive if selects(spec["selector"], pod["metadata"].get("labels", {}))]
            if status.get("observedGeneration") != meta["generation"]:
                return f"Deployment {meta['name']} was not looked at"
            if (not blocked and status.get("updatedReplicas", 0) != spec["replicas"]) or len(own) < spec["replicas"]:
                return f"Deployment {meta['name']} has {len(own)} pods"
            if not blocked and len(own) != spec["replicas"]:
                return f"Deployment {meta['name']} has {len(own)} pods"
        for one in self.get_items(f"/apis/batch/v1/namespaces/{namespace}/jobs"):
            name, status = one["metadata"]["name"], one.get("status", {})
            own = [pod for pod in pods if pod["metadata"].get("labels", {}).get("job-name") == name]
            if not own and not status.get("succeeded") and not one["spec"].get("suspend"):
                return f"Job {name} has no pod"
            done = any(part["type"] == "Complete" and part["status"] == "True" for part in status.get("conditions", ()))
            if name not in hold and own and all(pod["spec"].get("nodeName") for pod in own) and not done:
                return f"Job {name} is not complete"
        return ""


def find_reason(pod: Tree) -> str | None:
    """Return why the scheduler placed a pod nowhere."""
    for one in pod["status"].get("conditions", ()):
        if one["type"] == "PodScheduled" and one["status"] == "False":
            return f"{one.get('reason')}: {one.get('message')}"
    return None


def selects(selector: Tree, labels: Tree) -> bool:
    return all(labels.get(name) == value for name, value in (selector.get("matchLabels") or {}).items())
