"""`serve --on`: what is refused, what is launched, and a host whose engines somebody else stands above."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from rich.console import Console
from starlette.requests import Request
from tests.commands import invoke
from tests.engines.plans import machine, model, plan
from tests.hosting.stub_hosts import ask, make_stub_environment, make_stub_readied, read_pid, with_host
from tests.run.test_supervisor import until

from bedplate.changing.migrate import MigrationRequest, migrate
from bedplate.changing.shadow import ShadowRequest, run_shadow
from bedplate.decide.intent import read_intent
from bedplate.decide.placement import HOST
from bedplate.engines import Engine, KnownFailure, get_engine, load_engines
from bedplate.engines.shipped import ray_serve
from bedplate.errors import BedplateError, NotPossible, UsageError
from bedplate.hosting import on_dynamo, on_ray
from bedplate.hosting import orchestration as orchestrated
from bedplate.hosting.detached import DetachedInput
from bedplate.hosting.host import Host
from bedplate.hosting.orchestration import OrchestratedProcess, ProcessRole
from bedplate.hosting.orchestrators import choose_orchestrator
from bedplate.hosting.ordering import make_order
from bedplate.hosting.status import collect_status
from bedplate.run.environments import EngineEnvironment
from bedplate.show.services import render_status
from bedplate.show.serving import render_ready
from bedplate.values import Launch, Plan, Workload
from bedplate.values.endpoint import Endpoint, EndpointOrchestrator
from bedplate.values.intent import Intent
from bedplate.values.record import from_json, to_json
from bedplate.values.service import ModelOrder, Order, ServiceRecord

KEYED_ENGINE = """
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        sent = self.headers.get_all("Authorization")
        self.send_response(200 if sent == ["Bearer " + os.environ["ENGINE_KEY"]] else 401)
        self.send_header("Content-Length", "0")
        self.end_headers()
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Dynamo runs only on Linux")


class TestOrder:
    @pytest.mark.parametrize(("on", "replicas", "found"), [("ray", None, 2), ("dynamo", 3, 3), (None, None, 1)])
    def test_default_is_two_replicas(self, on: Any, replicas: int | None, found: int) -> None:
        order = make_order(Intent(), on=on, replicas=replicas)
        assert (order.services[0].replicas, order.on) == (found, on)

    def test_orchestrator_reaches_a_background_host(self) -> None:
        errand = DetachedInput(order=make_order(Intent(), on="ray"), report_fd=3)
        assert from_json(DetachedInput, to_json(errand)).order.on == "ray"

    @LINUX
    @pytest.mark.parametrize(
        ("order", "words"),
        [
            (Order(on="dynamo", services=(ModelOrder(engine="llama.cpp"),)), "vllm or the mocker, not llama.cpp"),
            (Order(on="dynamo", build="native"), "not a native build"),
            (Order(on="ray", services=(ModelOrder(engine="mocker"),)), "the mocker is part of Dynamo"),
            (Order(on="ray", services=(ModelOrder(engine="vlm"),)), "no engine is called 'vlm'"),
            (Order(on="ray", services=(ModelOrder(ttl_s=5),)), "Ray keeps its model loaded"),
            (Order(on="dynamo", services=(ModelOrder(model="a"), ModelOrder(model="b"))), "there are 2 services"),
            (Order(on="ray", bundle="/b.tar"), "a bundle does not contain Ray"),
        ],
    )
    def test_rejects_impossible_orders(self, order: Order, words: str) -> None:
        with pytest.raises(UsageError, match=words) as caught:
            choose_orchestrator(order)
        assert caught.value.hint

    def test_no_orchestrator_by_default(self) -> None:
        assert choose_orchestrator(Order()) is None

    def test_dynamo_is_rejected_outside_linux(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "platform", "darwin")
        with pytest.raises(NotPossible, match="only on Linux"):
            choose_orchestrator(Order(on="dynamo"))

    @LINUX
    def test_command_line_rejects_before_probing(self) -> None:
        answer = invoke("serve", "--on", "swarm")
        assert answer.code == 2 and "choose dynamo or ray" in answer.err
        for detach in ([], ["-d"]):
            answer = invoke("serve", "--on", "dynamo", "--engine", "llama.cpp", "--port", "0", *detach)
            assert answer.code == 2 and "--on ray runs any engine" in answer.err

    def test_rejects_several_services(self) -> None:
        with pytest.raises(UsageError, match="2 services"):
            choose_orchestrator(make_order(read_intent("services: [{model: a.gguf}, {model: b.gguf}]\n"), on="ray"))


def make_vllm_plan(on: str = "cpu") -> Plan:
    return plan(get_engine("vllm"), machine(on), model("Qwen/Qwen3-32B", folder=True), workload=Workload(concurrency=4))


class TestDynamo:
    place = on_dynamo.DynamoContext(Path("/tmp/b"), "/models/it is here")

    def test_front_end_options(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("DYN_ROUTER_MODE", raising=False)
        launch = on_dynamo.DynamoFrontEnd(self.place).launch(make_vllm_plan(), 4321)
        assert launch.argv == (
            "dynamo-front", "--http-host", "127.0.0.1", "--http-port", "4321", "--router-mode", "kv",
            "--migration-limit", "3", "--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq",
        )  # fmt: skip
        assert launch.health_path == "/v1/models/qwen%2Fqwen3-32b"
        assert launch.env["DYN_FILE_KV"] == "/tmp/b/found" and launch.env["DYN_TCP_RPC_HOST"] == "127.0.0.1"

    @pytest.mark.parametrize("worker", [on_dynamo.VllmWorker, on_dynamo.MockerWorker])
    def test_kv_events_use_the_private_folder(self, worker: Any) -> None:
        """The relay in the front end reads the same variable."""
        told = {one.launch(make_vllm_plan(), 4321).env["DYN_ZMQ_BROKER_URL"]
                for one in (on_dynamo.DynamoFrontEnd(self.place), worker(self.place, 1))}  # fmt: skip
        assert told == {"xsub=ipc:///tmp/b/published , xpub=ipc:///tmp/b/heard"}
        assert all("dynamo-front" in dict(recipe.programs) for recipe in (
            on_dynamo.ALONE, on_dynamo.WITH_VLLM_CPU, on_dynamo.WITH_VLLM_CUDA
        ))  # fmt: skip

    def test_relay_forwards_published_events(self, tmp_path: Path) -> None:
        zmq = pytest.importorskip("zmq", reason="the relay is made of pyzmq")
        from bedplate.engines.shipped.dynamo_front import parse_addresses, start_relay

        publishers, subscribers = parse_addresses(f"xsub=ipc://{tmp_path}/in , xpub=ipc://{tmp_path}/out")
        context = zmq.Context()
        publisher, subscriber = context.socket(zmq.PUB), context.socket(zmq.SUB)
        try:
            publisher.connect(publishers)  # workers connect before the front end starts
            subscriber.connect(subscribers)
            subscriber.subscribe(b"kv")
            kept = start_relay(publishers, subscribers)
            until_s = time.monotonic() + 20
            while not subscriber.poll(50):
                assert time.monotonic() < until_s, "no event was received"
                publisher.send_multipart([b"kv", b"stored"])
            assert subscriber.recv_multipart() == [b"kv", b"stored"] and kept
        finally:
            context.destroy(linger=0)

    def test_dynamo_variable_chooses_the_router(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DYN_ROUTER_MODE", "round-robin")
        launch = on_dynamo.DynamoFrontEnd(self.place).launch(make_vllm_plan(), 4321)
        assert launch.argv[launch.argv.index("--router-mode") + 1] == "round-robin"
        assert "round-robin router over 2 workers" in on_dynamo.describe_orchestrator(2, "cpu", None).text

    def test_worker_has_vllm_options_without_server_options(self) -> None:
        own = get_engine("vllm").launch(make_vllm_plan(), 4321)
        launch = on_dynamo.VllmWorker(self.place, 1).launch(make_vllm_plan(), 4321)
        words = launch.argv
        assert words[:3] == ("dynamo-vllm", "--model", "/models/it is here")
        assert not {"--host", "--port", "--tool-call-parser", "--disable-uvicorn-access-log"} & set(words)
        kept = ("--served-model-name", "--max-model-len", "--max-num-seqs", "--kv-cache-memory-bytes")
        assert {name: words[words.index(name) + 1] for name in kept} == {
            name: own.argv[own.argv.index(name) + 1] for name in kept
        }
        assert words[words.index("--dyn-tool-call-parser") + 1] == "hermes"
        events = json.loads(words[words.index("--kv-events-config") + 1])
        assert events["endpoint"] == "ipc:///tmp/b/events-1" and events["enable_kv_cache_events"]
        assert launch.env["DYN_SYSTEM_PORT"] == "4321" and launch.env["DYN_SYSTEM_HOST"] == "127.0.0.1"
        assert own.env.items() <= launch.env.items()

    def test_mocker_reads_the_same_model(self) -> None:
        words = on_dynamo.MockerWorker(self.place, 0).launch(make_vllm_plan(), 4321).argv
        assert words[words.index("--model-path") + 1] == "/models/it is here"
        assert words[words.index("--model-name") + 1] == make_vllm_plan().model.served_name
        most = int(words[words.index("--num-gpu-blocks-override") + 1]) * on_dynamo.BLOCK_TOKENS
        assert make_vllm_plan().settings.context_tokens <= most < 8 * make_vllm_plan().settings.context_tokens

    def test_worker_explains_vllm_failures(self) -> None:
        log = "ValueError: Model architectures ['Nope'] are not supported for now"
        found = on_dynamo.VllmWorker(self.place, 0).explain(log)
        assert found is not None and "Nope" in found.message

    @pytest.mark.parametrize(
        ("device", "kind", "why"),
        [("cpu", "x86_64", None), ("cuda", "aarch64", None), ("cpu", "riscv64", "riscv64"), ("rocm", "x86_64", "rocm")],
    )
    def test_says_why_workers_are_mocked(self, device: Any, kind: str, why: str | None) -> None:
        found = on_dynamo.explain_mocked(device, kind)
        assert found is None if why is None else found is not None and why in found

    @pytest.mark.parametrize("mocked", [None, "--engine mocker"])
    def test_text_says_whether_workers_are_real(self, mocked: str | None) -> None:
        found = on_dynamo.describe_orchestrator(2, "cpu", mocked)
        assert found.real is (mocked is None) and found.workers == ("vllm" if mocked is None else "mocker")
        assert ("a real vLLM 0.31.0 on the CPU" if mocked is None else "timing is simulated") in found.text
        endpoint = Endpoint(url="http://x/v1", model="m", engine="vllm", engine_version="1", pid=1, log="l", on=found)
        assert found.text in render_text(render_ready(endpoint)) and from_json(Endpoint, to_json(endpoint)) == endpoint

    def test_workers_start_before_the_front_end(self, stub: EngineEnvironment, tmp_path: Path) -> None:
        one = make_stub_readied("alpha", stub, replicas=2)
        found = on_dynamo.DynamoOrchestration(one, tmp_path / "on", None)
        workers, (front,) = found.stages()
        assert [member.part.name for member in workers] == ["worker", "worker"]
        assert not any(member.part.routed for member in workers) and front.part.routed and not front.part.computes
        assert [member.need for member in workers] == list(one.needs)

    @LINUX
    def test_plan_is_made_for_vllm(self) -> None:
        found = choose_orchestrator(Order(on="dynamo", services=(ModelOrder(engine="mocker", replicas=2),)))
        assert found is not None and found.services == (ModelOrder(engine="vllm", replicas=2),)


class TestRay:
    def test_node_options_bind_loopback_and_limit_memory(self) -> None:
        head = on_ray.build_head_options(Path("/tmp/b"), 1234, 5678)
        node = on_ray.build_worker_options(Path("/tmp/b"), 1234)
        for options in (head, node):
            assert "--block" in options
            assert options[options.index("--node-ip-address") + 1] == "127.0.0.1"
            assert options[options.index("--object-store-memory") + 1] == "100000000"
            assert json.loads(options[options.index("--resources") + 1]) == {ray_serve.RESOURCE: 1}
        assert head[:3] == ("--head", "--port", "1234") and node[:2] == ("--address", "127.0.0.1:1234")
        assert "--disable-usage-stats" in head and head[head.index("--include-dashboard") + 1] == "false"
        assert on_ray.VARIABLES["RAY_USAGE_STATS_ENABLED"] == "0"
        assert on_ray.VARIABLES["RAY_SERVE_PROXY_PREFER_LOCAL_NODE_ROUTING"] == "0"

    def test_each_node_has_its_number_and_a_health_check(self) -> None:
        head = on_ray.RayHeadNode(Path("c.json"), "llama.cpp", "t").launch(make_vllm_plan(), 4321)
        node = on_ray.RayWorkerNode(Path("c.json"), "llama.cpp", "t", 1).launch(make_vllm_plan(), 4321)
        assert head.argv == ("ray-serve", "head", "c.json", "--port", "4321") and head.health_path == ray_serve.READY
        assert node.argv[1] == "node" and node.health_path == "/api/local_raylet_healthz"
        assert (head.env[ray_serve.NODE], node.env[ray_serve.NODE]) == ("0", "1")
        assert head.env["RAY_AUTH_TOKEN"] == node.env["RAY_AUTH_TOKEN"] == "t" and head.env["RAY_AUTH_MODE"] == "token"

    @pytest.mark.parametrize("id", [one.id for one in load_engines().values()])
    def test_port_of_every_engine_is_a_placeholder(self, id: str) -> None:
        one = get_engine(id)
        for on in ("cpu", "H100 SXM", "RTX 4090"):
            target = one.find_target(machine(on))
            which = model("meta-llama/Llama-3.1-8B-Instruct", folder=True)
            if target is None or not one.list_weights(target, which, Workload()):
                continue
            chosen = plan(one, machine(on), which)
            marked, real = on_ray.replace_port(one, chosen), one.launch(chosen, 4321)
            assert [word.replace("{port}", "4321") for word in marked.argv] == list(real.argv)
            assert {k: v.replace("{port}", "4321") for k, v in marked.env.items()} == real.env
            assert "{port}" in " ".join([*marked.argv, *marked.env.values()])

    def test_replica_config(self, stub: EngineEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("BEDPLATE_API_KEY", "secret")
        one = make_stub_readied("alpha", stub, replicas=2)
        folder = tmp_path / "on"
        folder.mkdir()
        found = on_ray.RayOrchestration(one, stub, folder, [tmp_path / "1.log", tmp_path / "2.log"])
        written = json.loads(found.config.read_text())
        assert found.config.stat().st_mode & 0o777 == 0o600
        told = written["engine"]
        assert written["replicas"] == len(told["envs"]) == len(told["logs"]) == 2
        assert "BEDPLATE_API_KEY" not in told["envs"][0]
        assert told["key_variable"] == get_engine("llama.cpp").key_variable
        assert any(word.endswith("warden.py") for word in told["argv"]) and "{port}" in told["argv"]
        assert written["ongoing"] == 2 * one.plan.settings.slots
        (members,) = found.stages()
        assert [member.part.name for member in members] == ["head node", "node"]
        assert members[1].need[HOST] == one.needs[1][HOST] + on_ray.NODE_BYTES
        found.close()
        assert not folder.exists()

    def test_replica_requires_the_key_of_the_head_node(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """It has two keys: the gateway's, which requests carry, and its engine's, which it sends on."""
        monkeypatch.setattr(ray_serve, "_keep_replica_on_loopback", lambda: None)
        for thread in ("_keep_log", "_end_with_engine"):  # they last as long as the process
            monkeypatch.setattr(ray_serve.EngineReplica, thread, lambda *_: None)
        told = {
            "ready": str(tmp_path / "ready"), "envs": [{}], "key_variable": "ENGINE_KEY", "cwd": str(tmp_path),
            "argv": [sys.executable, "-c", KEYED_ENGINE, "{port}"], "logs": [str(tmp_path / "log")],
            "health": "/health", "limit_s": 600.0, "starts": [str(tmp_path / "starts")],
        }  # fmt: skip
        replica = ray_serve.EngineReplica(told, "secret")

        async def send(path: str, *headers: tuple[bytes, bytes]) -> int:
            async def receive() -> dict[str, Any]:
                return {"type": "http.request", "body": b"", "more_body": False}

            scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": list(headers)}
            return (
                await replica(Request({**scope, "server": ("127.0.0.1", 1), "scheme": "http"}, receive))
            ).status_code

        async def run() -> None:
            right = (b"authorization", b"Bearer secret")
            for path in (ray_serve.READY, "/v1/models"):
                assert await send(path) == await send(path, (b"authorization", b"Bearer wrong")) == 401
            assert await send("/v1/models", right) == 200 and await send(ray_serve.READY, right) == 503
            assert replica._session is not None
            await replica._session.close()

        try:
            asyncio.run(run())
        finally:
            replica._process.kill()
            replica._process.communicate()

    def test_replica_holds_requests_of_a_lost_engine_until_it_exits(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A replica that answers at once looks idle to Serve, which then sends it all retries."""
        monkeypatch.setattr(ray_serve, "_keep_replica_on_loopback", lambda: None)
        exited = threading.Event()
        monkeypatch.setattr("bedplate.engines.shipped.ray_serve.os._exit", lambda code: exited.set())
        monkeypatch.setattr(ray_serve.EngineReplica, "_keep_log", lambda *_: None)
        told = {
            "ready": str(tmp_path / "ready"), "envs": [{}], "key_variable": "ENGINE_KEY", "cwd": str(tmp_path),
            "argv": [sys.executable, "-c", KEYED_ENGINE, "{port}"], "logs": [str(tmp_path / "log")],
            "health": "/health", "limit_s": 600.0, "starts": [str(tmp_path / "starts")],
        }  # fmt: skip
        replica = ray_serve.EngineReplica(told, "secret")

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def run() -> None:
            headers = [(b"authorization", b"Bearer secret")]
            scope = {"type": "http", "method": "GET", "path": "/v1/models", "query_string": b"", "headers": headers}
            request = Request({**scope, "server": ("127.0.0.1", 1), "scheme": "http"}, receive)
            replica._process.kill()
            asked = asyncio.create_task(replica(request))
            await until(exited.is_set, "the replica to exit")
            assert not asked.done()
            asked.cancel()
            assert replica._session is not None
            await replica._session.close()

        asyncio.run(run())
        replica._process.communicate()

    def test_replicas_that_serve_replaced_are_counted(self, stub: EngineEnvironment, tmp_path: Path) -> None:
        folder = tmp_path / "on"
        folder.mkdir()
        one = make_stub_readied("alpha", stub, replicas=2)
        found = on_ray.RayOrchestration(one, stub, folder, [tmp_path / "1.log", tmp_path / "2.log"])
        engines: Any = [
            SimpleNamespace(
                backend=SimpleNamespace(restarts=restarts, restarts_behind=0),
                supervisor=SimpleNamespace(engine=on_ray.RayNode(tmp_path, "llama.cpp", "t", number)),
                part=part,
            )
            for number, (restarts, part) in enumerate(((0, on_ray.HEAD), (5, on_ray.FURTHER)))
        ]

        def restart(node: int, *runs: str) -> list[int]:
            with found.starts[node].open("a") as starts:
                starts.writelines(f"{run}\n" for run in runs)
            for _ in range(2):
                found._count_restarts(engines)
            return [engine.backend.restarts for engine in engines]

        assert restart(0, "a") == [0, 5], "the first start"
        assert restart(1, "b", "b") == [0, 6]
        assert restart(1, "c") == [0, 6], "the supervisor counts restarts of the node"
        assert restart(0, "a", "a") == [2, 6]
        assert "Ray Serve replaced it" in engines[0].backend.last_exit.text
        assert [engine.backend.restarts_behind for engine in engines] == [1, 0], "for the metrics of the gateway"
        found.close()

    def test_text_names_nodes_and_engine(self, stub: EngineEnvironment) -> None:
        found = on_ray.describe_orchestrator(make_stub_readied("alpha", stub).plan, 2)
        assert found.real and "cluster of 2 nodes" in found.text and "llama.cpp" in found.text

    def test_replica_explains_engine_failures(self) -> None:
        log = "RuntimeError: the engine ended with status 1\nValueError: Model architectures ['Nope'] are not supported"
        found = on_ray.RayHeadNode(Path("c"), "vllm", "t").explain(log)
        assert found is not None and "Nope" in found.message

    def test_explains_a_lost_ray_process(self) -> None:
        """As it was printed by Ray 2.60.0 when its raylet was killed."""
        log = (
            "2026-11-15 16:31:57,275\tERR scripts.py:1307 -- Some Ray subprocesses exited unexpectedly:\n"
            "2026-11-15 16:31:57,275\tERR scripts.py:87 --   raylet [exit code=-9]\n"
            "2026-11-15 16:31:57,306\tERR scripts.py:1315 -- Remaining processes will be killed.\n"
        )
        found = on_ray.RayWorkerNode(Path("c"), "llama.cpp", "t", 1).explain(log)
        assert found is not None and not found.lasting and found.message == "its raylet exited (exit code=-9)"

    def test_worker_nodes_restart_with_their_head(self) -> None:
        class Process:
            def __init__(self) -> None:
                self.ended = asyncio.Event()
                self.killed = 0

            def kill(self) -> None:
                self.killed += 1
                self.ended.set()

        async def run() -> None:
            engines: list[Any] = [
                SimpleNamespace(part=part, supervisor=SimpleNamespace(process=Process()))
                for part in (on_ray.HEAD, on_ray.FURTHER)
            ]
            one: Any = SimpleNamespace(_count_restarts=lambda engines: None)
            head, node = (one.supervisor for one in engines)
            first = node.process
            keeping = asyncio.create_task(on_ray.RayOrchestration.keep(one, engines))
            await asyncio.sleep(0)
            assert not first.killed
            head.process.ended.set()
            await until(lambda: first.killed == 1, "the node to be ended")
            head.process, node.process = Process(), Process()
            await asyncio.sleep(3 * on_ray.LOOK_S)
            assert not node.process.killed, "once for each exit of the head"
            head.process.ended.set()
            await until(lambda: node.process.killed == 1, "the next one to be ended")
            keeping.cancel()

        asyncio.run(run())


class TestFolder:
    def test_only_folders_of_exited_processes_are_removed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
        monkeypatch.setattr(orchestrated, "MOST_ROOT_BYTES", 1000)
        dead = subprocess.Popen([sys.executable, "-c", "pass"])
        dead.wait()
        left, theirs = tmp_path / f"bedplate-{dead.pid}-abc", tmp_path / f"bedplate-{os.getppid()}-abc"
        for folder in (left, theirs, tmp_path / "bedplate-notes"):
            folder.mkdir()
        own = orchestrated.make_private_folder()
        assert own.stat().st_mode & 0o077 == 0 and own.parent == tmp_path
        assert not left.exists() and theirs.exists() and (tmp_path / "bedplate-notes").exists()

    def test_private_folder_path_is_short_enough_for_sockets(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tempfile, "gettempdir", lambda: "/var/folders/zz/zyxvpxvq6csfxvn_n0000000000000/T")
        own = orchestrated.make_private_folder()
        own.rmdir()
        deepest = own / "session_2026-11-15_15-20-00_123456_4194304" / "sockets" / "plasma_store.12"
        assert len(str(deepest)) < 104


def render_text(what: object) -> str:
    out = Console(width=200)
    with out.capture() as captured:
        out.print(what)
    return captured.get()


# a host with stubs in place of the orchestrator's processes


class Stub(Engine):
    id = "ray"
    name = "Ray"
    version = "9"

    def launch(self, plan: Plan, port: int) -> Launch:
        return Launch(argv=("llama-server", "--port", str(port)))


class StubOrchestration:
    """One process that takes requests and two that compute."""

    above = EndpointOrchestrator(
        orchestrator="ray", version="9", workers="llama.cpp", workers_version="1", real=True, replicas=2, text="Ray 9"
    )

    def __init__(self, environment: EngineEnvironment, worker: EngineEnvironment | None = None) -> None:
        self.environment = environment
        self.kept: list[str] = []
        self.closed = False

    def stages(self) -> Sequence[Sequence[OrchestratedProcess]]:
        worker = OrchestratedProcess(ProcessRole("worker", routed=False), Stub(), {HOST: 2})
        return ([worker, worker], [OrchestratedProcess(ProcessRole("front", computes=False), Stub(), {HOST: 1})])

    async def keep(self, engines: Sequence[Any]) -> None:
        self.kept = [one.id for one in engines]

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def stub(tmp_path: Path, bedplate_home: Path) -> EngineEnvironment:
    return make_stub_environment(tmp_path / "stub")


class TestHost:
    def test_one_process_takes_requests_and_all_are_supervised(self, stub: EngineEnvironment, tmp_path: Path) -> None:
        on = StubOrchestration(stub)

        async def then(host: Host) -> None:
            one = make_stub_readied("alpha", stub, replicas=2)
            service = await host.add_service(one.decided.wanted, one, on)
            front, *workers = service.engines
            assert service.state == "ready" and front.part.name == "front" and len(workers) == 2
            assert {engine.id for engine in host.engines} == {"ray-1", "ray-2", "ray-3"}
            assert host.gateway.backends == [front.backend] and front.backend.slots == 2 * one.plan.settings.slots
            assert {read_pid(await ask(host, "alpha", words=str(n))) for n in range(6)} == {front.pid}
            await until(lambda: on.kept, "their lives to be tied together")
            assert on.kept[0] == front.id

            found = await collect_status(host, ServiceRecord(
                name="test", pid=1, birth="b", socket="s", log="l", version="v", started_at="t"
            ))  # fmt: skip
            (told,) = found.models
            assert told.on == on.above and [engine.part for engine in told.engines] == ["front", "worker", "worker"]
            assert "Ray 9" in render_text(render_status(found)) and "worker" in render_text(render_status(found))

            pid = workers[0].pid
            assert pid is not None
            psutil.Process(pid).kill()
            await until(lambda: workers[0].pid not in (None, pid) and workers[0].state == "ready", "it to come back")
            assert service.state == "ready" and workers[0].backend.restarts == 1
            assert read_pid(await ask(host, "alpha")) == front.pid

        with_host(then, tmp_path)
        assert on.closed

    def test_orchestrated_engines_cannot_be_swapped(self, stub: EngineEnvironment, tmp_path: Path) -> None:
        async def then(host: Host) -> None:
            one = make_stub_readied("alpha", stub, replicas=2)
            await host.add_service(one.decided.wanted, one, StubOrchestration(stub))
            for work in (
                migrate(host, MigrationRequest(engine="vllm"), print),
                run_shadow(host, ShadowRequest(engine="vllm"), print),
            ):
                with pytest.raises(NotPossible, match="runs on Ray"):
                    await work

        with_host(then, tmp_path)

    @pytest.mark.parametrize("lost", [["front"], ["worker", "worker"]])
    def test_service_fails_without_front_end_or_workers(
        self, stub: EngineEnvironment, tmp_path: Path, lost: list[str]
    ) -> None:
        async def then(host: Host) -> None:
            one = make_stub_readied("alpha", stub, replicas=2)
            service = await host.add_service(one.decided.wanted, one, StubOrchestration(stub))
            for member in [member for member in service.engines if member.part.name in lost]:
                assert service.state == "ready" and not host.fatal.done()
                member.backend.state = "failed"
                host._handle_lost_engine(service, member, KnownFailure(message="no good", hint="none"))
            assert service.state == "failed" and isinstance(host.fatal.result(), BedplateError)

        with_host(then, tmp_path)
