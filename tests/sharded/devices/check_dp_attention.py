"""Data-parallel attention with expert-parallel experts: each share of the devices has rows and pages of its own."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jaxserve import LLM, BeamSearchParams, weights
from jaxserve.api.config import EngineConfig
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.layers.sharding import named_sharding, tensor_mesh
from jaxserve.models import registry
from jaxserve.models.params import matrix_transform, split_array, unsplit
from jaxserve.scheduling.step_plan import StepShape
from jaxserve.tools.planner.program import collectives
from jaxserve.weights.rows import leaf_at
from tests.checkpoints import write_checkpoint
from tests.e2e.workloads import Job, assert_same, few_but_rich, generate, jobs, run, tokens
from tests.parameters import mainly
from tests.random_runs import examples
from tests.sharded.devices.sizes import MIXTURE, SHARD_SIZES
from tests.tiny_tokenizers import byte_level, write

# Family, devices, shares with rows of their own, most steps in a dispatch, and quantisation. With latents every device
# would have all of them otherwise; in the second case each share has two devices, which split its heads and each of its
# experts.
CASES = [
    ("deepseek_v3", 2, 2, 5, None),
    ("qwen3_moe", 4, 2, 1, None),
    ("deepseek_v3", 4, 4, 5, None),
    ("qwen3_moe", 2, 2, 5, "int8"),
    ("gpt_oss", 4, 2, 5, None),
]
Pair = tuple[DrivenEngine, DrivenEngine]


def options(num_devices: int, num_shares: int) -> dict[str, Any]:
    return {"tensor_parallel_size": num_devices, "expert_parallel_size": num_shares, "enable_dp_attention": True}


def expert_tokens(engine: DrivenEngine) -> int:
    """Return how many tokens the experts of an engine got."""
    counts = engine.stats.expert_tokens
    return 0 if counts is None else sum(sum(layer.values) for layer in counts.layers)


@pytest.fixture(scope="module", params=mainly(CASES[1:2], CASES[0], *CASES[2:]), ids=str)
def pair(request: pytest.FixtureRequest, mixture: Callable[[str], tuple[Path, DrivenEngine]]) -> Pair:
    """Start an engine on one device, and one whose rows are divided among several."""
    family, *sizes, multi_step, quantization = request.param
    path, alone = mixture(family)
    same = SHARD_SIZES | {"quantization": quantization}
    if quantization is not None:
        alone = DrivenEngine(EngineConfig(str(path), **same))
    return alone, DrivenEngine(EngineConfig(str(path), **same | options(*sizes) | {"multi_step": multi_step}))


@given(jobs=jobs())
@settings(few_but_rich, max_examples=examples(4))
def test_tokens_are_those_of_one_device(pair: Pair, jobs: list[Job]) -> None:
    """Batches, chunks, prefix hits, preemptions, multi-step decode and all kinds of sampling at once."""
    for engine in pair:
        engine.reset_prefix_cache()
    alone, divided = (run(engine, jobs) for engine in pair)
    for output, wanted, job in zip(divided, alone, jobs, strict=True):
        assert_same(output, wanted, job)
    assert pair[1].stats.num_compiles == 0


def test_rows_go_on_through_preemption_and_prefixes_are_found_where_they_are(pair: Pair) -> None:
    prompts, params = [tokens(20, n) for n in range(8)], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    alone, engine = pair
    engine.reset_prefix_cache()
    before, num_tokens, num_counted = engine.stats.num_preemptions, engine.stats.num_tokens, expert_tokens(engine)
    for output, wanted in zip(generate(engine, prompts, params), generate(alone, prompts, params), strict=True):
        assert_same(output, wanted)
    assert engine.stats.num_preemptions > before
    has_several = engine.stats.num_steps > engine.stats.num_dispatches
    assert has_several == (engine.config.max_steps > 1)
    scheduler = engine.replicas[0].scheduler
    num_mixtures = engine.arch.num_moe_layers
    num_computed = (engine.stats.num_tokens - num_tokens) * num_mixtures
    assert expert_tokens(engine) - num_counted == num_computed * engine.arch.experts.per_token, "none of padding"
    engine.reset_prefix_cache()
    shorter = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    generate(engine, prompts[: len(scheduler.shards)], shorter)  # one on each
    for prompt in prompts[: len(scheduler.shards)]:
        [output] = generate(engine, [prompt], shorter)
        assert output.num_cached_tokens == 16


def test_the_pool_has_as_many_times_the_pages_and_is_never_exchanged(pair: Pair) -> None:
    """A mixture gathers tokens and sums them; sums over a share's devices, maybe one, are in every layer."""
    alone, divided = pair
    runner, count = divided.replicas[0].executor, divided.schedule.num_data_shards
    assert divided.occupancy.num_pages == count * alone.occupancy.num_pages
    [own, whole] = (engine.replicas[0].executor.state.kv_pages for engine in (divided, alone))
    num_holders = runner.programs.lowering.num_devices // count
    is_latent = divided.arch.attention.mla is not None
    for leaf, pool in zip(jax.tree.leaves(own), jax.tree.leaves(whole), strict=True):
        local = leaf.sharding.shard_shape(leaf.shape)
        assert (local[1], np.prod(local) * (1 if is_latent else num_holders)) == (pool.shape[1], pool.size)
    [compiled] = runner.programs.table[StepShape(divided.schedule.buckets()[-1])]
    program = compiled.as_text()
    exchanged = re.findall(r"= (\S+) (?:all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)", program)
    pools = {",".join(map(str, shape)) for shape in (own.shape, own.sharding.shard_shape(own.shape))}
    assert not any(sizes in result for sizes in pools for result in exchanged)
    assert compiled.memory_analysis().alias_size_in_bytes >= own.nbytes // runner.programs.lowering.num_devices
    counts = {each.kind: each.count for each in collectives("\n".join(re.findall(".*jit.block.*", program)))}
    num_mixtures = divided.arch.num_moe_layers
    assert counts.pop("all-gather") == counts.pop("reduce-scatter") == num_mixtures
    assert counts == {"all-reduce": 2 * divided.arch.num_layers}


@pytest.mark.full
def test_beams_and_rows_with_constraints(tmp_path: Path) -> None:
    """Beams copy pages, which have numbers of their own in each share; constraints need split plans of all shares."""
    pytest.importorskip("llguidance")
    write_checkpoint(tmp_path, "deepseek_v3", **MIXTURE | {"vocab_size": 331})  # an odd number: padded on one device
    write(tmp_path, byte_level(320))
    sizes = SHARD_SIZES | {
        "count_expert_tokens": False,
        "skip_tokenizer_init": False,
        "multi_step": 1,
        "compile_ahead": "background",
    }
    found = []
    for more in ({}, options(2, 2)):
        with LLM(str(tmp_path), **sizes | more) as llm:
            llm.engine.wait_until_warm()
            beams = llm.beam_search([tokens(9, 1), tokens(14, 2)], BeamSearchParams(beam_width=3, max_tokens=7))
            form = {"regex": "[a-z]{8}[0-9]{20}"}
            params = [SamplingParams(seed=seed, max_tokens=20, structured_outputs=form) for seed in range(5)]
            outputs = llm.generate([tokens(9, seed) for seed in range(5)], params, use_tqdm=False)
            found.append(([beam.tokens for each in beams for beam in each.sequences], outputs))
            assert any(shape.samples_late for shape in llm.engine.replicas[0].executor.programs.table)
            assert llm.engine.stats.num_compiles == 0
    (beams, wanted), (others, outputs) = found
    assert others == beams
    for output, other in zip(outputs, wanted, strict=True):
        assert_same(output, other)


@pytest.mark.parametrize("num_shares", mainly([2], 4))
def test_every_share_has_attention_whole_and_is_saved_once(tmp_path: Path, num_shares: int) -> None:
    write_checkpoint(tmp_path / "hf", "deepseek_v3", **MIXTURE)
    config = weights.read_config(tmp_path / "hf")
    specs = registry.param_specs(registry.from_hf_config(config).divided(4, 4, num_shares))
    mesh = tensor_mesh(4, num_expert_shards=4, num_data_shards=num_shares)
    assert mesh is not None
    shardings = {spec.path: named_sharding(mesh, spec.axes) for spec in specs}.__getitem__
    params = weights.load(tmp_path / "hf", specs, jnp.float32, shardings, matrix_transform(specs))
    weights.save(tmp_path / "saved", specs, unsplit(specs, params), config)
    saved, wanted = (weights.load(tmp_path / name, specs, jnp.float32) for name in ("saved", "hf"))
    jax.tree.map(np.testing.assert_array_equal, saved, wanted)
    for spec in specs:
        own = leaf_at(params, spec.path)
        jax.tree.map(np.testing.assert_array_equal, split_array(spec, leaf_at(wanted, spec.path), mesh), own)
        if "heads" in spec.axes:
            sizes = {shard.data.size for shard in own.addressable_shards}
            assert sizes == {np.prod(spec.shape) * num_shares // 4}
