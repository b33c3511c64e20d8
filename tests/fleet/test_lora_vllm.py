"""LoRA adapters that vLLM loads while it runs, made by the test; its answers are compared with PyTorch's."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import yaml
from tests.conftest import have_ended, start_serve, wait_for
from tests.fleet.lora import change, change_config, complete, compute_answers, make_adapter
from tests.fleet.serving import START_LIMIT_S

pytestmark = pytest.mark.timeout(2 * START_LIMIT_S)
MODEL = "smollm2-135m-instruct"
SHAPE = {"layers": 8, "width": 576}


def test_vllm_loads_and_unloads_adapters_while_it_runs(tmp_path: Path) -> None:
    file = tmp_path / "lora.yaml"
    service = {"model": "builtin", "engine": "vllm", "workload": {"lora_adapters": 2}}
    file.write_text(yaml.safe_dump({"services": [service]}))
    strong = make_adapter(tmp_path / "strong", 0.6, **SHAPE)
    large = make_adapter(tmp_path / "large", 0.0, **SHAPE)
    change_config(large, r=64)
    served = start_serve("-f", str(file))
    assert served.endpoint, "".join(served.stderr)
    try:
        status, plain = complete(served, MODEL)
        assert status == 200 and complete(served, "pirate")[0] == 404
        done = change("load", "pirate", str(strong))
        assert done.returncode == 0, done.stderr
        assert [(one["name"], one["state"]) for one in json.loads(done.stdout)["adapters"]] == [("pirate", "loaded")]
        status, changed = complete(served, "pirate")
        assert status == 200 and changed != plain == complete(served, MODEL)[1]
        refused = change("load", "large", str(large))
        assert refused.returncode == 1 and "rank" in refused.stderr and complete(served, "large")[0] == 404

        commands = {one: one.cmdline() for one in served.list_descendants()}
        server = next(one for one, words in commands.items() if words and "/engines/vllm/" in words[0])
        python, folder = commands[server][0], commands[server][commands[server].index("--model") + 1]
        known = compute_answers(python, folder, strong, server.cwd())
        assert known == [plain, changed], "as PyTorch in float32 with the adapter merged"

        server.send_signal(signal.SIGKILL)
        wait_for(lambda: complete(served, "pirate") == (200, changed), "the restarted engine with the adapter")
        assert change("unload", "pirate").returncode == 0
        assert complete(served, "pirate")[0] == 404 and complete(served, MODEL) == (200, plain)
    finally:
        below = served.list_descendants()
        assert served.stop() == 0
        wait_for(lambda: have_ended(below), "the engine's processes to end")
