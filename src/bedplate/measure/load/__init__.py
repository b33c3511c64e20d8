"""The load generator. It needs only the URL of an endpoint, and it measures its own error.

Its modules are imported lazily, so that the null server starts fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bedplate.measure.load.client_error import ClientErrorFigures as ClientErrorFigures
    from bedplate.measure.load.client_error import measure_client_error as measure_client_error
    from bedplate.measure.load.generator import measure as measure
    from bedplate.measure.load.loops import run as run
    from bedplate.measure.load.null_server import serve_null as serve_null
    from bedplate.measure.load.preparing import PreparedEndpoint as PreparedEndpoint
    from bedplate.measure.load.preparing import prepare as prepare
    from bedplate.measure.load.repeating import RepeatRule as RepeatRule
    from bedplate.measure.load.repeating import compute_delivered_tok_s as compute_delivered_tok_s
    from bedplate.measure.load.separate_process import measure_apart as measure_apart
    from bedplate.measure.load.target import LoadTarget as LoadTarget

_MODULES = {
    "ClientErrorFigures": "client_error",
    "LoadTarget": "target",
    "PreparedEndpoint": "preparing",
    "RepeatRule": "repeating",
    "compute_delivered_tok_s": "repeating",
    "measure": "generator",
    "measure_apart": "separate_process",
    "measure_client_error": "client_error",
    "prepare": "preparing",
    "run": "loops",
    "serve_null": "null_server",
}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'bedplate.measure.load' has no attribute {name!r}")
    return getattr(import_module(f"bedplate.measure.load.{_MODULES[name]}"), name)
