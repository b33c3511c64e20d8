"""The command line: one file for each verb, thin over the functions that Python callers use."""

from bedplate.cli.app import main

__all__ = ["main"]
