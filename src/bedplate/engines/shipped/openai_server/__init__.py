"""A small OpenAI-compatible server for engines without a server.

Runs in an engine's environment with uvicorn and starlette (jinja2 and tokenizers only if a backend uses
`HuggingFaceText`). A backend is one file next to this package: it subclasses `Backend` and calls `serve`.

One thread owns the engine and only computes; one event loop owns all connections. `EngineWorker` connects them.
"""

from .backend import BackendError, EngineBackend, Finish, GenerationRequest, Piece, SequentialBackend, Text, TokenPair
from .serve import make_parser, serve
from .text import ChatTemplate, HuggingFaceText, find_special_tokens, read_json, read_template

__all__ = [
    "BackendError",
    "ChatTemplate",
    "EngineBackend",
    "Finish",
    "GenerationRequest",
    "HuggingFaceText",
    "Piece",
    "SequentialBackend",
    "Text",
    "TokenPair",
    "find_special_tokens",
    "make_parser",
    "read_json",
    "read_template",
    "serve",
]
