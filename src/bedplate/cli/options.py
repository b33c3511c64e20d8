"""Options that several verbs share, and what they make together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from bedplate.values import Workload

Json = Annotated[bool, typer.Option("--json", help="Print the value as JSON.")]
ModelName = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A .gguf file, a folder, a name in the Hugging Face, Ollama or LM Studio cache, or owner/name[:QUANT] "
        "on the hub. Default: the built-in SmolLM2-135M-Instruct.",
        show_default=False,
    ),
]
EngineId = Annotated[str | None, typer.Option("--engine", metavar="ID", help="Ask for one engine.", show_default=False)]
Users = Annotated[int | None, typer.Option(min=1, help="People who may be active at once.", show_default=False)]
Concurrency = Annotated[int | None, typer.Option(min=1, help="Requests in flight at once.", show_default=False)]
Context = Annotated[
    int | None, typer.Option(min=1, help="The longest request, prompt and answer, in tokens.", show_default=False)
]
PromptTokens = Annotated[int | None, typer.Option(min=1, help="Tokens of a usual prompt.", show_default=False)]
OutputTokens = Annotated[int | None, typer.Option(min=1, help="Tokens of a usual answer.", show_default=False)]


def workload_of(
    *,
    users: int | None,
    concurrency: int | None,
    context: int | None,
    prompt_tokens: int | None,
    output_tokens: int | None,
) -> Workload:
    """What was asked for; what was not keeps its default."""
    from bedplate.values import Workload

    asked = {
        "users": users,
        "concurrency": concurrency,
        "context_tokens": context,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
    }
    given = {name: value for name, value in asked.items() if value is not None}
    return Workload(**given, origin="asked" if given else "default")  # type: ignore[arg-type]
