"""Ragged paged attention for TPUs, in Pallas (Mosaic): the serving backend on TPUs.

One kernel (`kernel.py`) does everything in place and goes through three lists of work, planned on the device
(`plan.py`).

- Writes (`writes.py`): new keys and values reach their pages by slabs, the rows of a memory tile, which is the smallest
  piece that can be written. Hence a page that is written belongs to one row; pages that are only read may be shared.
- Decode slots (`decode.py`): rows of one token, several side by side, the longest first, each through its own pages;
  one product for each KV head and slot. So many short rows take few work items.
- Tiles (`tiles.py`): some tokens of a row times the query heads of a KV head, for rows of several tokens; steps of many
  tokens have two kinds of tiles, low and tall.

Decode slots and tiles go through work items of a few pages (`work_items.py`) with an online softmax (`softmax.py`;
FlashAttention-2, Dao 2023). Pages of the next work items are copied ahead, across the borders of slots and tiles; so
are queries and, before them, page ids, since the page table stays in main memory, whatever its width. The scheme is
that of ragged paged attention v3, arXiv 2604.15464.

Quantised pools are fetched as they are and converted one head's block at a time (`pages.py`). Scales of keys multiply
the columns of scores, those of values the columns of weights.

Pages are `[K, P, 2H]`, a head's keys and values side by side (`layout.py`). Unlike memory tiles of `[P, 2K, H]`, this
needs no padding if KV heads are few or odd in number or a head has 64 columns, and a head's block is a matrix as
fetched: its rows are not scattered among those of other heads. Heads of 512 have keys and values in matrices of their
own, `[2K, P, H]`: so pages of heads of 512 and of 256 (Gemma 4) are matrices of equal shape, and both kinds of layers
take one pool as it is.

The kernel takes any columns of keys and values (`Columns` in `plan.py`), also values that are a part of the keys: it
serves `mla_attention` too. `call.py` runs it for either operation.
"""

from __future__ import annotations

from jaxserve.pallas_kernels.ragged_paged_attention.interface import AttentionInputs, AttentionOptions, Problem
from jaxserve.pallas_kernels.ragged_paged_attention.layout import PoolDims
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu import call, chip
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.chip import SETTINGS
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.layout import HeadPairs
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.operands import Tokens
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.plan import Sizes
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.storage import APART_HEAD_DIM, pair_columns
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import QUANTIZED_MAX, Pages, values_of
from jaxtyping import Array, Float, Int32

__all__ = [
    "LAYOUT",
    "SPLITS_PAGES",
    "WANTS_OWN_TABLE",
    "interpreted",
    "shape_class",
    "sized",
    "sizes_for",
    "supports",
    "write_and_attend",
]

LAYOUT = HeadPairs()
SPLITS_PAGES = True
WANTS_OWN_TABLE = True
POOL_DTYPES = ("bfloat16", "float32", *QUANTIZED_MAX)
MIN_HEAD_DIM = 64  # minimum on a chip: XLA lays out narrower pools transposed, and copies them for the kernel
MAX_HEAD_DIM = 512
interpreted, sized = SETTINGS.interpreted, SETTINGS.sized


def shape_class(problem: Problem) -> dict[str, int | str]:
    """Return the facts that problems with the same best sizes have in common."""
    return {
        "num_kv_heads": problem.num_kv_heads,
        "group": problem.num_query_heads // problem.num_kv_heads,
        "head_dim": problem.head_dim,
        "page_size": problem.page_size,
        "kv_dtype": problem.kv_dtype.name,
    }


def sizes_for(problem: Problem) -> Sizes:
    """Return block sizes for the chip: see `chip.sizes_for`."""
    return chip.sizes_for(shape_class(problem))


def supports(problem: Problem) -> str | None:
    """Return the reason why this backend cannot run the problem, or None if it can."""
    if problem.platform != "tpu" and SETTINGS.interpreter is None:
        return "it runs on TPUs only"
    if problem.kv_dtype.name not in POOL_DTYPES:
        return f"the pool must be one of {POOL_DTYPES}, not {problem.kv_dtype}"
    least = MIN_HEAD_DIM if SETTINGS.interpreter is None else 8
    if problem.head_dim % 8 or not least <= problem.head_dim <= MAX_HEAD_DIM:
        return f"head_dim must be a multiple of 8 from {least} to {MAX_HEAD_DIM}, not {problem.head_dim}"
    if problem.kv_dtype.name in QUANTIZED_MAX and problem.head_dim >= APART_HEAD_DIM:
        return f"a pool of {problem.kv_dtype} has the scales of keys and values together, which heads of 512 have apart"
    return call.refusal(
        pair_columns(problem.head_dim),
        num_query_heads=problem.num_query_heads,
        num_kv_heads=problem.num_kv_heads,
        page_size=problem.page_size,
        kv_dtype=problem.kv_dtype,
        sizes=lambda: sizes_for(problem),
    )


def write_and_attend(
    inputs: AttentionInputs, kv_pages: Pages, layer: int | Int32[Array, ""], options: AttentionOptions
) -> tuple[Float[Array, "T Q H"], Pages]:
    """Rotate, write to the donated pool and attend: see `call.write_and_attend`."""
    dtype, pool, inputs = inputs.q.dtype, values_of(kv_pages), inputs.rotated()
    (_, Q, H), K = inputs.q.shape, inputs.k.shape[1]
    tokens = Tokens(inputs.q, (inputs.k, inputs.v), inputs.rows, inputs.sinks, inputs.tree_mask)
    sizes, columns = sizes_for(Problem(Q, K, H, pool.shape[3], pool.dtype, "tpu")), pair_columns(H)
    if pool.shape[-1] == columns.unit_columns:
        out, kv_pages = call.write_and_attend(tokens, kv_pages, layer, columns, options, sizes)
        return out.astype(dtype), kv_pages
    # Pages of other matrices are another array for XLA, which copies the pool.
    num_layers, num_pages, units, page_size, unit_columns = pool.shape
    num_pages = num_pages * units * unit_columns // (2 * K * H)
    own: Pages = pool.reshape(LAYOUT.kv_shape(PoolDims(num_layers, num_pages, page_size, K, H)))
    out, own = call.write_and_attend(tokens, own, layer, columns, options, sizes)
    return out.astype(dtype), values_of(own).reshape(pool.shape)
