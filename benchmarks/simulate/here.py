"""Calibrates one simulated replica on measurements at low concurrency, and holds it against those at high concurrency.

    bedplate bench --engines llama.cpp --concurrency 1,4,8,16 --json > run.json
    python benchmarks/simulate/here.py run.json [--learn 1 4] [--foretell 8 16]

Four figures are fitted: what a pass takes, what each sequence and each prompt token add to it, and how much of a
prompt's time others wait for. They are learnt from mean TTFT, mean TPOT and throughput of the
closed loops named with `--learn`; what is said of the others is foretold.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from bedplate.decide.simulate import Book, Fleet, Limits, Steps, simulate
from bedplate.decide.simulate.outcome import percentile
from bedplate.values import from_json
from bedplate.values.run import Cell, Run

ACCEPT_S = APART_S = 0.001
"""What a request over loopback takes to be seen, and how far two of them come apart: they never come at once."""
WARMUP_S = 2.0
"""As `bedplate bench` has it."""
BATCH_TOKENS = {"llama.cpp": 2048, "vllm": 2048}
ONE_TOKEN = (0.9, 1.1)


class Seen(NamedTuple):
    """A closed loop, measured or simulated; milliseconds and tokens per second."""

    ttft: float
    tpot: float
    tok_s: float
    ttft_p95: float
    requests: int = 0
    gap: float | None = None
    """The median between two tokens: a pass in which no prompt was computed."""


class Asked(NamedTuple):
    """What one cell was asked for."""

    prompt: int
    output: int
    concurrency: int
    seconds: tuple[float, ...]
    """Of its repeats."""
    spread_s: float
    """Over which the first requests are spread."""
    enough: int
    """Requests that last longer than any repeat."""


class Guess(NamedTuple):
    pass_s: float
    sequence_s: float
    prompt_token_s: float
    share: float

    def steps(self, slots: int, batch: int) -> Steps:
        return Steps(
            decode_s=tuple(self.pass_s + self.sequence_s * count for count in range(slots + 1)),
            context_s=tuple([0.0] * (slots + 1)),
            # A pass of prompts reads the weights once, as every pass does.
            prompt_s=tuple(self.pass_s + self.prompt_token_s * tokens for tokens in range(batch + 1)),
            share=self.share,
            once_s=self.pass_s,
            accept_s=ACCEPT_S,
        )


def measured(cell: Cell) -> Seen | None:
    samples = [one for repeat in cell.repeats for one in repeat.samples if one.outcome == "ok"]
    firsts = sorted(one.ttft_ms for one in samples if one.ttft_ms is not None)
    each = [one.tpot_ms for one in samples if one.tpot_ms is not None]
    if not firsts or not each or any(repeat.delivered_tokens is None for repeat in cell.repeats):
        return None
    tok_s = sum(repeat.delivered_tokens or 0 for repeat in cell.repeats) / sum(one.seconds for one in cell.repeats)
    gaps = [gap for one in samples for gap in one.gaps_ms]
    tokens = sum((one.output_tokens or 1) - 1 for one in samples)
    # Where events carry several tokens or parts of one, the gaps between them say nothing of passes.
    gap = statistics.median(gaps) if gaps and ONE_TOKEN[0] <= len(gaps) / max(1, tokens) <= ONE_TOKEN[1] else None
    return Seen(statistics.mean(firsts), statistics.mean(each), tok_s, percentile(firsts, 0.95), len(samples), gap)


def looped(steps: Steps, limits: Limits, asked: Asked) -> Seen:
    """A closed loop as `bedplate bench` measures it: first requests spread out, a warm-up, then each repeat's time."""
    concurrency, output = asked.concurrency, asked.output
    firsts: list[float] = []
    each: list[float] = []
    tokens = 0.0
    longest = max(asked.seconds)
    starts = [asked.spread_s * number / concurrency for number in range(concurrency)]
    count = asked.enough
    ran = simulate(
        Fleet(steps, limits, 1), Book([asked.prompt] * count, [output] * count, starts), concurrency=concurrency,
        apart_s=APART_S,
    )  # fmt: skip
    book = ran.book
    began, ended = WARMUP_S, WARMUP_S + longest
    for rid in range(count):
        came, first, done = book.arrival[rid] - steps.accept_s, book.first[rid], book.done[rid]
        tokens += began < first <= ended
        if done > first:
            within = max(0.0, min(done, ended) - max(first, began)) / (done - first)
            tokens += (output - 1) * within
        if began <= came < ended:
            firsts.append((first - came) * 1000)
            each.append((done - first) / max(1, output - 1) * 1000)
    if not firsts:
        return Seen(1e9, 1e9, 1e-9, 1e9)
    firsts.sort()
    return Seen(statistics.mean(firsts), statistics.mean(each), tokens / longest, percentile(firsts, 0.95), len(firsts))


def asked_of(cell: Cell, lone: Seen | None) -> Asked:
    load = cell.load
    concurrency = load.concurrency or 1
    request_s = (lone.ttft + lone.tpot * (load.output_tokens - 1)) / 1000 if lone is not None else WARMUP_S
    seconds = tuple(repeat.seconds for repeat in cell.repeats)
    sent = max(len(repeat.samples) + repeat.warmup for repeat in cell.repeats)
    spread_s = min(WARMUP_S / 2, request_s) if concurrency > 1 else 0.0
    return Asked(load.prompt_tokens, load.output_tokens, concurrency, seconds, spread_s, 3 * sent + 4 * concurrency)


def calibrated(seen: dict[int, Seen], asked: dict[int, Asked], limits: Limits) -> Guess:
    """The guess whose loops come nearest to what was measured, by ratios."""
    least = seen[min(seen)]

    def cost(logs: Sequence[float]) -> float:
        guess = _guess(logs)
        steps = guess.steps(limits.slots, limits.batch_tokens)
        off = 0.0
        for concurrency, one in seen.items():
            got = looped(steps, limits, asked[concurrency])
            pairs = [(got.ttft, one.ttft), (got.tpot, one.tpot), (got.tok_s, one.tok_s)]
            if one.gap is not None:
                pairs.append((steps.decode_s[min(concurrency, limits.slots)] * 1000, one.gap))
            off += sum(math.log(ours / theirs) ** 2 for ours, theirs in pairs)
        # Between guesses that are alike, the one in which others wait for all of a prompt's time.
        return off + 0.01 * math.log(guess.share) ** 2

    tpot_s, ttft_s, prompt = least.tpot / 1000, least.ttft / 1000, asked[min(seen)].prompt
    start = [math.log(tpot_s / 2), math.log(tpot_s / 2), math.log(0.8 * ttft_s / prompt), 0.0]
    return _guess(nelder_mead(cost, start))


def _guess(logs: Sequence[float]) -> Guess:
    return Guess(*(math.exp(max(-20.0, min(5.0, one))) for one in logs))


def nelder_mead(cost: Callable[[Sequence[float]], float], start: Sequence[float], rounds: int = 400) -> list[float]:
    """The downhill simplex, in its plainest form."""
    size = len(start)
    points = [list(start)]
    for axis in range(size):
        moved = list(start)
        moved[axis] += 0.5
        points.append(moved)
    scored = sorted((cost(point), point) for point in points)
    for _ in range(rounds):
        centre = [statistics.fmean(point[axis] for _, point in scored[:-1]) for axis in range(size)]
        worst, last = scored[-1]

        def along(far: float, centre: list[float] = centre, last: list[float] = last) -> tuple[float, list[float]]:
            point = [mid + far * (mid - end) for mid, end in zip(centre, last, strict=True)]
            return cost(point), point

        tried = along(1.0)
        if tried[0] < scored[0][0]:
            tried = min(tried, along(2.0))
        elif tried[0] >= scored[-2][0]:
            tried = along(0.5) if tried[0] < worst else along(-0.5)
            if tried[0] >= worst:
                best = scored[0][1]
                shrunk = [[(one + to) / 2 for one, to in zip(point, best, strict=True)] for _, point in scored[1:]]
                scored = sorted([scored[0], *((cost(point), point) for point in shrunk)])
                continue
        scored = sorted([*scored[:-1], tried])
        if scored[-1][0] - scored[0][0] < 1e-9:
            break
    return scored[0][1]


def loops_of(run: Run) -> dict[tuple[str, int, int], dict[int, Cell]]:
    """By engine and lengths, the closed loops by their concurrency."""
    found: dict[tuple[str, int, int], dict[int, Cell]] = {}
    for cell in run.cells:
        load = cell.load
        if load.arrivals == "closed" and load.concurrency is not None:
            found.setdefault((cell.subject.engine, load.prompt_tokens, load.output_tokens), {})[load.concurrency] = cell
    return found


def limits_of(cell: Cell, longest: int, most: int) -> Limits:
    """As it was started; what a plan does not set is the engine's own."""
    settings = cell.subject.settings
    slots = settings.slots if settings is not None else most
    batch = (settings.batch_tokens if settings is not None else None) or BATCH_TOKENS.get(cell.subject.engine, 8192)
    return Limits(slots, max(batch, slots + 1), slots * (-(-longest // 16) + 1), reserves=True)


def off(ours: float, theirs: float) -> str:
    return f"{ours:,.0f} for {theirs:,.0f} ({ours / theirs - 1:+.0%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="files that `bedplate bench --json` printed")
    parser.add_argument("--learn", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--foretell", type=int, nargs="+", default=[8, 16])
    options = parser.parse_args()
    print("| engine | tokens | in flight | requests | tok/s | TTFT p95 ms | TTFT mean ms | TPOT mean ms | |")
    print("| --- | --- | ---: | ---: | --- | --- | --- | --- | --- |")
    for path in options.runs:
        run = from_json(Run, path.read_bytes(), str(path))
        for (engine, prompt, output), cells in loops_of(run).items():
            seen = {count: one for count, cell in cells.items() if (one := measured(cell)) is not None}
            learnt = {count: seen[count] for count in options.learn if count in seen}
            if len(learnt) < len(options.learn):
                print(f"| {engine} | {prompt} + {output} | – | – | not measured at {options.learn} | | | | |")
                continue
            limits = limits_of(next(iter(cells.values())), prompt + output, max(seen))
            asked = {count: asked_of(cells[count], seen.get(1)) for count in seen}
            guess = calibrated(learnt, asked, limits)
            steps = guess.steps(limits.slots, limits.batch_tokens)
            for count, one in sorted(seen.items()):
                got = looped(steps, limits, asked[count])
                role = "learnt from" if count in learnt else "foretold" if count in options.foretell else ""
                print(
                    f"| {engine} | {prompt} + {output} | {count} | {one.requests} | {off(got.tok_s, one.tok_s)} "
                    f"| {off(got.ttft_p95, one.ttft_p95)} | {off(got.ttft, one.ttft)} | {off(got.tpot, one.tpot)} "
                    f"| {role} |"
                )
            print(
                f"| | | | | pass {guess.pass_s * 1000:.2f} ms + {guess.sequence_s * 1000:.2f} each "
                f"+ {guess.prompt_token_s * 1e6:.0f} µs for a prompt token; share {guess.share:.2f} "
                "| | | | |"
            )


if __name__ == "__main__":
    main()
