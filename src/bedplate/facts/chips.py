"""The chip database: vendor specifications, found by driver names and by the names that people type."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import msgspec

from bedplate.errors import UsageError
from bedplate.values.hardware import Accelerator, Cpu
from bedplate.values.record import Figure, Record, replace_fields

ChipKind = Literal["datacenter", "workstation", "consumer", "apple", "edge", "cpu", "accelerator"]
DataType = Literal["fp32", "tf32", "fp16", "bf16", "fp8", "int8", "fp4"]
Topology = Literal["switch", "mesh", "bridge"]

GIB = 1 << 30
# Only for the upper end of a range: more than one server core is likely to read from memory.
CORE_GB_S = 25.0
DATA = Path(__file__).parent / "data" / "chips.json"
# GB/s of one lane in one direction, after encoding (PCI-SIG base specifications).
PCIE_LANE_GB_S = {3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
# Data types of an architecture's matrix units, by compute capability (CUDA C Programming Guide) and gfx target (AMD's
# matrix instruction calculator).
CUDA_FEATURES = (("bf16", (8, 0)), ("fp8", (8, 9)), ("fp4", (10, 0)))
MIG_CAPABILITIES = ("8.0", "9.0", "10.0", "10.3")
# MIG divides a card's multiprocessors into sevenths and its memory into eighths; on smaller cards both into fourths
# (NVIDIA Multi-Instance GPU User Guide, supported profiles).
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
    """The link between chips of one kind, other than PCIe."""

    kind: Literal["nvlink", "xgmi", "other"]
    gb_s: float
    """All links of one device together, one direction. Data sheets mostly give both directions, which is twice this."""
    topology: Topology
    """switch: any pair at the full rate. mesh: all peers share the rate. bridge: groups of `domain` devices."""
    domain: int
    """Number of devices that the link connects."""
    optional: bool = False
    """Sold separately, so a machine has it only if the user says so."""


class Chip(Record, frozen=True, kw_only=True):
    """One device as the driver lists it. A card may consist of several."""

    name: str
    vendor: str
    kind: ChipKind
    year: int
    driver_names: tuple[str, ...] = ()
    """Names in NVML, ROCm, sysctl or /proc/cpuinfo. Chips that share a name differ in memory or cores."""
    aliases: tuple[str, ...] = ()
    """Names that people type. Of chips that share an alias, the most common comes first in the file."""
    memory_gib: float | None = None
    """The size in its name. Vendors write GB and mean GiB. Null if the buyer chooses the size, as on a Mac."""
    memory_options_gib: tuple[float, ...] = ()
    """The memory sizes it is sold with, if the machine shares its memory."""
    memory_also_gib: tuple[float, ...] = ()
    """Other sizes that people use for the same device."""
    reported_mib: int | None = None
    """The total that the driver reports. ECC and firmware make it less than the nominal size."""
    memory_type: str | None = None
    memory_bits: int | None = None
    memory_mt_s: float | None = None
    """Transfers per second and pin. Bus width × rate gives the bandwidth."""
    bandwidth_gb_s: float
    """For a CPU: one socket with every channel at the highest supported speed."""
    dense_tera_ops: dict[DataType, float] = msgspec.field(default_factory=dict)
    """Peak of the matrix units without sparsity; FP16, BF16 and FP8 with FP32 accumulation."""
    capability: str | None = None
    gfx: str | None = None
    mig: bool = False
    """Supports MIG although its compute capability does not imply it."""
    devices_per_card: int = 1
    gpu_cores: int | None = None
    unified: bool = False
    """Whether its memory is the machine's memory."""
    link: ChipLink | None = None
    per_host: int | None = None
    """Devices per operating system, if links reach beyond it."""
    pcie: tuple[int, int] | None = None
    """Generation and lanes."""
    host_link_gb_s: float | None = None
    """A link to the host other than PCIe (NVLink-C2C), one direction."""
    network_gb_s: float | None = None
    """A built-in network adapter, one direction."""
    watts: float | None = None
    cores: int | None = None
    threads: int | None = None
    arch: str | None = None
    """Architecture of the CPU that is this chip or always comes with it."""
    cpu: str | None = None
    """The CPU that always comes with it."""
    instruction_sets: tuple[str, ...] = ()
    source: str
    note: str | None = None
    verify: bool = False
    """Some figure is confirmed neither by the vendor nor by a press report that quotes the vendor."""

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory_gib is None else round(self.memory_gib * GIB)

    @property
    def reported_bytes(self) -> int | None:
        """The total that a driver reports, if known, else the nominal size."""
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
        """fp8, fp4, bf16 and mig, if the architecture supports them."""
        if self.capability is not None:
            major, _, minor = self.capability.partition(".")
            found = {name for name, least in CUDA_FEATURES if (int(major), int(minor)) >= least}
            return frozenset(found | ({"mig"} if self.mig or self.capability in MIG_CAPABILITIES else set()))
        if self.gfx is not None:
            return frozenset(GFX_FEATURES.get(self.gfx, ()))
        return frozenset(name for name in ("bf16", "fp8", "fp4") if name in self.dense_tera_ops)

    def get_ops_s(self, data_type: DataType) -> float | None:
        """Dense operations per second; `None` if the vendor states none."""
        rate = self.dense_tera_ops.get(data_type)
        return None if rate is None else rate * 1e12


class ChipMatch(Record, frozen=True, kw_only=True):
    """The chip that a text names, the count, and how certain the match is."""

    chip: Chip
    count: int = 1
    """Number of cards."""
    counted: bool = False
    """Whether the text states a count."""
    memory_bytes: int | None = None
    """The size that the text states."""
    guessed: bool = False
    note: str | None = None
    """What was assumed."""

    @property
    def devices(self) -> int:
        return self.count * self.chip.devices_per_card


@lru_cache(maxsize=1)
def load_chips() -> Mapping[str, Chip]:
    """Every chip by name, in the order of the file."""
    found = msgspec.json.decode(DATA.read_bytes(), type=list[Chip])
    return MappingProxyType({chip.name: chip for chip in found})


def find_chip(
    text: str, *, guess: bool = False, memory_bytes: int | None = None, ram_bytes: int | None = None
) -> ChipMatch:
    """The chip that `text` names. The text is a driver's name or what people type, optionally with a count and a size.

    A driver's name always matches one chip. If two share it, `memory_bytes` (from the driver) decides, or `ram_bytes`
    (the machine's memory) for chips that use the machine's memory. One form of a data-centre chip is assumed and noted.
    Any other ambiguous name raises an error, unless `guess` is set.
    """
    asked = _parse_name(text)
    reported_bytes = memory_bytes or ram_bytes
    if reported_bytes is not None and asked.memory_gib is None:
        asked = replace(asked, memory_gib=reported_bytes / GIB, inexact=True, of_machine=memory_bytes is None)
    index = _build_index()
    # If the whole text is a name, a size in it is part of that name: a GH200 480GB does not have 480 GB of GPU memory.
    whole = asked if asked.inexact else replace(asked, memory_gib=None)
    if reported := index.drivers.get(asked.written):
        return _choose_chip(reported, whole, text, guess=True)
    if literal := index.aliases.get(asked.sized):
        return _choose_chip(literal, whole, text, guess)
    candidates = _find_by_name(asked, index, guess)
    if not candidates and (counted := BARE_COUNT.match(text)) and _parse_name(text[counted.end() :]).count is None:
        return find_chip(
            f"{counted[1]}x {text[counted.end() :]}", guess=guess, memory_bytes=memory_bytes, ram_bytes=ram_bytes
        )
    if not candidates:
        raise _make_unknown_error(text, index)
    return _choose_chip(candidates, asked, text, guess)


def find_accelerator_chip(accelerator: Accelerator) -> Chip | None:
    """The chip of an accelerator that a driver or an intent names; `None` if it is not listed.

    For a MIG slice, that part of its card. If several chips share the name, the one with this memory, else the most
    common.
    """
    cores = accelerator.compute_units if accelerator.vendor == "apple" else None
    if accelerator.parent is not None and MIG_PROFILE.search(accelerator.name) is None:
        return None  # a slice of unknown size
    return _find_named_chip(accelerator.name, accelerator.memory_bytes, cores)


def find_cpu_chip(cpu: Cpu) -> Chip | None:
    """The listed chip with this CPU. On a Mac or a Grace Hopper it is more than a CPU."""
    return _find_named_chip(cpu.name, None, cpu.physical_cores if cpu.vendor == "apple" else None)


def estimate_memory_bandwidth(chip: Chip, cpu: Cpu) -> Figure:
    """The memory bandwidth that a machine with this CPU may have: the data sheet's figure per socket, with a range.

    A data sheet assumes the fastest memory in every channel. Only the owner knows whether every channel is filled.
    """
    sockets = cpu.sockets or 1
    whole = chip.bandwidth_bytes_s * sockets
    soldered = chip.unified or (chip.vendor not in ("intel", "amd") and (chip.memory_type or "").startswith("LPDDR"))
    if soldered:
        return Figure(value=whole, low=whole, high=whole, basis="spec", source=chip.source)
    doubt = "low: half, because channels may be empty or slower"
    shown = cpu.physical_cores
    cores = (chip.cores or 0) * sockets
    if shown is not None and shown < cores * 0.9:
        # A virtual machine shares the sockets with others.
        part = whole * shown / cores
        most = min(whole, max(part, shown * CORE_GB_S * 1e9))
        source = f"{shown} of {cores} cores: their share of {whole / 1e9:.0f} GB/s; {doubt}; {chip.source}"
        return Figure(value=part, low=part / 2, high=most, basis="estimate", source=source)
    each = f"{sockets} sockets; " if sockets > 1 else ""
    return Figure(value=whole, low=whole / 2, high=whole, basis="spec", source=f"{each}{doubt}; {chip.source}")


@lru_cache(maxsize=256)
def _find_named_chip(name: str, memory_bytes: int | None, cores: int | None) -> Chip | None:
    profile = MIG_PROFILE.search(name)
    card = name[: profile.start()] if profile else name
    counted = f"{card} {cores}-core GPU" if cores else card
    try:
        chip = find_chip(counted, guess=True, memory_bytes=None if profile else memory_bytes).chip
    except UsageError:
        return None
    return chip if profile is None else _make_slice(chip, int(profile[1]), float(profile[2]))


def _make_slice(chip: Chip, parts: int, memory_gib: float) -> Chip:
    small = MIG_SMALL.search(chip.name) is not None
    # Profiles are named by the usable memory: 1g.18gb is an eighth of 141 GB.
    steps = 4 if small else 8
    memory = min(1.0, max(1, round(memory_gib / (chip.memory_gib or memory_gib) * steps)) / steps)
    computing = min(1.0, parts / (4 if small else 7))
    return replace_fields(
        chip,
        memory_gib=memory_gib,
        reported_mib=None,
        bandwidth_gb_s=chip.bandwidth_gb_s * memory,
        dense_tera_ops={kind: rate * computing for kind, rate in chip.dense_tera_ops.items()},
        link=None,
    )


@dataclass(frozen=True, slots=True)
class _ParsedName:
    """A chip's name as the user wrote it, split into its parts."""

    written: str
    """The whole text without the count, in the form of the driver-name index."""
    words: tuple[str, ...]
    """Without count, sizes, cores and words that distinguish nothing."""
    outer_words: tuple[str, ...]
    """The same, without text in parentheses."""
    sized: str
    """The same with the size, because a few names contain one."""
    count: int | None
    memory_gib: float | None
    cores: int | None
    inexact: bool = False
    """Whether the size comes from a driver or a machine and not from the user."""
    of_machine: bool = False


@dataclass(frozen=True, slots=True)
class _ChipIndex:
    drivers: Mapping[str, tuple[Chip, ...]]
    aliases: Mapping[str, tuple[Chip, ...]]


# Words that do not distinguish chips. The vendor does not distinguish any listed chips either.
NOISE = frozenset({
    "nvidia", "geforce", "rtx", "gtx", "tesla", "amd", "radeon", "rx", "instinct", "intel", "apple", "corporation",
    "inc", "gpu", "gpus", "graphics", "card", "processor", "edition", "generation", "gen", "memory", "ram", "vram",
    "unified", "oam", "virtualized", "with", "w", "the", "of", "per", "accelerator", "ecc", "hbm2", "hbm2e", "hbm3",
    "hbm3e", "gddr5", "gddr5x", "gddr6", "gddr6x", "gddr7", "ddr4", "ddr5", "lpddr4", "lpddr4x", "lpddr5", "lpddr5x",
})  # fmt: skip
# Words that make it a different chip: a name with one of these left over is not the chip without it.
VARIANTS = frozenset({
    "super", "laptop", "max", "pro", "ultra", "mini", "plus", "xtx", "gre", "sxm", "pcie", "nvl", "ada", "sff",
    "nano", "dual", "server", "workstation", "cpu", "mig",
})  # fmt: skip
SAME_WORDS = {"mobile": "laptop", "notebook": "laptop", "sxm2": "sxm", "sxm3": "sxm", "sxm4": "sxm", "sxm5": "sxm"}
SAME_WORDS |= {"sxm6": "sxm", "pci": "pcie", "express": "", "quadros": "quadro"}
COUNT_FIRST = re.compile(r"\s*([0-9]{1,5})(?:\s*[x*]\s*(?=[^\s0-9])|\s+[x*]\s+(?=\S)|[x*]\s+(?=[0-9]{4}(?![0-9])))")
BARE_COUNT = re.compile(r"\s*([0-9]{1,4})\s+(?=[a-zA-Z]|[0-9]{4}(?![0-9]))")
TAIL_OF_MODEL = re.compile(r"xtx?(?![a-z0-9])")
COUNT_LAST = re.compile(r"\s*(?:\*\s*|(?<=\s)x\s*|x)([0-9]{1,5})\s*$")
COUNT_BRACKETED = re.compile(r"\s*\(\s*x?\s*([0-9]{1,5})\s*x?\s*\)\s*$")
COUNT_WORDS = {
    "one": 1, "single": 1, "two": 2, "dual": 2, "pair of": 2, "three": 3, "triple": 3, "four": 4, "quad": 4, "five": 5,
    "six": 6, "seven": 7, "eight": 8, "ten": 10, "twelve": 12, "sixteen": 16,
}  # fmt: skip
COUNT_OF_SOCKETS = re.compile(r"[\s,(]*(two|dual|four|quad|eight|[0-9]{1,2})[\s-]*sockets?\)?\s*$")
COUNT_IN_WORDS = re.compile(rf"\s*(?:a\s+)?({'|'.join(COUNT_WORDS)})[\s-]+(?:x\s+)?(?=\S)")
MEMORY = re.compile(r"(?<![a-z0-9.])([0-9]{1,5}(?:\.[0-9]{1,3})?)\s?(t|g)(?:i?b)?(?![a-z0-9/])")
CORES = re.compile(r"(?<![a-z0-9])([0-9]{1,3})[\s-]?cores?(?![a-z])(?:\s+gpu)?")
CLOCK = re.compile(r"@?\s*[0-9.]+\s*ghz")
# Additions of /proc/cpuinfo: a generation, a board revision, the graphics beside the cores.
ADDED = re.compile(r"\b[0-9]{1,2}th gen\b|\bmodel [ab]\b\+?|\brev [0-9.]+|\bw(?:ith|/) radeon .*")
# Products that are sold with several chips, one of which is named beside them.
MACS = re.compile(
    r"\b(?:macbook(?:\s+(?:pro|air))?|mac\s+(?:studio|mini|pro)|imac(?:\s+pro)?)\b"
    r"(?:[\s-]+1[3-6](?:[\s-]?inch|\")?)?(?=.*\bm[1-9])"
)
LAPTOPS = re.compile(
    r"\b(?:razer\s+blade|(?:asus\s+)?rog\s+(?:zephyrus|strix)|(?:lenovo\s+)?legion|alienware|thinkpad|(?:dell\s+)?xps|"
    r"(?:hp\s+)?omen|(?:acer\s+)?predator)\b.*?(?=\b(?:geforce|rtx)\b)"
)
_OFFICE_SERIES = (
    r"^(?:(?:lenovo|dell|hp|asus|acer|msi|microsoft|samsung|framework|lg)\s+)?\b(?:thinkpad|thinkbook|ideapad|yoga|"
    r"legion|xps|latitude|inspiron|precision|elitebook|probook|zbook|spectre|envy|pavilion|zenbook|vivobook|swift|"
    r"aspire|surface|galaxy\s+book|framework(?:\s+laptop)?|gram)\b"
)
# Laptops without a graphics card, named before their processor.
OFFICE_LAPTOPS = re.compile(
    _OFFICE_SERIES + r".*?"
    r"(?=\b(?:(?:intel\s+)?(?:core\s+)?(?:i[3579]-|ultra\s+[579]\b)|(?:amd\s+)?ryzen\b))"
)
WITHOUT_CHIP = (
    (re.compile(_OFFICE_SERIES), "i7-1260P 16GB"),
    (re.compile(r"^(?:razer\s+blade|(?:asus\s+)?rog\b|alienware|(?:hp\s+)?omen|(?:acer\s+)?predator)"), "RTX 4070"),
    (re.compile(r"^(?:apple\s+)?(?:macbook|mac\s+(?:studio|mini|pro)|imac)\b"), "M4 16GB"),
)
"""Products that are sold with several chips, and how one may be named behind them."""
MARKS = re.compile(r"\((?:r|tm)\)|[®™]")
MAKERS = re.compile(r"(?:nvidia|geforce|rtx|gtx|tesla|amd|radeon|rx|instinct|apple|intel)+(?=.)")
WORD = re.compile(r"[a-z0-9]+")
LONGEST_NAME = 300


def _parse_name(text: str) -> _ParsedName:
    if len(text) > LONGEST_NAME:
        raise UsageError(f"the name of a chip cannot have {len(text)} characters", hint="for example: 8x H100 SXM")
    plain = MARKS.sub("", text.lower().replace("×", "x")).strip()
    plain = MACS.sub(" ", plain).strip()
    if LAPTOPS.search(plain):
        plain = f"{LAPTOPS.sub(' ', plain).strip()} laptop"
    plain = OFFICE_LAPTOPS.sub("", plain)
    count, rest = _split_count(plain)
    if count == 0:
        raise UsageError(f"“{text.strip()}” names zero chips", hint="a count is at least 1")
    sizes = MEMORY.findall(rest)
    cores = CORES.search(rest)
    bare = _remove_core_count(CLOCK.sub(" ", ADDED.sub(" ", rest)))
    unsized = MEMORY.sub(" ", bare)
    return _ParsedName(
        written=_join_words(rest),
        words=_split_words(unsized),
        outer_words=_split_words(re.sub(r"\([^)]*\)?|\[[^\]]*\]?", " ", unsized)),
        sized="".join(_split_words(bare)),
        count=count,
        memory_gib=float(sizes[0][0]) * (1024 if sizes[0][1] == "t" else 1) if sizes else None,
        cores=int(cores[1]) if cores else None,
    )


def _split_count(text: str) -> tuple[int | None, str]:
    """The count and the name in "8x H100 SXM", "4 × RTX 4090", "two RTX 3090", "h100*8", "H100 x8", "H100 (8x)"."""
    if found := COUNT_IN_WORDS.match(text):
        return COUNT_WORDS[found[1]], text[found.end() :]
    if found := COUNT_BRACKETED.search(text):
        return int(found[1]), text[: found.start()]
    if found := COUNT_OF_SOCKETS.search(text):
        return COUNT_WORDS.get(found[1]) or int(found[1]), text[: found.start()]
    # "7900 XTX" is a card, not 7900 of something.
    if (found := COUNT_FIRST.match(text)) and not TAIL_OF_MODEL.match(text, found.end() - 1):
        return int(found[1]), text[found.end() :]
    if found := COUNT_LAST.search(text):
        before = text[: found.start()]
        # "H100x8" is eight cards; "rtx3080" is not 3080 of anything.
        if (
            found[0].lstrip()[0] == "*"
            or text[found.start()].isspace()
            or "".join(_split_words(before)) in _build_index().aliases
        ):
            return int(found[1]), before
    return None, text


def _join_words(text: str) -> str:
    return "".join(WORD.findall(MARKS.sub("", text.lower())))


def _split_words(text: str) -> tuple[str, ...]:
    """The lower-case words of a text that may distinguish chips."""
    found = [SAME_WORDS.get(word, word) for word in WORD.findall(MARKS.sub("", text))]
    return tuple(word for word in found if word and word not in NOISE)


@lru_cache(maxsize=1)
def _build_index() -> _ChipIndex:
    drivers: dict[str, dict[str, Chip]] = {}
    aliases: dict[str, dict[str, Chip]] = {}
    for chip in load_chips().values():
        # Names keep their sizes here. A short form of several chips ("h100") is an alias of each.
        for name in (chip.name, *chip.aliases):
            aliases.setdefault("".join(_split_words(_remove_core_count(name.lower()))), {})[chip.name] = chip
    for chip in load_chips().values():
        for name in chip.driver_names:
            key = _join_words(name)
            drivers.setdefault(key, {})[chip.name] = chip
            # People omit the vendor. The rest is still a driver's name unless several chips share it ("H200").
            if (short := key.removeprefix(chip.vendor)) not in aliases:
                drivers.setdefault(short, {})[chip.name] = chip
    return _ChipIndex(
        MappingProxyType({key: tuple(found.values()) for key, found in drivers.items()}),
        MappingProxyType({key: tuple(found.values()) for key, found in aliases.items()}),
    )


def _remove_core_count(text: str) -> str:
    return CORES.sub(" ", text) if "core" in text else text


def _find_by_name(asked: _ParsedName, index: _ChipIndex, guess: bool) -> tuple[Chip, ...]:
    """The chips with this name, from the most literal reading to the loosest."""
    for words in (asked.words, asked.outer_words):
        without_cpu = tuple(word for word in words if word != "cpu")
        joined = "".join(words)
        for key in (joined, joined.removesuffix("s"), "".join(without_cpu), MAKERS.sub("", joined, count=1)):
            if found := index.aliases.get(key):
                return found
    for words in (asked.outer_words, asked.words):
        if found := _find_contained(words, index.aliases, guess):
            return found
    return ()


def _find_contained(words: Sequence[str], aliases: Mapping[str, tuple[Chip, ...]], guess: bool) -> tuple[Chip, ...]:
    """The chips with the longest name within `words`, unless the remaining words make it a different chip."""
    best: tuple[int, tuple[Chip, ...]] = (0, ())
    for start in range(len(words)):
        for end in range(len(words), start, -1):
            key = "".join(words[start:end])
            rest = (*words[:start], *words[end:])
            if len(key) > max(best[0], 2) and key in aliases and _are_insignificant(rest, guess):
                best = (len(key), aliases[key])
    return best[1]


def _are_insignificant(words: Iterable[str], guess: bool) -> bool:
    """Whether the words distinguish nothing.

    Short words (ti, xt, d, s) do distinguish, and so do numbers without `guess`.
    """
    return all(len(word) > 2 and word not in VARIANTS and (guess or word.isalpha()) for word in words)


def _choose_chip(candidates: tuple[Chip, ...], asked: _ParsedName, text: str, guess: bool) -> ChipMatch:
    fitting, complaint = _narrow(candidates, asked)
    if not fitting:
        if not guess:
            raise UsageError(f"“{text.strip()}”: {complaint}", hint=f"use one of: {_join_names(candidates)}")
        fitting = candidates
    chip = fitting[0]
    note = None
    guessed = len(fitting) > 1 or complaint is not None
    if len(fitting) > 1:
        note = f"“{text.strip()}” is ambiguous: {_join_names(fitting)}; using {chip.name}, the most common"
        if not guess and (common := _assume_form(fitting)):
            chip = common
            others = _join_names(other for other in fitting if other is not chip)
            note = f"“{text.strip()}”: assuming {chip.name}; others are {others}"
        elif not guess and not _are_interchangeable(fitting):
            raise UsageError(f"“{text.strip()}” is ambiguous: {_join_names(fitting)}", hint=_suggest_names(fitting))
    elif complaint is not None:
        note = f"“{text.strip()}”: {complaint}; using {chip.name}"
    return ChipMatch(
        chip=chip,
        count=asked.count or 1,
        counted=asked.count is not None,
        memory_bytes=round(asked.memory_gib * GIB) if asked.memory_gib is not None and not asked.inexact else None,
        guessed=guessed,
        note=note,
    )


def _narrow(candidates: tuple[Chip, ...], asked: _ParsedName) -> tuple[tuple[Chip, ...], str | None]:
    """The candidates with the stated memory and cores, and an error text if there are none."""
    found = candidates
    if asked.cores is not None:
        by_cores = tuple(chip for chip in found if chip.gpu_cores == asked.cores)
        found = by_cores or tuple(chip for chip in found if chip.cores == asked.cores)
        if not found and asked.inexact:
            found = candidates  # the count comes from a driver: an unlisted variant
        elif not found:
            return (), f"there is none with {asked.cores} cores"
    if asked.memory_gib is None:
        return found, None
    if asked.of_machine and not all(chip.unified for chip in found):
        return found, None
    if asked.inexact:
        return _select_nearest_memory(found, asked.memory_gib), None
    fitting = tuple(chip for chip in found if _has_memory(chip, asked.memory_gib))
    sizes = sorted({size for chip in found for size in _list_sizes(chip)})
    if fitting or not sizes:
        return fitting or found, None
    return (), f"there is none with {asked.memory_gib:g} GB, but with {', '.join(f'{size:g}' for size in sizes)} GB"


def _select_nearest_memory(candidates: tuple[Chip, ...], memory_gib: float) -> tuple[Chip, ...]:
    """The candidates with the nearest memory size, because reported sizes differ from nominal ones."""

    def measure_distance(chip: Chip) -> float:
        reported = () if chip.reported_mib is None else (chip.reported_mib / 1024,)
        return min((abs(size - memory_gib) for size in (*_list_sizes(chip), *reported)), default=0.0)

    least = min(map(measure_distance, candidates))
    return tuple(chip for chip in candidates if measure_distance(chip) <= least + 0.5)


def _list_sizes(chip: Chip) -> tuple[float, ...]:
    return chip.memory_options_gib or (() if chip.memory_gib is None else (chip.memory_gib,))


def _has_memory(chip: Chip, memory_gib: float) -> bool:
    return any(abs(size - memory_gib) < 0.5 for size in (*_list_sizes(chip), *chip.memory_also_gib))


def _are_interchangeable(candidates: Sequence[Chip]) -> bool:
    """Whether the driver reports the same name and inference sees the same memory and bandwidth."""
    kinds = {(chip.driver_names, chip.memory_gib, chip.memory_options_gib, chip.bandwidth_gb_s) for chip in candidates}
    return len(kinds) == 1 and bool(candidates[0].driver_names)


def _assume_form(candidates: Sequence[Chip]) -> Chip | None:
    """The form of one data-centre chip to assume: of those with the least memory, the most common.

    What fits the smallest fits all of them. A workstation card may be one of the forms if all have the same memory.
    """
    if len({chip.capability for chip in candidates}) > 1 or candidates[0].kind != "datacenter":
        return None
    others = {chip.kind for chip in candidates} - {"datacenter"}
    if others and (others != {"workstation"} or len({chip.memory_gib for chip in candidates}) > 1):
        return None
    return min(candidates, key=lambda chip: chip.memory_gib or 0.0)


def _join_names(candidates: Iterable[Chip]) -> str:
    return ", ".join(chip.name for chip in candidates)


def _suggest_names(candidates: Sequence[Chip]) -> str:
    differences = []
    for chip in candidates:
        sizes = "/".join(f"{size:g}" for size in _list_sizes(chip))
        size = f"{sizes} GB, " if sizes else ""
        differences.append(f"“{chip.name}” ({size}{chip.bandwidth_gb_s:g} GB/s)")
    return f"specify {', or '.join(differences)}"


def _make_unknown_error(text: str, index: _ChipIndex) -> UsageError:
    shown = text.strip()
    if not shown:
        return UsageError("no chip is named", hint="for example: 8x H100 SXM")
    for product, example in WITHOUT_CHIP:
        if product.match(shown.lower()):
            hint = f"it is sold with several chips; name its own too, for example: {shown} {example}"
            return UsageError(f"“{shown}” names a product and no known chip", hint=hint)
    nearest = ", ".join(_find_nearest_names(shown.lower(), index))
    return UsageError(
        f"unknown chip “{shown}”",
        hint=f"similar names: {nearest}" if nearest else "docs/chips.md lists the known chips",
    )


def _find_nearest_names(text: str, index: _ChipIndex) -> tuple[str, ...]:
    import difflib

    # First names with the same letters: in "RTX 9999" the letters are right and the number is not.
    make = re.match(r"[a-z]{3,}", text)
    alike = {
        chip.name.lower()[at:]: chip.name
        for chip in load_chips().values()
        if make is not None and (at := chip.name.lower().find(make[0])) >= 0
    }
    found = [alike[name] for name in difflib.get_close_matches(text, alike, n=5, cutoff=0.6)]
    near = difflib.get_close_matches("".join(_split_words(text)), index.aliases, n=6, cutoff=0.65)
    names = dict.fromkeys(found or (chip.name for alias in near for chip in index.aliases[alias]))
    return tuple(names)[:5]
