"""Router: chooses a replica for each request, by load and by the prefixes that each replica has computed.

Replicas may belong to one engine, be engines of a fleet, or be simulated: the router handles only numbers and hashes.
Its caller keeps the queue, updates changed loads, and assigns requests late, to open replicas.

A replica's cost is its load plus the request's uncached tokens there. Repeated work delays the request itself and later
ones, so saved tokens count twice: requests with a common prefix go to the same replica until the difference in load
exceeds that.
"""

import enum
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from operator import itemgetter
from typing import NamedTuple, TypeVar

ROW_CHARGE_TOKENS = 16  # prompt tokens that slow other rows as much as one running row does
CLOSED_CHARGE_TOKENS = 64  # cost of waiting for a closed replica, in computed tokens
MAX_SKIPPED = 128  # maximum requests that wait for a replica while later ones are assigned
_SAVING_WEIGHT = 2
_MAX_HOLDERS = 8  # remembered replicas per prefix; the least loaded replica is always considered too
_MAX_PREFIXES = 2**16
_CLOSED = sys.maxsize
_BLOCK = 32  # replicas whose least load is kept

Job = TypeVar("Job")


_DEPTHS = [1]  # prefix lengths in blocks: all small ones, then each a quarter longer
while _DEPTHS[-1] < 2**30:
    _DEPTHS.append(_DEPTHS[-1] + max(_DEPTHS[-1] // 4, 1))


@lru_cache(maxsize=2**16)
def sample_depths(num_blocks: int) -> Sequence[int]:
    """Return the prefix lengths, in blocks, that are hashed for a prompt with `num_blocks` blocks.

    These are all small ones, then each a quarter longer than the previous one, and finally `num_blocks`. A long prompt
    has about thirty, and at least four fifths of any shared prefix are found.
    """
    depths = _DEPTHS[: bisect_right(_DEPTHS, num_blocks)]
    return depths if not num_blocks or depths[-1] == num_blocks else [*depths, num_blocks]


class Start(enum.Enum):
    """Answer to whether a job could start now."""

    NOW = enum.auto()
    LATER = enum.auto()  # it waits for unfinished prompts, and later jobs start before it
    FULL = enum.auto()  # it does not fit yet, and later jobs wait too


class Prefix(NamedTuple):
    """Sampled prefixes of a prompt, shortest first.

    Attributes:
        lengths: number of tokens per prefix.
        hashes: hash per prefix.
    """

    lengths: Sequence[int]
    hashes: Sequence[bytes]

    @classmethod
    def from_hashes(cls, hashes: Sequence[bytes], block_size: int, num_blocks: int | None = None) -> "Prefix":
        """Sample the prefixes of a prompt.

        Args:
            hashes: hash per block, covering all earlier blocks.
            block_size: tokens per block.
            num_blocks: number of leading blocks to sample; None for all.
        """
        lengths, pick = _sampler(len(hashes) if num_blocks is None else num_blocks, block_size)
        return cls(lengths, pick(hashes))


NO_PREFIX = Prefix((), ())


@lru_cache(maxsize=2**16)
def _sampler(num_blocks: int, block_size: int) -> tuple[Sequence[int], Callable[[Sequence[bytes]], Sequence[bytes]]]:
    """Return the sampled prefix lengths in tokens, and a function from all blocks' hashes to these prefixes' hashes.

    Args:
        num_blocks: number of blocks in the prompt.
        block_size: tokens per block.
    """
    depths = sample_depths(num_blocks)
    lengths = tuple(depth * block_size for depth in depths)
    if len(depths) < 2:  # `itemgetter` with one index returns no tuple
        return lengths, lambda hashes: tuple(hashes[: len(depths)])
    return lengths, itemgetter(*[depth - 1 for depth in depths])


class Route(NamedTuple):
    """Replica chosen for a request.

    Attributes:
        is_open: True if the replica takes the request now; otherwise the request should wait for it.
        num_shared_tokens: prompt tokens that the replica is expected to have computed.
    """

    replica: int
    is_open: bool
    num_shared_tokens: int


class Router:
    """Router over the loads of replicas and the prefixes that each has computed or will compute.

    A choice takes one lookup per sampled depth and a minimum over blocks of replicas. A block's least load is computed
    again only after it has grown: a step raises or lowers most loads, and a heap would have to follow them all.

    Args:
        num_replicas: number of replicas; all start closed until `set_load` opens them.
    """

    def __init__(self, num_replicas: int) -> None:
        self._loads = [0] * num_replicas
        self._waiting_loads = [0] * num_replicas  # loads of jobs that wait for each replica, while `assign` runs
        self._is_open = [False] * num_replicas
        self._open_loads = [_CLOSED] * num_replicas  # both loads of open replicas, otherwise `_CLOSED`
        self._least_loads = [_CLOSED] * -(-num_replicas // _BLOCK)  # the least of each block, or less if it is stale
        self._stale: set[int] = set()  # blocks whose least load may have grown
        # Epochs by replica, oldest first, for each prefix in the order noted. Values are replaced, never modified:
        # prefixes with one holder share a value. An OrderedDict takes five times as long to create.
        self._holders: dict[bytes, dict[int, int]] = {}
        self._epochs = [0] * num_replicas  # prefixes noted in an earlier epoch are lost
        self._token_costs = [1.0] * num_replicas
        self._is_uneven = False  # True if replicas differ in speed

    def set_load(self, replica: int, load: int, *, is_open: bool) -> None:
        """Set a replica's load, in tokens, and whether it accepts requests."""
        self._loads[replica], self._is_open[replica] = load, is_open
        self._set_open_load(replica)

    def set_token_cost(self, replica: int, cost: float) -> None:
        """Set the time that a replica takes per token of load, in any unit; 1 for each replica without a value."""
        self._token_costs[replica] = cost
        self._is_uneven = len(set(self._token_costs)) > 1

    def close(self, replica: int) -> None:
        """Assign nothing to the replica until `set_load` opens it."""
        self._is_open[replica] = False
        self._set_open_load(replica)

    def choose(self, prefix: Prefix, num_tokens: int = 0, *, only_open: bool = False) -> Route | None:
        """Return the cheapest replica for a request; None if no replica is open.

        Args:
            prefix: sampled prefixes of the prompt.
            num_tokens: load of the request itself, which counts if replicas differ in speed.
            only_open: True to consider only open replicas; otherwise a closed one is chosen if waiting for it costs
                less.
        """
        best = self._least_loaded()
        if best is None:
            return None
        if self._is_uneven:
            return self._choose_uneven(prefix, num_tokens, only_open=only_open)
        if not prefix.hashes or prefix.hashes[0] not in self._holders:
            return Route(best, True, 0)
        shared = self._find_holders(prefix)
        best_cost = self._open_loads[best] - _SAVING_WEIGHT * shared.get(best, 0)
        for replica, num_shared in shared.items():
            cost = self._loads[replica] + self._waiting_loads[replica] - _SAVING_WEIGHT * num_shared
            if not self._is_open[replica]:
                if only_open:
                    continue
                cost += CLOSED_CHARGE_TOKENS
            if cost < best_cost:
                best, best_cost = replica, cost
        return Route(best, self._is_open[best], shared.get(best, 0))

    def _choose_uneven(self, prefix: Prefix, num_tokens: int, *, only_open: bool) -> Route:
        """Return the cheapest replica for a request if replicas differ in speed; see `choose`."""
        shared = self._find_holders(prefix)

        def cost(replica: int) -> float:
            load = self._loads[replica] + self._waiting_loads[replica] + num_tokens
            load += 0 if self._is_open[replica] else CLOSED_CHARGE_TOKENS
            return (load - _SAVING_WEIGHT * shared.get(replica, 0)) * self._token_costs[replica]

        allowed = {replica for replica, is_open in enumerate(self._is_open) if is_open}
        best = min(sorted(allowed if only_open else allowed | shared.keys()), key=cost)
        return Route(best, self._is_open[best], shared.get(best, 0))

    def assign(
        self,
        queue: Iterable[Job],
        prefix_of: Callable[[Job], Prefix],
        could_start: Callable[[Job, Route], Start],
        load_of: Callable[[Job, Route], int],
        may_wait: Callable[[Job], bool] = lambda _: True,
        waits_for: Callable[[Job], Route | None] = lambda _: None,
    ) -> Iterator[tuple[Job, Route]]:
        """Route the jobs of a queue in order until no replica is open.

        After an open route, the caller must give the job to the replica and set its new load before the next iteration.
        A job with a closed route is skipped; until the end it counts towards the load of the replica that it waits for.

        Args:
            queue: jobs in order; must not change during the iteration.
            prefix_of: returns the sampled prefixes of a job's prompt.
            could_start: returns whether an open replica could start a job now. A job that can only start later gets a
                closed route; a full replica is closed until its next `set_load`.
            load_of: returns the load, in tokens, that a job adds to a replica.
            may_wait: returns whether a job may wait for a closed replica that has computed its prefix.
            waits_for: returns the closed route that a job was given before, if it need not be chosen again. Such a job
                is skipped even while no replica is open.
        """
        num_skipped = 0
        awaited: dict[int, None] = {}  # replicas that skipped jobs wait for
        try:
            for job in queue:
                is_last, answer = num_skipped == MAX_SKIPPED, Start.FULL
                only_open = is_last or not may_wait(job)
                route = None if only_open else waits_for(job)
                prefix = NO_PREFIX if route is not None else prefix_of(job)
                while route is None or route.is_open:
                    if (route := self.choose(prefix, only_open=only_open)) is None or not route.is_open:
                        break
                    if (answer := could_start(job, route)) is not Start.FULL:
                        break
                    self.close(route.replica)
                if route is None or (answer is Start.LATER and is_last):
                    return
                if route.is_open and answer is Start.LATER:
                    route = route._replace(is_open=False)
                if not route.is_open:
                    num_skipped += 1
                    awaited[route.replica] = None
                    self._waiting_loads[route.replica] += load_of(job, route)
                    self._set_open_load(route.replica)
                yield job, route
        finally:
            for replica in awaited:
                self._waiting_loads[replica] = 0
                self._set_open_load(replica)

    def note(self, replica: int, prefix: Prefix) -> None:
        """Record that a replica has computed these prefixes, or will before it starts another request."""
        all_holders, alone, hashes = self._holders, {replica: self._epochs[replica]}, prefix.hashes
        num_held = 0
        for prefix_hash in hashes:
            if prefix_hash not in all_holders:
                break
            num_held += 1
        # Longest first, so that the shortest is evicted last. Prefixes longer than an unknown one need no lookup.
        for prefix_hash in reversed(hashes[num_held:]):
            all_holders[prefix_hash] = alone
        for prefix_hash in reversed(hashes[:num_held]):
            holders = all_holders.pop(prefix_hash)  # reinsert it as the most recent
            others = [entry for entry in holders.items() if entry[0] != replica]
            all_holders[prefix_hash] = dict(others[-(_MAX_HOLDERS - 1) :]) | alone if others else alone
        if len(all_holders) > _MAX_PREFIXES:  # delete in bulk: finding a dict's first key steps over all deleted ones
            for oldest in list(islice(all_holders, len(all_holders) - _MAX_PREFIXES + _MAX_PREFIXES // 64)):
                del all_holders[oldest]

    def forget(self, replica: int) -> None:
        """Forget all prefixes of a replica that lost its cache."""
        self._epochs[replica] += 1

    def _set_open_load(self, replica: int) -> None:
        """Update a replica's entry in `_open_loads` from its loads and whether it is open."""
        load = self._loads[replica] + self._waiting_loads[replica] if self._is_open[replica] else _CLOSED
        block, before = replica // _BLOCK, self._open_loads[replica]
        self._open_loads[replica] = load
        if load <= self._least_loads[block]:
            self._least_loads[block] = load
        elif before == self._least_loads[block]:
            self._stale.add(block)

    def _least_loaded(self) -> int | None:
        """Return the first of the open replicas with the least load; None if no replica is open."""
        least_loads, loads = self._least_loads, self._open_loads
        for block in self._stale:
            least_loads[block] = min(loads[block * _BLOCK : (block + 1) * _BLOCK])
        self._stale.clear()
        least = min(least_loads)
        return None if least == _CLOSED else loads.index(least, least_loads.index(least) * _BLOCK)

    def _find_holders(self, prefix: Prefix) -> dict[int, int]:
        """Return replicas that hold a prefix of a prompt, each with the length of the longest such prefix in tokens."""
        found: dict[int, int] = {}
        held: list[dict[int, int]] = []
        for prefix_hash in prefix.hashes:
            holders = self._holders.get(prefix_hash)
            if holders is None:  # no replica holds a longer one either
                break
            held.append(holders)
        for num_tokens, holders in zip(reversed(prefix.lengths[: len(held)]), reversed(held), strict=True):
            for replica, epoch in holders.items():
                if epoch == self._epochs[replica]:
                    found.setdefault(replica, num_tokens)
            if len(found) >= _MAX_HOLDERS:
                break
        return found
