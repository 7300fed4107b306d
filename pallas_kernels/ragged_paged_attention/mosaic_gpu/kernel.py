"""The attention kernel, and the launches of it and of the merging kernel. See the package."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu import merge
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.computing import ComputingWarpgroup
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.items import LOG2E, Unmerged
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.loading import LoadingWarpgroup
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.memory import Inputs, Shared, shared_memory
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.plan import (
    BASE_TOKEN,
    SCALES,
    Call,
    Queries,
    Tiles,
    WorkPlan,
)
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import SCALE_DTYPE, Pages, QuantizedPages, values_of
from jaxserve.pallas_kernels.ragged_paged_attention.tree import visible_nodes
from jaxserve.pallas_kernels.warpgroups import divide
from jaxtyping import Array, Float, Int32

# Registers of a loading thread, by the number of warpgroups; with two each has enough anyway.
LOADING_REGISTERS = {3: 72, 4: 64}
WIDE_LOADING_REGISTERS = {3: 40}  # registers where sums of many columns fill most of them


def attend(
    call: Call,
    plans: Sequence[tuple[Tiles, WorkPlan]],
    queries: Queries,
    kv_pages: Pages,
    layer: int | Int32[Array, ""],
) -> Float[Array, "padded Q value"]:
    """Return the outputs of all tiles of all plans, zeros for padding tokens; queries are padded to eight tokens."""
    q, rows = queries.q, queries.rows
    out_ref = jax.empty_ref(jax.ShapeDtypeStruct((*q.shape[:2], call.value_dim), q.dtype))
    # An array, not a constant: otherwise each layer would compile its own program.
    layer = jnp.asarray(layer, jnp.int32)[None]
    mask = queries.tree_mask
    nodes = None if mask is None else visible_nodes(mask, rows, call.options.window)
    num_live_tokens = rows.cu_q_lens[rows.num_rows][None] * call.token_heads
    for number, (tiles, plan) in enumerate(plans):
        shape = (tiles.num_workers, 2, tiles.column_parts, tiles.rows)
        shapes = ((*shape, call.part_columns), shape, shape)
        unmerged = Unmerged(*(jax.empty_ref(jax.ShapeDtypeStruct(shape, jnp.float32)) for shape in shapes))
        _launch(
            call,
            functools.partial(_attend_kernel, call, tiles),
            "ragged_paged_attention",
            num_blocks=tiles.num_cores,
            num_threads=tiles.workers * (tiles.warpgroups + 1),
            scratch=shared_memory(call, tiles),
        )(
            layer,
            *plan,
            rows.page_table,
            _sink_rows(call, tiles, queries.sinks),
            _tree_rows(call, tiles, plan, nodes),
            q,
            values_of(kv_pages),
            kv_pages.scales if isinstance(kv_pages, QuantizedPages) else jnp.zeros((1, 1, 1, SCALES), SCALE_DTYPE),
            out_ref,
            *unmerged,
        )
        _launch(
            call,
            functools.partial(merge.kernel, call, tiles, number == 0),
            "merge_attention_parts",
            num_blocks=tiles.num_workers,
            num_threads=merge.WARPGROUPS,
            scratch=merge.scratch(call),
        )(num_live_tokens, *plan, *unmerged, out_ref)
    return jax.freeze(out_ref)


def _launch(
    call: Call, body: Callable[..., None], name: str, *, num_blocks: int, num_threads: int, scratch: Any
) -> Callable[..., None]:
    mesh = plgpu.Mesh(grid=(num_blocks,), grid_names=("block",), num_threads=num_threads, thread_name="thread")
    params = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane)
    interpret = {} if call.interpret is None else {"interpret": call.interpret}

    def kernel(*refs: Any) -> None:
        pl.run_scoped(functools.partial(body, *refs), *scratch, collective_axes="thread")

    return pl.kernel(kernel, out_type=(), mesh=mesh, compiler_params=params, name=name, **interpret)


def _sink_rows(call: Call, tiles: Tiles, sinks: Float[Array, "Q"] | None) -> Float[Array, "K rows"]:
    """Return the sink of every row of a tile, in base 2; zeros without sinks."""
    if sinks is None:
        return jnp.zeros((call.num_kv_heads, tiles.rows), jnp.float32)
    heads = sinks.astype(jnp.float32).reshape(call.num_kv_heads, call.group, 1) * LOG2E
    by_token = jnp.broadcast_to(heads, (*heads.shape[:2], tiles.tokens)).reshape(call.num_kv_heads, -1)
    return jnp.pad(by_token, ((0, 0), (0, tiles.rows - by_token.shape[1])))


def _tree_rows(
    call: Call, tiles: Tiles, plan: WorkPlan, nodes: Int32[Array, "T columns"] | None
) -> Int32[Array, "tiles columns rows"]:
    """Return the nodes that every row of every tile sees (`visible_nodes`)."""
    if nodes is None:
        return jnp.zeros((1, 1, 1), jnp.int32)
    token = jnp.arange(tiles.rows, dtype=jnp.int32) % tiles.tokens
    token = (plan.tiles[:, BASE_TOKEN, None] + token[None]) // call.token_heads
    by_row = nodes.at[token].get(mode="clip")  # [tiles, rows, columns]
    return by_row.swapaxes(1, 2)


def _attend_kernel(call: Call, tiles: Tiles, *refs: Any) -> None:
    """Run one thread block: in each worker, one loading warpgroup and the computing ones."""
    inputs, shared = Inputs(*refs[: len(Inputs._fields)]), Shared(*refs[len(Inputs._fields) :])
    num_computing = tiles.workers * tiles.warpgroups
    by_warpgroups = WIDE_LOADING_REGISTERS if call.is_wide else LOADING_REGISTERS
    divide(
        lambda worker: LoadingWarpgroup(call, tiles, inputs, shared, worker).run(),
        lambda warpgroup: ComputingWarpgroup(call, tiles, inputs, shared, warpgroup).run(),
        num_computing=num_computing,
        num_loading=tiles.workers,
        loading_registers=by_warpgroups.get(num_computing + tiles.workers),
    )
