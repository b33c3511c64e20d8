"""Matrix products: the operation count, the data, and the search for libraries."""

from __future__ import annotations

import math
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from bedplate.facts.measured import matrix
from bedplate.facts.measured.cuda import MeasuredCard
from bedplate.facts.measured.matrix import (
    KINDS,
    MatrixRequest,
    count_operations,
    find_libraries,
    make_noise,
    measure_matrix,
    open_first,
    parse_major_version,
)
from bedplate.values import Accelerator

from .fake_cuda import FakeCuda

NO_CARDS = MatrixRequest(cards=(), threads=1, when="2026-11-15")


def test_a_product_is_a_multiplication_and_an_addition_for_each_term() -> None:
    assert count_operations(8192) == 1_099_511_627_776


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_data_is_random_finite_and_near_one(kind: matrix.ProductKind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "NOISE_BYTES", 4096)
    raw = make_noise(kind)
    assert len(raw) == 4096 and len(set(raw)) > 100
    if kind.name == "int8":
        return
    if kind.name == "bf16":
        values = [struct.unpack("<f", b"\0\0" + raw[place : place + 2])[0] for place in range(0, 4096, 2)]
    else:
        values = [value for (value,) in struct.iter_unpack("<e" if kind.name == "fp16" else "<f", raw)]
    assert all(math.isfinite(value) and 0.4 <= abs(value) < 2 for value in values)
    assert min(values) < 0 < max(values)


def test_without_numpy_the_note_says_that_no_library_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    found = measure_matrix(NO_CARDS, lambda share: None)
    assert found.rates == ()
    assert found.notes == ("matrix products on the CPU are not measured: no library is available",)


def test_with_numpy_the_cpu_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numpy")
    monkeypatch.setattr(matrix, "CPU_SIZE", 256)
    (rate,) = measure_matrix(NO_CARDS, lambda share: None).rates
    assert (rate.device, rate.data_type, rate.size) == ("cpu", "fp32", 256)
    assert rate.operations_s.basis == "measured" and rate.operations_s.value > 1e7


def test_the_newest_supported_library_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def load(path: str, mode: int = 0) -> Any:
        opened.append(Path(path).name)
        if path.endswith("12"):
            raise OSError("broken")
        return path

    monkeypatch.setattr("ctypes.CDLL", load)
    monkeypatch.setattr(matrix, "declare_types", lambda library: library)
    names = ("libcublas.so.11", "libcublas.so.12", "libcublas.so.13", "libcublasLt.so.11")
    for name in names:
        (tmp_path / name).write_bytes(b"")
    _, path = open_first([tmp_path / name for name in names[:3]], cuda_major=12)
    assert path.name == "libcublas.so.11" and opened == ["libcublas.so.12", "libcublasLt.so.11", "libcublas.so.11"]
    with pytest.raises(OSError, match="no library is available"):
        open_first([tmp_path / "libcublas.so.13"], cuda_major=12)


@pytest.mark.parametrize(
    ("name", "major"),
    [("libcublas.so.12", 12), ("libcublas.so.12.9.1.4", 12), ("cublas64_13.dll", 13), ("libcublas.so", None)],
)
def test_the_version_is_parsed_from_the_file_name(name: str, major: int | None) -> None:
    assert parse_major_version(Path(name)) == major


def test_libraries_are_found_in_packages_of_this_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "site-packages"
    for place in ("nvidia/cublas/lib/libcublas.so.12", "nvidia/cu13/lib/libcublas.so.13"):
        (folder / place).parent.mkdir(parents=True)
        (folder / place).write_bytes(b"")
    monkeypatch.setattr(sys, "path", [str(folder)])
    monkeypatch.setattr(sys, "platform", "linux")
    assert {folder / "nvidia/cublas/lib/libcublas.so.12", folder / "nvidia/cu13/lib/libcublas.so.13"} <= set(
        find_libraries()
    )


class FakeCublas:
    """Takes a second of the fake driver's clock for every 10¹⁴ operations."""

    def __init__(self, driver: FakeCuda, refuse: int | None = None) -> None:
        self.driver, self.refuse, self.handles = driver, refuse, 0

    def cublasCreate_v2(self, handle: Any) -> int:
        self.handles += 1
        return 0

    def cublasDestroy_v2(self, handle: Any) -> int:
        self.handles -= 1
        return 0

    def cublasGetVersion_v2(self, handle: Any, out: Any) -> int:
        out._obj.value = 130100
        return 0

    def cublasGemmEx(self, *arguments: Any) -> int:
        data_type = arguments[8]
        if data_type == self.refuse:
            return 15
        self.driver.clock_s += count_operations(arguments[3]) / 1e14
        return 0


def run_on_gpu(
    monkeypatch: pytest.MonkeyPatch, refuse: int | None = None
) -> tuple[matrix.MatrixResult, FakeCuda, FakeCublas]:
    driver = FakeCuda()
    driver.cards[0].free_bytes = 4 << 30
    library = FakeCublas(driver, refuse)
    monkeypatch.setitem(sys.modules, "numpy", None)
    monkeypatch.setattr(matrix, "NOISE_BYTES", 1 << 26)
    monkeypatch.setattr(matrix, "make_noise", lambda kind: bytes(1 << 26))
    monkeypatch.setattr(matrix, "load_driver", lambda: driver)
    monkeypatch.setattr(matrix, "open_first", lambda paths, major: (library, Path("libcublas.so.13")))
    asked = matrix.make_request((Accelerator(name="b", vendor="nvidia", index=2),), 1, "2026-11-15")
    assert asked.cards == (MeasuredCard(index=2, name="b"),)
    return measure_matrix(asked, lambda share: None), driver, library


def test_each_data_type_is_timed_on_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    found, driver, library = run_on_gpu(monkeypatch)
    assert [rate.data_type for rate in found.rates] == ["fp32", "tf32", "fp16", "bf16", "int8"]
    for rate in found.rates:
        assert rate.device == "2" and rate.operations_s.value == pytest.approx(1e14, rel=0.01)
    assert driver.left == [] and library.handles == 0


def test_a_data_type_that_the_card_lacks_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    found, driver, library = run_on_gpu(monkeypatch, refuse=matrix.R_16BF)
    assert "bf16" not in [rate.data_type for rate in found.rates] and len(found.rates) == 4
    assert any("bf16 products are not measured: not supported" in note for note in found.notes)
    assert driver.left == [] and library.handles == 0


def test_too_little_memory_on_the_card_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeCuda()
    monkeypatch.setitem(sys.modules, "numpy", None)
    monkeypatch.setattr(matrix, "load_driver", lambda: driver)
    monkeypatch.setattr(matrix, "open_first", lambda paths, major: (FakeCublas(driver), Path("libcublas.so.13")))
    driver.cards[0].free_bytes = 1 << 20
    found = measure_matrix(
        MatrixRequest(cards=(MeasuredCard(index=0, name="x"),), threads=1, when="x"), lambda share: None
    )
    assert found.rates == () and sum("not enough free memory" in note for note in found.notes) == len(KINDS)
