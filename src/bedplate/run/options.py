"""Checks the options of a launch with the parser of the installed engine, without starting the engine."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bedplate.engines import Engine
from bedplate.run.child import run_child
from bedplate.run.environments import CHECK_LIMIT_S, EngineEnvironment, add_library_path, build_command
from bedplate.values import Launch
from bedplate.values.record import Record

PORT = 8000
"""In the checked command line; any port does."""
_CHECKED = "checked-options"
"""The folder in an environment with the results, so that a launch line is checked once."""
_OPTION = re.compile(r"--?[A-Za-z][\w.-]*")
_MISSING_PARSER = re.compile(r"^(?:ImportError|ModuleNotFoundError): ", re.MULTILINE)
_REJECTED = (
    r"unrecognized arguments: (.*)",
    r"argument (.*: invalid choice: \S+)",
    r"(?:AttributeError|error|Error): (.*)",
)


class OptionCheck(Record, frozen=True, kw_only=True):
    """Whether a version of an engine accepts the options of a launch."""

    accepted: bool | None
    """`None`: it could not be checked, for example because a release has moved its parser."""
    by: str
    """What was asked: the engine's parser, or its help text."""
    options: int
    """Number of options in the launch."""
    problem: str | None = None
    """What is not accepted, in the words of the parser."""

    @property
    def text(self) -> str:
        if self.accepted:
            return f"{self.by} accepts all {self.options} options"
        if self.accepted is None:
            return f"{self.by} could not be used to check the options: {self.problem}"
        return f"{self.by} rejects an option: {self.problem}"


def check_options(engine: Engine, environment: EngineEnvironment, launch: Launch) -> OptionCheck:
    """Checks a launch in an environment. The result is stored there. Raises OSError or TimeoutError."""
    program, options = split_command(launch.argv)
    code = engine.option_check if environment.server is None else None
    stored = _find_stored(environment, launch.argv, code)
    if stored.is_file():
        try:
            return msgspec.json.decode(stored.read_bytes(), type=OptionCheck)
        except (OSError, msgspec.DecodeError):
            pass  # it is written again
    env = add_library_path(Path(environment.path), {**os.environ, **launch.env})
    count = len(list_option_names(options))
    if code is not None:
        command = [str(environment.interpreter), *([] if environment.adopted else ["-I"]), "-c", code, *options]
        ended = run_child(command, env=env, limit_s=CHECK_LIMIT_S)
        problem = None if ended.code == 0 else find_problem(ended.output)
        is_missing = problem is not None and _MISSING_PARSER.search(ended.output) is not None
        found = OptionCheck(
            accepted=None if is_missing else problem is None, by="its own parser", options=count, problem=problem
        )
    else:
        command = build_command(environment, Launch(argv=(*program, "--help")))
        ended = run_child(command, env=env, limit_s=CHECK_LIMIT_S)
        missing = list_missing_options(options, ended.output) if ended.code == 0 else []
        problem = f"it has no option {', '.join(missing)}" if missing else None
        if ended.code != 0:
            problem = find_problem(ended.output)
        found = OptionCheck(accepted=problem is None, by="its help text", options=count, problem=problem)
    _store(stored, found)
    return found


def split_command(argv: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The program with its module or subcommand, and the options."""
    words = 3 if argv[0] == "python" else 2 if len(argv) > 1 and re.fullmatch(r"[a-z]+", argv[1]) else 1
    return tuple(argv[:words]), tuple(argv[words:])


def list_option_names(options: Sequence[str]) -> list[str]:
    return [word.partition("=")[0] for word in options if _OPTION.fullmatch(word.partition("=")[0])]


def list_missing_options(options: Sequence[str], help_text: str) -> list[str]:
    """The options that a help text does not name. Pure."""
    known = set(re.findall(r"(?<![\w-])--?[A-Za-z][\w.-]*", help_text))
    known |= {f"--no-{found}" for found in re.findall(r"--\[no-\]([\w-]+)", help_text)}
    return [name for name in dict.fromkeys(list_option_names(options)) if name not in known]


def find_problem(output: str) -> str:
    """The rejected option in the output of a parser that failed. Pure."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for line in reversed(lines):
        for pattern in _REJECTED:
            if found := re.search(pattern, line):
                return found[1].strip()
    return lines[-1] if lines else "it gave no reason"


def _find_stored(environment: EngineEnvironment, argv: Sequence[str], code: str | None) -> Path:
    digest = hashlib.sha256(repr((tuple(argv), code, environment.made_at)).encode()).hexdigest()[:16]
    return Path(environment.path) / _CHECKED / f"{digest}.json"


def _store(path: Path, found: OptionCheck) -> None:
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(msgspec.json.encode(found))
    except OSError:
        pass  # a read-only installation: it is checked again the next time
