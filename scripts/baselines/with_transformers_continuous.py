"""transformers' continuous batching, each request with its own output length."""

from pathlib import Path
from typing import Any

import torch
import transformers

_CACHE_BLOCKS, _BATCH_TOKENS = 192, 2048  # blocks of 256 tokens; by default it takes nearly all free memory
_NEVER = -1  # no token has this id: nothing ends a sequence early


class Engine:
    note = "continuous batching manager, sdpa"
    num_warm_up = 4

    def __init__(self, checkpoint: Path, cache_dir: Path, **options: Any) -> None:
        del cache_dir
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        options = {"dtype": torch.float32, "attn_implementation": "sdpa", **options}
        self._model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, **options).eval()
        self._batching = transformers.ContinuousBatchingConfig(num_blocks=_CACHE_BLOCKS, max_batch_tokens=_BATCH_TOKENS)
        self._config = transformers.GenerationConfig(pad_token_id=0, eos_token_id=_NEVER, do_sample=False)

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> list[list[int]]:
        outputs: dict[str, list[int]] = {}
        with self._model.continuous_batching_context_manager(
            self._config, continuous_batching_config=self._batching, persistent_manager=True
        ) as manager:
            ids = [
                manager.add_request(prompt, max_new_tokens=n, eos_token_id=_NEVER)
                for prompt, n in zip(prompts, output_lens, strict=True)
            ]
            while len(outputs) < len(ids):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    outputs[result.request_id] = result.generated_tokens
                elif result is None and not manager.is_running():
                    raise RuntimeError("the manager stopped before all requests were finished")
        return [outputs[i] for i in ids]
