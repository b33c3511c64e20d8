"""The outlook of a served model: the observed workload, its latency, and what a plan would decide now."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Annotated

import msgspec

from bedplate import store
from bedplate.decide import decide
from bedplate.errors import BedplateError
from bedplate.facts.hardware import probe
from bedplate.facts.observed_workload import summarize_observed
from bedplate.facts.workload import to_workload
from bedplate.hosting.drift import ENOUGH, SPAN_S, describe_drift
from bedplate.measure.knee import MET
from bedplate.store import compute_fingerprint
from bedplate.usage_store import open_usage_store
from bedplate.values import Hardware, Workload, replace_fields
from bedplate.values.evidence import StoredEvidence
from bedplate.values.record import Record
from bedplate.values.traffic import ServedRequest
from bedplate.values.watch import Outlook
from bedplate.values.workload import LatencyTarget

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bedplate.hosting.control import Tell
    from bedplate.hosting.host import Host, HostedService

LATE_SPAN_S = 3600.0
LEAST_LATE = 50
"""Fewest requests for a statement about a missed latency target."""


class OutlookRequest(Record, frozen=True, kw_only=True):
    model: Annotated[str, msgspec.Meta(min_length=1)] | None = None


async def report_outlook(host: Host, asked: OutlookRequest, tell: Tell) -> Outlook:
    return await asyncio.to_thread(_build_outlook, host, host.get_service(asked.model))


def _build_outlook(host: Host, service: HostedService) -> Outlook:
    wanted, plan = service.wanted, service.readied.plan
    workload, requests = _read_workload(service)
    hardware, machine = host.hardware, compute_fingerprint(host.hardware)
    try:
        evidence = store.read_evidence(machine)
    except BedplateError:  # the store cannot be read; decide without measurements
        evidence = StoredEvidence()
    decision = decide(
        hardware, service.readied.decided.facts, workload, operations=wanted.operations, results=evidence.results,
        agreements=evidence.agreements, verdicts=evidence.verdicts, installable=True,
    )  # fmt: skip
    return Outlook(
        model=service.name,
        engine=plan.engine,
        engine_version=plan.engine_version,
        quantization=plan.weights.label,
        machine=machine,
        driver=get_driver(probe()),
        requests=requests,
        workload=workload,
        drift=describe_drift(service),
        late=_read_missed_target(service),
        target=wanted.workload.latency,
        decision=decision,
        plan=plan,
    )


def _read_workload(service: HostedService) -> tuple[Workload, int]:
    try:
        summary = summarize_observed(SPAN_S, model=service.name)
    except BedplateError:
        return service.wanted.workload, 0
    if summary.requests < ENOUGH:
        return service.wanted.workload, summary.requests
    # Observed requests do not state a latency target.
    return replace_fields(to_workload(summary), latency=service.wanted.workload.latency), summary.requests


def get_driver(hardware: Hardware) -> str | None:
    found = dict.fromkeys(card.driver_version for card in hardware.accelerators if card.driver_version)
    return ", ".join(found) or None


def _read_missed_target(service: HostedService) -> str | None:
    target = service.wanted.workload.latency
    if target is None:
        return None
    try:
        return describe_missed_target(
            open_usage_store().read_requests(time.time() - LATE_SPAN_S, model=service.name), target
        )
    except BedplateError:
        return None


def describe_missed_target(rows: Iterable[ServedRequest], target: LatencyTarget) -> str | None:
    """A sentence about the share of requests that met the target, if it is too small. Pure."""
    hits = [_meets_target(row, target) for row in rows if row.outcome == "ok" and row.ttft_ms is not None]
    if len(hits) < LEAST_LATE or sum(hits) >= MET * len(hits):
        return None
    targets = [f"{name} {value:g} ms" for name, value in (("TTFT", target.ttft_ms), ("TPOT", target.tpot_ms)) if value]
    share = sum(hits) / len(hits)
    return f"{share:.0%} of the {len(hits):,} requests in the last hour met the target ({', '.join(targets)})"


def _meets_target(row: ServedRequest, target: LatencyTarget) -> bool:
    ttft_ms, tokens = row.ttft_ms or 0.0, row.completion_tokens or 0
    if target.ttft_ms is not None and ttft_ms > target.ttft_ms:
        return False
    return target.tpot_ms is None or tokens < 2 or (row.duration_ms - ttft_ms) / (tokens - 1) <= target.tpot_ms
