"""Records in which an engine file states its facts for the packages that advise on, deploy and estimate engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from bedplate.values.capabilities import ToolSupport

ANY_USER = 1000
MODELS = "/models"
"""Mount point of the model volume in every container."""


class AdviceFlags(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's option or environment variable for each setting that advice may name; `None`: it has none."""

    slots: str | None = None
    threads: str | None = None
    cache_memory: str | None = None
    cache_type: str | None = None
    batch_tokens: str | None = None
    no_graphs: str | None = None
    """Turns captured CUDA graphs off."""


class NotedOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the launch whose values emitted files explain; `None`: it has no such option."""

    slots: str | None = None
    context: str | None = None
    tensor: str | None = None


class PrivatePort(msgspec.Struct, frozen=True, kw_only=True):
    """How the port between the gateway and the engine is closed to the other users of the machine.

    bedplate makes a key for each start. It is in the environment of the engine's process, which only its user may read,
    and never among its arguments, which everybody may read.
    """

    key_checked_by: Literal["engine", "shipped server", "wrapper", "nobody"]
    """Who rejects requests without the key: the engine's own server, by `key_variable`; bedplate's server; or
    shipped/require_key.py, which runs a Python server that has no key or does not check it on every path. "nobody":
    bedplate does not start the engine."""
    open_paths: tuple[str, ...] = ()
    """Paths that are answered without the key."""
    other_ports: str = "none"
    """Other ports and sockets that it opens, and who can reach them."""
    source: str


class TableNames(msgspec.Struct, frozen=True, kw_only=True):
    """Names of the engine in published tables, in addition to its spellings."""

    words: tuple[str, ...]
    """Lower-case words; each identifies the engine anywhere in a name."""
    rank: int = 0
    """If a name contains words of several engines, the lowest rank decides."""


class EstimateTraits(msgspec.Struct, frozen=True, kw_only=True):
    """How the engine computes: what the estimator needs in addition to fitted efficiencies."""

    kernels: Literal["serving", "gguf", "exllama", "mlx", "eager"] | None = None
    """Engines with the same or similar kernels: efficiencies fitted for one apply to the others."""
    one_stream: bool = False
    """Whether published tables of it measure one stream, with devices in a pipeline."""
    plain_products: bool = False
    """Whether it dequantizes weights and multiplies at the rate of ordinary instructions, also on matrix units."""
    fp4_products: bool = True
    fp8_products: bool = True
    """Whether it uses the chip's FP4 or FP8 units."""
    expands_cache: bool = False
    """Whether it copies the cache for each query head, and appends to it by copying."""
    grouped_bits: bool = False
    """Whether it quantizes in groups with a 16-bit scale and bias, so that q4 in a table means 4 bits."""
    chunk_tokens: int | None = None
    """Prefill chunk size; `None`: the whole prompt."""
    overlaps_chunks: bool = False
    """Whether the chunks of a prompt are pipelined over the devices."""
    skips_borrowing_layers: bool = False
    """Whether a prompt passes through layers that read an earlier layer's cache with its last token only."""
    graphics_backend: str | None = None
    """The fitted backend on AMD graphics cards, if it is not ROCm."""
    reserves_answer: bool = False
    """Whether it admits a request only if there is KV cache for its complete answer."""
    prompts_first: bool = False
    """Whether prefill has priority over decode; otherwise one pass contains both."""
    balances_groups: bool = False
    """Whether new requests go to the attention groups with the fewest; otherwise to each in turn."""
    pass_tokens: int | None = None
    """Maximum tokens in one pass if a plan does not set it; `None`: 8192."""
    chip_pass_tokens: Mapping[str, float] = {}
    """The same by chip family, if the default differs."""
    sample_entry_s: float = 0.0
    """Host time to sample a token, per entry of the vocabulary, if one thread samples all sequences in turn."""
    wake_s: float = 0.0
    """Host time for each waiting request when a token is passed on, if all of them are woken by each token."""
    most_woken: float = 1.0
    """The most requests that one token wakes: a thread that has not run yet is not woken again."""
    memory_known: bool = True
    """Whether `MemoryUse` is accurate enough to predict published memory peaks."""


class ServerFeatures(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine's server does with the fields of a request. A field that it ignores counts as unsupported."""

    tools: ToolSupport
    """forced: `tool_choice` required, and a named function, always give a call."""
    json_schema: bool
    json_object: bool
    """Whether the answer is constrained, not only asked for."""
    logprobs: bool
    vision: bool = False
    """Whether it reads images, if the model has a vision encoder."""
    choices: Literal["one", "slots", "any"]
    """The most choices of one request: slots: as many as it computes at once."""
    stop: bool = True
    seed: bool = True
    source: str


class KnownMistake(msgspec.Struct, frozen=True, kw_only=True):
    """A client's mistake, recognized by the engine's error message."""

    message: str
    """In terms of the API and of bedplate's options, never of the engine's."""
    code: str
    param: str | None = None


class LoadingTraits(msgspec.Struct, frozen=True, kw_only=True):
    """What is in memory while the engine loads or converts weights."""

    quantizes: Literal["by layer", "whole model"] = "by layer"
    """How much of the unquantized model is on the devices at once, if the engine quantizes while loading."""
    share_covers: Literal["everything", "weights and cache", "cache"] = "everything"
    """What the option for its share of the memory includes."""
    embeds_on_host: bool = False
    """Whether the token embedding stays in host memory."""
    divides: Literal["evenly", "by memory"] = "evenly"
    """How the stages of a pipeline get their layers: as many each, or in proportion to the memory of their cards."""
    conversion_copies: float = 0.0
    """Copies of the unconverted weights in host memory, while the tool in its preparation steps converts them."""
    source: str = "not known for this engine"


class AdapterTraits(msgspec.Struct, frozen=True, kw_only=True):
    """How the engine serves LoRA adapters."""

    most: int | None = None
    """The most adapters that one server loads; `None`: no limit."""
    most_resident: int | None = None
    """The most adapters in the memory of the devices at once, if others wait in host memory; `None`: all of them."""
    ranks: tuple[int, ...] = ()
    """The ranks that memory is allocated for, in ascending order; empty: any rank."""
    slots: str | None = None
    """The option for the number of adapters in a batch; `None`: it loads as many as the launch names."""
    rank: str | None = None
    """The option for the highest rank."""
    names: str | None = None
    """The option that lists the adapters."""
    separator: str | None = None
    """What separates adapters in the value of `names`; `None`: each is a value of its own."""
    mixes: bool = True
    """Whether requests for different adapters are computed in one batch."""
    selects: Literal["model", "number"] | None = None
    """How the gateway names an adapter in a request: as the model, or by its number in `lora`; `None`: it cannot."""
    load_path: str | None = None
    unload_path: str | None = None
    """Where a running engine is asked to load or unload an adapter; `None`: it loads them only at its start."""
    use: str
    """How a request names an adapter."""
    source: str


class LaunchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Names of the options that a verifier reads back from a launch; `None`: it has no such option."""

    context: str | None = None
    """Maximum tokens of one request."""
    slots: str | None = None
    port: str | None = "--port"
    share: str | None = None
    """Share of a device's memory."""
    cards: tuple[str, ...] = ()
    """Options whose product is the number of accelerators."""


class MetricNames(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's load metrics, as PromQL names."""

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
    """Why this tag, if it is not the plan's version."""
    user: int = ANY_USER
    group: int = ANY_USER
    python: bool = False
    """Whether it contains Python with the hub client, so that it can also download the model."""


class ContainerConversion(msgspec.Struct, frozen=True, kw_only=True):
    """A shell command that converts the weights in a container."""

    command: str
    image: str | None = None
    """`None`: the engine's image."""
    on_cards: bool = True
    """Whether it needs the GPUs that serve."""


class ClonedProgram(msgspec.Struct, frozen=True, kw_only=True):
    """A conversion program that no package contains: it runs from a clone of its repository."""

    program: str
    """File name in the steps of a launch."""
    repository: str
    tag: str
    path: str
    """The program's folder in the repository."""


class StoreStep(msgspec.Struct, frozen=True, kw_only=True):
    """A shell command that adds the model to the engine's model store."""

    model: str
    """Name of the model in the store."""
    command: str
    env: dict[str, str] = {}


class ContainerTraits(msgspec.Struct, frozen=True, kw_only=True):
    """How the engine behaves in a container."""

    allowed: bool = True
    """Whether an image may be built from its packages if none is published."""
    start_s: float = 60.0
    """Start-up time without reading weights: imports, compilation, graph capture. Assumed, unless a comment says."""
    joins_values: bool = False
    """Whether it accepts --option=value, which needs one line of a file instead of two."""
    drains: bool = False
    """Whether it finishes running requests on SIGTERM."""
    store: str | None = None
    """Folder on the volume with its model store, if it has one."""


class DynamoWorker(msgspec.Struct, frozen=True, kw_only=True):
    """The engine as a worker of NVIDIA Dynamo."""

    module: str
    """Python module of the worker."""
    framework: str
    """Name of the backend in a DynamoGraphDeployment."""
    image: str
    """Without its tag, which is Dynamo's version."""
    version: str
    """Version of the engine in Dynamo's image."""
    names_model: bool = True
    """Whether the model is an option of the worker; otherwise it is an option of the engine."""
    names_served: bool = False
    """Whether the worker needs the served name, because the engine's launch has no option for it."""
    drops: frozenset[str] = frozenset()
    """Options of the engine's launch that the worker does not accept, in addition to host and port."""
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    """Options of the engine's server for parsers that Dynamo's front end replaces where it can."""
    renames: Mapping[str, str] = {}
    """Options that have other names in the worker."""


class RayWorker(msgspec.Struct, frozen=True, kw_only=True):
    """The engine in Ray Serve LLM."""

    image: str = "rayproject/ray-llm"
    """Without its tag, which is Ray's version."""
    version: str | None = None
    """The engine's version in the image; `None`: not known."""
    server_options: frozenset[str]
    """Options of the engine's server, which are dropped because Ray Serve is the server."""


class TokenCounter(msgspec.Struct, frozen=True, kw_only=True):
    """How the engine's server counts tokens with the model's tokenizer, without generating any."""

    path: str = "/tokenize"
    field: str = "prompt"
    """The field of the request that contains a text."""
    special: str = "add_special_tokens"
    """The field that decides whether the special tokens of a prompt, such as BOS, are added."""
    prompts: Mapping[str, str] = {}
    """API (chat, messages, responses) → path that accepts the body of a request and counts the tokens of its prompt."""


class RequestTraits(msgspec.Struct, frozen=True, kw_only=True):
    """How the engine handles what changes the cost of a request, and how it reports that cost."""

    fields: frozenset[str] = frozenset()
    """Fields for length and count that it understands, in addition to those of all engines (n, max_tokens,
    max_completion_tokens, max_output_tokens). Requests with others are rejected, since it would ignore them."""
    limits: Mapping[str, int] = {}
    """Field → the most entries of its list, or its highest value, for what it processes or returns for each token."""
    dropped_headers: frozenset[bytes] = frozenset()
    """Headers that are not forwarded: with them, it would continue to generate after the client has disconnected."""
    usage_per_sequence: bool = False
    """Whether each sequence of a stream reports its own usage, and a complete answer only that of the first one."""
    unsent_tokens: int = 1
    """Tokens of an aborted sequence that it generated and did not send: at least the one that it was computing."""
    counter: TokenCounter | None = None
    """`None`: it counts no tokens on request; those of aborted answers are estimated."""
    apis: frozenset[Literal["messages", "responses"]] = frozenset()
    """The APIs that its server has in addition to chat completions: Anthropic's Messages (with count_tokens) and
    OpenAI's Responses. The gateway translates the others to chat completions."""
