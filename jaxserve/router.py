"""Router: chooses the replica that serves a request, by the load of each and the prefixes that each has computed.

The replicas may be those of one engine, the engines of a fleet, or simulated ones: the router knows numbers and hashes
only. Its caller keeps the queue, tells it loads as they change, and binds requests late, to replicas that are open.

The cost of a replica is its load and what there is to compute of the request, which a shared prefix saves. Work that
is done twice delays the request itself and those behind it, so what is saved counts twice: siblings of one request go
together until the difference in load exceeds that.
"""

import sys
from bisect import bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

ROW_CHARGE_TOKENS = 16  # a running row slows all others by as much as so many tokens of a prompt
CLOSED_CHARGE_TOKENS = 64  # waiting for a closed replica costs about as much as computing so many tokens
MAX_PASSED_OVER = 128  # requests that may wait for a replica while later ones are given to others
_SAVING_WEIGHT = 2
_MAX_HOLDERS = 8  # of a prefix that are remembered; the least loaded replica is always considered beside them
_MAX_PREFIXES = 2**16
_CLOSED = sys.maxsize

Job = TypeVar("Job")
Prefix = Sequence[tuple[int, bytes]]  # number of tokens and hash of leading parts of a prompt, shortest first


def _geometric_depths() -> list[int]:
    depths = [1]
    while depths[-1] < 2**30:
        depths.append(depths[-1] + max(depths[-1] // 4, 1))
    return depths


_DEPTHS = _geometric_depths()


@lru_cache(maxsize=2**16)
def sample_depths(num_blocks: int) -> Sequence[int]:
    """Return the numbers of leading blocks whose hashes stand for a prompt: all of few, then each a quarter more.

    A long prompt has some thirty, and a shared part is found to at least four fifths. The last is `num_blocks` itself.
    """
    depths = _DEPTHS[: bisect_right(_DEPTHS, num_blocks)]
    return depths if not num_blocks or depths[-1] == num_blocks else [*depths, num_blocks]


class Route(NamedTuple):
    """The replica chosen for a request.

    Attributes:
        replica: index of the replica.
        is_open: whether the replica takes the request now; else the request should wait for it.
        num_shared_tokens: tokens of the prompt that the replica is expected to have computed.
    """

    replica: int
    is_open: bool
    num_shared_tokens: int


class Router:
    """Loads of replicas and the prefixes that each has computed or is about to compute.

    Choosing takes a look-up per sampled depth of the prompt, and the least of a list of numbers, one of each replica:
    some 0.01 us each. A heap would cost more, as the loads of all change between two requests.

    Args:
        num_replicas: number of replicas; all are closed until `set_load` opens them.
    """

    def __init__(self, num_replicas: int) -> None:
        self._loads = [0] * num_replicas
        self._is_open = [False] * num_replicas
        self._open_loads = [_CLOSED] * num_replicas  # the same loads, of those that are open
        # Epochs by replica, oldest first. Never changed, only replaced: prefixes with one holder share a value.
        self._holders: OrderedDict[bytes, dict[int, int]] = OrderedDict()
        self._epochs = [0] * num_replicas  # a prefix noted in an earlier epoch is lost

    def set_load(self, replica: int, load: int, *, is_open: bool) -> None:
        """Note the work of a replica, in tokens, and whether it takes requests."""
        self._loads[replica], self._is_open[replica] = load, is_open
        self._open_loads[replica] = load if is_open else _CLOSED

    def add_load(self, replica: int, num_tokens: int) -> None:
        """Add to the work of a replica."""
        self.set_load(replica, self._loads[replica] + num_tokens, is_open=self._is_open[replica])

    def close(self, replica: int) -> None:
        """Give the replica nothing until `set_load` opens it."""
        self._is_open[replica] = False
        self._open_loads[replica] = _CLOSED

    def choose(self, prefix: Prefix, *, only_open: bool = False) -> Route | None:
        """Choose the replica that a request costs least; None where no replica is open.

        Args:
            prefix: leading parts of the prompt.
            only_open: consider open replicas only; else a closed one is chosen where waiting for it costs less.
        """
        best = self._least_loaded()
        if best is None:
            return None
        shared = self._find_holders(prefix)
        best_cost = self._loads[best] - _SAVING_WEIGHT * shared.get(best, 0)
        for replica, num_tokens in shared.items():
            cost = self._loads[replica] - _SAVING_WEIGHT * num_tokens
            if not self._is_open[replica]:
                if only_open:
                    continue
                cost += CLOSED_CHARGE_TOKENS
            if cost < best_cost:
                best, best_cost = replica, cost
        return Route(best, self._is_open[best], shared.get(best, 0))

    def assign(
        self,
        queue: Iterable[Job],
        prefix_of: Callable[[Job], Prefix],
        fits: Callable[[Job, Route], bool],
        load_of: Callable[[Job, Route], int],
        must_wait: Callable[[Job, Route], bool] = lambda *_: False,
    ) -> Iterator[tuple[Job, Route]]:
        """Route a queue in its order until no replica is open.

        A job whose route is open is to be given to the replica, and the new load to be set, before the next is asked
        for. One whose route is closed is passed over: until the end it counts in the load of the replica it waits for.

        Args:
            queue: jobs; not to be changed before the end.
            prefix_of: leading parts of a job's prompt.
            fits: whether an open replica has room for a job; one that has not is closed until its next `set_load`.
            load_of: tokens by which a job adds to the load of a replica.
            must_wait: whether an open replica would start others before a job; the route of the job is then closed.
        """
        waiting: defaultdict[int, int] = defaultdict(int)  # load by replica
        num_passed_over = 0
        try:
            for job in queue:
                prefix, only_open = prefix_of(job), num_passed_over == MAX_PASSED_OVER
                while (route := self.choose(prefix, only_open=only_open)) is not None:
                    if not route.is_open:
                        break
                    if must_wait(job, route):
                        if only_open:
                            return
                        route = Route(route.replica, is_open=False, num_shared_tokens=route.num_shared_tokens)
                        break
                    if fits(job, route):
                        break
                    self.close(route.replica)
                if route is None:
                    return
                if not route.is_open:
                    num_passed_over += 1
                    load = load_of(job, route)
                    waiting[route.replica] += load
                    self.add_load(route.replica, load)
                yield job, route
        finally:
            for replica, load in waiting.items():
                self.add_load(replica, -load)

    def note(self, replica: int, prefix: Prefix) -> None:
        """Remember that a replica has computed these prefixes, or will before it starts another request."""
        all_holders, alone = self._holders, {replica: self._epochs[replica]}
        for _, prefix_hash in reversed(prefix):  # so that the shortest is forgotten last
            holders = all_holders.setdefault(prefix_hash, alone)
            if holders is alone:
                continue
            all_holders.move_to_end(prefix_hash)
            others = [entry for entry in holders.items() if entry[0] != replica]
            all_holders[prefix_hash] = dict(others[-(_MAX_HOLDERS - 1) :]) | alone if others else alone
        while len(self._holders) > _MAX_PREFIXES:
            self._holders.popitem(last=False)

    def forget(self, replica: int) -> None:
        """Forget all prefixes of a replica, whose cache was lost."""
        self._epochs[replica] += 1

    def _least_loaded(self) -> int | None:
        least = min(self._open_loads)
        return None if least == _CLOSED else self._open_loads.index(least)

    def _find_holders(self, prefix: Prefix) -> dict[int, int]:
        """Return the replicas that hold a part of the prompt, with the number of tokens of the longest such part."""
        found: dict[int, int] = {}
        held: list[tuple[int, dict[int, int]]] = []
        for num_tokens, prefix_hash in prefix:
            holders = self._holders.get(prefix_hash)
            if holders is None:  # then nobody holds a longer one
                break
            held.append((num_tokens, holders))
        for num_tokens, holders in reversed(held):
            for replica, epoch in holders.items():
                if epoch == self._epochs[replica]:
                    found.setdefault(replica, num_tokens)
            if len(found) >= _MAX_HOLDERS:
                break
        return found
