"""Parser of the whole command line."""

import argparse
from typing import Any

from jaxserve import __version__
from jaxserve.cli import batch, bench, check_invariance, completion, convert, generate, plan, quantize, serve
from jaxserve.errors import did_you_mean

COMMANDS = (
    generate.COMMAND,
    serve.COMMAND,
    batch.COMMAND,
    bench.COMMAND,
    convert.COMMAND,
    quantize.COMMAND,
    plan.COMMAND,
    check_invariance.COMMAND,
    completion.COMMAND,
)
"""Commands in the order in which help shows them."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands, which stores each one's `run` and `on_interrupt` in the arguments.

    `parsers` of the arguments has the parser of each command.
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
    """Parser that takes no shortened options, nor do those of its sub-commands: a typo must not pass for another.

    It suggests flags that are like unknown ones, and names arguments that have no flag here, as the model of `serve`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments of this parser; end the program if some are unknown."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flags = [text.partition("=")[0] for text in unknown if text.startswith("--")]
            hint = did_you_mean(flags, [name for name in self._option_string_actions if name.startswith("--")])
            for action in self._actions:
                if not action.option_strings and (flag := f"--{str(action.metavar).lower()}") in flags:
                    hint += f" ({action.metavar} is positional: leave out {flag})"
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}; {self.prog} --help lists all")
        return found, unknown
