"""Tokenizers of every family."""

import pytest
import tiny_tokenizers

from jaxserve.text.loading import load_tokenizer
from jaxserve.text.tokenizer import Tokenizer

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
