"""StructuredOutputsParams: constraint on an output. Host values only, without llguidance."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, no_type_check

from jaxserve.api.schema import FILLED_TEXT, SWITCH, Schema, list_of, unknown_names_message
from jaxserve.errors import RequestError, brief

MAX_GRAMMAR_CHARS = 2**18
MAX_CHOICES = 4096
_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object")


@no_type_check  # users pass wrong types, which __post_init__ must reject with a RequestError
@dataclass
class StructuredOutputsParams:
    """Constraint on an output, by exactly one of the first five fields. Names and meanings are vLLM's.

    Attributes:
        json: JSON schema, as a dict or as text.
        regex: regular expression that the whole output matches, in the syntax of Rust's regex-syntax.
        choice: possible outputs.
        grammar: grammar in llguidance's variant of Lark.
        json_object: True for any JSON object.
        disable_any_whitespace: allow no white space between JSON tokens.
        whitespace_pattern: regular expression for white space between JSON tokens; by default up to 32 characters.
        append_forced_tokens: append text that the constraint determines immediately, without a step for each token. The
            text may then consist of other tokens than the model would have sampled. It cannot be combined with
            logprobs, penalties and bad_words.

    Raises:
        RequestError: not exactly one constraint is given, or it has another type or is too large.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    append_forced_tokens: bool = False

    def __post_init__(self) -> None:
        given = [name for name in _CONSTRAINTS if self._is_given(name)]
        if len(given) != 1:
            raise RequestError(f"structured_outputs must have exactly one of {list(_CONSTRAINTS)}, got {given}")
        _SCHEMA.check(self)
        if self.json is not None:
            self._check_json()
        if (num_chars := len(self.text)) > MAX_GRAMMAR_CHARS:
            raise RequestError(
                f"structured_outputs must be at most {MAX_GRAMMAR_CHARS} characters, got {given[0]} of {num_chars}; "
                "shorten it"
            )

    def _is_given(self, name: str) -> bool:
        """Return whether the field `name` constrains the output."""
        value = getattr(self, name)
        return value is not None and (name != "json_object" or value is not False)

    def _check_json(self) -> None:
        """Raise RequestError unless the field `json` is a JSON schema that some value obeys."""
        schema: Any = self.json
        try:
            if isinstance(schema, str) and len(schema) <= MAX_GRAMMAR_CHARS:
                schema = json.loads(schema)
            is_schema = isinstance(schema, dict | bool) or (isinstance(schema, str) and schema is self.json)  # too long
            json.dumps(schema)
        except (ValueError, TypeError, RecursionError) as error:
            raise RequestError(f"json must be a JSON schema, got {brief(self.json)}: {error}") from None
        if not is_schema:
            raise RequestError(f"json must be a JSON schema, an object or its text, got {brief(self.json)}")
        if schema is False:
            raise RequestError("json must be a schema that some value obeys, got false, which allows none")

    @property
    def is_json(self) -> bool:
        """True if the output must be JSON: `json` or `json_object` constrains it."""
        return self.json is not None or bool(self.json_object)

    @property
    def schema(self) -> dict[str, Any]:
        """Schema for the output if `is_json`, as parsed JSON; {} allows any value."""
        schema = self.json if self.json is not None else {"type": "object"}
        if isinstance(schema, str):
            schema = json.loads(schema, parse_float=_exact_float)
        return {} if schema is True else schema

    @property
    def text(self) -> str:
        """The constraint as text, equal for equal constraints."""
        if self.json is not None:
            return self.json if isinstance(self.json, str) else json.dumps(self.json)
        if self.choice is not None:
            return json.dumps(self.choice)
        return self.regex or self.grammar or ""

    @property
    def key(self) -> str:
        """Text with everything that determines the compiled grammar."""
        kind = next(name for name in _CONSTRAINTS if self._is_given(name))
        return "\0".join((kind, self.text, str(self.disable_any_whitespace), self.whitespace_pattern or ""))

    @classmethod
    def from_value(cls, value: object) -> StructuredOutputsParams:
        """Return parameters unchanged or from a dict of their fields; RequestError for any other value."""
        if isinstance(value, cls):
            return dataclasses.replace(value)
        names = [f.name for f in dataclasses.fields(cls)]
        if not isinstance(value, dict):
            raise RequestError(f"structured_outputs must be StructuredOutputsParams or a dict, got {brief(value)}")
        if unknown := set(map(str, value)) - set(names):
            raise RequestError(unknown_names_message("fields of structured_outputs", unknown, names))
        return cls(**value)


def _exact_float(text: str) -> float | Decimal:
    """Parse a JSON number with a point or an exponent: to a float, or to a Decimal if no float equals it."""
    number = float(text)
    return number if Decimal(repr(number)) == Decimal(text) else Decimal(text)


_TEXT = FILLED_TEXT.optional()
_SCHEMA = Schema(
    RequestError,
    StructuredOutputsParams,
    {
        "json_object": SWITCH.optional(),
        "disable_any_whitespace": SWITCH,
        "append_forced_tokens": SWITCH,
        "regex": _TEXT,
        "grammar": _TEXT,
        "whitespace_pattern": _TEXT,
        "choice": list_of(
            FILLED_TEXT, f"a list of 1 to {MAX_CHOICES} non-empty strings", min_len=1, max_len=MAX_CHOICES
        ).optional(),
    },
)
