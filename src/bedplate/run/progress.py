"""How long work tells where it stands, for the rooms that start it."""

from bedplate.progress import Progress, Silent

__all__ = ["Progress", "Silent"]
