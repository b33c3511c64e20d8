"""Traces of two real bedplates, one behind the other: in a collector, and in MLflow's server, which stores them."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.conftest import Served, start_serve, wait_for
from uv import find_uv_bin

from bedplate.measure.load.null_server import MODEL, serve_null
from bedplate.run.supervisor import find_free_port

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "the prompt is secret"
TOKENS = 3
MLFLOW = "3.17.2"


def ask_through_two(collector: str, folder: Path, **env: str) -> Any:
    """Asks a bedplate whose endpoint elsewhere is another bedplate. Both export the request. Returns its usage."""
    running: list[Served] = []

    def start(name: str, url: str) -> Served:
        file = folder / f"{name}.yaml"
        file.write_text(json.dumps({"services": [{"url": f"{url}/v1", "model": MODEL}]}))
        served = start_serve("-f", str(file), "--name", name, "--otlp-endpoint", collector, env={**os.environ, **env})
        running.append(served)
        assert served.endpoint, "".join(served.stderr)
        return served

    try:
        with serve_null(first_ms=1, interval_ms=1, tokens=TOKENS) as engine:
            door = start("door", start("box", engine.url).root)
            with openai.OpenAI(base_url=door.url, api_key="none", max_retries=0) as client:
                *_, last = client.chat.completions.create(
                    model=MODEL, max_tokens=TOKENS, stream=True, stream_options={"include_usage": True},
                    messages=[{"role": "user", "content": SECRET}],
                    extra_headers={"traceparent": f"00-{TRACE}-{SPAN}-01"},
                )  # fmt: skip
            return last.usage
    finally:
        for served in running:  # each sends its last spans when it ends
            served.stop()


class Collector(ThreadingHTTPServer):
    """Receives traces as an OpenTelemetry collector does."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Receiver)
        self.received: list[tuple[str, str | None, dict[str, Any]]] = []


class _Receiver(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.received.append((self.path, self.headers["x-team"], json.loads(body)))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Prints nothing."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


@pytest.mark.engine
def test_spans_of_both_are_sent_before_they_end(collector: Collector, own_home: Path, tmp_path: Path) -> None:
    port = collector.server_address[1]
    ask_through_two(f"http://127.0.0.1:{port}", tmp_path, OTEL_EXPORTER_OTLP_HEADERS="x-team=red")
    assert {(path, team) for path, team, _ in collector.received} == {("/v1/traces", "red")}
    spans = {}
    for _, _, body in collector.received:
        for resource in body["resourceSpans"]:
            named = {one["key"]: one["value"]["stringValue"] for one in resource["resource"]["attributes"]}
            (spans[named["service.instance.id"]],) = resource["scopeSpans"][0]["spans"]
    assert {span["traceId"] for span in spans.values()} == {TRACE} and set(spans) == {"door", "box"}
    assert spans["door"]["parentSpanId"] == SPAN and spans["box"]["parentSpanId"] == spans["door"]["spanId"]
    assert SECRET not in json.dumps([body for _, _, body in collector.received])


@pytest.fixture
def mlflow(tmp_path: Path) -> Iterator[str]:
    """The root of MLflow's server: the package index has it, and no build of the OpenTelemetry Collector."""
    folder = tmp_path / "mlflow"
    python = folder / "bin" / "python"
    for command in ("venv", folder), ("pip", "install", "--python", python, f"mlflow=={MLFLOW}"):
        subprocess.run([find_uv_bin(), *command, "--quiet"], check=True)
    port = find_free_port()
    root = f"http://127.0.0.1:{port}"
    argv: list[str | Path] = [
        folder / "bin" / "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
        "--backend-store-uri", f"sqlite:///{folder}/store.sqlite", "--artifacts-destination", folder / "artifacts",
    ]  # fmt: skip
    env = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    with (folder / "log").open("w") as log, subprocess.Popen(argv, stdout=log, stderr=log, env=env) as server:

        def has_started() -> bool:
            assert server.poll() is None, (folder / "log").read_text()
            try:
                with urllib.request.urlopen(f"{root}/health", timeout=10) as answer:
                    return bool(answer.status == 200)
            except OSError:
                return False

        try:
            wait_for(has_started, "MLflow to start")
            yield root
        finally:
            server.terminate()


def read_span(span: dict[str, Any]) -> dict[str, Any]:
    found = {name: base64.b64decode(span.get(name, "")).hex() for name in ("trace_id", "span_id", "parent_span_id")}
    for one in span["attributes"]:
        ((_, found[one["key"]]),) = one["value"].items()
    return found


@pytest.mark.nightly
def test_mlflow_stores_the_trace_and_reads_the_conventions(mlflow: str, own_home: Path, tmp_path: Path) -> None:
    usage = ask_through_two(mlflow, tmp_path, OTEL_EXPORTER_OTLP_HEADERS="x-mlflow-experiment-id=0")
    with urllib.request.urlopen(f"{mlflow}/api/3.0/mlflow/traces/get?trace_id=tr-{TRACE}") as answer:
        trace = json.load(answer)["trace"]
    door, box = sorted(map(read_span, trace["spans"]), key=lambda span: span["parent_span_id"] != SPAN)
    assert {door["trace_id"], box["trace_id"]} == {TRACE}
    assert door["parent_span_id"] == SPAN and box["parent_span_id"] == door["span_id"]
    for span in (door, box):
        assert span["gen_ai.request.model"] == MODEL and span["bedplate.stream"] is True
        assert (span["gen_ai.usage.input_tokens"], span["gen_ai.usage.output_tokens"]) == (
            usage.prompt_tokens, usage.completion_tokens,
        )  # fmt: skip
        # What MLflow derives from the attributes of the conventions.
        assert span["mlflow.spanType"] == "CHAT_MODEL"
        counted = {one["key"]: one["value"]["int_value"] for one in span["mlflow.chat.tokenUsage"]["values"]}
        assert counted == {
            "input_tokens": usage.prompt_tokens, "output_tokens": TOKENS, "total_tokens": usage.total_tokens,
        }  # fmt: skip
    assert SECRET not in json.dumps(trace)
