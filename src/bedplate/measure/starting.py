"""An engine for a measurement: planned and started as `serve` does it, and stopped when it is done."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bedplate.decide import decide, plan
from bedplate.engines import Engine, all_engines
from bedplate.engines import engine as engine_by_id
from bedplate.errors import BedplateError, OutsideFailed
from bedplate.home import logs_dir, writable
from bedplate.run.builtin import fetch_builtin
from bedplate.run.environments import (
    Environment,
    check_version,
    command,
    find_adopted,
    find_environment,
    make_environment,
    registered_versions,
)
from bedplate.run.gateway import Backend, Gateway
from bedplate.run.models import fetched_model, is_builtin, local_model
from bedplate.run.native import NotUsable, buildable
from bedplate.run.prepare import prepare
from bedplate.run.progress import Progress
from bedplate.run.supervisor import Supervisor
from bedplate.run.trials import Examiner, native_environment
from bedplate.values import Decision, Hardware, Model, Plan, Workload, replaced

WAIT_S = 0.1
STOP_LIMIT_S = 30.0


@dataclass(frozen=True)
class Planned:
    """One engine with one model on this machine, before anything is installed or started."""

    engine: Engine
    hardware: Hardware
    facts: Model
    decision: Decision
    plan: Plan
    native: bool = False


@dataclass(frozen=True)
class Ready:
    """All that it takes to start it."""

    planned: Planned
    plan: Plan
    environment: Environment
    folder: Path | None

    @property
    def build(self) -> str:
        if self.environment.built:
            return "native"
        return "adopted" if self.environment.theirs else "wheel"


@dataclass
class Started:
    """An engine that answers."""

    ready: Ready
    url: str
    key: str | None
    pid: int | None
    start_s: float
    argv: tuple[str, ...]
    backend: Backend

    @property
    def died(self) -> bool:
        """Whether it is not the process any more that was started."""
        return self.backend.restarts > 0 or self.backend.state != "ready"


def facts_of(model: str | None, hardware: Hardware, progress: Progress) -> Model:
    """The model's facts, after fetching it where it is not here."""
    if is_builtin(model):
        fetch_builtin(progress)
    facts = local_model(model)
    return facts if facts is not None else fetched_model(str(model), hardware.memory.available_bytes, progress)


def is_installed(engine: Engine, hardware: Hardware) -> bool:
    """Whether it can be started here at once; what was built from source is started only where that is asked for."""
    target = engine.target(hardware)
    if target is None:
        return False
    if find_adopted(engine) is not None:
        return True
    devices = {target.device, "cpu" if engine.cpu else target.device}
    return engine.recipe is not None and any(find_environment(engine, device) is not None for device in devices)


def planned(engine_id: str, hardware: Hardware, facts: Model, workload: Workload, *, native: bool = False) -> Planned:
    """Raises `AnswerIsNo` where this engine cannot serve this model here, with the reason."""
    engine = engine_by_id(engine_id)
    check_version(engine)
    # Of what somebody else made or what is built here, bedplate does not know what else it may compute on.
    free = native or find_adopted(engine) is not None
    versions = registered_versions() if not native else None
    decision = decide(hardware, facts, workload, engine_id, installable=not free, versions=versions)
    if native and decision.engine is not None:
        decision = replaced(decision, engine_version=buildable(engine).version)
    return Planned(engine, hardware, facts, decision, plan(decision, facts, workload), native)


def installed_engines(hardware: Hardware) -> tuple[str, ...]:
    return tuple(engine.id for engine in all_engines().values() if is_installed(engine, hardware))


def installable_engines() -> tuple[str, ...]:
    return tuple(engine.id for engine in all_engines().values() if engine.recipe is not None)


def made_ready(one: Planned, progress: Progress, examiner: Examiner | None = None) -> Ready:
    """Installs and converts what is missing; none of that is measured."""
    engine, device = one.engine, one.plan.settings.device
    if one.native:
        try:
            environment = native_environment(engine, one.hardware, device, progress, examiner)
        except NotUsable as error:
            raise OutsideFailed(
                f"the native build of {engine.name} is not used: {error.why}", cause="; ".join(error.evidence) or None
            ) from error
    else:
        environment = make_environment(engine, progress, device)
    theirs = environment.server is not None or bool(environment.adopted)
    chosen = replaced(one.plan, engine_version=environment.version) if theirs or one.native else one.plan
    steps = one.decision.launch.prepare if one.decision.launch is not None else ()
    if theirs:
        by_hand = engine.by_hand(chosen)
        steps = tuple(step for step in steps if step not in by_hand)
    return Ready(one, chosen, environment, prepare(chosen, steps, environment, progress, one.hardware))


class _Host:
    """An engine's own thread: its event loop runs the supervisor, and the gateway where one is wanted."""

    def __init__(self, ready: Ready, progress: Progress, through_gateway: bool) -> None:
        self._ready = ready
        self._progress = progress
        self._through_gateway = through_gateway
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self.settled = threading.Event()
        self.started: Started | None = None
        self.failure: BaseException | None = None
        self.supervisor: Supervisor | None = None
        self.thread = threading.Thread(target=self._main, name=f"bedplate-{ready.planned.engine.id}")

    def stop(self) -> None:
        if self._loop is not None and self._stop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                self._loop.call_soon_threadsafe(self._stop.set)

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # for the thread that waits for it
            self.failure = error
        finally:
            self.settled.set()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        chosen, engine = self._ready.plan, self._ready.planned.engine
        backend = Backend(chosen.model.served_name, engine.id, chosen.engine_version)
        backend.max_connections = engine.connections(chosen.settings)
        backend.context_tokens = chosen.settings.context_tokens
        log = writable(logs_dir()) / f"bench-{engine.id}.log"
        self.supervisor = supervisor = Supervisor(
            chosen, engine, self._ready.environment, backend, log, self._progress.note, self._ready.folder
        )
        gateway = Gateway([backend]) if self._through_gateway else None
        began = time.monotonic()
        supervisor.start()
        stopping, ready = asyncio.create_task(self._stop.wait()), asyncio.create_task(supervisor.ready())
        try:
            await asyncio.wait({stopping, ready}, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                ready.cancel()
                return
            await ready
            host, port = backend.address or ("127.0.0.1", 0)
            url, key = f"http://{host}:{port}", backend.engine_key
            argv = tuple(command(self._ready.environment, engine.launch(chosen, port)))
            if gateway is not None:
                url, key = f"http://127.0.0.1:{await gateway.start('127.0.0.1', 0)}", None
            pid = supervisor.process.pid if supervisor.process is not None else None
            self.started = Started(self._ready, url, key, pid, time.monotonic() - began, argv, backend)
            self.settled.set()
            await stopping
        finally:
            stopping.cancel()
            if gateway is not None:
                await gateway.stop(0)
            await supervisor.stop()


@contextlib.contextmanager
def running(ready: Ready, progress: Progress, *, through_gateway: bool = False) -> Iterator[Started]:
    """The engine from its start to its end, whatever happens in between. Raises what kept it from starting."""
    host = _Host(ready, progress, through_gateway)
    host.thread.start()
    try:
        with progress.step(f"starting {ready.planned.engine.name}"):
            while not host.settled.wait(WAIT_S):
                pass
        if host.failure is not None:
            raise host.failure
        if host.started is None:
            raise OutsideFailed(f"{ready.planned.engine.name} did not start")
        yield host.started
    finally:
        host.stop()
        host.thread.join(STOP_LIMIT_S)


def why(error: BedplateError) -> str:
    """One clause."""
    return f"{error.message}: {error.cause}" if error.cause else error.message
