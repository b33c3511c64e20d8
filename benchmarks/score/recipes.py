"""Write `published/data/recipes.json`: settings from InferenceX's repository that its results omit.

    python benchmarks/score/recipes.py CHECKOUT WORKERS

CHECKOUT is a clone of https://github.com/SemiAnalysisAI/InferenceX with its history (Apache-2.0), because results
belong to the configuration of their time. WORKERS is a clone of https://github.com/NVIDIA/srt-slurm (Apache-2.0), which
contains the settings of the workers. Only counts and sizes are kept.
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

DATA = Path(__file__).resolve().parents[2] / "src" / "bedplate" / "published" / "data" / "recipes.json"
SOURCE = "https://github.com/SemiAnalysisAI/InferenceX"
PATHS = (".github/configs/nvidia-master.yaml", "configs/nvidia-master.yaml")
USUAL_GUESSES = 3
"""Drafted tokens where a recipe only says that it uses speculative decoding."""
SINCE, UNTIL = "2025-11-25", "2026-07-01"
MODELS = {
    "dsr1": "deepseek-r1", "dsr1-fp8": "deepseek-r1", "DeepSeek-R1-0528": "deepseek-r1", "dsv4": "deepseek-v4",
    "gptoss": "gpt-oss", "kimik2.5": "kimi-k2.5", "glm5": "glm-5", "minimaxm2.5": "minimax-m2.5",
    "minimaxm3": "minimax-m3", "qwen3.5": "qwen3.5",
}  # fmt: skip
ENGINES = {
    "dynamo-trt": "tensorrt-llm", "dynamo-sglang": "sglang", "dynamo-vllm": "vllm",
    "trt": "tensorrt-llm", "sglang": "sglang", "vllm": "vllm",
}  # fmt: skip


def git(checkout: str, *arguments: str) -> str:
    return subprocess.run(["git", "-C", checkout, *arguments], capture_output=True, text=True, check=False).stdout


def entries(checkout: str) -> Iterator[tuple[dict[str, Any], int, int]]:
    """Every configuration that was ever valid, with its first and last day, such as 260131."""
    days: dict[str, list[int]] = defaultdict(list)
    log = git(checkout, "log", "--format=%H %cs", f"--since={SINCE}", f"--until={UNTIL}", "--", *PATHS)
    later = int(UNTIL[2:].replace("-", ""))
    for line in log.splitlines():
        commit, day = line.split()
        text = next(filter(None, (git(checkout, "show", f"{commit}:{path}") for path in PATHS)), "")
        since = int(day[2:].replace("-", ""))
        for piece in re.split(r"\n(?=[A-Za-z][\w.\-]*:)", text):
            # Valid until the next change of the file, which precedes this one in the log.
            days[piece.strip()] += [since, later]
        later = since
    for piece, inside in days.items():
        for entry in yaml.load(piece, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)).values():
            yield entry, min(inside), max(inside)


class Workers:
    """Settings of workers that a configuration names by file: `CONFIG_FILE=recipes/…yaml[:part]`."""

    def __init__(self, checkout: str) -> None:
        self.checkout = checkout
        self.read: dict[str, Any] = {}

    def sizes(self, sides: tuple[dict[str, Any], ...], prompt: int, guesses: int) -> tuple[int, int, int]:
        """Drafted tokens, sequences per decode worker (or per rank with separate sequences), and tokens per pass of a
        prefill rank.

        0 where the recipe does not specify it.
        """
        settings = " ".join(str(side.get("additional-settings")) for side in sides)
        named = re.search(r"[_-]batch[_-]?(\d+)", settings) or re.search(r"[_-]bs?(\d+)[_-]", settings)
        batch = int(named[1]) if named else 0
        found = re.search(r"CONFIG_FILE=([\w./-]+\.yaml)(?::(\w+)(?:\[(\d+)\])?)?", settings)
        prefill, decode = self.settings(found[1], found[2], int(found[3] or 0)) if found else ({}, {})
        if decode:
            # SGLang counts the sequences of all ranks together.
            each = int(decode.get("max-running-requests") or 0) // ranks(decode)
            batch = int(decode.get("max_batch_size") or each or batch)
        drafts = (decode.get("speculative_config") or {}).get("num_nextn_predict_layers")
        guessed = int(decode.get("speculative-num-steps") or drafts or USUAL_GUESSES) if guesses else 0
        tokens = int(prefill.get("max_num_tokens") or int(prefill.get("chunked-prefill-size") or 0) // ranks(prefill))
        requests = int(prefill.get("max_batch_size") or int(prefill.get("max-running-requests") or 0) // ranks(prefill))
        most = int(prefill.get("max-prefill-tokens") or tokens)
        return guessed, batch, min(tokens, most, requests * prompt)

    def settings(self, path: str, part: str | None, place: int) -> tuple[dict[str, Any], dict[str, Any]]:
        if path not in self.read:
            commit = git(self.checkout, "log", "-1", "--format=%H", "--diff-filter=AM", "HEAD", "--", path).strip()
            text = git(self.checkout, "show", f"{commit}:{path}") if commit else ""
            self.read[path] = yaml.safe_load(text) or {}
        found = self.read[path]
        if part:
            found = laid_over(found.get("base", {}), found.get(part, {}), place)
        backend = found.get("backend", {})
        both = backend.get("sglang_config") or backend.get("trtllm_config") or {}
        return both.get("prefill", {}), both.get("decode", {})


def ranks(settings: dict[str, Any]) -> int:
    """Ranks with separate sequences."""
    return int(settings.get("dp-size") or settings.get("data-parallel-size") or 1)


def laid_over(below: Any, above: Any, place: int) -> Any:
    """The element of a list at this position."""
    if isinstance(above, dict):
        under = below if isinstance(below, dict) else {}
        return {**under, **{name: laid_over(under.get(name), value, place) for name, value in above.items()}}
    return above[place] if isinstance(above, list) and place < len(above) else above


Point = tuple[int | str, ...]
Found = dict[str, dict[Point, tuple[int, int]]]


def recipes(checkout: str, settings: Workers) -> tuple[Found, Found]:
    """Recipes of disaggregated workers and of servers, by model, weights, chip, engine and lengths.

    Points are those of `recipes.WorkerRecipe` and `recipes.Server`, in their order, with the first and the last day.
    """
    workers: Found = defaultdict(dict)
    servers: Found = defaultdict(dict)
    for entry, first, last in entries(checkout):
        model, engine = MODELS.get(entry["model-prefix"]), ENGINES.get(entry["framework"])
        chip, image = entry["runner"].split("-")[0], str(entry["image"]).rpartition(":")[2]
        lengths = entry.get("seq-len-configs") or entry.get("scenarios", {}).get("fixed-seq-len", [])
        for length in lengths if model and engine else []:
            name = f"{model} {entry['precision']} {chip} {engine} {length['isl']} {length['osl']}"
            for point in length["search-space"]:
                apart = entry.get("disagg")
                found = workers if apart else servers
                keys = of_workers(point, settings, int(length["isl"])) if apart else of_servers(point)
                for key in keys:
                    days = found[name].get((*key, image), (first, last))
                    found[name][*key, image] = min(first, days[0]), max(last, days[1])
    return workers, servers


def guesses(point: dict[str, Any]) -> int:
    return int(point.get("spec-decoding", "none") != "none")


def of_workers(point: dict[str, Any], settings: Workers, prompt: int) -> Iterator[Point]:
    sides = point.get("prefill") or {}, point.get("decode") or {}
    if not all(side.get("num-worker") and side.get("tp") for side in sides):
        return
    numbers = [
        int(number)
        for side in sides
        for number in (side["num-worker"], side["tp"], side.get("ep") or 1, bool(side.get("dp-attn")))
    ]
    for streams in point.get("conc-list") or filter(None, [point.get("conc")]):
        yield (streams, *numbers, *settings.sizes(sides, prompt, guesses(point)))


def of_servers(point: dict[str, Any]) -> Iterator[Point]:
    if "tp" not in point:
        return
    numbers = (point["tp"], point.get("ep") or 1, int(bool(point.get("dp-attn"))), guesses(point))
    if "conc-start" in point:
        yield (point["conc-start"], point["conc-end"], *numbers)
    for streams in point.get("conc-list") or []:
        yield (streams, streams, *numbers)


def written(found: Found) -> str:
    listed = {name: sorted((*key, *days) for key, days in found[name].items()) for name in sorted(found)}
    lines = [f"  {json.dumps(name)}: {json.dumps(points, separators=(',', ':'))}" for name, points in listed.items()]
    return "{\n" + ",\n".join(lines) + "\n }"


def main() -> None:
    workers, servers = recipes(sys.argv[1], Workers(sys.argv[2]))
    # A server's recipe adds to its results only where it uses speculative decoding.
    servers = {name: points for name, points in servers.items() if any(point[5] for point in points)}
    DATA.write_text(
        f'{{\n "source": {json.dumps(SOURCE)},\n "workers": {written(workers)},\n "servers": {written(servers)}\n}}\n'
    )


if __name__ == "__main__":
    main()
