"""MovedPools: a runner's pools whose pages move between tiers, and the compiled programs that copy them.

KV pages move together with a draft layer's entries, which have the same page ids. State snapshots have pools of their
own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from numpy.typing import NDArray

from jaxserve.execution.page_bytes import Page
from jaxserve.execution.page_programs import KVLayout, PagedPool, StateLayout
from jaxserve.execution.proposer import PagedProposer, Proposer
from jaxserve.execution.state import ServeState

Item = TypeVar("Item")
Pools = tuple[Any, ...]


class PoolAccess(NamedTuple):
    """How pools are found in the device state.

    Attributes:
        read: returns them.
        write: returns the state with others in their place.
    """

    read: Callable[[ServeState], Pools]
    write: Callable[[ServeState, Pools], ServeState]


def kv_access(proposer: Proposer | None) -> PoolAccess:
    """Return the access to keys and values, and to a proposer's entries for the same tokens."""
    if not isinstance(proposer, PagedProposer):
        return PoolAccess(lambda state: (state.kv_pages,), lambda state, pools: replace(state, kv_pages=pools[0]))
    return PoolAccess(
        lambda state: (state.kv_pages, state.draft.kv_pages),
        lambda state, pools: replace(state, kv_pages=pools[0], draft=replace(state.draft, kv_pages=pools[1])),
    )


def state_access() -> PoolAccess:
    """Return the access to recurrent states."""
    return PoolAccess(lambda state: (state.states,), lambda state, pools: replace(state, states=pools[0]))


def kv_pools(state: ServeState, layout: KVLayout, proposer: Proposer | None) -> list[PagedPool]:
    """Return the pools that `kv_access` reads, given a state's shapes."""
    layouts = [layout, proposer.page_layout] if isinstance(proposer, PagedProposer) else [layout]
    return [PagedPool(*each) for each in zip(kv_access(proposer).read(state), layouts, strict=True)]


def state_pools(state: ServeState) -> list[PagedPool]:
    """Return the pools that `state_access` reads, given a state's shapes."""
    return [PagedPool(state.states, StateLayout())]


@dataclass(frozen=True, eq=False)
class MovedPools:
    """Pools with the same page ids.

    Attributes:
        name: name of their pages.
        access: how they are found in the state.
        programs: compiled programs by name.
        sizes: numbers of pages that programs copy.
        first_page: first page id that moves: earlier ones belong to slots.
    """

    name: str
    access: PoolAccess
    programs: dict[str, Any]
    sizes: Sequence[int]
    first_page: int = 0

    def gather(self, state: ServeState, pages: Sequence[int], size: int) -> list[Page]:
        """Dispatch copies to host memory, by the program for `size` pages, and return them."""
        found = self.programs[f"gather_{self.name} {size}"](self.access.read(state), self._ids(pages, size))
        leaves = jax.tree.leaves(found)
        per_page = len(leaves) // size
        return [leaves[start : start + per_page] for start in range(0, len(pages) * per_page, per_page)]

    def scatter(self, state: ServeState, pages: Sequence[int], contents: Sequence[Page], size: int) -> ServeState:
        """Dispatch copies to pages, by the program for `size` pages, and return the state with them."""
        pools = self.access.read(state)
        structure = jax.tree.structure(pools)
        parts = [jax.tree.unflatten(structure, content) for content in contents]
        parts += parts[-1:] * (size - len(parts))
        scatter = self.programs[f"scatter_{self.name} {size}"]
        return self.access.write(state, scatter(pools, self._ids(pages, size), tuple(parts)))

    def batches(self, items: Sequence[Item]) -> Iterator[tuple[int, Sequence[Item]]]:
        """Split items into batches for one program each, with the number that it copies."""
        start = 0
        while start < len(items):
            num_left = len(items) - start
            size = next((size for size in self.sizes if size // 2 < num_left <= size), self.sizes[0])
            size = max([size, *(each for each in self.sizes if each <= num_left)])
            yield size, items[start : start + size]
            start += size

    def num_leaves(self, state: ServeState) -> int:
        """Return the number of arrays in a page."""
        return len(jax.tree.leaves(self.access.read(state)))

    def _ids(self, pages: Sequence[int], size: int) -> NDArray[np.int32]:
        """Return page ids, the last one repeatedly."""
        return np.array([*pages, *[pages[-1]] * (size - len(pages))], np.int32) + np.int32(self.first_page)
