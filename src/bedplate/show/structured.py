"""Structured output as text: one line for each kind, with what is not supported and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from bedplate.judge.words import format_count
from bedplate.measure.statistics import compute_wilson_interval
from bedplate.values.run import Cell, Subject
from bedplate.values.structured import KIND_NAMES, CheckedShare, StructuredOutput, StructuredSupport

HEADINGS = ("structured output", "as asked", "valid JSON", "schema match", "right tool", "right arguments", "")
NOT_ASKED = "–"


def list_structured(cells: Iterable[Cell]) -> list[tuple[str, StructuredOutput]]:
    """The results of the measured engines, each with the name of its engine. It does not depend on the load."""
    found: dict[str, StructuredOutput] = {}
    for cell in cells:
        if cell.quality is not None and cell.quality.structured is not None:
            found[_name_subject(cell.subject)] = cell.quality.structured
    return list(found.items())


def _name_subject(subject: Subject) -> str:
    parts = (subject.role, subject.engine, subject.engine_version, subject.quantization)
    return " ".join(part for part in parts if part)


def list_rows(found: StructuredOutput) -> Iterator[tuple[str, ...]]:
    """One row for each kind, in the order of `HEADINGS`."""
    for one in found.kinds:
        shares = (one.matched, one.valid_json, one.schema_match, one.right_tool, one.right_arguments)
        yield (KIND_NAMES[one.kind], *map(format_share, shares), _describe_kind(one))


def format_share(share: CheckedShare | None) -> str:
    """Such as "45/46 (89–100 %)"."""
    if share is None:
        return NOT_ASKED
    return f"{share.passed}/{share.count} ({_format_range(share.low, share.high)})"


def _format_range(low: float, high: float) -> str:
    return f"{low * 100:.0f}–{high * 100:.0f} %"


def _describe_kind(one: StructuredSupport) -> str:
    if not one.is_supported:
        return describe_missing(one)
    parts = [one.reason if one.support == "unknown" else None]
    parts += [f"{format_count(number, 'prompt')} {word}" if number else None
              for number, word in ((one.refused, "refused"), (one.failed, "failed"))]  # fmt: skip
    return "; ".join(part for part in parts if part)


def describe_missing(one: StructuredSupport) -> str:
    reason = one.reason or "no reason was given"
    return f"not supported: it ignores them ({reason})" if one.support == "ignored" else f"not supported: {reason}"


def describe_structured(found: StructuredOutput) -> str:
    """One line: the share of answers as asked, and the kinds that are not supported."""
    parts = []
    if found.asked:
        low, high = compute_wilson_interval(found.matched / found.asked, found.asked, 0.95)
        parts.append(f"{found.matched} of {found.asked} answers as asked ({_format_range(low, high)})")
    missing = [KIND_NAMES[one.kind] for one in found.list_unsupported()]
    if missing:
        parts.append(f"does not support {', '.join(missing)}")
    return " · ".join(parts) or "nothing was asked"


def write_lines(cells: Iterable[Cell]) -> Iterator[str]:
    """A table for a terminal, below that of `bench`."""
    for name, found in list_structured(cells):
        rows = [HEADINGS, *list_rows(found)]
        widths = [max(len(row[number]) for row in rows) for number in range(len(HEADINGS) - 1)]
        yield f"{name}, structured output: {describe_structured(found)}"
        for row in rows:
            padded = (value.ljust(width) for value, width in zip(row, widths, strict=False))
            yield f"  {'  '.join((*padded, row[-1]))}".rstrip()
