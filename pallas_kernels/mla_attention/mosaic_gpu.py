"""Attention over latents on Hopper GPUs: the Pallas kernel of `ragged_paged_attention.mosaic_gpu`.

The kernel has one KV head here, whose key is the latent and whose value is the beginning of the key: a latent is copied
to shared memory once, and read there by two warpgroups as keys of all columns and as values of half of them each
(FlashMLA, DeepSeek 2025). The query heads of a token are tokens of their own that see the same keys, so that a tile of
64 rows is filled by the heads of one token or of several.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxserve.pallas_kernels.mla_attention.interface import LatentInputs, LatentOptions, Problem
from jaxserve.pallas_kernels.mla_attention.layout import TokenMajor
from jaxserve.pallas_kernels.ragged_paged_attention.interface import AttentionOptions
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.call import SETTINGS, attend, num_cores, refusal, write
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.plan import MIN_TILE_TOKENS, Call, Queries
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import Pages, values_of
from jaxtyping import Array, Float, Int32

__all__ = ["EXPANDS", "LAYOUT", "WANTS_OWN_TABLE", "interpreted", "supports", "write_and_attend"]

LAYOUT = TokenMajor()
WANTS_OWN_TABLE = False
EXPANDS = False  # its kernel reads latents alone
POOL_DTYPES = ("bfloat16", "float16")
RANKS = (64, 128, 256, 512)
ROPE_MULTIPLE = 32  # elements in a line of shared memory
MAX_ROPE_DIM = 64
interpreted = SETTINGS.interpreted  # needs jax 0.11 or later


def supports(problem: Problem) -> str | None:
    """Return the reason why this backend cannot run the problem, or None if it can."""
    if problem.platform != "gpu" and SETTINGS.interpreter is None:
        return "it runs on GPUs only"
    if problem.kv_dtype.name not in POOL_DTYPES:
        return f"the pool must be one of {POOL_DTYPES}, not {problem.kv_dtype}"
    if problem.rank not in RANKS:
        return f"rank must be one of {RANKS}, not {problem.rank}"
    if problem.rope_dim % ROPE_MULTIPLE or problem.rope_dim > MAX_ROPE_DIM:
        return f"rope_dim must be a multiple of {ROPE_MULTIPLE} up to {MAX_ROPE_DIM}, not {problem.rope_dim}"
    return refusal(page_size=problem.page_size, platform=problem.platform)


def write_and_attend(
    inputs: LatentInputs, kv_pages: Pages, layer: int | Int32[Array, ""], options: LatentOptions
) -> tuple[Float[Array, "T Q rank"], Pages]:
    """Rotate, scatter into the donated pool and attend; queries and the weights are rounded to the pool's dtype."""
    dtype, pool, inputs = inputs.q.dtype, values_of(kv_pages), inputs.rotated(options.rank)
    T, Q, W = inputs.q.shape
    kv_pages = write(kv_pages, inputs.latents.astype(pool.dtype), layer, inputs.rows, num_tokens=T)
    q = jnp.pad(inputs.q.astype(pool.dtype), ((0, 0), (0, -Q % MIN_TILE_TOKENS), (0, 0)))
    token_heads = q.shape[1]
    call = Call(
        num_tokens=T * token_heads,
        num_kv_heads=1,
        group=1,
        key_dim=W,
        value_dim=options.rank,
        page_size=pool.shape[2],
        dtype=pool.dtype,
        kv_dtype=pool.dtype,
        options=AttentionOptions(options.scale),
        has_sinks=False,
        has_tree=inputs.tree_mask is not None,
        num_cores=num_cores(),
        interpret=SETTINGS.interpreter,
        values_in_keys=True,
        token_heads=token_heads,
    )
    queries = Queries(q.reshape(-1, 1, W), inputs.rows, tree_mask=inputs.tree_mask)
    out = attend(call, queries, values_of(kv_pages)[:, :, :, None], layer)
    return out.reshape(T, token_heads, options.rank)[:, :Q].astype(dtype), kv_pages
