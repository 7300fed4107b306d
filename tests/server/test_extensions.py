"""Fields of replies beyond OpenAI's, counts of thoughts, and turns that are left out, over the server."""

import json
from typing import Any

import openai
import pytest

from tests.e2e.sizes import SIZES
from tests.server.conftest import Running

USER = [{"role": "user", "content": "x"}]


def post(server: Running, path: str, **body: Any) -> Any:
    reply = server.client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def chunks(server: Running, path: str, **body: Any) -> list[Any]:
    lines = server.client.post(path, json=body | {"stream": True}).text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


@pytest.mark.parametrize("is_wanted", [False, True])
def test_token_ids_of_prompts_and_replies(server: Running, is_wanted: bool) -> None:
    options = {"max_tokens": 3, "temperature": 0, "ignore_eos": True, "return_token_ids": is_wanted}
    prompt_ids = post(server, "/tokenize", messages=USER)["tokens"]
    chat = post(server, "/v1/chat/completions", messages=USER, **options)
    parts = chunks(server, "/v1/chat/completions", messages=USER, **options)
    assert chat["prompt_token_ids"] == parts[0]["prompt_token_ids"] == (prompt_ids if is_wanted else None)
    assert not any(part.get("prompt_token_ids") for part in parts[1:])
    (choice,) = chat["choices"]
    streamed = [i for part in parts for each in part["choices"] for i in each["token_ids"] or []]
    assert streamed == (choice["token_ids"] or [])
    assert len(streamed) == (3 if is_wanted else 0)
    text = post(server, "/v1/completions", prompt=prompt_ids, **options)["choices"][0]
    first = chunks(server, "/v1/completions", prompt=prompt_ids, **options)[0]["choices"][0]
    assert text["prompt_token_ids"] == first["prompt_token_ids"] == (prompt_ids if is_wanted else None)
    assert text["token_ids"] == choice["token_ids"]


def test_fields_that_nobody_asked_for_are_null(server: Running) -> None:
    chat = post(server, "/v1/chat/completions", messages=USER, max_tokens=2)
    at_top = ("prompt_logprobs", "prompt_token_ids", "prompt_text", "service_tier", "kv_transfer_params", "metrics")
    assert [chat[name] for name in at_top] == [None] * 6
    assert [chat["choices"][0][name] for name in ("stop_reason", "token_ids", "logprobs")] == [None] * 3
    assert chat["choices"][0]["message"]["reasoning"] is None
    text = post(server, "/v1/completions", prompt="x", max_tokens=2)
    names = ("stop_reason", "token_ids", "logprobs", "prompt_logprobs", "prompt_token_ids")
    assert [text["choices"][0][name] for name in names] == [None] * 5
    assert text["system_fingerprint"] == chat["system_fingerprint"]
    assert isinstance(text["system_fingerprint"], str)


def test_text_of_a_chats_prompt(server: Running) -> None:
    options = {"messages": USER, "max_tokens": 2, "return_prompt_text": True, "return_token_ids": True}
    chat = post(server, "/v1/chat/completions", **options)
    text = chat["prompt_text"]
    encoded = post(server, "/tokenize", prompt=text, add_special_tokens=False)
    assert encoded["tokens"] == chat["prompt_token_ids"]
    parts = chunks(server, "/v1/chat/completions", **options)
    assert [part.get("prompt_text") for part in parts] == [text, *[None] * (len(parts) - 1)]


def test_side_on_which_prompts_are_cut(server: Running) -> None:
    options = {"max_tokens": 1, "return_token_ids": True, "truncate_prompt_tokens": 3}
    for side, kept in ((None, [8, 9, 10]), ("left", [8, 9, 10]), ("right", [5, 6, 7])):
        for prompt in ([5, 6, 7, 8, 9, 10], [[5, 6, 7, 8, 9, 10]]):
            reply = post(server, "/v1/completions", prompt=prompt, truncation_side=side, **options)
            assert reply["choices"][0]["prompt_token_ids"] == kept
    whole = post(server, "/tokenize", messages=USER)["tokens"]
    chat = post(server, "/v1/chat/completions", messages=USER, truncation_side="right", **options)
    assert chat["prompt_token_ids"] == whole[:3]


def test_completions_without_special_tokens(server: Running) -> None:
    for is_wanted in (False, True):
        options = {"prompt": "Once upon", "add_special_tokens": is_wanted}
        reply = post(server, "/v1/completions", **options, max_tokens=1, echo=True, return_token_ids=True)
        (choice,) = reply["choices"]
        assert choice["prompt_token_ids"] == post(server, "/tokenize", **options)["tokens"]
        assert choice["text"].startswith("Once upon")


def test_vllms_defaults_may_be_spelt_out(server: Running) -> None:
    defaults = {"length_penalty": 1.0, "use_beam_search": False, "stream_interval": 1, "vllm_xargs": {}, "best_of": 1}
    body = {"prompt": "x", "max_tokens": 1, "thinking_token_budget": -1, "session_id": "a"} | defaults
    reply = server.client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert "x-ignored-params" not in reply.headers
    for name, wrong in (("length_penalty", 2.0), ("stream_interval", 4), ("thinking_token_budget", 8)):
        refused = server.client.post("/v1/completions", json=body | {name: wrong})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


def test_log_probabilities_of_a_chats_prompt_are_at_the_top(server: Running) -> None:
    chat = post(server, "/v1/chat/completions", messages=USER, max_tokens=1, prompt_logprobs=1, return_token_ids=True)
    tables, ids = chat["prompt_logprobs"], chat["prompt_token_ids"]
    assert tables[0] is None
    assert len(tables) == len(ids)
    assert all(str(token_id) in table for token_id, table in zip(ids[1:], tables[1:], strict=True))


def test_an_echoed_chat_has_log_probabilities_of_its_prompt(server: Running) -> None:
    chat = post(server, "/v1/chat/completions", messages=USER, max_tokens=1, echo=True, return_token_ids=True)
    assert len(chat["prompt_logprobs"]) == len(chat["prompt_token_ids"])


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("/v1/chat/completions", {"messages": USER, "prompt_logprobs": -1, "stream": True}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"json": False}}, "structured_outputs"),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"choice": []}}, "structured_outputs"),
        (
            "/v1/chat/completions",
            {
                "messages": USER,
                "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": False}},
            },
            "response_format",
        ),
        ("/v1/completions", {"prompt": "x", "cache_salt": ""}, "cache_salt"),
        (
            "/v1/responses",
            {"input": "x", "text": {"format": {"type": "json_schema", "name": "x", "schema": 1}}},
            "text",
        ),
    ],
)
def test_fields_of_errors(server: Running, path: str, fields: dict[str, Any], param: str) -> None:
    reply = server.client.post(path, json=fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


@pytest.mark.parametrize(
    ("path", "body"),
    [("/tokenize", {"prompt": "x"}), ("/tokenize", {"messages": USER}), ("/detokenize", {"tokens": [5]})],
)
def test_tokens_are_of_a_model_that_is_there(server: Running, path: str, body: dict[str, Any]) -> None:
    assert post(server, path, **body) == post(server, path, **body, model="alias")
    reply = server.client.post(path, json=body | {"model": "other"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")


def test_invocations(server: Running) -> None:
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": USER})):
        options = {"temperature": 0, "max_tokens": 3, "request_id": "a", "return_token_ids": True}
        one, other = (post(server, each, **body, **options) for each in (path, "/invocations"))
        assert one["choices"] == other["choices"]
        assert (one["object"], one["id"]) == (other["object"], other["id"])
        parts = chunks(server, "/invocations", **body, **options)
        assert parts[-1]["choices"][0]["finish_reason"] == one["choices"][0]["finish_reason"]
    assert server.client.post("/ping").status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage_in_streams(server: Running, path: str) -> None:
    body = {"prompt": "x"} if path == "/v1/completions" else {"messages": USER}
    body |= {"max_tokens": 5, "ignore_eos": True}
    assert not any("usage" in part for part in chunks(server, path, **body))
    only = {"continuous_usage_stats": True}
    assert not any(part.get("usage") for part in chunks(server, path, **body, stream_options=only))
    last = chunks(server, path, **body, stream_options={"include_usage": True})
    assert [bool(part["usage"]) for part in last] == [False] * (len(last) - 1) + [True]
    parts = chunks(server, path, **body, stream_options=only | {"include_usage": True})
    counts = [part["usage"]["completion_tokens"] for part in parts]
    assert counts == sorted(counts)
    assert counts[-1] == counts[-2] == 5
    for part, num_tokens in zip(parts, counts, strict=True):
        assert part["usage"]["total_tokens"] == part["usage"]["prompt_tokens"] + num_tokens


def test_old_turns_are_left_out(server: Running) -> None:
    limit = SIZES["max_model_len"]
    turns = [{"role": role, "content": f"{role} {index}"} for index in range(9) for role in ("user", "assistant")]
    given = [*turns, {"role": "user", "content": "last"}]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="tiny", input=given, max_output_tokens=4)
        assert caught.value.code == "context_length_exceeded"
        reply = client.responses.create(model="tiny", input=given, max_output_tokens=4, truncation="auto")
        whole = client.responses.create(model="tiny", input="x", max_output_tokens=4, truncation="auto")
    assert reply.truncation == "auto"
    assert reply.usage is not None
    assert whole.usage is not None
    assert limit - 40 < reply.usage.input_tokens <= limit - 4
    kept = next(
        start
        for start in range(0, len(given), 2)
        if post(server, "/tokenize", messages=given[start:])["count"] + 4 <= limit
    )
    assert reply.usage.input_tokens == post(server, "/tokenize", messages=given[kept:])["count"]


def test_tokens_of_a_text_beyond_any_prompt_are_not_listed(server: Running) -> None:
    error = server.client.post("/tokenize", json={"prompt": "a " * 2**20 + "a"}).json()["error"]
    assert (error["param"], error["code"]) == ("prompt", "invalid_request")
    assert "at most 2097152 characters, got 2097153" in error["message"]
