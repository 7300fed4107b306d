"""Flags for configuration fields, with help from their docstrings, and for vLLM's options."""

import argparse
import contextlib
import dataclasses
import inspect
import json
import os
import re
import types
import typing
from collections.abc import Sequence
from typing import Any

from jaxserve.api import vllm_options
from jaxserve.api.config import EngineConfig

NOT_FLAGS = {"skip_tokenizer_init", "forbid_compiles"}
"""Fields of EngineConfig that are not useful on a command line."""

_DIRECTORIES = {"model", "tokenizer", "compilation_cache_dir"}
_GROUP_DESCRIPTIONS = {"engine": "An option without a default is None if it is not given."}


def add_engine_flags(parser: argparse.ArgumentParser, leave_out: Sequence[str] = ()) -> None:
    """Add a flag for every engine option except `leave_out`, and flags for vLLM's options."""
    add_config_flags(parser, "engine", EngineConfig, (*NOT_FLAGS, *leave_out))
    add_vllm_flags(parser, "engine", vllm_options.VLLM_OPTIONS)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the given EngineConfig options; vLLM's names are translated."""
    return vllm_options.engine_options(config_options(args, "engine"))


def add_config_flags(parser: argparse.ArgumentParser, title: str, config: type, leave_out: Sequence[str] = ()) -> None:
    """Add a flag for every configuration field; given values are stored in `args` as "<title>.<field>"."""
    group = parser.add_argument_group(title, _GROUP_DESCRIPTIONS.get(title))
    helps, hints = field_helps(config), inspect.get_annotations(config, eval_str=True)
    for field in dataclasses.fields(config):
        if field.name in leave_out:
            continue
        kind = _plain_type(hints[field.name])
        options: dict[str, Any] = {"dest": f"{title}.{field.name}", "default": argparse.SUPPRESS}
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif typing.get_origin(kind) is Sequence:
            options |= {"nargs": "+", "metavar": "STR", "action": _AddValues}
        else:
            options |= {"type": kind, "metavar": "DIR" if field.name in _DIRECTORIES else kind.__name__.upper()}
        group.add_argument(flag(field.name), help=help_text(helps[field.name], field.default), **options)


def config_options(args: argparse.Namespace, title: str) -> dict[str, Any]:
    """Return the values given for the flags that `add_config_flags` added under this title, by field."""
    prefix = f"{title}."
    return {name.removeprefix(prefix): value for name, value in vars(args).items() if name.startswith(prefix)}


class _AddValues(argparse.Action):
    """argparse action that accumulates the values of a flag that may be repeated.

    The namespace's `uses` keeps each use, since it may also have taken a positional argument.
    """

    def __call__(self, _: object, namespace: argparse.Namespace, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, [*getattr(namespace, self.dest, ()), *values])
        namespace.uses = [*getattr(namespace, "uses", ()), (option_string, values)]


def flag_that_may_hold_path(args: argparse.Namespace) -> str | None:
    """Return the first flag that took several values, if the last value may be a path; None if there is none."""
    for name, (*others, last) in getattr(args, "uses", ()):
        if others and (os.path.exists(last) or ("/" in last and "://" not in last)):
            return str(name)
    return None


def flag(name: str) -> str:
    """Return the command-line flag for a field: `--page-size` for page_size."""
    return "--" + name.replace("_", "-")


def with_dashes(argv: Sequence[str]) -> list[str]:
    """Return the command line with dashes for underscores in flag names."""
    end = argv.index("--") if "--" in argv else len(argv)
    return [re.sub(r"^--[^=]*", lambda name: name[0].replace("_", "-"), each) for each in argv[:end]] + [*argv[end:]]


def help_text(text: str, default: object) -> str:
    """Return a flag's help, with its default unless that is None."""
    if isinstance(default, tuple):  # flags with several values
        default = " ".join(default) or None
    shown = text if default is None else f"{text} (default: {default})"
    return shown.replace("%", "%%")


def field_helps(config: type) -> dict[str, str]:
    """Return the description of each attribute in a class's docstring."""
    docs = inspect.cleandoc(config.__doc__ or "")  # a no-op on Python 3.13, which removes the indentation itself
    attributes = re.search(r"Attributes:\n(.*?)(?:\n\n|\Z)", docs, re.DOTALL)
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", attributes[1] if attributes else "", re.MULTILINE)
    return {name: " ".join(text.split()).rstrip(".") for name, text in entries}


def add_vllm_flags(parser: argparse.ArgumentParser, title: str, known: Sequence[vllm_options.VllmOption]) -> None:
    """Add flags for vLLM's options. Help does not show them, since they have another name here or no effect.

    Given values are stored in `args` as "<title>.<name>".
    """
    hints = inspect.get_annotations(EngineConfig, eval_str=True)
    for option in known:
        kinds = {type(value) for value in option.accepts or ()} - {type(None)}
        is_switch = option.switch is not None or kinds == {bool} or option.is_switch
        is_switch |= option.field is not None and hints[option.field] is bool
        options: dict[str, Any] = {"dest": f"{title}.{option.name}", "default": argparse.SUPPRESS}
        options |= {"action": argparse.BooleanOptionalAction} if is_switch else {"type": _literal}
        with contextlib.suppress(argparse.ArgumentError):  # the command has a flag with this name
            parser.add_argument(flag(option.name), help=argparse.SUPPRESS, **options)


def _literal(text: str) -> Any:
    """Return the value of a text that is JSON; other text unchanged."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _plain_type(hint: Any) -> Any:
    """Return the type without None: `int` for `int | None`."""
    if isinstance(hint, types.UnionType):
        return next(kind for kind in typing.get_args(hint) if kind is not type(None))
    return hint
