"""You don't pick an inference engine, you pick a hardware strategy, and the engine follows."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from bedplate._version import __version__

if TYPE_CHECKING:
    from bedplate.decide.choose import decide as decide
    from bedplate.decide.planning import plan as plan
    from bedplate.facts.hardware import probe as probe
    from bedplate.measure.bench import bench as bench
    from bedplate.run.models import find_known_model as inspect
    from bedplate.serving.serve import serve as serve
    from bedplate.tuning.tune import tune as tune

__all__ = ["__version__", "bench", "decide", "inspect", "plan", "probe", "serve", "tune"]

_FACE = {
    "bench": ("bedplate.measure.bench", "bench"),
    "decide": ("bedplate.decide.choose", "decide"),
    "inspect": ("bedplate.run.models", "find_known_model"),
    "plan": ("bedplate.decide.planning", "plan"),
    "probe": ("bedplate.facts.hardware", "probe"),
    "serve": ("bedplate.serving.serve", "serve"),
    "tune": ("bedplate.tuning.tune", "tune"),
}


def __getattr__(name: str) -> Any:
    """Loads a public function when it is first asked for, so that importing bedplate costs nothing."""
    if name not in _FACE:
        raise AttributeError(f"module 'bedplate' has no attribute {name!r}")
    module, function = _FACE[name]
    return getattr(import_module(module), function)


class _Package(ModuleType):
    def __setattr__(self, name: str, value: object) -> None:
        # Importing the package bedplate.decide would replace the function of the same name.
        if not (name in _FACE and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
