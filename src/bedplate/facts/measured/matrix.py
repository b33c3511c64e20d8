"""Matrix products by data type, if a library is available: cuBLAS for NVIDIA's cards, numpy for the CPU.

Nothing is installed for this. Without a library there is no figure.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from ctypes import POINTER, byref, c_float, c_int, c_int32, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bedplate.facts.measured.cuda import MeasuredCard, match_devices, measure_durations
from bedplate.facts.measured.driver import CudaDriver, CudaError, load_driver
from bedplate.facts.measured.statistics import compute_rates, make_figure
from bedplate.home import get_engines_dir
from bedplate.values import Accelerator, Record
from bedplate.values.measurements import MatrixRate

MIB = 1 << 20
GPU_SIZE, GPU_SIZE_PLAIN, CPU_SIZE = 8192, 4096, 2048
SHARE_OF_FREE = 0.4
CPU_SAMPLES, CPU_BUDGET_S = 5, 1.0
NOISE_BYTES = 8 * MIB
# Constants of the public cuBLAS and CUDA headers.
R_32F, R_16F, R_8I, R_32I, R_16BF = 0, 2, 3, 10, 14
COMPUTE_32F, COMPUTE_32I, COMPUTE_32F_FAST_TF32 = 68, 72, 77
OP_N, OP_T = 0, 1
ANY_ALGORITHM = -1
CUBLAS_ERRORS = {
    1: "not initialized",
    3: "out of memory",
    7: "invalid value",
    8: "not supported on this GPU",
    13: "execution failed",
    14: "internal error",
    15: "not supported",
}


@dataclass(frozen=True, slots=True)
class ProductKind:
    """One matrix product: its input, output and accumulator types."""

    name: str
    size: int
    input: int
    input_bytes: int
    output: int
    compute: int


KINDS = (
    ProductKind("fp32", GPU_SIZE_PLAIN, R_32F, 4, R_32F, COMPUTE_32F),
    ProductKind("tf32", GPU_SIZE, R_32F, 4, R_32F, COMPUTE_32F_FAST_TF32),
    ProductKind("fp16", GPU_SIZE, R_16F, 2, R_16F, COMPUTE_32F),
    ProductKind("bf16", GPU_SIZE, R_16BF, 2, R_16BF, COMPUTE_32F),
    ProductKind("int8", GPU_SIZE, R_8I, 1, R_32I, COMPUTE_32I),
)
OUTPUT_BYTES = {R_32F: 4, R_32I: 4, R_16F: 2, R_16BF: 2}


class MatrixRequest(Record, frozen=True, kw_only=True):
    cards: tuple[MeasuredCard, ...]
    threads: int
    when: str


class MatrixResult(Record, frozen=True, kw_only=True):
    rates: tuple[MatrixRate, ...] = ()
    notes: tuple[str, ...] = ()


def make_request(accelerators: Sequence[Accelerator], threads: int, when: str) -> MatrixRequest:
    cards = (
        MeasuredCard(index=card.index, name=card.name, uuid=card.uuid)
        for card in accelerators
        if card.vendor == "nvidia"
    )
    return MatrixRequest(cards=tuple(cards), threads=threads, when=when)


def measure_matrix(asked: MatrixRequest, tell: Callable[[float], None]) -> MatrixResult:
    notes: list[str] = []
    found = list(measure_cpu_rates(asked, notes))
    tell(0.3)
    if asked.cards:
        found += measure_gpu_rates(asked, notes, lambda share: tell(0.3 + 0.7 * share))
    return MatrixResult(rates=tuple(found), notes=tuple(notes))


def count_operations(size: int) -> int:
    """One multiplication and one addition for each of size³ terms."""
    return 2 * size**3


def make_noise(kind: ProductKind) -> bytes:
    """Random values around one. Zeros need less power, so they would run faster than real weights."""
    raw = bytearray(os.urandom(NOISE_BYTES))
    if kind.input_bytes > 1:
        # The last byte holds sign and exponent, which gives ± 0.5 to 2 whatever the other bytes are.
        tops = (0x38, 0x3C, 0xB8, 0xBC) if kind.input == R_16F else (0x3F, 0xBF)
        table = bytes(tops[byte % len(tops)] for byte in range(256))
        raw[kind.input_bytes - 1 :: kind.input_bytes] = raw[kind.input_bytes - 1 :: kind.input_bytes].translate(table)
    return bytes(raw)


# the CPU


def measure_cpu_rates(asked: MatrixRequest, notes: list[str]) -> Iterator[MatrixRate]:
    # As many threads as may run at once. More would only wait for each other.
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(variable, str(asked.threads))
    try:
        import numpy
    except Exception as error:
        reason = (
            "no library is available" if isinstance(error, ModuleNotFoundError) else f"numpy does not load ({error})"
        )
        notes.append(f"matrix products on the CPU are not measured: {reason}")
        return
    random = numpy.random.default_rng(0)
    left, right = (random.random((CPU_SIZE, CPU_SIZE), dtype=numpy.float32) for _ in range(2))
    out = numpy.matmul(left, right)
    took: list[float] = []
    began = time.perf_counter()
    while len(took) < 2 or (len(took) < CPU_SAMPLES and time.perf_counter() - began < CPU_BUDGET_S):
        start = time.perf_counter()
        numpy.matmul(left, right, out=out)
        took.append(time.perf_counter() - start)
    library = f"numpy {numpy.__version__}"
    yield MatrixRate(
        device="cpu",
        data_type="fp32",
        library=library,
        size=CPU_SIZE,
        operations_s=make_figure(
            compute_rates(count_operations(CPU_SIZE), took), f"{library}, {asked.threads} threads, {asked.when}"
        ),
    )


# NVIDIA's cards


class CublasError(Exception):
    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{CUBLAS_ERRORS.get(code, f'error {code}')} ({call})")


def measure_gpu_rates(asked: MatrixRequest, notes: list[str], tell: Callable[[float], None]) -> list[MatrixRate]:
    paths = list(find_libraries())
    try:
        driver = CudaDriver(load_driver())
        cards = match_devices(asked.cards, [(device, driver.get_uuid(device)) for device in driver.list_devices()])
        library, where = open_first(paths, driver.call_for_number("cuDriverGetVersion") // 1000)
    except (OSError, CudaError) as error:
        notes.append(f"matrix products on the GPU are not measured: {error}")
        return []
    found: list[MatrixRate] = []
    for done, (card, device) in enumerate(cards):
        if device is not None:
            try:
                found += measure_card_rates(driver, library, where.name, card, device, asked.when, notes)
            except (CudaError, CublasError) as error:
                notes.append(f"matrix products on GPU {card.index} are not measured: {error}")
        tell((done + 1) / len(cards))
    return found


def measure_card_rates(
    driver: CudaDriver, library: Any, name: str, card: MeasuredCard, device: int, when: str, notes: list[str]
) -> Iterator[MatrixRate]:
    with driver.open_context(device):
        handle = c_void_p()
        _check("cublasCreate", library.cublasCreate_v2(byref(handle)))
        try:
            version = c_int()
            library.cublasGetVersion_v2(handle, byref(version))
            label = f"cuBLAS {version.value // 10000}.{version.value // 100 % 100}"
            for kind in KINDS:
                try:
                    took = measure_product(driver, library, handle, kind)
                except (CudaError, CublasError) as error:
                    notes.append(f"GPU {card.index}: {kind.name} products are not measured: {error}")
                    continue
                source = f"{label} ({name}), {kind.size}³, random data, {when}"
                figure = make_figure(compute_rates(count_operations(kind.size), took), source)
                yield MatrixRate(
                    device=str(card.index), data_type=kind.name, library=label, size=kind.size, operations_s=figure
                )
        finally:
            library.cublasDestroy_v2(handle)


def measure_product(driver: CudaDriver, library: Any, handle: c_void_p, kind: ProductKind) -> list[float]:
    """Seconds for one product, in repeats."""
    size = kind.size
    input_bytes, output_bytes = size * size * kind.input_bytes, size * size * OUTPUT_BYTES[kind.output]
    if 2 * input_bytes + output_bytes > driver.get_free_bytes() * SHARE_OF_FREE:
        raise CudaError("cuMemGetInfo_v2", 2)
    one, zero = (c_int32(1), c_int32(0)) if kind.compute == COMPUTE_32I else (c_float(1), c_float(0))
    with ExitStack() as stack:
        left, right = (stack.enter_context(driver.allocate_memory(input_bytes)) for _ in range(2))
        out = stack.enter_context(driver.allocate_memory(output_bytes))
        elapsed = stack.enter_context(driver.make_stopwatch())
        text = make_noise(kind)
        for start in range(0, input_bytes, len(text)):
            count = min(len(text), input_bytes - start)
            for matrix in (left, right):
                driver.call("cuMemcpyHtoDAsync_v2", matrix + start, text, count, None)
        driver.call("cuCtxSynchronize")

        def multiply() -> None:
            code = library.cublasGemmEx(
                handle, OP_T, OP_N, size, size, size, byref(one), left, kind.input, size, right, kind.input, size,
                byref(zero), out, kind.output, size, kind.compute, ANY_ALGORITHM,
            )  # fmt: skip
            _check("cublasGemmEx", code)

        return measure_durations(elapsed, multiply)


def find_libraries() -> Iterator[Path]:
    """cuBLAS in its usual places: this interpreter's packages, the engines' environments, the toolkit."""
    names = ("cublas64_*.dll",) if sys.platform == "win32" else ("libcublas.so.*", "libcublas.so")
    roots = [Path(place) for place in sys.path if place.endswith(("site-packages", "dist-packages"))]
    roots += sorted(get_engines_dir().glob("*/*/lib/python*/site-packages"))
    folders = [folder for root in roots for pattern in ("nvidia/*/lib", "nvidia/*/bin", "torch/lib")
               for folder in sorted(root.glob(pattern))]  # fmt: skip
    folders += [Path(place, "lib64") for place in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if place]
    folders += [Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib/aarch64-linux-gnu"), Path("/usr/lib64")]
    for folder in folders:
        for name in names:
            yield from sorted(folder.glob(name), reverse=True)


def parse_major_version(path: Path) -> int | None:
    """Of `libcublas.so.12` or `cublas64_12.dll`."""
    found = re.search(r"(?:\.so\.|64_)([0-9]{1,3})", path.name)
    return int(found[1]) if found else None


def open_first(paths: Sequence[Path], cuda_major: int) -> tuple[Any, Path]:
    """Load the newest library that this driver supports, after cublasLt from the same folder."""
    usable = [path for path in paths if (parse_major_version(path) or cuda_major) <= cuda_major]
    for path in sorted(usable, key=lambda path: parse_major_version(path) or 0, reverse=True):
        cublas_lt = path.with_name(path.name.replace("cublas", "cublasLt"))
        try:
            if cublas_lt.exists():
                ctypes.CDLL(str(cublas_lt), mode=getattr(ctypes, "RTLD_GLOBAL", 0))
            return declare_types(ctypes.CDLL(str(path))), path
        except (OSError, AttributeError):
            continue
    raise OSError("no library is available")


def declare_types(library: Any) -> Any:
    library.cublasCreate_v2.argtypes = [POINTER(c_void_p)]
    library.cublasDestroy_v2.argtypes = [c_void_p]
    library.cublasGetVersion_v2.argtypes = [c_void_p, POINTER(c_int)]
    library.cublasGemmEx.argtypes = [
        c_void_p, c_int, c_int, c_int, c_int, c_int, c_void_p, c_uint64, c_int, c_int, c_uint64, c_int, c_int,
        c_void_p, c_uint64, c_int, c_int, c_int, c_int,
    ]  # fmt: skip
    return library


def _check(call: str, code: int) -> None:
    if code != 0:
        raise CublasError(call, code)
