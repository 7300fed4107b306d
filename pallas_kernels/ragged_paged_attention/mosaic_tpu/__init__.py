"""Ragged paged attention for TPUs, in Pallas (Mosaic): the serving backend there.

One kernel (`kernel.py`) does it all, in place, and goes through three lists of work that are planned on the device
(`plan.py`).

- Writes (`writes.py`): new keys and values reach their pages by slabs, the rows of a tile of memory, which is the least
  that can be written. So pages that tokens are written to belong to one row; those that are only read may be shared.
- Lanes (`lanes.py`): rows of one token, several side by side, the longest first, each through its own pages; one
  product for each kv head and lane. Many short rows take few units of work, then.
- Tiles (`tiles.py`): some tokens of a row times the query heads of a kv head, for rows of several tokens; tiles of two
  kinds, low and tall, in steps of many tokens.

Lanes and tiles go through units of pages (`units.py`) with an online softmax (`softmax.py`; FlashAttention-2, Dao
2023). Pages of the next units come by copies started ahead, across the borders of lanes and tiles; so do queries, and
the page ids before them: the page table stays in main memory, whatever its width (the scheme is that of ragged paged
attention v3, arXiv 2604.15464).

Pools of narrow numbers are fetched as they are; a block of one head at a time is made wider (`pages.py`). Scales of
keys multiply the columns of scores, those of values the columns of weights.

Pages are `[K, P, 2H]`, a head's keys and values side by side (`layout.py`). So nothing is filled up where kv heads are
few or odd in number or a head has 64 columns, which tiles of memory of `[P, 2K, H]` would be, and a head's block is a
matrix as it comes: no row of it has to be looked for among those of other heads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.pallas_kernels.dispatch import import_failure, target_platform
from jaxserve.pallas_kernels.ragged_paged_attention.interface import Problem, RaggedRows
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.layout import (
    from_canonical,
    kv_shape,
    pool_dims,
    scale_shape,
    to_canonical,
)
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.operands import make_operands, token_outputs
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.plan import (
    MAX_PAGE_BYTES,
    MAX_PAGE_TOKENS,
    Call,
    Sizes,
    choose_blocks,
    default_page_size,
    make_plan,
    slab_tokens,
    token_bytes,
    unit_bytes_for,
)
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import LARGEST, Pages, values_of
from jaxserve.pallas_kernels.ragged_paged_attention.rope import apply_rope
from jaxserve.pallas_kernels.tuning import measured_sizes

__all__ = [
    "TUNED",
    "chip_name",
    "default_page_size",
    "from_canonical",
    "interpreted",
    "kv_shape",
    "pool_dims",
    "scale_shape",
    "shape_class",
    "sized",
    "sizes_for",
    "supports",
    "to_canonical",
    "write_and_attend",
]

POOL_DTYPES = ("bfloat16", "float32", *LARGEST)
MIN_HEAD_DIM = 64  # on a chip: narrower pools XLA lays out the other way round, and copies them for the kernel
MAX_HEAD_DIM = 256
TUNED = Path(__file__).parents[1] / "tuned"  # sizes of blocks that were measured, by chip
INTERPRETED_VMEM_BYTES = 32 * 2**20
MANY_TOKENS, MANY_ROWS = 2048, 256  # of a step that makes blocks as large as any

_KERNEL = f"{__name__}.kernel"

_given_sizes: ContextVar[dict[str, int] | None] = ContextVar("given_sizes", default=None)
_interpret_params: ContextVar[Any] = ContextVar("interpret_params", default=None)


@contextlib.contextmanager
def interpreted(params: Any) -> Iterator[None]:
    """Has calls traced inside run in the interpreter, on any machine, with these parameters."""
    token = _interpret_params.set(params)
    try:
        yield
    finally:
        _interpret_params.reset(token)


@contextlib.contextmanager
def sized(**sizes: int) -> Iterator[None]:
    """Has calls traced inside take these of `plan.Sizes`, in place of what was measured to be best on their chip."""
    token = _given_sizes.set(sizes)
    try:
        yield
    finally:
        _given_sizes.reset(token)


def shape_class(problem: Problem) -> dict[str, int | str]:
    """What problems have in common that the same sizes are best for."""
    return {
        "num_kv_heads": problem.num_kv_heads,
        "group": problem.num_query_heads // problem.num_kv_heads,
        "head_dim": problem.head_dim,
        "page_size": problem.page_size,
        "kv_dtype": problem.kv_dtype.name,
    }


def chip_name() -> str:
    """Of the one that is compiled for: "v6e", say."""
    return str(_chip().chip_version.value)


def sizes_for(problem: Problem) -> Sizes:
    """Of blocks on the chip: those asked for, else those measured to be best for such problems; else by its facts.

    Raises:
      ValueError: there are no such sizes; or of a chip that jax does not know.
    """
    if _interpret_params.get() is not None:
        return Sizes()
    chip, given = _chip(), _given_sizes.get()
    if given is None:
        given = measured_sizes(TUNED, chip_name(), shape_class(problem))
    if unknown := sorted(given.keys() - {field.name for field in dataclasses.fields(Sizes)}):
        raise ValueError(f"there are no sizes of blocks called {unknown}, which {TUNED} has for {chip_name()}")
    bytes_per_s = chip.num_cores * chip.mem_bw_bytes_per_second
    return Sizes(**({"unit_bytes": unit_bytes_for(bytes_per_s, _vmem_bytes())} | given))


def supports(problem: Problem) -> str | None:
    """Why this backend cannot run the problem; None if it can."""
    if problem.platform != "tpu" and _interpret_params.get() is None:
        return "it runs on TPUs only"
    if problem.kv_dtype.name not in POOL_DTYPES:
        return f"the pool must be one of {POOL_DTYPES}, not {problem.kv_dtype}"
    least = MIN_HEAD_DIM if _interpret_params.get() is None else 8
    if problem.head_dim % 8 or not least <= problem.head_dim <= MAX_HEAD_DIM:
        return f"head_dim must be a multiple of 8 from {least} to {MAX_HEAD_DIM}, not {problem.head_dim}"
    slab = slab_tokens(problem.kv_dtype)
    if problem.page_size % slab or MAX_PAGE_TOKENS % problem.page_size:
        return (
            f"page_size must be a power of two from {slab} to {MAX_PAGE_TOKENS} in a pool of {problem.kv_dtype}, "
            f"not {problem.page_size}"
        )
    page_bytes = problem.page_size * token_bytes(problem.num_kv_heads, problem.head_dim, problem.kv_dtype)
    if page_bytes > MAX_PAGE_BYTES:
        return f"a page of a layer must have at most {MAX_PAGE_BYTES} bytes, not {page_bytes}; make page_size smaller"
    return import_failure(_KERNEL, "Pallas for TPUs") or _memory_failure(problem)


def _memory_failure(problem: Problem) -> str | None:
    """Why not even the smallest blocks of a step of many rows fit the chip that is compiled for, if it is known."""
    if target_platform() != "tpu":
        return None
    try:
        call = Call(
            num_tokens=MANY_TOKENS,
            num_rows=MANY_ROWS,
            num_kv_heads=problem.num_kv_heads,
            group=problem.num_query_heads // problem.num_kv_heads,
            head_dim=problem.head_dim,
            page_size=problem.page_size,
            table_width=1,
            kv_dtype=problem.kv_dtype,
            scale=1.0,
            window=None,
            soft_cap=None,
            has_sinks=False,
            tree_words=0,
            vmem_bytes=_vmem_bytes(),
            sizes=sizes_for(problem),
            interpret=None,
        )
        choose_blocks(call)
    except ValueError as error:  # of a chip that jax does not know, too
        return str(error)
    return None


def _kernel() -> ModuleType:
    """The kernel; Pallas takes a third of a second to import, which only those who use it shall wait."""
    return importlib.import_module(_KERNEL)


def write_and_attend(
    q: Float[Array, "T Q H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    kv_pages: Pages,
    layer: int | Int32[Array, ""],
    rows: RaggedRows,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Float[Array, "Q"] | None,
    rope: Float32[Array, "2 T half"] | None,
    tree_mask: Int32[Array, "T words"] | None,
) -> tuple[Float[Array, "T Q H"], Pages]:
    """Rotates, writes to the donated pool and attends.

    Queries and weights of values are rounded to the pool's dtype, those of narrow pools to bfloat16.
    """
    dtype, pool = q.dtype, values_of(kv_pages)
    if rope is not None:
        q, k = apply_rope(q, rope), apply_rope(k, rope)
    call = Call(
        num_tokens=q.shape[0],
        num_rows=rows.kv_lens.shape[0],
        num_kv_heads=k.shape[1],
        group=q.shape[1] // k.shape[1],
        head_dim=q.shape[2],
        page_size=pool.shape[3],
        table_width=rows.page_table.shape[1],
        kv_dtype=pool.dtype,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        has_sinks=sinks is not None,
        tree_words=0 if tree_mask is None else tree_mask.shape[1],
        vmem_bytes=_vmem_bytes(),
        sizes=sizes_for(Problem(q.shape[1], k.shape[1], q.shape[2], pool.shape[3], pool.dtype, "tpu")),
        interpret=_interpret_params.get(),
    )
    blocks = choose_blocks(call)
    plan = make_plan(call, blocks, rows)
    operands = make_operands(call, blocks, plan, rows, q, k, v, kv_pages, sinks, tree_mask)
    layer = jnp.asarray(layer, jnp.int32)[None]
    kv_pages, lane_out, tile_out = _kernel().write_and_attend(call, blocks, layer, plan, operands)
    return token_outputs(call, plan, rows, lane_out, tile_out).astype(dtype), kv_pages


def _vmem_bytes() -> int:
    """What of the chip's vector memory the kernel may take: the rest is the compiler's, which prefetches weights."""
    if _interpret_params.get() is not None:
        return INTERPRETED_VMEM_BYTES
    return int(_chip().vmem_capacity_bytes) // 4


def _chip() -> Any:
    """Facts of the one that is compiled for, by one of its cores."""
    from jax.experimental.pallas import tpu as pltpu  # noqa: PLC0415 (see `_kernel`)

    return pltpu.get_tpu_info()
