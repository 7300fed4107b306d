"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) over pages, for all rows of a step at once.

A layer stores one vector per token, its latent, of r + d elements. All query heads attend over the same latents: the
score of a query is its product with the whole latent, the value is the latent's first r elements. The matrices that
expand a latent to keys and values of heads are multiplied with queries and outputs instead, by the caller (absorbed).
The last d elements carry the position: the operation rotates them in queries and latents.

`head_attention` takes the matrices too, and chooses: rows of many new tokens attend over keys and values that are
expanded from latents, block by block (`expanded.py`), where that is fewer operations.

Rows, padding, sharing of pages and the order of writes are those of `ragged_paged_attention`: all new latents of a step
are written before any row attends. Code that moves pages elsewhere converts them by `to_canonical` and `from_canonical`
(`[L, N, P, W]`). A backend may store latents with columns of padding behind them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxserve.pallas_kernels.mla_attention import expanded, mosaic_gpu, mosaic_tpu, native, xla
from jaxserve.pallas_kernels.mla_attention.interface import (
    Backend,
    HeadInputs,
    HeadMatrices,
    LatentInputs,
    LatentOptions,
    Problem,
)
from jaxserve.pallas_kernels.mla_attention.layout import Layout, PoolDims
from jaxserve.pallas_kernels.op import AUTO, Op
from jaxserve.pallas_kernels.ragged_paged_attention import RaggedRows, check_rows, check_scales, check_tree_mask
from jaxserve.pallas_kernels.ragged_paged_attention.moves import move_tokens as _move_tokens
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import (
    SCALE_DTYPE,
    Pages,
    QuantizedPages,
    has_scales,
    values_of,
)
from jaxserve.pallas_kernels.target import target_platform
from jaxtyping import Array, Bool, Float, Int32

__all__ = [
    "BACKENDS",
    "HeadInputs",
    "HeadMatrices",
    "LatentInputs",
    "LatentOptions",
    "PoolDims",
    "Problem",
    "default_page_size",
    "from_canonical",
    "head_attention",
    "mla_attention",
    "move_tokens",
    "new_pages",
    "select_backend",
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
OP = Op("mla_attention", BACKENDS)
_BLOCK_TOKENS = 32  # tokens of rows in decode, which follow each other, are seldom beside those of prompts


def mla_attention(
    inputs: LatentInputs,
    kv_pages: Pages,
    layer: int | Int32[Array, ""],
    options: LatentOptions,
    *,
    backend: str = AUTO,
) -> tuple[Float[Array, "T Q rank"], Pages]:
    """Write the new latents to the pages of their rows, then attend; return the output and the updated pool.

    Args:
      inputs: tokens of the step and their rows.
      kv_pages: pool made by `new_pages(backend, ...)`. Consumed: donate it under jit and use the returned one.
      layer: layer of the pool to use; an int or a traced scalar.
      options: static options.
      backend: "auto" or a name in `BACKENDS`.

    Raises:
      ValueError: shapes, dtypes or options that do not fit together.
      UnsupportedBackendError: the requested backend cannot run this call.
    """
    _check_tokens(inputs, options)
    check_rows(inputs.rows)
    check_tree_mask(inputs.tree_mask, inputs.q.shape[0])
    name = _select_for_pool(backend, inputs.q.shape[1], inputs.latents, kv_pages, options)
    chosen = BACKENDS[name]
    if options.max_queries is not None and not chosen.EXPANDS:
        raise ValueError(f"max_queries must be None with the backend {name!r}, got {options.max_queries}")
    _check_pool(chosen.LAYOUT, inputs.latents, kv_pages, layer)
    inputs = inputs._replace(rows=_read_rows(chosen, inputs.rows, kv_pages))
    return chosen.write_and_attend(inputs, kv_pages, layer, options)


def head_attention(
    inputs: HeadInputs,
    kv_pages: Pages,
    layer: int | Int32[Array, ""],
    options: LatentOptions,
    *,
    backend: str = AUTO,
) -> tuple[Float[Array, "T Q v"], Pages]:
    """Attend with the queries of heads, by the matrices that make their keys and values; see `mla_attention`.

    Steps that have room for rows of `expanded.fewest_queries` tokens expand latents for such rows. Queries and outputs
    are multiplied for the tokens of the other rows alone, a block of tokens at a time.
    """
    (T, Q, _), matrices = inputs.q.shape, inputs.matrices
    name = _select_for_pool(backend, Q, inputs.latents, kv_pages, options)
    rows = _read_rows(BACKENDS[name], inputs.rows, kv_pages)
    inputs = inputs._replace(rows=rows)
    fewest = expanded.fewest_queries(matrices) if BACKENDS[name].EXPANDS and inputs.tree_mask is None else None
    if fewest is None or fewest > T:
        absorbed = inputs.absorbed(matrices.latent_q(inputs.q))
        out, kv_pages = mla_attention(absorbed, kv_pages, layer, options, backend=name)
        return matrices.values(out), kv_pages
    token_id = jnp.arange(T, dtype=jnp.int32)
    is_short = (rows.live_q_lens() < fewest)[rows.row_ids(token_id)] & (token_id < rows.cu_q_lens[rows.num_rows])
    q = _of_some(is_short, matrices.latent_q, inputs.q)
    of_short = dataclasses.replace(options, max_queries=fewest - 1)
    of_latents, kv_pages = mla_attention(inputs.absorbed(q), kv_pages, layer, of_short, backend=name)
    out = _of_some(is_short, matrices.values, of_latents)
    pages = xla.LatentPages(kv_pages, layer, options.rank)
    return expanded.attend(inputs.rotated_q(), matrices, pages, rows, options.scale, fewest, out), kv_pages


def _read_rows(backend: Backend, rows: RaggedRows, kv_pages: Pages) -> RaggedRows:
    return rows.with_read_pages(backend.LAYOUT.pool_dims(values_of(kv_pages).shape).page_size)


def _of_some(
    is_wanted: Bool[Array, "T"], multiply: Callable[[Array], Array], x: Float[Array, "T Q a"]
) -> Float[Array, "T Q b"]:
    """Return the products of tokens in blocks that have wanted ones, zeros of the others."""
    T = x.shape[0]
    block = min(_BLOCK_TOKENS, T)

    def fill(number: Int32[Array, ""], out: Float[Array, "T Q b"]) -> Float[Array, "T Q b"]:
        start = jnp.minimum(number * block, T - block)  # the last block may repeat tokens of the one before

        def compute() -> Float[Array, "T Q b"]:
            return lax.dynamic_update_slice_in_dim(out, multiply(lax.dynamic_slice_in_dim(x, start, block)), start, 0)

        return lax.cond(jnp.any(lax.dynamic_slice_in_dim(is_wanted, start, block)), compute, lambda: out)

    shape = jax.eval_shape(multiply, x)
    return lax.fori_loop(0, -(-T // block), fill, jnp.zeros(shape.shape, shape.dtype))


def select_backend(
    backend: str = AUTO,
    *,
    num_query_heads: int,
    rank: int,
    rope_dim: int,
    page_size: int | None,
    kv_dtype: DTypeLike,
    platform: str | None = None,
) -> str:
    """Return the name of the backend that serves these sizes: resolve "auto" once, then pass the result everywhere.

    Args:
      backend: "auto" or the name of a backend that must be able to run.
      num_query_heads: number of query heads, Q.
      rank: elements of a latent that are its value, r.
      rope_dim: elements of a latent that are rotated.
      page_size: tokens per page, P; None for the `default_page_size` of each backend.
      kv_dtype: dtype of the pool.
      platform: "cpu", "gpu" or "tpu"; None for the platform that computations run on.

    Raises:
      UnsupportedBackendError: no backend, or not the named one, can run these sizes.
    """
    kv_dtype, platform = jnp.dtype(kv_dtype), platform or target_platform()

    def supports(candidate: Backend) -> str | None:
        tokens = page_size or candidate.LAYOUT.default_page_size(rank + rope_dim, kv_dtype)
        return candidate.supports(Problem(num_query_heads, rank, rope_dim, tokens, kv_dtype, platform))

    return OP.select(backend, supports)


def default_page_size(backend: str, *, width: int, kv_dtype: DTypeLike) -> int:
    """Return the default page size in tokens of a named backend, for latents of `width` elements."""
    return BACKENDS[backend].LAYOUT.default_page_size(width, jnp.dtype(kv_dtype))


def new_pages(backend: str, *, num_layers: int, num_pages: int, page_size: int, width: int, dtype: DTypeLike) -> Pages:
    """Return an empty pool of a named backend (see `select_backend`), with scales if the dtype needs them."""
    layout, dtype = BACKENDS[backend].LAYOUT, jnp.dtype(dtype)
    dims = PoolDims(num_layers, num_pages, page_size, width)
    values = jnp.zeros(layout.kv_shape(dims), dtype)
    return QuantizedPages(values, jnp.zeros(layout.scale_shape(dims), SCALE_DTYPE)) if has_scales(dtype) else values


def to_canonical(backend: str, kv_pages: Pages, *, width: int) -> Pages:
    """Convert the pool, or any pages of it `[L, N, ...]`, from the layout of a named backend to `[L, N, P, W]`."""
    padded = BACKENDS[backend].LAYOUT.to_canonical(kv_pages)
    if isinstance(padded, QuantizedPages):
        return padded._replace(values=padded.values[..., :width])
    return padded[..., :width]


def from_canonical(backend: str, kv_pages: Pages) -> Pages:
    """Convert the pool, or any pages of it `[L, N, ...]`, from `[L, N, P, W]` to the layout of a named backend."""
    return BACKENDS[backend].LAYOUT.from_canonical(kv_pages)


def move_tokens(
    backend: str,
    kv_pages: Pages,
    page_table: Int32[Array, "table_rows M"],
    table_row: Int32[Array, "R"],
    first: Int32[Array, "R"],
    source: Int32[Array, "R N"],
) -> Pages:
    """Copy latents within the rows of a pool of a named backend, in all layers: see `moves.move_tokens`."""
    return _move_tokens(BACKENDS[backend].LAYOUT, kv_pages, page_table, table_row, first, source)


def step_rows(backend: str, rows: RaggedRows) -> RaggedRows:
    """Return the rows of a step as a named backend wants them in all layers; see `ragged_paged_attention.step_rows`."""
    return rows.with_own_table() if BACKENDS[backend].WANTS_OWN_TABLE else rows


def _select_for_pool(
    backend: str, num_query_heads: int, latents: Float[Array, "T W"], kv_pages: Pages, options: LatentOptions
) -> str:
    """Select a backend if only the pool's shape is known: the page size depends on the layout."""
    Q, rope_dim = num_query_heads, latents.shape[1] - options.rank
    platform, values = target_platform(), values_of(kv_pages)

    def supports(candidate: Backend) -> str | None:
        try:
            page_size = candidate.LAYOUT.pool_dims(values.shape).page_size
        except ValueError as error:
            return str(error)
        return candidate.supports(Problem(Q, options.rank, rope_dim, page_size, values.dtype, platform))

    return OP.select(backend, supports)


def _check_tokens(inputs: LatentInputs, options: LatentOptions) -> None:
    q, latents, rope = inputs.q, inputs.latents, inputs.rope
    if q.ndim != 3 or latents.ndim != 2 or q.shape[::2] != latents.shape:
        raise ValueError(f"q must be [T, Q, W] and latents [T, W], got {q.shape} and {latents.shape}")
    T, W = latents.shape
    if options.rank > W:
        raise ValueError(f"rank must be at most the {W} elements of a latent, got {options.rank}")
    half = (W - options.rank) / 2
    if rope is not None and (rope.shape != (2, T, half) or rope.dtype != jnp.float32):
        raise ValueError(
            f"rope must be float32 of shape (2, {T}, {half:g}), cosines and sines of T tokens by half of what is "
            f"rotated, got {rope.dtype} of shape {rope.shape}"
        )


def _check_pool(layout: Layout, latents: Array, kv_pages: Pages, layer: int | Array) -> None:
    shape = values_of(kv_pages).shape
    dims = layout.pool_dims(shape)
    if layout.kv_shape(dims._replace(width=latents.shape[1])) != shape:
        raise ValueError(
            f"kv_pages holds latents of {dims.width} elements, those of this call have {latents.shape[1]} "
            f"(pool shape {shape}); make the pool with new_pages of the same backend"
        )
    check_scales(kv_pages, lambda: layout.scale_shape(dims))
    if isinstance(layer, int) and not 0 <= layer < dims.num_layers:
        raise ValueError(f"layer must be in [0, {dims.num_layers}), got {layer}")
