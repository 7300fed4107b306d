"""Ragged paged attention by its definition: float32, one row and one query at a time, in NumPy.

The oracle for all other backends. It runs only outside jit and copies the pool that it is given.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32, Shaped

from jaxserve.pallas_kernels.ragged_paged_attention.interface import PoolDims, Problem, RaggedRows
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import QUANTIZED_MAX, Pages, QuantizedPages, is_quantized

PAGE_TOKENS = 16


def supports(problem: Problem) -> str | None:
    """Return the reason why this backend cannot run the problem, or None if it can."""
    return unsupported_dtype(problem.kv_dtype)


def unsupported_dtype(dtype: jnp.dtype) -> str | None:
    """Return the reason why a pool cannot have this dtype, or None if it can."""
    if is_quantized(dtype) or (jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1):
        return None
    return (
        f"the pool must hold floating point numbers of 16 bits or more, or be one of {list(QUANTIZED_MAX)}, not {dtype}"
    )


def default_page_size(num_kv_heads: int, head_dim: int, kv_dtype: jnp.dtype) -> int:
    """Return a small default page size, which leaves little of a row's last page empty."""
    return PAGE_TOKENS


def kv_shape(
    num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int
) -> tuple[int, int, int, int, int]:
    """Return the shape of the pool, the canonical `[L, N, P, 2K, H]`."""
    return (num_layers, num_pages, page_size, 2 * num_kv_heads, head_dim)


def pool_dims(shape: tuple[int, ...]) -> PoolDims:
    """Invert `kv_shape`."""
    if len(shape) != 5 or shape[3] % 2:
        raise ValueError(
            f"the pool of backend 'reference' must be [L, N, P, 2K, H], got shape {shape}; make it with new_pages"
        )
    num_layers, num_pages, page_size, num_heads, head_dim = shape
    return PoolDims(num_layers, num_pages, page_size, num_heads // 2, head_dim)


def scale_shape(num_layers: int, num_pages: int, page_size: int, num_kv_heads: int) -> tuple[int, int, int, int]:
    """Return the shape of the scales, the canonical `[L, N, P, 2K]`."""
    return (num_layers, num_pages, page_size, 2 * num_kv_heads)


def to_canonical(kv_pages: Pages) -> Pages:
    """Return the pool as it is."""
    return kv_pages


def from_canonical(kv_pages: Pages) -> Pages:
    """Return the pool as it is."""
    return kv_pages


def write_and_attend(
    q: Float[Array, "T Q H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    kv_pages: Pages,
    layer: int | Int32[Array, ""],
    rows: RaggedRows,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, "Q"] | None,
    rope: Float32[Array, "2 T half"] | None,
    tree_mask: Int32[Array, "T words"] | None,
) -> tuple[Float[Array, "T Q H"], Pages]:
    """Rotate, write to a copy of the pool and attend."""
    dtype = q.dtype
    if rope is not None:
        q, k = _rotate(q, rope), _rotate(k, rope)
    kv_pages = _write_kv(kv_pages, k, v, layer, rows)
    out = _attend(
        q, kv_pages, layer, rows, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks, tree_mask=tree_mask
    )
    return out.astype(dtype), kv_pages


def _rotate(x: Float[Array, "T N H"], rope: Float32[Array, "2 T half"]) -> Float32[Array, "T N H"]:
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
        return _write(kv_pages, kv, layer, rows)
    kv = kv.astype(np.float32)
    step = np.float32(1 / QUANTIZED_MAX[kv_pages.values.dtype.name])
    scales = np.maximum(np.abs(kv).max(axis=-1) * step, np.finfo(np.float32).tiny)
    values = kv * (1 / scales)[..., None]
    values = np.rint(values) if kv_pages.values.dtype == np.int8 else values
    return QuantizedPages(_write(kv_pages.values, values, layer, rows), _write(kv_pages.scales, scales, layer, rows))


def _write(
    pages: Shaped[Array, "L N P *token"], new: np.ndarray, layer: int | Int32[Array, ""], rows: RaggedRows
) -> Shaped[Array, "L N P *token"]:
    pool = np.array(pages)
    page_size, new, page_table = pool.shape[2], new.astype(pool.dtype), np.asarray(rows.page_table)
    for row_id, token_id, position in _tokens(rows):
        page = page_table[row_id, position // page_size]
        pool[int(layer), page, position % page_size] = new[token_id]
    return jnp.asarray(pool)


def _attend(
    q: Float[Array, "T Q H"],
    kv_pages: Pages,
    layer: int | Int32[Array, ""],
    rows: RaggedRows,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, "Q"] | None,
    tree_mask: Int32[Array, "T words"] | None,
) -> Float[Array, "T Q H"]:
    """Attend with every query over the keys that it sees; zeros for padding tokens."""
    queries = np.asarray(q).astype(np.float32)
    pages = _numbers(kv_pages, int(layer))
    page_table = np.asarray(rows.page_table)
    sink_logits = None if sinks is None else np.asarray(sinks).astype(np.float32)
    out = np.zeros_like(queries)
    for row_id, token_id, position in _tokens(rows):
        first = 0 if window is None else max(0, position - window + 1)
        positions = np.arange(first, position + 1)
        if tree_mask is not None:
            past_len = position - (token_id - int(rows.cu_q_lens[row_id]))
            positions = positions[_in_tree(np.asarray(tree_mask)[token_id], positions - past_len)]
        k, v = _read(pages, page_table[row_id], positions)
        out[token_id] = _attend_one(queries[token_id], k, v, scale, soft_cap, sink_logits)
    return jnp.asarray(out.astype(q.dtype))


def _numbers(kv_pages: Pages, layer: int) -> np.ndarray:
    """Return the pages of one layer in float32, `[N, P, 2K, H]`."""
    if not isinstance(kv_pages, QuantizedPages):
        return np.asarray(kv_pages)[layer]
    values, scales = (np.asarray(x)[layer] for x in kv_pages)
    return np.asarray(values.astype(np.float32) * scales[..., None])


def _tokens(rows: RaggedRows) -> Iterator[tuple[int, int, int]]:
    """Yield every live token as (row, index in the step, position in its sequence)."""
    cu_q_lens, kv_lens = np.asarray(rows.cu_q_lens), np.asarray(rows.kv_lens)
    for row_id in range(int(rows.num_rows)):
        for token_id in range(int(cu_q_lens[row_id]), int(cu_q_lens[row_id + 1])):
            yield row_id, token_id, int(kv_lens[row_id]) - int(cu_q_lens[row_id + 1]) + token_id


def _in_tree(words: np.ndarray, new_ids: np.ndarray) -> np.ndarray:
    """Return the mask of keys that a token sees; `new_ids` count from the row's first new token, negative if past."""
    return np.array([i < 0 or i >= 32 * len(words) or bool(words[i // 32] >> (i % 32) & 1) for i in new_ids], bool)


def _read(pages: np.ndarray, page_ids: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return keys and values at some positions of one sequence, each `f32[S, K, H]`."""
    page_size = pages.shape[1]
    kv = pages[page_ids[positions // page_size], positions % page_size].astype(np.float32)  # [S, 2K, H]
    return kv[:, 0::2], kv[:, 1::2]


def _attend_one(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, soft_cap: float | None, sinks: np.ndarray | None
) -> np.ndarray:
    """Attend with one query `f32[Q, H]` over the keys that it sees."""
    group = q.shape[0] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)  # [S, Q, H]
    scores = np.einsum("qh,sqh->qs", q, k) * scale
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    if sinks is not None:
        scores = np.concatenate([scores, sinks[:, None]], axis=1)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return np.asarray(np.einsum("qs,sqh->qh", weights[:, : v.shape[0]], v))
