"""Layouts of a step's inputs, on the host and on the device.

All inputs travel as one int32 blob: slots that take part, token counts, prompt ids, and new pages. Everything else lies
on the device by slot. `BlobLayout` assigns each field its position; the host writes through numpy views, the device
reads slices with the same layout. A blob's size does not depend on max_model_len.

Masks of constrained rows travel in separate blobs, if they differ from the slot's mask.

A request enters its slot by an `Admission`, a separate blob before the step's. It also carries pages that do not fit
the step's blob, such as those that an admission found in the prefix cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int, UInt

from jaxserve.api.sampling_params import DEFAULT_MAX_LOGPROBS, MAX_STOP_TOKEN_IDS
from jaxserve.execution.sampling import RECORD_WORDS, mask_size
from jaxserve.scheduling.kv_cache.sparsity import Compaction
from jaxserve.scheduling.schedule_config import ScheduleConfig

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_EOS_IDS = 64
MAX_STOP_IDS = MAX_EOS_IDS + MAX_STOP_TOKEN_IDS  # maximum stop ids per request
ADMITTED_STOP_IDS = 8  # stop ids per admission; a request with more takes a SlotRow
ADMISSION_ROWS = 64  # requests per admission blob
ADMISSION_PAGES = 2048  # pages per admission blob
MASK_ROWS = 16  # masks per blob
NUM_AXES = 3  # M-RoPE axes: time, height and width

FIRST_IMAGE_ID = -2  # id sent for a token with the embedding in row 0 of the encoder cache; lower ones for later rows

PAGES = "pages"  # name of the field with page table entries

_INT = np.dtype(np.int32)
_ADMITTED_COLUMNS = (
    *("start", "num_prompt", "end_position", "position_offset", "cache_offset", "adapter", "adapter_start"),
)


@dataclass(frozen=True)
class BlobLayout:
    """Positions of fields in a blob.

    Attributes:
        fields: name, shape and padding of each field, in order.
    """

    fields: tuple[tuple[str, tuple[int, ...], int], ...]

    @cached_property
    def slices(self) -> tuple[tuple[str, slice, tuple[int, ...]], ...]:
        """Name, slice and shape of each field."""
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
        """Blob in which each field has its padding."""
        return np.concatenate([np.full(math.prod(shape), padding, np.int32) for _, shape, padding in self.fields])

    def new(self) -> tuple[NDArray[np.int32], dict[str, NDArray[np.int32]]]:
        """Return a blob of padding, and writable views of its fields."""
        blob = self._padding.copy()
        return blob, self.views(blob)

    def views(self, blob: NDArray[np.int32]) -> dict[str, NDArray[np.int32]]:
        """Return writable views of the fields; a scalar gets one dimension with one element."""
        views = {name: blob[where] for name, where, _ in self.slices}
        for name, shape in self._matrices:
            views[name] = views[name].reshape(shape)
        return views

    @cached_property
    def _matrices(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Name and shape of each field with several dimensions."""
        return tuple((name, shape) for name, _, shape in self.slices if len(shape) > 1)

    def unpack(self, blob: Int[Array, " words"]) -> dict[str, Any]:
        """Return the fields of a blob on the device, by name.

        Field PAGES becomes `new_pages`. Each row is sliced from the blob, because XLA would read all rows of a matrix
        for each of them.
        """
        found: dict[str, Any] = {}
        for name, where, shape in self.slices:
            if name == PAGES:
                starts = range(where.start, where.stop, shape[1])
                found["new_pages"] = PageEntries(*(blob[start : start + shape[1]] for start in starts))
            else:
                found[name] = blob[where].reshape(shape)
        return found


@no_type_check  # also rebuilt around shapes and placeholders, like every pytree
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PageEntries:
    """Page table entries to set; rows out of range are padding."""

    row: Int[Array, " E"]
    column: Int[Array, " E"]
    page: Int[Array, " E"]


@no_type_check  # also rebuilt around shapes and placeholders, like every pytree
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepBatch:
    """One step's inputs on the device. Rows from `num_rows` and tokens from `cu_q_lens[num_rows]` on are padding.

    A row whose sequence has stopped has no tokens, whatever the host planned for it.

    Attributes:
        base_seed: engine seed.
        num_rows: number of rows in the plan.
        wants_logprobs: True if any row wants them.
        wants_prompt_logprobs: True if any row wants them.
        token_ids: ids sent by the host; -1 for ids in the token history, `FIRST_IMAGE_ID - row` for tokens with the
            embedding in an encoder cache row.
        cu_q_lens: cumulative tokens planned for the first round.
        slot: slot per row.
        max_new: tokens that each row may sample, one per round; 0 for a chunk before the end of its sequence.
        next_ids: known token after each row's last one (prompt logprobs across chunks), otherwise 0.
        new_pages: new page table entries.
        axes: M-RoPE positions on each axis; -1 for tokens that have the same on all, which the device knows. None
            for models without.
        ahead: number of later tokens that each token sees; None if tokens of images see only earlier ones.
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
    axes: Int[Array, "3 T"] | None = field(default=None, kw_only=True)
    ahead: Int[Array, " T"] | None = field(default=None, kw_only=True)

    @property
    def is_row(self) -> Bool[Array, " R"]:
        """Mask of rows that are not padding."""
        return jnp.arange(self.slot.shape[0]) < self.num_rows


@no_type_check  # also rebuilt around shapes and placeholders, like every pytree
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StateBatch(StepBatch):
    """Step inputs for a model with recurrent layers; entries index the state pool.

    Attributes:
        source: entry from which each row's state is read: a snapshot's, or the slot's own.
        kept_len: tokens of each row before its snapshot; 0 for none.
        kept: entry that receives the snapshot.
    """

    source: Int[Array, " R"]
    kept_len: Int[Array, " R"]
    kept: Int[Array, " R"]


@no_type_check  # also rebuilt around shapes and placeholders, like every pytree
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SpeculativeBatch(StepBatch):
    """Step inputs for decoding rows that may run several rounds with drafted tokens.

    Attributes:
        num_rounds: maximum rounds.
        num_drafts: number of tokens to draft per row and round.
    """

    num_rounds: Int[Array, ""]
    num_drafts: Int[Array, " R"]


@dataclass(frozen=True)
class BatchLayout:
    """Input sizes for one bucket: T tokens, R rows, E new pages, and log probabilities per token."""

    num_tokens: int
    num_rows: int
    num_new_pages: int
    max_logprobs: int = DEFAULT_MAX_LOGPROBS  # -1 for the whole vocabulary
    is_speculative: bool = False
    has_states: bool = False
    has_axes: bool = False
    has_ahead: bool = False

    @classmethod
    def from_config(cls, config: ScheduleConfig, bucket: int, *, is_speculative: bool = False) -> BatchLayout:
        """Return the layout for a step with up to `bucket` tokens.

        New pages suffice for a page begun by each row and pages filled by all tokens. There are at least two, because
        XLA copies the page table to set a single entry, but not for a larger scatter.
        """
        num_rows = config.num_rows(bucket)
        num_columns = num_rows + bucket // config.page_size
        num_new_pages = max(num_columns * config.kv_groups.size, 2)
        sizes = (bucket, num_rows, num_new_pages, config.max_logprobs)
        # A step with drafts has only decoding rows.
        image_fields = [each and not is_speculative for each in (config.has_position_axes, config.sees_images)]
        return cls(*sizes, is_speculative, config.num_snapshots is not None, *image_fields)

    def num_logprob_steps(self, max_steps: int) -> int:
        """Return the number of steps, of up to `max_steps` per dispatch, that return log probabilities.

        For a whole vocabulary it is only one.
        """
        return max_steps if self.max_logprobs >= 0 else 1

    @cached_property
    def blob(self) -> BlobLayout:
        """Layout of the blob."""
        scalars = ["base_seed", "num_rows", "wants_logprobs", "wants_prompt_logprobs"]
        rows = ["slot", "max_new", "next_ids"]
        if self.is_speculative:
            scalars.append("num_rounds")
            rows.append("num_drafts")
        if self.has_states:
            rows += ["source", "kept_len", "kept"]
        axes = (("axes", (NUM_AXES, self.num_tokens), -1),) if self.has_axes else ()
        ahead = (("ahead", (self.num_tokens,), 0),) if self.has_ahead else ()
        return BlobLayout(
            (
                *((name, (), 0) for name in scalars),
                ("token_ids", (self.num_tokens,), -1),
                *axes,
                *ahead,
                ("cu_q_lens", (self.num_rows + 1,), 0),
                *((name, (self.num_rows,), 0) for name in rows),
                _page_field(self.num_new_pages),
            )
        )

    def unpack(self, blob: Int[Array, " words"]) -> StepBatch:
        """Return the inputs in a step's blob, on the device."""
        columns = self.blob.unpack(blob)
        columns["base_seed"] = lax.bitcast_convert_type(columns["base_seed"], np.dtype(np.uint32))
        kind = SpeculativeBatch if self.is_speculative else StateBatch if self.has_states else StepBatch
        return kind(**columns)


@no_type_check  # also rebuilt around shapes and placeholders, like every pytree
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Admission:
    """Up to A requests that enter their slots, and page table entries. Slots out of range are padding.

    Attributes:
        slot: slot per request.
        start: number of tokens found in the prefix cache.
        num_prompt: number of prompt tokens.
        end_position: position at which its sequence ends.
        position_offset: a token's position minus the number of tokens before it.
        cache_offset: number of cached tokens minus number of tokens, at most 0; 0 in models with windows, which count
            cached tokens.
        adapter: its adapter's slot; 0 for the base model.
        adapter_start: first token with the adapter.
        records: words of SAMPLING_RECORD.
        stop_ids: first stop ids; -1 pads.
        new_pages: new page table entries.
    """

    slot: Int[Array, " A"]
    start: Int[Array, " A"]
    num_prompt: Int[Array, " A"]
    end_position: Int[Array, " A"]
    position_offset: Int[Array, " A"]
    cache_offset: Int[Array, " A"]
    adapter: Int[Array, " A"]
    adapter_start: Int[Array, " A"]
    records: Int[Array, "A words"]
    stop_ids: Int[Array, "A 8"]
    new_pages: PageEntries


def admission_layout(config: ScheduleConfig) -> BlobLayout:
    """Return the layout for `Admission` blobs."""
    num_rows = min(config.max_num_seqs, ADMISSION_ROWS)
    max_pages = config.max_num_seqs * config.max_pages_per_row * config.kv_groups.size
    return BlobLayout(
        (
            ("slot", (num_rows,), config.max_num_seqs),
            *((name, (num_rows,), 0) for name in _ADMITTED_COLUMNS),
            ("records", (num_rows, RECORD_WORDS), 0),
            ("stop_ids", (num_rows, ADMITTED_STOP_IDS), -1),
            _page_field(min(max_pages, ADMISSION_PAGES)),
        )
    )


@dataclass(frozen=True)
class CompactionLayout:
    """Layout of the blob that describes a row whose prompt is compacted.

    Attributes:
        sparsity: rule that determines the kept tokens.
        max_model_len: maximum sequence length.
    """

    sparsity: Compaction
    max_model_len: int

    @staticmethod
    def from_config(config: ScheduleConfig) -> CompactionLayout | None:
        """Return the layout for an engine's prompts; None if they are not compacted."""
        sparsity = config.sparsity
        return CompactionLayout(sparsity, config.max_model_len) if isinstance(sparsity, Compaction) else None

    def first_observed(self, num_prompt: int) -> int:
        """Return the first of the `num_prompt` prompt tokens whose attention is observed."""
        return 0 if self.sparsity.observes_all else num_prompt - self.sparsity.block

    @cached_property
    def blob(self) -> BlobLayout:
        """Layout: the row's slot, its number of prompt tokens, the ids of the observed ones, and its new pages."""
        num_ids = block = self.sparsity.block
        if self.sparsity.observes_all:
            num_ids = -(-self.max_model_len // block) * block
        num_pages = -(-self.sparsity.budget // self.sparsity.page_size)
        fields = (("slot", (1,), 0), ("num_prompt", (1,), 0), ("token_ids", (num_ids,), 0))
        return BlobLayout((*fields, ("targets", (num_pages,), 0)))


def mask_layout(config: ScheduleConfig, vocab_size: int) -> BlobLayout:
    """Return the layout for masks sent together: slots, and mask bits for each. Slots out of range are padding."""
    num_rows, num_words = min(config.max_num_seqs, MASK_ROWS), mask_size(vocab_size)
    return BlobLayout((("slot", (num_rows,), config.max_num_seqs), ("words", (num_rows, num_words), 0)))


def num_copies(config: ScheduleConfig) -> int:
    """Return the number of page copies per blob."""
    return min(config.max_num_seqs, ADMISSION_ROWS) * config.kv_groups.size


def _page_field(num_pages: int) -> tuple[str, tuple[int, ...], int]:
    """Return name, shape and padding (out of range) for a field with `num_pages` page table entries."""
    return PAGES, (len(fields(PageEntries)), num_pages), np.iinfo(_INT).max
