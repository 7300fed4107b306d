"""CTranslate2: fixed batches with similar output lengths, from a model converted once."""

import os
from itertools import takewhile
from pathlib import Path
from typing import Any

import ctranslate2
import transformers
from ctranslate2.converters import TransformersConverter
from tokenizers import Tokenizer, models

from baselines.fixed_batches import generate_in_batches


class Engine:
    num_warm_up = 4

    def __init__(self, checkpoint: Path, cache_dir: Path, batch_size: int = 16, **options: Any) -> None:
        self.note = f"batches of {batch_size} sorted by output length, static_prompt where all share a prefix"
        self.versions = {"ctranslate2": ctranslate2.__version__}
        options = {"compute_type": "float32", "intra_threads": os.cpu_count(), **options}
        self._generator = ctranslate2.Generator(str(_convert(checkpoint, cache_dir / "ctranslate2")), **options)
        self._batch_size = batch_size

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> list[list[int]]:
        shared = _num_shared(prompts)
        prefix = list(map(str, prompts[0][:shared])) or None

        def generate_batch(batch: list[list[int]], num_tokens: int) -> list[list[int]]:
            tokens = [list(map(str, prompt[shared:])) for prompt in batch]
            # The minimum and maximum output lengths are equal, so the end of sequence is never taken.
            results = self._generator.generate_batch(
                tokens,
                static_prompt=prefix,
                min_length=num_tokens,
                max_length=num_tokens,
                include_prompt_in_result=False,
            )
            return [result.sequences_ids[0] for result in results]

        return generate_in_batches(generate_batch, prompts, output_lens, self._batch_size)


def _num_shared(prompts: list[list[int]]) -> int:
    """Return the length of the prompts' common prefix, leaving at least one token to each; 0 for a single prompt."""
    columns = zip(*(prompt[:-1] for prompt in prompts), strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns)) if len(prompts) > 1 else 0


class _IdConverter(TransformersConverter):
    """Converts a checkpoint without a tokenizer: token i is written as "i"."""

    def load_tokenizer(self, tokenizer_class: type, model_name_or_path: str, **kwargs: Any) -> Any:
        config = transformers.AutoConfig.from_pretrained(model_name_or_path)
        vocabulary = {str(i): i for i in range(config.vocab_size)}
        return transformers.PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="0")),
            unk_token="0",
            bos_token=str(config.bos_token_id),
            eos_token=str(config.eos_token_id),
        )


def _convert(checkpoint: Path, directory: Path) -> Path:
    """Return the checkpoint in CTranslate2's float32 format."""
    if not (directory / "model.bin").exists():
        _IdConverter(str(checkpoint)).convert(str(directory), force=True)
    return directory
