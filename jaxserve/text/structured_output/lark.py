"""Forms of outputs as rules of a grammar, which other rules may use: llguidance's variant of Lark."""

from __future__ import annotations

import json
import re
from typing import Any

from jaxserve.api.structured_outputs import StructuredOutputsParams
from jaxserve.errors import RequestError
from jaxserve.text.structured_output.exact_schema import ExactSchema, dumps, has_inexact_numbers

WHITESPACE = r"[ \t\n\r]{1,32}"  # space between tokens of JSON: without a limit, a weak model may sample nothing else
_TO_ESCAPE = re.compile(r"\\.|/|\n", re.DOTALL)


def whitespace_options(form: StructuredOutputsParams) -> dict[str, Any]:
    """Return llguidance's options for the white space of a form in JSON."""
    if form.disable_any_whitespace:
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": form.whitespace_pattern or WHITESPACE}


def form_rules(name: str, form: StructuredOutputsParams) -> list[str]:
    """Return the rules of a form, the first of which has the name."""
    if form.regex is not None:
        return [f"{name}: /{_TO_ESCAPE.sub(_escaped, form.regex)}/"]
    if form.choice is not None:
        return [f"{name}: {' | '.join(map(quoted, form.choice))}"]
    if form.grammar is not None:
        return [f"{name}: %lark {{\n{form.grammar}\n}}"]
    return schema_rules(name, form.schema, whitespace_options(form))


def schema_rules(name: str, schema: dict[str, Any], options: dict[str, Any]) -> list[str]:
    """Return the rules of a JSON schema, the first of which has the name."""
    try:
        if has_inexact_numbers(schema):
            return ExactSchema(name, schema, options).rules
        return [f"{name}: %json {dumps(schema | {'x-guidance': options})}"]
    except RecursionError:
        raise RequestError("JSON schemas must be nested less deeply") from None


def quoted(text: str) -> str:
    """Return a text as a string of Lark."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def _escaped(found: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n"}.get(found.group(), found.group())
