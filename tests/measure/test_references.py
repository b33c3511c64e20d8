"""References of any model: the choice of the method, the cache, what is said without one, and the verb."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from tests.commands import invoke

from bedplate.facts.hardware import probe
from bedplate.measure import references
from bedplate.measure.reference import (
    Reference,
    ReferenceAnswer,
    find_reference,
    get_reference_path,
    list_cached_references,
    measure_weight_bytes,
    read_output,
    read_shipped_references,
)
from bedplate.measure.references import (
    LEAST_S,
    SHARE,
    choose_method,
    make_place,
    provide_affordable_reference,
    provide_reference,
    read_progress,
    summarize_reference,
)
from bedplate.progress import SilentProgress
from bedplate.run.builtin import FILE_SHA256
from bedplate.run.models import find_local_model
from bedplate.run.prepare import hash_model_content
from bedplate.values import Model, replace_fields

MODELS = Path(__file__).parents[1] / "models"
GB = 10**9


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BEDPLATE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def read_model(name: str = "llama") -> Model:
    found = find_local_model(str(MODELS / name))
    assert found is not None
    return found


def make_reference(model: Model, **other: object) -> Reference:
    answers = {f"{number:012x}": ReferenceAnswer(" a", "text", 3, 1.0) for number in range(60)}
    base = Reference(
        file=model.name, sha256=hash_model_content(model), file_bytes=measure_weight_bytes(model), made_with="a test",
        at="2026-11-18T05:00:00Z", answers=answers,
    )  # fmt: skip
    return msgspec.structs.replace(base, **other)


def cache_reference(made: Reference, model: Model) -> None:
    path = get_reference_path(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(made))


class NotedProgress(SilentProgress):
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.steps: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    @contextmanager
    def step(self, label: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        self.steps.append(label)
        yield lambda done: None


class TestMethod:
    model = replace_fields(
        read_model(), parameters=8 * GB, num_layers=32, vocab_size=128_000, hidden_size=4096, quantization="BF16"
    )

    def test_the_most_faithful_method_that_fits(self) -> None:
        assert choose_method(self.model, 64 * GB) == ("float32", "")
        by_layer = choose_method(self.model, 16 * GB)
        assert by_layer.method == "float32 by layer" and "free" in by_layer.why
        assert choose_method(self.model, 5 * GB).method == "engine"

    def test_a_gguf_file_cannot_be_dequantized_by_layer(self) -> None:
        model = replace_fields(self.model, format="gguf", quantization="Q4_K_M")
        assert choose_method(model, 64 * GB).method == "float32" and choose_method(model, 16 * GB).method == "engine"

    @pytest.mark.parametrize("changes", [{"quantization": "FP8"}, {"quantization": "INT4"}, {"format": "exl2"}])
    def test_quantized_folders_are_left_to_engines(self, changes: dict[str, str]) -> None:
        assert choose_method(replace_fields(self.model, **changes), 640 * GB).method == "engine"


class TestCache:
    def test_a_cached_reference_is_found_by_the_content_of_the_weights(self, home: Path, tmp_path: Path) -> None:
        model = read_model()
        assert find_reference(model) is None and list_cached_references() == ()
        made = make_reference(model)
        cache_reference(made, model)
        assert find_reference(model) == made
        assert find_reference(read_model("qwen2")) is None
        copy = tmp_path / "copy"
        copy.mkdir()
        for file in (MODELS / "llama").iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
        same = find_local_model(str(copy))
        assert same is not None and find_reference(same) == made
        weights = copy / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"\x55")
        other = find_local_model(str(copy))
        assert other is not None and find_reference(other) is None

    def test_another_configuration_is_another_model(self, home: Path, tmp_path: Path) -> None:
        """The same weights with another rotary base give other answers."""
        model = read_model()
        cache_reference(make_reference(model), model)
        for file in (MODELS / "llama").iterdir():
            text = file.read_bytes()
            (tmp_path / file.name).write_bytes(text.replace(b"10000.0", b"50000.0") if file.suffix == ".json" else text)
        changed = find_local_model(str(tmp_path))
        assert changed is not None and find_reference(changed) is None

    def test_a_damaged_file_is_ignored(self, home: Path) -> None:
        model = read_model()
        cache_reference(make_reference(model), model)
        get_reference_path(model).write_text("{")
        assert find_reference(model) is None and list_cached_references() == ()

    def test_a_cached_reference_is_not_computed_again(self, home: Path) -> None:
        model = read_model()
        made = make_reference(model)
        cache_reference(made, model)
        assert provide_reference(model, probe(), SilentProgress()) == made


class TestBeforeMeasurements:
    def test_a_missing_environment_is_named_and_not_installed(self, home: Path) -> None:
        progress = NotedProgress()
        found = provide_affordable_reference(read_model(), probe(), progress, left_s=None, name="tests/models/llama")
        assert found is None and not progress.steps and not (home / "engines").exists()
        (note,) = progress.notes
        assert "bedplate reference tests/models/llama --install" in note

    def test_it_takes_a_share_of_the_budget(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model, limits = read_model(), []

        def compute(model: Model, *given: object, limit_s: float, **other: object) -> Reference:
            limits.append(limit_s)
            return make_reference(model)

        monkeypatch.setattr(references, "find_pytorch", lambda: object())
        monkeypatch.setattr(references, "provide_reference", compute)
        progress = NotedProgress()
        assert provide_affordable_reference(model, probe(), progress, left_s=100.0, name=None) is not None
        assert limits == [SHARE * 100]
        assert provide_affordable_reference(model, probe(), progress, left_s=LEAST_S, name=None) is None
        assert len(limits) == 1 and "no time" in progress.notes[-1]


class TestProgram:
    def test_reads_progress(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        assert read_progress(log) == 0
        log.write_text("Loading weights\nprogress 1 4\nprogress 3 4\n")
        assert read_progress(log) == 75

    def test_reads_the_likelihood(self) -> None:
        likelihood = {
            "tokens": 3,
            "logprob": -3.0,
            "each": [-1.0, -2.0],
            "places": [{"end": 4, "tokens": 1, "next": [" a", -1.0], "top": [[" a", -1.0]]}],
        }
        output = json.dumps({"torch": "2", "transformers": "5", "answers": [], "likelihood": likelihood})
        made_with, answers, found = read_output(output, "ab" * 32)
        assert "float32" in made_with and answers == {} and found is not None
        assert found.each == (-1.0, -2.0) and found.sha256 == "ab" * 32
        assert read_output(json.dumps({"torch": "2", "transformers": "5", "answers": []}), "x")[2] is None

    def test_a_listed_token_continues_the_text(self) -> None:
        place = make_place("one two three", 3, {" ": -3.0, " two": -1.0, " t": -2.0, "": -9.0, " four": -0.5})
        assert place is not None and place.next == (" two", -1.0) and place.top[0] == (" four", -0.5)
        assert make_place("one two", 3, {" three": -1.0}) is None


class TestVerb:
    def test_lists_cached_references(self, home: Path) -> None:
        assert "no cached references" in invoke("reference", "--list").out
        model = read_model()
        cache_reference(make_reference(model, method="float32 by layer"), model)
        assert "float32 by layer" in invoke("reference", "--list").out
        (one,) = json.loads(invoke("reference", "--list", "--json").out)["references"]
        assert one["prefixes"] == one["clear"] == 60 and one["path"] == str(get_reference_path(model))

    def test_shows_a_cached_reference(self, home: Path) -> None:
        model = read_model()
        cache_reference(make_reference(model), model)
        answer = invoke("reference", str(MODELS / "llama"))
        assert answer.code == 0 and "60, 60 of them with a clear answer" in answer.out and "a test" in answer.out

    def test_names_the_missing_environment(self, home: Path) -> None:
        answer = invoke("reference", str(MODELS / "llama"))
        assert answer.code == 1 and "--install" in answer.err and "--engine" in answer.err

    @pytest.mark.parametrize("words", [["--list", "--force"], ["x", "--list"], ["--budget", "0"], ["--memory", "much"]])
    def test_usage_errors(self, home: Path, words: list[str]) -> None:
        assert invoke("reference", *words).code == 2

    def test_the_shipped_reference_has_a_summary(self) -> None:
        (one,) = [one for one in read_shipped_references() if one.sha256 == FILE_SHA256]
        found = summarize_reference(one)
        assert found.path is None and found.places == 40 and 20 < (found.perplexity or 0) < 30
