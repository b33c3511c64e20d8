from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def builtin_gguf() -> Path:
    """The built-in model's real file."""
    return Path(os.environ["BEDPLATE_TEST_GGUF"])
