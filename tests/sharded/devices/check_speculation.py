"""Speculative decoding over several devices: the tokens of one device without drafts, and the same draws."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import draft_layers
import jax
import numpy as np
import pytest
import transformers
from safetensors.numpy import save_file

from jaxserve import weights
from jaxserve.api.config import EngineConfig
from jaxserve.api.metrics import EngineStats
from jaxserve.api.outputs import RequestOutput
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.speculation_config import SpeculationConfig
from jaxserve.assembly.driven import DrivenEngine
from tests.checkpoints import write_checkpoint
from tests.e2e.workloads import assert_same, generate, tokens
from tests.sharded.devices.sizes import SIZES

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
PROMPTS = [tokens(n, f"devices {n}") for n in (3, 9, 17)]
DRAFTS = ("same", "odd", "tree", "medusa", "eagle3")
Start = Speculate = Callable[..., DrivenEngine]


@pytest.fixture(scope="module")
def speculate(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Speculate:
    """Start an engine whose draft is nearly always right, or one with the heads of no device's share.

    Medusa heads of zeros, in a tree, and an EAGLE-3 layer near the one that repeats the model's last token share the
    model's logits, which are split over the devices.
    """

    @cache
    def directory(draft: str) -> Path:
        path = model if draft in ("same", "tree") else tmp_path_factory.mktemp(draft)
        if draft == "odd":
            sizes = {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8}
            write_checkpoint(path, "llama", num_hidden_layers=1, **sizes)
        elif draft == "medusa":
            size = weights.read_config(model)["hidden_size"]
            heads = {f"{n}.0.linear.weight": np.zeros((size, size), np.float32) for n in range(3)}
            save_file(heads, path / "a.safetensors")
        elif draft == "eagle3":
            draft_layers.write_eagle3(path, transformers.AutoModelForCausalLM.from_pretrained(model), (0, 1))
        return path

    def speculate(num_devices: int, draft: str, **sizes: Any) -> DrivenEngine:
        options: dict[str, Any] = SIZES | {"tensor_parallel_size": num_devices} | sizes
        options["speculative_config"] = SpeculationConfig(
            draft if draft in ("medusa", "eagle3") else "draft_model",
            str(directory(draft)),
            num_speculative_tokens=3,
            speculative_token_tree=[(0,), (1,), (0, 0), (0, 1), (0, 0, 0)] if draft in ("tree", "medusa") else None,
            adaptive=False,
        )
        return DrivenEngine(EngineConfig(str(model), **options))

    return speculate


@pytest.mark.parametrize(
    ("num_devices", "draft", "multi_step"),
    [
        (4, "medusa", 1),  # drafts come from logits that are split; rounds in a loop are another, long program
        *(pytest.param(*sizes, 8, marks=pytest.mark.full) for sizes in product((2, 4), DRAFTS)),
    ],
)
def test_tokens_are_those_of_one_device(
    start: Start, speculate: Speculate, draft: str, num_devices: int, multi_step: int
) -> None:
    sampled = replace(GREEDY, temperature=1, top_k=5, seed=3)
    penalised = replace(GREEDY, repetition_penalty=1.3, logprobs=2)
    expected = [generate(start(), PROMPTS, params) for params in (GREEDY, penalised)]
    drawn = generate(speculate(1, draft, multi_step=multi_step), PROMPTS, sampled)
    engine = speculate(num_devices, draft, multi_step=multi_step)
    # Samples first: they depend on where rounds begin, and what is cached changes that.
    for params, wanted in zip((sampled, GREEDY, penalised), [drawn, *expected], strict=True):
        for output, each in zip(generate(engine, PROMPTS, params), wanted, strict=True):
            assert_same(output, each)
    assert engine.stats.num_accepted_tokens > 0
    if draft in ("same", "tree"):
        assert engine.stats.acceptance_rate > (0.5 if draft == "same" else 0.3), "penalties are not the draft's"


@pytest.mark.full
def test_the_mtp_layer_of_a_model_is_split_as_the_others(tmp_path: Path) -> None:
    target = write_checkpoint(tmp_path, "deepseek_v3", tie_word_embeddings=False)
    draft_layers.add_mtp(tmp_path, target)
    layer = SpeculationConfig("mtp", num_speculative_tokens=3, adaptive=False)

    def run(num_devices: int) -> tuple[list[RequestOutput], EngineStats]:
        options = SIZES | {"tensor_parallel_size": num_devices, "multi_step": 1, "speculative_config": layer}
        engine = DrivenEngine(EngineConfig(str(tmp_path), **options))
        matrix = jax.tree.leaves(engine.replicas[0].executor.draft_params["layers"][0]["q_proj"])[0]
        assert num_devices == 1 or matrix.sharding.shard_shape(matrix.shape)[0] == matrix.shape[0] // num_devices
        return generate(engine, PROMPTS, GREEDY), engine.stats

    (expected, alone), (outputs, stats) = run(1), run(2)
    for output, each in zip(outputs, expected, strict=True):
        assert_same(output, each)
    counts = [(each.num_drafted_tokens, each.num_accepted_tokens) for each in (stats, alone)]
    assert counts[0] == counts[1]
    assert stats.num_drafted_tokens > 0


@pytest.mark.full
def test_replicas_draft_for_their_own_rows(start: Start, speculate: Speculate) -> None:
    engine = speculate(1, "same", data_parallel_size=2, max_num_seqs=1, multi_step=1)
    prompts = [tokens(n, f"replicas {n}") for n in (3, 9, 5, 12, 4, 7)]
    for output, wanted in zip(generate(engine, prompts, GREEDY), generate(start(), prompts, GREEDY), strict=True):
        assert_same(output, wanted)
    assert all(replica.executor.draft_params for replica in engine.replicas)
    assert engine.stats.acceptance_rate > 0.9
