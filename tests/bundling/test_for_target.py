"""Bundles for another platform: targets, excluded packages and pieces. Nothing is downloaded."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.commands import invoke

from bedplate.bundling.for_target import (
    PackageDownloader,
    TargetRequest,
    _find_engine_contents,
    _Overlay,
    _PieceWriter,
    _remove,
    _remove_other_pythons,
    make_target_bundle,
    parse_target,
)
from bedplate.engines import get_engine, load_engines
from bedplate.errors import ExternalFailure, NotPossible, UsageError
from bedplate.progress import SilentProgress


def test_target_name_determines_the_requirements() -> None:
    target = parse_target("linux-x86_64-cuda13", "3.12", "9.0")
    assert (target.machine, target.device, target.cuda, target.driver) == ("x86_64", "cuda", "13", "580")
    plain = parse_target("linux-aarch64-cpu", "3.11")
    assert (plain.machine, plain.device, plain.cuda, plain.driver) == ("aarch64", "cpu", None, None)


@pytest.mark.parametrize(
    ("name", "python", "capability", "words"),
    [
        ("windows-x86_64-cpu", "3.12", None, "unknown target"),
        ("linux-x86_64-cuda9", "3.12", None, "unknown target"),
        ("linux-x86_64-cpu", "3.12.3", None, "is not a minor version"),
        ("linux-x86_64-cpu", "3.12", "9.0", "compute capability"),
        ("linux-x86_64-cuda13", "3.12", "sm90", "compute capability"),
    ],
)
def test_rejects_invalid_targets(name: str, python: str, capability: str | None, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_target(name, python, capability)
    assert words in caught.value.message and caught.value.hint


def test_overlay_excludes_packages_of_pytorch_and_kernels_for_other_gpus() -> None:
    target = parse_target("linux-x86_64-cuda13", "3.12", "9.0")
    found = _find_engine_contents(get_engine("vllm"), "0.26.0", _Overlay.parse("torch==2.11.0+cu130"), target)
    assert found.version == "0.26.0" and found.packages == ("vllm==0.26.0",)
    assert {"torch", "triton", "nvidia-cublas"} <= set(found.left_out)
    assert "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so" in found.unused_files
    assert ("VLLM_USE_FLASHINFER_SAMPLER", "0") in found.environment
    complete = _find_engine_contents(get_engine("vllm"), "0.26.0", None, target)
    assert complete.left_out == () and complete.environment == found.environment


def test_overlay_without_version_chooses_the_one_that_fits_pytorch() -> None:
    target = parse_target("linux-x86_64-cuda13", "3.12")
    found = _find_engine_contents(get_engine("sglang"), None, _Overlay.parse("torch==2.11.0"), target)
    assert found.version == "0.5.15" and "sgl_kernel/sm100" not in found.unused_files


@pytest.mark.parametrize(
    ("version", "overlay", "name"),
    [
        ("0.1.2", "torch==2.11.0", "linux-x86_64-cuda13"),
        ("0.26.0", "torch==2.10.0", "linux-x86_64-cuda13"),
        ("0.26.0", "torch==2.11.0", "linux-x86_64-cuda12"),
        ("0.26.0", None, "linux-x86_64-cpu"),
    ],
    ids=["version", "PyTorch", "CUDA", "no CUDA"],
)
def test_refusal_without_recipe_lists_known_combinations(version: str, overlay: str | None, name: str) -> None:
    given = _Overlay.parse(overlay) if overlay else None
    with pytest.raises(NotPossible) as caught:
        _find_engine_contents(get_engine("vllm"), version, given, parse_target(name, "3.12"))
    assert "vllm@0.26.0 over torch 2.11.0 and CUDA 13" in (caught.value.hint or "")


def test_every_overlay_has_a_source_and_a_check() -> None:
    overlays = [one for each in load_engines().values() for one in each.overlays]
    assert {one.packages[0] for one in overlays} >= {"vllm==0.26.0", "sglang==0.5.15"}
    for one in overlays:
        assert one.source and one.check and one.as_of and "torch" in one.provided
        assert not set(one.provided) & set(one.unused)


def test_overlay_reads_a_requirements_file(tmp_path: Path) -> None:
    file = tmp_path / "freeze.txt"
    file.write_text("# of the target\ntorch==2.11.0+cu130\nNumPy==2.3.5\nlocal @ file:///x\n")
    overlay = _Overlay.parse(str(file))
    assert overlay.torch == "2.11.0" and overlay.constraints == ["torch==2.11.0", "NumPy==2.3.5"]
    assert overlay.has("numpy==2.3.5") and not overlay.has("numpy==2.3.4") and not overlay.has("torchvision==0.26.0")
    file.write_text("numpy==2.3.5\n")
    with pytest.raises(UsageError, match=r"has no torch==VERSION"):
        _Overlay.parse(str(file))
    with pytest.raises(UsageError, match=r"neither torch==VERSION nor a file"):
        _Overlay.parse("torch>=2.11")


@given(parts=st.lists(st.binary(max_size=50), max_size=12), most=st.integers(1, 40))
def test_joined_pieces_equal_the_stream(
    parts: list[bytes], most: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("pieces")
    pieces = _PieceWriter(folder, most)
    for part in parts:
        assert pieces.write(part) == len(part)
    pieces.close()
    contents = [(folder / piece.name).read_bytes() for piece in pieces.done]
    assert b"".join(contents) == b"".join(parts)
    assert [(len(one), sha256(one).hexdigest()) for one in contents] == [
        (piece.size_bytes, piece.sha256) for piece in pieces.done
    ]
    assert all(len(one) == most for one in contents[:-1]) and len(contents[-1]) <= most


def test_removes_modules_for_other_pythons_if_the_right_one_exists(tmp_path: Path) -> None:
    for name in ("a/_C.cpython-312-x.so", "a/_C.cpython-313-x.so", "b/_D.cpython-310-x.so", "b/tests/t.py", "b/t.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(b"")
    _remove_other_pythons(tmp_path, "3.12")
    _remove(tmp_path, ("*/tests", "b/t.*", "nothing/*"))
    left = sorted(file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*") if file.is_file())
    assert left == ["a/_C.cpython-312-x.so", "b/_D.cpython-310-x.so"]


@pytest.mark.parametrize(
    ("refused", "notes"),
    [((), 0), (("if-necessary-or-explicit",), 0), (("--exclude-newer",), 1)],
    ids=["as of the date", "with pre-releases", "index without upload times"],
)
def test_packages_are_resolved_as_of_the_date_of_the_recipe_if_possible(
    refused: tuple[str, ...], notes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for uv rejects some options, as for an index without upload times or with only pre-releases."""
    calls: list[list[str]] = []

    def compile_pins(arguments: list[str], what: str, folder: Path, written: object = None) -> None:
        calls.append(arguments)
        if set(refused) & set(arguments):
            raise ExternalFailure(what, cause="requirements are unsatisfiable")
        Path(arguments[arguments.index("--output-file") + 1]).write_text("one==1.0\ntwo==2.0\n")

    class Notes(SilentProgress):
        def note(self, text: str) -> None:
            noted.append(text)

    noted: list[str] = []
    monkeypatch.setattr("bedplate.bundling.for_target.run_uv", compile_pins)
    download = PackageDownloader(parse_target("linux-x86_64-cuda13", "3.12"), tmp_path, Notes())
    assert download.resolve("one", ["one"], (), "2026-11-17T11:00:00Z") == ["one==1.0", "two==2.0"]
    assert len(noted) == notes and "--exclude-newer" in calls[0]
    assert "x86_64-manylinux_2_35" in calls[-1] and "3.12" in calls[-1]


def test_hint_names_the_target_if_packages_cannot_be_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(arguments: list[str], what: str, folder: Path, written: object = None) -> None:
        raise ExternalFailure(what, cause="requirements are unsatisfiable", hint="of this machine")

    monkeypatch.setattr("bedplate.bundling.for_target.run_uv", refuse)
    with pytest.raises(ExternalFailure) as caught:
        PackageDownloader(parse_target("linux-x86_64-cpu", "3.12"), tmp_path, SilentProgress()).resolve("one", ["one"])
    assert "Python 3.12 on linux-x86_64-cpu" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--pieces", "48M"], "--pieces needs --for"),
        (["--for", "linux-x86_64-cpu", "--pieces", "10"], "at least 1 MiB"),
        (["--for", "linux-x86_64-cpu", "--without", "models"], "'models' is not one of engine, model, bedplate"),
        (["--for", "linux-x86_64-cpu", "--without", "engine,model,bedplate"], "leaves nothing to pack"),
        (["--for", "linux-x86_64-cpu", "--hardware", "h200"], "exclude each other"),
        (["--for", "linux-x86_64-cpu", "--engine", "nonsense@1"], "no engine is called 'nonsense'"),
    ],
)
def test_reports_usage_errors(options: list[str], words: str) -> None:
    answer = invoke("bundle", *options)
    assert answer.code == 2 and words in answer.err


def test_existing_output_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="already exists"):
        make_target_bundle(TargetRequest("linux-x86_64-cpu", "3.12", output=tmp_path))
