"""The child process of part.py: `python -m bedplate.facts.measured.worker PART`, request on stdin, lines on stdout."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

from bedplate.facts.measured import cuda, disk, matrix, ram
from bedplate.facts.measured.part import PROGRESS, RESULT
from bedplate.values import Record

PARTS: dict[str, tuple[type[Record], Callable[[Any, Callable[[float], None]], Record]]] = {
    "cuda": (cuda.CudaRequest, cuda.measure_gpus),
    "disk": (disk.DiskRequest, disk.measure_disk),
    "matrix": (matrix.MatrixRequest, matrix.measure_matrix),
    "ram": (ram.RamRequest, ram.measure_ram),
}


def main() -> None:
    import msgspec

    _end_with_parent()
    _prefer_for_oom_kill()
    kind, measure = PARTS[sys.argv[1]]
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=kind)
    answer = measure(request, lambda share: _print_line(f"{PROGRESS} {round(100 * share)}"))
    _print_line(f"{RESULT} {msgspec.json.encode(answer).decode()}")


def _print_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _end_with_parent() -> None:
    """Let Linux end this process if its parent is killed."""
    if sys.platform.startswith("linux"):
        import ctypes
        import signal

        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL, 0, 0, 0)


def _prefer_for_oom_kill() -> None:
    """If memory runs out, let the kernel kill this measurement first."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # noqa: PTH123
        file.write("1000")


if __name__ == "__main__":
    main()
