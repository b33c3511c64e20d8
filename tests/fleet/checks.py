"""Checks of an engine behind an OpenAI-compatible endpoint. Each check raises an exception if it fails."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bedplate.measure.agreement import Pairs, Reply, ask, compare, is_position_sensitive, record_agreement
from bedplate.measure.prefixes import list_short_prefixes
from bedplate.measure.reference import Reference
from bedplate.values import Plan
from bedplate.values.agreement import Agreement

if TYPE_CHECKING:
    import openai

CAPITAL = "What is the capital of France?"
CAPITAL_TOKENS = 37
"""Token count of this question with the built-in model's chat template, the same in all engines."""
PARIS = "Name the capital of France."
"""A question whose answer has no near tie in PyTorch with float32; the one above begins with a near tie."""
QUESTIONS = (
    PARIS, "How many days are in a week?", "Tell me the capital of France.",
    "Who was the first president of the United States?",
)  # fmt: skip
"""Questions without near ties: each token is at least 0.5 logits better than the next best."""
FEW_TOKENS = 12
LONG_STORY = "Count from 1 to 1000, one number on each line."
STORY_TOKENS = 600
"""Tokens left for the answer in the shortest context that `serve` plans."""
SEEN_TOKENS = 16
IDLE_SHARE = 0.1
IDLE_WINDOW_S = 1.5
REQUEST_LIMIT_S = 600.0
IDLE_LIMIT_S = 300.0
NEAR_TIE = 0.35
"""Maximum difference in logits that other batch shapes or orders of summation were seen to reverse."""
CHUNK = 40


class Wrong(Exception):
    """A check found something wrong."""


class OutOfTime(Exception):
    """The total time was over before a check ended."""


class NearTie(Exception):
    """Two answers differ where two tokens are nearly equally likely, by the logprobs of the engine."""


@dataclass(frozen=True)
class Endpoint:
    """A server: its root URL, and the served model name."""

    root: str
    model: str
    client: openai.OpenAI

    def page(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self.root + path, timeout=REQUEST_LIMIT_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def chat(self, question: str, **more: Any) -> Any:
        messages: Any = [{"role": "user", "content": question}]
        given = {"temperature": 0, "max_tokens": FEW_TOKENS, **more}
        return self.client.chat.completions.create(model=self.model, messages=messages, **given)


@contextlib.contextmanager
def endpoint(root: str, model: str) -> Iterator[Endpoint]:
    import openai

    url = f"{root}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=REQUEST_LIMIT_S) as client:
        yield Endpoint(root, model, client)


def expect(holds: object, why: str) -> None:
    if not holds:
        raise Wrong(why)


def read_text(answer: Any) -> str:
    return str(answer.choices[0].message.content or "")


def counts(usage: Any) -> tuple[int, int, int]:
    """Token counts without the cached tokens, which may differ between requests."""
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


def knows_the_capital(at: Endpoint) -> str:
    text = read_text(at.chat(PARIS))
    expect("Paris" in text, f"{PARIS!r} was answered with {text!r}")
    return text


def counts_tokens(at: Endpoint) -> None:
    answer = at.chat(CAPITAL)
    used = answer.usage
    expect(read_text(answer).strip(), "the answer is empty")
    expect(used is not None, "there is no usage")
    expect(used.prompt_tokens == CAPITAL_TOKENS, f"{used.prompt_tokens} prompt tokens, not {CAPITAL_TOKENS}")
    expect(0 < used.completion_tokens <= FEW_TOKENS, f"{used.completion_tokens} tokens of at most {FEW_TOKENS}")
    expect(used.total_tokens == used.prompt_tokens + used.completion_tokens, f"{used.total_tokens} tokens in all")


def streams_what_it_answers(at: Endpoint) -> None:
    whole = at.chat(PARIS)
    chunks = list(at.chat(PARIS, stream=True, stream_options={"include_usage": True}))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    expect("".join(pieces) == read_text(whole), f"the stream says {''.join(pieces)!r}, the answer {read_text(whole)!r}")
    expect(len([piece for piece in pieces if piece]) > 2, "it came in one piece")
    ends = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
    expect(ends == [whole.choices[0].finish_reason], f"the stream ended with {ends}, not {whole.choices[0]}")
    used = [counts(chunk.usage) for chunk in chunks if chunk.usage is not None]
    expect(used[-1:] == [counts(whole.usage)], f"the stream's usage is {used[-1:]}, the answer's {whole.usage}")


def shows_its_pages(at: Endpoint, engine: str) -> None:
    """The pages of the gateway, which must work even if the engine has none."""
    status, text = at.page("/health")
    expect(status == 200 and json.loads(text)["status"] == "ok", f"/health: {status} {text}")
    status, text = at.page("/v1/models")
    expect(status == 200, f"/v1/models: {status} {text}")
    listed = {one["id"]: one for one in json.loads(text)["data"]}
    expect(list(listed) == [at.model] and listed[at.model]["engine"] == engine, f"/v1/models: {text}")
    expect(at.client.models.retrieve(at.model).id == at.model, "the model is not under its own name")
    status, text = at.page("/metrics")
    expect(status == 200, f"/metrics: {status} {text[:300]}")
    up = f'bedplate_engine_up{{engine="{engine}",model="{at.model}"}} 1.0'
    expect(up in text, f"/metrics does not say {up}")
    expect("bedplate_requests_total{" in text and "bedplate_tokens_total{" in text, "/metrics counts nothing")


def sum_metric(at: Endpoint, name: str, **labels: str) -> float:
    """The sum of a metric of the gateway over all other labels."""
    rows = [line.rpartition(" ") for line in at.page("/metrics")[1].splitlines() if line.startswith(f"{name}{{")]
    return sum(float(value) for key, _, value in rows if all(f'{k}="{v}"' in key for k, v in labels.items()))


def stops_when_its_client_goes(at: Endpoint, cpu_s: Callable[[], float]) -> str:
    """The engine must stop computing, measured by its CPU time (`cpu_s`), which other load does not change."""
    before = sum_metric(at, "bedplate_requests_total", outcome="cancelled")
    stream = at.chat(LONG_STORY, stream=True, max_tokens=STORY_TOKENS)
    events = iter(stream)
    next(events)
    began_s = cpu_s()
    for _ in range(SEEN_TOKENS):
        expect(next(events, None) is not None, f"the answer to {LONG_STORY!r} ended after a few tokens")
    # A chunk may contain several tokens: then a token costs less than this, and the limit is higher.
    each_s = (cpu_s() - began_s) / SEEN_TOKENS
    stream.close()
    left_s = cpu_s()
    idle = _until_idle(cpu_s)
    wasted_s, rest_s = cpu_s() - left_s, each_s * (STORY_TOKENS - SEEN_TOKENS)
    found = (
        f"{wasted_s:.1f} s of processor time after the client went; all of the answer would have been {rest_s:.0f} s"
    )
    expect(idle and (wasted_s < rest_s / 2 or wasted_s < 1), f"it did not stop computing: {found}")
    after = sum_metric(at, "bedplate_requests_total", outcome="cancelled")
    expect(after == before + 1, f"the gateway counted {after - before:.0f} cancelled requests")
    expect(read_text(at.chat(PARIS)).strip(), "it does not answer afterwards")
    return found


def _until_idle(cpu_s: Callable[[], float]) -> bool:
    deadline = time.monotonic() + IDLE_LIMIT_S
    while time.monotonic() < deadline:
        used_s, began = cpu_s(), time.monotonic()
        time.sleep(IDLE_WINDOW_S)
        if cpu_s() - used_s < IDLE_SHARE * (time.monotonic() - began):
            return True
    return False


def answers_four_at_once(at: Endpoint, questions: Sequence[str] = QUESTIONS) -> None:
    """Concurrent answers must equal single ones, except for near ties by the logprobs of the engine."""
    alone = [read_text(at.chat(question)) for question in questions]
    with concurrent.futures.ThreadPoolExecutor(len(questions)) as pool:
        together = [read_text(answer) for answer in pool.map(at.chat, questions)]
    expect(all(text.strip() for text in together), f"an answer is empty: {together}")
    differ = [one for one in zip(questions, alone, together, strict=True) if one[1] != one[2]]
    ties = [_tie(at, *one) for one in differ]
    if ties:
        raise NearTie("; ".join(ties))


def _tie(at: Endpoint, question: str, alone: str, together: str) -> str:
    """The near tie that explains a difference of two answers; raises `Wrong` if there is none."""
    import openai

    differ = f"{question!r} is answered alone with {alone!r}, concurrently with {together!r}"
    same = next(
        (n for n, (a, b) in enumerate(zip(alone, together, strict=False)) if a != b), min(len(alone), len(together))
    )
    try:
        said = at.chat(question, logprobs=True, top_logprobs=2).choices[0].logprobs
    except openai.APIError as error:
        raise Wrong(f"{differ}, and its logprobs are not available: {error}") from error
    length, gap = 0, None
    for token in said.content if said is not None else ():
        if length <= same < length + len(token.token) and len(token.top_logprobs) > 1:
            gap = abs(token.top_logprobs[0].logprob - token.top_logprobs[1].logprob)
        length += len(token.token)
    if gap is None or gap > NEAR_TIE:
        raise Wrong(f"{differ}; the next best token is {'unknown' if gap is None else f'{gap:.2f} less likely'}")
    return f"{differ}: a near tie, {gap:.2f} between them"


def fits_a_schema(at: Endpoint) -> None:
    city = {"city": {"enum": ["Paris", "Rome"]}}
    schema = {"type": "object", "properties": city, "required": ["city"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    text = read_text(at.chat(f"{CAPITAL} Answer as JSON.", response_format=form, max_tokens=60))
    try:
        expect(json.loads(text)["city"] in ("Paris", "Rome"), f"the answer is {text!r}")
    except (ValueError, KeyError, TypeError) as error:
        raise Wrong(f"the answer is {text!r}, which does not fit the schema") from error


def choose_prefixes(reference: Reference) -> Pairs:
    """All prefixes: first those that detect wrong positions, then the others, the shortest first."""
    known = {*reference.list_known(), *reference.list_known(list_short_prefixes())}
    return sorted(known, key=lambda pair: (not is_position_sensitive(pair[1]), pair[1].tokens, pair[0]))


def compare_next_tokens(
    at: Endpoint,
    plan: Plan,
    reference: Reference,
    pairs: Pairs,
    *,
    in_flight: int = 4,
    may_go_on: Callable[[int], bool] = lambda done: True,
    tell: Callable[[int], None] = lambda done: None,
) -> Agreement:
    """The comparison with PyTorch in float32, for as many prefixes as time allows."""
    said: list[Reply] = []
    while len(said) < len(pairs) and may_go_on(len(said)):
        some = pairs[len(said) : len(said) + CHUNK]
        said += asyncio.run(ask(at.root, some, model=at.model, in_flight=in_flight, limit_s=REQUEST_LIMIT_S))
        tell(len(said))
    return record_agreement(plan, reference, compare(pairs[: len(said)], said), at="", machine="")
