"""LoRA adapters that are loaded into running engines, and unloaded: a host with stub engines."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from tests.hosting.stub_hosts import HANDLER, LISTEN, WORK, add, make_stub_environment, make_stub_readied, with_host
from tests.run.test_supervisor import until

from bedplate.engines import get_engine
from bedplate.errors import NotPossible, UsageError
from bedplate.hosting.adapters import AdapterReport, AdapterRequest, change_adapters
from bedplate.hosting.host import Host
from bedplate.values import Workload, replace_fields
from bedplate.values.workload import LoraAdapter

SERVER = f"""{HANDLER}
    loaded = {{}}
    def do_POST(self):
        asked = self.asked()
        if self.path.endswith("load_lora_adapter"):
            name = asked["lora_name"]
            if "bad" in asked["lora_path"]:
                return self.send_error(400, "rank 64 is too high")
            if self.path == "/v1/unload_lora_adapter":
                del self.loaded[name]
            else:
                self.loaded[name] = asked["lora_path"]
            return self.answer({{}})
        time.sleep(asked.get("max_tokens", 0) / 1000)
        said = json.dumps([asked.get("model"), self.loaded, asked.get("lora"), os.getpid()])
        self.answer({{"choices": [{{"message": {{"role": "assistant", "content": said}}, "finish_reason": "stop"}}]}})
    def send_error(self, status, message):
        body = json.dumps({{"error": {{"message": message}}}}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
{LISTEN}"""
LATER = replace_fields(WORK, lora_adapters=2)


@pytest.fixture
def loads_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stub engine loads adapters while it runs, as vLLM does."""
    engine, of_vllm = get_engine("llama.cpp"), get_engine("vllm").adapters
    assert engine.adapters is not None and of_vllm is not None and of_vllm.load_path == "/v1/load_lora_adapter"
    paths = {"load_path": of_vllm.load_path, "unload_path": of_vllm.unload_path}
    traits = msgspec.structs.replace(engine.adapters, selects="model", **paths)
    monkeypatch.setattr(type(engine), "adapters", traits)


async def change(host: Host, do: Any, name: str = "", path: str = "", **more: Any) -> AdapterReport:
    return await change_adapters(host, AdapterRequest(do=do, name=name, path=path, **more), print)


async def ask(host: Host, model: str, ms: int = 0) -> tuple[int, Any]:
    body = {"model": model, "max_tokens": ms, "messages": [{"role": "user", "content": "?"}]}
    async with aiohttp.ClientSession() as session, session.post(f"{host.url}/v1/chat/completions", json=body) as answer:
        found = await answer.json()
        said = found["choices"][0]["message"]["content"] if answer.status == 200 else "null"
        return answer.status, msgspec.json.decode(said)


@pytest.mark.usefixtures("loads_later", "bedplate_home")
def test_an_adapter_is_loaded_into_all_replicas_and_unloaded(tmp_path: Path) -> None:
    async def then(host: Host) -> None:
        await add(
            host, make_stub_readied("alpha", make_stub_environment(tmp_path / "e", SERVER), replicas=2, work=LATER)
        )
        assert (await change(host, "list")).adapters == ()
        (found,) = (await change(host, "load", "sql", "/adapters/sql", tenants=("red",))).adapters
        assert (found.name, found.model, found.state, found.at_run_time, found.tenants) == (
            "sql", "alpha", "loaded", True, ("red",),
        )  # fmt: skip
        assert set(host.gateway.models) == {"alpha", "sql"}
        route = host.gateway.find_route("sql")
        assert route is not None and route.allowed == frozenset(["red"]) and len(route.backends) == 2
        host.gateway.allow("sql", ())
        seen = set()
        for _ in range(4):
            status, (model, loaded, _, pid) = await ask(host, "sql")
            assert (status, model, loaded) == (200, "sql", {"sql": "/adapters/sql"})
            seen.add(pid)
        assert (await ask(host, "alpha"))[1][0] in (None, "alpha")
        with pytest.raises(UsageError, match="already the name"):
            await change(host, "load", "sql", "/adapters/sql")
        slow = asyncio.create_task(ask(host, "sql", 500))
        await until(lambda: any(engine.backend.in_flight for engine in host.engines), "the request to be in flight")
        assert (await change(host, "unload", "sql")).adapters == ()
        assert (await slow)[0] == 200, "requests that use it finish first"
        assert (await ask(host, "sql"))[0] == 404
        for _ in range(4):
            assert (await ask(host, "alpha"))[1][1] == {}, "no engine has it any more"
        with pytest.raises(NotPossible, match="no loaded adapter"):
            await change(host, "unload", "sql")

    with_host(then, tmp_path)


@pytest.mark.usefixtures("loads_later", "bedplate_home")
def test_a_restarted_engine_loads_its_adapters_again_before_it_gets_requests(tmp_path: Path) -> None:
    async def then(host: Host) -> None:
        await add(host, make_stub_readied("alpha", make_stub_environment(tmp_path / "e", SERVER), work=LATER))
        await change(host, "load", "sql", "/adapters/sql")
        _, (*_, pid) = await ask(host, "sql")
        os.kill(pid, signal.SIGKILL)
        one = host.engines[0].backend
        await until(lambda: one.restarts == 1 and one.state == "ready", "the restart")
        status, (model, loaded, _, other) = await ask(host, "sql")
        assert (status, model, loaded) == (200, "sql", {"sql": "/adapters/sql"}) and other != pid
        second = await host.add_engine(host.services["alpha"].readied.build_start(), service="alpha")
        assert [one.model for one in second.backend.followers] == ["sql"], "a new replica has it too"
        route = host.gateway.find_route("sql")
        assert route is not None and len(route.backends) == 2

    with_host(then, tmp_path)


@pytest.mark.usefixtures("loads_later", "bedplate_home")
def test_an_adapter_that_the_engine_refuses_is_not_offered(tmp_path: Path) -> None:
    async def then(host: Host) -> None:
        await add(host, make_stub_readied("alpha", make_stub_environment(tmp_path / "e", SERVER), work=LATER))
        with pytest.raises(NotPossible, match="refused the adapter big") as caught:
            await change(host, "load", "big", "/adapters/bad")
        assert caught.value.cause == "rank 64 is too high"
        assert set(host.gateway.models) == {"alpha"} and (await ask(host, "big"))[0] == 404
        for name, path, says in (("a=b", "/x", "cannot be the name"), ("x", "", "path of the adapter is missing")):
            with pytest.raises(UsageError, match=says):
                await change(host, "load", name, path)

    with_host(then, tmp_path)


@pytest.mark.usefixtures("loads_later", "bedplate_home")
@pytest.mark.parametrize(("work", "cause"), [(WORK, "has no number"), ("named", "a list of adapters")])
def test_an_engine_that_was_not_started_for_later_adapters_says_so(
    tmp_path: Path, work: Workload | str, cause: str
) -> None:
    named = replace_fields(WORK, lora_adapters=(LoraAdapter(path="/a.gguf", name="a"),))

    async def then(host: Host) -> None:
        given = named if isinstance(work, str) else work
        await add(host, make_stub_readied("alpha", make_stub_environment(tmp_path / "e", SERVER), work=given))
        with pytest.raises(NotPossible, match="without room") as caught:
            await change(host, "load", "sql", "/adapters/sql")
        assert cause in str(caught.value.cause)

    with_host(then, tmp_path)


@pytest.mark.usefixtures("bedplate_home")
def test_listed_adapters_of_llama_cpp_are_withdrawn_and_offered_again(tmp_path: Path) -> None:
    listed = (LoraAdapter(path="/a.gguf", name="a"), LoraAdapter(path="/b.gguf", name="b", tenants=("red",)))

    async def then(host: Host) -> None:
        work = replace_fields(WORK, lora_adapters=listed)
        await add(host, make_stub_readied("alpha", make_stub_environment(tmp_path / "e", SERVER), work=work))
        chosen = [{"id": 1, "scale": 1.0}]
        host.gateway.allow("b", ())
        assert (await ask(host, "b"))[1][2] == chosen
        states = {one.name: one.state for one in (await change(host, "unload", "a")).adapters}
        assert states == {"a": "unloaded", "b": "loaded"} and (await ask(host, "a"))[0] == 404
        assert (await ask(host, "b"))[1][2] == chosen, "the number of an adapter is that of the launch"
        assert (await ask(host, "alpha"))[1][2] == [{"id": 0, "scale": 0.0}, {"id": 1, "scale": 0.0}]
        second = await host.add_engine(host.services["alpha"].readied.build_start(), service="alpha")
        assert [one.model for one in second.backend.followers] == ["b"]
        assert (await change(host, "load", "a")).adapters[0].state == "loaded"
        assert (await ask(host, "a"))[1][2] == [{"id": 0, "scale": 1.0}]
        with pytest.raises(NotPossible, match="only at its start"):
            await change(host, "load", "sql", "/adapters/sql")

    with_host(then, tmp_path)
