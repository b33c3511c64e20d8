"""Endpoints elsewhere: what is sent to them, how one is chosen, and what happens when one fails."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from bedplate.errors import UsageError
from bedplate.run.gateway import Gateway, GatewayBackend
from bedplate.run.gateway.choosing import EXPLORE_EVERY, ChoosingRoute
from bedplate.run.gateway.elsewhere import HOPS, MAX_HOPS, RemoteAddress, RemoteBackend, read_key
from bedplate.run.gateway.tenants import KeyDigest
from bedplate.values.intent import Routing
from bedplate.values.tenant import Tenant, digest_key

from .scripted import (
    ANSWER,
    CHAT,
    Answer,
    End,
    Engine,
    Setup,
    make_answer,
    make_backend,
    make_chat_body,
    wait_until,
    wait_within,
)

KEY = "sk-of-the-endpoint"


@contextlib.asynccontextmanager
async def start(routing: Routing = "share", number: int = 2, **fields: list[Any]) -> AsyncIterator[list[Engine]]:
    """A gateway before endpoints elsewhere; `fields` are set on their backends, one value for each."""
    engines = [Engine() for _ in range(number)]
    gateway = Gateway([])
    gateway.routing = routing
    for index, engine in enumerate(engines):
        await engine.start()
        backend = RemoteBackend("small", RemoteAddress.from_url(f"http://127.0.0.1:{engine.port}/v1"), KEY)
        for name, values in fields.items():
            setattr(backend, name, values[index])
        backend.state = "ready"
        gateway.add(backend)
    port = await gateway.start("127.0.0.1", 0)
    setup = Setup(gateway, engines[0], gateway.backends[0], port)
    SETUPS[id(engines[0])] = setup
    try:
        yield engines
    finally:
        for client in setup.clients:
            await client.close()
        await wait_within(gateway.stop(0))
        for engine in engines:
            await engine.stop()
        del SETUPS[id(engines[0])]
    assert setup.count_active() == 0


SETUPS: dict[int, Setup] = {}


def get_setup(engines: list[Engine]) -> Setup:
    return SETUPS[id(engines[0])]


def get_backends(engines: list[Engine]) -> list[GatewayBackend]:
    return get_setup(engines).gateway.backends


async def ask(engines: list[Engine], text: str = "hi", **headers: str) -> Answer:
    client = await get_setup(engines).connect()
    return await client.post(CHAT, make_chat_body(messages=[{"role": "user", "content": text}]), **headers)


def count(engines: list[Engine]) -> list[int]:
    return [len(engine.seen) for engine in engines]


# addresses and keys


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://127.0.0.1:9000", "http://127.0.0.1:9000"),
        ("https://api.example.com/v1", "https://api.example.com"),
        ("https://api.example.com:8443/llm/v1/", "https://api.example.com:8443/llm"),
        ("http://[::1]:80/v1", "http://[::1]"),
    ],
)
def test_reads_addresses_with_or_without_v1(url: str, shown: str) -> None:
    assert RemoteAddress.from_url(url).url == shown


@pytest.mark.parametrize(
    "url",
    [
        "ftp://example.com", "file:///etc/passwd", "unix:/run/x", "example.com:80", "https://", "http://a:99999",
        "https://user:secret@example.com", "https://example.com/?key=1", "https://example.com/#a",
        "http://ex ample.com", "http://exämple.com", "http://example.com/\r\nx: y",
    ],
)  # fmt: skip
def test_rejects_other_addresses(url: str) -> None:
    with pytest.raises(UsageError, match="url:") as caught:
        RemoteAddress.from_url(url)
    assert "secret" not in str(caught.value)


def test_key_comes_from_the_environment_and_leaves_only_encrypted(monkeypatch: pytest.MonkeyPatch) -> None:
    far, near = RemoteAddress.from_url("http://api.example.com"), RemoteAddress.from_url("http://192.168.0.7:8080")
    secure = RemoteAddress.from_url("https://api.example.com")
    monkeypatch.setenv("ENDPOINT_KEY", KEY)
    assert read_key("ENDPOINT_KEY", secure) == read_key("ENDPOINT_KEY", near) == KEY
    assert read_key(None, far) is None
    with pytest.raises(UsageError, match="unencrypted") as caught:
        read_key("ENDPOINT_KEY", far)
    assert KEY not in str(caught.value)
    with pytest.raises(UsageError, match="ABSENT_KEY is not set"):
        read_key("ABSENT_KEY", secure)
    monkeypatch.setenv("ENDPOINT_KEY", "two\nlines")
    with pytest.raises(UsageError, match="invalid in an HTTP header") as caught:
        read_key("ENDPOINT_KEY", secure)
    assert "lines" not in str(caught.value)


async def test_endpoint_gets_its_own_key_and_name_and_nothing_secret_of_the_client() -> None:
    async with start(number=1, sent_name=["Owner/Small"]) as engines:
        answer = await ask(
            engines, authorization="Bearer sk-of-the-client", x_api_key="sk-client", api_key="sk-client",
            cookie="session=1", openai_organization="org-1", traceparent="00-1-2-01", x_request_id="r1",
        )  # fmt: skip
        assert answer.status == 200
        (seen,) = engines[0].seen
        assert dict(seen.headers) == {
            "host": f"127.0.0.1:{engines[0].port}", "content-type": "application/json",
            "authorization": f"Bearer {KEY}", "traceparent": "00-1-2-01", "x-request-id": "r1",
            HOPS.decode(): "1", "content-length": str(len(seen.body)),
        }  # fmt: skip
        assert seen.target == CHAT and seen.json["model"] == "Owner/Small"


async def test_answers_have_the_name_of_the_model_here() -> None:
    async with start(number=1, sent_name=["Owner/Small"]) as engines:
        engines[0].answer(make_answer({**ANSWER, "model": "Owner/Small"}))
        assert (await ask(engines)).json["model"] == "small"


async def test_other_apis_are_translated_for_an_endpoint_that_lacks_them() -> None:
    asked = {"model": "small", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
    whole = {**ANSWER, "choices": [{"message": {"content": "Hello"}, "finish_reason": "stop"}]}
    async with start(number=1, sent_name=["Owner/Small"], lacking_apis=[frozenset(["messages"])]) as engines:
        client = await get_setup(engines).connect()
        engines[0].answer(make_answer(whole))
        answer = await client.post("/v1/messages", asked)
        assert answer.json["content"] == [{"type": "text", "text": "Hello"}]
        await client.post("/v1/responses", {"model": "small", "input": "hi"})
        assert [seen.target for seen in engines[0].seen] == [CHAT, "/v1/responses"]
        assert {seen.json["model"] for seen in engines[0].seen} == {"Owner/Small"}


async def test_tenants_limits_and_usage_hold_for_endpoints() -> None:
    """A model that a tenant may not use looks to it as one that does not exist, in every API."""
    tenants = Tenant(name="alice", requests_per_minute=2), Tenant(name="bob")
    apis: dict[str, dict[str, Any]] = {
        CHAT: {"messages": [{"role": "user", "content": "hi"}]},
        "/v1/messages": {"max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]},
        "/v1/responses": {"input": "hi", "background": True},
        "/api/chat": {"messages": []},
        "/api/generate": {},
        "/api/show": {},
    }
    async with start(number=1, lacking_apis=[frozenset(["messages", "responses"])]) as engines:
        setup = get_setup(engines)
        own = setup.gateway.tenants
        own.replace(tenants, [KeyDigest(digest_key(one.name.encode(), own.salt), one.name) for one in tenants])
        setup.gateway.allow("small", ["alice"])
        client = await setup.connect()
        for path, body in apis.items():
            hidden, absent = [
                await client.post(path, {"model": name, **body}, authorization="Bearer bob")
                for name in ("small", "big")
            ]
            assert hidden.status == absent.status == 404, path
            assert hidden.body.replace(b"small", b"big") == absent.body, path
        listed = await client.get("/v1/models", authorization="Bearer bob")
        assert listed.json["data"] == [] and count(engines) == [0]

        assert [(await ask(engines, authorization="Bearer alice")).status for _ in range(3)] == [200, 200, 429]
        assert count(engines) == [2]
        read = setup.gateway.meters.registry.get_sample_value
        assert read("bedplate_tenant_tokens_total", {"tenant": "alice", "kind": "completion"}) == 6


# failures


@pytest.mark.parametrize(
    "status", ["401 Unauthorized", "403 Forbidden", "404 Not Found", "429 Too Many Requests", "302 Found", "500 Error"]
)
async def test_refusal_of_one_endpoint_is_answered_by_another(status: str) -> None:
    async with start("order", rank=[0, 1]) as engines:
        engines[0].answer(make_answer({"error": {"message": f"Incorrect key {KEY}"}}, status))
        answer = await ask(engines)
        assert answer.status == 200 and count(engines) == [1, 1]


@pytest.mark.parametrize(
    ("status", "expected", "word"),
    [
        ("401 Unauthorized", 502, "rejected the API key"),
        ("404 Not Found", 502, "does not serve the model"),
        ("429 Too Many Requests", 503, "rate limit"),
        ("307 Temporary Redirect", 502, "redirect"),
    ],
)
async def test_refusal_of_the_only_endpoint_is_not_the_clients_mistake(status: str, expected: int, word: str) -> None:
    async with start(number=1) as engines:
        engines[0].answer(make_answer({"error": {"message": f"Incorrect key {KEY}"}}, status))
        answer = await ask(engines)
        assert answer.status == expected and answer.error["code"] == "endpoint_refused"
        assert word in answer.error["message"]
        assert KEY.encode() not in answer.body and count(engines) == [1]


async def test_clients_mistake_is_reported_without_the_key() -> None:
    async with start("order", rank=[0, 1]) as engines:
        engines[0].answer(make_answer({"error": {"message": f"bad request of {KEY}"}}, "400 Bad Request"))
        answer = await ask(engines)
        assert answer.status == 400 and answer.error["message"] == "bad request of ***" and count(engines) == [1, 0]


async def test_endpoint_that_fails_repeatedly_is_ejected() -> None:
    async with start("order", rank=[0, 1]) as engines:
        engines[0].otherwise = (End.RESET,)
        for _ in range(10):
            assert (await ask(engines)).status == 200
        assert count(engines) == [3, 10] and not get_backends(engines)[0].health.is_healthy


# the choice


async def test_conversations_are_divided_by_share_and_stay() -> None:
    async with start(share=[3.0, 1.0]) as engines:
        for number in range(80):
            places = set()
            for _ in range(2):
                before = len(engines[1].seen)
                await ask(engines, f"conversation {number}")
                places.add(len(engines[1].seen) > before)
            assert len(places) == 1
        assert 10 <= len(engines[1].seen) <= 80, "a quarter of 160, by chance more or fewer"


async def test_order_uses_the_first_and_price_the_cheapest() -> None:
    async with start("order", 3, rank=[1, 0, 2]) as engines:
        for number in range(6):
            await ask(engines, str(number))
        assert count(engines) == [0, 6, 0]
        get_backends(engines)[1].state = "restarting"
        await ask(engines)
        assert count(engines) == [1, 6, 0]
    async with start("price", 3, price=[5.0, 5.0, 0.5]) as engines:
        for number in range(6):
            await ask(engines, str(number))
        assert count(engines) == [0, 0, 6]


async def test_requests_wait_for_an_endpoint_that_is_started_on_demand() -> None:
    """The first one finds out that it cannot be reached; the second one comes while that is known."""
    async with start(number=1, wait_s=[600.0]) as engines:
        (engine,), (backend,), gateway = engines, get_backends(engines), get_setup(engines).gateway
        gateway.hold_while_unreachable("small", 600.0)
        assert (await ask(engines)).status == 200
        await engine.stop()
        asked = [asyncio.ensure_future(ask(engines, "first"))]
        await wait_until(lambda: gateway.count_waiting("small") == 1, "the first request to wait")
        assert backend.state == "restarting" and "does not accept connections" in (backend.reason or "")
        asked.append(asyncio.ensure_future(ask(engines, "second")))
        await wait_until(lambda: gateway.count_waiting("small") == 2, "the second request to wait")
        engine.lines.clear()
        await engine.start()
        backend.state = "ready"  # as its next check finds
        assert [(await wait_within(one)).status for one in asked] == [200, 200]
        assert len(engine.seen) == 3


async def test_request_waits_for_an_endpoint_that_is_still_loading() -> None:
    """It listens, or a service mesh answers for it, before it can answer."""
    async with start(number=1, wait_s=[600.0]) as engines:
        (engine,), (backend,), gateway = engines, get_backends(engines), get_setup(engines).gateway
        gateway.hold_while_unreachable("small", 600.0)
        engine.answer(make_answer(b'{"error": {"message": "loading"}}', "503 Service Unavailable"))
        asked = asyncio.ensure_future(ask(engines))
        await wait_until(lambda: gateway.count_waiting("small") == 1, "the request to wait")
        backend.state = "ready"
        assert (await wait_within(asked)).status == 200 and len(engine.seen) == 2


async def test_request_that_waits_too_long_is_rejected() -> None:
    async with start(number=1, wait_s=[0.01]) as engines:
        gateway = get_setup(engines).gateway
        gateway.hold_while_unreachable("small", 0.01)
        await engines[0].stop()
        answer = await wait_within(ask(engines))
        assert answer.status == 503 and b"held_too_long" in answer.body


async def test_endpoint_that_dies_with_a_request_does_not_get_it_again() -> None:
    """The request may be the cause."""
    async with start(number=1, wait_s=[600.0]) as engines:
        get_setup(engines).gateway.hold_while_unreachable("small", 600.0)
        engines[0].answer(End.CLOSE)
        answer = await wait_within(ask(engines))
        assert answer.status == 502 and len(engines[0].seen) == 1


async def test_order_leaves_an_engine_whose_slots_are_busy() -> None:
    async with start("order", rank=[0, 1], slots=[1, None]) as engines:
        gate = asyncio.Event()
        engines[0].answer(gate, make_answer(ANSWER))
        first = asyncio.ensure_future(ask(engines))
        await wait_until(lambda: engines[0].seen, "the first request")
        await ask(engines)
        assert count(engines) == [1, 1]
        gate.set()
        await wait_within(first)
        await ask(engines)
        assert count(engines) == [2, 1]


async def test_load_uses_the_least_loaded() -> None:
    async with start("load", share=[2.0, 1.0]) as engines:
        gate = asyncio.Event()
        engines[0].otherwise = engines[1].otherwise = (gate, make_answer(ANSWER))
        asking = []
        for number in range(6):
            asking.append(asyncio.ensure_future(ask(engines, "the same")))
            await wait_until(lambda number=number: sum(count(engines)) == number + 1, "the request")  # type: ignore[misc]
        assert count(engines) == [4, 2]
        gate.set()
        await wait_within(asyncio.gather(*asking))


async def test_latency_uses_the_fastest_and_measures_the_others_now_and_then() -> None:
    async with start("latency") as engines:
        route = get_setup(engines).gateway.routes[0]
        assert isinstance(route, ChoosingRoute)
        for number in range(2):  # each is measured once
            await ask(engines, str(number))
        assert count(engines) == [1, 1]
        for link, latency in route.latencies.items():
            is_first = link.backend is get_backends(engines)[0]
            latency.whole_s = 9.0 if is_first else 1e9  # whatever this machine measures, the first one is faster
        for number in range(EXPLORE_EVERY - 1):
            await ask(engines, str(number))
        assert count(engines) == [EXPLORE_EVERY - 1, 2]


async def test_latency_is_not_blocked_by_an_endpoint_that_never_answers() -> None:
    async with start("latency") as engines:
        gate = asyncio.Event()
        engines[0].otherwise = (gate, End.CLOSE)
        hanging = asyncio.ensure_future(ask(engines))
        await wait_until(lambda: engines[0].seen, "the first request")
        for number in range(5):
            assert (await ask(engines, str(number))).status == 200
        assert count(engines) == [1, 5]
        gate.set()
        await wait_within(hanging)


# loops


async def test_requests_of_other_bedplates_stay_here_and_loops_end() -> None:
    async with start("order", 1, rank=[0]) as engines:
        setup = get_setup(engines)
        own = Engine()
        await own.start()
        local = make_backend(own.port, rank=1)
        setup.gateway.add(local)
        assert (await ask(engines)).status == 200 and (len(own.seen), count(engines)) == (0, [1])
        assert (await ask(engines, x_bedplate_hops="1")).status == 200
        assert (len(own.seen), count(engines)) == (1, [1])
        local.state = "restarting"
        assert (await ask(engines, x_bedplate_hops="1")).status == 200 and count(engines) == [2]
        assert dict(engines[0].seen[-1].headers)[HOPS.decode()] == "2"
        for hops in (str(MAX_HOPS), "9999", "-1"):
            answer = await ask(engines, x_bedplate_hops=hops)
            assert answer.status == 503 and answer.error["code"] == "endpoint_loop"
        assert count(engines) == [2]
        await own.stop()


# TLS


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A certificate that is its own authority."""
    key, certificate = folder / f"{name}.key", folder / f"{name}.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate, "-days", "2",
         "-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}"],
        check=True, capture_output=True,
    )  # fmt: skip
    return key, certificate


@pytest.mark.parametrize(
    ("name", "trusted", "status"), [("localhost", 1, 200), ("localhost", 0, 502), ("other", 1, 502)]
)
async def test_certificate_and_name_are_verified(
    name: str, trusted: int, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil
    import ssl

    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    key, certificate = make_certificate(tmp_path, name)
    served = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    served.load_cert_chain(certificate, key)
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(make_answer(ANSWER))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=served)
    address = RemoteAddress.from_url(f"https://localhost:{server.sockets[0].getsockname()[1]}/v1")
    gateway = Gateway([])
    gateway.routing = "share"
    backend = RemoteBackend("small", address, KEY)
    backend.state = "ready"
    gateway.add(backend)
    setup = Setup(gateway, Engine(), backend, await gateway.start("127.0.0.1", 0))
    client = await setup.connect()
    answer = await client.post(CHAT, make_chat_body())
    assert answer.status == status
    await client.close()
    await gateway.stop(0)
    server.close()
