"""Settings of published runs: every spelling gives the same settings, and the estimate averages over unknown ones."""

from __future__ import annotations

import pytest

from bedplate.engines import load_engines
from bedplate.published import one_stream
from bedplate.published.predict import predict
from bedplate.published.rows import PublishedCase, RowPrediction, resolve
from bedplate.published.run_settings import read_run_settings

STRIX_HALO = {
    "hardware": "AMD Ryzen AI Max+ 395", "count": "1", "engine": "llama.cpp", "engine_version": "83bc2f28 (6077)",
    "backend": "ROCm", "model": "Llama-2-7B", "quantization": "Q4_K_M", "concurrency": "1", "prompt_tokens": "512",
    "output_tokens": "0", "context_depth": "0", "metric": "prefill_tok_s", "scenario": "llama-bench",
}  # fmt: skip


@pytest.mark.parametrize(
    "notes",
    [
        "fa=1; hipblaslt=1; n_ubatch=256; threads=8",
        "-fa 1 -ub 256 -t 8, ROCBLAS_USE_HIPBLASLT=1",
        "flash attention: on; hipBLASLt: enabled; ubatch 256; 8 threads",
        "--flash-attn on --ubatch-size 256 --threads 8 (with hipBLASLt)",
        "flash_attn=True | hipblaslt=yes | micro_batch=256 | n_threads=8",
    ],
)
def test_spellings_of_the_same_settings_agree(notes: str) -> None:
    found = read_run_settings({"notes": notes})
    assert found.flash_attention is True
    assert found.hipblaslt is True
    assert (found.micro_batch, found.threads) == (256, 8)


@pytest.mark.parametrize("notes", ["b=-b 256; fa=1", "n_batch=256", "-b 256 -ub 512", "b=256"])
def test_batch_is_not_the_micro_batch(notes: str) -> None:
    assert read_run_settings({"notes": notes}).batch == 256


@pytest.mark.parametrize("notes", ["fa=0; hipblaslt=", "no flash attention, without hipBLASLt", "-fa off; hipblaslt=0"])
def test_settings_that_are_off_are_known(notes: str) -> None:
    found = read_run_settings({"notes": notes})
    assert (found.flash_attention, found.hipblaslt) == (False, False)


def test_settings_that_no_text_mentions_are_unknown() -> None:
    found = read_run_settings({"notes": "affinity=mask; batch 1; fast; mmap=0", "engine_version": "0.6.3"})
    assert found == read_run_settings({})
    assert found.build is None


@pytest.mark.parametrize(
    ("version", "build", "year"),
    [("a4575513 (5863)", 5863, None), ("b7340", 7340, None), ("2026", None, 2026), ("11fb327bf (7941)", 7941, None)],
)
def test_builds_are_no_years_and_no_hashes(version: str, build: int | None, year: int | None) -> None:
    found = read_run_settings({"engine_version": version})
    assert (found.build, found.year) == (build, year)


def compute_prefill(**changes: str) -> float:
    found = predict(STRIX_HALO | changes)
    assert isinstance(found, RowPrediction), found
    return found.value


def test_same_measurement_gives_nearly_the_same_prediction_however_it_is_spelled() -> None:
    stated = compute_prefill(notes="fa=False; hipblaslt=; b=")
    assert compute_prefill(notes="flash attention off, no hipBLASLt") == pytest.approx(stated)
    assert compute_prefill(notes="", backend="llama.cpp-hip") == pytest.approx(stated, rel=0.25)


def test_unknown_settings_are_averaged() -> None:
    case = resolve(STRIX_HALO)
    assert isinstance(case, PublishedCase)
    choices = one_stream.list_choices(case)
    assert sum(choice.probability for choice in choices) == pytest.approx(1.0)
    assert {(choice.fused, choice.backend) for choice in choices} == {
        (fused, backend) for fused in (False, True) for backend in ("rocm", "rocm-lt")
    }
    without, with_library = compute_prefill(notes="fa=0; hipblaslt=0"), compute_prefill(notes="fa=0; hipblaslt=1")
    assert without < compute_prefill(notes="fa=0") < with_library


def test_library_multiplies_copies_of_quantized_weights_only_in_builds_without_own_kernels() -> None:
    engine = load_engines()["llama.cpp"]
    assert engine.get_library_tokens("rocm-lt", "rdna3", False, build=6077) == 64
    assert engine.get_library_tokens("rocm", "rdna3", False, build=7700) is None
    assert engine.get_library_tokens("cuda", "ada", False, year=2024) == 33
    assert engine.get_library_tokens("cuda", "ada", False) is None
    assert engine.get_library_tokens("vulkan", "rdna3", True) is None


def test_bf16_on_amd_with_vulkan_has_no_matrix_instructions() -> None:
    as_bf16 = compute_prefill(backend="Vulkan", quantization="BF16", notes="fa=1")
    assert as_bf16 < 0.75 * compute_prefill(backend="Vulkan", quantization="F16", notes="fa=1")
