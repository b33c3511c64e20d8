"""What an engine compiles is cached under BEDPLATE_HOME, by engine and version, unless the user sets a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.engines.plans import machine, model, plan

from bedplate.engines import get_engine
from bedplate.run.environments import EngineEnvironment, uninstall_engine
from bedplate.run.supervisor import build_engine_variables

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path / "home"))
    for name in ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


def build_variables(name: str) -> dict[str, str]:
    one = get_engine(name)
    chosen = plan(one, machine("H100 SXM", 1), model(LLAMA))
    environment = EngineEnvironment(
        engine=one.id, version=chosen.engine_version, path="/nowhere", packages=(), python="3.12", made_at="",
        disk_bytes=0,
    )  # fmt: skip
    return build_engine_variables(chosen, one, environment, one.launch(chosen, 8000), {})


@pytest.mark.parametrize(
    ("name", "variable"), [("vllm@0.26.0", "VLLM_CACHE_ROOT"), ("sglang@0.5.15", "SGLANG_CACHE_DIR")]
)
def test_cache_folder_depends_on_the_engine_version(name: str, variable: str, own_home: Path) -> None:
    first, again, newer = build_variables(name), build_variables(name), build_variables(name.partition("@")[0])
    assert Path(first[variable]).is_relative_to(own_home) and first[variable] == again[variable]
    assert newer[variable] != first[variable]
    folders = [first[one] for one in get_engine(name).compile_caches]
    assert len(set(folders)) == len(folders)


def test_user_variables_take_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/large/triton")
    assert build_variables("vllm")["TRITON_CACHE_DIR"] == "/large/triton"


def test_cache_is_removed_with_the_engine() -> None:
    folder = Path(build_variables("vllm@0.26.0")["VLLM_CACHE_ROOT"])
    folder.mkdir(parents=True)
    uninstall_engine("vllm")
    assert not folder.exists()


def test_bytecode_is_kept_where_the_user_forbids_to_write_it_beside_the_source(
    monkeypatch: pytest.MonkeyPatch, own_home: Path
) -> None:
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    assert "PYTHONPYCACHEPREFIX" not in build_variables("vllm")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    found = build_variables("vllm")
    assert "PYTHONDONTWRITEBYTECODE" not in found
    assert Path(found["PYTHONPYCACHEPREFIX"]).is_relative_to(own_home / "engines" / "vllm")
