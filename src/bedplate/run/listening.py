"""The address of an endpoint, and the check that its port is free."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

import msgspec

from bedplate.errors import UsageError
from bedplate.run.gateway.server import DEFAULT_MAX_BODY_BYTES, explain_bind_failure


class ListenOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The address, key and limits of an endpoint."""

    host: str = "127.0.0.1"
    port: int = 8080
    any_port: bool = False
    """Whether any free port will do if `port` is in use."""
    api_key: str | None = None
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    grace_s: float = 5.0
    allow_hosts: tuple[str, ...] = ()
    """Further names of the endpoint, for requests without a key (`--allow-host`)."""
    allow_origins: tuple[str, ...] = ()
    """Web pages of other origins that may use it (`--allow-origin`)."""
    log_content: Path | None = None
    """The folder for the content of requests and answers (`--log-content`)."""


def check_port(listen: ListenOptions) -> None:
    """Raises an error if the port is in use, before anything is downloaded."""
    if not listen.host.strip():
        # An empty variable in a script must not open the endpoint to the network, as the system would understand it.
        raise UsageError("--host is empty", hint="127.0.0.1: only this machine; 0.0.0.0: all of its addresses")
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((listen.host, listen.port))
    except (OSError, OverflowError) as error:
        failure = error if isinstance(error, OSError) else OSError(errno.EINVAL, "a port is a number from 0 to 65535")
        if listen.any_port and failure.errno == errno.EADDRINUSE:
            return
        raise explain_bind_failure(failure, listen.host, listen.port) from error
