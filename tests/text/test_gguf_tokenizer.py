"""Tokenizers of GGUF files give the ids of those that were converted; files are the gguf package's."""

import contextlib
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unicodedata import normalize

import gguf
import pytest
import tiny_tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from jaxserve.errors import ConfigError
from jaxserve.text.loading import load_hf_tokenizer, load_tokenizer

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)"
)
SPLITS = {
    "llama-bpe": rf"{WORDS}|\s+",
    "qwen2": rf"{WORDS.replace('{1,3}', '')}|\s+",
    "tekken": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "dbrx": rf"{WORDS}|\s+",
    "gpt-4o": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "deepseek-r1-qwen": rf"{WORDS.replace('{1,3}', '')}|\s+",
}
WHOLE = ("llama-bpe", "tekken")  # models whose words need no merges that make them
SPECIAL = ["<｜begin▁of▁sentence｜>", "<|im_end|>", "<｜User｜>", "<|endoftext|>"]
TEXTS = [
    "Once upon a time thereWas andNOT, it WASN'T  12345 engines,\r\n\n\tnaïve façades, 東京 and 😀  1",
    "cafe\u0301 \u00a0\u3000½ ２３ عربي हिन्दी 한국어",
    "unreachable <｜User｜>hi<|im_end|><think> so</think> ",
    " leading and trailing  ",
    "",
]


@functools.cache
def merged_across_words() -> dict[str, Any]:
    """Return vocabulary and merges that do not stop at words, so that each way to split gives other ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([normalize("NFC", text) for text in TEXTS], trainer)
    model: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    return model


def byte_level(pre: str) -> Tokenizer:
    """Return a tokenizer as the models of a pre-tokenizer have it in tokenizer.json."""
    model = merged_across_words()
    vocab = dict(model["vocab"])
    vocab["unreachable"] = len(vocab)  # Llama 3 has such words, which merges do not make
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in WHOLE))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
    if pre in SPLITS:
        steps.append(pre_tokenizers.Split(Regex(SPLITS[pre]), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in SPLITS))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if "qwen" in pre or pre == "olmo":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = tiny_tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in ("<think>", "</think>")])
    return tokenizer


def beginning_with(tokenizer: Tokenizer, first: str) -> Tokenizer:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A", special_tokens=[(first, tokenizer.token_to_id(first))]
    )
    return tokenizer


def write(path: Path, tokenizer: Tokenizer, model: str, padding: int = 7, **metadata: Any) -> Path:
    """Write a file of a tokenizer alone, with tokens that pad the vocabulary to that of the model."""
    added, ids = tokenizer.get_added_tokens_decoder(), tokenizer.get_vocab()
    tokens = sorted(ids, key=ids.__getitem__)
    kinds = [kind_of(token, added.get(i)) for i, token in enumerate(tokens)]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens + [f"[PAD{len(tokens) + i}]" for i in range(padding)])
    writer.add_token_types(kinds + [gguf.TokenType.UNUSED] * padding)
    for name, value in metadata.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def kind_of(token: str, added: AddedToken | None) -> gguf.TokenType:
    if added is None:
        return gguf.TokenType.BYTE if token.startswith("<0x") else gguf.TokenType.NORMAL
    if token == "<unk>":
        return gguf.TokenType.UNKNOWN
    return gguf.TokenType.CONTROL if added.special else gguf.TokenType.USER_DEFINED


def merges_of(tokenizer: Tokenizer) -> list[str]:
    return [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]


def check_equal(path: Path, original: Tokenizer, texts: Sequence[str] = TEXTS) -> None:
    ours, theirs = load_tokenizer(path), load_hf_tokenizer(path)
    assert ours.vocab_size == original.get_vocab_size()
    assert ours.special_ids == {i for i, token in original.get_added_tokens_decoder().items() if token.special}
    for text in texts:
        ids = original.encode(text).ids
        assert list(ours.encode(text)) == theirs(text).input_ids == ids
        assert ours.decode(ids) == original.decode(ids)


@pytest.mark.parametrize("pre", [*SPLITS, "smollm", "gpt-2", "olmo"])
def test_byte_level(tmp_path: Path, pre: str) -> None:
    """Splits, normalisation, words that no merges make, and special tokens of any characters are the original's."""
    original = beginning_with(byte_level(pre), SPECIAL[0])
    ids = [original.token_to_id(token) for token in SPECIAL]
    path = write(
        tmp_path / "model.gguf",
        original,
        "gpt2",
        tokenizer_pre=pre,
        token_merges=merges_of(original),
        bos_token_id=ids[0],
        eos_token_id=ids[1],
        add_bos_token=True,
    )
    check_equal(path, original)
    tokenizer = load_tokenizer(path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (ids[0], (ids[1], ids[3]))
    assert tokenizer.special_tokens == {"bos_token": SPECIAL[0], "eos_token": SPECIAL[1]}
    same = {pre, "gpt-2" if pre == "olmo" else pre}
    others = [byte_level(other) for other in {*SPLITS, "smollm", "gpt-2"} - same if "qwen" not in other]
    for other in others:  # the texts tell all ways to split apart
        assert any(other.encode(text).ids != original.encode(text, add_special_tokens=False).ids for text in TEXTS)


@pytest.mark.parametrize(("pre", "begins"), [("llama-bpe", True), ("qwen2", False)])
def test_bos_default_per_pre_tokenizer(tmp_path: Path, pre: str, begins: bool) -> None:
    """Where the file does not say whether a text begins with a token, it does as llama.cpp has it for its models."""
    original = byte_level(pre)
    ids = {"bos_token_id": original.token_to_id(SPECIAL[0])}
    path = write(tmp_path / "a.gguf", original, "gpt2", tokenizer_pre=pre, token_merges=merges_of(original), **ids)
    check_equal(path, beginning_with(original, SPECIAL[0]) if begins else original)


@pytest.mark.parametrize("strip", [True, False])
def test_sentencepiece(tmp_path: Path, strip: bool) -> None:
    """Merges follow from scores; unknown characters become bytes, and a text gets a space before it or not."""
    original = tiny_tokenizers.byte_fallback(strip=strip)
    merged = [merge.replace(" ", "") for merge in merges_of(original)]
    ids = original.get_vocab()
    scores = [-1000.0] * (len(ids) + 7)
    for rank, token in enumerate(merged):
        scores[ids[token]] = -float(rank)
    path = write(
        tmp_path / "model.gguf",
        original,
        "llama",
        token_scores=scores,
        bos_token_id=1,
        eos_token_id=2,
        unk_token_id=0,
        add_space_prefix=strip,
    )
    check_equal(path, original, [text for text in TEXTS if text] + ["  a out tin<s>a b</s> c"])


def test_gemma(tmp_path: Path) -> None:
    """Runs of spaces and newlines are tokens as they are, before any merge; turns end at `<end_of_turn>`."""
    original = tiny_tokenizers.byte_fallback(strip=False)
    merged = [merge.replace(" ", "") for merge in merges_of(original)]
    original.add_special_tokens([AddedToken("<end_of_turn>", special=True, normalized=False)])
    original.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("  ", "   ", "\n\n")])
    original = beginning_with(original, "<s>")
    ids = original.get_vocab()
    scores = [-1000.0] * (len(ids) + 7)
    for rank, token in enumerate(merged):
        scores[ids[token]] = -float(rank)
    path = write(
        tmp_path / "model.gguf",
        original,
        "llama",
        token_scores=scores,
        bos_token_id=1,
        eos_token_id=2,
        add_bos_token=True,
        add_space_prefix=False,
    )
    check_equal(path, original, [*TEXTS, "a   b  c\n\n\nd<end_of_turn> out  tin"])
    assert load_tokenizer(path).eos_token_ids == (2, ids["<end_of_turn>"])


def test_chat_templates(tmp_path: Path) -> None:
    original = byte_level("gpt-2")
    templates = [{"name": "default", "template": "{{ 1 }}"}, {"name": "tool_use", "template": "{{ 2 }}"}]
    merges = merges_of(original)
    path = write(
        tmp_path / "a.gguf", original, "gpt2", tokenizer_pre="gpt-2", token_merges=merges, chat_template=templates
    )
    assert load_tokenizer(path).chat_template == {"default": "{{ 1 }}", "tool_use": "{{ 2 }}"}


def test_unknown_tokenizers_are_refused(tmp_path: Path) -> None:
    """Another split would give other ids silently, so the name of one that is not known is an error."""
    original = byte_level("gpt-2")
    merges = merges_of(original)
    path = write(tmp_path / "a.gguf", original, "gpt2", tokenizer_pre="mysterious", token_merges=merges)
    with pytest.raises(ConfigError, match=r"ggml\.pre must be one of llama3, .*, got 'mysterious'; pass a directory"):
        load_tokenizer(path)
    path = write(tmp_path / "b.gguf", original, "bert")
    with pytest.raises(ConfigError, match=r"ggml\.model must be one of gpt2, llama, got 'bert'"):
        load_tokenizer(path)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    original = byte_level("gpt-2")
    path = write(tmp_path / "a.gguf", original, "gpt2", tokenizer_pre="gpt-2", token_merges=merges_of(original))
    whole = path.read_bytes()
    for size in (0, 3, 20, 40, 200, len(whole) // 2, len(whole) - 40):
        path.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match="must have a tokenizer of a known kind"):
            load_tokenizer(path)
    for offset in range(4, 400, 3):
        path.write_bytes(whole[:offset] + b"\xff\xff\xff" + whole[offset + 3 :])
        with contextlib.suppress(ConfigError):
            load_tokenizer(path)
