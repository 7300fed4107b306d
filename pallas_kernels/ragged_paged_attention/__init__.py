"""Ragged paged attention: rotate, write keys and values to their pages and attend, for all rows of a step at once.

Contract of the operation, the same for all backends:

- The rows of a step are packed on one token axis T: row r owns tokens `cu_q_lens[r]:cu_q_lens[r+1]`, the last of its
  sequence, at positions `kv_lens[r] - q_len .. kv_lens[r] - 1`. A row of one token is a decode, a row of many a prefill
  chunk; one step mixes them freely.
- All new keys and values of a step are written before any row of the step attends. A page may belong to several rows
  (a shared prefix), and one of them may write to it in the same step: the others then see the new content. No two rows
  of a step write the same position of a page. Schedulers rely on this order to share pages between rows of one step.
- The pool is one array for all layers, in a layout that belongs to the backend: make it with `new_pages`. An int8 or
  fp8 pool has an array of scales beside it, one bfloat16 per token and head (`QuantizedPages`). In an int4 pool, a
  vector is a run of bytes with its scales among them (`int4.py`), and H the number of these bytes. Code that moves
  pages elsewhere converts them by `to_canonical` and `from_canonical` (`[L, N, P, 2K, H]`, K of head h at 2h, V at
  2h + 1).
  Under jit, donate the pool and pass it from layer to layer: it is then updated in place and never copied, as long as
  each layer's keys depend on the output of the layer before. In a transformer they do, which orders reads and writes.
- Rows may read a list of their pages instead of all (`PagesToRead`). Backends get rows that have no other pages.
- T and R are static shapes, padded by the caller. Rows from `num_rows` on and tokens from `cu_q_lens[num_rows]` on are
  padding: their content (except NaN in padding tokens) changes no live output and is not written to the pool. Neither
  page-table entries past a row's length, nor stale content of its pages past it, nor the width M of the page table
  change anything: the work follows the lengths alone. Outputs of padding tokens are finite and otherwise unspecified.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxserve.pallas_kernels.op import AUTO, Op
from jaxserve.pallas_kernels.ragged_paged_attention import mosaic_gpu, mosaic_tpu, native, xla
from jaxserve.pallas_kernels.ragged_paged_attention.interface import (
    AttentionInputs,
    AttentionOptions,
    Backend,
    PagesToRead,
    Problem,
    RaggedRows,
)
from jaxserve.pallas_kernels.ragged_paged_attention.layout import Layout, PoolDims
from jaxserve.pallas_kernels.ragged_paged_attention.moves import move_tokens as _move_tokens
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import (
    QUANTIZED,
    QUANTIZED_MAX,
    SCALE_DTYPE,
    Pages,
    QuantizedPages,
    array_dtype,
    has_scales,
    pool_dtype,
    stored_size,
    values_of,
)
from jaxserve.pallas_kernels.ragged_paged_attention.rope import apply_rope
from jaxserve.pallas_kernels.target import target_platform
from jaxtyping import Array, Float, Int32

__all__ = [
    "BACKENDS",
    "QUANTIZED",
    "AttentionInputs",
    "AttentionOptions",
    "Pages",
    "PagesToRead",
    "PoolDims",
    "Problem",
    "QuantizedPages",
    "RaggedRows",
    "apply_rope",
    "check_rows",
    "check_scales",
    "check_tree_mask",
    "default_page_size",
    "from_canonical",
    "move_tokens",
    "new_pages",
    "ragged_paged_attention",
    "select_backend",
    "split_pages",
    "step_rows",
    "to_canonical",
]

BACKENDS: Mapping[str, Backend] = {
    "mosaic_gpu": mosaic_gpu,
    "mosaic_tpu": mosaic_tpu,
    "native": native,
    "xla": xla,
}
"""All backends, best first."""
OP = Op("ragged_paged_attention", BACKENDS)


def ragged_paged_attention(
    inputs: AttentionInputs,
    kv_pages: Pages,
    layer: int | Int32[Array, ""],
    options: AttentionOptions,
    *,
    num_parts: int | None = None,
    backend: str = AUTO,
) -> tuple[Float[Array, "T Q H"], Pages]:
    """Write the new keys and values to the pages of their rows, then attend; return the output and the updated pool.

    All new keys and values are written before any row attends, so a row sees what another row of the same call writes
    to a page that both have. Scores and softmax are float32 whatever the dtypes.

    Args:
      inputs: tokens of the step and their rows.
      kv_pages: pool made by `new_pages(backend, ...)`. Consumed: donate it under jit and use the returned one.
      layer: layer of the pool to use; an int or a traced scalar.
      options: static options.
      num_parts: pages of these heads in each page of a pool of floats that was made for others; the page table then has
        numbers of these: page n of the pool is those from `n * num_parts` on. None for a pool of these heads.
      backend: "auto" or a name in `BACKENDS`.

    Raises:
      ValueError: shapes, dtypes or options that do not fit together.
      UnsupportedBackendError: the requested backend cannot run this call.
    """
    _check_tokens(inputs)
    check_rows(inputs.rows)
    _check_sinks(inputs)
    _check_rope(inputs)
    check_tree_mask(inputs.tree_mask, inputs.q.shape[0])
    name = _select_for_pool(backend, inputs, kv_pages)
    chosen, seen = BACKENDS[name], kv_pages
    if num_parts is not None:
        sizes = {"num_kv_heads": inputs.k.shape[1], "head_dim": inputs.k.shape[2]}
        seen = split_pages(name, kv_pages, num_parts=num_parts, **sizes)
    _check_pool(chosen.LAYOUT, inputs.k, seen, layer)
    _check_window(inputs.rows, options)
    page_size = chosen.LAYOUT.pool_dims(values_of(seen).shape).page_size
    inputs = inputs._replace(rows=inputs.rows.with_read_pages(page_size))
    if seen is kv_pages or chosen.SPLITS_PAGES:
        return chosen.write_and_attend(inputs, kv_pages, layer, options)
    out, seen = chosen.write_and_attend(inputs, seen, layer, options)
    return out, values_of(seen).reshape(values_of(kv_pages).shape)


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
        tokens = page_size or candidate.LAYOUT.default_page_size(num_kv_heads, head_dim, kv_dtype)
        return candidate.supports(Problem(num_query_heads, num_kv_heads, head_dim, tokens, kv_dtype, platform))

    return OP.select(backend, supports)


def default_page_size(backend: str, *, num_kv_heads: int, head_dim: int, kv_dtype: DTypeLike) -> int:
    """Return the default page size in tokens of a named backend (see `select_backend`).

    Raises:
      ValueError: the name is not that of a backend.
    """
    return _layout_of(backend).default_page_size(num_kv_heads, head_dim, jnp.dtype(kv_dtype))


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
    layout, dtype = _layout_of(backend), jnp.dtype(dtype)
    dims = PoolDims(num_layers, num_pages, page_size, num_kv_heads, stored_size(head_dim, dtype))
    values = jnp.zeros(layout.kv_shape(dims), array_dtype(dtype))
    return QuantizedPages(values, jnp.zeros(layout.scale_shape(dims), SCALE_DTYPE)) if has_scales(dtype) else values


def to_canonical(backend: str, kv_pages: Pages, *, head_dim: int | None = None) -> Pages:
    """Convert the pool, or any pages of it `[L, N, ...]`, from the layout of a named backend to `[L, N, P, 2K, H]`.

    Args:
      backend: name of the backend.
      kv_pages: pool of that backend, or pages of it.
      head_dim: size of a head, H, of a pool without scales; None to read it from the pool, which may tell a head as
        several smaller ones.
    """
    pages = _layout_of(backend).to_canonical(kv_pages)
    if head_dim is None or isinstance(pages, QuantizedPages):
        return pages
    return pages.reshape(*pages.shape[:3], -1, head_dim)


def from_canonical(backend: str, kv_pages: Pages) -> Pages:
    """Convert the pool, or any pages of it `[L, N, ...]`, from `[L, N, P, 2K, H]` to the layout of a named backend."""
    return _layout_of(backend).from_canonical(kv_pages)


def move_tokens(
    backend: str,
    kv_pages: Pages,
    page_table: Int32[Array, "table_rows M"],
    table_row: Int32[Array, "R"],
    first: Int32[Array, "R"],
    source: Int32[Array, "R N"],
) -> Pages:
    """Copy keys and values within the rows of a pool of a named backend, in all layers: see `moves.move_tokens`."""
    return _move_tokens(_layout_of(backend), kv_pages, page_table, table_row, first, source)


def step_rows(backend: str, rows: RaggedRows) -> RaggedRows:
    """Return the rows of a step as a named backend wants them in all layers, so that pages are looked up once."""
    return rows.with_own_table() if _backend_of(backend).WANTS_OWN_TABLE else rows


def split_pages(backend: str, kv_pages: Pages, *, num_parts: int, num_kv_heads: int, head_dim: int) -> Array:
    """Return the pool of a named backend as one for other heads: its page n as the pages from `n * num_parts` on.

    Nothing moves where arrays are row-major. The pool has the result, reshaped to its own shape, again.

    Raises:
      ValueError: the pool has scales, or a page is not so many of the other heads'.
    """
    if isinstance(kv_pages, QuantizedPages) or not isinstance(kv_pages, jax.Array):
        raise ValueError(f"a pool whose pages are split must be an array of floats, got {_form(kv_pages)}")
    layout = _layout_of(backend)
    dims = layout.pool_dims(kv_pages.shape)
    if dims.num_kv_heads * dims.head_dim != num_parts * num_kv_heads * head_dim:
        raise ValueError(
            f"a page of {dims.num_kv_heads} kv heads of {dims.head_dim} must be {num_parts} pages of other heads, "
            f"got {num_kv_heads} of {head_dim}"
        )
    sizes = {"num_pages": dims.num_pages * num_parts, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    return kv_pages.reshape(layout.kv_shape(dims._replace(**sizes)))


def _layout_of(backend: str) -> Layout:
    return _backend_of(backend).LAYOUT


def _backend_of(backend: str) -> Backend:
    if backend not in BACKENDS:
        hint = "; resolve it with select_backend first" if backend == AUTO else ""
        raise ValueError(f"a pool's layout needs a backend's name, one of {list(BACKENDS)}, got {backend!r}{hint}")
    return BACKENDS[backend]


def _select_for_pool(backend: str, inputs: AttentionInputs, kv_pages: Pages) -> str:
    """Select a backend if only the pool's shape is known: the page size depends on the layout."""
    (_, Q, H), K = inputs.q.shape, inputs.k.shape[1]
    platform, values = target_platform(), values_of(kv_pages)

    def supports(candidate: Backend) -> str | None:
        page_size = candidate.LAYOUT.pool_dims(values.shape).page_size
        return candidate.supports(Problem(Q, K, H, page_size, pool_dtype(kv_pages), platform))

    return OP.select(backend, supports)


def _check_tokens(inputs: AttentionInputs) -> None:
    q, k, v = inputs.q, inputs.k, inputs.v
    if q.ndim != 3 or k.ndim != 3 or k.shape != v.shape:
        raise ValueError(f"q must be [T, Q, H] and k, v both [T, K, H], got {q.shape}, {k.shape} and {v.shape}")
    if q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2]:
        raise ValueError(f"q and k must agree in tokens and head_dim, got q {q.shape} and k {k.shape}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"query heads must be a multiple of kv heads, got {q.shape[1]} and {k.shape[1]}")


def check_rows(rows: RaggedRows) -> None:
    """Check shapes and dtypes of rows; ValueError if they do not fit together."""
    R = rows.kv_lens.shape[0]
    expected = {"kv_lens": (R,), "cu_q_lens": (R + 1,), "num_rows": ()}
    arrays = rows._asdict()
    if rows.table_row is not None:
        expected["table_row"] = (R,)
    if (read := rows.pages_to_read) is not None:
        expected |= {"columns": (R, *read.columns.shape[1:2]), "num_skipped": (R,)}
        arrays |= read._asdict()
    for name, shape in expected.items():
        array = arrays[name]
        if array.shape != shape or array.dtype != jnp.int32:
            raise ValueError(f"{name} must be int32 of shape {shape}, got {array.dtype} of shape {array.shape}")
    table = rows.page_table
    has_rows = table.ndim == 2 and (rows.table_row is not None or table.shape[0] == R)
    if not has_rows or table.dtype != jnp.int32:
        raise ValueError(
            f"page_table must be int32 of shape ({R}, M), or of any rows with table_row to choose among them, "
            f"got {table.dtype} of shape {table.shape}"
        )


def _check_window(rows: RaggedRows, options: AttentionOptions) -> None:
    if rows.pages_to_read is not None and options.window is not None:
        raise ValueError(
            f"pages_to_read must be None in a layer with a window, got a window of {options.window} tokens: it counts "
            f"the tokens of the pages that are read, and pages that are left out are gaps between them"
        )


def _check_sinks(inputs: AttentionInputs) -> None:
    sinks, Q = inputs.sinks, inputs.q.shape[1]
    if sinks is not None and sinks.shape != (Q,):
        raise ValueError(f"sinks must have one logit per query head, shape ({Q},), got {sinks.shape}")


def _check_rope(inputs: AttentionInputs) -> None:
    rope, (T, _, H) = inputs.rope, inputs.q.shape
    if rope is not None and (rope.shape != (2, T, H / 2) or rope.dtype != jnp.float32):
        raise ValueError(
            f"rope must be float32 of shape (2, {T}, {H / 2:g}), cosines and sines of T tokens by H / 2, "
            f"got {rope.dtype} of shape {rope.shape}"
        )


def check_tree_mask(mask: Array | None, T: int) -> None:
    """Check shape and dtype of the words of T tokens, if there are any; ValueError if they are wrong."""
    if mask is not None and (mask.shape != (T,) or mask.dtype != jnp.int32):
        raise ValueError(f"tree_mask must be int32 of shape ({T},), got {mask.dtype} of shape {mask.shape}")


def _check_pool(layout: Layout, k: Array, kv_pages: Pages, layer: int | Array) -> None:
    values = values_of(kv_pages)
    dims = layout.pool_dims(values.shape)
    size = stored_size(k.shape[2], pool_dtype(kv_pages))
    own = dims._replace(num_kv_heads=k.shape[1], head_dim=size)
    if layout.kv_shape(own) != values.shape:
        raise ValueError(
            f"kv_pages holds {dims.num_kv_heads} kv heads of {dims.head_dim}, k has {k.shape[1]} of {size} "
            f"(pool shape {values.shape}); make the pool with new_pages of the same backend"
        )
    check_scales(kv_pages, lambda: layout.scale_shape(own))
    if isinstance(layer, int) and not 0 <= layer < dims.num_layers:
        raise ValueError(f"layer must be in [0, {dims.num_layers}), got {layer}")


def check_scales(kv_pages: Pages, scale_shape: Callable[[], tuple[int, ...]]) -> None:
    """Check that a pool has bfloat16 scales of this shape, exactly if its dtype needs them; ValueError if not."""
    if has_scales(values_of(kv_pages).dtype) != isinstance(kv_pages, QuantizedPages):
        raise ValueError(
            f"a pool has scales if it is one of {list(QUANTIZED_MAX)}, got {_form(kv_pages)}; use new_pages"
        )
    if not isinstance(kv_pages, QuantizedPages):
        return
    scales = kv_pages.scales
    if scales.shape != (expected := scale_shape()) or scales.dtype != SCALE_DTYPE:
        raise ValueError(
            f"the scales of this pool must have shape {expected} and be {SCALE_DTYPE}, "
            f"got {scales.dtype} of shape {scales.shape}; use new_pages"
        )


def _form(kv_pages: Pages) -> str:
    return f"{values_of(kv_pages).dtype} with{'' if isinstance(kv_pages, QuantizedPages) else 'out'} scales"
