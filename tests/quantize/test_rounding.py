"""Codes and scales of matrices, against numpy in float64 and torch's casts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.tools.quantizer.grid import Grid
from jaxserve.tools.quantizer.layout import pack
from jaxserve.tools.quantizer.rounding import gptq, output_error, round_to_nearest, search_scales
from tests.oracles import torch

FLOAT32 = np.dtype(np.float32)


def int4(columns, bits=4):
    return Grid(bits, False, 1, columns, FLOAT32)


scales = jax.jit(lambda weight, grid: grid.scales(weight), static_argnums=1)


def problem(seed, out=24, size=160, tokens=300, dtype=np.float32):
    """Return weights and the Gram matrix of correlated inputs of very different sizes, one of which is always zero."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(tokens, size)) @ rng.normal(size=(size, size)) * np.exp(rng.normal(size=size))
    x[:, 7] = 0
    weight = rng.normal(size=(out, size)) * np.exp(rng.normal(size=(out, 1)))
    return weight.astype(dtype), (x.T @ x / tokens).astype(dtype)


def textbook_gptq(weight, gram, scale, grid):
    """Round the columns one by one, and solve for the remaining ones anew after each (optimal brain quantisation)."""
    weight, size = weight.copy(), len(gram)
    half = 2 ** (grid.bits - 1)
    order = np.argsort(-np.diagonal(gram), kind="stable")
    hessian = gram + np.diag(np.where(np.diagonal(gram) == 0, 1, 0.01 * np.diagonal(gram).mean()))
    codes = np.zeros(weight.shape, np.int64)
    for step, column in enumerate(order):
        rest = order[step:]
        inverse = np.linalg.inv(hessian[np.ix_(rest, rest)])
        own = scale[:, column // (grid.columns or size)]
        codes[:, column] = np.clip(np.round(weight[:, column] / own), -half, half - 1)
        error = (weight[:, column] - codes[:, column] * own) / inverse[0, 0]
        weight[:, rest] -= np.outer(error, inverse[0])
    return codes


@pytest.mark.parametrize("columns", [32, pytest.param(None, marks=pytest.mark.full)])
def test_gptq_is_the_textbook_formula(columns):
    weight, gram = problem(0, dtype=np.float64)  # more columns than a block
    grid = int4(columns)
    with jax.enable_x64(True):
        scale = scales(jnp.asarray(weight), grid)
        codes = np.asarray(gptq(jnp.asarray(weight), jnp.asarray(gram), scale, grid))
        expected = textbook_gptq(weight, gram, np.asarray(scale), grid)
    np.testing.assert_array_equal(codes, expected)
    assert len(np.unique(codes)) == 16


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2))])
def test_errors_fall_from_nearest_to_searched_scales_to_gptq(seed):
    weight, gram = problem(seed)
    grid = int4(32)

    @jax.jit
    def errors(weight, gram):
        largest, searched = grid.scales(weight), search_scales(weight, gram, grid)
        rounded = {
            "nearest": round_to_nearest(weight, grid),
            "searched": (grid.encode(weight, searched), searched),
            "spread": (gptq(weight, gram, searched, grid), searched),
            "spread at the largest": (gptq(weight, gram, largest, grid), largest),
        }
        return {name: output_error(weight - grid.decode(*own), gram) for name, own in rounded.items()}

    found = errors(weight, gram)
    assert found["spread"] < 0.5 * found["searched"] < 0.5 * found["nearest"]
    assert found["spread at the largest"] < 0.5 * found["nearest"]


def test_searched_scales_are_the_best_of_every_region():
    weight, gram = problem(3, out=5, size=64)
    grid = int4(32)
    largest, found = scales(weight, grid), search_scales(jnp.asarray(weight), jnp.asarray(gram), grid)
    rounded = jax.jit(grid.rounded)

    def errors(scale):
        difference = (weight - np.asarray(rounded(weight, scale))).astype(np.float64).reshape(5, 2, 32)
        own = gram.astype(np.float64).reshape(2, 32, 2, 32)[[0, 1], :, [0, 1]]
        return np.einsum("ogi,gij,ogj->og", difference, own, difference)

    best = errors(found)
    for ratio in np.arange(0.45, 1.1, 0.025):
        assert (best <= errors(np.asarray(largest) * np.float32(ratio)) * (1 + 1e-4)).all()


def test_grids_round_as_torch_does():
    weight = np.random.default_rng(0).normal(size=(200, 130)).astype(np.float32)
    weight[3] = 0
    weight[140:, 128:] *= 1e-3
    for dtype in (np.float32, jnp.bfloat16):
        blocks = Grid(8, True, 128, 128, np.dtype(dtype))  # blocks at the edges are smaller
        codes, scale = map(np.asarray, round_to_nearest(jnp.asarray(weight), blocks))
        assert scale.shape == (2, 2)
        for i, j in np.ndindex(2, 2):
            rows, columns = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            own = torch.tensor(weight[rows, columns].copy())
            expected_scale = (own.abs().max() / 448).to(torch.bfloat16 if dtype != np.float32 else torch.float32)
            np.testing.assert_allclose(scale[i, j], expected_scale.float().item(), rtol=2**-22)
            expected = (own / float(scale[i, j])).clamp(-448, 448).to(torch.float8_e4m3fn).float()
            np.testing.assert_array_equal(codes[rows, columns].astype(np.float32), expected.numpy())
    codes, scale = map(np.asarray, round_to_nearest(jnp.asarray(weight), int4(None, bits=8)))
    expected_scale = torch.tensor(weight).abs().amax(1, keepdim=True) / 127.5
    expected_scale[expected_scale == 0] = 1
    np.testing.assert_allclose(scale, expected_scale.numpy(), rtol=2**-22)  # XLA multiplies by the reciprocal
    largest = np.abs(weight) == np.abs(weight).max(1, keepdims=True)  # the edge between two codes, by the convention
    expected = (torch.tensor(weight) / torch.tensor(scale)).round().clamp(-128, 127).numpy()
    np.testing.assert_array_equal(codes[~largest], expected[~largest])
    assert np.isin(codes[largest], [-128, -127, 0, 127]).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_words_begin_with_the_lowest_bits(bits):
    half = 2 ** (bits - 1)
    codes = np.random.default_rng(0).integers(-half, half, (5, 43)).astype(np.int8)
    words = pack(codes, bits)
    assert words.shape == (5, -(-43 * bits // 32))
    for row, column in np.ndindex(codes.shape):
        word, place = divmod(column * bits, 32)
        assert (int(words[row, word]) >> place) % 2**bits - half == codes[row, column]
