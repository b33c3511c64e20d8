"""Mistakes of clients that engines report in their own words, reworded in terms of the API and bedplate's options."""

from __future__ import annotations

from bedplate.engines.traits import KnownMistake

TOO_LONG = KnownMistake(
    message="the prompt and its answer do not fit into the context length of {context} tokens; the option --context of "
    "bedplate serve sets it",
    code="context_length_exceeded",
)
TEXT_ONLY = KnownMistake(message="this model accepts text only", code="unsupported_vision", param="messages")
NO_EMBEDDINGS = KnownMistake(
    message="this model generates text; serve an embedding model for embeddings", code="unsupported_embeddings"
)
BAD_MESSAGES = KnownMistake(
    message="messages do not have the format of the API: {detail}", code="invalid_messages", param="messages"
)
BAD_TOOLS = KnownMistake(
    message="tools do not have the format of the API: {detail}", code="invalid_tools", param="tools"
)
BAD_SCHEMA = KnownMistake(message="the JSON schema is not supported: {detail}", code="invalid_schema")
BAD_TEMPLATE = KnownMistake(
    message="the model's chat template rejected the messages: {detail}", code="invalid_messages", param="messages"
)
BAD_TOKENS = KnownMistake(message="a token id is not in the model's vocabulary", code="invalid_tokens")
BAD_FIELD = KnownMistake(
    message="a field of the request has a value that is not supported: {detail}", code="invalid_value"
)
