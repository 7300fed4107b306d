"""Fields of JSON objects in bodies, declared as data, with one reader for all interfaces."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from jaxserve.api import schema
from jaxserve.api.schema import FieldType
from jaxserve.errors import brief, did_you_mean
from jaxserve.openai.errors import BadRequestError, Json

_MAX_NAMED = 64  # unknown fields per error
_SUCCESSORS = {  # names here for fields in earlier or other interfaces
    "functions": "tools",
    "function_call": "tool_choice",
    **{f"guided_{form}": "structured_outputs" for form in ("json", "regex", "choice", "grammar")},
}


@dataclass(frozen=True, slots=True)
class BodyField:
    """Field of an object in a body; null stands for "not given".

    Attributes:
        type: type of its values.
        code: error code for any other value.
        is_needed: True if the object must have it.
        is_kept: True if its value is read; error messages advise only such fields.
        is_ignored: True if replies list it as ignored.
    """

    type: FieldType = schema.ANY
    code: str = "invalid_request"
    is_needed: bool = False
    is_kept: bool = True
    is_ignored: bool = False


ObjectFields = Mapping[str, BodyField]

ANY = BodyField()
TEXT = BodyField(schema.TEXT)
SWITCH = BodyField(schema.SWITCH)
INTEGER = BodyField(schema.integer())
OBJECT = BodyField(FieldType("an object", lambda value: isinstance(value, dict)))
LIST = BodyField(FieldType("a list", lambda value: isinstance(value, list)))
DROPPED = BodyField(is_kept=False)
IGNORED = BodyField(is_kept=False, is_ignored=True)


def needed(field: BodyField) -> BodyField:
    """Return a copy of `field` that objects must have."""
    return replace(field, is_needed=True)


def ignored(field: BodyField) -> BodyField:
    """Return a copy of `field` that is accepted without effect, and that replies list as ignored."""
    return replace(field, is_kept=False, is_ignored=True)


def only(*values: Any, why: str = "it is not supported") -> BodyField:
    """Return the field for an unsupported feature: it may only have the `values` that switch the feature off.

    Without values the field must be left out. `why` is the reason in error messages.
    """
    words = " or ".join(map(json.dumps, values)) or "left out"
    accepted = FieldType(words, lambda value: schema.is_one_of(value, values), advice=f": {why}")
    return BodyField(accepted, "unsupported_value", is_kept=False)


def choice(*values: Any) -> BodyField:
    """Return a field that must have one of these values."""
    return BodyField(schema.one_of(values, words=" or ".join(map(json.dumps, values))), "unsupported_value")


def each(field: BodyField, *names: str) -> ObjectFields:
    """Return an object's fields `names`, all with the type and options of `field`."""
    return dict.fromkeys(names, field)


class BodyReader:
    """Reader for the JSON objects in one request body; it checks them against their declared fields.

    Attributes:
        ignored: ignored fields that were read so far.
    """

    def __init__(self) -> None:
        self.ignored: set[str] = set()

    def read(
        self, content: object, fields: ObjectFields, where: str = "the body", param: str | None = None, prefix: str = ""
    ) -> Json:
        """Check an object against its declared fields, and return the values that have an effect, in declared order.

        Args:
            content: JSON value that must be an object.
            fields: declared fields by name.
            where: name of the object in messages, such as "tool_choice".
            param: body field that errors name; None to name the object's field.
            prefix: prefix of ignored field names.

        Raises:
            BadRequestError: a field is unknown, missing or has a wrong type.
        """
        if not isinstance(content, dict):
            raise _no_object(content, where, param or where.removeprefix("the "))
        given = {name: value for name, value in content.items() if value is not None}
        if unknown := sorted(islice((name for name in given if name not in fields), _MAX_NAMED)):
            raise _unknown_fields(where, unknown, [name for name, field in fields.items() if field.is_kept], param)
        path = f"{where}." if param else ""
        for name, value in given.items():
            if (problem := fields[name].type.problem(path + name, value)) is not None:
                raise BadRequestError(problem, param or name, fields[name].code)
        for name, field in fields.items():
            if field.is_needed and name not in given:
                raise BadRequestError(f"{path}{name} must be given", param or name, "missing_required_parameter")
        self.ignored |= {prefix + name for name in given if fields[name].is_ignored}
        return {name: given[name] for name, field in fields.items() if field.is_kept and name in given}

    def read_variant(
        self,
        content: object,
        variants: Mapping[str, ObjectFields],
        where: str,
        param: str,
        *,
        default: str | None = None,
        prefix: str = "",
    ) -> tuple[str, Json]:
        """Check an object whose fields depend on its `type`; return the type and the other fields' values.

        Args:
            content: JSON value that must be an object.
            variants: declared other fields, by type.
            where: the same as in `read`.
            param: the same as in `read`.
            default: type for objects without one.
            prefix: the same as in `read`.
        """
        if not isinstance(content, dict):
            raise _no_object(content, where, param)
        name = default if content.get("type") is None else content["type"]
        if not isinstance(name, str) or name not in variants:
            message = f"{where} must be of the types {sorted(variants)}, got {brief(name)}; others are not supported"
            raise BadRequestError(message, param, "unsupported_value")
        others = {name: value for name, value in content.items() if name != "type"}
        return name, self.read(others, variants[name], where, param, prefix)


def _no_object(content: object, where: str, param: str) -> BadRequestError:
    """Return the error for a value at `where`, in the body field `param`, that must be an object."""
    return BadRequestError(f"{where} must be an object, got {brief(content)}", param)


def _unknown_fields(
    where: str, unknown: Sequence[str], supported: Collection[str], param: str | None
) -> BadRequestError:
    """Return the error for `unknown` fields in the object `where`, with similar `supported` fields as advice."""
    advice = "".join(f"; {name} is now {_SUCCESSORS[name]}" for name in unknown if name in _SUCCESSORS)
    hint = did_you_mean((name for name in unknown if name not in _SUCCESSORS), supported)
    others = f"supported are {sorted(supported)}" if supported else "no field of it has an effect here"
    message = f"unsupported fields {brief(unknown)} in {where}{hint}{advice}; {others}"
    return BadRequestError(message, param or unknown[0], "unsupported_parameter")
