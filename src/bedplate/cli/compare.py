"""bedplate compare: stay, migrate or not proven."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from bedplate.cli.options import ElectricityPrice, Json, PricePerHour, read_price

if TYPE_CHECKING:
    from bedplate.measure.stored import StoredCells
    from bedplate.values.cost import Price
    from bedplate.values.verdict import MetricName, Verdict

EXAMPLES = """Examples:

\b
  bedplate compare llama.cpp vllm                    their newest comparable measurements here
  bedplate compare llama.cpp vllm --concurrency 16
  bedplate compare llama.cpp https://gpu-2.example.com/v1
  bedplate compare llama.cpp vllm --slo ttft_ms=500,tpot_ms=50
  bedplate compare before.json after.json            files from `bedplate bench --json`
  bedplate compare 20261115-a1:vllm 20261115-a1:sglang
  bedplate compare before.json after.json --metric ttft_p95 --tolerance 3

Exit codes: 30 worse than A by more than --tolerance; 10 migrate; 20 not proven; 0 otherwise; 2 nothing to compare."""


class ComparedMetric(StrEnum):
    ttft_p95 = "ttft_p95"
    tpot_p95 = "tpot_p95"
    tok_s = "tok_s"
    peak_memory = "peak_memory"
    quality = "quality"
    schema = "schema"


Metrics = Annotated[
    list[ComparedMetric] | None,
    typer.Option(
        "--metric",
        help="Decide by this metric instead of speed; schema is structured output. May be repeated.",
        show_default=False,
    ),
]
Tolerance = Annotated[
    float, typer.Option(min=0.0, max=99.0, metavar="PERCENT", help="A larger loss against the baseline is worse.")
]


def list_metric_names(metrics: list[ComparedMetric] | None) -> tuple[MetricName, ...]:
    return tuple(dict.fromkeys(one.value for one in metrics or ()))


def compare(
    a: Annotated[
        str,
        typer.Argument(
            metavar="A",
            help="The engine in service: an engine id, the URL of an endpoint elsewhere, RUN[:ENGINE], or "
            "FILE[:ENGINE] from `bench --json`.",
        ),
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="The engine that may replace it, named in the same way.")],
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Compare only this number of concurrent requests.", show_default=False)
    ] = None,
    slo: Annotated[
        str | None,
        typer.Option(metavar="TARGET", help="Latency target: ttft_ms=500,tpot_ms=50.", show_default=False),
    ] = None,
    least_gain: Annotated[
        float | None,
        typer.Option(min=0.0, metavar="PERCENT", help="Smallest gain that justifies a migration.", show_default="10"),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHAT",
            help="Compare although these differ: quantization, weights or machine. May be repeated.",
            show_default=False,
        ),
    ] = None,
    metric: Metrics = None,
    tolerance: Tolerance = 5.0,
    price_per_hour: PricePerHour = None,
    electricity_price: ElectricityPrice = None,
    json: Json = False,
) -> None:
    """Compare two measured engines: stay, migrate or not proven.

    A gain counts if it is statistically significant and at least `--least-gain`. Wrong answers rule an engine out.
    """
    from bedplate.decide.evidence import PROVEN_GAIN
    from bedplate.facts.hardware import probe
    from bedplate.judge.compare import compare as judge
    from bedplate.measure.questions import parse_target
    from bedplate.measure.stored import find_cells, require_one_engine
    from bedplate.store import compute_fingerprint

    target = parse_target(slo) if slo is not None else None
    machine = compute_fingerprint(probe())
    sides = [require_one_engine(find_cells(name, machine), name) for name in (a, b)]
    mine, theirs = _select_common_model(*sides)
    verdict = judge(
        [cell for cell in mine.cells if concurrency in (None, cell.load.concurrency)],
        [cell for cell in theirs.cells if concurrency in (None, cell.load.concurrency)],
        target=target,
        allow=tuple(allow or ()),
        least_gain=PROVEN_GAIN if least_gain is None else 1 + least_gain / 100,
        prices=(
            read_price(None, price_per_hour, electricity_price, _find_price(mine)),
            read_price(None, price_per_hour, electricity_price, _find_price(theirs)),
        ),
        metrics=list_metric_names(metric),
        tolerance=tolerance / 100,
    )
    if not metric:  # plans follow verdicts on speed, not on single metrics
        _store_verdict(verdict)
    if json:
        from bedplate.values import to_json

        print(to_json(verdict))  # noqa: T201
    else:
        from bedplate.cli.terminal import make_console
        from bedplate.show.compare import render_verdict

        make_console().print(render_verdict(verdict))
    raise typer.Exit(verdict.exit_code)


def _find_price(side: StoredCells) -> Price | None:
    """The price that was given with the measurement; of several runs, the last one that has a price."""
    prices = [side.environments[cell.run].price for cell in side.cells if cell.run in side.environments]
    return next((price for price in reversed(prices) if price is not None), None)


def _store_verdict(verdict: Verdict) -> None:
    """Stores the verdict for the live page. Failing to store it does not change the answer."""
    import contextlib
    import datetime as dt

    from bedplate.errors import ExternalFailure
    from bedplate.store import add_verdict

    with contextlib.suppress(ExternalFailure):
        add_verdict(verdict, dt.datetime.now(dt.UTC).isoformat(timespec="seconds"))


def _select_common_model(a: StoredCells, b: StoredCells) -> tuple[StoredCells, StoredCells]:
    """The newest model that both engines were measured with."""
    shared = {cell.subject.model for cell in a.cells} & {cell.subject.model for cell in b.cells}
    newest = max((cell for cell in a.cells if cell.subject.model in shared), key=lambda cell: cell.at, default=None)
    if newest is None:
        return a, b
    both = (_select_model(side, newest.subject.model) for side in (a, b))
    return next(both), next(both)


def _select_model(side: StoredCells, model: str) -> StoredCells:
    return side._replace(cells=tuple(cell for cell in side.cells if cell.subject.model == model))
