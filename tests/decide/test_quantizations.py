"""The table of quantizations: every plan has a row, and every row has a source."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.decide.plan_cases import generate_cases, list_chips, make_machine

from bedplate.decide.candidates import EngineCandidate, convert_model
from bedplate.decide.case import DecisionCase, with_model_task
from bedplate.decide.choose import EngineSearch
from bedplate.decide.evidence import MachineEvidence
from bedplate.engines import Engine, load_engines
from bedplate.engines.base import ComputeTarget
from bedplate.engines.shared import name_quantization
from bedplate.facts.known_models import find_model, list_known_names
from bedplate.facts.published_weights import list_published
from bedplate.show.quantizations import list_rows, write_quantizations_page
from bedplate.values import Model, Weights, Workload
from bedplate.values.intent import Operations

PAGE = Path(__file__).parents[2] / "docs" / "quantizations.md"
QUICK, NIGHTLY = 60, 3000


def list_kinds() -> list[Model]:
    """One known or published model of each quantization and format, dense and with experts."""
    found: dict[tuple[str | None, str, bool], Model] = {}
    for name in list_known_names():
        model = find_model(name)
        for one in (model, *(form.model for form in list_published(model))):
            found.setdefault((one.quantization, one.format, bool(one.num_experts)), one)
    return list(found.values())


def has_row(engine: Engine, target: ComputeTarget, weights: Weights, model: Model) -> bool:
    method = name_quantization(weights, convert_model(model, weights))
    return method is None or engine.find_quantization(method, target) is not None


def test_all_weights_that_an_engine_lists_have_a_row() -> None:
    chips = {(chip.vendor, chip.kind, chip.capability, chip.features): chip for chip in list_chips()}
    models, compared = list_kinds(), 0
    for chip in chips.values():
        machine = make_machine(chip.name, 1)
        for known in load_engines().values() if machine is not None else ():
            assert machine is not None
            engine = known.adapt_to_hardware(machine)
            target = engine.find_target(machine)
            for model in models if target is not None else ():
                assert target is not None
                for weights in engine.list_weights(target, model, Workload()):
                    compared += 1
                    assert has_row(engine, target, weights, model), (engine.id, chip.name, weights, model.name)
    assert compared > 2000


def check_plans(number: int) -> None:
    engines, planned = list(load_engines().values()), 0
    for position, case in enumerate(generate_cases(number)):
        machine, model = make_machine(case.chip, case.count), find_model(case.model)
        assert machine is not None
        asked = DecisionCase(machine, model, with_model_task(model, case.workload), Operations())
        engine = engines[position % len(engines)]
        found = EngineSearch(asked, MachineEvidence(), installable=False).get_candidate(engine)
        if not isinstance(found, EngineCandidate):
            continue
        planned += 1
        method = name_quantization(found.weights, found.model)
        assert method is None or found.engine.find_quantization(method, found.target) is not None, case.label
        if found.settings.kv_type != "16-bit":
            assert found.engine.refuse_eight_bit_cache(found.target, found.model) is None, case.label
    assert planned > number / 8


def test_every_generated_plan_has_a_row() -> None:
    check_plans(QUICK)


@pytest.mark.nightly
def test_thousands_of_generated_plans_have_a_row() -> None:
    check_plans(NIGHTLY)


def test_every_row_cites_a_file_and_a_version_once() -> None:
    for engine in load_engines().values():
        rows = list_rows(engine)
        assert rows, engine.id
        assert len({(row.part, row.method, row.device, row.units) for row in rows}) == len(rows), engine.id
        for row in rows:
            assert re.search(r"\.(?:py|cu|cpp|c|h|m|rs|metal|mdx?)\b|/\w+ of", row.source), (engine.id, row)
            assert re.search(r"\bb?\d+(?:\.\d+)*|\b[0-9a-f]{7}\b", row.source), (engine.id, row)


def test_the_page_is_generated_from_the_rows() -> None:
    assert PAGE.read_text(encoding="utf-8") == write_quantizations_page(), "run `make docs`"
