"""Images with llama.cpp: the built-in model, and a tiny vision encoder with random weights that the test makes.

The answers show that an image reaches the model and takes its tokens, not that the model understands it.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import openai
import pytest
from tests.conftest import Served
from tests.tiny_projector import TOKENS, make_projector

from bedplate.progress import SilentProgress
from bedplate.run.builtin import fetch_builtin


def make_png(colour: tuple[int, int, int], side: int = 24) -> str:
    """A data URL of an image in one colour."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + bytes(colour) * side for _ in range(side))
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + parts).decode()


def ask(client: openai.OpenAI, *images: str) -> tuple[float, int]:
    """The log probability of the first token, and the tokens of the prompt."""
    parts = [{"type": "image_url", "image_url": {"url": one}} for one in images]
    content = [{"type": "text", "text": "What is this?"}, *parts]
    answer = client.chat.completions.create(
        model="",
        messages=[{"role": "user", "content": content}],
        max_tokens=1,
        temperature=0,
        logprobs=True,
    )
    assert answer.usage is not None and answer.choices[0].logprobs is not None
    tokens = answer.choices[0].logprobs.content
    assert tokens is not None and len(tokens) == 1
    return tokens[0].logprob, answer.usage.prompt_tokens


def test_images_reach_the_model_and_take_their_tokens(
    serve: Callable[..., Served], own_home: Path, tmp_path: Path
) -> None:
    model = tmp_path / "tiny-vlm.gguf"
    model.symlink_to(fetch_builtin(SilentProgress()))
    make_projector(tmp_path / "mmproj-tiny-vlm.gguf")
    served = serve(str(model), "--engine", "llama.cpp", "--name", "images")
    with openai.OpenAI(base_url=served.url, api_key="none", max_retries=0) as client:
        (listed,) = client.models.list()
        assert listed.capabilities["vision"] is True
        text, without = ask(client)
        red, one = ask(client, make_png((255, 0, 0)))
        blue, same = ask(client, make_png((0, 0, 255)))
        _, two = ask(client, make_png((255, 0, 0)), make_png((0, 0, 255)))
        assert one == same >= without + TOKENS and two >= one + TOKENS
        assert len({text, red, blue}) == 3, "the answer depends on the image"
        with pytest.raises(openai.BadRequestError):
            ask(client, "data:image/png;base64,AAAA")


def test_a_text_model_refuses_images(served: Served) -> None:
    with (
        openai.OpenAI(base_url=served.url, api_key="none", max_retries=0) as client,
        pytest.raises(openai.BadRequestError, match="images"),
    ):
        ask(client, make_png((255, 0, 0)))
