"""Starts one engine, given its environment, its weights and its variables, under a supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bedplate.engines import Engine
from bedplate.engines import get_engine as engine_by_id
from bedplate.errors import ExternalFailure
from bedplate.home import ensure_writable, get_logs_dir
from bedplate.progress import Progress
from bedplate.run.environments import EngineEnvironment, build_command
from bedplate.run.gateway import Gateway, GatewayBackend
from bedplate.run.start_phases import PhaseTeller
from bedplate.run.supervisor import Supervisor
from bedplate.values import Plan

WAIT_S = 0.1
STOP_LIMIT_S = 30.0


@dataclass(frozen=True)
class EngineStart:
    """Everything needed to start one engine process: all decisions, installations and conversions are done."""

    plan: Plan
    environment: EngineEnvironment
    folder: Path | None = None
    """The working directory: paths of prepared weights are relative to it."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to those of the launch."""
    launched: Engine | None = None
    """What is launched if that is not the plan's engine: a process of an orchestrator."""

    @property
    def engine(self) -> Engine:
        return self.launched or engine_by_id(self.plan.engine)


class PlanBackend(GatewayBackend):
    """The gateway's view of an engine that was started from a plan."""

    def __init__(self, model: str, plan: Plan, aliases: Iterable[str] = (), share: float = 1.0) -> None:
        super().__init__(model, plan.engine, plan.engine_version, aliases, share=share)
        self.slots = plan.settings.slots
        self.context_tokens = plan.settings.context_tokens
        engine = engine_by_id(plan.engine)
        self.max_connections = engine.get_max_connections(plan.settings)
        self.requests = engine.requests
        self.capabilities = engine.describe_capabilities(plan)
        self.find_mistake = engine.find_mistake


def list_adapter_fields(plan: Plan) -> list[tuple[str, dict[str, Any]]]:
    """The names of the plan's LoRA adapters, each with the fields of requests that choose it."""
    traits = engine_by_id(plan.engine).adapters
    if traits is None or traits.selects is None or not plan.workload.names_adapters:
        return []
    names = [one.served_name for one in plan.workload.adapters]
    if traits.selects == "model":
        return [(name, {}) for name in names]
    return [(name, {"lora": [{"id": number, "scale": 1.0}]}) for number, name in enumerate(names)]


def create_supervisor(
    start: EngineStart, backend: GatewayBackend, log: Path, say: Callable[[str], None] = lambda text: None
) -> Supervisor:
    """Creates the supervisor of an engine without starting it."""
    return Supervisor(
        start.plan, start.engine, start.environment, backend, log, say, start.folder,
        env=start.env, by_health=start.launched is not None,
    )  # fmt: skip


@dataclass
class RunningEngine:
    """An engine that is ready."""

    start: EngineStart
    url: str
    key: str | None
    pid: int | None
    start_s: float
    argv: tuple[str, ...]
    backend: GatewayBackend

    @property
    def has_died(self) -> bool:
        """Whether the process that was started has ended, even if it was restarted."""
        return self.backend.restarts > 0 or self.backend.state != "ready"

    @property
    def own_url(self) -> str:
        """The engine's own URL, also where `url` is a gateway's; it may require `backend.engine_key`."""
        host, port = self.backend.address or ("127.0.0.1", 0)
        return f"http://{host}:{port}"


class _EngineThread:
    """A thread whose event loop runs the supervisor of one engine, and a gateway if one is requested."""

    def __init__(self, start: EngineStart, progress: Progress, through_gateway: bool) -> None:
        self._start = start
        self._progress = progress
        self._through_gateway = through_gateway
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self.settled = threading.Event()
        self.backend = PlanBackend(start.plan.model.served_name, start.plan)
        self.started: RunningEngine | None = None
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run_loop, name=f"bedplate-{start.engine.id}")

    def stop(self) -> None:
        if self._loop is not None and self._stop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended already
                self._loop.call_soon_threadsafe(self._stop.set)

    def _run_loop(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # raised again in the thread that waits
            self.failure = error
        finally:
            self.settled.set()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        start = self._start
        backend = self.backend
        log = ensure_writable(get_logs_dir()) / f"bench-{start.engine.id}.log"
        supervisor = create_supervisor(start, backend, log, self._progress.note)
        gateway = Gateway([backend]) if self._through_gateway else None
        began = time.monotonic()
        supervisor.start()
        stopping, ready = asyncio.create_task(self._stop.wait()), asyncio.create_task(supervisor.wait_for_start())
        try:
            await asyncio.wait({stopping, ready}, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                ready.cancel()
                return
            await ready
            host, port = backend.address or ("127.0.0.1", 0)
            url, key = f"http://{host}:{port}", backend.engine_key
            argv = tuple(build_command(start.environment, start.engine.launch(start.plan, port)))
            if gateway is not None:
                url, key = f"http://127.0.0.1:{await gateway.start('127.0.0.1', 0)}", None
            pid = supervisor.process.pid if supervisor.process is not None else None
            self.started = RunningEngine(start, url, key, pid, time.monotonic() - began, argv, backend)
            self.settled.set()
            await stopping
        finally:
            stopping.cancel()
            if gateway is not None:
                await gateway.stop(0)
            await supervisor.stop()


@contextlib.contextmanager
def run_engine(start: EngineStart, progress: Progress, *, through_gateway: bool = False) -> Iterator[RunningEngine]:
    """Runs the engine and stops it at the end of the block. Raises the error that prevented its start."""
    name = start.engine.name
    host = _EngineThread(start, progress, through_gateway)
    phases = PhaseTeller(name, progress.note)
    host.thread.start()
    try:
        with progress.step(f"starting {name}"):
            while not host.settled.wait(WAIT_S):
                phases.update(host.backend.phases)
            phases.update(host.backend.phases)
        if host.failure is not None:
            raise host.failure
        if host.started is None:
            raise ExternalFailure(f"{name} did not start")
        yield host.started
    finally:
        host.stop()
        host.thread.join(STOP_LIMIT_S)
