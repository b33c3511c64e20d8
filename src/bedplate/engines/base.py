"""What an engine is to bedplate. An engine file answers questions; it never spawns, waits or prints."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterable, Mapping
from typing import ClassVar, Literal

import msgspec

from bedplate.engines.traits import (
    AdviceFlags,
    ClonedProgram,
    ContainerConversion,
    ContainerImage,
    ContainerTraits,
    DynamoWorker,
    EstimateTraits,
    MetricNames,
    NotedOptions,
    RayWorker,
    StoreStep,
    TableNames,
)
from bedplate.facts.chips import Chip, chip_of
from bedplate.values import (
    Accelerator,
    Hardware,
    Launch,
    Model,
    Plan,
    Preparation,
    Refusal,
    Settings,
    Weights,
    Workload,
)
from bedplate.values.decision import Device
from bedplate.values.tuning import Knob

SHARE_MARGIN = 0.01
"""Of a device's memory: what stays free beside the share that an engine asks for when it starts."""
RESERVED_SHARE = 0.05
"""Of the free memory, what is left to the system: a machine that swaps is slower than any other setting."""
Way = Literal["tensor", "pipeline", "data", "expert", "attention_data"]
DEVICES: dict[str, Device] = {"nvidia": "cuda", "amd": "rocm", "apple": "metal", "intel": "xpu"}
VENDOR_NAMES = {"nvidia": "NVIDIA", "amd": "AMD", "apple": "Apple", "intel": "Intel", "tenstorrent": "Tenstorrent"}
SIXTEEN_BIT = ("BF16", "F16", "F32")
HIGHEST_PORT = 65535
NO_VERSION = ("", "unpinned", "unknown")
"""What stands for a version where none is known."""
EVERYDAY_CONTEXT = 8192
"""Context that a chat is given when nobody asked for a length: most conversations stay below it."""


class BorrowedLibrary(msgspec.Struct, frozen=True, kw_only=True):
    """A shared library that an engine's wheel expects of the system, and a package that carries it along."""

    soname: str
    package: str
    file: str
    """Where in the package it is, as a glob."""


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine's own environment is made: pinned packages, and programs that bedplate ships into it."""

    packages: tuple[str, ...]
    programs: tuple[tuple[str, str], ...] = ()
    """(command name, file in engines/shipped): put into the environment's bin folder."""
    libraries: tuple[BorrowedLibrary, ...] = ()
    """Taken only on systems that lack them."""
    bare: tuple[str, ...] = ()
    """Packages that ask for others which this machine has no use for: installed last, without what they ask for."""
    removes: tuple[str, ...] = ()
    """Packages that the others ask for and that break the engine: taken out again."""
    download_bytes: int
    disk_bytes: int
    check: str
    """Python that must run in the finished environment, or the environment is not taken for a good one."""


class OverlayRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """A version of the engine over a PyTorch that the machine has already: what is added, and what is left out."""

    version: str
    packages: tuple[str, ...]
    """What is resolved for the target."""
    as_of: str
    """Releases after this moment are not taken: the packages are those that it ran with."""
    additional: tuple[str, ...] = ()
    """Packages that bedplate's own steps need in the same environment."""
    torch: str
    """The version of PyTorch that this version requires."""
    cuda: str
    """The major version of CUDA that its kernels are built with."""
    provided: tuple[str, ...]
    """Packages that come with PyTorch, as patterns."""
    unused: tuple[str, ...] = ()
    """Packages that serving text does not import, as patterns."""
    unused_files: tuple[str, ...] = ()
    """Files that it does not load, as patterns below site-packages."""
    other_kernels: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """(major compute capability, patterns): kernels that it does not load on such a GPU, since it has others."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables that it needs, unless the user has set them."""
    check: str
    """Python that must run in the finished environment."""
    source: str


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """One way to configure a build; should what it makes not run here, the next one is tried."""

    name: str = ""
    """What it does without; empty: nothing."""
    options: tuple[str, ...] = ()


class SourceBuild(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine is built with cmake from its published source, for the very machine that it runs on."""

    package: str
    """On the package index: name==version."""
    archive: str
    """The source package's file."""
    sha256: str
    tree: str
    """The folder with the CMakeLists.txt, inside of the archive."""
    programs: tuple[str, ...]
    """Targets, and the files that they make under bin/; the first is the server."""
    version: str
    """As plans and people are told."""
    download_bytes: int
    disk_bytes: int
    gpu_disk_bytes: int
    """While it is built, source and objects together: for the CPU alone, and for one kind of accelerator."""
    core_seconds: float
    gpu_core_seconds: float
    """Processor time of a whole build, likewise."""
    basis: str
    """Where these figures are from."""
    brings: tuple[tuple[str, str], ...] = ()
    """Instruction sets that it uses and the ready-made one does not, each with what that was seen to bring."""


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine takes beside weights and cache; a few named constants with their source."""

    process_bytes: int = 0
    """Of the host's memory: interpreter and libraries."""
    device_bytes: int = 0
    """Of each device's memory: the driver's context, workspaces, captured graphs."""
    prefill_tokens: int | None = None
    """Prompt tokens that are computed at once; `None`: the whole prompts of all requests."""
    mlp_copies: float = 3.0
    """Rows of the MLP's width that are alive at once for each of those tokens: gate, up and their product."""
    hidden_copies: float = 2.0
    logits_for_all: bool = False
    """Whether a row of logits is made for each of them, and not only for the last."""
    share: float = 1.0
    """Of a device's free memory, what the engine may take."""
    share_of: Literal["free", "total"] = "free"
    """What the engine's own option for that share counts from, when it starts: the free memory of a device, or all."""
    spread: float
    """The band around all of this, up and down."""
    source: str


class Features(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's row in the map: a few words for each column. "Feature checklists are maps, not proof." """

    batching: str
    kv_cache: str
    quantization: str
    hardware: str
    structured_output: str
    multi_node: str
    server: str
    """The server that it brings along, or whose it is."""
    maintained: str
    """active, or since when not."""
    source: str
    """Where all this was read, with version or date."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A failure that a log line explains."""

    message: str
    hint: str
    lasting: bool = True
    """Whether starting again would only fail again."""


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine's own metrics say. `None` is what this engine or version does not tell."""

    running: float | None = None
    waiting: float | None = None
    kv_use: float | None = None
    preemptions: float | None = None
    """Since it was started, as are those below."""
    cache_hits: float | None = None
    """Prompt tokens (or blocks of them) that a prefix cache held already, of those in `cache_queries`."""
    cache_queries: float | None = None


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """What of a machine an engine computes on: its accelerators, which are taken to be alike, or its CPU."""

    device: Device
    count: int
    chip: Chip | None = None
    """What the vendor says of it, where it is known."""
    features: frozenset[str] = frozenset()
    """fp8, fp4, bf16: what its matrix units take."""
    capability: tuple[int, int] | None = None
    """CUDA's compute capability."""


class Engine:
    """The interface. Adding an engine is one file with a class that fills in these answers."""

    id: ClassVar[str]
    name: ClassVar[str]
    spellings: ClassVar[tuple[str, ...]] = ()
    """What else people call it, in small letters and digits only; programs that are a shell around it included."""
    spelling_pattern: ClassVar[str | None] = None
    """A regular expression for names that spellings cannot list; it is held against the beginning of a text."""
    version: str | None = None
    """The pinned version that plans are made for; of an engine from `at`, the one that was named."""
    checked_versions: ClassVar[tuple[str, ...]] = ()
    """Older versions whose options were checked too, the newest first."""
    is_version_named: bool = False
    """Whether somebody asked for this very version."""
    recipe: ClassVar[Recipe | None] = None
    """`None`: planned for, but not installed by this version of bedplate."""
    overlays: ClassVar[tuple[OverlayRecipe, ...]] = ()
    """Versions that are bundled for machines that have a PyTorch already."""
    build: ClassVar[SourceBuild | None] = None
    """How it is built for a machine of its own; `None`: it is not built by bedplate."""
    formats: ClassVar[tuple[str, ...]] = ()
    """Weight formats that it loads as they are."""
    converts: ClassVar[tuple[str, ...]] = ()
    """Formats that it, or a tool of its own, makes one of `formats` of."""
    vendors: ClassVar[tuple[str, ...]] = ()
    """Whose accelerators it computes on."""
    cpu: ClassVar[bool] = False
    """Whether it computes on a CPU alone."""
    systems: ClassVar[tuple[str, ...]] = ("linux",)
    capability: ClassVar[tuple[int, int]] = (0, 0)
    """The least CUDA compute capability that this version's kernels are built for."""
    tasks: ClassVar[tuple[str, ...]] = ("generate",)
    ways: ClassVar[tuple[Way, ...]] = ()
    """How it divides a model among devices; without any it takes one device."""
    paged: ClassVar[bool] = False
    """Whether cache is taken as requests grow, so that room for more of them costs nothing until they come."""
    offloads: ClassVar[bool] = False
    """Whether it keeps a part of the weights on the host."""
    built_for: ClassVar[tuple[Device, ...]] = ("cpu",)
    """What the packages of its recipe compute on; other devices need a build of their own."""
    effort: ClassVar[int] = 1
    """How much machinery it brings, from 1 (one program) to 5: of engines that serve alike, the least wins."""
    features: ClassVar[Features | None] = None
    supervised_env: ClassVar[dict[str, str]] = {}
    """Beside the launch's own environment, what helps the supervisor and would only confuse a person."""
    compile_caches: ClassVar[tuple[str, ...]] = ()
    """Environment variables with the folders where it keeps what it compiled, so that a later start finds it."""
    uses: ClassVar[MemoryUse] = MemoryUse(spread=1.0, source="not known for this engine")
    highest_port: ClassVar[int] = HIGHEST_PORT
    """Of those that it can be told to listen on."""
    max_slots: ClassVar[int | None] = None
    """Requests that it computes at once at the most, whatever the memory."""
    default_slots: ClassVar[int] = 1
    """Requests that it is ready for when nobody says how many come."""
    variable_prefixes: ClassVar[tuple[str, ...]] = ()
    """What its environment variables begin with: `bedplate doctor` shows those that are set."""
    key_variable: ClassVar[str | None] = None
    """The environment variable from which it takes the key that it then asks of its clients."""
    strength: ClassVar[str] = ""
    """When it is the right choice, in the words of the hint behind a refusal."""
    compiles_kernels: ClassVar[bool] = False
    """Whether it compiles its kernels where it runs, and so needs a compiler there."""
    flags: ClassVar[AdviceFlags] = AdviceFlags()
    noted: ClassVar[NotedOptions] = NotedOptions()
    runs_engine: ClassVar[str | None] = None
    """The id of the engine that it starts for the work: figures of that one are figures of both."""
    table_names: ClassVar[TableNames | None] = None
    estimate: ClassVar[EstimateTraits] = EstimateTraits()
    metric_names: ClassVar[MetricNames | None] = None
    """`None`: it reports nothing of its load that an autoscaler could read."""
    container: ClassVar[ContainerTraits] = ContainerTraits()
    dynamo: ClassVar[DynamoWorker | None] = None
    """`None`: Dynamo has no worker for it."""
    ray: ClassVar[RayWorker | None] = None
    """`None`: Ray Serve LLM does not run it."""
    cloned: ClassVar[ClonedProgram | None] = None
    node_starter: ClassVar[str | None] = None
    """What starts its ranks on several nodes, where its own command on each of them does not."""

    def at(self, version: str) -> Engine:
        """The same engine in another version: launch lines and plans are those of that version."""
        one = copy.copy(self)
        one.version, one.is_version_named = version, True
        return one

    @property
    def pinned_version(self) -> str | None:
        """The version that bedplate installs by itself."""
        return type(self).version

    def version_of(self, plan: Plan) -> str | None:
        """The version that a plan was made for."""
        return self.version if plan.engine_version in NO_VERSION else plan.engine_version

    def options_version(self, version: str | None) -> str | None:
        """The checked version whose options hold for `version`: itself, else the newest before it, else the oldest."""
        known = [one for one in (self.pinned_version, *self.checked_versions) if one is not None]
        if version is None or not known or version in known:
            return version if version in known else self.pinned_version
        before = [one for one in known if _numbers(one) <= _numbers(version)]
        return max(before, key=_numbers) if before else min(known, key=_numbers)

    def refuse(self, hardware: Hardware, model: Model, workload: Workload) -> Refusal | None:
        """Why it cannot run here, or not this model or task; `None`: it can. Whether it should is for the rules."""
        if hardware.os not in self.systems:
            return self.refusal("impossible", f"does not run on {hardware.os}", f"{_either(self.systems)}")
        if self.target(hardware) is None:
            return self._no_hardware(hardware)
        if workload.task not in self.tasks:
            return self.refusal("impossible", f"does not serve models that {workload.task}", self.strength)
        if model.format not in (*self.formats, *self.converts, "facts"):
            loads = _either(tuple(name.upper() if len(name) < 5 else name for name in self.formats))
            return self.refusal("impossible", f"loads {loads}, not {model.format}", "the same model in such a format")
        return None

    def target(self, hardware: Hardware) -> Target | None:
        """What it would compute on here: accelerators before the CPU; `None` where there is neither."""
        cards = cards_of(hardware, self.vendors)
        first = cards[0] if cards else None
        chip = chip_of(first) if first is not None else None
        capability = _version(first.compute_capability or (chip.capability if chip else None)) if first else None
        if first is not None and (capability is None or capability >= self.capability):
            return Target(
                device=DEVICES.get(first.vendor, "cpu"),
                count=len(cards),
                chip=chip,
                features=chip.features if chip is not None else frozenset(),
                capability=capability,
            )
        return Target(device="cpu", count=1) if self.cpu else None

    def weights(self, target: Target, model: Model, workload: Workload) -> tuple[Weights, ...]:
        """The forms in which it can be given the model on this target, the most faithful first.

        Files that are quantized already are taken as they are.
        """
        if model.format in self.formats:
            return (Weights(label=model.quantization or "BF16", made="as it is", format=model.format),)
        return ()

    def settle(self, hardware: Hardware, model: Model, workload: Workload) -> Settings:
        """The largest settings that serve this work here, whether or not they fit."""
        target = self.target(hardware)
        asked = workload.in_flight()
        stated = workload.concurrency is not None or workload.users > 1
        slots = asked if stated else max(asked, self.default_slots)
        return Settings(
            slots=min(slots, self.max_slots) if self.max_slots else slots,
            context_tokens=min(workload.request_tokens, model.max_context or workload.request_tokens),
            device=target.device if target is not None else "cpu",
            memory_share=self.memory_share(hardware),
        )

    def memory_share(self, hardware: Hardware) -> float | None:
        """The engine's option for its share of a device's memory; `None` if it has none.

        An option that counts from the total must leave what other processes hold: the engine refuses to start else.
        """
        share = self.uses.share
        if share >= 1:
            return None
        if self.uses.share_of == "total":
            for card in cards_of(hardware, self.vendors):
                if card.memory_bytes and card.free_bytes is not None:
                    free = card.free_bytes / card.memory_bytes
                    if free < self.uses.share + SHARE_MARGIN:
                        share = min(share, math.floor(100 * self.uses.share * free) / 100)
        return max(share, SHARE_MARGIN)

    def cache_bits(self, model: Model) -> int:
        """Of each key and value on a host, as long as nobody asks for fewer."""
        return 16

    def overhead_bytes(self, model: Model, settings: Settings) -> float:
        """What it takes on its host beside weights and cache."""
        return self.uses.process_bytes + self.activation_bytes(model, settings.context_tokens)

    def activation_bytes(self, model: Model, prompt_tokens: int) -> float:
        """What computing a prompt holds at once, 16-bit, on a device that has all of the width."""
        tokens = min(prompt_tokens, self.uses.prefill_tokens or prompt_tokens)
        width = model.intermediate_size or 4 * (model.hidden_size or 0)
        if model.num_experts_active and model.moe_intermediate_size:
            width = model.moe_intermediate_size * model.num_experts_active
        rows = self.uses.mlp_copies * width + self.uses.hidden_copies * (model.hidden_size or 0)
        logits = (model.vocab_size or 0) * (tokens if self.uses.logits_for_all else 1)
        return 2.0 * (tokens * rows + logits)

    def launch(self, plan: Plan, port: int) -> Launch:
        """The exact command on a machine that has it installed, what to do before, and how to tell that it is ready."""
        raise NotImplementedError

    def needs_stable_key(self, version: str) -> bool:
        """Whether this version's compile cache depends on the key that protects its port."""
        return False

    def recipe_for(self, device: Device) -> Recipe | None:
        """The recipe for what the plan computes on, where packages differ."""
        return self.recipe

    def requirements(self, settings: Settings) -> tuple[str, ...]:
        """What `uv pip install` is given for what the plan computes on; a recipe's packages, unless cards differ."""
        recipe = self.recipe_for(settings.device)
        return recipe.packages if recipe is not None else ()

    def variants(self, hardware: Hardware, device: Device) -> tuple[Variant, ...]:
        """How `build` is configured for this machine, the best first; none where it cannot be built for it."""
        return ()

    def by_hand(self, plan: Plan) -> tuple[Preparation, ...]:
        """Those steps of a launch that build the engine itself, which nobody takes who has a build already."""
        return ()

    def connections(self, settings: Settings) -> int | None:
        """How many connections its HTTP server answers at once; `None`: as many as come."""
        return None

    def beside_others(self, settings: Settings) -> dict[str, str]:
        """Variables for one of several of it on the same processors, which would otherwise take the same ones."""
        return {}

    def launch_on_node(self, plan: Plan, port: int, *, nodes: int, rank: int, leader: str) -> Launch | None:
        """The command of one node of several; `None`: it does not divide a model among nodes."""
        return None

    def advice_flags(self, device: str | None) -> AdviceFlags:
        """The flags on this device, where names differ by it."""
        return self.flags

    def is_current(self, version: str, backend: str) -> bool:
        """Whether a published figure is of a version that the fitted efficiencies are for, and not of an older one."""
        return True

    def noted_chunk(self, notes: Mapping[str, str], scenario: str) -> int | None:
        """Prompt tokens computed at once, by the notes of a published row; `None`: as usual."""
        return None

    def noted_fusion(self, notes: Mapping[str, str], current: bool) -> bool:
        """Whether attention was fused, by the notes of a published row."""
        return True

    def published_image(self, device: Device, gfx: str | None, arch: str) -> ContainerImage | None:
        """The image that its project publishes for a device; `None`: one is built of the recipe, where that can be."""
        return None

    def in_container(self, launch: Launch, image: str) -> Launch:
        """The launch as it reads inside of the image, where programs or folders differ."""
        return launch

    def container_files(self, plan: Plan) -> dict[str, str]:
        """Files that its launch names, by name."""
        return {}

    def stop_options(self, seconds: int) -> tuple[str, ...]:
        """Options by which it finishes within so many seconds what it has begun when it is asked to end."""
        return ()

    def health_command(self, url: str) -> tuple[str, ...]:
        """A command of the image that succeeds when the server answers."""
        return ("python3", "-c", f"import urllib.request as web; web.urlopen('{url}', timeout=8)")

    def store_step(self, plan: Plan) -> StoreStep | None:
        """How the model gets into the engine's own store; `None`: it serves files as they are."""
        return None

    def container_conversion(self, plan: Plan, source: str, made: str) -> ContainerConversion | None:
        """How weights are converted in a container, where the steps of the launch do not run there as they are."""
        return None

    def dynamo_options(self, role: str, task: str) -> tuple[str, ...]:
        """What a Dynamo worker is given for its role: worker, prefill or decode."""
        return ()

    def dynamo_files(self, plan: Plan, role: str) -> dict[str, str]:
        """The files of `container_files`, as a Dynamo worker of this role wants them."""
        return self.container_files(plan)

    def installation(self) -> tuple[Preparation, ...]:
        if self.recipe is None:
            return ()
        what, where = " ".join(self.recipe.packages), "an environment of its own"
        download, disk = self.recipe.download_bytes, self.recipe.disk_bytes
        return (Preparation(kind="install", what=what, where=where, download_bytes=download, disk_bytes=disk),)

    def knobs(self, hardware: Hardware, plan: Plan) -> tuple[Knob, ...]:
        """What `bedplate tune` may turn of it here; none: it is not tuned."""
        return ()

    def drafting(self, model: str) -> tuple[str, ...]:
        """The options by which a small model of the same tokens guesses ahead; none: it cannot."""
        return ()

    def progress(self, line: str) -> float | None:
        """How much of the model is loaded, when this log line says so."""
        return None

    def explain(self, log: str) -> Failure | None:
        """The known failure that this log shows."""
        return None

    def read(self, metrics: str) -> EngineState:
        """The engine's state from its own Prometheus text."""
        return EngineState()

    def refusal(self, kind: str, why: str, hint: str | None = None) -> Refusal:
        return msgspec.convert({"engine": self.id, "kind": kind, "why": why, "hint": hint}, Refusal)

    def _no_hardware(self, hardware: Hardware) -> Refusal:
        whose = _either(tuple(VENDOR_NAMES.get(vendor, vendor) for vendor in self.vendors))
        if any(card.vendor in self.vendors for card in hardware.accelerators):
            least = ".".join(map(str, self.capability))
            return self.refusal(
                "impossible", f"its kernels need compute capability {least} or newer", "a newer NVIDIA GPU"
            )
        return self.refusal("impossible", f"needs {_article(whose)} {whose} GPU", self.strength)


def cards_of(hardware: Hardware, vendors: Iterable[str]) -> list[Accelerator]:
    """The GPUs of these vendors; chips that are made for neural networks alone run none of these engines."""
    return [card for card in hardware.accelerators if card.vendor in vendors and not _is_special(card)]


def _is_special(card: Accelerator) -> bool:
    chip = chip_of(card)
    return chip is not None and chip.kind == "accelerator"


def everyday_context(model: Model, workload: Workload) -> int:
    """The longest request where cache is set aside for it: as asked, else what most conversations stay below."""
    asked = workload.context_tokens
    wanted = asked if asked is not None else max(workload.request_tokens, EVERYDAY_CONTEXT)
    return min(wanted, model.max_context or EVERYDAY_CONTEXT)


def known_failure(log: str, known: Iterable[tuple[str, Failure]]) -> Failure | None:
    """The first of these patterns that the log shows; what its groups found is put into the words."""
    for pattern, failure in known:
        if found := re.search(pattern, log):
            words = found.groupdict()
            return Failure(
                message=failure.message.format(**words), hint=failure.hint.format(**words), lasting=failure.lasting
            )
    return None


def made_path(plan: Plan) -> str:
    """Where a conversion puts the model: beside whoever runs the command."""
    name = f"{plan.model.short_name}-{plan.weights.label}"
    return f"{name}.gguf" if plan.weights.format == "gguf" else name


def source_folder(plan: Plan) -> str:
    """The folder with the original weights that a conversion reads."""
    return plan.model_path if plan.model.files else plan.model.short_name


def fetching(plan: Plan) -> tuple[Preparation, ...]:
    """The download of original weights that are not here, for tools that take a folder and no hub id."""
    if plan.model.files:
        return ()
    folder, size = source_folder(plan), plan.model.weight_bytes
    argv = ("hf", "download", plan.model.name, "--local-dir", folder)
    return (
        Preparation(
            kind="download", what=plan.model.name, where=folder, download_bytes=size, disk_bytes=size, argv=argv
        ),
    )


def installing_within(helper: Engine) -> tuple[Preparation, ...]:
    """The environment of another engine, which a step of this one's plan runs in."""
    return tuple(msgspec.structs.replace(step, within=helper.id) for step in helper.installation())


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(one) for one in re.findall(r"\d+", version)[:4])


def _version(text: str | None) -> tuple[int, int] | None:
    major, _, minor = (text or "").partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def _either(words: tuple[str, ...]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _article(word: str) -> str:
    return "an" if word[:1] in "AEIONaeio" else "a"
