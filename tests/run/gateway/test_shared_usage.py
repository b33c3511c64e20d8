"""Keys, limits and usage in a real PostgreSQL that several gateways share."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from tests.commands import invoke
from tests.conftest import HANG_S
from tests.postgresql import Database, start_database

from bedplate.errors import ExternalFailure, UsageError
from bedplate.hosting.tenants import add_key, open_endpoints, report_usage, revoke
from bedplate.postgres_store import PostgresLimits, PostgresRequestWriter, PostgresUsageStore
from bedplate.run.gateway.recorder import RequestRecorder
from bedplate.unsent_usage import get_unsent_folder
from bedplate.usage_store import LocalUsageStore, UsageStore, open_usage_store, read_tenants
from bedplate.values.tenant import Tenant, TenantKey
from bedplate.values.traffic import Outcome, ServedRequest

from .scripted import ANSWER, CHAT, Answer, Setup, make_answer, make_chat_body, start_gateway, wait_until

pytestmark = pytest.mark.engine
DAY_S = 86_400.0


@pytest.fixture(scope="module")
def server() -> Iterator[Database]:
    with start_database() as database:
        yield database


@pytest.fixture
def database(server: Database, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Database:
    server.clear()
    # What a gateway of another test left belongs to its database.
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path_factory.mktemp("home")))
    monkeypatch.setenv("BEDPLATE_USAGE_STORE", server.url)
    return server


def make_request(number: int, tenant: str = "a", outcome: Outcome = "ok", at_s: float | None = None) -> ServedRequest:
    return ServedRequest(
        at_s=DAY_S * (number % 3) + number if at_s is None else at_s, tenant=tenant, model=f"m{number % 2}", engine="e",
        api="chat", outcome=outcome, status=200, body_bytes=number, prompt_tokens=number, completion_tokens=2 * number,
        duration_ms=1.0, reason="overloaded" if outcome == "failed" else None,
    )  # fmt: skip


async def ask(setup: Setup, key: str) -> Answer:
    client = await setup.connect()
    return await client.post(CHAT, make_chat_body(), authorization=f"Bearer {key}")


def count_in_flight(database: Database) -> object:
    return database.execute("SELECT sum(sequences)::bigint FROM bedplate_in_flight")[0][0]


# the store


def list_stores(database: Database, tmp_path: Path) -> tuple[UsageStore, UsageStore]:
    return LocalUsageStore(tmp_path / "store.sqlite"), PostgresUsageStore(database.url)


def test_both_stores_give_the_same_answers(database: Database, tmp_path: Path) -> None:
    seen = []
    for usage in list_stores(database, tmp_path):
        assert usage.read_tenants_and_digests() == () and not usage.have_keys_existed()
        assert usage.get_salt() == usage.get_salt()
        usage.put_tenant(Tenant(name="b", weight=2.0))
        usage.put_tenant(Tenant(name="a"))
        usage.put_tenant(Tenant(name="a", in_flight=3))
        for number in (1, 2):
            usage.add_key("a", TenantKey(id=f"k{number}", created_at=""), b"digest %d" % number)
        before = usage.read_tenants_and_digests()
        usage.remove_key("k1")
        usage.remove_tenant("b")
        after, existed = usage.read_tenants_and_digests(), usage.have_keys_existed()
        usage.forget_keys()
        writer = usage.make_writer()
        writer.add([make_request(n, "ab"[n % 2], ("ok", "failed", "turned_away")[n % 3]) for n in range(60)])
        writer.close()
        figures = []
        for kept in (10**6, 7, 0):
            removed = usage.fold_requests(2 * DAY_S, kept)
            every = [
                usage.read_usage(by, tenant=name) for by in ("tenant", "model", "engine", "day") for name in (None, "a")
            ]
            figures.append((removed, every, usage.read_usage("day", DAY_S)))
        rows = [one.body_bytes for one in usage.read_requests(model="m1")]
        seen.append((before, after, existed, usage.have_keys_existed(), figures, rows))
    assert seen[0] == seen[1]
    assert seen[1][4][0][1] == seen[1][4][2][1], "sums are the same after requests became daily sums"


def test_a_request_whose_commit_is_unknown_is_not_counted_twice(database: Database) -> None:
    """The connection is lost after the commit, before the answer: the same requests are written again."""
    writer = PostgresRequestWriter(database.url)
    batch = [make_request(number) for number in range(10)]
    writer.add(batch[:4])
    real = PostgresRequestWriter._use

    class Lost(Exception):
        pass

    @contextlib.contextmanager
    def commit_and_lose(self: PostgresRequestWriter) -> Iterator[psycopg.Connection[object]]:
        with real(self) as connection:
            yield connection
        self.close()
        raise ExternalFailure("the connection was lost") from Lost()

    PostgresRequestWriter._use = commit_and_lose  # type: ignore[method-assign]
    try:
        with pytest.raises(ExternalFailure):
            writer.add(batch[4:8])
    finally:
        PostgresRequestWriter._use = real  # type: ignore[method-assign]
    assert len(list(PostgresUsageStore(database.url).read_requests())) == 8
    writer.add(batch[4:])
    writer.add([make_request(20)])
    found = sorted(one.body_bytes for one in PostgresUsageStore(database.url).read_requests())
    assert found == [*range(10), 20]
    writer.close()


def list_numbers(database: Database) -> list[int]:
    return sorted(one.body_bytes for one in PostgresUsageStore(database.url).read_requests())


class TestUnsentUsage:
    """What a killed gateway had recorded. A lock that is released and a file that stays are what a kill leaves."""

    @staticmethod
    def keep(writer: PostgresRequestWriter, *numbers: int) -> list[ServedRequest]:
        made = [make_request(number) for number in numbers]
        for one in made:
            writer.keep(one)
        return made

    def test_the_next_gateway_stores_it_once(self, database: Database, tmp_path: Path) -> None:
        killed, alive, after = (PostgresRequestWriter(database.url, tmp_path) for _ in range(3))
        first = self.keep(killed, 1, 2)
        killed.prepare()
        killed.seal()
        self.keep(killed, 3)
        self.keep(alive, 9)
        with contextlib.closing(PostgresRequestWriter(database.url)) as rows:
            rows._gateway, rows._numbers = killed._gateway, {id(first[0]): (first[0], 1)}
            rows.add(first[:1])  # committed just before the kill
        killed.close()
        with next(iter(tmp_path.glob(f"{killed._gateway}-*"))).open("ab") as file:
            file.write(b'["cut off')
        assert after.recover() == 3 and list_numbers(database) == [1, 2, 3]
        assert after.recover() == 0
        assert [path.name.partition("-")[0] for path in tmp_path.iterdir()] == [alive._gateway]
        alive.close()
        assert after.recover() == 1 and list_numbers(database) == [1, 2, 3, 9]
        after.close()

    def test_each_database_has_its_own(self) -> None:
        folders = [
            get_unsent_folder(f"postgresql://{one}")
            for one in ("a:secret@db/x?sslmode=require", "b@db/x", "db/y", "db:5433/x")
        ]
        assert folders[0] == folders[1] and len(set(folders)) == 3

    def test_nothing_is_left_of_what_was_stored(self, database: Database, tmp_path: Path) -> None:
        writer = PostgresRequestWriter(database.url, tmp_path)
        for batch in ((1, 2), (3,), (4, 5)):
            made = self.keep(writer, *batch)
            writer.prepare()
            writer.seal()
            writer.add(made)
        writer.close()
        assert list_numbers(database) == [1, 2, 3, 4, 5] and not list(tmp_path.iterdir())

    def test_a_database_that_is_down_opens_no_further_files(self, database: Database, tmp_path: Path) -> None:
        down = PostgresRequestWriter("postgresql://127.0.0.1:9/none", tmp_path)
        made: list[ServedRequest] = []
        for number in range(10):
            made += self.keep(down, number)
            down.prepare()
            down.seal()
            with pytest.raises(ExternalFailure):
                down.add(made)
        assert len(list(tmp_path.iterdir())) <= 3
        down.close()
        with contextlib.closing(PostgresRequestWriter(database.url, tmp_path)) as after:
            assert after.recover() == 10
        assert list_numbers(database) == list(range(10))

    def test_a_full_disk_stops_no_request(
        self, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: object) -> int:
            raise OSError(28, "No space left on device")

        writer = PostgresRequestWriter(database.url, tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr("bedplate.unsent_usage.os.write", refuse)
            made = self.keep(writer, 1)
        writer.prepare()
        writer.seal()
        writer.add([*made, *self.keep(writer, 2)])
        writer.close()
        assert list_numbers(database) == [1, 2]


def test_an_older_bedplate_refuses_a_newer_store(database: Database) -> None:
    PostgresUsageStore(database.url).get_salt()
    database.execute("UPDATE bedplate_install SET value = '99' WHERE name = 'version'")
    with pytest.raises(ExternalFailure, match="newer bedplate"):
        PostgresUsageStore(database.url).get_salt()


def test_verbs_use_the_shared_store_and_never_show_its_password(
    database: Database, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path))
    invoke("keys", "add", "alice", "--in-flight", "2")
    assert "alice" in invoke("keys", "list").out
    writer = PostgresRequestWriter(database.url)
    writer.add([make_request(5, "alice", at_s=time.time())])
    writer.close()
    assert "alice" in invoke("usage").out
    assert not (tmp_path / "store.sqlite").exists()
    assert revoke("alice") and not open_usage_store().read_tenants_and_digests()
    assert open_endpoints()
    monkeypatch.setenv("BEDPLATE_USAGE_STORE", "postgresql://bedplate:hunter2@127.0.0.1:1/none")
    shown = invoke("keys", "list")
    assert shown.code == 3 and "usage store" in shown.err and "hunter2" not in shown.err + shown.out
    monkeypatch.setenv("BEDPLATE_USAGE_STORE", "mysql://u:hunter2@db/x")
    shown = invoke("usage")
    assert shown.code == 2 and "PostgreSQL" in shown.err and "hunter2" not in shown.err


def test_without_the_driver_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from bedplate.postgres_store import load_driver

    load_driver.cache_clear()
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(UsageError) as caught:
        PostgresUsageStore("postgresql://db/x").get_salt()
    assert "bedplate[postgresql]" in (caught.value.hint or "")
    load_driver.cache_clear()


# two gateways


async def test_keys_are_valid_at_all_gateways_until_they_are_revoked(database: Database) -> None:
    _, key = add_key("alice", {})
    async with start_gateway(keeper=RequestRecorder()) as one, start_gateway(keeper=RequestRecorder()) as other:
        assert [(await ask(setup, key)).status for setup in (one, other)] == [200, 200]
        _, second = add_key("bob", {})
        gateways = (one.gateway, other.gateway)
        await wait_until(lambda: all(g.tenants.find(second.encode()) for g in gateways), "the new key")
        revoke("alice")
        await wait_until(lambda: not any(g.tenants.find(key.encode()) for g in gateways), "the revocation")
        assert [(await ask(setup, key)).status for setup in (one, other)] == [401, 401]
        assert (await ask(other, second)).status == 200
    rows = {row.key: row.requests for row in report_usage("tenant").rows}
    assert rows == {"alice": 2, "bob": 1}
    assert read_tenants(open_usage_store())[0].name == "bob"


async def test_concurrent_requests_are_limited_across_gateways(database: Database) -> None:
    _, key = add_key("alice", {"in_flight": 2})
    async with start_gateway(keeper=RequestRecorder()) as one, start_gateway(keeper=RequestRecorder()) as other:
        gate = asyncio.Event()
        for setup in (one, other):
            setup.engine.otherwise = (gate, make_answer(ANSWER))
        running = [asyncio.create_task(ask(setup, key)) for setup in (one, other)]
        await one.engine.request()
        await other.engine.request()
        for setup in (one, other):
            refused = await ask(setup, key)
            assert refused.status == 429 and refused.json["error"]["code"] == "too_many_in_flight"
        gate.set()
        assert [(await answer).status for answer in running] == [200, 200]
        await wait_until(lambda: count_in_flight(database) == 0, "the release")
        assert (await ask(other, key)).status == 200
    usage = report_usage("tenant").rows[0]
    assert (usage.requests, usage.turned_away, usage.reasons) == (3, 2, {"too_many_in_flight": 2})
    assert database.execute("SELECT count(*) FROM bedplate_gateways") == [(0,)], "a lease ends with its gateway"


async def test_tokens_and_requests_per_minute_are_limited_across_gateways(database: Database) -> None:
    _, key = add_key("alice", {"requests_per_minute": 1, "tokens_per_minute": 100_000})
    async with start_gateway(keeper=RequestRecorder()) as one, start_gateway(keeper=RequestRecorder()) as other:
        answers = [await ask(setup, key) for setup in (one, other, one)]
        assert [answer.status for answer in answers] == [200, 429, 429]
        assert answers[0].headers["x-ratelimit-remaining-requests"] == "0"
        assert 0 < int(answers[0].headers["x-ratelimit-remaining-tokens"]) < 100_000
        assert answers[1].json["error"]["code"] == "requests_per_minute"
        query = "SELECT tokens > 99900 FROM bedplate_limits"
        # 10 tokens for the answer, not the expected cost of about 270.
        await wait_until(lambda: database.execute(query) == [(True,)], "the correction of the charges")


async def test_a_dead_gateway_holds_its_slots_until_its_lease_ends(database: Database) -> None:
    _, key = add_key("alice", {"in_flight": 1})
    dead = PostgresLimits(database.url)
    dead.update(["alice"], lambda levels: None, {"alice": 1})
    async with start_gateway(keeper=RequestRecorder()) as setup:
        assert (await ask(setup, key)).status == 429
        database.execute("UPDATE bedplate_gateways SET seen = seen - interval '1 minute' WHERE id = %s", dead._gateway)
        assert (await ask(setup, key)).status == 200
        query = "SELECT count(*) FROM bedplate_in_flight WHERE gateway = %s"
        await wait_until(lambda: database.execute(query, dead._gateway) == [(0,)], "its row to be removed")
    dead._drop()


async def test_while_the_database_is_down_only_tenants_with_limits_are_rejected(database: Database) -> None:
    _, limited = add_key("alice", {"in_flight": 5})
    _, free = add_key("bob", {})
    notes: list[str] = []
    keeper = RequestRecorder(note=notes.append)
    async with start_gateway(keeper=keeper) as setup:
        assert (await ask(setup, limited)).status == 200
        await asyncio.to_thread(database.stop, signal.SIGQUIT)
        try:
            await wait_until(lambda: any("cannot read changed keys" in note for note in notes), "a note")
            refused = await ask(setup, limited)
            assert refused.status == 503 and refused.json["error"]["code"] == "limits_unavailable"
            assert (await ask(setup, free)).status == 200
            await wait_until(lambda: any("cannot log requests" in note for note in notes), "a note")
        finally:
            await asyncio.to_thread(database.start)
        while (await ask(setup, limited)).status != 200:
            await asyncio.sleep(0)
        await wait_until(lambda: not keeper._pending and keeper.written >= 4, "the requests to be written")
    rows = {row.key: row for row in report_usage("tenant").rows}
    assert rows["bob"].requests == 1 and rows["alice"].requests == 2
    assert all(os.environ["BEDPLATE_USAGE_STORE"] not in note for note in notes)


async def test_a_client_that_leaves_during_the_check_frees_its_slot(database: Database) -> None:
    _, key = add_key("alice", {"in_flight": 1, "tokens_per_minute": 1000})
    async with start_gateway(keeper=RequestRecorder()) as setup:
        assert (await ask(setup, key)).status == 200
        with psycopg.connect(database.url) as other:
            other.execute("SELECT * FROM bedplate_limits FOR UPDATE")
            client = await setup.connect()
            task = asyncio.create_task(client.post(CHAT, make_chat_body(), authorization=f"Bearer {key}"))
            member = setup.gateway.tenants.get_member("alice")
            assert member is not None
            await wait_until(lambda: member.in_flight == 1, "the request")
            task.cancel()
            await client.close()
            await wait_until(lambda: member.in_flight == 0, "the disconnect")
        # The reservation may be applied after the client has left; until its release another request is one too many.
        async with asyncio.timeout(HANG_S):
            while (answer := await ask(setup, key)).status == 429:
                await asyncio.sleep(0.01)
        assert answer.status == 200
        await wait_until(lambda: count_in_flight(database) == 0, "the release")
