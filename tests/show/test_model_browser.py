"""The list of models on a terminal: keys sort, filter, search and choose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from rich.console import Console

from bedplate.cli.browse_models import parse_keys
from bedplate.decide.catalogue import CatalogueEntry
from bedplate.show.model_browser import ModelBrowser, render_browser
from bedplate.values import Figure, replace_fields


def make_entry(
    name: str, billions: float, tok_s: float | None, fits: bool = True, here: bool = False
) -> CatalogueEntry:
    return CatalogueEntry(
        name=name, task="generate", parameters=int(billions * 1e9), fits=fits, why=None if fits else "it needs 900 GB",
        engine="llama.cpp", quantization="Q4_K_M", memory_bytes=int(billions * 6e8), longest_context=8192,
        tok_s=Figure(value=tok_s, low=tok_s, high=tok_s, basis="estimate") if tok_s is not None else None,
        here=(f"{name}.gguf",) if here else (),
    )  # fmt: skip


BROWSER = ModelBrowser(
    (
        make_entry("big/Large-70B", 70, 4),
        make_entry("mid/Middle-8B", 8, 30),
        make_entry("tiny/Small-1B", 1, 120, here=True),
        make_entry("huge/Frontier-1T", 1000, None, fits=False),
    ),
    "a machine",
)


def press(*keys: str, state: ModelBrowser = BROWSER) -> ModelBrowser:
    for key in keys:
        state = state.press(key)
    return state


def list_names(state: ModelBrowser) -> list[str]:
    return [entry.name.rpartition("/")[2] for entry in state.rows]


def show(state: ModelBrowser, width: int = 80, height: int = 24) -> list[str]:
    console = Console(width=width, height=height, record=True, file=None, color_system=None)
    with console.capture() as captured:
        console.print(render_browser(state, height, width))
    return captured.get().splitlines()


def test_keys_sort_the_models() -> None:
    assert list_names(BROWSER) == ["Large-70B", "Middle-8B", "Small-1B"]
    assert list_names(press("s")) == ["Small-1B", "Middle-8B", "Large-70B"], "fastest first"
    assert press("s").sort == "speed" and press("s", "s").sort == "size" and press("S").sort == "name"
    assert list_names(press("S")) == ["Large-70B", "Middle-8B", "Small-1B"]


def test_keys_filter_by_fit_and_speed() -> None:
    assert "Frontier-1T" in list_names(press("f")), "all"
    assert list_names(press("f", "f")) == ["Small-1B"], "on this machine"
    assert list_names(press("v", "v", "v")) == ["Middle-8B", "Small-1B"], "20 tok/s or more"


def test_search_takes_characters_until_enter() -> None:
    state = press("/", *"sMall q")
    assert state.searching and state.search == "sMall q" and not state.rows and state.selected is None
    state = press("backspace", "backspace", "enter", state=state)
    assert not state.searching and list_names(state) == ["Small-1B"] and state.action is None
    assert press("/", "x", "escape").search == ""


def test_another_task_is_asked_for() -> None:
    assert press("t").task == "embed" and press("t", "t", "t").task == "generate"


@pytest.mark.parametrize(
    ("keys", "name"),
    [(["down"], "Middle-8B"), (["up"], "Large-70B"), (["end"], "Small-1B"), (["page-down"], "Small-1B"),
     (["end", "home"], "Large-70B"), (["end", "down", "up"], "Middle-8B")],
)  # fmt: skip
def test_selection_stays_within_the_rows(keys: list[str], name: str) -> None:
    selected = press(*keys).selected
    assert selected is not None and selected.name.endswith(name)


def test_enter_serves_and_plans_for_other_hardware() -> None:
    assert press("enter").action == "serve" and press("p").action == "plan"
    assert press("enter", state=replace(BROWSER, serves=False)).action == "plan"
    assert press("f", "end", "enter").action is None, "a model that does not fit"
    assert press("/", *"nothing", "enter", "enter").action is None
    assert {press(key).action for key in ("q", "escape", "ctrl-c", "ctrl-d")} == {"quit"}


@pytest.mark.parametrize("width", [40, 60, 80, 160])
def test_screen_fits_and_contains_the_selection(width: int) -> None:
    many = tuple(make_entry(f"a/A-Very-Long-Model-Name-Instruct-{n:03}", 8, 30) for n in range(200))
    state = replace(BROWSER, entries=many, at=150)
    lines = show(state, width=width, height=20)
    assert len(lines) <= 20 and max(map(len, lines)) <= width
    assert "151 of 200" in lines[0] and any("150" in line or "A-Very" in line for line in lines[4:])
    if width >= 80:
        assert any("Instruct-150" in line for line in lines) and "q quit" in lines[-1]


def test_unknown_speeds_are_explained() -> None:
    unknown = replace(BROWSER, entries=tuple(replace_fields(one, tok_s=None) for one in BROWSER.entries))
    assert "speed unknown" in show(unknown)[1] and "speed any" in show(BROWSER)[1]
    assert any("unknown until bedplate probe --measure" in line for line in show(press("v", state=unknown)))


def test_reason_of_a_model_that_does_not_fit_is_shown() -> None:
    assert any("it needs 900 GB" in line for line in show(press("f", "end")))


def test_bytes_of_a_terminal_are_keys() -> None:
    pieces = iter(["a\x1b[A\x1b[B", "\x1b", "[6~\r", "\x1b", "", "\x7f\x03\x1bOH", "\x1b[99;5z", "ü"])

    def read(wait_s: float | None) -> str:
        return next(pieces, "\x04")

    keys: Iterator[str] = parse_keys(read)
    expected = [
        "a",
        "up",
        "down",
        "page-down",
        "enter",
        "escape",
        "backspace",
        "ctrl-c",
        "home",
        "unknown",
        "ü",
        "ctrl-d",
    ]
    assert [next(keys) for _ in expected] == expected
