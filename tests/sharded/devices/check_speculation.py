"""Speculative decoding over several devices: the tokens of one device without drafts, and the same draws."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.request import SamplingParams
from jaxserve.speculation_config import SpeculationConfig
from tests.checkpoints import write_checkpoint
from tests.e2e.workloads import assert_same, generate, tokens
from tests.sharded.devices.sizes import SIZES

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
PROMPTS = [tokens(n, f"devices {n}") for n in (3, 9, 17)]
Start = Callable[..., Engine]


@pytest.fixture(scope="module")
def start(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Start an engine whose draft is nearly always right, or one with the heads of no device's share."""
    odd = tmp_path_factory.mktemp("draft")
    sizes = {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8}
    write_checkpoint(odd, "llama", num_hidden_layers=1, **sizes)

    def start(num_devices: int, draft: str | None) -> Engine:
        options: dict[str, Any] = SIZES | {"tensor_parallel_size": num_devices, "multi_step": 8}
        if draft is not None:
            path = str(odd if draft == "odd" else model)
            tree = [(0,), (1,), (0, 0), (0, 1), (0, 0, 0)] if draft == "tree" else None
            options["speculative_config"] = SpeculationConfig(
                model=path, num_speculative_tokens=3, speculative_token_tree=tree, adaptive=False
            )
        return Engine(EngineConfig(str(model), **options))

    return start


@pytest.mark.parametrize("draft", ["same", "odd", "tree"])
def test_tokens_are_those_of_one_device(start: Start, draft: str) -> None:
    sampled = replace(GREEDY, temperature=1, top_k=5, seed=3)
    penalised = replace(GREEDY, repetition_penalty=1.3, logprobs=2)
    expected = [generate(start(1, None), PROMPTS, params) for params in (GREEDY, penalised)]
    drawn = generate(start(1, draft), PROMPTS, sampled)
    for num_devices in (2, 4):
        engine = start(num_devices, draft)
        # Samples first: they depend on where rounds begin, and what is cached changes that.
        for params, wanted in zip((sampled, GREEDY, penalised), [drawn, *expected], strict=True):
            for output, each in zip(generate(engine, PROMPTS, params), wanted, strict=True):
                assert_same(output, each)
        assert engine.stats.num_drafted_tokens > 0
        if draft != "odd":
            assert engine.stats.acceptance_rate > (0.5 if draft == "same" else 0.3), "penalties are not the draft's"
