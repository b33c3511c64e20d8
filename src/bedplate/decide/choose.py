"""Chooses the engine for hardware, model, workload and operations, and gives the reason of every refusal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from bedplate.decide.alternatives import EngineAlternatives, NamedRule, list_alternatives, list_exceptions
from bedplate.decide.apply_tuning import with_tuning
from bedplate.decide.candidates import (
    EVERYDAY_BITS,
    FETCHED_SHARE,
    LONG_CONVERSION_S,
    PRECISE_BITS,
    ROUNDED_OFF,
    SERVER_EFFORT,
    SHOWN_PORT,
    EngineCandidate,
    compute_conversion_s,
    describe_rejection,
    find_wrong_answers,
    list_candidates,
    refuse_model,
    refuse_unfitting,
    verify_candidate,
)
from bedplate.decide.cards import order_cards
from bedplate.decide.case import CHAT_TARGET, STORED_BITS, DecisionCase, with_batch_load, with_model_task
from bedplate.decide.evidence import BetterEngine, MachineEvidence, gather_evidence, get_engine_name
from bedplate.decide.explain import describe_equal_requests, estimate_candidate, list_reasons
from bedplate.decide.hints import add_hints
from bedplate.decide.load import get_request_s, solve_candidate_load
from bedplate.decide.memory import add_start_memory
from bedplate.decide.nodes import count_host_cards, list_node_launches, make_launch
from bedplate.decide.order import (
    MARGIN,
    Standing,
    choose_verified,
    classify_fidelity,
    estimate_speed,
    explain_loss,
    get_standing,
    is_comparable,
)
from bedplate.decide.planning import plan
from bedplate.decide.rules import (
    ASKED,
    CHALLENGES,
    DOUBTS,
    MEASURED,
    ORCHESTRATION,
    PICKS,
    TIMELY,
    DecisionRule,
    Doubt,
    Pick,
)
from bedplate.decide.unified import list_raised_limits
from bedplate.engines import Engine, get_registered_engine, load_engines
from bedplate.engines import get_engine as engine_by_id
from bedplate.engines.base import ComputeTarget, RegisteredEngine, make_download_step, plan_helper_installation
from bedplate.engines.roles import DEQUANTIZER
from bedplate.facts.known_models import apply_label
from bedplate.facts.published_weights import list_published
from bedplate.facts.unpack import make_dequantized
from bedplate.values import (
    Alternative,
    Challenger,
    Decision,
    Estimate,
    Hardware,
    Hint,
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
from bedplate.values.units import format_figure, format_seconds
from bedplate.values.verdict import Verdict

CLEARLY_FASTER = 2.0
"""Beyond the errors of both estimates."""
ROUNDS = 4
"""How often the engine and its layout are chosen again because their latency changed the number in flight."""

FOUR_BITS = "AWQ-INT4"
"""The 4-bit quantization in which most models are published, and which all servers load."""
LAST_RESORT = "anywhere"
"""The rule that applies when no other does."""
INCUMBENT = "operations.incumbent"
"""The rule that keeps the engine in service."""
IDLE_GPU = "build.cpu"
"""The rule about builds that compute on the CPU beside an idle GPU."""
RAY, DYNAMO, KUBERNETES = "ray", "dynamo", "kubernetes"
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
    registered: Mapping[str, RegisteredEngine] | None = None,
    with_alternatives: bool = False,
) -> Decision:
    """Choose the engine and estimate its performance. `wanted` requests one engine by its id, or by ID@VERSION.

    `results`, `agreements`, `verdicts` and `tunings` are measurements, checks of answers, comparisons and tuning
    results of this machine, newest first. `installable` restricts the choice to engines that this version of bedplate
    installs and starts. `registered` are the engines of the user's own environments here. `with_alternatives` adds the
    plans that were not chosen, which takes about three times as long as the choice.
    """
    hardware = order_cards(hardware)
    engines = adapt_engines(_find_engines(registered or {}, wanted), hardware, installable)
    asked = engines[wanted.partition("@")[0]] if wanted is not None else None
    workload = with_batch_load(hardware, with_model_task(model, workload))
    folder = make_dequantized(model) if asked is not None and _needs_dequantization(asked) else None
    case = DecisionCase(hardware, folder or model, workload, operations or Operations())
    if model.max_context is not None and workload.request_tokens > model.max_context:
        return add_hints(_refuse_too_long(case), case, engines)
    evidence = gather_evidence(hardware, case.model, results, agreements, verdicts, tunings)
    search = settle_load(EngineSearch(case, evidence, installable, engines), asked)
    decision = search.make_decision(asked, with_alternatives=with_alternatives)
    decision = add_hints(decision, case, engines)
    if workload.depends_on_latency:
        decision = replace_fields(decision, notes=(_explain_load(decision), *decision.notes))
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


def _find_engines(registered: Mapping[str, RegisteredEngine], wanted: str | None) -> dict[str, Engine]:
    """All engines, each as it is registered; the requested engine in the version that `wanted` names."""
    known = load_engines()
    found = {**known, **{name: get_registered_engine(name, one) for name, one in registered.items() if name in known}}
    if wanted is not None and wanted not in found:
        asked = engine_by_id(wanted)
        if found[asked.id].version != asked.version:
            found[asked.id] = asked
    return found


def adapt_engines(engines: Mapping[str, Engine], hardware: Hardware, installable: bool) -> Mapping[str, Engine]:
    """The engines with the plugins that they have for this machine; bedplate installs none of the plugins."""
    if installable:
        return engines
    return {name: engine.adapt_to_hardware(hardware) for name, engine in engines.items()}


def _suggest_four_bits(
    decision: Decision, case: DecisionCase, evidence: MachineEvidence, installable: bool
) -> str | None:
    """A note that 4-bit weights would be better, if only an engine for few requests loads the weights as published."""
    for_few = decision.engine is None or decision.reasons[0].rule == LAST_RESORT
    details = case.model.quantization_details
    if not for_few or not case.has_many_requests or case.cards == 0 or details is None or details.bits <= STORED_BITS:
        return None
    small = apply_label(case.model, FOUR_BITS)
    search = EngineSearch(replace(case, model=small), evidence, installable)
    other = search.make_decision(None)
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
    # A file that the name of a model means is fetched first.
    published = next((form.weights for form in list_published(source)), None)
    file = source.files[0] if source.files else published.path if published is not None else f"{source.name}.gguf"
    fetch = () if published is None else (make_download_step(published),)
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
        argv=("gguf-to-folder", file, where),
        within=unpacker.id,
    )
    needs = plan_helper_installation(unpacker) if decision.engine != unpacker.id else ()
    # A dequantized folder need not be downloaded.
    others = tuple(one for one in decision.launch.prepare if (one.kind, one.where) != ("download", where))
    launch = replace_fields(decision.launch, prepare=(*needs, *fetch, step, *others))
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
        load = solve_candidate_load(chosen, search.case)
        if load.in_flight == search.case.in_flight:
            break
    return search


def _surely_misses(estimate: Estimate) -> bool:
    """Whether the low end of a latency's band is above the target of a chat."""
    pairs = ((estimate.ttft_ms, CHAT_TARGET.ttft_ms), (estimate.tpot_ms, CHAT_TARGET.tpot_ms))
    return any(took is not None and limit is not None and took.low > limit for took, limit in pairs)


def _explain_load(decision: Decision) -> str:
    load = decision.load
    if load is None:
        return f"{decision.in_flight:,} requests in flight"
    return f"{load.description} (Little's law, about {load.request_s:.1f} s per request)"


class EngineSearch:
    """The search for an engine for one case. The candidates of each engine are computed on demand and kept."""

    def __init__(
        self,
        case: DecisionCase,
        evidence: MachineEvidence,
        installable: bool,
        engines: Mapping[str, Engine] | None = None,
    ) -> None:
        self.case, self.evidence, self.installable = case, evidence, installable
        self.engines = adapt_engines(engines or load_engines(), case.hardware, installable)
        self._listed: dict[str, tuple[EngineCandidate, ...] | Refusal] = {}
        self._found: dict[str, EngineCandidate | Refusal] = {}
        self._wanted: Engine | None = None
        self._overruled: tuple[str, BetterEngine] | None = None
        """The engine that a rule chose, and the engine that was measured to be better."""

    def get_candidate(self, engine: Engine) -> EngineCandidate | Refusal:
        """The best candidate of this engine, or why it has none."""
        engine = engine if self.installable else engine.adapt_to_hardware(self.case.hardware)
        if engine.id not in self._found:
            self._found[engine.id] = self._choose_candidate(engine, self.get_candidates(engine), self.case)
        return self._found[engine.id]

    def get_candidates(self, engine: Engine) -> tuple[EngineCandidate, ...] | Refusal:
        """All candidates of this engine, whether they fit or not."""
        if engine.id not in self._listed:
            if self.installable and not _can_install(engine, self.case.hardware):
                self._listed[engine.id] = engine.make_refusal(
                    "outranked", "this version of bedplate plans it, but cannot install and start it", engine.strength
                )
            else:
                self._listed[engine.id] = list_candidates(
                    engine, self.case, self.evidence, installable=self.installable
                )
        return self._listed[engine.id]

    def _choose_candidate(
        self, engine: Engine, found: tuple[EngineCandidate, ...] | Refusal, case: DecisionCase
    ) -> EngineCandidate | Refusal:
        if isinstance(found, Refusal):
            return found
        fitting = [one for one in found if one.fit.fits]
        if not fitting:
            return refuse_unfitting(engine, found, case)
        return choose_verified(engine, fitting, case, self.evidence, asked=engine is self._wanted)

    def with_load(self, load: RequestLoad) -> EngineSearch:
        """The same search for the workload with this load."""
        case = self.case.with_work(replace_fields(self.case.workload, load=load))
        return EngineSearch(case, self.evidence, self.installable, self.engines)

    def find_chosen(self, asked: Engine | None) -> EngineCandidate | None:
        """The candidate that `make_decision` chooses."""
        self._wanted = asked
        return (self._choose_requested(asked) if asked is not None else self.pick_engine())[0]

    def make_decision(self, asked: Engine | None, *, with_alternatives: bool = False) -> Decision:
        self._wanted = asked
        chosen, reason = self._choose_requested(asked) if asked is not None else self.pick_engine()
        refused, challengers = self._judge_others(chosen, asked)
        compared = self.engines.values() if with_alternatives else (chosen.engine,) if chosen is not None else ()
        alternatives = self.list_alternatives(compared, chosen, reason)
        source = self.case.model
        folder = make_dequantized(source) if chosen is not None and chosen.unpacks else None
        case = replace(self.case, model=folder) if folder is not None else self.case
        if chosen is None or reason is None:
            return Decision(
                engine=None, model=case.model.name, quantization=case.model.quantization, fits=False,
                max_concurrency=0, in_flight=case.in_flight, refused=refused, alternatives=alternatives,
                hint_details=(*self._find_raised_limit(None), *self._list_remedies(asked)),
            )  # fmt: skip
        # Rules against plans of the chosen engine are reasons, with or without the alternatives.
        exceptions = list_exceptions(alternatives, chosen)
        tuned = with_tuning(chosen, case, self.evidence)
        chosen = tuned if tuned is chosen or verify_candidate(tuned, case) is None else chosen
        orchestrator, above = self._choose_orchestrator(chosen)
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
            memory=add_start_memory(
                chosen.fit, chosen.engine, chosen.weights, case.model, chosen.model, chosen.layout, chosen.settings
            ),
            estimate=estimate,
            limit=chosen.expected.limit if chosen.expected is not None else None,
            reasons=(
                reason,
                *self._explain_replacement(chosen, reason),
                *list_reasons(chosen, case, self.evidence),
                *exceptions,
                *above,
            ),
            refused=refused,
            challengers=challengers,
            alternatives=alternatives if with_alternatives else (),
            hint_details=(*_warn_of_few_bits(chosen), *self._find_raised_limit(chosen)),
            notes=(
                *map(describe_rejection, chosen.rejected[:1]),
                *filter(None, [describe_equal_requests(chosen, case, estimate)]),
            ),
        )
        planned = plan(decision, case.model, case.workload)
        decision = replace_fields(
            decision,
            launch=make_launch(planned, chosen.engine, chosen.hardware, SHOWN_PORT),
            node_launches=list_node_launches(planned, chosen.engine, chosen.hardware, SHOWN_PORT),
        )
        return _add_dequantization(decision, source, folder) if folder is not None else decision

    def list_alternatives(
        self, engines: Iterable[Engine], chosen: EngineCandidate | None, reason: Reason | None
    ) -> tuple[Alternative, ...]:
        """The plans of these engines that were not chosen."""
        listed = (
            EngineAlternatives(candidates, self._find_rule_against(engine, chosen, reason))
            for engine in engines
            if not isinstance(candidates := self.get_candidates(engine), Refusal)
        )
        return list_alternatives(chosen, list(listed), self.case)

    def _find_rule_against(
        self, engine: Engine, chosen: EngineCandidate | None, reason: Reason | None
    ) -> NamedRule | None:
        """The rule because of which this engine is not chosen even if its estimate is better."""
        if chosen is None or reason is None or engine is chosen.engine:
            return None
        if self._wanted is not None:
            return NamedRule(ASKED[0], f"{self._wanted.name} was requested with --engine")
        if (doubted := find_doubt_rule(engine, self.case)) is not None:
            return NamedRule(doubted[0].id, doubted[1].why)
        if self._leaves_gpu_idle(engine.find_target(self.case.hardware)):
            return NamedRule(IDLE_GPU, "would run on the CPU here and leave the GPU idle")
        return NamedRule(reason.rule, f"{chosen.engine.name} is preferred: {reason.text}")

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
            if picked is not None and rule.id == LAST_RESORT:
                picked = self._put_doubted_last(picked)
            found = self._find_first_able(picked) if picked is not None else None
            if picked is not None and found is not None:
                text = f"{picked.text}{self._describe_skipped(picked, found)}"
                named = (found, Reason(rule=rule.id, text=text, source=rule.citation))
                timely = self._find_better(found) or self._find_timely(found, rule.id)
                return timely or self._find_faster(found, rule.id) or named
        return None, None

    def _find_timely(self, chosen: EngineCandidate, rule_id: str) -> tuple[EngineCandidate, Reason] | None:
        """The best candidate of another engine that meets the latency targets, if the chosen one misses them clearly.

        Other engines that the rules name for this case are considered and, if the workload states the targets or most
        servers have no kernels for the cards, the challengers; where no rule names an engine that runs here, all
        servers. Without stated targets, the whole band of the estimate must miss them. What the intent states about
        operations takes precedence.
        """
        missed = get_standing(chosen, self.case).missed
        if rule_id.startswith("operations.") or chosen.expected is None or missed <= 1:
            return None
        if self.case.workload.latency is None and not _surely_misses(estimate_candidate(chosen, self.case)):
            return None
        others = self._list_suitable(chosen)
        if rule_id == LAST_RESORT:
            others = [*others, *self._list_servers(chosen, with_doubts=True)]
        timely = [
            found
            for engine in others
            if isinstance(found := self.get_candidate(engine), EngineCandidate)
            and found.expected is not None
            and get_standing(found, self.case).missed == 0
        ]
        if not timely:
            return None
        best = min(timely, key=lambda one: (get_standing(one, self.case).group, -estimate_speed(one)))
        text = f"{best.engine.name} meets the latency targets; {chosen.engine.name}, the choice of {rule_id}, "
        text += explain_loss(chosen, best, self.case)
        return best, Reason(rule=TIMELY[0], text=text, source=TIMELY[1])

    def _find_faster(self, chosen: EngineCandidate, rule_id: str) -> tuple[EngineCandidate, Reason] | None:
        """Another engine for many requests that is expected to be clearly faster, if no rule names one for them.

        An engine that meets the targets stays, except for batch work.
        """
        own, speed = get_standing(chosen, self.case), estimate_speed(chosen)
        if rule_id != LAST_RESORT or not self.case.has_many_requests or chosen.expected is None:
            return None
        if own.shortfall <= 1 and not self.case.workload.batch:
            return None
        faster = [
            found
            for engine in (*self._list_suitable(chosen), *self._list_servers(chosen))
            if isinstance(found := self.get_candidate(engine), EngineCandidate)
            and found.expected is not None
            and estimate_speed(found) >= CLEARLY_FASTER * speed
            and _is_no_worse(get_standing(found, self.case), own)
            and found.max_concurrency >= min(self.case.in_flight, chosen.max_concurrency)
        ]
        if not faster:
            return None
        best = max(faster, key=estimate_speed)
        rates = f"{format_figure(estimate_speed(best))} tok/s instead of {format_figure(speed)}"
        text = f"no rule names an engine for this workload here, and {best.engine.name} is expected to be faster: "
        text += f"{rates} with {chosen.engine.name}"
        return best, Reason(rule=TIMELY[0], text=text, source=TIMELY[1])

    def _list_suitable(self, chosen: EngineCandidate) -> list[Engine]:
        """Other engines without a doubt that a rule names for this case, or that are worth measuring if it is asked."""
        case = self.case
        named = [
            name for rule in PICKS if rule.id != LAST_RESORT and (pick := rule.says(case)) for name in pick.engines
        ]
        if case.workload.latency is not None or case.has_pre_turing_cards:
            named += [
                name for rule in CHALLENGES if rule.says(case, chosen.engine.id) is not None for name in rule.engines
            ]
        engines = [self.engines[name] for name in dict.fromkeys(named) if name in self.engines]
        return [
            engine
            for engine in engines
            if engine is not chosen.engine
            and find_doubt(engine, case) is None
            and not self._leaves_gpu_idle(engine.find_target(case.hardware))
        ]

    def _put_doubted_last(self, picked: Pick) -> Pick:
        """The same engines: those that are designed for this workload first, each in the order of their effort."""
        known = [name for name in picked.engines if name in self.engines]
        return picked._replace(
            engines=tuple(sorted(known, key=lambda name: find_doubt(self.engines[name], self.case) is not None))
        )

    def _list_servers(self, chosen: EngineCandidate, *, with_doubts: bool = False) -> list[Engine]:
        """Engines that batch and use the accelerators; with doubts, also those that are not designed for so few
        requests, which still answer them."""
        found = []
        for engine in self.engines.values():
            doubt = find_doubt(engine, self.case)
            is_doubted = doubt is not None and not (with_doubts and doubt.kind == "unsuitable")
            on_cards = self._uses_accelerators(engine.id)
            if engine is not chosen.engine and engine.effort >= SERVER_EFFORT and on_cards and not is_doubted:
                found.append(engine)
        return found

    def _find_first_able(self, picked: Pick) -> EngineCandidate | None:
        for engine_id in picked.engines:
            engine = self.engines.get(engine_id)
            found = self.get_candidate(engine) if engine is not None else None
            if not isinstance(found, EngineCandidate) or self._leaves_gpu_idle(found.target):
                continue
            holds = found.max_concurrency >= self.case.in_flight
            if holds or not picked.holding or engine_id == picked.engines[-1]:
                return self._find_fetching(picked, found) or found
        return None

    def _find_fetching(self, picked: Pick, chosen: EngineCandidate) -> EngineCandidate | None:
        """A later engine of the same rule that fetches published weights, or converts them sooner for a server.

        It is preferred if the chosen engine has a long conversion, or avoids one by weights with clearly fewer bits.
        """
        converts = compute_conversion_s(chosen, self.case) >= LONG_CONVERSION_S
        if not converts and chosen.weights.published is None:
            return None
        own = get_standing(chosen, self.case)
        for engine_id in picked.engines[picked.engines.index(chosen.engine.id) + 1 :]:
            engine = self.engines.get(engine_id)
            found = self.get_candidate(engine) if engine is not None else None
            if not isinstance(found, EngineCandidate):
                continue
            if found.weights.published is None and not self._converts_sooner(found, chosen):
                continue
            # A conversion is worth its time only if the targets are missed clearly without it.
            if get_standing(found, self.case).missed > own.missed + converts:
                continue
            if not converts and chosen.nominal_bits >= FETCHED_SHARE * min(found.nominal_bits, PRECISE_BITS):
                continue
            holds = found.max_concurrency >= min(self.case.in_flight, chosen.max_concurrency)
            faithful = found.nominal_bits >= min(chosen.nominal_bits, EVERYDAY_BITS)
            # With some layers in RAM it may still be fast enough, and more faithful than a conversion that fits.
            quick = found.fit.offload is None or (converts and get_standing(found, self.case).missed <= own.missed)
            if holds and faithful and quick and not self._leaves_gpu_idle(found.target):
                return found
        return None

    def _converts_sooner(self, found: EngineCandidate, chosen: EngineCandidate) -> bool:
        """Whether a simpler engine is ready in half the time of a server's long conversion, with as many bits."""
        took = compute_conversion_s(chosen, self.case)
        if chosen.engine.effort < SERVER_EFFORT or took < LONG_CONVERSION_S:
            return False
        return found.nominal_bits >= chosen.nominal_bits and compute_conversion_s(found, self.case) <= took / 2

    def _describe_skipped(self, picked: Pick, found: EngineCandidate) -> str:
        """Why an earlier engine of the rule was not chosen: it cannot run this model, has a long conversion, or fetches
        weights of fewer bits."""
        for engine_id in picked.engines[: picked.engines.index(found.engine.id)]:
            other = self._found.get(engine_id)
            if isinstance(other, Refusal) and other.shortage is None and picked.names_first:
                return f"; {self.engines[engine_id].name} {other.why}"
            if not isinstance(other, EngineCandidate) or self._leaves_gpu_idle(other.target):
                continue
            if found.weights.published is None and not self._converts_sooner(found, other):
                continue
            name = other.engine.name
            if (took := compute_conversion_s(other, self.case)) >= LONG_CONVERSION_S:
                return f"; {name} would first convert the weights for about {format_seconds(took)}"
            if other.weights.published is not None:
                return f"; the published weights for {name} have {other.nominal_bits:g} bits"
        return ""

    def _leaves_gpu_idle(self, target: ComputeTarget | None) -> bool:
        """Whether an engine on this target uses the CPU of a machine with accelerators.

        It is chosen only where it is requested, or where the engines that use the accelerators cannot be installed.
        """
        on_cpu = target is not None and target.device == "cpu"
        return on_cpu and not self.installable and bool(self.case.hardware.accelerators)

    def _uses_accelerators(self, engine: str) -> bool:
        target = self.engines[engine].find_target(self.case.hardware)
        return target is not None and target.device != "cpu"

    def _find_better(self, chosen: EngineCandidate) -> tuple[EngineCandidate, Reason] | None:
        """The engine that a measurement on this machine shows to be better; it takes precedence over the rules."""
        for better in self.evidence.find_better(
            chosen.engine.id, chosen.quantization, self.case.workload, self.case.in_flight
        ):
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
            case = replace(self.case, model=folder)
            listed = list_candidates(engine, case, self.evidence, installable=self.installable)
            found = self._choose_candidate(engine, listed, case)
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
                chosen is not None or not self._uses_accelerators(refusal.engine),
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
        if refusal := refuse_model(engine, case):
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
                "unsuitable", "would run on the CPU here and leave the accelerators idle", engine.strength
            )
        if chosen is None:
            return engine.make_refusal("outranked", "another engine was requested", engine.strength)
        for rule in CHALLENGES:
            if engine.id in rule.engines and (evidence := rule.says(case, chosen.engine.id)):
                return Challenger(engine=engine.id, evidence_needed=evidence)
        why = f"{chosen.engine.name} is better suited to this machine"
        own, best = get_standing(found, case), get_standing(chosen, case)
        if is_comparable(found, chosen) and found.expected is not None and own.speed > MARGIN * best.speed:
            rates = f"{format_figure(own.speed)} tok/s with {found.quantization} instead of {format_figure(best.speed)}"
            why += f": {rates}, but {explain_loss(found, chosen, case)}"
        return engine.make_refusal("outranked", why, engine.strength)

    def _choose_orchestrator(self, chosen: EngineCandidate) -> tuple[str | None, tuple[Reason, ...]]:
        nodes = _count_nodes(chosen)
        for rule in ORCHESTRATION:
            if picked := rule.says(self.case, nodes):
                name, text = picked.engines[0], picked.text
                if name == RAY and (other := _replace_ray(chosen)) is not None:
                    name, text = other[0], f"{nodes} nodes: {other[1]}"
                    rule = next(rule for rule in ORCHESTRATION if rule.id == f"orchestrate.{name}")
                return name, (Reason(rule=rule.id, text=text, source=rule.citation),)
        return None, ()

    def _find_raised_limit(self, chosen: EngineCandidate | None) -> tuple[Hint, ...]:
        """The limit on shared memory with which more faithful weights would be chosen, or any if nothing fits."""
        if chosen is not None and chosen.nominal_bits >= PRECISE_BITS:
            return ()
        for machine in list_raised_limits(self.case.hardware)[: None if chosen is None else 1]:
            search = EngineSearch(replace(self.case, hardware=machine), self.evidence, self.installable, self.engines)
            found = search.get_candidate(chosen.engine) if chosen is not None else search.find_chosen(self._wanted)
            if not isinstance(found, EngineCandidate) or not found.hardware.accelerators:
                continue
            if chosen is None or classify_fidelity(found, search.case) < classify_fidelity(chosen, self.case):
                before, after = (one.accelerators[0].wired_limit_bytes for one in (self.case.hardware, machine))
                return (
                    Hint(
                        kind="memory-limit",
                        device=machine.accelerators[0].vendor,
                        engines=(found.engine.id,) if chosen is None else (),
                        quantization=found.quantization,
                        limit_bytes=round(before.value) if before is not None else None,
                        raised_bytes=round(after.value) if after is not None else None,
                    ),
                )
        return ()

    def _list_remedies(self, asked: Engine | None) -> tuple[Hint, ...]:
        """What would make the model fit; engines that offload come first, because they need the least memory."""
        engines = [asked] if asked is not None else sorted(self.engines.values(), key=lambda one: not one.offloads)
        if asked is None:
            engines = [one for one in engines if not self._leaves_gpu_idle(one.find_target(self.case.hardware))]
        tried = [refusal for engine in engines if isinstance(refusal := self._found.get(engine.id), Refusal)]
        remedies = next((refusal.remedies for refusal in tried if refusal.remedies), ())
        return tuple(Hint(kind="would-fit", remedy=remedy) for remedy in remedies)


def _warn_of_few_bits(chosen: EngineCandidate) -> tuple[Hint, ...]:
    """A warning if bedplate chose weights of fewer than 4 bits."""
    if not chosen.weights.is_chosen or chosen.nominal_bits + ROUNDED_OFF >= EVERYDAY_BITS:
        return ()
    return (Hint(kind="few-bits", quantization=chosen.quantization),)


def _count_nodes(chosen: EngineCandidate) -> int:
    """The number of hosts that the layout uses."""
    if not chosen.hardware.accelerators:
        return 1
    return -(-chosen.cards // count_host_cards(chosen.hardware, chosen.engine))


def _is_no_worse(one: Standing, other: Standing) -> bool:
    """Whether it is closer to the targets, or as close with weights and a cache that are as faithful."""
    return one.beats(other) or (one.shortfall <= other.shortfall and one.fidelity <= other.fidelity)


def _replace_ray(chosen: EngineCandidate) -> tuple[str, str] | None:
    """The orchestrator for a plan that files for Ray do not start, and the reason; `None`: they do."""
    engine, layout = chosen.engine, chosen.layout
    is_wide = layout.tensor * layout.pipeline > count_host_cards(chosen.hardware, engine)
    if is_wide and engine.node_starter is not None and engine.dynamo is not None:
        return DYNAMO, f"its operator starts the ranks of {engine.name}, which files for Ray and Kubernetes do not"
    if layout.attention_data > 1:
        return KUBERNETES, "a LeaderWorkerSet starts the ranks of attention replicas, which files for Ray do not"
    return None if engine.ray is not None else (KUBERNETES, f"files for Ray do not start {engine.name}")


def _can_install(engine: Engine, hardware: Hardware) -> bool:
    """Whether bedplate can install it; a CPU build does not count if the engine supports this machine's GPU."""
    target = engine.find_target(hardware)
    if engine.recipe is None or target is None or target.device not in engine.built_for:
        return engine.recipe is not None
    return engine.find_recipe(target.device) is not None


def find_doubt(engine: Engine, case: DecisionCase) -> Doubt | None:
    found = find_doubt_rule(engine, case)
    return found[1] if found is not None else None


def find_doubt_rule(engine: Engine, case: DecisionCase) -> tuple[DecisionRule[[DecisionCase], Doubt], Doubt] | None:
    """The first rule that doubts this engine, and what it says."""
    return next(((rule, doubt) for rule in DOUBTS if engine.id in rule.engines and (doubt := rule.says(case))), None)


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
        hint_details=(Hint(kind="would-fit", most_tokens=model.max_context),),
    )
