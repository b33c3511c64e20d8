"""Puts a plan into service: gateway first, engine behind it, until somebody says stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from bedplate.decide import decide, plan
from bedplate.engines import Engine, all_engines
from bedplate.engines import engine as engine_by_id
from bedplate.engines.base import cards_of
from bedplate.errors import BadQuestion, OutsideFailed
from bedplate.facts.hardware import probe
from bedplate.home import logs_dir, writable
from bedplate.run.builtin import fetch_builtin
from bedplate.run.environments import Environment, find_adopted, make_environment
from bedplate.run.gateway import Backend, Gateway
from bedplate.run.gateway.server import DEFAULT_MAX_BODY_BYTES, bind_failure
from bedplate.run.models import fetched_model, is_builtin, local_model
from bedplate.run.native import NotUsable, buildable, toolchain
from bedplate.run.prepare import prepare
from bedplate.run.progress import Progress, Silent
from bedplate.run.supervisor import Supervisor
from bedplate.run.trials import Examiner, native_environment
from bedplate.store import agreements, fingerprint, results
from bedplate.values import Decision, Endpoint, Hardware, Model, Plan, Workload, replaced
from bedplate.values.intent import Operations
from bedplate.values.units import seconds

T = TypeVar("T")

CheckAt = Callable[[str, str | None], Coroutine[Any, Any, None]]
"""Looks at the answers of an engine: its private URL, and the key that it asks for."""
Check = Callable[[Hardware, Plan, str, str | None], Coroutine[Any, Any, None]]
Build = Literal["packages", "native"]
"""Whose build of an engine: the one that its packages carry, or one that is made here of its source."""
TELL_EVERY_S = 15.0
"""Some engines take a minute to start, and more where other work has the processors."""


class Listen(msgspec.Struct, frozen=True, kw_only=True):
    """Where and for whom the endpoint answers."""

    host: str = "127.0.0.1"
    port: int = 8080
    api_key: str | None = None
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    grace_s: float = 5.0


def check_port(listen: Listen) -> None:
    """Refuses a port that is in use before anything is downloaded for it."""
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((listen.host, listen.port))
    except (OSError, OverflowError) as error:
        failure = error if isinstance(error, OSError) else OSError(errno.EINVAL, "ports go from 0 to 65535")
        raise bind_failure(failure, listen.host, listen.port) from error


def serve(
    model: str | None = None,
    *,
    workload: Workload | None = None,
    operations: Operations | None = None,
    engine: str | None = None,
    build: Build = "packages",
    listen: Listen | None = None,
    progress: Progress | None = None,
    on_decision: Callable[[Hardware, Model, Decision], None] = lambda hardware, model, decision: None,
    on_ready: Callable[[Endpoint], None] = lambda endpoint: None,
    check: Check | None = None,
    examiner: Examiner | None = None,
) -> None:
    """The main job, from a name to an endpoint: probe, decide, fetch, install, launch, and serve until told to stop.

    `check` looks at the answers beside all this, once the engine is ready; whatever it finds, serving goes on.
    `examiner` compares the answers of a native build with those of the ready-made one, before it is taken.
    """
    if os.name != "posix":
        raise OutsideFailed("serving needs Linux or macOS", hint="on Windows, run bedplate inside of WSL")
    workload = workload or Workload(origin="default")
    listen = listen or Listen()
    progress = progress or Silent()
    check_port(listen)
    hardware = probe()
    if build == "native":
        engine = _to_be_built(engine, hardware).id
    facts = local_model(model)
    if facts is None:
        facts = fetched_model(str(model), hardware.memory.available_bytes, progress)
    # What is built here is for all of this machine, and what somebody else made may be.
    for_all = build == "native" or (engine is not None and find_adopted(engine_by_id(engine)) is not None)
    decision = decide(
        hardware,
        facts,
        workload,
        engine,
        operations=operations,
        results=_remembered(results, hardware, progress),
        agreements=_remembered(agreements, hardware, progress),
        installable=not for_all,
    )
    if build == "native" and decision.engine is not None:
        decision = replaced(decision, engine_version=buildable(engine_by_id(decision.engine)).version)
    on_decision(hardware, facts, decision)
    chosen = plan(decision, facts, workload)
    if engine is not None and (words := _idle_words(engine_by_id(engine), hardware, chosen)):
        progress.note(words)
    environment = _environment(chosen, hardware, build, progress, examiner)
    if environment.server is not None or build == "native":
        chosen = replaced(chosen, engine_version=environment.version)
    steps = decision.launch.prepare if decision.launch is not None else ()
    if is_builtin(model):
        fetch_builtin(progress)
    tools = environment
    if environment.server is not None and not environment.built and any(step.kind == "convert" for step in steps):
        # Beside a server of somebody else's there may be none of the programs that make weights for it.
        tools = make_environment(engine_by_id(chosen.engine), progress, own=True)
    folder = prepare(chosen, steps, tools, progress)
    checks = functools.partial(check, hardware, chosen) if check is not None else None
    serve_plan(chosen, environment, listen, progress, on_ready, folder, checks)


def _to_be_built(engine: str | None, hardware: Hardware) -> Engine:
    """The engine that is built, after a look at whether there is anything to build it with."""
    able = [one for one in all_engines().values() if one.build is not None]
    wanted = engine_by_id(engine) if engine is not None else able[0] if len(able) == 1 else None
    if wanted is None:
        raise BadQuestion("--build native needs an engine", hint=f"--engine {' or '.join(one.id for one in able)}")
    buildable(wanted)
    if (target := wanted.target(hardware)) is not None:
        toolchain(wanted.name, target.device, os.environ)
    return wanted


def _idle_words(engine: Engine, hardware: Hardware, chosen: Plan) -> str | None:
    """That a ready-made build leaves this machine's accelerators idle, where one that is made here would not."""
    target = engine.target(hardware)
    if target is None or target.device == chosen.settings.device or engine.build is None:
        return None
    cards = " and ".join(dict.fromkeys(card.name for card in cards_of(hardware, engine.vendors)))
    return f"the ready-made {engine.name} computes on the CPU alone; for the {cards}: --build native builds it here"


def _environment(
    chosen: Plan, hardware: Hardware, build: Build, progress: Progress, examiner: Examiner | None
) -> Environment:
    engine, device = engine_by_id(chosen.engine), chosen.settings.device
    if build != "native":
        return make_environment(engine, progress, device)
    try:
        return native_environment(engine, hardware, device, progress, examiner, chosen.source or chosen.model)
    except NotUsable as error:
        if device not in engine.built_for:
            raise OutsideFailed(
                f"the native build of {engine.name} is not used: {error.why}",
                cause="; ".join(error.evidence) or None,
                hint=f"without --build native the CPU is used; bedplate engines remove {engine.id}, to build it again",
            ) from error
        for line in (f"WARNING: the native build of {engine.name} is not used: {error.why}", *error.evidence):
            progress.note(line)
        progress.note(f"the ready-made {engine.name} {engine.version} is used instead")
        return make_environment(engine, progress, device)


def _remembered(read: Callable[[str], tuple[T, ...]], hardware: Hardware, progress: Progress) -> tuple[T, ...]:
    """What the store has of this machine; one that cannot be read is no reason not to serve."""
    try:
        return read(fingerprint(hardware))
    except OutsideFailed as error:
        progress.note(f"{error.message}: what was found here earlier is not known")
        return ()


def serve_plan(
    plan: Plan,
    environment: Environment,
    listen: Listen,
    progress: Progress,
    on_ready: Callable[[Endpoint], None],
    folder: Path | None = None,
    check: CheckAt | None = None,
) -> None:
    """Serves until SIGINT or SIGTERM, with the engine started in `folder`. Raises when it cannot be kept running."""
    _run(_serve(plan, environment, listen, progress, on_ready, folder, check))


async def _serve(
    plan: Plan,
    environment: Environment,
    listen: Listen,
    progress: Progress,
    on_ready: Callable[[Endpoint], None],
    folder: Path | None,
    check: CheckAt | None,
) -> None:
    loop = asyncio.get_running_loop()
    engine = engine_by_id(plan.engine)
    name = plan.model.served_name
    backend = Backend(name, engine.id, plan.engine_version, aliases=(plan.model.name, *plan.model.files))
    backend.max_connections = engine.connections(plan.settings)
    backend.context_tokens = plan.settings.context_tokens
    gateway = Gateway([backend], api_key=listen.api_key, max_body_bytes=listen.max_body_bytes)
    logs = writable(logs_dir())
    port = await gateway.start(listen.host, listen.port)
    log_path = logs / f"{engine.id}-{port}.log"
    supervisor = Supervisor(plan, engine, environment, backend, log_path, progress.note, folder)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # ignored by nohup: it stays so
            loop.add_signal_handler(number, _stop_or_insist, stop)
    supervisor.start()
    stopping = asyncio.create_task(stop.wait())
    checking: asyncio.Task[None] | None = None
    try:
        with progress.step(f"starting {engine.name}", 100) as done:
            ready = asyncio.create_task(supervisor.ready())
            began = told = loop.time()
            while not ready.done() and not stop.is_set():
                done(round(100 * (backend.progress or 0)))
                if loop.time() - told >= TELL_EVERY_S:
                    told = loop.time()
                    progress.note(f"{engine.name} is starting, {seconds(told - began)} so far: {supervisor.last_words}")
                await asyncio.wait({ready, stopping}, timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            ready.cancel()
            return
        await ready
        # What was built up to here lives as long as the process; the collector need not look at it again and again.
        gc.collect()
        gc.freeze()
        endpoint = Endpoint(
            url=f"{gateway.url}/v1",
            model=name,
            engine=engine.id,
            engine_version=plan.engine_version,
            needs_key=listen.api_key is not None,
            pid=os.getpid(),
            log=str(log_path),
        )
        on_ready(endpoint)
        if check is not None and backend.address is not None:
            checking = asyncio.create_task(_checked(check, backend.address, backend.engine_key, progress))
        failed = asyncio.create_task(supervisor.ended())
        await asyncio.wait({stopping, failed}, return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            failure = failed.result()
            raise OutsideFailed(
                f"{engine.name} could not be kept running: {failure.message}", hint=f"{failure.hint}; log: {log_path}"
            )
    finally:
        stopping.cancel()
        if checking is not None:
            checking.cancel()
        began = loop.time()
        await gateway.stop(listen.grace_s if stop.is_set() else 0)
        await supervisor.stop()
        if stop.is_set():
            progress.note(f"stopped in {seconds(loop.time() - began)}")


async def _checked(check: CheckAt, address: tuple[str, int], key: str | None, progress: Progress) -> None:
    """Asks the engine itself and not the gateway, whose figures are of the clients' requests alone."""
    try:
        await check(f"http://{address[0]}:{address[1]}", key)
    except Exception as error:  # a mistake in a check must not end what it checks
        progress.note(f"the answers could not be checked: {error}")


def _stop_or_insist(stop: asyncio.Event) -> None:
    """The first signal stops in order. A second one does not wait: the wardens see us go and end the engines."""
    if stop.is_set():
        os._exit(130)
    stop.set()


def _run(main: Coroutine[Any, Any, None]) -> None:
    run = asyncio.run
    if sys.platform != "win32":
        with contextlib.suppress(ImportError):
            from uvloop import run
    run(main)
