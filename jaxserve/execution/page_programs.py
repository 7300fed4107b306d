"""Programs that copy pages between pools and host memory.

A page in host memory has an array for each leaf in its pools, without the axis that counts pages. It has the canonical
layout, so its bytes do not depend on the attention backend, and on the number of devices only if these copy KV heads.
Its memory is pinned, so that the device copies it without the host's help.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jaxtyping import Array, Int

from jaxserve.layers.pools import Pool, from_canonical, to_canonical
from jaxserve.layers.sharding import over_devices, replicated, specs_of
from jaxserve.pallas_kernels.deviceless import HOST_MEMORY, Chip
from jaxserve.pallas_kernels.ragged_paged_attention import KVKind

MOVED_PAGES = (1, 4, 16)  # numbers of pages for which there are programs
MOVED_STATES = (1,)  # the same for state snapshots, which are large


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


@runtime_checkable
class PageLayout(Protocol):
    """Layout of a pool's pages."""

    def to_canonical(self, page: Any) -> Any:
        """Return a page, with an axis for a single one, in the canonical layout."""

    def from_canonical(self, page: Any) -> Any:
        """Return a canonical page in the pool's layout."""

    def page_spec(self, spec: PartitionSpec) -> PartitionSpec:
        """Return how devices divide a canonical page, without that axis, given how they divide the pool."""


@dataclass(frozen=True)
class KVLayout(PageLayout):
    """Layout of keys and values.

    Attributes:
        backend: attention backend.
        kind: vectors that a device stores for a token.
    """

    backend: str
    kind: KVKind

    def to_canonical(self, page: Pool) -> Pool:
        """Convert from the backend's layout."""
        return to_canonical(self.backend, page, self.kind)

    def from_canonical(self, page: Pool) -> Pool:
        """Convert to the backend's layout."""
        return from_canonical(self.backend, page)

    def page_spec(self, spec: PartitionSpec) -> PartitionSpec:
        """Divide the heads, the third axis, or nothing."""
        layers, _, *others = spec or (None, None)
        return PartitionSpec(layers, None, *(axes for axes in others if axes is not None))


class StateLayout(PageLayout):
    """Layout of recurrent states, the same in all backends."""

    def to_canonical(self, page: Any) -> Any:
        """Return the page."""
        return page

    def from_canonical(self, page: Any) -> Any:
        """Return the page."""
        return page

    def page_spec(self, spec: PartitionSpec) -> PartitionSpec:
        """Divide the same axis."""
        layers, _, *others = spec or (None, None)
        return PartitionSpec(layers, *others)


class PagedPool(NamedTuple):
    """Pool whose pages move.

    Attributes:
        arrays: its arrays, or their shapes and dtypes; with a mesh, shardings too. Pages are on axis 1.
        layout: layout of its pages.
    """

    arrays: Any
    layout: PageLayout


@dataclass(frozen=True, eq=False)
class PagePrograms:
    """The programs that copy pages of pools with the same page ids.

    Attributes:
        name: name of the pages.
        pools: the pools.
        mesh: mesh over which pools are split; None for a single device.
        counts: numbers of pages for which there are programs.
        chip: chip to compile for without the hardware.
    """

    name: str
    pools: Sequence[PagedPool]
    mesh: Mesh | None
    counts: Sequence[int] = MOVED_PAGES
    chip: Chip | None = None

    def by_name(self) -> dict[str, PageProgram]:
        """Return the programs that copy as many pages as each of the counts, by name."""
        programs, pools = {}, self._arrays
        for count in self.counts:
            ids, pages = self._ids(count), (self.abstract_page(),) * count
            gather, scatter = self._gather, self._scatter
            if self.mesh is not None:
                gather = over_devices(gather, self.mesh, (pools, ids), specs_of(pages))
                scatter = over_devices(scatter, self.mesh, (pools, ids, pages), specs_of(pools))
            shardings = jax.tree.map(lambda leaf: leaf.sharding, pages)
            programs[f"gather_{self.name} {count}"] = PageProgram(gather, (pools, ids), None, shardings)
            programs[f"scatter_{self.name} {count}"] = PageProgram(_from_host(scatter), (pools, ids, pages), 0, None)
        return programs

    def abstract_page(self) -> tuple[Any, ...]:
        """Return shapes, dtypes and shardings of a page's parts in host memory, one for each pool."""
        parts: tuple[Any, ...] = jax.tree.map(
            lambda leaf, spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self._sharding(spec)),
            self.page_shapes(),
            self._page_specs,
        )
        return parts

    def page_shapes(self) -> tuple[Any, ...]:
        """Return shapes and dtypes of a page's parts in host memory, over all devices of the mesh."""
        gather, ids = self._gather, self._ids(1)
        if self.mesh is not None:
            gather = over_devices(gather, self.mesh, (self._arrays, ids), (self._page_specs,))
        (page,) = jax.eval_shape(gather, self._arrays, ids)
        parts: tuple[Any, ...] = page
        return parts

    @property
    def _page_specs(self) -> tuple[Any, ...]:
        """Axes over which a page's parts are divided."""
        return tuple(jax.tree.map(partial(self._spec, pool.layout), pool.arrays) for pool in self.pools)

    @property
    def _arrays(self) -> tuple[Any, ...]:
        """Shapes and dtypes of the pools' arrays."""
        return tuple(pool.arrays for pool in self.pools)

    def _ids(self, count: int) -> jax.ShapeDtypeStruct:
        """Return shape, dtype and sharding of page ids."""
        return jax.ShapeDtypeStruct((count,), jnp.int32, sharding=replicated(self.mesh) if self.mesh else None)

    def _sharding(self, spec: PartitionSpec) -> Sharding:
        """Return the sharding of a page's part in a pool leaf."""
        if self.mesh is not None:
            return NamedSharding(self.mesh, spec, memory_kind=HOST_MEMORY)
        device = jax.devices()[0] if self.chip is None else self.chip.devices("1x1x1")[0]
        return SingleDeviceSharding(device, memory_kind=HOST_MEMORY)

    def _spec(self, layout: PageLayout, leaf: jax.ShapeDtypeStruct) -> PartitionSpec:
        """Return how devices divide a page's part in a pool leaf."""
        if self.mesh is None:
            return PartitionSpec()
        assert isinstance(leaf.sharding, NamedSharding), "a pool that is split has shardings"
        return layout.page_spec(leaf.sharding.spec)

    def _gather(self, pools: tuple[Any, ...], ids: Int[Array, " E"]) -> tuple[tuple[Any, ...], ...]:
        """Return copies of some pages."""

        def read(index: Array) -> tuple[Any, ...]:
            # A gather along the second axis would make XLA for TPUs copy the pool, and so would another byte layout.
            page = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, axis=1), pools)
            page = jax.lax.optimization_barrier(page)
            parts = [pool.layout.to_canonical(part) for pool, part in zip(self.pools, page, strict=True)]
            return tuple(jax.tree.map(lambda leaf: _to_words(leaf[:, 0]), part) for part in parts)

        return tuple(map(read, jnp.unstack(ids)))

    def _scatter(self, pools: tuple[Any, ...], ids: Int[Array, " E"], pages: tuple[Any, ...]) -> tuple[Any, ...]:
        """Write pages, as from `_gather`, to donated pools and return these."""
        first = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((leaf.shape[0], 1, *leaf.shape[2:]), leaf.dtype), pools)
        canonical = tuple(
            jax.eval_shape(pool.layout.to_canonical, part) for pool, part in zip(self.pools, first, strict=True)
        )

        def write(index: Array, leaf: Array, part: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(leaf, part, index, axis=1)

        for index, content in zip(jnp.unstack(ids), pages, strict=True):
            # One page after the other, whose temporary arrays then take the same memory.
            pools, words = jax.lax.optimization_barrier((pools, content))
            parts = jax.tree.map(_from_words, words, canonical)
            page = tuple(pool.layout.from_canonical(part) for pool, part in zip(self.pools, parts, strict=True))
            pools = jax.tree.map(partial(write, index), pools, page)
        return pools


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


def _from_host(scatter: Callable[..., Any]) -> Callable[..., Any]:
    """Return a program that first copies the pages from host memory to the devices."""

    def program(pools: tuple[Any, ...], ids: Int[Array, " E"], pages: tuple[Any, ...]) -> Any:
        return scatter(pools, ids, jax.device_put(pages, jax.memory.Space.Device))

    return program
