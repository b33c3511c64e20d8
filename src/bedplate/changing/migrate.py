"""Migration: swaps the engine behind a running endpoint without losing a request, and rolls back if a check fails.

It does not decide which engine is better. It checks that the requested engine gives correct answers, does not fail
more requests and is not slower than allowed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, cast

import msgspec

from bedplate.changing.challenger import Noted, named, where_it_was, where_of
from bedplate.changing.sides import LEAST_SEEN, Limits, Seen, Tally, latency, stuck, worse
from bedplate.decide.planning import plan as plan_of
from bedplate.decide.together import HOST, need_of
from bedplate.errors import AnswerIsNo, BadQuestion, OutsideFailed
from bedplate.facts.hardware import probe
from bedplate.measure.answers import ASKED, ASKED_IN_SERVICE, Basis, basis_of, checked, warmed
from bedplate.measure.moments import now_text
from bedplate.run.ready import Decided, Readied, decided, readied
from bedplate.values import Decision, Hardware, replaced
from bedplate.values.migration import Checked, Migration, Party, Stage, Step
from bedplate.values.record import Record
from bedplate.values.service import Build
from bedplate.values.units import seconds
from bedplate.values.workload import Positive

if TYPE_CHECKING:
    from bedplate.hosting.control import Tell
    from bedplate.hosting.host import Host, HostedEngine, HostedService

STEPS = (10.0, 50.0, 100.0)
HOLD_MOST = 256
HOLD_S = 3600.0
"""How long a request may be held. An accepted request is kept until the swap has succeeded or was rolled back."""
LEAST_STEP_S = 3.0
MOST_STEP_S = 60.0
IDLE_STEP_S = 5.0
"""Length of a step without requests: waiting longer would measure nothing."""
LOOK_S = 0.1
DRAIN_S = 3600.0
"""Time for running requests to finish, however long their responses are."""
FALLBACK_SHARE = 1e-9
"""The share of an engine that gets no requests except those that the other engine fails."""
WARM_AT_ONCE = 4
UNDER_LOAD = 16
"""Prefixes that are checked again while the challenger has all of the traffic."""
SWAP_TRIES = 2
WRONG_ANSWERS: tuple[Stage, ...] = ("answers", "answers under load")
"""Stages that reject a challenger because of wrong answers, not because it is slow or unstable."""
Percent = Annotated[float, msgspec.Meta(gt=0, le=100)]


class Migrate(Record, frozen=True, kw_only=True):
    """The arguments of the operation `migrate`."""

    engine: str
    model: str | None = None
    """The served name; None for the only model."""
    decision: Decision | None = None
    """A decision printed by `plan`; None to decide now."""
    build: Build = "packages"
    steps: tuple[Percent, ...] = STEPS
    least_step_s: Positive = LEAST_STEP_S
    most_step_s: Positive = MOST_STEP_S
    hold_most: Annotated[int, msgspec.Meta(ge=0)] = HOLD_MOST
    slower: Annotated[float, msgspec.Meta(ge=1)] = 1.5
    """Largest factor by which TTFT and TPOT may grow if the service has no latency target."""
    drain_s: Positive = DRAIN_S
    prefixes: Annotated[int, msgspec.Meta(ge=8, le=ASKED)] = ASKED
    """Number of prefixes after which the next token is compared."""


async def migrate(host: Host, asked: Migrate, tell: Tell) -> Migration:
    """Migrate a service and return the outcome. Raises if it could not be tried, or if no engine is left."""
    service = host.service(asked.model)
    service.check_own()
    if host.state != "ready" or service.doing is not None:
        raise AnswerIsNo(
            f"{service.name} cannot be migrated now",
            cause=f"it is busy: {service.doing}" if service.doing is not None else f"the host is {host.state}",
            hint="try again later",
        )
    with service.engaged(f"migrating to {asked.engine}"):
        return await Migrating(host, service, asked, tell).run()


class Refused(Exception):
    """The challenger failed a check."""

    def __init__(self, stage: Stage, reason: str) -> None:
        super().__init__(reason)
        self.stage, self.reason = stage, reason


class Migrating:
    """One migration."""

    def __init__(self, host: Host, service: HostedService, asked: Migrate, tell: Tell) -> None:
        self.host, self.service, self.asked, self._tell = host, service, asked, tell
        self.before = service.readied
        self.incumbents = [engine for engine in service.engines if not engine.leaving]
        self.challengers: list[HostedEngine] = []
        self.limits = Limits(asked.slower, service.wanted.workload.latency)
        self.checks: list[Checked] = []
        self.steps: list[Step] = []
        self.notes: list[str] = []
        self.cut = self.held_most = 0
        self.held_s = 0.0
        self._at = now_text()
        self._began = time.monotonic()
        self._shares = {engine.id: engine.backend.share for engine in self.incumbents}
        self._usual = Tally(engine.backend for engine in self.incumbents)
        self._tally = Tally()

    def say(self, text: str) -> None:
        self._tell(text)
        self.host.say(text)

    def _doing(self, stage: str) -> None:
        busy = self.service.busy
        if busy is not None:
            self.service.busy = busy._replace(doing=f"migrating to {self.asked.engine}: {stage}")

    async def run(self) -> Migration:
        try:
            self._doing("preparing")
            ready = await self._readied()
            if self._is_the_same(ready):
                raise BadQuestion(
                    f"{ready.plan.engine} {ready.plan.engine_version} already serves {self.service.name}",
                    cause="the weights and settings are also the same",
                )
            both_fit = self.host.room.holds([*ready.needs, *(engine.need for engine in self.host.engines)])
            if both_fit or not self.incumbents:
                return await self._side_by_side(ready)
            if (smaller := await self._plan_in_free_memory(ready)) is not None:
                self._note(f"{named(smaller.plan)} gets the GPU memory that is free beside {named(self.before.plan)}")
                return await self._side_by_side(smaller)
            return await self._swap(ready)
        finally:
            self._usual.close()
            self._tally.close()

    # preparation

    async def _readied(self) -> Readied:
        """Decide and install in a thread, so that the gateway continues to serve requests."""
        progress = Noted(asyncio.get_running_loop(), self._tell)
        return await asyncio.to_thread(self._made_ready, progress)

    async def _plan_in_free_memory(self, ready: Readied) -> Readied | None:
        """The same engine within the GPU memory that is free now, if it serves as many requests there.

        An engine that takes a share of a GPU's memory takes it whether or not the workload needs it.
        """
        if self.asked.decision is not None or self.host.room.budget_bytes is not None or not uses_gpu(ready):
            return None
        progress = Noted(asyncio.get_running_loop(), self._tell)
        hardware = await asyncio.to_thread(measure_free_memory, self.host.hardware)
        try:
            smaller = await asyncio.to_thread(self._made_ready, progress, hardware)
        except AnswerIsNo:
            return None
        wanted, found = ready.plan.settings, smaller.plan.settings
        enough = found.slots >= wanted.slots and found.context_tokens >= wanted.context_tokens
        return smaller if enough else None

    def _made_ready(self, progress: Noted, hardware: Hardware | None = None) -> Readied:
        asked, host = self.asked, self.host
        wanted = replaced(self.service.wanted, engine=asked.engine)
        hardware = hardware or host.hardware
        (one,) = decided([wanted], hardware, progress, build=asked.build, budget_bytes=host.room.budget_bytes)
        if asked.decision is not None:
            one = as_planned(one, asked.decision)
        examiner = None
        if asked.build == "native":
            from bedplate.measure.builds import BuildExaminer

            examiner = BuildExaminer()
        return readied(one, progress, examiner=examiner)

    def _is_the_same(self, ready: Readied) -> bool:
        old = self.before
        return bool(self.incumbents) and (old.plan, old.environment, old.folder) == (
            ready.plan,
            ready.environment,
            ready.folder,
        )

    # side by side

    async def _side_by_side(self, ready: Readied) -> Migration:
        try:
            incumbent = f" next to {named(self.before.plan)}" if self.incumbents else ""
            self.say(f"starting {named(ready.plan)}{incumbent}")
            self._doing("starting and checking it")
            basis = await self._basis(ready)
            baseline = self._usual.since()
            await self._start(ready, share=0.0)
            await self._examine(ready, basis)
            await self._move(ready, basis, baseline)
        except Refused as refused:
            return await self._back(ready, refused)
        except BaseException:
            if self._serves(self.incumbents) or not self._serves(self.challengers):
                self._restore()
                with contextlib.suppress(Exception):
                    await asyncio.shield(self._take_back())
            raise
        await self._retire(self.incumbents)
        return self._migrated(ready, side_by_side=True)

    async def _back(self, ready: Readied, refused: Refused) -> Migration:
        """Roll back to the incumbent, or to a new engine of the same plan if the incumbent has died."""
        if not self.incumbents or self._serves(self.incumbents):
            await self._take_back()
            return self._rolled_back(ready, refused, side_by_side=True)
        died = self._death(self.incumbents[0]) or "it is not running"
        self._note(f"{named(self.before.plan)} cannot take the requests back: {died}")
        dead, self.incumbents = self.incumbents, []
        wrong = refused.stage in WRONG_ANSWERS
        # A slow challenger serves until the old engine is back. One that gives wrong answers is removed at once.
        may_stay = not wrong and self._serves(self.challengers)
        with contextlib.nullcontext() if may_stay else self._held():
            await self._retire(dead if may_stay else [*dead, *self.challengers])
            try:
                await self._start_again(give_up=not may_stay)
            except OutsideFailed as error:
                if may_stay and self._serves(self.challengers):
                    return self._kept(ready, refused, error)
                self.service.failure = error.message
                raise
        if may_stay:
            await self._retire(self.challengers)
        return self._rolled_back(ready, refused, side_by_side=True)

    def _kept(self, ready: Readied, refused: Refused, error: OutsideFailed) -> Migration:
        """Keep the rejected challenger, because no other engine is left."""
        reason = f"{refused.reason}; it stays in service, because no other engine is left: {error.message}"
        self._note(f"{named(ready.plan)}: {reason}")
        return replaced(self._migrated(ready, side_by_side=True), stage=refused.stage, reason=reason)

    @staticmethod
    def _serves(engines: Sequence[HostedEngine]) -> bool:
        """Whether any of them is ready, also after a restart."""
        return any(engine.state == "ready" for engine in engines)

    async def _move(self, ready: Readied, basis: Basis, baseline: Sequence[Seen]) -> None:
        steps = self.asked.steps
        for percent in steps if steps[-1:] == (100.0,) else (*steps, 100.0):
            self._share(percent)
            self.say(f"sending {percent:g} % of the requests to {named(ready.plan)}")
            self._doing(f"it gets {percent:g} % of the requests")
            await self._observe(percent, baseline)
        await self._examine_again(ready, basis)

    def _share(self, percent: float) -> None:
        for engine in self.challengers:
            engine.backend.share = percent / 100 / len(self.challengers)
        for engine in self.incumbents:
            engine.backend.share = max(FALLBACK_SHARE, 1 - percent / 100) / len(self.incumbents)

    def _restore(self) -> None:
        """Restore the shares, incumbents first, so that at every moment some engine takes requests."""
        for engine in self.incumbents:
            engine.backend.share = self._shares[engine.id]
        for engine in self.challengers:
            engine.backend.share = 0.0

    async def _take_back(self) -> None:
        self._restore()
        await self._retire(self.challengers)

    # swap

    async def _swap(self, ready: Readied) -> Migration:
        """Stop the incumbent, then start the challenger, if both do not fit. Requests are held meanwhile."""
        name = self.service.name
        basis = await self._basis(ready)
        baseline = self._usual.since()
        self.say(f"{named(ready.plan)} does not fit next to {named(self.before.plan)}: holding new requests")
        self._doing("new requests are held")
        with self._held():
            await self._retire(self.incumbents)
            self.incumbents = []
            try:
                await self._start(ready, share=1.0)
                await self._examine(ready, basis)
            except (Refused, asyncio.CancelledError) as error:
                await self._retire(self.challengers)
                if not isinstance(error, Refused):
                    raise
                await self._start_again()
                return self._rolled_back(ready, error, side_by_side=False)
            held = self.host.gateway.waiting(name)
        try:
            # The held requests arrive as one burst, whose latency says nothing about the engine.
            await self._observe(100.0, baseline, skip=held)
            await self._examine_again(ready, basis)
        except Refused as refused:
            self.say(f"rolling back {named(ready.plan)}: {refused.reason}")
            with self._held():
                await self._retire(self.challengers)
                await self._start_again()
            return self._rolled_back(ready, refused, side_by_side=False)
        return self._migrated(ready, side_by_side=False)

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Hold new requests. Requests beyond `hold_most` are rejected before they are accepted."""
        gateway, name = self.host.gateway, self.service.name
        began = time.monotonic()
        gateway.hold(name, most=self.asked.hold_most, wait_s=HOLD_S)
        try:
            yield
        finally:
            self.held_most = max(self.held_most, gateway.waiting(name))
            self.held_s += time.monotonic() - began
            gateway.release(name)

    async def _start_again(self, *, give_up: bool = True) -> None:
        """Start the old engine again, with a retry. With `give_up`, the service fails if that does not work."""
        before = self.before
        self.say(f"starting {named(before.plan)} again")
        for attempt in range(SWAP_TRIES):
            try:
                self.incumbents = await self._engines(before, share=1.0)
                return
            except OutsideFailed as error:
                if attempt == SWAP_TRIES - 1:
                    if give_up:
                        self.service.failure = error.message
                        self.host.gateway.give_up(self.service.name, f"no engine could be started: {error.message}")
                    raise OutsideFailed(
                        f"{named(before.plan)} could not be started again: {error.message}",
                        cause=error.cause,
                        hint=f"{self.service.name} has no engine now; see bedplate logs {self.host.name}",
                    ) from error

    # engines

    async def _start(self, ready: Readied, share: float) -> None:
        try:
            self.challengers = await self._engines(ready, share)
        except OutsideFailed as error:
            raise Refused("start", error.summary) from error
        # The same engine with other settings is not a replica of the incumbent.
        group = f"{ready.plan.engine} {ready.plan.engine_version}, since {self._began}"
        for engine in self.challengers:
            engine.backend.group = group
            self._tally.listen(engine.backend)

    async def _engines(self, ready: Readied, share: float) -> list[HostedEngine]:
        starts = [
            asyncio.create_task(
                self.host.add_engine(ready.start(replica), service=self.service.name, share=share, need=need)
            )
            for replica, need in enumerate(ready.needs)
        ]
        try:
            return list(await asyncio.gather(*starts))
        except BaseException:
            for start in starts:
                start.cancel()
            for ended in await asyncio.gather(*starts, return_exceptions=True):
                if not isinstance(ended, BaseException):
                    await self.host.remove_engine(ended, 0)
            raise

    async def _retire(self, engines: Sequence[HostedEngine]) -> None:
        """Let the engines finish their requests, then stop them."""
        busy = sum(engine.backend.in_flight for engine in engines)
        if busy:
            self.say(f"waiting for {busy} running requests of {engines[0].plan.engine}")
        in_flight = {engine.id: engine.backend.in_flight for engine in engines}
        drained = await asyncio.gather(*(self.host.remove_engine(engine, self.asked.drain_s) for engine in engines))
        self.cut += sum(in_flight[engine.id] for engine, done in zip(engines, drained, strict=True) if not done)

    # checks

    async def _basis(self, ready: Readied) -> Basis:
        if ready.plan.workload.task != "generate":
            return Basis(None, (), True, False, None, "next tokens are compared only for generative models")
        where = where_of(self.incumbents[0]) if self.incumbents else None
        most = min(ASKED_IN_SERVICE, self.asked.prefixes)
        return await basis_of(ready.plan, self.before.plan if where is not None else None, where, most=most)

    async def _examine(self, ready: Readied, basis: Basis) -> None:
        """Warm up the challengers and check their answers, before they get requests."""
        if ready.plan.workload.task == "generate":
            self.say(f"warming up {named(ready.plan)} and comparing its answers")
            concurrency = max(1, min(ready.plan.settings.slots, WARM_AT_ONCE))
            for engine in self.challengers:
                problem = await warmed(where_it_was(engine), concurrency)
                if problem is not None or not _lives(engine):
                    raise Refused("warm-up", self._death(engine) or problem or "it died")
        for engine in self.challengers:
            await self._compared(ready, engine, basis, "answers")

    async def _examine_again(self, ready: Readied, basis: Basis) -> None:
        """Check the answers under all of the traffic: some defects appear only in a batch with other requests."""
        if self.checks and all(one.verdict != "unchecked" for one in self.checks):
            await self._compared(ready, self.challengers[0], basis, "answers under load", most=UNDER_LOAD)

    async def _compared(
        self, ready: Readied, engine: HostedEngine, basis: Basis, stage: Stage, *, most: int | None = None
    ) -> None:
        most = min(most or ASKED, self.asked.prefixes)
        found = await checked(self.host.hardware, ready.plan, where_it_was(engine), basis, stage, most=most)
        self.checks += found
        for one in found:
            if one.verdict == "unchecked":
                self.say(f"answers not compared with {one.against}: {one.why}")
        if (death := self._death(engine)) is not None:
            raise Refused(stage, death)
        broken = next((one for one in found if one.verdict == "broken"), None)
        if broken is not None:
            raise Refused(stage, f"it gives wrong answers: {broken.why}")

    async def _observe(self, percent: float, baseline: Sequence[Seen], *, skip: int = 0) -> None:
        """Compare both engines until enough requests have ended at the challenger, or the step is over."""
        asked, began = self.asked, time.monotonic()
        first, usual_first = self._tally.count + skip, self._usual.count
        while True:
            await asyncio.sleep(LOOK_S)
            spent_s = time.monotonic() - began
            seen, usual = self._tally.since(first), self._usual.since(usual_first)
            idle = not seen and not usual and not self.service.in_flight
            if percent >= 100 or len(usual) < LEAST_SEEN:
                usual = list(baseline) if len(baseline) >= LEAST_SEEN else self._usual.since()
            reason = next((death for engine in self.challengers if (death := self._death(engine))), None)
            reason = reason or worse(seen, usual, self.limits)
            over = spent_s >= (min(IDLE_STEP_S, asked.most_step_s) if idle else asked.most_step_s)
            if over and reason is None:
                in_flight = sum(engine.backend.in_flight for engine in self.challengers)
                reason = stuck(len(seen), in_flight, spent_s, usual, self.limits)
            if reason is not None or over or (len(seen) >= LEAST_SEEN and spent_s >= asked.least_step_s):
                break
        step = Step(percent=percent, seconds=round(spent_s, 3), challenger=latency(seen), beside=latency(usual))
        self.steps.append(step)
        if reason is not None:
            raise Refused("traffic", reason)
        if len(seen) < LEAST_SEEN:
            self._note(f"only {len(seen)} requests in {seconds(spent_s)} with {percent:g} % of the traffic")

    def _death(self, engine: HostedEngine) -> str | None:
        if _lives(engine):
            return None
        return f"it died: {engine.backend.reason or engine.supervisor.last_words or 'see its log'}"

    # outcome

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self.say(text)

    def _migrated(self, ready: Readied, *, side_by_side: bool) -> Migration:
        for engine in self.challengers:
            engine.backend.share = 1.0
        self.service.readied = ready
        self.service.wanted = replaced(self.service.wanted, engine=ready.plan.engine)
        self.service.failure = None
        done = self._ended(ready, "migrated", side_by_side)
        self.say(f"{self.service.name} is now served by {named(ready.plan)}, after {seconds(done.took_s)}")
        return done

    def _rolled_back(self, ready: Readied, refused: Refused, *, side_by_side: bool) -> Migration:
        done = self._ended(ready, "rolled back", side_by_side)
        self.say(f"rolled back to {named(self.before.plan)}; {named(ready.plan)} failed a check: {refused.reason}")
        return replaced(done, stage=refused.stage, reason=refused.reason)

    def _ended(self, ready: Readied, outcome: str, side_by_side: bool) -> Migration:
        return Migration(
            at=self._at,
            model=self.service.name,
            a=_party(self.before),
            b=_party(ready),
            outcome=cast(Any, outcome),
            side_by_side=side_by_side,
            took_s=round(time.monotonic() - self._began, 3),
            checks=tuple(self.checks),
            steps=tuple(self.steps),
            held_most=self.held_most,
            held_s=round(self.held_s, 3),
            cut=self.cut,
            notes=tuple(self.notes),
        )


def as_planned(one: Decided, decision: Decision) -> Decided:
    """The same with an earlier decision."""
    if decision.model != one.facts.name:
        raise BadQuestion(f"the plan is for {decision.model}, but {one.facts.name} is served")
    if decision.engine != one.plan.engine:
        raise BadQuestion(f"the plan is for {decision.engine}, not for {one.plan.engine}")
    need = need_of(decision, one.hardware.accelerators)
    part = dataclasses.replace(one.part, decision=decision, needs=tuple(need for _ in one.part.needs))
    return dataclasses.replace(one, part=part, plan=plan_of(decision, one.facts, part.workload))


def uses_gpu(ready: Readied) -> bool:
    return any(device != HOST for need in ready.needs for device in need)


def measure_free_memory(hardware: Hardware) -> Hardware:
    """The same machine with the GPU memory that is free now."""
    now = {(card.vendor, card.index): card.free_bytes for card in probe(recall=False).accelerators}
    cards = tuple(replaced(card, free_bytes=now.get((card.vendor, card.index))) for card in hardware.accelerators)
    return replaced(hardware, accelerators=cards)


def read_steps(text: str) -> tuple[float, ...]:
    """Parse increasing percentages such as 10,50,100."""
    try:
        found = tuple(float(word.strip().removesuffix("%")) for word in text.split(","))
    except ValueError:
        found = ()
    if not found or list(found) != sorted(set(found)) or not all(0 < one <= 100 for one in found):
        raise BadQuestion(f"--step {text!r} is not a list of increasing percentages", hint="for example 10,50,100")
    return found


def _lives(engine: HostedEngine) -> bool:
    return engine.state == "ready" and engine.backend.restarts == 0


def _party(ready: Readied) -> Party:
    return Party(
        engine=ready.plan.engine,
        engine_version=ready.plan.engine_version,
        quantization=ready.plan.weights.label,
        replicas=len(ready.needs),
    )
