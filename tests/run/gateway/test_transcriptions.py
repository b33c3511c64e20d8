"""Transcriptions: the form that is checked and sent on, the formats of the answer, and what is counted."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest

from bedplate.run.gateway.request_checks import RequestMistake
from bedplate.run.gateway.sse import TokenUsage
from bedplate.run.gateway.transcriptions import (
    estimate_audio_tokens,
    format_answer,
    read_transcription,
    set_form_model,
)
from bedplate.values.capabilities import Capabilities

from .scripted import CHAT, make_answer, make_chat_body, start_gateway

PATH = "/v1/audio/transcriptions"
TYPE = b'multipart/form-data; boundary="x-y"'
WHISPER = Capabilities(generation=False, transcriptions=True)
WAV = b"RIFF____WAVEfmt " + struct.pack("<IHHIIHH", 16, 1, 1, 16_000, 32_000, 2, 16) + b"data____" + bytes(64_000 - 44)
SEGMENTS = [
    {"id": 0, "start": 0.0, "end": 1.5, "text": " One."},
    {"id": 1, "start": 3661.25, "end": 3662, "text": "Two"},
]

SRT = "1\n00:00:00,000 --> 00:00:01,500\nOne.\n\n2\n01:01:01,250 --> 01:01:02,000\nTwo\n"
VTT = "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nOne.\n\n01:01:01.250 --> 01:01:02.000\nTwo\n"


def make_form(*, file: bytes | None = b"sound", **fields: str) -> bytes:
    body = b""
    for name, value in fields.items():
        body += b'--x-y\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (name.encode(), value.encode())
    if file is not None:
        head = b'--x-y\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n'
        body += head + b"\r\n" + file + b"\r\n"
    return body + b"--x-y--\r\n"


@pytest.mark.parametrize(
    ("wanted", "asked", "answer", "content_type"),
    [
        ("json", "json", None, "application/json"),
        ("text", "json", "One. Two\n", "text/plain"),
        ("srt", "verbose_json", SRT, "text/plain"),
        ("vtt", "verbose_json", VTT, "text/plain"),
    ],
)
async def test_form_is_sent_on_and_the_answer_has_the_format_that_was_asked_for(
    wanted: str, asked: str, answer: str | None, content_type: str
) -> None:
    found = {"text": "One. Two", "segments": SEGMENTS, "usage": {"type": "duration", "seconds": 3}}
    async with start_gateway(capabilities=WHISPER) as setup:
        setup.engine.answer(make_answer(found))
        client = await setup.connect()
        got = await client.post(PATH, make_form(response_format=wanted, language="en"), content_type=TYPE.decode())
        assert got.status == 200
        assert got.body.decode() == answer if answer is not None else json.loads(got.body) == found
        assert got.headers["content-type"].startswith(content_type)
        (seen,) = setup.engine.seen
        assert seen.target == PATH and seen.header("content-type") == [TYPE.decode()]
        assert seen.body == make_form(response_format=asked, language="en")
        assert setup.read_metric("tokens_total", kind="prompt") == 150
        assert setup.count_outcome("ok", api="transcriptions") == 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (make_form(file=None, model="tiny"), "file"),
        (make_form(file=b""), "file"),
        (make_form(file=None, file_name="a"), "file"),
        (make_form(response_format="yaml"), "response_format"),
        (make_form(stream="true"), "stream"),
        (make_form(model="m" * 2000), "model"),
        (make_form(model="a").replace(b"--x-y--", b"") + make_form(model="b"), "model"),
        (make_form()[:-6], None),
        (make_form().replace(b"--x-y--", b""), None),
        (b"", None),
        (b"{}", None),
        (make_form().replace(b'name="file"; ', b""), None),
        (make_form(file=b"a", **{f"f{index}": "" for index in range(70)}), None),
        (make_form(user="a").replace(b'"user"', b'"user"\r\nContent-Disposition: form-data; name="model"'), None),
        (make_form(user="a").replace(b'"user"', b'"user"\nContent-Disposition: form-data; name="model"'), None),
        (make_form(user="a").replace(b'"user"', b'"user"; name="model"'), None),
        (make_form(user="a").replace(b'"user"', b'"us\\"er"; x="; name="model"'), None),
        (make_form(user="a").replace(b"form-data", b"attachment"), None),
    ],
)
async def test_mistake_gets_400_before_an_engine_sees_it(body: bytes, param: str | None) -> None:
    async with start_gateway(capabilities=WHISPER) as setup:
        got = await (await setup.connect()).post(PATH, body, content_type=TYPE.decode())
        assert got.status == 400 and got.error["param"] == param and got.error["type"] == "invalid_request_error"
        assert not setup.engine.seen


async def test_json_is_not_a_form() -> None:
    async with start_gateway(capabilities=WHISPER) as setup:
        got = await (await setup.connect()).post(PATH, {"model": "tiny", "file": "a.wav"})
        assert got.status == 400 and "multipart/form-data" in got.error["message"]


async def test_body_that_is_too_large_gets_413() -> None:
    async with start_gateway(capabilities=WHISPER, max_body_bytes=1000) as setup:
        client = await setup.connect()
        assert (await client.post(PATH, make_form(file=bytes(1001)), content_type=TYPE.decode())).status == 413


async def test_only_models_for_speech_transcribe_and_they_do_nothing_else() -> None:
    async with start_gateway(capabilities=Capabilities()) as setup:
        got = await (await setup.connect()).post(PATH, make_form(), content_type=TYPE.decode())
        assert got.status == 400 and got.error["code"] == "unsupported_transcriptions" and not setup.engine.seen
    async with start_gateway(capabilities=WHISPER) as setup:
        got = await (await setup.connect()).post(CHAT, make_chat_body())
        assert got.status == 400 and got.error["code"] == "unsupported_generation"
        assert "/v1/audio/transcriptions" in got.error["message"]


def test_length_of_audio_is_estimated_by_the_rate_of_its_file() -> None:
    assert read_transcription(TYPE, make_form(file=WAV)).demand.prompt_tokens == 100
    assert estimate_audio_tokens(b"ID3", 80_000) == 500
    assert estimate_audio_tokens(WAV[:28] + bytes(4), 80_000) == 500


def test_name_of_the_model_is_replaced_or_added() -> None:
    assert set_form_model(TYPE, make_form(model="a", language="en"), "b") == make_form(model="b", language="en")
    assert set_form_model(TYPE, make_form(language="en"), "b") == make_form(model="b", language="en")
    with_preamble = b"ignored\r\n" + make_form(language="en")
    assert set_form_model(TYPE, with_preamble, "b") == b"ignored\r\n" + make_form(model="b", language="en")


@pytest.mark.parametrize(
    ("answer", "prompt", "output"),
    [
        ({"text": "a", "usage": {"type": "tokens", "input_tokens": 7, "output_tokens": 2}}, 7, 2),
        ({"text": "a", "usage": {"type": "duration", "seconds": 1.5}}, 75, None),
        ({"text": "a", "duration": "2.0"}, 100, None),
        ({"text": "a", "duration": "soon"}, None, None),
        ({"text": "a"}, None, None),
    ],
)
def test_usage_is_tokens_or_the_duration_of_the_audio(
    answer: dict[str, Any], prompt: int | None, output: int | None
) -> None:
    usage = TokenUsage()
    assert format_answer(json.dumps(answer).encode(), "text", usage) == (b"a\n", b"text/plain; charset=utf-8")
    assert (usage.prompt_tokens, usage.completion_tokens) == (prompt, output)


def test_answer_that_is_no_json_stays_as_it_is() -> None:
    assert format_answer(b"words", "text", TokenUsage()) is None


def test_boundary_of_another_type_is_not_a_form() -> None:
    with pytest.raises(RequestMistake):
        read_transcription(b"multipart/mixed; boundary=x-y", make_form())
