"""`bedplate watch --auto` for real: the gain is measured in idle time, proven, and then moved to under streams."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.commands import Answer
from tests.fleet.beside import make_home, run_bedplate
from tests.fleet.checks import endpoint
from tests.fleet.serving import Serving, serving
from tests.soak.streams import Counts, Streams

from bedplate.values.record import from_json
from bedplate.values.watch import WatchEvaluation

pytestmark = pytest.mark.timeout(1200)
STREAMS = 2
TOKENS = 20
PAUSE_S = 12.0
"""Between two requests while challengers are measured, which is done in idle time alone."""
BUSY_PAUSE_S = 0.1
INTENT = f"""\
workload: {{concurrency: {STREAMS}, prompt_tokens: 48, output_tokens: {TOKENS}, context_tokens: 512,
           latency: {{ttft_ms: 20000, tpot_ms: 2000}}}}
operations: {{machinery: none}}
"""
"""With a latency target that both engines meet: without one, PyTorch's earlier first tokens would speak for it here."""


@pytest.fixture
def home(tmp_path: Path, bedplate_home: Path, builtin_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = make_home(tmp_path / "home", bedplate_home, "pytorch", "llama.cpp")
    monkeypatch.setenv("BEDPLATE_HOME", str(found))
    return found


async def run_watch(one: Serving) -> tuple[Answer, Counts]:
    async with Streams(one.endpoint["url"], one.endpoint["model"], STREAMS, TOKENS, think_s=BUSY_PAUSE_S) as streams:
        while streams.counts.whole < 3 * STREAMS:
            await asyncio.sleep(0.05)
        streams.think_s = PAUSE_S

        def heard(line: str) -> None:
            print(line)
            if " beside pytorch" in line:  # from here on it is a migration, which needs no idle time
                streams.think_s = BUSY_PAUSE_S

        done = await run_bedplate(
            "watch", "watched", "--once", "--auto", "--share", "100%", "--budget", "150s", "--json", heard=heard
        )
        before = streams.counts.whole
        while streams.counts.whole < before + 2 * STREAMS:
            await asyncio.sleep(0.05)
    return done, streams.counts


def test_migrates_on_a_proven_gain_without_broken_streams(home: Path, tmp_path: Path) -> None:
    """Measures speed, and therefore needs an idle machine."""
    (tmp_path / "bedplate.yaml").write_text(INTENT)
    with serving("--name", "watched", "--engine", "pytorch", "-f", str(tmp_path / "bedplate.yaml")) as one:
        one.wait_ready()
        answer, counts = asyncio.run(run_watch(one))
        with endpoint(one.root, one.endpoint["model"]) as at:
            now = at.page("/v1/models")[1]
        one.stop()
    assert answer.code == 10, answer.err
    done = from_json(WatchEvaluation, answer.out)
    assert done.answer == "migrate" and done.challenger == "llama.cpp" and done.engine == "pytorch", done.text
    assert done.migration is not None and done.migration.outcome == "migrated", done
    assert done.migration.side_by_side and done.migration.cut == 0
    assert [step.percent for step in done.migration.steps] == [10, 50, 100]
    print(f"{done.text} {counts.whole} answers, {done.took_s:.0f} s and {done.migration.took_s:.0f} s")
    assert (counts.failed, counts.truncated, counts.duplicated) == ([], [], []) and counts.turned_away == 0
    assert '"engine":"llama.cpp"' in now and done.report is not None and Path(done.report).exists()
