"""Other processes on a GPU: answers of NVML and nvidia-smi, what follows from them, and `bench` beside a busy GPU.

The end-to-end tests have a stand-in for nvidia-smi on PATH, since no test machine has a GPU. Its processes are real.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.conftest import HANG_S, wait_for
from tests.engines.plans import machine as make_machine
from tests.measure.test_bench_flags import GOOD, change_cell, find_flags

from bedplate.errors import ExternalFailure
from bedplate.measure import bench as bench_module
from bedplate.measure import gpu_reservation, gpu_use
from bedplate.measure.flags import flag_cell
from bedplate.measure.gpu_reservation import (
    GpuPolicy,
    GpuReservation,
    assume_free,
    list_planned_gpus,
    reserve_gpus,
)
from bedplate.measure.gpu_use import (
    GpuUse,
    NvmlReader,
    OtherGpuProcess,
    ProcessOwner,
    SmiReader,
    find_others,
    find_owner,
    find_users,
    find_verb,
    parse_compute_apps,
    parse_gpu_query,
    parse_process_monitor,
)
from bedplate.measure.load import serve_null
from bedplate.measure.watch import CounterReading, GaugeReading, compute_use
from bedplate.progress import SilentProgress
from bedplate.run.builtin import read_builtin_facts
from bedplate.run.ready import plan_engine
from bedplate.serving.serve import _note_gpu_users
from bedplate.tuning import tune as tune_module
from bedplate.values import GpuProcess, Hardware, Workload, from_json, replace_fields
from bedplate.values.run import ResourceUse, Run
from bedplate.values.service import ModelOrder

CARD, OTHER_CARD = "GPU-a44622e3-2296-6285-0a86-84d0f6c67900", "GPU-28780eb0-24d5-1f13-59b8-ae5c23617a72"
APPS = f"""{CARD}, 1328667, /usr/local/bin/python3.10, 130004
{CARD}, 403, /opt/a, b/python3 -c import torch, 1634
{OTHER_CARD}, 1758887, [Not Found], 58060
{OTHER_CARD}, 12, [Insufficient Permissions], [N/A]
"""
MONITOR = """# gpu         pid   type     sm    mem    enc    dec    jpg    ofa    command 
# Idx           #    C/G      %      %      %      %      %      %    name 
    0       1750     C      -      -      -      -      -      -    python
    0       9001     C     85     40      -      -      -      -    python train.py
    1          -     -      -      -      -      -      -      -    -
"""  # noqa: W291
ADA = ProcessOwner("python3", "ada")
BENCH = ProcessOwner("VLLM::EngineCore", "ada", "bedplate bench (process 77)", measures=True)


def make_use(*processes: tuple[int, int], share: float | None = 0.0, samples: Any = None) -> GpuUse:
    listed = tuple(GpuProcess(pid=pid, bytes=mib << 20) for pid, mib in processes)
    return GpuUse(uuid=CARD, share=share, processes=listed, samples=samples)


# answers of the driver


def test_reads_nvidia_smi() -> None:
    apps = parse_compute_apps(APPS)
    assert [(uuid, one.pid, one.name) for uuid, one in apps] == [
        (CARD, 1328667, "python3.10"), (CARD, 403, "python3"), (OTHER_CARD, 1758887, None), (OTHER_CARD, 12, None),
    ]  # fmt: skip
    assert [one.bytes for _, one in apps] == [130004 << 20, 1634 << 20, 58060 << 20, None]
    assert parse_gpu_query(f"{CARD}, 97, 57221\n{OTHER_CARD}, [N/A], 0\nGPU requires reset\n") == (
        GpuUse(uuid=CARD, share=0.97, used_bytes=57221 << 20), GpuUse(uuid=OTHER_CARD, used_bytes=0),
    )  # fmt: skip
    assert parse_process_monitor(MONITOR) == {0: {1750: 0.0, 9001: 0.85}, 1: {}}
    old = "# gpu        pid  type    sm   mem   enc   dec   command\n    0      22010     C    98    56     -     -   a"
    assert parse_process_monitor(old) == {0: {22010: 0.98}}
    assert parse_process_monitor("pmon is not supported on this device\n") is None


@pytest.mark.parametrize("text", ["", "\n", ",,,", "No devices were found\n", "a, b, c, d, e\n", "#\n#\n1 2\n"])
def test_other_output_has_no_gpus(text: str) -> None:
    assert parse_gpu_query(text) == () and parse_compute_apps(text) == () and not parse_process_monitor(text)


def test_a_reading_of_nvidia_smi_combines_three_answers() -> None:
    answers = {"--query-gpu": f"{CARD}, 97, 57221\n{OTHER_CARD}, 0, 5\n", "--query-compute-apps": APPS, "pmon": MONITOR}

    def ask(words: Any) -> str | None:
        return next((text for start, text in answers.items() if words[1].startswith(start)), None)

    first, second = SmiReader((), ask).read()
    assert (first.uuid, [one.pid for one in first.processes], first.samples) == (
        CARD, [1328667, 403], {1750: 0.0, 9001: 0.85},
    )  # fmt: skip
    assert second.samples == {} and [one.uuid for one in SmiReader((OTHER_CARD,), ask).read()] == [OTHER_CARD]


class NvmlFailure(Exception):
    def __init__(self, value: int) -> None:
        self.value = value


class Nvml:
    """Answers of NVML for one GPU."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any:
        return SimpleNamespace(gpu=97, memory=40)

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:
        return SimpleNamespace(used=60 << 30)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> Any:
        return [SimpleNamespace(pid=403, usedGpuMemory=1713373184), SimpleNamespace(pid=404, usedGpuMemory=None)]

    def nvmlDeviceGetProcessUtilization(self, handle: Any, since: int) -> Any:
        if isinstance(self.samples, int):
            raise NvmlFailure(self.samples)
        return [SimpleNamespace(pid=pid, timeStamp=since + at, smUtil=share) for pid, at, share in self.samples]


@pytest.mark.parametrize(
    ("samples", "read"),
    [
        ([(403, 5, 97), (404, 9, 0)], {403: 0.97, 404: 0.0}),
        ([(403, 5, 97), (0, -9, 3_000_000_000)], {403: 0.97}),  # an entry that the driver did not fill
        (6, {}),  # not found: no process computed in the last second
        (3, None),  # not supported
    ],
)
def test_reads_nvml(samples: Any, read: Any) -> None:
    (use,) = NvmlReader(Nvml(samples), {CARD: "handle"}).read()
    assert (use.uuid, use.share, use.used_bytes, use.samples) == (CARD, 0.97, 60 << 30, read)
    assert use.processes == (GpuProcess(pid=403, bytes=1713373184), GpuProcess(pid=404))


def test_an_old_driver_reports_nothing() -> None:
    (use,) = NvmlReader(SimpleNamespace(), {CARD: "handle"}).read()
    assert use == GpuUse(uuid=CARD)


# before an engine starts


def test_a_process_that_computes_is_named_with_its_user_and_memory() -> None:
    found = find_users([make_use((403, 57221), share=0.97, samples={403: 0.96})], set(), {403: ADA})
    assert found.is_busy and found.share == 0.97
    assert str(found.processes[0]) == "python3 (process 403, user ada, 57,221 MiB, 96% of the GPU)"


def test_a_process_that_only_holds_memory_does_not_disturb() -> None:
    found = find_users([make_use((403, 57221), share=0.02, samples={})], set(), {403: ADA})
    assert not found.is_busy and [one.pid for one in found.processes] == [403]
    # An engine of another measurement computes sooner or later.
    assert find_users([make_use((5, 100), samples={})], set(), {5: BENCH}).is_busy


def test_use_without_a_visible_process_is_reported_as_such() -> None:
    found = find_users([make_use(share=0.97, samples={})], set(), {})
    assert found.is_busy and list(map(str, found.processes)) == ["a process that cannot be seen from here (97%)"]
    # A container: the driver lists the host's process id.
    host = find_users([make_use((4711, 57221), share=0.97, samples={4711: 0.9})], set(), {})
    assert str(host.processes[0]) == (
        "a process that cannot be seen from here (process 4711, 57,221 MiB, 90% of the GPU)"
    )


def test_samples_of_another_namespace_are_not_attributed() -> None:
    """NVML may list a container's process ids and sample with those of the host."""
    found = find_users([make_use((324, 900), share=0.5, samples={645400: 0.5})], set(), {324: ADA})
    assert found.is_busy and [(one.pid, one.share) for one in found.processes] == [(324, None)]


def test_an_endpoint_that_works_for_others_is_busy() -> None:
    found = find_users([make_use((50, 900), share=0.8, samples={50: 0.8})], {50}, {50: ADA})
    assert found.is_busy and found.processes[0].pid == 50
    assert not find_users([make_use((50, 900), share=0.0, samples={})], {50}, {50: ADA}).processes


def test_an_unknown_use_counts_as_use() -> None:
    """A MIG slice reports no utilization."""
    assert find_users([make_use((7, 100), share=None)], set(), {7: ADA}).is_busy
    assert not find_users([make_use(share=None)], set(), {}).is_busy


def test_a_process_on_two_gpus_is_named_once() -> None:
    two = [make_use((403, 100), share=0.9, samples={403: 0.9}), make_use((403, 200), share=0.5, samples={403: 0.5})]
    (one,) = find_users(two, set(), {403: ADA}).processes
    assert (one.bytes, one.share) == (300 << 20, 0.9)


# while an engine computes


def test_only_processes_of_others_count_while_the_engine_computes() -> None:
    alone = find_others([make_use((50, 900), (403, 100), share=1.0, samples={50: 0.99})], {50}, {403: ADA})
    assert (alone.share, alone.is_busy, alone.processes) == (0.0, False, ())
    both = find_others([make_use((50, 900), (403, 100), share=1.0, samples={50: 0.5, 403: 0.45})], {50}, {403: ADA})
    assert both.is_busy and both.share == 0.45 and [one.pid for one in both.processes] == [403]


def test_without_utilization_the_presence_of_a_process_counts() -> None:
    found = find_others([make_use((50, 900), (403, 100), share=None)], {50}, {403: ADA})
    assert found.is_busy and found.share is None and [one.pid for one in found.processes] == [403]
    assert not find_others([make_use((50, 900), share=None)], {50}, {}).is_busy


def test_in_a_container_only_earlier_processes_are_known_to_be_others() -> None:
    before = find_users([make_use((4711, 100), share=0.5, samples={4711: 0.5})], set(), {})
    now = make_use((4711, 100), (4800, 900), share=1.0, samples={4711: 0.4, 4800: 0.6})
    found = find_others([now], {50}, {}, before)
    assert found.share == 0.4 and [one.pid for one in found.processes] == [4711]
    unseen = find_users([make_use(share=0.7)], set(), {})
    assert find_others([make_use(share=1.0)], {50}, {}, unseen).share == 0.7


# readings of a window, and the flag


def look(share: float | None, *names: str) -> GaugeReading:
    processes = tuple(OtherGpuProcess(pid=number, name=name, share=share) for number, name in enumerate(names))
    return GaugeReading(other_gpu=gpu_use.OtherGpuUse(share=share, processes=processes, is_busy=bool(names)))


def test_a_window_has_the_mean_use_and_every_process() -> None:
    first, last = CounterReading(at_s=0), CounterReading(at_s=2)
    looks = (look(0.5, "python3"), look(0.1), GaugeReading(other_measurements=(77,)))
    use = compute_use(first, last, looks, 4, on_card=True, package_range_j=None)
    assert use.other_gpu_share == pytest.approx(0.3) and use.other_measurements == (77,)
    assert use.other_gpu_processes == ("python3 (process 0, 50% of the GPU)",)
    assert compute_use(first, last, (), 4, on_card=True, package_range_j=None).other_gpu_share is None


@pytest.mark.parametrize(
    ("use", "flags"),
    [
        (ResourceUse(other_gpu_share=0.05), {}),
        (ResourceUse(other_gpu_share=0.2, other_gpu_processes=("python3 (process 403)",)), {"busy": False}),
        (ResourceUse(other_gpu_share=0.5, other_gpu_processes=("python3 (process 403)",)), {"busy": True}),
        (ResourceUse(other_gpu_processes=("python3 (process 403)",)), {"busy": False}),
        (ResourceUse(other_gpu_share=0.0, other_measurements=(77,)), {"busy": True}),
    ],
)
def test_flags_other_processes_on_the_gpu(use: ResourceUse, flags: dict[str, bool]) -> None:
    cell = change_cell(replace_fields(GOOD, subject=replace_fields(GOOD.subject, device="cuda")), use=use)
    assert find_flags(cell) == flags
    if flags:
        (flag,) = flag_cell(cell)
        assert ("process 403" in flag.text) or ("another measurement of bedplate (process 77)" in flag.text)


# processes of this machine


@pytest.mark.parametrize(
    ("words", "verb"),
    [
        (("/usr/bin/python3", "-m", "bedplate", "bench", "--engines", "vllm"), "bench"),
        (("/home/ada/.local/bin/bedplate", "tune"), "tune"),
        (("python", "train.py", "bedplate"), None),
        (("vllm", "serve", "/models/bedplate/bench"), None),
    ],
)
def test_recognizes_bedplates_own_commands(words: tuple[str, ...], verb: str | None) -> None:
    assert find_verb(words) == verb


GPU_PROGRAM = """import mmap, sys, time
with open(sys.argv[1], "r+b") as file:
    held = mmap.mmap(file.fileno(), 0)
print("held", flush=True)
time.sleep(600)
"""


@dataclass
class SmiStandIn:
    """A program named nvidia-smi that prints what a test writes."""

    folder: Path
    library: Path
    env: dict[str, str]

    def write(self, *processes: tuple[int, int, int], share: int) -> None:
        """Each process: id, MiB and utilization in percent."""
        texts = {
            "gpu": f"{CARD}, {share}, {sum(mib for _, mib, _ in processes)}\n",
            "apps": "".join(f"{CARD}, {pid}, /usr/bin/python3, {mib}\n" for pid, mib, _ in processes),
            "pmon": MONITOR.splitlines()[0]
            + "".join(f"\n 0 {pid} C {percent} 0 - - - - python3" for pid, _, percent in processes),
        }
        for name, text in texts.items():
            (self.folder / f"{name}.new").write_text(text)
            (self.folder / f"{name}.new").replace(self.folder / name)


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SmiStandIn:
    folder, programs = tmp_path / "answers", tmp_path / "bin"
    folder.mkdir()
    programs.mkdir()
    program = programs / "nvidia-smi"
    program.write_text(
        f'#!/bin/sh\ncase "$1" in --query-gpu*) cat {folder}/gpu;; --query-compute*) cat {folder}/apps;; '
        f"pmon) cat {folder}/pmon;; *) exit 1;; esac\n"
    )
    program.chmod(0o755)
    library = tmp_path / "libcuda.so.1"
    library.write_bytes(b"\0" * 4096)
    for name, value in {"PATH": f"{programs}:{os.environ['PATH']}", "BEDPLATE_HOME": str(tmp_path / "home")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(gpu_reservation, "LOOK_S", 0.01)
    return SmiStandIn(folder, library, {})


@pytest.fixture
def other(smi: SmiStandIn) -> Iterator[int]:
    """Another process that uses the GPU, as far as its mapped files tell."""
    words = [sys.executable, "-c", GPU_PROGRAM, str(smi.library)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        yield process.pid
        process.kill()


def test_an_owner_is_a_process_that_uses_a_gpu(other: int) -> None:
    import psutil

    assert find_owner(other) == ProcessOwner(psutil.Process(other).name(), psutil.Process().username())
    assert find_owner(os.getpid()) == ProcessOwner()  # it has no file of the driver: another namespace's id
    assert find_owner(2**22 + 1) == ProcessOwner()


class Notes(SilentProgress):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that a test starts are not those of the measurement."""
    monkeypatch.setattr(gpu_reservation, "list_own_processes", lambda engine=None: {os.getpid()})


@pytest.mark.usefixtures("outside")
def test_refuses_a_gpu_that_another_process_uses(smi: SmiStandIn, other: int) -> None:
    smi.write((other, 57221, 96), share=97)
    notes = Notes()
    with pytest.raises(ExternalFailure) as raised, reserve_gpus([CARD], GpuPolicy("bench", 0.05), notes):
        pytest.fail("the GPU is in use")
    assert f"(process {other}, user " in raised.value.message and "57,221 MiB, 96% of the GPU" in raised.value.message
    assert "--allow-busy-gpu" in (raised.value.hint or "") and "the GPU is in use" in notes.texts[0]
    with reserve_gpus([CARD], GpuPolicy("bench", 0.05, allow_busy=True), notes) as allowed:
        assert allowed is not None and allowed.read_others().share == 0.96
    assert "flagged busy" in notes.texts[-1]


@pytest.mark.usefixtures("outside")
def test_waits_until_the_other_process_stops_computing(smi: SmiStandIn, other: int) -> None:
    smi.write((other, 57221, 96), share=97)

    class Finishes(Notes):
        def note(self, text: str) -> None:
            super().note(text)
            smi.write((other, 57221, 0), share=0)

    notes = Finishes()
    with reserve_gpus([CARD], GpuPolicy("bench", HANG_S), notes) as found:
        assert found is not None and found.waited
    assert "hold memory on the GPU, but do not compute" in notes.texts[-1] and str(other) in notes.texts[-1]


def test_two_measurements_see_each_other(smi: SmiStandIn, tmp_path: Path) -> None:
    """Also before their engines run, and when both send load to the same service."""
    smi.write(share=0)
    code = (
        "from bedplate.measure.gpu_reservation import *; from bedplate.progress import SilentProgress; import sys\n"
        f"with reserve_gpus([{CARD!r}], GpuPolicy('tune'), SilentProgress()):\n"
        "    print('held', flush=True); sys.stdin.read()"
    )
    words = [sys.executable, "-c", code]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdin is not None and first.stdout is not None and first.stdout.readline() == b"held\n"
        with pytest.raises(ExternalFailure) as raised, reserve_gpus([CARD], GpuPolicy("bench", 0.05), SilentProgress()):
            pytest.fail("another measurement runs")
        assert f"bedplate tune (process {first.pid}) measures on it" in raised.value.message
        with reserve_gpus([CARD], GpuPolicy("bench", allow_busy=True), SilentProgress()) as both:
            assert both is not None and [one.pid for one in both.list_other_measurements()] == [first.pid]
        first.kill()
    # A killed measurement holds nothing.
    with reserve_gpus([CARD], GpuPolicy("bench", 0.0), SilentProgress()) as free:
        assert isinstance(free, GpuReservation) and not free.list_other_measurements() and not free.waited


def test_a_machine_without_a_driver_has_nothing_to_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with reserve_gpus([CARD], GpuPolicy("bench"), SilentProgress()) as found:
        assert found is None


# the command


@pytest.fixture
def null() -> Iterator[Any]:
    with serve_null(first_ms=10, interval_ms=1, tokens=8) as one:
        yield one


def start_bench(url: str, *more: str) -> subprocess.Popen[str]:
    words = ("--prompt-tokens", "24", "--output-tokens", "8", "--seconds", "0.5", "--repeats", "1", "--no-quality")
    return subprocess.Popen(
        [sys.executable, "-m", "bedplate", "bench", "--url", url, "--concurrency", "1", *words, *more],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_bench_refuses_a_busy_gpu_or_flags_its_cells(smi: SmiStandIn, other: int, null: Any) -> None:
    smi.write((null.pid, 900, 0), (other, 57221, 60), share=60)
    refused = start_bench(null.url, "--wait-for-gpu", "0s")
    out, err = refused.communicate()
    assert refused.returncode == 3 and not out and f"(process {other}, user " in err and "hint: end that process" in err
    bench = start_bench(null.url, "--allow-busy-gpu", "--json")
    out, err = bench.communicate()
    assert bench.returncode == 0, err
    (cell,) = from_json(Run, out).cells
    assert cell.repeats[0].use.other_gpu_share == pytest.approx(0.6)
    assert [(flag.kind, flag.invalid) for flag in cell.flags if "GPU" in flag.text] == [("busy", True)]
    assert f"process {other}" in cell.repeats[0].use.other_gpu_processes[0]


def test_a_second_bench_waits_for_the_first(smi: SmiStandIn, null: Any, tmp_path: Path) -> None:
    smi.write((null.pid, 900, 0), share=0)
    first = start_bench(null.url, "--json")
    claims = tmp_path / "home" / "run" / "measuring"
    wait_for(lambda: list(claims.glob("*.json")), "the first bench")
    second = start_bench(null.url, "--wait-for-gpu", "10m", "--json")
    results = [bench.communicate() for bench in (first, second)]
    assert [bench.returncode for bench in (first, second)] == [0, 0], results
    assert f"bedplate bench (process {first.pid}) measures on it" in results[1][1]
    for out, _ in results:
        (cell,) = json.loads(out)["cells"]
        assert cell["repeats"][0]["use"]["other_measurements"] == []
    assert not list(claims.glob("*.json"))


# engines that bedplate starts


@pytest.fixture
def busy_machine(smi: SmiStandIn, other: int) -> Hardware:
    """An H200 on which another process computes and holds all memory."""
    smi.write((other, 140_000, 96), share=97)
    machine = make_machine("NVIDIA H200 SXM 141GB", 1)
    cards = [replace_fields(card, uuid=CARD, free_bytes=1 << 30) for card in machine.accelerators]
    return replace_fields(machine, accelerators=tuple(cards))


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize("verb", ["bench", "tune"])
def test_the_gpu_is_awaited_before_the_plan_finds_it_full(
    verb: str, busy_machine: Hardware, other: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = {"bench": bench_module, "tune": tune_module}[verb]
    monkeypatch.setattr(module, "probe", lambda: busy_machine)
    monkeypatch.setattr(module, "fetch_facts", lambda model, hardware, progress: read_builtin_facts())
    store = tmp_path / "store.sqlite"
    with pytest.raises(ExternalFailure) as raised:
        if verb == "bench":
            bench_module.bench(engines=["vllm"], wait_for_gpu_s=0, path=store)
        else:
            tune_module.tune(engine="vllm", wait_for_gpu_s=0, path=store)
    assert f"process {other}, user" in raised.value.message and f"bedplate {verb} waited" in (raised.value.cause or "")


@pytest.mark.usefixtures("outside")
def test_an_engine_on_the_cpu_needs_no_gpu(busy_machine: Hardware) -> None:
    wanted = ModelOrder(engine="llama.cpp", workload=Workload(concurrency=1))
    without = replace_fields(busy_machine, accelerators=())
    on_cpu = plan_engine(wanted, read_builtin_facts(), without, SilentProgress())
    assert list_planned_gpus([on_cpu]) == ()
    on_gpu = plan_engine(
        replace_fields(wanted, engine="vllm"), read_builtin_facts(), assume_free(busy_machine), SilentProgress()
    )
    assert list_planned_gpus([on_gpu, on_cpu]) == (CARD,)


def test_serve_names_other_processes_and_goes_on(busy_machine: Hardware, other: int, smi: SmiStandIn) -> None:
    notes = Notes()
    (text,) = _note_gpu_users(busy_machine.accelerators, notes)
    assert notes.texts == [text] and "GPU 0 is also used by" in text
    assert f"(process {other}, user " in text and "they slow each other down" in text
    # In a container that hides processes, memory in use is all that shows them.
    smi.write(share=0)
    (smi.folder / "gpu").write_text(f"{CARD}, 0, 140000\n")
    assert (
        "a process that cannot be seen from here (140,000 MiB)" in _note_gpu_users(busy_machine.accelerators, notes)[0]
    )
    smi.write(share=0)
    assert _note_gpu_users(busy_machine.accelerators, notes) == ()
