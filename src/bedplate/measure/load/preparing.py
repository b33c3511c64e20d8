"""Find out before a measurement what an endpoint supports: its API, request fields, and token counts."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Literal

import msgspec

from bedplate.errors import ExternalFailure, UsageError
from bedplate.measure.load.answers import UNREADABLE, StreamedAnswer, read, read_error_text
from bedplate.measure.load.prompts import Prompts
from bedplate.measure.load.schedule import check_load
from bedplate.measure.load.target import PATHS, Api, LoadTarget
from bedplate.measure.load.tools import TOOLS, make_schema_format
from bedplate.measure.load.trace_sessions import has_sessions
from bedplate.measure.load.wire import HttpExchange, ask
from bedplate.measure.load.words import WORDS
from bedplate.values.record import Record, replace_fields
from bedplate.values.run import Load
from bedplate.values.workload import RequestShape

Field = Literal["usage", "ignore_eos", "min_tokens"]
LADDER: tuple[tuple[Field, ...], ...] = (("usage", "ignore_eos", "min_tokens"), ("usage", "ignore_eos"), ("usage",), ())
"""Optional request fields, in the order in which they are tried until the endpoint accepts the request."""
LengthField = Literal["max_tokens", "max_completion_tokens"]
NO_SUCH_API = (404, 405, 501)
NOT_TAKEN = (400, 415, 422)
TRIAL_TOKENS = 8
REHEARSED_TOKENS = 16
"""Enough to estimate the time of a whole answer."""
CHAT_STARTERS = 16
TRIES = 3
CALL_TOKENS = 24
"""Enough for the name of a tool."""
STRUCTURED_TOKENS = 64
SCHEMA_TOKENS = 24
LIMIT_S = 300.0


class PreparedEndpoint(Record, frozen=True, kw_only=True):
    """What an endpoint supports, and how it handles the requests of one load."""

    model: str
    api: Api
    fields: tuple[Field, ...] = ()
    length_field: LengthField = "max_tokens"
    words: tuple[str, ...] = WORDS
    """Words of one token each."""
    starters: tuple[str, ...] = WORDS
    """Words that are one token at the beginning of a prompt too."""
    overhead: int = 0
    """Tokens that the endpoint adds to each prompt: BOS, chat template."""
    tokenizes: bool = False
    """Whether it has a /tokenize API."""
    streams: bool = True
    tells_usage: bool = True
    counts: bool = True
    """Whether it reports the number of prompt tokens, at least without streaming."""
    exact_prompt: bool = False
    """Whether the endpoint counted exactly the requested number of prompt tokens."""
    request_s: float | None = None
    """Estimated time of one request of this load alone."""
    tools: Literal["auto", "none"] | None = None
    """The `tool_choice` of answers without a tool call; `None`: it has no tool calls, or none were asked for."""
    schemas: bool = False
    """Whether answers match the JSON schema of a request."""
    context_tokens: int | None = None
    """For sessions: the context of the model, if the endpoint reports it."""
    notes: tuple[str, ...] = ()

    @property
    def takes_exact_output(self) -> bool:
        """Whether it accepts a field for an exact number of output tokens; it may still ignore that field."""
        return "ignore_eos" in self.fields or "min_tokens" in self.fields

    def make_prompts(self, load: Load, round_number: int) -> Prompts:
        return Prompts(
            self.words,
            self.starters,
            self.overhead,
            # With a leading space the first word is tokenized like all others; chat templates strip it.
            leading_space=self.api == "completions",
            seed=load.seed,
            round_number=round_number,
            shared_tokens=load.shared_prefix_tokens,
        )

    def repeat_words(self, count: int) -> list[str]:
        """The same words in the same order, as often as needed."""
        return list(itertools.islice(itertools.cycle(self.words), count))

    def make_body(self, text: str, output_tokens: int, *, stream: bool = True) -> bytes:
        """The JSON body of a request."""
        fields: dict[str, object] = {"model": self.model}
        if self.api == "completions":
            fields["prompt"] = text
        else:
            fields["messages"] = [{"role": "user", "content": text}]
        return msgspec.json.encode({**fields, **self.make_length_fields(output_tokens, stream=stream)})

    def make_length_fields(self, output_tokens: int, *, stream: bool = True, exact: bool = True) -> dict[str, object]:
        """All fields but the model and the prompt. `exact`: not for structured output, which ends by itself."""
        fields: dict[str, object] = {self.length_field: output_tokens}
        if self.length_field == "max_tokens":  # APIs that accept only the other field reject a temperature too
            fields["temperature"] = 0
        if stream:
            fields["stream"] = True
            if "usage" in self.fields:
                fields["stream_options"] = {"include_usage": True}
        if exact and "ignore_eos" in self.fields:
            fields["ignore_eos"] = True
        if exact and "min_tokens" in self.fields:
            fields["min_tokens"] = output_tokens
        return fields

    def request(self, target: LoadTarget, text: str, output_tokens: int, *, stream: bool = True) -> bytes:
        return target.request("POST", PATHS[self.api], self.make_body(text, output_tokens, stream=stream))


async def prepare(
    target: LoadTarget,
    load: Load,
    *,
    known: PreparedEndpoint | None = None,
    shapes: Sequence[RequestShape] = (),
    limit_s: float = LIMIT_S,
) -> PreparedEndpoint:
    """Prepares a load with a few small requests. `known`: the result for another load on the same endpoint."""
    check_load(load, shapes)
    in_sessions = load.has_sessions or has_sessions(shapes)
    if in_sessions:
        target = replace_fields(target, api="chat")  # messages have roles only there
    endpoint = _EndpointProbe(target, limit_s)
    if known is None or (in_sessions and known.api != "chat"):
        known = await endpoint.find_api(await endpoint.find_model())
        known = await (endpoint.find_session_words(known) if in_sessions else endpoint.find_words(known))
        if in_sessions:
            known = await endpoint.find_structured_output(known, load)
            known = replace_fields(known, context_tokens=await find_context(target))
    if in_sessions:
        return await endpoint.rehearse_session(known, load)
    return await endpoint.rehearse_load(known, *_choose_lengths(load, shapes), load)


async def find_context(target: LoadTarget, limit_s: float = 10.0) -> int | None:
    """The context of the endpoint's model, if its list of models states it."""
    try:
        exchange = await ask(target, target.request("GET", "/v1/models"), limit_s)
        models = msgspec.json.decode(b"".join(exchange.pieces))["data"]
        for model in models:
            if target.model in (None, model["id"]):
                found = model.get("max_model_len") or (model.get("meta") or {}).get("n_ctx")
                return int(found) if found else None
    except (OSError, TimeoutError, *UNREADABLE, KeyError, TypeError, ValueError):
        pass  # preparing the load reports what is wrong with the endpoint
    return None


def _choose_lengths(load: Load, shapes: Sequence[RequestShape]) -> tuple[int, int]:
    """The longest prompt, because the endpoint may reject it, and the median answer."""
    if load.arrivals != "replay":
        return load.prompt_tokens, load.output_tokens
    return (
        max(shape.prompt_tokens or load.prompt_tokens for shape in shapes),
        max(1, round(statistics.median(shape.output_tokens or load.output_tokens for shape in shapes))),
    )


class _EndpointProbe:
    """Sends test requests to one endpoint; raises an error if it cannot be measured."""

    def __init__(self, target: LoadTarget, limit_s: float) -> None:
        self.target = target
        self.limit_s = limit_s

    async def find_model(self) -> str:
        if self.target.model is not None:
            return self.target.model
        exchange = await self.ask(self.target.request("GET", "/v1/models"))
        self.require_access(exchange)
        try:
            names = [str(each["id"]) for each in msgspec.json.decode(b"".join(exchange.pieces))["data"]]
        except (*UNREADABLE, KeyError, TypeError):
            names = []
        if not names:
            raise UsageError(f"{self.target.url} lists no models", hint="specify the model")
        return names[0]

    async def find_api(self, model: str) -> PreparedEndpoint:
        """Finds the API and the request fields that the endpoint accepts."""
        apis: tuple[Api, ...] = (self.target.api,) if self.target.api else ("completions", "chat")
        why = ""
        for api in apis:
            for length_field in ("max_tokens", "max_completion_tokens") if api == "chat" else ("max_tokens",):
                for fields in LADDER:
                    one = PreparedEndpoint(model=model, api=api, fields=fields, length_field=length_field)
                    exchange = await self.ask(one.request(self.target, " " + " ".join(WORDS[:8]), TRIAL_TOKENS))
                    self.require_access(exchange)
                    if exchange.status == 200:
                        return self.read_support(one, exchange)
                    why = f"HTTP {exchange.status}: {self.read_error(exchange)}"
                    if exchange.status not in NOT_TAKEN:
                        break
                if exchange.status in NO_SUCH_API:
                    break
        raise ExternalFailure(
            f"{self.target.url} is not an OpenAI-compatible endpoint",
            cause=why,
            hint=f"check that it serves the model {model!r}",
        )

    def read_support(self, one: PreparedEndpoint, exchange: HttpExchange) -> PreparedEndpoint:
        answer = read(exchange)
        if answer.outcome not in ("ok", "cut"):
            raise ExternalFailure(
                f"{self.target.url} failed to answer a test request", cause=self.hide_key(answer.error)
            )
        notes = []
        streams = b"text/event-stream" in exchange.content_type
        if not streams:
            notes.append("the endpoint does not stream: its TTFT is the time of the whole answer")
        if answer.output_tokens is None:
            notes.append("the endpoint reports no usage in streams: its output tokens are unknown")
        if not one.takes_exact_output:
            notes.append("the endpoint accepts no field for an exact number of output tokens")
        return replace_fields(one, streams=streams, tells_usage=answer.output_tokens is not None, notes=tuple(notes))

    async def find_words(self, one: PreparedEndpoint) -> PreparedEndpoint:
        """Finds the words that are one token each, and the tokens that the endpoint adds to each prompt."""
        if one.api == "completions" and await self.count_by_tokenize("one two") is not None:
            one = replace_fields(one, tokenizes=True)
        if await self.count(one, WORDS[0]) is None:
            note = "the endpoint does not report prompt tokens: each word counts as one token"
            return replace_fields(one, counts=False, notes=(*one.notes, note))
        for size in (len(WORDS), 64, 16):  # the context of a model may have only a few hundred tokens
            words = WORDS[:: len(WORDS) // size]
            once, twice = await self.count(one, *words), await self.count(one, *words, *words)
            if once is not None and twice is not None:
                return await self.with_single(one, words, 2 * once - twice, twice - once)
        raise ExternalFailure(f"{self.target.url} rejects prompts of more than 16 words")

    async def find_session_words(self, one: PreparedEndpoint) -> PreparedEndpoint:
        """By /tokenize if there is one: a session finds the tokens of the chat template by its first request."""
        if await self.count_by_tokenize("one two") is None:
            return await self.find_words(one)
        found = await self.find_words(replace_fields(one, api="completions"))
        return replace_fields(found, api="chat", tokenizes=False, overhead=0)

    async def with_single(
        self, one: PreparedEndpoint, words: Sequence[str], overhead: int, tokens: int
    ) -> PreparedEndpoint:
        if tokens != len(words):
            words = await self.find_single_token_words(one, words, overhead)
        if not words:
            note = "no common word is one token in this tokenizer: prompts may be longer or shorter than requested"
            return replace_fields(one, notes=(*one.notes, note))
        starters: Sequence[str] = words
        if one.api == "chat":
            some = words[:: max(1, len(words) // CHAT_STARTERS)]
            starters = [word for word in some if await self.count(one, word) == overhead + 1] or words
        return replace_fields(one, words=tuple(words), starters=tuple(starters), overhead=max(0, overhead))

    async def find_single_token_words(self, one: PreparedEndpoint, words: Sequence[str], overhead: int) -> list[str]:
        """The words that are one token each, found by bisection."""
        if await self.count(one, *words) == overhead + len(words):
            return list(words)
        if len(words) == 1:
            return []
        half = len(words) // 2
        return await self.find_single_token_words(one, words[:half], overhead) + await self.find_single_token_words(
            one, words[half:], overhead
        )

    async def count(self, one: PreparedEndpoint, *words: str) -> int | None:
        text = (" " if one.api == "completions" else "") + " ".join(words)
        if one.tokenizes:
            return await self.count_by_tokenize(text, one.model)
        exchange = await self.ask(one.request(self.target, text, 1, stream=False))
        return read(exchange).prompt_tokens if exchange.status == 200 else None

    async def count_by_tokenize(self, text: str, model: str | None = None) -> int | None:
        """Counts tokens with /tokenize. vLLM and llama.cpp name the field differently, so both names are sent."""
        body = {"model": model or self.target.model, "prompt": text, "content": text, "add_special": True}
        exchange = await self.ask(
            self.target.request("POST", "/tokenize", msgspec.json.encode({k: v for k, v in body.items() if v}))
        )
        if exchange.status != 200:
            return None
        try:
            document = msgspec.json.decode(b"".join(exchange.pieces))
            return int(document["count"]) if "count" in document else len(document["tokens"])
        except (*UNREADABLE, KeyError, TypeError, ValueError):
            return None

    async def rehearse_load(
        self, one: PreparedEndpoint, prompt_tokens: int, output_tokens: int, load: Load
    ) -> PreparedEndpoint:
        """Sends requests with the lengths of the load, to correct the prompt length and estimate the request time."""
        exact = False
        for number in range(TRIES):
            text = one.make_prompts(load, -1).make_text(number, prompt_tokens)
            asked = min(output_tokens, REHEARSED_TOKENS)
            exchange = await self.ask(one.request(self.target, text, asked))
            self.require_access(exchange)
            answer = read(exchange)
            if answer.outcome != "ok":
                raise ExternalFailure(
                    f"{self.target.url} failed to answer a prompt of {prompt_tokens} tokens",
                    cause=self.hide_key(answer.error),
                    hint="check that prompt and answer fit into the context of the model",
                )
            found = answer.prompt_tokens
            if found is None and one.counts:
                found = await self.count(one, *text.split())
            if found is None or found == prompt_tokens:
                exact = found is not None
                break
            one = replace_fields(one, overhead=max(0, one.overhead + found - prompt_tokens))
        notes = one.notes
        if one.counts and not exact:
            notes = (*notes, f"prompts do not have exactly {prompt_tokens} tokens")
        took = _extrapolate_request_s(exchange, answer, asked, output_tokens)
        return replace_fields(one, exact_prompt=exact, request_s=took, notes=notes)

    async def find_structured_output(self, one: PreparedEndpoint, load: Load) -> PreparedEndpoint:
        """Finds whether the endpoint calls tools and follows JSON schemas, if the scenario has such requests."""
        scenario = load.scenario
        if scenario is not None and scenario.tool_share:
            called = await self.ask_structured(one, CALL_TOKENS, tools=TOOLS, tool_choice="required")
            if called is not None and called.tool_name:
                free = await self.ask_structured(one, 1, tools=TOOLS, tool_choice="auto")
                one = replace_fields(one, tools="none" if free is None else "auto")
        needs_schema = scenario is not None and (scenario.schema_share or (scenario.tool_share and one.tools is None))
        if needs_schema:
            schema = make_schema_format(SCHEMA_TOKENS, one.words)
            text = await self.ask_structured(one, STRUCTURED_TOKENS, response_format=schema)
            one = replace_fields(one, schemas=text is not None and _is_object(text.text))
        notes = one.notes
        if scenario is not None and scenario.tool_share and one.tools is None:
            instead = "a JSON schema describes the call instead" if one.schemas else "such answers are free text"
            notes = (*notes, f"the endpoint does not support required tool calls: {instead}")
        elif scenario is not None and scenario.schema_share and not one.schemas:
            notes = (*notes, "the endpoint does not follow JSON schemas: such answers are free text")
        return replace_fields(one, notes=notes)

    async def ask_structured(self, one: PreparedEndpoint, tokens: int, **fields: object) -> StreamedAnswer | None:
        """The answer to a request with these fields; `None`: the endpoint rejected or failed it."""
        body = {
            "model": one.model, "messages": [{"role": "user", "content": " ".join(one.words[:8])}], **fields,
            **one.make_length_fields(tokens, exact=False),
        }  # fmt: skip
        exchange = await self.ask(self.target.request("POST", PATHS["chat"], msgspec.json.encode(body)))
        answer = read(exchange, keep_text=True)
        return answer if answer.outcome == "ok" else None

    async def rehearse_session(self, one: PreparedEndpoint, load: Load) -> PreparedEndpoint:
        """Sends the first request of a session, to find the tokens that the endpoint adds and the request time."""
        scenario = load.scenario
        system = scenario.system_tokens if scenario is not None else 0
        new = max(8, round(scenario.input_tokens.mean if scenario is not None else min(512, load.prompt_tokens)))
        output = round(scenario.output_tokens.mean) if scenario is not None else load.output_tokens
        messages = [{"role": "user", "content": one.make_prompts(load, -1).make_text(1, new + one.overhead)}]
        if system:
            messages.insert(0, {"role": "system", "content": " ".join(one.repeat_words(system))})
        asked = max(1, min(output, REHEARSED_TOKENS))
        fields: dict[str, object] = {"tools": TOOLS, "tool_choice": one.tools} if one.tools is not None else {}
        body = {"model": one.model, "messages": messages, **fields, **one.make_length_fields(asked)}
        exchange = await self.ask(self.target.request("POST", PATHS["chat"], msgspec.json.encode(body)))
        self.require_access(exchange)
        answer = read(exchange)
        if answer.outcome != "ok":
            raise ExternalFailure(
                f"{self.target.url} failed to answer the first request of a session of {system + new:,} tokens",
                cause=self.hide_key(answer.error),
                hint="check that it fits into the context of the model, and that the endpoint has the chat API",
            )
        overhead = one.overhead if answer.prompt_tokens is None else max(0, answer.prompt_tokens - system - new)
        took = _extrapolate_request_s(exchange, answer, asked, output)
        return replace_fields(one, overhead=overhead, request_s=took)

    async def ask(self, request: bytes) -> HttpExchange:
        try:
            return await ask(self.target, request, self.limit_s)
        except TimeoutError as error:
            cause = f"timeout after {self.limit_s:.0f} s"
            raise ExternalFailure(f"no response from {self.target.url}", cause=cause) from error
        except OSError as error:
            hint = "check that the endpoint runs and that the address is correct"
            raise ExternalFailure(f"cannot connect to {self.target.url}", cause=str(error), hint=hint) from error

    def require_access(self, exchange: HttpExchange) -> None:
        if exchange.status in (401, 403):
            hint = "pass its API key" if self.target.key is None else "check the API key"
            cause = f"HTTP {exchange.status}: {self.read_error(exchange)}"
            raise ExternalFailure(f"{self.target.url} denied access", cause=cause, hint=hint)

    def read_error(self, exchange: HttpExchange) -> str:
        return self.target.hide_key(read_error_text(b"".join(exchange.pieces)))

    def hide_key(self, text: str | None) -> str | None:
        return None if text is None else self.target.hide_key(text)


def _is_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except UNREADABLE:
        return False


def _extrapolate_request_s(
    exchange: HttpExchange, answer: StreamedAnswer, asked: int, output_tokens: int
) -> float | None:
    """The time of a whole answer, extrapolated from its beginning."""
    if not answer.text_ns or answer.last_ns is None:
        return (exchange.end_ns - exchange.sent_ns) / 1e9
    first_s = (answer.text_ns[0] - exchange.sent_ns) / 1e9
    rest_s = (answer.last_ns - answer.text_ns[0]) / 1e9
    return first_s + rest_s * (output_tokens - 1) / max(1, asked - 1)
