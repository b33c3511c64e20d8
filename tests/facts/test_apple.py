"""Apple chips, from captured output of real Macs (see tests/captures)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bedplate.facts import apple
from bedplate.facts.apple import (
    MacProfile,
    find_wired_limit,
    make_apple_accelerator,
    parse_core_kinds,
    parse_gpu_cores,
    parse_profiler,
    read_apple,
)
from bedplate.facts.chips import find_chip
from bedplate.facts.cpu import parse_sysctl
from bedplate.facts.devices import FoundAccelerators
from bedplate.facts.hypothetical import estimate_shared_limit

CAPTURES = Path(__file__).parent.parent / "captures"
GIB = 1 << 30


def read_capture(name: str) -> str:
    return (CAPTURES / name).read_text()


class TestProfiler:
    def test_chip_and_gpu_are_parsed(self) -> None:
        assert parse_profiler(read_capture("apple/profiler-hardware-displays-m2-pro.json")) == MacProfile(
            chip="Apple M2 Pro",
            memory_bytes=16 * GIB,
            performance_cores=8,
            efficiency_cores=4,
            gpu_cores=19,
        )

    def test_either_half_is_parsed_alone(self) -> None:
        ultra = parse_profiler(read_capture("apple/profiler-hardware-m2-ultra.json"))
        assert (ultra.chip, ultra.memory_bytes, ultra.performance_cores) == ("Apple M2 Ultra", 64 * GIB, 16)
        screen = parse_profiler(read_capture("apple/profiler-displays-m2-max.json"))
        assert (screen.chip, screen.gpu_cores, screen.metal) == ("Apple M2 Max", 30, "Metal 4")
        assert parse_profiler(None) == parse_profiler("") == parse_profiler("{}") == MacProfile()

    def test_a_card_of_another_vendor_is_ignored(self) -> None:
        """The card of a Mac Pro or an Intel Mac; constructed."""
        other = {"SPDisplaysDataType": [{"_name": "AMD Radeon Pro 5500M", "spdisplays_vendor": "sppci_vendor_amd"}]}
        assert parse_profiler(json.dumps(other)) == MacProfile()

    @pytest.mark.parametrize(
        ("text", "kinds"),
        [
            ("proc 8:4:4", (4, 4)),
            ("proc 16:12:4", (12, 4)),
            ("proc 24:16:8:0", (16, 8)),
            ("proc 12:0:8:4", (8, 4)),
            ("proc 10:10:0", (10, 0)),
            ("proc 8:4:9", (None, None)),
            (8, (None, None)),
            (None, (None, None)),
        ],
    )
    def test_core_kinds_are_parsed(self, text: object, kinds: tuple[int | None, int | None]) -> None:
        assert parse_core_kinds(text) == kinds

    def test_gpu_cores_are_read_from_the_registry(self) -> None:
        assert parse_gpu_cores(read_capture("apple/ioreg-m4.txt")) == 10
        assert parse_gpu_cores("") is None
        assert parse_gpu_cores(None) is None

    @given(
        st.recursive(
            st.none() | st.integers() | st.text(max_size=8),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["SPHardwareDataType", "SPDisplaysDataType", "chip_type", "sppci_cores"]),
                    inner,
                )
            ),
        )
    )
    def test_json_of_any_shape_is_read(self, said: Any) -> None:
        parse_profiler(json.dumps(said))

    @given(st.text())
    def test_no_text_makes_the_parsers_raise(self, text: str) -> None:
        parse_profiler(text)
        parse_gpu_cores(text)
        parse_core_kinds(text)
        make_apple_accelerator(parse_sysctl(text), MacProfile(), GIB)


class TestWiredLimit:
    def test_a_configured_limit_is_used_as_is(self) -> None:
        limit = find_wired_limit({"iogpu.wired_limit_mb": "26000"}, 32 * GIB)
        assert limit is not None
        assert (limit.value, limit.basis) == (26000 << 20, "reported")
        more = find_wired_limit({"iogpu.wired_limit_mb": "999999"}, 32 * GIB)
        assert more is not None and more.value == 32 * GIB

    @pytest.mark.parametrize(
        ("memory_gib", "seen_gib"),
        [
            (16, 10922.67 / 1024),  # M1 Pro: github.com/abetlen/llama-cpp-python issue 687
            (16, 11.84),  # M3: AlexsJones/llmfit pull request 754
            (32, 21845.34 / 1024),  # M1 Max: ggml-org/llama.cpp pull request 2011; M2 Max: ollama/ollama issue 434
            (64, 48.0),  # M1 Max: ggml-org/llama.cpp issue 1870
            (64, 55.7e9 / GIB),  # M4 Max: carloslfu/slotstream issue 22
            (128, 107.52),  # M5 Max, macOS 26: antirez/ds4 pull request 893
        ],
    )
    def test_the_estimated_default_covers_the_observed_limits(self, memory_gib: int, seen_gib: float) -> None:
        limit = find_wired_limit({"iogpu.wired_limit_mb": "0"}, memory_gib * GIB)
        assert limit is not None
        assert limit.basis == "estimate"
        assert limit.low * 0.9999 <= seen_gib * GIB <= limit.high

    def test_a_hypothetical_mac_uses_the_same_rule(self) -> None:
        for memory_gib in (8, 24, 36, 64, 512):
            chip = find_chip("Apple M3 Ultra 80-core").chip
            assert estimate_shared_limit(chip, memory_gib * GIB) == find_wired_limit({}, memory_gib * GIB)

    def test_without_a_memory_size_there_is_no_limit(self) -> None:
        assert find_wired_limit({}, None) is None


class TestAccelerator:
    def test_an_m2_shares_its_memory(self) -> None:
        sysctl = parse_sysctl(read_capture("sysctl/apple-m2.txt"))
        found = make_apple_accelerator(sysctl, MacProfile(), 12 * GIB, gpu_cores=10)
        assert found is not None
        assert (found.name, found.vendor, found.compute_units) == ("Apple M2", "apple", 10)
        assert (found.memory_bytes, found.free_bytes, found.unified_memory) == (24 * GIB, 12 * GIB, True)

    def test_free_memory_never_exceeds_the_gpu_limit(self) -> None:
        sysctl = parse_sysctl(read_capture("sysctl/apple-m2.txt")) | {"iogpu.wired_limit_mb": "8192"}
        found = make_apple_accelerator(sysctl, MacProfile(), 20 * GIB)
        assert found is not None and found.free_bytes == 8 * GIB

    def test_system_profiler_replaces_a_missing_sysctl(self) -> None:
        profile = parse_profiler(read_capture("apple/profiler-hardware-m2.json"))
        found = make_apple_accelerator({}, profile, 10 * GIB)
        assert found is not None
        assert (found.name, found.memory_bytes) == ("Apple M2", 16 * GIB)

    def test_an_intel_mac_has_no_accelerator(self) -> None:
        assert make_apple_accelerator(parse_sysctl(read_capture("sysctl/intel-mac.txt")), MacProfile(), GIB) is None


class TestReading:
    def test_system_profiler_runs_only_if_the_fast_sources_are_incomplete(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(apple, "read_sysctl", lambda: parse_sysctl(read_capture("sysctl/apple-m2.txt")))
        asked = []

        def ask(argv: Sequence[str]) -> str | None:
            asked.append(argv[0])
            return read_capture("apple/ioreg-m4.txt")

        assert read_apple(GIB, ask).accelerators[0].compute_units == 10
        assert asked == ["ioreg"]

    def test_a_mac_without_any_answer_gets_a_note(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(apple, "read_sysctl", dict)
        found = read_apple(GIB, lambda argv: None)
        assert found == FoundAccelerators(
            notes=("the chip could not be read: neither sysctl nor system_profiler answered",)
        )
