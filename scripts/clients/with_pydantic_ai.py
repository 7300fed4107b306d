"""pydantic-ai: runs over chats and over responses, with typed outputs in its modes, tools and streams."""

import asyncio
from collections.abc import Iterator

from checks import Target, check, refusal, run
from pydantic import BaseModel, ConfigDict
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models import Model
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Switch(BaseModel):
    """State of a switch."""

    model_config = ConfigDict(extra="forbid")  # a model that has not learnt to stop would add others
    on: bool


def models(target: Target) -> Iterator[Model]:
    provider = OpenAIProvider(base_url=f"{target.url}/v1", api_key="none")
    yield OpenAIChatModel(target.model, provider=provider)
    yield OpenAIResponsesModel(target.model, provider=provider)


def agent(model: Model, max_tokens: int, **options: object) -> Agent:
    return Agent(model, model_settings={"max_tokens": max_tokens, "temperature": 0}, **options)


@check
def text(target: Target) -> None:
    for model in models(target):
        result = agent(model, 12).run_sync("def add(a, b):")
        assert result.output
        assert result.usage().output_tokens == 12


@check
def stream(target: Target) -> None:
    async def parts(model: Model) -> str:
        async with agent(model, 12).run_stream("def add(a, b):") as result:
            return "".join([part async for part in result.stream_text(delta=True)])

    for model in models(target):
        assert asyncio.run(parts(model)) == agent(model, 12).run_sync("def add(a, b):").output


@check
def output_by_tool(target: Target) -> None:
    for model in models(target):
        assert isinstance(agent(model, 200, output_type=ToolOutput(Switch)).run_sync("on").output, Switch)


@check
def output_by_schema(target: Target) -> None:
    for model in models(target):
        assert isinstance(agent(model, 200, output_type=NativeOutput(Switch)).run_sync("on").output, Switch)


@check
def output_by_schema_with_tools(target: Target) -> None:
    for model in models(target):
        helper = agent(model, 200, output_type=NativeOutput(Switch))

        @helper.tool_plain(strict=True)
        def look() -> str:
            """Look at it."""
            return "it is on"

        assert isinstance(helper.run_sync("on").output, Switch)


@check
def errors_keep_their_status(target: Target) -> None:
    provider = OpenAIProvider(base_url=f"{target.url}/v1", api_key="none")
    wrong = agent(OpenAIChatModel("other", provider=provider), 4)
    assert refusal(lambda: wrong.run_sync("x"), ModelHTTPError).status_code == 404


run("pydantic-ai-slim")
