"""Write bedplate's own measurements as rows of the fits: `first_party/h200.csv` (vLLM and SGLang under load, for
`fit_serving.py`) and `more/first_party.csv` (one or a few streams, for `fit_local.py`).

    python benchmarks/score/first_party.py

Reads all run files in `benchmarks/card/results` and `tests/captures/runs`. Every row names its run file. Only cells
without a flag are taken: of a throttled GPU or a busy machine, a figure says little about the engine. Runs with a
bottleneck on purpose, with weights on the host, with sessions, or with speculation on random weights are left out.
"""

from __future__ import annotations

import csv
import lzma
import statistics
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "card" / "results"
CAPTURES = HERE.parents[1] / "tests" / "captures" / "runs"
UNDER_LOAD, ONE_STREAM = HERE / "first_party" / "h200.csv", HERE / "more" / "first_party.csv"
COLUMNS = (
    "row_id", "source", "source_path", "date", "hardware", "count", "engine", "engine_version", "backend", "model",
    "quantization", "tensor_parallel", "parallelism", "concurrency", "prompt_tokens", "output_tokens", "context_depth",
    "metric", "value", "scenario", "notes",
)  # fmt: skip
LEFT_OUT = ("slots-8", "num-gpu-blocks-override", "speculative-config", "offload/", "dense-32b/", "agent/",
            "moe-llama.cpp/", "sglang-defaults/")  # fmt: skip
"""Parts of the names of runs that are left out. docs/estimates.md says why."""
LEAST_PROMPT_MS = 100.0
"""Prompts that take less are no rows of the prefill speed: accepting a request takes a few milliseconds, too."""


class RandomShape(NamedTuple):
    """A model with random weights: the published model whose layers it has, and how it differs."""

    model: str
    notes: str


RANDOM = "random weights; model_vocabulary=49152"
SHAPES = {
    "8b": RandomShape("meta-llama/Llama-3.1-8B", RANDOM),
    "llama-8b": RandomShape("meta-llama/Llama-3.1-8B", RANDOM),
    "llama-8b-bf16": RandomShape("meta-llama/Llama-3.1-8B", RANDOM),
    "llama-8b-exl3": RandomShape("meta-llama/Llama-3.1-8B", RANDOM),
    "moe": RandomShape("Qwen/Qwen3-30B-A3B", f"{RANDOM}; model_layers=12"),
    "mla": RandomShape("deepseek-ai/DeepSeek-V2-Lite", RANDOM),
}
CHIPS = (
    ("H200", "NVIDIA H200 SXM 141GB"),
    # Virtual machines that do not name their chip: these have the same cores and memory channels.
    ("Neoverse-N1", "AWS Graviton2"),
    ("Xeon", "Intel Xeon Platinum 8480+"),
)
CORES = {"AWS Graviton2": 2, "Intel Xeon Platinum 8480+": 1}
"""Physical cores of the virtual machines: two hyperthreads share the Xeon's core. Together they compute the 213 billion
32-bit operations per second of one core (run files, `operations_s`)."""
WHEEL_SETS = {"AWS Graviton2": "neon", "Intel Xeon Platinum 8480+": "avx2"}
"""The package of llama.cpp is compiled for processors without dot products."""


class MeasuredCell(NamedTuple):
    path: str
    chip: str
    cell: dict[str, Any]

    @property
    def load(self) -> dict[str, Any]:
        return dict(self.cell["load"])

    @property
    def samples(self) -> list[dict[str, Any]]:
        return [one for repeat in self.cell["repeats"] for one in repeat["samples"] if "ttft_ms" in one]

    @property
    def ttft_ms(self) -> float:
        return float(statistics.median(one["ttft_ms"] for one in self.samples))

    @property
    def tpot_ms(self) -> float:
        times = [(one["duration_ms"] - one["ttft_ms"]) / (one["output_tokens"] - 1) for one in self.samples]
        return float(statistics.median(times))

    @property
    def tok_s(self) -> float:
        """Output tokens per second of a closed loop; unlike the mean of a window, without its first and last round."""
        duration_ms = statistics.median(one["duration_ms"] for one in self.samples)
        return float(self.load["concurrency"] * self.load["output_tokens"] * 1e3 / duration_ms)

    @property
    def is_under_load(self) -> bool:
        """Whether `fit_serving.py` predicts it: a serving engine on a GPU."""
        return self.cell["subject"]["engine"] in ("vllm", "sglang") and "H200" in self.chip


def read_cells() -> Iterator[MeasuredCell]:
    """The cells of all run files that the rows are made of."""
    for path, run in _read_runs():
        if any(part in path for part in LEFT_OUT):
            continue
        chip = next(name for word, name in CHIPS if word in run["environment"]["hardware"])
        for cell in run["cells"]:
            found = MeasuredCell(path, chip, cell)
            named = cell["subject"]["engine"] != "endpoint"
            if named and not cell["flags"] and cell["load"]["arrivals"] == "closed" and found.samples:
                yield found


def _read_runs() -> Iterator[tuple[str, dict[str, Any]]]:
    for archive in sorted(RESULTS.glob("*.tar.xz")):
        with tarfile.open(archive, "r|xz") as files:
            for member in files:
                if not member.name.endswith(".json"):
                    continue
                content = files.extractfile(member)
                found = msgspec.json.decode(content.read()) if content else None
                if isinstance(found, dict) and found.get("schema") == "run/1":
                    yield f"{archive.name}:{member.name}", found
    for path in sorted(CAPTURES.glob("*.json.xz")):
        found = msgspec.json.decode(lzma.decompress(path.read_bytes()))
        if found.get("schema") == "run/1":
            yield path.relative_to(HERE.parents[1]).as_posix(), found


def make_load_rows(cell: MeasuredCell) -> Iterator[dict[str, str]]:
    """TTFT and TPOT. A prefix that all prompts share is in the cache, unless the cache is off."""
    load = cell.load
    shared = 0 if "no-enable-prefix-caching" in cell.path else load["shared_prefix_tokens"]
    lengths = {"prompt_tokens": str(load["prompt_tokens"] - shared), "context_depth": str(shared or "")}
    for metric, value in (("ttft_ms", cell.ttft_ms), ("tpot_ms", cell.tpot_ms)):
        yield _make_row(cell, metric, value, "bedplate bench, closed loop", **lengths)


def make_stream_rows(cell: MeasuredCell) -> Iterator[dict[str, str]]:
    """Speeds of one stream, and of the whole loop of more."""
    load = cell.load
    if load["shared_prefix_tokens"] or "enforce-eager" in cell.path:
        return  # Neither is a setting of one stream's estimate.
    if load["concurrency"] > 1:
        if not cell.is_under_load:
            yield _make_row(cell, "output_tok_s_total", cell.tok_s, "bedplate bench, closed loop")
        return
    decode = {"prompt_tokens": "0", "context_depth": str(load["prompt_tokens"])}
    yield _make_row(cell, "decode_tok_s_single", 1e3 / cell.tpot_ms, "bedplate bench, decode phase", **decode)
    prompt_ms = cell.ttft_ms - cell.tpot_ms
    if prompt_ms > LEAST_PROMPT_MS:
        speed = load["prompt_tokens"] * 1e3 / prompt_ms
        yield _make_row(cell, "prefill_tok_s", speed, "bedplate bench, prompt phase", output_tokens="0")


def _make_row(cell: MeasuredCell, metric: str, value: float, scenario: str, **fields: str) -> dict[str, str]:
    subject, load = cell.cell["subject"], cell.load
    shape = SHAPES.get(subject["model"], RandomShape(subject["model"], ""))
    notes = [f"median of {len(cell.samples)} requests", *filter(None, [shape.notes]), *_list_settings(cell)]
    return {
        "row_id": "", "source": "bedplate", "source_path": cell.path, "date": cell.cell["at"][:10],
        "hardware": cell.chip, "count": "1", "engine": subject["engine"], "engine_version": subject["engine_version"],
        "backend": subject["device"], "model": shape.model, "quantization": subject["quantization"].lower(),
        "tensor_parallel": "1", "concurrency": str(load["concurrency"]), "prompt_tokens": str(load["prompt_tokens"]),
        "output_tokens": str(load["output_tokens"]), "metric": metric, "value": f"{value:.4g}", "scenario": scenario,
        "notes": "; ".join(notes), **fields,
    }  # fmt: skip


def _list_settings(cell: MeasuredCell) -> Iterator[str]:
    """The settings that change the speed, in the spelling of published rows."""
    subject = cell.cell["subject"]
    settings = subject["settings"] or {}
    if settings.get("batch_tokens") and cell.is_under_load:
        yield f"max_num_batched_tokens={settings['batch_tokens']}"
    if subject["device"] == "cpu":
        yield f"threads={CORES[cell.chip]}"
    if "enforce-eager" in cell.path:
        yield "enforce_eager"
    if "kv-cache-dtype-fp8" in cell.path:
        yield "kv_cache_dtype=fp8"
    if subject["engine"] == "llama.cpp":
        yield "fa=1"
        if subject["build"] == "wheel" and cell.chip in WHEEL_SETS:
            yield f"instruction_sets={WHEEL_SETS[cell.chip]}"


def make_tables(cells: Sequence[MeasuredCell]) -> dict[Path, list[dict[str, str]]]:
    tables = {
        UNDER_LOAD: [row for cell in cells if cell.is_under_load for row in make_load_rows(cell)],
        ONE_STREAM: [row for cell in cells for row in make_stream_rows(cell)],
    }
    for path, rows in tables.items():
        for number, row in enumerate(rows, 1):
            row["row_id"] = f"{path.stem.replace('_', '-').upper()}-{number:03}"
    return tables


def main() -> None:
    for path, rows in make_tables(list(read_cells())).items():
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
