"""Tokens that two tokenizers have in common are tokens of the same text."""

import json
from pathlib import Path

import numpy as np
import pytest
import tiny_tokenizers
import tokenizers

from jaxserve.text.common_tokens import NONE, common_tokens
from jaxserve.text.loading import load_tokenizer
from jaxserve.text.tokenizer import Tokenizer

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def load(directory: Path, backend: tokenizers.Tokenizer) -> Tokenizer:
    return load_tokenizer(tiny_tokenizers.write(directory, backend, **SPECIAL))


def test_permuted_vocabulary_has_every_token_in_common(tmp_path: Path) -> None:
    own = tiny_tokenizers.byte_level()
    state = json.loads(own.to_str())
    vocab = state["model"]["vocab"]
    order = [0, 1, *(2 + np.random.default_rng(0).permutation(len(vocab) - 2)).tolist()]
    state["model"]["vocab"] = {token: order[token_id] for token, token_id in vocab.items()}
    other = tokenizers.Tokenizer.from_str(json.dumps(state))
    found = common_tokens(load(tmp_path / "own", own), load(tmp_path / "other", other))
    assert found.outputs == found.inputs == order
    assert found.num_common == len(vocab)


BACKENDS = {
    "byte level": tiny_tokenizers.byte_level,
    "byte fallback": tiny_tokenizers.byte_fallback,
    "Gemma": lambda: tiny_tokenizers.byte_fallback(strip=False),
    "metaspace": tiny_tokenizers.metaspace,
}


@pytest.mark.parametrize("draft", BACKENDS)
@pytest.mark.parametrize("model", BACKENDS)
def test_common_tokens_have_the_same_text(tmp_path: Path, model: str, draft: str) -> None:
    own, other = load(tmp_path / "own", BACKENDS[model]()), load(tmp_path / "other", BACKENDS[draft]())
    found = common_tokens(own, other)
    assert len(found.outputs) == len(found.inputs) == own.vocab_size
    pairs = [(token_id, same) for token_id, same in enumerate(found.outputs) if same != NONE]
    assert len(pairs) == found.num_common >= 20
    assert len({same for _, same in pairs}) == len(pairs), "a token of the draft stands for one token"
    # In front of them stands the same letter, as some decoders remove a space at the start of a text.
    firsts = [tokenizer.encode("a", add_special_tokens=False)[-1] for tokenizer in (own, other)]
    for token_id, same in pairs:
        texts = [own.decode([firsts[0], token_id]), other.decode([firsts[1], same])]
        assert "\N{REPLACEMENT CHARACTER}" in texts[0] + texts[1] or texts[0] == texts[1]
    assert all(0 <= token_id < other.vocab_size for token_id in found.inputs)
    assert found.outputs[own.vocabulary()["</s>"]] == other.vocabulary()["</s>"]
