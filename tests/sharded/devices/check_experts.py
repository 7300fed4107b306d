"""Expert parallelism: whole experts on different devices, each of them over the devices that have it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxserve import weights
from jaxserve.api.config import EngineConfig
from jaxserve.api.sampling_params import SamplingParams
from jaxserve.assembly.driven import DrivenEngine
from jaxserve.layers.sharding import TENSOR, named_sharding, over_devices, tensor_mesh
from jaxserve.layers.weight_formats import weight_format
from jaxserve.models import decoder, registry
from jaxserve.models.arch import ArchConfig
from jaxserve.models.params import device_bytes, matrix_transform, split_array, unsplit
from jaxserve.pallas_kernels import packed_linear
from jaxserve.tools.planner.program import collectives
from jaxserve.weights import stored_tensor
from jaxserve.weights.rows import leaf_at
from tests.checkpoints import reference_logits, write_checkpoint
from tests.e2e.workloads import assert_same, generate, tokens
from tests.models.test_parity import whole_sequence
from tests.parameters import some_by_default
from tests.sharded.devices.sizes import MIXTURE, SHARD_SIZES

Mixture = Callable[[str], tuple[Path, DrivenEngine]]

PACKED = packed_linear.unsupported("float32", "cpu") is None
DEVICES = 4
QUANTIZED_SIZES = MIXTURE | {"moe_intermediate_size": 256, "num_hidden_layers": 1}
FAMILIES = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss"]


def load(path: Path, num_shards: int, **form: Any) -> tuple[ArchConfig, list[Any], Any]:
    """Return the model, its specs and its parameters on four devices."""
    arch = registry.from_hf_config(weights.read_config(path)).divided(DEVICES, num_shards)
    mesh, specs = tensor_mesh(DEVICES, num_expert_shards=num_shards), registry.param_specs(arch)
    assert mesh is not None
    shardings = {spec.path: named_sharding(mesh, spec.axes) for spec in specs}.__getitem__
    return arch, specs, weights.load(path, specs, jnp.float32, shardings, matrix_transform(specs, **form))


def split_logits(path: Path, token_ids: np.ndarray, num_shards: int, **form: Any) -> tuple[np.ndarray, str]:
    """Return logits [T, V] of one sequence, and the program."""
    arch, _, params = load(path, num_shards, **form)
    local, mesh = arch.local(DEVICES), tensor_mesh(DEVICES, num_expert_shards=num_shards)

    def run(params: Any, token_ids: jax.Array) -> jax.Array:
        hidden, _ = decoder.forward(params, local, token_ids, whole_sequence(token_ids))
        return decoder.compute_logits(params, local, hidden)

    assert mesh is not None
    ids = jax.device_put(token_ids, named_sharding(mesh, ()))
    program = over_devices(run, mesh, (params, ids), PartitionSpec(None, TENSOR))
    compiled = jax.jit(program, compiler_options={"xla_backend_optimization_level": 0}).lower(params, ids).compile()
    return np.asarray(compiled(params, ids))[:, : arch.vocab_size], compiled.as_text()


DIVIDED = [f"{family} over {n}" for family in FAMILIES for n in (2, 4)]
QUANTIZED = [f"{form} over {n}" for form in ("int8", "int4") for n in (2, 4)]


def logits_over(path: Path, token_ids: np.ndarray, num_shards: int, **form: Any) -> np.ndarray:
    """Return logits of divided experts; check that they are those of undivided ones, with the same exchange."""
    alone, program = split_logits(path, token_ids, 1, **form | {"native": PACKED})
    logits, divided = split_logits(path, token_ids, num_shards, **form)
    np.testing.assert_allclose(logits, alone, rtol=0, atol=1e-5)
    assert collectives(divided) == collectives(program)
    return logits


@pytest.mark.parametrize("case", some_by_default(DIVIDED, "qwen2_moe over 2", "deepseek_v3 over 4"))
def test_divided_experts_compute_the_same_with_the_same_exchange(tmp_path: Path, case: str) -> None:
    family, num_shards = case.split(" over ")
    model = write_checkpoint(tmp_path, family, **MIXTURE)
    token_ids = np.random.default_rng(0).integers(0, 131, 30).astype(np.int32)
    expected = reference_logits(model, token_ids)
    logits = logits_over(tmp_path, token_ids, int(num_shards), native=PACKED and num_shards == "2")
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
    np.testing.assert_array_equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("case", some_by_default(QUANTIZED, "int4 over 2"))
def test_quantised_experts_are_divided_as_well(tmp_path: Path, case: str) -> None:
    """No block of a quantised expert is cut on any number of devices, but those of other matrices are."""
    form, num_shards = case.split(" over ")
    write_checkpoint(tmp_path, "qwen2_moe", **QUANTIZED_SIZES)
    token_ids = np.random.default_rng(0).integers(0, 131, 30).astype(np.int32)
    logits_over(tmp_path, token_ids, int(num_shards), form=weight_format(form), native=PACKED)


def assert_same_tokens_and_counts(divided: DrivenEngine, alone: DrivenEngine) -> None:
    """Check an engine that has served nothing against one that may have."""
    prompts, params = [tokens(9, n) for n in range(3)], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    before = alone.stats.expert_tokens
    for output, wanted in zip(generate(divided, prompts, params), generate(alone, prompts, params), strict=True):
        assert_same(output, wanted)
    assert divided.stats.expert_tokens == alone.stats.expert_tokens - before
    num_routed = alone.arch.experts.per_token * divided.stats.num_tokens
    layers = [layer.values for layer in divided.stats.expert_tokens.layers]
    assert [(len(layer), sum(layer)) for layer in layers] == [(8, num_routed)] * alone.arch.num_layers
    assert divided.stats.num_padding_tokens > 0, "which have no experts"


def test_an_engine_has_the_same_tokens_and_counts_those_of_experts(mixture: Mixture) -> None:
    path, alone = mixture("qwen3_moe")
    alone.reset_prefix_cache()
    assert_same_tokens_and_counts(
        DrivenEngine(EngineConfig(str(path), **SHARD_SIZES, tensor_parallel_size=DEVICES, expert_parallel_size=2)),
        alone,
    )


@pytest.mark.full
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_quantised_engine_has_the_same_tokens_and_counts_those_of_experts(tmp_path: Path, quantization: str) -> None:
    write_checkpoint(tmp_path, "qwen2_moe", **QUANTIZED_SIZES)
    options = SHARD_SIZES | {"tensor_parallel_size": DEVICES, "quantization": quantization}
    alone, divided = (DrivenEngine(EngineConfig(str(tmp_path), expert_parallel_size=n, **options)) for n in (1, 2))
    assert_same_tokens_and_counts(divided, alone)


@pytest.mark.parametrize("form", ["float", "packed int8"])
def test_a_device_reads_its_own_experts_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    write_checkpoint(tmp_path, "mixtral", **MIXTURE | {"intermediate_size": 128})
    copied = []
    copy = stored_tensor._copy
    monkeypatch.setattr(stored_tensor, "_copy", lambda piece: (copied.append(piece[1].nbytes), copy(piece)))
    options = {"form": weight_format("int8"), "native": PACKED} if form == "packed int8" else {}
    arch, specs, params = load(tmp_path, 2, **options)
    num_copied = sum(copied)
    whole = weights.load(tmp_path, specs, jnp.float32, transform=matrix_transform(specs, **options))
    assert num_copied == sum(4 * int(np.prod(spec.shape)) for spec in specs), "each number once"
    local = {spec.path: spec for spec in registry.param_specs(arch.local(DEVICES))}
    for spec in specs:
        if spec.experts is not None:
            found, all_of_them = (leaf_at(tree, spec.path) for tree in (params, whole))
            assert device_bytes(found) * DEVICES == device_bytes(all_of_them)
            assert np.prod(local[spec.path].shape) * DEVICES == np.prod(spec.shape)


@pytest.mark.full  # check_dp_attention.py saves those of as many shares as devices by default
def test_experts_are_saved_in_their_order(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "hf", "olmoe", **MIXTURE)
    _, specs, params = load(tmp_path / "hf", 2)
    weights.save(tmp_path / "saved", specs, unsplit(specs, params), weights.read_config(tmp_path / "hf"))
    saved, wanted = (weights.load(tmp_path / name, specs, jnp.float32) for name in ("saved", "hf"))
    jax.tree.map(np.testing.assert_array_equal, saved, wanted)
    mesh = tensor_mesh(DEVICES, num_expert_shards=2)
    assert mesh is not None
    for spec in specs:
        placed = split_array(spec, leaf_at(wanted, spec.path), mesh)
        jax.tree.map(np.testing.assert_array_equal, placed, leaf_at(params, spec.path))
