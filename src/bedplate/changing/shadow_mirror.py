"""Live requests once more: a sample of those that were answered goes to a challenger, and the times of both count."""

from __future__ import annotations

import asyncio
import datetime as dt
import random
import statistics
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Self

import msgspec

from bedplate.errors import AnswerIsNo
from bedplate.measure.answers import Where
from bedplate.run.gateway.backend import Ended
from bedplate.values.run import Load, Repeat, Sample

REQUEST_LIMIT_S = 300.0
WINDOW_S = 20.0
"""The longest stretch of time that counts as one turn."""
TURNS = 6
"""Of a shadow that has less time, at the least."""
LEAST_IN_WINDOW = 4
STREAMED = (b"/v1/chat/completions", b"/v1/completions")
LENGTHS = ("max_completion_tokens", "max_tokens")
SHAPED = frozenset(("response_format", "tools", "grammar", "json_schema", "structured_outputs"))
"""Fields of requests whose answers end by themselves: what has to go on beyond that end is no text of their shape."""


Pair = tuple[float, Sample, Sample]
"""When it was answered, and how the engine in service and the challenger did."""


class Sides(msgspec.Struct):
    """What was measured on both, turn by turn."""

    load: Load
    a: list[Repeat]
    b: list[Repeat]


class Mirror:
    """Sends a sample of the requests that were answered to the challenger as well, and keeps the times of both."""

    def __init__(self, where: Where, share: float, at_once: int, for_s: float, fields: Collection[str] = ()) -> None:
        """`fields` are those by which the challenger can be asked for exactly so many tokens."""
        self._where, self._share, self._at_once, self._fields = where, share, at_once, fields
        self._window_s = min(WINDOW_S, for_s / TURNS)
        self._began = time.monotonic()
        self._began_at = time.time()
        self._dice = random.Random(0)  # noqa: S311
        self._pairs: list[Pair] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.skipped = 0

    async def __aenter__(self) -> Self:
        import aiohttp

        headers = {"Content-Type": "application/json"}
        if self._where.key:
            headers["Authorization"] = f"Bearer {self._where.key}"
        # One for all, since the gateway keeps its connections to the engine in service as well.
        self._session = aiohttp.ClientSession(
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=REQUEST_LIMIT_S),
            connector=aiohttp.TCPConnector(limit=0),
        )
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        """What is under way is waited for, unless nobody wants it any more."""
        if kind is not None:
            for task in self._tasks:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()

    def take(self, ended: Ended) -> None:
        if ended.outcome != "ok" or ended.ttft_s is None or ended.target.split(b"?")[0] not in STREAMED:
            return
        if self._dice.random() >= self._share:
            return
        if len(self._tasks) >= self._at_once:
            self.skipped += 1
            return
        task = asyncio.get_running_loop().create_task(self._again(ended, time.monotonic() - self._began))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _again(self, ended: Ended, at_s: float) -> None:
        import aiohttp

        body = as_long(msgspec.json.decode(ended.body), ended.completion_tokens, self._fields)
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
        prompt_tokens, output_tokens, finish = usage_in(b"".join(pieces))
        if outcome == "ok" and finish is None:
            outcome, error = "cut", "the stream ended without its end"
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

    def sides(self, model: str, run: str) -> Sides:
        """Both sides in stretches of time, each with a few requests at the least."""
        stretches = stretches_of(self._pairs, self._window_s)
        if not stretches:
            raise AnswerIsNo("no live request was sampled", hint="give it more time, or a larger --share")
        mine = [sample for stretch in stretches for _, sample, _ in stretch]
        span_s = max(1.0, stretches[-1][-1][0])
        load = Load(
            arrivals="replay",
            requests_per_s=round(len(mine) / span_s, 3),
            trace=f"{model}, live, {run}",
            prompt_tokens=max(1, round(statistics.median(sample.prompt_tokens or 1 for sample in mine))),
            output_tokens=max(1, round(statistics.median(sample.output_tokens or 1 for sample in mine))),
        )
        a, b = ([self._repeat(stretch, side) for stretch in stretches] for side in (0, 1))
        return Sides(load, a, b)

    def _repeat(self, stretch: Sequence[Pair], side: int) -> Repeat:
        at_s = stretch[0][0] + self._began_at + side / 1000  # so that the two sides of a stretch are neighbours
        moment = dt.datetime.fromtimestamp(at_s, dt.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        samples = tuple((mine, theirs)[side] for _, mine, theirs in stretch)
        span_s = max(1e-3, stretch[-1][0] - stretch[0][0] + max(sample.duration_ms for sample in samples) / 1000)
        return Repeat(at=moment, seconds=span_s, samples=samples)


def stretches_of(pairs: Iterable[Pair], window_s: float) -> list[list[Pair]]:
    """In the order of time; what is left at the end, too few to count alone, belongs to the stretch before it."""
    found: list[list[Pair]] = []
    for pair in sorted(pairs, key=lambda pair: pair[0]):
        if not found or (len(found[-1]) >= LEAST_IN_WINDOW and pair[0] - found[-1][0][0] > window_s):
            found.append([])
        found[-1].append(pair)
    if len(found) > 1 and len(found[-1]) < LEAST_IN_WINDOW:
        rest = found.pop()
        found[-1] += rest
    return found


def as_long(body: dict[str, Any], tokens: int | None, fields: Collection[str]) -> dict[str, Any]:
    """The same request for an answer of the same length, which chance and other weights would make another."""
    asked = {**body, "stream_options": {**(body.get("stream_options") or {}), "include_usage": True}}
    if not tokens or body.get("n") not in (None, 1):
        return asked
    asked[next((name for name in LENGTHS if name in body), "max_tokens")] = tokens
    if SHAPED.isdisjoint(name for name, value in body.items() if value):
        asked.pop("stop", None)
        asked |= {name: value for name, value in (("ignore_eos", True), ("min_tokens", tokens)) if name in fields}
    return asked


def usage_in(stream: bytes) -> tuple[int | None, int | None, str | None]:
    """Tokens as the engine counted them, and why it ended."""
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
