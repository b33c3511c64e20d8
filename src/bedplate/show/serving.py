"""The last lines of `serve`: the endpoint, and a command to try it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from bedplate.run.gateway.pages import write_curl_command
from bedplate.values import Endpoint
from bedplate.values.agreement import Agreement
from bedplate.values.endpoint import StartPhase, StartPhaseTime
from bedplate.values.units import format_seconds

SHOWN_DISAGREEMENTS = 3
PHASE_NAMES: dict[StartPhase, str] = {
    "start": "processes", "load": "weights", "compile": "compilation", "capture": "CUDA graphs", "warm-up": "warm-up",
}  # fmt: skip


def render_ready(endpoint: Endpoint, then: str = "Ctrl-C stops everything") -> RenderableType:
    several = len(endpoint.models) > 1
    base, model = endpoint.url.removesuffix("/v1"), endpoint.model if several else None
    command = write_curl_command(base, endpoint.needs_key, model).replace("\n", "\n        ")
    on = Text(f"        {endpoint.on.text}\n", style="" if endpoint.on.real else "yellow") if endpoint.on else Text()
    start = Text(f"        {describe_start(endpoint.phases)}\n", style="dim") if endpoint.phases else Text()
    models = f"models {', '.join(endpoint.models)}" if several else f"model {endpoint.model}"
    return Text.assemble(
        ("\n Ready  ", "bold green"),
        (endpoint.url, "bold"),
        f"       {models}\n",
        ("        live page  ", "dim"),
        f"{base}/\n",
        on,
        start,
        f"        {command}\n",
        (f"        {then}\n", "dim"),
    )


def describe_start(phases: Sequence[StartPhaseTime]) -> str:
    """The time of a start and of its phases."""
    return f"started in {format_seconds(sum(one.seconds for one in phases))}: {list_phase_times(phases)}"


def list_phase_times(phases: Sequence[StartPhaseTime]) -> str:
    return ", ".join(f"{PHASE_NAMES[one.phase]} {format_seconds(one.seconds)}" for one in phases)


def render_agreement(agreement: Agreement) -> Text:
    """One line if the answers are right; otherwise the evidence and what to do."""
    if agreement.verdict == "unchecked":
        return Text(f" answers could not be checked: {agreement.why}", style="dim")
    if agreement.verdict == "ok":
        counts = f"{agreement.agreed}/{agreement.answered}"
        return Text(f" greedy-token agreement with {agreement.reference_name}: {counts}", style="dim")
    warning = Text.assemble(
        (f" {agreement.engine} {agreement.engine_version} gives wrong answers here: ", "bold red"),
        (f"{agreement.why}\n", "red"),
    )
    for one in agreement.evidence[:SHOWN_DISAGREEMENTS]:
        got = "the end of the text" if one.got is None else repr(one.got)
        warning.append(f"   after …{one.prefix[-40:]!r}: {got} instead of {one.expected!r}\n", "red")
    warning.append(
        "   `bedplate plan` avoids this configuration on this machine from now on; choose an engine with --engine ID",
        "red",
    )
    return warning
