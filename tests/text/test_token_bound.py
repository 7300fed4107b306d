"""The bound on the number of tokens, against the tokenizers themselves."""

import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from jaxserve.text.token_bound import TokenBound

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level(*, normalizer: object = None, added: AddedToken | None = None) -> tokenizers.Tokenizer:
    """Return a byte-level tokenizer with some long tokens."""
    words = ["\u0120\u0120", "\u0120\u0120\u0120\u0120", "aa", "aaaa", "\u00c3\u00a9"]
    pairs = [("\u0120", "\u0120"), ("\u0120\u0120", "\u0120\u0120"), ("a", "a"), ("aa", "aa"), ("\u00c3", "\u00a9")]
    backend = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate([*ALPHABET, *words])}, pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if normalizer is not None:
        backend.normalizer = normalizer
    if added is not None:
        backend.add_special_tokens([added])
    return backend


def sentencepiece() -> tokenizers.Tokenizer:
    """Return a tokenizer of Llama 2's kind."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    vocab |= {token: len(vocab) + i for i, token in enumerate(["\u2581", "\u2581\u2581", "a", "aa"])}
    pairs = [("\u2581", "\u2581"), ("a", "a")]
    backend = tokenizers.Tokenizer(models.BPE(vocab, pairs, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    return backend


BACKENDS = {
    "byte level": byte_level(),
    "composing": byte_level(normalizer=normalizers.NFC()),
    "stripping": byte_level(added=AddedToken("<end>", rstrip=True, lstrip=True)),
    "fallback": sentencepiece(),
}
BOUNDS = {name: TokenBound.from_backend(backend) for name, backend in BACKENDS.items()}
PIECES = st.sampled_from(
    ["a" * 9, " " * 30, "e\u0301", "\u1fa7", "\u1112\u1161\u11ab", "<end>", "\n\t", "\U0001f600", "x"]
)


def test_common_tokenizers_have_a_token_bound() -> None:
    assert {name: bound.max_chars is not None for name, bound in BOUNDS.items()} == dict.fromkeys(BACKENDS, True)
    assert BOUNDS["byte level"].num_tokens("x" * 1000) == 250
    assert BOUNDS["stripping"].drops_spaces


@settings(deadline=None)
@given(st.sampled_from(sorted(BACKENDS)), st.lists(PIECES | st.text(max_size=5), max_size=30))
def test_no_text_has_fewer_tokens_than_the_bound(name: str, pieces: list[str]) -> None:
    text = "".join(pieces).encode(errors="ignore").decode()
    assert BOUNDS[name].num_tokens(text) <= len(BACKENDS[name].encode(text, add_special_tokens=False).ids)


def test_tokenizers_that_may_drop_text_have_no_bound() -> None:
    unknown = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    unknown.pre_tokenizer = pre_tokenizers.Whitespace()
    stripped = byte_level(normalizer=normalizers.Strip())
    replaced = byte_level(normalizer=normalizers.Replace(tokenizers.Regex("a+"), "a"))
    split = byte_level()
    split.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split("x", "removed"), pre_tokenizers.ByteLevel()])
    for backend in (unknown, stripped, replaced, split):
        assert TokenBound.from_backend(backend) == TokenBound()
        assert TokenBound.from_backend(backend).num_tokens("a" * 100) == 0
