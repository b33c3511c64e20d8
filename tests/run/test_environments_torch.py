"""Which build of PyTorch an environment gets, and what is taken out of it again."""

from __future__ import annotations

import platform
import sys
import zipfile
from pathlib import Path

import pytest
from tests.run.test_environments import Tiny, own_home, wheel, wheels

from bedplate.engines import Engine, Recipe
from bedplate.errors import OutsideFailed
from bedplate.run import environments
from bedplate.run.environments import command, environment_path, find_environment, make_environment
from bedplate.run.uv import torch_arguments, torch_backend
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
    def test_without_a_card_never_the_build_for_cuda(self, links: Path) -> None:
        assert torch_backend(PINNED, "cpu") == "cpu"
        assert torch_arguments(PINNED, "cpu", HERE) == ["--torch-backend", "cpu", *PINNED]

    @pytest.mark.parametrize("device", ["cuda", "rocm", "xpu"])
    def test_with_a_card_the_one_for_it(self, links: Path, device: Device) -> None:
        put(links, "2.13.0+cpu")
        assert torch_backend(PINNED, device) == "auto"
        assert torch_arguments(PINNED, "auto", HERE) == ["--torch-backend", "auto", *PINNED]

    def test_a_wheel_that_is_here_goes_before_an_index(self, links: Path) -> None:
        put(links, "2.13.0+cpu")
        assert torch_arguments(PINNED, "cpu", HERE) == ["engine==1", "torch==2.13.0+cpu", PINNED[2]]

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
    def test_a_wheel_for_something_else_does_not_count(self, links: Path, version: str, tag: str, machine: str) -> None:
        put(links, version, tag, machine)
        assert torch_arguments(PINNED, "cpu", HERE)[0] == "--torch-backend"

    def test_folders_for_pip_count_too(self, links: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("UV_FIND_LINKS")
        monkeypatch.setenv("PIP_FIND_LINKS", f"/nowhere {links}")
        put(links, "2.13.0+cpu")
        assert "torch==2.13.0+cpu" in torch_arguments(PINNED, "cpu", HERE)

    def test_what_the_user_says_goes_before_all(self, links: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("UV_TORCH_BACKEND", "cu126")
        assert torch_backend(PINNED, "cpu") == "cu126"

    def test_engines_without_it_are_left_alone(self, links: Path) -> None:
        assert torch_backend(("torchaudio==1", "engine==1"), "cpu") is None
        assert torch_arguments(("engine==1",), None, HERE) == ["engine==1"]

    def test_each_build_has_an_environment_of_its_own(self, links: Path, own_home: Path) -> None:
        class Torch(Tiny):
            recipe = Recipe(packages=PINNED, download_bytes=1, disk_bytes=1, check="")

        one = Torch()
        assert environment_path(one, one.recipe, "cpu") != environment_path(one, one.recipe, "cuda")
        tiny = Tiny()
        assert tiny.recipe is not None
        assert environment_path(tiny, tiny.recipe, "cpu") == environment_path(tiny, tiny.recipe, "cuda")


def test_what_breaks_an_engine_is_taken_out_again(wheels: Path, own_home: Path) -> None:
    wheel(wheels, "bedplate-tiny-poison", "1.0", {"bedplate_tiny_poison.py": ""})

    class Poisoned(Tiny):
        recipe = Recipe(
            packages=("bedplate-tiny-engine==1.0", "bedplate-tiny-poison==1.0"),
            removes=("bedplate-tiny-poison", "bedplate-tiny-absent"),
            download_bytes=1,
            disk_bytes=1,
            check="import importlib.util as u; assert u.find_spec('bedplate_tiny_poison') is None",
        )

    assert make_environment(Poisoned()).packages == ("bedplate-tiny-engine==1.0",)


def asking_for(path: Path, requirement: str) -> None:
    """The same wheel, with a requirement."""
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            more = f"Requires-Dist: {requirement}\n".encode() if name.endswith("METADATA") else b""
            archive.writestr(name, content + more)


def test_what_asks_for_more_than_the_machine_needs_is_installed_without_it(wheels: Path, own_home: Path) -> None:
    asking_for(wheel(wheels, "bedplate-tiny-asking", "1.0", {"bedplate_tiny_asking.py": ""}), "bedplate-tiny-absent==9")

    class Asking(Tiny):
        recipe = Recipe(
            packages=("bedplate-tiny-engine==1.0",),
            bare=("bedplate-tiny-asking==1.0",),
            download_bytes=1,
            disk_bytes=1,
            check="import bedplate_tiny_asking, bedplate_tiny_engine",
        )

    one = Asking()
    assert make_environment(one).packages == ("bedplate-tiny-asking==1.0", "bedplate-tiny-engine==1.0")
    assert find_environment(one) is not None and find_environment(Tiny()) is None


def test_without_a_recipe_for_a_device_nothing_is_installed_for_it(own_home: Path) -> None:
    class OnCpus(Tiny):
        def recipe_for(self, device: Device) -> Recipe | None:
            return self.recipe if device == "cpu" else None

    assert find_environment(OnCpus(), "cuda") is None
    with pytest.raises(OutsideFailed, match="cannot install"):
        make_environment(OnCpus(), device="cuda")


def test_a_recipe_for_each_device(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cards = Recipe(packages=("for-cards==1",), download_bytes=1, disk_bytes=1, check="")

    class Both(Tiny):
        def recipe_for(self, device: Device) -> Recipe | None:
            return cards if device == "cuda" else self.recipe

    asked: list[Recipe] = []

    def note(engine: Engine, recipe: Recipe, *_: object) -> None:
        asked.append(recipe)

    monkeypatch.setattr(environments, "_install", note)
    make_environment(Both(), device="cuda")
    make_environment(Both())
    assert asked == [cards, Tiny.recipe]


def test_python_is_the_environments_own(wheels: Path, own_home: Path) -> None:
    environment = make_environment(Tiny())
    words = command(environment, Launch(argv=("python", "-m", "some.module", "--port", "1")))
    assert words == [str(environment.interpreter), "-I", "-m", "some.module", "--port", "1"]
    assert find_environment(Tiny()) == environment
