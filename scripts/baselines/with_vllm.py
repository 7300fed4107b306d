"""vLLM, offline, on the CPU or its build's device; requests take LoRA adapters in turn if it has any."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.lora.request import LoRARequest

_KV_CACHE_GIB = "2"  # vLLM would take a large part of the host's memory, which it shares with the other engines


class Engine:
    num_warm_up = None

    def __init__(self, checkpoint: Path, cache_dir: Path, adapters: Sequence[str] = (), **options: Any) -> None:
        del cache_dir
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", _KV_CACHE_GIB)
        # All cores: by default it leaves one to its scheduler's process.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, sorted(os.sched_getaffinity(0)))))
        options = {"dtype": "float32", **options}
        self.note = "continuous batching, " + ("eager" if options.get("enforce_eager") else "compiled")
        self.versions = {"vllm": vllm.__version__, "torch": torch.__version__}
        self._adapters = [LoRARequest(path, index + 1, path) for index, path in enumerate(adapters)]
        self._llm = vllm.LLM(str(checkpoint), skip_tokenizer_init=True, **options)

    def generate(self, prompts: list[list[int]], output_lens: list[int]) -> list[list[int]]:
        params = [
            vllm.SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in output_lens
        ]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        given = [self._adapters[i % len(self._adapters)] for i in range(len(inputs))] if self._adapters else None
        outputs = self._llm.generate(inputs, params, use_tqdm=False, lora_request=given)
        return [list(output.outputs[0].token_ids) for output in outputs]
