"""A challenger that already runs at another URL, on its own device."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from bedplate.errors import UsageError
from bedplate.measure.answers import EngineAddress
from bedplate.measure.load import LoadTarget, prepare
from bedplate.values.run import Load, Subject

REHEARSED = Load(concurrency=1, prompt_tokens=64, output_tokens=16)
"""Small load that finds out which request fields an endpoint accepts."""
UNKNOWN_ELSEWHERE = ("quantization",)
"""Properties that are unknown for such a challenger. They are reported, and its answers are compared instead."""
TELL_LIMIT_S = 10.0


class RemoteChallenger(NamedTuple):
    where: EngineAddress
    url: str
    engine: str
    engine_version: str | None
    fields: tuple[str, ...]
    """Request fields that fix the number of output tokens."""

    @property
    def display_name(self) -> str:
        return f"{self.engine} {self.engine_version}" if self.engine_version else self.engine

    def to_subject(self, model: str) -> Subject:
        return Subject(engine=self.engine, engine_version=self.engine_version, model=model, url=self.url)


async def probe_url(url: str, key: str | None, served_model: str | None, engine: str) -> RemoteChallenger:
    """Probe the endpoint with a few small requests. Raises if it does not answer or reports another engine.

    `engine`: an engine, or the name of the endpoint, whose engine may be any.
    """
    target = LoadTarget.from_url(url, key=key, model=served_model)
    prepared = await prepare(target, REHEARSED)
    reported, version = parse_engine(await _read_model_list(target), prepared.model)
    if reported is not None and engine not in (reported, target.name):
        raise UsageError(f"{prepared.model} at {target.url} is served by {reported}, not by {engine}")
    where = EngineAddress(target.url, target.key, prepared.model)
    return RemoteChallenger(where, target.url, engine, version, prepared.fields)


async def _read_model_list(target: LoadTarget) -> bytes:
    """The body of its model list; empty if it cannot be read."""
    import aiohttp

    headers = {"Authorization": f"Bearer {target.key}"} if target.key else {}
    timeout = aiohttp.ClientTimeout(total=TELL_LIMIT_S)
    try:
        async with (
            aiohttp.ClientSession(headers=headers, timeout=timeout) as session,
            session.get(f"{target.url}/v1/models") as answer,
        ):
            return await answer.read()
    except (aiohttp.ClientError, TimeoutError, OSError):
        return b""


def parse_engine(listed: bytes, model: str) -> tuple[str | None, str | None]:
    """The engine and its version, which only endpoints of bedplate report."""
    try:
        rows: list[Any] = msgspec.json.decode(listed)["data"]
        row = next(row for row in rows if row["id"] == model)
        engine, version = row.get("engine"), row.get("engine_version")
    except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError, AttributeError, StopIteration):
        return None, None
    return (engine if isinstance(engine, str) else None), (version if isinstance(version, str) and version else None)
