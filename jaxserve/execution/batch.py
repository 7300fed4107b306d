"""Layouts of what the device needs of a step, on the host and on the device.

All of it travels as one int32 blob: which slots take part, how many tokens each computes, prompt ids, and the pages
that rows got. All else lies on the device by slot. `BlobLayout` says where each field lies; the host writes through
numpy views, the device reads through slices of the same layout. The size of a blob does not depend on max_model_len.

Masks of rows with a constraint travel in blobs of their own where they differ from what the slot has.

A request enters its slot by an `Admission`, a blob of its own in front of the step's. It carries the pages, too, that
a step has no room for: those that an admission found in the prefix cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, no_type_check

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Int, UInt

from jaxserve.api.sampling_params import DEFAULT_MAX_LOGPROBS, MAX_STOP_TOKEN_IDS
from jaxserve.execution.sampling import RECORD_WORDS, mask_size
from jaxserve.scheduling.schedule_config import ScheduleConfig

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_EOS_IDS = 64
MAX_STOP_IDS = MAX_EOS_IDS + MAX_STOP_TOKEN_IDS  # most stop ids of one request
ADMITTED_STOP_IDS = 8  # stop ids that an admission carries; a request with more takes a SlotRow
ADMISSION_ROWS = 64  # requests per admission blob
ADMISSION_PAGES = 2048  # pages per admission blob
MASK_ROWS = 16  # masks per blob

PAGES = "pages"  # field of entries of the page table

_INT = np.dtype(np.int32)


@dataclass(frozen=True)
class BlobLayout:
    """Positions of each field in a blob.

    Attributes:
        fields: name, shape and padding of each field, in order.
    """

    fields: tuple[tuple[str, tuple[int, ...], int], ...]

    @cached_property
    def slices(self) -> tuple[tuple[str, slice, tuple[int, ...]], ...]:
        """Name, place and shape of each field."""
        start, slices = 0, []
        for name, shape, _ in self.fields:
            size = math.prod(shape)
            slices.append((name, slice(start, start + size), shape))
            start += size
        return tuple(slices)

    @property
    def size(self) -> int:
        """Length of the blob in 4-byte words."""
        return self.slices[-1][1].stop

    @cached_property
    def _padding(self) -> NDArray[np.int32]:
        return np.concatenate([np.full(math.prod(shape), padding, np.int32) for _, shape, padding in self.fields])

    def new(self) -> tuple[NDArray[np.int32], dict[str, NDArray[np.int32]]]:
        """Return a blob of padding, and writable views of its fields."""
        blob = self._padding.copy()
        return blob, self.views(blob)

    def views(self, blob: NDArray[np.int32]) -> dict[str, NDArray[np.int32]]:
        """Return writable views of the fields; a scalar has one dimension, of one element."""
        views = {name: blob[where] for name, where, _ in self.slices}
        for name, shape in self._matrices:
            views[name] = views[name].reshape(shape)
        return views

    @cached_property
    def _matrices(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        return tuple((name, shape) for name, _, shape in self.slices if len(shape) > 1)

    def unpack(self, blob: Int[Array, " words"]) -> dict[str, Any]:
        """Return the fields on the device; pages as entries: for each row of a matrix, XLA would read all of it."""
        found: dict[str, Any] = {}
        for name, where, shape in self.slices:
            if name == PAGES:
                starts = range(where.start, where.stop, shape[1])
                found["new_pages"] = PageEntries(*(blob[start : start + shape[1]] for start in starts))
            else:
                found[name] = blob[where].reshape(shape)
        return found


@no_type_check  # rebuilt around shapes and placeholders too, as every pytree is
@struct.dataclass
class PageEntries:
    """Entries of the page table to be set. A row out of range pads."""

    row: Int[Array, " E"]
    column: Int[Array, " E"]
    page: Int[Array, " E"]


@no_type_check  # rebuilt around shapes and placeholders too, as every pytree is
@struct.dataclass
class StepBatch:
    """One step's inputs on the device. Rows from `num_rows` on and tokens from `cu_q_lens[num_rows]` on are padding.

    A row whose sequence has stopped is one of no tokens, whatever the host planned for it.

    Attributes:
        base_seed: seed of the engine.
        num_rows: rows of the plan.
        wants_logprobs: True if any row asked for them.
        wants_prompt_logprobs: True if any row asked for them.
        token_ids: ids that the host sends; -1 for those that the history has.
        cu_q_lens: tokens planned for the first round, summed up.
        slot: the slot of each row.
        max_new: tokens that each row may sample, one per round; 0 for a chunk that does not reach the end of its
            sequence.
        next_ids: the known token after each row's last one (prompt logprobs across chunks), else 0.
        new_pages: pages that rows got.
    """

    base_seed: UInt[Array, ""]
    num_rows: Int[Array, ""]
    wants_logprobs: Int[Array, ""]
    wants_prompt_logprobs: Int[Array, ""]
    token_ids: Int[Array, " T"]
    cu_q_lens: Int[Array, " R1"]
    slot: Int[Array, " R"]
    max_new: Int[Array, " R"]
    next_ids: Int[Array, " R"]
    new_pages: PageEntries

    @property
    def is_row(self) -> Bool[Array, " R"]:
        """Mask of rows that are not padding."""
        return jnp.arange(self.slot.shape[0]) < self.num_rows


@no_type_check  # rebuilt around shapes and placeholders too, as every pytree is
@struct.dataclass
class StateBatch(StepBatch):
    """Inputs of a step of a model whose layers keep states; entries are those of the pool of states.

    Attributes:
        source: entry that the state of each row is read from: a snapshot's, or the slot's own.
        kept_len: tokens of each row after which a snapshot is taken; 0 for none.
        kept: entry of that snapshot.
    """

    source: Int[Array, " R"]
    kept_len: Int[Array, " R"]
    kept: Int[Array, " R"]


@no_type_check  # rebuilt around shapes and placeholders too, as every pytree is
@struct.dataclass
class SpeculativeBatch(StepBatch):
    """Inputs of a step whose rows, all of them in decode, may go several rounds with drafted tokens.

    Attributes:
        num_rounds: rounds that the step goes at most.
        num_drafts: tokens to draft for each row in each round.
    """

    num_rounds: Int[Array, ""]
    num_drafts: Int[Array, " R"]


@dataclass(frozen=True)
class BatchLayout:
    """Shapes of one bucket: T tokens, R rows, E new pages, and log probabilities per token that is asked for."""

    num_tokens: int
    num_rows: int
    num_new_pages: int
    max_logprobs: int = DEFAULT_MAX_LOGPROBS  # -1 is the whole vocabulary
    is_speculative: bool = False
    has_states: bool = False

    @classmethod
    def from_config(cls, config: ScheduleConfig, bucket: int, *, is_speculative: bool = False) -> BatchLayout:
        """Return the layout of a token bucket.

        Each row may begin a page, and the tokens fill some more. There are two at least: XLA copies the page table to
        set a single entry, as it does not for a scatter of more.
        """
        num_rows = config.num_rows(bucket)
        num_columns = num_rows + bucket // config.page_size
        num_new_pages = max(num_columns * config.kv_groups.size, 2)
        sizes = (bucket, num_rows, num_new_pages, config.max_logprobs)
        return cls(*sizes, is_speculative, config.num_snapshots is not None)

    def num_logprob_steps(self, max_steps: int) -> int:
        """Steps of a dispatch that send log probabilities: of a whole vocabulary, room for all would be too much."""
        return max_steps if self.max_logprobs >= 0 else 1

    @cached_property
    def blob(self) -> BlobLayout:
        """The layout of the blob."""
        scalars = ["base_seed", "num_rows", "wants_logprobs", "wants_prompt_logprobs"]
        rows = ["slot", "max_new", "next_ids"]
        if self.is_speculative:
            scalars.append("num_rounds")
            rows.append("num_drafts")
        if self.has_states:
            rows += ["source", "kept_len", "kept"]
        return BlobLayout(
            (
                *((name, (), 0) for name in scalars),
                ("token_ids", (self.num_tokens,), -1),
                ("cu_q_lens", (self.num_rows + 1,), 0),
                *((name, (self.num_rows,), 0) for name in rows),
                _page_field(self.num_new_pages),
            )
        )

    def unpack(self, blob: Int[Array, " words"]) -> StepBatch:
        """Return the fields on the device."""
        columns = self.blob.unpack(blob)
        columns["base_seed"] = lax.bitcast_convert_type(columns["base_seed"], np.dtype(np.uint32))
        kind = SpeculativeBatch if self.is_speculative else StateBatch if self.has_states else StepBatch
        return kind(**columns)


@no_type_check  # rebuilt around shapes and placeholders too, as every pytree is
@struct.dataclass
class Admission:
    """Requests that enter their slots, A at most, and entries of the page table. A slot out of range pads.

    Attributes:
        slot: the slot of each request.
        start: tokens that it found in the prefix cache.
        end_position: position at which its sequence ends.
        position_offset: difference of a token's position from the number of tokens before it.
        cache_offset: difference of the number of cached tokens from that of all; 0 or less; 0 in models with windows,
            which count cached tokens.
        records: words of SAMPLING_RECORD.
        stop_ids: the first of its stop ids; -1 pads.
        new_pages: pages that rows got.
    """

    slot: Int[Array, " A"]
    start: Int[Array, " A"]
    end_position: Int[Array, " A"]
    position_offset: Int[Array, " A"]
    cache_offset: Int[Array, " A"]
    records: Int[Array, "A words"]
    stop_ids: Int[Array, "A 8"]
    new_pages: PageEntries


def admission_layout(config: ScheduleConfig) -> BlobLayout:
    """Return the layout of an `Admission`."""
    num_rows = min(config.max_num_seqs, ADMISSION_ROWS)
    max_pages = config.max_num_seqs * config.max_pages_per_row * config.kv_groups.size
    return BlobLayout(
        (
            ("slot", (num_rows,), config.max_num_seqs),
            *((name, (num_rows,), 0) for name in ("start", "end_position", "position_offset", "cache_offset")),
            ("records", (num_rows, RECORD_WORDS), 0),
            ("stop_ids", (num_rows, ADMITTED_STOP_IDS), -1),
            _page_field(min(max_pages, ADMISSION_PAGES)),
        )
    )


def mask_layout(config: ScheduleConfig, vocab_size: int) -> BlobLayout:
    """Return the layout of masks that are sent together: slots, and the bits of each. A slot out of range pads."""
    num_rows, num_words = min(config.max_num_seqs, MASK_ROWS), mask_size(vocab_size)
    return BlobLayout((("slot", (num_rows,), config.max_num_seqs), ("words", (num_rows, num_words), 0)))


def num_copies(config: ScheduleConfig) -> int:
    """Return E, the copies of pages that are made together: sources and targets. A target out of range pads."""
    return min(config.max_num_seqs, ADMISSION_ROWS) * config.kv_groups.size


def _page_field(num_pages: int) -> tuple[str, tuple[int, ...], int]:
    return PAGES, (len(fields(PageEntries)), num_pages), np.iinfo(_INT).max  # out of range
