"""Estimates under load: time to first token, time per token and throughput of many requests at once."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from bedplate.decide.estimate.batching import (
    Efficiencies,
    Layout,
    Work,
    apart,
    decode_parts,
    decode_s,
    efficiencies,
    least,
    one_wave,
    prefill_s,
    resident,
    saturated_tok_s,
    steady,
    streamed_tok_s,
    usual_kv_bits,
    weight_type,
    work_of,
)
from bedplate.decide.estimate.calibration import Band, Expectation, Limit, limit_of_parts, table
from bedplate.decide.estimate.machine import Machine, machine_from_chip
from bedplate.decide.estimate.physics import Shape, decode_floor_s, prefill_floor_s
from bedplate.decide.estimate.rows import Case, Prediction, Refused
from bedplate.values import Parallelism

Way = Literal["steady", "wave", "apart", "saturated", "offline", "server", "interactive", "single"]

MOST_SEQUENCES = 2048
"""Where engines stop adding sequences under endless load (trtllm-bench's default)."""
SETS_ASIDE = frozenset({"tensorrt-llm", "lmdeploy"})
"""Engines that admit a request only with room for its whole answer."""
RESIDENT_AT_LEAST = 24
"""Requests that a tuned submission holds on a replica at the least; otherwise it takes more devices for one."""
# Mean tokens of the prompts and answers of MLPerf's datasets (MLCommons inference rules v5.1 and reference reports:
# OpenOrca, LongBench and others for 405B, CNN/DailyMail, five reasoning sets, and OpenOrca/GSM8K/MBXP).
MLPERF_TOKENS = (
    ("405b", 9428, 684), ("llama2", 294, 294), ("llama-2", 294, 294), ("70b", 294, 294), ("8b", 778, 73),
    ("deepseek", 800, 3880), ("mixtral", 430, 145), ("gpt-j", 778, 73),
)  # fmt: skip
SHAREGPT_TOKENS = (225, 195)
"""Mean lengths of ShareGPT conversations as serving benchmarks filter them."""


class Question(NamedTuple):
    """A row's load as the model of it takes it."""

    way: Way
    machine: Machine
    shape: Shape
    layout: Layout
    work: Work
    spread: Work
    """The same with sequences dealt out to ranks instead of divided; of prefill workers in `apart`."""
    streams: float
    """Requests in flight on one replica."""
    slots: float
    """The most that an engine runs at once."""
    complete: float
    kv_bits: float


class Answer(NamedTuple):
    first_s: Any
    token_s: Any
    tok_s: Any
    """Of one replica."""


class Loaded(NamedTuple):
    """A service under load, each figure with its band."""

    ttft_ms: Prediction
    tpot_ms: Prediction
    output_tok_s: Prediction
    limit: Limit


def answer(question: Any, e: Any, *, steadily: bool = True) -> Answer:
    """Times of a question, or of columns of questions of one way."""
    way, w = question.way, question.work
    streams = question.streams
    if way == "apart":
        first, token = apart(w, question.spread, e, streams, question.layout.tensor, prefill_s(question.prompts, e))
        return Answer(first, token, streamed_tok_s(w, first, token, streams))
    room = least(resident(w, e, question.complete), question.slots * w.pipeline)
    if way == "steady" or way == "single":
        first, token, _ = steady(w, e, streams, room)
        return Answer(first, token, streamed_tok_s(w, first, token, streams))
    if way == "wave":
        first, token, prompts = one_wave(w, e, streams, room, e.wave_slower)
        return Answer(first, token, streams * w.output / (prompts + w.output * token))
    tok_s = saturated_tok_s(w, e, room)
    if way != "saturated":
        tok_s = tok_s * e.tuned
    if way == "server":
        tok_s = tok_s * e.tuned_server
    if way == "interactive":
        tok_s = tok_s * e.tuned_interactive
    first, token, _ = steady(w, e, room * w.groups, room)
    return Answer(first, token, tok_s)
