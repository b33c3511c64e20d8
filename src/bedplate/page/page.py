"""The live page at `/` of a running endpoint, and the figures it requests once a second."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from bedplate import store
from bedplate._version import __version__
from bedplate.engines import EngineState
from bedplate.engines import get_engine as engine_by_id
from bedplate.errors import ExternalFailure
from bedplate.hosting.logs import read_last_lines
from bedplate.measure.watch import (
    EngineMetrics,
    GpuMeter,
    list_process_tree,
    measure_engine_seconds,
    measure_memory_bytes,
)
from bedplate.page.actions import PageActions
from bedplate.page.binding import NamedBottleneck, diagnose_window, keep_bottleneck
from bedplate.page.deviations import list_deviations
from bedplate.page.live import WINDOW_S, LiveRecorder, ModelSnapshot, RequestCounts, summarize_times
from bedplate.run.gateway.pages import PageRequest, PageResponse, respond_error, respond_json
from bedplate.show.live import load_live_page
from bedplate.show.probe import describe_hardware
from bedplate.values import replace_fields
from bedplate.values.live import LastVerdict, Live, LiveBottleneck, LiveEngine, LiveModel, TenantUse

if TYPE_CHECKING:
    from bedplate.hosting.control import Operation
    from bedplate.hosting.host import Host, HostedEngine, HostedService
    from bedplate.run.gateway.tenants import RateBucket, TenantState
    from bedplate.values import Hardware, Plan
    from bedplate.values.traffic import ServedRequest

PAGE, FIGURES, LOG, ACTIONS = "/", "/bedplate/live", "/bedplate/log", "/bedplate/do"
TICK_S = 1.0
LOOKED_S = 10.0
"""The page counts as open if its figures were requested in the last so many seconds."""
LOOK_S = 2.0
"""Interval between two readings of processes and engine metrics while the page is open."""
SELDOM_S = 15.0
"""The same interval while the page is closed. Only memory is read then, so that the page has a history when opened."""
LOOK_SHARE = 0.05
"""Largest share of the time that readings may take. Counting the memory pages of a large process is slow."""
JSON = "application/json"
SERVICE_LOG = "service"
MOST_LINES = 200
MOST_REQUESTS = 12
NOT_STORED = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


class EngineProbe(NamedTuple):
    """What a thread needs to read the memory and metrics of one engine."""

    id: str
    pid: int | None
    metrics: EngineMetrics | None
    on_card: bool
    cores: float = 1.0


class EngineReading(NamedTuple):
    memory_bytes: int | None = None
    gpu_bytes: int | None = None
    state: EngineState | None = None
    cpu: CpuReading | None = None
    cpu_share: float | None = None
    """CPU time since the reading before, as a share of the allowed cores."""
    gpu_share: float | None = None


class CpuReading(NamedTuple):
    at_s: float
    pid: int
    seconds: float


class DiagnosisInput(NamedTuple):
    """What a thread needs to name the bottleneck of one model."""

    tallies: Sequence[RequestCounts]
    recent: Sequence[ServedRequest]
    plan: Plan
    slots: int
    states: Sequence[EngineState]


NOTHING_SEEN: Mapping[str, EngineReading] = {}


class LiveFigures:
    """Collects the figures of a host for its page. Engine metrics are read only while the page is open."""

    def __init__(self, host: Host, operations: Mapping[str, Operation] | None = None) -> None:
        self.host = host
        self.actions = PageActions(host, operations or {})
        self.recorder = LiveRecorder()
        self.began_s = time.time()
        self._looked_at = float("-inf")
        self._seen: dict[str, EngineReading] = {}
        self._states: dict[str, deque[EngineState]] = {}
        self._metrics: dict[tuple[str, str | None], EngineMetrics] = {}
        self._bindings: dict[str, NamedBottleneck] = {}
        self._verdict: LastVerdict | None = None
        # Opened before the first engine starts: GPU memory that is already in use belongs to other processes.
        self._cards = GpuMeter.open_driver() if host.hardware.accelerators else None
        if host.gateway.keeper is not None:
            host.gateway.keeper.listeners.append(self.recorder.record_request)

    async def run(self) -> None:
        """Collect figures until cancelled."""
        looking: asyncio.Task[float] | None = None
        looked_at, pause_s = time.monotonic(), 0.0
        due = time.monotonic()
        try:
            while True:
                due = max(due + TICK_S, time.monotonic())
                await asyncio.sleep(due - time.monotonic())
                self.record_second()
                if looking is not None and looking.done():
                    looked_at, pause_s = time.monotonic(), self._compute_pause(looking)
                    looking = None
                usual_s = LOOK_S if self.is_page_open else SELDOM_S
                if looking is None and time.monotonic() - looked_at >= max(usual_s, pause_s):
                    looking = asyncio.create_task(self.read_engines())
        finally:
            self.actions.stop()
            if looking is not None:
                looking.cancel()

    def _compute_pause(self, looking: asyncio.Task[float]) -> float:
        error = looking.exception()
        if error is not None:  # an error in the page must not stop the service
            self.host.say(f"the figures of the live page could not be updated: {error!r}")
            return 60.0
        return looking.result() / LOOK_SHARE

    @property
    def is_page_open(self) -> bool:
        return time.monotonic() - self._looked_at < LOOKED_S

    def record_second(self) -> None:
        standings = {name: self._take_snapshot(service) for name, service in self.host.services.items()}
        in_flight = {member.name: member.in_flight for member in self.host.gateway.tenants.list_members()}
        self.recorder.end_second(standings, in_flight=in_flight)

    async def read_engines(self) -> float:
        """Read the memory of the engines, and their metrics while the page is open. Returns how long it took."""
        began = time.monotonic()
        is_open = self.is_page_open
        asked = [self._make_probe(engine, is_open) for engine in self.host.engines]
        self._seen = await asyncio.to_thread(probe_engines, asked, self._cards, self._seen)
        self._keep_states()
        if is_open:
            inputs = {
                name: one for name, service in self.host.services.items() if (one := self._to_diagnosis_input(service))
            }
            self._bindings = await asyncio.to_thread(diagnose_models, inputs, self.host.hardware, self._bindings)
            names = tuple({one.readied.decided.facts.name for one in self.host.services.values()})
            self._verdict = await asyncio.to_thread(find_last_verdict, self.host.hardware, names)
        return time.monotonic() - began

    # requests of the page

    def serve_page(self, visit: PageRequest) -> PageResponse | None:
        """The HTML page for browsers. Other clients get None, and with it the gateway's plain text."""
        if "text/html" not in visit.accept:
            return None
        found = load_live_page()
        return PageResponse(found.body, "text/html; charset=utf-8", found.headers)

    def serve_figures(self, visit: PageRequest) -> PageResponse:
        since_s = _parse_number(visit.query.get("since", "0"))
        may_act = self.actions.may_act(visit)
        live = self.build_live(visit.tenant or "", since_s, whole=visit.sees_all, may_act=may_act)
        return PageResponse(msgspec.json.encode(live), JSON, NOT_STORED)

    def serve_log(self, visit: PageRequest) -> PageResponse:
        """The last lines of the service's log, or of the engine `of`."""
        if not visit.sees_all:
            return respond_error(403, "only the operator and admins may read logs", "log_not_allowed")
        name = visit.query.get("of", SERVICE_LOG)
        path = self._list_logs().get(name)
        if path is None:
            return respond_error(404, f"there is no log of {name!r}", "not_found")
        return respond_json({"of": name, "lines": read_last_lines(path, MOST_LINES)}, headers=NOT_STORED)

    def _list_logs(self) -> dict[str, Path]:
        return {SERVICE_LOG: self.host.log.path, **{engine.id: engine.log for engine in self.host.engines}}

    def build_live(self, tenant: str, since_s: float = 0.0, *, whole: bool, may_act: bool = False) -> Live:
        """With `whole` the operator's view; else the tenant's view: the models it may use and its own usage."""
        host = self.host
        if whole:
            self._looked_at = time.monotonic()
        visible = self._list_visible(tenant, whole)
        members = [one for one in host.gateway.tenants.list_members() if whole or one.name == tenant]
        return Live(
            # A service has the name of its first model by default, which this tenant may not use.
            name=host.name if len(visible) == len(host.services) else "bedplate",
            version=__version__,
            state=host.state,
            needs_key=host.gateway.needs_key,
            eyes="all" if whole else "own",
            tenant=tenant,
            at_s=time.time(),
            began_s=self.began_s,
            hardware=describe_hardware(host.hardware) if whole else None,
            models=tuple(self._describe_model(one, may_act) if whole else _describe_for_tenant(one) for one in visible),
            tenants=tuple(self._describe_use(member) for member in members),
            verdict=self._verdict if whole else None,
            notes=tuple(host.notes) if whole else (),
            statuses=self.recorder.count_statuses(None if whole else tenant),
            requests=self.recorder.list_requests(MOST_REQUESTS, None if whole else tenant),
            logs=tuple(self._list_logs()) if whole else (),
            may_act=may_act,
            action=self.actions.report if may_act else None,
            history=self.recorder.build_history(host.services, since_s)
            if whole
            else self.recorder.build_tenant_history(tenant, since_s),
        )

    def _list_visible(self, tenant: str, whole: bool) -> list[HostedService]:
        services = self.host.services.values()
        return [one for one in services if whole or not one.wanted.tenants or tenant in one.wanted.tenants]

    def _describe_model(self, service: HostedService, may_act: bool) -> LiveModel:
        window = self.recorder.get_window(service.name)
        spanned_s = min(WINDOW_S, max(1, len(self.recorder.seconds)))
        decision = service.readied.decided.decision
        standing = self._take_snapshot(service)
        model = LiveModel(
            model=service.name,
            state=service.state,
            busy=service.current_operation,
            reason=service.failure,
            task=service.readied.plan.workload.task,
            quantization=service.readied.plan.weights.label,
            context_tokens=service.readied.plan.settings.context_tokens,
            why=decision.reasons,
            challengers=decision.challengers,
            engines=tuple(self._describe_engine(engine, service) for engine in service.engines),
            expected=decision.estimate,
            expected_in_flight=decision.in_flight,
            target=service.readied.plan.workload.latency,
            in_flight=standing.in_flight,
            waiting=standing.waiting,
            slots=_count_slots(service),
            planned_bytes=sum(service.need.values()),
            ttft=summarize_times(tally.ttft for tally in window),
            tpot=summarize_times(tally.tpot for tally in window),
            output_tok_s=round(sum(tally.completion_tokens for tally in window) / spanned_s, 2),
            ended=sum(tally.ended for tally in window),
            failed=sum(tally.failed for tally in window),
            binding=self._get_binding(service),
            targets=_list_targets(service) if may_act else (),
        )
        busy = [tally.standing.in_flight for tally in window if tally.standing.in_flight]
        return replace_fields(model, deviations=list_deviations(model, sum(busy) / len(busy) if busy else 0.0))

    def _get_binding(self, service: HostedService) -> LiveBottleneck:
        if service.state != "ready":
            return LiveBottleneck(text=f"No bottleneck: {service.name} is {service.state}.")
        found = self._bindings.get(service.name)
        if found is None:
            return LiveBottleneck(text="Unknown: the first measurement is not complete yet.")
        return found.found

    def _describe_engine(self, engine: HostedEngine, service: HostedService) -> LiveEngine:
        backend, seen = engine.backend, self._seen.get(engine.id, EngineReading())
        total_share = sum(other.backend.share for other in service.engines if other.backend.takes_new)
        return LiveEngine(
            id=engine.id,
            engine=engine_by_id(engine.plan.engine).name,
            version=engine.plan.engine_version,
            device=engine.plan.settings.device,
            state=backend.state,
            reason=backend.reason,
            progress=backend.progress,
            well=backend.health.is_healthy,
            share=backend.share / total_share if total_share and backend.takes_new else 0.0,
            in_flight=backend.in_flight,
            slots=engine.plan.settings.slots,
            restarts=backend.restarts,
            last_exit=backend.last_exit,
            uptime_s=time.monotonic() - engine.ready_since if engine.ready_since is not None else None,
            memory_bytes=seen.memory_bytes,
            gpu_bytes=seen.gpu_bytes,
            planned_bytes=sum(engine.need.values()),
            kv_use=seen.state.kv_use if seen.state is not None else None,
        )

    def _describe_use(self, member: TenantState) -> TenantUse:
        used = self.recorder.used.get(member.name)
        return TenantUse(
            name=member.name,
            in_flight=member.in_flight,
            requests=used.requests if used else 0,
            failed=used.failed if used else 0,
            turned_away=used.turned_away if used else 0,
            reasons=store.sort_counts(used.reasons) if used else {},
            prompt_tokens=used.prompt_tokens if used else 0,
            cached_tokens=used.cached_tokens if used else 0,
            completion_tokens=used.completion_tokens if used else 0,
            recent_tokens=self.recorder.count_tokens(member.name),
            weight=member.weight,
            requests_per_minute=member.requests.per_minute if member.requests is not None else None,
            requests_left=_count_left(member.requests),
            tokens_per_minute=member.tokens.per_minute if member.tokens is not None else None,
            tokens_left=_count_left(member.tokens),
            most_in_flight=member.max_in_flight,
        )

    # readings

    def _take_snapshot(self, service: HostedService) -> ModelSnapshot:
        is_routed = self.host.gateway.find_route(service.name) is not None
        seen = [self._seen[engine.id] for engine in service.engines if engine.id in self._seen]
        kv = [one.state.kv_use for one in seen if one.state is not None and one.state.kv_use is not None]
        return ModelSnapshot(
            in_flight=service.in_flight,
            waiting=self.host.gateway.count_waiting(service.name) if is_routed else 0,
            memory_bytes=_sum(one.memory_bytes for one in seen),
            gpu_bytes=_sum(one.gpu_bytes for one in seen),
            kv_use=max(kv, default=None),
            cpu_share=_add_shares(one.cpu_share for one in seen),
            gpu_share=max((one.gpu_share for one in seen if one.gpu_share is not None), default=None),
        )

    def _make_probe(self, engine: HostedEngine, with_metrics: bool) -> EngineProbe:
        url, key = engine.url, engine.backend.engine_key
        metrics = None
        if with_metrics and url is not None and engine.state == "ready":
            metrics = self._metrics.get((url, key))
            if metrics is None:
                metrics = self._metrics[url, key] = EngineMetrics(
                    url, key, engine_by_id(engine.plan.engine).read_metrics
                )
        on_card = engine.plan.settings.device != "cpu"
        return EngineProbe(engine.id, engine.pid, metrics, on_card, self.host.hardware.cpu.allowed_cores)

    def _keep_states(self) -> None:
        """Keep the engine states of the last minute, and drop those of engines that were removed."""
        current = {engine.id for engine in self.host.engines}
        self._states = {id: kept for id, kept in self._states.items() if id in current}
        for id, seen in self._seen.items():
            if seen.state is not None and id in current:
                self._states.setdefault(id, deque(maxlen=round(WINDOW_S / LOOK_S))).append(seen.state)
        urls = {engine.url for engine in self.host.engines}
        self._metrics = {key: metrics for key, metrics in self._metrics.items() if key[0] in urls}

    def _to_diagnosis_input(self, service: HostedService) -> DiagnosisInput | None:
        """What the diagnosis needs. If several kinds of engine share the requests, it is about the largest share."""
        ready = [engine for engine in service.engines if engine.state == "ready"]
        if not ready:
            return None
        plan = max(ready, key=lambda engine: engine.backend.share).plan
        same = [engine for engine in ready if engine.plan.engine == plan.engine]
        return DiagnosisInput(
            tallies=self.recorder.get_window(service.name),
            recent=[one for one in self.recorder.recent.get(service.name, ()) if one.engine == plan.engine],
            plan=plan,
            slots=sum(engine.plan.settings.slots for engine in same),
            states=tuple(self._states.get(same[0].id, ())) if len(same) == 1 else (),
        )


def add_live_page(host: Host, operations: Mapping[str, Operation] | None = None) -> LiveFigures:
    """Add the page and its figures to the host's gateway. The caller runs `run` of the returned object.

    `operations` are those of the control socket; the page offers some of them.
    """
    figures = LiveFigures(host, operations)
    host.gateway.handed |= {PAGE: figures.serve_page, FIGURES: figures.serve_figures, LOG: figures.serve_log}
    host.gateway.actions[ACTIONS] = figures.actions.handle
    return figures


def probe_engines(
    asked: Sequence[EngineProbe], cards: GpuMeter | None, before: Mapping[str, EngineReading] = NOTHING_SEEN
) -> dict[str, EngineReading]:
    """Read the memory, CPU time and metrics of each engine. Blocks."""
    trees = {one.id: list_process_tree(one.pid) if one.pid is not None else [] for one in asked}
    on_cards = _read_gpu_bytes({one.id: trees[one.id] for one in asked if one.on_card and trees[one.id]}, cards)
    utilization = cards.read_utilization() if cards is not None and any(one.on_card for one in asked) else None
    found = {}
    for one in asked:
        cpu = _read_cpu(one.pid, trees[one.id])
        found[one.id] = EngineReading(
            measure_memory_bytes(trees[one.id]),
            on_cards.get(one.id),
            one.metrics.read_state() if one.metrics is not None else None,
            cpu,
            _compute_cpu_share(before[one.id].cpu if one.id in before else None, cpu, one.cores),
            utilization if one.on_card else None,
        )
    return found


def _read_cpu(pid: int | None, tree: Sequence[int]) -> CpuReading | None:
    seconds = measure_engine_seconds(tree)
    return CpuReading(time.monotonic(), pid, seconds) if pid is not None and seconds is not None else None


def _compute_cpu_share(before: CpuReading | None, now: CpuReading | None, cores: float) -> float | None:
    if before is None or now is None or before.pid != now.pid or now.at_s <= before.at_s:
        return None
    return round(min(1.0, max(0.0, now.seconds - before.seconds) / ((now.at_s - before.at_s) * (cores or 1.0))), 3)


def _read_gpu_bytes(trees: Mapping[str, Sequence[int]], cards: GpuMeter | None) -> dict[str, int | None]:
    """GPU memory by engine. Empty if the driver does not name processes, as in a container, and engines share a GPU."""
    if cards is None or not trees:
        return {}
    found = {id: cards.measure_gpu_bytes(pids) for id, pids in trees.items()}
    together = cards.measure_gpu_bytes([pid for pids in trees.values() for pid in pids])
    if len(found) > 1 and together is not None and sum(size or 0 for size in found.values()) > 1.01 * together:
        return {}
    return found


def diagnose_models(
    inputs: Mapping[str, DiagnosisInput],
    hardware: Hardware,
    before: Mapping[str, NamedBottleneck],
    now_s: float | None = None,
) -> dict[str, NamedBottleneck]:
    """The bottleneck of each model; `before`: those that were found last. Blocks."""
    now_s = time.time() if now_s is None else now_s
    found = {}
    for name, one in inputs.items():
        last = before.get(name)
        named = last.get_limit(one.plan, one.slots, now_s) if last is not None else None
        new = diagnose_window(one.tallies, one.recent, one.plan, one.slots, hardware, one.states, now_s, named)
        found[name] = keep_bottleneck(new, last, one.plan, one.slots, now_s)
    return found


def find_last_verdict(hardware: Hardware, models: Sequence[str]) -> LastVerdict | None:
    """The newest stored verdict for any of these models on this machine. Blocks."""
    machine = store.compute_fingerprint(hardware)
    try:
        found = [one for model in models if (one := store.read_last_verdict(machine, model)) is not None]
    except ExternalFailure:  # `bedplate compare` reports an unreadable store
        return None
    if not found:
        return None
    at, verdict = max(found, key=lambda one: one[0])
    return LastVerdict(
        at=at,
        answer=verdict.answer,
        text=verdict.text,
        would_prove=verdict.would_prove,
        incumbent=verdict.a.engine,
        challenger=verdict.b.engine,
    )


def _describe_for_tenant(service: HostedService) -> LiveModel:
    plan = service.readied.plan
    return LiveModel(
        model=service.name,
        state=service.state,
        busy=service.current_operation,
        task=plan.workload.task,
        quantization=plan.weights.label,
        context_tokens=plan.settings.context_tokens,
        why=service.readied.decided.decision.reasons,
        engines=tuple(
            LiveEngine(
                id=engine.id,
                engine=engine_by_id(engine.plan.engine).name,
                version=engine.plan.engine_version,
                device=engine.plan.settings.device,
                state=engine.state,
                progress=engine.backend.progress,
            )
            for engine in service.engines
        ),
    )


def _list_targets(service: HostedService) -> tuple[str, ...]:
    """The engines that the plan considers possible here, except the one in service. A migration decides again."""
    if service.on is not None:
        return ()
    decision = service.readied.decided.decision
    possible = [one.engine for one in decision.challengers]
    possible += [one.engine for one in decision.alternatives if one.fits]
    possible += [one.engine for one in decision.refused if one.kind == "outranked"]
    return tuple(dict.fromkeys(one for one in possible if one != service.readied.plan.engine))


def _add_shares(shares: Iterable[float | None]) -> float | None:
    known = [share for share in shares if share is not None]
    return min(1.0, sum(known)) if known else None


def _count_left(bucket: RateBucket | None) -> int | None:
    return max(0, int(bucket.read_level(time.monotonic()))) if bucket is not None else None


def _count_slots(service: HostedService) -> int | None:
    ready = [engine.plan.settings.slots for engine in service.engines if engine.backend.takes_new]
    return sum(ready) if ready else None


def _sum(sizes: Iterable[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return sum(known) if known else None


def _parse_number(text: str) -> float:
    """A number in a query, or 0 if it is not one."""
    try:
        return float(text)
    except ValueError:
        return 0.0
