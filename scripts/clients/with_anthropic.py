"""Anthropic's Python client: messages, tools, streams, token counts, errors."""

import re
from functools import partial

import anthropic
from checks import Target, check, refusal, run

GREEDY = {"temperature": 0}  # no argument any more since 2.13
HELLO = [{"role": "user", "content": "def add(a, b):"}]
TOOL = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def client(target: Target) -> anthropic.Anthropic:
    """Return a client without retries, so that every failure shows."""
    return anthropic.Anthropic(base_url=target.url, api_key="none", max_retries=0, timeout=120)


@check
def message(target: Target) -> None:
    reply = client(target).messages.create(
        model=target.model, max_tokens=12, messages=HELLO, system="Be brief.", extra_body=GREEDY
    )
    assert reply.role == "assistant"
    assert reply.content[0].type == "text"
    assert reply.stop_reason == "max_tokens"
    assert reply.usage.output_tokens == 12


@check
def stream_is_the_whole(target: Target) -> None:
    options = {"model": target.model, "max_tokens": 16, "messages": HELLO, "extra_body": GREEDY}
    whole = client(target).messages.create(**options)
    with client(target).messages.stream(**options) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text
    assert final.content[0].text == text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


@check
def stop_sequences(target: Target) -> None:
    options = {"model": target.model, "max_tokens": 24, "messages": HELLO, "extra_body": GREEDY}
    text = client(target).messages.create(**options).content[0].text
    stop = text.strip()[3:6]
    reply = client(target).messages.create(stop_sequences=[stop], **options)
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", stop)


@check
def tool_use_whole_and_streamed(target: Target) -> None:
    options = {"model": target.model, "max_tokens": 120, "messages": HELLO, "tools": [TOOL]}
    options |= {"tool_choice": {"type": "tool", "name": "get_weather"}}
    reply = client(target).messages.create(**options)
    block = next(block for block in reply.content if block.type == "tool_use")
    assert block.input["city"] in ("Paris", "Rome")
    assert reply.stop_reason == "tool_use"
    with client(target).messages.stream(**options) as stream:
        final = stream.get_final_message()
    used = next(block for block in final.content if block.type == "tool_use")
    assert used.input["city"] in ("Paris", "Rome")
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}
    content = [block.model_dump(exclude_none=True, include={"type", "id", "name", "input"})]
    follow = [*HELLO, {"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
    assert client(target).messages.create(model=target.model, max_tokens=8, messages=follow, tools=[TOOL]).content


@check
def count_of_tokens(target: Target) -> None:
    count = client(target).messages.count_tokens(model=target.model, messages=HELLO)
    reply = client(target).messages.create(model=target.model, max_tokens=1, messages=HELLO)
    usage = reply.usage
    assert count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


@check
def errors_have_their_types(target: Target) -> None:
    for wrong, error in (
        ({"extra_body": {"temperature": -1}}, anthropic.BadRequestError),
        ({"model": "other"}, anthropic.NotFoundError),
        ({"max_tokens": 0}, anthropic.BadRequestError),
    ):
        options = {"model": target.model, "max_tokens": 2, "messages": HELLO} | wrong
        assert refusal(partial(client(target).messages.create, **options), error).body["type"] == "error"


@check
def a_prompt_that_is_too_long_is_known(target: Target) -> None:
    long = [{"role": "user", "content": "x = 1\n" * 2000}]
    create = client(target).messages.create
    for stream in (False, True):
        options = {"model": target.model, "max_tokens": 2, "messages": long, "stream": stream}
        error = refusal(partial(create, **options), anthropic.BadRequestError)
        assert error.type == "invalid_request_error"
        assert re.search(r"prompt is too long: \d+ tokens > \d+ maximum", error.message)  # Claude Code looks for it


run("anthropic")
