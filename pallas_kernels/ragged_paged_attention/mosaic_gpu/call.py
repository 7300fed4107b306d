"""One call of the kernels, for any columns of keys and values: whether they can run, and the run. See the package."""

from __future__ import annotations

import importlib
from types import ModuleType

import jax
import jax.numpy as jnp
from jaxserve.pallas_kernels import hopper
from jaxserve.pallas_kernels.pallas_kernel import Settings, import_failure
from jaxserve.pallas_kernels.ragged_paged_attention.interface import RaggedRows
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.plan import (
    BLOCK_KV,
    MIN_TILE_TOKENS,
    Call,
    Queries,
    Tiles,
    WorkPlan,
    plan,
)
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import Pages, values_of
from jaxtyping import Array, Float, Int32, Shaped

SETTINGS = Settings()

_KERNEL = "jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.kernel"


def refusal(*, page_size: int, platform: str) -> str | None:
    """Return the reason why the kernels cannot run with such pages on the chip that is compiled for, or None."""
    if page_size % 8 or (BLOCK_KV % page_size and page_size % BLOCK_KV):
        return f"page_size must be 8, 16, 32 or a multiple of {BLOCK_KV}, not {page_size}"
    return import_failure(_KERNEL, "Pallas for GPUs") or (None if platform != "gpu" else hopper.unsupported_reason())


def num_cores() -> int:
    """Return the number of multiprocessors of the chip that is compiled for."""
    return (hopper.target_chip() if SETTINGS.interpreter is None else hopper.INTERPRETED).num_cores


def write(kv_pages: Pages, new: Pages, layer: int | Int32[Array, ""], rows: RaggedRows, *, num_tokens: int) -> Pages:
    """Return the pool with what this step stores, `[T, ...]`, in its pages; padding tokens are dropped."""
    _, num_pages, page_size, *_ = values_of(kv_pages).shape
    page_id, offset = rows.place(num_tokens, num_pages=num_pages, page_size=page_size)

    def scatter(pages: Shaped[Array, "L N P *token"], new: Shaped[Array, "T *token"]) -> Shaped[Array, "L N P *token"]:
        return pages.at[layer, page_id, offset].set(new, mode="drop", unique_indices=True)

    written: Pages = jax.tree.map(scatter, kv_pages, new)
    return written


def attend(
    call: Call, queries: Queries, kv_pages: Pages, layer: int | Int32[Array, ""]
) -> Float[Array, "tokens Q value"]:
    """Return the outputs of all tokens, zeros for padding; queries are rounded to the dtype of the products."""
    # Tiles of shared memory are filled by whole groups of eight tokens.
    q = jnp.pad(queries.q.astype(call.dtype), ((0, -call.num_tokens % MIN_TILE_TOKENS), (0, 0), (0, 0)))
    out = _kernel().attend(call, plans(call, queries.rows), queries._replace(q=q), kv_pages, layer)
    return out[: call.num_tokens]


def plans(call: Call, rows: RaggedRows) -> list[tuple[Tiles, WorkPlan]]:
    """Return the work of each kernel: rows that fit a short tile go to the first kernel, the others to the last."""
    kinds, q_lens = call.kinds(), rows.live_q_lens()
    if len(kinds) == 1:
        return [(kinds[0], plan(call, kinds[0], rows, q_lens))]
    short, tall = kinds
    is_short = rows.cu_q_lens[:-1] * call.token_heads % MIN_TILE_TOKENS + q_lens * call.token_heads <= short.tokens
    return [
        (short, plan(call, short, rows, jnp.where(is_short, q_lens, 0))),
        (tall, plan(call, tall, rows, jnp.where(is_short, 0, q_lens))),
    ]


def _kernel() -> ModuleType:
    """Import the kernels on first use: importing Pallas takes a third of a second."""
    return importlib.import_module(_KERNEL)
