"""The argument follows from the measurements, and says what is missing."""

from __future__ import annotations

from tests.runs import made_cell, made_run

from bedplate.judge.argument import argument
from bedplate.values import LatencyTarget, Refusal, replaced
from bedplate.values.run import Flag, Quality

WRONG = Quality(asked=48, agreement=0.11, verdict="broken")


def test_what_is_clearly_faster_is_deployed() -> None:
    found = argument([made_run([made_cell("llama.cpp", 16, 100), made_cell("vllm", 16, 150)])])
    assert found.headline == "Deploy vLLM Q4_1." and "1.50 times" in " ".join(found.because)


def test_what_is_hardly_faster_is_not_worth_its_machinery() -> None:
    found = argument([made_run([made_cell("llama.cpp", 16, 100), made_cell("vllm", 16, 106)])])
    assert found.choice is not None and found.choice.engine == "llama.cpp"
    assert "too little to pay" in " ".join(found.because)


def test_what_answers_wrongly_or_was_measured_wrongly_is_out() -> None:
    client = Flag(kind="client", text="the client was the limit", invalid=True)
    cells = [
        made_cell("llama.cpp", 4, 10),
        made_cell("mlx", 4, 1000, quality=WRONG),
        made_cell("vllm", 4, 1000, flags=(client,)),
    ]
    found = argument([made_run(cells)])
    assert found.choice is not None and found.choice.engine == "llama.cpp"
    assert argument([made_run(cells[1:])]).choice is None


def test_speed_alone_is_no_argument() -> None:
    unchecked = made_cell("vllm", 4, 1000, quality=Quality(note="not asked for"))
    assert argument([made_run([unchecked])]).headline == "Deploy vLLM Q4_1, once its answers have been checked."
    other = made_cell("pytorch", 4, 10)
    other = replaced(other, subject=replaced(other.subject, model="another-model"))
    assert "no choice is proven" in argument([made_run([made_cell("vllm", 4, 1000), other])]).headline


def test_it_is_the_heaviest_load_that_all_have_in_common_that_counts() -> None:
    cells = [made_cell("llama.cpp", 1, 100), made_cell("llama.cpp", 4, 110), made_cell("pytorch", 1, 50)]
    cells += [made_cell("pytorch", 4, 180), made_cell("llama.cpp", 16, 400)]
    found = argument([made_run(cells)])
    assert found.choice is not None and found.choice.engine == "pytorch" and "4 in flight" in found.because[0]


def test_one_that_could_not_bear_the_load_rules_out_none() -> None:
    cells = [made_cell(engine, load, rate * load) for engine, rate in (("vllm", 9), ("pytorch", 5)) for load in (1, 16)]
    found = argument([made_run([*cells, made_cell("mlx", 1, 30)])])
    assert found.choice is not None and found.choice.engine == "vllm" and "16 in flight" in found.because[0]
    assert any("MLX Q4_1 has no valid figure at 16 in flight" in line for line in found.because)


def test_what_answers_worse_is_out_and_why_is_said() -> None:
    coarse = Quality(asked=48, agreement=0.73, verdict="ok")
    found = argument([made_run([made_cell("vllm", 4, 50), made_cell("onnxruntime", 4, 90, quality=coarse)])])
    assert found.choice is not None and found.choice.engine == "vllm"
    assert any("is out, whatever its speed: 73% of its next tokens" in line for line in found.because)


def test_a_target_decides_by_what_is_served_in_time() -> None:
    cells = [made_cell("vllm", 16, 300, ttft_ms=900), made_cell("vllm", 4, 120, ttft_ms=200)]
    cells += [made_cell("llama.cpp", 16, 200, ttft_ms=300), made_cell("llama.cpp", 4, 100, ttft_ms=100)]
    assert argument([made_run(cells)]).choice.engine == "vllm"  # type: ignore[union-attr]
    found = argument([made_run(cells)], target=LatencyTarget(ttft_ms=500))
    assert found.choice is not None and found.choice.engine == "llama.cpp" and "TTFT ≤ 500 ms" in found.because[0]
    nobody = argument([made_run(cells)], target=LatencyTarget(ttft_ms=5))
    assert nobody.choice is None and "No engine meets TTFT ≤ 5 ms" in nobody.headline


def test_what_is_missing_is_said() -> None:
    run = made_run([made_cell("llama.cpp", 1, 100)], engines=["llama.cpp", "vllm", "mlx"], loads=[1, 4])
    run = replaced(run, left_out=(Refusal(engine="mlx", kind="impossible", why="it did not start"),))
    missing = argument([run]).not_measured
    assert "llama.cpp at 4 in flight" in missing and "vllm at 1 in flight, at 4 in flight" in missing
    assert "mlx: it did not start" in missing and not any("mlx at" in line for line in missing)
    assert any("energy" in line for line in missing)


def test_nothing_measured_argues_for_nothing() -> None:
    found = argument([made_run([], engines=["vllm"])])
    assert found.choice is None and "Nothing was measured" in found.headline
