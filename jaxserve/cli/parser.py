"""Parser for the whole command line."""

import argparse
from typing import Any

from jaxserve import __version__
from jaxserve.cli import (
    batch,
    bench,
    check_invariance,
    completion,
    convert,
    generate,
    plan,
    quantize,
    route,
    serve,
    simulate,
)
from jaxserve.errors import did_you_mean

COMMANDS = (
    generate.COMMAND,
    serve.COMMAND,
    route.COMMAND,
    batch.COMMAND,
    bench.COMMAND,
    convert.COMMAND,
    quantize.COMMAND,
    plan.COMMAND,
    simulate.COMMAND,
    check_invariance.COMMAND,
    completion.COMMAND,
)
"""Commands in the order in which help shows them."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser for all commands.

    Its result has the chosen command's `run` and `on_interrupt`, and all commands' `parsers` by name.
    """
    parser = _Parser(
        prog="jaxserve",
        description="Serve large language models from JAX.",
        epilog="`jaxserve COMMAND --help` describes a command and all its options.",
    )
    parser.add_argument("--version", action="version", version=f"jaxserve {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        text = command.summary
        description = f"{text[0].upper()}{text[1:]}."
        each = commands.add_parser(command.name, help=text, description=description, usage=command.usage)
        each.set_defaults(run=command.run, on_interrupt=command.on_interrupt, parsers=commands.choices)
        command.add_flags(each)
    return parser


class _Parser(argparse.ArgumentParser):
    """Parser without prefix abbreviations, so that a typo cannot match another flag.

    It suggests flags similar to unknown ones, and names positional arguments that were given as flags.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments; end the program if some are unknown."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flags = [text.partition("=")[0] for text in unknown if text.startswith("--")]
            hint = did_you_mean(flags, [name for name in self._option_string_actions if name.startswith("--")])
            for action in self._actions:
                if not action.option_strings and (flag := f"--{str(action.metavar).lower()}") in flags:
                    hint += f" ({action.metavar} is positional: leave out {flag})"
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}; {self.prog} --help lists all")
        return found, unknown
