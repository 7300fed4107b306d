"""Refusals of fields in bodies: unknown ones, and those of features that there are not here."""

import json
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import Any

from jaxserve.errors import brief, did_you_mean
from jaxserve.openai.errors import BadRequestError, Json

_MAX_NAMED = 64  # unknown fields that an error looks at
_SUCCESSORS = {  # names here of fields of earlier or other interfaces
    "functions": "tools",
    "function_call": "tool_choice",
    **{f"guided_{kind}": "structured_outputs" for kind in ("json", "regex", "choice", "grammar")},
}


def refuse_unknown(
    where: str, given: Json, known: Collection[str], without_effect: Collection[str] = frozenset()
) -> None:
    """Raise BadRequestError that names every field of `given` that is not `known`.

    Args:
        where: name of the object for the message.
        given: fields of the object.
        known: fields that it may have.
        without_effect: known fields that the message does not advise, as no value of them changes anything.
    """
    if unknown := sorted(islice((name for name in given if name not in known), _MAX_NAMED)):
        raise unknown_fields(f"the {where}", unknown, set(known).difference(without_effect), unknown[0])


def unknown_fields(where: str, unknown: Sequence[str], supported: Collection[str], param: str) -> BadRequestError:
    """Return the error of unknown fields in an object, with those that may be meant."""
    advice = "".join(f"; {name} is now {_SUCCESSORS[name]}" for name in unknown if name in _SUCCESSORS)
    hint = did_you_mean((name for name in unknown if name not in _SUCCESSORS), supported)
    others = f"supported are {sorted(supported)}" if supported else "no field of it has an effect here"
    message = f"unsupported fields {brief(unknown)} in {where}{hint}{advice}; {others}"
    return BadRequestError(message, param, "unsupported_parameter")


def refuse_features(given: Json, neutral: Mapping[str, Sequence[str]]) -> None:
    """Raise BadRequestError for a field with a value other than those, as JSON, that `neutral` has for it."""
    for name in sorted(neutral.keys() & given.keys()):
        allowed = [json.dumps(given.get("n", 1)) if text == "n" else text for text in neutral[name]]
        if _short_json(given[name]) not in allowed:
            message = f"{name} is not supported: it must be {' or '.join(neutral[name])}, got {brief(given[name])}"
            raise BadRequestError(message, name, "unsupported_value")


def _short_json(value: Any) -> str | None:
    """Return the JSON of a short value; None for any other, as it would only be compared."""
    if isinstance(value, dict | list):
        is_short = len(value) <= 1 and all(isinstance(each, str) and len(each) < 64 for each in value)
    else:
        is_short = not isinstance(value, str) or len(value) < 64
    return json.dumps(value) if is_short else None
