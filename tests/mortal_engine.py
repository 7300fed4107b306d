"""Engine of Ray's actors in tests: a FakeEngine that some prompts kill, with slow steps.

Ray calls `setup` in each process of a job whose runtime_env names it as the worker_process_setup_hook.
"""

import os
import signal
import sys
import time
from types import SimpleNamespace
from typing import Any

from fake_engine import FakeLLM

from jaxserve.errors import ConfigError

STEP_S = 0.01


class MortalLLM(FakeLLM):
    """LLM whose steps kill the process while one of its prompts says "die", and fail while one says "raise"."""

    def __init__(self, model: str, **options: Any) -> None:
        if options.get("max_num_seqs") == 13:
            raise ConfigError("max_num_seqs must not be 13, got 13; lower it")
        super().__init__(model, **options)
        self.engine.max_num_seqs = options.get("max_num_seqs", self.engine.max_num_seqs)
        self.engine.sleep = self._sleep
        self.engine.step_s = STEP_S

    def _sleep(self, seconds: float) -> None:
        texts = [self.engine.tokenizer.decode(r.output.prompt_token_ids) for r in self.engine.waiting.values()]
        if any("die" in text for text in texts):
            os.kill(os.getpid(), signal.SIGKILL)
        if any("raise" in text for text in texts):
            raise RuntimeError("a step went wrong")
        time.sleep(seconds)


def setup() -> None:
    sys.modules["jaxserve.offline.llm"] = SimpleNamespace(LLM=MortalLLM)
