"""Runs of other tools: what an imported file contains, and what it lacks."""

from __future__ import annotations

import datetime as dt
import statistics
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from bedplate._version import __version__
from bedplate.measure.flags import flag_cell
from bedplate.values import replace_fields
from bedplate.values.run import Cell, Flag, Load, Repeat, Run, RunEnvironment, StatedFigures, Subject

UNKNOWN = "not reported"
UNKNOWN_TIME = "1970-01-01T00:00:00Z"


class ImportOrigin(msgspec.Struct, frozen=True):
    """The imported file. Importing the same file again gives the same run."""

    name: str
    sha256: str

    @property
    def run_id(self) -> str:
        return f"file-{self.sha256[:10]}"

    @property
    def machine(self) -> str:
        """A unique name, because the file does not contain the machine: no other run is from the same one."""
        return f"file:{self.sha256[:11]}"


def make_imported_run(
    origin: ImportOrigin,
    cells: Sequence[Cell],
    *,
    system: str = UNKNOWN,
    python: str = UNKNOWN,
    hardware: str = UNKNOWN,
) -> Run:
    environment = RunEnvironment(
        bedplate=__version__, python=python, system=system, hardware=hardware, machine=origin.machine
    )
    flagged = tuple(replace_fields(cell, flags=(*flag_cell(cell), *_flag_gaps(cell, hardware))) for cell in cells)
    return Run(
        id=origin.run_id, at=cells[0].at, environment=environment, cells=flagged, finished=True, source=origin.name
    )


def make_imported_cell(
    origin: ImportOrigin,
    number: int,
    at: str,
    subject: Subject,
    load: Load,
    notes: str,
    *,
    repeats: Iterable[Repeat] = (),
    stated: StatedFigures | None = None,
) -> Cell:
    return Cell(
        id=f"{origin.sha256[:10]}-{number}",
        run=origin.run_id,
        at=at,
        machine=origin.machine,
        subject=subject,
        load=load,
        repeats=tuple(repeats),
        notes=notes,
        halt="most",
        stated=stated,
    )


def _flag_gaps(cell: Cell, hardware: str) -> Iterator[Flag]:
    missing = list(list_gaps(cell, hardware))
    if missing:
        yield Flag(kind="gaps", text=f"the file does not contain: {', '.join(missing)}")


def list_gaps(cell: Cell, hardware: str) -> Iterator[str]:
    """What a result of bedplate's own would contain."""
    subject = cell.subject
    if subject.model == UNKNOWN:
        yield "model"
    if cell.at == UNKNOWN_TIME:
        yield "time"
    if hardware == UNKNOWN:
        yield "hardware"
    if subject.engine_version is None:
        yield "engine version"
    if subject.quantization is None:
        yield "quantization"
    if subject.weights_id is None:
        yield "weights hash"
    if not any(repeat.samples for repeat in cell.repeats):
        yield "samples of single requests"
    if cell.quality is None:
        yield "quality of the answers"
    if all(repeat.use.peak_memory_bytes is None for repeat in cell.repeats):
        yield "memory"


def compute_median_count(counts: Sequence[float]) -> int:
    return max(1, round(statistics.median(counts))) if counts else 1


def format_epoch(since_1970: float) -> str:
    return dt.datetime.fromtimestamp(since_1970, dt.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def parse_local_time(text: object, form: str | None = None) -> str:
    """A time without a time zone is read as UTC."""
    try:
        if form is not None:
            parsed = dt.datetime.strptime(str(text), form).replace(tzinfo=dt.UTC)
        else:
            given = dt.datetime.fromisoformat(str(text))
            parsed = given.replace(tzinfo=dt.UTC) if given.tzinfo is None else given.astimezone(dt.UTC)
    except ValueError:
        return UNKNOWN_TIME
    return parsed.isoformat(timespec="seconds").replace("+00:00", "Z")
