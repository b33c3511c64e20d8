"""The store returns what was added, and rejects other files without changing them."""

from __future__ import annotations

import concurrent.futures
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import HANG_S

from bedplate import store
from bedplate.errors import ExternalFailure
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.values import replace_fields
from bedplate.values.result import Result


def make_result(
    engine: str = "vllm", at: str = "2026-11-01T10:00:00Z", machine: str = "m1", model: str = "a model"
) -> Result:
    return Result(
        at=at, machine=machine, engine=engine, model=model, quantization="FP8", concurrency=8, prompt_tokens=512,
        output_tokens=256, ttft_ms=90.5, tpot_ms=11.25, output_tok_s=700.0, quality=1.0,
    )  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "store.sqlite"


def test_results_are_returned_newest_first(path: Path) -> None:
    older, newer = make_result(at="2026-11-01T10:00:00Z"), make_result("sglang", at="2026-11-02T10:00:00Z")
    store.add_result(newer, path)
    store.add_result(older, path)
    assert store.read_results("m1", path=path) == (newer, older)


def test_results_are_filtered_by_machine_and_model(path: Path) -> None:
    mine, other = make_result(), make_result(machine="m2")
    third = make_result(model="another model")
    for one in (mine, other, third):
        store.add_result(one, path)
    assert store.read_results("m2", path=path) == (other,)
    assert store.read_results("m1", "a model", path) == (mine,)
    assert store.read_results("m1", "nobody's", path) == ()


def test_reading_creates_no_file(path: Path) -> None:
    assert store.read_results("m1", path=path) == ()
    assert not path.parent.exists()


def test_the_store_is_under_bedplate_home(bedplate_home: Path) -> None:
    assert store.get_store_path().parent == bedplate_home


def test_a_store_of_a_newer_bedplate_is_rejected_unchanged(path: Path) -> None:
    store.add_result(make_result(), path)
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version={store.VERSION + 1}")
    connection.close()
    for use in (lambda: store.read_results("m1", path=path), lambda: store.add_result(make_result(), path)):
        with pytest.raises(ExternalFailure, match="newer bedplate") as refused:
            use()
        assert refused.value.hint and refused.value.exit_code == 3
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT count(*) FROM results").fetchone() == (1,)
    connection.close()


@pytest.mark.parametrize("content", [b"not a database at all" * 100, b"SQLite format 3\x00" + b"\xff" * 500])
def test_a_corrupt_file_is_reported(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    for use in (lambda: store.read_results("m1", path=path), lambda: store.add_result(make_result(), path)):
        with pytest.raises(ExternalFailure) as failed:
            use()
        assert str(path) in failed.value.message and failed.value.cause and failed.value.hint
    assert path.read_bytes() == content


def test_a_truncated_file_is_reported(path: Path) -> None:
    for number in range(20):
        store.add_result(make_result(at=f"2026-11-01T10:00:{number:02}Z", model="a long name " * 500), path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ExternalFailure):
        store.read_results("m1", path=path)


def test_an_unreadable_row_raises_an_external_failure(path: Path) -> None:
    store.add_result(make_result(), path)
    with sqlite3.connect(path) as connection:
        connection.execute('UPDATE results SET body = \'{"schema": "result/99"}\'')
    connection.close()
    with pytest.raises(ExternalFailure) as failed:
        store.read_results("m1", path=path)
    assert failed.value.hint


def test_a_folder_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(ExternalFailure):
        store.add_result(make_result(), blocker / "store.sqlite")


@pytest.mark.parametrize("attempt", range(8))
def test_several_threads_create_a_store_and_write_concurrently(path: Path, attempt: int) -> None:
    """A race to create the tables failed once in a few dozen runs."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: store.add_result(make_result(model=f"model {number}"), path), range(40)))
    assert {one.model for one in store.read_results("m1", path=path)} == {f"model {number}" for number in range(40)}


def test_several_processes_write_concurrently(path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from bedplate import store; from bedplate.values.result import Result\n"
        "for n in range(10):\n"
        "    store.add_result(Result(at=f'2026-11-0{sys.argv[2]}T10:00:{n:02}Z', machine='m1', engine='vllm',\n"
        "                     model='x', concurrency=1, prompt_tokens=1, output_tokens=1), Path(sys.argv[1]))\n"
    )
    children = [subprocess.Popen([sys.executable, "-c", program, str(path), str(number)]) for number in range(1, 5)]
    assert [child.wait(HANG_S) for child in children] == [0] * 4
    assert len(store.read_results("m1", path=path)) == 40


class TestFingerprint:
    def test_relevant_hardware_changes_the_fingerprint(self) -> None:
        machines = [
            {"accelerator": "H100 SXM", "count": 8, "ram_gb": 2048},
            {"accelerator": "H100 SXM", "count": 4, "ram_gb": 2048},
            {"accelerator": "H200 SXM", "count": 8, "ram_gb": 2048},
            {"accelerator": "H100 SXM", "count": 8, "ram_gb": 1024},
            {"accelerator": "H100 SXM", "count": 8, "ram_gb": 2048, "cores": 17},
            {"cpu": "AMD Ryzen 7 7840U", "cores": 8, "ram_gb": 16},
            {"cpu": "AMD Ryzen 7 7840U", "cores": 8, "ram_gb": 16, "os": "windows"},
        ]
        assert len({store.compute_fingerprint(make_simulated_hardware(described)) for described in machines}) == len(
            machines
        )

    def test_free_memory_and_similar_do_not_change_the_fingerprint(self) -> None:
        machine = make_simulated_hardware({"accelerator": "H100 SXM", "count": 2, "ram_gb": 512})
        busy = replace_fields(
            machine,
            memory=replace_fields(machine.memory, available_bytes=machine.memory.available_bytes // 3),
            accelerators=tuple(
                replace_fields(card, free_bytes=1, driver_version="999") for card in machine.accelerators
            ),
            notes=("a note",),
        )
        assert store.compute_fingerprint(busy) == store.compute_fingerprint(machine)
