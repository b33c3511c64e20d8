"""Commands that people give beside a running service, and a home whose store and services are a test's own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.commands import Answer

from bedplate.engines import engine
from bedplate.run.environments import make_environment


def make_home(folder: Path, shared: Path, *engines: str) -> Path:
    """With these engines alone, which are installed where they are not yet; what was made for them is shared."""
    (folder / "engines").mkdir(parents=True)
    for name in engines:
        make_environment(engine(name))
        (folder / "engines" / name).symlink_to(shared / "engines" / name)
    for name in ("models", "prepared"):
        (shared / name).mkdir(exist_ok=True)
        (folder / name).symlink_to(shared / name)
    return folder


async def run_bedplate(*words: str, heard: Callable[[str], None] = lambda line: None) -> Answer:
    """`bedplate …` as a process of its own, while other things go on; `heard` is told of each line that it says."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bedplate", *words, env={**os.environ, "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"},
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    reading = asyncio.create_task(process.stdout.read())
    said = []
    async for raw in process.stderr:
        said.append(raw.decode())
        heard(said[-1].strip())
    out = (await reading).decode()
    return Answer(await process.wait(), out, "".join(said))


@contextlib.contextmanager
def pin_to_core(core: int) -> Iterator[None]:
    """Whatever is started meanwhile stays there."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
