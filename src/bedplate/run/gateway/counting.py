"""Counts tokens with the engine's tokenizer, for answers whose usage the engine did not report.

The engine has the tokenizer of its model in memory, whatever the format of the model. The gateway would need a library
for each format, and a second copy of each vocabulary.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from bedplate.run.gateway.sse import UNREADABLE
from bedplate.run.gateway.tenants import BYTES_PER_TOKEN
from bedplate.run.gateway.upstream import EngineConnection, EnginePool

if TYPE_CHECKING:
    from bedplate.run.gateway.backend import GatewayBackend

MOST_TEXTS = 64
"""Of one request, this many texts are counted; the length of the others is estimated from them."""
MOST_PENDING_BYTES = 64_000_000
"""Limit of the texts and prompts that wait to be counted; others are estimated."""
ANSWER_LIMIT_S = 10.0
_REQUEST_HEAD = (
    b"POST %b HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n%b"
)


@dataclass(eq=False)
class CountJob:
    """What is to be counted of one request."""

    backend: GatewayBackend
    api: str
    done: Callable[[int, int], None]
    """Called with the prompt tokens and the output tokens."""
    texts: list[str] = field(default_factory=list)
    """The generated texts."""
    output_tokens: int = 0
    """Output tokens that are known, or are not part of a text."""
    prompts: list[str | int] = field(default_factory=list)
    """Texts of prompts, or the number of their token ids."""
    prompt_tokens: int = 0
    """Prompt tokens that are known."""
    body: bytes = b""
    """The request, if its prompt is counted by a path of the engine."""
    body_text_bytes: int = 0
    """The length of the prompt in `body`."""

    def estimate_prompt(self) -> int:
        """The tokens of the prompt in `body`. An image has far fewer than its bytes suggest."""
        tokens, context = _estimate(self.body_text_bytes), self.backend.context_tokens
        return tokens if context is None else min(tokens, context)

    @property
    def size(self) -> int:
        texts = (*self.texts, *(one for one in self.prompts if isinstance(one, str)))
        return len(self.body) + sum(map(len, texts))


class TokenCounting:
    """Counts one request after the other for each engine, so that aborted requests cannot occupy its server."""

    def __init__(self) -> None:
        self._queues: dict[GatewayBackend, deque[CountJob]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._pending_bytes = 0

    @property
    def is_idle(self) -> bool:
        return not self._tasks

    def submit(self, job: CountJob) -> None:
        """Counts in the background; at once, by estimates, if the engine cannot count or too much is waiting."""
        traits = job.backend.requests
        if traits is None or traits.counter is None or self._pending_bytes + job.size > MOST_PENDING_BYTES:
            _finish_estimated(job)
            return
        self._pending_bytes += job.size
        queue = self._queues.get(job.backend)
        if queue is not None:
            queue.append(job)
            return
        self._queues[job.backend] = deque([job])
        task = asyncio.get_running_loop().create_task(self._work(job.backend))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self, within_s: float) -> None:
        """Waits for the remaining requests; those that are not counted in time are estimated."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=within_s)
        for task in self._tasks:
            task.cancel()
        for queue in self._queues.values():
            while queue:
                _finish_estimated(queue.popleft())

    async def _work(self, backend: GatewayBackend) -> None:
        queue, pool = self._queues[backend], EnginePool(backend)
        try:
            while queue:
                job = queue[0]
                prompt, output = await self._count(job, pool)
                queue.popleft()
                self._pending_bytes -= job.size
                try:
                    job.done(prompt, output)
                except Exception as error:  # the other requests are counted all the same
                    context = {"message": "the tokens of a request were not recorded", "exception": error}
                    asyncio.get_running_loop().call_exception_handler(context)
        finally:
            pool.close()
            if not queue:
                del self._queues[backend]

    async def _count(self, job: CountJob, pool: EnginePool) -> tuple[int, int]:
        prompt = job.prompt_tokens + sum(one for one in job.prompts if isinstance(one, int))
        texts = [one for one in job.prompts if isinstance(one, str)]
        prompt += await self._count_texts(pool, texts, special=True)
        if job.body:
            prompt += await self._count_prompt(pool, job)
        return prompt, job.output_tokens + await self._count_texts(pool, job.texts, special=False)

    async def _count_prompt(self, pool: EnginePool, job: CountJob) -> int:
        traits = pool.backend.requests
        path = traits.counter.prompts.get(job.api) if traits is not None and traits.counter is not None else None
        count = await _ask(pool, path, job.body) if path is not None else None
        return count if count is not None else job.estimate_prompt()

    async def _count_texts(self, pool: EnginePool, texts: list[str], *, special: bool) -> int:
        traits = pool.backend.requests
        counter = traits.counter if traits is not None else None
        tokens = num_bytes = 0
        for text in texts[:MOST_TEXTS]:
            count = None
            if counter is not None and text:
                asked = {counter.field: text, counter.special: special}
                count = await _ask(pool, counter.path, msgspec.json.encode(asked))
            tokens += count if count is not None else _estimate(len(text.encode()))
            num_bytes += len(text.encode())
        others = sum(len(text.encode()) for text in texts[MOST_TEXTS:])
        return tokens + (math.ceil(others * tokens / num_bytes) if num_bytes else 0)


class _CountRequest:
    """One request for a count, on a connection to the engine."""

    def __init__(self, target: bytes, body: bytes) -> None:
        self.over = False
        self.tried_again = False
        self.count: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self.connection: EngineConnection | None = None
        self._target, self._body = target, body
        self._status = 0
        self._answer: list[bytes] = []

    def send_to_engine(self, connection: EngineConnection) -> None:
        self.connection = connection
        backend = connection.pool.backend
        body = backend.address_body(self._body) if backend.wants_name else self._body
        key = b"authorization: Bearer %b\r\n" % backend.engine_key.encode() if backend.engine_key else b""
        connection.send(self, _REQUEST_HEAD % (self._target, key, len(body), body))

    def receive_head(self, status: int, content_type: bytes) -> None:
        self._status = status

    def receive_body(self, data: bytes) -> None:
        self._answer.append(data)

    def flush(self) -> None:
        """Has nothing to send on."""

    def receive_whole(self, content_type: bytes, body: bytes) -> None:
        self._status, self._answer = 200, [body]
        self.complete_answer()

    def complete_answer(self) -> None:
        self.connection = None
        self._end(_read_count(b"".join(self._answer)) if self._status == 200 else None)

    def handle_lost_engine(self, how: str, reused: bool) -> None:
        self.connection = None
        self._end(None)

    def handle_absent_engine(self) -> None:
        self._end(None)

    def _end(self, count: int | None) -> None:
        self.over = True
        if not self.count.done():
            self.count.set_result(count)


async def _ask(pool: EnginePool, path: str, body: bytes) -> int | None:
    """The count that the engine answers with; `None`: it does not."""
    request = _CountRequest(path.encode(), body)
    pool.take(request)
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_LIMIT_S):
                return await request.count
        return None
    finally:
        request.over = True
        if request.connection is not None:
            pool.abandon(request.connection)


def _read_count(body: bytes) -> int | None:
    """The number of tokens in an engine's answer, which differs between engines."""
    try:
        answer: Any = msgspec.json.decode(body)
    except UNREADABLE:
        return None
    if isinstance(answer, list):
        return len(answer)
    if not isinstance(answer, dict):
        return None
    for name in ("count", "input_tokens", "length"):
        if type(answer.get(name)) is int:
            return max(0, int(answer[name]))
    tokens = answer.get("tokens")
    return len(tokens) if isinstance(tokens, list) else None


def _estimate(num_bytes: int) -> int:
    return math.ceil(num_bytes / BYTES_PER_TOKEN)


def _finish_estimated(job: CountJob) -> None:
    prompts = (one if isinstance(one, int) else _estimate(len(one.encode())) for one in job.prompts)
    prompt = job.prompt_tokens + sum(prompts) + job.estimate_prompt()
    job.done(prompt, job.output_tokens + sum(_estimate(len(text.encode())) for text in job.texts))
