"""StepPlan -> StepUpload: the only place where a Python list becomes an array.

What the device needs of a step travels as one int32 blob: which slots take part, how many tokens each computes, prompt
ids, and the pages that rows got. All else lies on the device by slot. `BlobLayout` says where each field lies; the host
writes through numpy views, the device reads through slices of the same layout. The size of a blob does not depend on
max_model_len.

Masks of rows with a constraint travel in blobs of their own, `MaskLayout`, where they differ from what the slot has.

A request enters its slot by an `Admission`, a blob of its own in front of the step's. It carries the pages, too, that
a step has no room for: those that an admission found in the prefix cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, no_type_check

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Int, UInt

from jaxserve.kv_cache.groups import RELEASED
from jaxserve.request import Request, RequestStatus
from jaxserve.sampling import RECORD_WORDS, SlotRow, mask_size, pack_mask, pack_records
from jaxserve.sampling_params import (
    DEFAULT_MAX_LOGPROBS,
    MAX_BAD_SEQUENCE_TOKENS,
    MAX_BAD_SEQUENCES,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
)
from jaxserve.schedule_config import ScheduleConfig
from jaxserve.scheduling.plan import PlanKind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from jaxserve.scheduling.plan import StepPlan

MAX_EOS_IDS = 64
MAX_STOP_IDS = MAX_EOS_IDS + MAX_STOP_TOKEN_IDS  # most stop ids of one request
ADMITTED_STOP_IDS = 8  # stop ids that an admission carries; a request with more takes a SlotRow
ADMISSION_ROWS = 64  # requests per admission blob
ADMISSION_PAGES = 2048  # pages per admission blob
MASK_ROWS = 16  # masks per blob

_INT, _FLOAT = np.dtype(np.int32), np.dtype(np.float32)


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

    def unpack(self, blob: Int[Array, " words"]) -> dict[str, Array]:
        """Return the fields on the device."""
        return {name: blob[where].reshape(shape) for name, where, shape in self.slices}

    def unpack_rows(self, blob: Int[Array, " words"], name: str) -> list[Array]:
        """Return the rows of a field on the device; for each one that `unpack` has, XLA would read the whole field."""
        where, (num_rows, size) = next((where, shape) for each, where, shape in self.slices if each == name)
        return [blob[where.start + row * size : where.start + (row + 1) * size] for row in range(num_rows)]


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
    def of(cls, config: ScheduleConfig, bucket: int, *, is_speculative: bool = False) -> BatchLayout:
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

    @property
    def blob_size(self) -> int:
        """Length of the blob in 4-byte words."""
        return self.blob.size

    def unpack(self, blob: Int[Array, " words"]) -> StepBatch:
        """Return the fields on the device, floats by their bits."""
        columns: dict[str, Any] = self.blob.unpack(blob)
        columns["base_seed"] = lax.bitcast_convert_type(columns["base_seed"], np.dtype(np.uint32))
        kind = SpeculativeBatch if self.is_speculative else StateBatch if self.has_states else StepBatch
        del columns["pages"]
        return kind(new_pages=PageEntries(*self.blob.unpack_rows(blob, "pages")), **columns)


@no_type_check  # rebuilt around shapes and placeholders too, as every pytree is
@struct.dataclass
class Admission:
    """Requests that enter their slots, A at most, and entries of the page table. A slot out of range pads.

    Attributes:
        slot: the slot of each request.
        start: tokens that it found in the prefix cache.
        max_len: tokens at which its sequence ends.
        records: words of SAMPLING_RECORD.
        stop_ids: the first of its stop ids; -1 pads.
        new_pages: pages that rows got.
    """

    slot: Int[Array, " A"]
    start: Int[Array, " A"]
    max_len: Int[Array, " A"]
    records: Int[Array, "A words"]
    stop_ids: Int[Array, "A 8"]
    new_pages: PageEntries


@dataclass(frozen=True)
class AdmissionLayout:
    """Shapes of an admission: A requests and E page-table entries at most."""

    num_rows: int
    num_new_pages: int
    num_slots: int

    @classmethod
    def of(cls, config: ScheduleConfig) -> AdmissionLayout:
        """Return the layout for these sizes."""
        most_pages = config.max_num_seqs * config.max_pages_per_row * config.kv_groups.size
        return cls(min(config.max_num_seqs, ADMISSION_ROWS), min(most_pages, ADMISSION_PAGES), config.max_num_seqs)

    @cached_property
    def blob(self) -> BlobLayout:
        """The layout of the blob."""
        return BlobLayout(
            (
                ("slot", (self.num_rows,), self.num_slots),
                *((name, (self.num_rows,), 0) for name in ("start", "max_len")),
                ("records", (self.num_rows, RECORD_WORDS), 0),
                ("stop_ids", (self.num_rows, ADMITTED_STOP_IDS), -1),
                _page_field(self.num_new_pages),
            )
        )

    def unpack(self, blob: Int[Array, " words"]) -> Admission:
        """Return the fields on the device."""
        columns: dict[str, Any] = self.blob.unpack(blob)
        del columns["pages"]
        return Admission(new_pages=PageEntries(*self.blob.unpack_rows(blob, "pages")), **columns)


@dataclass(frozen=True)
class MaskLayout:
    """Shapes of masks that are sent together: N slots, and the bits of W words each. A slot out of range pads."""

    num_rows: int
    num_words: int
    num_slots: int

    @classmethod
    def of(cls, config: ScheduleConfig, vocab_size: int) -> MaskLayout:
        """Return the layout for these sizes."""
        return cls(min(config.max_num_seqs, MASK_ROWS), mask_size(vocab_size), config.max_num_seqs)

    @cached_property
    def blob(self) -> BlobLayout:
        """The layout of the blob."""
        return BlobLayout((("slot", (self.num_rows,), self.num_slots), ("words", (self.num_rows, self.num_words), 0)))


@dataclass(frozen=True)
class CopyLayout:
    """Shapes of copies that are made together, E of them. A target out of range pads."""

    num_copies: int
    num_pages: int

    @classmethod
    def of(cls, config: ScheduleConfig) -> CopyLayout:
        """Return the layout for these sizes."""
        return cls(min(config.max_num_seqs, ADMISSION_ROWS) * config.kv_groups.size, config.num_pages)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of a blob: sources, and targets."""
        return 2, self.num_copies

    def blobs(self, copies: Sequence[tuple[int, int]]) -> Iterator[NDArray[np.int32]]:
        """Yield the blobs of some copies."""
        for first in range(0, len(copies), self.num_copies):
            some = copies[first : first + self.num_copies]
            blob = np.full(self.shape, self.num_pages, _INT)
            blob[:, : len(some)] = np.array(some, _INT).T
            yield blob


def _page_field(num_pages: int) -> tuple[str, tuple[int, ...], int]:
    return "pages", (len(fields(PageEntries)), num_pages), np.iinfo(_INT).max  # out of range


class StepUpload(NamedTuple):
    """Host arrays of one plan, in this order; new arrays each time, as the device may read them later.

    Attributes:
        admissions: blobs of `Admission`; none in most steps.
        slot_rows: slots whose requests need more than an admission carries, with what that is.
        masks: blobs of masks by `MaskLayout`; none in most steps.
        blob: blob of `StepBatch`.
        copies: blobs of `CopyLayout`, for before the step; none in most steps.
    """

    admissions: Sequence[NDArray[np.int32]]
    slot_rows: Sequence[tuple[int, SlotRow]]
    masks: Sequence[NDArray[np.int32]]
    blob: NDArray[np.int32]
    copies: Sequence[NDArray[np.int32]] = ()


class BatchPacker:
    """Packs plans, and knows which pages of each slot the device has been sent.

    A row in decode costs no Python beyond its entries in the columns of the plan.
    """

    def __init__(self, config: ScheduleConfig, base_seed: int, vocab_size: int) -> None:
        self.config = config
        self._vocab_size = vocab_size
        self._base_seed = np.uint32(base_seed).view(np.int32)
        self.layouts = {bucket: BatchLayout.of(config, bucket) for bucket in config.buckets()}
        self._speculative_layouts = {
            bucket: BatchLayout.of(config, bucket, is_speculative=True) for bucket in config.speculative_buckets()
        }
        self._admission = AdmissionLayout.of(config)
        self._masks = MaskLayout.of(config, vocab_size)
        self._copies = CopyLayout.of(config)
        self._constrained: dict[int, Request] = {}  # rows with a constraint, by slot
        self._sent_masks: dict[int, NDArray[np.int32]] = {}  # masks by slot
        self._ones = np.ones(config.max_num_seqs, _INT)
        self._num_pages = [0] * config.max_num_seqs  # page-table entries sent so far, by slot
        self._has_sampled = np.zeros(config.max_num_seqs, bool)  # the slot's last row: the history has its next token

    def num_rows(self, bucket: int) -> int:
        """Return the rows of a bucket, padding included."""
        return self.layouts[bucket].num_rows

    def pack(self, plan: StepPlan, bucket: int) -> StepUpload:
        """Lay out `plan`, padded to `bucket` tokens. To be called once per plan, in order."""
        layout = self._speculative_layouts[bucket] if plan.num_drafts else self.layouts[bucket]
        for request in plan.admitted:
            self._num_pages[request.slot] = 0
            self._has_sampled[request.slot] = False
            self._sent_masks.pop(request.slot, None)
            self._constrained.pop(request.slot, None)
            if request.constraint is not None:
                self._constrained[request.slot] = request
        blob, to = layout.blob.new()
        new_pages = self._new_pages(plan)
        num_new_pages = min(new_pages.shape[1], layout.num_new_pages)
        to["pages"][:, :num_new_pages] = new_pages[:, :num_new_pages]
        num_rows, is_decode = plan.num_rows, not plan.num_prefill_tokens
        slots = np.array(plan.slots, np.intp)  # naming the dtype takes a third of the time that finding it does
        counts = self._ones[:num_rows] if is_decode else np.array(plan.counts, _INT)
        max_new = counts if is_decode and plan.kind is PlanKind.STEP else np.array(plan.max_new, _INT)
        to["base_seed"][0], to["num_rows"][0], to["wants_logprobs"][0] = self._base_seed, num_rows, plan.wants_logprobs
        to["cu_q_lens"][num_rows + 1 :] = plan.num_tokens
        np.add.accumulate(counts, out=to["cu_q_lens"][1 : num_rows + 1])
        to["slot"][:num_rows] = slots
        to["max_new"][:num_rows] = max_new
        if plan.num_drafts:
            to["num_rounds"][0] = plan.num_steps
            to["num_drafts"][:num_rows] = plan.num_drafts
        if layout.has_states:
            to["source"][:num_rows] = slots
            for row, entry in plan.restored:
                to["source"][row] = self.config.max_num_seqs + entry
            for row, kept_len, entry in plan.snapshots:
                to["kept_len"][row], to["kept"][row] = kept_len, self.config.max_num_seqs + entry
        sent = ~self._has_sampled[slots]
        if not is_decode:
            sent |= counts > 1  # tokens that were not sampled follow the one that was
        for row in sent.nonzero()[0].tolist():
            start, count, end = plan.starts[row], plan.counts[row], to["cu_q_lens"][row + 1]
            to["token_ids"][end - count : end] = plan.requests[row].tokens(start, start + count)
        self._has_sampled[slots] = max_new > 0
        if plan.wants_prompt_logprobs:
            to["wants_prompt_logprobs"][0] = 1
            stops = [start + count for start, count in zip(plan.starts, plan.counts, strict=True)]
            to["next_ids"][:num_rows] = list(map(_next_id, plan.requests, stops))
        admissions = list(self._admissions(plan, new_pages[:, num_new_pages:]))
        masks = () if plan.is_split else list(self.masks(plan))
        return StepUpload(admissions, list(self._slot_rows(plan)), masks, blob, list(self._copies.blobs(plan.copies)))

    def _new_pages(self, plan: StepPlan) -> NDArray[np.int32]:
        """Return rows and columns of the page table, and their pages, that the device lacks, of admissions last."""
        entries: list[int] = []
        admitted, num_groups = set(plan.admitted), self.config.kv_groups.size
        for request in (*(r for r in plan.grown if r not in admitted), *plan.admitted):
            slot, pages = request.slot, request.pages
            if slot < 0:  # grown, then preempted for an older one
                continue
            for index in range(self._num_pages[slot], len(pages)):
                if pages[index] != RELEASED:
                    entries += slot, index, pages[index]
            self._num_pages[slot] = len(pages)
        new_pages = np.array(entries, _INT).reshape(-1, 3).T
        if num_groups > 1:
            new_pages[1], groups = np.divmod(new_pages[1], num_groups)
            new_pages[0] = new_pages[0] * num_groups + groups
        return new_pages

    def _admissions(self, plan: StepPlan, new_pages: NDArray[np.int32]) -> Iterator[NDArray[np.int32]]:
        layout, admitted = self._admission, plan.admitted
        start_of = dict(zip(plan.requests, plan.starts, strict=True)) if admitted else {}
        while admitted or new_pages.size:
            blob, to = layout.blob.new()
            now, admitted = admitted[: layout.num_rows], admitted[layout.num_rows :]
            for row, request in enumerate(now):
                to["slot"][row] = request.slot
                to["start"][row] = start_of[request]
                to["max_len"][row] = request.max_total_tokens
                stop_ids = sorted(request.stop_ids)[:ADMITTED_STOP_IDS]
                to["stop_ids"][row, : len(stop_ids)] = stop_ids
            to["records"][: len(now)] = pack_records(now)
            pages, new_pages = new_pages[:, : layout.num_new_pages], new_pages[:, layout.num_new_pages :]
            to["pages"][:, : pages.shape[1]] = pages
            yield blob

    def _slot_rows(self, plan: StepPlan) -> Iterator[tuple[int, SlotRow]]:
        start_of = dict(zip(plan.requests, plan.starts, strict=True)) if self.config.max_drafts else {}
        for request in plan.admitted:
            p = request.params
            is_plain = not (p.has_penalties or request.changes_logits or p.min_tokens)
            # Proposers read the whole history, to which steps write only the tokens that they compute.
            if not is_plain or len(request.stop_ids) > ADMITTED_STOP_IDS or start_of.get(request):
                yield request.slot, self._slot_row(request)

    def masks(self, plan: StepPlan) -> Iterator[NDArray[np.int32]]:
        """Return blobs of the masks of rows that sample which their slots do not have yet.

        `pack` calls it, but not for a split plan: to be called when the tokens before the plan have been read.
        """
        if not self._constrained:
            return
        for slot, request in list(self._constrained.items()):
            if request.status is RequestStatus.FINISHED:
                del self._constrained[slot]
        changed: list[tuple[int, NDArray[np.int32]]] = []
        for row, request in enumerate(plan.requests):
            if request.constraint is None or not plan.max_new[row] or request.status is RequestStatus.FINISHED:
                continue
            slot, words = plan.slots[row], request.constraint.words
            sent = self._sent_masks.get(slot)
            if sent is not words:  # comparing them takes longer than sending one
                self._sent_masks[slot] = words
                changed.append((slot, words))
        layout = self._masks
        for first in range(0, len(changed), layout.num_rows):
            blob, to = layout.blob.new()
            for index, (slot, words) in enumerate(changed[first : first + layout.num_rows]):
                to["slot"][index] = slot
                to["words"][index, : len(words)] = words
            yield blob

    def no_masks(self) -> NDArray[np.int32]:
        """Return a blob of no masks."""
        return self._masks.blob.new()[0]

    def _slot_row(self, request: Request) -> SlotRow:
        """Return what the device must know of a request beyond its admission."""
        p = request.params
        bias = p.logit_bias or {}
        bad_words = np.full((MAX_BAD_SEQUENCES, MAX_BAD_SEQUENCE_TOKENS), -1, _INT)
        for word, token_ids in zip(bad_words, request.bad_sequences, strict=False):
            word[-len(token_ids) :] = token_ids
        known = request.tokens(0, request.num_known_tokens)
        row: dict[str, Any] = {
            "token_ids": _padded(known, self.config.max_model_len, -1, _INT),
            "prompt_len": np.int32(request.num_prompt_tokens),
            "allowed": pack_mask(p.allowed_token_ids, self._vocab_size),
            "bad_words": bad_words,
            "bias_ids": _padded(list(bias), MAX_LOGIT_BIAS, -1, _INT),
            "bias_values": _padded(list(bias.values()), MAX_LOGIT_BIAS, 0, _FLOAT),
            "stop_ids": _padded(sorted(request.stop_ids), MAX_STOP_IDS, -1, _INT),
        }
        return SlotRow(**row)


def _next_id(request: Request, position: int) -> int:
    prompt = request.prompt_token_ids
    return prompt[position] if position < len(prompt) else 0


def _padded(values: list[Any], size: int, fill: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    row = np.full(size, fill, dtype)
    row[: len(values)] = values
    return row
