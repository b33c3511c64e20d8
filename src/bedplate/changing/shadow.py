"""Tries a challenger on the endpoint's own work: beside it on another device, or with recorded shapes when it is idle.

Real requests come first. Nothing of this is in their way: the challenger gets no traffic of the gateway's, and on a
shared device it is another of the incumbent's kind that is asked, and both stand still while somebody asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec

from bedplate import store
from bedplate.changing.challenger import Noted, named, where_it_was, where_of
from bedplate.changing.episodes import Episode, assumed, cell_of, episodes, load_of, recorded, results_of
from bedplate.changing.shadow_elsewhere import REHEARSED, UNKNOWN_ELSEWHERE, found_at
from bedplate.changing.shadow_mirror import REQUEST_LIMIT_S, Mirror, Sides
from bedplate.changing.standstill import Standstill
from bedplate.decide.together import Need, need_of
from bedplate.errors import AnswerIsNo, BadQuestion, OutsideFailed
from bedplate.judge.compare import compare
from bedplate.measure.answers import Basis, Where, basis_of, checked, warmed
from bedplate.measure.bench import environment_of
from bedplate.measure.load import Target, prepare
from bedplate.measure.load.apart import Call, Said, raised
from bedplate.measure.load.own import LAG_SHARE, LEAST_LAG_MS, MOST_CPU
from bedplate.measure.load.preparing import Prepared
from bedplate.measure.moments import new_run_id, now_text
from bedplate.run.prepare import content_id
from bedplate.run.ready import Readied, decided, readied, show_cards
from bedplate.run.starting import EngineStart
from bedplate.store import fingerprint
from bedplate.values import Plan, replaced
from bedplate.values.migration import Checked
from bedplate.values.record import Record
from bedplate.values.run import Cell, Load, Quality, Repeat, Run, Subject
from bedplate.values.service import Build
from bedplate.values.shadow import Shadowed
from bedplate.values.units import seconds
from bedplate.values.verdict import Difference, Verdict
from bedplate.values.workload import Positive, RequestShape

if TYPE_CHECKING:
    from bedplate.hosting.control import Tell
    from bedplate.hosting.host import Host, HostedEngine, HostedService

LOOK_S = 0.005
"""How soon requests are noticed that wait and have not gone to an engine; those that have are told at once."""
IDLE_S = 1.0
"""Without a request, before it goes on."""
LOAD_IDLE_S = 0.2
"""Likewise for an engine that loads, of which nothing has to be done anew."""
TELL_AFTER_S = 5.0
SETTLE_LOOK_S = 0.1
SETTLED_SHARE = 0.2
LONGEST_SETTLE_S = 10.0
"""What was interrupted is computed for a while yet: until the engines take less than this share of a core."""
TRIES = 3
MOST_INTERRUPTED = 2
"""Times that a stretch is begun anew before it is made shorter."""
MOST_IN_FLIGHT = 64
ALL = 0.99
LIVE, REPLAYED = "live requests, once they were answered", "recorded shapes, in idle time"

T = TypeVar("T")


class Shadow(Record, frozen=True, kw_only=True):
    """What a running host is asked for."""

    engine: str
    model: str | None = None
    build: Build = "packages"
    share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.1
    """Of the requests: live ones, or recorded ones that are replayed."""
    for_s: Positive = 600.0
    """The most that it may take once the challenger is ready and its answers have been compared."""
    since_s: Positive = 86_400.0
    """How far back recorded requests are taken from."""
    url: str | None = None
    """Where it is served already, on a device of its own; `None`: it is started here."""
    key: str | None = None
    served_model: str | None = None
    """What it is called there; `None`: the first that is listed."""


class TimeUp(Exception):
    """It has had its time."""


class Interrupted(Exception):
    """Somebody asked for something, too often."""


async def shadow(host: Host, asked: Shadow, tell: Tell) -> Shadowed:
    service = host.service(asked.model)
    service.check_own()
    if host.state != "ready" or service.busy is not None or not service.engines:
        raise AnswerIsNo(
            f"{service.name} is not loaded, or is being loaded or migrated",
            hint="send it a request, or try again in a while",
        )
    with service.engaged(f"shadowed by {asked.engine}"):
        return await Shadowing(host, service, asked, tell).run()


class Shadowing:
    """One challenger from its start to its end."""

    def __init__(self, host: Host, service: HostedService, asked: Shadow, tell: Tell) -> None:
        self.host, self.service, self.asked, self._tell = host, service, asked, tell
        self.incumbent: HostedEngine = service.engines[0]
        self.pauses = 0
        self.notes: list[str] = []
        self.run_id = new_run_id()
        self._at = now_text()
        self._began = time.monotonic()
        self._until = self._began + asked.for_s
        self._still = Standstill()
        self._asked_at = float("-inf")
        self._doing: asyncio.Task[Any] | None = None
        self._interrupted = False
        self._held_up = False
        self._most: int | None = None
        """Requests of a stretch; `None`: as many as it has."""
        self._stage = "its start"

    def say(self, text: str) -> None:
        self._tell(text)
        self.host.say(text)

    def note(self, text: str) -> None:
        self.notes.append(text)
        self.say(text)

    async def run(self) -> Shadowed:
        if self.asked.url is not None:
            return await self._elsewhere(self.asked.url)
        progress = Noted(asyncio.get_running_loop(), self._tell)
        ready, need, env, live = await asyncio.to_thread(self._made_ready, progress)
        self.host.check_room(need, f"{named(ready.plan)} beside {named(self.incumbent.plan)}")
        if not live:
            self.say(f"{named(ready.plan)} shares a device with {named(self.incumbent.plan)}: only idle time is used")
            self.host.on_request = self._give_way
        ours: list[HostedEngine] = []
        try:
            began = time.monotonic()
            challenger = await self._started(replace(ready.start(), env=env), need, live, ours)
            start_s = time.monotonic() - began if not self._held_up else None
            asked = self.incumbent if live else await self._stand_in(ours)
            self._until = time.monotonic() + self.asked.for_s
            await self._carried_on(warmed(where_it_was(challenger), 1), live)
            qualities = await self._qualities(ready.plan, asked, where_it_was(challenger), live)
            self._until = time.monotonic() + self.asked.for_s
            if live:
                sides = await self._beside(ready, challenger)
            else:
                sides = await self._replayed(ready, asked, challenger)
            cells = await asyncio.to_thread(
                lambda: self._cells(subject_of(ready, start_s), sides, qualities, LIVE if live else REPLAYED)
            )
        except TimeUp as error:
            raise AnswerIsNo(
                f"{named(ready.plan)} could not be compared in {seconds(self.asked.for_s)}",
                cause=self._why_late(),
                hint="give it more time: --for 1h",
            ) from error
        finally:
            self.host.on_request = None
            self._still.go()  # one that stands still does not hear that it is to end
            await asyncio.shield(asyncio.gather(*(self.host.remove_engine(one, 5) for one in ours)))
        return await self._concluded(named(ready.plan), cells, sides, live)

    async def _elsewhere(self, url: str) -> Shadowed:
        """Somebody else started it, and nothing of it is known but its answers."""
        asked = self.asked
        other = await found_at(url, asked.key, asked.served_model, asked.engine)
        self.note(f"{other.named} answers at {other.url}: nothing is started here, and no plan for here learns of it")
        if (wrong := await warmed(other.where, 1)) is not None:
            raise AnswerIsNo(f"{other.named} cannot be tried: {wrong}")
        qualities = await self._qualities(self.incumbent.plan, self.incumbent, other.where, True)
        sides = await self._live(other.named, other.where, MOST_IN_FLIGHT, other.fields)
        cells = await asyncio.to_thread(
            lambda: self._cells(other.subject(self.service.readied.decided.facts.name), sides, qualities, LIVE)
        )
        return await self._concluded(other.named, cells, sides, True)

    async def _concluded(self, name: str, cells: tuple[Cell, Cell], sides: Sides, live: bool) -> Shadowed:
        done = await asyncio.to_thread(self._judged, cells, sides, live)
        self.host.say(f"shadow of {name}: {done.verdict.answer}: {done.verdict.text}", aloud=False)
        return done

    def _why_late(self) -> str:
        if self.pauses:
            return f"the endpoint was hardly ever idle: it was interrupted {self.pauses} times"
        if time.monotonic() - self._asked_at < 2 * IDLE_S:
            return f"the endpoint was not idle for {seconds(IDLE_S)} at a time"
        return f"nobody asked for anything, but {self._stage} took so long"

    # the challenger, and somebody to compare it with

    def _made_ready(self, progress: Noted) -> tuple[Readied, Need, dict[str, str], bool]:
        """On cards that nobody uses where there are some; with what it needs, and whether it has them for itself."""
        host, wanted = self.host, replaced(self.service.wanted, engine=self.asked.engine, replicas=1)
        taken = {device for engine in host.engines for device in computes_on(engine.plan.settings.device, engine.need)}
        free = tuple(card for card in host.hardware.accelerators if f"card {card.index}" not in taken)
        hardware = replaced(host.hardware, accelerators=free) if free else host.hardware
        (one,) = decided([wanted], hardware, progress, build=self.asked.build, budget_bytes=host.room.budget_bytes)
        ready = readied(one, progress)
        need = need_of(one.decision, hardware.accelerators)
        device = ready.plan.settings.device
        live = computes_on(device, need).isdisjoint(taken)
        return ready, need, show_cards(device, cards_in(need)), live

    async def _stand_in(self, ours: list[HostedEngine]) -> HostedEngine:
        """One more of the engine in service, whose own cache and queue then know nothing of all this. It is also the
        fairer one to compare with: both are started beside others and have nobody else to serve."""
        mine = self.incumbent
        alone = f"{named(mine.plan)} itself is asked"
        if not self.host.has_room(mine.need):
            self.note(f"there is no room for one more of it, so {alone}: a request may wait for the step that it is at")
            return mine
        try:
            return await self._started(mine.start, mine.need, False, ours)
        except AnswerIsNo as error:
            self.note(error.summary)
            self.note(f"so {alone}: a request may wait for the step that it is at")
            return mine

    async def _started(self, start: EngineStart, need: Need, live: bool, ours: list[HostedEngine]) -> HostedEngine:
        if not live:
            await self._idle()
        again = "one more " if start.plan is self.incumbent.plan else ""
        self.say(f"starting {again}{named(start.plan)}; it gets none of the endpoint's requests")
        before = {engine.id for engine in self.service.engines}
        adding = asyncio.create_task(self.host.add_engine(start, service=self.service.name, share=0.0, need=need))
        try:
            while not adding.done():
                await asyncio.wait({adding}, timeout=2 * LOOK_S)
                for engine in self.service.engines:
                    if not live and engine.id not in before:
                        self._still.add(engine)
                if not live and self._looked():
                    self._held_up = True
            engine = await adding
        except OutsideFailed as error:
            cause = error.cause or ("it stood still while requests came" if self._held_up else None)
            raise AnswerIsNo(f"{named(start.plan)} cannot be tried: {error.message}", cause=cause) from error
        except BaseException:
            self._still.go()
            adding.cancel()
            await asyncio.gather(adding, return_exceptions=True)
            raise
        ours.append(engine)
        await asyncio.to_thread(self._still.look)
        return engine

    # only when nobody asks

    def _is_busy(self) -> bool:
        return any(
            service.in_flight or self.host.gateway.waiting(service.name) for service in self.host.services.values()
        )

    def _give_way(self) -> None:
        """Somebody asks for something: from this moment on nothing of ours moves."""
        self._asked_at = time.monotonic()
        self._still.stop()
        if self._doing is not None and not self._doing.cancelling():
            self._doing.cancel()

    async def _idle(self) -> None:
        began, told = time.monotonic(), False
        while True:
            if self._is_busy():
                self._give_way()
                if not told and time.monotonic() - began > TELL_AFTER_S:
                    self._tell("waiting until nobody asks for anything")
                    told = True
            left_s = self._asked_at + IDLE_S - time.monotonic()
            if left_s <= 0:
                return
            if time.monotonic() > self._until:
                raise TimeUp
            await asyncio.sleep(min(left_s, 10 * LOOK_S))

    def _looked(self) -> bool:
        """Lets what is not timed go on when nobody asks, and stand still when somebody does. Whether somebody does."""
        if self._is_busy():
            self._give_way()
            return True
        if self._still.is_still and time.monotonic() - self._asked_at > LOAD_IDLE_S:
            self._still.go()
        return False

    async def _carried_on(self, work: Coroutine[Any, Any, T], live: bool) -> T:
        """Of work that is not timed nothing has to be done anew: those who answer stand still meanwhile."""
        doing = asyncio.create_task(work)
        try:
            while not doing.done():
                await asyncio.wait({doing}, timeout=2 * LOOK_S if not live else None)
                if not live and self._looked() and time.monotonic() > self._until:
                    raise TimeUp
        finally:
            if not doing.done():
                doing.cancel()
                await asyncio.gather(doing, return_exceptions=True)
        return doing.result()

    async def _guarded(self, work: Callable[[], Coroutine[Any, Any, T]], most: int | None = None) -> T:
        """Does it while nobody asks for anything; begins anew when it was interrupted, `most` times."""
        for number in itertools.count():
            if number == most:
                raise Interrupted
            await self._idle()
            if time.monotonic() > self._until:
                raise TimeUp
            self._still.go()
            await self._settled()
            if self._still.is_still:
                continue
            doing = asyncio.create_task(work())
            self._doing = doing
            try:
                while not doing.done():
                    await asyncio.wait({doing}, timeout=LOOK_S)
                    if self._is_busy():
                        self._give_way()
            finally:
                self._doing = None
                if not doing.done():
                    doing.cancel()
                    await asyncio.gather(doing, return_exceptions=True)
            if not doing.cancelled():
                return doing.result()
            self.pauses += 1
            self._interrupted = True
        raise AssertionError("it counts for ever")

    async def _settled(self) -> None:
        """The next stretch must not pay for what was interrupted."""
        if not self._interrupted:
            return
        until, before_s = time.monotonic() + LONGEST_SETTLE_S, await asyncio.to_thread(self._still.busy_s)
        while time.monotonic() < until:
            await asyncio.sleep(SETTLE_LOOK_S)
            if self._still.is_still:
                return
            busy_s = await asyncio.to_thread(self._still.busy_s)
            if busy_s - before_s < SETTLED_SHARE * SETTLE_LOOK_S:
                break
            before_s = busy_s
        self._interrupted = False

    # answers

    async def _qualities(self, plan: Plan, asked: HostedEngine, theirs: Where, live: bool) -> tuple[Quality, Quality]:
        """`plan` is the challenger's; of one that is elsewhere, the one whose weights it is held to."""
        mine = where_of(asked)
        if plan.workload.task != "generate" or mine is None:
            return Quality(note="not asked for"), Quality(note="not asked for")
        incumbent, hardware = self.incumbent.plan, self.host.hardware

        async def both() -> tuple[Quality, Quality]:
            basis = await basis_of(plan, incumbent, mine)
            own = Basis(None, (), True, False, basis.reference)
            first = await checked(hardware, incumbent, mine, own, "answers")
            # What another machine says beside the reference must not be kept as what this plan says here.
            beside = basis if self.asked.url is None else basis._replace(reference=None)
            return quality_of(first), quality_of(await checked(hardware, plan, theirs, beside, "answers"))

        self.say("answers are compared")
        self._stage = "comparing answers"
        found = await (self._carried_on(both(), live) if asked is not self.incumbent or live else self._guarded(both))
        challenger = named(plan) if self.asked.url is None else self.asked.engine
        for name, one in zip((named(incumbent), challenger), found, strict=True):
            self._tell(f"answers of {name} are {one.verdict}: {one.note}")
        return found

    # in turns

    async def _replayed(self, ready: Readied, asked: HostedEngine, challenger: HostedEngine) -> Sides:
        shapes, source = await asyncio.to_thread(self._shapes, ready)
        chosen = episodes(shapes, self.asked.share)
        load = load_of(chosen, source)
        targets = [Target.of(w.url, key=w.key, model=w.name) for w in (where_it_was(asked), where_it_was(challenger))]
        self._stage = "finding out how it counts tokens"
        prepared = [await self._guarded(lambda t=t: prepare(t, load, shapes=shapes_of(chosen))) for t in targets]  # type: ignore[misc]
        self._stage = "a stretch of requests"
        sides, late, restarts = Sides(load, [], []), 0, asked.backend.restarts
        for number, episode in enumerate(chosen):
            # Whoever went second goes first the next time: what drifts is shared out.
            order = (0, 1) if number % 2 == 0 else (1, 0)
            try:
                pair = await self._pair(order, targets, load, prepared, episode, number)
            except TimeUp:
                self.note(f"time was up after {number} of {len(chosen)} stretches")
                break
            if asked.backend.restarts != restarts:
                raise AnswerIsNo(f"{named(asked.plan)} stopped while it was compared with", cause=asked.backend.reason)
            if pair is None:
                late += 1
                continue
            sides.a.append(pair[0])
            sides.b.append(pair[1])
            self._tell(f"stretch {number + 1} of {len(chosen)}, {len(pair[0].samples)} requests to each side")
        if late:
            self.note(f"{late} stretches do not count: other work on this machine held up the client")
        if not sides.a:
            raise TimeUp
        return sides

    async def _pair(
        self,
        order: tuple[int, int],
        targets: Sequence[Target],
        load: Load,
        prepared: Sequence[Prepared],
        episode: Episode,
        number: int,
    ) -> dict[int, Repeat] | None:
        """Both sides right after each other; once more where the client itself was held up."""
        attempt, episode = 0, episode[: self._most]
        while attempt < TRIES:
            pair: dict[int, Repeat] = {}
            try:
                for side in order:
                    call = _call(targets[side], load, prepared[side], episode, TRIES * number + attempt)
                    most = MOST_INTERRUPTED if len(episode) > 1 else None
                    pair[side] = await self._guarded(lambda call=call: _apart(call), most)  # type: ignore[misc]
            except Interrupted:
                # Real requests leave it less time than it needs: half of them, then, and of those to come no more.
                self._most = len(episode) // 2
                episode = episode[: self._most]
                continue
            if not any(repeat.client.limit for repeat in pair.values()):
                return pair
            attempt += 1
        return None

    def _shapes(self, ready: Readied) -> tuple[tuple[RequestShape, ...], str]:
        name, since_s = self.service.name, self.asked.since_s
        longest = min(ready.plan.settings.context_tokens, self.incumbent.plan.settings.context_tokens)
        found = recorded(store.requests(time.time() - since_s, model=name), longest)
        if found.too_long:
            self._later_note(f"{found.too_long} recorded requests are too long for one of the engines")
        if found.shapes:
            return found.shapes, f"{name}, last {seconds(since_s)},"
        self._later_note("no request was recorded: the work that the plan assumed is replayed")
        return assumed(ready.plan.workload).shapes, f"{name}, as planned,"

    def _later_note(self, text: str) -> None:
        """From a thread."""
        self.notes.append(text)

    # live

    async def _beside(self, ready: Readied, challenger: HostedEngine) -> Sides:
        where = where_it_was(challenger)
        prepared = await prepare(Target.of(where.url, key=where.key, model=where.name), REHEARSED)
        at_once = min(MOST_IN_FLIGHT, ready.plan.settings.slots)
        return await self._live(named(ready.plan), where, at_once, prepared.fields)

    async def _live(self, name: str, where: Where, at_once: int, fields: Sequence[str]) -> Sides:
        asked = self.asked
        self.say(f"{asked.share:.0%} of the requests go to {name}, too, once they are answered")
        watched = [engine.backend for engine in self.service.engines if engine.backend.share]
        async with Mirror(where, asked.share, at_once, asked.for_s, fields) as mirror:
            for backend in watched:
                backend.on_end = mirror.take
            try:
                await asyncio.sleep(asked.for_s)
            finally:
                for backend in watched:
                    backend.on_end = None
        if mirror.skipped:
            self.note(f"{mirror.skipped} sampled requests were left out, since the challenger was busy")
        return mirror.sides(self.service.name, self.run_id)

    # the verdict

    def _cells(
        self, challenger: Subject, sides: Sides, qualities: tuple[Quality, Quality], notes: str
    ) -> tuple[Cell, Cell]:
        machine, incumbent = fingerprint(self.host.hardware), subject_of(self.service.readied, None)
        return (
            cell_of(self.run_id, self._at, machine, incumbent, sides.load, sides.a, qualities[0], notes),
            cell_of(self.run_id, self._at, machine, challenger, sides.load, sides.b, qualities[1], notes),
        )

    def _judged(self, cells: tuple[Cell, Cell], sides: Sides, live: bool) -> Shadowed:
        a, b = cells
        run = Run(
            id=self.run_id,
            at=self._at,
            environment=environment_of(self.host.hardware, ("bedplate", "shadow", self.asked.engine)),
            finished=True,
            models=(replaced(self.service.readied.decided.facts, files=(), chat_template=None),),
        )
        here = self.asked.url is None
        with contextlib.suppress(OutsideFailed):  # a full disk is no reason to hide the verdict
            store.add_run(run)
            for cell in cells:
                store.add_cell(cell)
            for result in results_of(a, b) if here else ():  # plans for this machine learn of this machine
                store.add(result)
        try:
            allow = () if here else UNKNOWN_ELSEWHERE
            verdict = compare([a], [b], target=self.service.wanted.workload.latency, allow=allow)
        except BadQuestion as error:
            names = f"{b.subject.engine} cannot be held against {a.subject.engine} by what was measured"
            raise AnswerIsNo(names, cause=error.cause, hint=f"bedplate diagnose {self.run_id}") from error
        if live and self.asked.share < ALL:
            verdict = at_less_load(verdict, self.asked.share)
        if here:
            with contextlib.suppress(OutsideFailed):
                store.add_verdict(verdict, self._at)  # the live page shows the last one
        return Shadowed(
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


def computes_on(device: str, need: Need) -> frozenset[str]:
    """The devices whose time it takes; the host's memory is no device that two could not share."""
    cards = frozenset(name for name in need if name.startswith("card "))
    return cards if device != "cpu" and cards else frozenset(["cpu"])


def cards_in(need: Need) -> tuple[int, ...]:
    return tuple(int(name.removeprefix("card ")) for name in need if name.startswith("card "))


def quality_of(found: Sequence[Checked]) -> Quality:
    """By the reference where there is one, else by the engine in service; broken beside either is broken."""
    broken = next((one for one in found if one.verdict == "broken"), None)
    told = broken or next((one for one in found if one.verdict == "ok"), None) or next(iter(found), None)
    if told is None or told.verdict == "unchecked":
        return Quality(note=told.why if told is not None else "not checked")
    beside = "" if told.against == "the reference" else "beside the engine in service: "
    return Quality(
        asked=told.asked,
        agreement=told.agreed / told.answered if told.answered else None,
        verdict=told.verdict,
        note=f"{beside}{told.why}",
    )


def at_less_load(verdict: Verdict, share: float) -> Verdict:
    """A challenger with a part of the load alone has it easier: its advantage proves nothing, its lag does."""
    difference = Difference(
        what="requests", a="all", b=f"{share:.0%} of them", note="less load flatters the challenger"
    )
    found = replaced(verdict, differences=(*verdict.differences, difference))
    if verdict.answer != "migrate":
        return found
    return replaced(
        found,
        answer="not proven",
        constraint="load",
        text=f"{verdict.text} But it had {share:.0%} of the load.",
        would_prove="the same with all of the load: --share 100%",
    )


def subject_of(ready: Readied, start_s: float | None) -> Subject:
    facts, plan, environment = ready.decided.facts, ready.plan, ready.environment
    return Subject(
        engine=plan.engine,
        engine_version=plan.engine_version,
        model=facts.name,
        quantization=ready.decided.decision.quantization,
        weights_id=content_id(facts)[:12] if facts.files and Path(facts.files[0]).exists() else None,
        device=plan.settings.device,
        parallelism=plan.parallelism,
        settings=plan.settings,
        build=ready.build,
        start_s=start_s,
        install_bytes=environment.disk_bytes or None,
    )


def shapes_of(chosen: Sequence[Episode]) -> tuple[RequestShape, ...]:
    return tuple(shape for episode in chosen for shape in episode)


# one stretch


def _call(target: Target, load: Load, prepared: Prepared, episode: Episode, number: int) -> Call:
    span_s = (episode[-1].started_s or 0.0) + 1.0
    return Call(
        target=target,
        load=load,
        prepared=prepared,
        seconds=span_s,
        # A stretch has few requests, which would wait behind those of a warm-up; both sides have been warmed up before.
        warmup_s=0.0,
        most_seconds=span_s + REQUEST_LIMIT_S,
        timeout_s=REQUEST_LIMIT_S,
        round=number,
        shapes=episode,
        check=False,
    )


async def _apart(call: Call) -> Repeat:
    """In a process of its own, so that the gateway's loop has nothing to do with it; ended at once when it must."""
    process = _generator()
    listening = asyncio.get_running_loop().run_in_executor(None, _listen, process, call)
    try:
        return fairly(await asyncio.shield(listening))
    finally:
        process.kill()
        await asyncio.gather(listening, return_exceptions=True)


def _generator() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "bedplate.measure.load"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _listen(process: subprocess.Popen[bytes], call: Call) -> Repeat:
    """In a thread, until it has said its repeat, or was ended."""
    with process:
        if process.stdin is None or process.stdout is None:
            raise OutsideFailed("the load generator has no pipes")
        with contextlib.suppress(OSError):
            process.stdin.write(msgspec.json.encode(call) + b"\n")
            process.stdin.flush()
        try:
            for line in process.stdout:
                said = msgspec.json.decode(line, type=Said)
                if said.problem is not None:
                    raise raised(said.problem)
                if said.repeat is not None:
                    return said.repeat
            raise OutsideFailed("the load generator ended before its time")
        finally:
            process.kill()


def fairly(repeat: Repeat) -> Repeat:
    """The client's lateness is weighed by how long requests took, which is what is compared here: a stretch is so short
    that its 99th percentile is its one worst moment."""
    took = [sample.duration_ms for sample in repeat.samples if sample.outcome == "ok"]
    client = repeat.client
    lag_ms = max(client.loop_lag_p99_ms, client.send_lag_p99_ms)
    if not client.limit or not took or client.cpu_share > MOST_CPU:
        return repeat
    if lag_ms > max(LEAST_LAG_MS, LAG_SHARE * statistics.median(took)):
        return repeat
    return replaced(repeat, client=replaced(client, limit=False, reasons=()))
