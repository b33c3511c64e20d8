"""Measurements of a real H200, compared with another program. The file must stay readable."""

from __future__ import annotations

from pathlib import Path

import pytest

from bedplate.values import Measurements, from_json

CAPTURE = Path(__file__).parents[2] / "captures" / "measured" / "h200.json"
# Measured with PyTorch 2.11 on the same machine in the same minute, in bytes and operations per second.
TORCH = {
    "copy": 4.274e12,
    "sum": 4.342e12,
    "to": 55.23e9,
    "from": 55.06e9,
    "bf16": 692e12,
    "fp32": 50.3e12,
    "tf32": 358e12,
}


def test_the_figures_agree_with_another_program_on_the_same_card() -> None:
    found = from_json(Measurements, CAPTURE.read_text(encoding="utf-8"))
    (gpu,) = found.gpus
    assert gpu.copy_bytes_s and gpu.read_bytes_s and gpu.to_device_pinned_bytes_s and gpu.from_device_pinned_bytes_s
    assert gpu.copy_bytes_s.value == pytest.approx(TORCH["copy"], rel=0.01)
    assert gpu.to_device_pinned_bytes_s.value == pytest.approx(TORCH["to"], rel=0.01)
    assert gpu.from_device_pinned_bytes_s.value == pytest.approx(TORCH["from"], rel=0.01)
    products = {rate.data_type: rate.operations_s for rate in found.matrix if rate.device == "0"}
    for data_type in ("fp32", "tf32", "bf16"):
        assert products[data_type].value == pytest.approx(TORCH[data_type], rel=0.05)


def test_reading_is_faster_than_a_reduction_and_slower_than_the_bus() -> None:
    (gpu,) = from_json(Measurements, CAPTURE.read_text(encoding="utf-8")).gpus
    assert gpu.read_bytes_s and gpu.theoretical_bytes_s
    assert TORCH["sum"] < gpu.read_bytes_s.value < gpu.theoretical_bytes_s


def test_every_figure_is_measured_and_names_its_source() -> None:
    found = from_json(Measurements, CAPTURE.read_text(encoding="utf-8"))
    assert found.ram_all_cores and found.ram_one_core and found.disk
    figures = [found.ram_all_cores.read_bytes_s, found.ram_one_core.copy_bytes_s, found.disk.read_bytes_s]
    figures += [rate.operations_s for rate in found.matrix]
    for figure in figures:
        assert figure.basis == "measured" and figure.low <= figure.value <= figure.high
        assert "2026-11-15" in (figure.source or "") and "repeats" in (figure.source or "")
