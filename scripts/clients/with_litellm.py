"""litellm: chats, completions, tools, and Anthropic's messages over OpenAI's interface."""

import json
from functools import partial

import litellm
from checks import Target, check, refusal, run

HELLO = [{"role": "user", "content": "def add(a, b):"}]
PARAMETERS = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
TOOL = {"type": "function", "function": {"name": "switch", "description": "Switch it", "parameters": PARAMETERS}}
LONG = [{"role": "user", "content": "x = 1\n" * 2000}]


def where(target: Target, provider: str = "openai") -> dict[str, str]:
    return {"model": f"{provider}/{target.model}", "api_base": f"{target.url}/v1", "api_key": "none", "max_retries": 0}


@check
def chat_streamed_is_the_whole(target: Target) -> None:
    options = {"messages": HELLO, "max_tokens": 12, "temperature": 0}
    whole = litellm.completion(**where(target), **options)
    chunks = list(litellm.completion(**where(target), **options, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert whole.usage.completion_tokens == 12


@check
def completion_of_a_text(target: Target) -> None:
    reply = litellm.text_completion(**where(target, "text-completion-openai"), prompt="import os\n", max_tokens=5)
    assert reply.choices[0].text


@check
def required_tool(target: Target) -> None:
    reply = litellm.completion(**where(target), messages=HELLO, tools=[TOOL], tool_choice="required", max_tokens=120)
    call = reply.choices[0].message.tool_calls[0]
    assert isinstance(json.loads(call.function.arguments)["on"], bool)


@check
def structured_output(target: Target) -> None:
    form = {
        "type": "json_schema",
        "json_schema": {"name": "switch", "schema": PARAMETERS | {"additionalProperties": False}},
    }
    reply = litellm.completion(**where(target), messages=HELLO, response_format=form, max_tokens=120)
    assert isinstance(json.loads(reply.choices[0].message.content)["on"], bool)


@check
def several_samples(target: Target) -> None:
    assert len(litellm.completion(**where(target), messages=HELLO, n=3, max_tokens=4, seed=1).choices) == 3


@check
def errors_keep_their_types(target: Target) -> None:
    options = {"messages": HELLO, "max_tokens": 2, "extra_body": {"no_such_field": 1}}
    error = refusal(partial(litellm.completion, **where(target), **options), litellm.BadRequestError)
    assert "no_such_field" in str(error)


@check
def prompts_that_are_too_long_are_known(target: Target) -> None:
    for provider in ("openai", "hosted_vllm"):
        for stream in (False, True):
            options = {"messages": LONG, "max_tokens": 2, "stream": stream}
            refusal(
                partial(litellm.completion, **where(target, provider), **options), litellm.ContextWindowExceededError
            )
    text = partial(litellm.text_completion, **where(target, "text-completion-openai"), prompt=LONG[0]["content"])
    refusal(text, litellm.ContextWindowExceededError)
    refusal(
        partial(litellm.responses, **where(target), input=LONG, max_output_tokens=2),
        litellm.ContextWindowExceededError,
    )
    anthropic = where(target, "anthropic") | {"api_base": target.url}
    refusal(partial(litellm.completion, **anthropic, messages=LONG, max_tokens=2), litellm.ContextWindowExceededError)


@check
def a_prompt_that_is_too_long_falls_back(target: Target) -> None:
    short = {"role": "user", "content": HELLO[0]["content"]}
    router = litellm.Router(
        model_list=[
            {"model_name": "small", "litellm_params": where(target)},
            {"model_name": "large", "litellm_params": where(target) | {"mock_response": "from the large one"}},
        ],
        context_window_fallbacks=[{"small": ["large"]}],
        num_retries=0,
    )
    assert router.completion(model="small", messages=[short], max_tokens=2).usage.completion_tokens == 2
    reply = router.completion(model="small", messages=LONG, max_tokens=2)
    assert reply.choices[0].message.content == "from the large one"


@check
def a_model_that_is_not_there_is_known(target: Target) -> None:
    for provider, base in (("openai", "/v1"), ("hosted_vllm", "/v1"), ("anthropic", "")):
        there = where(target, provider) | {"model": f"{provider}/other", "api_base": f"{target.url}{base}"}
        refusal(partial(litellm.completion, **there, messages=HELLO, max_tokens=2), litellm.NotFoundError)


@check
def anthropics_messages(target: Target) -> None:
    there = where(target, "anthropic") | {"api_base": target.url}
    options = {"messages": HELLO, "max_tokens": 12, "temperature": 0}
    whole = litellm.completion(**there, **options)
    text = "".join(
        chunk.choices[0].delta.content or "" for chunk in litellm.completion(**there, **options, stream=True)
    )
    assert text == whole.choices[0].message.content
    assert whole.usage.completion_tokens == 12


run("litellm")
