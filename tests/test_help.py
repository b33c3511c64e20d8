"""The help of every command: grouped verbs, a summary, a text for each parameter, and examples that parse."""

from __future__ import annotations

import re
import shlex

import click
import pytest
import typer
from tests.commands import all_commands, invoke

from bedplate.cli.app import PANELS, VERBS, app, build_app_for, get_verb_name

COMMANDS = {" ".join(path) or "bedplate": command for path, command in all_commands()}
every_command = pytest.mark.parametrize("name", COMMANDS)


@every_command
def test_every_parameter_has_help(name: str) -> None:
    command = COMMANDS[name]
    context = click.Context(command)
    undescribed = []
    for parameter in command.params:
        left, text = parameter.get_help_record(context) or ("", "")
        if not re.search(r"[.](  \[.*\])?$", text):  # a sentence, and typer's remarks on defaults and ranges
            undescribed.append((parameter.name, left, text))
    assert undescribed == []


def read_help(name: str) -> str:
    return COMMANDS[name].get_help(click.Context(COMMANDS[name], info_name=name, terminal_width=80))


@every_command
def test_help_lists_arguments_once(name: str) -> None:
    has_arguments = any(parameter.param_type_name == "argument" for parameter in COMMANDS[name].params)
    titles = re.findall(r"^(.*arguments):$", read_help(name), re.MULTILINE | re.IGNORECASE)
    assert titles == ["Arguments"] * has_arguments


@every_command
def test_help_has_a_summary_and_examples(name: str) -> None:
    words = [] if name == "bedplate" else name.split()
    assert (COMMANDS[name].help or "").splitlines()[0].endswith(".")
    shown = read_help(name)
    lines = re.findall(r"^ +(?:[A-Z_]+=\S+ )?(bedplate .*)$", shown.partition("Examples:")[2], re.MULTILINE)
    calls = [line.partition("  ")[0].removesuffix("\\") for line in lines]  # what follows two spaces explains it
    examples = [example for call in calls for example in re.findall(r"bedplate ([^;|>]*)", call)]
    assert any(example.split()[: len(words)] == words for example in examples)
    for example in examples:
        assert not find_unknown_options(shlex.split(example)), example


def find_unknown_options(words: list[str]) -> set[str]:
    """Options that the named command does not have."""
    command = COMMANDS.get(" ".join(words[:2])) or COMMANDS[words[0]]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    return {word for word in words if re.match(r"--?[a-z]", word)} - known


@pytest.mark.parametrize("path", [path for path, _ in all_commands()], ids=" ".join)
def test_no_line_of_help_is_wider_than_80_columns(path: tuple[str, ...]) -> None:
    """A terminal would break it within a word."""
    assert max(map(len, invoke(*path, "--help").out.splitlines())) <= 80


def test_help_groups_the_verbs() -> None:
    shown = read_help("bedplate")
    titles = ["Run", "Decide", "Measure", "Change", "Scale out", "Administer"]
    assert list(PANELS) == titles
    found = re.findall(r"^([A-Z][a-z ]+):\n((?:  \S.*\n)+)", shown, re.MULTILINE)
    listed = {title: [line.split()[0] for line in body.splitlines()] for title, body in found}
    assert [title for title in listed if title in titles] == titles
    assert all(listed[title] == [get_verb_name(verb) for verb in verbs] for title, verbs in PANELS.items())
    group = COMMANDS["bedplate"]
    assert isinstance(group, click.Group)
    assert sorted(group.commands) == sorted(verb for title in titles for verb in listed[title])


def test_every_summary_of_the_overview_fits_on_its_line() -> None:
    assert "..." not in read_help("bedplate").partition("Run:")[2]


def test_a_named_verb_is_built_alone_and_with_the_same_help() -> None:
    """typer builds every option of every verb that is there, which takes longer than `plan`."""
    whole = typer.main.get_command(app)
    assert isinstance(whole, click.Group)
    for name in map(get_verb_name, VERBS):
        alone = typer.main.get_command(build_app_for([name, "--help"]))
        assert isinstance(alone, click.Group) and list(alone.commands) == [name]
        shown, expected = (
            tree.commands[name].get_help(click.Context(tree.commands[name], info_name=name, terminal_width=80))
            for tree in (alone, whole)
        )
        assert shown == expected
    for words in (["plann"], ["--version", "plan"], ["--help", "--version"]):
        assert build_app_for(words) is app


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_the_overview_is_built_without_options_and_reads_the_same(words: list[str]) -> None:
    """The options of all verbs take longer to build than to import."""
    overview, whole = (typer.main.get_command(one) for one in (build_app_for(words), app))
    assert isinstance(overview, click.Group) and not any(verb.params for verb in overview.commands.values())
    shown, expected = (
        one.get_help(click.Context(one, info_name="bedplate", terminal_width=80)) for one in (overview, whole)
    )
    assert shown == expected


def test_completion_of_the_first_word_knows_all_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell gives the words in the environment, and no arguments."""
    monkeypatch.setenv("_BEDPLATE_COMPLETE", "complete_bash")
    assert build_app_for([]) is app
