"""One public endpoint in front of an engine that may die, restart and change."""

from bedplate.run.gateway.backend import Backend, BackendState
from bedplate.run.gateway.server import Gateway

__all__ = ["Backend", "BackendState", "Gateway"]
