"""PyTorch with Transformers: no serving engine; the simplest option for prototypes and batch-of-one jobs."""

from __future__ import annotations

import re

from bedplate.engines.base import (
    SIXTEEN_BIT,
    ComputeTarget,
    Engine,
    EnvironmentRecipe,
    Features,
    KnownFailure,
    MemoryUse,
    choose_context,
    find_known_failure,
)
from bedplate.engines.checks import LaunchRule, PlannedLaunch
from bedplate.engines.knobs import (
    SPIN,
    apply_tuned_options,
    keep_tunable,
    make_field_choices,
    make_option_choices,
    make_variable_choices,
    uses_engine_defaults,
)
from bedplate.engines.quantizations import make_rows
from bedplate.engines.shared import (
    FLOAT32_ONLY,
    get_adapter_folder,
    get_compute_bits,
    plan_adapter_downloads,
    widen_on_older_arm,
)
from bedplate.engines.traits import AdapterTraits, AdviceFlags, EstimateTraits, PrivatePort, ServerFeatures, TableNames
from bedplate.engines.transformers_models import GENERATORS_5_22, REMOTE_CODE_HINT, OwnModels
from bedplate.engines.visible import show_first
from bedplate.values import Hardware, Launch, Model, Plan, Refusal, Settings, Weights, Workload, replace_fields
from bedplate.values.decision import Device
from bedplate.values.tuning import SettingChoice, TunableSetting

VERSION = "5.22.2"
DEVICES: dict[Device, str] = {"cpu": "cpu", "cuda": "cuda", "rocm": "cuda", "metal": "mps", "xpu": "xpu"}
"""PyTorch's device names; AMD GPUs are named cuda."""
QUANTIZATIONS = {"INT8": "bnb-8bit", "NF4": "bnb-4bit"}
PAGE_TOKENS = 256
"""ContinuousBatchingConfig.page_size: tokens per block of the KV cache."""

_KNOWN_FAILURES: tuple[tuple[str, KnownFailure], ...] = (
    (
        r"OutOfMemoryError: .*out of memory|CUDA out of memory|MPS backend out of memory|can't allocate memory",
        KnownFailure(
            message="there is not enough memory for the model and its KV cache",
            hint="reduce the need: --context 4096, --concurrency 1, or a smaller model",
        ),
    ),
    (
        r"model type `(?P<what>[\w.-]+)` but Transformers does not recognize this architecture",
        KnownFailure(
            message="this version of Transformers does not support the architecture {what}",
            hint="a newer version may support it: update bedplate, or choose another engine with --engine",
        ),
    ),
    (
        r"is not the path to a directory containing a file named|does not appear to have (?:a file named|files named)",
        KnownFailure(
            message="files that Transformers needs are missing from the model folder",
            hint="download it again; it must contain config.json, the tokenizer files and .safetensors files",
        ),
    ),
    (
        r"quantization requires bitsandbytes: `pip install",
        KnownFailure(
            message="quantization while loading needs bitsandbytes, which is not in the engine's environment",
            hint="install bitsandbytes there, then run `bedplate engines use` again",
        ),
    ),
    (
        r"requires the latest version of bitsandbytes|bitsandbytes.*(?:not installed|is required)",
        KnownFailure(
            message="quantization while loading needs bitsandbytes, which does not support this device",
            hint="use the model in BF16, or a quantized one",
        ),
    ),
    (
        r"bedplate-engine: (?P<what>the LoRA adapter .+)",
        KnownFailure(
            message="{what}",
            hint="repair the adapter, or remove it from workload.lora_adapters",
        ),
    ),
    (
        r"error while attempting to bind on address .*address already in use",
        KnownFailure(
            message="another program took the engine's private port during the start",
            hint="start again; bedplate then chooses another port",
            lasting=False,
        ),
    ),
)


FP8_CHECK = "transformers 5.22.2: quantizers/quantizer_finegrained_fp8.py: validate_environment"
QUANTIZATION_ROWS = (
    *make_rows("transformers 5.22.2: integrations/bitsandbytes.py", "cuda",
               ["INT8 while loading", "NF4 while loading"]),
    *make_rows("transformers 5.22.2: quantizers/quantizer_bnb_8bit.py, quantizer_bnb_4bit.py", "cuda",
               ["bitsandbytes"]),
    *make_rows("transformers 5.22.2: quantizers/quantizer_compressed_tensors.py: validate_environment", "cuda",
               ["compressed-tensors"]),
    # Below 8.9 it dequantizes the weights to BF16.
    *make_rows(FP8_CHECK, "cuda", ["fp8"], units="fp8"),
    *make_rows(FP8_CHECK, "rocm", ["fp8"], units="fp8"),
)  # fmt: skip


OWN_MODELS = OwnModels(VERSION, GENERATORS_5_22)


def check_architecture(launch: PlannedLaunch) -> str | None:
    """This version of Transformers has the model's architecture, without code of the model's repository."""
    return OWN_MODELS.explain(launch.model, launch.plan.engine_version, "Transformers")


LAUNCH_RULES = (
    LaunchRule("pytorch.architecture", "transformers 5.22.2: models/auto/modeling_auto.py; cli/serving/"
               "model_manager.py: trust_remote_code", check_architecture, REMOTE_CODE_HINT),
)  # fmt: skip


class PyTorch(Engine):
    id = "pytorch"
    name = "PyTorch"
    spellings = ("torch", "transformers", "hftransformers", "huggingfacetransformers", "pytorcheager", "torchserve")
    version = VERSION
    recipe = EnvironmentRecipe(
        packages=(
            f"transformers[serving]=={VERSION}",
            "torch==2.13.0",
            # Reads GGUF files, and dequantizes them for engines that do not read them.
            "gguf==0.19.0",
            # Imported by llama.cpp's converter for every vocabulary.
            "sentencepiece==0.2.2",
            # Uploaded audio files are parsed, decoded and resampled with these three.
            "python-multipart==0.0.33",
            "soundfile==0.14.0",
            "soxr==1.1.0",
            "bitsandbytes==0.50.2; sys_platform == 'linux' and platform_machine == 'x86_64'",
        ),
        programs=(
            ("transformers-server", "transformers_server.py"),
            ("transformers_speech.py", "transformers_speech.py"),
            ("transformers_adapters.py", "transformers_adapters.py"),
            ("gguf-to-folder", "gguf_to_folder.py"),
        ),
        download_bytes=330_000_000,
        disk_bytes=1_200_000_000,
        check="import torch, transformers.cli.serve; assert torch.ones(3).sum() == 3",
    )
    formats = ("safetensors",)
    vendors = ("nvidia", "amd", "apple", "intel")
    cpu = True
    systems = ("linux", "macos", "windows")
    built_for = ("cpu", "cuda", "rocm", "metal", "xpu")
    # Turing: the oldest target of CUDA 13, and so of PyTorch's wheels since 2.11.
    capability = (7, 5)
    # Whole layers, one card after the other, with one card active at a time (accelerate's device_map).
    ways = ("pipeline",)
    tasks = ("generate", "transcribe")
    effort = 1
    reuses_prefixes = False
    adapters = AdapterTraits(
        slots="--max-loras", rank="--max-lora-rank", names="--lora-modules", mixes=False, selects="model",
        load_path="/v1/load_lora_adapter", unload_path="/v1/unload_lora_adapter",
        use="requests name one as their model, and are computed one after the other",
        source="shipped/transformers_adapters.py; transformers 5.22.2: cli/serve.py and cli/serving/ have no adapters",
    )  # fmt: skip
    features = Features(
        batching="none; continuous as an option",
        kv_cache="grows with a request; paged with batching",
        quantization="bitsandbytes while loading; FP8; others with additional packages",
        hardware="all devices that PyTorch supports",
        structured_output="none",
        multi_node="none",
        server="transformers serve",
        maintained="active",
        source="transformers 5.22.2 (November 2026): cli/serve.py, cli/serving/model_manager.py",
    )
    # It answers 422 to response_format, logprobs, n and tool_choice.
    server_features = ServerFeatures(
        tools="auto", json_schema=False, json_object=False, logprobs=False, choices="one", vision=True,
        source="transformers 5.22.2: cli/serving/chat_completion.py",
    )  # fmt: skip
    uses = MemoryUse(
        process_bytes=1_500_000_000,
        device_bytes=40_000_000,
        spread=0.5,
        source="published memory peaks of Transformers on A100 and H20, without the driver context",
    )
    private_port = PrivatePort(
        key_checked_by="wrapper",
        source="transformers 5.22.2: cli/serve.py has no option for a key",
    )
    quantizations = QUANTIZATION_ROWS
    launch_rules = LAUNCH_RULES
    strength = "prototypes, and jobs that process one item at a time"
    table_names = TableNames(words=("transformers", "pytorch", "torch", "hugging"), rank=11)
    estimate = EstimateTraits(kernels="eager", one_stream=True, fp4_products=False, expands_cache=True)
    flags = AdviceFlags(
        slots="--continuous-batching",
        threads="OMP_NUM_THREADS",
        cache_memory="--cb-num-blocks",
        batch_tokens="--cb-max-batch-tokens",
    )

    def refuse(self, hardware: Hardware, model: Model, workload: Workload) -> Refusal | None:
        if refused := super().refuse(hardware, model, workload):
            return refused
        if refused := OWN_MODELS.refuse(self, model):
            return refused
        target = self.find_target(hardware)
        if target is not None and not self.list_weights(target, model, workload):
            why = f"does not load {model.quantization} weights on this device"
            return self.make_refusal("impossible", why, "the same model in BF16")
        lacking = [one for one in ("soundfile", "soxr", "python-multipart") if not self.has_package(one)]
        if workload.task == "transcribe" and lacking:
            why = f"its environment lacks {', '.join(lacking)}, which decode audio"
            return self.make_refusal("impossible", why, f"uv pip install {' '.join(lacking)} there")
        return None

    def find_target(self, hardware: Hardware) -> ComputeTarget | None:
        # On a Neoverse N1 four requests of 512 + 128 tokens took 44 s in 32 bits, and more than five minutes in BF16.
        return widen_on_older_arm(super().find_target(hardware), hardware)

    def list_weights(self, target: ComputeTarget, model: Model, workload: Workload) -> tuple[Weights, ...]:
        label = model.quantization or "BF16"
        if label in SIXTEEN_BIT:
            if target.features == FLOAT32_ONLY and label != "F32":
                return (Weights(label="F32", made="while loading", format="safetensors"),)
            sizes = ("INT8",) if workload.precision_sensitive else ("INT8", "NF4")
            smaller = sizes if target.device == "cuda" and self.has_package("bitsandbytes") else ()
            return (
                Weights(label=label, made="as it is", format="safetensors"),
                *(Weights(label=one, made="while loading", format="safetensors") for one in smaller),
            )
        if label == "MXFP4":
            # Its kernels are downloaded from the hub at run time; without them it dequantizes the weights.
            return (Weights(label="BF16", made="while loading", format="safetensors"),)
        fits = {"FP8": "fp8" in target.features, "NF4": target.device == "cuda", "INT8": target.device == "cuda"}
        method = model.quantization_details.method if model.quantization_details else ""
        if fits.get(label) and method in ("fp8", "bitsandbytes", ""):
            return (Weights(label=label, made="as it is", format="safetensors"),)
        return ()

    def settle(self, hardware: Hardware, model: Model, workload: Workload) -> Settings:
        threads = hardware.cpu.allowed_physical_cores
        settled = replace_fields(
            super().settle(hardware, model, workload), context_tokens=choose_context(model, workload)
        )
        if workload.task == "transcribe" or workload.adapters:
            # Its continuous batching computes no encoder-decoder models, and all requests of a batch in the same way.
            settled = replace_fields(settled, slots=1)
        return replace_fields(settled, threads=threads) if settled.device == "cpu" else settled

    def get_cache_bits(self, model: Model) -> int:
        return get_compute_bits(model)

    def launch(self, plan: Plan, port: int) -> Launch:
        settings, cards = plan.settings, plan.parallelism.pipeline
        argv = ["transformers-server", "serve", plan.model_path, "--host", "127.0.0.1", "--port", str(port)]
        argv += self._get_adapter_options(plan)
        steps = (*self.plan_installation(plan), *plan_adapter_downloads(plan))
        if uses_engine_defaults(settings):
            env = {"HF_HUB_OFFLINE": "1"} if plan.model.files else {}
            return Launch(argv=tuple(argv), env=env, prepare=steps)
        argv += ["--device", "auto" if cards > 1 else DEVICES.get(settings.device, "auto")]
        argv += ["--dtype", _choose_dtype(plan)]
        if plan.weights.made == "while loading" and (method := QUANTIZATIONS.get(plan.weights.label)):
            argv += ["--quantization", method]
        if settings.slots > 1:
            # The KV cache is one pool: enough pages for all requests at their maximum length.
            pages = -(-settings.context_tokens // PAGE_TOKENS) * settings.slots
            argv += ["--continuous-batching", "--cb-num-blocks", str(pages)]
            if settings.batch_tokens is not None:
                argv += ["--cb-max-batch-tokens", str(settings.batch_tokens)]
        return apply_tuned_options(Launch(argv=tuple(argv), env=_make_environment(plan), prepare=steps), settings)

    def _get_adapter_options(self, plan: Plan) -> list[str]:
        work = plan.workload
        if not work.adapters:
            return []
        argv = ["--max-loras", str(len(work.adapters)), "--max-lora-rank", str(self.choose_adapter_rank(work))]
        named = [f"{one.served_name}={get_adapter_folder(one)}" for one in work.adapters]
        return [*argv, "--lora-modules", *named] if work.names_adapters else argv

    def list_settings(self, hardware: Hardware, plan: Plan) -> tuple[TunableSetting, ...]:
        device = plan.settings.device
        found = [*_make_batching_knobs(plan), *(_make_cpu_knobs(hardware, plan) if device == "cpu" else [])]
        found += _make_card_knobs(plan) if device == "cuda" else []
        return keep_tunable(found)

    def read_progress(self, line: str) -> float | None:
        # The progress bar is one growing line: the last number is the newest.
        found = re.findall(r"Loading weights: +(\d{1,3})%", line)
        return int(found[-1]) / 100 if found else None

    def is_current(self, version: str, backend: str) -> bool:
        # It launches fewer kernels per layer since attention was rewritten in 4.48.
        found = re.match(r"4\.(\d+)", version)
        return found is None or int(found[1]) >= 48

    def explain(self, log: str) -> KnownFailure | None:
        return find_known_failure(log, _KNOWN_FAILURES)


_HELP = "transformers serve --help of 5.22.2"
BF16_SETS = frozenset(["avx512_bf16", "amx_bf16", "bf16"])


def _choose_dtype(plan: Plan) -> str:
    widened = plan.weights.made == "while loading" and plan.weights.label == "F32"
    return "float32" if widened else "auto"


def _make_batching_knobs(plan: Plan) -> list[TunableSetting]:
    settings, asked = plan.settings, plan.workload.compute_in_flight()
    many, adapters = settings.slots > 1, bool(plan.workload.adapters)
    slots = sorted({1} if adapters else {1, asked, 2 * asked, settings.slots})
    tokens = (512, 1024, 2048)
    kept = SettingChoice(value="default")
    # Without a GPU, sdpa is the default of Transformers.
    ways = ("eager",) if settings.device == "cpu" else ("sdpa", "eager")
    return [
        TunableSetting(
            name="slots", meaning="concurrent requests with continuous batching; 1: one after the other",
            choices=make_field_choices(slots, "slots"),
            now=str(settings.slots), own="1", own_choice="1", ordered=True,
            limits=("scheduler", "runtime overhead", "compute"), risk=("answers", "memory"), prior=0.4, source=_HELP,
        ),
        TunableSetting(
            name="batch-tokens", meaning="maximum tokens of all requests in one step of continuous batching",
            choices=(kept, *make_option_choices(tokens, "--cb-max-batch-tokens")) if many else (kept,), now="default",
            own="by free memory", limits=("compute", "scheduler"), risk=("memory",), prior=0.4, source=_HELP,
        ),
        TunableSetting(
            name="attention", meaning="attention implementation", now="default", own="chosen by Transformers",
            choices=(kept, *(SettingChoice(value=one, options=("--attn-implementation", one)) for one in ways)),
            limits=("compute", "runtime overhead"), risk=("answers", "start"), prior=0.3, source=_HELP,
        ),
        TunableSetting(
            name="compile", meaning="torch.compile at start-up", now="off", own="off",
            # Continuous batching ignores it (cli/serving/utils.py: it means a cache of fixed size), and compiled layers
            # ignore the hooks of adapters.
            choices=(SettingChoice(value="off"), *(() if many or adapters else (SettingChoice(value="on",
            options=("--compile",)),))),
            limits=("runtime overhead", "compute"), risk=("start", "answers"), prior=0.3, source=_HELP,
        ),
    ]  # fmt: skip


def _make_cpu_knobs(hardware: Hardware, plan: Plan) -> list[TunableSetting]:
    cores = hardware.cpu.allowed_physical_cores
    counts = sorted({max(1, cores // 2), cores, 2 * cores})
    # Without BF16 instructions, each number is converted to 32 bits first.
    has_bf16 = bool(BF16_SETS & set(hardware.cpu.instruction_sets))
    prior = 0.15 if has_bf16 or _choose_dtype(plan) == "float32" else 0.7
    return [
        TunableSetting(
            name="threads", meaning="threads", now=str(plan.settings.threads), own="one per core",
            choices=make_variable_choices(counts, "OMP_NUM_THREADS"),
            ordered=True, limits=("compute", "memory bandwidth", "runtime overhead"), prior=0.2,
            source="OpenMP, which PyTorch uses",
        ),
        TunableSetting(
            name="dtype", meaning="compute type", now=_choose_dtype(plan), own="auto: as stored",
            choices=tuple(SettingChoice(value=one, options=("--dtype", one)) for one in ("auto", "float32")),
            limits=("compute", "memory bandwidth"), risk=("memory",), prior=prior, source=_HELP,
        ),
        TunableSetting(
            name="spin", meaning="whether idle threads spin or block", now="default",
            own="spin for a while, then block", choices=SPIN, limits=("runtime overhead",), prior=0.15,
            source="OpenMP 5.2, OMP_WAIT_POLICY",
        ),
    ]  # fmt: skip


def _make_card_knobs(plan: Plan) -> list[TunableSetting]:
    graphs = SettingChoice(value="on", options=("--cb-use-cuda-graph",))
    return [
        TunableSetting(
            name="graphs", meaning="CUDA graphs: one launch per step instead of one per kernel",
            choices=(SettingChoice(value="default"),
            graphs) if plan.settings.slots > 1 else (SettingChoice(value="default"),),
            now="default", own="only if attention needs no mask", limits=("runtime overhead",),
            risk=("answers", "memory", "start"), prior=0.6, source=_HELP,
        ),
    ]  # fmt: skip


def _make_environment(plan: Plan) -> dict[str, str]:
    settings, cards = plan.settings, plan.parallelism.pipeline
    env = {"HF_HUB_OFFLINE": "1"} if plan.model.files else {}
    if settings.device == "cpu" and settings.threads is not None:
        env["OMP_NUM_THREADS"] = str(settings.threads)
    if cards > 1:
        # By default it uses all visible cards.
        env |= show_first(settings.device, cards)
    return env


ENGINE = PyTorch()
