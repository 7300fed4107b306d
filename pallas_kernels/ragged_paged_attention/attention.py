"""Entry point of the operation: backend selection, argument checks and the call. See the package."""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from jaxserve.pallas_kernels.op import AUTO
from jaxserve.pallas_kernels.ragged_paged_attention.ahead import with_later_tokens
from jaxserve.pallas_kernels.ragged_paged_attention.interface import AttentionInputs, AttentionOptions, Backend, Problem
from jaxserve.pallas_kernels.ragged_paged_attention.kinds import KVKind
from jaxserve.pallas_kernels.ragged_paged_attention.pools import BACKENDS, OP, backend_named, layout_for, split_pages
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import (
    QUANTIZED_MAX,
    SCALE_DTYPE,
    Pages,
    QuantizedPages,
    describe,
    has_scales,
    pool_dtype,
    values_of,
)
from jaxserve.pallas_kernels.ragged_paged_attention.rows import RaggedRows
from jaxserve.pallas_kernels.target import target_platform


def ragged_paged_attention(
    inputs: AttentionInputs,
    kv_pages: Pages,
    layer: int | Int32[Array, ""],
    options: AttentionOptions,
    *,
    num_parts: int | None = None,
    backend: str = AUTO,
) -> tuple[Float[Array, "N Q V"], Pages]:
    """Write the new keys and values, or latents, to their rows' pages, then attend with all new tokens.

    All new vectors are written before any row attends: a row sees another row's new vectors in a shared page. Scores
    and softmax are float32 for every dtype.

    Args:
      inputs: the step's tokens and rows.
      kv_pages: pool made by `new_pages(backend, ...)`. Consumed: donate it under jit and use the returned one.
      layer: layer in the pool; an int or a traced scalar.
      options: static options.
      num_parts: number of smaller pages in each page, for a float pool that was made for larger heads. The page table
        then counts the smaller pages: page n in the pool becomes the pages from `n * num_parts` on. None for a pool
        made for these heads.
      backend: "auto" or a name in `BACKENDS`.

    Returns:
      Each new token's output, and the updated pool.

    Raises:
      ValueError: shapes, dtypes or options that do not fit together.
      UnsupportedBackendError: the requested backend cannot run this call.
    """
    kind = _check_inputs(inputs, options)
    name = select_for_pool(backend, kind, inputs.q.shape[1], kv_pages)
    chosen, pool = BACKENDS[name], kv_pages
    if options.max_queries is not None and not chosen.expands_latents:
        raise ValueError(f"max_queries must be None with the backend {name!r}, got {options.max_queries}")
    if num_parts is not None:
        pool = split_pages(name, kv_pages, kind, num_parts)
    _check_pool(name, kind, pool, layer)
    inputs = inputs._replace(rows=read_rows(name, inputs.rows, pool))
    causal, ahead = inputs._replace(ahead=None), inputs.ahead is not None and not options.last_only
    if pool is kv_pages or chosen.splits_pages:
        out, kv_pages = chosen.write_and_attend(causal, kv_pages, layer, options)
        pool = kv_pages if num_parts is None else split_pages(name, kv_pages, kind, num_parts) if ahead else pool
    else:
        out, pool = chosen.write_and_attend(causal, pool, layer, options)
        kv_pages = values_of(pool).reshape(values_of(kv_pages).shape)
    if ahead:
        out = with_later_tokens(out, inputs, pool, layer, options, layout_for(chosen, kind, pool_dtype(pool)))
    return out, kv_pages


def select_backend(
    backend: str = AUTO,
    *,
    kind: KVKind,
    num_query_heads: int,
    page_size: int | None,
    kv_dtype: DTypeLike,
    platform: str | None = None,
) -> str:
    """Return the name of the backend for a model: resolve "auto" once, then pass the name everywhere.

    Args:
      backend: "auto" or the name of a backend that must be able to run.
      kind: vectors that the pool stores for a token.
      num_query_heads: number of query heads, Q.
      page_size: tokens per page, P; None for each backend's `default_page_size`.
      kv_dtype: pool dtype.
      platform: "cpu", "gpu" or "tpu"; None for the platform that computations run on.

    Raises:
      UnsupportedBackendError: no backend, or not the named one, can run these sizes.
    """
    kv_dtype, platform = jnp.dtype(kv_dtype), platform or target_platform()

    def unsupported_reason(candidate: Backend) -> str | None:
        tokens = page_size or layout_for(candidate, kind, kv_dtype).default_page_size(kv_dtype)
        return candidate.unsupported_reason(Problem(kind, num_query_heads, tokens, kv_dtype, platform))

    return OP.select(backend, unsupported_reason)


def select_for_pool(backend: str, kind: KVKind, num_query_heads: int, kv_pages: Pages) -> str:
    """Return the name of the backend that runs a call with an existing pool.

    Args:
      backend: "auto" or the name of a backend that must be able to run.
      kind: vectors that the pool stores for a token.
      num_query_heads: number of query heads, Q.
      kv_pages: the pool, whose page size each backend reads from the shape according to its own layout.

    Raises:
      UnsupportedBackendError: no backend, or not the named one, can run the call.
    """
    shape, platform = values_of(kv_pages).shape, target_platform()

    def unsupported_reason(candidate: Backend) -> str | None:
        page_size = candidate.layout.pool_dims(shape).page_size
        return candidate.unsupported_reason(Problem(kind, num_query_heads, page_size, pool_dtype(kv_pages), platform))

    return OP.select(backend, unsupported_reason)


def step_rows(backend: str, rows: RaggedRows) -> RaggedRows:
    """Prepare a step's rows for all layers' calls: gather the page table once, if `backend` reads it faster then."""
    return rows.with_gathered_table() if backend_named(backend).gathers_table else rows


def read_rows(backend: str, rows: RaggedRows, kv_pages: Pages) -> RaggedRows:
    """Return the rows with page tables and lengths that include only the pages in `rows.pages_to_read`.

    Args:
      backend: name of the backend that the pool was made for.
      rows: the step's rows.
      kv_pages: the pool.
    """
    return rows.with_read_pages(pool_page_size(backend, kv_pages))


def pool_page_size(backend: str, kv_pages: Pages) -> int:
    """Return the tokens per page in a pool made for the backend named `backend`."""
    return backend_named(backend).layout.pool_dims(values_of(kv_pages).shape).page_size


def _check_inputs(inputs: AttentionInputs, options: AttentionOptions) -> KVKind:
    """Check the shapes and dtypes of all arguments except the pool; return the vectors that the pool must store.

    Raises:
      ValueError: shapes, dtypes or options do not fit together.
    """
    q, k, v = inputs.q, inputs.k, inputs.v
    if q.ndim != 3 or k.ndim != 3 or (v is not None and v.shape != k.shape):
        shape = None if v is None else v.shape
        raise ValueError(f"q must be [T, Q, H] and k, v both [T, K, H], got {q.shape}, {k.shape} and {shape}")
    num_queries = inputs.rows.kv_lens.shape[0] if options.last_only else k.shape[0]
    if q.shape[0] != num_queries or q.shape[2] != k.shape[2]:
        agree = "head_dim, and q have a query per row," if options.last_only else "tokens and head_dim,"
        raise ValueError(f"q and k must agree in {agree} got q {q.shape} and k {k.shape}")
    if options.last_only and inputs.tree_mask is not None:
        raise ValueError("tree_mask must be None with last_only: a tree's nodes all attend")
    if inputs.ahead is not None and (options.rank is not None or inputs.tree_mask is not None):
        raise ValueError("ahead must be None with latents and with draft trees")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"query heads must be a multiple of kv heads, got {q.shape[1]} and {k.shape[1]}")
    if (v is None) != (options.rank is not None):
        raise ValueError(f"v must be None exactly with a rank (latents), got a rank of {options.rank}")
    if options.rank is not None:
        _check_latents(inputs, options)
    kind = inputs.kind(options)
    _check_rows(inputs.rows)
    _check_window(inputs.rows, options)
    T, Q = k.shape[0], q.shape[1]
    if inputs.sinks is not None and inputs.sinks.shape != (Q,):
        raise ValueError(f"sinks must have one logit per query head, shape ({Q},), got {inputs.sinks.shape}")
    _check_rope(inputs.rope, kind, T)
    mask = inputs.tree_mask
    if mask is not None and (mask.shape != (T,) or mask.dtype != jnp.int32):
        raise ValueError(f"tree_mask must be int32 of shape ({T},), got {mask.dtype} of shape {mask.shape}")
    return kind


def _check_latents(inputs: AttentionInputs, options: AttentionOptions) -> None:
    """Raise ValueError unless the inputs have one latent per token, and no options that latents do not support."""
    _, num_heads, size = inputs.k.shape
    if num_heads != 1:
        raise ValueError(f"k must have the latents as the keys of one head, got {num_heads} heads")
    if options.rank is not None and options.rank > size:
        raise ValueError(f"rank must be at most the {size} elements of a latent, got {options.rank}")
    if inputs.sinks is not None or options.window is not None or options.soft_cap is not None:
        raise ValueError("sinks, window and soft_cap must be None with latents")


def _check_rows(rows: RaggedRows) -> None:
    """Raise ValueError if an array in `rows` has a wrong shape or dtype."""
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
    """Raise ValueError if a layer has a sliding window and rows read only some pages."""
    if rows.pages_to_read is not None and options.window is not None:
        raise ValueError(
            f"pages_to_read must be None in a layer with a window, got a window of {options.window} tokens: it counts "
            f"the tokens of the pages that are read, and pages that are left out are gaps between them"
        )


def _check_rope(rope: Array | None, kind: KVKind, T: int) -> None:
    """Raise ValueError unless `rope` has float32 cosines and sines of T tokens for the rotated elements in `kind`."""
    half = kind.rope_dim / 2
    if rope is not None and (rope.shape != (2, T, half) or rope.dtype != jnp.float32):
        raise ValueError(
            f"rope must be float32 of shape (2, {T}, {half:g}), cosines and sines of T tokens by half of the rotated "
            f"elements, got {rope.dtype} of shape {rope.shape}"
        )


def _check_pool(backend: str, kind: KVKind, kv_pages: Pages, layer: int | Array) -> None:
    """Raise ValueError if a pool does not have the shapes and dtypes for a backend and `kind`, or has no such layer."""
    shape, layout = values_of(kv_pages).shape, layout_for(BACKENDS[backend], kind, pool_dtype(kv_pages))
    dims = layout.pool_dims(shape)
    if shape != (expected := layout.kv_shape(dims)):
        raise ValueError(
            f"kv_pages must have shape {expected} for {kind}, got {shape}; make the pool with new_pages of the same "
            "backend"
        )
    if has_scales(values_of(kv_pages).dtype) != isinstance(kv_pages, QuantizedPages):
        raise ValueError(
            f"a pool has scales if it is one of {list(QUANTIZED_MAX)}, got {describe(kv_pages)}; use new_pages"
        )
    if isinstance(kv_pages, QuantizedPages):
        scales = kv_pages.scales
        if scales.shape != (expected := layout.scale_shape(dims)) or scales.dtype != SCALE_DTYPE:
            raise ValueError(
                f"the scales of this pool must have shape {expected} and be {SCALE_DTYPE}, "
                f"got {scales.dtype} of shape {scales.shape}; use new_pages"
            )
    if isinstance(layer, int) and not 0 <= layer < dims.num_layers:
        raise ValueError(f"layer must be in [0, {dims.num_layers}), got {layer}")
