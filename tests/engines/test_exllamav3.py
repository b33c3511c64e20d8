"""ExLlamaV3: its converter's options, our server's options and its pieces, and what its logs mean."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from tests.engines.argv import parse_options
from tests.engines.plans import machine, model, plan, plans

from bedplate.engines.base import DEFAULT_CONTEXT_TOKENS
from bedplate.engines.exllamav3 import BPW, ExLlamaV3
from bedplate.values import Parallelism, Plan, Settings, Workload, replace_fields

EXL = ExLlamaV3()
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
RTX = machine("RTX 4090", 2)


def import_server() -> Any:
    return importlib.import_module("bedplate.engines.shipped.exllamav3_server")


def parse_server_options(argv: tuple[str, ...]) -> Any:
    core = importlib.import_module("bedplate.engines.shipped.openai_server")
    assert argv[0] == "exllamav3-server"
    return core.make_parser(import_server().ExLlamaV3Backend).parse_args(argv[1:])


@pytest.fixture(autouse=True)
def provide_server_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the engine's environment the server package is next to the program."""
    core = importlib.import_module("bedplate.engines.shipped.openai_server")
    monkeypatch.setitem(sys.modules, "openai_server", core)


class TestLaunch:
    @given(chosen=plans(EXL))
    @settings(deadline=None)
    def test_every_option_of_a_launch_exists(self, chosen: Plan) -> None:
        launch = EXL.launch(chosen, 8123)
        said = parse_server_options(launch.argv)
        layout = chosen.parallelism
        assert (
            said.port == 8123 and said.slots == chosen.settings.slots and said.context == chosen.settings.context_tokens
        )
        assert said.cards == layout.tensor * layout.pipeline and said.tensor_parallel == (layout.tensor > 1)
        assert said.cache_tokens >= said.slots * said.context and said.cache_tokens % 256 == 0
        assert said.cache_bits == (8 if chosen.settings.kv_type == "fp8" else None)
        convert = [step for step in launch.prepare if step.kind == "convert"]
        assert bool(convert) == (chosen.weights.made == "converted")
        for step in convert:
            assert step.argv[:2] == ("python", "-c")
            assert '"exllamav3-kernels"' in step.argv[2] and '"exllamav3.conversion.convert_model"' in step.argv[2]
            options = parse_options("exllamav3", step.argv[3:])
            assert options["-o"] == said.model == step.where and f"{options['-b']}BPW" == chosen.weights.label
            assert step.disk_bytes and step.seconds and step.seconds.low < step.seconds.value < step.seconds.high

    def test_kernels_are_compiled_before_the_launch(self) -> None:
        steps = EXL.launch(plan(EXL, RTX, model(LLAMA)), 1).prepare
        assert [step.kind for step in steps] == ["install", "build", "download", "convert"]
        assert steps[1].argv[-1].endswith("; import exllamav3") and steps[1].seconds is not None

    def test_kernels_conversion_and_server_use_one_folder(self) -> None:
        launch = EXL.launch(plan(EXL, RTX, model(LLAMA)), 1)
        _, build, _, convert = launch.prepare
        assert launch.env == {"TORCH_EXTENSIONS_DIR": build.where, "OMP_NUM_THREADS": "1"}
        assert all(
            f'os.path.abspath("{build.where}")' in step.argv[step.argv.index("-c") + 1] for step in (build, convert)
        )

    def test_only_the_number_of_compile_jobs_depends_on_the_machine(self) -> None:
        chosen = plan(EXL, RTX, model(LLAMA))
        one, two = (
            EXL.launch(replace_fields(chosen, settings=replace_fields(chosen.settings, threads=threads)), 1).prepare[1]
            for threads in (2, 16)
        )
        assert one.argv[:2] == ("env", "MAX_JOBS=2") and two.argv[:2] == ("env", "MAX_JOBS=16")
        assert one.argv[2:] == two.argv[2:]


class TestModels:
    def test_bits_per_weight(self) -> None:
        target = EXL.find_target(RTX)
        assert target is not None
        forms = EXL.list_weights(target, model(LLAMA), Workload())
        assert tuple(form.label for form in forms) == BPW and {form.made for form in forms} == {"converted"}
        exact = EXL.list_weights(target, model(LLAMA), Workload(precision_sensitive=True))
        assert [form.label for form in exact] == ["8.0BPW"]
        ready = replace_fields(model(LLAMA), format="exl3", quantization="4.0BPW")
        assert [form.made for form in EXL.list_weights(target, ready, Workload())] == ["as it is"]
        oss = EXL.list_weights(target, model("openai/gpt-oss-20b"), Workload())
        assert oss[0].label == "5.0BPW"

    @pytest.mark.parametrize(
        ("card", "name", "why"),
        [
            ("cpu", LLAMA, "needs an NVIDIA GPU"),
            ("MI300X", LLAMA, "needs an NVIDIA GPU"),
            ("RTX 4090", "deepseek-ai/DeepSeek-V3.2", "does not support the architecture deepseek_v32"),
            ("RTX 4090", "google/gemma-4-E4B-it", "small E models"),
            ("RTX 4090", "nvidia/DeepSeek-V3-0324-NVFP4", "no conversion of NVFP4 weights"),
            ("RTX 4090", "HuggingFaceTB/SmolLM2-135M-Instruct", "multiple of 128, and this model's is 576"),
        ],
    )
    def test_refuses_unsupported_models_and_hardware(self, card: str, name: str, why: str) -> None:
        refused = EXL.refuse(machine(card), model(name), Workload())
        assert refused is not None and refused.kind == "impossible" and why in refused.why

    @pytest.mark.parametrize(
        ("architecture", "width", "runs"),
        [
            # Wide as the models of these names are: SmolLM2-135M and 360M, Qwen2.5-0.5B, Gemma 3 1B, gpt-oss.
            ("llama", 576, False),
            ("llama", 960, False),
            ("qwen2", 896, True),
            ("gemma3_text", 1152, True),
            ("gpt_oss", 2880, True),
            # Only experts are trimmed to the hidden size; an additional gated MLP is not.
            ("qwen3_moe", 2000, True),
            ("glm4_moe", 2000, False),
            ("llama", None, True),
        ],
    )
    def test_refuses_hidden_sizes_that_would_be_padded(self, architecture: str, width: int | None, runs: bool) -> None:
        # Neither the heads' width (9 of 64) nor the MLP's (1500) must divide.
        shape = replace_fields(
            model(LLAMA), architecture=architecture, hidden_size=width, num_heads=9, head_dim=64, intermediate_size=1500
        )
        refused = EXL.refuse(RTX, shape, Workload())
        assert (refused is None) == runs
        assert runs or (refused is not None and refused.kind == "impossible" and "exllamav2" in str(refused.hint))

    def test_turing_is_the_oldest_supported_generation(self) -> None:
        assert EXL.refuse(machine("NVIDIA T4", 1), model(LLAMA), Workload()) is None
        refused = EXL.refuse(machine("V100 SXM2 32GB", 1), model(LLAMA), Workload())
        assert refused is not None and "compute capability 7.5" in refused.why


class Tokens:
    """As much of a tensor as the server looks at."""

    def __init__(self, *ids: int) -> None:
        self.ids = list(ids)

    def flatten(self) -> Tokens:
        return self

    def tolist(self) -> list[int]:
        return self.ids


class TestPieces:
    """Results in the form that generator/job.py of 1.6.5 gives them (constructed)."""

    def pieces(self, **result: Any) -> list[tuple[int | None, str | None, int, str | None, int | None]]:
        core = importlib.import_module("bedplate.engines.shipped.openai_server")
        found = import_server()._make_pieces(core.GenerationRequest(), {"stage": "streaming", "eos": False, **result})
        return [(one.token, one.text, one.tokens, one.finish, one.cached_tokens) for one in found]

    def test_tokens_become_pieces(self) -> None:
        assert self.pieces(token_ids=Tokens(5, 6)) == [(5, None, 1, None, None), (6, None, 1, None, None)]
        assert self.pieces() == []

    def test_eos_token_is_counted_and_not_shown(self) -> None:
        end = {"eos": True, "eos_reason": "stop_token", "eos_triggering_token_id": 2, "cached_tokens": 256}
        assert self.pieces(**end) == [(2, "", 1, "stop", 256)]
        assert self.pieces(token_ids=Tokens(5), **end) == [(5, None, 1, None, None), (2, "", 1, "stop", 256)]

    def test_length_limit_ends_with_the_last_token(self) -> None:
        end = {"eos": True, "eos_reason": "max_new_tokens", "cached_tokens": 0}
        assert self.pieces(token_ids=Tokens(5, 6), **end) == [(5, None, 1, None, None), (6, None, 1, "length", 0)]

    def test_grammar_ends_the_answer(self) -> None:
        assert self.pieces(token_ids=Tokens(5), eos=True, eos_reason="end_filter")[-1] == (None, "", 0, "stop", None)


class TestPlacement:
    def test_uses_the_first_cards(self) -> None:
        place = import_server()._choose_placement
        assert place(1, False, 8) == {"device": "cuda:0"}
        assert place(2, False, 4) == {"reserve_per_device": [0.5, 0.5, -1.0, -1.0], "tensor_p": False}
        assert place(2, True, 2) == {"reserve_per_device": [0.5, 0.5], "tensor_p": True}

    def test_eos_tokens_of_both_configurations_are_used(self, tmp_path: Any) -> None:
        assert import_server()._list_eos_tokens(str(tmp_path), [7, None]) == [7]
        (tmp_path / "generation_config.json").write_text('{"eos_token_id": [8, 7]}')
        assert import_server()._list_eos_tokens(str(tmp_path), [7]) == [7, 8]
        (tmp_path / "generation_config.json").write_text('{"eos_token_id": 9}')
        assert import_server()._list_eos_tokens(str(tmp_path), [7]) == [7, 9]


@pytest.mark.parametrize(
    ("line", "says", "lasting"),
    [
        # turboderp-org/exllamav3, issue 50, and model/model_ls.py of 1.6.5.
        ("RuntimeError: Insufficient VRAM in split for model and cache", "not enough GPU memory", True),
        # model/config.py of 1.6.5.
        ("AssertionError: Unknown architecture LlumaForCausalLM in /m/config.json", "LlumaForCausalLM", True),
        ("RuntimeError: Error building extension 'exllamav3_ext'", "compilation of its kernels failed", True),
        # Of 1.6.5 on an H200, converting SmolLM2-135M.
        (
            "RuntimeError: The size of tensor a (576) must match the size of tensor b (640) "
            "at non-singleton dimension 2",
            "the hidden size is 576, and its layers return 640",
            True,
        ),
        # torch/utils/cpp_extension.py.
        ("OSError: CUDA_HOME environment variable is not set. Please set it to your CUDA install root.", "nvcc", True),
        ("bedplate-engine: cannot listen on 127.0.0.1:8000: port is in use", "took the engine's private port", False),
    ],
)
def test_known_failures(line: str, says: str, lasting: bool) -> None:
    failure = EXL.explain(f"something before\n{line}\nand after")
    assert failure is not None and says in failure.message and failure.lasting is lasting
    assert EXL.explain("bedplate-engine: loading 0.5") is None


def test_settings_on_two_cards() -> None:
    chosen = plan(EXL, RTX, model(LLAMA), layout=Parallelism(tensor=2), workload=Workload(users=4))
    assert chosen.settings == Settings(slots=4, context_tokens=DEFAULT_CONTEXT_TOKENS, device="cuda", threads=16)


class FakeExLlamaV3:
    """A fake of the package that records its arguments, and returns scripted results."""

    def __init__(self, results: list[list[dict[str, Any]]]) -> None:
        self.calls: dict[str, Any] = {}
        self.results = results
        self.jobs: list[Any] = []
        self.cancelled: list[Any] = []
        self.CacheLayer_fp16, self.CacheLayer_quant = "fp16", "quant"
        self.Config = SimpleNamespace(from_directory=lambda folder: SimpleNamespace(eos_token_id_list=[2]))
        self.Model = SimpleNamespace(from_config=lambda config: SimpleNamespace(load=self._kept("load")))
        self.Tokenizer = SimpleNamespace(from_config=lambda config: SimpleNamespace(eos_token_id=None))
        self.Cache = self._kept("cache")
        self.ComboSampler = self._kept("sampler")
        self.Job = lambda **given: SimpleNamespace(**given)

    def _kept(self, name: str) -> Any:
        def keep(*_: Any, **given: Any) -> Any:
            self.calls[name] = given
            return SimpleNamespace(**given)

        return keep

    def Generator(self, **given: Any) -> Any:
        self.calls["generator"] = given
        stats = {"used_tokens": 512, "max_tokens": 2048}
        return SimpleNamespace(
            enqueue=self._enqueue, iterate=self._iterate, cancel=self.cancelled.append, get_cache_stats=lambda: stats
        )

    def _enqueue(self, job: Any) -> None:
        assert job.max_new_tokens < 5000, "the job is larger than the cache"
        self.jobs.append(job)

    def _iterate(self) -> list[dict[str, Any]]:
        return [{**result, "job": self.jobs[result["job"]]} for result in self.results.pop(0)]


def load_backend(
    monkeypatch: pytest.MonkeyPatch, results: list[list[dict[str, Any]]], *more: str
) -> tuple[Any, FakeExLlamaV3]:
    told = FakeExLlamaV3(results)
    torch = SimpleNamespace(tensor=lambda rows, dtype: rows, long="long", cuda=SimpleNamespace(device_count=lambda: 4))
    monkeypatch.setitem(sys.modules, "exllamav3", told)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(import_server(), "HuggingFaceText", lambda folder: None)
    backend = import_server().ExLlamaV3Backend()
    argv = ("exllamav3-server", "--model", "m", "--slots", "2", "--context", "1000", *more)
    backend.load(parse_server_options(argv), lambda done: None)
    return backend, told


class TestBackend:
    """With a fake that has the names of 1.6.5; the package itself needs a GPU."""

    def test_computes_two_concurrent_requests(self, monkeypatch: pytest.MonkeyPatch) -> None:
        core = importlib.import_module("bedplate.engines.shipped.openai_server")
        started = [{"job": 0, "stage": "started", "eos": False}]
        both = [{"job": n, "stage": "streaming", "eos": False, "token_ids": Tokens(10 + n)} for n in (0, 1)]
        end = [{"job": 0, "stage": "streaming", "eos": True, "eos_reason": "stop_token", "eos_triggering_token_id": 2}]
        late = [{"job": 1, "stage": "streaming", "eos": False, "token_ids": Tokens(12)}]
        backend, told = load_backend(monkeypatch, [started, both, end, late])
        one = core.GenerationRequest(prompt=[1, 2], max_tokens=9, temperature=0, seed=3)
        two = core.GenerationRequest(prompt=[4], max_tokens=9, ignore_eos=True, top_k=5)
        backend.admit(one)
        backend.admit(two)
        assert (told.jobs[0].input_ids, told.jobs[0].stop_conditions, told.jobs[0].seed) == ([[1, 2]], [2], 3)
        assert told.jobs[1].stop_conditions == [] and told.calls["sampler"]["top_k"] == 5
        assert backend.step() == []
        assert [(piece.request, piece.token) for piece in backend.step()] == [(one, 10), (two, 11)]
        assert [(piece.request, piece.finish) for piece in backend.step()] == [(one, "stop")]
        backend.cancel(two)
        backend.cancel(one)
        assert told.cancelled == [told.jobs[1]]
        # Later results of a cancelled request are dropped.
        assert backend.step() == [] and backend.kv_use() == 0.25

    def test_rejects_a_request_larger_than_the_cache(self, monkeypatch: pytest.MonkeyPatch) -> None:
        core = importlib.import_module("bedplate.engines.shipped.openai_server")
        backend, _ = load_backend(monkeypatch, [])
        with pytest.raises(core.BackendError, match="larger than the cache"):
            backend.admit(core.GenerationRequest(prompt=[1], max_tokens=5000))

    def test_options_reach_the_engine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        _, told = load_backend(
            monkeypatch, [], "--cards", "2", "--tensor-parallel", "--cache-bits", "6", "--cache-tokens", "700"
        )
        assert told.calls["cache"] == {
            "max_num_tokens": 768, "layer_type": "quant", "max_batch_size": 2, "k_bits": 6, "v_bits": 6,
        }  # fmt: skip
        assert told.calls["load"]["tensor_p"] and told.calls["load"]["reserve_per_device"] == [0.5, 0.5, -1.0, -1.0]
        assert told.calls["generator"]["max_batch_size"] == 2
        _, told = load_backend(monkeypatch, [])
        assert told.calls["cache"]["max_num_tokens"] == 2048 and told.calls["cache"]["layer_type"] == "fp16"
        assert told.calls["load"]["device"] == "cuda:0"
