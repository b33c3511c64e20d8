"""Runs half an hour of load while engines, replicas and bedplate itself are killed (SIGKILL) at random moments.

    python tests/soak/kills.py --minutes 30 --kills 200 --seed 1

Uses the engines in BEDPLATE_HOME, and installs missing ones first. In the first third of the time bedplate itself is
not killed, in order to observe its memory. Prints progress and a table. Exits with 1 when an answer was truncated
without an error, a process was left over, a usage record older than a second was lost, or memory grew.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import secrets
import signal
import socket
import sqlite3
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple

import aiohttp
import psutil

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.soak.crowd import Crowd

from bedplate import store
from bedplate.values.traffic import ServedRequest

NAME = "soak-kills"
TOKEN = "BEDPLATE_SOAK_TOKEN"
"""A variable in the environment of all started processes, by which leftover ones are recognized."""
REQUEST_LIMIT_S = 120.0
GONE_LIMIT_S = 15.0
"""Time limit for the descendants of a killed process to end."""
LAST_S = 1.0
"""Usage records of this time before a kill of bedplate may be lost."""
PADDED_BYTES, PADDINGS = 600, 4096
"""Each request body has a different length, which identifies its record."""
AGE_S = 8.0
"""The age at which the memory of successive bedplate processes is compared."""
MOST_GROWTH = 0.05
MOST_MORE_FILES = 8
STREAMED_SHARE = 0.8
GIVEN_UP = 3
CALM_SHARE = 1 / 3
"""The share of the time in which bedplate itself is not killed."""
CALM_KINDS = {"replica": 6, "all engines": 3, "warden": 1}
KINDS = {"bedplate": 4, "replica": 3, "all engines": 2, "warden": 1}
SHUT = (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError)


class Judged(NamedTuple):
    outcome: str
    """whole, error (reported to the client), closed, refused, hung; or a violation: cut, wrong."""
    detail: str = ""
    prompt_tokens: int | None = None


@dataclass
class Answer:
    """One request and its result; times in seconds since 1970."""

    tokens: int
    body_bytes: int
    sent_s: float
    ended_s: float
    judged: Judged


@dataclass
class Life:
    """One bedplate process."""

    pid: int
    born_s: float
    ready_s: float | None = None
    died_s: float | None = None
    code: int | None = None
    killed_s: float | None = None
    samples: list[tuple[float, int, int]] = field(default_factory=list)
    """Seconds since it was ready, resident bytes, open files."""


@dataclass
class Kill:
    at_s: float
    kind: str
    back_s: float | None = None
    """Time until the first complete answer to a request that was sent after the kill."""


# answers


def judged(status: int, text: str, *, stream: bool, tokens: int, has_logprobs: bool = True) -> Judged:
    """Checks an answer as the client received it, to its regular end.

    Without log-probabilities, as from the null server, each chunk and each word is a token.
    """
    if status != 200:
        try:
            error = json.loads(text)["error"]
            return Judged("error", f"HTTP {status} {error['code']}" if error["message"] else "HTTP without a message")
        except (ValueError, KeyError, TypeError):
            return Judged("wrong", f"HTTP {status} without an error object: {text[:200]!r}")
    judge = _judge_stream if stream else _judge_unstreamed
    return judge(text, tokens, _count_logprobs if has_logprobs else _count_words)


Count = Callable[[dict[str, Any]], int]


def _count_logprobs(choice: dict[str, Any]) -> int:
    return len((choice.get("logprobs") or {}).get("content") or ())


def _count_words(choice: dict[str, Any]) -> int:
    return len(((choice.get("delta") or choice.get("message") or {}).get("content") or "").split())


def _judge_stream(text: str, tokens: int, count: Count) -> Judged:
    parts = text.split("\n\n")
    events = [part[6:] for part in parts if part.startswith("data: ")]
    if parts[-1].strip():
        return Judged("cut", f"within an event: {parts[-1][-200:]!r}")
    try:
        chunks: list[dict[str, Any]] = [json.loads(event) for event in events if event != "[DONE]"]
    except ValueError:
        return Judged("cut", f"an event that is not JSON: {text[-200:]!r}")
    if chunks and "error" in chunks[-1]:
        error = chunks[-1]["error"]
        return Judged("error", f"event {error['code']}") if error.get("message") else Judged("wrong", str(error))
    if not events or events[-1] != "[DONE]":
        return Judged("cut", f"no [DONE] after {len(events)} events: {text[-200:]!r}")
    # The null server's first chunk has its delay as its id.
    same = chunks if count is _count_logprobs else chunks[1:]
    if events.count("[DONE]") > 1 or len({chunk.get("id") for chunk in same}) > 1:
        return Judged("wrong", "parts of two answers in one stream")
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    usage = next((chunk["usage"] for chunk in chunks if chunk.get("usage")), None)
    return _judge_tokens(choices, usage, tokens, count)


def _judge_unstreamed(text: str, tokens: int, count: Count) -> Judged:
    try:
        answer = json.loads(text)
    except ValueError:
        return Judged("cut", f"not JSON: {text[-200:]!r}")
    return _judge_tokens(answer["choices"], answer.get("usage"), tokens, count)


def _judge_tokens(choices: Sequence[dict[str, Any]], usage: dict[str, Any] | None, tokens: int, count: Count) -> Judged:
    """Checks the finish reason, the usage, and the number of tokens that arrived."""
    ends = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    came = sum(map(count, choices))
    if ends != ["length"]:
        return Judged("cut" if not ends else "wrong", f"finish reasons {ends} after {came} of {tokens} tokens")
    if usage is None or usage["completion_tokens"] != tokens or came != tokens:
        reported = usage and usage["completion_tokens"]
        return Judged("cut", f"{came} tokens arrived, its usage reports {reported}, {tokens} were requested")
    return Judged("whole", prompt_tokens=usage["prompt_tokens"])


def body_of(number: int, model: str, tokens: int, *, stream: bool) -> bytes:
    """A request body whose length is unique among the next 4096."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": f"Number {number}: a word about rivers."}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 1,
        "user": "",
    }
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    body["user"] = "u" * (PADDED_BYTES + number % PADDINGS - len(json.dumps(body)))
    return json.dumps(body).encode()


class Clients(Crowd):
    """Clients that continue with the next request after each rejection or failure."""

    def __init__(self, url: str, model: str, count: int, think_s: float, dice: random.Random) -> None:
        super().__init__(url, model, count, think_s=think_s, limit_s=REQUEST_LIMIT_S)
        self.answers: list[Answer] = []
        self.has_logprobs = True
        self.on_whole: Callable[[Answer], None] = lambda answer: None
        self._dice = dice

    def pause_s(self) -> float:
        return self._dice.uniform(0.5, 1.5) * max(self.think_s, 0.1)

    async def one(self, number: int) -> None:
        answer = await self._answered(number)
        self.answers.append(answer)
        if answer.judged.outcome == "whole":
            self.on_whole(answer)

    async def _answered(self, number: int) -> Answer:
        tokens, stream = self._dice.randint(3, 12), self._dice.random() < STREAMED_SHARE
        body = body_of(number, self.model, tokens, stream=stream)
        sent_s = time.time()
        try:
            headers = {"Content-Type": "application/json"}
            async with self.session.post(f"{self.url}/chat/completions", data=body, headers=headers) as answer:
                text = (await answer.read()).decode("utf-8", "replace")
            found = judged(answer.status, text, stream=stream, tokens=tokens, has_logprobs=self.has_logprobs)
        except TimeoutError:
            found = Judged("hung", f"no end after {REQUEST_LIMIT_S:g} s")
        except aiohttp.ClientConnectorError:
            found = Judged("refused")
        except SHUT as error:
            found = Judged("closed", type(error).__name__)
        return Answer(tokens, len(body), sent_s, time.time(), found)


# the service


class Service:
    """`bedplate serve` with replicas; restarted whenever it ends."""

    def __init__(self, options: argparse.Namespace, log: IO[bytes]) -> None:
        self.token = secrets.token_hex(8)
        self.port = free_port()
        self.lives: list[Life] = []
        self.own_ends: list[str] = []
        self.given_up = 0
        """Starts that ended with exit code 3, since an engine was killed three times before it was ready."""
        self.model = ""
        self._log = log
        self._env = {**os.environ, TOKEN: self.token, "NO_COLOR": "1"}
        self._words = [
            sys.executable, "-m", "bedplate", "serve", "--json", "--no-check", "--name", NAME, "--port", str(self.port),
            "--engine", "llama.cpp", "--replicas", str(options.replicas), "--concurrency", str(options.streams),
            "--context", "256",
        ]  # fmt: skip
        self._stopping = False
        self._first = asyncio.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def life(self) -> Life | None:
        """The process that runs now."""
        return self.lives[-1] if self.lives and self.lives[-1].died_s is None else None

    async def __aenter__(self) -> Service:
        self._task = asyncio.create_task(self._keep())
        first = asyncio.create_task(self._first.wait())
        await asyncio.wait({self._task, first}, return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            await self._task
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping = True
        if (life := self.life) is not None:
            os.kill(life.pid, signal.SIGINT)
        await self._task

    async def _keep(self) -> None:
        while not self._stopping:
            process = await asyncio.create_subprocess_exec(
                *self._words, env=self._env, stdout=asyncio.subprocess.PIPE, stderr=self._log
            )
            life = Life(process.pid, time.time())
            self.lives.append(life)
            reading = asyncio.create_task(self._read(process, life))
            life.code = await process.wait()
            life.died_s = time.time()
            await reading
            if not self._stopping and life.killed_s is None:
                if life.code == GIVEN_UP and life.ready_s is None:
                    self.given_up += 1
                else:
                    self.own_ends.append(f"with exit code {life.code} after {life.died_s - life.born_s:.1f} s")
                if not self._first.is_set():
                    raise RuntimeError(f"bedplate does not start; see its log: {self._log.name}")

    async def _read(self, process: asyncio.subprocess.Process, life: Life) -> None:
        if process.stdout is not None and (line := await process.stdout.readline()):
            life.ready_s = time.time()
            self.model = json.loads(line)["model"]
            self._first.set()

    def wardens(self) -> list[psutil.Process]:
        return [one for one in self._below() if "warden.py" in " ".join(_read_command(one))]

    def engines(self) -> list[psutil.Process]:
        found = []
        for warden in self.wardens():
            with contextlib.suppress(psutil.Error):
                found += warden.children()
        return found

    def _below(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            return psutil.Process(self.life.pid).children() if self.life is not None else []
        return []

    def kill(self, kind: str, dice: random.Random) -> bool:
        """Kills processes of this kind; returns whether there were any."""
        life = self.life
        if kind == "bedplate":
            if life is None:
                return False
            try:
                os.kill(life.pid, signal.SIGKILL)
            except ProcessLookupError:  # it has just ended
                return False
            life.killed_s = time.time()
            return True
        found = sorted(self.wardens() if kind == "warden" else self.engines(), key=lambda one: one.pid)
        chosen = found if kind == "all engines" else found and [dice.choice(found)]
        for one in chosen:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        return bool(chosen)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _read_command(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return list(process.cmdline())
    return []


# observers


@dataclass
class Orphans:
    """Started processes without a running bedplate as ancestor: the longest time, and those that stayed."""

    token: str
    longest_s: float = 0.0
    stayed: list[str] = field(default_factory=list)
    _since: dict[tuple[int, float], float] = field(default_factory=dict)

    def look(self, top: int | None) -> int:
        """Updates the list, and returns the number of orphans."""
        now, loose = time.monotonic(), self._loose(top)
        for key in [key for key in self._since if key not in loose]:
            del self._since[key]
        for key, words in loose.items():
            waited_s = now - self._since.setdefault(key, now)
            self.longest_s = max(self.longest_s, waited_s)
            if waited_s > GONE_LIMIT_S and words not in self.stayed:
                self.stayed.append(words)
        return len(loose)

    def _loose(self, top: int | None) -> dict[tuple[int, float], str]:
        below = {top}
        with contextlib.suppress(psutil.Error):
            below |= {one.pid for one in psutil.Process(top).children(recursive=True)} if top is not None else set()
        found = {}
        for pid in with_token(self.token):
            with contextlib.suppress(psutil.Error):
                one = psutil.Process(pid)
                if pid not in below and one.status() != psutil.STATUS_ZOMBIE and one.ppid() not in below:
                    found[pid, one.create_time()] = f"{pid}: {' '.join(one.cmdline())[:200]}"
        return found


def with_token(token: str) -> list[int]:
    """The pids of all processes with the token in their environment, whatever their parent."""
    wanted, found = f"{TOKEN}={token}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def take_sample(life: Life | None) -> None:
    if life is not None and life.ready_s is not None and life.died_s is None:
        with contextlib.suppress(psutil.Error):
            one = psutil.Process(life.pid)
            life.samples.append((time.time() - life.ready_s, one.memory_info().rss, one.num_fds()))


class Killer:
    """Kills a process at each of its random moments; if there is none of the kind, waits until there is."""

    def __init__(self, service: Service, minutes: float, kills: int, dice: random.Random) -> None:
        self.service, self.dice = service, dice
        self.seconds = 60 * minutes
        self.kills: list[Kill] = []
        self.moments = sorted(dice.uniform(0, self.seconds) for _ in range(kills))

    async def run(self) -> None:
        began = time.monotonic()
        for moment in self.moments:
            await asyncio.sleep(max(0.0, began + moment - time.monotonic()))
            kinds = CALM_KINDS if time.monotonic() - began < CALM_SHARE * self.seconds else KINDS
            kind = self.dice.choices([*kinds], [*kinds.values()])[0]
            while not self.service.kill(kind, self.dice):
                await asyncio.sleep(self.dice.uniform(0.1, 1.0))
            self.kills.append(Kill(time.time(), kind))
        await asyncio.sleep(max(0.0, began + self.seconds - time.monotonic()))

    def saw(self, answer: Answer) -> None:
        for kill in reversed(self.kills):
            if kill.back_s is not None:
                return
            if answer.sent_s >= kill.at_s:
                kill.back_s = answer.ended_s - kill.at_s


# results


@dataclass
class Kept:
    """The comparison of the clients' list with the store's."""

    found: int = 0
    lost: list[float] = field(default_factory=list)
    """Complete answers without a record: how long before a kill of bedplate they ended."""
    wrong: list[str] = field(default_factory=list)


def compared(answers: Iterable[Answer], records: Iterable[ServedRequest], deaths: Sequence[float]) -> Kept:
    """Checks that each complete answer has one record, unless bedplate was killed within a second. Pure."""
    by_length: dict[int, list[ServedRequest]] = {}
    for record in records:
        by_length.setdefault(record.body_bytes, []).append(record)
    kept = Kept()
    for answer in answers:
        own = [
            one
            for one in by_length.get(answer.body_bytes, ())
            if answer.sent_s - 0.5 <= one.at_s <= answer.ended_s + 0.5
        ]
        good = [one for one in own if one.outcome == "ok"]
        if answer.judged.outcome != "whole":
            # The end of a killed process reaches a client late on a busy machine.
            if good and _find_next_death(answer.sent_s, deaths, answer.ended_s - answer.sent_s + 1.0) is None:
                kept.wrong.append(f"recorded as answered, but it was not: {answer.judged}")
            continue
        if len(good) > 1:
            kept.wrong.append(f"recorded {len(good)} times: {good[0]}")
        elif not good:
            before_s = _find_next_death(answer.ended_s, deaths, float("inf"))
            if before_s is None or before_s > LAST_S:
                since = "with no kill after it" if before_s is None else f"{before_s:.2f} s before a kill"
                kept.wrong.append(f"lost, {since}: {answer.tokens} tokens at {answer.ended_s:.3f}")
            else:
                kept.lost.append(before_s)
        elif (good[0].completion_tokens, good[0].prompt_tokens) != (answer.tokens, answer.judged.prompt_tokens):
            kept.wrong.append(f"recorded with other tokens than {answer.tokens}: {good[0]}")
        else:
            kept.found += 1
    return kept


def _find_next_death(moment: float, deaths: Sequence[float], within_s: float) -> float | None:
    """The time from the moment to the next death, at most `within_s`; 0.1 s of tolerance for late detection."""
    return next((max(0.0, death - moment) for death in deaths if -0.1 <= death - moment <= within_s), None)


def unexplained(answers: Iterable[Answer], lives: Sequence[Life]) -> list[str]:
    """Connections that were closed or refused although bedplate was running."""
    gone = [(life.died_s, after.ready_s or after.born_s + 60) for life, after in pairwise(lives) if life.died_s]
    return [
        f"{answer.judged.outcome} at {answer.ended_s:.3f}, although bedplate was running"
        for answer in answers
        if answer.judged.outcome in ("closed", "refused")
        and not any(died_s - 1.0 <= answer.ended_s and answer.sent_s <= back_s for died_s, back_s in gone)
    ]


class Grown(NamedTuple):
    what: str
    before: float
    after: float

    @property
    def share(self) -> float:
        return self.after / self.before - 1


def growth(lives: Sequence[Life]) -> tuple[list[Grown], list[str]]:
    """Growth of resident memory and open files: in the longest process, and between processes at the same age."""
    grown: list[Grown] = []
    longest = max(lives, key=lambda life: len(life.samples))
    quarter = len(longest.samples) // 4
    if quarter >= 5:
        parts = longest.samples[quarter : 2 * quarter], longest.samples[-quarter:]
        span = f"of one process, after {parts[0][0][0]:.0f} and {parts[1][-1][0]:.0f} s"
        grown += _compare_medians(span, *([sample[1:] for sample in part] for part in parts))
    aged = [one for life in lives if (one := next((s[1:] for s in life.samples if s[0] >= AGE_S), None)) is not None]
    third = len(aged) // 3
    if third >= 2:
        grown += _compare_medians(
            f"of {len(aged)} processes {AGE_S:g} s old, first and last third", aged[:third], aged[-third:]
        )
    wrong = [
        f"{one.what}: from {one.before:,.0f} to {one.after:,.0f}"
        for one in grown
        if (one.share > MOST_GROWTH if "memory" in one.what else one.after - one.before > MOST_MORE_FILES)
    ]
    return grown, wrong


def _compare_medians(what: str, before: Sequence[tuple[int, int]], after: Sequence[tuple[int, int]]) -> list[Grown]:
    median = statistics.median
    return [
        Grown(f"memory {what}", median(one[0] for one in before), median(one[0] for one in after)),
        Grown(f"open files {what}", median(one[1] for one in before), median(one[1] for one in after)),
    ]


@dataclass
class Outcome:
    """All results of a soak."""

    answers: list[Answer]
    kills: list[Kill]
    lives: list[Life]
    own_ends: list[str]
    given_up: int
    orphans: Orphans
    left: int
    kept: Kept
    store: str
    wanted: int
    took_s: float

    def violations(self) -> list[str]:
        found = [f"{one.judged.outcome}: {one.judged.detail}" for one in self.answers if _is_wrong(one)]
        found += [f"left over: {one}" for one in self.orphans.stayed]
        found += [f"{self.left} processes are left at the end"] if self.left else []
        found += self.kept.wrong + unexplained(self.answers, self.lives) + growth(self.lives)[1]
        found += [f"bedplate ended without being killed, {one}" for one in self.own_ends]
        found += [f"the store: {self.store}"] if self.store != "ok" else []
        found += [f"{len(self.kills)} kills of {self.wanted}"] if len(self.kills) < self.wanted else []
        return found

    def table(self) -> str:
        count = Counter(one.judged.outcome for one in self.answers)
        errors = Counter(one.judged.detail for one in self.answers if one.judged.outcome == "error")
        rows = [
            ("time", f"{self.took_s / 60:.1f} min, {len(self.answers):,} requests"),
            ("kills", f"{len(self.kills)}: {_format_counts(Counter(one.kind for one in self.kills))}"),
            ("complete answers", f"{count['whole']:,}, each with its end, its usage and exactly the requested tokens"),
            ("errors reported to clients", f"{count['error']:,}: {_format_counts(errors)}"),
            ("connections closed or refused", f"{count['closed']} and {count['refused']}, while bedplate was down"),
            ("truncated without an error", f"{count['cut'] + count['wrong']}; without an end: {count['hung']}"),
            ("processes left over", f"{len(self.orphans.stayed) + self.left}; longest {self.orphans.longest_s:.1f} s"),
            ("usage records", f"{self.kept.found:,} of {count['whole']:,}; {_format_lost(self.kept.lost)}"),
            ("wrong or duplicated records", f"{len(self.kept.wrong)}; integrity of the store: {self.store}"),
            *((one.what, _format_growth(one)) for one in growth(self.lives)[0]),
            ("time until the next complete answer, median (longest)", _format_recovery(self.kills)),
            ("starts that bedplate gave up", f"{self.given_up}, since an engine was killed repeatedly"),
        ]  # fmt: skip
        return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {text} |" for name, text in rows)])


def _is_wrong(answer: Answer) -> bool:
    return answer.judged.outcome in ("cut", "wrong", "hung")


def _format_counts(counter: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counter.most_common()) or "none"


def _format_lost(lost: Sequence[float]) -> str:
    return f"{len(lost)} lost, the oldest {max(lost):.2f} s before a kill of bedplate" if lost else "none lost"


def _format_growth(one: Grown) -> str:
    if "memory" in one.what:
        return f"{one.before / 1e6:.1f} and {one.after / 1e6:.1f} MB"
    return f"{one.before:.0f} and {one.after:.0f}"


def _format_recovery(kills: Sequence[Kill]) -> str:
    """The time from a kill to the next complete answer, by kind."""
    parts = []
    for kind in dict.fromkeys(one.kind for one in kills):
        waits = sorted(one.back_s for one in kills if one.kind == kind and one.back_s is not None)
        if waits:
            parts.append(f"{kind} {statistics.median(waits):.1f} s ({waits[-1]:.1f})")
    return "; ".join(parts)


async def soaked(options: argparse.Namespace, log: IO[bytes], say: Callable[[str], None]) -> Outcome:
    dice = random.Random(options.seed)
    began = time.monotonic()
    async with Service(options, log) as service:
        killer = Killer(service, options.minutes, options.kills, dice)
        orphans = Orphans(service.token)
        visitors = random.Random(options.seed + 1)
        async with Clients(service.url, service.model, options.streams, options.think_s, visitors) as clients:
            clients.on_whole = killer.saw
            killing = asyncio.create_task(killer.run())
            told = time.monotonic()
            while not killing.done():
                await asyncio.wait({killing}, timeout=1.0)
                take_sample(service.life)
                orphans.look(service.life.pid if service.life is not None else None)
                if time.monotonic() - told >= options.tell_s:
                    told = time.monotonic()
                    say(_format_progress(time.monotonic() - began, killer, clients, service))
                if time.monotonic() - began > 180 * options.minutes + 60:
                    killing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await killing
        await asyncio.sleep(LAST_S)  # the last records
    until = time.monotonic() + GONE_LIMIT_S
    while (left := orphans.look(None)) and time.monotonic() < until:
        await asyncio.sleep(0.1)
    where = store.get_store_path()
    deaths = [life.killed_s for life in service.lives if life.killed_s is not None]
    kept = compared(clients.answers, store.read_requests(clients.answers[0].sent_s - 1, path=where), deaths)
    return Outcome(
        clients.answers, killer.kills, service.lives, service.own_ends, service.given_up, orphans, left, kept,
        check_integrity(where), options.kills, time.monotonic() - began,
    )  # fmt: skip


def _format_progress(passed_s: float, killer: Killer, clients: Clients, service: Service) -> str:
    count = Counter(one.judged.outcome for one in clients.answers)
    size = service.life.samples[-1][1] / 1e6 if service.life is not None and service.life.samples else 0.0
    return (
        f"{passed_s / 60:5.1f} min: {len(killer.kills)} kills, {_format_counts(count)}; "
        f"bedplate started {len(service.lives)} times, {size:.0f} MB"
    )


def check_integrity(path: Path) -> str:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return str(connection.execute("PRAGMA integrity_check").fetchone()[0])


def options_of(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--think-s", type=float, default=0.3, help="between an answer and the next request")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--tell-s", type=float, default=30.0, help="how often progress is printed")
    return parser.parse_args(words)


def main() -> int:
    options = options_of()
    with tempfile.NamedTemporaryFile(prefix="bedplate-kills-", suffix=".log", delete=False) as log:
        print(f"log of bedplate: {log.name}", flush=True)
        outcome = asyncio.run(soaked(options, log, lambda text: print(text, flush=True)))
    print(outcome.table())
    violations = outcome.violations()
    for one in violations[:20]:
        print(one, file=sys.stderr)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
