"""Interpret measurements: name the bottleneck, and decide to stay or to migrate. Pure functions of values."""
