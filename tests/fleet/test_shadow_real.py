"""`bedplate shadow` with real engines to its verdict: recorded shapes in idle time, and live requests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from pathlib import Path

import pytest
from tests.commands import Answer
from tests.fleet.beside import make_home, pin_to_core, run_bedplate
from tests.fleet.checks import endpoint
from tests.fleet.serving import Serving, serving
from tests.soak.streams import Counts, Streams

from bedplate import store
from bedplate.values.record import from_json
from bedplate.values.shadow import ShadowResult
from bedplate.values.verdict import Verdict

pytestmark = pytest.mark.timeout(900)
SMALL = ("--concurrency", "2", "--context", "512")
ANSWERS = (0, 10, 20, 30)
"""Exit codes of stay, migrate and not proven."""
RULES = "You are the clerk of a small library by the river. " + "Be brief, be kind, and name the shelf. " * 16
"""More than the 512 bytes by which beginnings are known to be the same."""
TOKENS = 12


@pytest.fixture
def home(tmp_path: Path, bedplate_home: Path, builtin_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = make_home(tmp_path / "home", bedplate_home, "llama.cpp", "pytorch")
    monkeypatch.setenv("BEDPLATE_HOME", str(found))
    return found


def conversations(one: Serving, count: int) -> None:
    """One after the other, which all begin alike."""
    with endpoint(one.root, one.endpoint["model"]) as at:
        for number in range(count):
            messages = [("system", RULES), ("user", f"Where is book number {number}?")]
            at.client.chat.completions.create(
                model=at.model, max_tokens=TOKENS, temperature=0,
                messages=[{"role": role, "content": text} for role, text in messages],
            )  # fmt: skip


def test_recorded_requests_give_the_verdict_of_compare(home: Path) -> None:
    """With shared prefixes, which llama.cpp caches and PyTorch does not: the gain counts and is reported."""

    async def tried() -> tuple[Answer, Answer]:
        shadowed = await run_bedplate(
            "shadow", "pytorch", "tried", "--share", "100%", "--for", "120s", "--json", heard=print
        )
        return shadowed, await run_bedplate("compare", "llama.cpp", "pytorch", "--json")

    with serving("--name", "tried", "--engine", "llama.cpp", *SMALL) as one:
        one.wait_ready()
        conversations(one, 4)
        shadowed, compared = asyncio.run(tried())
        one.stop()
    assert shadowed.code in ANSWERS, shadowed.err
    done = from_json(ShadowResult, shadowed.out)
    assert done.how == "replay" and done.turns >= 3 and done.verdict.answer in ("stay", "migrate", "not proven")
    print(f"{done.verdict.answer}: {done.verdict.text} ({done.turns} turns, {done.took_s:.0f} s)")
    mine = next(cell for cell in store.find_run(done.run).cells if cell.subject.engine == "llama.cpp")
    assert any(sample.cached_tokens for repeat in mine.repeats for sample in repeat.samples)
    again = from_json(Verdict, compared.out)
    assert (compared.code, again.answer, again.text) == (shadowed.code, done.verdict.answer, done.verdict.text)


def ended_well(one: Serving) -> int:
    """Requests that an endpoint has answered, as its metrics say."""
    with endpoint(one.root, one.endpoint["model"]) as at:
        rows = re.findall(r'^bedplate_requests_total\{.*outcome="ok".*\} (\S+)$', at.page("/metrics")[1], re.MULTILINE)
    return round(sum(map(float, rows)))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux keeps processes on certain cores")
def test_live_requests_are_mirrored_to_a_remote_challenger(home: Path) -> None:
    """Each side has a core of its own, which is as near to a device of its own as one processor gets."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("there is one core, and two engines need one each")

    async def tried(mine: Serving, theirs: Serving) -> tuple[Answer, Counts, int]:
        async with Streams(mine.endpoint["url"], mine.endpoint["model"], 2, TOKENS, think_s=0.05) as streams:
            while not streams.counts.whole:
                await asyncio.sleep(0.05)
            before = 0

            def heard(line: str) -> None:
                nonlocal before
                print(line)
                if "sending copies of" in line:
                    before = streams.counts.whole

            done = await run_bedplate(
                "shadow", "llama.cpp", "mine", "--url", theirs.endpoint["url"], "--share", "50%", "--for", "45s",
                "--json", heard=heard,
            )  # fmt: skip
            answered = streams.counts.whole - before
        return done, streams.counts, answered

    with contextlib.ExitStack() as ends:
        sides = []
        for core, name in zip(cores, ("mine", "theirs"), strict=False):
            with pin_to_core(core):
                sides.append(ends.enter_context(serving("--name", name, "--engine", "llama.cpp", *SMALL)))
            sides[-1].wait_ready()
        before = ended_well(sides[1])
        shadowed, counts, answered = asyncio.run(tried(*sides))
        sent = ended_well(sides[1]) - before
        for one in sides:
            one.stop()
    assert shadowed.code in ANSWERS, shadowed.err
    done = from_json(ShadowResult, shadowed.out)
    assert done.how == "live" and done.turns >= 3
    print(f"{done.verdict.answer}: {done.verdict.text} ({done.requests} of {answered} requests, {done.took_s:.0f} s)")
    assert 0.3 <= done.requests / answered <= 0.7 and sent >= done.requests
    assert (counts.failed, counts.truncated, counts.duplicated) == ([], [], []) and counts.whole > 20
    assert done.verdict.answer != "migrate", "half of the load proves nothing in its favour"
    told = {one.what: (one.a, one.b) for one in done.verdict.differences}
    assert told["requests"] == ("all", "50% of them") and told["endpoint"][1] == sides[1].root
    assert store.read_verdicts(done.verdict.machine) == (), "no plan for this machine learns of another's engine"
