"""Errors of quantised pages."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from jaxserve.pallas_kernels.ragged_paged_attention.quantized import (
    INT4,
    QUANTIZED_MAX,
    decode,
    dequantize,
    encode,
    quantize,
)
from tests.kernels.attention_runs import WITH_SCALES
from tests.parameters import mainly


@pytest.mark.parametrize("dtype", WITH_SCALES)
def test_quantized_numbers_are_near(dtype):
    """Errors are within half a step, of the scale for int8 and of each element for fp8; no element leaves the range."""
    x = np.random.default_rng(0).normal(0, 10.0 ** np.arange(-3, 4), size=(50, 6, 7)).swapaxes(1, 2).astype("float32")
    x[0] = 0
    values, scales = quantize(jnp.asarray(x), jnp.dtype(dtype))
    found, scale = np.asarray(dequantize(values, scales)), np.asarray(scales, np.float32)[..., None]
    step = scale if dtype == "int8" else np.maximum(np.abs(x) / 8, scale / 2**9)
    assert (np.abs(found - x) <= step * (0.5 + 1e-5)).all()
    assert not found[0].any()
    most, largest = QUANTIZED_MAX[dtype], np.abs(x[1:]).max(axis=-1, keepdims=True)
    assert scales.dtype == jnp.bfloat16
    assert (scale[1:] * most >= largest * (1 - 1e-6)).all()
    assert (scale[1:] * most <= largest * (1 + 2**-7)).all()


@pytest.mark.parametrize("head_dim", mainly([96], 8, 64, 192))
def test_int4_vectors_are_near(head_dim):
    """Errors of rotated vectors are within half a step of their group, beside the rounding of its numbers."""
    x = np.random.default_rng(0).normal(3, 10.0 ** np.arange(-3, 4), size=(head_dim, 50, 7)).T.astype("float32")
    x[0] = 0
    block, size = head_dim & -head_dim, 64 if head_dim % 64 == 0 else head_dim
    stored = encode(jnp.asarray(x), INT4)
    assert stored.nbytes == x.size // 2 + x.size // size * 4
    rotated = x.astype(float).reshape(-1, block) @ scipy.linalg.hadamard(block)
    found, rotated = (np.reshape(each, (7, 50, -1, size)) for each in (decode(stored), rotated))
    step = np.ptp(rotated, axis=-1, keepdims=True) / 15
    rounding = np.abs(rotated).max(axis=-1, keepdims=True) * 2**-8
    assert (np.abs(found - rotated) <= step / 2 + 2 * rounding).all()
    assert not found[0].any()


@pytest.mark.parametrize("broken", mainly([np.nan], np.inf))
@pytest.mark.parametrize("dtype", [*WITH_SCALES, "int4"])
def test_what_is_not_finite_stays_so_when_quantized(dtype, broken):
    x = jnp.ones((600, 3, 32)).at[1, 2, 3].set(broken)
    found = np.asarray(decode(encode(x, jnp.dtype(dtype))))
    is_broken = np.arange(600 * 3).reshape(600, 3) == 5
    np.testing.assert_array_equal(np.isnan(found), np.broadcast_to(is_broken[..., None], x.shape))
