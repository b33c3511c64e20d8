"""Three real bedplates behind one endpoint, with a fault injected into each."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from tests.conftest import Served, post_json, wait_for

KEY = "sk-cloud-5d1f"
MODEL = "smollm2-135m-instruct"


def read_status(name: str) -> dict[str, Any]:
    found = subprocess.run(
        [sys.executable, "-m", "bedplate", "status", name, "--json"], capture_output=True, text=True, check=True
    )
    status: dict[str, Any] = json.loads(found.stdout)
    return status


def stream(url: str, text: str) -> str:
    from openai import OpenAI

    with OpenAI(base_url=url, api_key="sk-of-the-client", max_retries=0) as client:
        answer = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": text}], max_tokens=8, temperature=0, stream=True
        )
        chunks = list(answer)
    assert chunks[-1].choices[0].finish_reason is not None and {chunk.model for chunk in chunks} == {MODEL}
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_three_bedplates_answer_as_one_while_each_fails(
    serve: Callable[..., Served], own_home: Path, tmp_path: Path
) -> None:
    box = serve("--name", "box")
    cloud = serve("--name", "cloud", env={"BEDPLATE_API_KEY": KEY})
    file = tmp_path / "one.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "routing": "order",
                "services": [
                    {"model": "builtin"},
                    {"url": box.url, "model": MODEL},
                    {"url": cloud.url, "model": MODEL, "key_env": "CLOUD_KEY", "price_per_million_tokens": 0.4},
                ],
            }
        )
    )
    laptop = serve("-f", str(file), "--name", "laptop", env={"CLOUD_KEY": KEY})
    wait_for(lambda: {one["state"] for one in read_status("laptop")["endpoints"]} == {"ready"}, "both endpoints")

    def count_sent() -> list[int]:
        return [one["sent"] for one in read_status("laptop")["endpoints"]]

    expected = stream(laptop.url, "What is the capital of France?")
    assert count_sent() == [0, 0], "the engine here comes first"
    engine = laptop.find_engine()
    engine.kill()
    assert stream(laptop.url, "What is the capital of France?") == expected
    wait_for(lambda: read_status("laptop")["models"][0]["state"] == "ready", "the engine to be restarted")
    # The box is killed without a farewell, and the engine here hangs with a request, which goes to the cloud.
    box.process.kill()
    box.process.wait()
    sent = count_sent()
    laptop.find_engine().suspend()
    assert stream(laptop.url, "What is the capital of France?") == expected
    assert count_sent()[1] > sent[1], "the cloud has answered"
    # A fault in the cloud: it hangs, and a running request goes to the engine here, which was restarted.
    wait_for(lambda: read_status("laptop")["models"][0]["state"] == "ready", "the engine to be restarted")
    cloud.process.send_signal(signal.SIGSTOP)
    try:
        assert stream(laptop.url, "What is the capital of France?") == expected
        wait_for(lambda: read_status("laptop")["endpoints"][1]["state"] != "ready" or None, "the hang to be noticed")
        assert stream(laptop.url, "What is the capital of France?") == expected
    finally:
        cloud.process.send_signal(signal.SIGCONT)
    wait_for(lambda: read_status("laptop")["endpoints"][1]["state"] == "ready" or None, "the cloud to return")
    status = read_status("laptop")
    assert status["endpoints"][0]["state"] == "restarting" and "cannot be reached" in status["endpoints"][0]["reason"]
    written = "".join(path.read_text(errors="replace") for path in own_home.rglob("*.log"))
    written += "".join(path.read_text() for path in (own_home / "services").glob("*.json")) + "".join(laptop.stderr)
    assert KEY not in written and "sk-of-the-client" not in written and KEY not in json.dumps(status)


def test_endpoint_without_an_engine_of_its_own(serve: Callable[..., Served], own_home: Path, tmp_path: Path) -> None:
    box = serve("--name", "box")
    file = tmp_path / "router.yaml"
    file.write_text(yaml.safe_dump({"services": [{"url": box.url, "model": MODEL, "name": "small"}]}))
    router = serve("-f", str(file), "--name", "router")
    assert not any("llama" in " ".join(one.cmdline()) for one in router.list_descendants())
    status, answer = post_json(
        f"{router.url}/chat/completions",
        {"model": "small", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    )
    assert status == 200 and answer["model"] == "small" and answer["usage"]["completion_tokens"] == 3
    status, answer = post_json(f"{router.url}/chat/completions", {"model": "small", "messages": []})
    assert status == 400, answer
    with urllib.request.urlopen(f"{router.root}/metrics") as metrics:
        text = metrics.read().decode()
    authority = box.root.removeprefix("http://")
    assert f'bedplate_tokens_total{{engine="{authority}",kind="completion",model="small"}} 3.0' in text
    box.process.send_signal(signal.SIGTERM)
    box.process.wait()
    status, answer = post_json(
        f"{router.url}/chat/completions", {"model": "small", "messages": [{"role": "user", "content": "hi"}]}
    )
    assert status in (502, 503) and answer["error"]["code"]
