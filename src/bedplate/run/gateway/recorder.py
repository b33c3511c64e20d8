"""A thread that writes the shapes of requests to the store, and reads tenants and keys from it."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from bedplate import store
from bedplate.errors import ExternalFailure
from bedplate.run.gateway.tenants import KeyDigest
from bedplate.usage_store import TenantRows, open_usage_store
from bedplate.values.tenant import Tenant
from bedplate.values.traffic import ServedRequest

if TYPE_CHECKING:
    from bedplate.run.gateway.shared_limits import SharedLimits

WRITE_EVERY_S = 0.25
"""A killed gateway loses at most the last second, also where a write itself takes half of that."""
CHECK_EVERY_S = 0.5
MOST_PENDING = 50_000
"""Limit of the requests that wait to be written; further ones are counted and not written."""
KEEP_DAYS = 30
KEEP_REQUESTS = 1_000_000
"""Beyond either limit, only the totals of each day are kept."""
FOLD_EVERY_S = 600.0
CLOSE_LIMIT_S = 5.0
MOST_CONTENT_BYTES = 64_000_000
"""Limit of the contents that wait to be written."""
_LOG = "log requests"
_KEEP_CONTENT = "write requests and answers"
_READ_KEYS = "read changed keys"


class RequestContent(NamedTuple):
    """The content of a request and its answer."""

    target: bytes
    asked: bytes
    answered: bytes
    """The body, or all events of a stream, as the client received them."""


Changed = Callable[[tuple[Tenant, ...], tuple[KeyDigest, ...]], None]


class RequestRecorder:
    """Writes requests to the store in batches, and detects changes of the tenants in it.

    A full or slow disk never delays a request: requests that cannot be written are counted in `lost`.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        content: Path | None = None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Raises when the store exists and cannot be read, since the valid keys would be unknown.

        With `content`, requests and answers are written to files in that folder, which only their owner can read.
        """
        self._usage = open_usage_store(path)
        self.content = content
        self.lost = 0
        """Requests that could not be written."""
        self.written = 0
        self.listeners: list[Callable[[ServedRequest], None]] = []
        """Called for each request that has ended, in the gateway's loop, so they must be fast."""
        self._note = note
        self._pending: deque[ServedRequest] = deque()
        self._contents: deque[tuple[ServedRequest, RequestContent]] = deque()
        self._content_bytes = 0
        self._failing: set[str] = set()
        """What has failed and not succeeded since, each noted once."""
        self._writer = self._usage.make_writer()
        """Used by the thread, except `keep`."""
        self._batching = threading.Lock()
        """Held for microseconds, so that each noted request is in the batch that follows."""
        self._wake = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._changed: Changed = lambda tenants, keys: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._seen: object = self._usage.read_version()
        self._rows = self._usage.read_tenants_and_digests()
        self.tenants, self.keys = _list_tenants(self._rows)
        self._keys_existed = self._usage.have_keys_existed()
        self.salt = self._read_salt()
        if self.keys:  # they may have been added by a version that did not write the marker
            with contextlib.suppress(ExternalFailure):
                self._usage.mark_keys_exist()
        if content is not None:
            _create_private_folder(content)

    @property
    def requires_key(self) -> bool:
        """Whether keys exist or have existed, so that a request without a valid one is rejected."""
        return bool(self.keys) or self._keys_existed

    def make_shared_limits(self) -> SharedLimits | None:
        """The limits that this gateway shares with others; `None`: it has its own."""
        limits = self._usage.make_limits()
        if limits is None:
            return None
        from bedplate.run.gateway.shared_limits import SharedLimits

        return SharedLimits(limits, self._note)

    # called in the gateway's loop

    def start(self, changed: Changed) -> None:
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run_thread, name="bedplate-keeper", daemon=True)
        self._thread.start()

    def add(self, request: ServedRequest) -> None:
        for listener in self.listeners:
            listener(request)
        if len(self._pending) >= MOST_PENDING:
            self.lost += 1
        else:
            with self._batching:
                self._writer.keep(request)
                self._pending.append(request)

    def add_content(self, request: ServedRequest, words: RequestContent) -> None:
        if self._content_bytes < MOST_CONTENT_BYTES:
            self._content_bytes += len(words.asked) + len(words.answered)
            self._contents.append((request, words))

    async def stop(self) -> None:
        """Writes the remaining requests."""
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._thread.join, CLOSE_LIMIT_S)

    # called in its own thread

    def _run_thread(self) -> None:
        fold_at, check_at = time.monotonic() + FOLD_EVERY_S / 10, 0.0
        self._check_for_changes()  # it connects: the first record must not wait for that
        with contextlib.suppress(ExternalFailure):
            self._writer.recover()
        while not self._stopping:
            self._wake.wait(WRITE_EVERY_S)
            self._write()
            if time.monotonic() >= check_at:
                self._check_for_changes()
                check_at = time.monotonic() + CHECK_EVERY_S
            if time.monotonic() > fold_at:
                fold_at = time.monotonic() + FOLD_EVERY_S
                with contextlib.suppress(ExternalFailure):
                    self._usage.fold_requests(time.time() - KEEP_DAYS * 86_400, KEEP_REQUESTS)
        self._write()
        self._writer.close()

    def _write(self) -> None:
        batch = []
        if self._pending:
            self._writer.prepare()
            with self._batching:
                self._writer.seal()
                while self._pending:
                    batch.append(self._pending.popleft())
        if batch:
            try:
                self._writer.add(batch)
                self.written += len(batch)
                self._failing.discard(_LOG)
            except ExternalFailure as error:
                # The next attempt writes them again, as far as the limit permits.
                room = max(0, MOST_PENDING - len(self._pending))
                self.lost += max(0, len(batch) - room)
                self._pending.extendleft(reversed(batch[len(batch) - min(room, len(batch)) :]))
                self._note_once(_LOG, f"{error.message}: {error.cause}; serving continues")
        self._write_contents()

    def _write_contents(self) -> None:
        while self._contents and self.content is not None:
            one, words = self._contents.popleft()
            self._content_bytes -= len(words.asked) + len(words.answered)
            moment = dt.datetime.fromtimestamp(one.at_s, dt.UTC)
            line = msgspec.json.encode(
                {
                    "at": moment.isoformat(),
                    "tenant": one.tenant,
                    "model": one.model,
                    "api": one.api,
                    "status": one.status,
                    "asked": words.asked.decode("utf-8", "replace"),
                    "answered": words.answered.decode("utf-8", "replace"),
                }
            )
            try:
                _append(self.content / f"requests-{moment:%Y-%m-%d}.jsonl", line + b"\n")
                self._failing.discard(_KEEP_CONTENT)
            except OSError as error:
                self._note_once(_KEEP_CONTENT, f"{self.content}: {error.strerror}; serving continues")

    def _check_for_changes(self) -> None:
        """Tells the gateway about changed tenants. While the store cannot be read, the last ones stay valid."""
        # The files change before a write becomes visible, so the connection knows better if there is one.
        try:
            mark = self._writer.read_foreign_version() or self._usage.read_version()
            rows = self._rows
            if mark != self._seen:
                rows = self._usage.read_tenants_and_digests()
                self._keys_existed = self._keys_existed or self._usage.have_keys_existed()
        except ExternalFailure as error:
            self._note_once(_READ_KEYS, f"{error.message}; the previous keys stay valid")
            return
        self._failing.discard(_READ_KEYS)
        self._seen = mark
        if rows is self._rows:
            return
        self._rows = rows
        tenants, keys = _list_tenants(rows)
        if (tenants, keys) != (self.tenants, self.keys) and self._loop is not None:
            self.tenants, self.keys = tenants, keys
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._changed, tenants, keys)

    def _read_salt(self) -> bytes:
        try:
            return self._usage.get_salt()
        except ExternalFailure as error:
            if self.keys:
                raise
            self._note_once(_LOG, f"{error.message}; serving continues")
            return secrets.token_bytes(store.SALT_BYTES)

    def _note_once(self, action: str, why: str) -> None:
        if action not in self._failing:
            self._failing.add(action)
            self._note(f"cannot {action}: {why}")


def _list_tenants(rows: TenantRows) -> tuple[tuple[Tenant, ...], tuple[KeyDigest, ...]]:
    keys = tuple(
        KeyDigest(digest, tenant.name, _to_seconds(key.expires_at))
        for tenant, digests in rows
        for key, digest in zip(tenant.keys, digests, strict=True)
    )
    return tuple(tenant for tenant, _ in rows), keys


def _to_seconds(at: str | None) -> float | None:
    return dt.datetime.fromisoformat(at).timestamp() if at is not None else None


def _create_private_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        hint = "choose a folder that you may write to, or leave out --log-content"
        raise ExternalFailure(f"cannot write to {folder}", cause=error.strerror or str(error), hint=hint) from error


def _append(path: Path, line: bytes) -> None:
    number = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(number, line)
    finally:
        os.close(number)
