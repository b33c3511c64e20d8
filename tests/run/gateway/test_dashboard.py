"""The Grafana dashboard asks only for series that the gateway has, and counters never fall."""

from __future__ import annotations

import json
import re
from pathlib import Path

from bedplate.run.gateway import GatewayBackend
from bedplate.run.gateway.routes import BackendLink, Route
from bedplate.run.gateway.watch import GatewayMetrics

DASHBOARD = Path(__file__).parents[3] / "examples" / "grafana" / "bedplate.json"
_SERIES = re.compile(r"bedplate_\w+")


def list_series(metrics: GatewayMetrics) -> dict[str, str]:
    """The type of each series in the text that Prometheus reads."""
    text = metrics.render_all([]).decode()
    return dict(line.split()[2:4] for line in text.splitlines() if line.startswith("# TYPE"))


def test_every_query_names_a_series_of_the_gateway() -> None:
    known = list_series(GatewayMetrics())
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(queries) > 10
    for query in queries:
        for name in _SERIES.findall(query):
            base = name.removesuffix("_bucket")
            assert base in known, f"{name} is not a series of the gateway"
            if "rate(" in query or "increase(" in query:
                assert known[base] in ("counter", "histogram"), f"{name} is a {known[base]}"


async def test_restarts_of_an_engine_that_is_gone_still_count() -> None:
    metrics = GatewayMetrics()
    route = Route("small", metrics)
    backend = GatewayBackend("small", "llama.cpp")
    link = BackendLink(backend, metrics)
    route.add(link)
    backend.restarts = 2

    def read() -> float | None:
        metrics.render_all([route])
        labels = {"model": "small", "engine": "llama.cpp"}
        return metrics.registry.get_sample_value("bedplate_engine_restarted_total", labels)

    assert read() == 2 and read() == 2
    route.drop(link)
    assert read() == 2
    other = GatewayBackend("small", "llama.cpp")
    route.add(BackendLink(other, metrics))
    other.restarts = 1
    assert read() == 3
