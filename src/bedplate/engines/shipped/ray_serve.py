"""A node of a Ray cluster on one machine and, on the head node, the Ray Serve application.

Runs in Ray's environment with the packages of `ray[serve]`. Each replica starts the engine's server in the engine's
environment under a warden process, and forwards requests to it. bedplate writes the configuration file, and gives the
head node the key that requests must carry.

    ray-serve head CONFIG --port PORT    starts the head node and the application, which listens on PORT
    ray-serve node CONFIG --port PORT    starts a further node; its agent reports its state on PORT
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import hmac
import json
import logging
import logging.handlers
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import aiohttp
    from starlette.requests import Request
    from starlette.responses import Response

READY = "/bedplate/ready"
APPLICATION = "bedplate"
NODE = "BEDPLATE_RAY_NODE"
RUN = "BEDPLATE_RAY_RUN"
"""Identifies one run of a node: replicas that start again in the same run were replaced by Serve."""
KEY_VARIABLE = "BEDPLATE_ENGINE_KEY"
RESOURCE = "bedplate_replica"
LOG_BYTES, LOGS_KEPT = 10_000_000, 4
TAIL_LINES = 50
LOOK_S = 0.05
HEAD_LIMIT_S = 300.0
HANG_S, CHECK_EVERY_S, CHECK_LIMIT_S = 40.0, 5.0, 5.0
"""An engine that does not answer its health check and uses no CPU for the first of these times hangs."""
BUSY_SHARE = 0.02
"""Of a core."""
EXIT_LIMIT_S = 60.0
"""How long a request waits for this process to exit with its engine."""
NOT_FORWARDED = frozenset(
    ["host", "connection", "content-length", "transfer-encoding", "accept-encoding", "keep-alive", "authorization"]
)


class EngineReplica:
    """One engine process and a proxy to it. It exits with its engine; Serve then starts a new replica."""

    def __init__(self, engine: dict[str, Any], key: str) -> None:
        """`key`: what requests to this replica must carry. The engine's own key is another one."""
        _keep_replica_on_loopback()
        self._accepted = f"Bearer {key}".encode()
        node = int(os.environ.get(NODE, "0"))
        with Path(engine["starts"][node]).open("a") as starts:
            starts.write(f"{os.environ.get(RUN, '')}\n")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._port, self._url = port, f"http://127.0.0.1:{port}"
        self._ready = Path(engine["ready"])
        env = dict(engine["envs"][node])
        self._key = secrets.token_urlsafe(32) if engine["key_variable"] else None
        if self._key is not None:
            env[engine["key_variable"]] = self._key
        argv = [word.replace("{port}", str(port)) for word in engine["argv"]]
        env = {name: value.replace("{port}", str(port)) for name, value in env.items()}
        # The warden stops the engine when its stdin closes, so the engine ends whenever this process does.
        self._process = subprocess.Popen(
            argv,
            cwd=engine["cwd"],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        self._session: aiohttp.ClientSession | None = None
        threading.Thread(target=self._keep_log, args=(engine["logs"][node], argv), daemon=True).start()
        self._wait_until_healthy(self._url + engine["health"], engine["limit_s"])
        threading.Thread(target=self._end_with_engine, daemon=True).start()
        threading.Thread(target=self._end_hung_engine, args=(self._url + engine["health"],), daemon=True).start()

    def _keep_log(self, path: str, argv: list[str]) -> None:
        log = logging.Logger("engine")
        log.addHandler(logging.handlers.RotatingFileHandler(path, maxBytes=LOG_BYTES, backupCount=LOGS_KEPT))
        log.info("# %s %s", time.strftime("%Y-%m-%d %H:%M:%S"), " ".join(argv))
        if self._process.stderr is not None:
            for raw in self._process.stderr:
                line = raw.decode("utf-8", "replace").rstrip()
                self._tail.append(line)
                log.info("%s", line)

    def _wait_until_healthy(self, url: str, limit_s: float) -> None:
        until = time.monotonic() + limit_s
        headers = {"Authorization": f"Bearer {self._key}"} if self._key is not None else {}
        request = urllib.request.Request(url, headers=headers)  # noqa: S310
        while self._process.poll() is None and time.monotonic() < until:
            with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=5) as answer:  # noqa: S310
                if answer.status == 200:
                    return
            time.sleep(LOOK_S)
        code = self._process.poll()
        state = f"exited with status {code}" if code is not None else f"was not ready after {limit_s:.0f} s"
        self._process.kill()
        raise RuntimeError(f"the engine {state}\n" + "\n".join(self._tail))

    def _end_with_engine(self) -> None:
        """Exit with the engine: Serve notices an exited actor at once, an unhealthy one only at its next check."""
        self._process.wait()
        os._exit(1)

    def _end_hung_engine(self, url: str) -> None:
        if not Path("/proc/self/stat").exists():
            return  # without CPU times, a busy engine that does not answer looks like one that hangs
        wait_for_hang(url, self._process.pid)
        # The warden kills the engine; the replica exits with it.
        if self._process.stdin is not None:
            self._process.stdin.close()

    def check_health(self) -> None:
        if self._process.poll() is not None:
            raise RuntimeError("the engine has exited")

    async def __call__(self, request: Request) -> Response:
        from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

        if not hmac.compare_digest(request.headers.get("authorization", "").encode(), self._accepted):
            message = "missing or wrong API key"
            return JSONResponse({"error": {"message": message, "type": "authentication_error"}}, 401)
        if request.url.path == READY:
            return PlainTextResponse(
                "ready" if self._ready.exists() else "starting", 200 if self._ready.exists() else 503
            )
        import aiohttp

        try:
            answer = await self._forward(request)
            kind = answer.headers.get("content-type", "application/json")
            if kind.startswith("text/event-stream"):
                # An engine that is lost before its first event is an error with a status, which can be retried.
                first = await _read_first_event(answer)
                return StreamingResponse(_stream_events(first, answer), answer.status, media_type=kind)
            # Read completely before the response starts: a truncated body could look complete.
            async with answer:
                return Response(await answer.read(), answer.status, media_type=kind)
        except (OSError, aiohttp.ClientError) as error:
            await self._wait_for_exit()
            message = f"the engine of this replica cannot be reached: {error}"
            return JSONResponse({"error": {"message": message, "type": "server_error"}}, 502)

    async def _wait_for_exit(self) -> None:
        """Keep a request whose engine was lost until this process exits with the engine.

        Answered at once, the replica would look idle, and Serve would send it the next requests and their retries. A
        request of a replica that has exited fails too, but Serve sends its retry to another replica.
        """
        until = time.monotonic() + EXIT_LIMIT_S
        while not await self._is_engine_answering() and time.monotonic() < until:  # noqa: ASYNC110 - a thread exits
            await asyncio.sleep(LOOK_S)

    async def _is_engine_answering(self) -> bool:
        """Whether the engine accepts connections; if so, only one connection was lost."""
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            return False
        writer.close()
        return True

    async def _forward(self, request: Request) -> aiohttp.ClientResponse:
        import aiohttp

        if self._session is None:
            # No limit here: the engine limits concurrent requests, and Serve limits what it sends to a replica.
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=10), connector=aiohttp.TCPConnector(limit=0)
            )
        headers = {name: value for name, value in request.headers.items() if name not in NOT_FORWARDED}
        if self._key is not None:
            headers["authorization"] = f"Bearer {self._key}"
        target = f"{self._url}{request.url.path}" + (f"?{request.url.query}" if request.url.query else "")
        return await self._session.request(request.method, target, data=await request.body(), headers=headers)


def wait_for_hang(
    url: str, pid: int, hang_s: float = HANG_S, every_s: float = CHECK_EVERY_S, limit_s: float = CHECK_LIMIT_S
) -> None:
    """Return when the engine below this process hangs. Time in which this process itself was stopped does not count."""
    silent_s, looked_at, cpu_s = 0.0, time.monotonic(), measure_cpu_seconds(pid)
    while silent_s < hang_s:
        time.sleep(every_s)
        is_answering = False
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=limit_s) as answer:  # noqa: S310
            is_answering = answer.status == 200
        now, used_s = time.monotonic(), measure_cpu_seconds(pid)
        elapsed_s = min(now - looked_at, every_s + 2 * limit_s)
        has_progress = is_answering or used_s - cpu_s >= BUSY_SHARE * elapsed_s
        silent_s = 0.0 if has_progress else silent_s + elapsed_s
        looked_at, cpu_s = now, used_s


def measure_cpu_seconds(pid: int) -> float:
    """CPU time of a process and its descendants."""
    parents, ticks = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = path.read_text().rpartition(")")[2].split()
            parents[int(path.parent.name)] = int(fields[1])
            ticks[int(path.parent.name)] = sum(map(int, fields[11:15]))
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return sum(ticks.get(one, 0) for one in found) / os.sysconf("SC_CLK_TCK")


async def _read_first_event(answer: aiohttp.ClientResponse) -> bytes:
    try:
        return await answer.content.readany()
    except BaseException:  # also if the client disconnects
        answer.close()
        raise


async def _stream_events(first: bytes, answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Forward events as they arrive. If the client disconnects, so does the engine's connection, which then stops."""
    try:
        yield first
        async for data in answer.content.iter_any():
            yield data
    finally:
        answer.close()


def main() -> int:
    if sys.argv[1:2] == ["start"]:
        return _start(sys.argv[1:])
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("head", "node"))
    parser.add_argument("config", type=Path)
    parser.add_argument("--port", type=int, required=True)
    asked = parser.parse_args()
    config = json.loads(asked.config.read_text())
    os.environ[RUN] = secrets.token_hex(8)
    start = [sys.executable, "-I", __file__, "start"]
    up, ready = Path(config["up"]), Path(config["engine"]["ready"])
    if asked.role == "node":
        _wait_for_head(up)
        argv = [*start, *config["node"], "--dashboard-agent-listen-port", str(asked.port)]
        os.execv(argv[0], argv)  # noqa: S606
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        agent = probe.getsockname()[1]
    # Files of an earlier run would report this one as ready. The last is Ray's own: as long as a raylet of the lost
    # cluster has not ended, Ray 2.60 would take the cluster at this address for running, and refuse to start.
    for mark in (up, ready, up.with_name("ray_current_cluster")):
        mark.unlink(missing_ok=True)
    head = subprocess.Popen([*start, *config["head"], "--dashboard-agent-listen-port", str(agent)])
    _wait_for_port(config["address"], head)
    threading.Thread(target=_serve, args=(config, asked.port), daemon=True).start()
    return head.wait() or 1


def _start(words: list[str]) -> int:
    """Run `ray start` in this process, on loopback."""
    from ray.scripts import scripts

    _stay_on_loopback()
    sys.argv = ["ray", *words]
    scripts.main()
    return 0


def _stay_on_loopback() -> None:
    """Keep 127.0.0.1: Ray would replace it by a network address, where anybody could run code."""
    from ray._private import services

    services.resolve_ip_for_localhost = lambda host: host


def _keep_replica_on_loopback() -> None:
    """Bind the gRPC port of replicas to loopback as well."""
    from ray.serve._private import replica

    bind = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, address: bind(server, address.replace("[::]", "127.0.0.1"))


def _wait_for_head(up: Path) -> None:
    """Wait until the head node is registered; it rejects nodes that connect before."""
    until = time.monotonic() + HEAD_LIMIT_S
    while not up.exists():
        if time.monotonic() > until:
            sys.exit(f"the head node did not start within {HEAD_LIMIT_S:.0f} s")
        time.sleep(LOOK_S)


def _wait_for_port(address: str, process: subprocess.Popen[bytes]) -> None:
    host, _, port = address.rpartition(":")
    until = time.monotonic() + HEAD_LIMIT_S
    while process.poll() is None:
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
            return
        except OSError:
            if time.monotonic() > until:
                sys.exit(f"the head node does not respond at {address}")
            time.sleep(LOOK_S)


def _serve(config: dict[str, Any], port: int) -> None:
    """Deploy the application. If that fails, the node exits."""
    try:
        import ray
        from ray import serve

        _stay_on_loopback()
        ray.init(address=config["address"], namespace=APPLICATION, log_to_driver=False)
        Path(config["up"]).touch()
        quiet = {"enable_access_log": False, "log_level": "WARNING"}
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port}, logging_config=quiet)
        replica = serve.deployment(
            EngineReplica,
            name="engine",
            num_replicas=config["replicas"],
            max_ongoing_requests=config["ongoing"],
            # One replica per node.
            ray_actor_options={"num_cpus": 0, "resources": {RESOURCE: 1}},
            health_check_period_s=2,
            max_constructor_retry_count=2,
            graceful_shutdown_timeout_s=5,
            logging_config=quiet,
        )
        serve.run(replica.bind(config["engine"], os.environ[KEY_VARIABLE]), name=APPLICATION, route_prefix="/")
        Path(config["engine"]["ready"]).touch()
        print(f"{config['replicas']} replicas are ready", flush=True)  # noqa: T201 - its log
    except BaseException:
        logging.getLogger().exception("the application could not be deployed")
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
