"""Assembles the verbs, and turns errors into messages and exit codes."""

from __future__ import annotations

import errno
import io
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import click
import typer
from typer.core import TyperArgument, TyperGroup

from bedplate._version import __version__
from bedplate.cli import (
    adapters,
    bench,
    bundle,
    compare,
    completion,
    connect,
    diagnose,
    doctor,
    engines,
    engines_use,
    estimate,
    gate,
    init,
    inspect,
    keys,
    list_,
    logs,
    mcp,
    migrate,
    models,
    plan,
    prepared,
    probe,
    ps,
    pull,
    reference,
    report,
    rm,
    run,
    runs,
    runs_discard,
    runs_export,
    runs_show,
    schema,
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
PANELS: dict[str, tuple[ModuleType, ...]] = {
    "Run": (run, serve, connect, mcp, ps, status, logs, stop),
    "Decide": (init, plan, models, engines, inspect, probe, workload, estimate),
    "Measure": (bench, tune, compare, gate, reference, diagnose, report, runs),
    "Change": (adapters, shadow, migrate, watch),
    "Scale out": (simulate, bundle),
    "Administer": (pull, list_, rm, prepared, keys, usage, doctor, schema, completion),
}
"""The verbs as `bedplate --help` groups them, each in a module of its name."""


EXAMPLES = """Examples:

\b
  bedplate run                 chat with the built-in model in this terminal
  bedplate serve               the built-in model behind an OpenAI-compatible API
  bedplate serve model.gguf    any GGUF file, or a model in the cache of the hub
  bedplate plan model.gguf     which engine and why, without running anything
  bedplate models              the models that this machine can run
  bedplate probe --json        this machine as JSON, for other programs

Exit codes: 0 done; 1 not possible; 2 usage error; 3 external failure."""


class _ArgumentWithHelp(TyperArgument):
    """Keeps the help of an argument. typer before 0.25 sets `help` before click 8.5 resets it, and click would list
    arguments with `help` once more, in a section of its own."""

    def __init__(self, *, help: str | None = None, **options: Any) -> None:
        super().__init__(help=help, **options)
        self.help, self._text = None, help

    def get_help_record(self, ctx: click.Context) -> Any:
        self.help = self._text
        try:
            return super().get_help_record(ctx)
        finally:
            self.help = None


typer.main.TyperArgument = _ArgumentWithHelp  # type: ignore[attr-defined]


def _parse_finite(text: Any) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError
    return number


# click's ranges accept nan, since it is neither below nor above their limits.
click.types.FloatParamType._number_class = staticmethod(_parse_finite)  # type: ignore[assignment]


class ExampleFormatter(click.HelpFormatter):
    """Keeps examples within the width: a note that does not fit goes below its command, and long commands continue."""

    def write_text(self, text: str) -> None:
        width = self.width - self.current_indent
        super().write_text("\n".join(_fit_example(line, width) for line in text.split("\n")))


def _fit_example(line: str, width: int) -> str:
    if len(line) <= width or not line.startswith("  "):
        return line
    command, gap, note = line.strip().partition("   ")
    if gap:
        return f"{_fit_example(f'  {command}', width)}\n      {note.strip()}"
    end = max(line.rfind(start, 8, width - 2) for start in (" -", " > ", " bedplate "))
    return f"{line[:end]} \\\n{_fit_example(f'      {line[end + 1 :]}', width)}" if end > 0 else line


click.Context.formatter_class = ExampleFormatter


class GroupedVerbs(TyperGroup):
    """Lists the verbs under the headings of their groups, without rich, and reports wrong command lines as bedplate
    reports every error."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        given = list(args)
        with _translate_errors(given):
            context = super().make_context(info_name, args, parent, **extra)
        context.meta["bedplate.arguments"] = given
        return context

    def invoke(self, ctx: click.Context) -> Any:
        with _translate_errors(ctx.meta["bedplate.arguments"]):
            return super().invoke(ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self.commands))
        limit = formatter.width - width - 4
        for panel, modules in PANELS.items():
            names = [get_verb_name(module) for module in modules]
            with formatter.section(panel):
                formatter.write_dl(
                    [(f"{name:{width}}", self.commands[name].get_short_help_str(limit)) for name in names]
                )


@contextmanager
def _translate_errors(arguments: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except click.UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            raise
        from bedplate.cli.usage_errors import translate

        raise translate(error, arguments) from None


def get_verb_name(verb: ModuleType) -> str:
    """The module's name; an underscore keeps it apart from a built-in function."""
    return verb.__name__.rpartition(".")[2].rstrip("_")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bedplate {__version__}")
        raise typer.Exit


def _read_global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None: ...


def make_app(verbs: Iterable[ModuleType], *, options: bool = True) -> typer.Typer:
    """The command line with these verbs. Without their options they can only be listed."""
    made = typer.Typer(
        name="bedplate",
        cls=GroupedVerbs,
        help="You don't pick an inference engine, you pick a hardware strategy, and the engine follows.",
        epilog=EXAMPLES,
        no_args_is_help=True,
        add_completion=True,
        # Plain help needs no rich, and so answers in half the time.
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    made.callback()(_read_global_options)
    for verb in verbs:
        name, group = get_verb_name(verb), getattr(verb, "app", None)
        function = getattr(verb, verb.__name__.rpartition(".")[2], _list_only)
        if not options:
            made.command(name, help=group.info.help if group else function.__doc__)(_list_only)
        elif group:
            made.add_typer(group, name=name)
        else:
            made.command(name, epilog=verb.EXAMPLES)(function)
    return made


def _list_only() -> None: ...


engines_use.register(engines.app)
for verb in (runs_show, runs_discard, runs_export):
    verb.register(runs.app)
LISTS_VERBS: tuple[list[str], ...] = ([], ["--help"], ["-h"])
VERBS = tuple(chain.from_iterable(PANELS.values()))
app = make_app(VERBS)


def build_app_for(arguments: Sequence[str]) -> typer.Typer:
    """typer builds all options of all verbs before it runs one, which takes as long as a plan. So the verb comes alone,
    and the list of verbs without options. Only completion and the suggestions for a typing error need all."""
    given = list(arguments)
    if given in LISTS_VERBS and completion.VARIABLE not in os.environ:
        return make_app(VERBS, options=False)
    asked = [verb for verb in VERBS if [get_verb_name(verb)] == given[:1]]
    return make_app(asked) if asked else app


def main() -> None:
    from bedplate.errors import BedplateError

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that cannot encode a character shows a question mark instead of failing.
            stream.reconfigure(errors="replace")
    try:
        try:
            build_app_for(sys.argv[1:])(prog_name="bedplate")
        finally:
            # Now, while an error can still be reported.
            if sys.stdout is not None:
                sys.stdout.flush()
    except BedplateError as error:
        _fail(error)
    except BrokenPipeError:
        # The reader of the output has ended, as in `bedplate … | head`.
        _discard_output()
        sys.exit(141)
    except OSError as error:
        # With a file name the error is about opening a file; without one it is about writing the output.
        if error.errno not in NO_ROOM or error.filename is not None:
            raise
        from bedplate.errors import ExternalFailure

        _discard_output()
        why, hint = error.strerror or str(error), "the output is incomplete; free some space, or write it elsewhere"
        _fail(ExternalFailure("cannot write the output", cause=why, hint=hint))


def _fail(error: BedplateError) -> NoReturn:
    from bedplate.cli.terminal import show_error

    show_error(error)
    sys.exit(error.exit_code)


def _discard_output() -> None:
    """Drops unwritten output, so that Python does not try to write it again at exit and print an error of its own."""
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
