"""Ragged paged attention by itself: microseconds, bytes and FLOPs per second, over rows, context, page and group.

A program calls the operation as a model does: layer after layer of one donated pool, each with keys that depend on the
output of the layer before. Successive calls read other pages, so that no cache holds what they read, until all pages
have been read. Pages are in random order. Nothing is subtracted.
"""

import itertools
from collections.abc import Iterator
from functools import cached_property, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from gpu_report_parts import kernels
from gpu_report_parts import machine as machines
from gpu_report_parts.grid import FULL, TINY, Grid
from gpu_report_parts.points import Figures, Latest, Point, UnavailableError, effort, median_s
from pallas_kernels.ragged_paged_attention import kv_shape, ragged_paged_attention
from pallas_kernels.ragged_paged_attention.interface import Problem

machine = machines.with_jax

MAX_TABLES = 64
POOL_SHARE = 0.65  # of the memory that XLA may use
BLOCK_PAGES = 256  # random pages, repeated throughout the pool
DTYPE = jnp.dtype("bfloat16")


class Shape(NamedTuple):
    """What a program is compiled for; the length of the context is not part of it."""

    group: int
    page_size: int
    num_rows: int
    chunk: int  # tokens of each row


def points(dry_run: bool) -> Iterator[Point]:
    """Decode and prefill with the first page size and group first, then the others."""
    grid = TINY if dry_run else FULL
    bench = Bench(grid, dry_run)
    for page_size, group in itertools.product(grid.page_sizes, grid.groups):
        common = {"page_size": page_size, "group": group}
        for rows, context in grid.decodes():
            measure = partial(bench.measure, Shape(group, page_size, rows, 1), context)
            yield Point("decode", {"rows": rows, "context": context, **common}, measure)
        if page_size == grid.page_sizes[0] and group in grid.prefill_groups:
            for chunk, context in grid.prefills():
                measure = partial(bench.measure, Shape(group, page_size, 1, chunk), context)
                yield Point("prefill", {"chunk": chunk, "context": context, **common}, measure)


class Pool:
    """All pages of one page size; its array is donated to every call and replaced."""

    def __init__(self, grid: Grid, backend: str, page_size: int) -> None:
        self.page_size = page_size
        block_bytes = grid.num_layers * BLOCK_PAGES * page_size * grid.token_bytes
        self.num_pages = BLOCK_PAGES * max(1, int(_pool_bytes() // block_bytes))
        num_layers, _, *page = kv_shape(
            backend,
            num_layers=grid.num_layers,
            num_pages=self.num_pages,
            page_size=page_size,
            num_kv_heads=grid.num_kv_heads,
            head_dim=grid.head_dim,
        )
        self.array = _filled(num_layers, self.num_pages // BLOCK_PAGES, tuple(page))
        self._shuffled = np.random.default_rng(0).permutation(self.num_pages).astype(np.int32)

    @property
    def num_tokens(self) -> int:
        """Of one layer."""
        return self.num_pages * self.page_size

    def tables(self, num_rows: int, context: int, width: int) -> list[Array]:
        """Page tables `[num_rows, width]` that have no page in common; UnavailableError if not even one fits."""
        row_pages = -(-context // self.page_size)
        size = num_rows * row_pages
        if size > self.num_pages:
            raise UnavailableError(f"{num_rows * context} tokens do not fit into a pool of {self.num_tokens}")
        count = min(MAX_TABLES, self.num_pages // size)
        pages = self._shuffled[: count * size].reshape(count, num_rows, row_pages)
        return [jnp.asarray(np.pad(table, ((0, 0), (0, width - row_pages)))) for table in pages]


class Bench:
    """Measures points; keeps the last pool and its programs."""

    def __init__(self, grid: Grid, dry_run: bool) -> None:
        self._grid, self._effort = grid, effort(dry_run)
        self._pools: Latest[int, Pool] = Latest(lambda page_size: Pool(grid, self.backend, page_size))
        self._programs: Latest[Shape, jax.stages.Wrapped] = Latest(self._program)

    @cached_property
    def backend(self) -> str:
        """Of all points."""
        grid = self._grid
        heads = grid.num_kv_heads * max(grid.groups)
        platform = jax.default_backend()
        return kernels.best(Problem(heads, grid.num_kv_heads, grid.head_dim, grid.page_sizes[0], DTYPE, platform))

    def measure(self, shape: Shape, context: int) -> Figures:
        """Every row computes the last `chunk` tokens of its context."""
        seconds, facts = self._seconds(shape, context)
        sizes = {"rows": shape.num_rows, "chunk": shape.chunk, "context": context, "group": shape.group}
        return {**self._grid.figures(seconds, **sizes), **facts}

    def _seconds(self, shape: Shape, context: int) -> tuple[float, Figures]:
        """Of one call of the operation."""
        pool = self._pools.get(shape.page_size)
        tables = pool.tables(shape.num_rows, context, -(-self._longest() // shape.page_size))
        program = self._programs.get(shape)
        T, K = shape.num_rows * shape.chunk, self._grid.num_kv_heads
        q, k, v = (
            jax.random.normal(jax.random.key(seed), (T, heads, self._grid.head_dim), DTYPE)
            for seed, heads in enumerate((K * shape.group, K, K))
        )
        lens = jnp.full(shape.num_rows, context, jnp.int32)
        starts = jnp.arange(shape.num_rows + 1, dtype=jnp.int32) * shape.chunk
        tables_per_program = self._grid.num_calls // self._grid.num_layers
        rounds = itertools.cycle(tables)

        def run(count: int) -> None:
            for _ in range(count):
                used = list(itertools.islice(rounds, tables_per_program))
                out, pool.array = program(pool.array, q, k, v, lens, starts, used)
            out.block_until_ready()

        with kernels.runnable():
            seconds = median_s(run, self._effort) / self._grid.num_calls
        pool_gb = pool.array.nbytes / 1e9
        return seconds, {"backend": self.backend, "num_tables": len(tables), "pool_gb": round(pool_gb, 3)}

    def _longest(self) -> int:
        return max(*self._grid.contexts, *self._grid.prefill_contexts)

    def _program(self, shape: Shape) -> jax.stages.Wrapped:
        """`num_calls` calls, over all layers of one table and then of the next."""
        operation = jax.jit(partial(ragged_paged_attention, scale=self._grid.head_dim**-0.5, backend=self.backend))
        num_layers, num_calls, num_rows = self._grid.num_layers, self._grid.num_calls, jnp.int32(shape.num_rows)

        def program(
            pool: Array, q: Array, k: Array, v: Array, lens: Array, starts: Array, tables: list[Array]
        ) -> tuple[Array, Array]:
            new_k = k
            for call in range(num_calls):
                table_id, layer = divmod(call, num_layers)
                out, pool = operation(
                    q,
                    new_k,
                    v,
                    pool,
                    jnp.int32(layer),
                    kv_lens=lens,
                    page_table=tables[table_id],
                    cu_q_lens=starts,
                    num_rows=num_rows,
                )
                new_k = k + 1e-6 * out[:, : k.shape[1]]  # the same numbers, known only then
            return out, pool

        return jax.jit(program, donate_argnums=0)


def _pool_bytes() -> float:
    stats = jax.devices()[0].memory_stats() or {}
    return POOL_SHARE * stats.get("bytes_limit", 0)


def _filled(num_layers: int, num_blocks: int, page: tuple[int, ...]) -> Array:
    block = jax.random.normal(jax.random.key(7), (BLOCK_PAGES, *page), DTYPE)
    shape = (num_layers, num_blocks, *block.shape)
    return jax.jit(lambda b: jnp.broadcast_to(b, shape).reshape(num_layers, -1, *page))(block)
