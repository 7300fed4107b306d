"""One call of the kernel, for any columns that a pool stores: whether it can run, and the run. See the package."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType

import jax.numpy as jnp
from jaxserve.pallas_kernels.pallas_kernel import import_failure
from jaxserve.pallas_kernels.ragged_paged_attention.interface import AttentionOptions
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.chip import SETTINGS, vmem_bytes
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.operands import Tokens, make_operands, token_outputs
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.plan import (
    MAX_PAGE_BYTES,
    MAX_PAGE_TOKENS,
    Call,
    Sizes,
    choose_blocks,
    make_plan,
)
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.storage import Columns, slab_tokens, token_bytes
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import Pages, values_of
from jaxserve.pallas_kernels.target import target_platform
from jaxtyping import Array, Float32, Int32

MANY_TOKENS, MANY_ROWS = 2048, 256  # a step that makes blocks as large as any

_KERNEL = "jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.kernel"


def refusal(
    columns: Columns,
    *,
    num_query_heads: int,
    num_kv_heads: int,
    page_size: int,
    kv_dtype: jnp.dtype,
    sizes: Callable[[], Sizes],
) -> str | None:
    """Return the reason why the kernel cannot run such calls, or None if it can.

    Args:
      columns: columns of the pool.
      num_query_heads: number of query heads.
      num_kv_heads: number of KV heads.
      page_size: tokens per page.
      kv_dtype: dtype of the pool.
      sizes: function that returns the block sizes for the chip; called if there is one.
    """
    slab = slab_tokens(kv_dtype)
    if page_size % slab or MAX_PAGE_TOKENS % page_size:
        return (
            f"page_size must be a power of two from {slab} to {MAX_PAGE_TOKENS} in a pool of {kv_dtype}, "
            f"not {page_size}"
        )
    page_bytes = page_size * token_bytes(num_kv_heads, columns.stored, kv_dtype)
    if page_bytes > MAX_PAGE_BYTES:
        return f"a page of a layer must have at most {MAX_PAGE_BYTES} bytes, not {page_bytes}; make page_size smaller"
    if (reason := import_failure(_KERNEL, "Pallas for TPUs")) is not None:
        return reason
    if target_platform() != "tpu":
        return None
    try:
        choose_blocks(
            Call(
                num_tokens=MANY_TOKENS,
                num_rows=MANY_ROWS,
                num_kv_heads=num_kv_heads,
                group=num_query_heads // num_kv_heads,
                columns=columns,
                page_size=page_size,
                table_width=1,
                kv_dtype=kv_dtype,
                options=AttentionOptions(scale=1.0),
                has_sinks=False,
                has_tree=False,
                vmem_bytes=vmem_bytes(),
                sizes=sizes(),
                interpret=None,
            )
        )

    except ValueError as error:  # also raised for a chip that jax does not know
        return str(error)
    return None


def write_and_attend(
    tokens: Tokens,
    kv_pages: Pages,
    layer: int | Int32[Array, ""],
    columns: Columns,
    options: AttentionOptions,
    sizes: Sizes,
) -> tuple[Float32[Array, "T Q value"], Pages]:
    """Write to the donated pool and attend.

    Queries and weights of values are rounded to the pool's dtype, or to bfloat16 for a quantised pool.
    """
    rows, pool = tokens.rows.with_own_table(), values_of(kv_pages)
    tokens = tokens._replace(rows=rows)
    num_tokens, num_query_heads, _ = tokens.q.shape
    _, _, num_units, page_size, _ = pool.shape
    num_kv_heads = tokens.vectors[0].shape[1]
    call = Call(
        num_tokens=num_tokens,
        num_rows=rows.kv_lens.shape[0],
        num_kv_heads=num_kv_heads,
        group=num_query_heads // num_kv_heads,
        columns=columns,
        page_size=page_size,
        table_width=rows.page_table.shape[1],
        kv_dtype=pool.dtype,
        options=options,
        has_sinks=tokens.sinks is not None,
        has_tree=tokens.tree_mask is not None,
        vmem_bytes=vmem_bytes(),
        sizes=sizes,
        interpret=SETTINGS.interpreter,
        num_parts=num_units // (num_kv_heads * columns.units),
    )
    blocks = choose_blocks(call)
    plan = make_plan(call, blocks, rows)
    operands = make_operands(call, blocks, plan, tokens, kv_pages)
    layer = jnp.asarray(layer, jnp.int32)[None]
    kv_pages, decode_out, tile_out = _kernel().write_and_attend(call, blocks, layer, plan, operands)
    return token_outputs(call, plan, rows, decode_out, tile_out), kv_pages


def _kernel() -> ModuleType:
    """Import the kernel on first use: importing Pallas takes a third of a second."""
    return importlib.import_module(_KERNEL)
