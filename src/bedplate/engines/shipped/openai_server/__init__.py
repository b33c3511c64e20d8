"""A small OpenAI-compatible server for engines that bring none of their own.

Runs inside of an engine's environment, on uvicorn and starlette (jinja2 and tokenizers only where a backend uses
`HuggingFaceText`). A backend is one file beside this package: it subclasses `Backend` and calls `serve`.

One thread owns the engine and does nothing but compute; one event loop owns all connections. They meet in `Worker`.
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
