"""Endpoints elsewhere: their addresses, what is sent to them, and what their errors mean here."""

from __future__ import annotations

import ipaddress
import os
import ssl
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from bedplate.errors import UsageError
from bedplate.run.gateway.backend import GatewayBackend
from bedplate.run.gateway.errors import EngineError

if TYPE_CHECKING:
    from bedplate.run.gateway.heads import RequestHead

HOPS = b"x-bedplate-hops"
"""The header that counts how many bedplates a request has passed."""
MAX_HOPS = 3
_FORWARDED = frozenset(
    b"accept user-agent traceparent tracestate x-request-id anthropic-version anthropic-beta openai-beta".split()
)
"""Only these headers of a client leave the machine: others may contain its keys."""
_LOCAL_SUFFIXES = (".local", ".lan", ".internal", ".localhost", ".svc")
_HINT = "for example https://gpu-1.example.com/v1, or http://127.0.0.1:9000"
_OWN_FAILURES = {
    401: "rejected the API key",
    402: "requires a payment",
    403: "rejected the API key",
    429: "rejected the request: its rate limit is reached",
}
"""Statuses that concern the operator of this gateway, not its client."""


class RemoteAddress(msgspec.Struct, frozen=True):
    """The address of an endpoint elsewhere."""

    secure: bool
    host: str
    port: int
    prefix: str
    """The part of its paths before /v1."""

    @classmethod
    def from_url(cls, url: str, field: str = "url") -> RemoteAddress:
        """Parses a URL with or without /v1; raises `UsageError`."""
        try:
            parts = urlsplit(url)
            secure = parts.scheme == "https"
            port = parts.port or (443 if secure else 80)
        except ValueError as error:
            raise UsageError(f"{field}: is not a URL", cause=str(error), hint=_HINT) from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{field}: must be an http or https URL", hint=_HINT)
        if parts.username or parts.password or parts.query or parts.fragment:
            raise UsageError(f"{field}: must not contain a user, a query or a fragment", hint="key_env: API_KEY")
        text = parts.hostname + parts.path
        if not text.isascii() or not text.isprintable() or " " in text:
            raise UsageError(f"{field}: must be ASCII", hint="encode host names as xn--… and paths with %")
        return cls(secure, parts.hostname, port, parts.path.rstrip("/").removesuffix("/v1"))

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.secure else 80) else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """Without /v1."""
        return f"{'https' if self.secure else 'http'}://{self.authority}{self.prefix}"

    @property
    def is_loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def is_private(self) -> bool:
        """Whether a key may be sent there without encryption: to this machine, or within a private network."""
        try:
            return ipaddress.ip_address(self.host).is_private
        except ValueError:
            return "." not in self.host or self.host.endswith(_LOCAL_SUFFIXES)

    def format_head(self, head: RequestHead, key: str | None) -> bytes:
        """The head of a request, up to the value of Content-Length."""
        lines = [
            b"POST %b%b HTTP/1.1\r\nhost: %b\r\n" % (self.prefix.encode(), head.target, self.authority.encode()),
            b"content-type: %b\r\n" % head.content_type,
        ]
        if key:
            lines.append(b"authorization: Bearer %b\r\n" % key.encode())
        lines += [b"%b: %b\r\n" % header for header in head.headers if header[0] in _FORWARDED]
        lines.append(b"%b: %d\r\ncontent-length: " % (HOPS, count_hops(head) + 1))
        return b"".join(lines)


def count_hops(head: RequestHead) -> int:
    """How many bedplates have sent the request on."""
    for name, value in head.headers:
        if name == HOPS:
            return int(value) if value.isdigit() and len(value) < 3 else MAX_HOPS
    return 0


def read_key(key_env: str | None, address: RemoteAddress, field: str = "key_env") -> str | None:
    """The key in an environment variable; raises `UsageError` if it cannot or must not be sent."""
    if key_env is None:
        return None
    key = os.environ.get(key_env, "")
    if not key:
        raise UsageError(f"{field}: the environment variable {key_env} is not set", hint=f"export {key_env}=…")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise UsageError(
            f"{field}: the key in {key_env} has characters that are invalid in an HTTP header",
            hint="check for a space or a line break",
        )
    check_encryption(address, field)
    return key


def check_address(url: str, key_env: str | None) -> None:
    """Raises `UsageError` for what a gateway would refuse at its start, wherever that is."""
    address = RemoteAddress.from_url(url)
    if key_env is not None:
        check_encryption(address)


def check_encryption(address: RemoteAddress, field: str = "key_env") -> None:
    """Raises `UsageError` if a key must not be sent there."""
    if not address.secure and not address.is_private:
        raise UsageError(
            f"{field}: the key would be sent unencrypted to {address.host}",
            hint="use https; http with a key is accepted within a private network only",
        )


class RemoteBackend(GatewayBackend):
    """An OpenAI-compatible endpoint elsewhere as a backend of a model."""

    def __init__(self, model: str, address: RemoteAddress, key: str | None = None, *, sent_name: str = "") -> None:
        super().__init__(model, address.authority, group="elsewhere")
        self.remote = address
        self.address = (address.host, address.port)
        self.engine_key = key
        self.wants_name = True
        self.sent_name = sent_name or model
        self.connect_options = make_connect_options(address)
        self.retry_after_s = 5
        self.wait_s: float | None = None
        """How long requests wait while it cannot be reached, because it is started on demand."""

    @property
    def is_asleep(self) -> bool:
        return self.wait_s is not None and self.state == "restarting"

    def mark_unreachable(self, reason: str) -> None:
        """Gets no requests until its next check, if requests wait for it: they need not find out one by one."""
        if self.wait_s is not None and self.state == "ready":
            self.reason = reason
            self.state = "restarting"

    def explain_unavailable(self) -> str:
        if self.state == "stopped":
            return "bedplate is shutting down"
        return f"the endpoint {self.engine} cannot be used: {self.reason or 'it was not checked yet'}"

    def translate_error(self, error: EngineError) -> EngineError:
        what = _OWN_FAILURES.get(error.status)
        if error.status < 400:
            what = "answered with a redirect, which is not followed"
        elif error.status == 404 and error.code != "unsupported_api":
            what = f"does not serve the model {self.sent_name!r}"
        if what is None:
            message = error.message.replace(self.engine_key, "***") if self.engine_key else error.message
            return error._replace(message=message)
        status = 503 if error.status == 429 else 502
        message = f"the endpoint {self.engine} {what}"
        return EngineError(status, message, "endpoint_refused", None, "server_error", "endpoint_refused", False)


def make_connect_options(address: RemoteAddress) -> dict[str, Any]:
    """With TLS, certificates and names are verified. `SSL_CERT_FILE` adds a certification authority."""
    if not address.secure:
        return {}
    return {"ssl": ssl.create_default_context(), "server_hostname": address.host}
