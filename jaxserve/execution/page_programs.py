"""Programs that copy pages between the pool and host memory.

A page in host memory has an array for each leaf in the pool, without the axis that counts pages. Its memory is pinned,
so that the device copies it without the host's help.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jaxtyping import Array, Int

from jaxserve.layers.sharding import over_devices, replicated, specs_of
from jaxserve.pallas_kernels.deviceless import HOST_MEMORY, Chip
from jaxserve.pallas_kernels.ragged_paged_attention import Pages

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


def page_programs(pool: Any, mesh: Mesh | None, chip: Chip | None = None) -> dict[str, PageProgram]:
    """Return the programs that copy as many pages as each number in MOVED_PAGES, by name.

    Args:
        pool: shapes and dtypes of the pool's arrays; with a mesh, shardings too.
        mesh: mesh over which the pool is split; None for a single device.
        chip: chip to compile for without the hardware.
    """
    page = jax.tree.map(lambda leaf: abstract_page(leaf, mesh, chip), pool)
    programs = {}
    for count in MOVED_PAGES:
        ids = jax.ShapeDtypeStruct((count,), jnp.int32, sharding=replicated(mesh) if mesh else None)
        pages = (page,) * count
        gather, scatter = _gather, _scatter
        if mesh is not None:
            gather = over_devices(gather, mesh, (pool, ids), specs_of(pages))
            scatter = over_devices(scatter, mesh, (pool, ids, pages), specs_of(pool))
        shardings = jax.tree.map(lambda leaf: leaf.sharding, pages)
        programs[f"gather_pages {count}"] = PageProgram(gather, (pool, ids), None, shardings)
        programs[f"scatter_pages {count}"] = PageProgram(_from_host(scatter), (pool, ids, pages), 0, None)
    return programs


def abstract_page(leaf: jax.ShapeDtypeStruct, mesh: Mesh | None, chip: Chip | None = None) -> jax.ShapeDtypeStruct:
    """Return shape, dtype and sharding for a page's part in a pool leaf; see `page_programs`."""
    sharding: Sharding
    if mesh is None:
        device = jax.devices()[0] if chip is None else chip.devices("1x1x1")[0]
        sharding = SingleDeviceSharding(device, memory_kind=HOST_MEMORY)
    else:
        assert isinstance(leaf.sharding, NamedSharding), "a pool that is split has shardings"
        axes = list(leaf.sharding.spec)
        sharding = NamedSharding(mesh, PartitionSpec(*axes[:1], *axes[2:]), memory_kind=HOST_MEMORY)
    return jax.ShapeDtypeStruct(leaf.shape[:1] + leaf.shape[2:], leaf.dtype, sharding=sharding)


def _gather(kv_pages: Pages, ids: Int[Array, " E"]) -> tuple[Pages, ...]:
    """Return copies for some page ids; ids out of range give the last page."""
    leaves, structure = jax.tree.flatten(kv_pages)
    copies = [leaf.at[:, ids].get(mode="clip") for leaf in leaves]
    pages = zip(*(jnp.unstack(copy, axis=1) for copy in copies), strict=True)
    return tuple(jax.tree.unflatten(structure, page) for page in pages)


def _scatter(kv_pages: Pages, ids: Int[Array, " E"], pages: tuple[Pages, ...]) -> Pages:
    """Write pages, as from `_gather`, to a donated pool and return it; ids out of range are dropped."""
    contents = jax.tree.map(lambda *parts: jnp.stack(parts, axis=1), *pages)
    return jax.tree.map(lambda x, content: x.at[:, ids].set(content, mode="drop"), kv_pages, contents)


def _from_host(scatter: Callable[..., Pages]) -> Callable[..., Pages]:
    """Return a program that first copies the pages from host memory to the devices."""

    def program(kv_pages: Pages, ids: Int[Array, " E"], pages: tuple[Pages, ...]) -> Pages:
        return scatter(kv_pages, ids, jax.device_put(pages, jax.memory.Space.Device))

    return program
