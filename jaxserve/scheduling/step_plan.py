"""StepPlan: what one step computes, between the scheduler that makes it and the packer that lays it out."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxserve.scheduling.request import Request


class StepShape(NamedTuple):
    """Shape of a step, and key of a program, which runs the steps that fit its shape.

    Attributes:
        num_tokens: length of the token axis; the number of rows if all rows are decoding.
        num_rounds: maximum number of rounds.
        has_drafts: True if rounds draft tokens.
        samples_late: True if the model and the sampling are two programs.
    """

    num_tokens: int
    num_rounds: int = 1
    has_drafts: bool = False
    samples_late: bool = False

    def holds(self, step: StepShape) -> bool:
        """Return whether a program of this shape can run a step."""
        return self.num_tokens >= step.num_tokens and self.num_rounds >= step.num_rounds and self[2:] == step[2:]

    @property
    def name(self) -> str:
        """Name of the program, as it is stored and logged."""
        if self.samples_late:
            return f"split {self.num_tokens}"
        if self.num_rounds == 1 and not self.has_drafts:
            return f"step {self.num_tokens}"
        return f"{'speculative' if self.has_drafts else 'multi-step'} {self.num_tokens} of {self.num_rounds}"


def cheapest(programs: Iterable[StepShape], step: StepShape) -> StepShape | None:
    """Return the smallest program that can run a step; None if there is none."""
    return min((program for program in programs if program.holds(step)), default=None)


@dataclass(slots=True)
class StepPlan:
    """Work of one step: rows in decode first, then those in prefill, then the newly admitted.

    Rows in decode that were held back for the share of prompts and got the rest of the budget come last. Where rows are
    divided among shards, all rows of a shard are in this order, and those of the next follow.

    A row is one request's share of the step: tokens [start, start + count) of the request are computed. Rows are kept
    as columns. An object per row and step would cost more to make than all else that a row in decode needs, and many
    of them alive at once set off full collections of garbage, each of them 0.1 s or more.

    What happens may be less than planned: a row that has stopped, as a token of an earlier plan has shown the device,
    computes nothing. `starts`, `counts` and `max_new` are upper bounds, for which there are pages.

    Attributes:
        step_id: counts plans from 0.
        requests: one per row, at least one; its `pages` hold all tokens that the row may compute.
        slots: slot of each row in the device state.
        starts: tokens of each row computed before this step.
        counts: tokens of each row computed at once, at least 1. Ids are known except the last one's, if it is still
            on the device.
        max_new: most tokens that each row may sample. 0 where the share does not reach the request's last token; 1
            where it does; more in a plan of several steps, in which each token but the last is computed, too.
        num_decode_tokens: tokens of rows that had exactly one token left, already running before this step.
        num_prefill_tokens: all other tokens.
        num_cached_tokens: tokens that this step's admissions found in the prefix cache.
        preempted: requests that lost their pages to older ones while this plan was made; none has a row.
        admitted: requests that start with this plan; their per-request device state must be set.
        grown: requests whose pages this plan extended; one may be there twice, or admitted, or have lost them.
        copies: pages to copy before the step, each with the page that it is copied to.
        restored: rows whose states go on from a snapshot, each with its entry.
        snapshots: rows that take a snapshot of their state, each with the tokens of the row behind which it is taken,
            and its entry. No row of the plan reads that.
        num_pages_used: pages that running requests own once the plan is made.
        wants_logprobs: True if any row asked for log probabilities.
        wants_prompt_logprobs: True if any row asked for those of prompt tokens.
        num_steps: rounds that the device goes at most; without drafts the largest of `max_new`, and 1 at least.
        num_drafts: tokens to draft for each row in each round, so that a round may sample one more than that; empty in
            plans without drafts. All rows of a plan with drafts are in decode.
        num_uneven_tokens: tokens that shards have less than the one with the most, all together, where rows are divided
            among shards with equal shares of the token axis.
        is_split: True if the model and the sampling are two programs, of which the second starts once the plans before
            are updated. All rows of such a plan are in decode.
    """

    step_id: int
    requests: list[Request] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    max_new: list[int] = field(default_factory=list)
    num_decode_tokens: int = 0
    num_prefill_tokens: int = 0
    num_cached_tokens: int = 0
    preempted: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    grown: list[Request] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    restored: list[tuple[int, int]] = field(default_factory=list)
    snapshots: list[tuple[int, int, int]] = field(default_factory=list)
    num_pages_used: int = 0
    wants_logprobs: bool = False
    wants_prompt_logprobs: bool = False
    num_steps: int = 1
    num_drafts: list[int] = field(default_factory=list)
    num_uneven_tokens: int = 0
    is_split: bool = False

    @property
    def shape(self) -> StepShape:
        """Shape that the program of the plan must hold."""
        if self.num_drafts:
            return StepShape(self.num_rows, self.num_steps, has_drafts=True)
        return StepShape(self.num_even_tokens, self.num_steps, samples_late=self.is_split)

    @property
    def num_rows(self) -> int:
        """Requests that take part."""
        return len(self.requests)

    @property
    def num_tokens(self) -> int:
        """Length of a step's token axis, before padding."""
        return self.num_decode_tokens + self.num_prefill_tokens

    @property
    def num_even_tokens(self) -> int:
        """Length of the token axis, before padding, if each shard has as much of it as the one with the most tokens."""
        return self.num_tokens + self.num_uneven_tokens

    @property
    def num_even_rows(self) -> int:
        """Rows in decode, if there are no others and each shard had as many as the one with the most."""
        return self.num_rows + self.num_uneven_tokens

    def digest(self, previous: int) -> int:
        """Return a checksum of the plans so far, of which that before this one is `previous`. Ask before the next."""
        pages = [page for request in self.admitted for page in request.pages]
        pages += [entry for request in self.grown for entry in (len(request.pages), *request.pages[-1:])]
        copies = [page for copy in self.copies for page in copy]
        states = [number for row in (*self.restored, *self.snapshots) for number in row]
        rest = [int(self.is_split), len(copies), *copies, *states]
        for column in (self.slots, self.starts, self.counts, self.max_new, self.num_drafts, pages, rest):
            previous = zlib.crc32(array("q", column).tobytes(), previous)
        return previous


def wants_prompt_logprobs(request: Request, start: int) -> bool:
    """Return whether a row predicts prompt tokens whose log probabilities are wanted. One sample does it for all."""
    return (
        request.params.prompt_logprobs is not None
        and not request.read_prefix_cache
        and start + 1 < request.num_prompt_tokens
    )
