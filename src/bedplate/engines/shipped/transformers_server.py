#!/usr/bin/env python3
"""`transformers` with its own options; as a server it accepts any model name for its one model.

The original server rejects requests without the model's path, and its streams lack the final `[DONE]` event.
Transcriptions are in transformers_speech.py, and LoRA adapters in transformers_adapters.py. Runs in the engine's
environment and depends only on transformers.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any


async def append_done_event(events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    """The events, followed by the final `[DONE]` event."""
    async with aclosing(events):
        async for event in events:
            yield event
    yield "data: [DONE]\n\n"


def wrap_response(response: Callable[..., Any]) -> Callable[..., Any]:
    return lambda events, **given: response(append_done_event(events), **given)


def main() -> None:
    # An isolated Python does not add the folder of the script.
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    from huggingface_hub.constants import HF_HUB_CACHE
    from transformers.cli.serving import chat_completion, completion
    from transformers.cli.serving.transcription import TranscriptionHandler
    from transformers.cli.serving.utils import BaseHandler
    from transformers.cli.transformers import app
    from transformers_adapters import serve_adapters, take_options
    from transformers_speech import handle_transcription

    resolve = BaseHandler._resolve_model

    def resolve_one_model(self: Any, body: dict[str, Any]) -> Any:
        body["model"] = self.model_manager.force_model or body.get("model")
        return resolve(self, body)

    BaseHandler._resolve_model = resolve_one_model
    for module in (chat_completion, completion):
        module.StreamingResponse = wrap_response(module.StreamingResponse)
    TranscriptionHandler.handle_request = handle_transcription
    if (options := take_options()).max_loras:
        serve_adapters(options)
    # Its list of models fails if the hub cache does not exist.
    Path(HF_HUB_CACHE).mkdir(parents=True, exist_ok=True)
    app()


if __name__ == "__main__":
    main()
