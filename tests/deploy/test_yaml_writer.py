"""YAML round trip of any text, and the position of comments."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from bedplate.deploy.yaml_writer import annotate, strip_comments, write_document, write_documents

texts = st.text(st.characters(codec="utf-8", exclude_characters="\x85\u2028\u2029\ufeff"), max_size=30)
odd = st.sampled_from([
    "yes", "No", "on", "~", "null", "1e3", "0x1f", "1_000", "12:30:45", ".5", "- a", "a: b", "a #b", "{}", "[x]", "*a",
    "&a", "!a", "|", ">", "%a", "@a", "`a`", "'", '"', "a'b", "--opt=1", "--", "-", "$(VAR)", "8Gi", "100m", "0.0.0.0",
    "", " a", "a ", "a\nb", "a\nb\n", "\n", "a\n\nb", "a\n b", "tcp://*:5557", '{"a": "b"}', "=", "1.2.3", "0o7",
    "Ünïcode",
])  # fmt: skip
scalars = st.one_of(st.booleans(), st.integers(-(2**53), 2**53), texts, odd)
keys = st.one_of(odd, texts).filter(bool)
trees = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(keys, inner, max_size=4)),
    max_leaves=12,
)


@given(st.dictionaries(keys, trees, max_size=5))
def test_written_data_is_read_back_unchanged(tree: dict[str, Any]) -> None:
    assert (yaml.safe_load(write_document(tree)) or {}) == tree


@given(
    st.dictionaries(keys, trees.map(lambda value: annotate(value, "a reason\nof two lines # and a mark")), max_size=5)
)
def test_comments_do_not_change_data(tree: dict[str, Any]) -> None:
    assert (yaml.safe_load(write_document(tree, "A head: with - marks")) or {}) == strip_comments(tree)


def test_comment_is_above_its_value() -> None:
    tree = {"a": annotate(1, "first"), "b": [{"c": annotate(2, "second"), "d": None}, annotate("x", "third")]}
    assert write_document(tree, "head") == (
        "# head\n# first\na: 1\nb:\n  # second\n  - c: 2\n  # third\n  - x\n"
    )  # fmt: skip


def test_long_comments_are_wrapped() -> None:
    lines = write_document({"a": {"b": annotate(1, "word " * 60)}}).splitlines()
    assert max(map(len, lines)) <= 112 and all(line.startswith("  # word") for line in lines[1:-1])


def test_writes_several_documents() -> None:
    text = write_documents([{"a": 1}, {"b": "2"}], "head")
    assert list(yaml.safe_load_all(text)) == [{"a": 1}, {"b": "2"}] and text.startswith("# head\n")


@pytest.mark.parametrize("text", ["yes", "1e3", "0o17", "012", "1:30", "y", "Null", "0x10", "1_0", ".inf", "1.0"])
def test_ambiguous_text_is_quoted(text: str) -> None:
    assert write_document({"a": text}) == f'a: "{text}"\n'
