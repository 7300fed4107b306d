"""The attention kernel, and the launches for it and for the merging kernel. See the package."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu import split_merge
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.computing_warpgroup import ComputingWarpgroup
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.loading_warpgroup import LoadingWarpgroup
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.memory import Inputs, Shared, shared_memory
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.tiling import SCALES, KernelConfig, Tiling
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.work_items import LOG2E, SplitBuffers
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.work_plan import BASE_TOKEN, Queries, WorkPlan
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import SCALE_DTYPE, Pages, QuantizedPages, values_of
from jaxserve.pallas_kernels.ragged_paged_attention.tree import visible_nodes
from jaxserve.pallas_kernels.warpgroups import divide

# Registers per loading thread, by the number of warpgroups; two warpgroups always have enough.
LOADING_REGISTERS = {3: 72, 4: 64}
WIDE_LOADING_REGISTERS = {3: 40}  # used if the sums for many columns fill most registers


def attend(
    config: KernelConfig,
    plans: Sequence[tuple[Tiling, WorkPlan]],
    queries: Queries,
    kv_pages: Pages,
    layer: int | Int32[Array, ""],
) -> Float[Array, "padded Q value"]:
    """Return the outputs for all planned tiles, zeros for padding tokens; queries are padded to eight tokens."""
    q, rows = queries.q, queries.rows
    out_ref = jax.empty_ref(jax.ShapeDtypeStruct((*q.shape[:2], config.value_dim), q.dtype))
    # An array, not a constant: otherwise each layer would compile its own program.
    layer = jnp.asarray(layer, jnp.int32)[None]
    mask = queries.tree_mask
    nodes = None if mask is None else visible_nodes(mask, rows, config.options.window)
    num_live_tokens = rows.cu_q_lens[rows.num_rows][None] * config.token_heads
    for number, (tiling, plan) in enumerate(plans):
        shape = (tiling.num_workers, 2, tiling.column_warpgroups, tiling.rows)
        shapes = ((*shape, config.warpgroup_columns), shape, shape)
        unmerged = SplitBuffers(*(jax.empty_ref(jax.ShapeDtypeStruct(shape, jnp.float32)) for shape in shapes))
        _launch(
            config,
            functools.partial(_attend_kernel, config, tiling),
            "ragged_paged_attention",
            num_blocks=tiling.num_cores,
            num_threads=tiling.workers * (tiling.warpgroups + 1),
            scratch=shared_memory(config, tiling),
        )(
            layer,
            *plan,
            rows.page_table,
            _sink_rows(config, tiling, queries.sinks),
            _tree_rows(config, tiling, plan, nodes),
            q,
            values_of(kv_pages),
            kv_pages.scales if isinstance(kv_pages, QuantizedPages) else jnp.zeros((1, 1, 1, SCALES), SCALE_DTYPE),
            out_ref,
            *unmerged,
        )
        _launch(
            config,
            functools.partial(split_merge.kernel, config, tiling, number == 0),
            "merge_attention_parts",
            num_blocks=tiling.num_workers,
            num_threads=split_merge.WARPGROUPS,
            scratch=split_merge.scratch(config),
        )(num_live_tokens, *plan, *unmerged, out_ref)
    return jax.freeze(out_ref)


def _launch(
    config: KernelConfig, body: Callable[..., None], name: str, *, num_blocks: int, num_threads: int, scratch: Any
) -> Callable[..., None]:
    mesh = plgpu.Mesh(grid=(num_blocks,), grid_names=("block",), num_threads=num_threads, thread_name="thread")
    params = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane)
    interpret = {} if config.interpret is None else {"interpret": config.interpret}

    def kernel(*refs: Any) -> None:
        pl.run_scoped(functools.partial(body, *refs), *scratch, collective_axes="thread")

    return pl.kernel(kernel, out_type=(), mesh=mesh, compiler_params=params, name=name, **interpret)


def _sink_rows(config: KernelConfig, tiling: Tiling, sinks: Float[Array, "Q"] | None) -> Float[Array, "K rows"]:
    """Return the sink logit for every row in a tile, in base 2; zeros without sinks."""
    if sinks is None:
        return jnp.zeros((config.num_kv_heads, tiling.rows), jnp.float32)
    heads = sinks.astype(jnp.float32).reshape(config.num_kv_heads, config.group, 1) * LOG2E
    by_token = jnp.broadcast_to(heads, (*heads.shape[:2], tiling.tokens)).reshape(config.num_kv_heads, -1)
    return jnp.pad(by_token, ((0, 0), (0, tiling.rows - by_token.shape[1])))


def _tree_rows(
    config: KernelConfig, tiling: Tiling, plan: WorkPlan, nodes: Int32[Array, "T columns"] | None
) -> Int32[Array, "tiles columns rows"]:
    """Return `visible_nodes` for every row in every tile."""
    if nodes is None:
        return jnp.zeros((1, 1, 1), jnp.int32)
    token = jnp.arange(tiling.rows, dtype=jnp.int32) % tiling.tokens
    token = (plan.tiles[:, BASE_TOKEN, None] + token[None]) // config.token_heads
    by_row = nodes.at[token].get(mode="clip")  # [tiles, rows, columns]
    return by_row.swapaxes(1, 2)


def _attend_kernel(config: KernelConfig, tiling: Tiling, *refs: Any) -> None:
    """Run the loading and computing warpgroups of one thread block."""
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
