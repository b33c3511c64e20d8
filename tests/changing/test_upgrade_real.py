"""Two releases of llama.cpp from the package index, side by side, and the advice of `watch --upgrade`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.changing.upgrading import check_upgrade
from tests.conftest import Served, have_ended, start_serve, wait_for

from bedplate.engines import get_engine
from bedplate.errors import ExternalFailure
from bedplate.run.environments import EngineEnvironment, make_environment, uninstall_version
from bedplate.run.releases import ask_index

OLD = "2026.9.11063"


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
    check_upgrade(served, "older", "xllamacpp", OLD, "60s")
    # Whatever the verdict: the pinned version was installed before.
    assert Path(older.path).is_dir() and Path(llama_environment.path).is_dir()
