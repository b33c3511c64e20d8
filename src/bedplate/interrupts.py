"""What an interrupt leaves behind in Python itself."""


def forget_interrupts() -> None:
    """Lets a module that is run by its name end with the status that it chose.

    Where KeyboardInterrupt passes through code that is made of text, as the methods of dataclasses are when a module is
    imported, Python notes that nobody caught it, and ends itself by SIGINT though somebody did. The note is of the last
    such code that ran: here, of none at all.
    """
    exec("")  # noqa: S102
