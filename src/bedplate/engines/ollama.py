"""Ollama: llama.cpp behind its own server and model store."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath

import msgspec

from bedplate.engines.base import (
    SIXTEEN_BIT,
    ComputeTarget,
    Engine,
    Features,
    KnownFailure,
    MemoryUse,
    find_known_failure,
    get_source_folder,
    plan_download,
    plan_published_download,
)
from bedplate.engines.checks import PlannedLaunch
from bedplate.engines.llama_cpp import LlamaCpp
from bedplate.engines.shared import split_layers
from bedplate.engines.traits import (
    MODELS,
    AdapterTraits,
    AdviceFlags,
    ContainerImage,
    ContainerTraits,
    EstimateTraits,
    PrivatePort,
    ServerFeatures,
    StoreStep,
    TableNames,
)
from bedplate.errors import NotPossible
from bedplate.facts.known_models import GGUF_BITS
from bedplate.values import (
    Hardware,
    Launch,
    Model,
    Plan,
    Preparation,
    Refusal,
    Settings,
    Weights,
    Workload,
    replace_fields,
)
from bedplate.values.decision import Device, list_part_names
from bedplate.values.quoting import escape_controls, is_safe, join_posix_shell, quote_posix_shell
from bedplate.values.record import make_estimate
from bedplate.values.workload import LoraAdapter

# From the source of v0.32.15 (2026-08-19), which starts llama-server of llama.cpp b10488 for each model.
LLAMA_CPP = LlamaCpp()
STORE = f"{MODELS}/ollama"
"""The model store in containers, on the volume with the source files."""
SERVER_BYTES = 100_000_000
"""Assumed memory of the Ollama process, in addition to llama-server."""
IMPORTS = frozenset([
    "llama", "mllama", "llama4", "mistral3", "ministral3", "mixtral", "gemma", "gemma2", "gemma3", "gemma3_text",
    "gemma3n", "gemma4", "phi3", "qwen2", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "olmo3", "bert", "nomic_bert",
    "cohere", "gpt_oss", "deepseek_v3", "glm4_moe_lite", "lfm2", "lfm2_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe",
    "nemotron_h",
])  # fmt: skip
"""`model_type` values that `ollama create` converts to GGUF (convert/convert.go)."""
ONE_AT_A_TIME = frozenset([
    "mllama", "qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe", "qwen3next", "lfm2", "lfm2moe", "nemotronh",
    "nemotronhmoe", "nemotronhomni",
])  # fmt: skip
"""Architectures for which server/sched.go ignores OLLAMA_NUM_PARALLEL; without underscores."""
QUANTIZE_VALUES = {"F16": None, "Q8_0": "q8_0", "Q4_K_M": "q4_K_M"}
"""Types that it converts 16-bit weights to, and the values of --quantize (docs/import.mdx)."""
COPY_BYTES_S = 150e6
STARTS_S = 30
_KNOWN_FAILURES = (
    (
        r"listen tcp \S+: bind: ",
        KnownFailure(
            message="another program took the engine's private port during the start",
            hint="start again; bedplate then chooses another port",
            lasting=False,
        ),
    ),
    (
        r"unsupported architecture \\?\"(?P<what>\w+)",
        KnownFailure(
            message="Ollama cannot import the architecture {what}",
            hint="use a GGUF file of the same model, or --engine llama.cpp, which converts it",
        ),
    ),
    (
        r"invalid model name",
        KnownFailure(message="Ollama does not accept this model name", hint="use only letters, digits, - and _"),
    ),
)


OLLAMA_ROWS = tuple(
    msgspec.structs.replace(row, source=f"llama.cpp in ml/backend/ggml of 0.32.15: {row.source}")
    for row in LLAMA_CPP.quantizations
    if row.method != "gguf nvfp4"
)
"""Its runner is llama.cpp."""


class Ollama(Engine):
    id = "ollama"
    name = "Ollama"
    spellings = ("ollamaserve", "ollamaserver")
    version = "0.32.15"
    formats = ("gguf",)
    converts = ("safetensors",)
    vendors = ("nvidia", "amd", "apple", "intel")
    cpu = True
    systems = ("linux", "macos", "windows")
    # docs/gpu.mdx; GPUs that neither CUDA nor ROCm supports use Vulkan.
    capability = (5, 0)
    tasks = ("generate", "embed")
    ways = ("pipeline",)
    offloads = True
    # No recipe: the program is published as an archive and an installer; the package index only has a client.
    built_for = ("cpu", "cuda", "rocm", "metal", "xpu", "vulkan")
    effort = 1
    features = Features(
        batching="continuous, fixed slots; one slot for some architectures",
        kv_cache="one region per slot; 8 or 4 bits",
        quantization="GGUF as stored; converts 16-bit weights to Q8_0, Q4_K_M and Q4_K_S",
        hardware="CPU, NVIDIA, AMD, Apple, Vulkan; layers can be offloaded to the host",
        structured_output="JSON schema",
        multi_node="no",
        server="its own, with a model store; loads a model at its first request; no metrics",
        maintained="active",
        source="Ollama v0.32.15 (2026-08-19): envconfig/config.go, server/sched.go, llm/llama_server.go, docs/",
    )
    # The GGUF file is imported without a projector file for images.
    server_features = ServerFeatures(
        tools="auto", json_schema=True, json_object=True, logprobs=True, choices="one",
        source="docs.ollama.com/api/openai-compatibility (November 2026)",
    )  # fmt: skip
    uses = MemoryUse(
        process_bytes=LLAMA_CPP.uses.process_bytes + SERVER_BYTES,
        device_bytes=LLAMA_CPP.uses.device_bytes,
        prefill_tokens=LLAMA_CPP.uses.prefill_tokens,
        spread=0.6,
        source="llama.cpp, which it starts, plus 100 MB for itself; not measured",
    )
    adapters = AdapterTraits(
        most=1,
        use="it applies to every request",
        source="server/create.go of August 2026: only one adapter is supported; docs/modelfile.mdx: ADAPTER",
    )
    max_slots = LLAMA_CPP.max_slots
    default_slots = LLAMA_CPP.default_slots
    variable_prefixes = ("OLLAMA_",)
    private_port = PrivatePort(
        key_checked_by="nobody",
        source="it has no recipe: bedplate does not start it; v0.32.15 has no key",
    )
    quantizations = OLLAMA_ROWS
    strength = "existing deployments, or users of its model library"
    table_names = TableNames(words=("ollama",), rank=13)
    runs_engine = LLAMA_CPP.id
    loading = LLAMA_CPP.loading
    estimate = EstimateTraits(pass_tokens=512)
    flags = AdviceFlags(
        slots="OLLAMA_NUM_PARALLEL",
        threads="num_thread",
        cache_memory="OLLAMA_CONTEXT_LENGTH",
        cache_type="OLLAMA_KV_CACHE_TYPE",
        batch_tokens="num_batch",
    )
    container = ContainerTraits(start_s=10.0, store=STORE)

    def refuse(self, hardware: Hardware, model: Model, workload: Workload) -> Refusal | None:
        if refused := super().refuse(hardware, model, workload):
            return refused
        target = self.find_target(hardware)
        if target is None or self.list_weights(target, model, workload):
            return None
        what = f"{model.quantization or 'BF16'} weights of the architecture {model.architecture}"
        return self.make_refusal("impossible", f"cannot import {what}", "a GGUF file of the same model")

    def list_weights(self, target: ComputeTarget, model: Model, workload: Workload) -> tuple[Weights, ...]:
        label = model.quantization or "BF16"
        if model.format == "gguf" or (model.format == "facts" and label in GGUF_BITS):
            return LLAMA_CPP.list_weights(target, model, workload)
        if model.format != "facts" and model.architecture not in IMPORTS:
            return ()
        if label == "MXFP4" and model.architecture == "gpt_oss":
            return (Weights(label=label, made="converted", format="gguf"),)
        if label not in SIXTEEN_BIT:
            return ()
        kept = [one for one in QUANTIZE_VALUES if not workload.precision_sensitive or one in ("F16", "Q8_0")]
        return tuple(Weights(label=one, made="converted", format="gguf") for one in kept)

    def settle(self, hardware: Hardware, model: Model, workload: Workload) -> Settings:
        # Its steps hold 512 tokens of all requests together.
        settings = replace_fields(LLAMA_CPP.settle(hardware, model, workload), batch_tokens=None)
        alone = "embed" in (model.task, workload.task) or model.architecture.replace("_", "") in ONE_AT_A_TIME
        return replace_fields(settings, slots=1) if alone else settings

    def count_layers_by_card(self, launch: PlannedLaunch) -> tuple[int, ...]:
        # llama.cpp then chooses the layers and the experts of each card by free memory.
        if launch.plan.settings.host_expert_layers:
            return split_layers(launch.plan)
        return LLAMA_CPP.count_layers_by_card(launch)

    def count_layers_by_memory(self, layers: int, sizes: Sequence[float], placed: int | None = None) -> tuple[int, ...]:
        return LLAMA_CPP.count_layers_by_memory(layers, sizes, placed)

    def count_largest_stage(self, layers: int, stages: int) -> int:
        return LLAMA_CPP.count_largest_stage(layers, stages)

    def compute_overhead_bytes(self, model: Model, settings: Settings) -> float:
        return LLAMA_CPP.compute_overhead_bytes(model, settings) + SERVER_BYTES

    def launch(self, plan: Plan, port: int) -> Launch:
        # It is ready before the model is loaded: the first request loads it, and it stays loaded.
        return Launch(
            argv=("ollama", "serve"),
            env=_make_environment(plan, port),
            prepare=(
                Preparation(
                    kind="install", what=f"Ollama {self.version}, from ollama.com/download", where="this machine"
                ),
                *_plan_import(plan, port),
            ),
            health_path="/api/version",
        )

    def find_published_image(self, device: Device, gfx: str | None, arch: str) -> ContainerImage | None:
        if device not in ("cpu", "cuda", "rocm"):
            return None
        return ContainerImage(name=f"ollama/ollama:{self.version}{'-rocm' if device == 'rocm' else ''}")

    def adapt_to_container(self, launch: Launch, image: str) -> Launch:
        # At start-up it deletes files without a manifest, and the volume is read-only.
        return replace_fields(launch, env={**launch.env, "OLLAMA_MODELS": STORE, "OLLAMA_NOPRUNE": "1"})

    def get_health_command(self, url: str) -> tuple[str, ...]:
        return ("ollama", "list")

    def plan_store_step(self, plan: Plan) -> StoreStep | None:
        """Only a running server can add a model to the store: the step runs one until it is done."""
        name, quantize = make_create_command(plan)[2], make_create_command(plan)[5:]
        command = (
            f"[ -e {STORE}/manifests ] && exit 0; "
            f"printf %s {quote_posix_shell(write_modelfile(plan))} > /cache/Modelfile; "
            "ollama serve & "
            "until ollama list > /dev/null 2>&1; do sleep 1; done; "
            f"{join_posix_shell(['ollama', 'create', name, '--file', '/cache/Modelfile', *quantize])}"
        )
        return StoreStep(model=name, command=command, env={"OLLAMA_MODELS": STORE})

    def explain(self, log: str) -> KnownFailure | None:
        return find_known_failure(log, _KNOWN_FAILURES) or LLAMA_CPP.explain(log)


def make_model_name(model: Model) -> str:
    """The served name in the form that Ollama accepts: [namespace/]model[:tag], without a dot in the namespace."""
    *above, last = model.served_name.split("/")
    name, _, tag = last.partition(":")
    pieces = [re.sub(r"[^\w-]", "-", part, flags=re.ASCII) for part in above[-1:]]
    pieces.append(re.sub(r"[^\w.-]", "-", name, flags=re.ASCII))
    named = "/".join(re.sub(r"^[^a-zA-Z0-9_]+", "", piece)[:80] or "model" for piece in pieces)
    return f"{named}:{re.sub(r'[^a-zA-Z0-9_.-]', '-', tag)}" if tag else named


def write_modelfile(plan: Plan) -> str:
    """The Modelfile: the weights, and settings that have no environment variable."""
    lines = [f"FROM {_format_source_path(path)}" for path in _list_sources(plan)]
    lines += [f"ADAPTER {_format_source_path(_get_adapter_folder(one))}" for one in plan.workload.adapters]
    settings = plan.settings
    if settings.device == "cpu" and settings.threads is not None:
        lines.append(f"PARAMETER num_thread {settings.threads}")
    # Without a number llama.cpp places the layers itself; it also chooses which experts stay on the host.
    layers = settings.gpu_layers if settings.host_expert_layers is None else None
    if layers is not None and 0 < layers <= plan.model.num_layers:
        lines.append(f"PARAMETER num_gpu {layers}")
    if settings.batch_tokens is not None:
        lines.append(f"PARAMETER num_batch {settings.batch_tokens}")
    return "\n".join(lines) + "\n"


def make_create_command(plan: Plan) -> tuple[str, ...]:
    """The command that adds the model to the store through a running server."""
    quantize = QUANTIZE_VALUES.get(plan.weights.label) if plan.weights.made == "converted" else None
    return (
        "ollama", "create", make_model_name(plan.model), "--file", _get_modelfile_path(plan),
        *(("--quantize", quantize) if quantize else ()),
    )  # fmt: skip


def _make_environment(plan: Plan, port: int) -> dict[str, str]:
    settings = plan.settings
    found = {
        "OLLAMA_HOST": f"127.0.0.1:{port}",
        "OLLAMA_NUM_PARALLEL": str(settings.slots),
        # Context of each request: Ollama multiplies it by the number of requests.
        "OLLAMA_CONTEXT_LENGTH": str(settings.context_tokens),
        "OLLAMA_KEEP_ALIVE": "-1",
        "OLLAMA_MAX_LOADED_MODELS": "1",
        "OLLAMA_NO_CLOUD": "1",
    }
    if settings.kv_type == "fp8":
        # Its KV cache supports 8-bit integers, not 8-bit floats, and only with flash attention.
        found |= {"OLLAMA_KV_CACHE_TYPE": "q8_0", "OLLAMA_FLASH_ATTENTION": "1"}
    if plan.parallelism.pipeline > 1:
        found["OLLAMA_SCHED_SPREAD"] = "1"
    return found


def _plan_import(plan: Plan, port: int) -> tuple[Preparation, ...]:
    """Steps that add the model to the store with a Modelfile and a temporary server; can be repeated."""
    converted = plan.weights.made == "converted"
    size = round(plan.model.parameters * GGUF_BITS.get(plan.weights.label, 4.5) / 8) if converted else None
    stored = size or plan.model.weight_bytes
    # A quantization temporarily needs space for the 16-bit file as well.
    disk = stored + (2 * plan.model.parameters if converted and QUANTIZE_VALUES.get(plan.weights.label) else 0)
    took = make_estimate(STARTS_S + 2 * disk / COPY_BYTES_S, 0.7, "not measured: read and written at disk speed")
    return (
        *(plan_download(plan) if converted else plan_published_download(plan)),
        *(_plan_adapter_download(one) for one in plan.workload.adapters if one.is_on_hub),
        Preparation(
            kind="convert" if converted else "build",
            what=f"{plan.model.name} as {make_model_name(plan.model)}, from a Modelfile", where="Ollama's model store",
            disk_bytes=disk, seconds=took, argv=("python", "-c", _write_import_script(plan, port)),
        ),
    )  # fmt: skip


def _write_import_script(plan: Plan, port: int) -> str:
    """Python code that writes the Modelfile and imports it through a temporary server."""
    return f"""\
import os, subprocess, time, urllib.request
with open({_get_modelfile_path(plan)!r}, "w") as file:
    file.write({write_modelfile(plan)!r})
os.environ["OLLAMA_HOST"] = "127.0.0.1:{port}"
server = subprocess.Popen(["ollama", "serve"])
try:
    for _ in range({STARTS_S * 10}):
        try:
            urllib.request.urlopen("http://127.0.0.1:{port}/api/version", timeout=5).close()
            break
        except OSError:
            assert server.poll() is None, "ollama serve exited"
            time.sleep(0.1)
    subprocess.run({list(make_create_command(plan))!r}, check=True)
finally:
    server.terminate()
    server.wait()
"""


def _get_adapter_folder(adapter: LoraAdapter) -> str:
    return adapter.served_name if adapter.is_on_hub else adapter.path


def _plan_adapter_download(adapter: LoraAdapter) -> Preparation:
    folder = _get_adapter_folder(adapter)
    argv = ("hf", "download", adapter.path, "--local-dir", folder)
    return Preparation(kind="download", what=f"adapter {adapter.path}", where=folder, argv=argv)


def _get_modelfile_path(plan: Plan) -> str:
    return f"{plan.model.short_name}-{plan.weights.label}.Modelfile"


def _list_sources(plan: Plan) -> tuple[str, ...]:
    """The folder with the original weights, or all parts of a GGUF file."""
    if plan.weights.made == "converted":
        return (get_source_folder(plan),)
    if not plan.model.files and plan.weights.published is not None:
        return list_part_names(plan.weights.published.path)
    return plan.model.files or (f"{plan.model.short_name}.gguf",)


def _format_source_path(path: str) -> str:
    """The path with a leading `./` or `/`, so that it cannot be read as a model name."""
    if not all(map(is_safe, path)):
        raise NotPossible(
            f"a Modelfile cannot name the path {escape_controls(path)}", hint="rename it, without control characters"
        )
    pure = PurePath(path)
    return path if pure.is_absolute() or path.startswith("./") else f"./{path}"


ENGINE = Ollama()
