"""Engine without a model: tokens are a hash of prompt and position, so that a stream's tokens are known beforehand.

All else is the real one: frontend, core, scheduler, pages, threads. A step takes microseconds.
"""

import json
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tiny_tokenizers

from jaxserve.api.config import EngineConfig
from jaxserve.assembly.engine import Engine
from jaxserve.execution.sampling import TokenLogprobs
from jaxserve.scheduling.executor_protocol import StepResult
from jaxserve.scheduling.request import Request
from jaxserve.scheduling.schedule_config import resolve_schedule
from jaxserve.scheduling.step_plan import StepPlan, StepShape
from synthetic.null_device import MODEL, NullExecutor

VOCAB_SIZE = 320
NUM_SPECIAL = 2
NUM_TOP = 20
SIZES: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "page_size": 4,
    "num_pages": 256,
    "multi_step": 1,
}
CHAT_TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"


def token_at(prompt: Sequence[int], position: int) -> int:
    """Return the token of a sequence at a position behind its prompt."""
    return NUM_SPECIAL + zlib.crc32(repr((list(prompt), position)).encode()) % (VOCAB_SIZE - NUM_SPECIAL)


def round_tokens(prompt: Sequence[int], count: int) -> list[int]:
    """Return the first tokens behind a prompt."""
    return [token_at(prompt, len(prompt) + index) for index in range(count)]


def logprobs_of(num_rows: int) -> TokenLogprobs:
    """Return log probabilities of some rows, the same for all."""
    ids = np.arange(NUM_TOP, dtype=np.int32)
    values = -np.linspace(0.1, 9, NUM_TOP, dtype=np.float32)
    rows = np.full(num_rows, -0.5, np.float32), np.ones(num_rows, np.int32)
    return TokenLogprobs(*rows, np.tile(ids, (num_rows, 1)), np.tile(values, (num_rows, 1)))


@dataclass(slots=True)
class _Step:
    launched_s: float
    rows: list[tuple[Request, int, int]]  # position of the next token, and whether there is one
    step_s: float
    num_tokens: int
    num_compiles: int = 0

    def is_ready(self) -> bool:
        return True

    def result(self) -> StepResult:
        time.sleep(self.step_s)
        columns = [request.params for request, *_ in self.rows]
        tokens = [[token_at(request.prompt_token_ids, position)] for request, position, _ in self.rows]
        counts = np.array([max_new for *_, max_new in self.rows], np.int32)
        logprobs = prompt_logprobs = None
        if any(params.logprobs is not None for params in columns):
            logprobs = logprobs_of(len(self.rows))
        if any(params.prompt_logprobs is not None for params in columns):
            prompt_logprobs = logprobs_of(self.num_tokens)
        tokens_of_rows = np.array(tokens, np.int32)
        return StepResult(tokens_of_rows, counts, time.monotonic(), logprobs, prompt_logprobs)


class HashedExecutor(NullExecutor):
    """Executor whose tokens are hashes."""

    step_s = 0.0

    def launch(self, plan: StepPlan, program: StepShape) -> Any:
        self.packer.pack(plan, program.num_tokens)
        columns = zip(plan.requests, plan.starts, plan.counts, plan.max_new, strict=True)
        rows = [(request, start + count, max_new) for request, start, count, max_new in columns]
        return _Step(time.monotonic(), rows, self.step_s, sum(plan.counts))


def write_model(path: Path, **config: Any) -> Path:
    """Write the files of a model without weights, and return their directory."""
    tiny_tokenizers.write(
        path,
        tiny_tokenizers.byte_level(VOCAB_SIZE),
        bos_token="<s>",
        eos_token="</s>",
        **{"chat_template": CHAT_TEMPLATE} | config,
    )
    sizes = {"vocab_size": VOCAB_SIZE, "bos_token_id": 0, "eos_token_id": 1}
    (path / "config.json").write_text(json.dumps(MODEL | sizes))
    return path


def hashed_engine(path: Path, *, step_s: float = 0.0, **options: Any) -> Engine:
    """Return an engine over the files of `write_model`, whose steps take so long."""
    config = EngineConfig(model=str(path), **SIZES | options)
    schedule = resolve_schedule(
        config,
        max_position=MODEL["max_position_embeddings"],
        platform="cpu",
        page_size=config.page_size or 16,
        num_pages=config.num_pages or 256,
    )
    executor = HashedExecutor(schedule, VOCAB_SIZE)
    executor.step_s = step_s
    return Engine(config, [executor])
