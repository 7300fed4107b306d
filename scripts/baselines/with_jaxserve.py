"""jaxserve with default options."""

import importlib.metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from jaxserve import LLM, SamplingParams


class Engine:
    note = "continuous batching"
    num_warm_up = None

    def __init__(self, checkpoint: Path, cache_dir: Path, **options: Any) -> None:
        del cache_dir  # it reads the checkpoint without conversion
        options = {"dtype": "float32", "compile_ahead": "all", "skip_tokenizer_init": True, **options}
        self.versions = {"jaxserve": importlib.metadata.version("jaxserve"), "jax": jax.__version__}
        self._llm = LLM(str(checkpoint), **options)

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> list[list[int]]:
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in output_lens]
        return [output.outputs[0].token_ids for output in self._llm.generate(prompts, params, use_tqdm=False)]

    def describe(self, prompt: str, pixels: NDArray[np.uint8], num_tokens: int) -> str:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        given = {"prompt": prompt, "multi_modal_data": {"image": pixels}}
        return self._llm.generate(given, params, use_tqdm=False)[0].outputs[0].text
