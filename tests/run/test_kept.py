"""Prepared weights are listed with size and last use, marked as stale, and never removed while in use."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.conftest import wait_for

from bedplate.engines import Engine
from bedplate.errors import ExternalFailure, UsageError
from bedplate.run import prepare as prepare_module
from bedplate.run import prepared_weights as module
from bedplate.run.prepare import PreparationRecord, get_prepared_dir, hash_identity
from bedplate.run.prepared_weights import list_prepared, remove_prepared, select_prepared


class Maker(Engine):
    id = "maker"
    name = "Maker"
    version = "1"


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(module, "engine_by_id", {"maker": Maker()}.__getitem__)
    return tmp_path / "home"


def put(
    name: str, *, engine: Engine | None = None, used: float = 1000.0, data: bytes = b"12345", **more: object
) -> Path:
    folder = get_prepared_dir() / name
    folder.mkdir(parents=True)
    (folder / "model").write_bytes(data)
    given = {"what": f"{name} to 4 bits", "argv": ["make"], "engine": "maker", "version": "1", "disk_bytes": len(data)}
    made = {
        "seconds": 1.0,
        "identity": hash_identity(engine or Maker(), ["make"]),
        "made_at": "2026-11-15T08:00:00+00:00",
    }
    record = msgspec.convert({**given, **made, **more}, PreparationRecord)
    (folder / prepare_module.MANIFEST).write_bytes(msgspec.json.encode(record))
    os.utime(folder / prepare_module.MANIFEST, (used, used))
    return folder


HOLD = """
import sys
from pathlib import Path
from bedplate.run.prepare import hold
hold(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def held() -> Iterator[object]:
    """Another process uses a folder until the test ends or releases it."""
    running: list[subprocess.Popen[str]] = []

    def start(folder: Path) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        running.append(process)
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


class TestListed:
    def test_lists_nothing_without_prepared_weights(self) -> None:
        assert list_prepared() == []

    def test_lists_most_recently_used_first_with_size_and_engine(self) -> None:
        put("a" * 20, used=1000.0)
        put("b" * 20, used=2000.0, data=b"1234567", model="M", checked=["token ids: all"])
        last, first = list_prepared()
        assert (last.id, last.engine, last.model, last.checked) == ("b" * 20, "maker", "M", ("token ids: all",))
        assert last.disk_bytes > first.disk_bytes > 5
        assert last.used_at == "1970-01-01T00:33:20+00:00" and not last.in_use and last.stale is None

    def test_size_excludes_link_targets(self) -> None:
        big = put("a" * 20, data=b"x" * 100_000)
        small = put("b" * 20)
        (small / "source").symlink_to(Path("..") / big.name / "model")
        sizes = {one.id: one.disk_bytes for one in list_prepared()}
        assert sizes["b" * 20] < 1000 < sizes["a" * 20]

    def test_ignores_unknown_files(self, own_home: Path) -> None:
        put("a" * 20)
        (get_prepared_dir() / "hashes").mkdir()
        (get_prepared_dir() / "a file").write_text("x")
        (get_prepared_dir() / "c").mkdir()
        broken = put("d" * 20)
        (broken / prepare_module.MANIFEST).write_bytes(b"{")
        found = {one.id: one.stale for one in list_prepared()}
        assert found == {"a" * 20: None, "c": "it is incomplete", "d" * 20: "it is incomplete"}


class TestStale:
    def test_stale_if_created_by_another_engine_version(self) -> None:
        class Older(Maker):
            version = "0"

        put("a" * 20, engine=Older())
        put("b" * 20)
        put("c" * 20, identity="")
        found = {one.id[0]: bool(one.stale) for one in list_prepared()}
        assert found == {"a": True, "b": False, "c": True}

    def test_stale_if_compiled_for_a_removed_environment(self, tmp_path: Path) -> None:
        put("a" * 20, built_for=[str(tmp_path / "gone" / "python"), "9.0"])
        put("b" * 20, built_for=[sys.executable, "9.0"])
        found = {one.id[0]: (one.stale, one.built_for[-1]) for one in list_prepared()}
        assert found == {"a": ("the environment that it was compiled for was removed", "9.0"), "b": (None, "9.0")}

    def test_stale_if_left_by_a_killed_conversion(self) -> None:
        put("a" * 20)
        rest = get_prepared_dir() / f".making-{'e' * 20}-xyz"
        rest.mkdir()
        (rest / "half").write_bytes(b"x" * 10)
        (found,) = [one for one in list_prepared() if one.stale]
        assert found.id == f"{'e' * 20}-xyz" and found.disk_bytes == 10
        gone, stay = remove_prepared(select_prepared([], stale=True))
        assert [one.id for one in gone] == [found.id] and not stay and not rest.exists()


class TestRemoved:
    def test_removes_by_prefix_of_the_id(self) -> None:
        one, other = put("a" * 20), put("b" * 20)
        assert [found.id for found in remove_prepared(select_prepared(["aaa"]))[0]] == ["a" * 20]
        assert not one.exists() and other.exists()

    @pytest.mark.parametrize("wanted", ["x", "a"])
    def test_unknown_or_ambiguous_id_is_a_usage_error(self, wanted: str) -> None:
        put("a" * 20)
        put("a1" * 10)
        with pytest.raises(UsageError, match=f"starts with {wanted}"):
            select_prepared([wanted])

    def test_does_not_remove_weights_in_use(self, held: object) -> None:
        used, idle = put("a" * 20), put("b" * 20)
        process = held(used)  # type: ignore[operator]
        assert {one.id[0]: one.in_use for one in list_prepared()} == {"a": True, "b": False}
        assert [one.id[0] for one in select_prepared([], unused=True)] == ["b"]
        gone, stay = remove_prepared(list_prepared())
        assert [one.id[0] for one in gone] == ["b"] and [one.id[0] for one in stay] == ["a"]
        assert (used / "model").exists() and not idle.exists()
        process.kill()
        process.communicate()
        wait_for(lambda: not list_prepared()[0].in_use or None, "the mark to go with its process")
        assert remove_prepared(list_prepared())[1] == [] and not used.exists()

    def test_does_not_remove_running_conversion(self) -> None:
        from filelock import FileLock

        folder = put("a" * 20)
        with FileLock(f"{folder}.lock"):
            (one,) = list_prepared()
            assert one.in_use
        assert not list_prepared()[0].in_use

    def test_reports_folder_that_cannot_be_removed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        put("a" * 20)

        def refuse(folder: Path) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr("bedplate.run.prepared_weights.shutil.rmtree", refuse)
        with pytest.raises(ExternalFailure, match="cannot write"):
            remove_prepared(list_prepared())
