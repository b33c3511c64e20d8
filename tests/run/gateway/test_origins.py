"""Web pages of other sites: an endpoint without keys answers only its own Host and Origin."""

from __future__ import annotations

import json
import socket

import pytest

from bedplate.errors import UsageError
from bedplate.run.gateway.origins import OriginPolicy, list_own_names, parse_host, parse_origin

from .scripted import ANSWER, CHAT, Answer, Setup, make_chat_body, make_delta, make_stream, request, start_gateway

MACHINE = socket.gethostname().lower()
BODY = json.dumps(make_chat_body()).encode()
PAGES = ("/", "/health", "/v1/models", "/metrics", "/bedplate/live", "/nowhere")


async def send(
    setup: Setup, path: str = CHAT, body: bytes | None = BODY, *, host: str, method: str = "", **headers: str
) -> Answer:
    connection = await setup.connect()
    await connection.send(
        request(path, body, method, **headers).replace(b"host: localhost", f"host: {host}".encode(), 1)
    )
    return await connection.answer()


# the Host header


@pytest.mark.parametrize(
    ("host", "accepted"),
    [
        ("localhost", True),
        ("LOCALHOST:8080", True),
        ("localhost.:8080", True),
        ("127.0.0.1:9999", True),
        ("[::1]:8080", True),
        ("10.0.0.7:8080", True),
        ("host.docker.internal:8080", True),
        ("evil.example:8080", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example", False),
        ("evil.localhost.example:8080", False),
        ("rebound", False),
        ("[::1].evil.example", False),
        ("[::1]", True),
        ("0x7f000001", False),
        (":8080", False),
        ("evil.example:80:80", False),
        ("a" * 5000, False),
    ],
)
async def test_answers_only_its_own_host(host: str, accepted: bool) -> None:
    async with start_gateway() as setup:
        answer = await send(setup, host=host)
        if accepted:
            assert answer.json == ANSWER
        else:
            assert (answer.status, answer.error["code"]) == (403, "host_not_allowed")
            assert "--allow-host" in answer.error["message"]
            for path in PAGES:
                assert (await send(setup, path, None, host=host)).status == 403
        assert len(setup.engine.seen) == accepted


async def test_checks_the_host_of_each_request_on_a_kept_connection() -> None:
    async with start_gateway() as setup:
        connection = await setup.connect()
        assert (await connection.post(CHAT, BODY)).status == 200
        assert (await connection.post(CHAT, BODY)).status == 200
        await connection.send(request(CHAT, BODY).replace(b"host: localhost", b"host: evil.example", 1))
        assert (await connection.answer()).status == 403


async def test_request_without_a_host_is_answered() -> None:
    """HTTP/1.0 clients send none, browsers always do."""
    async with start_gateway() as setup:
        connection = await setup.connect()
        await connection.send(b"GET /health HTTP/1.0\r\n\r\n")
        assert (await connection.answer()).status == 200


async def test_allowed_hosts_are_answered() -> None:
    async with start_gateway(origins=OriginPolicy(["GPU1.example.com"])) as setup:
        assert (await send(setup, host="gpu1.example.com:8080")).json == ANSWER
        assert (await send(setup, host="gpu2.example.com")).status == 403
    async with start_gateway(origins=OriginPolicy(["*"])) as setup:
        assert (await send(setup, host="anything.example")).json == ANSWER


def test_machine_name_is_its_own_only_beyond_loopback() -> None:
    for address in ("127.0.0.1", "127.3.2.1", "::1"):
        assert list_own_names(address) == []
    assert list_own_names("localhost") == ["localhost"]
    for address in ("0.0.0.0", "::", "192.0.2.1"):
        assert MACHINE in list_own_names(address)
    assert list_own_names("gpu1.example.com")[0] == "gpu1.example.com"
    policy = OriginPolicy()
    assert not policy.accepts_host(MACHINE.encode() + b":8080")
    policy.bind("0.0.0.0")
    assert policy.accepts_host(MACHINE.encode() + b":8080")
    assert policy.accepts_host(MACHINE.partition(".")[0].encode() + b".local")
    assert not policy.accepts_host(MACHINE.encode() + b".evil.example")


# the Origin header


@pytest.mark.parametrize(
    ("host", "origin", "accepted"),
    [
        ("127.0.0.1:8080", "http://127.0.0.1:8080", True),
        ("localhost:8080", "http://localhost:8080", True),
        ("localhost", "https://localhost", True),
        ("127.0.0.1:8080", "http://127.0.0.1:3000", False),
        ("127.0.0.1:8080", "http://localhost:8080", False),
        ("127.0.0.1:8080", "http://127.0.0.1", False),
        ("127.0.0.1:8080", "https://evil.example", False),
        ("127.0.0.1:8080", "http://127.0.0.1:8080.evil.example", False),
        ("127.0.0.1:8080", "null", False),
        ("127.0.0.1:8080", "file://127.0.0.1:8080", False),
        ("127.0.0.1:8080", "chrome-extension://abcdef", False),
    ],
)
async def test_answers_only_pages_of_its_own(host: str, origin: str, accepted: bool) -> None:
    async with start_gateway() as setup:
        for content_type in ("text/plain", "application/json", "application/x-www-form-urlencoded"):
            answer = await send(setup, host=host, origin=origin, content_type=content_type)
            if accepted:
                assert answer.json == ANSWER
            else:
                assert (answer.status, answer.error["code"]) == (403, "origin_not_allowed")
                assert "--allow-origin" in answer.error["message"]
            assert "access-control-allow-origin" not in answer.headers
        for path in PAGES:
            assert ((await send(setup, path, None, host=host, origin=origin)).status == 403) != accepted
        assert len(setup.engine.seen) == 3 * accepted


async def test_preflight_of_a_foreign_page_is_rejected() -> None:
    async with start_gateway() as setup:
        answer = await send(
            setup, body=None, method="OPTIONS", host="127.0.0.1", origin="https://evil.example",
            access_control_request_method="POST",
        )  # fmt: skip
        assert answer.status == 403 and "access-control-allow-origin" not in answer.headers


CHATS = "https://chat.example.com"


@pytest.mark.parametrize("key", [None, "sk-own"])
async def test_allowed_origins_may_send_requests_and_read_answers(key: str | None) -> None:
    given = {"authorization": f"Bearer {key}"} if key else {}
    async with start_gateway(origins=OriginPolicy((), [CHATS + "/"]), api_key=key) as setup:
        answer = await send(
            setup, body=None, method="OPTIONS", host="127.0.0.1", origin=CHATS,
            access_control_request_method="POST", access_control_request_headers="authorization,content-type",
        )  # fmt: skip
        assert answer.status == 200 and answer.body == b""
        assert answer.headers["access-control-allow-origin"] == CHATS
        assert answer.headers["access-control-allow-headers"] == "authorization,content-type"
        assert "POST" in answer.headers["access-control-allow-methods"]
        setup.engine.answer(make_stream(make_delta("a"), b"data: [DONE]\n\n"))
        stream = json.dumps(make_chat_body(stream=True)).encode()
        for answer in (
            await send(setup, body=stream, host="127.0.0.1", origin=CHATS, **given),
            await send(setup, CHAT, BODY, host="127.0.0.1", origin=CHATS, **given),
            await send(setup, "/v1/models", None, host="127.0.0.1", origin=CHATS, **given),
            await send(setup, body=b"{", host="127.0.0.1", origin=CHATS, **given),
        ):
            assert answer.status in (200, 400)
            assert answer.headers["access-control-allow-origin"] == CHATS and answer.headers["vary"] == "origin"
        seen = setup.engine.seen[-1]
        assert "origin" not in [name.lower() for name, _ in seen.headers]
        if key:
            answer = await send(setup, host="127.0.0.1", origin=CHATS)
            assert answer.status == 401 and answer.headers["access-control-allow-origin"] == CHATS
        else:
            assert (await send(setup, host="127.0.0.1", origin="https://evil.example")).status == 403


async def test_headers_for_another_origin_do_not_stay_on_the_connection() -> None:
    async with start_gateway(origins=OriginPolicy((), ["*"])) as setup:
        connection = await setup.connect()
        first = await connection.post(CHAT, BODY, origin="https://one.example")
        second = await connection.post(CHAT, BODY)
        assert first.headers["access-control-allow-origin"] == "https://one.example"
        assert "access-control-allow-origin" not in second.headers


async def test_endpoint_with_keys_needs_no_check() -> None:
    """A page of another site has no key."""
    async with start_gateway(api_key="sk-own") as setup:
        known = {"authorization": "Bearer sk-own"}
        assert (
            await send(setup, CHAT, BODY, host="any.example", origin="https://other.example", **known)
        ).json == ANSWER
        assert (await send(setup, host="any.example", origin="https://other.example")).status == 401
        preflight = await send(
            setup, body=None, method="OPTIONS", host="any.example", origin="https://other.example",
            access_control_request_method="POST",
        )  # fmt: skip
        assert preflight.status == 401 and "access-control-allow-origin" not in preflight.headers


# options


def test_options_are_checked() -> None:
    assert parse_host(" GPU1.Example.com. ") == "gpu1.example.com" and parse_host("*") == "*"
    assert parse_origin("HTTPS://Chat.example.com/") == "https://chat.example.com"
    for wrong in ("", "https://gpu1.example.com", "gpu1:8080", "a b", "a\r\nx: y", "*.example.com"):
        with pytest.raises(UsageError, match="--allow-host"):
            parse_host(wrong)
    for wrong in ("", "chat.example.com", "https://", "https://a/b", "https://a b", "https://a\r\nx: y", "*://a"):
        with pytest.raises(UsageError, match="--allow-origin"):
            parse_origin(wrong)
