"""int8 by blocks against numpy in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.layers.linear import embed, linear
from jaxserve.layers.stored_rows import multiply_by_slabs, multiply_whole
from jaxserve.layers.weight_formats.int8 import BlockMatrix, block_size, quantize
from tests.parameters import mainly
from tests.quant.loaded import UNOPTIMIZED

multiply = jax.jit(linear, compiler_options=UNOPTIMIZED)


def random_matrix(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def quantized(matrix) -> BlockMatrix:
    q, scale = quantize(matrix)
    return BlockMatrix(jnp.asarray(q), jnp.asarray(scale.T))


def by_block(matrix, in_size):
    """Return the matrix as [out, blocks, B]."""
    return np.asarray(matrix, np.float64).reshape(len(matrix), -1, block_size(in_size))


def dequantized(weight: BlockMatrix):
    q, scale = by_block(weight.q, weight.shape[1]), np.asarray(weight.scale.T, np.float64)
    return (q * scale[..., None]).reshape(weight.shape)


@pytest.mark.parametrize("shape", [(1, 1), (3, 31), (5, 33), (7, 96), (4, 131), (64, 64), (40, 576), (9, 1000)])
@pytest.mark.parametrize("magnitude", [1e-30, 1e-3, 1.0, 1e30])
def test_every_number_is_within_half_a_scale(shape, magnitude):
    matrix = random_matrix(*shape) * np.float32(magnitude)
    weight = quantized(matrix)
    assert (weight.q.dtype, weight.scale.dtype) == ("int8", "float32")
    error = np.abs(by_block(matrix, shape[1]) - by_block(dequantized(weight), shape[1]))
    assert (error <= np.asarray(weight.scale.T, np.float64)[..., None] * (0.5 + 1e-5)).all()


def test_an_outlier_coarsens_its_own_block_alone():
    matrix = random_matrix(4, 256)
    spoiled = matrix.copy()
    spoiled[2, 70] = 1000.0
    error = np.abs(dequantized(quantized(spoiled)) - spoiled)
    assert error[2, 64:128].max() > 0.5
    error[2, 64:128] = 0
    assert error.max() <= np.abs(matrix).max() / 254 * 1.001
    assert dequantized(quantized(spoiled))[2, 70] == pytest.approx(1000.0, rel=1e-6)


def test_zeros_and_constants_are_exact():
    matrix = np.zeros((3, 128), np.float32)
    matrix[1] = -0.37
    matrix[2, 64:] = np.float32(1e-39)  # below float32's normal range
    result = dequantized(quantized(matrix))
    np.testing.assert_array_equal(result[0], 0)
    np.testing.assert_allclose(result[1], -0.37, rtol=1e-6)
    assert np.abs(result[2] - matrix[2]).max() <= np.float32(1e-39)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_so(bad):
    matrix = random_matrix(2, 64)
    matrix[1, 5] = bad
    y = multiply(np.ones((1, 64), np.float32), quantized(matrix))
    assert np.isfinite(y[0, 0])
    assert not np.isfinite(y[0, 1])


def test_block_sizes():
    assert [block_size(n) for n in (64, 576, 4096, 896, 96, 160, 1000)] == [64, 64, 64, 64, 48, 80, 40]
    assert [block_size(n) for n in (1, 31, 131, 2 * 131)] == [1, 31, 131, 262]  # whole rows
    for n in range(1, 5000):
        assert n % block_size(n) == 0


CPU_SHAPES = [(1, 8), (7, 131), (300, 1536), (3, 120_000)]


@pytest.mark.parametrize("shape", mainly(CPU_SHAPES, (200, 1536), (512, 256)))
@pytest.mark.parametrize("nums_tokens", mainly([(1, 16, 17)], (2, 40)))
def test_products(shape, nums_tokens):
    weight = quantized(random_matrix(*shape))
    inputs = [random_matrix(num_tokens, shape[1], seed=1) for num_tokens in nums_tokens]

    @partial(jax.jit, compiler_options=UNOPTIMIZED)
    def products(arrays, inputs):
        return [[form(weight.dequantize, arrays, x) for form in (multiply_by_slabs, multiply_whole)] for x in inputs]

    for x, found in zip(inputs, products(weight.rows_arrays(), inputs), strict=True):
        expected = x.astype(np.float64) @ dequantized(weight).T
        for y in found:
            assert y.dtype == "float32"
            np.testing.assert_allclose(y, expected, rtol=0, atol=3e-6 * shape[1] ** 0.5 * np.abs(x).max())


def test_linear_adds_the_bias_in_the_dtype_of_the_activations():
    weight, bias = quantized(random_matrix(20, 64)), random_matrix(20, seed=2)
    x = random_matrix(3, 64, seed=1).astype(jnp.bfloat16)
    expected = x.astype(np.float64) @ dequantized(weight).T + bias
    y = multiply(x, weight, bias=bias)
    assert y.dtype == "bfloat16"
    np.testing.assert_allclose(np.asarray(y, np.float32), expected, rtol=2**-7, atol=2**-5)
    assert jax.eval_shape(partial(linear, dtype=jnp.float32), x, weight).dtype == "float32"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_embedded_rows_are_those_of_the_matrix(dtype):
    matrix = random_matrix(10, 96)
    ids = np.array([3, 9, 3, 0, 12, -1], np.int32)
    tables = [quantized(matrix), jnp.asarray(matrix)]

    @partial(jax.jit, compiler_options=UNOPTIMIZED)
    def look_up(ids, tables):
        return [embed(ids, table, dtype=dtype) for table in tables]

    for rows, reference in zip(look_up(ids, tables), (dequantized(tables[0]), matrix), strict=True):
        assert rows.dtype == dtype
        expected = reference[[3, 9, 3, 0, 9, 9]]
        np.testing.assert_allclose(np.asarray(rows, np.float32), expected, rtol=2**-8 if dtype == "bfloat16" else 1e-6)


@pytest.mark.parametrize("num_tokens", mainly([1, 64], 8))
def test_no_product_holds_the_matrix_in_float(num_tokens):
    weight, x = quantized(random_matrix(8192, 576)), np.ones((num_tokens, 576), np.float32)
    memory = jax.jit(linear).lower(x, weight).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.2 * 4 * weight.q.size + 2 * 4 * num_tokens * 8192
    table = jax.jit(embed).lower(np.zeros(num_tokens, np.int32), weight).compile()
    assert table.memory_analysis().temp_size_in_bytes < 0.05 * weight.q.size
