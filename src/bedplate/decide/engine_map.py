"""The engine map: which engine suits which hardware, its features, its status on this machine, and its results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from bedplate.decide.case import DecisionCase
from bedplate.decide.choose import EngineSearch, find_doubt
from bedplate.decide.evidence import MachineEvidence
from bedplate.decide.rules import CHALLENGES, DOUBTS, PICKS
from bedplate.engines import Engine, Features
from bedplate.facts.known_models import make_model_from_facts
from bedplate.values import Hardware, Model, Workload, replace_fields
from bedplate.values.decision import Device
from bedplate.values.intent import Operations
from bedplate.values.record import Record
from bedplate.values.result import Result

ONE, MANY_USERS = Workload(), Workload(concurrency=64)


class Situation(Record, frozen=True, kw_only=True):
    """A row of the cheat sheet."""

    when: str
    engines: tuple[str, ...]
    rules: tuple[str, ...]
    """The rules that cover this situation."""
    source: str
    here: tuple[Literal["one user", "many users"], ...] = ()
    """For which number of users the row applies to this machine."""


CHEAT_SHEET: tuple[Situation, ...] = (
    Situation(
        when="laptop, edge box, CPU, unusual hardware",
        engines=("llama.cpp",),
        rules=("hardware.cpu", "hardware.unusual", "anywhere"),
        source="docs/rules.md#hardware.cpu",
    ),
    Situation(
        when="little VRAM and plenty of RAM",
        engines=("llama.cpp",),
        rules=("fit.offload",),
        source="docs/rules.md#fit.offload",
    ),
    Situation(when="a Mac", engines=("mlx",), rules=("hardware.apple",), source="docs/rules.md#hardware.apple"),
    Situation(
        when="1 to 4 RTX cards, one or a few people",
        engines=("exllamav3", "exllamav2"),
        rules=("hardware.rtx",),
        source="docs/rules.md#hardware.rtx",
    ),
    Situation(
        when="general serving from GPUs",
        engines=("vllm",),
        rules=("serve.default", "operations.huggingface"),
        source="docs/rules.md#serve.default",
    ),
    Situation(
        when="complex infrastructure, long context, MoE; shared prefixes, structured output",
        engines=("sglang",),
        rules=("serve.moe-long", "serve.long", "serve.shared-prefix", "serve.structured"),
        source="docs/rules.md#serve.moe-long",
    ),
    Situation(
        when="maximum throughput on NVIDIA: extreme volume, a model that rarely changes",
        engines=("tensorrt-llm",),
        rules=("serve.compiled",),
        source="docs/rules.md#serve.compiled",
    ),
    Situation(
        when="not an LLM, or the same deployment on several vendors' hardware",
        engines=("onnxruntime",),
        rules=("task.not-llm", "operations.portable"),
        source="docs/rules.md#task.not-llm",
    ),
    Situation(
        when="prototypes, one item at a time",
        engines=("pytorch",),
        rules=("operations.prototype",),
        source="docs/rules.md#operations.prototype",
    ),
    Situation(
        when="a small portable program", engines=("mistral.rs",), rules=("anywhere",), source="docs/rules.md#anywhere"
    ),
    Situation(
        when="already in service; not for new services",
        engines=("tgi",),
        rules=("operations.incumbent",),
        source="docs/rules.md#operations.incumbent",
    ),
    Situation(
        when="already in service, or requested with --engine",
        engines=("ollama", "lmdeploy"),
        rules=("operations.incumbent",),
        source="docs/rules.md#operations.incumbent",
    ),
    Situation(
        when="several nodes, above the engine",
        engines=("dynamo", "kubernetes", "ray"),
        rules=("orchestrate.dynamo", "orchestrate.kubernetes", "orchestrate.ray"),
        source="docs/rules.md#orchestrate.dynamo",
    ),
)


class EngineSupport(Record, frozen=True, kw_only=True):
    """The status of an engine on this machine, for any LLM that fits."""

    runs: bool
    device: Device | None = None
    why: str | None = None
    """Why it cannot run here."""
    doubt: str | None = None
    """Why it is not suitable for one user."""
    doubt_for_many: str | None = None


class RuleLine(Record, frozen=True, kw_only=True):
    rule: str
    kind: Literal["may pick", "doubts", "would measure"]
    text: str
    source: str


class EngineRow(Record, frozen=True, kw_only=True):
    """One engine in the engine map."""

    engine: str
    name: str
    version: str | None
    strength: str
    effort: int
    formats: tuple[str, ...]
    converts: tuple[str, ...]
    vendors: tuple[str, ...]
    cpu: bool
    systems: tuple[str, ...]
    tasks: tuple[str, ...]
    ways: tuple[str, ...]
    features: Features | None
    """`None`: not described yet."""
    packages: tuple[str, ...]
    """Empty: this version of bedplate plans the engine, but cannot install it."""
    download_bytes: int | None
    disk_bytes: int | None
    here: EngineSupport
    measured: Result | None
    """The result on the workload that most engines were measured with; `None`: not measured on this machine."""
    rules: tuple[RuleLine, ...]


def make_sample_model() -> Model:
    """A small model that represents any LLM that fits: only the machine matters."""
    return make_model_from_facts({"params_b": 1, "name": "a model that fits"})


def build_rows(engines: Mapping[str, Engine], hardware: Hardware, results: Sequence[Result]) -> tuple[EngineRow, ...]:
    measured = find_common_results(results)
    return tuple(build_row(engine, hardware, measured.get(engine.id)) for engine in engines.values())


def build_row(engine: Engine, hardware: Hardware, measured: Result | None) -> EngineRow:
    target = engine.find_target(hardware)
    recipe = engine.recipe
    if target is not None and target.device in engine.built_for:
        recipe = engine.find_recipe(target.device)
    return EngineRow(
        engine=engine.id,
        name=engine.name,
        version=engine.version,
        strength=engine.strength,
        effort=engine.effort,
        formats=engine.formats,
        converts=engine.converts,
        vendors=engine.vendors,
        cpu=engine.cpu,
        systems=engine.systems,
        tasks=engine.tasks,
        ways=engine.ways,
        features=engine.features,
        packages=(*recipe.packages, *recipe.bare) if recipe is not None else (),
        download_bytes=recipe.download_bytes if recipe is not None else None,
        disk_bytes=recipe.disk_bytes if recipe is not None else None,
        here=get_status(engine, hardware),
        measured=measured,
        rules=tuple(list_rules(engine.id)),
    )


def get_status(engine: Engine, hardware: Hardware) -> EngineSupport:
    model = make_sample_model()
    if refusal := engine.refuse(hardware, model, ONE):
        return EngineSupport(runs=False, why=refusal.why)
    target = engine.find_target(hardware)
    one, many = (find_doubt(engine, DecisionCase(hardware, model, work, Operations())) for work in (ONE, MANY_USERS))
    return EngineSupport(
        runs=True,
        device=target.device if target is not None else None,
        doubt=one.why if one is not None else None,
        doubt_for_many=many.why if many is not None else None,
    )


def mark_cheat_sheet(hardware: Hardware) -> tuple[Situation, ...]:
    """The rows of the cheat sheet; `here` marks those that apply to this machine."""
    marks: dict[int, list[Literal["one user", "many users"]]] = defaultdict(list)
    asked: tuple[tuple[Literal["one user", "many users"], Workload], ...] = (
        ("one user", ONE),
        ("many users", MANY_USERS),
    )
    for who, work in asked:
        candidate, reason = EngineSearch(
            DecisionCase(hardware, make_sample_model(), work, Operations()), MachineEvidence(), False
        ).pick_engine()
        if candidate is not None and reason is not None:
            marks[_find_line(reason.rule, candidate.engine.id)].append(who)
    return tuple(replace_fields(line, here=tuple(marks[number])) for number, line in enumerate(CHEAT_SHEET))


def _find_line(rule: str, engine: str) -> int:
    """The row with both rule and engine; if there is none, the first row of the engine."""
    own = [number for number, line in enumerate(CHEAT_SHEET) if engine in line.engines]
    return next((number for number in own if rule in CHEAT_SHEET[number].rules), own[0] if own else -1)


def list_rules(engine: str) -> Iterator[RuleLine]:
    """All rules that name this engine."""
    for pick in PICKS:
        if engine in pick.engines:
            yield RuleLine(rule=pick.id, kind="may pick", text=pick.sentence, source=pick.citation)
    for doubt in DOUBTS:
        if engine in doubt.engines:
            yield RuleLine(rule=doubt.id, kind="doubts", text=doubt.sentence, source=doubt.citation)
    for challenge in CHALLENGES:
        if engine in challenge.engines:
            yield RuleLine(rule=challenge.id, kind="would measure", text=challenge.sentence, source=challenge.citation)


def find_common_results(results: Sequence[Result]) -> dict[str, Result]:
    """Each engine's newest result on the workload that most engines were measured with; `results` are newest first."""
    groups: dict[tuple[object, ...], dict[str, Result]] = {}
    for result in results:
        work = (result.model, result.quantization, result.concurrency, result.prompt_tokens, result.output_tokens)
        groups.setdefault(work, {}).setdefault(result.engine, result)
    # Of groups with equally many engines, `max` returns the first, which was measured last.
    return max(groups.values(), key=len, default={})
