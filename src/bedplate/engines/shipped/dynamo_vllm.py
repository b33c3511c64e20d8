#!/usr/bin/env python3
"""A vLLM worker of Dynamo, with its own options, on a CPU, where torchvision is published for GPUs alone.

The worker imports it for models that see, whatever model it is to run. A stand-in has the names that are imported, and
goes again afterwards: who asks whether it is installed must hear that it is not. Where the real one is installed,
nothing is put in its way. Runs inside of Dynamo's environment, so it depends on nothing but Dynamo.
"""

from __future__ import annotations

import importlib
import importlib.util
import runpy
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn

VISION = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2", "torchvision.transforms.v2.functional")
IMPORTER = "transformers.models.qwen2_vl.image_processing_qwen2_vl"


class StandIn(ModuleType):
    """A module that is not installed: it has any name, and none of them does anything."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_: object, **__: object) -> NoReturn:
            raise NotImplementedError(f"{self.__name__}.{name} is in no package that was published for CPUs")

        return missing


def import_vision() -> None:
    if importlib.util.find_spec("torchvision") is not None:
        return
    # What asks for it while it is imported must hear the truth before there is a stand-in.
    importlib.import_module("transformers.image_processing_utils")
    made = {name: StandIn(name) for name in VISION}
    for name, module in made.items():
        parent, _, own = name.rpartition(".")
        if parent in made:
            setattr(made[parent], own, module)
    sys.modules.update(made)
    try:
        importlib.import_module(IMPORTER)
    finally:
        for name in VISION:
            del sys.modules[name]


if __name__ == "__main__":
    import_vision()
    runpy.run_module("dynamo.vllm", run_name="__main__")
