"""Two releases of llama.cpp from the package index, side by side, and the advice of `watch --upgrade`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import Served, have_ended, post_json, start_serve, wait_for
from tests.contract.documents import check_document

from bedplate.engines import get_engine
from bedplate.errors import ExternalFailure
from bedplate.run.environments import EngineEnvironment, make_environment, uninstall_version
from bedplate.run.releases import ask_index, is_newer

OLD = "2026.9.11063"
EXIT_CODES = {"upgrade": {10}, "not proven": {20, 30}, "stay": {0, 30}}


@pytest.fixture(scope="module")
def older(llama_environment: EngineEnvironment) -> Iterator[EngineEnvironment]:
    """An older release, beside the pinned one."""
    try:
        found = make_environment(get_engine(f"llama.cpp@{OLD}"))
    except ExternalFailure as error:
        pytest.skip(f"xllamacpp {OLD} cannot be installed: {error.summary}")
    yield found
    uninstall_version("llama.cpp", OLD)


@pytest.fixture(scope="module")
def served(builtin_gguf: Path, older: EngineEnvironment) -> Iterator[Served]:
    one = start_serve("--name", "older", "--engine", f"llama.cpp@{OLD}", "--concurrency", "2", "--context", "512")
    assert one.endpoint, "".join(one.stderr)
    yield one
    below = one.list_descendants()
    assert one.stop() == 0
    wait_for(lambda: have_ended(below), "the engines' processes to end")


def test_watch_compares_the_newer_release_and_leaves_the_present_one(
    served: Served, older: EngineEnvironment, llama_environment: EngineEnvironment
) -> None:
    if why := ask_index(["xllamacpp"]).failed:
        pytest.skip(f"no package index: {why['xllamacpp']}")
    body = {"model": served.endpoint["model"], "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    for _ in range(4):
        assert post_json(f"{served.url}/chat/completions", body)[0] == 200
    command = ["watch", "older", "--once", "--upgrade", "--share", "100%", "--budget", "60s", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "bedplate", *command],
        capture_output=True,
        text=True,
        env={**os.environ, "NO_COLOR": "1"},
    )
    found = check_document("watch", done.stdout)
    upgrade = found["upgrade"]
    assert (upgrade["package"], upgrade["present"]) == ("xllamacpp", OLD) and is_newer(upgrade["release"], OLD)
    assert upgrade["options"].startswith("its own parser accepts all "), done.stderr
    assert done.returncode in EXIT_CODES[upgrade["answer"]], (done.returncode, upgrade["text"])
    if upgrade["effects"]:
        assert all(one["gain"]["low"] <= one["gain"]["value"] <= one["gain"]["high"] for one in upgrade["effects"])
        assert upgrade["quality"]["verdict"] == upgrade["present_quality"]["verdict"] == "ok"
    # Whatever the verdict: the service still runs on its version, and the pinned one was installed before.
    assert Path(older.path).is_dir() and Path(llama_environment.path).is_dir()
    assert post_json(f"{served.url}/chat/completions", body)[0] == 200
