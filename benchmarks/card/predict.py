"""What this version predicts for every cell of the archives in `results`, beside what was measured.

    python benchmarks/card/predict.py
    python benchmarks/card/predict.py --clean --csv > predicted.csv
    python benchmarks/card/predict.py --page        # the tables of docs/gpu.md

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
from typing import Any, Literal, NamedTuple

import msgspec

from bedplate.decide.estimate import compute_expectation
from bedplate.decide.estimate.arrivals import BENCH
from bedplate.decide.memory import add_start_memory, fit
from bedplate.engines import load_engines
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.judge.roofline import apply_quantization
from bedplate.measure.summary import make_row
from bedplate.values import Hardware, Weights, Workload, replace_fields
from bedplate.values.fit import DeviceNeed, Offload
from bedplate.values.record import from_json
from bedplate.values.run import Cell, Run
from bedplate.values.units import format_figure

RESULTS = Path(__file__).resolve().parent / "results"
CHANGED = ("enforce-eager", "num-gpu-blocks-override", "speculative-config", "shared-gpu/")
"""Parts of the names of runs whose sides differ from every plan."""
GIB = 2**30
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
    ("h200-2026-11-18-f", "pytorch-8b"): "F: PyTorch, 8 B, BF16",
    ("h200-2026-11-18-g", "pytorch-8b"): "G: PyTorch, 8 B, BF16",
    ("h200-2026-11-19-h", "pytorch-64"): "H: PyTorch, 8 B, BF16",
}
"""The cells that docs/gpu.md lists, by archive and name, and what it calls them."""


MEMORY = {
    ("h200-2026-11-17", "vllm-8b/run.json"): "vLLM, 8 B, FP8 (A)",
    ("h200-2026-11-17", "sglang-8b/run.json"): "SGLang, 8 B, FP8 (A)",
    ("h200-2026-11-17-c", "moe-vllm/run.json"): "vLLM, experts, FP8 (C)",
    ("h200-2026-11-17-d", "moe-sglang/run.json"): "SGLang, experts, FP8 (D)",
    ("h200-2026-11-18-e", "mla/vllm-load-format-dummy.json"): "vLLM, latent attention, FP8 (E)",
    ("h200-2026-11-18-f", "dense-32b/vllm-load-format-dummy.json"): "vLLM, 32 B, FP8 (F)",
    ("h200-2026-11-18-g", "sglang-8b/run.json"): "SGLang, 8 B, BF16 (G)",
    ("h200-2026-11-18-g", "moe-sglang/run.json"): "SGLang, experts, BF16 (G)",
}
"""The rows of the memory table of docs/gpu.md, by archive and run file; the source of these weights has 16 bits."""

TOTAL_MEMORY = {
    ("h200-2026-11-18-f", "llama.cpp/run.json"): "llama.cpp, 8 B, Q4_K (F)",
    ("h200-2026-11-18-g", "moe-llama.cpp/run.json"): "llama.cpp, experts, Q4_K (G)",
    ("h200-2026-11-18-e", "offload/run.json"): "llama.cpp, layers on the host (E)",
    ("h200-2026-11-18-f", "pytorch-8b/run.json"): "PyTorch, 8 B, BF16 (F)",
}
"""Engines whose logs do not list the parts."""
LEFT_FREE = {"offload/run.json": 4 << 30}
"""Runs beside a process that left only so many bytes of the card free."""


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


def predict_memory(run: Run, free_bytes: int | None = None) -> DeviceNeed:
    """The memory of the largest load of this run on the card, and of the start before it."""
    cell = max(run.cells, key=lambda one: one.load.concurrency or 0)
    subject, load, engine = cell.subject, cell.load, load_engines()[cell.subject.engine]
    if subject.settings is None or subject.quantization is None:
        raise ValueError("a run without settings")
    (card,) = get_hardware().accelerators
    hardware = replace_fields(get_hardware(), accelerators=(replace_fields(card, free_bytes=free_bytes),))
    loaded = apply_quantization(run.models[0], subject.quantization)
    made: Literal["as it is", "while loading"] = "while loading" if subject.quantization == "FP8" else "as it is"
    weights = Weights(label=subject.quantization, made=made, format="safetensors")
    work = Workload(concurrency=load.concurrency, prompt_tokens=load.prompt_tokens, output_tokens=load.output_tokens)
    layout, settings = subject.parallelism, subject.settings
    found = fit(hardware if free_bytes else get_hardware(), loaded, work, engine, parallelism=layout, settings=settings)
    return add_start_memory(found, engine, weights, run.models[0], loaded, layout, settings).devices[0]


def list_total_memory_rows() -> Iterator[str]:
    yield "| engine | measured | predicted | weights | cache | rest |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    for (archive, name), label in TOTAL_MEMORY.items():
        run = from_json(Run, read_json_files(RESULTS / f"{archive}.tar.xz")[name])
        need = predict_memory(run, LEFT_FREE.get(name))
        measured = max(make_row(cell, None, None).peak_mem_gb or 0.0 for cell in run.cells)
        rest = need.activation_bytes.value + need.overhead_bytes.value
        parts = (need.total_bytes, need.weights_bytes, need.kv_bytes, rest)
        yield f"| {label} | {measured:.1f} | {' | '.join(f'{part / 1e9:.1f}' for part in parts)} |"


def list_memory_predictions() -> Iterator[str]:
    yield "| engine | CUDA graphs, GiB | peak while loading, GiB |"
    yield "| --- | --- | ---: |"
    files = {archive: read_json_files(RESULTS / f"{archive}.tar.xz") for archive in {key[0] for key in MEMORY}}
    for (archive, name), label in MEMORY.items():
        need = predict_memory(from_json(Run, files[archive][name]))
        graphs, peak = need.graph_bytes, need.loading_bytes or 0
        shown = [f"{one / GIB:.2f}" for one in (graphs.value, graphs.low, graphs.high)] if graphs else ["", "", ""]
        yield f"| {label} | {shown[0]} ({shown[1]} to {shown[2]}) | {peak / GIB:.1f} |"


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
    parser.add_argument(
        "--page", action="store_true", help="print the tables of docs/gpu.md and its predictions of memory"
    )
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
    if given.page:
        print("", *list_memory_predictions(), "", *list_total_memory_rows(), sep="\n")


if __name__ == "__main__":
    main()
