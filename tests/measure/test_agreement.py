"""Greedy-token agreement: which answers match, and which engines are broken."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.measure.samples_of_agreement import make_plan, make_reference

from bedplate.measure.agreement import (
    CLEAR_GAP,
    FLOORS,
    MOST_EVIDENCE,
    QUICK,
    CompletionAnswer,
    FailedRequest,
    Reply,
    choose_floor,
    choose_quick_prefixes,
    compare,
    compute_tail_probability,
    judge_comparison,
    matches_token,
    read_answer,
    read_stored_bits,
    record_agreement,
    strips_spaces,
)
from bedplate.measure.reference import ReferenceAnswer
from bedplate.show.serving import render_agreement
from bedplate.values import from_json, replace_fields, to_json
from bedplate.values.agreement import Agreement

PARIS = ReferenceAnswer(" Paris", "text", 5, 4.0)
END = ReferenceAnswer("<|im_end|>", "special", 5, 4.0)
HALF = ReferenceAnswer("\ufffd", "part", 5, 4.0)


class TestTokenMatch:
    @pytest.mark.parametrize(
        ("known", "answer"),
        [
            (PARIS, CompletionAnswer(text=" Paris")),
            (PARIS, CompletionAnswer(text=" Paris, the", made_tokens=3)),  # it ignores max_tokens
            (END, CompletionAnswer(text="", ended=True)),
            (END, CompletionAnswer(text="<|im_end|>")),
            (HALF, CompletionAnswer(text="")),
            (HALF, CompletionAnswer(text="\ufffd")),
        ],
    )
    def test_matches(self, known: ReferenceAnswer, answer: CompletionAnswer) -> None:
        assert matches_token(known, answer)

    @pytest.mark.parametrize(
        ("known", "answer"),
        [
            (PARIS, CompletionAnswer(text="Paris")),  # another token of the vocabulary
            (PARIS, CompletionAnswer(text=" paris")),
            (PARIS, CompletionAnswer(text="", ended=True)),
            (PARIS, CompletionAnswer(text=" Par", made_tokens=1)),
            (PARIS, CompletionAnswer(text="\ufffd")),
            (ReferenceAnswer("", "text", 5, 4.0), CompletionAnswer(text=" anything", made_tokens=2)),
            (END, CompletionAnswer(text=" Paris")),
            (HALF, CompletionAnswer(text="", ended=True)),
            (HALF, CompletionAnswer(text="猫")),
        ],
    )
    def test_does_not_match(self, known: ReferenceAnswer, answer: CompletionAnswer) -> None:
        assert not matches_token(known, answer)

    def test_detects_an_engine_that_strips_spaces(self) -> None:
        bare = [(ReferenceAnswer(f" word{n}", "text", 5, 4.0), CompletionAnswer(text=f"word{n}")) for n in range(6)]
        assert strips_spaces(bare) and all(matches_token(known, answer, strips=True) for known, answer in bare)
        assert not strips_spaces([*bare, (PARIS, CompletionAnswer(text=" Paris"))])
        assert not strips_spaces(bare[:2])  # too few
        assert not matches_token(bare[0][0], CompletionAnswer(text="other"), strips=True)


def make_answers(right: int, wrong: int = 0, failed: int = 0) -> tuple[list[tuple[str, ReferenceAnswer]], list[Reply]]:
    pairs = list(make_reference(right + wrong + failed).list_known())
    replies: list[Reply] = [CompletionAnswer(text=known.text, prompt_tokens=7) for _, known in pairs[:right]]
    replies += [CompletionAnswer(text=" nonsense", prompt_tokens=7)] * wrong + [
        FailedRequest(why="HTTP 500: no")
    ] * failed
    return pairs, replies


class TestCompare:
    def test_counts_clear_prefixes_separately(self) -> None:
        pairs, replies = make_answers(30, 10)
        pairs[0] = (pairs[0][0], ReferenceAnswer(" word0", "text", 7, CLEAR_GAP / 2))
        pairs[-1] = (pairs[-1][0], ReferenceAnswer(" other", "text", 7, CLEAR_GAP / 2))
        found = compare(pairs, replies)
        assert (found.asked, found.answered, found.agreed) == (40, 40, 30)
        assert (found.clear, found.clear_agreed) == (38, 29)

    def test_evidence_is_limited_and_clearest_first(self) -> None:
        pairs, replies = make_answers(10, 40)
        pairs[30] = (pairs[30][0], ReferenceAnswer(" sure", "text", 7, 9.5))
        found = compare(pairs, replies)
        assert len(found.evidence) == MOST_EVIDENCE
        assert (found.evidence[0].expected, found.evidence[0].got, found.evidence[0].gap) == (" sure", " nonsense", 9.5)
        assert pairs[30][0].endswith(found.evidence[0].prefix)

    def test_distinguishes_an_early_end_from_an_empty_answer(self) -> None:
        pairs = list(make_reference(2).list_known())
        found = compare(pairs, [CompletionAnswer(text="", ended=True), CompletionAnswer(text="")])
        assert {one.got for one in found.evidence} == {None, ""}

    def test_counts_prompts_with_another_token_count(self) -> None:
        pairs, _ = make_answers(20)
        found = compare(pairs, [CompletionAnswer(text=known.text, prompt_tokens=8) for _, known in pairs])
        assert (found.other_lengths, found.longer_by) == (20, 1)

    def test_failed_requests_are_not_answers(self) -> None:
        found = compare(*make_answers(10, 0, 5))
        assert (found.asked, found.answered, found.agreed) == (15, 10, 10)
        assert found.failure == FailedRequest(why="HTTP 500: no")

    def test_no_prefixes_are_unchecked(self) -> None:
        assert judge_comparison(compare([], []), 0.95)[0] == "unchecked"


class TestVerdict:
    @pytest.mark.parametrize(("right", "wrong"), [(48, 0), (47, 1), (45, 3), (560, 0), (540, 20)])
    def test_few_wrong_answers_are_ok(self, right: int, wrong: int) -> None:
        assert judge_comparison(compare(*make_answers(min(right, 500), wrong)), 0.95)[0] == "ok"

    @pytest.mark.parametrize(("right", "wrong"), [(0, 48), (24, 24), (38, 10), (440, 60)])
    def test_many_wrong_answers_are_broken(self, right: int, wrong: int) -> None:
        verdict, why = judge_comparison(compare(*make_answers(right, wrong)), 0.95)
        assert verdict == "broken" and f"{right} of {right + wrong} prefixes" in why and "95%" in why

    @pytest.mark.parametrize(("wrong", "verdict"), [(3, "ok"), (4, "broken")])
    def test_position_sensitive_prefixes_are_judged_separately(self, wrong: int, verdict: str) -> None:
        pairs, replies = make_answers(100 - wrong, wrong)
        for number in range(90, 100):
            known = pairs[number][1]
            pairs[number] = (pairs[number][0], ReferenceAnswer(known.text, "text", 7, known.gap, -0.5))
        found, why = judge_comparison(compare(pairs, replies), 0.97)
        assert found == verdict and ("6 of 10 prefixes that depend on correct positions" in why) == (
            verdict == "broken"
        )

    def test_reports_an_extra_bos_token(self) -> None:
        pairs, _ = make_answers(48)
        _, why = judge_comparison(compare(pairs, [CompletionAnswer(text="x", prompt_tokens=8)] * 48), 0.95)
        assert "another token count than in the reference, +1 each" in why

    def test_too_many_failures_are_unchecked(self) -> None:
        verdict, why = judge_comparison(compare(*make_answers(10, 0, 38)), 0.95)
        assert verdict == "unchecked" and "10 of 48" in why and "HTTP 500" in why

    def test_a_few_failures_do_not_matter(self) -> None:
        assert judge_comparison(compare(*make_answers(46, 0, 2)), 0.95)[0] == "ok"
        assert judge_comparison(compare(*make_answers(0, 46, 2)), 0.95)[0] == "broken"

    def test_near_ties_are_unchecked(self) -> None:
        pairs = list(make_reference(60, gap=CLEAR_GAP / 10).list_known())
        assert judge_comparison(compare(pairs, [CompletionAnswer(text="x")] * 60), 0.95)[0] == "unchecked"

    @given(st.integers(1, 200), st.floats(0.5, 0.99), st.data())
    def test_probability_grows_with_the_count(self, asked: int, share: float, data: st.DataObject) -> None:
        agreed = data.draw(st.integers(1, asked))
        assert (
            0
            <= compute_tail_probability(agreed - 1, asked, share)
            <= compute_tail_probability(agreed, asked, share)
            <= 1 + 1e-9
        )
        assert compute_tail_probability(asked, asked, share) == pytest.approx(1)


class TestFloors:
    @pytest.mark.parametrize(
        ("label", "bits"),
        [
            ("BF16", 16), ("F16", 16), ("F32", 16), ("Q8_0", 8), ("FP8", 8), ("INT8", 8), ("GPTQ-INT8", 8), ("Q6_K", 6),
            ("Q5_K_M", 5), ("Q4_1", 4), ("IQ4_XS", 4), ("IQ2_XXS", 2), ("INT4", 4), ("AWQ-INT4", 4), ("NF4", 4),
            ("NVFP4", 4), ("MXFP4", 4), ("4-BIT (MLX)", 4), ("4.0BPW (EXL3)", 4), ("2.5BPW (EXL3)", 2.5), ("W4A16", 4),
            ("nobody's", None), ("", None),
        ],
    )  # fmt: skip
    def test_reads_the_bits_of_a_label(self, label: str, bits: float | None) -> None:
        assert read_stored_bits(label) == bits

    def test_fewer_bits_lower_the_floor(self) -> None:
        labels = ("BF16", "Q8_0", "Q6_K", "Q5_K_M", "INT4")
        floors = [choose_floor(make_plan(label, "converted", "onnx")) for label in labels]
        assert floors == sorted(floors, reverse=True) and floors[0] > 0.9 > floors[-1]

    def test_a_file_served_unchanged_has_a_high_floor(self) -> None:
        unchanged, requantized = make_plan("Q4_1"), make_plan("INT4", "converted", "onnx")
        assert (
            choose_floor(unchanged) == choose_floor(make_plan("Q8_0", "converted", "gguf")) > choose_floor(requantized)
        )

    def test_an_8_bit_cache_lowers_the_floor(self) -> None:
        assert choose_floor(make_plan("BF16", "converted", "safetensors", kv_type="fp8")) < FLOORS[0][1]

    def test_an_unknown_label_has_the_lowest_floor(self) -> None:
        assert choose_floor(make_plan("nobody's", "converted", "safetensors")) == FLOORS[-1][1]


def test_quick_prefixes_are_clear_short_and_spread() -> None:
    pairs = [(f"p{n}", ReferenceAnswer(" x", "text", 3, CLEAR_GAP * (n % 2))) for n in range(400)]
    found = choose_quick_prefixes(pairs)
    assert len(found) == QUICK and all(known.gap >= CLEAR_GAP for _, known in found)
    assert choose_quick_prefixes([("a long one", ReferenceAnswer(" x", "text", 2000, 9.0))]) == ()
    assert int(found[0][0][1:]) < 10 and int(found[-1][0][1:]) > 380


def test_at_most_half_of_the_quick_prefixes_are_position_sensitive() -> None:
    sensitive = [(f"t{n}", ReferenceAnswer(" x", "text", 300, 1.0, -0.1 * n)) for n in range(1, 41)]
    vague = [("v", ReferenceAnswer(" x", "text", 300, CLEAR_GAP / 2, -9.0))]
    others = [(f"p{n}", ReferenceAnswer(" x", "text", 3, 1.0, 0.9)) for n in range(100)]
    found = [prefix for prefix, _ in choose_quick_prefixes([*sensitive, *vague, *others])]
    assert found[: QUICK // 2] == [f"t{n}" for n in range(17, 41)]  # those with the lowest gap for wrong positions
    assert len(found) == QUICK and all(prefix.startswith("p") for prefix in found[QUICK // 2 :])


class TestReadAnswer:
    def test_reads_a_completion(self) -> None:
        body = {
            "choices": [{"text": " a", "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 3, "completion_tokens": 1},
        }
        assert read_answer(200, json.dumps(body).encode()) == CompletionAnswer(
            text=" a", ended=True, prompt_tokens=3, made_tokens=1
        )

    @pytest.mark.parametrize("status", [404, 405, 501])
    def test_a_missing_api_is_a_lasting_failure(self, status: int) -> None:
        found = read_answer(status, b"nothing here")
        assert isinstance(found, FailedRequest) and found.lasting and "no completions API" in found.why

    @pytest.mark.parametrize(
        "body",
        [b"", b"<html>", b"[]", b"null", b"3", b"{}", b'{"choices": []}', b'{"choices": [{"text": 3}]}', b"\xff\xfe",
         b'{"choices": [{"text": "a"}], "usage": {"prompt_tokens": "many"}}', b'{"choices": [null]}',
         b'{"choices": {"0": 1}}', b'{"choices": [{"text": "a"}], "usage": 7}'],
    )  # fmt: skip
    @pytest.mark.parametrize("status", [200, 500])
    def test_another_body_is_a_failure(self, status: int, body: bytes) -> None:
        found = read_answer(status, body)
        assert isinstance(found, FailedRequest) and str(status) in found.why and not found.lasting

    def test_keeps_the_error_message_of_the_engine(self) -> None:
        found = read_answer(400, b'{"error": {"message": "prompt is\\n too long", "code": 400}}')
        assert found == FailedRequest(why="HTTP 400: prompt is too long")

    @given(st.sampled_from([200, 400, 503]), st.binary(max_size=60))
    def test_never_raises(self, status: int, body: bytes) -> None:
        assert isinstance(read_answer(status, body), (CompletionAnswer, FailedRequest))


class TestAgreementRecord:
    def make_record(self, right: int, wrong: int) -> Agreement:
        found = compare(*make_answers(right, wrong))
        return record_agreement(make_plan(), make_reference(), found, at="2026-11-15T10:00:00Z", machine="m1")

    def test_contains_engine_weights_and_reference(self) -> None:
        one = self.make_record(47, 1)
        assert (one.verdict, one.engine, one.weights, one.reference) == ("ok", "llama.cpp", "Q4_1", "ab" * 6)
        assert one.agreement == one.clear_agreed / one.clear == pytest.approx(47 / 48)
        assert from_json(Agreement, to_json(one)) == one

    def test_renders_one_line_if_ok(self) -> None:
        assert (
            render_agreement(self.make_record(47, 1)).plain
            == " greedy-token agreement with the float32 reference: 47/48"
        )
        engine = replace_fields(self.make_record(47, 1), made_with="llama.cpp 1, Q4_1 weights, cpu")
        assert "with the reference of llama.cpp 1, Q4_1 weights, cpu: 47/48" in render_agreement(engine).plain

    def test_renders_the_evidence_if_broken(self) -> None:
        shown = render_agreement(self.make_record(2, 46)).plain
        assert "gives wrong answers here: 2 of 48 prefixes" in shown
        assert "' nonsense' instead of ' word" in shown and shown.count("after …") == 3
        assert "--engine" in shown

    def test_renders_the_reason_if_unchecked(self) -> None:
        found = compare(*make_answers(0, 0, 48))
        one = record_agreement(make_plan(), make_reference(), found, at="2026-11-15T10:00:00Z", machine="m1")
        assert one.agreement is None and one.clear == 0 and one.floor is None
        assert "could not be checked: only 0 of 48" in render_agreement(one).plain
