"""How workers are divided; and Dynamo's own parser reads their options, where it is (BEDPLATE_DYNAMO_PYTHON)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.conftest import HANG_S
from tests.deploy.intents import PROMPTS, WITH_DYNAMO, files_of, platform_of

from bedplate.deploy.dynamo import prompt_share, split_of
from bedplate.deploy.served import served

READS = """
import json, sys
from dynamo.vllm.args import parse_args
for line in open(sys.argv[1]):
    arguments = json.loads(line)
    read = parse_args(arguments)
    print("read", read.model, read.engine_args.tensor_parallel_size, read.engine_args.max_num_seqs)
"""


def graphs(name: str) -> list[dict[str, Any]]:
    files = files_of(name, "dynamo")
    trees = [tree for path, text in files.items() if path.endswith(".yaml") for tree in yaml.safe_load_all(text)]
    return [tree for tree in trees if tree["kind"] == "DynamoGraphDeployment"]


def components(name: str) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in graphs(name)[0]["spec"]["components"]}


def option(component: dict[str, Any], name: str) -> str:
    words = component["podTemplate"]["spec"]["containers"][0]["args"]
    return next(str(word).partition("=")[2] for word in words if word.startswith(f"{name}="))


def test_prompts_have_workers_of_their_own_by_the_estimate() -> None:
    platform = platform_of("fleet-prompts")
    unit = served(platform.services[0], platform.deploy)
    share, words = prompt_share(unit)
    split = split_of(unit, platform.deploy)
    assert share is not None and f"{share:.0%}" in words and words in split.words
    assert split.apart and split.prefill + split.decode == unit.replicas
    assert abs(split.prefill - share * unit.replicas) <= 1


def test_workers_for_answers_hold_all_that_are_in_flight() -> None:
    decode = components("fleet-prompts")["decode"]
    assert decode["replicas"] * int(option(decode, "--max-num-seqs")) >= PROMPTS["concurrency"]


def test_each_kind_is_told_its_part_and_where_the_cache_goes() -> None:
    workers = components("fleet-prompts")
    for role in ("prefill", "decode"):
        assert option(workers[role], "--disaggregation-mode") == role
        assert json.loads(option(workers[role], "--kv-transfer-config"))["kv_connector"] == "NixlConnector"
    assert json.loads(option(workers["prefill"], "--kv-events-config"))["enable_kv_cache_events"]


def test_together_when_asked_for_and_when_prompts_are_short() -> None:
    assert set(components("fleet-together")) == {"frontend", "worker"} == set(components("h100-chat"))
    assert set(components("fleet-apart")) == {"frontend", "prefill", "decode"}


@pytest.mark.parametrize("name", sorted(WITH_DYNAMO))
def test_requests_go_to_where_their_prompt_is_cached(name: str) -> None:
    for graph in graphs(name):
        front = next(one for one in graph["spec"]["components"] if one["type"] == "frontend")
        env = {one["name"]: one["value"] for one in front["podTemplate"]["spec"]["containers"][0]["env"]}
        assert env["DYN_ROUTER_MODE"] == "kv"
        grace = front["podTemplate"]["spec"]["terminationGracePeriodSeconds"]
        assert int(env["DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS"]) < grace


def test_no_graph_takes_more_cards_than_there_are() -> None:
    for name, cards in (("h100-chat", 8), ("fleet-prompts", 32), ("two-nodes-405b", 16)):
        taken = 0
        for one in components(name).values():
            asked = one["podTemplate"]["spec"]["containers"][0]["resources"]["requests"].get("nvidia.com/gpu", 0)
            taken += one["replicas"] * one.get("multinode", {}).get("nodeCount", 1) * asked
        assert 0 < taken <= cards


def test_dynamos_own_parser_reads_the_options_of_vllms_workers(tmp_path: Path) -> None:
    python = os.environ.get("BEDPLATE_DYNAMO_PYTHON")
    if not python:
        pytest.skip("BEDPLATE_DYNAMO_PYTHON names no Python with ai-dynamo and vllm")
    lines = []
    for name in sorted(WITH_DYNAMO):
        for graph in graphs(name):
            if graph["spec"]["backendFramework"] != "vllm":
                continue
            for one in graph["spec"]["components"]:
                words = one["podTemplate"]["spec"]["containers"][0].get("args", [])
                # It looks whether the model is there.
                here = [f"--model={tmp_path}" if word.startswith("--model=") else word for word in words]
                lines += [json.dumps(here)] if words else []
    (tmp_path / "arguments").write_text("\n".join(lines))
    done = subprocess.run(
        [python, "-c", READS, str(tmp_path / "arguments")], capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("read ") == len(lines) >= 5
