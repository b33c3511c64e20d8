"""Our llama-quantize: the types that the real one chooses, and its library's own arithmetic."""

from __future__ import annotations

import importlib
import json
import subprocess
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from bedplate.run.environments import EngineEnvironment, add_library_path, build_command
from bedplate.values import Launch

CAPTURES = Path(__file__).parent.parent / "captures" / "llama-quantize"
SHAPES: dict[str, Any] = json.loads((CAPTURES / "types.json").read_text(encoding="utf-8"))
quantize: Any = importlib.import_module("bedplate.engines.shipped.llama_quantize")


def expand_types(types: str) -> list[str]:
    found: list[str] = []
    for word in types.split():
        count, _, name = word.rpartition("*")
        found += [name] * int(count or 1)
    return found


def count_columns(name: str, shape: dict[str, Any]) -> int:
    return int(shape["intermediate"] if "ffn_down" in name else shape["hidden"])


@pytest.mark.parametrize("label", ["Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "Q5_1", "Q4_1"])
@pytest.mark.parametrize("name", sorted(SHAPES))
def test_every_tensor_has_the_type_of_the_original_program(name: str, label: str) -> None:
    shape = SHAPES[name]
    expected: dict[str, str] = {}
    for tensor, types in shape["types"][label].items():
        listed = expand_types(types)
        if tensor in ("output.weight", "token_embd.weight"):
            expected[tensor] = listed[0]
        else:
            expected.update({f"blk.{layer}.{tensor}": one for layer, one in enumerate(listed)})
    told = quantize.ModelProperties(
        shape["architecture"], shape["layers"], shape["experts"], shape["heads"], shape["kv_heads"], shape["tied"]
    )
    values = sum(quantize.find_role(tensor) == "value" for tensor in expected)
    chooser = quantize.TensorTypeChooser(label, told, values)
    ordered = sorted(expected, key=lambda tensor: (quantize.parse_layer(tensor), tensor))
    chosen = {
        tensor: chooser.choose_type(tensor, count_columns(tensor, shape))
        for tensor in ordered
        if quantize.is_quantized(tensor, 2)
    }
    assert chosen == {tensor: expected[tensor] for tensor in chosen}
    kept = set(expected) - set(chosen)
    assert all("ffn_gate_inp" in tensor for tensor in kept)


def write_model(path: Path, columns: int = 256) -> dict[str, np.ndarray[Any, Any]]:
    """Write a small Llama file, and return its weights."""
    random = np.random.default_rng(7)
    weights = {"token_embd.weight": random.standard_normal((32, columns)).astype(np.float16)}
    for layer in range(2):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
            weights[f"blk.{layer}.{name}.weight"] = random.standard_normal((64, columns)).astype(np.float16)
        weights[f"blk.{layer}.attn_norm.weight"] = random.standard_normal(columns).astype(np.float32)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_head_count(4)
    writer.add_file_type(1)
    writer.add_array("tokenizer.ggml.tokens", ["a", "\u00e9", " 1"])
    for name, tensor in weights.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def run(environment: EngineEnvironment, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = build_command(environment, Launch(argv=("llama-quantize", *arguments)))
    return subprocess.run(argv, capture_output=True, text=True, env=add_library_path(Path(environment.path), {}))


@pytest.mark.parametrize(
    ("label", "columns", "most", "off"), [("Q4_K_M", 256, "Q4_K", 0.12), ("Q4_1", 96, "Q4_1", 0.12)]
)
def test_quantizes_with_the_library_of_the_wheel(
    label: str, columns: int, most: str, off: float, llama_environment: EngineEnvironment, tmp_path: Path
) -> None:
    weights = write_model(tmp_path / "in.gguf", columns)
    done = run(llama_environment, str(tmp_path / "in.gguf"), str(tmp_path / "out.gguf"), label, "2")
    assert done.returncode == 0, done.stderr
    reader = gguf.GGUFReader(tmp_path / "out.gguf")
    assert {tensor.name for tensor in reader.tensors} == set(weights)
    for tensor in reader.tensors:
        before = weights[tensor.name].astype(np.float32)
        after = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(before.shape)
        assert np.sqrt(np.mean((after - before) ** 2)) < off
        if "norm" in tensor.name:
            assert np.array_equal(after, before)
    assert [tensor.tensor_type.name for tensor in reader.tensors].count(most) > 8
    words, kind = reader.get_field("tokenizer.ggml.tokens"), reader.get_field("general.file_type")
    assert words is not None and words.contents() == ["a", "\u00e9", " 1"]
    assert kind is not None and kind.contents() == quantize.MIXTURES[label][1]


@pytest.mark.parametrize("threads", ["1", "3"])
def test_result_does_not_depend_on_the_number_of_threads(
    threads: str, llama_environment: EngineEnvironment, tmp_path: Path
) -> None:
    write_model(tmp_path / "in.gguf")
    files = [tmp_path / "one.gguf", tmp_path / "other.gguf"]
    for file, count in zip(files, ("2", threads), strict=True):
        assert run(llama_environment, str(tmp_path / "in.gguf"), str(file), "Q5_K_M", count).returncode == 0
    assert files[0].read_bytes() == files[1].read_bytes()


def test_rejects_a_file_that_is_not_a_model_and_leaves_no_result(
    llama_environment: EngineEnvironment, tmp_path: Path
) -> None:
    source, result = tmp_path / "in.gguf", tmp_path / "out.gguf"
    source.write_bytes(b"GGUF and then nothing")
    done = run(llama_environment, str(source), str(result), "Q4_K_M")
    assert done.returncode == 1 and "is not a complete GGUF file" in done.stderr and not result.exists()
    missing = run(llama_environment, str(tmp_path / "gone.gguf"), str(result), "Q4_K_M")
    assert missing.returncode == 1 and "does not exist" in missing.stderr


def test_rejects_quantized_weights(llama_environment: EngineEnvironment, tmp_path: Path) -> None:
    write_model(tmp_path / "in.gguf")
    run(llama_environment, str(tmp_path / "in.gguf"), str(tmp_path / "small.gguf"), "Q4_K_M")
    again = run(llama_environment, str(tmp_path / "small.gguf"), str(tmp_path / "smaller.gguf"), "Q3_K_M")
    assert again.returncode == 1 and "is already quantized" in again.stderr
    assert not (tmp_path / "smaller.gguf").exists()


@pytest.mark.parametrize(("label", "off"), [("Q8_0", 0.02), ("F16", 0.001)])
def test_requantizes_quantized_weights_if_allowed(
    label: str, off: float, llama_environment: EngineEnvironment, tmp_path: Path
) -> None:
    """More bits neither restore nor lose precision: the weights are the same, in another type."""
    write_model(tmp_path / "in.gguf")
    run(llama_environment, str(tmp_path / "in.gguf"), str(tmp_path / "small.gguf"), "Q4_1")
    done = run(
        llama_environment, "--allow-requantize", str(tmp_path / "small.gguf"), str(tmp_path / "again.gguf"), label
    )
    assert done.returncode == 0, done.stderr
    small, again = (gguf.GGUFReader(tmp_path / f"{name}.gguf") for name in ("small", "again"))
    for before, after in zip(small.tensors, again.tensors, strict=True):
        one, other = (gguf.quants.dequantize(each.data, each.tensor_type) for each in (before, after))
        assert before.name == after.name and np.abs(one - other.reshape(one.shape)).max() < off * 4
    assert [tensor.tensor_type.name for tensor in again.tensors].count(label) > 8


def test_an_unknown_mixture_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        quantize.main(["in.gguf", "out.gguf", "Q9_K"])
    assert ended.value.code == 2 and "Q4_K_M" in capsys.readouterr().err
