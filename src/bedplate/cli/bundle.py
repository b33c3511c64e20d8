"""bedplate bundle: engine, model, plan and bedplate itself, packed for an air-gapped site."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from bedplate.cli.options import (
    Concurrency,
    Context,
    Fields,
    HardwareName,
    IntentFile,
    Json,
    ModelName,
    OutputTokens,
    PromptTokens,
    Users,
)

EXAMPLES = """Examples:

\b
  bedplate bundle
  bedplate bundle model.gguf --engine llama.cpp -o chat.tar
  bedplate bundle -f bedplate.yaml -o /media/stick/chat
  bedplate bundle --check chat.tar
  bedplate bundle -f platform.yaml --for kubernetes --base python -o site
  bedplate bundle --for linux-x86_64-cuda13 --python 3.12 --engine vllm@0.26.0 \\
      --overlay torch==2.11.0 --capability 9.0 --pieces 48M -o h200

Then, at the site: tar xf chat.tar && ./bedplate-bundle/serve, or bedplate serve --bundle chat.tar.
With --for linux-…, on the target: python3 h200/install.py.
With --for kubernetes: ./fetch.sh with network access; at the site ./push.sh and ./apply.sh."""


def bundle(
    model: ModelName = None,
    file: IntentFile = None,
    hardware: HardwareName = None,
    users: Users = None,
    concurrency: Concurrency = None,
    context: Context = None,
    prompt_tokens: PromptTokens = None,
    output_tokens: OutputTokens = None,
    fields: Fields = None,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="ID[@VERSION]",
            help="Ask for one engine; with --for, also a version, and several with commas.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="PATH",
            help="A .tar archive or a folder. Default: bedplate-MODEL-ENGINE.tar.",
            show_default=False,
        ),
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Verify a bundle against its manifest; pack nothing.", show_default=False),
    ] = None,
    manifest_sha256: Annotated[
        str | None,
        typer.Option(
            metavar="HASH",
            help="With --check: the hash that `bundle` printed; another manifest is refused.",
            show_default=False,
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="TARGET",
            help="Pack for another platform, such as linux-x86_64-cuda13, or for a cluster: kubernetes, dynamo or ray.",
            show_default=False,
        ),
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(metavar="X.Y", help="With --for: the target's Python. Default: as here.", show_default=False),
    ] = None,
    overlay: Annotated[
        str | None,
        typer.Option(
            metavar="torch==VERSION|FILE",
            help="With --for: leave out what comes with this PyTorch, or the pinned packages of a file.",
            show_default=False,
        ),
    ] = None,
    capability: Annotated[
        str | None,
        typer.Option(
            metavar="X.Y",
            help="With --for: compute capability of the target's GPUs; code for others is left out.",
            show_default=False,
        ),
    ] = None,
    pieces: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="With --for: cut into files of at most this size.", show_default=False),
    ] = None,
    without: Annotated[
        str | None,
        typer.Option(metavar="PARTS", help="With --for: leave out engine, model or bedplate.", show_default=False),
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="With --for kubernetes: the base of the gateway's image, an OCI layout or an archive of a root "
            "file system.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Pack an engine, a model and bedplate for an air-gapped site.

    Decides, installs and converts as `serve` does, and packs the result. For hypothetical hardware, and for engines
    that run only from a container image, the bundle names the image and does not contain it.
    """
    from bedplate.cli.options import build_intent, parse_engine
    from bedplate.cli.terminal import TerminalProgress, make_console
    from bedplate.errors import UsageError
    from bedplate.show.bundle import render_checked, render_packed, render_packed_for_target
    from bedplate.values import to_json

    only_for = {"python": python, "overlay": overlay, "capability": capability, "pieces": pieces, "without": without}
    for_cluster = target in ("kubernetes", "dynamo", "ray")
    if (target is None or for_cluster) and (given := [name for name, value in only_for.items() if value is not None]):
        where = "a machine" if for_cluster else "a target"
        raise UsageError(f"--{given[0]} needs --for with {where}", hint="for example --for linux-x86_64-cuda13")
    if base is not None and not for_cluster:
        raise UsageError("--base needs --for with a cluster", hint="--for kubernetes, dynamo or ray")
    if manifest_sha256 is not None and check is None:
        raise UsageError("--manifest-sha256 needs --check", hint="bedplate bundle --check PATH --manifest-sha256 HASH")
    if check is not None:
        from bedplate.bundling.serve_bundle import check_bundle

        found = check_bundle(check, TerminalProgress(), manifest_sha256)
        shown = render_checked(check, found, manifest_sha256 is not None)
        value = to_json(found)
    elif target is not None and for_cluster:
        from bedplate.bundling.for_cluster import ClusterRequest, make_cluster_bundle
        from bedplate.show.bundle import render_packed_for_cluster

        named = parse_engine(engine) if engine is not None else None
        intent = build_intent(
            file, fields, model=model, hardware=hardware, users=users, concurrency=concurrency, context=context,
            prompt_tokens=prompt_tokens, output_tokens=output_tokens,
        )  # fmt: skip
        carried = make_cluster_bundle(ClusterRequest(intent, target, named, base, output), TerminalProgress())
        shown, value = render_packed_for_cluster(carried), to_json(carried)
    elif target is not None:
        from bedplate.bundling.for_target import TargetRequest, make_target_bundle
        from bedplate.values.units import parse_size

        of_plan = {
            "hardware": hardware, "users": users, "concurrency": concurrency, "context": context,
            "prompt-tokens": prompt_tokens, "output-tokens": output_tokens,
        }  # fmt: skip
        if given := [f"--{name}" for name, value in of_plan.items() if value is not None]:
            raise UsageError(
                f"{given[0]} and --for exclude each other", hint="serve plans on the target; give it there"
            )
        request = TargetRequest(
            target=target,
            python=python or f"{sys.version_info.major}.{sys.version_info.minor}",
            engines=tuple(_parse_versioned_engine(one, parse_engine) for one in engine.split(",")) if engine else (),
            overlay=overlay,
            capability=capability,
            piece_bytes=parse_size(pieces, "--pieces") if pieces is not None else None,
            model=build_intent(file, fields, model=model).model,
            without=frozenset(part.strip() for part in without.split(",")) if without else frozenset(),
            output=output,
        )
        made = make_target_bundle(request, TerminalProgress())
        shown, value = render_packed_for_target(made), to_json(made)
    else:
        from bedplate.bundling.make import make_bundle

        named = parse_engine(engine) if engine is not None else None
        intent = build_intent(
            file, fields, model=model, hardware=hardware, users=users, concurrency=concurrency, context=context,
            prompt_tokens=prompt_tokens, output_tokens=output_tokens,
        )  # fmt: skip
        packed = make_bundle(intent, named, output, TerminalProgress())
        shown, value = render_packed(packed), to_json(packed)
    if json:
        print(value)  # noqa: T201
    else:
        make_console().print(shown)


def _parse_versioned_engine(text: str, engine_named: Callable[[str], str]) -> str:
    name, at, version = text.strip().partition("@")
    return f"{engine_named(name)}{at}{version}"
