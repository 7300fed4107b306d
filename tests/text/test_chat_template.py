"""Chat templates render as those of transformers, and what they cannot do is an error of the request."""

from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizers

from jaxserve.api.chat_options import ChatOptions
from jaxserve.api.config import EngineConfig
from jaxserve.errors import ConfigError, RequestError
from jaxserve.text.loading import load_tokenizer


@pytest.mark.parametrize("variables", [{}, {"tools": [{"name": "f<é>"}]}, {"tools": None}, {"thinking": True}])
@pytest.mark.parametrize("generate", [True, False])
def test_template_renders_as_transformers_does(tmp_path: Path, variables: dict, generate: bool) -> None:
    from transformers import AutoTokenizer

    directory = tiny_tokenizers.saved_by_transformers("PreTrainedTokenizerFast", tmp_path)
    assert (directory / "chat_template.jinja").is_file()
    messages = [
        {"role": "system", "content": "Be <brief> & 'kind'."},
        {"role": "user", "content": "Hi", "name": None},
        {"role": "assistant", "content": "", "tool_calls": [{"x": "é"}]},
    ]
    ours, theirs = load_tokenizer(directory), AutoTokenizer.from_pretrained(directory)
    options = {"add_generation_prompt": generate} | variables
    text = ours.apply_chat_template(messages, tokenize=False, **options)
    assert text == theirs.apply_chat_template(messages, tokenize=False, **options)
    assert ours.apply_chat_template(messages, **options) == text
    ids = theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    assert ours.apply_chat_template(messages, tokenize=True, **options) == ids


def chat(template: object, tmp_path: Path, messages: Any = None, **variables: object) -> str:
    directory = tiny_tokenizers.write(tmp_path, tiny_tokenizers.byte_level(), chat_template=template, bos_token="<s>")
    return load_tokenizer(directory).apply_chat_template(messages or [{"role": "user", "content": "Hi"}], **variables)


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools {{ tools | length }}"}]
    assert chat(named, tmp_path) == "plain"
    assert chat(named, tmp_path, tools=[{}, {}]) == "tools 2"
    assert chat(named, tmp_path, chat_template="tool_use", tools=[{}]) == "tools 1"
    assert chat(named, tmp_path, chat_template="{{ bos_token }}{{ strftime_now('%%') }}") == "<s>%"


def test_text_parts_are_joined(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert chat("{{ messages[0].content }}", tmp_path, [{"role": "user", "content": parts}]) == "one\ntwo"


@pytest.mark.parametrize(
    ("template", "variables", "message"),
    [
        (None, {}, "this tokenizer has none"),
        ("{% if %}", {}, "must be valid Jinja"),
        ("{{ raise_exception('no') }}", {}, "refused the messages: no"),
        ("{{ messages[0].content + 1 }}", {}, "refused the messages"),
        ("{{ messages.append(1) }}", {}, "refused the messages"),
        ("{{ ''.__class__.__mro__ }}", {}, "refused the messages"),
        ("x", {"thinking": True}, r"no variables \['thinking'\]"),
        ("x", {"tools": [{}]}, r"no variables \['tools'\]"),
        ("x", {"continue_final_message": True}, "needs add_generation_prompt to be False"),
        ("x", {"continue_final_message": True, "add_generation_prompt": False}, "writes the last message as it is"),
    ],
)
def test_template_failures_are_request_errors(
    tmp_path: Path, template: str | None, variables: dict, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        chat(template, tmp_path, **variables)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "user", "content": 5}], "content must be a string or a list of text parts, got 5"),
        ([{"role": "user", "content": [{}]}], "content parts must be"),
        ([{"role": "user"}], "must have content, .* got {'role': 'user'}"),
        ([{"role": "user", "content": None}], "must have content"),
        ([{"role": "assistant", "name": "a"}], "must have content"),
        ([{"content": "Hi"}], "must have a role"),
        ([{"role": 3, "content": "Hi"}], "must have a role"),
        ([{"role": "user\nsystem", "content": "Hi"}], r"must be a word .* got 'user\\nsystem'"),
        ([{"role": "<|system|>", "content": "Hi"}], "must be a word"),
        ([{"role": "", "content": "Hi"}], "must be a word"),
        ([{"role": "user", "name": "a\nsystem", "content": "Hi"}], "must have no line breaks"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "unsupported type 'image_url'"),
        ([{"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}], "must be of the assistant"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "content parts must be"),
        ([5], r"must be a non-empty list of dicts with role and content, got \[5\]"),
        (5, "must be a non-empty list of dicts"),
        ("Hi", "must be a non-empty list of dicts"),
        ({"role": "user", "content": "Hi"}, "must be a non-empty list of dicts"),
    ],
)
@pytest.mark.usefixtures("no_type_checks")
def test_malformed_messages_are_refused(tmp_path: Path, messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        chat("x", tmp_path, messages)


def test_default_chat_template_is_checked_at_startup(tmp_path: Path) -> None:
    directory = tiny_tokenizers.write(tmp_path, tiny_tokenizers.byte_level(), chat_template="its own")
    file = tmp_path / "other.jinja"
    file.write_text("of a file")
    for given, text in ((None, "its own"), (str(file), "of a file"), (file, "of a file"), ("{{ 1 }}", "1")):
        options = EngineConfig(chat_template=given).chat_options
        assert load_tokenizer(directory, options).apply_chat_template([{"role": "user", "content": "a"}]) == text
    for wrong in ("no.jinja", str(tmp_path), 5):
        with pytest.raises(ConfigError, match="chat_template must be a"):
            EngineConfig(chat_template=wrong)
    with pytest.raises(ConfigError, match="chat_template_content_format must be one of"):
        EngineConfig(chat_template_content_format="text")
    with pytest.raises(ConfigError, match="must be valid Jinja"):
        load_tokenizer(directory, ChatOptions("{% if %}"))


def test_an_assistant_that_calls_tools_needs_no_content(tmp_path: Path) -> None:
    messages = [{"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}]
    assert chat("{{ messages[0].tool_calls[0].id }}", tmp_path, messages) == "a"
