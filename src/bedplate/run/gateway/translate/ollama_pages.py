"""Pages of Ollama's API: the models, and the version of the API."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from bedplate.values.capabilities import Capabilities

if TYPE_CHECKING:
    from bedplate.run.gateway.routes import Route

VERSION = "0.32.15"
"""The version of Ollama whose API this is: clients decide by it what they may ask for."""
_NEVER = "0001-01-01T00:00:00Z"


def find_name(name: str) -> str:
    """Ollama's clients add a tag to names without one."""
    return name.removesuffix(":latest")


def list_models(routes: list[Route], started_s: float) -> dict[str, Any]:
    return {"models": [_describe(route, started_s) for route in routes]}


def list_running(routes: list[Route], started_s: float) -> dict[str, Any]:
    rows = []
    for route in routes:
        if route.is_ready:
            row = _describe(route, started_s)
            del row["modified_at"]
            context = max((one.context_tokens or 0 for one in route.backends), default=0)
            rows.append({**row, "expires_at": _NEVER, "size_vram": 0, "context_length": context})
    return {"models": rows}


def show_model(route: Route, started_s: float) -> dict[str, Any]:
    row = _describe(route, started_s)
    known = route.capabilities or Capabilities()
    context = max((one.context_tokens or 0 for one in route.backends), default=0)
    info: dict[str, Any] = {"general.architecture": "bedplate", "general.basename": route.model}
    if context:
        info["bedplate.context_length"] = context
    found = ["completion"] if known.generation else []
    found += ["tools"] if known.generation and known.tools != "none" else []
    found += ["vision"] if known.vision else []
    found += ["embedding"] if known.embeddings else []
    return {
        "license": "",
        "modelfile": "",
        "parameters": "",
        "template": "",
        "details": row["details"],
        "model_info": info,
        "capabilities": found,
        "modified_at": row["modified_at"],
    }


def _describe(route: Route, started_s: float) -> dict[str, Any]:
    """What is known of the model. The files of an engine have no digest and size in Ollama's sense."""
    details = {
        "parent_model": "", "format": "", "family": "", "families": [], "parameter_size": "", "quantization_level": "",
    }  # fmt: skip
    at = datetime.fromtimestamp(started_s, UTC).isoformat().replace("+00:00", "Z")
    return {
        "name": route.model, "model": route.model, "modified_at": at, "size": 0, "digest": "", "details": details,
    }  # fmt: skip
