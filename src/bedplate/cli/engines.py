"""bedplate engines: lists engines, shows one, builds and removes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from bedplate.cli.options import EngineName, EngineVersionName, HardwareName, Json

if TYPE_CHECKING:
    from bedplate.values import Hardware

app = typer.Typer(
    help="List engines: for which hardware, features, installed, measured.",
    invoke_without_command=True,
    rich_markup_mode=None,
    epilog="""Examples:

\b
  bedplate engines
  bedplate engines --hardware "4x RTX 3090"
  bedplate engines show vllm
  bedplate engines --json
  bedplate engines install llama.cpp@2026.9.11063
  bedplate engines build llama.cpp
  bedplate engines remove llama.cpp@2026.9.11063""",
)


@app.callback()
def engines(context: typer.Context, hardware: HardwareName = None, json: Json = False) -> None:
    if context.invoked_subcommand is not None:
        return
    from bedplate.decide.engine_map import build_rows, mark_cheat_sheet
    from bedplate.engines import get_engine as engine_by_id
    from bedplate.engines import load_engines
    from bedplate.run.engine_listing import EngineEntry, EngineList, add_environments, find_lock_status
    from bedplate.run.environments import list_installed
    from bedplate.store import compute_fingerprint, read_evidence

    machine = _resolve_machine(hardware)
    found = build_rows(load_engines(), machine, read_evidence(compute_fingerprint(machine)).results)
    sheet, there = mark_cheat_sheet(machine), list_installed()
    locks = {row.engine: find_lock_status(engine_by_id(row.engine), row.here.device) for row in found}
    if json:
        entries = tuple(add_environments(EngineEntry, row, there, locks[row.engine]) for row in found)
        _print_json(EngineList(cheat_sheet=sheet, engines=entries))
        return
    from bedplate.cli.terminal import make_console
    from bedplate.show.engines import render_map

    make_console().print(render_map(machine, sheet, found, there, locks))


@app.command(
    epilog="""Examples:

\b
  bedplate engines show vllm
  bedplate engines show vllm --hardware "8x H100 SXM"
  bedplate engines show llama.cpp --json"""
)
def show(engine: EngineName, hardware: HardwareName = None, json: Json = False) -> None:
    """Show one engine: what it is for, its features, and whether it runs on this machine."""
    from bedplate.decide.engine_map import build_row, find_common_results
    from bedplate.engines import get_engine as engine_by_id
    from bedplate.run.engine_listing import EnginePage, add_environments, find_lock_status
    from bedplate.run.environments import list_installed
    from bedplate.store import compute_fingerprint, read_evidence

    machine, one = _resolve_machine(hardware), engine_by_id(engine)
    own = [result for result in read_evidence(compute_fingerprint(machine)).results if result.engine == one.id]
    found, there = build_row(one, machine, find_common_results(own).get(one.id)), list_installed()
    lock = find_lock_status(one, found.here.device)
    if json:
        _print_json(add_environments(EnginePage, found, there, lock))
        return
    from bedplate.cli.terminal import make_console
    from bedplate.show.engines import render_engine

    make_console().print(render_engine(machine, found, there, lock))


@app.command(
    epilog="""Examples:

\b
  bedplate engines install llama.cpp
  bedplate engines install llama.cpp@2026.9.11063
  bedplate engines install vllm@0.31"""
)
def install(engine: EngineVersionName) -> None:
    """Install an engine, or another version of it beside those that are installed."""
    from bedplate.cli.terminal import TerminalProgress
    from bedplate.engines import get_engine as engine_by_id
    from bedplate.facts.hardware import probe
    from bedplate.run.environments import check_version
    from bedplate.run.environments import make_environment as install_environment
    from bedplate.values.units import format_size

    one = engine_by_id(engine)
    if one.is_native:
        build(one.id)
        return
    check_version(one)
    found = install_environment(one, TerminalProgress(), one.find_package_device(probe()))
    lock = "locked" if found.locked else "not locked"
    where = found.adopted_path or found.path
    typer.echo(f"{one.id}@{found.version}: {format_size(found.disk_bytes)}, {lock}, in {where}")


@app.command(
    epilog="""Examples:

\b
  bedplate engines build llama.cpp"""
)
def build(engine: EngineName) -> None:
    """Build an engine from source for this machine, as `serve --build native` does."""
    from bedplate.cli.terminal import TerminalProgress
    from bedplate.engines import get_engine as engine_by_id
    from bedplate.errors import ExternalFailure
    from bedplate.facts.hardware import probe
    from bedplate.measure.builds import BuildExaminer
    from bedplate.run.native import BuildNotUsable, get_source_build
    from bedplate.run.trials import provide_native_environment

    one, machine = engine_by_id(engine), probe()
    get_source_build(one)
    target = one.find_target(machine)
    device = target.device if target is not None else "cpu"
    try:
        found = provide_native_environment(one, machine, device, TerminalProgress(), BuildExaminer())
    except BuildNotUsable as error:
        raise ExternalFailure(
            f"the native build of {one.name} is not used: {error.why}",
            cause="; ".join(error.evidence) or None,
            hint=f"to build it again, first run bedplate engines remove {one.id}",
        ) from error
    typer.echo(f"{one.id} {found.version} for {device}: {'; '.join(filter(None, found.notes))}")
    typer.echo(f"serve with it: bedplate serve --engine {one.id} --build native")


@app.command(
    epilog="""Examples:

\b
  bedplate engines remove llama.cpp@2026.9.11063
  bedplate engines remove llama.cpp"""
)
def remove(
    engine: Annotated[
        str, typer.Argument(metavar="ID[@VERSION]", help="The engine, as `bedplate engines` names it, or one version.")
    ],
) -> None:
    """Remove an engine, or one version of it. The next `serve` installs it again."""
    from bedplate.cli.options import parse_engine, parse_engine_and_version
    from bedplate.run.environments import list_installed, uninstall_version
    from bedplate.run.environments import uninstall_engine as remove_environments
    from bedplate.values.units import format_size

    if "@" in engine:
        name, _, version = parse_engine_and_version(engine).partition("@")
        freed = sum(environment.disk_bytes for environment in uninstall_version(name, version))
        typer.echo(f"removed {name}@{version}: {format_size(freed)} freed")
        return

    # `serve --on` installs orchestrators, which are listed here too but are not engines.
    there = {environment.engine for environment in list_installed()}
    named = engine if engine in there else parse_engine(engine)
    freed = sum(environment.disk_bytes for environment in remove_environments(named))
    typer.echo(f"removed {named}: {format_size(freed)} freed")


def _resolve_machine(name: str | None) -> Hardware:
    from bedplate.cli.options import build_intent
    from bedplate.decide.intent import resolve_hardware

    return resolve_hardware(build_intent(None, None, hardware=name))


def _print_json(value: object) -> None:
    from bedplate.values import to_json

    print(to_json(value))  # noqa: T201
