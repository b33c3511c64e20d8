"""bedplate run: talks to a model in the terminal; serves it first if necessary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from bedplate.cli.options import Json, ModelName

if TYPE_CHECKING:
    from bedplate.hosting.chat import ChatSession, Tell
    from bedplate.values import Endpoint
    from bedplate.values.service import ServiceRecord

EXAMPLES = """Examples:

\b
  bedplate run                                   chat with the built-in model, or with the model that is served
  bedplate run model.gguf
  bedplate run qwen3:0.6b
  bedplate run builtin "Why is the sky blue?"    one answer, and nothing but the answer on stdout
  git diff | bedplate run builtin "Summarize this change."
  bedplate run "Why is the sky blue?" --json

In the chat: /help lists the commands, Ctrl-C stops an answer, Ctrl-D ends the chat."""


def run(
    model: ModelName = None,
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT",
            help="Answer this and end. Text on stdin is appended to it. Default: a chat.",
            show_default=False,
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system prompt.", show_default=False)] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer in tokens.", show_default=False)] = None,
    temperature: Annotated[
        float | None,
        typer.Option(min=0, max=2, help="Sampling temperature; 0 gives the most likely tokens.", show_default=False),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave a service that was started for this running afterwards.")
    ] = False,
    json: Json = False,
) -> None:
    """Chat with a model in the terminal, or get one answer.

    Uses the running service of the model. If there is none, it is served until the end of the chat.
    """
    import sys

    from bedplate.errors import UsageError

    model, prompt = _read_prompt(model, prompt)
    if prompt is None and json:
        raise UsageError("--json needs a prompt", hint='bedplate run builtin "Why is the sky blue?" --json')
    if prompt is None and not sys.stdout.isatty():
        raise UsageError(
            "a chat needs a terminal, and the output is not one",
            hint='give a prompt: bedplate run builtin "Why is the sky blue?"',
        )
    given = {"max_tokens": max_tokens, "temperature": temperature}
    settings = {name: value for name, value in given.items() if value is not None}
    with _open_conversation(model, keep=keep) as conversation:
        conversation.system, conversation.settings = system, settings
        if prompt is None:
            from bedplate.cli.chatting import chat

            chat(conversation)
        else:
            _answer_once(conversation, prompt, json=json)


def _read_prompt(model: str | None, prompt: str | None) -> tuple[str | None, str | None]:
    """Model and prompt from the arguments and stdin. A lone argument with spaces that is not a path is a prompt."""
    import sys
    from pathlib import Path

    from bedplate.errors import UsageError

    if prompt is None and model is not None and " " in model.strip() and not Path(model).expanduser().exists():
        model, prompt = None, model
    if sys.stdin is None or sys.stdin.isatty():
        if prompt is not None and not prompt.strip():
            raise UsageError("the prompt is empty", hint="leave it out to chat")
        return model, prompt
    piped = sys.stdin.buffer.read().decode("utf-8", "replace").strip()
    whole = "\n\n".join(part for part in (prompt, piped) if part and part.strip())
    if not whole:
        raise UsageError("there is no prompt", hint="write it after the model, or send it to stdin")
    return model, whole


@contextmanager
def _open_conversation(model: str | None, *, keep: bool) -> Iterator[ChatSession]:
    """A conversation with the running service of the model, or with a new one that ends with it."""
    import os

    from bedplate.hosting.chat import ChatSession, find_serving

    key = os.environ.get("BEDPLATE_API_KEY") or None
    if (found := find_serving(model)) is not None:
        record, name = found
        yield ChatSession(record.url or "", name, key, engine=_find_engine(record, name), record=record)
        return
    with _serve_meanwhile(model, key, keep=keep) as (endpoint, record):
        yield ChatSession(endpoint.url, endpoint.model, key, engine=endpoint.engine, record=record)


def _find_engine(record: ServiceRecord, model: str) -> str | None:
    from bedplate.errors import BedplateError
    from bedplate.hosting.services import read_status

    try:
        status = read_status(record)
    except BedplateError:
        return None
    return next((one.engines[0].engine for one in status.models if one.model == model and one.engines), None)


@contextmanager
def _serve_meanwhile(model: str | None, key: str | None, *, keep: bool) -> Iterator[tuple[Endpoint, ServiceRecord]]:
    """Serves the model in the background. Without `keep` the service ends with the block, or with this process."""
    import os
    import sys

    from bedplate.cli.terminal import TerminalProgress
    from bedplate.hosting.detached import start_detached
    from bedplate.hosting.ordering import make_order
    from bedplate.hosting.records import choose_service
    from bedplate.hosting.services import stop_service
    from bedplate.serving.serve import check_order
    from bedplate.values.intent import Intent

    order = make_order(Intent(model=model), any_port=True, api_key=key, check=False)
    check_order(order)
    progress = TerminalProgress()
    reading, writing = os.pipe()
    try:
        endpoint = start_detached("bedplate.cli.background", order, progress, lifeline_fd=None if keep else reading)
        os.close(reading)
        record = choose_service(endpoint.name)
        try:
            yield endpoint, record
        finally:
            if keep:
                progress.note(f"{endpoint.url} stays up until bedplate stop {endpoint.name}")
            else:
                sys.stdout.flush()
                stop_service(record, 0)
    finally:
        os.close(writing)


def _answer_once(conversation: ChatSession, prompt: str, *, json: bool) -> None:
    import sys

    from bedplate.values import to_json

    def write(piece: str, kind: str) -> None:
        if kind == "text" and not json:
            print(piece, end="", flush=True)  # noqa: T201

    tell: Tell = write
    if sys.stdout.isatty() and not json:
        from bedplate.cli.chatting import make_writer
        from bedplate.cli.terminal import make_console

        wrapped = make_writer(make_console())
        tell = lambda piece, kind: wrapped(piece, kind) if kind == "text" else None  # noqa: E731
    answer = conversation.ask(prompt, tell)
    print(to_json(conversation.add_memory(answer)) if json else "")  # noqa: T201
    if answer.stopped:
        raise KeyboardInterrupt
