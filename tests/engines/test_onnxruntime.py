"""ONNX Runtime: its builder's options, our server's options, what it is given, and what its logs mean."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from tests.engines.argv import parse_options, read_options
from tests.engines.plans import machine, model, plan, plans

from bedplate.engines.onnxruntime import PRECISIONS, OnnxRuntime
from bedplate.engines.shipped import SERVER
from bedplate.values import Model, Plan, Settings, Workload, replace_fields

ORT = OnnxRuntime()
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
CPU = machine("cpu")
EMBED = Workload(task="embed")


@pytest.fixture(autouse=True)
def provide_server_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the engine's environment the server package is next to the program."""
    core = importlib.import_module("bedplate.engines.shipped.openai_server")
    monkeypatch.setitem(importlib.import_module("sys").modules, "openai_server", core)


def import_server() -> Any:
    return importlib.import_module("bedplate.engines.shipped.onnxruntime_server")


def parse_server_options(argv: tuple[str, ...]) -> Any:
    core = importlib.import_module("bedplate.engines.shipped.openai_server")
    assert argv[0] == "onnxruntime-server"
    return core.make_parser(import_server().OnnxRuntimeBackend).parse_args(argv[1:])


def make_encoder(**changes: Any) -> Model:
    known = {"name": "all-MiniLM-L6-v2", "architecture": "bert", "task": "embed", "format": "safetensors"}
    files = ("/models/mini lm/model.safetensors",)
    sizes = {"parameters": 22_700_000, "weight_bytes": 90_900_000, "num_layers": 6, "kv_bytes_per_token": 0}
    return Model(**{**known, **sizes, "files": files, "quantization": "F32", **changes})


class TestLaunch:
    @given(chosen=plans(ORT))
    @settings(deadline=None)
    def test_every_option_of_a_launch_exists(self, chosen: Plan) -> None:
        launch = ORT.launch(chosen, 8123)
        said = parse_server_options(launch.argv)
        assert (said.port, said.slots) == (8123, chosen.settings.slots) and said.host == "127.0.0.1"
        assert said.context == chosen.settings.context_tokens and said.threads == chosen.settings.threads
        assert said.device == chosen.settings.device
        (build,) = [step for step in launch.prepare if step.kind == "convert"]
        assert build.argv[:3] == ("python", "-m", "onnxruntime_genai.models.builder")
        options = parse_options("onnxruntime_builder", build.argv[3:])
        assert options["--output"] == said.model == build.where
        pair = f"{options['--execution_provider']} {options['--precision']}"
        assert pair in read_options("onnxruntime_builder")["pairs"]
        assert ("--input" in options) == bool(chosen.model.files) != ("--model_name" in options)
        assert build.disk_bytes and build.seconds and build.seconds.low < build.seconds.value < build.seconds.high

    def test_onnx_folder_needs_no_conversion(self) -> None:
        ready = replace_fields(model(LLAMA), format="onnx", quantization="INT4", files=("/models/llama/model.onnx",))
        launch = ORT.launch(plan(ORT, CPU, ready), 1)
        assert parse_server_options(launch.argv).model == "/models/llama" and [
            step.kind for step in launch.prepare
        ] == ["install"]

    def test_an_encoder_is_exported(self) -> None:
        launch = ORT.launch(plan(ORT, CPU, make_encoder(), workload=EMBED), 1)
        step = launch.prepare[-1]
        assert step.argv == ("onnx-export", "--model", "/models/mini lm", "--output", "all-MiniLM-L6-v2-F32")
        assert (
            parse_server_options(launch.argv).model == "all-MiniLM-L6-v2-F32"
            and parse_server_options(launch.argv).slots == 1
        )

    def test_missing_encoder_is_downloaded_first(self) -> None:
        away = make_encoder(name="sentence-transformers/all-MiniLM-L6-v2", files=())
        steps = ORT.launch(plan(ORT, CPU, away, workload=EMBED), 1).prepare
        assert [step.kind for step in steps] == ["install", "download", "convert"]
        assert steps[1].argv[:2] == ("hf", "download") and steps[1].where == steps[2].argv[2] == "all-MiniLM-L6-v2"

    def test_installs_cuda_packages_for_a_card(self) -> None:
        launch = ORT.launch(plan(ORT, machine("H100 SXM"), model(LLAMA)), 1)
        assert "onnxruntime-genai-cuda==0.18.0 onnxruntime-gpu==1.31.1 " in launch.prepare[0].what
        assert "use_paged_attention=true" in launch.prepare[1].argv and "cuda" in launch.argv
        recipe, plain = ORT.find_recipe("cuda"), ORT.find_recipe("cpu")
        assert recipe is not None and " ".join(recipe.packages) == launch.prepare[0].what
        assert plain == ORT.recipe and plain != recipe

    def test_programs_and_their_shared_part_are_shipped(self) -> None:
        assert ORT.recipe is not None
        names = [name for name, _ in ORT.recipe.programs]
        assert names[:2] == ["onnxruntime-server", "onnx-export"] and names[2:] == [name for name, _ in SERVER]


class TestModels:
    def test_weight_formats(self) -> None:
        cpu, card = ORT.find_target(CPU), ORT.find_target(machine("H100 SXM"))
        assert cpu is not None and card is not None
        llama = model(LLAMA)
        assert [form.label for form in ORT.list_weights(cpu, llama, Workload())] == ["F32", "INT8", "INT4"]
        assert [form.label for form in ORT.list_weights(card, llama, Workload())] == ["BF16", "INT8", "INT4"]
        exact = ORT.list_weights(cpu, llama, Workload(precision_sensitive=True))
        assert [form.label for form in exact] == ["F32", "INT8"] and {form.made for form in exact} == {"converted"}
        assert set(PRECISIONS) >= {form.label for form in ORT.list_weights(card, llama, Workload())}

    @pytest.mark.parametrize(
        ("which", "work", "why"),
        [
            (model("deepseek-ai/DeepSeek-R1"), Workload(), "does not support the architecture deepseek_v3"),
            (model("Qwen/Qwen3-235B-A22B-FP8"), Workload(), "does not support the architecture qwen3_moe"),
            (replace_fields(model(LLAMA), quantization="FP8"), Workload(), "cannot convert FP8 weights"),
            (replace_fields(model(LLAMA), format="exl3"), Workload(), "loads ONNX, not exl3"),
            (make_encoder(architecture="clip"), EMBED, "exporter does not support the architecture clip"),
        ],
    )
    def test_refuses_unsupported_models(self, which: Model, work: Workload, why: str) -> None:
        refused = ORT.refuse(CPU, which, work)
        assert refused is not None and refused.kind == "impossible" and why in refused.why

    def test_supported_tasks(self) -> None:
        assert ORT.refuse(CPU, model(LLAMA), Workload()) is None
        assert ORT.refuse(CPU, make_encoder(), EMBED) is None
        assert ORT.refuse(CPU, make_encoder(format="onnx", architecture="clip"), EMBED) is None
        assert ORT.refuse(CPU, make_encoder(task="classify"), Workload(task="classify")) is None

    def test_threads_are_set_only_on_a_cpu(self) -> None:
        work = Workload(concurrency=3)
        assert ORT.settle(CPU, model(LLAMA), work).threads == CPU.cpu.allowed_physical_cores
        assert ORT.settle(machine("H100 SXM"), model(LLAMA), work).threads is None
        assert ORT.settle(CPU, model(LLAMA), work).slots == 3 and ORT.settle(CPU, model(LLAMA), Workload()).slots == 4


class TestExplain:
    @pytest.mark.parametrize(
        ("log", "says", "hint"),
        [
            (
                "bedplate-engine: there is no .onnx file in /models/x",
                "/models/x contains no .onnx file",
                "specify the folder",
            ),
            (
                "bedplate-engine: this model has inputs other than text: pixel_values",
                "has inputs other than text: pixel_values",
                "generates, embeds or classifies",
            ),
            # Captured: a folder without its .onnx.data file, and graphs that were cut short.
            (
                "RuntimeError: External data path validation failed for initializer: model.layers.0.input_layernorm."
                "weight. Error: tensorprotoutils.cc:461 ValidateExternalDataPathFromDir External data path does not "
                'exist: "/models/smol/model.onnx.data"',
                "external data is missing",
                "including the .onnx.data files",
            ),
            (
                "RuntimeError: Load model from smol/model.onnx failed:Protobuf parsing failed.",
                "is damaged",
                "download it again",
            ),
            (
                "onnxruntime.capi.onnxruntime_pybind11_state.InvalidProtobuf: [ONNXRuntimeError] : 7 : "
                "INVALID_PROTOBUF : Load model from minilm/model.onnx failed:Protobuf parsing failed.",
                "is damaged",
                "download it again",
            ),
            (
                "bedplate-engine: /m/smol has no tokenizer.json",
                "/m/smol has no tokenizer.json",
                "to the folder of the .onnx file",
            ),
            ("MemoryError: std::bad_alloc", "not enough memory", "--context 4096"),
        ],
    )
    def test_known_failures(self, log: str, says: str, hint: str) -> None:
        failure = ORT.explain(log)
        assert failure is not None and says in failure.message and hint in failure.hint and failure.lasting

    def test_unknown_logs_are_not_explained(self) -> None:
        assert ORT.explain("bedplate-engine: loading 1.000") is None


class TestPooling:
    STATES = np.array([[[1.0, 2.0], [3.0, 6.0], [50.0, 70.0]], [[2.0, 0.0], [4.0, 2.0], [6.0, 1.0]]], dtype=np.float32)
    MASK = np.array([[1, 1, 0], [1, 1, 1]])

    @pytest.mark.parametrize(
        ("how", "expected"),
        [
            ("mean", [[2, 4], [4, 1]]),
            ("cls", [[1, 2], [2, 0]]),
            ("last", [[3, 6], [6, 1]]),
            ("max", [[3, 6], [6, 2]]),
        ],
    )
    def test_pooling_ignores_padding(self, how: str, expected: list[list[int]]) -> None:
        assert import_server()._pool(self.STATES, self.MASK, how).tolist() == expected

    def test_reads_pooling_of_sentence_transformers(self, tmp_path: Path) -> None:
        assert import_server()._read_pooling(tmp_path) == ("mean", False)
        kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
        modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds]
        (tmp_path / "modules.json").write_text(json.dumps(modules))
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
        assert import_server()._read_pooling(tmp_path) == ("cls", True)

    def test_computes_logprobs(self) -> None:
        said = import_server()._compute_logprobs(np.log(np.array([[[0.5, 0.25, 0.25]]])), 1, 2)
        assert said["logprob"] == pytest.approx(np.log(0.25)) and said["top"][0][0] == 0


def test_rejects_a_model_that_is_not_a_folder(tmp_path: Path) -> None:
    core = importlib.import_module("bedplate.engines.shipped.openai_server")
    options = core.make_parser(import_server().OnnxRuntimeBackend).parse_args(["--model", str(tmp_path / "none")])
    with pytest.raises(core.BackendError, match="is not a folder"):
        import_server().OnnxRuntimeBackend().load(options, lambda share: None)
    assert isinstance(ORT.settle(CPU, make_encoder(), EMBED), Settings)
