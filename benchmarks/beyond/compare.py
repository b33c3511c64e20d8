"""What distribution costs and brings on one box: bedplate's own replicas, Ray Serve and Dynamo, through one endpoint.

    python benchmarks/beyond/compare.py --json beyond.json

Two tables. The first is what each layer costs: the same engine and the same load, with and without it. The second is
what a router brings: prompts that share their beginnings, sent by what is cached where, or in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime as dt
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from bedplate.measure.load import Target, measure_apart, output_tok_s, prepare, run
from bedplate.measure.statistics import quantile
from bedplate.values.run import Load

READY_S = 1800.0
"""Of a first start, which installs and converts."""
STOP_S = 60.0
ANSWER_TOKENS = 16
"""Where prompts are what takes time."""
WORDS = [
    "river", "stone", "copper", "lantern", "orchard", "winter", "signal", "harbor", "meadow", "engine", "paper",
    "silver", "thunder", "garden", "mirror", "candle", "forest", "window", "letter", "bridge", "summer", "market",
    "island", "velvet", "hammer", "planet", "saddle", "barrel", "feather", "compass",
]  # fmt: skip


@dataclass(frozen=True)
class System:
    """One way to run two engines behind one endpoint."""

    name: str
    arguments: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


LLAMA, VLLM = ("--engine", "llama.cpp"), ("--engine", "vllm")
COSTS = {
    "llama": System("llama.cpp", LLAMA),
    "llama-ray": System("llama.cpp on Ray", ("--on", "ray", *LLAMA)),
    "vllm": System("vLLM", VLLM),
    "vllm-ray": System("vLLM on Ray", ("--on", "ray", *VLLM)),
    "vllm-dynamo": System("vLLM on Dynamo", ("--on", "dynamo", *VLLM)),
}
IN_TURNS = {"DYN_ROUTER_MODE": "round-robin"}
ROUTES = {
    "vllm-kv": System("Dynamo, KV router, vLLM", ("--on", "dynamo", *VLLM)),
    "vllm-turns": System("Dynamo, round robin, vLLM", ("--on", "dynamo", *VLLM), IN_TURNS),
    "vllm-gateway": System("bedplate's gateway, vLLM", VLLM),
    "vllm-serve": System("Ray Serve, vLLM", ("--on", "ray", *VLLM)),
    "mocker-kv": System("Dynamo, KV router, mocker", ("--on", "dynamo", "--engine", "mocker")),
    "mocker-turns": System("Dynamo, round robin, mocker", ("--on", "dynamo", "--engine", "mocker"), IN_TURNS),
}


@dataclass(frozen=True)
class Settings:
    """What the command line asked for."""

    names: tuple[str, ...]
    replicas: int
    concurrency: tuple[int, ...]
    seconds: float
    repeats: int
    prompt_tokens: int
    output_tokens: int
    prefixes: int
    prefix_words: int
    requests: int


@dataclass(frozen=True)
class Cost:
    """One system at one concurrency."""

    system: str
    engine: str
    concurrency: int
    ttft_p50_ms: float
    ttft_p95_ms: float
    tpot_p50_ms: float
    tok_s: float
    requests: int
    failed: int
    memory_gb: float


@dataclass(frozen=True)
class Routed:
    """One router under traffic of shared beginnings."""

    system: str
    engine: str
    concurrency: int
    ttft_p50_ms: float
    ttft_p95_ms: float
    tok_s: float
    cached: float | None
    """Of the prompts' tokens, those that a cache held, where the endpoint says so."""
    requests: int
    failed: int


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def served(system: System, replicas: int, context: int) -> Iterator[dict[str, Any]]:
    """The endpoint of `bedplate serve`, for the length of a with block; nothing of it is left afterwards."""
    command = [sys.executable, "-m", "bedplate", "serve", "--json", "--port", "0", "--no-check"]
    command += ["--replicas", str(replicas), "--context", str(context), "--concurrency", "8", *system.arguments]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, env={**os.environ, **system.env}, start_new_session=True
        )
        timer = _kill_after(process, READY_S)
        try:
            line = process.stdout.readline() if process.stdout is not None else b""
            timer.cancel()
            if not line:
                log.seek(0)
                raise RuntimeError(f"{system.name} did not start: {log.read().decode(errors='replace')[-1500:]}")
            yield json.loads(line)
        finally:
            timer.cancel()
            below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            process.kill()
            process.wait()
            _, left = psutil.wait_procs(below, timeout=10)
            if left:
                say(f"! {system.name} left {len(left)} processes behind")


def _kill_after(process: subprocess.Popen[bytes], seconds: float) -> Any:
    import threading

    timer = threading.Timer(seconds, process.kill)
    timer.daemon = True
    timer.start()
    return timer


def memory_gb(pid: int) -> float:
    """Of the whole tree; what processes share is counted once for each of them where nothing better is known."""
    total = 0
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error, FileNotFoundError):
            total += getattr(process.memory_full_info(), "pss", 0) or process.memory_info().rss
    return total / 1e9


def engine_of(endpoint: Mapping[str, Any]) -> str:
    return f"{endpoint['engine']} {endpoint['engine_version']}"


# what a layer costs


def costs(system: System, settings: Settings) -> list[Cost]:
    found = []
    with served(system, settings.replicas, 2048) as endpoint:
        target = Target.of(endpoint["url"])
        for concurrency in settings.concurrency:
            load = Load(
                concurrency=concurrency, prompt_tokens=settings.prompt_tokens, output_tokens=settings.output_tokens
            )
            prepared = run(prepare(target, load))
            repeats = [
                measure_apart(
                    target, load, prepared=prepared, seconds=settings.seconds, round=100 * concurrency + number
                )
                for number in range(settings.repeats)
            ]
            samples = [sample for repeat in repeats for sample in repeat.samples]
            good = [sample for sample in samples if sample.outcome == "ok"]
            firsts = sorted(s.ttft_ms for s in good if s.ttft_ms is not None)
            speeds = [speed for repeat in repeats if (speed := output_tok_s(repeat)) is not None]
            one = Cost(
                system=system.name,
                engine=engine_of(endpoint),
                concurrency=concurrency,
                ttft_p50_ms=quantile(firsts, 0.5),
                ttft_p95_ms=quantile(firsts, 0.95),
                tpot_p50_ms=quantile(sorted(s.tpot_ms for s in good if s.tpot_ms is not None), 0.5),
                tok_s=sum(speeds) / len(speeds) if speeds else 0.0,
                requests=len(samples),
                failed=len(samples) - len(good),
                memory_gb=memory_gb(endpoint["pid"]),
            )
            times = f"TTFT {one.ttft_p50_ms:.0f}/{one.ttft_p95_ms:.0f} ms"
            say(f"  {one.system}, {concurrency} in flight: {times}, {one.tok_s:.1f} tok/s")
            found.append(one)
    return found


# what a router brings


@dataclass
class Told:
    """One request, as its client saw it."""

    ttft_ms: float | None = None
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    whole: bool = False


def traffic(settings: Settings, seed: int) -> list[str]:
    """Prompts that begin with one of a few long texts each, in an order of chance that is the same for everybody."""
    chance = random.Random(seed)
    texts = [" ".join(chance.choices(WORDS, k=settings.prefix_words)) for _ in range(settings.prefixes)]
    order = [texts[number % len(texts)] for number in range(settings.requests)]
    chance.shuffle(order)
    return [f"{text} {' '.join(chance.choices(WORDS, k=16))}" for text in order]


async def ask(session: aiohttp.ClientSession, url: str, model: str, prompt: str, tokens: int) -> Told:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    told, began = Told(), time.perf_counter()
    async with session.post(f"{url}/completions", json=body) as answer:
        answer.raise_for_status()
        async for raw in answer.content:
            line = raw.strip()
            if line == b"data: [DONE]":
                told.whole = True
            elif line.startswith(b"data:"):
                event = json.loads(line[5:])
                if "error" in event:
                    break
                if told.ttft_ms is None and any(choice.get("text") for choice in event.get("choices") or ()):
                    told.ttft_ms = 1000 * (time.perf_counter() - began)
                if usage := event.get("usage"):
                    told.output_tokens, told.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
                    told.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return told


async def closed_loop(
    url: str, model: str, prompts: Sequence[str], concurrency: int, tokens: int
) -> tuple[list[Told], float]:
    """All of them, so many at once; and how long that took."""
    waiting, found = iter(prompts), []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:

        async def client() -> None:
            for prompt in waiting:
                try:
                    found.append(await ask(session, url, model, prompt, tokens))
                except aiohttp.ClientError:
                    found.append(Told())

        began = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(concurrency)))
        return found, time.perf_counter() - began


def routed(system: System, settings: Settings) -> list[Routed]:
    with served(system, settings.replicas, 2048) as endpoint:
        # Each with texts of its own: what is cached of others only takes room.
        return [under_traffic(system, endpoint, settings, concurrency) for concurrency in settings.concurrency]


def under_traffic(system: System, endpoint: Mapping[str, Any], settings: Settings, concurrency: int) -> Routed:
    prompts = traffic(settings, seed=concurrency)
    warm, url, model = len(prompts) // 4, endpoint["url"], endpoint["model"]
    run(closed_loop(url, model, prompts[:warm], concurrency, ANSWER_TOKENS))
    told, took_s = run(closed_loop(url, model, prompts[warm:], concurrency, ANSWER_TOKENS))
    good = [one for one in told if one.whole and one.ttft_ms is not None]
    known = [one for one in good if one.cached_tokens is not None]
    firsts = sorted(one.ttft_ms for one in good if one.ttft_ms is not None)
    asked = sum(one.prompt_tokens for one in known)
    found = Routed(
        system=system.name,
        engine=engine_of(endpoint),
        concurrency=concurrency,
        ttft_p50_ms=quantile(firsts, 0.5),
        ttft_p95_ms=quantile(firsts, 0.95),
        tok_s=sum(one.output_tokens for one in good) / took_s,
        cached=sum(one.cached_tokens or 0 for one in known) / asked if asked else None,
        requests=len(told),
        failed=len(told) - len(good),
    )
    times = f"TTFT {found.ttft_p50_ms:.0f}/{found.ttft_p95_ms:.0f} ms"
    say(f"  {found.system}, {concurrency} in flight: {times}, {found.tok_s:.1f} tok/s, cached {share(found.cached)}")
    return found


def share(part: float | None) -> str:
    return "not told" if part is None else f"{part:.0%}"


# the tables


def cost_table(rows: Sequence[Cost]) -> str:
    lines = [
        "| | engine | in flight | TTFT ms p50 | p95 | TPOT ms p50 | tok/s | memory GB | failed |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {one.system} × 2 | {one.engine} | {one.concurrency} | {one.ttft_p50_ms:.0f} | {one.ttft_p95_ms:.0f} "
        f"| {one.tpot_p50_ms:.1f} | {one.tok_s:.1f} | {one.memory_gb:.1f} | {one.failed} of {one.requests} |"
        for one in rows
    ]
    return "\n".join(lines)


def route_table(rows: Sequence[Routed]) -> str:
    lines = [
        "| | engine | in flight | TTFT ms p50 | p95 | tok/s | prompt cached | failed |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {one.system} × 2 | {one.engine} | {one.concurrency} | {one.ttft_p50_ms:.0f} | {one.ttft_p95_ms:.0f} "
        f"| {one.tok_s:.1f} | {share(one.cached)} | {one.failed} of {one.requests} |"
        for one in rows
    ]
    return "\n".join(lines)


def settings_from(arguments: argparse.Namespace) -> Settings:
    known = {**COSTS, **ROUTES}
    names = tuple(arguments.only.split(",")) if arguments.only else tuple(known)
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    return Settings(
        names=names,
        replicas=2,
        concurrency=tuple(int(word) for word in arguments.concurrency.split(",")),
        seconds=arguments.seconds,
        repeats=arguments.repeats,
        prompt_tokens=arguments.prompt_tokens,
        output_tokens=arguments.output_tokens,
        prefixes=arguments.prefixes,
        prefix_words=arguments.prefix_words,
        requests=arguments.requests,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", metavar="NAMES", help=f"of {', '.join((*COSTS, *ROUTES))}")
    parser.add_argument("--concurrency", default="1,4,8")
    parser.add_argument("--seconds", type=float, default=15.0, help="of one repeat in the first table")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--prefixes", type=int, default=12, help="long texts that prompts begin with")
    parser.add_argument("--prefix-words", type=int, default=500, help="of each of them")
    parser.add_argument("--requests", type=int, default=144, help="in the second table; a quarter of them is warm-up")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    settings = settings_from(arguments)
    paid: list[Cost] = []
    brought: list[Routed] = []
    for name in settings.names:
        say(name)
        try:
            if name in COSTS:
                paid += costs(COSTS[name], settings)
            else:
                brought += routed(ROUTES[name], settings)
        except RuntimeError as error:
            say(f"! {error}")
        if arguments.json:
            kept = {
                "at": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
                "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
                "settings": asdict(settings),
                "costs": [asdict(one) for one in paid],
                "routes": [asdict(one) for one in brought],
            }
            arguments.json.write_text(json.dumps(kept, indent=1))
    if paid:
        print(f"\n{cost_table(paid)}")
    if brought:
        print(f"\n{route_table(brought)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
