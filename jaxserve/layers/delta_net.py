"""Gated delta net (Yang et al. 2024, arXiv 2412.06464): linear attention whose state decays, and is corrected.

A short convolution over the last tokens makes queries q, keys k and values v. Then, for each value head, a token with
the decay a and the rate b changes the head's memory S [Dk, Dv] and reads it:

    S <- a S;  S <- S + b k (v - S^T k)^T;  out = S^T q

Rows of one token are computed so, some of them at once. Longer rows are computed in chunks of up to CHUNK tokens, whose
changes of S depend on each other through a triangular system of equations (Yang et al. 2024, arXiv 2406.06484). Both
are loops over what a step really has: shapes depend on neither the number of rows nor their lengths. What is read from
S is read in one product, on which its changes depend: XLA would copy the pool to read it once it is written to.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int

from jaxserve.errors import ConfigError
from jaxserve.layers.state_forms import StateRows

CHUNK = 64  # tokens of a chunk
ROWS = 16  # rows of one token that are computed at once
_EPS = 1e-6  # epsilon of the norms of queries and keys

_einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


class DeltaInputs(NamedTuple):
    """Inputs of a layer's tokens.

    Attributes:
        mixed: inputs of the convolution: queries and keys of all key heads, values of all value heads.
        taps: weights of the convolution, those of the latest token last.
        log_decay: logarithm of each head's decay.
        rate: rate at which each head's memory is corrected.
    """

    mixed: Float[Array, "T C"]
    taps: Float[Array, "C 1 width"]
    log_decay: Float32[Array, "T V"]
    rate: Float32[Array, "T V"]


class DeltaPool(NamedTuple):
    """States of all layers and entries.

    Attributes:
        memory: memory of each value head.
        window: inputs of the convolution of the tokens before the next one.
    """

    memory: Float32[Array, "L N V Dk Dv"]
    window: Float32[Array, "L N past C"]


@dataclass(frozen=True)
class GatedDelta:
    """Sizes of a gated delta net; those of a device's heads where a model is split.

    Attributes:
        num_key_heads: heads of queries and keys, each of which serves equally many value heads.
        num_value_heads: heads of values, each with a memory.
        key_dim: size of a query and of a key, Dk.
        value_dim: size of a value, Dv.
        width: tokens that the convolution sees, the latest included.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    width: int

    @property
    def key_size(self) -> int:
        """Elements of a token's queries, and of its keys."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Elements of a token's values."""
        return self.num_value_heads * self.value_dim

    @property
    def token_flops(self) -> int:
        """Operations of a token: its convolution, the decay of S, and three products with S."""
        mixed = 2 * self.key_size + self.value_size
        return 2 * self.width * mixed + 7 * self.num_value_heads * self.key_dim * self.value_dim

    def local(self, num_devices: int) -> "GatedDelta":
        """Return the sizes on one of `num_devices`.

        Raises:
            ConfigError: `num_devices` does not divide the key heads.
        """
        if self.num_key_heads % num_devices:
            raise ConfigError(
                f"tensor_parallel_size must divide linear_num_key_heads, got {num_devices} and {self.num_key_heads}"
            )
        return replace(
            self,
            num_key_heads=self.num_key_heads // num_devices,
            num_value_heads=self.num_value_heads // num_devices,
        )

    def times(self, factor: int) -> "GatedDelta":
        """Return the sizes with heads multiplied by `factor`."""
        return replace(self, num_key_heads=self.num_key_heads * factor, num_value_heads=self.num_value_heads * factor)

    def new(self, num_layers: int, num_entries: int) -> DeltaPool:
        """Return a pool of zeros."""
        memory = (num_layers, num_entries, self.num_value_heads, self.key_dim, self.value_dim)
        window = (num_layers, num_entries, self.width - 1, 2 * self.key_size + self.value_size)
        return DeltaPool(jnp.zeros(memory, jnp.float32), jnp.zeros(window, jnp.float32))

    def advance(
        self, inputs: DeltaInputs, rows: StateRows, pool: DeltaPool, layer: Int[Array, ""]
    ) -> tuple[Float32[Array, "T V Dv"], DeltaPool]:
        """Compute the tokens of a step in one layer; return what they read, and the pool."""
        mixed, window = _convolve(inputs.mixed.astype(jnp.float32), inputs.taps, rows, pool.window, layer)
        q, k, v = jnp.split(mixed, [self.key_size, 2 * self.key_size], axis=1)
        T, group = mixed.shape[0], self.num_value_heads // self.num_key_heads
        q, k = (_unit(x.reshape(T, self.num_key_heads, self.key_dim)) for x in (q, k))
        heads = _Heads(
            q=jnp.repeat(q * self.key_dim**-0.5, group, axis=1),
            k=jnp.repeat(k, group, axis=1),
            v=v.reshape(T, self.num_value_heads, self.value_dim),
            log_decay=inputs.log_decay,
            rate=inputs.rate,
        )
        out, memory = _single_tokens(heads, rows, pool.memory, layer)
        if T > 1:
            out, memory = _chunks(heads, rows, out, memory, layer)
        return out, DeltaPool(memory, window)


class _Heads(NamedTuple):
    """Tokens of a step as the heads read them."""

    q: Float32[Array, "T V Dk"]
    k: Float32[Array, "T V Dk"]
    v: Float32[Array, "T V Dv"]
    log_decay: Float32[Array, "T V"]
    rate: Float32[Array, "T V"]


def _unit(x: Float32[Array, "T K Dk"]) -> Float32[Array, "T K Dk"]:
    return x * lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + _EPS)


def _windows(rows: StateRows, pool: Float32[Array, "L N past C"], layer: Int[Array, ""]) -> Float32[Array, "R past C"]:
    """Return the window that each row goes on from."""

    def read() -> Float32[Array, "R past C"]:
        return pool.at[layer, rows.source].get(mode="clip")

    if rows.start.shape == (1,):  # a branch, as XLA:CPU would fuse the reading of one row with what needs it later
        return lax.cond(rows.start[0] == 0, lambda: jnp.zeros((1, *pool.shape[2:]), pool.dtype), read)
    return jnp.where(rows.start[:, None, None] == 0, 0.0, read())


def _convolve(
    x: Float32[Array, "T C"],
    taps: Float[Array, "C 1 width"],
    rows: StateRows,
    pool: Float32[Array, "L N past C"],
    layer: Int[Array, ""],
) -> tuple[Float32[Array, "T C"], Float32[Array, "L N past C"]]:
    """Return SiLU of the convolution of each channel over the last tokens, and the pool with the rows' new windows."""
    weights, (T, C), past = taps[:, 0].T.astype(jnp.float32), x.shape, pool.shape[2]
    if not past:
        return jax.nn.silu(x * weights), pool
    before = _windows(rows, pool, layer)
    by_row = before.reshape(-1, C)  # `past` tokens of each row
    y = x * weights[past][None]
    for distance in range(1, past + 1):
        place = jnp.clip(past + rows.offset - distance, 0, past - 1)
        earlier = by_row.at[rows.row * past + place].get(mode="clip")
        in_step = jnp.pad(x, ((distance, 0), (0, 0)))[:T]
        y += jnp.where((rows.offset >= distance)[:, None], in_step, earlier) * weights[past - distance][None]

    def window(num_tokens: Int[Array, " R"]) -> Float32[Array, "R past C"]:
        """Return the last tokens of each row once so many of its tokens are computed."""
        place = num_tokens[:, None] - past + jnp.arange(past)[None, :]
        own = x.at[rows.cu_q_lens[:-1, None] + place].get(mode="clip")
        old = jnp.take_along_axis(before, jnp.clip(past + place, 0, past - 1)[:, :, None], axis=1)
        return jnp.where((place >= 0)[:, :, None], own, old)

    entry, num_tokens = (jnp.concatenate(x) for x in ((rows.target, rows.kept), (rows.q_lens, rows.kept_len)))
    entry = jnp.where(num_tokens > 0, entry, pool.shape[1])  # out of range, dropped
    windows = jnp.concatenate([window(rows.q_lens), window(rows.kept_len)])
    return jax.nn.silu(y), pool.at[layer, entry].set(windows, mode="drop")


def _single_tokens(
    heads: _Heads, rows: StateRows, memory: Float32[Array, "L N V Dk Dv"], layer: Int[Array, ""]
) -> tuple[Float32[Array, "T V Dv"], Float32[Array, "L N V Dk Dv"]]:
    """Return what the tokens of rows with one token read, zeros for others, and the memory they leave."""
    T, R, nowhere = heads.q.shape[0], rows.start.shape[0], memory.shape[1]
    is_single = _is_single(rows)
    size = min(ROWS, R)
    order = jnp.pad(jnp.argsort(~is_single, stable=True), (0, -R % size))
    num_rows = jnp.sum(is_single)

    def compute(index: Int[Array, ""], carry: tuple[Array, Array]) -> tuple[Array, Array]:
        out, memory = carry
        row = lax.dynamic_slice_in_dim(order, index * size, size)
        is_there = index * size + jnp.arange(size) < num_rows
        token = rows.cu_q_lens[row]
        q, k, v, log_decay, rate = (x.at[token].get(mode="clip") for x in heads)
        old = memory.at[layer, rows.source[row]].get(mode="clip")
        old = jnp.where((rows.start[row] == 0)[:, None, None, None], 0.0, old)
        decayed = old * jnp.exp(log_decay)[:, :, None, None]
        of_key, of_query = jnp.moveaxis(_einsum("rhkv,rhxk->rhxv", decayed, jnp.stack([k, q], axis=2)), 2, 0)
        change = (v - of_key) * rate[:, :, None]
        read = of_query + change * jnp.sum(q * k, axis=2, keepdims=True)
        new = decayed + k[:, :, :, None] * change[:, :, None, :]
        out = out.at[jnp.where(is_there, token, T)].set(read, mode="drop")
        return out, memory.at[layer, jnp.where(is_there, rows.target[row], nowhere)].set(new, mode="drop")

    return lax.fori_loop(0, -(-num_rows // size), compute, (jnp.zeros_like(heads.v), memory))


def _is_single(rows: StateRows) -> Bool[Array, " R"]:
    return (rows.q_lens == 1) & (rows.kept_len == 0)


def _chunks(
    heads: _Heads,
    rows: StateRows,
    out: Float32[Array, "T V Dv"],
    memory: Float32[Array, "L N V Dk Dv"],
    layer: Int[Array, ""],
) -> tuple[Float32[Array, "T V Dv"], Float32[Array, "L N V Dk Dv"]]:
    """Return `out` with what the tokens of longer rows read, and the memory they leave.

    The chunks of a row follow each other; one ends where a snapshot of its state is wanted, and one without tokens
    follows if that is the end of the row. Each leaves its memory to the next, which writes it to the pool first of all:
    XLA would copy the pool to write what a chunk still reads.
    """
    T = out.shape[0]
    size = min(CHUNK, 1 << (T - 1).bit_length())
    num_before = -(-rows.kept_len // size)
    num_behind = jnp.maximum(-(-(rows.q_lens - rows.kept_len) // size), jnp.minimum(num_before, 1))
    counts = jnp.where(_is_single(rows), 0, num_before + num_behind)
    ends = jnp.cumsum(counts)
    padded = _Heads(*(jnp.pad(x, ((0, size), *[(0, 0)] * (x.ndim - 1))) for x in heads))

    def write(memory: Array, entry: Array, state: Array) -> Array:
        return lax.dynamic_update_slice(memory, state[None, None], (layer, entry, 0, 0, 0))

    def compute(index: Int[Array, ""], carry: tuple[Array, ...]) -> tuple[Array, ...]:
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
        chunk = _Heads(*(lax.dynamic_slice_in_dim(x, token, size) for x in padded))
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
    heads: _Heads, is_there: Bool[Array, " T"], memory: Float32[Array, "V Dk Dv"]
) -> tuple[Float32[Array, "T V Dv"], Float32[Array, "V Dk Dv"]]:
    """Return what the tokens of one chunk read, and the memory they leave; tokens that are not there change nothing."""
    q = jnp.swapaxes(heads.q, 0, 1)
    k, v = (jnp.where(is_there[None, :, None], jnp.swapaxes(x, 0, 1), 0.0) for x in (heads.k, heads.v))
    rate, log_decay = (jnp.where(is_there[None, :], x.T, 0.0) for x in (heads.rate, heads.log_decay))
    total = jnp.cumsum(log_decay, axis=1)  # logarithm of the decay from the beginning of the chunk to each token
    size = total.shape[1]
    is_seen = jnp.arange(size)[:, None] >= jnp.arange(size)[None, :]
    between = jnp.exp(jnp.where(is_seen[None], total[:, :, None] - total[:, None, :], -jnp.inf))
    decay = jnp.exp(total)[:, :, None]
    # A token's change of the memory reads those of the tokens before it: a unit lower triangular system.
    system = _einsum("htk,hsk->hts", k * rate[:, :, None], k) * between
    inverse = _unit_triangular_inverse(system)
    of_keys, read = jnp.split(_einsum("htk,hkv->htv", jnp.concatenate([k, q], axis=1), memory), 2, axis=1)
    change = _einsum("hts,hsv->htv", inverse, (v - of_keys * decay) * rate[:, :, None])
    read = read * decay + _einsum("hts,hsv->htv", _einsum("htk,hsk->hts", q, k) * between, change)
    to_end = jnp.exp(total[:, -1:] - total)[:, :, None]
    memory = memory * jnp.exp(total[:, -1])[:, None, None] + _einsum("htk,htv->hkv", k * to_end, change)
    return jnp.swapaxes(read, 0, 1), memory


def _unit_triangular_inverse(system: Float32[Array, "V T T"]) -> Float32[Array, "V T T"]:
    """Return the inverses of matrices with ones on the diagonal and the entries of `system` below it.

    The blocks on the diagonal are inverted, two by two, from those of half their size; T is a power of two. That is as
    stable as substitution, which would go token by token: no power of a matrix is made.
    """
    H, T, _ = system.shape
    place = jnp.arange(T)

    def merge(level: Int[Array, ""], inverse: Float32[Array, "V T T"]) -> Float32[Array, "V T T"]:
        block = place >> level
        is_pair = (block[:, None] >> 1) == (block[None, :] >> 1)
        below = jnp.where((is_pair & (block[:, None] > block[None, :]))[None], system, 0.0)
        return inverse - _einsum("hij,hjk->hik", _einsum("hij,hjk->hik", inverse, below), inverse)

    return lax.fori_loop(0, T.bit_length() - 1, merge, jnp.broadcast_to(jnp.eye(T, dtype=jnp.float32)[None], (H, T, T)))
