"""The vision encoder of a GGUF model is found beside it, and counts in the plan."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from tests.engines.plans import machine, plan
from tests.tiny_projector import TOKENS, make_projector

from bedplate.decide import decide
from bedplate.engines import get_engine
from bedplate.facts.gguf import read_gguf
from bedplate.values import Workload, replace_fields

HIDDEN = 64


def make_model(path: Path, hidden_size: int = HIDDEN) -> Path:
    """The header and two tensors of a language model."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(4096)
    writer.add_embedding_length(hidden_size)
    writer.add_head_count(2)
    for layer in range(2):
        writer.add_tensor(f"blk.{layer}.attn_q.weight", np.zeros((hidden_size, hidden_size), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_projector_beside_a_model_is_read(tmp_path: Path) -> None:
    file = make_projector(tmp_path / "mmproj-model-f16.gguf", HIDDEN)
    model = read_gguf(make_model(tmp_path / "tiny-vlm-Q4_K_M.gguf"))
    found = model.projector
    assert found is not None and found.file == str(file)
    assert (found.kind, found.image_size, found.image_tokens) == ("mlp", 56, TOKENS)
    assert 0 < found.weight_bytes <= file.stat().st_size and found.weight_bytes == 4 * found.parameters
    assert model.weight_bytes == 2 * HIDDEN * HIDDEN * 4, "no other figure includes it"


@pytest.mark.parametrize(
    ("kind", "tokens"), [("idefics3", TOKENS // 4), ("ldp", TOKENS // 4), ("qwen2vl_merger", None)]
)
def test_tokens_of_an_image_follow_from_the_kind_of_projector(tmp_path: Path, kind: str, tokens: int | None) -> None:
    make_projector(tmp_path / "mmproj.gguf", HIDDEN, kind)
    found = read_gguf(make_model(tmp_path / "tiny.gguf")).projector
    assert found is not None and found.image_tokens == tokens


def test_a_projector_of_another_model_is_not_taken(tmp_path: Path) -> None:
    model = make_model(tmp_path / "tiny-vlm-q8_0.gguf")
    make_projector(tmp_path / "mmproj-wide.gguf", 3 * HIDDEN // 2)
    assert read_gguf(model).projector is None, "its width is another one"
    (tmp_path / "mmproj-broken.gguf").write_bytes(b"GGUF")
    make_projector(tmp_path / "mmproj-sound.gguf", HIDDEN, vision=False)
    assert read_gguf(model).projector is None, "one is damaged, one has no vision encoder"
    make_projector(tmp_path / "mmproj-any.gguf", HIDDEN)
    assert read_gguf(model).projector is not None
    make_model(tmp_path / "other-model-q8_0.gguf")
    assert read_gguf(model).projector is None, "it may belong to either of two models"
    named = make_projector(tmp_path / "mmproj-tiny-vlm-f16.gguf", HIDDEN)
    found = read_gguf(model).projector
    assert found is not None and found.file == str(named)


def test_images_count_in_the_plan_of_llama_cpp_alone(tmp_path: Path) -> None:
    make_projector(tmp_path / "mmproj.gguf", HIDDEN)
    model = read_gguf(make_model(tmp_path / "tiny.gguf"))
    work, engine = Workload(context_tokens=1024), get_engine("llama.cpp")
    with_images = plan(engine, machine("cpu"), model, workload=work)
    argv = engine.launch(with_images, 8000).argv
    assert argv[argv.index("--mmproj") + 1] == str(tmp_path / "mmproj.gguf")
    capabilities = engine.describe_capabilities(with_images)
    assert capabilities is not None and capabilities.vision
    text = replace_fields(model, projector=None)
    plain = plan(engine, machine("cpu"), text, workload=work)
    assert "--mmproj" not in engine.launch(plain, 8000).argv
    assert not getattr(engine.describe_capabilities(plain), "vision", True)
    needs = [decide(machine("cpu"), one, work, "llama.cpp").memory for one in (model, text)]
    assert model.projector is not None
    (first,), (second,) = (need.devices for need in needs if need is not None)
    more = first.overhead_bytes.value - second.overhead_bytes.value
    assert more == pytest.approx(model.projector.weight_bytes + model.projector.activation_bytes)
    reasons = {one.rule: one.text for one in decide(machine("cpu"), model, work, "llama.cpp").reasons}
    assert "1,024 tokens hold at most 64" in reasons["vision.images"]
    assert "vision.images" not in {one.rule for one in decide(machine("cpu"), text, work, "llama.cpp").reasons}
