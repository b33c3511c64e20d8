"""Base class of engines without an HTTP server, which use the one that bedplate ships into their environment."""

from __future__ import annotations

import re
from typing import ClassVar

from bedplate.engines.base import WRAPPER_KEY_VARIABLE, Engine, EngineState, KnownFailure, find_known_failure
from bedplate.engines.traits import (
    LaunchOptions,
    MetricNames,
    NotedOptions,
    PrivatePort,
    RequestTraits,
    TokenCounter,
)
from bedplate.values import Plan
from bedplate.values.capabilities import ToolSupport

SERVER = tuple(
    (f"openai_server/{name}", f"openai_server/{name}")
    for name in (
        *(f"{part}.py" for part in ("__init__", "backend", "text", "tools", "worker", "shapes", "endpoints")),
        "connections.py",
        "serve.py",
        "chatml-tools.jinja",
    )
)
"""The server package as programs of a recipe: installed next to the backend that imports it."""
SERVER_PACKAGES = ("uvicorn==0.54.0", "starlette==1.10.0")
"""Requirements of the server package, which none of these engines' packages depend on."""
_FAILURES: tuple[tuple[str, KnownFailure], ...] = (
    (
        r"bedplate-engine: cannot listen on \S+: port is in use",
        KnownFailure(
            message="another program took the engine's private port during the start",
            hint="start again; bedplate then chooses another port",
            lasting=False,
        ),
    ),
    (
        # An environment adopted by an earlier version of bedplate, whose server did not need these packages.
        r"bedplate-engine: (?P<python>.+) lacks (?:uvicorn|starlette)$",
        KnownFailure(
            message="packages that bedplate's server needs are missing from {python}",
            hint=f"uv pip install --python {{python}} {' '.join(SERVER_PACKAGES)}",
        ),
    ),
    (
        r"\bMemoryError\b|std::bad_alloc|[Ff]ailed to allocate|[Cc]annot allocate memory|CUDA out of memory",
        KnownFailure(
            message="there is not enough memory for the model and its KV cache",
            hint="reduce the need: --context 4096, --concurrency 1, or a smaller quantization",
        ),
    ),
)


class BedplateServedEngine(Engine):
    """An engine behind the server that bedplate ships."""

    key_variable = WRAPPER_KEY_VARIABLE
    # Under the supervisor, /health and /metrics require the key as well.
    private_port = PrivatePort(key_checked_by="shipped server", source="shipped/openai_server/endpoints.py")
    noted = NotedOptions(slots="--slots", context="--context")
    launch_options = LaunchOptions(context="--context", slots="--slots")
    requests = RequestTraits(fields=frozenset(["ignore_eos"]), counter=TokenCounter(prompts={"chat": "/tokenize"}))
    metric_names = MetricNames(running="bedplate_engine_requests_running", waiting="bedplate_engine_requests_waiting")
    # The server then exits when its stdin closes.
    supervised_env: ClassVar[dict[str, str]] = {"BEDPLATE_ENGINE_SUPERVISED": "1"}

    def make_server_argv(self, program: str, plan: Plan, port: int) -> list[str]:
        """The command line with the options that all such servers have."""
        argv = [program, "--model", plan.model_path, "--served-name", plan.model.served_name]
        argv += ["--host", "127.0.0.1", "--port", str(port)]
        return [*argv, "--slots", str(plan.settings.slots), "--context", str(plan.settings.context_tokens)]

    def find_tool_support(self, plan: Plan) -> ToolSupport:
        template = plan.model.chat_template
        if template is None or self.server_features is None:
            return super().find_tool_support(plan)
        # A ChatML template without tools is extended by them when it is loaded.
        from bedplate.engines.shipped.openai_server.tools import find_tool_format, with_tools

        return self.server_features.tools if find_tool_format(with_tools(template) or template) else "none"

    def read_progress(self, line: str) -> float | None:
        found = re.match(r"bedplate-engine: loading ([01](?:\.\d+)?)$", line.strip())
        return float(found[1]) if found else None

    def read_metrics(self, metrics: str) -> EngineState:
        figures = dict(re.findall(r"^bedplate_engine_(\w+) ([\d.eE+-]+)$", metrics, re.MULTILINE))
        tokens = [_parse_number(figures.get(name)) for name in ("prompt_tokens_total", "generation_tokens_total")]
        return EngineState(
            running=_parse_number(figures.get("requests_running")),
            waiting=_parse_number(figures.get("requests_waiting")),
            kv_use=_parse_number(figures.get("kv_use_ratio")),
            computed=sum(found) if (found := [one for one in tokens if one is not None]) else None,
        )

    def explain(self, log: str) -> KnownFailure | None:
        return find_known_failure(log, _FAILURES)


def _parse_number(text: str | None) -> float | None:
    try:
        return float(text) if text is not None else None
    except ValueError:
        return None
