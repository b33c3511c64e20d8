"""Ray on this machine: a cluster with one node per replica, and Ray Serve with one replica on each node.

A replica runs the engine's own server from bedplate's environment with the plan's options, so every engine works.
Everything listens on loopback. Options and variables are those of Ray 2.60.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bedplate.decide.placement import HOST, Need
from bedplate.deploy.images import RAY_VERSION as VERSION
from bedplate.engines import Engine, EnvironmentRecipe, KnownFailure, PrivatePort
from bedplate.engines import get_engine as engine_by_id
from bedplate.engines.shipped.ray_serve import KEY_VARIABLE, NODE, READY, RESOURCE
from bedplate.errors import UsageError
from bedplate.hosting.memory import sum_needs
from bedplate.hosting.orchestration import OrchestratedProcess, ProcessRole, make_private_folder
from bedplate.run.environments import EngineEnvironment, build_command, make_environment
from bedplate.run.ready import prepare_model
from bedplate.run.supervisor import LONGEST_START_S, build_engine_variables, find_free_port
from bedplate.run.trials import PATIENT
from bedplate.run.warden import wrap_with_warden
from bedplate.values import Launch, Plan, replace_fields
from bedplate.values.endpoint import EndpointOrchestrator
from bedplate.values.service import LastExit

if TYPE_CHECKING:
    from bedplate.hosting.host import HostedEngine
    from bedplate.progress import Progress
    from bedplate.run.ready import ModelDecision, PreparedModel
    from bedplate.run.trials import Examiner
    from bedplate.values.service import Order

LOOPBACK = "127.0.0.1"
STORE_BYTES = 100_000_000
"""Size of the object store. It stays empty, and Ray requires at least 79 MB."""
HEAD_BYTES, NODE_BYTES = 1_200_000_000, 500_000_000
"""Memory of Ray's own processes."""
HEAD, FURTHER = ProcessRole("head node"), ProcessRole("node", routed=False)
LOOK_S = 0.1
REPLACED = "its replica or the replica's engine exited, and Ray Serve replaced it"
_LOST = re.compile(r"subprocesses exited unexpectedly:\s*\n.*?(\w+) \[(exit code=-?\d+)\]")
"""The message of `ray start --block` before it exits."""
RECIPE = EnvironmentRecipe(
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
    # Ray would kill workers when memory is low, but their memory was counted before they were started.
    "RAY_memory_monitor_refresh_ms": "0",
    # A lost node does not respond at all and is given up after five seconds instead of twenty. A busy node has ten
    # seconds for each response.
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "10000",
    "RAY_health_check_failure_threshold": "5",
    # The proxy would prefer the replica on its own node until it is full, but all nodes are on this machine.
    "RAY_SERVE_PROXY_PREFER_LOCAL_NODE_ROUTING": "0",
    # The proxy would be replaced if it took five seconds to start; on a busy machine it takes longer.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "50",
    # Ray starts its workers with its own scripts, which must not import the user's packages.
    "PYTHONPATH": "",
}


class RaySetup:
    """Ray for one order."""

    def __init__(self, order: Order) -> None:
        self.services = order.services
        (wanted,) = order.services
        if wanted.engine == "mocker":
            raise UsageError("--on ray: the mocker is part of Dynamo", hint="use --on dynamo --engine mocker")
        if wanted.engine is not None:
            engine_by_id(wanted.engine)

    def prepare(self, one: ModelDecision, progress: Progress, examiner: Examiner | None = None) -> PreparedModel:
        self.environment = make_environment(RayPackages(), progress)
        return prepare_model(one, progress, examiner=examiner)

    def make_orchestration(self, one: PreparedModel, name: str, logs: Path) -> RayOrchestration:
        return RayOrchestration(
            one, self.environment, make_private_folder(), [logs / f"{name}@{file}" for file in _name_logs(one)]
        )


def _name_logs(one: PreparedModel) -> list[str]:
    return [f"{one.plan.engine}-{number + 1}.log" for number in range(len(one.needs))]


class RayPackages(Engine):
    id = "ray"
    name = "Ray"
    version = VERSION
    recipe = RECIPE


class RayNode(Engine):
    """One node of the cluster."""

    id = "ray"
    name = "Ray"
    version = VERSION

    def __init__(self, config: Path, engine: str, token: str, number: int = 0) -> None:
        self.config, self.engine, self.number = config, engine, number
        # Without a token any user of this machine could run code in the cluster, as this user.
        self.variables = {**VARIABLES, NODE: str(number), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}

    def explain(self, log: str) -> KnownFailure | None:
        """The log contains the engine's own log if a replica's engine did not start."""
        if lost := _LOST.search(log):
            message = f"its {lost[1]} exited ({lost[2]})"
            return KnownFailure(message=message, hint="check whether it was killed or memory ran out", lasting=False)
        return engine_by_id(self.engine).explain(log)


class RayHeadNode(RayNode):
    """The head node: runs the control store of the cluster and the proxy for all requests."""

    key_variable = KEY_VARIABLE
    private_port = PrivatePort(
        key_checked_by="shipped server",
        open_paths=("/-/healthz", "/-/routes"),
        other_ports="ports of Ray's own processes on loopback, which require the cluster's token",
        source="shipped/ray_serve.py; Ray 2.60 answers the open paths in its proxy, before a replica",
    )
    # A request for the health path waits for a replica, which may be loading. The proxy answers this one itself.
    liveness_path = "/-/healthz"

    def launch(self, plan: Plan, port: int) -> Launch:
        argv = ("ray-serve", "head", str(self.config), "--port", str(port))
        return Launch(argv=argv, env=self.variables, health_path=READY)


class RayWorkerNode(RayNode):
    """A worker node with one replica."""

    def launch(self, plan: Plan, port: int) -> Launch:
        argv = ("ray-serve", "node", str(self.config), "--port", str(port))
        return Launch(argv=argv, env=self.variables, health_path="/api/local_raylet_healthz")


def build_node_options(folder: Path) -> tuple[str, ...]:
    """The options of every node: its processes stay children of this one, on loopback, with limited memory."""
    return (
        "--block", "--node-ip-address", LOOPBACK, "--num-cpus", "1", "--num-gpus", "0",
        "--resources", json.dumps({RESOURCE: 1}, separators=(",", ":")), "--object-store-memory", str(STORE_BYTES),
        "--min-worker-port", "0", "--max-worker-port", "0", "--include-log-monitor", "false", "--log-color", "false",
        "--temp-dir", str(folder),
    )  # fmt: skip


def build_head_options(folder: Path, port: int, client_port: int) -> tuple[str, ...]:
    return (
        "--head", "--port", str(port), *build_node_options(folder), "--include-dashboard", "false", "--no-monitor",
        "--disable-usage-stats", "--ray-client-server-port", str(client_port),
    )  # fmt: skip


def build_worker_options(folder: Path, port: int) -> tuple[str, ...]:
    return ("--address", f"{LOOPBACK}:{port}", *build_node_options(folder))


def replace_port(engine: Engine, plan: Plan) -> Launch:
    """The engine's launch with `{port}` in place of the port, which each replica chooses itself."""
    one, other = engine.launch(plan, 64001), engine.launch(plan, 64002)

    def mark_port(first: str, second: str) -> str:
        return first if first == second else first.replace("64001", "{port}")

    argv = tuple(mark_port(*words) for words in zip(one.argv, other.argv, strict=True))
    env = {name: mark_port(value, other.env[name]) for name, value in one.env.items()}
    return replace_fields(one, argv=argv, env=env)


def compute_max_ongoing(plan: Plan) -> int:
    """Concurrent requests of a replica: as many as it computes, and the same number again in its engine's queue."""
    most = engine_by_id(plan.engine).get_max_connections(plan.settings)
    return 2 * plan.settings.slots if most is None else max(1, min(2 * plan.settings.slots, most))


class RayOrchestration:
    """A head node and worker nodes, with a replica on each."""

    def __init__(self, one: PreparedModel, environment: EngineEnvironment, folder: Path, logs: Sequence[Path]) -> None:
        self.environment = environment
        self.folder = folder
        self.plan = one.plan
        self.needs: Sequence[Need] = one.needs
        self.config = folder / "bedplate.json"
        self.above = describe_orchestrator(one.plan, len(one.needs))
        self.starts = [folder / f"starts-{number}" for number in range(len(one.needs))]
        self._replaced: dict[Path, int] = {}
        port, client_port = find_free_port(), find_free_port()
        config: dict[str, Any] = {
            "address": f"{LOOPBACK}:{port}",
            "up": str(folder / "up"),
            "head": build_head_options(folder, port, client_port),
            "node": build_worker_options(folder, port),
            "replicas": len(one.needs),
            "ongoing": compute_max_ongoing(one.plan),
            "engine": {**_describe_engine(one, logs, folder), "starts": [str(path) for path in self.starts]},
        }
        self.config.touch(0o600)
        self.config.write_text(json.dumps(config))

    def stages(self) -> Sequence[Sequence[OrchestratedProcess]]:
        common = self.config, self.plan.engine, secrets.token_hex(32)
        head = OrchestratedProcess(HEAD, RayHeadNode(*common), sum_needs([self.needs[0], {HOST: HEAD_BYTES}]))
        nodes = [
            OrchestratedProcess(FURTHER, RayWorkerNode(*common, number), sum_needs([need, {HOST: NODE_BYTES}]))
            for number, need in enumerate(self.needs)
            if number
        ]
        return ([head, *nodes],)

    async def keep(self, engines: Sequence[HostedEngine]) -> None:
        """Restart the worker nodes when the head node is lost: the cluster is lost with it."""
        head = next(engine for engine in engines if engine.part.routed)
        lost = None
        while True:
            process = head.supervisor.process
            if process is None or process is lost:
                await asyncio.sleep(LOOK_S)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await process.ended.wait()
                lost = process
                for engine in engines:
                    other = engine.supervisor.process
                    if engine is not head and other is not None and not other.ended.is_set():
                        other.kill()
            self._count_restarts(engines)

    def _count_restarts(self, engines: Sequence[HostedEngine]) -> None:
        """Add the replicas that Serve has replaced. Restarts of nodes are counted by their supervisors."""
        head = next((engine for engine in engines if engine.part.routed), None)
        for engine in engines:
            node = engine.supervisor.engine
            if not isinstance(node, RayNode):
                continue
            starts = self.starts[node.number]
            replaced = count_replaced(starts)
            added = replaced - self._replaced.get(starts, 0)
            if added > 0:
                self._replaced[starts] = replaced
                engine.backend.restarts += added
                if head is not None and engine is not head:
                    # The gateway, and so its metrics, knows the head node only.
                    head.backend.restarts_behind += added
                engine.backend.last_exit = LastExit(cause="exited", text=REPLACED)

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def count_replaced(starts: Path) -> int:
    """Count the replicas that were started again on a node that kept running: all but the first of each run."""
    try:
        runs = starts.read_text().splitlines()
    except FileNotFoundError:
        return 0
    return len(runs) - len(set(runs))


def _describe_engine(one: PreparedModel, logs: Sequence[Path], folder: Path) -> dict[str, Any]:
    """How a replica starts its engine on each node."""
    engine, plan = engine_by_id(one.plan.engine), one.plan
    launch = replace_port(engine, plan)
    cores = one.decided.hardware.cpu.allowed_physical_cores
    patient = PATIENT if (plan.settings.threads or 0) * len(one.needs) > cores else {}
    return {
        "argv": wrap_with_warden(build_command(one.environment, launch, wrapped=engine.is_wrapped)),
        "envs": [
            _build_env(one, launch, {**patient, **one.build_start(replica).env}) for replica in range(len(one.needs))
        ],
        "cwd": str(one.folder) if one.folder is not None else os.getcwd(),  # noqa: PTH109
        "health": launch.health_path,
        "key_variable": engine.private_key_variable,
        "logs": [str(log) for log in logs],
        # The node's supervisor notices an engine that makes no progress during its start.
        "limit_s": LONGEST_START_S,
        "ready": str(folder / "ready"),
    }


def _build_env(one: PreparedModel, launch: Launch, more: Mapping[str, str]) -> dict[str, str]:
    return build_engine_variables(one.plan, engine_by_id(one.plan.engine), one.environment, launch, more)


def describe_orchestrator(plan: Plan, replicas: int) -> EndpointOrchestrator:
    engine = f"{engine_by_id(plan.engine).name} {plan.engine_version}"
    nodes = f"{replicas} nodes" if replicas != 1 else "one node"
    where = "on each node" if replicas != 1 else "on it"
    return EndpointOrchestrator(
        orchestrator="ray",
        version=VERSION,
        workers=plan.engine,
        workers_version=plan.engine_version,
        real=True,
        replicas=replicas,
        text=f"Ray Serve {VERSION} on a local cluster of {nodes}, with a replica of {engine} {where}",
    )
