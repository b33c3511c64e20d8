"""Mirrors live requests: a sample of the answered requests is sent to a challenger, and both are timed."""

from __future__ import annotations

import asyncio
import datetime as dt
import random
import statistics
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Self

import msgspec

from bedplate.errors import NotPossible
from bedplate.measure.answers import EngineAddress
from bedplate.run.gateway.backend import FinishedRequest
from bedplate.values.run import Load, Repeat, Sample

REQUEST_LIMIT_S = 300.0
WINDOW_S = 20.0
"""Longest measurement window."""
TURNS = 6
"""Smallest number of measurement windows in a short shadow."""
LEAST_IN_WINDOW = 4
STREAMED = (b"/v1/chat/completions", b"/v1/completions")
LENGTHS = ("max_completion_tokens", "max_tokens")
SHAPED = frozenset(("response_format", "tools", "grammar", "json_schema", "structured_outputs"))
"""Fields of requests with structured output. Such a response cannot be forced to a length."""


Pair = tuple[float, Sample, Sample]
"""Time of the response, the sample of the engine in service and that of the challenger."""


class MeasuredSides(msgspec.Struct):
    """The measurements of both engines, one repeat per round or window."""

    load: Load
    a: list[Repeat]
    b: list[Repeat]


class RequestMirror:
    """Sends copies of a sample of the answered requests to the challenger and keeps the timings of both engines."""

    def __init__(
        self, where: EngineAddress, share: float, concurrency: int, for_s: float, fields: Collection[str] = ()
    ) -> None:
        """`fields` are the request fields that fix the number of output tokens at the challenger."""
        self._where, self._share, self._concurrency, self._fields = where, share, concurrency, fields
        self._window_s = min(WINDOW_S, for_s / TURNS)
        self._began = time.monotonic()
        self._began_at = time.time()
        self._random = random.Random(0)  # noqa: S311
        self._pairs: list[Pair] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.skipped = 0

    async def __aenter__(self) -> Self:
        import aiohttp

        headers = {"Content-Type": "application/json"}
        if self._where.key:
            headers["Authorization"] = f"Bearer {self._where.key}"
        # One session for all requests: the gateway also reuses its connections to the engine in service.
        self._session = aiohttp.ClientSession(
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=REQUEST_LIMIT_S),
            connector=aiohttp.TCPConnector(limit=0),
        )
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        """Wait for the running copies; cancel them if the block was left by an exception."""
        if kind is not None:
            for task in self._tasks:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()

    def take_sample(self, ended: FinishedRequest) -> None:
        if ended.outcome != "ok" or ended.ttft_s is None or ended.target.split(b"?")[0] not in STREAMED:
            return
        if self._random.random() >= self._share:
            return
        if len(self._tasks) >= self._concurrency:
            self.skipped += 1
            return
        task = asyncio.get_running_loop().create_task(self._send_copy(ended, time.monotonic() - self._began))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_copy(self, ended: FinishedRequest, at_s: float) -> None:
        import aiohttp

        body = fix_length(msgspec.json.decode(ended.body), ended.completion_tokens, self._fields)
        url = f"{self._where.url}{ended.target.decode('ascii')}"
        began, first, pieces = time.monotonic(), None, []
        outcome, error = "ok", None
        try:
            sent = msgspec.json.encode({**body, "model": self._where.name})
            async with self._session.post(url, data=sent) as answer:
                async for piece in answer.content.iter_any():
                    first = first or time.monotonic()
                    pieces.append(piece)
                if answer.status != 200:
                    outcome, error = "error", f"HTTP {answer.status}"
        except (aiohttp.ClientError, TimeoutError) as failure:
            outcome, error = "error", str(failure) or type(failure).__name__
        prompt_tokens, output_tokens, finish = parse_usage(b"".join(pieces))
        if outcome == "ok" and finish is None:
            outcome, error = "cut", "the stream ended without a finish reason"
        theirs = Sample(
            at_s=at_s,
            ttft_ms=1000 * (first - began) if first is not None else None,
            duration_ms=1000 * (time.monotonic() - began),
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            finish=finish,
            outcome=outcome,  # type: ignore[arg-type]
            error=error,
        )
        mine = Sample(
            at_s=at_s,
            ttft_ms=1000 * (ended.ttft_s or 0.0),
            duration_ms=1000 * ended.duration_s,
            prompt_tokens=ended.prompt_tokens,
            output_tokens=ended.completion_tokens,
        )
        self._pairs.append((at_s, mine, theirs))

    def build_sides(self, model: str, run: str) -> MeasuredSides:
        """The measurements of both engines, in windows with at least `LEAST_IN_WINDOW` requests."""
        windows = split_windows(self._pairs, self._window_s)
        if not windows:
            raise NotPossible("no live request was sampled", hint="allow more time with --for, or a larger --share")
        mine = [sample for window in windows for _, sample, _ in window]
        span_s = max(1.0, windows[-1][-1][0])
        load = Load(
            arrivals="replay",
            requests_per_s=round(len(mine) / span_s, 3),
            trace=f"{model}, live, {run}",
            prompt_tokens=max(1, round(statistics.median(sample.prompt_tokens or 1 for sample in mine))),
            output_tokens=max(1, round(statistics.median(sample.output_tokens or 1 for sample in mine))),
        )
        a, b = ([self._build_repeat(window, side) for window in windows] for side in (0, 1))
        return MeasuredSides(load, a, b)

    def _build_repeat(self, window: Sequence[Pair], side: int) -> Repeat:
        at_s = window[0][0] + self._began_at + side / 1000  # the two sides of a window are neighbours in time
        moment = dt.datetime.fromtimestamp(at_s, dt.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        samples = tuple((mine, theirs)[side] for _, mine, theirs in window)
        span_s = max(1e-3, window[-1][0] - window[0][0] + max(sample.duration_ms for sample in samples) / 1000)
        return Repeat(at=moment, seconds=span_s, samples=samples)


def split_windows(pairs: Iterable[Pair], window_s: float) -> list[list[Pair]]:
    """Pairs in windows, ordered by time. A last window with too few pairs is merged into the one before it."""
    found: list[list[Pair]] = []
    for pair in sorted(pairs, key=lambda pair: pair[0]):
        if not found or (len(found[-1]) >= LEAST_IN_WINDOW and pair[0] - found[-1][0][0] > window_s):
            found.append([])
        found[-1].append(pair)
    if len(found) > 1 and len(found[-1]) < LEAST_IN_WINDOW:
        rest = found.pop()
        found[-1] += rest
    return found


def fix_length(body: dict[str, Any], tokens: int | None, fields: Collection[str]) -> dict[str, Any]:
    """The same request with a fixed output length. Sampling and other weights would change the length otherwise."""
    copy = {**body, "stream_options": {**(body.get("stream_options") or {}), "include_usage": True}}
    if not tokens or body.get("n") not in (None, 1):
        return copy
    copy[next((name for name in LENGTHS if name in body), "max_tokens")] = tokens
    if SHAPED.isdisjoint(name for name, value in body.items() if value):
        copy.pop("stop", None)
        copy |= {name: value for name, value in (("ignore_eos", True), ("min_tokens", tokens)) if name in fields}
    return copy


def parse_usage(stream: bytes) -> tuple[int | None, int | None, str | None]:
    """Prompt and output tokens as the engine counted them, and the finish reason."""
    prompt = output = finish = None
    for line in stream.split(b"\n"):
        if not line.startswith(b"data: {"):
            continue
        try:
            event = msgspec.json.decode(line[6:])
            usage = event.get("usage") or {}
            prompt, output = usage.get("prompt_tokens", prompt), usage.get("completion_tokens", output)
            for choice in event.get("choices") or ():
                finish = choice.get("finish_reason") or finish
        except (msgspec.DecodeError, UnicodeDecodeError, AttributeError):
            continue
    return prompt, output, finish
