"""The catalogue of models: one entry per model, figures that agree with plan, and the ranking."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bedplate.decide import decide
from bedplate.decide.candidates import READING_TOK_S
from bedplate.decide.catalogue import (
    EVERYDAY_TOKENS,
    PACES,
    CatalogueEntry,
    build_catalogue,
    find_copies,
    list_distinct_models,
    rank_entries,
    score_capability,
    search_models,
    with_everyday_context,
)
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.facts.known_models import find_model, list_known_names, look_up_model
from bedplate.facts.library import LocatedModel
from bedplate.facts.released import find_release_year
from bedplate.values import Figure, Hardware, Workload, replace_fields
from bedplate.values.result import Result

RTX = make_simulated_hardware({"accelerator": "RTX 4090", "ram_gb": 64})
H100 = make_simulated_hardware({"accelerator": "H100 SXM", "count": 8})
KNOWN = list_distinct_models()


def make_entries(
    hardware: Hardware, *names: str, workload: Workload | None = None, **options: object
) -> dict[str, CatalogueEntry]:
    models = [known for known in KNOWN if not names or known.name in names]
    found = build_catalogue(hardware, workload or Workload(), models=models, **options)  # type: ignore[arg-type]
    return {entry.name: entry for _, entry in found if entry is not None}


@pytest.fixture(scope="module")
def on_rtx() -> dict[str, CatalogueEntry]:
    return make_entries(RTX)


# distinct models


def test_every_known_name_belongs_to_exactly_one_model() -> None:
    names = [name for known in KNOWN for name in known.names]
    assert sorted(names) == sorted(list_known_names())
    assert len({known.key for known in KNOWN}) == len(KNOWN)
    assert all(known.name in known.names for known in KNOWN)


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("Qwen/Qwen3-32B", ["Qwen/Qwen3-32B-FP8", "Qwen/Qwen3-32B-FP8-Static-PerTensor"]),
        ("meta-llama/Llama-3.1-8B-Instruct", ["meta-llama/Meta-Llama-3.1-8B", "nvidia/Llama-3.1-8B-Instruct-FP8"]),
        ("deepseek-ai/DeepSeek-R1", ["nvidia/DeepSeek-R1-NVFP4"]),
        ("google/gemma-3-27b-it", ["google/gemma-3-27b"]),
        ("moonshotai/Kimi-K2-Instruct", ["moonshotai/Kimi-K2-Base"]),
    ],
)
def test_quantizations_and_base_versions_are_the_same_model(name: str, others: list[str]) -> None:
    known = next(known for known in KNOWN if name in known.names)
    assert known.name == name and set(others) <= set(known.names)


def test_different_versions_are_different_models() -> None:
    for one, other in (
        ("deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-R1-0528"),
        ("Qwen/Qwen3.5-27B", "Qwen/Qwen3.6-27B"),
        ("zai-org/GLM-5", "zai-org/GLM-5.1"),
    ):
        assert not any(one in known.names and other in known.names for known in KNOWN)


def test_every_known_model_has_a_release_year() -> None:
    assert not [name for name in list_known_names() if not 2018 <= (find_release_year(name) or 0) <= 2026]
    assert find_release_year("nobody/knows-this") is None
    assert (find_release_year("llama-2-7b"), find_release_year("Llama 3 8B"), find_release_year("Qwen3.5-27B")) == (
        2023,
        2024,
        2026,
    )


def test_search_ignores_case_and_separators() -> None:
    assert {known.name for known in search_models(KNOWN, "QWEN3 coder")} == {
        "Qwen/Qwen3-Coder-30B-A3B-Instruct",
        "Qwen/Qwen3-Coder-480B-A35B-Instruct",
        "Qwen/Qwen3-Coder-Next",
    }
    assert search_models(KNOWN, "llama3.1 405b") and not search_models(KNOWN, "no such model")
    assert search_models(KNOWN, None) == search_models(KNOWN, "  ") == KNOWN


def test_copies_on_this_machine_are_found_under_other_programs_names() -> None:
    files = [
        LocatedModel(name=name, path=Path(name), origin="Ollama", size_bytes=1)
        for name in ("qwen3:8b", "unsloth/Qwen3-8B-GGUF:Q4_K_M", "mine:latest")
    ]
    found = make_entries(RTX, "Qwen/Qwen3-8B", "Qwen/Qwen3-14B", here=find_copies(files))
    assert found["Qwen/Qwen3-8B"].here == ("qwen3:8b", "unsloth/Qwen3-8B-GGUF:Q4_K_M")
    assert found["Qwen/Qwen3-14B"].here == ()


# entries


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "openai/gpt-oss-20b", "google/gemma-3-27b-it"])
def test_entry_agrees_with_plan(on_rtx: dict[str, CatalogueEntry], name: str) -> None:
    entry = on_rtx[name]
    decision = decide(RTX, find_model(name), with_everyday_context(Workload()))
    assert decision.memory is not None
    assert (entry.engine, entry.quantization, entry.rule) == (
        decision.engine,
        decision.quantization,
        decision.reasons[0].rule,
    )
    assert entry.memory_bytes == max(need.total_bytes for need in decision.memory.devices)
    assert entry.estimate.tpot_ms == decision.estimate.tpot_ms


def test_speed_is_that_of_one_stream_with_its_band(on_rtx: dict[str, CatalogueEntry]) -> None:
    entry = on_rtx["Qwen/Qwen3-8B"]
    assert entry.tok_s is not None and entry.estimate.tpot_ms is not None and entry.tok_s.basis == "estimate"
    assert entry.tok_s.low < entry.tok_s.value < entry.tok_s.high
    assert entry.tok_s.value == pytest.approx(1000 / entry.estimate.tpot_ms.value)


def test_the_longest_context_fits_and_a_longer_one_does_not(on_rtx: dict[str, CatalogueEntry]) -> None:
    entry = on_rtx["Qwen/Qwen3-32B"]
    longest = entry.longest_context
    assert longest is not None and entry.max_context is not None
    assert EVERYDAY_TOKENS <= longest < entry.max_context
    at, beyond = (
        make_entries(RTX, entry.name, workload=Workload(prompt_tokens=tokens - 256, output_tokens=256))[entry.name]
        for tokens in (longest, longest + 2048)
    )
    assert at.fits and at.quantization == entry.quantization and at.longest_context == longest
    longer = Workload(prompt_tokens=longest + 2048 - 256, output_tokens=256)
    planned = decide(RTX, find_model(entry.name), longer, entry.engine)
    narrow = planned.settings is not None and planned.settings.kv_type == "fp8"
    assert not beyond.fits or beyond.quantization != entry.quantization or narrow


def test_default_context_fits_a_conversation_up_to_the_model_limit(on_rtx: dict[str, CatalogueEntry]) -> None:
    for entry in on_rtx.values():
        if entry.fits and entry.max_context is not None:
            assert (entry.longest_context or 0) >= min(EVERYDAY_TOKENS, entry.max_context), entry.name
    assert on_rtx["huggyllama/llama-7b"].longest_context == 2048


def test_requested_lengths_are_not_shortened() -> None:
    found = make_entries(RTX, "huggyllama/llama-7b", workload=Workload(context_tokens=4096))["huggyllama/llama-7b"]
    assert not found.fits and found.why == "its context is only 2,048 tokens"


def test_entry_that_does_not_fit_has_a_short_reason(on_rtx: dict[str, CatalogueEntry]) -> None:
    refused = [entry for entry in on_rtx.values() if not entry.fits]
    assert refused
    for entry in refused:
        assert entry.why and len(entry.why) < 100 and entry.engine is None and entry.pace is None
    assert "at 3 bits" in (on_rtx["moonshotai/Kimi-K3"].why or "")


def test_quick_refusal_never_contradicts_plan() -> None:
    small = make_simulated_hardware({"accelerator": "RTX 4090", "ram_gb": 16})
    quick = [entry for entry in make_entries(small).values() if "at 3 bits" in (entry.why or "")]
    assert quick
    for entry in sorted(quick, key=lambda entry: entry.parameters)[:3]:
        assert not decide(small, find_model(entry.name), Workload()).fits


def test_minimum_speed_excludes_slower_models() -> None:
    free, bound = (make_entries(RTX, "Qwen/Qwen3-32B", "Qwen/Qwen3-0.6B", least_tok_s=least) for least in (None, 100.0))
    speed = free["Qwen/Qwen3-32B"].tok_s
    assert speed is not None and speed.value < 100 and free["Qwen/Qwen3-32B"].fits
    assert not bound["Qwen/Qwen3-32B"].fits and "tok/s" in (bound["Qwen/Qwen3-32B"].why or "")
    assert bound["Qwen/Qwen3-0.6B"].fits


def test_only_models_of_the_requested_task_are_listed() -> None:
    embedding = make_entries(RTX, workload=Workload(task="embed"))
    assert "BAAI/bge-m3" in embedding and "Qwen/Qwen3-8B" not in embedding
    assert embedding["BAAI/bge-small-en-v1.5"].fits, "512 tokens are what it reads; nobody asked for more"
    assert all(entry.task == "embed" for entry in embedding.values())


def test_some_requests_wait_if_they_exceed_the_capacity() -> None:
    crowd = make_entries(RTX, "Qwen/Qwen3-8B", workload=Workload(concurrency=4000))["Qwen/Qwen3-8B"]
    assert crowd.fits and crowd.in_flight == 4000 > crowd.max_concurrency and crowd.pace == "some wait"


def test_users_who_think_are_not_all_in_flight() -> None:
    crowd = make_entries(RTX, "Qwen/Qwen3-8B", workload=Workload(users=4000))["Qwen/Qwen3-8B"]
    assert crowd.fits and 4000 > crowd.in_flight > crowd.max_concurrency and crowd.pace == "some wait"


def test_think_time_reduces_concurrency() -> None:
    thinking = Workload(users=200, think_time_s=60.0)
    entry = make_entries(H100, "Qwen/Qwen3-8B", workload=thinking)["Qwen/Qwen3-8B"]
    assert entry.fits and 1 <= entry.in_flight < 100


def test_measurement_corrects_all_models_of_the_engine() -> None:
    plain = make_entries(RTX, "Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B-Instruct")
    engine = plain["Qwen/Qwen3-8B"].engine
    assert engine is not None and engine == plain["meta-llama/Llama-3.1-8B-Instruct"].engine
    expected = plain["Qwen/Qwen3-8B"].estimate.output_tok_s
    assert expected is not None
    result = Result(
        at="2026-11-15T00:00:00Z",
        machine="here",
        engine=engine,
        model="Qwen/Qwen3-8B",
        quantization=plain["Qwen/Qwen3-8B"].quantization,
        concurrency=1,
        prompt_tokens=512,
        output_tokens=256,
        output_tok_s=expected.value / 2,
    )
    measured = make_entries(RTX, "Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B-Instruct", results=(result,))
    for name in plain:
        before, after = plain[name].tok_s, measured[name].tok_s
        assert before is not None and after is not None and after.value < before.value * 0.8


# ranking


def make_entry(name: str = "a", **fields: object) -> CatalogueEntry:
    plain = CatalogueEntry(name=name, task="generate", parameters=10**9, fits=True, pace="comfortable", released=2025)
    return replace_fields(plain, **fields)


def make_speed(value: float) -> Figure:
    return Figure(value=value, low=value, high=value, basis="estimate")


def test_most_capable_comfortable_model_is_ranked_first(on_rtx: dict[str, CatalogueEntry]) -> None:
    listed = rank_entries(on_rtx.values())
    paces = [PACES.index(one.pace) for one in listed if one.pace is not None]
    assert paces == sorted(paces) and [one.fits for one in listed] == sorted((one.fits for one in listed), reverse=True)
    comfortable = [one for one in listed if one.pace == "comfortable"]
    worth = [score_capability(one) for one in comfortable]
    assert worth == sorted(worth, reverse=True)
    assert all(one.tok_s is not None and one.tok_s.value >= READING_TOK_S for one in comfortable)
    names = [one.name for one in listed]
    assert names.index("Qwen/Qwen3-32B") < names.index("codellama/CodeLlama-34b") < names.index("Qwen/Qwen3-0.6B")


def test_newer_models_score_higher_and_experts_less_than_their_sum() -> None:
    assert (
        score_capability(make_entry(released=2026))
        > score_capability(make_entry(released=2025))
        > score_capability(make_entry(released=None))
    )
    assert score_capability(make_entry(active_parameters=10**8)) < score_capability(make_entry())


def test_slow_models_are_ranked_by_speed_before_size() -> None:
    huge = make_entry("huge", parameters=10**12, pace="slow", tok_s=make_speed(0.2))
    usable = make_entry("usable", parameters=10**11, pace="slow", tok_s=make_speed(12))
    assert [one.name for one in rank_entries([huge, usable])] == ["usable", "huge"]


def test_models_that_a_desktop_could_hardly_run_are_not_first_where_no_speed_is_predicted() -> None:
    dense = make_entry("dense", parameters=31 * 10**9, pace="not predicted")
    experts = make_entry("experts", parameters=30 * 10**9, active_parameters=3 * 10**9, pace="not predicted")
    small = make_entry("small", parameters=4 * 10**9, pace="not predicted")
    assert [one.name for one in rank_entries([dense, small, experts])] == ["experts", "small", "dense"]


def test_newer_version_is_ranked_first() -> None:
    names = ["Qwen/Qwen3.5-27B", "x/Super-49B-v1", "Qwen/Qwen3.6-27B", "x/Super-49B-v1_5"]
    listed = [one.name for one in rank_entries(make_entry(name) for name in names)]
    assert listed.index("Qwen/Qwen3.6-27B") < listed.index("Qwen/Qwen3.5-27B")
    assert listed.index("x/Super-49B-v1_5") < listed.index("x/Super-49B-v1")
    assert [one.name for one in rank_entries([make_entry("z/beta-9"), make_entry("a/alpha-1")])] == [
        "a/alpha-1",
        "z/beta-9",
    ]


# invariants


@settings(deadline=None)
@given(
    name=st.sampled_from([known.name for known in KNOWN]),
    ram=st.integers(2, 256),
    more=st.integers(0, 256),
    users=st.integers(1, 64),
)
def test_more_memory_never_makes_a_fit_fail_and_more_users_never_make_one(
    name: str, ram: int, more: int, users: int
) -> None:
    facts = look_up_model(name)
    assert facts is not None

    def fits(gigabytes: int, at_once: int) -> bool:
        machine = make_simulated_hardware({"cpu": "Xeon", "cores": 8, "ram_gb": gigabytes, "os": "linux"})
        work = Workload(users=at_once, prompt_tokens=128, output_tokens=64, task=facts.task)
        return make_entries(machine, name, workload=work)[name].fits

    assert fits(ram + more, users) or not fits(ram, users)
    assert fits(ram, 1) or not fits(ram, users)


@pytest.mark.measures
def test_catalogue_of_all_models_is_computed_in_seconds() -> None:
    """Measured in CPU time of this process, because the machine may be busy."""
    began = time.process_time()
    make_entries(RTX)
    assert time.process_time() - began < 3


def test_a_requested_speed_chooses_the_weights_that_reach_it() -> None:
    mac = make_simulated_hardware({"accelerator": "Apple M2", "ram_gb": 16, "os": "macos"})
    free, bound = (make_entries(mac, "Qwen/Qwen3-8B", least_tok_s=least)["Qwen/Qwen3-8B"] for least in (None, 15.0))
    assert free.tok_s is not None and free.tok_s.value < 15
    assert bound.fits and bound.tok_s is not None and bound.tok_s.value >= 15
    assert bound.quantization != free.quantization
