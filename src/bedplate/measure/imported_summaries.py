"""Import results of llama-bench, AIPerf and InferenceX, which report figures rather than all samples."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any

from bedplate.engines.llama_cpp import BENCH as LLAMA_BENCH
from bedplate.engines.llama_cpp import ENGINE as LLAMA
from bedplate.engines.names import find_engine_id
from bedplate.measure.imported_run import (
    UNKNOWN,
    UNKNOWN_TIME,
    ImportOrigin,
    compute_median_count,
    format_epoch,
    make_imported_cell,
    make_imported_run,
    parse_local_time,
)
from bedplate.values.decision import Parallelism
from bedplate.values.run import Load, Repeat, Run, Sample, StatedFigures, Subject

LABEL = re.compile(r"(?:^|[-._])((?:I?Q\d|BF16|F16|F32|MXFP4)[A-Z0-9_]*)(?:$|[-.])", re.IGNORECASE)
VERSION_TAG = re.compile(r":v?(\d+\.\d+[\w.]*)")


# llama-bench


def read_llama_bench(rows: Sequence[dict[str, Any]], origin: ImportOrigin) -> Run:
    """Follows tools/llama-bench: each repetition is one sequence without a server, timed in nanoseconds."""
    cells = []
    for number, row in enumerate(rows):
        prompt, output, depth = (int(row.get(name) or 0) for name in ("n_prompt", "n_gen", "n_depth"))
        at = str(row.get("test_time") or UNKNOWN_TIME)
        took_ms = [float(one) / 1e6 for one in row.get("samples_ns") or ()]
        samples = tuple(_make_llama_sample(one, prompt, output) for one in took_ms)
        repeats = [Repeat(at=at, seconds=max(sum(took_ms) / 1000, 1e-6), samples=samples)] if samples else []
        rate = float(row["avg_ts"])
        stated = StatedFigures(
            requests=len(took_ms) or None,
            prompt_tok_s=rate if prompt and not output else None,
            output_tok_s=rate if output and not prompt else None,
        )
        load = Load(concurrency=1, prompt_tokens=max(1, prompt + depth), output_tokens=max(1, output))
        kind = "prompt processing" if not output else "generation" if not prompt else "prompt and generation"
        notes = f"imported from a file of {LLAMA_BENCH}: {kind}, without a server"
        cells.append(
            make_imported_cell(
                origin, number, at, _read_llama_subject(row), load, notes, repeats=repeats, stated=stated
            )
        )
    parts = (rows[0].get("cpu_info"), rows[0].get("gpu_info"))
    hardware = ", ".join(str(one).strip() for one in parts if one and str(one).strip())
    return make_imported_run(origin, cells, hardware=hardware or UNKNOWN)


def _make_llama_sample(took_ms: float, prompt: int, output: int) -> Sample:
    """A test of the prompt alone ends where a server would send its first token."""
    return Sample(
        at_s=0.0,
        ttft_ms=took_ms if not output else None,
        duration_ms=took_ms,
        prompt_tokens=prompt or None,
        output_tokens=output or None,
    )


def _read_llama_subject(row: dict[str, Any]) -> Subject:
    name = PurePath(str(row.get("model_filename") or "").replace("\\", "/")).name.removesuffix(".gguf")
    label = LABEL.search(name)
    return Subject(
        engine=LLAMA.id,
        engine_version=f"b{row['build_number']}" if row.get("build_number") else None,
        model=name or str(row.get("model_type") or UNKNOWN),
        quantization=label[1].upper() if label else None,
    )


# AIPerf


def read_aiperf_records(records: Sequence[dict[str, Any]], origin: ImportOrigin) -> Run:
    """Follows profile_export.jsonl of AIPerf: one record for each request, with its metrics and their units."""
    kept = [one for one in records if _read_phase(one) == "profiling"]
    starts = [int(one["metadata"].get("request_start_ns") or one["metadata"]["timestamp_ns"]) for one in kept]
    began = min(starts)
    samples = [_read_aiperf_record(one, (at - began) / 1e9) for one, at in zip(kept, starts, strict=True)]
    ended_s = max(one.at_s + one.duration_ms / 1000 for one in samples)
    good = [one for one in samples if one.outcome == "ok"]
    load = Load(
        concurrency=max(1, _count_overlaps(good)),
        prompt_tokens=compute_median_count([one.prompt_tokens for one in good if one.prompt_tokens]),
        output_tokens=compute_median_count([one.output_tokens for one in good if one.output_tokens]),
    )
    at = format_epoch(began / 1e9)
    repeat = Repeat(at=at, seconds=max(ended_s, 1e-6), samples=tuple(sorted(samples, key=lambda one: one.at_s)))
    notes = "imported from records of AIPerf; the concurrency is the most requests that overlapped"
    subject = Subject(engine="endpoint", model=UNKNOWN)
    return make_imported_run(origin, [make_imported_cell(origin, 0, at, subject, load, notes, repeats=[repeat])])


def _read_phase(record: dict[str, Any]) -> str:
    about = record["metadata"]
    return str(about.get("benchmark_phase") or about.get("credit_phase") or "profiling")


def _read_aiperf_record(record: dict[str, Any], at_s: float) -> Sample:
    metrics = {name: one["value"] for name, one in (record.get("metrics") or {}).items()}
    error = record.get("error")
    ttft_ms = metrics.get("time_to_first_token", metrics.get("ttft"))
    return Sample(
        at_s=at_s,
        ttft_ms=None if error or ttft_ms is None else float(ttft_ms),
        duration_ms=float(metrics.get("request_latency") or 0.0),
        gaps_ms=tuple(float(one) for one in metrics.get("inter_chunk_latency") or ()),
        prompt_tokens=metrics.get("input_sequence_length"),
        output_tokens=metrics.get("output_sequence_length"),
        outcome="error" if error else "ok",
        error=str(error.get("message") or error.get("type"))[:500] if error else None,
    )


def _count_overlaps(samples: Sequence[Sample]) -> int:
    moments = [(one.at_s, 1) for one in samples] + [(one.at_s + one.duration_ms / 1000, -1) for one in samples]
    most = current = 0
    for _, change in sorted(moments):
        current += change
        most = max(most, current)
    return most


def read_aiperf_summary(document: dict[str, Any], origin: ImportOrigin) -> Run:
    """Follows profile_export_aiperf.json of AIPerf: statistics over all requests."""
    config = document["input_config"]
    at = parse_local_time(document.get("start_time"))
    stated = StatedFigures(
        requests=round(_read_statistic(document, "request_count", "avg") or 0) or None,
        output_tok_s=_read_statistic(document, "output_token_throughput", "avg"),
        e2e_ms_p50=_read_statistic(document, "request_latency", "p50"),
        **{
            f"{ours}_{part}": _read_statistic(document, theirs, part)
            for ours, theirs in (("ttft_ms", "time_to_first_token"), ("tpot_ms", "inter_token_latency"))
            for part in ("p50", "p95", "p99")
        },
    )
    endpoint = config.get("endpoint") or {}
    models = [
        *(endpoint.get("model_names") or ()),
        *(one["name"] for one in (config.get("models") or {}).get("items", ())),
    ]
    url = next(iter(endpoint.get("urls") or ()), None) or endpoint.get("url")
    subject = Subject(engine="endpoint", model=str(models[0]) if models else UNKNOWN, url=url)
    lengths = [_read_statistic(document, f"{kind}_sequence_length", "avg") or 1 for kind in ("input", "output")]
    load = _read_aiperf_load(config, *(max(1, round(one)) for one in lengths))
    notes = f"imported from a summary of AIPerf {document.get('aiperf_version') or ''}".rstrip()
    hardware = ", ".join(_list_aiperf_gpus(document)) or UNKNOWN
    cell = make_imported_cell(origin, 0, at, subject, load, notes, stated=stated)
    return make_imported_run(origin, [cell], hardware=hardware)


def _read_statistic(document: dict[str, Any], name: str, part: str) -> float | None:
    found = (document.get(name) or {}).get(part)
    return None if found is None else float(found)


def _read_aiperf_load(config: dict[str, Any], prompt: int, output: int) -> Load:
    phases = [one for one in config.get("phases") or () if not one.get("exclude_from_results")]
    given = phases[-1] if phases else config.get("loadgen") or {}
    rate = given.get("request_rate") or given.get("rate")
    if rate:
        return Load(arrivals="poisson", requests_per_s=float(rate), prompt_tokens=prompt, output_tokens=output)
    return Load(concurrency=int(given.get("concurrency") or 1), prompt_tokens=prompt, output_tokens=output)


def _list_aiperf_gpus(document: dict[str, Any]) -> Iterator[str]:
    endpoints = ((document.get("telemetry_data") or {}).get("endpoints") or {}).values()
    names = [str(gpu.get("gpu_name")) for one in endpoints for gpu in (one.get("gpus") or {}).values()]
    yield from (f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


# InferenceX


def read_inferencex(rows: Sequence[dict[str, Any]], origin: ImportOrigin) -> Run:
    """Follows utils/process_result.py of InferenceX: rates for each GPU, times in seconds."""
    cells = []
    for number, row in enumerate(rows):
        on_one_node = not row.get("is_multinode") and not row.get("disagg")
        gpus = int(row["tp"]) if on_one_node and row.get("tp") else None
        rate = row.get("output_tput_per_gpu")
        stated = StatedFigures(
            output_tok_s=float(rate) * gpus if rate is not None and gpus is not None else None,
            ttft_ms_p50=_read_seconds(row, "median_ttft"),
            ttft_ms_p95=_read_seconds(row, "p95_ttft"),
            ttft_ms_p99=_read_seconds(row, "p99_ttft"),
            tpot_ms_p50=_read_seconds(row, "median_tpot"),
            tpot_ms_p95=_read_seconds(row, "p95_tpot"),
            tpot_ms_p99=_read_seconds(row, "p99_tpot"),
            e2e_ms_p50=_read_seconds(row, "median_e2el"),
        )
        load = Load(
            concurrency=int(row["conc"]), prompt_tokens=int(row.get("isl") or 1), output_tokens=int(row.get("osl") or 1)
        )
        extras = [f"{name} {row[name]}" for name in ("spec_decoding", "mtp") if row.get(name) not in (None, "none")]
        notes = "; ".join(["imported from a file of InferenceX", *extras])
        subject = _read_inferencex_subject(row, gpus)
        cells.append(make_imported_cell(origin, number, UNKNOWN_TIME, subject, load, notes, stated=stated))
    hardware = dict.fromkeys(_describe_inferencex_hardware(row) for row in rows)
    return make_imported_run(origin, cells, hardware=" and ".join(hardware))


def _read_inferencex_subject(row: dict[str, Any], gpus: int | None) -> Subject:
    framework = str(row.get("framework") or UNKNOWN)
    tag = VERSION_TAG.search(str(row.get("image") or ""))
    return Subject(
        engine=find_engine_id(framework) or framework,
        engine_version=tag[1] if tag else None,
        model=str(row["model"]),
        quantization=str(row["precision"]).upper() if row.get("precision") else None,
        parallelism=Parallelism(tensor=gpus or 1),
    )


def _describe_inferencex_hardware(row: dict[str, Any]) -> str:
    name = str(row["hw"]).upper()
    return f"{int(row['tp'])} x {name}" if row.get("tp") and not row.get("is_multinode") else name


def _read_seconds(row: dict[str, Any], name: str) -> float | None:
    return None if row.get(name) is None else 1000 * float(row[name])
