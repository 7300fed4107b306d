"""Attention over latents on TPUs: the Pallas kernel of `ragged_paged_attention.mosaic_tpu`.

The kernel has one KV head here, whose key is the latent and whose value is the beginning of the key: a latent is copied
from main memory once for all query heads, as keys and as values.

Pages are `[1, P, C]`, where C is the width of a latent padded to whole memory tiles of 128 columns. The 576 elements of
DeepSeek's latents take 640 columns, or 1280 bytes in bfloat16, of which 128 are padding. A chip would keep rows of 576
elements in as much memory; the padding is in the shape so that whoever counts the pool's bytes counts it.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxserve.pallas_kernels.mla_attention.interface import LatentInputs, LatentOptions, Problem
from jaxserve.pallas_kernels.mla_attention.layout import PoolDims
from jaxserve.pallas_kernels.ragged_paged_attention.interface import AttentionOptions
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu import call, chip
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.chip import SETTINGS
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.layout import scale_tiles, scales_of
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.operands import Tokens
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.plan import Sizes
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.storage import (
    LANES,
    SCALE_TOKENS,
    default_page_size,
    latent_columns,
    round_up,
    scale_rows,
)
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import Pages, QuantizedPages, values_of
from jaxtyping import Array, Float, Int32

__all__ = [
    "EXPANDS",
    "LAYOUT",
    "WANTS_OWN_TABLE",
    "interpreted",
    "shape_class",
    "sized",
    "sizes_for",
    "supports",
    "write_and_attend",
]


@dataclass(frozen=True)
class PaddedLatents:
    """Layout `[L, N, 1, P, C]`: latents padded to whole memory tiles."""

    def default_page_size(self, width: int, kv_dtype: jnp.dtype) -> int:
        """Return the tokens of a page of the size that suits copies."""
        return default_page_size(1, width, kv_dtype)

    def kv_shape(self, dims: PoolDims) -> tuple[int, ...]:
        """Return `[L, N, 1, P, C]`."""
        return (dims.num_layers, dims.num_pages, 1, dims.page_size, round_up(dims.width, LANES))

    def scale_shape(self, dims: PoolDims) -> tuple[int, ...]:
        """Return the shape of one memory tile for each slab of a page, which holds the scale of each latent."""
        return (*dims[:2], dims.page_size // SCALE_TOKENS, scale_rows(1), LANES)

    def pool_dims(self, shape: tuple[int, ...]) -> PoolDims:
        """Invert `kv_shape`; the width includes the padding."""
        if len(shape) != 5 or shape[2] != 1 or shape[4] % LANES:
            raise ValueError(
                f"the pool of this backend must be [L, N, 1, P, C] with C a multiple of {LANES}, got shape {shape}; "
                "make it with new_pages"
            )
        return PoolDims(*shape[:2], *shape[3:])

    def to_canonical(self, kv_pages: Pages) -> Pages:
        """Return the pool as `[L, N, P, C]`, its scales as `[L, N, P]`."""
        values = values_of(kv_pages)[:, :, 0]
        if not isinstance(kv_pages, QuantizedPages):
            return values
        return QuantizedPages(values, scales_of(kv_pages.scales)[..., 0])

    def from_canonical(self, kv_pages: Pages) -> Pages:
        """Invert `to_canonical`; latents without padding get it."""
        values = values_of(kv_pages)
        L, N, P, width = values.shape
        values = jnp.pad(values, ((0, 0), (0, 0), (0, 0), (0, -width % LANES)))[:, :, None]
        if not isinstance(kv_pages, QuantizedPages):
            return values
        return QuantizedPages(values, scale_tiles(kv_pages.scales.reshape(L, N, P // SCALE_TOKENS, SCALE_TOKENS, 1)))


LAYOUT = PaddedLatents()
interpreted, sized = SETTINGS.interpreted, SETTINGS.sized
WANTS_OWN_TABLE = True
EXPANDS = False  # its kernel reads a layout of its own, at the rate of the memory
POOL_DTYPES = ("bfloat16", "float32", "float8_e4m3fn")


def shape_class(problem: Problem) -> dict[str, int | str]:
    """Return the facts that problems with the same best sizes have in common."""
    return {
        "num_query_heads": problem.num_query_heads,
        "rank": problem.rank,
        "rope_dim": problem.rope_dim,
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
    return call.refusal(
        latent_columns(problem.rank + problem.rope_dim, problem.rank),
        num_query_heads=problem.num_query_heads,
        num_kv_heads=1,
        page_size=problem.page_size,
        kv_dtype=problem.kv_dtype,
        sizes=lambda: sizes_for(problem),
    )


def write_and_attend(
    inputs: LatentInputs, kv_pages: Pages, layer: int | Int32[Array, ""], options: LatentOptions
) -> tuple[Float[Array, "T Q rank"], Pages]:
    """Rotate, write to the donated pool and attend: see `call.write_and_attend`."""
    dtype, inputs, pool = inputs.q.dtype, inputs.rotated(options.rank), values_of(kv_pages)
    _, Q, W = inputs.q.shape
    tokens = Tokens(inputs.q, (inputs.latents[:, None],), inputs.rows, tree_mask=inputs.tree_mask)
    sizes = sizes_for(Problem(Q, options.rank, W - options.rank, pool.shape[3], pool.dtype, "tpu"))
    columns, own = latent_columns(W, options.rank), AttentionOptions(options.scale)
    out, kv_pages = call.write_and_attend(tokens, kv_pages, layer, columns, own, sizes)
    return out.astype(dtype), kv_pages
