"""Records in which an engine file states its facts for the packages that advise on, deploy and estimate engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

ANY_USER = 1000
MODELS = "/models"
"""Where the volume with the models is mounted in every container."""


class AdviceFlags(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's own option or environment variable for each setting that advice may name; `None`: it has none."""

    slots: str | None = None
    threads: str | None = None
    cache_memory: str | None = None
    cache_type: str | None = None
    batch_tokens: str | None = None


class NotedOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the engine's launch whose figures emitted files explain; `None`: it has none, or another figure."""

    slots: str | None = None
    context: str | None = None
    tensor: str | None = None


class TableNames(msgspec.Struct, frozen=True, kw_only=True):
    """How published tables of measurements name the engine, where they use none of its spellings."""

    words: tuple[str, ...]
    """In small letters; each decides wherever it stands in a name."""
    rank: int = 0
    """Where a name has words of several engines, the lowest rank decides."""


class EstimateTraits(msgspec.Struct, frozen=True, kw_only=True):
    """How the engine computes, as far as the estimator tells engines apart beside their fitted efficiencies."""

    kernels: Literal["serving", "gguf", "exllama", "mlx", "eager"] | None = None
    """Engines with the same kernels, or nearly: what was fitted for one of them is expected of the others."""
    one_stream: bool = False
    """Whether published tables of it are about one stream, on devices that follow each other."""
    plain_products: bool = False
    """Whether it dequantizes weights and multiplies at the rate of plain operations, also on matrix units."""
    fp4_products: bool = True
    fp8_products: bool = True
    """Whether it uses a chip's units for these types."""
    expands_cache: bool = False
    """Whether it copies the cache for each query head, and appends to it by copying."""
    grouped_bits: bool = False
    """Whether its quantizations are whole bits in groups, each with a 16-bit scale and bias: q4 of a table is 4-bit."""
    chunk_tokens: int | None = None
    """Prompt tokens that it computes at once; `None`: the whole prompt."""
    overlaps_chunks: bool = False
    """Whether chunks of a prompt follow each other through the devices of a pipeline."""
    graphics_backend: str | None = None
    """The fitted backend on AMD's graphics cards, where it is not ROCm."""
    reserves_answer: bool = False
    """Whether it admits a request only when there is cache for its whole answer."""
    prompts_first: bool = False
    """Whether it computes prompts before any further token; else both are in one pass."""
    pass_tokens: int | None = None
    """Tokens of prompts and answers in one pass where a plan does not set it; `None`: 8192."""
    chip_pass_tokens: Mapping[str, float] = {}
    """The same by family of chips, where its own choice differs by it."""
    memory_known: bool = True
    """Whether `MemoryUse` is well enough known to predict published peaks of memory."""


class MetricNames(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine reports of its load: names in PromQL."""

    path: str = "/metrics"
    running: str | None = None
    waiting: str | None = None
    kv_use: str | None = None
    picker: str | None = None
    """The engine's name in the endpoint picker of the inference extension; empty: the picker reads it by default."""


class ContainerImage(msgspec.Struct, frozen=True, kw_only=True):
    """A published image that serves the engine."""

    name: str
    note: str = ""
    """Why this one, where the tag is not simply the plan's version."""
    user: int = ANY_USER
    group: int = ANY_USER
    python: bool = False
    """Whether it has Python with the hub's client, so that it can fetch the model as well."""


class ContainerConversion(msgspec.Struct, frozen=True, kw_only=True):
    """A shell command that converts the weights inside of a container."""

    command: str
    image: str | None = None
    """`None`: the engine's own."""
    on_cards: bool = True
    """Whether it needs the cards that will serve."""


class ClonedProgram(msgspec.Struct, frozen=True, kw_only=True):
    """A program for converting weights that is in no package: it is run from a clone of its repository."""

    program: str
    """As the steps of a launch name it."""
    repository: str
    tag: str
    path: str
    """The program's folder in the repository."""


class StoreStep(msgspec.Struct, frozen=True, kw_only=True):
    """A shell command that puts the model into the engine's own store."""

    model: str
    """As the store calls it."""
    command: str
    env: dict[str, str] = {}


class ContainerTraits(msgspec.Struct, frozen=True, kw_only=True):
    """How the engine behaves inside of a container."""

    allowed: bool = True
    """Whether an image may be built of its packages, where nobody publishes one."""
    start_s: float = 60.0
    """Beside reading weights: imports, compilation, captured graphs, a first batch. Assumed, unless a comment says."""
    joins_values: bool = False
    """Whether it takes --option=value, which is one line of a file instead of two."""
    drains: bool = False
    """Whether it finishes what it has begun when it is asked to end."""
    store: str | None = None
    """The folder on the volume that it serves from, where it keeps models in a store of its own."""


class DynamoWorker(msgspec.Struct, frozen=True, kw_only=True):
    """The engine as a worker of NVIDIA Dynamo."""

    module: str
    """The Python module that is the worker."""
    framework: str
    """The backend's name in a DynamoGraphDeployment."""
    image: str
    """Without its tag, which is Dynamo's version."""
    version: str
    """Of the engine, as Dynamo's image brings it."""
    names_model: bool = True
    """Whether the model is an option of the worker; else it is among the engine's own options."""
    names_served: bool = False
    """Whether the served name has to be given to the worker, since the engine's launch has none."""
    drops: frozenset[str] = frozenset()
    """Options of the engine's launch that the worker does not take, beside host and port."""
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    """Options of the engine's own server for what Dynamo's front end does, where it knows how."""
    renames: Mapping[str, str] = {}
    """Options that the worker spells otherwise."""


class RayWorker(msgspec.Struct, frozen=True, kw_only=True):
    """The engine inside of Ray Serve LLM."""

    image: str = "rayproject/ray-llm"
    """Without its tag, which is Ray's version."""
    server_options: frozenset[str]
    """Of the engine's own server, which stays away: Ray Serve is the server."""
