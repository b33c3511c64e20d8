"""Container images: published images with their tags, and Dockerfiles for engines that publish none."""

from __future__ import annotations

import importlib.resources
from dataclasses import dataclass

from bedplate.engines import Engine, EnvironmentRecipe
from bedplate.engines.traits import ANY_USER
from bedplate.values.decision import Settings
from bedplate.values.quoting import join_posix_shell, write_comment

DYNAMO_VERSION = "1.6.1"
RAY_VERSION = "2.60.0"
"""Versions of the emitted images and of the packages that `bedplate serve` installs for these orchestrators."""
DYNAMO_TAG_NOTE = "tag derived from the project's naming scheme; newest tag known to exist: 1.6.0"
RAY_TAG_NOTE = "tag derived from the project's naming scheme; the engine in 2.56.0 is too old"
RAY_TAG = f"{RAY_VERSION}-py312-cu130"
PYTHON = "ghcr.io/astral-sh/uv:0.12.9-python3.12-bookworm-slim"
"""Downloads models when the engine's image has no Python."""
HUB_PACKAGE = "huggingface_hub==2.4.0"
CUDA = "nvidia/cuda:13.0.1-devel-ubuntu24.04"
ENDPOINT_PICKER = "ghcr.io/llm-d/llm-d-router-endpoint-picker:v0.9.0"


@dataclass(frozen=True)
class Image:
    name: str
    note: str
    """Why this image, when the tag is not the version in the plan."""
    user: int = ANY_USER
    group: int = ANY_USER
    python: bool = False
    """Whether it has Python and the hub client, and so can download the model."""
    dockerfile: str | None = None
    """Set when the image is built rather than published."""
    files: tuple[tuple[str, str], ...] = ()
    """Other files of the build context: name and text."""


def choose_image(engine: Engine, settings: Settings, gfx: str | None, arch: str, registry: str | None) -> Image | None:
    """Choose the published image for a plan, or describe one to build; `None` if neither is possible."""
    found = engine.find_published_image(settings.device, gfx, arch)
    if found is None:
        return _describe_own_image(engine, settings, registry)
    return Image(found.name, found.note, user=found.user, group=found.group, python=found.python)


def _describe_own_image(engine: Engine, settings: Settings, registry: str | None) -> Image | None:
    device = settings.device
    recipe = engine.find_recipe(device)
    if recipe is None or device not in ("cpu", "cuda") or not engine.container.allowed:
        return None
    base = CUDA if engine.compiles_kernels else None
    shipped = importlib.resources.files("bedplate.engines") / "shipped"
    files = tuple((name, (shipped / file).read_text(encoding="utf-8")) for name, file in recipe.programs)
    card = f"-sm{settings.compute_capability.replace('.', '')}" if settings.compute_capability else ""
    name = f"{f'{registry}/' if registry else ''}bedplate-{engine.id.replace('.', '')}:{engine.version}{card}"
    note = "no published image has a server: build this one from images/ and push it to your registry"
    return Image(name, note, dockerfile=_write_dockerfile(engine, recipe, settings, base), files=files)


def _write_dockerfile(engine: Engine, recipe: EnvironmentRecipe, settings: Settings, base: str | None) -> str:
    uv = "uv pip {} --python /opt/engine/bin/python"
    backend = ("--torch-backend", "cpu" if settings.device == "cpu" else "cu130")
    torch = backend if any(one.startswith("torch==") for one in recipe.packages) else ()
    lines = [
        write_comment(
            f"{engine.name} {engine.version} with bedplate's OpenAI-compatible server, because the package has none."
        ),
        f"FROM {base or PYTHON}",
    ]
    if base is not None:
        lines += [
            "# The engine compiles kernels at its first start, so the compiler stays in the image.",
            "RUN apt-get update && apt-get install -y --no-install-recommends ninja-build \\",
            "    && rm -rf /var/lib/apt/lists/*",
            f"COPY --from={PYTHON} /usr/local/bin/uv /usr/local/bin/uv",
        ]
    lines += ["RUN uv venv --python 3.12 /opt/engine \\"]
    lines += [f"    && {uv.format('install')} {join_posix_shell((*torch, *engine.list_requirements(settings)))}"]
    if recipe.bare:
        lines.append(f"RUN {uv.format('install')} --no-deps {join_posix_shell(recipe.bare)}")
    if recipe.removes:
        lines.append(f"RUN {uv.format('uninstall')} {join_posix_shell(recipe.removes)}")
    copied = dict.fromkeys(name.partition("/")[0] for name, _ in recipe.programs)
    lines += [f"COPY --chmod=0755 {name} /opt/engine/bin/{name}" for name in copied]
    lines += ["ENV PATH=/opt/engine/bin:$PATH", f"USER {ANY_USER}:{ANY_USER}"]
    return "\n".join(lines) + "\n"
