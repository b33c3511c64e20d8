"""Tests a native build before its first use, and compares its answers with those of the packaged engine."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from typing import Any, Protocol

from bedplate.decide import decide, plan
from bedplate.engines import Engine
from bedplate.errors import BedplateError, ExternalFailure
from bedplate.home import ensure_writable, get_logs_dir
from bedplate.progress import Progress
from bedplate.run.builtin import fetch_builtin, read_builtin_facts
from bedplate.run.environments import EngineEnvironment, make_environment
from bedplate.run.gateway import GatewayBackend
from bedplate.run.native import BuildTestResult, build_environment, find_native_build
from bedplate.run.starting import EngineStart, create_supervisor
from bedplate.run.supervisor import EngineExit, EngineLog, EngineProcess, explain_exit
from bedplate.values import Hardware, Model, Plan, Workload, replace_fields
from bedplate.values.decision import Device

PROMPT = "The sky is blue because"
ANSWER_TOKENS = 24
ANSWER_LIMIT_S = 120.0
PATIENT = {"OMP_WAIT_POLICY": "passive"}
"""Threads block while idle: on busy CPUs, spinning made a trial ten times as long."""
EXIT_WAIT_S = 5.0
"""How long to wait for the exit of an engine that does not answer."""


class Examiner(Protocol):
    """Sends prompts to a running engine, and compares the answers of a build with those of the packaged engine."""

    async def ask(self, chosen: Plan, url: str, key: str | None) -> Any: ...

    def judge(self, chosen: Plan, built: Any, packaged: Any | None) -> BuildTestResult: ...


def provide_native_environment(
    engine: Engine,
    hardware: Hardware,
    device: Device,
    progress: Progress,
    examiner: Examiner | None = None,
    served: Model | None = None,
) -> EngineEnvironment:
    """The native build of the engine; built, tested and compared on the first call. Raises `BuildNotUsable`.

    It is tested on the built-in model, or on `served` if the built-in model cannot be downloaded.
    """
    if existing := find_native_build(engine, hardware, device):
        return existing
    # Before the build, which holds the lock that an installation needs.
    packaged = _install_packaged(engine, progress)
    model = read_builtin_facts()
    try:
        fetch_builtin(progress)
    except ExternalFailure as error:
        if served is None or not served.files:
            raise
        progress.note(f"{error.message}: the build is tested on {served.name}, and its answers are not compared")
        model, packaged = served, None
    trial = functools.partial(_run_trial, engine, hardware, model, packaged, examiner, progress)
    return build_environment(engine, hardware, device, trial, progress)


def _install_packaged(engine: Engine, progress: Progress) -> EngineEnvironment | None:
    try:
        return make_environment(engine, progress, own=True)
    except BedplateError as error:
        progress.note(f"{error.message}: the build is not compared with the packaged {engine.name}")
        return None


def _plan_trial(engine: Engine, hardware: Hardware, model: Model, *, packaged: bool) -> Plan:
    """A plan of the model for all of the hardware; `packaged`: only for what the packaged engine supports."""
    workload = Workload(origin="default")
    decision = decide(hardware, model, workload, engine.id, installable=packaged)
    return plan(decision, model, workload)


def _run_trial(
    engine: Engine,
    hardware: Hardware,
    model: Model,
    packaged: EngineEnvironment | None,
    examiner: Examiner | None,
    progress: Progress,
    built: EngineEnvironment,
) -> BuildTestResult:
    log = ensure_writable(get_logs_dir()) / f"trial-{engine.id}.log"
    chosen = replace_fields(_plan_trial(engine, hardware, model, packaged=False), engine_version=built.version)
    try:
        with progress.step(f"testing the native build of {engine.name}"):
            answers = asyncio.run(_collect_answers(engine, built, chosen, log, examiner))
    except ExternalFailure as error:
        return BuildTestResult(runs=False, right=False, why=error.message)
    if examiner is None:
        return BuildTestResult(runs=True, right=True, why="it answers; its answers were not compared")
    reference = None
    if packaged is not None:
        reference_plan = _plan_trial(engine, hardware, model, packaged=True)
        try:
            with progress.step(f"sending the same prompts to the packaged {engine.name}"):
                reference = asyncio.run(_collect_answers(engine, packaged, reference_plan, log, examiner))
        except ExternalFailure as error:
            progress.note(f"{error.message}: the build is not compared with it")
    return examiner.judge(chosen, answers, reference)


async def _collect_answers(
    engine: Engine, environment: EngineEnvironment, chosen: Plan, log: Path, examiner: Examiner | None
) -> Any:
    """Starts an engine, collects its answers and stops it. Raises `ExternalFailure` if it dies meanwhile."""
    backend = GatewayBackend(chosen.model.served_name, engine.id, chosen.engine_version)
    supervisor = create_supervisor(EngineStart(chosen, environment, env=PATIENT), backend, log)
    supervisor.start()
    try:
        await supervisor.wait_for_start()
        process, address = supervisor.process, backend.address or ("127.0.0.1", 0)
        url, key = f"http://{address[0]}:{address[1]}", backend.engine_key
        answers = None
        if works := await _generates_tokens(url, chosen.model.served_name, key):
            answers = await examiner.ask(chosen, url, key) if examiner is not None else None
            works = await _generates_tokens(url, chosen.model.served_name, key)
        if not works or backend.restarts:
            raise ExternalFailure(f"{engine.name} stopped: {await _explain_end(engine, process, supervisor.log)}")
        return answers
    finally:
        await supervisor.stop()


async def _generates_tokens(url: str, model: str, key: str | None) -> bool:
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


async def _explain_end(engine: Engine, process: EngineProcess | None, log: EngineLog) -> str:
    """Why it ended, after a short wait for its exit."""
    if process is not None:
        await process.wait_for_end(EXIT_WAIT_S)
    if process is None or not process.ended.is_set():
        return "it did not answer"
    return explain_exit(EngineExit(process.code, log.read_tail(), was_ready=True, worked=False), engine).message
