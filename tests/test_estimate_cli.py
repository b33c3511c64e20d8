"""`bedplate estimate`: input and output tables, and errors."""

from __future__ import annotations

import csv
import io
import subprocess
import sys
from pathlib import Path

HEAD = "row_id,hardware,count,engine,model,quantization,concurrency,prompt_tokens,output_tokens,metric\n"
GOOD = "a,RTX 4090,1,llama.cpp,Meta-Llama-3-8B,Q4_K_M,1,0,512,decode_tok_s_single\n"
BAD = "b,Quantum 9000,1,llama.cpp,Meta-Llama-3-8B,Q4_K_M,1,0,512,decode_tok_s_single\n"


def run(*arguments: str | Path, stdin: bytes | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "bedplate", "estimate", *map(str, arguments)], capture_output=True, input=stdin
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def test_each_row_has_a_prediction_or_a_reason(tmp_path: Path) -> None:
    source, target = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_text(HEAD + GOOD + BAD)
    done = run("--rows", source, "--out", target)
    assert (done.returncode, done.stdout) == (0, "")
    assert "2 rows: 1 predicted, 1 refused" in done.stderr
    first, second = csv.DictReader(io.StringIO(target.read_text()))
    assert first["row_id"] == "a" and first["refused"] == ""
    assert float(first["low"]) < float(first["predicted"]) < float(first["high"])
    assert second["row_id"] == "b" and second["predicted"] == "" and "unknown chip" in second["refused"]


def test_rows_are_read_from_standard_input() -> None:
    done = run("--rows", "-", stdin=(HEAD + GOOD).encode())
    assert done.returncode == 0
    assert next(csv.DictReader(io.StringIO(done.stdout)))["row_id"] == "a"


def test_a_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    marked = b"\xef\xbb\xbf" + (HEAD + GOOD).encode()
    (tmp_path / "marked.csv").write_bytes(marked)
    for done in (run("--rows", "-", stdin=marked), run("--rows", tmp_path / "marked.csv")):
        assert next(csv.DictReader(io.StringIO(done.stdout)))["row_id"] == "a"


def test_an_invalid_table_is_a_usage_error(tmp_path: Path) -> None:
    missing = run("--rows", tmp_path / "none.csv")
    assert missing.returncode == 2 and "cannot read" in missing.stderr
    (tmp_path / "odd.csv").write_text("x,y\n1,2\n")
    odd = run("--rows", tmp_path / "odd.csv")
    assert odd.returncode == 2 and "has no column 'hardware'" in odd.stderr
    (tmp_path / "binary.csv").write_bytes(bytes(range(128, 256)))
    assert run("--rows", tmp_path / "binary.csv").returncode == 2
    assert run().returncode == 2


def test_an_unwritable_output_is_an_external_failure(tmp_path: Path) -> None:
    done = run("--rows", "-", "--out", tmp_path / "no" / "such" / "out.csv", stdin=(HEAD + GOOD).encode())
    assert done.returncode == 3 and "cannot write" in done.stderr
