"""Matmuls of the native kernels whose inputs are rounded to 8 bits, and weights that are floats of 8 or 4 bits."""

import itertools
from functools import cache, partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxserve.pallas_kernels import native, packed_linear
from jaxserve.pallas_kernels.elements import e2m1_floats
from tests.kernels.test_packed_linear import (
    EPS,
    INSTRUCTION_SETS,
    UNOPTIMIZED,
    dequantized,
    matrix,
    quantized,
    rms_normed,
)

reason = packed_linear.unsupported("int8", jax.default_backend())
pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))

E2M1 = np.asarray(e2m1_floats(jnp.arange(16)))
INTEGERS = ("int8", "int4", "uint4", "float4_e2m1fn")
SHAPES = [((40, 64), 2), ((17, 33), 1), ((33, 66), 2), ((50, 520), 40), ((35, 602), 2), ((24, 1500), 1)]
TOKEN_COUNTS = (1, 3, 11, 20, 45)


@partial(jax.jit, compiler_options=UNOPTIMIZED, static_argnums=1)
def products(calls, input_format):
    return [
        packed_linear.multiply(
            packed, x, input_format=input_format, rms_norm=None if norm is None else (norm, EPS), **more
        )
        for packed, x, norm, more in calls
    ]


def multiply(calls, input_format="int8"):
    """Return products by the instruction set that is in use, all of one program: one for each would take seconds."""
    calls = [
        (packed, x, more.pop("norm", None), more) for packed, x, more in ((*each[:2], dict(each[2])) for each in calls)
    ]
    return list(map(np.asarray, products(calls, input_format)))


def elements_of(dtype, shape, num_groups):
    """Return elements, scales and zero points as `pack` takes them, and the integers or floats that elements are."""
    rng = np.random.default_rng(0)
    if dtype == "float4_e2m1fn":
        codes = rng.integers(0, 16, shape).astype(np.uint8)
        return (codes, rng.uniform(0.5, 2, (shape[0], num_groups)).astype(np.float32), None), E2M1[codes]
    elements, scales = quantized(shape, num_groups, dtype)
    zeros = rng.integers(0, 16, scales.shape) if dtype == "uint4" else None
    return (elements, scales, zeros), elements.astype(np.float64)


def pack(dtype, elements, scales, zeros=None, **more):
    shapes = packed_linear.abstract(
        *elements.shape, jnp.dtype(dtype), scales.shape[1], has_zeros=zeros is not None, **more
    )
    packer = packed_linear.Packer(shapes)
    packer.write(0, elements, scales, zeros)
    return packer.matrix()


def rounded_to_int8(x, num_groups):
    """Return each token's integers and its groups' scales."""
    groups = x.reshape(len(x), num_groups, -1)
    scale = np.abs(groups).max(axis=-1) / np.float32(127.5)
    scale = np.where(scale == 0, np.float32(2**-23), scale)
    return np.clip(np.round(groups / scale[..., None]), -128, 127).astype(np.int64), scale


@cache
def exact_calls(dtype):
    """Return products of one group with scales of 1, whose sums are integers times the scales of tokens."""
    calls, expected = [], []
    for (shape, _), num_tokens in itertools.product(SHAPES, TOKEN_COUNTS):
        (elements, scales, _), values = elements_of(dtype, shape, 1)
        x = matrix((num_tokens, shape[1]), 1)
        x[0, : shape[1] // 2] *= 100
        integers, scale = rounded_to_int8(x, 1)
        calls.append((pack("int4" if dtype == "uint4" else dtype, elements, np.ones_like(scales)), x, {}))
        values = values - 8 if dtype == "uint4" else values
        sums = integers[:, 0] @ (2 * values).astype(np.int64).T
        assert np.abs(sums).max() < 2**24
        expected.append((sums / 2).astype(np.float32) * scale)
    return calls, expected


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", ["int8", "int4", "float4_e2m1fn"])
def test_sums_of_integers_are_exact(dtype, instruction_set):
    calls, expected = exact_calls(dtype)
    with native.using(instruction_set):
        found = multiply(calls)
    for y, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(y, wanted)


@cache
def grouped_calls(dtype):
    """Return products of several groups with all that is fused, without and with a norm, and numpy's."""
    calls, expected = [], []
    for (shape, num_groups), num_tokens, has_norm in itertools.product(SHAPES, (1, 3, 20), (False, True)):
        (elements, scales, zeros), values = elements_of(dtype, shape, num_groups)
        x, norm, bias = matrix((num_tokens, shape[1]), 2), matrix(shape[1:], 3), matrix(shape[:1], 5)
        fused = {"bias": bias, "residual": matrix((num_tokens, shape[0]), 4)}
        calls.append((pack(dtype, elements, scales, zeros), x, fused | ({"norm": norm} if has_norm else {})))
        real = dequantized(values, scales, np.zeros(scales.shape) if zeros is None else zeros)
        x = rms_normed(x, norm, EPS).astype(np.float32) if has_norm else x
        integers, scale = rounded_to_int8(x, num_groups)
        inputs = (integers * scale.astype(np.float64)[..., None]).reshape(num_tokens, -1)
        expected.append(inputs @ real.T + bias + fused["residual"])
    return calls, expected


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", INTEGERS)
def test_groups_have_scales_of_their_own(dtype, instruction_set):
    """After a norm, whose last bit numpy has otherwise, an input halfway between integers may be a step off."""
    calls, expected = grouped_calls(dtype)
    with native.using(instruction_set):
        found = multiply(calls)
    for (_, x, fused), y, wanted in zip(calls, found, expected, strict=True):
        exact = 4e-6 * x.shape[1] ** 0.5 * np.abs(wanted).max()
        np.testing.assert_allclose(y, wanted, rtol=0, atol=np.abs(wanted).max() / 50 if "norm" in fused else exact)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("num_groups", [1, 15])
def test_a_token_is_the_same_whatever_its_neighbours(num_groups, instruction_set):
    ranges, num_tokens, calls = ((0, 1), (3, 5), (40, 53), (20, 84), (262, 267)), 300, []
    for dtype in INTEGERS:
        (elements, scales, zeros), _ = elements_of(dtype, (90, 1500), num_groups)
        packed, x = pack(dtype, elements, scales, zeros, gated=True), matrix((num_tokens, 1500), 1)
        calls += [(packed, x[start:end], {}) for start, end in ((0, num_tokens), *ranges)]
    with native.using(instruction_set):
        found = iter(multiply(calls))
    for together in found:
        for start, end in ranges:
            np.testing.assert_array_equal(next(found), together[start:end])


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS[1:])
def test_every_instruction_set_has_the_same_bits(instruction_set):
    """Except for those without fused multiply-adds, sums are equal in all of them."""
    calls = [call for dtype in ("int8", "int4", "float4_e2m1fn") for call in exact_calls(dtype)[0]]
    expected = multiply(calls)
    with native.using(instruction_set):
        found = multiply(calls)
    for y, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(y, wanted)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_inputs_that_are_not_finite_are_seen_in_their_token(value, instruction_set):
    x = matrix((20, 300), 1)
    broken = x.copy()
    broken[[0, 13], [299, 4]] = value
    scales = np.ones((40, 2), np.float32)
    with native.using(instruction_set):
        for dtype, input_format in (("int8", "int8"), ("int4", "int8"), ("float8_e4m3fn", "float8_e4m3fn")):
            packed = pack(dtype, matrix((40, 300)).astype(jnp.dtype(dtype)), scales)
            whole, y = multiply([(packed, inputs, {}) for inputs in (x, broken)], input_format)
            rest = np.setdiff1d(np.arange(20), [0, 13])
            np.testing.assert_array_equal(y[rest], whole[rest])
            assert not np.isfinite(y[[0, 13]]).any()


def test_zeros_and_equal_halves_are_rounded_as_specified():
    """Tokens of zeros give zeros; halves are rounded to even integers, the largest value to 127 or -128."""
    x = np.zeros((3, 8), np.float32)
    x[1] = [127.5, 0.5, 1.5, 2.5, -0.5, -1.5, -127.5, 3]
    x[2] = [-255, 1, 3, 5, -1, -3, 0, 6]
    packed = pack("int8", np.eye(8, dtype=np.int8), np.ones((8, 1), np.float32))
    (y,) = multiply([(packed, x, {})])
    np.testing.assert_array_equal(y, [[0] * 8, [127, 0, 2, 2, 0, -2, -128, 3], [-256, 0, 4, 4, 0, -4, 0, 6]])


# Floats of 8 bits


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_every_float8_is_read_exactly(instruction_set):
    """A row with a NaN gives NaN."""
    weight = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)[:, None]
    packed = packed_linear.pack(weight, np.ones((256, 1), np.float32))
    calls = [(packed, np.ones((num_tokens, 1), np.float32), {}) for num_tokens in (1, 20)]
    with native.using(instruction_set):
        found = multiply(calls, "float32")
    for y in found:
        np.testing.assert_array_equal(y, np.broadcast_to(weight[:, 0].astype(np.float32), y.shape))


@cache
def float8_calls():
    calls, expected = [], []
    for (shape, num_groups), num_tokens in itertools.product(SHAPES, (1, 3, 20, 45)):
        weight, scales = matrix(shape).astype(ml_dtypes.float8_e4m3fn), np.abs(matrix((shape[0], num_groups), 7))
        x = matrix((num_tokens, shape[1]), 1)
        calls.append((packed_linear.pack(weight, scales), x, {}))
        real = dequantized(weight, scales)
        groups = x.reshape(num_tokens, num_groups, -1)
        scale = (np.abs(groups).max(axis=-1) / np.float32(448))[..., None]
        rounded = ((groups / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale).reshape(x.shape)
        expected.append((x @ real.T, rounded.astype(np.float64) @ real.T))
    return calls, expected


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("input_format", ["float32", "float8_e4m3fn"])
def test_float8_products_match_numpy(input_format, instruction_set):
    calls, expected = float8_calls()
    with native.using(instruction_set):
        found = multiply(calls, input_format)
    for (_, x, _), y, each in zip(calls, found, expected, strict=True):
        wanted = each[input_format != "float32"]
        np.testing.assert_allclose(y, wanted, rtol=0, atol=4e-6 * x.shape[1] ** 0.5 * np.abs(wanted).max())


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("num_groups", [1, 15])
@pytest.mark.parametrize("input_format", ["float32", "float8_e4m3fn"])
def test_a_token_with_float8_weights_is_the_same_whatever_its_neighbours(input_format, num_groups, instruction_set):
    ranges, num_tokens = ((0, 1), (3, 5), (40, 53), (262, 267)), 300
    weight, scales = matrix((90, 1500)).astype(ml_dtypes.float8_e4m3fn), np.abs(matrix((90, num_groups), 7))
    packed, x = packed_linear.pack(weight, scales, gated=True), matrix((num_tokens, 1500), 1)
    with native.using(instruction_set):
        together, *apart = multiply(
            [(packed, x[start:end], {}) for start, end in ((0, num_tokens), *ranges)], input_format
        )
    for (start, end), y in zip(ranges, apart, strict=True):
        np.testing.assert_array_equal(y, together[start:end])


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_inputs_rounded_to_bfloat16_are_those_that_were_rounded_before(instruction_set):
    exact, rounded, normed, expected = [], [], [], []
    for (shape, _), num_tokens, gated in itertools.product(SHAPES, (1, 3, 20, 45), (False, True)):
        weight, x = matrix(shape).astype(ml_dtypes.bfloat16), matrix((num_tokens, shape[1]), 1)
        x[0, 0] = np.float32(1 + 2**-8)  # halfway: the even neighbour is 1
        x_rounded, norm = x.astype(ml_dtypes.bfloat16).astype(np.float32), matrix(shape[1:], 2)
        packed = packed_linear.pack(weight[: shape[0] // 2 * 2], gated=gated)
        rounded.append((packed, x, {"bias": matrix(packed.shape[:1], 3)}))
        exact.append((packed, x_rounded, rounded[-1][2]))
        normed.append((packed_linear.pack(weight), x, {"norm": norm}))
        inputs = rms_normed(x, norm, EPS).astype(ml_dtypes.bfloat16).astype(np.float32)
        expected.append(inputs @ weight.astype(np.float32).T)
    with native.using(instruction_set):
        found, wanted = multiply([*rounded, *normed], "bfloat16"), multiply(exact, "float32")
    for one, other in zip(found, wanted, strict=False):
        np.testing.assert_array_equal(one, other)
    for y, other in zip(found[len(wanted) :], expected, strict=True):
        np.testing.assert_allclose(y, other, rtol=0, atol=2**-8 * np.abs(other).max())  # one input may round otherwise


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_a_token_with_inputs_in_bfloat16_is_the_same_whatever_its_neighbours(instruction_set):
    ranges, num_tokens = ((0, 1), (3, 5), (40, 53), (262, 267)), 300
    packed = packed_linear.pack(matrix((90, 1500)).astype(ml_dtypes.bfloat16), gated=True)
    x = matrix((num_tokens, 1500), 1)
    with native.using(instruction_set):
        together, *apart = multiply(
            [(packed, x[start:end], {}) for start, end in ((0, num_tokens), *ranges)], "bfloat16"
        )
    for (start, end), y in zip(ranges, apart, strict=True):
        np.testing.assert_array_equal(y, together[start:end])


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_int8_weights_may_have_zero_points(instruction_set):
    calls, expected = [], []
    for (shape, num_groups), num_tokens in itertools.product(SHAPES, (1, 3, 20)):
        elements, scales = quantized(shape, num_groups, "int8")
        zeros = np.random.default_rng(1).uniform(-128, 128, scales.shape).astype(np.float32)
        calls.append((packed_linear.pack(elements, scales, zeros), matrix((num_tokens, shape[1]), 2), {}))
        expected.append(calls[-1][1] @ dequantized(elements, scales, zeros).T)
    with native.using(instruction_set):
        found = multiply(calls, "float32")
    for (_, x, _), y, wanted in zip(calls, found, expected, strict=True):
        np.testing.assert_allclose(y, wanted, rtol=0, atol=4e-6 * x.shape[1] ** 0.5 * np.abs(wanted).max())


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float4_e2m1fn"])
def test_rows_are_looked_up(dtype):
    calls, expected = [], []
    for shape, num_groups in SHAPES:
        (elements, scales, _), values = elements_of("float4_e2m1fn", shape, num_groups)
        elements = elements if dtype == "float4_e2m1fn" else values.astype(ml_dtypes.float8_e4m3fn)
        calls.append((pack(dtype, elements, scales), np.asarray([shape[0] - 1, 0, 7])))
        expected.append(dequantized(values, scales)[calls[-1][1]])
    found = jax.jit(lambda calls: [packed_linear.rows(*call) for call in calls])(calls)
    for y, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(y, wanted, rtol=1e-6)


def test_inputs_that_weights_do_not_take_are_refused():
    packed = packed_linear.pack(np.zeros((16, 8), np.float32))
    with pytest.raises(Exception, match="inputs must be floats, int8 for integers"):
        multiply([(packed, np.zeros((1, 8), np.float32), {})])
