"""bedplate serve: serves models behind one endpoint."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bedplate.cli.options import (
    Concurrency,
    Context,
    EngineId,
    Fields,
    IntentFile,
    ModelName,
    OutputTokens,
    PromptTokens,
    Untuned,
    Users,
)

if TYPE_CHECKING:
    from bedplate.values import Decision, Endpoint, Hardware, Model
    from bedplate.values.intent import Intent
    from bedplate.values.service import ModelOrder, Order, ServiceRecord

EXAMPLES = """Examples:

\b
  bedplate serve
  bedplate serve model.gguf --port 9000
  bedplate serve unsloth/Qwen3-0.6B-GGUF:Q4_K_M
  bedplate serve --engine llama.cpp --build native
  BEDPLATE_API_KEY=secret bedplate serve --host 0.0.0.0
  bedplate serve model.gguf --replicas 2
  bedplate serve --on ray --replicas 2
  bedplate serve --endpoint https://gpu-1.example.com/v1,key_env=GPU_1_KEY --routing order
  BEDPLATE_USAGE_STORE=postgresql://bedplate:secret@db/bedplate bedplate serve -f gateway.yaml
  bedplate serve -f bedplate.yaml --memory-budget 8GiB
  bedplate serve -d --name chat        then: bedplate ps, status, logs, stop
  bedplate serve --bundle bedplate-bundle.tar
  bedplate serve --name chat --systemd > ~/.config/systemd/user/bedplate-chat.service

Ctrl-C stops everything; running requests get a few seconds to finish."""


class BuildChoice(StrEnum):
    packages = "packages"
    native = "native"


class OrchestratorChoice(StrEnum):
    dynamo = "dynamo"
    ray = "ray"


class LogFormatChoice(StrEnum):
    text = "text"
    json = "json"


class RoutingChoice(StrEnum):
    share = "share"
    order = "order"
    latency = "latency"
    price = "price"
    load = "load"


def serve(
    context_: typer.Context,
    model: ModelName = None,
    file: IntentFile = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the endpoint; 0 chooses a free one.")] = 8080,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="BEDPLATE_API_KEY",
            help="API key that clients must send. Prefer the environment variable: other users can see options.",
            show_default=False,
            show_envvar=True,
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Another name of this machine that requests without a key may use; * for any. May be repeated.",
            show_default=False,
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="Web pages that may use the endpoint: https://chat.example.com; * for all. May be repeated.",
            show_default=False,
        ),
    ] = None,
    users: Users = None,
    concurrency: Concurrency = None,
    context: Context = None,
    prompt_tokens: PromptTokens = None,
    output_tokens: OutputTokens = None,
    fields: Fields = None,
    engine: EngineId = None,
    build: Annotated[
        BuildChoice,
        typer.Option(
            help="packages: the engine as published. native: build it from source for this machine, once, in minutes; "
            "it is used if it gives the same answers as the published one."
        ),
    ] = BuildChoice.packages,
    untuned: Untuned = False,
    max_body_mb: Annotated[int, typer.Option(min=1, help="Largest accepted request body, in MB.")] = 32,
    log_content: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Also store prompts and answers in this folder, readable by you only.",
            show_default=False,
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check/--no-check",
            help="Compare a few answers with the float32 reference before the first use of an engine.",
        ),
    ] = True,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Start in the background, and return when the service is ready.")
    ] = False,
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of the service for ps, status, logs and stop.", show_default=False),
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(min=1, max=64, help="Number of engine processes side by side.", show_default=False)
    ] = None,
    on: Annotated[
        OrchestratorChoice | None,
        typer.Option(
            help="Run the replicas with Dynamo and its KV router, or with Ray Serve, on this machine.",
            show_default=False,
        ),
    ] = None,
    endpoint: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL[,FIELD=VALUE]",
            help="An endpoint elsewhere that answers requests too; fields: model, name, key_env, share, "
            "price_per_million_tokens. May be repeated.",
            show_default=False,
        ),
    ] = None,
    routing: Annotated[
        RoutingChoice | None,
        typer.Option(help="With endpoints elsewhere: how requests are divided. Default: share.", show_default=False),
    ] = None,
    ttl: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Load the model at its first request, and unload it after this long without requests: 10m.",
            show_default=False,
        ),
    ] = None,
    memory_budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Memory limit of all engines together: 8GiB. Default: free memory.", show_default=False
        ),
    ] = None,
    bundle: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Serve from a folder or .tar of `bedplate bundle`, without network access.",
            show_default=False,
        ),
    ] = None,
    manifest_sha256: Annotated[
        str | None,
        typer.Option(
            metavar="HASH", help="With --bundle: the hash that `bundle` printed for its manifest.", show_default=False
        ),
    ] = None,
    grace: Annotated[
        str,
        typer.Option(metavar="TIME", help="How long running requests may continue after SIGTERM or Ctrl-C: 30s, 10m."),
    ] = "5s",
    usage_store: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            envvar="BEDPLATE_USAGE_STORE",
            help="PostgreSQL database for keys, limits and usage that several gateways share. "
            "Default: SQLite in BEDPLATE_HOME. Prefer the environment variable: other users can see options.",
            show_default=False,
            show_envvar=True,
        ),
    ] = None,
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            envvar="BEDPLATE_OTLP_ENDPOINT",
            help="Send a trace of each request to this OpenTelemetry collector (OTLP over HTTP).",
            show_default=False,
            show_envvar=True,
        ),
    ] = None,
    log_format: Annotated[
        LogFormatChoice, typer.Option(help="Format of events on stderr and in the service's log.")
    ] = LogFormatChoice.text,
    systemd: Annotated[
        bool, typer.Option("--systemd", help="Print a systemd unit that runs this command; start nothing.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="When ready, print the endpoint as one line of JSON.")] = False,
) -> None:
    """Serve a model behind one OpenAI-compatible endpoint.

    Probes this machine, chooses an engine, installs it, starts it and keeps it running.
    """
    from bedplate.cli.options import build_intent
    from bedplate.hosting.ordering import make_order
    from bedplate.values import replace_fields
    from bedplate.values.units import parse_duration, parse_size

    if usage_store:
        _use_usage_store(usage_store)
    packed = None
    if bundle is not None:
        own = {
            "a model": model,
            "--file": file,
            "--engine": engine,
            "--build": build is not BuildChoice.packages,
            "--on": on,
        }
        packed, engine = _read_bundle(bundle, [name for name, given in own.items() if given], manifest_sha256)
    elif manifest_sha256 is not None:
        from bedplate.errors import UsageError

        raise UsageError("--manifest-sha256 needs --bundle", hint="bedplate serve --bundle PATH --manifest-sha256 HASH")
    intent = build_intent(
        file, fields, model=model, users=users, concurrency=concurrency, context=context,
        prompt_tokens=prompt_tokens, output_tokens=output_tokens, base=packed,
    )  # fmt: skip
    order = make_order(
        intent, engine=engine, replicas=replicas, ttl=ttl, name=name, host=host, port=port, api_key=api_key or None,
        allow_hosts=allow_host or (), allow_origins=allow_origin or (),
        endpoints=endpoint or (), routing=routing.value if routing is not None else None,
        on=on.value if on is not None else None, max_body_bytes=max_body_mb * 1_000_000, build=build.value, check=check,
        log_content=str(log_content) if log_content is not None else None,
        memory_budget_bytes=parse_size(memory_budget, "--memory-budget") if memory_budget is not None else None,
        bundle=str(bundle.expanduser().absolute()) if bundle is not None else None, bundle_sha256=manifest_sha256,
        otlp_endpoint=otlp_endpoint, log_format=log_format.value, grace_s=parse_duration(grace, "--grace"),
    )  # fmt: skip
    if untuned:
        order = replace_fields(order, services=tuple(replace_fields(one, untuned=True) for one in order.services))
    fallback = file.stem if file is not None and len(order.services) + len(order.endpoints) > 1 else None
    if systemd:
        _print_unit(order, context_, fallback)
    elif detach:
        _serve_in_background(order, fallback, json=json)
    else:
        _serve_in_foreground(order, fallback, json=json)


def _use_usage_store(url: str) -> None:
    """For this process and one in the background. Engines do not get the variable."""
    import os

    from bedplate.usage_store import VARIABLE, check_url

    check_url(url, "--usage-store")
    os.environ[VARIABLE] = url


def _read_bundle(bundle: Path, refused: list[str], sha256: str | None) -> tuple[Intent, str]:
    """The intent that the bundle was made for, and its engine."""
    from bedplate.bundling.serve_bundle import read_bundle
    from bedplate.errors import UsageError
    from bedplate.values.intent import Intent

    if refused:
        raise UsageError(
            f"--bundle contains a model and an engine: {' and '.join(refused)} cannot be combined with it",
            hint="bedplate bundle packs another model or engine",
        )
    found = read_bundle(bundle, sha256)
    return Intent(workload=found.wanted.workload, operations=found.wanted.operations), found.plan.engine


def _serve_in_foreground(order: Order, fallback: str | None, *, json: bool) -> None:
    from bedplate.cli.checks import check_answers, make_examiner
    from bedplate.cli.terminal import JsonProgress, TerminalProgress
    from bedplate.serving.serve import ServeHooks, serve_order

    heads = _DecisionPrinter(json=json)
    as_json = order.log_format == "json"
    progress = JsonProgress() if as_json else TerminalProgress()

    def name_lines(record: ServiceRecord) -> None:
        if isinstance(progress, JsonProgress):
            progress.service = record.name

    hooks = ServeHooks(
        progress=progress,
        on_claim=name_lines,
        on_decision=(lambda *_: None) if as_json else heads.show,
        on_ready=lambda endpoint: _show_ready(endpoint, "Ctrl-C stops everything", json=json),
        check=check_answers if order.check else None,
        examiner=make_examiner(),
    )
    serve_order(order, hooks, fallback=fallback)


def _serve_in_background(order: Order, fallback: str | None, *, json: bool) -> None:
    from bedplate.cli.terminal import TerminalProgress
    from bedplate.hosting.detached import start_detached
    from bedplate.serving.serve import check_order

    check_order(order)
    heads = _DecisionPrinter(json=json)
    endpoint = start_detached(
        "bedplate.cli.background",
        order,
        TerminalProgress(),
        lambda choice: heads.show(choice.hardware, choice.model, choice.wanted, choice.decision),
        fallback,
    )
    _show_ready(endpoint, f"bedplate status {endpoint.name} · logs {endpoint.name} · stop {endpoint.name}", json=json)


def _print_unit(order: Order, context: typer.Context, fallback: str | None) -> None:
    import os
    import sys

    from bedplate.cli.options import rebuild_command_line
    from bedplate.errors import UsageError
    from bedplate.hosting.records import check_name, to_name
    from bedplate.hosting.systemd import render_unit

    if context.params.get("api_key") and "BEDPLATE_API_KEY" not in os.environ:
        raise UsageError(
            "--api-key cannot be combined with --systemd: other users can read a unit",
            hint="write BEDPLATE_API_KEY=… into the file that the unit names as its EnvironmentFile",
        )
    if context.params.get("usage_store"):
        typer.echo("write BEDPLATE_USAGE_STORE=… into the EnvironmentFile of the unit", err=True)
    first = (order.services[0].model if order.services else order.endpoints[0].model) or "the built-in model"
    name = check_name(order.name) if order.name is not None else to_name(fallback or first)
    words = rebuild_command_line(context, without=("systemd", "detach", "json", "api_key", "name", "usage_store"))
    argv = [sys.executable, "-m", "bedplate", "serve", *words, "--name", name]
    given = {key: os.environ[key] for key in ("BEDPLATE_HOME", "HF_HOME") if key in os.environ}
    names = [*(one.model for one in order.services), *(one.model for one in order.endpoints)]
    models = ", ".join(dict.fromkeys(one or first for one in names))
    print(render_unit(name, models, argv, str(Path.cwd()), given), end="")  # noqa: T201


class _DecisionPrinter:
    """Prints the decision of each model, below one title."""

    def __init__(self, *, json: bool) -> None:
        self._json = json
        self._titled = False

    def show(self, hardware: Hardware, facts: Model, wanted: ModelOrder, decision: Decision) -> None:
        import sys

        from bedplate._version import __version__
        from bedplate.cli.terminal import make_console
        from bedplate.show.decision import render_serving

        out = make_console(sys.stderr if self._json else sys.stdout)
        if not self._titled:
            out.print(f"\n [bold]bedplate {__version__}[/bold]\n")
            self._titled = True
        out.print(render_serving(hardware, facts, wanted.workload, decision, wanted.engine))
        out.print()


def _show_ready(endpoint: Endpoint, then: str, *, json: bool) -> None:
    if json:
        from bedplate.values import to_json

        print(to_json(endpoint, indent=-1), flush=True)  # noqa: T201
        return
    from bedplate.cli.terminal import make_console
    from bedplate.show.serving import render_ready

    make_console().print(render_ready(endpoint, then), soft_wrap=True)
