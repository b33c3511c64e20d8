"""Chooses the engine for hardware, model, workload and operations, and gives the reason of every refusal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from bedplate.decide.apply_tuning import with_tuning
from bedplate.decide.candidates import (
    SERVER_EFFORT,
    SHOWN_PORT,
    EngineCandidate,
    choose_candidate,
    describe_rejection,
    find_wrong_answers,
    verify_candidate,
)
from bedplate.decide.case import STORED_BITS, DecisionCase, with_model_task
from bedplate.decide.evidence import BetterEngine, MachineEvidence, gather_evidence, get_engine_name
from bedplate.decide.explain import estimate_candidate, list_reasons
from bedplate.decide.load import get_request_s, solve_candidate_load
from bedplate.decide.planning import plan
from bedplate.decide.rules import ASKED, CHALLENGES, DOUBTS, MEASURED, ORCHESTRATION, PICKS, Doubt, Pick
from bedplate.decide.wording import describe_remedy
from bedplate.engines import Engine, load_engines
from bedplate.engines import get_engine as engine_by_id
from bedplate.engines.base import ComputeTarget, plan_helper_installation
from bedplate.engines.roles import DEQUANTIZER
from bedplate.facts.known_models import apply_label
from bedplate.facts.unpack import make_dequantized
from bedplate.values import (
    Challenger,
    Decision,
    Hardware,
    Model,
    Preparation,
    Reason,
    Refusal,
    RequestLoad,
    Workload,
    replace_fields,
)
from bedplate.values.agreement import Agreement
from bedplate.values.intent import Operations
from bedplate.values.record import make_estimate
from bedplate.values.result import Result
from bedplate.values.tuning import TuningRun
from bedplate.values.units import format_figure
from bedplate.values.verdict import Verdict

KEEPS_UP = 0.9
"""Share of the arriving requests that must be answered; the rest allows for rounding over a few iterations."""
ROUNDS = 4
"""How often the engine and its layout are chosen again because their latency changed the number in flight."""

FOUR_BITS = "AWQ-INT4"
"""The 4-bit quantization in which most models are published, and which all servers load."""
LAST_RESORT = "anywhere"
"""The rule that applies when no other does."""
INCUMBENT = "operations.incumbent"
"""The rule that keeps the engine in service."""
UNPACK_START_S = 15.0
UNPACK_WEIGHTS_S = 15e6


def decide(
    hardware: Hardware,
    model: Model,
    workload: Workload,
    wanted: str | None = None,
    *,
    operations: Operations | None = None,
    results: tuple[Result, ...] = (),
    agreements: tuple[Agreement, ...] = (),
    verdicts: tuple[Verdict, ...] = (),
    tunings: tuple[TuningRun, ...] = (),
    installable: bool = False,
    versions: Mapping[str, str] | None = None,
) -> Decision:
    """Choose the engine and estimate its performance. `wanted` requests one engine by its id, or by ID@VERSION.

    `results`, `agreements`, `verdicts` and `tunings` are measurements, checks of answers, comparisons and tuning
    results of this machine, newest first. `installable` restricts the choice to engines that this version of bedplate
    installs and starts. `versions` are those of the engines that are registered here.
    """
    engines = _apply_versions(versions or {}, wanted)
    asked = engines[wanted.partition("@")[0]] if wanted is not None else None
    workload = with_model_task(model, workload)
    folder = make_dequantized(model) if asked is not None and _needs_dequantization(asked) else None
    case = DecisionCase(hardware, folder or model, workload, operations or Operations())
    if model.max_context is not None and workload.request_tokens > model.max_context:
        return _refuse_too_long(case)
    evidence = gather_evidence(hardware, case.model, results, agreements, verdicts, tunings)
    decision = settle_load(EngineSearch(case, evidence, installable, engines), asked).make_decision(asked)
    if workload.depends_on_latency:
        note = explain_too_slow(decision, workload) or _explain_load(decision)
        decision = replace_fields(decision, notes=(note, *decision.notes))
    if disturbed := _describe_disturbed_rates(hardware):
        decision = replace_fields(decision, notes=(*decision.notes, disturbed))
    if asked is None and (better := _suggest_four_bits(decision, case, evidence, installable)):
        decision = replace_fields(decision, notes=(*decision.notes, better))
    return _add_dequantization(decision, model, case.model) if folder is not None else decision


def _describe_disturbed_rates(hardware: Hardware) -> str | None:
    """A note if the only known memory bandwidth was measured while other processes used the machine."""
    measured = hardware.measured
    figures = [card.bandwidth_bytes_s for card in hardware.accelerators] or [hardware.memory.bandwidth_bytes_s]
    used = any(figure is not None and figure.basis == "measured" for figure in figures)
    if measured is None or not measured.disturbances or not used:
        return None
    why = measured.disturbances[0]
    return f"the memory bandwidth was measured on a busy machine ({why}); bedplate probe --measure repeats it"


def _apply_versions(versions: Mapping[str, str], wanted: str | None) -> dict[str, Engine]:
    """All engines, each in its registered version; the requested engine in the version that `wanted` names."""
    known = load_engines()
    found = {**known, **{name: engine_by_id(f"{name}@{one}") for name, one in versions.items() if name in known}}
    if wanted is not None and wanted not in found:
        asked = engine_by_id(wanted)
        found[asked.id] = asked
    return found


def _suggest_four_bits(
    decision: Decision, case: DecisionCase, evidence: MachineEvidence, installable: bool
) -> str | None:
    """A note that 4-bit weights would be better, if only an engine for few requests loads the weights as published."""
    for_few = decision.engine is None or decision.reasons[0].rule == LAST_RESORT
    details = case.model.quantization_details
    if not for_few or not case.has_many_requests or case.cards == 0 or details is None or details.bits <= STORED_BITS:
        return None
    small = apply_label(case.model, FOUR_BITS)
    other = EngineSearch(replace(case, model=small), evidence, installable).make_decision(None)
    if other.engine is None or engine_by_id(other.engine).effort < SERVER_EFFORT or other.estimate.output_tok_s is None:
        return None
    speed = f"about {format_figure(other.estimate.output_tok_s.value)} tok/s"
    return f"with {FOUR_BITS} weights, {other.engine} would serve it here at {speed}; use such a version of the model"


def _needs_dequantization(engine: Engine) -> bool:
    """Whether a GGUF file must be dequantized to a model folder for this engine."""
    return "gguf" not in (*engine.formats, *engine.converts)


def _add_dequantization(decision: Decision, source: Model, folder: Model) -> Decision:
    """Add the step that dequantizes the GGUF file to the decision for the dequantized weights."""
    if decision.launch is None:
        return decision
    where, unpacker = folder.short_name, engine_by_id(DEQUANTIZER.id)
    step = Preparation(
        kind="convert",
        what=f"{source.name} from {source.quantization} GGUF to a folder of 16-bit weights",
        where=where,
        disk_bytes=folder.weight_bytes,
        seconds=make_estimate(
            UNPACK_START_S + source.parameters / UNPACK_WEIGHTS_S,
            0.7,
            "measured: 135 million parameters took 30 s on two cores that were in use",
        ),
        argv=("gguf-to-folder", source.files[0] if source.files else f"{source.name}.gguf", where),
        within=unpacker.id,
    )
    needs = plan_helper_installation(unpacker) if decision.engine != unpacker.id else ()
    # A dequantized folder need not be downloaded.
    others = tuple(one for one in decision.launch.prepare if (one.kind, one.where) != ("download", where))
    launch = replace_fields(decision.launch, prepare=(*needs, step, *others))
    return replace_fields(decision, unpacks=True, launch=launch)


def settle_load(search: EngineSearch, asked: Engine | None) -> EngineSearch:
    """The search for the number of requests in flight that the chosen engine and layout have.

    The number depends on their latency, and the choice on the number, so both are computed until they agree.
    """
    workload = search.case.workload
    if not workload.depends_on_latency:
        return search
    load = workload.make_load()
    for _ in range(ROUNDS):
        search = search.with_load(load)
        chosen = search.find_chosen(asked)
        if chosen is None:
            break
        factor = search.evidence.get_factor(chosen.engine.id, chosen.target.device)
        load = solve_candidate_load(chosen, search.case, factor)
        if load.in_flight == search.case.in_flight:
            break
    return search


def _explain_load(decision: Decision) -> str:
    load = decision.load
    if load is None:
        return f"{decision.in_flight:,} requests in flight"
    return f"{load.description} (Little's law, about {load.request_s:.1f} s per request)"


def explain_too_slow(decision: Decision, workload: Workload) -> str | None:
    """The message that requests arrive faster than they are answered, so that the queue grows; `None` if not."""
    made, asked = decision.estimate.output_tok_s, workload.requests_per_s
    answered = made.value / workload.output_tokens if made is not None else None
    if answered is None or asked is None or answered >= asked * KEEPS_UP:
        return None
    return (
        f"{asked:g} requests/s arrive, but only about {format_figure(answered, 2)} are answered, so the queue "
        f"keeps growing; "
        f"about {math.ceil(asked / answered):,} machines of this kind would be enough"
    )


class EngineSearch:
    """The search for an engine for one case. The candidate of each engine is computed on demand and kept."""

    def __init__(
        self,
        case: DecisionCase,
        evidence: MachineEvidence,
        installable: bool,
        engines: Mapping[str, Engine] | None = None,
    ) -> None:
        self.case, self.evidence, self.installable = case, evidence, installable
        self.engines = engines or load_engines()
        self._found: dict[str, EngineCandidate | Refusal] = {}
        self._wanted: Engine | None = None
        self._overruled: tuple[str, BetterEngine] | None = None
        """The engine that a rule chose, and the engine that was measured to be better."""

    def get_candidate(self, engine: Engine) -> EngineCandidate | Refusal:
        if engine.id not in self._found:
            if self.installable and not _can_install(engine, self.case.hardware):
                found: EngineCandidate | Refusal = engine.make_refusal(
                    "outranked", "this version of bedplate plans it, but cannot install and start it", engine.strength
                )
            else:
                found = choose_candidate(
                    engine, self.case, self.evidence, installable=self.installable, asked=engine is self._wanted
                )
            self._found[engine.id] = found
        return self._found[engine.id]

    def with_load(self, load: RequestLoad) -> EngineSearch:
        """The same search for the workload with this load."""
        case = self.case.with_work(replace_fields(self.case.workload, load=load))
        return EngineSearch(case, self.evidence, self.installable, self.engines)

    def find_chosen(self, asked: Engine | None) -> EngineCandidate | None:
        """The candidate that `make_decision` chooses."""
        self._wanted = asked
        return (self._choose_requested(asked) if asked is not None else self.pick_engine())[0]

    def make_decision(self, asked: Engine | None) -> Decision:
        self._wanted = asked
        chosen, reason = self._choose_requested(asked) if asked is not None else self.pick_engine()
        refused, challengers = self._judge_others(chosen, asked)
        source = self.case.model
        folder = make_dequantized(source) if chosen is not None and chosen.unpacks else None
        case = replace(self.case, model=folder) if folder is not None else self.case
        if chosen is None or reason is None:
            return Decision(
                engine=None, model=case.model.name, quantization=case.model.quantization, fits=False,
                max_concurrency=0, in_flight=case.in_flight, refused=refused, hints=self._list_hints(asked),
            )  # fmt: skip
        tuned = with_tuning(chosen, case, self.evidence)
        chosen = tuned if tuned is chosen or verify_candidate(tuned, case) is None else chosen
        orchestrator, above = self._choose_orchestrator(_count_nodes(chosen))
        estimate = estimate_candidate(chosen, case)
        decision = Decision(
            engine=chosen.engine.id,
            engine_version=chosen.engine.version,
            orchestrator=orchestrator,
            model=case.model.name,
            quantization=chosen.quantization,
            parallelism=chosen.layout,
            fits=True,
            max_concurrency=chosen.max_concurrency,
            in_flight=case.in_flight,
            load=case.workload.make_load(get_request_s(estimate, case.workload), case.in_flight),
            weights=chosen.weights,
            settings=chosen.settings,
            memory=chosen.fit,
            estimate=estimate,
            limit=chosen.expected.limit if chosen.expected is not None else None,
            reasons=(
                reason,
                *self._explain_replacement(chosen, reason),
                *list_reasons(chosen, case, self.evidence),
                *above,
            ),
            refused=refused,
            challengers=challengers,
            notes=tuple(map(describe_rejection, chosen.rejected[:1])),
        )
        launch = chosen.engine.launch(plan(decision, case.model, case.workload), SHOWN_PORT)
        decision = replace_fields(decision, launch=launch)
        return _add_dequantization(decision, source, folder) if folder is not None else decision

    def _explain_replacement(self, chosen: EngineCandidate, why: Reason) -> tuple[Reason, ...]:
        """Why the engine in service is replaced; nothing if an option or a measurement chose, which has a reason."""
        named = self.case.operations.incumbent
        engine = self.engines.get(named) if named is not None else None
        if engine is None or engine is chosen.engine or self._wanted is not None or self._overruled is not None:
            return ()
        status = self._judge_engine(engine, chosen)
        if not isinstance(status, Refusal) or why.rule == INCUMBENT:
            return ()
        rule = next(rule for rule in PICKS if rule.id == INCUMBENT)
        return (Reason(rule=rule.id, text=f"{engine.name} is in service, but: {status.why}", source=rule.citation),)

    def _choose_requested(self, engine: Engine) -> tuple[EngineCandidate | None, Reason | None]:
        found = self.get_candidate(engine)
        if isinstance(found, Refusal):
            return None, None
        text = f"{engine.name} was requested with --engine"
        if (wrong := find_wrong_answers(found, self.evidence)) is not None:
            text += f". WARNING: it gave wrong answers on this machine: {wrong.why}"
        return found, Reason(rule=ASKED[0], text=text, source=ASKED[1])

    def pick_engine(self) -> tuple[EngineCandidate | None, Reason | None]:
        """The chosen engine and the reason, without the refusals of the other engines."""
        for rule in PICKS:
            picked = rule.says(self.case)
            found = self._find_first_able(picked) if picked is not None else None
            if picked is not None and found is not None:
                return self._find_better(found) or (found, Reason(rule=rule.id, text=picked.text, source=rule.citation))
        return None, None

    def _find_first_able(self, picked: Pick) -> EngineCandidate | None:
        for engine_id in picked.engines:
            engine = self.engines.get(engine_id)
            found = self.get_candidate(engine) if engine is not None else None
            if not isinstance(found, EngineCandidate) or self._leaves_gpu_idle(found.target):
                continue
            holds = found.max_concurrency >= self.case.in_flight
            if holds or not picked.holding or engine_id == picked.engines[-1]:
                return found
        return None

    def _leaves_gpu_idle(self, target: ComputeTarget | None) -> bool:
        """Whether an engine on this target uses the CPU although another engine would use the GPU."""
        on_cpu = target is not None and target.device == "cpu"
        if self.installable or not on_cpu or not self.case.hardware.accelerators:
            return False
        return any(
            (target := engine.find_target(self.case.hardware)) is not None and target.device != "cpu"
            for engine in self.engines.values()
        )

    def _find_better(self, chosen: EngineCandidate) -> tuple[EngineCandidate, Reason] | None:
        """The engine that a measurement on this machine shows to be better; it takes precedence over the rules."""
        work = replace_fields(self.case.workload, concurrency=self.case.in_flight)
        for better in self.evidence.find_better(chosen.engine.id, chosen.quantization, work):
            found = self._get_measured_candidate(better)
            if found is not None:
                self._overruled = chosen.engine.id, better
                return found, Reason(rule=MEASURED[0], text=better.text, source=better.source)
        return None

    def _get_measured_candidate(self, better: BetterEngine) -> EngineCandidate | None:
        """The candidate with the quantization that was measured, if the engine can be given it."""
        engine = self.engines.get(better.engine)
        if engine is None:
            return None
        found = self.get_candidate(engine)
        if better.made_into is None:
            return found if isinstance(found, EngineCandidate) else None
        if (
            isinstance(found, Refusal)
            and _needs_dequantization(engine)
            and (folder := make_dequantized(self.case.model))
        ):
            if self.installable and not _can_install(engine, self.case.hardware):
                return None
            found = choose_candidate(
                engine, replace(self.case, model=folder), self.evidence, installable=self.installable
            )
            found = replace(found, unpacks=True) if isinstance(found, EngineCandidate) else found
        same = isinstance(found, EngineCandidate) and found.quantization == better.made_into
        return found if isinstance(found, EngineCandidate) and same else None

    def _judge_others(
        self, chosen: EngineCandidate | None, asked: Engine | None
    ) -> tuple[tuple[Refusal, ...], tuple[Challenger, ...]]:
        refused: list[Refusal] = []
        challengers: list[Challenger] = []
        for engine in self.engines.values():
            if chosen is not None and engine is chosen.engine:
                continue
            status = self._judge_engine(engine, chosen)
            (refused if isinstance(status, Refusal) else challengers).append(status)  # type: ignore[arg-type]
        # The requested engine comes first; if nothing fits, those whose refusal says how much memory is missing.
        refused.sort(
            key=lambda refusal: (
                asked is None or refusal.engine != asked.id,
                chosen is not None or refusal.shortage is None or not load_engines()[refusal.engine].offloads,
                chosen is not None or refusal.shortage is None,
            )
        )
        return tuple(refused), tuple(challengers)

    def _judge_engine(self, engine: Engine, chosen: EngineCandidate | None) -> Refusal | Challenger:
        case = self.case
        if self._overruled is not None and engine.id == self._overruled[0]:
            better = self._overruled[1]
            by = f" by {better.gain - 1:.0%}" if better.gain > 1 else ""
            again = f"bedplate bench --engines {engine.id},{better.engine} --turns 3"
            return engine.make_refusal(
                "outranked",
                f"a measurement here shows {get_engine_name(better.engine)} to be better{by} on a similar workload "
                f"({better.source})",
                f"a new comparison shows the opposite: {again}",
            )
        if refusal := engine.refuse(case.hardware, case.model, case.workload):
            return refusal
        doubt = find_doubt(engine, case)
        if doubt is not None and chosen is not None:
            return engine.make_refusal(doubt.kind, doubt.why, doubt.hint)
        found = self.get_candidate(engine)
        if isinstance(found, Refusal) and not self._leaves_gpu_idle(engine.find_target(case.hardware)):
            return found
        if doubt is not None:
            return engine.make_refusal(doubt.kind, doubt.why, doubt.hint)
        if isinstance(found, Refusal) or self._leaves_gpu_idle(found.target):
            return engine.make_refusal(
                "unsuitable", "would run on the CPU here and leave the GPU idle", engine.strength
            )
        if chosen is None:
            return engine.make_refusal("outranked", "another engine was requested", engine.strength)
        for rule in CHALLENGES:
            if engine.id in rule.engines and (evidence := rule.says(case, chosen.engine.id)):
                return Challenger(engine=engine.id, evidence_needed=evidence)
        return engine.make_refusal(
            "outranked", f"{chosen.engine.name} is better suited to this machine", engine.strength
        )

    def _choose_orchestrator(self, nodes: int) -> tuple[str | None, tuple[Reason, ...]]:
        for rule in ORCHESTRATION:
            if picked := rule.says(self.case, nodes):
                return picked.engines[0], (Reason(rule=rule.id, text=picked.text, source=rule.citation),)
        return None, ()

    def _list_hints(self, asked: Engine | None) -> tuple[str, ...]:
        """What would make the model fit; engines that offload come first, because they need the least memory."""
        engines = [asked] if asked is not None else sorted(self.engines.values(), key=lambda one: not one.offloads)
        tried = [refusal for engine in engines if isinstance(refusal := self._found.get(engine.id), Refusal)]
        remedies = next((refusal.remedies for refusal in tried if refusal.remedies), ())
        return tuple(map(describe_remedy, remedies))


def _count_nodes(chosen: EngineCandidate) -> int:
    """The number of hosts that the layout uses. A rack whose GPUs share links still has many hosts."""
    if not chosen.hardware.accelerators:
        return 1
    chip, each = chosen.target.chip, chosen.hardware.cards_per_node
    if chip is not None and chip.per_host is not None:
        each = min(each, chip.per_host)
    return -(-chosen.cards // max(1, each))


def _can_install(engine: Engine, hardware: Hardware) -> bool:
    """Whether bedplate can install it; a CPU build does not count if the engine supports this machine's GPU."""
    target = engine.find_target(hardware)
    if engine.recipe is None or target is None or target.device not in engine.built_for:
        return engine.recipe is not None
    return engine.find_recipe(target.device) is not None


def find_doubt(engine: Engine, case: DecisionCase) -> Doubt | None:
    return next((doubt for rule in DOUBTS if engine.id in rule.engines and (doubt := rule.says(case))), None)


def _refuse_too_long(case: DecisionCase) -> Decision:
    """Every engine refuses a request that is longer than the model's context."""
    model, workload = case.model, case.workload
    why = (
        f"requests have {workload.request_tokens:,} tokens, but the context of {model.name} is "
        f"{model.max_context:,} tokens"
    )
    return Decision(
        engine=None,
        model=model.name,
        quantization=model.quantization,
        fits=False,
        max_concurrency=0,
        in_flight=case.in_flight,
        refused=tuple(engine.make_refusal("impossible", why) for engine in load_engines().values()),
        hints=(f"a context of at most {model.max_context:,} tokens (--context)", "a model with a longer context"),
    )
