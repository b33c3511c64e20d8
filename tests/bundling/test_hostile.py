"""Hostile bundles: whatever a manifest or an archive says, nothing outside of their own folders changes."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.bundling.test_opened import CONTENT, describe_file, manifest, write_archive, write_conversion, write_folder
from tests.commands import invoke

from bedplate.bundling import install
from bedplate.bundling.confinement import check_pins, find_manifest_problem
from bedplate.bundling.serve_bundle import check_bundle, open_bundle, read_bundle
from bedplate.bundling.texts import write_readme, write_serve_script
from bedplate.errors import BedplateError, ExternalFailure, UsageError
from bedplate.run.prepare import get_prepared_dir
from bedplate.values import replace_fields, to_json
from bedplate.values.bundle import MANIFEST, SUMS, TOP, Bundle, BundledFile
from bedplate.values.quoting import escape_controls

__all__ = ["manifest"]
on_each_example = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
OUTSIDE = ("precious", "home/engines/vllm/0.26.0", "home/models/mine", "home/services")
NAMES = ["..", ".", "", "/", "a", "b", "prepared", "aaaa", "bbbb", "model", "bundles", "engines", "vllm", "precious",
         "bedplate.json", "\n", "\\", "..\\x", "~", "A", "é", "é", "x" * 300, "\x00", "-rf", "\x1b[2J"]  # fmt: skip


def describe_everything(root: Path) -> dict[str, Any]:
    """Every path below `root` with its type, mode and content or link."""
    found: dict[str, Any] = {}
    for path in sorted(root.rglob("*")):
        at = path.lstat()
        content = path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(root))] = (at.st_mode, content)
    return found


class Sandbox:
    """A folder with a home and folders of somebody else, which no bundle may touch."""

    def __init__(self, root: Path) -> None:
        self.root, self.home = root, root / "home"
        for place in OUTSIDE:
            (root / place).mkdir(parents=True, exist_ok=True)
            (root / place / "kept.txt").write_text("kept")

    @contextlib.contextmanager
    def unchanged(self, *own: str) -> Iterator[None]:
        """Check that nothing changes but what is below one of the paths `own`."""
        before = describe_everything(self.root)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("BEDPLATE_HOME", str(self.home))
            patch.chdir(self.root / "precious")
            yield
        after = describe_everything(self.root)
        differ = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
        # A home that others could read becomes private at its first use.
        assert not [path for path in differ if not path.startswith(own) and path != "home"], sorted(differ)

    @classmethod
    @contextlib.contextmanager
    def create(cls) -> Iterator[Sandbox]:
        """Create one for a single generated case: thousands of them would fill pytest's folder."""
        with tempfile.TemporaryDirectory() as folder:
            yield cls(Path(folder))


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    return Sandbox(tmp_path)


@pytest.mark.parametrize("name", ["../../precious", "..", ".", "", "hashes", "/", "aaaa/..", "ABSOLUTE", "aaaa"])
def test_prepared_name_deletes_nothing(name: str, manifest: Bundle, sandbox: Sandbox) -> None:
    """The name of converted weights once was joined to a path and removed."""
    name = str(sandbox.root / "precious") if name == "ABSOLUTE" else name
    (sandbox.home / "prepared" / "aaaa").mkdir(parents=True)
    root = write_folder(sandbox.root / "bundle", replace_fields(manifest, prepared=(name,)))
    with sandbox.unchanged("home/prepared/hashes", "home/prepared/aaaa.lock"):
        with pytest.raises(ExternalFailure, match="is not safe to open"), open_bundle(root):
            pass
        with pytest.raises(ExternalFailure, match="is not safe to open"):
            check_bundle(root)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/etc/passwd", "leads out"), ("model/../../a", "leads out"), ("", "leads out"), ("model//a", "leads out"),
        ("./a", "leads out"), ("a\\..\\b", "leads out"), ("model/a\nb", "leads out"), ("x" * 300, "leads out"),
        ("model/TINY.gguf", "twice"), ("model/tiny.gguf/x", "not a folder"), (MANIFEST, "not valid"),
        ("sha256SUMS", "not valid"), ("model/fine.gguf", None), ("prepared/é", None),
    ],
)  # fmt: skip
def test_rejects_paths_outside_of_the_bundle(path: str, why: str | None, manifest: Bundle, tmp_path: Path) -> None:
    hostile = replace_fields(manifest, files=(*manifest.files, BundledFile(path=path)))
    found = find_manifest_problem(hostile)
    assert (why is None) == (found is None) and (why or "") in (found or "")
    if why is not None:
        with pytest.raises(ExternalFailure, match="is not safe to open"):
            read_bundle(write_folder(tmp_path / "one", hostile))


def list_links(*links: tuple[str, str]) -> tuple[BundledFile, ...]:
    folders = (BundledFile(path=f"prepared/{name}/bedplate.json") for name in ("aaaa", "bbbb"))
    files = (BundledFile(path=f"prepared/{name}/weights/x") for name in ("aaaa", "bbbb"))
    return (*folders, *files, *(BundledFile(path=path, link=link) for path, link in links))


@pytest.mark.parametrize(
    ("links", "allowed"),
    [
        ([("prepared/aaaa/l", "../bbbb/weights")], True),
        ([("prepared/aaaa/l", "../bbbb/weights/x")], True),
        ([("prepared/aaaa/l", "../bbbb/m"), ("prepared/bbbb/m", "weights")], True),
        ([("prepared/aaaa/l", "weights/../../bbbb/weights")], True),
        ([("prepared/aaaa/l", "../../../x")], False),
        ([("prepared/aaaa/l", "/etc/passwd")], False),
        ([("prepared/aaaa/l", "../../model/tiny.gguf")], False),
        ([("prepared/aaaa/l", "..")], False),
        ([("prepared/aaaa/l", "../bbbb")], False),
        ([("prepared/aaaa/l", "../cccc/x")], False),
        ([("prepared/aaaa/l", "nowhere")], False),
        ([("prepared/aaaa/l", "")], False),
        ([("prepared/aaaa/l", "l")], False),
        ([("prepared/aaaa/l", "../bbbb/m"), ("prepared/bbbb/m", "../aaaa/l")], False),
        # By its text the second link stays inside; the kernel follows the first one and leaves the bundle.
        ([("prepared/aaaa/w/l", "../../.."), ("prepared/aaaa/m", "w/l/../x")], False),
        ([("prepared/aaaa/L", "../bbbb/weights"), ("prepared/aaaa/l/y", "../x")], False),
        ([("model/l", "tiny.gguf")], False),
        ([("x", "..")], False),
    ],
)  # fmt: skip
def test_links_lead_only_to_converted_weights(
    links: list[tuple[str, str]], allowed: bool, manifest: Bundle, tmp_path: Path
) -> None:
    files = (*manifest.files, *list_links(*links))
    found = find_manifest_problem(replace_fields(manifest, prepared=("aaaa", "bbbb"), files=files))
    assert (found is None) == allowed, found
    if allowed:  # the file system agrees
        for file in files:
            (tmp_path / file.path).parent.mkdir(parents=True, exist_ok=True)
            if file.link is not None:
                (tmp_path / file.path).symlink_to(file.link)
            else:
                (tmp_path / file.path).touch()
        resolved = [(tmp_path / file.path).resolve(strict=True) for file in files]
        assert all(path.is_relative_to(tmp_path.resolve()) for path in resolved)


@pytest.mark.parametrize("file", ["/etc/passwd", "../../precious/kept.txt", "README.txt", "model/other.gguf", ""])
def test_model_is_one_of_the_listed_files(file: str, manifest: Bundle, tmp_path: Path) -> None:
    model = replace_fields(manifest.plan.model, files=(file,))
    root = write_folder(
        tmp_path / "one", replace_fields(manifest, plan=replace_fields(manifest.plan, model=model, source=None))
    )
    with pytest.raises(ExternalFailure, match="is not one of its files"):
        read_bundle(root)


@pytest.mark.parametrize(
    "line",
    ["six @ file:///tmp/six.whl --hash=sha256:" + 64 * "0", "--index-url http://x", "-r /etc/passwd", "six==1",
     "six==1 ; python_version > '3' --hash=sha256:" + 64 * "0", ""],
)  # fmt: skip
def test_requirements_name_only_wheels_of_the_bundle(line: str, tmp_path: Path) -> None:
    good = f"six==1.0+cpu --hash=sha256:{64 * 'a'}\n"
    check_pins(good, tmp_path)
    with pytest.raises(ExternalFailure, match="is not a package"):
        check_pins(f"{good}{line}\n", tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda root: (root / "model/extra.py").write_text("x"), "model/extra.py is not in the manifest"),
        (lambda root: (root / "link").symlink_to("/"), "link is not in the manifest"),
        (lambda root: (root / "wheels/a.whl").chmod(0o4755), "wheels/a.whl is a setuid"),
        (lambda root: replace_by_link(root / "model"), "model/tiny.gguf is behind a link"),
        (lambda root: replace_by_link(root / "README.txt"), "README.txt is not a regular file"),
        (lambda root: (root / SUMS).write_text("other"), f"{SUMS} has 5 bytes"),
        (lambda root: replace_by_pipe(root / "README.txt"), "is not a regular file"),
    ],
    ids=["unlisted file", "unlisted link", "setuid", "folder is a link", "file is a link", "sums", "pipe"],
)
def test_check_reports_unlisted_and_unusual_files(
    change: Callable[[Path], object], words: str, manifest: Bundle, tmp_path: Path
) -> None:
    root = write_folder(tmp_path / "one", manifest)
    check_bundle(root)
    change(root)
    for check in (check_bundle, lambda path: open_bundle(path).__enter__()):
        with pytest.raises(ExternalFailure) as caught:
            check(root)
        assert words in str(caught.value.cause)


def replace_by_link(path: Path) -> None:
    """Move the file or folder away, and put a link to it in its place: the content stays the same."""
    path.rename(path.parent.parent / "moved")
    path.symlink_to(path.parent.parent / "moved")


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def test_check_reads_files_that_look_unchanged(manifest: Bundle, tmp_path: Path) -> None:
    """`serve` trusts size and time of a file that it has read; `--check` and a given hash do not."""
    root = write_folder(tmp_path / "one", manifest)
    digest = sha256((root / MANIFEST).read_bytes()).hexdigest()
    with open_bundle(root):
        pass
    model = root / "model/tiny.gguf"
    before = model.stat()
    model.write_bytes(b"Weights " * 40)
    os.utime(model, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(ExternalFailure, match="damaged"):
        check_bundle(root)
    with pytest.raises(ExternalFailure, match="damaged"), open_bundle(root, sha256=digest):
        pass


@pytest.mark.parametrize("make", [write_folder, write_archive], ids=["folder", "archive"])
def test_manifest_with_another_hash_is_refused(make: Callable[..., Path], manifest: Bundle, tmp_path: Path) -> None:
    """Whoever changes a file can change the manifest as well; only its hash shows that."""
    path = make(tmp_path / "one", manifest)
    digest = sha256(to_json(manifest).encode()).hexdigest()
    assert check_bundle(path, sha256=digest.upper()) == manifest and read_bundle(path, digest) == manifest
    other = make(tmp_path / "two", replace_fields(manifest, made_at="2026-11-16T12:00:00+00:00"))
    assert invoke("bundle", "--check", str(other)).code == 0
    for words in (["bundle", "--check", str(other)], ["serve", "--bundle", str(other)]):
        answer = invoke(*words, "--manifest-sha256", digest)
        assert answer.code == 3 and "is not the bundle that --manifest-sha256 names" in answer.err, answer.err
    answer = invoke("bundle", "--check", str(path), "--manifest-sha256", digest)
    assert answer.code == 0 and "not verified" not in answer.out
    assert "Origin" in invoke("bundle", "--check", str(path)).out


def test_hash_option_is_checked(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a SHA-256 hash"):
        read_bundle(tmp_path, "abc")
    assert invoke("bundle", "--manifest-sha256", 64 * "0").code == 2
    assert invoke("serve", "--manifest-sha256", 64 * "0").code == 2


def make_member(name: str, **fields: Any) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(info, field, value)
    return info


MEMBERS: dict[str, list[tarfile.TarInfo]] = {
    "absolute": [make_member("/tmp/x")],
    "parent": [make_member(f"{TOP}/../x")],
    "outside of the top folder": [make_member("x")],
    "symlink to a folder, and a file below it": [
        make_member(f"{TOP}/l", type=tarfile.SYMTYPE, linkname="/tmp"), make_member(f"{TOP}/l/x"),
    ],
    "hard link": [make_member(f"{TOP}/h", type=tarfile.LNKTYPE, linkname="/etc/passwd")],
    "hard link to the model": [make_member(f"{TOP}/h", type=tarfile.LNKTYPE, linkname=f"{TOP}/model/tiny.gguf")],
    "device": [make_member(f"{TOP}/d", type=tarfile.CHRTYPE, devmajor=1, devminor=3)],
    "pipe": [make_member(f"{TOP}/p", type=tarfile.FIFOTYPE)],
    "setuid": [make_member(f"{TOP}/s", mode=0o4755)],
    "same name": [make_member(f"{TOP}/README.txt")],
    "same name in another case": [make_member(f"{TOP}/readme.TXT")],
    "unlisted": [make_member(f"{TOP}/model/extra.py")],
    "link loop for the manifest's content": [
        make_member(f"{TOP}/a", type=tarfile.SYMTYPE, linkname="b"),
        make_member(f"{TOP}/b", type=tarfile.SYMTYPE, linkname="a"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", MEMBERS)
def test_archive_with_unusual_members_is_refused(name: str, manifest: Bundle, sandbox: Sandbox) -> None:
    path = write_archive(sandbox.root / "one.tar", manifest)
    with tarfile.open(path, "a") as out:
        for info in MEMBERS[name]:
            out.addfile(info)
    with sandbox.unchanged("home/bundles", "home/prepared"):
        with pytest.raises(ExternalFailure) as caught:
            check_bundle(path)
        assert "is not safe to open" in caught.value.message or "not in the manifest" in str(caught.value.cause)


def test_archive_larger_than_its_manifest_is_not_unpacked(manifest: Bundle, sandbox: Sandbox) -> None:
    small = tuple(replace_fields(file, size_bytes=1) for file in manifest.files)
    path = write_archive(sandbox.root / "one.tar", replace_fields(manifest, files=small))
    with sandbox.unchanged("home/bundles"), pytest.raises(ExternalFailure, match="is damaged"), open_bundle(path):
        pass
    assert not [one for one in (sandbox.home / "bundles").iterdir() if one.is_dir()]


def test_sparse_member_is_refused(manifest: Bundle, tmp_path: Path) -> None:
    """A sparse file of a few bytes in the archive can have any size when it is read."""
    path = tmp_path / "one.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as out:
        out.addfile(make_member(f"{TOP}/x", pax_headers={"GNU.sparse.map": "0,0", "GNU.sparse.size": str(1 << 40)}))
    with pytest.raises(ExternalFailure):
        check_bundle(path)


# generated bundles

paths = st.lists(st.sampled_from(NAMES), min_size=1, max_size=5).map("/".join)
files = st.builds(
    BundledFile,
    path=st.one_of(paths, st.sampled_from([*CONTENT, "prepared/aaaa/bedplate.json", "prepared/aaaa/l"])),
    size_bytes=st.integers(-1, 20),
    link=st.one_of(st.none(), paths),
)
members = st.tuples(
    st.one_of(paths, paths.map(lambda path: f"{TOP}/{path}")),
    st.sampled_from([tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE]),
    st.one_of(paths, st.just("/"), st.just("../../precious")),
    st.binary(max_size=20),
)


@on_each_example
@given(
    listed=st.lists(files, max_size=6),
    added=st.lists(members, max_size=6),
    prepared=st.lists(st.one_of(paths, st.just("aaaa")), max_size=2),
    keep=st.booleans(),
)
@example(  # written outside, when links are resolved by their text
    listed=[
        BundledFile(path="a/b/l", link="../.."),
        BundledFile(path="d", link="a/b/l/.."),
        BundledFile(path="d/evil", size_bytes=1),
    ],
    added=[(f"{TOP}/d/evil", tarfile.REGTYPE, "", b"x")], prepared=[], keep=True,
)  # fmt: skip
@example(listed=[], added=[], prepared=["../../precious"], keep=True)
def test_generated_archive_changes_nothing_outside(
    listed: list[BundledFile],
    added: list[tuple[str, bytes, str, bytes]],
    prepared: list[str],
    keep: bool,
    manifest: Bundle,
) -> None:
    data = {name: content for name, _, _, content in added}
    described = [
        replace_fields(file, size_bytes=len(content), sha256=sha256(content).hexdigest())
        if (content := data.get(f"{TOP}/{file.path}")) is not None
        else file
        for file in listed
    ]
    kept = manifest.files if keep else ()
    plan = replace_fields(manifest.plan, model=replace_fields(manifest.plan.model, files=()))
    hostile = replace_fields(manifest, plan=plan, files=(*kept, *described), prepared=tuple(prepared))
    with Sandbox.create() as sandbox:
        path = write_archive(sandbox.root / "one.tar", hostile)
        with contextlib.suppress(ValueError), tarfile.open(path, "a") as out:
            for name, kind, link, content in added:
                out.addfile(make_typed_member(name, kind, link, content), io.BytesIO(content))
        with sandbox.unchanged("home/bundles", "home/prepared"):
            for read in (lambda: check_bundle(path), lambda: open_bundle(path).__enter__()):
                with contextlib.suppress(BedplateError):
                    read()
        for unpacked in (sandbox.home / "bundles").glob("*/**/*"):
            assert unpacked.resolve().is_relative_to((sandbox.home / "bundles").resolve())


def make_typed_member(name: str, kind: bytes, link: str, content: bytes) -> tarfile.TarInfo:
    return make_member(name, type=kind, linkname=link, size=len(content) if kind == tarfile.REGTYPE else 0)


def test_two_conversions_of_a_hostile_folder_stay_linked_inside(manifest: Bundle, sandbox: Sandbox) -> None:
    """A complete bundle with links still opens: the rules are not merely a refusal of everything."""
    root = sandbox.root / "bundle"
    write_conversion(root / "prepared", "aaaa", "folder")
    write_conversion(root / "prepared", "bbbb", "model", ("folder", "../aaaa/folder"))
    found = [path for path in sorted((root / "prepared").rglob("*")) if path.is_symlink() or path.is_file()]
    listed = (*manifest.files, *(describe_file(path, root) for path in found))
    write_folder(root, replace_fields(manifest, prepared=("bbbb", "aaaa"), files=listed))
    with sandbox.unchanged("home/prepared"), open_bundle(root):
        assert (get_prepared_dir() / "bbbb" / "folder").read_text() == "weights of aaaa"


def test_readme_and_start_script_contain_no_part_of_a_name(manifest: Bundle) -> None:
    evil = "a\nrm -rf /\x1b[2J`touch canary`"
    plan = replace_fields(manifest.plan, model=replace_fields(manifest.plan.model, name=evil))
    hostile = replace_fields(manifest, plan=plan)
    first, *_ = write_readme(hostile).splitlines()
    assert first == f"bedplate bundle: {escape_controls(evil)}, with llama.cpp {plan.engine_version}"
    assert len(write_readme(hostile).splitlines()) == len(write_readme(manifest).splitlines())
    script = write_serve_script(hostile, "pins.txt", "0", "wheels/$(touch canary).whl")
    assert "rm -rf /" not in script and "\"$here\"/'wheels/$(touch canary).whl'" in script


# install.py

ZSTANDARD = """
class ZstdError(Exception): pass
class ZstdDecompressor:
    def __init__(self, max_window_size): pass
    def stream_reader(self, source): return source
"""
"""A stand-in for zstandard that returns its input: the archives here are small and not compressed."""
FILES = {
    "engines/vllm/lib/x.py": b"x", "bedplate/lib/y.py": b"y", "model/weights.gguf": b"weights", "model/sub/z": b"z",
}  # fmt: skip


def write_target_bundle(folder: Path, archive: bytes, changes: Callable[[dict[str, Any]], object] = repr) -> Path:
    """Write a bundle for this machine; `changes` changes its manifest."""
    folder.mkdir(parents=True)
    (folder / "piece.000").write_bytes(archive)
    with zipfile.ZipFile(folder / "zstandard.zip", "w") as out:
        out.writestr("zstandard/__init__.py", ZSTANDARD)

    def describe(name: str) -> dict[str, Any]:
        data = (folder / name).read_bytes()
        return {"name": name, "size_bytes": len(data), "sha256": sha256(data).hexdigest()}

    own = sha256(describe("piece.000")["sha256"].encode()).hexdigest()[:10]
    engine = {
        "engine": "vllm", "name": "vLLM", "version": "0.26.0", "path": "engines/vllm",
        "place": f"engines/vllm/0.26.0-x-{own}", "packages": [], "environment": {"A": "b"}, "check": "pass",
        "libraries": [],
    }  # fmt: skip
    made = {
        "schema": "target-bundle/1", "id": own, "bedplate": "0.1.0", "made_at": "today", "engines": [engine],
        "target": {
            "name": "here", "system": "linux", "machine": os.uname().machine, "device": "cpu",
            "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        },
        "own_place": f"bundles/bedplate-0.1.0-{own}", "model": "weights",
        "model_place": "models/bundled/w/weights.gguf",
        "unpacked_bytes": sum(map(len, FILES.values())), "pieces": [describe("piece.000")],
        "decompressor": describe("zstandard.zip"),
    }  # fmt: skip
    changes(made)
    (folder / MANIFEST).write_text(json.dumps(made))
    return folder


def write_tar(*added: tuple[tarfile.TarInfo, bytes], files: dict[str, bytes] | None = None) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as out:
        for name, content in (FILES if files is None else files).items():
            out.addfile(make_member(name, size=len(content)), io.BytesIO(content))
        for info, content in added:
            out.addfile(info, io.BytesIO(content))
    return made.getvalue()


def run_installer(bundle: Path, home: Path, *options: str) -> int:
    """Run install.py here. The environments are not created: that takes seconds, and is no matter of paths."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(install, "__file__", str(bundle / "install.py"))
        patch.setattr(
            install, "make_environment", lambda tree, place, engine=None: tree.mkdir(parents=True, exist_ok=True)
        )
        patch.setattr(install, "compile_bytecode", lambda place, progress: None)
        patch.setattr(install, "register", lambda manifest, home, progress: [])
        patch.delitem(sys.modules, "zstandard", raising=False)
        code = install.main(["--home", str(home), "--json", *options])
        patch.delitem(sys.modules, "zstandard", raising=False)
        return code


def test_target_bundle_is_installed_and_installed_again(sandbox: Sandbox, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = write_target_bundle(sandbox.root / "bundle", write_tar())
    digest = sha256((bundle / MANIFEST).read_bytes()).hexdigest()
    own = json.loads((bundle / MANIFEST).read_text())["id"]
    with sandbox.unchanged(f"home/engines/vllm/0.26.0-x-{own}", "home/bundles", "home/models/bundled", "home/bin"):
        assert run_installer(bundle, sandbox.home, "--manifest-sha256", digest) == 0, capsys.readouterr().err
        assert (sandbox.home / "models/bundled/w/weights.gguf").read_bytes() == b"weights"
        assert (sandbox.home / "models/bundled/w/sub/z").read_bytes() == b"z"
        (sandbox.home / f"bundles/bedplate-0.1.0-{own}" / install.INSTALLED).unlink()
        (sandbox.home / f"bundles/bedplate-0.1.0-{own}" / install.INSTALLED).write_text("an interrupted update")
        assert run_installer(bundle, sandbox.home) == 0
    assert not list(sandbox.home.glob(".installing-*"))
    assert check_bundle(bundle, sha256=digest)


def set_field(*keys: str | int) -> Callable[[Any], Callable[[dict[str, Any]], None]]:
    def to(value: Any) -> Callable[[dict[str, Any]], None]:
        def change(made: dict[str, Any]) -> None:
            inner: Any = made
            for key in keys[:-1]:
                inner = inner[key]
            inner[keys[-1]] = value

        return change

    return to


FIELDS = {
    "place": set_field("engines", 0, "place"), "path": set_field("engines", 0, "path"),
    "engine": set_field("engines", 0, "engine"), "libraries": set_field("engines", 0, "libraries"),
    "environment": set_field("engines", 0, "environment"), "own_place": set_field("own_place"),
    "model_place": set_field("model_place"), "id": set_field("id"), "piece": set_field("pieces", 0, "name"),
    "decompressor": set_field("decompressor", "name"), "files": set_field("files"),
    "unpacked_bytes": set_field("unpacked_bytes"), "engines": set_field("engines"), "target": set_field("target"),
    "version": set_field("engines", 0, "version"), "python": set_field("target", "python"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("place", "../precious"), ("place", "."), ("place", ""), ("place", "/tmp"), ("place", "engines"),
        ("place", "engines/vllm"), ("place", "engines/vllm/0.26.0"), ("place", "engines/vllm/../../x"),
        ("own_place", "../precious"), ("own_place", "bundles/.."), ("own_place", "engines/vllm/0.26.0"),
        ("model_place", "../precious/x"), ("model_place", "models/mine"), ("model_place", "models/bundled/../mine"),
        ("model_place", "models/bundled/.."), ("model_place", "/etc/x.gguf"), ("model_place", "models/builtin"),
        ("path", "../../.."), ("path", "engines"), ("engine", "../x"), ("engine", "--help"), ("id", "0.26.0"),
        ("libraries", ["../../x.so"]), ("libraries", ["/tmp/x.so"]), ("environment", {"A\nimport os": "x"}),
        ("environment", {"A": 1}), ("piece", "../precious/kept.txt"), ("decompressor", "/tmp/z.zip"),
        ("files", [{"name": "../x", "size_bytes": 1, "sha256": 64 * "0"}]), ("unpacked_bytes", -1), ("engines", 3),
        ("engines", [3]), ("target", None), ("model_place", 7), ("place", None),
    ],
)  # fmt: skip
def test_installer_and_check_refuse_fields_that_leave_their_folders(
    field: str, value: Any, sandbox: Sandbox, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = write_target_bundle(sandbox.root / "bundle", write_tar(), FIELDS[field](value))
    with sandbox.unchanged():
        assert run_installer(bundle, sandbox.home) == 3
        assert "is not safe" in capsys.readouterr().err
        with pytest.raises(BedplateError):
            check_bundle(bundle)


def test_installer_removes_only_folders_that_a_bundle_installed(
    sandbox: Sandbox, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = write_target_bundle(sandbox.root / "bundle", write_tar())
    own = json.loads((bundle / MANIFEST).read_text())["id"]
    mine = sandbox.home / f"engines/vllm/0.26.0-x-{own}"
    mine.mkdir()
    (mine / "kept.txt").write_text("kept")
    with sandbox.unchanged():
        assert run_installer(bundle, sandbox.home) == 3
        assert "no bundle installed it" in capsys.readouterr().err
    mine.rename(sandbox.root / "elsewhere")
    mine.symlink_to(sandbox.root / "elsewhere")
    with sandbox.unchanged():
        assert run_installer(bundle, sandbox.home) == 3


def test_installer_keeps_the_builtin_model(sandbox: Sandbox) -> None:
    (sandbox.home / "models" / "builtin").mkdir()
    (sandbox.home / "models" / "builtin" / "weights.gguf").write_text("the real one")
    changes = set_field("model_place")("models/builtin/weights.gguf")
    bundle = write_target_bundle(sandbox.root / "bundle", write_tar(files={**FILES}), changes)
    assert run_installer(bundle, sandbox.home) == 0
    assert (sandbox.home / "models" / "builtin" / "weights.gguf").read_text() == "the real one"


def test_installer_refuses_another_manifest_and_a_changed_installer(
    sandbox: Sandbox, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = write_target_bundle(sandbox.root / "bundle", write_tar())
    assert run_installer(bundle, sandbox.home, "--check", "--manifest-sha256", 64 * "0") == 3
    assert "not the one that --manifest-sha256 names" in capsys.readouterr().err
    listed = [{"name": "install.py", "size_bytes": 1, "sha256": sha256(b"a").hexdigest()}]
    bundle = write_target_bundle(sandbox.root / "other", write_tar(), set_field("files")(listed))
    (bundle / "install.py").write_text("b")
    assert run_installer(bundle, sandbox.home, "--check") == 3
    assert "install.py is damaged" in capsys.readouterr().err
    (bundle / "extra").write_text("")
    with pytest.raises(ExternalFailure) as caught:
        check_bundle(bundle)
    assert "extra is not in the manifest" in str(caught.value.cause) and "install.py has" in str(caught.value.cause)


HOSTILE_MEMBERS = {
    "parent": make_member("engines/../../x"),
    "absolute": make_member("/tmp/x"),
    "another folder": make_member("bin/x"),
    "no folder": make_member("engines"),
    "symlink": make_member("model/l", type=tarfile.SYMTYPE, linkname="/"),
    "hard link": make_member("model/l", type=tarfile.LNKTYPE, linkname="model/weights.gguf"),
    "folder": make_member("model/sub", type=tarfile.DIRTYPE),
    "device": make_member("model/d", type=tarfile.CHRTYPE),
    "twice": make_member("model/weights.gguf"),
    "below a file": make_member("model/weights.gguf/x"),
    "too large": make_member("model/x", size=1),
    "escape": make_member("model/\x1b[2J"),
    "sparse": make_member("model/s", pax_headers={"GNU.sparse.map": "0,0", "GNU.sparse.size": "9"}),
    "long header": make_member("model/s", pax_headers={"comment": "x" * (3 << 20)}),
}


@pytest.mark.parametrize("name", HOSTILE_MEMBERS)
def test_installer_extracts_only_plain_files_of_the_declared_size(
    name: str, sandbox: Sandbox, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = write_tar((HOSTILE_MEMBERS[name], b"x"))
    bundle = write_target_bundle(sandbox.root / "bundle", archive)
    with sandbox.unchanged():
        assert run_installer(bundle, sandbox.home) == 3, capsys.readouterr()


def test_installer_masks_modes(sandbox: Sandbox) -> None:
    archive = write_tar((make_member("model/s", mode=0o6755), b""))
    bundle = write_target_bundle(sandbox.root / "bundle", archive)
    assert run_installer(bundle, sandbox.home) == 0
    assert (sandbox.home / "models/bundled/w/s").stat().st_mode & 0o7777 == 0o755


def test_stream_of_zeros_does_not_fill_the_disk() -> None:
    class Zeros(io.RawIOBase):
        def read(self, size: int = -1) -> bytes:
            return bytes(size)

    stream = install.LimitedReader(Zeros())
    stream.allow(100)
    assert len(stream.read(100)) == 100
    with pytest.raises(ValueError, match="more data than it declares"):
        for _ in range(10_000):
            stream.read(10_240)


def test_decompressor_has_no_other_files(sandbox: Sandbox, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = write_target_bundle(sandbox.root / "bundle", write_tar())
    with zipfile.ZipFile(bundle / "zstandard.zip", "a") as out:
        out.writestr("../../precious/x", "x")
    data = (bundle / "zstandard.zip").read_bytes()
    made = json.loads((bundle / MANIFEST).read_text())
    made["decompressor"] |= {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (bundle / MANIFEST).write_text(json.dumps(made))
    with sandbox.unchanged():
        assert run_installer(bundle, sandbox.home) == 3
        assert "has another file" in capsys.readouterr().err


@pytest.mark.parametrize("home", ["it's", "a\\b", "a\nb"])
def test_installer_refuses_a_home_that_scripts_cannot_name(home: str, sandbox: Sandbox) -> None:
    bundle = write_target_bundle(sandbox.root / "bundle", write_tar())
    with sandbox.unchanged():
        assert run_installer(bundle, sandbox.home / home) == 2


values = st.one_of(
    paths,
    paths.map(lambda path: f"engines/vllm/{path}"),
    paths.map(lambda path: f"models/bundled/{path}"),
    st.none(),
    st.integers(),
    st.lists(paths, max_size=2),
    st.dictionaries(paths, paths, max_size=2),
)
hostile_members = st.tuples(
    st.one_of(paths, st.builds("{}/{}".format, st.sampled_from(install.TREES), paths)),
    st.sampled_from([tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE]),
    st.one_of(paths, st.just("/"), st.just("../../precious")),
    st.binary(max_size=5),
)  # fmt: skip


@on_each_example
@given(
    changes=st.lists(st.tuples(st.sampled_from(sorted(FIELDS)), values), max_size=3),
    added=st.lists(hostile_members, max_size=4),
    flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 7)), max_size=2),
)
@example(changes=[("place", "../precious")], added=[], flips=[])
@example(
    changes=[], added=[("model/l", tarfile.SYMTYPE, "../../precious", b""), ("model/l/x", b"0", "", b"x")], flips=[]
)
def test_generated_target_bundle_changes_nothing_outside(
    changes: list[tuple[str, Any]],
    added: list[tuple[str, bytes, str, bytes]],
    flips: list[tuple[float, int]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    try:
        archive = bytearray(write_tar(*((make_typed_member(*one), one[3]) for one in added)))
    except ValueError:
        return
    for where, bit in flips:
        archive[int(where * len(archive))] ^= 1 << bit

    def change(made: dict[str, Any]) -> None:
        for field, value in changes:
            with contextlib.suppress(KeyError, TypeError, IndexError):
                FIELDS[field](value)(made)

    with Sandbox.create() as sandbox:
        bundle = write_target_bundle(sandbox.root / "bundle", bytes(archive), change)
        places = ("home/engines/vllm/", "home/bundles", "home/models/builtin", "home/models/bundled", "home/bin")
        with sandbox.unchanged(*places):
            assert run_installer(bundle, sandbox.home) in (0, 1, 3)
            with contextlib.suppress(BedplateError):
                check_bundle(bundle)
        for place in OUTSIDE:
            assert (sandbox.root / place / "kept.txt").read_text() == "kept"
    shown = capsys.readouterr()
    assert (shown.out + shown.err).replace("\n", "").isprintable()
