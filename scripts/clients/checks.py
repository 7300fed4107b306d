"""Runner for a client's checks. Imports only the standard library, because every client has its own environment."""

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
        directory: model directory, for clients that need its tokenizer.
    """

    url: str
    model: str
    directory: Path


_checks: list[Check] = []


def check(function: Check) -> Check:
    """Register a check for this client; a check that raises has failed."""
    _checks.append(function)
    return function


def refusal(call: Callable[[], object], kind: type[Exception]) -> Any:
    """Return the error that a call raises; AssertionError if it raises none of this type."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} must be raised")


def run(package: str) -> None:
    """Run all checks on the server given on the command line; print versions and results as JSON."""
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
