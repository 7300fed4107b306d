"""StepPlan: the work of one step, passed from the scheduler to the packer; and the limits of a plan."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxserve.api.cached_tokens import NO_CACHED_TOKENS, CachedTokens
from jaxserve.api.token_ids import TokenIds
from jaxserve.images.prepared import PreparedImage
from jaxserve.scheduling.request import Request


class Timing(NamedTuple):
    """Predicted times that a plan depends on.

    Attributes:
        starts_s: time at which the device will start the step.
        prefill_step_s: fixed time of a step with prompt tokens.
        prefill_token_s: time per prompt token.
        decode_token_s: time per decoding row.
    """

    starts_s: float
    prefill_step_s: float
    prefill_token_s: float
    decode_token_s: float


class LoadCosts(NamedTuple):
    """Measured times that decide whether a prefix in a lower tier is loaded or computed.

    Attributes:
        token_s: time to compute a prompt token.
        page_s: time to load a page from each lower tier, the next one first.
    """

    token_s: float
    page_s: Sequence[float]


class StepChoice(NamedTuple):
    """Limits for the next plan. The sampled tokens do not depend on them.

    Attributes:
        max_steps: maximum decode steps in one dispatch; with drafts, maximum rounds.
        num_drafts: number of tokens to draft by slot, if all rows are decoding; empty for a plan without drafts. If the
            drafts do not fit, the plan has one step.
        timing: times that decide how many prompt tokens fit before the next deadline; None without latency targets, or
            before any step was measured.
        may_split: True if a one-step plan without drafts may be split into two programs, so that rows waiting for the
            host (for a grammar's mask) do not delay the others.
        loads: times that decide which prefixes are loaded; None for the last ones, before the first ones any prefix.
        max_prefill_tokens: maximum prompt tokens alongside decoding rows; None for what deadlines and budget leave.
    """

    max_steps: int = 1
    num_drafts: Sequence[int] = ()
    timing: Timing | None = None
    may_split: bool = False
    loads: LoadCosts | None = None
    max_prefill_tokens: int | None = None


ONE_STEP = StepChoice()


class StepShape(NamedTuple):
    """Shape of a step, and key of the program that runs all steps fitting the shape.

    Attributes:
        num_tokens: length of the token axis; the number of rows if all rows are decoding.
        num_rounds: maximum number of rounds.
        has_drafts: True if rounds draft tokens.
        samples_late: True if model and sampling are separate programs.
    """

    num_tokens: int
    num_rounds: int = 1
    has_drafts: bool = False
    samples_late: bool = False

    def holds(self, step: StepShape) -> bool:
        """Return whether a program of this shape can run a step of shape `step`."""
        return self.num_tokens >= step.num_tokens and self.num_rounds >= step.num_rounds and self[2:] == step[2:]

    @property
    def name(self) -> str:
        """Name of the program in storage and logs."""
        if self.samples_late:
            return f"split {self.num_tokens}"
        if self.num_rounds == 1 and not self.has_drafts:
            return f"step {self.num_tokens}"
        return f"{'speculative' if self.has_drafts else 'multi-step'} {self.num_tokens} of {self.num_rounds}"


def cheapest(programs: Iterable[StepShape], step: StepShape) -> StepShape | None:
    """Return the smallest program that can run a step; None if there is none."""
    return min((program for program in programs if program.holds(step)), default=None)


class EncoderRun(NamedTuple):
    """An image that the vision tower encodes before a step, or a part of this work.

    Attributes:
        image: the image.
        rows: rows of the encoder cache that take its embeddings.
        layers: encoder layers [start, stop) to compute; none to prepare for the first. None if the image is encoded
            whole.
        is_last: True if the embeddings are complete.
    """

    image: PreparedImage
    rows: NDArray[np.int32]
    layers: tuple[int, int] | None = None
    is_last: bool = True


class PromptCompaction(NamedTuple):
    """A row whose prompt's best tokens are copied to fresh pages; see `Compaction`."""

    slot: int
    prompt_token_ids: TokenIds
    pages: list[int]
    """Pages that receive the copies."""


@dataclass(slots=True)
class StepPlan:
    """Work of one step: decoding rows first, then rows in prefill, then newly admitted ones.

    Decoding rows that were held back in favour of prompts, but got left-over budget, come last. With several shards,
    the rows of each shard have this order, one shard after another.

    A row computes the tokens [start, start + count) of one request. Rows are stored as columns: an object per row and
    step would cost more than everything else a decoding row needs, and many live objects trigger full garbage
    collections of 0.1 s or more.

    The device may do less than planned: a row computes nothing after a stop token sampled in an earlier plan. `starts`,
    `counts` and `max_new` are upper bounds, and their pages are allocated.

    Attributes:
        step_id: number of the plan, from 0.
        requests: one request per row, at least one; its `pages` hold all tokens that the row may compute.
        slots: device slot of each row.
        starts: tokens of each row computed before this step.
        counts: tokens that each row computes together, at least 1. All ids are known except possibly the last one,
            which may still be on the device.
        max_new: maximum tokens that each row may sample: 0 if the chunk does not reach the request's last token, 1 if
            it does, and more in a plan with several steps, which also computes each sampled token except the last.
        num_decode_tokens: tokens of rows that were already running and had exactly one token left.
        num_prefill_tokens: all other tokens.
        cached_tokens: tokens that admitted requests found in the prefix cache.
        num_sought_tokens: tokens of admitted requests that lower tiers, if there are any, were searched for.
        preempted: requests that lost their pages to older ones while this plan was made; none has a row.
        admitted: requests that start with this plan and need their device state set.
        grown: requests whose pages this plan extended; possibly repeated, also admitted, or preempted since.
        adapter_loads: LoRA adapters to load before the step, as (slot, digest).
        encoder_runs: images to encode before the step, in this order.
        copies: pages to copy before the step, as (source, target).
        compactions: rows whose prompts to compact before everything else.
        restored: rows that continue from a state snapshot, as (row, entry).
        snapshots: state snapshots to take, as (row, tokens of the row before it, entry). No row of the plan reads them.
        num_pages_used: pages owned by running requests after this plan.
        wants_logprobs: True if any row requests log probabilities.
        wants_prompt_logprobs: True if any row requests prompt log probabilities.
        num_steps: maximum rounds on the device; without drafts the largest `max_new`, at least 1.
        num_drafts: number of tokens to draft per row and round (a round may sample one more); empty in plans without
            drafts. All rows of a plan with drafts are decoding.
        num_uneven_tokens: padding tokens that give each shard as many tokens as the largest one, summed over
            data-parallel shards.
        is_split: True if model and sampling are separate programs, and sampling starts after earlier plans are updated.
            All rows of such a plan are decoding.
    """

    step_id: int
    requests: list[Request] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    max_new: list[int] = field(default_factory=list)
    num_decode_tokens: int = 0
    num_prefill_tokens: int = 0
    cached_tokens: CachedTokens = NO_CACHED_TOKENS
    num_sought_tokens: int = 0
    preempted: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    grown: list[Request] = field(default_factory=list)
    adapter_loads: list[tuple[int, str]] = field(default_factory=list)
    encoder_runs: list[EncoderRun] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    compactions: list[PromptCompaction] = field(default_factory=list)
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
        """Shape that the plan's program must hold."""
        if self.num_drafts:
            return StepShape(self.num_rows, self.num_steps, has_drafts=True)
        return StepShape(self.num_even_tokens, self.num_steps, samples_late=self.is_split)

    @property
    def num_rows(self) -> int:
        return len(self.requests)

    @property
    def num_cached_tokens(self) -> int:
        """Number of tokens that admitted requests found in the prefix cache, in any tier."""
        return self.cached_tokens.total

    @property
    def num_tokens(self) -> int:
        """Length of the token axis before padding."""
        return self.num_decode_tokens + self.num_prefill_tokens

    @property
    def num_even_tokens(self) -> int:
        """Length of the token axis before padding, if every shard had as many tokens as the largest."""
        return self.num_tokens + self.num_uneven_tokens

    @property
    def num_even_rows(self) -> int:
        """Number of rows in a decode batch, if every shard had as many as the largest."""
        return self.num_rows + self.num_uneven_tokens

    def digest(self, previous: int) -> int:
        """Return a checksum of all plans up to this one, given the checksum up to the previous one.

        Call it before the next plan is made, which may change the requests' pages.
        """
        pages = [page for request in self.admitted for page in request.pages]
        pages += [entry for request in self.grown for entry in (len(request.pages), *request.pages[-1:])]
        copies = [page for copy in self.copies for page in copy]
        states = [number for row in (*self.restored, *self.snapshots) for number in row]
        copies += [number for slot, _, pages in self.compactions for number in (slot, *pages)]
        loads = [slot for slot, _ in self.adapter_loads]
        for run in self.encoder_runs:
            loads += [zlib.crc32(run.image.digest), *(run.layers or ()), *run.rows.tolist()]
        rest = [int(self.is_split), len(copies), *copies, *states, *loads]
        for column in (self.slots, self.starts, self.counts, self.max_new, self.num_drafts, pages, rest):
            previous = zlib.crc32(array("q", column).tobytes(), previous)
        return previous


def wants_prompt_logprobs(request: Request, start: int) -> bool:
    """Return whether a row that begins at position `start` computes prompt log probabilities that its request wants.

    Only one of a user request's samples computes them.
    """
    return (
        request.params.prompt_logprobs is not None
        and not request.read_prefix_cache
        and start + 1 < request.num_prompt_tokens
    )
