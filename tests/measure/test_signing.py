"""Signed results: what an export contains, and what invalidates a signature."""

from __future__ import annotations

import base64
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.runs import make_cell, make_run

from bedplate import store
from bedplate.errors import ExternalFailure, NotPossible, UsageError
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.measure.exported_run import export_run
from bedplate.measure.results import read_result
from bedplate.measure.signing import (
    SMALL_ORDER,
    compute_key_id,
    get_key_path,
    load_key,
    sign_result,
    verify_document,
)
from bedplate.measure.stored import find_cells
from bedplate.values import Settings, from_json, replace_fields, to_json
from bedplate.values.run import Run
from bedplate.values.signed_result import SignedResult

HARDWARE = make_simulated_hardware({"cpu": "Intel Xeon", "cores": 2, "ram_gb": 24})


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def make_local_run() -> Run:
    machine = store.compute_fingerprint(HARDWARE)
    run = make_run([replace_fields(make_cell("llama.cpp", 4, 80.0), machine=machine)])
    return replace_fields(run, environment=replace_fields(run.environment, machine=machine))


def sign() -> str:
    return sign_result(export_run(make_local_run(), HARDWARE), load_key())


def test_an_export_is_self_contained() -> None:
    run = make_local_run()
    found = export_run(run, HARDWARE)
    assert found.hardware == HARDWARE and found.run == run and found.bedplate
    (lock,) = found.locks
    assert lock.engine == "llama.cpp" and (lock.lock_sha256 or lock.reason)
    assert from_json(SignedResult, to_json(found)) == found


def test_the_lock_hash_is_that_of_the_installed_version() -> None:
    from bedplate.engines import get_engine

    version = get_engine("llama.cpp").version
    run = make_local_run()
    cells = tuple(
        replace_fields(cell, subject=replace_fields(cell.subject, engine_version=version)) for cell in run.cells
    )
    (lock,) = export_run(replace_fields(run, cells=cells), HARDWARE).locks
    assert lock.engine_version == version and (lock.lock_sha256 is None) == bool(lock.reason)
    if lock.lock_sha256 is not None:
        assert len(lock.lock_sha256) == 64
    native = replace_fields(cells[0], subject=replace_fields(cells[0].subject, build="native"))
    assert export_run(replace_fields(run, cells=(native,)), HARDWARE).locks[0].reason == "native build"


def test_a_run_of_another_machine_has_no_hardware_of_this_one() -> None:
    found = export_run(make_run([make_cell("llama.cpp", 4, 80.0)]), HARDWARE)
    assert found.hardware is None and found.locks == () and found.run.environment.hardware == "a made-up machine"


def test_paths_of_the_user_are_shortened(home: Path) -> None:
    run = make_local_run()
    argv = (f"{home}/engines/llama/bin/server", f"--model={home}/models/a.gguf", f"{Path.home()}/b.gguf")
    settings = Settings(slots=16, context_tokens=2048)
    subject = replace_fields(run.cells[0].subject, argv=argv, settings=settings)
    found = export_run(replace_fields(run, cells=(replace_fields(run.cells[0], subject=subject),)), HARDWARE)
    assert found.run.cells[0].subject.argv == (
        "$BEDPLATE_HOME/engines/llama/bin/server", "--model=$BEDPLATE_HOME/models/a.gguf", "~/b.gguf",
    )  # fmt: skip
    assert str(home) not in to_json(found)


def test_a_signed_result_is_valid_and_names_its_key() -> None:
    text = sign()
    found = verify_document(text.encode(), "a.json")
    assert found.is_valid and found.run == "made" and found.key_id == compute_key_id(found.public_key or "")
    assert verify_document(sign().encode(), "b.json").public_key == found.public_key, "the key is kept"
    assert get_key_path().stat().st_mode & 0o077 == 0
    again = json.dumps(dict(reversed(json.loads(text).items())), indent=7)
    assert verify_document(again.encode(), "c.json").is_valid, "layout and order of keys do not count"
    assert verify_document(text.encode(), "a.json", found.public_key).is_valid
    other = verify_document(text.encode(), "a.json", base64.b64encode(bytes(32)).decode())
    assert not other.is_valid and "another key" in (other.reason or "")


def change_sample(document: dict[str, Any]) -> None:
    document["run"]["cells"][0]["repeats"][0]["samples"][0]["ttft_ms"] *= 0.5


def remove_flags(document: dict[str, Any]) -> None:
    document["run"]["cells"][0]["repeats"][0]["use"]["peak_memory_bytes"] = 1


def change_hardware(document: dict[str, Any]) -> None:
    document["hardware"]["cpu"]["name"] = "another"


def add_key(document: dict[str, Any]) -> None:
    document["later"] = 1


def replace_signature(document: dict[str, Any]) -> None:
    document["signature"]["signature"] = base64.b64encode(bytes(64)).decode()


def replace_public_key(document: dict[str, Any]) -> None:
    document["signature"]["public_key"] = base64.b64encode(bytes(32)).decode()


def shorten_public_key(document: dict[str, Any]) -> None:
    document["signature"]["public_key"] = "AAAA"


def remove_signature(document: dict[str, Any]) -> None:
    document["signature"] = None


@pytest.mark.parametrize(
    "change",
    [change_sample, remove_flags, change_hardware, add_key, replace_signature, replace_public_key, shorten_public_key,
     remove_signature],
)  # fmt: skip
def test_any_change_invalidates_the_signature(change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads(sign())
    change(document)
    found = verify_document(json.dumps(document).encode(), "a.json")
    assert not found.is_valid and found.reason


@pytest.mark.parametrize("number", range(24))
def test_every_kind_of_value_is_covered_by_the_signature(number: int) -> None:
    """Changes of leaves and keys all over the document."""
    document = json.loads(sign())
    rng = random.Random(number)
    place: Any = document
    while True:
        keys = [key for key in (place if isinstance(place, dict) else range(len(place))) if key != "signature"]
        key = rng.choice(keys)
        if not isinstance(place[key], dict | list) or not place[key]:
            break
        place = place[key]
    value = place[key]
    place[key] = value + 1 if isinstance(value, int | float) and not isinstance(value, bool) else [value]
    assert not verify_document(json.dumps(document).encode(), "a.json").is_valid, key


def test_a_repeated_key_is_not_valid() -> None:
    """A reader that takes the first of two values would see another one than was signed."""
    text = sign()
    assert text.startswith("{")
    for twice in ('{"run": {"id": "other"},' + text[1:], text.replace('"model":', '"model": "other", "model":', 1)):
        found = verify_document(twice.encode(), "a.json")
        assert not found.is_valid and "occurs twice" in (found.reason or "")


DEEP = "[" * 100_000


@pytest.mark.parametrize("content", [DEEP, '{"a": ' + DEEP, '{"schema": "signed-result/1", "at": NaN}', "\ufeff{}"])
def test_what_is_not_json_is_not_valid(content: str, tmp_path: Path) -> None:
    found = verify_document(content.encode(), "a.json")
    assert not found.is_valid and found.reason == "it is not JSON"
    path = tmp_path / "a.json"
    path.write_text(content)
    for read in (read_result, lambda path: find_cells(str(path))):
        with pytest.raises(UsageError, match="is not JSON"):
            read(path)


@pytest.mark.parametrize("y", sorted(SMALL_ORDER))
@pytest.mark.parametrize("sign_bit", [0, 2**255])
def test_a_key_that_fits_any_file_is_not_valid(y: int, sign_bit: int) -> None:
    document = json.loads(sign())
    neutral = (1).to_bytes(32, "little") + bytes(32)
    document["signature"] |= {
        "public_key": base64.b64encode((y + sign_bit).to_bytes(32, "little")).decode(),
        "signature": base64.b64encode(neutral).decode(),
    }
    for run in ("made", "other"):
        document["run"]["id"] = run
        assert not verify_document(json.dumps(document).encode(), "a.json").is_valid


def test_another_spelling_of_the_key_is_the_same_key() -> None:
    document = json.loads(sign())
    key = document["signature"]["public_key"]
    assert key.endswith("=")
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    document["signature"]["public_key"] = key[:-2] + letters[letters.index(key[-2]) + 1] + "="
    found = verify_document(json.dumps(document).encode(), "a.json", key)
    assert found.is_valid and found.public_key == key


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"schema": "run/1"}', b"\xff", b'{"schema": "signed-result/1"}'])
def test_other_files_are_not_valid(data: bytes) -> None:
    assert not verify_document(data, "a.json").is_valid


def test_a_key_of_the_user_is_used(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    path = tmp_path / "key.pem"
    own = ed25519.Ed25519PrivateKey.generate()
    path.write_bytes(own.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    text = sign_result(export_run(make_local_run(), HARDWARE), load_key(path))
    public = base64.b64encode(own.public_key().public_bytes_raw()).decode()
    assert verify_document(text.encode(), "a.json").public_key == public and not get_key_path().exists()
    other = ec.generate_private_key(ec.SECP256R1()).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    for content in (other, b"nonsense"):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=r"key\.pem is not"):
            load_key(path)
    with pytest.raises(UsageError, match="cannot read the key"):
        load_key(tmp_path / "none.pem")


def test_without_cryptography_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    path.write_text(sign())
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ExternalFailure, match="cryptography") as caught:
        load_key()
    assert caught.value.hint == 'install it: pip install "bedplate[sign]"'
    assert read_result(path).is_verified is False, "it is shown, and not ranked"
    with pytest.raises(ExternalFailure):
        read_result(path, require_valid=True)


def test_a_changed_result_is_not_imported(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(sign())
    assert read_result(path, require_valid=True).is_verified
    document = json.loads(path.read_text())
    change_sample(document)
    path.write_text(json.dumps(document))
    with pytest.raises(NotPossible, match="is not read"):
        read_result(path, require_valid=True)
    found = read_result(path)
    assert not found.is_verified and "was changed" in (found.reason or "")
