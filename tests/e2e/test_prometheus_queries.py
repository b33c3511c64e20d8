"""Every query of the dashboard and of the alerts, in a real Prometheus that scrapes a real gateway and engine."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.conftest import HANG_S, Served, post_json, wait_for
from tests.deploy.intents import WRITTEN, emit_files, make_platform
from tests.deploy.walk import read_manifests
from tests.private_ports import find_private_port

from bedplate.deploy.emit import emit_target
from bedplate.deploy.kubernetes import Files
from bedplate.engines import get_engine
from bedplate.run.supervisor import find_free_port

EXAMPLES = Path(__file__).parents[2] / "examples"
RULES = EXAMPLES / "prometheus" / "bedplate-rules.yaml"
DASHBOARD = EXAMPLES / "grafana" / "bedplate.json"
OTHER_ENGINES = ("vllm:", "sglang:")
NAMESPACE, SERVICE = "serving", "chat"
EMPTY = ("limits_unavailable",)
"""Queries of what does not happen here: they must be valid, and need not have a result."""


def list_dashboard_queries() -> list[str]:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    found = [target["expr"] for panel in panels for target in panel["targets"]]
    return [one.replace("$model", ".*").replace("$__rate_interval", "5m") for one in found]


def list_rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def list_scaling_queries(files: Files) -> dict[str, str]:
    """The queries of KEDA's triggers by service and name; the HPA that KEDA creates uses the same."""
    objects = [tree for tree in read_manifests(files) if tree["kind"] == "ScaledObject"]
    return {
        f"{one['metadata']['name']} {trigger.get('name')}": trigger["metadata"]["query"]
        for one in objects
        for trigger in one["spec"]["triggers"]
        if trigger["type"] == "prometheus"
    }


class Prometheus:
    def __init__(self, port: int, ask: Callable[[], None]) -> None:
        """`ask` sends requests to the gateway that is scraped."""
        self.root = f"http://127.0.0.1:{port}/api/v1"
        self.ask = ask

    def read(self, path: str, **query: str) -> Any:
        with urllib.request.urlopen(f"{self.root}/{path}?{urllib.parse.urlencode(query)}", timeout=HANG_S) as answer:
            body = json.load(answer)
        assert body["status"] == "success", body
        return body["data"]

    def query(self, text: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.read("query", query=text)["result"]
        return found

    def is_ready(self) -> bool:
        try:
            self.read("status/buildinfo")
        except OSError:
            return False
        return True


@pytest.fixture
def scraped(served: Served, serve: Callable[..., Served], own_home: Path, tmp_path: Path) -> Iterator[Prometheus]:
    """Prometheus, a gateway with one model that answers and one that does not, and the engine behind it."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("Prometheus is not installed here (Debian: apt-get install prometheus)")
    services = [{"url": served.url, "model": served.endpoint["model"]}, {"url": "http://127.0.0.1:9/v1", "model": "b"}]
    intent = tmp_path / "gateway.yaml"
    intent.write_text(json.dumps({"services": services}))
    gateway = serve("--file", str(intent))
    engine = find_private_port([served.find_engine()], get_engine("llama.cpp"))
    # The labels are those that the emitted PodMonitors add.
    jobs: list[dict[str, Any]] = [
        {"job_name": name, "static_configs": [{"targets": [one.root.removeprefix("http://")], "labels": labels}]}
        for name, one, labels in (("gateway", gateway, {"namespace": NAMESPACE}), ("endpoint", served, {}))
    ]
    jobs.append(
        {
            "job_name": "engine",
            "authorization": {"credentials": engine.key},
            "static_configs": [
                {
                    "targets": [f"127.0.0.1:{engine.port}"],
                    "labels": {"namespace": NAMESPACE, "app_kubernetes_io_instance": SERVICE},
                }
            ],
        }
    )
    timing = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config = tmp_path / "prometheus.yml"
    config.write_text(json.dumps({"global": timing, "rule_files": [str(RULES)], "scrape_configs": jobs}))
    port = find_free_port()
    words = [
        program, f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]  # fmt: skip
    with (tmp_path / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log)
    try:
        found = Prometheus(port, lambda: ask(gateway, served.endpoint["model"]))
        wait_for(found.is_ready, "Prometheus to answer")
        wait_for(lambda: len(found.query("up == 1")) == 3, "Prometheus to scrape all targets")
        found.ask()
        yield found
    finally:
        process.terminate()
        process.wait()


def ask(gateway: Served, model: str) -> None:
    """An answer, a stream, and requests that are refused."""
    body = {"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}
    for stream in (False, True):
        request = urllib.request.Request(
            f"{gateway.url}/chat/completions", json.dumps({**body, "stream": stream}).encode(),
            {"content-type": "application/json"},
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=HANG_S) as answer:
            answer.read()
    assert post_json(f"{gateway.url}/chat/completions", {**body, "model": "b"})[0] == 503


def test_every_query_has_a_result(scraped: Prometheus) -> None:
    for text in list_dashboard_queries():
        wait_for(lambda text=text: scraped.query(text), text)  # type: ignore[misc]
    for rule in list_rules():
        text = rule["expr"]
        scraped.query(text)  # valid, whatever its result
        # No request fails here: the same share of those that were answered.
        measured = (text.rpartition(" > ")[0] or text).replace('outcome="failed"', 'outcome="ok"')
        if text.startswith("absent(") or any(one in text for one in (*OTHER_ENGINES, *EMPTY)):
            continue
        if "not_recorded" in text or "==" in text:
            continue
        wait_for(lambda measured=measured: scraped.query(measured), measured)  # type: ignore[misc]
    assert scraped.query("llamacpp:requests_deferred"), "the engine's own series are scraped too"


def test_every_scaling_query_has_one_result(scraped: Prometheus) -> None:
    """KEDA accepts a query only if it has exactly one result. Queries of engines that do not run here must be valid."""
    described = {
        "pools": [{"name": "cpus", "cpu": "Intel Xeon Gold 6430", "cores": 32, "count": 4, "ram_gb": 128}],
        "services": [{"name": SERVICE, "model": "builtin", "engine": "llama.cpp", "ttl": "30m"}],
        "deploy": {"endpoint": True, "namespace": NAMESPACE},
    }
    own = list_scaling_queries(emit_target(make_platform(described), "kubernetes"))
    assert {name.partition(" ")[2] for name in own} == {"gateway", "recent", "requests"}
    for name, text in own.items():
        found = wait_for(lambda text=text: scraped.query(text), f"{name}: {text}")  # type: ignore[misc]
        assert len(found) == 1, (text, found)

    def is_recent() -> bool:
        scraped.ask()  # a series that begins with its first request has no increase before the next one
        return bool(scraped.query(own[f"{SERVICE} recent"])[0]["value"][1] == "1")

    wait_for(is_recent, "requests that have ended to be counted")
    others = {
        text for one in WRITTEN if one[1] != "compose" for text in list_scaling_queries(emit_files(*one)).values()
    }
    assert any("vllm:" in text for text in others) and any("dynamo_" in text for text in others)
    for text in others:
        scraped.query(text)  # valid; these services do not run here


def test_rules_are_evaluated_without_an_error_and_find_the_model_that_is_down(scraped: Prometheus) -> None:
    def list_states() -> list[dict[str, Any]]:
        groups = scraped.read("rules")["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        return rules if all(rule["health"] != "unknown" for rule in rules) else []

    states = wait_for(list_states, "the rules to be evaluated")
    assert {rule["name"]: rule["health"] for rule in states if rule["health"] != "ok"} == {}
    assert len(states) == len(list_rules())

    def is_found() -> bool:
        alerts = {(one["labels"]["alertname"], one["labels"].get("model")) for one in scraped.read("alerts")["alerts"]}
        # Rules that are evaluated before the first scrape find that nothing is there.
        return ("BedplateModelDown", "b") in alerts and "BedplateAbsent" not in {name for name, _ in alerts}

    wait_for(is_found, "the alert of the model that is down, without that of an absent endpoint")
