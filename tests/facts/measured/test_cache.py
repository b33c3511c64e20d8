"""Measurements are stored for each machine and driver."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from bedplate.errors import ExternalFailure
from bedplate.facts.measured import apply_stored
from bedplate.facts.measured.cache import MOST_ENTRIES, get_cache_path, identify_machine, recall, remember
from bedplate.values import Hardware, from_json, replace_fields, to_json
from bedplate.values.measurements import MeasuredMachine, Measurements

from .samples import HARDWARE, MEASURED


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def make_other_card(driver: str) -> Hardware:
    cards = tuple(replace_fields(card, driver_version=driver) for card in HARDWARE.accelerators)
    return replace_fields(HARDWARE, accelerators=cards)


def test_measurements_survive_json() -> None:
    assert from_json(Measurements, to_json(MEASURED)) == MEASURED


def test_stored_measurements_are_added_to_a_probe(own_home: Path) -> None:
    assert apply_stored(HARDWARE) == HARDWARE, "nothing was measured yet"
    assert not own_home.exists(), "looking leaves no trace"
    assert remember(MEASURED) == own_home / "measured.json"
    found = apply_stored(HARDWARE)
    assert found.measured == MEASURED
    assert found.memory.bandwidth_bytes_s is not None and found.memory.bandwidth_bytes_s.value == 20e9
    assert sorted(path.name for path in own_home.iterdir()) in (
        ["measured.json"],
        ["measured.json", "measured.json.lock"],
    )


@pytest.mark.parametrize(
    "other",
    [
        make_other_card("581.0"),
        replace_fields(HARDWARE, accelerators=HARDWARE.accelerators[:1]),
        replace_fields(HARDWARE, cpu=replace_fields(HARDWARE.cpu, name="EPYC")),
        replace_fields(HARDWARE, cpu=replace_fields(HARDWARE.cpu, allowed_cores=1.5)),
        replace_fields(HARDWARE, os="macos"),
    ],
    ids=["driver", "a card less", "cpu", "quota", "os"],
)
def test_another_machine_or_driver_has_no_measurements(other: Hardware) -> None:
    remember(MEASURED)
    assert apply_stored(other) == other


def test_another_kernel_has_no_measurements() -> None:
    remember(MEASURED)
    assert recall(identify_machine(HARDWARE, kernel="0.1")) is None
    assert recall(identify_machine(HARDWARE)) == MEASURED


def test_free_memory_does_not_identify_a_machine() -> None:
    busy = replace_fields(HARDWARE, memory=replace_fields(HARDWARE.memory, available_bytes=1))
    assert identify_machine(busy) == identify_machine(HARDWARE)


def test_machines_that_share_a_folder_keep_their_own_figures() -> None:
    other = replace_fields(MEASURED, machine=identify_machine(make_other_card("581.0")), took_s=9.0)
    remember(MEASURED)
    remember(other)
    newer = replace_fields(MEASURED, took_s=1.0)
    remember(newer)
    assert recall(MEASURED.machine) == newer and recall(other.machine) == other


def test_the_oldest_entries_are_removed() -> None:
    def machine(number: int) -> MeasuredMachine:
        return replace_fields(MEASURED.machine, kernel=str(number))

    for number in range(MOST_ENTRIES + 2):
        remember(replace_fields(MEASURED, machine=machine(number)))
    assert recall(machine(1)) is None and recall(machine(2)) is not None


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"entries": [{"when": 3}]}', '{"entries": 1}', "\x00\xff" * 100]
)
def test_an_unreadable_file_is_ignored_and_replaced(text: str) -> None:
    get_cache_path().parent.mkdir(parents=True)
    get_cache_path().write_text(text, encoding="latin-1")
    assert apply_stored(HARDWARE) == HARDWARE
    remember(MEASURED)
    assert recall(MEASURED.machine) == MEASURED


def test_readers_see_a_whole_file_while_it_is_written() -> None:
    remember(MEASURED)
    stop = threading.Event()
    missing: list[int] = []

    def read() -> None:
        while not stop.is_set():
            if recall(MEASURED.machine) is None:
                missing.append(1)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(30):
        remember(replace_fields(MEASURED, took_s=float(number)))
    stop.set()
    reader.join()
    assert not missing


def test_an_unwritable_folder_is_reported(own_home: Path) -> None:
    own_home.parent.mkdir(exist_ok=True)
    own_home.write_text("a file, not a folder")
    with pytest.raises(ExternalFailure, match="cannot write"):
        remember(MEASURED)


def test_a_failed_write_leaves_the_old_file(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remember(MEASURED)
    before = sorted(own_home.iterdir())

    def fails(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(ExternalFailure):
        remember(replace_fields(MEASURED, took_s=1.0))
    assert sorted(own_home.iterdir()) == before and recall(MEASURED.machine) == MEASURED
