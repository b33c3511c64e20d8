"""A service as containers: image, command, files, timeouts and resources, independent of the target."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath

from bedplate.decide.rules import STANDARD_ENGINE
from bedplate.deploy.images import HUB_PACKAGE, PYTHON, Image, choose_image
from bedplate.deploy.platform import PlacedService, count_node_cards, explain_missing_network
from bedplate.engines import Engine, load_engines
from bedplate.engines import get_engine as engine_by_id
from bedplate.engines.base import get_converted_path
from bedplate.engines.shared import COMPRESSOR
from bedplate.engines.traits import MODELS, MetricNames
from bedplate.errors import NotPossible, UsageError
from bedplate.facts.chips import Chip, find_accelerator_chip
from bedplate.values import Hardware, Launch, Plan, Preparation, Workload, replace_fields
from bedplate.values.decision import list_part_names
from bedplate.values.fit import DeviceNeed
from bedplate.values.intent import DeployTarget
from bedplate.values.quoting import join_posix_shell, quote_posix_shell
from bedplate.values.units import format_seconds, format_size

GIB = 1 << 30
SETTINGS = "/etc/engine"
PORT = 8000
SLOW_VOLUME_BYTES_S = 0.4e9
"""Read bandwidth that is assumed for a slow network volume: about 3 Gbit/s."""
NODE_SHARE = 0.9
"""Share of a node's cores and memory that pods can use."""
SLOW_HUB_BYTES_S = 0.1e9
"""Bandwidth that is assumed for the download from the model hub: about 1 Gbit/s."""
PATIENCE = 1.5
INSTALL = "pip install"
"""A start may take this many times as long as estimated."""
MOST_TIMES = 4
"""Upper bound of autoscaling, as a multiple of the planned replicas, even if the pool has more free GPUs."""
SLOW_TPOT_S = 0.1
"""TPOT that is assumed when there is no estimate."""
LEAST_GRACE_S = 60
DRAIN_S = 15
"""Time until load balancers have removed a terminating pod from their endpoints."""


@dataclass(frozen=True)
class VolumeStep:
    """One step that puts the model onto the volume before the first start."""

    name: str
    image: str
    command: tuple[str, ...]
    note: str
    cards: int = 0
    env: dict[str, str] = field(default_factory=dict)
    sources: tuple[HubSource, ...] = ()
    local: LocalSource | None = None


@dataclass(frozen=True)
class LocalSource:
    """A model on this machine, and where it is on the volume."""

    name: str
    files: tuple[str, ...]
    path: str
    """The folder, or the first GGUF file."""

    @property
    def marker(self) -> str:
        return f"{self.path}.copied"


@dataclass(frozen=True)
class HubSource:
    """Files of a model hub, and where they are on the volume."""

    repository: str
    path: str
    revision: str | None = None
    """A commit or a branch; `None`: the newest."""
    patterns: tuple[str, ...] = ()
    """The files; empty: all."""

    @property
    def marker(self) -> str:
        """The file that says that all were copied. Files of another revision are on another volume."""
        path = self.path if self.path != MODELS else f"{MODELS}/files"
        return f"{path}.{self.revision}.copied" if self.revision is not None else f"{path}.copied"

    def write_download(self) -> str:
        """Write the call of the hub client's `snapshot_download`, as `get`."""
        wanted = f"local_dir={self.path!r}"
        wanted += f", revision={self.revision!r}" if self.revision is not None else ""
        wanted += f", allow_patterns={list(self.patterns)!r}" if self.patterns else ""
        return f"get({self.repository!r}, {wanted})"


@dataclass(frozen=True)
class NodeSelector:
    """Node label and values to select, labels that a node must not have, and the extended resource to request."""

    resource: str | None
    label: str
    values: tuple[str, ...]
    """The usual value first: a Kueue flavor has only one."""
    avoids: tuple[str, ...] = ()


@dataclass(frozen=True)
class ServiceContainers:
    placed: PlacedService
    engine: Engine
    plan: Plan
    """The plan of one replica, with paths inside the container."""
    launch: Launch
    image: Image
    replicas: int
    most_replicas: int
    nodes: int
    """Pods per replica. More than one: the weights are sharded over them."""
    cards: int
    """GPUs per pod."""
    files: dict[str, str]
    """Configuration files, mounted under SETTINGS."""
    steps: tuple[VolumeStep, ...]
    selector: NodeSelector
    storage_class: str | None = None
    is_read_elsewhere: bool = False
    """Whether pods on other nodes than the engine's read the volume, too."""

    @property
    def sources(self) -> tuple[HubSource, ...]:
        return tuple(source for step in self.steps for source in step.sources)

    @property
    def local_sources(self) -> tuple[LocalSource, ...]:
        return tuple(step.local for step in self.steps if step.local is not None)

    @property
    def name(self) -> str:
        return self.placed.name

    @property
    def access_mode(self) -> str:
        is_shared = self.most_replicas > 1 or self.nodes > 1 or self.is_read_elsewhere
        return "ReadWriteMany" if is_shared else "ReadWriteOnce"

    @property
    def model_path(self) -> str:
        """The file or folder on the volume that the engine loads."""
        if self.engine.container.store is not None:
            return self.engine.container.store
        if self.plan.weights.made == "converted":
            return make_volume_path(get_converted_path(self.plan))
        return self.plan.model_path

    @property
    def metrics(self) -> MetricNames | None:
        return self.engine.metric_names

    @property
    def weight_bytes(self) -> int:
        """Bytes that the engine loads: the converted weights on all devices of a replica, or the size of the files."""
        if self.plan.weights.made != "converted" or self.placed.decision.memory is None:
            return self.plan.model.weight_bytes
        layout = self.plan.parallelism
        cards = max(1, layout.tensor * layout.pipeline)
        needs = self.placed.decision.memory.devices
        return sum(need.weights_bytes * min(need.count, cards) for need in needs)

    @property
    def load_s(self) -> float:
        """Time from the container's start to its first answer, on a slow volume."""
        return self.engine.container.start_s + self.weight_bytes / self.nodes / SLOW_VOLUME_BYTES_S

    @property
    def load_words(self) -> str:
        share = f", sharded over {self.nodes} pods," if self.nodes > 1 else ""
        return (
            f"expected start time {format_seconds(self.load_s)}: {format_size(self.weight_bytes)} of "
            f"weights{share} from a volume of "
            f"{format_size(SLOW_VOLUME_BYTES_S)}/s, plus about {format_seconds(self.engine.container.start_s)} "
            f"for {self.engine.name}"
        )

    @property
    def prepare_s(self) -> float:
        """Time until the model is on the volume: download, and conversion at the speed of a slow volume."""
        download = self.placed.plan.model.weight_bytes / SLOW_HUB_BYTES_S
        converts = self.plan.weights.made == "converted"
        moved = self.placed.plan.model.weight_bytes + self.weight_bytes if converts else 0
        return download + moved / SLOW_VOLUME_BYTES_S

    @property
    def longest_s(self) -> float:
        """Duration of the longest allowed response at the slow end of the estimate."""
        expected = self.placed.decision.estimate
        tpot_s = expected.tpot_ms.high / 1000 if expected.tpot_ms is not None else SLOW_TPOT_S
        ttft_s = expected.ttft_ms.high / 1000 if expected.ttft_ms is not None else 10 * SLOW_TPOT_S
        return ttft_s + self.longest_tokens * tpot_s

    @property
    def longest_tokens(self) -> int:
        work = self.plan.workload
        if work.task != "generate":
            return 1
        return max(work.output_tokens, self.plan.settings.context_tokens - work.prompt_tokens)

    @property
    def grace_s(self) -> int:
        return _round_up(DRAIN_S + self.longest_s * 1.2, 30, LEAST_GRACE_S)

    @property
    def grace_words(self) -> str:
        known = self.placed.decision.estimate.tpot_ms is not None
        basis = "at the slow end of the estimate" if known else "at an assumed 100 ms per token"
        response = (
            f"the longest response ({self.longest_tokens:,} tokens)" if self.longest_tokens > 1 else "one request"
        )
        return (
            f"{response} takes {format_seconds(self.longest_s)} {basis}; plus {DRAIN_S} s until no new requests arrive"
        )

    @property
    def start_failures(self) -> int:
        """Failed startup probes, one every 10 s, before the container is restarted."""
        return max(6, math.ceil(self.load_s * PATIENCE / 10))

    @property
    def request_capacity(self) -> int:
        """Concurrent requests that one replica runs without queueing."""
        resident = self.placed.decision.max_concurrency // max(1, self.placed.decision.parallelism.data)
        return max(1, min(self.plan.settings.slots, resident or self.plan.settings.slots))

    @property
    def shm_bytes(self) -> int:
        return 0 if self.plan.settings.device == "cpu" else (16 if self.cards > 1 else 2) * GIB

    @property
    def cpu_cores(self) -> int:
        if self.plan.settings.device == "cpu":
            wanted = self.plan.settings.threads or self.placed.node.cpu.allowed_physical_cores
            return max(1, min(wanted, int(NODE_SHARE * self.placed.node.cpu.logical_cores)))
        each = max(1, min(8, int(NODE_SHARE * self.placed.node.cpu.logical_cores / count_node_cards(self.placed))))
        return max(2, each * self.cards)

    @property
    def memory_bytes(self) -> int:
        """Host memory: processes, shared memory, offloaded weights, and page cache for loading."""
        host = sum(need.high_bytes for need in self._list_device_needs() if need.device == "host")
        processes = round(1.5 * self.engine.uses.process_bytes * (self.cards + 1))
        if self.plan.settings.device == "cpu":
            return _round_up_to_gib(1.1 * max(host, processes))
        return _round_up_to_gib(host + processes + self.shm_bytes + 8 * GIB)

    def _list_device_needs(self) -> tuple[DeviceNeed, ...]:
        memory = self.placed.decision.memory
        return memory.devices if memory is not None else ()

    @property
    def volume_bytes(self) -> int:
        """Downloaded and converted weights, plus 20% headroom."""
        disks = [step.disk_bytes or 0 for step in self.launch.prepare if step.kind == "convert"]
        return _round_up_to_gib(1.2 * (self.plan.model.weight_bytes + sum(disks)), 10)

    @property
    def program(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Command and arguments, as `--option=value` where the engine accepts that form."""
        argv = self.launch.argv
        cut = next((index for index, word in enumerate(argv) if word.startswith("--")), len(argv))
        command, rest = argv[:cut], argv[cut:]
        rest = (*rest, *self.engine.get_stop_options(self.grace_s - DRAIN_S - 5))
        return command, tuple(_join_options(rest)) if self.engine.container.joins_values else rest


def describe_containers(
    placed: PlacedService, deploy: DeployTarget, *, all_replicas: bool = False
) -> ServiceContainers:
    """Describe the containers of one service; with `all_replicas`, one container runs all of them."""
    engine = engine_by_id(placed.plan.engine)
    device = placed.plan.settings.device
    if placed.node.os != "linux":
        raise _make_refusal(placed, f"containers need Linux, but {placed.pool.name} runs {placed.node.os}")
    _refuse_adapters(placed)
    layout = placed.plan.parallelism
    each = layout.tensor * layout.pipeline if device != "cpu" else 0
    if reason := explain_missing_network(placed, each):
        raise NotPossible(
            reason,
            hint="add network: InfiniBand NDR 400 to the pool, or use larger nodes or a smaller quantization",
        )
    first = placed.node.accelerators[0] if placed.node.accelerators and device != "cpu" else None
    chip = find_accelerator_chip(first) if first is not None else None
    gfx = chip.gfx if chip is not None else None
    image = choose_image(engine, placed.plan.settings, gfx, placed.node.cpu.arch, deploy.registry)
    if image is None:
        raise _make_refusal(placed, f"{engine.name} has no image for {device}, and none can be built from its packages")
    replicas = 1 if all_replicas else max(1, layout.data) * placed.copies
    plan = _put_model_on_volume(placed.plan, data=layout.data if all_replicas else 1)
    cards = each * (layout.data if all_replicas else 1)
    nodes = max(1, -(-cards // count_node_cards(placed))) if cards else 1
    launch = _write_launch(engine, plan, image)
    spare = placed.spare // each if each else placed.spare
    result = ServiceContainers(
        placed=placed, engine=engine, plan=plan, launch=launch, image=image, replicas=replicas,
        most_replicas=min(replicas + spare, MOST_TIMES * replicas), nodes=nodes, cards=-(-cards // nodes),
        files=engine.list_container_files(plan), steps=(),
        storage_class=deploy.storage_class,
        selector=make_node_selector(placed.node, chip, placed.pool.node_label, on_cpu=device == "cpu"),
    )  # fmt: skip
    return replace(result, steps=tuple(_list_steps(result, deploy)))


def find_engines(supports: Callable[[Engine], object]) -> list[Engine]:
    """List the engines that a platform supports: the default engine first, then by operating effort."""
    found = [one for one in load_engines().values() if supports(one) is not None]
    return sorted(found, key=lambda one: (one.id != STANDARD_ENGINE, one.effort, one.id))


def name_architecture(node: Hardware) -> str:
    """Name the architecture of a node as the label ARCH_LABEL and the platforms of images do."""
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(node.cpu.arch, node.cpu.arch)


def make_node_selector(
    node: Hardware, chip: Chip | None, label: str | None = None, *, on_cpu: bool = False
) -> NodeSelector:
    """Select nodes by the labels of the vendors' GPU feature discovery, or by the label that the pool states."""
    first = node.accelerators[0] if node.accelerators and not on_cpu else None
    vendor = first.vendor if first is not None else None
    resource = {None: None, "amd": "amd.com/gpu", "intel": "gpu.intel.com/xe"}.get(vendor, "nvidia.com/gpu")
    if label is not None:
        name, value = _split_label(label)
        return NodeSelector(resource, name, (value,))
    if first is None:
        # A service that needs no GPU would take the cores of nodes that have them.
        avoids = (*PRODUCT_LABELS.values(), AMD_LABEL) if not node.accelerators else ()
        return NodeSelector(None, ARCH_LABEL, (name_architecture(node),), avoids)
    if vendor == "intel":
        return NodeSelector(resource, "intel.feature.node.kubernetes.io/gpu", ("true",))
    names = chip.driver_names if chip is not None and chip.driver_names else (first.name,)
    # AMD's labeller writes the name of a module with its form: AMD_Instinct_MI300X_OAM.
    names = tuple(sorted(names, key=lambda name: not name.endswith(" OAM"))) if vendor == "amd" else names
    values = tuple(_make_label(name, "_" if vendor == "amd" else "-") for name in names)
    valid = tuple(value for value in values if _LABEL_VALUE.fullmatch(value))
    return NodeSelector(resource, PRODUCT_LABELS["amd" if vendor == "amd" else "nvidia"], valid)


ARCH_LABEL = "kubernetes.io/arch"
PRODUCT_LABELS = {"nvidia": "nvidia.com/gpu.product", "amd": "amd.com/gpu.product-name"}
AMD_LABEL = "feature.node.kubernetes.io/amd-gpu"
"""Set by AMD's GPU operator, also on nodes with different cards, which have no label of one product."""
_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_LABEL_NAME = re.compile(rf"([a-z0-9.-]{{1,253}}/)?{_LABEL_VALUE.pattern}")


def _split_label(label: str) -> tuple[str, str]:
    name, _, value = label.partition("=")
    if not _LABEL_NAME.fullmatch(name) or not _LABEL_VALUE.fullmatch(value):
        raise UsageError(
            f"{label!r} is not a node label", hint="write node_label: NAME=VALUE, as kubectl get nodes -L NAME shows it"
        )
    return name, value


def _make_label(name: str, space: str) -> str:
    return name.replace(" ", space).replace("(", "").replace(")", "")[:63]


def _make_refusal(placed: PlacedService, reason: str) -> NotPossible:
    return NotPossible(
        f"{placed.name} cannot run in containers: {reason}",
        hint="choose another engine with --engine, or write a shell script with --emit command",
    )


def _put_model_on_volume(plan: Plan, data: int) -> Plan:
    """Return the plan with the model's path on the volume."""
    model, published = plan.model, plan.weights.published
    if published is not None and not model.files:
        kept = f"{make_volume_path(published.folder)}/{published.file or 'config.json'}"
    elif model.files:
        first = PurePath(model.files[0])
        kept = (
            make_volume_path(first.name)
            if first.suffix == ".gguf"
            else f"{make_volume_path(first.parent.name)}/{first.name}"
        )
    elif model.format == "gguf" or (plan.weights.format == "gguf" and plan.weights.made == "as it is"):
        kept = make_volume_path(f"{model.short_name}.gguf")
    else:
        kept = f"{make_volume_path(model.short_name)}/config.json"
    return replace_fields(
        plan,
        model=replace_fields(model, files=(kept,), projector=None),  # it is not on the volume
        workload=_put_adapters_on_volume(plan.workload),
        parallelism=replace_fields(plan.parallelism, data=data),
    )


def _put_adapters_on_volume(workload: Workload) -> Workload:
    if not workload.names_adapters:
        return workload
    moved = tuple(
        replace_fields(one, path=make_volume_path(one.served_name), name=one.served_name) for one in workload.adapters
    )
    return replace_fields(workload, lora_adapters=moved)


def _refuse_adapters(placed: PlacedService) -> None:
    """LoRA adapters are downloaded together with the model, so both must be on a model hub."""
    work, model = placed.plan.workload, placed.plan.model
    if not work.names_adapters:
        return
    if any(not one.is_on_hub for one in work.adapters) or model.files or "/" not in model.name:
        raise _make_refusal(placed, "its LoRA adapters or its model are not on a model hub")
    if placed.plan.weights.format == "gguf":
        raise _make_refusal(placed, "its LoRA adapters must first be converted to GGUF")


def with_slots(unit: ServiceContainers, slots: int) -> ServiceContainers:
    """Return the service with this many slots per replica."""
    plan = replace_fields(unit.plan, settings=replace_fields(unit.plan.settings, slots=slots))
    return replace(unit, plan=plan, launch=_write_launch(unit.engine, plan, unit.image))


def make_volume_path(name: str) -> str:
    """Return the path on the volume; characters that are special to a shell become dashes."""
    return f"{MODELS}/{re.sub(r'[^A-Za-z0-9._-]', '-', name).lstrip('.') or 'model'}"


def _write_launch(engine: Engine, plan: Plan, image: Image) -> Launch:
    """Return the engine's launch command with paths and addresses inside its container."""
    launch = engine.adapt_to_container(engine.launch(plan, PORT), image.name)
    made = get_converted_path(plan) if plan.weights.made == "converted" else None
    named = {"127.0.0.1": "0.0.0.0"}  # noqa: S104
    named |= {name: f"{SETTINGS}/{name}" for name in engine.list_container_files(plan)}
    named |= {made: make_volume_path(made)} if made is not None else {}
    argv = [named.get(word, word) for word in launch.argv]
    if argv[0] == "python":
        argv[0] = "python3"
    env = {name: value.replace("127.0.0.1", "0.0.0.0") for name, value in launch.env.items()}  # noqa: S104
    return replace_fields(launch, argv=tuple(argv), env=env)


def _list_steps(unit: ServiceContainers, deploy: DeployTarget) -> Iterator[VolumeStep]:
    """Yield the steps that put the model onto the volume: download or manual copy, then conversion if planned."""
    placed, plan = unit.placed, unit.plan
    if placed.plan.source is not None:
        raise _make_refusal(placed, "its weights must first be dequantized from a GGUF file")
    yield _write_fetch_step(unit, deploy)
    if stored := unit.engine.plan_store_step(plan):
        note = f"import {plan.model.name} into the engine's store as {stored.model}"
        yield VolumeStep("store", unit.image.name, ("sh", "-c", stored.command), note, env=stored.env)
    elif plan.weights.made == "converted":
        step = _write_convert_step(unit)
        if deploy.models == "copy" and INSTALL in step.command[-1]:
            raise _make_refusal(placed, "its weights are converted with packages from an index, which deploy.models "
                                        "copy excludes; use a checkpoint in this format")  # fmt: skip
        yield step


def _write_fetch_step(unit: ServiceContainers, deploy: DeployTarget) -> VolumeStep:
    origin, target = unit.placed.plan.model, unit.plan.model_path
    folder = target if not target.endswith(".gguf") else MODELS
    published = unit.plan.weights.published if not origin.files else None
    if published is None and (origin.files or origin.format in ("gguf", "facts") or "/" not in origin.name):
        where = origin.files[0] if origin.files else origin.name
        local = LocalSource(origin.name, origin.files, target)
        words = (
            f"{where} is not on a model hub: while this container waits, copy it to {target} with kubectl cp -c wait, "
            f"then create the file {local.marker}"
        )
        return replace(_write_wait_step([local.marker], words), local=local)
    first, size = HubSource(origin.name, folder), origin.weight_bytes
    if published is not None:
        size = published.size_bytes
        patterns = tuple(list_part_names(published.file)) if published.file is not None else ()
        path = make_volume_path(published.folder)
        first = HubSource(published.repository, path, published.revision, patterns)
    adapters = zip(unit.placed.plan.workload.adapters, unit.plan.workload.adapters, strict=True)
    found = (first, *(HubSource(one.path, moved.path) for one, moved in adapters if one.is_on_hub))
    pinned = deploy.revisions
    sources = tuple(replace(one, revision=pinned.get(one.repository, one.revision)) for one in found)
    if deploy.models == "copy":
        words = f"{format_size(size)} are copied by hand (models.txt): kubectl cp -c wait, then the marker"
        return replace(_write_wait_step([one.marker for one in sources], words), sources=sources)
    calls = "; ".join(one.write_download() for one in sources)
    code = f"from huggingface_hub import snapshot_download as get; {calls}"
    command: tuple[str, ...] = ("python3", "-c", code)
    if not unit.image.python:
        command = ("uvx", "--from", HUB_PACKAGE, "python", "-c", code)
    note = f"downloads {format_size(size)}; skipped if the files are already on the volume"
    # The engine's image has the hub client; using it here also pulls the image onto the node.
    image = unit.image.name if unit.image.python else PYTHON
    return VolumeStep("fetch", image, command, note, env={"HF_HOME": "/cache"}, sources=sources)


def _write_wait_step(markers: Sequence[str], note: str) -> VolumeStep:
    are_there = " && ".join(f"[ -e {quote_posix_shell(one)} ]" for one in markers)
    return VolumeStep("wait", PYTHON, ("sh", "-c", f"until {are_there}; do sleep 10; done"), note)


def _write_convert_step(unit: ServiceContainers) -> VolumeStep:
    plan, made = unit.plan, unit.model_path
    label, source = plan.weights.label, plan.model_path
    steps = [step for step in unit.launch.prepare if step.kind == "convert"]
    note = f"converts {plan.model.name} to {label}; skipped if the result is already on the volume"
    if own := unit.engine.plan_container_conversion(plan, source, made):
        image, cards = own.image or unit.image.name, unit.cards if own.on_cards else 0
        return VolumeStep("convert", image, ("sh", "-c", _make_atomic(made, own.command)), note, cards=cards)
    if plan.weights.format == "safetensors" and steps and steps[-1].argv[:2] == ("python", "-c"):
        script = steps[-1].argv[2].replace(repr(get_converted_path(plan)), repr(f"{made}.part"))
        command = f"{INSTALL} --quiet --user {COMPRESSOR} && {join_posix_shell(['python3', '-c', script])}"
        return VolumeStep("convert", unit.image.name, ("sh", "-c", _make_atomic(made, command)), note, cards=unit.cards)
    if unit.image.dockerfile is not None and steps and all(step.within is None for step in steps):
        command = " && ".join(_write_command(step, plan, made) for step in steps)
        cards = unit.cards if plan.settings.device != "cpu" else 0
        return VolumeStep("convert", unit.image.name, ("sh", "-c", _make_atomic(made, command)), note, cards=cards)
    raise _make_refusal(
        unit.placed,
        f"no image has the tools that convert weights to {label}; use a checkpoint that is already in {label}",
    )


def _make_atomic(made: str, command: str) -> str:
    """Make a command atomic: it writes `made`.part, which is renamed at the end, so an interrupted job starts again."""
    return f"[ -e {made} ] || (rm -rf {made}.part && {command} && mv {made}.part {made})"


def _write_command(step: Preparation, plan: Plan, made: str) -> str:
    words = [
        f"{made}.part" if word == get_converted_path(plan) else word.replace(get_converted_path(plan), made)
        for word in step.argv
    ]
    return join_posix_shell(["python3" if words[0] == "python" else words[0], *words[1:]])


def _join_options(words: tuple[str, ...]) -> Iterator[str]:
    index = 0
    while index < len(words):
        value, after = (*words[index + 1 : index + 3], "--", "--")[:2]
        # An option with several values is not joined with its first one.
        if words[index].startswith("--") and not value.startswith("--") and after.startswith("--"):
            yield f"{words[index]}={value}"
            index += 2
        else:
            yield words[index]
            index += 1


def _round_up(value: float, step: int, least: int) -> int:
    return max(least, math.ceil(value / step) * step)


def _round_up_to_gib(value: float, step: int = 2) -> int:
    return _round_up(value / GIB, step, step) * GIB
