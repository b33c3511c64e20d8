#!/usr/bin/env python3
"""`sglang` with its own options on a CPU, where packages that are only published for GPUs are missing.

Two packages are missing there. No index has the CPU build of `sgl_kernel`; SGLang then computes with PyTorch's
operators, but still imports it. `torchvision` is for vision models. Both are replaced by placeholder modules whose
names can be imported and raise an error when called. Installed packages are not replaced.
Runs in the engine's environment and depends only on SGLang.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

VISION = ("torchvision", "torchvision.transforms", "torchvision.transforms.functional")


class PlaceholderModule(ModuleType):
    """A placeholder for a missing module: every name with the given ending exists and raises an error when called."""

    def __init__(self, name: str, ending: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = ModuleSpec(name, None)
        self.__dict__["ending"] = ending

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__") or not name.endswith(self.__dict__["ending"]):
            raise AttributeError(f"{self.__name__} is not installed, and its placeholder has no {name}")

        def raise_missing(*_: object, **__: object) -> NoReturn:
            raise NotImplementedError(f"{self.__name__}.{name} is not available on CPUs")

        return raise_missing


def is_missing(module: str) -> bool:
    return module not in sys.modules and importlib.util.find_spec(module) is None


def add_placeholders(*modules: str, ending: str = "") -> dict[str, ModuleType]:
    """Register placeholders in sys.modules, and each as an attribute of its parent."""
    made: dict[str, ModuleType] = {name: PlaceholderModule(name, ending) for name in modules}
    for name, module in made.items():
        parent, _, own = name.rpartition(".")
        if parent in made:
            setattr(made[parent], own, module)
    sys.modules.update(made)
    return made


def import_configurations() -> Any:
    """Import SGLang's model configurations, two of which use torchvision during the import.

    The placeholder is removed afterwards, so that later checks see that torchvision is not installed.
    """
    import sglang  # noqa: F401  (imports transformers, which checks for torchvision)

    made = add_placeholders(*VISION) if is_missing(VISION[0]) else {}
    try:
        import sglang.srt.configs as configurations
    finally:
        for name in made:
            del sys.modules[name]
    return configurations


def replace_missing_modules() -> None:
    if is_missing("sgl_kernel"):
        add_placeholders("sgl_kernel", ending="_cpu")
    import_configurations()


def main() -> None:
    from sglang.cli.main import main as sglang

    sglang()


if __name__ in ("__main__", "__mp_main__"):
    # SGLang's processes run this file again, and need the placeholders too.
    replace_missing_modules()

if __name__ == "__main__":
    main()
