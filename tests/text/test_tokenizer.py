"""Tokenizers load and encode as those of transformers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizers
import tokenizers
from tokenizers import processors

from jaxserve.errors import ConfigError, RequestError
from jaxserve.text.loading import load_hf_tokenizer, load_tokenizer
from jaxserve.text.tokenizer import Tokenizer
from tests.text.test_detokenizer import incremental

SAMPLES = [
    "Once upon a time",
    " leading and trailing ",
    "naïve façade, 東京 😀",
    "a  b   c\n\td",
    "<s>special</s> text",
    "",
]


@pytest.mark.parametrize(
    "kind", ["PreTrainedTokenizerFast", "LlamaTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer", "GPTNeoXTokenizer"]
)
def test_encoding_equals_transformers(kind: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    directory = tiny_tokenizers.saved_by_transformers(kind, tmp_path)
    ours, theirs = load_tokenizer(directory), AutoTokenizer.from_pretrained(directory)
    assert ours.vocab_size == len(theirs)
    assert next(iter(ours.eos_token_ids), None) == theirs.eos_token_id
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


def test_loaded_hf_tokenizer_encodes_like_the_engine(tmp_path: Path) -> None:
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
    assert tokenizer.eos_token_ids[0] == 320
    assert tokenizer.special_ids >= {320, 322, 323}
    assert 321 not in tokenizer.special_ids
    assert tokenizer.special_tokens == {"eos_token": "<|a|>", "image_token": "<|img|>"}


def test_special_tokens_map_of_older_checkpoints_is_read(tmp_path: Path) -> None:
    directory = tiny_tokenizers.write(tmp_path, tiny_tokenizers.byte_level())
    (directory / "special_tokens_map.json").write_text('{"bos_token": "<s>", "eos_token": {"content": "</s>"}}')
    tokenizer = load_tokenizer(directory)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids[0]) == (0, 1)


def test_generation_config_adds_eos_ids(tmp_path: Path) -> None:
    directory = tiny_tokenizers.write(tmp_path, tiny_tokenizers.byte_level(), eos_token="</s>")
    (directory / "config.json").write_text('{"eos_token_id": 9}')
    assert load_tokenizer(directory).eos_token_ids == (1, 9)
    (directory / "generation_config.json").write_text('{"eos_token_id": [7, 1, 8]}')
    assert load_tokenizer(directory).eos_token_ids == (1, 7, 8)
    assert load_tokenizer(directory).eos_token_ids[0] == 1


def test_stored_truncation_and_padding_are_disabled(tmp_path: Path) -> None:
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
    assert tokenizer.eos_token_ids[0] == 320
    assert tokenizer.apply_chat_template([{"role": "user", "content": ""}]) == "hi"
    assert incremental(tokenizer, tokenizer.encode("naïve 東京"))[0] == "naïve 東京"
    assert load_hf_tokenizer(tmp_path).encode("naïve 東京") == tokenizer.encode("naïve 東京")


def test_missing_tokenizer_error_names_the_expected_files(tmp_path: Path) -> None:
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


ABSURD = {
    "tokenizer.json": ["[" * 100_000, '{"model": ' * 5000, "[]", "{}"],
    "tokenizer_config.json": [
        "[" * 100_000,
        '{"added_tokens_decoder": [1]}',
        '{"added_tokens_decoder": {"x": {}}}',
        '{"added_tokens_decoder": {"3": 5}}',
        '{"additional_special_tokens": 3}',
        '{"extra_special_tokens": [3]}',
        '{"chat_template": 5}',
        '{"chat_template": [1]}',
    ],
    "special_tokens_map.json": ["[" * 100_000, "[]"],
    "chat_template.json": ['{"chat_template": 3}'],
    "generation_config.json": [
        "[" * 100_000,
        '{"eos_token_id": {"a": 1}}',
        '{"eos_token_id": [[1]]}',
        '{"eos_token_id": 1e400}',
    ],
}


@pytest.mark.parametrize(("name", "content"), [(name, text) for name, texts in ABSURD.items() for text in texts])
def test_malformed_files_are_refused_in_one_line(tmp_path: Path, name: str, content: str) -> None:
    tiny_tokenizers.write(tmp_path, tiny_tokenizers.byte_level())
    (tmp_path / name).write_text(content)
    if name == "special_tokens_map.json":
        (tmp_path / "tokenizer_config.json").unlink(missing_ok=True)
    with pytest.raises(ConfigError, match="must") as info:
        load_tokenizer(tmp_path)
    assert "\n" not in str(info.value)


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


# Truncation


def test_long_texts_and_pairs_are_encoded_like_short_ones(tmp_path: Path) -> None:
    backend = tiny_tokenizers.byte_fallback()
    tokenizer = load_tokenizer(tiny_tokenizers.write(tmp_path, backend))
    for first, second in (("a b", "c"), ("a b" * 4096, "c" * 5000)):
        assert tokenizer.encode(first) == backend.encode(first).ids
        assert tokenizer.encode_pair(first, second) == backend.encode(first, second).ids


@pytest.mark.parametrize("with_special", [True, False])
@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation_equals_transformers(tmp_path: Path, with_special: bool, side: str) -> None:
    tokenizer = tiny_tokenizers.byte_fallback()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    directory = tiny_tokenizers.write(tmp_path, tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    ours, theirs = load_tokenizer(directory), load_hf_tokenizer(directory)
    theirs.truncation_side = side
    for text in SAMPLES:
        for length in range(3, 30):
            ids = ours.encode(text, with_special, max_tokens=length, keeps_first=side == "right")
            assert ids == theirs.encode(text, add_special_tokens=with_special, truncation=True, max_length=length)
            assert len(ids) == min(length, len(ours.encode(text, with_special)))
    assert ours.encode("many words", max_tokens=1) == [2], "no room for text: the last ones"
    assert ours.encode("many words", max_tokens=1, keeps_first=True) == [1]


def test_transformers_does_not_advise_to_install_torch(tmp_path: Path) -> None:
    """Its other warnings are shown."""
    directory = tiny_tokenizers.saved_by_transformers("PreTrainedTokenizerFast", tmp_path)
    program = (
        "import logging, sys; sys.modules['torch'] = None\n"
        "from jaxserve.text.loading import load_hf_tokenizer\n"
        "load_hf_tokenizer(sys.argv[1])\n"
        "logging.getLogger('transformers').warning('PyTorch was not found by us')\n"
        "from transformers.utils import is_torch_available; assert not is_torch_available()"
    )
    shown = subprocess.run([sys.executable, "-c", program, str(directory)], check=True, capture_output=True, text=True)
    assert shown.stderr.splitlines() == ["[transformers] PyTorch was not found by us"]
