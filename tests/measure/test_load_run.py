"""The load generator against real servers over real sockets: the null server and servers that misbehave."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.conftest import wait_for
from tests.measure.rough_server import (
    HEAD,
    Asked,
    Rough,
    answer_correctly,
    make_chunk,
    make_event,
    make_response,
    make_stream,
    serve_rough,
)

from bedplate.errors import ExternalFailure, UsageError
from bedplate.measure.load import (
    LoadTarget,
    PreparedEndpoint,
    measure,
    measure_apart,
    measure_client_error,
    prepare,
    run,
    serve_null,
    wire,
)
from bedplate.measure.load.null_server import NullServer
from bedplate.values.run import Load, Repeat
from bedplate.values.workload import RequestShape

QUICK = {"seconds": 0.6, "warmup_s": 0.2, "least_requests": 1, "check": False}
"""Short measurements that show only that it works."""


@pytest.fixture(scope="module")
def null() -> Iterator[NullServer]:
    with serve_null(first_ms=50, interval_ms=5, tokens=8, overhead=3) as one:
        yield one


def measure_url(url: str, load: Load, *, key: str | None = None, api: Any = None, **options: Any) -> Repeat:
    return run(measure(LoadTarget.from_url(url, key=key, api=api), load, **{**QUICK, **options}))


def make_prepared(**changes: Any) -> PreparedEndpoint:
    """A prepared endpoint, for servers that do not answer test requests."""
    return PreparedEndpoint(model="m", api="completions", fields=("usage",), request_s=0.01, **changes)


def send_always(data: bytes) -> Callable[[socket.socket, Asked], None]:
    return lambda connection, _asked: connection.sendall(data)


# known timing


@pytest.mark.measures
@pytest.mark.parametrize("api", ["completions", "chat"])
def test_a_closed_loop_keeps_its_concurrency_and_measures_times(null: NullServer, api: str) -> None:
    load = Load(concurrency=4, prompt_tokens=32, output_tokens=8)
    repeat = measure_url(null.url, load, api=api, seconds=1.0)
    assert repeat.in_flight_max == 4 and repeat.reopened == 0 and repeat.warmup >= 1
    assert {sample.outcome for sample in repeat.samples} == {"ok"}
    assert {(sample.prompt_tokens, sample.output_tokens) for sample in repeat.samples} == {(32, 8)}
    assert repeat.exact_prompt and repeat.exact_output
    for sample in repeat.samples:
        assert sample.ttft_ms is not None and sample.ttft_ms >= 50, "not before the server sent it"
        assert sample.duration_ms >= 85 and len(sample.gaps_ms) == 7 and sample.finish == "length"
        assert 0 <= sample.at_s <= repeat.seconds
        assert math.isclose(sample.ttft_ms + sum(sample.gaps_ms), sample.duration_ms, abs_tol=0.01)


@pytest.mark.measures
def test_counts_tokens_by_arrival_time(null: NullServer) -> None:
    """Four streams of eight tokens in at least 85 ms; a busy machine can only be slower."""
    repeat = measure_url(null.url, Load(concurrency=4, prompt_tokens=32, output_tokens=8), seconds=1.0)
    assert repeat.delivered_tokens is not None
    assert 0 < repeat.delivered_tokens / repeat.seconds < 1.1 * 4 * 8 / 0.085
    begun = 8 * len(repeat.samples)
    assert abs(repeat.delivered_tokens - begun) <= 4 * 8, "they differ by the requests in flight at both ends"


@pytest.mark.measures
@pytest.mark.parametrize("arrivals", ["constant", "poisson", "burst"])
def test_an_open_loop_keeps_its_rate(null: NullServer, arrivals: Any) -> None:
    load = Load(arrivals=arrivals, requests_per_s=40, burst=5, prompt_tokens=16, output_tokens=4)
    repeat = measure_url(null.url, load, seconds=1.5)
    due = 40 * repeat.seconds
    allowed = {"constant": 2.0, "burst": 6.0, "poisson": 5 * math.sqrt(due)}[arrivals]
    assert abs(len(repeat.samples) - due) <= allowed
    assert all(sample.outcome == "ok" for sample in repeat.samples)
    if arrivals == "burst":
        assert repeat.in_flight_max >= 5


@pytest.mark.measures
def test_a_replay_has_the_lengths_of_its_trace(null: NullServer) -> None:
    shapes = [RequestShape(started_s=7 + 0.1 * n, prompt_tokens=20 + n, output_tokens=2 + n) for n in range(6)]
    repeat = measure_url(null.url, Load(arrivals="replay", trace="test"), shapes=shapes, seconds=30, most_seconds=30)
    found = sorted((sample.prompt_tokens, sample.output_tokens) for sample in repeat.samples)
    assert found == [(20 + n, 2 + n) for n in range(6)]
    assert repeat.exact_prompt and repeat.exact_output and repeat.warmup >= 1
    assert repeat.seconds < 20, "it ends with the trace"
    moments = [sample.at_s for sample in repeat.samples]
    assert all(moment >= 0.1 * n - 0.001 for n, moment in enumerate(moments)), "no request is early"


@pytest.mark.measures
def test_extends_the_window_until_enough_requests_have_ended(null: NullServer) -> None:
    repeat = measure_url(
        null.url, Load(concurrency=1, prompt_tokens=16, output_tokens=8), seconds=0.1, least_requests=4
    )
    assert sum(sample.outcome == "ok" for sample in repeat.samples) >= 4 and repeat.seconds >= 4 * 0.085


@pytest.mark.measures
def test_ends_the_window_at_its_maximum_duration(null: NullServer) -> None:
    load = Load(concurrency=1, prompt_tokens=16, output_tokens=100)
    repeat = measure_url(null.url, load, seconds=0.1, most_seconds=0.3, least_requests=100)
    assert repeat.seconds < 30 and all(sample.outcome == "ok" for sample in repeat.samples), (
        "requests in flight are completed"
    )


@pytest.mark.measures
def test_reports_the_error_of_the_generator(null: NullServer) -> None:
    own = run(measure_client_error(8, seconds=0.5))
    assert own.streams == 8 and own.samples >= 4
    assert -0.5 < own.p50_ms <= own.p99_ms, "no token arrives before it was sent"
    repeat = measure_url(null.url, Load(concurrency=2, prompt_tokens=16, output_tokens=2), check=own)
    assert (repeat.client.error_p50_ms, repeat.client.error_p99_ms) == (own.p50_ms, own.p99_ms)
    assert repeat.client.loop_lag_p99_ms > 0 and repeat.client.cpu_share > 0


def test_reports_the_phases_of_a_measurement(null: NullServer) -> None:
    moments: list[str] = []
    measure_url(null.url, Load(concurrency=1, prompt_tokens=16, output_tokens=2), watch=moments.append)
    assert moments == ["warm-up", "begin", "end"]


def test_an_error_in_the_watch_callback_ends_the_run(null: NullServer) -> None:
    def fails(moment: str) -> None:
        if moment == "begin":
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        measure_url(null.url, Load(concurrency=2, prompt_tokens=16, output_tokens=2), watch=fails)


def test_the_null_server_ends_with_its_parent() -> None:
    code = "from bedplate.measure.load import serve_null\nimport time\n"
    code += "with serve_null() as null:\n print(null.pid, flush=True)\n time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        starter.send_signal(signal.SIGKILL)
    wait_for(lambda: not psutil.pid_exists(pid), "the null server to end")


# in a separate process


def test_measures_in_a_separate_process(null: NullServer) -> None:
    moments: list[str] = []
    load = Load(concurrency=2, prompt_tokens=16, output_tokens=4)
    target = LoadTarget.from_url(null.url)
    prepared = run(prepare(target, load))
    repeat = measure_apart(target, load, prepared=prepared, watch=moments.append, **QUICK)  # type: ignore[arg-type]
    assert moments == ["warm-up", "begin", "end"]
    assert repeat.exact_prompt and repeat.samples and repeat.at


def test_a_separate_process_raises_the_same_errors() -> None:
    with pytest.raises(ExternalFailure, match="cannot connect to") as caught:
        measure_apart(LoadTarget.from_url("http://127.0.0.1:9"), Load(concurrency=1), check=False)
    assert caught.value.hint
    with pytest.raises(UsageError):
        measure_apart(LoadTarget.from_url("http://127.0.0.1:9"), Load(), check=False)


def test_a_separate_process_ends_with_its_caller(null: NullServer) -> None:
    code = "import sys\nfrom bedplate.measure.load import *\nfrom bedplate.values.run import Load\n"
    code += f"target, load = LoadTarget.from_url({null.url!r}), Load(concurrency=1, prompt_tokens=8, output_tokens=2)\n"
    code += "measure_apart(target, load, seconds=60, check=False, watch=lambda moment: print(moment, flush=True))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None and caller.stdout.readline() == "warm-up\n"
        (child,) = psutil.Process(caller.pid).children()
        caller.kill()
    wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, "the generator to end")


# properties of endpoints


def test_omits_fields_that_the_endpoint_rejects() -> None:
    def strict(connection: socket.socket, asked: Asked) -> None:
        refused = asked.body and set(asked.json) & {"ignore_eos", "min_tokens"}
        error = {"error": {"message": "Unrecognized request argument"}}
        connection.sendall(make_response(error, "400 Bad Request") if refused else answer_correctly(asked))

    with serve_rough(strict) as server:
        prepared = run(prepare(LoadTarget.from_url(server.url, model="m"), Load(concurrency=1, prompt_tokens=20)))
    assert prepared.fields == ("usage",) and not prepared.takes_exact_output
    assert any("exact number" in note for note in prepared.notes)


def test_uses_chat_if_there_is_no_completions_api(null: NullServer) -> None:
    def chat_only(connection: socket.socket, asked: Asked) -> None:
        request = asked.json
        if asked.path != "/v1/chat/completions":
            connection.sendall(make_response({"error": {"message": "no such path"}}, "404 Not Found"))
            return
        words = len(request["messages"][0]["content"].split())
        usage = {"prompt_tokens": 11 + words, "completion_tokens": request["max_tokens"]}
        if request.get("stream"):
            text = b'data: {"choices": [{"delta": {"content": "x"}, "finish_reason": "length"}]}\n\n'
            connection.sendall(make_stream(text, make_event(usage=usage)))
        else:
            connection.sendall(make_response({"choices": [{"message": {"content": "x"}}], "usage": usage}))

    with serve_rough(chat_only) as server:
        target = LoadTarget.from_url(server.url, model="m")
        prepared = run(prepare(target, Load(concurrency=1, prompt_tokens=50, output_tokens=4)))
    assert (prepared.api, prepared.overhead, prepared.exact_prompt) == ("chat", 11, True)


def test_prompts_are_exact_if_some_words_have_several_tokens() -> None:
    """In this tokenizer long words are two tokens, and three tokens precede each prompt."""

    def tokens(text: str) -> int:
        return 3 + sum(1 + (len(word) > 5) for word in text.split())

    def wordy(connection: socket.socket, asked: Asked) -> None:
        request = asked.json
        usage = {"prompt_tokens": tokens(request.get("prompt", "")), "completion_tokens": request.get("max_tokens")}
        if asked.path == "/tokenize":
            connection.sendall(make_response({"detail": "Not Found"}, "404 Not Found"))
        elif request.get("stream"):
            connection.sendall(make_stream(make_event(" x", "length"), make_event(usage=usage)))
        else:
            connection.sendall(make_response({"choices": [{"text": "x"}], "usage": usage}))

    with serve_rough(wordy) as server:
        load = Load(concurrency=1, prompt_tokens=77, output_tokens=1)
        repeat = measure_url(server.url, load, prepared=run(prepare(LoadTarget.from_url(server.url, model="m"), load)))
    assert repeat.exact_prompt and {sample.prompt_tokens for sample in repeat.samples} == {77}


def test_uses_the_tokenize_api_of_the_endpoint() -> None:
    def with_tokenizer(connection: socket.socket, asked: Asked) -> None:
        if asked.path == "/tokenize":
            connection.sendall(make_response({"tokens": [1, *asked.json["content"].split()]}))
            return
        request = asked.json
        usage = {"prompt_tokens": 1 + len(request["prompt"].split()), "completion_tokens": request["max_tokens"]}
        connection.sendall(make_stream(make_event(" x", "length"), make_event(usage=usage)))

    with serve_rough(with_tokenizer) as server:
        prepared = run(prepare(LoadTarget.from_url(server.url, model="m"), Load(concurrency=1, prompt_tokens=60)))
    assert prepared.tokenizes and prepared.overhead == 1 and prepared.exact_prompt


def test_token_counts_are_unknown_without_usage() -> None:
    silent = make_stream(make_event(" a"), make_event(" b"), make_event(" c", "length"))
    plain = make_response({"choices": [{"text": " a"}]})
    script: Callable[[socket.socket, Asked], None] = lambda connection, asked: connection.sendall(  # noqa: E731
        silent if b'"stream":true' in asked.body else plain
    )
    with serve_rough(script) as server:
        load = Load(concurrency=1, prompt_tokens=10, output_tokens=3)
        repeat = measure_url(server.url, load, prepared=run(prepare(LoadTarget.from_url(server.url, model="m"), load)))
    assert {sample.output_tokens for sample in repeat.samples} == {None}
    assert (repeat.delivered_tokens, repeat.exact_output, repeat.exact_prompt) == (None, None, None)
    assert any("no usage" in note for note in repeat.notes) and any(
        "each word counts as one token" in note for note in repeat.notes
    )


def test_short_answers_are_not_exact() -> None:
    short = make_stream(make_event(" a", "stop"), make_event(usage={"prompt_tokens": 10, "completion_tokens": 1}))
    with serve_rough(send_always(short)) as server:
        repeat = measure_url(
            server.url, Load(concurrency=1, prompt_tokens=10, output_tokens=9), prepared=make_prepared()
        )
    assert repeat.exact_output is False and repeat.exact_prompt is True


# failures


def measure_briefly(server: Rough, **options: Any) -> Repeat:
    load = Load(concurrency=2, prompt_tokens=10, output_tokens=2)
    return measure_url(server.url, load, prepared=make_prepared(), **{"seconds": 0.3, "warmup_s": 0.05, **options})


@pytest.mark.parametrize(
    ("script", "outcome", "text"),
    [
        (
            make_response({"error": {"message": "wrong key sk-secret"}}, "401 Unauthorized"),
            "error",
            "HTTP 401: wrong key ***",
        ),
        (make_response({"error": "slow down"}, "429 Too Many Requests"), "refused", "HTTP 429: slow down"),
        (make_response({"detail": "loading"}, "503 Service Unavailable"), "refused", "HTTP 503: loading"),
        (make_response({}, "500 Internal Server Error"), "error", "HTTP 500: {}"),
        (make_stream(make_event(" a"), b'data: {"error": {"message": "it died"}}\n\n'), "error", "it died"),
        (make_stream(make_event(" a"), done=False), "cut", "last event"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "error", "not HTTP"),
    ],
)
def test_a_failed_request_is_a_sample_with_its_reason(script: bytes, outcome: str, text: str) -> None:
    with serve_rough(send_always(script)) as server:
        load = Load(concurrency=2, prompt_tokens=10, output_tokens=2)
        repeat = measure_url(server.url, load, key="sk-secret", prepared=make_prepared(), seconds=0.3)
    assert {sample.outcome for sample in repeat.samples} == {outcome}
    assert all(text in (sample.error or "") for sample in repeat.samples)
    if not script.startswith(b"HTTP/1.1 200"):
        assert len(server.asked) < 60, "an endpoint that rejects requests is not flooded"


def test_a_connection_closed_during_a_stream_is_a_cut() -> None:
    def cuts(connection: socket.socket, _asked: Asked) -> bool:
        connection.sendall(HEAD + make_chunk(make_event(" a")))
        return False

    with serve_rough(cuts) as server:
        repeat = measure_briefly(server)
    assert {sample.outcome for sample in repeat.samples} == {"cut"}
    assert all(sample.ttft_ms is not None for sample in repeat.samples), "its first token arrived"


def test_cancels_an_endless_stream() -> None:
    stop = threading.Event()

    def endless(connection: socket.socket, _asked: Asked) -> None:
        connection.sendall(HEAD)
        while not stop.wait(0.01):
            connection.sendall(make_chunk(make_event(" more")))

    with serve_rough(endless) as server:
        try:
            repeat = measure_briefly(server, timeout_s=1.0)
        finally:
            stop.set()
    assert {sample.outcome for sample in repeat.samples} == {"timeout"}
    assert all(sample.duration_ms >= 1000 for sample in repeat.samples)
    assert any(sample.gaps_ms for sample in repeat.samples), "tokens arrived until then"


def test_cancels_a_request_without_response() -> None:
    with serve_rough(lambda connection, asked: None) as server:
        repeat = measure_briefly(server, timeout_s=0.2)
    assert {(sample.outcome, sample.ttft_ms) for sample in repeat.samples} == {("timeout", None)}


def test_reports_an_unreachable_endpoint() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(ExternalFailure, match="cannot connect to"):
            measure_url(url, Load(concurrency=1))
        with pytest.raises(ExternalFailure, match="cannot open 1 connections"):
            measure_url(url, Load(concurrency=1), prepared=make_prepared())


def test_reports_connections_lost_during_the_measurement() -> None:
    gone = threading.Event()

    def answers(connection: socket.socket, asked: Asked) -> bool:
        if gone.is_set():
            return False
        connection.sendall(answer_correctly(asked))
        return True

    with serve_rough(answers) as server:
        repeat = measure_briefly(server, watch=lambda moment: gone.set() if moment == "begin" else None)
    assert "error" in {sample.outcome for sample in repeat.samples}
    assert any("connection was lost" in (sample.error or "") for sample in repeat.samples)


@pytest.mark.parametrize(
    ("status", "match"),
    [("401 Unauthorized", "denied access"), ("400 Bad Request", "OpenAI-compatible")],
)
def test_raises_if_the_endpoint_rejects_test_requests(status: str, match: str) -> None:
    script = send_always(make_response({"error": {"message": "no, sk-secret"}}, status))
    with serve_rough(script) as server, pytest.raises(ExternalFailure, match=match) as caught:
        run(prepare(LoadTarget.from_url(server.url, key="sk-secret", model="m"), Load(concurrency=1)))
    assert "sk-secret" not in f"{caught.value.message}{caught.value.cause}{caught.value.hint}"
    assert caught.value.cause and "no, ***" in caught.value.cause


def test_reports_the_endpoints_reason_for_rejecting_a_long_prompt() -> None:
    def small(connection: socket.socket, asked: Asked) -> None:
        long = asked.path == "/v1/completions" and len(asked.json["prompt"].split()) > 600
        error = {"error": {"message": "maximum context length is 600 tokens"}}
        connection.sendall(make_response(error, "400 Bad Request") if long else answer_correctly(asked))

    with serve_rough(small) as server, pytest.raises(ExternalFailure, match="2000 tokens") as caught:
        run(prepare(LoadTarget.from_url(server.url, model="m"), Load(concurrency=1, prompt_tokens=2000)))
    assert "maximum context length" in (caught.value.cause or "")


def test_reopens_and_counts_closed_connections() -> None:
    def closes(connection: socket.socket, asked: Asked) -> bool:
        connection.sendall(
            answer_correctly(asked).replace(b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nconnection: close\r\n")
        )
        return False

    with serve_rough(closes) as server:
        repeat = measure_briefly(server)
    assert {sample.outcome for sample in repeat.samples} == {"ok"}
    assert repeat.reopened >= len(repeat.samples) - 2


def test_sends_a_request_again_if_its_idle_connection_was_closed() -> None:
    """The endpoint closes each connection after one response without announcing it."""

    def once(connection: socket.socket, asked: Asked) -> bool:
        connection.sendall(answer_correctly(asked))
        return False

    with serve_rough(once) as server:
        repeat = measure_briefly(server)
    assert {sample.outcome for sample in repeat.samples} == {"ok"}


def test_prompts_never_repeat() -> None:
    with serve_rough(lambda connection, asked: connection.sendall(answer_correctly(asked))) as server:
        load = Load(concurrency=3, prompt_tokens=30, output_tokens=2)
        for number in (0, 1):
            measure_url(server.url, load, prepared=make_prepared(), round=number, seconds=0.2)
        prompts = [asked.json["prompt"] for asked in server.asked]
    assert len(set(prompts)) == len(prompts) and {len(prompt.split()) for prompt in prompts} == {30}


def test_results_do_not_contain_the_key(null: NullServer) -> None:
    load = Load(concurrency=1, prompt_tokens=16, output_tokens=2)
    repeat = measure_url(null.url, load, key="sk-secret")
    assert "sk-secret" not in repr(repeat)


# TLS


def test_https_needs_a_trusted_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to create a certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", str(key), "-out",
         str(certificate), "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    async def secure(trusted: bool) -> Repeat:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while line := await reader.readline():
                    headers = line + await reader.readuntil(b"\r\n\r\n")
                    length = int(headers.lower().partition(b"content-length:")[2].split()[0])
                    body = await reader.readexactly(length)
                    writer.write(answer_correctly(Asked("POST", "/v1/completions", {}, body, 0)))
            except (OSError, asyncio.IncompleteReadError):
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context)
        async with server:
            url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            load = Load(concurrency=2, prompt_tokens=10, output_tokens=2)
            target, quick = LoadTarget.from_url(url, model="m"), {**QUICK, "seconds": 0.3}
            return await measure(target, load, prepared=make_prepared(), **quick)  # type: ignore[arg-type]

    try:
        wire.make_tls_context.cache_clear()
        with pytest.raises(ExternalFailure, match="cannot open") as caught:
            run(secure(trusted=False))
        assert "certificate" in (caught.value.cause or "").lower()
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        wire.make_tls_context.cache_clear()
        repeat = run(secure(trusted=True))
        assert repeat.samples and {sample.outcome for sample in repeat.samples} == {"ok"}
    finally:
        monkeypatch.undo()
        wire.make_tls_context.cache_clear()


# a real engine


@pytest.mark.timeout(600)
def test_a_real_engine_returns_exact_lengths(serve: Callable[..., Any]) -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})  # with several threads, other processes on the cores would slow it down
    try:
        served = serve()
        load = Load(concurrency=2, prompt_tokens=96, output_tokens=12, shared_prefix_tokens=40)
        target = LoadTarget.from_url(served.url)
        prepared = run(prepare(target, load))
        repeat = run(measure(target, load, prepared=prepared, seconds=1, warmup_s=0.5, least_requests=4, check=False))
    finally:
        os.sched_setaffinity(0, before)
    assert prepared.api == "completions" and prepared.takes_exact_output and prepared.tells_usage
    assert {sample.outcome for sample in repeat.samples} == {"ok"} and len(repeat.samples) >= 4
    assert {(each.prompt_tokens, each.output_tokens) for each in repeat.samples} == {(96, 12)}
    assert repeat.exact_prompt and repeat.exact_output
    assert all((each.cached_tokens or 0) <= 40 for each in repeat.samples), "no more than the shared prefix"
