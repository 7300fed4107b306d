"""Command `jaxserve completion`: a script that lets a shell complete commands and flags."""

import argparse
import re
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence

from jaxserve.cli.command import Command

_BASH = """\
# Completion of jaxserve for bash: source <(jaxserve completion bash)
_jaxserve() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} words=
    if (( COMP_CWORD == 1 )); then
        words={commands}
    else
        case "${{COMP_WORDS[1]}} $before" in
{choices}
        *)
            [[ $word == -* ]] || return
            case "${{COMP_WORDS[1]}}" in
{flags}
            esac ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _jaxserve jaxserve
"""
_ZSH = (
    "# Completion of jaxserve for zsh: source <(jaxserve completion zsh)\nautoload -U +X bashcompinit && bashcompinit\n"
)


def _add_flags(parser: ArgumentParser) -> None:
    """Add the arguments of `jaxserve completion`."""
    text = "shell; use it as `source <(jaxserve completion bash)`, or `jaxserve completion fish | source`"
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help=text)


def _run(args: Namespace) -> int:
    """Print the script for `args.shell`; return 0."""
    commands: Mapping[str, ArgumentParser] = args.parsers
    print(_fish(commands) if args.shell == "fish" else _bash(commands, is_zsh=args.shell == "zsh"), end="")
    return 0


def _flags(parser: ArgumentParser) -> list[argparse.Action]:
    """Return a parser's flags that help shows."""
    return [a for a in parser._actions if a.option_strings and a.help != argparse.SUPPRESS]


def _choices(action: argparse.Action) -> Sequence[str]:
    """Return the values that an argument may have, if they are a fixed set."""
    return [str(each) for each in action.choices or ()]


def _bash(commands: Mapping[str, ArgumentParser], *, is_zsh: bool) -> str:
    """Return the completion script for bash, or for zsh, given the parser of each command."""
    choices, flags = [], []
    for name, parser in commands.items():
        for action in parser._actions:
            if values := _choices(action):
                patterns = [f'"{name} {flag}"' for flag in action.option_strings] or [f'"{name} {name}"']
                choices.append(f"        {'|'.join(patterns)}) words={shlex.quote(' '.join(values))} ;;")
        texts = [text for action in _flags(parser) for text in action.option_strings]
        flags.append(f"            {name}) words={shlex.quote(' '.join(texts))} ;;")
    script = _BASH.format(commands=shlex.quote(" ".join(commands)), choices="\n".join(choices), flags="\n".join(flags))
    return _ZSH + script if is_zsh else script


def _fish(commands: Mapping[str, ArgumentParser]) -> str:
    """Return the completion script for fish, given the parser of each command."""
    lines = ["# Completion of jaxserve for fish: jaxserve completion fish | source"]
    for name, parser in commands.items():
        summary = shlex.quote(_first_clause(parser.description or ""))
        lines.append(f"complete -c jaxserve -n __fish_use_subcommand -a {name} -d {summary}")
        for action in parser._actions:
            where = f"complete -c jaxserve -n '__fish_seen_subcommand_from {name}'"
            values = f" -x -a {shlex.quote(' '.join(_choices(action)))}" if action.choices else ""
            if not action.option_strings and values:
                lines.append(f"{where}{values.replace(' -x', ' -f')}")
            elif action in _flags(parser):
                takes = "" if action.nargs == 0 or values else " -r"
                for text in action.option_strings:
                    option = f"-l {text[2:]}" if text.startswith("--") else f"-s {text[1:]}"
                    lines.append(f"{where} {option}{takes}{values} -d {shlex.quote(_first_clause(action.help or ''))}")
    return "\n".join(lines) + "\n"


def _first_clause(text: str) -> str:
    """Return the beginning of a help text, as far as it fits a line of suggestions."""
    clause = re.split(r"[;:(]|\. ", text, maxsplit=1)[0].strip().rstrip(".").replace("%%", "%")
    return clause if len(clause) <= 80 else f"{clause[:77]}..."


COMMAND = Command("completion", "write a script that completes commands and flags in a shell", _add_flags, _run)
