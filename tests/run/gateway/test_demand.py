"""How many sequences a request makes, and which fields are rejected."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bedplate.engines import load_engines
from bedplate.run.gateway import sse
from bedplate.run.gateway.demand import is_plain, list_prompts, read_demand
from bedplate.run.gateway.tenants import ONE_SEQUENCE, Demand, Rejection, TenantState
from bedplate.values.tenant import Tenant


def read(api: Any = "completions", fields: Any = None, **body: Any) -> Demand | Rejection:
    asked = sse.read_request_fields(json.dumps(body).encode())
    return (
        ONE_SEQUENCE
        if is_plain(api, asked)
        else read_demand(api, asked, fields, {"samplers": 3, "stop": 3, "n_probs": 9})
    )


@pytest.mark.parametrize(
    ("body", "sequences"),
    [
        ({"prompt": "one"}, 1),
        ({"prompt": ["one"]}, 1),
        ({"prompt": ["one"] * 60}, 60),
        ({"prompt": [12, 34, 56]}, 1),
        ({"prompt": [[1, 2], [3], [4, 5, 6]]}, 3),
        ({"prompt": ["text", 12, "and a token"]}, 1),
        ({"prompt": [{"prompt_string": "one"}, {"prompt_string": "two"}]}, 2),
        ({"prompt": []}, 1),
        ({"prompt": "one", "n": 4}, 4),
        ({"prompt": ["one", "two"], "n": 4}, 8),
        ({"prompt": "one", "n": 2, "best_of": 5}, 5),
        ({"prompt": "one", "n_cmpl": 3}, 3),
        ({"prompt": "one", "n": None, "best_of": None}, 1),
    ],
)
def test_counts_sequences_of_lists_and_choices(body: dict[str, Any], sequences: int) -> None:
    found = read(**body)
    assert isinstance(found, Demand) and found.sequences == sequences


def test_a_list_is_many_prompts_only_where_the_api_has_lists_of_prompts() -> None:
    for api in ("chat", "messages", "responses"):
        found = read(api, prompt=["a", "b"], input=["a", "b"], messages=[{}, {}], n=1)
        assert isinstance(found, Demand) and found.sequences == 1
    batch = read("embeddings", input=["a"] * 50)
    assert isinstance(batch, Demand) and batch.sequences == 1, "a batch without answers holds one slot"


@pytest.mark.parametrize("n", [0, -1, 129, 1.0, 2.5, "3", True, [2], {"a": 1}])
def test_rejects_counts_that_engines_read_differently(n: Any) -> None:
    found = read(prompt="one", n=n)
    assert isinstance(found, Rejection) and (found.status, found.param, found.retry_after_s) == (400, "n", 0)


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("n_predict", 500, "max_tokens"), ("num_predict", 500, "max_tokens"), ("max_new_tokens", 500, "max_tokens"),
        ("min_tokens", 5, ""), ("min_new_tokens", 5, ""), ("ignore_eos", True, ""), ("best_of", 2, "use n"),
        ("n_cmpl", 2, "use n"), ("num_return_sequences", 2, "use n"), ("generation_config", "{}", ""),
        ("n_predict", "500", "max_tokens"), ("ignore_eos", "true", ""),
    ],
)  # fmt: skip
def test_field_that_changes_the_cost_is_understood_or_rejected(name: str, value: Any, instead: str) -> None:
    found = read(fields=frozenset(), prompt="one", **{name: value})
    assert isinstance(found, Rejection) and (found.status, found.code, found.param) == (
        400, "unsupported_parameter", name
    )  # fmt: skip
    assert name in found.message and instead in found.message
    if isinstance(value, int):
        assert isinstance(read(fields=frozenset([name]), prompt="one", **{name: value}), Demand)
        assert isinstance(read(fields=None, prompt="one", **{name: value}), Demand), "the engine is not known yet"
    for without_effect in (None, False, 0):
        assert isinstance(read(fields=frozenset(), prompt="one", **{name: without_effect}), Demand)


def test_escaped_field_name_is_the_same_field() -> None:
    asked = sse.read_request_fields(b'{"prompt": "a", "n\\u005fpredict": 9, "\\u006e": 2}')
    assert isinstance(read_demand("completions", asked, frozenset(), {}), Rejection)
    assert read_demand("completions", asked, frozenset(["n_predict"]), {}) == Demand(choices=2)


def test_other_unknown_fields_pass() -> None:
    assert read(fields=frozenset(), prompt="one", top_k=3, anything={"a": [1]}) is ONE_SEQUENCE


def test_limits_what_costs_time_for_each_token() -> None:
    assert isinstance(read(prompt="one", samplers=["top_k", "top_p"], stop="a long stop string", n_probs=9), Demand)
    for number in (10, 1e9):
        assert isinstance(read(prompt="one", n_probs=number), Rejection)
    for body in ({"samplers": ["top_k"] * 4}, {"samplers": "kkkk"}, {"stop": ["a"] * 4}):
        found = read(prompt="one", **body)
        assert isinstance(found, Rejection) and found.code == "too_many_entries"


def test_expected_cost_is_for_all_sequences_and_for_enforced_lengths() -> None:
    member = TenantState(Tenant(name="a"))

    def cost(**body: Any) -> float:
        demand = read(**body)
        assert isinstance(demand, Demand)
        asked = sse.read_request_fields(json.dumps(body).encode())
        return member.estimate_cost_tokens(400, asked.max_answer_tokens, demand)

    assert cost(prompt="x", max_tokens=50) == 100 + 50
    assert cost(prompt=["x"] * 10, n=2, max_tokens=50) == 100 + 20 * 50
    assert cost(prompt=[[1, 2, 3], [4, 5]], max_tokens=50) == 5 + 2 * 50
    assert cost(prompt="x", max_tokens=5000, ignore_eos=True) == 100 + 5000
    assert cost(prompt="x", min_tokens=3000) == 100 + 3000
    assert cost(prompt="x", max_tokens=10, min_tokens=3000) == 100 + 10
    assert cost(prompt="x", max_tokens=10, n_predict=20) == 100 + 20
    assert cost(prompt="x", max_tokens=10, n_predict=-1) == 100 + member.mean_output


def test_lists_prompts_as_texts_and_numbers_of_token_ids() -> None:
    def prompts(value: Any) -> list[str | int]:
        return list_prompts(sse.read_request_fields(json.dumps({"prompt": value}).encode()).prompt)

    assert prompts("a") == ["a"] and prompts(["a", "b"]) == ["a", "b"]
    assert prompts([1, 2, 3]) == [3] and prompts([[1, 2], [3]]) == [2, 1]
    assert prompts({"a": 1}) == [] and prompts(None) == []


def test_engines_name_only_fields_that_the_gateway_reads() -> None:
    known = set(sse.RequestFields.__struct_fields__)
    for engine in load_engines().values():
        assert set(engine.requests.fields) | set(engine.requests.limits) <= known, engine.id
