"""Write `benchmarks/score/first_party/h200.csv`: the measurements of vLLM and SGLang in `benchmarks/card/results`.

    python benchmarks/score/first_party.py

Only cells without a flag are taken: of a throttled GPU or a busy machine, a figure says little about the engine. Every
row names its archive and run file. The model has random weights and the shape of Llama 3.1 8B, with a smaller
vocabulary.
"""

from __future__ import annotations

import csv
import json
import statistics
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "card" / "results"
TARGET = HERE / "first_party" / "h200.csv"
COLUMNS = (
    "row_id", "source", "source_path", "date", "hardware", "count", "engine", "engine_version", "backend", "model",
    "quantization", "tensor_parallel", "parallelism", "concurrency", "prompt_tokens", "output_tokens", "context_depth",
    "metric", "value", "scenario", "notes",
)  # fmt: skip
SHAPES = {"8b": "meta-llama/Llama-3.1-8B"}
USUAL_RUNS = ("vllm.json", "sglang.json", "run.json", "vllm-defaults.json", "vllm-enforce-eager.json")
"""Run files with the plan's or the engine's settings; others have a bottleneck on purpose."""


def read_runs() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for archive in sorted(RESULTS.glob("*.tar.xz")):
        with tarfile.open(archive) as files:
            for member in files.getmembers():
                if member.name.rpartition("/")[2] not in USUAL_RUNS:
                    continue
                content = files.extractfile(member)
                found = json.load(content) if content else {}
                if found.get("schema") == "run/1":
                    yield archive.name, member.name, found


def make_rows() -> Iterator[dict[str, str]]:
    number = 0
    for archive, name, run in read_runs():
        for cell in run["cells"]:
            subject, load = cell["subject"], cell["load"]
            samples = [one for repeat in cell["repeats"] for one in repeat["samples"] if "ttft_ms" in one]
            taken = not cell["flags"] and load["arrivals"] == "closed" and not load["shared_prefix_tokens"]
            if not taken or subject["model"] not in SHAPES or len(samples) < 10:
                continue
            eager = "; enforce_eager" if "--enforce-eager" in subject["argv"] else ""
            tokens = (subject["settings"] or {}).get("batch_tokens")
            tpot = [(one["duration_ms"] - one["ttft_ms"]) / (one["output_tokens"] - 1) for one in samples]
            values = {
                "ttft_ms": statistics.median(one["ttft_ms"] for one in samples),
                "tpot_ms": statistics.median(tpot),
            }
            for metric, value in values.items():
                number += 1
                yield {
                    "row_id": f"H200-{number:03}", "source": "bedplate", "source_path": f"{archive}:{name}",
                    "date": cell["at"][:10], "hardware": "NVIDIA H200 SXM 141GB", "count": "1",
                    "engine": subject["engine"], "engine_version": subject["engine_version"],
                    "model": SHAPES[subject["model"]], "quantization": subject["quantization"].lower(),
                    "tensor_parallel": "1", "concurrency": str(load["concurrency"]),
                    "prompt_tokens": str(load["prompt_tokens"]), "output_tokens": str(load["output_tokens"]),
                    "metric": metric, "value": f"{value:.4g}", "scenario": "bedplate bench, closed loop",
                    "notes": f"median of {len(samples)} requests"
                    + (f"; max_num_batched_tokens={tokens}" if tokens else "") + eager,
                }  # fmt: skip


def main() -> None:
    with TARGET.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(make_rows())


if __name__ == "__main__":
    main()
