"""bedplate workload: summarizes a trace, a request log or the traffic of endpoints."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from bedplate.cli.options import Json

if TYPE_CHECKING:
    from bedplate.values.workload import TraceFormat

EXAMPLES = """Examples:

\b
  bedplate workload AzureLLMInferenceTrace_conv.csv
  bedplate workload conversation_trace.jsonl.gz -o bedplate.yaml
  bedplate workload requests.jsonl --json | jq .in_flight.spread
  bedplate workload --observed 24h -o bedplate.yaml

The content of requests is neither stored nor shown."""


class FormatChoice(StrEnum):
    auto = "auto"
    azure = "azure"
    mooncake = "mooncake"
    sharegpt = "sharegpt"
    bedplate = "bedplate"
    burstgpt = "burstgpt"
    bailian = "bailian"
    copilot = "copilot"

    @property
    def trace_format(self) -> TraceFormat | None:
        return None if self is FormatChoice.auto else cast("TraceFormat", self.value)


def workload(
    trace: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE]",
            help="A trace or a request log, plain, .gz or .zst; - reads standard input.",
            show_default=False,
        ),
    ] = None,
    observed: Annotated[
        str | None,
        typer.Option(
            metavar="SPAN", help="Instead of FILE: the recorded traffic of endpoints here: 24h, 7d.", show_default=False
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --observed: only this model.", show_default=False)
    ] = None,
    kind: Annotated[
        FormatChoice, typer.Option("--format", help="Format of FILE; auto detects it.", show_default=True)
    ] = FormatChoice.auto,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write the workload section of an intent file as YAML.",
            show_default=False,
        ),
    ] = None,
    ttft_ms: Annotated[
        float | None,
        typer.Option(
            min=0, help="Assumed time to first token in ms, for traces without durations.", show_default="500"
        ),
    ] = None,
    tpot_ms: Annotated[
        float | None,
        typer.Option(
            min=0, help="Assumed time per output token in ms, for traces without durations.", show_default="50"
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Summarize a trace, a request log or the traffic of an endpoint.

    Lengths, arrival rate and bursts, concurrent requests, and the share of prompt tokens that a prefix cache saves.
    """
    from bedplate.errors import UsageError
    from bedplate.facts.workload import ASSUMED_TPOT_MS, ASSUMED_TTFT_MS, summarize_trace, write_workload_yaml

    if (trace is None) == (observed is None):
        raise UsageError("give either FILE or --observed", hint="for example --observed 24h")
    if model is not None and observed is None:
        raise UsageError("--model needs --observed", hint="add --observed 24h, or leave out --model")
    if observed is not None:
        from bedplate.facts.observed_workload import summarize_observed as observe
        from bedplate.values.units import parse_duration

        summary = observe(parse_duration(observed, "--observed"), model=model)
    else:
        summary = summarize_trace(
            str(trace),
            kind.trace_format,
            ttft_ms=ASSUMED_TTFT_MS if ttft_ms is None else ttft_ms,
            tpot_ms=ASSUMED_TPOT_MS if tpot_ms is None else tpot_ms,
        )
    if output is not None:
        _write(output, write_workload_yaml(summary))
    if json:
        from bedplate.values import to_json

        print(to_json(summary))  # noqa: T201
        return
    from bedplate.cli.terminal import make_console
    from bedplate.show.workload import render_summary

    make_console().print(render_summary(summary))
    if output is not None:
        make_console().print(f" written: {output}", soft_wrap=True, markup=False)


def _write(path: Path, text: str) -> None:
    from bedplate.errors import ExternalFailure, UsageError

    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        hint = "name another file, or add the section by hand"
        raise UsageError(f"{path} already exists and is not overwritten", hint=hint) from None
    except OSError as error:
        raise ExternalFailure(f"cannot write {path}", cause=error.strerror or str(error)) from error
