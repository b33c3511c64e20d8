"""GPU memory and link bandwidth, measured through the CUDA driver.

Decoding reads the weights, so a read-only kernel is measured in addition to the usual copy.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from bedplate.facts.measured.driver import (
    ALREADY_ENABLED,
    MEMORY_BUS_BITS,
    MEMORY_CLOCK_KHZ,
    MULTIPROCESSORS,
    CudaDriver,
    CudaError,
    load_driver,
)
from bedplate.facts.measured.statistics import compute_rates, make_figure
from bedplate.values import Accelerator, Figure, Record
from bedplate.values.measurements import GpuBandwidth, PeerBandwidth
from bedplate.values.units import format_memory

MIB = 1 << 20
MOST_BUFFER_BYTES = 2048 * MIB
LEAST_BUFFER_BYTES = 64 * MIB
SHARE_OF_FREE = 0.4
HOST_BUFFER_BYTES = 256 * MIB
SAMPLES = 9
SAMPLE_S = 0.02
"""Long compared with the clock's resolution and a kernel launch, and short enough for several samples."""
WARM_UP_S = 0.1
"""Idle cards lower their clocks and take a moment to raise them."""
PEER_SAMPLES, PEER_WARM_UP_S = 5, 0.03
"""Short, because eight cards have 56 pairs."""
MOST_IN_A_SAMPLE = 200
BLOCK_THREADS, BLOCKS_EACH, UNROLLED = 256, 8, 4
VECTOR_BYTES = 16
FILL = 3
# Each thread sums 16-byte vectors at a stride of the thread count, with four loads in flight. It stores its sum, so
# that the host can check that everything was read.
READ_PTX = b"""
.version 4.1
.target sm_52
.address_size 64
.visible .entry read_all(.param .u64 data, .param .u64 rounds, .param .u64 sums)
{
    .reg .pred %more;
    .reg .b32 %r<24>;
    .reg .b64 %a, %left, %out, %step, %t, %u;
    ld.param.u64 %a, [data];
    ld.param.u64 %left, [rounds];
    ld.param.u64 %out, [sums];
    cvta.to.global.u64 %a, %a;
    cvta.to.global.u64 %out, %out;
    mov.u32 %r0, %ctaid.x;
    mov.u32 %r1, %ntid.x;
    mov.u32 %r2, %tid.x;
    mad.lo.s32 %r3, %r0, %r1, %r2;
    mov.u32 %r4, %nctaid.x;
    mul.lo.s32 %r4, %r4, %r1;
    mul.wide.u32 %step, %r4, 16;
    mul.wide.u32 %t, %r3, 16;
    add.s64 %a, %a, %t;
    mul.wide.u32 %u, %r3, 4;
    add.s64 %out, %out, %u;
    mov.u32 %r5, 0;
loop:
    ld.global.v4.u32 {%r8, %r9, %r10, %r11}, [%a];
    add.s64 %a, %a, %step;
    ld.global.v4.u32 {%r12, %r13, %r14, %r15}, [%a];
    add.s64 %a, %a, %step;
    ld.global.v4.u32 {%r16, %r17, %r18, %r19}, [%a];
    add.s64 %a, %a, %step;
    ld.global.v4.u32 {%r20, %r21, %r22, %r23}, [%a];
    add.s64 %a, %a, %step;
    add.u32 %r8, %r8, %r9;
    add.u32 %r10, %r10, %r11;
    add.u32 %r12, %r12, %r13;
    add.u32 %r14, %r14, %r15;
    add.u32 %r16, %r16, %r17;
    add.u32 %r18, %r18, %r19;
    add.u32 %r20, %r20, %r21;
    add.u32 %r22, %r22, %r23;
    add.u32 %r8, %r8, %r10;
    add.u32 %r12, %r12, %r14;
    add.u32 %r16, %r16, %r18;
    add.u32 %r20, %r20, %r22;
    add.u32 %r8, %r8, %r12;
    add.u32 %r16, %r16, %r20;
    add.u32 %r5, %r5, %r8;
    add.u32 %r5, %r5, %r16;
    sub.s64 %left, %left, 1;
    setp.ne.s64 %more, %left, 0;
    @%more bra loop;
    st.global.u32 [%out], %r5;
    ret;
}
\0"""


class MeasuredCard(Record, frozen=True, kw_only=True):
    """An accelerator as the probe reports it."""

    index: int
    name: str
    uuid: str | None = None


class CudaRequest(Record, frozen=True, kw_only=True):
    cards: tuple[MeasuredCard, ...]
    host_available_bytes: int
    when: str


class CudaResult(Record, frozen=True, kw_only=True):
    gpus: tuple[GpuBandwidth, ...] = ()
    peers: tuple[PeerBandwidth, ...] = ()
    notes: tuple[str, ...] = ()


def make_request(accelerators: Sequence[Accelerator], host_available_bytes: int, when: str) -> CudaRequest:
    cards = tuple(
        MeasuredCard(index=card.index, name=card.name, uuid=card.uuid)
        for card in accelerators
        if card.vendor == "nvidia"
    )
    return CudaRequest(cards=cards, host_available_bytes=host_available_bytes, when=when)


def measure_gpus(asked: CudaRequest, tell: Callable[[float], None]) -> CudaResult:
    try:
        library = load_driver()
    except OSError as error:
        return CudaResult(notes=(f"GPU bandwidth is not measured: cannot load the driver's library ({error})",))
    return measure_cards(library, asked, tell)


def measure_cards(library: Any, asked: CudaRequest, tell: Callable[[float], None]) -> CudaResult:
    """Measure all cards one after the other, then the pairs. A card that fails becomes a note."""
    try:
        driver = CudaDriver(library)
        pairs = match_devices(asked.cards, [(device, driver.get_uuid(device)) for device in driver.list_devices()])
    except CudaError as error:
        return CudaResult(notes=(f"GPU bandwidth is not measured: {error}",))
    gpus: list[GpuBandwidth] = []
    notes = [f"GPU {card.index} is not measured: CUDA does not show it" for card, device in pairs if device is None]
    there = [(card, device) for card, device in pairs if device is not None]
    for done, (card, device) in enumerate(there):
        bench = CardBench(driver, card, device, asked, notes)
        gpus.append(bench.measure_all(lambda share, done=done: tell((done + share) / (len(there) + 1))))  # type: ignore[misc]
    try:
        with ExitStack() as stack:
            if len(there) > 1:
                # Creating a context is slow, and every card is in many pairs.
                for _, device in there:
                    stack.enter_context(driver.open_context(device))
            peers = measure_peers(driver, there, asked.when, notes)
    except CudaError as error:
        notes.append(f"links between GPUs are not measured: {error}")
        peers = ()
    tell(1.0)
    return CudaResult(gpus=tuple(gpus), peers=peers, notes=tuple(notes))


def match_devices(
    cards: Sequence[MeasuredCard], devices: Sequence[tuple[int, str | None]]
) -> list[tuple[MeasuredCard, int | None]]:
    """Each card's CUDA device, which may be in another order: by UUID, else by position if the counts agree."""
    by_uuid = {uuid: device for device, uuid in devices if uuid}
    found = []
    for position, card in enumerate(cards):
        digits = re.sub(r"[^0-9a-f]", "", (card.uuid or "").lower().partition("-")[2])
        device = by_uuid.get(digits)
        if device is None and not digits and len(devices) == len(cards):
            device = devices[position][0]
        found.append((card, device))
    return found


def choose_buffer_bytes(free_bytes: int, buffers: int) -> int | None:
    """Size of each of `buffers`: together at most 40 % of the free memory; `None` if that is too small to measure."""
    size = min(MOST_BUFFER_BYTES, int(free_bytes * SHARE_OF_FREE) // buffers) // MIB * MIB
    return size if size >= LEAST_BUFFER_BYTES else None


def compute_theoretical_bytes_s(clock_khz: int | None, bus_bits: int | None) -> int | None:
    """The memory of these cards transfers data twice per cycle of the driver's clock."""
    return clock_khz * 1000 * 2 * bus_bits // 8 if clock_khz and bus_bits else None


def measure_durations(
    elapsed: Callable[[Callable[[], None]], float],
    ask: Callable[[], None],
    *,
    samples: int = SAMPLES,
    warm_up_s: float = WARM_UP_S,
) -> list[float]:
    """Seconds for one `ask`, from samples that each repeat it, after an uncounted warm-up."""
    once_s = warm_s = elapsed(ask)
    for _ in range(MOST_IN_A_SAMPLE):
        if warm_s >= warm_up_s:
            break
        once_s = elapsed(ask)
        warm_s += once_s
    count = max(1, min(MOST_IN_A_SAMPLE, round(SAMPLE_S / once_s))) if once_s > 0 else 1

    def repeat() -> None:
        for _ in range(count):
            ask()

    return [elapsed(repeat) / count for _ in range(samples)]


class CardBench:
    """One card."""

    def __init__(
        self, driver: CudaDriver, card: MeasuredCard, device: int, asked: CudaRequest, notes: list[str]
    ) -> None:
        self.driver, self.card, self.device, self.notes = driver, card, device, notes
        self.host_bytes = min(HOST_BUFFER_BYTES, asked.host_available_bytes // 8) // MIB * MIB
        self.source = f"CUDA driver {driver.get_version()}, {asked.when}"

    def measure_all(self, tell: Callable[[float], None]) -> GpuBandwidth:
        clock = self.driver.get_attribute(MEMORY_CLOCK_KHZ, self.device)
        bus = self.driver.get_attribute(MEMORY_BUS_BITS, self.device)
        found: dict[str, Figure | None] = {}
        try:
            with self.driver.open_context(self.device):
                steps = (self._measure_copy, self._measure_read, self._measure_pinned, self._measure_pageable)
                for done, step in enumerate(steps):
                    found |= self._try_step(step)
                    tell((done + 1) / len(steps))
        except CudaError as error:
            self.notes.append(f"GPU {self.card.index} is not measured: {error}")
        return GpuBandwidth(
            index=self.card.index,
            name=self.card.name,
            theoretical_bytes_s=compute_theoretical_bytes_s(clock, bus),
            **found,
        )

    def _try_step(self, step: Callable[[], dict[str, Figure | None]]) -> dict[str, Figure | None]:
        try:
            return step()
        except CudaError as error:
            what = step.__doc__ or ""
            self.notes.append(f"GPU {self.card.index}: {what.rstrip('.')} is not measured: {error}")
            return {}

    def _measure_copy(self) -> dict[str, Figure | None]:
        """copy bandwidth."""
        size = self._choose_size(2)
        with ExitStack() as stack:
            source, target = (stack.enter_context(self.driver.allocate_memory(size)) for _ in range(2))
            elapsed = stack.enter_context(self.driver.make_stopwatch())
            self.driver.call("cuMemsetD32_v2", source, FILL, size // 4)
            took = measure_durations(
                elapsed, lambda: self.driver.call("cuMemcpyDtoDAsync_v2", target, source, size, None)
            )
        what = f"device copy of {format_memory(size)}, read and write counted, {self.source}"
        return {"copy_bytes_s": make_figure(compute_rates(2 * size, took), what)}

    def _measure_read(self) -> dict[str, Figure | None]:
        """read bandwidth."""
        blocks = BLOCKS_EACH * (self.driver.get_attribute(MULTIPROCESSORS, self.device) or 1)
        threads = blocks * BLOCK_THREADS
        round_bytes = threads * VECTOR_BYTES * UNROLLED
        rounds = (self._choose_size(1) - 4 * threads) // round_bytes
        if rounds == 0:
            raise CudaError("cuMemGetInfo_v2", 2)
        size = rounds * round_bytes
        with ExitStack() as stack:
            data, sums = (stack.enter_context(self.driver.allocate_memory(need)) for need in (size, 4 * threads))
            kernel = stack.enter_context(self.driver.load_function(READ_PTX, b"read_all"))
            elapsed = stack.enter_context(self.driver.make_stopwatch())
            self.driver.call("cuMemsetD32_v2", data, FILL, size // 4)
            arguments = tuple(ctypes.c_uint64(value) for value in (data, rounds, sums))
            took = measure_durations(elapsed, lambda: self.driver.launch(kernel, blocks, BLOCK_THREADS, *arguments))
            self._check_sums(sums, threads, rounds)
        return {
            "read_bytes_s": make_figure(
                compute_rates(size, took), f"kernel that reads {format_memory(size)}, {self.source}"
            )
        }

    def _check_sums(self, sums: int, threads: int, rounds: int) -> None:
        """Check every thread's sum, to prove that all data was read."""
        answers = (ctypes.c_uint32 * threads)()
        self.driver.call("cuMemcpyDtoHAsync_v2", ctypes.addressof(answers), sums, 4 * threads, None)
        self.driver.call("cuCtxSynchronize")
        if set(answers) != {FILL * UNROLLED * (VECTOR_BYTES // 4) * rounds & 0xFFFFFFFF}:
            raise CudaError("cuLaunchKernel", 719, "wrong sums")

    def _measure_pinned(self) -> dict[str, Figure | None]:
        """pinned transfer."""
        size = self._choose_transfer_size()
        with ExitStack() as stack:
            device = stack.enter_context(self.driver.allocate_memory(size))
            host = stack.enter_context(self.driver.allocate_pinned(size))
            elapsed = stack.enter_context(self.driver.make_stopwatch())
            ctypes.memset(host, FILL, size)
            to = measure_durations(elapsed, lambda: self.driver.call("cuMemcpyHtoDAsync_v2", device, host, size, None))
            back = measure_durations(
                elapsed, lambda: self.driver.call("cuMemcpyDtoHAsync_v2", host, device, size, None)
            )
        return self._make_transfer_figures("pinned", size, to, back)

    def _measure_pageable(self) -> dict[str, Figure | None]:
        """pageable transfer."""
        size = self._choose_transfer_size()
        with ExitStack() as stack, mmap.mmap(-1, size) as buffer:
            view = (ctypes.c_char * size).from_buffer(buffer)
            host = ctypes.addressof(view)
            del view  # it would keep the buffer open
            device = stack.enter_context(self.driver.allocate_memory(size))
            ctypes.memset(host, FILL, size)
            # The host takes part in these copies, so the host's clock counts.
            to = measure_durations(
                self._time_on_host, lambda: self.driver.call("cuMemcpyHtoDAsync_v2", device, host, size, None)
            )
            back = measure_durations(
                self._time_on_host, lambda: self.driver.call("cuMemcpyDtoHAsync_v2", host, device, size, None)
            )
        return self._make_transfer_figures("pageable", size, to, back)

    def _time_on_host(self, ask: Callable[[], None]) -> float:
        began = time.perf_counter()
        ask()
        self.driver.call("cuCtxSynchronize")
        return time.perf_counter() - began

    def _make_transfer_figures(
        self, kind: str, size: int, to: Sequence[float], back: Sequence[float]
    ) -> dict[str, Figure | None]:
        source = f"{format_memory(size)} of {kind} host memory, {self.source}"
        return {
            f"to_device_{kind}_bytes_s": make_figure(compute_rates(size, to), source),
            f"from_device_{kind}_bytes_s": make_figure(compute_rates(size, back), source),
        }

    def _choose_size(self, buffers: int) -> int:
        size = choose_buffer_bytes(self.driver.get_free_bytes(), buffers)
        if size is None:
            raise CudaError("cuMemGetInfo_v2", 2)
        return size

    def _choose_transfer_size(self) -> int:
        size = min(self._choose_size(1), self.host_bytes)
        if size < 16 * MIB:
            raise CudaError("cuMemGetInfo_v2", 2)
        return size


def measure_peers(
    driver: CudaDriver, cards: Sequence[tuple[MeasuredCard, int]], when: str, notes: list[str]
) -> tuple[PeerBandwidth, ...]:
    """Copies between each pair with peer access, in both directions, one at a time."""
    found = []
    unconnected = []
    for source, source_device in cards:
        for target, target_device in cards:
            if source.index == target.index:
                continue
            pair = f"GPU {source.index} to GPU {target.index}"
            try:
                if not driver.call_for_number("cuDeviceCanAccessPeer", target_device, source_device):
                    unconnected.append(f"{source.index}–{target.index}")
                    continue
                figure = measure_peer(driver, source_device, target_device, when)
            except CudaError as error:
                notes.append(f"{pair} is not measured: {error}")
                continue
            found.append(PeerBandwidth(source=source.index, target=target.index, bytes_s=figure))
    if unconnected:
        notes.append(f"GPUs without peer access, whose traffic goes through the host: {', '.join(unconnected)}")
    return tuple(found)


def measure_peer(driver: CudaDriver, source: int, target: int, when: str) -> Figure:
    with ExitStack() as stack:
        target_context = stack.enter_context(driver.open_context(target))
        sizes = [choose_buffer_bytes(driver.get_free_bytes(), 1)]
        source_context = stack.enter_context(driver.open_context(source))
        sizes.append(choose_buffer_bytes(driver.get_free_bytes(), 1))
        size = min((found for found in sizes if found is not None), default=0)
        if None in sizes:
            raise CudaError("cuMemGetInfo_v2", 2)
        size = min(size, HOST_BUFFER_BYTES)
        buffers = []
        for here, there in ((target_context, source_context), (source_context, target_context)):
            driver.call("cuCtxSetCurrent", here)
            try:
                driver.call("cuCtxEnablePeerAccess", there, 0)
            except CudaError as error:
                if error.code != ALREADY_ENABLED:
                    raise
            buffers.append(stack.enter_context(driver.allocate_memory(size)))
        elapsed = stack.enter_context(driver.make_stopwatch())
        to, origin = buffers
        took = measure_durations(
            elapsed,
            lambda: driver.call("cuMemcpyPeerAsync", to, target_context, origin, source_context, size, None),
            samples=PEER_SAMPLES,
            warm_up_s=PEER_WARM_UP_S,
        )
        # Free the buffers while their contexts are current: the stack unwinds in reverse order.
        return make_figure(
            compute_rates(size, took),
            f"copy of {format_memory(size)} in one direction, CUDA driver {driver.get_version()}, {when}",
        )
