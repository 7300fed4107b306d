"""Data-parallel attention with expert-parallel experts: each share of the devices has rows and pages of its own."""

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings

from jaxserve import LLM, BeamSearchParams, weights
from jaxserve.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.models import registry
from jaxserve.planner.program import collectives
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.sharded import ShardedScheduler
from tests.checkpoints import write_checkpoint
from tests.e2e.workloads import Job, assert_same, few_but_rich, generate, jobs, run, tokens
from tests.parameters import mainly
from tests.random_runs import examples
from tests.sharded.devices.sizes import SIZES

pytestmark = pytest.mark.usefixtures("fewer_programs")

MODEL: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "num_experts": 8,
    "n_group": 4,
    "num_hidden_layers": 2,
}
# Family, devices, and shares with rows of their own: with latents, of which a pool over heads alone has copies; in one
# case, each share has two devices, which split its heads and experts.
CASES = [("deepseek_v3", 2, 2), ("qwen3_moe", 4, 2), ("deepseek_v3", 4, 4), ("qwen3_moe", 2, 2), ("gpt_oss", 4, 2)]
OPTIONS = SIZES | {"max_num_seqs": 2, "max_num_batched_tokens": 8}  # of each share
Pair = tuple[Engine, Engine]


@pytest.fixture(scope="module", params=mainly(CASES[:2], *CASES[2:]), ids=str)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Start an engine on one device, and one whose rows are divided among several."""
    family, num_devices, num_shares = request.param
    path = tmp_path_factory.mktemp(family)
    write_checkpoint(path, family, **MODEL)
    split = {"tensor_parallel_size": num_devices, "expert_parallel_size": num_shares, "enable_dp_attention": True}
    return Engine(EngineConfig(str(path), **OPTIONS)), Engine(EngineConfig(str(path), **OPTIONS, **split))


@given(jobs=jobs())
@settings(few_but_rich, max_examples=examples(6))
def test_tokens_are_those_of_one_device(pair: Pair, jobs: list[Job]) -> None:
    """Batches, chunks, prefix hits, preemptions, multi-step decode and all kinds of sampling at once."""
    for engine in pair:
        engine.reset_prefix_cache()
    alone, divided = (run(engine, jobs) for engine in pair)
    for output, wanted, job in zip(divided, alone, jobs, strict=True):
        assert_same(output, wanted, job)
    divided_engine = pair[1]
    divided_engine.core.check_integrity()
    assert divided_engine.stats.num_compiles == 0


def test_rows_go_on_through_preemption_and_find_their_prefixes(pair: Pair) -> None:
    prompts, params = [tokens(20, n) for n in range(8)], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    alone, engine = pair
    engine.reset_prefix_cache()
    before = engine.stats.num_preemptions
    expected = generate(alone, prompts, params)
    for output, wanted in zip(generate(engine, prompts, params), expected, strict=True):
        assert_same(output, wanted)
    assert engine.stats.num_steps > engine.stats.num_dispatches, "some dispatches had several"
    assert engine.stats.num_preemptions >= before
    shorter = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    engine.reset_prefix_cache()
    for prompt in prompts[:4]:  # one after the other: each is found wherever it is
        generate(engine, [prompt], shorter)
        [output] = generate(engine, [prompt], shorter)
        assert output.num_cached_tokens == 16
    assert "shards" in vars(engine.replicas[0].scheduler), "requests were distributed"
    scheduler = engine.replicas[0].scheduler
    assert isinstance(scheduler, ShardedScheduler)
    assert sum(shard.num_schedules > 0 for shard in scheduler.shards) == len(scheduler.shards)


def test_the_pool_holds_as_many_times_the_tokens_and_is_never_gathered(pair: Pair) -> None:
    alone, divided = pair
    whole, split = (engine.replicas[0].executor for engine in pair)
    count = divided.schedule.num_data_shards
    assert divided.occupancy.num_pages == count * alone.occupancy.num_pages
    assert split.kv_token_bytes * split.programs.num_devices // count == whole.kv_token_bytes * (
        1 if divided.arch.latent is None else split.programs.num_devices // count
    )
    for leaf in jax.tree.leaves(split.state.kv_pages):
        assert leaf.sharding.shard_shape(leaf.shape)[1] * count == leaf.shape[1]
    compiled = split.programs.lower(split.programs.schedule.buckets()[-1]).compile().as_text()
    pool = jax.tree.leaves(split.state.kv_pages)[0]
    sizes = [",".join(map(str, shape)) for shape in (pool.shape, pool.sharding.shard_shape(pool.shape))]
    exchanged = re.findall(r"= (\S+) (?:all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)\(", compiled)
    assert exchanged
    assert not any(size in shape for size in sizes for shape in exchanged)
    kinds = {each.kind: each.count for each in collectives(compiled)}
    num_mixtures = divided.arch.num_layers - len(divided.arch.dense_layers)
    assert kinds["reduce-scatter"] == num_mixtures
