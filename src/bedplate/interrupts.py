"""Clean-up of the state that an interrupt leaves in the Python interpreter."""


def forget_interrupts() -> None:
    """Let a module run by `python -m` exit with its own status after a handled KeyboardInterrupt.

    CPython sets a flag when KeyboardInterrupt passes through code that was compiled from a string, such as a
    dataclass's generated methods. With the flag set, it ends the process by SIGINT even if the exception was caught.
    Running any other string clears the flag.
    """
    exec("")  # noqa: S102
