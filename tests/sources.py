"""Python sources, read by the tests of the structure and of the language."""

from __future__ import annotations

import ast
import gc


def parse_source(text: str) -> ast.Module:
    """Without garbage collection: a tree has no cycles, and searching for them takes half of the time."""
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        gc.enable()
