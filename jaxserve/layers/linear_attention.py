"""Linear attention with a decaying memory: the recurrence over a step's rows, shared by Gated DeltaNet and Mamba-2.

Each value head has a memory S [Dv, Dk]. A token with query q, key k, value v and decay a updates and reads it:

    S <- a S;  S <- S + v k^T;  out = S q

The delta rule (Yang et al. 2024, arXiv 2412.06464) adds b (v - S k) instead of v, with the token's rate b.

One-token rows are computed this way, a few simultaneously. Longer rows are computed in chunks with up to CHUNK tokens,
each by a few matmuls (Dao & Gu 2024, arXiv 2405.21060). With the delta rule, the updates that a chunk makes to S depend
on each other through a triangular system (Yang et al. 2024, arXiv 2406.06484). Both loops run only over rows and chunks
that the step has, although shapes depend on neither the number of rows nor their lengths. Each iteration reads S in one
matmul, and its update depends on that matmul: XLA would copy the pool if it were read after a write.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int

from jaxserve.layers.state_forms import StateRows, read_entries
from jaxserve.pallas_kernels.target import target_platform

CHUNK = 64  # maximum tokens per chunk
ROWS, CPU_ROWS = 16, 1  # one-token rows per iteration; XLA:CPU gathers memories slowly

_einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


class MemoryPool(NamedTuple):
    """States by layer and entry.

    Attributes:
        memory: memory of each value head.
        window: inputs to the short convolution from the tokens before the next one.
    """

    memory: Float32[Array, "L N V Dv Dk"]
    window: Float32[Array, "L N past C"]


class Heads(NamedTuple):
    """Inputs to the heads, per token.

    Attributes:
        q: queries; each serves the same number of consecutive value heads.
        k: keys, likewise.
        v: values.
        log_decay: logarithm of each head's decay.
        rate: delta-rule rate; None without the delta rule.
    """

    q: Float32[Array, "T K Dk"]
    k: Float32[Array, "T K Dk"]
    v: Float32[Array, "T V Dv"]
    log_decay: Float32[Array, "T V"]
    rate: Float32[Array, "T V"] | None = None


def advance(
    heads: Heads, rows: StateRows, memory: Float32[Array, "L N V Dv Dk"], layer: Int[Array, ""]
) -> tuple[Float32[Array, "T V Dv"], Float32[Array, "L N V Dv Dk"]]:
    """Compute a step's tokens in one layer; return their outputs and the updated memory.

    Args:
        heads: inputs per token.
        rows: the step's rows, and their entries in the pool.
        memory: a device's pool.
        layer: index among the recurrent layers.
    """
    out, memory = _single_tokens(heads, rows, memory, layer)
    return (out, memory) if len(out) == 1 else _chunks(heads, rows, out, memory, layer)


def _single_tokens(
    heads: Heads, rows: StateRows, memory: Float32[Array, "L N V Dv Dk"], layer: Int[Array, ""]
) -> tuple[Float32[Array, "T V Dv"], Float32[Array, "L N V Dv Dk"]]:
    """Compute the one-token rows: return their outputs (undefined for other tokens) and the updated memory."""
    (T, V, _), R, nowhere = heads.v.shape, rows.start.shape[0], memory.shape[1]
    group = V // heads.k.shape[1]
    size = min(CPU_ROWS if target_platform() == "cpu" else ROWS, R)
    if T == 1:
        every_row, every_entry, num_rows = _lone_token(rows)
    else:
        is_single = _is_single(rows)
        every_row = jnp.pad(jnp.argsort(~is_single, stable=True), (0, -R % size))
        every_entry, num_rows = rows.target[every_row], jnp.sum(is_single)

    def compute(index: Int[Array, ""], carry: tuple[Array, Array]) -> tuple[Array, Array]:
        """Compute iteration `index`: the next `size` one-token rows. `carry` has outputs and memory."""
        out, memory = carry
        row, entry = (lax.dynamic_slice_in_dim(x, index * size, size) for x in (every_row, every_entry))
        is_there = index * size + jnp.arange(size) < num_rows
        token = rows.cu_q_lens[row]
        q, k, v, log_decay, rate = jax.tree.map(lambda x: x.at[token].get(mode="clip"), heads)
        along = jnp.repeat(jnp.sum(q * k, axis=2), group, axis=1)[:, :, None]
        q, k = (jnp.repeat(x, group, axis=1) for x in (q, k))
        decayed = read_entries(memory, layer, rows.source[row], rows.start[row])
        decayed *= jnp.exp(log_decay)[:, :, None, None]
        wanted = jnp.stack([q] if rate is None else [q, k], axis=2)
        of_query, *of_key = jnp.moveaxis(_einsum("rhvk,rhxk->rhxv", decayed, wanted), 2, 0)
        change = v if rate is None else (v - of_key[0]) * rate[:, :, None]
        read = of_query + change * along
        new = decayed + change[:, :, :, None] * k[:, :, None, :]
        out = out.at[jnp.where(is_there, token, T)].set(read, mode="drop")
        return out, memory.at[layer, jnp.where(is_there, entry, nowhere)].set(new, mode="drop")

    # Start from the values, which belong to this layer: XLA would allocate zeros for all layers together and keep them.
    return lax.fori_loop(0, -(-num_rows // size), compute, (heads.v, memory))


def _is_single(rows: StateRows) -> Bool[Array, " R"]:
    """Return a mask of rows with one token and no snapshot."""
    return (rows.q_lens == 1) & (rows.kept_len == 0)


def _lone_token(rows: StateRows) -> tuple[Int[Array, "2"], Int[Array, "2"], Int[Array, ""]]:
    """Return rows, target entries and their number for a step with one token.

    As no chunks follow, the token is computed here even with a snapshot: once per entry, the slot's entry last.
    """
    has_kept = (rows.kept_len > 0).astype(jnp.int32)
    entry = jnp.where(has_kept > 0, jnp.concatenate([rows.kept, rows.target]), rows.target)
    return jnp.zeros(2, jnp.int32), entry, (rows.q_lens + has_kept)[0]


def _chunks(
    heads: Heads,
    rows: StateRows,
    out: Float32[Array, "T V Dv"],
    memory: Float32[Array, "L N V Dv Dk"],
    layer: Int[Array, ""],
) -> tuple[Float32[Array, "T V Dv"], Float32[Array, "L N V Dv Dk"]]:
    """Compute the longer rows: return `out` with their outputs, and the updated memory.

    A row's chunks are consecutive. A chunk ends at the snapshot's position, if there is one; if the row ends there too,
    an empty chunk follows. Each chunk passes its state to the next, which first writes it to the pool: if a chunk read
    the pool and wrote it afterwards, XLA would copy the pool.
    """
    T = out.shape[0]
    size = min(CHUNK, 1 << (T - 1).bit_length())
    num_before = -(-rows.kept_len // size)
    num_behind = jnp.maximum(-(-(rows.q_lens - rows.kept_len) // size), jnp.minimum(num_before, 1))
    counts = jnp.where(_is_single(rows), 0, num_before + num_behind)
    ends = jnp.cumsum(counts)
    padded = jax.tree.map(lambda x: jnp.pad(x, ((0, size), *[(0, 0)] * (x.ndim - 1))), heads)

    def write(memory: Array, entry: Array, state: Array) -> Array:
        """Write one layer's state to a pool entry."""
        return lax.dynamic_update_slice(memory, state[None, None], (layer, entry, 0, 0, 0))

    def compute(index: Int[Array, ""], carry: tuple[Array, ...]) -> tuple[Array, ...]:
        """Compute chunk `index`.

        Args:
            index: chunk in the order of rows.
            carry: outputs, memory pool, and the previous chunk's pool entry and state, which are written first.
        """
        out, memory, entry, before = carry
        memory = write(memory, entry, before)
        row = jnp.sum(index >= ends)
        number = index - ends[row] + counts[row]
        is_before = number < num_before[row]
        first = jnp.where(is_before, number * size, rows.kept_len[row] + (number - num_before[row]) * size)
        stop = jnp.minimum(first + size, jnp.where(is_before, rows.kept_len[row], rows.q_lens[row]))
        token, is_there = rows.cu_q_lens[row] + first, jnp.arange(size) < stop - first
        begin = jnp.where(rows.start[row] == 0, 0.0, memory[layer, rows.source[row]])
        old = jnp.where(number == 0, begin, before)
        chunk = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, token, size), padded)
        read, new = _chunk(chunk, is_there, old)
        here = lax.dynamic_slice_in_dim(out, token, size)
        out = lax.dynamic_update_slice_in_dim(out, jnp.where(is_there[:, None, None], read, here), token, 0)
        is_kept = is_before & (stop == rows.kept_len[row])
        return out, memory, jnp.where(is_kept, rows.kept[row], rows.target[row]), new

    nothing = jnp.zeros((), jnp.int32), memory[layer, 0]  # written back
    padded_out = jnp.pad(out, ((0, size), (0, 0), (0, 0)))
    out, memory, entry, last = lax.fori_loop(0, ends[-1], compute, (padded_out, memory, *nothing))
    return out[:T], write(memory, entry, last)


def _chunk(
    heads: Heads, is_there: Bool[Array, " T"], memory: Float32[Array, "V Dv Dk"]
) -> tuple[Float32[Array, "T V Dv"], Float32[Array, "V Dv Dk"]]:
    """Compute one chunk of T tokens in one row; return their outputs and the updated memory.

    Args:
        heads: inputs per token.
        is_there: mask of tokens; others are padding, which changes nothing.
        memory: state before the chunk.
    """
    q = jnp.swapaxes(heads.q, 0, 1)
    k, v = (jnp.where(is_there[None, :, None], jnp.swapaxes(x, 0, 1), 0.0) for x in (heads.k, heads.v))
    by_head = jax.tree.map(lambda x: jnp.where(is_there[None, :], x.T, 0.0), (heads.log_decay, heads.rate))
    (log_decay, rate), (V, size, _), K = by_head, v.shape, len(k)
    total = jnp.cumsum(log_decay, axis=1)  # logarithm of the decay from the chunk's beginning to each token
    is_seen = jnp.arange(size)[:, None] >= jnp.arange(size)[None, :]
    between = jnp.exp(jnp.where(is_seen[None], total[:, :, None] - total[:, None, :], -jnp.inf))
    decay = jnp.exp(total)[:, :, None]

    def per_value_head(x: Float32[Array, "K T *D"]) -> Float32[Array, "V T *D"]:
        """Repeat each key head's values for the value heads that it serves."""
        return jnp.repeat(x, V // K, axis=0)

    scores, wide_k = per_value_head(_einsum("htk,hsk->hts", q, k)), per_value_head(k)
    if rate is None:
        change, read = v, _einsum("htk,hvk->htv", per_value_head(q), memory)
    else:
        # Each token's update depends on the updates by earlier tokens: a unit lower triangular system.
        system = per_value_head(_einsum("htk,hsk->hts", k, k)) * rate[:, :, None] * between
        both = per_value_head(jnp.concatenate([k, q], axis=1))
        of_keys, read = jnp.split(_einsum("htk,hvk->htv", both, memory), 2, axis=1)
        inverse = _unit_triangular_inverse(system)
        change = _einsum("hts,hsv->htv", inverse, (v - of_keys * decay) * rate[:, :, None])
    read = read * decay + _einsum("hts,hsv->htv", scores * between, change)
    to_end = jnp.exp(total[:, -1:] - total)[:, :, None]
    memory = memory * jnp.exp(total[:, -1])[:, None, None] + _einsum("htv,htk->hvk", change, wide_k * to_end)
    return jnp.swapaxes(read, 0, 1), memory


def _unit_triangular_inverse(system: Float32[Array, "V T T"]) -> Float32[Array, "V T T"]:
    """Return the inverses of matrices with ones on the diagonal and `system` below it.

    Each level merges pairs of inverted diagonal blocks into blocks twice as large; T is a power of two. This is as
    stable as substitution, which would proceed token by token: no matrix powers are computed.
    """
    H, T, _ = system.shape
    place = jnp.arange(T)

    def merge(level: Int[Array, ""], inverse: Float32[Array, "V T T"]) -> Float32[Array, "V T T"]:
        """Merge pairs of inverted diagonal blocks with 2 ** `level` rows."""
        block = place >> level
        is_pair = (block[:, None] >> 1) == (block[None, :] >> 1)
        below = jnp.where((is_pair & (block[:, None] > block[None, :]))[None], system, 0.0)
        return inverse - _einsum("hij,hjk->hik", _einsum("hij,hjk->hik", inverse, below), inverse)

    return lax.fori_loop(0, T.bit_length() - 1, merge, jnp.broadcast_to(jnp.eye(T, dtype=jnp.float32)[None], (H, T, T)))
