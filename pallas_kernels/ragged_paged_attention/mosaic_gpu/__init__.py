"""Ragged paged attention for Hopper GPUs, in Pallas (Mosaic GPU): the serving backend on NVIDIA GPUs.

New keys and values are scattered to their pages in place; then one persistent kernel attends for all rows
(`kernel.py`).

- Each row's queries are cut into tiles: some tokens times the query heads for one KV head, 64 matrix rows per warpgroup
  (`tiling.py`). A tile with one KV head is a work item, and each key block that the tile sees is one unit.
- The units in all work items are cut into equal spans, one per worker, so that any mix of lengths balances (Stream-K,
  Osama et al. 2023; LeanAttention, Sanovar et al. 2024). The device computes this plan from the lengths
  (`work_plan.py`), so consecutive steps need nothing from the host.
- A worker writes work items that lie inside its span directly to the output. If several workers share a work item, each
  writes its split to a scratch buffer with two splits per worker, and a second, small kernel merges them
  (`split_merge.py`).
- One warpgroup per worker feeds a ring in shared memory by TMA, page by page (`loading_warpgroup.py`). One or two
  others compute S = Q K^T, online softmax in base 2 (FlashAttention-3, Shah et al. 2024) and O += P V by wgmma
  (`computing_warpgroup.py`). Only blocks that cross the diagonal, the row's end or a window's edge are masked.
- If values have 256 or more columns, two warpgroups divide the weighted sums, and both compute all scores. With a head
  dim of 512, blocks have 32 tokens, as two blocks with 64 do not fit into shared memory.
- For a quantised pool the ring holds quantised blocks; computing warpgroups multiply them by their scales and write
  them to the buffers that wgmma reads (`ring_reader.py`).

Latents are the keys for one KV head and begin with the values: a latent is copied to shared memory once, and read there
by two warpgroups: each reads all columns as keys and half the value columns (FlashMLA, DeepSeek 2025). A token's query
heads become tokens that see the same keys, so that the heads for one or several tokens fill a tile with 64 rows.

Splits, and with them the last bits of the outputs (within rounding errors), depend on the whole step.

Steps with many tokens launch two such kernels: one for rows with few tokens, limited by memory bandwidth, and one with
taller tiles for the other rows, limited by matmuls.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped

from jaxserve.pallas_kernels.hopper import WARPGROUP_ROWS
from jaxserve.pallas_kernels.pallas_kernel import PallasKernel, Settings
from jaxserve.pallas_kernels.ragged_paged_attention.interface import AttentionInputs, AttentionOptions, Backend, Problem
from jaxserve.pallas_kernels.ragged_paged_attention.kinds import Latents
from jaxserve.pallas_kernels.ragged_paged_attention.layout import TokenMajor
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.tiling import (
    BLOCK_KV,
    MAX_WARPGROUP_COLUMNS,
    MIN_TILE_TOKENS,
    SCALES,
    KernelConfig,
    Tiling,
)
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.work_plan import WorkPlan, plan_work
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import QUANTIZED_MAX, Pages, encode, values_of
from jaxserve.pallas_kernels.ragged_paged_attention.rows import RaggedRows

HALF_DTYPES = ("bfloat16", "float16")
POOL_DTYPES = (*HALF_DTYPES, *QUANTIZED_MAX)
HEAD_DIMS = (32, 64, 96, 128, 256, 512)
RANKS = (64, 128, 256, 512)
ROPE_MULTIPLE = 32  # elements in a line of shared memory
MAX_ROPE_DIM = 64
MANY_TOKENS = 2048  # step with tiles of both sizes


class PaddedScales(TokenMajor):
    """Token-major pool layout; a token's scales are padded to a multiple of 8, since TMA fetches `SCALES` together."""

    scale_multiple = SCALES


class MosaicGpu(PallasKernel[Problem, KernelConfig], Backend):
    """Attention backend for Hopper GPUs."""

    platform = "gpu"
    module = f"{__name__}.kernel"
    layout = PaddedScales

    def unsupported_problem(self, problem: Problem) -> str | None:
        """Return why the kernel cannot run a problem on any Hopper GPU: a pool dtype or a size; None if it can."""
        dtypes = HALF_DTYPES if isinstance(problem.kind, Latents) else POOL_DTYPES
        if problem.kv_dtype.name not in dtypes:
            return f"the pool must be one of {dtypes}, not {problem.kv_dtype}"
        unsupported = _unsupported_latents if isinstance(problem.kind, Latents) else _unsupported_heads
        if (reason := unsupported(problem)) is not None:
            return reason
        return self.unsupported_page_size(problem.page_size)

    @staticmethod
    def unsupported_page_size(page_size: int) -> str | None:
        """Return why the kernel cannot read pages of this size, or None if it can."""
        if page_size % 8 or (BLOCK_KV % page_size and page_size % BLOCK_KV):
            return f"page_size must be 8, 16, 32 or a multiple of {BLOCK_KV}, not {page_size}"
        return None

    def launch(self, problem: Problem) -> KernelConfig:
        """Return the kernels' static parameters for a large step without sinks, windows and draft trees."""
        kind, Q = problem.kind, problem.num_query_heads
        is_latent = isinstance(kind, Latents)
        # Shared memory is filled in groups of eight tokens, which are query heads here.
        token_heads = Q + -Q % MIN_TILE_TOKENS if is_latent else 1
        return KernelConfig(
            num_tokens=MANY_TOKENS * token_heads,
            num_kv_heads=kind.num_kv_heads,
            group=1 if is_latent else Q // kind.num_kv_heads,
            key_dim=kind.key_dim,
            value_dim=kind.value_dim,
            page_size=problem.page_size,
            dtype=problem.kv_dtype,
            kv_dtype=problem.kv_dtype,
            num_cores=self.target_chip().num_cores,
            interpret=self.settings.interpreter,
            values_in_keys=is_latent,
            token_heads=token_heads,
            options=AttentionOptions(1.0),
            has_sinks=False,
            has_tree=False,
        )

    def write_and_attend(
        self, inputs: AttentionInputs, kv_pages: Pages, layer: int | Int32[Array, ""], options: AttentionOptions
    ) -> tuple[Float[Array, "N Q V"], Pages]:
        """Apply RoPE, write the new keys and values to the pool and attend, in several XLA operations and kernels.

        Queries and softmax weights are rounded to the pool's dtype. For a quantised pool, they, the scaled keys and the
        scaled values are rounded to bfloat16, or to float16 if the queries are float16.
        """
        dtype, kind, pool = inputs.q.dtype, inputs.kind(options), values_of(kv_pages)
        inputs = inputs.rotated(last_only=options.last_only)
        N, Q, H = inputs.q.shape
        kv_pages = _write(inputs, kv_pages, layer)
        rows = inputs.rows.last_tokens()[0] if options.last_only else inputs.rows
        config = self.launch(Problem(kind, Q, pool.shape[2], pool.dtype, self.platform))
        config = dataclasses.replace(
            config,
            num_tokens=N * config.token_heads,
            dtype=_matmul_dtype(dtype, pool.dtype),
            options=options,
            has_sinks=inputs.sinks is not None,
            has_tree=inputs.tree_mask is not None,
        )
        q = inputs.q.astype(config.dtype)
        if config.token_heads > 1:
            q = jnp.pad(q, ((0, 0), (0, config.token_heads - Q), (0, 0))).reshape(-1, 1, H)
        q = jnp.pad(q, ((0, config.padded_tokens - config.num_tokens), (0, 0), (0, 0)))
        heads = values_of(kv_pages)[:, :, :, None] if isinstance(kind, Latents) else kv_pages
        work = plans(config, rows)
        out = self.kernel().attend(config, work, inputs._replace(q=q, rows=rows), heads, layer)[: config.num_tokens]
        if config.token_heads > 1:
            out = out.reshape(N, config.token_heads, kind.value_dim)[:, :Q]
        return out.astype(dtype), kv_pages


def _unsupported_latents(problem: Problem) -> str | None:
    """Return why the kernel cannot run a problem with latents of this size, or None if it can."""
    kind = problem.kind
    if kind.value_dim not in RANKS:
        return f"rank must be one of {RANKS}, not {kind.value_dim}"
    if kind.rope_dim % ROPE_MULTIPLE or kind.rope_dim > MAX_ROPE_DIM:
        return f"rope_dim must be a multiple of {ROPE_MULTIPLE} up to {MAX_ROPE_DIM}, not {kind.rope_dim}"
    return None


def _unsupported_heads(problem: Problem) -> str | None:
    """Return why the kernel cannot run a problem with heads of this size and number, or None if it can."""
    head_dim, num_kv_heads = problem.kind.key_dim, problem.kind.num_kv_heads
    if head_dim not in HEAD_DIMS:
        return f"head_dim must be one of {HEAD_DIMS}, not {head_dim}"
    if problem.kv_dtype.name in QUANTIZED_MAX and head_dim > MAX_WARPGROUP_COLUMNS:
        return f"heads of {head_dim} leave no registers to multiply elements of {problem.kv_dtype} with scales"
    max_group = WARPGROUP_ROWS * (2 if head_dim <= MAX_WARPGROUP_COLUMNS else 1) // MIN_TILE_TOKENS
    if problem.num_query_heads > max_group * num_kv_heads:
        return (
            f"a kv head of {head_dim} serves at most {max_group} query heads, "
            f"not {problem.num_query_heads}/{num_kv_heads}"
        )
    return None


def plans(config: KernelConfig, rows: RaggedRows) -> list[tuple[Tiling, WorkPlan]]:
    """Divide the step's rows among the launches of the attention kernel, and plan each launch's work.

    Rows that fit into one short tile go to the first launch, the others to the last.

    Returns:
        Tile sizes and work plan of each launch.
    """
    kinds, q_lens = config.tilings(), rows.live_q_lens()
    if len(kinds) == 1:
        return [(kinds[0], plan_work(config, kinds[0], rows, q_lens))]
    short, tall = kinds
    is_short = rows.cu_q_lens[:-1] * config.token_heads % MIN_TILE_TOKENS + q_lens * config.token_heads <= short.tokens
    return [
        (short, plan_work(config, short, rows, jnp.where(is_short, q_lens, 0))),
        (tall, plan_work(config, tall, rows, jnp.where(is_short, 0, q_lens))),
    ]


def _write(inputs: AttentionInputs, kv_pages: Pages, layer: int | Int32[Array, ""]) -> Pages:
    """Write this step's keys and values, or latents, to their pages with one scatter; return the updated pool.

    Args:
        inputs: new keys and values after RoPE, and the rows; padding tokens are not written.
        kv_pages: pool, `[L, N, P, vectors, H]`, donated.
        layer: layer in the pool.
    """
    _, num_pages, page_size, *token_shape = values_of(kv_pages).shape
    page_id, offset = inputs.rows.slot_mapping(inputs.k.shape[0], num_pages=num_pages, page_size=page_size)

    def scatter(pages: Shaped[Array, "L N P *token"], new: Shaped[Array, "T *token"]) -> Shaped[Array, "L N P *token"]:
        return pages.at[layer, page_id, offset].set(new, mode="drop", unique_indices=True)

    new = PaddedScales(tuple(token_shape)).from_canonical(encode(inputs.vectors(), values_of(kv_pages).dtype))
    written: Pages = jax.tree.map(scatter, kv_pages, new)
    return written


def _matmul_dtype(dtype: jnp.dtype, kv_dtype: jnp.dtype) -> jnp.dtype:
    """Return the matmul operands' dtype for queries of `dtype` and a pool of `kv_dtype`.

    It is the pool's dtype; for a quantised pool float16 if the queries are float16, else bfloat16.
    """
    if kv_dtype.name not in QUANTIZED_MAX:
        return kv_dtype
    return dtype if dtype == jnp.float16 else jnp.dtype(jnp.bfloat16)


KERNEL = MosaicGpu(Settings())
