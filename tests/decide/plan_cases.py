"""Generated cases for plans: all chips × known models × workloads, in an order that a sample of any size covers."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

from bedplate.errors import UsageError
from bedplate.facts.chips import Chip, load_chips
from bedplate.facts.hypothetical import make_simulated_hardware
from bedplate.facts.known_models import list_known_names
from bedplate.values import Hardware, Workload

COUNTS = (1, 8, 2, 4, 16, 3, 6)
WORKLOADS = (
    Workload(),
    Workload(concurrency=64, prompt_tokens=1024, output_tokens=256),
    Workload(concurrency=4, prompt_tokens=4096, output_tokens=512, context_tokens=16384),
    Workload(concurrency=256, prompt_tokens=512, output_tokens=128, shared_prefix_tokens=400),
    Workload(concurrency=1, prompt_tokens=30000, output_tokens=1000),
    Workload(users=20, prompt_tokens=2000, output_tokens=300, precision_sensitive=True),
    Workload(concurrency=32, prompt_tokens=256, output_tokens=64, structured_output=True),
)
STRIDE = 7919
"""Prime: consecutive cases differ in chip, count, model and workload."""


@dataclass(frozen=True)
class PlanCase:
    chip: str
    count: int
    model: str
    workload: Workload

    @property
    def label(self) -> str:
        return f"{self.count} x {self.chip}, {self.model}, {self.workload.concurrency or self.workload.users} requests"


@functools.cache
def list_chips() -> tuple[Chip, ...]:
    return tuple(load_chips().values())


@functools.cache
def make_machine(chip: str, count: int) -> Hardware | None:
    """`None` if there is no such machine: an edge device or a Mac has one GPU."""
    if " + " in chip:
        return make_simulated_hardware({"accelerator": chip, "ram_gb": 128})
    found = load_chips()[chip]
    described: dict[str, object] = {"cpu": chip} if found.kind == "cpu" else {"accelerator": chip, "count": count}
    if found.kind == "cpu" and count > 1:
        return None
    if found.memory_options_gib or found.memory_gib is None:
        described["ram_gb"] = max(found.memory_options_gib, default=64.0)
    elif not found.unified:
        described["ram_gb"] = 64 * (1 + count // 2)
    try:
        return make_simulated_hardware(described)
    except UsageError:
        return None


def generate_cases(number: int) -> Iterator[PlanCase]:
    """The first cases of a fixed order that visits every combination before it repeats one."""
    chips, models = list_chips(), list_known_names()
    sizes = (len(chips), len(models), len(COUNTS), len(WORKLOADS))
    total = sizes[0] * sizes[1] * sizes[2] * sizes[3]
    place, made = 0, 0
    while made < number:
        place = (place + STRIDE * 104_729) % total
        rest, chip = divmod(place, sizes[0])
        rest, model = divmod(rest, sizes[1])
        workload, count = divmod(rest, sizes[2])
        case = PlanCase(chips[chip].name, COUNTS[count], models[model], WORKLOADS[workload])
        if make_machine(case.chip, case.count) is None:
            case = replace(case, count=1)
            if make_machine(case.chip, 1) is None:
                continue
        made += 1
        yield case


def generate_mixed_cases(number: int) -> Iterator[PlanCase]:
    """Machines with cards of two or three kinds, of one vendor or several."""
    random, models = Random(31), list_known_names()
    cards = [chip.name for chip in list_chips() if chip.kind in ("consumer", "workstation", "datacenter")]
    cards = [name for name in cards if not load_chips()[name].unified and load_chips()[name].memory_gib]
    for _ in range(number):
        kinds = random.sample(cards, random.choice((2, 2, 2, 3)))
        names = [f"{count}x {name}" for name, count in zip(kinds, random.choices((1, 1, 2, 4), k=3), strict=False)]
        yield PlanCase(" + ".join(names), 1, random.choice(models), random.choice(WORKLOADS))


def reverse_cards(case: PlanCase) -> PlanCase:
    """The same machine with its cards named in the opposite order."""
    return replace(case, chip=" + ".join(reversed(case.chip.split(" + "))))
