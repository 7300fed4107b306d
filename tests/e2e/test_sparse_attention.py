"""Output tokens that choose their pages: invariants of the engine, and needles that a constructed model must find."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest

from jaxserve.api.config import EngineConfig
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.api.sparsity_config import EvictionConfig, SparseAttentionConfig
from jaxserve.api.speculation_config import SpeculationConfig
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.errors import ConfigError
from synthetic.copying_model import TINY, num_codes, write_copying_model
from tests.e2e.sizes import SIZES
from tests.e2e.workloads import TOLERANCE, Job, assert_same, generate, run_alone, tokens

Start = Callable[..., DrivenEngine]

PAGE_SIZE = SIZES["page_size"]
QUEST, WHOLE, SUFFICIENT = (SparseAttentionConfig("quest", budget) for budget in (3 * PAGE_SIZE, 64, 60))
PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=0)
PREFIX = tokens(20, "prefix")
PROMPTS = [PREFIX + tokens(count, count) for count in (1, 5, 12)] + [tokens(7, "short")]


def logprobs(engine: DrivenEngine) -> list[Any]:
    outputs = generate(engine, PROMPTS, PARAMS)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


@pytest.mark.long
def test_what_a_token_sees_depends_only_on_its_sequence(start: Start, tmp_path: Path) -> None:
    checkpoints.write_checkpoint(tmp_path, "llama", num_hidden_layers=4)  # the first two see all
    options = {"sparse_attention": QUEST, "model": str(tmp_path)}
    alone = start(**options)
    expected = [run_alone(alone, Job(prompt, PARAMS)) for prompt in PROMPTS]
    for others in ({}, {"multi_step": 7, "max_num_batched_tokens": 7, "num_pages": 12}):
        engine = start(**options | others)
        for _ in range(2):  # the second time with cached prompts
            for output, wanted in zip(generate(engine, PROMPTS, PARAMS), expected, strict=True):
                assert_same(output, wanted, others)
    assert engine.stats.num_preemptions
    dense = generate(start(**options | {"sparse_attention": None}), PROMPTS, PARAMS)
    found, sparse = ([each.outputs[0].cumulative_logprob for each in outputs] for outputs in (dense, expected))
    assert np.abs(np.subtract(found, sparse)).max() > 10 * TOLERANCE


def test_a_sufficient_budget_changes_nothing(start: Start) -> None:
    dense, *others = (logprobs(start(seed=1, sparse_attention=each)) for each in (None, WHOLE, SUFFICIENT))
    assert others == [dense, dense]


NUM_CODES = num_codes(TINY)


def needle(seed: int, length: int, needle_len: int) -> tuple[list[int], list[int]]:
    """Return a prompt of random tokens with a phrase of others somewhere, whose first token it ends with; its rest."""
    rng = np.random.default_rng(seed)
    phrase = rng.permutation(needle_len)
    prompt = rng.integers(needle_len, NUM_CODES, length)
    start = rng.integers(1, length - needle_len - 1)
    prompt[start : start + needle_len] = phrase
    prompt[-1] = phrase[0]
    return prompt.tolist(), phrase[1:].tolist()


@pytest.mark.long
def test_needles_are_found_in_a_quarter_of_the_keys(start: Start, tmp_path: Path) -> None:
    write_copying_model(tmp_path)
    length, needle_len = 256, 6
    sizes = {"max_model_len": 272, "num_pages": 20, "max_num_seqs": 1, "model": str(tmp_path)}
    cases = [needle(seed, length, needle_len) for seed in range(16)]
    params = SamplingParams(temperature=0, max_tokens=needle_len - 1, ignore_eos=True)
    found, num_bytes = {}, {}
    for name, budget in (("dense", None), ("quest", SparseAttentionConfig("quest", length // 4))):
        engine = start(sparse_attention=budget, page_size=16, **sizes)
        outputs = [generate(engine, [prompt], params)[0].outputs[0].token_ids for prompt, _ in cases]
        found[name] = np.mean([np.equal(ids[1:], rest[1:]) for ids, (_, rest) in zip(outputs, cases, strict=True)])
        num_bytes[name] = engine.replicas[0].step_stats.last_step.kv_bytes
    assert found["dense"] == 1
    assert found["quest"] >= 0.9, found
    in_dense_layers = num_bytes["dense"] / 2  # two of the four layers see all
    assert num_bytes["quest"] - in_dense_layers <= 0.3 * in_dense_layers, (
        "the bytes of three pages, one key, and bounds"
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"speculative_config": SpeculationConfig("ngram")},
            "must be in .* with sparse_attention",
        ),
        ({"kv_offloading_path": "/tmp"}, "kv_offloading_path must be None with sparse_attention"),
        ({"kv_eviction": EvictionConfig("streaming_llm", 64)}, "kv_eviction must be None with sparse_attention"),
    ],
)
def test_options_that_contradict_it(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig(sparse_attention=QUEST, **options)


@pytest.mark.parametrize(
    "options",
    [{"kv_eviction": EvictionConfig("streaming_llm", 32)}, {"sparse_attention": QUEST}],
    ids=lambda x: next(iter(x)),
)
def test_models_with_an_indexer_refuse_it(start: Start, tmp_path: Path, options: dict[str, Any]) -> None:
    checkpoints.write_checkpoint(tmp_path, "deepseek_v32")
    with pytest.raises(ConfigError, match=f"{next(iter(options))} .*DeepseekV32ForCausalLM.* drop it"):
        start(model=str(tmp_path), **options)
