"""Migration: swaps the engine behind a running endpoint without losing a request, and rolls back if a check fails.

It does not decide which engine is better. It checks that the requested engine gives correct answers, does not fail
more requests and is not slower than allowed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

import msgspec

from bedplate.changing.challenger import (
    ThreadProgress,
    describe_plan,
    find_address,
    get_last_address,
    run_in_thread,
)
from bedplate.changing.losses import ServiceOffer, check_losses, read_recent_use
from bedplate.changing.outcomes import (
    LEAST_SEEN,
    LatencyLimits,
    ObservedRequest,
    RequestTally,
    explain_stuck,
    explain_worse,
    summarize_latency,
)
from bedplate.decide.placement import HOST, count_need
from bedplate.decide.planning import plan as plan_of
from bedplate.engines import get_engine
from bedplate.errors import ExternalFailure, NotPossible, UsageError
from bedplate.facts.hardware import probe
from bedplate.measure.answers import (
    ASKED,
    ASKED_IN_SERVICE,
    AnswerBasis,
    check_challenger,
    collect_basis,
    warm_up_engine,
)
from bedplate.measure.moments import format_now
from bedplate.run.ready import ModelDecision, PreparedModel, decide_engines, prepare_model
from bedplate.values import Decision, Hardware, replace_fields
from bedplate.values.migration import AnswerCheck, Migration, MigrationEngine, MigrationStep, Stage
from bedplate.values.record import Record
from bedplate.values.service import Build
from bedplate.values.units import format_seconds
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
T = TypeVar("T")
Percent = Annotated[float, msgspec.Meta(gt=0, le=100)]


class MigrationRequest(Record, frozen=True, kw_only=True):
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
    force: bool = False
    """Migrate even if requests of the last day used what the engine lacks."""


class CancelRequest(Record, frozen=True, kw_only=True):
    """The arguments of the operation `cancel`."""

    model: str | None = None
    """The served name; None for the only model that is being migrated."""


async def migrate(host: Host, asked: MigrationRequest, tell: Tell) -> Migration:
    """Migrate a service and return the outcome. Raises if it could not be tried, or if no engine is left."""
    service = host.get_service(asked.model)
    service.check_swappable()
    if host.state != "ready" or service.current_operation is not None:
        raise NotPossible(
            f"{service.name} cannot be migrated now",
            cause=f"it is busy: {service.current_operation}"
            if service.current_operation is not None
            else f"the host is {host.state}",
            hint="try again later",
        )
    run = MigrationRun(host, service, asked, tell)
    with service.engage(f"migrating to {asked.engine}", run.cancel):
        return await run.run()


async def cancel_migration(host: Host, asked: CancelRequest, tell: Tell) -> Migration:
    """Cancel a running migration, and return its outcome when the old engine serves all requests again."""
    services = host.services.values() if asked.model is None else [host.get_service(asked.model)]
    found = [(one, one.busy) for one in services if one.busy is not None and one.busy.cancel is not None]
    if not found:
        raise NotPossible(
            "no migration is running",
            cause="; ".join(f"{one.name}: {one.current_operation or 'no operation'}" for one in services),
        )
    if len(found) > 1:
        raise UsageError(
            f"{len(found)} models are being migrated",
            hint=f"name one: --model {' or '.join(service.name for service, _ in found)}",
        )
    ((service, busy),) = found
    if busy.cancel is not None:
        busy.cancel()
    tell(f"cancelling: {service.name}, {busy.doing}")
    outcome: Migration = await asyncio.shield(busy.task)
    return outcome


class ChallengerRejected(Exception):
    """The challenger failed a check."""

    def __init__(self, stage: Stage, reason: str) -> None:
        super().__init__(reason)
        self.stage, self.reason = stage, reason


class MigrationRun:
    """One migration."""

    def __init__(self, host: Host, service: HostedService, asked: MigrationRequest, tell: Tell) -> None:
        self.host, self.service, self.asked, self._tell = host, service, asked, tell
        self.before = service.readied
        self.incumbents = [engine for engine in service.engines if not engine.leaving]
        self.challengers: list[HostedEngine] = []
        self.limits = LatencyLimits(asked.slower, service.wanted.workload.latency)
        self.checks: list[AnswerCheck] = []
        self.steps: list[MigrationStep] = []
        self.notes: list[str] = []
        self.cut = self.held_most = 0
        self.held_s = 0.0
        self._at = format_now()
        self._began = time.monotonic()
        self._shares = {engine.id: engine.backend.share for engine in self.incumbents}
        self._usual = RequestTally(engine.backend for engine in self.incumbents)
        self._tally = RequestTally()
        self._cancelled = asyncio.Event()
        self._stage = "preparing"
        self._is_decided = False
        """Whether the challenger has passed all checks: the incumbent is then stopped, and cannot take over again."""

    def cancel(self) -> None:
        """Roll back as soon as possible."""
        if self._is_decided:
            raise NotPossible(
                f"the migration to {self.asked.engine} has passed all checks and cannot be cancelled any more",
                cause="the old engine finishes its requests and stops",
                hint=f"bedplate migrate {self.before.plan.engine} migrates back",
            )
        self._cancelled.set()

    async def _run_unless_cancelled(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a part of the migration. When it is cancelled, the part is cancelled and the challenger rejected."""
        task, waiter = asyncio.create_task(work), asyncio.create_task(self._cancelled.wait())
        try:
            await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        finally:
            waiter.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        raise ChallengerRejected("cancelled", f"by request ({self._stage})")

    def say(self, text: str) -> None:
        self._tell(text)
        self.host.say(text)

    def _set_stage(self, stage: str) -> None:
        self._stage = stage
        busy = self.service.busy
        if busy is not None:
            self.service.busy = busy._replace(doing=f"migrating to {self.asked.engine}: {stage}")

    async def run(self) -> Migration:
        try:
            self._set_stage("preparing")
            try:
                ready = await self._run_unless_cancelled(self._prepare())
            except ChallengerRejected as cancelled:
                return self._finish_unprepared(cancelled)
            if self._is_unchanged(ready):
                raise UsageError(
                    f"{ready.plan.engine} {ready.plan.engine_version} already serves {self.service.name}",
                    cause="the weights and settings are also the same",
                )
            both_fit = self.host.room.holds([*ready.needs, *(engine.need for engine in self.host.engines)])
            if both_fit or not self.incumbents:
                return await self._migrate_side_by_side(ready)
            try:
                smaller = await self._run_unless_cancelled(self._plan_in_free_memory(ready))
            except ChallengerRejected as cancelled:
                return self._finish_unprepared(cancelled)
            if smaller is not None:
                self._add_note(
                    f"{describe_plan(smaller.plan)} gets the GPU memory that is free beside "
                    f"{describe_plan(self.before.plan)}"
                )
                return await self._migrate_side_by_side(smaller)
            return await self._swap(ready)
        finally:
            self._usual.close()
            self._tally.close()

    # preparation

    async def _prepare(self) -> PreparedModel:
        """Decide and install in a thread, so that the gateway continues to serve requests."""
        progress = ThreadProgress(asyncio.get_running_loop(), self._tell)
        return await run_in_thread(self._prepare_in_thread, progress)

    async def _plan_in_free_memory(self, ready: PreparedModel) -> PreparedModel | None:
        """The same engine within the GPU memory that is free now, if it serves as many requests there.

        An engine that takes a share of a GPU's memory takes it whether or not the workload needs it.
        """
        if self.asked.decision is not None or self.host.room.budget_bytes is not None or not uses_gpu(ready):
            return None
        progress = ThreadProgress(asyncio.get_running_loop(), self._tell)
        hardware = await asyncio.to_thread(measure_free_memory, self.host.hardware)
        try:
            smaller = await run_in_thread(self._prepare_in_thread, progress, hardware)
        except NotPossible:
            return None
        wanted, found = ready.plan.settings, smaller.plan.settings
        enough = found.slots >= wanted.slots and found.context_tokens >= wanted.context_tokens
        return smaller if enough else None

    def _prepare_in_thread(self, progress: ThreadProgress, hardware: Hardware | None = None) -> PreparedModel:
        asked, host = self.asked, self.host
        wanted = replace_fields(self.service.wanted, engine=asked.engine)
        hardware = hardware or host.hardware
        (one,) = decide_engines([wanted], hardware, progress, build=asked.build, budget_bytes=host.room.budget_bytes)
        if asked.decision is not None:
            one = replace_decision(one, asked.decision)
        self._check_losses(one, progress)
        examiner = None
        if asked.build == "native":
            from bedplate.measure.builds import BuildExaminer

            examiner = BuildExaminer()
        return prepare_model(one, progress, examiner=examiner)

    def _check_losses(self, one: ModelDecision, progress: ThreadProgress) -> None:
        """Refuse, before anything is installed, to lose what clients use."""
        before = ServiceOffer.from_plan(self.before.plan, len(self.before.needs))
        after = ServiceOffer.from_plan(one.plan, len(one.part.needs))
        for note in check_losses(before, after, read_recent_use(self.service.name), force=self.asked.force):
            if note not in self.notes:
                self.notes.append(note)
                progress.note(note)

    def _is_unchanged(self, ready: PreparedModel) -> bool:
        old = self.before
        return bool(self.incumbents) and (old.plan, old.environment, old.folder) == (
            ready.plan,
            ready.environment,
            ready.folder,
        )

    # side by side

    async def _migrate_side_by_side(self, ready: PreparedModel) -> Migration:
        try:
            incumbent = f" next to {describe_plan(self.before.plan)}" if self.incumbents else ""
            self.say(f"starting {describe_plan(ready.plan)}{incumbent}")
            self._set_stage("starting and checking it")
            await self._run_unless_cancelled(self._start_beside(ready))
            self._is_decided = True
        except ChallengerRejected as refused:
            return await self._roll_back(ready, refused)
        except BaseException:
            if self._is_any_ready(self.incumbents) or not self._is_any_ready(self.challengers):
                self._restore_shares()
                with contextlib.suppress(Exception):
                    await asyncio.shield(self._remove_challengers())
            raise
        await self._drain_and_stop(self.incumbents)
        return self._finish_migrated(ready, side_by_side=True)

    async def _start_beside(self, ready: PreparedModel) -> None:
        basis = await self._make_basis(ready)
        baseline = self._usual.list_since()
        await self._start_challengers(ready, share=0.0)
        await self._check_challengers(ready, basis)
        await self._shift_traffic(ready, basis, baseline)

    async def _roll_back(self, ready: PreparedModel, refused: ChallengerRejected) -> Migration:
        """Roll back to the incumbent, or to a new engine of the same plan if the incumbent has died."""
        if not self.incumbents or self._is_any_ready(self.incumbents):
            await self._remove_challengers()
            return self._finish_rolled_back(ready, refused, side_by_side=True)
        died = self._explain_death(self.incumbents[0]) or "it is not running"
        self._add_note(f"{describe_plan(self.before.plan)} cannot take the requests back: {died}")
        dead, self.incumbents = self.incumbents, []
        wrong = refused.stage in WRONG_ANSWERS
        # A slow challenger serves until the old engine is back. One that gives wrong answers is removed at once.
        may_stay = not wrong and self._is_any_ready(self.challengers)
        with contextlib.nullcontext() if may_stay else self._hold_requests():
            await self._drain_and_stop(dead if may_stay else [*dead, *self.challengers])
            try:
                await self._restart_incumbent(give_up=not may_stay)
            except ExternalFailure as error:
                if may_stay and self._is_any_ready(self.challengers):
                    return self._keep_challenger(ready, refused, error)
                self.service.failure = error.message
                raise
        if may_stay:
            await self._drain_and_stop(self.challengers)
        return self._finish_rolled_back(ready, refused, side_by_side=True)

    def _keep_challenger(self, ready: PreparedModel, refused: ChallengerRejected, error: ExternalFailure) -> Migration:
        """Keep the rejected challenger, because no other engine is left."""
        reason = f"{refused.reason}; it stays in service, because no other engine is left: {error.message}"
        self._add_note(f"{describe_plan(ready.plan)}: {reason}")
        return replace_fields(self._finish_migrated(ready, side_by_side=True), stage=refused.stage, reason=reason)

    @staticmethod
    def _is_any_ready(engines: Sequence[HostedEngine]) -> bool:
        """Whether any of them is ready, also after a restart."""
        return any(engine.state == "ready" for engine in engines)

    async def _shift_traffic(
        self, ready: PreparedModel, basis: AnswerBasis, baseline: Sequence[ObservedRequest]
    ) -> None:
        steps = self.asked.steps
        for percent in steps if steps[-1:] == (100.0,) else (*steps, 100.0):
            self._set_shares(percent)
            self.say(f"sending {percent:g} % of the requests to {describe_plan(ready.plan)}")
            self._set_stage(f"it gets {percent:g} % of the requests")
            await self._observe_step(percent, baseline)
        await self._check_under_load(ready, basis)

    def _set_shares(self, percent: float) -> None:
        for engine in self.challengers:
            engine.backend.share = percent / 100 / len(self.challengers)
        for engine in self.incumbents:
            engine.backend.share = max(FALLBACK_SHARE, 1 - percent / 100) / len(self.incumbents)

    def _restore_shares(self) -> None:
        """Restore the shares, incumbents first, so that at every moment some engine takes requests."""
        for engine in self.incumbents:
            engine.backend.share = self._shares[engine.id]
        for engine in self.challengers:
            engine.backend.share = 0.0

    async def _remove_challengers(self) -> None:
        self._restore_shares()
        await self._drain_and_stop(self.challengers)

    # swap

    async def _swap(self, ready: PreparedModel) -> Migration:
        """Stop the incumbent, then start the challenger, if both do not fit. Requests are held meanwhile."""
        name = self.service.name
        try:
            basis = await self._run_unless_cancelled(self._make_basis(ready))
        except ChallengerRejected as cancelled:
            return self._finish_rolled_back(ready, cancelled, side_by_side=False)
        baseline = self._usual.list_since()
        self.say(
            f"{describe_plan(ready.plan)} does not fit next to {describe_plan(self.before.plan)}: holding new requests"
        )
        self._set_stage("new requests are held")
        with self._hold_requests():
            try:
                waited_s = await self._run_unless_cancelled(self._wait_until_idle(self.incumbents))
            except ChallengerRejected as cancelled:
                return self._finish_rolled_back(ready, cancelled, side_by_side=False)
            await self._drain_and_stop(self.incumbents, max(0.0, self.asked.drain_s - waited_s))
            self.incumbents = []
            try:
                await self._run_unless_cancelled(self._start_instead(ready, basis))
            except (ChallengerRejected, asyncio.CancelledError) as error:
                await self._drain_and_stop(self.challengers)
                if not isinstance(error, ChallengerRejected):
                    raise
                await self._restart_incumbent()
                return self._finish_rolled_back(ready, error, side_by_side=False)
            held = self.host.gateway.count_waiting(name)
        try:
            # The held requests arrive as one burst, whose latency says nothing about the engine.
            await self._run_unless_cancelled(self._observe_alone(ready, basis, baseline, held))
            self._is_decided = True
        except ChallengerRejected as refused:
            self.say(f"rolling back {describe_plan(ready.plan)}: {refused.reason}")
            with self._hold_requests():
                await self._drain_and_stop(self.challengers)
                await self._restart_incumbent()
            return self._finish_rolled_back(ready, refused, side_by_side=False)
        return self._finish_migrated(ready, side_by_side=False)

    async def _start_instead(self, ready: PreparedModel, basis: AnswerBasis) -> None:
        await self._start_challengers(ready, share=1.0)
        await self._check_challengers(ready, basis)

    async def _observe_alone(
        self, ready: PreparedModel, basis: AnswerBasis, baseline: Sequence[ObservedRequest], held: int
    ) -> None:
        await self._observe_step(100.0, baseline, skip=held)
        await self._check_under_load(ready, basis)

    async def _wait_until_idle(self, engines: Sequence[HostedEngine]) -> float:
        """Wait until the engines have no requests, at most for the drain time; returns how long it took."""
        began = time.monotonic()
        if busy := sum(engine.backend.in_flight for engine in engines):
            self.say(f"waiting for {busy} running requests of {engines[0].plan.engine}")
        while any(engine.backend.in_flight for engine in engines):
            if time.monotonic() - began >= self.asked.drain_s:
                break
            await asyncio.sleep(LOOK_S)
        return time.monotonic() - began

    @contextmanager
    def _hold_requests(self) -> Iterator[None]:
        """Hold new requests. Requests beyond `hold_most` are rejected before they are accepted."""
        gateway, name = self.host.gateway, self.service.name
        began = time.monotonic()
        gateway.hold(name, most=self.asked.hold_most, wait_s=HOLD_S)
        try:
            yield
        finally:
            self.held_most = max(self.held_most, gateway.count_waiting(name))
            self.held_s += time.monotonic() - began
            gateway.release(name)

    async def _restart_incumbent(self, *, give_up: bool = True) -> None:
        """Start the old engine again, with a retry. With `give_up`, the service fails if that does not work."""
        before = self.before
        self.say(f"starting {describe_plan(before.plan)} again")
        for attempt in range(SWAP_TRIES):
            try:
                self.incumbents = await self._start_engines(before, share=1.0)
                return
            except ExternalFailure as error:
                if attempt == SWAP_TRIES - 1:
                    if give_up:
                        self.service.failure = error.message
                        self.host.gateway.give_up(self.service.name, f"no engine could be started: {error.message}")
                    raise ExternalFailure(
                        f"{describe_plan(before.plan)} could not be started again: {error.message}",
                        cause=error.cause,
                        hint=f"{self.service.name} has no engine now; see bedplate logs {self.host.name}",
                    ) from error

    # engines

    async def _start_challengers(self, ready: PreparedModel, share: float) -> None:
        try:
            self.challengers = await self._start_engines(ready, share)
        except ExternalFailure as error:
            raise ChallengerRejected("start", error.summary) from error
        # The same engine with other settings is not a replica of the incumbent.
        group = f"{ready.plan.engine} {ready.plan.engine_version}, since {self._began}"
        for engine in self.challengers:
            engine.backend.group = group
            self._tally.listen(engine.backend)

    async def _start_engines(self, ready: PreparedModel, share: float) -> list[HostedEngine]:
        starts = [
            asyncio.create_task(
                self.host.add_engine(ready.build_start(replica), service=self.service.name, share=share, need=need)
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

    async def _drain_and_stop(self, engines: Sequence[HostedEngine], drain_s: float | None = None) -> None:
        """Let the engines finish their requests, then stop them."""
        drain_s = self.asked.drain_s if drain_s is None else drain_s
        busy = sum(engine.backend.in_flight for engine in engines)
        if busy:
            self.say(f"waiting for {busy} running requests of {engines[0].plan.engine}")
        in_flight = {engine.id: engine.backend.in_flight for engine in engines}
        drained = await asyncio.gather(*(self.host.remove_engine(engine, drain_s) for engine in engines))
        self.cut += sum(in_flight[engine.id] for engine, done in zip(engines, drained, strict=True) if not done)

    # checks

    async def _make_basis(self, ready: PreparedModel) -> AnswerBasis:
        if ready.plan.workload.task != "generate":
            return AnswerBasis(None, (), True, False, None, "next tokens are compared only for generative models")
        where = find_address(self.incumbents[0]) if self.incumbents else None
        most = min(ASKED_IN_SERVICE, self.asked.prefixes)
        return await collect_basis(ready.plan, self.before.plan if where is not None else None, where, most=most)

    async def _check_challengers(self, ready: PreparedModel, basis: AnswerBasis) -> None:
        """Warm up the challengers and check their answers, before they get requests."""
        if ready.plan.workload.task == "generate":
            self.say(f"warming up {describe_plan(ready.plan)} and comparing its answers")
            concurrency = max(1, min(ready.plan.settings.slots, WARM_AT_ONCE))
            for engine in self.challengers:
                problem = await warm_up_engine(get_last_address(engine), concurrency)
                if problem is not None or not _is_healthy(engine):
                    raise ChallengerRejected("warm-up", self._explain_death(engine) or problem or "it died")
        for engine in self.challengers:
            await self._compare_answers(ready, engine, basis, "answers")

    async def _check_under_load(self, ready: PreparedModel, basis: AnswerBasis) -> None:
        """Check the answers under all of the traffic: some defects appear only in a batch with other requests."""
        if self.checks and all(one.verdict != "unchecked" for one in self.checks):
            await self._compare_answers(ready, self.challengers[0], basis, "answers under load", most=UNDER_LOAD)

    async def _compare_answers(
        self, ready: PreparedModel, engine: HostedEngine, basis: AnswerBasis, stage: Stage, *, most: int | None = None
    ) -> None:
        most = min(most or ASKED, self.asked.prefixes)
        found = await check_challenger(
            self.host.hardware, ready.plan, get_last_address(engine), basis, stage, most=most
        )
        self.checks += found
        for one in found:
            if one.verdict == "unchecked":
                self.say(f"answers not compared with {one.against}: {one.why}")
        if (death := self._explain_death(engine)) is not None:
            raise ChallengerRejected(stage, death)
        broken = next((one for one in found if one.verdict == "broken"), None)
        if broken is not None:
            raise ChallengerRejected(stage, f"it gives wrong answers: {broken.why}")

    async def _observe_step(self, percent: float, baseline: Sequence[ObservedRequest], *, skip: int = 0) -> None:
        """Compare both engines until enough requests have ended at the challenger, or the step is over."""
        asked, began = self.asked, time.monotonic()
        first, usual_first = self._tally.count + skip, self._usual.count
        while True:
            await asyncio.sleep(LOOK_S)
            spent_s = time.monotonic() - began
            seen, usual = self._tally.list_since(first), self._usual.list_since(usual_first)
            idle = not seen and not usual and not self.service.in_flight
            if percent >= 100 or len(usual) < LEAST_SEEN:
                usual = list(baseline) if len(baseline) >= LEAST_SEEN else self._usual.list_since()
            reason = next((death for engine in self.challengers if (death := self._explain_death(engine))), None)
            # Earlier steps compared rejections in the same period; now other clients may make other mistakes.
            compares = percent < 100 or all(step.challenger.requests < LEAST_SEEN for step in self.steps)
            reason = reason or explain_worse(seen, usual, self.limits, compare_rejections=compares)
            over = spent_s >= (min(IDLE_STEP_S, asked.most_step_s) if idle else asked.most_step_s)
            if over and reason is None:
                in_flight = sum(engine.backend.in_flight for engine in self.challengers)
                reason = explain_stuck(len(seen), in_flight, spent_s, usual, self.limits)
            if reason is not None or over or (len(seen) >= LEAST_SEEN and spent_s >= asked.least_step_s):
                break
        step = MigrationStep(
            percent=percent,
            seconds=round(spent_s, 3),
            challenger=summarize_latency(seen),
            beside=summarize_latency(usual),
        )
        self.steps.append(step)
        if reason is not None:
            raise ChallengerRejected("traffic", reason)
        if len(seen) < LEAST_SEEN:
            self._add_note(f"only {len(seen)} requests in {format_seconds(spent_s)} with {percent:g} % of the traffic")

    def _explain_death(self, engine: HostedEngine) -> str | None:
        if _is_healthy(engine):
            return None
        return f"it died: {engine.backend.reason or engine.supervisor.last_words or 'see its log'}"

    # outcome

    def _add_note(self, text: str) -> None:
        self.notes.append(text)
        self.say(text)

    def _finish_migrated(self, ready: PreparedModel, *, side_by_side: bool) -> Migration:
        for engine in self.challengers:
            engine.backend.share = 1.0
        self.service.readied = ready
        self.service.wanted = replace_fields(self.service.wanted, engine=ready.plan.engine)
        self.service.failure = None
        done = self._build_outcome(_to_party(ready), "migrated", side_by_side)
        self.say(
            f"{self.service.name} is now served by {describe_plan(ready.plan)}, after {format_seconds(done.took_s)}"
        )
        return done

    def _finish_rolled_back(
        self, ready: PreparedModel, refused: ChallengerRejected, *, side_by_side: bool
    ) -> Migration:
        done = self._build_outcome(_to_party(ready), "rolled back", side_by_side)
        why = "" if refused.stage == "cancelled" else " failed a check"
        self.say(
            f"rolled back to {describe_plan(self.before.plan)}; {describe_plan(ready.plan)}{why}: {refused.reason}"
        )
        return replace_fields(done, stage=refused.stage, reason=refused.reason)

    def _finish_unprepared(self, cancelled: ChallengerRejected) -> Migration:
        """The outcome of a migration that was cancelled before anything was started."""
        self.say(f"the migration to {self.asked.engine} was cancelled; nothing has changed")
        engine = get_engine(self.asked.engine)
        challenger = MigrationEngine(engine=engine.id, engine_version=engine.version or "")
        done = self._build_outcome(challenger, "rolled back", side_by_side=True)
        return replace_fields(done, stage=cancelled.stage, reason=cancelled.reason)

    def _build_outcome(self, challenger: MigrationEngine, outcome: str, side_by_side: bool) -> Migration:
        return Migration(
            at=self._at,
            model=self.service.name,
            a=_to_party(self.before),
            b=challenger,
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


def replace_decision(one: ModelDecision, decision: Decision) -> ModelDecision:
    """The same with an earlier decision."""
    if decision.model != one.facts.name:
        raise UsageError(f"the plan is for {decision.model}, but {one.facts.name} is served")
    if decision.engine != one.plan.engine:
        raise UsageError(f"the plan is for {decision.engine}, not for {one.plan.engine}")
    need = count_need(decision, one.hardware.accelerators)
    part = dataclasses.replace(one.part, decision=decision, needs=tuple(need for _ in one.part.needs))
    if decision.settings is not None and decision.settings.cards and len(part.needs) == 1:
        part = dataclasses.replace(part, cards=(decision.settings.cards,))
    return dataclasses.replace(one, part=part, plan=plan_of(decision, one.facts, part.workload))


def uses_gpu(ready: PreparedModel) -> bool:
    return any(device != HOST for need in ready.needs for device in need)


def measure_free_memory(hardware: Hardware) -> Hardware:
    """The same machine with the GPU memory that is free now; a GPU that does not report it counts as full."""
    now = {(card.vendor, card.index): card.free_bytes for card in probe(recall=False).accelerators}
    cards = tuple(
        replace_fields(card, free_bytes=now.get((card.vendor, card.index)) or 0) for card in hardware.accelerators
    )
    return replace_fields(hardware, accelerators=cards)


def read_steps(text: str) -> tuple[float, ...]:
    """Parse increasing percentages such as 10,50,100."""
    try:
        found = tuple(float(word.strip().removesuffix("%")) for word in text.split(","))
    except ValueError:
        found = ()
    if not found or list(found) != sorted(set(found)) or not all(0 < one <= 100 for one in found):
        raise UsageError(f"--step {text!r} is not a list of increasing percentages", hint="for example 10,50,100")
    return found


def _is_healthy(engine: HostedEngine) -> bool:
    return engine.state == "ready" and engine.backend.restarts == 0


def _to_party(ready: PreparedModel) -> MigrationEngine:
    return MigrationEngine(
        engine=ready.plan.engine,
        engine_version=ready.plan.engine_version,
        quantization=ready.plan.weights.label,
        replicas=len(ready.needs),
    )
