"""The host: one process that owns the gateway and the engines behind it. Engines are added and removed at run time."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from bedplate.decide.memory import fit
from bedplate.decide.placement import HOST, Need, match_cards
from bedplate.engines import KnownFailure
from bedplate.engines import get_engine as engine_by_id
from bedplate.errors import BedplateError, ExternalFailure, NotPossible, UsageError
from bedplate.hosting.endpoints import EndpointWatch
from bedplate.hosting.memory import LoadedModel, MemoryLimits, choose_unloads, sum_needs
from bedplate.hosting.orchestration import ProcessRole
from bedplate.run.gateway import BackendState, Gateway, GatewayBackend
from bedplate.run.gateway.backend import AdapterBackend
from bedplate.run.gateway.origins import OriginPolicy
from bedplate.run.gateway.recorder import RequestRecorder
from bedplate.run.log_text import format_log_entry
from bedplate.run.starting import EngineStart, PlanBackend, create_supervisor, list_adapter_fields
from bedplate.run.supervisor import EngineLog, Supervisor
from bedplate.run.trials import PATIENT
from bedplate.values.units import format_memory, format_seconds

if TYPE_CHECKING:
    from bedplate.hosting.orchestration import OrchestratedProcess, Orchestration
    from bedplate.progress import Progress
    from bedplate.run.gateway.elsewhere import RemoteBackend
    from bedplate.run.listening import ListenOptions
    from bedplate.run.ready import PreparedModel
    from bedplate.values import Hardware, Plan
    from bedplate.values.endpoint import EndpointOrchestrator
    from bedplate.values.service import ModelOrder
    from bedplate.values.workload import LoraAdapter

ALONE = ProcessRole()
DRAIN_S = 30.0
"""How long running requests may take before their engine is stopped anyway."""
LONGEST_WAIT_S = 120.0
"""A request that would wait in the queue for longer than this is rejected at once (429)."""
ROOM_WAIT_S = 30.0
"""How long a load waits for models in use to become idle when it needs their memory."""
LOOK_S = 0.5
RETRY_S = 10
MOST_NOTES = 20

ON_ATTEMPTS = 3
"""How often a request may be sent to an orchestrator while its client has received no part of a response."""

ServiceState = Literal["unloaded", "loading", "ready", "unloading", "failed"]


class OrchestratedBackend(GatewayBackend):
    """The process of an orchestrator that takes the requests for all of its replicas."""

    def __init__(
        self, model: str, plan: Plan, aliases: Iterable[str], share: float, above: EndpointOrchestrator
    ) -> None:
        super().__init__(model, above.orchestrator, above.version, aliases, share=share)
        self.slots = plan.settings.slots * above.replicas
        self.context_tokens = plan.settings.context_tokens
        # The orchestrator forwards the engine's fields, but neither its path for counting tokens nor its other APIs.
        self.requests = msgspec.structs.replace(engine_by_id(plan.engine).requests, counter=None, apis=frozenset())
        self.attempts = ON_ATTEMPTS if above.replicas > 1 else 1
        self.wants_name = True


class HostedEngine:
    """One engine of a host: what it was started from, its supervisor and its backend."""

    def __init__(
        self,
        id: str,
        service: str,
        start: EngineStart,
        need: Need,
        backend: GatewayBackend,
        supervisor: Supervisor,
        part: ProcessRole,
    ) -> None:
        self.id = id
        """Unique in its host: `llama.cpp-1`."""
        self.service = service
        """The name of the model that it serves."""
        self.start = start
        self.need = need
        self.backend = backend
        self.supervisor = supervisor
        self.part = part
        self.ready_since: float | None = None
        """On the monotonic clock."""
        self.leaving = False

    @property
    def plan(self) -> Plan:
        return self.start.plan

    @property
    def state(self) -> BackendState:
        return self.backend.state

    @property
    def pid(self) -> int | None:
        process = self.supervisor.process
        return process.pid if process is not None and not process.ended.is_set() else None

    @property
    def log(self) -> Path:
        return self.supervisor.log.path

    @property
    def url(self) -> str | None:
        """Its address behind the gateway. It may require `backend.engine_key`."""
        address = self.backend.address
        return f"http://{address[0]}:{address[1]}" if address is not None else None


class ExclusiveOperation(NamedTuple):
    """The operation that has a service exclusively: a load, an unload, a migration or a shadow."""

    doing: str
    """A description for the status: "loading", "migrating to …"."""
    task: asyncio.Task[Any]
    """The host cancels it when it stops."""
    cancel: Callable[[], None] | None = None
    """Ends it early and undoes it; its task then has the outcome. Raises if it is too late. None: not possible."""


class HostedService:
    """One model of a host, and the engines that serve it now."""

    def __init__(self, wanted: ModelOrder, readied: PreparedModel, on: Orchestration | None = None) -> None:
        self.wanted = wanted
        self.readied = readied
        """What its engines are started from. A migration replaces it."""
        self.on = on
        """The orchestrator that runs its engines; None if bedplate runs them."""
        self.name = readied.name
        self.engines: list[HostedEngine] = []
        self.failure: str | None = None
        """Why it is not served."""
        self.at_rest = asyncio.Event()
        """Cleared while its engines are being stopped."""
        self.at_rest.set()
        self.busy: ExclusiveOperation | None = None
        self.reserved = False
        """Whether its memory is counted as taken before its engines run."""
        self.loaded_adapters: dict[str, LoraAdapter] = {}
        """LoRA adapters that were loaded into its running engines, by name."""
        self.withdrawn: set[str] = set()
        """LoRA adapters of its plan that are unloaded."""

    @property
    def on_demand(self) -> bool:
        return self.wanted.is_on_demand

    @property
    def adapters(self) -> tuple[str, ...]:
        """The LoRA adapters that have names of their own."""
        if self.on is not None:
            return ()
        planned = (name for name, _ in list_adapter_fields(self.readied.plan) if name not in self.withdrawn)
        return (*planned, *self.loaded_adapters)

    @contextlib.contextmanager
    def engage(self, doing: str, cancel: Callable[[], None] | None = None) -> Iterator[None]:
        """Give the current task the service exclusively. Loads, unloads and migrations check `busy` first."""
        task = asyncio.current_task()
        if task is None or self.busy is not None:
            raise RuntimeError(f"{self.name} is busy: {self.busy.doing if self.busy is not None else 'no task'}")
        self.busy = ExclusiveOperation(doing, task, cancel)
        try:
            yield
        finally:
            self.busy = None

    @property
    def current_operation(self) -> str | None:
        """The current operation, for the status; None if there is none."""
        if self.is_unloading:
            return "unloading"
        return self.busy.doing if self.busy is not None else None

    @property
    def is_unloading(self) -> bool:
        return not self.at_rest.is_set()

    @property
    def need(self) -> Need:
        """Memory of all of its engines: of the running ones, else of those that a load would start."""
        return sum_needs(engine.need for engine in self.engines) or sum_needs(self.readied.needs)

    @property
    def in_flight(self) -> int:
        return sum(engine.backend.in_flight for engine in self.engines)

    @property
    def last_used(self) -> float:
        return max((engine.backend.last_used for engine in self.engines), default=0.0)

    @property
    def state(self) -> ServiceState:
        if self.is_unloading:
            return "unloading"
        if self.can_answer("ready"):
            return "ready"
        if self.failure is not None and self.busy is None:
            return "failed"
        return "loading" if self.engines or self.busy is not None else "unloaded"

    def check_swappable(self) -> None:
        """Raise if an orchestrator runs its engines: bedplate cannot swap those."""
        if self.on is not None:
            raise NotPossible(
                f"{self.name} runs on {self.on.above.orchestrator.capitalize()}, whose engines bedplate cannot swap",
                hint="stop it and serve it without --on to migrate or shadow it",
            )

    def can_answer(self, *states: BackendState) -> bool:
        """Whether its engines in these states include one that takes requests and one that computes."""
        parts = [engine.part for engine in self.engines if engine.state in states]
        return any(part.routed for part in parts) and any(part.computes for part in parts)


class Host:
    """The gateway and the services behind it. Only the host starts and stops their engines."""

    def __init__(
        self,
        name: str,
        listen: ListenOptions,
        hardware: Hardware,
        progress: Progress,
        logs: Path,
        *,
        room: MemoryLimits | None = None,
    ) -> None:
        self.name = name
        self.listen = listen
        self.hardware = hardware
        """As probed before the first engine was started."""
        self.room = room or MemoryLimits.from_hardware(hardware)
        self._loop = asyncio.get_running_loop()
        self.gateway = Gateway(
            [],
            api_key=listen.api_key,
            max_body_bytes=listen.max_body_bytes,
            max_wait_s=LONGEST_WAIT_S,
            keeper=RequestRecorder(content=listen.log_content, note=self._say_from_thread),
            origins=OriginPolicy(listen.allow_hosts, listen.allow_origins),
        )
        self.services: dict[str, HostedService] = {}
        """By served model name."""
        self.endpoints: tuple[RemoteBackend, ...] = ()
        """Endpoints elsewhere."""
        self.on_request: Callable[[], None] | None = None
        """Called when a request is sent to an engine. A shadow pauses then."""
        self.notes: deque[str] = deque(maxlen=MOST_NOTES)
        self.log_format: Literal["text", "json"] = "text"
        self.log = EngineLog(logs / f"{name}.log")
        self.state: Literal["starting", "ready", "stopping"] = "starting"
        self.began = time.monotonic()
        self.stopping = asyncio.Event()
        """Set when the host was asked to stop, by a signal or on the control socket."""
        self.grace_s = listen.grace_s
        self.fatal: asyncio.Future[ExternalFailure] = self._loop.create_future()
        """Done when every service has failed."""
        self._progress = progress
        self._logs = logs
        self._placing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    # lookup

    @property
    def engines(self) -> tuple[HostedEngine, ...]:
        return tuple(engine for service in self.services.values() for engine in service.engines)

    @property
    def url(self) -> str:
        return self.gateway.url

    def get_service(self, name: str | None = None) -> HostedService:
        """The service of this name; without a name, the only service."""
        if name is None and len(self.services) == 1:
            return next(iter(self.services.values()))
        found = self.services.get(name or "")
        if found is None:
            problem = f"{name} is not served here" if name else f"{len(self.services)} models are served here"
            raise UsageError(problem, hint=f"name one of {', '.join(self.services)}")
        return found

    def get_engine(self, id: str) -> HostedEngine:
        found = next((engine for engine in self.engines if engine.id == id), None)
        if found is None:
            raise UsageError(f"no engine {id} is running", hint=f"running: {', '.join(e.id for e in self.engines)}")
        return found

    def say(self, text: str, *, aloud: bool = True) -> None:
        """Write a line to the service's log and status and, with `aloud`, to the terminal."""
        self.notes.append(text)
        if aloud:
            with contextlib.suppress(OSError):  # such as a full disk
                self._progress.note(text)
        if self.log_format == "json":
            self.log.write(format_log_entry(text, self.name))
        else:
            self.log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")

    def _say_from_thread(self, text: str) -> None:
        """The same from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self.say, text)

    # start and stop

    async def start(self) -> int:
        """Listen on the port and return it."""
        try:
            port = await self.gateway.start(self.listen.host, self.listen.port)
        except ExternalFailure:
            if not self.listen.any_port:
                raise
            port = await self.gateway.start(self.listen.host, 0)
        self.gateway.wanted = self._handle_waiting_request
        self._run_later(self._unload_idle())
        return port

    def request_stop(self, grace_s: float | None = None) -> None:
        """Ask the owner of the host to call `stop`."""
        if grace_s is not None:
            self.grace_s = grace_s
        self.state = "stopping"
        self.stopping.set()

    async def stop(self) -> None:
        """Let running requests finish for `grace_s`, then stop all engines."""
        self.state = "stopping"
        loads = [service.busy.task for service in self.services.values() if service.busy is not None]
        for task in (*self._tasks, *loads):
            task.cancel()
        await self.gateway.stop(self.grace_s)
        await asyncio.gather(*self._tasks, *loads, return_exceptions=True)
        for engine in self.engines:
            engine.leaving = True
        await asyncio.gather(*(engine.supervisor.stop() for engine in self.engines))
        for service in self.services.values():
            if service.on is not None:
                service.on.close()
        self.log.close()

    # services

    def add_endpoints(self, backends: Sequence[RemoteBackend], tenants: Sequence[Sequence[str]]) -> EndpointWatch:
        """Add endpoints elsewhere. They get requests as soon as they were checked."""
        self.endpoints = tuple(backends)
        for backend, allowed in zip(backends, tenants, strict=True):
            if backend.model not in self.services:
                self.gateway.allow(backend.model, allowed)
            backend.begun = self._report_request
            self.gateway.add(backend)
            if backend.wait_s is not None:
                self.gateway.hold_while_unreachable(backend.model, backend.wait_s)
        watch = EndpointWatch(self.endpoints, self.say)
        self._run_later(watch.run())
        return watch

    async def add_service(
        self, wanted: ModelOrder, readied: PreparedModel, on: Orchestration | None = None
    ) -> HostedService:
        """Add a service, and load it unless it is loaded on its first request."""
        name = readied.name
        if name in self.services:
            raise UsageError(f"{name} is already served", hint="each model of an endpoint needs a distinct name")
        self.services[name] = service = HostedService(wanted, readied, on)
        self.gateway.allow(name, wanted.tenants)
        if wanted.is_on_demand:
            self.gateway.register_models(name, aliases=self._list_aliases(readied.plan))
            self.gateway.register_models(*service.adapters)
        if not wanted.is_on_demand or wanted.preload:
            await self.load(service)
        return service

    async def load(self, service: HostedService) -> None:
        """Start its engines when their memory is free. Raises if they do not fit or do not start."""
        if service.busy is None:
            service.busy = ExclusiveOperation("loading", asyncio.create_task(self._load(service)))
        await asyncio.shield(service.busy.task)

    async def unload(self, service: HostedService, drain_s: float = DRAIN_S) -> None:
        service.at_rest.clear()
        try:
            await asyncio.gather(*(self.remove_engine(engine, drain_s) for engine in (*service.engines,)))
        finally:
            service.at_rest.set()
            service.reserved = False

    def allow_reload(self, service: HostedService) -> None:
        """Let the next request load the service after an unload, also if it is not loaded on demand."""
        self.gateway.register_models(service.name, aliases=self._list_aliases(service.readied.plan))

    async def _load(self, service: HostedService) -> None:
        began = time.monotonic()
        try:
            await service.at_rest.wait()
            if service.engines:
                return
            await self._free_memory(service)
            service.failure = None
            try:
                for stage in self._list_stages(service):
                    await _start_all(stage)
            except BaseException:
                await self.unload(service, 0)
                raise
            if service.on is not None:
                self._run_later(service.on.keep(service.engines))
            if not service.on_demand:  # after `allow_reload`
                self.gateway.unregister_model(service.name)
            if self.state == "ready":
                self.say(f"{service.name} is loaded, after {format_seconds(time.monotonic() - began)}")
        except BedplateError as error:
            service.failure = error.summary
            raise
        finally:
            service.busy = None
            service.reserved = False

    def _list_stages(self, service: HostedService) -> Iterator[list[Coroutine[Any, Any, HostedEngine]]]:
        """The engines to start, in stages. Each stage starts when the one before it is ready."""
        readied, on = service.readied, service.on
        if on is None:
            yield [
                self.add_engine(readied.build_start(replica), service=service.name, need=need)
                for replica, need in enumerate(readied.needs)
            ]
            return
        for stage in on.stages():
            yield [self._add_member(service, on, member) for member in stage]

    async def _add_member(self, service: HostedService, on: Orchestration, member: OrchestratedProcess) -> HostedEngine:
        start = EngineStart(
            service.readied.plan, on.environment, service.readied.folder, member.env, launched=member.engine
        )
        return await self.add_engine(start, service=service.name, need=member.need, part=member.part)

    def _handle_waiting_request(self, model: str) -> None:
        """Called by the gateway when a request waits for a model without a ready engine."""
        service = self.services.get(model) or next((s for s in self.services.values() if model in s.adapters), None)
        if service is None or self.state == "stopping" or service.busy is not None:
            return
        if not service.engines or service.is_unloading:  # else the supervisor restarts an engine
            self._run_later(self._load_for_request(service))

    async def _load_for_request(self, service: HostedService) -> None:
        try:
            await self.load(service)
        except BedplateError as error:
            text = f"{service.name} could not be loaded: {service.failure}"
            if text not in self.notes:  # clients may repeat the request, and the log must not grow with each
                self.say(text)
            # Without the cause, which may name models that the client may not use.
            message = f"{service.name} cannot be loaded now: {error.message}"
            for name in (service.name, *service.adapters):
                self.gateway.give_up(name, message, retry_after_s=RETRY_S)

    async def _free_memory(self, service: HostedService) -> None:
        """Reserve its memory. Models that were used longest ago are unloaded first."""
        need = sum_needs(service.readied.needs)
        until = time.monotonic() + ROOM_WAIT_S
        while True:
            async with self._placing:
                unloads = choose_unloads(self.room, self._list_loaded(service), need)
                if unloads is not None:
                    service.reserved = True
                    for name in unloads:
                        self.say(f"unloading {name} to free memory for {service.name}")
                        await self.unload(self.services[name])
                    return
            busy = [one.name for one in self.services.values() if one is not service and one.on_demand and one.engines]
            held = [one for one in self._list_loaded(service) if one.name not in busy]
            if choose_unloads(self.room, held, need) is None:
                raise self._make_memory_error(service, need, [one.name for one in held])
            if time.monotonic() > until:
                raise self._make_memory_error(service, need, busy)
            await asyncio.sleep(LOOK_S)

    def _list_loaded(self, but: HostedService) -> list[LoadedModel]:
        return [
            LoadedModel(
                name=one.name,
                need=one.need,
                last_used=one.last_used,
                may_go=one.on_demand and one.state == "ready" and not self._is_in_use(one),
            )
            for one in self.services.values()
            if one is not but and (one.engines or one.reserved)
        ]

    def _make_memory_error(self, service: HostedService, need: Need, others: list[str]) -> NotPossible:
        loaded = f"{' and '.join(others)} cannot be unloaded now; " if others else ""
        needed = format_memory(sum(need.values()))
        return NotPossible(
            f"not enough memory for {service.name}{' next to the loaded models' if others else ''}",
            cause=f"{loaded}it needs up to {needed}; available: {self.room.describe()}",
            hint="try again when they are idle, or raise --memory-budget",
        )

    def _is_in_use(self, service: HostedService) -> bool:
        names = [service.name, *(service.adapters if service.engines else ())]
        return service.in_flight > 0 or any(self.gateway.count_waiting(name) > 0 for name in names)

    # engines

    async def add_engine(
        self,
        start: EngineStart,
        *,
        service: str | None = None,
        share: float = 1.0,
        need: Need | None = None,
        part: ProcessRole = ALONE,
    ) -> HostedEngine:
        """Start one more engine for a service and return when it is ready. Raises if it does not become ready.

        `service` is the name of the model if it differs from the plan's. `share` is its share of the requests; with 0
        it gets none until `engine.backend.share` is set. Without `need`, its memory is computed as in a plan and must
        be free next to all loaded engines. `part` is the role of the process in an orchestrated service.
        """
        name = service or start.plan.model.served_name
        owner = self.services.get(name)
        if owner is None:
            raise UsageError(f"{name} is not served here", hint=f"served: {', '.join(self.services)}")
        if need is None:
            need = self.compute_need(start.plan)
            self.check_memory(need, f"another engine for {name}")
        made = self._make_engine(owner, start, share, need, part)
        # The first engine in the list is one that takes requests.
        owner.engines.insert(0 if part.routed and part.name else len(owner.engines), made)
        if part.routed:
            self.gateway.add(made.backend)
            for adapter in made.backend.followers:
                self.gateway.add(adapter)
        made.supervisor.start()
        try:
            await made.supervisor.wait_for_start()
        except BaseException:
            await self.remove_engine(made, 0)
            raise
        made.ready_since = made.backend.last_used = time.monotonic()
        self._run_later(self._watch_engine(owner, made))
        return made

    async def remove_engine(self, engine: HostedEngine, drain_s: float = DRAIN_S) -> bool:
        """Drain the engine for `drain_s`, then stop it. Returns whether all of its requests finished."""
        engine.leaving = True
        done = not engine.part.routed
        try:
            routed = [engine.backend, *engine.backend.followers]
            if not done:
                done = all(await asyncio.gather(*(self.gateway.remove(one, within_s=drain_s) for one in routed)))
            if not done:
                await asyncio.gather(*(self.gateway.remove(one, within_s=0, cut=True) for one in routed))
        finally:
            # Also when the removal is cancelled: the engine gets no requests any more and must not stay.
            await asyncio.shield(self._stop_engine(engine))
        return done

    def compute_need(self, plan: Plan) -> Need:
        """The most memory that an engine of this plan may take on each device."""
        found = fit(
            self.hardware, plan.model, plan.workload, plan.engine, _get_label(plan), plan.parallelism, plan.settings
        )
        matched = match_cards(found.devices, self.hardware.accelerators, plan.settings.cards)
        return {HOST if card is None else f"card {card.index}": one.high_bytes for one, card in matched}

    def has_memory_for(self, need: Need) -> bool:
        """Whether this fits next to everything that is loaded now."""
        return self.room.holds([need, *(engine.need for engine in self.engines)])

    def check_memory(self, need: Need, what: str) -> None:
        if not self.has_memory_for(need):
            needed, taken = sum(need.values()), sum(sum_needs(engine.need for engine in self.engines).values())
            raise NotPossible(
                f"{what} does not fit next to the loaded engines",
                cause=f"it needs up to {format_memory(needed)}; {format_memory(taken)} of "
                f"{self.room.describe()} are taken",
            )

    def _make_engine(
        self, owner: HostedService, start: EngineStart, share: float, need: Need, part: ProcessRole
    ) -> HostedEngine:
        plan, launched = start.plan, start.engine
        backend: GatewayBackend
        if owner.on is not None and part.name:
            backend = OrchestratedBackend(owner.name, plan, self._list_aliases(plan), share, owner.on.above)
        else:
            backend = PlanBackend(owner.name, plan, self._list_aliases(plan), share)
        backend.begun = self._report_request
        if owner.on is None:
            self._add_adapters(owner, backend, plan)
        backend.rank = owner.wanted.rank
        taken = {engine.id for engine in self.engines}
        number = next(n for n in range(1, len(taken) + 2) if f"{launched.id}-{n}" not in taken)
        id = f"{launched.id}-{number}"
        if self._has_too_many_threads(plan):
            start = replace(start, env={**PATIENT, **start.env})
        supervisor = create_supervisor(start, backend, self._logs / f"{self.name}@{id}.log", self.say)
        made = HostedEngine(id, owner.name, start, need, backend, supervisor, part)
        supervisor.before_ready = functools.partial(self._reload_adapters, owner, made)
        return made

    def _add_adapters(self, owner: HostedService, backend: GatewayBackend, plan: Plan) -> None:
        """Give the LoRA adapters of a plan names of their own, if the engine lets requests choose one."""
        planned = list_adapter_fields(plan)
        fields_of = self._map_adapter_fields(owner, plan)
        # A challenger with another plan may not have all of them.
        backend.followers += [
            AdapterBackend(backend, name, fields_of[name]) for name in owner.adapters if name in fields_of
        ]
        for one in plan.workload.adapters:
            if one.served_name in fields_of:
                self.gateway.allow(one.served_name, one.tenants or owner.wanted.tenants)
        if planned and planned[0][1]:
            # The launch applies a single adapter to every request, and a slot keeps the adapters of its last request.
            backend.wants_name, backend.sent_name = True, ""
            numbers = range(len(planned))
            backend.body_fields = {"lora": [{"id": number, "scale": 0.0} for number in numbers]}

    def offer_adapters(self, owner: HostedService, backend: GatewayBackend, plan: Plan, names: list[str]) -> None:
        """Add models for adapters that an engine has loaded."""
        fields_of = self._map_adapter_fields(owner, plan)
        for name in names:
            adapter = AdapterBackend(backend, name, fields_of[name])
            backend.followers.append(adapter)
            self.gateway.add(adapter)

    @staticmethod
    def _map_adapter_fields(owner: HostedService, plan: Plan) -> dict[str, dict[str, Any]]:
        """The fields of requests for each adapter that an engine of this plan can have."""
        traits = engine_by_id(plan.engine).adapters
        loads = traits is not None and traits.load_path is not None
        return {**dict(list_adapter_fields(plan)), **({name: {} for name in owner.loaded_adapters} if loads else {})}

    async def _reload_adapters(self, owner: HostedService, engine: HostedEngine) -> None:
        """Load the adapters again that a new process of the engine does not have."""
        from bedplate.hosting.adapters import post_adapter

        traits = engine.supervisor.engine.adapters
        if traits is None or traits.load_path is None:
            return
        for name, adapter in list(owner.loaded_adapters.items()):
            try:
                await post_adapter(engine, traits.load_path, adapter)
            except NotPossible as error:
                self.say(
                    f"the adapter {name} of {owner.name} is lost: {error.message}: {error.cause or 'unknown cause'}"
                )
                del owner.loaded_adapters[name]
                for one in owner.engines:
                    for backend in [follower for follower in one.backend.followers if follower.model == name]:
                        one.backend.followers.remove(backend)
                        self._run_later(self._remove_adapter(backend))
            except ExternalFailure:
                return  # the process has ended, and the next one is asked again

    async def _remove_adapter(self, backend: AdapterBackend) -> None:
        await self.gateway.remove(backend, within_s=0, cut=True)

    def _has_too_many_threads(self, plan: Plan) -> bool:
        """Whether the engines together have more threads than there are cores. Spinning threads then block others."""
        planned = [one.readied.plan for one in self.services.values() for _ in one.readied.needs]
        running = [engine.plan for engine in self.engines if engine.part.computes]
        threads = max(sum(one.settings.threads or 0 for one in plans) for plans in (planned, [*running, plan]))
        return threads > self.hardware.cpu.allowed_physical_cores

    def _list_aliases(self, plan: Plan) -> tuple[str, ...]:
        return (plan.model.name, *plan.model.files)

    def _report_request(self) -> None:
        if self.on_request is not None:
            self.on_request()

    async def _stop_engine(self, engine: HostedEngine) -> None:
        await engine.supervisor.stop()
        owner = self.services[engine.service]
        if engine in owner.engines:
            owner.engines.remove(engine)

    async def _watch_engine(self, owner: HostedService, engine: HostedEngine) -> None:
        failure = await engine.supervisor.wait_for_failure()
        if not engine.leaving and self.state != "stopping":
            self._handle_lost_engine(owner, engine, failure)

    def _handle_lost_engine(self, owner: HostedService, engine: HostedEngine, failure: KnownFailure) -> None:
        """An engine was given up. The service runs on while it has another one, the host while it has a service."""
        if owner.can_answer("loading", "ready", "restarting", "stopped"):
            return
        owner.failure = failure.message
        if owner.on_demand:
            self._run_later(self.unload(owner, 0))
        if self.endpoints:
            return  # they may still answer
        if all(one.failure is not None and not one.on_demand for one in self.services.values()):
            name = engine.supervisor.engine.name
            error = ExternalFailure(
                f"{name} could not be kept running: {failure.message}", hint=f"{failure.hint}; log: {engine.log}"
            )
            if not self.fatal.done():
                self.fatal.set_result(error)

    async def _unload_idle(self) -> None:
        """Unload models that got no request within their TTL."""
        while True:
            await asyncio.sleep(LOOK_S)
            now = time.monotonic()
            for service in self.services.values():
                ttl_s = service.wanted.ttl_s
                if ttl_s is None or service.state != "ready" or self._is_in_use(service) or service.busy is not None:
                    continue
                if now - service.last_used > ttl_s:
                    self.say(f"unloading {service.name}: no request for {format_seconds(now - service.last_used)}")
                    self._run_later(self.unload(service))

    def _run_later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _start_all(starts: Iterable[Coroutine[Any, Any, HostedEngine]]) -> None:
    """Start all engines. When one fails, the others are cancelled."""
    tasks = [asyncio.create_task(start) for start in starts]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _get_label(plan: Plan) -> str | None:
    return plan.weights.label if plan.weights.made != "as it is" else None
