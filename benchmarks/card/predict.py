"""What this version predicts for every cell of the archives in `results`, beside what was measured.

    python benchmarks/card/predict.py
    python benchmarks/card/predict.py --clean --csv > predicted.csv
    python benchmarks/card/predict.py --page        # the two tables of docs/gpu.md

The model's facts are those of the run file, the hardware is a hypothetical H200, and requests arrive as those of
`bedplate bench`. Nothing in a prediction comes from the archives but what the fits learned from them. `then` is what
the plan predicted before the run, if it planned the same weights. Cells in which something was changed that a plan does
not state (a bottleneck on purpose, a service that was started elsewhere, speculation on random weights) are left out.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from bedplate.decide.estimate import compute_expectation
from bedplate.decide.estimate.arrivals import BENCH
from bedplate.engines import load_engines
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.judge.roofline import apply_quantization
from bedplate.measure.summary import make_row
from bedplate.values import Hardware, Workload
from bedplate.values.fit import Offload
from bedplate.values.record import from_json
from bedplate.values.run import Cell, Run
from bedplate.values.units import format_figure

RESULTS = Path(__file__).resolve().parent / "results"
CHANGED = ("enforce-eager", "num-gpu-blocks-override", "speculative-config", "shared-gpu/")
"""Parts of the names of runs whose sides differ from every plan."""
METRICS = ("ttft_ms", "tpot_ms", "output_tok_s")
SHOWN = {
    ("h200-2026-11-17", "vllm-8b"): "A: vLLM, 8 B, FP8",
    ("h200-2026-11-17", "sglang-8b"): "A: SGLang, 8 B, FP8",
    ("h200-2026-11-18-g", "sglang-8b"): "G: SGLang, 8 B, BF16",
    ("h200-2026-11-17-c", "moe-vllm"): "C: vLLM, experts, FP8",
    ("h200-2026-11-17-d", "moe-sglang"): "D: SGLang, experts, FP8",
    ("h200-2026-11-18-g", "moe-sglang"): "G: SGLang, experts, BF16",
    ("h200-2026-11-18-e", "mla/vllm-load-format-dummy"): "E: vLLM, latent attention, FP8",
    ("h200-2026-11-18-f", "dense-32b/vllm-load-format-dummy"): "F: vLLM, 32 B, FP8",
    ("h200-2026-11-18-f", "llama.cpp"): "F: llama.cpp, 8 B, Q4_K",
    ("h200-2026-11-18-g", "moe-llama.cpp"): "G: llama.cpp, experts, Q4_K",
    ("h200-2026-11-18-e", "offload"): "E: llama.cpp, layers on the host",
}
"""The cells that docs/gpu.md lists, by archive and name, and what it calls them."""


class Comparison(NamedTuple):
    """One figure of one cell."""

    measured: float
    value: float
    low: float
    high: float
    then: float | None

    @property
    def error(self) -> float:
        return self.value / self.measured - 1

    @property
    def is_inside(self) -> bool:
        return self.low <= self.measured <= self.high


class PredictedCell(NamedTuple):
    archive: str
    name: str
    """The step, and the side where a step has several."""
    cell: Cell
    figures: dict[str, Comparison]

    @property
    def is_clean(self) -> bool:
        return not self.cell.flags

    @property
    def load(self) -> str:
        load = self.cell.load
        shared = f"/{load.shared_prefix_tokens}" if load.shared_prefix_tokens else ""
        return f"{load.concurrency}:{load.prompt_tokens}/{load.output_tokens}{shared}"


@lru_cache(maxsize=1)
def get_hardware() -> Hardware:
    return make_simulated_hardware({"accelerator": "H200", "count": 1, "cores": 16, "ram_gb": 128})


def list_cells() -> list[PredictedCell]:
    archives = sorted(RESULTS.glob("*.tar.xz"))
    return [one for path in archives for one in predict_files(path.name.removesuffix(".tar.xz"), read_json_files(path))]


def predict_files(archive: str, files: Mapping[str, bytes]) -> Iterator[PredictedCell]:
    """`files`: the JSON files of an archive, by their names in it."""
    for name, content in files.items():
        if b'"run/1"' not in content[:200] or any(part in name for part in CHANGED):
            continue
        run = from_json(Run, content)
        for cell in run.cells if run.models else ():
            load = cell.load
            if load.arrivals != "closed" or load.concurrency is None:
                continue
            step = name.rpartition("/")[0]
            plan = files.get(f"{step}/plan-{load.concurrency}.json")
            if figures := _compare(run, cell, name, msgspec.json.decode(plan) if plan else {}):
                label = step if name.endswith("/run.json") else name.removesuffix(".json")
                yield PredictedCell(archive, label, cell, figures)


def read_json_files(archive: Path) -> dict[str, bytes]:
    with tarfile.open(archive, "r|xz") as tar:
        named = ((member, tar.extractfile(member)) for member in tar if member.name.endswith(".json"))
        return {member.name.partition("/")[2]: stream.read() for member, stream in named if stream is not None}


def _compare(run: Run, cell: Cell, name: str, plan: dict[str, Any]) -> dict[str, Comparison]:
    subject, load, settings = cell.subject, cell.load, cell.subject.settings
    engine = load_engines().get(subject.engine)
    row = make_row(cell, run.environment.hardware, None)
    if engine is None or settings is None or None in (row.ttft_ms, row.tpot_ms, row.tok_per_s):
        return {}
    # A cache that is turned off, or has 8 bits, is an option of the side, and not of its settings.
    shared = 0 if "no-enable-prefix-caching" in name else load.shared_prefix_tokens
    kv_bits = 8.0 if "kv-cache-dtype-fp8" in name else engine.get_stored_cache_bits(settings.kv_type)
    stated = (plan.get("memory") or {}).get("offload")
    expected = compute_expectation(
        get_hardware(),
        apply_quantization(run.models[0], subject.quantization),
        subject.engine,
        subject.parallelism,
        Workload(
            concurrency=load.concurrency, prompt_tokens=load.prompt_tokens, output_tokens=load.output_tokens,
            shared_prefix_tokens=shared,
        ),
        slots=settings.slots,
        offload=msgspec.convert(stated, Offload) if stated else None,
        kv_bits=kv_bits,
        arrivals=BENCH,
    )  # fmt: skip
    if expected is None:
        return {}
    same = (plan.get("quantization") or "").upper() == (subject.quantization or "").upper()
    then = plan.get("estimate", {}) if same else {}
    figures = {}
    for metric, value, band, measured in (
        ("ttft_ms", expected.ttft_s * 1e3, expected.ttft_band, row.ttft_ms),
        ("tpot_ms", expected.tpot_s * 1e3, expected.tpot_band, row.tpot_ms),
        ("output_tok_s", expected.output_tok_s, expected.output_band, row.tok_per_s),
    ):
        before = (then.get(metric) or {}).get("value")
        figures[metric] = Comparison(float(measured or 0.0), value, *band.get_bounds(value), before)
    return figures


def summarize(cells: Sequence[PredictedCell], metric: str) -> tuple[float, float]:
    """The median of the absolute error, and the share of the cells inside the 80 % band."""
    found = [one.figures[metric] for one in cells]
    return statistics.median(abs(one.error) for one in found), sum(one.is_inside for one in found) / len(found)


def print_cells(cells: Sequence[PredictedCell]) -> None:
    for one in cells:
        subject = one.cell.subject
        flags = " ".join(flag.kind for flag in one.cell.flags)
        print(f"{one.archive} {one.name}: {subject.engine} {subject.quantization} {one.load} {flags}")
        for metric, figure in one.figures.items():
            then = "" if figure.then is None else f", then {figure.then:,.4g}"
            where = "" if figure.is_inside else "  outside"
            print(
                f"  {metric:12} measured {figure.measured:8,.4g}  predicted {figure.value:8,.4g} "
                f"({figure.low:,.4g} to {figure.high:,.4g}{then}){where}"
            )


def list_summaries(cells: Sequence[PredictedCell]) -> Iterator[str]:
    yield "| cells | number | TTFT | TPOT | tok/s |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    clean = [one for one in cells if one.is_clean]
    engines = sorted({one.cell.subject.engine for one in clean})
    groups = {
        "clean": clean,
        "clean, one request": [one for one in clean if one.cell.load.concurrency == 1],
        "clean, several requests": [one for one in clean if one.cell.load.concurrency != 1],
        **{f"clean, {name}": [one for one in clean if one.cell.subject.engine == name] for name in engines},
        "flagged": [one for one in cells if not one.is_clean],
    }
    for name, chosen in groups.items():
        if chosen:
            found = (summarize(chosen, metric) for metric in METRICS)
            shown = " | ".join(f"{error * 100:.0f} %, {inside * 100:.0f} %" for error, inside in found)
            yield f"| {name} | {len(chosen)} | {shown} |"


def list_page_rows(cells: Sequence[PredictedCell]) -> Iterator[str]:
    """The rows of docs/gpu.md: measured, and predicted with the 80 % band."""
    yield "| engine | concurrency | TTFT ms | predicted | TPOT ms | predicted | tok/s | predicted |"
    yield "| --- | ---: | ---: | --- | ---: | --- | ---: | --- |"
    for key, label in SHOWN.items():
        for one in (one for one in cells if (one.archive, one.name) == key):
            figures = " | ".join(
                f"{format_figure(found.measured)} | {format_figure(found.value)} "
                f"({format_figure(found.low)} to {format_figure(found.high)})"
                for found in (one.figures[metric] for metric in METRICS)
            )
            yield f"| {label} | {one.cell.load.concurrency} | {figures} |"


def write_csv(cells: Sequence[PredictedCell]) -> None:
    writer = csv.writer(sys.stdout)
    writer.writerow(("archive", "name", "engine", "quantization", "load", "flags", "metric", *Comparison._fields))
    for one in cells:
        subject, flags = one.cell.subject, " ".join(flag.kind for flag in one.cell.flags)
        named = (one.archive, one.name, subject.engine, subject.quantization, one.load, flags)
        for metric, figure in one.figures.items():
            writer.writerow((*named, metric, *("" if value is None else f"{value:.4g}" for value in figure)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clean", action="store_true", help="leave out cells with a flag")
    parser.add_argument("--csv", action="store_true", help="write a table instead")
    parser.add_argument("--page", action="store_true", help="print the tables of docs/gpu.md")
    given = parser.parse_args()
    cells = [one for one in list_cells() if one.is_clean or not given.clean]
    if given.csv:
        write_csv(cells)
        return
    if given.page:
        print(*list_page_rows(cells), "", sep="\n")
    else:
        print_cells(cells)
    print(*list_summaries(cells), sep="\n")


if __name__ == "__main__":
    main()
