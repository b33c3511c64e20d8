"""bedplate list: the models on this machine."""

from __future__ import annotations

from bedplate.cli.options import Json

EXAMPLES = """Examples:

\b
  bedplate list
  bedplate list --json | jq -r '.models[].path'

`bedplate models` lists the known models that would fit, here or not."""


def list_(json: Json = False) -> None:
    """List the models on this machine: size, origin, last use."""
    from bedplate.run.local_models import LocalModelList, list_models
    from bedplate.values import to_json

    found = list_models()
    if json:
        print(to_json(LocalModelList(models=tuple(found))))  # noqa: T201
        return
    from bedplate.cli.terminal import make_console
    from bedplate.show.local_models import render_local_models

    make_console().print(render_local_models(found))
