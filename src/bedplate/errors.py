"""The exceptions that library code raises. Only the command line prints them and exits with `exit_code`."""

from __future__ import annotations


class BedplateError(Exception):
    """An error with a message, and optionally its cause and a hint about what to do."""

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


class NotPossible(BedplateError):
    """The request is valid, but what it asks for is not possible: the model does not fit, or a check failed."""

    exit_code = 1


class UsageError(BedplateError):
    """Usage error: a bad option, an unknown chip, an unreadable file."""

    exit_code = 2


class ExternalFailure(BedplateError):
    """External failure: the network, the disk or an engine."""

    exit_code = 3


def make_unreadable_error(path: object, error: OSError | ValueError) -> UsageError:
    """The error about a file that the user named and that cannot be opened."""
    cause = getattr(error, "strerror", None) or str(error)
    return UsageError(f"cannot read {path}", cause=cause, hint="check its name and its permissions")
