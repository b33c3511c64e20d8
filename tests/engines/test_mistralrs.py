"""mistral.rs: our server's options, what it is given, and what its logs mean."""

from __future__ import annotations

import importlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engines.plans import machine, model, plan, plans

from bedplate.engines.mistralrs import ISQ, MistralRs
from bedplate.values import Model, Plan, Workload, replace_fields

RS = MistralRs()
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
CPU = machine("cpu")


@pytest.fixture(autouse=True)
def provide_server_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the engine's environment the server package is next to the program."""
    core = importlib.import_module("bedplate.engines.shipped.openai_server")
    monkeypatch.setitem(importlib.import_module("sys").modules, "openai_server", core)


def import_server() -> Any:
    return importlib.import_module("bedplate.engines.shipped.mistralrs_server")


def parse_server_options(argv: tuple[str, ...]) -> Any:
    core = importlib.import_module("bedplate.engines.shipped.openai_server")
    assert argv[0] == "mistralrs-server"
    return core.make_parser(import_server().MistralRsBackend).parse_args(argv[1:])


def make_gguf_model(**changes: Any) -> Model:
    return replace_fields(
        model(LLAMA), **{"format": "gguf", "quantization": "Q4_K_M", "files": ("/m/a.gguf",), **changes}
    )


class TestLaunch:
    @given(chosen=plans(RS))
    @settings(deadline=None)
    def test_every_option_of_a_launch_exists(self, chosen: Plan) -> None:
        said = parse_server_options(RS.launch(chosen, 8123).argv)
        assert (said.port, said.slots, said.context) == (8123, 1, chosen.settings.context_tokens)
        assert said.isq == (ISQ[chosen.weights.label] if chosen.weights.made == "while loading" else None)
        assert said.model == chosen.model_path and said.threads == chosen.settings.threads

    def test_launch_of_a_gguf_file(self) -> None:
        said = parse_server_options(RS.launch(plan(RS, CPU, make_gguf_model()), 1).argv)
        assert said.model == "/m/a.gguf" and said.isq is None


class TestPackages:
    @pytest.mark.parametrize(
        ("card", "package"),
        [
            ("RTX 4090", "mistralrs==0.9.5+cuda128.sm89"),
            ("RTX 3090", "mistralrs==0.9.5+cuda128.sm86"),
            ("H200 SXM", "mistralrs==0.9.5+cuda128.sm90"),
            ("B300 SXM", "mistralrs==0.9.5+cuda128.sm100"),  # 10.3
            ("GB10", "mistralrs==0.9.5+cuda129.sm121"),
        ],
    )
    def test_nvidia_uses_the_release_wheel_for_the_card(self, card: str, package: str) -> None:
        (step,) = RS.launch(plan(RS, machine(card, 1), model(LLAMA)), 1).prepare
        assert package in step.argv and "--find-links" in step.argv
        assert any("/v0.9.5" in word for word in step.argv)

    def test_older_cards_have_no_wheel_and_are_not_used(self) -> None:
        target = RS.find_target(machine("NVIDIA T4"))
        assert target is not None and target.device == "cpu"

    def test_other_devices_use_the_wheel_of_the_index(self) -> None:
        (step,) = RS.launch(plan(RS, CPU, make_gguf_model()), 1).prepare
        assert step.argv == () and step.what.startswith("mistralrs==0.9.5 ")


class TestModels:
    def test_weight_formats(self) -> None:
        target = RS.find_target(CPU)
        assert target is not None
        labels = [form.label for form in RS.list_weights(target, model(LLAMA), Workload())]
        assert labels == ["BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M"]
        exact = RS.list_weights(target, model(LLAMA), Workload(precision_sensitive=True))
        assert [form.label for form in exact] == ["BF16", "Q8_0"]
        assert [form.made for form in RS.list_weights(target, make_gguf_model(), Workload())] == ["as it is"]

    @pytest.mark.parametrize(
        ("which", "why"),
        [
            (make_gguf_model(architecture="bert"), "does not support the architecture bert"),
            (make_gguf_model(quantization="IQ2_XS"), "does not load IQ2_XS weights"),
            (replace_fields(model(LLAMA), quantization="FP8"), "does not load FP8 weights"),
            (replace_fields(model(LLAMA), architecture="falcon"), "does not support the architecture falcon"),
            (replace_fields(model(LLAMA), format="exl3"), "not exl3"),
        ],
    )
    def test_refuses_unsupported_models(self, which: Model, why: str) -> None:
        refused = RS.refuse(CPU, which, Workload())
        assert refused is not None and refused.kind == "impossible" and why in refused.why

    def test_serves_one_request_at_a_time(self) -> None:
        assert RS.settle(CPU, model(LLAMA), Workload(concurrency=50)).slots == 1
        assert (
            RS.refuse(CPU, model(LLAMA), Workload()) is None and RS.refuse(CPU, make_gguf_model(), Workload()) is None
        )


class TestExplain:
    @pytest.mark.parametrize(
        ("log", "says"),
        [
            # The first two are the messages of its own source (gguf/normal_registry.rs).
            ("ValueError: Unknown normal-model GGUF architecture `bert`", "does not support the architecture bert"),
            (
                "GGUF architecture `llama` appears to be a Mistral model, but the file does not encode whether "
                "sliding-window attention is required; provide its original Hugging Face model",
                "without the original configuration",
            ),
            ("bedplate-engine: /m/x.gguf is not a GGUF file", "/m/x.gguf is not a GGUF file"),
            ("bedplate-engine: the model file is damaged: it ends within its header", "the model file is damaged"),
            # Captured: a file that was cut short.
            (
                "bedplate-engine: mistral.rs cannot load the model: GGUF tensor `token_embd.weight` range begins at "
                "1785664 with storage ending at 31866688, outside file length 3000000",
                "the model file is damaged",
            ),
            (
                "bedplate-engine: mistral.rs cannot load the model: missing field `rope_theta` at line 34 column 1",
                "missing field `rope_theta`",
            ),
        ],
    )
    def test_known_failures(self, log: str, says: str) -> None:
        failure = RS.explain(log)
        assert failure is not None and says in failure.message

    def test_unknown_logs_are_not_explained(self) -> None:
        assert RS.explain("INFO mistralrs_core: mistral.rs version: 0.9.5") is None


def write_header(*pairs: tuple[str, int, bytes]) -> bytes:
    body = b"".join(
        struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + data for key, kind, data in pairs
    )
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs)) + body


def encode_text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


class TestFiles:
    HEADER = write_header(
        ("general.architecture", 8, encode_text("llama")),
        ("tokenizer.ggml.scores", 9, struct.pack("<IQ", 6, 3) + b"\0" * 12),
        (
            "tokenizer.ggml.tokens",
            9,
            struct.pack("<IQ", 8, 3) + encode_text("<unk>") + encode_text("<s>") + encode_text("</s>"),
        ),
        ("tokenizer.ggml.bos_token_id", 4, struct.pack("<I", 1)),
        ("tokenizer.ggml.eos_token_id", 4, struct.pack("<I", 2)),
        ("tokenizer.chat_template", 8, encode_text("{{ bos_token }}")),
    )

    def test_reads_template_and_special_tokens_of_a_gguf(self, tmp_path: Path) -> None:
        file = tmp_path / "a.gguf"
        file.write_bytes(self.HEADER)
        found = import_server().read_gguf_metadata(file)
        assert found["tokenizer.chat_template"] == "{{ bos_token }}" and found["tokenizer.ggml.scores"] is None
        assert import_server().find_gguf_special_tokens(found) == {"bos_token": "<s>", "eos_token": "</s>"}

    @given(cut=st.integers(0, len(HEADER) - 1))
    @settings(deadline=None)
    def test_rejects_a_truncated_file(self, tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
        core = importlib.import_module("bedplate.engines.shipped.openai_server")
        file = tmp_path_factory.mktemp("cut") / "a.gguf"
        file.write_bytes(self.HEADER[:cut])
        with pytest.raises(core.BackendError):
            import_server().read_gguf_metadata(file)

    def test_reads_the_built_in_model(self, builtin_gguf: Path) -> None:
        found = import_server().read_gguf_metadata(builtin_gguf)
        assert "<|im_start|>" in found["tokenizer.chat_template"]
        assert import_server().find_gguf_special_tokens(found)["eos_token"] == "<|im_end|>"

    def test_refuses_a_prompt_without_text(self) -> None:
        """Token ids beyond the vocabulary have no text, and the engine fails on none."""
        core = importlib.import_module("bedplate.engines.shipped.openai_server")
        backend = object.__new__(import_server().MistralRsBackend)
        with pytest.raises(core.BackendError, match="not in the vocabulary"):
            backend.admit(core.GenerationRequest(prompt=[10**9], text="", max_tokens=4))

    def test_configuration_of_transformers_5_is_rewritten(self, tmp_path: Path) -> None:
        config = {"rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}, "model_type": "llama"}
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "model.safetensors").write_bytes(b"weights")
        twin = import_server().make_readable(tmp_path)
        said = json.loads((twin / "config.json").read_text())
        assert twin != tmp_path and said["rope_theta"] == 1e5 and said["rope_scaling"] is None
        assert (twin / "model.safetensors").read_bytes() == b"weights"
        (tmp_path / "config.json").write_text(json.dumps({**config, "rope_theta": 1e5}))
        assert import_server().make_readable(tmp_path) == tmp_path
