"""Rerank, score and classify requests: what they must contain. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec

from bedplate.run.gateway import sse
from bedplate.run.gateway.tenants import BYTES_PER_TOKEN, Demand, Rejection
from bedplate.values.capabilities import Capabilities

MAX_TEXTS = 2048
"""The most texts in one request, also for embeddings, as in OpenAI's API. They hold one slot."""
_Texts = Annotated[list[str], msgspec.Meta(min_length=1, max_length=MAX_TEXTS)]


class _TextPart(msgspec.Struct):
    text: str


class _Rerank(msgspec.Struct):
    query: str
    documents: Annotated[list[str | _TextPart], msgspec.Meta(min_length=1, max_length=MAX_TEXTS)]
    top_n: Annotated[int, msgspec.Meta(ge=1)] | None = None


class _Score(msgspec.Struct):
    text_1: str | _Texts
    text_2: str | _Texts


class _Classify(msgspec.Struct):
    input: str | Annotated[list[str | int | list[int]], msgspec.Meta(min_length=1, max_length=MAX_TEXTS)]


_DECODERS: dict[sse.Api, msgspec.json.Decoder[Any]] = {
    "rerank": msgspec.json.Decoder(_Rerank),
    "score": msgspec.json.Decoder(_Score),
    "classify": msgspec.json.Decoder(_Classify),
}
TASK_APIS = frozenset(_DECODERS)


def read_task(api: sse.Api, body: bytes, known: Capabilities | None) -> Demand | Rejection:
    """What a request demands, or why it is rejected. It is one batch, which holds one slot."""
    if known is not None and known.generation:
        message = f"this model generates text; serve a reranker, a classifier or an embedding model for {api}"
        return Rejection(400, message, "unsupported_task", 0, "model")
    try:
        found = _DECODERS[api].decode(body)
    except sse.UNREADABLE as error:
        text, _, where = str(error).replace("`", "").partition(" - at ")
        param = where.removeprefix("$.").partition("[")[0].strip() or None
        message = f"the {api} request is not valid: {text}{f' at {param}' if param else ''}"
        return Rejection(400, message, "invalid_request", 0, param)
    if api == "score" and isinstance(found.text_1, list) and isinstance(found.text_2, list):
        first, second = len(found.text_1), len(found.text_2)
        if first not in (1, second):
            message = f"text_1 has {first} texts and text_2 has {second}: text_1 must be one text, or as many"
            return Rejection(400, message, "invalid_request", 0, "text_1")
    if api == "score" and isinstance(found.text_1, list) and isinstance(found.text_2, str) and len(found.text_1) > 1:
        return Rejection(400, "text_2 must have as many texts as text_1", "invalid_request", 0, "text_2")
    return Demand(1, 1, _estimate_tokens(found), 0)


def _estimate_tokens(asked: _Rerank | _Score | _Classify) -> int:
    """About how many tokens are computed: a query once for each of its documents."""
    if isinstance(asked, _Classify):
        texts = [asked.input] if isinstance(asked.input, str) else asked.input
        ids = sum(1 if isinstance(one, int) else len(one) for one in texts if not isinstance(one, str))
        return ids + _count_bytes(one for one in texts if isinstance(one, str)) // BYTES_PER_TOKEN
    if isinstance(asked, _Rerank):
        queries, texts = [asked.query], [one if isinstance(one, str) else one.text for one in asked.documents]
    else:
        queries = [asked.text_1] if isinstance(asked.text_1, str) else asked.text_1
        texts = [asked.text_2] if isinstance(asked.text_2, str) else asked.text_2
    times = len(texts) if len(queries) == 1 else 1
    return (times * _count_bytes(queries) + _count_bytes(texts)) // BYTES_PER_TOKEN


def _count_bytes(texts: Iterable[str]) -> int:
    return sum(len(one.encode()) for one in texts)
