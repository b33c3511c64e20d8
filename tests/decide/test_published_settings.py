"""Settings that rows state, in all their spellings."""

from __future__ import annotations

import pytest

from bedplate.published.predict import predict
from bedplate.published.rows import RowPrediction, parse_notes
from bedplate.published.settings import ServingSettings, parse_settings


def parse(notes: str, **texts: str) -> ServingSettings:
    return parse_settings({"notes": notes, **texts}, parse_notes(notes))


@pytest.mark.parametrize(
    "notes", ["mtp", "MTP=on", "mtp: true", "spec_decode=mtp", "speculative", "speculative=True", "spec-decoding=eagle",
              "Speculative decoding: on", "with EAGLE3", "mtp enabled", "batch=4; MTP; x=1", "spec_decoding=1"],
)  # fmt: skip
def test_speculation_is_found_in_every_spelling(notes: str) -> None:
    assert parse(notes)[:2] == (True, None)


@pytest.mark.parametrize("notes", ["mtp=3", "MTP3", "mtp-3", "num_speculative_tokens=3", "speculative-num-steps: 3",
                                   "MTP=on; num_nextn_predict_layers=3", "draft_tokens=3"])  # fmt: skip
def test_the_number_of_drafted_tokens_is_found(notes: str) -> None:
    assert parse(notes)[:2] == (True, 3)


@pytest.mark.parametrize("notes", ["mtp=off", "no mtp", "without speculative decoding", "spec_decoding=none", "MTP: 0"])
def test_speculation_that_is_off_is_known(notes: str) -> None:
    assert parse(notes)[:2] == (False, 0)


@pytest.mark.parametrize("notes", ["", "wip=True; image=vllm:1", "specified by the author", "hardware spec sheet v2"])
def test_nothing_is_known_without_a_statement(notes: str) -> None:
    assert parse(notes)[:2] == (None, None)


def test_other_settings_are_parsed() -> None:
    found = parse("kv_cache_dtype=fp8_e4m3; max_num_batched_tokens=16384; enforce_eager; 2P4D")
    assert (found.kv_bits, found.pass_tokens, found.graphs) == (8.0, 16384, False)
    assert (found.prefill_workers, found.decode_workers) == (2, 4)
    other = parse("kv-cache-dtype: auto; chunked-prefill-size 8192; cuda_graph=on; num_prefill_workers=3")
    assert (other.kv_bits, other.pass_tokens, other.graphs) == (None, 8192, True)
    assert other.prefill_workers == 3
    assert parse("bf16 kv").kv_bits == 16.0
    assert parse("enforce_eager=False").graphs is None


def test_the_day_is_that_of_the_column_or_of_the_notes() -> None:
    assert parse("measured=2026-01-31T10:00:00Z").day == parse("", date="20260131").day == "2026-01-31"
    assert parse("image=vllm/vllm-openai:v0.19.0-cu130").image == "v0.19.0-cu130"


ROW = {
    "row_id": "a", "hardware": "NVIDIA B200 SXM 180GB", "count": "8", "engine": "SGLang", "quantization": "fp4",
    "model": "deepseek-ai/DeepSeek-R1", "tensor_parallel": "8", "parallelism": "tp8 pp1 attn_dp1 moe_tp8 moe_ep1",
    "concurrency": "32", "prompt_tokens": "1024", "output_tokens": "1024", "metric": "ttft_ms", "scenario": "agg",
    "date": "2026-03-25",
}  # fmt: skip
APART = {
    **ROW, "hardware": "NVIDIA GB200", "engine": "TensorRT-LLM", "count": "", "tensor_parallel": "",
    "scenario": "disagg",
    "parallelism": "disagg prefill x(tp8 dp1 ep8 bs) decode x(tp8 dp1 ep8 bs)", "date": "2026-02-05",
}  # fmt: skip


@pytest.mark.parametrize("row", [ROW, {**ROW, "metric": "tpot_ms"}, APART, {**APART, "metric": "tpot_ms"}])
@pytest.mark.parametrize(
    "notes", ["", "another table", "wip=False; source_file=2026-03-25.csv; silicon_concurrency=32", "batch_size=32"]
)
def test_a_measurement_has_one_prediction_however_its_notes_are_spelled(row: dict[str, str], notes: str) -> None:
    found = predict({**row, "notes": notes})
    assert isinstance(found, RowPrediction)
    assert found == predict({**row, "notes": f"measured={row['date']}T10:00:00Z; wip=True", "date": ""})
    # Without the day, too, the settings are those of the recipes, if less certain.
    undated = predict({**row, "notes": notes, "date": ""})
    assert isinstance(undated, RowPrediction)
    assert undated.value == pytest.approx(found.value, rel=0.25)


@pytest.mark.parametrize("metric", ["ttft_ms", "tpot_ms"])
def test_an_unknown_setting_is_averaged_and_widens_the_band(metric: str) -> None:
    row = {**ROW, "metric": metric, "date": ""}
    unknown, off, on = (predict({**row, "notes": notes}) for notes in ("", "mtp=off", "MTP=on"))
    assert isinstance(unknown, RowPrediction)
    assert isinstance(off, RowPrediction)
    assert isinstance(on, RowPrediction)
    assert min(off.value, on.value) < unknown.value < max(off.value, on.value)
    assert off.high / off.low == pytest.approx(on.high / on.low)
    assert unknown.high / unknown.low > off.high / off.low


def test_a_stated_kv_type_and_missing_graphs_change_the_prediction() -> None:
    row = {**ROW, "metric": "tpot_ms", "prompt_tokens": "8192"}
    plain, wide, eager = (
        predict({**row, "notes": notes}) for notes in ("kv_cache=fp8", "kv_cache=bf16", "kv_cache=fp8; enforce_eager")
    )
    assert isinstance(plain, RowPrediction)
    assert isinstance(wide, RowPrediction)
    assert isinstance(eager, RowPrediction)
    assert wide.value > plain.value
    assert eager.value > 1.5 * plain.value
