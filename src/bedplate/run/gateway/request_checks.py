"""Checks a request before an engine gets it: its format, and that the model supports what it asks for. Pure.

Engines answer some of these mistakes with 500, ignore others, and a few stop. A plain request costs one scan of its
messages; everything else is looked at only if the request has the field.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec.structs import astuple

from bedplate.values.capabilities import FEATURE_NAMES, Capabilities, Feature

if TYPE_CHECKING:
    from bedplate.run.gateway.sse import Api, RequestFields

NOTHING = msgspec.Raw(b"")
NO_FEATURES: tuple[Feature, ...] = ()
MEDIA_TYPES = frozenset([
    "image", "image_url", "input_image", "image_file", "image_embeds", "audio", "audio_url", "input_audio", "video",
    "video_url", "file", "input_file", "document",
])  # fmt: skip
"""Types of content parts that are not text."""
_TEXT_TYPES = ("text", None)
_LARGEST_TOKEN = 1 << 31
_MOST_DIGITS = 10
_INTEGER = re.compile(r"-?[0-9]+")
_OPENING_QUOTE, _OPENING_BRACKET, _OPENING_BRACE = b'"[{'
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_WRITES = frozenset(["chat", "completions", "responses", "messages"])


class FeatureFields(msgspec.Struct):
    """The fields of a request that ask for more than one text, in any of the APIs. They are read, not validated."""

    tool_choice: Any = None
    functions: Any = None
    response_format: Any = None
    text: Any = None
    """Of the Responses API: its `format`."""
    output_format: Any = None
    output_config: Any = None
    """Of the Messages API: its `format`."""
    logprobs: Any = None
    top_logprobs: Any = None
    n: Any = None
    best_of: Any = None
    stop: Any = None
    stop_sequences: Any = None
    seed: Any = None
    logit_bias: Any = None
    tools: msgspec.Raw = NOTHING
    tokens: msgspec.Raw = NOTHING
    # These change the number or the length of the answers, with `n`, `best_of` and `stop`; `demand` reads them.
    n_cmpl: Any = None
    num_return_sequences: Any = None
    n_predict: Any = None
    num_predict: Any = None
    max_new_tokens: Any = None
    min_tokens: Any = None
    min_new_tokens: Any = None
    ignore_eos: Any = None
    generation_config: Any = None
    samplers: Any = None
    n_probs: Any = None

    def is_simple(self) -> bool:
        """Whether the request has none of these fields."""
        return astuple(self)[:_NUM_FEATURE_FIELDS] == _NO_FEATURE_FIELDS


_NO_FEATURE_FIELDS = astuple(FeatureFields())
_NUM_FEATURE_FIELDS = len(_NO_FEATURE_FIELDS)


class RequestMistake(Exception):
    """A request that no engine can answer: its format is wrong, or it asks for what the model does not support."""

    def __init__(self, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message, self.code, self.param = message, code, param


class _Part(msgspec.Struct, gc=False):
    type: str


class _Message(msgspec.Struct, gc=False):
    role: str
    content: str | list[_Part] | None = None


class _InputItem(msgspec.Struct, gc=False):
    """An item of the Responses API: a message, or one with a type, such as a tool's result."""

    role: str | None = None
    type: str | None = None
    content: str | list[_Part] | None = None


class _Function(msgspec.Struct):
    name: str


class _ChatTool(msgspec.Struct):
    type: Literal["function"]
    function: _Function


class _MessagesTool(msgspec.Struct):
    name: str


class _ResponsesTool(msgspec.Struct):
    type: str
    name: str | None = None
    tools: list[_ResponsesTool] = []
    """Of a namespace."""


class _ToolChoice(NamedTuple):
    kind: Literal["none", "auto", "required"]
    name: str | None = None


_decode_messages = msgspec.json.Decoder(list[_Message]).decode
_decode_items = msgspec.json.Decoder(list[_InputItem]).decode
_decode_chat_tools = msgspec.json.Decoder(list[_ChatTool]).decode
_decode_messages_tools = msgspec.json.Decoder(list[_MessagesTool]).decode
_decode_responses_tools = msgspec.json.Decoder(list[_ResponsesTool]).decode


def check_request(
    api: Api, asked: RequestFields, known: Capabilities | None, is_simple: bool | None = None
) -> tuple[Feature, ...]:
    """The features that the request uses; raises `RequestMistake`.

    `known` is `None` if the capabilities are not known. `is_simple` is `asked.is_simple()`, if the caller needs it too.
    """
    if api == "transcriptions":
        if known is not None and not known.transcriptions:
            message = "this model does not transcribe audio; serve a Whisper model"
            raise RequestMistake(message, "unsupported_transcriptions", "model")
        return NO_FEATURES
    if known is not None and api in _WRITES and not known.generation:
        where = "embeddings are at /v1/embeddings"
        if known.transcriptions:
            where = "transcriptions are at /v1/audio/transcriptions"
        message = f"this model does not generate text; its {where}"
        raise RequestMistake(message, "unsupported_generation", "model")
    has_media = False
    if api == "chat" or api == "messages":
        has_media = _check_messages(asked.messages)
    elif api == "responses":
        has_media = _check_input(asked.input)
    elif api == "completions":
        _check_prompt(asked.prompt, "prompt", known)
    elif api == "embeddings":
        if known is not None and not known.embeddings:
            message = "this model does not compute embeddings; serve an embedding model"
            raise RequestMistake(message, "unsupported_embeddings", "model")
        _check_prompt(asked.input, "input", known)
    elif asked.tokens is not NOTHING:
        _check_tokens(asked.tokens, "tokens", known)
    if not has_media and (asked.is_simple() if is_simple is None else is_simple):
        return NO_FEATURES
    features = _find_features(api, asked, known, has_media)
    if known is not None:
        for feature in features:
            if not known.supports(feature):
                raise _make_unsupported(feature)
    return features


def _make_unsupported(feature: Feature) -> RequestMistake:
    message = f"this model is served without support for {FEATURE_NAMES[feature]}"
    if feature == "forced_tools":
        message += "; use tool_choice auto"
    if feature == "json_object":
        message += "; a JSON schema may be supported"
    return RequestMistake(f"{message}; bedplate serve --engine chooses another engine", f"unsupported_{feature}")


# prompts


def _check_messages(messages: msgspec.Raw) -> bool:
    """Whether a message has a part that is not text."""
    if messages is NOTHING:
        raise RequestMistake("messages is missing", "invalid_messages", "messages")
    try:
        found = _decode_messages(messages)
    except _UNREADABLE as error:
        raise _make_invalid("messages", error) from None
    if not found:
        raise RequestMistake("messages is empty", "invalid_messages", "messages")
    has_media = False
    for message in found:
        if type(message.content) is list and _has_media(message.content):
            has_media = True
    return has_media


def _check_input(given: msgspec.Raw) -> bool:
    """The same for the input of the Responses API, which may also be one text."""
    if given is NOTHING or memoryview(given)[0] not in (_OPENING_QUOTE, _OPENING_BRACKET):
        raise RequestMistake("input must be a text or a list of items", "invalid_messages", "input")
    if memoryview(given)[0] == _OPENING_QUOTE:
        return False
    try:
        found = _decode_items(given)
    except _UNREADABLE as error:
        raise _make_invalid("input", error) from None
    if not found:
        raise RequestMistake("input is empty", "invalid_messages", "input")
    if any(item.role is None and item.type is None for item in found):
        raise RequestMistake("an item of input has neither a role nor a type", "invalid_messages", "input")
    return any(isinstance(item.content, list) and _has_media(item.content) for item in found)


def _has_media(parts: list[_Part]) -> bool:
    return any(part.type in MEDIA_TYPES for part in parts)


def _make_invalid(param: str, error: Exception) -> RequestMistake:
    code = "invalid_tools" if param == "tools" else "invalid_messages"
    detail = str(error).replace("`", "").replace("$", param)
    return RequestMistake(f"{param} does not have the format of the API: {detail}", code, param)


def _check_prompt(prompt: msgspec.Raw, param: str, known: Capabilities | None) -> None:
    """A text, texts, token ids, or lists of them."""
    first = memoryview(prompt)[0] if prompt is not NOTHING else None
    if first == _OPENING_BRACKET:
        _check_tokens(prompt, param, known)
    elif first not in (_OPENING_QUOTE, _OPENING_BRACE):
        raise RequestMistake(f"{param} must be a text, a list of texts, or token ids", "invalid_prompt", param)


def _check_tokens(tokens: msgspec.Raw, param: str, known: Capabilities | None) -> None:
    vocab_size = known.vocab_size if known is not None else None
    try:
        _get_prompt_decoder(vocab_size or _LARGEST_TOKEN).decode(tokens)
    except _UNREADABLE as error:
        detail = str(error).replace("`", "").replace("$", param)
        message = f"{param} must be a text, a list of texts, or token ids of the model's vocabulary: {detail}"
        raise RequestMistake(message, "invalid_tokens", param) from None


@functools.lru_cache(maxsize=64)
def _get_prompt_decoder(vocab_size: int) -> msgspec.json.Decoder[Any]:
    """Checks all token ids without a loop in Python."""
    token = Annotated[int, msgspec.Meta(ge=0, lt=vocab_size)]
    ids = Annotated[list[token | str], msgspec.Meta(min_length=1)]
    prompts = Annotated[list[token | str | ids], msgspec.Meta(min_length=1)]
    return msgspec.json.Decoder(prompts)


# features


def _find_features(api: Api, asked: RequestFields, known: Capabilities | None, has_media: bool) -> tuple[Feature, ...]:
    found: list[Feature] = ["vision"] if has_media else []
    found += _find_tools(api, asked)
    if (form := _find_format(api, asked, known)) is not None:
        found.append(form)
    if asked.logprobs or asked.top_logprobs or (api == "completions" and type(asked.logprobs) is int):
        found.append("logprobs")
    if _check_choices(asked, known):
        found.append("n")
    if _check_stop(asked.stop, "stop") or _check_stop(asked.stop_sequences, "stop_sequences"):
        found.append("stop")
    if asked.seed is not None:
        if type(asked.seed) is not int or abs(asked.seed) >= 1 << 63:
            raise RequestMistake("seed must be an integer of 64 bits", "invalid_seed", "seed")
        found.append("seed")
    if isinstance(asked.logit_bias, dict):
        _check_biases(asked.logit_bias, known)
    return tuple(found)


def _find_tools(api: Api, asked: RequestFields) -> list[Feature]:
    if asked.functions:
        raise RequestMistake("functions is obsolete; use tools", "invalid_tools", "functions")
    names, num_tools = _read_tools(api, asked.tools)
    choice = _read_tool_choice(asked.tool_choice)
    if choice.kind == "required" and not num_tools:
        raise RequestMistake("tool_choice requires tools", "invalid_tool_choice", "tool_choice")
    if choice.name is not None and choice.name not in names:
        raise RequestMistake("tool_choice names a function that is not in tools", "invalid_tool_choice", "tool_choice")
    if not names or choice.kind == "none":
        return []
    return ["tools", "forced_tools"] if choice.kind == "required" else ["tools"]


def _read_tools(api: Api, tools: msgspec.Raw) -> tuple[set[str], int]:
    """The names of the functions, and the number of all tools: the Responses API also has tools of other types."""
    if tools is NOTHING or bytes(tools) == b"null":
        return set(), 0
    try:
        if api == "messages":
            names = [tool.name for tool in _decode_messages_tools(tools)]
            return set(names), len(names)
        if api == "responses":
            listed = _decode_responses_tools(tools)
            found = [inner for tool in listed for inner in (tool, *(tool.tools if tool.type == "namespace" else ()))]
            if any(tool.type == "function" and not tool.name for tool in found):
                raise RequestMistake("a function in tools has no name", "invalid_tools", "tools")
            return {tool.name for tool in found if tool.type == "function" and tool.name}, len(listed)
        names = [tool.function.name for tool in _decode_chat_tools(tools)]
        return set(names), len(names)
    except _UNREADABLE as error:
        raise _make_invalid("tools", error) from None


def _read_tool_choice(given: Any) -> _ToolChoice:
    if given is None or given == "auto":
        return _ToolChoice("auto")
    if given == "none" or given == "required":
        return _ToolChoice(given)
    if isinstance(given, dict):
        kind = given.get("type")
        if kind in ("auto", "none"):
            return _ToolChoice(kind)
        if kind == "any":
            return _ToolChoice("required")
        if kind == "allowed_tools":
            allowed = given.get("allowed_tools")
            mode = (allowed if isinstance(allowed, dict) else given).get("mode")
            return _ToolChoice("required" if mode == "required" else "auto")
        function = given.get("function")
        name = function.get("name") if isinstance(function, dict) else given.get("name")
        if kind in ("function", "tool") and isinstance(name, str):
            return _ToolChoice("required", name)
    raise RequestMistake(
        "tool_choice must be none, auto, required or one function of tools", "invalid_tool_choice", "tool_choice"
    )


def _find_format(api: Api, asked: RequestFields, known: Capabilities | None) -> Feature | None:
    """The feature that the format of the answer needs."""
    param, given = "response_format", asked.response_format
    if api == "responses":
        param, given = "text.format", asked.text.get("format") if isinstance(asked.text, dict) else asked.text
    elif api == "messages":
        config = asked.output_config
        param, given = "output_config.format", config.get("format") if isinstance(config, dict) else asked.output_format
    if given is None:
        return None
    kind = given.get("type") if isinstance(given, dict) else ""
    if not isinstance(given, dict) or kind in _TEXT_TYPES:
        if kind == "text":
            return None
        raise RequestMistake(f"{param} must be an object with a type", "invalid_response_format", param)
    holder = given.get("json_schema")
    schema = holder.get("schema") if isinstance(holder, dict) else given.get("schema")
    if kind == "json_object":
        return "json_schema" if isinstance(schema, dict) else "json_object"
    if kind == "json_schema":
        if not isinstance(schema, dict):
            raise RequestMistake(f"{param} has no JSON schema", "invalid_response_format", param)
        return "json_schema"
    if known is None or known.json_schema:
        return None  # an extension, such as a grammar: the engine knows its types
    message = f"{param}.type must be text, json_object or json_schema"
    raise RequestMistake(message, "invalid_response_format", param)


def _check_choices(asked: RequestFields, known: Capabilities | None) -> bool:
    """Whether the request asks for several choices."""
    most = known.n if known is not None else None
    several = False
    for name, number in (("n", asked.n), ("best_of", asked.best_of)):
        if number is None:
            continue
        if type(number) is not int or number < 1:
            raise RequestMistake(f"{name} must be an integer of at least 1", "invalid_n", name)
        if number == 1:
            continue
        several = True
        if most is not None and most > 1 and (number > most or name == "best_of"):
            limit = f"at most {most}; bedplate serve --concurrency sets it" if name == "n" else "1"
            raise RequestMistake(f"{name} may be {limit}", "unsupported_n", name)
    return several


def _check_stop(given: Any, param: str) -> bool:
    if given is None:
        return False
    if not isinstance(given, str) and not (isinstance(given, list) and all(isinstance(one, str) for one in given)):
        raise RequestMistake(f"{param} must be a text or a list of texts", "invalid_stop", param)
    return bool(given)


def _check_biases(biases: dict[str, Any], known: Capabilities | None) -> None:
    vocab_size = (known.vocab_size if known is not None else None) or _LARGEST_TOKEN
    for token in biases:
        if _INTEGER.fullmatch(token) and not (len(token) <= _MOST_DIGITS and 0 <= int(token) < vocab_size):
            raise RequestMistake(
                "logit_bias names a token id that is not in the vocabulary", "invalid_tokens", "logit_bias"
            )
