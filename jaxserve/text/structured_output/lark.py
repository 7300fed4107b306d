"""Output structures as rules in llguidance's variant of Lark, to which other rules may refer."""

from __future__ import annotations

import re
from typing import Any

from jaxserve.api.structured_outputs import StructuredOutputsParams
from jaxserve.errors import RequestError
from jaxserve.text.structured_output.exact_schema import ExactSchema, dumps, has_inexact_numbers, quoted

WHITESPACE = r"[ \t\n\r]{1,32}"  # limited, as a weak model may sample only spaces between JSON tokens
_TO_ESCAPE = re.compile(r"\\.|/|\n", re.DOTALL)


def whitespace_options(form: StructuredOutputsParams) -> dict[str, Any]:
    """Return llguidance's options for white space between the tokens of a JSON structure."""
    if form.disable_any_whitespace:
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": form.whitespace_pattern or WHITESPACE}


def form_rules(name: str, form: StructuredOutputsParams) -> list[str]:
    """Return the rules for an output structure; the first one is called `name`."""
    if form.regex is not None:
        return [f"{name}: /{_TO_ESCAPE.sub(_escaped, form.regex)}/"]
    if form.choice is not None:
        return [f"{name}: {' | '.join(map(quoted, form.choice))}"]
    if form.grammar is not None:
        return [f"{name}: %lark {{\n{form.grammar}\n}}"]
    return schema_rules(name, form.schema, whitespace_options(form))


def schema_rules(name: str, schema: dict[str, Any], options: dict[str, Any]) -> list[str]:
    """Return the rules for a JSON schema; the first one is called `name`."""
    try:
        if has_inexact_numbers(schema):
            return ExactSchema(name, schema, options).rules
        return [f"{name}: %json {dumps(schema | {'x-guidance': options})}"]
    except RecursionError:
        raise RequestError("JSON schemas must be nested less deeply") from None


def _escaped(found: re.Match[str]) -> str:
    """Return a slash, line break or escape sequence as a Lark regular expression needs it."""
    return {"/": r"\/", "\n": r"\n"}.get(found.group(), found.group())
