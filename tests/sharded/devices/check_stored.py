"""Quantised checkpoints over several devices: blocks and groups that a device has only a part of."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxserve import weights
from jaxserve.layers.sharding import MODEL, named_sharding, over_devices, tensor_mesh
from jaxserve.layers.weight_formats import weight_format
from jaxserve.models import decoder, registry
from jaxserve.models.params import matrix_transform
from jaxserve.pallas_kernels import packed_linear
from jaxserve.weights import CheckpointError
from tests.checkpoints import reference_logits
from tests.models.test_parity import whole_sequence
from tests.parameters import mainly, some_by_default
from tests.quant.fake_activations import FAKE_INT8
from tests.quant.quantized_checkpoints import CASES, write_quantized
from tests.quant.test_stored import NATIVE
from tests.quant.test_stored_experts import assert_near
from tests.quant.test_stored_experts import write as write_experts
from tests.weights.gguf_files import write_gguf


def split(path: Path, n: int, *, native: bool, num_shards: int = 1, with_rows: bool = False) -> tuple[Any, Any, Any]:
    """Return the model, the mesh and parameters over n devices, of which sets have `num_shards` shares of experts.

    `with_rows` gives these sets rows of their own, too.
    """
    num_data_shards = num_shards if with_rows else 1
    arch = registry.from_hf_config(weights.read_config(path)).divided(n, num_shards, num_data_shards)
    mesh = tensor_mesh(n, num_expert_shards=num_shards, num_data_shards=num_data_shards)
    assert mesh is not None
    specs = registry.param_specs(arch)
    shardings = {spec.path: named_sharding(mesh, spec.axes) for spec in specs}.__getitem__
    transform = matrix_transform(specs, weight_format(None, arch.schemes), native=native)
    return arch, mesh, weights.load(path, specs, jnp.float32, shardings, transform, schemes=arch.schemes)


def split_logits(path: Path, token_ids: np.ndarray, n: int, *, native: bool = False, **shares: Any) -> np.ndarray:
    """Return logits [T, V] of one sequence over n devices; the same sequence in each share that has rows of its own."""
    arch, mesh, params = split(path, n, native=native, **shares)

    def run(params: dict, token_ids: jax.Array) -> jax.Array:
        hidden, _ = decoder.forward(params, arch.local(n), token_ids, whole_sequence(token_ids))
        return decoder.compute_logits(params, arch.local(n), hidden)

    ids = jax.device_put(token_ids, named_sharding(mesh, ()))
    program = over_devices(run, mesh, (params, ids), PartitionSpec(None, MODEL))
    logits = jax.jit(program, compiler_options={"xla_backend_optimization_level": 0})(params, ids)
    return np.asarray(logits)[:, : arch.vocab_size]


# Each device has 80 or 40 columns of the output projection, and 112 or 56 of the down projection.
NAMES = ["ct-fp8-tensor", "ct-fp8-channel", "fp8-block", "ct-nvfp4", "ct-mxfp4-weights"]
NAMES += ["ct-int4-zeros", "ct-int8-zeros", "ct-w8a8", "gptq-order", "gptq-order-wide"]
NAMES += ["modelopt-int4-awq", "awq", "ct-w8a8-zeros", "ct-mxfp4"]
SOME = ("gptq-order over 2", "ct-nvfp4 over 4")

CASES_OVER = [f"{name} over {n}" for name in NAMES for n in (2, 4)]
if packed_linear.unsupported("int4", "cpu") is None:
    INTEGERS: tuple[str, ...] = ("gptq-wide", "ct-int4-channel", "ct-int4-zeros", "awq", "ct-int8-weights")
    INTEGERS += ("gptq-order", "gptq-order-wide", "modelopt-int4-awq", "ct-w8a8-zeros")
    CASES_OVER += [f"{name} over {n} by native kernels" for name in INTEGERS for n in (2, 4)]
    SOME += ("awq over 4 by native kernels", "gptq-order over 2 by native kernels")


@pytest.mark.parametrize("case", some_by_default(CASES_OVER, *SOME))
def test_logits_are_those_of_one_device(tmp_path: Path, case: str) -> None:
    name, _, n, *native = case.split(maxsplit=3)
    model = write_quantized(tmp_path, CASES[name], num_hidden_layers=1)
    token_ids = np.random.default_rng(0).integers(0, 131, 20).astype(np.int32)
    expected = reference_logits(model, token_ids)
    found = split_logits(tmp_path, token_ids, int(n), native=bool(native))
    if CASES[name].fake in FAKE_INT8:  # the last bit of an input may decide on a whole step: see test_stored.py
        assert np.abs(found - expected).mean() < 0.01 * np.abs(expected).max()
    else:
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


EXPERTS = ["gpt_oss mxfp4", "qwen3_moe fp8-block", "deepseek_v3 fp8-block", "qwen3_moe ct-int4", "qwen3_moe gptq"]
EXPERTS += ["qwen3_moe gptq-order"]
EXPERTS_OVER = [f"{pair} over {n}" for pair in EXPERTS for n in ("2", "4", "4 in 2 shares")]
EXPERTS_OVER += [f"qwen3_moe ct-w8a8 over {n}" for n in ("2", "4 in 2 shares", "4 in 2 shares with rows")]
EXPERTS_OVER += [f"{pair} over 4 in 2 shares with rows" for pair in EXPERTS]
SOME_EXPERTS = ("gpt_oss mxfp4 over 4", "deepseek_v3 fp8-block over 4 in 2 shares")


@pytest.mark.parametrize("case", some_by_default(EXPERTS_OVER, *SOME_EXPERTS))
def test_experts_are_split_as_well(tmp_path: Path, case: str) -> None:
    """Devices that have different experts have rows of different tokens, and no scale of activations in common."""
    pair, form = case.split(" over ")
    n, num_shards = (int(number) for number in [*filter(str.isdigit, form.split()), "1"][:2])
    model, name = write_experts(tmp_path, pair)
    token_ids = np.random.default_rng(0).integers(0, 131, 20).astype(np.int32)
    expected = reference_logits(model, token_ids)
    for native in {False, name in NATIVE and packed_linear.unsupported("int4", "cpu") is None}:
        shares = {"num_shards": num_shards, "with_rows": form.endswith("with rows")}
        assert_near(split_logits(tmp_path, token_ids, n, native=native, **shares), expected, name)


GGUF_OVER = [f"{kind} over {n}" for kind in ("Q4_0", "Q4_K", "Q8_0", "Q6_K") for n in (2, 4)]
SOME_GGUF: tuple[str, ...] = ("Q4_K over 2",)
if packed_linear.unsupported("int4", "cpu") is None:
    GGUF_OVER += [f"{case} by native kernels" for case in GGUF_OVER]
    SOME_GGUF += ("Q4_0 over 4 by native kernels",)


@pytest.mark.parametrize("case", some_by_default(GGUF_OVER, *SOME_GGUF))
def test_logits_of_gguf_files_are_those_of_one_device(tmp_path: Path, case: str) -> None:
    """Devices have parts of blocks and of groups of 32 columns, and a padded part of the quantised vocabulary."""
    kind, _, n, *native = case.split(maxsplit=3)
    model = write_gguf(tmp_path / "model.gguf", kind, num_hidden_layers=1, num_key_value_heads=4)
    token_ids = np.random.default_rng(0).integers(0, 131, 20).astype(np.int32)
    found = split_logits(tmp_path, token_ids, int(n), native=bool(native))
    np.testing.assert_allclose(found, reference_logits(model, token_ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", mainly(["fp8-block over 4", "gptq-order over 8"], "fp8-block over 2", "awq over 8"))
def test_arrays_that_are_on_all_devices_are_the_same_there(tmp_path: Path, case: str) -> None:
    name, n = case.split(" over ")  # each device has one group of the down projection, or a part of one
    write_quantized(tmp_path, CASES[name], num_hidden_layers=1, intermediate_size=256)
    _, _, params = split(tmp_path, int(n), native=False)
    for array in jax.tree.leaves(params):
        if array.is_fully_replicated:
            first, *others = (np.asarray(shard.data) for shard in array.addressable_shards)
            assert all(np.array_equal(first, other) for other in others), array.shape


def test_odd_parts_of_packed_rows_are_refused(tmp_path: Path) -> None:
    write_quantized(tmp_path, CASES["ct-int4-channel"], num_hidden_layers=1, intermediate_size=72)
    with pytest.raises(CheckpointError, match=r"even number of columns of .*down_proj.* got 9 of 72"):
        split_logits(tmp_path, np.arange(5, dtype=np.int32), 8)


def test_scales_of_groups_that_are_not_cut_are_those_of_one_device(tmp_path: Path) -> None:
    """Each device has one group of two."""
    write_quantized(tmp_path, CASES["gptq-wide"], num_hidden_layers=1, intermediate_size=256)
    arch, _, params = split(tmp_path, 2, native=False)
    specs = registry.param_specs(arch)
    transform = matrix_transform(specs, weight_format(None, arch.schemes))
    whole = weights.load(tmp_path, specs, jnp.float32, transform=transform, schemes=arch.schemes)
    found, expected = (tree["layers"][0]["down_proj"].scale for tree in (params, whole))
    np.testing.assert_array_equal(found, expected)
