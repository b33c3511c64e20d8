"""The CUDA driver library through ctypes: the few calls for timing copies. It needs neither the toolkit nor torch."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterator
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

LIBRARIES = ("nvcuda.dll",) if sys.platform == "win32" else ("libcuda.so.1", "libcuda.so")
Pointer = c_uint64
"""A device address: 64 bits on every platform, not a host pointer."""
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetUuid": (c_char_p, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDeviceCanAccessPeer": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxSynchronize": (),
    "cuCtxEnablePeerAccess": (c_void_p, c_uint),
    "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
    "cuMemAlloc_v2": (POINTER(Pointer), c_size_t),
    "cuMemFree_v2": (Pointer,),
    "cuMemAllocHost_v2": (POINTER(c_void_p), c_size_t),
    "cuMemFreeHost": (c_void_p,),
    "cuMemsetD32_v2": (Pointer, c_uint, c_size_t),
    "cuMemcpyDtoDAsync_v2": (Pointer, Pointer, c_size_t, c_void_p),
    "cuMemcpyHtoDAsync_v2": (Pointer, c_void_p, c_size_t, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, Pointer, c_size_t, c_void_p),
    "cuMemcpyPeerAsync": (Pointer, c_void_p, Pointer, c_void_p, c_size_t, c_void_p),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventSynchronize": (c_void_p,),
    "cuEventElapsedTime": (POINTER(c_float), c_void_p, c_void_p),
    "cuEventDestroy_v2": (c_void_p,),
    "cuModuleLoadData": (POINTER(c_void_p), c_char_p),
    "cuModuleUnload": (c_void_p,),
    "cuModuleGetFunction": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuLaunchKernel": (c_void_p, *[c_uint] * 7, c_void_p, POINTER(c_void_p), POINTER(c_void_p)),
}
MULTIPROCESSORS, MEMORY_CLOCK_KHZ, MEMORY_BUS_BITS = 16, 36, 37
# Explanations of the error codes in cuda.h.
EXPLANATIONS = {
    2: "it has not enough free memory",
    34: "only the toolkit's stub library is installed, not the driver",
    35: "the driver is older than its library",
    46: "it is in exclusive or prohibited compute mode, or another process holds it",
    100: "the driver sees no GPU",
    101: "the driver does not list this device",
    201: "its context is not usable",
    214: "its memory has an uncorrectable ECC error",
    218: "the driver rejected the kernel's PTX",
    222: "the driver is too old for the kernel's PTX",
    700: "the kernel accessed an illegal address",
    702: "the kernel ran into the display's time limit",
    719: "the kernel failed",
    801: "the driver does not support it",
    802: "the system is not ready: check that the fabric manager is running",
    803: "the driver and its library have different versions: reboot",
    804: "the CUDA compatibility library does not support this GPU",
    999: "unknown error",
}
ALREADY_ENABLED = 704


class CudaError(Exception):
    """A failed driver call."""

    def __init__(self, call: str, code: int, name: str | None = None) -> None:
        self.call, self.code = call, code
        what = EXPLANATIONS.get(code, "the driver reported an error")
        super().__init__(f"{what} ({call}: {name or f'error {code}'})")


def load_driver() -> Any:
    """The driver library with typed calls. Raises OSError if there is none."""
    failure: OSError | None = None
    for name in LIBRARIES:
        try:
            library = ctypes.CDLL(name)
        except OSError as error:
            failure = failure or error
            continue
        for call, types in SIGNATURES.items():
            with contextlib.suppress(AttributeError):  # an old driver; calling the function reports it
                function = getattr(library, call)
                function.argtypes, function.restype = types, c_int
        return library
    raise failure or OSError("no driver library")


class CudaDriver:
    """The driver's calls. Errors become exceptions, and resources are released."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: Any) -> None:
        function = getattr(self._library, name, None)
        if function is None:
            raise CudaError(name, 801, "not in this driver")
        if (code := function(*arguments)) != 0:
            raise CudaError(name, code, self._get_error_name(code))

    def call_for_number(self, name: str, *arguments: Any) -> int:
        value = c_int()
        self.call(name, byref(value), *arguments)
        return value.value

    def list_devices(self) -> list[int]:
        return [
            self.call_for_number("cuDeviceGet", position)
            for position in range(self.call_for_number("cuDeviceGetCount"))
        ]

    def get_name(self, device: int) -> str:
        text = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", text, 256, device)
        return text.value.decode(errors="replace")

    def get_uuid(self, device: int) -> str | None:
        """The 32 hexadecimal digits; `None` if the driver is too old."""
        raw = ctypes.create_string_buffer(16)
        try:
            self.call("cuDeviceGetUuid_v2" if hasattr(self._library, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid",
                      raw, device)  # fmt: skip
        except CudaError:
            return None
        return raw.raw.hex()

    def get_attribute(self, which: int, device: int) -> int | None:
        try:
            return self.call_for_number("cuDeviceGetAttribute", which, device)
        except CudaError:
            return None

    def get_version(self) -> str:
        """The newest CUDA version that the driver supports."""
        try:
            number = self.call_for_number("cuDriverGetVersion")
        except CudaError:
            return "of unknown version"
        return f"{number // 1000}.{number % 1000 // 10}"

    @contextlib.contextmanager
    def open_context(self, device: int) -> Iterator[c_void_p]:
        """The device's primary context, current within the block."""
        handle = c_void_p()
        self.call("cuDevicePrimaryCtxRetain", byref(handle), device)
        try:
            self.call("cuCtxSetCurrent", handle)
            yield handle
        finally:
            self._call_ignoring_errors("cuDevicePrimaryCtxRelease_v2", device)

    def get_free_bytes(self) -> int:
        free, total = c_size_t(), c_size_t()
        self.call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value

    @contextlib.contextmanager
    def allocate_memory(self, size: int) -> Iterator[int]:
        """Plain device memory. Managed memory could exceed the card's memory and hang it."""
        address = Pointer()
        self.call("cuMemAlloc_v2", byref(address), size)
        try:
            yield address.value
        finally:
            self._call_ignoring_errors("cuMemFree_v2", address.value)

    @contextlib.contextmanager
    def allocate_pinned(self, size: int) -> Iterator[int]:
        address = c_void_p()
        self.call("cuMemAllocHost_v2", byref(address), size)
        try:
            yield address.value or 0
        finally:
            self._call_ignoring_errors("cuMemFreeHost", address)

    @contextlib.contextmanager
    def load_function(self, text: bytes, name: bytes) -> Iterator[c_void_p]:
        """A kernel from PTX, which the driver compiles for the card."""
        module, function = c_void_p(), c_void_p()
        self.call("cuModuleLoadData", byref(module), text)
        try:
            self.call("cuModuleGetFunction", byref(function), module, name)
            yield function
        finally:
            self._call_ignoring_errors("cuModuleUnload", module)

    def launch(self, function: c_void_p, blocks: int, threads: int, *arguments: Any) -> None:
        pointers = (c_void_p * len(arguments))(*(ctypes.addressof(one) for one in arguments))
        self.call("cuLaunchKernel", function, blocks, 1, 1, threads, 1, 1, 0, None, pointers, None)

    @contextlib.contextmanager
    def make_stopwatch(self) -> Iterator[Callable[[Callable[[], None]], float]]:
        """A function that measures the device time of the calls that another function makes."""
        start, end = c_void_p(), c_void_p()
        self.call("cuEventCreate", byref(start), 0)
        try:
            self.call("cuEventCreate", byref(end), 0)

            def measure_elapsed(ask: Callable[[], None]) -> float:
                self.call("cuEventRecord", start, None)
                ask()
                self.call("cuEventRecord", end, None)
                self.call("cuEventSynchronize", end)
                milliseconds = c_float()
                self.call("cuEventElapsedTime", byref(milliseconds), start, end)
                return milliseconds.value / 1000

            yield measure_elapsed
        finally:
            for event in (start, end):
                if event.value:
                    self._call_ignoring_errors("cuEventDestroy_v2", event)

    def _call_ignoring_errors(self, name: str, *arguments: Any) -> None:
        """Ignore errors of clean-up calls: after a failure every call fails, and only the first failure is reported."""
        with contextlib.suppress(CudaError):
            self.call(name, *arguments)

    def _get_error_name(self, code: int) -> str | None:
        function = getattr(self._library, "cuGetErrorName", None)
        text = c_char_p()
        if function is None or function(code, byref(text)) != 0 or text.value is None:
            return None
        return text.value.decode(errors="replace")
