"""Runner of a client's checks. Imports nothing but the standard library, as every client's environment has its own."""

import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

Check = Callable[["Target"], None]


@dataclass(frozen=True)
class Target:
    """Server to check.

    Attributes:
        url: its URL, without /v1.
        model: name of its model.
        directory: directory of the model, for clients that need its tokenizer.
    """

    url: str
    model: str
    directory: Path


_checks: list[Check] = []


def check(function: Check) -> Check:
    """Add a function to the checks of this client; one that raises has failed."""
    _checks.append(function)
    return function


def refusal(call: Callable[[], object], kind: type[Exception]) -> Any:
    """Return the error of this kind that a call raises; AssertionError if it raises none."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} must be raised")


def run(package: str) -> None:
    """Run all checks on the server of the command line; print versions and results as JSON."""
    url, model, directory = sys.argv[1:]
    target = Target(url, model, Path(directory))
    results = {}
    for function in _checks:
        name = function.__name__.replace("_", " ")
        try:
            function(target)
            results[name] = None
        except BaseException as error:
            print(f"{name}:\n{traceback.format_exc()}", file=sys.stderr)
            results[name] = f"{type(error).__name__}: {error}"[:400]
    print(json.dumps({"version": version(package), "checks": results}))
