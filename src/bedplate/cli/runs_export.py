"""bedplate runs export, verify and import: results that can be passed on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bedplate.cli.options import Json, write_file

if TYPE_CHECKING:
    from bedplate.values.signed_result import ImportedRun

EXPORT_EXAMPLES = """Examples:

\b
  bedplate runs export 20261115-151214-5ea8 --sign -o result.json
  bedplate runs export --sign --key key.pem > result.json          the newest run, with a key of your own
  bedplate schema signed-result                                    the schema of the file

The key of this installation is created when it is first used. Needs `pip install "bedplate[sign]"`."""
VERIFY_EXAMPLES = """Examples:

\b
  bedplate runs verify result.json
  bedplate runs verify result.json --public-key MCowBQYDK2VwAyEA...
  bedplate runs verify result.json --json

Exit codes: 0 valid; 1 not valid; 2 the file cannot be read."""
IMPORT_EXAMPLES = """Examples:

\b
  bedplate runs import result.json
  bedplate runs import llama-bench.json benchmarks.json profile_export.jsonl
  bedplate runs import result.json --json

Reads signed results, runs of bedplate, llama-bench (-o json), `vllm bench serve`, GuideLLM, AIPerf and InferenceX."""


def register(app: typer.Typer) -> None:
    app.command(epilog=EXPORT_EXAMPLES)(export)
    app.command(epilog=VERIFY_EXAMPLES)(verify)
    app.command(name="import", epilog=IMPORT_EXAMPLES)(import_)


def export(
    id_: Annotated[
        str | None,
        typer.Argument(
            metavar="ID", help="A run id from `bedplate runs`. Default: the newest run.", show_default=False
        ),
    ] = None,
    sign: Annotated[bool, typer.Option("--sign", help="Sign the result with ed25519.")] = False,
    key: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Private key in PEM format. Default: that of this installation.", show_default=False
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write to this file.", show_default="standard output"),
    ] = None,
) -> None:
    """Write a self-contained result: hardware, versions, lock hashes, workload, samples, quality and flags."""
    from bedplate import store
    from bedplate.errors import UsageError
    from bedplate.facts.hardware import probe
    from bedplate.measure.exported_run import export_run
    from bedplate.values import to_json

    if key is not None and not sign:
        raise UsageError("--key is only used with --sign")
    result = export_run(store.find_run(id_), probe())
    text = f"{to_json(result, indent=1)}\n"
    if sign:
        from bedplate.measure.signing import load_key, sign_result

        text = sign_result(result, load_key(key))
    if output is None:
        print(text, end="")  # noqa: T201
    else:
        write_file(output, text)
        typer.echo(f"wrote {output}{', signed' if sign else ', not signed'}", err=True)


def verify(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file from `bedplate runs export --sign`.")],
    public_key: Annotated[
        str | None,
        typer.Option(metavar="BASE64", help="Accept only a signature of this public key.", show_default=False),
    ] = None,
    json: Json = False,
) -> None:
    """Check the signature of a result.

    A valid signature shows that the file is unchanged, and which key signed it. Whose key that is, it does not show.
    """
    from bedplate.measure.signing import verify_file

    found = verify_file(file, public_key)
    if json:
        from bedplate.values import to_json

        print(to_json(found))  # noqa: T201
    elif found.is_valid:
        typer.echo(f"valid: run {found.run}, signed with the key {found.key_id} ({found.public_key})")
    else:
        typer.echo(f"not valid: {found.reason}")
    raise typer.Exit(0 if found.is_valid else 1)


def import_(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Result files of bedplate or other tools.")],
    json: Json = False,
) -> None:
    """Store results of other machines and other tools, with what they lack.

    They are listed, compared and reported, and never change plans. A signed result must be unchanged.
    """
    from bedplate.values.signed_result import ImportedRuns

    found = tuple(_import_file(path) for path in files)
    if json:
        from bedplate.values import to_json

        print(to_json(ImportedRuns(runs=found)))  # noqa: T201
        return
    from bedplate.cli.printing import print_text

    for one in found:
        state = "verified" if one.is_verified else "not signed"
        print_text(f"{one.file}: run {one.run}, {one.cells} cell{'' if one.cells == 1 else 's'}, {state}")
        for note in one.notes:
            print_text(f"  {note}")


def _import_file(path: Path) -> ImportedRun:
    from bedplate.measure.results import import_result
    from bedplate.values.signed_result import ImportedRun

    found = import_result(path)
    run = found.run
    notes = dict.fromkeys(flag.text for cell in run.cells for flag in cell.flags)
    return ImportedRun(
        file=path.name, run=run.id, cells=len(run.cells), is_verified=found.is_verified, notes=tuple(notes)
    )
