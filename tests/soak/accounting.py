"""Two tenants of the same weight share one real engine; one of them does what escapes a simple accounting.

    python tests/soak/accounting.py --seconds 60

Serves the built-in model with llama.cpp of BEDPLATE_HOME. One tenant has as many streams as the engine has slots, so
that a request of it always waits. The other keeps 64 requests in flight: lists of prompts, several choices, streams
that it aborts, with and without a header that lets llama.cpp continue without a client, and requests that are too
large. Prints a table. Exits with 1 when the share of the first tenant in the tokens of both is more than 10 % from
half, when the recorded output tokens differ by more than 1 % from those that the engine counted, or when a request
does not get the answer that it should.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from typing import Any

import aiohttp
from tests.fleet.serving import Serving, serving
from tests.soak.crowd import Crowd
from tests.soak.flood import FLOOD, QUIET, SETTLING_S, SLOTS, create_keys
from tests.soak.streams import REQUEST_LIMIT_S, Streams

SHARES = (0.45, 0.55)
MOST_DIFFERENCE = 0.01
WAIT_S = 1.0
QUIET_READS = 3
"""So many equal readings in a row mean that everything is recorded."""
PROMPT = "Story number {}: tell me about a river."


class GreedyClients(Crowd):
    """Clients that ask for several sequences in one request, and disconnect."""

    def __init__(self, url: str, model: str, count: int, tokens: int, *, key: str) -> None:
        super().__init__(url, model, count, think_s=0.0, limit_s=REQUEST_LIMIT_S, key=key)
        self.tokens = tokens
        self.ended: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def one(self, number: int) -> None:
        prompt = PROMPT.format(number)
        chat: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}], "max_tokens": self.tokens}
        text: dict[str, Any] = {"prompt": prompt, "max_tokens": self.tokens}
        kinds: tuple[tuple[str, str, dict[str, Any]], ...] = (
            ("list", "completions", {**text, "prompt": [f"{prompt} {one}" for one in range(3)]}),
            (
                "streamed list",
                "completions",
                {**text, "prompt": [f"{prompt} {one}" for one in range(4)], "stream": True},
            ),
            ("choices", "chat/completions", {**chat, "n": 2}),
            ("streamed choices", "chat/completions", {**chat, "n": 3, "stream": True}),
            ("aborted", "chat/completions", {**chat, "max_tokens": 4 * self.tokens, "stream": True}),
            ("aborted list", "completions", {**text, "prompt": [prompt, prompt], "max_tokens": 400, "stream": True}),
            ("too many", "completions", {**text, "prompt": [prompt] * 60}),
            ("n_predict", "chat/completions", {**chat, "n_predict": 2 * self.tokens, "stream": True}),
            ("token ids", "completions", {**text, "prompt": [[number % 1000 + 1000, 338], [253, 2353, 1000]]}),
            ("aborted, with a conversation", "chat/completions", {**chat, "max_tokens": 400, "stream": True}),
        )
        kind, path, body = kinds[number % len(kinds)]
        headers = {"X-Conversation-Id": f"soak-{number}"} if "conversation" in kind else {}
        try:
            async with self.session.post(f"{self.url}/{path}", json=body, headers=headers) as answer:
                await self._check(kind, answer)
        except (aiohttp.ClientError, TimeoutError) as error:
            self.wrong.append(f"{kind}: {type(error).__name__}: {error}")
            await asyncio.sleep(0.2)

    async def _check(self, kind: str, answer: aiohttp.ClientResponse) -> None:
        if answer.status == 200 and kind.startswith("aborted"):
            arrived = 0
            async for piece in answer.content.iter_any():
                arrived += piece.count(b"data:")
                if arrived >= self.tokens:
                    answer.close()
                    break
            self.ended[kind] += 1
            return
        told = await answer.read()
        if answer.status == 429 or (answer.status == 400 and kind == "too many"):
            self.ended[f"{kind}: {answer.status}"] += 1
            await asyncio.sleep(0.1)
        elif answer.status != 200 or (b'"error"' in told and b'"usage"' not in told):
            self.wrong.append(f"{kind}: HTTP {answer.status}: {told[:200]!r}")
        else:
            self.ended[kind] += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--streams", type=int, default=SLOTS, help="enough to always have one waiting")
    parser.add_argument("--greedy", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=40, help="of an answer, and until a stream is aborted")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stops the service as Ctrl-C does
    sys.exit(asyncio.run(run(parser.parse_args())))


async def run(options: argparse.Namespace) -> int:
    with create_keys() as keys, serving("--engine", "llama.cpp", "--concurrency", str(SLOTS)) as one:
        one.wait_ready()
        url, model = one.endpoint["url"], one.endpoint["model"]
        engine_before, recorded_before = read_engine_tokens(one), read_recorded_tokens()
        quiet = Streams(url, model, options.streams, options.tokens, key=keys[0])
        greedy = GreedyClients(url, model, options.greedy, options.tokens, key=keys[1])
        async with quiet, greedy:
            await asyncio.sleep(SETTLING_S)
            before = [read_tenant_tokens(one, key) for key in keys]
            await asyncio.sleep(options.seconds)
            after = [read_tenant_tokens(one, key) for key in keys]
        generated, recorded = await wait_until_recorded(one)
        one.stop()
    served = [now - then for now, then in zip(after, before, strict=True)]
    return report(quiet, greedy, served, generated - engine_before, recorded - recorded_before)


async def wait_until_recorded(one: Serving) -> tuple[int, int]:
    """The output tokens that the engine counted and those in the record, when neither changes any more."""
    readings: list[tuple[int, int]] = []
    while len(readings) < QUIET_READS or len(set(readings[-QUIET_READS:])) > 1:
        await asyncio.sleep(WAIT_S)
        readings.append((read_engine_tokens(one), read_recorded_tokens()))
    return readings[-1]


def read_engine_tokens(one: Serving) -> int:
    """Generated tokens by the engine's own metrics, on its private port."""
    process = one.engine_processes()[0]
    words = process.cmdline()
    port, key = words[words.index("--port") + 1], process.environ()["LLAMA_API_KEY"]
    return int(read_metric(f"http://127.0.0.1:{port}", key, r"llamacpp:tokens_predicted_total"))


def read_tenant_tokens(one: Serving, key: str) -> int:
    """Prompt and output tokens of a tenant, as the gateway counts them."""
    return int(read_metric(one.root, key, r"bedplate_tenant_tokens_total\{[^}]*\}"))


def read_metric(root: str, key: str, name: str) -> float:
    request = urllib.request.Request(f"{root}/metrics", headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=REQUEST_LIMIT_S) as answer:
        return sum(float(one) for one in re.findall(rf"^{name} (\S+)$", answer.read().decode(), re.MULTILINE))


def read_recorded_tokens() -> int:
    """Output tokens of both tenants in the store."""
    words = [sys.executable, "-m", "bedplate", "usage", "--since", "all", "--json"]
    rows = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)["rows"]
    return sum(row["completion_tokens"] for row in rows if row["key"] in (QUIET, FLOOD))


def report(quiet: Streams, greedy: GreedyClients, served: list[int], generated: int, recorded: int) -> int:
    share = served[0] / max(1, sum(served))
    difference = abs(recorded - generated) / max(1, generated)
    counts = quiet.counts
    wrong = [*counts.failed, *counts.truncated, *counts.duplicated, *greedy.wrong]
    rows = [
        ("", "result", "goal"),
        ("---", "---:", "---"),
        (
            "share of the tenant without lists and aborts in all tokens",
            f"{share:.1%}" if sum(served) else "no request ended in time",
            f"{SHARES[0]:.0%} to {SHARES[1]:.0%}",
        ),
        ("output tokens that the engine generated", f"{generated:,}", ""),
        ("output tokens that were recorded", f"{recorded:,}: {difference:.2%} off", f"at most {MOST_DIFFERENCE:.0%}"),
        ("complete answers of that tenant", str(counts.whole), ""),
        ("wrong answers", str(len(wrong)), "0"),
    ]
    print("\n".join(f"| {' | '.join(row)} |" for row in rows))
    print("; ".join(f"{kind} {count}" for kind, count in sorted(greedy.ended.items())), file=sys.stderr)
    for one in wrong[:5]:
        print(one, file=sys.stderr)
    return 0 if SHARES[0] <= share <= SHARES[1] and difference <= MOST_DIFFERENCE and not wrong else 1


if __name__ == "__main__":
    main()
