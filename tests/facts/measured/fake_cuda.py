"""A fake CUDA driver. Each copy advances its clock by bytes over bandwidth."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

GB = 10**9
MIB = 1 << 20


@dataclass
class FakeCard:
    name: str = "NVIDIA Fake"
    uuid: bytes = bytes(16)
    free_bytes: int = 1024 * MIB
    memory_bytes_s: float = 1000 * GB
    """Bytes that its memory moves, reads and writes together."""
    host_bytes_s: float = 25 * GB
    multiprocessors: int = 10
    memory_clock_khz: int = 3_201_000
    bus_bits: int = 6144


@dataclass
class FakeCuda:
    cards: list[FakeCard] = field(default_factory=lambda: [FakeCard()])
    refuse: dict[str, int] = field(default_factory=dict)
    peers: set[tuple[int, int]] = field(default_factory=set)
    """(target, source) pairs that reach each other."""
    peer_bytes_s: float = 100 * GB
    skipped_rounds: int = 0
    """A kernel that does less than it was asked for."""
    clock_s: float = 0.0
    live: dict[int, int] = field(default_factory=dict)
    contexts: list[int] = field(default_factory=list)
    most_bytes: int = 0
    calls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._next = 1 << 40
        self._current = 0
        self._events: dict[int, float] = {}
        self._host: dict[int, Any] = {}
        self._sums: dict[int, tuple[int, int]] = {}

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("cu"):
            return object.__getattribute__(self, name)
        method = object.__getattribute__(self, name)

        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if (code := self.refuse.get(name)) is not None:
                return code
            method(*arguments)
            return 0

        return call

    def cuInit(self, flags: int) -> None:
        return None

    def cuDriverGetVersion(self, out: Any) -> None:
        out._obj.value = 13000

    def cuGetErrorName(self, code: int, out: Any) -> None:
        out._obj.value = b"CUDA_ERROR_FAKE"

    def cuDeviceGetCount(self, out: Any) -> None:
        out._obj.value = len(self.cards)

    def cuDeviceGet(self, out: Any, position: int) -> None:
        out._obj.value = position

    def cuDeviceGetName(self, out: Any, size: int, device: int) -> None:
        out.value = self.cards[device].name.encode()

    def cuDeviceGetUuid(self, out: Any, device: int) -> None:
        out.raw = self.cards[device].uuid

    def cuDeviceGetAttribute(self, out: Any, which: int, device: int) -> None:
        card = self.cards[device]
        out._obj.value = {16: card.multiprocessors, 36: card.memory_clock_khz, 37: card.bus_bits}[which]

    def cuDeviceCanAccessPeer(self, out: Any, device: int, peer: int) -> None:
        out._obj.value = int((device, peer) in self.peers)

    def cuDevicePrimaryCtxRetain(self, out: Any, device: int) -> None:
        out._obj.value = device + 1
        self.contexts.append(device)

    def cuDevicePrimaryCtxRelease_v2(self, device: int) -> None:
        self.contexts.remove(device)

    def cuCtxSetCurrent(self, context: Any) -> None:
        self._current = context.value - 1

    def cuCtxSynchronize(self) -> None:
        return None

    def cuCtxEnablePeerAccess(self, context: Any, flags: int) -> None:
        return None

    def cuMemGetInfo_v2(self, free: Any, total: Any) -> None:
        card = self.cards[self._current]
        free._obj.value, total._obj.value = card.free_bytes - sum(self.live.values()), card.free_bytes

    def cuMemAlloc_v2(self, out: Any, size: int) -> None:
        self._next += 1 << 36
        out._obj.value = self._next
        self.live[self._next] = size
        self.most_bytes = max(self.most_bytes, sum(self.live.values()))

    def cuMemFree_v2(self, address: int) -> None:
        del self.live[address]

    def cuMemAllocHost_v2(self, out: Any, size: int) -> None:
        buffer = ctypes.create_string_buffer(size)
        out._obj.value = ctypes.addressof(buffer)
        self._host[out._obj.value] = buffer

    def cuMemFreeHost(self, address: Any) -> None:
        del self._host[address.value]

    def cuMemsetD32_v2(self, address: int, value: int, count: int) -> None:
        assert 4 * count <= self.live[address]

    def cuMemcpyDtoDAsync_v2(self, target: int, source: int, size: int, stream: Any) -> None:
        assert size <= min(self.live[target], self.live[source])
        self.clock_s += 2 * size / self.cards[self._current].memory_bytes_s

    def cuMemcpyHtoDAsync_v2(self, target: int, source: Any, size: int, stream: Any) -> None:
        self.clock_s += size / self.cards[self._current].host_bytes_s

    def cuMemcpyDtoHAsync_v2(self, target: int, source: int, size: int, stream: Any) -> None:
        self.clock_s += size / self.cards[self._current].host_bytes_s
        if source in self._sums:
            threads, value = self._sums[source]
            ctypes.memmove(target, (ctypes.c_uint32 * threads)(*[value] * threads), size)

    def cuMemcpyPeerAsync(self, target: int, a: Any, source: int, b: Any, size: int, stream: Any) -> None:
        assert a.value != b.value and size <= min(self.live[target], self.live[source])
        self.clock_s += size / self.peer_bytes_s

    def cuEventCreate(self, out: Any, flags: int) -> None:
        self._next += 1
        out._obj.value = self._next
        self._events[self._next] = 0.0

    def cuEventRecord(self, event: Any, stream: Any) -> None:
        self._events[event.value] = self.clock_s

    def cuEventSynchronize(self, event: Any) -> None:
        return None

    def cuEventElapsedTime(self, out: Any, start: Any, end: Any) -> None:
        out._obj.value = 1000 * (self._events[end.value] - self._events[start.value])

    def cuEventDestroy_v2(self, event: Any) -> None:
        del self._events[event.value]

    def cuModuleLoadData(self, out: Any, text: bytes) -> None:
        assert b".entry read_all" in text and text.endswith(b"\0")
        out._obj.value = 7

    def cuModuleUnload(self, module: Any) -> None:
        return None

    def cuModuleGetFunction(self, out: Any, module: Any, name: bytes) -> None:
        out._obj.value = 8

    def cuLaunchKernel(self, function: Any, blocks: int, *rest: Any) -> None:
        threads, pointers = blocks * rest[2], rest[7]
        data, rounds, sums = (ctypes.c_uint64.from_address(pointers[place]).value for place in range(3))
        size = threads * 64 * rounds
        assert size <= self.live[data] and 4 * threads <= self.live[sums]
        self._sums[sums] = (threads, 3 * 16 * (rounds - self.skipped_rounds))
        self.clock_s += size / self.cards[self._current].memory_bytes_s

    @property
    def left(self) -> list[object]:
        """Resources that were not released."""
        return [*self.live, *self.contexts, *self._events, *self._host]
