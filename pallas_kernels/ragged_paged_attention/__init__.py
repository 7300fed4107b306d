"""Ragged paged attention: apply RoPE, write keys and values to their pages and attend, for all rows in a step together.

Contract, the same for all backends:

- The rows are packed on one token axis T: row r has the tokens `cu_q_lens[r]:cu_q_lens[r+1]`, the last ones in its
  sequence, at positions `kv_lens[r] - q_len .. kv_lens[r] - 1`. A row with one token is a decode, a row with more a
  prefill chunk; one step may mix them in any order.
- A pool stores vectors of one kind (`kinds.py`): keys and values per head, or latents (MLA). A latent is the key for
  all query heads, and its first elements are the value; `mla_attention` takes the per-head matrices.
- All new vectors are written before any row attends. Several rows may have a page in common (a shared prefix), and one
  of them may write to it in the same step: the others then see the new content. No two rows write the same position in
  a page. Schedulers rely on this order to share pages between rows in one step.
- The pool is one array for all layers, in the backend's layout: make it with `new_pages`. An int8 or fp8 pool has a
  second array with one bfloat16 scale per vector (`QuantizedPages`). In an int4 pool, a vector is a byte string that
  includes its scales (`int4.py`), and H is the number of bytes. Code that moves pages elsewhere converts them with
  `to_canonical` and `from_canonical` (`[L, N, P, 2K, H]`, head h's key at 2h and value at 2h + 1; latents
  `[L, N, P, W]`). Under jit, donate the pool and pass it from layer to layer: it is updated in place and never copied
  if each layer's keys depend on the previous layer's output. In a transformer they do, which orders reads and writes.
- Rows may read only some of their pages (`PagesToRead`). Backends get rows that have no other pages.
- T and R are static shapes, padded by the caller. Rows from `num_rows` on and tokens from `cu_q_lens[num_rows]` on are
  padding: their content (except NaN in padding tokens) changes no live output and is not written to the pool.
  Page-table entries past a row's length, stale elements past it and the page table's width M change nothing either: the
  work depends only on the lengths. Outputs for padding tokens are finite and otherwise unspecified.
"""

from jaxserve.pallas_kernels.ragged_paged_attention.attention import (
    pool_page_size,
    ragged_paged_attention,
    select_backend,
    step_rows,
)
from jaxserve.pallas_kernels.ragged_paged_attention.indexed import ChosenTokens, IndexedPages, IndexInputs
from jaxserve.pallas_kernels.ragged_paged_attention.interface import (
    AttentionInputs,
    AttentionOptions,
    HeadMatrices,
    HeadTerms,
    MLAInputs,
    Problem,
)
from jaxserve.pallas_kernels.ragged_paged_attention.kinds import Heads, KVKind, Latents
from jaxserve.pallas_kernels.ragged_paged_attention.layout import PoolDims
from jaxserve.pallas_kernels.ragged_paged_attention.mla import mla_attention
from jaxserve.pallas_kernels.ragged_paged_attention.pools import (
    BACKENDS,
    OP,
    default_page_size,
    from_canonical,
    has_canonical_layout,
    layout_for,
    move_tokens,
    new_pages,
    split_pages,
    to_canonical,
)
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import QUANTIZED, Pages, QuantizedPages
from jaxserve.pallas_kernels.ragged_paged_attention.rope import apply_rope
from jaxserve.pallas_kernels.ragged_paged_attention.rows import PagesToRead, RaggedRows, next_index

__all__ = [
    "BACKENDS",
    "OP",
    "QUANTIZED",
    "AttentionInputs",
    "AttentionOptions",
    "ChosenTokens",
    "HeadMatrices",
    "HeadTerms",
    "Heads",
    "IndexInputs",
    "IndexedPages",
    "KVKind",
    "Latents",
    "MLAInputs",
    "Pages",
    "PagesToRead",
    "PoolDims",
    "Problem",
    "QuantizedPages",
    "RaggedRows",
    "apply_rope",
    "default_page_size",
    "from_canonical",
    "has_canonical_layout",
    "layout_for",
    "mla_attention",
    "move_tokens",
    "new_pages",
    "next_index",
    "pool_page_size",
    "ragged_paged_attention",
    "select_backend",
    "split_pages",
    "step_rows",
    "to_canonical",
]
