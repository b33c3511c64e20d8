"""You don't pick an inference engine, you pick a hardware strategy, and the engine follows."""

from bedplate._version import __version__

__all__ = ["__version__"]
