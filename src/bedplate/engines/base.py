"""The interface between bedplate and an engine. An engine file never starts a process, waits or prints."""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import ClassVar, Literal, NamedTuple

import msgspec

from bedplate.engines.checks import LaunchRule, PlannedLaunch
from bedplate.engines.quantizations import EightBitCache, SupportedQuantization, find_quantization
from bedplate.engines.traits import (
    AdapterTraits,
    AdviceFlags,
    ClonedProgram,
    ContainerConversion,
    ContainerImage,
    ContainerTraits,
    DynamoWorker,
    EstimateTraits,
    KnownMistake,
    LaunchOptions,
    LoadingTraits,
    MetricNames,
    NotedOptions,
    PrivatePort,
    RayWorker,
    RequestTraits,
    ServerFeatures,
    StoreStep,
    TableNames,
)
from bedplate.facts.chips import Chip, find_accelerator_chip
from bedplate.values import (
    Accelerator,
    Hardware,
    Launch,
    Model,
    Parallelism,
    Plan,
    Preparation,
    Refusal,
    Settings,
    Weights,
    Workload,
)
from bedplate.values.capabilities import Capabilities, ToolSupport
from bedplate.values.choices import join_with_or
from bedplate.values.decision import CacheType, Device, PublishedWeights
from bedplate.values.endpoint import StartPhase
from bedplate.values.tuning import TunableSetting

SHARE_MARGIN = 0.01
"""Of a device's memory: what stays free beside the share that an engine asks for when it starts."""
LIMITED_VENDORS = ("apple", "amd")
"""Vendors of GPUs in a processor whose part of the memory the system limits."""
RESERVED_SHARE = 0.05
"""Share of the free memory that stays unused: a machine that swaps is slow with any setting."""
LEAST_RESIDENT_ADAPTERS = 8
"""LoRA adapters that stay in the memory of the devices even if fewer requests are computed at once."""
ParallelismKind = Literal["tensor", "pipeline", "data", "expert", "attention_data"]
GAUDI = "gaudi"
"""The family of Intel's dedicated accelerators, which share nothing with its GPUs but the vendor."""
DEDICATED = (GAUDI, "tenstorrent")
"""Families of accelerators that are not GPUs."""
DEVICES: dict[str, Device] = {
    "nvidia": "cuda", "amd": "rocm", "apple": "metal", "intel": "xpu", GAUDI: "hpu", "tenstorrent": "tt",
}  # fmt: skip
"""By the family of a card."""
VENDOR_NAMES = {
    "nvidia": "NVIDIA", "amd": "AMD", "apple": "Apple", "intel": "Intel", GAUDI: "Intel Gaudi",
    "tenstorrent": "Tenstorrent",
}  # fmt: skip
SIXTEEN_BIT = ("BF16", "F16", "F32")
HIGHEST_PORT = 65535
WRAPPER_KEY_VARIABLE = "BEDPLATE_ENGINE_KEY"
"""Read by shipped/require_key.py and by bedplate's server."""
OWN_ENVIRONMENT = "a dedicated environment"
NO_VERSION = ("", "unpinned", "unknown")
"""Values that mean "version unknown"."""
NATIVE = "native"
"""The name of the native build in ID@native."""
_PIN = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(?P<extras>\[[^\]]*\])?==(?P<version>[^;\s]+)(?P<marker>\s*;.*)?")
RELEASE = re.compile(r"[0-9]+(?:\.[0-9]+)+(?:\.?(?:post|rc|a|b|dev)[0-9]+)*")
"""A version on a package index; versions of native builds and of adopted programs look different."""
DEFAULT_CONTEXT_TOKENS = 8192
"""Context length of a chat if none is requested: most conversations are shorter."""


class BorrowedLibrary(msgspec.Struct, frozen=True, kw_only=True):
    """A shared library that an engine's wheel expects from the system, and a package that contains it."""

    soname: str
    package: str
    file: str
    """Glob of its path in the package."""


class EnvironmentRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """How the environment of an engine is created: pinned packages, and programs that bedplate ships."""

    packages: tuple[str, ...]
    programs: tuple[tuple[str, str], ...] = ()
    """(command name, file in engines/shipped), installed into the environment's bin folder."""
    libraries: tuple[BorrowedLibrary, ...] = ()
    """Installed only on systems that lack them."""
    bare: tuple[str, ...] = ()
    """Packages with dependencies that this machine does not need: installed last, without dependencies."""
    removes: tuple[str, ...] = ()
    """Dependencies of the other packages that break the engine: uninstalled again."""
    download_bytes: int
    disk_bytes: int
    check: str
    """Python code that must succeed in the finished environment; otherwise the installation fails."""
    chosen_by_release: tuple[str, ...] = ()
    """Packages whose version each release of the engine requires itself: pinned only for the pinned version."""

    @property
    def engine_pin(self) -> tuple[str, str] | None:
        """The name and version of the package that is the engine itself; `None` if it is not pinned."""
        for requirement in (*self.bare, *self.packages)[:1]:
            if found := _PIN.fullmatch(requirement):
                return found["name"], found["version"]
        return None

    def at_version(self, version: str) -> EnvironmentRecipe:
        """The same recipe for another version of the engine."""
        pin = self.engine_pin
        if pin is None or pin[1] == version:
            return self

        def replace_pin(requirement: str) -> str:
            found = _PIN.fullmatch(requirement)
            if found is None:
                return requirement
            extras, marker = found["extras"] or "", found["marker"] or ""
            if found["name"] == pin[0]:
                return f"{found['name']}{extras}=={version}{marker}"
            return f"{found['name']}{extras}{marker}" if found["name"] in self.chosen_by_release else requirement

        return msgspec.structs.replace(
            self, packages=tuple(map(replace_pin, self.packages)), bare=tuple(map(replace_pin, self.bare))
        )


class OverlayRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """A version of the engine on top of an installed PyTorch: which packages are added and which are left out."""

    version: str
    packages: tuple[str, ...]
    """Requirements that are resolved for the target."""
    as_of: str
    """Releases after this time are ignored, so that the packages are those it was tested with."""
    additional: tuple[str, ...] = ()
    """Packages that bedplate's preparation steps need in the same environment."""
    torch: str
    """The version of PyTorch that this version requires."""
    cuda: str
    """The major version of CUDA that its kernels are built with."""
    provided: tuple[str, ...]
    """Patterns of packages that come with PyTorch."""
    unused: tuple[str, ...] = ()
    """Patterns of packages that are not imported when serving text."""
    unused_files: tuple[str, ...] = ()
    """Patterns, relative to site-packages, of files that are not loaded."""
    other_kernels: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """(major compute capability, patterns): kernels for other GPUs, which are not loaded on such a GPU."""
    environment: tuple[tuple[str, str], ...] = ()
    """Environment variables that it needs, unless the user has set them."""
    check: str
    """Python code that must succeed in the finished environment."""
    source: str


class BuildVariant(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration of a build. If its result does not run on this machine, the next one is tried."""

    name: str = ""
    """The instruction set that it leaves out; empty: none."""
    options: tuple[str, ...] = ()


class SourceBuild(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine is built with cmake from its published source for the machine that it runs on."""

    package: str
    """name==version on the package index."""
    archive: str
    """File name of the source package."""
    sha256: str
    tree: str
    """Folder in the archive that contains CMakeLists.txt."""
    programs: tuple[str, ...]
    """cmake targets, which are also the file names in bin/; the first is the server."""
    version: str
    """Version as shown in plans."""
    download_bytes: int
    disk_bytes: int
    gpu_disk_bytes: int
    """Peak during the build, source and objects together: CPU only, and with one kind of accelerator."""
    core_seconds: float
    gpu_core_seconds: float
    """CPU time of a complete build: CPU only, and with one kind of accelerator."""
    basis: str
    """Source of these figures."""
    brings: tuple[tuple[str, str], ...] = ()
    """(instruction set, measured gain) for instruction sets that the build uses and the wheel does not."""


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that an engine needs in addition to weights and KV cache: a few constants with their source."""

    process_bytes: int = 0
    """Host memory for the interpreter and libraries."""
    device_bytes: int = 0
    """Memory of each device for the driver context, workspaces and captured graphs."""
    context_bytes: int = 0
    """Of these, what the process holds before it loads weights; 0: not known."""
    layer_graph_bytes: int = 0
    """Of these, what a layer takes in one captured CUDA graph, a layer with experts twice as much; 0: not known."""
    prefill_tokens: int | None = None
    """Prefill chunk size; `None`: the whole prompts of all requests."""
    mlp_copies: float = 3.0
    """Live activations of the MLP width for each of those tokens: gate, up and their product."""
    hidden_copies: float = 2.0
    logits_for_all: bool = False
    """Whether logits are computed for each of those tokens, and not only for the last."""
    share: float = 1.0
    """Share of a device's free memory that the engine may use."""
    share_of: Literal["free", "total"] = "free"
    """What the engine's own option for that share counts from, when it starts: the free memory of a device, or all."""
    spread: float
    """Relative uncertainty of the total, up and down."""
    source: str


class Features(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's row in the table of `bedplate engines`: a few words for each column."""

    batching: str
    kv_cache: str
    quantization: str
    hardware: str
    structured_output: str
    multi_node: str
    server: str
    """The HTTP server in front of it, and who provides it."""
    maintained: str
    """"active", or the date of the last release."""
    source: str
    """Source of these entries, with version or date."""


class KnownFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A known failure, recognized by a line of the log."""

    message: str
    hint: str
    lasting: bool = True
    """Whether a restart would fail again."""


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """Load of an engine by its own metrics. `None`: this engine or version does not report it."""

    running: float | None = None
    waiting: float | None = None
    kv_use: float | None = None
    preemptions: float | None = None
    """Count since the start of the engine, as are the ones below."""
    cache_hits: float | None = None
    """Prompt tokens (or blocks) found in the prefix cache, out of `cache_queries`."""
    cache_queries: float | None = None
    computed: float | None = None
    """Tokens and iterations; it grows whenever the engine computes."""


class ComputeTarget(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a machine that an engine computes on: its accelerators, or its CPU. Of cards that differ, the figures
    are those of the weakest."""

    device: Device
    count: int
    chip: Chip | None = None
    """The vendor's data about the chip, if known."""
    features: frozenset[str] = frozenset()
    """Types that its matrix units support: fp8, fp4, bf16."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability."""


class RegisteredEngine(NamedTuple):
    """The user's environment with an engine, as `bedplate engines use` found it."""

    version: str
    packages: frozenset[str]


class Engine:
    """The engine interface. To add an engine, write one file with a subclass (docs/add-an-engine.md)."""

    id: ClassVar[str]
    name: ClassVar[str]
    spellings: ClassVar[tuple[str, ...]] = ()
    """Other names of it, and programs that wrap it, in lower-case letters and digits only."""
    spelling_pattern: ClassVar[str | None] = None
    """A regular expression for names that `spellings` cannot list; matched at the beginning of the text."""
    version: str | None = None
    """The pinned version that plans are made for; for an engine from `at`, the requested version."""
    checked_versions: ClassVar[tuple[str, ...]] = ()
    """Older versions whose options were checked as well, the newest first."""
    is_version_named: bool = False
    """Whether the user requested this version."""
    packages: frozenset[str] | None = None
    """The packages of the user's environment that was registered for it; `None`: bedplate installs it."""
    recipe: ClassVar[EnvironmentRecipe | None] = None
    """`None`: bedplate plans the engine but does not install it."""
    overlays: ClassVar[tuple[OverlayRecipe, ...]] = ()
    """Versions that can be bundled for machines that already have PyTorch."""
    build: ClassVar[SourceBuild | None] = None
    """How it is built for the machine that it runs on; `None`: bedplate does not build it."""
    formats: ClassVar[tuple[str, ...]] = ()
    """Weight formats that it loads directly."""
    converts: ClassVar[tuple[str, ...]] = ()
    """Formats that it, or one of its tools, converts to one of `formats`."""
    vendors: ClassVar[tuple[str, ...]] = ()
    """Vendors of the GPUs, and families of dedicated accelerators, that it supports."""
    unplanned: ClassVar[Mapping[str, str]] = {}
    """Family of accelerators → the project that runs this engine on them, which bedplate does not plan."""
    cpu: ClassVar[bool] = False
    """Whether it runs on a CPU without an accelerator."""
    systems: ClassVar[tuple[str, ...]] = ("linux",)
    capability: ClassVar[tuple[int, int]] = (0, 0)
    """The lowest CUDA compute capability that the kernels of this version are built for."""
    tasks: ClassVar[tuple[str, ...]] = ("generate",)
    ways: ClassVar[tuple[ParallelismKind, ...]] = ()
    """Supported kinds of parallelism; none: it uses one device."""
    paged: ClassVar[bool] = False
    """Whether KV cache is allocated as requests grow, so that unused slots need no memory."""
    offloads: ClassVar[bool] = False
    """Whether it can keep a part of the weights in host memory."""
    spans_sockets: ClassVar[bool] = True
    """Whether the threads of one process run on all CPU sockets."""
    reuses_prefixes: ClassVar[bool] = True
    """Whether it has a prefix cache."""
    built_for: ClassVar[tuple[Device, ...]] = ("cpu",)
    """Devices that the packages of its recipe support; other devices need a separate build."""
    effort: ClassVar[int] = 1
    """Operational complexity, from 1 (one program) to 5: of otherwise equal engines, the lowest is chosen."""
    features: ClassVar[Features | None] = None
    supervised_env: ClassVar[dict[str, str]] = {}
    """Additional environment variables for the supervisor, not shown in the launch command."""
    compile_caches: ClassVar[tuple[str, ...]] = ()
    """Environment variables for the folders of compiled kernels and graphs, which later starts reuse."""
    uses: ClassVar[MemoryUse] = MemoryUse(spread=1.0, source="not known for this engine")
    highest_port: ClassVar[int] = HIGHEST_PORT
    """The highest port that it can listen on."""
    max_slots: ClassVar[int | None] = None
    """Maximum number of concurrent requests, independent of memory."""
    default_slots: ClassVar[int] = 1
    """Number of concurrent requests if no concurrency is specified."""
    variable_prefixes: ClassVar[tuple[str, ...]] = ()
    """Prefixes of its environment variables; `bedplate doctor` shows those that are set."""
    key_variable: ClassVar[str | None] = None
    """The environment variable with the API key that it then requires from clients."""
    liveness_path: ClassVar[str | None] = None
    """A path that its process always answers, ready or not; `None`: the health path of its launch."""
    private_port: ClassVar[PrivatePort | None] = None
    """`None`: by `key_variable`, if it has one; otherwise every user of the machine can send requests to it."""
    strength: ClassVar[str] = ""
    """When it is the right choice; used as the hint of a refusal."""
    start_phases: ClassVar[tuple[tuple[str, StartPhase], ...]] = ()
    """Patterns of log lines with which phases of its start begin; empty: its log does not show them."""
    compiles_kernels: ClassVar[bool] = False
    """Whether it compiles its kernels on the machine where it runs, which needs a compiler."""
    flags: ClassVar[AdviceFlags] = AdviceFlags()
    noted: ClassVar[NotedOptions] = NotedOptions()
    runs_engine: ClassVar[str | None] = None
    """The id of the engine that it starts internally: measurements of that one apply to both."""
    table_names: ClassVar[TableNames | None] = None
    estimate: ClassVar[EstimateTraits] = EstimateTraits()
    requests: ClassVar[RequestTraits] = RequestTraits()
    metric_names: ClassVar[MetricNames | None] = None
    """`None`: it reports no load metrics for an autoscaler."""
    container: ClassVar[ContainerTraits] = ContainerTraits()
    dynamo: ClassVar[DynamoWorker | None] = None
    """`None`: Dynamo has no worker for it."""
    ray: ClassVar[RayWorker | None] = None
    """`None`: Ray Serve LLM does not run it."""
    cloned: ClassVar[ClonedProgram | None] = None
    server_features: ClassVar[ServerFeatures | None] = None
    """`None`: not known, so the gateway refuses no feature."""
    mistakes: ClassVar[tuple[tuple[str, KnownMistake], ...]] = ()
    """(pattern of its error message, the client's mistake): whatever status it answers with, the engine works."""
    option_check: ClassVar[str | None] = None
    """Python code that parses the options in `sys.argv[1:]` with the engine's own parser, in its environment, and
    fails for an option that this version does not have. `None`: the names in the output of `--help` are compared."""
    launch_rules: ClassVar[tuple[LaunchRule, ...]] = ()
    """What this version refuses, each with the file that has the check."""
    rule_sources: ClassVar[Mapping[str, str]] = {}
    """Rule that several engines share → the file and version in which this engine makes the same check."""
    launch_options: ClassVar[LaunchOptions] = LaunchOptions()
    loading: ClassVar[LoadingTraits] = LoadingTraits()
    quantizations: ClassVar[tuple[SupportedQuantization, ...]] = ()
    """The kinds of quantized weights that it has kernels for, by device; empty: not known."""
    eight_bit_cache: ClassVar[EightBitCache | None] = None
    """`None`: it has no 8-bit KV cache, or bedplate plans none for it."""
    adapters: ClassVar[AdapterTraits | None] = None
    """`None`: it, or the server that bedplate starts for it, serves no LoRA adapters."""
    reads_projectors: ClassVar[bool] = False
    """Whether it loads the vision encoder that is a file beside a GGUF model."""
    no_adapters: ClassVar[str] = "serves no LoRA adapters"
    """Why there are none, if `adapters` is `None`."""
    not_distributed: ClassVar[str] = "has no launch for several nodes"
    """Why a model is on one node, if the engine cannot distribute it."""
    node_starter: ClassVar[str | None] = None
    """The launcher that starts its ranks on several nodes, if its own command does not."""

    def at_version(self, version: str) -> Engine:
        """Return the same engine in another version; launch commands and plans are then for that version."""
        one = copy.copy(self)
        one.version, one.is_version_named = version, True
        return one

    def in_environment(self, environment: RegisteredEngine) -> Engine:
        """Return the same engine as it is in the user's environment: plans need nothing that is missing there."""
        one = self.at_version(environment.version)
        one.packages = environment.packages
        return one

    def has_package(self, name: str) -> bool:
        """Whether an optional package is in the engine's environment; bedplate's own have all that the recipe names."""
        return self.packages is None or name in self.packages

    @property
    def pinned_version(self) -> str | None:
        """The version that bedplate installs by default."""
        return type(self).version

    def get_version(self, plan: Plan) -> str | None:
        return self.version if plan.engine_version in NO_VERSION else plan.engine_version

    def find_options_version(self, version: str | None) -> str | None:
        """The checked version whose options apply: `version` itself, else the newest before it, else the oldest."""
        known = [one for one in (self.pinned_version, *self.checked_versions) if one is not None]
        if version is None or not known or version in known:
            return version if version in known else self.pinned_version
        before = [one for one in known if parse_version(one) <= parse_version(version)]
        return max(before, key=parse_version) if before else min(known, key=parse_version)

    def adapt_to_hardware(self, hardware: Hardware) -> Engine:
        """The same engine as its plugin for this machine has it: another version, fewer layouts, other limits."""
        return self

    def adapt_to_plan(self, plan: Plan) -> Engine:
        """The same for the machine that the plan was made for."""
        return self

    def save_memory(self, target: ComputeTarget, workload: Workload) -> Engine | None:
        """The same engine with settings that need less memory of each card, for models that do not fit otherwise."""
        return None

    def refuse(self, hardware: Hardware, model: Model, workload: Workload) -> Refusal | None:
        """Why it cannot run this model or task here; `None`: it can. The rules decide whether it should."""
        if hardware.os not in self.systems:
            return self.make_refusal(
                "impossible", f"does not run on {hardware.os}", f"a machine with {join_with_or(self.systems)}"
            )
        if self.find_target(hardware) is None:
            return self._refuse_hardware(hardware)
        if workload.task not in self.tasks:
            return self.make_refusal(
                "impossible", f"does not support the task {workload.task}", f"a model to {join_with_or(self.tasks)}"
            )
        if model.format not in (*self.formats, *self.converts, "facts"):
            loads = join_with_or(tuple(name.upper() if len(name) < 5 else name for name in self.formats))
            return self.make_refusal(
                "impossible", f"loads {loads}, not {model.format}", "the same model in a supported format"
            )
        return self.refuse_adapters(hardware, model, workload) if workload.adapters else None

    def refuse_adapters(self, hardware: Hardware, model: Model, workload: Workload) -> Refusal | None:
        """Why it cannot serve the LoRA adapters of the workload; `None`: it can, if its weights allow it."""
        traits, count, rank = self.adapters, len(workload.adapters), workload.adapter_rank
        if traits is None:
            return self.make_refusal("impossible", self.no_adapters, "weights that the adapter is merged into")
        if traits.most is not None and count > traits.most:
            one = "one LoRA adapter" if traits.most == 1 else f"{traits.most} LoRA adapters"
            return self.make_refusal("impossible", f"one server has at most {one}, not {count}", "a server for each")
        if traits.ranks and rank > traits.ranks[-1]:
            why = f"the rank of a LoRA adapter is at most {traits.ranks[-1]}, not {rank}"
            return self.make_refusal("impossible", why, "an adapter of a lower rank")
        return None

    def count_resident_adapters(self, workload: Workload) -> int:
        """The LoRA adapters in the memory of the devices: those of all concurrent requests, if that many may be."""
        count, most = len(workload.adapters), self.adapters.most_resident if self.adapters is not None else 0
        if most is None:
            return count
        rate = workload.requests_per_s or 0.0
        at_once = workload.concurrency or max(workload.users, math.ceil(rate * workload.assumed_request_s))
        return min(count, most, max(LEAST_RESIDENT_ADAPTERS, at_once))

    def choose_adapter_rank(self, workload: Workload) -> int:
        """The rank that memory is allocated for: the highest of the workload, rounded up to one that it offers."""
        ranks = self.adapters.ranks if self.adapters is not None else ()
        return next((rank for rank in ranks if rank >= workload.adapter_rank), workload.adapter_rank)

    def find_target(self, hardware: Hardware) -> ComputeTarget | None:
        """The accelerators or else the CPU of this machine that it would use; `None`: it supports neither."""
        cards = find_cards(hardware, self.vendors)
        found: list[ComputeTarget] = []
        name = None
        for card in cards:
            if card.name == name:
                continue
            name, target = card.name, self._describe_card(card, len(cards))
            # One process computes on the cards of one vendor.
            if target is not None and (not found or target.device == found[0].device):
                found.append(target)
        if len(found) > 1:
            features = frozenset.intersection(*(one.features for one in found))
            weakest = min(found, key=lambda one: one.capability or (0, 0))
            return msgspec.structs.replace(weakest, features=features)
        return found[0] if found else ComputeTarget(device="cpu", count=1) if self.cpu else None

    def _describe_card(self, card: Accelerator, count: int) -> ComputeTarget | None:
        """`None`: it has no kernels for this card."""
        chip = find_accelerator_chip(card)
        capability = parse_capability(card.compute_capability or (chip.capability if chip is not None else None))
        if capability is not None and capability < self.capability:
            return None
        return ComputeTarget(
            device=DEVICES.get(get_card_family(card), "cpu"),
            count=count,
            chip=chip,
            features=chip.features if chip is not None else frozenset(),
            capability=capability,
        )

    def list_weights(self, target: ComputeTarget, model: Model, workload: Workload) -> tuple[Weights, ...]:
        """The weight formats in which it can load the model on this target, the most faithful first.

        Files that are already quantized are loaded as they are.
        """
        if model.format in self.formats:
            return (Weights(label=model.quantization or "BF16", made="as it is", format=model.format),)
        return ()

    def settle(self, hardware: Hardware, model: Model, workload: Workload) -> Settings:
        """The largest settings for this workload on this machine, whether or not they fit."""
        target = self.find_target(hardware)
        asked = workload.compute_most_in_flight()
        slots = asked if workload.states_load else max(asked, self.default_slots)
        return Settings(
            slots=min(slots, self.max_slots) if self.max_slots else slots,
            context_tokens=min(workload.request_tokens, model.max_context or workload.request_tokens),
            device=target.device if target is not None else "cpu",
            memory_share=None if target is not None and target.device == "cpu" else self.choose_memory_share(hardware),
        )

    def choose_memory_share(self, hardware: Hardware) -> float | None:
        """The engine's option for its share of a device's memory; `None` if it has none.

        An option that counts from the total must leave what other processes hold: the engine refuses to start else.
        """
        share = self.uses.share
        if share >= 1:
            return None
        if self.uses.share_of == "total":
            for card in find_cards(hardware, self.vendors):
                if card.memory_bytes and card.free_bytes is not None:
                    free = card.free_bytes / card.memory_bytes
                    if free < self.uses.share + SHARE_MARGIN:
                        share = min(share, math.floor(100 * self.uses.share * free) / 100)
        return max(share, SHARE_MARGIN)

    def get_cache_bits(self, model: Model) -> int:
        """Bits of each key and value in host memory, unless fewer are requested."""
        return 16

    def find_quantization(self, method: str, target: ComputeTarget) -> SupportedQuantization | None:
        """The row of its table for these weights on this target."""
        rows = (row for row in self.quantizations if row.method == method)
        return find_quantization(rows, target.device, target.capability, target.features)

    def get_stored_cache_bits(self, kv_type: CacheType, *, model: Model | None = None) -> float:
        """Bits of each key and value, with scales; with `model`, in host memory."""
        if kv_type == "fp8":
            return self.eight_bit_cache.bits if self.eight_bit_cache is not None else 8.0
        return self.get_cache_bits(model) if model is not None else 16.0

    def refuse_eight_bit_cache(self, target: ComputeTarget, model: Model) -> str | None:
        """Why it has no 8-bit KV cache for this model on this target; `None`: it has one."""
        cache = self.eight_bit_cache
        if cache is None:
            return "it has none"
        if cache.find_row(target.device, target.capability, target.features) is None:
            return f"it has none for this {'GPU' if target.device != 'cpu' else 'device'}"
        if model.kv_lora_rank is not None and not cache.latent:
            return "its kernels for a latent cache have 16 bits"
        if model.head_dim is not None and model.head_dim % cache.head_step:
            return f"heads of {model.head_dim} values are not a multiple of {cache.head_step}"
        return None

    def compute_overhead_bytes(self, model: Model, settings: Settings) -> float:
        """Host memory in addition to weights and KV cache."""
        return self.uses.process_bytes + self.compute_activation_bytes(model, settings.context_tokens)

    def count_graphs(self, settings: Settings) -> int:
        """CUDA graphs that it captures when it starts."""
        return 0

    def compute_graph_bytes(self, model: Model, settings: Settings) -> float:
        """Memory of the captured CUDA graphs of all layers; 0: it has none, or their memory is not known."""
        each = self.uses.layer_graph_bytes * (2 if model.num_experts else 1)
        return float(each * model.num_layers * self.count_graphs(settings))

    def compute_activation_bytes(self, model: Model, prompt_tokens: int) -> float:
        """Memory for 16-bit activations during prefill, on a device that holds the full width."""
        tokens = min(prompt_tokens, self.uses.prefill_tokens or prompt_tokens)
        width = model.intermediate_size or 4 * (model.hidden_size or 0)
        if model.num_experts_active and model.moe_intermediate_size:
            width = model.moe_intermediate_size * model.num_experts_active
        rows = self.uses.mlp_copies * width + self.uses.hidden_copies * (model.hidden_size or 0)
        logits = (model.vocab_size or 0) * (tokens if self.uses.logits_for_all else 1)
        return 2.0 * (tokens * rows + logits)

    def launch(self, plan: Plan, port: int) -> Launch:
        """The command on a machine where it is installed, the preparation steps, and the health path."""
        raise NotImplementedError

    @property
    def is_wrapped(self) -> bool:
        """Whether bedplate starts it inside shipped/require_key.py, which checks the key of each request."""
        return self.private_port is not None and self.private_port.key_checked_by == "wrapper"

    @property
    def private_key_variable(self) -> str | None:
        """The environment variable for the key of its private port when bedplate starts it; `None`: it has no key."""
        return WRAPPER_KEY_VARIABLE if self.is_wrapped else self.key_variable

    def requires_key(self, path: str) -> bool:
        """Whether its own server, with a key in `key_variable`, refuses requests for this path without the key."""
        port = self.private_port
        return port is not None and port.key_checked_by == "engine" and path not in port.open_paths

    def count_launch_cards(self, launch: PlannedLaunch) -> int | None:
        """The accelerators that the command line asks for; `None` if it does not say."""
        names = self.launch_options.cards
        if not names:
            return None
        # If every replica has a server of its own, the command is that of one of them.
        replicas = 1 if self.starts_replicas(launch.model) else launch.plan.parallelism.data
        return replicas * math.prod(launch.get_count(name) for name in names)

    def count_largest_stage(self, layers: int, stages: int) -> int:
        """The most layers that one of several pipeline stages gets."""
        return -(-layers // stages)

    def starts_replicas(self, model: Model) -> bool:
        """Whether one command starts several replicas of this model; otherwise each has a server of its own."""
        return True

    def accepts_layout(self, model: Model, layout: Parallelism, hosts: int) -> bool:
        """Whether it has this layout for this architecture; `hosts` are those of one replica."""
        return True

    def accepts_adapters(self, layout: Parallelism) -> bool:
        """Whether it serves LoRA adapters in this layout."""
        return True

    def count_layers_by_card(self, launch: PlannedLaunch) -> tuple[int, ...]:
        """The layers on each card of one replica's pipeline; the first stages get the remainder."""
        layers, stages = launch.model.num_layers, launch.plan.parallelism.pipeline
        sizes = [card.free_bytes or card.memory_bytes or 0 for card in launch.cards]
        if self.loading.divides == "by memory" and len(sizes) == stages and len(set(sizes)) > 1:
            return self.count_layers_by_memory(layers, sizes)
        return tuple(layers // stages + (number < layers % stages) for number in range(stages))

    def count_layers_by_memory(self, layers: int, sizes: Sequence[float], placed: int | None = None) -> tuple[int, ...]:
        """The layers on cards of these sizes, if it divides them by memory; `placed`: of those that are on cards."""
        placed, total = layers if placed is None else placed, sum(sizes)
        ends = [round(placed * sum(sizes[: number + 1]) / total) for number in range(len(sizes))]
        return tuple(end - begin for begin, end in itertools.pairwise((0, *ends)))

    @property
    def is_native(self) -> bool:
        """Whether this is the version that bedplate builds from source."""
        return self.build is not None and self.version == self.build.version

    def is_checked(self, version: str) -> bool:
        """Whether the options of this version were checked when bedplate was released."""
        return version in (self.pinned_version, *self.checked_versions)

    def find_recipe(self, device: Device) -> EnvironmentRecipe | None:
        """The recipe for this device and version."""
        recipe, version = self.find_pinned_recipe(device), self.version
        if recipe is None or version is None or version == self.pinned_version or not RELEASE.fullmatch(version):
            return recipe
        return recipe.at_version(version)

    def find_pinned_recipe(self, device: Device) -> EnvironmentRecipe | None:
        """The recipe of the pinned version for this device, if packages differ by device."""
        return self.recipe

    def find_package_device(self, hardware: Hardware) -> Device:
        """The device that its packages are installed for on this machine."""
        target = self.find_target(hardware)
        return target.device if target is not None and target.device in self.built_for else self.built_for[0]

    def find_version(self, text: str, installed: Iterable[str] = ()) -> str:
        """The full version that a user means: `native`, a version, or the beginning of a known one.

        Otherwise zeros are added, as package indexes do when they compare versions.
        """
        if text == NATIVE and self.build is not None:
            return self.build.version
        known = [one for one in (self.pinned_version, *self.checked_versions, *installed) if one is not None]
        if text in known or not text.replace(".", "").isdigit():
            return text
        if begun := [one for one in known if f"{one}.".startswith(f"{text}.")]:
            return max(begun, key=parse_version)
        missing = (self.pinned_version or "").count(".") - text.count(".")
        return text + ".0" * max(0, missing)

    def list_requirements(self, settings: Settings) -> tuple[str, ...]:
        """Arguments of `uv pip install` for the plan's device: its recipe's packages, unless they differ by GPU."""
        recipe = self.find_recipe(settings.device)
        return recipe.packages if recipe is not None else ()

    def list_variants(self, hardware: Hardware, device: Device) -> tuple[BuildVariant, ...]:
        """Configurations of `build` for this machine, the best first; empty: it cannot be built here."""
        return ()

    def list_build_steps(self, plan: Plan) -> tuple[Preparation, ...]:
        """The preparation steps that build the engine itself; not needed if a build exists."""
        return ()

    def get_max_connections(self, settings: Settings) -> int | None:
        """Maximum number of concurrent connections of its HTTP server; `None`: no limit."""
        return None

    def get_replica_env(self, settings: Settings) -> dict[str, str]:
        """Environment variables for one of several replicas that would otherwise use the same cores."""
        return {}

    def launch_on_node(self, plan: Plan, port: int, *, nodes: int, rank: int, leader: str) -> Launch | None:
        """The command on one of several nodes; `None`: it does not distribute a model over nodes."""
        return None

    def can_distribute(self, model: Model) -> bool:
        """Whether it has a launch of this model on several nodes."""
        return type(self).launch_on_node is not Engine.launch_on_node

    def get_advice_flags(self, device: str | None) -> AdviceFlags:
        """The options for this device, if their names differ by device."""
        return self.flags

    def is_current(self, version: str, backend: str) -> bool:
        """Whether the fitted efficiencies apply to this version of a published measurement, or it is older."""
        return True

    def get_chunk_size(self, micro_batch: int | None, batch: int | None, scenario: str) -> int | None:
        """Prefill chunk size of a published measurement; `None`: the default."""
        return None

    def uses_flash_attention(self, build: int | None, year: int | None, scenario: str) -> bool:
        """Whether flash attention is used if a published measurement does not mention it."""
        return True

    def get_library_tokens(
        self, backend: str, family: str, half: bool, build: int | None = None, year: int | None = None
    ) -> int | None:
        """The number of tokens from which on a vendor's library multiplies matrices, for weights with 16 bits (`half`)
        or fewer; `None`: its own kernels always do."""
        return None

    def find_published_image(self, device: Device, gfx: str | None, arch: str) -> ContainerImage | None:
        """The image that its project publishes for a device; `None`: an image is built from the recipe if possible."""
        return None

    def adapt_to_container(self, launch: Launch, image: str) -> Launch:
        """The launch inside the image, if program names or folders differ there."""
        return launch

    def list_container_files(self, plan: Plan) -> dict[str, str]:
        """Contents by name of the files that its launch refers to."""
        return {}

    def get_stop_options(self, seconds: int) -> tuple[str, ...]:
        """Options that give running requests this many seconds to finish on SIGTERM."""
        return ()

    def get_health_command(self, url: str) -> tuple[str, ...]:
        """A command in the image that succeeds if the server responds."""
        return ("python3", "-c", f"import urllib.request as web; web.urlopen('{url}', timeout=8)")

    def plan_store_step(self, plan: Plan) -> StoreStep | None:
        """How the model is added to the engine's model store; `None`: it serves files directly."""
        return None

    def plan_container_conversion(self, plan: Plan, source: str, made: str) -> ContainerConversion | None:
        """How weights are converted in a container, if the steps of the launch do not work there."""
        return None

    def get_dynamo_options(self, role: str, task: str) -> tuple[str, ...]:
        """Options of a Dynamo worker for its role: worker, prefill or decode."""
        return ()

    def list_dynamo_files(self, plan: Plan, role: str) -> dict[str, str]:
        """The files of `container_files` for a Dynamo worker of this role."""
        return self.list_container_files(plan)

    def plan_installation(self, plan: Plan | None = None) -> tuple[Preparation, ...]:
        """The installation of the pinned version, or of the version of the plan."""
        if self.recipe is None:
            return ()
        recipe = self.recipe
        if plan is not None and (version := self.get_version(plan)) and RELEASE.fullmatch(version):
            recipe = recipe.at_version(version)
        what, where = " ".join(recipe.packages), OWN_ENVIRONMENT
        download, disk = recipe.download_bytes, recipe.disk_bytes
        return (Preparation(kind="install", what=what, where=where, download_bytes=download, disk_bytes=disk),)

    def list_settings(self, hardware: Hardware, plan: Plan) -> tuple[TunableSetting, ...]:
        """Settings that `bedplate tune` may change on this machine; empty: it is not tuned."""
        return ()

    def get_draft_options(self, model: str) -> tuple[str, ...]:
        """Options for speculative decoding with a draft model of the same vocabulary; empty: not supported."""
        return ()

    def read_progress(self, line: str) -> float | None:
        """The loaded share of the model, if this log line reports it."""
        return None

    def read_phase(self, line: str, argv: Sequence[str]) -> StartPhase | None:
        """The phase of its start that begins with this log line; `argv` is its command line."""
        return next((phase for mark, phase in self.start_phases if re.search(mark, line)), None)

    def explain(self, log: str) -> KnownFailure | None:
        """The known failure that this log shows."""
        return None

    def read_metrics(self, metrics: str) -> EngineState:
        """The engine's load from its own metrics."""
        return EngineState()

    def find_mistake(self, message: str) -> KnownMistake | None:
        """The client's mistake that this error message of the engine reports; `None`: unknown."""
        for pattern, mistake in self.mistakes:
            if found := re.search(pattern, message):
                return msgspec.structs.replace(mistake, message=mistake.message.format(**found.groupdict()))
        return None

    def find_tool_support(self, plan: Plan) -> ToolSupport:
        """Which tool calls work with this model; those of the server, if its chat template has a place for tools."""
        features, model = self.server_features, plan.model
        lacks_template = bool(model.files) and not model.has_chat_template  # without files, it is not known
        lacks_tools = model.chat_template is not None and "tools" not in model.chat_template
        return "none" if features is None or lacks_template or lacks_tools else features.tools

    def describe_capabilities(self, plan: Plan) -> Capabilities | None:
        """What requests may ask of this plan's model; `None`: not known."""
        features, task = self.server_features, plan.workload.task
        if features is None:
            return None
        most = {"one": 1, "slots": plan.settings.slots, "any": None}[features.choices]
        return Capabilities(
            generation=task == "generate",
            embeddings=task == "embed",
            transcriptions=task == "transcribe",
            tools=self.find_tool_support(plan),
            json_schema=features.json_schema,
            json_object=features.json_object,
            logprobs=features.logprobs,
            vision=(features.vision and plan.model.vision_parameters > 0)
            or (self.reads_projectors and plan.model.projector is not None),
            n=most,
            stop=features.stop,
            seed=features.seed,
            context_tokens=plan.settings.context_tokens,
            vocab_size=plan.model.vocab_size,
        )

    def make_refusal(self, kind: str, why: str, hint: str | None = None) -> Refusal:
        return msgspec.convert({"engine": self.id, "kind": kind, "why": why, "hint": hint}, Refusal)

    def _refuse_hardware(self, hardware: Hardware) -> Refusal:
        whose = join_with_or(tuple(VENDOR_NAMES.get(vendor, vendor) for vendor in self.vendors))
        if any(card.vendor in self.vendors for card in hardware.accelerators):
            least = ".".join(map(str, self.capability))
            return self.make_refusal(
                "impossible", f"its kernels need compute capability {least} or higher", "a newer NVIDIA GPU"
            )
        gpu = f"{_choose_article(whose)} {whose} GPU"
        return self.make_refusal("impossible", f"needs {gpu}", gpu)


_found_cards: dict[tuple[int, tuple[str, ...]], tuple[tuple[Accelerator, ...], tuple[Accelerator, ...]]] = {}
"""By the identity of a machine's accelerators: a search asks for the same cards for each layout, and hashing 128 cards
takes longer than looking at them."""
MOST_FOUND_CARDS = 64


def find_cards(hardware: Hardware, vendors: Iterable[str]) -> tuple[Accelerator, ...]:
    """The GPUs of these vendors, and the dedicated accelerators of these families."""
    cards, vendors = hardware.accelerators, tuple(vendors)
    known = _found_cards.get((id(cards), vendors))
    if known is not None and known[0] is cards:
        return known[1]
    if len(_found_cards) >= MOST_FOUND_CARDS:
        _found_cards.clear()
    found = tuple(card for card in cards if get_card_family(card) in vendors)
    _found_cards[id(cards), vendors] = (cards, found)
    return found


def get_card_family(card: Accelerator) -> str:
    """The vendor; for a dedicated accelerator of a vendor that also makes GPUs, the name of its product line."""
    if card.vendor != "intel":
        return card.vendor
    chip = find_accelerator_chip(card)
    return GAUDI if chip is not None and chip.kind == "accelerator" else card.vendor


def choose_context(model: Model, workload: Workload) -> int:
    """The context length to reserve KV cache for: as requested, else enough for most conversations."""
    asked = workload.context_tokens
    wanted = max(workload.request_tokens, asked if asked is not None else DEFAULT_CONTEXT_TOKENS)
    return min(wanted, model.max_context or wanted)


def find_known_failure(log: str, known: Iterable[tuple[str, KnownFailure]]) -> KnownFailure | None:
    """The failure of the first pattern that the log matches; its named groups fill in the message."""
    for pattern, failure in known:
        if found := re.search(pattern, log):
            words = found.groupdict()
            return KnownFailure(
                message=failure.message.format(**words), hint=failure.hint.format(**words), lasting=failure.lasting
            )
    return None


def get_converted_path(plan: Plan) -> str:
    """The output path of a conversion, relative to the working directory."""
    name = f"{plan.model.short_name}-{plan.weights.label}"
    return f"{name}.gguf" if plan.weights.format == "gguf" else name


def get_source_folder(plan: Plan) -> str:
    """The folder with the original weights, the input of a conversion."""
    return plan.model_path if plan.model.files else plan.model.short_name


def plan_download(plan: Plan) -> tuple[Preparation, ...]:
    """The download of missing original weights, for tools that need a folder instead of a hub id."""
    if plan.model.files:
        return ()
    folder, size = get_source_folder(plan), plan.model.weight_bytes
    argv = ("hf", "download", plan.model.name, "--local-dir", folder)
    return (
        Preparation(
            kind="download", what=plan.model.name, where=folder, download_bytes=size, disk_bytes=size, argv=argv
        ),
    )


def plan_published_download(plan: Plan) -> tuple[Preparation, ...]:
    """The download of published weights, for engines that need a file or folder instead of a hub id."""
    published = plan.weights.published
    return (make_download_step(published),) if published is not None and not plan.model.files else ()


def make_download_step(published: PublishedWeights) -> Preparation:
    argv = ["hf", "download", published.repository]
    if published.file is not None and published.parts > 1:
        argv += ["--include", re.sub(r"-00001-of-", "-*-of-", published.file)]
    elif published.file is not None:
        argv.append(published.file)
    if published.revision is not None:
        argv += ["--revision", published.revision]
    what = (
        f"{published.repository}, {f'file {published.file}' if published.file else published.revision or 'all files'}"
    )
    size = published.size_bytes
    return Preparation(
        kind="download", what=what, where=published.folder, download_bytes=size, disk_bytes=size,
        argv=(*argv, "--local-dir", published.folder),
    )  # fmt: skip


def plan_helper_installation(helper: Engine) -> tuple[Preparation, ...]:
    """The installation of another engine, in whose environment a step of this plan runs."""
    return tuple(msgspec.structs.replace(step, within=helper.id) for step in helper.plan_installation())


def parse_version(version: str) -> tuple[int, ...]:
    """The first four numbers of a version, to order versions by."""
    return tuple(int(one) for one in re.findall(r"\d+", version)[:4])


@lru_cache(maxsize=64)
def parse_capability(text: str | None) -> tuple[int, int] | None:
    major, _, minor = (text or "").partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def _choose_article(word: str) -> str:
    return "an" if word[:1] in "AEIONaeio" else "a"
