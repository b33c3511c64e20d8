"""Finds models by name, path or hub id."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bedplate.errors import UsageError
from bedplate.run.builtin import get_builtin_path, read_builtin_facts
from bedplate.run.models import find_known_model, find_local_model, is_builtin


@pytest.fixture
def empty_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without any model."""
    for name in ("HOME", "BEDPLATE_HOME", "HF_HOME", "HF_HUB_CACHE", "OLLAMA_MODELS"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "typed", [None, "builtin", "built-in", "BUILTIN", "SmolLM2-135M-Instruct", "smollm2-135m-instruct"]
)
def test_finds_built_in_model_by_name_without_download(typed: str | None, empty_machine: None) -> None:
    assert is_builtin(typed)
    model = find_known_model(typed)
    assert model == read_builtin_facts() and model.files == (str(get_builtin_path()),)
    assert not get_builtin_path().exists()


@pytest.mark.parametrize("typed", ["SmolLM2", "smollm2-135m-instruct.gguf", "someone/SmolLM2-135M-Instruct", ""])
def test_other_names_are_not_the_built_in_model(typed: str) -> None:
    assert not is_builtin(typed)


def test_reads_file_from_its_header(builtin_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = tmp_path / "my model.gguf"
    link.symlink_to(builtin_gguf)
    model = find_known_model(str(link))
    assert model.architecture == "llama" and model.num_layers == 30
    assert Path(model.files[0]).samefile(builtin_gguf)
    monkeypatch.chdir(tmp_path)
    assert find_known_model("my model.gguf").weight_bytes == find_known_model("./my model.gguf").weight_bytes > 0


def test_path_selects_file_named_like_the_built_in_model(tmp_path: Path) -> None:
    (tmp_path / "builtin").write_bytes(b"GGUF")
    with pytest.raises(UsageError):
        find_known_model(str(tmp_path / "builtin"))


@pytest.mark.parametrize("typed", ["no-such-model", "someone/no-such-model-GGUF:Q4_K_M"])
def test_missing_model_is_a_usage_error_with_a_hint(typed: str, empty_machine: None) -> None:
    assert find_local_model(typed) is None
    with pytest.raises(UsageError) as caught:
        find_known_model(typed)
    hint = f"bedplate serve {typed}" if "/" in typed else "give owner/name on the hub"
    assert typed in caught.value.message and hint in str(caught.value.hint)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("typed", ["gone.gguf", "./gone.gguf", "/nonexistent/gone.gguf", "~/gone.gguf"])
def test_reports_missing_path(typed: str, empty_machine: None) -> None:
    with pytest.raises(UsageError) as caught:
        find_known_model(typed)
    assert "gone.gguf" in caught.value.message and caught.value.hint


@pytest.mark.parametrize("typed", ["meta-llama/Meta-Llama-3.1-8B-Instruct", "Llama 3.1 8B FP8", "gpt-oss-120b"])
def test_well_known_models_need_neither_files_nor_network(typed: str, empty_machine: None) -> None:
    assert find_local_model(typed) is None
    model = find_known_model(typed)
    assert (model.origin, model.files, model.basis) == ("known facts", (), "spec")


def test_folder_takes_precedence_over_known_model(empty_machine: None, tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3-8B"
    folder.mkdir()
    small = {
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 32,
        "intermediate_size": 16,
    }
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", **small}))
    assert find_known_model("./Qwen3-8B").num_layers == 2
    assert find_known_model("Qwen3-8B").num_layers == 2
    assert find_known_model("Qwen/Qwen3-8B").num_layers == 36
    assert find_known_model(str(folder / "config.json")).num_layers == 2


def test_finds_snapshot_in_the_hub_cache(empty_machine: None, tmp_path: Path) -> None:
    snapshot = tmp_path / "HF_HUB_CACHE" / "models--me--tiny" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    small = {
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 32,
        "intermediate_size": 16,
    }
    (snapshot / "config.json").write_text(json.dumps({"model_type": "llama", **small}))
    assert find_local_model("me/tiny") is None
    header = b'{"model.embed_tokens.weight":{"dtype":"BF16","shape":[32,8],"data_offsets":[0,512]}}'
    (snapshot / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(512))
    model = find_known_model("me/tiny")
    assert (model.name, model.origin, model.weight_bytes) == ("me/tiny", "the Hugging Face cache", 512)


@pytest.mark.parametrize("name", ["model.bin", "model.pt", "model.pth"])
def test_rejects_pickles(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\x80\x02")
    with pytest.raises(UsageError, match="never opens one"):
        find_known_model(str(tmp_path / name))


def test_empty_name_is_a_usage_error(empty_machine: None) -> None:
    with pytest.raises(UsageError):
        find_known_model("")


def test_damaged_file_is_a_usage_error(builtin_gguf: Path, tmp_path: Path) -> None:
    with builtin_gguf.open("rb") as whole:
        (tmp_path / "cut.gguf").write_bytes(whole.read(1000))
    (tmp_path / "text.gguf").write_text("hello, I am no model")
    for name in ("cut.gguf", "text.gguf"):
        with pytest.raises(UsageError) as caught:
            find_known_model(str(tmp_path / name))
        assert name in f"{caught.value.message} {caught.value.cause}"
