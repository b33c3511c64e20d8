"""Records of a fleet run: order of engines, remaining time, results of each engine, and their table."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec

from bedplate.values.units import format_seconds, format_size

ORDER = ("llama.cpp", "mistral.rs", "pytorch", "mlx", "onnxruntime", "sglang", "vllm")
"""Fast engines first, and PyTorch before those for which it dequantizes the weights. Engines that are not listed run
before the last two, which need gigabytes and minutes."""
SLOW = ("sglang", "vllm")
EXPECTED_S = {
    "llama.cpp": 80.0, "mistral.rs": 300.0, "pytorch": 200.0, "mlx": 240.0, "onnxruntime": 160.0, "sglang": 300.0,
    "vllm": 200.0,
}  # fmt: skip
"""Expected time of an engine on two idle cores, measured under other load; corrected after each engine."""
USUAL_S = 200.0
CHECKS = (
    "answer",
    "stream",
    "usage",
    "pages",
    "port",
    "cancel",
    "4 at once",
    "schema",
    "agreement",
    "stop",
    "again",
    "restart",
)
LIFE = ("stop", "again", "restart")

State = Literal["ok", "near tie", "none", "failed", "cut short"]
MARKS: dict[State, str] = {"ok": "ok", "near tie": "ok*", "none": "–", "failed": "FAILED", "cut short": "cut short"}


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """How one check ended."""

    state: State
    shown: str | None = None
    """Text in the table instead of the state."""
    why: str | None = None
    seconds: float | None = None


class Row(msgspec.Struct, kw_only=True):
    """The results of one engine. `None`: not reached."""

    engine: str
    version: str | None = None
    weights: str | None = None
    install_s: float | None = None
    prepare_s: float | None = None
    start_s: float | None = None
    marks: dict[str, Mark] = {}
    rss_bytes: int | None = None
    disk_bytes: int | None = None
    seconds: float | None = None
    not_run: str | None = None
    """Why it was not run."""
    evidence: str | None = None
    """The end of the output and the log, if something failed."""

    @property
    def failed(self) -> tuple[str, ...]:
        return tuple(name for name, mark in self.marks.items() if mark.state == "failed")


class Fleet(msgspec.Struct, kw_only=True):
    """A complete run, as written by `--json`."""

    schema: Literal["fleet/1"] = "fleet/1"
    machine: str
    rows: list[Row] = []
    cannot_run: dict[str, str] = {}
    seconds: float | None = None
    peak_disk_bytes: int | None = None


class Budget:
    """The remaining time. The expected time of the next engine is scaled by how much longer earlier ones took."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self.limit_s = limit_s
        self._expected_s = self._took_s = 0.0

    def spent_s(self) -> float:
        return self._clock() - self._began

    def left_s(self) -> float:
        return self.limit_s - self.spent_s()

    def expects_s(self, engine: str) -> float:
        pace = max(1.0, self._took_s / self._expected_s) if self._expected_s else 1.0
        return EXPECTED_S.get(engine, USUAL_S) * pace

    def took(self, engine: str, turn_s: float) -> None:
        self._expected_s += EXPECTED_S.get(engine, USUAL_S)
        self._took_s += turn_s

    def why_not(self, engine: str) -> str | None:
        """Why an engine is not run; `None`: there is enough time."""
        left_s, expected_s = self.left_s(), self.expects_s(engine)
        if left_s >= expected_s:
            return None
        return f"no time left: about {format_seconds(expected_s)} are needed, {format_seconds(max(left_s, 0))} are left"


def sort_engines(engines: Iterable[str]) -> list[str]:
    """Engines by expected time; unknown ones before the slow ones."""

    def place(engine: str) -> tuple[int, str]:
        known = ORDER.index(engine) if engine in ORDER else ORDER.index(SLOW[0]) - 0.5
        return round(2 * known), engine

    return sorted(engines, key=place)


def exit_code(rows: Iterable[Row]) -> int:
    """1 if an engine failed a check; engines that were not run do not count."""
    return 1 if any(row.failed for row in rows) else 0


def table(rows: Sequence[Row]) -> str:
    """One line per engine, with columns as wide as their content."""
    head = ["engine", "version", "weights", "install", "prepare", "start", *CHECKS, "peak RSS", "disk", "turn"]
    lines = [head, *(_cells(row) for row in rows if row.not_run is None)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(head))]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([*shown, *(f"{row.engine}  not run: {row.not_run}" for row in rows if row.not_run is not None)])


def _cells(row: Row) -> list[str]:
    times = [_or_unknown(one, format_seconds) for one in (row.install_s, row.prepare_s, row.start_s)]
    sizes = [_or_unknown(one, format_size) for one in (row.rss_bytes, row.disk_bytes)]
    marks = [_mark(row.marks.get(name)) for name in CHECKS]
    named = [row.engine, row.version or "?", row.weights or "?"]
    return [*named, *times, *marks, *sizes, _or_unknown(row.seconds, format_seconds)]


def _mark(mark: Mark | None) -> str:
    return "not run" if mark is None else mark.shown or MARKS[mark.state]


def _or_unknown(value: float | None, words: Callable[[float], str]) -> str:
    return "?" if value is None else words(value)


def list_footnotes(rows: Iterable[Row]) -> list[str]:
    """Details of every failure, near tie and check that was cut short."""
    return [
        f"{row.engine}: {name}: {mark.why}"
        for row in rows
        for name, mark in row.marks.items()
        if mark.why is not None and mark.state not in ("none",)
    ]
