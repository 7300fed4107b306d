"""Ragged paged attention for TPUs, in Pallas (Mosaic): the serving backend on TPUs.

One kernel (`kernel.py`) does everything in place. It processes three work lists, which the device computes from the row
lengths (`work_plan.py`), with block sizes that fit the memory (`block_sizes.py`).

- Writes (`page_writer.py`): new keys and values are written to their pages by slab. A slab is the rows in one memory
  tile, the smallest unit that can be written. Hence a page that is written must belong to one row; pages that are only
  read may be shared.
- Decode slots (`decode_phase.py`): decode rows, several processed together, the longest first, each with its own pages;
  one matmul for each KV head and slot. Thus many short rows take few work items.
- Tiles (`tile_phase.py`): some tokens times the query heads for one KV head, for rows with several new tokens; large
  steps have short and tall tiles.

Decode slots and tiles are divided into work items with a few pages each (`phase.py`) and use an online softmax
(`softmax.py`; FlashAttention-2, Dao 2023). Pages for the next work items are copied ahead, across slots and tiles; so
are queries and, before them, page ids, since a page table of any width stays in main memory. Ragged paged attention v3
(arXiv 2604.15464) has the same scheme.

Quantised pools are fetched unconverted, and one head's block is converted at a time (`pages.py`). Key scales multiply
the columns of the scores, value scales the columns of the softmax weights.

Pages are `[K, P, 2H]`: a head's key and value are adjacent (`layout.py`). Unlike memory tiles `[P, 2K, H]`, this needs
no padding if KV heads are few or odd in number or the head dim is 64, and a head's block is a matrix as fetched: its
rows are not scattered among other heads' rows. With a head dim of 512, keys and values have separate matrices,
`[2K, P, H]`: pages for head dims 512 and 256 (Gemma 4) then have matrices with the same shape, and layers of both kinds
use one pool unchanged.

A latent is stored as the key for one KV head, which begins with the value: it is copied from main memory once for all
query heads, as key and as value. Pages with latents are `[1, P, C]`; C is the latent size, padded to whole memory tiles
with 128 columns. DeepSeek's latents have 576 elements and take 640 columns, or 1280 bytes in bfloat16, including 128
bytes for padding. A chip would use the same memory for rows with 576 elements; the shape includes the padding so that
every count of the pool's bytes does too.
"""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxserve.pallas_kernels import tpu
from jaxserve.pallas_kernels.pallas_kernel import PallasKernel, Settings
from jaxserve.pallas_kernels.ragged_paged_attention.interface import AttentionInputs, AttentionOptions, Backend, Problem
from jaxserve.pallas_kernels.ragged_paged_attention.kinds import KVKind, Latents
from jaxserve.pallas_kernels.ragged_paged_attention.layout import PoolDims
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.block_sizes import (
    MAX_PAGE_BYTES,
    MAX_PAGE_TOKENS,
    BlockSizeLimits,
    KernelConfig,
    choose_block_sizes,
    default_work_item_bytes,
)
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.layout import PageMatrices
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.memory_tiles import (
    SEPARATE_HEAD_DIM,
    columns_for,
    slab_tokens,
    token_bytes,
)
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.operands import make_operands, token_outputs
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.work_plan import make_plan
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import QUANTIZED_MAX, Pages, values_of

LATENT_POOL_DTYPES = ("bfloat16", "float32", "float8_e4m3fn")
POOL_DTYPES = ("bfloat16", "float32", *QUANTIZED_MAX)
MIN_HEAD_DIM = 64  # minimum on a chip: XLA lays out narrower pools transposed, and copies them for the kernel
MAX_HEAD_DIM = 512
MANY_TOKENS, MANY_ROWS = 2048, 256  # a step with the largest block sizes


class MosaicTpu(PallasKernel[Problem, KernelConfig], Backend):
    """Attention backend for TPUs."""

    platform = "tpu"
    module = f"{__name__}.kernel"
    layout = PageMatrices
    splits_pages = True
    gathers_table = True

    def unsupported_problem(self, problem: Problem) -> str | None:
        """Return why the kernel cannot run a problem on any TPU: a pool dtype or a size; None if it can."""
        kind, dtype = problem.kind, problem.kv_dtype
        dtypes = LATENT_POOL_DTYPES if isinstance(kind, Latents) else POOL_DTYPES
        if dtype.name not in dtypes:
            return f"the pool must be one of {dtypes}, not {dtype}"
        if not isinstance(kind, Latents):
            minimum = MIN_HEAD_DIM if self.settings.interpreter is None else 8
            if kind.head_dim % 8 or not minimum <= kind.head_dim <= MAX_HEAD_DIM:
                return f"head_dim must be a multiple of 8 from {minimum} to {MAX_HEAD_DIM}, not {kind.head_dim}"
            if dtype.name in QUANTIZED_MAX and kind.head_dim >= SEPARATE_HEAD_DIM:
                return f"a pool of {dtype} has the scales of keys and values together, which heads of 512 have apart"
        slab = slab_tokens(dtype)
        if problem.page_size % slab or MAX_PAGE_TOKENS % problem.page_size:
            return (
                f"page_size must be a power of two from {slab} to {MAX_PAGE_TOKENS} in a pool of {dtype}, "
                f"not {problem.page_size}"
            )
        page_bytes = problem.page_size * token_bytes(kind.num_kv_heads, columns_for(kind).stored, dtype)
        if page_bytes > MAX_PAGE_BYTES:
            return f"a page of a layer must have at most {MAX_PAGE_BYTES} bytes, not {page_bytes}; lower page_size"
        return None

    def launch(self, problem: Problem) -> KernelConfig:
        """Return the kernel's static parameters for a large step without sinks, windows and draft trees.

        Raises:
            ValueError: no block sizes fit VMEM, or jax does not know the chip.
        """
        config = self._config(problem)
        choose_block_sizes(config)
        return config

    def _config(self, problem: Problem) -> KernelConfig:
        """Return the static parameters of `launch`, without a check whether blocks fit VMEM."""
        kind = problem.kind
        return KernelConfig(
            num_kv_heads=kind.num_kv_heads,
            group=problem.num_query_heads // kind.num_kv_heads,
            columns=columns_for(kind),
            page_size=problem.page_size,
            kv_dtype=problem.kv_dtype,
            options=AttentionOptions(1.0),
            vmem_bytes=self.target_chip().memory_bytes,
            sizes=self.sizes(problem),
            interpret=self.settings.interpreter,
            num_tokens=MANY_TOKENS,
            num_rows=MANY_ROWS,
            table_width=1,
            has_sinks=False,
            has_tree=False,
        )

    def sizes(self, problem: Problem) -> BlockSizeLimits:
        """Return the block size limits for a problem on the target chip.

        They are the requested ones, else the ones tuned for the chip, else defaults for its bandwidth.

        Raises:
            ValueError: sizes have unknown names, or jax does not know the chip.
        """
        if self.settings.interpreter is not None:
            return BlockSizeLimits()
        info, chip = tpu.facts(), self.target_chip()
        work_item_bytes = default_work_item_bytes(info.num_cores * info.mem_bw_bytes_per_second, chip.memory_bytes)
        return self.settings.sizes(BlockSizeLimits, chip.name, shape_class(problem), work_item_bytes=work_item_bytes)

    def write_and_attend(
        self, inputs: AttentionInputs, kv_pages: Pages, layer: int | Int32[Array, ""], options: AttentionOptions
    ) -> tuple[Float[Array, "N Q V"], Pages]:
        """Apply RoPE, write the new keys and values to the donated pool and attend, in one kernel.

        Queries and softmax weights are rounded to the pool's dtype, or to bfloat16 for a quantised pool.
        """
        pool, kind = values_of(kv_pages), inputs.kind(options)
        if pool.shape[-1] == columns_for(kind).matrix_columns:
            return self._write_and_attend(inputs, kind, kv_pages, layer, options)
        # For XLA, pages whose matrices have another shape are another array: it copies the pool.
        num_layers, num_pages, units, page_size, matrix_columns = pool.shape
        num_pages = num_pages * units * matrix_columns // math.prod(kind.token_shape)
        split_shape = self.layout(kind.token_shape).kv_shape(PoolDims(num_layers, num_pages, page_size))
        out, split = self._write_and_attend(inputs, kind, pool.reshape(split_shape), layer, options)
        return out, values_of(split).reshape(pool.shape)

    def _write_and_attend(
        self,
        inputs: AttentionInputs,
        kind: KVKind,
        kv_pages: Pages,
        layer: int | Int32[Array, ""],
        options: AttentionOptions,
    ) -> tuple[Float[Array, "N Q V"], Pages]:
        """Write new vectors and attend, like `write_and_attend`, in a pool whose matrices have the columns for `kind`.

        A page in the pool may contain several smaller pages, which the page table then counts.
        """
        dtype, inputs = inputs.q.dtype, (inputs.with_all_queries() if options.last_only else inputs).rotated()
        rows = inputs.rows.with_gathered_table()
        num_tokens, num_query_heads, _ = inputs.q.shape
        _, _, num_matrices, page_size, _ = values_of(kv_pages).shape
        config = replace(
            self._config(Problem(kind, num_query_heads, page_size, values_of(kv_pages).dtype, self.platform)),
            options=options,
            num_tokens=num_tokens,
            num_rows=rows.kv_lens.shape[0],
            table_width=rows.page_table.shape[1],
            has_sinks=inputs.sinks is not None,
            has_tree=inputs.tree_mask is not None,
            num_parts=num_matrices // (kind.num_kv_heads * columns_for(kind).num_matrices),
        )
        blocks = choose_block_sizes(config)
        plan = make_plan(config, blocks, rows)
        operands = make_operands(config, blocks, plan, inputs._replace(rows=rows), kv_pages)
        layer = jnp.asarray(layer, jnp.int32)[None]
        kv_pages, decode_out, tile_out = self.kernel().write_and_attend(config, blocks, layer, plan, operands)
        out = token_outputs(config, plan, rows, decode_out, tile_out).astype(dtype)
        return inputs.last_outputs(out) if options.last_only else out, kv_pages


def shape_class(problem: Problem) -> dict[str, int | str]:
    """Return the sizes and dtype of a problem that identify its entry in a chip's file with tuned block sizes."""
    return {
        "num_query_heads": problem.num_query_heads,
        **asdict(problem.kind),
        "page_size": problem.page_size,
        "kv_dtype": problem.kv_dtype.name,
    }


KERNEL = MosaicTpu(Settings(Path(__file__).parents[1] / "tuned"))
