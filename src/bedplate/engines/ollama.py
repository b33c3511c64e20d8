"""Ollama: llama.cpp behind a server and a model store of its own."""

from __future__ import annotations

import re
import shlex
from pathlib import PurePath

from bedplate.engines.base import (
    SIXTEEN_BIT,
    Engine,
    Failure,
    Features,
    MemoryUse,
    Target,
    fetching,
    known_failure,
    source_folder,
)
from bedplate.engines.llama_cpp import LlamaCpp
from bedplate.engines.traits import (
    MODELS,
    AdviceFlags,
    ContainerImage,
    ContainerTraits,
    EstimateTraits,
    StoreStep,
    TableNames,
)
from bedplate.facts.known_models import GGUF_BITS
from bedplate.values import Hardware, Launch, Model, Plan, Preparation, Refusal, Settings, Weights, Workload, replaced
from bedplate.values.decision import Device
from bedplate.values.record import estimate

# All of this by the source of v0.32.15 (2026-08-19), which starts llama-server of llama.cpp b10488 for each model.
LLAMA_CPP = LlamaCpp()
STORE = f"{MODELS}/ollama"
"""In containers: its store of models lies on the volume, beside the files that it was made from."""
SERVER_BYTES = 100_000_000
"""Its own process beside llama-server's: assumed, a Go program with a list of models."""
IMPORTS = frozenset([
    "llama", "mllama", "llama4", "mistral3", "ministral3", "mixtral", "gemma", "gemma2", "gemma3", "gemma3_text",
    "gemma3n", "gemma4", "phi3", "qwen2", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "olmo3", "bert", "nomic_bert",
    "cohere", "gpt_oss", "deepseek_v3", "glm4_moe_lite", "lfm2", "lfm2_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe",
    "nemotron_h",
])  # fmt: skip
"""What `ollama create` makes GGUF of (convert/convert.go), as config.json's `model_type` has it."""
ONE_AT_A_TIME = frozenset([
    "mllama", "qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe", "qwen3next", "lfm2", "lfm2moe", "nemotronh",
    "nemotronhmoe", "nemotronhomni",
])  # fmt: skip
"""Architectures for which server/sched.go sets OLLAMA_NUM_PARALLEL aside; without underscores."""
MADE = {"F16": None, "Q8_0": "q8_0", "Q4_K_M": "q4_K_M"}
"""What it makes of 16-bit weights, and what --quantize is told (docs/import.mdx)."""
COPY_BYTES_S = 150e6
STARTS_S = 30
_KNOWN_FAILURES = (
    (
        r"listen tcp \S+: bind: ",
        Failure(
            message="the private port was taken by another program in the same moment",
            hint="start again; another port is chosen then",
            lasting=False,
        ),
    ),
    (
        r"unsupported architecture \\?\"(?P<what>\w+)",
        Failure(
            message="Ollama does not import the architecture {what}",
            hint="a GGUF file of the same model; or llama.cpp, which converts it",
        ),
    ),
    (
        r"invalid model name",
        Failure(message="Ollama does not take this name for a model", hint="letters, digits, - and _ only"),
    ),
)


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
    # docs/gpu.mdx; what neither CUDA nor ROCm takes, Vulkan does.
    capability = (5, 0)
    tasks = ("generate", "embed")
    ways = ("pipeline",)
    offloads = True
    # No recipe: the program is published as an archive and an installer, and the package index has only a client.
    built_for = ("cpu", "cuda", "rocm", "metal", "xpu", "vulkan")
    effort = 1
    features = Features(
        batching="continuous, fixed slots; one for some architectures",
        kv_cache="one region per slot; 8 or 4 bits",
        quantization="GGUF as it is; Q8_0, Q4_K_M and Q4_K_S of 16-bit weights",
        hardware="CPU, NVIDIA, AMD, Apple, Vulkan; parts of a model may stay on the host",
        structured_output="JSON schema",
        multi_node="no",
        server="its own, with a store; a model loads at its first request; no metrics",
        maintained="active",
        source="Ollama v0.32.15 (2026-08-19): envconfig/config.go, server/sched.go, llm/llama_server.go, docs/",
    )
    uses = MemoryUse(
        process_bytes=LLAMA_CPP.uses.process_bytes + SERVER_BYTES,
        device_bytes=LLAMA_CPP.uses.device_bytes,
        prefill_tokens=LLAMA_CPP.uses.prefill_tokens,
        spread=0.6,
        source="llama.cpp's, which it starts, and 100 MB for itself; not measured",
    )
    max_slots = LLAMA_CPP.max_slots
    default_slots = LLAMA_CPP.default_slots
    variable_prefixes = ("OLLAMA_",)
    strength = "people who run it already, or want its library of models"
    table_names = TableNames(words=("ollama",), rank=13)
    runs_engine = LLAMA_CPP.id
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
        target = self.target(hardware)
        if target is None or self.weights(target, model, workload):
            return None
        what = f"{model.quantization or 'BF16'} weights of the architecture {model.architecture}"
        return self.refusal("impossible", f"does not import {what}", "a GGUF file of the same model")

    def weights(self, target: Target, model: Model, workload: Workload) -> tuple[Weights, ...]:
        label = model.quantization or "BF16"
        if model.format == "gguf" or (model.format == "facts" and label in GGUF_BITS):
            return LLAMA_CPP.weights(target, model, workload)
        if model.format != "facts" and model.architecture not in IMPORTS:
            return ()
        if label == "MXFP4" and model.architecture == "gpt_oss":
            return (Weights(label=label, made="converted", format="gguf"),)
        if label not in SIXTEEN_BIT:
            return ()
        kept = [one for one in MADE if not workload.precision_sensitive or one in ("F16", "Q8_0")]
        return tuple(Weights(label=one, made="converted", format="gguf") for one in kept)

    def settle(self, hardware: Hardware, model: Model, workload: Workload) -> Settings:
        # Its steps hold 512 tokens, of all who ask in turn.
        settings = replaced(LLAMA_CPP.settle(hardware, model, workload), batch_tokens=None)
        alone = "embed" in (model.task, workload.task) or model.architecture.replace("_", "") in ONE_AT_A_TIME
        return replaced(settings, slots=1) if alone else settings

    def overhead_bytes(self, model: Model, settings: Settings) -> float:
        return LLAMA_CPP.overhead_bytes(model, settings) + SERVER_BYTES

    def launch(self, plan: Plan, port: int) -> Launch:
        # It is ready before the model is: that loads with the first request, and then stays.
        return Launch(
            argv=("ollama", "serve"),
            env=_environment(plan, port),
            prepare=(
                Preparation(
                    kind="install", what=f"Ollama {self.version}, from ollama.com/download", where="this machine"
                ),
                *_import(plan, port),
            ),
            health_path="/api/version",
        )

    def published_image(self, device: Device, gfx: str | None, arch: str) -> ContainerImage | None:
        if device not in ("cpu", "cuda", "rocm"):
            return None
        return ContainerImage(name=f"ollama/ollama:{self.version}{'-rocm' if device == 'rocm' else ''}")

    def in_container(self, launch: Launch, image: str) -> Launch:
        # It clears out what no manifest names when it starts, and the volume cannot be written to.
        return replaced(launch, env={**launch.env, "OLLAMA_MODELS": STORE, "OLLAMA_NOPRUNE": "1"})

    def health_command(self, url: str) -> tuple[str, ...]:
        return ("ollama", "list")

    def store_step(self, plan: Plan) -> StoreStep | None:
        """The store takes a model from a running server alone: one runs for as long as that takes."""
        name, quantize = creating(plan)[2], creating(plan)[5:]
        command = (
            f"[ -e {STORE}/manifests ] && exit 0; printf %s {shlex.quote(modelfile(plan))} > /cache/Modelfile; "
            "ollama serve & "
            "until ollama list > /dev/null 2>&1; do sleep 1; done; "
            f"{shlex.join(['ollama', 'create', name, '--file', '/cache/Modelfile', *quantize])}"
        )
        return StoreStep(model=name, command=command, env={"OLLAMA_MODELS": STORE})

    def explain(self, log: str) -> Failure | None:
        return known_failure(log, _KNOWN_FAILURES) or LLAMA_CPP.explain(log)


def model_name(model: Model) -> str:
    """The served name as far as Ollama takes it: [namespace/]model[:tag], and no dot in a namespace."""
    *above, last = model.served_name.split("/")
    name, _, tag = last.partition(":")
    pieces = [re.sub(r"[^\w-]", "-", part, flags=re.ASCII) for part in above[-1:]]
    pieces.append(re.sub(r"[^\w.-]", "-", name, flags=re.ASCII))
    named = "/".join(re.sub(r"^[^a-zA-Z0-9_]+", "", piece)[:80] or "model" for piece in pieces)
    return f"{named}:{re.sub(r'[^a-zA-Z0-9_.-]', '-', tag)}" if tag else named


def modelfile(plan: Plan) -> str:
    """The Modelfile: the weights, and what has no environment variable."""
    lines = [f"FROM {_from(path)}" for path in _sources(plan)]
    settings = plan.settings
    if settings.device == "cpu" and settings.threads is not None:
        lines.append(f"PARAMETER num_thread {settings.threads}")
    # Without a number llama.cpp fits what it can by itself; of experts it knows better which to leave out.
    layers = settings.gpu_layers if settings.host_expert_layers is None else None
    if layers is not None and 0 < layers <= plan.model.num_layers:
        lines.append(f"PARAMETER num_gpu {layers}")
    if settings.batch_tokens is not None:
        lines.append(f"PARAMETER num_batch {settings.batch_tokens}")
    return "\n".join(lines) + "\n"


def creating(plan: Plan) -> tuple[str, ...]:
    """The command that puts the model into the store; it asks a running server to do it."""
    quantize = MADE.get(plan.weights.label) if plan.weights.made == "converted" else None
    return (
        "ollama", "create", model_name(plan.model), "--file", _modelfile_path(plan),
        *(("--quantize", quantize) if quantize else ()),
    )  # fmt: skip


def _environment(plan: Plan, port: int) -> dict[str, str]:
    settings = plan.settings
    found = {
        "OLLAMA_HOST": f"127.0.0.1:{port}",
        "OLLAMA_NUM_PARALLEL": str(settings.slots),
        # Of each request: it multiplies by the number of them.
        "OLLAMA_CONTEXT_LENGTH": str(settings.context_tokens),
        "OLLAMA_KEEP_ALIVE": "-1",
        "OLLAMA_MAX_LOADED_MODELS": "1",
        "OLLAMA_NO_CLOUD": "1",
    }
    if settings.kv_type == "fp8":
        # It has no 8-bit floats for its cache, but 8-bit integers, and those under flash attention only.
        found |= {"OLLAMA_KV_CACHE_TYPE": "q8_0", "OLLAMA_FLASH_ATTENTION": "1"}
    if plan.parallelism.pipeline > 1:
        found["OLLAMA_SCHED_SPREAD"] = "1"
    return found


def _import(plan: Plan, port: int) -> tuple[Preparation, ...]:
    """A Modelfile, and a server for as long as it takes to put the model into the store; may be done again."""
    converted = plan.weights.made == "converted"
    size = round(plan.model.parameters * GGUF_BITS.get(plan.weights.label, 4.5) / 8) if converted else None
    stored = size or plan.model.weight_bytes
    # The 16-bit file that a quantization is made of lies beside it for a while.
    disk = stored + (2 * plan.model.parameters if converted and MADE.get(plan.weights.label) else 0)
    took = estimate(STARTS_S + 2 * disk / COPY_BYTES_S, 0.7, "not measured: read and written at a disk's speed")
    return (
        *(fetching(plan) if converted else ()),
        Preparation(
            kind="convert" if converted else "build",
            what=f"{plan.model.name} as {model_name(plan.model)}, by a Modelfile", where="Ollama's store of models",
            disk_bytes=disk, seconds=took, argv=("python", "-c", _created(plan, port)),
        ),
    )  # fmt: skip


def _created(plan: Plan, port: int) -> str:
    """Python that writes the Modelfile, and asks a server of its own to take it."""
    return f"""\
import os, subprocess, time, urllib.request
with open({_modelfile_path(plan)!r}, "w") as file:
    file.write({modelfile(plan)!r})
os.environ["OLLAMA_HOST"] = "127.0.0.1:{port}"
server = subprocess.Popen(["ollama", "serve"])
try:
    for _ in range({STARTS_S * 10}):
        try:
            urllib.request.urlopen("http://127.0.0.1:{port}/api/version", timeout=5).close()
            break
        except OSError:
            assert server.poll() is None, "ollama serve has ended"
            time.sleep(0.1)
    subprocess.run({list(creating(plan))!r}, check=True)
finally:
    server.terminate()
    server.wait()
"""


def _modelfile_path(plan: Plan) -> str:
    return f"{plan.model.short_name}-{plan.weights.label}.Modelfile"


def _sources(plan: Plan) -> tuple[str, ...]:
    """A folder of original weights, or all parts of a GGUF file."""
    if plan.weights.made == "converted":
        return (source_folder(plan),)
    return plan.model.files or (f"{plan.model.short_name}.gguf",)


def _from(path: str) -> str:
    """Without a slash before it, a path could be taken for the name of a model."""
    pure = PurePath(path)
    return path if pure.is_absolute() or path.startswith("./") else f"./{path}"


ENGINE = Ollama()
