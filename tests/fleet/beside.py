"""Commands that run next to a service, and a separate BEDPLATE_HOME for a test."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.commands import Answer

from bedplate.engines import get_engine
from bedplate.run.environments import make_environment


def make_home(folder: Path, shared: Path, *engines: str) -> Path:
    """A home with only these engines, installed if necessary; prepared models are shared."""
    (folder / "engines").mkdir(parents=True)
    for name in engines:
        make_environment(get_engine(name))
        (folder / "engines" / name).symlink_to(shared / "engines" / name)
    for name in ("models", "prepared"):
        (shared / name).mkdir(exist_ok=True)
        (folder / name).symlink_to(shared / name)
    return folder


async def run_bedplate(*words: str, heard: Callable[[str], None] = lambda line: None) -> Answer:
    """Run `bedplate …` in a separate process; `heard` is called with each line of its stderr."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bedplate", *words, env={**os.environ, "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"},
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    reading = asyncio.create_task(process.stdout.read())
    errors = []
    async for raw in process.stderr:
        errors.append(raw.decode())
        heard(errors[-1].strip())
    out = (await reading).decode()
    return Answer(await process.wait(), out, "".join(errors))


@contextlib.contextmanager
def pin_to_core(core: int) -> Iterator[None]:
    """Processes started in this context run on this core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
