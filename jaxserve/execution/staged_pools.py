"""StagedPools: the pools of all pipeline stages whose pages move between tiers together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import jax

from jaxserve.execution.moved_pools import Item, MovedPools

if TYPE_CHECKING:
    from jaxserve.execution.page_bytes import Page
    from jaxserve.execution.runner import Runner
    from jaxserve.execution.state import ServeState


@dataclass(frozen=True, eq=False)
class StagedPools:
    """Pools of several pipeline stages with the same page ids; a page has all stages' arrays, in order.

    Attributes:
        stages: the stages' runners, and their pools.
    """

    stages: Sequence[tuple[Runner, MovedPools]]

    def gather(self, pages: Sequence[int], size: int) -> list[Page]:
        """Dispatch copies to host memory, and return them; see `MovedPools`."""
        by_stage = [pools.gather(_awake(runner), pages, size) for runner, pools in self.stages]
        return [[*chain.from_iterable(parts)] for parts in zip(*by_stage, strict=True)]

    def scatter(self, pages: Sequence[int], contents: Sequence[Page], size: int) -> None:
        """Dispatch copies to pages; see `MovedPools`."""
        start = 0
        for runner, pools in self.stages:
            stop = start + pools.num_leaves(_awake(runner))
            parts = [content[start:stop] for content in contents]
            runner.state, start = pools.scatter(_awake(runner), pages, parts, size), stop

    def wait(self) -> None:
        """Wait for the pools."""
        for runner, pools in self.stages:
            jax.block_until_ready(pools.access.read(_awake(runner)))

    def batches(self, items: Sequence[Item]) -> Iterator[tuple[int, Sequence[Item]]]:
        """Split items into batches; see `MovedPools`."""
        return self.stages[0][1].batches(items) if self.stages else iter(())


def _awake(runner: Runner) -> ServeState:
    """Return the state of a runner that does not sleep."""
    assert runner.state is not None, "pages for a state that sleeps are dropped"
    return runner.state
