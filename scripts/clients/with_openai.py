"""OpenAI's Python client: completions, chats, tools, structured outputs, responses, errors."""

import json
from functools import partial
from typing import Literal

import openai
from checks import Target, check, refusal, run
from pydantic import BaseModel

GREEDY = {"temperature": 0, "max_tokens": 24}
HELLO = [{"role": "user", "content": "def add(a, b):"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Paris", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


class Point(BaseModel):
    """Schema for a structured output."""

    on: bool
    kind: Literal["a", "b"]


def client(target: Target) -> openai.OpenAI:
    """Return a client without retries, so that every failure shows."""
    return openai.OpenAI(base_url=f"{target.url}/v1", api_key="none", max_retries=0, timeout=120)


@check
def models(target: Target) -> None:
    names = [model.id for model in client(target).models.list()]
    assert target.model in names
    assert client(target).models.retrieve(target.model).id == target.model


@check
def completion_streamed_is_the_whole(target: Target) -> None:
    ask = client(target).completions.create
    whole = ask(model=target.model, prompt="import os\n", **GREEDY)
    chunks = list(
        ask(model=target.model, prompt="import os\n", stream=True, stream_options={"include_usage": True}, **GREEDY)
    )
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage
    assert whole.usage.completion_tokens == 24
    assert whole.choices[0].finish_reason == "length"


@check
def completions_of_token_ids_with_samples_and_a_seed(target: Target) -> None:
    ask = client(target).completions.create
    options = {
        "model": target.model,
        "prompt": [[5, 6, 7], [8, 9]],
        "n": 2,
        "seed": 3,
        "max_tokens": 5,
        "temperature": 1,
    }
    first, again = ask(**options), ask(**options)
    assert [c.index for c in first.choices] == [0, 1, 2, 3]
    assert [c.text for c in first.choices] == [c.text for c in again.choices]


@check
def logprobs_of_completions(target: Target) -> None:
    reply = client(target).completions.create(model=target.model, prompt="x = ", logprobs=3, echo=True, **GREEDY)
    found = reply.choices[0].logprobs
    assert found.token_logprobs[0] is None
    assert len(found.tokens) == len(found.token_logprobs) == len(found.text_offset) == reply.usage.total_tokens
    assert all(value <= 0 for value in found.token_logprobs[1:])
    assert "".join(found.tokens).removeprefix("<|endoftext|>") == reply.choices[0].text


@check
def stop_and_logit_bias(target: Target) -> None:
    ask = client(target).completions.create
    plain = ask(model=target.model, prompt="import os\n", **GREEDY).choices[0].text
    stop = plain[4:7]
    reply = ask(model=target.model, prompt="import os\n", stop=[stop], **GREEDY).choices[0]
    assert reply.finish_reason == "stop"
    assert reply.text == plain[: plain.index(stop)]
    forced = ask(model=target.model, prompt="a", logit_bias={"77": 100}, max_tokens=3, temperature=0, logprobs=0)
    assert len(set(forced.choices[0].logprobs.tokens)) == 1


@check
def chat_streamed_is_the_whole(target: Target) -> None:
    ask = client(target).chat.completions.create
    options = {"model": target.model, "messages": HELLO, "logprobs": True, "top_logprobs": 2, **GREEDY}
    whole = ask(**options)
    chunks = list(ask(stream=True, stream_options={"include_usage": True}, **options))
    assert chunks[0].choices[0].delta.role == "assistant"
    parts = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(part.delta.content or "" for part in parts) == whole.choices[0].message.content
    logprobs = [entry for part in parts if part.logprobs for entry in part.logprobs.content]
    assert logprobs == whole.choices[0].logprobs.content
    assert parts[-1].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage


@check
def chat_stream_helper(target: Target) -> None:
    options = {"model": target.model, "messages": HELLO, "n": 2, "seed": 1, "stop": ["e", "t", " ", "\n"]}
    with client(target).chat.completions.stream(**options) as stream:
        deltas = {0: "", 1: ""}
        for event in stream:
            if event.type == "chunk":
                for choice in event.chunk.choices:
                    deltas[choice.index] += choice.delta.content or ""
        final = stream.get_final_completion()
    assert {c.index: c.message.content for c in final.choices} == deltas


@check
def parsed_structured_outputs(target: Target) -> None:
    reply = client(target).chat.completions.parse(
        model=target.model, messages=HELLO, response_format=Point, max_tokens=200, seed=1
    )
    assert isinstance(reply.choices[0].message.parsed, Point)


@check
def json_object(target: Target) -> None:
    reply = client(target).chat.completions.create(
        model=target.model,
        messages=HELLO,
        response_format={"type": "json_object"},
        max_tokens=200,
        seed=2,
        logit_bias={},
        extra_body={"structured_outputs": None},
    )
    choice = reply.choices[0]
    assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)


@check
def required_tool_whole_and_streamed(target: Target) -> None:
    options = {"model": target.model, "messages": HELLO, "tools": [WEATHER], "tool_choice": "required", "seed": 4}
    options |= {"parallel_tool_calls": False, "max_tokens": 120}
    whole = client(target).chat.completions.create(**options).choices[0]
    (call,) = whole.message.tool_calls
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in ("Paris", "Rome")
    assert 1 <= arguments["days"] <= 9
    assert whole.finish_reason == "tool_calls"
    parts = [
        chunk.choices[0] for chunk in client(target).chat.completions.create(stream=True, **options) if chunk.choices
    ]
    deltas = [delta for part in parts for delta in part.delta.tool_calls or ()]
    assert [delta.function.name for delta in deltas if delta.function.name] == ["get_weather"]
    assert len([delta.id for delta in deltas if delta.id]) == 1
    assert json.loads("".join(delta.function.arguments or "" for delta in deltas)) == arguments
    assert parts[-1].finish_reason == "tool_calls"


@check
def named_tool_and_its_result(target: Target) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    ask = client(target).chat.completions.create
    reply = ask(model=target.model, messages=HELLO, tools=[WEATHER], tool_choice=named, max_tokens=120, seed=5)
    message = reply.choices[0].message
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    follow = [*HELLO, message.model_dump(exclude_none=True), result]
    assert (
        ask(model=target.model, messages=follow, tools=[WEATHER], max_tokens=8).choices[0].message.role == "assistant"
    )


@check
def errors_have_their_types_and_fields(target: Target) -> None:
    ask = client(target).chat.completions.create
    for wrong, error, param in (
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"extra_body": {"no_such_field": 1}}, openai.BadRequestError, "no_such_field"),
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"store": True}, openai.BadRequestError, "store"),
    ):
        options = {"model": target.model, "messages": HELLO, "max_tokens": 2} | wrong
        assert refusal(partial(ask, **options), error).param == param


@check
def ignored_fields_are_named(target: Target) -> None:
    raw = client(target).chat.completions.with_raw_response.create(
        model=target.model, messages=HELLO, max_tokens=2, user="me", metadata={"a": "b"}
    )
    assert raw.headers["x-ignored-params"] == "metadata,user"


@check
def a_stream_may_be_left(target: Target) -> None:
    stream = client(target).chat.completions.create(model=target.model, messages=HELLO, max_tokens=200, stream=True)
    next(iter(stream))
    stream.close()
    assert client(target).completions.create(model=target.model, prompt="a", max_tokens=1).choices


@check
def responses(target: Target) -> None:
    options = {"model": target.model, "input": "def add(a, b):", "max_output_tokens": 16, "temperature": 0}
    whole = client(target).responses.create(**options)
    events = list(client(target).responses.create(stream=True, **options))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    assert events[0].type == "response.created"
    assert events[-1].response.output_text == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))


@check
def responses_stream_helper_with_a_tool(target: Target) -> None:
    tool = {"type": "function", "strict": True, **WEATHER["function"]}
    options = {"model": target.model, "input": "weather", "tools": [tool], "tool_choice": "required"}
    options |= {"parallel_tool_calls": False, "max_output_tokens": 150}
    with client(target).responses.stream(**options) as stream:
        list(stream)
        final = stream.get_final_response()
    calls = [item for item in final.output if item.type == "function_call"]
    assert calls
    assert json.loads(calls[0].arguments)["city"] in ("Paris", "Rome")


run("openai")
