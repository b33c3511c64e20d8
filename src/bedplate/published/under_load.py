"""Predictions for rows of servers under load."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from bedplate.decide.estimate.arrivals import BENCH, USERS, USUAL_BENCHMARK, RequestArrivals
from bedplate.decide.estimate.bands import BandMetric, BandSet, find_bands
from bedplate.decide.estimate.batching import (
    Efficiencies,
    Layout,
    RankWork,
    choose_kv_bits,
    classify_weights,
    count_rank_work,
    get_efficiencies,
    limit_layout,
)
from bedplate.decide.estimate.engines import get_traits
from bedplate.decide.estimate.machine import MachineRates, make_chip_rates
from bedplate.decide.estimate.physics import compute_prefill_floor_s
from bedplate.decide.estimate.serving import (
    NO_LIMIT,
    ServingLoad,
    ServingTimes,
    Way,
    compute_times,
    compute_token_floor_s,
    get_prefill_waits,
)
from bedplate.facts.chips import Chip
from bedplate.published import recipes
from bedplate.published.assumptions import list_averaged
from bedplate.published.rows import PredictionRefusal, PublishedCase, RowPrediction
from bedplate.values.arrival import ArrivalProcess

MOST_SEQUENCES = 2048.0
"""Maximum concurrent sequences of an engine at saturation (trtllm-bench's default)."""
RESIDENT_AT_LEAST = 24
"""Minimum concurrent requests on a replica of a tuned submission; otherwise a replica gets more devices."""
UNSURE_SHARE = 0.02
"""Share of a device's memory: weights that exceed it by less may be smaller than estimated."""
NODE = 8
"""Accelerators of a server, if a table does not report them."""
MOST_TENSOR = 16
"""Maximum tensor ranks; a larger count is that of all workers together."""
# Mean tokens of prompts and answers in MLPerf's datasets, by MLCommons' inference rules v5.1 and reference reports.
MLPERF_TOKENS = (
    ("405b", 9428, 684), ("llama2", 294, 294), ("llama-2", 294, 294), ("70b", 294, 294), ("8b", 778, 73),
    ("deepseek", 800, 3880), ("mixtral", 430, 145), ("gpt-j", 778, 73), ("gptj", 778, 73),
)  # fmt: skip
MLPERF_LONGEST = 128
"""Maximum output tokens in MLPerf's single-stream scenario."""
SHAREGPT_TOKENS = (225, 195)
"""Mean lengths of ShareGPT's conversations as serving benchmarks filter them."""


class Workers(NamedTuple):
    """The prefill and decode workers of a disaggregated deployment."""

    prefill: Layout
    decode: Layout
    streams: int | None
    """Sum of the decode workers' batches; `None` if not reported."""
    prefills: int = 0
    """Number of prefill workers; 0 if not reported."""
    decodes: int = 0
    """Number of decode workers; 0 if not reported."""
    dealt: bool = False
    """Whether decode workers use attention data parallelism."""

    @property
    def has_counts(self) -> bool:
        return self.prefills > 0 and self.decodes > 0


class RowLoad(NamedTuple):
    """A row as a load for the estimator, with the values to compute the row's metric from the result."""

    question: ServingLoad
    machine: MachineRates
    layout: Layout
    context: float
    kv_bits: float
    alternatives: tuple[tuple[float, ServingLoad], ...] = ()
    """The load with every combination of settings that the row does not state, with probabilities."""


def predict(case: PublishedCase) -> RowPrediction | PredictionRefusal:
    """A row's metric with its error band, or why there is none."""
    found = find_load(case)
    if isinstance(found, PredictionRefusal):
        return found
    question, layout = found.question, found.layout
    if question.way != "apart" and question.work.room_bytes < -UNSURE_SHARE * (case.machine.memory_bytes or 0):
        return PredictionRefusal(f"the weights do not fit in {layout.ranks * layout.pipeline} × {case.chip.name}")
    e = get_efficiencies(case.engine, found.machine.family, classify_weights(case.shape))
    value, variance = average_values(case, found, e)
    return RowPrediction(value, *find_case_bands(case, question.way, variance).eighty.get_bounds(value))


def average_values(case: PublishedCase, found: RowLoad, e: Efficiencies) -> tuple[float, float]:
    """The row's metric, averaged over the settings that it does not state, and the variance of its logarithm."""
    values: list[tuple[float, float]] = []
    for weight, load in found.alternatives:
        got = compute_times(load, e)
        floor = compute_token_floor_s(found.machine, case.shape, found.layout, got.batch, found.context, found.kv_bits)
        values.append((weight, math.log(_compute_metric(case, found._replace(question=load), got, floor))))
    mean = sum(weight * value for weight, value in values)
    return math.exp(mean), sum(weight * (value - mean) ** 2 for weight, value in values)


WAYS = {
    "wave": "one burst", "saturated": "as many requests as fit", "offline": "as many requests as fit, tuned",
    "server": "as many requests as a latency target allows, tuned",
    "interactive": "as many requests as a short latency target allows, tuned",
}  # fmt: skip


def list_assumptions(case: PublishedCase, found: RowLoad) -> dict[str, str]:
    """The settings of a load that its row does not state, in words; of averaged ones, all with their weights."""
    question = found.question
    assumed = {
        "arrivals": WAYS.get(question.way) or find_arrivals(case).describe(),
        "mean prompt and output": f"{question.work.prompt:,.0f} and {question.work.output:,.0f} tokens",
        "KV cache": f"{found.kv_bits:g} bits",
        "prompt tokens per pass": _list_averaged(found, lambda load: f"{load.waits.pass_tokens:,.0f}"),
        "drafted tokens": _list_averaged(found, lambda load: f"{load.guessing:g}"),
    }
    if question.way == "apart":
        assumed["workers"] = _list_averaged(found, _describe_workers)
    return assumed


def _describe_workers(load: ServingLoad) -> str:
    if not (load.prefills and load.decodes):
        return "as operators add them with load"
    return f"{load.prefills:g} prefill, {load.decodes:g} decode"


def _list_averaged(found: RowLoad, describe: Callable[[ServingLoad], str]) -> str:
    return list_averaged((weight, describe(load)) for weight, load in found.alternatives)


def find_case_bands(case: PublishedCase, way: Way, variance: float) -> BandSet:
    """The bands of the case's metric; `variance` is that of its logarithm over the settings that it does not state."""
    apart, timed = way == "apart", case.metric.endswith("_ms")
    metric: BandMetric = "TPOT disaggregated" if apart else "TPOT"
    if case.metric == "ttft_ms":
        metric = "TTFT disaggregated" if apart else "TTFT"
    elif not timed and way not in ("steady", "apart"):
        metric = "throughput"
    found = find_bands(metric, case.engine, case.machine, case.shape)
    # In a closed loop, tokens per second are streams over time per token; few tables have both.
    return (found if timed or metric == "throughput" else found.invert()).widen(variance)


def _compute_metric(case: PublishedCase, found: RowLoad, got: ServingTimes, floor_s: float) -> float:
    question, layout = found.question, found.layout
    work: RankWork = question.work
    first_s, token_s = float(got.first_s), max(float(got.token_s), floor_s)
    # With fewer requests than replicas, some replicas are idle.
    busy = min(layout.replicas, case.concurrency) if case.concurrency is not None else layout.replicas
    tok_s = float(got.tok_s) * busy * min(1.0, float(got.token_s) / token_s)
    if case.metric == "tpot_ms":
        return token_s * 1e3
    if case.metric == "ttft_ms":
        ranks = layout.ranks * layout.pipeline
        return max(first_s, compute_prefill_floor_s(case.shape, found.machine, question.prompts.prompt, ranks)) * 1e3
    if case.metric == "latency_ms":
        return (first_s + (work.output - 1) * token_s) * 1e3
    if case.metric == "samples_s":
        # MLPerf's tables report tokens of language models under this name: no machine reaches as many samples.
        return tok_s if "mlperf" in case.scenario.lower() else tok_s / work.output
    if case.metric == "output_tok_s_per_gpu":
        return tok_s / (case.devices or layout.devices)
    return tok_s


def find_load(case: PublishedCase) -> RowLoad | PredictionRefusal:
    """The row as a load; missing values are those that are usual for its kind of benchmark."""
    lengths = _find_lengths(case)
    if lengths is None:
        return PredictionRefusal("the row has neither prompt and output lengths nor a known dataset")
    if not case.machine.bandwidth_bytes_s or case.machine.kind != "gpu":
        return PredictionRefusal("serving under load is estimated for accelerators only")
    if "mlperf" in case.scenario.lower():
        return _make_submission_load(case, *lengths)
    divided = parse_arrangement(case)
    if isinstance(divided, Workers):
        return _make_worker_load(case, divided, *lengths)
    divided = limit_layout(divided, case.shape)
    if case.saturated:
        return _make_load(case, "saturated", divided, lengths, NO_LIMIT, MOST_SEQUENCES)
    if case.concurrency is None:
        return PredictionRefusal("the row has no number of requests in flight")
    lowered = case.scenario.lower()
    way: Way = "wave" if "static" in lowered or "serving bench" in lowered else "steady"
    return _make_load(case, way, divided, lengths, max(1.0, case.concurrency / divided.replicas), NO_LIMIT)


def _make_load(
    case: PublishedCase, way: Way, layout: Layout, lengths: tuple[int, int], streams: float, slots: float
) -> RowLoad:
    machine = _get_machine(case.chip, layout.ranks * layout.pipeline)
    bits = case.settings.kv_bits or choose_kv_bits(case.shape)
    (prompt, output), depth = lengths, case.depth or 0
    work = count_rank_work(machine, case.shape, layout, prompt + depth, output, bits, depth, shared=False)
    complete = float(get_traits(case.engine).reserves_answer)
    alternatives = []
    for weight, guessing in recipes.list_drafted_tokens(case, layout):
        waits = recipes.get_waits(case, layout, guessing)
        load = ServingLoad(
            way, work, work, work, streams, slots, complete, layout.tensor, waits, guessing=guessing,
            arrival=find_arrivals(case).terms, eager=float(case.settings.graphs is False),
        )  # fmt: skip
        alternatives.append((weight, load))
    question = max(alternatives, key=lambda one: one[0])[1]
    return RowLoad(question, machine, layout, depth + prompt + output / 2, bits, tuple(alternatives))


def find_arrivals(case: PublishedCase) -> RequestArrivals:
    """How the benchmark sent its requests; nearly all of them run closed loops."""
    scenario = case.scenario.lower()
    if "poisson" in scenario or "request rate" in scenario:
        return USERS._replace(process=ArrivalProcess.POISSON)
    if "bedplate bench" in scenario:
        return BENCH
    return USUAL_BENCHMARK if case.prompt_tokens is not None else USUAL_BENCHMARK._replace(spread=1.0)


def _make_submission_load(case: PublishedCase, prompt: int, output: int) -> RowLoad | PredictionRefusal:
    """An MLPerf submission: all accelerators of all nodes, in the smallest replicas that hold enough requests."""
    nodes = int(case.notes["nodes"]) if case.notes.get("nodes", "").isdigit() else 1
    devices = (case.devices or 1) * max(1, nodes)
    kind = case.scenario.lower().rsplit(None, 1)[-1]
    if kind == "singlestream":
        # MLPerf reports the 90th percentile, which the longest outputs determine.
        layout = Layout(tensor=case.devices or 1)
        return _make_load(case, "steady", layout, (prompt, max(output, MLPERF_LONGEST)), 1.0, NO_LIMIT)
    ways: dict[str, Way] = {"offline": "offline", "server": "server", "interactive": "interactive"}
    if kind not in ways:
        return PredictionRefusal(f"unknown MLPerf scenario {kind!r}")
    tensor = 1
    while True:
        layout = Layout(tensor=tensor, expert=1, replicas=max(1, devices // tensor))
        found = _make_load(case, ways[kind], layout, (prompt, output), NO_LIMIT, MOST_SEQUENCES)
        enough = found.question.work.room_bytes > RESIDENT_AT_LEAST * found.question.work.held_bytes
        if enough or tensor * 2 > (case.devices or 1):
            return found
        tensor *= 2


def _make_worker_load(case: PublishedCase, workers: Workers, prompt: int, output: int) -> RowLoad | PredictionRefusal:
    streams = case.concurrency or workers.streams
    if streams is None:
        return PredictionRefusal("the row has no number of requests in flight")
    setups = _find_setups(case, workers)
    if not setups and (why := _explain_indivisible(case, workers)):
        return PredictionRefusal(why)
    possible: list[tuple[float, recipes.WorkerSetup | None]] = [*setups] or [(1.0, None)]
    loads = [
        (weight, _make_setup_load(case, workers, setup, float(streams), prompt, output)) for weight, setup in possible
    ]
    most = max(loads, key=lambda one: one[0])[1]
    if not setups and _overfills(most.question):
        return PredictionRefusal(f"the row has no number of decode workers, and one cannot hold {streams} streams")
    return most._replace(alternatives=tuple((weight, load.question) for weight, load in loads))


def _make_setup_load(
    case: PublishedCase,
    workers: Workers,
    setup: recipes.WorkerSetup | None,
    streams: float,
    prompt: int,
    output: int,
) -> RowLoad:
    shape, bits = case.shape, case.settings.kv_bits or choose_kv_bits(case.shape)
    decode = _grow_to_hold(case, setup.decode if setup else workers.decode)
    prefill = setup.prefill if setup else workers.prefill
    if prefill.attention_data == 1:
        prefill = _grow_to_hold(case, prefill)
    spread = limit_layout(Layout(1, decode.ranks, decode.ranks, decode.pipeline), shape)
    machine = _get_machine(case.chip, decode.ranks)
    question = ServingLoad(
        way="apart",
        work=count_rank_work(machine, shape, limit_layout(decode, shape), prompt, output, bits),
        spread=count_rank_work(machine, shape, spread, prompt, output, bits),
        prompts=count_rank_work(
            _get_machine(case.chip, prefill.ranks), shape, limit_layout(prefill, shape), prompt, output, bits
        ),
        streams=streams,
        slots=NO_LIMIT,
        complete=0.0,
        ranks=float(decode.ranks),
        waits=get_prefill_waits(case.engine),
        arrival=find_arrivals(case).terms,
    )
    if setup is None:
        return RowLoad(question, machine, decode, prompt + output / 2, bits)
    question = question._replace(
        slots=setup.slots,
        prefills=setup.prefills,
        decodes=setup.decodes,
        dealt=setup.dealt,
        guessing=setup.guessing,
        waits=get_prefill_waits(case.engine, setup.pass_tokens),
    )
    return RowLoad(question, machine, decode, prompt + output / 2, bits)


def _find_setups(case: PublishedCase, workers: Workers) -> list[tuple[float, recipes.WorkerSetup]]:
    """The number of workers from the row, or from the recipes that may have produced it."""
    if not workers.has_counts:
        return recipes.find_setups(case, workers.prefill, workers.decode)
    drafted = float(case.settings.drafted_tokens or 0)
    stated = recipes.WorkerSetup(
        workers.prefill, workers.decode, workers.prefills, workers.decodes, float(workers.dealt), drafted, NO_LIMIT
    )
    return [(1.0, stated)]


def _explain_indivisible(case: PublishedCase, workers: Workers) -> str | None:
    """Why the row's ranks cannot be those of one worker, so that the workers' layout is unknown."""
    fewest = min(side.ranks * side.pipeline for side in (workers.prefill, workers.decode))
    if case.shape.total_bytes > fewest * (case.machine.memory_bytes or math.inf):
        return (
            "the row has no number of prefill and decode workers, and the weights do not fit in "
            f"{fewest} × {case.chip.name}"
        )
    both = workers.prefill.ranks
    if both == workers.decode.ranks and both & (both - 1):
        return f"{both} ranks are those of all workers together, but the row has no layout of a worker"
    return None


def _overfills(question: ServingLoad) -> bool:
    """Whether one decode worker has too little memory for the caches, with any parallelism of attention."""
    divided, dealt = question.work, question.spread
    room = max(divided.room_bytes / divided.held_bytes, question.ranks * dealt.room_bytes / dealt.held_bytes)
    return bool(question.streams > room)


def _grow_to_hold(case: PublishedCase, layout: Layout) -> Layout:
    """The layout with at least as many ranks as the weights need."""
    memory = (case.machine.memory_bytes or 0) * 0.85
    ranks = layout.ranks
    while memory and ranks < 64 and case.shape.total_bytes / ranks / layout.pipeline > memory:
        ranks *= 2
    return Layout(ranks, 1, ranks if case.shape.experts else 1, layout.pipeline)


@lru_cache(maxsize=4096)
def _load_machine(name: str, devices: int) -> MachineRates:
    from bedplate.facts.chips import load_chips

    return make_chip_rates(load_chips()[name], devices)


def _get_machine(chip: Chip, devices: int) -> MachineRates:
    return _load_machine(chip.name, devices)


def _find_lengths(case: PublishedCase) -> tuple[int, int] | None:
    if case.prompt_tokens is not None and case.output_tokens:
        share = recipes.MEAN_LENGTH if recipes.is_recipe_point(case) else 1.0
        return max(1, round(case.prompt_tokens * share)), max(1, round(case.output_tokens * share))
    if "mlperf" in case.scenario.lower():
        name = case.texts["model"].lower()
        return next(((prompt, output) for word, prompt, output in MLPERF_TOKENS if word in name), None)
    if re.search(r"sharegpt|dataset|prompts", case.scenario, re.IGNORECASE):
        return SHAREGPT_TOKENS
    return None


def parse_arrangement(case: PublishedCase) -> Layout | Workers:
    """The layout of a row's accelerators, parsed from the column `parallelism`."""
    text = case.parallelism.lower()
    if text.startswith("disagg") or (case.scenario.lower() == "disagg" and "decode" in text):
        return _parse_disaggregated(text)
    sizes = {
        name: int(count) for name, count in re.findall(r"(attn_dp|moe_tp|moe_ep|tp|pp|dp|ep)\s*[-=]?(\d{1,4})", text)
    }
    stages = max(1, sizes.get("pp") or 1)
    if found := re.search(r"\b(tep|dep)\s*-?(\d{1,4})\b", text):
        ranks = int(found[2])
        return Layout(ranks, 1, ranks, stages) if found[1] == "tep" else Layout(1, ranks, ranks, stages)
    tensor = max(1, sizes.get("tp") or case.layout.tensor)
    if not text and case.devices is None and case.layout.tensor == 1:
        tensor = NODE if case.chip.kind == "datacenter" else 1
    groups = sizes.get("attn_dp") or 0
    cut, expert = max(1, sizes.get("moe_tp") or 1), max(1, sizes.get("moe_ep") or sizes.get("ep") or 1)
    if "attn_dp" in text and not groups:
        tensor, groups = _infer_groups(case, tensor, cut * expert)
    groups = max(1, groups)
    if cut == expert > 1 and tensor * groups == cut * expert:
        # Some tools write both kinds of expert division for the same ranks.
        tensor, groups = (1, expert) if groups > 1 else (expert, 1)
    elif tensor == groups > 1 and expert == tensor * groups:
        tensor, expert = 1, groups
    elif tensor > MOST_TENSOR or tensor & (tensor - 1):
        whole = Layout(tensor, 1, tensor)
        return Workers(whole, whole, None)
    devices = case.devices or 0
    replicas = max(1, sizes.get("dp") or 1)
    if devices % (tensor * groups * stages) == 0 and not case.scenario.lower().startswith("agg"):
        replicas = max(replicas, devices // (tensor * groups * stages))
    return Layout(tensor, groups, expert, stages, replicas)


def _infer_groups(case: PublishedCase, tensor: int, expert_ranks: int) -> tuple[int, int]:
    """Attention groups that a table omits: computed from the expert ranks, or from the batch of one rank."""
    groups = max(1, expert_ranks // tensor)
    batch = case.notes.get("batch_size", "")
    if groups == 1 and tensor > 1 and batch.isdigit() and case.concurrency and case.concurrency >= 2 * int(batch) > 0:
        groups = max(1, min(tensor, round(case.concurrency / int(batch))))
        return max(1, tensor // groups), groups
    return tensor, groups


def _parse_disaggregated(text: str) -> Workers:
    sides, counts = [], []
    streams, dealt = 0, False
    for count, inside in re.findall(r"(\d*)\s*x?\s*\(([^)]*)\)", text)[:2]:
        sizes = {name: int(number) for name, number in re.findall(r"(tp|pp|dp|ep|bs)(\d{1,5})", inside)}
        ranks = max(1, sizes.get("tp", 1)) * max(1, sizes.get("dp", 1))
        sides.append(Layout(ranks, 1, max(1, sizes.get("ep", 1)), max(1, sizes.get("pp", 1))))
        counts.append(int(count or 0))
        dealt = sizes.get("dp", 1) > 1
        streams = (int(count) if count else 1) * sizes.get("bs", 0) * max(1, sizes.get("dp", 1))
    sides = sides or [Layout(NODE, 1, 1)]
    prefills, decodes = counts if len(counts) == 2 else (0, 0)
    return Workers(sides[0], sides[-1], streams or None, prefills, decodes, dealt)
