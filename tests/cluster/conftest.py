"""One control plane with all nodes for the tests of `make cluster`."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.cluster.control_plane import STORAGE, ControlPlane, explain_absence
from tests.cluster.nodes import NodeKind, create_nodes

from bedplate.run.supervisor import find_free_port


@dataclass(frozen=True)
class Cluster:
    plane: ControlPlane
    nodes: dict[str, NodeKind]


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A control plane with custom kinds, storage classes and nodes.

    `BEDPLATE_CLUSTER=FOLDER:PORT` names one that runs already.
    """
    if (reason := explain_absence()) is not None:
        pytest.skip(reason)
    kept = os.environ.get("BEDPLATE_CLUSTER")
    if kept:
        folder, _, port = kept.partition(":")
        plane = ControlPlane(Path(folder), int(port))
    else:
        plane = ControlPlane(tmp_path_factory.mktemp("control-plane"), find_port_range())
    try:
        plane.apply_kinds()
        for name in ("disks", "fast"):
            annotations = {"storageclass.kubernetes.io/is-default-class": str(name == "disks").lower()}
            made = STORAGE | {"metadata": {"name": name, "annotations": annotations}}
            plane.apply(made, "/apis/storage.k8s.io/v1/storageclasses")
        yield Cluster(plane, create_nodes(plane))
    finally:
        plane.close()
        if not kept:
            plane.stop()


def find_port_range() -> int:
    """Return the first of five ports next to each other that are free."""
    while True:
        first = find_free_port()
        if first > 65_000:
            continue
        try:
            for port in range(first, first + 5):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
