"""Special tokens in messages are text, those of the chat template special tokens, and all else is as without."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_tokenizers
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, pre_tokenizers

from jaxserve.api.chat_options import ChatOptions
from jaxserve.errors import ConfigError, RequestError
from jaxserve.text import loading
from jaxserve.text.loading import load_tokenizer
from jaxserve.text.tokenizer import Tokenizer
from tests.random_runs import examples
from tests.text import test_gguf_tokenizer

SPECIAL = ("<|im_start|>", "<|im_end|>", "[INST]", "PAD")
PLAIN = ("<think>", "</think>", "\n\n")
LITERAL = ChatOptions(special_tokens_as_text=True)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text | trim }}{% endfor %}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{{ tools | tojson if tools else '' }}{{ mood }}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def with_added(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in PLAIN])
    return tokenizer


def first_prefixed() -> tokenizers.Tokenizer:
    tokenizer = tiny_tokenizers.byte_fallback(strip=False)
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return tokenizer


BACKENDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte level": tiny_tokenizers.byte_level,
    "SentencePiece with a prefix": tiny_tokenizers.byte_fallback,
    "SentencePiece": lambda: tiny_tokenizers.byte_fallback(strip=False),
    "prefix of the first piece": first_prefixed,
}


def in_gguf(path: Path) -> Path:
    backend = with_added(test_gguf_tokenizer.byte_level("llama-bpe"))
    merges = test_gguf_tokenizer.merges_of(backend)
    file = path / "model.gguf"
    return test_gguf_tokenizer.write(file, backend, "gpt2", tokenizer_pre="llama-bpe", token_merges=merges)


@pytest.fixture(scope="module", params=[*BACKENDS, "GGUF"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    if request.param == "GGUF":
        files = in_gguf(directory)
    else:
        files = tiny_tokenizers.write(directory, with_added(BACKENDS[request.param]()))
    return load_tokenizer(files, dataclasses.replace(LITERAL, template=TEMPLATE))


def special(tokenizer: Tokenizer, ids: Any) -> list[str]:
    return [tokenizer.token_text(i) for i in ids if i in tokenizer.special_ids and tokenizer.token_text(i) != "<unk>"]


PIECES = st.sampled_from([*SPECIAL, *PLAIN, "<s>", "</s>", "<|im_", "end|>", "<", "a", " b", "\n", "\U000f0000"])
TEXTS = st.lists(PIECES, max_size=6).map("".join)
CONTENTS = TEXTS | st.lists(TEXTS.map(lambda text: {"type": "text", "text": text}), max_size=3)
TURNS = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), CONTENTS), min_size=1, max_size=4)


@given(turns=TURNS, mood=TEXTS, name=TEXTS)
@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_only_the_template_writes_special_tokens(tokenizer: Tokenizer, turns: Any, mood: str, name: str) -> None:
    messages: list[Any] = [{"role": role, "content": content} for role, content in turns]
    messages[-1]["tool_calls"] = [{"type": "function", "function": {"name": name, "arguments": {mood: [name]}}}]
    chat = tokenizer.render_chat(messages, {"mood": mood, "tools": [{"description": name}]})
    ids = tokenizer.encode_chat(chat)
    assert special(tokenizer, ids) == [*SPECIAL[:2] * len(turns), SPECIAL[0]]
    # Between the special tokens of the template, the text has the ids that it has by itself without special tokens.
    backend = tokenizers.Tokenizer.from_str(tokenizer.json_text() if tokenizer.json_text else "")
    if "first" in repr(backend.pre_tokenizer) or "PAD" in chat.text:  # pieces begin as texts do; a vocabulary has it
        return
    backend.encode_special_tokens = True
    expected: list[int] = []
    end = 0
    for piece in re.split(r"(<\|im_start\|>|<\|im_end\|>)", chat.marked):
        text, end = chat.text[end : end + len(piece)], end + len(piece)
        is_delimiter = piece in SPECIAL[:2]
        expected += [backend.token_to_id(piece)] if is_delimiter else backend.encode(text, add_special_tokens=False).ids
    assert ids == expected


HARMLESS = ["a <think> b </think>", "x < y\n\n", "  東京 [x] ", "if a<b: pass"]


@given(turns=st.lists(st.sampled_from(HARMLESS), min_size=1))
@settings(max_examples=examples(12), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_messages_without_special_tokens_are_encoded_as_usual(tokenizer: Tokenizer, turns: list[str]) -> None:
    chat = tokenizer.render_chat([{"role": "user", "content": turn} for turn in turns], {})
    for adds_special in (False, True):
        assert tokenizer.encode_chat(chat, adds_special) == tokenizer.encode(chat.text, adds_special)


def test_by_default_special_tokens_in_messages_are_special(tmp_path: Path) -> None:
    files = tiny_tokenizers.write(tmp_path, with_added(tiny_tokenizers.byte_level()), chat_template=TEMPLATE)
    ids = load_tokenizer(files).apply_chat_template([{"role": "user", "content": "a<|im_end|>"}], tokenize=True)
    assert special(load_tokenizer(files), ids) == ["<|im_start|>", "<|im_end|>", "<|im_end|>", "<|im_start|>"]


QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if '</think>' in m.content %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
)


def test_templates_may_search_for_ordinary_strings(tokenizer: Tokenizer) -> None:
    messages = [{"role": "assistant", "content": "<think>so</think>x<|im_end|>"}]
    chat = tokenizer.render_chat(messages, {}, QWEN)
    assert chat.text == "<|im_start|>assistant\nx<|im_end|><|im_end|>"
    assert special(tokenizer, tokenizer.encode_chat(chat)) == ["<|im_start|>", "<|im_end|>"]


def test_chats_whose_template_searches_for_special_tokens_are_refused(tokenizer: Tokenizer) -> None:
    source = "{{ messages[0].content.split('<|im_end|>')[0] }}"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a < b"}], chat_template=source) == "a < b"
    with pytest.raises(RequestError, match="special tokens in messages must be text"):
        tokenizer.render_chat([{"role": "user", "content": "a<|im_end|>b"}], {}, source)


def test_a_continued_message_may_end_in_special_tokens(tokenizer: Tokenizer) -> None:
    messages = [{"role": "assistant", "content": "a<|im_end|>"}]
    chat = tokenizer.render_chat(messages, {}, continue_final_message=True)
    assert chat.text == "<|im_start|>assistant\na<|im_end|>"
    assert special(tokenizer, tokenizer.encode_chat(chat)) == ["<|im_start|>"]


def test_literal_special_tokens_need_a_tokenizer_json(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"special_tokens_as_text needs a tokenizer.json"):
        loading._from_transformers(SimpleNamespace(special_tokens_map={}), {}, tmp_path, LITERAL)  # type: ignore[arg-type]
