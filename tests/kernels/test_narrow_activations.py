"""Native kernels whose inputs and outputs are bfloat16: computed as if these were float32, and rounded once."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.pallas_kernels import native, packed_linear
from tests.kernels.attention_runs import BY_NAME, SERVING, assert_same_pool, live, run
from tests.kernels.test_attention_properties import on_host, starting_at
from tests.kernels.test_packed_linear import EPS, INSTRUCTION_SETS, UNOPTIMIZED, matrix, quantized

reason = packed_linear.unsupported("float32", jax.default_backend())
pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))
NARROW = jnp.dtype("bfloat16")


def packed_matrices(shape):
    """Return a matrix in each type of weights, plain or gated."""
    weight, (elements, scales) = matrix(shape), quantized(shape, 2, "int8")
    arrays = [(weight,), (weight.astype(NARROW),), (weight.astype(np.float16),), (elements, scales)]
    return [packed_linear.pack(*each, gated=gated) for each in arrays for gated in (False, True)]


@partial(jax.jit, compiler_options=UNOPTIMIZED, static_argnames="dtype")
def products(calls, dtype):
    return [
        packed_linear.multiply(packed, x, rms_norm=None if norm is None else (norm, EPS), dtype=dtype, **more)
        for packed, x, norm, more in calls
    ]


@partial(jax.jit, compiler_options=UNOPTIMIZED, static_argnames="dtype")
def grouped_products(packed, x, sizes, dtype):
    return packed_linear.multiply_groups(packed, x, sizes, dtype=dtype)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_matmuls_round_their_outputs_once(instruction_set):
    calls = []
    for packed in packed_matrices((72, 66)):
        for num_tokens in (1, 7, 45):
            x = matrix((num_tokens, 66), 1).astype(NARROW)
            more = {"residual": matrix((num_tokens, packed.num_outputs), 2).astype(NARROW), "num_live": np.int32(40)}
            calls += [(packed, x, None, more), (packed, x, matrix((66,), 3), {"bias": matrix((72,), 4)})]
    wide = [
        (
            packed,
            x.astype(np.float32),
            norm,
            {name: each.astype(np.float32 if each.dtype == NARROW else each.dtype) for name, each in more.items()},
        )
        for packed, x, norm, more in calls
    ]
    with native.using(instruction_set):
        found, expected = products(calls, NARROW), products(wide, jnp.dtype("float32"))
    for y, exact in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(y), np.asarray(exact).astype(NARROW))


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_grouped_matmuls_round_their_outputs_once(instruction_set):
    packed = packed_linear.pack(matrix((120, 66)).astype(NARROW), num_matrices=3)
    x, sizes = matrix((50, 66), 1).astype(NARROW), np.array([20, 0, 25], np.int32)
    with native.using(instruction_set):
        found = grouped_products(packed, x, sizes, NARROW)
        expected = grouped_products(packed, x.astype(np.float32), sizes, jnp.dtype("float32"))
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected).astype(NARROW))
    assert not np.asarray(found)[45:].any()


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS[:1])
def test_many_tokens_with_many_columns_have_the_bits_of_few(instruction_set):
    """Tiles multiply such a matrix in parts of the columns, and the sums wait in memory between the parts."""
    weight, x = matrix((40, 3000)).astype(NARROW), matrix((530, 3000), 1).astype(NARROW)
    packed = packed_linear.pack(weight)
    slices = [slice(530), slice(1), slice(500, 530), slice(200, 301)]
    whole, *found = map(np.asarray, rounded_products(packed, [x[part] for part in slices]))
    for part, y in zip(slices[1:], found, strict=True):
        np.testing.assert_array_equal(y, whole[part])
    exact = x.astype(np.float64) @ weight.astype(np.float64).T
    np.testing.assert_allclose(whole, exact, rtol=0, atol=1e-3)


@partial(jax.jit, compiler_options=UNOPTIMIZED)
def rounded_products(packed, inputs):
    return [packed_linear.multiply(packed, x, input_format="bfloat16") for x in inputs]


ATTENTION = ("rope_sinks_window_soft_cap", "rope_two_prompts_of_many_tiles", "rope_shared_prefix", "rope_head_dim_128")
NATIVE = [backend for backend in SERVING if backend == "native"]


def narrow(name):
    """Return a case with activations and a pool of bfloat16."""
    return replace(BY_NAME[name], dtype="bfloat16", kv_dtype="bfloat16")


@pytest.mark.parametrize(
    "name", [*ATTENTION, "group_of_4", "pages_of_256", "last_only_window_sinks", "tree_window_inside"]
)
@pytest.mark.parametrize("backend", NATIVE)
def test_attention_matches_the_reference(name, backend):
    case, arguments = narrow(name), narrow(name).arguments()
    out, pool = run(case, arguments, backend)
    expected, expected_pool = run(case, arguments, "reference")
    np.testing.assert_allclose(live(case, out), live(case, expected), rtol=1e-2, atol=1e-2)
    assert_same_pool(case, pool, expected_pool)


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("backend", NATIVE)
def test_last_tokens_have_the_same_bits_alone(name, backend):
    """A token of a prompt has the bits that a decoding row has."""
    case = narrow(name)
    arguments = on_host(case.arguments())
    num_rows = len(arguments.inputs.rows.kv_lens)
    arguments = arguments.changed(table_row=np.arange(num_rows, dtype=np.int32))
    out, pool = run(case, arguments, backend)
    lengths = np.minimum(np.arange(num_rows + 1), 1).astype(np.int32)
    for row_id, end in enumerate(np.cumsum(case.q_lens)):
        alone = starting_at(arguments, token_id=int(end) - 1, row_id=row_id)
        alone = alone.changed(cu_q_lens=lengths, num_rows=np.int32(1), kv_pages=pool)
        found, _ = run(case, alone, backend)
        np.testing.assert_array_equal(np.asarray(found)[0], np.asarray(out)[end - 1])
