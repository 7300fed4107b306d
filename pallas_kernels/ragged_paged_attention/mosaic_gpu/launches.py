"""Launches of an attention kernel and the merging kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxserve.pallas_kernels.ragged_paged_attention.interface import AttentionInputs
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu import split_merge
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.memory import Shared
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.tiling import SCALES, KernelConfig, Tiling
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.work_items import LOG2E, Softmax
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.work_plan import BASE_TOKEN, WorkPlan
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import SCALE_DTYPE, Pages, QuantizedPages, values_of
from jaxserve.pallas_kernels.ragged_paged_attention.tree import visible_nodes
from jaxserve.pallas_kernels.warpgroups import launcher


class Kernel(NamedTuple):
    """An attention kernel for some GPUs."""

    run: Callable[..., None]
    """Runs one warpgroup: called with the static parameters and tile sizes, then the fields of `Inputs` and `Shared`.
    """
    shared_memory: Callable[[Any, Tiling], Shared]
    """Returns the shared memory and barriers to allocate per thread block."""
    num_warpgroups: Callable[[Tiling], int]
    """Returns the number of warpgroups per thread block."""
    view: Callable[[Array], Array] = lambda array: array
    """Returns queries and pool in the shape of the kernel's operands, without a copy."""


def attend(
    kernel: Kernel,
    config: KernelConfig,
    plans: Sequence[tuple[Tiling, WorkPlan]],
    inputs: AttentionInputs,
    kv_pages: Pages,
    layer: int | Int32[Array, ""],
) -> Float[Array, "padded Q value"]:
    """Attend with all planned tiles: launch the attention kernel and the merging kernel once per plan.

    Args:
        kernel: the kernel that attends.
        config: static parameters.
        plans: tile sizes and work of each launch, which together have all new tokens.
        inputs: queries after RoPE `[padded, Q, key]`, padded to a multiple of eight tokens, rows, sinks and tree mask.
        kv_pages: pool that already has the new keys and values, `[L, N, P, vectors, key]`.
        layer: layer in the pool.

    Returns:
        Outputs, zeros for padding tokens.
    """
    q, rows = inputs.q, inputs.rows
    out_ref = jax.empty_ref(jax.ShapeDtypeStruct((*q.shape[:2], config.value_dim), q.dtype))
    # An array, not a constant: otherwise each layer would compile its own program.
    layer = jnp.asarray(layer, jnp.int32)[None]
    mask = inputs.tree_mask
    nodes = None if mask is None else visible_nodes(mask, rows, config.options.window)
    num_live_tokens = rows.cu_q_lens[rows.num_rows][None] * config.token_heads
    for number, (tiling, plan) in enumerate(plans):
        shape = (tiling.num_workers, 2, tiling.column_warpgroups, tiling.rows)
        shapes = ((*shape, config.warpgroup_columns), shape, shape)
        splits = Softmax(*(jax.empty_ref(jax.ShapeDtypeStruct(shape, jnp.float32)) for shape in shapes))
        launcher(
            functools.partial(kernel.run, config, tiling),
            name="ragged_paged_attention",
            num_blocks=tiling.num_cores,
            num_warpgroups=kernel.num_warpgroups(tiling),
            shared=kernel.shared_memory(config, tiling),
            interpret=config.interpret,
            approx_math=True,
        )(
            layer,
            *plan,
            rows.page_table,
            _sink_rows(config, tiling, inputs.sinks),
            _tree_rows(config, tiling, plan, nodes),
            kernel.view(q),
            kernel.view(values_of(kv_pages)),
            kv_pages.scales if isinstance(kv_pages, QuantizedPages) else jnp.zeros((1, 1, 1, SCALES), SCALE_DTYPE),
            out_ref,
            *splits,
        )
        launcher(
            functools.partial(split_merge.kernel, config, tiling, number == 0),
            name="merge_attention_parts",
            num_blocks=tiling.num_workers,
            num_warpgroups=split_merge.WARPGROUPS,
            shared=split_merge.scratch(config),
            interpret=config.interpret,
            approx_math=True,
        )(num_live_tokens, *plan, *splits, out_ref)
    return jax.freeze(out_ref)


def _sink_rows(config: KernelConfig, tiling: Tiling, sinks: Float[Array, "Q"] | None) -> Float[Array, "K rows"]:
    """Return the sink logit for each row of a tile, per KV head, in base 2; zeros without sinks.

    Args:
        config: static parameters.
        tiling: tile sizes; row `g * tokens + t` of a tile is query head g's token t.
        sinks: logit per query head.
    """
    if sinks is None:
        return jnp.zeros((config.num_kv_heads, tiling.rows), jnp.float32)
    heads = sinks.astype(jnp.float32).reshape(config.num_kv_heads, config.group, 1) * LOG2E
    by_token = jnp.broadcast_to(heads, (*heads.shape[:2], tiling.tokens)).reshape(config.num_kv_heads, -1)
    return jnp.pad(by_token, ((0, 0), (0, tiling.rows - by_token.shape[1])))


def _tree_rows(
    config: KernelConfig, tiling: Tiling, plan: WorkPlan, nodes: Int32[Array, "T columns"] | None
) -> Int32[Array, "tiles columns rows"]:
    """Return the visible draft-tree nodes of each row in each tile, or a placeholder without a tree.

    Args:
        config: static parameters.
        tiling: tile sizes.
        plan: tiles.
        nodes: `visible_nodes` of each token.
    """
    if nodes is None:
        return jnp.zeros((1, 1, 1), jnp.int32)
    token = jnp.arange(tiling.rows, dtype=jnp.int32) % tiling.tokens
    token = (plan.tiles[:, BASE_TOKEN, None] + token[None]) // config.token_heads
    by_row = nodes.at[token].get(mode="clip")  # [tiles, rows, columns]
    return by_row.swapaxes(1, 2)
