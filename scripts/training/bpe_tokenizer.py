"""The embedded checkpoint's tokenizer: byte-level BPE, fitted to Python's indentation."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

END = "<|endoftext|>"  # begins every document, and so ends the previous one
END_ID = 0
# A chat as comments in a module; the model has learnt to continue them, not to answer.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}# {{ m.role }}: {{ m.content | replace('\\n', '\\n# ') }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant:{% endif %}"
)

# Splits text like GPT-4, except that a line break includes the following indentation; so may punctuation before it.
_WORDS = r"[^\s\p{L}\p{N}]?\p{L}+| \p{L}+|\p{N}{1,3}"
_PRE_TOKEN = _WORDS + r"| ?[^\s\p{L}\p{N}]+(?:\n *)*|\s*\n *|\s+(?!\S)|\s+"
_CHARS_PER_CUT = 256


def train(documents: Sequence[str], vocab_size: int) -> Tokenizer:
    """Fit the merges to `documents`; `encode` with the result begins every text with <|endoftext|>."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_PRE_TOKEN), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", pair=f"{END} $A $B", special_tokens=[(END, END_ID)]
    )
    return tokenizer


def encode(tokenizer: Tokenizer, documents: Sequence[str], seed: int) -> list[NDArray[np.int32]]:
    """Return token ids for each document, <|endoftext|> first, for training.

    A few times per page the text is cut anywhere and the pieces are encoded separately: prompts end in the middle of a
    token ("def " or "):"), and the model must learn to continue from there.
    """
    rng = np.random.default_rng((seed, 3))
    encoded = []
    for text in documents:
        cuts = np.sort(rng.integers(0, len(text) + 1, size=len(text) // _CHARS_PER_CUT))
        bounds = [0, *cuts.tolist(), len(text)]
        pieces = [text[a:b] for a, b in pairwise(bounds)]
        ids = [e.ids for e in tokenizer.encode_batch(pieces, add_special_tokens=False)]
        encoded.append(np.concatenate([[END_ID], *ids]).astype(np.int32))
    return encoded


def save(tokenizer: Tokenizer, directory: Path, max_len: int) -> None:
    """Write tokenizer.json, and tokenizer_config.json for transformers."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "model_max_length": max_len,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
