"""Programs that copy pages between the pool and host memory.

A page in host memory has an array for each leaf in the pool, without the axis that counts pages. Its memory is pinned,
so that the device copies it without the host's help.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jax.typing import DTypeLike
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
    page = jax.eval_shape(_to_words, jax.ShapeDtypeStruct(leaf.shape[:1] + leaf.shape[2:], leaf.dtype))
    sharding: Sharding
    if mesh is None:
        device = jax.devices()[0] if chip is None else chip.devices("1x1x1")[0]
        sharding = SingleDeviceSharding(device, memory_kind=HOST_MEMORY)
    else:
        assert isinstance(leaf.sharding, NamedSharding), "a pool that is split has shardings"
        axes = list(leaf.sharding.spec)
        spec = PartitionSpec(*(axes[:1] + axes[2:])[: page.ndim])
        sharding = NamedSharding(mesh, spec, memory_kind=HOST_MEMORY)
    return jax.ShapeDtypeStruct(page.shape, page.dtype, sharding=sharding)


def _gather(kv_pages: Pages, ids: Int[Array, " E"]) -> tuple[Pages, ...]:
    """Return copies of some pages."""

    def read(index: Array, leaf: Array) -> Array:
        # A gather along the second axis would make XLA for TPUs copy the pool, and so would another layout of bytes.
        page = jax.lax.dynamic_index_in_dim(leaf, index, axis=1, keepdims=False)
        return _to_words(jax.lax.optimization_barrier(page))

    return tuple(jax.tree.map(partial(read, index), kv_pages) for index in jnp.unstack(ids))


def _scatter(kv_pages: Pages, ids: Int[Array, " E"], pages: tuple[Pages, ...]) -> Pages:
    """Write pages, as from `_gather`, to a donated pool and return it."""

    def write(index: Array, leaf: Array, content: Array) -> Array:
        page = _from_words(content, leaf.shape[:1] + leaf.shape[2:], leaf.dtype)
        return jax.lax.dynamic_update_index_in_dim(leaf, page, index, axis=1)

    for index, page in zip(jnp.unstack(ids), pages, strict=True):
        kv_pages = jax.tree.map(partial(write, index), kv_pages, page)
    return kv_pages


def _to_words(page: Array) -> Array:
    """Return a page with bytes as 32-bit words: XLA for TPUs cannot copy bytes to host memory."""
    if page.dtype.itemsize > 1 or page.ndim < 3 or page.shape[-1] * page.shape[-2] % 4:
        return page
    return jax.lax.bitcast_convert_type(page.reshape(*page.shape[:-2], -1, 4), jnp.uint32)


def _from_words(page: Array, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Return a page with the given shape and dtype, as it was before `_to_words`."""
    return page if page.dtype == dtype else jax.lax.bitcast_convert_type(page, dtype).reshape(shape)


def _from_host(scatter: Callable[..., Pages]) -> Callable[..., Pages]:
    """Return a program that first copies the pages from host memory to the devices."""

    def program(kv_pages: Pages, ids: Int[Array, " E"], pages: tuple[Pages, ...]) -> Pages:
        return scatter(kv_pages, ids, jax.device_put(pages, jax.memory.Space.Device))

    return program
