"""Prompts of chats through every interface: contents as the template reads them, prefills, templates of requests."""

from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizers
from fake_engine import FakeEngine

from jaxserve.api.sampling_params import SamplingParams
from jaxserve.errors import RequestError
from jaxserve.openai.context import BodyContext
from jaxserve.openai.format import CHAT, COMPLETIONS, EMBEDDINGS, ParsedRequest, parse_body
from jaxserve.openai.interfaces import INTERFACES
from jaxserve.openai.messages import COUNT_TOKENS, MESSAGES
from jaxserve.openai.pooling import parse_pooling
from jaxserve.openai.responses import RESPONSES
from jaxserve.text.loading import load_tokenizer
from jaxserve.text.tokenizer import Tokenizer
from tests.openai.batches import chat, run

TEMPLATES = {
    "parts": "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}{{ p.text | trim }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}",
    "strings": "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}",
}
BETWEEN = {"parts": "", "strings": "\n"}


@pytest.fixture(scope="module", params=TEMPLATES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def tokenizer(name: str, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    return load_tokenizer(tiny_tokenizers.write(directory, tiny_tokenizers.byte_level(), chat_template=TEMPLATES[name]))


def parts(*texts: str, kind: str = "text") -> list[dict[str, Any]]:
    return [{"type": kind, "text": text} for text in texts]


def read(url: str, body: dict[str, Any], tokenizer: Tokenizer, **options: Any) -> ParsedRequest:
    return INTERFACES[url].read(
        body, lambda path, given: parse_body(path, given, BodyContext("m", (), tokenizer, SamplingParams(), **options))
    )


def prompt(url: str, body: dict[str, Any], tokenizer: Tokenizer, **options: Any) -> str:
    (ids,) = read(url, body, tokenizer, **options).prompts
    assert not isinstance(ids, str)
    return tokenizer.decode(ids)


def test_parts_through_every_interface(tokenizer: Tokenizer, name: str, tmp_path: Path) -> None:
    between = BETWEEN[name]
    said = f"[system]be{between}kind[user]Kim:{between}hello[assistant]so[user]go[assistant]"
    turns = [
        {"role": "user", "content": parts("Kim:", "hello")},
        {"role": "assistant", "content": parts("so")},
        {"role": "user", "content": "go"},
    ]
    messages = [{"role": "system", "content": parts("be", "kind")}, *turns]
    assert prompt(CHAT, {"messages": messages}, tokenizer) == said
    body = {"messages": turns, "system": parts("be", "kind"), "max_tokens": 3}
    assert prompt(MESSAGES, body, tokenizer) == said
    assert prompt(COUNT_TOKENS, {"messages": turns, "system": parts("be", "kind")}, tokenizer) == said
    items = [
        {"role": "developer", "content": parts("be", "kind", kind="input_text")},
        {"role": "user", "content": parts("Kim:", "hello", kind="input_text")},
        {"role": "assistant", "content": parts("so", kind="output_text")},
        {"role": "user", "content": "go"},
    ]
    assert prompt(RESPONSES, {"input": items}, tokenizer) == said
    usage = run(FakeEngine(tokenizer), tmp_path, [chat("a", messages=messages)])["batch_req_1"]["response"]["body"]
    assert usage["usage"]["prompt_tokens"] == len(tokenizer.encode(said))
    pooled = parse_pooling(EMBEDDINGS, {"messages": messages}, BodyContext("m", (), tokenizer=tokenizer))
    assert pooled.prompts == [tokenizer.encode(said.removesuffix("[assistant]"))]


def test_turns_and_instructions_of_several_items(tokenizer: Tokenizer, name: str) -> None:
    between = BETWEEN[name]
    items = [{"role": "system", "content": parts("be", "kind")}, {"role": "user", "content": "a"}]
    assert prompt(RESPONSES, {"input": items, "instructions": "I"}, tokenizer).startswith("[system]I\n\nbe\nkind[user]")
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": parts("b")}]
    assert prompt(MESSAGES, {"messages": messages, "max_tokens": 3}, tokenizer) == f"[user]a{between}b[assistant]"


@pytest.mark.parametrize("content", ["It was", parts("It was")])
def test_prefill(tokenizer: Tokenizer, content: Any) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]
    said = "[user]a[assistant]It was"
    assert prompt(MESSAGES, {"messages": messages, "max_tokens": 3}, tokenizer) == said
    assert prompt(COUNT_TOKENS, {"messages": messages}, tokenizer) == said
    continued = {"messages": messages, "continue_final_message": True}
    assert prompt(CHAT, continued, tokenizer) == said
    assert parse_pooling(EMBEDDINGS, continued, BodyContext("m", (), tokenizer=tokenizer)).prompts == [
        tokenizer.encode(said)
    ]
    called = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    messages[-1]["content"] = [called]
    with pytest.raises(RequestError, match="a last message of the assistant must have text"):
        prompt(MESSAGES, {"messages": messages, "max_tokens": 3}, tokenizer)


def test_instructions_between_turns(tmp_path: Path) -> None:
    """They stay there if the template takes them, and go to the beginning if it wants them there, as with vLLM."""
    turns = [("user", "a"), ("system", "b"), ("assistant", "c"), ("system", "d"), ("user", "e")]
    messages = [{"role": role, "content": content} for role, content in turns]
    items = {"input": [message | {"role": message["role"].replace("system", "developer")} for message in messages]}
    strict = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('must be first') }}"
        "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    for template, said in (
        (strict, "[system]b\n\nd[user]a[assistant]c[user]e"),
        (TEMPLATES["strings"], "[user]a[system]b[assistant]c[system]d[user]e[assistant]"),
    ):
        files = tiny_tokenizers.write(tmp_path, tiny_tokenizers.byte_level(), chat_template=template)
        tokenizer = load_tokenizer(files)
        assert prompt(MESSAGES, {"messages": messages, "max_tokens": 3}, tokenizer) == said
        assert prompt(COUNT_TOKENS, {"messages": messages}, tokenizer) == said
        assert prompt(RESPONSES, items, tokenizer) == said
    with pytest.raises(RequestError, match="must be first"):  # a chat says itself where its messages are
        prompt(
            CHAT,
            {"messages": messages},
            load_tokenizer(tiny_tokenizers.write(tmp_path, tiny_tokenizers.byte_level(), chat_template=strict)),
        )


def test_refusals_of_the_assistant(tokenizer: Tokenizer) -> None:
    for answer in ({"content": [{"type": "refusal", "refusal": "no"}]}, {"content": None, "refusal": "no"}):
        messages = [{"role": "assistant", **answer}, {"role": "user", "content": "a"}]
        assert prompt(CHAT, {"messages": messages}, tokenizer) == "[assistant]no[user]a[assistant]"


def test_template_of_a_request(tokenizer: Tokenizer) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "chat_template": "{{ messages[0].content }}!{{ x }}"}
    assert prompt(CHAT, body | {"chat_template_kwargs": {"x": 1}}, tokenizer) == "a!1"
    with pytest.raises(RequestError, match=r"not trusted here; .* --trust-request-chat-template"):
        prompt(CHAT, body, tokenizer, takes_templates=False)
    with pytest.raises(RequestError, match="must be valid Jinja"):
        prompt(CHAT, body | {"chat_template": "{% if %}"}, tokenizer)


@pytest.mark.parametrize(
    ("fields", "role", "echoed"),
    [
        ({"echo": True}, "narrator", ""),
        ({"echo": False, "continue_final_message": True}, "assistant", ""),
        ({"echo": True, "continue_final_message": True}, "assistant", "It\nwas"),
        ({"echo": True, "add_generation_prompt": False}, "assistant", "It\nwas"),
        ({"echo": True, "messages": [{"role": "narrator", "content": "so"}]}, "narrator", "so"),
    ],
)
def test_role_and_echo(tokenizer: Tokenizer, fields: dict[str, Any], role: str, echoed: str) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": parts("It", "was")}]
    request = read(CHAT, {"messages": messages} | fields, tokenizer, response_role="narrator")
    assert (request.role, request.echoed, request.echo) == (role, echoed, False)
    assert request.params.prompt_logprobs == (0 if fields["echo"] else None)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": [], "input": "a"}, "got both"),
        ({"input": "a", "add_generation_prompt": True}, "add_generation_prompt needs messages"),
        ({"messages": 5}, "messages must be a list"),
        ({"input": "a", "add_special_tokens": 1}, "add_special_tokens must be a bool"),
    ],
)
def test_wrong_bodies_of_vectors(tokenizer: Tokenizer, body: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        parse_pooling(EMBEDDINGS, body, BodyContext("m", (), tokenizer=tokenizer))


def test_vectors_without_special_tokens(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny_tokenizers.write(tmp_path, tiny_tokenizers.byte_fallback()))
    body = {"input": ["a", "b c"], "add_special_tokens": False}
    prompts = parse_pooling(EMBEDDINGS, body, BodyContext("m", (), tokenizer=tokenizer)).prompts
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in ("a", "b c")]
    assert prompts == encoded
    assert parse_pooling(EMBEDDINGS, body | {"add_special_tokens": True}, BodyContext("m", ())).prompts == ["a", "b c"]
    texts = {"prompt": [*body["input"]], "add_special_tokens": False}
    assert read(COMPLETIONS, texts, tokenizer).prompts == encoded
    assert read(COMPLETIONS, texts | {"prompt": [5, 6]}, tokenizer).prompts == [[5, 6]]
