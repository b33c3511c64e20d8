"""Send a load and record the responses with timestamps. Responses are parsed after the measurement."""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from time import monotonic_ns
from typing import Any

from bedplate.errors import ExternalFailure
from bedplate.measure.load.deadlines import Deadlines
from bedplate.measure.load.preparing import PreparedEndpoint
from bedplate.measure.load.schedule import compute_stagger_s
from bedplate.measure.load.sessions import SessionFactory
from bedplate.measure.load.target import LoadTarget
from bedplate.measure.load.wire import HttpExchange, LoadConnection, connect
from bedplate.values.record import Record
from bedplate.values.run import Load
from bedplate.values.workload import RequestShape

TICK_NS = 10_000_000
START_NS = 20_000_000
"""Delay before the first request."""
SWEEP_TICKS = 10
CONNECTING_AT_ONCE = 64
SPARE_CONNECTIONS = 8
MOST_CONNECTIONS = 4096
BUILT_BYTES = 512 << 20
"""Size limit of the requests that are built before the measurement; further ones are built when needed."""
PAUSE_NS = (100_000_000, 300_000_000, 1_000_000_000)
"""Pauses after consecutive failed requests, so that an endpoint that rejects requests is not flooded."""
WARMING_IN_FLIGHT = 4
LEAST_REQUESTS = 8
Watch = Callable[[str], None]


class MeasurementWindow(Record, frozen=True, kw_only=True):
    """The measurement window."""

    seconds: float = 10.0
    warmup_s: float = 2.0
    least_requests: int | None = None
    """Requests that must end within it; `None`: the concurrency, and at least 8."""
    most_seconds: float = 60.0
    timeout_s: float = 120.0

    def count_needed(self, load: Load) -> int:
        if self.least_requests is not None:
            return self.least_requests
        return max(LEAST_REQUESTS, load.concurrency or load.sessions or 0)


class LoadRecord:
    """The unparsed result of a load."""

    def __init__(self) -> None:
        self.at = ""
        """Start of the measurement window: ISO 8601, UTC."""
        self.begin_ns = 0
        self.end_ns = 0
        self.exchanges: list[HttpExchange] = []
        """All exchanges that ended, in the order of their ends, without those that were cancelled at the end."""
        self.loop_lag_ns: list[int] = []
        self.cpu_s = 0.0
        self.in_flight_max = 0
        self.reopened = 0
        self.cancelled = 0

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e9


class RequestFactory:
    """Complete HTTP requests by number, most of them built before the measurement."""

    def __init__(
        self,
        target: LoadTarget,
        load: Load,
        prepared: PreparedEndpoint,
        round_number: int,
        shapes: Sequence[RequestShape] = (),
    ) -> None:
        self._target = target
        self._load = load
        self._prepared = prepared
        self._prompts = prepared.make_prompts(load, round_number)
        self._shapes = sorted(shapes, key=lambda shape: shape.started_s or 0.0) if load.arrivals == "replay" else []
        self._built: list[bytes] = []

    def build(self, count: int) -> None:
        size = sum(map(len, self._built))
        while len(self._built) < count and size < BUILT_BYTES:
            self._built.append(self._make(len(self._built)))
            size += len(self._built[-1])

    def get(self, number: int) -> bytes:
        return self._built[number] if 0 <= number < len(self._built) else self._make(number)

    def make_exchange(self, number: int, due_ns: int) -> HttpExchange:
        shape = self._get_shape(number)
        if shape is None:
            return HttpExchange(number, due_ns, self._load.prompt_tokens, self._load.output_tokens)
        return HttpExchange(number, due_ns, *self._choose_lengths(shape))

    def _choose_lengths(self, shape: RequestShape) -> tuple[int, int]:
        return shape.prompt_tokens or self._load.prompt_tokens, shape.output_tokens or self._load.output_tokens

    def _get_shape(self, number: int) -> RequestShape | None:
        return self._shapes[number] if 0 <= number < len(self._shapes) else None

    def _make(self, number: int) -> bytes:
        shape = self._get_shape(number)
        prompt, output = (
            (self._load.prompt_tokens, self._load.output_tokens) if shape is None else self._choose_lengths(shape)
        )
        text = self._prompts.make_text(number, prompt, shape)
        return self._prepared.request(self._target, text, output, stream=True)


def estimate_requests(load: Load, window: MeasurementWindow, request_s: float | None, trace: int = 0) -> int:
    """Upper estimate of the number of requests, or of sessions, if none is faster than a request alone."""
    if load.arrivals == "replay":
        return trace
    time_s = window.warmup_s + window.seconds
    if load.arrivals in ("closed", "sessions"):
        concurrency = load.concurrency or load.sessions or 1
        return concurrency * (math.ceil(1.2 * time_s / max(1e-3, request_s or 1.0)) + 2)
    return math.ceil(1.2 * time_s * (load.requests_per_s or 1.0)) + (load.burst or 1)


class LoadDriver:
    """Sends one load to one endpoint, with callbacks on one event loop and no task per request."""

    def __init__(
        self,
        target: LoadTarget,
        load: Load,
        requests: RequestFactory | SessionFactory,
        window: MeasurementWindow,
        *,
        schedule: Iterator[float] | None,
        request_s: float | None = None,
        watch: Watch | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._target = target
        self._load = load
        self._requests = requests
        self._sessions = requests if isinstance(requests, SessionFactory) else None
        self._turns_to_come = 0
        """Turns of sessions that wait for their due time."""
        self._window = window
        self._schedule = schedule
        self._request_s = request_s
        self._watch = watch or (lambda moment: None)
        self._deadlines = Deadlines(self._loop)
        self._driven = LoadRecord()
        self._number = 0
        self._idle: list[LoadConnection] = []
        self._busy: dict[LoadConnection, HttpExchange] = {}
        self._opening: set[asyncio.Task[None]] = set()
        self._failures = 0
        """Consecutive failures."""
        self._ended = 0
        self._awaited = 0
        """Requests of the measurement window that have not ended."""
        self._measuring = False
        self._measured = False
        self._exhausted = False
        self._stopping = False
        self._over = asyncio.Event()
        self._error: BaseException | None = None
        self._ticks = 0
        self._cpu_s = 0.0
        self._warming = False
        self._warm_number = 0
        self._zero_ns = 0
        self._latest_begin_ns = 0

    # the measurement

    async def run(self) -> LoadRecord:
        """Connects, warms up, measures, waits for the measured requests, and cancels the others."""
        await self._connect(self._count_start_connections())
        handler = self._loop.get_exception_handler()
        self._loop.set_exception_handler(self._handle_error)
        collected = gc.isenabled()
        gc.collect()
        # Collecting garbage among hundreds of thousands of objects would delay timestamps.
        gc.disable()
        try:
            self._start()
            await self._over.wait()
        finally:
            if collected:
                gc.enable()
            self._stop()
            self._loop.set_exception_handler(handler)
        if self._error is not None:
            raise self._error
        return self._driven

    def _handle_error(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Ends the run if a callback raises; asyncio would only log it."""
        error = context.get("exception")
        self._error = self._error or (error if error is not None else RuntimeError(context["message"]))
        self._over.set()

    @property
    def _streams(self) -> int:
        """Requests, or sessions with at most one request each, of a closed loop."""
        return self._load.concurrency or self._load.sessions or 1

    def _count_start_connections(self) -> int:
        if self._schedule is None:
            return self._streams
        in_flight = math.ceil((self._load.requests_per_s or 0.0) * (self._request_s or 1.0) * 1.5)
        return min(MOST_CONNECTIONS, in_flight + (self._load.burst or 0) + SPARE_CONNECTIONS)

    async def _connect(self, count: int) -> None:
        while len(self._idle) < count:
            some = min(CONNECTING_AT_ONCE, count - len(self._idle))
            found = await asyncio.gather(
                *(connect(self._target, self._handle_end) for _ in range(some)), return_exceptions=True
            )
            opened = [each for each in found if isinstance(each, LoadConnection)]
            self._idle += opened
            failed = [each for each in found if isinstance(each, BaseException)]
            if failed:
                for connection in self._idle:
                    connection.cut()
                self._deadlines.close()
                raise ExternalFailure(
                    f"cannot open {count} connections to {self._target.url}",
                    cause=str(failed[0]) or type(failed[0]).__name__,
                    hint="check that the endpoint runs, and that ulimit -n allows that many files",
                ) from failed[0]

    def _start(self) -> None:
        self._watch("warm-up")
        start_ns = monotonic_ns() + START_NS
        warmup_ns = int(self._window.warmup_s * 1e9)
        self._driven.begin_ns = start_ns + warmup_ns
        self._latest_begin_ns = self._driven.begin_ns + int(self._window.most_seconds * 1e9)
        self._deadlines.at(self._driven.begin_ns, self._begin)
        self._deadlines.at(start_ns + TICK_NS, self._handle_tick)
        if self._schedule is None:
            concurrency = self._streams
            spread_ns = int(compute_stagger_s(concurrency, self._window.warmup_s, self._request_s) * 1e9)
            for slot in range(concurrency):
                self._deadlines.at(start_ns + spread_ns * slot // concurrency, self._send)
        elif self._load.arrivals == "replay":
            # The warm-up has separate requests, so that the trace is measured from its beginning.
            if warmup_ns:
                self._warming = True
                for _ in range(WARMING_IN_FLIGHT):
                    self._deadlines.at(start_ns, self._send_warming)
            self._zero_ns = self._driven.begin_ns + 1
            if self._sessions is not None:
                self._sessions.zero_ns = self._zero_ns
            self._send_when_due()
        else:
            self._zero_ns = start_ns
            self._send_when_due()

    def _begin(self, when_ns: int) -> None:
        if self._sessions is not None and self._sessions.to_join > 0 and when_ns < self._latest_begin_ns:
            # Sessions that are under way send their whole history once, which belongs to the warm-up.
            self._deadlines.at(when_ns + TICK_NS, self._begin)
            return
        self._driven.begin_ns = when_ns
        self._driven.at = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._measuring = True
        self._warming = False
        self._driven.in_flight_max = len(self._busy)
        self._watch("begin")
        self._cpu_s = time.process_time()

    def _end_if_enough(self, now_ns: int) -> None:
        window, driven = self._window, self._driven
        passed_s = (now_ns - driven.begin_ns) / 1e9
        if self._exhausted:
            enough = not self._awaited and not self._turns_to_come
        else:
            enough = passed_s >= window.seconds and self._ended >= window.count_needed(self._load)
            enough = enough and self._has_enough_sessions()
        if enough or passed_s >= window.most_seconds:
            driven.cpu_s = time.process_time() - self._cpu_s
            driven.end_ns = now_ns
            self._measuring = False
            self._measured = True
            self._watch("end")
            self._stop_if_done()

    def _has_enough_sessions(self) -> bool:
        """As many ended sessions as there are at the same time, so that their durations are known."""
        if self._sessions is None or self._load.sessions is None or self._window.least_requests is not None:
            return True
        return self._sessions.ended >= self._load.sessions

    def _stop_if_done(self) -> None:
        if self._measured and not self._awaited:
            self._stopping = True
            self._over.set()

    def _stop(self) -> None:
        self._stopping = True
        self._deadlines.close()
        for task in self._opening:
            task.cancel()
        for connection in list(self._busy):
            self._driven.cancelled += 1
            connection.cut()
        for connection in self._idle:
            connection.cut()

    # sending

    def _send(self, due_ns: int) -> None:
        """Sends the next request of a closed loop."""
        if not self._stopping:
            self._send_exchange(self._make_next_exchange(due_ns))

    def _send_warming(self, due_ns: int) -> None:
        """Sends a warm-up request of a replay, with a negative number: its prompt is not one of the trace."""
        if self._warming and not self._stopping:
            self._warm_number -= 1
            self._send_exchange(self._requests.make_exchange(self._warm_number, due_ns))

    def _send_when_due(self) -> None:
        """Schedules the next request of an open loop."""
        offset_s = next(self._schedule, None) if self._schedule is not None else None
        if offset_s is None:
            self._exhausted = True
            return
        self._deadlines.at(self._zero_ns + int(offset_s * 1e9), self._send_scheduled)

    def _send_scheduled(self, due_ns: int) -> None:
        if self._stopping:
            return
        self._send_exchange(self._make_next_exchange(due_ns))
        self._send_when_due()

    def _make_next_exchange(self, due_ns: int) -> HttpExchange:
        exchange = self._requests.make_exchange(self._number, due_ns)
        self._number += 1
        self._count_if_measured(exchange)
        return exchange

    def _count_if_measured(self, exchange: HttpExchange) -> None:
        if self._measuring:
            exchange.measured = True
            self._awaited += 1

    def _follow_session(self, exchange: HttpExchange) -> bool:
        """Schedules the next turn of a session; False: the session is over."""
        following = self._sessions.follow(exchange) if self._sessions is not None else None
        if following is None:
            return False
        turn, due_ns = following

        def send_turn(_due_ns: int) -> None:
            self._turns_to_come -= 1
            if not self._stopping:
                self._count_if_measured(turn)
                self._send_exchange(turn)

        self._turns_to_come += 1
        self._deadlines.at(due_ns, send_turn)
        return True

    def _send_exchange(self, exchange: HttpExchange) -> None:
        """Sends a request on an idle connection, or on a new one."""
        exchange.tried_ns = monotonic_ns()
        request = self._requests.get(exchange.index)
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                self._send_on(connection, exchange, request)
                return
        self._open_soon(exchange, request)

    def _open_soon(self, exchange: HttpExchange, request: bytes) -> None:
        task = self._loop.create_task(self._open_for(exchange, request))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open_for(self, exchange: HttpExchange, request: bytes) -> None:
        exchange.fresh = True
        if self._measuring:
            self._driven.reopened += 1
        try:
            connection = await connect(self._target, self._handle_end)
        except OSError as error:
            exchange.error = f"no connection: {error}"
            exchange.sent_ns = exchange.end_ns = monotonic_ns()
            self._record_end(exchange, failed=True)
            return
        if self._stopping:
            connection.cut()
            return
        self._send_on(connection, exchange, request)

    def _send_on(self, connection: LoadConnection, exchange: HttpExchange, request: bytes) -> None:
        self._busy[connection] = exchange
        connection.send(exchange, request)
        if len(self._busy) > self._driven.in_flight_max:
            self._driven.in_flight_max = len(self._busy)

    # receiving

    def _handle_end(self, connection: LoadConnection, exchange: HttpExchange) -> None:
        self._busy.pop(connection, None)
        if self._stopping:
            connection.cut()
            return
        if connection.usable:
            self._idle.append(connection)
        elif not exchange.status and not exchange.pieces and connection.used > 1 and not exchange.fresh:
            # The endpoint closed an idle connection at the same moment, so it did not read the request.
            exchange.error = None
            self._open_soon(exchange, self._requests.get(exchange.index))
            return
        self._record_end(exchange, failed=exchange.status != 200 or not exchange.whole)

    def _record_end(self, exchange: HttpExchange, *, failed: bool) -> None:
        now_ns = monotonic_ns()
        driven = self._driven
        driven.exchanges.append(exchange)
        self._failures = self._failures + 1 if failed else 0
        if exchange.measured:
            self._ended += 1
            self._awaited -= 1
        if self._follow_session(exchange):
            pass
        elif self._schedule is None or (self._warming and exchange.index < 0):
            again = self._send if self._schedule is None else self._send_warming
            if failed:
                pause_ns = PAUSE_NS[min(self._failures, len(PAUSE_NS)) - 1]
                self._deadlines.at(now_ns + pause_ns, again)
            else:
                again(exchange.end_ns)
        if self._measuring:
            self._end_if_enough(monotonic_ns())
        else:
            self._stop_if_done()

    # timers

    def _handle_tick(self, due_ns: int) -> None:
        now_ns = monotonic_ns()
        self._ticks += 1
        if self._measuring:
            self._driven.loop_lag_ns.append(now_ns - due_ns)
            self._end_if_enough(now_ns)
        if self._ticks % SWEEP_TICKS == 0:
            self._cancel_overdue(now_ns)
        if not self._stopping:
            # Relative to now, not to the due time: one late tick must not make the next ones late.
            self._deadlines.at(now_ns + TICK_NS, self._handle_tick)

    def _cancel_overdue(self, now_ns: int) -> None:
        limit_ns = int(self._window.timeout_s * 1e9)
        for connection, exchange in list(self._busy.items()):
            if exchange.sent_ns and now_ns - exchange.sent_ns > limit_ns:
                connection.cut()
                del self._busy[connection]
                exchange.timed_out = True
                exchange.end_ns = now_ns
                self._record_end(exchange, failed=True)
