"""Attention over latents: every backend against the float32 reference, and the reference against torch."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxserve.pallas_kernels import native
from jaxserve.pallas_kernels.mla_attention import (
    BACKENDS,
    HeadInputs,
    HeadMatrices,
    LatentInputs,
    LatentOptions,
    PoolDims,
    Problem,
    expanded,
    from_canonical,
    head_attention,
    mla_attention,
    move_tokens,
    new_pages,
    select_backend,
    to_canonical,
)
from jaxserve.pallas_kernels.mla_attention.layout import TokenMajor
from jaxserve.pallas_kernels.op import UnsupportedBackendError
from jaxserve.pallas_kernels.ragged_paged_attention import RaggedRows
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import QUANTIZED_MAX

from tests.kernels import latent_reference
from tests.kernels.attention_cases import pool_error
from tests.kernels.attention_runs import OTHER_SETS, UNOPTIMIZED, in_one, on_backends, some_pages
from tests.kernels.latent_cases import CASES
from tests.oracles import torch

PLAIN = Problem(4, 32, 16, 16, jnp.dtype("float32"), jax.default_backend())
SERVING = [name for name in BACKENDS if BACKENDS[name].supports(PLAIN) is None]
BY_NAME = {case.name: case for case in CASES}
# Each case is a program that XLA compiles slowly: by default it runs some.
QUICK_ON_XLA = ("shared_prefix_written_now", "all_decode_ragged", "float8", "tree")
jitted = jax.jit(
    mla_attention,
    static_argnames=("options", "backend"),
    donate_argnames="kv_pages",
    compiler_options=UNOPTIMIZED,
)


attend_heads = jax.jit(
    head_attention,
    static_argnames=("options", "backend"),
    donate_argnames="kv_pages",
    compiler_options=UNOPTIMIZED,
)


# One program for each shape of a pool, which makes a copy that can be donated.
stored_by_xla = in_one(lambda backend, pages: jax.tree.map(jnp.copy, from_canonical(backend, pages)))
canonical_by_xla = jax.jit(to_canonical, static_argnums=0, static_argnames="width", compiler_options=UNOPTIMIZED)


def stored(backend, pages):
    """Return a copy of canonical pages in a backend's layout, without a program if that is the same."""
    if isinstance(BACKENDS[backend].LAYOUT, TokenMajor):
        return jax.device_put(jax.tree.map(np.asarray, pages), may_alias=False)
    return stored_by_xla(backend, pages)


def canonical(backend, pages, width):
    """Invert `stored`."""
    if isinstance(BACKENDS[backend].LAYOUT, TokenMajor):
        return pages
    return canonical_by_xla(backend, pages, width=width)


def run(case, arguments, backend):
    """Return the output of all tokens and the pool in canonical layout."""
    inputs, kv_pages, layer = arguments
    backend, _, instruction_set = backend.partition(":")
    if instruction_set:
        with native.using(instruction_set):
            return run(case, arguments, backend)
    if backend == "reference":
        out, pool = latent_reference.write_and_attend(*jax.device_put((inputs, kv_pages)), layer, case.options)
    else:
        pool = stored(backend, kv_pages)
        out, pool = jitted(inputs, pool, layer, case.options, backend=backend)
        pool = canonical(backend, pool, case.rows.head_dim)
    return np.asarray(out).astype(np.float32), pool


def live(case, out):
    return out[: sum(case.rows.q_lens)]


@functools.cache
def expected_of(name):
    return run(BY_NAME[name], BY_NAME[name].arguments(), "reference")


@pytest.mark.parametrize(
    ("name", "backend"), on_backends(SERVING + OTHER_SETS, dict.fromkeys(BY_NAME, True), on_xla=QUICK_ON_XLA)
)
def test_matches_reference(name, backend):
    case, (expected, expected_pool) = BY_NAME[name], expected_of(name)
    out, pool = run(case, case.arguments(), backend)
    tolerance = 1e-2 if case.rows.dtype == "bfloat16" else 1e-5
    np.testing.assert_allclose(live(case, out), live(case, expected), rtol=tolerance, atol=tolerance)
    assert np.isfinite(out).all()
    if case.rows.kv_dtype in QUANTIZED_MAX:
        assert pool_error(pool, expected_pool) <= case.rows.pool_tolerance
        return
    found, wanted = (np.asarray(x, np.float32) for x in (pool, expected_pool))
    np.testing.assert_array_equal(found[..., : case.rank], wanted[..., : case.rank])
    # Rotations are rounded: elements near zero are as exact as those that they are made of.
    step = float(jnp.finfo(case.rows.kv_dtype).eps)
    np.testing.assert_allclose(found[..., case.rank :], wanted[..., case.rank :], rtol=step, atol=1e-6)


READ_IN_PART = {"shared_prefix_written_now": True, "tree": True, "bfloat16": False}


@pytest.mark.parametrize(("name", "backend"), on_backends(SERVING + OTHER_SETS, READ_IN_PART, on_xla=["tree"]))
def test_rows_see_the_pages_that_they_read(name, backend):
    case, (plain, _) = BY_NAME[name], expected_of(name)
    arguments = case.arguments()
    pages = some_pages(case.rows, max(case.rows.pages_per_row))
    rows = arguments.inputs.rows._replace(pages_to_read=pages)
    arguments = arguments._replace(inputs=arguments.inputs._replace(rows=rows))
    expected, _ = run(case, arguments, "reference")
    out, _ = run(case, arguments, backend)
    tolerance = 1e-2 if case.rows.dtype == "bfloat16" else 1e-5
    np.testing.assert_allclose(live(case, out), live(case, expected), rtol=tolerance, atol=tolerance)
    assert np.abs(live(case, expected) - live(case, plain)).max() > 1e-2


def test_reference_is_multi_head_attention_over_expanded_latents():
    """Queries times the keys' matrix, and outputs times the values', are torch's attention over every head's own."""
    case, rng = BY_NAME["ragged"], np.random.default_rng(1)
    (inputs, kv_pages, layer), Q, rank, nope, value = case.arguments(), case.rows.num_query_heads, case.rank, 24, 20
    w_k, w_v = rng.normal(size=(Q, nope, rank)), rng.normal(size=(Q, value, rank))
    q_nope = rng.normal(size=(inputs.q.shape[0], Q, nope)) / 5
    q_rope = np.asarray(inputs.q)[..., rank:]
    absorbed = np.concatenate([np.einsum("tqn,qnr->tqr", q_nope, w_k), q_rope], axis=-1)
    inputs = inputs._replace(q=absorbed.astype(np.float32))
    out, pool = run(case, (inputs, kv_pages, layer), "reference")
    found = np.einsum("tqr,qvr->tqv", out, w_v)
    pool, table, start = np.asarray(pool)[layer], np.asarray(inputs.rows.page_table), 0
    for row, (q_len, kv_len) in enumerate(zip(case.rows.q_lens, case.rows.kv_lens, strict=True)):
        tokens = slice(start, start + q_len)
        latents = pool[table[row, : case.rows.pages_per_row[row]]].reshape(-1, case.rows.head_dim)[:kv_len]
        expanded = np.einsum("sr,qnr->qsn", latents[:, :rank], w_k)
        shared = np.broadcast_to(latents[:, rank:], (Q, kv_len, latents.shape[1] - rank))
        k, v = np.concatenate([expanded, shared], axis=-1), np.einsum("sr,qvr->qsv", latents[:, :rank], w_v)
        q = np.concatenate([q_nope[tokens], q_rope[tokens]], axis=-1).swapaxes(0, 1)
        seen = torch.tensor(np.arange(kv_len - q_len, kv_len)[:, None] >= np.arange(kv_len))
        wanted = torch.nn.functional.scaled_dot_product_attention(
            *(torch.tensor(x) for x in (q, k, v)), attn_mask=seen, scale=case.options.scale
        )
        np.testing.assert_allclose(found[tokens], wanted.transpose(0, 1).numpy(), rtol=1e-4, atol=1e-4)
        start += q_len


def head_inputs(case, rng):
    """Return the inputs of a case with random queries and matrices of heads, and its pool and layer."""
    (inputs, kv_pages, layer), Q, nope_dim, value_dim = case.arguments(), case.rows.num_query_heads, 8, 12
    dtype = inputs.q.dtype
    matrices = HeadMatrices(
        *((rng.normal(size=(Q, n, case.rank)) / n**0.5).astype(dtype) for n in (nope_dim, value_dim))
    )
    q = rng.normal(size=(*inputs.q.shape[:2], nope_dim + case.rows.head_dim - case.rank)).astype(dtype)
    given = HeadInputs(q, inputs.latents, matrices, inputs.rows, inputs.rope, inputs.tree_mask)
    return jax.device_put(given), kv_pages, layer


EXPANDED = dict.fromkeys(("two_prompts_of_many_tiles", "ragged", "stale_nan", "bfloat16", "tree"), False)
EXPANDED |= {"shared_prefix_written_now": True, "float8": True}


@pytest.mark.parametrize(("name", "backend"), on_backends(SERVING, EXPANDED, on_xla=["shared_prefix_written_now"]))
def test_expanded_attention_is_that_over_latents(name, backend):
    """Rows of many tokens, of few and of one, beside each other."""
    case = BY_NAME[name]
    inputs, kv_pages, layer = head_inputs(case, np.random.default_rng(2))
    assert 1 < expanded.fewest_queries(inputs.matrices) <= max(case.rows.q_lens)
    exact = jax.tree.map(lambda x: np.asarray(x, np.float32) if x.dtype == jnp.bfloat16 else np.asarray(x), inputs)
    q_nope, q_rope = np.split(exact.q, [exact.matrices.to_keys.shape[1]], axis=-1)
    absorbed = np.concatenate([np.einsum("tqn,qnr->tqr", q_nope, exact.matrices.to_keys), q_rope], axis=-1)
    wanted, wanted_pool = run(case, (exact.absorbed(jnp.asarray(absorbed)), kv_pages, layer), "reference")
    wanted = np.einsum("tqr,qvr->tqv", wanted, exact.matrices.to_values)
    out, pool = attend_heads(inputs, stored(backend, kv_pages), layer, case.options, backend=backend)
    pool = canonical(backend, pool, case.rows.head_dim)
    tolerance = 2e-2 if case.rows.dtype == "bfloat16" else 1e-5
    found = np.asarray(out).astype(np.float32)
    np.testing.assert_allclose(live(case, found), live(case, wanted), rtol=tolerance, atol=tolerance)
    assert np.isfinite(found).all()
    if case.rows.kv_dtype in QUANTIZED_MAX:
        assert pool_error(pool, wanted_pool) <= case.rows.pool_tolerance
    else:
        step = float(jnp.finfo(case.rows.kv_dtype).eps)
        found, wanted = (np.asarray(x, np.float32) for x in (pool, wanted_pool))
        np.testing.assert_allclose(found, wanted, rtol=step, atol=1e-6)


@pytest.mark.parametrize("backend", SERVING + OTHER_SETS)
def test_a_decode_row_does_not_depend_on_its_neighbours(backend):
    case = BY_NAME["all_decode_ragged"]
    inputs, kv_pages, layer = case.arguments()
    out, _ = run(case, (inputs, kv_pages, layer), backend)
    inputs = jax.tree.map(np.asarray, inputs)
    for row in (1, 5):
        rolled = inputs._replace(
            q=np.roll(inputs.q, -row, 0),
            latents=np.roll(inputs.latents, -row, 0),
            rope=np.roll(inputs.rope, -row, 1),
            rows=inputs.rows._replace(
                kv_lens=np.roll(inputs.rows.kv_lens, -row),
                page_table=np.roll(inputs.rows.page_table, -row, 0),
                num_rows=np.int32(1),
            ),
        )
        alone, _ = run(case, (rolled, kv_pages, layer), backend)
        np.testing.assert_array_equal(alone[0], out[row])


@pytest.mark.parametrize("has_matrices", [False, True])
@pytest.mark.parametrize("backend", SERVING)
def test_donated_pool_is_updated_in_place(backend, has_matrices):
    T, R, M, Q, rank, W, P, N, L = 32, 8, 64, 4, 32, 48, 16, 512, 2
    matrices = HeadMatrices(*jax.device_put([np.zeros((Q, 8, rank), np.float32)] * 2))
    pool = jax.ShapeDtypeStruct(BACKENDS[backend].LAYOUT.kv_shape(PoolDims(L, N, P, W)), jnp.float32)

    def step(q, pool, rows):
        for layer in range(L):
            options = LatentOptions(rank, 0.1)
            if has_matrices:
                inputs = HeadInputs(q[..., rank - 8 :], q[:, 0], matrices, rows)
                out, pool = head_attention(inputs, pool, layer, options, backend=backend)
            else:
                out, pool = mla_attention(LatentInputs(q, q[:, 0], rows), pool, layer, options, backend=backend)
            q = q.at[..., : out.shape[2]].add(out)
        return q, pool

    def ints(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    rows = RaggedRows(ints(R), ints(R, M), ints(R + 1), ints())
    q = jax.ShapeDtypeStruct((T, Q, W), jnp.float32)
    compiled = jax.jit(step, donate_argnums=1, compiler_options=UNOPTIMIZED).lower(q, pool, rows).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= math.prod(pool.shape) * 4
    assert memory.temp_size_in_bytes < 2**20 < math.prod(pool.shape) * 4
    pool_shape = re.escape(f"f32[{','.join(map(str, pool.shape))}]")
    assert not re.search(rf"= {pool_shape}\S* (copy|transpose)\(", compiled.as_text())


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_move_within_their_rows(backend):
    rng = np.random.default_rng(0)
    values = rng.normal(size=(2, 7, 8, 12)).astype(np.float32)
    table, table_row = np.array([[0, 6], [3, 1]]), np.array([1, 0])
    first, source = np.array([5, 2]), np.array([[0, 2, 2], [0, 1, 2]])
    pool = stored(backend, values)
    dims = BACKENDS[backend].LAYOUT.pool_dims(pool.shape)
    assert dims[:3] == (2, 7, 8)
    assert dims.width >= 12
    assert BACKENDS[backend].LAYOUT.kv_shape(PoolDims(2, 7, 8, 12)) == pool.shape
    rows = (x.astype(np.int32) for x in (table, table_row, first, source))
    move = jax.jit(functools.partial(move_tokens, backend), compiler_options=UNOPTIMIZED)
    moved = canonical(backend, move(pool, *rows), width=12)
    expected = values.copy()
    expected[:, 3, 6] = expected[:, 3, 7]  # tokens 5, 6 and 7 of row 0 become 5, 7 and 7
    np.testing.assert_array_equal(moved, expected)


def call(**changes):
    inputs, kv_pages, layer = BY_NAME["ragged"].arguments()
    given = {"kv_pages": kv_pages, "layer": layer, "options": BY_NAME["ragged"].options, "backend": "xla"}
    given |= {name: changes.pop(name) for name in list(changes) if name in given}
    return mla_attention(inputs._replace(**changes), **given)


@pytest.mark.usefixtures("without_jaxtyping")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latents": np.zeros((40, 32))}, r"q must be \[T, Q, W\] and latents \[T, W\]"),
        ({"options": LatentOptions(49, 1.0)}, "rank must be at most the 48 elements"),
        ({"rope": np.zeros((2, 40, 24))}, r"rope must be float32 of shape \(2, 40, 8\)"),
        ({"kv_pages": np.zeros((2, 9, 16, 40))}, "kv_pages holds latents of 40 elements, those of this call have 48"),
        ({"kv_pages": np.zeros((2, 9, 2, 16, 48))}, r"must be \[L, N, P, W\]"),
        ({"kv_pages": np.zeros((2, 9, 16, 48), jnp.float8_e4m3fn)}, "got float8_e4m3fn without scales; use new_pages"),
        ({"layer": 2}, r"layer must be in \[0, 2\), got 2"),
        ({"tree_mask": np.zeros(3, np.int32)}, r"tree_mask must be int32 of shape \(40,\)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_arguments_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        call(**changes)


@pytest.mark.parametrize("most", [0, -3])
def test_a_row_that_attends_has_a_token(most):
    with pytest.raises(ValueError, match=f"max_queries must be at least 1 or None, got {most}"):
        LatentOptions(32, 1.0, most)


def test_backends_that_cannot_serve_say_why():
    sizes = {"num_query_heads": 4, "rank": 32, "rope_dim": 16, "page_size": None}
    with pytest.raises(UnsupportedBackendError, match=r"must be one of .*, got 'triton'"):
        select_backend("triton", **sizes, kv_dtype="float32")
    with pytest.raises(UnsupportedBackendError, match="not int16"):
        select_backend("xla", **sizes, kv_dtype="int16")
    with pytest.raises(UnsupportedBackendError, match="xla: latents cannot be in a pool of int8"):
        select_backend(**sizes, kv_dtype="int8")
    name = select_backend(**sizes, kv_dtype="float8_e4m3fn")
    pool = new_pages(name, num_layers=2, num_pages=3, page_size=8, width=48, dtype="float8_e4m3fn")
    assert sum(x.nbytes for x in jax.tree.leaves(pool)) == 2 * 3 * 8 * (48 + 2)


@pytest.mark.skipif("native" not in SERVING, reason="kernels not built: test_native_build.py fails then")
def test_the_native_kernel_refuses_pools_of_bytes():
    inputs, kv_pages, layer = BY_NAME["ragged"].arguments()
    pages = np.zeros(kv_pages.shape, np.uint8)
    attend = jax.jit(BACKENDS["native"].write_and_attend, static_argnums=3, donate_argnums=1)
    with pytest.raises(jax.errors.JaxRuntimeError, match="latents must be float32, bfloat16 or float8_e4m3fn"):
        jax.block_until_ready(attend(inputs, pages, layer, BY_NAME["ragged"].options))
