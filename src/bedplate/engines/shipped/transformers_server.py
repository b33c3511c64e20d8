#!/usr/bin/env python3
"""`transformers` with its own options; as a server it answers to any name with the one model that it was given.

As it comes, it refuses requests that do not carry the model's path, and its streams end without saying so. Runs inside
of the engine's environment, so it depends on nothing but transformers.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any


async def with_end(events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    """The events, and the one that tells clients that none are missing."""
    async with aclosing(events):
        async for event in events:
            yield event
    yield "data: [DONE]\n\n"


def ended(response: Callable[..., Any]) -> Callable[..., Any]:
    return lambda events, **given: response(with_end(events), **given)


def main() -> None:
    from huggingface_hub.constants import HF_HUB_CACHE
    from transformers.cli.serving import chat_completion, completion
    from transformers.cli.serving.utils import BaseHandler
    from transformers.cli.transformers import app

    resolve = BaseHandler._resolve_model

    def one_model(self: Any, body: dict[str, Any]) -> Any:
        body["model"] = self.model_manager.force_model or body.get("model")
        return resolve(self, body)

    BaseHandler._resolve_model = one_model
    for module in (chat_completion, completion):
        module.StreamingResponse = ended(module.StreamingResponse)
    # Its list of models fails where nothing was ever downloaded.
    Path(HF_HUB_CACHE).mkdir(parents=True, exist_ok=True)
    app()


if __name__ == "__main__":
    main()
