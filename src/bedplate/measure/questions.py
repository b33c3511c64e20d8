"""Parse the options of `bench`. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeVar

from bedplate.errors import UsageError, make_unreadable_error
from bedplate.facts.scenarios import adjust_scenario, compute_means, get_scenario
from bedplate.values.run import Load
from bedplate.values.scenario import Scenario
from bedplate.values.workload import LatencyTarget

T = TypeVar("T", int, float)
MOST_CELLS = 64
OpenArrivals = Literal["poisson", "constant", "burst"]


def is_url(name: str) -> bool:
    """Whether an endpoint is named, and not an engine."""
    return name.startswith(("http://", "https://"))


def parse_engines(text: str) -> tuple[str, ...] | str:
    """Parses comma-separated engine ids and URLs, or `installed`, or `all`."""
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
    scenario: Scenario | None = None,
    in_sessions: bool = False,
) -> tuple[Load, ...]:
    """One load for each concurrency or each rate, or the load of a trace. With sessions, each of them is one session.

    `in_sessions`: the trace has sessions.
    """
    if concurrency is not None and rate is not None:
        raise UsageError("--concurrency and --rate cannot be combined", hint="run bedplate bench once for each")
    if scenario is not None and trace is not None:
        raise UsageError("--scenario and --trace cannot be combined", hint="run bedplate bench once for each")
    if trace is not None and not in_sessions and (concurrency is not None or rate is not None):
        raise UsageError(
            "--concurrency, --rate and --trace cannot be combined: the trace has no sessions",
            hint="run bedplate bench once for each",
        )
    if scenario is None and shared_prefix_tokens and shared_prefix_tokens >= prompt_tokens:
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
        base = _change_load(base, trace=name_trace(trace))
        if concurrency is None and rate is None:
            return (_change_load(base, arrivals="replay", concurrency=None),)
    if scenario is not None:
        means = compute_means(scenario)
        base = _change_load(
            base, scenario=scenario, prompt_tokens=round(means.prompt_tokens),
            output_tokens=max(1, round(means.output_tokens)), shared_prefix_tokens=scenario.system_tokens,
        )  # fmt: skip
    if (scenario is not None or trace is not None) and rate is None:
        usual = "" if scenario is None else str(scenario.sessions)
        counts = _parse_list(concurrency or usual, int, "--concurrency")
        return tuple(_change_load(base, arrivals="sessions", concurrency=None, sessions=count) for count in counts)
    if rate is not None:
        bursts = burst if arrivals == "burst" else None
        rates = _parse_list(rate, float, "--rate")
        return tuple(
            _change_load(base, arrivals=arrivals, concurrency=None, requests_per_s=one, burst=bursts) for one in rates
        )
    numbers = _parse_list(concurrency or "1,4,8,16", int, "--concurrency")
    return tuple(_change_load(base, concurrency=number) for number in numbers)


def choose_scenario(
    name: str, prompt_tokens: int | None, output_tokens: int | None, shared_prefix_tokens: int | None
) -> tuple[Scenario, tuple[str, ...]]:
    """The scenario with the explicit lengths, and what they replace."""
    known = get_scenario(name)
    changed = adjust_scenario(
        known, prompt_tokens=prompt_tokens, output_tokens=output_tokens, shared_prefix_tokens=shared_prefix_tokens
    )
    usual = compute_means(known)
    replaced = (
        ("--prompt-tokens", prompt_tokens, usual.prompt_tokens),
        ("--output-tokens", output_tokens, usual.output_tokens),
        ("--shared-prefix", shared_prefix_tokens, known.system_tokens),
    )
    notes = tuple(
        f"{option} {given:,} replaces the {value:,.0f} tokens of the scenario {name}"
        for option, given, value in replaced
        if given is not None
    )
    return changed, notes


def name_trace(path: Path) -> str:
    """The file name and the beginning of its hash, since other traces may have the same name."""
    try:
        with path.open("rb") as file:
            return f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()[:12]}"
    except OSError as error:
        raise make_unreadable_error(path, error) from error


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
    raise UsageError(f"{option}: {word!r} is not a positive {kind_text} below 1e9", hint=f"such as {option} 1,4,16")
