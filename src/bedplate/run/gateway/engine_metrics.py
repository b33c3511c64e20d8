"""The engines' own Prometheus metrics: one page, under their own names, with labels for the model and the replica."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from http import HTTPStatus
from itertools import count
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from bedplate.run.gateway.backend import AdapterBackend

if TYPE_CHECKING:
    import aiohttp

    from bedplate.run.gateway.backend import GatewayBackend
    from bedplate.run.gateway.routes import Route

TIMEOUT_S = 5.0
"""An engine that does not answer within this time is left out, before Prometheus' own timeout of 10 s."""
MAX_BYTES = 1 << 20
"""An engine whose metrics are larger is left out."""
REACHED = "bedplate_engine_metrics_up"
_TYPES = frozenset(("counter", "gauge", "histogram", "summary", "untyped"))
_NOTE = re.compile(r"# (HELP|TYPE) ([a-zA-Z_:][\w:]*) ?(.*)", re.ASCII)
_SAMPLE = re.compile(
    r'([a-zA-Z_:][\w:]*)(?:\{((?:\s*[a-zA-Z_]\w*="(?:[^"\\]|\\.)*"\s*,?)*)\})?'
    r"[ \t]+([+-]?(?:[\d.]+(?:[eE][+-]?\d+)?|Inf|NaN))(?:[ \t]+-?\d+)?\s*",
    re.ASCII,
)
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"', re.ASCII)
_OWN_LABELS = ("model", "engine", "replica")
_SUFFIXES = ("_bucket", "_sum", "_count", "_total", "_created")


class ScrapedMetrics(NamedTuple):
    """The metrics page of one engine."""

    labels: str
    """In Prometheus' notation, without braces."""
    text: str | None
    """`None`: it did not answer, or has no metrics."""


class _Family:
    """The samples of one metric, of all engines."""

    def __init__(self) -> None:
        self.kind: str | None = None
        self.help = ""
        self.samples: list[str] = []


class EngineMetricsPage:
    """Collects the metrics pages of all engines that are ready. Scrapes at the same time share one collection."""

    def __init__(self) -> None:
        self._numbers: WeakKeyDictionary[GatewayBackend, int] = WeakKeyDictionary()
        """An engine keeps its number while others come and go, so that its counters stay counters."""
        self._next: dict[tuple[str, str], count[int]] = {}
        self._running: asyncio.Task[bytes] | None = None

    async def render(self, routes: Iterable[Route]) -> bytes:
        if self._running is None or self._running.done():
            self._running = asyncio.ensure_future(self._collect(list(routes)))
        return await asyncio.shield(self._running)

    async def _collect(self, routes: list[Route]) -> bytes:
        import aiohttp

        engines = [
            backend
            for route in routes
            for backend in route.backends
            # An endpoint elsewhere has its own page, and an adapter is a part of its engine.
            if backend.state == "ready" and backend.remote is None and not isinstance(backend, AdapterBackend)
        ]
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S), trust_env=False) as session:
            texts = await asyncio.gather(*(_read_page(session, backend) for backend in engines))
        pages = [
            ScrapedMetrics(self._write_labels(backend), text) for backend, text in zip(engines, texts, strict=True)
        ]
        return merge_pages(pages).encode()

    def _write_labels(self, backend: GatewayBackend) -> str:
        key = backend.model, backend.engine
        if backend not in self._numbers:
            self._numbers[backend] = next(self._next.setdefault(key, count()))
        values = {"model": backend.model, "engine": backend.engine, "replica": str(self._numbers[backend])}
        return ",".join(f'{name}="{_escape(value)}"' for name, value in values.items())


async def _read_page(session: aiohttp.ClientSession, backend: GatewayBackend) -> str | None:
    import aiohttp

    if backend.address is None:
        return None
    headers = {"Authorization": f"Bearer {backend.engine_key}"} if backend.engine_key else {}
    url = f"http://{backend.address[0]}:{backend.address[1]}/metrics"
    try:
        async with session.get(url, headers=headers, allow_redirects=False) as answer:
            if answer.status != HTTPStatus.OK:
                return None
            body = b""
            async for part in answer.content.iter_any():
                body += part
                if len(body) > MAX_BYTES:
                    return None
            return body.decode("utf-8", "replace")
    except (aiohttp.ClientError, TimeoutError, OSError):
        return None


def merge_pages(pages: list[ScrapedMetrics]) -> str:
    """One page with the samples of all, each family once. Lines that are not in Prometheus' format are left out."""
    families: dict[str, _Family] = {REACHED: _Family()}
    families[REACHED].kind = "gauge"
    families[REACHED].help = "Whether the engine's own metrics were read"
    for page in pages:
        families[REACHED].samples.append(f"{REACHED}{{{page.labels}}} {int(page.text is not None)}")
        if page.text is not None:
            _add_page(families, page.labels, page.text)
    lines: list[str] = []
    for name, family in families.items():
        if not family.samples:
            continue
        if family.help:
            lines.append(f"# HELP {name} {family.help}")
        lines.append(f"# TYPE {name} {family.kind or 'untyped'}")
        lines += family.samples
    return "\n".join(lines) + "\n"


def _add_page(families: dict[str, _Family], labels: str, text: str) -> None:
    own: dict[str, str] = {}
    """The types that this page states."""
    for line in text.splitlines():
        if note := _NOTE.fullmatch(line):
            kind, name, rest = note.groups()
            family = families.setdefault(name, _Family())
            if kind == "HELP":
                family.help = family.help or rest
            elif rest.strip() in _TYPES:
                own[name] = rest.strip()
                family.kind = own[name] if family.kind in (None, own[name]) else "untyped"
        elif (found := _SAMPLE.fullmatch(line)) and not found[1].startswith(REACHED):
            # The engine's own label of the same name is kept as Prometheus keeps it.
            given = [
                f'{"exported_" if label in _OWN_LABELS else ""}{label}="{value}"'
                for label, value in _LABEL.findall(found[2] or "")
            ]
            name = _find_family(found[1], own)
            families.setdefault(name, _Family()).samples.append(
                f"{found[1]}{{{','.join((labels, *given))}}} {found[3]}"
            )


def _find_family(sample: str, known: dict[str, str]) -> str:
    if sample in known:
        return sample
    for suffix in _SUFFIXES:
        if sample.endswith(suffix) and (name := sample.removesuffix(suffix)) in known:
            return name
    return sample


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
