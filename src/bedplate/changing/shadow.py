"""Shadowing: compares a challenger with the engine in service on the endpoint's own workload.

On another device the challenger gets copies of live requests. On a shared device, recorded request shapes are replayed
in idle time against the challenger and a second copy of the incumbent, and both are paused while real requests run.
The challenger never answers a client.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import subprocess
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec

from bedplate import store
from bedplate.changing.challenger import (
    ThreadProgress,
    describe_plan,
    find_address,
    get_last_address,
    run_in_thread,
)
from bedplate.changing.episodes import (
    Episode,
    build_assumed_shapes,
    derive_results,
    make_cell,
    select_shapes,
    split_episodes,
    summarize_load,
)
from bedplate.changing.losses import ServiceOffer, check_losses, read_recent_use
from bedplate.changing.shadow_elsewhere import REHEARSED, UNKNOWN_ELSEWHERE, probe_url
from bedplate.changing.shadow_mirror import REQUEST_LIMIT_S, MeasuredSides, RequestMirror
from bedplate.changing.standstill import EnginePauser
from bedplate.decide.placement import Need, count_need
from bedplate.engines.visible import pick_cards, show_cards
from bedplate.errors import ExternalFailure, NotPossible, UsageError
from bedplate.judge.compare import compare
from bedplate.measure.answers import AnswerBasis, EngineAddress, check_challenger, collect_basis, warm_up_engine
from bedplate.measure.bench import describe_environment
from bedplate.measure.load import LoadTarget, prepare
from bedplate.measure.load.client_error import LAG_SHARE, LEAST_LAG_MS, MOST_CPU
from bedplate.measure.load.preparing import PreparedEndpoint
from bedplate.measure.load.separate_process import MeasureCall, ProcessMessage, make_error, start_generator
from bedplate.measure.moments import format_now, make_run_id
from bedplate.run.prepare import hash_model_content
from bedplate.run.ready import PreparedModel, decide_engines, prepare_model
from bedplate.run.starting import EngineStart
from bedplate.store import compute_fingerprint
from bedplate.usage_store import open_usage_store
from bedplate.values import Plan, replace_fields
from bedplate.values.migration import AnswerCheck
from bedplate.values.record import Record
from bedplate.values.run import Cell, Load, Quality, Repeat, Run, Subject
from bedplate.values.service import Build
from bedplate.values.shadow import ShadowResult
from bedplate.values.units import format_seconds
from bedplate.values.verdict import Difference, Verdict
from bedplate.values.workload import Positive, RequestShape

if TYPE_CHECKING:
    from bedplate.hosting.control import Tell
    from bedplate.hosting.host import Host, HostedEngine, HostedService

LOOK_S = 0.005
"""Polling interval for requests in the gateway's queue. Requests that reach an engine are reported immediately."""
IDLE_S = 1.0
"""Idle time before measurements continue."""
LOAD_IDLE_S = 0.2
"""Idle time before an engine continues to load. It is shorter, since a paused load loses no work."""
TELL_AFTER_S = 5.0
SETTLE_LOOK_S = 0.1
SETTLED_SHARE = 0.2
LONGEST_SETTLE_S = 10.0
"""After an interruption the engines still compute cancelled requests. Measurements wait until they use less than
`SETTLED_SHARE` of a core, for at most this long."""
TRIES = 3
MOST_INTERRUPTED = 2
"""How often an interrupted round is repeated before it is made shorter."""
MOST_IN_FLIGHT = 64
ALL = 0.99
LIVE, REPLAYED = "copies of live requests", "recorded request shapes, replayed in idle time"

T = TypeVar("T")


class ShadowRequest(Record, frozen=True, kw_only=True):
    """The arguments of the operation `shadow`."""

    engine: str
    model: str | None = None
    build: Build = "packages"
    share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.1
    """Share of the live requests that are copied, or of the recorded ones that are replayed."""
    for_s: Positive = 600.0
    """Time limit after the challenger is ready and its answers have been compared."""
    since_s: Positive = 86_400.0
    """Age of the oldest recorded requests to replay."""
    url: str | None = None
    """The URL of a challenger that already runs on its own device; None to start it here."""
    key: str | None = None
    served_model: str | None = None
    """The served name at `url`; None for the first model listed there."""
    force: bool = False
    """Compare even if requests of the last day used what the engine lacks."""


class TimeLimitReached(Exception):
    """The time limit has passed."""


class RoundInterrupted(Exception):
    """Real requests interrupted a round too often."""


async def run_shadow(host: Host, asked: ShadowRequest, tell: Tell) -> ShadowResult:
    service = host.get_service(asked.model)
    service.check_swappable()
    if host.state != "ready" or service.busy is not None or not service.engines:
        raise NotPossible(
            f"{service.name} is not loaded, or is being loaded or migrated",
            hint="send it a request, or try again later",
        )
    with service.engage(f"shadowed by {asked.engine}"):
        return await ShadowRun(host, service, asked, tell).run()


class ShadowRun:
    """One comparison of a challenger with the engine in service."""

    def __init__(self, host: Host, service: HostedService, asked: ShadowRequest, tell: Tell) -> None:
        self.host, self.service, self.asked, self._tell = host, service, asked, tell
        self.incumbent: HostedEngine = service.engines[0]
        self.pauses = 0
        self.notes: list[str] = []
        self.run_id = make_run_id()
        self._at = format_now()
        self._began = time.monotonic()
        self._until = self._began + asked.for_s
        self._still = EnginePauser()
        self._asked_at = float("-inf")
        self._doing: asyncio.Task[Any] | None = None
        self._interrupted = False
        self._held_up = False
        self._most: int | None = None
        """Largest number of requests in a round; None for no limit."""
        self._stage = "its start"

    def say(self, text: str) -> None:
        self._tell(text)
        self.host.say(text)

    def note(self, text: str) -> None:
        self.notes.append(text)
        self.say(text)

    async def run(self) -> ShadowResult:
        if self.asked.url is not None:
            return await self._run_with_url(self.asked.url)
        progress = ThreadProgress(asyncio.get_running_loop(), self._tell)
        ready, need, env, live = await run_in_thread(self._prepare_challenger, progress)
        self.host.check_memory(need, describe_plan(ready.plan))
        if not live:
            self.say(
                f"{describe_plan(ready.plan)} shares a device with {describe_plan(self.incumbent.plan)}: using "
                f"only idle time"
            )
            self.host.on_request = self._pause
        ours: list[HostedEngine] = []
        try:
            began = time.monotonic()
            challenger = await self._start_engine(replace(ready.build_start(), env=env), need, live, ours)
            start_s = time.monotonic() - began if not self._held_up else None
            reference = self.incumbent if live else await self._start_reference(ours)
            self._until = time.monotonic() + self.asked.for_s
            await self._run_untimed(warm_up_engine(get_last_address(challenger), 1), live)
            qualities = await self._check_answers(ready.plan, reference, get_last_address(challenger), live)
            self._until = time.monotonic() + self.asked.for_s
            if live:
                sides = await self._mirror_to_challenger(ready, challenger)
            else:
                sides = await self._replay(ready, reference, challenger)
            cells = await asyncio.to_thread(
                lambda: self._make_cells(describe_subject(ready, start_s), sides, qualities, LIVE if live else REPLAYED)
            )
        except TimeLimitReached as error:
            raise NotPossible(
                f"{describe_plan(ready.plan)} could not be compared within {format_seconds(self.asked.for_s)}",
                cause=self._explain_timeout(),
                hint="allow more time: --for 1h",
            ) from error
        finally:
            self.host.on_request = None
            self._still.resume()  # a paused process would not handle SIGTERM
            await asyncio.shield(asyncio.gather(*(self.host.remove_engine(one, 5) for one in ours)))
        return await self._conclude(describe_plan(ready.plan), cells, sides, live)

    async def _run_with_url(self, url: str) -> ShadowResult:
        """Compare with a challenger that runs at `url`."""
        asked = self.asked
        other = await probe_url(url, asked.key, asked.served_model, asked.engine)
        self.note(
            f"using {other.display_name} at {other.url}: nothing is started here, and plans do not use the results"
        )
        if (problem := await warm_up_engine(other.where, 1)) is not None:
            raise NotPossible(f"{other.display_name} cannot be compared: {problem}")
        qualities = await self._check_answers(self.incumbent.plan, self.incumbent, other.where, True)
        sides = await self._mirror_requests(other.display_name, other.where, MOST_IN_FLIGHT, other.fields)
        cells = await asyncio.to_thread(
            lambda: self._make_cells(other.to_subject(self.service.readied.decided.facts.name), sides, qualities, LIVE)
        )
        return await self._conclude(other.display_name, cells, sides, True)

    async def _conclude(self, name: str, cells: tuple[Cell, Cell], sides: MeasuredSides, live: bool) -> ShadowResult:
        done = await asyncio.to_thread(self._judge, cells, sides, live)
        self.host.say(f"shadow of {name}: {done.verdict.answer}: {done.verdict.text}", aloud=False)
        return done

    def _explain_timeout(self) -> str:
        if self.pauses:
            return f"the endpoint was almost never idle: requests interrupted the comparison {self.pauses} times"
        if time.monotonic() - self._asked_at < 2 * IDLE_S:
            return f"the endpoint was never idle for {format_seconds(IDLE_S)}"
        return f"the endpoint was idle, but {self._stage} took too long"

    # the challenger, and the engine to compare it with

    def _prepare_challenger(self, progress: ThreadProgress) -> tuple[PreparedModel, Need, dict[str, str], bool]:
        """Prepare the challenger, on unused GPUs if there are any.

        Returns also its memory, its environment variables and whether it shares no device with other engines.
        """
        host, wanted = self.host, replace_fields(self.service.wanted, engine=self.asked.engine, replicas=1)
        taken = {device for engine in host.engines for device in list_devices(engine.plan.settings.device, engine.need)}
        free = tuple(card for card in host.hardware.accelerators if f"card {card.index}" not in taken)
        hardware = replace_fields(host.hardware, accelerators=free) if free else host.hardware
        (one,) = decide_engines(
            [wanted], hardware, progress, build=self.asked.build, budget_bytes=host.room.budget_bytes
        )
        replicas, incumbent = self.service.wanted.replicas, self.service.readied
        before = ServiceOffer.from_plan(incumbent.plan, len(incumbent.needs))
        after = ServiceOffer.from_plan(one.plan, replicas)
        for note in check_losses(before, after, read_recent_use(self.service.name), force=self.asked.force):
            self._add_note_from_thread(note)
            progress.note(note)
        ready = prepare_model(one, progress)
        need = count_need(one.decision, hardware.accelerators)
        device = ready.plan.settings.device
        live = list_devices(device, need).isdisjoint(taken)
        return ready, need, show_cards(device, pick_cards(hardware, list_cards(need))), live

    async def _start_reference(self, ours: list[HostedEngine]) -> HostedEngine:
        """Start a second copy of the incumbent, so that measurements do not touch its cache and queue.

        The comparison is also fairer: both engines start next to others and serve no other requests.
        """
        incumbent = self.incumbent
        fallback = f"measuring {describe_plan(incumbent.plan)} itself: a request may wait for the running step to end"
        if not self.host.has_memory_for(incumbent.need):
            self.note(f"not enough memory for a second copy; {fallback}")
            return incumbent
        try:
            return await self._start_engine(incumbent.start, incumbent.need, False, ours)
        except NotPossible as error:
            self.note(error.summary)
            self.note(fallback)
            return incumbent

    async def _start_engine(self, start: EngineStart, need: Need, live: bool, ours: list[HostedEngine]) -> HostedEngine:
        if not live:
            await self._wait_until_idle()
        again = "a second " if start.plan is self.incumbent.plan else ""
        self.say(f"starting {again}{describe_plan(start.plan)}; it gets none of the endpoint's requests")
        before = {engine.id for engine in self.service.engines}
        adding = asyncio.create_task(self.host.add_engine(start, service=self.service.name, share=0.0, need=need))
        try:
            while not adding.done():
                await asyncio.wait({adding}, timeout=2 * LOOK_S)
                for engine in self.service.engines:
                    if not live and engine.id not in before:
                        self._still.add(engine)
                if not live and self._pause_if_busy():
                    self._held_up = True
            engine = await adding
        except ExternalFailure as error:
            cause = error.cause or ("it was paused while the endpoint served requests" if self._held_up else None)
            raise NotPossible(
                f"{describe_plan(start.plan)} cannot be compared: {error.message}", cause=cause
            ) from error
        except BaseException:
            self._still.resume()
            adding.cancel()
            await asyncio.gather(adding, return_exceptions=True)
            raise
        ours.append(engine)
        await asyncio.to_thread(self._still.find_groups)
        return engine

    # idle time

    def _is_busy(self) -> bool:
        return any(
            service.in_flight or self.host.gateway.count_waiting(service.name)
            for service in self.host.services.values()
        )

    def _pause(self) -> None:
        """Pause our engines and cancel the current measurement, because a real request has arrived."""
        self._asked_at = time.monotonic()
        self._still.pause()
        if self._doing is not None and not self._doing.cancelling():
            self._doing.cancel()

    async def _wait_until_idle(self) -> None:
        began, has_told = time.monotonic(), False
        while True:
            if self._is_busy():
                self._pause()
                if not has_told and time.monotonic() - began > TELL_AFTER_S:
                    self._tell("waiting until the endpoint is idle")
                    has_told = True
            left_s = self._asked_at + IDLE_S - time.monotonic()
            if left_s <= 0:
                return
            if time.monotonic() > self._until:
                raise TimeLimitReached
            await asyncio.sleep(min(left_s, 10 * LOOK_S))

    def _pause_if_busy(self) -> bool:
        """Pause our engines if the endpoint is busy, and continue them if it is idle. Returns whether it is busy."""
        if self._is_busy():
            self._pause()
            return True
        if self._still.is_still and time.monotonic() - self._asked_at > LOAD_IDLE_S:
            self._still.resume()
        return False

    async def _run_untimed(self, work: Coroutine[Any, Any, T], live: bool) -> T:
        """Run something that is not timed. It is paused while the endpoint is busy, and continues afterwards."""
        task = asyncio.create_task(work)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=2 * LOOK_S if not live else None)
                if not live and self._pause_if_busy() and time.monotonic() > self._until:
                    raise TimeLimitReached
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        return task.result()

    async def _run_in_idle_time(self, work: Callable[[], Coroutine[Any, Any, T]], most: int | None = None) -> T:
        """Run a measurement in idle time. An interrupted measurement is repeated, up to `most` times."""
        for number in itertools.count():
            if number == most:
                raise RoundInterrupted
            await self._wait_until_idle()
            if time.monotonic() > self._until:
                raise TimeLimitReached
            self._still.resume()
            await self._wait_until_settled()
            if self._still.is_still:
                continue
            task = asyncio.create_task(work())
            self._doing = task
            try:
                while not task.done():
                    await asyncio.wait({task}, timeout=LOOK_S)
                    if self._is_busy():
                        self._pause()
            finally:
                self._doing = None
                if not task.done():
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
            if not task.cancelled():
                return task.result()
            self.pauses += 1
            self._interrupted = True
        raise AssertionError("itertools.count does not end")

    async def _wait_until_settled(self) -> None:
        """Wait until the engines have finished the interrupted requests, so that the next round is not slowed down."""
        if not self._interrupted:
            return
        until, before_s = time.monotonic() + LONGEST_SETTLE_S, await asyncio.to_thread(self._still.read_cpu_seconds)
        while time.monotonic() < until:
            await asyncio.sleep(SETTLE_LOOK_S)
            if self._still.is_still:
                return
            busy_s = await asyncio.to_thread(self._still.read_cpu_seconds)
            if busy_s - before_s < SETTLED_SHARE * SETTLE_LOOK_S:
                break
            before_s = busy_s
        self._interrupted = False

    # answers

    async def _check_answers(
        self, plan: Plan, reference: HostedEngine, challenger: EngineAddress, live: bool
    ) -> tuple[Quality, Quality]:
        """Compare the answers of both engines.

        `plan` is the challenger's plan, or the incumbent's if the challenger runs at another URL.
        """
        mine = find_address(reference)
        if plan.workload.task != "generate" or mine is None:
            return Quality(note="not asked for"), Quality(note="not asked for")
        incumbent, hardware = self.incumbent.plan, self.host.hardware

        async def check_both() -> tuple[Quality, Quality]:
            basis = await collect_basis(plan, incumbent, mine)
            own = AnswerBasis(None, (), True, False, basis.reference)
            first = await check_challenger(hardware, incumbent, mine, own, "answers")
            # The agreement of another machine's engine with the reference must not be stored for this plan.
            against = basis if self.asked.url is None else basis._replace(reference=None)
            return summarize_checks(first), summarize_checks(
                await check_challenger(hardware, plan, challenger, against, "answers")
            )

        self.say("comparing answers")
        self._stage = "comparing answers"
        can_pause = reference is not self.incumbent or live
        found = await (self._run_untimed(check_both(), live) if can_pause else self._run_in_idle_time(check_both))
        name = describe_plan(plan) if self.asked.url is None else self.asked.engine
        for engine, one in zip((describe_plan(incumbent), name), found, strict=True):
            self._tell(f"answers of {engine} are {one.verdict}: {one.note}")
        return found

    # replay in interleaved rounds

    async def _replay(self, ready: PreparedModel, reference: HostedEngine, challenger: HostedEngine) -> MeasuredSides:
        shapes, source = await asyncio.to_thread(self._read_shapes, ready)
        chosen = split_episodes(shapes, self.asked.share)
        load = summarize_load(chosen, source)
        addresses = (get_last_address(reference), get_last_address(challenger))
        targets = [LoadTarget.from_url(one.url, key=one.key, model=one.name) for one in addresses]
        self._stage = "checking how it counts tokens"
        prepared = [
            await self._run_in_idle_time(partial(prepare, target, load, shapes=flatten_episodes(chosen)))
            for target in targets
        ]
        self._stage = "a round of requests"
        sides, discarded, restarts = MeasuredSides(load, [], []), 0, reference.backend.restarts
        for number, episode in enumerate(chosen):
            # The order alternates, so that drift affects both sides equally.
            order = (0, 1) if number % 2 == 0 else (1, 0)
            try:
                pair = await self._measure_pair(order, targets, load, prepared, episode, number)
            except TimeLimitReached:
                self.note(f"the time limit was reached after {number} of {len(chosen)} rounds")
                break
            if reference.backend.restarts != restarts:
                raise NotPossible(
                    f"{describe_plan(reference.plan)} stopped during the comparison", cause=reference.backend.reason
                )
            if pair is None:
                discarded += 1
                continue
            sides.a.append(pair[0])
            sides.b.append(pair[1])
            self._tell(f"round {number + 1} of {len(chosen)}: {len(pair[0].samples)} requests to each engine")
        if discarded:
            self.note(f"{discarded} rounds were discarded: other processes slowed down the client")
        if not sides.a:
            raise TimeLimitReached
        return sides

    async def _measure_pair(
        self,
        order: tuple[int, int],
        targets: Sequence[LoadTarget],
        load: Load,
        prepared: Sequence[PreparedEndpoint],
        episode: Episode,
        number: int,
    ) -> dict[int, Repeat] | None:
        """Measure both sides directly after each other. Repeated if the client itself was the limit."""
        attempt, episode = 0, episode[: self._most]
        while attempt < TRIES:
            pair: dict[int, Repeat] = {}
            try:
                for side in order:
                    call = _make_call(targets[side], load, prepared[side], episode, TRIES * number + attempt)
                    most = MOST_INTERRUPTED if len(episode) > 1 else None
                    pair[side] = await self._run_in_idle_time(lambda call=call: _run_generator(call), most)  # type: ignore[misc]
            except RoundInterrupted:
                # The idle times are shorter than a round: halve this round, and limit the later ones to that size.
                self._most = len(episode) // 2
                episode = episode[: self._most]
                continue
            if not any(repeat.client.limit for repeat in pair.values()):
                return pair
            attempt += 1
        return None

    def _read_shapes(self, ready: PreparedModel) -> tuple[tuple[RequestShape, ...], str]:
        name, since_s = self.service.name, self.asked.since_s
        longest = min(ready.plan.settings.context_tokens, self.incumbent.plan.settings.context_tokens)
        found = select_shapes(open_usage_store().read_requests(time.time() - since_s, model=name), longest)
        if found.too_long:
            self._add_note_from_thread(f"{found.too_long} recorded requests are too long for one of the engines")
        if found.shapes:
            return found.shapes, f"{name}, last {format_seconds(since_s)},"
        self._add_note_from_thread("no recorded requests: replaying the workload that the plan assumed")
        return build_assumed_shapes(ready.plan.workload).shapes, f"{name}, as planned,"

    def _add_note_from_thread(self, text: str) -> None:
        """Add a note from a thread."""
        self.notes.append(text)

    # live requests

    async def _mirror_to_challenger(self, ready: PreparedModel, challenger: HostedEngine) -> MeasuredSides:
        where = get_last_address(challenger)
        prepared = await prepare(LoadTarget.from_url(where.url, key=where.key, model=where.name), REHEARSED)
        concurrency = min(MOST_IN_FLIGHT, ready.plan.settings.slots)
        return await self._mirror_requests(describe_plan(ready.plan), where, concurrency, prepared.fields)

    async def _mirror_requests(
        self, name: str, where: EngineAddress, concurrency: int, fields: Sequence[str]
    ) -> MeasuredSides:
        asked = self.asked
        self.say(f"sending copies of {asked.share:.0%} of the requests to {name}, after they were answered")
        watched = [engine.backend for engine in self.service.engines if engine.backend.share]
        async with RequestMirror(where, asked.share, concurrency, asked.for_s, fields) as mirror:
            for backend in watched:
                backend.on_end = mirror.take_sample
            try:
                await asyncio.sleep(asked.for_s)
            finally:
                for backend in watched:
                    backend.on_end = None
        if mirror.skipped:
            self.note(f"{mirror.skipped} sampled requests were skipped because the challenger was busy")
        return mirror.build_sides(self.service.name, self.run_id)

    # the verdict

    def _make_cells(
        self, challenger: Subject, sides: MeasuredSides, qualities: tuple[Quality, Quality], notes: str
    ) -> tuple[Cell, Cell]:
        machine, incumbent = compute_fingerprint(self.host.hardware), describe_subject(self.service.readied, None)
        return (
            make_cell(self.run_id, self._at, machine, incumbent, sides.load, sides.a, qualities[0], notes),
            make_cell(self.run_id, self._at, machine, challenger, sides.load, sides.b, qualities[1], notes),
        )

    def _judge(self, cells: tuple[Cell, Cell], sides: MeasuredSides, live: bool) -> ShadowResult:
        a, b = cells
        run = Run(
            id=self.run_id,
            at=self._at,
            environment=describe_environment(self.host.hardware, ("bedplate", "shadow", self.asked.engine)),
            finished=True,
            models=(replace_fields(self.service.readied.decided.facts, files=(), chat_template=None),),
        )
        here = self.asked.url is None
        with contextlib.suppress(ExternalFailure):  # the verdict is reported even if the disk is full
            store.add_run(run)
            for cell in cells:
                store.add_cell(cell)
            for result in derive_results(a, b) if here else ():  # plans use results of this machine only
                store.add_result(result)
        try:
            allow = () if here else UNKNOWN_ELSEWHERE
            verdict = compare([a], [b], target=self.service.wanted.workload.latency, allow=allow)
        except UsageError as error:
            message = f"{b.subject.engine} cannot be compared with {a.subject.engine} by these measurements"
            raise NotPossible(message, cause=error.cause, hint=f"see bedplate diagnose {self.run_id}") from error
        if live and self.asked.share < ALL:
            verdict = weaken_verdict(verdict, self.asked.share)
        if here:
            with contextlib.suppress(ExternalFailure):
                store.add_verdict(verdict, self._at)  # the live page shows the last one
        return ShadowResult(
            at=self._at,
            model=self.service.name,
            how="live" if live else "replay",
            verdict=verdict,
            requests=sum(len(repeat.samples) for repeat in sides.b),
            turns=len(sides.b),
            pauses=self.pauses,
            took_s=round(time.monotonic() - self._began, 3),
            run=self.run_id,
            notes=tuple(self.notes),
        )


def list_devices(device: str, need: Need) -> frozenset[str]:
    """The devices that an engine computes on. Two engines can share host memory, but not the time of a device."""
    cards = frozenset(name for name in need if name.startswith("card "))
    return cards if device != "cpu" and cards else frozenset(["cpu"])


def list_cards(need: Need) -> tuple[int, ...]:
    return tuple(int(name.removeprefix("card ")) for name in need if name.startswith("card "))


def summarize_checks(found: Sequence[AnswerCheck]) -> Quality:
    """The quality by agreement with the reference, or else with the incumbent. Broken against either is broken."""
    broken = next((one for one in found if one.verdict == "broken"), None)
    check = broken or next((one for one in found if one.verdict == "ok"), None) or next(iter(found), None)
    if check is None or check.verdict == "unchecked":
        return Quality(note=check.why if check is not None else "not checked")
    against = "" if check.against == "the reference" else "compared with the engine in service: "
    return Quality(
        asked=check.asked,
        agreement=check.agreed / check.answered if check.answered else None,
        verdict=check.verdict,
        note=f"{against}{check.why}",
    )


def weaken_verdict(verdict: Verdict, share: float) -> Verdict:
    """The verdict for a challenger that had only a part of the load: being faster then proves nothing."""
    difference = Difference(
        what="requests", a="all", b=f"{share:.0%} of them", note="the challenger looks faster with less load"
    )
    found = replace_fields(verdict, differences=(*verdict.differences, difference))
    if verdict.answer != "migrate":
        return found
    return replace_fields(
        found,
        answer="not proven",
        constraint="load",
        text=f"{verdict.text} But it had {share:.0%} of the load.",
        would_prove="a shadow with all of the load: --share 100%",
    )


def describe_subject(ready: PreparedModel, start_s: float | None) -> Subject:
    facts, plan, environment = ready.decided.facts, ready.plan, ready.environment
    return Subject(
        engine=plan.engine,
        engine_version=plan.engine_version,
        model=facts.name,
        quantization=ready.decided.decision.quantization,
        weights_id=hash_model_content(facts)[:12] if facts.files and Path(facts.files[0]).exists() else None,
        device=plan.settings.device,
        parallelism=plan.parallelism,
        settings=plan.settings,
        build=ready.build,
        start_s=start_s,
        install_bytes=environment.disk_bytes or None,
    )


def flatten_episodes(chosen: Sequence[Episode]) -> tuple[RequestShape, ...]:
    return tuple(shape for episode in chosen for shape in episode)


# one round


def _make_call(
    target: LoadTarget, load: Load, prepared: PreparedEndpoint, episode: Episode, number: int
) -> MeasureCall:
    span_s = (episode[-1].started_s or 0.0) + 1.0
    return MeasureCall(
        target=target,
        load=load,
        prepared=prepared,
        seconds=span_s,
        # A round has few requests, which would queue behind those of a warm-up. Both engines are warm already.
        warmup_s=0.0,
        most_seconds=span_s + REQUEST_LIMIT_S,
        timeout_s=REQUEST_LIMIT_S,
        round=number,
        shapes=episode,
        check=False,
    )


async def _run_generator(call: MeasureCall) -> Repeat:
    """Generate the load in a separate process, so that it does not use the gateway's loop. Cancelling kills it."""
    process = start_generator("bedplate.measure.load")
    listening = asyncio.get_running_loop().run_in_executor(None, _read_repeat, process, call)
    try:
        return adjust_client_limit(await asyncio.shield(listening))
    finally:
        process.kill()
        await asyncio.gather(listening, return_exceptions=True)


def _read_repeat(process: subprocess.Popen[bytes], call: MeasureCall) -> Repeat:
    """Read the output of the load generator until its repeat is complete. Runs in a thread."""
    with process:
        if process.stdin is None or process.stdout is None:
            raise ExternalFailure("the load generator has no pipes")
        with contextlib.suppress(OSError):
            process.stdin.write(msgspec.json.encode(call) + b"\n")
            process.stdin.flush()
        try:
            for line in process.stdout:
                message = msgspec.json.decode(line, type=ProcessMessage)
                if message.problem is not None:
                    raise make_error(message.problem)
                if message.repeat is not None:
                    return message.repeat
            raise ExternalFailure("the load generator exited too early")
        finally:
            process.kill()


def adjust_client_limit(repeat: Repeat) -> Repeat:
    """Judge the client's lag relative to the durations of the requests, which are what is compared.

    A round is so short that its 99th percentile of the lag is a single worst moment.
    """
    took = [sample.duration_ms for sample in repeat.samples if sample.outcome == "ok"]
    client = repeat.client
    lag_ms = max(client.loop_lag_p99_ms, client.send_lag_p99_ms)
    if not client.limit or not took or client.cpu_share > MOST_CPU:
        return repeat
    if lag_ms > max(LEAST_LAG_MS, LAG_SHARE * statistics.median(took)):
        return repeat
    return replace_fields(repeat, client=replace_fields(client, limit=False, reasons=()))
