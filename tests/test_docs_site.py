"""The documentation site: four parts, generated reference pages, and links that lead somewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import yaml
from tests.commands import all_commands
from uv import find_uv_bin

ROOT = Path(__file__).parents[1]
PARTS = ["Tutorials", "How-to guides", "Reference", "Explanation"]
GENERATED = {"commands.md", "schemas.md", "README.md"}


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = importlib.util.spec_from_file_location("stage", ROOT / "docs" / "site" / "stage.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = tmp_path_factory.mktemp("site")
    module.stage(folder)
    return folder


def read_navigation(folder: Path) -> dict[str, list[str]]:
    text = re.sub(r"!!python\S+ .*", "null", (folder / "mkdocs.yml").read_text(encoding="utf-8"))
    nav: list[dict[str, Any]] = yaml.safe_load(text)["nav"]
    return {title: [page for one in pages for page in one.values()]
            for entry in nav for title, pages in entry.items() if isinstance(pages, list)}  # fmt: skip


def test_navigation_has_four_parts_with_every_page_once(staged: Path) -> None:
    nav = read_navigation(staged)
    assert list(nav) == PARTS
    pages = [page for part in nav.values() for page in part]
    listed = {path.name for path in (staged / "pages").glob("*.md")} - {"README.md"}
    assert sorted(pages) == sorted(listed) and nav["Reference"][:2] == ["commands.md", "schemas.md"]
    assert sum(page.startswith("tutorial-") for page in nav["Tutorials"]) == 3


def test_links_of_staged_pages_lead_to_staged_files(staged: Path) -> None:
    broken = []
    for page in (staged / "pages").rglob("*.md"):
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        links = re.findall(r"\]\((?![a-z]+:|#)([^)\s#]+)", text)
        broken += [f"{page.name}: {link}" for link in links if not (page.parent / link).exists()]
    assert not broken and (staged / "pages" / "project" / "README.md").exists()


def test_reference_has_every_command_and_document(staged: Path) -> None:
    text = (staged / "pages" / "commands.md").read_text(encoding="utf-8")
    for path, command in all_commands():
        if path and not command.hidden:
            assert f"\n## {' '.join(('bedplate', *path))}\n" in text
    assert "| `--min-tok-s FLOAT RANGE" in text
    schemas = (staged / "pages" / "schemas.md").read_text(encoding="utf-8")
    names = [path.stem for path in (ROOT / "src" / "bedplate" / "cli" / "schemas").glob("*.json")]
    assert all(f"\n## {name}\n" in schemas for name in names) and "| `workload` |" in schemas


class Page(HTMLParser):
    """The links and anchors of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = {""}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value and tag in ("a", "img", "script", "link"):
                self.links.append(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)


def find_broken_links(site: Path) -> Iterator[str]:
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html") if path.name != "gpu-report.html"}
    for path, page in pages.items():
        for link in page.links:
            if re.match(r"[a-z]+:|//", link) or path.name == "404.html":
                continue
            target, _, anchor = unquote(link).partition("#")
            there = (path.parent / target).resolve() if target else path
            there = there / "index.html" if there.is_dir() else there
            anchors = pages[there].anchors if there in pages else {anchor}
            if not there.exists() or anchor not in anchors:
                yield f"{path.name}: {link}"


@pytest.mark.packages
def test_built_site_has_no_broken_link(staged: Path) -> None:
    command = [find_uv_bin(), "tool", "run", "--with", "pymdown-extensions", "zensical", "build", "--strict"]
    done = subprocess.run(
        [*command, "-f", "mkdocs.yml"], cwd=staged, capture_output=True, text=True, env={**os.environ, "NO_COLOR": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    site = staged / "site"
    assert len(list(site.glob("*.html"))) > 60 and not list(find_broken_links(site))
    page = site / "serve.html"
    page.write_text(page.read_text() + '<a href="nowhere.html">x</a><a href="plan.html#nothing">y</a>')
    assert list(find_broken_links(site)) == ["serve.html: nowhere.html", "serve.html: plan.html#nothing"]
