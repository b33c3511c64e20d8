"""Container images: whose, which tag, and how much of that was seen; images of our own for engines without one."""

from __future__ import annotations

import importlib.resources
import shlex
from dataclasses import dataclass

from bedplate.engines import Engine, Recipe
from bedplate.engines.tensorrt_llm import IMAGE as TENSORRT_LLM
from bedplate.engines.tgi import IMAGE as TGI
from bedplate.values.decision import Device, Settings

LLAMA_CPP_BUILD = "b11515"
DYNAMO_VERSION = "1.6.1"
RAY_VERSION = "2.60.0"
"""Both of the images that are emitted and of the packages that are installed to run them here."""
DYNAMO_TAG_NOTE = "tag by the project's own naming; 1.6.0 is the newest that was seen"
RAY_TAG_NOTE = "tag by the project's own naming; 2.56.0-py312-cu130 is the newest that was seen"
PYTHON = "ghcr.io/astral-sh/uv:0.12.9-python3.12-bookworm-slim"
"""Fetches models where an engine's own image has no Python."""
HUB_PACKAGE = "huggingface_hub==2.4.0"
MODEL_OPTIMIZER = "https://github.com/NVIDIA/TensorRT-Model-Optimizer"
MODEL_OPTIMIZER_TAG = "0.37.0"
"""What TensorRT-LLM 1.2 asks for. The package has the library; the program that plans name is one of its examples."""
CUDA = "nvidia/cuda:13.0.1-devel-ubuntu24.04"
ENDPOINT_PICKER = "ghcr.io/llm-d/llm-d-router-endpoint-picker:v0.9.0"
RAY = f"rayproject/ray-llm:{RAY_VERSION}-py312-cu130"
DYNAMO = {
    "vllm": f"nvcr.io/nvidia/ai-dynamo/vllm-runtime:{DYNAMO_VERSION}",
    "sglang": f"nvcr.io/nvidia/ai-dynamo/sglang-runtime:{DYNAMO_VERSION}",
    "tensorrt-llm": f"nvcr.io/nvidia/ai-dynamo/tensorrtllm-runtime:{DYNAMO_VERSION}",
}
DYNAMO_BRINGS = {"vllm": "0.31.0", "sglang": "0.5.21", "tensorrt-llm": "1.3.0rc29"}
"""What the package ai-dynamo of that version asks for."""
VLLM_USER = 2000
"""Its image is made for this user beside root (docker/Dockerfile of August 2026)."""
ANY_USER = 1000
COMPILED = ("exllamav2", "exllamav3")
"""They compile their kernels where they run, and want a compiler for it."""


@dataclass(frozen=True)
class Image:
    name: str
    note: str
    """Why this one, where the tag is not simply the plan's version."""
    user: int = ANY_USER
    group: int = ANY_USER
    python: bool = False
    """Whether it has Python with the hub's client, so that it can fetch the model as well."""
    dockerfile: str | None = None
    """What it is built from, where nobody publishes it."""
    files: tuple[tuple[str, str], ...] = ()
    """Beside the Dockerfile."""


def image_for(engine: Engine, settings: Settings, gfx: str | None, arch: str, registry: str | None) -> Image | None:
    """The image that runs an engine as it is planned; `None` where there can be none."""
    version, device = engine.version or "latest", settings.device
    if engine.id == "vllm":
        return _vllm(version, device, arch)
    if engine.id == "sglang":
        return _sglang(version, device, gfx)
    if engine.id == "tensorrt-llm" and device == "cuda":
        return Image(TENSORRT_LLM, "", python=True)
    if engine.id == "tgi" and device in ("cuda", "rocm"):
        return Image(TGI if device == "cuda" else f"{TGI}-rocm", "")
    if engine.id == "lmdeploy" and device == "cuda":
        tag = f"openmmlab/lmdeploy:v{version}-cu12.8"
        return Image(tag, "tag by the project's own naming; v0.16.0-cu12.8 is the newest that was seen", python=True)
    if engine.id == "llama.cpp":
        return _llama_cpp(device)
    if engine.id == "ollama" and device in ("cpu", "cuda", "rocm"):
        return Image(f"ollama/ollama:{version}{'-rocm' if device == 'rocm' else ''}", "")
    return _own(engine, settings, registry)


def _vllm(version: str, device: Device, arch: str) -> Image | None:
    names = {
        "cuda": f"vllm/vllm-openai:v{version}",
        "rocm": f"vllm/vllm-openai-rocm:v{version}",
        "xpu": f"vllm/vllm-openai-xpu:v{version}",
        "cpu": f"vllm/vllm-openai-cpu:v{version}-{'arm64' if arch in ('arm64', 'aarch64') else 'x86_64'}",
    }
    if device not in names:
        return None
    note = "" if device == "cuda" else "tag by the project's own naming; v0.31.0 is the newest that was seen"
    return Image(names[device], note, user=VLLM_USER, group=0, python=True)


def _sglang(version: str, device: Device, gfx: str | None) -> Image | None:
    if device == "rocm":
        newer = gfx in ("gfx950", "gfx1250")
        build = "v0.5.21-rocm720-mi35x-20261006" if newer else "v0.5.20-rocm10-mi30x-20260920"
        note = f"images for ROCm carry a date; this is the newest that was seen, and the plan is made for {version}"
        return Image(f"lmsysorg/sglang-rocm:{build}", note, python=True)
    if device not in ("cuda", "cpu"):
        return None
    tag = f"lmsysorg/sglang:v{version}{'-xeon' if device == 'cpu' else ''}"
    return Image(tag, "tag by the project's own naming", python=True)


def _llama_cpp(device: Device) -> Image | None:
    kinds = {"cpu": "server", "cuda": "server-cuda", "rocm": "server-rocm", "vulkan": "server-vulkan",
             "xpu": "server-intel"}  # fmt: skip
    if device not in kinds:
        return None
    note = "not every build has images: of those that were seen, the nearest to the plan's"
    return Image(f"ghcr.io/ggml-org/llama.cpp:{kinds[device]}-{LLAMA_CPP_BUILD}", note)


CONVERTER = f"ghcr.io/ggml-org/llama.cpp:full-{LLAMA_CPP_BUILD}"
"""llama.cpp with its converter and quantizer, in /app; conversions are work of the CPU."""


def _own(engine: Engine, settings: Settings, registry: str | None) -> Image | None:
    device = settings.device
    recipe = engine.recipe_for(device)
    if recipe is None or device not in ("cpu", "cuda") or engine.id == "mlx":
        return None
    base = CUDA if engine.id in COMPILED else None
    shipped = importlib.resources.files("bedplate.engines") / "shipped"
    files = tuple((name, (shipped / file).read_text(encoding="utf-8")) for name, file in recipe.programs)
    card = f"-sm{settings.compute_capability.replace('.', '')}" if settings.compute_capability else ""
    name = f"{f'{registry}/' if registry else ''}bedplate-{engine.id.replace('.', '')}:{engine.version}{card}"
    note = "nobody publishes one with a server: built from images/, and pushed to a registry of yours"
    return Image(name, note, dockerfile=_dockerfile(engine, recipe, settings, base), files=files)


def _dockerfile(engine: Engine, recipe: Recipe, settings: Settings, base: str | None) -> str:
    uv = "uv pip {} --python /opt/engine/bin/python"
    backend = ("--torch-backend", "cpu" if settings.device == "cpu" else "cu130")
    torch = backend if any(one.startswith("torch==") for one in recipe.packages) else ()
    lines = [
        f"# {engine.name} {engine.version}, and bedplate's own server around it: the package brings none that serves.",
        f"FROM {base or PYTHON}",
    ]
    if base is not None:
        lines += [
            "# Its kernels are compiled at the first start, which takes minutes: the compiler stays in the image.",
            "RUN apt-get update && apt-get install -y --no-install-recommends ninja-build \\",
            "    && rm -rf /var/lib/apt/lists/*",
            f"COPY --from={PYTHON} /usr/local/bin/uv /usr/local/bin/uv",
        ]
    lines += ["RUN uv venv --python 3.12 /opt/engine \\"]
    lines += [f"    && {uv.format('install')} {shlex.join((*torch, *engine.requirements(settings)))}"]
    if recipe.bare:
        lines.append(f"RUN {uv.format('install')} --no-deps {shlex.join(recipe.bare)}")
    if recipe.removes:
        lines.append(f"RUN {uv.format('uninstall')} {shlex.join(recipe.removes)}")
    copied = dict.fromkeys(name.partition("/")[0] for name, _ in recipe.programs)
    lines += [f"COPY --chmod=0755 {name} /opt/engine/bin/{name}" for name in copied]
    lines += ["ENV PATH=/opt/engine/bin:$PATH", f"USER {ANY_USER}:{ANY_USER}"]
    return "\n".join(lines) + "\n"
