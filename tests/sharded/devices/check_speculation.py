"""Speculative decoding over several devices: the tokens of one device without drafts, and the same draws."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import draft_layers
import jax
import numpy as np
import pytest
import transformers
from safetensors.numpy import save_file

from jaxserve.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.metrics import EngineStats
from jaxserve.outputs import RequestOutput
from jaxserve.sampling_params import SamplingParams
from jaxserve.speculation_config import SpeculationConfig
from tests.checkpoints import write_checkpoint
from tests.e2e.workloads import assert_same, generate, tokens
from tests.parameters import mainly, some_by_default
from tests.sharded.devices.sizes import SIZES

pytestmark = pytest.mark.usefixtures("fewer_programs")

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
PROMPTS = [tokens(n, f"devices {n}") for n in (3, 9, 17)]
Start = Callable[..., Engine]


@pytest.fixture(scope="module")
def start(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Start an engine whose draft is nearly always right, or one with the heads of no device's share.

    Medusa heads of zeros, in a tree, and an EAGLE-3 layer near the one that repeats the model's last token share the
    model's logits, which are split over the devices.
    """
    odd = tmp_path_factory.mktemp("draft")
    sizes = {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8}
    write_checkpoint(odd, "llama", num_hidden_layers=1, **sizes)

    medusa, eagle3 = tmp_path_factory.mktemp("medusa"), tmp_path_factory.mktemp("eagle3")
    target = transformers.AutoModelForCausalLM.from_pretrained(model)
    size = target.config.hidden_size
    save_file({f"{n}.0.linear.weight": np.zeros((size, size), np.float32) for n in range(3)}, medusa / "a.safetensors")
    draft_layers.write_eagle3(eagle3, target, (0, 1))
    directories = {"odd": odd, "medusa": medusa, "eagle3": eagle3}

    def start(num_devices: int, draft: str | None, **sizes: Any) -> Engine:
        options: dict[str, Any] = SIZES | {"tensor_parallel_size": num_devices, "multi_step": 8} | sizes
        if draft is not None:
            tree = [(0,), (1,), (0, 0), (0, 1), (0, 0, 0)] if draft in ("tree", "medusa") else None
            options["speculative_config"] = SpeculationConfig(
                draft if draft in ("medusa", "eagle3") else "draft_model",
                str(directories.get(draft, model)),
                num_speculative_tokens=3,
                speculative_token_tree=tree,
                adaptive=False,
            )
        return Engine(EngineConfig(str(model), **options))

    return start


@pytest.mark.parametrize("num_devices", mainly([4], 2))
@pytest.mark.parametrize("draft", some_by_default(("same", "odd", "tree", "medusa", "eagle3"), "tree"))
def test_tokens_are_those_of_one_device(start: Start, draft: str, num_devices: int) -> None:
    sampled = replace(GREEDY, temperature=1, top_k=5, seed=3)
    penalised = replace(GREEDY, repetition_penalty=1.3, logprobs=2)
    alone = start(1, None, multi_step=1)
    expected = [generate(alone, PROMPTS, params) for params in (GREEDY, penalised)]
    drawn = generate(start(1, draft), PROMPTS, sampled)
    engine = start(num_devices, draft)
    # Samples first: they depend on where rounds begin, and what is cached changes that.
    for params, wanted in zip((sampled, GREEDY, penalised), [drawn, *expected], strict=True):
        for output, each in zip(generate(engine, PROMPTS, params), wanted, strict=True):
            assert_same(output, each)
    assert engine.stats.num_drafted_tokens > 0
    if draft in ("same", "tree"):
        assert engine.stats.acceptance_rate > (0.5 if draft == "same" else 0.3), "penalties are not the draft's"


@pytest.mark.full
def test_the_mtp_layer_of_a_model_is_split_as_the_others(tmp_path: Path) -> None:
    target = write_checkpoint(tmp_path, "deepseek_v3", tie_word_embeddings=False)
    draft_layers.add_mtp(tmp_path, target)
    layer = SpeculationConfig("mtp", num_speculative_tokens=3, adaptive=False)

    def run(num_devices: int) -> tuple[list[RequestOutput], EngineStats]:
        options = SIZES | {"tensor_parallel_size": num_devices, "multi_step": 1, "speculative_config": layer}
        engine = Engine(EngineConfig(str(tmp_path), **options))
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
def test_replicas_draft_for_their_own_rows(start: Start) -> None:
    sizes = {"max_num_seqs": 1, "multi_step": 1}  # few programs
    engine = start(1, "same", data_parallel_size=2, **sizes)
    prompts = [tokens(n, f"replicas {n}") for n in (3, 9, 5, 12, 4, 7)]
    for output, wanted in zip(
        generate(engine, prompts, GREEDY), generate(start(1, None, multi_step=1), prompts, GREEDY), strict=True
    ):
        assert_same(output, wanted)
    assert all(replica.executor.draft_params for replica in engine.replicas)
    assert engine.stats.acceptance_rate > 0.9
