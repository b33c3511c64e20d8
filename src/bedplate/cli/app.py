"""Puts the verbs together and turns errors into messages and exit codes."""

from __future__ import annotations

import errno
import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from bedplate._version import __version__
from bedplate.cli import (
    bench,
    bundle,
    compare,
    diagnose,
    doctor,
    engines,
    engines_use,
    estimate,
    inspect,
    keys,
    logs,
    migrate,
    models,
    plan,
    prepared,
    probe,
    ps,
    report,
    serve,
    shadow,
    simulate,
    status,
    stop,
    tune,
    usage,
    watch,
    workload,
)

if TYPE_CHECKING:
    from bedplate.errors import BedplateError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
app = typer.Typer(
    name="bedplate",
    help="You don't pick an inference engine, you pick a hardware strategy, and the engine follows.",
    epilog="""Examples:

\b
  bedplate serve                     the built-in model behind an OpenAI-compatible endpoint
  bedplate serve model.gguf          any GGUF file, or one in the Hugging Face, Ollama or LM Studio cache
  bedplate plan model.gguf           which engine and why, without running anything
  bedplate models                    what can I run here?
  bedplate probe --json              this machine, for other programs

Exit codes: 0 done; 1 the answer is no; 2 the question was wrong; 3 something outside failed.""",
    no_args_is_help=True,
    add_completion=True,
    # Plain help needs no rich, and so answers in half the time.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(epilog=serve.EXAMPLES)(serve.serve)
app.command(epilog=ps.EXAMPLES)(ps.ps)
app.command(epilog=status.EXAMPLES)(status.status)
app.command(epilog=logs.EXAMPLES)(logs.logs)
app.command(epilog=stop.EXAMPLES)(stop.stop)
app.command(epilog=shadow.EXAMPLES)(shadow.shadow)
app.command(epilog=migrate.EXAMPLES)(migrate.migrate)
app.command(epilog=watch.EXAMPLES)(watch.watch)
app.command(epilog=plan.EXAMPLES)(plan.plan)
app.command(epilog=bench.EXAMPLES)(bench.bench)
app.command(epilog=tune.EXAMPLES)(tune.tune)
app.command(epilog=compare.EXAMPLES)(compare.compare)
app.command(epilog=diagnose.EXAMPLES)(diagnose.diagnose)
app.command(epilog=report.EXAMPLES)(report.report)
app.command(epilog=models.EXAMPLES)(models.models)
app.command(epilog=inspect.EXAMPLES)(inspect.inspect)
app.command(epilog=probe.EXAMPLES)(probe.probe)
app.command(epilog=workload.EXAMPLES)(workload.workload)
app.command(epilog=estimate.EXAMPLES)(estimate.estimate)
app.command(epilog=simulate.EXAMPLES)(simulate.simulate)
app.command(epilog=bundle.EXAMPLES)(bundle.bundle)
app.command(epilog=doctor.EXAMPLES)(doctor.doctor)
engines_use.register(engines.app)
app.add_typer(engines.app, name="engines")
app.add_typer(prepared.app, name="prepared")
app.add_typer(keys.app, name="keys")
app.command(epilog=usage.EXAMPLES)(usage.usage)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bedplate {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None: ...


def main() -> None:
    from bedplate.errors import BedplateError

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Terminals that know no arrows get a question mark for one, and the page all the same.
            stream.reconfigure(errors="replace")
    try:
        try:
            app(prog_name="bedplate")
        finally:
            # Now, and not when Python ends: then nothing could say what went wrong.
            if sys.stdout is not None:
                sys.stdout.flush()
    except BedplateError as error:
        _fail(error)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output has gone, as `bedplate … | head` does it.
        _forget_output()
        sys.exit(141)
    except OSError as error:
        # Of a file that cannot be opened the error has the name; this one is of what was open already.
        if error.errno not in NO_ROOM or error.filename is not None:
            raise
        from bedplate.errors import OutsideFailed

        _forget_output()
        why, hint = error.strerror or str(error), "what is there is not all of it: make room, or write it elsewhere"
        _fail(OutsideFailed("cannot write the output", cause=why, hint=hint))


def _fail(error: BedplateError) -> NoReturn:
    from bedplate.cli.terminal import show_error

    show_error(error)
    sys.exit(error.exit_code)


def _forget_output() -> None:
    """Drops what is not written yet, lest Python tries it once more at its end and complains in its own way."""
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
