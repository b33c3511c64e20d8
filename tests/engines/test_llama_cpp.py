"""llama.cpp: its real words, its real figures, and the launcher that we ship for it."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import signal
import subprocess
import sys
import textwrap
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import psutil
import pytest
from gguf import GGUFWriter
from hypothesis import given, settings
from tests.conftest import HANG_S, wait_for
from tests.engines.argv import parse_options, read_options
from tests.engines.plans import machine, model, plans
from tests.engines.plans import plan as engine_plan

import bedplate.engines
from bedplate.decide import decide
from bedplate.decide.memory import fit
from bedplate.engines import get_engine
from bedplate.engines.llama_cpp import DEFAULT_CONTEXT_TOKENS, DEFAULT_SLOTS, MAX_SLOTS, LlamaCpp
from bedplate.errors import UsageError
from bedplate.facts.hardware import probe
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.facts.known_models import find_model
from bedplate.run.builtin import read_builtin_facts
from bedplate.run.environments import EngineEnvironment, build_command
from bedplate.run.supervisor import find_free_port
from bedplate.values import (
    Accelerator,
    Hardware,
    Launch,
    Model,
    Parallelism,
    Plan,
    Preparation,
    Settings,
    Workload,
    replace_fields,
)
from bedplate.values.decision import Device
from bedplate.values.fit import DeviceNeed

CAPTURES = Path(__file__).parent.parent / "captures" / "llama.cpp"
LAUNCHER = Path(bedplate.engines.__file__).parent / "shipped" / "llama_server.py"
LLAMA = LlamaCpp()


def read_capture(name: str) -> str:
    return (CAPTURES / f"{name}.txt").read_text(encoding="utf-8")


def make_plan(workload: Workload | None = None) -> Plan:
    work = workload or Workload(concurrency=2, context_tokens=1024)
    return engine_plan(LLAMA, without_cards(probe()), read_builtin_facts(), workload=work)


def estimate_host_need(model: Model, settings: Settings) -> DeviceNeed:
    return fit(without_cards(probe()), model, Workload(), LLAMA, settings=settings).devices[0]


def without_cards(machine: Hardware) -> Hardware:
    return replace_fields(machine, accelerators=(), links=())


class TestExplain:
    @pytest.mark.parametrize(
        ("name", "says", "hint", "lasting"),
        [
            ("truncated", "the model file is damaged", "download it again", True),
            ("truncated-header", "the model file is damaged", "download it again", True),
            ("empty", "the model file is damaged", "download it again", True),
            ("not-a-gguf", "is not a GGUF file", "bedplate inspect", True),
            ("unknown-architecture", "does not support the architecture lluma", "a newer build", True),
            ("unknown-tokenizer", "does not support the tokenizer zzzz", "a newer build", True),
            ("unknown-pre-tokenizer", "does not support the tokenizer zzzzzz", "a newer build", True),
            ("missing", "/models/missing.gguf does not exist any more", "mount its disk", True),
            ("unreadable", "no permission to read /models/private.gguf", "permissions", True),
            ("too-many-slots", "at most 256 concurrent requests", "--concurrency 256", True),
            ("out-of-memory", "not enough memory", "--context 4096", True),
            ("no-threads", "could not start its threads", "ulimit", False),
            ("port-in-use", "took the engine's private port", "start again", False),
        ],
    )
    def test_known_failures(self, name: str, says: str, hint: str, lasting: bool) -> None:
        failure = LLAMA.explain(read_capture(name))
        assert failure is not None
        assert says in failure.message and hint in failure.hint and failure.lasting is lasting

    def test_every_captured_failure_is_known(self) -> None:
        fine = {"started", "metrics-idle", "metrics-busy"}
        for path in CAPTURES.glob("*.txt"):
            assert (LLAMA.explain(path.read_text()) is None) == (path.stem in fine), path

    def test_unknown_logs_are_not_explained(self) -> None:
        assert LLAMA.explain("") is None
        assert LLAMA.explain("a log of something else\nthat ended well") is None

    def test_a_path_may_contain_special_characters(self) -> None:
        line = (
            "gguf_init_from_file: failed to open GGUF file '/models/it's {mine} (1).gguf' (No such file or directory)"
        )
        failure = LLAMA.explain(line)
        assert failure is not None and failure.message == "/models/it's {mine} (1).gguf does not exist any more"


class TestProgress:
    def test_progress_of_a_real_start(self) -> None:
        told = [LLAMA.read_progress(line) for line in read_capture("started").splitlines()]
        assert [value for value in told if value is not None] == [0.0, 1.0]

    def test_progress_of_several_stages(self) -> None:
        def line(current: str, value: float) -> str:
            payload = {"stages": ["text_model", "mmproj"], "current": current, "value": value}
            return "cmd_child_to_router:state:" + json.dumps({"state": "loading", "payload": payload})

        assert [LLAMA.read_progress(line(*at)) for at in (("text_model", 0.5), ("mmproj", 0.0), ("mmproj", 1.0))] == [
            0.25,
            0.5,
            1.0,
        ]

    @pytest.mark.parametrize(
        "said",
        [
            *("", "{", "[]", "null", '{"state": "ready"}', '{"state": "loading"}'),
            '{"state": "loading", "payload": []}',
            '{"state": "loading", "payload": {"value": null}}',
            '{"state": "loading", "payload": {"stages": 3}}',
        ],
    )
    def test_other_lines_are_no_progress(self, said: str) -> None:
        assert LLAMA.read_progress(f"cmd_child_to_router:state:{said}") is None


def test_metrics_are_read() -> None:
    idle, busy = LLAMA.read_metrics(read_capture("metrics-idle")), LLAMA.read_metrics(read_capture("metrics-busy"))
    assert (idle.running, idle.waiting) == (0, 0)
    assert (busy.running, busy.waiting) == (1, 1)
    assert busy.kv_use is None and busy.preemptions is None
    text = "llamacpp:prompt_tokens_total 5\nllamacpp:tokens_predicted_total 7\nllamacpp:n_decode_total 9\n"
    assert busy.computed == 0 and LLAMA.read_metrics(text).computed == 21
    assert LLAMA.read_metrics("").running is None


class TestSettings:
    def test_default_settings_allow_a_second_request(self) -> None:
        settings = LLAMA.settle(probe(), read_builtin_facts(), Workload())
        assert settings.slots == DEFAULT_SLOTS and settings.context_tokens == DEFAULT_CONTEXT_TOKENS
        assert settings.threads == probe().cpu.allowed_physical_cores and settings.gpu_layers == 0

    @pytest.mark.parametrize(
        ("workload", "slots", "context"),
        [
            (Workload(concurrency=1), 1, DEFAULT_CONTEXT_TOKENS),
            (Workload(concurrency=3, context_tokens=500, prompt_tokens=100, output_tokens=100), 3, 500),
            (Workload(users=7), 7, DEFAULT_CONTEXT_TOKENS),
            (Workload(users=100_000), MAX_SLOTS, DEFAULT_CONTEXT_TOKENS),
            (Workload(context_tokens=10**6), DEFAULT_SLOTS, 8192),
        ],
    )
    def test_requested_values_are_kept(self, workload: Workload, slots: int, context: int) -> None:
        settings = LLAMA.settle(probe(), read_builtin_facts(), workload)
        assert (settings.slots, settings.context_tokens) == (slots, context)

    def test_a_mac_computes_on_its_gpu(self) -> None:
        mac = replace_fields(probe(), accelerators=(Accelerator(name="Apple M2", vendor="apple", unified_memory=True),))
        settings = LLAMA.settle(mac, read_builtin_facts(), Workload())
        assert settings.gpu_layers == read_builtin_facts().num_layers + 1

    def test_memory_follows_the_header(self) -> None:
        model = read_builtin_facts()
        need = estimate_host_need(model, Settings(slots=3, context_tokens=1000))
        assert need.weights_bytes == model.weight_bytes
        # 30 layers, 3 heads of 64, key and value, two bytes each.
        assert need.kv_bytes == 3 * 1000 * 30 * 3 * 64 * 2 * 2
        assert need.total_bytes < need.high_bytes

    def test_memory_estimate_covers_the_real_engine(
        self, builtin_gguf: Path, llama_environment: EngineEnvironment
    ) -> None:
        chosen = make_plan(Workload(concurrency=4, context_tokens=8192))
        need = estimate_host_need(chosen.model, chosen.settings)
        with run_engine(llama_environment, LLAMA.launch(chosen, find_free_port())) as (process, _):
            # It clears its cache at the start, so that all of it counts; of the weights only what was read so far.
            assert need.kv_bytes < process.memory_info().rss <= need.high_bytes


@contextlib.contextmanager
def run_engine(environment: EngineEnvironment, launch: Launch) -> Iterator[tuple[psutil.Process, str]]:
    """The real engine, ready, with its private URL."""
    port = launch.argv[launch.argv.index("--port") + 1]
    process = subprocess.Popen(
        build_command(environment, launch), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )

    def healthy() -> bool:
        assert process.poll() is None
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer,
        ):
            return bool(answer.status == 200)
        return False

    with process:
        try:
            wait_for(healthy, "the engine to be ready")
            yield psutil.Process(process.pid), f"http://127.0.0.1:{port}"
            process.terminate()
            # It is healthy shortly before its constructor returns; until then a signal has its default effect.
            assert process.wait(HANG_S) in (0, -signal.SIGTERM)
        finally:
            process.kill()  # a process that hangs must not disturb later tests


@contextlib.contextmanager
def run_launcher(loading: str) -> Iterator[subprocess.Popen[str]]:
    """The launcher with a fake wheel, which runs `loading` and serves nothing."""
    script = f"""
import ctypes, runpy, signal, sys, threading, time, types, unittest.mock
def load(params):
{textwrap.indent(textwrap.dedent(loading).strip(), "    ")}
sys.modules["xllamacpp"] = types.SimpleNamespace(Server=load, CommonParams=unittest.mock.MagicMock)
sys.argv = ["llama-server", "--model", "m.gguf"]
runpy.run_path({str(LAUNCHER)!r}, run_name="__main__")
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def launcher() -> ModuleType:
    spec = importlib.util.spec_from_file_location("llama_server", LAUNCHER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TestLauncher:
    @pytest.mark.parametrize("task", ["generate", "embed"])
    def test_accepts_every_option_of_a_launch(self, launcher: ModuleType, task: str) -> None:
        chosen = make_plan()
        launch = LLAMA.launch(replace_fields(chosen, model=replace_fields(chosen.model, task=task)), 4321)
        assert launch.argv[0] == "llama-server"
        options = launcher.make_parser().parse_args(launch.argv[1:])
        assert options.model == chosen.model.files[0] and options.alias == chosen.model.served_name
        assert (options.host, options.port) == ("127.0.0.1", 4321)
        assert options.parallel == 2 and options.ctx_size == 2 * 1024
        assert options.threads == options.threads_batch == chosen.settings.threads
        assert options.cache_ram == 0 and options.fit == "off"
        assert options.metrics and options.slots and not options.webui
        assert options.embeddings == (task == "embed")

    @pytest.mark.parametrize(
        "wrong", [["--no-such-option"], ["--ctx", "5"], ["--port", "x"], ["--fit", "maybe"], ["x"]]
    )
    def test_rejects_unknown_options(
        self, launcher: ModuleType, wrong: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as ended:
            launcher.make_parser().parse_args(["--model", "m.gguf", *wrong])
        assert ended.value.code == 2 and "llama-server: error:" in capsys.readouterr().err

    def test_defines_each_option_once(self, launcher: ModuleType) -> None:
        parser: argparse.ArgumentParser = launcher.make_parser()
        names = [name for action in parser._actions for name in action.option_strings]
        assert len(names) == len(set(names))

    def test_sets_the_parameters_of_the_wheel(self, llama_environment: EngineEnvironment) -> None:
        given = [
            *("--model", "m.gguf", "--alias", "me", "--host", "127.0.0.2", "--port", "1234", "--threads-http", "9"),
            *("--ctx-size", "4096", "--parallel", "3", "--threads", "5", "--n-gpu-layers", "7", "--batch-size", "64"),
            *(
                "--ubatch-size",
                "32",
                "--cache-ram",
                "11",
                "--cache-type-k",
                "q8_0",
                "--flash-attn",
                "on",
                "--poll",
                "40",
            ),
            *(
                "--pooling",
                "mean",
                "--timeout",
                "77",
                "--api-key",
                "k",
                "--verbosity",
                "2",
                "--chat-template",
                "chatml",
            ),
            *("--n-cpu-moe", "2", "--split-mode", "none"),
            *("--fit", "off", "--metrics", "--no-slots", "--no-webui", "--no-warmup", "--no-mmap", "--embeddings"),
            "--kv-unified",
        ]
        show = """
import json, runpy, sys
launcher = runpy.run_path(sys.argv[1])
p = launcher["make_params"](launcher["make_parser"]().parse_args(sys.argv[2:]))
print(json.dumps({
    "path": p.model.path, "alias": sorted(p.model_alias), "hosts": list(p.hostnames), "port": p.port,
    "http": p.n_threads_http, "ctx": p.n_ctx, "slots": p.n_parallel, "threads": p.cpuparams.n_threads,
    "threads_batch": p.cpuparams_batch.n_threads, "ngl": p.n_gpu_layers, "batch": p.n_batch, "ubatch": p.n_ubatch,
    "cram": p.cache_ram_mib, "ctk": p.cache_type_k.name, "ctv": p.cache_type_v.name, "fa": p.flash_attn_type.name,
    "poll": [p.cpuparams.poll, p.cpuparams_batch.poll], "pooling": p.pooling_type.name,
    "timeouts": [p.timeout_read, p.timeout_write], "keys": list(p.api_keys), "verbosity": p.verbosity,
    "template": p.chat_template, "fit": p.fit_params, "metrics": p.endpoint_metrics, "slots_page": p.endpoint_slots,
    "ui": p.ui, "warmup": p.warmup, "load": p.load_mode.name, "embedding": p.embedding, "unified": p.kv_unified,
    "split": int(p.split_mode), "experts": p.tensor_buft_overrides,
}))
"""
        argv = [str(llama_environment.interpreter), "-I", "-c", show, str(LAUNCHER), *given]
        done = subprocess.run(argv, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == {
            "path": "m.gguf", "alias": ["me"], "hosts": ["127.0.0.2"], "port": 1234,
            "http": 9, "ctx": 4096, "slots": 3, "threads": 5,
            "threads_batch": 5, "ngl": 7, "batch": 64, "ubatch": 32,
            "cram": 11, "ctk": "GGML_TYPE_Q8_0", "ctv": "GGML_TYPE_F16", "fa": "LLAMA_FLASH_ATTN_TYPE_ENABLED",
            "poll": [40, 40], "pooling": "LLAMA_POOLING_TYPE_MEAN",
            "timeouts": [77, 77], "keys": ["k"], "verbosity": 2,
            "template": "chatml", "fit": False, "metrics": True, "slots_page": False,
            "ui": False, "warmup": False, "load": "LLAMA_LOAD_MODE_NONE", "embedding": True, "unified": True,
            "split": 0,
            "experts": r"blk\.0\.ffn_(up|down|gate|gate_up)_(ch|)exps=CPU,"
            r"blk\.1\.ffn_(up|down|gate|gate_up)_(ch|)exps=CPU",
        }  # fmt: skip

    def test_exits_whichever_thread_gets_the_signal(self) -> None:
        # A signal just before the wait is like a signal to another thread: it does not interrupt the wait.
        with run_launcher("""
            def tell():
                seen, before = 0, None
                while seen < 20:
                    frame = sys._current_frames()[threading.main_thread().ident]
                    now = frame.f_code, frame.f_lasti
                    seen, before = (seen + 1 if now == before else 0), now
                    time.sleep(0.005)
                signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
            threading.Thread(target=tell, daemon=True).start()
        """) as process:
            assert process.wait(HANG_S) == 0

    def test_it_can_be_stopped_while_it_loads(self) -> None:
        # As in the wheel: the GIL is held during the load.
        with run_launcher("""
            print("loading", flush=True)
            ctypes.PyDLL(None).sleep(600)
        """) as process:
            assert process.stdout is not None and process.stdout.readline() == "loading\n"
            process.terminate()
            assert process.wait(HANG_S) == -signal.SIGTERM

    def test_an_unknown_cache_type_names_the_known_ones(self, llama_environment: EngineEnvironment) -> None:
        launch = Launch(argv=("llama-server", "--model", "m.gguf", "--cache-type-k", "q9"))
        done = subprocess.run(build_command(llama_environment, launch), capture_output=True, text=True)
        assert done.returncode == 1 and "unknown cache type 'q9'" in done.stderr and "q8_0" in done.stderr

    def test_failed_load_exits_without_a_traceback(self, llama_environment: EngineEnvironment, tmp_path: Path) -> None:
        launch = Launch(argv=("llama-server", "--model", str(tmp_path / "gone.gguf"), "--port", str(find_free_port())))
        done = subprocess.run(build_command(llama_environment, launch), capture_output=True, text=True)
        assert done.returncode == 1 and "Traceback" not in done.stderr
        assert LLAMA.explain(done.stdout + done.stderr) is not None

    def test_engine_runs_as_planned(self, builtin_gguf: Path, llama_environment: EngineEnvironment) -> None:
        chosen = make_plan()
        with run_engine(llama_environment, LLAMA.launch(chosen, find_free_port())) as (process, url):

            def get(path: str) -> str:
                with urllib.request.urlopen(f"{url}{path}", timeout=HANG_S) as answer:
                    return str(answer.read().decode())

            slots = json.loads(get("/slots"))
            assert [slot["n_ctx"] for slot in slots] == [1024, 1024]
            assert LLAMA.read_metrics(get("/metrics")).running == 0
            assert json.loads(get("/v1/models"))["data"][0]["id"] == chosen.model.served_name
            with pytest.raises(urllib.error.HTTPError):
                get("/")  # no page of its own
            assert process.num_threads() > 50  # --threads-http

    def test_requests_choose_among_planned_adapters(
        self, builtin_gguf: Path, llama_environment: EngineEnvironment, tmp_path: Path
    ) -> None:
        adapters = tuple(str(write_adapter(tmp_path / f"{name}.gguf", number)) for number, name in enumerate("ab"))
        chosen = make_plan(Workload(concurrency=2, context_tokens=1024, lora_adapters=adapters))
        with run_engine(llama_environment, LLAMA.launch(chosen, find_free_port())) as (_, url):

            def send(path: str, body: object = None) -> Any:
                data = json.dumps(body).encode() if body is not None else None
                asked = urllib.request.Request(f"{url}{path}", data, {"Content-Type": "application/json"})
                with urllib.request.urlopen(asked, timeout=HANG_S) as answer:
                    return json.loads(answer.read())

            def complete(*lora: dict[str, float]) -> str:
                body = {"prompt": "One two three", "n_predict": 8, "temperature": 0, "lora": lora}
                return str(send("/completion", body)["content"])

            listed = send("/lora-adapters")
            assert [(one["path"], one["scale"]) for one in listed] == [(path, 0) for path in adapters]
            plain, first, second = complete(), complete({"id": 0, "scale": 1}), complete({"id": 1, "scale": 1})
            assert len({plain, first, second}) == 3
            with run_engine(llama_environment, LLAMA.launch(make_plan(), find_free_port())) as (_, url):
                assert complete() == plain


def write_adapter(path: Path, seed: int) -> Path:
    """A LoRA adapter of rank 4 for the built-in model, with random weights."""
    writer, numbers, facts = GGUFWriter(path, "llama"), np.random.default_rng(seed), read_builtin_facts()
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 4.0)
    width = facts.hidden_size or 0
    for layer in range(facts.num_layers):
        for part, shape in (("lora_a", (4, width)), ("lora_b", (width, 4))):
            weights = numbers.normal(size=shape).astype(np.float32)
            writer.add_tensor(f"blk.{layer}.attn_q.weight.{part}", weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def launch_on_gpu(name: str = "Qwen/Qwen3-30B-A3B", label: str | None = None, **given: Any) -> Launch:
    settled = {"slots": 4, "context_tokens": 8192, "device": "cuda", "threads": 12, **given.pop("settings", {})}
    return LLAMA.launch(
        engine_plan(LLAMA, machine("RTX 4090"), model(name), label=label, settings=Settings(**settled), **given), 8123
    )


class TestCommandLines:
    @given(chosen=plans(LLAMA))
    @settings(deadline=None)
    def test_every_option_and_value_is_one_of_llama_servers(self, launcher: ModuleType, chosen: Plan) -> None:
        launch = LLAMA.launch(chosen, 8123)
        said = parse_options("llama_cpp", launch.argv[1:])
        assert said["--port"] == 8123 and said["-c"] == chosen.settings.context_tokens * chosen.settings.slots
        if chosen.settings.device in LLAMA.built_for:
            assert launch.argv[0] == "llama-server" and launcher.make_parser().parse_args(launch.argv[1:])
        else:
            assert launch.argv[0] == "llama.cpp-build/bin/llama-server"
        self.preparation_holds(chosen, launch, said)

    def preparation_holds(self, chosen: Plan, launch: Launch, said: dict[str, Any]) -> None:
        facts = read_options("llama_cpp")
        for step in launch.prepare:
            if step.argv[:1] == ("python3",) and step.kind == "convert":
                options = parse_options("llama_cpp_convert", step.argv[2:])
                assert options["--outfile"] == step.where
            if step.argv and step.argv[0].endswith("llama-quantize"):
                assert step.argv[0].startswith("llama.cpp-build/bin/") == (
                    chosen.settings.device not in LLAMA.built_for
                )
                assert step.argv[2] == step.where == said["-m"]
                assert step.argv[3] == chosen.weights.label and step.argv[3] in facts["quantize_types"]
            if step.argv[:2] == ("cmake", "-S"):
                set_here = {word[2:].partition("=")[0] for word in step.argv if word.startswith("-D")}
                assert set_here <= {*facts["cmake_options"], "CMAKE_BUILD_TYPE", "CMAKE_CUDA_ARCHITECTURES"}
        converted = [step for step in launch.prepare if step.kind == "convert"]
        assert bool(converted) == (chosen.weights.made == "converted")
        assert not converted or converted[-1].where == said["-m"]

    def test_names_the_cards_of_a_multi_gpu_launch(self) -> None:
        one, two = launch_on_gpu(), launch_on_gpu(layout=Parallelism(pipeline=2))
        assert list_words_after(one, "--split-mode") == "none" and "--device" not in one.argv
        assert list_words_after(two, "--split-mode") == "layer" and list_words_after(two, "--device") == "CUDA0,CUDA1"

    def test_layers_on_the_card(self) -> None:
        assert list_words_after(launch_on_gpu(), "--n-gpu-layers") == "49"
        assert list_words_after(launch_on_gpu(settings={"gpu_layers": 20}), "--n-gpu-layers") == "20"
        assert list_words_after(launch_on_gpu(settings={"device": "cpu"}), "--n-gpu-layers") == "0"

    @pytest.mark.parametrize(
        ("name", "host_layers", "first"),
        [
            ("Qwen/Qwen3-30B-A3B", 10, "10"),
            ("deepseek-ai/DeepSeek-R1", 10, "13"),  # three layers before have none
            ("deepseek-ai/DeepSeek-R1", 58, "61"),
            ("meta-llama/Llama-4-Maverick-17B-128E-Instruct", 12, "24"),  # every second has them
        ],
    )
    def test_host_experts_are_counted_from_the_first_layer(self, name: str, host_layers: int, first: str) -> None:
        launch = launch_on_gpu(name, settings={"host_expert_layers": host_layers})
        assert list_words_after(launch, "--n-cpu-moe") == first

    def test_8_bit_kv_cache(self) -> None:
        launch = launch_on_gpu(settings={"kv_type": "fp8"})
        assert list_words_after(launch, "--cache-type-k") == list_words_after(launch, "--cache-type-v") == "q8_0"
        assert list_words_after(launch, "--flash-attn") == "on"

    def test_gpu_plans_begin_with_a_build_and_cpu_plans_with_the_wheel(self) -> None:
        steps = launch_on_gpu(label="BF16").prepare
        assert [step.kind for step in steps] == [
            "download",
            "build",
            "build",
            "build",
            "download",
            "install",
            "convert",
        ]
        assert "-DGGML_CUDA=ON" in steps[2].argv and steps[3].argv[-1] == "llama-server"
        cpu = launch_on_gpu(label="BF16", settings={"device": "cpu"}).prepare
        assert [step.kind for step in cpu] == ["install", "download", "build", "download", "install", "convert"]
        assert "xllamacpp" in cpu[0].what

    def test_types_below_8_bits_need_a_second_step(self) -> None:
        steps = [step for step in launch_on_gpu(label="Q4_K_M").prepare if step.kind == "convert"]
        assert len(steps) == 2 and steps[0].where == steps[1].argv[1]
        assert steps[0].disk_bytes and steps[1].disk_bytes and steps[1].disk_bytes < steps[0].disk_bytes / 3
        assert len([step for step in launch_on_gpu(label="Q8_0").prepare if step.kind == "convert"]) == 1

    def test_the_wheel_quantizes_without_a_build(self) -> None:
        def steps(label: str) -> tuple[Preparation, ...]:
            return launch_on_gpu(label=label, settings={"device": "cpu"}).prepare

        small = steps("Q4_K_M")
        assert not [step for step in small if step.argv[:1] == ("cmake",)]
        first, second = [step for step in small if step.kind == "convert"]
        assert second.argv[0] == "llama-quantize" and second.within is None
        # The converter runs where PyTorch is, whose installation is a step with its size.
        assert first.within == "pytorch" and [step.within for step in small if step.kind == "install"][-1] == "pytorch"
        assert first == next(step for step in steps("Q6_K") if step.kind == "convert")

    def test_cpu_steps_need_no_build_tools(self) -> None:
        chosen = engine_plan(LLAMA, machine("cpu"), model("Qwen/Qwen3-32B"), label="Q4_K_M")
        by_hand = LLAMA.list_build_steps(chosen)
        rest = [step for step in LLAMA.launch(chosen, 1).prepare if step not in by_hand]
        assert {step.argv[0] for step in rest if step.argv} == {"hf", "python3", "llama-quantize"}


class TestWeights:
    @pytest.mark.parametrize(
        ("card", "name", "labels"),
        [
            ("H100 SXM", "Qwen/Qwen3-32B", ["BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q3_K_M"]),
            ("cpu", "Qwen/Qwen3-32B", ["F16", "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q3_K_M"]),
            ("H100 SXM", "deepseek-ai/DeepSeek-R1", ["Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q3_K_M"]),
            ("H100 SXM", "openai/gpt-oss-120b", ["MXFP4"]),
        ],
    )
    def test_the_most_faithful_first(self, card: str, name: str, labels: list[str]) -> None:
        target = LLAMA.find_target(machine(card))
        assert target is not None
        assert [form.label for form in LLAMA.list_weights(target, model(name), Workload())] == labels
        exact = LLAMA.list_weights(target, model(name), Workload(precision_sensitive=True))
        assert {form.label for form in exact} <= {"BF16", "F16", "Q8_0", "MXFP4"}

    def test_rows_unsuited_to_k_quants_get_smaller_blocks(self) -> None:
        target = LLAMA.find_target(machine("cpu"))
        assert target is not None
        narrow = replace_fields(model("Qwen/Qwen3-32B"), hidden_size=576)
        assert [form.label for form in LLAMA.list_weights(target, narrow, Workload())] == [
            "F16",
            "Q8_0",
            "Q5_1",
            "Q4_1",
        ]
        chosen = engine_plan(LLAMA, machine("cpu"), narrow, label="Q4_1")
        (_, last) = [step for step in LLAMA.launch(chosen, 1).prepare if step.kind == "convert"]
        assert last.argv[3] == "Q4_1" and last.where.endswith("-Q4_1.gguf")

    def test_gguf_is_loaded_directly(self) -> None:
        target = LLAMA.find_target(machine("cpu"))
        assert target is not None
        forms = LLAMA.list_weights(target, read_builtin_facts(), Workload(precision_sensitive=True))
        assert [(form.label, form.made) for form in forms] == [(read_builtin_facts().quantization, "as it is")]

    def test_uses_the_cpu_if_the_card_is_too_old(self) -> None:
        old = replace_fields(machine("RTX 4090", 1).accelerators[0], compute_capability="3.5")
        target = LLAMA.find_target(replace_fields(machine("RTX 4090", 1), accelerators=(old,)))
        assert target is not None and target.device == "cpu"

    def test_it_does_not_classify(self) -> None:
        refused = LLAMA.refuse(machine("cpu"), read_builtin_facts(), Workload(task="classify"))
        assert refused is not None and refused.kind == "impossible"


def list_words_after(launch: Launch, option: str) -> str:
    return launch.argv[launch.argv.index(option) + 1]


def test_every_engine_is_found_by_its_id() -> None:
    assert get_engine("llama.cpp").id == "llama.cpp"
    assert {"llama.cpp", "mlx", "vllm", "sglang", "tgi"} <= set(bedplate.engines.load_engines())
    with pytest.raises(UsageError, match=r"no engine is called 'llamacpp'") as caught:
        get_engine("llamacpp")
    assert "did you mean llama.cpp?" in str(caught.value.hint)


class TestBuilding:
    """How it is configured for a machine; what a build then does is in tests/run and tests/fleet."""

    def on(self, *sets: str, cards: tuple[str | None, ...] = ()) -> Hardware:
        on = machine("RTX 4090", 1) if cards else machine("cpu")
        card = machine("RTX 4090", 1).accelerators[0]
        return replace_fields(
            on,
            cpu=replace_fields(on.cpu, instruction_sets=sets),
            accelerators=tuple(replace_fields(card, compute_capability=one) for one in cards),
        )

    def test_builds_for_the_installed_cpu(self) -> None:
        (only,) = LLAMA.list_variants(self.on("avx", "avx2"), "cpu")
        assert "-DGGML_NATIVE=ON" in only.options and not any("CUDA" in option for option in only.options)

    def test_offers_a_variant_without_amx(self) -> None:
        """GCC 12 on such a machine: SIGILL in `tilezero`."""
        first, second = LLAMA.list_variants(self.on("avx", "avx2", "fma", "avx512f", "amx_tile", "amx_int8"), "cpu")
        assert "-DGGML_NATIVE=ON" in first.options
        assert second.name == "AMX" and not any("AMX" in option for option in second.options)
        assert {"-DGGML_NATIVE=OFF", "-DGGML_AVX512=ON", "-DGGML_FMA=ON", "-DGGML_AVX512_BF16=OFF"} <= {*second.options}

    @pytest.mark.parametrize(
        ("cards", "built_for"),
        [
            (("9.0",), "90-real"),
            (("8.9", "8.6", "8.9"), "86-real;89-real"),
            ((None,), "native"),
            (("12.0",), "120-real"),
        ],
    )
    def test_builds_for_the_installed_cards(self, cards: tuple[str | None, ...], built_for: str) -> None:
        (only,) = LLAMA.list_variants(self.on("avx2", cards=cards), "cuda")
        assert "-DGGML_CUDA=ON" in only.options
        assert f"-DCMAKE_CUDA_ARCHITECTURES={built_for}" in only.options

    @pytest.mark.parametrize(
        ("card", "count", "run_as"),
        [("RX 6600", 1, "10.3.0"), ("RX 6700 XT", 2, "10.3.0"), ("RX 6800", 1, None), ("RX 7900 XTX", 1, None)],
    )
    def test_gpus_without_kernels_in_rocblas_are_run_as_a_similar_one(
        self, card: str, count: int, run_as: str | None
    ) -> None:
        """docs/build.md of llama.cpp: HSA_OVERRIDE_GFX_VERSION, with a build for the GPU that it names."""
        hardware = make_simulated_hardware({"accelerator": card, "count": count, "ram_gb": 64})
        found = decide(hardware, find_model("Qwen/Qwen3-4B"), Workload(), "llama.cpp")
        assert found.launch is not None and found.launch.env.get("HSA_OVERRIDE_GFX_VERSION") == run_as
        configured = next(step.argv for step in found.launch.prepare if "configure" in step.what)
        variants = [one.options for one in LLAMA.list_variants(hardware, "rocm")]
        for options in (configured, *variants):
            assert ("-DGPU_TARGETS=gfx1030" in options) == (run_as is not None)

    def test_a_gpu_that_is_run_as_another_has_no_part_in_a_layout_with_others(self) -> None:
        hardware = make_simulated_hardware({"accelerator": ["RX 6600", "RX 7900 XTX"], "ram_gb": 64})
        found = decide(hardware, find_model("Qwen/Qwen3-32B"), Workload(), "llama.cpp")
        assert found.launch is not None and found.launch.env["HIP_VISIBLE_DEVICES"] == "1"
        both = decide(hardware, find_model("meta-llama/Meta-Llama-3.1-70B"), Workload(), "llama.cpp")
        assert both.launch is None or both.launch.env["HIP_VISIBLE_DEVICES"] in ("0", "1")

    def test_windows_does_not_run_a_gpu_as_another_one(self) -> None:
        hardware = make_simulated_hardware({"accelerator": "RX 6600", "ram_gb": 64, "os": "windows"})
        found = decide(hardware, find_model("Qwen/Qwen3-4B"), Workload(), "llama.cpp")
        assert found.launch is not None and not found.launch.env and found.settings is not None
        assert found.settings.board is None

    @pytest.mark.parametrize("device", ["cpu", "cuda", "rocm", "xpu", "metal", "vulkan"])
    def test_every_cmake_option_exists_in_the_source(self, device: Device) -> None:
        known = {*read_options("llama_cpp")["cmake_options"], "CMAKE_BUILD_TYPE", "CMAKE_CUDA_ARCHITECTURES"}
        for variant in LLAMA.list_variants(self.on("avx512f", "amx_tile", cards=("9.0",)), device):
            assert {option[2:].partition("=")[0] for option in variant.options} <= known

    def test_an_existing_build_needs_no_build_steps(self) -> None:
        chosen = engine_plan(LLAMA, machine("RTX 4090"), model("Qwen/Qwen3-32B"), label="Q4_K_M")
        by_hand = LLAMA.list_build_steps(chosen)
        assert [step.kind for step in by_hand] == ["download", "build", "build", "build"]
        left = [step for step in LLAMA.launch(chosen, 1).prepare if step not in by_hand]
        assert "convert" in {step.kind for step in left} and not any("cmake" in step.argv for step in left)

    def test_source_archive_is_pinned(self) -> None:
        build = LLAMA.build
        assert build is not None and build.programs[0] == "llama-server" and "llama-quantize" in build.programs
        assert build.archive.startswith(build.tree.partition("/")[0]) and build.package.endswith("==0.3.36")
