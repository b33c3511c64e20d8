"""`bedplate estimate`: input and output tables, and errors."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from tests.commands import Answer, invoke

HEAD = "row_id,hardware,count,engine,model,quantization,concurrency,prompt_tokens,output_tokens,metric\n"
GOOD = "a,RTX 4090,1,llama.cpp,Meta-Llama-3-8B,Q4_K_M,1,0,512,decode_tok_s_single\n"
BAD = "b,Quantum 9000,1,llama.cpp,Meta-Llama-3-8B,Q4_K_M,1,0,512,decode_tok_s_single\n"


def run(*arguments: str | Path, stdin: bytes | None = None) -> Answer:
    return invoke("estimate", *map(str, arguments), stdin=stdin)


def test_each_row_has_a_prediction_or_a_reason(tmp_path: Path) -> None:
    source, target = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_text(HEAD + GOOD + BAD)
    done = run("--rows", source, "--out", target)
    assert (done.code, done.out) == (0, "")
    assert "2 rows: 1 predicted, 1 refused" in done.err
    first, second = csv.DictReader(io.StringIO(target.read_text()))
    assert first["row_id"] == "a" and first["refused"] == ""
    assert float(first["low"]) < float(first["predicted"]) < float(first["high"])
    assert second["row_id"] == "b" and second["predicted"] == "" and "unknown chip" in second["refused"]


def test_rows_are_read_from_standard_input() -> None:
    done = run("--rows", "-", stdin=(HEAD + GOOD).encode())
    assert done.code == 0
    assert next(csv.DictReader(io.StringIO(done.out)))["row_id"] == "a"


def test_a_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    marked = b"\xef\xbb\xbf" + (HEAD + GOOD).encode()
    (tmp_path / "marked.csv").write_bytes(marked)
    for done in (run("--rows", "-", stdin=marked), run("--rows", tmp_path / "marked.csv")):
        assert next(csv.DictReader(io.StringIO(done.out)))["row_id"] == "a"


def test_an_invalid_table_is_a_usage_error(tmp_path: Path) -> None:
    missing = run("--rows", tmp_path / "none.csv")
    assert missing.code == 2 and "cannot read" in missing.err
    (tmp_path / "odd.csv").write_text("x,y\n1,2\n")
    odd = run("--rows", tmp_path / "odd.csv")
    assert odd.code == 2 and "has no column 'hardware'" in odd.err
    (tmp_path / "binary.csv").write_bytes(bytes(range(128, 256)))
    assert run("--rows", tmp_path / "binary.csv").code == 2
    assert run().code == 2


def test_an_unwritable_output_is_an_external_failure(tmp_path: Path) -> None:
    done = run("--rows", "-", "--out", tmp_path / "no" / "such" / "out.csv", stdin=(HEAD + GOOD).encode())
    assert done.code == 3 and "cannot write" in done.err


QUESTION = "hardware=RTX 4090; engine=llama.cpp; model=Llama 3.1 8B Q4_K_M; metric=prefill_tok_s"


def test_explain_lists_the_terms_of_a_row_by_line_by_id_or_as_a_question(tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    source.write_text(HEAD + BAD + GOOD)
    by_line, by_id = run("--explain", f"{source}:3"), run("--rows", source, "--explain", "a")
    assert by_line.code == by_id.code == 0
    assert by_line.out == by_id.out
    for words in ("decode_tok_s_single", "read weights", "add up to", "Assumed", "95 %", "campaigns"):
        assert words in by_line.out
    asked = run("--explain", QUESTION)
    assert asked.code == 0 and "matrix products" in asked.out


def test_explain_of_a_refused_row_gives_the_reason(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text(HEAD + BAD)
    done = run("--explain", f"{tmp_path / 'in.csv'}:2")
    assert done.code == 1 and "unknown chip" in done.err


def test_explain_of_a_missing_row_is_a_usage_error(tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    source.write_text(HEAD + GOOD)
    for arguments, words in (
        (("--explain", f"{source}:9"), "line 9"), (("--rows", source, "--explain", "zz"), "'zz'"),
        (("--explain", "zz"), "names no row"), (("--rows", source, "--json"), "--json needs --explain"),
    ):  # fmt: skip
        done = run(*arguments)
        assert done.code == 2 and words in done.err
