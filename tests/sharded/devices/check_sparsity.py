"""Output tokens that see fewer keys and values: heads on several devices choose together."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxserve.api.config import EngineConfig
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.sparsity_config import EvictionConfig, SparseAttentionConfig
from jaxserve.assembly.driven import DrivenEngine
from tests.checkpoints import write_checkpoint
from tests.e2e.workloads import assert_same, generate, tokens
from tests.sharded.devices.sizes import MODEL, SIZES

Start = Callable[..., DrivenEngine]

PROMPTS = [tokens(count, count) for count in (25, 30, 7)]
PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=0)


@pytest.mark.parametrize(
    "eviction",
    [EvictionConfig("streaming_llm", 16), EvictionConfig("snapkv", 14, window_tokens=4)],
    ids=lambda eviction: eviction.method,
)
def test_kept_tokens_are_those_of_one_device(start: Start, eviction: EvictionConfig) -> None:
    expected = generate(start(1, kv_eviction=eviction), PROMPTS, PARAMS)
    for output, wanted in zip(
        generate(start(4, kv_eviction=eviction, multi_step=1), PROMPTS, PARAMS), expected, strict=True
    ):
        assert_same(output, wanted)


def test_chosen_pages_are_those_of_one_device(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", **MODEL | {"num_hidden_layers": 3})
    quest = SparseAttentionConfig("quest", 12)
    sizes: dict[str, Any] = SIZES | {"max_num_batched_tokens": 8, "multi_step": 1}
    alone, split = (
        DrivenEngine(EngineConfig(str(tmp_path), tensor_parallel_size=count, sparse_attention=quest, **sizes))
        for count in (1, 2)
    )
    expected = generate(alone, PROMPTS, PARAMS)
    for output, wanted in zip(generate(split, PROMPTS, PARAMS), expected, strict=True):
        assert_same(output, wanted)
    for engine in (alone, split):
        engine.close()
