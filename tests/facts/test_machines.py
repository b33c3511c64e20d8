"""Machines that are known by a name, and machines with different cards."""

from __future__ import annotations

import pytest

from bedplate.decide.memory import fit
from bedplate.errors import UsageError
from bedplate.facts.chips import load_chips
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.facts.known_models import find_model
from bedplate.facts.machines import find_machine, load_machines
from bedplate.values import Hardware, Parallelism, Workload


def describe(accelerator: object, **fields: object) -> Hardware:
    return make_simulated_hardware({"accelerator": accelerator, **fields})


ALL = {one.names[0]: one for one in load_machines().values()}


@pytest.mark.parametrize("machine", sorted(name for name, one in ALL.items() if one.accelerator))
def test_every_machine_has_known_chips_and_can_be_described(machine: str) -> None:
    found = find_machine(machine)
    assert found is not None
    named, machines = found
    assert machines == 1 and named.accelerator in load_chips() and named.source
    hardware = describe(machine)
    assert len(hardware.accelerators) == named.count
    assert hardware.memory.total_bytes == named.ram_gb * (1 << 30) and hardware.cpu.physical_cores == named.cores
    assert any(note.startswith(machine) for note in hardware.notes)
    assert named.hosts > 1 or (hardware.nodes == 1 and not any("nodes of" in note for note in hardware.notes))


@pytest.mark.parametrize(
    ("text", "cpu", "cores", "sockets", "ram_gib"),
    [
        ("c7i.8xlarge", "Intel Xeon Platinum 8488C", 16, 1, 64),
        ("m7i.48xlarge", "Intel Xeon Platinum 8488C", 96, 2, 768),
        ("c7a.8xlarge", "AMD EPYC 9R14", 32, 1, 64),  # without simultaneous multithreading
        ("r8g.48xlarge", "AWS Graviton4", 192, 2, 1536),
        ("c3-standard-44", "Intel Xeon Platinum 8488C", 22, 1, 176),
        ("Standard_D32s_v5", "Intel Xeon Platinum 8375C", 16, 1, 128),
        ("D192s_v6", "Intel Xeon Platinum 8592+", 96, 2, 768),
        ("F32as_v6", "AMD EPYC 9654", 32, 1, 128),
    ],
)
def test_cloud_machines_without_accelerators(text: str, cpu: str, cores: int, sockets: int, ram_gib: int) -> None:
    hardware = describe(text)
    assert not hardware.accelerators and hardware.cpu.name == cpu
    assert (hardware.cpu.physical_cores, hardware.cpu.sockets) == (cores, sockets)
    assert hardware.memory.total_bytes == ram_gib << 30 and hardware.memory.bandwidth_bytes_s is not None
    found = find_machine(text)
    assert found is not None and hardware.notes[0].startswith(f"{found[0].names[0]}: {cores} cores of {cpu}")


def test_every_cloud_machine_without_accelerators_can_be_described() -> None:
    without = [one for one in ALL.values() if one.accelerator is None]
    assert len(without) > 400
    for one in without:
        hardware = describe(one.names[0])
        assert one.source and hardware.cpu.name == one.cpu and hardware.cpu.physical_cores == one.cores


def test_several_cloud_machines_without_accelerators_are_refused() -> None:
    with pytest.raises(UsageError, match="engines on CPUs use one machine"):
        describe("2x c7i.8xlarge")


@pytest.mark.parametrize("text", ["p5.48xlarge", "P5.48XLARGE", " p5.48xlarge "])
def test_names_are_found_in_any_case(text: str) -> None:
    assert len(describe(text).accelerators) == 8


def test_several_machines_are_nodes() -> None:
    hardware = describe("2x p5.48xlarge")
    assert len(hardware.accelerators) == 16 and any("2 nodes of 8" in note for note in hardware.notes)
    assert [link for link in hardware.links if link.kind == "network"]


@pytest.mark.parametrize("name", ["GB200 NVL72", "gb300-nvl72"])
def test_a_rack_is_all_of_its_gpus(name: str) -> None:
    """Read as the name of its GPU, the rack would have one of them."""
    hardware = describe(name)
    assert len(hardware.accelerators) == 72 == hardware.cards_per_node
    assert any("of one of its 18 hosts" in note for note in hardware.notes)


def test_given_fields_replace_those_of_the_machine() -> None:
    assert describe("g6.12xlarge", ram_gb=96).memory.total_bytes == 96 << 30


def test_count_beside_a_machine_is_refused() -> None:
    with pytest.raises(UsageError, match="is a whole machine"):
        describe("p5.48xlarge", count=4)


@pytest.mark.parametrize("named", ["2x RTX 3090 + RTX 4090", ["2x RTX 3090", "RTX 4090"], "RTX 3090 x2+4090"])
def test_different_cards_are_joined(named: object) -> None:
    hardware = describe(named)
    names = [card.name for card in hardware.accelerators]
    assert names == ["NVIDIA GeForce RTX 3090"] * 2 + ["NVIDIA GeForce RTX 4090"]
    assert [card.index for card in hardware.accelerators] == [0, 1, 2]
    between = {(link.a, link.b) for link in hardware.links if link.b != "host"}
    assert between == {("0", "1"), ("0", "2"), ("1", "2")}
    assert {link.a for link in hardware.links if link.b == "host"} == {"0", "1", "2"}
    assert hardware.memory.total_bytes == 72 << 30


def test_a_plan_names_all_kinds_of_cards() -> None:
    fitted = fit(describe("2x RTX 3090 + RTX 4090"), find_model("Llama 3.1 8B"), Workload(), "vllm",
                 parallelism=Parallelism(pipeline=3))  # fmt: skip
    assert fitted.devices[0].device == "NVIDIA GeForce RTX 3090 or NVIDIA GeForce RTX 4090"


def test_names_that_contain_a_plus_are_one_chip() -> None:
    assert [card.name for card in describe("Ryzen AI Max+ 395 128GB").accelerators] == ["AMD Ryzen AI Max+ 395"]
    assert describe("xeon 8480+", ram_gb=64).cpu.name == "Intel Xeon Platinum 8480+"


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("foo + RTX 4090", "unknown chip “foo”"),
        ("RTX 4090 + M4 Max 64GB", "is not a card that can be added"),
        ([], "a list needs names"),
        (["RTX 4090", 3], "a list needs names"),
    ],
)
def test_cards_that_cannot_be_joined_are_named(named: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        describe(named)


@pytest.mark.parametrize("field", ["count", "gpus_per_node", "link", "network"])
def test_fields_of_equal_cards_are_refused_for_different_ones(field: str) -> None:
    value = "pcie" if field in ("link", "network") else 2
    with pytest.raises(UsageError, match=f"hardware.{field}: cannot be given for different cards"):
        describe("RTX 3090 + RTX 4090", **{field: value})
