"""An orchestrator above the engines of a service: what it is made of, and what bedplate asks of it.

Each of its processes has a supervisor of its own, and one of them answers what the gateway passes on.
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

from bedplate.values.endpoint import Above, Orchestrator

if TYPE_CHECKING:
    from bedplate.decide.together import Need
    from bedplate.engines import Engine
    from bedplate.hosting.host import HostedEngine
    from bedplate.progress import Progress
    from bedplate.run.environments import Environment
    from bedplate.run.ready import Decided, Readied
    from bedplate.run.trials import Examiner
    from bedplate.values.service import Wanted

REPLICAS = 2
"""Where nobody says how many: with one, there is nothing to orchestrate."""
NAMES: dict[Orchestrator, str] = {"dynamo": "Dynamo", "ray": "Ray"}
MOST_ROOT_BYTES = 12
"""Of the path that private folders are made in: Ray makes sockets deep below them, and a socket's path is short."""
_FOLDER = re.compile(r"bedplate-(\d+)-\w+")


@dataclass(frozen=True)
class Part:
    """What one process is to its service."""

    name: str | None = None
    """`None`: an engine that bedplate runs itself."""
    routed: bool = True
    """Whether it answers what the gateway passes on."""
    computes: bool = True
    """Whether an engine runs in it."""


@dataclass(frozen=True)
class Member:
    """One process of an orchestrator."""

    part: Part
    engine: Engine
    """Says how it is launched, and what its log means."""
    need: Need
    env: Mapping[str, str] = field(default_factory=dict)


class Orchestration(Protocol):
    """One orchestrator for one service."""

    above: Above
    environment: Environment

    def stages(self) -> Sequence[Sequence[Member]]:
        """What is started together; each stage when the one before it is ready."""

    async def keep(self, engines: Sequence[HostedEngine]) -> None:
        """What ties their lives together, for as long as they run."""

    def close(self) -> None:
        """After all of them have ended: removes what they shared."""


class Kind(Protocol):
    """One orchestrator for one order, before anything is decided."""

    services: tuple[Wanted, ...]
    """What is to be decided for."""

    def readied(self, one: Decided, progress: Progress, examiner: Examiner | None = None) -> Readied:
        """Installs the orchestrator, and the engine where it does not bring it."""

    def orchestration(self, one: Readied, name: str, logs: Path) -> Orchestration:
        """For the service of this name; nothing is started yet."""


def private_folder() -> Path:
    """A folder of our own for as long as we run; those of processes that are gone are removed."""
    root = Path(tempfile.gettempdir())
    if len(str(root)) > MOST_ROOT_BYTES:
        root = Path("/tmp")  # noqa: S108 - what is made there is for us alone
    _sweep(root)
    return Path(tempfile.mkdtemp(prefix=f"bedplate-{os.getpid()}-", dir=root))


def _sweep(root: Path) -> None:
    """What was killed could not clean up."""
    with contextlib.suppress(OSError):
        for path in root.glob("bedplate-*"):
            found = _FOLDER.fullmatch(path.name)
            if found and path.stat().st_uid == os.getuid() and not _lives(int(found[1])):
                shutil.rmtree(path, ignore_errors=True)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
