"""StepPlan -> StepUpload: converts Python lists to arrays, in the layouts of `batch.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxserve.api.sampling_params import MAX_BAD_SEQUENCE_TOKENS, MAX_BAD_SEQUENCES, MAX_LOGIT_BIAS
from jaxserve.execution.batch import (
    ADMITTED_STOP_IDS,
    FIRST_IMAGE_ID,
    MAX_STOP_IDS,
    BatchLayout,
    CompactionLayout,
    admission_layout,
    mask_layout,
    num_copies,
)
from jaxserve.execution.sampling import SlotRow, pack_mask, pack_records
from jaxserve.scheduling.kv_cache.groups import RELEASED
from jaxserve.scheduling.request import Request, RequestStatus
from jaxserve.scheduling.schedule_config import ScheduleConfig

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from jaxserve.scheduling.step_plan import PromptCompaction, StepPlan

_INT = np.dtype(np.int32)
_FLOAT = np.dtype(np.float32)


class StepUpload(NamedTuple):
    """Host arrays of one plan, in this order; always new arrays, because the device may read them later.

    Attributes:
        admissions: `Admission` blobs; none in most steps.
        slot_rows: slots and rows for requests that need more than an admission carries.
        masks: mask blobs; none in most steps.
        blob: `StepBatch` blob.
        copies: blobs of page copies made before the step; none in most steps.
        compactions: blobs of prompt compactions, made before everything else; none in most steps.
    """

    admissions: Sequence[NDArray[np.int32]]
    slot_rows: Sequence[tuple[int, SlotRow]]
    masks: Sequence[NDArray[np.int32]]
    blob: NDArray[np.int32]
    copies: Sequence[NDArray[np.int32]] = ()
    compactions: Sequence[NDArray[np.int32]] = ()


class BatchPacker:
    """Packs plans, and tracks which pages of each slot were sent to the device.

    A decoding row costs no Python beyond its entries in the plan's columns.
    """

    def __init__(self, config: ScheduleConfig, base_seed: int, vocab_size: int) -> None:
        self.config = config
        self._vocab_size = vocab_size
        self._base_seed = np.uint32(base_seed).view(np.int32)
        self.layouts = {
            (each.num_tokens, each.has_drafts): BatchLayout.from_config(
                config, each.num_tokens, is_speculative=each.has_drafts
            )
            for each in config.shapes()
        }
        self._admission, self._masks = admission_layout(config), mask_layout(config, vocab_size)
        self._num_copies = num_copies(config)
        self._compactions = CompactionLayout.from_config(config)
        self._constrained: dict[int, Request] = {}  # rows with a constraint, by slot
        self._sent_masks: dict[int, NDArray[np.int32]] = {}  # masks by slot
        self._ones = np.ones(config.max_num_seqs, _INT)
        self._slots = [0]  # slots of the last plan, often shared by consecutive decode steps
        self._slot_array = np.array(self._slots, np.intp)
        self._num_pages = [0] * config.max_num_seqs  # page-table entries sent so far, by slot
        # whether the slot's last row sampled, so that the history has its next token
        self._has_sampled = np.zeros(config.max_num_seqs, bool)

    def pack(self, plan: StepPlan, bucket: int) -> StepUpload:
        """Return the arrays of `plan`, padded to `bucket` tokens. Call this once per plan, in order."""
        layout = self.layouts[bucket, bool(plan.num_drafts)]
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
        if plan.slots != self._slots:
            self._slots, self._slot_array = plan.slots, np.array(plan.slots, np.intp)  # determining the dtype is slow
        slots = self._slot_array
        counts = self._ones[:num_rows] if is_decode else np.array(plan.counts, _INT)
        is_plain = plan.num_steps == 1 and not (plan.num_drafts or plan.is_split)
        max_new = counts if is_decode and is_plain else np.array(plan.max_new, _INT)
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
            sent |= counts > 1  # unsampled tokens follow the sampled one
        for row in sent.nonzero()[0].tolist():
            start, count, end = plan.starts[row], plan.counts[row], to["cu_q_lens"][row + 1]
            request = plan.requests[row]
            to["token_ids"][end - count : end] = request.tokens(start, start + count)
            if request.images:
                names = to.keys() & {"token_ids", "axes", "ahead"}
                _send_images(request, start, {name: to[name][..., end - count : end] for name in names})
        self._has_sampled[slots] = max_new > 0
        if plan.wants_prompt_logprobs:
            to["wants_prompt_logprobs"][0] = 1
            stops = [start + count for start, count in zip(plan.starts, plan.counts, strict=True)]
            to["next_ids"][:num_rows] = list(map(_next_id, plan.requests, stops))
        admissions = list(self._admissions(plan, new_pages[:, num_new_pages:]))
        masks = () if plan.is_split else list(self.masks(plan))
        copies, compactions = list(self._copies(plan.copies)), list(map(self._compaction, plan.compactions))
        return StepUpload(admissions, list(self._slot_rows(plan)), masks, blob, copies, compactions)

    def _new_pages(self, plan: StepPlan) -> NDArray[np.int32]:
        """Return the page table entries that the device lacks, [3, E]: rows, columns, pages; admissions last."""
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
        """Yield `Admission` blobs with the plan's admitted requests and with `new_pages`, as from `_new_pages`."""
        admitted = plan.admitted
        start_of = dict(zip(plan.requests, plan.starts, strict=True)) if admitted else {}
        while admitted or new_pages.size:
            blob, to = self._admission.new()
            num_rows, num_pages = len(to["slot"]), to["pages"].shape[1]
            now, admitted = admitted[:num_rows], admitted[num_rows:]
            for row, request in enumerate(now):
                to["slot"][row] = request.slot
                to["start"][row] = start_of[request]
                to["num_prompt"][row] = request.num_prompt_tokens
                to["position_offset"][row] = offset = request.position_offset
                to["end_position"][row] = request.max_total_tokens + offset
                to["adapter"][row], to["adapter_start"][row] = request.adapter_slot, request.adapter_start
                stop_ids = sorted(request.stop_ids)[:ADMITTED_STOP_IDS]
                to["stop_ids"][row, : len(stop_ids)] = stop_ids
            to["records"][: len(now)] = pack_records(now)
            pages, new_pages = new_pages[:, :num_pages], new_pages[:, num_pages:]
            to["pages"][:, : pages.shape[1]] = pages
            yield blob

    def _slot_rows(self, plan: StepPlan) -> Iterator[tuple[int, SlotRow]]:
        """Yield slot and `SlotRow` of each admitted request that needs more than its admission carries."""
        start_of = dict(zip(plan.requests, plan.starts, strict=True)) if self.config.max_drafts else {}
        for request in plan.admitted:
            p = request.params
            is_plain = not (p.has_penalties or request.changes_logits or p.min_tokens)
            # Proposers read the whole history, but steps write only the tokens that they compute.
            if not is_plain or len(request.stop_ids) > ADMITTED_STOP_IDS or start_of.get(request):
                yield request.slot, self._slot_row(request)

    def masks(self, plan: StepPlan) -> Iterator[NDArray[np.int32]]:
        """Yield blobs with the allowed-token masks of sampling rows that differ from the masks on the device.

        `pack` calls this except for split plans; then call it after earlier tokens have been read.
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
        while changed:
            blob, to = self._masks.new()
            now, changed = changed[: len(to["slot"])], changed[len(to["slot"]) :]
            for index, (slot, words) in enumerate(now):
                to["slot"][index] = slot
                to["words"][index, : len(words)] = words
            yield blob

    def no_masks(self) -> NDArray[np.int32]:
        """Return a mask blob with only padding, for programs that must have one."""
        return self._masks.new()[0]

    def _copies(self, copies: Sequence[tuple[int, int]]) -> Iterator[NDArray[np.int32]]:
        """Yield blobs [2, E] with source and target page of each copy; targets out of range are padding."""
        for first in range(0, len(copies), self._num_copies):
            some = copies[first : first + self._num_copies]
            blob = np.full((2, self._num_copies), self.config.num_pages, _INT)
            blob[:, : len(some)] = np.array(some, _INT).T
            yield blob

    def _compaction(self, compaction: PromptCompaction) -> NDArray[np.int32]:
        """Return the blob that describes a row whose prompt is compacted."""
        assert self._compactions is not None, "only an engine that compacts plans it"
        slot, prompt, pages = compaction
        blob, to = self._compactions.blob.new()
        observed = prompt[self._compactions.first_observed(len(prompt)) :]
        to["slot"][0], to["num_prompt"][0] = slot, len(prompt)
        to["token_ids"][: len(observed)], to["targets"][: len(pages)] = observed, pages
        return blob

    def _slot_row(self, request: Request) -> SlotRow:
        """Return a request's entries in the slot tables: history, masks, biases, bad words and stop ids."""
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


def _send_images(request: Request, start: int, to: dict[str, NDArray[np.int32]]) -> None:
    """Write what a row with images sends in addition to its token ids.

    Args:
        request: running request.
        start: its first token in the plan.
        to: columns of its tokens in the plan, by field.
    """
    token_ids = to["token_ids"]
    for index, rows in request.image_rows.items():
        span = request.images[index]
        offset = span.positions - start
        is_sent = (offset >= 0) & (offset < len(token_ids))
        token_ids[offset[is_sent]] = FIRST_IMAGE_ID - rows[is_sent]
        if "ahead" in to:
            to["ahead"][offset[is_sent]] = span.end - 1 - span.positions[is_sent]
    if request.axes is not None:
        given = request.axes[:, start : start + len(token_ids)]
        to["axes"][:, : given.shape[1]] = given


def _next_id(request: Request, position: int) -> int:
    """Return the prompt token at `position`; 0 after the prompt."""
    prompt = request.prompt_token_ids
    return prompt[position] if position < len(prompt) else 0


def _padded(values: list[Any], size: int, fill: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return `values` as an array with `size` elements, filled up with `fill`."""
    row = np.full(size, fill, dtype)
    row[: len(values)] = values
    return row
