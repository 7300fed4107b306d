"""LlamaIndex: chats, completions, streams, tools and typed outputs of its class for servers like OpenAI's."""

from checks import Target, check, run
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, ConfigDict

HELLO = [ChatMessage(role="user", content="def add(a, b):")]


class Switch(BaseModel):
    """State of a switch."""

    model_config = ConfigDict(extra="forbid")  # a model that has not learnt to stop would add others
    on: bool


def switch(on: bool) -> str:
    """Switch something."""
    return "done"


def model(target: Target, max_tokens: int, *, is_chat: bool = True) -> OpenAILike:
    return OpenAILike(
        model=target.model,
        api_base=f"{target.url}/v1",
        api_key="none",
        is_chat_model=is_chat,
        is_function_calling_model=is_chat,
        max_tokens=max_tokens,
        max_retries=0,
        temperature=0,
    )


@check
def chat_is_the_stream(target: Target) -> None:
    whole = model(target, 12).chat(HELLO).message.content
    assert whole
    assert "".join(part.delta or "" for part in model(target, 12).stream_chat(HELLO)) == whole


@check
def completion_is_the_stream(target: Target) -> None:
    plain = model(target, 8, is_chat=False)
    whole = plain.complete("import os\n").text
    assert whole
    assert "".join(part.delta or "" for part in plain.stream_complete("import os\n")) == whole


@check
def required_tool(target: Target) -> None:
    tool, caller = FunctionTool.from_defaults(switch), model(target, 120)
    reply = caller.chat_with_tools([tool], user_msg="switch it on", tool_required=True)
    (call, *_) = caller.get_tool_calls_from_response(reply)
    assert call.tool_name == "switch"
    assert isinstance(call.tool_kwargs["on"], bool)


@check
def typed_output(target: Target) -> None:
    assert isinstance(model(target, 200).structured_predict(Switch, PromptTemplate("on")), Switch)


run("llama-index-llms-openai-like")
