"""A scenario as a workload of `plan` and as requests of `simulate`."""

from __future__ import annotations

import itertools
import json

import pytest
from tests.commands import invoke

from bedplate.decide.scenario import apply_scenario
from bedplate.decide.simulate import make_session_stream
from bedplate.errors import UsageError
from bedplate.facts.scenarios import SCENARIOS, fit_context
from bedplate.values import ArrivalProcess, Workload
from bedplate.values.intent import Intent, Service

PLAN = ("plan", "Qwen/Qwen3-8B", "--hardware", "2x H100 SXM")


def test_a_scenario_sets_the_workload_and_says_so() -> None:
    intent, scenario = apply_scenario(Intent(), "agent", ())
    work = intent.workload
    assert scenario == SCENARIOS["agent"] and work.structured_output
    assert work.shared_prefix_tokens == 3000 and work.session_prefix_tokens > 10_000
    assert work.repeated_prefix_tokens < work.prompt_tokens < work.request_tokens <= 65536
    assert work.users == scenario.sessions and 4 < (work.think_time_s or 0) < 8
    (note,) = intent.notes
    assert note.startswith("assumed by the scenario agent: prompts of ") and "structured output" in note


def test_programs_have_requests_in_flight_instead_of_users() -> None:
    work = apply_scenario(Intent(), "batch", ())[0].workload
    assert (work.concurrency, work.users, work.think_time_s, work.batch) == (16, 1, None, True)
    assert not any(apply_scenario(Intent(), name, ())[0].workload.batch for name in ("chat", "rag", "voice"))


def test_what_is_specified_wins_and_is_noted() -> None:
    asked = Intent(workload=Workload(users=50, output_tokens=100))
    intent, _ = apply_scenario(asked, "chat", ("users", "output_tokens"))
    work = intent.workload
    assert (work.users, work.output_tokens, work.concurrency) == (50, 100, None)
    assert any(note.startswith("workload.output_tokens: 100 as specified, instead of 20") for note in intent.notes)
    # A value that happens to be the default counts too, if it was given.
    intent, _ = apply_scenario(Intent(), "rag", ("prompt_tokens",))
    assert intent.workload.prompt_tokens == 512


def test_the_context_of_the_model_limits_the_sessions() -> None:
    intent, scenario = apply_scenario(Intent(), "agent", (), 8192)
    assert scenario.context_tokens == 8192 and intent.workload.request_tokens <= 8192
    assert "at 8,192 tokens instead of 65,536" in intent.notes[-1]


def test_services_have_no_common_scenario() -> None:
    with pytest.raises(UsageError, match="single model"):
        apply_scenario(Intent(services=(Service(model="a"),)), "chat", ())


def test_plan_prefers_sglang_for_repeated_prefixes() -> None:
    answer = invoke(*PLAN, "--scenario", "agent", "--users", "50", "--json")
    decision = json.loads(answer.out)
    assert decision["engine"] == "sglang"
    assert any(reason["rule"] == "serve.shared-prefix" for reason in decision["reasons"])
    assert any(note.startswith("assumed by the scenario agent") for note in decision["notes"])
    assert any("users" in note or "50" in note for note in decision["notes"]) or answer.code == 0
    plain = json.loads(invoke(*PLAN, "--users", "50", "--json").out)
    assert plain["engine"] != "sglang"


def test_an_unknown_scenario_is_a_usage_error() -> None:
    answer = invoke("plan", "--scenario", "games")
    assert answer.code == 2 and "chat, rag, agent, code, batch, voice" in answer.err


# simulate


def test_simulated_sessions_share_blocks_with_earlier_turns() -> None:
    scenario = fit_context(SCENARIOS["agent"], 16384)
    stream = make_session_stream(scenario, Workload(users=3), 60, seed=1)
    assert len(stream) == 60 and stream.clients == 3 and stream.process is ArrivalProcess.USERS
    assert len(stream.arrival) == 3 and len(stream.think_s) == 60 and stream.hashes is not None
    shared = 3000 // stream.hash_tokens
    assert len({names[:shared] for names in stream.hashes}) == 1, "the system prompt"
    own = [names[shared:] for names in stream.hashes]
    seen: dict[object, tuple[object, ...]] = {}
    for names in own:
        before = seen.get(names[0], ()) if names else ()
        assert names[: len(before)] == before, "a turn begins with the turn before"
        if names:
            seen[names[0]] = names
    assert len(seen) >= 3


def test_simulated_sessions_arrive_at_a_rate() -> None:
    stream = make_session_stream(SCENARIOS["chat"], Workload(), 2000, 5.0, seed=2)
    assert stream.process is ArrivalProcess.POISSON and stream.clients is None and not stream.think_s
    assert all(one <= other for one, other in itertools.pairwise(stream.arrival))
    assert stream.expected_rate == 5.0 and len(stream.arrival) == 2000


def test_simulate_reports_the_cache_hits_of_a_scenario() -> None:
    answer = invoke(
        "simulate", "Qwen/Qwen3-8B", "--hardware", "H100 SXM", "--scenario", "agent", "--rate", "1", "--requests",
        "300", "--replicas", "1", "--json",
    )  # fmt: skip
    found = json.loads(answer.out)
    assert found["traffic"]["source"] == "scenario agent"
    assert found["answer"]["cache_hit_share"] > 0.5
    refused = invoke("simulate", "Qwen/Qwen3-8B", "--scenario", "agent", "--spread", "1")
    assert refused.code == 2 and "--spread" in refused.err
