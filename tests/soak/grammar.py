"""Generates hostile HTTP requests from a grammar: paths, headers, bodies, framing, and how a client sends them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bedplate.page.page import ACTIONS, FIGURES, LOG
from bedplate.run.gateway.pages import OLLAMA_SHOW, OWN_PAGES
from bedplate.run.gateway.sse import APIS, TRANSLATED

# Those of the gateway, the usual ones more often, and of engines.
API_PATHS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/v1/embeddings") * 4,
    *(path.decode() for path in (*APIS, *TRANSLATED)),
    OLLAMA_SHOW, ACTIONS, "/infill", "/completion", "/apply-template",
)  # fmt: skip
FORM_PATHS = frozenset(path.decode() for path, api in APIS.items() if api == "transcriptions")
PAGES = (
    *OWN_PAGES, FIGURES, LOG, "/v1/models/builtin", "/favicon.ico",
    "/props", "/slots", "/lora-adapters", "/shutdown", "/flush_cache", "/docs", "/openapi.json", "/server_info",
)  # fmt: skip
METHODS = ("GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT", "get", "POST\t", "M" * 300)
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 1e308, -1e-300, 2**63, 10**40, "", "a", "\u0000", "\ud83d\ude00" * 50, "x" * 20_000,
    [], {}, [[]], [None], {"": None}, [1, "a", {}], "../../etc/passwd", "'; drop table usage; --", "\x1b[2J\r\nforged",
    "\ud800 half a pair", 10**400,
)  # fmt: skip
FIELDS = (
    "model", "messages", "prompt", "input", "max_tokens", "max_completion_tokens", "n", "best_of", "n_predict",
    "stream", "stream_options", "temperature", "top_p", "top_k", "stop", "seed", "logprobs", "top_logprobs",
    "tools", "tool_choice", "response_format", "ignore_eos", "min_tokens", "max_new_tokens", "logit_bias", "user",
    "prompt_cache_key", "echo", "suffix", "images", "grammar", "samplers", "system", "metadata",
    "previous_response_id", "store", "encoding_format", "query", "documents", "top_n", "text_1", "text_2", "options",
    "format", "think", "keep_alive", "raw", "template", "context", "truncate", "dimensions", "instructions",
    "max_output_tokens", "content", "tokens", "add_special", "thinking", "text", "reasoning", "include",
)  # fmt: skip
SEPARATORS = (b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r", b"\r\n ", b"\x00\r\n")
MOST_TOKENS = 4
BOUNDARY = b"part"
ODD_BOUNDARIES = (b"", b"other", b'"part"', b'"part', b"p" * 80, b"part; boundary=other", b"--part")


@dataclass(frozen=True)
class HostileRequest:
    """What a client sends, and how it behaves."""

    parts: tuple[bytes, ...]
    """Sent one after the other, with a pause between."""
    pause_s: float
    ends: str
    """`reads` the answer, `resets` or `closes` after the last part, or `resets early` in the middle of the answer."""


def generate_request(random_: random.Random, model: str, key: str | None) -> HostileRequest:
    whole = b"".join(_generate_one(random_, model, key) for _ in range(random_.choice((1, 1, 1, 1, 2, 5))))
    if random_.random() < 0.1:
        whole = _flip_bytes(random_, whole)
    cuts = sorted(random_.randrange(len(whole) + 1) for _ in range(random_.choice((0, 0, 0, 1, 2, 6))))
    parts = tuple(whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True))
    if random_.random() < 0.1:
        parts = parts[:-1] or parts
    ends = random_.choice(("reads", "reads", "reads", "reads", "resets", "closes", "resets early"))
    return HostileRequest(parts, random_.choice((0.0, 0.0, 0.001, 0.05)), ends)


def _generate_one(random_: random.Random, model: str, key: str | None) -> bytes:
    is_api = random_.random() < 0.75
    method = "POST" if is_api else random_.choice(("GET", "GET", *METHODS))
    path = random_.choice(API_PATHS if is_api else PAGES)
    is_form = path in FORM_PATHS and random_.random() < 0.9
    body = b""
    if is_form:
        body = _generate_form(random_, model)
    elif is_api or random_.random() < 0.2:
        body = _generate_body(random_, model)
    framing, encoded = _frame_body(random_, body)
    version = random_.choice(("HTTP/1.1",) * 8 + ("HTTP/1.0", "HTTP/2.0", "HTTP/1.1 x", ""))
    first = f"{method} {_mutate_path(random_, path)} {version}".encode("latin-1", "replace")
    lines = [first, *_generate_headers(random_, key), *framing]
    if is_form:
        lines.append(b"Content-Type: multipart/form-data; boundary=" + random_.choice((BOUNDARY,) * 8 + ODD_BOUNDARIES))
    separator = random_.choice(SEPARATORS) if random_.random() < 0.05 else b"\r\n"
    return separator.join([*lines, b"", b""]) + encoded


def _mutate_path(random_: random.Random, path: str) -> str:
    changes: tuple[Callable[[str], str], ...] = (
        lambda text: text + "/",
        lambda text: text + "?" + "a=1&" * random_.randrange(200),
        lambda text: text.replace("/", "//"),
        lambda text: "/../.." + text,
        lambda text: "http://other.example" + text,
        lambda text: "/%00%2e%2e" + text,
        lambda text: text + "\x7f",
        lambda text: text + "x" * 9_000,
        lambda text: text.upper(),
        lambda text: "*",
    )
    return random_.choice(changes)(path) if random_.random() < 0.15 else path


def _generate_headers(random_: random.Random, key: str | None) -> list[bytes]:
    headers = [random_.choice((b"Host: 127.0.0.1", b"Host: localhost", b"host:127.0.0.1:1"))]
    if key is not None and random_.random() < 0.9:
        headers.append(random_.choice((b"Authorization: Bearer ", b"x-api-key: ")) + key.encode())
    odd = (
        b"Authorization: Bearer bp-forged", b"Authorization: Basic YTpi", b"Content-Type: text/plain",
        b"Content-Type: multipart/form-data; boundary=x", b"Expect: 100-continue", b"Connection: close",
        b"Connection: upgrade\r\nUpgrade: websocket", b"Content-Encoding: gzip", b"Accept-Encoding: gzip, br",
        b"Origin: http://other.example", b"Host: other.example", b"X-Forwarded-For: 1.2.3.4\r\nForwarded: for=1.2.3.4",
        b"Cookie: " + b"a=b;" * 500, b"X: " + b"y" * 70_000, b": empty", b"No colon", b"X-Nul: a\x00b", b"X\xff: \xff",
        b"X-Fold: a\r\n folded", b"Range: bytes=0-1", b"TE: trailers", b"X-Request-Id: \x1b[31mred",
        b"anthropic-version: 1",
    )  # fmt: skip
    headers += [random_.choice(odd) for _ in range(random_.choice((0, 0, 0, 1, 2, 4)))]
    if random_.random() < 0.02:
        headers += [b"X-%d: 1" % number for number in range(2_000)]
    random_.shuffle(headers)
    return headers


def _frame_body(random_: random.Random, body: bytes) -> tuple[list[bytes], bytes]:
    """Headers that say how long the body is, and the body as it is sent: mostly consistent, sometimes not."""
    length = b"Content-Length: %d" % len(body)
    chance = random_.random()
    if chance < 0.70:
        return [length], body
    if chance < 0.85:
        return [b"Transfer-Encoding: chunked"], _chunk_body(random_, body)
    wrong: tuple[tuple[list[bytes], bytes], ...] = (
        ([b"Content-Length: %d" % (len(body) + 5)], body),
        ([b"Content-Length: %d" % max(0, len(body) - 5)], body),
        ([b"Content-Length: -1"], body),
        ([b"Content-Length: 0x10"], body),
        ([b"Content-Length: +3"], body),
        ([b"Content-Length: %d" % 10**30], body),
        ([length, b"Content-Length: 1"], body),
        ([length, b"Transfer-Encoding: chunked"], _chunk_body(random_, body)),
        ([b"Transfer-Encoding: chunked, identity"], body),
        ([b"Transfer-Encoding: xchunked"], body),
        ([b"Transfer-Encoding:\x0bchunked"], _chunk_body(random_, body)),
        ([], body),
    )
    return random_.choice(wrong)


def _chunk_body(random_: random.Random, body: bytes) -> bytes:
    sent, at = b"", 0
    while at < len(body):
        size = random_.choice((1, 7, 100, 4096, 65_536))
        part = body[at : at + size]
        extension = random_.choice((b"", b"", b"", b";a=b", b";" + b"x" * 300))
        sent += b"%x" % len(part) + extension + b"\r\n" + part + b"\r\n"
        at += size
    end = random_.choice(
        (b"0\r\n\r\n",) * 8 + (b"0\r\nX-Trailer: 1\r\n\r\n", b"-1\r\n\r\n", b"ffffffffffffffff1\r\n", b"")
    )
    return sent + end


def _generate_body(random_: random.Random, model: str) -> bytes:
    fields: dict[str, Any] = {
        "model": model, "messages": _generate_messages(random_), "prompt": _generate_prompt(random_), "input": "a b c",
        "max_tokens": MOST_TOKENS, "stream": random_.random() < 0.5,
    }  # fmt: skip
    for _ in range(random_.choice((0, 0, 1, 1, 2, 5))):
        fields[random_.choice(FIELDS)] = random_.choice(ODD_VALUES)
    # Nothing here asks for a long answer: the time is for many requests.
    for name in ("max_tokens", "max_completion_tokens", "n_predict", "max_new_tokens", "min_tokens", "n", "best_of"):
        if isinstance(value := fields.get(name), int | float) and not isinstance(value, bool) and value > MOST_TOKENS:
            fields[name] = MOST_TOKENS
    if random_.random() < 0.1:
        del fields[random_.choice(list(fields))]
    text = json.dumps(fields)
    chance = random_.random()
    if chance < 0.03:
        return b"[" * random_.choice((10, 50_000))
    if chance < 0.06:
        return text[: random_.randrange(len(text))].encode()
    if chance < 0.09:
        return text.encode().replace(b"a", b"\xff")
    if chance < 0.11:
        return (text[:-1] + "," + text[1:]).encode()
    return text.encode()


def _generate_form(random_: random.Random, model: str) -> bytes:
    silence = b"RIFF" + b"\x40\x1f\x00\x00" * 20
    audio = random_.choice((silence, silence, b"", b"--part", b"\r\n" * 50, b"x" * 9_000))
    parts = [(b'name="model"', model.encode()), (b'name="file"; filename="a.wav"', audio)]
    for _ in range(random_.choice((0, 0, 1, 2, 80))):
        names = (b"response_format", b"stream", b"language", b"prompt", b"temperature", b"model", b"file", b"", b'a"b')
        values = (b"json", b"srt", b"verbose_json", b"vtt", b"true", b"0", b"", b"\xff\x00", b"x" * 9_000, b"\r\n\r\n")
        extra = random_.choice((b"", b"", b'; filename="b"', b'; name="file"', b"; filename*=utf-8''b", b"\r\nX: y"))
        parts.append((b'name="' + random_.choice(names) + b'"' + extra, random_.choice(values)))
    random_.shuffle(parts)
    mark = b"--" + BOUNDARY
    disposition = random_.choice((b"Content-Disposition: form-data; ",) * 8 + (b"", b"content-disposition:file;"))
    whole = b"".join(mark + b"\r\n" + disposition + head + b"\r\n\r\n" + value + b"\r\n" for head, value in parts)
    return whole + random_.choice((mark + b"--\r\n",) * 8 + (b"", mark, mark + b"--" + b"\r\n" * 100 + mark))


def _generate_messages(random_: random.Random) -> Any:
    if random_.random() < 0.1:
        return random_.choice(ODD_VALUES)
    content: tuple[Any, ...] = (
        "Hello", "Hello", "Hello", [{"type": "text", "text": "Hello"}], None, 5, [],
        [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
        [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}], [{"type": "input_audio"}],
        {"a": 1}, "\u202e" * 30,
    )  # fmt: skip
    roles = ("user", "user", "user", "system", "assistant", "tool", "developer", "nobody", "", 7, None)
    return [
        {"role": random_.choice(roles), "content": random_.choice(content)}
        for _ in range(random_.choice((0, 1, 1, 1, 2, 3)))
    ]


def _generate_prompt(random_: random.Random) -> Any:
    return random_.choice(
        ("a b", "a b", ["a"] * 3, [1, 2, 3], [[1], [2]], [10**9], [-1], [[]], ["a", 1], "", *ODD_VALUES[:8])
    )


def _flip_bytes(random_: random.Random, whole: bytes) -> bytes:
    changed = bytearray(whole)
    for _ in range(random_.choice((1, 3, 20))):
        changed[random_.randrange(len(changed))] = random_.randrange(256)
    return bytes(changed)
