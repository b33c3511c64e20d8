"""What an engine would refuse: a planned launch as the engine receives it, and the rules that an engine file states."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from bedplate.facts.chips import Chip
from bedplate.values import Accelerator, Hardware, Launch, Model, Plan
from bedplate.values.decision import Device


@dataclass(frozen=True)
class PlannedLaunch:
    """A plan as the engine would receive it: the command line, the model that it loads, and the machine."""

    plan: Plan
    launch: Launch
    hardware: Hardware
    """Without accelerators, if the engine computes on the CPU."""
    loaded: Model
    """The model in the weights that are on the devices after loading."""
    device: Device
    chip: Chip | None
    capability: tuple[int, int] | None
    """CUDA compute capability."""
    cards: tuple[Accelerator, ...]
    """The accelerators that the layout uses, in the order of its ranks."""
    hosts: int
    """Operating systems that the cards of one replica belong to."""

    @property
    def model(self) -> Model:
        """The model before any conversion of the engine."""
        return self.plan.model

    @cached_property
    def options(self) -> Mapping[str, str]:
        """The options of the command line by name; the value of a switch is empty."""
        found: dict[str, str] = {}
        words = self.launch.argv
        for number, word in enumerate(words):
            if not word.startswith("--") or len(word) == 2:
                continue
            name, joined, value = word.partition("=")
            if not joined and number + 1 < len(words) and not words[number + 1].startswith("--"):
                value = words[number + 1]
            found[name] = value
        return found

    def get_values(self, name: str) -> tuple[str, ...]:
        """All words after an option, up to the next option."""
        words = self.launch.argv
        if name not in words:
            return ()
        after = words[words.index(name) + 1 :]
        return tuple(itertools.takewhile(lambda word: not word.startswith("--"), after))

    def get_count(self, name: str | None, default: int = 1) -> int:
        """The value of an option that is a count; `default` if the option is not given."""
        text = self.options.get(name, "") if name is not None else ""
        return int(text) if text.isdigit() else default

    @property
    def is_quantized_while_loading(self) -> bool:
        sixteen = ("BF16", "F16", "F32")
        return self.plan.weights.made == "while loading" and self.plan.weights.label not in sixteen


@dataclass(frozen=True)
class LaunchRule:
    """A check that the engine makes, and the reason why it would not start."""

    id: str
    source: str
    """File and version of the engine that has this check."""
    find_fault: Callable[[PlannedLaunch], str | None]
    """The reason of the refusal; `None`: the engine accepts the launch. The docstring states the rule."""
    hint: str | None = None

    @property
    def sentence(self) -> str:
        return " ".join((self.find_fault.__doc__ or "").split())


def format_capability(launch: PlannedLaunch) -> str:
    return ".".join(map(str, launch.capability)) if launch.capability is not None else "unknown"


def explain_old_method(launch: PlannedLaunch, method: str, least: tuple[int, int] | None) -> str | None:
    """Why the GPU is too old for the kernels of a quantization method; `None`: it is not."""
    if least is None or launch.capability is None or launch.capability >= least:
        return None
    needed = ".".join(map(str, least))
    return f"{method} weights need compute capability {needed}; this one is {format_capability(launch)}"


FP8_EXPERTS_LEAST = (8, 9)
"""Triton compiles its kernels for experts with FP8 weights and activations only from this compute capability on."""


def lacks_expert_kernels(model: Model, device: Device, capability: tuple[int, int] | None) -> bool:
    """Whether these are FP8 experts that Triton's kernels would compute on an NVIDIA GPU without FP8 units."""
    old = device == "cuda" and capability is not None and capability < FP8_EXPERTS_LEAST
    return old and bool(model.num_experts) and (model.quantization or "").upper() == "FP8"


def explain_expert_kernels(launch: PlannedLaunch) -> str | None:
    if not lacks_expert_kernels(launch.loaded, launch.device, launch.capability):
        return None
    needed = ".".join(map(str, FP8_EXPERTS_LEAST))
    return f"FP8 experts need compute capability {needed}; this one is {format_capability(launch)}"


def explain_packing(
    launch: PlannedLaunch, method: str, bits: Mapping[str, frozenset[int]], groups: frozenset[int] | None = None
) -> str | None:
    """Why a checkpoint of this method has bits or groups without kernels; `None`: it has kernels, or is not listed."""
    details = launch.loaded.quantization_details
    if details is None or method not in bits:
        return None
    if details.bits not in bits[method]:
        supported = " or ".join(map(str, sorted(bits[method])))
        return f"{method} weights need {supported} bits; these have {details.bits:g}"
    if groups is None or details.group_size is None or details.group_size in groups:
        return None
    sizes = ", ".join(str(size) for size in sorted(groups) if size > 0)
    return f"{method} weights need groups of {sizes}; these have groups of {details.group_size}"
