"""`bedplate keys` and `bedplate usage`: create, change and revoke keys, and show usage."""

from __future__ import annotations

import csv
import io
import json
import time
from pathlib import Path

import pytest
from tests.commands import invoke

from bedplate import store
from bedplate.run.gateway.tenants import Tenants
from bedplate.values import from_json
from bedplate.values.tenant import digest_key
from bedplate.values.traffic import ServedRequest, UsageReport


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path / "home"))


def test_an_empty_list_creates_no_store() -> None:
    assert "no keys" in invoke("keys").out
    assert json.loads(invoke("keys", "list", "--json").out) == {"schema": "tenants/1", "tenants": []}
    assert not store.get_store_path().exists()


def test_a_key_is_printed_once_and_only_its_hash_is_stored() -> None:
    added = invoke("keys", "add", "alice", "--weight", "2", "--requests-per-minute", "60", "--expires", "30d")
    key = added.out.strip()
    assert added.code == 0 and key.startswith("bp-") and len(key) > 40
    (tenant,) = store.read_tenants()
    assert (tenant.name, tenant.weight, tenant.requests_per_minute) == ("alice", 2.0, 60)
    assert tenant.keys[0].expires_at is not None
    ((_, digests),) = store.read_tenants_and_digests()
    assert digests == (digest_key(key.encode(), store.get_salt()),)
    for page in (invoke("keys").out, invoke("keys", "--json").out, added.err):
        assert key not in page and key[3:] not in page
    assert "alice" in invoke("keys").out and "until" in invoke("keys").out


def test_each_key_of_a_tenant_can_be_revoked() -> None:
    first, second = (invoke("keys", "add", "alice", "--json").out for _ in range(2))
    ids = [json.loads(one)["tenant"]["keys"][-1]["id"] for one in (first, second)]
    assert json.loads(first)["key"] != json.loads(second)["key"]
    assert invoke("keys", "revoke", ids[0]).out.strip() == f"revoked: {ids[0]}"
    assert [key.id for key in store.read_tenants()[0].keys] == [ids[1]]
    assert invoke("keys", "revoke", "alice").code == 0
    assert store.read_tenants() == ()


def test_limits_can_be_changed_and_removed() -> None:
    invoke("keys", "add", "alice", "--in-flight", "4", "--tokens-per-minute", "100,000")
    assert store.read_tenants()[0].tokens_per_minute == 100_000
    page = invoke("keys", "set", "alice", "--in-flight", "none", "--weight", "0.5").out
    assert "100,000" in page
    (tenant,) = store.read_tenants()
    assert (tenant.in_flight, tenant.weight, tenant.tokens_per_minute) == (None, 0.5, 100_000)
    assert len(tenant.keys) == 1


def test_admin_rights_can_be_granted_and_removed() -> None:
    assert invoke("keys", "add", "ops", "--admin").code == 0
    assert store.read_tenants()[0].admin and "ops (admin)" in invoke("keys").out
    invoke("keys", "set", "ops", "--weight", "2")
    assert store.read_tenants()[0].admin, "what is not named stays"
    invoke("keys", "set", "ops", "--no-admin")
    assert not store.read_tenants()[0].admin and "(admin)" not in invoke("keys").out


def test_the_default_tenant_can_be_limited_without_a_key() -> None:
    assert invoke("keys", "set", "default", "--in-flight", "2").code == 0
    tenants = Tenants("sk-own")
    tenants.replace(store.read_tenants(), ())
    assert tenants.default.max_in_flight == 2


def test_endpoints_stay_closed_until_they_are_opened() -> None:
    assert "none has existed" in invoke("keys", "open").out
    invoke("keys", "add", "alice")
    refused = invoke("keys", "open")
    assert refused.code == 2 and "alice has keys" in refused.err and "bedplate keys revoke alice" in refused.err
    revoked = invoke("keys", "revoke", "alice")
    assert revoked.code == 0 and "bedplate keys open" in revoked.err
    assert "bedplate keys open" in invoke("keys").err
    assert json.loads(invoke("keys", "--json").out) == {"schema": "tenants/1", "tenants": []}
    opened = invoke("keys", "open")
    assert opened.code == 0 and "require no key" in opened.out
    assert "bedplate keys open" not in invoke("keys").err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("add", "../x"), "not a valid tenant name"),
        (("add", ""), "not a valid tenant name"),
        (("add", "a", "--weight", "0"), "weight"),
        (("add", "a", "--weight", "nan"), "weight"),
        (("add", "a", "--in-flight", "0"), "in_flight"),
        (("add", "a", "--in-flight", "many"), "--in-flight must be a number or none"),
        (("add", "a", "--expires", "soon"), "--expires"),
        (("add", "a", "--expires", "0s"), "--expires must be longer than 0"),
        (("add", "a", "--expires", "99999999999d"), "--expires is too long"),
        (("set", "nobody", "--weight", "1"), "no tenant"),
        (("set", "default"), "no change given"),
        (("revoke", "nobody"), "no tenant"),
    ],
)
def test_a_usage_error_changes_nothing(words: tuple[str, ...], said: str) -> None:
    answer = invoke("keys", *words)
    assert answer.code == 2 and said in answer.err
    assert store.read_tenants() == ()


# usage


def make_request(**more: object) -> ServedRequest:
    fields = {
        "at_s": time.time() - 60, "tenant": "alice", "model": "small", "engine": "llama.cpp", "api": "chat",
        "outcome": "ok", "status": 200, "body_bytes": 100, "duration_ms": 5.0, "prompt_tokens": 1000,
        "cached_tokens": 300, "completion_tokens": 200,
    }  # fmt: skip
    return ServedRequest(**{**fields, **more})  # type: ignore[arg-type]


def test_usage_without_requests() -> None:
    assert "no requests since" in invoke("usage").out
    assert "no requests" in invoke("usage", "--since", "all").out


def test_usage_is_grouped_and_filtered() -> None:
    store.add_requests(
        [
            make_request(),
            make_request(tenant="bob", model="large", outcome="failed", prompt_tokens=None, completion_tokens=None),
            make_request(tenant="bob", outcome="turned_away", engine=None, prompt_tokens=None, completion_tokens=None),
            make_request(at_s=time.time() - 100_000),
        ]
    )
    report = from_json(UsageReport, invoke("usage", "--json").out)
    assert [(row.key, row.requests, row.failed, row.turned_away) for row in report.rows] == [
        ("alice", 1, 0, 0), ("bob", 1, 1, 1),
    ]  # fmt: skip
    assert (report.total.requests, report.total.prompt_tokens) == (2, 1000)
    assert from_json(UsageReport, invoke("usage", "--since", "7d", "--json").out).total.requests == 3
    assert {row.key for row in from_json(UsageReport, invoke("usage", "--by", "model", "--json").out).rows} == {
        "small", "large",
    }  # fmt: skip
    page = invoke("usage").out
    assert "alice" in page and "1,000" in page and "all" in page
    (row,) = csv.DictReader(io.StringIO(invoke("usage", "--tenant", "alice", "--by", "engine", "--csv").out))
    assert (row["engine"], row["requests"], row["cached_tokens"]) == ("llama.cpp", "1", "300")


def test_usage_shows_why_requests_were_not_answered() -> None:
    refused = {"outcome": "refused", "status": 400, "prompt_tokens": None, "completion_tokens": None}
    store.add_requests(
        [
            make_request(),
            *(make_request(**refused, reason="unsupported_tools") for _ in range(3)),
            make_request(tenant="bob", **refused, model="", engine=None, reason="model_not_found"),
        ]
    )
    report = from_json(UsageReport, invoke("usage", "--json").out)
    assert [(row.key, row.reasons) for row in report.rows] == [
        ("alice", {"unsupported_tools": 3}), ("bob", {"model_not_found": 1}),
    ]  # fmt: skip
    assert report.total.reasons == {"unsupported_tools": 3, "model_not_found": 1}
    page = invoke("usage").out
    assert "unsupported_tools" in page and "not answered because of" in page
    rows = list(csv.DictReader(io.StringIO(invoke("usage", "--csv").out)))
    assert [row["reasons"] for row in rows] == ["unsupported_tools=3", "model_not_found=1"]


@pytest.mark.parametrize("words", [("--since", "yesterday"), ("--csv", "--json"), ("--by", "moon")])
def test_invalid_usage_options_are_usage_errors(words: tuple[str, ...]) -> None:
    assert invoke("usage", *words).code == 2
