"""The live page at `/` of a running endpoint, and the figures it requests once a second."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from bedplate import store
from bedplate._version import __version__
from bedplate.engines import EngineState
from bedplate.engines import engine as engine_by_id
from bedplate.errors import OutsideFailed
from bedplate.measure.watch import Cards, Metrics, memory_bytes, tree_of
from bedplate.page.binding import binding
from bedplate.page.live import WINDOW_S, Recorder, Standing, Tally, times
from bedplate.run.gateway.pages import Shown, Visit
from bedplate.show.live import live_page
from bedplate.show.probe import one_line
from bedplate.values.live import Binding, LastVerdict, Live, LiveEngine, LiveModel, TenantUse

if TYPE_CHECKING:
    from bedplate.hosting.host import Host, HostedEngine, HostedService
    from bedplate.run.gateway.tenants import Bucket, Member
    from bedplate.values import Hardware, Plan
    from bedplate.values.traffic import ServedRequest

PAGE, FIGURES = "/", "/bedplate/live"
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


class Asked(NamedTuple):
    """What a thread needs to read the memory and metrics of one engine."""

    id: str
    pid: int | None
    metrics: Metrics | None
    on_card: bool


class Seen(NamedTuple):
    memory_bytes: int | None = None
    gpu_bytes: int | None = None
    state: EngineState | None = None


class ToJudge(NamedTuple):
    """What a thread needs to name the bottleneck of one model."""

    tallies: Sequence[Tally]
    recent: Sequence[ServedRequest]
    plan: Plan
    slots: int
    states: Sequence[EngineState]


class LiveFigures:
    """Collects the figures of a host for its page. Engine metrics are read only while the page is open."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.recorder = Recorder()
        self.began_s = time.time()
        self._looked_at = float("-inf")
        self._seen: dict[str, Seen] = {}
        self._states: dict[str, deque[EngineState]] = {}
        self._metrics: dict[tuple[str, str | None], Metrics] = {}
        self._bindings: dict[str, Binding] = {}
        self._verdict: LastVerdict | None = None
        # Opened before the first engine starts: GPU memory that is already in use belongs to other processes.
        self._cards = Cards.here() if host.hardware.accelerators else None
        if host.gateway.keeper is not None:
            host.gateway.keeper.listeners.append(self.recorder.hear)

    async def run(self) -> None:
        """Collect figures until cancelled."""
        looking: asyncio.Task[float] | None = None
        looked_at, pause_s = time.monotonic(), 0.0
        due = time.monotonic()
        try:
            while True:
                due = max(due + TICK_S, time.monotonic())
                await asyncio.sleep(due - time.monotonic())
                self.tick()
                if looking is not None and looking.done():
                    looked_at, pause_s = time.monotonic(), self._pause_after(looking)
                    looking = None
                usual_s = LOOK_S if self.is_looked_at else SELDOM_S
                if looking is None and time.monotonic() - looked_at >= max(usual_s, pause_s):
                    looking = asyncio.create_task(self.look())
        finally:
            if looking is not None:
                looking.cancel()

    def _pause_after(self, looking: asyncio.Task[float]) -> float:
        error = looking.exception()
        if error is not None:  # an error in the page must not stop the service
            self.host.say(f"the figures of the live page could not be updated: {error!r}")
            return 60.0
        return looking.result() / LOOK_SHARE

    @property
    def is_looked_at(self) -> bool:
        return time.monotonic() - self._looked_at < LOOKED_S

    def tick(self) -> None:
        standings = {name: self._standing(service) for name, service in self.host.services.items()}
        in_flight = {member.name: member.in_flight for member in self.host.gateway.tenants.members()}
        self.recorder.close(standings, in_flight=in_flight)

    async def look(self) -> float:
        """Read the memory of the engines, and their metrics while the page is open. Returns how long it took."""
        began = time.monotonic()
        is_open = self.is_looked_at
        asked = [self._asked(engine, is_open) for engine in self.host.engines]
        self._seen = await asyncio.to_thread(looked, asked, self._cards)
        self._keep_states()
        if is_open:
            inputs = {name: one for name, service in self.host.services.items() if (one := self._to_judge(service))}
            self._bindings = await asyncio.to_thread(judged, inputs, self.host.hardware)
            names = tuple({one.readied.decided.facts.name for one in self.host.services.values()})
            self._verdict = await asyncio.to_thread(last_verdict, self.host.hardware, names)
        return time.monotonic() - began

    # requests of the page

    def page(self, visit: Visit) -> Shown | None:
        """The HTML page for browsers. Other clients get None, and with it the gateway's plain text."""
        if "text/html" not in visit.accept:
            return None
        found = live_page()
        return Shown(found.body, "text/html; charset=utf-8", found.headers)

    def figures(self, visit: Visit) -> Shown:
        live = self.live(visit.tenant or "", _number(visit.query.get("since", "0")), whole=visit.sees_all)
        return Shown(
            msgspec.json.encode(live), JSON, {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
        )

    def live(self, tenant: str, since_s: float = 0.0, *, whole: bool) -> Live:
        """With `whole` the operator's view; else the tenant's view: the models it may use and its own usage."""
        host = self.host
        if whole:
            self._looked_at = time.monotonic()
        members = [one for one in host.gateway.tenants.members() if whole or one.name == tenant]
        return Live(
            name=host.name,
            version=__version__,
            state=host.state,
            needs_key=host.gateway.needs_key,
            eyes="all" if whole else "own",
            tenant=tenant,
            at_s=time.time(),
            began_s=self.began_s,
            hardware=one_line(host.hardware) if whole else None,
            models=tuple(self._model(one) if whole else _seen_by_tenant(one) for one in self._shown_to(tenant, whole)),
            tenants=tuple(self._use(member) for member in members),
            verdict=self._verdict if whole else None,
            notes=tuple(host.notes) if whole else (),
            history=self.recorder.history(host.services, since_s)
            if whole
            else self.recorder.history_of(tenant, since_s),
        )

    def _shown_to(self, tenant: str, whole: bool) -> list[HostedService]:
        services = self.host.services.values()
        return [one for one in services if whole or not one.wanted.tenants or tenant in one.wanted.tenants]

    def _model(self, service: HostedService) -> LiveModel:
        window = self.recorder.window(service.name)
        spanned_s = min(WINDOW_S, max(1, len(self.recorder.seconds)))
        decision = service.readied.decided.decision
        standing = self._standing(service)
        return LiveModel(
            model=service.name,
            state=service.state,
            busy=service.doing,
            reason=service.failure,
            task=service.readied.plan.workload.task,
            quantization=service.readied.plan.weights.label,
            context_tokens=service.readied.plan.settings.context_tokens,
            why=decision.reasons,
            challengers=decision.challengers,
            engines=tuple(self._engine(engine, service) for engine in service.engines),
            expected=decision.estimate,
            expected_in_flight=decision.in_flight,
            target=service.readied.plan.workload.latency,
            in_flight=standing.in_flight,
            waiting=standing.waiting,
            slots=_slots(service),
            planned_bytes=sum(service.need.values()),
            ttft=times(tally.ttft for tally in window),
            tpot=times(tally.tpot for tally in window),
            output_tok_s=round(sum(tally.completion_tokens for tally in window) / spanned_s, 2),
            ended=sum(tally.ended for tally in window),
            failed=sum(tally.failed for tally in window),
            binding=self._binding(service),
        )

    def _binding(self, service: HostedService) -> Binding:
        if service.state != "ready":
            return Binding(text=f"No bottleneck: {service.name} is {service.state}.")
        return self._bindings.get(service.name) or Binding(text="Unknown: the first measurement is not complete yet.")

    def _engine(self, engine: HostedEngine, service: HostedService) -> LiveEngine:
        backend, seen = engine.backend, self._seen.get(engine.id, Seen())
        total_share = sum(other.backend.share for other in service.engines if other.backend.takes_new)
        return LiveEngine(
            id=engine.id,
            engine=engine_by_id(engine.plan.engine).name,
            version=engine.plan.engine_version,
            device=engine.plan.settings.device,
            state=backend.state,
            reason=backend.reason,
            progress=backend.progress,
            well=backend.health.is_well,
            share=backend.share / total_share if total_share and backend.takes_new else 0.0,
            in_flight=backend.in_flight,
            slots=engine.plan.settings.slots,
            restarts=backend.restarts,
            uptime_s=time.monotonic() - engine.ready_since if engine.ready_since is not None else None,
            memory_bytes=seen.memory_bytes,
            gpu_bytes=seen.gpu_bytes,
            planned_bytes=sum(engine.need.values()),
            kv_use=seen.state.kv_use if seen.state is not None else None,
        )

    def _use(self, member: Member) -> TenantUse:
        used = self.recorder.used.get(member.name)
        return TenantUse(
            name=member.name,
            in_flight=member.in_flight,
            requests=used.requests if used else 0,
            failed=used.failed if used else 0,
            turned_away=used.turned_away if used else 0,
            prompt_tokens=used.prompt_tokens if used else 0,
            cached_tokens=used.cached_tokens if used else 0,
            completion_tokens=used.completion_tokens if used else 0,
            recent_tokens=self.recorder.tokens_of(member.name),
            weight=member.weight,
            requests_per_minute=member.requests.per_minute if member.requests is not None else None,
            requests_left=_left(member.requests),
            tokens_per_minute=member.tokens.per_minute if member.tokens is not None else None,
            tokens_left=_left(member.tokens),
            most_in_flight=member.max_in_flight,
        )

    # readings

    def _standing(self, service: HostedService) -> Standing:
        is_routed = self.host.gateway.route_for(service.name) is not None
        seen = [self._seen[engine.id] for engine in service.engines if engine.id in self._seen]
        kv = [one.state.kv_use for one in seen if one.state is not None and one.state.kv_use is not None]
        return Standing(
            in_flight=service.in_flight,
            waiting=self.host.gateway.waiting(service.name) if is_routed else 0,
            memory_bytes=_sum(one.memory_bytes for one in seen),
            gpu_bytes=_sum(one.gpu_bytes for one in seen),
            kv_use=max(kv, default=None),
        )

    def _asked(self, engine: HostedEngine, with_metrics: bool) -> Asked:
        url, key = engine.url, engine.backend.engine_key
        metrics = None
        if with_metrics and url is not None and engine.state == "ready":
            metrics = self._metrics.get((url, key))
            if metrics is None:
                metrics = self._metrics[url, key] = Metrics(url, key, engine_by_id(engine.plan.engine).read)
        return Asked(engine.id, engine.pid, metrics, engine.plan.settings.device != "cpu")

    def _keep_states(self) -> None:
        """Keep the engine states of the last minute, and drop those of engines that were removed."""
        current = {engine.id for engine in self.host.engines}
        self._states = {id: kept for id, kept in self._states.items() if id in current}
        for id, seen in self._seen.items():
            if seen.state is not None and id in current:
                self._states.setdefault(id, deque(maxlen=round(WINDOW_S / LOOK_S))).append(seen.state)
        urls = {engine.url for engine in self.host.engines}
        self._metrics = {key: metrics for key, metrics in self._metrics.items() if key[0] in urls}

    def _to_judge(self, service: HostedService) -> ToJudge | None:
        """What the diagnosis needs. If several kinds of engine share the requests, it is about the largest share."""
        ready = [engine for engine in service.engines if engine.state == "ready"]
        if not ready:
            return None
        plan = max(ready, key=lambda engine: engine.backend.share).plan
        same = [engine for engine in ready if engine.plan.engine == plan.engine]
        return ToJudge(
            tallies=self.recorder.window(service.name),
            recent=[one for one in self.recorder.recent.get(service.name, ()) if one.engine == plan.engine],
            plan=plan,
            slots=sum(engine.plan.settings.slots for engine in same),
            states=tuple(self._states.get(same[0].id, ())) if len(same) == 1 else (),
        )


def put_up(host: Host) -> LiveFigures:
    """Add the page and its figures to the host's gateway. The caller runs `run` of the returned object."""
    figures = LiveFigures(host)
    host.gateway.handed |= {PAGE: figures.page, FIGURES: figures.figures}
    return figures


def looked(asked: Sequence[Asked], cards: Cards | None) -> dict[str, Seen]:
    """Read the memory and metrics of each engine. Blocks."""
    trees = {one.id: tree_of(one.pid) if one.pid is not None else [] for one in asked}
    on_cards = _on_cards({one.id: trees[one.id] for one in asked if one.on_card and trees[one.id]}, cards)
    return {
        one.id: Seen(
            memory_bytes(trees[one.id]),
            on_cards.get(one.id),
            one.metrics.state() if one.metrics is not None else None,
        )
        for one in asked
    }


def _on_cards(trees: Mapping[str, Sequence[int]], cards: Cards | None) -> dict[str, int | None]:
    """GPU memory by engine. Empty if the driver does not name processes, as in a container, and engines share a GPU."""
    if cards is None or not trees:
        return {}
    found = {id: cards.gpu_bytes(pids) for id, pids in trees.items()}
    together = cards.gpu_bytes([pid for pids in trees.values() for pid in pids])
    if len(found) > 1 and together is not None and sum(size or 0 for size in found.values()) > 1.01 * together:
        return {}
    return found


def judged(inputs: Mapping[str, ToJudge], hardware: Hardware) -> dict[str, Binding]:
    """The bottleneck of each model. Blocks."""
    return {
        name: binding(one.tallies, one.recent, one.plan, one.slots, hardware, one.states)
        for name, one in inputs.items()
    }


def last_verdict(hardware: Hardware, models: Sequence[str]) -> LastVerdict | None:
    """The newest stored verdict for any of these models on this machine. Blocks."""
    machine = store.fingerprint(hardware)
    try:
        found = [one for model in models if (one := store.last_verdict(machine, model)) is not None]
    except OutsideFailed:  # `bedplate compare` reports an unreadable store
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


def _seen_by_tenant(service: HostedService) -> LiveModel:
    plan = service.readied.plan
    return LiveModel(
        model=service.name,
        state=service.state,
        busy=service.doing,
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


def _left(bucket: Bucket | None) -> int | None:
    return max(0, int(bucket.level(time.monotonic()))) if bucket is not None else None


def _slots(service: HostedService) -> int | None:
    ready = [engine.plan.settings.slots for engine in service.engines if engine.backend.takes_new]
    return sum(ready) if ready else None


def _sum(sizes: Iterable[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return sum(known) if known else None


def _number(text: str) -> float:
    """A number in a query, or 0 if it is not one."""
    try:
        return float(text)
    except ValueError:
        return 0.0
