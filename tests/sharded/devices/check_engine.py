"""An engine over several devices: the tokens of one device, and the program that makes them."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings

from jaxserve import LLM, weights
from jaxserve.api.config import EngineConfig
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.execution.lowering import Lowering
from jaxserve.execution.state import abstract_state, new_state
from jaxserve.layers.sharding import named_sharding, tensor_mesh
from jaxserve.models import registry
from jaxserve.models.params import matrix_transform, unsplit
from jaxserve.scheduling.step_plan import StepShape
from tests.checkpoints import FAMILIES, write_checkpoint
from tests.e2e.workloads import Job, assert_same, few_but_rich, generate, jobs, run, tokens
from tests.parameters import mainly
from tests.random_runs import examples
from tests.sharded.devices.sizes import LAYERS, MODEL, SIZES
from tests.tiny_tokenizers import byte_level, write

pytestmark = pytest.mark.usefixtures("any_load_pays")  # loads do not depend on the speed of this machine

Start = Callable[..., DrivenEngine]

DEVICES = 4  # two of them hold each KV head
COLLECTIVE = r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast)(?:-start)?\("


class TestAnyWorkload:
    """Batches, chunks, prefix hits, preemptions, multi-step decode and all kinds of sampling at once."""

    @given(jobs=jobs())
    @settings(few_but_rich, max_examples=examples(4))
    @pytest.mark.parametrize("num_devices", mainly([DEVICES], 2, 8))  # two devices of each replica: check_replicas.py
    def test_tokens_are_those_of_one_device(self, start: Start, num_devices: int, jobs: list[Job]) -> None:
        expected = run(start(1), jobs)
        for output, wanted, job in zip(run(start(num_devices), jobs), expected, jobs, strict=True):
            assert_same(output, wanted, job)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.full, *([] if name in ("gemma3", "gpt2") else [pytest.mark.exhaustive])])
        for name in FAMILIES
        if name != "llama"
    ],
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[DrivenEngine, DrivenEngine]:
    """Start engines of another family over one device and over four, which hold two KV heads twice each."""
    path = tmp_path_factory.mktemp(request.param)
    write_checkpoint(path, request.param, num_attention_heads=8, num_key_value_heads=2, head_dim=8)
    sizes = SIZES | {"max_num_batched_tokens": 8, "multi_step": 3}  # fewer programs
    alone, split = (DrivenEngine(EngineConfig(str(path), tensor_parallel_size=n, **sizes)) for n in (1, 4))
    return alone, split


class TestAnyWorkloadOfOtherFamilies:
    """The same workloads for other families."""

    @given(jobs=jobs())
    @settings(few_but_rich, max_examples=examples(10))
    def test_tokens_are_those_of_one_device(self, pair: tuple[DrivenEngine, DrivenEngine], jobs: list[Job]) -> None:
        for engine in pair:
            engine.reset_prefix_cache()
        expected, found = (run(engine, jobs) for engine in pair)
        for output, wanted, job in zip(found, expected, jobs, strict=True):
            assert_same(output, wanted, job)


@pytest.mark.parametrize("num_devices", mainly([DEVICES], 2, 8))
def test_greedy_rows_go_on_through_preemption_and_several_steps(start: Start, num_devices: int) -> None:
    prompts, params = [tokens(20, n) for n in range(4)], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    expected = generate(start(1), prompts, params)
    engine = start(num_devices)
    before = engine.stats.num_preemptions
    for output, wanted in zip(generate(engine, prompts, params), expected, strict=True):
        assert_same(output, wanted)
    assert engine.stats.num_preemptions > before
    assert engine.stats.num_steps > engine.stats.num_dispatches, "some dispatches had several"
    assert engine.stats.num_compiles == 0


def test_pages_come_back_from_disk(start: Start, tmp_path: Path) -> None:
    """Each device's heads go to the file and return to the same device."""
    prompts, params = [tokens(20, n) for n in range(8)], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    expected = generate(start(1), prompts, params)
    engine = start(DEVICES, kv_offloading_path=str(tmp_path))
    assert all(leaf._npy_value is None for leaf in jax.tree.leaves(engine.host.params)), "weights stay in host memory"
    assert generate(engine, prompts, params)
    for output, wanted in zip(generate(engine, prompts, params), expected, strict=True):
        assert_same(output, wanted)
        assert output.num_cached_tokens >= 16
    assert engine.stats.num_loaded_pages


@pytest.mark.full
def test_rows_with_constraints_have_the_same_tokens_in_split_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second program gets the logits as the first has left them, each device its part of the vocabulary."""
    pytest.importorskip("llguidance")
    write_checkpoint(tmp_path, "llama", **MODEL | {"vocab_size": 331})  # an odd number: padded on one device
    write(tmp_path, byte_level(320))
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 4, "multi_step": 2}
    options = SIZES | sizes | {"skip_tokenizer_init": False, "compile_ahead": "background"}
    engine = DrivenEngine(EngineConfig(str(tmp_path), tensor_parallel_size=2, **options))
    engine.wait_until_warm()
    executor = engine.replicas[0].executor
    fit = executor.fit
    form = {"regex": "[a-z]{8}[0-9]{20}"}
    workload = [
        Job(tokens(9, seed), SamplingParams(seed=seed, max_tokens=20, logprobs=2, structured_outputs=form))
        for seed in range(3)
    ]
    assert fit(StepShape(2, samples_late=True)) == StepShape(2, samples_late=True)
    found = [run(engine, workload)]
    monkeypatch.setattr(executor, "fit", lambda step: None if step.samples_late else fit(step))
    found.append(run(engine, workload))
    for output, wanted in zip(*found, strict=True):
        assert_same(output, wanted)
    engine.close()


@pytest.mark.parametrize("multi_step", [False, True])
def test_devices_meet_twice_a_layer(start: Start, multi_step: bool) -> None:
    """Devices exchange twice a layer, for the embedding, and for sampling: candidates, or logits of some rows.

    The last layer is compiled twice, for all tokens and for the rows' last ones; a step runs one of the two.
    """
    programs = start(DEVICES).replicas[0].executor.programs
    [(program,)] = [each for shape, each in programs.table.items() if (shape.num_rounds > 1) == multi_step]
    found = [(m[1], line) for line in program.as_text().splitlines() if (m := re.search(COLLECTIVE, line))]
    assert sum(kind == "all-reduce" for kind, _ in found) == 1 + 2 * (LAYERS + 1)
    for kind, line in found:
        assert (kind == "all-reduce") == ("/embed/" in line or "/jit(block)/" in line), line
        assert kind == "all-reduce" or "/cond/" in line, "sampling has branches"


def test_pool_is_split_and_updated_in_place(start: Start) -> None:
    lowering = start(DEVICES).replicas[0].executor.programs.lowering
    lowering = dataclasses.replace(lowering, schedule=dataclasses.replace(lowering.schedule, num_pages=100_000))
    pool = lowering.abstract_state.kv_pages
    local = pool.sharding.shard_shape(pool.shape)
    assert np.prod(local) * DEVICES == pool.size
    compiled = lowering.step(4, lowering.max_steps).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= pool.size * pool.dtype.itemsize / DEVICES > 50e6
    assert memory.temp_size_in_bytes < 1e6
    program = compiled.as_text()
    makers = re.findall(rf"= f32\[{','.join(map(str, local))}\]\S* ([a-z-]+)\(", program)
    assert makers, "the pool is in the program"
    assert not {"copy", "copy-start", "transpose", "concatenate", "pad", "all-gather", "all-to-all"} & set(makers)
    assert ",".join(map(str, pool.shape)) not in program, "nor is it anywhere whole"


def test_each_device_has_its_share(start: Start) -> None:
    whole, split = (start(n).replicas[0].executor for n in (1, DEVICES))
    assert (
        split.costs.weight_bytes(1, 1) < whole.costs.weight_bytes(1, 1) / 2
    )  # each has norms, biases and a KV head of two
    for leaf in jax.tree.leaves((split.params, split.state)):
        assert {shard.device.id for shard in leaf.addressable_shards} == set(range(DEVICES))
    (page,) = {shard.data.nbytes for shard in split.state.kv_pages.addressable_shards}
    assert page == whole.state.kv_pages.nbytes / 2  # one KV head of two


@pytest.mark.parametrize("num_devices", [2, 8])
@pytest.mark.parametrize(
    ("backend", "kv_dtype", "num_arrays"),
    [("xla", "int8", 2), ("mosaic_gpu", "int8", 2), ("native", "int8", 2), ("native", "int4", 1)],
)
def test_a_narrow_pool_is_split_by_its_heads(
    start: Start, num_devices: int, backend: str, kv_dtype: str, num_arrays: int
) -> None:
    runner, mesh = start(1).replicas[0].executor, tensor_mesh(num_devices)
    options = {"kv_dtype": kv_dtype, "backend": backend}
    pool = abstract_state(runner.arch, runner.schedule, mesh=mesh, **options).kv_pages
    alone = abstract_state(runner.arch.local(num_devices), runner.schedule, **options).kv_pages
    assert len(jax.tree.leaves(pool)) == num_arrays
    for leaf, own in zip(*map(jax.tree.leaves, (pool, alone)), strict=True):
        assert leaf.sharding.shard_shape(leaf.shape) == own.shape
        assert leaf.size == num_devices * own.size


@pytest.mark.parametrize("num_devices", [1, DEVICES])
def test_a_new_state_is_that_of_the_step(start: Start, num_devices: int) -> None:
    programs = start(num_devices).replicas[0].executor.programs
    lowering = programs.lowering
    state, shapes = programs.new_state(), lowering.abstract_state
    options = {"kv_dtype": state.kv_pages.dtype, "backend": "xla"}
    own = new_state(lowering.arch.local(num_devices), lowering.schedule, **options)
    for part in range(num_devices):
        for leaf, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(own), strict=True):
            np.testing.assert_array_equal(leaf.addressable_shards[part].data, wanted)
    for leaf, shape in zip(jax.tree.leaves(state), jax.tree.leaves(shapes), strict=True):
        assert num_devices == 1 or leaf.sharding.is_equivalent_to(shape.sharding, leaf.ndim)
    assert state.sequences.stopped.all()


def test_what_is_lost_with_a_broken_step_is_made_anew(start: Start) -> None:
    engine, prompts, params = start(DEVICES), [tokens(9, 1)], SamplingParams(temperature=0, max_tokens=3)
    expected = generate(engine, prompts, params)
    jax.tree.map(lambda leaf: leaf.delete(), engine.replicas[0].executor.state)
    engine.reset_prefix_cache()
    engine.replicas[0].executor.restore_state()
    for output, wanted in zip(generate(engine, prompts, params), expected, strict=True):
        assert_same(output, wanted)


def test_weights_of_the_same_mesh_are_not_copied(start: Start, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", seed=1, **MODEL)
    prompts, params = [tokens(20, n) for n in range(3)], SamplingParams(temperature=0, max_tokens=9)
    engine = start(DEVICES)
    old, expected = engine.devices.params, generate(engine, prompts, params)
    engine.update_weights(tmp_path)
    others = generate(engine, prompts, params)
    new = engine.devices.params
    assert [o.outputs[0].token_ids for o in others] != [o.outputs[0].token_ids for o in expected]
    for tree, wanted in ((old, expected), (new, others), (old, expected)):
        engine.update_weights(tree)
        for own, used in zip(jax.tree.leaves(tree), jax.tree.leaves(engine.devices.params), strict=True):
            for a, b in zip(own.addressable_shards, used.addressable_shards, strict=True):
                assert a.data.unsafe_buffer_pointer() == b.data.unsafe_buffer_pointer()
        for output, same in zip(generate(engine, prompts, params), wanted, strict=True):
            assert_same(output, same)
            assert output.num_cached_tokens == 0
    assert engine.stats.num_compiles == 0


def test_a_second_start_lowers_nothing(start: Start, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first start has compiled is on disk: XLA's own cache, which these checks do without, has none of it."""

    def lower(*_: object, **__: object) -> None:
        raise AssertionError("every program is on disk")

    prompts, params = [tokens(9, 1)], SamplingParams(temperature=1, seed=2, max_tokens=9)
    expected = generate(start(DEVICES), prompts, params)
    monkeypatch.setattr(Lowering, "step", lower)
    second = DrivenEngine(EngineConfig(str(model), tensor_parallel_size=DEVICES, **SIZES))
    for output, wanted in zip(generate(second, prompts, params), expected, strict=True):
        assert_same(output, wanted)


@pytest.mark.full
def test_what_four_devices_have_is_saved_and_served_by_any_number(start: Start, model: Path, tmp_path: Path) -> None:
    """Orbax writes them, without any Hugging Face file."""
    prompts, params = [tokens(9, 1), tokens(20, 2)], SamplingParams(temperature=1, seed=2, max_tokens=9, logprobs=2)
    config, mesh = weights.read_config(model), tensor_mesh(4)
    specs = registry.param_specs(registry.from_hf_config(config))
    assert mesh is not None
    shardings = {spec.path: named_sharding(mesh, spec.axes) for spec in specs}.__getitem__
    params_of_four = weights.load(model, specs, None, shardings, matrix_transform(specs))
    weights.save_orbax(tmp_path / "saved", specs, unsplit(specs, params_of_four), config)
    assert {file.name for file in (tmp_path / "saved").iterdir()} == {"config.json", "orbax"}
    expected = generate(start(1), prompts, params)
    for num_devices in (1, 2, 8):
        llm = LLM(str(tmp_path / "saved"), tensor_parallel_size=num_devices, **SIZES)
        for output, wanted in zip(llm.generate(prompts, params, use_tqdm=False), expected, strict=True):
            assert_same(output, wanted, num_devices)
