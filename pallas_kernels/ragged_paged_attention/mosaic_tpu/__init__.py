"""Ragged paged attention for TPUs, in Pallas (Mosaic): the serving backend on TPUs.

One kernel (`kernel.py`) does everything in place and goes through three lists of work, planned on the device
(`plan.py`).

- Writes (`writes.py`): new keys and values reach their pages by slabs, the rows of a memory tile, which is the smallest
  piece that can be written. Hence a page that is written belongs to one row; pages that are only read may be shared.
- Decode slots (`decode.py`): rows of one token, several side by side, the longest first, each through its own pages;
  one product for each KV head and slot. So many short rows take few work items.
- Tiles (`tiles.py`): some tokens of a row times the query heads of a KV head, for rows of several tokens; steps of many
  tokens have two kinds of tiles, low and tall.

Decode slots and tiles go through work items of a few pages (`work_items.py`) with an online softmax (`softmax.py`;
FlashAttention-2, Dao 2023). Pages of the next work items are copied ahead, across the borders of slots and tiles; so
are queries and, before them, page ids, since the page table stays in main memory, whatever its width. The scheme is
that of ragged paged attention v3, arXiv 2604.15464.

Quantised pools are fetched as they are and converted one head's block at a time (`pages.py`). Scales of keys multiply
the columns of scores, those of values the columns of weights.

Pages are `[K, P, 2H]`, a head's keys and values side by side (`layout.py`). Unlike memory tiles of `[P, 2K, H]`, this
needs no padding if KV heads are few or odd in number or a head has 64 columns, and a head's block is a matrix as
fetched: its rows are not scattered among those of other heads.
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
from jaxtyping import Array, Float, Int32

from jaxserve.pallas_kernels.dispatch import import_failure, target_platform
from jaxserve.pallas_kernels.ragged_paged_attention.interface import AttentionInputs, AttentionOptions, Problem
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.layout import HeadPairs
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.operands import make_operands, token_outputs
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_tpu.plan import (
    MAX_PAGE_BYTES,
    MAX_PAGE_TOKENS,
    Call,
    Sizes,
    choose_blocks,
    make_plan,
    slab_tokens,
    token_bytes,
    unit_bytes_for,
)
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import QUANTIZED_MAX, Pages, values_of
from jaxserve.pallas_kernels.tuning import measured_sizes

__all__ = [
    "LAYOUT",
    "SPLITS_PAGES",
    "TUNED",
    "WANTS_OWN_TABLE",
    "chip_name",
    "interpreted",
    "shape_class",
    "sized",
    "sizes_for",
    "supports",
    "write_and_attend",
]

LAYOUT = HeadPairs()
SPLITS_PAGES = False
WANTS_OWN_TABLE = True
POOL_DTYPES = ("bfloat16", "float32", *QUANTIZED_MAX)
MIN_HEAD_DIM = 64  # minimum on a chip: XLA lays out narrower pools transposed, and copies them for the kernel
MAX_HEAD_DIM = 256
TUNED = Path(__file__).parents[1] / "tuned"  # measured block sizes, by chip
INTERPRETED_VMEM_BYTES = 32 * 2**20
MANY_TOKENS, MANY_ROWS = 2048, 256  # a step that makes blocks as large as any

_KERNEL = f"{__name__}.kernel"

_given_sizes: ContextVar[dict[str, int] | None] = ContextVar("given_sizes", default=None)
_interpret_params: ContextVar[Any] = ContextVar("interpret_params", default=None)


@contextlib.contextmanager
def interpreted(params: Any) -> Iterator[None]:
    """Run calls traced inside in the interpreter, on any machine, with these parameters."""
    token = _interpret_params.set(params)
    try:
        yield
    finally:
        _interpret_params.reset(token)


@contextlib.contextmanager
def sized(**sizes: int) -> Iterator[None]:
    """Make calls traced inside use these `plan.Sizes` instead of those that measured best on their chip."""
    token = _given_sizes.set(sizes)
    try:
        yield
    finally:
        _given_sizes.reset(token)


def shape_class(problem: Problem) -> dict[str, int | str]:
    """Return the facts that problems with the same best sizes have in common."""
    return {
        "num_kv_heads": problem.num_kv_heads,
        "group": problem.num_query_heads // problem.num_kv_heads,
        "head_dim": problem.head_dim,
        "page_size": problem.page_size,
        "kv_dtype": problem.kv_dtype.name,
    }


def chip_name() -> str:
    """Return the name of the chip that is compiled for, such as "v6e"."""
    return str(_chip().chip_version.value)


def sizes_for(problem: Problem) -> Sizes:
    """Return block sizes for the chip: requested ones, else those that measured best, else by bandwidth and memory.

    Raises:
      ValueError: sizes have unknown names, or jax does not know the chip.
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
    """Return the reason why this backend cannot run the problem, or None if it can."""
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
    """Return the reason why even the smallest blocks of a step of many rows do not fit the chip, or None if they do."""
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
            options=AttentionOptions(scale=1.0),
            has_sinks=False,
            has_tree=False,
            vmem_bytes=_vmem_bytes(),
            sizes=sizes_for(problem),
            interpret=None,
        )
        choose_blocks(call)
    except ValueError as error:  # also raised for a chip that jax does not know
        return str(error)
    return None


def _kernel() -> ModuleType:
    """Import the kernel on first use: importing Pallas takes a third of a second."""
    return importlib.import_module(_KERNEL)


def write_and_attend(
    inputs: AttentionInputs, kv_pages: Pages, layer: int | Int32[Array, ""], options: AttentionOptions
) -> tuple[Float[Array, "T Q H"], Pages]:
    """Rotate, write to the donated pool and attend.

    Queries and weights of values are rounded to the pool's dtype, or to bfloat16 for a quantised pool.
    """
    rows = inputs.rows.with_own_table()
    dtype, pool, inputs = inputs.q.dtype, values_of(kv_pages), inputs.rotated()._replace(rows=rows)
    (T, Q, H), K = inputs.q.shape, inputs.k.shape[1]
    call = Call(
        num_tokens=T,
        num_rows=rows.kv_lens.shape[0],
        num_kv_heads=K,
        group=Q // K,
        head_dim=H,
        page_size=pool.shape[3],
        table_width=rows.page_table.shape[1],
        kv_dtype=pool.dtype,
        options=options,
        has_sinks=inputs.sinks is not None,
        has_tree=inputs.tree_mask is not None,
        vmem_bytes=_vmem_bytes(),
        sizes=sizes_for(Problem(Q, K, H, pool.shape[3], pool.dtype, "tpu")),
        interpret=_interpret_params.get(),
    )
    blocks = choose_blocks(call)
    plan = make_plan(call, blocks, rows)
    operands = make_operands(call, blocks, plan, inputs, kv_pages)
    layer = jnp.asarray(layer, jnp.int32)[None]
    kv_pages, decode_out, tile_out = _kernel().write_and_attend(call, blocks, layer, plan, operands)
    return token_outputs(call, plan, rows, decode_out, tile_out).astype(dtype), kv_pages


def _vmem_bytes() -> int:
    """Return the kernel's share of the chip's vector memory; the compiler prefetches weights into the rest."""
    if _interpret_params.get() is not None:
        return INTERPRETED_VMEM_BYTES
    return int(_chip().vmem_capacity_bytes) // 4


def _chip() -> Any:
    """Return facts of the chip that is compiled for, per core."""
    from jax.experimental.pallas import tpu as pltpu  # noqa: PLC0415 (see `_kernel`)

    return pltpu.get_tpu_info()
