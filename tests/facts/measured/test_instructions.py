"""Instruction sets are checked by executing them, on this CPU and with code that cannot run."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bedplate.facts.cpu import INSTRUCTION_SETS
from bedplate.facts.hardware import probe
from bedplate.facts.measured import execute
from bedplate.facts.measured.instructions import (
    ARM,
    X86,
    Snippet,
    check_instruction_sets,
    check_snippet,
    judge_exit,
    list_snippets,
)

on_x86_linux = pytest.mark.skipif(
    not sys.platform.startswith("linux") or platform.machine() != "x86_64", reason="runs x86 machine code on Linux"
)
SIX = Snippet("b806000000c3", 6, "mov eax, 6")


def test_every_advertised_set_is_tried_in_order() -> None:
    cpu = probe().cpu
    seen: list[int] = []
    checks = check_instruction_sets(cpu.instruction_sets, cpu.arch, seen.append)
    assert [one.name for one in checks] == list(cpu.instruction_sets)
    assert seen == list(range(1, len(checks) + 1))
    assert all(one.why for one in checks if one.result != "runs")


@on_x86_linux
def test_code_with_the_expected_result_counts_as_running() -> None:
    assert check_snippet("six", SIX).result == "runs"


@on_x86_linux
def test_an_illegal_instruction_ends_only_the_process_that_tried_it() -> None:
    found = check_snippet("ud2", Snippet("0f0bc3", 6, "ud2"))
    assert (found.result, found.why) == ("does not run", "SIGILL at ud2")


@on_x86_linux
def test_a_fault_counts_as_not_running() -> None:
    assert check_snippet("null", Snippet("31c08b00c3", 6, "a load from 0")).why == "SIGSEGV at a load from 0"


@on_x86_linux
def test_a_wrong_result_does_not_count_as_running() -> None:
    found = check_snippet("five", Snippet("b805000000c3", 6, "six"))
    assert (found.result, found.why) == ("does not run", "six gave 5 instead of 6")


@on_x86_linux
def test_amx_needs_permission_from_the_kernel() -> None:
    """Without the request to the kernel, the same code is killed."""
    if "amx_tile" not in probe().cpu.instruction_sets or check_snippet("amx_tile", X86["amx_tile"]).result != "runs":
        pytest.skip("this CPU has no AMX, or does not let it run")
    assert check_snippet("amx_tile", replace(X86["amx_tile"], needs=None)).result == "does not run"


@on_x86_linux
def test_the_process_leaves_no_core_file(tmp_path: Path) -> None:
    script = Path(execute.__file__)
    done = subprocess.run([sys.executable, "-I", "-S", script, "0f0bc3"], cwd=tmp_path, capture_output=True)
    assert done.returncode < 0 and not list(tmp_path.iterdir())


def test_a_set_without_a_test_instruction_is_not_tried() -> None:
    assert check_snippet("sse9", None).result == "not tried"
    (found,) = check_instruction_sets(["rvv"], "riscv64")
    assert found.result == "not tried" and found.why


def test_every_set_that_the_probe_knows_has_code() -> None:
    assert set(X86) | set(ARM) == set(INSTRUCTION_SETS)
    assert list_snippets("aarch64") is ARM and list_snippets("x86_64") is X86


@pytest.mark.parametrize(("name", "snippet"), [*X86.items(), *ARM.items()])
def test_code_contains_a_return(name: str, snippet: Snippet) -> None:
    code = bytes.fromhex(snippet.code)
    assert b"\xc3" in code if name in X86 else code.endswith(bytes.fromhex("c0035fd6"))


def test_without_executable_memory_nothing_is_tried() -> None:
    found = judge_exit("avx2", SIX, execute.NOT_TRIED, b"", b"this system does not allow executable memory (EACCES)\n")
    assert (found.result, found.why) == ("not tried", "this system does not allow executable memory (EACCES)")


@pytest.mark.parametrize(
    ("code", "printed", "errors", "result"),
    [
        (0, b"6\n", b"", "runs"),
        (0, b"", b"", "does not run"),
        (0, b"\xff\xfe", b"", "does not run"),
        (1, b"", b"the kernel does not give this process the tiles' registers", "does not run"),
        (1, b"", b"", "does not run"),
        (-4, b"", b"", "does not run"),
        (-64, b"6\n", b"", "does not run"),
    ],
)
def test_the_result_follows_from_how_the_process_ended(code: int, printed: bytes, errors: bytes, result: str) -> None:
    found = judge_exit("six", SIX, code, printed, errors)
    assert found.result == result and (found.why or result == "runs")


@on_x86_linux
def test_a_system_that_denies_executable_memory_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """PR_SET_MDWE (since Linux 6.3) denies executable memory, as SELinux policies do. Children inherit it."""
    pr_set_mdwe, refuse_exec_gain = 65, 1

    def ban() -> None:
        ctypes.CDLL(None).prctl(pr_set_mdwe, refuse_exec_gain, 0, 0, 0)

    asked = "import ctypes; print(ctypes.CDLL(None).prctl(66, 0, 0, 0, 0))"
    banned = subprocess.run([sys.executable, "-c", asked], preexec_fn=ban, capture_output=True, text=True)
    if banned.stdout.strip() != "1":
        pytest.skip(f"this kernel has no such ban: {banned.stdout}{banned.stderr}")
    real: Any = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *given, **options: real(*given, preexec_fn=ban, **options))
    found = check_snippet("six", SIX)
    assert found.result == "not tried" and "does not allow executable memory" in (found.why or "")
