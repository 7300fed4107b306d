"""Errors of quantised pages."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from jaxserve.pallas_kernels.ragged_paged_attention.quantized import INT4, QUANTIZED_MAX, decode, encode
from tests.kernels import attention_reference
from tests.kernels.attention_runs import UNOPTIMIZED, WITH_SCALES
from tests.parameters import mainly


@partial(jax.jit, static_argnums=1, compiler_options=UNOPTIMIZED)
def there_and_back(x, dtype):
    """Return vectors as a pool stores them, and the vectors that these stand for."""
    stored = encode(x, dtype)
    return stored, decode(stored)


@pytest.mark.parametrize("dtype", WITH_SCALES)
def test_quantized_numbers_are_near(dtype):
    """Errors are within half a step, of the scale for int8 and of each element for fp8; no element leaves the range."""
    x = np.random.default_rng(0).normal(0, 10.0 ** np.arange(-3, 4), size=(50, 6, 7)).swapaxes(1, 2).astype("float32")
    x[0] = 0
    stored, found = jax.tree.map(np.asarray, there_and_back(x, jnp.dtype(dtype)))
    scale = stored.scales.astype(np.float32)[..., None]
    step = scale if dtype == "int8" else np.maximum(np.abs(x) / 8, scale / 2**9)
    assert (np.abs(found - x) <= step * (0.5 + 1e-5)).all()
    assert not found[0].any()
    most, largest = QUANTIZED_MAX[dtype], np.abs(x[1:]).max(axis=-1, keepdims=True)
    assert stored.scales.dtype == jnp.bfloat16
    assert (scale[1:] * most >= largest * (1 - 1e-6)).all()
    assert (scale[1:] * most <= largest * (1 + 2**-7)).all()


@pytest.mark.parametrize("head_dim", mainly([96], 8, 64, 192))
def test_int4_vectors_are_near(head_dim):
    """Errors of rotated vectors are within half a step of their group, beside the rounding of its numbers."""
    x = np.random.default_rng(0).normal(3, 10.0 ** np.arange(-3, 4), size=(head_dim, 50, 7)).T.astype("float32")
    x[0] = 0
    block, size = head_dim & -head_dim, 64 if head_dim % 64 == 0 else head_dim
    stored, decoded = there_and_back(x, INT4)
    assert stored.nbytes == x.size // 2 + x.size // size * 4
    rotated = x.astype(float).reshape(-1, block) @ scipy.linalg.hadamard(block)
    found, rotated = (np.reshape(each, (7, 50, -1, size)) for each in (decoded, rotated))
    step = np.ptp(rotated, axis=-1, keepdims=True) / 15
    rounding = np.abs(rotated).max(axis=-1, keepdims=True) * 2**-8
    assert (np.abs(found - rotated) <= step / 2 + 2 * rounding).all()
    assert not found[0].any()


@pytest.mark.parametrize("dtype", [*WITH_SCALES, "int4"])
def test_the_reference_stores_the_same(dtype):
    x = np.random.default_rng(0).normal(3, 10.0 ** np.arange(-3, 4), size=(96, 50, 7)).T.astype("float32")
    stored, _ = there_and_back(x, jnp.dtype(dtype))
    jax.tree.map(np.testing.assert_array_equal, stored, attention_reference.encode(x, jnp.dtype(dtype)))


@pytest.mark.parametrize("broken", mainly([np.nan], np.inf))
@pytest.mark.parametrize("dtype", [*WITH_SCALES, "int4"])
def test_what_is_not_finite_stays_so_when_quantized(dtype, broken):
    x = np.ones((600, 3, 32), np.float32)
    x[1, 2, 3] = broken
    _, found = there_and_back(x, jnp.dtype(dtype))
    is_broken = np.arange(600 * 3).reshape(600, 3) == 5
    np.testing.assert_array_equal(np.isnan(found), np.broadcast_to(is_broken[..., None], x.shape))
