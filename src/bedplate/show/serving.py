"""The last lines of `serve`: where it answers, and a command that works as it stands."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from bedplate.run.gateway.pages import curl
from bedplate.values import Endpoint


def render_ready(endpoint: Endpoint) -> RenderableType:
    command = curl(endpoint.url.removesuffix("/v1"), endpoint.needs_key).replace("\n", "\n        ")
    return Text.assemble(
        ("\n Ready  ", "bold green"),
        (endpoint.url, "bold"),
        f"       model {endpoint.model}\n",
        f"        {command}\n",
        ("        Ctrl-C stops everything\n", "dim"),
    )
