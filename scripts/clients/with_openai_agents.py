"""openai-agents: runs over chats and over responses, with tools, typed outputs and streams."""

import asyncio
from collections.abc import Iterator

import agents
import openai
from checks import Target, check, run
from pydantic import BaseModel, ConfigDict

agents.set_tracing_disabled(True)
CALLED: list[bool] = []
ENDS = {"structured_outputs": {"regex": "[a-z]{3,8}"}}  # the client rejects text cut off by a limit


class Switch(BaseModel):
    """State of a switch."""

    model_config = ConfigDict(extra="forbid")  # a model that has not learnt to stop would add others
    on: bool


@agents.function_tool
def switch(on: bool) -> str:
    """Switch something."""
    CALLED.append(on)
    return "done"


def models(target: Target) -> Iterator[agents.Model]:
    for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
        client = openai.AsyncOpenAI(base_url=f"{target.url}/v1", api_key="none", max_retries=0, timeout=120)
        yield kind(model=target.model, openai_client=client)  # each has its own event loop


def agent(
    model: agents.Model,
    *,
    max_tokens: int,
    tool_choice: str | None = None,
    extra_body: dict[str, object] | None = None,
    **options: object,
) -> agents.Agent:
    settings = agents.ModelSettings(
        max_tokens=max_tokens,
        tool_choice=tool_choice,
        parallel_tool_calls=None if tool_choice is None else False,
        temperature=0,
        extra_body=extra_body,
    )
    return agents.Agent(name="helper", model=model, model_settings=settings, **options)


@check
def text(target: Target) -> None:
    for model in models(target):
        assert asyncio.run(
            agents.Runner.run(agent(model, max_tokens=30, extra_body=ENDS), "def add(a, b):")
        ).final_output


@check
def stream(target: Target) -> None:
    async def events(model: agents.Model) -> str:
        result = agents.Runner.run_streamed(agent(model, max_tokens=30, extra_body=ENDS), "def add(a, b):")
        parts = [each async for each in result.stream_events() if each.type == "raw_response_event"]
        text = "".join(part.data.delta for part in parts if part.data.type == "response.output_text.delta")
        assert text == result.final_output
        return text

    for model in models(target):
        assert asyncio.run(events(model))


@check
def forced_tool_is_called(target: Target) -> None:
    for model in models(target):
        CALLED.clear()
        helper = agent(
            model, max_tokens=120, tool_choice="required", tools=[switch], tool_use_behavior="stop_on_first_tool"
        )
        assert asyncio.run(agents.Runner.run(helper, "switch it on", max_turns=3)).final_output is not None
        assert len(CALLED) >= 1
        assert isinstance(CALLED[0], bool)


@check
def typed_output(target: Target) -> None:
    for model in models(target):
        helper = agent(model, max_tokens=200, output_type=Switch)
        assert isinstance(asyncio.run(agents.Runner.run(helper, "on")).final_output, Switch)


@check
def typed_output_with_tools(target: Target) -> None:
    for model in models(target):
        helper = agent(model, max_tokens=200, output_type=Switch, tools=[switch], tool_choice="none")
        assert isinstance(asyncio.run(agents.Runner.run(helper, "on", max_turns=3)).final_output, Switch)


run("openai-agents")
