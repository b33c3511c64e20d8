"""Stages the documentation site: the pages, generated reference pages, and the configuration of the generator.

    python docs/site/stage.py DIR

DIR/pages has the pages as the generator reads them, and DIR/mkdocs.yml its configuration. Pages link to files of the
repository outside docs/, which are staged below pages/project. The navigation is that of docs/README.md.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import Any

import click
import typer
import yaml

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)")
PART = re.compile(r"^## (.+)\n((?:.|\n)*?)(?=^## |\Z)", re.MULTILINE)
PROJECT = "project"
ANCHORS = """\
- toc:
    permalink: true
    slugify: !!python/object/apply:pymdownx.slugs.slugify {kwds: {case: lower}}
"""
"""The anchors that GitHub gives to headings, so that links work in both places."""


def stage(folder: Path) -> None:
    pages = folder / "pages"
    shutil.rmtree(folder, ignore_errors=True)
    pages.mkdir(parents=True)
    for path in sorted(ROOT.glob("docs/*.md")):
        copy_page(path, pages)
    for name in ("images", "gpu-report.html", "notebooks"):
        source, target = ROOT / "docs" / name, pages / name
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copy(source, target)
    (pages / "commands.md").write_text(write_commands_page(), encoding="utf-8")
    (pages / "schemas.md").write_text(write_schemas_page(), encoding="utf-8")
    (folder / "mkdocs.yml").write_text(write_configuration(), encoding="utf-8")


def find_place(path: Path) -> PurePosixPath:
    """Where a file of the repository is on the site."""
    inside = path.relative_to(ROOT)
    if inside.parts[0] == "docs":
        return PurePosixPath(*inside.parts[1:])
    return PurePosixPath(PROJECT, *inside.parts)


def copy_page(path: Path, pages: Path) -> None:
    """Copy a page with its links rewritten, and the files of the repository that it links to."""
    target = pages / find_place(path)
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix != ".md":
        shutil.copy(path, target)
        return
    target.touch()  # pages link to each other
    text = path.read_text(encoding="utf-8")
    target.write_text(LINK.sub(lambda found: rewrite_link(found[1], path, pages), text), encoding="utf-8")


def rewrite_link(link: str, path: Path, pages: Path) -> str:
    there = (path.parent / link).resolve()
    if there.is_dir():
        # A folder is its README, or the file in it that sorts first.
        there = there / "README.md" if (there / "README.md").exists() else min(there.glob("*.*"))
    if not there.is_relative_to(ROOT / "docs"):
        copy_page(there, pages)
    here = find_place(path).parent
    return PurePosixPath(os.path.relpath(find_place(there), here)).as_posix()


def write_commands_page() -> str:
    """Every command with its usage, options and examples, from the command line itself."""
    from bedplate.cli.app import app

    lines = ["# Commands", "", "Written from the command line of this version: the same as `--help`.", ""]
    for path, command in list_commands(typer.main.get_command(app)):
        words = " ".join(("bedplate", *path))
        context = click.Context(command, info_name=words)
        usage = " ".join(command.collect_usage_pieces(context))
        lines += [f"## {words}", "", (command.help or "").strip(), "", "```console", f"$ {words} {usage}", "```", ""]
        records = [record for one in command.get_params(context) if (record := one.get_help_record(context))]
        if records:
            lines += ["| option | |", "| --- | --- |"]
            lines += [f"| `{escape_cell(left)}` | {escape_cell(text)} |" for left, text in records]
        if epilog := (command.epilog or "").replace("\b\n", "").strip():
            lines += ["", "```text", epilog, "```"]
        lines.append("")
    return "\n".join(lines)


def list_commands(
    command: click.Command, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    if path:
        yield path, command
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            if not inner.hidden:
                yield from list_commands(inner, (*path, name))


def write_schemas_page() -> str:
    """Every document with its fields, from the JSON Schemas that the package contains."""
    lines = [
        "# Documents",
        "",
        "Written from the JSON Schemas of this version: the same as `bedplate schema NAME`.",
        "",
    ]
    for path in sorted(Path(str(files("bedplate.cli") / "schemas")).glob("*.json")):
        schema: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        body = schema
        if "$ref" in schema:
            body = {**schema["$defs"][schema["$ref"].rpartition("/")[2]], **schema}
        lines += [
            f"## {path.stem}",
            "",
            str(body.get("description", "")),
            "",
            "| field | type | |",
            "| --- | --- | --- |",
        ]
        for name, field in body.get("properties", {}).items():
            about = escape_cell(str(field.get("description", "")))
            lines.append(f"| `{name}` | {escape_cell(describe_type(field))} | {about} |")
        lines.append("")
    return "\n".join(lines)


def describe_type(field: dict[str, Any]) -> str:
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if "enum" in field or "const" in field:
        return ", ".join(map(str, field.get("enum", [field.get("const")])))
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(describe_type(one) for one in field["anyOf"]))
    if field.get("type") == "array":
        return f"list of {describe_type(field.get('items', {}))}"
    return str(field.get("type", "any"))


def escape_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def write_configuration() -> str:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    nav: list[dict[str, Any]] = [{"Overview": "README.md"}]
    for title, text in PART.findall(index):
        links = [{name: target} for row in re.findall(r"^\| (\[.*?) \|", text, re.MULTILINE)
                 for name, target in re.findall(r"\[([^\]]+)\]\(([^)]+)\)", row)]  # fmt: skip
        generated = [{"all commands": "commands.md"}, {"all documents": "schemas.md"}] if title == "Reference" else []
        nav.append({title: generated + links})
    configuration = {
        "site_name": "bedplate",
        "docs_dir": "pages",
        "site_dir": "site",
        "use_directory_urls": False,
        "nav": nav,
        "theme": {
            "name": "material",
            "font": False,
            "features": ["navigation.tabs", "navigation.top", "content.code.copy", "search.highlight"],
            "palette": [
                {"media": "(prefers-color-scheme: light)", "scheme": "default", "primary": "blue grey"},
                {"media": "(prefers-color-scheme: dark)", "scheme": "slate", "primary": "blue grey"},
            ],
        },
        "markdown_extensions": ["tables", "attr_list", "md_in_html", "pymdownx.superfences", "pymdownx.highlight"],
        "plugins": ["search"],
        "validation": {"links": {"not_found": "warn", "anchors": "warn"}, "nav": {"omitted_files": "ignore"}},
    }
    text = yaml.safe_dump(configuration, sort_keys=False, allow_unicode=True)
    return text.replace("markdown_extensions:\n", f"markdown_extensions:\n{ANCHORS}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    stage(Path(sys.argv[1]))
