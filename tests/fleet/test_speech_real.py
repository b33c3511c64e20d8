"""Transcriptions through the gateway with PyTorch's server, held against transformers itself.

No Whisper model was found on the package index, so the test makes a tiny one of random weights. Its text means
nothing, but it must be the text that transformers computes.
"""

from __future__ import annotations

import io
import json
import math
import os
import random
import struct
import subprocess
import urllib.request
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.conftest import Served, have_ended, start_serve, wait_for

from bedplate.engines import get_engine
from bedplate.run.environments import EngineEnvironment, make_environment

pytestmark = pytest.mark.engine
PROGRAM = Path(__file__).parent / "speech.py"
MODEL = "tiny-whisper"


def make_wave(seconds: float, rate: int = 16_000, channels: int = 1) -> bytes:
    """A rising tone with noise."""
    noise = random.Random(1)
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        for index in range(int(seconds * rate)):
            at = index / rate
            value = int(9000 * math.sin(2 * math.pi * (200 + 300 * at) * at) + noise.uniform(-2000, 2000))
            file.writeframesraw(struct.pack("<h", value) * channels)
    return buffer.getvalue()


def run_speech(engine: EngineEnvironment, *arguments: str) -> str:
    argv = [str(engine.interpreter), str(PROGRAM), *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def pytorch(bedplate_home: Path) -> EngineEnvironment:
    return make_environment(get_engine("pytorch"))


@pytest.fixture(scope="module")
def whisper(pytorch: EngineEnvironment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speech") / MODEL
    run_speech(pytorch, "make", str(folder))
    return folder


@pytest.fixture(scope="module")
def speech(whisper: Path) -> Iterator[Served]:
    served = start_serve(str(whisper), env=dict(os.environ))
    assert served.endpoint, "".join(served.stderr)
    yield served
    below = served.list_descendants()
    assert served.stop() == 0
    wait_for(lambda: have_ended(below), "the engine to end")


@pytest.fixture
def client(speech: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=speech.url, api_key="none", max_retries=0, timeout=600)


def count_tokens(served: Served, kind: str) -> float:
    with urllib.request.urlopen(f"{served.root}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith("bedplate_tokens_total") and f'"{kind}"' in line
    )


def test_transcriptions_agree_with_transformers_and_are_counted(
    speech: Served, client: openai.OpenAI, whisper: Path, pytorch: EngineEnvironment, tmp_path: Path
) -> None:
    sound = make_wave(2)
    (tmp_path / "a.wav").write_bytes(sound)
    texts = []
    orders = [("en", ""), ("de", ""), ("en", "Cats.")]
    known = json.loads(run_speech(pytorch, "transcribe", str(whisper), str(tmp_path / "a.wav"), json.dumps(orders)))
    for (language, prompt), expected in zip(orders, known, strict=True):
        more: dict[str, Any] = {"language": language, **({"prompt": prompt} if prompt else {})}
        before = count_tokens(speech, "prompt"), count_tokens(speech, "completion")
        found: Any = client.audio.transcriptions.create(model=MODEL, file=("a.wav", sound), **more)
        assert found.text == expected["text"].strip() and found.text
        assert found.usage.input_token_details.audio_tokens == 100
        assert found.usage.input_tokens == count_tokens(speech, "prompt") - before[0]
        assert found.usage.output_tokens == len(expected["ids"]) == count_tokens(speech, "completion") - before[1]
        texts.append(found.text)
    assert len(set(texts)) > 1, "language or prompt changes the text"
    # Two channels with the same sound are that sound.
    stereo: Any = client.audio.transcriptions.create(
        model=MODEL, file=("a.wav", make_wave(2, channels=2)), language="en"
    )
    assert stereo.text == texts[0]


def test_formats_and_audio_of_more_than_one_window(client: openai.OpenAI) -> None:
    sound = ("a.wav", make_wave(40, rate=8_000))
    found: Any = client.audio.transcriptions.create(
        model=MODEL, file=sound, language="en", response_format="verbose_json", timestamp_granularities=["segment"]
    )
    assert math.isclose(found.duration, 40, abs_tol=0.1) and found.segments
    assert max(one.end for one in found.segments) > 30, "the second window is transcribed"
    assert all(0 <= one.start <= one.end <= 40.1 for one in found.segments)
    text = client.audio.transcriptions.create(model=MODEL, file=sound, language="en", response_format="text")
    assert text == found.text + "\n"
    subtitles = client.audio.transcriptions.create(model=MODEL, file=sound, language="en", response_format="vtt")
    assert subtitles.startswith("WEBVTT\n\n00:00:") and subtitles.count("-->") == len(found.segments)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"file": ("a.wav", b"no sound")}, "file"),
        ({"language": "xx"}, "language"),
        ({"temperature": 9}, "temperature"),
        ({"timestamp_granularities": ["word"]}, "timestamp_granularities"),
        ({"response_format": "yaml"}, "response_format"),
        ({"extra_body": {"colour": "red"}}, "colour"),
    ],
)
def test_mistakes_are_400_in_the_shape_of_the_api(client: openai.OpenAI, more: dict[str, Any], param: str) -> None:
    given = {"model": MODEL, "file": ("a.wav", make_wave(0.2)), **more}
    with pytest.raises(openai.BadRequestError) as refused:
        client.audio.transcriptions.create(**given)
    assert refused.value.param == param


def test_model_for_speech_does_not_chat(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
    assert refused.value.code == "unsupported_generation"
