"""Headers of safetensors files: valid ones are read, and malicious ones are rejected quickly."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bedplate.errors import UsageError
from bedplate.facts import safetensors
from bedplate.facts.safetensors import MAX_HEADER_BYTES, parse_header, parse_header_length, parse_index, read_header


def encode_header(tensors: dict[str, Any]) -> bytes:
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text


def make_entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def write(path: Path, tensors: dict[str, Any], size: int) -> Path:
    path.write_bytes(encode_header(tensors) + b"\0" * size)
    return path


def test_names_types_and_sizes_are_read(tmp_path: Path) -> None:
    tensors = {
        "__metadata__": {"format": "pt"},
        "a": make_entry("BF16", [2, 3], 0, 12),
        "b": make_entry("F8_E4M3", [5], 12, 17),
        "c": make_entry("F4", [4], 17, 19),
    }
    found = read_header(write(tmp_path / "m.safetensors", tensors, 19))
    assert [(t.name, t.type, t.elements, t.bytes) for t in found.tensors] == [
        ("a", "BF16", 6, 12),
        ("b", "F8_E4M3", 5, 5),
        ("c", "F4", 4, 2),
    ]
    assert found.metadata == {"format": "pt"}


def test_a_scalar_and_an_empty_tensor_are_read(tmp_path: Path) -> None:
    found = read_header(
        write(tmp_path / "m.safetensors", {"a": make_entry("F32", [], 0, 4), "b": make_entry("F32", [0, 7], 4, 4)}, 4)
    )
    assert sum(tensor.elements for tensor in found.tensors) == 1


@pytest.mark.measures
def test_the_weights_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "big.safetensors"
    with path.open("wb") as file:
        file.write(encode_header({"a": make_entry("BF16", [1 << 20, 1 << 16], 0, 1 << 37)}))
        file.truncate(file.tell() + (1 << 37))
    began = time.process_time()
    assert read_header(path).tensors[0].bytes == 1 << 37
    assert time.process_time() - began < 1


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("overlap", {"a": make_entry("I8", [4], 0, 4), "b": make_entry("I8", [4], 2, 6)}, "overlaps"),
    ("hole", {"a": make_entry("I8", [4], 0, 4), "b": make_entry("I8", [4], 8, 12)}, "gap before"),
    ("wrong length", {"a": make_entry("F32", [4], 0, 4)}, "needs 16 bytes"),
    ("backwards", {"a": make_entry("I8", [4], 8, 4)}, "offsets"),
    ("negative", {"a": make_entry("I8", [-4], 0, 4)}, "dimension of -4"),
    ("absurd", {"a": make_entry("I8", [2**62, 2**62], 0, 4)}, "dimension of"),
    ("product", {"a": make_entry("I8", [2**40, 2**40], 0, 4)}, "more weights"),
    ("dimensions", {"a": make_entry("I8", [1] * 100, 0, 1)}, "dimensions"),
    ("unknown type", {"a": make_entry("Q9", [1], 0, 1)}, "does not know"),
    ("no offsets", {"a": {"dtype": "I8", "shape": [1]}}, "not a safetensors header"),
    ("text shape", {"a": {"dtype": "I8", "shape": "1", "data_offsets": [0, 1]}}, "not a safetensors header"),
    ("a list", {"a": [1, 2]}, "not a safetensors header"),
]


@pytest.mark.parametrize(
    ("tensors", "words"), [(tensors, words) for _, tensors, words in BAD], ids=[case[0] for case in BAD]
)
def test_impossible_headers_are_rejected(tensors: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        read_header(write(tmp_path / "m.safetensors", tensors, 64))
    assert words in f"{caught.value.message} {caught.value.cause}"
    assert "m.safetensors" in caught.value.message


@pytest.mark.measures
@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 10**12, MAX_HEADER_BYTES + 1])
def test_an_impossible_header_length_is_rejected(length: int, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}")
    began = time.process_time()
    with pytest.raises(UsageError, match="damaged"):
        read_header(path)
    assert time.process_time() - began < 0.5


def test_a_truncated_file_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    for content, words in [
        (b"", "0 bytes"),
        (b"1234567", "7 bytes"),
        (struct.pack("<Q", 500) + b"{", "its header alone needs 508 bytes"),
        (encode_header({"a": make_entry("F32", [100], 0, 400)}) + b"\0" * 9, "requires"),
    ]:
        path.write_bytes(content)
        with pytest.raises(UsageError, match="cut short") as caught:
            read_header(path)
        assert words in caught.value.message


def test_a_git_lfs_pointer_is_recognized(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 5\n")
    with pytest.raises(UsageError, match="Git LFS pointer"):
        read_header(tmp_path / "m.safetensors")


@pytest.mark.measures
@pytest.mark.parametrize(
    "text", ["[" * 200_000, '{"a":' * 200_000, '{"a":' + "[" * 100_000 + "]" * 100_000 + "}", "{", "nul", '{"a":1}' * 3]
)
def test_invalid_or_deeply_nested_json_is_rejected(text: str) -> None:
    began = time.process_time()
    with pytest.raises(UsageError, match="damaged"):
        parse_header(text.encode(), "m.safetensors")
    assert time.process_time() - began < 2


@pytest.mark.measures
def test_too_many_tensors_are_rejected() -> None:
    text = "{" + ",".join(f'"{number}":{{}}' for number in range(safetensors.MAX_TENSORS + 2)) + "}"
    began = time.process_time()
    with pytest.raises(UsageError, match="damaged"):
        parse_header(text.encode(), "m.safetensors")
    assert time.process_time() - began < 5


@given(data=st.binary(max_size=300))
def test_any_bytes_are_read_or_rejected(data: bytes) -> None:
    for call in (
        lambda: parse_header(data, "x"),
        lambda: parse_index(data, "x"),
        lambda: parse_header_length(data, "x"),
    ):
        try:
            call()
        except UsageError:
            continue


numbers = st.one_of(st.integers(-5, 40), st.integers(-(2**70), 2**70))
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "I8", "F4", "zz"]),
        "shape": st.lists(numbers, max_size=4),
        "data_offsets": st.lists(numbers, min_size=2, max_size=2),
    }
)


@given(tensors=st.dictionaries(st.text(max_size=5), entries, max_size=5))
def test_any_header_is_read_or_rejected(tensors: dict[str, Any]) -> None:
    try:
        found = parse_header(json.dumps(tensors).encode(), "x")
    except UsageError:
        return
    assert found.promised_bytes >= 8 + sum(tensor.bytes for tensor in found.tensors)


def test_an_index_is_parsed() -> None:
    index = {
        "metadata": {"total_size": 1e3},
        "weight_map": {"a": "m-2.safetensors", "b": "m-1.safetensors", "c": "m-1.safetensors"},
    }
    assert parse_index(json.dumps(index).encode(), "index") == (("m-1.safetensors", "m-2.safetensors"), 1000)


@pytest.mark.parametrize(
    "file", ["../secret.safetensors", "/etc/passwd", "a\\b.safetensors", ".hidden.safetensors", "weights.bin"]
)
def test_an_index_that_points_outside_of_its_folder_is_rejected(file: str) -> None:
    with pytest.raises(UsageError, match="damaged"):
        parse_index(json.dumps({"weight_map": {"a": file}}).encode(), "index")
