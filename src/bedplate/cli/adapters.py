"""bedplate adapters: LoRA adapters of a running service."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from bedplate.cli.options import Json

if TYPE_CHECKING:
    from bedplate.hosting.adapters import AdapterReport, AdapterRequest

app = typer.Typer(
    help="List, load and unload LoRA adapters of a running service.",
    invoke_without_command=True,
    rich_markup_mode=None,
    epilog="""Examples:

\b
  bedplate adapters
  bedplate adapters load sql /adapters/sql --tenant red
  bedplate adapters unload sql
  bedplate adapters list chat --json

A loaded adapter is a model name of its own. vLLM loads adapters while it runs, if the service was started with
`workload: {lora_adapters: 4}`. llama.cpp has those that were listed at its start.
Exit code 1: no such service is running, or its engine cannot load the adapter.""",
)

Adapter = Annotated[str, typer.Argument(metavar="ADAPTER", help="The model name that requests use.")]
Service = Annotated[
    str | None,
    typer.Argument(metavar="NAME", help="The service. Default: the only running one.", show_default=False),
]
ServiceOption = Annotated[
    str | None,
    typer.Option("--service", metavar="NAME", help="The service. Default: the only running one.", show_default=False),
]
Model = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="The served base model, when there are several. Default: the only one.", show_default=False
    ),
]


@app.callback()
def adapters(context: typer.Context, json: Json = False) -> None:
    if context.invoked_subcommand is None:
        list_(json=json)


@app.command(
    name="list",
    epilog="""Examples:

\b
  bedplate adapters list
  bedplate adapters list chat --json""",
)
def list_(name: Service = None, json: Json = False) -> None:
    """List the LoRA adapters of a running service."""
    from bedplate.hosting.adapters import AdapterRequest

    _show(_ask(name, AdapterRequest()), json)


@app.command(
    epilog="""Examples:

\b
  bedplate adapters load sql /adapters/sql
  bedplate adapters load sql /adapters/sql --tenant red --tenant blue
  bedplate adapters load sql                  one that was unloaded before

Running requests continue. After a restart of the engine the adapter is loaded again; after a restart of the
service it is not."""
)
def load(
    adapter: Adapter,
    path: Annotated[
        str | None,
        typer.Argument(
            metavar="PATH", help="The folder with adapter_config.json, on this machine.", show_default=False
        ),
    ] = None,
    tenant: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Only these tenants may use it. Default: those of the model.", show_default=False
        ),
    ] = None,
    model: Model = None,
    service: ServiceOption = None,
    json: Json = False,
) -> None:
    """Load a LoRA adapter into a running engine."""
    from pathlib import Path

    from bedplate.errors import UsageError
    from bedplate.hosting.adapters import AdapterRequest

    if path is not None and not (Path(path) / "adapter_config.json").is_file():
        raise UsageError(
            f"{path} is not a LoRA adapter",
            cause="it has no adapter_config.json",
            hint="give the folder of the adapter",
        )
    folder = str(Path(path).resolve()) if path is not None else ""
    _show(
        _ask(service, AdapterRequest(do="load", name=adapter, path=folder, model=model, tenants=tuple(tenant or ()))),
        json,
    )


@app.command(
    epilog="""Examples:

\b
  bedplate adapters unload sql

Requests that use it finish first. llama.cpp keeps it in memory until the service stops."""
)
def unload(adapter: Adapter, model: Model = None, service: ServiceOption = None, json: Json = False) -> None:
    """Unload a LoRA adapter. Requests that name it then get 404."""
    from bedplate.hosting.adapters import AdapterRequest

    _show(_ask(service, AdapterRequest(do="unload", name=adapter, model=model)), json)


def _ask(service: str | None, asked: AdapterRequest) -> AdapterReport:
    from bedplate.hosting.adapters import AdapterReport
    from bedplate.hosting.control import ask
    from bedplate.hosting.records import choose_service

    return ask(choose_service(service), "adapters", asked, answer=AdapterReport, limit_s=None)


def _show(report: AdapterReport, json: bool) -> None:
    from bedplate.cli.terminal import make_console
    from bedplate.values import to_json

    if json:
        print(to_json(report))  # noqa: T201
        return
    console = make_console()
    if not report.adapters:
        console.print(f" {report.service} has no LoRA adapters", soft_wrap=True)
    width = max((len(one.name) for one in report.adapters), default=0)
    for one in report.adapters:
        who = f"  for {', '.join(one.tenants)}" if one.tenants else ""
        console.print(
            f" {one.name:{width}}  {one.state:8}  of {one.model}  {one.path}{who}", soft_wrap=True, markup=False
        )
