"""bedplate models: the known models that fit a machine."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from bedplate.cli.options import Concurrency, Context, Fields, HardwareName, IntentFile, Json, Users

if TYPE_CHECKING:
    from bedplate.decide.catalogue import Catalogue, CatalogueEntry
    from bedplate.values import Hardware
    from bedplate.values.intent import Intent
    from bedplate.values.model import Task

EXAMPLES = """Examples:

\b
  bedplate models
  bedplate models --context 32768 --min-tok-s 15
  bedplate models --hardware "2x RTX 3090" --search coder
  bedplate models --hardware "8x H100 SXM" --users 100
  bedplate models --task embed
  bedplate models --all --json
  bedplate models refresh

Exit code 1: nothing fits."""
SHOWN = 20
"""Rows for a person; --limit shows more, and JSON has all."""


class TaskChoice(StrEnum):
    generate = "generate"
    embed = "embed"
    classify = "classify"


app = typer.Typer(
    help="""List the known models that fit, with engine, speed and memory.

    The engine is chosen as by `bedplate plan`. The most capable model that runs comfortably comes first.""",
    invoke_without_command=True,
    rich_markup_mode=None,
    epilog=EXAMPLES,
)


@app.callback()
def models(
    context_: typer.Context,
    file: IntentFile = None,
    hardware: HardwareName = None,
    users: Users = None,
    concurrency: Concurrency = None,
    context: Context = None,
    task: Annotated[
        TaskChoice | None,
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
    plain: Annotated[
        bool, typer.Option("--plain", help="Print the list, as in a pipe. Default on a terminal: choose with keys.")
    ] = False,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help=f"Number of models to list. Default: {SHOWN}; with --json all.", show_default=False),
    ] = None,
    json: Json = False,
) -> None:
    if context_.invoked_subcommand is not None:
        return
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
    options: dict[str, object] = {"-f": file, "--hardware": hardware, "--users": users, "--concurrency": concurrency}
    options["--context"] = context
    if not (plain or json or limit):
        from bedplate.cli.browse_models import can_browse

        if can_browse():
            _browse(intent, machine, search, least, options, fields or [], everything)
    found = _find_models(intent, machine, search, least, everything)
    if json:
        _print_json(found, limit)
    else:
        from bedplate.values.quoting import join_shell

        plan = _list_words("plan", found.models[0] if found.models else None, intent, options, fields or [])
        _print_page(found, intent, machine, limit or SHOWN, least, join_shell(plan))
    sys.exit(0 if found.fitting else 1)


@app.command(
    epilog="""Examples:

\b
  bedplate models refresh
  bedplate models refresh Qwen/Qwen3-8B google/gemma-3-12b-it"""
)
def refresh(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL]...", help="Original models, as owner/name. Default: all in the catalogue."),
    ] = None,
) -> None:
    """Ask the hub for the files and sizes of published quantized weights.

    Downloads no weights. The result is kept in BEDPLATE_HOME, and plans use it.
    """
    from bedplate.cli.terminal import TerminalProgress, make_console
    from bedplate.facts.published_weights import list_repository_keys
    from bedplate.run.hub import list_published_files
    from bedplate.run.published_listing import store_listing
    from bedplate.show.models import render_listing

    keys = list_repository_keys(names or ())
    with TerminalProgress().step(f"asking the hub about {len(keys)} repositories", len(keys)) as done:
        found = list_published_files(keys, done)
    make_console().print(render_listing(found, store_listing(found)))


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


def _browse(
    intent: Intent, machine: Hardware, search: str | None, least: float | None, options: dict[str, object],
    fields: list[str], everything: bool,
) -> None:  # fmt: skip
    """Let a person choose a model, and become the command that serves or plans it."""
    import os
    import sys

    from bedplate.cli.browse_models import browse_models
    from bedplate.cli.printing import print_text
    from bedplate.show.model_browser import ModelBrowser
    from bedplate.show.probe import describe_hardware
    from bedplate.values import replace_fields
    from bedplate.values.quoting import join_shell

    def find(task: Task) -> tuple[CatalogueEntry, ...]:
        of_task = replace_fields(intent, workload=replace_fields(intent.workload, task=task))
        return _find_models(of_task, machine, search, None, everything=True).models

    first = ModelBrowser(
        find(intent.workload.task),
        describe_hardware(machine),
        task=intent.workload.task,
        fit="all" if everything else "fits",
        least_tok_s=least or 0.0,
        serves=intent.hardware is None,
    )
    last = browse_models(first, find)
    if last.action == "quit" or last.selected is None or last.action is None:
        sys.exit(0)
    command = _list_words(last.action, last.selected, intent, options, fields)
    print_text(f"$ {join_shell(command)}")
    os.execv(sys.executable, [sys.executable, "-m", *command])  # noqa: S606


def _list_words(
    verb: str, entry: CatalogueEntry | None, intent: Intent, options: dict[str, object], fields: list[str]
) -> list[str]:
    """The command that plans or serves a model for the same machine and workload."""
    from bedplate.decide.catalogue import with_everyday_context

    if options["--context"] is None and intent.workload.context_tokens is None:
        options["--context"] = with_everyday_context(intent.workload).context_tokens
    if entry is not None and entry.max_context is not None and isinstance(options["--context"], int):
        options["--context"] = min(options["--context"], entry.max_context)
    words = [part for option, value in options.items() if value is not None for part in (option, str(value))]
    words += [part for field in fields for part in ("--set", field)]
    name = "MODEL" if entry is None else entry.here[0] if entry.here and verb == "serve" else entry.name
    return ["bedplate", verb, name, *words]


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
