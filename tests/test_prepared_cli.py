"""`bedplate prepared`: the list, its JSON, and removal."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path

import pytest
from tests.commands import invoke
from tests.run.test_kept import put

from bedplate.run.prepare import get_prepared_dir, hold
from bedplate.show.prepared import describe_age


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path / "home"))


def test_an_empty_list_is_reported() -> None:
    assert "no prepared weights" in invoke("prepared").out
    assert json.loads(invoke("prepared", "--json").out) == {"schema": "prepared/1", "prepared": []}


def test_the_list_shows_size_engine_last_use_and_stale_entries() -> None:
    put("a" * 20)
    page = invoke("prepared").out
    assert "aaaaaaaa" in page and "to 4 bits" in page and "maker" in page and "stale" in page and "days ago" in page
    assert "bedplate prepared remove --stale frees" in page
    (one,) = json.loads(invoke("prepared", "--json").out)["prepared"]
    assert one["id"] == "a" * 20 and one["stale"] == "this version of bedplate has no engine maker"


def test_remove_prints_the_freed_bytes() -> None:
    put("a" * 20, data=b"x" * 5_000_000)
    put("b" * 20)
    answer = invoke("prepared", "remove", "aaaa")
    assert answer.code == 0 and answer.out.startswith("removed 1: 5")
    assert [path.name for path in get_prepared_dir().iterdir() if path.is_dir()] == ["b" * 20]
    assert invoke("prepared", "remove", "--stale").code == 0
    assert not [path for path in get_prepared_dir().iterdir() if path.is_dir()]


def test_weights_in_use_are_kept_and_remove_exits_with_1() -> None:
    hold(put("a" * 20))
    answer = invoke("prepared", "remove", "aaaa")
    assert (
        answer.code == 1
        and "since a running bedplate uses them" in answer.err
        and (get_prepared_dir() / ("a" * 20)).is_dir()
    )


@pytest.mark.parametrize("words", [(), ("zzz",)])
def test_remove_without_a_valid_id_is_a_usage_error(words: tuple[str, ...]) -> None:
    answer = invoke("prepared", "remove", *words)
    assert answer.code == 2 and "bedplate prepared" in answer.err


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(5, "just now"), (600, "10 min ago"), (3 * 3600, "3 h ago"), (3 * 86400, "3 days ago")],
)
def test_ages_are_formatted(seconds: int, words: str) -> None:
    now = dt.datetime(2026, 11, 15, 12, tzinfo=dt.UTC)
    assert describe_age((now - dt.timedelta(seconds=seconds)).isoformat(), now) == words
    assert describe_age(None, now) == "never"
