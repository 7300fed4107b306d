import itertools
from functools import cache, lru_cache, partial

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


EPS = 1e-5  # epsilon, the same in all norms


@partial(jax.jit, compiler_options=UNOPTIMIZED)
def products(calls):
    return [
        packed_linear.multiply(matrix, x, rms_norm=None if norm is None else (norm, EPS), **operands)
        for matrix, x, norm, operands in calls
    ]


def call(matrix, x, norm=None, **operands):
    return matrix, x, norm, operands


def multiply(*calls):
    """Return products by the instruction set that is in use, all of one program: one for each would take seconds."""
    return list(map(np.asarray, products(calls)))


@partial(jax.jit, compiler_options=UNOPTIMIZED)
def unpack(*matrices):
    return list(map(packed_linear.unpack, matrices))


@partial(jax.jit, compiler_options=UNOPTIMIZED)
def rows(*calls):
    return [packed_linear.rows(*each) for each in calls]


SHAPES = [(16, 4), (17, 1), (40, 33), (64, 256), (200, 96), (31, 1024)]


def matrix(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_only_live_tokens_are_computed():
    """Live tokens have the same bits as without padding; results of padding, even of NaN, are zero."""
    calls, expected = [], []
    for num_live in (0, 1, 13, 40):
        weight, x, residual = matrix((40, 33)), matrix((40, 33), 1), matrix((40, 40), 2)
        operands = {"norm": matrix((33,), 3), "bias": matrix((40,), 4)}
        x[num_live:] = np.nan
        packed = packed_linear.pack(weight)
        calls.append(call(packed, x, **operands, residual=residual, num_live=np.int32(num_live)))
        expected.append(call(packed, x[:num_live], **operands, residual=residual[:num_live]))
    found = multiply(*calls)
    np.testing.assert_array_equal(found[0], 0)
    for y, live in zip(found[1:], multiply(*expected[1:]), strict=True):
        np.testing.assert_array_equal(y[: len(live)], live)
        np.testing.assert_array_equal(y[len(live) :], 0)


@pytest.mark.parametrize("token_counts", mainly([(1, 5, 12, 13, 130)], (2, 37)))
def test_products_match_numpy(token_counts):
    cases = [(matrix(shape), matrix((num_tokens, shape[1]), 1)) for shape in SHAPES for num_tokens in token_counts]
    found = multiply(*(call(packed_linear.pack(weight), x) for weight, x in cases))
    for (weight, x), y in zip(cases, found, strict=True):
        expected = x.astype(np.float64) @ weight.T.astype(np.float64)
        np.testing.assert_allclose(y, expected, rtol=0, atol=2e-6 * weight.shape[1] ** 0.5 * np.abs(expected).max())


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_bfloat16_weights_and_all_bits_of_their_inputs_are_exact(instruction_set):
    """Sums with one term, that is an element of a matrix or an input, and sums of integers are exact in any order."""
    rng, half = np.random.default_rng(0), jnp.bfloat16
    weight, unit, inputs = matrix((48, 67)).astype(half), np.eye(67, dtype=np.float32), matrix((37, 67), 1)
    whole, few = rng.integers(-255, 256, (48, 67)), rng.integers(-99, 100, (37, 67)).astype(np.float32)
    calls = [
        call(packed_linear.pack(weight), unit),
        call(packed_linear.pack(unit.astype(half)), inputs),
        *(call(packed_linear.pack(whole.astype(half)), few[:num_tokens]) for num_tokens in (1, 7, 16, 37)),
    ]
    with native.using(instruction_set):
        by_unit, of_unit, *sums = multiply(*calls)
    np.testing.assert_array_equal(by_unit, weight.T.astype(np.float32))
    np.testing.assert_array_equal(of_unit, inputs)
    for y in sums:
        np.testing.assert_array_equal(y, few[: len(y)] @ whole.T)


def test_int8_weights_are_scaled_by_block():
    weight = np.random.default_rng(0).integers(-127, 128, (40, 64)).astype(np.int8)
    inputs, ids = [matrix((num_tokens, 64), 2) for num_tokens in (1, 3, 20)], np.asarray([39, 0, 17])
    matrices, real = [], []
    for num_blocks in (1, 2, 8):
        scales = np.abs(matrix((40, num_blocks), 1)) / 100
        matrices.append(packed_linear.pack(weight, scales))
        real.append(dequantized(weight, scales))
    found = multiply(*(call(packed, x) for packed in matrices for x in inputs))
    expected = [x @ wide.T for wide in real for x in inputs]
    for y, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(y, wanted, rtol=0, atol=1e-4)
    for found_rows, wide in zip(rows(*((packed, ids) for packed in matrices)), real, strict=True):
        np.testing.assert_allclose(found_rows, wide[ids], rtol=1e-6)


def quantized(shape, num_groups, dtype, seed=0):
    """Return elements, scales, and the matrix that they stand for without zero points, in float64."""
    rng = np.random.default_rng(seed)
    low, high = {"int8": (-127, 127), "int4": (-8, 7), "uint4": (0, 15)}[dtype]
    elements = rng.integers(low, high + 1, shape).astype(np.int8).astype(jnp.dtype(dtype))
    return elements, rng.uniform(0.5, 2, (shape[0], num_groups)).astype(np.float32) / (high - low)


def dequantized(elements, scales, zeros=0.0):
    groups, zeros = elements.astype(np.float64).reshape(*scales.shape, -1), np.broadcast_to(zeros, scales.shape)
    return ((groups - zeros[..., None]) * scales[..., None]).reshape(elements.shape)


GROUPED = [
    ((40, 64), 2),
    ((17, 33), 1),
    ((33, 66), 2),
    ((50, 520), 40),
    ((24, 384), 3),
    ((35, 602), 2),
]  # odd sizes, too


@cache
def quantised_calls(dtype):
    """Return products of quantised matrices of all shapes, and numpy's results."""
    has_zeros, calls, expected = dtype == "zeros", [], []
    for shape, num_groups in GROUPED:
        elements, scales = quantized(shape, num_groups, "uint4" if has_zeros else dtype)
        zeros = np.random.default_rng(1).integers(0, 16, scales.shape) if has_zeros else None
        real = dequantized(elements, scales, zeros if has_zeros else np.zeros(scales.shape))
        packed = packed_linear.pack(elements, scales, zeros)
        norm, bias = matrix(shape[1:], 3), matrix(shape[:1], 5)
        for num_tokens in (1, 3, 20):
            x, residual = matrix((num_tokens, shape[1]), 2), matrix((num_tokens, shape[0]), 4)
            calls.append(call(packed, x, norm, bias=bias, residual=residual))
            expected.append(rms_normed(x, norm, EPS) @ real.T + bias + residual)
    return calls, expected


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", ["int8", "int4", "uint4", "zeros"])
def test_quantised_products_match_numpy(dtype, instruction_set):
    """Everything that is fused with them, for a lone tile and for blocks of columns."""
    calls, expected = quantised_calls(dtype)
    with native.using(instruction_set):
        found = multiply(*calls)
    for (_, x, *_), y, wanted in zip(calls, found, expected, strict=True):
        np.testing.assert_allclose(y, wanted, rtol=0, atol=4e-6 * x.shape[1] ** 0.5 * np.abs(wanted).max())


@cache
def block_calls():
    """Return products of many tokens, 1365 of whose columns may be a block, and numpy's results."""
    calls, expected = [], []
    for dtype, shape in itertools.product(["float32", "bfloat16", "float16"], [(17, 1), (40, 33), (31, 1500)]):
        weight, x = matrix(shape).astype(jnp.dtype(dtype)), matrix((300, shape[1]), 1)
        calls.append(call(packed_linear.pack(weight), x))
        expected.append(x.astype(np.float64) @ weight.astype(np.float64).T)
    return calls, expected


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_blocks_of_columns_match_numpy(instruction_set):
    calls, expected = block_calls()
    with native.using(instruction_set):
        found = multiply(*calls)
    for (_, x, *_), y, wanted in zip(calls, found, expected, strict=True):
        np.testing.assert_allclose(y, wanted, rtol=0, atol=2e-6 * x.shape[1] ** 0.5 * np.abs(wanted).max())


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_every_float16_is_read_exactly(instruction_set):
    """Denormals, infinities and NaNs included: one column times 1."""
    weight = np.arange(1 << 16, dtype=np.uint16).view(np.float16)[:, None]
    with native.using(instruction_set):
        (y,) = multiply(call(packed_linear.pack(weight), np.ones((1, 1), np.float32)))
    np.testing.assert_array_equal(y[0], weight[:, 0].astype(np.float32))


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
    inputs = [EXTREMES[name](matrix((num_tokens, K), 1)) for num_tokens in (1, 11)]
    with native.using(instruction_set):
        found = multiply(*(call(packed, x) for x in inputs))
    for x, y in zip(inputs, found, strict=True):
        errors = np.abs(y - x.astype(np.float64) @ real.T)
        starts = [start for group in range(0, K, 200) for start in (group, group + 128)]
        largest = np.maximum.reduceat(np.abs(x).astype(np.float64), starts, axis=1)
        stretch = 1 if zeros is None else 4  # zero points are subtracted as floats
        bounds = 2.0**-23 * stretch * largest @ np.add.reduceat(np.abs(real), starts, axis=1).T
        assert (errors <= bounds + 1e-35).all()
        assert (errors.mean() < bounds.mean() / 4) or name in ("zeros", "below normal")


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4", "uint4"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_inputs_that_are_not_finite_are_seen_in_their_token_alone(value, dtype, instruction_set):
    weight = (matrix((40, 300)).astype(jnp.bfloat16),) if dtype == "bfloat16" else quantized((40, 300), 2, dtype)
    packed = packed_linear.pack(*weight)
    x = matrix((20, 300), 1)
    broken = x.copy()
    broken[[0, 13], [299, 4]] = value
    with native.using(instruction_set):
        whole, y, alone = multiply(*(call(packed, inputs) for inputs in (x, broken, broken[13:14])))
    rest = np.setdiff1d(np.arange(20), [0, 13])
    np.testing.assert_array_equal(y[rest], whole[rest])
    assert not np.isfinite(y[[0, 13]]).any()
    assert not np.isfinite(alone).any()


@pytest.mark.parametrize("dtype", ["int8", "int4", "uint4"])
def test_elements_in_words_are_unpacked_and_looked_up(dtype):
    matrices, ids = [], [np.asarray([shape[0] - 1, 0, 7]) for shape, _ in GROUPED]
    for shape, num_groups in GROUPED:
        elements, scales = quantized(shape, num_groups, dtype)
        zeros = None if dtype == "int8" else np.random.default_rng(1).integers(0, 8, scales.shape)
        matrices.append((elements, scales, zeros))
    packed, lowest = [packed_linear.pack(*each) for each in matrices], -8 if dtype == "int4" else 0
    found = zip(unpack(*packed), rows(*zip(packed, ids, strict=True)), strict=True)
    for (unpacked, found_rows), (elements, scales, zeros), wanted in zip(found, matrices, ids, strict=True):
        np.testing.assert_array_equal(unpacked.weight, elements.astype(np.int32) - lowest)
        np.testing.assert_array_equal(unpacked.scales, scales)
        if zeros is not None:
            np.testing.assert_array_equal(unpacked.zeros, zeros - lowest)
        real = dequantized(elements, scales, np.zeros(scales.shape) if zeros is None else zeros)
        np.testing.assert_allclose(found_rows, real[wanted], rtol=1e-6)


def rms_normed(x, weight, eps):
    return x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + eps) * weight


def swiglued(gate_up):
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=1)
    with np.errstate(over="ignore", invalid="ignore"):
        return gate / (1 + np.exp(-gate)) * up


@pytest.mark.parametrize("token_counts", mainly([(1, 13)], (2, 40)))
def test_what_is_fused_matches_numpy(token_counts):
    calls, expected = [], []
    for (N, K), num_tokens in itertools.product(SHAPES, token_counts):
        weight, x, norm = matrix((N, K)), matrix((num_tokens, K), 1) * 3, matrix((K,), 3)
        residual, bias = matrix((num_tokens, N), 4), matrix((N,), 5)
        packed = packed_linear.pack(weight)
        calls.append(call(packed, x, norm))
        expected.append(rms_normed(x, norm, EPS) @ weight.T)
        calls.append(call(packed, x, residual=residual))
        expected.append(x @ weight.T + residual)
        calls.append(call(packed, x, bias=bias, residual=residual))
        expected.append(x @ weight.T + bias + residual)
    for (_, x, *_), y, wanted in zip(calls, multiply(*calls), expected, strict=True):
        np.testing.assert_allclose(y, wanted, rtol=0, atol=1e-5 * x.shape[1] ** 0.5 * 10)


@cache
def gated_calls(token_counts):
    """Return products with all options of gated matrices, and numpy's SwiGLU of the same."""
    calls, expected = [], []
    for (F, K), num_tokens in itertools.product(SHAPES, token_counts):
        weight, x, norm = matrix((2 * F, K)) / np.float32(K**0.5), matrix((num_tokens, K), 1), matrix((K,), 3)
        bias, residual = matrix((2 * F,), 4), matrix((num_tokens, F), 5)
        packed = packed_linear.pack(weight, gated=True)
        calls.append(call(packed, x, norm, bias=bias, residual=residual))
        expected.append(swiglued(rms_normed(x, norm, EPS) @ weight.T + bias) + residual)
    return calls, expected


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("token_counts", mainly([(1, 13)], (2, 40)))
def test_gated_products_are_swiglu(token_counts, instruction_set):
    calls, expected = gated_calls(token_counts)
    with native.using(instruction_set):
        found = multiply(*calls)
    for (_, x, *_), y, wanted in zip(calls, found, expected, strict=True):
        np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-5 * x.shape[1] ** 0.5)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_swiglu_of_large_gates_saturates(instruction_set):
    gates = np.asarray([-np.inf, -3e38, -200, -90, -0.0, 90, 200, np.inf, np.nan, 1, 1], np.float32)
    ups = np.asarray([1, 1, 1, 1, 1, 1, 1, 1, 1, np.inf, np.nan], np.float32)
    packed = packed_linear.pack(np.zeros((2 * len(gates), 3), np.float32), gated=True)
    with native.using(instruction_set):
        ((y,),) = multiply(call(packed, np.ones((1, 3), np.float32), bias=np.concatenate([gates, ups])))
    np.testing.assert_allclose(y, swiglued(np.concatenate([gates, ups])[None])[0], rtol=1e-6, atol=1e-37)
    np.testing.assert_array_equal(y[1:4], 0)


@cache
def narrow_calls():
    """Return products of narrow gated matrices, each followed by that of the same elements in float32."""
    weight = np.random.default_rng(0).integers(-127, 128, (80, 64)).astype(np.int8)
    scales, half = np.abs(matrix((80, 2), 1)) / 200, matrix((80, 64), 3).astype(jnp.bfloat16)
    nibbles, nibble_scales = quantized((80, 64), 2, "int4")
    matrices = [
        (packed_linear.pack(weight, scales, gated=True), weight * np.repeat(scales, 32, axis=1)),
        (packed_linear.pack(half, gated=True), half),
        (
            packed_linear.pack(nibbles, nibble_scales / 8, gated=True),
            dequantized(nibbles, nibble_scales / 8, np.zeros((80, 2))),
        ),
    ]
    inputs = [matrix((num_tokens, 64), 2) for num_tokens in (1, 3, 20)]
    pairs = [(packed, packed_linear.pack(wide.astype(np.float32), gated=True)) for packed, wide in matrices]
    return [call(packed, x) for x in inputs for pair in pairs for packed in pair]


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_gated_products_of_narrow_weights(instruction_set):
    """The products equal those of the same elements in float32."""
    with native.using(instruction_set):
        found = multiply(*narrow_calls())
    for y, expected in zip(found[::2], found[1::2], strict=True):
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-4)


def test_x_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="does not fit"):
        packed_linear.multiply(packed_linear.pack(np.zeros((16, 8), np.float32)), jnp.zeros((2, 16)))


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize(("gated", "num_groups"), [(False, 15), (True, 15), (True, 2)])
def test_a_token_is_the_same_whatever_its_neighbours(gated, num_groups, instruction_set):
    """A row has several blocks of columns, also where a first-level cache of 128 KiB holds 1365 of them."""
    dtypes, ranges = ("float32", "bfloat16", "int8", "int4", "uint4"), ((0, 1), (3, 5), (40, 53), (20, 84))
    check_tokens_apart(tokens_apart((90, 1500), num_groups, 150, dtypes, ranges, gated=gated), instruction_set, ranges)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize(
    ("shape", "num_tokens", "ranges"),
    [
        pytest.param((1340, 3200), 9, ((0, 1), (2, 5), (8, 9)), id="streamed"),  # 2 MiB of int4
        pytest.param((90, 400), 300, ((299, 300), (262, 267)), id="tasks"),  # several tasks of tokens
        pytest.param((40, 3200), 70, ((0, 1), (31, 66)), id="tiles"),  # AMX tasks
    ],
)
def test_a_token_is_the_same_however_a_product_is_cut(shape, num_tokens, ranges, instruction_set):
    dtypes = ("float32", "bfloat16", "int8", "int4", "uint4")
    check_tokens_apart(tokens_apart(shape, 25, num_tokens, dtypes, ranges), instruction_set, ranges)


@lru_cache(maxsize=1)
def tokens_apart(shape, num_groups, num_tokens, dtypes, ranges, gated=False):
    """Return the products of each dtype: of all tokens, then of those of each range alone."""
    calls = []
    for dtype in dtypes:
        if "int" in dtype:
            weight, scales = quantized(shape, num_groups, dtype)
        else:
            weight, scales = (matrix(shape) / 10).astype(jnp.dtype(dtype)), None
        packed = packed_linear.pack(weight, scales, gated=gated)
        x, residual = matrix((num_tokens, shape[1]), 1), matrix((num_tokens, packed.num_outputs), 2)
        for start, end in ((0, num_tokens), *ranges):
            calls.append(call(packed, x[start:end], residual=residual[start:end]))
    return calls


def check_tokens_apart(calls, instruction_set, ranges):
    with native.using(instruction_set):
        found = iter(multiply(*calls))
    for together in found:
        for start, end in ranges:
            np.testing.assert_array_equal(next(found), together[start:end])


def test_unsupported_says_why():
    assert "CPU" in packed_linear.unsupported("float32", "gpu")
    assert "float64" in packed_linear.unsupported("float64", "cpu")


@cache
def kind_calls():
    """Return products of each kind of matrix and of several numbers of tokens, one of them with a norm."""
    weight = np.random.default_rng(0).integers(-127, 128, (40, 96)).astype(np.int8)
    int8 = packed_linear.pack(weight, np.abs(matrix((40, 3))) / 100)
    whole, half = matrix((40, 96)), matrix((40, 96)).astype(jnp.bfloat16)
    kinds = [(packed_linear.pack(whole), None), (packed_linear.pack(half), np.ones(96, np.float32)), (int8, None)]
    return [call(packed, matrix((num_tokens, 96), 1), norm) for num_tokens in (1, 4, 13) for packed, norm in kinds]


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS[1:])
def test_every_instruction_set_gives_the_same_products(instruction_set):
    calls = kind_calls()
    expected = multiply(*calls)
    with native.using(instruction_set):
        found = multiply(*calls)
    for y, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(y, wanted, rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"residual": np.zeros((1, 40), np.float32)}, "a residual must be"),
        ({"rms_norm": (np.ones(3, np.float32), 1e-6)}, "a norm must be"),
        ({"bias": np.zeros(80, np.float32)}, "a bias must be"),
    ],
)
@pytest.mark.usefixtures("without_jaxtyping")
def test_shapes_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        packed_linear.multiply(packed_linear.pack(matrix((40, 96))), np.zeros((4, 96), np.float32), **options)
