"""Compare predicted memory with published peaks: for each source the rows, the refused rows, and the error.

Reads the tables in a folder of measurements (`--truth`), rows of the metric `peak_memory_gb`. Some tables use MB or GiB
under that name; the unit in which weights and KV cache come nearest is assumed.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

from bedplate.decide.memory import fit
from bedplate.errors import BedplateError
from bedplate.facts.chips import find_chip
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.facts.known_models import find_model
from bedplate.values import Hardware, Model, Parallelism, Workload

ENGINES = {"hf transformers": "pytorch", "mlx (mlx-lm)": "mlx", "vllm": "vllm", "llama.cpp": "llama.cpp"}
UNITS = {"GB": 1e9, "GiB": 2.0**30, "MB": 1e6, "MiB": 2.0**20}


def rows(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                if row.get("metric") == "peak_memory_gb":
                    yield path.stem, row


def unit_of(table: list[dict[str, str]]) -> str:
    """The unit in which most rows can hold weights and KV cache, with the least additional memory."""

    def least(row: dict[str, str]) -> float:
        model = model_of(row)
        return model.weight_bytes + model.compute_kv_bytes(
            int(row["prompt_tokens"] or 0) + int(row["output_tokens"] or 0)
        )

    def misfit(unit: str) -> float:
        shares = [float(row["value"]) * UNITS[unit] / least(row) for row in table]
        # A value below weights and KV cache is impossible, except for rounding; one far above is only improbable.
        return statistics.mean(abs(share - 1) + (10.0 if share < 0.985 else 0.0) for share in shares)

    return min(UNITS, key=misfit)


def model_of(row: dict[str, str]) -> Model:
    words = row["quantization"]
    return find_model(row["model"] if words.upper() == "BF16" else f"{row['model']} {words}")


def hardware_of(row: dict[str, str], count: int) -> Hardware:
    if row["hardware"].startswith("Apple"):
        name, _, memory = row["hardware"].rpartition(" ")
        return make_simulated_hardware({"accelerator": name, "ram_gb": float(memory.removesuffix("GB")), "os": "macos"})
    # Tables say "A100 80GB" without the form factor, which makes no difference to memory.
    chip = find_chip(row["hardware"], guess=True).chip
    return make_simulated_hardware({"accelerator": chip.name, "count": count, "ram_gb": 512, "os": "linux"})


def predicted_bytes(row: dict[str, str]) -> float:
    """All devices together, as the tables count it."""
    model, count = model_of(row), int(row["count"] or 1)
    if not row["prompt_tokens"]:
        raise ValueError("the prompt's length is not stated")
    workload = Workload(
        concurrency=int(row["concurrency"] or 1),
        prompt_tokens=int(row["prompt_tokens"]),
        output_tokens=int(row["output_tokens"]),
    )
    engine = ENGINES[row["engine"].lower()]
    # Transformers distributes a model over cards by layer.
    found = fit(hardware_of(row, count), model, workload, engine, parallelism=Parallelism(pipeline=count))
    return float(sum(need.count * need.total_bytes for need in found.devices))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--truth", type=Path, default=Path(__file__).parents[3] / "shared" / "truth")
    options = parser.parse_args()
    if not options.truth.is_dir():
        sys.exit(f"no tables in {options.truth}; pass their folder with --truth DIR")
    tables: dict[str, list[dict[str, str]]] = {}
    for source, row in rows(options.truth):
        tables.setdefault(source, []).append(row)
    print("| source | engine | unit | rows | refused | median error | mean error | bias |")
    print("| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |")
    every: list[float] = []
    for source, table in tables.items():
        unit = unit_of(table)
        errors, refused = [], 0
        for row in table:
            try:
                errors.append(predicted_bytes(row) / (float(row["value"]) * UNITS[unit]) - 1)
            except (BedplateError, KeyError, ValueError) as error:
                refused += 1
                print(f"{source} {row['row_id']}: {error}", file=sys.stderr)
        every += errors
        sizes = [abs(error) for error in errors]
        print(
            f"| {source} | {table[0]['engine']} | {unit} | {len(table)} | {refused} | {statistics.median(sizes):.1%} "
            f"| {statistics.mean(sizes):.1%} | {statistics.mean(errors):+.1%} |"
        )
    print(f"\nall rows: median error {statistics.median(abs(error) for error in every):.1%}")


if __name__ == "__main__":
    main()
