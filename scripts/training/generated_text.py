"""Text written by a model itself, for training its draft heads."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from jaxserve import LLM
from training.bpe_tokenizer import END_ID

_PROMPT_LEN, _NEW_TOKENS = 64, 192
_ROWS = 64  # simultaneous requests


def continuations(
    model: Path, documents: Sequence[NDArray[np.int32]], count: int, seed: int
) -> list[NDArray[np.int32]]:
    """Continue from random document positions: every second time greedily, otherwise with the checkpoint's recommended
    sampling.
    """
    rng = np.random.default_rng((seed, 4))
    stream = np.concatenate(documents)
    starts = rng.integers(0, len(stream) - _PROMPT_LEN, count)
    prompts = [[END_ID, *stream[start : start + _PROMPT_LEN - 1].tolist()] for start in starts]
    with LLM(str(model), seed=seed, max_num_seqs=_ROWS, max_model_len=_PROMPT_LEN + _NEW_TOKENS) as llm:
        usual = replace(llm.get_default_sampling_params(), max_tokens=_NEW_TOKENS, ignore_eos=True)
        params = [replace(usual, temperature=0 if n % 2 else usual.temperature, seed=n) for n in range(count)]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    return [
        np.array([*prompt, *output.outputs[0].token_ids], np.int32)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
