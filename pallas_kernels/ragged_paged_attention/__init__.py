"""Ragged paged attention: rotate, write keys and values to their pages and attend, for all rows of a step at once.

Contract of the operation, the same for all backends:

- The rows of a step are packed on one token axis T: row r owns tokens `cu_q_lens[r]:cu_q_lens[r+1]`, the last of its
  sequence, at positions `kv_lens[r] - q_len .. kv_lens[r] - 1`. A row of one token is a decode, a row of many a prefill
  chunk; one step mixes them freely.
- All new keys and values of a step are written before any row of the step attends. A page may belong to several rows
  (a shared prefix), and one of them may write to it in the same step: the others then see the new content. No two rows
  of a step write the same position of a page. Schedulers rely on this order to share pages between rows of one step.
- The pool is one array for all layers, in a layout that belongs to the backend: make it with `new_pages`. An int8 or
  fp8 pool has an array of scales beside it, one scale per token and head (`QuantizedPages`). Code that moves pages
  elsewhere converts them by `to_canonical` and `from_canonical` (`[L, N, P, 2K, H]`, K of head h at 2h, V at 2h + 1).
  Under jit, donate the pool and pass it from layer to layer: it is then updated in place and never copied, as long as
  each layer's keys depend on the output of the layer before. In a transformer they do, which orders reads and writes.
- T and R are static shapes, padded by the caller. Rows from `num_rows` on and tokens from `cu_q_lens[num_rows]` on are
  padding: their content (except NaN in padding tokens) changes no live output and is not written to the pool. Neither
  page-table entries past a row's length, nor stale content of its pages past it, nor the width M of the page table
  change anything: the work follows the lengths alone. Outputs of padding tokens are finite and otherwise unspecified.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.pallas_kernels.dispatch import AUTO, select, target_platform
from jaxserve.pallas_kernels.ragged_paged_attention import mosaic_gpu, mosaic_tpu, native, reference, xla
from jaxserve.pallas_kernels.ragged_paged_attention.interface import Backend, PoolDims, Problem, RaggedRows
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import (
    QUANTIZED_MAX,
    Pages,
    QuantizedPages,
    is_quantized,
    values_of,
)
from jaxserve.pallas_kernels.ragged_paged_attention.rope import apply_rope

__all__ = [
    "BACKENDS",
    "Pages",
    "PoolDims",
    "Problem",
    "QuantizedPages",
    "RaggedRows",
    "apply_rope",
    "default_page_size",
    "from_canonical",
    "kv_shape",
    "new_pages",
    "ragged_paged_attention",
    "select_backend",
    "to_canonical",
]

BACKENDS: Mapping[str, Backend] = {
    "mosaic_gpu": mosaic_gpu,
    "mosaic_tpu": mosaic_tpu,
    "native": native,
    "xla": xla,
    "reference": reference,
}
"""All backends, best first."""


def ragged_paged_attention(
    q: Float[Array, "T Q H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    kv_pages: Pages,
    layer: int | Int32[Array, ""],
    *,
    kv_lens: Int32[Array, "R"],
    page_table: Int32[Array, "R M"],
    cu_q_lens: Int32[Array, "R+1"],
    num_rows: Int32[Array, ""],
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "Q"] | None = None,
    rope: Float32[Array, "2 T half"] | None = None,
    tree_mask: Int32[Array, "T words"] | None = None,
    backend: str = AUTO,
) -> tuple[Float[Array, "T Q H"], Pages]:
    """Write `k` and `v` to the pages of their rows, then attend; return the output and the updated pool.

    All new keys and values are written before any row attends, so a row sees what another row of the same call writes
    to a page that both have. Scores and softmax are float32 whatever the dtypes.

    Args:
      q: queries; Q is a multiple of K, query head h reads KV head h // (Q / K).
      k: new keys, cast or quantised to the dtype of the pool.
      v: new values, cast or quantised to the dtype of the pool.
      kv_pages: pool made by `new_pages(backend, ...)`. Consumed: donate it under jit and use the returned one.
      layer: layer of the pool to use; an int or a traced scalar.
      kv_lens: tokens of each row in the pool, those of this step included.
      page_table: pages of each row; entries past `ceil(kv_lens / P)` are never followed.
      cu_q_lens: first token of each row, followed by the end of the last row.
      num_rows: number of live rows.
      scale: factor on the scores, usually `H ** -0.5`.
      window: number of tokens that a query sees: at position p the keys in `(p - window, p]`; None for all up to p.
      soft_cap: bound of the scores, which become `soft_cap * tanh(scores / soft_cap)`; None to leave them.
      sinks: extra logit per query head that takes part in the softmax and carries no value.
      rope: cosines and sines of every token's angles, which rotate `q` and `k` in float32 before use, as `apply_rope`
        does; None to use them as they are.
      tree_mask: new tokens of its row that each token sees, to verify a tree of drafts: bit j of word w stands for new
        token 32 w + j. A token sees none after itself whatever its bits say, and all past tokens and new ones beyond
        the last word. None if the new tokens of each row follow each other. Excludes `window`, which goes by position.
      backend: "auto" or a name in `BACKENDS`.

    Raises:
      ValueError: shapes, dtypes or options that do not fit together.
      UnsupportedBackendError: the requested backend cannot run this call.
    """
    rows = RaggedRows(kv_lens, page_table, cu_q_lens, num_rows)
    _check_tokens(q, k, v)
    _check_rows(rows)
    _check_options(q.shape[1], window, soft_cap, sinks)
    _check_rope(q, rope)
    _check_tree_mask(q, tree_mask, window)
    chosen = BACKENDS[_select_for_pool(backend, q, k, kv_pages, has_tree_mask=tree_mask is not None)]
    _check_pool(chosen, k, kv_pages, layer)
    return chosen.write_and_attend(
        q,
        k,
        v,
        kv_pages,
        layer,
        rows,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        rope=rope,
        tree_mask=tree_mask,
    )


def select_backend(
    backend: str = AUTO,
    *,
    num_query_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int | None,
    kv_dtype: DTypeLike,
    platform: str | None = None,
) -> str:
    """Return the name of the backend that serves these sizes: resolve "auto" once, then pass the result everywhere.

    Args:
      backend: "auto" or the name of a backend that must be able to run.
      num_query_heads: number of query heads, Q.
      num_kv_heads: number of KV heads, K.
      head_dim: size of a head, H.
      page_size: tokens per page, P; None for the `default_page_size` of each backend.
      kv_dtype: dtype of the pool.
      platform: "cpu", "gpu" or "tpu"; None for the platform that computations run on.

    Raises:
      UnsupportedBackendError: no backend, or not the named one, can run these sizes.
    """
    kv_dtype, platform = jnp.dtype(kv_dtype), platform or target_platform()

    def supports(candidate: Backend) -> str | None:
        tokens = page_size or candidate.default_page_size(num_kv_heads, head_dim, kv_dtype)
        return candidate.supports(Problem(num_query_heads, num_kv_heads, head_dim, tokens, kv_dtype, platform))

    return select("ragged_paged_attention", BACKENDS, backend, supports)


def default_page_size(backend: str, *, num_kv_heads: int, head_dim: int, kv_dtype: DTypeLike) -> int:
    """Return the default page size in tokens of a named backend (see `select_backend`).

    Raises:
      ValueError: the name is not that of a backend.
    """
    return _named(backend).default_page_size(num_kv_heads, head_dim, jnp.dtype(kv_dtype))


def kv_shape(
    backend: str, *, num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int
) -> tuple[int, ...]:
    """Return the shape of the pool's values in the layout of a named backend (see `select_backend`).

    Raises:
      ValueError: the name is not that of a backend.
    """
    return _named(backend).kv_shape(num_layers, num_pages, page_size, num_kv_heads, head_dim)


def new_pages(
    backend: str,
    *,
    num_layers: int,
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: DTypeLike,
) -> Pages:
    """Return an empty pool of a named backend (see `select_backend`), with scales if the dtype needs them.

    Raises:
      ValueError: the name is not that of a backend.
    """
    chosen, dtype, sizes = _named(backend), jnp.dtype(dtype), (num_layers, num_pages, page_size, num_kv_heads)
    values = jnp.zeros(chosen.kv_shape(*sizes, head_dim), dtype)
    return QuantizedPages(values, jnp.zeros(chosen.scale_shape(*sizes), jnp.float32)) if is_quantized(dtype) else values


def to_canonical(backend: str, kv_pages: Pages) -> Pages:
    """Convert the pool, or any pages of it `[L, N, ...]`, from the layout of a named backend to `[L, N, P, 2K, H]`."""
    return _named(backend).to_canonical(kv_pages)


def from_canonical(backend: str, kv_pages: Pages) -> Pages:
    """Convert the pool, or any pages of it `[L, N, ...]`, from `[L, N, P, 2K, H]` to the layout of a named backend."""
    return _named(backend).from_canonical(kv_pages)


def _named(backend: str) -> Backend:
    if backend not in BACKENDS:
        hint = "; resolve it with select_backend first" if backend == AUTO else ""
        raise ValueError(f"a pool's layout needs a backend's name, one of {list(BACKENDS)}, got {backend!r}{hint}")
    return BACKENDS[backend]


def _select_for_pool(backend: str, q: Array, k: Array, kv_pages: Pages, *, has_tree_mask: bool) -> str:
    """Select a backend if only the pool's shape is known: the page size depends on the layout."""
    platform, values = target_platform(), values_of(kv_pages)

    def supports(candidate: Backend) -> str | None:
        page_size = candidate.pool_dims(values.shape).page_size
        sizes = (q.shape[1], k.shape[1], q.shape[2], page_size)
        problem = Problem(*sizes, values.dtype, platform, has_tree_mask)
        return candidate.supports(problem)

    return select("ragged_paged_attention", BACKENDS, backend, supports)


def _check_tokens(q: Array, k: Array, v: Array) -> None:
    if q.ndim != 3 or k.ndim != 3 or k.shape != v.shape:
        raise ValueError(f"q must be [T, Q, H] and k, v both [T, K, H], got {q.shape}, {k.shape} and {v.shape}")
    if q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2]:
        raise ValueError(f"q and k must agree in tokens and head_dim, got q {q.shape} and k {k.shape}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"query heads must be a multiple of kv heads, got {q.shape[1]} and {k.shape[1]}")


def _check_rows(rows: RaggedRows) -> None:
    R = rows.kv_lens.shape[0]
    expected = {"kv_lens": (R,), "cu_q_lens": (R + 1,), "num_rows": ()}
    for name, shape in expected.items():
        array = getattr(rows, name)
        if array.shape != shape or array.dtype != jnp.int32:
            raise ValueError(f"{name} must be int32 of shape {shape}, got {array.dtype} of shape {array.shape}")
    table = rows.page_table
    if table.ndim != 2 or table.shape[0] != R or table.dtype != jnp.int32:
        raise ValueError(f"page_table must be int32 of shape ({R}, M), got {table.dtype} of shape {table.shape}")


def _check_options(num_query_heads: int, window: int | None, soft_cap: float | None, sinks: Array | None) -> None:
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 token, got {window}; pass None to see the whole sequence")
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"soft_cap must be positive, got {soft_cap}; pass None to leave the scores uncapped")
    if sinks is not None and sinks.shape != (num_query_heads,):
        raise ValueError(f"sinks must have one logit per query head, shape ({num_query_heads},), got {sinks.shape}")


def _check_rope(q: Array, rope: Array | None) -> None:
    T, _, H = q.shape
    if rope is not None and (rope.shape != (2, T, H / 2) or rope.dtype != jnp.float32):
        raise ValueError(
            f"rope must be float32 of shape (2, {T}, {H / 2:g}), cosines and sines of T tokens by H / 2, "
            f"got {rope.dtype} of shape {rope.shape}"
        )


def _check_tree_mask(q: Array, tree_mask: Array | None, window: int | None) -> None:
    if tree_mask is None:
        return
    if tree_mask.ndim != 2 or tree_mask.shape[0] != q.shape[0] or tree_mask.dtype != jnp.int32:
        raise ValueError(
            f"tree_mask must be int32 of shape ({q.shape[0]}, words), got {tree_mask.dtype} of shape {tree_mask.shape}"
        )
    if window is not None:
        raise ValueError("a window goes by position, which a tree_mask leaves open; give one of them")


def _check_pool(chosen: Backend, k: Array, kv_pages: Pages, layer: int | Array) -> None:
    values = values_of(kv_pages)
    dims = chosen.pool_dims(values.shape)
    if (dims.num_kv_heads, dims.head_dim) != k.shape[1:]:
        raise ValueError(
            f"kv_pages holds {dims.num_kv_heads} kv heads of {dims.head_dim}, k has {k.shape[1]} of {k.shape[2]} "
            f"(pool shape {values.shape}); make the pool with new_pages of the same backend"
        )
    if is_quantized(values.dtype) != isinstance(kv_pages, QuantizedPages):
        raise ValueError(
            f"a pool has scales if it is one of {list(QUANTIZED_MAX)}, got {_form(kv_pages)}; use new_pages"
        )
    if isinstance(kv_pages, QuantizedPages) and kv_pages.scales.shape != (expected := chosen.scale_shape(*dims[:4])):
        raise ValueError(f"the scales of this pool must have shape {expected}, got {kv_pages.scales.shape}")
    if isinstance(layer, int) and not 0 <= layer < dims.num_layers:
        raise ValueError(f"layer must be in [0, {dims.num_layers}), got {layer}")


def _form(kv_pages: Pages) -> str:
    return f"{values_of(kv_pages).dtype} with{'' if isinstance(kv_pages, QuantizedPages) else 'out'} scales"
