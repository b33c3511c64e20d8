"""Untrusted text in other languages, read back by their own parsers."""

from __future__ import annotations

import json
import re
import shlex
import subprocess

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from bedplate.errors import NotPossible
from bedplate.values.model import Model
from bedplate.values.quoting import (
    escape_compose,
    escape_controls,
    escape_json_controls,
    escape_kubernetes,
    escape_markdown,
    is_safe,
    join_posix_shell,
    join_shell,
    quote_promql,
    quote_shell,
    quote_yaml,
    write_comment,
)

odd = st.sampled_from([
    "\n", "\r", "\t", "\x1b[2J", "\x9b2J", "\x7f", "\x85", "\u2028", "\u2029", "\u202e", "\ufeff", "\udcff", "\u00a0",
    "'", '"', "`", "\\", "$", "$(id)", "${HOME}", "$$", "#", " #", "!", "%", "*", "?", "~", "&", "|", ";", "<", ">",
    "(", ")", "{", "}", "[", "]", "-", "--", ":", ": ", "- ", "---\n", "...", "!!python/name:os.system", "é", "…",
    "🙂", " ",
])  # fmt: skip
texts = st.lists(odd | st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=5), max_size=8).map(
    "".join
)


@given(texts)
@example("\x1b]0;title\x07\u009b31m\r\n")
def test_escaped_text_is_one_line_that_only_shows_itself(text: str) -> None:
    found = escape_controls(text)
    assert all(map(is_safe, found)) and len(found.splitlines()) <= 1
    assert escape_controls(found) == found
    assert write_comment(text).startswith("#") and not write_comment(text).endswith("\\")
    assert len(write_comment(text).splitlines()) == 1


@given(st.lists(texts, max_size=4))
@example(["\n", "'", "a'b\n", "\udcff", "\x1b"])
def test_shell_words_are_read_back_by_bash(words: list[str]) -> None:
    line = join_shell(words)
    assert all(map(is_safe, line))
    done = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True, env={"LC_ALL": "C.UTF-8"}
    )
    found = done.stdout.split(b"\0")[:-1]
    assert found == ([word.encode("utf-8", "surrogateescape") for word in words] or [b""])


@given(st.lists(texts, min_size=1, max_size=4))
def test_posix_words_are_read_back(words: list[str]) -> None:
    assert shlex.split(join_posix_shell(words)) == words


def test_yaml_refuses_bytes_that_are_not_utf_8() -> None:
    with pytest.raises(NotPossible, match=r"cannot contain a\\udcff"):
        quote_yaml("a\udcff")


@given(texts.map(lambda text: text.replace("\udcff", "")))
def test_yaml_scalar_is_read_back_as_value_and_key(text: str) -> None:
    assert yaml.safe_load(f"- {quote_yaml(text)}") == [text]
    assert all(letter.isprintable() for letter in quote_yaml(text))
    if text:
        assert yaml.safe_load(f"{quote_yaml(text)}: 1") == {text: 1}


@given(st.dictionaries(texts, texts, max_size=3))
def test_json_without_control_characters_has_the_same_content(value: dict[str, str]) -> None:
    value = {key.replace("\udcff", ""): text.replace("\udcff", "") for key, text in value.items()}
    written = escape_json_controls(json.dumps(value, ensure_ascii=False, indent=1))
    assert json.loads(written) == value and all(letter == "\n" or is_safe(letter) for letter in written)


def expand_kubernetes(text: str, variables: dict[str, str]) -> str:
    """Substitute variables as k8s.io/kubernetes/third_party/forked/golang/expansion does."""
    found, at = "", 0
    while at < len(text):
        if text[at] == "$" and at + 1 < len(text):
            if text[at + 1] == "$":
                found, at = f"{found}$", at + 2
                continue
            if text[at + 1] == "(" and (end := text.find(")", at)) > 0:
                name = text[at + 2 : end]
                found, at = found + variables.get(name, f"$({name})"), end + 1
                continue
        found, at = found + text[at], at + 1
    return found


@given(texts)
@example("$$(id)$(HOME)$$$x$")
def test_variables_are_not_substituted(text: str) -> None:
    assert expand_kubernetes(escape_kubernetes(text), {"id": "secret", "HOME": "secret"}) == text
    assert "$" not in escape_compose(text).replace("$$", "") and escape_compose(text).replace("$$", "$") == text


@given(texts)
def test_promql_label_is_one_string(text: str) -> None:
    assert re.fullmatch(r'"(?:[^"\\]|\\.)*"', quote_promql(text))


@given(texts)
@example("<script>alert(1)</script> ![x](http://tracker) | a\n# b")
def test_markdown_has_no_tags_links_or_cells_of_its_own(text: str) -> None:
    assert not re.search(r"(?<!\\)(?:\\\\)*[<>\[\]|]", escape_markdown(text)) and "\n" not in escape_markdown(text)


def make_model(name: str) -> Model:
    return Model(
        name=name, format="gguf", architecture="llama", parameters=1, weight_bytes=1, num_layers=1, kv_bytes_per_token=1
    )


@given(texts)
@example("..")
@example("a/..")
@example("--trust-remote-code")
@example(".\\..\\x")
def test_names_are_no_options_and_no_other_folders(name: str) -> None:
    model = make_model(name)
    assert not model.served_name.startswith("-") and model.served_name
    assert model.short_name[0] not in "-." and not set("/\\\n\r\x1b") & set(model.short_name)
    assert all(map(is_safe, model.short_name + model.served_name))


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "SmolLM2 135M", "a.b_c-D:e"])
def test_usual_names_are_unchanged(name: str) -> None:
    assert make_model(name).short_name == "-".join(name.split()).rpartition("/")[2]
    assert make_model(name).served_name == "-".join(name.split()).lower()
    assert quote_shell(name.replace(" ", "")) == name.replace(" ", "")
