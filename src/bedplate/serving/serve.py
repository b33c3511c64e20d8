"""Serves models until it is stopped: decides, prepares, starts the host and its engines, and stops them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bedplate.errors import BedplateError, ExternalFailure, NotPossible, UsageError
from bedplate.facts.hardware import probe
from bedplate.home import ensure_writable, get_logs_dir
from bedplate.hosting import records
from bedplate.hosting.control import ControlServer
from bedplate.hosting.endpoints import check_endpoints, make_endpoints
from bedplate.hosting.host import Host, HostedService
from bedplate.hosting.memory import MemoryLimits
from bedplate.hosting.operations import make_host_operations
from bedplate.hosting.orchestration import NAMES, Orchestration, OrchestratorSetup
from bedplate.hosting.orchestrators import choose_orchestrator
from bedplate.hosting.systemd import notify
from bedplate.hosting.tenants import CLOSED, list_warnings
from bedplate.page.page import add_live_page
from bedplate.progress import Progress, SilentProgress, StepFailure
from bedplate.run.gateway.descriptors import raise_descriptor_limit
from bedplate.run.gateway.elsewhere import RemoteAddress
from bedplate.run.gateway.server import DEFAULT_MAX_BODY_BYTES
from bedplate.run.listening import ListenOptions, check_port
from bedplate.run.ready import ModelDecision, PreparedModel, decide_engines, list_planned_cards, prepare_model
from bedplate.run.start_phases import PhaseTeller
from bedplate.run.trials import Examiner
from bedplate.values import Accelerator, Decision, Endpoint, Hardware, Model, Plan, Workload
from bedplate.values.intent import Operations
from bedplate.values.service import Build, ModelOrder, Order, ServiceRecord
from bedplate.values.units import format_seconds

if TYPE_CHECKING:
    from bedplate.bundling.serve_bundle import OpenBundle

Check = Callable[[Hardware, Plan, str, str | None], Coroutine[Any, Any, None]]
"""Checks the answers of an engine; gets its private URL and the key that it requires."""
REPORT_EVERY_S = 15.0
"""How often progress is reported while an engine starts: some take a minute, more when other processes use the CPU."""


@dataclass(frozen=True)
class ServeHooks:
    """Callbacks of the caller."""

    progress: Progress = SilentProgress()  # noqa: RUF009 - it has no state
    on_decision: Callable[[Hardware, Model, ModelOrder, Decision], None] = lambda hardware, model, wanted, decision: (
        None
    )
    on_claim: Callable[[ServiceRecord], None] = lambda record: None
    """Called when the service has its name."""
    on_ready: Callable[[Endpoint], None] = lambda endpoint: None
    check: Check | None = None
    """Checks the answers in the background once an engine is ready; serving continues whatever the result."""
    examiner: Examiner | None = None
    """Compares the answers of a native build with those of the packaged one before it is used."""


def serve(
    model: str | None = None,
    *,
    workload: Workload | None = None,
    operations: Operations | None = None,
    engine: str | None = None,
    build: Build = "packages",
    listen: ListenOptions | None = None,
    name: str | None = None,
    replicas: int = 1,
    ttl_s: float | None = None,
    memory_budget_bytes: int | None = None,
    progress: Progress | None = None,
    on_decision: Callable[[Hardware, Model, Decision], None] = lambda hardware, model, decision: None,
    on_ready: Callable[[Endpoint], None] = lambda endpoint: None,
    check: Check | None = None,
    examiner: Examiner | None = None,
) -> None:
    """Probes the hardware, chooses an engine, fetches and installs what is missing, and serves until it is stopped."""
    wanted = ModelOrder(
        model=model,
        workload=workload or Workload(origin="default"),
        operations=operations or Operations(),
        engine=engine,
        replicas=replicas,
        ttl_s=ttl_s,
    )
    order = Order(services=(wanted,), name=name, build=build, memory_budget_bytes=memory_budget_bytes)
    hooks = ServeHooks(
        progress=progress or SilentProgress(),
        on_decision=lambda hardware, facts, _, decision: on_decision(hardware, facts, decision),
        on_ready=on_ready,
        check=check,
        examiner=examiner,
    )
    serve_order(order, hooks, listen)


def serve_order(
    order: Order,
    hooks: ServeHooks,
    listen: ListenOptions | None = None,
    *,
    fallback: str | None = None,
    detached: bool = False,
) -> None:
    """Serves an order until a signal or a request to stop; `fallback` is the service's name if the order has none."""
    listen = listen or build_listen_options(order)
    check_order(order, listen)
    if order.bundle is None:
        _serve_order(order, hooks, listen, fallback, detached)
        return
    from bedplate.bundling.serve_bundle import open_bundle

    with open_bundle(Path(order.bundle), hooks.progress, order.bundle_sha256) as bundle:
        _serve_order(bundle.replace_model(order), hooks, listen, fallback, detached, bundle)


def _serve_order(
    order: Order,
    hooks: ServeHooks,
    listen: ListenOptions,
    fallback: str | None,
    detached: bool,
    bundle: OpenBundle | None = None,
) -> None:
    above = choose_orchestrator(order)
    hardware = probe()
    try:
        found = decide_engines(
            order.services if above is None else above.services,
            hardware,
            hooks.progress,
            build=order.build,
            budget_bytes=order.memory_budget_bytes,
            tell=hooks.on_decision,
            models=[bundle.facts] if bundle is not None else None,
        )
    except NotPossible:
        # Memory that others hold may be what is missing.
        _note_gpu_users(hardware.accelerators, hooks.progress)
        raise
    gpu_notes = _note_gpu_users(list_planned_cards(found), hooks.progress)
    if bundle is not None:
        bundle.check_plan(found[0], hooks.progress)
    check_names(found)
    logs = ensure_writable(get_logs_dir())
    first = found[0].name if found else order.endpoints[0].name or order.endpoints[0].model or "endpoint"
    record = records.claim_name(order.name, fallback or first, detached=detached)
    try:
        hooks.on_claim(record)
        made = [_prepare_service(one, hooks, above) for one in found]
        on = above.make_orchestration(made[0], record.name, logs) if above is not None else None
        _run(_ServeSession(order, hooks, listen, hardware, made, record, logs, on, gpu_notes).run())
    finally:
        records.forget(record)


def _note_gpu_users(cards: Sequence[Accelerator], progress: Progress) -> tuple[str, ...]:
    """Reports other processes on these GPUs. Services of this BEDPLATE_HOME are not others."""
    if not any(card.vendor == "nvidia" for card in cards):
        return ()
    from bedplate.measure.gpu_use import describe_gpu_users
    from bedplate.measure.watch import list_process_tree

    own = {pid for one in records.list_running() for pid in list_process_tree(one.pid)}
    found = describe_gpu_users(cards, {os.getpid(), *own})
    for text in found:
        progress.note(text)
    return found


def _prepare_service(one: ModelDecision, hooks: ServeHooks, above: OrchestratorSetup | None) -> PreparedModel:
    if above is not None:
        return above.prepare(one, hooks.progress, hooks.examiner)
    return prepare_model(one, hooks.progress, examiner=hooks.examiner)


def check_order(order: Order, listen: ListenOptions | None = None) -> None:
    """Checks what can be checked before anything is read, fetched or installed: the operating system, the name, the
    port, and whether the orchestrator supports the order."""
    if os.name != "posix":
        raise ExternalFailure("serving needs Linux or macOS", hint="on Windows, run bedplate in WSL")
    if order.name is not None:
        _check_name_free(order.name)
    choose_orchestrator(order)
    check_endpoints(order)
    if order.otlp_endpoint is not None:
        RemoteAddress.from_url(order.otlp_endpoint, "--otlp-endpoint")
    _check_port(listen or build_listen_options(order))


def build_listen_options(order: Order) -> ListenOptions:
    largest = order.max_body_bytes or DEFAULT_MAX_BODY_BYTES
    content = Path(order.log_content).expanduser().absolute() if order.log_content is not None else None
    return ListenOptions(
        host=order.host, port=order.port, any_port=order.any_port, api_key=order.api_key, max_body_bytes=largest,
        log_content=content, allow_hosts=order.allow_hosts, allow_origins=order.allow_origins, grace_s=order.grace_s,
    )  # fmt: skip


def check_names(found: Sequence[ModelDecision]) -> None:
    names = [one.name for one in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(
            f"more than one service serves {twice}",
            hint="to run a model several times, give one service replicas, for example replicas: 2",
        )


def _check_name_free(name: str) -> None:
    """An early check, before anything is installed; the claim of the name decides later."""
    records.check_name(name)
    if any(one.name == name for one in records.list_running()):
        raise records.make_name_taken_error(name)


def _check_port(listen: ListenOptions) -> None:
    try:
        check_port(listen)
    except ExternalFailure as error:
        for other in records.list_running():
            if other.url is not None and other.url.removesuffix("/v1").endswith(f":{listen.port}"):
                hint = f"bedplate stop {other.name}, or choose another port: --port {listen.port + 1}"
                raise ExternalFailure(f"{error.message} by the service {other.name}", hint=hint) from error
        raise


class _ServeSession:
    """One host from its start to its end."""

    def __init__(
        self,
        order: Order,
        hooks: ServeHooks,
        listen: ListenOptions,
        hardware: Hardware,
        made: Sequence[PreparedModel],
        record: ServiceRecord,
        logs: Path,
        on: Orchestration | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.notes = notes
        self.order, self.hooks, self.listen, self.hardware = order, hooks, listen, hardware
        self.made, self.record, self.logs, self.on = made, record, logs, on
        self._checks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        from bedplate.changing.operations import CHANGING_OPERATIONS

        loop = asyncio.get_running_loop()
        raise_descriptor_limit()
        room = MemoryLimits.from_hardware(self.hardware, self.order.memory_budget_bytes)
        host = Host(self.record.name, self.listen, self.hardware, self.hooks.progress, self.logs, room=room)
        host.log_format = self.order.log_format
        operations = {**make_host_operations(self.record), **CHANGING_OPERATIONS}
        control = ControlServer(host, operations)
        for text in self.notes:
            host.say(text, aloud=False)
        remote = make_endpoints(self.order, self.made)
        if remote:
            host.gateway.routing = self.order.routing or "share"
        if self.order.otlp_endpoint is not None:
            from bedplate.run.gateway.tracing import SpanExporter

            host.gateway.trace(SpanExporter(self.order.otlp_endpoint, self.record.name, host.say))
        live = add_live_page(host, operations)
        declare_tenants(host, self.order)
        # The port is bound first: without it there is no point in starting engines.
        host.gateway.starting = True
        await host.start()
        stopping = asyncio.create_task(host.stopping.wait())
        watching = asyncio.create_task(live.run())
        try:
            path = await control.start(Path(self.record.socket), self.record.name)
            if remote:
                watch = host.add_endpoints(remote, [one.tenants for one in self.order.endpoints])
                if not self.made:
                    checked = asyncio.ensure_future(watch.checked.wait())
                    await asyncio.wait({checked, stopping}, return_when=asyncio.FIRST_COMPLETED)
                    checked.cancel()
            models = tuple(dict.fromkeys([*(one.name for one in self.made), *(one.model for one in remote)]))
            requested = tuple(one.decided.wanted.model or one.name for one in self.made)
            self.record = records.update(
                self.record, socket=str(path), url=f"{host.url}/v1", models=models, requested=requested
            )
            with _handle_signals(loop, host):
                await self._serve(host, stopping)
        finally:
            began = loop.time()
            if self.record.state != "starting":
                with contextlib.suppress(BedplateError):
                    self.record = records.update(self.record, state="stopping")
            notify("STOPPING=1")
            stopping.cancel()
            watching.cancel()
            for check in self._checks:
                check.cancel()
            if not host.stopping.is_set():
                host.grace_s = 0
            await host.stop()
            if host.stopping.is_set():
                host.say(f"stopped in {format_seconds(loop.time() - began)}")
            await control.stop()
            host.log.close()

    async def _serve(self, host: Host, stopping: asyncio.Task[bool]) -> None:
        for one in self.made:
            if not await self._add_service(host, one, stopping):
                return
        # Objects created up to here live as long as the process; the garbage collector need not visit them again.
        gc.collect()
        gc.freeze()
        host.state = "ready"
        host.gateway.starting = False
        self.record = records.update(self.record, state="ready")
        host.say(f"ready at {host.url}/v1, process {os.getpid()}", aloud=False)
        self.hooks.on_ready(self._describe_endpoint(host))
        notify(f"READY=1\nSTATUS={host.url}/v1 serves {', '.join(host.gateway.models)}")
        self._start_checks(host)
        either: set[asyncio.Future[Any]] = {stopping, host.fatal}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not host.stopping.is_set():
            raise host.fatal.result()

    async def _add_service(self, host: Host, one: PreparedModel, stopping: asyncio.Task[bool]) -> bool:
        """Adds a service and waits until it is ready; returns False if the host was stopped meanwhile."""
        wanted = one.decided.wanted
        adding = asyncio.create_task(host.add_service(wanted, one, self.on))
        if wanted.is_on_demand and not wanted.preload:
            await adding
            return not host.stopping.is_set()
        loop, name = asyncio.get_running_loop(), get_engine_name(one)
        count = f"{wanted.replicas} × " if wanted.replicas > 1 else ""
        on = ""
        if self.on is not None:
            on, above = f" on {NAMES[self.on.above.orchestrator]}", self.on.above
            name = name if above.real else above.workers
        with contextlib.suppress(StepFailure), self.hooks.progress.step(f"starting {count}{name}{on}", 100) as done:
            began = reported_at = loop.time()
            phases = PhaseTeller(name, self.hooks.progress.note)
            service: HostedService | None = None
            while not adding.done() and not host.stopping.is_set():
                service = host.services.get(one.name)
                done(_compute_progress(service))
                if service is not None and service.engines:
                    phases.update(service.engines[0].backend.phases)
                if loop.time() - reported_at >= REPORT_EVERY_S and service is not None and service.engines:
                    reported_at = loop.time()
                    supervisor = service.engines[0].supervisor
                    state = supervisor.backend.phases.describe_current() or supervisor.last_words
                    self.hooks.progress.note(
                        f"{name} has been starting for {format_seconds(reported_at - began)}: {state}"
                    )
                await asyncio.wait({adding, stopping}, timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
            if service is not None and service.engines:
                phases.update(service.engines[0].backend.phases)
            if host.stopping.is_set():
                raise StepFailure
            await adding
        if host.stopping.is_set():
            adding.cancel()
            await asyncio.wait({adding})
            if not adding.cancelled():
                adding.exception()  # asyncio would print it: the engine failed while the host was being stopped
            return False
        return True

    def _describe_endpoint(self, host: Host) -> Endpoint:
        if not self.made:
            return self._describe_router(host)
        first = self.made[0]
        return Endpoint(
            url=f"{host.url}/v1",
            model=first.name,
            engine=first.plan.engine if self.on is None else self.on.above.workers,
            engine_version=first.plan.engine_version if self.on is None else self.on.above.workers_version,
            needs_key=host.gateway.needs_key,
            pid=os.getpid(),
            log=str(host.engines[0].log if host.engines else host.log.path),
            name=host.name,
            models=tuple(host.gateway.models if host.endpoints else host.services),
            on=self.on.above if self.on is not None else None,
            phases=host.engines[0].backend.phases.list_times() if host.engines else (),
        )

    def _describe_router(self, host: Host) -> Endpoint:
        """Of a host whose models are all elsewhere."""
        first = host.endpoints[0]
        return Endpoint(
            url=f"{host.url}/v1", model=first.model, engine=first.engine, engine_version="",
            needs_key=host.gateway.needs_key, pid=os.getpid(), log=str(host.log.path), name=host.name,
            models=tuple(host.gateway.models),
        )  # fmt: skip

    def _start_checks(self, host: Host) -> None:
        if self.hooks.check is None or (self.on is not None and not self.on.above.real):
            return
        for service in host.services.values():
            if service.engines and (url := service.engines[0].url) is not None:
                plan, key = service.readied.plan, service.engines[0].backend.engine_key
                work = functools.partial(self.hooks.check, self.hardware, plan, url, key)
                self._checks.append(asyncio.create_task(_run_check(work, host)))


def declare_tenants(host: Host, order: Order) -> None:
    """Sets the limits of the tenants in the order, and reports inconsistencies with the store."""
    keeper = host.gateway.keeper
    host.gateway.tenants.declare(order.tenants)
    for text in list_warnings(order.tenants, keeper.tenants if keeper is not None else ()):
        host.say(text)
    if host.gateway.needs_key and not order.tenants and not host.gateway.tenants.has_valid_key:
        host.say(CLOSED)


def get_engine_name(one: PreparedModel) -> str:
    from bedplate.engines import get_engine

    return get_engine(one.plan.engine).name


def _compute_progress(service: HostedService | None) -> int:
    """The progress, in percent, of the engine that has loaded least."""
    shares = [engine.backend.progress or 0 for engine in service.engines] if service is not None else []
    return round(100 * min(shares, default=0))


async def _run_check(check: Callable[[], Coroutine[Any, Any, None]], host: Host) -> None:
    """Runs a check of the engine's answers, directly and not through the gateway, whose metrics count only clients."""
    try:
        await check()
    except Exception as error:  # a bug in a check must not stop the service
        host.say(f"cannot check the engine's answers: {error}")


@contextlib.contextmanager
def _handle_signals(loop: asyncio.AbstractEventLoop, host: Host) -> Iterator[None]:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # under nohup it stays ignored
            loop.add_signal_handler(number, _stop_or_exit, host)
    yield


def _stop_or_exit(host: Host) -> None:
    """The first signal stops the host in order; a second one exits at once, and the wardens then end the engines."""
    if host.stopping.is_set():
        os._exit(130)
    host.request_stop()


def _run(main: Coroutine[Any, Any, None]) -> None:
    run = asyncio.run
    if sys.platform != "win32":
        with contextlib.suppress(ImportError):
            from uvloop import run
    run(main)
