"""Ragged paged attention: rotate, write keys and values to their pages and attend, for all rows of a step together.

Contract of the operation, the same for all backends:

- The rows of a step are packed on one token axis T: row r owns tokens `cu_q_lens[r]:cu_q_lens[r+1]`, the last ones of
  its sequence, at positions `kv_lens[r] - q_len .. kv_lens[r] - 1`. A row of one token is a decode, a row of many a
  prefill chunk; one step mixes them freely.
- A pool stores one kind of vectors (`kinds.py`): keys and values of heads, or latents (multi-head latent attention).
  A latent is the key of all query heads and begins with their value; `mla_attention` takes the matrices of the heads.
- All new vectors of a step are written before any row of the step attends. A page may belong to several rows (a shared
  prefix), and one of them may write to it in the same step: the others then see the new content. No two rows of a step
  write the same position of a page. Schedulers rely on this order to share pages between rows of one step.
- The pool is one array for all layers, in the layout of the backend: make it with `new_pages`. An int8 or fp8 pool has
  a second array of scales, one bfloat16 per vector (`QuantizedPages`). In an int4 pool, a vector is a run of bytes that
  includes its scales (`int4.py`), and H the number of these bytes. Code that moves pages elsewhere converts them by
  `to_canonical` and `from_canonical` (`[L, N, P, 2K, H]`, K of head h at 2h, V at 2h + 1; latents `[L, N, P, W]`).
  Under jit, donate the pool and pass it from layer to layer: it is then updated in place and never copied, as long as
  each layer's keys depend on the output of the previous layer. In a transformer they do, which orders reads and writes.
- Rows may read a list of their pages instead of all (`PagesToRead`). Backends get rows that have no other pages.
- T and R are static shapes, padded by the caller. Rows from `num_rows` on and tokens from `cu_q_lens[num_rows]` on are
  padding: their content (except NaN in padding tokens) changes no live output and is not written to the pool. Neither
  page-table entries past a row's length, nor stale content of its pages past it, nor the width M of the page table
  change anything: the work depends only on the lengths. Outputs of padding tokens are finite and otherwise unspecified.
"""

from jaxserve.pallas_kernels.ragged_paged_attention.attention import ragged_paged_attention, select_backend, step_rows
from jaxserve.pallas_kernels.ragged_paged_attention.interface import (
    AttentionInputs,
    AttentionOptions,
    HeadMatrices,
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
    layout_for,
    move_tokens,
    new_pages,
    split_pages,
    to_canonical,
)
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import QUANTIZED, Pages, QuantizedPages
from jaxserve.pallas_kernels.ragged_paged_attention.rope import apply_rope
from jaxserve.pallas_kernels.ragged_paged_attention.rows import PagesToRead, RaggedRows

__all__ = [
    "BACKENDS",
    "OP",
    "QUANTIZED",
    "AttentionInputs",
    "AttentionOptions",
    "HeadMatrices",
    "Heads",
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
    "layout_for",
    "mla_attention",
    "move_tokens",
    "new_pages",
    "ragged_paged_attention",
    "select_backend",
    "split_pages",
    "step_rows",
    "to_canonical",
]
