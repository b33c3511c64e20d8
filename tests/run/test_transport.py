"""Plain http is refused for indexes and hubs, unless the host is this machine or the user allows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from bedplate.errors import UsageError
from bedplate.run.transport import refuse_plain_http, refuse_plain_indexes
from bedplate.run.uv import run_uv


@pytest.fixture(autouse=True)
def no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BEDPLATE_ALLOW_HTTP", raising=False)


@pytest.mark.parametrize(
    "url",
    ["https://a.example/simple", "http://localhost:80/x", "http://127.3.2.1/x", "http://[::1]:9/x", "/opt/wheels"],
)
def test_accepts_https_and_this_machine(url: str) -> None:
    refuse_plain_http(url, "the index")


@pytest.mark.parametrize(
    "url",
    [
        "http://a.example/simple", "HTTP://10.0.0.1:8080/", "http://localhost.a.example/", "http://user:pass@a.example/",
        "http://127.0.0.1.a.example/", "http://localhost@a.example/",
    ],
)  # fmt: skip
def test_refuses_plain_http_to_others(url: str) -> None:
    with pytest.raises(UsageError, match="the index would be read over plain http from") as caught:
        refuse_plain_http(url, "the index")
    assert "BEDPLATE_ALLOW_HTTP=" in str(caught.value.hint) and "pass" not in str(caught.value.message)


@pytest.mark.parametrize("allowed", ["a.example", "b.example, a.example", "a.example:8080", "*"])
def test_user_can_allow_a_host(allowed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEDPLATE_ALLOW_HTTP", allowed)
    refuse_plain_http("http://a.example:8080/simple", "the index")


def test_allowing_one_host_allows_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEDPLATE_ALLOW_HTTP", "a.example:8080")
    for url in ("http://b.example/", "http://a.example/", "http://xa.example:8080/"):
        with pytest.raises(UsageError):
            refuse_plain_http(url, "the index")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("UV_DEFAULT_INDEX", "mine=http://a.example/simple"),
        ("UV_INDEX", "https://b.example/simple http://a.example/simple"),
        ("UV_INDEX_URL", "http://a.example/simple"),
        ("UV_EXTRA_INDEX_URL", "http://a.example/simple"),
        ("UV_FIND_LINKS", "/opt/wheels,http://a.example/wheels"),
    ],
)
def test_checks_every_setting_of_an_index(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=rf"the package index \({name}\)"):
        refuse_plain_indexes({name: value, "UV_NO_CONFIG": "1"})
    refuse_plain_indexes({name: value, "UV_NO_CONFIG": "1", "UV_INSECURE_HOST": "a.example"})


@pytest.mark.parametrize(
    "text",
    [
        'index-url = "http://a.example/simple"',
        '[[index]]\nname = "mine"\nurl = "http://a.example/simple"',
        '[pip]\nextra-index-url = ["https://b.example", "http://a.example/simple"]',
    ],
)
def test_checks_configuration_file_of_uv(text: str, tmp_path: Path) -> None:
    (tmp_path / "uv").mkdir()
    (tmp_path / "uv" / "uv.toml").write_text(text)
    with pytest.raises(UsageError, match=r"uv\.toml"):
        refuse_plain_indexes({"XDG_CONFIG_HOME": str(tmp_path)})
    (tmp_path / "uv" / "uv.toml").write_text(f'allow-insecure-host = ["a.example"]\n{text}')
    refuse_plain_indexes({"XDG_CONFIG_HOME": str(tmp_path)})
    (tmp_path / "uv" / "uv.toml").write_text('http-proxy = "http://proxy.example:3128"')
    refuse_plain_indexes({"XDG_CONFIG_HOME": str(tmp_path)})


def test_uv_does_not_start_with_a_plain_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://a.example/simple")
    monkeypatch.delenv("UV_DEFAULT_INDEX", raising=False)
    monkeypatch.setattr("bedplate.run.uv.run_child", lambda *_, **__: pytest.fail("uv was started"))
    with pytest.raises(UsageError, match=r"plain http from a\.example"):
        run_uv(["pip", "install", "six"], "installing six", tmp_path)
