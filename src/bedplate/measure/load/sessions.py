"""Sessions: conversations that grow by the real answers. The next request is built when an answer ends, before its due
time, from parts that are already encoded."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate

import msgspec

from bedplate.facts.scenarios import draw_session
from bedplate.measure.load.answers import StreamedAnswer, read
from bedplate.measure.load.preparing import PreparedEndpoint
from bedplate.measure.load.target import PATHS, LoadTarget
from bedplate.measure.load.tools import TOOLS_JSON, make_schema_format
from bedplate.measure.load.trace_sessions import group_sessions, limit_sessions
from bedplate.measure.load.wire import HttpExchange
from bedplate.values.run import Load, SessionOutcome, SessionResult
from bedplate.values.scenario import SessionPlan, SessionTurn
from bedplate.values.workload import RequestShape

POOL_WORDS = 200_000
"""Words from which the messages of a round are cut."""
CANDIDATES = 8
"""Sessions from which one that is under way is drawn. Long ones are more likely to be found under way."""
TEMPLATE_TOKENS = 6
"""Tokens that a chat template adds to a message, at most, before the endpoint has counted any."""
SPARE_TOKENS = 64
"""Tokens of the chat template that a further turn may add."""
BUILT_SESSIONS = 4096


class Conversation:
    """One session while it is sent."""

    __slots__ = (
        "answering_ns",
        "counted",
        "ended_ns",
        "joined",
        "measured",
        "messages",
        "number",
        "outcome",
        "plan",
        "started_ns",
        "turn",
    )

    def __init__(self, number: int, plan: SessionPlan) -> None:
        self.number = number
        self.plan = plan
        self.messages: list[bytes] = []
        """JSON objects, in order."""
        self.turn = 0
        """Index of the turn that is sent next or is in flight."""
        self.joined = 0
        """Turns that were over before it began."""
        self.counted = 0
        """Tokens of the conversation after the last answer, as counted by the endpoint; 0: not reported."""
        self.started_ns = 0
        self.ended_ns = 0
        self.answering_ns = 0
        self.measured = False
        self.outcome: SessionOutcome = "unfinished"

    def make_result(self) -> SessionResult:
        answered = self.turn + (self.outcome == "complete" or self.outcome == "context")
        return SessionResult(
            session=self.number,
            turns=answered - self.joined,
            planned_turns=len(self.plan.turns),
            duration_s=max(0, self.ended_ns - self.started_ns) / 1e9,
            answering_s=self.answering_ns / 1e9,
            outcome=self.outcome,
            joined=self.joined > 0,
        )


class MessageTexts:
    """Text for messages: cut from one sequence of words of one token each, so that a message costs one copy."""

    def __init__(self, words: Sequence[str], seed: int, round_number: int) -> None:
        self._shared = _encode_words(random.Random(f"{seed}/system").choices(words, k=POOL_WORDS // 8))  # noqa: S311
        self._pool = _encode_words(
            random.Random(f"{seed}/{round_number}/pool").choices(words, k=POOL_WORDS)  # noqa: S311
        )

    def cut_shared(self, count: int) -> bytes:
        """The text that is the same in all sessions and rounds."""
        return _cut(*self._shared, 0, count)

    def cut(self, rng: random.Random, count: int) -> bytes:
        text, ends = self._pool
        count = min(count, len(ends) - 1)
        return _cut(text, ends, rng.randrange(len(ends) - count), count)


def _encode_words(words: Sequence[str]) -> tuple[bytes, list[int]]:
    """The words with a space before each, and the position after each."""
    return "".join(f" {word}" for word in words).encode("ascii"), [0, *accumulate(len(word) + 1 for word in words)]


def _cut(text: bytes, ends: list[int], first: int, count: int) -> bytes:
    return text[ends[first] : ends[min(first + count, len(ends) - 1)]].strip()


class SessionFactory:
    """The requests of sessions, of a scenario or a trace. It has the interface of `RequestFactory`."""

    def __init__(
        self,
        target: LoadTarget,
        load: Load,
        prepared: PreparedEndpoint,
        round_number: int,
        shapes: Sequence[RequestShape] = (),
    ) -> None:
        self._target = target
        self._load = load
        self._prepared = prepared
        self._origin = f"{load.seed}/{round_number}"
        self._texts = MessageTexts(prepared.words, load.seed, round_number)
        self._prompts = prepared.make_prompts(load, round_number)
        self._context = load.scenario.context_tokens if load.scenario is not None else prepared.context_tokens
        self._traced: list[SessionPlan] = []
        self.notes: tuple[str, ...] = ()
        if shapes:
            whole = group_sessions(shapes, load)
            self._traced = limit_sessions(whole, self._context, SPARE_TOKENS + prepared.overhead)
            shortened = sum(map(_count_turns, whole)) - sum(map(_count_turns, self._traced))
            if shortened:
                self.notes = (f"{shortened:,} requests of the trace do not fit into the context and are left out",)
        self._plans: list[SessionPlan] = []
        self._pending: dict[int, bytes] = {}
        self._count = 0
        self._joining = load.sessions or 0 if load.arrivals == "sessions" else 0
        self.to_join = self._joining
        """Sessions under way at the beginning whose first request has not ended."""
        self.zero_ns = 0
        """When a trace begins."""
        self.conversations: list[Conversation] = []
        self.ended = 0
        """Sessions that ended by themselves and were measured."""
        self._head = msgspec.json.encode({"model": prepared.model})[:-1] + b',"messages":['
        self._uses_tools = prepared.tools is not None and load.scenario is not None and load.scenario.tool_share > 0

    def build(self, count: int) -> None:
        """Draws the plans of sessions before the measurement."""
        while len(self._plans) < min(count, BUILT_SESSIONS):
            self._plans.append(self._draw_plan(len(self._plans)))

    def get(self, number: int) -> bytes:
        return self._pending[number]

    def list_starts_s(self) -> list[float]:
        """When the sessions of a trace begin."""
        return [session.starts_s or 0.0 for session in self._traced]

    def make_exchange(self, number: int, due_ns: int) -> HttpExchange:
        """The first request of a session. A negative number is a warm-up request of a replay."""
        plan = self._choose_plan(number)
        conversation = Conversation(number, plan)
        if plan.system_tokens:
            room = max(1, plan.system_tokens - self._prepared.overhead)
            conversation.messages.append(_make_message(b"system", self._texts.cut_shared(room)))
        if 0 <= number < self._joining:
            self._join(conversation, self._choose_position(number, plan))
        if number >= 0:
            self.conversations.append(conversation)
        return self._make_turn(conversation, due_ns)

    def follow(self, exchange: HttpExchange) -> tuple[HttpExchange, int] | None:
        """The next request of the same session and its due time; `None`: the session is over."""
        conversation = exchange.session
        if conversation is None:
            return None
        self._pending.pop(exchange.index, None)
        if conversation.turn == conversation.joined and 0 <= conversation.number < self._joining:
            self.to_join -= 1
        answer = exchange.answer = read(exchange, keep_text=True)
        conversation.started_ns = conversation.started_ns or exchange.sent_ns
        conversation.ended_ns = exchange.end_ns
        conversation.answering_ns += exchange.end_ns - exchange.sent_ns
        conversation.measured |= exchange.measured
        if answer.outcome != "ok":
            self._end(conversation, "failed")
            return None
        if conversation.turn + 1 == len(conversation.plan.turns):
            self._end(conversation, "complete")
            return None
        before, turn = conversation.plan.turns[conversation.turn], conversation.plan.turns[conversation.turn + 1]
        conversation.counted = (answer.prompt_tokens or 0) + (answer.output_tokens or 0)
        if self._context is not None and conversation.counted + _count_turn(turn) + SPARE_TOKENS > self._context:
            self._end(conversation, "context")
            return None
        conversation.messages.append(_make_answer(answer, conversation.turn, before))
        conversation.turn += 1
        if turn.wait_s is not None:
            due_ns = exchange.end_ns + int(turn.wait_s * 1e9)
        else:
            due_ns = max(exchange.end_ns, self.zero_ns + int((turn.at_s or 0.0) * 1e9))
        has_call = before.calls_tool and bool(answer.tool_name) and _is_json(answer.tool_arguments)
        return self._make_turn(conversation, due_ns, to_call=has_call), due_ns

    def _end(self, conversation: Conversation, outcome: SessionOutcome) -> None:
        conversation.outcome = outcome
        self.ended += conversation.measured

    def _choose_plan(self, number: int) -> SessionPlan:
        if number < 0:
            new, output = self._load.prompt_tokens, min(16, self._load.output_tokens)
            return SessionPlan(turns=(SessionTurn(new_tokens=new, output_tokens=output),))
        if number < self._joining and not self._traced:
            return self._choose_long_plan(number)
        return self._plans[number] if number < len(self._plans) else self._draw_plan(number)

    def _choose_long_plan(self, number: int) -> SessionPlan:
        """A session that is under way at some moment is long more often than one that begins."""
        rng = random.Random(f"{self._origin}/{number}/long")  # noqa: S311
        found = [self._draw_plan(-1 - number * CANDIDATES - one) for one in range(CANDIDATES)]
        return rng.choices(found, weights=[len(plan.turns) for plan in found])[0]

    def _draw_plan(self, number: int) -> SessionPlan:
        if self._traced:
            return self._traced[number % len(self._traced)]
        if self._load.scenario is None:
            raise ValueError("sessions need a scenario or a trace")
        return draw_session(self._load.scenario, f"{self._origin}/{number}")

    def _choose_position(self, number: int, plan: SessionPlan) -> int:
        """The turns of a session under way that are over. Its next request fits into the context."""
        position = random.Random(f"{self._origin}/{number}/position").randrange(len(plan.turns))  # noqa: S311
        while position and self._context is not None:
            template = TEMPLATE_TOKENS * 2 * position
            if plan.prompt_tokens[position] + plan.turns[position].output_tokens + template <= self._context:
                break
            position -= 1
        return position

    def _join(self, conversation: Conversation, turns: int) -> None:
        """Fills the first turns of a session under way with generated answers."""
        for index in range(turns):
            turn = conversation.plan.turns[index]
            self._append_input(conversation, turn, index)
            text = self._texts.cut(self._make_rng(conversation, f"answer {index}"), turn.output_tokens)
            conversation.messages.append(_make_message(b"assistant", text))
        conversation.turn = conversation.joined = turns

    def _make_rng(self, conversation: Conversation, part: str) -> random.Random:
        return random.Random(f"{self._origin}/{conversation.number}/{part}")  # noqa: S311

    def _append_input(
        self, conversation: Conversation, turn: SessionTurn, index: int, *, to_call: bool = False
    ) -> None:
        """Appends what the user says, or what a tool returns."""
        count = turn.new_tokens
        rng = self._make_rng(conversation, f"turn {index}")
        if turn.restarts:
            del conversation.messages[:]
        if not conversation.messages or index == 0:
            # The number makes the beginning of each conversation unique.
            if not conversation.messages:
                count = max(1, count - self._prepared.overhead)
            first = " ".join(self._prompts.encode_number(abs(conversation.number), first=True)[:count]).encode()
            text = first + b" " + self._texts.cut(rng, max(1, count - 4))
        else:
            text = self._texts.cut(rng, count)
        if to_call:
            conversation.messages.append(b'{"role":"tool","tool_call_id":"call_%d","content":"%b"}' % (index - 1, text))
        else:
            conversation.messages.append(_make_message(b"user", text))

    def _make_turn(self, conversation: Conversation, due_ns: int, *, to_call: bool = False) -> HttpExchange:
        index = conversation.turn
        turn = conversation.plan.turns[index]
        self._append_input(conversation, turn, index, to_call=to_call)
        number = self._count if conversation.number >= 0 else -1 - self._count
        self._count += 1
        exchange = HttpExchange(number, due_ns, 0, turn.output_tokens)
        exchange.session, exchange.turn = conversation, index
        self._pending[number] = self._target.request("POST", PATHS["chat"], self._make_body(conversation, turn))
        return exchange

    def _make_body(self, conversation: Conversation, turn: SessionTurn) -> bytes:
        prepared = self._prepared
        fields: dict[str, object] = prepared.make_length_fields(turn.output_tokens, exact=not _is_structured(turn))
        if self._uses_tools:
            fields["tools"] = msgspec.Raw(TOOLS_JSON)
            fields["tool_choice"] = "required" if turn.calls_tool else prepared.tools
        if prepared.schemas and (turn.schema or (turn.calls_tool and not self._uses_tools)):
            fields["response_format"] = make_schema_format(turn.output_tokens, prepared.words)
        return self._head + b",".join(conversation.messages) + b"]," + msgspec.json.encode(fields)[1:]


def _count_turns(plan: SessionPlan) -> int:
    return len(plan.turns)


def _is_structured(turn: SessionTurn) -> bool:
    return turn.schema or turn.calls_tool


def _count_turn(turn: SessionTurn) -> int:
    return turn.new_tokens + turn.output_tokens


def _make_message(role: bytes, text: bytes) -> bytes:
    """A message whose text needs no escapes."""
    return b'{"role":"%b","content":"%b"}' % (role, text)


def _make_answer(answer: StreamedAnswer, index: int, turn: SessionTurn) -> bytes:
    """The endpoint's own answer as a message. An incomplete tool call becomes text, which every endpoint accepts."""
    message: dict[str, object] = {"role": "assistant", "content": answer.text}
    if turn.calls_tool and answer.tool_name:
        if _is_json(answer.tool_arguments):
            called = {"name": answer.tool_name, "arguments": answer.tool_arguments}
            message["tool_calls"] = [{"id": f"call_{index}", "type": "function", "function": called}]
        else:
            message["content"] = answer.text + answer.tool_arguments
    if not message["content"] and "tool_calls" not in message:
        message["content"] = " "  # some chat templates reject an empty message
    return msgspec.json.encode(message)


def _is_json(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
