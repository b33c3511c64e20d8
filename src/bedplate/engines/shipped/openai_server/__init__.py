"""A small OpenAI-compatible server for engines without a server.

Runs in an engine's environment with uvicorn and starlette (jinja2 and tokenizers only if a backend uses
`HuggingFaceText`). A backend is one file next to this package: it subclasses `Backend` and calls `serve`.

One thread owns the engine and only computes; one event loop owns all connections. `Worker` connects them.
"""

from .backend import Backend, Finish, OneByOne, Piece, Refused, Request, Text
from .serve import parser_for, serve
from .text import ChatTemplate, HuggingFaceText, read_json, special_tokens, template_of

__all__ = [
    "Backend",
    "ChatTemplate",
    "Finish",
    "HuggingFaceText",
    "OneByOne",
    "Piece",
    "Refused",
    "Request",
    "Text",
    "parser_for",
    "read_json",
    "serve",
    "special_tokens",
    "template_of",
]
