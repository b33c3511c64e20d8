"""Portfolios: one standard engine, exceptions with reasons, and no device assigned twice."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.commands import invoke

from bedplate.decide.intent import to_intent
from bedplate.decide.portfolio import make_pool_machine, make_portfolio
from bedplate.errors import UsageError
from bedplate.run.models import find_intended_model
from bedplate.values import from_json, to_json
from bedplate.values.intent import NodePool
from bedplate.values.portfolio import Portfolio

POOLS = [
    {"name": "big", "accelerator": "H100 SXM", "count": 16, "gpus_per_node": 8, "network": "InfiniBand NDR 400"},
    {"name": "small", "accelerator": "L4", "count": 8, "gpus_per_node": 4},
    {"name": "cpus", "cpu": "Intel Xeon Gold 6430", "cores": 32, "count": 4, "ram_gb": 128},
]
CHAT = {
    "name": "chat",
    "model": "meta-llama/Meta-Llama-3.1-70B",
    "workload": {"concurrency": 32, "prompt_tokens": 1024, "output_tokens": 256},
}
SMALL = {
    "name": "drafts",
    "model": "Qwen/Qwen3-8B",
    "workload": {"concurrency": 16, "prompt_tokens": 512, "output_tokens": 128},
}
AGENTS = {
    "name": "agents",
    "model": "meta-llama/Meta-Llama-3.1-70B",
    "pool": "big",
    "workload": {"concurrency": 32, "prompt_tokens": 6000, "output_tokens": 200, "shared_prefix_tokens": 5000},
}
EMBED = {
    "name": "search",
    "model": {"task": "embed", "params_b": 0.11, "format": "onnx"},
    "workload": {"users": 20, "task": "embed"},
}
TENANTS = [{"name": "research", "share": 0.5}, {"name": "sales", "share": 0.5}]


def plan_services(*services: dict[str, Any], pools: list[dict[str, Any]] | None = None, **more: Any) -> Portfolio:
    intent = to_intent({"pools": pools or POOLS, "services": list(services), **more})
    return make_portfolio(intent, [find_intended_model(service.model) for service in intent.services])


@functools.cache
def make_usual_portfolio() -> Portfolio:
    return plan_services(CHAT, SMALL, AGENTS, EMBED, tenants=TENANTS)


def check_cards(found: Portfolio, pools: list[dict[str, Any]]) -> None:
    counts = {pool["name"]: pool["count"] for pool in pools}
    for name, free in found.free.items():
        taken = sum(placement.accelerators for placement in found.placements if placement.pool == name)
        assert taken + free == counts[name] and free >= 0
    for placement in found.placements:
        layout = placement.decision.parallelism
        assert layout.tensor * layout.pipeline * layout.data <= max(1, placement.accelerators)
        assert (placement.pool is None) == (placement.accelerators == 0)


def test_exceptions_from_the_standard_engine_have_a_reason() -> None:
    found = make_usual_portfolio()
    assert found.engine == "vllm" and found.fits and "2 of 4 services" in found.text
    placed = {placement.service: placement for placement in found.placements}
    assert list(placed) == ["chat", "drafts", "agents", "search"]
    assert placed["chat"].decision.engine == placed["drafts"].decision.engine == "vllm"
    assert placed["chat"].exception is None and placed["drafts"].exception is None
    assert placed["agents"].decision.engine == "sglang"
    assert "shared" in (placed["agents"].exception or "") and "serve.shared-prefix" in (
        placed["agents"].exception or ""
    )
    assert placed["search"].decision.engine == "onnxruntime" and "task.not-llm" in (placed["search"].exception or "")
    check_cards(found, POOLS)


def test_every_placement_holds_all_requests() -> None:
    for placement in make_usual_portfolio().placements:
        assert placement.decision.fits and placement.decision.max_concurrency >= placement.decision.in_flight


def test_a_service_stays_in_the_pool_that_it_names() -> None:
    assert next(one.pool for one in make_usual_portfolio().placements if one.service == "agents") == "big"
    cramped = plan_services({**CHAT, "pool": "cpus"})
    assert cramped.placements[0].pool in (None, "cpus")


def test_service_without_free_devices_is_not_placed() -> None:
    pools = [{"name": "one", "accelerator": "H100 SXM", "count": 1}]
    found = plan_services({**SMALL, "name": "first"}, {**SMALL, "name": "second"}, pools=pools)
    assert not found.fits and sorted(placement.accelerators for placement in found.placements) == [0, 1]
    lost = next(placement for placement in found.placements if placement.pool is None)
    assert lost.decision.engine is None and lost.decision.launch is None
    check_cards(found, pools)


def test_no_service_fits_any_pool() -> None:
    pools = [{"name": "tiny", "accelerator": "RTX 3070", "count": 1, "ram_gb": 16}]
    found = plan_services({"model": "meta-llama/Meta-Llama-3.1-405B"}, pools=pools)
    assert found.engine is None and not found.fits and found.placements[0].decision.hints


def test_tenants_change_no_placement() -> None:
    assert plan_services(CHAT, SMALL, AGENTS, EMBED) == make_usual_portfolio()
    renamed = [{"name": "anyone", "share": 1.0}]
    assert plan_services(CHAT, SMALL, AGENTS, EMBED, tenants=renamed) == make_usual_portfolio()


def test_incumbent_of_one_service_does_not_affect_others() -> None:
    found = plan_services(CHAT, SMALL, {**CHAT, "name": "old", "operations": {"incumbent": "sglang"}})
    engines = {placement.service: placement.decision.engine for placement in found.placements}
    assert engines == {"chat": "vllm", "drafts": "vllm", "old": "sglang"}


def test_part_of_a_pool_is_one_machine() -> None:
    pool = NodePool(name="big", accelerator="H100 SXM", count=16, gpus_per_node=8, network="InfiniBand NDR 400")
    assert len(make_pool_machine(pool, 4).accelerators) == 4 and make_pool_machine(pool, 4).nodes == 1
    assert make_pool_machine(pool, 16).nodes == 2


def test_portfolio_round_trips_through_json() -> None:
    assert from_json(Portfolio, to_json(make_usual_portfolio())) == make_usual_portfolio()


def test_portfolio_is_printed_by_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "platform.yaml"
    path.write_text(json.dumps({"pools": POOLS, "services": [CHAT, AGENTS], "tenants": TENANTS}))
    answer = invoke("plan", "-f", str(path), "--json")
    found = from_json(Portfolio, answer.out)
    assert answer.code == 0 and found.engine in ("vllm", "sglang") and len(found.placements) == 2
    page = invoke("plan", "-f", str(path)).out
    assert "Standard" in page and "chat" in page and "agents" in page and "exception" in page
    path.write_text(json.dumps({"pools": [{"name": "one", "accelerator": "L4", "count": 1}], "services": [CHAT]}))
    assert invoke("plan", "-f", str(path), "--json").code == 1


@settings(deadline=None, max_examples=max(5, settings().max_examples // 5))  # one example is a whole platform
@given(
    st.lists(st.sampled_from([CHAT, SMALL, EMBED]), min_size=1, max_size=4),
    st.integers(1, 16),
    st.integers(1, 8),
)
def test_devices_are_never_assigned_twice(services: list[dict[str, Any]], big: int, small: int) -> None:
    pools = [
        {"name": "big", "accelerator": "H100 SXM", "count": big},
        {"name": "small", "accelerator": "L4", "count": small},
    ]
    named = [{**service, "name": f"service {index}"} for index, service in enumerate(services)]
    check_cards(plan_services(*named, pools=pools), pools)


class TestPoolChoice:
    def by_service(self, found: Portfolio) -> dict[str, tuple[str | None, int, str | None]]:
        return {one.service: (one.pool, one.accelerators, one.decision.quantization) for one in found.placements}

    def test_order_of_pools_does_not_matter(self) -> None:
        services = (CHAT, SMALL, EMBED)
        assert self.by_service(plan_services(*services)) == self.by_service(plan_services(*services, pools=POOLS[::-1]))

    def test_service_is_placed_on_the_smallest_sufficient_gpu(self) -> None:
        placed = self.by_service(plan_services(CHAT, SMALL, EMBED))
        assert placed["drafts"][0] == "small" and placed["search"][0] == "cpus" and placed["chat"][0] == "big"

    def test_slow_service_is_placed_where_it_is_fastest(self) -> None:
        long = {**CHAT, "name": "long", "workload": {"concurrency": 200, "prompt_tokens": 6000, "output_tokens": 100}}
        (placed,) = plan_services(long).placements
        assert placed.pool == "big"

    def test_free_devices_are_used_for_more_bits(self) -> None:
        """Four bits need fewer GPUs; if the other GPUs are idle, they are used for more bits."""
        busy = {**CHAT, "workload": {"concurrency": 150, "prompt_tokens": 1024, "output_tokens": 256}}
        alone = plan_services(busy, pools=POOLS[:1]).placements[0]
        assert alone.decision.quantization == "FP8" and alone.decision.fits
        tight = [{"name": "big", "accelerator": "H100 SXM", "count": 1}]
        assert plan_services(busy, pools=tight).placements[0].decision.quantization == "AWQ-Int4"


@pytest.mark.parametrize(
    ("pool", "message", "hint"),
    [
        (
            {"accelerator": "2x H100 SXM + 2x L4", "count": 4},
            "pool p: accelerator: all nodes of a pool",
            "of their own",
        ),
        ({"accelerator": "8x H100 SXM"}, "pool p: count: is 1, but accelerator states 8", "in the whole pool"),
        ({"accelerator": "Foo GPU"}, "pool p: accelerator: unknown chip", ""),
    ],
)
def test_errors_name_the_pool(pool: dict[str, Any], message: str, hint: str) -> None:
    described = {"pools": [{"name": "p", **pool}], "services": [{"model": "Qwen/Qwen3-8B"}]}
    intent = to_intent(described)
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        make_portfolio(intent, [find_intended_model("Qwen/Qwen3-8B")])
    assert hint in (caught.value.hint or "")
