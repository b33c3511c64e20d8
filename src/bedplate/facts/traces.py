"""Readers of request traces. Each yields request shapes in bounded memory, whatever the size of the file."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn, TypeVar, cast

import msgspec

from bedplate.errors import ExternalFailure, UsageError, make_unreadable_error
from bedplate.values.workload import RequestShape, TraceFormat

MAX_TOKENS = 10**9
"""A row with more tokens is damaged."""
MAX_SECONDS = 1e12
MAX_LINE_BYTES = 4 * 2**20
MAX_CONVERSATION_CHARACTERS = 64 * 2**20
HEAD_BYTES = 64 * 1024
MOONCAKE_BLOCK_TOKENS = 512
BAILIAN_BLOCK_TOKENS = 16
T = TypeVar("T")
BYTES_PER_TOKEN = 4
TOKEN_RULE = f"one token for every {BYTES_PER_TOKEN} bytes of UTF-8"
TOKEN_ERROR = 0.25
EXAMPLES_KEPT = 5
ROWS_BEFORE_GIVING_UP = 1000
ANSWERERS = {"gpt", "assistant", "chatgpt", "bing", "bard", "model", "claude", "ai"}
TOOL_SPEAKERS = {"tool", "function", "observation"}
CONVERSATION_KEYS = ("conversations", "conversation", "messages", "messages_json", "trajectory")
SESSION_KEYS = ("session_id", "id", "conversation_id", "instance_id", "traj_id", "trajectory_id")
FORMATS_HINT = (
    "known: Azure's LLM inference trace and BurstGPT (CSV), Mooncake's, Qwen-Bailian's and GitHub Copilot's traces "
    "(JSONL), ShareGPT and trajectories of agents (JSON), bedplate's request log (JSONL)"
)


class BadRows:
    """Counts unreadable rows and keeps the first few as examples. Raises if most rows are bad."""

    def __init__(self, source: str) -> None:
        self.count = 0
        self.good = 0
        self.examples: list[str] = []
        self._source = source

    def add(self, line: int, why: str, unit: str = "line") -> None:
        self.count += 1
        if len(self.examples) < EXAMPLES_KEPT:
            self.examples.append(f"{unit} {line:,}: {why}")
        if self.count >= ROWS_BEFORE_GIVING_UP and self.good < self.count // 10:
            self.give_up("rows so far")

    def check(self) -> None:
        """Check at the end that most rows were readable; otherwise the format is wrong."""
        if not self.good and not self.count:
            raise UsageError(f"{self._source} holds no requests")
        if self.count > self.good:
            self.give_up("rows")

    def give_up(self, rows: str) -> NoReturn:
        whole = self.count + self.good
        raise UsageError(
            f"{self._source}: {self.count:,} of {whole:,} {rows} cannot be read",
            cause="; ".join(self.examples[:3]),
            hint=f"specify the format with --format; {FORMATS_HINT}",
        )


@contextmanager
def open_trace(path: Path | str) -> Iterator[io.BufferedReader]:
    """The bytes of a trace, decompressed while reading; `-` is standard input."""
    if str(path) == "-":
        yield _decompress(cast("io.BufferedReader", sys.stdin.buffer), "standard input")
        return
    try:
        file = Path(path).open("rb")  # noqa: SIM115
    except (OSError, ValueError) as error:
        raise make_unreadable_error(path, error) from error
    with file:
        yield _decompress(file, Path(path).name)


def _decompress(file: io.BufferedReader, name: str) -> io.BufferedReader:
    try:
        magic = file.peek(4)[:4]
    except OSError as error:
        raise make_unreadable_error(name, error) from error
    if magic.startswith(b"\x1f\x8b"):
        return io.BufferedReader(gzip.GzipFile(fileobj=file), 2**18)
    if magic == b"\x28\xb5\x2f\xfd":
        return _decompress_zstd(file, name)
    return file


def _decompress_zstd(file: BinaryIO, name: str) -> io.BufferedReader:
    try:  # part of Python since 3.14; before, an optional package
        from compression import zstd  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        try:
            import zstandard  # type: ignore[import-not-found,unused-ignore]
        except ImportError:
            hint = f"decompress it first: zstd -d {name}"
            raise UsageError(f"{name} is compressed with zstd, which this Python cannot read", hint=hint) from None
        return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(file), 2**18)
    return io.BufferedReader(zstd.ZstdFile(file), 2**18)


def detect_format(stream: io.BufferedReader, source: str) -> TraceFormat:
    """The format of a trace, from its beginning."""
    head = _peek_head(stream, source)
    if b"\0" in head:
        raise UsageError(f"{source} is not text", hint=FORMATS_HINT)
    text = head.decode("utf-8-sig", "replace").lstrip()
    if not text:
        raise UsageError(f"{source} is empty")
    if text.startswith(("[", "{")):
        for mark, kind in _JSON_MARKS:
            if f'"{mark}"' in text:
                return kind
    else:
        first = text.splitlines()[0].lower()
        if "contexttokens" in first and "generatedtokens" in first:
            return "azure"
        if "request tokens" in first and "response tokens" in first:
            return "burstgpt"
        if first.count(",") >= 2 and _parse_timestamp(first.partition(",")[0].encode()) is not None:
            return "azure"
    raise UsageError(
        f"{source} is not in a known trace format", cause=f"it begins with {text[:60]!r}", hint=FORMATS_HINT
    )


_JSON_MARKS: tuple[tuple[str, TraceFormat], ...] = (
    ("request/1", "bedplate"),
    ("started_s", "bedplate"),
    ("llm_calls", "copilot"),
    ("parent_chat_id", "bailian"),
    ("hash_ids", "mooncake"),
    ("input_length", "mooncake"),
    ("conversations", "sharegpt"),
    ("conversation", "sharegpt"),
    ("messages", "sharegpt"),
    ("messages_json", "sharegpt"),
    ("trajectory", "sharegpt"),
)


def _peek_head(stream: io.BufferedReader, source: str) -> bytes:
    try:
        return stream.peek(HEAD_BYTES)[:HEAD_BYTES]
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{source} cannot be decompressed", cause=str(error)) from error


def parse_trace(stream: io.BufferedReader, kind: TraceFormat, bad: BadRows) -> Iterator[RequestShape]:
    """Every request of a trace. Unreadable rows go to `bad`."""
    readers: dict[TraceFormat, Callable[[io.BufferedReader, BadRows], Iterator[RequestShape]]] = {
        "azure": read_azure,
        "mooncake": read_mooncake,
        "sharegpt": read_sharegpt,
        "bedplate": read_requests,
        "burstgpt": read_burstgpt,
        "bailian": read_bailian,
        "copilot": read_copilot,
    }
    try:
        for shape in readers[kind](stream, bad):
            bad.good += 1
            yield shape
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        # The rows up to here are valid; report the damage.
        bad.add(bad.good + bad.count + 1, f"the compressed file is damaged or cut short here: {error}", unit="row")
    except OSError as error:
        raise ExternalFailure("reading the trace failed", cause=error.strerror or str(error)) from error


def read_lines(stream: io.BufferedReader, bad: BadRows) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers. A line that is too long for a row is skipped in pieces."""
    number = 0
    readline = stream.readline
    while line := readline(MAX_LINE_BYTES):
        number += 1
        if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
            bad.add(number, f"longer than {MAX_LINE_BYTES:,} bytes")
            while (rest := readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                pass
            continue
        yield number, line


# Azure


def read_azure(stream: io.BufferedReader, bad: BadRows) -> Iterator[RequestShape]:
    """Azure's LLM inference traces of 2023, 2024 and 2025: CSV with columns in any order."""
    columns = (0, 1, 2)
    clock = _TimestampReader()
    for number, line in read_lines(stream, bad):
        fields = line.split(b",")
        if number == 1 and (found := _find_azure_columns(fields)) is not None:
            columns = found
            continue
        try:
            started_s = clock.read(fields[columns[0]])
            prompt, output = int(fields[columns[1]]), int(fields[columns[2]])
        except (ValueError, IndexError):
            if line.strip():
                bad.add(number, _escape_line(line))
            continue
        if not (0 <= prompt <= MAX_TOKENS and 0 <= output <= MAX_TOKENS):
            bad.add(number, f"out of range: {_escape_line(line)}")
            continue
        yield RequestShape(started_s=started_s, prompt_tokens=prompt, output_tokens=output)


def _find_azure_columns(fields: list[bytes]) -> tuple[int, int, int] | None:
    names = [field.decode("utf-8-sig", "replace").strip().strip('"').lower() for field in fields]
    try:
        return names.index("timestamp"), names.index("contexttokens"), names.index("generatedtokens")
    except ValueError:
        return None


class _TimestampReader:
    """Reads timestamps. It caches the minute and parses only the seconds of timestamps in the same minute."""

    def __init__(self) -> None:
        self._minute = b""
        self._base_s = 0.0

    def read(self, text: bytes) -> float:
        """Seconds since 1970. Raises ValueError if the text is not a timestamp."""
        minute, rest = text[:17], text[17:].removesuffix(b"+00:00").removesuffix(b"Z")
        if minute == self._minute:
            try:
                seconds = float(rest)
            except ValueError:  # possibly another time zone, which changes the minute
                return self._read_whole(text)
            if 0 <= seconds < 61:
                return self._base_s + seconds
            raise ValueError(text)
        began = self._read_whole(text)
        if minute.endswith(b":") and rest[:2].isdigit() and rest.replace(b".", b"", 1).isdigit():
            self._minute, self._base_s = minute, began - began % 60
        return began

    def _read_whole(self, text: bytes) -> float:
        moment = _parse_timestamp(text)
        if moment is None:
            raise ValueError(text)
        return moment


def _parse_timestamp(text: bytes) -> float | None:
    """Seconds since 1970 of an ISO timestamp; without a zone, UTC."""
    try:
        moment = datetime.fromisoformat(text.decode("utf-8-sig").strip().strip('"'))
    except ValueError:
        return None
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()


# BurstGPT


def read_burstgpt(stream: io.BufferedReader, bad: BadRows) -> Iterator[RequestShape]:
    """BurstGPT: seconds and lengths; since version 2 also the session of a conversation and the request time.

    A request without response tokens failed and is left out.
    """
    columns: dict[str, int] = {}
    for number, line in read_lines(stream, bad):
        fields = [field.strip().strip('"') for field in line.decode("utf-8-sig", "replace").strip().split(",")]
        if not columns:
            columns = {name.lower().replace(" ", ""): place for place, name in enumerate(fields)}
            continue
        try:
            started_s = float(fields[columns["timestamp"]])
            prompt, output = int(fields[columns["requesttokens"]]), int(fields[columns["responsetokens"]])
            elapsed = fields[columns["elapsedtime"]] if "elapsedtime" in columns else ""
            duration_ms = float(elapsed) * 1000 if elapsed else None
            session = fields[columns["sessionid"]] if "sessionid" in columns else ""
        except (ValueError, IndexError, KeyError):
            if line.strip():
                bad.add(number, _escape_line(line))
            continue
        if not (0 <= prompt <= MAX_TOKENS and 0 <= output <= MAX_TOKENS and abs(started_s) <= MAX_SECONDS):
            bad.add(number, f"out of range: {_escape_line(line)}")
            continue
        if output:
            yield RequestShape(
                started_s=started_s, prompt_tokens=prompt, output_tokens=output, duration_ms=duration_ms,
                session=session or None,
            )  # fmt: skip


# JSON lines


class _MooncakeRow(msgspec.Struct):
    input_length: int
    output_length: int
    timestamp: float | None = None
    hash_ids: tuple[int | str, ...] = ()
    session_id: str | int | None = None
    delay: float | None = None


def read_mooncake(stream: io.BufferedReader, bad: BadRows) -> Iterator[RequestShape]:
    """Mooncake's traces: milliseconds, lengths, and ids of 512-token blocks. Equal ids mean equal prefixes.

    AIPerf's variant adds `session_id`, and `delay`, the milliseconds after the session's previous answer.
    """
    for number, line, row in _decode_lines(stream, bad, _MooncakeRow):
        started_s = None if row.timestamp is None else row.timestamp / 1000
        if started_s is None and row.session_id is None:
            bad.add(number, f"neither a timestamp nor a session: {_escape_line(line)}")
            continue
        counts = (row.input_length, row.output_length)
        if min(counts) < 0 or max(counts) > MAX_TOKENS or abs(started_s or 0.0) > MAX_SECONDS:
            bad.add(number, f"out of range: {_escape_line(line)}")
            continue
        yield RequestShape(
            started_s=started_s,
            prompt_tokens=row.input_length,
            output_tokens=row.output_length,
            prefix_hashes=row.hash_ids,
            prefix_block_tokens=MOONCAKE_BLOCK_TOKENS if row.hash_ids else None,
            session=None if row.session_id is None else str(row.session_id),
            wait_s=None if row.delay is None else max(0.0, row.delay / 1000),
        )


class _BailianRow(msgspec.Struct):
    chat_id: int
    parent_chat_id: int
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int | str, ...] = ()


def read_bailian(stream: io.BufferedReader, bad: BadRows) -> Iterator[RequestShape]:
    """Qwen-Bailian's traces: seconds, lengths, ids of 16-token blocks, and the request that each one continues."""
    roots: dict[int, int] = {}
    for number, line, row in _decode_lines(stream, bad, _BailianRow):
        counts = (row.input_length, row.output_length)
        if min(counts) < 0 or max(counts) > MAX_TOKENS or abs(row.timestamp) > MAX_SECONDS:
            bad.add(number, f"out of range: {_escape_line(line)}")
            continue
        root = roots[row.chat_id] = roots.get(row.parent_chat_id, row.chat_id)
        yield RequestShape(
            started_s=row.timestamp,
            prompt_tokens=row.input_length,
            output_tokens=row.output_length,
            prefix_hashes=row.hash_ids,
            prefix_block_tokens=BAILIAN_BLOCK_TOKENS if row.hash_ids else None,
            session=str(root),
        )


class _CopilotTokens(msgspec.Struct):
    prompt: int
    completion: int
    cached: int | None = None


class _CopilotCall(msgspec.Struct):
    timestamp: str
    tokens: _CopilotTokens
    duration_ms: float | None = None
    initiator_type: str = "user"


class _CopilotTurn(msgspec.Struct):
    llm_calls: tuple[_CopilotCall, ...] = ()


class _CopilotSession(msgspec.Struct):
    session_id: str
    turns: tuple[_CopilotTurn, ...] = ()


def read_copilot(stream: io.BufferedReader, bad: BadRows) -> Iterator[RequestShape]:
    """GitHub Copilot's coding agent traces: one session with its turns and LLM calls in each line."""
    for number, _, session in _decode_lines(stream, bad, _CopilotSession, unit="session"):
        for call in (call for turn in session.turns for call in turn.llm_calls):
            started_s, counts = _parse_timestamp(call.timestamp.encode()), (call.tokens.prompt, call.tokens.completion)
            if started_s is None or min(counts) < 0 or max(counts) > MAX_TOKENS:
                bad.add(number, f"a call without a time or with impossible counts in {session.session_id[:20]!r}")
                continue
            if call.tokens.completion:
                yield RequestShape(
                    started_s=started_s,
                    prompt_tokens=call.tokens.prompt,
                    output_tokens=call.tokens.completion,
                    cached_tokens=call.tokens.cached if call.tokens.cached and call.tokens.cached >= 0 else None,
                    duration_ms=call.duration_ms if call.duration_ms and call.duration_ms >= 0 else None,
                    session=session.session_id,
                    after_tool=call.initiator_type == "agent",
                )


def read_requests(stream: io.BufferedReader, bad: BadRows) -> Iterator[RequestShape]:
    """bedplate's own request log."""
    for number, line, shape in _decode_lines(stream, bad, RequestShape):
        most_tokens = max(shape.prompt_tokens or 0, shape.output_tokens or 0, shape.prefix_block_tokens or 0)
        most_s = max(abs(shape.started_s or 0), (shape.duration_ms or 0) / 1000)
        if most_tokens > MAX_TOKENS or most_s > MAX_SECONDS:
            bad.add(number, f"out of range: {_escape_line(line)}")
            continue
        yield shape


# ShareGPT


def read_sharegpt(stream: io.BufferedReader, bad: BadRows) -> Iterator[RequestShape]:
    """Each answer in a conversation is a request; the turns before it are its prompt.

    Conversations contain text without token counts, so tokens are estimated. Everything up to an earlier answer of the
    same conversation, including that answer, counts as cached prefix.
    """
    for number, conversation in read_json_values(stream, bad):
        turns = _count_turns(conversation)
        if turns is None:
            bad.add(number, "no conversations or messages with a speaker and text", unit="conversation")
            continue
        session = _find_session_name(conversation, number)
        before = held = 0
        speaker = ""
        for turn in turns:
            if turn.answers and before:
                yield RequestShape(
                    prompt_tokens=before, output_tokens=turn.tokens, cached_tokens=held, session=session,
                    after_tool=speaker in TOOL_SPEAKERS,
                )  # fmt: skip
                held = before + turn.tokens
            before += turn.tokens
            speaker = turn.speaker


class _CountedTurn(NamedTuple):
    speaker: str
    tokens: int

    @property
    def answers(self) -> bool:
        return self.speaker in ANSWERERS


def _find_session_name(conversation: dict[str, object], number: int) -> str:
    for key in SESSION_KEYS:
        if isinstance(conversation.get(key), str | int):
            return str(conversation[key])
    return str(number)


def _count_turns(conversation: object) -> list[_CountedTurn] | None:
    """The turns with their estimated tokens; tool calls count as part of the answer that has them."""
    if not isinstance(conversation, dict):
        return None
    turns = next((conversation[key] for key in CONVERSATION_KEYS if key in conversation), None)
    if isinstance(turns, str):  # some data sets store the messages as JSON in a text
        try:
            turns = json.loads(turns)
        except (ValueError, RecursionError):
            return None
    if not isinstance(turns, list):
        return None
    found = []
    for turn in turns:
        if not isinstance(turn, dict):
            return None
        speaker = turn.get("from", turn.get("role", turn.get("user")))
        text = next((turn[key] for key in ("value", "content", "text") if turn.get(key) is not None), None)
        called = turn.get("tool_calls") or turn.get("tool_calls_json")
        if not isinstance(speaker, str) or (text is None and not called):
            return None
        tokens = sum(_estimate_part(part) for part in (text, called) if part is not None)
        found.append(_CountedTurn(speaker.lower(), tokens))
    return found


def _estimate_part(part: object) -> int:
    """Text, or parts of a message as objects, of which the text counts."""
    if isinstance(part, str):
        return estimate_tokens(part)
    if isinstance(part, list):
        return sum(_estimate_part(one.get("text", one) if isinstance(one, dict) else one) for one in part)
    return estimate_tokens(json.dumps(part, ensure_ascii=False))


def estimate_tokens(text: str) -> int:
    """Estimate: four bytes of UTF-8 per token, which is four English letters or a little over one Chinese character."""
    return -(-len(text.encode("utf-8", "replace")) // BYTES_PER_TOKEN)


def read_json_values(stream: io.BufferedReader, bad: BadRows) -> Iterator[tuple[int, Any]]:
    """The elements of a JSON array, or consecutive values, without holding all of them in memory."""
    decoder = json.JSONDecoder()
    text = codecs.getincrementaldecoder("utf-8-sig")("replace")
    buffer, at, number, ended, ask = "", 0, 0, False, 2**18
    while True:
        at = _skip_separators(buffer, at, first=number == 0)
        if at < len(buffer):
            try:
                value, at = decoder.raw_decode(buffer, at)
            except (ValueError, RecursionError) as error:
                if ended or len(buffer) - at > MAX_CONVERSATION_CHARACTERS or isinstance(error, RecursionError):
                    bad.add(number + 1, f"{error}; the rest could not be read", unit="conversation")
                    return
            else:
                number += 1
                ask = 2**18
                yield number, value
                continue
        elif ended:
            return
        chunk = stream.read(ask)
        ended = not chunk
        buffer, at = buffer[at:] + text.decode(chunk, ended), 0
        ask = min(2 * ask, 2**24)  # so that a long conversation is not parsed again for every small piece


def _skip_separators(buffer: str, at: int, *, first: bool) -> int:
    skipped = " \t\r\n,[" if first else " \t\r\n,]"
    while at < len(buffer) and buffer[at] in skipped:
        at += 1
    return at


def _decode_lines(
    stream: io.BufferedReader, bad: BadRows, kind: type[T], unit: str = "line"
) -> Iterator[tuple[int, bytes, T]]:
    """The JSON value of each line with its number and text; lines that are not one are added to `bad`."""
    decode = msgspec.json.Decoder(kind).decode
    for number, line in read_lines(stream, bad):
        try:
            value = decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if line.strip():
                bad.add(number, f"{error}: {_escape_line(line)}", unit)
            continue
        yield number, line, value


def _escape_line(line: bytes) -> str:
    text = line.decode("utf-8", "replace").strip()
    return repr(text if len(text) <= 60 else text[:57] + "…")
