"""Dequantization: the pre-tokenizer by its name in the GGUF header, and BOS tokens. Real files: tests/fleet."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from bedplate.facts.unpack import ARCHITECTURES

program: Any = importlib.import_module("bedplate.engines.shipped.gguf_to_folder")


class Header:
    """As much of one as is asked for (constructed)."""

    def __init__(self, **fields: Any) -> None:
        self.fields = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
        self.fields["general.architecture"] = fields.get("architecture", "llama")

    def read_text(self, key: str) -> str | None:
        return self.fields.get(key)

    def read_flag(self, key: str) -> bool | None:
        return self.fields.get(key)


@pytest.fixture(autouse=True)
def fake_tokenizers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake of the package that records its arguments."""
    kinds = SimpleNamespace(
        Split=lambda pattern, behavior: ("split", pattern, behavior),
        ByteLevel=lambda add_prefix_space, use_regex: ("bytes", add_prefix_space, use_regex),
        Sequence=list,
        Prepend=lambda text: ("prepend", text),
        Replace=lambda old, new: ("replace", old, new),
    )
    package = SimpleNamespace(Regex=lambda pattern: pattern, pre_tokenizers=kinds, normalizers=kinds)
    monkeypatch.setitem(sys.modules, "tokenizers", package)


def set_up_tokenizer(**fields: Any) -> Any:
    backend = SimpleNamespace(pre_tokenizer="before", normalizer="before", model=SimpleNamespace(ignore_merges=None))
    program.set_pre_tokenizer(backend, Header(**fields))
    return backend


class TestPreTokenizers:
    def test_smollm_splits_digits_one_by_one(self) -> None:
        backend = set_up_tokenizer(model="gpt2", pre="smollm")
        digits, words, as_bytes = backend.pre_tokenizer
        assert digits == ("split", r"\p{N}", "isolated") and words[1].startswith("'s|'t|")
        assert as_bytes == ("bytes", False, False) and backend.model.ignore_merges is False

    def test_llama_3_splits_up_to_three_digits_and_prefers_whole_words(self) -> None:
        backend = set_up_tokenizer(model="gpt2", pre="llama-bpe")
        assert r"\p{N}{1,3}" in backend.pre_tokenizer[0][1] and backend.model.ignore_merges is True
        assert r"|\p{N}|" in set_up_tokenizer(model="gpt2", pre="qwen2").pre_tokenizer[0][1]

    def test_rejects_an_unknown_pre_tokenizer_by_name(self) -> None:
        with pytest.raises(SystemExit, match="does not support the pre-tokenizer 'brand-new'"):
            set_up_tokenizer(model="gpt2", pre="brand-new")

    def test_missing_name_uses_the_default_with_a_warning(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert len(set_up_tokenizer(model="gpt2").pre_tokenizer) == 5
        assert "does not name its pre-tokenizer" in capsys.readouterr().out

    def test_sentencepiece_marks_spaces(self) -> None:
        backend = set_up_tokenizer(model="llama", pre="default")
        assert backend.normalizer == [("prepend", "\u2581"), ("replace", " ", "\u2581")]
        assert backend.pre_tokenizer is None
        assert set_up_tokenizer(model="llama", add_space_prefix=False).normalizer == [("replace", " ", "\u2581")]

    def test_other_tokenizers_are_unchanged(self) -> None:
        assert set_up_tokenizer(model="t5").pre_tokenizer == "before"
        assert set_up_tokenizer(model="llama", architecture="gemma2").normalizer == "before"

    def test_every_supported_architecture_has_its_pre_tokenizers(self) -> None:
        usual = {
            "llama": ("smollm", "llama-bpe", "tekken", "deepseek-llm", "gpt-2"), "qwen2": ("qwen2", "deepseek-r1-qwen"),
            "qwen3": ("qwen2",), "phi3": ("dbrx", "gpt-4o"), "starcoder2": ("starcoder",), "falcon": ("falcon",),
            "stablelm": ("stablelm2",), "gpt2": ("gpt-2",), "bloom": ("bloom",), "mamba": ("gpt-2",),
        }  # fmt: skip
        assert set(usual) <= set(ARCHITECTURES)
        assert {name for names in usual.values() for name in names} <= set(program.SPLITS)
        assert set(program.SPLITS) >= program.WHOLE_WORDS_FIRST | program.BEGINS_BY_DEFAULT


@pytest.mark.parametrize(
    ("fields", "begins"),
    [
        ({"model": "gpt2", "pre": "smollm"}, False),
        ({"model": "gpt2", "pre": "llama-bpe"}, True),
        ({"model": "gpt2", "pre": "llama-bpe", "add_bos_token": False}, False),
        ({"model": "gpt2", "pre": "qwen2", "add_bos_token": True}, True),
        ({"model": "llama", "pre": "default"}, True),
    ],
)
def test_bos_token_is_added_as_the_file_says(fields: dict[str, Any], begins: bool) -> None:
    tokenizer = SimpleNamespace(bos_token="<s>", add_bos_token=not begins)
    program.set_bos_token(tokenizer, Header(**fields))
    assert tokenizer.add_bos_token is begins
    without = SimpleNamespace(bos_token=None, add_bos_token=False)
    program.set_bos_token(without, Header(**fields))
    assert without.add_bos_token is False


class TestRopeParameters:
    def test_adds_the_rope_base_of_transformers_4(self) -> None:
        now = {"rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"}, "hidden_size": 576}
        assert program.add_older_names(now) == {**now, "rope_theta": 100000.0}

    def test_adds_the_rope_scaling_of_transformers_4(self) -> None:
        scaled = {"rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0}
        found = program.add_older_names({"rope_parameters": scaled})
        assert found["rope_theta"] == 500000.0 and found["rope_scaling"] == {"rope_type": "llama3", "factor": 8.0}

    @pytest.mark.parametrize(
        "config",
        [{"rope_theta": 1e6}, {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, {"rope_parameters": None}],
    )
    def test_configurations_without_a_single_rope_base_are_unchanged(self, config: dict[str, Any]) -> None:
        assert program.add_older_names(config) == config
