"""The shipped references, the search for a file's reference, and the program that computes one."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec
import pytest

from bedplate.engines.shipped.reference import (
    ClearAnswers,
    ForwardJob,
    LoadedModels,
    group_prompts,
    perturb_rope,
    read_prefixes,
)
from bedplate.errors import ExternalFailure
from bedplate.measure.agreement import QUICK, choose_quick_prefixes, is_clear
from bedplate.measure.prefixes import hash_prefix, list_fixed_prefixes, list_short_prefixes
from bedplate.measure.reference import (
    DATA,
    Reference,
    ReferenceAnswer,
    find_reference,
    hash_file,
    read_answers,
    read_shipped_references,
    write_reference,
)
from bedplate.run import builtin
from bedplate.values import replace_fields


def test_the_built_in_model_has_an_answer_for_every_prefix() -> None:
    (one,) = [one for one in read_shipped_references() if one.sha256 == builtin.FILE_SHA256]
    assert (one.file, one.file_bytes) == (builtin.FILE, builtin.FILE_BYTES) and "float32" in one.made_with
    assert set(one.answers) == {hash_prefix(prefix) for prefix in (*list_fixed_prefixes(), *list_short_prefixes())}
    assert len(one.list_known(list_short_prefixes())) == len(list_short_prefixes())
    assert len(one.list_known()) >= 500 and sum(is_clear(known) for _, known in one.list_known()) >= 250
    quick = choose_quick_prefixes(one.list_known())
    assert len(quick) == QUICK
    # Seven wrong answers prove that an unchanged file is broken; wrong positions change more than that.
    assert sum(known.turned_gap is not None and known.turned_gap < 0 for _, known in quick) >= 10


def test_shipped_references_round_trip() -> None:
    for one in read_shipped_references():
        text = (Path(__file__).parents[2] / "src/bedplate/measure/data" / f"reference_{one.id}.json").read_text()
        assert text == write_reference(one)
    assert DATA == "bedplate.measure"


class TestReferenceForFile:
    def make_reference(self, path: Path) -> Reference:
        return Reference(
            file=path.name, sha256=hash_file(path), file_bytes=path.stat().st_size, made_with="a test", answers={}
        )

    def test_finds_a_reference_by_hash(self, tmp_path: Path) -> None:
        path = tmp_path / "a.gguf"
        path.write_bytes(b"some weights")
        model = replace_fields(builtin.read_builtin_facts(), files=(str(path),))
        known = self.make_reference(path)
        assert find_reference(model, [known]) == known
        path.write_bytes(b"same length!")
        assert find_reference(model, [known]) is None

    def test_does_not_read_a_file_of_another_size(self, tmp_path: Path) -> None:
        path = tmp_path / "a.gguf"
        path.write_bytes(b"some weights")
        known = self.make_reference(path)
        path.write_bytes(b"more weights than that")
        path.chmod(0)
        assert find_reference(replace_fields(builtin.read_builtin_facts(), files=(str(path),)), [known]) is None

    def test_a_missing_file_has_no_reference(self, tmp_path: Path) -> None:
        facts = builtin.read_builtin_facts()
        assert find_reference(replace_fields(facts, files=())) is None
        assert find_reference(replace_fields(facts, files=(str(tmp_path / "gone.gguf"),))) is None
        assert find_reference(replace_fields(facts, files=(str(tmp_path),))) is None


class TestProgramOutput:
    def test_reads_answers(self) -> None:
        answer = {"prefix": "0123456789ab", "tokens": 4, "token": 7, "text": " é", "kind": "text", "gap": 1.5}
        turned = {**answer, "prefix": "ba9876543210", "turned_gap": -0.5}
        printed = json.dumps(
            {"torch": "2.13.0", "transformers": "5.22.2", "answers": [{**answer, "probability": 0.5}, turned]}
        )
        assert read_answers(printed) == (
            "torch 2.13.0, transformers 5.22.2, float32",
            {
                "0123456789ab": ReferenceAnswer(" é", "text", 4, 1.5),
                "ba9876543210": ReferenceAnswer(" é", "text", 4, 1.5, -0.5),
            },
        )

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"torch": 1, "transformers": 2, "answers": [{}]}', "Traceback"])
    def test_rejects_other_output(self, text: str) -> None:
        with pytest.raises(ExternalFailure, match="is not a reference"):
            read_answers(text)

    def test_a_written_reference_round_trips(self) -> None:
        one = Reference(
            file="a.gguf", sha256="ab" * 32, file_bytes=3, made_with="a test",
            answers={"x": ReferenceAnswer(' "quoted"\n', "text", 3, 1.25), "y": ReferenceAnswer("\ufffd", "part", 4,
            0.5)},
        )  # fmt: skip
        assert msgspec.json.decode(write_reference(one), type=Reference) == one


class TestReferenceProgram:
    def test_batches_contain_prompts_of_one_length(self) -> None:
        prompts = [[1] * length for length in (3, 5, 3, 5, 5, 900, 3)]
        found = list(group_prompts(prompts, 10))
        assert sorted(number for batch in found for number in batch) == list(range(7))
        for batch in found:
            lengths = {len(prompts[number]) for number in batch}
            assert len(lengths) == 1 and (len(batch) == 1 or lengths.pop() * len(batch) <= 10)

    def test_wrong_positions_use_a_tenth_of_the_rotary_base(self) -> None:
        class Config:
            rope_parameters: object

        config = Config()
        config.rope_parameters = {"rope_type": "default", "rope_theta": 100_000.0}
        other = perturb_rope(config)
        assert other is not None and other.rope_parameters == {"rope_type": "default", "rope_theta": 10_000.0}
        assert config.rope_parameters == {"rope_type": "default", "rope_theta": 100_000.0}
        for none in (None, {}, {"full_attention": {"rope_theta": 1.0}}):
            config.rope_parameters = none
            assert perturb_rope(config) is None

    @pytest.mark.parametrize(
        ("seen", "clear", "left_s", "too_few"),
        [
            (15, 0, 1e6, False),  # too early to tell
            (16, 0, 140.0, True),  # random weights: 86 prompts fit into the time, with at most two clear answers in 16
            (16, 0, math.inf, False),  # without a limit, two in 16 would be 70
            (24, 0, math.inf, True),
            (16, 10, 140.0, False),
            (16, 10, 40.0, True),  # only 35 prompts fit into the time
            (300, 10, 1e6, True),
        ],
    )
    def test_ends_early_if_too_few_clear_answers_can_be_expected(
        self, seen: int, clear: int, left_s: float, too_few: bool
    ) -> None:
        answers = ClearAnswers(0.5, 48, 560)
        answers.seen, answers.clear, answers.spent_s = seen, clear, seen * 2.0
        assert answers.are_too_few(left_s) is too_few

    def test_time_of_the_text_says_nothing_about_the_prompts(self) -> None:
        answers = ClearAnswers(0.5, 48, 560)
        answers.add(ForwardJob(0, [[1] * 1000], last_only=False), 60.0)
        assert (answers.spent_s, answers.seen) == (0.0, 0)

    def test_answers_that_are_too_few_end_the_forward_passes(self) -> None:
        class Job:
            version, done = 0, False

            def forward(self, model: object) -> None:
                self.done = True

        class Answers:
            seen = 0

            def add(self, job: object, took_s: float) -> None:
                self.seen += 1

            def are_too_few(self, left_s: float) -> bool:
                return self.seen == 2

        models = LoadedModels.__new__(LoadedModels)
        models.models = [None]
        jobs = [Job() for _ in range(4)]
        models.run(jobs, None, Answers())  # type: ignore[arg-type]
        assert [job.done for job in jobs] == [True, True, False, False]

    @pytest.mark.parametrize("content", ["", "{}", "[]", "[1]", '[""]', "nonsense"])
    def test_rejects_invalid_prefixes(self, tmp_path: Path, content: str) -> None:
        path = tmp_path / "prefixes.json"
        path.write_text(content)
        with pytest.raises(SystemExit, match="prefixes"):
            read_prefixes(str(path))

    def test_reads_prefixes_from_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "prefixes.json"
        path.write_text(json.dumps(["a b", "é"]))
        assert read_prefixes(str(path)) == ["a b", "é"]
        with pytest.raises(SystemExit):
            read_prefixes(str(tmp_path / "none.json"))
