"""What a plan's weights need before the launch: each step taken once, kept by content, whole or not there."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bedplate.engines import Engine, all_engines
from bedplate.engines import engine as engine_by_id
from bedplate.errors import BedplateError, OutsideFailed
from bedplate.home import disk_failure, home, locked, logs_dir, need_free, writable
from bedplate.run.child import run_child
from bedplate.run.environments import Environment, command, find_environment, make_environment, shipped, variables
from bedplate.run.progress import Progress, Silent
from bedplate.run.uv import tell_writes
from bedplate.values import Launch, Model, Plan, Preparation
from bedplate.values.units import seconds, size

UNPACKER = "gguf-to-folder"
SLACK = 1.1
"""On top of the weights: tokenizers, and what a conversion writes on its way."""
SECRETS = frozenset(["BEDPLATE_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "OPENAI_API_KEY"])
_MANIFEST = "bedplate.json"
_DOING = {"download": "downloading", "convert": "converting", "build": "building", "install": "installing"}


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """What one step has made, beside it in its folder."""

    what: str
    argv: tuple[str, ...]
    engine: str
    version: str | None
    disk_bytes: int
    seconds: float


@dataclass
class Step:
    """One step, the engine in whose environment it runs, and the folder that belongs to its content."""

    step: Preparation
    engine: Engine
    folder: Path
    before: tuple[Step, ...]

    @property
    def done(self) -> bool:
        return (self.folder / _MANIFEST).is_file()


def prepared_dir() -> Path:
    return home() / "prepared"


def offline(given: Mapping[str, str]) -> dict[str, str]:
    """`given`, for programs whose weights are all here: nothing is looked for on the hub.

    The hub's cache is one that is there: several engines fail to list their models where none was ever made.
    """
    cache = home() / "hub"
    cache.mkdir(parents=True, exist_ok=True)
    return {**given, "HF_HUB_OFFLINE": "1", "HF_HOME": str(cache), "HF_HUB_CACHE": str(cache)}


def weights_are_here(plan: Plan) -> bool:
    return bool(plan.model.files) or plan.source is not None or plan.weights.made == "converted"


def prepare(
    plan: Plan, steps: Sequence[Preparation], environment: Environment, progress: Progress | None = None
) -> Path | None:
    """Takes the steps that were not taken before. Returns the folder that the launch must run in; `None`: anywhere.

    Steps name what they make, and each other's results, relative to that folder. Each has a folder of its own with
    links to what came before it, so that plans share what they have in common.
    """
    progress = progress or Silent()
    chain = _chain(plan, steps)
    try:
        if missing := [one for one in chain if not one.done]:
            writable(prepared_dir())
            wanted = sum(SLACK * (one.step.disk_bytes or 0) for one in missing)
            need_free(prepared_dir(), round(wanted), "the converted weights")
        for one in missing:
            with locked(one.folder, f"{_DOING[one.step.kind]} {one.step.what}", progress.note):
                if not one.done:
                    _take(one, environment, progress)
    except OSError as error:
        raise disk_failure(error, prepared_dir()) from error
    return chain[-1].folder if chain else None


def _chain(plan: Plan, steps: Sequence[Preparation]) -> tuple[Step, ...]:
    """The steps other than installs, each with the folder for what it makes of these very weights."""
    source = plan.source or plan.model
    wanted = [step for step in steps if step.kind != "install"]
    content = _content(source) if wanted else ""
    chain: tuple[Step, ...] = ()
    for step in wanted:
        if not step.argv:
            raise OutsideFailed(
                f"this version of bedplate does not prepare {step.what} by itself", hint=f"make {step.where} by hand"
            )
        engine = _tool(step, plan)
        before = chain[-1].folder.name if chain else content
        # By content, wherever the files are now.
        words = [_without_place(word, source) for word in step.argv]
        key = hashlib.sha256(repr((before, words, _identity(engine, step))).encode()).hexdigest()[:20]
        chain = (*chain, Step(step, engine, prepared_dir() / key, chain))
    return chain


def _tool(step: Preparation, plan: Plan) -> Engine:
    """The engine whose environment has the step's program: the plan's own, unless bedplate ships it to another."""
    own = engine_by_id(plan.engine)
    if step.argv[0] in _programs(own):
        return own
    return next((engine for engine in all_engines().values() if step.argv[0] in _programs(engine)), own)


def _programs(engine: Engine) -> dict[str, str]:
    return dict(engine.recipe.programs) if engine.recipe is not None else {}


def _identity(engine: Engine, step: Preparation) -> str:
    """What a result depends on beside its source: pinned packages, and the program where it is bedplate's."""
    file = _programs(engine).get(step.argv[0])
    program = hashlib.sha256(shipped(file)).hexdigest() if file is not None else ""
    return repr((engine.id, engine.version, engine.recipe.packages if engine.recipe is not None else (), program))


def _take(one: Step, own: Environment, progress: Progress) -> None:
    step = one.step
    environment = own if one.engine.id == own.engine else _environment(one.engine, progress)
    for leftover in prepared_dir().glob(f".making-{one.folder.name}-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    what = f"{_DOING[step.kind]} {step.what}"
    about = [f"about {seconds(step.seconds.value)}"] if step.seconds is not None else []
    about += [size(step.disk_bytes)] if step.disk_bytes else []
    progress.note(f"{what} ({', '.join([*about, one.engine.name])}) to {one.folder}")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(
        prefix=f".making-{one.folder.name}-", dir=prepared_dir(), ignore_cleanup_errors=True
    ) as holder:
        # As deep as the finished folder, so that links to others lead to the same place before and after.
        staging = Path(holder)
        for earlier in one.before:
            (staging / earlier.step.where).symlink_to(Path("..") / earlier.folder.name / earlier.step.where)
        with progress.step(what, step.disk_bytes) as done:
            _run(one, environment, staging, lambda pid: tell_writes(pid, done))
        made = staging / step.where
        if not made.exists():
            raise OutsideFailed(f"{what} failed", cause=f"it ended without making {step.where}", hint=_log_hint(one))
        record = Prepared(
            what=step.what,
            argv=step.argv,
            engine=environment.engine,
            version=environment.version,
            disk_bytes=_size_of(made),
            seconds=round(time.monotonic() - began, 1),
        )
        (staging / _MANIFEST).write_bytes(msgspec.json.encode(record))
        if one.folder.exists():
            shutil.rmtree(one.folder)
        staging.chmod(0o755)
        staging.rename(one.folder)
        staging.mkdir()  # for the holder to remove


def _environment(engine: Engine, progress: Progress) -> Environment:
    found = find_environment(engine)
    if found is None:
        progress.note(f"{engine.name} is installed too: it unpacks the weights, once")
        found = make_environment(engine, progress)
    return found


def _run(one: Step, environment: Environment, staging: Path, tick: object) -> None:
    step = one.step
    argv = command(environment, Launch(argv=step.argv))
    if step.argv[0] == UNPACKER and (llama := _llama_server()):
        argv += ["--llama-server", json.dumps(llama)]
    given = {name: value for name, value in os.environ.items() if step.kind == "download" or name not in SECRETS}
    env = variables(Path(environment.path), given if step.kind == "download" else offline(given))
    ended = run_child(argv, env=env, tick=tick, cwd=staging)  # type: ignore[arg-type]
    log = _log(one)
    writable(log.parent)
    log.write_text(ended.output, encoding="utf-8")
    if ended.code != 0:
        lines = [line.strip() for line in ended.output.splitlines() if line.strip()] or [f"exit status {ended.code}"]
        raise OutsideFailed(f"{_DOING[step.kind]} {step.what} failed", cause=lines[-1][:600], hint=_log_hint(one))


def _log(one: Step) -> Path:
    return logs_dir() / f"prepare-{one.folder.name}.log"


def _log_hint(one: Step) -> str:
    return f"its log may say more: {_log(one)}"


def _llama_server() -> list[str] | None:
    """How to start llama.cpp, if it is here, to compare token ids with."""
    try:
        found = find_environment(engine_by_id("llama.cpp"))
    except BedplateError:
        return None
    if found is None:
        return None
    argv = command(found, Launch(argv=("llama-server",)))
    path = variables(Path(found.path), {}).get("LD_LIBRARY_PATH")
    return ["env", f"LD_LIBRARY_PATH={path}", *argv] if path else argv


def _without_place(word: str, source: Model) -> str:
    for file in source.files[:1]:
        word = word.replace(file, "SOURCE").replace(str(Path(file).parent), "SOURCE")
    return word


def _content(source: Model) -> str:
    """A hash over the bytes of all files that a conversion may read; of a model of the hub, its name."""
    files = [Path(file) for file in source.files]
    if files and source.format != "gguf":
        files = sorted(file for file in files[0].parent.iterdir() if file.is_file() and not file.name.startswith("."))
    parts = [(file.name if source.format != "gguf" else "", _sha256(file)) for file in files]
    return hashlib.sha256(repr(parts or source.name).encode()).hexdigest()


def _sha256(file: Path) -> str:
    """Remembered for as long as the file has this size and time."""
    try:
        stat = file.stat()
        seen = prepared_dir() / "hashes" / hashlib.sha256(os.fsencode(file.resolve())).hexdigest()[:20]
        known = seen.read_text().split() if seen.is_file() else []
        if known[:2] == [str(stat.st_size), str(stat.st_mtime_ns)] and len(known) == 3:
            return known[2]
        with file.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise OutsideFailed(f"cannot read {file}", cause=error.strerror or str(error)) from error
    writable(seen.parent)
    seen.write_text(f"{stat.st_size} {stat.st_mtime_ns} {found}")
    return found


def _size_of(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
