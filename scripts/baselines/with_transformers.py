"""transformers: `generate` on fixed batches with similar output lengths, padded on the left."""

from pathlib import Path
from typing import Any

import torch
import transformers

from baselines.fixed_batches import generate_in_batches


class Engine:
    num_warm_up = 4

    def __init__(self, checkpoint: Path, cache_dir: Path, batch_size: int = 64, **options: Any) -> None:
        del cache_dir
        self.note = f"generate, batches of {batch_size} sorted by output length, sdpa"
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        options = {"dtype": torch.float32, "attn_implementation": "sdpa", **options}
        self._model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, **options).eval()
        self._model.generation_config = transformers.GenerationConfig(pad_token_id=0, do_sample=False)
        self._batch_size = batch_size

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> list[list[int]]:
        return generate_in_batches(self._generate_batch, prompts, output_lens, self._batch_size)

    def _generate_batch(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        outputs = self._model.generate(ids, attention_mask=mask, max_new_tokens=num_tokens)
        return outputs[:, width:].tolist()
