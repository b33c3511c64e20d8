"""Runs three gateways that share a PostgreSQL usage store, and kills one of them (SIGKILL) at random moments.

    python tests/soak/gateways.py --minutes 10 --kills 60 --seed 1
    python tests/soak/gateways.py --minutes 10 --kills 60 --null

One engine serves the built-in model behind them; with `--null` it is the null server, which needs no processor time,
behind a gateway of its own that counts the concurrent requests. Exits with 1 when an answer was truncated without an
error, a usage record older than a second was lost, a request was counted twice, or a limit did not hold across the
gateways.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.postgresql import Database, start_database
from tests.soak.kills import Answer, Clients, compared, free_port

from bedplate.hosting.tenants import add_key
from bedplate.measure.load.null_server import MODEL, serve_null
from bedplate.usage_store import VARIABLE, open_usage_store

GATEWAYS = 3
CLIENTS = 6
IN_FLIGHT = 4
"""The limit of the one tenant, for all gateways together."""
LOOK_S = 0.02


@dataclass
class GatewayProcess:
    """One gateway, which is started again whenever it ends."""

    number: int
    upstream: str
    model: str
    home: Path
    port: int = field(default_factory=free_port)
    process: asyncio.subprocess.Process | None = None
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    kills: list[float] = field(default_factory=list)
    own_ends: list[str] = field(default_factory=list)
    is_over: bool = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def run(self) -> None:
        intent = self.home / f"gateway-{self.number}.yaml"
        intent.write_text(f"services: [{{url: '{self.upstream}', model: {self.model}}}]\n")
        words = [
            sys.executable, "-m", "bedplate", "serve", "--json", "--port", str(self.port),
            "--file", str(intent),
        ]  # fmt: skip
        env = {**os.environ, "BEDPLATE_HOME": str(self.home / str(self.number))}
        while not self.is_over:
            with (self.home / f"gateway-{self.number}.log").open("ab") as log:
                self.process = await asyncio.create_subprocess_exec(
                    *words, stdout=asyncio.subprocess.PIPE, stderr=log, env=env
                )
            if self.process.stdout is not None and await self.process.stdout.readline():
                self.ready.set()
            code = await self.process.wait()
            if not self.is_over and code != -signal.SIGKILL:
                self.own_ends.append(f"gateway {self.number} ended by itself with exit code {code}")
            self.ready.clear()

    def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            # Its end is noticed later on a busy machine, but it does nothing any more.
            self.process.send_signal(signal.SIGKILL)
            self.kills.append(time.time())

    async def stop(self) -> None:
        self.is_over = True
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)


class GatewayClients(Clients):
    """The clients of one gateway. All clients of all gateways have the same key."""

    def __init__(self, gateway: GatewayProcess, first: int, count: int, key: str, dice: random.Random) -> None:
        super().__init__(gateway.url, gateway.model, count, think_s=0.3, dice=dice)
        self._headers = {"Authorization": f"Bearer {key}"}
        # The length of a body identifies its record: each gateway's clients use lengths of their own.
        self._number = first


@dataclass
class SharedOutcome:
    """What was seen."""

    answers: list[Answer]
    found: int
    lost_s: list[float]
    wrong: list[str]
    most_in_flight: int
    kills: int

    @property
    def violations(self) -> list[str]:
        bad = [one.judged for one in self.answers if one.judged.outcome in ("cut", "wrong")]
        cut = [f"{one.outcome}: {one.detail}" for one in bad]
        found = [*cut, *self.wrong]
        if self.most_in_flight > IN_FLIGHT:
            found.append(f"{self.most_in_flight} concurrent requests with a limit of {IN_FLIGHT}")
        if not self.found:
            found.append("no complete answer was recorded")
        return found

    def describe(self) -> str:
        outcomes = Counter(one.judged.outcome for one in self.answers)
        counts = ", ".join(f"{count} {name}" for name, count in outcomes.most_common())
        last = f", at most {max(self.lost_s):.2f} s before a kill" if self.lost_s else ""
        return (
            f"{self.kills} kills; answers: {counts}; records: {self.found} found, {len(self.lost_s)} lost{last}, "
            f"{len(self.wrong)} wrong; most concurrent requests: {self.most_in_flight} of {IN_FLIGHT}"
        )


class InFlightWatch:
    """Counts the requests that the engine has at once, from outside of the gateways."""

    def __init__(self, upstream: str) -> None:
        self._url = upstream.removesuffix("/v1") + "/metrics"
        self.most = 0

    async def run(self) -> None:
        import aiohttp

        async with aiohttp.ClientSession() as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(self._url) as answer:
                        lines = (await answer.text()).splitlines()
                    counts = [float(one.split()[-1]) for one in lines if one.startswith("bedplate_requests_in_flight{")]
                    self.most = max(self.most, int(sum(counts)))
                await asyncio.sleep(LOOK_S)


async def run_gateways(
    upstream: str, model: str, database: Database, home: Path, *, seconds: float, kills: int, seed: int,
    null: bool = False,
) -> SharedOutcome:  # fmt: skip
    """Load on three gateways, and kills at random moments, each when all gateways are ready."""
    dice = random.Random(seed)
    gateways = [GatewayProcess(number, upstream, model, home) for number in range(GATEWAYS)]
    _, key = add_key("soak", {"in_flight": IN_FLIGHT})
    running = [asyncio.create_task(one.run()) for one in gateways]
    watch = InFlightWatch(upstream)
    watching = asyncio.create_task(watch.run())
    share = 4096 // GATEWAYS
    crowds = [
        GatewayClients(one, one.number * share, CLIENTS // GATEWAYS + 1, key, random.Random(seed + one.number))
        for one in gateways
    ]
    for crowd in crowds:
        crowd.has_logprobs = not null
    began = time.time()
    done = 0
    try:
        for one in gateways:
            await one.ready.wait()
        async with contextlib.AsyncExitStack() as stack:
            for crowd in crowds:
                await stack.enter_async_context(crowd)
            deadline = time.monotonic() + seconds
            while done < kills or time.monotonic() < deadline:
                # Each gateway has answered something since its start.
                before = [count_whole(crowd) for crowd in crowds]
                pause_s = dice.uniform(0.2, 1.8) * seconds / max(1, kills)
                await asyncio.sleep(pause_s)
                while any(count_whole(crowd) <= count for crowd, count in zip(crowds, before, strict=True)):
                    await asyncio.sleep(LOOK_S)
                if done < kills:
                    victim = dice.choice(gateways)
                    victim.ready.clear()
                    victim.kill()
                    done += 1
                    await victim.ready.wait()
    finally:
        watching.cancel()
        for one in gateways:
            await one.stop()
        await asyncio.gather(*running)
    answers, found, lost, wrong = [], 0, [], []
    records = list(open_usage_store().read_requests(began - 1))
    for gateway, crowd in zip(gateways, crowds, strict=True):
        own = crowd.answers
        sizes = {one.body_bytes for one in own}
        kept = compared(own, [one for one in records if one.body_bytes in sizes], gateway.kills)
        answers += own
        found += kept.found
        lost += kept.lost
        wrong += kept.wrong + gateway.own_ends
    twice = database.execute("SELECT count(*) - count(DISTINCT (gateway, number)) FROM bedplate_requests")
    if twice != [(0,)]:
        wrong.append(f"requests that are stored twice: {twice[0][0]}")
    return SharedOutcome(answers, found, lost, wrong, watch.most, done)


def count_whole(crowd: Clients) -> int:
    return sum(one.judged.outcome == "whole" for one in crowd.answers)


def options_of(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--null", action="store_true", help="no engine: the null server answers")
    return parser.parse_args(words)


@contextlib.contextmanager
def serve_upstream(null: bool) -> Iterator[tuple[str, str]]:
    """The address and the model of an endpoint of bedplate with one engine, or in front of the null server."""
    from tests.conftest import start_serve

    with contextlib.ExitStack() as stack:
        words: list[str] = []
        if null:
            server = stack.enter_context(serve_null(first_ms=100, interval_ms=50))
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            intent = Path(folder) / "upstream.yaml"
            intent.write_text(f"services: [{{url: '{server.url}/v1', model: {MODEL}}}]\n")
            words = ["--file", str(intent)]
        served = start_serve(*words)
        stack.callback(served.stop)
        yield served.url, MODEL if null else served.endpoint["model"]


def main() -> int:
    options = options_of()
    with (
        start_database() as database,
        tempfile.TemporaryDirectory() as folder,
        serve_upstream(options.null) as (url, model),
    ):
        # The gateway in front of the null server is not one of those that share a store.
        os.environ[VARIABLE] = database.url
        outcome = asyncio.run(
            run_gateways(
                url, model, database, Path(folder), seconds=60 * options.minutes, kills=options.kills,
                seed=options.seed, null=options.null,
            )
        )  # fmt: skip
    print(outcome.describe())
    for line, count in Counter(outcome.violations).most_common():
        print(f"violation ({count}): {line}")
    return bool(outcome.violations)


if __name__ == "__main__":
    sys.exit(main())
