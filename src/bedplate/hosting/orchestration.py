"""The interface of an orchestrator that runs the engines of a service.

Each of its processes has its own supervisor, and one of them takes the requests from the gateway.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from bedplate.values.endpoint import EndpointOrchestrator, Orchestrator

if TYPE_CHECKING:
    from bedplate.decide.placement import Need
    from bedplate.engines import Engine
    from bedplate.hosting.host import HostedEngine
    from bedplate.progress import Progress
    from bedplate.run.environments import EngineEnvironment
    from bedplate.run.ready import ModelDecision, PreparedModel
    from bedplate.run.trials import Examiner
    from bedplate.values.service import ModelOrder

REPLICAS = 2
"""Default number of replicas. With one there is nothing to orchestrate."""
NAMES: dict[Orchestrator, str] = {"dynamo": "Dynamo", "ray": "Ray"}
MOST_ROOT_BYTES = 12
"""Longest path of the folder that holds private folders. Ray creates sockets deep below, whose paths must be short."""
_FOLDER = re.compile(r"bedplate-(\d+)-\w+")


@dataclass(frozen=True)
class ProcessRole:
    """The role of one process in its service."""

    name: str | None = None
    """None for an engine that bedplate runs itself."""
    routed: bool = True
    """Whether the gateway sends requests to it."""
    computes: bool = True
    """Whether it runs an engine."""


@dataclass(frozen=True)
class OrchestratedProcess:
    """One process of an orchestrator."""

    part: ProcessRole
    engine: Engine
    """Knows how to launch it and how to explain its log."""
    need: Need
    env: Mapping[str, str] = field(default_factory=dict)


class Orchestration(Protocol):
    """One orchestrator for one service."""

    above: EndpointOrchestrator
    environment: EngineEnvironment

    def stages(self) -> Sequence[Sequence[OrchestratedProcess]]:
        """The processes to start, in stages. Each stage starts when the one before it is ready."""

    async def keep(self, engines: Sequence[HostedEngine]) -> None:
        """Restart processes that depend on one that was lost, for as long as the service runs."""

    def close(self) -> None:
        """Remove what the processes shared, after all of them have exited."""


class OrchestratorSetup(Protocol):
    """One orchestrator for one order, before anything is decided."""

    services: tuple[ModelOrder, ...]
    """The services of the order, with the engines that this orchestrator can run."""

    def prepare(self, one: ModelDecision, progress: Progress, examiner: Examiner | None = None) -> PreparedModel:
        """Install the orchestrator, and the engine if the orchestrator does not include it."""

    def make_orchestration(self, one: PreparedModel, name: str, logs: Path) -> Orchestration:
        """The orchestration of the service of this name. Starts nothing yet."""


def make_private_folder() -> Path:
    """Create a private folder for this process. Folders of processes that have exited are removed."""
    root = Path(tempfile.gettempdir())
    if len(str(root)) > MOST_ROOT_BYTES:
        root = Path("/tmp")  # noqa: S108 - mkdtemp creates a folder that only this user may open
    _remove_stale_folders(root)
    return Path(tempfile.mkdtemp(prefix=f"bedplate-{os.getpid()}-", dir=root))


def _remove_stale_folders(root: Path) -> None:
    """Remove the folders of processes that were killed."""
    with contextlib.suppress(OSError):
        for path in root.glob("bedplate-*"):
            found = _FOLDER.fullmatch(path.name)
            if found and path.stat().st_uid == os.getuid() and not _is_running(int(found[1])):
                shutil.rmtree(path, ignore_errors=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
