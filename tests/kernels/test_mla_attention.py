"""Attention over latents: every backend against the float32 reference, and the reference against torch."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.pallas_kernels.op import UnsupportedBackendError
from jaxserve.pallas_kernels.ragged_paged_attention import (
    BACKENDS,
    AttentionInputs,
    AttentionOptions,
    HeadMatrices,
    Latents,
    MLAInputs,
    PoolDims,
    RaggedRows,
    layout_for,
    mla_attention,
    new_pages,
    ragged_paged_attention,
    select_backend,
)
from jaxserve.pallas_kernels.ragged_paged_attention.expanded import break_even_queries
from jaxserve.pallas_kernels.ragged_paged_attention.interface import HeadTerms
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import QUANTIZED_MAX
from tests.kernels.attention_cases import pool_error
from tests.kernels.attention_runs import (
    OTHER_SETS,
    UNOPTIMIZED,
    canonical,
    live,
    on_backends,
    run,
    serving,
    some_pages,
    stored,
)
from tests.kernels.latent_cases import CASES
from tests.oracles import torch

SERVING = serving(Latents(32, 16))
BY_NAME = {case.name: case for case in CASES}
# Each case is a program that XLA compiles slowly: by default it runs some.
QUICK_ON_XLA = ("shared_prefix_written_now", "tree")
attend_heads = jax.jit(
    mla_attention,
    static_argnames=("options", "backend"),
    donate_argnames="kv_pages",
    compiler_options=UNOPTIMIZED,
)


@functools.cache
def expected_of(name):
    return run(BY_NAME[name], BY_NAME[name].arguments(), "reference")


@pytest.mark.parametrize(
    ("name", "backend"), on_backends(SERVING + OTHER_SETS, dict.fromkeys(BY_NAME, True), on_xla=QUICK_ON_XLA)
)
def test_matches_reference(name, backend):
    case, (expected, expected_pool) = BY_NAME[name], expected_of(name)
    out, pool = run(case, case.arguments(), backend)
    tolerance = 1e-2 if case.dtype == "bfloat16" else 1e-5
    np.testing.assert_allclose(live(case, out), live(case, expected), rtol=tolerance, atol=tolerance)
    assert np.isfinite(out).all()
    if case.kv_dtype in QUANTIZED_MAX:
        assert pool_error(*jax.device_put((pool, expected_pool))) <= case.pool_tolerance
        return
    found, wanted = (np.asarray(x, np.float32) for x in (pool, expected_pool))
    np.testing.assert_array_equal(found[..., : case.rank], wanted[..., : case.rank])
    # Rotations are rounded: elements near zero are as exact as those that they are made of.
    step = float(jnp.finfo(case.kv_dtype).eps)
    np.testing.assert_allclose(found[..., case.rank :], wanted[..., case.rank :], rtol=step, atol=1e-6)


READ_IN_PART = {"shared_prefix_written_now": True, "tree": True, "bfloat16": False}


@pytest.mark.parametrize(("name", "backend"), on_backends(SERVING + OTHER_SETS, READ_IN_PART, on_xla=["tree"]))
def test_rows_see_the_pages_that_they_read(name, backend):
    case, (plain, _) = BY_NAME[name], expected_of(name)
    arguments = case.arguments()
    arguments = arguments.changed(pages_to_read=some_pages(case, max(case.pages_per_row)))
    expected, _ = run(case, arguments, "reference")
    out, _ = run(case, arguments, backend)
    tolerance = 1e-2 if case.dtype == "bfloat16" else 1e-5
    np.testing.assert_allclose(live(case, out), live(case, expected), rtol=tolerance, atol=tolerance)
    assert np.abs(live(case, expected) - live(case, plain)).max() > 1e-2


def test_reference_is_multi_head_attention_over_expanded_latents():
    """Queries times the keys' matrix, and outputs times the values', are torch's attention over every head's own."""
    case, rng = BY_NAME["ragged"], np.random.default_rng(1)
    arguments, Q, rank, nope, value = case.arguments(), case.num_query_heads, case.rank, 24, 20
    inputs, layer = arguments.inputs, arguments.layer
    w_k, w_v = rng.normal(size=(Q, nope, rank)), rng.normal(size=(Q, value, rank))
    q_nope = rng.normal(size=(inputs.q.shape[0], Q, nope)) / 5
    q_rope = np.asarray(inputs.q)[..., rank:]
    absorbed = np.concatenate([np.einsum("tqn,qnr->tqr", q_nope, w_k), q_rope], axis=-1)
    out, pool = run(case, arguments.changed(q=absorbed.astype(np.float32)), "reference")
    found = np.einsum("tqr,qvr->tqv", out, w_v)
    pool, table, start = np.asarray(pool)[layer], np.asarray(inputs.rows.page_table), 0
    for row, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
        tokens = slice(start, start + q_len)
        latents = pool[table[row, : case.pages_per_row[row]]].reshape(-1, case.head_dim)[:kv_len]
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
    """Return the inputs of a case with random queries and matrices of heads."""
    inputs, Q, nope_dim, value_dim = case.arguments().inputs, case.num_query_heads, 8, 12
    dtype = inputs.q.dtype
    matrices = HeadMatrices(
        *((rng.normal(size=(Q, n, case.rank)) / n**0.5).astype(dtype) for n in (nope_dim, value_dim))
    )
    q = rng.normal(size=(*inputs.q.shape[:2], nope_dim + case.head_dim - case.rank)).astype(dtype)
    given = MLAInputs(q, inputs.k[:, 0], matrices, inputs.rows, inputs.rope, inputs.tree_mask)
    return jax.device_put(given)


EXPANDED = dict.fromkeys(("two_prompts_of_many_tiles", "ragged", "stale_nan", "bfloat16", "tree"), False)
EXPANDED |= {"shared_prefix_written_now": True, "float8": True}


@pytest.mark.parametrize(("name", "backend"), on_backends(SERVING, EXPANDED, on_xla=["shared_prefix_written_now"]))
def test_expanded_attention_is_that_over_latents(name, backend):
    """Rows of many tokens, of few and of one, beside each other."""
    case = BY_NAME[name]
    arguments, inputs = case.arguments(), head_inputs(case, np.random.default_rng(2))
    assert 1 < break_even_queries(inputs.matrices) <= max(case.q_lens)
    exact = jax.tree.map(lambda x: np.asarray(x, np.float32) if x.dtype == jnp.bfloat16 else np.asarray(x), inputs)
    q_nope, q_rope = np.split(exact.q, [exact.matrices.to_keys.shape[1]], axis=-1)
    absorbed = np.concatenate([np.einsum("tqn,qnr->tqr", q_nope, exact.matrices.to_keys), q_rope], axis=-1)
    wanted, wanted_pool = run(case, arguments._replace(inputs=exact.absorbed(jnp.asarray(absorbed))), "reference")
    wanted = np.einsum("tqr,qvr->tqv", wanted, exact.matrices.to_values)
    pool = stored(backend, arguments.kv_pages)
    out, pool = attend_heads(inputs, pool, arguments.layer, case.options, backend=backend)
    pool = canonical(backend, pool, case.kind)
    tolerance = 2e-2 if case.dtype == "bfloat16" else 1e-5
    found = np.asarray(out).astype(np.float32)
    np.testing.assert_allclose(live(case, found), live(case, wanted), rtol=tolerance, atol=tolerance)
    assert np.isfinite(found).all()
    if case.kv_dtype in QUANTIZED_MAX:
        assert pool_error(*jax.device_put((pool, wanted_pool))) <= case.pool_tolerance
    else:
        step = float(jnp.finfo(case.kv_dtype).eps)
        found, wanted = (np.asarray(x, np.float32) for x in (pool, wanted_pool))
        np.testing.assert_allclose(found, wanted, rtol=step, atol=1e-6)


@pytest.mark.parametrize(
    "name",
    [pytest.param("two_prompts_of_many_tiles", marks=pytest.mark.long), pytest.param("ragged", marks=pytest.mark.full)],
)
def test_rows_expand_latents_with_their_own_terms(name):
    """Each row has the outputs of a call in which all have its matrices; a row without terms keeps its bits."""
    case, rng = BY_NAME[name], np.random.default_rng(3)
    inputs, options = head_inputs(case, rng), case.options
    (Q, nope_dim, rank), value_dim = inputs.matrices.to_keys.shape, inputs.matrices.to_values.shape[1]
    a, b = rng.normal(size=(2, 3, rank)) / 9, rng.normal(size=(2, 3, Q, nope_dim + value_dim))
    row_adapters = np.arange(len(case.q_lens)) % 3
    adapters = np.pad(np.repeat(row_adapters, case.q_lens), (0, len(inputs.q) - sum(case.q_lens)))
    terms = HeadTerms(*jax.device_put((adapters[:, None] == [1, 2], a.astype("float32"), b.astype("float32"))))

    def attend(matrices):
        arguments = case.arguments()
        given = inputs._replace(matrices=matrices)
        out, _ = attend_heads(given, stored("xla", arguments.kv_pages), arguments.layer, options, backend="xla")
        return live(case, np.asarray(out))

    found, rows = attend(inputs.matrices._replace(terms=terms)), live(case, adapters)
    for adapter in range(3):
        merged = [np.asarray(x, np.float64) for x in inputs.matrices[:2]]
        if adapter:
            own = np.einsum("kqn,kr->qnr", b[adapter - 1], a[adapter - 1])
            merged = [merged[0] + own[:, :nope_dim], merged[1] + own[:, nope_dim:]]
        wanted = attend(HeadMatrices(*(jnp.asarray(x, jnp.float32) for x in merged)))
        tolerance = 1e-4 if adapter else 0
        np.testing.assert_allclose(found[rows == adapter], wanted[rows == adapter], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", SERVING + OTHER_SETS)
def test_a_decode_row_does_not_depend_on_its_neighbours(backend):
    case = BY_NAME["all_decode_ragged"]
    arguments = case.arguments()
    out, _ = run(case, arguments, backend)
    inputs = jax.tree.map(np.asarray, arguments.inputs)
    for row in (1, 5):
        rolled = inputs._replace(
            q=np.roll(inputs.q, -row, 0),
            k=np.roll(inputs.k, -row, 0),
            rope=np.roll(inputs.rope, -row, 1),
            rows=inputs.rows._replace(
                kv_lens=np.roll(inputs.rows.kv_lens, -row),
                page_table=np.roll(inputs.rows.page_table, -row, 0),
                num_rows=np.int32(1),
            ),
        )
        alone, _ = run(case, arguments._replace(inputs=rolled), backend)
        np.testing.assert_array_equal(alone[0], out[row])


@pytest.mark.parametrize("has_matrices", [False, True])
@pytest.mark.parametrize("backend", SERVING)
def test_donated_pool_is_updated_in_place(backend, has_matrices):
    T, R, M, Q, rank, W, P, N, L = 32, 8, 64, 4, 32, 48, 16, 512, 2
    matrices = HeadMatrices(*jax.device_put([np.zeros((Q, 8, rank), np.float32)] * 2))
    layout = layout_for(BACKENDS[backend], Latents(rank, W - rank), jnp.float32)
    pool = jax.ShapeDtypeStruct(layout.kv_shape(PoolDims(L, N, P)), jnp.float32)

    def step(q, pool, rows):
        for layer in range(L):
            options = AttentionOptions(0.1, rank=rank)
            if has_matrices:
                inputs = MLAInputs(q[..., rank - 8 :], q[:, 0], matrices, rows)
                out, pool = mla_attention(inputs, pool, layer, options, backend=backend)
            else:
                inputs = AttentionInputs(q, q[:, :1], None, rows)
                out, pool = ragged_paged_attention(inputs, pool, layer, options, backend=backend)
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


def call(options=None, **changes):
    case = BY_NAME["ragged"]
    arguments = case.arguments()
    arguments = arguments.changed(kv_pages=stored("xla", arguments.kv_pages)).changed(**changes)
    return ragged_paged_attention(*arguments, case.options if options is None else options, backend="xla")


@pytest.mark.usefixtures("without_jaxtyping")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": np.zeros((40, 1, 32))}, "q and k must agree in tokens and head_dim"),
        ({"k": np.zeros((40, 2, 48))}, "k must have the latents as the keys of one head, got 2 heads"),
        ({"v": np.zeros((40, 1, 48))}, r"v must be None exactly with a rank \(latents\), got a rank of 32"),
        ({"options": AttentionOptions(1.0)}, r"v must be None exactly with a rank \(latents\), got a rank of None"),
        ({"options": AttentionOptions(1.0, rank=49)}, "rank must be at most the 48 elements"),
        ({"options": AttentionOptions(1.0, 7, rank=32)}, "sinks, window and soft_cap must be None with latents"),
        ({"rope": np.zeros((2, 40, 24))}, r"rope must be float32 of shape \(2, 40, 8\)"),
        ({"kv_pages": np.zeros((2, 9, 16, 40))}, r"must have shape \(2, 9, 16, 48\) for latents of 48"),
        ({"kv_pages": np.zeros((2, 9, 1, 16, 48))}, r"must have shape \(2, 9, 16, 48\) for latents of 48"),
        ({"kv_pages": np.zeros((2, 9, 48))}, "the pool must have 4 or 5 axes"),
        ({"kv_pages": np.zeros((2, 9, 16, 48), jnp.float8_e4m3fn)}, "got float8_e4m3fn without scales"),
        ({"layer": 2}, r"layer must be in \[0, 2\), got 2"),
        ({"tree_mask": np.zeros(3, np.int32)}, r"tree_mask must be int32 of shape \(40,\)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_arguments_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        call(**changes)


def test_backends_that_cannot_serve_say_why():
    sizes = {"kind": Latents(32, 16), "num_query_heads": 4, "page_size": None}
    with pytest.raises(UnsupportedBackendError, match=r"must be one of .*, got 'triton'"):
        select_backend("triton", **sizes, kv_dtype="float32")
    with pytest.raises(UnsupportedBackendError, match="not int16"):
        select_backend("xla", **sizes, kv_dtype="int16")
    with pytest.raises(UnsupportedBackendError, match="xla: latents cannot be in a pool of int8"):
        select_backend(**sizes, kv_dtype="int8")
    name = select_backend(**sizes, kv_dtype="float8_e4m3fn")
    pool = new_pages(name, Latents(32, 16), num_layers=2, num_pages=3, page_size=8, dtype="float8_e4m3fn")
    assert sum(x.nbytes for x in jax.tree.leaves(pool)) == 2 * 3 * 8 * (48 + 2)


@pytest.mark.skipif("native" not in SERVING, reason="kernels not built: test_native_build.py fails then")
def test_the_native_kernel_refuses_pools_of_bytes():
    inputs, kv_pages, layer = BY_NAME["ragged"].arguments()
    pages = np.zeros(kv_pages.shape, np.uint8)
    attend = jax.jit(BACKENDS["native"].write_and_attend, static_argnums=3, donate_argnums=1)
    with pytest.raises(jax.errors.JaxRuntimeError, match="latents must be float32, bfloat16 or float8_e4m3fn"):
        jax.block_until_ready(attend(inputs, pages, layer, BY_NAME["ragged"].options))
