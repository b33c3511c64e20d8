"""Write `decide/estimate/data/recipes.json`: what InferenceX sets for workers that are apart, from its repository.

    python benchmarks/score/recipes.py CHECKOUT

CHECKOUT is a clone of https://github.com/SemiAnalysisAI/InferenceX with its history (Apache-2.0): results are of what
its configuration said at the time. Only counts and sizes are kept.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

DATA = Path(__file__).resolve().parents[2] / "src" / "bedplate" / "decide" / "estimate" / "data" / "recipes.json"
SOURCE = "https://github.com/SemiAnalysisAI/InferenceX"
PATHS = (".github/configs/nvidia-master.yaml", "configs/nvidia-master.yaml")
SINCE, UNTIL = "2025-11-25", "2026-07-01"
MODELS = {
    "dsr1": "deepseek-r1", "dsr1-fp8": "deepseek-r1", "DeepSeek-R1-0528": "deepseek-r1", "dsv4": "deepseek-v4",
    "gptoss": "gpt-oss", "kimik2.5": "kimi-k2.5", "glm5": "glm-5", "minimaxm2.5": "minimax-m2.5",
    "minimaxm3": "minimax-m3", "qwen3.5": "qwen3.5",
}  # fmt: skip
ENGINES = {"dynamo-trt": "tensorrt-llm", "dynamo-sglang": "sglang", "dynamo-vllm": "vllm"}


def git(checkout: str, *arguments: str) -> str:
    return subprocess.run(["git", "-C", checkout, *arguments], capture_output=True, text=True, check=False).stdout


def entries(checkout: str) -> Iterator[tuple[dict[str, Any], int, int]]:
    """Every configuration of workers apart that was ever in force, with its first and last day, 260131."""
    days: dict[str, list[int]] = defaultdict(list)
    log = git(checkout, "log", "--format=%H %cs", f"--since={SINCE}", f"--until={UNTIL}", "--", *PATHS)
    later = int(UNTIL[2:].replace("-", ""))
    for line in log.splitlines():
        commit, day = line.split()
        text = next(filter(None, (git(checkout, "show", f"{commit}:{path}") for path in PATHS)), "")
        since = int(day[2:].replace("-", ""))
        for piece in re.split(r"\n(?=[A-Za-z][\w.\-]*:)", text):
            if "disagg: true" in piece:
                # In force until the next change of the file, which the log has before this one.
                days[piece.strip()] += [since, later]
        later = since
    for piece, inside in days.items():
        for entry in yaml.load(piece, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)).values():
            yield entry, min(inside), max(inside)


def batch(*sides: dict[str, Any]) -> int:
    """As the names of recipe files have it: the sequences of a decode worker, or of one of its ranks."""
    settings = " ".join(str(side.get("additional-settings")) for side in sides)
    found = re.search(r"[_-]batch[_-]?(\d+)", settings) or re.search(r"[_-]bs?(\d+)[_-]", settings)
    return int(found[1]) if found else 0


def recipes(checkout: str) -> dict[str, list[tuple[int | str, ...]]]:
    """By model, weights, chip, engine and lengths; the rest is that of `recipes.Recipe`, in its order."""
    found: dict[str, dict[tuple[int | str, ...], tuple[int, int]]] = defaultdict(dict)
    for entry, first, last in entries(checkout):
        model, engine = MODELS.get(entry["model-prefix"]), ENGINES.get(entry["framework"])
        chip, image = entry["runner"].split("-")[0], str(entry["image"]).rpartition(":")[2]
        lengths = entry.get("seq-len-configs") or entry.get("scenarios", {}).get("fixed-seq-len", [])
        for length in lengths if model and engine else []:
            name = f"{model} {entry['precision']} {chip} {engine} {length['isl']} {length['osl']}"
            for point in length["search-space"]:
                sides = point.get("prefill") or {}, point.get("decode") or {}
                if not all(side.get("num-worker") and side.get("tp") for side in sides):
                    continue
                numbers = [
                    int(number)
                    for side in sides
                    for number in (side["num-worker"], side["tp"], side.get("ep") or 1, bool(side.get("dp-attn")))
                ]
                guessing = int(point.get("spec-decoding", "none") != "none")
                for streams in point.get("conc-list") or filter(None, [point.get("conc")]):
                    key = (streams, *numbers, guessing, batch(*sides), image)
                    days = found[name].get(key, (first, last))
                    found[name][key] = min(first, days[0]), max(last, days[1])
    return {name: sorted((*key, *days) for key, days in found[name].items()) for name in sorted(found)}


def main() -> None:
    lines = [
        f"  {json.dumps(name)}: {json.dumps(found, separators=(',', ':'))}"
        for name, found in recipes(sys.argv[1]).items()
    ]
    workers = ",\n".join(lines)
    DATA.write_text(f'{{\n "source": {json.dumps(SOURCE)},\n "workers": {{\n{workers}\n }}\n}}\n')


if __name__ == "__main__":
    main()
