"""Error responses in the format of the API that was called, and engines' errors in terms of bedplate. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from bedplate.run.gateway import sse

if TYPE_CHECKING:
    from bedplate.engines import KnownMistake

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_OPTION_SENTENCE = re.compile(r"[^.;!?\n]*(?<![\w-])--[a-zA-Z][\w-]+[^.;!?\n]*[.;!?]?")
"""A sentence that names a command-line option."""
MAX_MESSAGE = 2000
UNKNOWN_API = (404, 405, 501)
_UNKNOWN_PATHS = frozenset(["not found", "file not found", "404 page not found", "method not allowed"])
"""How servers answer a request to a path that they do not have."""


class ReportedError(NamedTuple):
    """The error that an engine's response reports."""

    message: str
    kind: str
    code: str | None
    param: str | None


class EngineError(NamedTuple):
    """An error of an engine, as the client gets it."""

    status: int
    message: str
    code: str | None
    param: str | None
    kind: str
    reason: str
    """For the usage records and the metrics: one of a fixed number of words."""
    by_client: bool
    """Whether the client caused it for certain."""


def encode_error(
    api: sse.Api, status: int, message: str, kind: str, code: str | None, param: str | None = None
) -> bytes:
    if api == "messages":
        shown = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        return msgspec.json.encode({"type": "error", "error": {"type": shown, "message": message}})
    return sse.encode_error(message, kind, code, param)


def encode_error_at(path: bytes, status: int, message: str, kind: str, code: str) -> bytes:
    """The error in the format of the API at this path, for a request that was not read to its end."""
    if path.startswith(b"/api/"):
        return msgspec.json.encode({"error": message})
    api = sse.CHECKED_AS.get(path) or sse.TRANSLATED.get(path, "other")
    return encode_error(api, status, message, kind, code)


def read_error(status: int, body: bytes) -> ReportedError:
    """The fields of an error response of any format."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    try:
        answer = msgspec.json.decode(body)
    except sse.UNREADABLE:
        text = body[:MAX_MESSAGE].decode("utf-8", "replace").strip()
        return ReportedError(text or f"the engine answered with status {status}", kind, None, None)
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    if not isinstance(error, dict):
        return ReportedError(str(error), kind, None, None)
    message = error.get("message") or error.get("detail") or msgspec.json.encode(error).decode()
    code, param = error.get("code"), error.get("param")
    code = None if code is None or code == status else str(code)
    return ReportedError(str(message), str(error.get("type") or kind), code, param if isinstance(param, str) else None)


def read_engine_error(
    status: int, body: bytes, path: bytes, find_mistake: Callable[[str], KnownMistake | None] | None
) -> EngineError:
    """The error response of an engine, of any format."""
    error = read_error(status, body)
    mistake = find_mistake(error.message) if find_mistake is not None else None
    if mistake is not None:
        shown = status if 400 <= status < 500 else 400
        param = error.param or mistake.param
        kind = "invalid_request_error"
        return EngineError(shown, mistake.message, mistake.code, param, kind, mistake.code, by_client=True)
    if status in UNKNOWN_API and error.message.lower() in _UNKNOWN_PATHS:
        message = f"this model is served by an engine without {path.decode('latin-1')}"
        if sse.APIS.get(path) not in ("embeddings", "rerank", "score", "classify", "transcriptions"):
            message += "; try /v1/chat/completions"
        kind, code = "invalid_request_error", "unsupported_api"
        return EngineError(404, message, code, None, kind, code, by_client=False)
    reason = "engine_error" if status >= 500 else "refused_by_engine"
    message = remove_options(error.message) or "the engine rejected the request"
    return EngineError(status, message, error.code, error.param, error.kind, reason, by_client=False)


def remove_options(message: str) -> str:
    """The message without sentences about the engine's options, which a client of bedplate cannot set."""
    return _OPTION_SENTENCE.sub("", message).strip() if "--" in message else message
