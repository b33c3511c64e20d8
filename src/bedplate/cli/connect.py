"""bedplate connect: the configuration of a client for a running endpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bedplate.cli.options import Json

if TYPE_CHECKING:
    from bedplate.hosting.client_settings import ServedEndpoint

EXAMPLES = """Examples:

\b
  bedplate connect claude-code                      print the settings for the running service
  bedplate connect codex -o ~/.codex/bedplate.config.toml
  bedplate connect zed --url http://gpu-box:8080 --model qwen3-32b

Clients: claude-code, codex, open-webui, continue, cline, zed, langchain, litellm, llamaindex.

Exit codes: 1 the endpoint lacks something that the client requires; 3 the endpoint does not answer."""
LIMIT_S = 10.0


def connect(
    client: Annotated[str, typer.Argument(metavar="CLIENT", help="The client, for example claude-code or codex.")],
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The endpoint. Default: the running service.", show_default=False),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Default: the first model there.", show_default=False)
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", show_default=False,
            help="Write the configuration to a new file. A file that exists is not changed.",
        ),
    ] = None,
    json: Json = False,
) -> None:  # fmt: skip
    """Print the configuration of a client for an endpoint.

    It also checks that the endpoint has what the client needs.
    """
    from bedplate.hosting.client_settings import connect_client, find_client
    from bedplate.values import to_json

    wanted = find_client(client)
    found = connect_client(wanted, _find_endpoint(wanted, url, model))
    if output is not None:
        _write(output, found.settings.text)
    if json:
        print(to_json(found))  # noqa: T201
    else:
        import sys

        from bedplate.cli.terminal import make_console

        if output is None:
            sys.stdout.write(found.settings.text)
        notes = make_console(sys.stderr)
        place = str(output) if output is not None else found.settings.file
        lines = [f" {found.settings.name}: {place}", f" use it: {found.settings.use}"]
        if found.endpoint.needs_key:
            lines.append(" the endpoint requires a key: set BEDPLATE_API_KEY where the client runs")
        for need in found.needs:
            mark = "?" if not need.known else "✓" if need.met else "✗" if need.required else "!"
            lines.append(f" {mark} {need.need}{f': {need.hint}' if need.hint else ''}")
        notes.print("\n".join(lines), soft_wrap=True, markup=False, highlight=False)
    if not found.works:
        raise typer.Exit(1)


def _find_endpoint(client: str, url: str | None, model: str | None) -> ServedEndpoint:
    from bedplate.errors import UsageError
    from bedplate.hosting.client_settings import API_PATHS, CLIENTS, ServedEndpoint
    from bedplate.hosting.records import list_running

    if url is None:
        running = [record.url for record in list_running() if record.url]
        if len(running) != 1:
            what = f"{len(running)} services are running" if running else "no service is running"
            raise UsageError(
                what, hint=f"name the endpoint: --url {running[0] if running else 'http://127.0.0.1:8080'}"
            )
        url = running[0]
    root = url.rstrip("/").removesuffix("/v1")
    needs_key, listed = _read_models(root)
    names = [str(one.get("id")) for one in listed]
    if model is not None and names and model.lower() not in [name.lower() for name in names]:
        raise UsageError(f"{root} does not serve {model!r}", hint=f"it serves {', '.join(names)}")
    chosen = next((one for one in listed if model is None or str(one.get("id")).lower() == model.lower()), {})
    name = str(chosen.get("id") or model or "")
    if not name:
        raise UsageError(
            f"{root} lists no models" + (" without a key" if needs_key else ""),
            hint="set BEDPLATE_API_KEY, or name the model: --model MODEL",
        )
    reported = chosen.get("capabilities")
    known: dict[str, Any] = reported if isinstance(reported, dict) else {}
    api, reports = CLIENTS[client][0].api, "tools" in known
    lacks = api in API_PATHS and not reports and not _has_path(f"{root}{API_PATHS[api]}", name, needs_key)
    return ServedEndpoint(
        root=root, model=name, needs_key=needs_key, context_tokens=chosen.get("max_model_len"),
        tools=known.get("tools", "auto") != "none", vision=known.get("vision") is True,
        generation=known.get("generation") is not False,
        reports_capabilities=reports, lacks=(api,) if lacks else (),
    )  # fmt: skip


def _read_models(root: str) -> tuple[bool, list[dict[str, Any]]]:
    """Whether the endpoint requires a key, and its models, as far as they can be read."""
    import json
    import os
    import urllib.error
    import urllib.request

    from bedplate.errors import ExternalFailure, UsageError

    if not root.startswith(("http://", "https://")):
        raise UsageError(f"{root!r} is not the URL of an endpoint", hint="for example --url http://127.0.0.1:8080")

    def read(key: str | None) -> list[dict[str, Any]] | None:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        request = urllib.request.Request(f"{root}/v1/models", headers=headers)  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:  # noqa: S310
                return list(json.load(answer)["data"])
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 401:
                    return None
                raise ExternalFailure(f"{root}/v1/models answered with status {error.code}") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            hint = "bedplate ps lists running services; bedplate serve starts one"
            raise ExternalFailure(f"{root} does not answer as an endpoint", cause=str(error), hint=hint) from None

    if (listed := read(None)) is not None:
        return False, listed
    return True, read(os.environ.get("BEDPLATE_API_KEY")) or []


def _has_path(url: str, model: str, needs_key: bool) -> bool:
    """Whether an endpoint has an API: if it does, it rejects a request without content."""
    import json
    import os
    import urllib.error
    import urllib.request

    from bedplate.hosting.endpoints import UNKNOWN_PATH

    key = os.environ.get("BEDPLATE_API_KEY") if needs_key else None
    headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
    request = urllib.request.Request(url, json.dumps({"model": model}).encode(), headers)  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:  # noqa: S310
            return answer.status not in UNKNOWN_PATH
    except urllib.error.HTTPError as error:
        with error:
            return error.code not in UNKNOWN_PATH
    except OSError:
        return True  # it has just answered another request


def _write(path: Path, text: str) -> None:
    from bedplate.errors import ExternalFailure, UsageError

    try:
        path.expanduser().parent.mkdir(parents=True, exist_ok=True)
        with path.expanduser().open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path} exists", hint="choose another file, or add the printed settings to it") from None
    except OSError as error:
        raise ExternalFailure(f"cannot write {path}", cause=error.strerror) from None
