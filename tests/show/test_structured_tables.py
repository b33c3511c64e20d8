"""Structured output in the table of `bench`, in `compare`, in the report and in the Markdown of `gate`."""

from __future__ import annotations

import io

from rich.console import Console
from tests.judge.made_cells import GOOD, Noise, make_pair
from tests.runs import make_cell, make_run

from bedplate.judge.compare import compare
from bedplate.measure.structured_prompts import read_prompts
from bedplate.measure.structured_scoring import AnswerScore, ChatReply, score_reply, summarize_all, summarize_kind
from bedplate.show.bench import render_run
from bedplate.show.compare import render_verdict
from bedplate.show.report import make_report, to_html, to_markdown
from bedplate.values import replace_fields
from bedplate.values.structured import StructuredOutput

IGNORED = 'a control request was answered although it does not match; the answer is "Paris"'


def score(name: str, text: str) -> AnswerScore:
    file = read_prompts()
    prompt = next(one for one in file.prompts if one.id == name)
    return score_reply(prompt, ChatReply(200, text, finish="stop"), file.tools)


def make_structured() -> StructuredOutput:
    scores = [score("object-sum", '{"sum": 5}'), score("object-capital", '{"city": "Rome"}')]
    kinds = [
        summarize_kind("json_object", "enforced", None, scores),
        summarize_kind("json_schema", "ignored", IGNORED, []),
    ]
    return summarize_all(read_prompts(), kinds, scores)


def print_page(what: object) -> str:
    out = io.StringIO()
    Console(file=out, width=200, highlight=False).print(what)
    return out.getvalue()


def test_bench_shows_shares_with_intervals_and_what_is_not_supported() -> None:
    cells = [
        make_cell("vllm", load, 50.0, quality=replace_fields(GOOD, structured=make_structured())) for load in (1, 4)
    ]
    text = print_page(render_run(make_run(cells)))
    head = "vllm 1.0 Q4_1, structured output: 1 of 2 answers as asked (9–91 %) · does not support JSON schemas"
    assert text.count(head) == 1, "it does not depend on the load"
    words = " ".join(text.split())
    assert f"JSON schemas – – – – – not supported: it ignores them ({IGNORED})" in words
    assert "JSON objects 1/2 (9–91 %) 2/2 (34–100 %) 1/2 (9–91 %) – 1/2 (9–91 %)" in words
    assert "structured output" not in print_page(render_run(make_run([make_cell("vllm", 1, 50.0)])))


def test_compare_shows_both_sides() -> None:
    sides = [
        [replace_fields(cell, quality=replace_fields(GOOD, structured=make_structured())) for cell in side]
        for side in make_pair(Noise(7), 1.0, 5, (4,))
    ]
    text = print_page(render_verdict(compare(*sides, metrics=("schema",))))
    assert text.count("1 of 2 answers as asked (9–91 %) · does not support JSON schemas") == 2


def test_the_report_has_a_section() -> None:
    page = make_report(
        [make_run([make_cell("vllm", 1, 50.0, quality=replace_fields(GOOD, structured=make_structured()))])]
    )
    markdown, html = to_markdown(page), to_html(page)
    assert markdown.count("## Structured output") == 1 and "2/2 (34–100 %)" in markdown
    assert "<h2>Structured output</h2>" in html and "does not support JSON schemas" in html
    assert "Structured output" not in to_html(make_report([make_run([make_cell("vllm", 1, 50.0)])]))
