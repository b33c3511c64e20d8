"""The recommendation of the report follows from the measurements and lists what was not measured."""

from __future__ import annotations

from tests.runs import make_cell, make_run

from bedplate.judge.argument import recommend_engine
from bedplate.values import LatencyTarget, Refusal, replace_fields
from bedplate.values.run import Cell, Flag, Quality

WRONG = Quality(asked=48, agreement=0.11, verdict="broken")


def test_recommends_the_engine_that_is_clearly_faster() -> None:
    found = recommend_engine([make_run([make_cell("llama.cpp", 16, 100), make_cell("vllm", 16, 150)])])
    assert found.headline == "Deploy vLLM Q4_1." and "1.50 times" in " ".join(found.because)


def test_prefers_the_simpler_engine_when_the_gain_is_small() -> None:
    found = recommend_engine([make_run([make_cell("llama.cpp", 16, 100), make_cell("vllm", 16, 106)])])
    assert found.choice is not None and found.choice.engine == "llama.cpp"
    assert "too little to justify its operational complexity" in " ".join(found.because)


def test_excludes_wrong_answers_and_invalid_measurements() -> None:
    client = Flag(kind="client", text="the client was the bottleneck", invalid=True)
    cells = [
        make_cell("llama.cpp", 4, 10),
        make_cell("mlx", 4, 1000, quality=WRONG),
        make_cell("vllm", 4, 1000, flags=(client,)),
    ]
    found = recommend_engine([make_run(cells)])
    assert found.choice is not None and found.choice.engine == "llama.cpp"
    assert recommend_engine([make_run(cells[1:])]).choice is None


def test_recommends_nothing_on_few_requests() -> None:
    few = Flag(kind="short", text="only 3 requests succeeded")
    found = recommend_engine([make_run([make_cell("vllm", 4, 1000, flags=(few,))])])
    assert found.choice is None and found.headline.startswith("There is no recommendation")
    slower = [make_cell("vllm", 4, 1000, flags=(few,)), make_cell("llama.cpp", 4, 10)]
    choice = recommend_engine([make_run(slower)], target=LatencyTarget(ttft_ms=5000)).choice
    assert choice is not None and choice.engine == "llama.cpp"


def with_version(cell: Cell, version: str) -> Cell:
    return replace_fields(cell, id=version, subject=replace_fields(cell.subject, engine_version=version))


def test_versions_of_an_engine_are_different_candidates() -> None:
    """The newer cell of one version does not hide that of another one."""
    older, newer = with_version(make_cell("vllm", 4, 150), "0.31.0"), with_version(make_cell("vllm", 4, 100), "0.32.0")
    newer = replace_fields(newer, at="2026-11-16T09:00:00Z")
    named = [f"vllm@0.{number}.0" for number in (31, 32, 33)]
    found = recommend_engine([make_run([older, newer], engines=named, loads=[4])])
    assert found.headline == "Deploy vLLM 0.31.0 Q4_1." and "vLLM 0.32.0 Q4_1 with 100" in found.because[1]
    assert [one for one in found.not_measured if one.startswith("vllm@")] == ["vllm@0.33.0 at 4 in flight"]
    again = recommend_engine([make_run([newer, replace_fields(newer, id="later", at="2026-11-17T09:00:00Z")])])
    assert again.headline == "Deploy vLLM Q4_1."


def test_does_not_recommend_by_speed_alone() -> None:
    unchecked = make_cell("vllm", 4, 1000, quality=Quality(note="not requested"))
    assert (
        recommend_engine([make_run([unchecked])]).headline == "Deploy vLLM Q4_1, after its answers have been checked."
    )
    other = make_cell("pytorch", 4, 10)
    other = replace_fields(other, subject=replace_fields(other.subject, model="another-model"))
    assert "no choice is proven" in recommend_engine([make_run([make_cell("vllm", 4, 1000), other])]).headline


def test_compares_under_the_heaviest_common_load() -> None:
    cells = [make_cell("llama.cpp", 1, 100), make_cell("llama.cpp", 4, 110), make_cell("pytorch", 1, 50)]
    cells += [make_cell("pytorch", 4, 180), make_cell("llama.cpp", 16, 400)]
    found = recommend_engine([make_run(cells)])
    assert found.choice is not None and found.choice.engine == "pytorch" and "4 in flight" in found.because[0]


def test_a_load_counts_as_common_if_one_engine_was_not_measured_under_it() -> None:
    cells = [make_cell(engine, load, rate * load) for engine, rate in (("vllm", 9), ("pytorch", 5)) for load in (1, 16)]
    found = recommend_engine([make_run([*cells, make_cell("mlx", 1, 30)])])
    assert found.choice is not None and found.choice.engine == "vllm" and "16 in flight" in found.because[0]
    assert any("MLX Q4_1 has no valid measurement at 16 in flight" in line for line in found.because)


def test_excludes_worse_answers_and_gives_the_reason() -> None:
    coarse = Quality(asked=48, agreement=0.73, verdict="ok")
    found = recommend_engine([make_run([make_cell("vllm", 4, 50), make_cell("onnxruntime", 4, 90, quality=coarse)])])
    assert found.choice is not None and found.choice.engine == "vllm"
    assert any("is excluded, whatever its speed: greedy-token agreement 73%" in line for line in found.because)


def test_a_latency_target_decides_by_the_throughput_within_it() -> None:
    cells = [make_cell("vllm", 16, 300, ttft_ms=900), make_cell("vllm", 4, 120, ttft_ms=200)]
    cells += [make_cell("llama.cpp", 16, 200, ttft_ms=300), make_cell("llama.cpp", 4, 100, ttft_ms=100)]
    assert recommend_engine([make_run(cells)]).choice.engine == "vllm"  # type: ignore[union-attr]
    found = recommend_engine([make_run(cells)], target=LatencyTarget(ttft_ms=500))
    assert found.choice is not None and found.choice.engine == "llama.cpp" and "TTFT ≤ 500 ms" in found.because[0]
    nobody = recommend_engine([make_run(cells)], target=LatencyTarget(ttft_ms=5))
    assert nobody.choice is None and "No engine meets TTFT ≤ 5 ms" in nobody.headline


def test_lists_what_was_not_measured() -> None:
    run = make_run([make_cell("llama.cpp", 1, 100)], engines=["llama.cpp", "vllm", "mlx"], loads=[1, 4])
    run = replace_fields(run, left_out=(Refusal(engine="mlx", kind="impossible", why="it did not start"),))
    missing = recommend_engine([run]).not_measured
    assert "llama.cpp at 4 in flight" in missing and "vllm at 1 in flight, at 4 in flight" in missing
    assert "mlx: it did not start" in missing and not any("mlx at" in line for line in missing)
    assert any("energy" in line for line in missing)


def test_recommends_nothing_without_measurements() -> None:
    found = recommend_engine([make_run([], engines=["vllm"])])
    assert found.choice is None and "no valid measurement" in found.headline
