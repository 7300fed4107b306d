"""Fields of bodies that say when a prompt will be used again, as a `ReuseHint`.

They are advice: whatever they contain, the reply is the same. Anthropic's `cache_control` becomes
`prompt_cache_options`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from jaxserve.api.reuse_hint import EXTENDED_S, IN_MEMORY_S, MAX_GROUP_LEN, NOT_AGAIN, ReuseHint
from jaxserve.api.schema import FieldType, number
from jaxserve.openai.errors import Json
from jaxserve.openai.fields import (
    ANY,
    INTEGER,
    LIST,
    OBJECT,
    TEXT,
    BodyField,
    BodyReader,
    ObjectFields,
    choice,
    each,
    needed,
)

MAX_SLOTS = 2**31  # llama.cpp's slots have 32-bit numbers
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}
_TTL = BodyField(
    FieldType(
        'a time such as "30m", at most "24h"',
        lambda value: isinstance(value, str) and _seconds(value) is not None,
    )
)
HINT_FIELDS: ObjectFields = {
    **each(TEXT, "session_id", "prompt_cache_key"),
    "prompt_cache_retention": choice("in_memory", "in-memory", "24h"),
    **each(OBJECT, "prompt_cache_options", "kv_hints"),
    "id_slot": INTEGER,  # llama.cpp's
}
_OPTIONS: ObjectFields = {"mode": choice("implicit", "explicit"), "ttl": _TTL}
_ENVELOPE: ObjectFields = {"protocol_version": ANY, "message_id": ANY, "actions": LIST}
_ACTION: ObjectFields = {**each(ANY, "action_id", "action_version"), "action_type": needed(TEXT), "payload": OBJECT}
_SECONDS = BodyField(number(0))
_ACTIONS: dict[str, ObjectFields] = {  # by `action_type`: the fields of `payload`
    "retain": {"ttl_s": needed(_SECONDS)},
    "expect": {"after_s": needed(_SECONDS), "within_s": _SECONDS},
    "demote": {},
}
_CACHE_CONTROL: ObjectFields = {"type": needed(choice("ephemeral")), "ttl": choice("5m", "1h")}
CACHE_CONTROL = replace(OBJECT, is_kept=False)  # `cache_options` reads it


def read_hint(given: Json, reader: BodyReader) -> ReuseHint | None:
    """Return the hint in a body's checked fields; None if there is none.

    A session's name goes before a cache key, an action of `kv_hints` before a time, and a longer time before a shorter
    one. Unknown actions are ignored.

    Args:
        given: checked fields of the body.
        reader: reader that notes ignored actions.

    Raises:
        BadRequestError: a field has a wrong type.
    """
    if not given.keys() & HINT_FIELDS.keys():
        return None
    slot = given.get("id_slot", -1)  # -1 is any slot
    name = given.get("session_id") or given.get("prompt_cache_key") or (str(slot) if 0 <= slot < MAX_SLOTS else "")
    hint = ReuseHint(name[:MAX_GROUP_LEN])
    times = [IN_MEMORY_S]
    if given.get("prompt_cache_retention") == "24h":
        times.append(EXTENDED_S)
    name = "prompt_cache_options"
    if ttl := reader.read(given.get(name, {}), _OPTIONS, name, name).get("ttl"):
        times.append(_seconds(ttl) or 0.0)
    hint = hint._replace(within_s=max(times))
    for kind, payload in _actions(given.get("kv_hints", {}), reader):
        match kind:
            case "retain":
                hint = hint._replace(within_s=payload["ttl_s"])
            case "expect":
                after_s = payload["after_s"]
                hint = hint._replace(after_s=after_s, within_s=payload.get("within_s", max(hint.within_s, 4 * after_s)))
            case "demote":
                hint = hint._replace(after_s=NOT_AGAIN)
    return hint


def _actions(envelope: Json, reader: BodyReader) -> Iterator[tuple[str, Json]]:
    """Yield type and payload of the known actions in vLLM's envelope."""
    for action in reader.read(envelope, _ENVELOPE, "kv_hints", "kv_hints").get("actions", ()):
        given = reader.read(action, _ACTION, "an action of kv_hints", "kv_hints")
        kind = given["action_type"]
        if kind in _ACTIONS:
            yield kind, reader.read(given.get("payload", {}), _ACTIONS[kind], f"payload of {kind}", "kv_hints")
        else:
            reader.ignored.add(f"kv_hints.{kind}")


def cache_options(body: Any, reader: BodyReader) -> Json:
    """Return `prompt_cache_options` for the `cache_control` markers of an Anthropic request; empty without any."""
    ttls = [
        reader.read(marker, _CACHE_CONTROL, "cache_control", "cache_control").get("ttl", "5m")
        for marker in _markers(body)
    ]
    return {"prompt_cache_options": {"ttl": max(ttls, key=lambda ttl: _seconds(ttl) or 0.0)}} if ttls else {}


def _markers(content: Any) -> Iterator[Json]:
    """Yield all `cache_control` objects of a request, its tools and its blocks; they are checked to be objects."""
    if isinstance(content, dict):
        if content.get("cache_control") is not None:
            yield content["cache_control"]
        parts = [content[name] for name in ("system", "tools", "messages", "content") if name in content]
    else:
        parts = content if isinstance(content, list) else []
    for part in parts:
        yield from _markers(part)


def _seconds(text: str) -> float | None:
    """Return a time such as "30m" in seconds; None for another text, or more than a day."""
    found = re.fullmatch(r"(\d{1,5})([smh])", text, re.ASCII)
    seconds = float(found[1]) * _UNITS_S[found[2]] if found else EXTENDED_S + 1
    return seconds if seconds <= EXTENDED_S else None
