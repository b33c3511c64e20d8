"""bedplate doctor: collects what a bug report needs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bedplate.cli.options import Json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bedplate.facts.doctor import EngineCheck
    from bedplate.run.environments import EngineEnvironment

EXAMPLES = """Examples:

\b
  bedplate doctor
  bedplate doctor --json > report.json
  bedplate doctor --sbom bom.json

Keys, passwords and prompts are left out. Exit code 1: a problem was found."""

CHECK_LIMIT_S = 120.0
UV_LIMIT_S = 10.0
MOST_CHECKS = 4
"""Engines that are checked at the same time; each takes up to about a gigabyte of memory."""
UNKNOWN = "this version of bedplate cannot run it"
BROKEN = "the Python that it was made with is gone, or its manifest cannot be read"


def doctor(
    json: Json = False,
    sbom: Annotated[
        bool, typer.Option("--sbom", help="Write a software bill of materials (CycloneDX 1.6 JSON) instead.")
    ] = False,
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="Where --sbom writes; default: stdout.", show_default=False)
    ] = None,
) -> None:
    """Collect what a bug report needs, and list problems.

    Versions, hardware, installed engines and whether they still run, models, settings, and the last lines of logs.
    """
    import sys

    if sbom:
        _write_sbom(file)
        return
    if file is not None:
        from bedplate.errors import UsageError

        raise UsageError(f"doctor does not read {file}", hint=f"bedplate doctor --sbom {file} writes to it")
    from bedplate.engines import load_engines
    from bedplate.facts.doctor import FoundModel, make_report
    from bedplate.facts.hardware import probe
    from bedplate.facts.library import list_local_models
    from bedplate.home import get_home

    report = make_report(
        probe(),
        home=get_home(),
        uv=_read_uv_version(),
        engines=tuple(_check_engines()),
        prefixes=[prefix for one in load_engines().values() for prefix in one.variable_prefixes],
        models=[FoundModel(name=one.name, origin=one.origin, bytes=one.size_bytes) for one in list_local_models()],
    )
    if json:
        from bedplate.values import to_json

        print(to_json(report))  # noqa: T201
    else:
        from bedplate.cli.terminal import make_console
        from bedplate.show.doctor import render_report

        make_console().print(render_report(report))
    sys.exit(0 if report.is_healthy else 1)


def _write_sbom(file: Path | None) -> None:
    from json import dumps

    from bedplate.errors import ExternalFailure
    from bedplate.run.sbom import make_sbom

    text = dumps(make_sbom(), indent=2, ensure_ascii=False)
    if file is None or str(file) == "-":
        print(text)  # noqa: T201
        return
    try:
        file.write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise ExternalFailure(f"cannot write {file}", cause=error.strerror or str(error)) from error


def _read_uv_version() -> str | None:
    from bedplate.errors import ExternalFailure
    from bedplate.run.child import run_child
    from bedplate.run.uv import find_uv

    try:
        ended = run_child([find_uv(), "--version"], limit_s=UV_LIMIT_S)
    except (ExternalFailure, OSError):  # a timeout is one too
        return None
    words = ended.output.split()
    return words[1] if ended.code == 0 and len(words) > 1 else None


def _check_engines() -> Iterator[EngineCheck]:
    """Every environment, with the same checks as after its installation, several at a time: some import for 15 s."""
    import os
    from concurrent.futures import ThreadPoolExecutor, as_completed

    from bedplate.cli.terminal import TerminalProgress
    from bedplate.facts.doctor import EngineCheck
    from bedplate.home import get_engines_dir
    from bedplate.run.environments import list_installed

    whole = list_installed()
    names = ", ".join(dict.fromkeys(one.engine for one in whole)) or "no engine"
    with (
        TerminalProgress().step(f"checking {names}", len(whole)) as update,
        ThreadPoolExecutor(min(MOST_CHECKS, os.cpu_count() or 1)) as pool,
    ):
        checks = [pool.submit(_check_environment, one) for one in whole]
        for number, _ in enumerate(as_completed(checks), 1):
            update(number)
    yield from (check.result() for check in checks)
    for manifest in sorted(get_engines_dir().glob("*/*/bedplate.json")):
        folder = manifest.parent
        if str(folder) not in {environment.path for environment in whole}:
            version = folder.name.rpartition("-")[0] or folder.name
            yield EngineCheck(engine=folder.parent.name, version=version, failure=BROKEN)


def _check_environment(environment: EngineEnvironment) -> EngineCheck:
    from pathlib import Path

    from bedplate.engines import load_engines
    from bedplate.facts.doctor import EngineCheck
    from bedplate.hosting.orchestrators import find_recipe
    from bedplate.run.environments import explain_not_running

    engine = load_engines().get(environment.engine)
    recipe = engine.recipe if engine is not None else find_recipe(environment.engine)
    try:
        why = UNKNOWN if recipe is None else explain_not_running(Path(environment.path), recipe, CHECK_LIMIT_S)
    except OSError as error:
        why = str(error)
    return EngineCheck(
        engine=environment.engine,
        version=environment.version,
        python=environment.python,
        disk_bytes=environment.disk_bytes,
        failure=why,
    )
