"""Errors of unknown fields advise fields that change a request, and no others."""

import ast
import re
from collections.abc import Callable
from typing import Any

import pytest

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.openai.context import BodyContext
from jaxserve.openai.errors import BadRequestError
from jaxserve.openai.format import CHAT, CLASSIFICATION, COMPLETIONS, EMBEDDINGS, POOLING, parse_body
from jaxserve.openai.messages import message_to_chat
from jaxserve.openai.pooling import parse_pooling
from jaxserve.openai.responses import response_to_chat

# Values that ask for features of vLLM and OpenAI that there are not here.
REFUSED = {
    "use_beam_search": True,
    "watermarking": True,
    "suffix": "a",
    "best_of": 2,
    "length_penalty": 2.0,
    "stream_interval": 2,
    "detokenize": False,
    "spaces_between_special_tokens": False,
    "vllm_xargs": {"a": "b"},
    "modalities": ["audio"],
    "store": True,
    "previous_response_id": "a",
    "background": True,
    "container": "a",
    "mcp_servers": [{}],
    "embed_dtype": "float16",
    "padding": "max_length",
}
IGNORED = {"user", "safety_identifier", "verbosity", "prediction", "service_tier", "diagnostics"}
COMPLETION_VALUES = {  # values of fields that take more than a number, a text or a list
    "logit_bias": {"1": 2},
    "model": "other",
    "prompt": [3],
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"ttl": "1h"},
    "kv_hints": {"actions": [{"action_type": "demote"}]},
    "kv_transfer_params": {"do_remote_decode": True},
    "repetition_penalty": 1.5,
    "response_format": {"type": "json_object"},
    "stop_token_ids": [1],
    "allowed_token_ids": [1],
    "stream_options": {"include_usage": True},
    "structured_outputs": {"regex": "a"},
    "skip_special_tokens": False,
    "truncation_side": "right",
    "logprobs": 3,
}


def parsed(url: str, may_stream: bool = True, **fields: Any) -> Any:
    prompt = {"prompt" if url == COMPLETIONS else "messages": [1, 2]}
    body = {**prompt, "stream": may_stream, **fields}
    return parse_body(url, body, BodyContext("m", [], None, SamplingParams(), may_stream=may_stream))


def listed(read: Callable[..., Any]) -> list[str]:
    with pytest.raises(BadRequestError, match="unsupported fields") as caught:
        read(patience=1)
    found = re.search(r"supported are (\[.*\])", str(caught.value))
    assert found is not None
    return list(ast.literal_eval(found[1]))


READERS = {
    "completions": lambda **body: parsed(COMPLETIONS, **body),
    "chat": lambda **body: parsed(CHAT, **body),
    "responses": lambda **body: response_to_chat({"input": "a", **body}),
    "messages": lambda **body: message_to_chat({"messages": [], "max_tokens": 1, **body}),
    **{
        url: lambda url=url, **body: parse_pooling(
            url, {"input": "a", **body}, BodyContext("m", ["m"], may_stream=True)
        )
        for url in (EMBEDDINGS, POOLING, CLASSIFICATION)
    },
}


@pytest.mark.parametrize("name", READERS)
def test_no_field_is_advised_that_is_refused_or_ignored(name: str) -> None:
    read = READERS[name]
    names = set(listed(read))
    assert "model" in names
    assert not names & (REFUSED.keys() | IGNORED)
    with pytest.raises(BadRequestError, match="unsupported fields") as caught:
        read(watermark=True, safety_identifie="a")
    assert "did you mean" not in str(caught.value)


def test_every_advised_field_of_a_completion_changes_it() -> None:
    others = [True, False, 1, 7, 0.5, "a", ["a"]]

    def changes(name: str, value: Any, **more: Any) -> bool:
        try:
            return bool(parsed(COMPLETIONS, **{**more, name: value}) != parsed(COMPLETIONS, **more))
        except BadRequestError:
            return False

    elsewhere = {"timeout", "add_special_tokens"}  # read by the server; seen with a tokenizer only
    names = set(listed(READERS["completions"])) - elsewhere
    assert len(names) > 30
    idle = {
        name
        for name in names
        if not any(
            any(changes(name, value, **more) for more in ({}, {"truncate_prompt_tokens": 5}, {"stream": False}))
            for value in [COMPLETION_VALUES.get(name), *others]
        )
    }
    assert idle == set()


def test_a_line_of_a_batch_file_is_not_advised_what_only_the_server_serves() -> None:
    only_served = {"timeout", "request_id", "priority", "stream", "stream_options"}
    assert only_served <= set(listed(READERS["completions"]))
    assert not only_served & set(listed(lambda **body: parsed(COMPLETIONS, may_stream=False, **body)))


def test_options_of_a_stream_are_those_with_an_effect() -> None:
    with pytest.raises(BadRequestError, match=r"supported are \['continuous_usage_stats', 'include_usage'\]"):
        parsed(COMPLETIONS, stream_options={"include_costs": True})
    assert parsed(COMPLETIONS, stream_options={"include_obfuscation": True}) == parsed(COMPLETIONS)
    with pytest.raises(BadRequestError, match="include_obfuscation must be a bool, got 1"):
        parsed(COMPLETIONS, stream_options={"include_obfuscation": 1})
    with pytest.raises(BadRequestError, match=r"in stream_options; no field of it has an effect here"):
        response_to_chat({"input": "a", "stream_options": {"include_usage": True}})


def test_truncation_is_advised_and_chosen() -> None:
    assert "truncation" in listed(READERS["responses"])
    assert response_to_chat({"input": "a", "truncation": "auto"}).drops_turns
    with pytest.raises(BadRequestError, match='truncation must be "disabled" or "auto", got \'left\''):
        response_to_chat({"input": "a", "truncation": "left"})
