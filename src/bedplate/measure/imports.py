"""Import runs from other benchmarks, or from bedplate on another machine.

Samples are imported unchanged. A value that the file does not contain stays unknown, and the flag `gaps` lists it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bedplate._version import __version__
from bedplate.engines.llama_cpp import BENCH as LLAMA_BENCH
from bedplate.engines.vllm import BENCH as VLLM_BENCH
from bedplate.engines.vllm import ENGINE as VLLM
from bedplate.errors import UsageError, make_unreadable_error
from bedplate.measure.imported_run import (
    UNKNOWN,
    ImportOrigin,
    compute_median_count,
    format_epoch,
    make_imported_cell,
    make_imported_run,
    parse_local_time,
)
from bedplate.measure.imported_summaries import (
    read_aiperf_records,
    read_aiperf_summary,
    read_inferencex,
    read_llama_bench,
)
from bedplate.values import from_json, replace_fields
from bedplate.values.run import Load, Repeat, Run, Sample, StatedFigures, Subject

MOST_BYTES = 1 << 30
MOST_MS = 1e12
MOST_TOKENS = 10**9
"""Larger times and counts of tokens are damaged. Their sums would be infinite."""
FORMS = f"bedplate, `{LLAMA_BENCH} -o json`, `{VLLM_BENCH} --save-result`, GuideLLM, AIPerf and InferenceX (JSON)"
SIGNED = "signed-result/1"
Reader = Callable[[Any, ImportOrigin], Run]


def read_run(path: Path) -> Run:
    """Reads a run from a file. Raises `UsageError` if its format is unknown. A signature is not verified here."""
    data = read_bytes(path)
    run = _read_document(data, path.name)
    for cell in run.cells:
        for repeat in cell.repeats:
            for number, sample in enumerate(repeat.samples):
                if why := _find_impossible_value(sample):
                    raise UsageError(f"{path.name} is not read", cause=f"request {number + 1} of cell {cell.id}: {why}")
    return run


def _find_impossible_value(sample: Sample) -> str | None:
    times_ms = (sample.duration_ms, sample.ttft_ms or 0.0, *sample.gaps_ms)
    if not (min(times_ms) >= 0 and max(times_ms) <= MOST_MS and abs(sample.at_s) <= MOST_MS):
        return "a time is negative or too long"
    counts = (sample.prompt_tokens or 0, sample.output_tokens or 0, sample.cached_tokens or 0)
    if min(counts) < 0 or max(counts) > MOST_TOKENS:
        return "a number of tokens is negative or too large"
    return None


def _read_document(data: bytes, name: str) -> Run:
    document = parse_document(data, name)
    if isinstance(document, dict) and document.get("schema") == "run/1":
        return from_json(Run, data, origin=name)
    if isinstance(document, dict) and document.get("schema") == SIGNED:
        return from_json(Run, msgspec.json.encode(document.get("run")), origin=name)
    found = find_reader(document)
    if found is None:
        raise UsageError(f"{name} is not a supported run file", hint=f"supported: files of {FORMS}")
    kind, read = found
    try:
        made = read(document, ImportOrigin(name, hashlib.sha256(data).hexdigest()))
        # The records are made without checks. What the store cannot read again must not get into it.
        return msgspec.json.decode(msgspec.json.encode(made), type=Run)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, OSError, RecursionError) as error:
        raise UsageError(
            f"{name} looks like a run of {kind}, but cannot be read",
            cause=f"{type(error).__name__}: {error}",
            hint=f"bedplate {__version__} reads {VLLM.name} 0.32's, GuideLLM 0.8's and AIPerf 0.10's fields",
        ) from error


def parse_document(data: bytes, name: str) -> Any:
    """JSON, or JSON lines as a list."""
    unreadable = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
    try:
        return msgspec.json.decode(data)
    except unreadable as error:
        try:
            lines = msgspec.json.Decoder().decode_lines(data)
        except unreadable:
            lines = []
        if len(lines) > 1:
            return lines
        raise UsageError(f"{name} is not JSON", cause=str(error), hint=f"supported: files of {FORMS}") from error


def find_reader(document: Any) -> tuple[str, Reader] | None:
    """The tool that wrote a document, by its keys, and its reader."""
    first = document[0] if isinstance(document, list) and document else document
    if not isinstance(first, dict):
        return None
    if isinstance(document, list):
        if {"build_commit", "n_prompt", "n_gen"} <= first.keys():
            return LLAMA_BENCH, read_llama_bench
        if {"metadata", "metrics"} <= first.keys():
            return "AIPerf", read_aiperf_records
        return ("InferenceX", read_inferencex) if {"hw", "conc", "tput_per_gpu"} <= first.keys() else None
    if {"hw", "conc", "tput_per_gpu"} <= first.keys():
        return "InferenceX", lambda one, origin: read_inferencex([one], origin)
    if {"build_commit", "n_prompt", "n_gen"} <= first.keys():
        return LLAMA_BENCH, lambda one, origin: read_llama_bench([one], origin)
    if isinstance(first.get("request_latency"), dict) and "input_config" in first:
        return "AIPerf", read_aiperf_summary
    if isinstance(first.get("benchmarks"), list):
        return "GuideLLM", read_guidellm_run
    return (VLLM_BENCH, read_vllm_run) if "request_throughput" in first and "duration" in first else None


def read_bytes(path: Path) -> bytes:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UsageError(f"{path.name} is larger than {MOST_BYTES >> 20} MB")
        return path.read_bytes()
    except OSError as error:
        raise make_unreadable_error(path, error) from error


# vllm bench serve


def read_vllm_run(document: dict[str, Any], origin: ImportOrigin) -> Run:
    """Follows vllm/benchmarks/serve.py of vLLM 0.32: times in seconds, lists with one entry for each request."""
    at = parse_local_time(document.get("date"), "%Y%m%d-%H%M%S")
    subject = Subject(
        engine=str(document.get("label") or document.get("backend") or document.get("endpoint_type") or "endpoint"),
        model=str(document["model_id"]),
    )
    notes = f"imported from a file of {VLLM_BENCH}"
    if not document.get("ttfts"):
        return _read_vllm_summary(document, origin, at, subject, notes)
    samples = tuple(sorted(_read_vllm_samples(document), key=lambda sample: sample.at_s))
    prompts = [count for count in document["input_lens"] if count]
    asked = [sample.output_tokens for sample in samples if sample.output_tokens]
    load = _read_vllm_load(document, prompts, asked)
    if document.get("burstiness") not in (None, 1, 1.0) and load.arrivals == "poisson":
        notes += f"; burstiness {document['burstiness']:g}"
    repeat = Repeat(at=at, seconds=float(document["duration"]), samples=samples)
    return make_imported_run(origin, [make_imported_cell(origin, 0, at, subject, load, notes, repeats=[repeat])])


def _read_vllm_summary(document: dict[str, Any], origin: ImportOrigin, at: str, subject: Subject, notes: str) -> Run:
    """A result without `--save-detailed`."""
    count = max(1, int(document["completed"]))
    lengths = [[int(document[name]) / count] for name in ("total_input_tokens", "total_output_tokens")]
    load = _read_vllm_load(document, *([round(one[0])] for one in lengths))
    stated = StatedFigures(
        requests=int(document["completed"]),
        output_tok_s=float(document["output_throughput"]),
        ttft_ms_p50=document.get("median_ttft_ms"),
        ttft_ms_p95=document.get("p95_ttft_ms"),
        ttft_ms_p99=document.get("p99_ttft_ms"),
        tpot_ms_p50=document.get("median_tpot_ms"),
        tpot_ms_p95=document.get("p95_tpot_ms"),
        tpot_ms_p99=document.get("p99_tpot_ms"),
        e2e_ms_p50=document.get("median_e2el_ms"),
    )
    notes += "; --save-detailed would add the samples"
    return make_imported_run(origin, [make_imported_cell(origin, 0, at, subject, load, notes, stated=stated)])


def _read_vllm_samples(document: dict[str, Any]) -> Iterator[Sample]:
    starts = document.get("start_times") or [0.0] * len(document["ttfts"])
    first = min(starts, default=0.0)
    errors = document.get("errors") or [""] * len(document["ttfts"])
    ends = document.get("latencies") or [None] * len(document["ttfts"])
    rows = zip(
        document["ttfts"],
        document["itls"],
        document["input_lens"],
        document["output_lens"],
        starts,
        errors,
        ends,
        strict=True,
    )
    for ttft, gaps, prompt, output, start, error, latency in rows:
        failed = bool(error) or not output
        took_s = latency if latency else ttft + math.fsum(gaps)
        yield Sample(
            at_s=start - first,
            ttft_ms=None if failed else 1000 * ttft,
            duration_ms=1000 * took_s,
            gaps_ms=tuple(1000 * gap for gap in gaps),
            prompt_tokens=prompt,
            output_tokens=output or None,
            outcome="error" if failed else "ok",
            error=str(error)[:500] if error else None,
        )


def _read_vllm_load(document: dict[str, Any], prompts: Sequence[int], outputs: Sequence[int]) -> Load:
    lengths = Load(prompt_tokens=compute_median_count(prompts), output_tokens=compute_median_count(outputs))
    rate, most = document.get("request_rate"), document.get("max_concurrency")
    if isinstance(rate, int | float) and math.isfinite(rate):
        return replace_fields(lengths, arrivals="poisson", requests_per_s=float(rate))
    # Without a limit all requests are sent at the start.
    return replace_fields(lengths, arrivals="closed", concurrency=int(most or document["num_prompts"]))


# GuideLLM


def read_guidellm_run(document: dict[str, Any], origin: ImportOrigin) -> Run:
    """Follows guidellm/benchmark/schemas of GuideLLM 0.8: latencies in seconds, other times in milliseconds."""
    about = document.get("metadata") or {}
    cells = []
    for number, one in enumerate(document["benchmarks"]):
        at = format_epoch(float(one["start_time"]))
        config = one["config"]
        requests = one["requests"]
        good, bad = requests.get("successful") or [], requests.get("errored") or []
        if not good and not bad:
            raise UsageError(f"{origin.name} has no samples of single requests", hint="measure with --sample-requests")
        began = float(one["start_time"])
        samples = [_read_guidellm_sample(request, began, "ok") for request in good]
        samples += [_read_guidellm_sample(request, began, "error") for request in bad]
        prompts = [sample.prompt_tokens for sample in samples if sample.prompt_tokens]
        outputs = [sample.output_tokens for sample in samples if sample.output_tokens]
        backend = config.get("backend") or {}
        subject = Subject(engine="endpoint", model=str(backend.get("model") or UNKNOWN), url=backend.get("target"))
        repeat = Repeat(
            at=at,
            seconds=float(one["end_time"]) - began,
            samples=tuple(sorted(samples, key=lambda sample: sample.at_s)),
        )
        load = _read_guidellm_load(config["strategy"], prompts, outputs)
        notes = "imported from a file of GuideLLM"
        cells.append(make_imported_cell(origin, number, at, subject, load, notes, repeats=[repeat]))
    if not cells:
        raise UsageError(f"{origin.name} contains no benchmarks")
    system, python = str(about.get("platform") or UNKNOWN), str(about.get("python_version") or UNKNOWN)
    return make_imported_run(origin, cells, system=system, python=python)


def _read_guidellm_sample(request: dict[str, Any], began: float, outcome: str) -> Sample:
    start = float(request["request_start_time"])
    failed = outcome != "ok"
    latency_s = request.get("request_latency")
    ttft_ms = request.get("time_to_first_token_ms")
    return Sample(
        at_s=max(0.0, start - began),
        ttft_ms=None if failed or ttft_ms is None else float(ttft_ms),
        duration_ms=1000 * float(latency_s) if latency_s is not None else 0.0,
        prompt_tokens=request.get("prompt_tokens"),
        output_tokens=request.get("output_tokens"),
        cached_tokens=request.get("cached_tokens"),
        outcome="error" if failed else "ok",
    )


def _read_guidellm_load(strategy: dict[str, Any], prompts: Sequence[int], outputs: Sequence[int]) -> Load:
    lengths = Load(prompt_tokens=compute_median_count(prompts), output_tokens=compute_median_count(outputs))
    kind = strategy["type_"]
    if kind == "poisson":
        return replace_fields(lengths, arrivals="poisson", requests_per_s=float(strategy["rate"]))
    if kind == "constant":
        return replace_fields(lengths, arrivals="constant", requests_per_s=float(strategy["rate"]))
    if kind == "trace":
        return replace_fields(lengths, arrivals="replay", trace="GuideLLM's")
    streams = 1 if kind == "synchronous" else strategy.get("streams") or strategy.get("max_concurrency")
    if streams is None:
        raise ValueError(f"the strategy {kind!r} does not contain the number of requests in flight")
    return replace_fields(lengths, arrivals="closed", concurrency=int(streams))
