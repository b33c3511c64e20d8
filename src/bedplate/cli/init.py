"""bedplate init: asks four questions and writes an intent file."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from bedplate.cli.options import HardwareName, ModelName

EXAMPLES = """Examples:

\b
  bedplate init
  bedplate init llama3.1:8b --hardware "2x L40S" --users 50 --latency fast --operated-by kubernetes
  bedplate init --hardware this -o chat.yaml

Then: bedplate plan -f bedplate.yaml, bedplate serve -f bedplate.yaml."""
LATENCIES = {"chat": (2000, 100), "fast": (500, 50)}
"""TTFT and TPOT in milliseconds. chat: what `plan` assumes without a target."""
THIS = "this"
T = TypeVar("T")


class Operators(StrEnum):
    me = "me"
    containers = "containers"
    kubernetes = "kubernetes"
    cluster = "cluster"


MACHINERY = {"me": "none", "containers": "container", "kubernetes": "kubernetes", "cluster": "cluster"}


def parse_latency(text: str) -> tuple[int, int]:
    """TTFT and TPOT in milliseconds, from a name or from two numbers."""
    from bedplate.errors import UsageError

    if text.strip().lower() in LATENCIES:
        return LATENCIES[text.strip().lower()]
    found = re.fullmatch(r"\s*([1-9]\d{0,6})\s*/\s*([1-9]\d{0,6})\s*", text)
    if found is None:
        raise UsageError(
            f"{text!r} is not a latency target",
            hint="chat (2000/100), fast (500/50), or TTFT/TPOT in milliseconds, such as 300/40",
        )
    return int(found[1]), int(found[2])


def init(
    model: ModelName = None,
    hardware: HardwareName = None,
    users: Annotated[int | None, typer.Option(min=1, help="Number of people who use it.", show_default=False)] = None,
    latency: Annotated[
        str | None,
        typer.Option(
            metavar="TARGET",
            help="How fast it answers: chat (TTFT 2000 ms, TPOT 100 ms), fast (500, 50), or TTFT/TPOT such as 300/40.",
            show_default=False,
        ),
    ] = None,
    operated_by: Annotated[
        Operators | None,
        typer.Option(
            help="Who operates it: me alone, or a team with containers, with Kubernetes or with a cluster.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The file to write.")] = Path(
        "bedplate.yaml"
    ),
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Ask four questions and write an intent file.

    Hardware, users, latency, and who operates it. Options answer a question in advance; without a terminal, the others
    have their defaults.
    """
    from bedplate.decide.intent import read_intent
    from bedplate.errors import UsageError

    if output.exists() and not force:
        raise UsageError(f"{output} exists", hint="--force replaces it, and -o FILE writes another one")
    asked = sys.stdin.isatty() and sys.stderr.isatty()
    where = _settle(hardware, "Which hardware? this machine, or for example 8x H100 SXM", THIS, _check_hardware, asked)
    number = _settle(str(users) if users else None, "How many people use it?", "1", _parse_users, asked)
    target = _settle(latency, "How fast? chat, fast, or TTFT/TPOT in ms such as 300/40", "chat", parse_latency, asked)
    operator = _settle(
        operated_by.value if operated_by else None,
        "Who operates it? me or a team: containers, kubernetes, cluster",
        "me",
        _parse_operator,
        asked,
    )
    text = write_intent(model, where, number, target, operator)
    try:
        with output.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{output} exists", hint="--force replaces it") from None
    except OSError as error:
        from bedplate.errors import ExternalFailure

        hint = "-o FILE writes another file"
        raise ExternalFailure(f"cannot write {output}", cause=error.strerror or str(error), hint=hint) from error
    read_intent(output)
    typer.echo(f"wrote {output}; next: bedplate plan -f {output}")


def _settle(given: str | None, question: str, default: str, parse: Callable[[str], T], asked: bool) -> T:
    """The answer from an option, from the terminal, or by default. A wrong answer in the terminal is asked again."""
    from bedplate.cli.terminal import show_error
    from bedplate.errors import BedplateError

    if given is not None or not asked:
        return parse(given if given is not None else default)
    while True:
        try:
            return parse(typer.prompt(question, default=default, err=True))
        except typer.Abort:
            raise KeyboardInterrupt from None  # as everywhere else: exit code 130, and no "Aborted!"
        except BedplateError as error:
            show_error(error)


def _check_hardware(text: str) -> str | None:
    """The name of hypothetical hardware; `None`: this machine."""
    from bedplate.decide.intent import resolve_hardware
    from bedplate.values.intent import Intent

    if text.strip().lower() in (THIS, "this machine", "here", ""):
        return None
    resolve_hardware(Intent(hardware=text))
    return text


def _parse_users(text: str) -> int:
    from bedplate.errors import UsageError

    if not text.strip().isdecimal() or int(text) < 1:
        raise UsageError(f"{text!r} is not a positive integer", hint="a number, such as 20")
    return int(text)


def _parse_operator(text: str) -> str:
    from bedplate.errors import UsageError

    if text.strip().lower() not in MACHINERY:
        raise UsageError(f"{text!r} is not one of {', '.join(MACHINERY)}")
    return text.strip().lower()


def write_intent(model: str | None, hardware: str | None, users: int, latency: tuple[int, int], operator: str) -> str:
    from bedplate.values.quoting import quote_yaml

    lines = ["# What bedplate plans and serves. All fields: docs/intent.md, bedplate schema intent."]
    lines.append(f"hardware: {quote_yaml(hardware)}" if hardware else "# hardware: this machine")
    lines.append(f"model: {quote_yaml(model)}" if model else "# model: the built-in one")
    lines += [
        "workload:",
        f"  users: {users}",
        f"  latency: {{ttft_ms: {latency[0]}, tpot_ms: {latency[1]}}}",
        "operations:",
        f"  machinery: {MACHINERY[operator]}",
    ]
    return "\n".join(lines) + "\n"
