"""Transfers: page moves between tiers, and the requests that wait for them.

Tiers are numbered: 0 is device memory, 1 the first tier below it, and so on. The scheduler decides on moves and
describes them by values; a `PageMover` moves the bytes, and reports moves that have ended, which become `Transferred`
events. A move requested while a plan is made runs after that plan's step, which may still copy from a page to be
loaded, and before later steps. Nobody reuses a device page until its move has ended, because it is written (load) or
read (store) meanwhile.

A prefix is loaded if that is faster than to compute it, by measured times: a tier that is slower counts as if it had
no pages, and short prefixes are computed.

A page is stored in the first tier, and copied from each tier to the next one as soon as it has arrived, but only while
few such copies have not ended. A page that is evicted from a tier is copied if the next one lacks it.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple, Protocol

from jaxserve.scheduling.kv_cache.groups import KVGroups
from jaxserve.scheduling.kv_cache.pages import STATES, Content
from jaxserve.scheduling.kv_cache.stored_pages import PageKey, StoredPages
from jaxserve.scheduling.request import Request
from jaxserve.scheduling.step_plan import LoadCosts

DEVICE = 0  # number of the tier in device memory
NO_PAGE = -1  # page of a move between two lower tiers
START_S = 0.002  # time until a load begins and its request can start, besides the copies
# Unfinished copies between lower tiers; with more, pages are not copied. A page stays in host memory until its copy has
# ended, and each copy deletes a page of the next tier immediately, in vain if that is too slow to take the new one.
MAX_COPIES = 256


Place = tuple[bool, int]  # whether a device page is a state snapshot, and its number


class Move(NamedTuple):
    """A copy of a page's content from one tier to another.

    Attributes:
        key: unique number of the move.
        source: number of the tier from which it is read.
        target: number of the tier to which it is written; one of the two tiers may be DEVICE.
        page: device page; NO_PAGE if neither is DEVICE.
        content: KV group and content hash. Pages of recurrent layers, state snapshots, are numbered separately.
    """

    key: int
    source: int
    target: int
    page: int
    content: PageKey

    @property
    def is_state(self) -> bool:
        """True for a state snapshot."""
        return self.content.group == STATES

    @property
    def place(self) -> Place:
        """Pool and page on the device."""
        return self.is_state, self.page

    @property
    def is_load(self) -> bool:
        """True if a device page is written."""
        return self.target == DEVICE


class Deletion(NamedTuple):
    """The end of a page in a lower tier."""

    tier: int
    content: PageKey


class Requested(NamedTuple):
    """Work for the tiers.

    Attributes:
        forgotten: moves that end without a copy, because their content was forgotten before they started.
        is_cleared: True if all content is deleted before the work.
        work: moves and deletions, in order.
    """

    forgotten: list[Move]
    is_cleared: bool
    work: list[Move | Deletion]


class EndedMoves(NamedTuple):
    """Moves that have ended.

    Attributes:
        keys: their keys.
        ok: False if their content is lost.
    """

    keys: list[int]
    ok: bool


class PageMover(Protocol):
    """Copies the bytes of pages between tiers, for one replica."""

    def new_tiers(self) -> list[StoredPages]:
        """Return the scheduler's indices of the tiers below device memory, the next one first."""

    def keep_states(self, kept: Sequence[tuple[int, int]]) -> None:
        """Copy the states of rows that a plan has swapped out, as (slot, page), before its step."""

    def start_moves(self, requested: Requested) -> None:
        """Start the work requested while a plan was made, after the plan's step."""

    def page_s(self) -> list[float]:
        """Return the measured time to load a page from each lower tier; 0 if none was measured."""

    def take_ended(self) -> list[EndedMoves]:
        """Return the moves that have ended since the last call: steps launched from now on may read loaded pages."""

    def sync(self) -> bool:
        """Write the pages stored so far durably; return False if that has failed. Callable from any thread."""

    def forget(self) -> None:
        """Forget all moves: none of them writes to a device page any more."""

    def close(self) -> None:
        """Complete the stores and free all resources."""


@dataclass(eq=False, slots=True)
class Transfer:
    """A move that has not ended.

    Attributes:
        content: content of the page after the move.
        waiting: requests that wait for its end.
        is_useful: False if it failed, or its content was forgotten.
    """

    move: Move
    content: Content
    waiting: list[Request] = field(default_factory=list)
    is_useful: bool = True


class Transfers:
    """Moves that have not ended, and the tiers between which they take place.

    Args:
        tiers: lower tiers, the next one first.

    Attributes:
        tiers: lower tiers.
        state_pages: pages that take as many bytes as a state snapshot.
        loading: pages being loaded, by group and hash.
    """

    def __init__(self, tiers: Sequence[StoredPages] = ()) -> None:
        self.tiers = tiers
        self.state_pages = tiers[0].state_pages if tiers else 1
        self.loading: dict[tuple[int, bytes], int] = {}
        self._num_worth = len(tiers)  # the first tiers, which are faster than computing
        self._block_s = self._page_s = 0.0  # times to compute a block, and to load a page from the slowest of these
        self._min_s = 0.0
        self._keys = count()
        self._by_key: dict[int, Transfer] = {}
        self._by_place: dict[Place, Transfer] = {}
        self._waits: dict[Request, list[Transfer]] = {}  # loads that requests wait for
        self._requested = Requested([], False, [])
        self._kept_states: list[tuple[int, int]] = []

    def keep_state(self, slot: int, page: int) -> None:
        """Request a copy of the state in a slot, whose row is swapped out, to a page for snapshots."""
        self._kept_states.append((slot, page))

    def take_kept_states(self) -> list[tuple[int, int]]:
        """Return the copies of states requested since the last call, as (slot, page)."""
        kept, self._kept_states = self._kept_states, []
        return kept

    def take_requested(self) -> Requested:
        """Return the work requested since the last call."""
        requested, self._requested = self._requested, Requested([], False, [])
        return requested

    def use_costs(self, costs: LoadCosts, groups: KVGroups) -> None:
        """Choose the tiers from which pages are loaded, and note the times; before the first call, any load pays.

        Args:
            costs: measured times.
            groups: KV groups, with a page each in a block.
        """
        self._block_s, self._min_s = groups.page_size * costs.token_s, START_S
        gains = [self._block_s - groups.size * page_s for page_s in costs.page_s]
        self._num_worth = next((number for number, gain in enumerate(gains) if gain <= 0), len(gains))
        self._page_s = costs.page_s[self._num_worth - 1] if self._num_worth else 0.0

    def pays(self, num_blocks: int, num_pages: int) -> bool:
        """Return whether to load pages is faster than to compute the blocks that they save."""
        return num_blocks * self._block_s - num_pages * self._page_s >= self._min_s

    @property
    def has_requested(self) -> bool:
        """True if work was requested that nobody has taken yet; callable from any thread."""
        forgotten, is_cleared, work = self._requested
        return bool(work or forgotten or is_cleared)

    def reaches(self, group: int, page_hash: object) -> bool:
        """Return whether a page can be loaded from a tier that is faster than computing, or is being loaded."""
        key = (group, page_hash)
        return key in self.loading or any(key in tier for tier in self.tiers[: self._num_worth])

    def load(self, page: int, content: Content) -> str:
        """Begin to load a page from the first tier that has its content; return the tier's name."""
        key = PageKey(*content[:2])
        source = next(number for number, tier in enumerate(self.tiers, 1) if key in tier)
        self.loading[content[:2]] = page
        move = self._begin(source, DEVICE, page, key, content)
        self._tier(source).load(move.key, key)
        return self._tier(source).name

    def store(self, page: int, content: Content) -> bool:
        """Begin to store a page in the first lower tier; return False if it has the page or cannot take it."""
        key = content[:2]
        if not self.tiers or self.tiers[0].is_read_only or key in self.tiers[0] or key in self.loading:
            return False
        return self._copy(DEVICE, page, content)

    def found(self, number: int, present: Iterable[PageKey], absent: Iterable[PageKey]) -> None:
        """Note which pages a lower tier was found to have, that others write, too.

        Args:
            number: number of the tier.
            present: pages that it has.
            absent: pages that it has not, or not any more.
        """
        tier = self._tier(number)
        for key in absent:
            if key in tier:
                tier.delete(key)
        for key in present:
            if key not in tier and (tier.fits(key) or self._make_space(number, key)):
                tier.found(key)

    def touch(self, content: Content) -> None:
        """Note that a request has used a page.

        Requests release their pages from the last one to the first. The last pages of a sequence are thus evicted
        before the first ones, without which they are useless.
        """
        for tier in self.tiers:
            tier.touch(PageKey(content[0], content[1]))

    def _tier(self, number: int) -> StoredPages:
        """Return a lower tier by its number."""
        return self.tiers[number - 1]

    def _copy(self, source: int, page: int, content: Content) -> bool:
        """Begin to copy a page from a tier to the next one; return False if that cannot take it.

        Args:
            source: number of the tier that has the page.
            page: device page; NO_PAGE if the source is a lower tier.
            content: content of the page.
        """
        target, key = source + 1, PageKey(content[0], content[1])
        tier = self._tier(target)
        if not (tier.fits(key) or self._make_space(target, key)):
            return False
        move = self._begin(source, target, page, key, content)
        tier.store(move.key, key)
        if source != DEVICE:
            self._tier(source).load(move.key, key)
        return True

    def _copy_down(self, source: int, key: PageKey) -> None:
        """Copy a page of a lower tier to the next one unless that has it, or too many copies have not ended."""
        is_busy = len(self._by_key) - len(self._by_place) >= MAX_COPIES
        if source == len(self.tiers) or is_busy:
            return
        target = self.tiers[source]
        if key not in target and not target.is_read_only:
            self._copy(source, NO_PAGE, (*key, ""))

    def _make_space(self, number: int, key: PageKey) -> bool:
        """Delete pages of a lower tier until another one fits; return False if it cannot."""
        tier = self._tier(number)
        if tier.size(key) > tier.num_pages:
            return False
        while not tier.fits(key):
            victim = tier.victim()
            if victim is None:
                return False
            self._copy_down(number, victim)
            tier.evict(victim)
            self._requested.work.append(Deletion(number, victim))
        return True

    def _begin(self, source: int, target: int, page: int, key: PageKey, content: Content) -> Move:
        """Request a new move, which is recorded until it ends, and return it."""
        move = Move(next(self._keys), source, target, page, key)
        transfer = self._by_key[move.key] = Transfer(move, content)
        if page != NO_PAGE:
            self._by_place[move.place] = transfer
        self._requested.work.append(move)
        return move

    def wait(self, request: Request, places: Iterable[Place]) -> None:
        """Make a request wait for the moves that load some of these device pages."""
        for place in places:
            if (transfer := self._by_place.get(place)) is not None and transfer.move.is_load:
                transfer.waiting.append(request)
                self._waits.setdefault(request, []).append(transfer)
                request.num_transfers += 1

    def end(self, key: int, *, ok: bool) -> Transfer | None:
        """Remove and return the transfer with this key, which has ended; None if it began before a restart.

        Args:
            key: key of its move.
            ok: False if the moved content is lost.
        """
        transfer = self._by_key.pop(key, None)
        if transfer is None:
            return None
        move = transfer.move
        self._by_place.pop(move.place, None)
        transfer.is_useful &= ok
        if move.source != DEVICE:
            stored_by = self._tier(move.source).loaded(key)
            if move.target == DEVICE and not transfer.is_useful:
                self._delete(move.source, move.content, stored_by)
        if move.target != DEVICE:
            if not transfer.is_useful:
                self._delete(move.target, move.content, key)
            elif move.target < len(self.tiers) and move.content in self._tier(move.target):
                self._copy_down(move.target, move.content)
        elif self.loading.get(move.content) == move.page:
            del self.loading[move.content]
        for request in transfer.waiting:
            request.num_transfers -= 1
        return transfer

    def _delete(self, number: int, content: PageKey, stored_by: int | None) -> None:
        """Delete a lost page from a lower tier, unless it was stored there again since.

        Args:
            number: number of the tier.
            content: content of the page.
            stored_by: move that stored it; None if an earlier engine has.
        """
        tier = self._tier(number)
        if tier.holds(content, stored_by):
            tier.delete(content)
            self._requested.work.append(Deletion(number, content))

    def abandon(self, request: Request) -> None:
        """Stop a request from waiting; its pages are loaded nevertheless."""
        for transfer in self._waits.pop(request, ()):
            if transfer.move.key in self._by_key:
                transfer.waiting.remove(request)
        request.num_transfers = 0

    def clear(self) -> None:
        """Forget the content of all tiers and of moving pages."""
        for transfer in self._by_key.values():
            transfer.is_useful = False
        self.loading.clear()
        for tier in self.tiers:
            tier.clear()
        moves = [each for each in self._requested.work if isinstance(each, Move)]
        self._requested = Requested(self._requested.forgotten + moves, True, [])

    def restart(self) -> None:
        """Forget all moves, and content that a device failure may have destroyed."""
        self.loading.clear()
        self._by_key.clear()
        self._by_place.clear()
        self._waits.clear()
        self._kept_states.clear()
        for tier in self.tiers:
            tier.restart()
        deletions = [each for each in self._requested.work if isinstance(each, Deletion)]
        self._requested = Requested([], self._requested.is_cleared, [*deletions])

    def check_integrity(
        self, loading: Collection[Place], storing: Collection[Place], waiting: Sequence[Request]
    ) -> None:
        """Assert that pages and requests match the moves.

        Args:
            loading: pages in state LOADING.
            storing: pages in state STORING.
            waiting: requests in status LOADING.
        """
        transfers = [transfer for transfer in self._by_key.values() if transfer.move.page != NO_PAGE]
        assert self._by_place == {transfer.move.place: transfer for transfer in transfers}
        moves = [transfer.move for transfer in transfers]
        assert sorted(m.place for m in moves if m.is_load) == sorted(loading), "a page loads by no or two moves"
        assert sorted(m.place for m in moves if not m.is_load) == sorted(storing), "a page is not being stored"
        assert {(group == STATES, page) for (group, _), page in self.loading.items()} <= set(loading)
        assert self._waits.keys() == set(waiting)
        for request in waiting:
            places = [t.move.place for t in self._by_key.values() if request in t.waiting]
            assert len(places) == len({*places}) == request.num_transfers > 0, f"{request.request_id} waits for nothing"
            pages = {page for is_state, page in places if not is_state}
            held = {page for page in request.pages if (False, page) in loading}
            assert pages == held, f"{request.request_id} waits for others' pages"
        assert all(request in waiting for t in self._by_key.values() for request in t.waiting), "it waits no more"


class InAnyTier:
    """Set of the hashes of a KV group's pages that are cached in device memory or can be loaded from a lower tier."""

    def __init__(self, group: int, cached: Container[bytes], transfers: Transfers) -> None:
        self._group, self._cached, self._transfers = group, cached, transfers

    def __contains__(self, page_hash: object) -> bool:
        return page_hash in self._cached or self._transfers.reaches(self._group, page_hash)
