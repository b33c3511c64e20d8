"""Intents for the emitted files: machines, platforms, engines, vendors and edge cases."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from bedplate.decide import decide
from bedplate.decide.intent import resolve_hardware, to_intent
from bedplate.decide.portfolio import make_portfolio, place_on_one_machine
from bedplate.deploy.emit import emit_target
from bedplate.deploy.platform import PlacedService, Platform, place_one_service, place_services, split_services
from bedplate.run.models import find_intended_model
from bedplate.values import Estimate, replace_fields
from bedplate.values.record import make_estimate as figure

LLAMA = "meta-llama/Meta-Llama-3.1-70B"
WORK = {"concurrency": 64, "prompt_tokens": 1024, "output_tokens": 256}
FEW = {"concurrency": 4, "prompt_tokens": 512, "output_tokens": 256}
PROMPTS = {"concurrency": 256, "prompt_tokens": 4096, "output_tokens": 512}
H100 = {"accelerator": "H100 SXM", "count": 8}
FLEET = {"accelerator": "H100 SXM", "count": 32, "gpus_per_node": 8, "network": "InfiniBand NDR 400"}
TWO_NODES = {"accelerator": "H100 SXM", "count": 16, "gpus_per_node": 8, "network": "InfiniBand NDR 400"}
POOLS = [
    {"name": "big", **{name: value for name, value in FLEET.items() if name != "count"}, "count": 32},
    {"name": "small", "accelerator": "L4", "count": 8, "gpus_per_node": 4},
    {"name": "amd", "accelerator": "MI300X", "count": 8, "gpus_per_node": 8},
    {"name": "cpus", "cpu": "Intel Xeon Gold 6430", "cores": 32, "count": 4, "ram_gb": 128},
]
SERVICES = [
    {"name": "chat", "model": LLAMA, "pool": "big", "workload": {**WORK, "latency": {"tpot_ms": 30}}},
    {"name": "drafts", "model": "Qwen/Qwen3-8B", "pool": "small", "tenants": ["sales"], "workload": FEW},
    {"name": "code", "model": "Qwen/Qwen3-32B", "pool": "amd", "tenants": ["research"], "workload": WORK},
    {
        "name": "search",
        "model": {"task": "embed", "params_b": 0.11, "format": "onnx"},
        "pool": "cpus",
        "workload": {"users": 20, "task": "embed"},
    },
]
TENANTS = [{"name": "research", "share": 0.6}, {"name": "sales", "share": 0.4}]
TEAMS: list[dict[str, Any]] = [
    {"name": "research", "share": 0.4, "borrow": 0.5, "lend": 0.25, "group": "idp:research"},
    {"name": "sales", "share": 0.3, "in_flight": 32},
    {"name": "support", "share": 0.2, "tokens_per_minute": 100_000},
    {"name": "labs"},
]
PLATFORM = {"pools": POOLS, "services": SERVICES, "tenants": TENANTS, "operations": {"machinery": "kubernetes"}}

INTENTS: dict[str, tuple[dict[str, Any], str | None]] = {
    "h100-chat": ({"hardware": H100, "model": LLAMA, "workload": WORK}, None),
    "h100-sglang": ({"hardware": H100, "model": LLAMA, "workload": WORK}, "sglang"),
    "h100-tensorrt-llm": ({"hardware": H100, "model": LLAMA, "workload": WORK}, "tensorrt-llm"),
    "h200-deepseek-trt": (
        {"hardware": {"accelerator": "H200 SXM", "count": 8}, "model": "deepseek-ai/DeepSeek-R1", "workload": WORK},
        "tensorrt-llm",
    ),
    "h100-tgi": ({"hardware": H100, "model": LLAMA, "workload": WORK}, "tgi"),
    "l40s-lmdeploy": (
        {"hardware": {"accelerator": "L40S", "count": 2}, "model": "Qwen/Qwen3-8B", "workload": WORK},
        "lmdeploy",
    ),
    "mi300x-chat": ({"hardware": {"accelerator": "MI300X", "count": 8}, "model": LLAMA, "workload": WORK}, None),
    "mi300x-sglang": ({"hardware": {"accelerator": "MI300X", "count": 8}, "model": LLAMA, "workload": WORK}, "sglang"),
    "a100-chat": (
        {"hardware": {"accelerator": "A100 SXM 80GB", "count": 4}, "model": "Qwen/Qwen3-32B", "workload": WORK},
        None,
    ),
    "rtx4090-llama-cpp": (
        {"hardware": {"accelerator": "RTX 4090", "count": 1}, "model": "Qwen/Qwen3-8B", "workload": FEW},
        "llama.cpp",
    ),
    "cpu-ollama": (
        {
            "hardware": {"cpu": "Intel Xeon Gold 6430", "cores": 32, "ram_gb": 128},
            "model": "Qwen/Qwen2.5-7B-Instruct",
            "workload": FEW,
        },
        "ollama",
    ),
    "rtx4090-exllamav3": (
        {"hardware": {"accelerator": "RTX 4090", "count": 1}, "model": "Qwen/Qwen3-8B", "workload": FEW},
        "exllamav3",
    ),
    "cpu-vllm": (
        {
            "hardware": {"cpu": "Intel Xeon Gold 6430", "cores": 32, "ram_gb": 128},
            "model": "Qwen/Qwen3-8B",
            "workload": FEW,
        },
        "vllm",
    ),
    "cpu-llama-cpp": (
        {
            "hardware": {"cpu": "Intel Xeon Gold 6430", "cores": 32, "ram_gb": 128},
            "model": "Qwen/Qwen3-8B",
            "workload": FEW,
        },
        "llama.cpp",
    ),
    "two-nodes-405b": (
        {"hardware": TWO_NODES, "model": "meta-llama/Meta-Llama-3.1-405B", "workload": WORK,
         "deploy": {"rdma": "rdma/ib"}, "tenants": TENANTS},
        "vllm",
    ),
    "two-nodes-sglang": (
        {"hardware": TWO_NODES, "model": "meta-llama/Meta-Llama-3.1-405B", "workload": WORK}, "sglang",
    ),
    "fleet-prompts": ({"hardware": FLEET, "model": LLAMA, "workload": PROMPTS}, None),
    "fleet-apart": (
        {"hardware": FLEET, "model": LLAMA, "workload": WORK, "deploy": {"layout": "disaggregated"}}, "sglang",
    ),
    "fleet-together": (
        {"hardware": FLEET, "model": LLAMA, "workload": PROMPTS, "deploy": {"layout": "aggregated"}}, None,
    ),
    "gateway": (
        {"hardware": H100, "model": LLAMA, "workload": WORK,
         "deploy": {"gateway": "ingress/inference", "namespace": "llms", "storage_class": "fast"}},
        None,
    ),
    "tenants-alone": ({"hardware": H100, "model": LLAMA, "workload": WORK, "tenants": TENANTS}, None),
    "moe-long": (
        {"hardware": {"accelerator": "H200 SXM", "count": 8}, "model": "deepseek-ai/DeepSeek-R1",
         "workload": {"concurrency": 64, "prompt_tokens": 16000, "output_tokens": 1000}},
        None,
    ),
    "platform": (PLATFORM, None),
    "teams": (
        {**PLATFORM, "tenants": TEAMS, "services": [{**SERVICES[0]}, {**SERVICES[1], "tenants": ["sales", "support"]}],
         "deploy": {"endpoint": True, "namespace": "serving", "registry": "registry.example.com"}},
        None,
    ),
    "idle": (
        {**PLATFORM, "tenants": TEAMS, "deploy": {"endpoint": True, "namespace": "idle"},
         "services": [{**SERVICES[0], "ttl": "30m"}, {**SERVICES[1], "tenants": ["sales", "support"], "ttl": 900},
                      {**SERVICES[3], "ttl": "1h"}]},
        None,
    ),
    "one-box": (
        {
            "hardware": {"accelerator": "L40S", "count": 4},
            "services": [
                {"name": "chat", "model": "Qwen/Qwen3-32B", "workload": FEW},
                {"name": "drafts", "model": "Qwen/Qwen3-8B", "replicas": 2, "workload": FEW},
            ],
        },
        None,
    ),
    "one-pool": (
        {
            "pools": [{"name": "box", "accelerator": "L40S", "count": 4, "gpus_per_node": 4}],
            "services": [
                {"name": "chat", "model": "Qwen/Qwen3-32B", "workload": FEW},
                {"name": "drafts", "model": "Qwen/Qwen3-8B", "workload": FEW},
            ],
        },
        None,
    ),
}  # fmt: skip
TARGETS = ("compose", "kubernetes", "dynamo", "ray")
SEVERAL_NODES = frozenset(
    ["two-nodes-405b", "two-nodes-sglang", "fleet-prompts", "fleet-apart", "fleet-together", "platform", "teams",
     "idle"]
)  # fmt: skip
WITH_RAY = frozenset(
    ["h100-chat", "a100-chat", "two-nodes-405b", "fleet-prompts", "fleet-together", "gateway", "tenants-alone",
     "platform", "teams", "one-pool", "one-box"]
)  # fmt: skip
WITH_DYNAMO = WITH_RAY | frozenset(
    ["h100-sglang", "h100-tensorrt-llm", "h200-deepseek-trt", "two-nodes-sglang", "fleet-apart", "moe-long"]
)
REFUSED = frozenset(
    (name, target)
    for name in INTENTS
    for target in TARGETS
    if (target == "compose" and name in SEVERAL_NODES)
    or (target == "ray" and name not in WITH_RAY)
    or (target == "dynamo" and name not in WITH_DYNAMO)
)
WRITTEN = [(name, target) for name in INTENTS for target in TARGETS if (name, target) not in REFUSED]


@functools.cache
def build_platform(name: str) -> Platform:
    """Build a platform with fixed estimates, so that a change of the estimator changes no snapshot."""
    described, engine = INTENTS[name]
    made = make_platform(described, engine)
    return replace(made, services=tuple(_fix_estimate(placed) for placed in made.services))


def _fix_estimate(placed: PlacedService) -> PlacedService:
    rate = 1000.0 * max(1, placed.decision.parallelism.data)
    fixed = Estimate(ttft_ms=figure(300, 0.5), tpot_ms=figure(25, 0.4), output_tok_s=figure(rate, 0.3))
    return replace(placed, decision=replace_fields(placed.decision, estimate=fixed))


def make_platform(described: dict[str, Any], engine: str | None = None) -> Platform:
    intent = to_intent(described)
    if intent.services:
        local, elsewhere = split_services(intent)
        intent = replace_fields(intent, services=local)
        models = [find_intended_model(service.model) for service in intent.services]
        machine = None if intent.pools else resolve_hardware(intent)
        found = make_portfolio(intent, models) if machine is None else place_on_one_machine(intent, models, machine)
        return place_services(intent, found, models, machine, elsewhere)
    hardware, model = resolve_hardware(intent), find_intended_model(intent.model)
    decision = decide(hardware, model, intent.workload, engine, operations=intent.operations)
    return place_one_service(intent, hardware, model, intent.workload, decision)


@functools.cache
def emit_files(name: str, target: str) -> dict[str, str]:
    return emit_target(build_platform(name), target)
