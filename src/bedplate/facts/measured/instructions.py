"""Check whether a CPU's advertised instruction sets run, by executing one instruction of each.

A hypervisor, an emulator or an operating system may advertise an instruction set that it does not run. An engine that
uses it crashes with an illegal instruction. GNU as assembled the code below. Each snippet is a function without
arguments that uses only caller-saved registers and returns a number that only the real instruction produces.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bedplate.facts.measured.execute import NOT_TRIED
from bedplate.values.measurements import InstructionSetCheck

LIMIT_S = 20.0
# A tile configuration (palette 1; tiles 0 to 2 of one row with four bytes), at the end of each AMX function.
TILES = "0100" + "00" * 14 + "040004000400" + "00" * 26 + "010101" + "00" * 13


@dataclass(frozen=True, slots=True)
class Snippet:
    code: str
    """Machine code in hexadecimal digits."""
    expected: int
    what: str
    needs: str | None = None


X86 = {
    "sse4_2": Snippet("31c0b901000000f20f38f1c1c3", 0xDD45AAB8, "crc32 of 1"),
    "avx": Snippet(
        "b803000000c5f96ec0c5f85bc0c4e37d18c001c5fc58c0c4e37d19c001c5fa2cc0c5f877c3", 6, "vaddps ymm: 3 + 3"
    ),
    "avx2": Snippet("b803000000c5f96ec0c4e27d58c0c5fdfec0c4e37d39c001c5f97ec0c5f877c3", 6, "vpaddd ymm: 3 + 3"),
    "fma": Snippet(
        "b803000000c5f96ec0c5f85bc0c4e37d18c001c4e27da8c0c4e37d19c001c5fa2cc0c5f877c3", 12, "vfmadd213ps ymm: 3 × 3 + 3"
    ),
    "f16c": Snippet("b803000000c5f96ec0c5f85bc0c4e37d1dc000c5f97ec0c5f877c3", 0x4200, "vcvtps2ph: 3 in 16 bits"),
    "avx_vnni": Snippet(
        "b804030201c5f96ec0c4e27d58c0b808070605c5f96ec8c4e27d58c9c5e9efd2c4e27d50d1c4e37d39d201c5f97ed0c5f877c3",
        70,
        "vpdpbusd ymm: 4·8 + 3·7 + 2·6 + 1·5",
    ),
    "avx512f": Snippet("b80300000062f27d487cc062f17d48fec062f3fd483bc001c5f97ec0c5f877c3", 6, "vpaddd zmm: 3 + 3"),
    "avx512bw": Snippet(
        "b80403020162f27d487cc062f17d48fcc062f3fd483bc001c5f97ec0c5f877c3", 0x02040608, "vpaddb zmm: doubled bytes"
    ),
    "avx512_vnni": Snippet(
        "b80403020162f27d487cc0b80807060562f27d487cc862f16d48efd262f27d4850d162f3fd483bd201c5f97ed0c5f877c3",
        70,
        "vpdpbusd zmm: 4·8 + 3·7 + 2·6 + 1·5",
    ),
    "avx512_bf16": Snippet(
        "b84040404062f27d487cc062f16d48efd262f27e4852d062f3fd483bd201c5fa2cc2c5f877c3",
        18,
        "vdpbf16ps zmm: 3·3 + 3·3",
    ),
    "avx512_fp16": Snippet(
        "b80042004262f27d487cc062f57c4858c062f3fd483bc001c5f97ec0c5f877c3", 0x46004600, "vaddph zmm: 3 + 3"
    ),
    "amx_tile": Snippet(
        "488d153c000000c4e27849024883ec18c7042404030201c744240800000000b904000000c4e27b4b0c0c488d542408"
        "c4e27a4b0c0ac4e27849c08b4424084883c418c3" + TILES,
        0x01020304,
        "tileloadd, tilestored: four bytes through a tile",
        needs="amx",
    ),
    "amx_int8": Snippet(
        "488d154b000000c4e27849024883ec18c7042404030201c744240808070605b904000000488d542408c4e27b49c0"
        "c4e27b4b0c0cc4e27b4b140ac4e26b5ec1c4e27a4b040cc4e27849c08b04244883c418c3" + TILES,
        70,
        "tdpbssd: 4·8 + 3·7 + 2·6 + 1·5",
        needs="amx",
    ),
    "amx_bf16": Snippet(
        "488d154b000000c4e27849024883ec18c7042440404040c744240840404040b904000000488d542408c4e27b49c0"
        "c4e27b4b0c0cc4e27b4b140ac4e26a5cc1c4e27a4b040cc4e27849c08b04244883c418c3" + TILES,
        0x41900000,
        "tdpbf16ps: 3·3 + 3·3 as a float",
        needs="amx",
    ),
}
# Checked with QEMU: these values on a CPU with all of them, and SIGILL for all but NEON on a Cortex-A53.
ARM = {
    "neon": Snippet("6004004f0084a04e003c1c0ec0035fd6", 6, "add v.4s: 3 + 3"),
    "dotprod": Snippet("60e4004fa1e4004f0204004f0294816e403c1c0ec0035fd6", 60, "udot: 4 × 3·5"),
    "i8mm": Snippet("60e4004fa1e4004f0204004f02a4816e403c1c0ec0035fd6", 120, "ummla: 8 × 3·5"),
    "bf16": Snippet("00e4024f0204004f02fc406e4000381ec0035fd6", 18, "bfdot: 3·3 + 3·3"),
    "sve": Snippet("60c0b8250000a004003c1c0ec0035fd6", 6, "add z.s: 3 + 3"),
    "sve2": Snippet("60c0b8250060a004003c1c0ec0035fd6", 9, "mul z.s: 3 × 3"),
    "sme": Snippet("2058bf041f0000f1e0079f1ac0035fd6", 1, "rdsvl: a vector length that is not 0"),
}


def check_instruction_sets(
    advertised: Sequence[str], arch: str, update: Callable[[int], None] = lambda done: None
) -> tuple[InstructionSetCheck, ...]:
    """One check for each of `advertised`, in its order."""
    found = []
    for done, name in enumerate(advertised):
        found.append(check_snippet(name, list_snippets(arch).get(name)))
        update(done + 1)
    return tuple(found)


def list_snippets(arch: str) -> dict[str, Snippet]:
    if arch in ("x86_64", "AMD64", "amd64"):
        return X86
    return ARM if arch in ("aarch64", "arm64") else {}


def check_snippet(name: str, snippet: Snippet | None) -> InstructionSetCheck:
    if snippet is None:
        return InstructionSetCheck(name=name, result="not tried", why="bedplate has no test instruction for it")
    if sys.platform == "win32":
        return InstructionSetCheck(name=name, result="not tried", why="not supported on this operating system")
    script = Path(__file__).with_name("execute.py")
    command = [sys.executable, "-I", "-S", str(script), snippet.code, *filter(None, [snippet.needs])]
    try:
        done = subprocess.run(command, capture_output=True, timeout=LIMIT_S, check=False, start_new_session=True)
    except (OSError, subprocess.TimeoutExpired) as error:
        return InstructionSetCheck(name=name, result="not tried", why=f"its process failed: {error}")
    return judge_exit(name, snippet, done.returncode, done.stdout, done.stderr)


def judge_exit(name: str, snippet: Snippet, code: int, printed: bytes, errors: bytes) -> InstructionSetCheck:
    """Judge how the process that ran the snippet ended."""
    last_line = (errors.decode(errors="replace").strip().splitlines() or [""])[-1]
    if code == NOT_TRIED:
        return InstructionSetCheck(name=name, result="not tried", why=last_line)
    if code < 0:
        return InstructionSetCheck(name=name, result="does not run", why=f"{_name_signal(-code)} at {snippet.what}")
    if code > 0:
        return InstructionSetCheck(name=name, result="does not run", why=last_line or f"exit code {code}")
    value = printed.decode(errors="replace").strip()
    if value != str(snippet.expected):
        why = f"{snippet.what} gave {value or 'nothing'} instead of {snippet.expected}"
        return InstructionSetCheck(name=name, result="does not run", why=why)
    return InstructionSetCheck(name=name, result="runs")


def _name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
