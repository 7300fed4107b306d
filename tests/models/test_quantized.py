"""The decoder with int8 matrices, against itself in float32 on the same checkpoints."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import weights
from jaxserve.layers.weight_formats import weight_format
from jaxserve.layers.weight_formats.int8 import BlockMatrix
from jaxserve.layers.weight_formats.packed import NativeMatrix
from jaxserve.models import registry
from jaxserve.models.params import matrix_transform, step_bytes
from jaxserve.pallas_kernels import native
from tests.checkpoints import FAMILIES, MIXTURES, hf_dict, write_checkpoint
from tests.models.test_parity import load_logits, run
from tests.parameters import some_by_default
from tests.quant.loaded import all_rows
from tests.random_configs import random_configs

int8 = partial(matrix_transform, form=weight_format("int8"))
load_int8_logits = partial(load_logits, make_transform=int8)


def round_trip(specs):
    """Return a transform to the int8 values of each tensor, in float32."""

    def transform(spec, tensor):
        matrix = int8(specs)(spec, tensor)
        return all_rows(matrix) if isinstance(matrix, BlockMatrix) else matrix

    return transform


def with_noise(specs):
    """Return a transform that adds to each weight as much as rounding may, by chance: half a step of its block."""
    rng = np.random.default_rng(0)

    def transform(spec, tensor):
        matrix = int8(specs)(spec, tensor)
        if not isinstance(matrix, BlockMatrix):
            return matrix
        blocks = np.asarray(tensor.place(), np.float32).reshape(spec.shape[0], matrix.scale.shape[0], -1)
        steps = np.abs(blocks).max(axis=-1, keepdims=True) / 127
        noise = rng.uniform(-0.5, 0.5, blocks.shape).astype(np.float32)
        return jax.device_put((blocks + noise * steps).reshape(spec.shape))

    return transform


@pytest.mark.parametrize("case", [0, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("family", some_by_default(FAMILIES, "gemma3"))
def test_logits_track_float32(tmp_path, family, case):
    """Logits are exact products of the quantised weights, as near those of the float32 model as noise leaves them."""
    write_checkpoint(tmp_path, family, case, **list(random_configs(family, 2, seed=1))[case])
    _, _, exact, _ = load_logits(tmp_path)
    _, _, kept, _ = load_logits(tmp_path, make_transform=round_trip)
    _, _, logits, _ = load_int8_logits(tmp_path)
    np.testing.assert_allclose(logits, kept, rtol=0, atol=1e-4)
    error = np.abs(logits - exact)
    assert error.mean() > 0
    if family not in MIXTURES:  # rounding may choose another expert there
        _, _, noisy, _ = load_logits(tmp_path, make_transform=with_noise)
        assert error.mean() < 2 * np.abs(noisy - exact).mean()  # small models differ by chance


@pytest.mark.full  # the default run has those of int4 in test_parity.py
def test_scanned_layers_match_unrolled(tmp_path):
    write_checkpoint(tmp_path, "qwen3", num_hidden_layers=3, use_sliding_window=False)
    _, _, unrolled, _ = load_int8_logits(tmp_path)
    _, _, scanned, _ = load_int8_logits(tmp_path, stacked=True)
    np.testing.assert_allclose(scanned, unrolled, rtol=0, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_matrices_alone_are_quantised(tmp_path, tied):
    arch = registry.from_hf_config(
        config := hf_dict("qwen2", hidden_size=256, intermediate_size=512, tie_word_embeddings=tied)
    )
    specs = registry.param_specs(arch)
    rng = np.random.default_rng(0)
    params = weights.rows.build_tree(specs, lambda spec: jax.device_put(rng.normal(size=spec.shape).astype(np.float32)))
    weights.save(tmp_path, specs, params, config)
    narrow = weights.load(tmp_path, specs, transform=int8(specs))
    for spec in specs:
        leaf = weights.rows.leaf_at(narrow, spec.path)
        assert leaf.shape == spec.shape
        assert isinstance(leaf, BlockMatrix) == spec.path[-1].endswith(("proj", "embed", "lm_head"))
        assert leaf.dtype == ("int8" if isinstance(leaf, BlockMatrix) else "float32")
    held, wide = (sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) for tree in (narrow, params))
    assert held <= 0.28 * wide
    assert step_bytes(params) == wide - (0 if tied else 4 * arch.vocab_size * arch.hidden_size)
    assert step_bytes(narrow) <= 0.28 * step_bytes(params)


@pytest.mark.parametrize("is_native", [False, *([True] if native.unavailable() is None else [])])
def test_learned_positions_are_not_quantised(tmp_path, is_native):
    """Theirs are a few large values among small ones, which share scales."""
    write_checkpoint(tmp_path, "gpt2")
    specs = registry.param_specs(registry.from_hf_config(weights.read_config(tmp_path)))
    params = weights.load(tmp_path, specs, transform=int8(specs, native=is_native))
    assert isinstance(params["position_embed"], jax.Array)
    assert not isinstance(params["embed"], jax.Array)


def test_saving_says_what_is_wrong(tmp_path):
    write_checkpoint(tmp_path, "llama")
    config = weights.read_config(tmp_path)
    specs = registry.param_specs(registry.from_hf_config(config))
    params = weights.load(tmp_path, specs, transform=int8(specs))
    with pytest.raises(weights.CheckpointError, match="embed int8"):
        weights.save(tmp_path / "saved", specs, params, config)


@pytest.mark.skipif(native.unavailable() is not None, reason="needs the native kernels")
@pytest.mark.parametrize("tied", [False, True])
def test_native_kernels_compute_the_same(tmp_path, tied):
    write_checkpoint(tmp_path, "qwen2", tie_word_embeddings=tied)
    arch, token_ids, logits, _ = load_int8_logits(tmp_path)
    specs = registry.param_specs(arch)
    packed = weights.load(tmp_path, specs, jnp.float32, transform=int8(specs, native=True))
    assert isinstance(packed["layers"][0]["o_proj"], NativeMatrix)
    assert isinstance(packed["embed"], NativeMatrix if tied else BlockMatrix)
    again, _ = run(packed, arch, jnp.asarray(token_ids))
    np.testing.assert_allclose(again, logits, rtol=0, atol=1e-5)
