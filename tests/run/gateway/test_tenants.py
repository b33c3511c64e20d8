"""Keys, and the limits of each tenant."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bedplate import store
from bedplate.engines.traits import RequestTraits
from bedplate.errors import ExternalFailure, UsageError
from bedplate.hosting.tenants import add_key, change_tenant, explain_closed, open_endpoints, revoke
from bedplate.run.gateway import Gateway
from bedplate.run.gateway.backend import AdapterBackend
from bedplate.run.gateway.pages import OWN_PAGES
from bedplate.run.gateway.recorder import RequestRecorder
from bedplate.run.gateway.tenants import KeyDigest, RateBucket, Tenants, TenantState
from bedplate.values.tenant import DeclaredTenant, Tenant, TenantKey, digest_key

from .scripted import (
    ANSWER,
    CHAT,
    Answer,
    Setup,
    make_answer,
    make_backend,
    make_chat_body,
    request,
    start_gateway,
    wait_until,
    wait_within,
)

KEY = "sk-of-alice"


def allow(setup: Setup, *tenants: Tenant) -> None:
    """Gives each of these tenants a key that ends with its name."""
    own = setup.gateway.tenants
    keys = [KeyDigest(digest_key(f"sk-of-{one.name}".encode(), own.salt), one.name) for one in tenants]
    own.replace(tenants, keys)


async def ask(setup: Setup, key: str = KEY, **fields: Any) -> Answer:
    client = await setup.connect()
    return await client.post(CHAT, make_chat_body(**fields), authorization=f"Bearer {key}")


# keys


async def test_accepts_only_valid_keys_and_assigns_requests_to_their_tenants() -> None:
    async with start_gateway() as setup:
        allow(setup, Tenant(name="alice"), Tenant(name="bob"))
        assert (await ask(setup)).status == 200
        assert (await ask(setup, "sk-of-bob")).status == 200
        for wrong in ("", "sk-of-alic", "sk-of-alice2", "default"):
            assert (await ask(setup, wrong)).status == 401
        labels = {"tenant": "alice", "outcome": "ok"}
        read = setup.gateway.meters.registry.get_sample_value
        assert read("bedplate_tenant_requests_total", labels) == 1
        assert read("bedplate_tenant_tokens_total", {"tenant": "alice", "kind": "completion"}) == 3


async def test_rejects_expired_key() -> None:
    async with start_gateway() as setup:
        own = setup.gateway.tenants
        digest = digest_key(KEY.encode(), own.salt)
        own.replace([Tenant(name="alice")], [KeyDigest(digest, "alice", time.time() + 60)])
        assert (await ask(setup)).status == 200
        own.replace([Tenant(name="alice")], [KeyDigest(digest, "alice", time.time() - 1)])
        assert (await ask(setup)).status == 401


async def test_revoking_the_last_key_does_not_open_the_endpoint() -> None:
    async with start_gateway() as setup:
        assert (await ask(setup, "")).status == 200
        allow(setup, Tenant(name="alice"))
        setup.gateway.tenants.replace([], [])
        assert (await ask(setup)).status == 401
        assert (await ask(setup, "")).status == 401


async def test_checks_key_of_each_request_on_a_kept_connection() -> None:
    async with start_gateway() as setup:
        allow(setup, Tenant(name="alice"))
        client = await setup.connect()
        assert (await client.post(CHAT, make_chat_body(), authorization=f"Bearer {KEY}")).status == 200
        allow(setup)
        assert (await client.post(CHAT, make_chat_body(), authorization=f"Bearer {KEY}")).status == 401


async def test_rejects_key_that_expires_on_a_kept_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async with start_gateway() as setup:
        own = setup.gateway.tenants
        digest = digest_key(KEY.encode(), own.salt)
        own.replace([Tenant(name="alice")], [KeyDigest(digest, "alice", time.time() + 60)])
        client = await setup.connect()
        assert (await client.post(CHAT, make_chat_body(), authorization=f"Bearer {KEY}")).status == 200
        real = time.time
        monkeypatch.setattr("bedplate.run.gateway.tenants.time.time", lambda: real() + 61)
        assert (await client.post(CHAT, make_chat_body(), authorization=f"Bearer {KEY}")).status == 401


async def test_requests_on_one_connection_may_use_different_keys() -> None:
    async with start_gateway() as setup:
        allow(setup, Tenant(name="alice"), Tenant(name="bob"))
        client = await setup.connect()
        for name in ("alice", "bob", "alice"):
            assert (await client.post(CHAT, make_chat_body(), authorization=f"Bearer sk-of-{name}")).status == 200
        read = setup.gateway.meters.registry.get_sample_value
        counted = [
            read("bedplate_tenant_requests_total", {"tenant": name, "outcome": "ok"}) for name in ("alice", "bob")
        ]
        assert counted == [2, 1]
        assert (await client.post(CHAT, make_chat_body(), x_api_key="sk-of-nobody")).status == 401


def test_cached_key_is_valid_until_tenants_change() -> None:
    tenants = Tenants()
    digest = digest_key(KEY.encode(), tenants.salt)
    tenants.replace([Tenant(name="alice")], [KeyDigest(digest, "alice")])
    found = tenants.find(KEY.encode())
    assert found is not None and found.is_valid_for(KEY.encode(), tenants.turn)
    assert not found.is_valid_for(KEY.encode()[:-1], tenants.turn)
    tenants.replace([Tenant(name="alice")], [])
    assert not found.is_valid_for(KEY.encode(), tenants.turn)


# visibility


async def scrape(setup: Setup, name: str) -> str:
    client = await setup.connect()
    answer = await client.get("/metrics", authorization=f"Bearer sk-of-{name}")
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return answer.body.decode()


async def test_a_tenant_reads_its_own_metrics_and_an_admin_those_of_all() -> None:
    async with start_gateway(api_key="sk-of-default") as setup:
        allow(setup, Tenant(name="alice"), Tenant(name="bob"), Tenant(name="ops", admin=True))
        for name in ("alice", "bob"):
            assert (await ask(setup, f"sk-of-{name}")).status == 200
        own = await scrape(setup, "alice")
        samples = [line for line in own.splitlines() if line and not line.startswith("#")]
        assert samples and all('tenant="alice"' in line for line in samples), own
        assert 'bedplate_tenant_tokens_total{kind="completion",tenant="alice"} 3.0' in own
        assert "bob" not in own and "small" not in own
        for name in ("ops", "default"):
            whole = await scrape(setup, name)
            assert 'tenant="alice"' in whole and 'tenant="bob"' in whole and "bedplate_request_seconds_bucket" in whole


async def test_an_open_endpoint_shows_its_metrics_to_everybody() -> None:
    async with start_gateway() as setup:
        client = await setup.connect()
        assert b"bedplate_engine_up" in (await client.get("/metrics")).body


# declared tenants


async def test_endpoint_with_declared_tenants_requires_keys(path: Path) -> None:
    async with start_gateway(keeper=RequestRecorder(path)) as setup:
        setup.gateway.tenants.declare([DeclaredTenant(name="alice", weight=1.5, in_flight=7)])
        assert setup.gateway.needs_key and (await ask(setup, "")).status == 401
        _, key = add_key("alice", {"weight": 3.0, "requests_per_minute": 5}, path=path)
        await wait_until(lambda: setup.gateway.tenants.find(key.encode()), "the key to be seen")
        answer = await ask(setup, key)
        assert answer.status == 200 and answer.headers["x-ratelimit-limit-requests"] == "5"
        member = setup.gateway.tenants.get_member("alice")
        # Declared limits take precedence; for others the store's values apply.
        assert member is not None and (member.weight, member.max_in_flight) == (1.5, 7)
        change_tenant("alice", {"weight": 2.0, "requests_per_minute": 6}, path)
        await wait_until(
            lambda: member.requests is not None and member.requests.per_minute == 6, "the change to be seen"
        )
        assert member.weight == 1.5


async def test_rejects_tenants_that_may_not_use_the_model() -> None:
    other = make_backend(1, "large")
    async with start_gateway(other, api_key="sk-own") as setup:
        other.address = setup.backend.address
        allow(setup, Tenant(name="alice"), Tenant(name="bob"))
        setup.gateway.allow("large", ["alice"])
        assert (await ask(setup, model="large")).status == 200
        assert (await ask(setup, "sk-own", model="large")).status == 200, "whoever runs it may use all of it"
        refused = await ask(setup, "sk-of-bob", model="large")
        assert refused.status == 404 and refused.error["code"] == "model_not_found"
        assert (await ask(setup, "sk-of-bob", model="small")).status == 200
        for name, seen in (("alice", ["small", "large"]), ("bob", ["small"])):
            client = await setup.connect()
            listed = await client.get("/v1/models", authorization=f"Bearer sk-of-{name}")
            assert [one["id"] for one in listed.json["data"]] == seen
            one = await client.get("/v1/models/large", authorization=f"Bearer sk-of-{name}")
            assert one.status == (200 if "large" in seen else 404)
        setup.gateway.allow("large", [])
        assert (await ask(setup, "sk-of-bob", model="large")).status == 200


HIDDEN = "unreleased-70b"


async def test_names_of_other_tenants_models_appear_nowhere() -> None:
    other = make_backend(1, HIDDEN, aliases=("/models/Unreleased-70B.gguf",))
    async with start_gateway(other, api_key="sk-own") as setup:
        allow(setup, Tenant(name="alice"), Tenant(name="bob"))
        setup.gateway.allow(HIDDEN, ["alice"])
        unknown = await ask(setup, "sk-of-bob", model="no-such-model")
        hidden = await ask(setup, "sk-of-bob", model=HIDDEN.upper())
        assert unknown.status == hidden.status == 404
        assert unknown.body.replace(b"no-such-model", HIDDEN.upper().encode()) == hidden.body
        assert "served: small" in unknown.error["message"]
        pages = (*OWN_PAGES, "/v1/models/nothing", "/bedplate/live", "/nowhere")
        for sent in ({"authorization": "Bearer sk-of-bob"}, {}):
            for path in pages:
                for accept in ("text/html", "*/*"):
                    client = await setup.connect()
                    answer = await client.get(path, accept=accept, **sent)
                    assert HIDDEN.encode() not in answer.body.lower(), (path, sent)
        for name, seen in (("alice", [HIDDEN, "small"]), ("default", [HIDDEN, "small"]), ("bob", ["small"]), ("", [])):
            key = "sk-own" if name == "default" else f"sk-of-{name}"
            client = await setup.connect()
            health = await client.get("/health", authorization=f"Bearer {key}")
            assert health.status == 200 and sorted(health.json["models"]) == sorted(seen), name
            page = await client.get("/", authorization=f"Bearer {key}")
            assert [model in page.body.decode() for model in (HIDDEN, "small")] == [HIDDEN in seen, "small" in seen]


@pytest.mark.parametrize("model", ["small", ""])
async def test_a_request_chooses_no_adapter_but_by_its_name(model: str) -> None:
    """llama.cpp has a field for that, which would also choose adapters of other tenants."""
    async with start_gateway() as setup:
        allow(setup, Tenant(name="alice"), Tenant(name="bob"))
        off, on = [{"id": 0, "scale": 0.0}], [{"id": 0, "scale": 1.0}]
        setup.backend.wants_name, setup.backend.sent_name, setup.backend.body_fields = True, "", {"lora": off}
        client = await setup.connect()
        for field in ("lora", "lor\\u0061"):
            body = b'{"model":"%b","messages":[{"role":"user","content":"a"}],"%b":%b}' % (
                model.encode(), field.encode(), json.dumps(on).encode(),
            )  # fmt: skip
            answer = await client.post(CHAT, body, authorization="Bearer sk-of-bob")
            assert answer.status == 200
            assert json.loads(setup.engine.seen[-1].body)["lora"] == off
        adapter = AdapterBackend(setup.backend, "sql", {"lora": on})
        setup.backend.followers.append(adapter)
        setup.gateway.add(adapter)
        setup.gateway.allow("sql", ["alice"])
        assert (await ask(setup, "sk-of-bob", model="sql", lora=on)).status == 404
        assert (await ask(setup, "sk-of-alice", model="sql", lora=off)).status == 200
        assert json.loads(setup.engine.seen[-1].body)["lora"] == on
        assert (await ask(setup, "sk-of-bob", model="small", lora=on)).status == 200
        assert json.loads(setup.engine.seen[-1].body)["lora"] == off


FORM = b'--x\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
UNTRANSLATABLE = {"type": "document", "source": {"type": "url", "url": "http://other.example"}}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/completions", {"prompt": "a", "n": 1000}),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": [UNTRANSLATABLE]}]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": [UNTRANSLATABLE]}]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/responses", {"input": "a", "background": True}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/v1/rerank", {"query": "a"}),
        ("/score", {"text_1": "a"}),
        ("/classify", {"input": "a"}),
        ("/tokenize", {"content": "a"}),
        ("/api/chat", {"messages": [{"role": "user", "content": "a"}]}),
        ("/api/chat", {}),
        ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}),
        ("/api/generate", {"prompt": "a"}),
        ("/api/generate", {"keep_alive": 0}),
        ("/api/embed", {"input": "a"}),
        ("/api/embeddings", {"prompt": "a"}),
        ("/api/show", {}),
        ("/v1/audio/transcriptions", None),
    ],
)
@pytest.mark.parametrize("tag", ["", ":latest"])
async def test_a_hidden_model_is_answered_like_an_unknown_one(
    path: str, fields: dict[str, Any] | None, tag: str
) -> None:
    other = make_backend(1, HIDDEN)
    other.requests = RequestTraits()  # without the other APIs: their requests are translated
    async with start_gateway(other, api_key="sk-own", requests=RequestTraits()) as setup:
        allow(setup, Tenant(name="alice"), Tenant(name="bob"))
        setup.gateway.allow(HIDDEN, ["alice"])
        answers = []
        for model in (HIDDEN, "no-such-model"):
            body: Any = {**(fields or {}), "model": model + tag}
            sent = {"authorization": "Bearer sk-of-bob"}
            if fields is None:
                name = FORM % (b"model", b"", (model + tag).encode())
                body = name + FORM % (b"file", b'; filename="a.wav"', b"sound") + b"--x--\r\n"
                sent["content_type"] = "multipart/form-data; boundary=x"
            answer = await (await setup.connect()).post(path, body, **sent)
            shown = answer.body.replace(model.encode(), b"MODEL")
            answers.append((answer.status, shown, answer.headers | {"content-length": "", "date": ""}))
        assert answers[0] == answers[1] and answers[0][0] in (400, 404)


async def test_hidden_model_is_not_revealed_while_models_are_registered() -> None:
    other = make_backend(1, HIDDEN)
    async with start_gateway(other, api_key="sk-own") as setup:
        allow(setup, Tenant(name="alice"), Tenant(name="bob"))
        setup.gateway.allow(HIDDEN, ["alice"])
        setup.gateway.starting = True
        answers = [await ask(setup, "sk-of-bob", model=name) for name in (HIDDEN, "no-such-model")]
        assert [one.status for one in answers] == [503, 503] and answers[0].body == answers[1].body


async def test_long_model_names_are_not_repeated_in_full() -> None:
    async with start_gateway() as setup:
        answer = await ask(setup, model="x" * 1_000_000)
        assert answer.status == 404 and len(answer.body) < 1000


async def test_api_key_option_belongs_to_the_default_tenant() -> None:
    async with start_gateway(api_key="sk-own") as setup:
        allow(setup, Tenant(name="alice"), Tenant(name="default", requests_per_minute=1))
        assert (await ask(setup)).status == 200
        assert (await ask(setup, "sk-own")).status == 200
        assert (await ask(setup, "sk-own")).status == 429


# limits


async def test_limits_requests_per_minute() -> None:
    async with start_gateway() as setup:
        allow(setup, Tenant(name="alice", requests_per_minute=3), Tenant(name="bob"))
        answers = [await ask(setup) for _ in range(4)]
        assert [a.status for a in answers] == [200] * 3 + [429]
        assert [a.headers["x-ratelimit-remaining-requests"] for a in answers] == ["2", "1", "0", "0"]
        assert answers[3].error["code"] == "requests_per_minute" and answers[3].error["type"] == "rate_limit_error"
        assert 1 <= int(answers[3].headers["retry-after"]) <= 20
        assert (await ask(setup, "sk-of-bob")).status == 200
        assert len(setup.engine.seen) == 4


async def test_charges_tokens_per_minute_as_the_engine_counted_them() -> None:
    counted = {"usage": {"prompt_tokens": 1000, "completion_tokens": 500}}
    async with start_gateway() as setup:
        allow(setup, Tenant(name="alice", tokens_per_minute=2000))
        setup.engine.otherwise = (make_answer(counted),)
        began = time.monotonic()
        first = await ask(setup)
        assert first.status == 200 and first.headers["x-ratelimit-limit-tokens"] == "2000"
        second = await ask(setup, max_tokens=4000)
        assert (second.status, second.error["code"]) == (429, "tokens_per_minute")
        regained = (time.monotonic() - began) * 2000 / 60
        assert int(second.headers["x-ratelimit-remaining-tokens"]) <= 501 + regained
        assert 1 <= int(second.headers["retry-after"]) <= 60


async def test_stream_reports_remaining_limits_and_rejection_costs_no_tokens() -> None:
    async with start_gateway() as setup:
        allow(setup, Tenant(name="alice", tokens_per_minute=1000))
        setup.engine.otherwise = (make_answer(b"{}", "400 Bad Request"),)
        for _ in range(10):
            answer = await ask(setup)
            assert answer.status == 400 and int(answer.headers["x-ratelimit-remaining-tokens"]) > 500


async def test_limits_requests_in_flight() -> None:
    async with start_gateway() as setup:
        allow(setup, Tenant(name="alice", in_flight=2), Tenant(name="bob"))
        gate = asyncio.Event()
        setup.engine.otherwise = (gate, make_answer(ANSWER))
        asking = [asyncio.ensure_future(ask(setup)) for _ in range(2)]
        await setup.engine.request(1)
        answer = await ask(setup)
        assert (answer.status, answer.error["code"]) == (429, "too_many_in_flight")
        bob = asyncio.ensure_future(ask(setup, "sk-of-bob"))
        await setup.engine.request(2)
        gate.set()
        assert [a.status for a in await wait_within(asyncio.gather(*asking, bob))] == [200] * 3
        assert (await ask(setup)).status == 200


async def test_disconnect_frees_the_tenants_slot() -> None:
    async with start_gateway() as setup:
        allow(setup, Tenant(name="alice", in_flight=1))
        setup.engine.answer(asyncio.Event())
        client = await setup.connect()
        await client.send(request(CHAT, make_chat_body(), authorization=f"Bearer {KEY}"))
        await setup.engine.request()
        await client.close()
        await wait_until(setup.is_at_rest, "it to be forgotten")
        assert (await ask(setup)).status == 200


@given(
    per_minute=st.integers(1, 10_000),
    steps=st.lists(st.tuples(st.floats(0, 100), st.floats(0, 20_000)), max_size=40),
)
def test_bucket_limits_burst_and_long_term_rate(per_minute: int, steps: list[tuple[float, float]]) -> None:
    bucket = RateBucket(per_minute)
    began = now = time.monotonic()
    taken = 0.0
    for passed, amount in steps:
        now += passed
        wait_s = bucket.compute_wait_s(amount, now)
        assert 0 <= wait_s <= 60.001 + 60 * taken / per_minute
        if wait_s == 0:
            bucket.take(amount, now)
            taken += amount
        else:
            assert bucket.compute_wait_s(amount, now + wait_s * 1.001 + 1e-6) == 0
            now = max(now, bucket._at)
        largest = max((a for _, a in steps), default=0.0)
        assert taken <= per_minute * (1 + (now - began) / 60) + largest + 1e-6


def test_changed_limit_applies_at_once_and_unchanged_limit_is_not_refilled() -> None:
    tenants = Tenants()
    tenants.replace([Tenant(name="a", requests_per_minute=2)], [])
    member = next(m for m in tenants.list_members() if m.name == "a")
    now = time.monotonic()
    member.admit(1, now)
    member.admit(1, now)
    tenants.replace([Tenant(name="a", requests_per_minute=2, weight=3)], [])
    assert next(m for m in tenants.list_members() if m.name == "a") is member
    assert member.weight == 3 and member.check_limits(1, now) is not None
    tenants.replace([Tenant(name="a")], [])
    assert member.check_limits(1, now) is None


def test_expected_cost_follows_the_tenants_answers() -> None:
    member = TenantState(Tenant(name="a"))
    before = member.estimate_cost_tokens(400, None)
    for _ in range(100):
        member.correct_charge(before, 110, 10, 0.0)
    assert 110 <= member.estimate_cost_tokens(400, None) < 112
    assert member.estimate_cost_tokens(400, 2) == 102


# changes in the store while it runs


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "store.sqlite"


async def test_running_endpoint_detects_added_removed_and_changed_keys(path: Path) -> None:
    async with start_gateway(keeper=RequestRecorder(path)) as setup:
        assert (await ask(setup, "")).status == 200
        _, key = add_key("alice", {"in_flight": 3}, path=path)
        # The endpoint may be closed a moment before the key is known.
        await wait_until(lambda: setup.gateway.tenants.find(key.encode()) is not None, "the key to be seen")
        assert (await ask(setup, "")).status == 401
        assert (await ask(setup, key)).status == 200
        change_tenant("alice", {"requests_per_minute": 1}, path)
        found = setup.gateway.tenants.find(key.encode())
        assert found is not None
        await wait_until(lambda: found.member.requests is not None, "the limit to be seen")
        assert [(await ask(setup, key)).status for _ in range(2)] == [200, 429]
        revoke("alice", path)
        await wait_until(lambda: setup.gateway.tenants.find(key.encode()) is None, "the key to be gone")
        assert (await ask(setup, key)).status == 401


async def test_several_tenants_limit_requests_to_the_engines_slots(path: Path) -> None:
    _, alice = add_key("alice", {}, path=path)
    add_key("bob", {}, path=path)
    async with start_gateway(keeper=RequestRecorder(path), slots=2) as setup:
        gate = asyncio.Event()
        setup.engine.otherwise = (gate, make_answer(ANSWER))
        asking = [asyncio.ensure_future(ask(setup, alice)) for _ in range(5)]
        await wait_until(lambda: setup.count_waiting() == 3, "three to wait")
        await setup.engine.request(1)
        assert len(setup.engine.seen) == 2
        gate.set()
        assert [a.status for a in await wait_within(asyncio.gather(*asking))] == [200] * 5


async def test_single_tenant_may_exceed_the_engines_slots(path: Path) -> None:
    async with start_gateway(keeper=RequestRecorder(path), slots=2) as setup:
        gate = asyncio.Event()
        setup.engine.otherwise = (gate, make_answer(ANSWER))
        asking = [asyncio.ensure_future(ask(setup, "")) for _ in range(5)]
        await setup.engine.request(4)
        gate.set()
        await wait_within(asyncio.gather(*asking))


def test_unreadable_store_prevents_start(path: Path) -> None:
    """The valid keys would be unknown, and the endpoint must not be open."""
    path.write_bytes(b"this is no database" * 100)
    with pytest.raises(ExternalFailure):
        RequestRecorder(path)


def test_stores_only_hashes_of_keys(path: Path) -> None:
    _, key = add_key("alice", {}, path=path)
    files = [one.read_bytes() for one in path.parent.iterdir()]
    assert files and not any(key.encode() in one or key[3:].encode() in one for one in files)
    assert path.stat().st_mode & 0o077 == 0
    assert digest_key(key.encode(), store.get_salt(path)) in b"".join(files)


async def test_keys_and_prompts_are_not_logged_or_stored(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    _, key = add_key("alice", {"requests_per_minute": 3}, path=path)
    secret = "the launch code is 0000"
    async with start_gateway(keeper=RequestRecorder(path)) as setup:
        for sent in (key, key, key, key, "wrong-key"):
            await ask(setup, sent, messages=[{"role": "user", "content": secret}])
        setup.engine.answer(make_answer(b"no", "500 Oops", "text/plain"))
        await ask(setup, key)
    said = caplog.text.encode() + b"".join(one.read_bytes() for one in path.parent.iterdir())
    for word in (key, "wrong-key", secret, "launch"):
        assert word.encode() not in said


@pytest.mark.parametrize("lost", ["revoked", "moved", "moved before the restart that writes the marker"])
async def test_endpoint_stays_closed_after_a_restart_without_keys(lost: str, path: Path) -> None:
    _, key = add_key("alice", {}, path=path)
    if lost == "revoked":
        revoke("alice", path)
    elif lost == "moved":
        for file in path.parent.glob("store.sqlite*"):
            file.rename(path.with_name(f"away-{file.name}"))
    else:  # by a version without the marker
        store.forget_keys(path)
        assert RequestRecorder(path).requires_key
        path.unlink()
    async with start_gateway(keeper=RequestRecorder(path)) as setup:
        assert setup.gateway.needs_key and not setup.gateway.tenants.has_valid_key
        assert (await ask(setup, "")).status == 401
        assert (await ask(setup, key)).status == 401
        _, other = add_key("bob", {}, path=path)
        await wait_until(lambda: setup.gateway.tenants.find(other.encode()), "the key to be seen")
        assert (await ask(setup, other)).status == 200
    assert not setup.engine.seen[1:]


async def test_opening_is_explicit_and_not_possible_while_there_are_keys(path: Path) -> None:
    add_key("alice", {}, path=path)
    with pytest.raises(UsageError, match="alice has keys") as caught:
        open_endpoints(path)
    assert caught.value.hint is not None and "bedplate keys revoke alice" in caught.value.hint
    assert explain_closed(path) is None
    revoke("alice", path)
    closed = explain_closed(path)
    assert closed is not None and "bedplate keys open" in closed
    assert open_endpoints(path) and explain_closed(path) is None
    assert not open_endpoints(path)
    async with start_gateway(keeper=RequestRecorder(path)) as setup:
        assert (await ask(setup, "")).status == 200


def test_marker_is_written_before_the_key(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that cannot be stored closes the endpoint; a key without the marker would not."""
    monkeypatch.setattr(store, "_write", lambda *given: pytest.fail("the store was written first"))
    monkeypatch.setattr(store, "make_folder", lambda folder: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(ExternalFailure):
        store.add_key("alice", TenantKey(id="1", created_at=""), b"digest", path)


def test_marker_that_cannot_be_examined_counts_as_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert store.have_keys_existed(tmp_path / "file" / "store.sqlite")


async def test_stored_tenants_apply_to_the_first_request(path: Path) -> None:
    _, key = add_key("alice", {}, path=path)
    gateway = Gateway([], keeper=RequestRecorder(path))
    assert gateway.needs_key and gateway.tenants.find(key.encode()) is not None
