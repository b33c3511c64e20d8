"""Puts the verbs together and turns errors into messages and exit codes."""

from __future__ import annotations

import sys
from typing import Annotated

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

    try:
        app(prog_name="bedplate")
    except BedplateError as error:
        from bedplate.show.terminal import show_error

        show_error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output has gone, as `bedplate … | head` does it.
        sys.stderr.close()
        sys.exit(141)
