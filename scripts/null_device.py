"""An engine whose device takes no time: it accepts every step and answers with the same token at once."""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.config import EngineConfig, ScheduleConfig, resolve_schedule
from jaxserve.engine.batch import StepUpload
from jaxserve.engine.engine import Engine
from jaxserve.engine.runner import StepResult

TOKEN = 7
MODEL = {  # no weights are made of it: only the account of bytes and FLOPs and the limits read it
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
}


class NullRunner:
    """A Runner without programs; a StepHandle too, because its results are there before they are asked for."""

    kv_token_bytes = 0

    @property
    def programs(self) -> "NullRunner":
        return self

    def __init__(self, schedule: ScheduleConfig) -> None:
        self.schedule = schedule
        self._buckets = schedule.buckets()
        rows = schedule.max_num_seqs
        self._result = StepResult(np.full((rows, 1), TOKEN, np.int32), np.ones(rows, np.int32), None, None)

    def bucket_for(self, num_tokens: int) -> int:
        return min(b for b in self._buckets if b >= num_tokens)

    def multi_step_bucket_for(self, num_rows: int) -> None:
        """One step per dispatch: what is measured is the host's work per step."""

    def run(self, upload: StepUpload, bucket: int, **wants: bool) -> "NullRunner":
        return self

    def fetch(self) -> StepResult:
        return self._result

    def weight_bytes(self, num_tokens: int) -> int:
        return 0

    def restore_state(self) -> bool:
        return False


def null_engine(**options: Any) -> Engine:
    """An engine of these options over a null device; `num_pages` must be among them."""
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
        return Engine(config, runner=NullRunner(schedule))  # type: ignore[arg-type]
