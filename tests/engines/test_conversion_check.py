"""The comparison after a conversion: token ids, answers one token at a time, and evidence where they differ."""

from __future__ import annotations

import contextlib
import http.client
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import HANG_S

import bedplate.engines
from bedplate.measure.agreement import CHANCE, CLEAR_GAP, FLOORS
from bedplate.run.environments import EngineEnvironment, build_command
from bedplate.values import Launch

PROGRAM = Path(bedplate.engines.__file__).parent / "shipped" / "conversion_check.py"
check: Any = importlib.import_module("bedplate.engines.shipped.conversion_check")


class Words(check.ComparedModel):  # type: ignore[misc]
    """A model whose tokens are characters, and which repeats its input."""

    name = "words"

    def __init__(self, wrong: str = "", wrong_answers: int = 0, gap: float = 2.0) -> None:
        self.wrong, self.wrong_answers, self.gap = wrong, wrong_answers, gap
        self.asked = 0

    def tokenize(self, text: str, begin: bool = False) -> list[int]:
        return [ord(letter) + (letter in self.wrong) for letter in text]

    def detokenize(self, ids: list[int]) -> str:
        return "".join(chr(one) for one in ids)

    def answer(self, ids: list[int]) -> list[Any]:
        return [check.PredictedToken(65 + number, self.gap) for number in range(check.ANSWER_TOKENS)]

    def follow(self, ids: list[int], written: list[int]) -> list[int]:
        self.asked += len(written)
        return [one + (number < self.wrong_answers) for number, one in enumerate(written)]


class TestTokenIds:
    def test_same_token_ids_pass(self, capsys: pytest.CaptureFixture[str]) -> None:
        check.compare_ids(Words(), Words())
        count = len(check.TEXTS)
        assert f"token ids: {count} of {count} texts agree with the source" in capsys.readouterr().out

    def test_different_token_ids_are_shown_in_the_error(self) -> None:
        with pytest.raises(SystemExit) as ended:
            check.compare_ids(Words(), Words(wrong="½"))
        assert "1 of " in str(ended.value) and "'½ ² ³ ٣ Ⅷ ５' (source [189," in str(ended.value)
        assert "result [190," in str(ended.value)

    def test_known_differences_of_llama_cpp_are_only_reported(self, capsys: pytest.CaptureFixture[str]) -> None:
        theirs = Words(wrong="½")
        theirs.approximated = True
        check.compare_ids(Words(), theirs)
        assert "1 non-ASCII texts differ" in capsys.readouterr().out
        theirs.wrong = "H"
        with pytest.raises(SystemExit):
            check.compare_ids(Words(), theirs)

    def test_texts_are_normalized_for_tokenizers_with_nfc(self) -> None:
        class Composing(Words):
            normalizes = True

            def tokenize(self, text: str, begin: bool = False) -> list[int]:
                import unicodedata

                return super().tokenize(unicodedata.normalize("NFC", text))

        check.compare_ids(Words(), Composing())

    def test_texts_cover_difficult_characters(self) -> None:
        text = "".join(check.TEXTS)
        assert "\n\n1" in check.TEXTS and any(one.startswith("  ") for one in check.TEXTS)
        assert {"你", "ا", "😀", "½", "\u0301", "\t", "\r", "_", "{"} <= set(text)


class TestAnswers:
    def test_same_answers_pass(self, capsys: pytest.CaptureFixture[str]) -> None:
        result = Words()
        check.compare_answers(Words(), result, 16)
        asked = len(check.PROMPTS) * check.ANSWER_TOKENS
        assert result.asked == asked and f"answers: {asked} of {asked} clear" in capsys.readouterr().out

    def test_wrong_answers_are_shown_in_the_error(self) -> None:
        with pytest.raises(SystemExit) as ended:
            check.compare_answers(Words(), Words(wrong_answers=8), 16)
        assert "32 of 64 clear next tokens" in str(ended.value) and "expected at least 97%" in str(ended.value)
        assert "after …'The capital of France is' 'B' instead of 'A'" in str(ended.value)

    def test_fewer_bits_allow_more_differences(self) -> None:
        check.compare_answers(Words(), Words(wrong_answers=6), 4.5)
        with pytest.raises(SystemExit):
            check.compare_answers(Words(), Words(wrong_answers=6), 8)
        with pytest.raises(SystemExit):
            check.compare_answers(Words(), Words(wrong_answers=16), 4.5)

    def test_near_ties_do_not_count(self, capsys: pytest.CaptureFixture[str]) -> None:
        check.compare_answers(Words(gap=0.1), Words(wrong_answers=16), 16)
        assert "0 of 0 clear" in capsys.readouterr().out

    def test_thresholds_are_those_of_served_engines(self) -> None:
        assert (check.CHANCE, check.CLEAR_GAP) == (CHANCE, CLEAR_GAP)
        assert check.FLOORS[1:] == FLOORS[1:] and check.FLOORS[0][1] <= FLOORS[0][1]

    @given(of=st.integers(1, 80), share=st.sampled_from([0.55, 0.85, 0.97]))
    def test_binomial_tail_is_a_distribution_function(self, of: int, share: float) -> None:
        found = [check.compute_binomial_tail(count, of, share) for count in range(of + 1)]
        assert found == sorted(found) and abs(found[-1] - 1) < 1e-9


class TestFormats:
    @pytest.mark.parametrize(
        ("files", "kind"),
        [
            ({"config.json": {}}, "folder"),
            ({"config.json": {"quantization": {"bits": 4, "group_size": 32}}}, "mlx"),
            ({"config.json": {"quantization_config": {"quant_method": "exl3"}}}, "exl3"),
            ({"config.json": {}, "genai_config.json": {}}, "onnx"),
            ({"config.json": {}, "model.onnx": {}}, "encoder"),
            ({}, "unknown"),
        ],
    )
    def test_format_is_detected_from_the_files(self, files: dict[str, Any], kind: str, tmp_path: Path) -> None:
        for name, content in files.items():
            (tmp_path / name).write_text(json.dumps(content))
        assert check.detect_format(tmp_path) == kind

    def test_formats_without_a_comparison_are_not_a_failure(self, tmp_path: Path) -> None:
        (tmp_path / "a").mkdir()
        done = subprocess.run([sys.executable, "-I", str(PROGRAM), str(tmp_path / "a"), str(tmp_path)],
                              capture_output=True, text=True)  # fmt: skip
        assert done.returncode == 0 and "not compared: there is no comparison of" in done.stdout


def test_exllama_uses_compiled_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = SimpleNamespace(from_file=lambda path: path)
    monkeypatch.setitem(sys.modules, "tokenizers", SimpleNamespace(Tokenizer=files))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "of the user")
    monkeypatch.chdir(tmp_path)
    check.ExLlamaModel(tmp_path, "exllamav3")
    assert os.environ["TORCH_EXTENSIONS_DIR"] == "of the user"
    (tmp_path / "exllamav3-kernels").mkdir()
    check.ExLlamaModel(tmp_path, "exllamav3")
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(tmp_path / "exllamav3-kernels")


def run_check(
    llama: EngineEnvironment, source: Path, result: Path, bits: str = "16"
) -> subprocess.CompletedProcess[str]:
    server = json.dumps(build_command(llama, Launch(argv=("llama-server",))))
    argv = [sys.executable, "-I", str(PROGRAM), str(source), str(result), "--bits", bits, "--gguf-server", server]
    return subprocess.run(argv, capture_output=True, text=True)


class TestRealFiles:
    def test_a_file_agrees_with_itself(self, builtin_gguf: Path, llama_environment: EngineEnvironment) -> None:
        done = run_check(llama_environment, builtin_gguf, builtin_gguf)
        assert done.returncode == 0, done.stderr
        assert "texts agree with the source" in done.stdout and "(64 of all 64)" in done.stdout

    def test_server_of_the_comparison_needs_a_key(
        self, builtin_gguf: Path, llama_environment: EngineEnvironment
    ) -> None:
        command = json.dumps(build_command(llama_environment, Launch(argv=("llama-server",))))
        with contextlib.closing(check.LlamaCppModel(builtin_gguf, command)) as one:
            assert one.tokenize("one")
            assert one._key not in " ".join(psutil.Process(one._process.pid).cmdline())
            connection = http.client.HTTPConnection("127.0.0.1", one._port, timeout=HANG_S)
            with contextlib.closing(connection):
                connection.request("POST", "/tokenize", "{}")
                assert connection.getresponse().status == 401

    def test_rejects_a_result_that_does_not_load(
        self, builtin_gguf: Path, llama_environment: EngineEnvironment, tmp_path: Path
    ) -> None:
        (tmp_path / "junk.gguf").write_bytes(b"junk")
        done = run_check(llama_environment, builtin_gguf, tmp_path / "junk.gguf")
        assert done.returncode == 1 and "llama.cpp cannot load junk.gguf: " in done.stderr

    def test_rejects_another_pre_tokenizer(
        self, builtin_gguf: Path, llama_environment: EngineEnvironment, tmp_path: Path
    ) -> None:
        other = tmp_path / "cut.gguf"
        content = builtin_gguf.read_bytes()
        assert content.count(b"smollm") >= 1
        at = content.index(b"smollm", content.index(b"tokenizer.ggml.pre"))
        other.write_bytes(content[:at] + b"falcon" + content[at + 6 :])
        done = run_check(llama_environment, builtin_gguf, other)
        assert done.returncode == 1 and "token ids differ from the source" in done.stderr

    def test_rejects_wrong_weights(
        self, builtin_gguf: Path, llama_environment: EngineEnvironment, tmp_path: Path
    ) -> None:
        other = tmp_path / "wrong.gguf"
        content = bytearray(builtin_gguf.read_bytes())
        for tensor in gguf.GGUFReader(builtin_gguf).tensors:
            if "attn_output" in tensor.name:
                content[tensor.data_offset : tensor.data_offset + tensor.n_bytes] = bytes(tensor.n_bytes)
        other.write_bytes(content)
        done = run_check(llama_environment, builtin_gguf, other, "4")
        assert done.returncode == 1 and "clear next tokens" in done.stderr and "instead of" in done.stderr

    def test_rejects_logits_that_are_not_finite(
        self, builtin_gguf: Path, llama_environment: EngineEnvironment, tmp_path: Path
    ) -> None:
        other = tmp_path / "damaged.gguf"
        content = bytearray(builtin_gguf.read_bytes())
        begin = len(content) // 2
        content[begin : begin + 6_000_000] = b"\xff" * 6_000_000
        other.write_bytes(content)
        done = run_check(llama_environment, builtin_gguf, other, "4")
        assert done.returncode == 1 and "not finite" in done.stderr
