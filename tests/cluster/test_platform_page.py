"""The commands of docs/platform.md, in their order and word for word, on a real control plane."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster.conftest import Cluster
from tests.conftest import HANG_S, wait_for

pytestmark = pytest.mark.cluster
PAGE = Path(__file__).parents[2] / "docs" / "platform.md"
EXAMPLE = PAGE.parents[1] / "examples" / "platform.yaml"
NOT_RUN = {
    "docker ": "there is no container engine",
    "curl ": "no pod runs here",
    "kubectl exec ": "no pod runs here",
}
APPLIED = "## 4. Apply"
UPDATED = "## 8. Updates"


def list_commands(text: str) -> list[tuple[str, list[str]]]:
    """The commands of all console blocks, each with the output that the page shows."""
    found: list[tuple[str, list[str]]] = []
    for block in re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            else:
                found[-1][1].append(line)
    return found


def get_section(heading: str) -> str:
    return PAGE.read_text(encoding="utf-8").partition(f"{heading}\n")[2].partition("\n## ")[0]


class Shell:
    """Runs commands of the page in one folder, while a thread stands in for the kubelets."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.plane, self.folder = cluster.plane, folder
        path = f"{Path(sys.executable).parent}:{self.plane.folder / 'bin'}:{os.environ['PATH']}"
        self._env = {
            **os.environ, "PATH": path, "KUBECONFIG": str(self.plane.folder / "kubeconfig"),
            "KUBECACHEDIR": str(self.plane.folder / "cache"), "BEDPLATE_HOME": str(folder / "home"), "NO_COLOR": "1",
        }  # fmt: skip

    def run(self, command: str, *, code: int = 0) -> str:
        done = subprocess.run(
            ["bash", "-c", command], cwd=self.folder, env=self._env, capture_output=True, text=True, timeout=HANG_S
        )
        assert done.returncode == code, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def run_all(self, commands: list[tuple[str, list[str]]]) -> int:
        """Run what can run here, and compare the output; returns how many did."""
        count = 0
        for command, expected in commands:
            if not command.startswith(tuple(NOT_RUN)):
                shown = self.run(command)
                assert not expected or shown.splitlines() == expected, (command, shown)
                count += 1
        return count


def test_commands_of_the_page_in_their_order(cluster: Cluster, tmp_path: Path) -> None:
    shell, plane = Shell(cluster, tmp_path), cluster.plane
    (tmp_path / "platform.yaml").write_text(EXAMPLE.read_text(encoding="utf-8"), encoding="utf-8")
    text = PAGE.read_text(encoding="utf-8").partition("## Air-gapped")[0]
    job = re.search(r"^```yaml\n(apiVersion: batch/v1\n.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert job is not None
    (tmp_path / "sweep.yaml").write_text(job[1], encoding="utf-8")
    over = threading.Event()

    def act_as_kubelet() -> None:
        while not over.wait(0.2):
            plane.provision_volumes()
            plane.serve_pods()

    kubelet = threading.Thread(target=act_as_kubelet)
    kubelet.start()
    try:
        assert shell.run_all(list_commands(text)) > 15
        before = find_gateway(shell)
        change_model(tmp_path / "platform.yaml")
        shell.run("bedplate plan -f platform.yaml --emit kubernetes -o platform/")
        assert "Qwen3-14B" in shell.run("kubectl diff --server-side -k platform", code=1)
        shell.run_all(list_commands(get_section(APPLIED)))
        assert find_gateway(shell) != before, "another configuration replaces the gateways"
        engine = yaml.safe_load(shell.run("kubectl get deployment code -n serving -o yaml"))
        assert "qwen3-14b" in str(engine["spec"]["template"]).lower()
    finally:
        over.set()
        kubelet.join()
        plane.close()
        shell.run("kubectl delete -k platform --ignore-not-found --wait=false")
        wait_for(lambda: remove_pods(cluster), "the namespaces to be deleted")
        plane.remove_volumes()


def change_model(intent: Path) -> None:
    text = intent.read_text(encoding="utf-8")
    assert "Qwen/Qwen3-32B" in text
    intent.write_text(text.replace("Qwen/Qwen3-32B", "Qwen/Qwen3-14B"), encoding="utf-8")


def find_gateway(shell: Shell) -> Any:
    template = yaml.safe_load(shell.run("kubectl get deployment bedplate-gateway -n serving -o yaml"))
    return template["spec"]["template"]["metadata"]["annotations"]


def remove_pods(cluster: Cluster) -> bool:
    cluster.plane.serve_pods()
    return not cluster.plane.get_pods()


def test_page_has_no_other_commands_that_are_not_run() -> None:
    commands = [command for command, _ in list_commands(PAGE.read_text(encoding="utf-8").partition("## Air-gapped")[0])]
    skipped = [one for one in commands if one.startswith(tuple(NOT_RUN))]
    assert len(skipped) <= 5 and len(list_commands(get_section(UPDATED))) >= 2
