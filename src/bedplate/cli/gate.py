"""bedplate gate: a challenger against a baseline, measured for CI."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bedplate.cli.compare import Metrics, Tolerance, list_metric_names
from bedplate.cli.options import AllowBusyGpu, Json, Structured, WaitForGpu, parse_engine_and_version, write_file

if TYPE_CHECKING:
    from bedplate.changing.gate import GateRequest
    from bedplate.values.gate import GateResult
    from bedplate.values.run import Load

EXAMPLES = """Examples:

\b
  bedplate gate baseline.json                          a file from `bedplate bench --json`, or a signed result
  bedplate gate llama.cpp@2026.9.11208                 against the version that bedplate installs
  bedplate gate vllm@0.31.0 --challenger vllm@0.32.0 --metric ttft_p95 --metric tok_s
  bedplate gate 20261115-151214-5ea8:llama.cpp --tolerance 3 --budget 20m
  bedplate gate baseline.json --junit gate.xml --markdown gate.md > result.md
  bedplate gate baseline.json --json

Exit codes: 30 worse than the baseline by more than --tolerance; 10 better; 20 not proven; 0 otherwise;
130 stopped by Ctrl-C, which stops both engines."""


def gate(
    baseline: Annotated[
        str,
        typer.Argument(
            metavar="BASELINE",
            help="ENGINE[@VERSION], a stored run as RUN[:ENGINE], or a file with a run. It is measured again.",
        ),
    ],
    challenger: Annotated[
        str | None,
        typer.Option(
            metavar="ID[@VERSION]",
            help="The engine to judge. Default: the baseline's engine, in the version that bedplate installs.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="Default: the model of the stored run, or the built-in one.", show_default=False
        ),
    ] = None,
    metric: Metrics = None,
    tolerance: Tolerance = 5.0,
    slo: Annotated[
        str | None,
        typer.Option(metavar="TARGET", help="Latency target: ttft_ms=500,tpot_ms=50.", show_default=False),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHAT", help="Compare although these differ: quantization or weights.", show_default=False
        ),
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Numbers of concurrent requests, comma-separated.",
            show_default="those of the stored run, else 4",
        ),
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Prompt length in tokens.", show_default="that of the stored run, else 512"),
    ] = None,
    output_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Answer length in tokens.", show_default="that of the stored run, else 128"),
    ] = None,
    rounds: Annotated[int, typer.Option(min=3, help="Interleaved rounds, at most.")] = 20,
    seconds: Annotated[float, typer.Option(min=0.5, help="Measurement window of one round, in seconds.")] = 5.0,
    budget: Annotated[
        str, typer.Option(metavar="TIME", help="Time limit of everything, starts and checks included.")
    ] = "10m",
    quality: Annotated[
        bool, typer.Option("--quality/--no-quality", help="Also compare answers with the float32 reference.")
    ] = True,
    structured: Structured = False,
    wait_for_gpu: WaitForGpu = "60s",
    allow_busy_gpu: AllowBusyGpu = False,
    junit: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write JUnit XML to this file.", show_default=False)
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the Markdown to this file too.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Measure a challenger against a baseline, for CI.

    Both run in interleaved rounds, so that drift affects both sides equally. The result is Markdown for a pull request.
    """
    import sys

    from bedplate.changing.gate import GateRequest
    from bedplate.cli.terminal import make_console
    from bedplate.measure.bench import BenchStopped
    from bedplate.measure.questions import parse_target
    from bedplate.values.units import parse_duration

    asked = GateRequest(
        baseline=baseline,
        challenger=parse_engine_and_version(challenger) if challenger is not None else None,
        model=model,
        loads=_choose_loads(concurrency, prompt_tokens, output_tokens),
        metrics=list_metric_names(metric),
        tolerance=tolerance / 100,
        target=parse_target(slo) if slo is not None else None,
        allow=tuple(allow or ()),
        rounds=rounds,
        seconds=seconds,
        budget_s=parse_duration(budget, "--budget", positive=True),
        check_quality=quality,
        check_structured=structured,
        wait_for_gpu_s=parse_duration(wait_for_gpu, "--wait-for-gpu"),
        allow_busy_gpu=allow_busy_gpu,
        command=("bedplate", *sys.argv[1:]),
    )
    try:
        result = _run(asked)
    except BenchStopped as error:
        make_console(sys.stderr).print(f" {error}", soft_wrap=True, markup=False)
        raise typer.Exit(130) from None
    _show(result, json=json, junit=junit, markdown=markdown)
    raise typer.Exit(result.exit_code)


def _run(asked: GateRequest) -> GateResult:
    from bedplate.changing.gate import run_gate
    from bedplate.cli.terminal import TerminalProgress
    from bedplate.show.gate import GateTeller

    progress = TerminalProgress()
    return run_gate(asked, progress, GateTeller(progress.note))


def _choose_loads(concurrency: str | None, prompt_tokens: int | None, output_tokens: int | None) -> tuple[Load, ...]:
    """Empty if no option is given: the baseline then says what is measured."""
    from bedplate.measure.questions import parse_loads

    if concurrency is None and prompt_tokens is None and output_tokens is None:
        return ()
    return parse_loads(
        concurrency=concurrency or "4", prompt_tokens=prompt_tokens or 512, output_tokens=output_tokens or 128
    )


def _show(result: GateResult, *, json: bool, junit: Path | None, markdown: Path | None) -> None:
    from bedplate.cli.printing import print_text
    from bedplate.show.gate import write_junit, write_markdown
    from bedplate.values import to_json

    if junit is not None:
        write_file(junit, write_junit(result))
    if markdown is not None:
        write_file(markdown, write_markdown(result))
    print_text(f"{to_json(result)}\n" if json else write_markdown(result), end="")
