"""The kernel: writes a step's keys and values, then attends with decode slots, then with tiles. See the package."""

from __future__ import annotations

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float32, Int32, Shaped

from jaxserve.pallas_kernels.kernel_values import Ref
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.block_sizes import BlockSizes, KernelConfig
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.decode_phase import DecodePhase
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.operands import Operands, Refs
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.page_writer import PageWriter
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.tile_phase import TilePhase
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.work_plan import WorkPlan
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import Pages, QuantizedPages


def write_and_attend(
    config: KernelConfig, blocks: BlockSizes, layer: Int32[Array, "1"], plan: WorkPlan, operands: Operands
) -> tuple[Pages, Float32[Array, "decode_slots K padded_group sums"], Shaped[Array, "Q padded sums"]]:
    """Write new keys and values to the pool and attend, in one kernel launch.

    Args:
        config: static parameters.
        blocks: block sizes.
        layer: layer in the pool.
        plan: the step's work lists.
        operands: other arrays, including the pool, which is updated in place.

    Returns:
        The pool, the outputs by decode slot, and the outputs by token for tokens in tiles (undefined for others).
    """
    scalars = (layer, plan.counts, plan.writes, plan.decode_slots, plan.groups, *plan.tiles)
    inputs = {name: x for name, x in operands._asdict().items() if x is not None}
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    elsewhere = {"decode_sinks": pltpu.VMEM, "tile_sinks": pltpu.SMEM}
    in_specs = [pl.BlockSpec(memory_space=elsewhere.get(name, pltpu.HBM)) for name in inputs]
    pool = [name for name in ("kv_pages", "scales") if name in inputs]
    results = [jax.ShapeDtypeStruct(inputs[name].shape, inputs[name].dtype) for name in pool]
    for queries in (operands.decode_queries, operands.tile_queries):
        results.append(jax.ShapeDtypeStruct((*queries.shape[:-1], config.columns.sums), queries.dtype))
    interpret = {} if config.interpret is None else {"interpret": config.interpret}
    *updated, decode_out, tile_out = pl.pallas_call(
        functools.partial(_kernel, config, blocks, len(scalars), tuple(inputs)),
        out_shape=results,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars), grid=(1,), in_specs=in_specs, out_specs=[hbm] * len(results)
        ),
        input_output_aliases={len(scalars) + list(inputs).index(name): i for i, name in enumerate(pool)},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=2 * config.vmem_bytes
        ),
        cost_estimate=_cost(config),
        name="ragged_paged_attention",
        **interpret,
    )(*scalars, *inputs.values())
    return QuantizedPages(*updated) if config.has_scales else updated[0], decode_out, tile_out


def _cost(config: KernelConfig) -> pl.CostEstimate:
    """Estimate the kernel's FLOPs and HBM bytes for XLA, as if all rows were as long as the page table allows.

    Row lengths are unknown while compiling.
    """
    keys = config.num_rows * config.table_width * config.page_size
    dots = keys * config.num_query_heads * -(-config.num_tokens // config.num_rows)
    columns = config.columns
    pair_size = columns.key_dim + columns.value_dim  # elements in a query and its output, multiplied with each key
    activation_bytes = (
        config.num_tokens * (config.num_query_heads * pair_size + config.num_kv_heads * columns.stored) * 4
    )
    return pl.CostEstimate(
        flops=2 * dots * pair_size,
        transcendentals=dots,
        bytes_accessed=keys * config.token_bytes + keys // config.slab * config.scale_bytes + activation_bytes,
    )


def _kernel(config: KernelConfig, blocks: BlockSizes, num_scalars: int, names: tuple[str, ...], *refs: Ref) -> None:
    """Run the kernel body, in its only grid step: write all slabs, then attend with decode slots, then with tiles.

    Args:
        config: static parameters.
        blocks: block sizes.
        num_scalars: number of references to scalars: layer and lists of the plan, in SMEM.
        names: names in `Operands` of the next references.
        *refs: references to scalars, operands and results.
    """
    layer, counts, writes, decode_slots, groups, *tiles = refs[:num_scalars]
    inputs = Operands(**dict(zip(names, refs[num_scalars:], strict=False)))
    kv_pages, *scales, decode_out, tile_out = refs[num_scalars + len(names) :]
    results = (kv_pages, scales[0] if scales else None, decode_out, tile_out)
    found = Refs(layer, counts, writes, decode_slots, groups, tuple(tiles), inputs, *results)
    PageWriter(config, blocks, found).run()
    DecodePhase(config, blocks, found).run()
    for size_index in range(len(found.tiles)):
        TilePhase(config, blocks, found, size_index).run()
