"""Which build of PyTorch an environment gets, and which packages are removed from it."""

from __future__ import annotations

import platform
import sys
import zipfile
from pathlib import Path

import pytest
from tests.run.test_environments import Tiny, make_wheel, own_home, wheels

from bedplate.engines import Engine, EnvironmentRecipe
from bedplate.errors import ExternalFailure
from bedplate.run import environments
from bedplate.run.environments import build_command, find_environment, get_environment_path, make_environment
from bedplate.run.uv import build_torch_arguments, choose_torch_backend
from bedplate.values import Launch
from bedplate.values.decision import Device

__all__ = ["own_home", "wheels"]
PINNED = ("engine==1", "torch==2.13.0", "other[extra]==2; sys_platform == 'linux'")
TAG = f"cp{sys.version_info.major}{sys.version_info.minor}"
HERE = f"{sys.version_info.major}.{sys.version_info.minor}.1"

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="macOS has one build of PyTorch")


def put(folder: Path, version: str, tag: str = TAG, machine: str = platform.machine()) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"torch-{version}-{tag}-{tag}-manylinux_2_28_{machine}.whl").touch()


@pytest.fixture
def links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("UV_TORCH_BACKEND", raising=False)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("UV_FIND_LINKS", f"{tmp_path / 'none'},https://example.com/wheels,{tmp_path / 'links'}")
    return tmp_path / "links"


class TestBackend:
    def test_machine_without_gpu_never_gets_the_cuda_build(self, links: Path) -> None:
        assert choose_torch_backend(PINNED, "cpu") == "cpu"
        assert build_torch_arguments(PINNED, "cpu", HERE) == ["--torch-backend", "cpu", *PINNED]

    @pytest.mark.parametrize("device", ["cuda", "rocm", "xpu"])
    def test_machine_with_gpu_gets_the_build_for_it(self, links: Path, device: Device) -> None:
        put(links, "2.13.0+cpu")
        assert choose_torch_backend(PINNED, device) == "auto"
        assert build_torch_arguments(PINNED, "auto", HERE) == ["--torch-backend", "auto", *PINNED]

    def test_local_wheel_takes_precedence_over_index(self, links: Path) -> None:
        put(links, "2.13.0+cpu")
        assert build_torch_arguments(PINNED, "cpu", HERE) == ["engine==1", "torch==2.13.0+cpu", PINNED[2]]

    @pytest.mark.parametrize(
        ("version", "tag", "machine"),
        [
            ("2.12.0+cpu", TAG, platform.machine()),
            ("2.13.0+cu130", TAG, platform.machine()),
            ("2.13.0", TAG, platform.machine()),
            ("2.13.0+cpu", "cp38", platform.machine()),
            ("2.13.0+cpu", TAG, "s390x"),
        ],
    )
    def test_ignores_wheel_for_another_platform(self, links: Path, version: str, tag: str, machine: str) -> None:
        put(links, version, tag, machine)
        assert build_torch_arguments(PINNED, "cpu", HERE)[0] == "--torch-backend"

    def test_uses_pip_find_links(self, links: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("UV_FIND_LINKS")
        monkeypatch.setenv("PIP_FIND_LINKS", f"/nowhere {links}")
        put(links, "2.13.0+cpu")
        assert "torch==2.13.0+cpu" in build_torch_arguments(PINNED, "cpu", HERE)

    def test_user_setting_takes_precedence(self, links: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("UV_TORCH_BACKEND", "cu126")
        assert choose_torch_backend(PINNED, "cpu") == "cu126"

    def test_engines_without_torch_are_unaffected(self, links: Path) -> None:
        assert choose_torch_backend(("torchaudio==1", "engine==1"), "cpu") is None
        assert build_torch_arguments(("engine==1",), None, HERE) == ["engine==1"]

    def test_each_torch_build_has_a_separate_environment(self, links: Path, own_home: Path) -> None:
        class Torch(Tiny):
            recipe = EnvironmentRecipe(packages=PINNED, download_bytes=1, disk_bytes=1, check="")

        one = Torch()
        assert get_environment_path(one, one.recipe, "cpu") != get_environment_path(one, one.recipe, "cuda")
        tiny = Tiny()
        assert tiny.recipe is not None
        assert get_environment_path(tiny, tiny.recipe, "cpu") == get_environment_path(tiny, tiny.recipe, "cuda")


def test_removes_packages_that_break_the_engine(wheels: Path, own_home: Path) -> None:
    make_wheel(wheels, "bedplate-tiny-poison", "1.0", {"bedplate_tiny_poison.py": ""})

    class Poisoned(Tiny):
        recipe = EnvironmentRecipe(
            packages=("bedplate-tiny-engine==1.0", "bedplate-tiny-poison==1.0"),
            removes=("bedplate-tiny-poison", "bedplate-tiny-absent"),
            download_bytes=1,
            disk_bytes=1,
            check="import importlib.util as u; assert u.find_spec('bedplate_tiny_poison') is None",
        )

    assert make_environment(Poisoned()).packages == ("bedplate-tiny-engine==1.0",)


def add_requirement(path: Path, requirement: str) -> None:
    """Adds a requirement to a wheel."""
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            more = f"Requires-Dist: {requirement}\n".encode() if name.endswith("METADATA") else b""
            archive.writestr(name, content + more)


def test_installs_bare_packages_without_dependencies(wheels: Path, own_home: Path) -> None:
    add_requirement(
        make_wheel(wheels, "bedplate-tiny-asking", "1.0", {"bedplate_tiny_asking.py": ""}), "bedplate-tiny-absent==9"
    )

    class Asking(Tiny):
        recipe = EnvironmentRecipe(
            packages=("bedplate-tiny-engine==1.0",),
            bare=("bedplate-tiny-asking==1.0",),
            download_bytes=1,
            disk_bytes=1,
            check="import bedplate_tiny_asking, bedplate_tiny_engine",
        )

    one = Asking()
    assert make_environment(one).packages == ("bedplate-tiny-asking==1.0", "bedplate-tiny-engine==1.0")
    assert find_environment(one) is not None and find_environment(Tiny()) is None


def test_rejects_device_without_recipe(own_home: Path) -> None:
    class OnCpus(Tiny):
        def find_recipe(self, device: Device) -> EnvironmentRecipe | None:
            return self.recipe if device == "cpu" else None

    assert find_environment(OnCpus(), "cuda") is None
    with pytest.raises(ExternalFailure, match="cannot install"):
        make_environment(OnCpus(), device="cuda")


def test_uses_recipe_of_the_device(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cards = EnvironmentRecipe(packages=("for-cards==1",), download_bytes=1, disk_bytes=1, check="")

    class Both(Tiny):
        def find_recipe(self, device: Device) -> EnvironmentRecipe | None:
            return cards if device == "cuda" else self.recipe

    asked: list[EnvironmentRecipe] = []

    def note(engine: Engine, recipe: EnvironmentRecipe, *_: object) -> None:
        asked.append(recipe)

    monkeypatch.setattr(environments, "_install", note)
    make_environment(Both(), device="cuda")
    make_environment(Both())
    assert asked == [cards, Tiny.recipe]


def test_command_uses_the_environments_python(wheels: Path, own_home: Path) -> None:
    environment = make_environment(Tiny())
    words = build_command(environment, Launch(argv=("python", "-m", "some.module", "--port", "1")))
    assert words == [str(environment.interpreter), "-I", "-m", "some.module", "--port", "1"]
    assert find_environment(Tiny()) == environment
