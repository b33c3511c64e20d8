"""GPU bandwidth through the driver's calls, with a driver whose timing is known."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bedplate.facts.measured import cuda
from bedplate.facts.measured.cuda import (
    CudaRequest,
    MeasuredCard,
    choose_buffer_bytes,
    compute_theoretical_bytes_s,
    match_devices,
    measure_cards,
    measure_durations,
)
from bedplate.facts.measured.driver import EXPLANATIONS, SIGNATURES, CudaDriver, CudaError
from bedplate.values import Accelerator

from .fake_cuda import GB, MIB, FakeCard, FakeCuda

ONE = (MeasuredCard(index=0, name="NVIDIA Fake"),)


def make_request(cards: tuple[MeasuredCard, ...] = ONE) -> CudaRequest:
    return CudaRequest(cards=cards, host_available_bytes=8 * 16 * MIB, when="2026-11-15")


def run(library: Any, cards: tuple[MeasuredCard, ...] = ONE) -> cuda.CudaResult:
    return measure_cards(library, make_request(cards), lambda share: None)


def test_a_copy_counts_both_directions_and_a_read_one() -> None:
    library = FakeCuda()
    (gpu,) = run(library).gpus
    assert gpu.copy_bytes_s is not None and gpu.copy_bytes_s.value == pytest.approx(1000 * GB, rel=0.01)
    assert gpu.read_bytes_s is not None and gpu.read_bytes_s.value == pytest.approx(1000 * GB, rel=0.01)
    assert gpu.read_bytes_s.basis == "measured" and "2026-11-15" in (gpu.read_bytes_s.source or "")


def test_transfers_count_one_direction() -> None:
    (gpu,) = run(FakeCuda()).gpus
    for figure in (gpu.to_device_pinned_bytes_s, gpu.from_device_pinned_bytes_s):
        assert figure is not None and figure.value == pytest.approx(25 * GB, rel=0.01)
    assert gpu.to_device_pageable_bytes_s is not None and gpu.from_device_pageable_bytes_s is not None


def test_at_most_40_percent_of_free_memory_is_used_and_all_is_freed() -> None:
    library = FakeCuda([FakeCard(free_bytes=1000 * MIB)])
    result = run(library)
    assert result.notes == ()
    assert 300 * MIB < library.most_bytes <= 400 * MIB
    assert library.left == []


@given(st.integers(0, 1 << 45), st.integers(1, 4))
def test_buffers_stay_within_the_share(free: int, count: int) -> None:
    size = choose_buffer_bytes(free, count)
    assert size is None or (size >= 64 * MIB and size * count <= 0.4 * free)


def test_no_managed_memory_is_allocated() -> None:
    library = FakeCuda()
    run(library)
    assert not [call for call in (*library.calls, *SIGNATURES) if "Managed" in call]


def test_the_theoretical_bandwidth_comes_from_clock_and_bus() -> None:
    (gpu,) = run(FakeCuda()).gpus
    assert gpu.theoretical_bytes_s == 4_916_736_000_000  # an H200's clock and bus
    assert compute_theoretical_bytes_s(None, 6144) is None and compute_theoretical_bytes_s(0, 0) is None


def test_a_kernel_that_did_not_read_everything_gives_no_figure() -> None:
    result = run(FakeCuda(skipped_rounds=1))
    assert result.gpus[0].read_bytes_s is None and result.gpus[0].copy_bytes_s is not None
    assert any("read bandwidth is not measured" in note and "wrong sums" in note for note in result.notes)


@pytest.mark.parametrize(
    "call", sorted(set(SIGNATURES) - {"cuGetErrorName", "cuCtxEnablePeerAccess", "cuMemcpyPeerAsync"})
)
def test_any_failed_call_becomes_a_note_and_leaks_nothing(call: str) -> None:
    library = FakeCuda(refuse={call: 2})
    result = run(library)
    harmless = {
        "cuDeviceGetName",
        "cuDeviceGetUuid",
        "cuDeviceCanAccessPeer",
        "cuDeviceGetAttribute",
        "cuDriverGetVersion",
    }
    releases = {
        name for name in SIGNATURES if "Free" in name or "Release" in name or "Destroy" in name or "Unload" in name
    }
    if call not in harmless | releases:
        assert result.notes and all("CUDA_ERROR_FAKE" in note for note in result.notes)
    if call not in releases:
        assert library.left == []


def test_a_call_missing_in_an_old_driver_is_a_note() -> None:
    class Old:
        def __init__(self) -> None:
            self.library = FakeCuda()

        def __getattr__(self, name: str) -> Any:
            if name == "cuMemcpyDtoDAsync_v2":
                raise AttributeError(name)
            return getattr(self.library, name)

    result = run(Old())
    assert result.gpus[0].copy_bytes_s is None and result.gpus[0].read_bytes_s is not None
    assert "not in this driver" in result.notes[0]


def test_too_little_free_memory_is_noted() -> None:
    result = run(FakeCuda([FakeCard(free_bytes=100 * MIB)]))
    assert result.gpus[0].copy_bytes_s is None
    assert all("not enough free memory" in note for note in result.notes) and len(result.notes) == 4


def test_no_driver_library_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Any:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(cuda, "load_driver", none)
    assert "libcuda.so.1" in cuda.measure_gpus(make_request(), lambda share: None).notes[0]


@pytest.mark.parametrize("code", [*EXPLANATIONS, 12345])
def test_every_error_names_its_call_and_meaning(code: int) -> None:
    with pytest.raises(CudaError) as caught:
        CudaDriver(FakeCuda(refuse={"cuInit": code}))
    assert "cuInit" in str(caught.value) and "CUDA_ERROR_FAKE" in str(caught.value)
    assert EXPLANATIONS.get(code, "the driver reported an error") in str(caught.value)


def test_cards_are_matched_by_uuid_in_any_order() -> None:
    first, second = bytes(range(16)), bytes(range(16, 32))
    cards = (
        MeasuredCard(index=0, name="a", uuid="GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"),
        MeasuredCard(index=1, name="b", uuid="GPU-10111213-1415-1617-1819-1a1b1c1d1e1f"),
    )
    assert [device for _, device in match_devices(cards, [(0, second.hex()), (1, first.hex())])] == [1, 0]
    assert [device for _, device in match_devices(cards, [(0, first.hex())])] == [0, None]


def test_cards_without_uuids_are_matched_by_position_if_the_counts_agree() -> None:
    cards = (MeasuredCard(index=3, name="a"), MeasuredCard(index=5, name="b"))
    assert [device for _, device in match_devices(cards, [(0, None), (1, None)])] == [0, 1]
    assert [device for _, device in match_devices(cards, [(0, None)])] == [None, None]


def test_a_card_hidden_from_cuda_is_noted() -> None:
    card = MeasuredCard(index=4, name="hidden", uuid="GPU-ffffffff-ffff-ffff-ffff-ffffffffffff")
    result = run(FakeCuda(), (card,))
    assert result.gpus == () and result.notes == ("GPU 4 is not measured: CUDA does not show it",)


def test_pairs_with_peer_access_are_measured_in_both_directions() -> None:
    cards = [FakeCard(uuid=bytes([number] * 16)) for number in (1, 2, 3)]
    known = tuple(MeasuredCard(index=10 + n, name="x", uuid=f"GPU-{bytes([n] * 16).hex()}") for n in (1, 2, 3))
    library = FakeCuda(cards, peers={(0, 1), (1, 0)})
    result = run(library, known)
    assert {(peer.source, peer.target) for peer in result.peers} == {(11, 12), (12, 11)}
    assert all(peer.bytes_s.value == pytest.approx(100 * GB, rel=0.01) for peer in result.peers)
    assert any("through the host" in note and "11–13" in note for note in result.notes)
    assert library.left == []


def test_peer_access_that_is_already_enabled_is_accepted() -> None:
    cards = [FakeCard(uuid=bytes([number] * 16)) for number in (1, 2)]
    known = tuple(MeasuredCard(index=n, name="x", uuid=f"GPU-{bytes([n] * 16).hex()}") for n in (1, 2))
    result = run(FakeCuda(cards, peers={(0, 1), (1, 0)}, refuse={"cuCtxEnablePeerAccess": 704}), known)
    assert len(result.peers) == 2
    refused = run(FakeCuda(cards, peers={(0, 1), (1, 0)}, refuse={"cuCtxEnablePeerAccess": 999}), known)
    assert refused.peers == () and len(refused.notes) == 2


def test_short_work_is_repeated_until_a_sample_is_long_enough() -> None:
    asks: list[float] = []

    def elapsed(ask: Any) -> float:
        before = len(asks)
        ask()
        return 0.001 * (len(asks) - before)

    took = measure_durations(elapsed, lambda: asks.append(1.0))
    assert took == pytest.approx([0.001] * cuda.SAMPLES)
    assert len(asks) == pytest.approx(0.1 / 0.001 + cuda.SAMPLES * 20, abs=2)


def test_a_stopped_clock_does_not_loop_forever() -> None:
    assert measure_durations(lambda ask: 0.0, lambda: None) == [0.0] * cuda.SAMPLES


def test_only_nvidia_cards_are_measured() -> None:
    cards = (
        Accelerator(name="a", vendor="amd", index=0),
        Accelerator(name="b", vendor="nvidia", index=0, uuid="GPU-1"),
    )
    assert cuda.make_request(cards, 1, "today").cards == (MeasuredCard(index=0, name="b", uuid="GPU-1"),)
