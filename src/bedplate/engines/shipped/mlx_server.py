#!/usr/bin/env python3
"""mlx_lm.server with its own options, for one model: any name that a request gives means the model that is loaded.

As it comes, it takes an unknown name for a hub id and puts that model in the place of the one that it serves.
Runs inside of the engine's environment, so it depends on nothing but mlx-lm.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


def with_rope(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration as Transformers 5 writes it, with the two fields that most of mlx-lm's models look for.

    Without them a model is computed with another base of its rotary embedding, and writes nonsense without an error.
    """
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_theta" not in rope or "rope_theta" in config:
        return config
    kind = rope.get("rope_type", "default")
    scaling = {} if kind == "default" else {"rope_scaling": rope}
    return {"rope_theta": rope["rope_theta"], **scaling, **config}


def main() -> None:
    from huggingface_hub.constants import HF_HUB_CACHE
    from mlx_lm import server, utils

    class OneModel(server.ModelProvider):  # type: ignore[misc]
        def load(self, *_: object, **__: object) -> Any:
            return super().load("default_model", None, "default_model")

    load_config = utils.load_config
    utils.load_config = lambda *given, **named: with_rope(load_config(*given, **named))
    server.ModelProvider = OneModel
    # Its list of models fails where nothing was ever downloaded.
    Path(HF_HUB_CACHE).mkdir(parents=True, exist_ok=True)
    server.main()


if __name__ == "__main__":
    main()
