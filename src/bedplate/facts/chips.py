"""Chips as data: what vendors say of each, found by what drivers report and by what people type."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import msgspec

from bedplate.errors import BadQuestion
from bedplate.values.hardware import Accelerator, Cpu
from bedplate.values.record import Figure, Record, replaced

ChipKind = Literal["datacenter", "workstation", "consumer", "apple", "edge", "cpu", "accelerator"]
DataType = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "int8", "fp4"]
Topology = Literal["switch", "mesh", "bridge"]

GIB = 1 << 30
# For the upper end of a band only: more than any one core of a server is likely to read from memory by itself.
CORE_GB_S = 25.0
DATA = Path(__file__).parent / "data" / "chips.json"
# A lane's rate in GB/s for one direction, encoding taken off (PCI-SIG base specifications).
PCIE_LANE_GB_S = {3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
# What the matrix units of an architecture take, by compute capability (CUDA C Programming Guide) and gfx target
# (AMD's matrix instruction calculator).
CUDA_FEATURES = (("bf16", (8, 0)), ("fp8", (8, 9)), ("fp4", (10, 0)))
MIG_CAPABILITIES = ("8.0", "9.0", "10.0", "10.3")
# How MIG divides a card: sevenths of its multiprocessors, on the smaller ones fourths; eighths of its memory, on the
# smaller ones fourths (NVIDIA Multi-Instance GPU User Guide, supported profiles).
MIG_PROFILE = re.compile(r"\s+MIG ([1-7])g\.([0-9]{1,3})gb", re.IGNORECASE)
MIG_SMALL = re.compile(r"A30|RTX PRO")
GFX_FEATURES = {
    "gfx908": ("bf16",),
    "gfx90a": ("bf16",),
    "gfx942": ("bf16", "fp8"),
    "gfx950": ("bf16", "fp8", "fp4"),
    "gfx1100": ("bf16",),
    "gfx1101": ("bf16",),
    "gfx1102": ("bf16",),
    "gfx1151": ("bf16",),
    "gfx1200": ("bf16", "fp8"),
    "gfx1201": ("bf16", "fp8"),
}


class ChipLink(Record, frozen=True, kw_only=True):
    """How a chip reaches others like it, not counting PCIe."""

    kind: Literal["nvlink", "xgmi", "other"]
    gb_s: float
    """All of one device's links together, one direction. Vendors' sheets mostly give twice this: both directions."""
    topology: Topology
    """switch: any pair at the full rate; mesh: the rate is shared out over all peers; bridge: groups of `domain`."""
    domain: int
    """How many devices reach each other this way."""
    optional: bool = False
    """Sold apart, so that a machine has it only if somebody says so."""


class Chip(Record, frozen=True, kw_only=True):
    """One device as the driver shows it; of a card with several, one of them."""

    name: str
    vendor: str
    kind: ChipKind
    year: int
    driver_names: tuple[str, ...] = ()
    """What NVML, ROCm, sysctl or /proc/cpuinfo call it. Two chips may share one: memory or cores tell them apart."""
    aliases: tuple[str, ...] = ()
    """What people type. Of chips that share an alias, the most common stands first in the file."""
    memory_gib: float | None = None
    """The size in its name. Vendors write GB and build GiB. Null where it is bought by size, as on a Mac."""
    memory_options_gib: tuple[float, ...] = ()
    """The sizes that it is sold with, where its memory is also the machine's."""
    memory_also_gib: tuple[float, ...] = ()
    """Other sizes that people name for the very same device."""
    reported_mib: int | None = None
    """The total that the driver reports: less than nominal by error correction and firmware."""
    memory_type: str | None = None
    memory_bits: int | None = None
    memory_mt_s: float | None = None
    """Transfers per pin: width × rate is where the bandwidth comes from."""
    bandwidth_gb_s: float
    """Of a CPU: one socket with every channel filled at the highest speed that is supported."""
    dense_tera_ops: dict[DataType, float] = msgspec.field(default_factory=dict)
    """Peak of matrix units without sparsity; FP16, BF16 and FP8 with FP32 accumulation."""
    capability: str | None = None
    gfx: str | None = None
    mig: bool = False
    """Can be split, although its compute capability does not say so."""
    devices_per_card: int = 1
    gpu_cores: int | None = None
    unified: bool = False
    """Its memory is the machine's memory."""
    link: ChipLink | None = None
    per_host: int | None = None
    """How many one operating system has, where links reach further than that."""
    pcie: tuple[int, int] | None = None
    """Generation and lanes."""
    host_link_gb_s: float | None = None
    """A link to the host other than PCIe (NVLink-C2C), one direction."""
    network_gb_s: float | None = None
    """A network adapter that is part of it, one direction."""
    watts: float | None = None
    cores: int | None = None
    threads: int | None = None
    arch: str | None = None
    """Of the CPU that is this chip, or that always comes with it."""
    cpu: str | None = None
    """The CPU that always comes with it."""
    instruction_sets: tuple[str, ...] = ()
    source: str
    note: str | None = None
    verify: bool = False
    """Some figure could not be confirmed with the vendor, nor in a press report of what the vendor said."""

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory_gib is None else round(self.memory_gib * GIB)

    @property
    def reported_bytes(self) -> int | None:
        """What a driver would call the total: its own figure where that is known, otherwise the nominal size."""
        return self.memory_bytes if self.reported_mib is None else self.reported_mib << 20

    @property
    def bandwidth_bytes_s(self) -> float:
        return self.bandwidth_gb_s * 1e9

    @property
    def pcie_bytes_s(self) -> float | None:
        """One direction."""
        return None if self.pcie is None else PCIE_LANE_GB_S[self.pcie[0]] * self.pcie[1] * 1e9

    @property
    def features(self) -> frozenset[str]:
        """fp8, fp4, bf16 and mig, as far as the architecture has them."""
        if self.capability is not None:
            major, _, minor = self.capability.partition(".")
            found = {name for name, least in CUDA_FEATURES if (int(major), int(minor)) >= least}
            return frozenset(found | ({"mig"} if self.mig or self.capability in MIG_CAPABILITIES else set()))
        if self.gfx is not None:
            return frozenset(GFX_FEATURES.get(self.gfx, ()))
        return frozenset(name for name in ("bf16", "fp8", "fp4") if name in self.dense_tera_ops)

    def ops_s(self, data_type: DataType) -> float | None:
        """Dense operations per second; `None` where the vendor states none."""
        rate = self.dense_tera_ops.get(data_type)
        return None if rate is None else rate * 1e12


class Match(Record, frozen=True, kw_only=True):
    """Which chip was meant, how many, and how sure that is."""

    chip: Chip
    count: int = 1
    """Cards, as people count them."""
    counted: bool = False
    """The text said how many."""
    memory_bytes: int | None = None
    """The size that the text named."""
    guessed: bool = False
    note: str | None = None
    """What was taken for granted."""

    @property
    def devices(self) -> int:
        return self.count * self.chip.devices_per_card


@lru_cache(maxsize=1)
def chips() -> Mapping[str, Chip]:
    """Every chip by its name, in the order of the file."""
    found = msgspec.json.decode(DATA.read_bytes(), type=list[Chip])
    return MappingProxyType({chip.name: chip for chip in found})


def find_chip(
    text: str, *, guess: bool = False, memory_bytes: int | None = None, ram_bytes: int | None = None
) -> Match:
    """The chip that `text` names: what a driver reports, or what people type, with a count and a size if they like.

    A driver's own name always leads to one chip, and `memory_bytes` (what the driver reports) decides where two share
    it; `ram_bytes` (what the machine has) does so for chips whose memory is the machine's. Anything else that fits
    several is a question back, unless `guess` is set.
    """
    asked = _understand(text)
    reported_bytes = memory_bytes or ram_bytes
    if reported_bytes is not None and asked.memory_gib is None:
        asked = replace(asked, memory_gib=reported_bytes / GIB, inexact=True, of_machine=memory_bytes is None)
    index = _index()
    # Where the whole is a name, a size in it is part of that name: a GH200 480GB has no such memory of its own.
    whole = asked if asked.inexact else replace(asked, memory_gib=None)
    if reported := index.drivers.get(asked.written):
        return _settle(reported, whole, text, guess=True)
    if literal := index.aliases.get(asked.sized):
        return _settle(literal, whole, text, guess)
    candidates = _named(asked, index, guess)
    if not candidates:
        raise _unknown(text, index)
    return _settle(candidates, asked, text, guess)


def chip_of(accelerator: Accelerator) -> Chip | None:
    """The chip that a driver or an intent has named: its dense rates, features and kind. `None` if nobody listed it.

    Of a MIG slice, that part of its card. Where several chips go by the name, the one with this memory, else the most
    common of them.
    """
    cores = accelerator.compute_units if accelerator.vendor == "apple" else None
    if accelerator.parent is not None and MIG_PROFILE.search(accelerator.name) is None:
        return None  # a part of unknown size
    return _chip_named(accelerator.name, accelerator.memory_bytes, cores)


def cpu_chip_of(cpu: Cpu) -> Chip | None:
    """The listed chip that has this CPU, which on a Mac or a Grace Hopper is more than a CPU."""
    return _chip_named(cpu.name, None, cpu.physical_cores if cpu.vendor == "apple" else None)


def memory_bandwidth(chip: Chip, cpu: Cpu) -> Figure:
    """What a machine with this CPU may read from its memory: the sheet's figure for each socket, with its doubts.

    A sheet speaks of the fastest memory in every channel. Nobody but the owner knows whether there is a module in each.
    """
    sockets = cpu.sockets or 1
    whole = chip.bandwidth_bytes_s * sockets
    soldered = chip.unified or (chip.vendor not in ("intel", "amd") and (chip.memory_type or "").startswith("LPDDR"))
    if soldered:
        return Figure(value=whole, low=whole, high=whole, basis="spec", source=chip.source)
    doubt = "low: half, as channels may be empty or their modules slower"
    shown = cpu.physical_cores
    cores = (chip.cores or 0) * sockets
    if shown is not None and shown < cores * 0.9:
        # A virtual machine shares the sockets with others.
        part = whole * shown / cores
        most = min(whole, max(part, shown * CORE_GB_S * 1e9))
        source = f"{shown} of {cores} cores: their part of {whole / 1e9:.0f} GB/s; {doubt}; {chip.source}"
        return Figure(value=part, low=part / 2, high=most, basis="estimate", source=source)
    each = f"{sockets} sockets; " if sockets > 1 else ""
    return Figure(value=whole, low=whole / 2, high=whole, basis="spec", source=f"{each}{doubt}; {chip.source}")


@lru_cache(maxsize=256)
def _chip_named(name: str, memory_bytes: int | None, cores: int | None) -> Chip | None:
    profile = MIG_PROFILE.search(name)
    card = name[: profile.start()] if profile else name
    counted = f"{card} {cores}-core GPU" if cores else card
    try:
        chip = find_chip(counted, guess=True, memory_bytes=None if profile else memory_bytes).chip
    except BadQuestion:
        return None
    return chip if profile is None else _slice(chip, int(profile[1]), float(profile[2]))


def _slice(chip: Chip, parts: int, memory_gib: float) -> Chip:
    small = MIG_SMALL.search(chip.name) is not None
    # Profiles are named by the memory that is left, so that 1g.18gb is an eighth of 141 GB.
    steps = 4 if small else 8
    memory = min(1.0, max(1, round(memory_gib / (chip.memory_gib or memory_gib) * steps)) / steps)
    computing = min(1.0, parts / (4 if small else 7))
    return replaced(
        chip,
        memory_gib=memory_gib,
        reported_mib=None,
        bandwidth_gb_s=chip.bandwidth_gb_s * memory,
        dense_tera_ops={kind: rate * computing for kind, rate in chip.dense_tera_ops.items()},
        link=None,
    )


@dataclass(frozen=True, slots=True)
class _Asked:
    """A chip's name as somebody wrote it, taken apart."""

    written: str
    """The whole, as drivers' names are indexed: without the count only."""
    words: tuple[str, ...]
    """Without count, sizes, cores and what distinguishes nothing."""
    outer_words: tuple[str, ...]
    """Likewise, without what stands in parentheses."""
    sized: str
    """Likewise, but with the size, since a few names have one in them."""
    count: int | None
    memory_gib: float | None
    cores: int | None
    inexact: bool = False
    """The size is what a driver or a machine reports, not what somebody named."""
    of_machine: bool = False


@dataclass(frozen=True, slots=True)
class _Index:
    drivers: Mapping[str, tuple[Chip, ...]]
    aliases: Mapping[str, tuple[Chip, ...]]


# Words that tell no two chips apart. Neither does who made it, with the models that there are.
NOISE = frozenset({
    "nvidia", "geforce", "rtx", "gtx", "tesla", "amd", "radeon", "rx", "instinct", "intel", "apple", "corporation",
    "inc", "gpu", "gpus", "graphics", "card", "processor", "edition", "generation", "gen", "memory", "ram", "vram",
    "unified", "oam", "virtualized", "with", "w", "the", "of", "per", "accelerator", "ecc", "hbm2", "hbm2e", "hbm3",
    "hbm3e", "gddr5", "gddr5x", "gddr6", "gddr6x", "gddr7", "ddr4", "ddr5", "lpddr4", "lpddr4x", "lpddr5", "lpddr5x",
})  # fmt: skip
# Words that make another chip of it: a name with one of these left over is not the chip without it.
VARIANTS = frozenset({
    "super", "laptop", "max", "pro", "ultra", "mini", "plus", "xtx", "gre", "sxm", "pcie", "nvl", "ada", "sff",
    "nano", "dual", "server", "workstation", "cpu", "mig",
})  # fmt: skip
SAME_WORDS = {"mobile": "laptop", "notebook": "laptop", "sxm2": "sxm", "sxm3": "sxm", "sxm4": "sxm", "sxm5": "sxm"}
SAME_WORDS |= {"sxm6": "sxm", "pci": "pcie", "express": "", "quadros": "quadro"}
COUNT_FIRST = re.compile(r"\s*([0-9]{1,5})(?:\s*[x*]\s*(?=[^\s0-9])|\s+[x*]\s+(?=\S)|[x*]\s+(?=[0-9]{4}(?![0-9])))")
TAIL_OF_MODEL = re.compile(r"xtx?(?![a-z0-9])")
COUNT_LAST = re.compile(r"\s*(?:\*\s*|(?<=\s)x\s*|x)([0-9]{1,5})\s*$")
MEMORY = re.compile(r"(?<![a-z0-9.])([0-9]{1,5}(?:\.[0-9]{1,3})?)\s?(t|g)(?:i?b)?(?![a-z0-9/])")
CORES = re.compile(r"(?<![a-z0-9])([0-9]{1,3})[\s-]?cores?(?![a-z])(?:\s+gpu)?")
CLOCK = re.compile(r"@?\s*[0-9.]+\s*ghz")
# What /proc/cpuinfo adds to a name: a generation, a board's revision, the graphics beside the cores.
ADDED = re.compile(r"\b[0-9]{1,2}th gen\b|\bmodel [ab]\b\+?|\brev [0-9.]+|\bw(?:ith|/) radeon .*")
MARKS = re.compile(r"\((?:r|tm)\)|[®™]")
MAKERS = re.compile(r"(?:nvidia|geforce|rtx|gtx|tesla|amd|radeon|rx|instinct|apple|intel)+(?=.)")
WORD = re.compile(r"[a-z0-9]+")
LONGEST_NAME = 300


def _understand(text: str) -> _Asked:
    if len(text) > LONGEST_NAME:
        raise BadQuestion(f"no chip has a name of {len(text)} characters", hint="say it as in: 8x H100 SXM")
    plain = MARKS.sub("", text.lower().replace("×", "x")).strip()
    count, rest = _split_count(plain)
    if count == 0:
        raise BadQuestion(f"“{text.strip()}” is none of them", hint="a count is at least 1")
    sizes = MEMORY.findall(rest)
    cores = CORES.search(rest)
    bare = _coreless(CLOCK.sub(" ", ADDED.sub(" ", rest)))
    unsized = MEMORY.sub(" ", bare)
    return _Asked(
        written=_squeeze(rest),
        words=_words(unsized),
        outer_words=_words(re.sub(r"\([^)]*\)?|\[[^\]]*\]?", " ", unsized)),
        sized="".join(_words(bare)),
        count=count,
        memory_gib=float(sizes[0][0]) * (1024 if sizes[0][1] == "t" else 1) if sizes else None,
        cores=int(cores[1]) if cores else None,
    )


def _split_count(text: str) -> tuple[int | None, str]:
    """ "8x H100 SXM", "4 × RTX 4090", "h100*8", "H100 x8": how many, and of what."""
    # "7900 XTX" is a card, and not 7900 of something that begins with the rest of that word.
    if (found := COUNT_FIRST.match(text)) and not TAIL_OF_MODEL.match(text, found.end() - 1):
        return int(found[1]), text[found.end() :]
    if found := COUNT_LAST.search(text):
        before = text[: found.start()]
        # "H100x8" is eight of them, "rtx3080" is not 3080 of anything.
        if found[0].lstrip()[0] == "*" or text[found.start()].isspace() or "".join(_words(before)) in _index().aliases:
            return int(found[1]), before
    return None, text


def _squeeze(text: str) -> str:
    return "".join(WORD.findall(MARKS.sub("", text.lower())))


def _words(text: str) -> tuple[str, ...]:
    """The words of a text in lower case that may tell chips apart."""
    found = [SAME_WORDS.get(word, word) for word in WORD.findall(MARKS.sub("", text))]
    return tuple(word for word in found if word and word not in NOISE)


@lru_cache(maxsize=1)
def _index() -> _Index:
    drivers: dict[str, dict[str, Chip]] = {}
    aliases: dict[str, dict[str, Chip]] = {}
    for chip in chips().values():
        # Names keep their sizes here. What is short for several chips ("h100") is an alias of each.
        for name in (chip.name, *chip.aliases):
            aliases.setdefault("".join(_words(_coreless(name.lower()))), {})[chip.name] = chip
    for chip in chips().values():
        for name in chip.driver_names:
            key = _squeeze(name)
            drivers.setdefault(key, {})[chip.name] = chip
            # People leave the maker off, which is still the driver's word unless it then is everybody's ("H200").
            if (short := key.removeprefix(chip.vendor)) not in aliases:
                drivers.setdefault(short, {})[chip.name] = chip
    return _Index(
        MappingProxyType({key: tuple(found.values()) for key, found in drivers.items()}),
        MappingProxyType({key: tuple(found.values()) for key, found in aliases.items()}),
    )


def _coreless(text: str) -> str:
    return CORES.sub(" ", text) if "core" in text else text


def _named(asked: _Asked, index: _Index, guess: bool) -> tuple[Chip, ...]:
    """The chips that go by this name, from the most literal reading to the loosest."""
    for words in (asked.words, asked.outer_words):
        without_cpu = tuple(word for word in words if word != "cpu")
        joined = "".join(words)
        for key in (joined, joined.removesuffix("s"), "".join(without_cpu), MAKERS.sub("", joined, count=1)):
            if found := index.aliases.get(key):
                return found
    for words in (asked.outer_words, asked.words):
        if found := _contained(words, index.aliases, guess):
            return found
    return ()


def _contained(words: Sequence[str], aliases: Mapping[str, tuple[Chip, ...]], guess: bool) -> tuple[Chip, ...]:
    """The chips with the longest name inside of `words`, if what is left over does not make another chip of it."""
    best: tuple[int, tuple[Chip, ...]] = (0, ())
    for start in range(len(words)):
        for end in range(len(words), start, -1):
            key = "".join(words[start:end])
            rest = (*words[:start], *words[end:])
            if len(key) > max(best[0], 2) and key in aliases and _says_nothing(rest, guess):
                best = (len(key), aliases[key])
    return best[1]


def _says_nothing(words: Iterable[str], guess: bool) -> bool:
    """Short words (ti, xt, d, s) mostly do, and so do numbers, where nobody said that it is written loosely."""
    return all(len(word) > 2 and word not in VARIANTS and (guess or word.isalpha()) for word in words)


def _settle(candidates: tuple[Chip, ...], asked: _Asked, text: str, guess: bool) -> Match:
    fitting, complaint = _narrowed(candidates, asked)
    if not fitting:
        if not guess:
            raise BadQuestion(f"“{text.strip()}”: {complaint}", hint=f"say one of: {_list(candidates)}")
        fitting = candidates
    chip = fitting[0]
    note = None
    guessed = len(fitting) > 1 or complaint is not None
    if len(fitting) > 1:
        if not guess and not _tell_no_difference(fitting):
            raise BadQuestion(f"“{text.strip()}” may be any of {_list(fitting)}", hint=_how_to_say(fitting))
        note = f"“{text.strip()}” may be any of {_list(fitting)}; {chip.name} is taken, the most common"
    elif complaint is not None:
        note = f"“{text.strip()}”: {complaint}; {chip.name} is taken"
    return Match(
        chip=chip,
        count=asked.count or 1,
        counted=asked.count is not None,
        memory_bytes=round(asked.memory_gib * GIB) if asked.memory_gib is not None and not asked.inexact else None,
        guessed=guessed,
        note=note,
    )


def _narrowed(candidates: tuple[Chip, ...], asked: _Asked) -> tuple[tuple[Chip, ...], str | None]:
    """Those with the memory and the cores that were named, and what to say if there is none."""
    found = candidates
    if asked.cores is not None:
        by_cores = tuple(chip for chip in found if chip.gpu_cores == asked.cores)
        found = by_cores or tuple(chip for chip in found if chip.cores == asked.cores)
        if not found and asked.inexact:
            found = candidates  # a driver has counted them: some variant that nobody has written down
        elif not found:
            return (), f"there is none with {asked.cores} cores"
    if asked.memory_gib is None:
        return found, None
    if asked.of_machine and not all(chip.unified for chip in found):
        return found, None
    if asked.inexact:
        return _nearest_memory(found, asked.memory_gib), None
    fitting = tuple(chip for chip in found if _has_memory(chip, asked.memory_gib))
    sizes = sorted({size for chip in found for size in _sizes(chip)})
    if fitting or not sizes:
        return fitting or found, None
    return (), f"there is none with {asked.memory_gib:g} GB, but with {', '.join(f'{size:g}' for size in sizes)} GB"


def _nearest_memory(candidates: tuple[Chip, ...], memory_gib: float) -> tuple[Chip, ...]:
    """Reported sizes are never quite the nominal ones, so the nearest decides; of equals, all."""

    def distance(chip: Chip) -> float:
        reported = () if chip.reported_mib is None else (chip.reported_mib / 1024,)
        return min((abs(size - memory_gib) for size in (*_sizes(chip), *reported)), default=0.0)

    least = min(map(distance, candidates))
    return tuple(chip for chip in candidates if distance(chip) <= least + 0.5)


def _sizes(chip: Chip) -> tuple[float, ...]:
    return chip.memory_options_gib or (() if chip.memory_gib is None else (chip.memory_gib,))


def _has_memory(chip: Chip, memory_gib: float) -> bool:
    return any(abs(size - memory_gib) < 0.5 for size in (*_sizes(chip), *chip.memory_also_gib))


def _tell_no_difference(candidates: Sequence[Chip]) -> bool:
    """Whether not even the driver tells them apart, nor would inference see it in memory or bandwidth."""
    kinds = {(chip.driver_names, chip.memory_gib, chip.memory_options_gib, chip.bandwidth_gb_s) for chip in candidates}
    return len(kinds) == 1 and bool(candidates[0].driver_names)


def _list(candidates: Iterable[Chip]) -> str:
    return ", ".join(chip.name for chip in candidates)


def _how_to_say(candidates: Sequence[Chip]) -> str:
    differences = []
    for chip in candidates:
        sizes = "/".join(f"{size:g}" for size in _sizes(chip))
        size = f"{sizes} GB, " if sizes else ""
        differences.append(f"“{chip.name}” ({size}{chip.bandwidth_gb_s:g} GB/s)")
    return f"say {', or '.join(differences)}"


def _unknown(text: str, index: _Index) -> BadQuestion:
    shown = text.strip()
    if not shown:
        return BadQuestion("no chip is named", hint="say it as in: 8x H100 SXM")
    nearest = ", ".join(_nearest_names(shown.lower(), index))
    return BadQuestion(
        f"no chip is known as “{shown}”",
        hint=f"the nearest names are {nearest}" if nearest else "docs/chips.md says which chips are known",
    )


def _nearest_names(text: str, index: _Index) -> tuple[str, ...]:
    import difflib

    # First those of the same make: of "RTX 9999" the letters are right, and no number is near.
    make = re.match(r"[a-z]{3,}", text)
    alike = {
        chip.name.lower()[at:]: chip.name
        for chip in chips().values()
        if make is not None and (at := chip.name.lower().find(make[0])) >= 0
    }
    found = [alike[name] for name in difflib.get_close_matches(text, alike, n=5, cutoff=0.6)]
    near = difflib.get_close_matches("".join(_words(text)), index.aliases, n=6, cutoff=0.6)
    names = dict.fromkeys(found or (chip.name for alias in near for chip in index.aliases[alias]))
    return tuple(names)[:5]
