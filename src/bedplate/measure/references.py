"""Compute the reference of any model by the most faithful method that fits, and cache it under BEDPLATE_HOME.

`python -m bedplate.measure.references` computes the shipped files of the built-in model again.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from bedplate.engines import get_engine, load_engines
from bedplate.engines.base import SIXTEEN_BIT
from bedplate.engines.roles import REFERENCE
from bedplate.errors import BedplateError, ExternalFailure, NotPossible
from bedplate.home import check_free_space, ensure_writable, get_logs_dir, hold_lock, open_private
from bedplate.measure.agreement import CLEAR_GAP, CompletionAnswer, is_clear, read_stored_bits
from bedplate.measure.answers import EngineAddress, as_known, request_answers
from bedplate.measure.likelihood import find_likelihood, read_fixed_text, write_likelihood
from bedplate.measure.load import run as run_loop
from bedplate.measure.moments import format_now
from bedplate.measure.prefixes import choose_spread, hash_prefix, list_fixed_prefixes, list_short_prefixes
from bedplate.measure.reference import (
    Likelihood,
    Reference,
    ReferenceAnswer,
    ReferenceMethod,
    TextPlace,
    find_reference,
    get_reference_path,
    hash_file,
    list_cached_references,
    measure_weight_bytes,
    read_output,
    write_reference,
)
from bedplate.progress import Progress, SilentProgress
from bedplate.run.child import run_child
from bedplate.run.environments import EngineEnvironment, add_library_path, build_command, find_environment
from bedplate.run.environments import make_environment as install_environment
from bedplate.run.prepare import (
    OTHER_ENVIRONMENT_VARIABLES,
    SECRETS,
    UNPACKER,
    hash_model_content,
    set_offline,
)
from bedplate.run.ready import ModelDecision, list_installed_engines, plan_engine, prepare_model
from bedplate.run.starting import run_engine
from bedplate.values import Hardware, Launch, Model, Workload
from bedplate.values.reference import ReferenceSummary
from bedplate.values.service import ModelOrder
from bedplate.values.units import format_memory, format_seconds, format_size

LIMIT_S = 1800.0
LEAST_ANSWERS = 48
"""Fewer prefixes with a clear answer say too little about an engine."""
FLOAT32_BYTES = 4
PROCESS_BYTES = 1_000_000_000
"""PyTorch itself, and the hidden states of the prompts."""
SPARE = 1.15
KILL_FACTOR, KILL_S = 1.2, 5.0
"""The program ends by itself after the time limit. It is stopped after this multiple, and these seconds."""
ENGINE_CONTEXT, ENGINE_IN_FLIGHT = 1024, 4
ENGINE_AT_ONCE = 16
ENGINE_PLACES = 24
LISTED = 20


class MethodChoice(NamedTuple):
    method: ReferenceMethod
    why: str
    """Why no more faithful method is used; empty for the first one."""


def choose_method(model: Model, memory_bytes: int) -> MethodChoice:
    """The most faithful method that fits into the memory. It does not depend on installed engines."""
    if model.format not in ("safetensors", "gguf"):
        return MethodChoice("engine", f"{REFERENCE.name} does not read {model.format} weights")
    if model.format == "safetensors" and (model.quantization or "BF16") not in SIXTEEN_BIT:
        return MethodChoice("engine", f"{REFERENCE.name} does not dequantize {model.quantization} weights")
    whole_bytes = int(SPARE * FLOAT32_BYTES * model.parameters) + PROCESS_BYTES
    if whole_bytes <= memory_bytes:
        return MethodChoice("float32", "")
    size = f"in float32 it needs {format_memory(whole_bytes)}, and {format_memory(memory_bytes)} are free"
    if model.format == "gguf":
        return MethodChoice("engine", f"{size}; a GGUF file cannot be dequantized layer by layer")
    around = (model.vocab_size or 0) * (model.hidden_size or 0) * 2
    layer_bytes = int(FLOAT32_BYTES * (around + 2 * model.parameters / max(1, model.num_layers))) + PROCESS_BYTES
    if layer_bytes <= memory_bytes:
        return MethodChoice("float32 by layer", size)
    return MethodChoice("engine", f"{size}; one layer needs {format_memory(layer_bytes)}")


def provide_reference(
    model: Model,
    hardware: Hardware,
    progress: Progress,
    *,
    limit_s: float = LIMIT_S,
    memory_bytes: int | None = None,
    engine: str | None = None,
    install: bool = False,
    force: bool = False,
    name: str | None = None,
) -> Reference:
    """The reference of a model, from the cache or computed now. A computed one is cached.

    `engine` computes it from the answers of that engine. `install`: packages may be downloaded.
    `name` is the model as the user named it. Raises `NotPossible` if no method fits, with what would.
    """
    if not force and (found := find_reference(model)) is not None:
        return found
    if not model.files:
        raise NotPossible(f"the files of {model.name} are not on this machine", hint="give a file or a folder")
    if model.task != "generate":
        raise NotPossible(f"{model.name} does not generate text", hint="a reference compares next tokens")
    path = get_reference_path(model)
    ensure_writable(path.parent)
    with hold_lock(path, f"computing the reference of {model.name}", progress.note):
        if not force and (found := find_reference(model)) is not None:
            return found
        made = _compute(
            ReferenceTask(model, hardware, progress, name or model.files[0], limit_s),
            memory_bytes if memory_bytes is not None else hardware.memory.available_bytes,
            engine,
            install,
        )
        partial = path.with_suffix(".partial")
        with open_private(partial, "wb") as file:
            file.write(msgspec.json.encode(made))
        partial.rename(path)
    return made


class ReferenceTask(NamedTuple):
    model: Model
    hardware: Hardware
    progress: Progress
    name: str
    """As the user named the model."""
    limit_s: float


class ComputedAnswers(NamedTuple):
    made_with: str
    answers: dict[str, ReferenceAnswer]
    likelihood: Likelihood | None


def _compute(task: ReferenceTask, memory_bytes: int, engine: str | None, install: bool) -> Reference:
    began, model = time.monotonic(), task.model
    chosen = MethodChoice("engine", "") if engine is not None else choose_method(model, memory_bytes)
    sha256 = hash_model_content(model)
    if chosen.method == "engine":
        if chosen.why:
            task.progress.note(f"the reference is not computed in float32: {chosen.why}")
        found = _ask_engine(task, _choose_engine(task, engine, chosen.why), sha256)
    else:
        environment = _find_pytorch(task, install)
        if chosen.why:
            task.progress.note(f"the reference is computed layer by layer: {chosen.why}")
        found = _run_pytorch(task, environment, chosen.method, sha256, list_fixed_prefixes())
    clear = sum(is_clear(one) for one in found.answers.values())
    seconds = time.monotonic() - began
    if clear < LEAST_ANSWERS:
        raise NotPossible(
            f"{len(found.answers)} prefixes were computed within {format_seconds(seconds)}, {clear} of them with a "
            f"clear answer; a reference needs {LEAST_ANSWERS}",
            hint="give more time with --budget"
            if clear / max(1, len(found.answers)) * len(list_fixed_prefixes()) >= LEAST_ANSWERS
            else "the next tokens of this model are too uncertain for such a comparison",
        )
    return Reference(
        file=model.name,
        sha256=sha256,
        file_bytes=measure_weight_bytes(model),
        made_with=found.made_with,
        method=chosen.method,
        at=format_now(),
        seconds=round(seconds, 1),
        answers=found.answers,
        likelihood=found.likelihood,
    )


SHARE = 0.3
"""Share of the remaining time that a missing reference may take before a measurement."""
LEAST_S = 20.0
"""PyTorch needs some seconds to start."""
USUAL_S = 600.0
"""Time limit of a measurement without a budget."""


def provide_affordable_reference(
    model: Model, hardware: Hardware, progress: Progress, *, left_s: float | None, name: str | None
) -> Reference | None:
    """The reference before a measurement; `None`: it cannot be computed now, and a note says what would.

    `left_s` is the remaining time of the budget. Nothing is downloaded.
    """
    if (found := find_reference(model)) is not None or not model.files or model.task != "generate":
        return found
    command = f"bedplate reference {name or model.name}"
    if find_pytorch() is None:
        progress.note(f"there is no reference for these weights; {command} --install computes one")
        return None
    chosen = choose_method(model, hardware.memory.available_bytes)
    if chosen.method == "engine":
        # An engine that is about to be measured would be compared with itself.
        progress.note(f"there is no reference in float32: {chosen.why}; {command} uses the answers of an engine")
        return None
    limit_s = USUAL_S if left_s is None else SHARE * left_s
    if limit_s < LEAST_S:
        progress.note(f"there is no reference for these weights, and no time for one; run {command} first")
        return None
    try:
        return provide_reference(model, hardware, progress, limit_s=limit_s, name=name)
    except BedplateError as error:
        progress.note(f"the reference could not be computed: {error.summary}")
        return None


def summarize_reference(one: Reference, model: Model | None = None, path: Path | None = None) -> ReferenceSummary:
    """`model` or `path` tells where it is cached; the shipped one has no path."""
    known = find_likelihood(one)
    if model is not None and one.at is not None:
        path = get_reference_path(model)
    return ReferenceSummary(
        model=one.file,
        id=one.id,
        method=one.method,
        made_with=one.made_with,
        weight_bytes=one.file_bytes,
        prefixes=len(one.answers),
        clear=sum(is_clear(answer) for answer in one.answers.values()),
        perplexity=known.perplexity if known is not None else None,
        places=len(known.places) if known is not None else 0,
        at=one.at,
        seconds=one.seconds,
        path=str(path) if path is not None else None,
    )


def summarize_cached() -> tuple[ReferenceSummary, ...]:
    return tuple(summarize_reference(one, path=path) for path, one in list_cached_references())


# PyTorch in float32


def find_pytorch() -> EngineEnvironment | None:
    """The environment that computes references, if it is installed."""
    return find_environment(get_engine(REFERENCE.id))


def _find_pytorch(task: ReferenceTask, install: bool) -> EngineEnvironment:
    if (found := find_pytorch()) is not None:
        return found
    engine = get_engine(REFERENCE.id)
    if install:
        return install_environment(engine, task.progress)
    size = "" if engine.recipe is None else f" ({format_size(engine.recipe.download_bytes)})"
    raise NotPossible(
        f"{engine.name}, which computes references, is not installed",
        hint=f"bedplate reference {task.name} --install installs it{size}; --engine ID uses the answers of an engine",
    )


def _run_pytorch(
    task: ReferenceTask,
    environment: EngineEnvironment,
    method: ReferenceMethod,
    sha256: str,
    prefixes: Sequence[str],
) -> ComputedAnswers:
    until = time.monotonic() + task.limit_s
    with (
        _provide_folder(task, environment) as folder,
        tempfile.TemporaryDirectory(prefix="reference-", dir=ensure_writable(get_reference_path(task.model).parent)) as
        holder,
        importlib.resources.as_file(importlib.resources.files("bedplate.engines.shipped") / "reference.py") as program,
    ):  # fmt: skip
        given, text, out = (Path(holder) / name for name in ("prefixes.json", "text.txt", "out.json"))
        given.write_text(json.dumps(list(prefixes)), encoding="utf-8")
        text.write_text(read_fixed_text(), encoding="utf-8")
        left_s = max(1.0, until - time.monotonic())
        argv = [str(environment.interpreter), *([] if environment.adopted else ["-I"]), str(program)]
        argv += ["--model", str(folder), "--prefixes", str(given), "--text", str(text), "--out", str(out)]
        argv += ["--clear-gap", str(CLEAR_GAP), "--least", str(LEAST_ANSWERS)]
        argv += ["--seconds", f"{left_s:.0f}", *(["--by-layer"] if method == "float32 by layer" else [])]
        what = f"computing the reference of {task.model.name} with {REFERENCE.name} in {method}"
        _run_with_progress(task, environment, argv, what, KILL_FACTOR * left_s + KILL_S)
        made_with, answers, likelihood = read_output(out.read_bytes(), sha256)
    if method != "float32":
        made_with += ", layer by layer"
    return ComputedAnswers(made_with, answers, likelihood)


@contextlib.contextmanager
def _provide_folder(task: ReferenceTask, environment: EngineEnvironment) -> Iterator[Path]:
    """The folder of the model; a GGUF file is dequantized to a temporary one in float32, which is exact."""
    model, first = task.model, Path(task.model.files[0])
    if model.format != "gguf":
        yield first.parent
        return
    parent = ensure_writable(get_reference_path(model).parent)
    needed_bytes = int(SPARE * FLOAT32_BYTES * model.parameters)
    check_free_space(parent, needed_bytes, "the dequantized weights")
    with tempfile.TemporaryDirectory(prefix="dequantized-", dir=parent) as holder:
        folder = Path(holder) / "weights"
        command = build_command(environment, Launch(argv=(UNPACKER, str(first), str(folder), "--dtype", "float32")))
        _run_with_progress(
            task, environment, command, f"dequantizing {model.name}", KILL_FACTOR * task.limit_s + KILL_S
        )
        yield folder


def _run_with_progress(
    task: ReferenceTask, environment: EngineEnvironment, argv: list[str], what: str, limit_s: float
) -> None:
    """Run a program in an engine's environment; its lines `progress DONE TOTAL` are shown."""
    log = ensure_writable(get_logs_dir()) / "reference.log"
    log.unlink(missing_ok=True)
    given = {name: value for name, value in os.environ.items() if name not in SECRETS | OTHER_ENVIRONMENT_VARIABLES}
    env = set_offline(add_library_path(Path(environment.path), given)) | {"TRANSFORMERS_VERBOSITY": "error"}
    hint = f"log: {log}"
    try:
        with task.progress.step(what, 100) as done:
            ended = run_child(argv, env, tick=lambda pid: done(read_progress(log)), limit_s=limit_s, log=log)
    except TimeoutError as error:
        raise ExternalFailure(f"{what} failed", cause=str(error), hint="give more time with --budget") from error
    if ended.code != 0:
        lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
        raise ExternalFailure(f"{what} failed", cause=lines[-1][:600] if lines else None, hint=hint)


def read_progress(log: Path) -> int:
    """In percent, from the last such line of a log."""
    try:
        text = log.read_bytes()[-4000:].decode("utf-8", "replace")
    except OSError:
        return 0
    found = re.findall(r"^progress (\d+) (\d+)$", text, re.MULTILINE)
    return 100 * int(found[-1][0]) // max(1, int(found[-1][1])) if found else 0


# the answers of an engine


def _choose_engine(task: ReferenceTask, engine: str | None, why: str) -> ModelDecision:
    """The given engine, or the installed one with the most faithful weights that reports log-probabilities."""
    model, hardware = task.model, task.hardware
    ids = (engine,) if engine is not None else list_installed_engines(hardware)
    workload = Workload(concurrency=ENGINE_IN_FLIGHT, context_tokens=ENGINE_CONTEXT)
    found: list[tuple[float, ModelDecision]] = []
    refused: BedplateError | None = None
    for engine_id in ids:
        features = load_engines()[engine_id.partition("@")[0]].server_features
        if features is not None and not features.logprobs:
            refused = NotPossible(f"{engine_id} does not report log-probabilities")
            continue
        try:
            order = ModelOrder(model=task.name, workload=workload, engine=engine_id, untuned=True)
            decided = plan_engine(order, model, hardware, task.progress)
        except BedplateError as error:
            refused = error
            continue
        weights = decided.plan.weights
        bits = 64.0 if weights.made == "as it is" else read_stored_bits(weights.label) or 0.0
        found.append((bits, decided))
    if not found:
        causes = [why, refused.message if refused is not None else "no engine that serves it is installed"]
        raise NotPossible(
            f"no method can compute a reference of {model.name} here",
            cause="; ".join(cause for cause in causes if cause),
            hint="a machine with more memory, or an engine that reports log-probabilities: bedplate engines",
        )
    return max(found, key=lambda pair: pair[0])[1]


def _ask_engine(task: ReferenceTask, decided: ModelDecision, sha256: str) -> ComputedAnswers:
    ready = prepare_model(decided, task.progress, to_measure=True)
    version, label = ready.plan.engine_version, ready.plan.weights.label
    made_with = f"{decided.engine.name} {version}, {label} weights, {ready.plan.settings.device}"
    until = time.monotonic() + task.limit_s
    prefixes = list_fixed_prefixes()
    # In another order, so that every beginning has short and long prefixes.
    order = sorted(prefixes, key=hash_prefix)
    answers: dict[str, ReferenceAnswer] = {}
    with run_engine(ready.build_start(), task.progress) as started:
        where = EngineAddress(started.url, started.key, ready.plan.model.served_name)
        places = run_loop(_list_places(where)) if time.monotonic() < until else ()
        with task.progress.step(f"computing the reference of {task.model.name} with {made_with}", len(order)) as done:
            for first in range(0, len(order), ENGINE_AT_ONCE):
                if time.monotonic() > until:
                    break
                some = order[first : first + ENGINE_AT_ONCE]
                replies = run_loop(request_answers(where, some, with_gaps=True))
                for prefix, (reply, gap) in zip(some, replies, strict=True):
                    if isinstance(reply, CompletionAnswer) and gap is not None:
                        answers[hash_prefix(prefix)] = as_known(reply, round(gap, 3), False)
                done(first + len(some))
    tokens = max((place.tokens for place in places), default=0)
    likelihood = Likelihood(sha256=sha256, made_with=made_with, tokens=tokens, places=places) if places else None
    ordered = {key: answers[key] for prefix in prefixes if (key := hash_prefix(prefix)) in answers}
    return ComputedAnswers(made_with, ordered, likelihood)


async def _list_places(where: EngineAddress) -> tuple[TextPlace, ...]:
    """The most likely tokens after some words of the fixed text, where one of them continues the text."""
    import aiohttp

    from bedplate.measure.quality import REQUEST_LIMIT_S, QualityProbe

    text = read_fixed_text()
    ends = [word.end() for word in re.finditer(r"\S+", text)][4:-1]
    headers = {"Authorization": f"Bearer {where.key}"} if where.key else {}
    timeout = aiohttp.ClientTimeout(total=REQUEST_LIMIT_S)
    found = []
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        probe = QualityProbe(session, where.url, where.name)
        for end in choose_spread(ends[: len(ends) // 2], ENGINE_PLACES):
            _, listed = await probe.request_listed(text[:end], LISTED)
            place = None if listed is None else make_place(text, end, listed.top)
            if place is not None:
                found.append(place)
    return tuple(found)


def make_place(text: str, end: int, top: dict[str, float]) -> TextPlace | None:
    """A place in the text; `None` if no listed token continues it."""
    following = max((token for token in top if token and text.startswith(token, end)), key=len, default=None)
    if following is None:
        return None
    ranked = sorted(top.items(), key=lambda pair: -pair[1])
    return TextPlace(end=end, tokens=0, next=(following, top[following]), top=tuple(ranked))


# the shipped reference


def write_shipped(folder: Path) -> None:
    """Compute the reference of the built-in model with all prefixes, and write the files of the package."""
    from bedplate.facts.hardware import probe
    from bedplate.run.ready import fetch_facts

    progress, hardware = SilentProgress(), probe()
    model = fetch_facts(None, hardware, progress)
    task = ReferenceTask(model, hardware, progress, model.name, LIMIT_S)
    prefixes = (*list_fixed_prefixes(), *list_short_prefixes())
    sha256 = hash_file(Path(model.files[0]))
    found = _run_pytorch(task, install_environment(get_engine(REFERENCE.id), progress), "float32", sha256, prefixes)
    made = Reference(
        file=Path(model.files[0]).name, sha256=sha256, file_bytes=measure_weight_bytes(model),
        made_with=found.made_with, answers=found.answers,
    )  # fmt: skip
    (folder / f"reference_{made.id}.json").write_text(write_reference(made), encoding="utf-8")
    if found.likelihood is not None:
        (folder / f"likelihood_{made.id}.json").write_text(write_likelihood(found.likelihood), encoding="utf-8")


if __name__ == "__main__":
    write_shipped(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent / "data")
