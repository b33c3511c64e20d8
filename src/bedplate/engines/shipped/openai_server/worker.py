"""The engine's thread and its request queue."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import os
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .backend import BackendError, EngineBackend, Finish, GenerationRequest, Piece, Text
from .text import Detokenizer, StopStringFilter

PROGRESS_MARK = "bedplate-engine: loading "


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Delta:
    """The next part of a response."""

    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None
    error: BackendError | None = None


class AnswerStream:
    """A request in the worker: converts pieces to text and counts tokens."""

    def __init__(self, request: GenerationRequest, text: Text | None, put: Callable[[Delta], None]) -> None:
        self.request = request
        self.put = put
        self.prompt_tokens = len(request.prompt)
        self.cached_tokens: int | None = None
        self.completion_tokens = 0
        self.cancelled = False
        self.done = False
        self._text = text
        self._detokenizer = Detokenizer(text.decode) if text is not None else None
        self._stop = StopStringFilter(request.stop)

    def feed(self, piece: Piece) -> Delta:
        """Add one piece. If it ends the answer, `done` is set."""
        if piece.prompt_tokens is not None:
            self.prompt_tokens = piece.prompt_tokens
        if piece.cached_tokens is not None:
            self.cached_tokens = piece.cached_tokens
        if piece.error is not None:
            self.done = True
            return Delta(error=BackendError(piece.error, status=500))
        self.completion_tokens += piece.tokens
        text = piece.text
        if text is None:
            text = self._detokenizer.feed(piece.token) if self._detokenizer and piece.token is not None else ""
        finish = piece.finish
        if finish is None and self.completion_tokens >= self.request.max_tokens:
            finish = "length"
        if finish is not None and self._detokenizer is not None and piece.text is None:
            text += self._detokenizer.flush()
        text = self._stop.feed(text)
        if self._stop.found:
            finish = "stop"
        elif finish is not None:
            text += self._stop.flush()
        self.done = finish is not None
        return Delta(text=text, logprobs=self._make_logprobs(piece), finish=finish)

    def _make_logprobs(self, piece: Piece) -> tuple[TokenLogprob, ...]:
        if self.request.logprobs is None or piece.logprob is None:
            return ()
        top = tuple((self._decode_token(token), logprob) for token, logprob in piece.top[: self.request.logprobs])
        text = self._decode_token(piece.token) if piece.token is not None else piece.text or ""
        return (TokenLogprob(text=text, logprob=piece.logprob, top=top),)

    def _decode_token(self, token: int | str) -> str:
        if isinstance(token, str):
            return token
        return self._text.decode([token]) if self._text is not None else str(token)

    def count_usage(self) -> dict[str, Any]:
        counts: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }
        if self.cached_tokens is not None:
            counts["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        return counts


class EngineWorker:
    """The engine's thread and its request queue."""

    def __init__(self, backend: EngineBackend, options: argparse.Namespace, loop: asyncio.AbstractEventLoop) -> None:
        self.backend = backend
        self.loaded = 0.0
        self.ready = False
        self.failed = False
        self.running = self.waiting = 0
        self.prompt_tokens = self.completion_tokens = 0
        self.outcomes = {"ok": 0, "cancelled": 0, "error": 0}
        self.kv_use: float | None = None
        self._options = options
        self._loop = loop
        self._changed = threading.Condition()
        self._queue: deque[AnswerStream] = deque()
        self._calls: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._batches: dict[str, list[tuple[list[list[int]], asyncio.Future[Any]]]] = {}
        self._active: dict[GenerationRequest, AnswerStream] = {}

    def start(self) -> None:
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    def submit(self, answer: AnswerStream) -> None:
        with self._changed:
            self._queue.append(answer)
            self.waiting = len(self._queue)
            self._changed.notify()

    def cancel(self, answer: AnswerStream) -> None:
        with self._changed:
            answer.cancelled = True
            if answer in self._queue:
                self._queue.remove(answer)
                self.waiting = len(self._queue)
                self.outcomes["cancelled"] += 1
            self._changed.notify()

    def call(self, what: Callable[[], Any]) -> asyncio.Future[Any]:
        """Run a function in the engine's thread between two steps."""
        future: asyncio.Future[Any] = self._loop.create_future()
        with self._changed:
            self._calls.append((what, future))
            self._changed.notify()
        return future

    def compute(self, task: str, inputs: list[list[int]]) -> asyncio.Future[Any]:
        """Embed or classify texts, in one batch with those of the other requests that wait for it."""
        future: asyncio.Future[Any] = self._loop.create_future()
        with self._changed:
            self._batches.setdefault(task, []).append((inputs, future))
            self._changed.notify()
        return future

    def _run_batches(self) -> None:
        with self._changed:
            batches, self._batches = self._batches, {}
        for task, waiting in batches.items():
            asked = [one for one in waiting if not one[1].done()]
            method = getattr(self.backend, task)
            texts = [text for inputs, _ in asked for text in inputs]
            try:
                rows = method(texts) if texts else []
            except Exception:
                # One request may have caused it: each is computed alone, and only that one fails.
                for inputs, future in asked:
                    self._run_call(functools.partial(method, inputs), future)
                continue
            begin = 0
            for inputs, future in asked:
                found = rows[begin : begin + len(inputs)]
                begin += len(inputs)
                self._call_in_loop(_settle, future, found, None)

    def _run(self) -> None:
        try:
            self.backend.load(self._options, self._report_progress)
            self._report_progress(1.0)
            self.ready = True
            while True:
                self._run_step()
        except BaseException as error:
            if isinstance(error, BackendError):  # the model cannot be loaded: the message explains why
                print(f"bedplate-engine: {error.message}", file=sys.stderr, flush=True)  # noqa: T201
            else:
                traceback.print_exc()
                sys.stderr.flush()
            self.failed = True
            # The engine is in an unknown state. Clients get an error; then the supervisor restarts it.
            self._call_in_loop(self._give_up)

    def _report_progress(self, share: float) -> None:
        self.loaded = min(max(share, self.loaded), 1.0)
        print(f"{PROGRESS_MARK}{self.loaded:.3f}", flush=True)  # noqa: T201

    def _run_step(self) -> None:
        with self._changed:
            while not (self._queue or self._calls or self._batches or self._active):
                self._changed.wait()
            calls, self._calls = self._calls, deque()
        self._run_batches()
        for what, future in calls:
            self._run_call(what, future)
        for answer in [answer for answer in self._active.values() if answer.cancelled]:
            self.backend.cancel(answer.request)
            self._end_answer(answer, "cancelled")
        self._admit_waiting()
        if self._active:
            pieces = self.backend.step()
            ended = {piece.request for piece in pieces if piece.finish or piece.error}
            for piece in pieces:
                self._deliver(piece, piece.request in ended)
            self.kv_use = self.backend.kv_use()

    def _admit_waiting(self) -> None:
        while len(self._active) < self.backend.slots:
            with self._changed:
                if not self._queue:
                    return
                answer = self._queue.popleft()
                self.waiting = len(self._queue)
            if answer.cancelled:
                self.outcomes["cancelled"] += 1
                continue
            try:
                self.backend.admit(answer.request)
            except BackendError as error:
                self.outcomes["error"] += 1
                self._call_in_loop(answer.put, Delta(error=error))
                continue
            self._active[answer.request] = answer
            self.running = len(self._active)

    def _deliver(self, piece: Piece, ended: bool) -> None:
        """`ended`: the engine has ended this request in this step."""
        answer = self._active.get(piece.request)
        if answer is None:  # a limit or a stop string has ended it in this step
            return
        before = answer.completion_tokens
        delta = answer.feed(piece)
        self.completion_tokens += answer.completion_tokens - before
        if answer.done:
            if not ended:
                self.backend.cancel(answer.request)
            self._end_answer(answer, "error" if delta.error else "ok")
        if delta.text or delta.logprobs or answer.done:
            self._call_in_loop(answer.put, delta)

    def _end_answer(self, answer: AnswerStream, outcome: str) -> None:
        del self._active[answer.request]
        self.running = len(self._active)
        self.prompt_tokens += answer.prompt_tokens
        self.outcomes[outcome] += 1

    def _run_call(self, what: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        try:
            result = what()
        except BackendError as error:
            self._call_in_loop(_settle, future, None, error)
        except Exception as error:
            traceback.print_exc()
            self._call_in_loop(_settle, future, None, BackendError(f"the engine failed: {error}", status=500))
        else:
            self._call_in_loop(_settle, future, result, None)

    def _call_in_loop(self, what: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server is exiting
            self._loop.call_soon_threadsafe(what, *arguments)

    def _give_up(self) -> None:
        error = BackendError("the engine failed and is being restarted", status=500)
        for answer in [*self._active.values(), *self._queue]:
            answer.put(Delta(error=error))
        for _, future in (*self._calls, *(one for waiting in self._batches.values() for one in waiting)):
            _settle(future, None, error)
        # Time to send these last responses.
        self._loop.call_later(0.2, os._exit, 1)


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
