"""bedplate models: the known models that fit a machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from bedplate.cli.options import Concurrency, Context, Fields, HardwareName, IntentFile, Json, Users

if TYPE_CHECKING:
    from bedplate.decide.catalogue import Catalogue, CatalogueEntry
    from bedplate.values import Hardware
    from bedplate.values.intent import Intent

EXAMPLES = """Examples:

\b
  bedplate models
  bedplate models --context 32768 --min-tok-s 15
  bedplate models --hardware "2x RTX 3090" --search coder
  bedplate models --hardware "8x H100 SXM" --users 100
  bedplate models --task embed
  bedplate models --all --json

Exit code 1: nothing fits."""
SHOWN = 20
"""Rows for a person; --limit shows more, and JSON has all."""


def models(
    file: IntentFile = None,
    hardware: HardwareName = None,
    users: Users = None,
    concurrency: Concurrency = None,
    context: Context = None,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="TASK",
            help="Task of the models: generate, embed or classify. Default: generate.",
            show_default=False,
        ),
    ] = None,
    least: Annotated[
        float | None,
        typer.Option("--min-tok-s", min=0.0, help="Minimum tokens per second of one stream.", show_default=False),
    ] = None,
    search: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Only models whose name contains these words.", show_default=False),
    ] = None,
    fields: Fields = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Also list models that do not fit, with the reason.")
    ] = False,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help=f"Number of models to list. Default: {SHOWN}; with --json all.", show_default=False),
    ] = None,
    json: Json = False,
) -> None:
    """List the known models that fit, with engine, speed and memory.

    The engine is chosen as by `bedplate plan`. The most capable model that runs comfortably comes first.
    """
    import sys

    from bedplate.cli.options import build_intent
    from bedplate.decide.intent import resolve_hardware
    from bedplate.errors import UsageError

    intent = build_intent(
        file, fields, hardware=hardware, users=users, concurrency=concurrency, context=context, task=task
    )
    if intent.pools:
        raise UsageError(
            f"models covers one machine, and the intent has {len(intent.pools)} pools",
            hint='name one machine: bedplate models --hardware "8x H100 SXM"',
        )
    machine = resolve_hardware(intent)
    found = _find_models(intent, machine, search, least, everything)
    if json:
        _print_json(found, limit)
    else:
        given = {"-f": file, "--hardware": hardware, "--users": users, "--concurrency": concurrency}
        plan = _suggest_plan_command(found, intent, {**given, "--context": context}, fields or [])
        _print_page(found, intent, machine, limit or SHOWN, least, plan)
    sys.exit(0 if found.fitting else 1)


def _find_models(
    intent: Intent, machine: Hardware, search: str | None, least: float | None, everything: bool
) -> Catalogue:
    from bedplate.cli.terminal import TerminalProgress
    from bedplate.decide.catalogue import (
        Catalogue,
        build_catalogue,
        describe_calibrations,
        find_copies,
        list_distinct_models,
        rank_entries,
        search_models,
    )
    from bedplate.facts.library import list_local_models
    from bedplate.store import compute_fingerprint, read_evidence

    wanted = search_models(list_distinct_models(), search)
    results = read_evidence(compute_fingerprint(machine)).results
    asked = build_catalogue(
        machine,
        intent.workload,
        intent.operations,
        models=wanted,
        results=results,
        here=find_copies(list_local_models()) if intent.hardware is None else {},
        least_tok_s=least,
    )
    entries: list[CatalogueEntry] = []
    with TerminalProgress().step(f"checking {len(wanted)} models", len(wanted)) as done:
        for number, (_, entry) in enumerate(asked, 1):
            done(number)
            if entry is not None:
                entries.append(entry)
    kept = rank_entries(entry for entry in entries if everything or entry.fits)
    fitting = sum(entry.fits for entry in entries)
    notes = describe_calibrations(machine, results, kept)
    return Catalogue(known=len(entries), fitting=fitting, models=kept, notes=notes)


def _suggest_plan_command(found: Catalogue, intent: Intent, options: dict[str, object], fields: list[str]) -> str:
    """The command that plans the first model for the same machine and workload."""
    from bedplate.decide.catalogue import with_everyday_context
    from bedplate.values.quoting import join_shell

    if options["--context"] is None and intent.workload.context_tokens is None:
        options["--context"] = with_everyday_context(intent.workload).context_tokens
    first = found.models[0] if found.models else None
    if first is not None and first.max_context is not None and isinstance(options["--context"], int):
        options["--context"] = min(options["--context"], first.max_context)
    words = [part for option, value in options.items() if value is not None for part in (option, str(value))]
    words += [part for field in fields for part in ("--set", field)]
    return join_shell(["bedplate", "plan", first.name if first is not None else "MODEL", *words])


def _print_json(found: Catalogue, limit: int | None) -> None:
    from bedplate.values import replace_fields, to_json

    print(to_json(replace_fields(found, models=found.models[:limit])))  # noqa: T201


def _print_page(
    found: Catalogue, intent: Intent, machine: Hardware, limit: int, least: float | None, plan: str
) -> None:
    from bedplate.cli.terminal import make_console
    from bedplate.decide.catalogue import with_everyday_context
    from bedplate.show.models import render_models

    work = with_everyday_context(intent.workload)
    make_console().print(render_models(machine, work, found, limit=limit, least_tok_s=least, plan=plan))
