#!/usr/bin/env python3
"""`sglang` with its own options, on a CPU, where its packages lack what is published for GPUs alone.

Two packages are missing there. `sgl_kernel` has a build for CPUs that no index carries; SGLang computes with PyTorch's
operators in its place, but imports it all the same. `torchvision` is for models that see. Each has a stand-in, whose
names can be imported and fail by name when they are called. Where the real one is installed, nothing is put in its way.
Runs inside of the engine's environment, so it depends on nothing but SGLang.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

VISION = ("torchvision", "torchvision.transforms", "torchvision.transforms.functional")


class StandIn(ModuleType):
    """A module that is not installed: it has any name that ends as it should, and none of them does anything."""

    def __init__(self, name: str, ending: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = ModuleSpec(name, None)
        self.__dict__["ending"] = ending

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__") or not name.endswith(self.__dict__["ending"]):
            raise AttributeError(f"{self.__name__} is not installed, and has no {name}")

        def missing(*_: object, **__: object) -> NoReturn:
            raise NotImplementedError(f"{self.__name__}.{name} is in no package that was published for CPUs")

        return missing


def is_missing(module: str) -> bool:
    return module not in sys.modules and importlib.util.find_spec(module) is None


def stand_in(*modules: str, ending: str = "") -> dict[str, ModuleType]:
    """Puts stand-ins where Python looks first, and each into its parent."""
    made: dict[str, ModuleType] = {name: StandIn(name, ending) for name in modules}
    for name, module in made.items():
        parent, _, own = name.rpartition(".")
        if parent in made:
            setattr(made[parent], own, module)
    sys.modules.update(made)
    return made


def import_configurations() -> Any:
    """SGLang's table of models, of which two name torchvision while they are imported.

    Its stand-in then goes again: who asks whether it is installed must hear that it is not.
    """
    import sglang  # noqa: F401  (brings in transformers, which has asked by now)

    made = stand_in(*VISION) if is_missing(VISION[0]) else {}
    try:
        import sglang.srt.configs as configurations
    finally:
        for name in made:
            del sys.modules[name]
    return configurations


def stand_in_for_what_is_missing() -> None:
    if is_missing("sgl_kernel"):
        stand_in("sgl_kernel", ending="_cpu")
    import_configurations()


def main() -> None:
    from sglang.cli.main import main as sglang

    sglang()


if __name__ in ("__main__", "__mp_main__"):
    # Its processes start from this file again, and need the same.
    stand_in_for_what_is_missing()

if __name__ == "__main__":
    main()
