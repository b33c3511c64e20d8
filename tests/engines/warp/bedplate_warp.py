"""Warp: a made-up engine in a third-party package."""

from __future__ import annotations

import re

from bedplate.engines import (
    AdviceFlags,
    ContainerImage,
    ContainerTraits,
    DynamoWorker,
    Engine,
    EngineState,
    EnvironmentRecipe,
    Features,
    MemoryUse,
    MetricNames,
    NotedOptions,
    RayWorker,
)
from bedplate.engines.knobs import apply_tuned_options, keep_tunable, make_slots_knob
from bedplate.values import Hardware, Launch, Plan
from bedplate.values.decision import Device
from bedplate.values.tuning import TunableSetting


class Warp(Engine):
    id = "warp"
    name = "Warp"
    spellings = ("warpengine", "warpserve")
    version = "1.2.3"
    recipe = EnvironmentRecipe(
        packages=("warp-engine==1.2.3",), download_bytes=4_000, disk_bytes=40_000_000, check="import warp_engine"
    )
    formats = ("safetensors", "gguf")
    vendors = ("nvidia",)
    cpu = True
    built_for = ("cpu", "cuda")
    ways = ("tensor",)
    features = Features(
        batching="a fixed number of lanes", kv_cache="none", quantization="as stored", hardware="NVIDIA, CPUs",
        structured_output="none", multi_node="no", server="its own", maintained="for tests", source="made up",
    )  # fmt: skip
    uses = MemoryUse(process_bytes=40_000_000, spread=0.5, source="made up")
    default_slots = 2
    key_variable = "WARP_KEY"
    variable_prefixes = ("WARP_",)
    strength = "tests of third-party engines"
    flags = AdviceFlags(slots="--lanes")
    noted = NotedOptions(slots="--lanes")
    metric_names = MetricNames(running="warp_running", waiting="warp_waiting", picker="warp")
    container = ContainerTraits(start_s=5.0, drains=True)
    dynamo = DynamoWorker(
        module="dynamo.warp", framework="warp", image="registry.example/dynamo/warp", version="1.2.0",
        renames={"--lanes": "--max-lanes"},
    )  # fmt: skip
    ray = RayWorker(image="registry.example/ray-warp", server_options=frozenset(["--host", "--port", "--name"]))

    def launch(self, plan: Plan, port: int) -> Launch:
        argv = ["warp-serve", plan.model_path, "--host", "127.0.0.1", "--port", str(port)]
        argv += ["--name", plan.model.served_name, "--lanes", str(plan.settings.slots)]
        return apply_tuned_options(
            Launch(argv=tuple(argv), prepare=self.plan_installation(), health_path="/health"), plan.settings
        )

    def list_settings(self, hardware: Hardware, plan: Plan) -> tuple[TunableSetting, ...]:
        return keep_tunable([make_slots_knob(plan, (1, 2, 4), own=2, source="warp-serve --help")])

    def find_published_image(self, device: Device, gfx: str | None, arch: str) -> ContainerImage | None:
        return ContainerImage(name=f"registry.example/warp:{self.version}", python=True)

    def get_dynamo_options(self, role: str, task: str) -> tuple[str, ...]:
        return ("--warp-role", role)

    def read_metrics(self, metrics: str) -> EngineState:
        found = dict(re.findall(r"^warp_(\w+) (\d+)$", metrics, re.MULTILINE))
        return EngineState(running=float(found.get("running", 0)), waiting=float(found.get("waiting", 0)))


ENGINE = Warp()
