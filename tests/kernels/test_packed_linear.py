from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.pallas_kernels import native, packed_linear
from tests.parameters import mainly

reason = packed_linear.unsupported("float32", jax.default_backend())
INSTRUCTION_SETS = native.instruction_sets() if reason is None else []
pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))


UNOPTIMIZED = {"xla_backend_optimization_level": 0}  # options that compile programs soon


@partial(jax.jit, static_argnames="eps", compiler_options=UNOPTIMIZED)
def product(matrix, x, norm, eps, operands):
    return packed_linear.multiply(matrix, x, rms_norm=None if norm is None else (norm, eps), **operands)


def multiply(matrix, x, *, rms_norm=(None, None), **operands):
    """Return a product that is computed when this returns, by the instruction set that is in use."""
    return np.asarray(product(matrix, x, *rms_norm, operands))


unpack = jax.jit(packed_linear.unpack, compiler_options=UNOPTIMIZED)
rows = jax.jit(packed_linear.rows, compiler_options=UNOPTIMIZED)
SHAPES = [(16, 4), (17, 1), (40, 33), (64, 256), (200, 96), (31, 1024)]


def matrix(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("num_tokens", mainly([1, 5, 12, 13, 130], 2, 37))
@pytest.mark.parametrize("shape", SHAPES)
def test_products_match_numpy(shape, num_tokens):
    weight, x = matrix(shape), matrix((num_tokens, shape[1]), 1)
    y = multiply(packed_linear.pack(jnp.asarray(weight)), jnp.asarray(x))
    expected = x.astype(np.float64) @ weight.T.astype(np.float64)
    np.testing.assert_allclose(y, expected, rtol=0, atol=2e-6 * shape[1] ** 0.5 * np.abs(expected).max())


@pytest.mark.parametrize("num_tokens", [1, 7])
def test_bfloat16_weights_are_read_exactly(num_tokens):
    weight = jnp.asarray(matrix((48, 64)), jnp.bfloat16)
    x = jnp.asarray(matrix((num_tokens, 64), 1))
    half = multiply(packed_linear.pack(weight), x)
    whole = multiply(packed_linear.pack(weight.astype(jnp.float32)), x)
    np.testing.assert_array_equal(half, whole)


@pytest.mark.parametrize("num_blocks", [1, 2, 8])
@pytest.mark.parametrize("num_tokens", [1, 3, 20])
def test_int8_weights_are_scaled_by_block(num_blocks, num_tokens):
    weight = np.random.default_rng(0).integers(-127, 128, (40, 64)).astype(np.int8)
    scales = np.abs(matrix((40, num_blocks), 1)) / 100
    x = matrix((num_tokens, 64), 2)
    real = (weight.reshape(40, num_blocks, -1) * scales[:, :, None].astype(np.float64)).reshape(40, 64)
    packed = packed_linear.pack(jnp.asarray(weight), jnp.asarray(scales))
    np.testing.assert_allclose(multiply(packed, jnp.asarray(x)), x @ real.T, rtol=0, atol=1e-4)
    ids = jnp.asarray([39, 0, 17])
    np.testing.assert_allclose(rows(packed, ids), real[ids], rtol=1e-6)


def quantized(shape, num_groups, dtype, seed=0):
    """Return elements, scales, and the matrix that they stand for without zero points, in float64."""
    rng = np.random.default_rng(seed)
    low, high = {"int8": (-127, 127), "int4": (-8, 7), "uint4": (0, 15)}[dtype]
    elements = rng.integers(low, high + 1, shape).astype(np.int8).astype(jnp.dtype(dtype))
    return elements, rng.uniform(0.5, 2, (shape[0], num_groups)).astype(np.float32) / (high - low)


def dequantized(elements, scales, zeros=0.0):
    groups = elements.astype(np.float64).reshape(*scales.shape, -1)
    return ((groups - np.asarray(zeros, np.float64)[..., None]) * scales[..., None]).reshape(elements.shape)


GROUPED = [
    ((40, 64), 2),
    ((17, 33), 1),
    ((33, 66), 2),
    ((50, 520), 40),
    ((24, 384), 3),
    ((35, 602), 2),
]  # odd sizes, too


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", ["int8", "int4", "uint4", "zeros"])
@pytest.mark.parametrize(("shape", "num_groups"), GROUPED)
def test_quantised_products_match_numpy(shape, num_groups, dtype, instruction_set):
    """Everything that is fused with them, for a lone tile and for blocks of columns."""
    has_zeros = dtype == "zeros"
    elements, scales = quantized(shape, num_groups, "uint4" if has_zeros else dtype)
    zeros = np.random.default_rng(1).integers(0, 16, scales.shape) if has_zeros else None
    real = dequantized(elements, scales, zeros if has_zeros else np.zeros(scales.shape))
    packed = packed_linear.pack(elements, scales, zeros)
    norm, bias = matrix(shape[1:], 3), matrix(shape[:1], 5)
    for num_tokens in (1, 3, 20):
        x, residual = matrix((num_tokens, shape[1]), 2), matrix((num_tokens, shape[0]), 4)
        expected = rms_normed(x, norm, 1e-5) @ real.T + bias + residual
        with native.using(instruction_set):
            operands = {"bias": jnp.asarray(bias), "residual": jnp.asarray(residual)}
            y = multiply(packed, jnp.asarray(x), rms_norm=(jnp.asarray(norm), 1e-5), **operands)
        np.testing.assert_allclose(y, expected, rtol=0, atol=4e-6 * shape[1] ** 0.5 * np.abs(expected).max())


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(17, 1), (40, 33), (31, 1500)])  # 1365 columns may be a block
def test_blocks_of_columns_match_numpy(shape, dtype, instruction_set):
    weight, x = jnp.asarray(matrix(shape), dtype), matrix((300, shape[1]), 1)
    expected = x.astype(np.float64) @ np.asarray(weight, np.float64).T
    with native.using(instruction_set):
        y = multiply(packed_linear.pack(weight), jnp.asarray(x))
    np.testing.assert_allclose(y, expected, rtol=0, atol=2e-6 * shape[1] ** 0.5 * np.abs(expected).max())


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_every_float16_is_read_exactly(instruction_set):
    """Denormals, infinities and NaNs included: one column times 1."""
    weight = np.arange(1 << 16, dtype=np.uint16).view(np.float16)[:, None]
    with native.using(instruction_set):
        (y,) = multiply(packed_linear.pack(weight), jnp.ones((1, 1)))
    np.testing.assert_array_equal(y, weight[:, 0].astype(np.float32))


EXTREMES = {
    "zeros": lambda x: x * 0,
    "outlier": lambda x: np.where(np.arange(x.shape[1]) % 150 == 7, 3e4 * x, x),
    "huge": lambda x: x * np.float32(1e30),
    "tiny": lambda x: x * np.float32(1e-25),
    "both": lambda x: x * np.logspace(-25, 30, x.shape[1], dtype=np.float32),
    "one": lambda x: np.where(np.arange(x.shape[1]) == 3, np.float32(1e36), x),
    "nearly 2": lambda x: np.sign(x) * np.float32(1.9921874),  # the largest digits, of both signs
    "below normal": lambda x: x * np.float32(1e-39),
}


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", ["int8", "int4", "uint4"])
@pytest.mark.parametrize("name", EXTREMES)
def test_errors_are_small_beside_the_largest_input_of_a_block(name, dtype, instruction_set):
    """Blocks are up to 128 columns of a group; numbers below 2^-126 may become zeros."""
    (N, K), num_groups = (24, 600), 3
    elements, scales = quantized((N, K), num_groups, dtype)
    zeros = np.random.default_rng(1).integers(0, 16, scales.shape) if dtype == "uint4" else None
    real = dequantized(elements, scales, np.zeros(scales.shape) if zeros is None else zeros) * 1e-3
    packed = packed_linear.pack(elements, scales * np.float32(1e-3), zeros)
    for num_tokens in (1, 11):
        x = EXTREMES[name](matrix((num_tokens, K), 1))
        with native.using(instruction_set):
            y = multiply(packed, jnp.asarray(x))
        errors = np.abs(y - x.astype(np.float64) @ real.T)
        starts = [start for group in range(0, K, 200) for start in (group, group + 128)]
        largest = np.maximum.reduceat(np.abs(x).astype(np.float64), starts, axis=1)
        stretch = 1 if zeros is None else 4  # zero points are subtracted as floats
        bounds = 2.0**-23 * stretch * largest @ np.add.reduceat(np.abs(real), starts, axis=1).T
        assert (errors <= bounds + 1e-35).all()
        assert (errors.mean() < bounds.mean() / 4) or name in ("zeros", "below normal")


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", ["int8", "int4", "uint4"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_inputs_that_are_not_finite_are_seen_in_their_token_alone(value, dtype, instruction_set):
    packed = packed_linear.pack(*quantized((40, 300), 2, dtype))
    x = matrix((20, 300), 1)
    broken = x.copy()
    broken[[0, 13], [299, 4]] = value
    with native.using(instruction_set):
        whole, y = (np.asarray(multiply(packed, jnp.asarray(inputs))) for inputs in (x, broken))
        alone = np.asarray(multiply(packed, jnp.asarray(broken[13:14])))
    rest = np.setdiff1d(np.arange(20), [0, 13])
    np.testing.assert_array_equal(y[rest], whole[rest])
    assert not np.isfinite(y[[0, 13]]).any()
    assert not np.isfinite(alone).any()


@pytest.mark.parametrize("dtype", ["int8", "int4", "uint4"])
@pytest.mark.parametrize(("shape", "num_groups"), GROUPED)
def test_elements_in_words_are_unpacked_and_looked_up(shape, num_groups, dtype):
    elements, scales = quantized(shape, num_groups, dtype)
    zeros = None if dtype == "int8" else np.random.default_rng(1).integers(0, 8, scales.shape)
    packed = packed_linear.pack(elements, scales, zeros)
    unpacked = unpack(packed)
    lowest = -8 if dtype == "int4" else 0
    np.testing.assert_array_equal(unpacked.weight, elements.astype(np.int32) - lowest)
    np.testing.assert_array_equal(unpacked.scales, scales)
    if zeros is not None:
        np.testing.assert_array_equal(unpacked.zeros, zeros - lowest)
    ids = np.asarray([shape[0] - 1, 0, 7])
    found = rows(packed, jnp.asarray(ids))
    real = dequantized(elements, scales, np.zeros(scales.shape) if zeros is None else zeros)
    np.testing.assert_allclose(found, real[ids], rtol=1e-6)


def rms_normed(x, weight, eps):
    return x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + eps) * weight


def swiglued(gate_up):
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=1)
    with np.errstate(over="ignore", invalid="ignore"):
        return gate / (1 + np.exp(-gate)) * up


@pytest.mark.parametrize("num_tokens", mainly([1, 13], 2, 40))
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_fused_matches_numpy(shape, num_tokens):
    N, K = shape
    weight, x, norm = matrix(shape), matrix((num_tokens, K), 1) * 3, matrix((K,), 3)
    residual, bias = matrix((num_tokens, N), 4), matrix((N,), 5)
    packed = packed_linear.pack(jnp.asarray(weight))
    tolerance = {"rtol": 0, "atol": 1e-5 * K**0.5 * 10}
    y = multiply(packed, jnp.asarray(x), rms_norm=(jnp.asarray(norm), 1e-5))
    np.testing.assert_allclose(y, rms_normed(x, norm, 1e-5) @ weight.T, **tolerance)
    y = multiply(packed, jnp.asarray(x), residual=jnp.asarray(residual))
    np.testing.assert_allclose(y, x @ weight.T + residual, **tolerance)
    y = multiply(packed, jnp.asarray(x), bias=jnp.asarray(bias), residual=jnp.asarray(residual))
    np.testing.assert_allclose(y, x @ weight.T + bias + residual, **tolerance)


def gated_products(shape, num_tokens):
    """Return SwiGLU of a product with all options of a gated matrix, and numpy's result of the same."""
    F, K = shape
    weight, x, norm = matrix((2 * F, K)) / K**0.5, matrix((num_tokens, K), 1), matrix((K,), 3)
    bias, residual = matrix((2 * F,), 4), matrix((num_tokens, F), 5)
    packed = packed_linear.pack(jnp.asarray(weight), gated=True)
    operands = {"bias": jnp.asarray(bias), "residual": jnp.asarray(residual)}
    y = multiply(packed, jnp.asarray(x), rms_norm=(jnp.asarray(norm), 1e-5), **operands)
    return y, swiglued(rms_normed(x, norm, 1e-5) @ weight.T + bias) + residual


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("num_tokens", mainly([1, 13], 2, 40))
@pytest.mark.parametrize("shape", SHAPES)
def test_gated_products_are_swiglu(shape, num_tokens, instruction_set):
    with native.using(instruction_set):
        y, expected = gated_products(shape, num_tokens)
    assert y.shape == (num_tokens, shape[0])
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5 * shape[1] ** 0.5)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_swiglu_of_large_gates_saturates(instruction_set):
    gates = np.asarray([-np.inf, -3e38, -200, -90, -0.0, 90, 200, np.inf, np.nan, 1, 1], np.float32)
    ups = np.asarray([1, 1, 1, 1, 1, 1, 1, 1, 1, np.inf, np.nan], np.float32)
    packed = packed_linear.pack(jnp.zeros((2 * len(gates), 3)), gated=True)
    with native.using(instruction_set):
        (y,) = multiply(packed, jnp.ones((1, 3)), bias=jnp.concatenate([gates, ups]))
    np.testing.assert_allclose(y, swiglued(np.concatenate([gates, ups])[None])[0], rtol=1e-6, atol=1e-37)
    np.testing.assert_array_equal(y[1:4], 0)


@pytest.mark.parametrize("num_tokens", [1, 3, 20])
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_gated_products_of_narrow_weights(num_tokens, instruction_set):
    """The products equal those of the same elements in float32."""
    weight = np.random.default_rng(0).integers(-127, 128, (80, 64)).astype(np.int8)
    scales = np.abs(matrix((80, 2), 1)) / 200
    int8 = packed_linear.pack(jnp.asarray(weight), jnp.asarray(scales), gated=True)
    half = packed_linear.pack(jnp.asarray(matrix((80, 64), 3), jnp.bfloat16), gated=True)
    x = jnp.asarray(matrix((num_tokens, 64), 2))
    nibbles, nibble_scales = quantized((80, 64), 2, "int4")
    int4 = packed_linear.pack(nibbles, nibble_scales / 8, gated=True)
    for packed, wide in [
        (int8, weight * np.repeat(scales, 32, axis=1)),
        (half, unpack(half)[0]),
        (int4, dequantized(nibbles, nibble_scales / 8, np.zeros((80, 2)))),
    ]:
        with native.using(instruction_set):
            y = multiply(packed, x)
            expected = multiply(packed_linear.pack(jnp.asarray(wide, jnp.float32), gated=True), x)
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-4)


def test_x_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="does not fit"):
        packed_linear.multiply(packed_linear.pack(jnp.zeros((16, 8))), jnp.zeros((2, 16)))


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4", "uint4"])
@pytest.mark.parametrize(("gated", "num_groups"), [(False, 15), (True, 15), (True, 2)])
def test_a_token_is_the_same_whatever_its_neighbours(gated, num_groups, dtype, instruction_set):
    """A row has several blocks of columns, also where a first-level cache of 128 KiB holds 1365 of them."""
    check_tokens_apart((90, 1500), num_groups, 150, dtype, instruction_set, gated=gated)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", ["float32", "int8", "int4", "uint4"])
@pytest.mark.parametrize(
    ("shape", "num_tokens", "ranges"),
    [
        pytest.param((1340, 3200), 9, ((0, 1), (2, 5), (8, 9)), id="streamed"),  # 2 MiB of int4
        pytest.param((90, 400), 300, ((299, 300), (262, 267)), id="tasks"),  # several tasks of tokens
    ],
)
def test_a_token_is_the_same_however_a_product_is_cut(shape, num_tokens, ranges, dtype, instruction_set):
    check_tokens_apart(shape, 25, num_tokens, dtype, instruction_set, ranges=ranges)


def check_tokens_apart(
    shape, num_groups, num_tokens, dtype, instruction_set, *, gated=False, ranges=((0, 1), (3, 5), (40, 53), (20, 84))
):
    """Compare some tokens' results among all with those of the same tokens alone."""
    scales = None
    weight = jnp.asarray(matrix(shape) / 10, None if "int" in dtype else dtype)
    if "int" in dtype:
        weight, scales = quantized(shape, num_groups, dtype)
    packed = packed_linear.pack(weight, scales, gated=gated)
    x = jnp.asarray(matrix((num_tokens, shape[1]), 1))
    residual = jnp.asarray(matrix((num_tokens, packed.num_outputs), 2))
    with native.using(instruction_set):
        together = np.asarray(multiply(packed, x, residual=residual))
        for start, end in ranges:
            alone = multiply(packed, x[start:end], residual=residual[start:end])
            np.testing.assert_array_equal(alone, together[start:end])


def test_rows_are_gathered_and_clipped():
    weight = matrix((37, 8))
    found = rows(packed_linear.pack(jnp.asarray(weight)), jnp.asarray([36, 0, 15, 16, 99, -5]))
    np.testing.assert_array_equal(found, weight[[36, 0, 15, 16, 36, 0]])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_unpack_inverts_pack(shape, gated):
    N, K = shape[0] * (2 if gated else 1), shape[1]
    weight = jnp.asarray(matrix((N, K)))
    packed = packed_linear.pack(weight, gated=gated)
    unpacked, scales, _ = unpack(packed)
    np.testing.assert_array_equal(unpacked, weight)
    assert scales.shape == (N, 0)
    assert (packed.shape, packed.num_outputs, packed.gated) == ((N, K), shape[0], gated)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("num_rows", [7, 16, 48])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_may_come_in_any_order(shape, num_rows, gated):
    """The memory that rows are written to becomes the matrix, uncopied."""
    N, K = shape[0] * (2 if gated else 1), shape[1]
    weight, scales = matrix((N, K)).astype(np.int8), matrix((N, 1), 1)
    packer = packed_linear.Packer(packed_linear.abstract(N, K, np.int8, num_groups=1, gated=gated), np.int8)
    for start in reversed(range(0, N, num_rows)):
        packer.write(start, weight[start : start + num_rows], scales[start : start + num_rows])
    packed = packer.matrix()
    whole = packed_linear.pack(jnp.asarray(weight), jnp.asarray(scales), gated=gated)
    np.testing.assert_array_equal(packed.weights, whole.weights)
    np.testing.assert_array_equal(packed.scales, whole.scales)
    assert packed.weights.unsafe_buffer_pointer() == packer._weights.ctypes.data


def test_a_gate_needs_as_many_rows_to_gate():
    with pytest.raises(ValueError, match="even number of rows, got 33"):
        packed_linear.pack(jnp.zeros((33, 8)), gated=True)


def test_blocks_that_do_not_divide_a_row_are_refused():
    with pytest.raises(ValueError, match="64 weights must divide into 3 groups"):
        packed_linear.pack(jnp.zeros((16, 64), jnp.int8), jnp.ones((16, 3)))


def test_unsupported_says_why():
    assert "CPU" in packed_linear.unsupported("float32", "gpu")
    assert "float64" in packed_linear.unsupported("float64", "cpu")


def pack(shape, seed=0):
    return packed_linear.pack(jnp.asarray(matrix(shape, seed)))


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS[1:])
@pytest.mark.parametrize("num_tokens", [1, 4, 13])
def test_every_instruction_set_gives_the_same_products(instruction_set, num_tokens):
    x = jnp.asarray(matrix((num_tokens, 96), 1))
    weight = np.random.default_rng(0).integers(-127, 128, (40, 96)).astype(np.int8)
    int8 = packed_linear.pack(jnp.asarray(weight), jnp.asarray(np.abs(matrix((40, 3))) / 100))
    half = packed_linear.pack(jnp.asarray(matrix((40, 96)), jnp.bfloat16))
    for packed, options in [(pack((40, 96)), {}), (half, {"rms_norm": (jnp.ones(96), 1e-6)}), (int8, {})]:
        expected = multiply(packed, x, **options)
        with native.using(instruction_set):
            np.testing.assert_allclose(multiply(packed, x, **options), expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"residual": jnp.zeros((1, 40))}, "a residual must be"),
        ({"rms_norm": (jnp.ones(3), 1e-6)}, "a norm must be"),
        ({"bias": jnp.zeros(80)}, "a bias must be"),
    ],
)
@pytest.mark.usefixtures("without_jaxtyping")
def test_shapes_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        packed_linear.multiply(pack((40, 96)), jnp.zeros((4, 96)), **options)


def test_int8_needs_scales():
    with pytest.raises(ValueError, match="must have scales, got int8 in 0 groups"):
        packed_linear.pack(jnp.zeros((16, 8), jnp.int8))


def test_only_4_bits_have_zero_points():
    with pytest.raises(ValueError, match="can have zero points, got int8"):
        packed_linear.pack(jnp.zeros((16, 8), jnp.int8), jnp.ones((16, 1)), jnp.ones((16, 1)))
