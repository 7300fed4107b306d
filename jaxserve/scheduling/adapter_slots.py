"""AdapterSlots: which LoRA adapters are on the devices, and which requests may start with them.

An adapter takes a slot while rows use it, and keeps it afterwards until another adapter needs the slot: the one that
was started least often of late is replaced, since few adapters have most of the traffic. A request whose adapter is not
on the devices starts with the plan that loads it. If rows use all slots, it waits, and later requests continue; but it
claims a slot by the same order, and no later request starts with the adapter in that slot. Nobody starves: the claimed
slot is free once its rows have ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jaxserve.scheduling.request import Request

HALF_LIFE = 64  # starts per slot after which a start counts half
_LARGE = 2.0**100
MAX_LACKING = 1024  # waiting requests per plan that are skipped because their adapters lack slots
MAX_KNOWN = 1024  # adapters whose starts are remembered


class AdapterSlots:
    """Slots of adapters on the devices, numbered from 1; 0 is the base model.

    Args:
        num_slots: maximum adapters on the devices.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.restart()

    def restart(self) -> None:
        """Forget all adapters and rows, after a failure."""
        self._free = list(range(self.num_slots, 0, -1))
        self._slots: dict[str, int] = {}  # adapters on the devices
        # Number of starts by adapter, the least recent first; a start counts `_unit`, which grows, instead of decaying.
        self._starts: dict[str, float] = {}
        self._unit = 1.0
        self._num_rows: dict[str, int] = {}  # running rows by adapter
        self._claims: dict[str, str] = {}  # adapter whose slot a waiting adapter takes next, by that one

    def begin_plan(self) -> None:
        """Forget the claims of the last plan; requests claim slots again, in their order."""
        self._claims.clear()

    def may_start(self, request: Request) -> bool:
        """Return whether a request can start now; if not, it claims a slot, so that it can when rows have ended.

        Call it in the order in which requests should start.
        """
        adapter = request.adapter
        if not adapter:
            return True
        if adapter in self._slots:
            return adapter not in self._claims.values()
        if self._free or self._idle() is not None:
            return True
        if adapter not in self._claims:
            taken = set(self._claims.values())
            if unclaimed := [other for other in self._slots if other not in taken]:
                self._claims[adapter] = self._least_started(unclaimed)
        return False

    def startable(self, waiting: Iterable[Request]) -> Iterator[Request]:
        """Yield the requests whose adapters have slots or can get them, in order."""
        num_lacking = 0
        for request in waiting:
            if self.may_start(request):
                yield request
            elif (num_lacking := num_lacking + 1) > MAX_LACKING:
                return

    def start(self, request: Request) -> tuple[int, str] | None:
        """Give a starting request its adapter's slot; return slot and adapter if it must be loaded first."""
        adapter = request.adapter
        if not adapter:
            return None
        is_new = adapter not in self._slots
        if is_new:
            if not self._free:
                idle = self._idle()
                assert idle is not None, "`may_start` has found a slot"
                self._free.append(self._slots.pop(idle))
            self._slots[adapter] = self._free.pop()
        self._note_start(adapter)
        self._num_rows[adapter] = self._num_rows.get(adapter, 0) + 1
        request.adapter_slot = self._slots[adapter]
        return (request.adapter_slot, adapter) if is_new else None

    def stop(self, request: Request) -> None:
        """Take the adapter from a request that has run; the adapter keeps its slot until another needs it."""
        if not request.adapter:
            return
        self._num_rows[request.adapter] -= 1
        if not self._num_rows[request.adapter]:
            del self._num_rows[request.adapter]
        request.adapter_slot = 0

    def _idle(self) -> str | None:
        """Return the adapter without rows whose slot is reused next; None if all have rows."""
        idle = [adapter for adapter in self._slots if adapter not in self._num_rows]
        return self._least_started(idle) if idle else None

    def _least_started(self, adapters: Iterable[str]) -> str:
        """Return the adapter that was started least often of late."""
        return min(adapters, key=lambda adapter: self._starts.get(adapter, 0.0))

    def _note_start(self, adapter: str) -> None:
        """Count the start of a request."""
        self._unit *= 2 ** (1 / (HALF_LIFE * self.num_slots))
        self._starts[adapter] = self._starts.pop(adapter, 0.0) + self._unit
        if len(self._starts) > MAX_KNOWN:
            del self._starts[next(iter(self._starts))]
        if self._unit > _LARGE:
            self._starts = {each: count / self._unit for each, count in self._starts.items()}
            self._unit = 1.0

    def forget_idle(self) -> None:
        """Free the slots of adapters without rows, as after a change of weights or a loss of device memory."""
        for adapter in [adapter for adapter in self._slots if adapter not in self._num_rows]:
            self._free.append(self._slots.pop(adapter))

    def check_integrity(self, running: Iterable[Request]) -> None:
        """Assert that slots are conserved and that running requests have their adapters' slots."""
        assert sorted([*self._free, *self._slots.values()]) == list(range(1, self.num_slots + 1)), "a slot is lost"
        counts: dict[str, int] = {}
        for request in running:
            if request.adapter:
                counts[request.adapter] = counts.get(request.adapter, 0) + 1
                assert request.adapter_slot == self._slots[request.adapter], f"{request.request_id} has another's slot"
            else:
                assert request.adapter_slot == 0, f"{request.request_id} has a slot without an adapter"
        assert counts == self._num_rows, f"rows by adapter are {counts}, counted as {self._num_rows}"
