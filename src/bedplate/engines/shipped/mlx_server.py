#!/usr/bin/env python3
"""mlx_lm.server with its own options for one model: requests with any model name use the loaded model.

The original server reads an unknown name as a hub id and replaces the loaded model by that one.
Runs in the engine's environment and depends only on mlx-lm.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


def with_rope(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration written by Transformers 5, with the two fields that most models of mlx-lm read.

    Without them the model uses a wrong base of its rotary embedding, and generates nonsense without an error.
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
    # Its list of models fails if the hub cache does not exist.
    Path(HF_HUB_CACHE).mkdir(parents=True, exist_ok=True)
    server.main()


if __name__ == "__main__":
    main()
