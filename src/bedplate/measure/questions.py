"""Parse the options of `bench`. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

from bedplate.errors import UsageError
from bedplate.values.run import Load
from bedplate.values.workload import LatencyTarget

T = TypeVar("T", int, float)
MOST_CELLS = 64
OpenArrivals = Literal["poisson", "constant", "burst"]


def parse_engines(text: str) -> tuple[str, ...] | str:
    """Parses comma-separated engine ids, or `installed`, or `all`."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if names in (["installed"], ["all"]):
        return names[0]
    if not names or "all" in names or "installed" in names:
        raise UsageError(
            f"--engines {text!r} is not a list of engines", hint="pass comma-separated ids, or installed, or all"
        )
    return tuple(dict.fromkeys(names))


def parse_target(text: str) -> LatencyTarget:
    """Parses a target such as ttft_ms=500,tpot_ms=50."""
    given: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals or name not in ("ttft_ms", "tpot_ms") or name in given:
            raise UsageError(
                f"--slo {text!r}: {part.strip()!r} is not a latency target", hint="for example ttft_ms=500,tpot_ms=50"
            )
        given[name] = _parse_number(value, float, f"--slo {name}")
    return LatencyTarget(**given)


def parse_loads(
    *,
    concurrency: str | None = None,
    rate: str | None = None,
    arrivals: OpenArrivals = "poisson",
    burst: int = 8,
    trace: Path | None = None,
    prompt_tokens: int = 512,
    output_tokens: int = 128,
    shared_prefix_tokens: int = 0,
    seed: int = 0,
) -> tuple[Load, ...]:
    """One load for each concurrency or each rate, or the load of a trace."""
    if sum(one is not None for one in (concurrency, rate, trace)) > 1:
        raise UsageError(
            "--concurrency, --rate and --trace cannot be combined", hint="run bedplate bench once for each"
        )
    if shared_prefix_tokens and shared_prefix_tokens >= prompt_tokens:
        raise UsageError(
            f"--shared-prefix {shared_prefix_tokens} is not smaller than the prompt length of {prompt_tokens} tokens"
        )
    base = Load(
        concurrency=1,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        shared_prefix_tokens=shared_prefix_tokens,
        seed=seed,
    )
    if trace is not None:
        return (_change_load(base, arrivals="replay", concurrency=None, trace=name_trace(trace)),)
    if rate is not None:
        bursts = burst if arrivals == "burst" else None
        rates = _parse_list(rate, float, "--rate")
        return tuple(
            _change_load(base, arrivals=arrivals, concurrency=None, requests_per_s=one, burst=bursts) for one in rates
        )
    numbers = _parse_list(concurrency or "1,4,8,16", int, "--concurrency")
    return tuple(_change_load(base, concurrency=number) for number in numbers)


def name_trace(path: Path) -> str:
    """The file name and the beginning of its hash, since other traces may have the same name."""
    try:
        with path.open("rb") as file:
            return f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()[:12]}"
    except OSError as error:
        raise UsageError(f"cannot read {path}", cause=error.strerror or str(error)) from error


def _change_load(load: Load, **changes: object) -> Load:
    from bedplate.values import replace_fields

    return replace_fields(load, **changes)


def _parse_list(text: str, kind: Callable[[str], T], option: str) -> list[T]:
    found = list(dict.fromkeys(_parse_number(word.strip(), kind, option) for word in text.split(",") if word.strip()))
    if not found:
        raise UsageError(f"{option} {text!r} contains no value", hint=f"for example {option} 1,4,8")
    if len(found) > MOST_CELLS:
        raise UsageError(f"{option} has {len(found)} values; at most {MOST_CELLS} are allowed")
    return found


def _parse_number(word: str, kind: Callable[[str], T], option: str) -> T:
    try:
        value = kind(word)
        if 0 < value < 1e9:
            return value
    except ValueError:
        pass
    kind_text = "integer" if kind is int else "number"
    raise UsageError(f"{option}: {word!r} is not a positive {kind_text} below 1e9")
