"""Every engine states what closes its private port to the other users of the machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.engines.plans import machine, model, plan

from bedplate.engines import Engine, get_engine, load_engines
from bedplate.engines.base import WRAPPER_KEY_VARIABLE
from bedplate.engines.shipped import require_key
from bedplate.values import Workload

DOCS = Path(__file__).parents[2] / "docs"
ENGINES = sorted(load_engines())


def list_launches(engine: Engine) -> list[str]:
    """Its command lines, and the names and values of the variables of its launches, on several machines."""
    found = []
    for on in ("cpu", "H100 SXM", "MI300X"):
        target = engine.find_target(machine(on))
        which = model("meta-llama/Llama-3.1-8B-Instruct", folder=True)
        if target is not None and engine.list_weights(target, which, Workload()):
            launch = engine.launch(plan(engine, machine(on), which), 4321)
            found.append(" ".join([*launch.argv, *launch.env, *launch.env.values()]))
    return found


@pytest.mark.parametrize("id", ENGINES)
def test_engine_states_what_closes_its_private_port(id: str) -> None:
    engine = get_engine(id)
    stated = engine.private_port
    assert stated is not None, f"state in {id}'s file who checks the key of its private port: private_port"
    if stated.key_checked_by == "nobody":
        assert engine.recipe is None and engine.build is None and not engine.overlays, "bedplate can start it"
        return
    assert engine.private_key_variable is not None
    assert stated.key_checked_by == "engine" or engine.private_key_variable == WRAPPER_KEY_VARIABLE
    assert stated.key_checked_by == "engine" or not stated.open_paths
    if stated.key_checked_by == "wrapper":
        assert engine.build is None, "the wrapper runs Python programs"


@pytest.mark.parametrize("id", ENGINES)
def test_launch_has_no_option_for_a_key(id: str) -> None:
    """Every user of a machine can read the arguments of every process."""
    for launch in list_launches(get_engine(id)):
        assert not re.search(r"--[\w-]*(api|secret|token)[_-]?keys?\b", launch), launch


@pytest.mark.parametrize("id", ENGINES)
def test_documentation_lists_the_engine(id: str) -> None:
    section = (DOCS / "gateway.md").read_text().partition("## Private ports")[2].partition("\n## ")[0]
    stated = get_engine(id).private_port
    assert stated is not None
    (row,) = [line for line in section.splitlines() if line.startswith(f"| {get_engine(id).name} |")]
    assert f"| {stated.key_checked_by} |" in row
    assert all(f"`{path}`" in row for path in stated.open_paths)


def test_names_of_the_variable_agree() -> None:
    assert require_key.KEY_VARIABLE == WRAPPER_KEY_VARIABLE
