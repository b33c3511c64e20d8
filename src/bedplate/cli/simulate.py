"""bedplate simulate: a simulated fleet under a trace or synthetic traffic."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bedplate.cli.options import (
    EngineId,
    Fields,
    HardwareName,
    IntentFile,
    Json,
    ModelName,
    OutputTokens,
    PromptTokens,
    ScenarioOption,
)

if TYPE_CHECKING:
    from bedplate.decide.simulate import Deployment, RequestStream
    from bedplate.values.intent import Intent
    from bedplate.values.scenario import Scenario
    from bedplate.values.simulation import LayoutName
    from bedplate.values.workload import LatencyTarget, Workload

EXAMPLES = """Examples:

\b
  bedplate simulate -f bedplate.yaml --trace conversation_trace.jsonl --replicas 1..64
  bedplate simulate -f bedplate.yaml --requests 20000 --rate 40 --replicas 8 --router prefix
  bedplate simulate Qwen/Qwen3-32B --hardware "H100 SXM" --requests 5000 --rate 20 --slo ttft_ms=500,tpot_ms=50
  bedplate simulate Qwen/Qwen3-32B --hardware "H100 SXM" --scenario agent --rate 2 --replicas 1..64 --slo ttft_ms=2000

Exit code 1: no layout in the range meets the targets, or no engine runs the model there."""
REQUESTS = 10_000
MOST_AT_ONCE = 256
"""Maximum number of concurrent requests that one replica is planned for."""
MOST_REPLICAS = 65_536


class RouterChoice(StrEnum):
    random = "random"
    least_loaded = "least-loaded"
    prefix = "prefix"


class LayoutChoice(StrEnum):
    aggregated = "aggregated"
    disaggregated = "disaggregated"


def simulate(
    model: ModelName = None,
    file: IntentFile = None,
    hardware: HardwareName = None,
    engine: EngineId = None,
    scenario: ScenarioOption = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A trace or a request log in a format that `bedplate workload` reads.",
            show_default=False,
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of synthetic requests, or of requests taken from the trace. Default: 10,000.",
            show_default=False,
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            min=1e-6, help="Requests per second. Default: that of the trace, or of the intent.", show_default=False
        ),
    ] = None,
    replicas: Annotated[
        str,
        typer.Option(
            metavar="N|LOW..HIGH", help="Number of engines; of a range, the fewest that meet the targets are found."
        ),
    ] = "1..512",
    router: Annotated[
        RouterChoice, typer.Option(help="How requests are routed to replicas.")
    ] = RouterChoice.least_loaded,
    layout: Annotated[
        LayoutChoice | None,
        typer.Option(
            help="Whether separate workers compute prompts. Default: with a range the cheaper layout, else aggregated.",
            show_default=False,
        ),
    ] = None,
    prefills: Annotated[
        int | None,
        typer.Option(min=1, help="Number of replicas that only compute prompts.", show_default=False),
    ] = None,
    slo: Annotated[
        str | None,
        typer.Option(
            metavar="ttft_ms=MS,tpot_ms=MS", help="Latency targets. Default: those of the intent.", show_default=False
        ),
    ] = None,
    prompt_tokens: PromptTokens = None,
    output_tokens: OutputTokens = None,
    spread: Annotated[
        float,
        typer.Option(
            min=0, max=5, help="Standard deviation of synthetic lengths divided by their mean; 0: all are equal."
        ),
    ] = 0.0,
    prefixes: Annotated[int, typer.Option(min=1, help="Number of different shared prefixes of synthetic prompts.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of all random numbers.")] = 0,
    fields: Fields = None,
    json: Json = False,
) -> None:
    """Simulate a fleet, and find the cheapest that meets the targets.

    Simulates routing, batching and prefix caches. A replica is one engine as `bedplate plan` chooses it. Runs nothing.
    """
    import sys
    from dataclasses import replace

    from bedplate.cli.options import add_scenario, build_intent
    from bedplate.cli.terminal import TerminalProgress, make_console
    from bedplate.decide.simulate import FleetSearch, find_cheapest, make_session_stream, simulate_one_layout
    from bedplate.errors import UsageError
    from bedplate.show.simulate import render_simulation, show_progress
    from bedplate.values import to_json

    options = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens, "requests_per_s": rate}
    intent = build_intent(
        file, fields, model=model, hardware=hardware, prompt_tokens=prompt_tokens, output_tokens=output_tokens
    )  # fmt: skip
    if intent.services:
        raise UsageError("simulate needs a single model, and the intent has services")
    drawn: Scenario | None = None
    if scenario is not None:
        if trace is not None or spread or prefixes > 1:
            raise UsageError("--scenario cannot be combined with --trace, --spread or --prefixes")
        intent, drawn = add_scenario(intent, scenario, options, fields)
    low, high = _parse_range(replicas)
    target = _choose_target(slo, intent)
    if drawn is not None:
        stream = make_session_stream(drawn, intent.workload, requests or REQUESTS, rate, seed=seed)
        stream = replace(stream, notes=(*stream.notes, *intent.notes))
    else:
        stream = _make_stream(intent, trace, requests, rate, seed, spread, prefixes)
    if layout is LayoutChoice.aggregated and prefills is not None:
        raise UsageError("--prefills needs --layout disaggregated")
    one_fleet = low == high or prefills is not None
    deployments, workload = _plan_replicas(intent, stream, engine, every_layout=not one_fleet)
    with show_progress(TerminalProgress()) as progress:
        question = FleetSearch(
            deployments[0], stream, target, router.value, seed, progress, others=deployments[1:], workload=workload
        )
        if one_fleet:
            wanted: LayoutName = layout.value if layout is not None else "disaggregated" if prefills else "aggregated"
            _check_split(wanted, high, prefills)
            found = simulate_one_layout(question, high, wanted, prefills)
        else:
            if target is None:
                raise UsageError(
                    "a range of replicas needs latency targets",
                    hint="--slo ttft_ms=500,tpot_ms=50, `latency` in the intent's workload, or one count: --replicas 8",
                )
            layouts: tuple[LayoutName, ...] = (layout.value,) if layout is not None else ("aggregated", "disaggregated")
            found = find_cheapest(question, low, high, layouts)
    if json:
        print(to_json(found))  # noqa: T201
    else:
        make_console().print(render_simulation(found))
    sys.exit(0 if found.answer is not None and found.answer.meets is not False else 1)


def _parse_range(text: str) -> tuple[int, int]:
    """`8` and `1..512`."""
    from bedplate.errors import UsageError

    low, dots, high = text.strip().partition("..")
    try:
        found = (int(low), int(high if dots else low))
    except ValueError:
        raise UsageError(f"--replicas: {text!r} is not a number or a range", hint="for example 8 or 1..512") from None
    if not 1 <= found[0] <= found[1] <= MOST_REPLICAS:
        raise UsageError(
            f"--replicas: {text!r} is out of range", hint=f"1 to {MOST_REPLICAS:,}, the lower number first"
        )
    return found


def _check_split(layout: str, replicas: int, prefills: int | None) -> None:
    from bedplate.errors import UsageError

    if layout == "disaggregated" and (replicas < 2 or (prefills or 1) >= replicas):
        raise UsageError(
            f"{replicas} replicas cannot be divided into {prefills or 1} for prefill and the rest for decode",
            hint="prefill and decode need at least one replica each",
        )


def _choose_target(slo: str | None, intent: Intent) -> LatencyTarget | None:
    from bedplate.errors import UsageError
    from bedplate.values.workload import LatencyTarget

    if slo is None:
        return intent.workload.latency
    found: dict[str, float] = {}
    for part in slo.split(","):
        name, _, value = part.strip().partition("=")
        try:
            found[name.strip()] = float(value)
        except ValueError:
            raise UsageError(f"--slo: {part!r} is not a target", hint="for example ttft_ms=500,tpot_ms=50") from None
    if unknown := set(found) - {"ttft_ms", "tpot_ms"}:
        raise UsageError(f"--slo: {sorted(unknown)[0]!r} is not one of ttft_ms and tpot_ms")
    if not all(0 < value < 1e9 for value in found.values()):
        raise UsageError("--slo: a target must be more than 0", hint="for example ttft_ms=500,tpot_ms=50")
    return LatencyTarget(**found)


def _make_stream(
    intent: Intent,
    trace: Path | None,
    requests: int | None,
    rate: float | None,
    seed: int,
    spread: float,
    prefixes: int,
) -> RequestStream:
    from dataclasses import replace

    from bedplate.decide.simulate import from_shapes, make_synthetic
    from bedplate.facts.traces import BadRows, detect_format, open_trace, parse_trace

    if trace is not None:
        name = "standard input" if str(trace) == "-" else trace.name
        with open_trace(trace) as stream:
            bad = BadRows(name)
            found = from_shapes(
                parse_trace(stream, detect_format(stream, name), bad), name, rate=rate, most=requests, seed=seed
            )  # fmt: skip
        bad.check()
        if not bad.count:
            return found
        return replace(found, notes=(*found.notes, f"{bad.count:,} rows could not be read"))
    if rate is None and not intent.workload.states_load:
        from bedplate.errors import UsageError

        raise UsageError(
            "the request rate is not specified",
            hint="--rate R, --trace FILE, or requests_per_s, users or concurrency in the intent's workload",
        )
    return make_synthetic(intent.workload, requests or REQUESTS, rate, seed=seed, spread=spread, prefixes=prefixes)


def _plan_replicas(
    intent: Intent, stream: RequestStream, engine: str | None, *, every_layout: bool
) -> tuple[tuple[Deployment, ...], Workload]:
    """The replica that `plan` chooses on this machine, or one of every layout and machine size, and the workload."""
    from bedplate.decide import decide
    from bedplate.decide.intent import resolve_hardware
    from bedplate.decide.simulate import MeanLengths, list_deployments, make_deployment
    from bedplate.run.models import find_intended_model
    from bedplate.store import compute_fingerprint, read_evidence
    from bedplate.values import replace_fields

    machine, facts = resolve_hardware(intent), find_intended_model(intent.model)
    work = _make_stream_workload(intent.workload, stream, facts.max_context)
    evidence = read_evidence(compute_fingerprint(machine))
    measured = evidence.results
    lengths = MeanLengths(stream.mean_prompt, stream.mean_output)
    in_flight = work.compute_in_flight(work.assumed_request_s)
    limited = replace_fields(work, concurrency=min(in_flight, MOST_AT_ONCE), requests_per_s=None)
    operations = intent.operations
    if every_layout:
        found = list_deployments(machine, facts, limited, lengths, engine, operations=operations, results=measured)
        return found, work
    for each in (work, limited):
        decision = decide(
            machine, facts, each, engine, operations=operations, results=measured, agreements=evidence.agreements,
            verdicts=evidence.verdicts,
        )  # fmt: skip
        if decision.in_flight <= max(MOST_AT_ONCE * decision.parallelism.data, decision.max_concurrency):
            break
    return (make_deployment(machine, facts, decision, each, lengths, operations=operations, results=measured),), work


def _make_stream_workload(work: Workload, stream: RequestStream, max_context: int | None) -> Workload:
    """The workload with the lengths and the rate of the simulated requests."""
    from bedplate.values import ArrivalProcess, replace_fields

    rate = stream.expected_rate or stream.requests_per_s
    if stream.clients is None and rate is not None and rate != work.requests_per_s:
        work = replace_fields(work, requests_per_s=rate, concurrency=None)
    traced = stream.process is ArrivalProcess.TRACE
    prompt, output = max(1, round(stream.mean_prompt)), max(1, round(stream.mean_output))
    longest = stream.longest if traced else max(stream.longest, work.request_tokens)
    if traced or longest > work.request_tokens:
        work = replace_fields(work, context_tokens=min(longest, max_context or longest))
    return replace_fields(
        work,
        prompt_tokens=prompt,
        output_tokens=output,
        shared_prefix_tokens=min(work.shared_prefix_tokens, prompt),
    )
