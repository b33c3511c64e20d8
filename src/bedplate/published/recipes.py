"""Settings of InferenceX's public recipes that its result tables omit: workers, scheduling, drafted tokens, lengths.

They are from its repository (github.com/SemiAnalysisAI/InferenceX), and those of workers also from NVIDIA's
(github.com/NVIDIA/srt-slurm); none of their results are used here.
"""

from __future__ import annotations

import importlib.resources
import math
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import msgspec

from bedplate.decide.estimate.batching import PASS_TOKENS, Layout, Waits
from bedplate.decide.estimate.serving import get_default_waits
from bedplate.published.rows import PublishedCase

MODELS = ("deepseek-r1", "deepseek-v4", "gpt-oss", "kimi-k2.5", "glm-5", "minimax-m2.5", "minimax-m3", "qwen3.5")
NO_LIMIT = 1e6
MEAN_LENGTH = 0.9
"""Mean of the lengths, which are uniform between 0.8 and 1 times the stated length."""
LENGTHS = ((1024, 1024), (1024, 8192), (8192, 1024))
"""Prompt and output tokens of the recipes."""
SPECULATES = 0.25
"""Probability that a row without a statement uses speculative decoding, if recipes with and without it match."""
NEAR = 1.5
"""Largest factor between the streams of a row and of a recipe that is used for it."""


class WorkerSetup(NamedTuple):
    """The mean of the recipes that may have produced a row."""

    prefill: Layout
    decode: Layout
    prefills: float
    decodes: float
    dealt: float
    """Share of these recipes with attention data parallelism in decode workers."""
    guessing: float
    """Drafted tokens per sequence."""
    slots: float
    """Maximum concurrent sequences of all decode workers."""
    pass_tokens: float = PASS_TOKENS
    """Prompt tokens in one pass of a prefill worker's rank."""


class WorkerRecipe(NamedTuple):
    """A recipe of a disaggregated deployment, as `benchmarks/score/recipes.py` writes it; ranks are per worker."""

    streams: int
    prefills: int
    prefill_ranks: int
    prefill_expert: int
    prefill_dealt: int
    decodes: int
    decode_ranks: int
    decode_expert: int
    decode_dealt: int
    guessing: int
    """Drafted tokens per sequence."""
    batch: int
    """Batch size of a decode worker, or of each rank with attention data parallelism; 0 if not specified."""
    pass_tokens: int
    """Prompt tokens in one pass of a prefill worker's rank; 0 if not specified."""
    image: str
    """The tag of the container image."""
    since: int
    """The first day of its validity, such as 260131."""
    until: int
    """The last day of its validity."""

    @property
    def slots(self) -> float:
        each = self.batch * (self.decode_ranks if self.decode_dealt else 1)
        return self.decodes * each or NO_LIMIT

    @property
    def ranks(self) -> int:
        return self.prefills * self.prefill_ranks + self.decodes * self.decode_ranks


class ServerRecipe(NamedTuple):
    """A recipe of an aggregated deployment."""

    least_streams: int
    most_streams: int
    ranks: int
    expert: int
    dealt: int
    guessing: int
    """Whether it uses speculative decoding."""
    image: str
    since: int
    until: int


Of = TypeVar("Of", WorkerRecipe, ServerRecipe)


def is_recipe_point(case: PublishedCase) -> bool:
    """Whether the row has the lengths of the public recipes, which are then the best guess for what it does not state.

    This depends on what was measured only, not on the table that it is from.
    """
    return case.concurrency is not None and (case.prompt_tokens, case.output_tokens) in LENGTHS


def get_measured_day(case: PublishedCase) -> str:
    """The day of the measurement, such as `2026-01-31`; empty if not reported."""
    return case.settings.day


def find_setups(case: PublishedCase, prefill: Layout, decode: Layout) -> list[tuple[float, WorkerSetup]]:
    """The setups that may have produced the row, with their probabilities: with and without speculative decoding.

    They are the means of the recipes with the row's ranks and streams and, if the row has them, its image and day.
    """
    if not is_recipe_point(case) or case.concurrency is None:
        return []
    listed = _list_workers(_make_key(case))
    same = [r for r in listed if (r.prefill_ranks, r.decode_ranks) == (prefill.ranks, decode.ranks)]
    if not same and prefill.ranks == decode.ranks:
        # Some tables give the ranks of all workers together for both prefill and decode.
        same = [r for r in listed if r.ranks == prefill.ranks]
    # Some recipes count the streams of one decode worker.
    found = (
        [r for r in same if r.streams == case.concurrency]
        or [r for r in same if r.streams * r.decodes == case.concurrency]
        or _find_nearest(same, case.concurrency)
    )
    found = [r for r in found if r.prefill_expert == prefill.expert] or found
    found = _filter_by_image(case, found)
    found = _filter_by_day(case, found) or found
    settings = case.settings
    if settings.prefill_workers and settings.decode_workers:
        stated = (settings.prefill_workers, settings.decode_workers)
        found = [r for r in found if (r.prefills, r.decodes) == stated] or found
    without, drafting = [r for r in found if not r.guessing], [r for r in found if r.guessing]
    if settings.speculates is not None:
        kept = (drafting if settings.speculates else without) or found
        return [(1.0, _average(kept))] if kept else []
    if not without or not drafting:
        return [(1.0, _average(found))] if found else []
    return [(1.0 - SPECULATES, _average(without)), (SPECULATES, _average(drafting))]


def _average(found: list[WorkerRecipe]) -> WorkerSetup:
    first = found[0]
    dealt = sum(r.prefill_dealt for r in found) * 2 > len(found)
    return WorkerSetup(
        prefill=Layout(*((1, first.prefill_ranks) if dealt else (first.prefill_ranks, 1)), first.prefill_expert),
        decode=Layout(first.decode_ranks, 1, first.decode_expert),
        prefills=_compute_mean([r.prefills for r in found]),
        decodes=_compute_mean([r.decodes for r in found]),
        dealt=sum(r.decode_dealt for r in found) / len(found),
        guessing=sum(r.guessing for r in found) / len(found),
        slots=_compute_mean([r.slots for r in found]),
        pass_tokens=_compute_mean([r.pass_tokens or PASS_TOKENS for r in found]),
    )


def list_drafted_tokens(case: PublishedCase, layout: Layout) -> list[tuple[float, float]]:
    """Drafted tokens per sequence of an aggregated deployment, with probabilities: as stated, else as in recipes."""
    settings = case.settings
    if settings.speculates is False:
        return [(1.0, 0.0)]
    if settings.speculates:
        return [(1.0, float(settings.drafted_tokens or _get_draft_length(case, layout)))]
    if not is_recipe_point(case) or case.concurrency is None:
        return [(1.0, 0.0)]
    wanted = (layout.ranks, layout.expert, int(layout.attention_data > 1))
    found = [
        r
        for r in _list_servers(_make_key(case))
        if (r.ranks, r.expert, r.dealt) == wanted and r.least_streams <= case.concurrency <= r.most_streams
    ]
    # The list does not include the oldest recipes; a row without a valid recipe is older than speculative decoding.
    found = _filter_by_day(case, _filter_by_image(case, found))
    share = sum(bool(r.guessing) for r in found) / len(found) if found else 0.0
    if found and not get_measured_day(case):
        share *= SPECULATES
    drafted = _get_draft_length(case, layout)
    return [(weight, tokens) for weight, tokens in ((1.0 - share, 0.0), (share, drafted)) if weight > 0]


def _get_draft_length(case: PublishedCase, layout: Layout) -> float:
    """The values of num_nextn_predict_layers and speculative-num-steps in the scripts."""
    if case.engine == "tensorrt-llm":
        return 1.0 if layout.attention_data > 1 else 3.0
    return 2.0 if "deepseek" in case.texts["model"].lower() else 3.0


def _filter_by_day(case: PublishedCase, recipes: list[Of]) -> list[Of]:
    """The recipes that were valid on the day of the measurement, of these the latest: a changed recipe is measured."""
    day = get_measured_day(case)[2:].replace("-", "")
    if not day.isdigit():
        return recipes
    found = [r for r in recipes if r.since <= int(day) <= r.until]
    last = max((r.since for r in found), default=0)
    return [r for r in found if r.since == last]


def _filter_by_image(case: PublishedCase, recipes: list[Of]) -> list[Of]:
    image, version = case.settings.image, case.version
    found = [r for r in recipes if image and r.image == image]
    return found or [r for r in recipes if version and r.image.removeprefix("v").startswith(version)] or recipes


def _compute_mean(counts: Sequence[float]) -> float:
    return math.exp(sum(math.log(count) for count in counts) / len(counts))


def _find_nearest(recipes: list[WorkerRecipe], streams: int) -> list[WorkerRecipe]:
    def compute_distance(recipe: WorkerRecipe) -> float:
        return abs(math.log(recipe.streams / streams))

    least = min(map(compute_distance, recipes), default=math.inf)
    return [r for r in recipes if compute_distance(r) <= least + 1e-9] if least <= math.log(NEAR) else []


def _make_key(case: PublishedCase) -> str:
    """The key of the row's recipes; empty if there are none."""
    name = case.texts["model"].lower().replace("_", "-")
    model = next((known for known in MODELS if known in name), None)
    chip = re.search(r"\b(GB?\d{3}|[HB]\d{3})\b", case.chip.name)
    if model is None or chip is None:
        return ""
    bits = "fp4" if case.shape.bits < 6 else "fp8" if case.shape.bits < 12 else "bf16"
    return f"{model} {bits} {chip[1].lower()} {case.engine} {case.prompt_tokens} {case.output_tokens}"


@lru_cache(maxsize=1)
def _load_table() -> dict[str, Any]:
    shipped = importlib.resources.files("bedplate.published") / "data" / "recipes.json"
    found: dict[str, Any] = msgspec.json.decode(shipped.read_bytes())
    return found


@lru_cache(maxsize=256)
def _list_workers(name: str) -> list[WorkerRecipe]:
    return [WorkerRecipe(*numbers) for numbers in _load_table()["workers"].get(name, [])]


@lru_cache(maxsize=256)
def _list_servers(name: str) -> list[ServerRecipe]:
    return [ServerRecipe(*numbers) for numbers in _load_table()["servers"].get(name, [])]


WIDER_SINCE = "2026-01-21"
"""Since this day, the scripts for DeepSeek-R1 with TensorRT-LLM use more tokens per pass."""
GATHERED_SINCE = "2026-01-29"
"""Since this day, the scripts for DeepSeek-R1 in FP8 on B200 set batch_wait_timeout_iters."""
NARROWER_SINCE = "2026-04-03"
"""Since this day, the scripts for MiniMax-M2.5 on B200 with vLLM use two prompts per pass, regardless of length."""
NODE = 8


def get_waits(case: PublishedCase, layout: Layout, guessing: float) -> Waits:
    """The scheduler settings: passes before new requests are admitted, and prompt tokens per pass."""
    own = get_default_waits(case.engine, case.machine.family)
    if case.settings.pass_tokens:
        own = own._replace(pass_tokens=float(case.settings.pass_tokens))
    if not is_recipe_point(case):
        return own
    waits = _get_recipe_waits(case, layout, guessing, own)
    return waits._replace(pass_tokens=own.pass_tokens) if case.settings.pass_tokens else waits


def _get_recipe_waits(case: PublishedCase, layout: Layout, guessing: float, own: Waits) -> Waits:
    tokens = own.pass_tokens
    # Scripts as they are now, if the day is unknown.
    streams, name, day = case.concurrency or 1, case.texts["model"].lower(), get_measured_day(case) or "9999"
    blackwell = case.machine.family == "blackwell-dc"
    even = case.prompt_tokens == case.output_tokens == 1024
    if case.engine == "sglang":
        # chunked-prefill-size of the scripts.
        if blackwell or "deepseek" in name:
            tokens = 16384.0 if "deepseek" in name and (case.shape.bits < 6 or guessing) else 32768.0
        elif "qwen" in name:
            tokens = 16384.0
        return own._replace(polled=_get_polling_interval(case, layout) if blackwell else 0.0, pass_tokens=tokens)
    if case.engine == "tensorrt-llm":
        # max_num_tokens; batch_wait_timeout_iters; timeout_iters wherever attention_dp_config is set.
        gathered = 20.0 if even and "llama" in name and layout.ranks < 8 else 0.0
        if "llama" in name:
            tokens = 16384.0
        elif "gpt-oss" in name:
            tokens = 20000.0
        elif "deepseek" in name:
            tokens = float(streams + (case.prompt_tokens or 0) + 64)
            if guessing:
                tokens += (guessing + 1) * streams / layout.attention_data - streams
            elif day >= WIDER_SINCE:
                tokens = max(8192.0, tokens)
                if even and streams >= 64 and blackwell and case.shape.bits > 6 and day >= GATHERED_SINCE:
                    gathered = 40.0
        balanced = 60.0 if layout.attention_data > 1 else 0.0
        return own._replace(gathered=gathered, balanced=balanced, pass_tokens=tokens)
    if "minimax" in name and blackwell and day >= NARROWER_SINCE:
        return own._replace(pass_tokens=2.0 * (case.prompt_tokens or PASS_TOKENS))
    return own


def _get_polling_interval(case: PublishedCase, layout: Layout) -> float:
    """The scheduler-recv-interval of the scripts for SGLang on Blackwell; not set with attention data parallelism."""
    name, eight_bits = case.texts["model"].lower(), case.shape.bits > 6
    if layout.attention_data > 1 or ("glm" in name and eight_bits):
        return 0.0
    if "glm" in name or ("deepseek" in name and eight_bits and layout.ranks < NODE):
        return 10.0
    return 30.0 if (case.concurrency or 1) >= 16 else 10.0
