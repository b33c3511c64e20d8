"""Prefill and decode workers; Dynamo parses their options if it is installed (BEDPLATE_DYNAMO_PYTHON)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import HANG_S
from tests.deploy.intents import INTENTS, PROMPTS, WITH_DYNAMO, emit_files, make_platform
from tests.deploy.walk import read_all_documents

from bedplate.deploy.dynamo import estimate_prefill_share, split_workers
from bedplate.deploy.service_containers import describe_containers

READS = """
import json, sys
from dynamo.vllm.args import parse_args
for line in open(sys.argv[1]):
    arguments = json.loads(line)
    read = parse_args(arguments)
    print("read", read.model, read.engine_args.tensor_parallel_size, read.engine_args.max_num_seqs)
"""


def find_graphs(name: str) -> list[dict[str, Any]]:
    trees = read_all_documents(emit_files(name, "dynamo"))
    return [tree for tree in trees if tree["kind"] == "DynamoGraphDeployment"]


def read_components(name: str) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in find_graphs(name)[0]["spec"]["components"]}


def read_option(component: dict[str, Any], name: str) -> str:
    words = component["podTemplate"]["spec"]["containers"][0]["args"]
    return next(str(word).partition("=")[2] for word in words if word.startswith(f"{name}="))


def test_prefill_workers_follow_the_estimated_share() -> None:
    platform = make_platform(*INTENTS["fleet-prompts"])  # with its own estimate
    unit = describe_containers(platform.services[0], platform.deploy)
    share, words = estimate_prefill_share(unit)
    split = split_workers(unit, platform.deploy)
    assert share is not None and f"{share:.0%}" in words and words in split.words
    assert split.is_disaggregated and split.prefill + split.decode == unit.replicas
    assert abs(split.prefill - share * unit.replicas) <= 1


def test_decode_workers_have_slots_for_all_concurrent_requests() -> None:
    decode = read_components("fleet-prompts")["decode"]
    assert decode["replicas"] * int(read_option(decode, "--max-num-seqs")) >= PROMPTS["concurrency"]


def test_workers_get_their_role_and_the_kv_transfer_options() -> None:
    workers = read_components("fleet-prompts")
    for role in ("prefill", "decode"):
        assert read_option(workers[role], "--disaggregation-mode") == role
        assert json.loads(read_option(workers[role], "--kv-transfer-config"))["kv_connector"] == "NixlConnector"
    assert json.loads(read_option(workers["prefill"], "--kv-events-config"))["enable_kv_cache_events"]


def test_aggregated_on_request_or_with_short_prompts() -> None:
    assert set(read_components("fleet-together")) == {"frontend", "worker"} == set(read_components("h100-chat"))
    assert set(read_components("fleet-apart")) == {"frontend", "prefill", "decode"}


@pytest.mark.parametrize("name", sorted(WITH_DYNAMO))
def test_frontend_routes_by_kv_cache(name: str) -> None:
    for graph in find_graphs(name):
        front = next(one for one in graph["spec"]["components"] if one["type"] == "frontend")
        env = {one["name"]: one["value"] for one in front["podTemplate"]["spec"]["containers"][0]["env"]}
        assert env["DYN_ROUTER_MODE"] == "kv"
        grace = front["podTemplate"]["spec"]["terminationGracePeriodSeconds"]
        assert int(env["DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS"]) < grace


def test_graph_uses_at_most_the_available_gpus() -> None:
    for name, cards in (("h100-chat", 8), ("fleet-prompts", 32), ("two-nodes-405b", 16)):
        taken = 0
        for one in read_components(name).values():
            asked = one["podTemplate"]["spec"]["containers"][0]["resources"]["requests"].get("nvidia.com/gpu", 0)
            # Without a number, the ScaledObject sets it.
            taken += one.get("replicas", 1) * one.get("multinode", {}).get("nodeCount", 1) * asked
        assert 0 < taken <= cards


def test_dynamo_parses_the_options_of_vllm_workers(tmp_path: Path) -> None:
    python = os.environ.get("BEDPLATE_DYNAMO_PYTHON")
    if not python:
        pytest.skip("BEDPLATE_DYNAMO_PYTHON names no Python with ai-dynamo and vllm")
    lines = []
    for name in sorted(WITH_DYNAMO):
        for graph in find_graphs(name):
            if graph["spec"]["backendFramework"] != "vllm":
                continue
            for one in graph["spec"]["components"]:
                words = one["podTemplate"]["spec"]["containers"][0].get("args", [])
                # Dynamo checks that the model exists.
                here = [f"--model={tmp_path}" if word.startswith("--model=") else word for word in words]
                lines += [json.dumps(here)] if words else []
    (tmp_path / "arguments").write_text("\n".join(lines))
    done = subprocess.run(
        [python, "-c", READS, str(tmp_path / "arguments")], capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("read ") == len(lines) >= 5
