"""Ray on this machine: a cluster of as many nodes as there are replicas, and Ray Serve with one replica on each.

A replica runs the engine's own server, from bedplate's environment and by the plan, so that every engine can be one.
Everything listens on loopback. Options and variables by Ray 2.60.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bedplate.decide.together import HOST, Need
from bedplate.deploy.images import RAY_VERSION as VERSION
from bedplate.engines import Engine, Failure, Recipe
from bedplate.engines import engine as engine_by_id
from bedplate.engines.shipped.ray_serve import NODE, READY, RESOURCE
from bedplate.errors import BadQuestion
from bedplate.hosting.memory import summed
from bedplate.hosting.orchestrated import Member, Part, private_folder
from bedplate.run.environments import Environment, command, make_environment
from bedplate.run.ready import readied
from bedplate.run.supervisor import LONGEST_START_S, free_port, surroundings
from bedplate.run.trials import PATIENT
from bedplate.run.warden import guarded
from bedplate.values import Launch, Plan, replaced
from bedplate.values.endpoint import Above

if TYPE_CHECKING:
    from bedplate.hosting.host import HostedEngine
    from bedplate.progress import Progress
    from bedplate.run.ready import Decided, Readied
    from bedplate.run.trials import Examiner
    from bedplate.values.service import Order

LOOPBACK = "127.0.0.1"
STORE_BYTES = 100_000_000
"""For objects that tasks share, of which there are none; Ray takes no less than 79 MB."""
HEAD_BYTES, NODE_BYTES = 1_200_000_000, 500_000_000
"""Of Ray's own processes."""
HEAD, FURTHER = Part("head node"), Part("node", routed=False)
LOOK_S = 0.1
_LOST = re.compile(r"subprocesses exited unexpectedly:\s*\n.*?(\w+) \[(exit code=-?\d+)\]")
"""What `ray start --block` says before it ends."""
RECIPE = Recipe(
    packages=(f"ray[serve]=={VERSION}",),
    programs=(("ray-serve", "ray_serve.py"),),
    download_bytes=110_000_000,
    disk_bytes=400_000_000,
    check="import ray, ray.serve, aiohttp, starlette",
)
VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ADDRESS": "",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
    # Ray would end workers when memory is short; what they need was counted before they were started.
    "RAY_memory_monitor_refresh_ms": "0",
    # A node that is gone does not answer at all, and is given up after five seconds instead of twenty. One that is busy
    # has ten seconds for each answer.
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "10000",
    "RAY_health_check_failure_threshold": "5",
    # The proxy would keep to the replica on its own node, as long as that is not full; here all are equally near.
    "RAY_SERVE_PROXY_PREFER_LOCAL_NODE_ROUTING": "0",
    # Its workers are started by scripts of its own, into which nothing of the user's is to get.
    "PYTHONPATH": "",
}


class Ray:
    """Ray for one order."""

    def __init__(self, order: Order) -> None:
        self.services = order.services
        (wanted,) = order.services
        if wanted.engine == "mocker":
            raise BadQuestion("--on ray: the mocker is Dynamo's", hint="--on dynamo --engine mocker")
        if wanted.engine is not None:
            engine_by_id(wanted.engine)

    def readied(self, one: Decided, progress: Progress, examiner: Examiner | None = None) -> Readied:
        self.environment = make_environment(Packages(), progress)
        return readied(one, progress, examiner=examiner)

    def orchestration(self, one: Readied, name: str, logs: Path) -> Orchestrated:
        return Orchestrated(one, self.environment, private_folder(), [logs / f"{name}@{file}" for file in _logs(one)])


def _logs(one: Readied) -> list[str]:
    return [f"{one.plan.engine}-{number + 1}.log" for number in range(len(one.needs))]


class Packages(Engine):
    id = "ray"
    name = "Ray"
    version = VERSION
    recipe = RECIPE


class Process(Engine):
    """One node of the cluster."""

    id = "ray"
    name = "Ray"
    version = VERSION

    def __init__(self, config: Path, engine: str, token: str, number: int = 0) -> None:
        self.config, self.engine, self.number = config, engine, number
        # Without it everybody on this machine could have the cluster run what they like, as us.
        self.variables = {**VARIABLES, NODE: str(number), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}

    def explain(self, log: str) -> Failure | None:
        """A replica whose engine does not start says what the engine said."""
        if lost := _LOST.search(log):
            message = f"its {lost[1]} ended ({lost[2]})"
            return Failure(message=message, hint="was it killed, or is memory short?", lasting=False)
        return engine_by_id(self.engine).explain(log)


class Head(Process):
    """Keeps the books of the cluster, and has the proxy that everything goes through."""

    def launch(self, plan: Plan, port: int) -> Launch:
        argv = ("ray-serve", "head", str(self.config), "--port", str(port))
        return Launch(argv=argv, env=self.variables, health_path=READY)


class Node(Process):
    """Has a replica, and does what the head says."""

    def launch(self, plan: Plan, port: int) -> Launch:
        argv = ("ray-serve", "node", str(self.config), "--port", str(port))
        return Launch(argv=argv, env=self.variables, health_path="/api/local_raylet_healthz")


def node_options(folder: Path) -> tuple[str, ...]:
    """What every node is started with: its processes stay below ours, on loopback, and within bounds."""
    return (
        "--block", "--node-ip-address", LOOPBACK, "--num-cpus", "1", "--num-gpus", "0",
        "--resources", json.dumps({RESOURCE: 1}, separators=(",", ":")), "--object-store-memory", str(STORE_BYTES),
        "--min-worker-port", "0", "--max-worker-port", "0", "--include-log-monitor", "false", "--log-color", "false",
        "--temp-dir", str(folder),
    )  # fmt: skip


def head_options(folder: Path, port: int, client_port: int) -> tuple[str, ...]:
    return (
        "--head", "--port", str(port), *node_options(folder), "--include-dashboard", "false", "--no-monitor",
        "--disable-usage-stats", "--ray-client-server-port", str(client_port),
    )  # fmt: skip


def further_options(folder: Path, port: int) -> tuple[str, ...]:
    return ("--address", f"{LOOPBACK}:{port}", *node_options(folder))


def with_port(engine: Engine, plan: Plan) -> Launch:
    """The engine's launch with `{port}` where its port belongs, which each replica finds for itself."""
    one, other = engine.launch(plan, 64001), engine.launch(plan, 64002)

    def marked(first: str, second: str) -> str:
        return first if first == second else first.replace("64001", "{port}")

    argv = tuple(marked(*words) for words in zip(one.argv, other.argv, strict=True))
    env = {name: marked(value, other.env[name]) for name, value in one.env.items()}
    return replaced(one, argv=argv, env=env)


def ongoing(plan: Plan) -> int:
    """Requests that a replica is sent at once: as many again as it computes may wait in its engine."""
    most = engine_by_id(plan.engine).connections(plan.settings)
    return 2 * plan.settings.slots if most is None else max(1, min(2 * plan.settings.slots, most))


class Orchestrated:
    """A head node and further ones, with a replica on each."""

    def __init__(self, one: Readied, environment: Environment, folder: Path, logs: Sequence[Path]) -> None:
        self.environment = environment
        self.folder = folder
        self.plan = one.plan
        self.needs: Sequence[Need] = one.needs
        self.config = folder / "bedplate.json"
        self.above = above(one.plan, len(one.needs))
        port, client_port = free_port(), free_port()
        config: dict[str, Any] = {
            "address": f"{LOOPBACK}:{port}",
            "up": str(folder / "up"),
            "head": head_options(folder, port, client_port),
            "node": further_options(folder, port),
            "replicas": len(one.needs),
            "ongoing": ongoing(one.plan),
            "engine": _engine(one, logs, folder),
        }
        self.config.touch(0o600)
        self.config.write_text(json.dumps(config))

    def stages(self) -> Sequence[Sequence[Member]]:
        told = self.config, self.plan.engine, secrets.token_hex(32)
        head = Member(HEAD, Head(*told), summed([self.needs[0], {HOST: HEAD_BYTES}]))
        nodes = [
            Member(FURTHER, Node(*told, number), summed([need, {HOST: NODE_BYTES}]))
            for number, need in enumerate(self.needs)
            if number
        ]
        return ([head, *nodes],)

    async def keep(self, engines: Sequence[HostedEngine]) -> None:
        """A cluster is lost with its head. The other nodes then begin anew, too, and join the next one."""
        head = next(engine for engine in engines if engine.part.routed)
        lost = None
        while True:
            process = head.supervisor.process
            if process is not None and process is not lost:
                await process.ended.wait()
                lost = process
                for engine in engines:
                    other = engine.supervisor.process
                    if engine is not head and other is not None and not other.ended.is_set():
                        other.kill()
            await asyncio.sleep(LOOK_S)

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _engine(one: Readied, logs: Sequence[Path], folder: Path) -> dict[str, Any]:
    """How a replica starts its engine, for each node it may be on."""
    engine, plan = engine_by_id(one.plan.engine), one.plan
    launch = with_port(engine, plan)
    cores = one.decided.hardware.cpu.allowed_physical_cores
    patient = PATIENT if (plan.settings.threads or 0) * len(one.needs) > cores else {}
    return {
        "argv": guarded(command(one.environment, launch)),
        "envs": [
            _surroundings(one, launch, {**patient, **one.start(replica).env}) for replica in range(len(one.needs))
        ],
        "cwd": str(one.folder) if one.folder is not None else os.getcwd(),  # noqa: PTH109
        "health": launch.health_path,
        "key_variable": engine.key_variable,
        "logs": [str(log) for log in logs],
        # Whether it still does something while it starts is for the node's supervisor to see.
        "limit_s": LONGEST_START_S,
        "ready": str(folder / "ready"),
    }


def _surroundings(one: Readied, launch: Launch, more: Mapping[str, str]) -> dict[str, str]:
    return surroundings(one.plan, engine_by_id(one.plan.engine), one.environment, launch, more)


def above(plan: Plan, replicas: int) -> Above:
    engine = f"{engine_by_id(plan.engine).name} {plan.engine_version}"
    nodes = f"{replicas} nodes" if replicas != 1 else "one node"
    where = "on each of them" if replicas != 1 else "on it"
    return Above(
        orchestrator="ray",
        version=VERSION,
        workers=plan.engine,
        workers_version=plan.engine_version,
        real=True,
        replicas=replicas,
        text=f"Ray Serve {VERSION} on a cluster of {nodes} here, with a replica of {engine} {where}",
    )
