"""The target of a load: an OpenAI-compatible endpoint, known only by its URL."""

from __future__ import annotations

from typing import Literal
from urllib.parse import SplitResult, urlsplit

from bedplate.errors import UsageError
from bedplate.values.record import Record

Api = Literal["completions", "chat"]
PATHS: dict[Api, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_HINT = "pass the endpoint's address, for example http://127.0.0.1:8000 or https://api.example.com/v1"


class LoadTarget(Record, frozen=True, kw_only=True):
    scheme: Literal["http", "https"]
    host: str
    port: int
    prefix: str = ""
    """The part of its paths before /v1."""
    model: str | None = None
    """`None`: the first model that the endpoint lists."""
    api: Api | None = None
    """`None`: completions, whose prompts are exact, if the endpoint has it; otherwise chat."""
    key: str | None = None

    @classmethod
    def from_url(
        cls, url: str, *, key: str | None = None, model: str | None = None, api: Api | None = None
    ) -> LoadTarget:
        """Parses a URL with or without /v1, or with the full path of one API."""
        parts, port = _split_url(url)
        path = parts.path.rstrip("/")
        for name, end in PATHS.items():
            if path.endswith(end):
                api, path = api or name, path.removesuffix(end)
        if key is not None and (not key or not key.isascii() or not key.isprintable() or " " in key):
            raise UsageError(
                "the API key contains characters that are invalid in an HTTP header", hint="check for a line break"
            )
        return cls(
            scheme="https" if parts.scheme == "https" else "http",
            host=parts.hostname or "",
            port=port,
            prefix=path.removesuffix("/v1"),
            model=model,
            api=api,
            key=key,
        )

    @property
    def url(self) -> str:
        """Without the key, and without /v1."""
        return f"{self.scheme}://{self.authority}{self.prefix}"

    @property
    def name(self) -> str:
        """The URL without its scheme, which names the endpoint in tables."""
        return f"{self.authority}{self.prefix}"

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        usual = 443 if self.scheme == "https" else 80
        return host if self.port == usual else f"{host}:{self.port}"

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """A complete HTTP request."""
        lines = [f"{method} {self.prefix}{path} HTTP/1.1", f"host: {self.authority}", "accept: */*"]
        lines.append("user-agent: bedplate")
        if self.key is not None:
            lines.append(f"authorization: Bearer {self.key}")
        if method == "POST":
            lines += ["content-type: application/json", f"content-length: {len(body)}"]
        return "\r\n".join((*lines, "", "")).encode("ascii") + body

    def hide_key(self, text: str) -> str:
        """Hides the key in a text, because endpoints repeat a rejected key in their errors."""
        return text.replace(self.key, "***") if self.key else text

    def __repr__(self) -> str:
        return f"Target({self.url!r}, model={self.model!r}, api={self.api!r}, key={'***' if self.key else None})"


def _split_url(url: str) -> tuple[SplitResult, int]:
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise UsageError("the endpoint's address is not a URL", cause=str(error), hint=_HINT) from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError("the endpoint's address is not an HTTP URL", hint=_HINT)
    if parts.username or parts.password or parts.query or parts.fragment:
        raise UsageError("the URL must not contain a user, query or fragment", hint="pass the key separately")
    if not (parts.hostname + parts.path).isascii() or not (parts.hostname + parts.path).isprintable():
        raise UsageError("the URL must be ASCII", hint="encode host names as xn--… and paths with %")
    return parts, port
