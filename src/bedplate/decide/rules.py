"""The rules. Each rule is one small function with an id, a docstring that states it, and its source.

`docs/rules.md` is generated from this file. A rule takes a Case and returns its conclusion, or `None` if it does not
apply:

- a pick names the engines that suit the case, in order of preference; picks apply in the order of this file, and the
  first engine that can run here and fits is chosen;
- a doubt states why an engine that can run here is not suitable;
- a challenge states which measurement would justify an engine that was not chosen;
- an orchestration rule names the orchestrator above the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, ParamSpec, TypeVar

from bedplate.decide.case import FEW, MANY, RTX_CARDS, STORED_BITS, DecisionCase

ARTICLES = ("hardware-strategy", "cheat-sheet", "landscape", "behind-the-stack", "engines-compared")
"""Short names of the source articles; docs/rules.md has their titles."""
RULES_PAGE = "docs/rules.md"

P = ParamSpec("P")
T = TypeVar("T")

STANDARD_ENGINE = "vllm"
"""The default engine of the source articles; it breaks ties between engines that serve equally many services."""


class Pick(NamedTuple):
    engines: tuple[str, ...]
    text: str
    holding: bool = False
    """Whether all engines but the last are chosen only if they hold all concurrent requests."""
    names_first: bool = False
    """Whether the text is about the first engine, so that a refusal of it is the reason for another one."""


class Doubt(NamedTuple):
    why: str
    hint: str
    kind: str = "unsuitable"


@dataclass(frozen=True)
class DecisionRule(Generic[P, T]):
    id: str
    source: str
    says: Callable[P, T | None]
    engines: tuple[str, ...] = ()
    """The engines that it may pick, or the one that it is about."""

    @property
    def citation(self) -> str:
        """The source as a reason names it; for a source article, a link to docs/rules.md, which quotes it."""
        return f"{RULES_PAGE}#{self.id}" if self.source.startswith(ARTICLES) else self.source

    @property
    def sentence(self) -> str:
        return " ".join((self.says.__doc__ or "").split())


PICKS: list[DecisionRule[[DecisionCase], Pick]] = []
DOUBTS: list[DecisionRule[[DecisionCase], Doubt]] = []
CHALLENGES: list[DecisionRule[[DecisionCase, str], str]] = []
ORCHESTRATION: list[DecisionRule[[DecisionCase, int], Pick]] = []


def add_pick(
    rule_id: str, engines: tuple[str, ...], source: str
) -> Callable[[Callable[[DecisionCase], Pick | None]], Callable[[DecisionCase], Pick | None]]:
    def keep(says: Callable[[DecisionCase], Pick | None]) -> Callable[[DecisionCase], Pick | None]:
        PICKS.append(DecisionRule(rule_id, source, says, engines))
        return says

    return keep


def add_doubt(
    rule_id: str, engine: str, source: str
) -> Callable[[Callable[[DecisionCase], Doubt | None]], Callable[[DecisionCase], Doubt | None]]:
    def keep(says: Callable[[DecisionCase], Doubt | None]) -> Callable[[DecisionCase], Doubt | None]:
        DOUBTS.append(DecisionRule(rule_id, source, says, (engine,)))
        return says

    return keep


def add_challenge(
    rule_id: str, engine: str, source: str
) -> Callable[[Callable[[DecisionCase, str], str | None]], Callable[[DecisionCase, str], str | None]]:
    def keep(says: Callable[[DecisionCase, str], str | None]) -> Callable[[DecisionCase, str], str | None]:
        CHALLENGES.append(DecisionRule(rule_id, source, says, (engine,)))
        return says

    return keep


def add_orchestration(
    rule_id: str, source: str
) -> Callable[[Callable[[DecisionCase, int], Pick | None]], Callable[[DecisionCase, int], Pick | None]]:
    def keep(says: Callable[[DecisionCase, int], Pick | None]) -> Callable[[DecisionCase, int], Pick | None]:
        ORCHESTRATION.append(DecisionRule(rule_id, source, says))
        return says

    return keep


# above the rules


ASKED = ("operations.asked", "the --engine option")
MEASURED = ("evidence.measured", "store: measured on this machine")
TIMELY = ("latency.engine", "the latency targets, asked or default, and the estimates of both engines")


# picks, in the order in which they apply


@add_pick(
    "operations.incumbent",
    ("ollama", "llama.cpp"),
    'hardware-strategy "default to vLLM, migrate only when a bottleneck is proven"',
)
def pick_incumbent(case: DecisionCase) -> Pick | None:
    """The engine in service stays until a measurement on this machine shows that another one is better."""
    name = case.operations.incumbent
    if name is None:
        return None
    if name == "ollama":
        # Ollama has a model library; a model that it cannot import may be in there.
        return Pick(
            (name, "llama.cpp"), "ollama, which runs llama.cpp, is in service, and no measurement here favors another"
        )
    return Pick((name,), f"{name} is in service, and no measurement here favors another engine")


@add_pick(
    "task.not-llm",
    ("vllm", "onnxruntime", "pytorch"),
    'landscape "serving non-LLM models where the autoregressive optimizations of vLLM/TGI are irrelevant"',
)
def pick_for_non_llm(case: DecisionCase) -> Pick | None:
    """A model that generates no text runs on ONNX Runtime or PyTorch; on GPUs, vLLM batches embeddings in 16 bits."""
    if case.is_llm or case.model.format == "gguf":
        return None
    task = case.workload.task if case.workload.task != "generate" else case.model.task
    if task in ("embed", "classify") and case.vendor in ("nvidia", "amd") and case.model.format == "safetensors":
        text = f"the task is {task} on a GPU: vLLM computes batches of requests in 16 bits"
        return Pick(("vllm", "onnxruntime", "pytorch"), text, names_first=True)
    return Pick(("onnxruntime", "pytorch"), f"the task is {task}: an engine for text generation would add nothing")


@add_pick(
    "operations.portable",
    ("onnxruntime", "vllm", "llama.cpp"),
    'landscape "Must be hardware-agnostic points to ONNX Runtime"',
)
def pick_portable(case: DecisionCase) -> Pick | None:
    """A deployment that must run unchanged on other vendors' hardware uses ONNX Runtime, if the model fits there."""
    if not case.operations.portable:
        return None
    others = ("vllm", "llama.cpp") if case.has_many_requests else ("llama.cpp", "vllm")
    return Pick(("onnxruntime", *others), "it must run unchanged on other vendors' hardware", holding=True)


@add_pick("hardware.cpu", ("llama.cpp",), 'landscape "CPU-only or consumer hardware points to llama.cpp"')
def pick_for_cpu(case: DecisionCase) -> Pick | None:
    """On a machine without a GPU, llama.cpp: its kernels and formats are optimized for CPUs."""
    if case.hardware.accelerators:
        return None
    return Pick(("llama.cpp",), "no GPU here: llama.cpp is optimized for CPUs")


@add_pick(
    "format.given",
    ("llama.cpp", "mistral.rs", "mlx", "exllamav3", "exllamav2", "onnxruntime"),
    'cheat-sheet "GGUF, ultimate portability", "EXL2 quant", "EXL3 quant"; engines-compared "MLX quant"',
)
def pick_by_format(case: DecisionCase) -> Pick | None:
    """Weights in one engine's own format are served by that engine: a conversion would cost time or quality."""
    made_for = {
        "gguf": ("llama.cpp", "mistral.rs"),
        "mlx": ("mlx",),
        "exl3": ("exllamav3",),
        "exl2": ("exllamav2",),
        "onnx": ("onnxruntime",),
    }.get(case.model.format)
    return Pick(made_for, f"the weights are in {case.model.format.upper()} format") if made_for else None


@add_pick(
    "hardware.apple",
    ("llama.cpp", "mlx"),
    'cheat-sheet "Mac workflows → MLX", "great for Mac-first workflows, not prod serving"',
)
def pick_for_apple(case: DecisionCase) -> Pick | None:
    """A Mac runs MLX; for many concurrent requests it runs llama.cpp, which has a slot for each of them."""
    if case.vendor != "apple":
        return None
    if case.has_many_requests:
        return Pick(("llama.cpp", "mlx"), f"{case.concurrent_requests} on a Mac: llama.cpp has a slot for each")
    return Pick(("mlx", "llama.cpp"), "Apple Silicon: MLX is built for its unified memory", names_first=True)


@add_pick(
    "hardware.dedicated",
    ("vllm",),
    "vllm-project/vllm-gaudi: README of 0.26.0; tenstorrent/tt-inference-server: docs/model_support/llm",
)
def pick_for_dedicated(case: DecisionCase) -> Pick | None:
    """Dedicated accelerators (Gaudi, Tenstorrent) run vLLM with the plugin of their vendor."""
    if case.kind != "accelerator":
        return None
    return Pick(("vllm",), f"{case.hardware.accelerators[0].name}: vLLM has a plugin for it")


@add_pick("hardware.unusual", ("llama.cpp", "mistral.rs"), 'cheat-sheet "laptop / edge / weird hardware → llama.cpp"')
def pick_for_unusual(case: DecisionCase) -> Pick | None:
    """Edge devices, unified memory and GPUs that few engines support run llama.cpp."""
    if case.vendor is None or case.kind == "accelerator":
        return None
    if case.has_many_requests and _has_server_cards(case):
        return None
    if _needs_several_nodes(case):
        return None
    if case.vendor not in ("nvidia", "amd") or case.kind == "edge" or case.has_unified_memory:
        kinds = list(dict.fromkeys(card.name for card in case.hardware.accelerators))
        them = "them" if len(kinds) > 1 else "it"
        return Pick(("llama.cpp", "mistral.rs"), f"{' and '.join(kinds)}: llama.cpp runs on {them}")
    if case.vendor == "amd" and case.kind in ("consumer", "workstation"):
        return Pick(("llama.cpp", "mistral.rs"), "an AMD desktop GPU: llama.cpp supports it through ROCm or Vulkan")
    return None


FOUR_BIT_BYTES = 0.6
"""Bytes per weight of 4-bit files with their scales and wider tensors: Q4_K_M has 4.9 bits."""


def _needs_several_nodes(case: DecisionCase) -> bool:
    """Whether 4-bit weights fit on all nodes together, and not on one, for which llama.cpp would need fewer bits."""
    cards, nodes = case.hardware.accelerators, case.hardware.nodes
    all_bytes = sum(card.free_bytes or card.memory_bytes or 0 for card in cards)
    four_bit_bytes = min(case.model.weight_bytes, case.model.parameters * FOUR_BIT_BYTES)
    return case.vendor in ("nvidia", "amd") and nodes > 1 and all_bytes / nodes < four_bit_bytes < all_bytes


@add_pick(
    "fit.offload",
    ("llama.cpp",),
    'cheat-sheet "best when VRAM is tight and RAM is plenty"; hardware-strategy "low VRAM … plenty of system RAM"',
)
def pick_for_tight_memory(case: DecisionCase) -> Pick | None:
    """A model whose 4-bit weights exceed the memory of all GPUs is split between GPUs and RAM."""
    card_bytes = sum(card.free_bytes or card.memory_bytes or 0 for card in case.hardware.accelerators)
    four_bit_bytes = min(case.model.weight_bytes, case.model.parameters // 2)
    if not card_bytes or four_bit_bytes < card_bytes:
        return None
    text = f"even 4-bit weights exceed the {card_bytes / 1e9:,.0f} GB of GPU memory; the rest stays in RAM"
    return Pick(("llama.cpp",), text)


@add_pick(
    "format.stored",
    ("exllamav2", "vllm", "llama.cpp"),
    "physics: weights of about four bits lose quality again when they are requantized",
)
def pick_by_stored_bits(case: DecisionCase) -> Pick | None:
    """Weights that are published in about four bits are served as they are, by an engine that loads them."""
    details = case.model.quantization_details
    if not case.has_rtx_cards or not case.has_few_requests or details is None or details.bits > STORED_BITS:
        return None
    engines = {"gptq": ("exllamav2", "vllm"), "mxfp4": ("llama.cpp", "vllm")}.get(details.method, ("vllm",))
    return Pick(engines, f"the weights are published in {case.model.quantization} and are served without conversion")


@add_pick(
    "hardware.rtx",
    ("exllamav3", "exllamav2", "llama.cpp"),
    'hardware-strategy "Consumer GPU 1-4x RTX -> ExLlamaV2 / ExLlamaV3"',
)
def pick_for_rtx(case: DecisionCase) -> Pick | None:
    """One to four RTX cards and a few concurrent requests: ExLlama, whose quantization is designed for such cards."""
    if (
        not case.has_rtx_cards
        or not case.has_few_requests
        or case.workload.precision_sensitive
        or case.workload.task != "generate"
    ):
        return None
    requests = case.concurrent_requests if case.peak_in_flight > 1 else "one request at a time"
    return Pick(("exllamav3", "exllamav2", "llama.cpp"), f"{case.desktop_cards}, {requests}")


@add_pick(
    "operations.prototype",
    ("pytorch", "vllm"),
    'landscape "Prototyping, batch jobs that process one item at a time, or low-traffic internal tools"',
)
def pick_for_prototype(case: DecisionCase) -> Pick | None:
    """One request at a time, a model that changes often and no deployment infrastructure: plain PyTorch."""
    if case.peak_in_flight > 1 or case.operations.machinery != "none" or case.operations.model_changes != "often":
        return None
    return Pick(("pytorch", "vllm"), "one request at a time, a model that changes often, no deployment infrastructure")


@add_pick(
    "serve.compiled",
    ("tensorrt-llm", "vllm"),
    'landscape "a stable model that rarely changes", "committed to NVIDIA GPUs", "absolute maximum tokens-per-second"',
)
def pick_compiled(case: DecisionCase) -> Pick | None:
    """Extreme volume on NVIDIA data-centre GPUs with a model that rarely changes: TensorRT-LLM."""
    stable = case.operations.model_changes == "rarely" and case.workload.volume == "extreme"
    if not stable or case.vendor != "nvidia" or case.kind != "datacenter" or not case.allows("container"):
        return None
    return Pick(("tensorrt-llm", "vllm"), "extreme volume, NVIDIA, and a model that rarely changes")


@add_pick(
    "serve.shared-prefix",
    ("sglang", "vllm"),
    'hardware-strategy "SGLang (RadixAttention)"; engines-compared "structured generation and prefix sharing"',
)
def pick_for_shared_prefix(case: DecisionCase) -> Pick | None:
    """Requests that share most of their prompt: SGLang, which caches prefixes in a radix tree."""
    if not _is_server_grade(case) or not case.shares_prefix or not case.allows("container"):
        return None
    work = case.workload
    if work.session_prefix_tokens:
        repeated = f"{work.repeated_prefix_tokens:,} of {work.prompt_tokens:,} prompt tokens repeat earlier requests"
        return Pick(("sglang", "vllm"), repeated)
    return Pick(("sglang", "vllm"), f"{work.shared_prefix_tokens:,} of {work.prompt_tokens:,} prompt tokens are shared")


@add_pick(
    "serve.structured",
    ("sglang", "vllm"),
    'engines-compared "Agentic/structured serving"; '
    'behind-the-stack "Designed for batched tool-using agents and workflows"',
)
def pick_for_structured(case: DecisionCase) -> Pick | None:
    """Many concurrent requests with structured output: SGLang, whose runtime is designed for them."""
    if (
        not _is_server_grade(case)
        or not case.workload.structured_output
        or not case.has_many_requests
        or not case.allows("container")
    ):
        return None
    return Pick(("sglang", "vllm"), f"structured output for {case.concurrent_requests}")


@add_pick("serve.moe-long", ("sglang", "vllm"), 'cheat-sheet "complex infra / long context / MoE → SGLang"')
def pick_for_long_moe(case: DecisionCase) -> Pick | None:
    """Many long requests to a mixture-of-experts model, and a team that runs containers: SGLang."""
    if (
        not _is_server_grade(case)
        or not (case.is_moe and case.has_long_requests and case.has_many_requests)
        or not case.allows("container")
    ):
        return None
    tokens = case.workload.request_tokens
    return Pick(("sglang", "vllm"), f"a mixture-of-experts model and requests of {tokens:,} tokens")


@add_pick("serve.long", ("sglang", "vllm"), 'hardware-strategy "Complex infra, long context, MoE -> SGLang"')
def pick_for_very_long(case: DecisionCase) -> Pick | None:
    """Many very long requests, and a team that runs Kubernetes or a cluster: SGLang."""
    if (
        not _is_server_grade(case)
        or not (case.has_very_long_requests and case.has_many_requests)
        or not case.allows("kubernetes")
    ):
        return None
    tokens = case.workload.request_tokens
    return Pick(("sglang", "vllm"), f"{case.concurrent_requests} of {tokens:,} tokens on a cluster")


@add_pick(
    "operations.huggingface",
    ("vllm",),
    'landscape "your workflow already lives in HuggingFace"; TGI was archived in March 2026',
)
def pick_for_huggingface(case: DecisionCase) -> Pick | None:
    """A team that uses the Hugging Face Hub: vLLM, which loads the same models; TGI is no longer developed."""
    if case.operations.ecosystem != "huggingface" or case.vendor not in ("nvidia", "amd"):
        return None
    return Pick(("vllm",), "vLLM loads models of the Hugging Face Hub directly, and TGI is no longer developed")


@add_pick(
    "serve.default",
    ("vllm", "llama.cpp", "pytorch"),
    'hardware-strategy "Default candidate for general production serving"',
)
def pick_default(case: DecisionCase) -> Pick | None:
    """The default for serving from GPUs is vLLM: it covers the most hardware and models, and is predictable."""
    if not _has_server_cards(case):
        return None
    if case.peak_in_flight == 1:
        return Pick(("vllm", "llama.cpp", "pytorch"), "one request at a time on GPUs")
    if case.vendor == "intel":
        # Most of these cards are small, and vLLM does not quantize while it loads there.
        text = f"{case.concurrent_requests} on GPUs: vLLM is the default"
        return Pick(("vllm", "llama.cpp"), text, holding=True, names_first=True)
    return Pick(("vllm",), f"{case.concurrent_requests} on GPUs: vLLM is the default")


SIMPLEST_FIRST = ("llama.cpp", "mistral.rs", "pytorch", "onnxruntime", "vllm", "sglang", "exllamav3", "mlx")


@add_pick("anywhere", SIMPLEST_FIRST, 'cheat-sheet "runs anywhere"')
def pick_simplest(case: DecisionCase) -> Pick | None:
    """If no other rule finds an engine, the simplest engine that can run here and fits."""
    return Pick(SIMPLEST_FIRST, "no engine that suits this workload runs here; this is the simplest that does")


def _has_server_cards(case: DecisionCase) -> bool:
    """GPUs for which servers that batch have kernels: vLLM supports Intel's cards, though not its integrated GPUs
    (docs/getting_started/installation/gpu.xpu.inc.md of v0.26.1rc0-1114-ga014e35)."""
    return case.vendor in ("nvidia", "amd") or (
        case.vendor == "intel" and case.kind != "accelerator" and not case.has_unified_memory
    )


def _is_server_grade(case: DecisionCase) -> bool:
    return case.vendor in ("nvidia", "amd") and case.kind == "datacenter" and case.workload.task == "generate"


# doubts: the engine can run here, but is not suitable


@add_doubt("doubt.mlx", "mlx", 'engines-compared "Apple-only"')
def doubt_mlx_elsewhere(case: DecisionCase) -> Doubt | None:
    """MLX is designed for Macs and is not optimized for other machines."""
    if case.vendor == "apple":
        return None
    return Doubt("designed for Apple's unified memory, not optimized for other hardware", "a Mac with an M-series chip")


@add_doubt("doubt.mlx-many", "mlx", 'cheat-sheet "great for Mac-first workflows, not prod serving"')
def doubt_mlx_for_many(case: DecisionCase) -> Doubt | None:
    """MLX is designed for one user's Mac, not for many concurrent requests."""
    if not case.has_many_requests:
        return None
    return Doubt("designed for one user's Mac, not for many concurrent requests", "fewer concurrent requests")


@add_doubt("doubt.exllama", "exllamav3", 'cheat-sheet "consumer rigs pretending to be datacenters"')
def doubt_exllamav3_at_scale(case: DecisionCase) -> Doubt | None:
    """ExLlamaV3 is designed for one to four RTX cards and a few concurrent requests."""
    return _doubt_exllama(case)


@add_doubt("doubt.exllamav2", "exllamav2", 'cheat-sheet "not meant for clusters or non-CUDA"')
def doubt_exllamav2_at_scale(case: DecisionCase) -> Doubt | None:
    """ExLlamaV2 is designed for one to four RTX cards and a few concurrent requests."""
    return _doubt_exllama(case)


def _doubt_exllama(case: DecisionCase) -> Doubt | None:
    hint = f"one to {RTX_CARDS} RTX cards and at most {FEW} concurrent requests"
    if case.cards > RTX_CARDS:
        return Doubt(f"designed for one to {RTX_CARDS} cards; this machine has {case.cards}", hint)
    if case.peak_in_flight > FEW:
        return Doubt(f"designed for at most {FEW} concurrent requests, not for {case.peak_in_flight}", hint)
    if case.workload.precision_sensitive:
        return Doubt(
            "designed for quantized weights, and this workload is precision-sensitive",
            "a workload that tolerates 4-bit weights",
        )
    if case.has_rtx_cards:
        return None
    others = ", not for data-centre GPUs" if case.kind == "datacenter" else ""
    return Doubt(f"designed for desktop RTX cards{others}", hint)


@add_doubt("doubt.llama.cpp", "llama.cpp", 'engines-compared "Not the high-concurrency GPU throughput king"')
def doubt_llama_cpp_for_many(case: DecisionCase) -> Doubt | None:
    """On GPUs, llama.cpp is not designed for many concurrent requests."""
    if not case.has_many_requests or not _has_server_cards(case):
        return None
    return Doubt(
        "not designed for many concurrent requests on GPUs", f"fewer than {MANY} concurrent requests, or little VRAM"
    )


@add_doubt(
    "doubt.mistral.rs",
    "mistral.rs",
    'behind-the-stack "Mistral.rs and similar projects: Built for maximum portability"',
)
def doubt_mistralrs_for_many(case: DecisionCase) -> Doubt | None:
    """The mistral.rs package processes one request at a time."""
    if case.peak_in_flight <= FEW:
        return None
    return Doubt("its package processes one request at a time", "one user")


@add_doubt("doubt.pytorch", "pytorch", 'landscape "there is no memory management or batching infrastructure"')
def doubt_pytorch_for_serving(case: DecisionCase) -> Doubt | None:
    """Plain PyTorch is for prototypes and for one item at a time."""
    if case.peak_in_flight == 1 and case.operations.machinery == "none":
        return None
    return Doubt(
        "for prototypes: no memory management and hardly any batching",
        "one item at a time, without deployment infrastructure",
    )


@add_doubt("doubt.onnxruntime", "onnxruntime", 'landscape "not specialized for LLMs or autoregressive generation"')
def doubt_onnxruntime_for_text(case: DecisionCase) -> Doubt | None:
    """ONNX Runtime is not optimized for text generation; it is suitable when the deployment must be portable."""
    if not case.is_llm or case.operations.portable:
        return None
    return Doubt(
        "a general runtime, not optimized for text generation",
        "a deployment that must run on several vendors' hardware, or a model that is not an LLM",
    )


@add_doubt("doubt.vllm", "vllm", 'behind-the-stack "Deployed on a few powerful machines (e.g., A100s or H100s)"')
def doubt_vllm_without_gpu(case: DecisionCase) -> Doubt | None:
    """vLLM gains nothing on a machine without a GPU that serves few concurrent requests."""
    if case.vendor is not None or case.has_many_requests:
        return None
    return Doubt("designed to serve many users from GPUs", "a GPU, or many concurrent requests on a server CPU")


@add_doubt("doubt.sglang", "sglang", 'cheat-sheet "this is infra nerd territory"')
def doubt_sglang_for_few(case: DecisionCase) -> Doubt | None:
    """SGLang is designed for many concurrent requests on GPUs."""
    hint = (
        "many concurrent requests that share prefixes, ask for structured output, or are long and use a "
        "mixture-of-experts model"
    )
    if case.vendor is None:
        return Doubt("designed for clusters of GPUs", hint)
    return Doubt("designed for many concurrent requests", hint) if not case.has_many_requests else None


@add_doubt(
    "doubt.tensorrt-llm",
    "tensorrt-llm",
    'hardware-strategy "If the workload does not justify that complexity, it is a net loss"',
)
def doubt_tensorrt(case: DecisionCase) -> Doubt | None:
    """The maintenance of TensorRT-LLM is justified only at high volume and with a model that rarely changes."""
    hint = "extreme volume, and a model that rarely changes"
    if case.operations.model_changes == "often":
        return Doubt("supports fewer models, each tied to a version, and the model changes often", hint)
    if not case.has_many_requests:
        return Doubt("few concurrent requests do not justify its maintenance", hint)
    return Doubt("needs at least containers, and the team runs none", hint) if not case.allows("container") else None


@add_doubt("doubt.tgi", "tgi", "huggingface/text-generation-inference: archived in March 2026")
def doubt_tgi_for_new_services(case: DecisionCase) -> Doubt | None:
    """TGI is no longer developed and is not chosen for new services."""
    if case.operations.incumbent == "tgi":
        return None
    return Doubt("no longer developed; do not start a new service with it", "it is already in service", "outranked")


@add_doubt("doubt.ollama", "ollama", "ollama/ollama: v0.32.15, llm/llama_server.go starts llama.cpp's server (b10488)")
def doubt_ollama(case: DecisionCase) -> Doubt | None:
    """Ollama runs llama.cpp; bedplate runs llama.cpp directly and manages the models."""
    if case.operations.incumbent == "ollama":
        return None
    return Doubt(
        "a wrapper around llama.cpp with its own model store; llama.cpp runs here directly",
        "it is already in service",
        "outranked",
    )


@add_doubt("doubt.lmdeploy", "lmdeploy", 'hardware-strategy "Keeping one standard engine"; no article names LMDeploy')
def doubt_lmdeploy(case: DecisionCase) -> Doubt | None:
    """LMDeploy serves the same cases as vLLM; it is a challenger with 4-bit weights or on GPUs that vLLM dropped."""
    if case.operations.incumbent == "lmdeploy" or _has_four_bits_for_many(case) or case.has_pre_turing_cards:
        return None
    hint = "it is already in service, or a measurement here shows that it is faster"
    return Doubt("serves the same cases as vLLM; no measurement here shows that it is better", hint, "outranked")


def _has_four_bits_for_many(case: DecisionCase) -> bool:
    stored = (case.model.quantization or "").upper()
    return case.has_many_requests and case.vendor == "nvidia" and stored in ("AWQ-INT4", "GPTQ-INT4", "MXFP4")


# challenges: engines worth measuring, each with the evidence that would justify it


@add_challenge("challenge.vllm", "vllm", 'hardware-strategy "Keeping one standard engine"')
def measure_vllm(case: DecisionCase, chosen: str) -> str | None:
    """vLLM, the default, is worth measuring if another engine was chosen on GPUs, or for many requests on a CPU."""
    if _has_server_cards(case) and (case.peak_in_flight > 1 or chosen in ("tgi", "pytorch")):
        return f"throughput and latency no worse than {chosen}'s on your traffic: vLLM is the default"
    if (
        case.vendor is None
        and case.has_many_requests
        and "avx512f" in {name.lower() for name in case.hardware.cpu.instruction_sets}
    ):
        return f"more tokens per second than {chosen} at {case.concurrent_requests} on this CPU"
    return None


@add_challenge(
    "challenge.sglang", "sglang", 'hardware-strategy "making that branching decision based on measured bottlenecks"'
)
def measure_sglang(case: DecisionCase, chosen: str) -> str | None:
    """SGLang is worth measuring for many concurrent requests, if prefixes repeat or the scheduler is the bottleneck."""
    if (
        not case.has_many_requests
        or case.vendor not in ("nvidia", "amd")
        or chosen not in ("vllm", "tensorrt-llm", "tgi")
    ):
        return None
    return "prefix cache hits from repeated prompts, or a queue that grows while the KV cache has free blocks"


@add_challenge(
    "challenge.tensorrt-llm",
    "tensorrt-llm",
    'hardware-strategy "worth investing in only for extreme volume or latency-critical cases"',
)
def measure_tensorrt(case: DecisionCase, chosen: str) -> str | None:
    """TensorRT-LLM is worth measuring for many concurrent requests on NVIDIA data-centre GPUs."""
    if not case.has_many_requests or case.vendor != "nvidia" or case.kind != "datacenter":
        return None
    return f"a compute or runtime-overhead bottleneck of {chosen} at full load, and a gain worth the maintenance"


@add_challenge("challenge.exllamav3", "exllamav3", 'cheat-sheet "single RTX box go brrr"')
def measure_exllama(case: DecisionCase, chosen: str) -> str | None:
    """ExLlamaV3 is worth measuring on RTX cards for a few concurrent requests."""
    if not case.has_rtx_cards or not case.has_few_requests or case.workload.precision_sensitive:
        return None
    return f"more tokens per second for one stream than {chosen}, with the same agreement with the reference"


@add_challenge("challenge.llama.cpp", "llama.cpp", 'cheat-sheet "runs anywhere"')
def measure_llama_cpp(case: DecisionCase, chosen: str) -> str | None:
    """llama.cpp is worth measuring for fewer than ten concurrent requests: it is the simplest engine."""
    others = ("mlx", "exllamav3", "exllamav2", "pytorch", "vllm", "ollama")
    if case.has_many_requests or not case.is_llm or chosen not in others:
        return None
    return f"as many tokens per second as {chosen}: llama.cpp is simpler to operate"


@add_challenge("challenge.mlx", "mlx", 'cheat-sheet "Apple Silicon weapon"')
def measure_mlx(case: DecisionCase, chosen: str) -> str | None:
    """MLX is worth measuring on a Mac that runs another engine."""
    return (
        f"more tokens per second than {chosen} on this Mac"
        if case.vendor == "apple" and not case.has_many_requests
        else None
    )


@add_challenge(
    "challenge.lmdeploy",
    "lmdeploy",
    "InternLM/lmdeploy: README of 0.18.0, LMDeploy's figures: gpt-oss at 1.5 times vLLM's speed on H800",
)
def measure_lmdeploy(case: DecisionCase, chosen: str) -> str | None:
    """LMDeploy is worth measuring for many concurrent requests with 4-bit weights or on GPUs that vLLM dropped."""
    if case.has_pre_turing_cards:
        return f"more tokens per second than {chosen} on your traffic: it supports tensor parallelism on these GPUs"
    if not _has_four_bits_for_many(case) or chosen not in ("vllm", "sglang", "tgi", "tensorrt-llm"):
        return None
    return f"more tokens per second than {chosen} on the same {case.model.quantization} weights and your traffic"


# above the engine


@add_orchestration(
    "orchestrate.dynamo", 'behind-the-stack "Use Dynamo when you need to scale inference like infrastructure"'
)
def orchestrate_with_dynamo(case: DecisionCase, nodes: int) -> Pick | None:
    """Several nodes of NVIDIA GPUs, extreme volume, and a team that runs clusters: Dynamo."""
    if nodes < 2 or case.vendor != "nvidia" or not case.allows("cluster"):
        return None
    if case.workload.volume != "extreme" and case.peak_in_flight < 1000:
        return None
    return Pick(
        ("dynamo",),
        f"{nodes} nodes and {case.concurrent_requests}: KV-aware routing and disaggregated prefill",
    )


@add_orchestration(
    "orchestrate.kubernetes", 'hardware-strategy "We pool GPUs on Kubernetes, manage queuing and scheduling with Kueue"'
)
def orchestrate_with_kubernetes(case: DecisionCase, nodes: int) -> Pick | None:
    """Several nodes, and a team that runs Kubernetes, or attention replicas, whose ranks it starts: Kubernetes."""
    if nodes < 2 or case.operations.machinery != "kubernetes":
        return None
    return Pick(("kubernetes",), f"{nodes} nodes, and the team runs Kubernetes")


@add_orchestration("orchestrate.ray", 'behind-the-stack "How much infrastructure are you willing to manage?"')
def orchestrate_with_ray(case: DecisionCase, nodes: int) -> Pick | None:
    """Several nodes in all other cases: Ray starts the engine, or its replicas, on all of them."""
    return Pick(("ray",), f"{nodes} nodes: Ray starts the engine on all of them") if nodes > 1 else None
