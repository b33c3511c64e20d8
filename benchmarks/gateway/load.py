"""Load for a streaming gateway: evenly spaced streams, or a closed loop of plain requests."""

import argparse
import asyncio
import json
import os
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import cast

import httptools
import uvloop

from bedplate.measure.load.deadlines import Deadlines
from bedplate.values.statistics import compute_quantile

TOKEN = re.compile(rb'"\s?w(\d+)[a-g]*"')
MODEL = "null-model"
PROMPT = "Say nothing, in as many words as it takes."
ENOUGH_FOR_P99 = 60
HELD = re.compile(rb'"chatcmpl-([0-9a-f]{32})"')
NOMINAL_FIRST_NS = 50_000_000


def request_bytes(port: int, stream: bool) -> bytes:
    """A whole chat request."""
    payload: dict[str, object] = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 64}
    if stream:
        payload |= {"stream": True, "stream_options": {"include_usage": True}}
    body = json.dumps(payload).encode()
    key = os.environ.get("GATEWAY_BENCH_KEY", "none").encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:%d\r\ncontent-type: application/json\r\n"
        b"authorization: Bearer %b\r\naccept: */*\r\ncontent-length: %d\r\n\r\n%b" % (port, key, len(body), body)
    )


def late_ns(events: bytes) -> int:
    """Delay of the engine's own timer; 0 where a gateway replaced the event id."""
    found = HELD.search(events)
    late = int(found[1], 16) - NOMINAL_FIRST_NS if found else 0
    return late if 0 <= late < 1_000_000_000 else 0


def typical_p99(rounds: Sequence[Sequence[float]]) -> float:
    """Median of the p99 of each round, if a round has enough streams; otherwise the p99 of all streams.

    When the whole machine pauses for some milliseconds, every stream that starts then is late, whatever the gateway.
    Pooled, one such pause determines the p99 of a whole run; this way it affects one round.
    """
    if all(len(each) >= ENOUGH_FOR_P99 for each in rounds):
        return statistics.median(compute_quantile(sorted(each), 0.99) for each in rounds)
    return compute_quantile(sorted(value for each in rounds for value in each), 0.99)


@dataclass(frozen=True)
class Plan:
    """A streaming run: `streams` evenly spaced slots, each of which starts one stream per period."""

    streams: int
    rounds: int
    period_ns: int
    tokens: int
    budget_s: float
    limit_s: float


@dataclass
class StreamReport:
    """Results of a streaming run; times in milliseconds, without the first (warm-up) round."""

    streams: int
    started: int = 0
    complete: int = 0
    truncated: int = 0
    errors: int = 0
    chunks: int = 0
    samples: int = 0
    cut: bool = False
    ttft_p50_ms: float | None = None
    ttft_p99_ms: float | None = None
    ttft_p99_pooled_ms: float | None = None
    gap_p99_ms: float | None = None
    messages: dict[str, int] = field(default_factory=dict)


@dataclass
class PlainReport:
    """Results of a closed loop of plain requests."""

    connections: int
    seconds: float
    requests: int
    errors: int
    per_second: float


class HttpClient(asyncio.Protocol):
    """A keep-alive connection; subclasses get the parser's callbacks."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.parser = httptools.HttpResponseParser(self)
        self.read_ns = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        self.transport = cast(asyncio.Transport, transport)
        self.parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        """Timestamp the read before its bytes are processed."""
        self.read_ns = time.monotonic_ns()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.failed(f"bad HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the loss; the next request reopens the connection."""
        self.transport = None
        self.failed("connection lost")

    def failed(self, reason: str) -> None:
        """End the current request."""
        raise NotImplementedError


class StreamRun:
    """All slots of a streaming run and the figures they collect."""

    def __init__(self, port: int, plan: Plan, loop: asyncio.AbstractEventLoop) -> None:
        self.port = port
        self.plan = plan
        self.loop = loop
        self.deadlines = Deadlines(loop)
        self.request = request_bytes(port, stream=True)
        self.report = StreamReport(streams=plan.streams)
        self.warm_ns: list[int] = []
        self.ttft_ns: dict[int, list[int]] = {}
        self.gap_ns: list[int] = []
        self.slots = [Slot(self, index) for index in range(plan.streams)]
        self.open_slots = plan.streams
        self.finished = asyncio.Event()
        self.begin_ns = 0

    async def run(self) -> StreamReport:
        """Connect every slot, then start all of them."""
        for slot in self.slots:
            await slot.connect()
        self.begin_ns = time.monotonic_ns() + 50_000_000
        for slot in self.slots:
            self.deadlines.at(slot.due_ns(), slot.start)
        try:
            await asyncio.wait_for(self.finished.wait(), self.plan.limit_s)
        except TimeoutError:
            for slot in self.slots:
                if slot.active:
                    slot.failed("time limit")
        for slot in self.slots:
            slot.close()
        return self.summary()

    def summary(self) -> StreamReport:
        """Report with percentiles; the warm-up round counts only if there is no other round."""
        report = self.report
        rounds = list(self.ttft_ns.values()) or [self.warm_ns]
        times = [time_ns for each in rounds for time_ns in each]
        report.samples = len(times)
        if times:
            report.ttft_p50_ms = compute_quantile(sorted(times), 0.50) / 1e6
            report.ttft_p99_pooled_ms = compute_quantile(sorted(times), 0.99) / 1e6
            report.ttft_p99_ms = typical_p99(rounds) / 1e6
        if self.gap_ns:
            report.gap_p99_ms = compute_quantile(sorted(self.gap_ns), 0.99) / 1e6
        return report

    def count_error(self, reason: str) -> None:
        """Store the reasons, so that a failed run can report them."""
        self.report.messages[reason] = self.report.messages.get(reason, 0) + 1

    def slot_done(self) -> None:
        """End the run when the last slot is done."""
        self.open_slots -= 1
        if not self.open_slots:
            self.finished.set()


class Slot(HttpClient):
    """One of the concurrent streams, repeated on one connection."""

    def __init__(self, run: StreamRun, index: int) -> None:
        super().__init__()
        self.run = run
        self.index = index
        self.round = 0
        self.active = False
        self.closing = False
        self.sent_ns = 0
        self.token_ns = 0
        self.tokens = 0
        self.done = False
        self.rest = b""

    def due_ns(self) -> int:
        """When the stream of the current round should start."""
        plan = self.run.plan
        return self.run.begin_ns + self.round * plan.period_ns + self.index * plan.period_ns // plan.streams

    async def connect(self) -> None:
        """Open the slot's connection."""
        await self.run.loop.create_connection(lambda: self, "127.0.0.1", self.run.port)

    def close(self) -> None:
        """Close without counting it as a lost stream."""
        self.closing = True
        if self.transport:
            self.transport.abort()

    def start(self, _when_ns: int) -> None:
        """Send the request, on a new connection if the old one is closed."""
        if self.closing:
            return
        if self.transport is None or self.transport.is_closing():
            self.run.loop.create_task(self.reconnect())
            return
        self.active = True
        self.tokens = 0
        self.done = False
        self.rest = b""
        self.run.report.started += 1
        self.sent_ns = time.monotonic_ns()
        self.transport.write(self.run.request)

    async def reconnect(self) -> None:
        """Reopen the connection and start the stream, or count it as failed."""
        try:
            await asyncio.wait_for(self.connect(), 10)
        except (OSError, TimeoutError) as error:
            self.run.report.started += 1
            self.run.report.errors += 1
            self.run.count_error(f"connect: {error}")
            self.next_round()
            return
        self.start(0)

    def on_body(self, body: bytes) -> None:
        """Check the tokens of all complete events, in their order."""
        if not self.active:
            return
        if self.rest:
            body = self.rest + body
        end = body.rfind(b"\n") + 1
        self.rest = body[end:]
        events = body[:end]
        for found in TOKEN.finditer(events):
            if int(found[1]) != self.tokens:
                self.failed(f"token {int(found[1])} came where {self.tokens} was due")
                return
            self.count_token(events)
        if b"data: [DONE]" in events:
            self.done = True

    def count_token(self, events: bytes) -> None:
        """Record the token with the timestamp of the read that contained it."""
        run, now_ns = self.run, self.read_ns
        if self.tokens:
            run.gap_ns.append(now_ns - self.token_ns)
        else:
            taken_ns = now_ns - self.sent_ns - late_ns(events)
            (run.ttft_ns.setdefault(self.round, []) if self.round else run.warm_ns).append(taken_ns)
        self.token_ns = now_ns
        self.tokens += 1
        run.report.chunks += 1

    def on_message_complete(self) -> None:
        """Check the finished stream."""
        if not self.active:
            return
        status = self.parser.get_status_code()
        if status != 200:
            self.failed(f"status {status}")
        elif self.tokens != self.run.plan.tokens or not self.done:
            self.failed("ended early")
        else:
            self.active = False
            self.run.report.complete += 1
            self.next_round()

    def failed(self, reason: str) -> None:
        """Count a stream that had begun as truncated, any other as an error."""
        if not self.active:
            return
        self.active = False
        if self.tokens:
            self.run.report.truncated += 1
        else:
            self.run.report.errors += 1
        self.run.count_error(reason)
        if self.transport:
            self.transport.abort()
        self.next_round()

    def next_round(self) -> None:
        """Start the next stream when it is due, or immediately if it is late."""
        self.round += 1
        plan = self.run.plan
        now_ns = time.monotonic_ns()
        if self.round >= plan.rounds:
            self.run.slot_done()
        elif now_ns - self.run.begin_ns > plan.budget_s * 1e9:
            self.run.report.cut = True
            self.run.slot_done()
        else:
            self.run.deadlines.at(max(self.due_ns(), now_ns), self.start)


class PlainRun:
    """The counters that the plain connections share."""

    def __init__(self, port: int) -> None:
        self.request = request_bytes(port, stream=False)
        self.requests = 0
        self.errors = 0
        self.running = True


class PlainClient(HttpClient):
    """Send the next plain request as soon as the answer to the last is complete."""

    def __init__(self, run: PlainRun) -> None:
        super().__init__()
        self.run = run
        self.answered = False

    def send(self) -> None:
        """Send one request."""
        self.answered = False
        if self.transport:
            self.transport.write(self.run.request)

    def on_body(self, body: bytes) -> None:
        """Record that a body has arrived."""
        self.answered = True

    def on_message_complete(self) -> None:
        """Count the answer and send the next request."""
        if not self.run.running:
            return
        if self.answered and self.parser.get_status_code() == 200:
            self.run.requests += 1
        else:
            self.run.errors += 1
        self.send()

    def failed(self, reason: str) -> None:
        """Count a lost connection; the loop continues with the remaining ones."""
        if self.run.running:
            self.run.errors += 1


async def run_plain(port: int, connections: int, seconds: float) -> PlainReport:
    """Count answers for some seconds, after a warm-up of a fifth of that time."""
    loop = asyncio.get_running_loop()
    run = PlainRun(port)
    clients: list[PlainClient] = []
    for _ in range(connections):
        _, client = await loop.create_connection(lambda: PlainClient(run), "127.0.0.1", port)
        clients.append(client)
    for client in clients:
        client.send()
    await asyncio.sleep(seconds / 5)
    before, begin_ns = run.requests, time.monotonic_ns()
    await asyncio.sleep(seconds)
    elapsed = (time.monotonic_ns() - begin_ns) / 1e9
    count = run.requests - before
    run.running = False
    for client in clients:
        if client.transport:
            client.transport.abort()
    return PlainReport(connections, elapsed, count, run.errors, count / elapsed)


def spread_period_ns(duration_ms: float, interval_ms: float) -> int:
    """An odd number of chunk intervals, so that no two chunks coincide if the streams are a power of two."""
    intervals = -int(-(duration_ms + 2 * interval_ms) // interval_ms)
    return int((intervals | 1) * interval_ms * 1e6)


async def run_streams(port: int, plan: Plan) -> StreamReport:
    """Run one streaming level."""
    return await StreamRun(port, plan, asyncio.get_running_loop()).run()


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=("stream", "plain"))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--streams", type=int, default=64, help="concurrent streams")
    parser.add_argument("--rounds", type=int, default=6, help="streams per slot; the first is a warm-up")
    parser.add_argument("--tokens", type=int, default=64, help="tokens the engine sends")
    parser.add_argument("--first-ms", type=float, default=50.0, help="the engine's time to the first token")
    parser.add_argument("--interval-ms", type=float, default=20.0, help="the engine's time between tokens")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds after which no stream is started")
    parser.add_argument("--limit", type=float, default=80.0, help="seconds after which open streams are cancelled")
    parser.add_argument("--connections", type=int, default=64, help="plain: keep-alive connections")
    parser.add_argument("--seconds", type=float, default=4.0, help="plain: seconds to count for")
    return parser.parse_args()


def main() -> None:
    """Run one measurement and prints it as JSON."""
    options = parse_options()
    report: StreamReport | PlainReport
    if options.mode == "plain":
        report = uvloop.run(run_plain(options.port, options.connections, options.seconds))
    else:
        duration_ms = options.first_ms + options.interval_ms * (options.tokens - 1)
        plan = Plan(
            streams=options.streams,
            rounds=options.rounds,
            period_ns=spread_period_ns(duration_ms, options.interval_ms),
            tokens=options.tokens,
            budget_s=options.budget,
            limit_s=options.limit,
        )
        report = uvloop.run(run_streams(options.port, plan))
    print(json.dumps(asdict(report)))


if __name__ == "__main__":
    main()
