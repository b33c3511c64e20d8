#!/usr/bin/env python3
"""Dynamo's vLLM worker with its own options on a CPU, where torchvision is only published for GPUs.

The worker imports torchvision for vision models, whatever model it runs. A placeholder module has the imported names.
It is removed afterwards, so that later checks see that torchvision is not installed. An installed torchvision is not
replaced. Runs in Dynamo's environment and depends only on Dynamo.
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


class TorchvisionPlaceholder(ModuleType):
    """A placeholder for a missing module: every name exists and raises an error when called."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)

        def raise_missing(*_: object, **__: object) -> NoReturn:
            raise NotImplementedError(f"{self.__name__}.{name} is not available on CPUs")

        return raise_missing


def import_vision() -> None:
    if importlib.util.find_spec("torchvision") is not None:
        return
    # This module checks for torchvision during its import, so it is imported before the placeholder exists.
    importlib.import_module("transformers.image_processing_utils")
    made = {name: TorchvisionPlaceholder(name) for name in VISION}
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
