"""The rules: each one small function with an id, a sentence that a person understands, and its source.

`docs/rules.md` is made from this file. A rule looks at a Case and says what it has to say, or nothing:

- picks name the engines that the case asks for, the best first; they are asked in this order, and the first engine
  that can run here and fits wins;
- doubts say of one engine that it could, but was not built for this;
- challenges say of one engine that is not chosen what evidence would justify it;
- orchestration says what stands above the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, ParamSpec, TypeVar

from bedplate.decide.case import FEW, MANY, RTX_CARDS, STORED_BITS, Case

ARTICLES = ("hardware-strategy", "cheat-sheet", "landscape", "behind-the-stack", "engines-compared")
"""Short names of the source articles; the page of rules has their titles."""
RULES_PAGE = "docs/rules.md"

P = ParamSpec("P")
T = TypeVar("T")

STANDARD_ENGINE = "vllm"
"""Of engines that serve as many services, the default of the source articles."""


class Pick(NamedTuple):
    engines: tuple[str, ...]
    text: str
    holding: bool = False
    """Whether all but the last of them count only where they hold every request at once."""


class Doubt(NamedTuple):
    why: str
    hint: str
    kind: str = "unsuitable"


@dataclass(frozen=True)
class Rule(Generic[P, T]):
    id: str
    source: str
    says: Callable[P, T | None]
    engines: tuple[str, ...] = ()
    """Those that it may pick, or the one that it speaks of."""

    @property
    def citation(self) -> str:
        """What a reason names as its source: for a source article, the page that quotes it."""
        return f"{RULES_PAGE}#{self.id}" if self.source.startswith(ARTICLES) else self.source

    @property
    def sentence(self) -> str:
        return " ".join((self.says.__doc__ or "").split())


PICKS: list[Rule[[Case], Pick]] = []
DOUBTS: list[Rule[[Case], Doubt]] = []
CHALLENGES: list[Rule[[Case, str], str]] = []
ORCHESTRATION: list[Rule[[Case, int], Pick]] = []


def pick(
    rule_id: str, engines: tuple[str, ...], source: str
) -> Callable[[Callable[[Case], Pick | None]], Callable[[Case], Pick | None]]:
    def keep(says: Callable[[Case], Pick | None]) -> Callable[[Case], Pick | None]:
        PICKS.append(Rule(rule_id, source, says, engines))
        return says

    return keep


def doubt(
    rule_id: str, engine: str, source: str
) -> Callable[[Callable[[Case], Doubt | None]], Callable[[Case], Doubt | None]]:
    def keep(says: Callable[[Case], Doubt | None]) -> Callable[[Case], Doubt | None]:
        DOUBTS.append(Rule(rule_id, source, says, (engine,)))
        return says

    return keep


def challenge(
    rule_id: str, engine: str, source: str
) -> Callable[[Callable[[Case, str], str | None]], Callable[[Case, str], str | None]]:
    def keep(says: Callable[[Case, str], str | None]) -> Callable[[Case, str], str | None]:
        CHALLENGES.append(Rule(rule_id, source, says, (engine,)))
        return says

    return keep


def orchestration(
    rule_id: str, source: str
) -> Callable[[Callable[[Case, int], Pick | None]], Callable[[Case, int], Pick | None]]:
    def keep(says: Callable[[Case, int], Pick | None]) -> Callable[[Case, int], Pick | None]:
        ORCHESTRATION.append(Rule(rule_id, source, says))
        return says

    return keep


# above the rules


ASKED = ("operations.asked", "the person who asked (--engine)")
MEASURED = ("evidence.measured", "store: what was measured on this machine")


# picks, in the order in which they are asked


@pick(
    "operations.incumbent",
    ("ollama", "llama.cpp"),
    'hardware-strategy "default to vLLM, migrate only when a bottleneck is proven"',
)
def incumbent(case: Case) -> Pick | None:
    """The engine in service stays until something measured here is better."""
    name = case.operations.incumbent
    if name is None:
        return None
    if name == "ollama":
        # It has a library of its own: what it would not import itself may be there.
        return Pick((name, "llama.cpp"), "ollama, llama.cpp inside, is in service, and nothing measured here beats it")
    return Pick((name,), f"{name} is in service, and nothing measured here beats it")


@pick(
    "task.not-llm",
    ("onnxruntime", "pytorch"),
    'landscape "serving non-LLM models where the autoregressive optimizations of vLLM/TGI are irrelevant"',
)
def not_an_llm(case: Case) -> Pick | None:
    """A model that writes no text gains nothing from an engine that is made to write text."""
    if case.is_llm or case.model.format == "gguf":
        return None
    task = case.workload.task if case.workload.task != "generate" else case.model.task
    return Pick(("onnxruntime", "pytorch"), f"the work is to {task}: an engine for writing text would add nothing")


@pick(
    "operations.portable",
    ("onnxruntime", "vllm", "llama.cpp"),
    'landscape "Must be hardware-agnostic points to ONNX Runtime"',
)
def portable(case: Case) -> Pick | None:
    """What must run unchanged on other vendors' hardware runs on ONNX Runtime, where that can hold it."""
    if not case.operations.portable:
        return None
    others = ("vllm", "llama.cpp") if case.many else ("llama.cpp", "vllm")
    return Pick(("onnxruntime", *others), "it must run unchanged on other vendors' hardware", holding=True)


@pick("hardware.cpu", ("llama.cpp",), 'landscape "CPU-only or consumer hardware points to llama.cpp"')
def no_accelerator(case: Case) -> Pick | None:
    """Without a GPU, llama.cpp: its kernels and formats are made for CPUs."""
    return None if case.hardware.accelerators else Pick(("llama.cpp",), "no GPU here: llama.cpp runs anywhere")


@pick(
    "format.given",
    ("llama.cpp", "mistral.rs", "mlx", "exllamav3", "exllamav2", "onnxruntime"),
    'cheat-sheet "GGUF, ultimate portability", "EXL2 quant", "EXL3 quant"; engines-compared "MLX quant"',
)
def format_given(case: Case) -> Pick | None:
    """Weights that are made for one engine are served by it: converting them back would cost time or quality."""
    made_for = {
        "gguf": ("llama.cpp", "mistral.rs"),
        "mlx": ("mlx",),
        "exl3": ("exllamav3",),
        "exl2": ("exllamav2",),
        "onnx": ("onnxruntime",),
    }.get(case.model.format)
    return Pick(made_for, f"the weights are {case.model.format.upper()}") if made_for else None


@pick(
    "hardware.apple",
    ("llama.cpp", "mlx"),
    'cheat-sheet "Mac workflows → MLX", "great for Mac-first workflows, not prod serving"',
)
def apple(case: Case) -> Pick | None:
    """A Mac runs MLX; when many share it, llama.cpp, which keeps a slot for each of them."""
    if case.vendor != "apple":
        return None
    if case.many:
        return Pick(("llama.cpp", "mlx"), f"{case.in_flight} requests at once on a Mac: one slot for each")
    return Pick(("mlx", "llama.cpp"), "Apple Silicon: unified memory, and the engine that is made for it")


@pick("hardware.unusual", ("llama.cpp", "mistral.rs"), 'cheat-sheet "laptop / edge / weird hardware → llama.cpp"')
def unusual(case: Case) -> Pick | None:
    """Edge boxes, shared memory and GPUs that few engines know get the engine that runs everywhere."""
    if case.vendor is None or (case.many and case.vendor in ("nvidia", "amd")):
        return None
    if case.vendor not in ("nvidia", "amd") or case.kind == "edge" or case.unified:
        name = case.hardware.accelerators[0].name
        if case.kind == "accelerator":
            return Pick(("llama.cpp", "mistral.rs"), f"no engine here computes on {name}: the CPU beside it does")
        return Pick(("llama.cpp", "mistral.rs"), f"{name}: llama.cpp runs on it")
    if case.vendor == "amd" and case.kind in ("consumer", "workstation"):
        return Pick(("llama.cpp", "mistral.rs"), "an AMD card of the desk: llama.cpp runs on it through ROCm or Vulkan")
    return None


@pick(
    "fit.offload",
    ("llama.cpp",),
    'cheat-sheet "best when VRAM is tight and RAM is plenty"; hardware-strategy "low VRAM … plenty of system RAM"',
)
def tight_memory(case: Case) -> Pick | None:
    """A model whose 4-bit weights are larger than the cards' memory is split between cards and RAM."""
    room = sum(card.free_bytes or card.memory_bytes or 0 for card in case.hardware.accelerators)
    four_bit = min(case.model.weight_bytes, case.model.parameters // 2)
    if not room or four_bit < room:
        return None
    return Pick(
        ("llama.cpp",), f"its weights exceed the cards' {room / 1e9:,.0f} GB even in 4 bits; RAM holds the rest"
    )


@pick(
    "format.stored",
    ("exllamav2", "vllm", "llama.cpp"),
    "physics: what is in four bits already loses again when it is stored anew",
)
def stored_small(case: Case) -> Pick | None:
    """Weights that come in about four bits are served in them, by an engine that takes them so."""
    details = case.model.quantization_details
    if not case.rtx or not case.few or details is None or details.bits > STORED_BITS:
        return None
    engines = {"gptq": ("exllamav2", "vllm"), "mxfp4": ("llama.cpp", "vllm")}.get(details.method, ("vllm",))
    return Pick(engines, f"the weights come in {case.model.quantization}, and are served so")


@pick(
    "hardware.rtx",
    ("exllamav3", "exllamav2", "llama.cpp"),
    'hardware-strategy "Consumer GPU 1-4x RTX -> ExLlamaV2 / ExLlamaV3"',
)
def rtx(case: Case) -> Pick | None:
    """One to four RTX cards and a person or a few: ExLlama, whose quantization is made for them."""
    if not case.rtx or not case.few or case.workload.precision_sensitive or case.workload.task != "generate":
        return None
    cards = f"{case.cards} cards" if case.cards > 1 else "one card"
    kind = "of the desk" if case.before_turing else "of the RTX kind"
    return Pick(("exllamav3", "exllamav2", "llama.cpp"), f"{cards} {kind} and {case.in_flight} at a time")


@pick(
    "operations.prototype",
    ("pytorch", "vllm"),
    'landscape "Prototyping, batch jobs that process one item at a time, or low-traffic internal tools"',
)
def prototype(case: Case) -> Pick | None:
    """One request at a time, a model that changes often and no machinery: no engine at all."""
    if case.in_flight > 1 or case.operations.machinery != "none" or case.operations.model_changes != "often":
        return None
    return Pick(("pytorch", "vllm"), "one request at a time, a model that changes often, and no machinery wanted")


@pick(
    "serve.compiled",
    ("tensorrt-llm", "vllm"),
    'landscape "a stable model that rarely changes", "committed to NVIDIA GPUs", "absolute maximum tokens-per-second"',
)
def compiled(case: Case) -> Pick | None:
    """Extreme volume on data-centre NVIDIA with a model that rarely changes is what TensorRT-LLM is for."""
    stable = case.operations.model_changes == "rarely" and case.workload.volume == "extreme"
    if not stable or case.vendor != "nvidia" or case.kind != "datacenter" or not case.allows("container"):
        return None
    return Pick(("tensorrt-llm", "vllm"), "extreme volume, NVIDIA, and a model that rarely changes")


@pick(
    "serve.shared-prefix",
    ("sglang", "vllm"),
    'hardware-strategy "SGLang (RadixAttention)"; engines-compared "structured generation and prefix sharing"',
)
def shared_prefix(case: Case) -> Pick | None:
    """Requests that share most of their prompt want a tree of prefixes."""
    if not _server_grade(case) or not case.shares_prefix or not case.allows("container"):
        return None
    shared = f"{case.workload.shared_prefix_tokens:,} of {case.workload.prompt_tokens:,} prompt tokens are shared"
    return Pick(("sglang", "vllm"), shared)


@pick(
    "serve.structured",
    ("sglang", "vllm"),
    'engines-compared "Agentic/structured serving"; '
    'behind-the-stack "Designed for batched tool-using agents and workflows"',
)
def structured(case: Case) -> Pick | None:
    """Many structured answers at once are what SGLang's runtime is built around."""
    if not _server_grade(case) or not case.workload.structured_output or not case.many or not case.allows("container"):
        return None
    return Pick(("sglang", "vllm"), f"structured output for {case.in_flight} requests at once")


@pick("serve.moe-long", ("sglang", "vllm"), 'cheat-sheet "complex infra / long context / MoE → SGLang"')
def moe_long(case: Case) -> Pick | None:
    """A mixture of experts with long requests, where the team runs more than one container."""
    if not _server_grade(case) or not (case.moe and case.long and case.many) or not case.allows("container"):
        return None
    return Pick(("sglang", "vllm"), f"a mixture of experts and requests of {case.workload.request_tokens:,} tokens")


@pick("serve.long", ("sglang", "vllm"), 'hardware-strategy "Complex infra, long context, MoE -> SGLang"')
def very_long(case: Case) -> Pick | None:
    """Very long requests of many, on infrastructure that is a cluster anyway."""
    if not _server_grade(case) or not (case.very_long and case.many) or not case.allows("kubernetes"):
        return None
    return Pick(
        ("sglang", "vllm"), f"{case.in_flight} requests of {case.workload.request_tokens:,} tokens on a cluster"
    )


@pick(
    "operations.huggingface",
    ("vllm",),
    'landscape "your workflow already lives in HuggingFace"; TGI was archived in March 2026',
)
def huggingface(case: Case) -> Pick | None:
    """For a team that lives on the hub, vLLM: it loads the same models, and TGI is no longer developed."""
    if case.operations.ecosystem != "huggingface" or case.vendor not in ("nvidia", "amd"):
        return None
    return Pick(("vllm",), "a team on the hub: vLLM loads its models as they are, and TGI is no longer developed")


@pick(
    "serve.default",
    ("vllm", "llama.cpp", "pytorch"),
    'hardware-strategy "Default candidate for general production serving"',
)
def general_serving(case: Case) -> Pick | None:
    """Serving from GPUs is vLLM's: the broadest hardware and model coverage, and predictable."""
    if case.vendor not in ("nvidia", "amd"):
        return None
    if case.in_flight == 1:
        return Pick(("vllm", "llama.cpp", "pytorch"), "one request at a time over an API, on GPUs")
    return Pick(("vllm",), f"{case.in_flight} requests at once over an API, on GPUs")


SIMPLEST_FIRST = ("llama.cpp", "mistral.rs", "pytorch", "onnxruntime", "vllm", "sglang", "exllamav3", "mlx")


@pick("anywhere", SIMPLEST_FIRST, 'cheat-sheet "runs anywhere"')
def anywhere(case: Case) -> Pick | None:
    """What nothing else serves, the engine that runs anywhere does, if it can."""
    return Pick(SIMPLEST_FIRST, "nothing that is made for this serves it here; this can")


def _server_grade(case: Case) -> bool:
    return case.vendor in ("nvidia", "amd") and case.kind == "datacenter" and case.workload.task == "generate"


# doubts: it could, but was not built for this


@doubt("doubt.mlx", "mlx", 'engines-compared "Apple-only"')
def mlx_elsewhere(case: Case) -> Doubt | None:
    """Off a Mac, MLX only shows that it runs."""
    if case.vendor == "apple":
        return None
    return Doubt("made for Apple's unified memory; elsewhere it only shows that it runs", "a Mac with an M-series chip")


@doubt("doubt.mlx-many", "mlx", 'cheat-sheet "great for Mac-first workflows, not prod serving"')
def mlx_for_many(case: Case) -> Doubt | None:
    """MLX is for one person's Mac, not for serving many."""
    return Doubt("for one person's Mac, not for serving many", "fewer requests at once") if case.many else None


@doubt("doubt.exllama", "exllamav3", 'cheat-sheet "consumer rigs pretending to be datacenters"')
def exllama_at_scale(case: Case) -> Doubt | None:
    """ExLlamaV3 is for one to four RTX cards and a few requests at once."""
    return _beyond_exllama(case)


@doubt("doubt.exllamav2", "exllamav2", 'cheat-sheet "not meant for clusters or non-CUDA"')
def exllamav2_at_scale(case: Case) -> Doubt | None:
    """ExLlamaV2 likewise."""
    return _beyond_exllama(case)


def _beyond_exllama(case: Case) -> Doubt | None:
    hint = f"one to {RTX_CARDS} RTX cards and at most {FEW} requests at once"
    if case.cards > RTX_CARDS:
        return Doubt(f"for one to {RTX_CARDS} cards, and here are {case.cards}", hint)
    if case.in_flight > FEW:
        return Doubt(f"for a person or a few, not for {case.in_flight} requests at once", hint)
    if case.workload.precision_sensitive:
        return Doubt(
            "its point is quantized weights, and this work shows small errors", "work that bears 4-bit weights"
        )
    return None if case.rtx else Doubt("built for RTX cards at home, not for data-centre cards", hint)


@doubt("doubt.llama.cpp", "llama.cpp", 'engines-compared "Not the high-concurrency GPU throughput king"')
def llama_cpp_for_many(case: Case) -> Doubt | None:
    """On GPUs, llama.cpp is not built for many requests at once."""
    if not case.many or case.vendor not in ("nvidia", "amd"):
        return None
    return Doubt("not built for many requests at once on GPUs", f"fewer than {MANY} requests at once, or little VRAM")


@doubt(
    "doubt.mistral.rs",
    "mistral.rs",
    'behind-the-stack "Mistral.rs and similar projects: Built for maximum portability"',
)
def mistralrs_for_many(case: Case) -> Doubt | None:
    """mistral.rs' package answers one request after another."""
    if case.in_flight <= FEW:
        return None
    return Doubt("a portable program for one person; its package answers one request after another", "one user")


@doubt("doubt.pytorch", "pytorch", 'landscape "there is no memory management or batching infrastructure"')
def pytorch_for_serving(case: Case) -> Doubt | None:
    """PyTorch alone is for prototypes and for one item at a time."""
    if case.in_flight == 1 and case.operations.machinery == "none":
        return None
    return Doubt("no memory management and hardly any batching: for prototypes", "one item at a time, no machinery")


@doubt("doubt.onnxruntime", "onnxruntime", 'landscape "not specialized for LLMs or autoregressive generation"')
def onnxruntime_for_text(case: Case) -> Doubt | None:
    """ONNX Runtime is not made for writing text, unless portability asks for it."""
    if not case.is_llm or case.operations.portable:
        return None
    return Doubt("general, not made for writing text", "it must run on several vendors' hardware, or is no LLM")


@doubt("doubt.vllm", "vllm", 'behind-the-stack "Deployed on a few powerful machines (e.g., A100s or H100s)"')
def vllm_without_gpu(case: Case) -> Doubt | None:
    """Without a GPU and for a few, vLLM's machinery is for nothing."""
    if case.vendor is not None or case.many:
        return None
    return Doubt("built to serve many users from GPUs", "a GPU, or many requests at once on a server's CPU")


@doubt("doubt.sglang", "sglang", 'cheat-sheet "this is infra nerd territory"')
def sglang_for_few(case: Case) -> Doubt | None:
    """SGLang's machinery is for many requests at once on GPUs."""
    hint = "many requests that share prefixes, are structured, or are long on a mixture of experts"
    if case.vendor is None:
        return Doubt("built for clusters of GPUs", hint)
    return Doubt("its machinery is for many requests at once", hint) if not case.many else None


@doubt(
    "doubt.tensorrt-llm",
    "tensorrt-llm",
    'hardware-strategy "If the workload does not justify that complexity, it is a net loss"',
)
def tensorrt_unjustified(case: Case) -> Doubt | None:
    """TensorRT-LLM's upkeep pays only at high volume and with a model that does not change."""
    hint = "extreme volume, and a model that rarely changes"
    if case.operations.model_changes == "often":
        return Doubt("tied to its versions and to fewer models, and the model changes often", hint)
    if not case.many:
        return Doubt("its upkeep is not justified for so few requests", hint)
    return Doubt("its upkeep wants more than this team runs", hint) if not case.allows("container") else None


@doubt("doubt.tgi", "tgi", "huggingface/text-generation-inference: archived in March 2026")
def tgi_for_something_new(case: Case) -> Doubt | None:
    """Nothing new starts on TGI, which is no longer developed."""
    if case.operations.incumbent == "tgi":
        return None
    return Doubt("no longer developed: nothing new should start on it", "it is in service already", "outranked")


@doubt("doubt.ollama", "ollama", "ollama/ollama: v0.32.15, llm/llama_server.go starts llama.cpp's server (b10488)")
def ollama_instead_of_llama_cpp(case: Case) -> Doubt | None:
    """Ollama runs llama.cpp; bedplate runs that itself, and keeps the models itself."""
    if case.operations.incumbent == "ollama":
        return None
    return Doubt(
        "llama.cpp inside, with a store of its own; llama.cpp is run here directly",
        "it is in service already",
        "outranked",
    )


@doubt("doubt.lmdeploy", "lmdeploy", 'hardware-strategy "Keeping one standard engine"; no article names LMDeploy')
def lmdeploy_without_evidence(case: Case) -> Doubt | None:
    """LMDeploy is vLLM's like: a second server wants evidence, asked for with 4-bit weights or on cards vLLM left."""
    if case.operations.incumbent == "lmdeploy" or _four_bits_for_many(case) or _many_on_old_cards(case):
        return None
    hint = "it is in service already, or measured here to be faster"
    return Doubt("serves what vLLM serves: a second server of that kind wants evidence", hint, "outranked")


def _four_bits_for_many(case: Case) -> bool:
    stored = (case.model.quantization or "").upper()
    return case.many and case.vendor == "nvidia" and stored in ("AWQ-INT4", "GPTQ-INT4", "MXFP4")


def _many_on_old_cards(case: Case) -> bool:
    return case.many and case.before_turing


# challenges: worth measuring, and the evidence that would justify each


@challenge("challenge.vllm", "vllm", 'hardware-strategy "Keeping one standard engine"')
def measure_vllm(case: Case, chosen: str) -> str | None:
    """The default is worth measuring against whatever was chosen instead of it on GPUs."""
    if case.vendor in ("nvidia", "amd") and (case.in_flight > 1 or chosen in ("tgi", "pytorch")):
        return f"tokens per second and latency no worse than {chosen}'s on your traffic: it is the standard"
    if case.vendor is None and case.many and "avx512f" in {name.lower() for name in case.hardware.cpu.instruction_sets}:
        return f"more tokens per second than {chosen} at {case.in_flight} requests at once on this CPU"
    return None


@challenge(
    "challenge.sglang", "sglang", 'hardware-strategy "making that branching decision based on measured bottlenecks"'
)
def measure_sglang(case: Case, chosen: str) -> str | None:
    """SGLang where many are served: when prefixes repeat, or the scheduler is the limit."""
    if not case.many or case.vendor not in ("nvidia", "amd") or chosen not in ("vllm", "tensorrt-llm", "tgi"):
        return None
    return "prompts that repeat (prefix cache hits), or a queue that grows while the cache has room"


@challenge(
    "challenge.tensorrt-llm",
    "tensorrt-llm",
    'hardware-strategy "worth investing in only for extreme volume or latency-critical cases"',
)
def measure_tensorrt(case: Case, chosen: str) -> str | None:
    """TensorRT-LLM where volume is high on NVIDIA and the model does not change often."""
    if not case.many or case.vendor != "nvidia" or case.kind != "datacenter":
        return None
    return f"{chosen} bound by compute or runtime overhead at full load, and a gain that pays for its upkeep"


@challenge("challenge.exllamav3", "exllamav3", 'cheat-sheet "single RTX box go brrr"')
def measure_exllama(case: Case, chosen: str) -> str | None:
    """ExLlamaV3 on RTX cards for a few."""
    if not case.rtx or not case.few or case.workload.precision_sensitive:
        return None
    return f"more tokens per second for one stream than {chosen}, at the same quality against the reference"


@challenge("challenge.llama.cpp", "llama.cpp", 'cheat-sheet "runs anywhere"')
def measure_llama_cpp(case: Case, chosen: str) -> str | None:
    """llama.cpp beside whatever serves a few: it is the simplest."""
    others = ("mlx", "exllamav3", "exllamav2", "pytorch", "vllm", "ollama")
    if case.many or not case.is_llm or chosen not in others:
        return None
    return f"as many tokens per second as {chosen}: it is the simpler one to keep"


@challenge("challenge.mlx", "mlx", 'cheat-sheet "Apple Silicon weapon"')
def measure_mlx(case: Case, chosen: str) -> str | None:
    """MLX on a Mac that runs something else."""
    return f"more tokens per second than {chosen} on this Mac" if case.vendor == "apple" and not case.many else None


@challenge(
    "challenge.lmdeploy",
    "lmdeploy",
    "InternLM/lmdeploy: README of 0.18.0, its own figures: gpt-oss at 1.5 times vLLM's speed on H800",
)
def measure_lmdeploy(case: Case, chosen: str) -> str | None:
    """LMDeploy for many on NVIDIA: with 4-bit weights, where its own figures are above vLLM's; on cards vLLM left."""
    if _many_on_old_cards(case):
        return f"more tokens per second than {chosen} on your traffic: it divides layers over cards as old as these"
    if not _four_bits_for_many(case) or chosen not in ("vllm", "sglang", "tgi", "tensorrt-llm"):
        return None
    return f"more tokens per second than {chosen} on the same {case.model.quantization} weights and your traffic"


# above the engine


@orchestration(
    "orchestrate.dynamo", 'behind-the-stack "Use Dynamo when you need to scale inference like infrastructure"'
)
def dynamo(case: Case, nodes: int) -> Pick | None:
    """Several nodes of NVIDIA GPUs under extreme load, and a team that runs clusters: Dynamo."""
    if nodes < 2 or case.vendor != "nvidia" or not case.allows("cluster"):
        return None
    if case.workload.volume != "extreme" and case.in_flight < 1000:
        return None
    return Pick(
        ("dynamo",),
        f"{nodes} nodes and {case.in_flight:,} requests at once: routing by cache, prefill and decode apart",
    )


@orchestration(
    "orchestrate.kubernetes", 'hardware-strategy "We pool GPUs on Kubernetes, manage queuing and scheduling with Kueue"'
)
def kubernetes(case: Case, nodes: int) -> Pick | None:
    """Several nodes, and a team that runs Kubernetes."""
    if nodes < 2 or case.operations.machinery != "kubernetes":
        return None
    return Pick(("kubernetes",), f"{nodes} nodes, and the team runs Kubernetes")


@orchestration("orchestrate.ray", 'behind-the-stack "How much infrastructure are you willing to manage?"')
def ray(case: Case, nodes: int) -> Pick | None:
    """Several nodes otherwise: Ray starts one engine, or its replicas, over all of them."""
    return Pick(("ray",), f"{nodes} nodes: one start over all of them") if nodes > 1 else None
