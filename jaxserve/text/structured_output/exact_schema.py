"""Grammar rules for JSON schemas with inexact numbers: bounds and constants that llguidance would round to doubles.

Only the schemas around such numbers are written as rules; llguidance reads all other parts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

from jaxserve.errors import RequestError, brief
from jaxserve.text.structured_output.number_regex import bounded

Json = dict[str, Any]
MAX_EXACT = 2**53  # maximum integer, or digits, that llguidance reads exactly
_MAX_EXPONENT = 22
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_NUMBERS = (*_BOUNDS, "multipleOf")
_IMPLIED = {  # types of schemas without `type`, by keyword
    **dict.fromkeys(("properties", "required", "additionalProperties"), "object"),
    "items": "array",
    **dict.fromkeys(_NUMBERS, "number"),
}
_WITH_SCHEMA = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains")
_WITH_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_WITH_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_DEFINITIONS = ("$defs", "definitions")
_DEFINED = re.compile(r"#/(\$defs|definitions)/")
_MAX_CHARS, _MAX_PLACES = 2**20, 100
_UNSATISFIED = "JSON schemas must be such that some value obeys them"
_REFERENCE = re.compile(r'"\$ref": ("(?:[^"\\]|\\.)*")')
_NOTES = {
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "format", "$schema", "$id"),
    *("$comment", "$defs", "definitions", "$anchor", "id", "nullable"),
}


def dumps(value: Any) -> str:
    """Return a value as JSON text; decimals become floats."""
    return json.dumps(value, default=float)


def has_inexact_numbers(schema: Any) -> bool:
    """Return whether a JSON schema has bounds or constants that llguidance would round."""
    if not isinstance(schema, dict):
        return False
    values = (schema[key] for key in (*_NUMBERS, "const", "enum") if key in schema)
    return any(map(_has_inexact, values)) or any(map(has_inexact_numbers, _subschemas(schema)))


def _subschemas(schema: Json) -> Iterable[Any]:
    """Yield the schemas directly inside a schema."""
    yield from (schema[key] for key in _WITH_SCHEMA if isinstance(schema.get(key), dict))
    for key in _WITH_SCHEMAS:
        yield from schema[key] if isinstance(schema.get(key), list) else ()
    for key in _WITH_NAMES:
        yield from schema[key].values() if isinstance(schema.get(key), dict) else ()


def _has_inexact(value: Any) -> bool:
    """Return whether a JSON value is, or contains, a number that llguidance would round."""
    if isinstance(value, dict):
        return any(map(_has_inexact, value.values()))
    return any(map(_has_inexact, value)) if isinstance(value, list) else not _is_exact(value)


def _is_exact(value: Any) -> bool:
    """Return whether llguidance reads a scalar without rounding; only numbers may be rounded."""
    if isinstance(value, int):
        return abs(value) <= MAX_EXACT
    if not isinstance(value, float):
        return not isinstance(value, Decimal)
    decimal = Decimal(repr(value))
    if not decimal.is_finite():
        return False
    _, digits, exponent = decimal.as_tuple()
    is_read = int("".join(map(str, digits))) <= MAX_EXACT and abs(int(exponent)) <= _MAX_EXPONENT
    return is_read and abs(value) <= MAX_EXACT


class ExactSchema:
    """Builder of the rules for a JSON schema with inexact numbers.

    Args:
        name: name of the first rule, and prefix of the others.
        schema: the schema.
        options: llguidance's white space options.

    Attributes:
        rules: rules in llguidance's variant of Lark.

    Raises:
        RequestError: a schema with such numbers has an unsupported keyword; the message names it.
    """

    def __init__(self, name: str, schema: Json, options: Json) -> None:
        self._name, self._root, self._options = name, schema, options
        self._definitions = {key: schema[key] for key in _DEFINITIONS if key in schema}
        self._num_rules, self._num_chars, self._defined = 0, 0, dict[str, str]()
        self._within = _references({"": self._definitions})  # references in definitions
        self._inexact = self._find_inexact()
        self.rules: list[str] = []
        pattern = options.get("whitespace_pattern", "")
        self._space = f"{name.upper()}_SPACE" if pattern else ""
        self._comma, self._colon = (f'{self._space} "{sign}" {self._space}' for sign in ",:")
        start = self._expression(schema)
        self.rules.insert(0, f"{name}: {start}")
        if pattern:
            self.rules.append(f"{self._space}: /({pattern})?/")

    def _expression(self, schema: Any) -> str:
        """Return a Lark expression for a schema's values; llguidance reads schemas without inexact numbers itself."""
        if not self._is_inexact(schema):
            return self._json_rule(schema)
        builders = {
            "$ref": self._reference,
            "anyOf": self._any_of,
            "allOf": self._all_of,
            **dict.fromkeys(("const", "enum"), self._literals),
        }
        for keyword, build in builders.items():
            if keyword in schema:
                self._check_keywords(schema, {keyword, "type"} if keyword in ("const", "enum") else {keyword})
                return build(schema)
        types = schema.get("type") or next((name for key, name in _IMPLIED.items() if key in schema), None)
        if isinstance(types, list):
            return self._any_of({"anyOf": [schema | {"type": each} for each in types]})
        if types == "object":
            return self._object(schema)
        if types == "array":
            return self._array(schema)
        if types in ("integer", "number"):
            return self._number(schema, is_integer=types == "integer")
        if types in ("string", "boolean", "null"):
            return self._json_rule({"type": types} | {k: v for k, v in schema.items() if k not in _NUMBERS})
        raise _refusal(f"a type beside {sorted(schema.keys() - _NOTES)}, got {brief(types)}")

    def _is_inexact(self, schema: Any) -> bool:
        """Return whether a schema, or one to which it refers, has inexact numbers."""
        if not isinstance(schema, dict):
            return False
        return has_inexact_numbers(_without_definitions(schema)) or bool(_references(schema) & self._inexact)

    def _find_inexact(self) -> frozenset[str]:
        """Return the references in the whole schema that lead to inexact numbers, directly or not."""
        parts = {each: self._resolve(each) for each in _references(self._root) | self._within}
        found = {each for each, part in parts.items() if has_inexact_numbers(part)}
        referring = {each: _references(part) for each, part in parts.items()}
        while more := {each for each, others in referring.items() if each not in found and others & found}:
            found |= more
        return frozenset(found)

    def _json_rule(self, schema: Any) -> str:
        """Return the name of a rule in which llguidance reads a schema, which has no inexact numbers."""
        if schema is False:
            raise RequestError(f"{_UNSATISFIED}, got false where a value is needed")
        whole = {} if schema is True else schema
        if references := _references(whole):
            whole = self._definitions | whole
            if others := [each for each in references | self._within if not _DEFINED.match(each)]:
                raise _refusal(f"references to definitions only, got {brief(sorted(others))}")
        text = f"%json {dumps(whole | {'x-guidance': self._options})}"
        if text not in self._defined:
            self._defined[text] = self._rule(text)
        return self._defined[text]

    def _rule(self, expression: str, *, terminal: bool = False) -> str:
        """Add a rule and return its new name, in capitals for a terminal (a regular expression for the lexer)."""
        self._num_rules += 1
        self._num_chars += len(expression)
        if self._num_chars > _MAX_CHARS:
            raise _refusal(f"grammars of at most {_MAX_CHARS} characters; leave out properties or definitions")
        name = f"{self._name}_{self._num_rules}"
        name = name.upper() if terminal else name
        self.rules.append(f"{name}: {expression}")
        return name

    def _check_keywords(self, schema: Json, known: set[str]) -> None:
        """Raise RequestError if a schema has keywords besides `known` that affect its values."""
        if unknown := sorted(schema.keys() - known - _NOTES):
            raise _refusal(f"none of {unknown} beside {sorted(known & schema.keys())}")

    def _resolve(self, reference: str) -> Any:
        """Return the part of the whole schema to which the value of a `$ref` points."""
        found: Any = self._root
        if not reference.startswith("#"):
            raise _refusal(f"references within themselves, got {brief(reference)}")
        for part in reference[1:].split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(key) if isinstance(found, list) else key]
            except (LookupError, ValueError, TypeError):
                raise _refusal(f"references to what is there, got {brief(reference)}") from None
        return found

    def _reference(self, schema: Json) -> str:
        """Return the name of the rule for a `$ref`; recursive schemas use the same rule."""
        reference = schema["$ref"]
        if reference not in self._defined:
            self._num_rules += 1
            self._defined[reference] = f"{self._name}_{self._num_rules}"
            self.rules.append(f"{self._defined[reference]}: {self._expression(self._resolve(reference))}")
        return self._defined[reference]

    def _any_of(self, schema: Json) -> str:
        """Add the rule for a schema with `anyOf`, and return its name."""
        options = [self._expression(each) for each in schema["anyOf"] if each is not False]
        if not options:
            raise RequestError(f"{_UNSATISFIED}, got {brief(schema)}")
        return self._rule(" | ".join(options))

    def _all_of(self, schema: Json) -> str:
        """Return the Lark expression for an `allOf` with one schema; RequestError for several."""
        if len(schema["allOf"]) != 1:
            raise _refusal(f"one schema in allOf, got {len(schema['allOf'])}")
        return self._expression(schema["allOf"][0])

    def _literals(self, schema: Json) -> str:
        """Add the rule for a schema with `const` or `enum`, without values of another type, and return its name."""
        values = [schema["const"]] if "const" in schema else schema["enum"]
        types = schema.get("type", [])
        types = [types] if isinstance(types, str) else types
        values = [value for value in values if not types or any(_has_type(value, each) for each in types)]
        if not values:
            raise RequestError(f"{_UNSATISFIED}, got {brief(schema)}")
        return self._rule(" | ".join(map(self._literal, values)))

    def _literal(self, value: Any) -> str:
        """Return a Lark expression for exactly this JSON value, with optional white space."""
        if isinstance(value, dict):
            members = [f"{quoted(json.dumps(key))} {self._colon} {self._literal(each)}" for key, each in value.items()]
            return self._bracketed("{", members, "}")
        if isinstance(value, list):
            return self._bracketed("[", list(map(self._literal, value)), "]")
        if isinstance(value, float | Decimal):
            plain = format(_decimal("const", value), "f")
            return quoted(plain.rstrip("0").rstrip(".") if "." in plain else plain)
        return quoted(json.dumps(value, ensure_ascii=False))

    def _bracketed(self, opening: str, parts: list[str], closing: str) -> str:
        """Return a Lark expression for an object or array whose members have the expressions `parts`."""
        return f'"{opening}" {self._space} {f" {self._comma} ".join(parts)} {self._space} "{closing}"'

    def _number(self, schema: Json, *, is_integer: bool) -> str:
        """Add a terminal for the numbers within a schema's bounds, and return its name; `multipleOf` is rejected."""
        if "multipleOf" in schema:
            value = schema["multipleOf"]
            raise _refusal(f"multipleOf and the bounds beside it within {MAX_EXACT} and 15 digits, got {brief(value)}")
        self._check_keywords(schema, {"type", *_BOUNDS})
        given = [key for key in _BOUNDS if key in schema]
        expressions = ["|".join(bounded(key, _decimal(key, schema[key]), is_integer=is_integer)) for key in given]
        if not all(expressions):
            raise RequestError(f"{_UNSATISFIED}, got {brief(schema)}")
        return self._rule(" & ".join(f"/{each}/" for each in expressions), terminal=True)

    def _array(self, schema: Json) -> str:
        """Return a Lark expression for an array of `items`, with `minItems` to `maxItems` elements."""
        self._check_keywords(schema, {"type", "items", "minItems", "maxItems"})
        min_items, max_items = schema.get("minItems", 0), schema.get("maxItems")
        if max_items == 0:
            return f'"[" {self._space} "]"'
        item = self._expression(schema["items"])
        further = f"{{{max(0, min_items - 1)},{'' if max_items is None else max_items - 1}}}"
        items = f"{item} ({self._comma} {item}){further}"
        return self._rule(f'"[" {self._space} {items if min_items else f"({items})?"} {self._space} "]"')

    def _object(self, schema: Json) -> str:
        """Add the rules for an object with a schema's properties in order, and return the first one's name."""
        self._check_keywords(schema, {"type", "properties", "required", "additionalProperties"})
        required, properties = schema.get("required", []), dict(schema.get("properties", {}))
        if self._is_inexact(schema.get("additionalProperties")):
            raise _refusal("additionalProperties without such numbers; name the properties")
        properties |= {name: schema.get("additionalProperties", True) for name in required if name not in properties}
        rest, first = "", ""  # expressions for the members after another one, and for the first
        for name, value in reversed(properties.items()):
            if value is False and name not in required:
                continue
            member = f"{quoted(json.dumps(name))} {self._colon} {self._expression(value)}"
            if name in required:
                first = self._rule(f"{member} {rest}")
                rest = self._rule(f"{self._comma} {member} {rest}")
            else:
                first = self._rule(f"{member} {rest}" + (f" | {first}" if first else ' | ""'))
                rest = self._rule(f"({self._comma} {member})? {rest}")
        return self._rule(f'"{{" {self._space} {first} {self._space} "}}"')


def _without_definitions(schema: Json) -> Json:
    """Return a schema without its keywords `$defs` and `definitions`."""
    return {key: value for key, value in schema.items() if key not in _DEFINITIONS}


def _references(schema: Json) -> frozenset[str]:
    """Return the references in a schema outside its definitions."""
    if not isinstance(schema, dict):
        return frozenset()
    return frozenset(json.loads(each) for each in _REFERENCE.findall(dumps(_without_definitions(schema))))


def _has_type(value: Any, type_name: str) -> bool:
    """Return whether a JSON value has a JSON schema's type; 1.0 is an integer too."""
    if isinstance(value, bool) or value is None:
        return type_name == ("null" if value is None else "boolean")
    if isinstance(value, int | float | Decimal):
        return type_name == "number" or (type_name == "integer" and Decimal(value).to_integral_value() == value)
    names: dict[type, str] = {str: "string", list: "array", dict: "object"}
    return type_name == names.get(type(value))


def _decimal(keyword: str, value: Any) -> Decimal:
    """Return a keyword's value as a decimal with all digits; RequestError if it is no number, or too long."""
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise _refusal(f"numbers as {keyword}, got {brief(value)}")
    exact = Decimal(repr(value)) if isinstance(value, float) else Decimal(value)
    is_short = exact.is_finite() and abs(exact.adjusted()) <= _MAX_PLACES
    if not is_short or int(exact.as_tuple().exponent) < -2 * _MAX_PLACES:
        raise _refusal(f"numbers of at most {_MAX_PLACES} places as {keyword}, got {brief(value)}")
    return exact


def quoted(text: str) -> str:
    """Return a text as a Lark string."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def _refusal(wanted: str) -> RequestError:
    """Return the error for a schema with inexact numbers that lacks the property `wanted`."""
    return RequestError(
        f"JSON schemas with numbers beyond {MAX_EXACT} or of more than 15 digits must have {wanted}; "
        "write such numbers as strings, or give them other bounds"
    )
