"""Campaigns and duplicates of published rows."""

from __future__ import annotations

from bedplate.published.campaigns import campaign, find_month, remove_duplicates

ROW = {
    "row_id": "a", "source": "github:a/b", "source_path": "docs/speed.md", "date": "2026-03-25", "value": "12.345",
    "hardware": "NVIDIA H200 SXM 141GB", "count": "8", "engine": "vLLM", "engine_version": "0.15.1",
    "model": "meta-llama/Llama-3.1-70B", "quantization": "fp8", "tensor_parallel": "8",
    "parallelism": "tp8 pp1 attn_dp1", "concurrency": "32", "prompt_tokens": "1024", "output_tokens": "1024",
    "metric": "tpot_ms", "scenario": "agg", "notes": "wip=True; measured=2026-03-25T10:00:00Z",
}  # fmt: skip


def test_one_measurement_in_several_spellings_is_kept_once() -> None:
    other = {
        **ROW, "row_id": "b", "source": "github:c/d", "hardware": "H200 141GB HBM3", "engine": "vllm", "value": "12.35",
        "model": "Llama 3.1 70B FP8", "quantization": "FP8", "parallelism": "TP=8", "notes": "", "date": "",
    }  # fmt: skip
    assert remove_duplicates([ROW, other]) == [ROW]


def test_other_figures_and_other_configurations_are_kept() -> None:
    others = [{**ROW, "value": "12.9"}, {**ROW, "concurrency": "64"}, {**ROW, "metric": "ttft_ms"},
              {**ROW, "quantization": "bf16"}, {**ROW, "hardware": "?"}]  # fmt: skip
    assert remove_duplicates([ROW, *others]) == [ROW, *others]


def test_a_campaign_is_a_series_of_one_month() -> None:
    assert campaign(ROW) == campaign({**ROW, "date": "20260301", "notes": "", "model": "another"})
    assert campaign(ROW) == campaign({**ROW, "date": ""})
    assert campaign(ROW) != campaign({**ROW, "date": "2026-04-01"})
    assert campaign(ROW) != campaign({**ROW, "source": "github:c/d"})
    # Copies of all results under the name of a day, and files with one result each, are no series of their own.
    copied = {**ROW, "source_path": "samples.csv#1", "notes": "source_file=2026-04-06.csv"}
    assert campaign(copied) == campaign({**copied, "notes": "source_file=2026-03-25.csv"})
    assert campaign({**ROW, "source_path": "r/a_conc4.json"}) == campaign({**ROW, "source_path": "r/a_conc8.json"})


def test_rows_without_a_date_belong_to_the_release_of_their_engine() -> None:
    undated = {**ROW, "date": "", "notes": ""}
    assert campaign(undated) == campaign({**undated, "engine_version": "v0.15.3"})
    assert campaign(undated) != campaign({**undated, "engine_version": "0.16.0"})


def test_months_of_the_usual_spellings() -> None:
    assert [find_month(text) for text in ("2026-01-31", "20260131", "2026-01 (v0.2.0)", "", "0.5.9")] == [
        "2026-01", "2026-01", "2026-01", "", ""
    ]  # fmt: skip
