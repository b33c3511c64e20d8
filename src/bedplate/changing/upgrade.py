"""Upgrade: installs a newer release of the engine in service side by side, checks its options, and compares both.

The version in service is not touched. A release that is worse, or that rejects an option, is removed again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bedplate.changing.shadow import ShadowRequest
from bedplate.engines import Engine, get_engine, load_engines
from bedplate.engines.base import RELEASE
from bedplate.errors import BedplateError, ExternalFailure, NotPossible, UsageError
from bedplate.hosting.control import ask
from bedplate.progress import SilentProgress
from bedplate.run.environments import EngineEnvironment, find_environment, make_environment, uninstall_environment
from bedplate.run.options import PORT, check_options
from bedplate.run.releases import find_package, is_newer
from bedplate.values.record import replace_fields
from bedplate.values.shadow import ShadowResult
from bedplate.values.watch import Outlook, UpgradeAnswer, UpgradeResult, WatchState

if TYPE_CHECKING:
    from bedplate.hosting.control import Tell
    from bedplate.values.decision import Device
    from bedplate.values.service import ServiceRecord
    from bedplate.values.verdict import Answer

ANSWERS: dict[Answer, UpgradeAnswer] = {"migrate": "upgrade", "stay": "stay", "not proven": "not proven"}


@dataclass(frozen=True)
class ReleaseCandidate:
    """A release that is newer than the version in service."""

    engine: str
    package: str
    present: str
    release: str

    @property
    def name(self) -> str:
        return f"{self.engine}@{self.release}"


class NoteProgress(SilentProgress):
    """Reports notes, but no progress bars."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    def note(self, text: str) -> None:
        self._tell(text)


def find_device(found: Outlook) -> Device:
    return found.plan.settings.device if found.plan is not None else "cpu"


def find_candidate(found: Outlook, now: WatchState) -> ReleaseCandidate | str:
    """The newest release that is newer than the version in service, or why there is none. Pure."""
    engine = load_engines().get(found.engine)
    known = find_package(engine, find_device(found)) if engine is not None else None
    if engine is None or known is None:
        return f"bedplate installs no package of {found.engine}"
    package, pinned = known
    if not RELEASE.fullmatch(found.engine_version):
        return f"{found.engine} {found.engine_version} is not a release of {package}"
    newest = now.releases.get(package)
    if newest is None or is_newer(pinned, newest):
        newest = pinned
    if not is_newer(newest, found.engine_version):
        return f"{found.engine} {found.engine_version} is the newest release of {package} that can be installed here"
    return ReleaseCandidate(found.engine, package, found.engine_version, newest)


class UpgradeTrial:
    """The installation and comparison of one release."""

    def __init__(self, record: ServiceRecord, found: Outlook, candidate: ReleaseCandidate, tell: Tell) -> None:
        self.record, self.found, self.candidate, self.tell = record, found, candidate, tell
        self.engine: Engine = get_engine(candidate.name)
        self.device = find_device(found)
        self.was_installed = find_environment(self.engine, self.device) is not None
        self.environment: EngineEnvironment | None = None
        self.options: str | None = None

    def run(self, wanted: ShadowRequest, *, keep: bool = False) -> tuple[UpgradeResult, ShadowResult | None]:
        """Compares the release with the version in service. `keep`: a worse release stays installed."""
        try:
            self.environment = make_environment(self.engine, NoteProgress(self.tell), self.device)
            problem = self._check_options(self.environment)
        except (BedplateError, OSError, TimeoutError) as error:
            why = error.summary if isinstance(error, BedplateError) else str(error)
            return self._conclude("not proven", f"{self.candidate.name} could not be tried: {why}."), None
        if problem is not None:
            text = f"{self.candidate.name} does not accept the options that bedplate starts it with: {problem}."
            return self._conclude("stay", text, removal=None if keep else "it rejects an option"), None
        try:
            done = ask(self.record, "shadow", wanted, answer=ShadowResult, tell=self.tell, limit_s=None)
        except (NotPossible, UsageError, ExternalFailure) as error:
            return self._conclude("not proven", f"{error.summary}."), None
        verdict = done.verdict
        removal = "it is worse" if verdict.worse is not None and not keep else None
        result = self._conclude(ANSWERS[verdict.answer], verdict.text, removal=removal)
        return replace_fields(
            result,
            effects=verdict.effects,
            quality=verdict.b.quality,
            present_quality=verdict.a.quality,
            worse=verdict.worse,
            would_prove=verdict.would_prove,
            run=done.run,
        ), done

    def _check_options(self, environment: EngineEnvironment) -> str | None:
        """What the parser of the release rejects; None if it accepts every option."""
        if self.found.plan is None:
            return None
        plan = replace_fields(self.found.plan, engine_version=self.candidate.release)
        checked = check_options(self.engine, environment, self.engine.launch(plan, PORT))
        self.options = checked.text
        self.tell(f"{self.candidate.name}: {checked.text}")
        return checked.problem if checked.accepted is False else None

    def _conclude(self, answer: UpgradeAnswer, text: str, *, removal: str | None = None) -> UpgradeResult:
        one, installed = self.candidate, self.environment is not None
        if removal is not None and self.environment is not None and not self.was_installed:
            try:
                uninstall_environment(self.environment)
                installed = False
                self.tell(f"{one.name} was removed again: {removal}")
            except BedplateError as error:
                self.tell(f"{one.name} could not be removed: {error.summary}")
        return UpgradeResult(
            engine=one.engine,
            package=one.package,
            present=one.present,
            release=one.release,
            answer=answer,
            text=text,
            options=self.options,
            locked=self.environment.locked if self.environment is not None else None,
            disk_bytes=self.environment.disk_bytes if self.environment is not None else None,
            installed=installed,
            removed=removal if not installed else None,
        )
