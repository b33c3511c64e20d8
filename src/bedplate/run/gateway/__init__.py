"""One public endpoint in front of engines that may fail, restart and be replaced."""

from bedplate.run.gateway.backend import BackendState, GatewayBackend
from bedplate.run.gateway.server import Gateway

__all__ = ["BackendState", "Gateway", "GatewayBackend"]
