"""Hits in a page tier by eviction rule: agents' sessions or a recorded trace, without a scheduler or a model.

    python scripts/tier_hits.py --others 0,2
    python scripts/tier_hits.py --workload mooncake-conversation.jsonl.gz

Prints a Markdown table: cached prompt pages over all prompt pages, for capacities that are fractions of the working set
(all different pages in the sessions or the trace). `jaxserve` is the engine's tier index, `StoredPages`; `bound` is
Belady's optimum, which knows the future and is not limited to prefixes. `--others` are other requests per second, which
share nothing and whose hits are not counted.
"""

import argparse
import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, groupby
from pathlib import Path
from typing import NamedTuple, Protocol

from agentic_cache import Turn, agentic_load, other_load, trace_load
from jaxserve.scheduling.kv_cache.stored_pages import PageKey, StoredPages
from jaxserve.tools.bench.agentic import FULL

TURN_S = 8.0  # time between a turn's arrival and end


class Visit(NamedTuple):
    """A request's pages.

    Attributes:
        pages: ids of all its pages, equal for equal prefixes.
        num_prompt: number of those that a prompt can find.
        counts: False for other requests.
    """

    pages: list[int]
    num_prompt: int
    counts: bool


class Rule(Protocol):
    """Pages that an eviction rule keeps."""

    def __contains__(self, page: int) -> bool: ...

    def use(self, page: int) -> None:
        """Note that a request releases a page, which is stored if it is not."""


class LeastRecentlyUsed:
    """Deletes the page unused for longest."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._pages: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, page: int) -> bool:
        return page in self._pages

    def use(self, page: int) -> None:
        if page not in self._pages and len(self._pages) >= self._capacity:
            self._pages.popitem(last=False)
        self._pages[page] = None
        self._pages.move_to_end(page)


class AdaptiveReplacement:
    """ARC (Megiddo and Modha 2003): pages used once and pages used again, whose numbers adapt to the pages missed."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._num_once = capacity, 0.0  # desired number of pages used once
        self._once: OrderedDict[int, None] = OrderedDict()
        self._again: OrderedDict[int, None] = OrderedDict()
        self._deleted_once: OrderedDict[int, None] = OrderedDict()
        self._deleted_again: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, page: int) -> bool:
        return page in self._once or page in self._again

    def use(self, page: int) -> None:
        deleted_once, deleted_again = self._deleted_once, self._deleted_again
        if page in self:
            self._once.pop(page, None)
            self._again[page] = None
            self._again.move_to_end(page)
        elif page in deleted_once or page in deleted_again:
            if page in deleted_once:
                change = max(1.0, len(deleted_again) / len(deleted_once))
            else:
                change = -max(1.0, len(deleted_once) / len(deleted_again))
            self._num_once = min(max(self._num_once + change, 0.0), self._capacity)
            self._make_space(is_again=page in deleted_again)
            deleted_once.pop(page, None)
            deleted_again.pop(page, None)
            self._again[page] = None
        else:
            if len(self._once) + len(deleted_once) >= self._capacity:
                (deleted_once or self._once).popitem(last=False)
            elif len(self._once) + len(self._again) + len(deleted_once) + len(deleted_again) >= 2 * self._capacity:
                deleted_again.popitem(last=False)
            self._make_space(is_again=False)
            self._once[page] = None

    def _make_space(self, *, is_again: bool) -> None:
        if len(self._once) + len(self._again) < self._capacity:
            return
        num = len(self._once)
        if num and (num > self._num_once or (is_again and num == self._num_once) or not self._again):
            self._deleted_once[self._once.popitem(last=False)[0]] = None
        else:
            self._deleted_again[self._again.popitem(last=False)[0]] = None


class Tier:
    """The engine's index of a tier, in which each store ends immediately."""

    def __init__(self, capacity: int) -> None:
        self._index = StoredPages("disk", capacity)

    def __contains__(self, page: int) -> bool:
        return _key(page) in self._index

    def use(self, page: int) -> None:
        key = _key(page)
        if key not in self._index:
            while not self._index.fits(key):
                victim = self._index.victim()
                assert victim is not None, "no page is being loaded"
                self._index.evict(victim)
            self._index.store(0, key)
        self._index.touch(key)


RULES: dict[str, Callable[[int], Rule]] = {"LRU": LeastRecentlyUsed, "ARC": AdaptiveReplacement, "jaxserve": Tier}


def _key(page: int) -> PageKey:
    """Return the key of a page."""
    return PageKey(0, page.to_bytes(8, "little"))


def visits(firsts: Sequence[Turn], page_size: int) -> Iterator[Visit]:
    """Yield all turns' pages in arrival order."""
    due = [(turn.arrival_s, number, turn) for number, turn in enumerate(firsts)]
    heapq.heapify(due)
    ids: dict[tuple[int, tuple[tuple[int, int], ...]], int] = {}  # ids by previous page and tokens
    number = len(due)
    while due:
        at_s, _, turn = heapq.heappop(due)
        if (later := turn.later) is not None:
            heapq.heappush(due, (at_s + TURN_S + later.arrival_s, number, later))
            number += 1
        prompt_len, page, pages = sum(length for _, length in turn.parts), -1, []
        answer = (turn.parts[-1][0], turn.output_len)  # the next turn's prompt continues with it
        for content in _pages([*turn.parts, answer], page_size):
            page = ids.setdefault((page, content), len(ids))
            pages.append(page)
        yield Visit(pages, (prompt_len - 1) // page_size, turn.counts)


def _pages(parts: Sequence[tuple[int, int]], page_size: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield the tokens of each full page, as token ids and lengths."""
    content: list[tuple[int, int]] = []
    num_free = page_size
    for token, parts_of_token in groupby(parts, key=lambda part: part[0]):
        num_left = sum(length for _, length in parts_of_token)
        while num_left >= num_free:
            num_left -= num_free
            yield (*content, (token, num_free))
            content, num_free = [], page_size
        if num_left:
            content.append((token, num_left))
            num_free -= num_left


def hits(visited: Sequence[Visit], rule: Rule) -> float:
    """Return the fraction of counted prompt pages that a tier with this rule finds, each after all earlier ones."""
    num_found = 0
    for visit in visited:
        found = next((i for i, page in enumerate(visit.pages) if page not in rule), len(visit.pages))
        num_found += min(found, visit.num_prompt) * visit.counts
        for page in reversed(visit.pages):  # requests release the last page first
            rule.use(page)
    return num_found / _num_sought(visited)


def bound(visited: Sequence[Visit], capacity: int) -> float:
    """Return the maximum fraction of counted prompt pages that are in a tier when they are used."""
    uses = [(page, visit.counts and i < visit.num_prompt) for visit in visited for i, page in enumerate(visit.pages)]
    never = len(uses)
    next_use, following = [never] * len(uses), dict[int, int]()
    for index in range(len(uses) - 1, -1, -1):
        page = uses[index][0]
        next_use[index] = following.get(page, never)
        following[page] = index
    stored: dict[int, int] = {}  # next use by page
    latest: list[tuple[int, int]] = []  # heap of negated next uses and pages, with outdated entries
    num_found = 0
    for (page, counts), later in zip(uses, next_use, strict=True):
        num_found += counts and page in stored
        if later == never:
            stored.pop(page, None)
            continue
        stored[page] = later
        heapq.heappush(latest, (-later, page))
        while len(stored) > capacity:
            negated, victim = heapq.heappop(latest)
            if stored.get(victim) == -negated:
                del stored[victim]
    return num_found / _num_sought(visited)


def _num_sought(visited: Sequence[Visit]) -> int:
    """Return the number of counted prompt pages."""
    return sum(visit.num_prompt for visit in visited if visit.counts)


def rows(name: str, visited: Sequence[Visit], fractions: Sequence[float]) -> Iterator[str]:
    """Yield a table row for each rule."""
    working_set = len(set(chain.from_iterable(visit.pages for visit in visited if visit.counts)))
    capacities = [max(int(working_set * fraction), 1) for fraction in fractions]
    for rule, new in RULES.items():
        yield _row(name, rule, *(f"{hits(visited, new(capacity)):.3f}" for capacity in capacities))
    yield _row(name, "bound", *(f"{bound(visited, capacity):.3f}" for capacity in capacities))


def _row(*cells: str) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="agentic", help="agentic, or a Mooncake trace in JSON lines")
    parser.add_argument("--num-requests", type=int, help="requests of the trace (default: all)")
    parser.add_argument("--sessions", type=int, default=64, help="agents' sessions")
    parser.add_argument("--gap", type=float, default=15.0, help="mean seconds between their starts")
    parser.add_argument("--others", default="0", help="other requests per second, a table part for each number")
    parser.add_argument("--fractions", default="0.05,0.1,0.25,0.35,0.5", help="capacities over the working set")
    parser.add_argument("--page-size", type=int, default=512)
    args = parser.parse_args()
    fractions = [float(fraction) for fraction in args.fractions.split(",")]
    print(_row("load", "rule", *(f"{fraction:.0%}" for fraction in fractions)))
    print(_row(*["---"] * (2 + len(fractions))))
    if args.workload != "agentic":
        loads = {Path(args.workload).name: trace_load(Path(args.workload), args.num_requests, 1.0)[0]}
    else:
        sizes = replace(FULL, num_sessions=args.sessions, session_gap_s=args.gap)
        firsts, _ = agentic_load(sizes, "none")
        loads = {
            f"agents, {rate} others/s": firsts
            + (other_load(float(rate), args.sessions * args.gap) if float(rate) else [])
            for rate in args.others.split(",")
        }
    for name, turns in loads.items():
        for row in rows(name, list(visits(turns, args.page_size)), fractions):
            print(row, flush=True)


if __name__ == "__main__":
    main()
