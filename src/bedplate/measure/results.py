"""Read and import result files of any supported kind, with the state of their signature."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from bedplate import store
from bedplate.errors import ExternalFailure, NotPossible
from bedplate.measure.imports import SIGNED, parse_document, read_bytes, read_run
from bedplate.measure.signing import verify_document
from bedplate.values import replace_fields
from bedplate.values.run import Run


class ResultFile(NamedTuple):
    name: str
    run: Run
    is_verified: bool
    """Whether it has a valid signature."""
    reason: str | None = None
    """Why it is not verified."""


def read_result(path: Path, *, require_valid: bool = False) -> ResultFile:
    """`require_valid`: a signature that does not match is an error. A file without a signature is read in any case."""
    data = read_bytes(path)
    document = parse_document(data, path.name)
    if not isinstance(document, dict) or document.get("schema") != SIGNED or document.get("signature") is None:
        return ResultFile(path.name, read_run(path), False, "not signed")
    try:
        found = verify_document(data, path.name)
    except ExternalFailure as error:
        if require_valid:
            raise
        return ResultFile(path.name, read_run(path), False, error.message)
    if require_valid and not found.is_valid:
        raise NotPossible(f"{path.name} is not read", cause=found.reason, hint="get the file again from its source")
    return ResultFile(path.name, read_run(path), found.is_valid, found.reason)


def import_result(path: Path, store_path: Path | None = None) -> ResultFile:
    """Read a result file and store its run. A signed result must be unchanged."""
    found = read_result(path, require_valid=True)
    run = replace_fields(found.run, source=found.run.source or path.name)
    store.import_run(run, store_path)
    return found._replace(run=run)
