"""Compare simulated closed loops, and the estimator's closed form, with published rows that state their load.

    python benchmarks/simulate/truth.py [--truth FOLDER] [--every 10]

Uses the engine, model, chips, lengths and concurrency of each row; the simulator gets the passes from the shipped
efficiencies, and nothing is fitted here. Tables with both latencies imply a throughput: the concurrency divided by the
time of one request.
"""

from __future__ import annotations

import argparse
import csv
import random
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from bedplate.decide.estimate.batching import classify_weights, compute_speculation, get_efficiencies
from bedplate.decide.estimate.engines import get_traits
from bedplate.decide.estimate.serving import compute_times
from bedplate.decide.simulate import Book, CardPrice, Fleet, MeanLengths, ReplicaLimits, compute_outcome, simulate
from bedplate.decide.simulate.replica import BLOCK_TOKENS
from bedplate.decide.simulate.times import make_batched_steps
from bedplate.published import recipes
from bedplate.published.rows import PredictionRefusal, PublishedCase, resolve
from bedplate.published.under_load import MOST_SEQUENCES, RowLoad, find_load
from bedplate.values.simulation import Outcome

SOURCES = ("aiconfigurator_silicon_e2e", "inferencex_repo_results", "trtllm_perf_overview", "lmdeploy_a100")
METRICS = ("ttft_ms", "tpot_ms", "output_tok_s_total")
WAYS = ("steady", "saturated", "wave")
WAVES = 10
"""Requests per stream: the typical length of published loops, including their initial burst."""
BATCH_TOKENS = 8192
APART_S = 0.001
"""Interval between two requests that a client sends together."""


class Load(NamedTuple):
    """One configuration with all its measurements."""

    source: str
    case: PublishedCase
    asked: RowLoad
    measured: dict[str, float]


def read(folder: Path, every: int) -> list[Load]:
    found: list[Load] = []
    for source in SOURCES:
        path = folder / f"{source}.csv"
        if not path.exists():
            continue
        groups: dict[tuple[str, ...], list[dict[str, str]]] = defaultdict(list)
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                if row["metric"] in METRICS:
                    key = tuple(value for name, value in row.items() if name not in ("row_id", "metric", "value"))
                    groups[key].append(row)
        for rows in list(groups.values())[::every]:
            case = resolve(rows[0])
            question = case if isinstance(case, PredictionRefusal) else find_load(case)
            if (
                isinstance(case, PredictionRefusal)
                or isinstance(question, PredictionRefusal)
                or question.question.way not in WAYS
            ):
                continue
            found.append(Load(source, case, question, {row["metric"]: float(row["value"]) for row in rows}))
    return found


def simulated(load: Load) -> Outcome | None:
    found, case = load.asked, load.case
    question, work = found.question, found.question.work
    if work.room_bytes <= 0:
        return None
    prompt, output = round(work.prompt), round(work.output)
    streams = round(min(float(question.streams), MOST_SEQUENCES * work.groups))
    resident = int(work.room_bytes / (work.most_bytes / (prompt + output))) // BLOCK_TOKENS * int(work.groups)
    if resident * BLOCK_TOKENS < 1.2 * (prompt + output):
        return None
    slots = int(min(streams, question.slots * work.pipeline, MOST_SEQUENCES * work.groups))
    batch = BATCH_TOKENS * int(work.groups)
    e = get_efficiencies(case.engine, found.machine.family, classify_weights(case.shape))
    steps = make_batched_steps(
        found.machine, case.shape, e, found.layout._replace(replicas=1), MeanLengths(prompt, output), slots=slots,
        batch_tokens=max(batch, slots + 1), kv_bits=found.kv_bits,
    )  # fmt: skip
    if question.guessing:
        # With speculative decoding, the share of a pass per generated token.
        slower, accepted = compute_speculation(e, question.guessing)
        steps = steps._replace(
            decode_s=tuple(one * slower / accepted for one in steps.decode_s),
            context_s=tuple(one * slower / accepted for one in steps.context_s),
        )
    if question.way == "wave":
        # Cold engines with a single burst of requests, for which the estimator has separate factors.
        steps = steps._replace(
            decode_s=tuple(one * e.wave_token for one in steps.decode_s),
            context_s=tuple(one * e.wave_token for one in steps.context_s),
            prompt_s=tuple(one * e.wave_slower for one in steps.prompt_s),
            pair_s=steps.pair_s * e.wave_slower,
        )
    limits = ReplicaLimits(slots, max(batch, slots + 1), resident, reserves=get_traits(case.engine).reserves_answer)
    fleet = Fleet(steps, limits, 1)
    count = streams if question.way == "wave" else WAVES * streams
    prompts, outputs = drawn(case, prompt, count, 1), drawn(case, output, count, 2)
    ran = simulate(fleet, Book(prompts, outputs), concurrency=streams, apart_s=APART_S)
    return compute_outcome(fleet, ran, 1, None, CardPrice())


def drawn(case: PublishedCase, mean: int, count: int, seed: int) -> list[int]:
    """Lengths as InferenceX draws them, uniformly from 0.8 to 1.0 of the stated length; elsewhere constant."""
    if not recipes.is_recipe_point(case):
        return [mean] * count
    chance = random.Random(seed)
    return [max(1, round(mean / recipes.MEAN_LENGTH * chance.uniform(0.8, 1.0))) for _ in range(count)]


def closed_form(load: Load) -> dict[str, float]:
    e = get_efficiencies(load.case.engine, load.asked.machine.family, classify_weights(load.case.shape))
    got = compute_times(load.asked.question, e)
    return {
        "ttft_ms": float(got.first_s) * 1000,
        "tpot_ms": float(got.token_s) * 1000,
        "output_tok_s_total": float(got.tok_s) * load.asked.layout.replicas,
    }


def predicted(load: Load, got: Outcome) -> dict[str, float]:
    found = {"output_tok_s_total": got.output_tok_s * load.asked.layout.replicas}
    if got.ttft_ms is not None:
        found["ttft_ms"] = got.ttft_ms.mean
    if got.tpot_ms is not None:
        found["tpot_ms"] = got.tpot_ms.mean
    return found


def with_throughput(load: Load) -> dict[str, float]:
    """Throughput implied by both latencies, where a table does not state it."""
    measured = dict(load.measured)
    if "output_tok_s_total" not in measured and {"ttft_ms", "tpot_ms"} <= set(measured):
        output = float(load.asked.question.work.output)
        request_s = (measured["ttft_ms"] + (output - 1) * measured["tpot_ms"]) / 1000
        measured["output_tok_s_total"] = float(load.case.concurrency or 0) * output / request_s
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--truth", type=Path, default=Path(__file__).parents[3] / "shared" / "truth")
    parser.add_argument("--every", type=int, default=10, help="use only every Nth configuration")
    options = parser.parse_args()
    began = time.process_time()
    errors: dict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
    left_out = 0
    for load in read(options.truth, options.every):
        got = simulated(load)
        if got is None:
            left_out += 1
            continue
        ours, theirs = predicted(load, got), closed_form(load)
        for metric, value in with_throughput(load).items():
            if metric in ours and value > 0:
                group = (load.source, load.asked.question.way, metric)
                errors[group].append((ours[metric] / value - 1, theirs[metric] / value - 1))
    print(
        "| source | load | metric | rows | simulated: median error | within 20 % | bias | closed form: median error |"
    )
    print("| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for named, pairs in sorted(errors.items()):
        ours_off, theirs_off = [abs(one) for one, _ in pairs], [abs(other) for _, other in pairs]
        bias = statistics.median(one for one, _ in pairs)
        within = sum(one <= 0.2 for one in ours_off) / len(pairs)
        print(
            f"| {' | '.join(named)} | {len(pairs)} | {statistics.median(ours_off):.1%} | {within:.0%} | {bias:+.1%} "
            f"| {statistics.median(theirs_off):.1%} |"
        )
    print(f"\n{left_out} skipped that do not fit by this estimate; {time.process_time() - began:.0f} s of CPU time")


if __name__ == "__main__":
    main()
