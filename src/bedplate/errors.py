"""What can go wrong, as one small tree. Library code raises these; only the command line prints them and exits."""

from __future__ import annotations


class BedplateError(Exception):
    """Says what failed, what caused it and what to do about it."""

    exit_code = 3

    def __init__(self, message: str, *, hint: str | None = None, cause: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.cause = cause

    @property
    def summary(self) -> str:
        """Message and cause in one clause."""
        return f"{self.message}: {self.cause}" if self.cause else self.message


class AnswerIsNo(BedplateError):
    """The question was good and the answer is no: it does not fit, a check failed."""

    exit_code = 1


class BadQuestion(BedplateError):
    """The question was wrong: a bad option, an unknown chip, an unreadable file."""

    exit_code = 2


class OutsideFailed(BedplateError):
    """Something outside of bedplate failed: the network, the disk, an engine."""

    exit_code = 3
