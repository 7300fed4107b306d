"""StepPlan -> StepBatch: the only place where a Python list becomes an array.

A step's integers and floats travel as one int32 blob. `BatchLayout` says where each field lies in it; the host writes
through numpy views, the device reads through slices of the same layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, no_type_check

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Int, UInt

from jaxserve.config import ScheduleConfig
from jaxserve.request import (
    DEFAULT_MAX_LOGPROBS,
    MAX_BAD_SEQUENCE_TOKENS,
    MAX_BAD_SEQUENCES,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    Request,
)
from jaxserve.sampling import SAMPLING_FIELDS, SamplingRows, SlotRow, pack_mask, record_column

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from jaxserve.engine.plan import StepPlan

MAX_EOS_IDS = 64
MAX_STOP_IDS = MAX_EOS_IDS + MAX_STOP_TOKEN_IDS  # that end one request
NUM_BURST_STOP_IDS = 8  # that end a burst too; of a request with more, the host finds the others after the burst

_INT, _UINT, _FLOAT = np.dtype(np.int32), np.dtype(np.uint32), np.dtype(np.float32)

# What is fixed while a request runs: one record per slot, gathered by slot into each step's blob.
SLOT_RECORD = np.dtype([*SAMPLING_FIELDS, ("stop_ids", _INT, (NUM_BURST_STOP_IDS,))])


@no_type_check  # rebuilt around shapes and placeholders too, as every pytree is
@struct.dataclass
class StepBatch:
    """One step's inputs on the device. Rows from `num_rows` on and tokens from `cu_q_lens[num_rows]` on are padding."""

    base_seed: UInt[Array, ""]
    num_rows: Int[Array, ""]
    wants_logprobs: Int[Array, ""]  # whether any row asked for logprobs
    wants_prompt_logprobs: Int[Array, ""]
    num_steps: Int[Array, ""]  # of a burst, at most
    follows_burst: Int[Array, ""]  # whether this burst runs only if the one before ran all its steps
    token_ids: Int[Array, " T"]  # -1: sampled by an earlier step and not yet seen by the host
    cu_q_lens: Int[Array, " R1"]
    kv_lens: Int[Array, " R"]  # including this step's tokens
    samples: Int[Array, " R"]  # whether the row's last token ends its sequence so far
    next_ids: Int[Array, " R"]  # the known token after the row's last one (prompt logprobs across chunks), else 0
    page_table: Int[Array, "R M"]
    records: Int[Array, "R words"]  # of SLOT_RECORD

    @property
    def slot(self) -> Int[Array, " R"]:
        """The rows' entries in the tables by slot."""
        return record_column(self.records, SLOT_RECORD, "slot")

    @property
    def stop_ids(self) -> Int[Array, "R 8"]:
        """Ids that end a burst; -1 pads."""
        return record_column(self.records, SLOT_RECORD, "stop_ids")

    @property
    def live(self) -> Bool[Array, " R"]:
        """Mask of rows that sample a token."""
        return (jnp.arange(self.samples.shape[0]) < self.num_rows) & (self.samples > 0)

    @property
    def sampling(self) -> SamplingRows:
        """The rows as sampling sees them."""
        return SamplingRows(self.records, position=self.kv_lens, live=self.live)


@dataclass(frozen=True)
class BatchLayout:
    """Shapes of one bucket: T tokens, R rows, M pages per row, and log probabilities per token that is asked for."""

    num_tokens: int
    num_rows: int
    num_pages: int
    max_logprobs: int = DEFAULT_MAX_LOGPROBS  # -1 is the whole vocabulary

    @classmethod
    def of(cls, config: ScheduleConfig, bucket: int) -> BatchLayout:
        """The layout of a token bucket."""
        return cls(bucket, config.num_rows(bucket), config.max_pages_per_row, config.max_logprobs)

    def num_logprob_steps(self, max_steps: int) -> int:
        """Steps of a dispatch that send log probabilities: of a whole vocabulary, room for all would be too much."""
        return max_steps if self.max_logprobs >= 0 else 1

    def _fields(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        scalars = ("base_seed", "num_rows", "wants_logprobs", "wants_prompt_logprobs", "num_steps", "follows_burst")
        yield from ((name, ()) for name in scalars)
        yield "token_ids", (self.num_tokens,)
        yield "cu_q_lens", (self.num_rows + 1,)
        yield from ((name, (self.num_rows,)) for name in ("kv_lens", "samples", "next_ids"))
        yield "page_table", (self.num_rows, self.num_pages)
        yield "records", (self.num_rows, SLOT_RECORD.itemsize // 4)

    @cached_property
    def slices(self) -> tuple[tuple[str, slice, tuple[int, ...]], ...]:
        """Where each field lies in the blob."""
        start, slices = 0, []
        for name, shape in self._fields():
            size = math.prod(shape)
            slices.append((name, slice(start, start + size), shape))
            start += size
        return tuple(slices)

    @property
    def blob_size(self) -> int:
        """Length of the blob in 4-byte words."""
        return self.slices[-1][1].stop

    def views(self, blob: NDArray[np.int32]) -> dict[str, NDArray[np.int32]]:
        """Writable numpy views of the fields."""
        return {name: blob[where].reshape(shape) for name, where, shape in self.slices}

    def unpack(self, blob: Int[Array, " words"]) -> StepBatch:
        """The fields on the device, floats by their bits."""
        fields: dict[str, Any] = {name: blob[where].reshape(shape) for name, where, shape in self.slices}
        fields["base_seed"] = lax.bitcast_convert_type(fields["base_seed"], _UINT)
        return StepBatch(**fields)


class StepWork(NamedTuple):
    """What a packed step or burst computes."""

    start: NDArray[np.int64]  # [R], of a burst [steps, R]: tokens before those computed
    num_tokens: NDArray[np.int64]  # [R]: computed, in each step
    num_slack_tokens: int  # positions of all rows' last pages that nothing is in after the last step


class BatchPacker:
    """Keeps one record and one page-table row per slot, and packs plans from them.

    A row in decode costs no Python beyond its tuple: all else is gathered by slot.
    """

    def __init__(self, config: ScheduleConfig, base_seed: int, vocab_size: int) -> None:
        self.config = config
        self._vocab_size = vocab_size
        self._base_seed = np.uint32(base_seed).view(np.int32)
        self.layouts = {bucket: BatchLayout.of(config, bucket) for bucket in config.buckets()}
        self._records = np.zeros(config.max_num_seqs, SLOT_RECORD)
        self._record_words = self._records.view(np.int32).reshape(config.max_num_seqs, -1)
        self._pages = np.zeros((config.max_num_seqs, config.max_pages_per_row), np.int32)
        self._num_pages = [0] * config.max_num_seqs  # entries of each slot's row that are up to date
        # Position of the token that the slot's last row sampled: the device has it, whether or not the host has. If a
        # burst ended early, the next row starts before it.
        self._sampled_at = np.full(config.max_num_seqs, -1)

    def pack(self, plan: StepPlan, bucket: int) -> NDArray[np.int32]:
        """The blob of `plan`, padded to `bucket` tokens. A new array each time: the device may read it later."""
        self._sync_slots(plan)
        slots = np.array(plan.slots, np.int64)  # in a third of the time that a found dtype takes
        starts, counts = np.array(plan.starts, np.int64), np.array(plan.counts, np.int64)
        samples = np.array(plan.samples)
        num_rows, stops = plan.num_rows, starts + counts
        blob = np.zeros(self.layouts[bucket].blob_size, np.int32)
        to = self.layouts[bucket].views(blob)
        to["base_seed"][...] = self._base_seed
        to["num_rows"][...] = num_rows
        to["wants_logprobs"][...] = plan.wants_logprobs
        to["num_steps"][...] = plan.num_steps
        to["follows_burst"][...] = plan.follows_burst
        to["cu_q_lens"][num_rows + 1 :] = plan.num_tokens
        np.cumsum(counts, out=to["cu_q_lens"][1 : num_rows + 1])
        to["kv_lens"][:num_rows] = stops
        to["samples"][:num_rows] = samples
        self._pages.take(slots, axis=0, out=to["page_table"][:num_rows], mode="clip")
        self._record_words.take(slots, axis=0, out=to["records"][:num_rows], mode="clip")
        to["token_ids"][: plan.num_tokens] = -1
        for row in np.flatnonzero(self._sampled_at[slots] != starts).tolist():
            end, start, stop = to["cu_q_lens"][row + 1], int(starts[row]), int(stops[row])
            to["token_ids"][end - (stop - start) : end] = plan.requests[row].tokens(start, stop)
        self._sampled_at[slots] = np.where(samples, stops + (plan.num_steps - 1), -1)
        if plan.wants_prompt_logprobs:
            to["wants_prompt_logprobs"][...] = 1
            to["next_ids"][:num_rows] = list(map(_next_id, plan.requests, stops.tolist()))
        return blob

    def work(self, blob: NDArray[np.int32], bucket: int, num_steps: int = 1) -> StepWork:
        """What `num_steps` steps of a packed plan ask of the device."""
        fields = self.layouts[bucket].views(blob)
        num_rows = int(fields["num_rows"])
        num_tokens = np.diff(fields["cu_q_lens"][: num_rows + 1]).astype(np.int64)
        stop = fields["kv_lens"][:num_rows].astype(np.int64)
        last = stop + (num_steps - 1)
        if num_steps != 1:
            stop = stop + np.arange(num_steps)[:, None]  # [steps, R]
        return StepWork(stop - num_tokens, num_tokens, int((-last % self.config.page_size).sum()))

    def pack_slot(self, request: Request) -> SlotRow | None:
        """What the device must know of an admitted request beyond its row; None is the usual case."""
        p = request.params
        if not (p.has_penalties or p.changes_logits or p.min_tokens):
            return None
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

    def _sync_slots(self, plan: StepPlan) -> None:
        for request in plan.admitted:
            self._records[request.slot] = _slot_record(request)
            self._num_pages[request.slot] = 0
            self._sampled_at[request.slot] = -1
            self._sync_pages(request)
        for request in plan.grown:
            self._sync_pages(request)

    def _sync_pages(self, request: Request) -> None:
        slot, need = request.slot, len(request.pages)
        if slot < 0:  # grown, then preempted for an older one
            return
        have = self._num_pages[slot]
        self._pages[slot, have:need] = request.pages[have:need]
        self._num_pages[slot] = need


def _next_id(request: Request, position: int) -> int:
    prompt = request.prompt_token_ids
    return prompt[position] if position < len(prompt) else 0


def _slot_record(request: Request) -> tuple[Any, ...]:
    p = request.params
    seed = request.seed % 2**64
    return (
        request.slot,
        p.top_k,
        min(request.num_prompt_tokens + p.min_tokens, request.max_total_tokens) if p.min_tokens else 0,
        p.changes_logits,
        (seed % 2**32, seed >> 32),
        p.temperature,
        p.top_p,
        p.min_p,
        p.presence_penalty,
        p.frequency_penalty,
        p.repetition_penalty,
        _padded(sorted(request.stop_ids)[:NUM_BURST_STOP_IDS], NUM_BURST_STOP_IDS, -1, _INT),
    )


def _padded(values: list[Any], size: int, fill: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    row = np.full(size, fill, dtype)
    row[: len(values)] = values
    return row
