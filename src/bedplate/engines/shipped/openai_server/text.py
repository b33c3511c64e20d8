"""Tokenization: tokenizers and chat templates of Hugging Face folders, detokenization and stop strings."""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .backend import BackendError, Text, TokenPair
from .tools import find_tool_format, with_tools


class HuggingFaceText(Text):
    """The tokenizer and chat template of a Hugging Face folder."""

    def __init__(self, folder: str | Path) -> None:
        from tokenizers import Tokenizer

        self.folder = Path(folder)
        if not (self.folder / "tokenizer.json").exists():
            raise BackendError(f"{self.folder} has no tokenizer.json")
        self.tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        # Some folders enable truncation and padding, which is for training.
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.max_token = max(self.tokenizer.get_vocab().values(), default=0)
        self.config = read_json(self.folder / "tokenizer_config.json")
        self.template = ChatTemplate(read_template(self.folder, self.config), find_special_tokens(self.config))
        self.tool_format = self.template.tool_format

    def encode(self, text: str, special: bool) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=special).ids)

    def encode_pair(self, first: str, second: str) -> TokenPair:
        found = self.tokenizer.encode(first, second)
        return TokenPair(found.ids, found.type_ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, more: dict[str, Any]) -> str:
        return self.template.render(messages, tools, more)


class ChatTemplate:
    """The chat template of a model, rendered as Transformers renders it."""

    def __init__(self, source: str | None, tokens: dict[str, str]) -> None:
        self.source = with_tools(source) or source
        self.tool_format = find_tool_format(self.source)
        self.tokens = tokens
        self._compiled: Any = None

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, more: dict[str, Any]) -> str:
        if self.source is None:
            raise BackendError("this model has no chat template; use /v1/completions", "messages")
        from jinja2 import TemplateError

        try:
            if self._compiled is None:
                self._compiled = _make_environment().from_string(self.source)
            values = {**more, **self.tokens, "messages": messages, "tools": tools, "add_generation_prompt": True}
            return str(self._compiled.render(values))
        except TemplateError as error:
            raise BackendError(f"the model's chat template rejected the messages: {error}", "messages") from error
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise BackendError(f"the model's chat template cannot render the messages: {error}", "messages") from error


def _make_environment() -> Any:
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, **options: Any) -> str:
        # Unlike jinja's filter, this does not escape HTML.
        return json.dumps(value, ensure_ascii=False, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().astimezone().strftime(form)
    return environment


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def read_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The chat template of a folder, from any of the files that versions of Transformers use."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    found = config.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {
            one["name"]: one["template"] for one in found if isinstance(one, dict) and {"name", "template"} <= set(one)
        }
        found = named.get("default") or next(iter(named.values()), None)
    return found if isinstance(found, str) else None


def find_special_tokens(config: dict[str, Any]) -> dict[str, str]:
    found = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            found[name] = token
    return found


class Detokenizer:
    """Incremental detokenization: a character may need several tokens, and their text depends on earlier ones."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._start = self._shown = 0

    def feed(self, token: int) -> str:
        """The text that this token completes."""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._start : self._shown])
        now = self._decode(self._tokens[self._start :])
        if len(now) <= len(before) or now.endswith("\ufffd"):
            return ""
        # A few tokens are kept as context: the space before a word may depend on them.
        self._start, self._shown = self._shown, len(self._tokens)
        return now[len(before) :]

    def flush(self) -> str:
        """The remaining text at the end of the answer."""
        before = self._decode(self._tokens[self._start : self._shown])
        return self._decode(self._tokens[self._start :])[len(before) :]


class StopStringFilter:
    """Truncates a text at the first stop string, and holds back text that may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = [stop for stop in stops if stop]
        self.found = False
        self._held = ""

    def feed(self, text: str) -> str:
        if not self.stops:
            return text
        self._held += text
        places = [place for stop in self.stops if (place := self._held.find(stop)) >= 0]
        if places:
            self.found = True
            out, self._held = self._held[: min(places)], ""
            return out
        keep = max(_count_overlap(self._held, stop) for stop in self.stops)
        out, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return out

    def flush(self) -> str:
        out, self._held = self._held, ""
        return out


def _count_overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
