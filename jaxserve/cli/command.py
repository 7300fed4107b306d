"""Description of one command, as every module of a command gives it."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Command:
    """Command of `jaxserve`.

    Attributes:
        name: name of the command.
        summary: clause that says what it does.
        add_flags: function that adds its arguments to its parser.
        run: function that runs it and returns the exit code.
        on_interrupt: end of the message where it is interrupted.
        usage: usage line, where argparse's own would show every flag.
    """

    name: str
    summary: str
    add_flags: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]
    on_interrupt: str = ""
    usage: str | None = None
