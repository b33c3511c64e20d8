"""Refuses downloads over plain http, which anyone on the way can change, unless the user allows the host."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bedplate.errors import UsageError

ALLOW_VARIABLE = "BEDPLATE_ALLOW_HTTP"
_INDEX_VARIABLES = (
    "UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS",
    "UV_PYTHON_INSTALL_MIRROR", "UV_PYPY_INSTALL_MIRROR",
)  # fmt: skip
_INDEX_KEYS = frozenset(["index", "index-url", "extra-index-url", "find-links", "python-install-mirror"])
_TRUSTING_VARIABLES = ("UV_INSECURE_HOST", "PIP_TRUSTED_HOST")
"""Settings of uv and pip that name hosts which may be reached over plain http."""
_PLAIN_URL = re.compile(r"http://[^\s,'\"]+", re.IGNORECASE)


def refuse_plain_http(url: str, what: str, trusted: Collection[str] = ()) -> None:
    """Raises an error for a plain http address that is neither on this machine nor allowed."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme.lower() != "http" or _is_loopback(host):
        return
    named = {*trusted, *re.split(r"[\s,]+", os.environ.get(ALLOW_VARIABLE, ""))}
    if named & {"*", host, f"{host}:{parts.port}"}:
        return
    raise UsageError(
        f"{what} would be read over plain http from {host}",
        cause="plain http is not encrypted: anyone on the way can change what is downloaded",
        hint=f"use an https address, or allow this host: {ALLOW_VARIABLE}={host}",
    )


def refuse_plain_indexes(environment: Mapping[str, str]) -> None:
    """Checks the package indexes of uv's environment variables and configuration files."""
    trusted = {host for name in _TRUSTING_VARIABLES for host in re.split(r"[\s,]+", environment.get(name, "")) if host}
    for name in _INDEX_VARIABLES:
        for url in _PLAIN_URL.findall(environment.get(name, "")):
            refuse_plain_http(url, f"the package index ({name})", trusted)
    for path in filter(Path.is_file, _list_config_files(environment)):
        import tomllib

        try:
            settings = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # uv reports a file that it cannot read
        allowed = trusted | set(map(str, settings.get("allow-insecure-host", ())))
        for url in _list_index_urls(settings):
            refuse_plain_http(url, f"the package index ({path})", allowed)


def _list_config_files(environment: Mapping[str, str]) -> list[Path]:
    """uv's configuration files; those of projects are not used."""
    if environment.get("UV_NO_CONFIG", "").lower() in ("1", "true", "yes", "on"):
        return []
    if chosen := environment.get("UV_CONFIG_FILE"):
        return [Path(chosen)]
    own = environment.get("XDG_CONFIG_HOME") or f"{environment.get('HOME', '~')}/.config"
    system = (environment.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":")
    return [Path(folder).expanduser() / "uv" / "uv.toml" for folder in (own, *system, "/etc")]


def _list_index_urls(settings: Mapping[str, Any]) -> Iterator[str]:
    for key, value in settings.items():
        if key == "pip" and isinstance(value, dict):
            yield from _list_index_urls(value)
        elif key in _INDEX_KEYS:
            yield from _PLAIN_URL.findall(repr(value))


def _is_loopback(host: str) -> bool:
    import ipaddress

    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
