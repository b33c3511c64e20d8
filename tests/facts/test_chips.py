"""The figures of each chip are consistent, and every driver name and common name finds its chip."""

from __future__ import annotations

import csv
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bedplate.errors import UsageError
from bedplate.facts.chips import GIB, Chip, DataType, find_accelerator_chip, find_chip, load_chips
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.values import Accelerator

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared"
TRUTH = SHARED / "truth"
ALL = tuple(load_chips().values())
CUDA = tuple(chip for chip in ALL if chip.capability is not None)


def parse_capability(chip: Chip) -> tuple[int, int]:
    major, minor = (chip.capability or "").split(".")
    return int(major), int(minor)


# the data


@pytest.mark.measures
def test_reading_all_chips_takes_less_than_15_ms() -> None:
    read = load_chips.__wrapped__

    def cpu_seconds() -> float:
        started = time.process_time()
        read()
        return time.process_time() - started

    assert min(cpu_seconds() for _ in range(5)) < 0.015


def test_names_are_unique_and_in_file_order() -> None:
    text = (ROOT / "src/bedplate/facts/data/chips.json").read_text(encoding="utf-8")
    assert re.findall(r'\{"name": "([^"]+)"', text) == list(load_chips())


def test_every_chip_has_its_figures_and_a_source() -> None:
    for chip in ALL:
        assert chip.source.strip(), chip.name
        assert chip.bandwidth_gb_s > 0, chip.name
        assert 2015 < chip.year < 2027, chip.name
        assert chip.kind == "cpu" or chip.memory_gib or chip.memory_options_gib, chip.name
        assert all(rate > 0 for rate in chip.dense_tera_ops.values()), chip.name
        assert chip.watts is None or 1 < chip.watts <= 1500, chip.name
        if chip.kind == "cpu":
            assert chip.cores and chip.threads and chip.threads >= chip.cores and chip.arch, chip.name
        if chip.unified:
            assert chip.cores and chip.arch and chip.memory_options_gib, chip.name
        if chip.vendor == "nvidia" and chip.kind != "cpu":
            assert chip.capability, chip.name
        if chip.vendor == "amd" and chip.kind != "cpu":
            assert chip.gfx, chip.name


def test_bandwidth_is_width_times_rate() -> None:
    for chip in ALL:
        if chip.memory_bits is None or chip.memory_mt_s is None:
            assert chip.memory_type is not None and ("HBM" in chip.memory_type or chip.name == "NVIDIA Grace"), (
                chip.name
            )
            continue
        computed = chip.memory_bits / 8 * chip.memory_mt_s / 1000
        assert chip.bandwidth_gb_s == pytest.approx(computed, rel=0.025), chip.name  # Apple rounds 102.4 to 100


def test_bandwidth_is_plausible_for_the_kind_of_memory() -> None:
    for chip in ALL:
        kind = chip.memory_type or ""
        if kind.startswith("HBM"):
            assert 700 <= chip.bandwidth_gb_s <= 8000, chip.name
        elif kind.startswith("GDDR"):
            assert 100 <= chip.bandwidth_gb_s <= 1800, chip.name
        else:
            assert 10 <= chip.bandwidth_gb_s <= 850, chip.name


def test_reported_memory_is_slightly_below_the_nominal_size() -> None:
    for chip in ALL:
        if chip.reported_mib is not None:
            assert chip.memory_gib is not None, chip.name
            assert 0.93 <= chip.reported_mib / 1024 / chip.memory_gib <= 1.0, chip.name


def test_rate_ratios_match_the_architecture() -> None:
    """Dense rates. A sparse figure would be twice the allowed ratio."""
    for chip in CUDA:
        rate = chip.dense_tera_ops
        if "fp16" in rate and "fp32" in rate:
            assert 1.95 <= rate["fp16"] / rate["fp32"] <= 40, chip.name
        if parse_capability(chip) >= (8, 0) and "fp16" in rate:
            assert rate["bf16"] == rate["fp16"], chip.name
        if "tf32" in rate:
            assert rate["fp16"] == pytest.approx(2 * rate["tf32"], rel=0.02), chip.name
        if "fp8" in rate and "fp16" in rate:
            assert rate["fp8"] == pytest.approx(2 * rate["fp16"], rel=0.02), chip.name
        if "fp4" in rate and "fp8" in rate:
            assert 1.95 <= rate["fp4"] / rate["fp8"] <= 4.1, chip.name
        if "int8" in rate and "fp8" in rate:
            assert rate["int8"] >= rate["fp8"] * 0.99, chip.name


def test_a_rate_exists_only_if_the_architecture_supports_the_type() -> None:
    for chip in ALL:
        for name in ("bf16", "fp8", "fp4"):
            if name in chip.dense_tera_ops:
                assert name in chip.features, chip.name


@pytest.mark.parametrize(
    ("name", "features"),
    [
        ("NVIDIA T4", set()),
        ("NVIDIA A100 SXM 80GB", {"bf16", "mig"}),
        ("NVIDIA A10", {"bf16"}),
        ("NVIDIA L40S", {"bf16", "fp8"}),
        ("NVIDIA H100 SXM 80GB", {"bf16", "fp8", "mig"}),
        ("NVIDIA B200 SXM 180GB", {"bf16", "fp8", "fp4", "mig"}),
        ("NVIDIA GeForce RTX 5090", {"bf16", "fp8", "fp4"}),
        ("NVIDIA RTX PRO 6000 Blackwell Server", {"bf16", "fp8", "fp4", "mig"}),
        ("AMD Instinct MI250X", {"bf16"}),
        ("AMD Instinct MI300X", {"bf16", "fp8"}),
        ("AMD Instinct MI355X", {"bf16", "fp8", "fp4"}),
        ("AMD Radeon RX 6800", set()),
        ("Intel Gaudi 3", {"bf16", "fp8"}),
    ],
)
def test_features_follow_from_the_architecture(name: str, features: set[str]) -> None:
    assert load_chips()[name].features == features


@pytest.mark.parametrize(
    ("name", "gib", "gb_s", "fp16", "link_gb_s"),
    [
        ("NVIDIA H100 SXM 80GB", 80, 3350, 989.4, 450),
        ("NVIDIA H100 PCIe 80GB", 80, 2000, 756.5, 300),
        ("NVIDIA H200 SXM 141GB", 141, 4800, 989.4, 450),
        ("NVIDIA A100 SXM 40GB", 40, 1555, 312, 300),
        ("NVIDIA L4", 24, 300, 121, None),
        ("NVIDIA GeForce RTX 4090", 24, 1008, 165.2, None),
        ("NVIDIA GeForce RTX 3090", 24, 936, 71.2, 56.25),
        ("AMD Instinct MI300X", 192, 5300, 1307.4, 448),
        ("AMD Radeon RX 7900 XTX", 24, 960, 122.8, None),
        ("Intel Data Center GPU Max 1550", 64, 1638.4, 419.5, None),
    ],
)
def test_figures_match_the_data_sheets(
    name: str, gib: float, gb_s: float, fp16: float, link_gb_s: float | None
) -> None:
    chip = load_chips()[name]
    assert chip.memory_bytes == gib * GIB
    assert chip.bandwidth_bytes_s == pytest.approx(gb_s * 1e9)
    assert chip.get_ops_s("fp16") == pytest.approx(fp16 * 1e12)
    assert (chip.link.gb_s if chip.link else None) == link_gb_s


def test_pcie_is_one_direction_after_encoding() -> None:
    assert load_chips()["NVIDIA H100 SXM 80GB"].pcie_bytes_s == pytest.approx(63.0e9, rel=0.001)
    assert load_chips()["Apple M3 Max (40-core GPU)"].pcie_bytes_s is None


def test_an_unknown_rate_is_none() -> None:
    assert load_chips()["NVIDIA A100 SXM 80GB"].get_ops_s("fp8") is None
    assert load_chips()["Apple M5 (10-core GPU)"].get_ops_s("fp16") is None


# names


def test_every_name_finds_its_chip() -> None:
    for chip in ALL:
        match = find_chip(chip.name)
        assert match.chip == chip
        assert match.count == 1
        assert not match.guessed


def test_every_driver_name_finds_a_chip_that_reports_it() -> None:
    for chip in ALL:
        for name in chip.driver_names:
            for text in (name, name.upper(), f"  {name} "):
                match = find_chip(text)
                assert name in match.chip.driver_names
                assert match.guessed == (sum(name in other.driver_names for other in ALL) > 1), name


def test_reported_memory_distinguishes_chips_with_the_same_name() -> None:
    for chip in ALL:
        for name in chip.driver_names:
            others = [other for other in ALL if name in other.driver_names and other.memory_gib != chip.memory_gib]
            if others and chip.reported_bytes is not None:
                assert find_chip(name, memory_bytes=chip.reported_bytes).chip.memory_gib == chip.memory_gib


def test_every_alias_finds_its_chip_or_lists_it_as_a_candidate() -> None:
    for chip in ALL:
        for alias in chip.aliases:
            try:
                found = [find_chip(alias).chip.name]
            except UsageError as error:
                found = [error.message]
            match = find_chip(alias, guess=True)
            shared = [other.name for other in ALL if alias in other.aliases]
            assert chip.name in found[0] or found[0] in shared
            assert match.chip.name in shared


@pytest.mark.parametrize(
    ("text", "count", "name"),
    [
        ("8x H100 SXM", 8, "NVIDIA H100 SXM 80GB"),
        ("8 x h100-sxm5", 8, "NVIDIA H100 SXM 80GB"),
        ("4 × RTX 4090", 4, "NVIDIA GeForce RTX 4090"),
        ("two RTX 3090", 2, "NVIDIA GeForce RTX 3090"),
        ("a pair of RTX 3090", 2, "NVIDIA GeForce RTX 3090"),
        ("Dual RTX 3090", 2, "NVIDIA GeForce RTX 3090"),
        ("quad L40S", 4, "NVIDIA L40S"),
        ("eight H100 SXM", 8, "NVIDIA H100 SXM 80GB"),
        ("RTX 3090 (x2)", 2, "NVIDIA GeForce RTX 3090"),
        ("H100 SXM (8)", 8, "NVIDIA H100 SXM 80GB"),
        ("Xeon Platinum 8480+ (dual socket)", 2, "Intel Xeon Platinum 8480+"),
        ("EPYC 9654, 2 sockets", 2, "AMD EPYC 9654"),
        ("Arc Pro B60 Dual", 1, "Intel Arc Pro B60 Dual 48GB"),
        ("2xA100-SXM4-80GB", 2, "NVIDIA A100 SXM 80GB"),
        ("7900 XTX", 1, "AMD Radeon RX 7900 XTX"),
        ("RX 7900 XTX", 1, "AMD Radeon RX 7900 XTX"),
        ("2x 7900 XTX", 2, "AMD Radeon RX 7900 XTX"),
        ("2 x 7900 XT", 2, "AMD Radeon RX 7900 XT"),
        ("7900 XTX x2", 2, "AMD Radeon RX 7900 XTX"),
        ("2x 4090", 2, "NVIDIA GeForce RTX 4090"),
        ("h100 sxm*8", 8, "NVIDIA H100 SXM 80GB"),
        ("MI300X x8", 8, "AMD Instinct MI300X"),
        ("8*MI300X", 8, "AMD Instinct MI300X"),
        ("128x NVIDIA H100 80GB HBM3", 128, "NVIDIA H100 SXM 80GB"),
        ("L40Sx4", 4, "NVIDIA L40S"),
        ("4090", 1, "NVIDIA GeForce RTX 4090"),
        ("rtx4090", 1, "NVIDIA GeForce RTX 4090"),
        ("RTX 4090 24GB", 1, "NVIDIA GeForce RTX 4090"),
        ("4090 24 GB", 1, "NVIDIA GeForce RTX 4090"),
        ("rtx4070tisuper", 1, "NVIDIA GeForce RTX 4070 Ti SUPER"),
        ("GeForce RTX 4090 Laptop GPU", 1, "NVIDIA GeForce RTX 4090 Laptop"),
        ("4060 mobile", 1, "NVIDIA GeForce RTX 4060 Laptop"),
        ("A100 PCIe 40GB", 1, "NVIDIA A100 PCIe 40GB"),
        ("h100 94gb", 1, "NVIDIA H100 NVL 94GB"),
        ("3080 12GB", 1, "NVIDIA GeForce RTX 3080 12GB"),
        ("RTX 6000 48GB", 1, "NVIDIA RTX 6000 Ada"),
        ("H100 80GB HBM3", 1, "NVIDIA H100 SXM 80GB"),
        ("GH200 480GB", 1, "NVIDIA GH200 96GB"),
        ("B200 192GB", 1, "NVIDIA B200 SXM 180GB"),
        ("M3 Max 36GB", 1, "Apple M3 Max (30-core GPU)"),
        ("M3 Max 64GB", 1, "Apple M3 Max (40-core GPU)"),
        ("m4 max 128 gb", 1, "Apple M4 Max (40-core GPU)"),
        ("Apple M1 7-Core GPU 8GB", 1, "Apple M1 (7-core GPU)"),
        ("M2 Ultra 60-core", 1, "Apple M2 Ultra (60-core GPU)"),
        ("AMD Ryzen AI Max+ 395 (Radeon 8060S, 128GB LPDDR5X)", 1, "AMD Ryzen AI Max+ 395"),
        ("strix halo", 1, "AMD Ryzen AI Max+ 395"),
        ("DGX Spark", 1, "NVIDIA GB10"),
        ("Radeon RX 7900 XTX (RADV NAVI31)", 1, "AMD Radeon RX 7900 XTX"),
        ("Intel(R) Xeon(R) Gold 6430 CPU @ 2.10GHz", 1, "Intel Xeon Gold 6430"),
        ("AMD EPYC 9654 96-Core Processor", 1, "AMD EPYC 9654"),
        ("AMD Ryzen 7 7840U with Radeon 780M Graphics", 1, "AMD Ryzen 7 7840U"),
        ("13th Gen Intel(R) Core(TM) i9-13900K", 1, "Intel Core i9-13900K"),
        ("11th Gen Intel(R) Core(TM) i7-1165G7 @ 2.80GHz", 1, "Intel Core i7-1165G7"),
        ("p300c", 1, "Tenstorrent Blackhole p300"),
        ("Cortex-A76 (Raspberry Pi 5 Model B Rev 1.3)", 1, "Raspberry Pi 5"),
        ("Raspberry Pi 5 (Cortex-A76)", 1, "Raspberry Pi 5"),
        ("[MAXSUN] MS-Intel Arc Pro B60 Dual 48G Turbo", 1, "Intel Arc Pro B60 Dual 48GB"),
    ],
)
def test_common_and_driver_names_find_their_chip(text: str, count: int, name: str) -> None:
    match = find_chip(text)
    assert (match.count, match.chip.name) == (count, name)
    assert match.counted == (count != 1)


def test_a_card_with_several_devices_counts_them_all() -> None:
    assert find_chip("2x A16").devices == 8
    assert find_chip("4x MI250X 128GB").devices == 8


@pytest.mark.parametrize(
    ("gib", "name"), [(24, "AMD Radeon RX 7900 XTX"), (20, "AMD Radeon RX 7900 XT"), (16, "AMD Radeon RX 7900 GRE")]
)
def test_memory_distinguishes_chips_with_the_same_pci_name(gib: int, name: str) -> None:
    text = "Navi 31 [Radeon RX 7900 XT/7900 XTX/7900 GRE/7900M]"
    assert find_chip(text, memory_bytes=gib * GIB - (16 << 20)).chip.name == name
    assert find_chip(text).guessed


def test_a_drivers_core_count_selects_the_variant_if_known() -> None:
    assert find_chip("NVIDIA GeForce RTX 3080", memory_bytes=12288 << 20).chip.bandwidth_gb_s == 912
    assert find_chip("Apple M3 Max 30-core GPU", memory_bytes=96 * GIB).chip.bandwidth_gb_s == 300
    assert find_chip("Apple M3 Max 35-core GPU", memory_bytes=64 * GIB).chip.bandwidth_gb_s == 400


@pytest.mark.parametrize(
    "name", ["NVIDIA Graphics Device", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "Intel(R) Xeon(R) Processor"]
)
def test_a_driver_may_report_an_unlisted_chip(name: str) -> None:
    with pytest.raises(UsageError, match="unknown chip"):
        find_chip(name, memory_bytes=40 * GIB)


def test_a_stated_memory_size_is_kept() -> None:
    assert find_chip("M4 Max 64GB").memory_bytes == 64 * GIB
    assert find_chip("M4 Max 40-core").memory_bytes is None


@pytest.mark.parametrize("text", ["RTX PRO 6000 Blackwell", "4x RTX PRO 6000", "rtx pro 6000 96GB"])
def test_the_server_form_of_rtx_pro_6000_is_assumed_and_noted(text: str) -> None:
    """All forms have the same memory and bandwidth."""
    found = find_chip(text)
    assert found.chip.name == "NVIDIA RTX PRO 6000 Blackwell Server"
    for other in ("Workstation", "Max-Q"):
        name = f"NVIDIA RTX PRO 6000 Blackwell {other}"
        assert name in (found.note or "") and find_chip(name).chip.name == name


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("rtx pro 5000", ["NVIDIA RTX PRO 5000 Blackwell 48GB", "NVIDIA RTX PRO 5000 Blackwell 72GB"]),
        ("rtx 6000", ["NVIDIA RTX 6000 Ada", "NVIDIA Quadro RTX 6000"]),
        ("rtx 3080", ["NVIDIA GeForce RTX 3080 10GB", "NVIDIA GeForce RTX 3080 12GB"]),
        ("4060 ti", ["NVIDIA GeForce RTX 4060 Ti 16GB", "NVIDIA GeForce RTX 4060 Ti 8GB"]),
        ("m3 max", ["Apple M3 Max (40-core GPU)", "Apple M3 Max (30-core GPU)"]),
    ],
)
def test_an_ambiguous_name_is_a_usage_error(text: str, names: list[str]) -> None:
    with pytest.raises(UsageError, match="is ambiguous") as caught:
        find_chip(text)
    for name in names:
        assert name in caught.value.message
        assert f"“{name}”" in (caught.value.hint or "")
    assert caught.value.exit_code == 2
    for name in names:
        assert find_chip(name).chip.name == name


@pytest.mark.parametrize(
    ("text", "count", "name", "other"),
    [
        ("h100", 1, "NVIDIA H100 SXM 80GB", "NVIDIA H100 NVL 94GB"),
        ("8x h100 80GB", 8, "NVIDIA H100 SXM 80GB", "NVIDIA H100 PCIe 80GB"),
        ("8 H100", 8, "NVIDIA H100 SXM 80GB", "NVIDIA H100 PCIe 80GB"),
        ("h200", 1, "NVIDIA H200 SXM 141GB", "NVIDIA H200 NVL 141GB"),
        ("A100 80GB", 1, "NVIDIA A100 SXM 80GB", "NVIDIA A100 PCIe 80GB"),
        # What fits the smaller of two fits both.
        ("4 a100", 4, "NVIDIA A100 SXM 40GB", "NVIDIA A100 SXM 80GB"),
        ("V100", 1, "NVIDIA V100 SXM2 16GB", "NVIDIA V100 SXM2 32GB"),
    ],
)
def test_one_form_of_a_data_centre_chip_is_assumed_and_noted(text: str, count: int, name: str, other: str) -> None:
    match = find_chip(text)
    assert (match.count, match.chip.name) == (count, name)
    assert f"assuming {name}" in (match.note or "") and other in (match.note or "")


@pytest.mark.parametrize(
    ("text", "count", "name"),
    [
        ("8 H100 SXM", 8, "NVIDIA H100 SXM 80GB"),
        ("2 4090", 2, "NVIDIA GeForce RTX 4090"),
        ("8 Gaudi3", 8, "Intel Gaudi 3"),
        # Numbers that belong to a name are not counts.
        ("6000 Ada", 1, "NVIDIA RTX 6000 Ada"),
        ("7900 XTX", 1, "AMD Radeon RX 7900 XTX"),
    ],
)
def test_a_count_may_stand_before_a_name_without_a_sign(text: str, count: int, name: str) -> None:
    match = find_chip(text)
    assert (match.count, match.chip.name) == (count, name)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("MacBook Pro M3 Max 64GB", "Apple M3 Max (40-core GPU)"),
        ("MacBook Pro 16-inch M4 Max 128GB", "Apple M4 Max (40-core GPU)"),
        ("MacBook Air M2", "Apple M2 (10-core GPU)"),
        ("mac mini m4 pro 64gb", "Apple M4 Pro (20-core GPU)"),
        ("Mac Studio M2 Ultra", "Apple M2 Ultra (76-core GPU)"),
        ("Framework Desktop 128GB", "AMD Ryzen AI Max+ 395"),
        ("HP ZBook Ultra G1a", "AMD Ryzen AI Max+ 395"),
        ("Razer Blade 16 RTX 4090", "NVIDIA GeForce RTX 4090 Laptop"),
        ("Lenovo Legion Pro 7i RTX 4080", "NVIDIA GeForce RTX 4080 Laptop"),
        ("Core Ultra 7 155H", "Intel Core Ultra 7 155H"),
        ("Core Ultra 5 125H", "Intel Core Ultra 5 125H"),
        ("12th Gen Intel(R) Core(TM) i7-1260P", "Intel Core i7-1260P"),
        ("i5-8250U", "Intel Core i5-8250U"),
        ("Intel(R) Core(TM) i7-8550U CPU @ 1.80GHz", "Intel Core i7-8550U"),
        ("ThinkPad T14 Ryzen 7 PRO 7840U", "AMD Ryzen 7 7840U"),
        ("ThinkPad X1 Carbon i7-1260P", "Intel Core i7-1260P"),
        ("Dell XPS 13 Core Ultra 7 155H", "Intel Core Ultra 7 155H"),
        ("Framework Laptop 13 Ryzen 7 7840U", "AMD Ryzen 7 7840U"),
        ("HP EliteBook 840 G10 i5-1335U 16GB", "Intel Core i5-1335U"),
        ("GTX 1080", "NVIDIA GeForce GTX 1080"),
        ("GTX 1080 Ti", "NVIDIA GeForce GTX 1080 Ti"),
        ("1070ti", "NVIDIA GeForce GTX 1070 Ti"),
        ("GTX 1060 6GB", "NVIDIA GeForce GTX 1060 6GB"),
        ("MI50 32GB", "AMD Instinct MI50 32GB"),
    ],
)
def test_products_are_known_by_their_chips(text: str, name: str) -> None:
    assert find_chip(text).chip.name == name


def test_a_guess_uses_the_most_common_chip_and_notes_it() -> None:
    match = find_chip("8x H100", guess=True)
    assert match.chip.name == "NVIDIA H100 SXM 80GB"
    assert match.guessed
    assert "NVIDIA H100 PCIe 80GB" in (match.note or "")
    assert not find_chip("8x H100 PCIe", guess=True).guessed


def test_variants_with_the_same_driver_name_are_not_ambiguous() -> None:
    match = find_chip("m1 max")
    assert match.chip.name == "Apple M1 Max (32-core GPU)"
    assert "24-core" in (match.note or "")


def test_ram_selects_a_chip_only_if_the_chip_uses_it() -> None:
    assert find_chip("Apple M3 Max", ram_bytes=36 * GIB).chip.bandwidth_gb_s == 300
    assert find_chip("Apple M3 Max", ram_bytes=64 * GIB).chip.bandwidth_gb_s == 400
    with pytest.raises(UsageError, match="is ambiguous"):
        find_chip("rtx 3080", ram_bytes=12 * GIB)


@pytest.mark.parametrize("text", ["h100 96gb", "M3 Max 32GB", "RTX 4090 48GB", "A100 64GB", "M1 Max 20-core"])
def test_a_nonexistent_size_or_core_count_is_rejected(text: str) -> None:
    with pytest.raises(UsageError, match="there is none with") as caught:
        find_chip(text)
    assert "use one of" in (caught.value.hint or "")
    assert find_chip(text, guess=True).guessed


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("RTX 5090 Ti", "NVIDIA GeForce RTX 5090"),
        ("RTX 4095", "NVIDIA GeForce RTX 4090"),
        ("MI300Z", "AMD Instinct MI300X"),
        ("Apple M3 Maxx", "Apple M3 Max"),
        ("titan v", "NVIDIA TITAN RTX"),
        ("RTX 9999", "NVIDIA GeForce RTX 5090"),
        ("Radeon 9999", "AMD Radeon RX 9070"),
    ],
)
def test_an_unknown_chip_is_rejected_with_similar_names(text: str, nearest: str) -> None:
    for guess in (False, True):
        with pytest.raises(UsageError, match="unknown chip") as caught:
            find_chip(text, guess=guess)
        assert nearest in (caught.value.hint or "")


@pytest.mark.parametrize(
    "text", ["ThinkPad X1", "Dell XPS 15", "ROG Zephyrus G14", "MacBook Air", "Framework Laptop 13"]
)
def test_a_product_without_a_chip_is_told_how_to_name_one(text: str) -> None:
    with pytest.raises(UsageError, match=f"“{text}” names a product and no known chip") as caught:
        find_chip(text)
    named = (caught.value.hint or "").rpartition("for example: ")[2]
    assert named.startswith(text) and find_chip(named)


@pytest.mark.parametrize("text", ["", "   ", "8x", "x", "GPU", "NVIDIA", "0x H100 SXM", "80GB", "()", "a" * 1000])
def test_an_empty_name_is_rejected(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_chip(text)
    assert caught.value.hint


@given(st.text(max_size=60), st.booleans())
def test_any_text_gives_a_chip_or_a_usage_error(text: str, guess: bool) -> None:
    try:
        match = find_chip(text, guess=guess)
    except UsageError as error:
        assert error.message and error.hint
    else:
        assert match.count >= 1 and match.chip.name in load_chips()


@given(st.sampled_from(ALL), st.integers(2, 9999), st.sampled_from(["{n}x {c}", "{n} × {c}", "{c} x{n}", "{c} *{n}"]))
def test_a_count_never_changes_the_chip(chip: Chip, count: int, form: str) -> None:
    match = find_chip(form.format(n=count, c=chip.name))
    assert (match.count, match.chip) == (count, chip)


@given(st.sampled_from(ALL), st.sampled_from(["-", "_", "  ", "/"]), st.booleans())
def test_case_and_punctuation_make_no_difference(chip: Chip, gap: str, upper: bool) -> None:
    text = chip.name.replace(" ", gap)
    assert find_chip(text.upper() if upper else text.lower()).chip == chip


# compared with published tables


# the chip of an accelerator


@pytest.mark.parametrize(
    ("card", "name", "kind"),
    [
        (Accelerator(name="NVIDIA H200", vendor="nvidia"), "NVIDIA H200 SXM 141GB", "datacenter"),
        (Accelerator(name="NVIDIA A100-PCIE-40GB", vendor="nvidia"), "NVIDIA A100 PCIe 40GB", "datacenter"),
        (Accelerator(name="NVIDIA GeForce RTX 4090", vendor="nvidia"), "NVIDIA GeForce RTX 4090", "consumer"),
        (Accelerator(name="AMD Instinct MI300X", vendor="amd"), "AMD Instinct MI300X", "datacenter"),
        (Accelerator(name="Apple M4 Max", vendor="apple", compute_units=32), "Apple M4 Max (32-core GPU)", "apple"),
        (Accelerator(name="Apple M4 Max", vendor="apple", compute_units=40), "Apple M4 Max (40-core GPU)", "apple"),
        (Accelerator(name="H100", vendor="nvidia"), "NVIDIA H100 SXM 80GB", "datacenter"),
    ],
)  # fmt: skip
def test_an_accelerator_has_its_chip(card: Accelerator, name: str, kind: str) -> None:
    chip = find_accelerator_chip(card)
    assert chip is not None
    assert (chip.name, chip.kind) == (name, kind)


def test_hypothetical_hardware_has_its_chips() -> None:
    chip = find_accelerator_chip(make_simulated_hardware({"accelerator": "B200", "count": 8}).accelerators[7])
    assert chip is not None
    assert chip.get_ops_s("fp4") and chip.features >= {"fp8", "fp4", "bf16"}


def test_a_slice_has_its_share_of_the_card() -> None:
    """3g.40gb of an A100: three of seven parts of the multiprocessors, four of eight of the memory (MIG User Guide)."""
    card = find_chip("NVIDIA A100-SXM4-80GB").chip
    part = find_accelerator_chip(
        Accelerator(name="NVIDIA A100-SXM4-80GB MIG 3g.40gb", vendor="nvidia", index=8, parent=0)
    )
    assert part is not None
    assert part.bandwidth_gb_s == card.bandwidth_gb_s / 2
    assert part.dense_tera_ops["bf16"] == pytest.approx(card.dense_tera_ops["bf16"] * 3 / 7)
    assert (part.memory_gib, part.features, part.link) == (40, card.features, None)


@given(st.text(max_size=400), st.integers(0, 1 << 60) | st.none())
def test_chip_of_never_raises(name: str, memory_bytes: int | None) -> None:
    card = Accelerator(name=name, vendor="other", memory_bytes=memory_bytes)
    assert isinstance(find_accelerator_chip(card), Chip | None)
    assert find_accelerator_chip(Accelerator(name="Voodoo 2", vendor="other")) is None


def read_spellings() -> Iterator[tuple[str, str]]:
    for path in sorted(TRUTH.glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                yield path.name, row.get("hardware") or row.get("chip") or ""


def test_every_spelling_of_the_public_measurements_is_understood(capsys: pytest.CaptureFixture[str]) -> None:
    if not TRUTH.is_dir():
        pytest.skip("shared/truth is not here: no published spellings to try")
    rows = list(read_spellings())
    found: dict[str, str] = {}
    for _, text in rows:
        if text not in found:
            found[text] = find_chip(text, guess=True).chip.name
    kinds = len(set(found.values()))
    with capsys.disabled():
        print(f"\n{len(found)} spellings of hardware in {len(rows)} rows, all understood: {kinds} chips")
    assert len(found) > 80


# The table says how fast FP8 weights run; the chip has no FP8 units and computes in FP16.
WITHOUT_UNITS = {("Intel Arc Pro B60 24GB", "fp8")}


def test_figures_agree_with_the_public_table() -> None:
    if not TRUTH.is_dir():
        pytest.skip("shared/truth is not here: no table to compare with")
    with (TRUTH / "hardware_specs.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            chip = find_chip(row["chip"], guess=True).chip
            bandwidth = float(re.match(r"[0-9.]+", row["memory_bandwidth_gb_s"])[0])  # type: ignore[index]
            assert chip.bandwidth_gb_s == pytest.approx(bandwidth, rel=0.02), row["chip"]
            if "GiB" in row["memory_unit"] and chip.reported_bytes is not None:
                assert chip.reported_bytes / GIB == pytest.approx(float(row["memory"]), rel=0.07), row["chip"]
            for name in ("bf16", "fp8", "fp4"):
                stated = row[f"{name}_dense_tflops"]
                if stated and (row["chip"], name) not in WITHOUT_UNITS:
                    assert chip.dense_tera_ops[name] == pytest.approx(float(stated), rel=0.02), (row["chip"], name)


# the page


PAGE_RATES: tuple[DataType, ...] = ("fp16", "fp8", "fp4")


def read_page_rows() -> list[str]:
    lines = []
    for chip in ALL:
        sizes = chip.memory_options_gib or (() if chip.memory_gib is None else (chip.memory_gib,))
        cells = [
            chip.name,
            "/".join(f"{size:g}" for size in sizes) or "–",
            f"{chip.bandwidth_gb_s:g}",
            *("–" if (rate := chip.dense_tera_ops.get(name)) is None else f"{rate:g}" for name in PAGE_RATES),
            f"{chip.link.kind} {chip.link.gb_s:g}" if chip.link else "–",
            chip.capability or chip.gfx or "–",
            "yes" if chip.verify else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def test_the_page_lists_every_chip_with_its_figures() -> None:
    listed = set((ROOT / "docs/chips.md").read_text(encoding="utf-8").splitlines())
    missing = [line for line in read_page_rows() if line not in listed]
    assert not missing, "docs/chips.md lacks these lines:\n" + "\n".join(missing)


def test_the_page_says_how_many_chips_could_not_be_verified() -> None:
    text = (ROOT / "docs/chips.md").read_text(encoding="utf-8")
    assert f"({sum(chip.verify for chip in ALL)} chips)" in text
    assert f"what vendors say of {len(ALL)} chips" in text
