"""/metrics/engines: the engines' own metrics, under their own names."""

from __future__ import annotations

import asyncio
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from bedplate.run.gateway.backend import AdapterBackend
from bedplate.run.gateway.engine_metrics import MAX_BYTES, ScrapedMetrics, merge_pages
from bedplate.values.tenant import Tenant

from .scripted import CHAT, Answer, End, Engine, make_answer, make_backend, make_chat_body, start_gateway, wait_until
from .test_tenants import allow

PAGE = "/metrics/engines"
OWN = """# HELP llamacpp:tokens_predicted_total Number of generation tokens processed.
# TYPE llamacpp:tokens_predicted_total counter
llamacpp:tokens_predicted_total 12
# TYPE vllm:ttft_seconds histogram
vllm:ttft_seconds_bucket{engine="0",le="0.1"} 3 1763460000000
vllm:ttft_seconds_bucket{engine="0",le="+Inf"} 4.0
vllm:ttft_seconds_sum{engine="0"} 1.5e-1
vllm:ttft_seconds_count{engine="0"} 4
# TYPE tgi_request_count counter
tgi_request_count{path="a \\"model=b\\", {c}",} 7
"""


def read(text: str) -> dict[str, Any]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def make_page(text: str | None, replica: int = 0) -> ScrapedMetrics:
    return ScrapedMetrics(f'model="small",engine="vllm",replica="{replica}"', text)


def test_samples_keep_their_names_types_and_values_and_get_labels() -> None:
    text = merge_pages([make_page(OWN), make_page(OWN, 1)])
    families = read(text)
    tokens = families["llamacpp:tokens_predicted"]
    assert (tokens.type, tokens.documentation) == ("counter", "Number of generation tokens processed.")
    assert [(one.name, one.value, one.labels) for one in tokens.samples] == [
        ("llamacpp:tokens_predicted_total", 12.0, {"model": "small", "engine": "vllm", "replica": number})
        for number in ("0", "1")
    ]
    first = families["vllm:ttft_seconds"]
    assert first.type == "histogram" and len(first.samples) == 8
    assert {one.labels["exported_engine"] for one in first.samples} == {"0"}
    assert {one.labels["engine"] for one in first.samples} == {"vllm"}
    # A counter without the usual suffix is not renamed, and a value that looks like a label stays as it is.
    assert 'tgi_request_count{model="small",engine="vllm",replica="0",path="a \\"model=b\\", {c}"} 7\n' in text
    assert text.count("# TYPE tgi_request_count counter") == 1


def test_lines_that_are_not_in_the_format_and_forged_ones_are_left_out() -> None:
    forged = (
        'x{a="1"} 2\nbedplate_engine_metrics_up{model="small"} 1\nnot a sample\nx 1 2 3\n{}\ny{a=1} 2\n# TYPE x odd'
    )
    families = read(merge_pages([make_page(forged)]))
    assert set(families) == {"bedplate_engine_metrics_up", "x"} and len(families["x"].samples) == 1


def test_engines_that_disagree_about_a_type_leave_it_open() -> None:
    families = read(merge_pages([make_page("# TYPE x counter\nx 1\n"), make_page("# TYPE x gauge\nx 2\n", 1)]))
    assert families["x"].type == "unknown" and [one.value for one in families["x"].samples] == [1, 2]


def read_answer(answer: Answer) -> dict[str, Any]:
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return read(answer.body.decode())


def find_up(families: dict[str, Any]) -> dict[tuple[str, str], float]:
    samples = families["bedplate_engine_metrics_up"].samples
    return {(one.labels["engine"], one.labels["replica"]): one.value for one in samples}


async def test_the_page_has_the_metrics_of_all_engines_that_are_ready() -> None:
    other = Engine()
    await other.start()
    second, loading = make_backend(other.port), make_backend(1, engine="vllm")
    loading.state = "loading"
    async with start_gateway(second, loading, engine_key="secret") as setup:
        for engine in (setup.engine, other):
            engine.otherwise = (make_answer(OWN.encode(), kind="text/plain"),)
        setup.backend.followers.append(AdapterBackend(setup.backend, "adapter", {}))
        client = await setup.connect()
        families = read_answer(await client.get(PAGE))
        assert find_up(families) == {("llama.cpp", "0"): 1, ("llama.cpp", "1"): 1}
        assert len(families["llamacpp:tokens_predicted"].samples) == 2
        assert setup.engine.seen[0].target == "/metrics"
        assert setup.engine.seen[0].header("authorization") == ["Bearer secret"]
        # An engine keeps its number when another one is gone.
        setup.backend.state = "stopped"
        assert find_up(read_answer(await client.get(PAGE))) == {("llama.cpp", "1"): 1}
        await client.send(f"HEAD {PAGE} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        assert (await client.head()).status == 200
        setup.backend.state = "ready"
        assert (await client.post(CHAT, make_chat_body())).status == 200
    await other.stop()


async def test_an_engine_without_metrics_too_large_ones_or_no_answer_is_left_out() -> None:
    async with start_gateway() as setup:
        client = await setup.connect()
        large = b"# TYPE x gauge\n" + b"x 1\n" * (MAX_BYTES // 4)
        for steps in (
            (make_answer({}, "404 Not Found"),),
            (make_answer(large, kind="text/plain"),),
            (End.CLOSE,),
            (make_answer(b"", "307 Temporary Redirect"),),
        ):
            setup.engine.otherwise = steps
            families = read_answer(await client.get(PAGE))
            assert find_up(families) == {("llama.cpp", "0"): 0} and set(families) == {"bedplate_engine_metrics_up"}


async def test_scrapes_at_the_same_time_ask_an_engine_once_and_a_client_may_leave() -> None:
    async with start_gateway() as setup:
        gate = asyncio.Event()
        setup.engine.answer(gate, make_answer(OWN.encode(), kind="text/plain"))
        clients = [await setup.connect() for _ in range(3)]
        for client in clients:
            await client.send(f"GET {PAGE} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        await setup.engine.request()
        await clients[0].close()
        await wait_until(lambda: len(setup.gateway.connections) == 2, "the client to be gone")
        gate.set()
        for client in clients[1:]:
            assert "llamacpp:tokens_predicted" in read_answer(await client.answer())
        assert len(setup.engine.seen) == 1


async def test_the_gateway_stops_while_an_engine_is_asked() -> None:
    async with start_gateway() as setup:
        gate = asyncio.Event()
        setup.engine.answer(gate, make_answer(OWN.encode(), kind="text/plain"))
        client = await setup.connect()
        await client.send(f"GET {PAGE} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        await setup.engine.request()
        await setup.gateway.stop(0)
        assert (await client.answer()).status == 503
        gate.set()


async def test_only_admins_read_what_all_tenants_do() -> None:
    async with start_gateway(api_key="sk-of-default") as setup:
        setup.engine.otherwise = (make_answer(OWN.encode(), kind="text/plain"),)
        allow(setup, Tenant(name="alice"), Tenant(name="ops", admin=True))
        client = await setup.connect()
        assert (await (await setup.connect()).get(PAGE)).status == 401
        refused = await client.get(PAGE, authorization="Bearer sk-of-alice")
        assert refused.status == 403 and "--admin" in refused.error["message"]
        assert not setup.engine.seen
        assert "llamacpp:tokens_predicted" in read_answer(await client.get(PAGE, authorization="Bearer sk-of-ops"))
