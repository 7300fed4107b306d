"""Expert parallelism: whole experts on different devices, each of them over the devices that have it."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxserve import weights
from jaxserve.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.models import decoder, registry
from jaxserve.models.arch import ArchConfig
from jaxserve.models.params import device_bytes, matrix_transform, split_array, unsplit
from jaxserve.pallas_kernels import packed_linear
from jaxserve.planner.program import collectives
from jaxserve.quant import weight_format
from jaxserve.sampling_params import SamplingParams
from jaxserve.sharding import TENSOR, named_sharding, over_devices, tensor_mesh
from jaxserve.weights import stored_tensor
from jaxserve.weights.rows import leaf_at
from tests.checkpoints import reference_logits, write_checkpoint
from tests.e2e.workloads import assert_same, generate, tokens
from tests.models.test_parity import attend
from tests.parameters import some_by_default
from tests.sharded.devices.sizes import MIXTURE, SIZES

pytestmark = pytest.mark.usefixtures("fewer_programs")

PACKED = packed_linear.unsupported("float32", "cpu") is None
DEVICES = 4
FAMILIES = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss"]


def load(path: Path, num_shards: int, **form: Any) -> tuple[ArchConfig, list[Any], Any]:
    """Return the model, its specs and its parameters on four devices."""
    arch = registry.from_hf_config(weights.read_config(path)).with_expert_shards(num_shards)
    mesh, specs = tensor_mesh(DEVICES, num_expert_shards=num_shards), registry.param_specs(arch)
    assert mesh is not None
    shardings = {spec.path: named_sharding(mesh, spec.axes) for spec in specs}.__getitem__
    return arch, specs, weights.load(path, specs, jnp.float32, shardings, matrix_transform(specs, **form))


def split_logits(path: Path, token_ids: np.ndarray, num_shards: int, **form: Any) -> tuple[np.ndarray, str]:
    """Return logits [T, V] of one sequence, and the program."""
    arch, _, params = load(path, num_shards, **form)
    local, mesh = arch.local(DEVICES), tensor_mesh(DEVICES, num_expert_shards=num_shards)

    def run(params: Any, token_ids: jax.Array) -> jax.Array:
        hidden, _ = decoder.forward(params, local, token_ids, jnp.arange(len(token_ids)), attend, (jnp.int32(0), {}))
        return decoder.compute_logits(params, local, hidden)

    assert mesh is not None
    ids = jax.device_put(token_ids, named_sharding(mesh, ()))
    program = over_devices(run, mesh, (params, ids), PartitionSpec(None, TENSOR))
    compiled = jax.jit(program, compiler_options={"xla_backend_optimization_level": 0}).lower(params, ids).compile()
    return np.asarray(compiled(params, ids))[:, : arch.vocab_size], compiled.as_text()


@pytest.mark.parametrize("family", some_by_default(FAMILIES, "qwen2_moe", "deepseek_v3"))
def test_divided_experts_compute_the_same_with_the_same_exchange(tmp_path: Path, family: str) -> None:
    model = write_checkpoint(tmp_path, family, **MIXTURE)
    token_ids = np.random.default_rng(0).integers(0, 131, 30).astype(np.int32)
    expected = reference_logits(model, token_ids)
    alone, program = split_logits(tmp_path, token_ids, 1, native=PACKED)
    for num_shards, native in ((2, PACKED), (4, False)):
        logits, divided = split_logits(tmp_path, token_ids, num_shards, native=native)
        np.testing.assert_allclose(logits, alone, rtol=0, atol=1e-5)
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
        np.testing.assert_array_equal(logits.argmax(-1), expected.argmax(-1))
        assert collectives(divided) == collectives(program)


@pytest.mark.parametrize("quantization", some_by_default(["none", "int8", "int4"], "int4"))
def test_an_engine_has_the_same_tokens_and_counts_those_of_experts(tmp_path: Path, quantization: str) -> None:
    """No block of a quantised expert is cut on any number of devices, but those of other matrices are."""
    write_checkpoint(tmp_path, "qwen2_moe", **MIXTURE | {"moe_intermediate_size": 256, "num_hidden_layers": 1})
    is_exact = quantization == "none"
    num_devices, multi_step = (1, 5) if is_exact else (DEVICES, 1)  # one program for several steps compiles longest
    prompts, params = [tokens(9, n) for n in range(3)], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    options = SIZES | {"max_num_batched_tokens": 8, "multi_step": multi_step, "count_expert_tokens": True}
    options["quantization"] = None if is_exact else quantization
    alone, divided = (
        Engine(EngineConfig(str(tmp_path), tensor_parallel_size=n, expert_parallel_size=num_shards, **options))
        for n, num_shards in ((num_devices, 1), (DEVICES, 2))
    )
    for output, wanted in zip(generate(divided, prompts, params), generate(alone, prompts, params), strict=True):
        assert_same(output, wanted)
    assert divided.stats.expert_tokens == alone.stats.expert_tokens
    per_token = alone.arch.experts.per_token
    layers = [layer.values for layer in divided.stats.expert_tokens.layers]
    assert [(len(layer), sum(layer)) for layer in layers] == [(8, per_token * divided.stats.num_tokens)]
    assert divided.stats.num_padding_tokens > 0, "which have no experts"


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
