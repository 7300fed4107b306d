"""Token-wise reads and writes of logits [R, V], with an implementation for each kind of device.

Results are equal on all devices, except for the positions of NaN. A TPU is slow at single elements, and XLA sorts
before a scatter or a top-k there: such programs took a minute to compile for 128,000 tokens.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

ARGMAX_BLOCK = 64  # block size of the first reduction
# minimum rows for which blocks are three times faster on CPUs than reading all logits twice; slower below
ARGMAX_ROWS = 16
LANES = 128  # lanes of a TPU
# Tokens that a GPU selects one by one: more than requests tend to ask for. Beyond that it sorts all logits, by a
# library that cannot be part of a CUDA graph.
SELECTED_ONE_BY_ONE = 64


def padded_to_lanes(size: int) -> int:
    """Return the next multiple of LANES: with such a last axis, slot tables keep their rows contiguous on a TPU."""
    return -(-size // LANES) * LANES


def first_argmax(logits: Float[Array, "R V"]) -> Int[Array, " R"]:
    """Return the id of each row's first largest logit, i32[R]."""
    ids: Array = lax.platform_dependent(logits, cpu=argmax_by_blocks, default=plain_argmax)
    return ids


def add_at(
    table: Float[Array, "R V"], token_ids: Int[Array, "R B"], values: Float[Array, "R B"]
) -> Float[Array, "R V"]:
    """Add the finite `values` to `table` [R, V] at each row's ids; ids outside [0, V) are ignored."""
    added: Array = lax.platform_dependent(table, token_ids, values, tpu=add_by_matmul, default=_scatter_add)
    return added


def take_rows(table: Int[Array, "S V"], slots: Int[Array, " R"]) -> Int[Array, "R V"]:
    """Return the rows of `table` [S, V] at `slots`; slots out of range are clipped."""

    def one_by_one(table: Array, slots: Array) -> Array:
        return lax.map(lambda slot: lax.dynamic_index_in_dim(table, slot, keepdims=False), slots)

    def gather(table: Array, slots: Array) -> Array:
        return table.at[slots].get(mode="clip")

    # XLA:TPU copies half the table before a gather of wide rows.
    rows: Array = lax.platform_dependent(table, slots, tpu=one_by_one, default=gather)
    return rows


def top_tokens(logits: Float[Array, "R V"], count: int) -> tuple[Float[Array, "R k"], Int[Array, "R k"]]:
    """Return each row's `count` largest logits and their ids, best first, lower ids first among equals."""

    def plain(logits: Array) -> tuple[Array, Array]:
        values, token_ids = lax.top_k(logits, count)
        return values, token_ids

    def one_by_one(logits: Array) -> tuple[Array, Array]:
        return top_one_by_one(logits, count)

    few = one_by_one if count <= SELECTED_ONE_BY_ONE else plain
    found: tuple[Array, Array] = lax.platform_dependent(logits, tpu=one_by_one, cuda=few, default=plain)
    return found


def argmax_by_blocks(logits: Float[Array, "R V"]) -> Int[Array, " R"]:
    """Compute `first_argmax` on CPUs: block by block for many rows, so that all logits are read only once."""
    num_rows, vocab_size = logits.shape
    if num_rows < ARGMAX_ROWS or vocab_size % ARGMAX_BLOCK:
        return _argmax_by_reductions(logits)
    blocks = logits.reshape(num_rows, -1, ARGMAX_BLOCK)
    block = plain_argmax(jnp.max(blocks, axis=2))
    within = plain_argmax(jnp.take_along_axis(blocks, block[:, None, None], axis=1, mode="clip")[:, 0])
    return block * ARGMAX_BLOCK + within


def add_by_matmul(table: Float[Array, "R V"], token_ids: Int[Array, "R B"], values: Float[Array, "R B"]) -> Array:
    """Compute `add_at` on TPUs: one-hot matrices for an id's row and column in a grid, combined by a matmul.

    This is exact: a float32 times 1 in full precision is that float32.
    """
    num_rows, vocab_size = table.shape
    height = -(-vocab_size // LANES)
    valid = (token_ids >= 0) & (token_ids < vocab_size)
    row = _one_hot(token_ids // LANES, height) & valid[:, :, None]  # [R, B, height]
    column = _one_hot(token_ids % LANES, LANES)  # [R, B, 128]
    weighted = jnp.where(column, values[:, :, None], 0.0)
    sums = jnp.einsum("rbh,rbl->rhl", row.astype(jnp.float32), weighted, precision=lax.Precision.HIGHEST)
    return table + sums.reshape(num_rows, -1)[:, :vocab_size]


def top_one_by_one(logits: Float[Array, "R V"], count: int) -> tuple[Float[Array, "R k"], Int[Array, "R k"]]:
    """Compute `top_tokens` without a sort: the largest logit, then the next one, reading the logits twice each."""
    num_rows, vocab_size = logits.shape
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, 1)

    def after(value: Array, token_id: Array) -> Bool[Array, "R V"]:
        return (logits < value[:, None]) | ((logits == value[:, None]) & (ids > token_id[:, None]))

    def find(index: Array, found: tuple[Array, ...]) -> tuple[Array, ...]:
        values, token_ids, *last = found
        left = after(*last)
        value = jnp.max(jnp.where(left, logits, -jnp.inf), axis=1)
        token_id = jnp.min(jnp.where(left & (logits == value[:, None]), ids, vocab_size - 1), axis=1)
        # Not an array slice: XLA leaves a loop that updates one out of a CUDA graph.
        is_here = jnp.arange(count) == index
        values = jnp.where(is_here, value[:, None], values)
        return values, jnp.where(is_here, token_id[:, None], token_ids), value, token_id

    last = jnp.full(num_rows, jnp.inf, logits.dtype), jnp.full(num_rows, -1, jnp.int32)
    empty = jnp.zeros((num_rows, count), logits.dtype), jnp.zeros((num_rows, count), jnp.int32)
    values, token_ids, *_ = lax.fori_loop(0, count, find, (*empty, *last))
    return values, token_ids


def plain_argmax(logits: Float[Array, "R V"]) -> Int[Array, " R"]:
    """Compute `first_argmax` by one reduction: the fastest to compile, though not the fastest on CPUs."""
    return jnp.argmax(logits, axis=1).astype(jnp.int32)


def _argmax_by_reductions(logits: Float[Array, "R V"]) -> Int[Array, " R"]:
    """Compute `first_argmax` by two reductions, over values, then over ids.

    XLA vectorises both on CPUs, but not an argmax over pairs of value and id, which takes 3 times as long.
    """
    vocab_size = logits.shape[1]
    index = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    is_largest = logits == jnp.max(logits, axis=1, keepdims=True)
    return jnp.min(jnp.where(is_largest, index, vocab_size - 1), axis=1)


def _scatter_add(table: Float[Array, "R V"], token_ids: Int[Array, "R B"], values: Float[Array, "R B"]) -> Array:
    """Compute `add_at` by a scatter."""
    row = jnp.arange(table.shape[0])[:, None]
    token_ids = jnp.where(token_ids < 0, table.shape[1], token_ids)  # negative indices would count from the end
    return table.at[row, token_ids].add(values, mode="drop")


def _one_hot(index: Int[Array, "R B"], size: int) -> Bool[Array, "R B size"]:
    return index[:, :, None] == jnp.arange(size)[None, None, :]
