"""Runs a verb in the process of a call of `bedplate mcp`."""

from __future__ import annotations

import os
import signal
import threading

from bedplate.cli import main


def run_verb() -> None:
    """Runs a verb in the process of a call. Standard input is closed when the call is to end, or the server ends."""
    lifeline = os.dup(0)
    with open(os.devnull, "rb") as nowhere:  # noqa: PTH123
        os.dup2(nowhere.fileno(), 0)

    def watch() -> None:
        while os.read(lifeline, 1):
            pass
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=watch, daemon=True).start()
    main()


if __name__ == "__main__":
    run_verb()
