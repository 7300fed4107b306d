"""langchain-openai: chats, streams, tools, structured outputs, completions, histories that are too long."""

import json
import urllib.request
from collections.abc import Sequence

from checks import Target, check, refusal, run
from langchain_core.exceptions import ContextOverflowError, ModelNotFoundError
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    ToolMessage,
    convert_to_openai_messages,
    trim_messages,
)
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict


class Switch(BaseModel):
    """Switch something."""

    model_config = ConfigDict(extra="forbid")  # a model that has not learnt to stop would add others
    on: bool


@tool(args_schema=Switch)
def switch(on: bool) -> str:
    """Switch something."""
    return "done"


def chat(target: Target, **options: object) -> ChatOpenAI:
    return ChatOpenAI(model=target.model, base_url=f"{target.url}/v1", api_key="none", max_retries=0, **options)


@check
def invoke_is_the_stream(target: Target) -> None:
    model = chat(target, temperature=0, max_tokens=12)
    whole = model.invoke("def add(a, b):")
    parts = list(model.stream("def add(a, b):"))
    assert "".join(part.content for part in parts) == whole.content
    assert whole.usage_metadata["output_tokens"] == 12


@check
def batch(target: Target) -> None:
    assert len(chat(target, max_tokens=4).batch(["a", "b", "c"])) == 3


@check
def bound_tools(target: Target) -> None:
    options = {"tool_choice": "required", "strict": True, "parallel_tool_calls": False}  # so that no call is cut off
    message = chat(target, max_tokens=120).bind_tools([switch], **options).invoke("switch it on")
    (call, *_) = message.tool_calls
    assert call["name"] == "switch"
    assert isinstance(call["args"]["on"], bool)
    result = ToolMessage("done", tool_call_id=call["id"])
    assert chat(target, max_tokens=4).bind_tools([switch]).invoke([("user", "switch it on"), message, result])


@check
def streamed_tools(target: Target) -> None:
    model, total = chat(target, max_tokens=120).bind_tools([switch], tool_choice="switch"), None
    for part in model.stream("switch it on"):
        total = part if total is None else total + part
    assert total.tool_calls[0]["name"] == "switch"
    assert isinstance(total.tool_calls[0]["args"]["on"], bool)


@check
def structured_output_by_schema(target: Target) -> None:
    assert isinstance(chat(target, max_tokens=120).with_structured_output(Switch).invoke("on"), Switch)


@check
def structured_output_by_tool(target: Target) -> None:
    model = chat(target, max_tokens=120).with_structured_output(Switch, method="function_calling")
    assert isinstance(model.invoke("on"), Switch)


@check
def completion(target: Target) -> None:
    model = OpenAI(model=target.model, base_url=f"{target.url}/v1", api_key="none", max_tokens=6, max_retries=0)
    assert model.invoke("import os\n")


@check
def long_histories_are_known_and_trimmed(target: Target) -> None:
    history = [kind("x = 1\n" * 40) for _ in range(20) for kind in (HumanMessage, AIMessage)]
    history.append(HumanMessage("def add(a, b):"))
    for use_responses_api in (False, True):
        model = chat(target, max_tokens=8, use_responses_api=use_responses_api)
        refusal(lambda model=model: model.invoke(history), ContextOverflowError)
        refusal(lambda model=model: list(model.stream(history)), ContextOverflowError)

    def count(messages: Sequence[BaseMessage]) -> int:
        body = {"model": target.model, "messages": convert_to_openai_messages(messages)}
        request = urllib.request.Request(
            f"{target.url}/tokenize", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            return json.load(reply)["count"]

    kept = trim_messages(history, max_tokens=600, token_counter=count, strategy="last", start_on="human")
    usage = chat(target, max_tokens=8).invoke(kept).usage_metadata
    assert 1 < len(kept) < len(history)
    assert usage["input_tokens"] == count(kept) <= 600


@check
def a_model_that_is_not_there_is_known(target: Target) -> None:
    other = ChatOpenAI(model="other", base_url=f"{target.url}/v1", api_key="none", max_retries=0)
    refusal(lambda: other.invoke("a"), ModelNotFoundError)


run("langchain-openai")
