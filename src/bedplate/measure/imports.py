"""Import runs from other benchmarks: `vllm bench serve`, GuideLLM, or bedplate on another machine.

Samples are imported unchanged. A value that the file does not contain stays unknown.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bedplate._version import __version__
from bedplate.engines.vllm import BENCH as VLLM_BENCH
from bedplate.engines.vllm import ENGINE as VLLM
from bedplate.errors import UsageError
from bedplate.measure.flags import flag_cell
from bedplate.values import from_json, replace_fields
from bedplate.values.run import Cell, Load, Repeat, Run, RunEnvironment, Sample, Subject

MOST_BYTES = 1 << 30
FORMS = f"bedplate (--json), `{VLLM_BENCH} --save-result --save-detailed` and GuideLLM (JSON)"


def read_run(path: Path) -> Run:
    """Reads a run from a file. Raises `UsageError` if its format is unknown or it lacks samples."""
    data = _read_bytes(path)
    try:
        document = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path.name} is not JSON", cause=str(error), hint=f"supported: files of {FORMS}") from error
    if not isinstance(document, dict):
        raise UsageError(f"{path.name} is not a supported run file", hint=f"supported: files of {FORMS}")
    if document.get("schema") == "run/1":
        return from_json(Run, data, origin=path.name)
    kind = VLLM.id if "request_throughput" in document and "duration" in document else None
    if isinstance(document.get("benchmarks"), list):
        kind = "guidellm"
    if kind is None:
        raise UsageError(f"{path.name} is not a supported run file", hint=f"supported: files of {FORMS}")
    origin = ImportOrigin(path.name, hashlib.sha256(data).hexdigest())
    try:
        return read_vllm_run(document, origin) if kind == VLLM.id else read_guidellm_run(document, origin)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, msgspec.ValidationError) as error:
        raise UsageError(
            f"{path.name} looks like a run of {kind}, but cannot be read",
            cause=f"{type(error).__name__}: {error}",
            hint=f"bedplate {__version__} reads {VLLM.name} 0.32's and GuideLLM 0.8's fields",
        ) from error


def _read_bytes(path: Path) -> bytes:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UsageError(f"{path.name} is larger than {MOST_BYTES >> 20} MB")
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}", cause=error.strerror or str(error)) from error


class ImportOrigin(msgspec.Struct, frozen=True):
    """The imported file. Importing the same file again gives the same run."""

    name: str
    sha256: str

    @property
    def run_id(self) -> str:
        return f"file-{self.sha256[:10]}"

    @property
    def machine(self) -> str:
        """A unique name, because the file does not contain the machine: no other run is from the same one."""
        return f"file:{self.sha256[:11]}"


def _make_run(origin: ImportOrigin, at: str, system: str, python: str, cells: Iterable[Cell]) -> Run:
    environment = RunEnvironment(
        bedplate=__version__, python=python, system=system, hardware="not reported", machine=origin.machine
    )
    flagged = tuple(replace_fields(cell, flags=flag_cell(cell)) for cell in cells)
    return Run(id=origin.run_id, at=at, environment=environment, cells=flagged, finished=True, source=origin.name)


# vllm bench serve


def read_vllm_run(document: dict[str, Any], origin: ImportOrigin) -> Run:
    """Follows vllm/benchmarks/serve.py of vLLM 0.32: times in seconds, lists with one entry for each request."""
    if not document.get("ttfts"):
        raise UsageError(
            f"{origin.name} has no samples of single requests", hint="measure with --save-result --save-detailed"
        )
    at = _read_date(document.get("date"))
    samples = tuple(sorted(_read_vllm_samples(document), key=lambda sample: sample.at_s))
    prompts = [count for count in document["input_lens"] if count]
    asked = [sample.output_tokens for sample in samples if sample.output_tokens]
    subject = Subject(
        engine=str(document.get("label") or document.get("backend") or document.get("endpoint_type") or "endpoint"),
        model=str(document["model_id"]),
    )
    notes = f"imported from a file of {VLLM_BENCH}"
    load = _read_vllm_load(document, prompts, asked)
    if document.get("burstiness") not in (None, 1, 1.0) and load.arrivals == "poisson":
        notes += f"; burstiness {document['burstiness']:g}"
    repeat = Repeat(at=at, seconds=float(document["duration"]), samples=samples)
    cell = _make_cell(origin, 0, at, subject, load, repeat, notes)
    return _make_run(origin, at, "not reported", "not reported", [cell])


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
    lengths = Load(prompt_tokens=_compute_median(prompts), output_tokens=_compute_median(outputs))
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
        at = _format_time(float(one["start_time"]))
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
        subject = Subject(
            engine="endpoint", model=str(backend.get("model") or "not reported"), url=backend.get("target")
        )
        repeat = Repeat(
            at=at,
            seconds=float(one["end_time"]) - began,
            samples=tuple(sorted(samples, key=lambda sample: sample.at_s)),
        )
        load = _read_guidellm_load(config["strategy"], prompts, outputs)
        cells.append(_make_cell(origin, number, at, subject, load, repeat, "imported from a file of GuideLLM"))
    if not cells:
        raise UsageError(f"{origin.name} contains no benchmarks")
    system, python = str(about.get("platform") or "not reported"), str(about.get("python_version") or "not reported")
    return _make_run(origin, cells[0].at, system, python, cells)


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
    lengths = Load(prompt_tokens=_compute_median(prompts), output_tokens=_compute_median(outputs))
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


# both


def _make_cell(
    origin: ImportOrigin, number: int, at: str, subject: Subject, load: Load, repeat: Repeat, notes: str
) -> Cell:
    return Cell(
        id=f"{origin.sha256[:10]}-{number}",
        run=origin.run_id,
        at=at,
        machine=origin.machine,
        subject=subject,
        load=load,
        repeats=(repeat,),
        notes=notes,
        halt="most",
    )


def _compute_median(counts: Sequence[int]) -> int:
    return max(1, round(statistics.median(counts))) if counts else 1


def _read_date(text: object) -> str:
    """vLLM writes 20261115-093000 in local time without a time zone; it is read as UTC."""
    try:
        return dt.datetime.strptime(str(text), "%Y%m%d-%H%M%S").replace(tzinfo=dt.UTC).isoformat()[:19] + "Z"
    except ValueError:
        return "1970-01-01T00:00:00Z"


def _format_time(since_1970: float) -> str:
    return dt.datetime.fromtimestamp(since_1970, dt.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
