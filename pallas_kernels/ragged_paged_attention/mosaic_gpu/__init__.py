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
- For a quantised pool the ring holds quantised blocks; the computing warpgroups multiply each with its scales on its
  way to where wgmma reads it (`ring.py`).

Where a work item is split depends on the whole step, and so do the last bits of its output, within rounding errors.

Steps of many tokens launch two such kernels: one for rows of few tokens, bound by reading keys and values, and one with
taller tiles for the other rows, bound by the products.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped

from jaxserve.pallas_kernels import hopper
from jaxserve.pallas_kernels.dispatch import import_failure
from jaxserve.pallas_kernels.hopper import WARPGROUP_ROWS
from jaxserve.pallas_kernels.ragged_paged_attention.interface import (
    AttentionInputs,
    AttentionOptions,
    Problem,
    RaggedRows,
)
from jaxserve.pallas_kernels.ragged_paged_attention.layout import TokenMajor
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.plan import (
    BLOCK_KV,
    MAX_PART_COLUMNS,
    MIN_TILE_TOKENS,
    SCALES,
    Call,
    Tiles,
    WorkPlan,
    plan,
)
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import QUANTIZED_MAX, Pages, encode, values_of
from jaxserve.pallas_kernels.tuning import Settings

__all__ = ["LAYOUT", "SPLITS_PAGES", "WANTS_OWN_TABLE", "interpreted", "supports", "write_and_attend"]

POOL_DTYPES = ("bfloat16", "float16", *QUANTIZED_MAX)
HEAD_DIMS = (32, 64, 96, 128, 256)
_KERNEL = f"{__name__}.kernel"
INTERPRETED_CORES = 3  # few, so that every worker has some work

LAYOUT = TokenMajor(scale_multiple=SCALES)
SPLITS_PAGES = False
WANTS_OWN_TABLE = False

_SETTINGS = Settings()
interpreted = _SETTINGS.interpreted  # needs jax 0.11 or later


def supports(problem: Problem) -> str | None:
    """Return the reason why this backend cannot run the problem, or None if it can."""
    if problem.platform != "gpu" and _SETTINGS.interpreter is None:
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
    if problem.page_size % 8 or (BLOCK_KV % problem.page_size and problem.page_size % BLOCK_KV):
        return f"page_size must be 8, 16, 32 or a multiple of {BLOCK_KV}, not {problem.page_size}"
    return import_failure(_KERNEL, "Pallas for GPUs") or (None if problem.platform != "gpu" else hopper.other_chip())


def _kernel() -> ModuleType:
    """Import the kernels on first use: importing Pallas takes a third of a second."""
    return importlib.import_module(_KERNEL)


def write_and_attend(
    inputs: AttentionInputs, kv_pages: Pages, layer: int | Int32[Array, ""], options: AttentionOptions
) -> tuple[Float[Array, "T Q H"], Pages]:
    """Rotate, scatter into the donated pool and attend.

    Queries and the weights of values are rounded to the pool's dtype. For a quantised pool, they and the products of
    keys and values with their scales are rounded to bfloat16, or to float16 if the queries are float16.
    """
    dtype, values, inputs = inputs.q.dtype, values_of(kv_pages), inputs.rotated()
    (T, Q, H), K = inputs.q.shape, inputs.k.shape[1]
    kv_pages = _write_kv(kv_pages, inputs.k, inputs.v, layer, inputs.rows)
    call = Call(
        num_tokens=T,
        num_kv_heads=K,
        group=Q // K,
        head_dim=H,
        page_size=values.shape[2],
        dtype=_product_dtype(dtype, values.dtype),
        kv_dtype=values.dtype,
        options=options,
        has_sinks=inputs.sinks is not None,
        has_tree=inputs.tree_mask is not None,
        num_cores=_num_cores(),
        interpret=_SETTINGS.interpreter,
    )
    plans = _plans(call, inputs.rows)
    # Tiles of shared memory are filled by whole groups of eight tokens.
    q = jnp.pad(inputs.q.astype(call.dtype), ((0, -T % 8), (0, 0), (0, 0)))
    out = _kernel().attend(call, plans, inputs._replace(q=q), kv_pages, layer)
    return out[:T].astype(dtype), kv_pages


def _product_dtype(dtype: jnp.dtype, kv_dtype: jnp.dtype) -> jnp.dtype:
    """Return the dtype of the products: the pool's, or for a quantised pool float16 or bfloat16 as the queries."""
    if kv_dtype.name not in QUANTIZED_MAX:
        return kv_dtype
    return dtype if dtype == jnp.float16 else jnp.dtype(jnp.bfloat16)


def _plans(call: Call, rows: RaggedRows) -> list[tuple[Tiles, WorkPlan]]:
    """Return the work of each kernel: rows that fit a short tile go to the first kernel, the others to the last."""
    kinds, q_lens = call.kinds(), rows.live_q_lens()
    if len(kinds) == 1:
        return [(kinds[0], plan(call, kinds[0], rows, q_lens))]
    short, tall = kinds
    is_short = rows.cu_q_lens[:-1] % MIN_TILE_TOKENS + q_lens <= short.tokens
    return [
        (short, plan(call, short, rows, jnp.where(is_short, q_lens, 0))),
        (tall, plan(call, tall, rows, jnp.where(is_short, 0, q_lens))),
    ]


def _write_kv(
    kv_pages: Pages,
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    layer: int | Int32[Array, ""],
    rows: RaggedRows,
) -> Pages:
    """Return the pool with the keys and values of this step in their pages; padding tokens are dropped."""
    (T, K, H), (_, num_pages, page_size, _, _) = k.shape, values_of(kv_pages).shape
    page_id, offset = rows.place(T, num_pages=num_pages, page_size=page_size)
    kv = LAYOUT.from_canonical(encode(jnp.stack([k, v], axis=2).reshape(T, 2 * K, H), values_of(kv_pages).dtype))

    def write(pages: Shaped[Array, "L N P *head"], new: Shaped[Array, "T *head"]) -> Shaped[Array, "L N P *head"]:
        return pages.at[layer, page_id, offset].set(new, mode="drop", unique_indices=True)

    return jax.tree.map(write, kv_pages, kv)


def _num_cores() -> int:
    """Return the number of multiprocessors of the chip that is compiled for."""
    return hopper.num_cores() if _SETTINGS.interpreter is None else INTERPRETED_CORES
