"""Ragged paged attention by its definition: float32, one row and one query at a time, in NumPy.

The oracle for all backends, which only tests and checks on devices import. It runs outside jit alone and copies the
pool that it is given, in the canonical layout.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32, Shaped

from jaxserve.pallas_kernels.ragged_paged_attention.interface import AttentionInputs, AttentionOptions, RaggedRows
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import (
    INT4,
    QUANTIZED_MAX,
    Pages,
    QuantizedPages,
    pool_dtype,
)

_GROUP = 64  # elements of a group of int4 pools


def write_and_attend(
    inputs: AttentionInputs, kv_pages: Pages, layer: int | Int32[Array, ""], options: AttentionOptions
) -> tuple[Float[Array, "T Q H"], Pages]:
    """Rotate, write to a copy of the canonical pool and attend."""
    dtype = inputs.q.dtype
    if inputs.rope is not None:
        inputs = inputs._replace(q=rotate(inputs.q, inputs.rope), k=rotate(inputs.k, inputs.rope))
    kv_pages = _write_kv(kv_pages, inputs.k, inputs.v, layer, inputs.rows)
    return _attend(inputs, kv_pages, layer, options).astype(dtype), kv_pages


def rotate(x: Float[Array, "T N H"], rope: Float32[Array, "2 T half"]) -> Float32[Array, "T N H"]:
    """Turn the pairs of the two halves of a head, as complex numbers, by their angles."""
    first, second = np.split(np.asarray(x).astype(np.float32), 2, axis=-1)
    cos, sin = np.asarray(rope)[:, :, None]
    turned = (first + 1j * second) * (cos + 1j * sin)
    return jnp.asarray(np.concatenate([turned.real, turned.imag], axis=-1))


def _write_kv(
    kv_pages: Pages,
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    layer: int | Int32[Array, ""],
    rows: RaggedRows,
) -> Pages:
    """Return a copy of the pool with the keys and values of this step in their pages."""
    kv = np.stack([np.asarray(k), np.asarray(v)], axis=2).reshape(k.shape[0], -1, k.shape[2])  # [T, 2K, H]
    if not isinstance(kv_pages, QuantizedPages):
        is_int4 = pool_dtype(kv_pages) == INT4
        return _write(kv_pages, _pack(_mixed(kv.astype(np.float32))) if is_int4 else kv, layer, rows)
    kv = kv.astype(np.float32)
    step = np.float32(1 / QUANTIZED_MAX[kv_pages.values.dtype.name])
    scales = np.maximum(np.abs(kv).max(axis=-1) * step, np.finfo(np.float32).tiny)
    nearest = scales.astype("bfloat16")
    scales = np.where(nearest < scales, np.nextafter(nearest, nearest.dtype.type(np.inf)), nearest)
    values = kv * (1 / scales.astype(np.float32))[..., None]
    values = np.rint(values) if kv_pages.values.dtype == np.int8 else values
    return QuantizedPages(_write(kv_pages.values, values, layer, rows), _write(kv_pages.scales, scales, layer, rows))


def _mixed(x: np.ndarray) -> np.ndarray:
    """Multiply each block of 2^n elements by a Hadamard matrix, in the order of additions that int4 pools require."""
    block, shape = _block_size(x.shape[-1]), x.shape
    index = np.arange(block)
    x = x.reshape(*shape[:-1], -1, block)
    for distance in 2 ** np.arange(np.log2(block), dtype=int):
        partner = x[..., index ^ distance]
        x = np.where(index & distance, partner - x, x + partner)
    return x.reshape(shape)


def _block_size(head_dim: int) -> int:
    return int(np.gcd(head_dim, 1 << 30))


def _pack(x: np.ndarray) -> np.ndarray:
    """Return the bytes of vectors in an int4 pool."""
    size = x.shape[-1] if x.shape[-1] % _GROUP else _GROUP
    groups = x.reshape(*x.shape[:-1], -1, size)
    least, largest = groups.min(axis=-1), groups.max(axis=-1)
    least = least.astype("bfloat16")
    step = (largest - least.astype(np.float32)) * np.float32(1 / 15)
    step = np.maximum(step, np.finfo(np.float32).tiny).astype("bfloat16")
    numbers = np.stack([step, least], axis=-1)
    step, least = (numbers[..., i, None].astype(np.float32) for i in (0, 1))
    elements = np.rint((groups - least) * (1 / step)).clip(0, 15).astype(np.uint8)
    packed = elements[..., : size // 2] + 16 * elements[..., size // 2 :]
    return np.concatenate([packed, numbers.view(np.uint8)], axis=-1).reshape(*x.shape[:-1], -1)


def _unpack(stored: np.ndarray, head_dim: int) -> np.ndarray:
    """Return the vectors that bytes of an int4 pool stand for, `f32[..., H]`."""
    num_groups = 1 if head_dim % _GROUP else head_dim // _GROUP
    groups = stored.reshape(*stored.shape[:-1], num_groups, -1)
    numbers = np.ascontiguousarray(groups[..., -4:]).view("bfloat16").astype(np.float32)
    elements = np.concatenate([groups[..., :-4] % 16, groups[..., :-4] // 16], axis=-1)
    return np.asarray(elements * numbers[..., :1] + numbers[..., 1:]).reshape(*stored.shape[:-1], head_dim)


def _write(
    pages: Shaped[Array, "L N P *token"], new: np.ndarray, layer: int | Int32[Array, ""], rows: RaggedRows
) -> Shaped[Array, "L N P *token"]:
    pool = np.array(pages)
    page_size, new, pages_of = pool.shape[2], new.astype(pool.dtype), _tables(rows)
    for row_id, token_id, position in _tokens(rows):
        page = pages_of[row_id][position // page_size]
        pool[int(layer), page, position % page_size] = new[token_id]
    return jnp.asarray(pool)


def _attend(
    inputs: AttentionInputs, kv_pages: Pages, layer: int | Int32[Array, ""], options: AttentionOptions
) -> Float[Array, "T Q H"]:
    """Attend with every query over the keys that it sees; zeros for padding tokens."""
    queries, rows = np.asarray(inputs.q).astype(np.float32), inputs.rows
    pages = _numbers(kv_pages, int(layer), queries.shape[-1])
    pages_of = _tables(rows)
    sinks = None if inputs.sinks is None else np.asarray(inputs.sinks).astype(np.float32)
    out = np.zeros_like(queries)
    for row_id, token_id, position in _tokens(rows):
        positions = np.arange(position + 1)
        if inputs.tree_mask is not None:
            q_len = int(rows.cu_q_lens[row_id + 1]) - int(rows.cu_q_lens[row_id])
            node = positions - (int(rows.kv_lens[row_id]) - min(q_len, 32))
            is_ancestor = (int(inputs.tree_mask[token_id]) >> np.clip(node, 0, 31)) & 1 == 1
            positions = positions[(node < 0) | is_ancestor | (positions == position)]
        positions = positions[-(options.window or len(positions)) :]
        k, v = _read(pages, pages_of[row_id], positions)
        out[token_id] = _attend_one(queries[token_id], k, v, options, sinks)
    return jnp.asarray(out.astype(inputs.q.dtype))


def _numbers(kv_pages: Pages, layer: int, head_dim: int) -> np.ndarray:
    """Return the pages of one layer in float32, `[N, P, 2K, H]`."""
    if pool_dtype(kv_pages) == INT4:
        # Mixed twice, a vector is as many times as large as a block.
        return _mixed(_unpack(np.asarray(kv_pages)[layer], head_dim)) / _block_size(head_dim)
    if not isinstance(kv_pages, QuantizedPages):
        return np.asarray(kv_pages)[layer]
    values, scales = (np.asarray(x)[layer] for x in kv_pages)
    return np.asarray(values.astype(np.float32) * scales.astype(np.float32)[..., None])


def _tables(rows: RaggedRows) -> list[np.ndarray]:
    """Return the pages of each live row."""
    num_rows, table = int(rows.num_rows), np.asarray(rows.page_table)
    return list(table[:num_rows] if rows.table_row is None else table[np.asarray(rows.table_row)[:num_rows]])


def _tokens(rows: RaggedRows) -> Iterator[tuple[int, int, int]]:
    """Yield every live token as (row, index in the step, position in its sequence)."""
    cu_q_lens, kv_lens = np.asarray(rows.cu_q_lens), np.asarray(rows.kv_lens)
    for row_id in range(int(rows.num_rows)):
        for token_id in range(int(cu_q_lens[row_id]), int(cu_q_lens[row_id + 1])):
            yield row_id, token_id, int(kv_lens[row_id]) - int(cu_q_lens[row_id + 1]) + token_id


def _read(pages: np.ndarray, page_ids: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return keys and values at some positions of one sequence, each `f32[S, K, H]`."""
    page_size = pages.shape[1]
    kv = pages[page_ids[positions // page_size], positions % page_size].astype(np.float32)  # [S, 2K, H]
    return kv[:, 0::2], kv[:, 1::2]


def _attend_one(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, options: AttentionOptions, sinks: np.ndarray | None
) -> np.ndarray:
    """Attend with one query `f32[Q, H]` over the keys that it sees."""
    group = q.shape[0] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)  # [S, Q, H]
    scores = np.einsum("qh,sqh->qs", q, k) * options.scale
    if options.soft_cap is not None:
        scores = options.soft_cap * np.tanh(scores / options.soft_cap)
    if sinks is not None:
        scores = np.concatenate([scores, sinks[:, None]], axis=1)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return np.asarray(np.einsum("qs,sqh->qh", weights[:, : v.shape[0]], v))
