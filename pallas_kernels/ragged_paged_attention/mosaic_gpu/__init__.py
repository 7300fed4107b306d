"""Ragged paged attention for Hopper GPUs, in Pallas (Mosaic GPU): the serving backend on NVIDIA GPUs.

New keys and values are scattered to their pages in place; then one persistent kernel attends for all rows
(`kernel.py`).

- The queries of a row are cut into tiles: some tokens times the query heads of one KV head, 64 matrix rows for each
  warpgroup. A tile with one KV head is a work item, which consists of the blocks of keys that it sees (`plan.py`).
- The blocks of all work items form one line that is cut evenly between the workers, so that any mix of lengths balances
  (Stream-K, Osama et al. 2023; LeanAttention, Sanovar et al. 2024). The plan is computed on the device, from the
  lengths, so consecutive steps need nothing from the host.
- A work item inside one worker's span is written to the output at once. Of a work item that several workers share, each
  writes its split to a scratch buffer of two splits per worker, and a second, small kernel merges them (`merge.py`).
- In a worker one warpgroup feeds a ring of shared memory by TMA, page by page (`loading.py`), and one or two compute:
  S = Q K^T, online softmax in base 2 (FlashAttention-3, Shah et al. 2024), O += P V, all in wgmma (`computing.py`).
  Only blocks that cross the diagonal, the end of the row or the edge of a window are masked.
- The sums of 256 and more columns of values are divided between two warpgroups, which both compute all scores. Heads of
  512 have blocks of 32 tokens, as shared memory has no room for two of 64.
- For a quantised pool the ring holds quantised blocks; the computing warpgroups multiply each with its scales on its
  way to where wgmma reads it (`ring.py`).

The kernel takes values that are the beginnings of their keys too, which are fetched once for both, and query heads that
are tokens of their own: it serves `mla_attention`. `call.py` runs it for either operation.

Where a work item is split depends on the whole step, and so do the last bits of its output, within rounding errors.

Steps of many tokens launch two such kernels: one for rows of few tokens, bound by reading keys and values, and one with
taller tiles for the other rows, bound by the products.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxserve.pallas_kernels.hopper import WARPGROUP_ROWS
from jaxserve.pallas_kernels.ragged_paged_attention.interface import AttentionInputs, AttentionOptions, Problem
from jaxserve.pallas_kernels.ragged_paged_attention.layout import TokenMajor
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.call import SETTINGS, attend, num_cores, refusal, write
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.plan import (
    MAX_PART_COLUMNS,
    MIN_TILE_TOKENS,
    SCALES,
    Call,
    Queries,
)
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import QUANTIZED_MAX, Pages, encode, values_of
from jaxtyping import Array, Float, Int32

__all__ = ["LAYOUT", "SPLITS_PAGES", "WANTS_OWN_TABLE", "interpreted", "supports", "write_and_attend"]

POOL_DTYPES = ("bfloat16", "float16", *QUANTIZED_MAX)
HEAD_DIMS = (32, 64, 96, 128, 256, 512)

LAYOUT = TokenMajor(scale_multiple=SCALES)
SPLITS_PAGES = False
WANTS_OWN_TABLE = False

interpreted = SETTINGS.interpreted  # needs jax 0.11 or later


def supports(problem: Problem) -> str | None:
    """Return the reason why this backend cannot run the problem, or None if it can."""
    if problem.platform != "gpu" and SETTINGS.interpreter is None:
        return "it runs on GPUs only"
    if problem.kv_dtype.name not in POOL_DTYPES:
        return f"the pool must be one of {POOL_DTYPES}, not {problem.kv_dtype}"
    if problem.head_dim not in HEAD_DIMS:
        return f"head_dim must be one of {HEAD_DIMS}, not {problem.head_dim}"
    if problem.kv_dtype.name in QUANTIZED_MAX and problem.head_dim > MAX_PART_COLUMNS:
        return f"heads of {problem.head_dim} leave no registers to multiply numbers of {problem.kv_dtype} with scales"
    max_group = WARPGROUP_ROWS * (2 if problem.head_dim <= MAX_PART_COLUMNS else 1) // MIN_TILE_TOKENS
    if problem.num_query_heads > max_group * problem.num_kv_heads:
        return (
            f"a kv head of {problem.head_dim} serves at most {max_group} query heads, "
            f"not {problem.num_query_heads}/{problem.num_kv_heads}"
        )
    return refusal(page_size=problem.page_size, platform=problem.platform)


def write_and_attend(
    inputs: AttentionInputs, kv_pages: Pages, layer: int | Int32[Array, ""], options: AttentionOptions
) -> tuple[Float[Array, "T Q H"], Pages]:
    """Rotate, scatter into the donated pool and attend.

    Queries and the weights of values are rounded to the pool's dtype. For a quantised pool, they and the products of
    keys and values with their scales are rounded to bfloat16, or to float16 if the queries are float16.
    """
    dtype, pool, inputs = inputs.q.dtype, values_of(kv_pages), inputs.rotated()
    (T, Q, H), K = inputs.q.shape, inputs.k.shape[1]
    new = encode(jnp.stack([inputs.k, inputs.v], axis=2).reshape(T, 2 * K, H), pool.dtype)
    kv_pages = write(kv_pages, LAYOUT.from_canonical(new), layer, inputs.rows, num_tokens=T)
    call = Call(
        num_tokens=T,
        num_kv_heads=K,
        group=Q // K,
        key_dim=H,
        value_dim=H,
        page_size=pool.shape[2],
        dtype=_product_dtype(dtype, pool.dtype),
        kv_dtype=pool.dtype,
        options=options,
        has_sinks=inputs.sinks is not None,
        has_tree=inputs.tree_mask is not None,
        num_cores=num_cores(),
        interpret=SETTINGS.interpreter,
    )
    queries = Queries(inputs.q, inputs.rows, inputs.sinks, inputs.tree_mask)
    return attend(call, queries, kv_pages, layer).astype(dtype), kv_pages


def _product_dtype(dtype: jnp.dtype, kv_dtype: jnp.dtype) -> jnp.dtype:
    """Return the dtype of the products: the pool's, or for a quantised pool float16 or bfloat16 as the queries."""
    if kv_dtype.name not in QUANTIZED_MAX:
        return kv_dtype
    return dtype if dtype == jnp.float16 else jnp.dtype(jnp.bfloat16)
