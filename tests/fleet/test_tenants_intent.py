"""`bedplate serve -f bedplate.yaml` with tenants in the file and a real engine: keys, limits, usage and metrics."""

from __future__ import annotations

import json
import re
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.commands import run
from tests.conftest import HANG_S, wait_for
from tests.fleet.beside import make_home
from tests.fleet.serving import Serving, serving

pytestmark = pytest.mark.timeout(300)
INTENT = """\
model: builtin
workload: {concurrency: 2, context_tokens: 512}
tenants:
  - {name: research, share: 0.6, tokens_per_minute: 1000000}
  - {name: sales, share: 0.4, requests_per_minute: 4, in_flight: 1}
"""


class Heard(NamedTuple):
    status: int
    headers: dict[str, str]
    """By their names in small letters."""
    body: dict[str, Any]


@pytest.fixture
def home(tmp_path: Path, bedplate_home: Path, builtin_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = make_home(tmp_path / "home", bedplate_home, "llama.cpp")
    monkeypatch.setenv("BEDPLATE_HOME", str(found))
    return found


def key_of(name: str, *more: str) -> str:
    added = run("keys", "add", name, *more)
    assert added.code == 0, added.err
    return added.out.strip()


def opened(url: str, key: str | None, body: dict[str, Any] | None = None) -> Any:
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    return urllib.request.urlopen(
        urllib.request.Request(url, json.dumps(body).encode() if body is not None else None, headers), timeout=HANG_S
    )


def ask(one: Serving, key: str | None, tokens: int = 4) -> Heard:
    body = {"messages": [{"role": "user", "content": "Name a river."}], "max_tokens": tokens, "ignore_eos": True}
    try:
        with opened(f"{one.endpoint['url']}/chat/completions", key, body) as answer:
            return Heard(answer.status, {k.lower(): v for k, v in answer.headers.items()}, json.load(answer))
    except urllib.error.HTTPError as error:
        return Heard(error.code, {k.lower(): v for k, v in error.headers.items()}, json.load(error))


def metrics(one: Serving, key: str) -> str:
    with opened(f"{one.root}/metrics", key) as answer:
        return str(answer.read().decode())


def sum_metric(page: str, name: str, **labels: str) -> float:
    rows = re.findall(rf"^{name}\{{(.*)\}} (\S+)$", page, re.MULTILINE)
    return sum(float(value) for row, value in rows if all(f'{k}="{v}"' in row for k, v in labels.items()))


class Busy:
    """One long stream of a tenant, of which the first bytes are there when this returns."""

    def __init__(self, one: Serving, key: str) -> None:
        body = {"messages": [{"role": "user", "content": "Count."}], "max_tokens": 300, "ignore_eos": True,
                "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip
        self._answer = opened(f"{one.endpoint['url']}/chat/completions", key, body)
        self._answer.readline()
        self.rest = b""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        self.rest = self._answer.read()

    def used(self) -> dict[str, int]:
        self._thread.join(HANG_S)
        events = [line[6:] for line in self.rest.split(b"\n") if line.startswith(b"data: {")]
        return next(usage for event in reversed(events) if (usage := json.loads(event).get("usage")))


def test_tenants_of_an_intent_have_keys_limits_and_usage(home: Path, tmp_path: Path) -> None:
    (tmp_path / "bedplate.yaml").write_text(INTENT)
    research, admin = key_of("research"), key_of("prometheus", "--admin")
    with serving("-f", str(tmp_path / "bedplate.yaml"), "--engine", "llama.cpp") as one:
        one.wait_ready()
        wait_for(lambda: "sales has no key yet" in "".join(one.printed), "it to say who has no key")
        assert ask(one, None).status == 401 and ask(one, "bp-wrong").status == 401
        sales = key_of("sales")
        wait_for(lambda: ask(one, sales, 1).status != 401, "a key that was made meanwhile to open")

        first = ask(one, research)
        assert first.status == 200 and first.headers["x-ratelimit-limit-tokens"] == "1000000"

        busy = Busy(one, sales)
        second = ask(one, sales)
        assert (second.status, second.body["error"]["code"]) == (429, "too_many_in_flight")
        assert int(second.headers["retry-after"]) >= 1
        assert ask(one, research).status == 200, "nobody else is held up by that"
        used = busy.used()
        assert used["completion_tokens"] == 300

        answers = [ask(one, sales)]
        while answers[-1].status == 200 and len(answers) < 20:
            answers.append(ask(one, sales))
        over = answers[-1]
        assert (over.status, over.body["error"]["code"]) == (429, "requests_per_minute"), over
        assert 1 <= int(over.headers["retry-after"]) <= 15 and over.headers["x-ratelimit-limit-requests"] == "4"
        assert ask(one, research).status == 200

        own, all_of_them = metrics(one, sales), metrics(one, admin)
        assert 'tenant="research"' not in own and sum_metric(own, "bedplate_tenant_tokens_total", tenant="sales") > 300
        for tenant in ("research", "sales"):
            assert sum_metric(all_of_them, "bedplate_tenant_requests_total", tenant=tenant, outcome="ok") >= 2
        one.stop()

    rows = {row["key"]: row for row in json.loads(run("usage", "--json").out)["rows"]}
    good = [answer for answer in answers if answer.status == 200]
    turned_away = 1 + len(answers) - len(good)
    assert rows["research"]["requests"] == 3 and rows["research"]["turned_away"] == 0
    assert rows["research"]["completion_tokens"] == 3 * 4
    assert rows["sales"]["turned_away"] == turned_away and rows["sales"]["requests"] == 2 + len(good)
    assert rows["sales"]["completion_tokens"] == 1 + 300 + 4 * len(good)
    log = "".join(path.read_text(errors="replace") for path in (home / "logs").glob("*.log"))
    assert not any(secret in log for secret in (research, sales, admin, "Name a river")), "neither keys nor prompts"
