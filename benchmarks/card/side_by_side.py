"""Two or more engines, or one with two sets of settings, on one GPU at once: measured in interleaved rounds.

    python benchmarks/card/side_by_side.py MODEL --sides vllm,vllm:defaults --loads 1,64 --out DIR
    python benchmarks/card/side_by_side.py MODEL --sides vllm,sglang --loads 64,64:2048/128/1792 --out DIR

A side is one of these:

    ENGINE                      with the plan's settings
    ENGINE:defaults             the same weights, and of the settings only what the engine cannot do without
    ENGINE:CHANGE[+CHANGE]      the plan with other settings: slots=N, or an option of the engine
                                (--enforce-eager, --num-gpu-blocks-override=640)

All sides stay loaded, each with the same part of the GPU's memory (`--share`), so that drift affects all of them
equally: in each round every side answers the same prompts, in alternating order.
A load is CONCURRENCY[:PROMPT/OUTPUT[/SHARED_PREFIX]], or SCENARIO=SESSIONS[:PROMPT/OUTPUT] for conversations
(agent=12); those of `--first-loads` are measured on the first side alone.

Writes one run file for each side after every load (SIDE.json) and what `compare` says of each pair (verdicts.json).
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bedplate.engines import Engine
from bedplate.engines.knobs import merge_options, with_engine_defaults
from bedplate.errors import BedplateError
from bedplate.facts.hardware import probe
from bedplate.facts.scenarios import fit_context
from bedplate.judge.compare import compare
from bedplate.measure.bench import CONTEXT_SPARE, LEAST_CONTEXT, REQUEST_LIMIT_S, describe_environment
from bedplate.measure.load import ClientErrorFigures, LoadTarget, PreparedEndpoint, measure_apart, prepare
from bedplate.measure.load import run as run_loop
from bedplate.measure.moments import format_now, make_run_id
from bedplate.measure.questions import choose_scenario, parse_loads
from bedplate.measure.watch import EngineMeters, Watcher, make_meters
from bedplate.progress import SilentProgress
from bedplate.run.prepare import hash_model_content
from bedplate.run.ready import fetch_facts, plan_engine, prepare_model
from bedplate.run.starting import RunningEngine, run_engine
from bedplate.values import Hardware, Launch, Model, Plan, Workload, replace_fields, to_json
from bedplate.values.decision import TunedSettings
from bedplate.values.run import Cell, Load, Quality, Repeat, Run, RunEnvironment, Subject
from bedplate.values.service import ModelOrder

DEFAULTS = "defaults"
SHARE_OPTIONS = {"vllm": "--gpu-memory-utilization", "sglang": "--mem-fraction-static"}
NOT_CHECKED = Quality(note="random weights: answers are not compared")
LEAST_GAIN = 1.03


class Progress(SilentProgress):
    def note(self, text: str) -> None:
        say(text)


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def sharing(engine: Engine, share: float | None) -> Engine:
    """The engine with a part of the GPU's memory, whatever the plan says; on a CPU as it is."""
    if share is None or engine.id not in SHARE_OPTIONS:
        return engine
    option = SHARE_OPTIONS[engine.id]

    class Sharing(type(engine)):  # type: ignore[misc]
        def launch(self, plan: Plan, port: int) -> Launch:
            launch: Launch = super().launch(plan, port)
            if plan.settings.device == "cpu":
                return launch
            return replace_fields(launch, argv=merge_options(launch.argv, (option, f"{share:g}")))

    one: Engine = Sharing.__new__(Sharing)
    one.__dict__.update(engine.__dict__)
    return one


@dataclass
class Side:
    name: str
    subject: Subject
    target: LoadTarget
    meters: EngineMeters
    started: RunningEngine
    prepared: PreparedEndpoint | None = None
    repeats: dict[Load, list[Repeat]] = field(default_factory=dict)


def read_load(text: str, max_context: int | None = None) -> Load:
    """`max_context`: the model's, which limits the length of conversations."""
    concurrency, _, sizes = text.partition(":")
    name, equals, sessions = concurrency.partition("=")
    if equals:
        lengths: list[int | None] = [int(one) for one in sizes.split("/")] if sizes else [None, None]
        scenario, _ = choose_scenario(name, lengths[0], lengths[1], None)
        (load,) = parse_loads(concurrency=sessions, scenario=fit_context(scenario, max_context))
        return load
    prompt, output, shared = (*map(int, sizes.split("/")), 0, 0)[:3] if sizes else (512, 128, 0)
    return Load(
        concurrency=int(concurrency), prompt_tokens=prompt, output_tokens=output or 128, shared_prefix_tokens=shared
    )


def find_longest(load: Load) -> int:
    return load.scenario.context_tokens if load.scenario is not None else load.prompt_tokens + load.output_tokens


def work_of(loads: Sequence[Load], facts: Model) -> Workload:
    """One plan for all loads, as `bench` makes it."""
    longest = max(find_longest(load) for load in loads)
    context = max(LEAST_CONTEXT, longest + CONTEXT_SPARE)
    return Workload(
        concurrency=max(load.concurrency or load.sessions or 1 for load in loads),
        prompt_tokens=loads[0].prompt_tokens,
        output_tokens=loads[0].output_tokens,
        shared_prefix_tokens=loads[0].shared_prefix_tokens,
        context_tokens=min(context, facts.max_context or context),
    )


def with_changes(plan: Plan, changes: Sequence[str]) -> Plan:
    fields: dict[str, Any] = {}
    options: list[str] = []
    for change in changes:
        setting, equals, value = change.partition("=")
        if setting.startswith("-"):
            options += [setting, *([value] if equals else [])]
        elif setting == "slots":
            fields[setting] = int(value)
        else:
            raise SystemExit(f"{change}: a change is slots=N or an option of the engine")
    turned = replace_fields(plan.settings.turned or TunedSettings(), options=tuple(options))
    return replace_fields(plan, settings=replace_fields(plan.settings, **fields, turned=turned))


def start(name: str, hardware: Hardware, facts: Model, work: Workload, share: float | None, stack: ExitStack) -> Side:
    engine_id, _, how = name.partition(":")
    wanted = ModelOrder(model=facts.name, workload=work, engine=engine_id, untuned=True)
    chosen = plan_engine(wanted, facts, hardware, Progress())
    if how == DEFAULTS:
        chosen = replace(chosen, plan=with_engine_defaults(chosen.plan))
    elif how:
        chosen = replace(chosen, plan=with_changes(chosen.plan, how.split("+")))
    ready = prepare_model(chosen, Progress(), to_measure=True)
    say(f"starting {name}")
    started = stack.enter_context(
        run_engine(replace(ready.build_start(), launched=sharing(chosen.engine, share)), Progress())
    )
    say(f"{name} is ready after {started.start_s:.1f} s: {' '.join(started.argv)}")
    subject = Subject(
        engine=engine_id,
        engine_version=ready.plan.engine_version,
        model=facts.name,
        quantization=chosen.decision.quantization,
        weights_id=hash_model_content(facts)[:12] if facts.files and "dummy" not in how else None,
        device=ready.plan.settings.device,
        parallelism=ready.plan.parallelism,
        settings=ready.plan.settings,
        build=ready.build,
        argv=started.argv,
        start_s=started.start_s,
    )
    target = LoadTarget.from_url(started.url, key=started.key, model=ready.plan.model.served_name)
    return Side(name, subject, target, make_meters(started), started)


def measure_once(
    side: Side, load: Load, number: int, seconds: float, most_s: float, own: dict[int, ClientErrorFigures]
) -> None:
    """One round of one side. `own` has the client's own error by the number of streams, measured once each."""
    streams = load.concurrency or load.sessions or 1
    side.prepared = run_loop(prepare(side.target, load, known=side.prepared))
    with Watcher(side.meters) as watcher:
        repeat = measure_apart(
            side.target, load, prepared=side.prepared, seconds=seconds, warmup_s=1.0, most_seconds=most_s,
            timeout_s=REQUEST_LIMIT_S, round=number, check=own.get(streams, True), watch=watcher.mark,
        )  # fmt: skip
    client = repeat.client
    if client.error_p50_ms is not None and client.error_p99_ms is not None:
        found = ClientErrorFigures(p50_ms=client.error_p50_ms, p99_ms=client.error_p99_ms, streams=streams, samples=0)
        own.setdefault(streams, found)
    use, engine = watcher.summarize_readings()
    side.repeats.setdefault(load, []).append(
        replace_fields(repeat, at=repeat.at or format_now(), use=use, engine=engine)
    )
    speed = (repeat.delivered_tokens or 0.0) / repeat.seconds
    say(f"{words(load)}, round {number % 1000 + 1}, {side.name}: {speed:.0f} tok/s")
    if side.started.has_died:
        raise SystemExit(f"{side.name} died under this load")


def words(load: Load) -> str:
    shared = f"/{load.shared_prefix_tokens}" if load.shared_prefix_tokens else ""
    if load.scenario is not None:
        return f"{load.scenario.name}={load.sessions}"
    return f"{load.concurrency}:{load.prompt_tokens}/{load.output_tokens}{shared}"


def file_name(side: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", side.lower())


def cells_of(side: Side, run: str, machine: str) -> tuple[Cell, ...]:
    return tuple(
        Cell(
            id=f"{run}-{file_name(side.name)}-{re.sub(r'[^a-z0-9]', '-', words(load))}",
            run=run, at=repeats[0].at or "", machine=machine, subject=side.subject, load=load, repeats=tuple(repeats),
            exact_output=all(bool(one.exact_output) for one in repeats), quality=NOT_CHECKED,
            notes="side by side with others on one GPU", halt="most",
        )
        for load, repeats in side.repeats.items()
    )  # fmt: skip


def write(
    sides: Sequence[Side], out: Path, environment: RunEnvironment, run: str, facts: Model, finished: bool
) -> None:
    for side in sides:
        cells = cells_of(side, run, environment.machine)
        told = replace_fields(facts, files=(), chat_template=None)
        one = Run(id=run, at=format_now(), environment=environment, cells=cells, finished=finished, models=(told,))
        (out / f"{file_name(side.name)}.json").write_text(to_json(one))
    verdicts: list[dict[str, Any]] = []
    for a, b in itertools.combinations(sides, 2):
        for load in (one for one in a.repeats if one in b.repeats):
            try:
                found = compare(
                    [one for one in cells_of(a, run, environment.machine) if one.load == load],
                    [one for one in cells_of(b, run, environment.machine) if one.load == load],
                    allow=("quantization", "weights"), least_gain=LEAST_GAIN,
                )  # fmt: skip
            except BedplateError as error:
                verdicts.append(
                    {"a": a.name, "b": b.name, "load": words(load), "not comparable": f"{error.message}: {error.cause}"}
                )
                continue
            gains: dict[str, Any] = {}
            for effect in found.effects:
                gains[effect.metric] = [effect.gain.low, effect.gain.value, effect.gain.high]
            verdicts.append(
                {"a": a.name, "b": b.name, "load": words(load), "answer": found.answer, "text": found.text, **gains}
            )
    (out / "verdicts.json").write_text(json.dumps(verdicts, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model folder; `builtin` is the built-in model")
    parser.add_argument("--sides", default="vllm,vllm:defaults")
    parser.add_argument("--loads", default="1,64")
    parser.add_argument("--first-loads", default="")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--share", type=float, help="of the GPU's memory, for each side (default: 0.88 / sides)")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    sides: list[Side]
    names, hardware = given.sides.split(","), probe()
    facts = fetch_facts(None if given.model == "builtin" else given.model, hardware, Progress())
    loads, alone = (
        [read_load(one, facts.max_context) for one in text.split(",") if one]
        for text in (given.loads, given.first_loads)
    )
    work, environment, run = work_of([*loads, *alone], facts), describe_environment(hardware, sys.argv), make_run_id()
    own: dict[int, ClientErrorFigures] = {}
    share = given.share or round(0.88 / len(names), 2)
    try:
        with ExitStack() as stack:
            # One after the other: an engine counts the memory that is free when it starts.
            sides = []
            for name in names:
                try:
                    sides.append(start(name, hardware, facts, work, share, stack))
                except BedplateError as error:
                    # The others are still measured; its log says more.
                    say(f"{name} did not start: {error.message}: {error.cause or ''}")
            if not sides:
                raise SystemExit("none of the sides started")
            for turn in range(given.rounds):
                for place, load in enumerate([*loads, *alone]):
                    measured = sides if place < len(loads) else sides[:1]
                    for side in measured if (turn + place) % 2 == 0 else reversed(measured):
                        measure_once(side, load, place * 1000 + turn, given.seconds, 6 * given.seconds, own)
                    last = turn == given.rounds - 1 and place == len(loads) + len(alone) - 1
                    write(sides, given.out, environment, run, facts, finished=last)
    except BedplateError as error:
        raise SystemExit(f"{error.message}: {error.cause or ''} ({error.hint or ''})") from error
    if len(sides) < len(names):
        raise SystemExit(f"{len(names) - len(sides)} of {len(names)} sides did not start")
    print((given.out / "verdicts.json").read_text())


if __name__ == "__main__":
    main()
