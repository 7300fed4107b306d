"""langchain-openai: chats, streams, tools, structured outputs, completions."""

from checks import Target, check, run
from langchain_core.messages import ToolMessage
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
    model = chat(target, max_tokens=120).bind_tools([switch], tool_choice="required")
    message = model.invoke("switch it on")
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


run("langchain-openai")
