"""Chats over HTTP: the prompts of their templates, the role of the reply, and its echo."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.assembly.engine import Engine
from jaxserve.offline.llm import LLM
from tests.server.conftest import Running, running

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    "{{ tools | length if tools else '' }}{{ mood }}{% if add_generation_prompt %}<assistant>{% endif %}"
)
PARTS = [{"type": "text", "text": "Kim:"}, {"type": "text", "text": "hello"}]
MESSAGES: list[Any] = [{"role": "user", "content": PARTS}, {"role": "assistant", "content": "It was"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6}


@pytest.fixture(scope="module")
def trusting(engine: Engine) -> Iterator[Running]:
    """Return a server that takes templates, whose replies are of a narrator."""
    with running(engine, trust_request_chat_template=True, response_role="narrator") as server:
        yield server


def by_transformers(messages: list[Any], **variables: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    given = [m | {"content": m["content"] if m["content"] is PARTS else [{"text": m["content"]}]} for m in messages]
    (text,), _ = render_jinja_template([given], chat_template=TEMPLATE, **variables)
    return text


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "chat_template_kwargs": {"mood": "!"}},
    ],
)
def test_tokens_of_messages_equal_transformers(trusting: Running, llm: LLM, fields: dict[str, Any]) -> None:
    continues = fields.get("continue_final_message", False)
    variables = {"add_generation_prompt": not continues} | {
        n: v for n, v in fields.items() if n != "chat_template_kwargs"
    }
    text = by_transformers(MESSAGES, **variables, **fields.get("chat_template_kwargs", {}))
    ids = llm.get_tokenizer()(text, add_special_tokens=False)["input_ids"]
    body = {"messages": MESSAGES, "chat_template": TEMPLATE} | fields
    assert trusting.client.post("/tokenize", json=body).json()["tokens"] == ids
    with_bos = trusting.client.post("/tokenize", json=body | {"add_special_tokens": True}).json()["tokens"]
    assert with_bos == llm.get_tokenizer()(text)["input_ids"]
    reply = trusting.client.post("/v1/chat/completions", json=body | GREEDY | {"tool_choice": "none"}).json()
    assert reply["usage"]["prompt_tokens"] == len(ids)
    if "tools" not in fields:
        asked = {"chat_template_content_format": "auto", "add_generation_prompt": not continues} | fields
        (output,) = llm.chat(MESSAGES, SamplingParams(**GREEDY), use_tqdm=False, chat_template=TEMPLATE, **asked)
        assert (output.prompt, output.prompt_token_ids) == (text, ids)
        assert output.outputs[0].text == reply["choices"][0]["message"]["content"]


def test_role_and_echo(trusting: Running) -> None:
    with openai.OpenAI(base_url=f"{trusting.url}/v1", api_key="none", max_retries=0) as client:
        asked: dict[str, Any] = {"model": trusting.app.service.model_names[0], "messages": MESSAGES, **GREEDY}
        for echo in (False, True):
            for continues in (False, True):
                extra = {"echo": echo, "continue_final_message": continues, "add_generation_prompt": not continues}
                message = client.chat.completions.create(**asked, extra_body=extra).choices[0].message
                chunks = list(client.chat.completions.create(**asked, stream=True, extra_body=extra))
                streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
                assert message.content == streamed
                assert message.role == chunks[0].choices[0].delta.role == ("assistant" if continues else "narrator")
                if continues:
                    assert streamed.startswith("It was") == echo


def test_templates_of_requests_are_refused_unless_trusted(server: Running) -> None:
    body = {"messages": MESSAGES, "chat_template": TEMPLATE}
    for path in ("/v1/chat/completions", "/tokenize"):
        error = server.client.post(path, json=body).json()["error"]
        assert (error["param"], error["code"]) == ("chat_template", "unsupported_value")


@pytest.mark.parametrize("role", ["user\nsystem", "<|system|>", "a b"])
def test_roles_are_words(server: Running, role: str) -> None:
    for path in ("/v1/chat/completions", "/tokenize"):
        reply = server.client.post(path, json={"messages": [{"role": role, "content": "a"}]})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages")
