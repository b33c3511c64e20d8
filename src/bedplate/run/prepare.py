"""Prepares a plan's weights before the launch: each step runs once, and its result is stored by content, atomically."""

from __future__ import annotations

import datetime as dt
import hashlib
import importlib.resources
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bedplate.engines import Engine, SourceBuild, all_engines
from bedplate.engines import engine as engine_by_id
from bedplate.engines.base import SIXTEEN_BIT, cards_of, made_path
from bedplate.engines.roles import GGUF_READER, GGUF_SERVER
from bedplate.errors import BedplateError, OutsideFailed
from bedplate.facts.chips import chip_of
from bedplate.facts.known_models import with_label
from bedplate.home import disk_failure, home, locked, logs_dir, need_free, writable
from bedplate.progress import Progress, Silent
from bedplate.run.child import run_child
from bedplate.run.environments import Environment, command, find_environment, make_environment, shipped, variables
from bedplate.run.uv import tell_writes
from bedplate.values import Accelerator, Hardware, Launch, Model, Plan, Preparation
from bedplate.values.decision import Device
from bedplate.values.units import seconds, size

UNPACKER = "gguf-to-folder"
SLACK = 1.1
"""Factor on the size of the weights, for tokenizers and temporary files of a conversion."""
SECRETS = frozenset(["BEDPLATE_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "OPENAI_API_KEY"])
OTHER_ENVIRONMENT_VARIABLES = frozenset(["PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"])
JOBS = "MAX_JOBS"
"""The number of concurrent compilers. It does not affect the result, and the user may set it."""
ARCHITECTURES = "TORCH_CUDA_ARCH_LIST"
"""The architectures that PyTorch compiles for, if the user sets them."""
MANIFEST = "bedplate.json"
CHECK = "conversion_check.py"
CHECK_LIMIT_S = 1800.0
_ACTIVITIES = {"download": "downloading", "convert": "converting", "build": "building", "install": "installing"}
_RESULT_MARK = "conversion-check: "


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one step, stored in its folder."""

    what: str
    argv: tuple[str, ...]
    engine: str
    version: str | None
    disk_bytes: int
    seconds: float
    model: str = ""
    made_at: str = ""
    identity: str = ""
    """A hash of the packages and the program that created it; empty in records of early versions."""
    checked: tuple[str, ...] = ()
    """The results of the comparison with the source."""
    built_for: tuple[str, ...] = ()
    """For compiled code: the interpreter, packages, compiler and GPUs that it was built for."""


@dataclass
class Step:
    """One step, the engine in whose environment it runs, and the folder for its result."""

    step: Preparation
    engine: Engine
    folder: Path
    before: tuple[Step, ...]
    built_for: tuple[str, ...] = ()

    @property
    def done(self) -> bool:
        return (self.folder / MANIFEST).is_file()

    @property
    def doing(self) -> str:
        return f"{_ACTIVITIES[self.step.kind]} {self.step.what}"

    @property
    def inputs(self) -> tuple[Step, ...]:
        """The earlier steps whose results its command uses."""
        return tuple(one for one in self.before if any(one.step.where in word for word in self.step.argv))

    @property
    def seen(self) -> tuple[Step, ...]:
        """The earlier steps whose results are linked in its folder. Compiled code belongs to no model and has none."""
        return self.inputs if self.step.kind == "build" else self.before

    @property
    def made(self) -> Path:
        return self.folder / self.step.where


def prepared_dir() -> Path:
    return home() / "prepared"


def offline(given: Mapping[str, str]) -> dict[str, str]:
    """`given`, with the hub disabled, for programs whose weights are on this machine.

    The cache folder is created, since several engines fail without one.
    """
    cache = home() / "hub"
    cache.mkdir(parents=True, exist_ok=True)
    return {**given, "HF_HUB_OFFLINE": "1", "HF_HOME": str(cache), "HF_HUB_CACHE": str(cache)}


def weights_are_here(plan: Plan) -> bool:
    return bool(plan.model.files) or plan.source is not None or plan.weights.made == "converted"


def prepare(
    plan: Plan,
    steps: Sequence[Preparation],
    environment: Environment,
    progress: Progress | None = None,
    hardware: Hardware | None = None,
) -> Path | None:
    """Runs the steps that have no result yet. Returns the working directory of the launch; `None` if any will do.

    Paths in steps are relative to that folder. Each step has its own folder with links to earlier results, so that
    plans share common steps. The results stay locked against removal while this process runs. Code is compiled for the
    GPUs of `hardware`.
    """
    progress = progress or Silent()
    chain = _chain(plan, steps, environment, hardware)
    try:
        if chain:
            writable(prepared_dir())
            for one in chain:
                if hold(one.folder) and one.step.kind == "build":
                    _unlock(one.made)
        if missing := _missing(chain):
            wanted = sum(SLACK * (one.step.disk_bytes or 0) for one in missing)
            need_free(prepared_dir(), round(wanted), "the converted weights")
        for one in missing:
            with locked(one.folder, one.doing, progress.note):
                if not one.done:
                    _Taking(plan, one, environment, progress).take()
        for one in chain:
            if one.done:
                os.utime(one.folder / MANIFEST)  # the time of the last use
        if chain:
            _point(_last(chain), chain)
    except OSError as error:
        raise disk_failure(error, prepared_dir()) from error
    return _last(chain).folder if chain else None


def _last(chain: tuple[Step, ...]) -> Step:
    """The step in whose folder the launch runs: that of the weights, since compiled code is shared by models."""
    return next((one for one in reversed(chain) if one.step.kind != "build"), chain[-1])


def _point(last: Step, chain: tuple[Step, ...]) -> None:
    """Links compiled code into the launch's folder; it changes with packages and GPUs, the weights do not."""
    for one in chain:
        link, target = last.folder / one.step.where, Path("..") / one.folder.name / one.step.where
        if one is last or one.step.kind != "build" or not one.made.exists():
            continue
        if link.is_symlink() and link.readlink() == target:
            continue
        if link.is_dir() and not link.is_symlink():
            shutil.rmtree(link)
        temporary = last.folder / f".{one.folder.name}-{os.getpid()}"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target)
        temporary.replace(link)


def _unlock(made: Path) -> None:
    """Removes the lock that a killed PyTorch loader leaves; later loaders would wait for it forever."""
    for lock in made.glob("*/lock"):
        lock.unlink(missing_ok=True)


def _missing(chain: tuple[Step, ...]) -> list[Step]:
    """The steps to run. A step whose result exists needs no inputs, which may have been removed."""
    wanted: set[str] = set()

    def want(one: Step) -> None:
        if one.done or one.folder.name in wanted:
            return
        wanted.add(one.folder.name)
        for earlier in one.inputs:
            want(earlier)

    for one in chain:
        if one is _last(chain) or one.step.kind == "build":
            want(one)
    return [one for one in chain if one.folder.name in wanted]


_held: dict[Path, int] = {}


def hold(folder: Path) -> bool:
    """Locks the folder against removal while this process runs; returns whether no other process used it."""
    if folder in _held or os.name != "posix":
        return False
    import fcntl

    mark = os.open(f"{folder}.use", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        alone = True
    except BlockingIOError:
        alone = False
    fcntl.flock(mark, fcntl.LOCK_SH)
    _held[folder] = mark
    return alone


def _chain(
    plan: Plan, steps: Sequence[Preparation], environment: Environment, hardware: Hardware | None
) -> tuple[Step, ...]:
    """The steps, without installs and builds of the engine itself, each with its folder."""
    source = plan.source or plan.model
    by_hand = engine_by_id(plan.engine).by_hand(plan)
    wanted = [step for step in steps if step.kind != "install" and step not in by_hand]
    content = _content(source) if wanted else ""
    chain: tuple[Step, ...] = ()
    for step in wanted:
        if not step.argv:
            raise OutsideFailed(
                f"this version of bedplate cannot prepare {step.what}", hint=f"create {step.where} manually"
            )
        engine = _tool(step, plan)
        # By content, independent of the files' paths.
        words = [_without_place(word, source) for word in step.argv if not word.startswith(f"{JOBS}=")]
        own: tuple[str, ...] = ()
        if step.kind == "build":
            # Compiled code is for all models, on GPUs of one kind.
            own = _built_for(engine, environment, hardware, plan.settings.device)
        before: object = own if step.kind == "build" else content
        key = hashlib.sha256(repr((before, words, identity(engine, step.argv))).encode()).hexdigest()[:20]
        content = content if step.kind == "build" else key
        chain = (*chain, Step(step, engine, prepared_dir() / key, chain, own))
    return chain


def _built_for(engine: Engine, environment: Environment, hardware: Hardware | None, device: Device) -> tuple[str, ...]:
    """What compiled code depends on in addition to its source, including paths, which are in compiler commands."""
    if engine.id != environment.engine:
        return ()
    from bedplate.run.native import describe_gpu_compiler

    own = engine.recipe.packages[:1] if engine.recipe is not None else ()
    named = {"torch", *(package.partition("==")[0] for package in own)}
    packages = sorted(package for package in environment.packages if package.partition("==")[0] in named)
    cards = {_capability(card) for card in cards_of(hardware, engine.vendors)} if hardware is not None else set()
    found = [environment.version, f"Python {environment.python}", *packages, *sorted(cards)]
    found += [os.environ.get(ARCHITECTURES, ""), describe_gpu_compiler(device, os.environ)]
    return (str(environment.server or environment.interpreter), *filter(None, found))


def _capability(card: Accelerator) -> str:
    chip = chip_of(card)
    return card.compute_capability or (chip.capability if chip is not None else None) or card.name


def _tool(step: Preparation, plan: Plan) -> Engine:
    """The engine whose environment has the step's program: the plan's own, unless the step names another."""
    own = engine_by_id(plan.engine)
    if step.within is not None:
        return engine_by_id(step.within)
    if step.argv[0] in _programs(own):
        return own
    return next((engine for engine in all_engines().values() if step.argv[0] in _programs(engine)), own)


def _programs(engine: Engine) -> dict[str, str]:
    return dict(engine.recipe.programs) if engine.recipe is not None else {}


def identity(engine: Engine, argv: Sequence[str]) -> str:
    """A hash of what a result depends on in addition to its source: pinned packages, and bedplate's program."""
    file = _programs(engine).get(argv[0])
    program = shipped(file) if file is not None else b""
    packages = engine.recipe.packages if engine.recipe is not None else ()
    return hashlib.sha256(repr((engine.id, engine.version, packages, program)).encode()).hexdigest()


@dataclass
class _Taking:
    """Runs one step in a temporary folder, which is renamed when it is complete and removed otherwise."""

    plan: Plan
    one: Step
    own: Environment
    progress: Progress

    def take(self) -> None:
        one, step = self.one, self.one.step
        environment = self.own if one.engine.id == self.own.engine else self._environment(one.engine)
        for leftover in prepared_dir().glob(f".making-{one.folder.name}-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        estimates = [f"about {seconds(step.seconds.value)}"] if step.seconds is not None else []
        estimates += [size(step.disk_bytes)] if step.disk_bytes else []
        self.progress.note(f"{one.doing} ({', '.join([*estimates, one.engine.name])}) to {one.folder}")
        began = time.monotonic()
        with tempfile.TemporaryDirectory(
            prefix=f".making-{one.folder.name}-", dir=prepared_dir(), ignore_cleanup_errors=True
        ) as holder:
            # At the same depth as the final folder, so that relative links stay valid.
            staging = Path(holder)
            self._link(staging)
            output = self._run(environment, staging)
            made = staging / step.where
            if not made.exists() and step.kind != "build":
                raise self._failed(f"it ended without creating {step.where}", output)
            checked = self._checked(environment, staging) if step.kind == "convert" else ()
            self._clear(staging)
            record = Prepared(
                what=step.what,
                argv=step.argv,
                engine=environment.engine,
                version=environment.version,
                disk_bytes=size_of(made),
                seconds=round(time.monotonic() - began, 1),
                model=self.plan.model.name,
                made_at=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
                identity=identity(one.engine, step.argv),
                checked=checked,
                built_for=one.built_for,
            )
            (staging / MANIFEST).write_bytes(msgspec.json.encode(record))
            if one.folder.exists():
                shutil.rmtree(one.folder)
            staging.chmod(0o755)
            staging.rename(one.folder)
            staging.mkdir()  # TemporaryDirectory removes it

    def _environment(self, engine: Engine) -> Environment:
        found = find_environment(engine)
        if found is None:
            self.progress.note(f"installing {engine.name} to convert the weights")
            found = make_environment(engine, self.progress)
        return found

    def _link(self, staging: Path) -> None:
        for earlier in self.one.seen:
            if earlier.step.kind != "build" or earlier.made.exists():
                (staging / earlier.step.where).symlink_to(Path("..") / earlier.folder.name / earlier.step.where)
        for build in (engine.build for engine in all_engines().values() if engine.build is not None):
            if any(word.startswith(f"{build.tree}/") for word in self.one.step.argv):
                (staging / build.tree).parent.mkdir(parents=True)
                (staging / build.tree).symlink_to(source_tree(build, self.progress))

    def _clear(self, staging: Path) -> None:
        """Removes everything except the result and the links to earlier results."""
        kept = {self.one.step.where, *(earlier.step.where for earlier in self.one.seen)}
        for path in staging.iterdir():
            if path.name in kept:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def _run(self, environment: Environment, staging: Path) -> str:
        step = self.one.step
        argv, more = _command(environment, step.argv)
        given = {name: value for name, value in os.environ.items() if step.kind == "download" or name not in SECRETS}
        given = {name: value for name, value in given.items() if name not in OTHER_ENVIRONMENT_VARIABLES}
        env = variables(Path(environment.path), given if step.kind == "download" else offline(given))
        with self.progress.step(self.one.doing, step.disk_bytes) as done:
            ended = run_child(argv, env={**env, **more}, tick=lambda pid: tell_writes(pid, done), cwd=staging)
        self._log(ended.output)
        if ended.code != 0:
            raise self._failed(f"exit status {ended.code}", ended.output)
        return ended.output

    def _checked(self, environment: Environment, staging: Path) -> tuple[str, ...]:
        """Compares the converted weights with their source; raises an error with the evidence if they differ."""
        step = self.one.step
        source = self._source_of(staging)
        if source is None:
            return ()
        result = staging / step.where
        argv = _interpreter(environment)
        with importlib.resources.as_file(importlib.resources.files("bedplate.engines") / "shipped" / CHECK) as program:
            argv += [str(program), str(source), str(result), "--bits", f"{self._bits():g}"]
            if ".gguf" in (source.suffix, result.suffix) and (server := gguf_server(self.own, self.progress)):
                argv += ["--gguf-server", json.dumps(server)]
            given = {
                name: value for name, value in os.environ.items() if name not in SECRETS | OTHER_ENVIRONMENT_VARIABLES
            }
            env = offline(variables(Path(environment.path), given))
            what = f"comparing {step.where} with its source"
            try:
                with self.progress.step(what, None):
                    ended = run_child(argv, env=env, cwd=staging, limit_s=CHECK_LIMIT_S)
            except TimeoutError as error:
                raise OutsideFailed(f"{what} failed", cause=str(error), hint=self._log_hint()) from error
        self._log(ended.output, more=True)
        results = [line.partition(_RESULT_MARK)[2] for line in ended.output.splitlines() if _RESULT_MARK in line]
        if ended.code != 0:
            cause = results[-1] if results else (ended.output.strip().splitlines() or [f"exit status {ended.code}"])[-1]
            message = f"{step.what}: the result differs from its source and was discarded"
            raise OutsideFailed(message, cause=cause[:1200], hint=self._log_hint())
        for line in results:
            self.progress.note(line)
        return tuple(results)

    def _source_of(self, staging: Path) -> Path | None:
        """The step's source: the last earlier result that its command uses, otherwise the model's own files."""
        weights = [one for one in self.one.inputs if one.step.kind != "build"]
        if weights:
            return staging / weights[-1].step.where
        source = self.plan.source or self.plan.model
        if not source.files:
            return None
        first = Path(source.files[0]).absolute()
        return first if source.format == "gguf" else first.parent

    def _bits(self) -> float:
        """The bits per weight of the step's result; those of the plan if it is the last conversion."""
        weights = self.plan.weights
        if weights.made != "converted" or self.one.step.where != made_path(self.plan) or weights.label in SIXTEEN_BIT:
            return 16.0
        details = with_label(self.plan.model, weights.label).quantization_details
        return details.bits if details is not None and details.bits else 4.0

    def _failed(self, why: str, output: str) -> OutsideFailed:
        if known := self.one.engine.explain(output):
            hint = f"{known.hint}; {self._log_hint()}"
            return OutsideFailed(f"{self.one.doing} failed", cause=known.message, hint=hint)
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        cause = lines[-1][:600] if lines and why.startswith("exit status") else why
        if lines and cause == why:
            cause = f"{why}; its last line of output: {lines[-1][:400]}"
        return OutsideFailed(f"{self.one.doing} failed", cause=cause, hint=self._log_hint())

    @property
    def _log_path(self) -> Path:
        return logs_dir() / f"prepare-{self.one.folder.name}.log"

    def _log(self, text: str, more: bool = False) -> None:
        writable(self._log_path.parent)
        with self._log_path.open("a" if more else "w", encoding="utf-8") as file:
            file.write(text)

    def _log_hint(self) -> str:
        return f"log: {self._log_path}"


def gguf_server(own: Environment, progress: Progress) -> list[str] | None:
    """The command that starts the engine for GGUF files: in the plan's environment, or in the packaged one."""
    try:
        engine = engine_by_id(GGUF_READER.id)
        found = own if own.engine == engine.id else find_environment(engine)
        if found is None:
            progress.note(f"installing {engine.name} to check the converted weights")
            found = make_environment(engine, progress)
    except BedplateError as error:
        progress.note(f"the converted weights are not compared with {GGUF_READER.name}: {error.message}")
        return None
    argv = command(found, Launch(argv=(GGUF_SERVER,)))
    path = variables(Path(found.path), {}).get("LD_LIBRARY_PATH")
    return ["env", f"LD_LIBRARY_PATH={path}", *argv] if path else argv


def _interpreter(environment: Environment) -> list[str]:
    """The Python for a program of bedplate; for an engine that is not a Python package, bedplate's own."""
    if environment.server is not None:
        return [sys.executable, "-I"]
    return [str(environment.interpreter), *([] if environment.adopted else ["-I"])]


def _command(environment: Environment, argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """A step's command as it is executed, and the variables that it sets."""
    words, more = list(argv), {}
    if words[0] == "env":
        words.pop(0)
        while "=" in words[0]:
            name, _, value = words.pop(0).partition("=")
            more[name] = os.environ.get(name, value) if name == JOBS else value
    if words[0] == "hf":
        return [sys.executable, "-m", "huggingface_hub.cli.hf", *words[1:]], more
    if words[0] in ("python", "python3") and words[1].endswith(".py"):
        # A script imports modules from its own folder, which -I would exclude.
        return [str(environment.interpreter), "-s", *words[1:]], more
    return command(environment, Launch(argv=tuple(words))), more


def source_tree(build: SourceBuild, progress: Progress) -> Path:
    """The Python files of an engine's published source, with its converter; downloaded on the first call."""
    from bedplate.run.native import take_source

    folder = home() / "sources" / build.archive.removesuffix(".tar.gz")
    writable(folder.parent)
    with locked(folder, f"fetching {build.package}", progress.note):
        if not folder.is_dir():
            need_free(folder.parent, 4 * build.download_bytes, build.package)
            progress.note(f"fetching {build.package} ({size(build.download_bytes)}) for its converter")
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder.parent, ignore_cleanup_errors=True) as holder:
                take_source(build, Path(holder), progress)
                for file in (Path(holder) / "source").rglob("*"):
                    if file.is_file() and file.suffix not in (".py", ".txt", ".toml", ".md"):
                        file.unlink()
                (Path(holder) / "source").rename(folder)
    return folder


def _without_place(word: str, source: Model) -> str:
    for file in source.files[:1]:
        word = word.replace(file, "SOURCE").replace(str(Path(file).parent), "SOURCE")
    return word


def content_id(source: Model) -> str:
    return _content(source)


def _content(source: Model) -> str:
    """A hash of all files that a conversion may read; for a model on the hub, of its name."""
    files = [Path(file) for file in source.files]
    if files and source.format != "gguf":
        files = sorted(file for file in files[0].parent.iterdir() if file.is_file() and not file.name.startswith("."))
    parts = [(file.name if source.format != "gguf" else "", file_sha256(file)) for file in files]
    return hashlib.sha256(repr(parts or source.name).encode()).hexdigest()


def file_sha256(file: Path) -> str:
    """The hash of a file; cached while its size and modification time stay the same."""
    try:
        stat = file.stat()
        cache_file = prepared_dir() / "hashes" / hashlib.sha256(os.fsencode(file.resolve())).hexdigest()[:20]
        cached = cache_file.read_text().split() if cache_file.is_file() else []
        if cached[:2] == [str(stat.st_size), str(stat.st_mtime_ns)] and len(cached) == 3:
            return cached[2]
        with file.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise OutsideFailed(f"cannot read {file}", cause=error.strerror or str(error)) from error
    writable(cache_file.parent)
    cache_file.write_text(f"{stat.st_size} {stat.st_mtime_ns} {found}")
    return found


def size_of(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path] if path.exists() else []
    return sum(file.stat().st_size for file in files if file.is_file())
