"""Pools of attention: layouts, updates in place, and tokens that move."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.pallas_kernels import native
from jaxserve.pallas_kernels.ragged_paged_attention import (
    BACKENDS,
    AttentionInputs,
    AttentionOptions,
    Heads,
    Latents,
    PoolDims,
    QuantizedPages,
    RaggedRows,
    from_canonical,
    layout_for,
    move_tokens,
    new_pages,
    ragged_paged_attention,
    to_canonical,
)
from tests.kernels.attention_cases import CASES, Case
from tests.kernels.attention_runs import SERVING, UNOPTIMIZED, canonical, canonical_by_xla, stored, stored_by_xla
from tests.kernels.latent_cases import CASES as LATENT_CASES
from tests.parameters import mainly, seeds


@functools.cache
def compile_layers(backend, kv_dtype="float32", num_layers=2):
    """Compile several layers over one donated pool; keys of a layer depend on the output of the layer before."""
    T, R, M, Q, K, H, P, N = 32, 8, 64, 4, 2, 32, 16, 2048
    sizes = {"num_layers": num_layers, "num_pages": N, "page_size": P}
    pool = jax.eval_shape(functools.partial(new_pages, backend, Heads(K, H), **sizes, dtype=kv_dtype))
    options = AttentionOptions(H**-0.5)

    def step(q, pool, rows):
        for layer in range(num_layers):
            inputs = AttentionInputs(q, q[:, :K], q[:, K:], rows)
            out, pool = ragged_paged_attention(inputs, pool, layer, options, backend=backend)
            q = q + out
        return q, pool

    def ints(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    rows = RaggedRows(ints(R), ints(R, M), ints(R + 1), ints())
    q = jax.ShapeDtypeStruct((T, Q, H), jnp.float32)
    return jax.jit(step, donate_argnums=1, compiler_options=UNOPTIMIZED).lower(q, pool, rows).compile(), pool


@pytest.mark.parametrize(("backend", "kv_dtype"), [*((name, "float32") for name in SERVING), (SERVING[0], "int8")])
def test_donated_pool_is_updated_in_place(backend, kv_dtype):
    compiled, pool = compile_layers(backend, kv_dtype)
    leaves = jax.tree.leaves(pool)
    pool_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < 2**20 < pool_bytes
    for leaf in leaves:
        shape = re.escape(f"[{','.join(map(str, leaf.shape))}]")
        assert re.search(shape, compiled.as_text())
        assert not re.search(rf"= [a-z0-9]+{shape}\S* (copy|transpose)\(", compiled.as_text())


@pytest.mark.parametrize("backend", [name for name in SERVING if name == "native"])
def test_slices_of_one_projection_reach_the_kernel_uncopied(backend):
    case = Case("prefill", (512,), (512,), has_rope=True)
    (inputs, kv_pages, layer), Q, K = case.arguments(), case.num_query_heads, case.num_kv_heads

    def attend(qkv, kv_pages):
        q, k, v = jnp.split(qkv, [Q, Q + K], axis=1)
        return ragged_paged_attention(inputs._replace(q=q, k=k, v=v), kv_pages, layer, case.options, backend=backend)

    qkv = np.concatenate([inputs.q, inputs.k, inputs.v], axis=1)
    compiled = jax.jit(attend, donate_argnums=1).lower(qkv, stored(backend, kv_pages)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < inputs.k.nbytes


def test_xla_plans_the_rows_once_for_all_layers():
    compiled, _ = compile_layers("xla")
    assert len(re.findall(r" sort\(", compiled.as_text())) == 1


@pytest.mark.parametrize("case", [CASES[0], LATENT_CASES[0]], ids=["heads", "latents"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_canonical_round_trip(backend, case):
    case_pages, kind = case.arguments().kv_pages, case.kind
    pool = stored_by_xla(backend, case_pages)
    layout, dims = layout_for(BACKENDS[backend], kind, case.kv_dtype), PoolDims(*case_pages.shape[:3])
    assert pool.shape == layout.kv_shape(dims)
    assert layout.pool_dims(pool.shape) == dims
    np.testing.assert_array_equal(canonical_by_xla(backend, pool, kind), case_pages)
    np.testing.assert_array_equal(stored(backend, case_pages), pool)
    np.testing.assert_array_equal(canonical(backend, pool, kind), case_pages)


@pytest.mark.parametrize("kv_dtype", mainly(["int8"], "float32"))  # that of the default run has an array of scales
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [Heads(2, 16), Latents(12, 4)], ids=["heads", "latents"])
@pytest.mark.parametrize("seed", seeds(1))
def test_tokens_move_within_their_rows_and_nothing_else_does(backend, kv_dtype, kind, seed):
    """Check any layout, with pages of 32 tokens, against loops over the canonical pool."""
    rng = np.random.default_rng(seed)
    L, N, P, R, M, T = 2, 13, 32, 3, 4, 23
    values = rng.standard_normal((L, N, P, *kind.token_shape), np.float32)
    narrow = QuantizedPages((9 * values).astype(np.int8), values[..., 0].astype("bfloat16"))
    pool = values if kv_dtype == "float32" else narrow
    page_table, table_row = rng.permutation(N)[: R * M].reshape(R, M), rng.permutation(R)
    first = rng.integers(0, M * P - T, R)
    source = np.sort(rng.integers(0, T, (R, T)), axis=1)
    source[0] = np.arange(T)

    def expected(x):
        x, old = x.copy(), x
        for row, column in np.ndindex(R, T):
            to, place = first[row] + column, first[row] + source[row, column]
            pages = page_table[table_row[row]]
            x[:, pages[to // P], to % P] = old[:, pages[place // P], place % P]
        return x

    def move(kv_pages):
        rows = (jnp.asarray(x, jnp.int32) for x in (page_table, table_row, first, source))
        moved = move_tokens(backend, kind, from_canonical(backend, kv_pages), *rows)
        return to_canonical(backend, moved, kind)

    moved = jax.jit(move, compiler_options=UNOPTIMIZED)(pool)
    jax.tree.map(np.testing.assert_array_equal, moved, jax.tree.map(expected, pool))


@pytest.mark.parametrize("backend", SERVING)
def test_pages_for_larger_heads_are_several_of_smaller_ones(backend):
    """Two layers of one head of 8 take the pages of one layer of two heads of 8, each its own half of every page."""
    rng, T = np.random.default_rng(0), 6
    q, k, v = (rng.normal(size=(T, n, 8)).astype(np.float32) for n in (2, 1, 1))
    table = np.array([[4, 1], [2, 0]], np.int32)
    rows = RaggedRows(np.array([6, 2], np.int32), table, np.array([0, 4, 6], np.int32), np.int32(2))
    pool = rng.normal(size=(1, 5, 4, 4, 8)).astype(np.float32)  # [L, N, 2K, P, H] of K = 2
    options = AttentionOptions(0.3)
    attend = jax.jit(
        functools.partial(ragged_paged_attention, layer=0, options=options, backend=backend),
        static_argnames="num_parts",
        compiler_options=UNOPTIMIZED,
    )
    for part in range(2):
        inputs = AttentionInputs(q, k, v, rows._replace(page_table=2 * table + part))
        own = pool.reshape(1, 10, 2, 4, 8)
        expected, written = attend(inputs, own)
        out, pool = map(np.asarray, attend(inputs, pool, num_parts=2))
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(pool.reshape(own.shape), written)
    with pytest.raises(ValueError, match="a page must be 3 pages of 1 kv heads of 8, got a pool of shape"):
        attend(inputs, pool, num_parts=3)


@pytest.mark.skipif(native.unavailable() is not None, reason="needs the kernels")
@pytest.mark.parametrize("num_bytes", [7, (5 << 20) + 13, (80 << 20) + 13])  # the last is provided by the system
def test_zeros_in_memory_that_was_written_before(num_bytes):
    fill = jax.jit(lambda x: x + jnp.uint8(3), donate_argnums=0)
    for _ in range(3):  # the allocator reuses the memory of the arrays before
        zeros = native.zeros((num_bytes,), jnp.uint8)
        assert not np.asarray(zeros).any()
        assert (np.asarray(fill(zeros)) == 3).all()
