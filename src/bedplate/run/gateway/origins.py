"""The Host and Origin headers that an endpoint accepts, so that web pages of other sites cannot use it.

A browser sends requests to this endpoint for any page that it shows. Where a key is required, such a page does not have
it. Without keys, two things protect the endpoint: a page of another site has a foreign Origin, and a page that lets its
own name resolve to this machine (DNS rebinding) has a foreign Host.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable

from bedplate.errors import UsageError

ANY = "*"
OWN_NAMES = frozenset([b"localhost", b"host.docker.internal", b"host.containers.internal"])
"""Names that nobody can register: of this machine, and of the host as seen from Docker and Podman containers."""
_PREFLIGHT = (
    b"access-control-allow-methods: GET, HEAD, POST\r\naccess-control-allow-headers: %b\r\n"
    b"access-control-max-age: 600\r\n"
)


class OriginPolicy:
    """The hosts and origins of one endpoint. `bind` adds the names of the address that it listens on."""

    def __init__(self, allow_hosts: Iterable[str] = (), allow_origins: Iterable[str] = ()) -> None:
        hosts, origins = [*map(parse_host, allow_hosts)], [*map(parse_origin, allow_origins)]
        self._any_host = ANY in hosts
        self._any_origin = ANY in origins
        self._hosts = OWN_NAMES.union(host.encode() for host in hosts)
        self._origins = frozenset(origin.encode() for origin in origins)

    def bind(self, address: str) -> None:
        self._hosts |= {name.encode() for name in list_own_names(address)}

    def accepts_host(self, value: bytes) -> bool:
        """Whether the Host header names this endpoint.

        Any IP address does: a page can only have it as its own host if it was loaded from that address. The port may
        differ, as behind an SSH tunnel.
        """
        name = strip_port(value.strip().lower()).rstrip(b".")
        return self._any_host or name in self._hosts or is_ip_address(name)

    def allows_origin(self, origin: bytes) -> bool:
        """Whether pages of this origin were allowed explicitly."""
        return self._any_origin or origin.lower() in self._origins

    @staticmethod
    def is_same_origin(origin: bytes, host: bytes) -> bool:
        """Whether the page was loaded from the host that the request is for. A reverse proxy may have changed http
        to https."""
        scheme, mark, rest = origin.lower().partition(b"://")
        return bool(mark) and scheme in (b"http", b"https") and rest == host.lower()


def write_cors_headers(origin: bytes) -> bytes:
    """Let a page of this origin read the response."""
    return b"access-control-allow-origin: %b\r\naccess-control-expose-headers: *\r\nvary: origin\r\n" % origin


def write_preflight_headers(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The response headers to a browser that asks whether it may send a request with these headers."""
    wanted = next((value for name, value in headers if name == b"access-control-request-headers"), b"content-type")
    return _PREFLIGHT % wanted


def list_own_names(address: str) -> list[str]:
    """The names of an endpoint that listens on `address`. The machine's own name counts beyond loopback only."""
    name = address.strip().lower().rstrip(".")
    own = [] if is_ip_address(name.encode()) else [name]
    if is_loopback(name):
        return own
    machine = socket.gethostname().lower().rstrip(".")
    first = machine.partition(".")[0]
    return [one for one in (*own, machine, first, f"{first}.local" if first else "") if one]


def is_loopback(address: str) -> bool:
    name = address.strip().lower().rstrip(".")
    return name == "localhost" or (
        is_ip_address(name.encode()) and ipaddress.ip_address(name.split("%")[0]).is_loopback
    )


def strip_port(value: bytes) -> bytes:
    """The host of `host:port`; of an IPv6 address, what is in the brackets."""
    if found := re.fullmatch(rb"\[([^\[\]]*)\](?::\d*)?", value):
        return found[1]
    name, mark, port = value.rpartition(b":")
    return name if mark and port.isdigit() and b":" not in name else value


def is_ip_address(name: bytes) -> bool:
    try:
        ipaddress.ip_address(name.decode("ascii").partition("%")[0])
    except ValueError:
        return False
    return True


def parse_host(text: str, field: str = "--allow-host") -> str:
    """Check the name of a host, without a port; `*` is any."""
    name = text.strip().lower().rstrip(".")
    if name == ANY or is_ip_address(name.encode("utf-8", "replace")) or re.fullmatch(r"[a-z0-9_]([a-z0-9._-]*)", name):
        return name
    raise UsageError(f"{field}: {text!r} is not a host name", hint="for example gpu1.example.com; * allows any")


def parse_origin(text: str, field: str = "--allow-origin") -> str:
    """Check an origin: `https://example.com`, or `null` for pages without one; `*` is any."""
    origin = text.strip().lower().rstrip("/")
    if origin in (ANY, "null") or re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s/?#@]+", origin, re.ASCII):
        return origin
    raise UsageError(f"{field}: {text!r} is not an origin", hint="for example https://chat.example.com; * allows any")
