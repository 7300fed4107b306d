"""Estimates a request's waiting time by simulating the scheduler for the requests ahead.

The simulated rules are simplified, and similar steps are combined. Prompts are computed in order, decoding rows get a
token in each step, and a request starts when a slot, pages and step budget are free for it. If pages run out, the
youngest row returns to the queue. Everything is a function of its arguments: no clock, no state.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from jaxserve.scheduling.request import Request
from jaxserve.scheduling.step_time import Rates

MAX_SIMULATED = 192  # maximum waiting requests that are simulated; the rest is extrapolated from their pace
_GOLDEN = (math.sqrt(5) - 1) / 2


Number = int | float


class Work(NamedTuple):
    """Remaining work of a request.

    Attributes:
        num_prompt_tokens: tokens to compute before the next one is sampled; at most 1 for a decoding row.
        num_output_tokens: tokens to sample.
        num_held_tokens: tokens whose keys and values it holds.
    """

    num_prompt_tokens: Number
    num_output_tokens: Number
    num_held_tokens: Number = 0.0


class SchedulerSizes(NamedTuple):
    """Sizes of the simulated scheduler.

    Attributes:
        num_slots: maximum running requests.
        num_batched_tokens: token budget of a step.
        num_kv_tokens: tokens that the page pool holds.
        page_size: tokens per page.
        long_threshold: tokens above which a prompt is long; only one long prompt is computed at a time, and shorter
            ones overtake those waiting.
        long_chunk: maximum tokens of a long prompt in a step with decoding rows.
    """

    num_slots: int
    num_batched_tokens: int
    num_kv_tokens: Number
    page_size: int
    long_threshold: int
    long_chunk: int


class Wait(NamedTuple):
    """Estimate for one request, from now on.

    Attributes:
        start_s: time until its first tokens are computed.
        first_token_s: time until its first token is available.
    """

    start_s: Number
    first_token_s: Number


class OutputLengths:
    """Distribution of output lengths that may end before their limit: each token is equally likely to be the last.

    The probability comes from recent outputs; outputs that reached their limit count as unfinished.
    """

    def __init__(self) -> None:
        self._num_stopped, self._num_tokens = 0.0, 0.0

    def ended(self, num_tokens: int, *, at_limit: bool) -> None:
        """Record an output's length, and whether it ended at its limit."""
        self._num_stopped = 0.99 * self._num_stopped + (not at_limit)
        self._num_tokens = 0.99 * self._num_tokens + num_tokens

    def left(self, limit: int, *, may_stop: bool, at: Number) -> Number:
        """Return the estimated number of tokens that an output has left, at least 1.

        Args:
            limit: tokens up to its limit.
            may_stop: True if it may end earlier.
            at: quantile of the distribution, in [0, 1).
        """
        max_left = float(max(limit, 1))
        if not (may_stop and self._num_stopped):
            return max_left
        mean = max(self._num_tokens / self._num_stopped, 1.0)
        return min(max(-math.log1p(-at) * mean, 1.0), max_left)


def remaining_work(requests: Iterable[Request], lengths: OutputLengths, cached_fraction: Number = 0.0) -> list[Work]:
    """Return the remaining work of each request, with output lengths spread over their distribution.

    Args:
        requests: unfinished requests; another thread may be changing them.
        lengths: distribution of output lengths.
        cached_fraction: fraction of waiting prompts that is found in the cache.
    """
    works = []
    for index, request in enumerate(requests):
        num_tokens, num_held = request.num_tokens, request.num_computed_tokens
        may_stop = bool(request.stop_ids or request.params.stop)
        left = lengths.left(request.max_total_tokens - num_tokens, may_stop=may_stop, at=(index + 0.5) * _GOLDEN % 1)
        num_prompt = float(max(num_tokens - num_held, 1))
        if not num_held:
            num_prompt = max(num_prompt * (1 - cached_fraction), 1.0)
        works.append(Work(num_prompt, left, float(num_held)))
    return works


def estimate_wait(
    rates: Rates, sizes: SchedulerSizes, running: Sequence[Work], waiting: Sequence[Work], own: Work
) -> Wait:
    """Estimate when a new request will start, and when it will have its first token, after those that wait.

    Args:
        rates: measured times of steps.
        sizes: sizes of the scheduler.
        running: work of the running requests, in admission order.
        waiting: work of the requests that wait before it, in order.
        own: work of the request itself.
    """
    simulated = waiting[:MAX_SIMULATED]
    simulation = _Simulation(rates, sizes, running, [*simulated, own])
    simulation.run()
    further_s: Number = 0.0
    if len(simulated) < len(waiting):
        # Starts before the first slot was free, or while several were free, do not reveal the pace.
        pace_s = simulation.pace_s([work.num_prompt_tokens + work.num_output_tokens for work in simulated])
        further_s = pace_s * sum(work.num_prompt_tokens + work.num_output_tokens for work in waiting[MAX_SIMULATED:])
    return Wait(simulation.start_s + further_s, simulation.first_token_s + further_s)


@dataclass(slots=True)
class _Row:
    """Simulated request.

    Attributes:
        prompt: prompt tokens left to compute.
        output: output tokens left to sample.
        held: tokens in its pages.
        order: position in the waiting queue.
        end: value of `_Simulation._decoded` at which it ends, once it decodes.
        base: value of `_Simulation._decoded` at which it began to decode.
        decodes: True while it decodes.
    """

    prompt: Number
    output: Number
    held: Number
    order: int = 0
    end: Number = 0.0
    base: Number = 0.0
    decodes: bool = False


class _Queue:
    """Waiting rows in order; rows with long prompts may be overtaken.

    Args:
        threshold: tokens above which a prompt is long.
        rows: waiting rows.
    """

    def __init__(self, threshold: int, rows: Iterable[_Row]) -> None:
        self._threshold = threshold
        self._first = 0
        self._short: deque[_Row] = deque()
        self._long: deque[_Row] = deque()
        for order, row in enumerate(rows, start=1):
            row.order = order
            self._rows_like(row).append(row)

    def _rows_like(self, row: _Row) -> deque[_Row]:
        """Return the queue for rows with long prompts, or the one for short prompts, as fits `row`."""
        return self._long if row.prompt > self._threshold else self._short

    def __bool__(self) -> bool:
        return bool(self._short or self._long)

    def first(self, *, may_be_long: bool) -> _Row | None:
        """Return the first row, or with `may_be_long` False the first with a short prompt; None if there is none."""
        heads = [rows[0] for rows in (self._short, self._long if may_be_long else ()) if rows]
        return min(heads, key=lambda row: row.order, default=None)

    def remove_first(self, row: _Row) -> None:
        """Remove a row that `first` has returned."""
        self._rows_like(row).popleft()

    def put_back(self, row: _Row) -> None:
        """Add a preempted row in front of all others."""
        self._first -= 1
        row.order = self._first
        self._rows_like(row).appendleft(row)


class _Simulation:
    """Simulated scheduler that runs until the last waiting request has its first token.

    Args:
        rates: measured times of steps.
        sizes: sizes of the scheduler.
        running: work of the running requests, in admission order.
        waiting: work of the waiting requests, in order.

    Attributes:
        start_s: time at which the last waiting request started, after `run`.
        first_token_s: time at which it had its first token, after `run`.
    """

    def __init__(self, rates: Rates, sizes: SchedulerSizes, running: Sequence[Work], waiting: Sequence[Work]) -> None:
        self._rates, self._sizes = rates, sizes
        self._now_s = 0.0
        self._decoded = 0.0  # tokens that a row would have got that has decoded since the beginning
        self._long: _Row | None = None  # long prompt being computed
        self._prefills: deque[_Row] = deque()  # other prompts being computed
        self._prefill_left = 0.0  # tokens left in these
        self._rows: list[_Row] = []  # decoding rows in admission order; the last ones are removed when they end
        self._ends: list[tuple[Number, int]] = []  # heap: end, index in `_rows`
        self._num_decoding = 0
        self._held = 0.0  # tokens of all rows, except those that decoding rows got since they began to decode
        self._base = 0.0  # sum of `base` over decoding rows
        rows = [_Row(work.num_prompt_tokens, work.num_output_tokens, 0.0) for work in waiting]
        self._own = rows[-1]
        self._waiting = _Queue(sizes.long_threshold, rows)
        self._starts_s: list[Number] = []
        self.start_s = self.first_token_s = 0.0
        self._is_done = False
        for work in running:
            row = _Row(work.num_prompt_tokens, work.num_output_tokens, work.num_held_tokens)
            self._held += row.held
            if row.prompt > 1:
                self._begin_prefill(row)
            else:
                self._begin_decode(row)

    def run(self) -> None:
        """Simulate steps until the last waiting request has its first token."""
        while not self._is_done:
            self._start_waiting()
            if self._prefills or self._long:
                self._compute_prompts()
            elif self._num_decoding:
                self._decode(self._ends[0][0] - self._decoded)
            else:  # a row larger than the pool, by rounding
                row = self._waiting.first(may_be_long=True)
                assert row is not None, "it ends with the first token of the last row"
                self._start(row)
            self._preempt()

    def pace_s(self, tokens: Sequence[Number]) -> Number:
        """Return the time per token of the requests that started after the first quarter."""
        starts_s = sorted(self._starts_s)
        first = len(tokens) // 4
        span_s = starts_s[min(len(tokens), len(starts_s) - 1)] - starts_s[first]
        return span_s / max(sum(tokens[first:]), 1.0)

    # Components

    @property
    def _num_running(self) -> int:
        """Number of rows, decoding or with unfinished prompts."""
        return self._num_decoding + len(self._prefills) + (self._long is not None)

    @property
    def _num_free_tokens(self) -> Number:
        """Number of tokens that fit the free pages, if each row leaves half a page empty."""
        held = self._held + self._decoded * self._num_decoding - self._base
        return self._sizes.num_kv_tokens - held - self._num_running * self._sizes.page_size / 2

    def _prompt_budgets(self) -> tuple[Number, Number]:
        """Return the prompt tokens in a step: for the long prompt's first chunk, and for all other prompts."""
        budget = self._sizes.num_batched_tokens
        left = max(budget - self._num_decoding, budget / 8, 1.0)
        if self._long is None:
            return 0.0, left
        chunk = self._long.prompt
        if chunk > self._sizes.long_threshold:
            chunk = min(chunk, self._sizes.long_chunk, (left + 1) // 2)
        chunk = min(chunk, left)
        return chunk, left - chunk

    def _start_waiting(self) -> None:
        """Start waiting rows in order, as long as slots, step budget and pages last."""
        sizes, waiting = self._sizes, self._waiting
        while waiting and self._num_running < sizes.num_slots:
            if self._prefill_left >= self._prompt_budgets()[1]:
                return
            row = waiting.first(may_be_long=self._long is None)
            if row is None:
                return
            # Unfinished prompts keep their pages, and every other row a page to grow.
            kept = self._prefill_left + (self._long.prompt if self._long else 0.0)
            needed = row.prompt + kept + (self._num_running + 1) * sizes.page_size
            if needed > self._num_free_tokens and self._num_running:
                return
            self._start(row)

    def _start(self, row: _Row) -> None:
        """Start the first waiting row."""
        self._waiting.remove_first(row)
        self._starts_s.append(self._now_s)
        if row is self._own:
            self.start_s = self._now_s
        self._begin_prefill(row)

    def _begin_prefill(self, row: _Row) -> None:
        """Add a row to the rows with unfinished prompts."""
        if self._long is None and row.prompt > self._sizes.long_threshold:
            self._long = row
        else:
            self._prefills.append(row)
            self._prefill_left += row.prompt

    def _compute_prompts(self) -> None:
        """Simulate a step with prompt tokens, or several like it: until a prompt or a row ends."""
        num_long, other_budget = self._prompt_budgets()
        others = min(other_budget, self._prefill_left)
        num_steps = 1
        if self._long is not None:
            chunk = self._long.prompt
            if self._num_decoding and chunk > self._sizes.long_threshold:
                chunk = min(chunk, self._sizes.long_chunk)
            num_long = min(chunk, num_long + other_budget - others)
            if not self._prefills:
                num_steps = max(int(self._long.prompt // num_long), 1)
        elif self._prefills[0].prompt > other_budget:
            num_steps = int(self._prefills[0].prompt // other_budget)
        if num_steps > 1 and self._ends:
            num_steps = max(min(num_steps, int(self._ends[0][0] - self._decoded)), 1)
        self._now_s += num_steps * self._rates.step_s(num_long + others, self._num_decoding)
        self._decoded += num_steps
        self._held += num_steps * (num_long + others)
        self._prefill_left -= num_steps * others
        self._take_prompts(num_steps * others)
        if self._long is not None:
            self._long.prompt -= num_steps * num_long
            self._long.held += num_steps * num_long
            if self._long.prompt < 1e-6:
                row, self._long = self._long, None
                self._end_prompt(row)
        self._end_rows()

    def _take_prompts(self, left: Number) -> None:
        """Compute `left` tokens of the short prompts, in order."""
        while self._prefills and left >= self._prefills[0].prompt - 1e-6:
            row = self._prefills.popleft()
            left -= row.prompt
            row.held += row.prompt
            self._end_prompt(row)
        if self._prefills:
            self._prefills[0].prompt -= left
            self._prefills[0].held += left
        else:
            self._prefill_left = 0.0

    def _end_prompt(self, row: _Row) -> None:
        """Let a row whose prompt is computed sample its first token, then decode or end."""
        if row is self._own:
            self.first_token_s, self._is_done = self._now_s, True
        row.output -= 1
        if row.output > 0:
            self._begin_decode(row)
        else:
            self._held -= row.held

    def _decode(self, max_tokens: Number) -> None:
        """Simulate steps with only decoding rows until each has got `max_tokens`, or pages run out."""
        tokens = max(max_tokens, 1e-9)
        if self._waiting:
            tokens = min(tokens, max(self._num_free_tokens, 0.0) / self._num_decoding + 1.0)
        num_steps = tokens / self._rates.row_tokens(self._num_decoding)
        self._now_s += num_steps * self._rates.step_s(0, self._num_decoding)
        self._decoded += tokens
        self._end_rows()

    def _begin_decode(self, row: _Row) -> None:
        """Add a row to the decoding rows."""
        row.base, row.end, row.decodes = self._decoded, self._decoded + row.output, True
        heappush(self._ends, (row.end, len(self._rows)))
        self._rows.append(row)
        self._num_decoding += 1
        self._base += row.base

    def _end_rows(self) -> None:
        """Remove the decoding rows that have sampled their last token."""
        while self._ends and self._ends[0][0] <= self._decoded + 1e-6:
            self._leave(self._rows[heappop(self._ends)[1]])

    def _leave(self, row: _Row) -> None:
        """Remove a row from the decoding rows."""
        row.decodes = False
        self._num_decoding -= 1
        self._base -= row.base
        self._held -= row.held

    def _preempt(self) -> None:
        """Return the youngest rows to the queue if pages run out."""
        while self._num_free_tokens < 0 and self._num_decoding > 1:
            while not self._rows[-1].decodes:
                self._rows.pop()
            row = self._rows[-1]
            self._leave(row)
            self._ends.remove((row.end, len(self._rows) - 1))
            heapify(self._ends)
            self._rows.pop()
            got = self._decoded - row.base
            self._waiting.put_back(_Row(row.held + got, max(row.output - got, 1.0), 0.0))
