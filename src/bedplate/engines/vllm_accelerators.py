"""vLLM on accelerators other than GPUs: its plugins, the versions and models that they support, and how they start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from bedplate.engines.base import OWN_ENVIRONMENT
from bedplate.values import Model, Plan, Preparation

# Intel Gaudi: vllm-project/vllm-gaudi v0.26.0 (August 2026).
GAUDI_VERSION = "0.26.0"
"""README.md: built on vLLM 0.26.0; docs/getting_started/compatibility_matrix.md: with Gaudi software 1.24.1."""
GAUDI_SOFTWARE = "Intel Gaudi software 1.24.1"
GAUDI_METHODS = frozenset(["awq", "gptq", "compressed-tensors", "fp8", "mxfp4"])
"""vllm_gaudi/platform.py: supported_quantization. FP8 from 16-bit weights needs a calibration (docs/configuration/
quantization/inc.md), which is not planned."""
GAUDI_SHARE = 0.9
"""docs/features/warmup.md: gpu_memory_utilization counts from the memory that the weights leave free."""
GAUDI_GRAPH_BYTES = 12_800_000_000
"""docs/features/warmup.md: of that, a tenth is reserved for captured graphs (VLLM_GRAPH_RESERVED_MEM)."""
GAUDI_PACKAGES = (
    ("vLLM without kernels", f"git+https://github.com/vllm-project/vllm@v{GAUDI_VERSION}"),
    ("vllm-gaudi", f"git+https://github.com/vllm-project/vllm-gaudi@v{GAUDI_VERSION}"),
)


def plan_gaudi_installation() -> tuple[Preparation, ...]:
    """docs/getting_started/installation.md: into the PyTorch of Intel's software, so no package may replace it."""
    return tuple(
        Preparation(
            kind="install",
            what=f"{what} {GAUDI_VERSION}, into an environment with {GAUDI_SOFTWARE} and its PyTorch",
            where=OWN_ENVIRONMENT,
            argv=("env", "VLLM_TARGET_DEVICE=empty", "pip", "install", "--no-build-isolation", source),
        )
        for what, source in GAUDI_PACKAGES
    )


# Tenstorrent: tenstorrent/tt-inference-server of August 2026, docs/model_support/llm: one page for a model and a board.
TENSTORRENT_REGISTRY = "ghcr.io/tenstorrent/tt-inference-server/vllm-tt-metal-src-release-ubuntu-22.04-amd64"
TENSTORRENT_BOARDS: Mapping[tuple[str, int], str] = {
    ("n150", 1): "n150", ("n300", 1): "n300", ("n300", 4): "t3k", ("p100", 1): "p100", ("p150", 1): "p150",
    ("p150", 4): "p150x4", ("p300", 2): "p300", ("p300", 4): "p300x2",
}  # fmt: skip
"""Chip and number of devices → the name of the board or machine that the server is told."""
TENSTORRENT_WEIGHTS = "FP8"
"""models/tt_transformers in tt-metal: weights are stored in block floating point of 8 bits, some in 4 bits."""


TENSTORRENT_DEVICE_BYTES = 300_000_000
"""Trace regions and buffers beside weights and cache; not measured."""


class BoardSupport(NamedTuple):
    """The container image for one model on one board, and the limits that it starts with."""

    tag: str
    context_tokens: int
    slots: int = 32
    is_experimental: bool = False


_LLAMA_70B = {
    "t3k": BoardSupport("0.11.1-750ca54-38dee8c", 131072),
    "p150x4": BoardSupport("0.10.1-555f240-22be241", 131072),
    "p300x2": BoardSupport("0.16.0-669d59e-3334377", 131072),
}
_LLAMA_8B = {
    "n150": BoardSupport("0.9.0-25305db-6e67d2d", 65536),
    "n300": BoardSupport("0.9.0-25305db-6e67d2d", 131072),
    "t3k": BoardSupport("0.9.0-25305db-6e67d2d", 131072),
    "p100": BoardSupport("0.18.0-c49bb76-6b4a3a7", 65536, is_experimental=True),
    "p150": BoardSupport("0.18.0-c49bb76-6b4a3a7", 65536, is_experimental=True),
    "p150x4": BoardSupport("0.10.0-55fd115-aa4ae1e", 131072, slots=128),
    "p300": BoardSupport("0.19.0-b204341-9bd099c", 131072),
    "p300x2": BoardSupport("0.19.0-b204341-9bd099c", 131072),
}
_LLAMA_1B = dict.fromkeys(("n150", "n300", "t3k"), BoardSupport("0.11.1-84b4c53-222ee06", 131072))
_LLAMA_3B = dict.fromkeys(("n150", "n300", "t3k"), BoardSupport("0.3.0-20edc39-03cb300", 131072))
_QWEN_72B = {"t3k": BoardSupport("0.9.0-13f44c5-0edd242", 131072)}
TENSTORRENT_MODELS: Mapping[str, Mapping[str, BoardSupport]] = {
    "llama-3.3-70b-instruct": _LLAMA_70B,
    "llama-3.1-70b": _LLAMA_70B,
    "llama-3.1-70b-instruct": _LLAMA_70B,
    "deepseek-r1-distill-llama-70b": _LLAMA_70B,
    "llama-3.1-8b": _LLAMA_8B,
    "llama-3.1-8b-instruct": _LLAMA_8B,
    "llama-3.2-1b": _LLAMA_1B,
    "llama-3.2-1b-instruct": _LLAMA_1B,
    "llama-3.2-3b": _LLAMA_3B,
    "llama-3.2-3b-instruct": _LLAMA_3B,
    "mistral-7b-instruct-v0.3": dict.fromkeys(("n150", "n300", "t3k"), BoardSupport("0.9.0-9b67e09-a91b644", 32768)),
    "qwen2.5-72b": _QWEN_72B,
    "qwen2.5-72b-instruct": _QWEN_72B,
    "qwen3-8b": {
        **dict.fromkeys(("n150", "n300", "t3k"), BoardSupport("0.10.0-e0e0500-409b1cd", 40960)),
        "p300": BoardSupport("0.10.0-e867533-22be241", 40960),
    },
    "qwen3-32b": {
        "t3k": BoardSupport("0.9.0-e95ffa5-48eba14", 131072),
        "p300x2": BoardSupport("0.17.0-8c48a10-f52987a", 131072),
    },
    "qwq-32b": {"t3k": BoardSupport("0.9.0-e95ffa5-48eba14", 131072)},
}
"""By the last part of the hub id, without "Meta-" at its beginning, in lower case."""


def find_tenstorrent_boards(model: Model) -> Mapping[str, BoardSupport]:
    name = model.name.rpartition("/")[2].lower().removeprefix("meta-")
    return TENSTORRENT_MODELS.get(name, {})


def name_tenstorrent_board(chip: str, devices: int) -> str | None:
    """The board or machine with this many devices of a chip (n300); `None`: there is none."""
    return TENSTORRENT_BOARDS.get((chip.lower(), devices))


def count_tenstorrent_devices(board: str) -> int:
    return next(devices for (_, devices), name in TENSTORRENT_BOARDS.items() if name == board)


def make_tenstorrent_command(plan: Plan, board: str, port: int) -> tuple[str, ...]:
    """The command of the board's page; the server in the image sets the limits of the model by itself."""
    support = find_tenstorrent_boards(plan.model)[board]
    name = plan.model.name.rpartition("/")[2].removeprefix("Meta-")
    return (
        "docker", "run", "--rm", "--env", "HF_TOKEN", "--ipc", "host", "--publish", f"127.0.0.1:{port}:8000",
        "--device", "/dev/tenstorrent", "--mount", "type=bind,src=/dev/hugepages-1G,dst=/dev/hugepages-1G",
        "--volume", f"volume_id_{name}:/home/container_app_user/cache_root",
        f"{TENSTORRENT_REGISTRY}:{support.tag}", "--model", name, "--tt-device", board,
    )  # fmt: skip


def plan_tenstorrent_installation(plan: Plan, board: str) -> tuple[Preparation, ...]:
    support = find_tenstorrent_boards(plan.model)[board]
    status = ", whose support for this model is experimental" if support.is_experimental else ""
    image = f"{TENSTORRENT_REGISTRY}:{support.tag}"
    return (
        Preparation(
            kind="download", what=f"Tenstorrent's image of vLLM for {board}{status}", where="Docker",
            argv=("docker", "pull", image),
        ),
    )  # fmt: skip
