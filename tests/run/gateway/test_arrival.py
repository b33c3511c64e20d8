"""Requests that arrive slowly: the deadline is for the whole request, and connections do not use up descriptors."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from tests.conftest import HANG_S

from bedplate.run.gateway import client
from bedplate.run.gateway.descriptors import MAX_BACKLOG, DescriptorBudget

from .scripted import (
    ANSWER,
    CHAT,
    Bench,
    make_answer,
    make_chat_body,
    request,
    start_gateway,
    wait_until,
    wait_within,
)

WHOLE = request(CHAT, make_chat_body())
LARGE = 32_000_000


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(client, "monotonic", lambda: found.now)
    return found


def send_slowly(bench: Bench, clock: Clock, pieces: Iterator[bytes], pause_s: float) -> float | None:
    """Sends a piece every `pause_s`. Returns after how long the gateway rejected the request; `None`: it did not."""
    began = clock.now
    for piece in pieces:
        bench.client.data_received(piece)
        if bench.client.deadline is not None and bench.client.deadline < clock.now + pause_s:
            clock.now = bench.client.deadline
            bench.client.handle_timeout()
            rejection = bench.to_client.writes[-1]
            assert rejection.startswith(b"HTTP/1.1 408 ") and b"request_timeout" in rejection
            return clock.now - began
        clock.now += pause_s
    return None


def split(data: bytes, size: int) -> Iterator[bytes]:
    return (data[place : place + size] for place in range(0, len(data), size))


def make_large(num_bytes: int) -> bytes:
    return request(CHAT, json.dumps(make_chat_body(words="x" * num_bytes)).encode())


@pytest.mark.parametrize("pause_s", [0.5, 1.0, 29.0])
async def test_request_that_arrives_byte_by_byte_is_rejected_at_a_fixed_time(pause_s: float, clock: Clock) -> None:
    """Each byte comes long before an idle timeout would end."""
    rejected_after_s = send_slowly(Bench(), clock, split(WHOLE, 1), pause_s)
    assert rejected_after_s == pytest.approx(client.REQUEST_TIMEOUT_S)


async def test_body_that_arrives_byte_by_byte_is_rejected(clock: Clock) -> None:
    head, _, body = WHOLE.partition(b"\r\n\r\n")
    bench = Bench()
    bench.client.data_received(head + b"\r\n\r\n")
    assert send_slowly(bench, clock, split(body, 1), 1.0) == pytest.approx(client.REQUEST_TIMEOUT_S, abs=0.01)


async def test_chunked_framing_does_not_extend_the_deadline(clock: Clock) -> None:
    bench = Bench()
    bench.client.data_received(
        f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    )
    padded = (b"1;" + b"x" * 60_000 + b"\r\n \r\n" for _ in range(1000))
    assert send_slowly(bench, clock, padded, 1.0) == pytest.approx(client.REQUEST_TIMEOUT_S, abs=0.01)


@pytest.mark.parametrize("bytes_s", [40_000, 250_000])
async def test_large_body_at_an_honest_speed_is_accepted(bytes_s: int, clock: Clock) -> None:
    bench = Bench()
    assert send_slowly(bench, clock, split(make_large(LARGE - 1000), bytes_s), 1.0) is None
    assert clock.now > 1000 + 100
    assert len(bench.to_engine.written) > LARGE - 1000
    bench.engine.data_received(make_answer(ANSWER))
    assert bench.to_client.written.startswith(b"HTTP/1.1 200 ")


async def test_large_body_below_the_least_speed_is_rejected(clock: Clock) -> None:
    rejected_after_s = send_slowly(Bench(), clock, split(make_large(LARGE - 1000), 16_000), 1.0)
    assert rejected_after_s == pytest.approx(2 * client.REQUEST_TIMEOUT_S, rel=0.05)


async def test_pause_is_limited_however_much_has_arrived(clock: Clock) -> None:
    bench = Bench()
    bench.client.data_received(make_large(10_000_000)[:-1])
    assert bench.client.deadline == clock.now + client.REQUEST_TIMEOUT_S


async def test_time_of_a_request_behind_another_counts_from_the_end_of_that_one(clock: Clock) -> None:
    bench = Bench()
    bench.client.data_received(WHOLE + WHOLE[:10])
    clock.now += 1000  # the engine is slow
    bench.client.data_received(WHOLE[10:20])
    assert bench.client.deadline is None
    bench.engine.data_received(make_answer(ANSWER))
    assert bench.to_client.written.startswith(b"HTTP/1.1 200 ")
    assert send_slowly(bench, clock, split(WHOLE[20:], 1), 1.0) == pytest.approx(client.REQUEST_TIMEOUT_S)


async def test_each_request_of_a_kept_connection_has_its_own_deadline(clock: Clock) -> None:
    bench = Bench()
    for _ in range(5):
        assert send_slowly(bench, clock, split(WHOLE, len(WHOLE) // 20), 1.0) is None
        bench.engine.data_received(make_answer(ANSWER))
    assert bench.to_client.written.count(b"HTTP/1.1 200 ") == 5


# descriptors


@pytest.mark.parametrize(("limit", "used"), [(64, 14), (64, 40), (256, 20), (1024, 20), (65_536, 30)])
def test_a_burst_of_connections_leaves_descriptors_free(limit: int, used: int) -> None:
    budget = DescriptorBudget(limit, used)
    assert budget.evict_from is not None and budget.refuse_from is not None
    assert used <= budget.evict_from < budget.refuse_from < limit
    # Before the first of them is reported, the loop may accept all that the kernel has queued: one more than the limit.
    assert budget.evict_from + budget.backlog + 1 < limit
    assert budget.backlog <= MAX_BACKLOG


def test_without_a_limit_no_connection_is_closed() -> None:
    budget = DescriptorBudget(None, 20)
    assert budget.evict_from is None and budget.backlog == MAX_BACKLOG


SERVER = """
import asyncio, resource, sys
from bedplate.run.gateway import Gateway, GatewayBackend
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
if sys.argv[1] == "uvloop":
    from uvloop import run
else:
    from asyncio import run

async def main():
    backend = GatewayBackend("small", "llama.cpp", "b1")
    backend.address, backend.state = ("127.0.0.1", 1), "ready"
    print(await Gateway([backend]).start("127.0.0.1", 0), flush=True)
    await asyncio.to_thread(sys.stdin.read)

run(main())
"""
PROBE = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.fixture(params=["asyncio", "uvloop"])
def small_server(request: pytest.FixtureRequest) -> Iterator[int]:
    """The port of a gateway in a process with at most 64 open files."""
    argv = [sys.executable, "-c", SERVER, request.param]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        yield int(process.stdout.readline())
        assert process.poll() is None
        process.stdin.close()
        assert process.wait(HANG_S) == 0


def ask_health(port: int) -> bytes:
    with connect_idle(port) as pipe:
        pipe.sendall(PROBE)
        return pipe.recv(65536)


def connect_idle(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), HANG_S)


def connect_in_head(port: int) -> socket.socket:
    pipe = connect_idle(port)
    pipe.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost:")
    return pipe


def connect_after_answer(port: int) -> socket.socket:
    pipe = connect_idle(port)
    pipe.sendall(PROBE)
    assert pipe.recv(65536).startswith(b"HTTP/1.1 200 ")
    return pipe


@pytest.mark.parametrize("connect", [connect_idle, connect_in_head, connect_after_answer])
def test_a_hundred_idle_connections_do_not_stop_health(
    connect: Callable[[int], socket.socket], small_server: int
) -> None:
    idle: list[socket.socket] = []
    try:
        for number in range(100):
            idle.append(connect(small_server))
            if number % 10 == 0:
                assert ask_health(small_server).startswith(b"HTTP/1.1 200 ")
        for _ in range(3):
            assert ask_health(small_server).startswith(b"HTTP/1.1 200 ")
    finally:
        for pipe in idle:
            pipe.close()
    assert ask_health(small_server).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("closed_first", [True, False])
async def test_connection_is_accepted_while_the_only_other_one_closes(closed_first: bool) -> None:
    """The event loop learns of both at once: the old descriptor is in use when the new connection gets its own."""
    async with start_gateway() as setup:
        leaving = socket.create_connection(("127.0.0.1", setup.port), HANG_S)
        await wait_until(lambda: setup.gateway.connections, "the connection to be accepted")
        (connection,) = setup.gateway.connections
        assert connection._transport is not None
        used = connection._transport.get_extra_info("socket").fileno() + 1
        budget = setup.gateway.descriptors = DescriptorBudget(used, used)
        assert budget.evict_from == budget.refuse_from == used
        if closed_first:
            leaving.close()
        coming = socket.create_connection(("127.0.0.1", setup.port), HANG_S)
        leaving.close()
        with coming:
            coming.sendall(PROBE)
            coming.setblocking(False)
            answer = await wait_within(asyncio.get_running_loop().sock_recv(coming, 65536))
            assert answer.startswith(b"HTTP/1.1 200 ")


def test_the_soft_limit_is_raised_up_to_the_hard_one() -> None:
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 128));"
        "from bedplate.run.gateway.descriptors import raise_descriptor_limit; raise_descriptor_limit();"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "(128, 128)"
