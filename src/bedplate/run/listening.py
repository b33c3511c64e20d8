"""Where an endpoint answers, and whether that port is free."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

import msgspec

from bedplate.run.gateway.server import DEFAULT_MAX_BODY_BYTES, bind_failure


class Listen(msgspec.Struct, frozen=True, kw_only=True):
    """Where and for whom the endpoint answers."""

    host: str = "127.0.0.1"
    port: int = 8080
    api_key: str | None = None
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    grace_s: float = 5.0
    log_content: Path | None = None
    """Where what is asked and answered is kept, for an operator who wants that."""


def check_port(listen: Listen) -> None:
    """Refuses a port that is in use before anything is downloaded for it."""
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((listen.host, listen.port))
    except (OSError, OverflowError) as error:
        failure = error if isinstance(error, OSError) else OSError(errno.EINVAL, "ports go from 0 to 65535")
        raise bind_failure(failure, listen.host, listen.port) from error
