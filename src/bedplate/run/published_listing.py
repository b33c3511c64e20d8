"""Stores the hub's listing of published weights in BEDPLATE_HOME."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from bedplate.facts.published_weights import HubListing, get_listing_path, read_listing
from bedplate.home import ensure_writable, make_disk_failure
from bedplate.values import replace_fields


def store_listing(found: HubListing) -> Path:
    """Adds the listing to the stored one, atomically; returns the path."""
    path, before = get_listing_path(), read_listing()
    if before is not None and before.endpoint == found.endpoint:
        found = replace_fields(found, repositories={**before.repositories, **found.repositories})
    ensure_writable(path.parent)
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        temporary.write_bytes(msgspec.json.encode(found))
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise make_disk_failure(error, path) from error
    return path
