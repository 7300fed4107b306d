"""Ragged paged attention in isolation: microseconds, bytes and FLOPs per second, over rows, context, page, group, pool.

On GPUs the kernel, or XLA's if the kernel cannot run; on TPUs both.

A program calls the operation like a model: layer after layer of one donated pool, each with keys that depend on the
previous layer's output. Successive calls read other pages, until all have been read, so that no cache holds them. Pages
are in random order. Nothing is subtracted.
"""

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from device_report import machine as machines
from device_report.grid import WIDE, Grid, choose_grid
from device_report.kernels import KERNELS
from device_report.points import Figures, Latest, Point, UnavailableError, effort, median_s
from jaxserve.pallas_kernels.ragged_paged_attention import (
    AttentionInputs,
    AttentionOptions,
    Heads,
    Pages,
    RaggedRows,
    from_canonical,
    mosaic_tpu,
    ragged_paged_attention,
)
from jaxserve.pallas_kernels.ragged_paged_attention.interface import Problem
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import encode

machine = machines.with_jax

MAX_TABLES = 64
POOL_SHARE = 0.65  # fraction of XLA's memory
BLOCK_PAGES = 256  # random pages, repeated throughout the pool
DTYPE = jnp.dtype(WIDE)


class Shape(NamedTuple):
    """Sizes that a program is compiled for; the context length is not among them."""

    group: int
    page_size: int
    kv_dtype: str
    backend: str
    q_lens: tuple[int, ...]
    sizes: tuple[tuple[str, int], ...] | None = None  # block sizes, unless those in use


def points(device: str, dry_run: bool) -> Iterator[Point]:
    """One backend after the other."""
    grid, kernel = choose_grid(device, dry_run), KERNELS[device]
    bench = Bench(device, grid, dry_run)
    if device == "tpu":
        for backend in kernel.backends:
            yield from _points(bench, grid, dict.fromkeys(grid.kv_dtypes, backend), {"backend": backend})
    else:
        yield from _points(bench, grid, {kv_dtype: bench.best(kv_dtype) for kv_dtype in grid.kv_dtypes}, {})


def _points(bench: "Bench", grid: Grid, backends: Mapping[str, str], settings: Figures) -> Iterator[Point]:
    """Yield the points with the first page size and group, then with narrow pools for these, then the others."""
    first, *others = itertools.product(grid.page_sizes, grid.groups)
    wide, *narrow = grid.kv_dtypes
    for (page_size, group), kv_dtype in [(first, wide), *((first, x) for x in narrow), *((x, wide) for x in others)]:
        common = {"page_size": page_size, "group": group, "kv_dtype": kv_dtype, **settings}
        shape = partial(Shape, group, page_size, kv_dtype, backends[kv_dtype])
        for rows, context in grid.decodes():
            measure = partial(bench.measure, shape((1,) * rows), context)
            yield Point("decode", {"rows": rows, "context": context, **common}, measure)
        if kv_dtype == wide and page_size == grid.page_sizes[0] and group in grid.prefill_groups:
            for chunk, context in grid.prefills():
                measure = partial(bench.measure, shape((chunk,)), context)
                yield Point("prefill", {"chunk": chunk, "context": context, **common}, measure)
            for rows, chunk, context in grid.mixes:
                measure = partial(bench.measure, shape((*(1,) * rows, chunk)), context)
                yield Point("mixed", {"rows": rows, "chunk": chunk, "context": context, **common}, measure)


class Pool:
    """All pages of one page size and dtype; its arrays are donated to every call and replaced."""

    def __init__(self, grid: Grid, backend: str, page_size: int, kv_dtype: str) -> None:
        self.page_size = page_size
        block = from_canonical(backend, _block(grid, page_size, kv_dtype))
        num_blocks = max(1, int(_pool_bytes() // (grid.num_layers * _num_bytes(block))))
        self.num_pages = num_blocks * BLOCK_PAGES
        self.pages = _repeated(block, grid.num_layers, num_blocks)
        self._shuffled = np.random.default_rng(0).permutation(self.num_pages).astype(np.int32)

    @property
    def num_bytes(self) -> int:
        """Bytes over all layers, including scales."""
        return _num_bytes(self.pages)

    @property
    def num_tokens(self) -> int:
        """Number of tokens per layer."""
        return self.num_pages * self.page_size

    @property
    def token_bytes(self) -> int:
        """Bytes per token and layer."""
        num_layers = jax.tree.leaves(self.pages)[0].shape[0]
        return self.num_bytes // (num_layers * self.num_tokens)

    def tables(self, num_rows: int, context: int, width: int) -> list[Array]:
        """Return disjoint page tables `[num_rows, width]`; UnavailableError if not even one fits."""
        row_pages = -(-context // self.page_size)
        size = num_rows * row_pages
        if size > self.num_pages:
            raise UnavailableError(f"{num_rows * context} tokens do not fit into a pool of {self.num_tokens}")
        count = min(MAX_TABLES, self.num_pages // size)
        pages = self._shuffled[: count * size].reshape(count, num_rows, row_pages)
        return [jnp.asarray(np.pad(table, ((0, 0), (0, width - row_pages)))) for table in pages]


class Bench:
    """Measures points; keeps the last pool and its programs."""

    def __init__(self, device: str, grid: Grid, dry_run: bool) -> None:
        self._kernel, self._grid, self._effort = KERNELS[device], grid, effort(dry_run)
        self._pools: Latest[tuple[int, str, str], Pool] = Latest(self._pool)
        self._programs: Latest[Shape, jax.stages.Wrapped] = Latest(self._program)

    def best(self, kv_dtype: str) -> str:
        """Return the backend for all points with such a pool."""
        grid = self._grid
        return self._kernel.best(self._problem(max(grid.groups), grid.page_sizes[0], kv_dtype))

    def _problem(self, group: int, page_size: int, kv_dtype: str) -> Problem:
        grid = self._grid
        heads = Heads(grid.num_kv_heads, grid.head_dim)
        return Problem(heads, grid.num_kv_heads * group, page_size, jnp.dtype(kv_dtype), jax.default_backend())

    def _pool(self, key: tuple[int, str, str]) -> Pool:
        page_size, kv_dtype, backend = key
        return Pool(self._grid, backend, page_size, kv_dtype)

    def measure(self, shape: Shape, context: int) -> Figures:
        """Measure a call in which every row computes the last `q_lens` tokens of its context."""
        self._kernel.check(shape.backend, self._problem(shape.group, shape.page_size, shape.kv_dtype))
        pool = self._pools.get((shape.page_size, shape.kv_dtype, shape.backend))
        seconds, num_tables = self._seconds(pool, shape, context)
        sizes = {"q_lens": shape.q_lens, "context": context, "group": shape.group}
        return {
            **self._grid.figures(seconds, **sizes, token_bytes=pool.token_bytes),
            "backend": shape.backend,
            "num_tables": num_tables,
            "pool_gb": round(pool.num_bytes / 1e9, 3),
        }

    def _seconds(self, pool: Pool, shape: Shape, context: int) -> tuple[float, int]:
        """Return the seconds per call of the operation, and the number of tables that calls alternate between."""
        num_rows = len(shape.q_lens)
        tables = pool.tables(num_rows, context, -(-self._grid.longest() // shape.page_size))
        program = self._programs.get(shape)
        T, K = sum(shape.q_lens), self._grid.num_kv_heads
        q, k, v = (
            jax.random.normal(jax.random.key(seed), (T, heads, self._grid.head_dim), DTYPE)
            for seed, heads in enumerate((K * shape.group, K, K))
        )
        lens = jnp.full(num_rows, context, jnp.int32)
        starts = jnp.asarray(np.cumsum((0, *shape.q_lens)), jnp.int32)
        tables_per_program = self._grid.num_calls // self._grid.num_layers
        rounds = itertools.cycle(tables)

        def run(count: int) -> None:
            for _ in range(count):
                used = list(itertools.islice(rounds, tables_per_program))
                out, pool.pages = program(pool.pages, q, k, v, lens, starts, used)
            out.block_until_ready()

        settings = mosaic_tpu.KERNEL.settings
        given = contextlib.nullcontext() if shape.sizes is None else settings.sized(**dict(shape.sizes))
        with self._kernel.runnable(), given:
            return median_s(run, self._effort) / self._grid.num_calls, len(tables)

    def _program(self, shape: Shape) -> jax.stages.Wrapped:
        """Return a program with `num_calls` calls, over all layers of one table and then of the next."""
        options = AttentionOptions(self._grid.head_dim**-0.5)
        operation = jax.jit(partial(ragged_paged_attention, options=options, backend=shape.backend))
        num_layers, num_calls, num_rows = self._grid.num_layers, self._grid.num_calls, jnp.int32(len(shape.q_lens))

        def program(
            pool: Pages, q: Array, k: Array, v: Array, lens: Array, starts: Array, tables: list[Array]
        ) -> tuple[Array, Pages]:
            new_k = k
            for call in range(num_calls):
                table_id, layer = divmod(call, num_layers)
                rows = RaggedRows(lens, tables[table_id], starts, num_rows)
                out, pool = operation(AttentionInputs(q, new_k, v, rows), pool, jnp.int32(layer))
                new_k = k + 1e-6 * out[:, : k.shape[1]]  # the same values, but known only then
            return out, pool

        return jax.jit(program, donate_argnums=0)


def _pool_bytes() -> float:
    stats = jax.devices()[0].memory_stats() or {}
    return POOL_SHARE * stats.get("bytes_limit", 0)


def _block(grid: Grid, page_size: int, kv_dtype: str) -> Pages:
    """Return random pages for one layer, in canonical layout."""
    shape = (1, BLOCK_PAGES, page_size, 2 * grid.num_kv_heads, grid.head_dim)
    numbers, dtype = jax.random.normal(jax.random.key(7), shape, DTYPE), jnp.dtype(kv_dtype)
    return encode(numbers, dtype)


@partial(jax.jit, static_argnums=(1, 2))
def _repeated(block: Pages, num_layers: int, num_blocks: int) -> Pages:
    """Repeat the same pages in every layer."""

    def repeated(x: Array) -> Array:
        _, num_pages, *page = x.shape
        return jnp.broadcast_to(x, (num_layers, num_blocks, num_pages, *page)).reshape(num_layers, -1, *page)

    return jax.tree.map(repeated, block)


def _num_bytes(kv_pages: Pages) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(kv_pages))
