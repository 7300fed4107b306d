"""The attention kernel, and the launches for it and for the merging kernel. See the package."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jaxserve.pallas_kernels.kernel_values import Ref
from jaxserve.pallas_kernels.ragged_paged_attention.interface import AttentionInputs
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu import split_merge
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.computing_warpgroup import ComputingWarpgroup
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.loading_warpgroup import LoadingWarpgroup
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.memory import Inputs, Shared, shared_memory
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.tiling import SCALES, KernelConfig, Tiling
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.work_items import LOG2E, Softmax
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.work_plan import BASE_TOKEN, WorkPlan
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import SCALE_DTYPE, Pages, QuantizedPages, values_of
from jaxserve.pallas_kernels.ragged_paged_attention.tree import visible_nodes
from jaxserve.pallas_kernels.warpgroups import divide, launcher

# Registers per loading thread, by the number of warpgroups; two warpgroups always have enough.
LOADING_REGISTERS = {3: 72, 4: 64}
WIDE_LOADING_REGISTERS = {3: 40}  # used if the sums for many columns fill most registers


def attend(
    config: KernelConfig,
    plans: Sequence[tuple[Tiling, WorkPlan]],
    inputs: AttentionInputs,
    kv_pages: Pages,
    layer: int | Int32[Array, ""],
) -> Float[Array, "padded Q value"]:
    """Attend with all planned tiles: launch the attention kernel and the merging kernel once per plan.

    Args:
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
            functools.partial(_attend_kernel, config, tiling),
            name="ragged_paged_attention",
            num_blocks=tiling.num_cores,
            num_warpgroups=tiling.workers * (tiling.warpgroups + 1),
            shared=shared_memory(config, tiling),
            interpret=config.interpret,
            approx_math=True,
        )(
            layer,
            *plan,
            rows.page_table,
            _sink_rows(config, tiling, inputs.sinks),
            _tree_rows(config, tiling, plan, nodes),
            q,
            values_of(kv_pages),
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


def _attend_kernel(config: KernelConfig, tiling: Tiling, *refs: Ref) -> None:
    """Run one warpgroup of a thread block: each worker has a loading warpgroup and one or more computing ones.

    Args:
        config: static parameters.
        tiling: tile sizes.
        *refs: the fields of `Inputs`, then of `Shared`.
    """
    inputs, shared = Inputs(*refs[: len(Inputs._fields)]), Shared(*refs[len(Inputs._fields) :])
    num_computing = tiling.workers * tiling.warpgroups
    by_warpgroups = WIDE_LOADING_REGISTERS if config.is_wide else LOADING_REGISTERS
    divide(
        lambda worker: LoadingWarpgroup(config, tiling, inputs, shared, worker).run(),
        lambda warpgroup: ComputingWarpgroup(config, tiling, inputs, shared, warpgroup).run(),
        num_computing=num_computing,
        num_loading=tiling.workers,
        loading_registers=by_warpgroups.get(num_computing + tiling.workers),
    )
