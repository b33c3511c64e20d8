"""The entry point of the GitHub Action in action.yml: runs `bedplate gate` with the action's inputs.

Needs nothing but Python. Inputs come as GATE_* variables, so that no input is interpreted by a shell.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

OUTCOMES = {0: "no-regression", 10: "better", 20: "not-proven", 30: "worse"}
FAILS = {"worse": (30,), "not-proven": (20, 30), "never": ()}
OPTIONS = ("challenger", "model", "tolerance", "budget", "rounds", "junit", "markdown")


def build_command(given: Mapping[str, str]) -> list[str]:
    """The command line of the gate. Empty inputs are left out."""

    def read(name: str) -> str:
        return given.get(f"GATE_{name.upper()}", "").strip()

    command = [read("bedplate") or "bedplate", "gate", read("baseline")]
    for name in OPTIONS:
        if value := read(name):
            command += [f"--{name}", value]
    for metric in filter(None, (part.strip() for part in read("metric").split(","))):
        command += ["--metric", metric]
    return [*command, *shlex.split(read("arguments"))]


def choose_exit_code(code: int, fail_on: str) -> int:
    """0 unless the gate failed to run, or its outcome is one to fail on."""
    return code if code not in OUTCOMES or code in FAILS[fail_on] else 0


def append_to(variable: str, text: str) -> None:
    """Append to the file that a variable names. Outside of GitHub Actions it is not set."""
    if path := os.environ.get(variable):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(text)


def main() -> int:
    fail_on = os.environ.get("GATE_FAIL_ON", "").strip() or "worse"
    if fail_on not in FAILS:
        print(f"::error::fail-on: {fail_on!r} is not one of {', '.join(FAILS)}")
        return 2
    command = build_command(os.environ)
    if not command[2]:
        print("::error::the input baseline is required")
        return 2
    code = subprocess.run(command).returncode
    markdown = Path(os.environ.get("GATE_MARKDOWN", "").strip())
    outcome = OUTCOMES.get(code, "error")
    append_to("GITHUB_OUTPUT", f"outcome={outcome}\nexit-code={code}\nmarkdown={markdown}\n")
    if code in OUTCOMES and markdown.is_file():
        append_to("GITHUB_STEP_SUMMARY", markdown.read_text(encoding="utf-8"))
    failed = choose_exit_code(code, fail_on)
    if failed:
        print(f"::error title=bedplate gate::{outcome}: bedplate gate exited with {code}")
    elif outcome == "not-proven":
        print("::warning title=bedplate gate::not proven")
    return failed


if __name__ == "__main__":
    sys.exit(main())
