"""bedplate plan: which engine fits, why, and its launch command."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from bedplate.cli.options import (
    Concurrency,
    Context,
    EngineId,
    Fields,
    HardwareName,
    IntentFile,
    Json,
    ModelName,
    OutputTokens,
    PromptTokens,
    ScenarioOption,
    Untuned,
    Users,
    parse_engine,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from bedplate.deploy.platform import Platform
    from bedplate.values import Decision, Hardware, Model
    from bedplate.values.intent import Intent, Service

EMIT_TARGETS = {
    "command": ("sh", "bash", "shell", "script"),
    "compose": ("docker", "docker-compose", "podman"),
    "kubernetes": ("k8s", "kube", "kubectl"),
    "dynamo": (),
    "ray": (),
}
"""What `--emit` takes, and words that people try for it."""
EXAMPLES = """Examples:

\b
  bedplate plan
  bedplate plan model.gguf --users 8 --context 16384
  bedplate plan Qwen/Qwen3-8B --hardware "H100 SXM" --scenario agent --users 50
  bedplate plan meta-llama/Meta-Llama-3.1-70B --hardware "8x H100 SXM" --users 200
  bedplate plan -f bedplate.yaml --json
  bedplate plan Qwen/Qwen3-32B --hardware "RTX 4090" --alternatives
  bedplate plan Qwen/Qwen3-32B --hardware "RTX 4090" --why-not vllm
  bedplate plan Qwen/Qwen3-32B --hardware "RTX 4090" --what-if users=50,count=2
  bedplate plan Qwen/Qwen3-32B --users 50 --procure
  bedplate plan model.gguf --emit command > serve.sh
  bedplate plan -f bedplate.yaml --emit kubernetes -o manifests

Exit code 1: the model does not fit, or no engine runs it."""


def plan(
    model: ModelName = None,
    file: IntentFile = None,
    hardware: HardwareName = None,
    scenario: ScenarioOption = None,
    users: Users = None,
    concurrency: Concurrency = None,
    context: Context = None,
    prompt_tokens: PromptTokens = None,
    output_tokens: OutputTokens = None,
    fields: Fields = None,
    engine: EngineId = None,
    why_not: Annotated[
        str | None,
        typer.Option(
            metavar="ENGINE", help="Explain why this engine was not chosen.", show_default=False, parser=parse_engine
        ),
    ] = None,
    alternatives: Annotated[
        bool, typer.Option("--alternatives", help="List the plans that were not chosen, each with the reason.")
    ] = False,
    what_if: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD=VALUE,…",
            help="Show what would change with other values: users=50,count=2.",
            show_default=False,
        ),
    ] = None,
    procure: Annotated[
        bool, typer.Option("--procure", help="List the known hardware that would serve this workload.")
    ] = False,
    emit: Annotated[
        str | None,
        typer.Option(
            metavar="TARGET",
            help="Print deployment files for a target: command (a shell script), compose, kubernetes, dynamo or ray.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="PATH",
            help="With --emit or --json: the file, or the folder of manifests, to write.",
            show_default=False,
        ),
    ] = None,
    untuned: Untuned = False,
    json: Json = False,
) -> None:
    """Choose an engine, explain why, and show how to launch it.

    Also shows rejected engines with reasons, memory, expected speed, and whether the model fits. Runs nothing.
    """
    from bedplate.cli.options import add_scenario, build_intent

    _check_target(emit)
    asked = {
        "--why-not": why_not,
        "--alternatives": alternatives or None,
        "--what-if": what_if,
        "--procure": procure or None,
        "--emit": emit,
    }
    questions = [option for option, value in asked.items() if value is not None]
    _check_combination(questions, engine, hardware, output, json=json)
    options: dict[str, Any] = {
        "users": users, "concurrency": concurrency, "context": context, "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
    }  # fmt: skip
    intent = build_intent(file, fields, model=model, hardware=hardware, **options)
    if scenario is not None:
        intent, _ = add_scenario(intent, scenario, options, fields)
    if intent.services:
        _check_for_services(intent, [*(["--engine"] if engine else []), *questions])
        _show_portfolio(intent, emit, output, json=json)
    elif procure:
        _show_offers(intent, output, json=json)
    elif what_if is not None:
        _show_what_if(intent, what_if, engine, output, json=json, untuned=untuned)
    elif alternatives:
        _show_alternatives(intent, engine, untuned=untuned)
    else:
        _show_decision(intent, engine, why_not, emit, output, json=json, untuned=untuned)


def _check_combination(
    questions: list[str], engine: str | None, hardware: str | None, output: Path | None, *, json: bool
) -> None:
    """Refuses combinations of options of which one would be ignored."""
    from bedplate.errors import UsageError

    if len(questions) > 1:
        raise UsageError(
            f"{' and '.join(questions)} cannot be combined",
            hint="run bedplate plan once for each",
        )
    if json and questions == ["--emit"]:
        raise UsageError(
            "--json and --emit cannot be combined: --emit prints a script or manifests, --json the plan",
            hint="run bedplate plan once for each",
        )
    if json and questions == ["--alternatives"]:
        raise UsageError(
            "--json and --alternatives cannot be combined: the plan in --json has its alternatives",
            hint="bedplate plan --json",
        )
    if questions == ["--procure"]:
        for option, value, why in (
            ("--engine", engine, "the engine is chosen for each machine"),
            ("--hardware", hardware, "all known hardware is considered"),
        ):
            if value is not None:
                raise UsageError(f"{option} and --procure cannot be combined: {why}", hint="leave out one of the two")
    if output is not None and not json and questions != ["--emit"]:
        raise UsageError(
            f"-o {output} needs --emit or --json",
            hint="--emit command -o serve.sh writes a script; --json -o plan.json writes the plan",
        )


def _check_for_services(intent: Intent, asked: list[str]) -> None:
    from bedplate.errors import UsageError

    many = f"the intent has {len(intent.services)} service{'s' if len(intent.services) > 1 else ''}"
    hints = {
        "--engine": "set the engine of each service in the file",
        "--procure": "name one model: bedplate plan MODEL --procure",
    }
    for option in asked:
        if option != "--emit":
            one = "name one model and its machine: bedplate plan MODEL --hardware NAME " + option
            raise UsageError(f"{option} needs a single model, and {many}", hint=hints.get(option, one))


@contextmanager
def _pause_collection() -> Iterator[None]:
    """Thousands of small records and no cycles: the garbage collector would find nothing in them."""
    import gc

    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _decide(
    intent: Intent, engine: str | None, *, untuned: bool = False, with_alternatives: bool = False
) -> tuple[Hardware, Model, Decision]:
    from bedplate.decide import decide
    from bedplate.decide.hints import add_intent_hints
    from bedplate.decide.intent import resolve_hardware
    from bedplate.run.environments import read_registered_engines
    from bedplate.run.models import find_intended_model
    from bedplate.store import compute_fingerprint, read_evidence
    from bedplate.values import replace_fields

    machine = resolve_hardware(intent)
    facts = find_intended_model(intent.model)
    evidence = read_evidence(compute_fingerprint(machine))
    with _pause_collection():
        decision = decide(
            machine, facts, intent.workload, engine, operations=intent.operations, results=evidence.results,
            agreements=evidence.agreements, verdicts=evidence.verdicts,
            tunings=() if untuned else tuple(one for one in evidence.tunings if one.build != "native"),
            registered=read_registered_engines() if intent.hardware is None else None,
            with_alternatives=with_alternatives,
        )  # fmt: skip
    notes = (
        (*machine.notes, *intent.notes, *decision.notes)
        if intent.hardware is not None
        else (*intent.notes, *decision.notes)
    )
    return machine, facts, replace_fields(add_intent_hints(decision, intent, machine), notes=notes)


def _show_decision(
    intent: Intent,
    engine: str | None,
    why_not: str | None,
    emit: str | None,
    output: Path | None,
    *,
    json: bool,
    untuned: bool,
) -> None:
    import sys

    from bedplate.values import to_json

    machine, facts, decision = _decide(intent, engine, untuned=untuned, with_alternatives=json)
    if emit == "command":
        _write_or_print(_emit_command(intent, facts, decision), output)
        sys.exit(0)
    if emit is not None:
        from bedplate.deploy.platform import place_one_service
        from bedplate.show.emitted import render_headline

        platform = place_one_service(intent, machine, facts, intent.workload, decision)
        _emit_files(platform, emit, output, render_headline(decision))
    if why_not is not None:
        from bedplate.show.decision import render_why_not

        shown = render_why_not(decision, why_not)
        if json:
            _write_or_print(to_json(shown[1]), output)
        else:
            _print_page(shown[0])
        sys.exit(0)
    if json:
        _write_or_print(to_json(decision), output)
    else:
        from bedplate.show.decision import render_decision

        named = None if isinstance(intent.model, dict) else (intent.model,) if intent.model is not None else ()
        _print_page(render_decision(machine, facts, intent.workload, decision, engine, named))
    sys.exit(0 if decision.engine is not None else 1)


def _show_alternatives(intent: Intent, engine: str | None, *, untuned: bool) -> None:
    import sys

    from bedplate.show.alternatives import render_alternatives

    _, _, decision = _decide(intent, engine, untuned=untuned, with_alternatives=True)
    _print_page(render_alternatives(decision))
    sys.exit(0 if decision.engine is not None else 1)


def _check_target(emit: str | None) -> None:
    from bedplate.errors import UsageError

    if emit is None or emit in EMIT_TARGETS:
        return
    import difflib

    from bedplate.values.choices import join_with_or

    same = next((target for target, words in EMIT_TARGETS.items() if emit.lower() in words), None)
    near = same or next(iter(difflib.get_close_matches(emit.lower(), EMIT_TARGETS, 1)), None)
    choices = f"choose {join_with_or(EMIT_TARGETS)}"
    raise UsageError(f"unknown target {emit!r}", hint=f"did you mean {near}? {choices}" if near else choices)


def _emit_files(platform: Platform, target: str, folder: Path | None, shown: RenderableType) -> NoReturn:
    """Prints the decision, then writes the files, or prints them if no folder is given."""
    import sys

    from bedplate.cli.terminal import make_console
    from bedplate.deploy.emit import emit_target, join_manifests, list_unused_settings
    from bedplate.show.emitted import render_files, render_unused

    console = make_console(sys.stderr if folder is None else None)
    console.print(shown)
    files = emit_target(platform, target)
    if unused := list_unused_settings(platform, target):
        console.print(render_unused(target, unused))
    if folder is None:
        _write_or_print(join_manifests(files), None)
    else:
        for name, text in files.items():
            _write_into_folder(folder / name, text)
        _print_page(render_files(target, folder, files, platform.deploy))
    sys.exit(0)


def _write_into_folder(path: Path, text: str) -> None:
    from bedplate.errors import ExternalFailure

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        cause, hint = error.strerror or str(error), "choose another folder with -o DIR"
        raise ExternalFailure(f"cannot create {path.parent}", cause=cause, hint=hint) from error
    _write_or_print(text, path)


def _emit_command(intent: Intent, facts: Model, decision: Decision) -> str:
    from bedplate.decide import plan as planned
    from bedplate.deploy.shell import write_script
    from bedplate.run.wheels import find_requirement

    return write_script(planned(decision, facts, intent.workload), decision, find_requirement("bedplate"))


def _show_what_if(
    intent: Intent, changed: str, engine: str | None, output: Path | None, *, json: bool, untuned: bool
) -> None:
    import sys

    from bedplate.decide.intent import override, parse_fields
    from bedplate.decide.questions import WhatIf, list_changes
    from bedplate.show.decision import render_changes
    from bedplate.values import to_json

    _, _, before = _decide(intent, engine, untuned=untuned)
    other = override(intent, **parse_fields([changed]))
    _, _, after = _decide(other, engine, untuned=untuned)
    found = list_changes(before, after)
    if json:
        _write_or_print(to_json(WhatIf(what_if=changed, changes=found, before=before, after=after)), output)
    else:
        _print_page(render_changes(changed, before, after, found))
    sys.exit(0 if after.fits else 1)


def _show_offers(intent: Intent, output: Path | None, *, json: bool) -> None:
    import sys

    from bedplate.cli.terminal import TerminalProgress
    from bedplate.decide.questions import list_purchasable, procure
    from bedplate.run.models import find_intended_model
    from bedplate.show.procure import render_offers
    from bedplate.values import to_json

    facts = find_intended_model(intent.model)
    known = list_purchasable()
    offers = []
    with TerminalProgress().step(f"checking {len(known)} chips", len(known)) as done:
        for number, (_, offer) in enumerate(procure(facts, intent.workload, intent.operations, known), 1):
            done(number)
            if offer is not None:
                offers.append(offer)
    if json:
        _write_or_print(to_json(offers), output)
    else:
        _print_page(render_offers(facts, intent.workload, tuple(offers), len(known)))
    sys.exit(0 if offers else 1)


def _show_portfolio(intent: Intent, emit: str | None, output: Path | None, *, json: bool) -> None:
    import sys

    from bedplate.decide.intent import resolve_hardware
    from bedplate.decide.portfolio import make_portfolio, place_on_one_machine
    from bedplate.deploy.platform import place_services, split_services
    from bedplate.errors import UsageError
    from bedplate.run.models import find_intended_model
    from bedplate.show.portfolio import render_portfolio
    from bedplate.values import replace_fields, to_json

    local, elsewhere = split_services(intent)
    if not local:
        raise UsageError(
            "all services of the intent are endpoints elsewhere, so there is nothing to plan",
            hint="bedplate serve -f FILE",
        )
    intent = replace_fields(intent, services=local)
    if emit == "command":
        raise UsageError(
            "--emit command starts one service, and the intent has several",
            hint="--emit compose, kubernetes, dynamo or ray",
        )
    models = [find_intended_model(service.model) for service in intent.services]
    machine = None if intent.pools else resolve_hardware(intent)
    found = make_portfolio(intent, models) if machine is None else place_on_one_machine(intent, models, machine)
    if emit is not None:
        _check_addresses([one for _, one in elsewhere])
        platform = place_services(intent, found, models, machine, elsewhere)
        _emit_files(platform, emit, output, render_portfolio(found))
    if json:
        _write_or_print(to_json(found), output)
    else:
        _print_page(render_portfolio(found))
    sys.exit(0 if found.fits else 1)


def _check_addresses(services: Sequence[Service]) -> None:
    if services:  # the gateway's package is large
        from bedplate.run.gateway.elsewhere import check_address

        for one in services:
            check_address(one.url or "", one.key_env)


def _print_page(what: RenderableType) -> None:
    from bedplate.cli.terminal import make_console

    make_console().print(what)


def _write_or_print(text: str, path: Path | None) -> None:
    if path is None:
        from bedplate.cli.printing import print_text

        print_text(text, end="" if text.endswith("\n") else "\n")
        return
    from bedplate.errors import ExternalFailure

    try:
        path.write_text(text if text.endswith("\n") else f"{text}\n", encoding="utf-8")
        if text.startswith("#!"):
            path.chmod(path.stat().st_mode | 0o111)
    except OSError as error:
        raise ExternalFailure(f"cannot write {path}", cause=error.strerror or str(error)) from error
