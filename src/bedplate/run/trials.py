"""Runs a build on the built-in model, and the ready-made engine beside it, before anybody relies on the build."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from typing import Any, Protocol

from bedplate.decide import decide, plan
from bedplate.engines import Engine
from bedplate.errors import BedplateError, OutsideFailed
from bedplate.home import logs_dir, writable
from bedplate.progress import Progress
from bedplate.run.builtin import builtin_facts, fetch_builtin
from bedplate.run.environments import Environment, make_environment
from bedplate.run.gateway import Backend
from bedplate.run.native import Verdict, build_environment, built_here
from bedplate.run.starting import EngineStart, supervise
from bedplate.run.supervisor import Death, EngineLog, EngineProcess, explain
from bedplate.values import Hardware, Model, Plan, Workload, replaced
from bedplate.values.decision import Device

PROMPT = "The sky is blue because"
ANSWER_TOKENS = 24
ANSWER_LIMIT_S = 120.0
PATIENT = {"OMP_WAIT_POLICY": "passive"}
"""Threads that sleep while they wait for each other: on busy processors spinning made a trial ten times as long."""
LAST_WORDS_S = 5.0
"""An engine that does not answer may be dying."""


class Examiner(Protocol):
    """Asks a running engine, and judges what a build says by what the ready-made engine says."""

    async def ask(self, chosen: Plan, url: str, key: str | None) -> Any: ...

    def judge(self, chosen: Plan, built: Any, packaged: Any | None) -> Verdict: ...


def native_environment(
    engine: Engine,
    hardware: Hardware,
    device: Device,
    progress: Progress,
    examiner: Examiner | None = None,
    served: Model | None = None,
) -> Environment:
    """The engine as it is built for this machine: made, tried and compared on the first call. Raises `NotUsable`.

    It is tried on the built-in model, and only where that cannot be had on what is to be `served`.
    """
    if there := built_here(engine, hardware, device):
        return there
    # Before the build, which holds the lock that an installation takes.
    packaged = _packaged(engine, progress)
    model = builtin_facts()
    try:
        fetch_builtin(progress)
    except OutsideFailed as error:
        if served is None or not served.files:
            raise
        progress.note(f"{error.message}: the build will be tried on {served.name}, and its answers not compared")
        model, packaged = served, None
    trial = functools.partial(_tried, engine, hardware, model, packaged, examiner, progress)
    return build_environment(engine, hardware, device, trial, progress)


def _packaged(engine: Engine, progress: Progress) -> Environment | None:
    try:
        return make_environment(engine, progress, own=True)
    except BedplateError as error:
        progress.note(f"{error.message}: the build will not be compared with the ready-made {engine.name}")
        return None


def _small_plan(engine: Engine, hardware: Hardware, model: Model, *, packaged: bool) -> Plan:
    """The model on what a build is for; what is ready-made may compute on less of the machine."""
    workload = Workload(origin="default")
    return plan(decide(hardware, model, workload, engine.id, installable=packaged), model, workload)


def _tried(
    engine: Engine,
    hardware: Hardware,
    model: Model,
    packaged: Environment | None,
    examiner: Examiner | None,
    progress: Progress,
    built: Environment,
) -> Verdict:
    log = writable(logs_dir()) / f"trial-{engine.id}.log"
    chosen = replaced(_small_plan(engine, hardware, model, packaged=False), engine_version=built.version)
    try:
        with progress.step(f"trying the native build of {engine.name}"):
            said = asyncio.run(_answers(engine, built, chosen, log, examiner))
    except OutsideFailed as error:
        return Verdict(runs=False, right=False, why=error.message)
    if examiner is None:
        return Verdict(runs=True, right=True, why="it answers; what it answers was compared with nothing")
    others = None
    if packaged is not None:
        small = _small_plan(engine, hardware, model, packaged=True)
        try:
            with progress.step(f"asking the ready-made {engine.name} the same"):
                others = asyncio.run(_answers(engine, packaged, small, log, examiner))
        except OutsideFailed as error:
            progress.note(f"{error.message}: the build is not compared with it")
    return examiner.judge(chosen, said, others)


async def _answers(engine: Engine, environment: Environment, chosen: Plan, log: Path, examiner: Examiner | None) -> Any:
    """What an engine says, from its start to its end. Raises `OutsideFailed` when it dies over it."""
    backend = Backend(chosen.model.served_name, engine.id, chosen.engine_version)
    supervisor = supervise(EngineStart(chosen, environment, env=PATIENT), backend, log)
    supervisor.start()
    try:
        await supervisor.ready()
        process, address = supervisor.process, backend.address or ("127.0.0.1", 0)
        url, key = f"http://{address[0]}:{address[1]}", backend.engine_key
        said = None
        if lives := await _speaks(url, chosen.model.served_name, key):
            said = await examiner.ask(chosen, url, key) if examiner is not None else None
            lives = await _speaks(url, chosen.model.served_name, key)
        if not lives or backend.restarts:
            raise OutsideFailed(f"{engine.name} stopped: {await _reason(engine, process, supervisor.log)}")
        return said
    finally:
        await supervisor.stop()


async def _speaks(url: str, model: str, key: str | None) -> bool:
    """Whether it generates a few tokens."""
    import aiohttp

    body = {"model": model, "prompt": PROMPT, "max_tokens": ANSWER_TOKENS, "temperature": 0}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=ANSWER_LIMIT_S)
    try:
        async with (
            aiohttp.ClientSession(headers=headers, timeout=timeout) as session,
            session.post(f"{url}/v1/completions", json=body) as answer,
        ):
            await answer.read()
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


async def _reason(engine: Engine, process: EngineProcess | None, log: EngineLog) -> str:
    """How it ended; a moment may pass until that is seen."""
    if process is not None:
        await process.ended_within(LAST_WORDS_S)
    if process is None or not process.ended.is_set():
        return "it did not answer"
    return explain(Death(process.code, log.text(), was_ready=True, worked=False), engine).message
