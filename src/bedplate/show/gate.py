"""The result of `gate`: Markdown for a pull request, and JUnit XML."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from xml.etree import ElementTree

from bedplate.judge.weighing import METRICS, is_loss
from bedplate.judge.words import (
    METRIC_WORDS,
    describe_change,
    describe_difference,
    describe_load,
    format_metric,
    format_signed_percent,
)
from bedplate.measure.bench import BenchListener
from bedplate.measure.summary import compute_output_tok_s
from bedplate.show.structured import describe_structured
from bedplate.values import Refusal
from bedplate.values.gate import GateResult
from bedplate.values.quoting import escape_markdown
from bedplate.values.run import Cell, Load, Quality, Run, Subject
from bedplate.values.structured import StructuredOutput
from bedplate.values.units import format_seconds
from bedplate.values.verdict import Effect, Metric, Verdict

HEADS = {0: "no regression found", 10: "better", 20: "not proven", 30: "worse"}
SPEED: tuple[Metric, ...] = ("output_tok_s", "e2e_ms")


class GateTeller(BenchListener):
    """Notes the progress of a gate, one line for each measurement."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note, self._rounds = note, 0

    def report_start(self, run: Run, subjects: Sequence[Subject], idle: float) -> None:
        if run.matrix is None:
            return
        self._rounds = run.matrix.turns
        names = " and ".join(f"{one.engine} {one.engine_version or ''} ({one.role})" for one in subjects)
        limit = format_seconds(run.matrix.budget_s)
        self._note(f"{self._rounds} interleaved rounds of {names} within {limit}; the CPU is {idle:.0%} idle")

    def report_refusal(self, refusal: Refusal) -> None:
        self._note(f"{refusal.engine}: {refusal.why}")

    def report_quality(self, subject: Subject, quality: Quality) -> None:
        share = "" if quality.agreement is None else f", greedy-token agreement {quality.agreement:.1%}"
        self._note(f"answers of the {subject.role}: {quality.verdict}{share}")

    def report_structured(self, subject: Subject, found: StructuredOutput) -> None:
        self._note(f"structured output of the {subject.role}: {describe_structured(found)}")

    def report_cell(self, cell: Cell) -> None:
        rate = compute_output_tok_s(cell.repeats[-1], cell.load) if cell.repeats else None
        figure = "no token counts" if rate is None else f"{format_metric('output_tok_s', rate)} tok/s"
        at = f"round {len(cell.repeats)} of {self._rounds}"
        self._note(f"{at}, {cell.subject.role}, {describe_load(cell.load)}: {figure}")


def describe_outcome(result: GateResult) -> str:
    return HEADS[result.exit_code]


def write_markdown(result: GateResult) -> str:
    safe = escape_markdown
    verdict = result.verdict
    lines = [
        f"### bedplate gate: {describe_outcome(result)}",
        "",
        f"**{safe(result.challenger.name)}** against the baseline **{safe(result.baseline.name)}**: "
        f"{safe(result.model)} on {safe(result.hardware)}, {result.rounds} interleaved rounds.",
        "",
        safe(_describe_result(result)),
    ]
    if result.effects:
        lines += ["", "| metric | load | baseline | challenger | change | 95 % interval | |"]
        lines += ["| --- | --- | ---: | ---: | ---: | :---: | --- |", *map(_format_row, _list_rows(result))]
    if verdict is not None and verdict.would_prove and result.exit_code == 20:
        lines += ["", f"What would decide it: {safe(verdict.would_prove)}."]
    lines += ["", "<details><summary>Details</summary>", "", *(f"- {safe(one)}" for one in _list_details(result))]
    return "\n".join([*lines, "", "</details>", ""])


def _describe_result(result: GateResult) -> str:
    """The reason of the exit code. Whether a small gain would pay for a migration is not what a gate asks."""
    verdict = result.verdict
    if verdict is None or result.exit_code != 0:
        return verdict.worse if verdict is not None and verdict.worse is not None else result.text
    deciding = list(_find_deciding(verdict).values())
    if not deciding:
        return result.text
    worst = describe_change(min(deciding, key=lambda one: one.gain.value))
    return f"{result.challenger.name}: {worst}. No loss of more than {verdict.tolerance * 100:g} % was found."


def _format_row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(map(escape_markdown, cells)) + " |"


def _list_rows(result: GateResult) -> Iterator[tuple[str, ...]]:
    deciding = _find_deciding(result.verdict) if result.verdict is not None else {}
    for one in result.effects:
        if one.metric in ("ttft_ms", "tpot_ms"):  # the 95th percentiles are shown
            continue
        yield (
            METRIC_WORDS[one.metric],
            "" if one.metric in ("agreement", "schema_match") else describe_load(one.load),
            format_metric(one.metric, one.a),
            format_metric(one.metric, one.b),
            format_signed_percent(one.gain.value),
            f"{format_signed_percent(one.gain.low)} … {format_signed_percent(one.gain.high)}",
            # Its own interval: that of `one` holds for more metrics, and is wider.
            _describe_state(deciding[key], result.verdict) if (key := (one.metric, one.load)) in deciding else "",
        )


def _describe_state(one: Effect, verdict: Verdict | None) -> str:
    if verdict is None:
        return ""
    if is_loss(one, verdict.tolerance):
        return "worse"
    if one.sure_low > 1.0:
        return "better"
    return "within tolerance" if one.sure_low > 1 - verdict.tolerance else "uncertain"


def _find_deciding(verdict: Verdict) -> dict[tuple[Metric, Load], Effect]:
    names = {METRICS[name] for name in verdict.metrics} or set(SPEED)
    return {(one.metric, one.load): one for one in verdict.effects if one.metric in names}


def _list_details(result: GateResult) -> Iterator[str]:
    yield f"run {result.run}, {result.at}, {format_seconds(result.took_s)}"
    yield "change: positive is better, also for times and memory"
    verdict = result.verdict
    if verdict is not None:
        deciding = ", ".join(verdict.metrics) or "answers, errors and speed"
        yield f"tolerance {verdict.tolerance * 100:g} %; decided by {deciding}"
        yield from (f"differs: {describe_difference(one)}" for one in verdict.differences)
        yield from (f"left out: {one}" for one in verdict.left_out)
        for role, side in (("baseline", verdict.a), ("challenger", verdict.b)):
            if side.quality is not None and (found := side.quality.structured) is not None:
                yield f"structured output of the {role}: {describe_structured(found)}"
    for one in result.stored:
        if one.output_tok_s is not None:
            rate = format_metric("output_tok_s", one.output_tok_s)
            yield f"stored baseline with {describe_load(one.load)}: {rate} tok/s"
    yield from result.notes


# JUnit


def write_junit(result: GateResult) -> str:
    """One test case for each deciding metric and load, and one for the verdict as a whole."""
    suite = ElementTree.Element("testsuite", name="bedplate gate", timestamp=result.at, time=f"{result.took_s:.3f}")
    named = f"bedplate.gate.{result.challenger.engine}"
    counts = {"failure": 0, "skipped": 0}

    def add_case(name: str, state: str, message: str) -> None:
        case = ElementTree.SubElement(suite, "testcase", classname=named, name=name, time="0")
        kind = {"worse": "failure", "not proven": "skipped", "uncertain": "skipped"}.get(state)
        if kind is not None:
            counts[kind] += 1
            ElementTree.SubElement(case, kind, message=message)
        else:
            ElementTree.SubElement(case, "system-out").text = message

    verdict = result.verdict
    for one in _find_deciding(verdict).values() if verdict is not None else ():
        share = one.metric in ("agreement", "schema_match")
        load = "" if share else f", {describe_load(one.load)}"
        add_case(f"{METRIC_WORDS[one.metric]}{load}", _describe_state(one, verdict), describe_change(one))
    add_case("verdict", describe_outcome(result), _describe_result(result))
    suite.set("tests", str(len(suite)))
    suite.set("failures", str(counts["failure"]))
    suite.set("skipped", str(counts["skipped"]))
    suite.set("errors", "0")
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"
