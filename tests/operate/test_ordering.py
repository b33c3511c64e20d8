"""From an intent and options to what one host is asked for."""

from __future__ import annotations

import pytest

from bedplate.errors import BadQuestion
from bedplate.facts.intent import read_intent
from bedplate.operate.ordering import order_of
from bedplate.values.intent import Intent
from bedplate.values.record import from_json, to_json
from bedplate.values.service import Order, Wanted

TWO = """
services:
  - {model: a.gguf, workload: {users: 3}, ttl: 10m, preload: true}
  - {model: b.gguf, engine: llamacpp, replicas: 2, operations: {portable: true}}
operations: {model_changes: often}
"""


def test_one_model() -> None:
    order = order_of(Intent(), engine="llama.cpp", replicas=2, ttl="90s", port=0, name="chat")
    assert order.services == (Wanted(engine="llama.cpp", replicas=2, ttl_s=90),)
    assert (order.port, order.name) == (0, "chat") and from_json(Order, to_json(order)) == order


def test_services_of_a_file() -> None:
    first, second = order_of(read_intent(TWO)).services
    assert (first.model, first.ttl_s, first.preload, first.workload.users) == ("a.gguf", 600, True, 3)
    assert first.operations.model_changes == "often" and first.on_demand
    assert (second.engine, second.replicas, second.ttl_s, second.on_demand) == ("llama.cpp", 2, None, False)
    assert second.operations.portable


@pytest.mark.parametrize("option", [{"engine": "vllm"}, {"replicas": 2}, {"ttl": "1m"}])
def test_options_for_one_model_are_none_for_several(option: dict[str, object]) -> None:
    with pytest.raises(BadQuestion, match="2 services") as caught:
        order_of(read_intent(TWO), **option)  # type: ignore[arg-type]
    assert "in the file" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("services: [{model: a, ttl: soon}]", r"services\[0\].ttl: 'soon' is no length of time"),
        ("services: [{model: a, ttl: 0}]", r"services\[0\].ttl: must be more than 0"),
        ("services: [{model: a, ttl: 0s}]", r"services\[0\].ttl: must be more than 0"),
        ("services: [{model: a, replicas: 0}]", r"services\[0\].replicas: must be at least 1"),
        ("services: [{model: a, engine: vlm}]", r"services\[0\].engine: no engine is known as 'vlm'"),
        ("services: [{model: a, replica: 2}]", "did you mean replicas"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(text: str, words: str) -> None:
    with pytest.raises(BadQuestion, match=words):
        read_intent(text + "\n")


def test_machines_on_paper_and_facts_cannot_be_served() -> None:
    with pytest.raises(BadQuestion, match="pools"):
        order_of(read_intent("pools: [{name: x, accelerator: H100 SXM}]\nservices: [{model: a}]\n"))
    with pytest.raises(BadQuestion, match=r"services\[0\].model: facts"):
        order_of(read_intent("services: [{model: {params_b: 1}}]\n"))
    with pytest.raises(BadQuestion, match="--ttl"):
        order_of(Intent(), ttl="0")
