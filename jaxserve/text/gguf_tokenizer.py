"""Tokenizers built from GGUF metadata. Imports neither gguf nor transformers.

A file has the vocabulary, token types, merges or scores, and the name of a pre-tokenizer, which determines how text is
split before tokens are merged; `convert_hf_to_gguf.py` gives each tokenizer family a name. Unknown names are refused,
since a wrong split would silently give other ids.
"""

import mmap
import struct
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

_PREFIX = "tokenizer."
_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}

# Files name one end-of-sequence token; the models' generation_config.json lists these too, and llama.cpp stops at them.
_ENDS = (
    *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<｜end▁of▁sentence｜>"),
    *("<end_of_turn>", "<|end|>"),
)


class _TokenType(IntEnum):
    """Type of a token in `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class _Split(NamedTuple):
    """Way in which a tokenizer family splits text before tokens are merged.

    Attributes:
        pattern: regular expression for the pieces; None for GPT-2's.
        digits: True if each digit is split off first.
        nfc: True if text is normalised first.
        whole: True if a piece that is a token is never built from merges.
        bos: True if a BOS is added when the file does not specify it.
    """

    pattern: str | None = None
    digits: bool = False
    nfc: bool = False
    whole: bool = False
    bos: bool = False


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(numbers: str) -> str:
    """Return Llama 3's regular expression for pieces, with another expression for numbers."""
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_END}"


_LLAMA3 = _Split(_words(r"\p{N}{1,3}"))
_QWEN2 = _Split(_words(r"\p{N}"))
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (  # words end before a capital too
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_END}"
)
_GPT4O = (  # contractions belong to the words before them
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_END}"
)
_SPLITS: Mapping[str, _Split] = {
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0"), _LLAMA3._replace(whole=True, bos=True)
    ),
    **dict.fromkeys(("smaug-bpe", "dbrx"), _LLAMA3),
    "gpt-4o": _Split(_GPT4O),
    "olmo": _Split(nfc=True),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2._replace(nfc=True)),
    "megrez": _QWEN2,
    "tekken": _Split(_TEKKEN, whole=True, bos=True),
    **dict.fromkeys(("gpt-2", "trillion", "a.x-4.0", "mellum"), _Split()),
    **dict.fromkeys(("smollm", "starcoder", "minerva-7b"), _Split(digits=True)),
}


def load(path: Path) -> tuple[Tokenizer, dict[str, Any], list[int]]:
    """Load the tokenizer in a GGUF file; return it, the equivalent of tokenizer_config.json, and end-of-sequence ids.

    The config has special tokens and chat templates. The ids include control tokens that end a sequence although the
    file does not name them.

    Raises:
        ValueError: the file is damaged, or its tokenizer is unknown; also LookupError, TypeError, and errors from
            struct and the tokenizers library.
    """
    metadata = _metadata(path)
    ggml = {key.removeprefix("ggml."): value for key, value in metadata.items() if key.startswith("ggml.")}
    model = str(ggml.get("model"))
    if model not in _MODELS:
        raise ValueError(f"tokenizer.ggml.model must be one of {', '.join(_MODELS)}, got {model!r}")
    tokens: Sequence[str] = ggml["tokens"]
    kinds = ggml.get("token_type") or [_TokenType.NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise ValueError(f"tokenizer.ggml.token_type must have {len(tokens)} elements, got {len(kinds)}")
    named = {name: ggml[key] for name, key in _SPECIAL.items() if key in ggml}
    config: dict[str, Any] = {name: tokens[token_id] for name, token_id in named.items()}
    used = [i for i, kind in enumerate(kinds) if kind != _TokenType.UNUSED or i in named.values()]
    vocab = {tokens[i]: i for i in used}
    backend, adds_bos = _MODELS[model](ggml, vocab, kinds)
    control = [tokens[i] for i, kind in enumerate(kinds) if kind in (_TokenType.UNKNOWN, _TokenType.CONTROL)]
    special = dict.fromkeys([*config.values(), *control])
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    own = [tokens[i] for i, kind in enumerate(kinds) if kind == _TokenType.USER_DEFINED and tokens[i] not in special]
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in own])
    first = [config["bos_token"]] if ggml.get("add_bos_token", adds_bos) and "bos_token" in config else []
    last = [config["eos_token"]] if ggml.get("add_eos_token") and "eos_token" in config else []
    if first or last:
        backend.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last], special_tokens=[(token, vocab[token]) for token in {*first, *last}]
        )
    parts = {key: key.partition(".") for key in metadata}
    templates = {name or "default": metadata[key] for key, (base, _, name) in parts.items() if base == "chat_template"}
    if templates:
        config["chat_template"] = templates
    ends = [vocab[token] for token in control if token in _ENDS]
    return backend, config, [*ends, *(ggml[key] for key in ("eot_token_id", "eom_token_id") if key in ggml)]


def _byte_level(ggml: Mapping[str, Any], vocab: dict[str, int], kinds: Sequence[int]) -> tuple[Tokenizer, bool]:
    """Return a byte-level BPE tokenizer, and whether texts begin with a BOS if the file does not specify it.

    Args:
        ggml: metadata of the tokenizer.
        vocab: ids by token.
        kinds: type of each id.
    """
    name = str(ggml.get("pre"))
    if name not in _SPLITS:
        raise ValueError(f"tokenizer.ggml.pre must be one of {', '.join(_SPLITS)}, got {name!r}")
    split = _SPLITS[name]
    merges = [_pair(merge) for merge in ggml["merges"]]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=split.whole))
    if split.nfc:
        backend.normalizer = normalizers.NFC()
    before: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.digits else []
    if split.pattern is not None:
        before.append(pre_tokenizers.Split(Regex(split.pattern), "isolated"))
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*before, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend, split.bos


def _pair(merge: str) -> tuple[str, str]:
    """Return the two tokens of a merge, which a space separates in the file."""
    left, separator, right = merge.partition(" ")
    if not separator or " " in right:
        raise ValueError(f"merges must be of two tokens, got {merge!r}")
    return left, right


def _sentencepiece(ggml: Mapping[str, Any], vocab: dict[str, int], kinds: Sequence[int]) -> tuple[Tokenizer, bool]:
    """Return a SentencePiece BPE tokenizer, and True: texts begin with a BOS if the file does not specify it.

    Args:
        ggml: metadata of the tokenizer.
        vocab: ids by token.
        kinds: type of each id.
    """
    unknown = next((token for token, i in vocab.items() if kinds[i] == _TokenType.UNKNOWN), None)
    merges = _merges({token: i for token, i in vocab.items() if kinds[i] == _TokenType.NORMAL}, ggml["scores"])
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    has_prefix = bool(ggml.get("add_space_prefix", True))
    prefix: list[Any] = [normalizers.Prepend("▁")] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
    return backend, True


def _merges(vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return the pairs of tokens in `vocab` that merge into another one, by the merged token's score, best first.

    Pairs for the same token are ordered by their lengths, as in transformers' `tokenizer.json`.
    """
    pairs = [
        (scores[i], cut, len(token) - cut, token)
        for token, i in vocab.items()
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    pairs.sort(key=lambda pair: pair[:3], reverse=True)
    return [(token[:cut], token[cut:]) for _, cut, _, token in pairs]


_MODELS: Mapping[str, Callable[..., tuple[Tokenizer, bool]]] = {"gpt2": _byte_level, "llama": _sentencepiece}


# The container: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def _metadata(path: Path) -> dict[str, Any]:
    """Return a GGUF file's metadata whose keys begin with "tokenizer.", by the rest of the key."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        reader = _Reader(data)
        magic, version = data[:4], reader.scalar("I", 4)
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"it must begin with GGUF and the version 2 or 3, got {magic!r} and {version}")
        reader.scalar("Q")  # number of tensors
        found, names = {}, set[str]()
        for _ in range(reader.scalar("Q")):
            name = reader.string()
            if name in names:
                raise ValueError(f"each key must be there once, got {name!r} again")
            names.add(name)
            value = reader.value(reader.scalar("I"))
            if name.startswith(_PREFIX):
                found[name.removeprefix(_PREFIX)] = value
    return found


class _Reader:
    """Sequential reader of the values in a GGUF file's metadata."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._offset = data, 0

    def scalar(self, code: str, offset: int | None = None) -> Any:
        """Read a number with this `struct` code, at the current or another offset in bytes."""
        return self._scalars(code, 1, offset)[0]

    def string(self) -> str:
        """Read a string after its length."""
        size = self.scalar("Q")
        start, self._offset = self._offset, self._offset + size
        if self._offset > len(self._data):
            raise ValueError(f"a string of {size} bytes is longer than the file")
        return self._data[start : self._offset].decode("utf-8")

    def value(self, kind: int) -> Any:
        """Read a scalar, string or array with this GGUF type number."""
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind in _SCALARS:
            return self._scalars(_SCALARS[kind], count)
        if kind != _STRING:
            raise ValueError(f"arrays must be of scalars or strings, got the type {kind}")
        if count > len(self._data):
            raise ValueError(f"an array of {count} elements is longer than the file")
        return [self.string() for _ in range(count)]

    def _scalars(self, code: str, count: int, offset: int | None = None) -> tuple[Any, ...]:
        """Read `count` numbers with this `struct` code, at the current or another offset in bytes."""
        start = self._offset if offset is None else offset
        size = struct.calcsize(code) * count
        if start + size > len(self._data):
            raise ValueError(f"{count} values are longer than the file")
        self._offset = start + size
        return struct.unpack_from(f"<{count}{code}", self._data, start)
