"""The hostile soak names tests that exist, and its judgement can fail."""

from __future__ import annotations

import ast
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from tests.soak.flood import Seen
from tests.soak.grammar import HostileRequest
from tests.soak.hostile import MOST_GROWTH_BYTES, POINTS, Point, Results, report_attack, summarize_point

ROOT = Path(__file__).parent.parent
SENT = HostileRequest((b"GET / HTTP/1.1\r\n\r\n",), 0.0, "reads")


@pytest.mark.parametrize("test", sorted({test for point in POINTS for test in point.tests}))
def test_every_point_names_tests_that_exist(test: str) -> None:
    file, _, name = test.partition("::")
    tree = ast.parse((ROOT / file).read_text())
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert name in functions if name else any(one.startswith("test_") for one in functions)


def make_cases(*cases: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(f'<testcase file="tests/a.py" {case}</testcase>') for case in cases]


@pytest.mark.parametrize(
    ("cases", "holds"),
    [
        (['name="test_one">'], True),
        (['name="test_one[x]">', 'name="test_one[y]"><skipped/>'], True),
        (['name="test_one[x]">', 'name="test_one[y]"><failure/>'], False),
        (['name="test_one"><error/>'], False),
        (['name="test_one"><skipped/>'], False),
        (['name="test_other">'], False),
        ([], False),
    ],
)
def test_a_point_holds_if_its_tests_ran_and_none_failed(cases: list[str], holds: bool) -> None:
    assert summarize_point(Point("a", ("tests/a.py::test_one",)), make_cases(*cases)).holds == holds


def make_results(*growth_bytes: int) -> Results:
    return Results(memory_bytes=[10**8, *(2 * 10**8 + one for one in growth_bytes)], files=[10])


def make_seen(ttft_ms: float) -> Seen:
    return Seen(ttft_ms=[ttft_ms] * 20, whole=20)


def test_memory_may_grow_at_first_and_must_then_be_flat() -> None:
    assert make_results(0, 1, 2, 1, 0, 2).compute_growth()[0] < 10
    rising = make_results(*(step * MOST_GROWTH_BYTES for step in range(8)))
    growth, most = rising.compute_growth()
    assert growth > most
    rows = report_attack("gateway", make_seen(10), make_seen(10), rising, others=0.0)
    assert [row.what for row in rows if not row.holds] == ["gateway: growth of memory"]


@pytest.mark.parametrize(
    ("answer", "must_refuse", "is_wrong"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", False, False),
        (b"HTTP/1.1 200 OK\r\n\r\n", False, False),
        (b"HTTP/1.1 200 OK\r\n\r\nHTTP/1.1 500 Internal Server Error\r\n\r\n", False, True),
        (b"HTTP/1.1 400 Bad Request\r\n\r\nTraceback", False, True),
        (b"HTTP/1.1 401 Unauthorized\r\n\r\n", True, False),
        (b"HTTP/1.1 200 OK\r\n\r\n", True, True),
        (b"", True, False),
    ],
)
def test_wrong_answers_are_found(answer: bytes, must_refuse: bool, is_wrong: bool) -> None:
    results = Results()
    results.add_answer("1", SENT, answer, must_refuse=must_refuse)
    assert bool(results.wrong) == is_wrong


@pytest.mark.parametrize(
    ("part", "others", "holds"), [("gateway", 0.0, False), ("gateway", 0.5, True), ("shipped", 0.0, True)]
)
def test_p95_is_judged_for_the_gateway_on_a_quiet_machine(part: str, others: float, holds: bool) -> None:
    rows = report_attack(part, make_seen(10), make_seen(30), make_results(0, 0, 0, 0), others)
    assert all(row.holds for row in rows) == holds
    assert ("not judged" in rows[-1].goal) == (others > 0.1)


@pytest.mark.parametrize(("others", "holds"), [(0.0, False), (0.5, True)])
def test_too_few_times_have_no_p95(others: float, holds: bool) -> None:
    rows = report_attack("gateway", Seen(ttft_ms=[10.0]), make_seen(30), make_results(0, 0, 0, 0), others)
    assert rows[-1].holds == holds and "too few answers: 1 of 20" in rows[-1].result
