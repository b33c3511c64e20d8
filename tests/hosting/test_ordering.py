"""Turning an intent and options into an order."""

from __future__ import annotations

import pytest

from bedplate.decide.intent import override, read_intent
from bedplate.errors import UsageError
from bedplate.hosting.endpoints import check_endpoints
from bedplate.hosting.ordering import make_order
from bedplate.hosting.tenants import list_warnings
from bedplate.serving.serve import build_listen_options
from bedplate.values.intent import Intent
from bedplate.values.record import from_json, to_json
from bedplate.values.service import ModelOrder, Order
from bedplate.values.tenant import DeclaredTenant, Tenant, TenantKey

TWO = """
services:
  - {model: a.gguf, workload: {users: 3}, ttl: 10m, preload: true}
  - {model: b.gguf, engine: llamacpp, replicas: 2, operations: {portable: true}}
operations: {model_changes: often}
"""


def test_order_for_one_model() -> None:
    order = make_order(Intent(), engine="llama.cpp", replicas=2, ttl="90s", port=0, name="chat")
    assert order.services == (ModelOrder(engine="llama.cpp", replicas=2, ttl_s=90),)
    assert (order.port, order.name) == (0, "chat") and from_json(Order, to_json(order)) == order


def test_order_for_several_services() -> None:
    first, second = make_order(read_intent(TWO)).services
    assert (first.model, first.ttl_s, first.preload, first.workload.users) == ("a.gguf", 600, True, 3)
    assert first.operations.model_changes == "often" and first.is_on_demand
    assert (second.engine, second.replicas, second.ttl_s, second.is_on_demand) == ("llama.cpp", 2, None, False)
    assert second.operations.portable


@pytest.mark.parametrize("option", [{"engine": "vllm"}, {"replicas": 2}, {"ttl": "1m"}])
def test_rejects_model_options_for_several_services(option: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="2 services") as caught:
        make_order(read_intent(TWO), **option)  # type: ignore[arg-type]
    assert "in the file" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("services: [{model: a, ttl: soon}]", r"services\[0\].ttl: 'soon' is not a duration"),
        ("services: [{model: a, ttl: 0}]", r"services\[0\].ttl: must be more than 0"),
        ("services: [{model: a, ttl: 0s}]", r"services\[0\].ttl: must be more than 0"),
        ("services: [{model: a, replicas: 0}]", r"services\[0\].replicas: must be at least 1"),
        ("services: [{model: a, engine: vlm}]", r"services\[0\].engine: unknown engine 'vlm'"),
        ("services: [{model: a, replica: 2}]", "did you mean replicas"),
    ],
)
def test_errors_name_the_field(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read_intent(text + "\n")


def test_rejects_pools_and_models_given_by_facts() -> None:
    with pytest.raises(UsageError, match="pools"):
        make_order(read_intent("pools: [{name: x, accelerator: H100 SXM}]\nservices: [{model: a}]\n"))
    with pytest.raises(UsageError, match=r"services\[0\].model: facts"):
        make_order(read_intent("services: [{model: {params_b: 1}}]\n"))
    with pytest.raises(UsageError, match="--ttl"):
        make_order(Intent(), ttl="0")


def read_weights(text: str) -> dict[str, float | None]:
    return {one.name: one.weight for one in make_order(read_intent(text)).tenants}


def test_tenants_of_a_file_apply_to_the_endpoint() -> None:
    order = make_order(
        read_intent(
            "services: [{model: a.gguf, tenants: [red]}, {model: b.gguf}]\n"
            "tenants: [{name: red, share: 0.6, in_flight: 8}, {name: blue, share: 0.4, tokens_per_minute: 1000}]\n"
        )
    )
    assert order.tenants == (
        DeclaredTenant(name="red", weight=1.2, in_flight=8),
        DeclaredTenant(name="blue", weight=0.8, tokens_per_minute=1000),
    )
    assert [one.tenants for one in order.services] == [("red",), ()] and from_json(Order, to_json(order)) == order
    assert make_order(read_intent("model: a.gguf\ntenants: [{name: red}]\n")).tenants == (DeclaredTenant(name="red"),)


def test_equal_shares_become_weight_1() -> None:
    assert read_weights("tenants: [{name: a, share: 0.5}, {name: b, share: 0.5}]\n") == {"a": 1, "b": 1}
    assert read_weights("tenants: [{name: a}, {name: b}]\n") == {"a": None, "b": None}
    # Tenants without a share divide what is left, or get a minimum if nothing is left.
    assert read_weights("tenants: [{name: a, share: 0.5}, {name: b}, {name: c}]\n") == {"a": 1.5, "b": 0.75, "c": 0.75}
    rest = read_weights("tenants: [{name: a, share: 1}, {name: b}]\n")
    assert rest["a"] == 2 and rest["b"] is not None and 0 < rest["b"] <= 0.02


def test_rejects_invalid_tenant_name() -> None:
    with pytest.raises(UsageError, match=r"tenants\[0\].name: 'red team' is not a valid tenant name"):
        make_order(read_intent("tenants: [{name: red team}]\n"))
    with pytest.raises(UsageError, match=r"tenants\[0\].in_flight"):
        read_intent("tenants: [{name: red, in_flight: 0}]\n")


def test_warns_about_differences_to_stored_tenants() -> None:
    key = TenantKey(id="1", created_at="now")
    stored = [
        Tenant(name="red", weight=3.0, in_flight=4, keys=(key,)),
        Tenant(name="blue", keys=()),
        Tenant(name="grey", keys=(key,)),
    ]
    said = list_warnings(
        [DeclaredTenant(name="red", weight=1.2, in_flight=4), DeclaredTenant(name="blue"), DeclaredTenant(name="new")],
        stored,
    )
    assert said == (
        "blue and new have no key yet and cannot send requests: run bedplate keys add blue and bedplate keys add new",
        "red: weight 1.2 from the file applies here, not 3 from bedplate keys",
        "not in the file, but accepted because they have keys: grey",
    )
    assert list_warnings([], stored) == () and list_warnings([DeclaredTenant(name="red", weight=3.0)], stored[:1]) == ()


def test_hosts_and_origins_of_the_file_and_the_options_are_allowed() -> None:
    intent = read_intent("allow_hosts: [GPU1.example.com]\nallow_origins: [https://a.example/]\n")
    order = make_order(intent, allow_hosts=["10.0.0.1"], allow_origins=["*"])
    assert order.allow_hosts == ("gpu1.example.com", "10.0.0.1")
    assert order.allow_origins == ("https://a.example", "*")
    listen = build_listen_options(from_json(Order, to_json(order)))
    assert (listen.allow_hosts, listen.allow_origins) == (order.allow_hosts, order.allow_origins)
    for text in ("allow_hosts: ['a b']\n", "allow_origins: [a.example]\n"):
        with pytest.raises(UsageError, match=text.split(":")[0]):
            make_order(read_intent(text))


def test_hosts_and_origins_survive_an_option_that_changes_the_intent() -> None:
    intent = override(read_intent("allow_hosts: [a.example]\nallow_origins: [https://b.example]\n"), users=3)
    assert (intent.allow_hosts, intent.allow_origins) == (("a.example",), ("https://b.example",))


# endpoints elsewhere

ELSEWHERE = """
routing: order
services:
  - {url: "https://far.example.com", model: owner/small, name: small, key_env: FAR_KEY, price_per_million_tokens: 0.2}
  - {model: a.gguf}
  - {url: "http://box:8080", model: a.gguf, share: 2}
"""


def test_order_with_endpoints_elsewhere() -> None:
    order = make_order(override(read_intent(ELSEWHERE), users=None))
    assert [(one.model, one.rank) for one in order.services] == [("a.gguf", 1)] and order.routing == "order"
    first, second = order.endpoints
    assert (first.name, first.model, first.key_env, first.rank) == ("small", "owner/small", "FAR_KEY", 0)
    assert (first.share, first.price_per_million_tokens) == (1.0, 0.2)
    assert (second.share, second.rank) == (2.0, 2) and from_json(Order, to_json(order)) == order


def test_endpoint_option_adds_an_endpoint() -> None:
    order = make_order(Intent(), endpoints=["http://box:8080/v1,share=0.5,key_env=BOX_KEY"], routing="load")
    (endpoint,) = order.endpoints
    assert (endpoint.url, endpoint.share, endpoint.key_env) == ("http://box:8080/v1", 0.5, "BOX_KEY")
    assert (endpoint.model, endpoint.rank, order.routing) == (None, 1, "load")


@pytest.mark.parametrize(
    "text", ["http://box,share=many", "http://box,share=-1", "http://box,token=a", "http://box,model="]
)
def test_rejects_invalid_endpoint_option(text: str) -> None:
    with pytest.raises(UsageError, match="--endpoint"):
        make_order(Intent(), endpoints=[text])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("services: [{model: a, key_env: A}]", r"services\[0\].key_env: needs url"),
        (
            "services: [{model: a, url: 'http://b', replicas: 2}]",
            r"services\[0\].replicas: cannot be combined with url",
        ),
        ("services: [{model: a, url: 'http://b', workload: {users: 2}}]", "workload: cannot be combined with url"),
        ("services: [{model: a, url: 'http://b', share: 0}]", r"services\[0\].share: must be more than 0"),
        ("routing: random", "routing"),
    ],
)
def test_errors_of_endpoints_name_the_field(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read_intent(text + "\n")


def test_routing_needs_something_to_choose_from() -> None:
    with pytest.raises(UsageError, match="nothing to choose from"):
        make_order(read_intent("routing: price\n"))


@pytest.mark.parametrize(
    ("endpoint", "words"),
    [
        ("http://127.0.0.1:8080/v1", "this endpoint itself"),
        ("ftp://box", "http or https"),
        ("http://box,key_env=ABSENT_KEY", "ABSENT_KEY is not set"),
    ],
)
def test_endpoints_are_checked_before_anything_starts(endpoint: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_endpoints(make_order(Intent(), endpoints=[endpoint]))
