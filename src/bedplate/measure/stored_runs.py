"""List stored runs and tunings with their effect on plans, and discard them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from bedplate import store
from bedplate.decide.evidence import (
    BetterEngine,
    MachineEvidence,
    calibrate,
    compute_speed_ratios,
    get_engine_name,
    list_measured_workloads,
)
from bedplate.errors import UsageError
from bedplate.measure.summary import summarize_cell
from bedplate.values import Hardware
from bedplate.values.evidence import StoredEvidence
from bedplate.values.run import Exclusion, Run
from bedplate.values.stored_runs import DiscardedRun, PlanEffect, RunDetails, RunKind, StoredCell, StoredRun
from bedplate.values.tuning import TuningRun, describe_changes

SUGGESTED = 5
"""How many ids an error message names."""


def list_stored_runs(hardware: Hardware, path: Path | None = None) -> tuple[StoredRun, ...]:
    """All stored runs and tunings, newest first."""
    machine = store.compute_fingerprint(hardware)
    runs, tunings = store.read_runs(path=path), store.read_tunings(None, path=path)
    effects = _EffectFinder(hardware, store.read_evidence(machine, path), runs)
    exclusions = store.read_exclusions(path=path)
    heads: dict[str, list[store.CellHead]] = {}
    for head in store.read_cell_heads(path):
        heads.setdefault(head.run, []).append(head)
    found = [_describe_run(run, heads.get(run.id, []), exclusions, machine, effects) for run in runs]
    found += [_describe_tuning(one, machine, effects) for one in tunings]
    return tuple(sorted(found, key=lambda one: one.at, reverse=True))


def get_run_details(named: str, hardware: Hardware, path: Path | None = None) -> RunDetails:
    run = find_stored_run(named, list_stored_runs(hardware, path))
    if run.kind == "tune":
        return RunDetails(run=run)
    exclusions = store.read_exclusions(run.id, path)
    cells = tuple(
        StoredCell(
            id=cell.id,
            engine=cell.subject.engine,
            engine_version=cell.subject.engine_version,
            load=cell.load,
            output_tok_s=summarize_cell(cell).output_tok_s,
            flags=cell.flags,
            exclusions=exclusions.get(cell.id, ()),
        )
        for cell in store.read_cells(run.id, path=path)
    )
    return RunDetails(run=run, cells=cells)


def discard_run(run: StoredRun, path: Path | None = None) -> DiscardedRun:
    """Remove a run with all results and verdicts computed from it. Plans are then made as if it had not been run."""
    removed = store.remove_run(run.id, path)
    return DiscardedRun(run=run, cells=removed.cells, results=removed.results, verdicts=removed.verdicts)


def find_stored_run(named: str, runs: Sequence[StoredRun]) -> StoredRun:
    """The run with this id, or with the only id that begins so."""
    found = [one for one in runs if one.id == named] or [one for one in runs if named and one.id.startswith(named)]
    if len(found) == 1:
        return found[0]
    if not runs:
        raise UsageError("no run is stored yet", hint="bedplate bench and bedplate tune store runs")
    ids = [one.id for one in found or runs]
    if found:
        raise UsageError(f"{len(found)} run ids begin with {named}", hint=f"they are {', '.join(ids[:SUGGESTED])}")
    near = difflib.get_close_matches(named, ids, SUGGESTED, cutoff=0.5) or ids[:SUGGESTED]
    raise UsageError(f"there is no run {named}", hint=f"stored runs: {', '.join(near)}; bedplate runs lists all")


def _describe_run(
    run: Run,
    heads: Sequence[store.CellHead],
    exclusions: dict[str, tuple[Exclusion, ...]],
    machine: str,
    effects: _EffectFinder,
) -> StoredRun:
    reasons = dict.fromkeys(one for head in heads for one in exclusions.get(head.id, ()))
    return StoredRun(
        id=run.id,
        at=run.at,
        kind=_get_kind(run),
        is_local=run.environment.machine == machine,
        engines=_list_distinct(_name_version(one.subject.engine, one.subject.engine_version) for one in heads),
        models=_list_distinct(one.subject.model for one in heads),
        cells=len(heads),
        clean=sum(head.id not in exclusions for head in heads),
        exclusions=tuple(reasons),
        effects=tuple(effects.list_effects(run.id)),
        finished=run.finished,
    )


def _describe_tuning(tuned: TuningRun, machine: str, effects: _EffectFinder) -> StoredRun:
    return StoredRun(
        id=tuned.id,
        at=tuned.at,
        kind="tune",
        is_local=tuned.machine == machine,
        engines=(_name_version(tuned.engine, tuned.engine_version),),
        models=(tuned.model,),
        cells=len(tuned.sides),
        clean=0 if tuned.exclusions else len(tuned.sides),
        exclusions=tuned.exclusions,
        effects=tuple(effects.list_tuning_effects(tuned.id)),
        finished=tuned.finished,
    )


def _get_kind(run: Run) -> RunKind:
    if run.source is not None:
        return "import"
    return "shadow" if run.environment.command[:2] == ("bedplate", "shadow") else "bench"


def _name_version(engine: str, version: str | None) -> str:
    return f"{engine}@{version}" if version else engine


def _list_distinct(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


class _EffectFinder:
    """Finds the effects of each run on the plans of this machine."""

    def __init__(self, hardware: Hardware, evidence: StoredEvidence, runs: Sequence[Run]) -> None:
        self.evidence = evidence
        models = {model.name: model for run in reversed(runs) for model in run.models}
        self.ratios = compute_speed_ratios(hardware, evidence.results, tuple(models.values()))
        self.calibrations = calibrate(self.ratios)
        self.replacements = _find_replacements(evidence)

    def list_effects(self, run: str) -> Iterator[PlanEffect]:
        yield from self._list_factors(run)
        yield from self._list_replacements(run)

    def list_tuning_effects(self, tuning: str) -> Iterator[PlanEffect]:
        for one in self.evidence.tunings:
            best = one.find_side("tuned")
            if one.id == tuning and one.is_proven and best is not None:
                text = f"plans of {get_engine_name(one.engine)} use {describe_changes(best.turned)}"
                yield PlanEffect(kind="settings", engine=one.engine, device=best.settings.device, text=text)

    def _list_factors(self, run: str) -> Iterator[PlanEffect]:
        without = calibrate([one for one in self.ratios if one.run != run])
        for engine, device in dict.fromkeys(one.measured for one in self.ratios if one.run == run):
            factor = self.calibrations[engine, device].factor
            before = without[engine, device].factor if (engine, device) in without else 1.0
            text = f"estimates of {get_engine_name(engine)} on {device} are scaled by {factor:.2f}"
            text += f"; without this run by {before:.2f}" if (engine, device) in without else ""
            yield PlanEffect(
                kind="estimates", engine=engine, device=device, factor=factor, factor_without=before, text=text
            )

    def _list_replacements(self, run: str) -> Iterator[PlanEffect]:
        """Engines that plans choose because of this run."""
        for (engine, model), better in self.replacements.items():
            if run in better.runs:
                text = f"plans of {model} choose {get_engine_name(better.engine)} instead of {get_engine_name(engine)}"
                yield PlanEffect(kind="engine", engine=better.engine, text=f"{text} under the measured load")


def _find_replacements(evidence: StoredEvidence) -> dict[tuple[str, str], BetterEngine]:
    """The best measured alternative to each measured engine and model, under the loads that it was measured with."""
    found: dict[tuple[str, str], BetterEngine] = {}
    for one in list_measured_workloads(evidence.results, evidence.verdicts):
        known = MachineEvidence(
            results=tuple(other for other in evidence.results if other.model == one.model),
            verdicts=tuple(verdict for verdict in evidence.verdicts if verdict.model == one.model),
        )
        if better := known.find_better(one.engine, one.quantization, one.workload):
            found.setdefault((one.engine, one.model), better[0])
    return found
