"""Measured figures are added to a probed machine and shown on the page."""

from __future__ import annotations

from rich.console import Console

from bedplate.decide import decide
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.facts.measured import apply_measurements
from bedplate.facts.measured.measuring import find_disturbances
from bedplate.run.builtin import read_builtin_facts
from bedplate.show.measured import format_operations, format_rate, render_measured
from bedplate.values import (
    Accelerator,
    Figure,
    Hardware,
    Measurements,
    Workload,
    from_json,
    make_estimate,
    replace_fields,
    to_json,
)

from .samples import HARDWARE, MEASURED, make_figure


def test_the_read_bandwidth_is_used() -> None:
    found = apply_measurements(HARDWARE, MEASURED)
    assert found.memory.bandwidth_bytes_s == make_figure(20e9)
    assert [card.bandwidth_bytes_s for card in found.accelerators] == [make_figure(4.4e12), make_figure(4.1e12)]


def test_measurements_take_precedence_over_data_sheets() -> None:
    cards = tuple(replace_fields(card, bandwidth_bytes_s=make_estimate(4.8e12, 0.0)) for card in HARDWARE.accelerators)
    found = apply_measurements(replace_fields(HARDWARE, accelerators=cards), MEASURED)
    assert all(card.bandwidth_bytes_s and card.bandwidth_bytes_s.basis == "measured" for card in found.accelerators)


def test_figures_of_a_busy_machine_replace_no_data_sheet() -> None:
    """Entries of earlier versions have the same note."""
    busy = replace_fields(MEASURED, notes=find_disturbances(HARDWARE, 0.6))
    cards = tuple(replace_fields(card, bandwidth_bytes_s=make_estimate(4.8e12, 0.0)) for card in HARDWARE.accelerators)
    memory = replace_fields(HARDWARE.memory, bandwidth_bytes_s=make_estimate(40e9, 0.2))
    known = replace_fields(HARDWARE, accelerators=cards, memory=memory)
    found = apply_measurements(known, busy)
    assert (found.accelerators, found.memory, found.links) == (cards, memory, HARDWARE.links)
    assert found.cpu.instruction_sets == ("avx2", "avx512f"), "load does not change which instructions run"
    unknown = apply_measurements(HARDWARE, busy)
    assert unknown.memory.bandwidth_bytes_s == make_figure(20e9), "the only figure there is"


def test_plan_says_that_its_only_bandwidth_is_of_a_busy_machine() -> None:
    plain = make_simulated_hardware({"cpu": "Intel Xeon", "cores": 2, "ram_gb": 24})
    for share, noted in ((0.6, 1), (0.0, 0)):
        found = apply_measurements(plain, replace_fields(MEASURED, notes=find_disturbances(plain, share)))
        notes = decide(found, read_builtin_facts(), Workload()).notes
        assert sum("busy machine (other processes used 60% of the CPU" in note for note in notes) == noted


def test_unmeasured_figures_stay_unchanged() -> None:
    nothing = Measurements(when="2026-11-15T04:20:00+00:00", took_s=1.0, machine=MEASURED.machine)
    assert replace_fields(apply_measurements(HARDWARE, nothing), measured=None) == HARDWARE


def test_broken_instruction_sets_are_removed() -> None:
    found = apply_measurements(HARDWARE, MEASURED)
    assert found.cpu.instruction_sets == ("avx2", "avx512f"), "what was not tried is left as advertised"
    assert found.notes == ("amx_tile is advertised but does not run here: SIGILL at tileloadd",)


def test_the_slower_direction_is_the_bandwidth_of_the_nvlink() -> None:
    pcie, nvlink, host = apply_measurements(HARDWARE, MEASURED).links
    assert (pcie.kind, pcie.bandwidth_bytes_s) == ("pcie", None)
    assert (nvlink.kind, nvlink.count, nvlink.bandwidth_bytes_s) == ("nvlink", 18, make_figure(380e9))
    assert (host.kind, host.a, host.b, host.bandwidth_bytes_s) == ("pcie", "0", "host", make_figure(55e9))


def test_a_card_of_another_vendor_is_not_changed() -> None:
    cards = (Accelerator(name="Radeon", vendor="amd", index=0),)
    (card,) = apply_measurements(replace_fields(HARDWARE, accelerators=cards), MEASURED).accelerators
    assert card.bandwidth_bytes_s is None


def test_a_machine_with_measurements_survives_json() -> None:
    found = apply_measurements(HARDWARE, MEASURED)
    assert from_json(Hardware, to_json(found)) == found


def render_page(found: Measurements) -> str:
    console = Console(width=140, record=True, file=None)
    with console.capture() as captured:
        console.print(render_measured(found))
    return captured.get()


def test_the_page_has_every_figure_with_its_spread() -> None:
    text = render_page(MEASURED)
    for words in (
        "2026-11-15 04:20, in 4.2 s",
        "1 of 3 advertised instruction sets run",
        "AMX does not run: SIGILL",
        "AVX-512 not tried: no executable memory",
        "2 cores: read 20 GB/s ± 10% · copy 30 GB/s",
        "1 core: read 12 GB/s",
        "read 4.4 TB/s ± 10% · copy 4.2 TB/s ± 10% · theoretical 4.92 TB/s · spec 4.8 TB/s",
        "from host 55 GB/s ± 10% pinned · 9 GB/s ± 10% pageable",
        "to host 54 GB/s",
        "GPU 0 to GPU 1 400 GB/s",
        "bf16 788 TFLOP/s",
        "int8 1500 TOP/s",
        "CPU fp32 210 GFLOP/s",
        "read 2.1 GB/s",
        "why not",
    ):
        assert words in text, words


def test_an_empty_measurement_can_be_shown() -> None:
    assert "Measured" in render_page(Measurements(when="", took_s=0.1, machine=MEASURED.machine))


def test_a_small_spread_is_not_shown() -> None:
    sure = Figure(value=20e9, low=19.95e9, high=20.05e9, basis="measured")
    assert format_rate(sure) == "20 GB/s" and format_operations(sure, "fp32") == "20 GFLOP/s"
    assert format_rate(Figure(value=0, low=0, high=0, basis="measured")) == "0 B/s"
