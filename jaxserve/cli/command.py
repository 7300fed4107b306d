"""Command: the value that each module with a command defines."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Command:
    """Command of the `jaxserve` CLI.

    Attributes:
        name: name on the command line.
        summary: clause for help.
        add_flags: function that adds the command's arguments to its parser.
        run: function that runs the command and returns the exit code.
        on_interrupt: text appended to the message that Ctrl-C prints.
        usage: usage line; None for argparse's, which shows every flag.
    """

    name: str
    summary: str
    add_flags: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]
    on_interrupt: str = ""
    usage: str | None = None
