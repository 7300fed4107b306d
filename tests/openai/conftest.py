"""A fake engine with a tokenizer that has a chat template."""

from pathlib import Path

import pytest
import tiny_tokenizers
from fake_engine import FakeEngine

from jaxserve.text.loading import load_tokenizer
from jaxserve.text.tokenizer import Tokenizer
from tests.openai.batches import CHAT_TEMPLATE


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    return tiny_tokenizers.write(directory, tiny_tokenizers.byte_level(), chat_template=CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir: Path) -> Tokenizer:
    return load_tokenizer(tokenizer_dir)


@pytest.fixture
def engine(tokenizer: Tokenizer) -> FakeEngine:
    return FakeEngine(tokenizer)
