import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizers
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, processors

from jaxserve.errors import ConfigError, RequestError
from jaxserve.sampling_params import SamplingParams
from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.loading import load_hf_tokenizer, load_tokenizer
from jaxserve.text.tokenizer import Tokenizer
from tests.random_runs import examples

CHAT_TEMPLATE = """{{ bos_token }}{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}
        {{- raise_exception('a system message must come first') }}
    {%- endif %}
<|{{ message['role'] }}|>{% if message.tool_calls is defined %}{{ message.tool_calls | tojson }}{% endif %}
{% generation %}{{ message.content }}{% endgeneration %}{{ eos_token }}
    {%- if loop.index > 3 %}{% break %}{% endif %}
{%- endfor %}
{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{%- if thinking is defined and thinking %}<think>{% endif %}
{%- if add_generation_prompt %}<|assistant|>
{% endif %}"""

SAMPLES = [
    "Once upon a time",
    " leading and trailing ",
    "naïve façade, 東京 😀",
    "a  b   c\n\td",
    "<s>special</s> text",
    "",
]
FAMILIES = {
    "byte_level": tiny_tokenizers.byte_level,
    "byte_fallback": tiny_tokenizers.byte_fallback,
    "byte_fallback_plain": lambda: tiny_tokenizers.byte_fallback(strip=False),
    "metaspace": tiny_tokenizers.metaspace,
}


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(tiny_tokenizers.write(tmp_path_factory.mktemp("family"), FAMILIES[request.param]()))


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(tiny_tokenizers.write(tmp_path_factory.mktemp("bytes"), tiny_tokenizers.byte_level()))


def incremental(tokenizer: Tokenizer, ids: list[int], **params: object) -> tuple[str, str | None]:
    """Return the final text and stop string, having checked that the visible text only grows."""
    detokenizer = Detokenizer(tokenizer, SamplingParams(**params))
    shown = ""
    for token_id in ids:
        detokenizer.push([token_id])
        assert detokenizer.text.startswith(shown)
        shown = detokenizer.text
    stop = detokenizer.finish()
    assert detokenizer.text.startswith(shown)
    return detokenizer.text, stop


# Loading


def saved_by_transformers(kind: str, directory: Path) -> Path:
    """Write a directory as `transformers` does."""
    import transformers

    if kind == "PreTrainedTokenizerFast":
        slow = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tiny_tokenizers.byte_level(), bos_token="<s>", eos_token="</s>", pad_token="[PAD]"
        )
        slow.add_tokens([AddedToken("<|im_start|>", special=True), "plainword"])
        slow.chat_template = CHAT_TEMPLATE
    elif kind == "LlamaTokenizer":
        model = json.loads(tiny_tokenizers.byte_fallback().to_str())["model"]
        merges = [tuple(m) for m in model["merges"]]
        slow = transformers.LlamaTokenizer(vocab=model["vocab"], merges=merges, add_bos_token=True)
    else:
        model = json.loads(tiny_tokenizers.byte_level().to_str())["model"]
        merges = [tuple(m) for m in model["merges"]]
        names = {"unk_token": "<s>", "bos_token": "<s>", "eos_token": "</s>"}
        slow = getattr(transformers, kind)(vocab=model["vocab"], merges=merges, **names)
    slow.save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    "kind", ["PreTrainedTokenizerFast", "LlamaTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer", "GPTNeoXTokenizer"]
)
def test_is_what_transformers_loads(kind: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    directory = saved_by_transformers(kind, tmp_path)
    ours, theirs = load_tokenizer(directory), AutoTokenizer.from_pretrained(directory)
    assert ours.vocab_size == len(theirs)
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.special_ids >= set(theirs.all_special_ids)
    for text in [*SAMPLES, "<|im_start|>plainword</s>"]:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    check_hugging_face_interface(load_hf_tokenizer(directory), theirs, ours)


def check_hugging_face_interface(hf: Any, theirs: Any, ours: Tokenizer) -> None:
    """`hf` does the same as AutoTokenizer's, defaults included, and gives the engine's ids."""
    import transformers

    assert isinstance(hf, transformers.PreTrainedTokenizerFast)
    assert len(hf) == len(theirs) == ours.vocab_size
    for name in (
        *("vocab_size", "all_special_ids", "all_special_tokens", "special_tokens_map", "chat_template", "is_fast"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "bos_token", "eos_token", "pad_token"),
    ):
        assert getattr(hf, name) == getattr(theirs, name), name
    assert hf.get_vocab() == theirs.get_vocab()
    for text in SAMPLES:
        ids = hf.encode(text)
        assert ids == theirs.encode(text) == ours.encode(text)
        assert hf(text).input_ids == ids
        assert hf.decode(ids) == theirs.decode(ids) == ours.decode(ids, skip_special_tokens=False)
        tokens = hf.convert_ids_to_tokens(ids)
        assert tokens == theirs.convert_ids_to_tokens(ids)
        assert hf.convert_tokens_to_ids(tokens) == ids
        assert hf.tokenize(text) == theirs.tokenize(text)
    batch = hf(SAMPLES)["input_ids"]
    assert hf.batch_decode(batch, skip_special_tokens=True) == [ours.decode(ids) for ids in batch]
    if hf.chat_template is not None:
        chat = [{"role": "user", "content": "Hi"}]
        assert hf.apply_chat_template(chat) == theirs.apply_chat_template(chat)
        assert hf.apply_chat_template(chat)["input_ids"] == ours.apply_chat_template(chat, False, tokenize=True)


def test_the_hugging_face_tokenizer_cuts_text_as_the_engine_does(tmp_path: Path) -> None:
    """AutoTokenizer takes the class from config.json, and that class would split text as Llama 2 does."""
    directory = tiny_tokenizers.write(tmp_path, tiny_tokenizers.byte_level(), bos_token="<s>", eos_token="</s>")
    (directory / "config.json").write_text('{"model_type": "llama"}')
    hf, ours = load_hf_tokenizer(directory), load_tokenizer(directory)
    for text in SAMPLES:
        assert hf.encode(text) == ours.encode(text)


def test_bos_comes_from_the_post_processor_not_the_configuration(tmp_path: Path) -> None:
    """Version 5 of transformers ignores add_bos_token beside a tokenizer.json; so does jaxserve."""
    from transformers import AutoTokenizer

    with_bos, without = tiny_tokenizers.byte_fallback(), tiny_tokenizers.byte_level()
    names = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    for name, backend, flag in (("a", with_bos, False), ("b", without, True)):
        directory = tiny_tokenizers.write(tmp_path / name, backend, add_bos_token=flag, **names)
        ids = load_tokenizer(directory).encode("Once")
        assert ids == AutoTokenizer.from_pretrained(directory).encode("Once")
        assert (ids[0] == backend.token_to_id("<s>")) == (not flag)


def test_special_tokens_of_the_configuration_are_added(tmp_path: Path) -> None:
    added = {
        "320": {"content": "<|a|>", "special": True, "normalized": False},
        "321": {"content": "word", "special": False, "lstrip": True},
    }
    tokenizer = load_tokenizer(
        tiny_tokenizers.write(
            tmp_path,
            tiny_tokenizers.byte_level(),
            added_tokens_decoder=added,
            eos_token={"content": "<|a|>", "__type": "AddedToken"},
            pad_token=None,
            image_token="<|img|>",
            additional_special_tokens=["<|b|>"],
        )
    )
    assert tokenizer.encode("<|a|>  word<|img|><|b|>") == [320, 321, 322, 323]
    assert tokenizer.eos_token_id == 320
    assert tokenizer.special_ids >= {320, 322, 323}
    assert 321 not in tokenizer.special_ids
    assert tokenizer.special_tokens == {"eos_token": "<|a|>", "image_token": "<|img|>"}


def test_special_tokens_map_is_the_older_place(tmp_path: Path) -> None:
    directory = tiny_tokenizers.write(tmp_path, tiny_tokenizers.byte_level())
    (directory / "special_tokens_map.json").write_text('{"bos_token": "<s>", "eos_token": {"content": "</s>"}}')
    tokenizer = load_tokenizer(directory)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)


def test_generation_config_adds_ends(tmp_path: Path) -> None:
    directory = tiny_tokenizers.write(tmp_path, tiny_tokenizers.byte_level(), eos_token="</s>")
    (directory / "config.json").write_text('{"eos_token_id": 9}')
    assert load_tokenizer(directory).eos_token_ids == (1, 9)
    (directory / "generation_config.json").write_text('{"eos_token_id": [7, 1, 8]}')
    assert load_tokenizer(directory).eos_token_ids == (1, 7, 8)
    assert load_tokenizer(directory).eos_token_id == 1


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    backend = tiny_tokenizers.byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    ids = load_tokenizer(tiny_tokenizers.write(tmp_path, backend)).encode("a much longer text than that")
    assert 2 < len(ids) < 50


def test_without_tokenizer_json_transformers_loads(tmp_path: Path) -> None:
    backend = json.loads(tiny_tokenizers.byte_level().to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(backend["vocab"] | {"<|endoftext|>": 320}))
    merges = "\n".join(" ".join(merge) for merge in backend["merges"])
    (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer", "chat_template": "hi"}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("naïve 東京")) == "naïve 東京"
    assert tokenizer.eos_token_id == 320
    assert tokenizer.apply_chat_template([{"role": "user", "content": ""}]) == "hi"
    assert incremental(tokenizer, tokenizer.encode("naïve 東京"))[0] == "naïve 東京"
    assert load_hf_tokenizer(tmp_path).encode("naïve 東京") == tokenizer.encode("naïve 東京")


def test_what_does_not_load_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must be a local directory or a \.gguf file, got 'no/such'"):
        load_tokenizer("no/such")
    with pytest.raises(ConfigError, match=r"looked for tokenizer.json, then .*vocab.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')  # transformers would make an empty one
    with pytest.raises(ConfigError, match="no tokenizer in"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "9.0"}')
    with pytest.raises(ConfigError, match=f"readable by tokenizers {tokenizers.__version__}"):
        load_tokenizer(tmp_path)
    tiny_tokenizers.write(tmp_path, tiny_tokenizers.byte_level())
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config.json must hold JSON"):
        load_tokenizer(tmp_path)


def test_loads_without_transformers_jax_and_torch(tmp_path: Path) -> None:
    directory = tiny_tokenizers.write(tmp_path, tiny_tokenizers.byte_level(), chat_template="{{ messages[0].content }}")
    program = (
        "import sys; from jaxserve.text.loading import load_tokenizer; t = load_tokenizer(sys.argv[1]);"
        "assert 'jinja2' not in sys.modules; t.apply_chat_template([{'role': 'user', 'content': 'x'}]);"
        "print(sorted({'jax', 'torch', 'transformers'} & sys.modules.keys()))"
    )
    shown = subprocess.run([sys.executable, "-c", program, str(directory)], check=True, capture_output=True, text=True)
    assert shown.stdout == "[]\n"


def test_invalid_unicode_is_refused(family: Tokenizer) -> None:
    with pytest.raises(RequestError, match="lone surrogate at index 2"):
        family.encode("ab\ud800")


# Chat templates


@pytest.mark.parametrize("variables", [{}, {"tools": [{"name": "f<é>"}]}, {"tools": None}, {"thinking": True}])
@pytest.mark.parametrize("generate", [True, False])
def test_template_renders_as_transformers_does(tmp_path: Path, variables: dict, generate: bool) -> None:
    from transformers import AutoTokenizer

    directory = saved_by_transformers("PreTrainedTokenizerFast", tmp_path)
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
        ("x", {"continue_final_message": True}, r"no variables \['continue_final_message'\]"),
    ],
)
def test_what_a_template_cannot_do_is_a_request_error(
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


def test_an_assistant_that_calls_tools_needs_no_content(tmp_path: Path) -> None:
    messages = [{"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}]
    assert chat("{{ messages[0].tool_calls[0].id }}", tmp_path, messages) == "a"


# Truncation


@pytest.mark.parametrize("with_special", [True, False])
def test_truncation_is_that_of_transformers(tmp_path: Path, with_special: bool) -> None:
    tokenizer = tiny_tokenizers.byte_fallback()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    directory = tiny_tokenizers.write(tmp_path, tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    ours, theirs = load_tokenizer(directory), load_hf_tokenizer(directory)
    theirs.truncation_side = "left"
    for text in SAMPLES:
        for length in range(3, 30):
            ids = ours.encode(text, with_special, max_tokens=length)
            assert ids == theirs.encode(text, add_special_tokens=with_special, truncation=True, max_length=length)
            assert len(ids) == min(length, len(ours.encode(text, with_special)))
    assert ours.encode("many words", max_tokens=1) == [2], "no room for text: the last ones"


# Detokenizer


@settings(max_examples=examples(300))
@given(ids=st.lists(st.integers(0, 325), max_size=40), skip=st.booleans())
def test_byte_level_increments_are_the_decoded_text(byte_level: Tokenizer, ids: list[int], skip: bool) -> None:
    """Random tokens are mostly not UTF-8; ids from 320 on are outside the vocabulary."""
    assert incremental(byte_level, ids, skip_special_tokens=skip)[0] == byte_level.decode(ids, skip)


@settings(max_examples=examples(200))
@given(text=st.text(max_size=60), skip=st.booleans())
def test_increments_of_any_family_are_the_decoded_text(family: Tokenizer, text: str, skip: bool) -> None:
    ids = family.encode(text)
    assert incremental(family, ids, skip_special_tokens=skip)[0] == family.decode(ids, skip)


@settings(max_examples=examples(100))
@given(ids=st.lists(st.integers(0, 400), max_size=40))
def test_any_tokens_of_any_family_give_growing_text(family: Tokenizer, ids: list[int]) -> None:
    incremental(family, ids)


@settings(max_examples=examples(200))
@given(prompt=st.text("ab é", max_size=6), text=st.text("ab é東", max_size=20))
def test_text_goes_on_where_the_prompt_ends(family: Tokenizer, prompt: str, text: str) -> None:
    whole = family.encode(prompt + " " + text)
    for split in range(len(whole) + 1):
        detokenizer = Detokenizer(family, SamplingParams(), whole[:split])
        detokenizer.push(whole[split:])
        detokenizer.finish()
        before = family.decode(whole[:split])
        if not before.endswith("\N{REPLACEMENT CHARACTER}"):  # else the prompt ends within a character
            assert before + detokenizer.text == family.decode(whole)


def test_wrong_bytes_of_byte_fallback_do_not_take_right_ones_along(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny_tokenizers.write(tmp_path, tiny_tokenizers.byte_fallback()))
    euro_and_wrong = [3 + byte for byte in (*"€".encode(), 0xFF, *"é".encode())]
    assert incremental(tokenizer, euro_and_wrong)[0] == "€\N{REPLACEMENT CHARACTER}é"


def test_incomplete_characters_are_held_back(byte_level: Tokenizer) -> None:
    alphabet = tokenizers.pre_tokenizers.ByteLevel
    detokenizer = Detokenizer(byte_level, SamplingParams())
    backend = tiny_tokenizers.byte_level()
    texts = []
    for byte in "a😀é".encode():
        token = next(c for c in alphabet.alphabet() if byte_level.byte_table[backend.token_to_id(c)] == bytes([byte]))
        detokenizer.push([backend.token_to_id(token)])
        texts.append(detokenizer.text)
    assert texts == ["a", "a", "a", "a", "a😀", "a😀", "a😀é"]


def first_stop(text: str, stops: list[str]) -> tuple[int, int, str] | None:
    """Return the stop string by definition: the first to be complete, the longest of several."""
    for end in range(len(text) + 1):
        if hits := [s for s in stops if text[:end].endswith(s)]:
            longest = max(hits, key=len)
            return end - len(longest), end, longest
    return None


@settings(max_examples=examples(400))
@given(
    data=st.data(),
    stops=st.lists(st.text("ab \N{REPLACEMENT CHARACTER}", min_size=1, max_size=4), min_size=1, max_size=3),
    keep=st.booleans(),
)
def test_stop_strings_end_the_text_wherever_tokens_cut_them(
    byte_level: Tokenizer, data: st.DataObject, stops: list[str], keep: bool
) -> None:
    wanted = [*byte_level.encode("ab", False), *byte_level.encode("a b", False), *byte_level.encode(" é", False)]
    ids = data.draw(st.lists(st.sampled_from(wanted), max_size=20))
    whole = byte_level.decode(ids)
    text, stop = incremental(byte_level, ids, stop=stops, include_stop_str_in_output=keep)
    hit = first_stop(whole, stops)
    if hit is None:
        assert (text, stop) == (whole, None)
    else:
        start, end, expected = hit
        assert (text, stop) == (whole[: end if keep else start], expected)
    at_once = Detokenizer(byte_level, SamplingParams(stop=stops, include_stop_str_in_output=keep))
    at_once.push(ids)
    at_once.finish()
    assert at_once.text == text


def test_no_part_of_a_stop_string_is_ever_shown(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level, SamplingParams(stop=["stop!"]))
    shown = []
    for token_id in byte_level.encode("a stopped st") + byte_level.encode("op! b"):
        if detokenizer.push([token_id]) is not None:
            break
        shown.append(detokenizer.text)
    assert not any(text.endswith(("s", "st", "sto", "stop")) for text in shown)
    assert detokenizer.text == "a stopped "
    assert detokenizer.push(byte_level.encode("more")) == "stop!"
    assert detokenizer.text == "a stopped "


def test_stop_strings_count_only_after_min_tokens(byte_level: Tokenizer) -> None:
    ids = [i for c in "xbxbxb" for i in byte_level.encode(c)]
    assert len(ids) == 6
    for min_tokens, expected in ((0, "x"), (1, "x"), (2, "xbx"), (3, "xbx"), (5, "xbxbx"), (6, "xbxbxb")):
        text, stop = incremental(byte_level, ids, stop="b", min_tokens=min_tokens)
        assert text == expected
        assert (stop is None) == (min_tokens == 6)


def test_without_detokenize_there_is_no_text(byte_level: Tokenizer) -> None:
    assert incremental(byte_level, [5, 6], detokenize=False) == ("", None)
    detokenizer = Detokenizer(None, SamplingParams())
    assert detokenizer.push([5]) is None
    assert detokenizer.finish() is None
    assert detokenizer.text == ""
