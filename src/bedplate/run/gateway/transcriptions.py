"""Transcription requests (multipart/form-data) and their answers. Pure.

Engines are asked for JSON, whatever format the client wants: text and subtitles do not report usage, and not every
engine writes them. The gateway makes these formats from the JSON.
"""

from __future__ import annotations

import re
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from bedplate.run.gateway.request_checks import RequestMistake
from bedplate.run.gateway.sse import UNREADABLE, RequestFields, TokenUsage
from bedplate.run.gateway.tenants import Demand

AudioFormat = Literal["json", "text", "srt", "verbose_json", "vtt"]
FORMATS: tuple[AudioFormat, ...] = get_args(AudioFormat)
TOKENS_PER_S = 50
"""Positions of Whisper's encoder in one second of audio: what a second counts in limits and usage."""
COMPRESSED_BYTES_S = 8_000
"""64 kbit/s: the length of compressed audio is estimated by this rate."""
MAX_PARTS = 64
_BOUNDARY = re.compile(
    rb"multipart/form-data[^\r\n]*;[ \t]*boundary=(?:\"([^\"]{1,70})\"|([^\s;\"]{1,70}))", re.IGNORECASE
)
_DISPOSITION = re.compile(rb"\ncontent-disposition[ \t]*:([^\r\n]*)", re.IGNORECASE)
_FORM_DATA = re.compile(
    rb"""[ \t]*form-data[ \t]*;[ \t]*name=(?:"([^"\\]*)"|([^\s;"\\]+))"""
    rb"""([ \t]*;[ \t]*filename=(?:"(?:[^"\\]|\\.)*"|[^\s;"\\]+))?([ \t]*;[ \t]*filename\*=[^\s;"]+)?[ \t]*""",
    re.IGNORECASE,
)
_ASKED: dict[str, bytes] = {"text": b"json", "srt": b"verbose_json", "vtt": b"verbose_json"}
"""What an engine is asked for instead of these formats."""


class FormPart(NamedTuple):
    """A field of a form: where its value is in the body."""

    begin: int
    end: int
    is_file: bool


class TranscriptionRequest(NamedTuple):
    asked: RequestFields
    """With the format of the answer as its `response_format`."""
    demand: Demand
    body: bytes
    """As an engine gets it."""


class _Segment(msgspec.Struct):
    start: float
    end: float
    text: str


class _Transcript(msgspec.Struct):
    text: str
    duration: Any = None
    usage: Any = None
    segments: list[_Segment] | None = None


_decode_transcript = msgspec.json.Decoder(_Transcript).decode


def read_transcription(content_type: bytes, body: bytes) -> TranscriptionRequest:
    """Raises `RequestMistake`."""
    parts = _read_parts(content_type, body)
    audio = parts.get("file")
    if audio is None or not audio.is_file:
        raise RequestMistake("file must be an audio file of the form", "invalid_request", "file")
    if audio.begin == audio.end:
        raise RequestMistake("the audio file is empty", "invalid_request", "file")
    texts = {name: _read_text(name, body, part) for name, part in parts.items() if name in ("model", "stream")}
    if texts.get("stream", "false").lower() not in ("false", "0", ""):
        raise RequestMistake("stream is not supported for transcriptions", "unsupported_parameter", "stream")
    form = parts.get("response_format")
    wanted = _read_text("response_format", body, form) if form is not None else "json"
    if wanted not in FORMATS:
        known = ", ".join(FORMATS)
        raise RequestMistake(f"response_format must be one of {known}", "invalid_response_format", "response_format")
    asked = RequestFields(model=texts.get("model") or None, response_format=wanted)
    demand = Demand(1, 1, estimate_audio_tokens(body[audio.begin : audio.begin + 64], audio.end - audio.begin), 0)
    if form is not None and wanted in _ASKED:
        body = body[: form.begin] + _ASKED[wanted] + body[form.end :]
    return TranscriptionRequest(asked, demand, body)


def set_form_model(content_type: bytes, body: bytes, name: str) -> bytes:
    """The form with another name of the model."""
    part = _read_parts(content_type, body).get("model")
    if part is not None:
        return body[: part.begin] + name.encode() + body[part.end :]
    mark = b"--" + _read_boundary(content_type)
    head = b'%b\r\nContent-Disposition: form-data; name="model"\r\n\r\n%b\r\n' % (mark, name.encode())
    at = body.index(mark)
    return body[:at] + head + body[at:]


def estimate_audio_tokens(beginning: bytes, num_bytes: int) -> int:
    """Of a WAV file by the rate in its header, otherwise by a usual rate of compressed audio."""
    rate = COMPRESSED_BYTES_S
    if beginning[:4] == b"RIFF" and beginning[8:16] == b"WAVEfmt " and len(beginning) >= 32:
        rate = int.from_bytes(beginning[28:32], "little") or rate
    return round(TOKENS_PER_S * num_bytes / rate)


def format_answer(body: bytes, wanted: str, usage: TokenUsage) -> tuple[bytes, bytes] | None:
    """Reads the usage of an engine's JSON; returns the answer and its content type, or `None` if it is another format.

    The usage has tokens, or only the duration of the audio.
    """
    try:
        found = _decode_transcript(body)
    except UNREADABLE:
        return None
    counts = found.usage if isinstance(found.usage, dict) else {}
    if type(counts.get("input_tokens")) is int:
        usage.prompt_tokens, usage.reports = max(0, counts["input_tokens"]), 1
    elif (seconds := _read_number(counts.get("seconds", found.duration))) is not None:
        usage.prompt_tokens, usage.reports = round(TOKENS_PER_S * seconds), 1
    if type(counts.get("output_tokens")) is int:
        usage.completion_tokens = max(0, counts["output_tokens"])
    if wanted in ("json", "verbose_json"):
        return body, b"application/json"
    text = found.text + "\n" if wanted == "text" else _format_subtitles(found.segments or [], wanted)
    return text.encode(), b"text/plain; charset=utf-8"


def _read_boundary(content_type: bytes) -> bytes:
    found = _BOUNDARY.match(content_type)
    if found is None:
        message = "a transcription request must be multipart/form-data with a boundary, as OpenAI's clients send it"
        raise RequestMistake(message, "bad_body")
    return bytes(found[1] or found[2])


def _read_parts(content_type: bytes, body: bytes) -> dict[str, FormPart]:
    mark = b"--" + _read_boundary(content_type)
    invalid = RequestMistake("the form is not valid multipart/form-data: is a part or its end missing?", "bad_body")
    at = 0 if body.startswith(mark) else body.find(b"\r\n" + mark) + 2
    if not body.startswith(mark, at):
        raise invalid
    parts: dict[str, FormPart] = {}
    for _ in range(MAX_PARTS + 1):
        at += len(mark)
        if body.startswith(b"--", at):
            return parts
        head_end, end = body.find(b"\r\n\r\n", at), body.find(b"\r\n" + mark, at)
        if not body.startswith(b"\r\n", at) or not 0 <= head_end < end:
            raise invalid
        head = body[at : head_end + 2]
        # Readers of forms differ in what they make of two names or of odd line ends: an engine could find another field
        # than the one that is checked here.
        dispositions = _DISPOSITION.findall(head)
        name = _FORM_DATA.fullmatch(dispositions[0]) if len(dispositions) == 1 else None
        if name is None or head.count(b"\n") != head.count(b"\r\n") or head.count(b"\r") != head.count(b"\n"):
            raise invalid
        field = (name[1] or name[2] or b"").decode("utf-8", "replace")
        if field in parts and not field.endswith("[]"):
            raise RequestMistake(f"the form has the field {field[:40]!r} twice", "bad_body", field[:40])
        parts[field] = FormPart(head_end + 4, end, bool(name[3] or name[4]))
        at = end + 2
    raise RequestMistake(f"the form has more than {MAX_PARTS} fields", "bad_body")


def _read_text(name: str, body: bytes, part: FormPart) -> str:
    if part.is_file or part.end - part.begin > 1000:
        raise RequestMistake(f"{name} must be a short text", "invalid_request", name)
    return body[part.begin : part.end].decode("utf-8", "replace").strip()


def _read_number(value: object) -> float | None:
    """Some engines report the duration as text."""
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}(?:\.[0-9]{1,9})?", value):
        return float(value)
    return float(value) if isinstance(value, int | float) and 0 <= value < 1e9 else None


def _format_subtitles(segments: list[_Segment], wanted: str) -> str:
    comma = "," if wanted == "srt" else "."
    blocks = ["WEBVTT\n"] if wanted == "vtt" else []
    for number, one in enumerate(segments, start=1):
        times = f"{_format_time(one.start, comma)} --> {_format_time(one.end, comma)}"
        blocks.append((f"{number}\n" if wanted == "srt" else "") + f"{times}\n{one.text.strip()}\n")
    return "\n".join(blocks)


def _format_time(seconds: float, comma: str) -> str:
    ms = round(1000 * max(seconds, 0.0))
    return f"{ms // 3_600_000:02}:{ms // 60_000 % 60:02}:{ms // 1000 % 60:02}{comma}{ms % 1000:03}"
