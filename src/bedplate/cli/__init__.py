"""The command line: one file for each verb, thin over the functions that Python callers use."""

import sys

from bedplate.interrupts import exit_on_interrupt

__all__ = ["main"]


def main() -> None:
    try:
        # Here, so that Ctrl-C while it is imported shows no traceback.
        from bedplate.cli.app import main as run_app

        run_app()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        exit_on_interrupt()
