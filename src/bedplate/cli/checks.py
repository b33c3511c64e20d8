"""Checks an engine's answers against a reference as soon as it is ready, while clients use it."""

from __future__ import annotations

import sys

from bedplate.run.trials import Examiner
from bedplate.values import Hardware, Plan
from bedplate.values.agreement import Agreement


async def check_answers(hardware: Hardware, plan: Plan, url: str, key: str | None) -> None:
    """Compares a few answers with a reference, and prints the result on stderr."""
    from bedplate.measure.agreement import check_served

    await check_served(hardware, plan, url, key, _show_agreement)


def _show_agreement(agreement: Agreement) -> None:
    from bedplate.cli.terminal import make_console
    from bedplate.show.serving import render_agreement

    make_console(sys.stderr).print(render_agreement(agreement), soft_wrap=True)


def make_examiner() -> Examiner:
    from bedplate.measure.builds import BuildExaminer

    return BuildExaminer()
