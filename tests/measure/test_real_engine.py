"""The real llama.cpp with the real model passes the check, and fails with a wrong rotary base."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.conftest import Served, share_installed, wait_for
from tests.measure.samples_of_agreement import make_plan

from bedplate import store
from bedplate.facts.hardware import probe
from bedplate.measure.agreement import ask, choose_quick_prefixes, compare, record_agreement
from bedplate.measure.reference import read_shipped_references
from bedplate.run.builtin import FILE_SHA256, read_builtin_facts
from bedplate.values.agreement import Agreement

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("one_core")]
KEY = b"llama.rope.freq_base"
FLOAT32 = 6
"""The number of this type in a GGUF header."""


def test_serve_checks_answers_once_and_stores_the_result(
    serve: Callable[..., Served], tmp_path: Path, bedplate_home: Path
) -> None:
    share_installed(tmp_path, bedplate_home)
    first = serve("--check", env={"BEDPLATE_HOME": str(tmp_path)})
    wait_for(lambda: "the float32 reference: 4" in "".join(first.stderr), "the answers to be checked")
    path = tmp_path / "store.sqlite"
    (found,) = wait_for(lambda: read_store(path), "the result to be stored")
    assert found.verdict == "ok" and found.answered == 48 and found.agreed >= 46
    assert first.stop() == 0
    again = serve("--check", env={"BEDPLATE_HOME": str(tmp_path)})
    assert again.stop() == 0 and "the float32 reference" not in "".join(again.stderr)
    assert len(read_store(path)) == 1


def read_store(path: Path) -> tuple[Agreement, ...]:
    return store.read_agreements(store.compute_fingerprint(probe()), read_builtin_facts().name, path)


def test_detects_a_wrong_rotary_base(serve: Callable[..., Served], builtin_gguf: Path, tmp_path: Path) -> None:
    """With the rotary base of many other models, answers to short texts hardly change."""
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(with_rope_base(builtin_gguf.read_bytes(), 10_000.0))
    served = serve(str(broken))
    (reference,) = [one for one in read_shipped_references() if one.sha256 == FILE_SHA256]
    pairs = choose_quick_prefixes(reference.list_known())
    replies = asyncio.run(ask(served.root, pairs, model=served.endpoint["model"]))
    found = record_agreement(make_plan(), reference, compare(pairs, replies), at="2026-11-15T10:00:00Z", machine="m1")
    assert found.verdict == "broken" and found.answered == len(pairs) and found.evidence


def with_rope_base(file: bytes, base: float) -> bytes:
    """The same file with another rotary base: it loads, and its answers to long texts are wrong."""
    at = file.index(KEY) + len(KEY)
    kind, before = struct.unpack_from("<If", file, at)
    assert kind == FLOAT32 and before == 100_000.0
    return file[: at + 4] + struct.pack("<f", base) + file[at + 8 :]
