"""MLA over chosen tokens against numpy: decoding rows and chunks, ties, draft trees, and rows within the choice."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from numpy.typing import NDArray

from jaxserve.layers.indexed_latents import IndexedLatents
from jaxserve.layers.kv_forms import Latents, NewTokens
from jaxserve.pallas_kernels import native
from jaxserve.pallas_kernels import ragged_paged_attention as ops
from jaxserve.pallas_kernels.ragged_paged_attention import (
    AttentionOptions,
    HeadMatrices,
    IndexInputs,
    RaggedRows,
    apply_rope,
    top_scores,
)
from jaxserve.pallas_kernels.ragged_paged_attention.canonical_pages import CanonicalPages
from jaxserve.pallas_kernels.ragged_paged_attention.pools import backend_named, layout_for
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import decode
from tests.own_programs import UNOPTIMIZED

Q, RANK, ROPE, NOPE, VALUE, HEADS, SIZE, TOP_K, P, M = 2, 8, 4, 4, 4, 3, 8, 6, 4, 8
FORM = IndexedLatents(RANK, ROPE, HEADS, SIZE, TOP_K)
SCALE = 0.3
Floats = NDArray[np.float32]
BACKENDS = ["native", "xla"] if native.unavailable() is None else ["xla"]
LENGTHS = np.array([30, 5, 27, 14, 6])  # tokens per row; one row is within the choice, one is as long
COUNTS = np.array([1, 1, 9, 1, 1])  # new tokens, which attend
NUM_TOKENS = LENGTHS.sum()


def rotated(x: Floats, rope: Floats) -> Floats:
    return np.asarray(apply_rope(jnp.asarray(x), jnp.asarray(rope)))


class Sequences:
    """Random tokens of some rows, whose index scores are small integers, unless they have no ties."""

    def __init__(self, *, has_ties: bool = True) -> None:
        rng = np.random.default_rng(3)
        shape = (len(LENGTHS), LENGTHS.max())
        self.q = rng.standard_normal((*shape, Q, NOPE + ROPE), np.float32)
        self.latents = rng.standard_normal((*shape, RANK + ROPE), np.float32)
        self.index_q = rng.integers(-1, 2, (*shape, HEADS, SIZE)).astype(np.float32)
        self.index_k = rng.integers(-1, 2, (*shape, SIZE)).astype(np.float32)
        self.weights = rng.integers(-1, 3, (*shape, HEADS)).astype(np.float32)
        if not has_ties:
            self.index_q = rng.standard_normal(self.index_q.shape, np.float32)
            self.index_k = rng.standard_normal(self.index_k.shape, np.float32)
            self.weights = rng.standard_normal(self.weights.shape, np.float32)
        to_keys, to_values = rng.standard_normal((Q, NOPE, RANK), np.float32), rng.standard_normal((Q, VALUE, RANK))
        self.matrices = HeadMatrices(jnp.asarray(to_keys), jnp.asarray(to_values, jnp.float32))
        self.table = rng.permutation(len(LENGTHS) * M).reshape(-1, M).astype(np.int32)

    def new(self, start: NDArray[Any], counts: NDArray[Any], rope: Floats | None, *, last_only: bool = False) -> Any:
        """Return the tokens and rows of a step; padding repeats a token, so that all steps have one shape."""
        flat = [(row, start[row] + i) for row in range(len(counts)) for i in range(counts[row])]
        at = tuple(np.array(flat + flat[:1] * (NUM_TOKENS - len(flat))).T)
        bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        rows = RaggedRows(
            *jax.device_put(((start + counts).astype(np.int32), self.table, bounds, np.int32(len(counts))))
        )
        asked = tuple(x[bounds[1:] - 1] for x in at) if last_only else at
        index = IndexInputs(self.index_q[asked], self.weights[asked], self.index_k[at])
        angles = None if rope is None else rope[:, at[1]]
        return NewTokens(self.q[asked], self.latents[at][:, None], self.matrices, angles, indexer=index), rows

    def outputs(self, row: int, position: int, seen: list[int], rope: Floats | None) -> tuple[Floats, list[int]]:
        """Return a query's output [Q, VALUE] and its chosen tokens, among those that it sees."""
        q, latents = self.q[row, position], self.latents[row, seen]
        index_q, index_k = self.index_q[row, position], self.index_k[row, seen]
        if rope is not None:
            q, index_q = (rotated(x[None], rope[:, [position]])[0] for x in (q, index_q))
            latents, index_k = (rotated(x[:, None], rope[:, seen])[:, 0] for x in (latents, index_k))
        scores = self.weights[row, position] @ np.maximum(index_q @ index_k.T, 0)
        chosen = sorted(np.argsort(-scores, kind="stable")[:TOP_K])
        latents = latents[chosen]
        to_keys, to_values = map(np.asarray, self.matrices[:2])
        keys = np.einsum("sr,qnr->qsn", latents[:, :RANK], to_keys)
        scores = np.einsum("qn,qsn->qs", q[:, :NOPE], keys) + q[:, NOPE:] @ latents[:, RANK:].T
        weights = np.exp(SCALE * scores)
        weights /= weights.sum(-1, keepdims=True)
        values = np.einsum("sr,qvr->qsv", latents[:, :RANK], to_values)
        return np.einsum("qs,qsv->qv", weights, values), [seen[i] for i in chosen]


@functools.partial(jax.jit, static_argnames=("form", "backend", "last_only"), compiler_options=UNOPTIMIZED)
def attend(new: NewTokens, rows: RaggedRows, pool: Any, form: Any, backend: str, *, last_only: bool = False) -> Any:
    options = AttentionOptions(SCALE, last_only=last_only)
    return form.attend(new, rows, pool, jnp.int32(1), options, backend=backend)


def new_pool(form: Latents, backend: str, num_pages: int = len(LENGTHS) * M) -> Any:
    sizes = {"num_layers": 2, "num_pages": num_pages, "page_size": P}
    pool = form.new_pages(backend, **sizes, dtype=jnp.dtype("float32"))
    return jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), pool)  # pages hold whatever was in them before


@pytest.mark.parametrize("backend", [BACKENDS[0], *(pytest.param(x, marks=pytest.mark.long) for x in BACKENDS[1:])])
def test_queries_attend_to_their_best_tokens(backend: str) -> None:
    tokens, rope = Sequences(), None
    if backend == "xla":
        angles = np.random.default_rng(0).standard_normal((LENGTHS.max(), ROPE // 2))
        rope = np.stack([np.cos(angles), np.sin(angles)]).astype(np.float32)
        tokens = Sequences(has_ties=False)
    _, pool = attend(*tokens.new(0 * LENGTHS, LENGTHS - COUNTS, rope), new_pool(FORM, backend), FORM, backend)
    out, _ = attend(*tokens.new(LENGTHS - COUNTS, COUNTS, rope), pool, FORM, backend)
    ends = np.cumsum(COUNTS)
    if backend == "xla":
        new, rows = tokens.new(LENGTHS - COUNTS, COUNTS, rope, last_only=True)
        last, _ = attend(new, rows, pool, FORM, backend, last_only=True)
        np.testing.assert_allclose(last, np.asarray(out)[ends - 1], atol=1e-5)
    num_ties = 0
    for row, length in enumerate(LENGTHS):
        for i in range(COUNTS[row]):
            position = length - COUNTS[row] + i
            expected, chosen = tokens.outputs(row, position, list(range(position + 1)), rope)
            num_ties += chosen[-1] < position
            token = ends[row] - COUNTS[row] + i
            np.testing.assert_allclose(out[token], expected, atol=1e-5, err_msg=str((row, position)))
    assert num_ties, "some queries leave out later tokens"


@functools.partial(jax.jit, static_argnames=("form", "backend", "last_only"), compiler_options=UNOPTIMIZED)
def attend_twice(new: NewTokens, rows: RaggedRows, pool: Any, form: Any, backend: str, *, last_only: bool) -> Any:
    """Attend in a layer with an indexer, then in a layer that shares its choice, perhaps for the last tokens only."""
    earlier, last = form.no_choice(backend, pool, rows, int(NUM_TOKENS)), rows.last_tokens()[1]
    facts: Any = {"backend": backend}
    args = rows, pool, jnp.int32(0), AttentionOptions(SCALE)
    first, pool, earlier = form.attend_chosen(new, *args, **facts, earlier=earlier)
    shared = new._replace(indexer=None, q=new.q[last] if last_only else new.q)
    args = rows, pool, jnp.int32(1), AttentionOptions(SCALE, last_only=last_only)
    out, pool, _ = form.attend_chosen(shared, *args, **facts, earlier=earlier)
    return first, out, pool


@pytest.mark.parametrize("last_only", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_layer_shares_an_earlier_layers_choice(last_only: bool) -> None:
    tokens, backend, form = Sequences(), BACKENDS[0], dataclasses.replace(FORM, num_indexers=1)
    pool = new_pool(form, backend)
    assert pool.index_keys.shape[0] == 1 < pool.latents.shape[0]
    _, _, pool = attend_twice(
        *tokens.new(0 * LENGTHS, LENGTHS - COUNTS, None), pool, form, backend, last_only=last_only
    )
    first, out, _ = attend_twice(*tokens.new(LENGTHS - COUNTS, COUNTS, None), pool, form, backend, last_only=last_only)
    ends = np.cumsum(COUNTS)
    own = first[ends - 1] if last_only else first[: ends[-1]]
    np.testing.assert_allclose(out[: len(own)], own, atol=1e-5)
    for row, length in enumerate(LENGTHS):
        expected, _ = tokens.outputs(row, length - 1, list(range(length)), None)
        np.testing.assert_allclose(out[row if last_only else ends[row] - 1], expected, atol=1e-5, err_msg=str(row))


@pytest.mark.long
def test_a_tree_chooses_among_visible_tokens() -> None:
    tokens, row = Sequences(), 2
    backend = BACKENDS[0]
    _, pool = attend(*tokens.new(0 * LENGTHS, LENGTHS - COUNTS, None), new_pool(FORM, backend), FORM, backend)
    parents = [None, 0, 0, 1, 1, 2, 3, 5, 5]  # the row's new tokens
    ancestors: list[list[int]] = []
    for node, parent in enumerate(parents):
        ancestors.append([*(ancestors[parent] if parent is not None else []), node])
    words = np.full(NUM_TOKENS, -1, np.int32)
    first = COUNTS[:row].sum()
    words[first : first + len(parents)] = [sum(1 << i for i in path) for path in ancestors]
    new, rows = tokens.new(LENGTHS - COUNTS, COUNTS, None)
    out, _ = attend(new._replace(tree_mask=words), rows, pool, FORM, backend)
    start = LENGTHS[row] - COUNTS[row]
    for node, path in enumerate(ancestors):
        seen = [*range(start), *(int(start) + i for i in path)]
        expected, _ = tokens.outputs(row, int(start) + node, seen, None)
        np.testing.assert_allclose(out[first + node], expected, atol=1e-5, err_msg=str(node))


@pytest.mark.long
def test_rows_within_the_choice_equal_dense_mla_bitwise() -> None:
    tokens, backend = Sequences(), BACKENDS[0]
    lengths = np.minimum(LENGTHS, TOP_K)
    outputs: list[NDArray[np.float32]] = []
    for form in (Latents(RANK, ROPE), FORM, IndexedLatents(RANK, ROPE, HEADS, SIZE, M * P)):
        pool = new_pool(form, backend)
        _, pool = attend(*tokens.new(0 * lengths, lengths - 1, None), pool, form, backend)
        out, _ = attend(*tokens.new(lengths - 1, np.ones_like(lengths), None), pool, form, backend)
        outputs.append(np.asarray(out))
    np.testing.assert_array_equal(outputs[1], outputs[0])
    np.testing.assert_array_equal(outputs[2], outputs[0])


@pytest.mark.long
def test_moved_tokens_keep_their_index_keys() -> None:
    tokens = Sequences()
    backend = BACKENDS[0]
    _, pool = attend(*tokens.new(0 * LENGTHS, LENGTHS, None), new_pool(FORM, backend), FORM, backend)
    first, source = np.array([9], np.int32), np.array([[0, 3, 4, 3]], np.int32)
    moved = FORM.move_tokens(backend, pool, *map(jnp.asarray, (tokens.table, np.array([2], np.int32), first, source)))
    for before, after in zip(pool, moved, strict=True):
        sequences = [np.asarray(x)[1, tokens.table[2]].reshape(M * P, -1) for x in (before, after)]
        np.testing.assert_array_equal(sequences[1][9:13], sequences[0][[9, 12, 13, 12]])


@pytest.mark.long
def test_a_decoding_row_reads_its_chosen_latents_only() -> None:
    """XLA counts more bytes of latents if a row may choose more tokens, but not if it has more to choose from."""
    rank, size = 512, 16

    def accessed(num_columns: int, top_k: int) -> float:
        form = IndexedLatents(rank, ROPE, 1, size, top_k)
        pool = jax.eval_shape(lambda: new_pool(form, "xla", 600))
        rows = RaggedRows(
            *(jax.ShapeDtypeStruct(x, jnp.int32) for x in ((1,), (1, num_columns), (2,), ())),
        )
        vectors = [jax.ShapeDtypeStruct(x, jnp.float32) for x in ((1, 1, NOPE + ROPE), (1, 1, rank + ROPE))]
        matrices = HeadMatrices(*(jax.ShapeDtypeStruct((1, n, rank), jnp.float32) for n in (NOPE, VALUE)))
        index = IndexInputs(*(jax.ShapeDtypeStruct(x, jnp.float32) for x in ((1, 1, size), (1, 1), (1, size))))
        new = NewTokens(*vectors, matrices, indexer=index)
        found: Any = attend.lower(new, rows, pool, form, "xla", last_only=True).compile().cost_analysis()
        return float(found["bytes accessed"])

    base, with_context, with_choice = accessed(256, 64), accessed(512, 64), accessed(256, 128)
    assert with_context - base < 4 * 256 * P * rank / 8, "bytes of the latents in the additional context"
    assert with_choice - base > 4 * 64 * rank, "bytes of the additional chosen latents"


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("backend", ["mosaic_tpu", "xla"])
def test_latents_are_read_from_any_layout(backend: str, dtype: str) -> None:
    kind, rng = Latents(RANK, ROPE).kind, np.random.default_rng(1)
    sizes: dict[str, int] = {"num_layers": 2, "num_pages": 3, "page_size": 64}
    empty = ops.new_pages("xla", kind, **sizes, dtype=dtype)
    stored: Any = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), empty)
    expected = np.asarray(decode(stored))[1]
    pool = ops.from_canonical(backend, stored)
    layout = layout_for(backend_named(backend), kind, jnp.dtype(dtype))
    pages = CanonicalPages(pool, jnp.int32(1), kind, layout)
    page, offset = rng.integers(0, 3, (2, 5)), rng.integers(0, 64, (2, 5))
    np.testing.assert_array_equal(pages.latents_at(jnp.asarray(page), jnp.asarray(offset)), expected[page, offset])
    latents, values = pages.read(jnp.array([[2, 0], [1, 1]]))
    np.testing.assert_array_equal(latents[:, 0], expected[[[2, 0], [1, 1]]].reshape(2, 128, -1))
    np.testing.assert_array_equal(values, latents[..., :RANK])


def test_working_memory_is_bounded() -> None:
    published = IndexedLatents(512, 64, 64, 128, 2048)
    num_bytes = published.choice_bytes(256, 2048, 128, 131072, 64)
    assert num_bytes == published.choice_bytes(1, 1, 128, 131072, 64) < 200e6
    shared = dataclasses.replace(published, num_indexers=20)
    assert shared.choice_bytes(256, 2048, 128, 131072, 64) - num_bytes == 2 * 2048 * 131072 // 8


def test_index_keys_of_a_quantised_pool_have_16_bits() -> None:
    sizes: dict[str, int] = {"num_layers": 1, "num_pages": 2, "page_size": P}
    pool = FORM.new_pages("xla", **sizes, dtype=jnp.dtype("float8_e4m3fn"))
    leaves: list[Array] = jax.tree.leaves(pool)
    assert [leaf.dtype for leaf in leaves] == [jnp.float8_e4m3fn, jnp.bfloat16, jnp.bfloat16]


@pytest.mark.parametrize(("size", "count"), [(300, 40), (256, 256), (130, 1)])
def test_scores_are_chosen_without_a_sort_as_with_one(size: int, count: int) -> None:
    """Of equal scores the lowest positions come first, also among those that are minus infinity."""
    rng = np.random.default_rng(size)
    scores = rng.integers(-3, 4, (6, size)).astype(np.float32) * np.float32(1e-3)
    scores[3:, size // 3 :] = -np.inf
    wanted = np.sort(np.argsort(-scores, axis=1, kind="stable")[:, :count], axis=1)
    least = top_scores.least_by_bits(jnp.asarray(scores), count)
    np.testing.assert_array_equal(least[:, 0], -np.sort(-scores, axis=1)[:, count - 1])
    mask = top_scores.top_mask(jnp.asarray(scores), count)
    np.testing.assert_array_equal(top_scores.positions_in_mask(mask, count), wanted)
    np.testing.assert_array_equal(top_scores.top_positions(jnp.asarray(scores), count), wanted)
