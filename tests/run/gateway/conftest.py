"""Runs coroutine tests on uvloop, which serves on Linux and macOS, and in `make test-all` on asyncio's loop too."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest
import uvloop
from tests.conftest import HANG_S

from .scripted import PROBLEMS

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if inspect.iscoroutinefunction(metafunc.function):
        metafunc.fixturenames.append("loop_kind")
        asyncio_loop = pytest.param("asyncio", marks=pytest.mark.asyncio_loop)
        metafunc.parametrize("loop_kind", [asyncio_loop, "uvloop"])


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    wanted = inspect.signature(pyfuncitem.obj).parameters
    arguments = {name: pyfuncitem.funcargs[name] for name in wanted}
    PROBLEMS.clear()
    with asyncio.Runner(loop_factory=LOOPS[str(pyfuncitem.callspec.params["loop_kind"])]) as runner:
        runner.get_loop().set_exception_handler(_note)
        runner.run(asyncio.wait_for(pyfuncitem.obj(**arguments), HANG_S))
    assert not PROBLEMS
    return True


def _note(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    PROBLEMS.append(f"{context.get('message')}: {context.get('exception')!r}")
