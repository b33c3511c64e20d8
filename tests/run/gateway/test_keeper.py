"""Each request is recorded in the background, and disk failures do not affect requests."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from pathlib import Path

import pytest

from bedplate import store
from bedplate.errors import ExternalFailure
from bedplate.run.gateway import recorder as keeper_module
from bedplate.run.gateway.recorder import RequestContent, RequestRecorder
from bedplate.run.gateway.shapes import MAX_BLOCKS, hash_conversation, hash_prefixes
from bedplate.run.gateway.sse import read_request_fields
from bedplate.values.tenant import Tenant
from bedplate.values.traffic import PREFIX_BLOCK_BYTES, ServedRequest

from .scripted import (
    ANSWER,
    CHAT,
    DONE,
    PROBLEMS,
    STREAM_HEAD,
    USAGE,
    End,
    Setup,
    make_answer,
    make_chat_body,
    make_chunk,
    make_delta,
    make_stream,
    request,
    start_gateway,
    wait_until,
)

FINISH = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}\n\n'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.sqlite"


def read_rows(path: Path) -> list[ServedRequest]:
    return list(store.read_requests(path=path))


async def post(setup: Setup, body: object, path: str = CHAT) -> None:
    client = await setup.connect()
    await client.post(path, body)  # type: ignore[arg-type]


async def test_stores_the_shape_of_a_stream(path: Path) -> None:
    before = time.time()
    async with start_gateway(keeper=RequestRecorder(path)) as setup:
        setup.engine.answer(make_stream(make_delta("a"), make_delta("b"), FINISH, USAGE, DONE))
        await post(setup, make_chat_body(stream=True, max_tokens=64))
    (row,) = read_rows(path)
    assert before <= row.at_s <= time.time()
    assert (row.tenant, row.model, row.engine, row.api) == ("default", "small", "llama.cpp", "chat")
    assert (row.outcome, row.status, row.stream, row.finish) == ("ok", 200, True, "length")
    assert (row.prompt_tokens, row.completion_tokens, row.max_tokens) == (7, 3, 64)
    assert row.ttft_ms is not None and row.wait_ms is not None
    assert 0 <= row.wait_ms <= row.ttft_ms <= row.duration_ms
    assert len(row.prefix_hashes) == 1 and row.text_bytes < row.body_bytes


def test_stores_concurrent_requests_in_order(path: Path) -> None:
    many = [
        ServedRequest(
            at_s=float(number), tenant="a", model="m", api="chat", outcome="ok", status=200, body_bytes=number,
            duration_ms=1.0, completion_tokens=None if number % 2 else number,
        )
        for number in range(2 * store.ROWS_AT_ONCE + 1)
    ]  # fmt: skip
    store.add_requests(many, path)
    store.add_requests([], path)
    assert read_rows(path) == many


async def test_stores_every_outcome(path: Path) -> None:
    async with start_gateway(keeper=RequestRecorder(path)) as setup:
        await post(setup, make_chat_body(user="ok"))
        setup.engine.answer(make_answer(b"{}", "400 Bad Request"))
        await post(setup, make_chat_body())
        setup.engine.answer(End.CLOSE)
        setup.engine.answer(End.CLOSE)  # the connection was used before, so the request is sent again
        await post(setup, make_chat_body())
        setup.engine.answer(STREAM_HEAD + make_chunk(make_delta("a")), asyncio.Event())
        leaving = await setup.connect()
        await leaving.send(request(CHAT, make_chat_body(stream=True)))
        await leaving.head()
        await leaving.close()
        await wait_until(setup.is_at_rest, "it to be forgotten")
        setup.backend.state = "restarting"
        await post(setup, make_chat_body())
        setup.backend.state = "ready"
    kept = [(row.outcome, row.status, row.engine) for row in read_rows(path)]
    engine = "llama.cpp"
    assert kept == [
        ("ok", 200, engine),
        ("refused", 400, engine),
        ("failed", 502, engine),
        ("cancelled", 200, engine),
        ("turned_away", 503, None),
    ]


async def test_stores_cached_tokens(path: Path) -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 5}}
    async with start_gateway(keeper=RequestRecorder(path)) as setup:
        setup.engine.answer(make_answer({"usage": usage}))
        await post(setup, make_chat_body())
    assert read_rows(path)[0].cached_tokens == 5


async def test_writes_records_while_running(path: Path) -> None:
    assert keeper_module.WRITE_EVERY_S <= 1
    async with start_gateway(keeper=RequestRecorder(path)) as setup:
        await post(setup, make_chat_body())
        await wait_until(lambda: read_rows(path), "the record")


async def test_disk_failure_does_not_delay_requests_and_is_counted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "MOST_PENDING", 3)
    monkeypatch.setattr(keeper_module, "WRITE_EVERY_S", 0.01)
    notes: list[str] = []
    real = store.RequestWriter.add
    tried = []

    def full(writer: store.RequestWriter, batch: object) -> None:
        tried.append(batch)
        raise ExternalFailure("cannot use the store", cause="database or disk is full")

    keeper = RequestRecorder(path, note=notes.append)
    async with start_gateway(keeper=keeper) as setup:
        monkeypatch.setattr(store.RequestWriter, "add", full)
        for _ in range(5):
            await post(setup, make_chat_body())
        await wait_until(lambda: len(tried) > 2, "it to be tried again")
        monkeypatch.setattr(store.RequestWriter, "add", real)
        await wait_until(lambda: keeper.written == 3, "what is left to be written")
        text = (await (await setup.connect()).get("/metrics")).body.decode()
        assert "bedplate_requests_unlogged 2.0" in text
    assert len(read_rows(path)) == 3 and keeper.lost == 2
    assert len(notes) == 1 and "disk is full" in notes[0]


async def test_its_own_writes_do_not_make_it_read_the_tenants_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "WRITE_EVERY_S", 0.01)
    reads: list[Path | None] = []
    num_reads = 0
    real = store.read_tenants_and_digests

    def read(where: Path | None = None) -> object:
        reads.append(where)
        return real(where)

    keeper = RequestRecorder(path)
    monkeypatch.setattr(store, "read_tenants_and_digests", read)
    async with start_gateway(keeper=keeper) as setup:
        for number in range(1, 6):
            await post(setup, make_chat_body())
            await wait_until(lambda number=number: keeper.written == number, "a request to be written")  # type: ignore[misc]
            if number == 2:  # what changed before the first write has been read
                num_reads = len(reads)
        assert len(reads) == num_reads
        store.put_tenant(Tenant(name="alice"), path)
        await wait_until(lambda: any(one.name == "alice" for one in keeper.tenants), "another process's write")


async def test_writes_to_a_new_store_when_the_old_one_was_moved_away(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "WRITE_EVERY_S", 0.01)
    keeper = RequestRecorder(path)
    async with start_gateway(keeper=keeper) as setup:
        await post(setup, make_chat_body())
        await wait_until(lambda: keeper.written == 1, "the first request to be written")
        for file in list(path.parent.glob("store.sqlite*")):
            file.rename(file.with_name(f"away-{file.name}"))
        await post(setup, make_chat_body())
        await wait_until(lambda: keeper.written == 2, "the second request to be written")
        assert len(read_rows(path)) == 1


def test_serves_although_the_folder_is_not_writable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    notes: list[str] = []
    keeper = RequestRecorder(tmp_path / "file" / "store.sqlite", note=notes.append)
    assert len(keeper.salt) == store.SALT_BYTES and len(notes) == 1


def test_waits_for_a_locked_store(path: Path) -> None:
    store.get_salt(path)
    connection = sqlite3.connect(path)
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("ROLLBACK")
    connection.close()
    assert RequestRecorder(path).salt == store.get_salt(path)


def make_row(at_s: float, **more: object) -> ServedRequest:
    fields = {"tenant": "a", "model": "m", "engine": "e", "api": "chat", "outcome": "ok", "status": 200}
    return ServedRequest(at_s=at_s, body_bytes=10, duration_ms=5.0, **{**fields, **more})  # type: ignore[arg-type]


def test_old_requests_are_folded_into_daily_totals(path: Path) -> None:
    day = 86_400.0
    requests = [make_row(number * day, prompt_tokens=10, completion_tokens=1) for number in range(10)]
    requests += [
        make_row(9 * day + 1, outcome="failed", reason="engine_stopped"),
        make_row(9 * day + 2, outcome="turned_away", engine=None, reason="overloaded"),
    ]
    requests[:0] = [make_row(float(number), outcome="refused", reason="invalid_tools") for number in range(3)]
    store.add_requests(requests, path)
    before = {by: store.read_usage(by, path=path) for by in ("tenant", "model", "engine", "day")}
    assert store.fold_requests(3 * day, 100, path) == 6
    assert len(read_rows(path)) == 9
    assert store.fold_requests(0.0, 1, path) == 8
    assert len(read_rows(path)) == 1
    assert {by: store.read_usage(by, path=path) for by in ("tenant", "model", "engine", "day")} == before
    (used,) = before["tenant"]
    assert (used.requests, used.failed, used.turned_away, used.prompt_tokens) == (14, 1, 1, 100)
    assert list(used.reasons.items()) == [("invalid_tools", 3), ("engine_stopped", 1), ("overloaded", 1)]
    assert [one.key for one in store.read_usage("day", 8 * day, path=path)] == ["1970-01-09", "1970-01-10"]


def test_reads_all_pages_of_a_long_log(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "PAGE", 10)
    store.add_requests([make_row(float(n), tenant="ab"[n % 2]) for n in range(35)], path)
    assert [one.at_s for one in read_rows(path)] == [float(n) for n in range(35)]
    assert [one.at_s for one in store.read_requests(30.0, path=path) if one.tenant == "b"] == [31.0, 33.0]
    assert not list(store.read_requests(model="other", path=path))


# content, on request


async def test_writes_contents_only_on_request_and_readable_only_by_owner(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "content"
    async with start_gateway(keeper=RequestRecorder(path, content=folder)) as setup:
        setup.engine.answer(make_stream(make_delta("blue"), USAGE, DONE))
        await post(setup, make_chat_body(stream=True))
        await post(setup, make_chat_body(user="x"))
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600 and folder.stat().st_mode & 0o777 == 0o700
    first, second = (json.loads(line) for line in file.read_text().splitlines())
    assert json.loads(first["asked"])["stream"] is True and "blue" in first["answered"]
    assert "include_usage" not in first["asked"] and "usage" not in first["answered"]
    assert json.loads(second["answered"])["usage"]["prompt_tokens"] == 7


async def test_observer_gets_each_request_with_content_and_its_errors_are_isolated() -> None:
    seen: list[tuple[ServedRequest, RequestContent]] = []
    async with start_gateway() as setup:
        setup.gateway.seen = lambda row, words: seen.append((row, words))
        setup.engine.answer(make_stream(make_delta("blue"), USAGE, DONE))
        await post(setup, make_chat_body(stream=True))
        await post(setup, make_chat_body(user="x", prompt="x"), "/v1/completions")
        (first, words), (second, other) = seen
        assert (first.outcome, first.completion_tokens, words.answered) == ("ok", 3, make_delta("blue") + DONE)
        assert json.loads(words.asked) == make_chat_body(stream=True) and words.target == CHAT.encode()
        assert second.api == "completions" and json.loads(other.answered) == ANSWER

        def fail(row: ServedRequest, words: RequestContent) -> None:
            raise KeyError("a mistake")

        setup.gateway.seen = fail
        await post(setup, make_chat_body())
        assert setup.count_outcome("ok") == 2
        assert PROBLEMS == ["the observer of requests failed: KeyError('a mistake')"]
        PROBLEMS.clear()


# prefixes


def test_prompts_with_equal_beginnings_share_hashes() -> None:
    salt = b"s" * 32
    shared = bytes(range(256)) * 8
    one, other = hash_prefixes(shared + b"one" * 300, salt), hash_prefixes(shared + b"two" * 300, salt)
    blocks = len(shared) // PREFIX_BLOCK_BYTES
    assert one[:blocks] == other[:blocks] and not set(one[blocks:]) & set(other[blocks:])
    assert hash_prefixes(shared, b"t" * 32)[0] != one[0]
    assert hash_prefixes(b"", salt) == ()
    assert len(hash_prefixes(b"x" * 10_000_000, salt)) == MAX_BLOCKS


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"messages": [{"role": "user", "content": "a"}]}, {"messages": [{"role": "user", "content": "b"}]}, False),
        (
            {"messages": [{"role": "user", "content": "a"}]},
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x"}]},
            True,
        ),
        ({"prompt": "a" * 3000}, {"prompt": "a" * 4000}, True),
        ({"input": "a"}, {"input": "b"}, False),
        ({"messages": 5}, {"messages": 6}, False),
    ],
)
def test_conversations_are_identified_by_their_beginning(one: object, other: object, same: bool) -> None:
    numbers = [hash_conversation(read_request_fields(json.dumps(body).encode()), b"s") for body in (one, other)]
    assert None not in numbers
    assert (numbers[0] == numbers[1]) == same


def test_request_without_prompt_has_no_conversation() -> None:
    assert hash_conversation(read_request_fields(b"{}"), b"s") is None
