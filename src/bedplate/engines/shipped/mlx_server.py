#!/usr/bin/env python3
"""mlx_lm.server with its own options, for one model: any name that a request gives means the model that is loaded.

As it comes, it takes an unknown name for a hub id and puts that model in the place of the one that it serves.
Runs inside of the engine's environment, so it depends on nothing but mlx-lm.
"""

from __future__ import annotations

from pathlib import Path


def main() -> None:
    from huggingface_hub.constants import HF_HUB_CACHE
    from mlx_lm import server

    class OneModel(server.ModelProvider):  # type: ignore[misc]
        def load(self, *_: object, **__: object):  # type: ignore[no-untyped-def]
            return super().load("default_model", None, "default_model")

    server.ModelProvider = OneModel
    # Its list of models fails where nothing was ever downloaded.
    Path(HF_HUB_CACHE).mkdir(parents=True, exist_ok=True)
    server.main()


if __name__ == "__main__":
    main()
