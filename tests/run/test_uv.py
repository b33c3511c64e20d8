"""Converts captured errors of the oldest and the newest uv version to errors with hints."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bedplate.run.child import run_child
from bedplate.run.uv import (
    build_uv_environment,
    explain_failure,
    find_engine_python,
    find_uv,
    parse_reasons,
    report_written_bytes,
)

CAPTURES = Path(__file__).parent.parent / "captures" / "uv"


def read_captures(kind: str) -> list[str]:
    found = sorted(CAPTURES.glob(f"*-{kind}.txt"))
    assert len(found) == 2
    return [path.read_text(encoding="utf-8") for path in found]


@pytest.mark.parametrize(
    ("kind", "starts", "ends", "hint"),
    [
        ("offline", "No solution found", "your requirements are unsatisfiable.", "UV_OFFLINE=1 and UV_FIND_LINKS"),
        (
            "not-found",
            "No solution found",
            "your requirements are unsatisfiable.",
            "the package index has no such package",
        ),
        ("refused", "", "Connection refused (os error 111)", "the first start needs a package index"),
        ("no-dns", "Failed to fetch: ", "Name or service not known", "the first start needs a package index"),
        ("hash", "Failed to download", "Hash mismatch for `six==1.17.0`", "a different file than the pinned one"),
        ("no-space", "Failed to install", "No space left on device (os error 28)", "free some space"),
    ],
)
def test_real_failures_become_one_readable_line(kind: str, starts: str, ends: str, hint: str) -> None:
    for output in read_captures(kind):
        error = explain_failure("installing it", output)
        assert error.message == "installing it failed" and error.exit_code == 3
        assert error.cause is not None and hint in str(error.hint)
        assert error.cause.startswith(starts) and error.cause.endswith(ends)
        assert "\n" not in error.cause and not set("×╰├─▶│") & set(error.cause)
        assert not error.cause.count("error sending request") and "warning" not in error.cause


def test_error_names_the_unreachable_url() -> None:
    for output in read_captures("refused"):
        assert "https://index.example/simple/xllamacpp/" in str(explain_failure("x", output).cause)


def test_joins_cause_over_several_lines() -> None:
    newest, oldest = read_captures("not-found")
    assert parse_reasons(oldest) == parse_reasons(newest)
    assert len(parse_reasons(oldest)) == 2


@pytest.mark.parametrize(
    ("output", "cause"),
    [("", "uv gave no reason"), ("\n  \n", "uv gave no reason"), ("Segmentation fault\n", "Segmentation fault")],
)
def test_shows_other_output_unchanged(output: str, cause: str) -> None:
    assert explain_failure("x", output).cause == cause


def test_shortens_very_long_cause_in_the_middle() -> None:
    cause = explain_failure("x", f"error: began {'-' * 2000} ended").cause
    assert cause is not None and len(cause) < 700
    assert cause.startswith("began") and cause.endswith("ended")


def test_removes_variables_that_select_another_environment() -> None:
    assert build_uv_environment({"VIRTUAL_ENV": "/a", "PYTHONPATH": "/b", "CONDA_PREFIX": "/c", "HOME": "/d"}) == {
        "HOME": "/d"
    }


def test_pip_settings_apply_unless_uv_settings_exist() -> None:
    pip = {
        "PIP_INDEX_URL": "https://mirror/simple",
        "PIP_EXTRA_INDEX_URL": "https://more/simple https://still-more/simple",
        "PIP_FIND_LINKS": "/wheels https://wheels.example",
        "PIP_TRUSTED_HOST": "mirror",
        "PIP_CERT": "/ca.pem",
    }
    uv = {name: value for name, value in build_uv_environment(pip).items() if name not in pip}
    assert uv == {
        "UV_DEFAULT_INDEX": "https://mirror/simple",
        "UV_EXTRA_INDEX_URL": "https://more/simple https://still-more/simple",
        "UV_FIND_LINKS": "/wheels,https://wheels.example",
        "UV_INSECURE_HOST": "mirror",
        "SSL_CERT_FILE": "/ca.pem",
    }
    own = {"UV_INDEX_URL": "a", "UV_INDEX": "b", "UV_FIND_LINKS": "c", "UV_INSECURE_HOST": "d", "SSL_CERT_FILE": "e"}
    assert build_uv_environment({**pip, **own}) == {**pip, **own}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux counts what a process writes")
def test_progress_is_the_number_of_written_bytes(tmp_path: Path) -> None:
    data, seen = tmp_path / "data", tmp_path / "seen"
    told: list[int] = []

    def tick(pid: int) -> None:
        report_written_bytes(pid, told.append)
        if told[-1] >= 20_000_000:
            seen.touch()

    write = f"open({str(data)!r}, 'wb').write(bytes(20_000_000))"
    wait = f"import os, time\nwhile not os.path.exists({str(seen)!r}): time.sleep(0.01)"
    assert run_child([sys.executable, "-c", f"{write}\n{wait}"], tick=tick, limit_s=30).code == 0
    assert told == sorted(told) and told[-1] >= 20_000_000


def test_engine_environments_use_uv_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_PYTHON", "3.12")
    assert find_engine_python() == "3.12"
    monkeypatch.delenv("UV_PYTHON")
    assert Path(find_engine_python()).exists()
    assert Path(find_uv()).exists()
