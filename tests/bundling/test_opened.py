"""Opening bundles: damaged, truncated, for another machine, or not a bundle."""

from __future__ import annotations

import importlib.metadata
import io
import shutil
import tarfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.commands import invoke

from bedplate.bundling.make import _find_linked_folders, make_bundle
from bedplate.bundling.serve_bundle import (
    OpenBundle,
    check_bundle,
    check_site,
    describe_differences,
    open_bundle,
    read_bundle,
)
from bedplate.decide import decide, plan
from bedplate.errors import BedplateError, ExternalFailure, NotPossible, UsageError
from bedplate.facts.hardware import probe
from bedplate.progress import SilentProgress
from bedplate.run.builtin import read_builtin_facts
from bedplate.run.prepare import get_prepared_dir
from bedplate.run.ready import ModelDecision, decide_engines
from bedplate.run.uv import list_pinned_packages, run_uv
from bedplate.values import replace_fields, to_json
from bedplate.values.bundle import MANIFEST, TOP, Bundle, BundledFile, SiteRequirements
from bedplate.values.intent import Intent
from bedplate.values.service import ModelOrder
from bedplate.values.workload import Workload

CONTENT = {"wheels/a.whl": b"not a real wheel", "model/tiny.gguf": b"weights " * 40, "README.txt": b"read me\n"}


@pytest.fixture(scope="module")
def manifest() -> Bundle:
    """The manifest of a bundle of the built-in model, with three small files instead of its own."""
    hardware, facts = probe(), read_builtin_facts()
    chosen = plan(decide(hardware, facts, Workload(origin="default"), "llama.cpp"), facts, Workload(origin="default"))
    return Bundle(
        bedplate="0.1.0",
        made_at="2026-11-15T12:00:00+00:00",
        site=_describe_this_site(),
        wanted=ModelOrder(engine="llama.cpp"),
        hardware=hardware,
        plan=replace_fields(chosen, model=replace_fields(facts, files=("model/tiny.gguf",))),
        recipe=("xllamacpp==2026.10.11549",),
        files=tuple(
            BundledFile(path=path, size_bytes=len(data), sha256=sha256(data).hexdigest())
            for path, data in CONTENT.items()
        ),
    )


def _describe_this_site() -> SiteRequirements:
    import platform
    import sysconfig

    python = ".".join(platform.python_version_tuple()[:2])
    return SiteRequirements(python=python, platform=sysconfig.get_platform(), glibc="2.5")


def write_folder(root: Path, bundle: Bundle) -> Path:
    for path, data in CONTENT.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    (root / MANIFEST).write_text(to_json(bundle))
    return root


def write_archive(path: Path, bundle: Bundle) -> Path:
    with tarfile.open(path, "w") as out:
        for name, data in {**CONTENT, MANIFEST: to_json(bundle).encode()}.items():
            info = tarfile.TarInfo(f"{TOP}/{name}")
            info.size = len(data)
            out.addfile(info, io.BytesIO(data))
    return path


@pytest.mark.parametrize("make", [write_folder, write_archive], ids=["folder", "archive"])
def test_complete_bundle_passes_the_check(make: Callable[..., Path], manifest: Bundle, tmp_path: Path) -> None:
    assert check_bundle(make(tmp_path / "one", manifest)) == manifest


@pytest.mark.parametrize(
    ("happens", "words"),
    [
        (
            lambda root: (root / "model/tiny.gguf").write_bytes(b"Weights " * 40),
            "model/tiny.gguf has a different sha256",
        ),
        (lambda root: (root / "model/tiny.gguf").write_bytes(b"weights"), "has 7 bytes instead of 320"),
        (lambda root: (root / "wheels/a.whl").unlink(), "wheels/a.whl is missing"),
    ],
    ids=["changed", "shorter", "missing"],
)
def test_error_names_the_damaged_file(
    happens: Callable[[Path], Any], words: str, manifest: Bundle, tmp_path: Path
) -> None:
    root = write_folder(tmp_path / "one", manifest)
    check_bundle(root)
    happens(root)
    with pytest.raises(ExternalFailure, match="damaged: 1 of 3 files") as raised, open_bundle(root):
        pass
    assert words in str(raised.value.cause) and "copy it" in str(raised.value.hint)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), cut=st.booleans())
def test_corrupt_archive_raises_an_error_or_has_the_same_files(
    where: float, bit: int, cut: bool, manifest: Bundle, tmp_path: Path
) -> None:
    """Some bits do not matter: an archive has padding, and a manifest has free text."""
    data = bytearray(write_archive(tmp_path / "made.tar", manifest).read_bytes())
    at = int(where * len(data))
    if cut:
        del data[at:]
    else:
        data[at] ^= 1 << bit
    (tmp_path / "bad.tar").write_bytes(data)
    try:
        found = check_bundle(tmp_path / "bad.tar")
    except BedplateError as error:
        assert error.message
    else:
        assert isinstance(found, Bundle)
        assert [file.sha256 for file in found.files] == [file.sha256 for file in manifest.files]


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "null", '{"schema": "bundle/9"}', "\x00\xff", '{"schema": "bundle/1", "files": 3}']
)
def test_rejects_invalid_manifest(text: str, tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(UsageError, match="is not a valid Bundle"):
        read_bundle(tmp_path)


def test_rejects_paths_that_are_not_bundles(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no bundle"):
        read_bundle(tmp_path / "nowhere")
    with pytest.raises(ExternalFailure, match="is not a bedplate bundle"):
        read_bundle(tmp_path)
    (tmp_path / "text.tar").write_text("hello")
    with pytest.raises(ExternalFailure, match="is not a bedplate bundle"):
        read_bundle(tmp_path / "text.tar")


@pytest.mark.parametrize(
    ("site", "words"),
    [
        ({"platform": "linux-riscv64"}, "the bundle is for linux-riscv64"),
        ({"python": "3.9"}, "for Python 3.9, but this bedplate runs on"),
        ({"glibc": "9.99"}, "need glibc 9.99 or newer"),
    ],
)
def test_refuses_unsuitable_machine_before_unpacking(
    site: dict[str, str], words: str, manifest: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UV_PYTHON", raising=False)
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.36"))
    other = replace_fields(manifest, site=replace_fields(_describe_this_site(), **site))
    with pytest.raises(NotPossible, match=words) as raised, open_bundle(write_archive(tmp_path / "one.tar", other)):
        pass
    assert raised.value.hint and not (tmp_path / "home").exists()


def test_refuses_engine_that_runs_from_an_image(manifest: Bundle) -> None:
    with pytest.raises(NotPossible, match="container image: nvcr"):
        check_site(replace_fields(manifest, image="nvcr.io/nvidia/tensorrt-llm/release:1.2"))


def _decide_builtin(model: str) -> ModelDecision:
    (found,) = decide_engines(
        [ModelOrder(engine="llama.cpp")], probe(), SilentProgress(), models=[read_builtin_facts()]
    )
    return found


def test_explains_a_changed_plan_and_nothing_else(manifest: Bundle, tmp_path: Path) -> None:
    found = _decide_builtin("llama.cpp")
    same = describe_differences(found.hardware, found.hardware, found.plan, found.plan)
    assert same == []
    fewer = replace_fields(
        found.plan, settings=replace_fields(found.plan.settings, slots=found.plan.settings.slots + 3)
    )
    (line,) = describe_differences(found.hardware, found.hardware, fewer, found.plan)
    assert "slots" in line and line.startswith("fewer resources are free on this machine: planned again")
    (line,) = describe_differences(found.hardware, found.hardware, fewer, found.plan, other_workload=True)
    assert line.startswith("the workload differs")
    elsewhere = replace_fields(found.hardware, cpu=replace_fields(found.hardware.cpu, name="Another CPU"))
    (line,) = describe_differences(elsewhere, found.hardware, found.plan, found.plan)
    assert "planned for Another CPU" in line and "with the same settings" in line


def test_refuses_packages_for_another_device_or_version(manifest: Bundle, tmp_path: Path) -> None:
    found = _decide_builtin("llama.cpp")
    for_cuda = replace_fields(manifest.plan, settings=replace_fields(manifest.plan.settings, device="cuda"))
    with pytest.raises(NotPossible, match=r"has llama\.cpp for cuda"):
        OpenBundle(replace_fields(manifest, plan=for_cuda), tmp_path).check_plan(found, SilentProgress())
    with pytest.raises(NotPossible, match="do not match this version of bedplate"):
        OpenBundle(replace_fields(manifest, recipe=("xllamacpp==1",)), tmp_path).check_plan(found, SilentProgress())


def test_open_bundle_is_the_only_source_of_packages(manifest: Bundle, tmp_path: Path) -> None:
    root = write_folder(tmp_path / "one", manifest)
    assert list_pinned_packages("llama.cpp") is None
    with open_bundle(root):
        assert "--require-hashes" in (list_pinned_packages("llama.cpp") or [])
        with pytest.raises(ExternalFailure, match="no packages for vllm"):
            list_pinned_packages("vllm")
        with pytest.raises(ExternalFailure, match="installing six failed"):
            run_uv(["pip", "install", "--target", str(tmp_path / "six"), "six"], "installing six", tmp_path)
    assert list_pinned_packages("llama.cpp") is None


def test_serve_rejects_model_and_engine_with_a_bundle(manifest: Bundle, tmp_path: Path) -> None:
    root = write_folder(tmp_path / "one", manifest)
    answer = invoke("serve", "other.gguf", "--bundle", str(root), "--engine", "vllm")
    assert answer.code == 2 and "a model and --engine cannot be combined with it" in answer.err


@pytest.mark.parametrize(
    ("intent", "output", "words"),
    [
        (Intent(), "there", "already exists"),
        (Intent(), "nowhere/one.tar", "does not exist"),
    ],
)
def test_rejects_existing_output_and_missing_folder(intent: Intent, output: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(UsageError, match=words):
        make_bundle(intent, output=tmp_path / output)


def test_rejects_several_services(tmp_path: Path) -> None:
    from bedplate.values.intent import Service

    with pytest.raises(UsageError, match="a bundle serves one model"):
        make_bundle(Intent(services=(Service(model="a"), Service(model="b"))), output=tmp_path / "one.tar")


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack one small package instead of bedplate's own; tests/e2e/test_bundle.py packs them all."""
    monkeypatch.setattr(
        "bedplate.run.wheels.list_dependencies", lambda name: [importlib.metadata.distribution("filelock")]
    )


def test_bundle_for_hypothetical_hardware_names_the_image(builtin_gguf: Path, tmp_path: Path, light: None) -> None:
    intent = Intent(hardware="RTX 4090", model=str(builtin_gguf))
    packed = make_bundle(intent, "llama.cpp", tmp_path / "one")
    assert packed.bundle.image is not None and "server-cuda" in packed.bundle.image and not packed.bundle.packages
    root = tmp_path / "one"
    assert (root / "images.txt").read_text().strip() == packed.bundle.image
    assert any((root / "compose").iterdir()) and not (root / "serve").exists()
    assert "docker save" in (root / "README.txt").read_text()
    assert check_bundle(root) == packed.bundle
    with pytest.raises(NotPossible, match="cannot be bundled"):
        make_bundle(intent, "pytorch", tmp_path / "two")
    assert not (tmp_path / "two").exists() and not list(tmp_path.glob(".making*"))


def write_conversion(folder: Path, name: str, made: str, link: tuple[str, str] | None = None) -> Path:
    one = folder / name
    one.mkdir(parents=True)
    (one / made).write_text(f"weights of {name}")
    (one / "bedplate.json").write_text("{}")
    if link is not None:
        (one / link[0]).symlink_to(link[1])
    return one


def describe_file(path: Path, root: Path) -> BundledFile:
    where = path.relative_to(root).as_posix()
    if path.is_symlink():
        return BundledFile(path=where, link=str(path.readlink()))
    data = path.read_bytes()
    return BundledFile(path=where, size_bytes=len(data), sha256=sha256(data).hexdigest())


def test_converted_weights_are_linked_from_the_bundle(
    manifest: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two conversion steps; the second links to the result of the first, as `prepare` stores them."""
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path / "maker"))
    first = write_conversion(get_prepared_dir(), "aaaa", "folder")
    last = write_conversion(get_prepared_dir(), "bbbb", "model-fp8", ("folder", "../aaaa/folder"))
    assert _find_linked_folders(last) == [last, first]

    root = tmp_path / "bundle"
    shutil.copytree(get_prepared_dir(), root / "prepared", symlinks=True)
    found = [path for path in sorted((root / "prepared").rglob("*")) if path.is_symlink() or path.is_file()]
    listed = (*manifest.files, *(describe_file(path, root) for path in found))
    write_folder(root, replace_fields(manifest, prepared=("bbbb", "aaaa"), files=listed))
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path / "site"))
    for _ in range(2):  # a second start finds the links
        with open_bundle(root):
            pass
    there = get_prepared_dir() / "bbbb"
    assert (there / "bedplate.json").is_file() and not (there / "bedplate.json").is_symlink()
    assert (there / "model-fp8").is_symlink() and (there / "model-fp8").read_text() == "weights of bbbb"
    assert (there / "folder").read_text() == "weights of aaaa"

    moved = (tmp_path / "bundle").rename(tmp_path / "elsewhere")
    with open_bundle(moved):
        assert (there / "model-fp8").read_text() == "weights of bbbb", "links follow a bundle that was moved"


def test_bundle_for_this_machine_names_the_image_of_an_engine_without_recipe(
    builtin_gguf: Path, tmp_path: Path, light: None
) -> None:
    packed = make_bundle(Intent(), "ollama", tmp_path / "one")
    assert packed.bundle.image is not None and packed.bundle.image.startswith("ollama/ollama:")
    assert (tmp_path / "one" / "model" / builtin_gguf.name).is_file()
