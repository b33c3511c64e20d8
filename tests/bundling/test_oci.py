"""Images as OCI layouts: what they contain, that they are reproducible, and which bases are refused."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from bedplate.bundling.oci import BuiltImage, build_image, read_base
from bedplate.errors import BedplateError, ExternalFailure, NotPossible, UsageError

OWNERS = {"state": (1000, 0o700)}
CONFIG = {"User": "1000:1000", "Entrypoint": ["program"], "Env": ["PATH=/opt/bin"]}


def make_elf(machine: int) -> bytes:
    return b"\x7fELF" + bytes(14) + machine.to_bytes(2, "little") + bytes(44)


def write_base(path: Path, *pythons: str, machine: int = 62, mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name in ("./etc/passwd", *(f"./usr/{one}" for one in pythons)):
            content = make_elf(machine) if "python" in name else b"root:x:0:0\n"
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def write_tree(root: Path) -> Path:
    (root / "opt" / "bin").mkdir(parents=True)
    (root / "opt" / "bin" / "program").write_text("#!/bin/sh\n")
    (root / "opt" / "bin" / "program").chmod(0o700)
    (root / "opt" / "bin" / "other").symlink_to("program")
    (root / "state").mkdir()
    return root


def build(folder: Path, base: Path, tree: Path) -> BuiltImage:
    folder.mkdir()
    return build_image(read_base(base, folder), tree, OWNERS, CONFIG, "1.0", folder)


def store(image: BuiltImage, folder: Path) -> Path:
    """Write the layout as a bundle does."""
    for blob in image.blobs:
        (folder / blob.path).parent.mkdir(parents=True, exist_ok=True)
        (folder / blob.path).write_bytes(blob.file.read_bytes())
    for name, text in image.texts.items():
        (folder / name).write_text(text)
    return folder


def read_blob(layout: Path, descriptor: dict[str, Any]) -> bytes:
    data: bytes = (layout / "blobs" / "sha256" / descriptor["digest"].removeprefix("sha256:")).read_bytes()
    assert len(data) == descriptor["size"]
    assert hashlib.sha256(data).hexdigest() == descriptor["digest"].removeprefix("sha256:")
    return data


def read_image(layout: Path) -> tuple[dict[str, Any], list[bytes]]:
    """The configuration and the uncompressed layers, with every hash compared."""
    (entry,) = json.loads((layout / "index.json").read_text())["manifests"]
    manifest = json.loads(read_blob(layout, entry))
    config = json.loads(read_blob(layout, manifest["config"]))
    layers = [gzip.decompress(read_blob(layout, one)) for one in manifest["layers"]]
    assert config["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(one).hexdigest()}" for one in layers]
    assert len(config["history"]) == len(layers)
    return config, layers


def test_layout_has_the_base_and_one_layer_with_owners_and_modes(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base.tar.gz", "bin/python3.11", "local/bin/python3.12")
    image = build(tmp_path / "made", base, write_tree(tmp_path / "tree"))
    layout = store(image, tmp_path / "layout")
    config, (below, above) = read_image(layout)
    assert below == gzip.decompress(base.read_bytes())
    assert config["architecture"] == "amd64" and config["config"] == CONFIG
    with tarfile.open(fileobj=io.BytesIO(above)) as archive:
        found = {one.name: (one.type, one.uid, one.mode) for one in archive}
        assert all(one.mtime == 315_532_800 and not one.uname for one in archive.getmembers())
    assert found["state"] == (tarfile.DIRTYPE, 1000, 0o700)
    assert found["opt/bin/program"] == (tarfile.REGTYPE, 0, 0o755)
    assert found["opt/bin/other"][0] == tarfile.SYMTYPE and list(found) == sorted(found)


def test_same_files_give_the_same_digest_at_another_time(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base.tar.gz", "bin/python3.12")
    one = build(tmp_path / "one", base, write_tree(tmp_path / "first"))
    tree = write_tree(tmp_path / "second")
    os.utime(tree / "opt" / "bin" / "program", (1, 1))
    assert build(tmp_path / "other", base, tree).digest == one.digest
    (tree / "opt" / "bin" / "program").write_text("#!/bin/bash\n")
    assert build(tmp_path / "third", base, tree).digest != one.digest


def test_layout_is_a_base_whose_settings_are_kept_or_replaced(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base.tar.xz", "bin/python3.12", machine=183, mode="w:xz")
    first = store(build(tmp_path / "one", base, write_tree(tmp_path / "tree")), tmp_path / "layout")
    folder = tmp_path / "other"
    folder.mkdir()
    read = read_base(first, folder)
    assert (read.python, read.interpreter, read.architecture) == ("3.12", "/usr/bin/python3.12", "arm64")
    more = {"Env": ["PATH=/second", "HOME=/state"], "User": "7:7"}
    image = build_image(read, tmp_path / "tree", {}, more, "2.0", folder)
    config, layers = read_image(store(image, tmp_path / "second"))
    assert len(layers) == 3
    assert config["config"] == {**CONFIG, "User": "7:7", "Env": ["PATH=/second", "HOME=/state"]}


@pytest.mark.parametrize(
    ("pythons", "words"),
    [([], "has no Python"), (["bin/python3.9"], "only Python 3.9"), (["bin/python"], "no Python")],
)
def test_refuses_a_base_without_a_usable_python(pythons: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(NotPossible, match=words) as caught:
        read_base(write_base(tmp_path / "base.tar.gz", *pythons), tmp_path)
    assert "skopeo copy" in (caught.value.hint or "")


def test_refuses_what_is_neither_an_archive_nor_a_layout(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no archive, but longer than one block: " + "x" * 600)
    for path, words in ((tmp_path / "text", "not a tar"), (tmp_path, "without an OCI"), (tmp_path / "no", "not exist")):
        with pytest.raises(UsageError, match=words):
            read_base(path, tmp_path)


@pytest.mark.parametrize("change", ["blob", "media type", "two images", "missing"])
def test_refuses_a_damaged_layout(change: str, tmp_path: Path) -> None:
    base = write_base(tmp_path / "base.tar.gz", "bin/python3.12")
    image = build(tmp_path / "made", base, write_tree(tmp_path / "tree"))
    layout = store(image, tmp_path / "layout")
    index = json.loads((layout / "index.json").read_text())
    layer = layout / image.blobs[0].path
    if change == "blob":
        layer.write_bytes(layer.read_bytes()[:-1] + b"x")
    elif change == "missing":
        layer.unlink()
    elif change == "two images":
        (layout / "index.json").write_text(json.dumps({**index, "manifests": index["manifests"] * 2}))
    else:
        manifest = layout / "blobs" / "sha256" / image.digest
        text = manifest.read_text().replace("tar+gzip", "tar+zstd")
        digest = hashlib.sha256(text.encode()).hexdigest()
        (manifest.parent / digest).write_text(text)
        index["manifests"][0]["digest"] = f"sha256:{digest}"
        (layout / "index.json").write_text(json.dumps(index))
    with pytest.raises(BedplateError) as caught:
        read_base(layout, tmp_path)
    assert isinstance(caught.value, UsageError if change == "two images" else ExternalFailure)
