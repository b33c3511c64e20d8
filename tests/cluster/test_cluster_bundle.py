"""The script of a bundle on a real control plane. Containers do not run: their commands run here, on a folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.cluster.conftest import Cluster
from tests.commands import run
from tests.conftest import HANG_S

from bedplate.run.supervisor import find_free_port

pytestmark = pytest.mark.cluster
TINY = Path(__file__).parents[1] / "models" / "llama"
KUBECTL = """#!{python}
import os, sys
words = sys.argv[1:]
if words[0] == "exec":
    inside = [word.replace("/models", {volume!r}) for word in words[words.index("--") + 1 :]]
    os.execvp(inside[0], inside)
os.execv({kubectl!r}, ["kubectl", "--kubeconfig", {config!r}, "--cache-dir", {cache!r}, *words])
"""


def test_apply_script_fills_the_volumes_and_applies_the_rest(cluster: Cluster, tmp_path: Path) -> None:
    plane = cluster.plane
    deploy = {"namespace": "carried", "mirror": f"127.0.0.1:{find_free_port()}/mirror"}
    described = {
        "pools": [{"name": "gpus", "accelerator": "H100 SXM", "count": 8, "gpus_per_node": 8}],
        "services": [{"name": "chat", "model": str(TINY)}],
        "operations": {"machinery": "kubernetes"},
        "deploy": deploy,
    }
    (tmp_path / "platform.yaml").write_text(json.dumps(described))
    site, volume = tmp_path / "site", tmp_path / "volume"
    made = run("bundle", "-f", str(tmp_path / "platform.yaml"), "--for", "kubernetes", "-o", str(site), "--json")
    assert made.code == 0, made.err
    (model,) = json.loads(made.out)["bundle"]["models"]
    volume.mkdir()
    marker = Path(model["marker"].replace("/models", str(volume)))
    program = tmp_path / "bin" / "kubectl"
    program.parent.mkdir()
    program.write_text(
        KUBECTL.format(
            python=sys.executable, volume=str(volume), kubectl=str(plane.folder / "bin" / "kubectl"),
            config=str(plane.folder / "kubeconfig"), cache=str(plane.folder / "cache"),
        )
    )  # fmt: skip
    program.chmod(0o755)
    over = threading.Event()

    def act_as_kubelet() -> None:
        """A pod of the Job waits in its init container until the marker is there."""
        while not over.wait(0.2):
            plane.provision_volumes()
            if marker.exists():
                plane.serve_pods()

    kubelet = threading.Thread(target=act_as_kubelet)
    kubelet.start()
    try:
        env = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}
        outputs = []
        for _ in range(2):
            done = subprocess.run([str(site / "apply.sh")], capture_output=True, text=True, env=env, timeout=HANG_S)
            assert done.returncode == 0, done.stderr
            outputs.append(done.stdout)
        assert f"copying {model['folder']} to {model['path']}" in outputs[0] and "is complete" in outputs[1]
        copied = Path(model["path"].replace("/models", str(volume)))
        assert {one.name for one in copied.iterdir()} == {one.name for one in TINY.iterdir()}
        assert plane.kubectl("get", "deploy", "chat", "-n", "carried", "-o", "name").strip()
    finally:
        over.set()
        kubelet.join()
        plane.close()
        plane.kubectl("delete", "-k", str(site / "platform"), "--ignore-not-found", "--wait=false")
