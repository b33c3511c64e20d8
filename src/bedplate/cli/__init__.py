"""The command line: one file for each verb, thin over the functions that Python callers use."""

import gc
import sys

from bedplate.interrupts import Terminated, end_by_sigterm, exit_on_interrupt, raise_on_sigterm

__all__ = ["main"]


def main() -> None:
    try:
        raise_on_sigterm()
        # What is imported stays until the end, so looking for garbage in it only takes time.
        gc.disable()
        # Here, so that Ctrl-C while it is imported shows no traceback.
        from bedplate.cli.app import main as run_app

        gc.freeze()
        gc.enable()
        run_app()
    except KeyboardInterrupt:
        sys.exit(130)
    except Terminated:
        end_by_sigterm()
    finally:
        exit_on_interrupt()
