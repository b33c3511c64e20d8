"""Agreement: what counts as the same token, what counts as broken, and why."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.measure.samples_of_agreement import plan, reference

from bedplate.measure.agreement import (
    CLEAR_GAP,
    FLOORS,
    MOST_EVIDENCE,
    QUICK,
    Answer,
    Failed,
    Reply,
    chance,
    compare,
    floor_for,
    judged,
    quick_ones,
    read_answer,
    same,
    stored_bits,
    strips_spaces,
    verdict_of,
)
from bedplate.measure.reference import Known
from bedplate.show.serving import render_agreement
from bedplate.values import from_json, to_json
from bedplate.values.agreement import Agreement

PARIS = Known(" Paris", "text", 5, 4.0)
END = Known("<|im_end|>", "special", 5, 4.0)
HALF = Known("\ufffd", "part", 5, 4.0)


class TestTheSameToken:
    @pytest.mark.parametrize(
        ("known", "answer"),
        [
            (PARIS, Answer(text=" Paris")),
            (PARIS, Answer(text=" Paris, the", made_tokens=3)),  # it does not keep to max_tokens
            (END, Answer(text="", ended=True)),
            (END, Answer(text="<|im_end|>")),
            (HALF, Answer(text="")),
            (HALF, Answer(text="\ufffd")),
        ],
    )
    def test_it_is(self, known: Known, answer: Answer) -> None:
        assert same(known, answer)

    @pytest.mark.parametrize(
        ("known", "answer"),
        [
            (PARIS, Answer(text="Paris")),  # another token of the vocabulary
            (PARIS, Answer(text=" paris")),
            (PARIS, Answer(text="", ended=True)),
            (PARIS, Answer(text=" Par", made_tokens=1)),
            (PARIS, Answer(text="\ufffd")),
            (Known("", "text", 5, 4.0), Answer(text=" anything", made_tokens=2)),
            (END, Answer(text=" Paris")),
            (HALF, Answer(text="", ended=True)),
            (HALF, Answer(text="猫")),
        ],
    )
    def test_it_is_not(self, known: Known, answer: Answer) -> None:
        assert not same(known, answer)

    def test_an_engine_that_strips_spaces_is_known_by_showing_none(self) -> None:
        bare = [(Known(f" word{n}", "text", 5, 4.0), Answer(text=f"word{n}")) for n in range(6)]
        assert strips_spaces(bare) and all(same(known, answer, strips=True) for known, answer in bare)
        assert not strips_spaces([*bare, (PARIS, Answer(text=" Paris"))])
        assert not strips_spaces(bare[:2])  # too few to tell
        assert not same(bare[0][0], Answer(text="other"), strips=True)


def answered(right: int, wrong: int = 0, failed: int = 0) -> tuple[list[tuple[str, Known]], list[Reply]]:
    pairs = list(reference(right + wrong + failed).known())
    said: list[Reply] = [Answer(text=known.text, prompt_tokens=7) for _, known in pairs[:right]]
    said += [Answer(text=" nonsense", prompt_tokens=7)] * wrong + [Failed(why="HTTP 500: no")] * failed
    return pairs, said


class TestComparing:
    def test_it_counts_all_and_the_clear_ones_apart(self) -> None:
        pairs, said = answered(30, 10)
        pairs[0] = (pairs[0][0], Known(" word0", "text", 7, CLEAR_GAP / 2))
        pairs[-1] = (pairs[-1][0], Known(" other", "text", 7, CLEAR_GAP / 2))
        found = compare(pairs, said)
        assert (found.asked, found.answered, found.agreed) == (40, 40, 30)
        assert (found.clear, found.clear_agreed) == (38, 29)

    def test_the_evidence_is_the_clearest_first_and_not_endless(self) -> None:
        pairs, said = answered(10, 40)
        pairs[30] = (pairs[30][0], Known(" sure", "text", 7, 9.5))
        found = compare(pairs, said)
        assert len(found.evidence) == MOST_EVIDENCE
        assert (found.evidence[0].expected, found.evidence[0].got, found.evidence[0].gap) == (" sure", " nonsense", 9.5)
        assert pairs[30][0].endswith(found.evidence[0].prefix)

    def test_an_early_end_is_told_from_an_empty_answer(self) -> None:
        pairs = list(reference(2).known())
        found = compare(pairs, [Answer(text="", ended=True), Answer(text="")])
        assert {one.got for one in found.evidence} == {None, ""}

    def test_prompts_of_another_length(self) -> None:
        pairs, _ = answered(20)
        found = compare(pairs, [Answer(text=known.text, prompt_tokens=8) for _, known in pairs])
        assert (found.other_lengths, found.longer_by) == (20, 1)

    def test_what_failed_is_not_an_answer(self) -> None:
        found = compare(*answered(10, 0, 5))
        assert (found.asked, found.answered, found.agreed) == (15, 10, 10)
        assert found.failure == Failed(why="HTTP 500: no")

    def test_nothing_asked(self) -> None:
        assert verdict_of(compare([], []), 0.95)[0] == "unchecked"


class TestVerdict:
    @pytest.mark.parametrize(("right", "wrong"), [(48, 0), (47, 1), (45, 3), (560, 0), (540, 20)])
    def test_what_the_bits_explain_is_good(self, right: int, wrong: int) -> None:
        assert verdict_of(compare(*answered(min(right, 500), wrong)), 0.95)[0] == "ok"

    @pytest.mark.parametrize(("right", "wrong"), [(0, 48), (24, 24), (38, 10), (440, 60)])
    def test_what_they_do_not_explain_is_broken_and_says_so(self, right: int, wrong: int) -> None:
        verdict, why = verdict_of(compare(*answered(right, wrong)), 0.95)
        assert verdict == "broken" and f"{right} of {right + wrong} prefixes" in why and "95%" in why

    @pytest.mark.parametrize(("wrong", "verdict"), [(3, "ok"), (4, "broken")])
    def test_wrong_positions_do_not_hide_among_what_they_do_not_touch(self, wrong: int, verdict: str) -> None:
        pairs, said = answered(100 - wrong, wrong)
        for number in range(90, 100):
            known = pairs[number][1]
            pairs[number] = (pairs[number][0], Known(known.text, "text", 7, known.gap, -0.5))
        found, why = verdict_of(compare(pairs, said), 0.97)
        assert found == verdict and ("6 of 10 prefixes that depend on right positions" in why) == (verdict == "broken")

    def test_a_bos_too_many_is_named(self) -> None:
        pairs, _ = answered(48)
        _, why = verdict_of(compare(pairs, [Answer(text="x", prompt_tokens=8)] * 48), 0.95)
        assert "another number of tokens, +1 each" in why

    def test_too_many_failures_are_no_verdict(self) -> None:
        verdict, why = verdict_of(compare(*answered(10, 0, 38)), 0.95)
        assert verdict == "unchecked" and "10 of 48" in why and "HTTP 500" in why

    def test_a_few_failures_do_not_matter(self) -> None:
        assert verdict_of(compare(*answered(46, 0, 2)), 0.95)[0] == "ok"
        assert verdict_of(compare(*answered(0, 46, 2)), 0.95)[0] == "broken"

    def test_near_ties_decide_nothing(self) -> None:
        pairs = list(reference(60, gap=CLEAR_GAP / 10).known())
        assert verdict_of(compare(pairs, [Answer(text="x")] * 60), 0.95)[0] == "unchecked"

    @given(st.integers(1, 200), st.floats(0.5, 0.99), st.data())
    def test_fewer_are_never_more_likely(self, asked: int, share: float, data: st.DataObject) -> None:
        agreed = data.draw(st.integers(1, asked))
        assert 0 <= chance(agreed - 1, asked, share) <= chance(agreed, asked, share) <= 1 + 1e-9
        assert chance(asked, asked, share) == pytest.approx(1)


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
    def test_bits_of_a_label(self, label: str, bits: float | None) -> None:
        assert stored_bits(label) == bits

    def test_fewer_bits_explain_more(self) -> None:
        labels = ("BF16", "Q8_0", "Q6_K", "Q5_K_M", "INT4")
        floors = [floor_for(plan(label, "converted", "onnx")) for label in labels]
        assert floors == sorted(floors, reverse=True) and floors[0] > 0.9 > floors[-1]

    def test_a_file_as_it_is_has_nothing_left_to_lose(self) -> None:
        as_it_is, anew = plan("Q4_1"), plan("INT4", "converted", "onnx")
        assert floor_for(as_it_is) == floor_for(plan("Q8_0", "converted", "gguf")) > floor_for(anew)

    def test_a_cache_of_eight_bits_explains_something(self) -> None:
        assert floor_for(plan("BF16", "converted", "safetensors", kv_type="fp8")) < FLOORS[0][1]

    def test_of_an_unknown_label_little_is_asked(self) -> None:
        assert floor_for(plan("nobody's", "converted", "safetensors")) == FLOORS[-1][1]


def test_the_quick_ones_are_clear_short_and_spread() -> None:
    pairs = [(f"p{n}", Known(" x", "text", 3, CLEAR_GAP * (n % 2))) for n in range(400)]
    found = quick_ones(pairs)
    assert len(found) == QUICK and all(known.gap >= CLEAR_GAP for _, known in found)
    assert quick_ones([("a long one", Known(" x", "text", 2000, 9.0))]) == ()
    assert int(found[0][0][1:]) < 10 and int(found[-1][0][1:]) > 380


def test_half_of_the_quick_ones_at_the_most_are_those_that_wrong_positions_turn() -> None:
    telling = [(f"t{n}", Known(" x", "text", 300, 1.0, -0.1 * n)) for n in range(1, 41)]
    vague = [("v", Known(" x", "text", 300, CLEAR_GAP / 2, -9.0))]
    others = [(f"p{n}", Known(" x", "text", 3, 1.0, 0.9)) for n in range(100)]
    found = [prefix for prefix, _ in quick_ones([*telling, *vague, *others])]
    assert found[: QUICK // 2] == [f"t{n}" for n in range(17, 41)]  # those that are turned the furthest
    assert len(found) == QUICK and all(prefix.startswith("p") for prefix in found[QUICK // 2 :])


class TestWhatComesBack:
    def test_a_completion(self) -> None:
        body = {
            "choices": [{"text": " a", "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 3, "completion_tokens": 1},
        }
        assert read_answer(200, json.dumps(body).encode()) == Answer(
            text=" a", ended=True, prompt_tokens=3, made_tokens=1
        )

    @pytest.mark.parametrize("status", [404, 405, 501])
    def test_no_such_api(self, status: int) -> None:
        found = read_answer(status, b"nothing here")
        assert isinstance(found, Failed) and found.lasting and "no completions API" in found.why

    @pytest.mark.parametrize(
        "body",
        [b"", b"<html>", b"[]", b"null", b"3", b"{}", b'{"choices": []}', b'{"choices": [{"text": 3}]}', b"\xff\xfe",
         b'{"choices": [{"text": "a"}], "usage": {"prompt_tokens": "many"}}', b'{"choices": [null]}',
         b'{"choices": {"0": 1}}', b'{"choices": [{"text": "a"}], "usage": 7}'],
    )  # fmt: skip
    @pytest.mark.parametrize("status", [200, 500])
    def test_something_else(self, status: int, body: bytes) -> None:
        found = read_answer(status, body)
        assert isinstance(found, Failed) and str(status) in found.why and not found.lasting

    def test_an_engines_own_words(self) -> None:
        found = read_answer(400, b'{"error": {"message": "prompt is\\n too long", "code": 400}}')
        assert found == Failed(why="HTTP 400: prompt is too long")

    @given(st.sampled_from([200, 400, 503]), st.binary(max_size=60))
    def test_nothing_makes_it_raise(self, status: int, body: bytes) -> None:
        assert isinstance(read_answer(status, body), (Answer, Failed))


class TestTheRecord:
    def judged(self, right: int, wrong: int) -> Agreement:
        found = compare(*answered(right, wrong))
        return judged(plan(), reference(), found, at="2026-11-15T10:00:00Z", machine="m1")

    def test_it_says_what_was_asked_of_whom(self) -> None:
        one = self.judged(47, 1)
        assert (one.verdict, one.engine, one.weights, one.reference) == ("ok", "llama.cpp", "Q4_1", "ab" * 6)
        assert one.agreement == one.clear_agreed / one.clear == pytest.approx(47 / 48)
        assert from_json(Agreement, to_json(one)) == one

    def test_a_line_when_it_is_good(self) -> None:
        assert render_agreement(self.judged(47, 1)).plain == " greedy-token agreement with the float32 reference: 47/48"

    def test_the_evidence_when_it_is_not(self) -> None:
        shown = render_agreement(self.judged(2, 46)).plain
        assert "gives wrong answers here: 2 of 48 prefixes" in shown
        assert "' nonsense' instead of ' word" in shown and shown.count("after …") == 3
        assert "--engine" in shown

    def test_and_when_it_could_not_be_checked(self) -> None:
        found = compare(*answered(0, 0, 48))
        one = judged(plan(), reference(), found, at="2026-11-15T10:00:00Z", machine="m1")
        assert one.agreement is None and one.clear == 0 and one.floor is None
        assert "could not be checked: only 0 of 48" in render_agreement(one).plain
