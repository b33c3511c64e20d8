"""Quality checks: likelihoods, garbled text, and endpoints that report only a part."""

from __future__ import annotations

import asyncio
import functools
import json
import math
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bedplate.measure import quality
from bedplate.measure.garbled import find_garbling
from bedplate.measure.likelihood import (
    ListedTokens,
    compare_echo,
    compare_perplexity,
    compute_continued_perplexity,
    compute_divergence,
    compute_mean_divergence,
    find_likelihood,
    read_echo,
    read_fixed_text,
    read_listed,
    read_shipped_likelihoods,
    write_likelihood,
)
from bedplate.measure.reference import ReferenceAnswer, TextPlace, read_shipped_references
from bedplate.run.builtin import FILE_SHA256, read_builtin_facts
from bedplate.values.run import Quality

(REFERENCE,) = [one for one in read_shipped_references() if one.sha256 == FILE_SHA256]
KNOWN = find_likelihood(REFERENCE)
PROSE = (
    "walked past the mill and the school. He said good morning to the baker, who was always up before him, and to the "
    "two old dogs that slept on the church steps. It's a half-forgotten road, the 12th-century one, he'd say."
)


# likelihoods


def test_shipped_likelihood_matches_the_built_in_model_and_the_text() -> None:
    assert KNOWN is not None and KNOWN.tokens > 300 and 15 < (KNOWN.perplexity or 0) < 40
    text = read_fixed_text()
    for make_place in KNOWN.places:
        assert text[make_place.end :].startswith(make_place.next[0]) and len(make_place.top) == 20
        assert sum(math.exp(value) for _, value in make_place.top) <= 1.001
    assert 250 < len(text.split()) < 350 and len(read_shipped_likelihoods()) == 1
    assert find_likelihood(msgspec.structs.replace(REFERENCE, sha256="0" * 64)) is None


def test_shipped_file_round_trips() -> None:
    import importlib.resources

    assert KNOWN is not None
    file = importlib.resources.files("bedplate.measure") / "data" / f"likelihood_{KNOWN.sha256[:12]}.json"
    assert file.read_text(encoding="utf-8") == write_likelihood(KNOWN)


logprobs = st.dictionaries(st.sampled_from("abcdefgh"), st.floats(0.01, 1), min_size=1).map(
    lambda weights: {token: math.log(weight / sum(weights.values()) * 0.99) for token, weight in weights.items()}
)


@given(logprobs, logprobs)
def test_divergence_is_not_negative_and_zero_for_equal_distributions(
    one: dict[str, float], other: dict[str, float]
) -> None:
    assert compute_divergence(one, one) == pytest.approx(0, abs=1e-9)
    found = compute_divergence(one, other)
    assert (found is None) == (not set(one) & set(other))
    assert found is None or (found >= 0 and math.isfinite(found))


def test_divergence_matches_the_formula() -> None:
    one = {"a": math.log(0.5), "b": math.log(0.25)}
    other = {"a": math.log(0.25), "b": math.log(0.5)}
    assert compute_divergence(one, other) == pytest.approx(0.5 * math.log(2) + 0.25 * math.log(0.5))


def make_place(next_token: tuple[str, float], **top: float) -> TextPlace:
    return TextPlace(end=1, tokens=1, next=next_token, top=tuple(top.items()))


def test_perplexity_over_the_tokens_in_both_lists() -> None:
    places = [make_place(("a", -1.0), a=-1.0), make_place(("b", -2.0), c=-0.1), make_place(("c", -3.0), c=-3.0)]
    response = [ListedTokens(top={"a": -2.0}), ListedTokens(top={"x": -1.0}), None]
    found = compute_continued_perplexity(places, response)
    assert found is not None and found.error is None
    assert (found.own, found.reference) == pytest.approx((math.exp(2), math.e))
    assert compute_continued_perplexity(places, [None] * 3) is None and compute_continued_perplexity([], []) is None
    assert compute_mean_divergence(places, [None] * 3) is None and compute_mean_divergence(places, response) is not None


def test_errors_of_the_means() -> None:
    """Equal differences at all tokens have no error; the perplexities themselves vary much more."""
    same = compare_perplexity([-1.5, -3.5, -9.5], [-1.0, -3.0, -9.0])
    assert same.error == pytest.approx(0) and same.own / (same.reference or 1) == pytest.approx(math.exp(0.5))
    assert compare_perplexity([-1.0, -4.0], [-1.0, -3.0]).error == pytest.approx(0.5)
    places = [make_place(("a", -1.0), a=-0.5, b=-2.0)] * 2
    found = compute_mean_divergence(places, [ListedTokens(top={"a": -0.5, "b": -2.0})] * 2)
    assert found == pytest.approx((0.0, 0.0))


def test_an_echo_is_compared_token_by_token_if_the_counts_match() -> None:
    assert KNOWN is not None
    known = msgspec.structs.replace(KNOWN, each=(-1.0, -2.0, -3.0))
    found = compare_echo([-1.5, -2.5, -3.5], known)
    assert found.error == pytest.approx(0) and found.reference == pytest.approx(math.exp(2))
    other = compare_echo([-1.5, -2.5], known)
    assert other.error is None and other.reference == KNOWN.perplexity and compare_echo([-1.0], None).reference is None


def test_reads_both_formats_of_alternatives() -> None:
    old = {"choices": [{"logprobs": {"top_logprobs": [{" a": -0.5, " b": -1.5}]}}]}
    new = {"choices": [{"logprobs": {"content": [{"top_logprobs": [
        {"token": " a", "logprob": -0.5}, {"token": " b", "logprob": -1.5}]}]}}]}  # fmt: skip
    assert read_listed(json.dumps(old).encode()) == read_listed(json.dumps(new).encode()) == ListedTokens(
        top={" a": -0.5, " b": -1.5}
    )  # fmt: skip


def test_reads_an_echo_only_if_the_text_matches() -> None:
    response: dict[str, Any] = {
        "usage": {"prompt_tokens": 3},
        "choices": [{"text": "one two three four", "logprobs": {"token_logprobs": [None, -1.0, -3.0, -9.0]}}],
    }
    assert read_echo(json.dumps(response).encode(), "one two three") == [-1.0, -3.0]
    assert read_echo(json.dumps(response).encode(), "another text") is None
    response["choices"][0]["logprobs"]["token_logprobs"] = [-9.0]
    assert read_echo(json.dumps(response).encode(), "one two three") is None


garbage = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["choices", "logprobs", "content", "top_logprobs", "usage", "text"]), inner)
    ),
    max_leaves=12,
)


@given(garbage)
def test_any_response_is_read_without_errors(response: Any) -> None:
    body = json.dumps(response).encode()
    read_listed(body), read_echo(body, "a text")
    assert read_listed(body[:-1] + b"\xff") is None and read_echo(b"", "x") is None


# garbled


@pytest.mark.parametrize(
    "text",
    [
        PROSE,
        "1. First, heat the oil.\n2. Then add the onions (two of them).\n3. Stir well, for about 5-10 minutes.\n\n"
        "**Note:** the pan must be hot; use a lid if it spits.",
        "Jeden Morgen ging der alte Gärtner zum Fluss hinunter, grüßte die Bäckerin und fütterte die Straßenhunde.",
        "毎朝、老いた庭師は村を通って川まで歩き、パン屋に挨拶をして、二匹の犬に餌をやりました。",
        "He said the sky was blue because the sky was blue because the sky was blue because it was.",
        "Yes.",
        "The iPhone costs $799, NASA's budget is 24.9 billion, and the MacBook isn't cheaper than that either.",
    ],
)
def test_normal_text_is_not_garbled(text: str) -> None:
    assert find_garbling(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n ",
        "the the the the the the the the the the the the the the",
        "I am I am I am I am I am I am I am I am I am I am",
        "\ufffd\ufffd\ufffd a \ufffd\ufffd\x00\x01",
        "getElement ForgerySJ _{(x Ümleft0 zn_Q9 <|x aB4c qRs7 }{;k9 nullPtrX 4getY zzQ_1 hXt",
        "слово word كلمة שלום λέξη стол мир dog بيت λόγος and so שלום on",
    ],
)
def test_garbled_text_is_detected(text: str) -> None:
    assert find_garbling(text)


@given(st.text())
def test_the_reason_is_short_for_any_text(text: str) -> None:
    found = find_garbling(text)
    assert found is None or len(found) < 200


# an endpoint


@functools.cache
def reference_answers() -> dict[str, ReferenceAnswer]:
    return dict(REFERENCE.list_known())


class Endpoint(BaseHTTPRequestHandler):
    """Gives the answers of the reference, as far as `gives` allows."""

    gives: frozenset[str] = frozenset()
    text = PROSE

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        status, response = self.answer(body)
        data = json.dumps(response).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def answer(self, body: dict[str, Any]) -> tuple[int, Any]:
        assert KNOWN is not None
        prompt = body["prompt"] if self.path.endswith("/v1/completions") else None
        if prompt is None or (self.path.endswith("/v1/completions") and "completions" not in self.gives):
            if self.path.endswith("/v1/completions"):
                return 404, {"error": "no such API"}
            return 200, {"choices": [{"message": {"content": self.text}}]}
        if body.get("echo"):
            if "echo" not in self.gives:
                return 400, {"error": "echo"}
            each = [None, *[(KNOWN.logprob or 0.0) / (KNOWN.tokens - 1)] * KNOWN.tokens]
            return 200, {
                "choices": [{"text": prompt + " x", "logprobs": {"token_logprobs": each}}],
                "usage": {"prompt_tokens": KNOWN.tokens},
            }
        if body["max_tokens"] > 1:
            return 200, {"choices": [{"text": self.text}]}
        if "logprobs" in body:
            if "logprobs" not in self.gives or body["logprobs"] > 5:
                return 400, {"error": "too many"}
            found = next(one for one in KNOWN.places if prompt == read_fixed_text()[: one.end])
            return 200, {"choices": [{"text": "x", "logprobs": {"top_logprobs": [dict(found.top[:5])]}}]}
        known = reference_answers()[prompt]
        right = known.text if "right" in self.gives else "wrong"
        usage = {"prompt_tokens": known.tokens, "completion_tokens": 1}
        return 200, {"choices": [{"text": right, "finish_reason": "length"}], "usage": usage}

    def log_message(self, *_: object) -> None: ...


Check = Callable[..., Quality]


@pytest.fixture
def check(builtin_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Check]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    thread = Thread(target=server.serve_forever)
    thread.start()

    def check_endpoint(*gives: str, text: str = PROSE, known: bool = True) -> Quality:
        monkeypatch.setattr(Endpoint, "gives", frozenset(gives))
        monkeypatch.setattr(Endpoint, "text", text)
        model = read_builtin_facts() if known else None
        return asyncio.run(quality.check(f"http://127.0.0.1:{server.server_address[1]}", "m", None, model=model))

    yield check_endpoint
    server.shutdown()
    server.server_close()
    thread.join()


def test_compares_everything_that_an_endpoint_reports(check: Check) -> None:
    found = check("completions", "right", "logprobs", "echo")
    assert found.verdict == "ok" and found.agreement == 1 and found.garbled is None and found.asked >= 24
    assert found.divergence is not None and found.divergence < 0.05
    assert KNOWN is not None and found.perplexity == pytest.approx(KNOWN.perplexity)
    assert found.reference_perplexity == pytest.approx(KNOWN.perplexity)


def test_perplexity_of_single_tokens_without_an_echo(check: Check) -> None:
    found = check("completions", "right", "logprobs")
    assert found.perplexity == found.reference_perplexity and found.perplexity is not None


def test_unreported_values_stay_unknown(check: Check) -> None:
    found = check("completions", "right")
    assert found.verdict == "ok" and found.divergence is None and found.perplexity is None
    chat = check()
    assert chat.verdict == "unchecked" and chat.agreement is None and "no completions API" in (chat.note or "")


def test_reports_wrong_and_garbled_answers(check: Check) -> None:
    found = check("completions", text="bla bla bla bla bla bla bla bla bla bla bla bla bla")
    assert found.verdict == "broken" and found.agreement == 0 and "it repeats" in (found.garbled or "")


def test_unchecked_without_a_reference(check: Check) -> None:
    found = check("completions", "right", "echo", known=False)
    assert found.verdict == "unchecked" and found.agreement is None and found.reference_perplexity is None
    assert found.note == "there is no reference for these weights" and found.perplexity is not None


def test_an_unreachable_endpoint_is_unchecked(builtin_gguf: Path) -> None:
    found = asyncio.run(quality.check("http://127.0.0.1:9", "m", None, model=read_builtin_facts()))
    assert found.verdict == "unchecked" and found.garbled is None and found.perplexity is None
