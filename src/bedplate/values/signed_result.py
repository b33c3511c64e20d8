"""Signed result: a run that can be passed on, with all that is needed to judge it, and a signature over all of it."""

from __future__ import annotations

from typing import Literal

from bedplate.values.hardware import Hardware
from bedplate.values.record import Record
from bedplate.values.run import Run


class ResultSignature(Record, frozen=True, kw_only=True):
    algorithm: Literal["ed25519"] = "ed25519"
    public_key: str
    """Base64 of the 32 bytes."""
    signature: str
    """Base64, of the document without `signature` as JSON with sorted keys and without spaces."""


class LockedEngine(Record, frozen=True, kw_only=True):
    """The packages that an engine of the run was installed from."""

    engine: str
    engine_version: str | None = None
    lock_sha256: str | None = None
    reason: str | None = None
    """Why there is no lock hash, or why it does not cover all packages."""


class SignedResult(Record, frozen=True, kw_only=True):
    schema: Literal["signed-result/1"] = "signed-result/1"
    at: str
    """When it was exported."""
    bedplate: str
    """The version that exported it. Other versions are in `run.environment` and in its cells."""
    hardware: Hardware | None = None
    """`None`: the run is from another machine, of which `run.environment` has a summary."""
    locks: tuple[LockedEngine, ...] = ()
    run: Run
    """Workload, raw samples, quality and flags."""
    signature: ResultSignature | None = None
    """`None`: not signed."""


class VerifiedResult(Record, frozen=True, kw_only=True):
    schema: Literal["verified-result/1"] = "verified-result/1"
    file: str
    is_valid: bool
    reason: str | None = None
    """Why it is not valid."""
    public_key: str | None = None
    key_id: str | None = None
    """The beginning of the SHA-256 of the public key, for people."""
    run: str | None = None


class ImportedRun(Record, frozen=True, kw_only=True):
    file: str
    run: str
    cells: int
    is_verified: bool
    """Whether the file has a valid signature."""
    notes: tuple[str, ...] = ()
    """What the file lacks, and other flags."""


class ImportedRuns(Record, frozen=True, kw_only=True):
    schema: Literal["imported-runs/1"] = "imported-runs/1"
    runs: tuple[ImportedRun, ...]
