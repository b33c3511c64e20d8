"""References that real programs compute: llama.cpp's own answers, and PyTorch in float32 in both ways."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.conftest import HANG_S

from bedplate.engines import get_engine
from bedplate.facts.hardware import probe
from bedplate.measure.agreement import is_clear
from bedplate.measure.bench import bench, make_closed_loads
from bedplate.measure.prefixes import list_fixed_prefixes
from bedplate.measure.reference import find_reference, read_shipped_references
from bedplate.measure.references import choose_method, provide_reference
from bedplate.progress import SilentProgress
from bedplate.run.builtin import FILE_SHA256, read_builtin_facts
from bedplate.run.environments import EngineEnvironment, make_environment
from bedplate.run.models import find_local_model

MODELS = Path(__file__).parents[1] / "models"
LITTLE_BYTES = 1_001_900_000
"""Less than the models need in float32, and more than one of their layers."""


@pytest.fixture
def home(tmp_path: Path, bedplate_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with the engines and models of the tests, and without references."""
    for folder in ("engines", "models"):
        (bedplate_home / folder).mkdir(exist_ok=True)
        (tmp_path / folder).symlink_to(bedplate_home / folder)
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="session")
def pytorch_environment(bedplate_home: Path) -> EngineEnvironment:
    return make_environment(get_engine("pytorch"))


@pytest.mark.usefixtures("llama_environment", "builtin_gguf", "one_core")
def test_the_answers_of_an_engine_are_a_reference(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = read_builtin_facts()
    few = tuple(sorted(list_fixed_prefixes(), key=len)[:96])
    monkeypatch.setattr("bedplate.measure.references.list_fixed_prefixes", lambda: few)
    made = provide_reference(model, probe(), SilentProgress(), engine="llama.cpp", force=True, limit_s=HANG_S)
    assert len(made.answers) == len(few)
    assert made.method == "engine" and "llama.cpp" in made.made_with and "Q4_1" in made.made_with
    (shipped,) = [one for one in read_shipped_references() if one.sha256 == FILE_SHA256]
    clear = [key for key, one in made.answers.items() if is_clear(one) and is_clear(shipped.answers[key])]
    same = sum(made.answers[key].text == shipped.answers[key].text for key in clear)
    assert len(clear) >= 30 and same >= 0.95 * len(clear)
    assert made.likelihood is not None and made.likelihood.perplexity is None and made.likelihood.places


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["llama", "qwen2", "phi3"])
def test_layer_by_layer_gives_the_same_reference(name: str, home: Path, pytorch_environment: EngineEnvironment) -> None:
    model = find_local_model(str(MODELS / name))
    assert model is not None and choose_method(model, LITTLE_BYTES).method == "float32 by layer"
    hardware, progress = probe(), SilentProgress()
    whole = provide_reference(model, hardware, progress)
    layered = provide_reference(model, hardware, progress, memory_bytes=LITTLE_BYTES, force=True)
    assert (whole.method, layered.method) == ("float32", "float32 by layer")
    assert whole.answers == layered.answers and len(whole.answers) == 560
    assert whole.likelihood is not None and layered.likelihood is not None
    assert whole.likelihood.each == layered.likelihood.each and whole.likelihood.places == layered.likelihood.places
    assert find_reference(model) == layered


@pytest.mark.nightly
@pytest.mark.usefixtures("llama_environment", "pytorch_environment")
def test_bench_computes_the_reference_of_any_model(home: Path) -> None:
    """llama.cpp serves the converted weights, and its answers agree with PyTorch."""
    (load,) = make_closed_loads((1,), prompt_tokens=32, output_tokens=8)
    run = bench(str(MODELS / "llama"), engines=("llama.cpp",), loads=(load,), seconds=1.0, repeats=1)
    (cell,) = run.cells
    assert cell.quality is not None and cell.quality.verdict == "ok" and (cell.quality.agreement or 0) >= 0.97
    assert "float32" in (cell.quality.reference or "") and (cell.quality.divergence or 1) < 0.01
