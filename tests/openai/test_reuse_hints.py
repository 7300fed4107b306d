"""Hints about reuse in the bodies of all interfaces, as the clients' own types have them."""

import math
from typing import Any

import pytest
from anthropic.types import message_create_params
from openai.types.chat import completion_create_params
from openai.types.responses import response_create_params

from jaxserve.api.reuse_hint import MAX_GROUP_LEN, ReuseHint
from jaxserve.openai.errors import BadRequestError
from jaxserve.openai.fields import BodyReader
from jaxserve.openai.messages import message_to_chat
from jaxserve.openai.responses import response_to_chat
from jaxserve.openai.reuse_hints import HINT_FIELDS, read_hint

CACHED: Any = {"cache_control": {"type": "ephemeral"}}
HOUR: Any = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def hint(**fields: Any) -> ReuseHint | None:
    reader = BodyReader()
    return read_hint(reader.read(fields, HINT_FIELDS), reader)


def actions(*given: Any) -> ReuseHint | None:
    return hint(kv_hints={"protocol_version": "1", "message_id": "m", "actions": [*given]})


def test_fields_become_one_hint() -> None:
    assert hint() is None
    assert hint(prompt_cache_key="k") == ReuseHint("k")
    assert hint(prompt_cache_key="k", session_id="s") == ReuseHint("s")
    assert hint(prompt_cache_key="k" * 10_000) == ReuseHint("k" * MAX_GROUP_LEN), "names are kept, so they are short"
    assert (hint(id_slot=3), hint(id_slot=-1), hint(id_slot=10**4000)) == (ReuseHint("3"), ReuseHint(), ReuseHint())
    assert hint(prompt_cache_retention="24h") == ReuseHint("", 0.0, 86_400.0)
    assert hint(prompt_cache_retention="in_memory") == ReuseHint()
    assert hint(prompt_cache_options={"mode": "implicit", "ttl": "30m"}) == ReuseHint("", 0.0, 1800.0)
    assert actions({"action_type": "retain", "payload": {"ttl_s": 12}}) == ReuseHint("", 0.0, 12)
    assert actions({"action_type": "expect", "payload": {"after_s": 100}}) == ReuseHint("", 100, 400)
    assert actions({"action_type": "demote", "action_id": "a", "action_version": "1", "payload": {}}) == ReuseHint(
        "", math.inf
    )


def test_unknown_actions_are_named_and_wrong_ones_refused() -> None:
    reader = BodyReader()
    given = {"kv_hints": {"actions": [{"action_type": "prefetch", "payload": {"worker": 3}}]}}
    assert read_hint(reader.read(given, HINT_FIELDS), reader) == ReuseHint()
    assert reader.ignored == {"kv_hints.prefetch"}
    for fields, words in (
        ({"kv_hints": {"actions": [{"action_type": "retain"}]}}, "ttl_s must be given"),
        ({"kv_hints": {"actions": [{"action_type": "retain", "payload": {"ttl_s": -1}}]}}, "a number of 0 or more"),
        ({"kv_hints": {"actions": [1]}}, "must be an object"),
        ({"prompt_cache_options": {"ttl": "9d"}}, "a time such as"),
        ({"prompt_cache_options": {"ttl": "25h"}}, "a time such as"),
        ({"prompt_cache_retention": "1h"}, '"24h"'),
        ({"session_id": 3}, "session_id must be"),
    ):
        with pytest.raises(BadRequestError, match=words):
            hint(**fields)


def test_markers_of_messages_become_the_longest_time() -> None:
    def options(**fields: Any) -> Any:
        body = {"max_tokens": 1, "messages": [{"role": "user", "content": "a"}], **fields}
        translation = message_to_chat(body)
        assert not translation.ignored
        return translation.chat.get("prompt_cache_options")

    text = {"type": "text", "text": "a"}
    assert options() is None
    assert options(**CACHED) == {"ttl": "5m"}
    assert options(system=[text | CACHED], tools=[{"name": "f", "input_schema": {}} | HOUR]) == {"ttl": "1h"}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text | HOUR]}
    assert options(messages=[{"role": "user", "content": [result | CACHED]}]) == {"ttl": "1h"}
    with pytest.raises(BadRequestError, match="5m"):
        options(system=[text | {"cache_control": {"type": "ephemeral", "ttl": "2h"}}])
    with pytest.raises(BadRequestError, match="cache_control"):
        options(cache_control="ephemeral")


def test_sessions_of_messages_and_responses() -> None:
    said = {"max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
    assert (
        message_to_chat(said | {"metadata": {"user_id": "user_1_session_2"}}).chat["session_id"] == "user_1_session_2"
    )
    both = {"metadata": {"user_id": "u"}, "session_id": "s"}
    assert message_to_chat(said | both).chat["session_id"] == "s"
    translation = response_to_chat({"input": "a", "prompt_cache_key": "k", "prompt_cache_retention": "24h"})
    assert (translation.chat["prompt_cache_key"], translation.ignored) == ("k", frozenset())


def test_the_clients_types_have_these_fields() -> None:
    names = {"prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"}
    assert names <= completion_create_params.CompletionCreateParamsBase.__annotations__.keys()
    assert names <= response_create_params.ResponseCreateParamsBase.__annotations__.keys()
    assert "cache_control" in message_create_params.MessageCreateParamsBase.__annotations__
