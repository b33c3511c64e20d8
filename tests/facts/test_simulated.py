"""Hypothetical hardware is a complete Hardware record, and an error names the wrong field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from bedplate.errors import UsageError
from bedplate.facts.chips import GIB, load_chips
from bedplate.facts.hypothetical import FIELDS, estimate_idle_free_bytes, make_simulated_hardware
from bedplate.values import Hardware
from bedplate.values.record import from_json, to_json

SHARED = Path(__file__).parents[2].parent / "shared"


def list_bandwidths(machine: Hardware, kind: str) -> dict[tuple[str, str], float | None]:
    """One direction in GB/s."""
    return {
        (link.a, link.b): None if link.bandwidth_bytes_s is None else link.bandwidth_bytes_s.value / 1e9
        for link in machine.links
        if link.kind == kind
    }


def test_eight_h100s_give_a_complete_machine() -> None:
    machine = make_simulated_hardware(
        {"accelerator": "NVIDIA H100 SXM 80GB", "count": 8, "ram_gb": 2048, "os": "linux"}
    )
    assert [card.index for card in machine.accelerators] == list(range(8))
    card = machine.accelerators[0]
    assert card.vendor == "nvidia"
    assert card.compute_capability == "9.0"
    assert card.memory_bytes == 81559 << 20
    assert card.free_bytes is not None and 79e9 < card.free_bytes < card.memory_bytes
    assert card.bandwidth_bytes_s is not None
    assert (card.bandwidth_bytes_s.value, card.bandwidth_bytes_s.basis) == (3350e9, "spec")
    assert card.bandwidth_bytes_s.source
    assert card.basis == "spec"
    assert machine.memory.total_bytes == 2048 * GIB
    assert machine.memory.available_bytes < machine.memory.total_bytes
    nvlink = list_bandwidths(machine, "nvlink")
    assert len(nvlink) == 28
    assert set(nvlink.values()) == {450.0}
    to_host = list_bandwidths(machine, "pcie")
    assert set(to_host) == {(str(index), "host") for index in range(8)}
    assert to_host["0", "host"] == pytest.approx(63, rel=0.01)


def test_hypothetical_hardware_survives_json_and_can_be_read_back() -> None:
    machine = make_simulated_hardware({"accelerator": "2x RTX 4090", "cpu": "Ryzen 9 7950X", "ram_gb": 64})
    assert from_json(Hardware, to_json(machine)) == machine
    assert make_simulated_hardware(msgspec.to_builtins(machine)) == machine


def test_a_saved_machine_of_another_kind_is_refused() -> None:
    for saved in ({"schema": "hardware/9"}, {"schema": "hardware/1", "os": "linux"}, {"schema": 3}):
        with pytest.raises(UsageError, match="hardware is not a machine") as caught:
            make_simulated_hardware(saved)
        assert caught.value.cause


def test_an_optional_bridge_must_be_specified() -> None:
    described = {"accelerator": "RTX 3090", "count": 4, "ram_gb": 128}
    assert not list_bandwidths(make_simulated_hardware(described), "nvlink")
    assert len(list_bandwidths(make_simulated_hardware(described), "pcie")) == 4 + 6
    bridged = list_bandwidths(make_simulated_hardware({**described, "link": "nvlink"}), "nvlink")
    assert bridged == {("0", "1"): 56.25, ("2", "3"): 56.25}


def test_a_mesh_divides_its_bandwidth_among_all_peers() -> None:
    xgmi = list_bandwidths(make_simulated_hardware({"accelerator": "MI300X", "count": 8, "ram_gb": 2048}), "xgmi")
    assert len(xgmi) == 28
    assert set(xgmi.values()) == {64.0}


def test_cards_can_be_limited_to_pcie() -> None:
    machine = make_simulated_hardware({"accelerator": "H100 SXM", "count": 2, "ram_gb": 512, "link": "pcie"})
    assert not list_bandwidths(machine, "nvlink")
    assert ("0", "1") in list_bandwidths(machine, "pcie")


def test_a_fleet_has_a_network_between_nodes() -> None:
    machine = make_simulated_hardware(
        {"accelerator": "H100 SXM", "count": 128, "ram_gb": 2048, "network": "8x 400 Gbit/s"}
    )
    assert len(machine.accelerators) == 128
    nvlink = list_bandwidths(machine, "nvlink")
    assert len(nvlink) == 16 * 28
    assert ("7", "8") not in nvlink
    network = list_bandwidths(machine, "network")
    assert len(network) == 15
    assert network["0", "8"] == 400
    assert any("16 nodes of 8" in note for note in machine.notes)


def test_a_rack_is_one_domain() -> None:
    machine = make_simulated_hardware({"accelerator": "GB200", "count": 72, "ram_gb": 480})
    assert len(list_bandwidths(machine, "nvlink")) == 72 * 71 // 2 + 72
    assert list_bandwidths(machine, "nvlink")["0", "host"] == 450
    assert machine.cpu.name == "NVIDIA Grace"
    assert machine.cpu.arch == "aarch64"


def test_nodes_have_the_specified_size() -> None:
    machine = make_simulated_hardware(
        {"accelerator": "L40S", "count": 8, "gpus_per_node": 4, "ram_gb": 512, "network": "100 GbE"}
    )
    assert list_bandwidths(machine, "network") == {("0", "4"): 12.5}
    assert ("3", "4") not in list_bandwidths(machine, "pcie")


def test_a_large_fleet_is_described_in_bounded_size() -> None:
    machine = make_simulated_hardware({"accelerator": "GB200", "count": 16_384, "ram_gb": 480})
    assert len(machine.accelerators) == 16_384
    assert len(machine.links) < 50_000


@pytest.mark.parametrize(
    ("said", "gb_s"),
    [
        ("400 Gbit/s", 50),
        ("InfiniBand NDR", 50),
        ("InfiniBand NDR 400", 50),
        ("8x400Gb/s", 400),
        ("8 x NDR 400", 400),
        ("100 GbE", 12.5),
        ("50 GB/s", 50),
        (200, 25),
        ("none", None),
        ("InfiniBand", None),
    ],
)
def test_usual_network_names_are_understood(said: object, gb_s: float | None) -> None:
    machine = make_simulated_hardware({"accelerator": "H100 SXM", "count": 16, "ram_gb": 2048, "network": said})
    assert list_bandwidths(machine, "network") == {("0", "8"): gb_s}


@pytest.mark.parametrize(
    ("name", "ram_gb", "wired_gib", "gb_s"),
    [
        ("Apple M1", 8, 8 * 2 / 3, 68.25),
        ("Apple M4", 16, 16 * 2 / 3, 120),
        ("Apple M3 Max", 36, 27, 300),
        ("Apple M3 Max 40-core", 64, 48, 400),
        ("Apple M4 Max", 128, 96, 546),
        ("M3 Ultra", 512, 384, 819),
    ],
)
def test_a_mac_shares_its_memory_up_to_the_gpu_limit(name: str, ram_gb: int, wired_gib: float, gb_s: float) -> None:
    machine = make_simulated_hardware({"accelerator": name, "ram_gb": ram_gb, "os": "macos"})
    card = machine.accelerators[0]
    assert machine.os == "macos"
    assert machine.cpu.arch == "arm64"
    assert card.unified_memory
    assert card.memory_bytes == ram_gb * GIB
    assert card.wired_limit_bytes is not None
    assert card.wired_limit_bytes.value / GIB == pytest.approx(wired_gib)
    assert card.wired_limit_bytes.basis == "estimate"
    assert card.free_bytes == round(min(wired_gib * GIB, machine.memory.available_bytes))
    assert machine.memory.bandwidth_bytes_s is not None
    assert machine.memory.bandwidth_bytes_s.value == gb_s * 1e9


def test_memory_comes_from_the_name_or_the_only_size() -> None:
    assert make_simulated_hardware({"accelerator": "M4 Max 64GB"}).memory.total_bytes == 64 * GIB
    # The firmware reserves a part of 128 GB. The driver reports the rest.
    assert make_simulated_hardware({"accelerator": "DGX Spark"}).memory.total_bytes == 122572 << 20
    with pytest.raises(UsageError, match=r"hardware.ram_gb: specify the memory of the Apple M4 Pro"):
        make_simulated_hardware({"accelerator": "M4 Pro"})
    with pytest.raises(UsageError, match=r"specify the memory of the AMD EPYC 9354") as caught:
        make_simulated_hardware({"cpu": "EPYC 9354"})
    assert caught.value.hint == "for example: “AMD EPYC 9354 64GB”, or ram_gb: 64 in an intent"
    with pytest.raises(UsageError, match=r"hardware.ram_gb: 32, but the name states 64"):
        make_simulated_hardware({"accelerator": "M4 Max 64GB", "ram_gb": 32})


def test_cpu_and_gpu_of_strix_halo_share_memory() -> None:
    machine = make_simulated_hardware({"accelerator": "Ryzen AI Max+ 395", "ram_gb": 128})
    assert machine.cpu.physical_cores == 16
    assert "avx512f" in machine.cpu.instruction_sets
    assert machine.accelerators[0].architecture == "gfx1151"
    assert machine.accelerators[0].free_bytes == 96 * GIB


def test_a_cpu_without_accelerators_is_described() -> None:
    machine = make_simulated_hardware({"cpu": "Intel Xeon Gold 6430", "cores": 32, "ram_gb": 128, "os": "linux"})
    assert machine.accelerators == ()
    assert machine.links == ()
    assert (machine.cpu.sockets, machine.cpu.physical_cores, machine.cpu.logical_cores) == (1, 32, 64)
    assert "amx_bf16" in machine.cpu.instruction_sets
    assert machine.memory.bandwidth_bytes_s is not None
    assert machine.memory.bandwidth_bytes_s.value == pytest.approx(281.6e9)


def test_bandwidth_is_proportional_to_the_sockets() -> None:
    both = make_simulated_hardware({"cpu": "EPYC 9654", "cores": 192, "ram_gb": 1536})
    assert both.cpu.sockets == 2
    assert both.memory.bandwidth_bytes_s is not None
    assert both.memory.bandwidth_bytes_s.value == pytest.approx(2 * 460.8e9)
    part = make_simulated_hardware({"cpu": "EPYC 9654", "cores": 8, "ram_gb": 64})
    assert (part.cpu.sockets, part.cpu.allowed_physical_cores) == (1, 8)


def test_a_core_count_that_equals_the_threads_means_threads() -> None:
    machine = make_simulated_hardware({"cpu": "Ryzen 7 7840U", "cores": 16, "ram_gb": 16})
    assert (machine.cpu.physical_cores, machine.cpu.logical_cores) == (8, 16)
    with pytest.raises(UsageError, match=r"hardware.cores: .* has 8 cores, not 17"):
        make_simulated_hardware({"cpu": "Ryzen 7 7840U", "cores": 17, "ram_gb": 16})


def test_an_unlisted_cpu_keeps_its_cores_and_has_no_bandwidth() -> None:
    machine = make_simulated_hardware({"cpu": "Loongson 3A6000", "cores": 4, "ram_gb": 16, "arch": "loongarch64"})
    assert machine.cpu.name == "Loongson 3A6000"
    assert machine.cpu.instruction_sets == ()
    assert machine.memory.bandwidth_bytes_s is None
    assert any("is not a known chip" in note for note in machine.notes)
    with pytest.raises(UsageError, match=r"hardware.cpu: unknown chip") as caught:
        make_simulated_hardware({"cpu": "Loongson 3A6000", "ram_gb": 16})
    assert "hardware.cores" in (caught.value.hint or "")


def test_a_cpu_may_be_named_where_an_accelerator_is_expected_and_the_other_way_round() -> None:
    assert make_simulated_hardware({"accelerator": "Raspberry Pi 5", "ram_gb": 8}).accelerators == ()
    assert make_simulated_hardware({"cpu": "Apple M2", "ram_gb": 16}).accelerators[0].vendor == "apple"


def test_assumptions_are_noted() -> None:
    machine = make_simulated_hardware({"accelerator": "8x H100 SXM"})
    assert machine.memory.basis == "estimate"
    assert machine.cpu.basis == "estimate"
    assert any("hardware.ram_gb is not specified" in note for note in machine.notes)
    assert any("hardware.cores is not specified" in note for note in machine.notes)


def test_cards_with_several_devices_show_all_of_them() -> None:
    assert len(make_simulated_hardware({"accelerator": "A16", "count": 2, "ram_gb": 256}).accelerators) == 8


@pytest.mark.parametrize(
    ("name", "free_mib"),
    # Idle cards in tests/captures/nvidia, and an H200 without what a process held.
    [("RTX 3090", 24154), ("L4", 22479), ("A100 SXM 40GB", 40387), ("H100 SXM", 81106), ("H200 SXM", 143157)],
)
def test_free_memory_of_an_idle_card_matches_real_cards(name: str, free_mib: int) -> None:
    free = make_simulated_hardware({"accelerator": name, "ram_gb": 64}).accelerators[0].free_bytes
    assert free == pytest.approx(free_mib << 20, rel=0.006)


def test_an_idle_card_has_free_memory() -> None:
    for chip in load_chips().values():
        if chip.reported_bytes is not None and not chip.unified:
            assert 0.86 * chip.reported_bytes < estimate_idle_free_bytes(chip.reported_bytes) < chip.reported_bytes, (
                chip.name
            )


@pytest.mark.parametrize(
    ("described", "field"),
    [
        ({}, "hardware"),
        ({"ram_gb": 16}, "hardware"),
        ({"accelerator": "H100 SXM", "gpu": 3}, "hardware.gpu"),
        ({"accelerator": "H999"}, "hardware.accelerator"),
        ({"accelerator": "rtx 3080"}, "hardware.accelerator"),
        ({"accelerator": 5090}, "hardware.accelerator"),
        ({"accelerator": " "}, "hardware.accelerator"),
        ({"accelerator": "99999x H100 SXM"}, "hardware.accelerator"),
        ({"accelerator": "Ryzen 9 7950X", "cpu": "Ryzen 9 7950X", "ram_gb": 8}, "hardware.accelerator"),
        ({"accelerator": "H100 SXM", "count": 0}, "hardware.count"),
        ({"accelerator": "H100 SXM", "count": True}, "hardware.count"),
        ({"accelerator": "H100 SXM", "count": 2.5}, "hardware.count"),
        ({"accelerator": "H100 SXM", "count": 10**9}, "hardware.count"),
        ({"accelerator": "8x H100 SXM", "count": 4}, "hardware.count"),
        ({"accelerator": "Apple M3 Max", "count": 2, "ram_gb": 64}, "hardware.count"),
        ({"cpu": "Ryzen 9 7950X", "count": 2, "ram_gb": 8}, "hardware.count"),
        ({"accelerator": "H100 SXM", "ram_gb": 0}, "hardware.ram_gb"),
        ({"accelerator": "H100 SXM", "ram_gb": -1}, "hardware.ram_gb"),
        ({"accelerator": "H100 SXM", "ram_gb": "64"}, "hardware.ram_gb"),
        ({"accelerator": "H100 SXM", "ram_gb": float("nan")}, "hardware.ram_gb"),
        ({"cpu": "Ryzen 9 7950X"}, "hardware.ram_gb"),
        ({"accelerator": "H100 SXM", "os": "plan9"}, "hardware.os"),
        ({"accelerator": "H100 SXM", "os": "macos"}, "hardware.os"),
        ({"accelerator": "M2", "ram_gb": 16, "os": "windows"}, "hardware.os"),
        ({"accelerator": "H100 SXM", "arch": "vax"}, "hardware.arch"),
        ({"accelerator": "M2", "ram_gb": 16, "arch": "x86_64"}, "hardware.arch"),
        ({"accelerator": "H100 SXM", "cores": 0}, "hardware.cores"),
        ({"accelerator": "H100 SXM", "gpus_per_node": 0}, "hardware.gpus_per_node"),
        ({"cpu": "Ryzen 9 7950X", "ram_gb": 8, "gpus_per_node": 8}, "hardware.gpus_per_node"),
        ({"accelerator": "H100 SXM", "link": "thunderbolt"}, "hardware.link"),
        ({"accelerator": "RTX 4090", "link": "nvlink"}, "hardware.link"),
        ({"cpu": "Ryzen 9 7950X", "ram_gb": 8, "link": "pcie"}, "hardware.link"),
        ({"accelerator": "H100 SXM", "count": 16, "network": "fast"}, "hardware.network"),
        ({"accelerator": "H100 SXM", "count": 1, "network": []}, "hardware.network"),
    ],
)
def test_an_error_names_its_field(described: dict[str, Any], field: str) -> None:
    with pytest.raises(UsageError) as caught:
        make_simulated_hardware(described)
    assert caught.value.message.startswith(f"{field}:")
    assert caught.value.exit_code == 2


scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=12), st.lists(st.integers()))
sensible = st.sampled_from(["h100 sxm", "m3 max", "8x mi300x", "linux", "nvlink", "arm64", "NDR", "EPYC 9654", 64, 8])


@given(st.dictionaries(st.sampled_from([*FIELDS, "schema", "other"]), st.one_of(scalars, sensible), max_size=6))
def test_any_description_gives_a_machine_or_a_usage_error(described: dict[str, Any]) -> None:
    try:
        machine = make_simulated_hardware(described)
    except UsageError as error:
        assert "hardware" in error.message
    else:
        assert machine.memory.available_bytes <= machine.memory.total_bytes


def test_every_machine_of_the_scenarios_is_understood(capsys: pytest.CaptureFixture[str]) -> None:
    if not (SHARED / "scenarios").is_dir():
        pytest.skip("shared/scenarios is not here: no scenarios to try")
    machines = {}
    for path in sorted((SHARED / "scenarios").glob("*.yaml")):
        hardware = yaml.safe_load(path.read_text(encoding="utf-8"))["intent"].get("hardware")
        if hardware is not None:
            machines[path.stem] = make_simulated_hardware(hardware)
            assert len(machines[path.stem].accelerators) == hardware.get("count", 0)
    with capsys.disabled():
        print(f"\n{len(machines)} machines of scenarios: all understood")
    assert machines


@pytest.mark.parametrize("named", ["2x AMD EPYC 9654", "2 EPYC 9654", "EPYC 9654 x2"])
def test_count_before_a_server_chip_is_the_number_of_sockets(named: str) -> None:
    machine = make_simulated_hardware({"cpu": named, "ram_gb": 768})
    assert (machine.cpu.sockets, machine.cpu.physical_cores, machine.cpu.logical_cores) == (2, 192, 384)
    part = make_simulated_hardware({"cpu": named, "cores": 128, "ram_gb": 768})
    assert (part.cpu.sockets, part.cpu.physical_cores) == (2, 128)


@pytest.mark.parametrize(
    ("described", "said"),
    [
        ({"cpu": "2x Core i9-13900K"}, "hardware.cpu: a machine has at most 1"),
        ({"cpu": "12x EPYC 9654"}, "hardware.cpu: a machine has at most 8"),
        ({"cpu": "2x EPYC 9654", "cores": 300}, "hardware.cores: 2 x AMD EPYC 9654 have 192 cores, not 300"),
    ],
)
def test_impossible_numbers_of_sockets_are_errors(described: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        make_simulated_hardware({**described, "ram_gb": 64})
    assert said in caught.value.message
