"""Measurements outrank rules: cells become results and verdicts, and those change the next plan."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.commands import invoke
from tests.judge.made_cells import GOOD, Noise, make_cell, make_pair, make_repeat, make_sample
from tests.runs import make_run

from bedplate import store
from bedplate.decide import decide
from bedplate.decide.scenario import apply_scenario
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.facts.known_models import find_model
from bedplate.facts.scenarios import get_scenario
from bedplate.judge.compare import compare
from bedplate.measure.questions import parse_loads
from bedplate.measure.summary import make_result
from bedplate.run.builtin import read_builtin_facts
from bedplate.values import Decision, Model, Workload, replace_fields
from bedplate.values.intent import Intent
from bedplate.values.run import Cell, Flag, Load, Quality, Repeat, Subject
from bedplate.values.verdict import Verdict

MACHINE = make_simulated_hardware({"accelerator": "H100 SXM", "count": 8, "ram_gb": 2048})
MODEL = find_model("meta-llama/Meta-Llama-3.1-8B")
WORK = Workload(concurrency=64, prompt_tokens=1024, output_tokens=256)


def make_repeats(*tok_s: float) -> list[Repeat]:
    return [make_repeat([make_sample()], seconds=1.0, delivered_tokens=rate) for rate in tok_s]


def cell(engine: str, tok_s: float, at: str = "2026-11-15T09:00:00Z") -> Cell:
    made = make_cell(engine, make_repeats(tok_s, 1.002 * tok_s, 0.998 * tok_s))
    return replace_fields(
        made,
        at=at,
        machine=store.compute_fingerprint(MACHINE),
        subject=Subject(engine=engine, model=MODEL.name, quantization="FP8", device="cuda"),
        load=Load(concurrency=64, prompt_tokens=1024, output_tokens=256),
    )


def plan_engine_after(path: Path, *cells: Cell) -> str | None:
    for one in cells:
        found = make_result(one)
        if found is not None:
            store.add_result(found, path)
    kept = store.read_results(store.compute_fingerprint(MACHINE), MODEL.name, path)
    return decide(MACHINE, MODEL, WORK, results=kept).engine


def test_a_measured_gain_changes_the_plan(tmp_path: Path) -> None:
    assert plan_engine_after(tmp_path / "a", cell("vllm", 4000), cell("sglang", 4100)) == "vllm"
    assert plan_engine_after(tmp_path / "b", cell("vllm", 4000), cell("sglang", 5200)) == "sglang"


def test_a_gain_that_is_not_significant_does_not_change_the_plan(tmp_path: Path) -> None:
    def make_cell_with(engine: str, *tok_s: float) -> Cell:
        return replace_fields(cell(engine, tok_s[0]), repeats=tuple(make_repeats(*tok_s)))

    steady = make_cell_with("vllm", 4000, 4010, 3990)
    assert plan_engine_after(tmp_path / "a", steady, make_cell_with("sglang", 3000, 7000, 5600)) == "vllm"
    assert plan_engine_after(tmp_path / "b", steady, make_cell_with("sglang", 5190, 5200, 5210)) == "sglang"
    assert plan_engine_after(tmp_path / "c", steady, make_cell_with("sglang", 5200)) == "vllm", "measured once"


@pytest.mark.parametrize(
    "spoilt",
    [
        {"quality": Quality(asked=100, agreement=0.99, verdict="broken")},
        {"flags": (Flag(kind="client", text="the client was the bottleneck", invalid=True),)},
    ],
)
def test_wrong_answers_and_invalid_cells_do_not_change_the_plan(tmp_path: Path, spoilt: dict[str, object]) -> None:
    assert (
        plan_engine_after(tmp_path / "s", cell("vllm", 4000), replace_fields(cell("sglang", 9000), **spoilt)) == "vllm"
    )


def test_the_newest_result_counts_and_not_the_fastest(tmp_path: Path) -> None:
    lucky = cell("sglang", 5200, "2026-11-14T09:00:00Z")
    assert plan_engine_after(tmp_path / "s", cell("vllm", 4000), lucky, cell("sglang", 4100)) == "vllm"


# converted weights


SMALL = make_simulated_hardware({"cpu": "Intel Xeon", "cores": 2, "ram_gb": 24})
BUILTIN = read_builtin_facts()
MANY = Workload(concurrency=16, prompt_tokens=128, output_tokens=64)
FORMS = {"llama.cpp": "Q4_1", "vllm": "BF16", "sglang": "BF16"}


def make_cpu_cell(one: Cell, engine: str, **subject: object) -> Cell:
    """The cell as one of this engine, with the built-in model in the quantization that it serves."""
    made = Subject(engine=engine, model=BUILTIN.name, quantization=FORMS[engine], weights_id="b179c9523d0e",
                   device="cpu")  # fmt: skip
    return replace_fields(
        one,
        run="20261115-143755-691c",
        machine=store.compute_fingerprint(SMALL),
        subject=replace_fields(made, **subject),
        load=Load(concurrency=16, prompt_tokens=128, output_tokens=64),
    )


def measure_pair(gain: float, challenger: str = "vllm", **subject: object) -> tuple[Cell, Cell]:
    """llama.cpp and a challenger, measured in interleaved rounds."""
    one, other = make_pair(Noise(3, request=0.02, repeat=0.004, drift=0.004), gain, 5, (16,))
    return make_cpu_cell(one[0], "llama.cpp"), make_cpu_cell(other[0], challenger, **subject)


def judge_pair(gain: float, **subject: object) -> Verdict:
    one, other = measure_pair(gain, "vllm", **subject)
    return compare([one], [other], allow=("quantization", "weights"))


def plan_with(
    *cells: Cell, verdicts: tuple[Verdict, ...] = (), work: Workload = MANY, model: Model = BUILTIN
) -> Decision:
    results = tuple(found for one in cells if (found := make_result(one)) is not None)
    return decide(SMALL, model, work, results=results, verdicts=verdicts)


def test_weights_converted_from_the_same_source_change_the_plan() -> None:
    assert plan_with().engine == "llama.cpp"
    decision = plan_with(*measure_pair(3.9))
    assert (decision.engine, decision.quantization, decision.unpacks) == ("vllm", "BF16", True)
    reason = decision.reasons[0]
    assert (
        reason.rule == "evidence.measured"
        and "299%" in reason.text
        and "converted from the same weights" in reason.text
    )
    assert "20261115-143755-691c" in reason.source
    assert decision.launch is not None and "gguf-to-folder" in [
        step.argv[0] for step in decision.launch.prepare if step.argv
    ]
    (refusal,) = [one for one in decision.refused if one.engine == "llama.cpp"]
    assert refusal.kind == "outranked" and "299%" in refusal.why and "20261115-143755-691c" in refusal.why


def test_a_verdict_changes_the_plan() -> None:
    verdict = judge_pair(3.9)
    assert verdict.answer == "migrate"
    decision = plan_with(verdicts=(verdict,))
    assert (decision.engine, decision.unpacks) == ("vllm", True)
    assert verdict.text in decision.reasons[0].text and "20261115-143755-691c" in decision.reasons[0].source


def test_a_gain_that_only_interleaved_rounds_show_counts_by_its_verdict() -> None:
    """With common drift the intervals of the two sides overlap; the interval of their ratio does not contain 1."""
    noise = Noise(2, request=0.01, repeat=0.002, drift=0.08)
    one, other = make_pair(noise, 1.2, 8, (16,))
    cells = make_cpu_cell(one[0], "llama.cpp"), make_cpu_cell(other[0], "vllm")
    assert plan_with(*cells).engine == "llama.cpp"
    assert plan_with(*cells, verdicts=(compare([cells[0]], [cells[1]]),)).engine == "vllm"


def test_a_verdict_on_two_versions_of_an_engine_does_not_change_the_plan() -> None:
    one, other = measure_pair(3.9, "llama.cpp", engine_version="9.0.0")
    one = replace_fields(one, subject=replace_fields(one.subject, engine_version="8.0.0"))
    verdict = compare([one], [other])
    assert verdict.answer == "migrate" and verdict.text.startswith("llama.cpp@9.0.0 is ")
    before, after = plan_with(), plan_with(verdicts=(verdict,))
    assert (after.engine, after.reasons) == (before.engine, before.reasons)


def test_the_newest_verdict_outranks_older_ones_and_results() -> None:
    stay, migrate = judge_pair(1.0), judge_pair(3.9)
    assert stay.answer != "migrate"
    assert plan_with(*measure_pair(3.9), verdicts=(stay, migrate)).engine == "llama.cpp"
    assert plan_with(*measure_pair(1.0), verdicts=(migrate, stay)).engine == "vllm"


UNCHECKED = Quality(note="there is no reference for these weights")
COARSE = Quality(asked=48, agreement=0.73, verdict="ok")
BROKEN = Quality(asked=48, agreement=0.11, verdict="broken")


@pytest.mark.parametrize("quality", [None, UNCHECKED, COARSE, BROKEN], ids=["none", "unchecked", "coarse", "broken"])
def test_worse_or_unchecked_answers_do_not_change_the_plan(quality: Quality | None) -> None:
    one, other = measure_pair(3.9)
    worse = replace_fields(other, quality=quality)
    verdict = compare([replace_fields(one, quality=None)], [worse])
    assert plan_with(one, worse).engine == "llama.cpp"
    assert plan_with(verdicts=(replace_fields(verdict, answer="migrate"),)).engine == "llama.cpp"
    assert plan_with(one, replace_fields(other, quality=GOOD)).engine == "vllm"


def test_measurements_of_other_weights_do_not_change_the_plan() -> None:
    for source in (None, "another source"):
        assert plan_with(*measure_pair(3.9, weights_id=source)).engine == "llama.cpp"
        assert plan_with(verdicts=(judge_pair(3.9, weights_id=source),)).engine == "llama.cpp"
    asked = replace_fields(BUILTIN, quantization="Q8_0")
    assert plan_with(*measure_pair(3.9), verdicts=(judge_pair(3.9),), model=asked).engine == "llama.cpp"


def test_measurements_of_another_model_do_not_change_the_plan() -> None:
    asked = replace_fields(BUILTIN, name="another-135M")
    assert plan_with(*measure_pair(3.9), verdicts=(judge_pair(3.9),), model=asked).engine == "llama.cpp"


@pytest.mark.parametrize(
    "work",
    [
        Workload(concurrency=1, prompt_tokens=128, output_tokens=64),
        Workload(concurrency=128, prompt_tokens=128, output_tokens=64),
        Workload(concurrency=16, prompt_tokens=2048, output_tokens=64),
        Workload(concurrency=16, prompt_tokens=128, output_tokens=1024),
    ],
    ids=["one", "far more", "long prompts", "long answers"],
)
def test_measurements_of_another_workload_do_not_change_the_plan(work: Workload) -> None:
    plain = plan_with(work=work)
    decision = plan_with(*measure_pair(3.9), verdicts=(judge_pair(3.9),), work=work)
    assert decision.engine == plain.engine and decision.reasons[0] == plain.reasons[0]


def test_a_similar_workload_follows_the_verdict() -> None:
    work = Workload(concurrency=12, prompt_tokens=200, output_tokens=100)
    assert plan_with(verdicts=(judge_pair(3.9),), work=work).engine == "vllm"


def test_refusals_of_engines_without_measurements_stay_the_same() -> None:
    plain, moved = plan_with(), plan_with(*measure_pair(3.9))
    said = {one.engine: one for one in plain.refused}
    assert [one for one in moved.refused if one.engine != "llama.cpp"] == [
        said[one.engine] for one in moved.refused if one.engine != "llama.cpp"
    ]
    lost = plan_with(*measure_pair(0.5), verdicts=(judge_pair(0.5),))
    assert (lost.engine, lost.reasons[0], lost.refused) == (plain.engine, plain.reasons[0], plain.refused)


# repeated prefixes and structured output, for which the rules prefer SGLang

SHARED = Workload(concurrency=64, prompt_tokens=2048, output_tokens=128, shared_prefix_tokens=1792)


def judge_served(load: Load, engines: tuple[str, str] = ("sglang", "vllm")) -> Verdict:
    """The second engine is better than the first under this load."""
    one, other = make_pair(Noise(3, request=0.02, repeat=0.004, drift=0.004), 1.5, 5, (64,))
    sides = [
        [
            replace_fields(
                cell, load=load, machine=store.compute_fingerprint(MACHINE),
                subject=Subject(engine=engine, model=MODEL.name, device="cuda"),
            )
            for cell in side
        ]
        for side, engine in zip((one, other), engines, strict=True)
    ]  # fmt: skip
    verdict = compare(*sides)
    assert verdict.answer == "migrate"
    return verdict


def plan_agents(*verdicts: Verdict, users: int = 50, scenario: str = "agent") -> str | None:
    work = apply_scenario(Intent(workload=Workload(users=users)), scenario, ("users",), MODEL.max_context)[0].workload
    return decide(MACHINE, MODEL, work, verdicts=verdicts).engine


def test_a_verdict_on_a_scenario_refutes_the_rule_for_this_scenario_only() -> None:
    refuted = judge_served(parse_loads(concurrency="50", scenario=get_scenario("agent"))[0])
    assert (plan_agents(), plan_agents(refuted)) == ("sglang", "vllm")
    assert plan_agents(refuted, users=90) == "vllm" and plan_agents(refuted, users=400) == "sglang"
    for other in ("chat", "rag"):
        assert plan_agents(refuted, scenario=other) == plan_agents(scenario=other), other


def test_a_verdict_on_unique_prompts_does_not_refute_the_rule_for_shared_prefixes() -> None:
    unique = Load(concurrency=64, prompt_tokens=2048, output_tokens=128)
    shared = replace_fields(unique, shared_prefix_tokens=1792)
    plain = replace_fields(SHARED, shared_prefix_tokens=0)
    for load, work, engine in ((unique, SHARED, "sglang"), (shared, SHARED, "vllm")):
        assert decide(MACHINE, MODEL, work, verdicts=(judge_served(load),)).engine == engine
    for load, engine in ((unique, "sglang"), (shared, "vllm")):
        verdict = judge_served(load, ("vllm", "sglang"))
        assert decide(MACHINE, MODEL, plain, verdicts=(verdict,)).engine == engine


def test_results_with_and_without_a_shared_prefix_are_not_compared(tmp_path: Path) -> None:
    cached = cell("sglang", 9000)
    cached = replace_fields(cached, load=replace_fields(cached.load, shared_prefix_tokens=960))
    assert plan_engine_after(tmp_path / "a", cell("vllm", 4000), cached) == "vllm"
    assert plan_engine_after(tmp_path / "b", cell("vllm", 4000), cell("sglang", 4100), cached) == "vllm"


def test_measurements_of_free_text_do_not_refute_the_rule_for_structured_output() -> None:
    work = replace_fields(WORK, structured_output=True)
    free = judge_served(Load(concurrency=64, prompt_tokens=1024, output_tokens=256))
    assert decide(MACHINE, MODEL, work).engine == "sglang"
    assert decide(MACHINE, MODEL, work, verdicts=(free,)).engine == "sglang"
    batch = parse_loads(concurrency="64", scenario=get_scenario("batch"))[0]
    assert decide(MACHINE, MODEL, work, verdicts=(judge_served(batch),)).engine == "vllm"


def test_ignores_a_verdict_of_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path))
    fields = ("--set", "cpu=Intel Xeon", "--set", "cores=2", "--set", "ram_gb=24")
    asked = ("plan", *fields, "--concurrency", "16", "--prompt-tokens", "128", "--output-tokens", "64")
    verdict, made = judge_pair(3.9), make_run(())
    environment = replace_fields(made.environment, machine=store.compute_fingerprint(SMALL))
    store.add_run(replace_fields(made, id=verdict.a.runs[0], environment=environment))
    store.add_verdict(replace_fields(verdict, machine="another"), "2026-11-15T14:44:30Z")
    assert '"engine": "llama.cpp"' in invoke(*asked, "--json").out
    store.add_verdict(verdict, "2026-11-15T14:44:30Z")
    assert '"engine": "vllm"' in invoke(*asked, "--json").out
    why = " ".join(invoke(*asked, "--why-not", "llama.cpp").out.split())
    assert "a measurement here shows vLLM to be better by" in why and "20261115-143755-691c" in why
