"""Trace readers: every published format is read, bad rows are counted, and damaged files are errors."""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bedplate.errors import BedplateError, UsageError
from bedplate.facts import traces
from bedplate.facts.traces import BadRows, detect_format, estimate_tokens, open_trace, parse_trace
from bedplate.values.workload import RequestShape, TraceFormat

CAPTURES = Path(__file__).parents[1] / "captures" / "traces"


def read(path: Path | str, kind: TraceFormat | None = None) -> tuple[list[RequestShape], BadRows]:
    bad = BadRows(str(path))
    with open_trace(path) as stream:
        return list(parse_trace(stream, kind or detect_format(stream, str(path)), bad)), bad


def parse(text: str | bytes, kind: TraceFormat) -> tuple[list[RequestShape], BadRows]:
    raw = text.encode() if isinstance(text, str) else text
    bad = BadRows("text")
    return list(parse_trace(io.BufferedReader(io.BytesIO(raw)), kind, bad)), bad  # type: ignore[type-var,unused-ignore]


def list_lengths(shapes: list[RequestShape]) -> list[tuple[int | None, int | None]]:
    return [(shape.prompt_tokens, shape.output_tokens) for shape in shapes]


def list_times(shapes: list[RequestShape]) -> list[float]:
    return [shape.started_s for shape in shapes if shape.started_s is not None]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("azure-2023-conv.csv", "azure"),
        ("azure-2023-code.csv", "azure"),
        ("azure-2024.csv", "azure"),
        ("azure-2025-multimodal.csv", "azure"),
        ("mooncake-conversation.jsonl", "mooncake"),
        ("mooncake-synthetic.jsonl", "mooncake"),
        ("sharegpt-constructed.json", "sharegpt"),
        ("requests-constructed.jsonl", "bedplate"),
    ],
)
def test_the_format_is_detected_from_the_beginning(name: str, kind: str) -> None:
    with open_trace(CAPTURES / name) as stream:
        assert detect_format(stream, name) == kind
    shapes, bad = read(CAPTURES / name)
    assert shapes and not bad.count


class TestAzure:
    def test_the_trace_of_2023_has_seven_digits_and_crlf(self) -> None:
        shapes, _ = read(CAPTURES / "azure-2023-conv.csv")
        assert len(shapes) == 40 and list_lengths(shapes)[:2] == [(374, 44), (396, 109)]
        assert list_times(shapes)[0] == pytest.approx(1700158546.68059, abs=1e-6)
        assert list_times(shapes)[1] - list_times(shapes)[0] == pytest.approx(4.314579, abs=1e-6)
        assert list_times(shapes)[-1] - list_times(shapes)[0] == pytest.approx(
            24.146296, abs=1e-6
        )  # over a change of minute

    def test_the_trace_of_2024_has_a_time_zone(self) -> None:
        shapes, _ = read(CAPTURES / "azure-2024.csv")
        assert list_lengths(shapes)[4] == (7670, 8)
        assert list_times(shapes)[-1] - list_times(shapes)[0] == pytest.approx(7 * 86400 - 0.070499 - 0.00993, abs=1e-5)

    def test_the_trace_of_2025_has_a_column_for_images(self) -> None:
        shapes, _ = read(CAPTURES / "azure-2025-multimodal.csv")
        assert list_lengths(shapes)[:2] == [(770, 491), (949, 126)]
        assert list_times(shapes)[1] - list_times(shapes)[0] == pytest.approx(5.55, abs=1e-6)

    def test_whole_seconds_and_other_zones_are_parsed(self) -> None:
        rows = "2024-05-12 00:00:01+00:00,1,2\n2024-05-12 02:00:02+02:00,1,2\n2024-05-12 00:00:03,1,2\n"
        rows += "2024-05-12 00:00:04-00:00,1,2\n2024-05-11 19:00:05.5-05:00,1,2\n2024-05-12T00:00:06Z,1,2\n"
        shapes, bad = parse(rows, "azure")
        assert [moment - list_times(shapes)[0] for moment in list_times(shapes)] == [
            0,
            1,
            2,
            3,
            4.5,
            5,
        ] and not bad.count

    def test_columns_may_be_reordered_and_quoted(self) -> None:
        shapes, _ = parse('\ufeff"GeneratedTokens",ContextTokens,TIMESTAMP\r\n5,7,2024-05-12 00:00:01\r\n', "azure")
        assert list_lengths(shapes) == [(7, 5)]

    @pytest.mark.parametrize(
        "row",
        [
            "2024-05-12 00:00:61.5,1,2",
            "2024-05-12 00:00:nan,1,2",
            "2024-05-12 00:00:-1,1,2",
            "yesterday,1,2",
            "2024-05-12 00:00:02,1",
            "2024-05-12 00:00:02,-1,2",
            "2024-05-12 00:00:02,1,9999999999",
            "2024-05-12 00:00:02,one,2",
            "2024-13-12 00:00:02,1,2",
            ",,",
            "\x00\x01",
        ],
    )
    def test_a_bad_row_is_reported_with_its_line_and_skipped(self, row: str) -> None:
        good = "2024-05-12 00:00:01,1,2\n"
        shapes, bad = parse(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{good}{row}\n\n{good}", "azure")
        assert len(shapes) == 2 and bad.count == 1 and bad.examples[0].startswith("line 3: ")
        bad.check()


class TestMooncake:
    def test_milliseconds_lengths_and_blocks_are_read(self) -> None:
        shapes, _ = read(CAPTURES / "mooncake-synthetic.jsonl")
        assert list_lengths(shapes)[0] == (40160, 6) and list_times(shapes)[2] == 0.04
        assert shapes[0].prefix_hashes == tuple(range(79)) and shapes[0].prefix_block_tokens == 512

    def test_extra_fields_and_missing_blocks_are_accepted(self) -> None:
        shapes, bad = parse('{"timestamp":1.5,"input_length":3,"output_length":4,"type":"text"}\n', "mooncake")
        assert list_lengths(shapes) == [(3, 4)] and shapes[0].prefix_hashes == () and not bad.count

    @pytest.mark.parametrize(
        "row", ["{", "[]", '{"timestamp":1}', '{"timestamp":1,"input_length":-1,"output_length":1}']
    )
    def test_bad_rows_are_counted(self, row: str) -> None:
        good = '{"timestamp":1,"input_length":1,"output_length":1}\n'
        shapes, bad = parse(good + row + "\n" + good, "mooncake")
        assert len(shapes) == 2 and bad.count == 1 and bad.examples[0].startswith("line 2: ")


class TestShareGpt:
    def test_each_answer_is_a_request_with_the_earlier_turns_as_prompt(self) -> None:
        shapes, bad = read(CAPTURES / "sharegpt-constructed.json")
        assert len(shapes) == 4 and not bad.count
        first, second, other, late = shapes
        assert first.prompt_tokens == estimate_tokens("What does a bedplate do?") == 6 and first.cached_tokens == 0
        # The second prompt adds the answer and the next question. Everything but the question was in the cache.
        assert first.output_tokens is not None
        assert second.cached_tokens == first.prompt_tokens + first.output_tokens
        assert second.prompt_tokens == second.cached_tokens + estimate_tokens("And of what is it made?")
        assert other.prompt_tokens == 5 + estimate_tokens("水は何度で沸騰しますか？")
        assert late.cached_tokens == 0  # an answer to nothing is no request, and leaves nothing behind

    def test_tokens_are_estimated_by_the_stated_rule(self) -> None:
        assert [estimate_tokens(text) for text in ("", "a", "four", "fiver", "百度")] == [0, 1, 1, 2, 2]
        assert estimate_tokens("\ud800") == 1  # half of a pair, as bad dumps have them

    def test_messages_and_lines_are_read_too(self) -> None:
        one = {"messages": [{"role": "user", "content": "hello you"}, {"role": "assistant", "content": "hi"}]}
        for text in (json.dumps(one), json.dumps([one, one], indent=4), f"{json.dumps(one)}\n{json.dumps(one)}\n"):
            shapes, bad = parse(text, "sharegpt")
            assert set(list_lengths(shapes)) == {(3, 1)} and not bad.count

    def test_a_conversation_may_exceed_the_read_buffer(self) -> None:
        turns = [{"from": "human", "value": "x" * 1_000_000}, {"from": "gpt", "value": "é" * 1_000_000}]
        shapes, _ = parse(json.dumps([{"conversations": turns}] * 3, ensure_ascii=False), "sharegpt")
        assert list_lengths(shapes) == [(250_000, 500_000)] * 3

    @pytest.mark.parametrize("value", ["3", '{"id": 1}', '{"conversations": [3]}', '{"conversations": [{"from": 1}]}'])
    def test_invalid_conversations_are_reported(self, value: str) -> None:
        good = json.dumps({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]})
        shapes, bad = parse(f"[{good}, {value}, {good}]", "sharegpt")
        assert len(shapes) == 2 and bad.count == 1 and bad.examples[0].startswith("conversation 2: ")

    def test_a_truncated_file_keeps_its_complete_rows(self) -> None:
        text = (CAPTURES / "sharegpt-constructed.json").read_text()
        shapes, bad = parse(text[: text.index("iIjJkKl") + 3], "sharegpt")
        assert len(shapes) == 3 and bad.count == 1 and "conversation 3" in bad.examples[0]

    def test_deep_nesting_is_rejected(self) -> None:
        _, bad = parse("[" * 5 + "{" + '"a":[' * 100_000, "sharegpt")
        assert bad.count == 1


class TestRequestLog:
    def test_shapes_are_read_back_unchanged(self) -> None:
        shapes, _ = read(CAPTURES / "requests-constructed.jsonl")
        assert shapes[1].tenant == "blue" and shapes[1].duration_ms == 2000 and shapes[2].outcome == "cancelled"

    @pytest.mark.parametrize(
        "row", ['{"started_s": "x"}', '{"prompt": "secret"}', '{"started_s": 1e300}', '{"prompt_tokens": 1e10}']
    )
    def test_bad_rows_are_counted(self, row: str) -> None:
        shapes, bad = parse('{"started_s":1}\n' + row + '\n{"started_s":2}\n', "bedplate")
        assert len(shapes) == 2 and bad.count == 1


class TestFiles:
    def test_gzip_is_decompressed_while_reading(self, tmp_path: Path) -> None:
        plain = CAPTURES / "azure-2023-conv.csv"
        packed = tmp_path / "a.csv.gz"
        packed.write_bytes(gzip.compress(plain.read_bytes()))
        assert read(packed)[0] == read(plain)[0]

    def test_a_truncated_gzip_file_keeps_its_complete_rows(self, tmp_path: Path) -> None:
        rows = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2024-05-12 00:00:01,12,34\n" * 50_000
        packed = gzip.compress(rows.encode())
        (tmp_path / "a.gz").write_bytes(packed[:-8])
        shapes, bad = read(tmp_path / "a.gz")
        # All rows but those in the decompression buffer.
        assert len(shapes) > 30_000 and bad.count == 1 and "cut short" in bad.examples[0]

    @pytest.mark.parametrize(
        "content", [b"", b"   \n", b"\x1f\x8b\x08garbage", b"GGUF\x00\x00", b"hello,world\n1,2\n", b'{"a": 1}\n']
    )
    def test_an_unknown_format_is_a_usage_error(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(UsageError):
            read(tmp_path / "x")

    def test_zstd_is_read_or_the_error_has_a_hint(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "x.zst").write_bytes(b"\x28\xb5\x2f\xfd" + b"\0" * 20)
        monkeypatch.setitem(sys.modules, "compression", None)
        monkeypatch.setitem(sys.modules, "zstandard", None)
        with pytest.raises(UsageError) as bad:
            read(tmp_path / "x.zst")
        assert "zstd -d" in (bad.value.hint or "")

    def test_absent_files_and_folders_are_usage_errors(self, tmp_path: Path) -> None:
        for path in (tmp_path, tmp_path / "nothing", tmp_path / "a\0b"):
            with pytest.raises(UsageError, match="cannot read"):
                read(path)

    def test_an_endless_line_takes_bounded_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(traces, "MAX_LINE_BYTES", 1000)
        good = "2024-05-12 00:00:01,1,2\n"
        shapes, bad = parse(good + "x" * 10_500 + "\n" + good, "azure")
        assert len(shapes) == 2 and bad.examples == ["line 2: longer than 1,000 bytes"]

    def test_mostly_bad_rows_are_an_error_with_the_reason(self) -> None:
        shapes, bad = parse("2024-05-12 00:00:01,1,2\nx\ny\n", "azure")
        assert len(shapes) == 1
        with pytest.raises(UsageError) as error:
            bad.check()
        assert "2 of 3 rows" in error.value.message and "line 2: 'x'" in (error.value.cause or "")

    def test_reading_stops_early_if_most_rows_are_bad(self) -> None:
        class Endless(io.RawIOBase):
            def readable(self) -> bool:
                return True

            def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
                buffer[:] = b"x\n" * (len(buffer) // 2) + b"x" * (len(buffer) % 2)
                return len(buffer)

        with pytest.raises(UsageError, match="rows so far"):
            list(parse_trace(io.BufferedReader(Endless()), "azure", BadRows("endless")))  # type: ignore[arg-type]


@given(st.sampled_from(["azure", "mooncake", "sharegpt", "bedplate"]), st.binary(max_size=300), st.integers(0, 3000))
def test_damage_anywhere_gives_bad_rows_or_a_usage_error(kind: TraceFormat, damage: bytes, at: int) -> None:
    names = {"azure": "azure-2024.csv", "mooncake": "mooncake-conversation.jsonl"}
    names |= {"sharegpt": "sharegpt-constructed.json", "bedplate": "requests-constructed.jsonl"}
    whole = (CAPTURES / names[kind]).read_bytes()
    try:
        shapes, bad = parse(whole[:at] + damage + whole[at + len(damage) // 2 :], kind)
        bad.check()
    except BedplateError as error:
        assert error.exit_code == 2
    else:
        assert all((shape.prompt_tokens or 0) >= 0 for shape in shapes)
