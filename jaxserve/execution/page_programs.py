"""Programs that copy pages between the pool and host memory.

A page in host memory has an array for each leaf in the pool, without the axis that counts pages. It has the canonical
layout, so its bytes do not depend on the attention backend, and on the number of devices only if these copy KV heads.
Its memory is pinned, so that the device copies it without the host's help.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jaxtyping import Array, Int

from jaxserve.layers.pools import Pool, from_canonical, to_canonical
from jaxserve.layers.sharding import over_devices, replicated, specs_of
from jaxserve.pallas_kernels.deviceless import HOST_MEMORY, Chip
from jaxserve.pallas_kernels.ragged_paged_attention import KVKind

MOVED_PAGES = (1, 4, 16)  # numbers of pages for which there are programs


class PageProgram(NamedTuple):
    """A program to lower.

    Attributes:
        program: function to lower.
        args: shapes, dtypes and shardings.
        donated: index of the donated argument; None if there is none.
        results: shardings for the results; None leaves them to XLA.
    """

    program: Callable[..., Any]
    args: tuple[Any, ...]
    donated: int | None
    results: Any


@dataclass(frozen=True, eq=False)
class PagePrograms:
    """The programs that copy pages of a pool.

    Attributes:
        pool: shapes and dtypes of the pool's arrays; with a mesh, shardings too.
        backend: attention backend, which determines the pool's layout.
        kind: vectors that a device stores for a token.
        mesh: mesh over which the pool is split; None for a single device.
        chip: chip to compile for without the hardware.
    """

    pool: Any
    backend: str
    kind: KVKind
    mesh: Mesh | None
    chip: Chip | None = None

    def by_name(self) -> dict[str, PageProgram]:
        """Return the programs that copy as many pages as each number in MOVED_PAGES, by name."""
        programs = {}
        for count in MOVED_PAGES:
            ids, pages = self._ids(count), (self.abstract_page(),) * count
            gather, scatter = self._gather, self._scatter
            if self.mesh is not None:
                gather = over_devices(gather, self.mesh, (self.pool, ids), specs_of(pages))
                scatter = over_devices(scatter, self.mesh, (self.pool, ids, pages), specs_of(self.pool))
            shardings = jax.tree.map(lambda leaf: leaf.sharding, pages)
            programs[f"gather_pages {count}"] = PageProgram(gather, (self.pool, ids), None, shardings)
            programs[f"scatter_pages {count}"] = PageProgram(_from_host(scatter), (self.pool, ids, pages), 0, None)
        return programs

    def abstract_page(self) -> Any:
        """Return shapes, dtypes and shardings of a page in host memory."""
        gather, ids = self._gather, self._ids(1)
        if self.mesh is not None:
            specs = jax.tree.map(self._spec, self.pool)
            gather = over_devices(gather, self.mesh, (self.pool, ids), (specs,))
        (page,) = jax.eval_shape(gather, self.pool, ids)
        return jax.tree.map(
            lambda leaf, page: jax.ShapeDtypeStruct(page.shape, page.dtype, sharding=self._sharding(leaf)),
            self.pool,
            page,
        )

    def _ids(self, count: int) -> jax.ShapeDtypeStruct:
        """Return shape, dtype and sharding of page ids."""
        return jax.ShapeDtypeStruct((count,), jnp.int32, sharding=replicated(self.mesh) if self.mesh else None)

    def _sharding(self, leaf: jax.ShapeDtypeStruct) -> Sharding:
        """Return the sharding of a page's part in a pool leaf."""
        if self.mesh is not None:
            return NamedSharding(self.mesh, self._spec(leaf), memory_kind=HOST_MEMORY)
        device = jax.devices()[0] if self.chip is None else self.chip.devices("1x1x1")[0]
        return SingleDeviceSharding(device, memory_kind=HOST_MEMORY)

    def _spec(self, leaf: jax.ShapeDtypeStruct) -> PartitionSpec:
        """Return how devices divide a page's part in a pool leaf: by the heads, the third axis, or not at all."""
        assert isinstance(leaf.sharding, NamedSharding), "a pool that is split has shardings"
        layers, _, *others = leaf.sharding.spec or (None, None)
        return PartitionSpec(layers, None, *(axes for axes in others if axes is not None))

    def _gather(self, kv_pages: Pool, ids: Int[Array, " E"]) -> tuple[Pool, ...]:
        """Return copies of some pages."""

        def read(index: Array) -> Pool:
            # A gather along the second axis would make XLA for TPUs copy the pool, and so would another byte layout.
            page = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, axis=1), kv_pages)
            page = to_canonical(self.backend, jax.lax.optimization_barrier(page), self.kind)
            return jax.tree.map(lambda leaf: _to_words(leaf[:, 0]), page)

        return tuple(map(read, jnp.unstack(ids)))

    def _scatter(self, kv_pages: Pool, ids: Int[Array, " E"], pages: tuple[Pool, ...]) -> Pool:
        """Write pages, as from `_gather`, to a donated pool and return it."""
        first = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((leaf.shape[0], 1, *leaf.shape[2:]), leaf.dtype), kv_pages
        )
        canonical = jax.eval_shape(partial(to_canonical, self.backend, kind=self.kind), first)

        def write(index: Array, leaf: Array, part: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(leaf, part, index, axis=1)

        for index, content in zip(jnp.unstack(ids), pages, strict=True):
            # One page after the other, whose temporary arrays then take the same memory.
            kv_pages, words = jax.lax.optimization_barrier((kv_pages, content))
            page = from_canonical(self.backend, jax.tree.map(_from_words, words, canonical))
            kv_pages = jax.tree.map(partial(write, index), kv_pages, page)
        return kv_pages


def _to_words(page: Array) -> Array:
    """Return a page with bytes as 32-bit words: XLA for TPUs cannot copy bytes to host memory."""
    if page.dtype.itemsize > 1 or page.ndim < 3 or page.shape[-1] * page.shape[-2] % 4:
        return page
    return jax.lax.bitcast_convert_type(page.reshape(*page.shape[:-2], -1, 4), jnp.uint32)


def _from_words(page: Array, leaf: jax.ShapeDtypeStruct) -> Array:
    """Return a page with the shape and dtype of `leaf`, as it was before `_to_words`."""
    if page.dtype != leaf.dtype:
        page = jax.lax.bitcast_convert_type(page, leaf.dtype)
    return page.reshape(leaf.shape)


def _from_host(scatter: Callable[..., Pool]) -> Callable[..., Pool]:
    """Return a program that first copies the pages from host memory to the devices."""

    def program(kv_pages: Pool, ids: Int[Array, " E"], pages: tuple[Pool, ...]) -> Pool:
        return scatter(kv_pages, ids, jax.device_put(pages, jax.memory.Space.Device))

    return program
