"""Runs every engine that this machine supports: fresh environments, the built-in model, `bedplate serve`, a table.

`make fleet` runs it. Each engine is installed, serves requests, is stopped and killed, and its disk space is freed
before the next one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from tests.fleet import checks
from tests.fleet.checks import Endpoint, NearTie, OutOfTime, Wrong, endpoint
from tests.fleet.embedding import TEXTS, check_vectors, compute_vectors, fetch_embedder
from tests.fleet.serving import START_LIMIT_S, Serving, serving
from tests.fleet.table import LIFE, Budget, Fleet, Mark, Row, exit_code, list_footnotes, sort_engines, table
from tests.private_ports import check_private_port

from bedplate.decide import decide, plan
from bedplate.engines import get_engine, load_engines
from bedplate.errors import BedplateError
from bedplate.facts.hardware import probe
from bedplate.measure.reference import Reference, find_reference
from bedplate.run.builtin import fetch_builtin
from bedplate.run.environments import find_environment
from bedplate.run.models import find_known_model
from bedplate.run.prepare import UNPACKER, get_prepared_dir
from bedplate.values import Decision, Hardware, Plan, Workload
from bedplate.values.units import format_memory, format_seconds, format_size

BUDGET_S = float(os.environ.get("BEDPLATE_FLEET_BUDGET_S", "1680"))
RESTART_LIMIT_S = 900.0
LEAST_PREFIXES = 500
ENOUGH_S = 60.0
"""Fast engines compute more than the least number of prefixes within this time."""
MOST_S = 510.0
"""Time limit for slow engines, so that the others can run too."""
LEAST_START_S = 300.0
ELASTIC = ("cancel", "4 at once", "schema", "agreement", "again", "restart")
"""Checks that are left out if time runs out."""
LAST_RESERVE_S = 60.0
"""Time reserved for stopping, restarting and cleaning up."""


class EngineRun:
    """The run of one engine: its checks, their results, and progress messages."""

    def __init__(self, chosen: Plan, budget: Budget, reference: Reference | None, tell: Callable[[str], None]) -> None:
        self.plan = chosen
        self.engine = chosen.engine
        self.budget = budget
        self.reference = reference
        self.tell = tell
        self.row = Row(engine=chosen.engine, version=chosen.engine_version, weights=chosen.weights.label, marks={})

    def check(self, name: str, what: Callable[[], object]) -> bool:
        """Run one check and record its result. Any error counts as a failure of the engine."""
        import openai

        began = time.monotonic()
        try:
            if name in ELASTIC and self.budget.left_s() <= 0:
                raise OutOfTime
            found = what()
            mark = found if isinstance(found, Mark) else Mark(state="ok")
        except OutOfTime:
            mark = Mark(state="cut short", why="no time left")
        except NearTie as tie:
            mark = Mark(state="near tie", why=str(tie))
        except (Wrong, openai.APIError, BedplateError, OSError, subprocess.SubprocessError) as error:
            mark = Mark(
                state="failed", why=f"{error}" if isinstance(error, Wrong) else f"{type(error).__name__}: {error}"
            )
        except Exception:
            mark = Mark(state="failed", why=traceback.format_exc().strip())
        took_s = time.monotonic() - began
        self.row.marks[name] = msgspec.structs.replace(mark, seconds=round(took_s, 1))
        shown = mark.shown or mark.state
        self.tell(f"{name}: {shown}, {format_seconds(took_s)}" + (f" ({mark.why})" if mark.state == "failed" else ""))
        return mark.state in ("ok", "near tie")

    def wait_ready(self, one: Serving) -> None:
        """Wait for the start; if the total time is over, only as long as a running start needs."""
        limit_s = min(START_LIMIT_S, max(self.budget.left_s(), LEAST_START_S))
        try:
            one.wait_ready(limit_s)
        except Wrong:
            if one.process.poll() is None and self.budget.left_s() <= 0:
                raise OutOfTime from None
            raise

    def skip(self, name: str, why: str) -> None:
        self.row.marks[name] = Mark(state="none", why=why)

    def take(self) -> Row:
        began = time.monotonic()
        before = set(_prepared())
        try:
            if self._first_start():
                self._second_start()
        finally:
            self.row.seconds = round(time.monotonic() - began, 1)
            made = {folder: record for folder, record in _prepared().items() if folder not in before}
            self.row.prepare_s = sum(record["seconds"] for record in made.values())
            if self.row.install_s is not None:
                self.row.install_s = max(0.0, round(self.row.install_s - self.row.prepare_s, 1))
            self.row.disk_bytes = self._disk_bytes()
        return self.row

    def _disk_bytes(self) -> int | None:
        """Disk space of its environment and of prepared models."""
        with contextlib.suppress(BedplateError):
            if found := find_environment(get_engine(self.engine), self.plan.settings.device):
                return found.disk_bytes + sum(int(record["disk_bytes"]) for record in _prepared().values())
        return None

    def _first_start(self) -> bool:
        """Whether it became ready."""
        self.tell("starting for the first time")
        with serving("--engine", self.engine, tell=self.tell) as one:
            ready = self.check("answer", lambda: self.wait_ready(one))
            if ready:
                self.row.install_s = one.ready_s
                self.tell(f"ready after {format_seconds(one.ready_s or 0)}")
                with endpoint(one.root, one.endpoint["model"]) as at:
                    self._ask(one, at)
                self.row.rss_bytes = one.peak_bytes()
                self.check("stop", one.stop)
            if self.row.failed:
                self.row.evidence = one.evidence()
        return ready

    def _ask(self, one: Serving, at: Endpoint) -> None:
        self.check("answer", lambda: checks.knows_the_capital(at))
        self.check("usage", lambda: checks.counts_tokens(at))
        self.check("stream", lambda: checks.streams_what_it_answers(at))
        self.check("pages", lambda: checks.shows_its_pages(at, self.engine))
        self.check("port", lambda: self._keeps_its_port_private(one))
        self.check("4 at once", lambda: checks.answers_four_at_once(at))
        self.check("cancel", lambda: checks.stops_when_its_client_goes(at, one.cpu_s))
        features = get_engine(self.engine).features
        if features is not None and features.structured_output != "none":
            self.check("schema", lambda: checks.fits_a_schema(at))
        else:
            self.skip("schema", "structured output is not supported")
        if (reference := self.reference) is not None:
            self.check("agreement", lambda: self._agreement(at, reference))

    def _keeps_its_port_private(self, one: Serving) -> None:
        check_private_port(one.descendants(), get_engine(self.engine), [Path(one.endpoint["log"])])

    def _agreement(self, at: Endpoint, reference: Reference) -> Mark:
        pairs = checks.choose_prefixes(reference)
        began = time.monotonic()

        def may_go_on(done: int) -> bool:
            limit_s = ENOUGH_S if done >= LEAST_PREFIXES else MOST_S
            return time.monotonic() - began < limit_s and self.budget.left_s() > LAST_RESERVE_S

        if not may_go_on(0):
            raise OutOfTime
        found = checks.compare_next_tokens(
            at,
            self.plan,
            reference,
            pairs,
            may_go_on=may_go_on,
            tell=lambda done: self.tell(f"agreement: {done} asked") if done % 200 == 0 else None,
        )
        counts = f"{found.agreed} of {found.answered}"
        if found.verdict != "ok":
            shown = "; ".join(
                f"after …{one.prefix[-40:]!r} {one.got!r} instead of {one.expected!r}" for one in found.evidence[:5]
            )
            return Mark(state="failed", shown=f"FAILED {counts}", why=f"{found.why}; {shown}")
        if found.asked < LEAST_PREFIXES:
            return Mark(state="cut short", shown=counts, why=f"no time for {LEAST_PREFIXES} prefixes")
        return Mark(state="ok", shown=counts)

    def _second_start(self) -> None:
        if self.budget.left_s() <= 0:
            for name in ("again", "restart"):
                self.row.marks[name] = Mark(state="cut short", why="no time left")
            return
        self.tell("starting again")
        with serving("--engine", self.engine, tell=self.tell) as one:
            if self.check("again", lambda: self._finds_everything(one)):
                self.row.start_s = one.ready_s
                if self.row.install_s is not None and one.ready_s is not None:
                    self.row.install_s -= one.ready_s
                with endpoint(one.root, one.endpoint["model"]) as at:
                    self.check("restart", lambda: self._survives_a_kill(one, at))
                self.row.rss_bytes = max(self.row.rss_bytes or 0, one.peak_bytes())
                if "stop" not in self.row.failed:
                    self.check("stop", one.stop)
            if set(self.row.failed) & set(LIFE):
                self.row.evidence = one.evidence()

    def _finds_everything(self, one: Serving) -> None:
        self.wait_ready(one)
        words = ("installing", "converting", "downloading", "building")
        again = [line.strip() for line in one.printed if any(word in line for word in words)]
        checks.expect(not again, f"the second start repeated steps: {again}")

    def _survives_a_kill(self, one: Serving, at: Endpoint) -> None:
        import openai

        before = checks.read_text(at.chat(checks.PARIS))
        one.kill_engine()
        deadline = time.monotonic() + RESTART_LIMIT_S
        while True:
            with contextlib.suppress(openai.APIError):
                after = checks.read_text(at.chat(checks.PARIS))
                checks.expect(after == before, f"the answer was {before!r} before the kill, and {after!r} after it")
                break
            checks.expect(one.process.poll() is None, "serve exited when its engine was killed")
            if self.budget.left_s() < -LEAST_START_S:
                raise OutOfTime
            checks.expect(time.monotonic() < deadline, f"no answer within {RESTART_LIMIT_S:.0f} s after the kill")
            time.sleep(0.5)
        restarts = checks.sum_metric(at, "bedplate_engine_restarts")
        checks.expect(restarts == 1, f"the gateway counts {restarts:.0f} restarts")


class EmbeddingRun(EngineRun):
    """ONNX Runtime with an embedding model, whose vectors are compared with PyTorch's."""

    def __init__(self, folder: Path, chosen: Plan, budget: Budget, tell: Callable[[str], None]) -> None:
        super().__init__(chosen, budget, None, tell)
        self.folder = folder
        self.row.engine = f"{chosen.engine} (vectors)"

    def _first_start(self) -> bool:
        for name in ("stream", "usage", "cancel", "4 at once", "schema", "restart", "again"):
            self.skip(name, "an embedding model generates no text")
        with serving(str(self.folder), "--engine", self.engine, tell=self.tell) as one:
            ready = self.check("answer", lambda: self.wait_ready(one))
            if ready:
                self.row.start_s = one.ready_s
                with endpoint(one.root, one.endpoint["model"]) as at:
                    self.check("agreement", lambda: self._vectors(at))
                    self.check("pages", lambda: self._pages(at))
                    self.check("port", lambda: self._keeps_its_port_private(one))
                self.row.rss_bytes = one.peak_bytes()
                self.check("stop", one.stop)
            if self.row.failed:
                self.row.evidence = one.evidence()
        return ready

    def _second_start(self) -> None:
        """Not needed: the run before has tested a second start of this environment."""

    def _pages(self, at: Endpoint) -> None:
        status, text = at.page("/v1/models")
        checks.expect(status == 200 and json.loads(text)["data"][0]["engine"] == self.engine, f"/v1/models: {text}")

    def _vectors(self, at: Endpoint) -> Mark:
        environment = find_environment(get_engine(self.engine))
        assert environment is not None
        check_vectors(at, compute_vectors(environment.interpreter, self.folder))
        return Mark(state="ok", shown=f"{len(TEXTS)} of {len(TEXTS)}")


def _prepared() -> dict[Path, dict[str, Any]]:
    """Records of the prepared models."""
    return {file.parent: json.loads(file.read_text()) for file in get_prepared_dir().glob("*/bedplate.json")}


def clean_up(home: Path, *, last: bool) -> None:
    """Free the disk space of an engine. Dequantized weights are kept for later engines."""
    shutil.rmtree(home / "engines", ignore_errors=True)
    for folder, record in _prepared().items():
        if last or record["argv"][0] != UNPACKER:
            shutil.rmtree(folder, ignore_errors=True)


def disk_bytes(folder: Path) -> int:
    """Disk usage, with hard links counted once."""
    seen: dict[int, int] = {}
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):
            found = file.lstat()
            seen[found.st_ino] = found.st_blocks * 512
    return sum(seen.values())


def list_candidates(hardware: Hardware, asked: list[str] | None) -> tuple[dict[str, Decision], dict[str, str]]:
    """The engines that can run here with the decision for each, and why the others cannot."""
    able: dict[str, Decision] = {}
    unable: dict[str, str] = {}
    for name in asked or list(load_engines()):
        found = decide(hardware, find_known_model(), Workload(origin="default"), name, installable=True)
        if found.engine == name:
            able[name] = found
            continue
        why = [one for one in found.refused if one.engine == name]
        unable[name] = why[0].why if why else "; ".join(found.hints) or "it was not chosen"
    return able, unable


def run(options: argparse.Namespace, home: Path, tell: Callable[[str], None]) -> Fleet:
    budget = Budget(options.budget_s)
    hardware = probe()
    asked = options.engines.split(",") if options.engines else None
    able, unable = list_candidates(hardware, asked)
    fleet = Fleet(machine=_machine(hardware), rows=[], cannot_run=unable)
    tell(f"{fleet.machine}; {format_seconds(budget.limit_s)} for {', '.join(sort_engines(able)) or 'no engine'}")
    reference = find_reference(find_known_model()) if fetch_builtin() else None
    peak = 0
    turns = sort_engines(able)
    for name in turns:
        chosen = plan(able[name], find_known_model(), Workload(origin="default"))
        row = Row(
            engine=name, version=chosen.engine_version, weights=chosen.weights.label, not_run=budget.why_not(name)
        )
        if row.not_run is None:
            row = run_engine(EngineRun(chosen, budget, reference, _teller(tell, name)), budget)
        fleet.rows.append(row)
        if name == "onnxruntime" and row.not_run is None:
            fleet.rows.append(_embedding(hardware, home, budget, tell))
        peak = max(peak, disk_bytes(home))
        if not options.keep:
            clean_up(home, last=name == turns[-1])
    fleet.seconds = round(budget.spent_s(), 1)
    fleet.peak_disk_bytes = peak
    return fleet


def run_engine(turn: EngineRun, budget: Budget) -> Row:
    row = turn.take()
    budget.took(turn.engine, row.seconds or 0)
    return row


def _embedding(hardware: Hardware, home: Path, budget: Budget, tell: Callable[[str], None]) -> Row:
    named = Row(engine="onnxruntime (vectors)", marks={})
    if budget.left_s() < LAST_RESERVE_S:
        return msgspec.structs.replace(named, not_run="no time left")
    try:
        folder = fetch_embedder(home / "embedder")
        work = Workload(origin="default")
        model = find_known_model(str(folder))
        chosen = plan(decide(hardware, model, work, "onnxruntime", installable=True), model, work)
    except (BedplateError, subprocess.SubprocessError) as error:
        why = " ".join(filter(None, (str(error), getattr(error, "cause", None), getattr(error, "hint", None))))
        tell(f"{named.engine}: failed ({why})")
        return msgspec.structs.replace(named, marks={"answer": Mark(state="failed", why=why)})
    return EmbeddingRun(folder, chosen, budget, _teller(tell, named.engine)).take()


def _teller(tell: Callable[[str], None], name: str) -> Callable[[str], None]:
    return lambda line: tell(f"{name}: {line}")


def _machine(hardware: Hardware) -> str:
    cores = hardware.cpu.allowed_physical_cores
    return f"{hardware.cpu.name}, {cores} cores, {format_memory(hardware.memory.available_bytes)} free, load {_load()}"


def _load() -> str:
    with contextlib.suppress(OSError, AttributeError):
        return f"{os.getloadavg()[0]:.1f}"
    return "unknown"


def render(fleet: Fleet) -> str:
    lines = ["", fleet.machine, "", table(fleet.rows), ""]
    lines += list_footnotes(fleet.rows)
    lines += [f"{name} cannot run here: {why}" for name, why in fleet.cannot_run.items()]
    for row in fleet.rows:
        if row.failed and row.evidence:
            lines += ["", f"{row.engine} failed: {', '.join(row.failed)}. What it printed last:", row.evidence]
    peak = f", {format_size(fleet.peak_disk_bytes)} of disk at the most" if fleet.peak_disk_bytes else ""
    lines += ["", f"{format_seconds(fleet.seconds or 0)} in all{peak}"]
    return "\n".join(lines)


@contextlib.contextmanager
def fresh_home(keep: bool) -> Iterator[Path]:
    """A home of the fleet's own, gone afterwards unless it is to be kept."""
    home = Path(tempfile.mkdtemp(prefix="bedplate-fleet-"))
    before = {name: os.environ.pop(name, None) for name in ("BEDPLATE_HOME", "BEDPLATE_API_KEY")}
    os.environ["BEDPLATE_HOME"] = str(home)
    try:
        yield home
    finally:
        del os.environ["BEDPLATE_HOME"]
        os.environ.update({name: value for name, value in before.items() if value is not None})
        if keep:
            print(f"kept: {home}", flush=True)
        else:
            shutil.rmtree(home, ignore_errors=True)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fleet", description=__doc__, allow_abbrev=False)
    parser.add_argument("--engines", help="only these, with commas between them")
    parser.add_argument(
        "--budget-s", type=float, default=BUDGET_S, help="seconds for all of it (default %(default).0f)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found to a file, too")
    parser.add_argument("--keep", action="store_true", help="keep environments, prepared weights and logs")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    options = arguments(given)
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # so that what was started is ended, and the disk given back
    began = time.monotonic()

    def tell(line: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {line}", flush=True)

    try:
        with fresh_home(options.keep) as home:
            fleet = run(options, home, tell)
    except BedplateError as error:
        print(
            "error:", error.message, *(part for part in (error.cause, error.hint) if part), sep="\n  ", file=sys.stderr
        )
        return error.exit_code
    print(render(fleet), flush=True)
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(fleet), indent=2) + b"\n")
    return exit_code(fleet.rows)


if __name__ == "__main__":
    sys.exit(main())
