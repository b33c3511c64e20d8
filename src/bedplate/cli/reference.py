"""bedplate reference: computes what the answers of engines are compared with."""

from __future__ import annotations

from typing import Annotated

import typer

from bedplate.cli.options import Json, ModelName, parse_engine_and_version

EXAMPLES = """Examples:

\b
  bedplate reference ./my-model              compute it, or show the cached one
  bedplate reference model.gguf --install    download PyTorch first, if it is missing
  bedplate reference ./my-model --budget 2m --force
  bedplate reference ./my-model --memory 8G  layer by layer from disk if the model is larger
  bedplate reference model.gguf --engine llama.cpp
  bedplate reference --list

`bench`, `gate` and `tune` compute a missing reference if PyTorch is installed. `serve`, `migrate` and `shadow` use the
cached one."""


def reference(
    model: ModelName = None,
    show_list: Annotated[bool, typer.Option("--list", help="List the cached references.")] = False,
    budget: Annotated[
        str, typer.Option(metavar="TIME", help="Time limit. Prefixes without time are left out.")
    ] = "30m",
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory that it may use. A larger model is computed layer by layer from disk.",
            show_default="the free memory",
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            metavar="ID[@VERSION]",
            help="Use the answers of this engine instead of computing in float32.",
            show_default=False,
            parser=parse_engine_and_version,
        ),
    ] = None,
    install: Annotated[
        bool, typer.Option("--install", help="Install what computes references, if it is missing.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Compute it again.")] = False,
    json: Json = False,
) -> None:
    """Compute the reference that answers of a model are compared to.

    By PyTorch in float32; layer by layer from disk if the model exceeds the memory; otherwise from the engine with the
    most faithful weights. It is cached by the content of the weights.
    """
    from bedplate.cli.terminal import TerminalProgress, make_console
    from bedplate.errors import UsageError
    from bedplate.measure.references import summarize_cached, summarize_reference
    from bedplate.values.reference import ReferenceList
    from bedplate.values.units import parse_duration, parse_size

    if show_list:
        if model is not None or engine is not None or force or install:
            raise UsageError("--list takes no model and no other option", hint="bedplate reference --list")
        found = summarize_cached()
    else:
        from bedplate.facts.hardware import probe
        from bedplate.measure.references import provide_reference
        from bedplate.run.ready import fetch_facts

        limit_s = parse_duration(budget, "--budget", positive=True)
        memory_bytes = parse_size(memory, "--memory") if memory is not None else None
        progress, hardware = TerminalProgress(), probe()
        facts = fetch_facts(model, hardware, progress)
        made = provide_reference(
            facts,
            hardware,
            progress,
            limit_s=limit_s,
            memory_bytes=memory_bytes,
            engine=engine,
            install=install,
            force=force,
            name=model,
        )
        found = (summarize_reference(made, facts),)
    if json:
        from bedplate.values import to_json

        print(to_json(ReferenceList(references=found)))  # noqa: T201
        return
    from bedplate.show.references import render_reference, render_references

    make_console().print(render_references(found) if show_list else render_reference(found[0]), soft_wrap=True)
