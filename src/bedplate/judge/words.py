"""Loads, gains and differences as text."""

from __future__ import annotations

from bedplate.values.run import Load
from bedplate.values.units import format_memory
from bedplate.values.verdict import Difference, Effect, Metric

METRIC_WORDS: dict[Metric, str] = {
    "output_tok_s": "tok/s", "ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "request time", "ttft_p95_ms": "TTFT p95",
    "tpot_p95_ms": "TPOT p95", "peak_memory_bytes": "peak memory", "agreement": "greedy-token agreement",
    "schema_match": "structured output",
}  # fmt: skip


def describe_load(load: Load) -> str:
    """Such as "16 in flight, 512 + 128 tokens"."""
    return f"{describe_load_briefly(load)}, {load.prompt_tokens} + {load.output_tokens} tokens"


def describe_load_briefly(load: Load) -> str:
    if load.arrivals == "closed" and load.concurrency is not None:
        return "1 request at a time" if load.concurrency == 1 else f"{load.concurrency} in flight"
    name = "" if load.scenario is None else f"{load.scenario.name} "
    if load.sessions is not None:
        return f"{load.sessions} {name}session{'' if load.sessions == 1 else 's'}"
    if load.scenario is not None:
        return f"{format_rate(load.requests_per_s, f'{name}session')} ({load.arrivals})"
    return load.arrivals if load.requests_per_s is None else f"{format_rate(load.requests_per_s)} ({load.arrivals})"


def format_rate(per_s: float | None, what: str = "request") -> str:
    """Such as "1 request per second"."""
    return f"{per_s:g} {what}{'' if per_s == 1 else 's'} per second"


def describe_difference(one: Difference) -> str:
    return f"{one.what}: {one.a} and {one.b}" + (f" ({one.note})" if one.note else "")


def format_gain(gain: float) -> str:
    """1.12 is "12 % faster", 0.9 is "10 % slower"."""
    share = (gain - 1) * 100
    digits = 0 if abs(share) >= 9.95 else 1
    if round(abs(share), digits) == 0:
        return "as fast"
    return f"{abs(share):.{digits}f} % {'faster' if share > 0 else 'slower'}"


def format_signed_percent(gain: float) -> str:
    share = round((gain - 1) * 100)
    return f"{share:+d} %".replace("-", "−") if share else "0 %"


def describe_gain(one: Effect) -> str:
    """Such as "12 % faster with 16 in flight (95 % interval +3 % … +21 %)"."""
    interval = f"95 % interval {format_signed_percent(one.gain.low)} … {format_signed_percent(one.gain.high)}"
    return f"{format_gain(one.gain.value)} with {describe_load_briefly(one.load)} ({interval})"


def describe_change(one: Effect) -> str:
    """Such as "TTFT p95 120 ms instead of 100 ms with 4 in flight: 17 % worse (95 % interval −20 % … −13 %)"."""
    words, share = METRIC_WORDS[one.metric], (one.gain.value - 1) * 100
    values = f"{format_metric(one.metric, one.b)} instead of {format_metric(one.metric, one.a)}"
    load = "" if one.metric in ("agreement", "schema_match") else f" with {describe_load_briefly(one.load)}"
    digits = 0 if abs(share) >= 9.95 else 1
    change = f"{abs(share):.{digits}f} % {'better' if share > 0 else 'worse'}" if round(share, 1) else "no difference"
    interval = f"95 % interval {format_signed_percent(one.gain.low)} … {format_signed_percent(one.gain.high)}"
    return f"{words} {values}{load}: {change} ({interval})"


def format_metric(metric: Metric, value: float) -> str:
    if metric == "peak_memory_bytes":
        return format_memory(round(value))
    if metric in ("agreement", "schema_match"):
        return f"{value:.1%}"
    return f"{value:,.{0 if value >= 100 else 1}f}{' ms' if metric.endswith('_ms') else ''}"


def format_count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
