"""The last lines of `serve`: where it answers, and a command that works as it stands."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from bedplate.run.gateway.pages import curl
from bedplate.values import Endpoint
from bedplate.values.agreement import Agreement

SHOWN_DISAGREEMENTS = 3


def render_ready(endpoint: Endpoint, then: str = "Ctrl-C stops everything") -> RenderableType:
    several = len(endpoint.models) > 1
    command = curl(endpoint.url.removesuffix("/v1"), endpoint.needs_key).replace("\n", "\n        ")
    if several:
        command = command.replace("-d '{", f'-d \'{{"model":"{endpoint.model}",')
    on = Text(f"        {endpoint.on.text}\n", style="" if endpoint.on.real else "yellow") if endpoint.on else Text()
    models = f"models {', '.join(endpoint.models)}" if several else f"model {endpoint.model}"
    return Text.assemble(
        ("\n Ready  ", "bold green"),
        (endpoint.url, "bold"),
        f"       {models}\n",
        on,
        f"        {command}\n",
        (f"        {then}\n", "dim"),
    )


def render_agreement(agreement: Agreement) -> Text:
    """One line when the answers are right; when they are wrong, with the evidence, and what to do."""
    if agreement.verdict == "unchecked":
        return Text(f" answers could not be checked: {agreement.why}", style="dim")
    if agreement.verdict == "ok":
        return Text(f" answers agree with the reference: {agreement.agreed} of {agreement.answered}", style="dim")
    said = Text.assemble(
        (f" {agreement.engine} {agreement.engine_version} gives wrong answers here: ", "bold red"),
        (f"{agreement.why}\n", "red"),
    )
    for one in agreement.evidence[:SHOWN_DISAGREEMENTS]:
        got = "the end" if one.got is None else repr(one.got)
        said.append(f"   after …{one.prefix[-40:]!r} it says {got}, and not {one.expected!r}\n", "red")
    said.append(
        "   `bedplate plan` avoids this setting on this machine from now on; another engine: --engine ID", "red"
    )
    return said
