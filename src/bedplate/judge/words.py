"""Loads, gains and differences as text."""

from __future__ import annotations

from bedplate.values.run import Load
from bedplate.values.verdict import Difference, Effect


def describe_load(load: Load) -> str:
    """Such as "16 in flight, 512 + 128 tokens"."""
    return f"{describe_load_briefly(load)}, {load.prompt_tokens} + {load.output_tokens} tokens"


def describe_load_briefly(load: Load) -> str:
    if load.arrivals == "closed" and load.concurrency is not None:
        return "1 request at a time" if load.concurrency == 1 else f"{load.concurrency} in flight"
    rate = "" if load.requests_per_s is None else f" {load.requests_per_s:g} requests per second"
    return f"{load.arrivals}{rate}"


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


def format_count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
