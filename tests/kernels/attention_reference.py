"""Ragged paged attention by its definition, to heads or latents: float32, one query at a time, in NumPy.

The oracle for all backends, which only tests and checks on devices import. It runs outside jit alone and copies the
pool that it is given, in the canonical layout. It calls no operation of jax, since XLA would compile a program for each
shape.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.pallas_kernels.ragged_paged_attention import int4
from jaxserve.pallas_kernels.ragged_paged_attention.interface import AttentionInputs, AttentionOptions
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import (
    INT4,
    QUANTIZED_MAX,
    Pages,
    QuantizedPages,
    has_scales,
    pool_dtype,
)
from jaxserve.pallas_kernels.ragged_paged_attention.rows import RaggedRows

HostPages = np.ndarray | QuantizedPages  # arrays of NumPy
_GROUP = 64  # elements of a group of int4 pools


def write_and_attend(
    inputs: AttentionInputs, kv_pages: Pages, layer: int | Int32[Array, ""], options: AttentionOptions
) -> tuple[Float[Array, "T Q V"], Pages]:
    """Rotate, write to a copy of the canonical pool and attend."""
    dtype, layer = inputs.q.dtype, int(layer)
    inputs, pages = jax.tree.map(np.asarray, (inputs, kv_pages))
    q, k = (np.asarray(x).astype(np.float32) for x in (inputs.q, inputs.k))
    last = np.resize([*_last_tokens(inputs.rows)] or [0], len(q))
    if inputs.rope is not None:
        angles = np.asarray(inputs.rope)
        q, k = rotate(q, angles[:, last] if options.last_only else angles), rotate(k, angles)
    vectors = k[:, 0]
    if inputs.v is not None:
        v = np.asarray(inputs.v).astype(np.float32)
        vectors = np.stack([k, v], axis=2).reshape(k.shape[0], -1, k.shape[2])
    stored = encode(vectors, pool_dtype(kv_pages))
    pages = jax.tree.map(lambda pool, new: _write(pool, new, layer, inputs.rows), pages, stored)
    out = _attend(q, inputs, pages, layer, options)
    return jax.device_put((out.astype(dtype), pages))


def rotate(x: Float32[np.ndarray, "T N H"], rope: Float32[np.ndarray, "2 T half"]) -> Float32[np.ndarray, "T N H"]:
    """Rotate pairs of the two halves of the last elements of each vector, as complex numbers, by their angles."""
    kept, first, second = np.split(x, [x.shape[-1] - 2 * rope.shape[2], x.shape[-1] - rope.shape[2]], axis=-1)
    cos, sin = rope[:, :, None]
    turned = (first + 1j * second) * (cos + 1j * sin)
    return np.concatenate([kept, turned.real, turned.imag], axis=-1)


def encode(x: Float32[np.ndarray, "*vectors H"], kv_dtype: np.dtype) -> HostPages:
    """Return vectors as a pool stores them; a quantised pool stores NaN for each that is not finite."""
    if has_scales(kv_dtype):
        return _quantized(x, kv_dtype)
    return _pack(_mixed(x)) if kv_dtype == INT4 else x.astype(kv_dtype)


def decode(pages: HostPages) -> Float32[np.ndarray, "*vectors H"]:
    """Return the vectors that a pool's elements stand for; vectors from int4 pools stay rotated."""
    if isinstance(pages, QuantizedPages):
        values, scales = (np.asarray(x).astype(np.float32) for x in pages)
        return np.asarray(values * scales[..., None])
    return _unpack(pages) if pages.dtype == np.uint8 else pages.astype(np.float32)


def _quantized(x: np.ndarray, dtype: np.dtype) -> QuantizedPages:
    """Return each vector in `dtype` with its scale, rounded up to bfloat16."""
    is_finite = np.isfinite(x).all(axis=-1)
    x = np.where(is_finite[..., None], x, 0)
    step = np.float32(1 / QUANTIZED_MAX[dtype.name])
    scales = np.maximum(np.abs(x).max(axis=-1) * step, np.finfo(np.float32).tiny)
    nearest = scales.astype("bfloat16")
    scales = np.where(nearest < scales, np.nextafter(nearest, nearest.dtype.type(np.inf)), nearest)
    values = x * (1 / scales.astype(np.float32))[..., None]
    values = np.rint(values) if dtype == np.int8 else values
    return QuantizedPages(values.astype(dtype), np.where(is_finite, scales, scales.dtype.type(np.nan)))


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
    is_finite = np.isfinite(groups).all(axis=-1)
    groups = np.where(is_finite[..., None], groups, 0)
    least, largest = groups.min(axis=-1), groups.max(axis=-1)
    least = least.astype("bfloat16")
    step = (largest - least.astype(np.float32)) * np.float32(1 / 15)
    step = np.maximum(step, np.finfo(np.float32).tiny).astype("bfloat16")
    numbers = np.stack([np.where(is_finite, step, step.dtype.type(np.nan)), least], axis=-1)
    step, least = (each[..., None].astype(np.float32) for each in (step, least))
    elements = np.rint((groups - least) * (1 / step)).clip(0, 15).astype(np.uint8)
    packed = elements[..., : size // 2] + 16 * elements[..., size // 2 :]
    return np.concatenate([packed, numbers.view(np.uint8)], axis=-1).reshape(*x.shape[:-1], -1)


def _unpack(stored: np.ndarray) -> np.ndarray:
    """Return the vectors that bytes of an int4 pool stand for, `f32[..., H]`, rotated."""
    head_dim = int4.vector_size(stored.shape[-1])
    num_groups = 1 if head_dim % _GROUP else head_dim // _GROUP
    groups = stored.reshape(*stored.shape[:-1], num_groups, -1)
    numbers = np.ascontiguousarray(groups[..., -4:]).view("bfloat16").astype(np.float32)
    elements = np.concatenate([groups[..., :-4] % 16, groups[..., :-4] // 16], axis=-1)
    return np.asarray(elements * numbers[..., :1] + numbers[..., 1:]).reshape(*stored.shape[:-1], head_dim)


def _write(pages: np.ndarray, new: np.ndarray, layer: int, rows: RaggedRows) -> np.ndarray:
    pool = pages.copy()
    page_size, pages_of = pool.shape[2], _tables(rows)
    for row_id, token_id, position in _tokens(rows):
        page = pages_of[row_id][position // page_size]
        pool[layer, page, position % page_size] = new[token_id]
    return pool


def _attend(
    queries: Float32[np.ndarray, "T Q H"],
    inputs: AttentionInputs,
    pages: HostPages,
    layer: int,
    options: AttentionOptions,
) -> Float32[np.ndarray, "T Q V"]:
    """Attend with every query, rotated, over the keys that it sees; zeros for padding tokens."""
    query_of = {token_id: index for index, token_id in enumerate(_last_tokens(inputs.rows))}
    rows, pages_of = inputs.rows, _tables(inputs.rows)
    vectors = _vectors(pages, layer, queries.shape[-1])
    sinks = None if inputs.sinks is None else np.asarray(inputs.sinks).astype(np.float32)
    out = np.zeros((*queries.shape[:2], options.rank or queries.shape[2]), np.float32)
    for row_id, token_id, position in _tokens(rows):
        query = query_of.get(token_id) if options.last_only else token_id
        if query is None:
            continue
        positions = np.arange(position + 1)
        if inputs.tree_mask is not None:
            q_len = int(rows.cu_q_lens[row_id + 1]) - int(rows.cu_q_lens[row_id])
            node = positions - (int(rows.kv_lens[row_id]) - min(q_len, 32))
            is_ancestor = (int(inputs.tree_mask[token_id]) >> np.clip(node, 0, 31)) & 1 == 1
            positions = positions[(node < 0) | is_ancestor | (positions == position)]
        if (read := rows.pages_to_read) is not None:
            page_size = vectors.shape[1]
            num_read = -(-int(rows.kv_lens[row_id]) // page_size) - int(read.num_skipped[row_id])
            positions = positions[np.isin(positions // page_size, np.asarray(read.columns[row_id])[:num_read])]
        positions = positions[-(options.window or len(positions)) :]
        k, v = _read(vectors, pages_of[row_id], positions, options.rank)
        out[query] = _attend_one(queries[query], k, v, options, sinks)
    return out


def _vectors(pages: HostPages, layer: int, head_dim: int) -> np.ndarray:
    """Return the pages of one layer in float32, `[N, P, 2K, H]`."""
    pages = jax.tree.map(lambda x: x[layer], pages)
    if isinstance(pages, QuantizedPages) or pages.dtype != np.uint8:
        return decode(pages)
    return _mixed(decode(pages)) / _block_size(head_dim)  # mixed twice, a vector is as many times as large as a block


def _tables(rows: RaggedRows) -> list[np.ndarray]:
    """Return the pages of each live row."""
    num_rows, table = int(rows.num_rows), np.asarray(rows.page_table)
    return list(table[:num_rows] if rows.table_row is None else table[np.asarray(rows.table_row[:num_rows])])


def _tokens(rows: RaggedRows) -> Iterator[tuple[int, int, int]]:
    """Yield every live token as (row, index in the step, position in its sequence)."""
    cu_q_lens, kv_lens = rows.cu_q_lens, rows.kv_lens
    for row_id in range(int(rows.num_rows)):
        for token_id in range(int(cu_q_lens[row_id]), int(cu_q_lens[row_id + 1])):
            yield row_id, token_id, int(kv_lens[row_id]) - int(cu_q_lens[row_id + 1]) + token_id


def _last_tokens(rows: RaggedRows) -> Iterator[int]:
    """Yield the last new token of each live row that has some."""
    for start, end in zip(rows.cu_q_lens[: int(rows.num_rows)], rows.cu_q_lens[1:], strict=False):
        if start < end:
            yield int(end) - 1


def _read(
    pages: np.ndarray, page_ids: np.ndarray, positions: np.ndarray, rank: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return keys and values at some positions of one sequence, `f32[S, K, H]` and `f32[S, K, V]`."""
    page_size = pages.shape[1]
    vectors = pages[page_ids[positions // page_size], positions % page_size].astype(np.float32)
    if rank is not None:
        return vectors[:, None], vectors[:, None, :rank]
    return vectors[:, 0::2], vectors[:, 1::2]


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
