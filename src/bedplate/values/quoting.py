"""Writes untrusted text into other languages: shell, YAML, systemd units, PromQL, comments, Markdown, terminals.

Names, paths and metadata of models come from files that anybody may have made. Every emitter uses these functions, and
no other module quotes text itself.
"""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections.abc import Iterable

from bedplate.errors import NotPossible

_YAML_WORDS = frozenset(["y", "n", "yes", "no", "on", "off", "true", "false", "null", "none", "inf", "nan"])
"""Words that some YAML parsers do not read as strings."""
_YAML_PLAIN = re.compile(r"(?:--?)?[A-Za-z/_](?:[^\s#:\"'`\\]|:(?=\S)|(?<=\S) (?=\S)|(?<=[^\s])#)*")
_YAML_QUANTITY = re.compile(r"(?:0|[1-9][0-9]*)(?:[KMGT]i|m|s|h)")
_NOT_PLAIN = re.compile(r"[^ -~]")
_NAMED = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}


def is_safe(letter: str) -> bool:
    """Whether a character only shows itself: no control character, line separator or change of text direction."""
    return letter.isprintable() or unicodedata.category(letter) == "Zs"


def escape_controls(text: str, keep: str = "") -> str:
    """Replace characters that control a terminal, or end a line, by their escapes: a line stays one line."""
    if text.isprintable():
        return text
    # Most characters of a long text are in ASCII: looking at each one would take a tenth of the time of `plan --json`.
    return _NOT_PLAIN.sub(lambda one: one[0] if one[0] in keep or is_safe(one[0]) else _escape(one[0]), text)


def _escape(letter: str) -> str:
    number = ord(letter)
    if letter in _NAMED:
        return _NAMED[letter]
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def escape_json_controls(text: str) -> str:
    """Escape control characters in JSON, which allows some of them unescaped in a string."""
    return text if text.isascii() and "\x7f" not in text else re.sub(r"[^\n -~]", _escape_json, text)


def _escape_json(found: re.Match[str]) -> str:
    letter = found[0]
    if is_safe(letter):
        return letter
    units = letter.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


def write_comment(text: str) -> str:
    """Write one line that begins with `#`, for shell, YAML, Dockerfiles and systemd units."""
    line = escape_controls(text).rstrip()
    # Some of these languages continue a line that ends with a backslash.
    return f"# {line}{'.' if line.endswith(chr(92)) else ''}".rstrip()


def quote_shell(word: str) -> str:
    """Quote one word for bash. Control characters are written as escapes, so the script can be printed."""
    if all(map(is_safe, word)):
        return shlex.quote(word)
    return f"$'{''.join(map(_escape_ansi_c, word))}'"


def _escape_ansi_c(letter: str) -> str:
    if letter in "\\'":
        return f"\\{letter}"
    if is_safe(letter):
        return letter
    number = ord(letter)
    # A byte of a path that is not UTF-8 is a surrogate in a str.
    encoded = bytes([number - 0xDC00]) if 0xDC80 <= number <= 0xDCFF else letter.encode("utf-8", "surrogatepass")
    return "".join(f"\\x{byte:02x}" for byte in encoded)


def join_shell(words: Iterable[str]) -> str:
    return " ".join(map(quote_shell, words))


def quote_posix_shell(word: str) -> str:
    """Quote one word for `sh -c` inside of another file, which escapes control characters itself."""
    return shlex.quote(word)


def join_posix_shell(words: Iterable[str]) -> str:
    return " ".join(map(quote_posix_shell, words))


def quote_yaml(text: str) -> str:
    """Write a scalar that every YAML parser reads back as this string."""
    if _YAML_QUANTITY.fullmatch(text):
        return text
    if _YAML_PLAIN.fullmatch(text) and text.lower() not in _YAML_WORDS and text.isprintable():
        return text
    if text.isprintable() and "'" not in text:
        return f"'{text}'" if '"' in text or "\\" in text else f'"{text}"'
    if re.search("[\ud800-\udfff]", text):
        raise NotPossible(
            f"YAML cannot contain {escape_controls(text)}: it is not UTF-8", hint="rename the file or the model"
        )
    return f'"{"".join(map(_escape_yaml, text))}"'


def _escape_yaml(letter: str) -> str:
    if letter in '"\\':
        return f"\\{letter}"
    if letter.isprintable():
        return letter
    return "\\n" if letter == "\n" else f"\\U{ord(letter):08X}"


def quote_systemd(word: str, *, command: bool = False) -> str:
    """Quote one word of a unit so that systemd reads its specifiers, variables and quotes literally."""
    word = word.replace("%", "%%")
    if command:
        word = word.replace("$", "$$")
    if re.fullmatch(r"[\w@%+=:,./$-]+", word, re.ASCII):
        return word
    return f'"{"".join(map(_escape_systemd, word))}"'


def _escape_systemd(letter: str) -> str:
    # systemd ends a line at a carriage return too.
    return f"\\{letter}" if letter in '"\\' else letter if is_safe(letter) else _escape_ansi_c(letter)


def escape_systemd_text(text: str) -> str:
    """Write a description: a setting that systemd does not unquote."""
    line = escape_controls(" ".join(text.split())).replace("%", "%%")
    return f"{line}." if line.endswith("\\") else line


def escape_compose(text: str) -> str:
    """Compose substitutes variables in every string; `$$` is a dollar sign."""
    return text.replace("$", "$$")


def escape_kubernetes(text: str) -> str:
    """Kubernetes substitutes `$(NAME)` in commands and variables; `$$` is a dollar sign."""
    return re.sub(r"\$(?=[$(])", "$$", text)


def quote_promql(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escape_controls(escaped)}"'


def escape_markdown(text: str) -> str:
    """Write text without HTML, links and images of its own; it stays on one line and in one table cell."""
    return re.sub(r"[\\<>\[\]|]", r"\\\g<0>", escape_controls(text))
