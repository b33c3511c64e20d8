"""Write the memory that vLLM and SGLang took on an H200 as rows: `h200.csv`, from the logs in benchmarks/card/results.

    python benchmarks/memory/h200.py

Each row is one start that was followed by a run. Weights, KV cache and CUDA graphs are as the engine's log reports.
The peaks are of what `nvidia-smi` reported for the GPU twice a second: until the weights were loaded, and from the last
captured graph to the end. The engines' constants for CUDA graphs and the driver context were fitted on these rows.
"""

from __future__ import annotations

import csv
import json
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
RESULTS, ROWS = HERE.parent / "card" / "results", HERE / "h200.csv"
STARTS = {
    ("h200-2026-11-17", "vllm-8b"): "run.json",
    ("h200-2026-11-17", "sglang-8b"): "run.json",
    ("h200-2026-11-17-c", "moe-vllm"): "run.json",
    ("h200-2026-11-17-d", "moe-sglang"): "run.json",
    ("h200-2026-11-18-e", "mla"): "vllm-load-format-dummy.json",
    ("h200-2026-11-18-f", "dense-32b"): "vllm-load-format-dummy.json",
    ("h200-2026-11-18-g", "sglang-8b"): "run.json",
    ("h200-2026-11-18-g", "moe-sglang"): "run.json",
}
"""By archive and step: the run file."""
LOGGED = {
    "vllm": (r"Model loading took ([\d.]+) GiB", r"KV cache memory: ([\d.]+) GiB", r"KV cache size: ([\d,]+) tokens"),
    "sglang": (r"Load weight end.* mem usage=([\d.]+) GB", r"[KV] size: ([\d.]+) GB", r"#tokens: (\d+),"),
}
"""Weights, cache and its tokens. SGLang's GB are of 2^30 bytes (srt/utils of 0.5.15)."""
CAPTURED = {"vllm": r"Graph capturing finished .* took ([\d.]+) GiB", "sglang": r"CUDA graph end.* usage=([\d.]+) GB"}
LOADED = re.compile(r"Model loading took|Load weight end")
STAMP = re.compile(r"\d\d-\d\d \d\d:\d\d:\d\d")


class StartMemory(NamedTuple):
    """One start; sizes in GiB."""

    source_path: str
    engine: str
    engine_version: str
    model: str
    quantization: str
    slots: int
    context_tokens: int
    weights_gib: float
    cache_gib: float
    cache_tokens: int
    graphs_gib: float
    loading_gib: float
    serving_gib: float

    @property
    def rest_gib(self) -> float:
        """What the process takes beside weights and cache."""
        return self.serving_gib - self.weights_gib - self.cache_gib


@lru_cache(maxsize=1)
def read_files(archive: str) -> Mapping[str, str]:
    with tarfile.open(RESULTS / f"{archive}.tar.xz") as tar:
        streams = {member.name.partition("/")[2]: tar.extractfile(member) for member in tar if member.isfile()}
        return {name: stream.read().decode("utf-8", "replace") for name, stream in streams.items() if stream}


def read_starts() -> Iterator[StartMemory]:
    for (archive, step), name in STARTS.items():
        yield read_start(read_files(archive), archive, step, name)


def read_start(files: Mapping[str, str], archive: str, step: str, name: str) -> StartMemory:
    subject = json.loads(files[f"{step}/{name}"])["cells"][0]["subject"]
    engine = subject["engine"]
    lines = list_last_start(files, step, engine)
    weights, cache, tokens = (find_figures(pattern, lines) for pattern in LOGGED[engine])
    loading, serving = find_peaks(files["gpu.csv"], lines, engine)
    return StartMemory(
        source_path=f"{archive}.tar.xz:{step}/{name}",
        engine=engine,
        engine_version=subject["engine_version"],
        model=subject["model"],
        quantization=subject["quantization"],
        slots=subject["settings"]["slots"],
        context_tokens=subject["settings"]["context_tokens"],
        weights_gib=weights[0],
        cache_gib=round(sum(cache), 2),
        cache_tokens=int(tokens[0]),
        graphs_gib=round(sum(find_figures(CAPTURED[engine], lines)), 2),
        loading_gib=round(loading, 3),
        serving_gib=round(serving, 3),
    )


def list_last_start(files: Mapping[str, str], step: str, engine: str) -> list[str]:
    """The lines of the engine's last start in this step."""
    (log,) = [text for path, text in files.items() if re.match(rf"{step}/\w+-logs/.*{engine}", path)]
    lines = log.splitlines()
    begins = max(place for place, line in enumerate(lines) if line.startswith("# ") and " serve " in line)
    return lines[begins + 1 :]


def find_figures(pattern: str, lines: Sequence[str]) -> list[float]:
    return [float(figure.replace(",", "")) for line in lines for figure in re.findall(pattern, line)]


def find_peaks(samples: str, lines: Sequence[str], engine: str) -> tuple[float, float]:
    """The most memory of the GPU while weights were loaded, and after CUDA graphs were captured."""
    stamped = [(stamp[0], line) for line in lines if (stamp := STAMP.search(line)) is not None]
    (loaded,) = [stamp for stamp, line in stamped if LOADED.search(line)]
    captured = [stamp for stamp, line in stamped if re.search(CAPTURED[engine], line)][-1]
    read = [line.split(", ") for line in samples.splitlines()]
    used = [(at[5:19].replace("/", "-"), int(mib) / 1024) for at, mib, *_ in read]
    loading = max(gib for at, gib in used if stamped[0][0] <= at <= loaded)
    return loading, max(gib for at, gib in used if captured <= at <= stamped[-1][0])


def main() -> None:
    with ROWS.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(StartMemory._fields)
        writer.writerows(read_starts())


if __name__ == "__main__":
    main()
