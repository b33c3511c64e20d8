"""Calibrate a simulated replica on measurements at low concurrency, and compare it with those at high concurrency.

    bedplate bench --engines llama.cpp --concurrency 1,4,8,16 --json > run.json
    python benchmarks/simulate/here.py run.json [--learn 1 4] [--foretell 8 16]

Four figures are fitted: the time of a pass, the time that each sequence and each prompt token add to it, and the share
of a prompt's time for which other requests wait. They are fitted on mean TTFT, mean TPOT, throughput and the mean gap
between tokens of the closed loops given with `--learn`; the others are predicted. Two assumptions cover what was not
measured. First, another sequence costs at least as much as a prompt token, because a matrix product only becomes more
efficient with more rows. If the last sequences cost more, the geometric mean of the two is used; if they cost less,
reading the weights hid a part of their cost, which it does not for many sequences. Second, requests that run alone all
do the same work, so they differ only by the speed of the machine: the loop runs at nine speeds with that spread.
"""

from __future__ import annotations

import argparse
import lzma
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from bedplate.decide.simulate import Book, Fleet, ReplicaLimits, Steps, simulate
from bedplate.decide.simulate.times import speed_up
from bedplate.values import from_json
from bedplate.values.run import Cell, Run

ACCEPT_S = APART_S = 0.001
"""Delay of a request over loopback, and the distance between two requests, which never arrive together."""
WARMUP_S = 2.0
"""As in `bedplate bench`."""
BATCH_TOKENS = {"llama.cpp": 2048, "vllm": 2048}
ONE_TOKEN = (0.9, 1.1)
PROMPT_GAP = 2.0
"""Multiple of the median: a longer gap contained a prompt."""


class Seen(NamedTuple):
    """A closed loop, measured or simulated; milliseconds and tokens per second."""

    ttft: float
    tpot: float
    tok_s: float
    ttft_p95: float
    requests: int = 0
    gap: float | None = None
    """Mean gap between two tokens, for passes without a prompt."""
    firsts: tuple[float, ...] = ()
    """One value per request."""


class Asked(NamedTuple):
    """Load of one cell."""

    prompt: int
    output: int
    concurrency: int
    seconds: tuple[float, ...]
    """Duration of its repeats."""
    spread_s: float
    """Time over which the first requests are spread."""
    enough: int
    """Requests that last longer than any repeat."""


class Guess(NamedTuple):
    pass_s: float
    sequence_s: float
    prompt_token_s: float
    share: float

    def decode_s(self, count: int, learnt: int) -> float:
        """Time of a pass in which this many sequences get a token, if at most `learnt` were measured."""
        further_s = math.sqrt(self.prompt_token_s * max(self.sequence_s, self.prompt_token_s))
        return self.pass_s + self.sequence_s * min(count, learnt) + further_s * max(0, count - learnt)

    def steps(self, slots: int, batch: int, learnt: int) -> Steps:
        return Steps(
            decode_s=tuple(self.decode_s(count, learnt) for count in range(slots + 1)),
            context_s=tuple([0.0] * (slots + 1)),
            # A prefill pass reads the weights once, like every pass.
            prompt_s=tuple(self.pass_s + self.prompt_token_s * tokens for tokens in range(batch + 1)),
            share=self.share,
            once_s=self.pass_s,
            accept_s=ACCEPT_S,
        )


def share_of(ordered: Sequence[float], share: float) -> float:
    """Linearly interpolated percentile: for a few dozen requests, the nearest rank is nearly the slowest."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def unevenness(cell: Cell) -> float:
    """Variation of the machine's speed, as the standard deviation of a logarithm.

    Half the distance between the 16th and the 84th percentile, so that one delayed request has little influence.
    """
    logs = sorted(
        math.log(one.ttft_ms)
        for repeat in cell.repeats
        for one in repeat.samples
        if one.outcome == "ok" and one.ttft_ms
    )
    return (share_of(logs, 0.84) - share_of(logs, 0.16)) / 2 if len(logs) > 2 else 0.0


def speeds(spread: float, count: int = 9) -> list[float]:
    """Log-normal factors on all times, one for each ninth of the probability; their mean is 1."""
    normal = statistics.NormalDist()
    factors = [math.exp(spread * normal.inv_cdf((number + 0.5) / count)) for number in range(count)]
    return [factor / statistics.fmean(factors) for factor in factors]


def undisturbed(gaps: Sequence[float]) -> float:
    """Mean of the gaps without those in which a prompt was computed.

    Not the median: occasional delays are part of the time of a pass, as in every other figure here.
    """
    most = PROMPT_GAP * statistics.median(gaps)
    return statistics.fmean(gap for gap in gaps if gap <= most)


def measured(cell: Cell) -> Seen | None:
    samples = [one for repeat in cell.repeats for one in repeat.samples if one.outcome == "ok"]
    firsts = sorted(one.ttft_ms for one in samples if one.ttft_ms is not None)
    each = [one.tpot_ms for one in samples if one.tpot_ms is not None]
    if not firsts or not each or any(repeat.delivered_tokens is None for repeat in cell.repeats):
        return None
    tok_s = sum(repeat.delivered_tokens or 0 for repeat in cell.repeats) / sum(one.seconds for one in cell.repeats)
    gaps = [gap for one in samples for gap in one.gaps_ms]
    tokens = sum((one.output_tokens or 1) - 1 for one in samples)
    # Where events carry several tokens or parts of one, the gaps between them do not show passes.
    gap = undisturbed(gaps) if gaps and ONE_TOKEN[0] <= len(gaps) / max(1, tokens) <= ONE_TOKEN[1] else None
    return Seen(statistics.mean(firsts), statistics.mean(each), tok_s, share_of(firsts, 0.95), len(samples), gap)


def foretold(steps: Steps, limits: ReplicaLimits, asked: Asked, spread: float) -> Seen:
    """Merge the loops at all speeds of the machine."""
    loops = [looped(speed_up(steps, 1 / factor), limits, asked) for factor in speeds(spread)]
    firsts = sorted(first for loop in loops for first in loop.firsts)
    each = statistics.fmean(loop.tpot for loop in loops)
    # The speeds are those of requests: slow requests take more of the time.
    rate = statistics.harmonic_mean([loop.tok_s for loop in loops])
    return Seen(statistics.fmean(firsts), each, rate, share_of(firsts, 0.95), len(firsts))


def looped(steps: Steps, limits: ReplicaLimits, asked: Asked) -> Seen:
    """A closed loop as in `bedplate bench`: spread first requests, a warm-up, then the repeats."""
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
    mean, rate = statistics.mean(firsts), tokens / longest
    return Seen(mean, statistics.mean(each), rate, share_of(firsts, 0.95), len(firsts), firsts=tuple(firsts))


def asked_of(cell: Cell, lone: Seen | None) -> Asked:
    load = cell.load
    concurrency = load.concurrency or 1
    request_s = (lone.ttft + lone.tpot * (load.output_tokens - 1)) / 1000 if lone is not None else WARMUP_S
    seconds = tuple(repeat.seconds for repeat in cell.repeats)
    sent = max(len(repeat.samples) + repeat.warmup for repeat in cell.repeats)
    spread_s = min(WARMUP_S / 2, request_s) if concurrency > 1 else 0.0
    return Asked(load.prompt_tokens, load.output_tokens, concurrency, seconds, spread_s, 3 * sent + 4 * concurrency)


def calibrated(seen: dict[int, Seen], asked: dict[int, Asked], limits: ReplicaLimits) -> Guess:
    """The parameters whose loops are nearest to the measurements, by ratios."""
    least = seen[min(seen)]

    def cost(logs: Sequence[float]) -> float:
        guess = _guess(logs)
        steps = guess.steps(limits.slots, limits.batch_tokens, max(seen))
        off = 0.0
        for concurrency, one in seen.items():
            got = looped(steps, limits, asked[concurrency])
            pairs = [(got.ttft, one.ttft), (got.tpot, one.tpot), (got.tok_s, one.tok_s)]
            if one.gap is not None:
                pairs.append((steps.decode_s[min(concurrency, limits.slots)] * 1000, one.gap))
            off += sum(math.log(ours / theirs) ** 2 for ours, theirs in pairs)
        # Of equally good parameters, prefer those in which others wait for the whole time of a prompt.
        return off + 0.01 * math.log(guess.share) ** 2

    tpot_s, ttft_s, prompt = least.tpot / 1000, least.ttft / 1000, asked[min(seen)].prompt
    start = [math.log(tpot_s / 2), math.log(tpot_s / 2), math.log(0.8 * ttft_s / prompt), 0.0]
    return _guess(nelder_mead(cost, start))


def _guess(logs: Sequence[float]) -> Guess:
    return Guess(*(math.exp(max(-20.0, min(5.0, one))) for one in logs))


def nelder_mead(cost: Callable[[Sequence[float]], float], start: Sequence[float], rounds: int = 400) -> list[float]:
    """The downhill simplex method in its simplest form."""
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
    """Closed loops by engine and lengths, then by concurrency."""
    found: dict[tuple[str, int, int], dict[int, Cell]] = {}
    for cell in run.cells:
        load = cell.load
        if load.arrivals == "closed" and load.concurrency is not None:
            found.setdefault((cell.subject.engine, load.prompt_tokens, load.output_tokens), {})[load.concurrency] = cell
    return found


def limits_of(cell: Cell, longest: int, most: int) -> ReplicaLimits:
    """Limits of the started engine; what the plan does not set is the engine default."""
    settings = cell.subject.settings
    slots = settings.slots if settings is not None else most
    batch = (settings.batch_tokens if settings is not None else None) or BATCH_TOKENS.get(cell.subject.engine, 8192)
    return ReplicaLimits(slots, max(batch, slots + 1), slots * (-(-longest // 16) + 1), reserves=True)


class Line(NamedTuple):
    """One load of one engine, simulated and measured."""

    engine: str
    prompt: int
    output: int
    in_flight: int
    ours: Seen
    theirs: Seen
    role: str
    """`learnt from`, `foretold`, or empty."""


class Held(NamedTuple):
    """One engine, calibrated and compared with the loads outside of its calibration."""

    lines: tuple[Line, ...]
    guess: Guess
    spread: float


def held(run: Run, learn: Sequence[int] = (1, 4), foretell: Sequence[int] = (8, 16)) -> list[Held]:
    """Every engine of a run; engines without measurements at every load of `learn` have no lines."""
    found = []
    for (engine, prompt, output), cells in loops_of(run).items():
        seen = {count: one for count, cell in cells.items() if (one := measured(cell)) is not None}
        learnt = {count: seen[count] for count in learn if count in seen}
        if len(learnt) < len(learn):
            continue
        limits = limits_of(next(iter(cells.values())), prompt + output, max(seen))
        asked = {count: asked_of(cells[count], seen.get(1)) for count in seen}
        guess = calibrated(learnt, asked, limits)
        steps = guess.steps(limits.slots, limits.batch_tokens, max(learnt))
        spread = unevenness(cells[min(learnt)])
        lines = []
        for count, one in sorted(seen.items()):
            role = "learnt from" if count in learnt else "foretold" if count in foretell else ""
            got = foretold(steps, limits, asked[count], spread)
            lines.append(Line(engine, prompt, output, count, got, one, role))
        found.append(Held(tuple(lines), guess, spread))
    return found


def read(path: Path) -> Run:
    """A file from `bedplate bench --json`, compressed or not."""
    raw = path.read_bytes()
    return from_json(Run, lzma.decompress(raw) if path.suffix == ".xz" else raw, str(path))


def off(ours: float, theirs: float) -> str:
    return f"{ours:,.0f} for {theirs:,.0f} ({ours / theirs - 1:+.0%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="files from `bedplate bench --json`")
    parser.add_argument("--learn", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--foretell", type=int, nargs="+", default=[8, 16])
    options = parser.parse_args()
    print("| engine | tokens | concurrency | requests | tok/s | TTFT p95 ms | TTFT mean ms | TPOT mean ms | |")
    print("| --- | --- | ---: | ---: | --- | --- | --- | --- | --- |")
    for path in options.runs:
        for one in held(read(path), options.learn, options.foretell):
            for line in one.lines:
                ours, theirs = line.ours, line.theirs
                print(
                    f"| {line.engine} | {line.prompt} + {line.output} | {line.in_flight} | {theirs.requests} "
                    f"| {off(ours.tok_s, theirs.tok_s)} | {off(ours.ttft_p95, theirs.ttft_p95)} "
                    f"| {off(ours.ttft, theirs.ttft)} | {off(ours.tpot, theirs.tpot)} | {line.role} |"
                )
            guess = one.guess
            print(
                f"| | | | | pass {guess.pass_s * 1000:.2f} ms + {guess.sequence_s * 1000:.2f} each "
                f"+ {guess.prompt_token_s * 1e6:.0f} µs for a prompt token; share {guess.share:.2f}; "
                f"speed ± {one.spread:.0%} | | | | |"
            )


if __name__ == "__main__":
    main()
