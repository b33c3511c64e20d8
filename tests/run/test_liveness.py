"""Whether an engine hangs: the decision by samples, and the readings of a real process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import wait_for

from bedplate.run.liveness import (
    READ_BYTES,
    Hang,
    HangDetector,
    HangLimits,
    ProcessActivity,
    ProgressSample,
    is_gpu_busy,
    is_stopped,
    measure_activity,
)

LIMITS = HangLimits()
DETECTED_S = 60.0
"""An engine that hangs is restarted within this time."""
LONG_PROMPT_S = 120.0


def run_detector(
    make_sample: Callable[[float], ProgressSample], *, until_s: float, every_s: float = LIMITS.every_s
) -> tuple[float, Hang] | None:
    """Pass samples to a detector; returns when it first reports a hang."""
    detector, now = HangDetector(LIMITS), 0.0
    while now <= until_s:
        if (hang := detector.observe(make_sample(now))) is not None:
            return now, hang
        now += every_s
    return None


class TestLongPrompt:
    """A prompt that takes two minutes: one request waits, and no part of an answer arrives."""

    @pytest.mark.parametrize(
        "show",
        [
            lambda now: {"activity": ProcessActivity(cpu_s=0.05 * now)},
            lambda now: {"activity": ProcessActivity(gpu_is_busy=True)},
            lambda now: {"activity": ProcessActivity(read_bytes=int(now) * READ_BYTES)},
            lambda now: {"activity": ProcessActivity(), "counters": (now, None, None)},
            lambda now: {"activity": ProcessActivity(), "received": int(now)},
            lambda now: {"activity": ProcessActivity(), "received": int(now // 35)},
        ],
        ids=["cpu", "gpu", "disk", "metrics", "tokens", "a token every 35 s"],
    )
    def test_engine_that_computes_is_not_killed(self, show: Callable[[float], dict[str, object]]) -> None:
        assert run_detector(lambda now: ProgressSample(now, 1, **show(now)), until_s=LONG_PROMPT_S) is None  # type: ignore[arg-type]

    def test_engine_that_waits_in_vain_is_detected(self) -> None:
        """Threads of the HTTP server that wake up now and then are no progress."""
        found = run_detector(
            lambda now: ProgressSample(now, 3, 7, (1.0, 0.5, 0.0), ProcessActivity(cpu_s=0.01 * now)),
            until_s=LONG_PROMPT_S,
        )
        assert found is not None and found[0] <= DETECTED_S
        assert found[1].text == "it made no progress for 40.0 s while 3 requests waited"

    @given(st.floats(0, LONG_PROMPT_S), st.sampled_from([5.0, 7.5, 10.0, 12.0]))
    def test_hang_is_detected_within_a_minute(self, hangs_at: float, every_s: float) -> None:
        """Each sample of an engine that does not answer takes longer, up to its timeout."""
        found = run_detector(
            lambda now: ProgressSample(now, 1, activity=ProcessActivity(cpu_s=min(now, hangs_at))),
            until_s=2 * LONG_PROMPT_S,
            every_s=every_s,
        )
        assert found is not None and hangs_at + LIMITS.silent_s - every_s <= found[0] <= hangs_at + DETECTED_S


class TestIdle:
    def test_health_check_decides(self) -> None:
        assert run_detector(lambda now: ProgressSample(now, 0, is_answering=True), until_s=600) is None
        found = run_detector(
            lambda now: ProgressSample(now, 0, activity=ProcessActivity(), is_answering=False), until_s=600
        )
        assert found is not None and found[0] <= DETECTED_S
        assert found[1].text == "it did not answer its health check for 40.0 s"

    def test_engine_that_still_computes_may_be_silent(self) -> None:
        """The client has disconnected, and the engine has not noticed it yet."""
        found = run_detector(
            lambda now: ProgressSample(now, 0, activity=ProcessActivity(cpu_s=now), is_answering=False), until_s=600
        )
        assert found is None

    def test_time_without_a_check_does_not_count(self) -> None:
        assert run_detector(lambda now: ProgressSample(now, 0), until_s=600) is None

    def test_time_before_the_first_request_does_not_count(self) -> None:
        found = run_detector(lambda now: ProgressSample(now, now >= 300, activity=ProcessActivity()), until_s=600)
        assert found is not None and found[0] >= 300 + LIMITS.silent_s


class TestOwnPauses:
    @given(st.floats(16, 1e6))
    def test_stopped_gateway_is_not_the_engines_fault(self, gap_s: float) -> None:
        """bedplate was stopped, or the machine paused: the engine gets the usual time from then on."""
        detector = HangDetector(LIMITS)
        detector.observe(ProgressSample(0.0, 1, activity=ProcessActivity()))
        assert detector.observe(ProgressSample(gap_s, 1, activity=ProcessActivity())) is None
        assert detector.silent_s == LIMITS.longest_gap_s < LIMITS.silent_s

    def test_paused_engine_starts_again(self) -> None:
        detector = HangDetector(LIMITS)
        for now in range(0, 40, 5):
            assert detector.observe(ProgressSample(float(now), 1)) is None
        detector.forget()
        assert detector.observe(ProgressSample(45.0, 1)) is None and detector.silent_s == 0


@given(
    st.lists(
        st.builds(
            ProgressSample,
            at_s=st.just(0.0),
            waiting=st.integers(0, 2),
            received=st.integers(0, 1),
            counters=st.sampled_from([None, (1.0,), (2.0,)]),
            activity=st.sampled_from([None, ProcessActivity(), ProcessActivity(cpu_s=1.0)]),
            is_answering=st.sampled_from([None, True, False]),
        ),
        max_size=40,
    )
)
def test_silence_never_exceeds_the_elapsed_time(samples: list[ProgressSample]) -> None:
    detector = HangDetector(LIMITS)
    for number, sample in enumerate(samples):
        now = LIMITS.every_s * number
        hang = detector.observe(sample._replace(at_s=now))
        assert 0 <= detector.silent_s <= now
        assert (hang is not None) == (detector.silent_s >= LIMITS.silent_s)


BUSY_CHILD = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "print('up', flush=True)\\nwhile True: pass"])
child.wait()
"""


class TestReadings:
    @pytest.fixture
    def parent(self) -> Iterator[psutil.Popen]:
        """A process whose child computes."""
        with psutil.Popen([sys.executable, "-c", BUSY_CHILD], stdout=subprocess.PIPE) as parent:
            assert parent.stdout.readline() == b"up\n"
            children = parent.children()
            try:
                yield parent
            finally:
                for process in (*children, parent):
                    process.kill()

    def test_descendants_count_until_they_are_stopped(self, parent: psutil.Popen) -> None:
        before = measure_activity(parent.pid, "cpu")
        wait_for(lambda: measure_activity(parent.pid, "cpu").cpu_s > before.cpu_s, "CPU time of the child")
        assert not is_stopped(parent.pid)
        (child,) = parent.children()
        os.kill(child.pid, signal.SIGSTOP)
        wait_for(lambda: is_stopped(parent.pid), "the child to stop")
        stopped = measure_activity(parent.pid, "cpu")
        assert measure_activity(parent.pid, "cpu").cpu_s - stopped.cpu_s < LIMITS.busy_share * LIMITS.every_s

    def test_process_that_has_ended_shows_nothing(self) -> None:
        with subprocess.Popen([sys.executable, "-c", ""]) as ended:
            ended.wait()
        assert measure_activity(ended.pid, "cpu") == ProcessActivity() and not is_stopped(ended.pid)

    def test_gpu_without_a_driver_is_not_busy(self) -> None:
        assert not is_gpu_busy([os.getpid()], "metal") and not is_gpu_busy([os.getpid()], "cpu")
