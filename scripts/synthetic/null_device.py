"""Engine whose device takes no time: it accepts every step and returns the same token immediately."""

import json
import tempfile
import time
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.api.config import EngineConfig
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.execution.packer import BatchPacker
from jaxserve.scheduling.executor_protocol import StepResult
from jaxserve.scheduling.schedule_config import ScheduleConfig, resolve_schedule
from jaxserve.scheduling.step_costs import Costs
from jaxserve.scheduling.step_plan import StepPlan, StepShape, cheapest

TOKEN = 7
MODEL: dict[str, Any] = {  # no weights are created for it; it is small so that a pool of any size fits
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
}


@dataclass(slots=True)
class NullStep:
    """Step with an immediate result: the same token for every sampling row."""

    launched_s: float
    max_new: list[int]
    num_compiles: int = 0

    def is_ready(self) -> bool:
        return True

    def result(self) -> StepResult:
        tokens = np.full((len(self.max_new), 1), TOKEN, np.int32)
        return StepResult(tokens, np.array(self.max_new, np.int32), time.monotonic())


class NullExecutor:
    """Executor without a device: it packs its input and returns the same token."""

    costs = Costs(0, lambda *_: 0, lambda *_: 1)  # operations are irrelevant, but ratios of them are used

    def __init__(self, schedule: ScheduleConfig, vocab_size: int) -> None:
        self.schedule = schedule
        self.packer = BatchPacker(schedule, 0, vocab_size)
        programs = [StepShape(size) for size in schedule.buckets()]  # one round: host work is measured
        self.fit = cache(partial(cheapest, programs))

    def launch(self, plan: StepPlan, program: StepShape) -> NullStep:
        self.packer.pack(plan, program.num_tokens)
        return NullStep(time.monotonic(), plan.max_new)

    def sample(self, step: NullStep) -> int:
        raise AssertionError("no plan is split")

    def restore_state(self) -> bool:
        return False

    def close(self) -> None: ...


def null_engine(num_replicas: int = 1, **options: Any) -> DrivenEngine:
    """Return an engine with these options, each replica on a null device; `num_pages` is required."""
    with tempfile.TemporaryDirectory() as model:
        (Path(model) / "config.json").write_text(json.dumps(MODEL))
        config = EngineConfig(model=model, skip_tokenizer_init=True, **options)
        schedule = resolve_schedule(
            config,
            max_position=MODEL["max_position_embeddings"],
            platform="cpu",
            page_size=config.page_size or 16,
            num_pages=options["num_pages"],
        )
        return DrivenEngine(config, [NullExecutor(schedule, MODEL["vocab_size"]) for _ in range(num_replicas)])
