"""Prepares models for serving: chooses an engine, installs it and converts weights. Starts nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bedplate.decide import decide, plan
from bedplate.decide.placement import MachinePart, Need, ServiceAsk, divide_machine
from bedplate.engines import Engine, get_plan_engine, load_engines
from bedplate.engines import get_engine as engine_by_id
from bedplate.engines.base import find_cards
from bedplate.engines.knobs import is_native
from bedplate.engines.visible import pick_cards, show_cards
from bedplate.errors import ExternalFailure, NotPossible, UsageError
from bedplate.facts.cpu import INSTRUCTION_SETS
from bedplate.facts.known_models import look_up_model
from bedplate.facts.published_weights import find_published_name
from bedplate.progress import Progress
from bedplate.run.builtin import fetch_beside, fetch_builtin
from bedplate.run.checksums import verify_cached_model
from bedplate.run.environments import (
    EngineEnvironment,
    check_version,
    find_adopted,
    find_environment,
    make_environment,
    read_registered_engines,
)
from bedplate.run.local_models import record_use
from bedplate.run.models import (
    describe_short_name,
    expand_name,
    fetch_model,
    fetch_published,
    find_local_model,
    is_builtin,
)
from bedplate.run.native import BuildNotUsable, find_toolchain, find_usable_build, get_source_build
from bedplate.run.options import PORT, check_options
from bedplate.run.prepare import prepare
from bedplate.run.starting import EngineStart
from bedplate.run.trials import Examiner, provide_native_environment
from bedplate.store import compute_fingerprint, read_evidence
from bedplate.values import Accelerator, Decision, Hardware, Model, Plan, PublishedWeights, Workload, replace_fields
from bedplate.values.evidence import StoredEvidence
from bedplate.values.run import Role
from bedplate.values.service import Build, ModelOrder


@dataclass(frozen=True)
class ModelDecision:
    """The decision for one model on this machine, before anything is installed."""

    wanted: ModelOrder
    hardware: Hardware
    facts: Model
    part: MachinePart
    plan: Plan
    build: Build = "packages"
    role: Role | None = None
    """Of a gate: which side it is."""

    @property
    def engine(self) -> Engine:
        """In the requested version, if one was requested."""
        return engine_by_id(self.wanted.engine or self.plan.engine)

    @property
    def decision(self) -> Decision:
        return self.part.decision

    @property
    def name(self) -> str:
        """The name that clients use."""
        return self.plan.model.served_name


def list_planned_cards(decisions: Iterable[ModelDecision]) -> tuple[Accelerator, ...]:
    """The accelerators that the planned engines use."""
    found: dict[int, Accelerator] = {}
    for one in decisions:
        named = {name for need in one.part.needs for name in need}
        found |= {card.index: card for card in one.hardware.accelerators if f"card {card.index}" in named}
    return tuple(found.values())


@dataclass(frozen=True)
class PreparedModel:
    """Everything needed to start the engines of one model."""

    decided: ModelDecision
    plan: Plan
    environment: EngineEnvironment
    folder: Path | None

    @property
    def name(self) -> str:
        return self.plan.model.served_name

    @property
    def needs(self) -> tuple[Need, ...]:
        """The memory needs of each replica."""
        return self.decided.part.needs

    @property
    def build(self) -> str:
        """The name of the build in runs and tunings."""
        if self.environment.built:
            return "native"
        return "adopted" if self.environment.adopted_path else "wheel"

    def build_start(self, replica: int = 0) -> EngineStart:
        """The start of one replica, with variables so that replicas do not use the same accelerators or cores."""
        cards, settings = self.decided.part.cards[replica], self.plan.settings
        env = show_cards(settings.device, pick_cards(self.decided.hardware, cards))
        if not env and len(self.needs) > 1:
            env = engine_by_id(self.plan.engine).get_replica_env(settings)
        return EngineStart(self.plan, self.environment, self.folder, env)


def decide_engines(
    wanted: Sequence[ModelOrder],
    hardware: Hardware,
    progress: Progress,
    *,
    build: Build = "packages",
    budget_bytes: int | None = None,
    tell: Callable[[Hardware, Model, ModelOrder, Decision], None] = lambda hardware, model, wanted, decision: None,
    models: Sequence[Model] | None = None,
) -> tuple[ModelDecision, ...]:
    """Chooses an engine for each model so that all of them fit together; missing models are downloaded first.

    `models` are their facts, if the caller knows them already.
    """
    if build == "native":
        wanted = [replace_fields(one, engine=_choose_build_engine(one.engine, hardware).id) for one in wanted]
    models = models or [_find_facts(one, hardware, progress) for one in wanted]
    return _plan_all(wanted, models, hardware, progress, build, budget_bytes, tell)


def plan_engine(
    wanted: ModelOrder,
    facts: Model,
    hardware: Hardware,
    progress: Progress,
    *,
    build: Build = "packages",
    path: Path | None = None,
) -> ModelDecision:
    """Plans the named engine with all of the machine, as `serve` does, with earlier results and tunings from the store
    in `path`. Raises `NotPossible` where it cannot serve this model here."""
    (one,) = _plan_all([wanted], [facts], hardware, progress, build, path=path)
    return one


def _plan_all(
    wanted: Sequence[ModelOrder],
    models: Sequence[Model],
    hardware: Hardware,
    progress: Progress,
    build: Build,
    budget_bytes: int | None = None,
    tell: Callable[[Hardware, Model, ModelOrder, Decision], None] = lambda hardware, model, wanted, decision: None,
    path: Path | None = None,
) -> tuple[ModelDecision, ...]:
    evidence = _read_evidence(hardware, progress, path)
    builds = [_choose_build(one, build) for one in wanted]
    asks = [
        ServiceAsk(facts.name, one.workload, _make_decider(one, facts, kind, evidence), one.replicas, one.is_on_demand)
        for one, facts, kind in zip(wanted, models, builds, strict=True)
    ]
    parts = divide_machine(hardware, asks, budget_bytes)
    for one, facts, part in zip(wanted, models, parts, strict=True):
        tell(hardware, facts, one, part.decision)
    return tuple(
        ModelDecision(one, hardware, facts, part, plan(part.decision, facts, part.workload), kind)
        for one, facts, part, kind in zip(wanted, models, parts, builds, strict=True)
    )


def _choose_build(wanted: ModelOrder, build: Build) -> Build:
    """ID@VERSION with the version of the native build asks for that build."""
    return "native" if wanted.engine is not None and engine_by_id(wanted.engine).is_native else build


def fetch_facts(model: str | None, hardware: Hardware, progress: Progress) -> Model:
    """The facts of a model whose files are on this machine afterwards."""
    if is_builtin(model):
        fetch_builtin(progress)
    return _find_facts(ModelOrder(model=model, workload=Workload(origin="default")), hardware, progress)


def _find_facts(wanted: ModelOrder, hardware: Hardware, progress: Progress) -> Model:
    found = find_local_model(wanted.model)
    if found is not None:
        verify_cached_model(found, progress)
        return found
    name = expand_name(str(wanted.model))
    if (meaning := describe_short_name(wanted.model)) is not None:
        progress.note(meaning)
    if (published := _choose_published(wanted, hardware)) is not None:
        return fetch_published(name, published, progress)
    return fetch_model(name, hardware.memory.available_bytes, progress)


def _choose_published(wanted: ModelOrder, hardware: Hardware) -> PublishedWeights | None:
    """The published weights that the plan for a known model fetches; `None`: it fetches none."""
    name = expand_name(str(wanted.model))
    facts = look_up_model(name) if find_published_name(name) is not None else None
    if facts is None:
        return None
    decision = decide(hardware, facts, wanted.workload, wanted.engine, operations=wanted.operations, installable=True)
    return decision.weights.published if decision.weights is not None else None


def _make_decider(
    wanted: ModelOrder, facts: Model, build: Build, evidence: StoredEvidence
) -> Callable[[Hardware, Workload], Decision]:
    engine = wanted.engine
    if engine is not None:
        check_version(engine_by_id(engine))
    # A native build is for all of this machine's hardware, and an adopted environment may be.
    for_all = build == "native" or (engine is not None and find_adopted(engine_by_id(engine)) is not None)

    tunings = tuple(one for one in evidence.tunings if (one.build == "native") == (build == "native"))

    def decide_for(hardware: Hardware, workload: Workload) -> Decision:
        decision = decide(
            hardware,
            facts,
            workload,
            engine,
            operations=wanted.operations,
            results=evidence.results,
            agreements=evidence.agreements,
            verdicts=evidence.verdicts,
            tunings=() if wanted.untuned else tunings,
            installable=not for_all,
            registered=read_registered_engines() if build != "native" else None,
        )
        if build == "native" and decision.engine is not None:
            return replace_fields(decision, engine_version=get_source_build(engine_by_id(decision.engine)).version)
        return decision

    return decide_for


def prepare_model(
    one: ModelDecision,
    progress: Progress,
    *,
    examiner: Examiner | None = None,
    environment: EngineEnvironment | None = None,
    to_measure: bool = False,
) -> PreparedModel:
    """Installs and converts what is missing; `environment` is an existing one that contains the engine.

    `to_measure`: a build that cannot be used is not replaced by another one, and there is no advice about builds.
    """
    chosen, steps = one.plan, one.decision.launch.prepare if one.decision.launch is not None else ()
    requested = one.wanted.engine
    if requested is not None and not to_measure:
        note = _describe_idle_accelerators(engine_by_id(requested), one.hardware, chosen)
        if note is not None:
            progress.note(note)
    with fetch_beside(is_builtin(one.wanted.model), progress) as wait_for_model:
        if environment is None:
            environment = _choose_environment(chosen, one.hardware, one.build, progress, examiner, to_measure)
        if environment.adopted_path or environment.built:
            chosen = replace_fields(chosen, engine_version=environment.version)
        else:
            _require_options(chosen, environment, progress)
        wait_for_model()
    record_use(one.facts)
    tools = environment
    if environment.server is not None and not environment.built and any(step.kind == "convert" for step in steps):
        # An adopted server may come without the programs that convert weights.
        tools = make_environment(engine_by_id(chosen.engine), progress, own=True)
    return PreparedModel(one, chosen, environment, prepare(chosen, steps, tools, progress, one.hardware))


def _require_options(chosen: Plan, environment: EngineEnvironment, progress: Progress) -> None:
    """Raises NotPossible if a version that bedplate was not released with rejects an option of the launch."""
    engine = get_plan_engine(chosen)
    if engine.version is None or engine.is_checked(engine.version):
        return
    try:
        found = check_options(engine, environment, engine.launch(chosen, PORT))
    except (OSError, TimeoutError) as error:
        what = f"the options of {engine.name} {engine.version} cannot be checked"
        raise ExternalFailure(what, cause=str(error)) from error
    if found.accepted is False:
        raise NotPossible(
            f"{engine.name} {engine.version} does not accept the options that bedplate starts it with",
            cause=found.text,
            hint=f"use {engine.id} without a version, or {engine.id}@{engine.pinned_version}",
        )
    progress.note(f"{engine.name} {engine.version}: {found.text}")


def _choose_build_engine(engine: str | None, hardware: Hardware) -> Engine:
    """The engine to build. Raises an error if its toolchain is missing."""
    buildable_engines = [one for one in load_engines().values() if one.build is not None]
    only = buildable_engines[0] if len(buildable_engines) == 1 else None
    chosen = engine_by_id(engine) if engine is not None else only
    if chosen is None:
        hint = f"--engine {' or '.join(one.id for one in buildable_engines)}"
        raise UsageError("--build native needs the name of an engine", hint=hint)
    get_source_build(chosen)
    if (target := chosen.find_target(hardware)) is not None:
        find_toolchain(chosen.name, target.device, os.environ)
    return chosen


def _describe_idle_accelerators(engine: Engine, hardware: Hardware, chosen: Plan) -> str | None:
    """A note that the packaged engine does not use this machine's accelerators, if a native build would."""
    target = engine.find_target(hardware)
    if target is None or target.device == chosen.settings.device or engine.build is None:
        return None
    cards = " and ".join(dict.fromkeys(card.name for card in find_cards(hardware, engine.vendors)))
    return f"the packaged {engine.name} uses only the CPU; to use the {cards}, build it from source: --build native"


def _describe_unused_instructions(engine: Engine, hardware: Hardware, chosen: Plan) -> str | None:
    """A note that the packaged engine does not use some instructions of this CPU, if a native build would."""
    if engine.build is None or chosen.settings.device != "cpu":
        return None
    usable = [one for one in engine.build.brings if one[0] in hardware.cpu.instruction_sets]
    if not usable:
        return None
    name, gain = usable[0]
    how = "uses the native build" if find_usable_build(engine, hardware, "cpu") else "builds it from source"
    return (
        f"the packaged {engine.name} is compiled without {INSTRUCTION_SETS[name]} instructions, which this CPU "
        f"supports; a native build reached {gain}. --build native {how}; `bedplate tune` measures the gain"
    )


def _choose_environment(
    chosen: Plan,
    hardware: Hardware,
    build: Build,
    progress: Progress,
    examiner: Examiner | None,
    to_measure: bool = False,
) -> EngineEnvironment:
    engine, device = engine_by_id(chosen.engine), chosen.settings.device
    if build != "native":
        if is_native(chosen.settings):
            if existing := find_usable_build(engine, hardware, device):
                return existing
            progress.note(
                f"the tuned settings of {engine.name} were measured with its native build, which is not installed; "
                f"the packaged one runs with the same settings; --build native builds it from source"
            )
        else:
            engine = get_plan_engine(chosen)
        environment = make_environment(engine, progress, device)
        if (
            environment.server is None
            and not to_measure
            and (note := _describe_unused_instructions(engine, hardware, chosen))
        ):
            progress.note(note)
        return environment
    try:
        return provide_native_environment(engine, hardware, device, progress, examiner, chosen.source or chosen.model)
    except BuildNotUsable as error:
        why, cause = f"the native build of {engine.name} is not used: {error.why}", "; ".join(error.evidence) or None
        if to_measure:
            raise ExternalFailure(why, cause=cause) from error
        if device not in engine.built_for:
            hint = f"omit --build native to use the CPU; or `bedplate engines remove {engine.id}`, then build again"
            raise ExternalFailure(why, cause=cause, hint=hint) from error
        for line in (f"WARNING: {why}", *error.evidence):
            progress.note(line)
        progress.note(f"the packaged {engine.name} {engine.version} is used instead")
        return make_environment(engine, progress, device)


def is_installed(engine: Engine, hardware: Hardware) -> bool:
    """Whether it can be started without an installation; native builds do not count, since they need --build native."""
    target = engine.find_target(hardware)
    if target is None:
        return False
    if find_adopted(engine) is not None:
        return True
    devices = {target.device, "cpu" if engine.cpu else target.device}
    return engine.recipe is not None and any(find_environment(engine, device) is not None for device in devices)


def list_installed_engines(hardware: Hardware) -> tuple[str, ...]:
    return tuple(engine.id for engine in load_engines().values() if is_installed(engine, hardware))


def list_installable_engines() -> tuple[str, ...]:
    return tuple(engine.id for engine in load_engines().values() if engine.recipe is not None)


def _read_evidence(hardware: Hardware, progress: Progress, path: Path | None) -> StoredEvidence:
    """Reads what was measured on this machine from the store. If that fails, serving continues without it."""
    try:
        return read_evidence(compute_fingerprint(hardware), path)
    except ExternalFailure as error:
        progress.note(f"{error.message}: earlier measurements on this machine are not used")
        return StoredEvidence()
