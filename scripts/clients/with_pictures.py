"""Pictures from openai, anthropic, litellm and langchain, as their guides send them: all count the same tokens."""

import base64
import struct
import zlib
from functools import partial
from typing import Any

import anthropic
import litellm
import openai
from checks import Target, check, refusal, run
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI

QUESTION = "What is this?"


def png(side: int) -> bytes:
    """Return a picture: a colour gradient."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    rows = b"".join(b"\0" + bytes(value for x in range(side) for value in (x, y, x ^ y)) for y in range(side))
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    parts = (chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


PICTURE = base64.b64encode(png(48)).decode()
URL = f"data:image/png;base64,{PICTURE}"
CHAT: list[Any] = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": QUESTION},
            {"type": "image_url", "image_url": {"url": URL, "detail": "high"}},
        ],
    }
]


def client(target: Target) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{target.url}/v1", api_key="none", max_retries=0)


def asked(target: Target) -> tuple[str, int]:
    """Return the answer of a chat by openai, and the number of prompt tokens."""
    reply = client(target).chat.completions.create(model=target.model, messages=CHAT, max_tokens=8, temperature=0)
    return reply.choices[0].message.content or "", reply.usage.prompt_tokens


@check
def openai_chats(target: Target) -> None:
    text, num_tokens = asked(target)
    assert num_tokens > 25
    options = {"model": target.model, "messages": CHAT, "max_tokens": 8, "temperature": 0}
    chunks = client(target).chat.completions.create(**options, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


@check
def openai_responses(target: Target) -> None:
    content = [
        {"type": "input_text", "text": QUESTION},
        {"type": "input_image", "image_url": URL, "detail": "high"},
    ]
    reply = client(target).responses.create(
        model=target.model, input=[{"role": "user", "content": content}], max_output_tokens=8, temperature=0
    )
    assert (reply.output_text, reply.usage.input_tokens) == asked(target)


@check
def openai_errors(target: Target) -> None:
    broken = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}}]}]
    error = refusal(
        partial(client(target).chat.completions.create, model=target.model, messages=broken), openai.BadRequestError
    )
    assert error.param == "messages"


@check
def anthropic_messages(target: Target) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": PICTURE}
    content = [{"type": "text", "text": QUESTION}, {"type": "image", "source": source}]
    messages: Any = [{"role": "user", "content": content}]
    there = anthropic.Anthropic(base_url=target.url, api_key="none", max_retries=0)
    greedy = {"temperature": 0}
    reply = there.messages.create(model=target.model, messages=messages, max_tokens=8, extra_body=greedy)
    usage = reply.usage
    assert (reply.content[0].text, usage.input_tokens + usage.cache_read_input_tokens) == asked(target)
    assert there.messages.count_tokens(model=target.model, messages=messages).input_tokens == asked(target)[1]


@check
def litellm_by_all_interfaces(target: Target) -> None:
    for provider, base in (("openai", "/v1"), ("hosted_vllm", "/v1"), ("anthropic", "")):
        there = {"model": f"{provider}/{target.model}", "api_base": f"{target.url}{base}", "api_key": "none"}
        reply = litellm.completion(**there, messages=CHAT, max_tokens=8, temperature=0, max_retries=0)
        assert (reply.choices[0].message.content, reply.usage.prompt_tokens) == asked(target), provider


@check
def langchain_parts(target: Target) -> None:
    blocks = [
        {"type": "image_url", "image_url": {"url": URL}},
        {"type": "image", "source_type": "base64", "mime_type": "image/png", "data": PICTURE},
        {"type": "image", "base64": PICTURE, "mime_type": "image/png"},
    ]
    for use_responses_api in (False, True):
        model = ChatOpenAI(
            model=target.model,
            base_url=f"{target.url}/v1",
            api_key="none",
            max_retries=0,
            max_tokens=8,
            temperature=0,
            use_responses_api=use_responses_api,
        )
        for block in blocks:
            message = model.invoke([HumanMessage([{"type": "text", "text": QUESTION}, block])])
            assert (message.text, message.usage_metadata["input_tokens"]) == asked(target), block


run("openai")
