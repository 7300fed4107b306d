"""instructor: typed outputs in its modes, whole and partial."""

from typing import Literal

import instructor
import openai
from checks import Target, check, run
from pydantic import BaseModel, ConfigDict


class Switch(BaseModel):
    """Switch something."""

    model_config = ConfigDict(extra="forbid")  # a model that has not learnt to stop would add others
    on: bool
    level: Literal[1, 2, 3]


def ask(target: Target, mode: instructor.Mode, **options: object) -> object:
    client = openai.OpenAI(base_url=f"{target.url}/v1", api_key="none", max_retries=0, timeout=120)
    messages = [{"role": "user", "content": "switch it on"}]
    create = instructor.from_openai(client, mode=mode).chat.completions.create
    return create(model=target.model, messages=messages, max_tokens=500, max_retries=0, seed=3, **options)


@check
def tools(target: Target) -> None:
    assert isinstance(ask(target, instructor.Mode.TOOLS, response_model=Switch), Switch)


@check
def strict_tools(target: Target) -> None:
    assert isinstance(ask(target, instructor.Mode.TOOLS_STRICT, response_model=Switch), Switch)


@check
def json_schema(target: Target) -> None:
    assert isinstance(ask(target, instructor.Mode.JSON_SCHEMA, response_model=Switch), Switch)


@check
def partial_outputs_of_a_stream(target: Target) -> None:
    parts = list(ask(target, instructor.Mode.TOOLS, response_model=instructor.Partial[Switch], stream=True))
    assert parts
    assert isinstance(parts[-1].on, bool)
    assert parts[-1].level in (1, 2, 3)


run("instructor")
