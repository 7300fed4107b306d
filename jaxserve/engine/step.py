"""serve_step: the one program of the engine. Tokens in, sampled tokens out, the pool updated in place.

It may go several rounds: each row that samples goes on with what it sampled, without the host in between, until it
stops or has the tokens that were planned for it.

Sequences live here, by slot: how long they are, where their pages are, how they are sampled, whether they have ended.
The host plans with upper bounds and reads later what became of them. A row that has stopped computes nothing, in this
plan or in any later one, until another request is admitted to its slot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxserve.config import ScheduleConfig
from jaxserve.engine.batch import (
    ADMITTED_STOP_IDS,
    MAX_STOP_IDS,
    RECORD_WORDS,
    AdmissionLayout,
    BatchLayout,
    PageEntries,
    StepBatch,
)
from jaxserve.models import decoder
from jaxserve.models.arch import ArchConfig, AttentionOptions
from jaxserve.models.params import Params
from jaxserve.pallas_kernels.ragged_paged_attention import Pages, new_pages, ragged_paged_attention
from jaxserve.request import DEFAULT_MAX_LOGPROBS, MAX_BAD_SEQUENCE_TOKENS, MAX_BAD_SEQUENCES, MAX_LOGIT_BIAS
from jaxserve.sampling import (
    LogprobLayout,
    SamplingRows,
    SlotRow,
    SlotTable,
    TokenLogprobs,
    VocabSplit,
    count_sampled,
    count_tokens,
    mask_part,
    mask_size,
    padded_to_lanes,
    sample,
    token_logprobs,
)
from jaxserve.sharding import joined

MANY = 1024  # times as many heads or tokens take more room, however they are padded
LOGPROB_BLOCK = 64  # positions whose logprobs are computed at once: of all tokens of a step there are no logits


@no_type_check  # rebuilt around shapes and placeholders too, as every pytree is
@struct.dataclass
class Sequences:
    """Sequences by slot, S of them; a request keeps its slot while it runs.

    Attributes:
        length: tokens computed so far, whose keys and values are in the pool.
        max_len: tokens at which the sequence ends.
        stopped: True if it has ended.
        page_table: its pages, M at most.
        records: words of SAMPLING_RECORD.
    """

    length: Int[Array, " S"]
    max_len: Int[Array, " S"]
    stopped: Bool[Array, " S"]
    page_table: Int[Array, "S M"]
    records: Int[Array, "S words"]


@no_type_check  # rebuilt around shapes and placeholders too, as every pytree is
@struct.dataclass
class ServeState:
    """State that lives on the device between steps; donated to every step and returned by it."""

    kv_pages: Pages  # pool in the layout of the attention backend
    sequences: Sequences
    slots: SlotTable  # inputs of sampling: tokens, their counts, biases and stop ids


@no_type_check  # rebuilt around shapes and placeholders too, as every pytree is
@struct.dataclass
class Rows:
    """The rows of one round, R of them, as the device finds them. A row that has stopped has no tokens.

    Attributes:
        slot: the slot of each row.
        start: tokens computed before.
        q_lens: tokens to compute.
        cu_q_lens: the first token of each row, and the end of the last.
        samples: True if the row's last token is the last of its sequence, so that a further one is sampled.
    """

    slot: Int[Array, " R"]
    start: Int[Array, " R"]
    q_lens: Int[Array, " R"]
    cu_q_lens: Int[Array, " R1"]
    samples: Bool[Array, " R"]

    @property
    def kv_lens(self) -> Int[Array, " R"]:
        """Tokens of each sequence once this round's are computed."""
        return self.start + self.q_lens


@no_type_check  # rebuilt around shapes and placeholders too, as every pytree is
@struct.dataclass
class Tokens:
    """The token axis of one round, T long.

    Attributes:
        row: the row of each token; clipped to a valid one for padding.
        position: the position of each token in its sequence; 0 or more for padding.
        live: True if the token is not padding.
        planned: position of the token on the token axis that the host packed, from which stopped rows are not missing.
        token_ids: ids; any for padding.
    """

    row: Int[Array, " T"]
    position: Int[Array, " T"]
    live: Bool[Array, " T"]
    planned: Int[Array, " T"]
    token_ids: Int[Array, " T"]


def new_pool(arch: ArchConfig, num_pages: int, page_size: int, *, kv_dtype: DTypeLike, backend: str) -> Pages:
    """An empty pool for all layers of a model."""
    return new_pages(
        backend,
        num_layers=arch.num_layers,
        num_pages=num_pages,
        page_size=page_size,
        num_kv_heads=arch.num_kv_heads,
        head_dim=arch.head_dim,
        dtype=kv_dtype,
    )


def new_slots(arch: ArchConfig, max_num_seqs: int, max_model_len: int) -> SlotTable:
    """Tables by slot before the first request, all zero."""
    S = max_num_seqs
    return SlotTable(
        token_history=jnp.zeros((S, max_model_len), jnp.int32),
        token_counts=jnp.zeros((S, padded_to_lanes(arch.vocab_size)), jnp.int32),
        prompt_len=jnp.zeros(S, jnp.int32),
        allowed=jnp.zeros((S, mask_size(arch.vocab_size)), jnp.uint32),
        bad_words=jnp.zeros((S, MAX_BAD_SEQUENCES, MAX_BAD_SEQUENCE_TOKENS), jnp.int32),
        bias_ids=jnp.zeros((S, MAX_LOGIT_BIAS), jnp.int32),
        bias_values=jnp.zeros((S, MAX_LOGIT_BIAS), jnp.float32),
        stop_ids=jnp.zeros((S, MAX_STOP_IDS), jnp.int32),
    )


def new_sequences(schedule: ScheduleConfig) -> Sequences:
    """Sequences before the first request: slots whose rows compute nothing."""
    S = schedule.max_num_seqs
    return Sequences(
        length=jnp.zeros(S, jnp.int32),
        max_len=jnp.zeros(S, jnp.int32),
        stopped=jnp.ones(S, bool),
        page_table=jnp.zeros((S, schedule.max_pages_per_row), jnp.int32),
        records=jnp.zeros((S, RECORD_WORDS), jnp.int32),
    )


def new_state(arch: ArchConfig, schedule: ScheduleConfig, *, kv_dtype: DTypeLike, backend: str) -> ServeState:
    """The state before the first step, all zero: the pool, and what each slot remembers."""
    pool = new_pool(arch, schedule.num_pages, schedule.page_size, kv_dtype=kv_dtype, backend=backend)
    slots = new_slots(arch, schedule.max_num_seqs, schedule.max_model_len)
    return ServeState(kv_pages=pool, sequences=new_sequences(schedule), slots=slots)


def abstract_state(
    arch: ArchConfig, schedule: ScheduleConfig, *, kv_dtype: DTypeLike, backend: str, mesh: Mesh | None = None
) -> ServeState:
    """Shapes and dtypes of the state; over the devices of a mesh, shardings too.

    The pool is split by its kv heads, counts and masks of tokens by the vocabulary.
    """

    def shapes(arch: ArchConfig) -> ServeState:
        return jax.eval_shape(partial(new_state, arch, schedule, kv_dtype=kv_dtype, backend=backend))

    if mesh is None:
        return shapes(arch)
    local = arch.local(mesh.size)
    # A backend may fill heads up, each device its own: what there is in all follows from what one of them has.
    return joined(mesh, shapes(local), shapes(local.times(MANY)))


@no_type_check  # rebuilt around shapes and placeholders too, as every pytree is
@struct.dataclass
class StepOutput:
    """Results of a step. Entries of rows that did not sample are meaningless.

    Attributes:
        sampled: number of tokens that each row sampled, then those tokens: one array, which is one download.
        logprobs: log probabilities of the sampled tokens, as `TokenLogprobs.pack` lays them out; zeros unless the step
            wants them. Those of a whole vocabulary are of the first round alone.
        prompt_logprobs: per token that the host packed for the first round, of the token after it; zeros unless wanted.
    """

    sampled: Int[Array, "R columns"]
    logprobs: Int[Array, "R logprob_steps words"]
    prompt_logprobs: Int[Array, "T words"]


@no_type_check  # rebuilt around shapes and placeholders too, as every pytree is
@struct.dataclass
class AttentionCarry:
    """Threaded through the layers: the pool, and where each row's tokens are."""

    kv_pages: Pages
    kv_lens: Int[Array, " R"]
    page_table: Int[Array, "R M"]
    cu_q_lens: Int[Array, " R1"]
    num_rows: Int[Array, ""]


def paged_attend(
    q: Float[Array, "T Q H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    rope: Float[Array, "2 T half"],
    carry: AttentionCarry,
    layer: Int[Array, ""],
    options: AttentionOptions,
    *,
    backend: str,
) -> tuple[Float[Array, "T Q H"], AttentionCarry]:
    """Rotate, write the new keys and values into the pool, attend over it."""
    out, kv_pages = ragged_paged_attention(
        q,
        k,
        v,
        carry.kv_pages,
        layer,
        kv_lens=carry.kv_lens,
        page_table=carry.page_table,
        cu_q_lens=carry.cu_q_lens,
        num_rows=carry.num_rows,
        scale=options.scale,
        window=options.window,
        soft_cap=options.soft_cap,
        rope=rope,
        backend=backend,
    )
    return out, dataclasses.replace(carry, kv_pages=kv_pages)


Program = Callable[[Params, ServeState, Array], tuple[ServeState, StepOutput]]
Admit = Callable[[ServeState, Array], ServeState]
SetSlot = Callable[[ServeState, Array, SlotRow], ServeState]
ReadLogprobs = Callable[
    [Array, Array, int], TokenLogprobs
]  # arguments: logits [N, V], ids [N] and the number of top tokens


def vocab_split(arch: ArchConfig, num_devices: int) -> VocabSplit | None:
    """Return how logits lie on the devices of a whole model; None where one has all of them."""
    axis = arch.local(num_devices).tensor_axis
    return VocabSplit(axis, num_devices, arch.vocab_size) if axis else None


def new_slot_row(schedule: ScheduleConfig, vocab_size: int) -> SlotRow:
    """Return an empty slot row; `vocab_size` is that of the whole model."""
    return SlotRow(
        token_ids=jnp.zeros(schedule.max_model_len, jnp.int32),
        prompt_len=jnp.int32(0),
        allowed=jnp.zeros(mask_size(vocab_size), jnp.uint32),
        bad_words=jnp.zeros((MAX_BAD_SEQUENCES, MAX_BAD_SEQUENCE_TOKENS), jnp.int32),
        bias_ids=jnp.zeros(MAX_LOGIT_BIAS, jnp.int32),
        bias_values=jnp.zeros(MAX_LOGIT_BIAS, jnp.float32),
        stop_ids=jnp.zeros(MAX_STOP_IDS, jnp.int32),
    )


def abstract_slot_row(schedule: ScheduleConfig, vocab_size: int) -> SlotRow:
    """Shapes and dtypes of what enters a slot."""
    shapes: SlotRow = jax.eval_shape(partial(new_slot_row, schedule, vocab_size))
    return shapes


@dataclass(frozen=True)
class Model:
    """Static parts of the step.

    Attributes:
        arch: sizes of the whole model, or of one device's part of it.
        attend: attention over the pool.
        split: layout of the logits on several devices; None where they are whole.
        logprobs: columns of packed log probabilities.
    """

    arch: ArchConfig
    attend: decoder.Attend
    logprobs: LogprobLayout
    split: VocabSplit | None = None

    @staticmethod
    def of(arch: ArchConfig, *, backend: str, num_devices: int = 1, max_logprobs: int = DEFAULT_MAX_LOGPROBS) -> Model:
        """Return the model of the whole `arch`, or of its part on one of several devices, for a shard_map over them."""
        return Model(
            arch.local(num_devices),
            partial(paged_attend, backend=backend),
            LogprobLayout.of(max_logprobs, arch.vocab_size),
            vocab_split(arch, num_devices),
        )


def make_serve_step(
    arch: ArchConfig, layout: BatchLayout, *, backend: str, max_steps: int = 1, num_devices: int = 1
) -> Program:
    """The step of one bucket, to be jitted with `state` donated; over several devices, in a shard_map.

    Args:
        arch: sizes of the whole model.
        layout: layout of the bucket's upload.
        backend: backend of attention.
        max_steps: rounds that one dispatch may go.
        num_devices: number of devices that the model is split over.
    """
    model = Model.of(arch, backend=backend, num_devices=num_devices, max_logprobs=layout.max_logprobs)
    R, num_words = layout.num_rows, model.logprobs.num_words

    def serve_step(params: Params, state: ServeState, blob: Array) -> tuple[ServeState, StepOutput]:
        batch = layout.unpack(blob)
        sequences = _set_pages(state.sequences, batch.new_pages)
        state = dataclasses.replace(state, sequences=sequences)
        if max_steps == 1:
            return _round(params, state, batch, jnp.int32(0), model)

        def goes_on(carry: tuple[ServeState, StepOutput, Array]) -> Bool[Array, ""]:
            state, _, index = carry
            return jnp.any(_takes_part(state.sequences, batch, index))

        def run(carry: tuple[ServeState, StepOutput, Array]) -> tuple[ServeState, StepOutput, Array]:
            state, outputs, index = carry
            state, out = _round(params, state, batch, index, model)
            outputs = StepOutput(
                sampled=_append(outputs.sampled, out.sampled, index),
                logprobs=lax.dynamic_update_slice(outputs.logprobs, out.logprobs, (0, index, 0)),
                prompt_logprobs=jnp.where(index == 0, out.prompt_logprobs, outputs.prompt_logprobs),
            )
            return state, outputs, index + 1

        outputs = StepOutput(
            sampled=jnp.zeros((R, max_steps + 1), jnp.int32),
            logprobs=jnp.zeros((R, layout.num_logprob_steps(max_steps), num_words), jnp.int32),
            prompt_logprobs=jnp.zeros((layout.num_tokens, num_words), jnp.int32),
        )
        state, outputs, _ = lax.while_loop(goes_on, run, (state, outputs, jnp.int32(0)))
        return state, outputs

    return serve_step


def step_options(device_kind: str) -> dict[str, str | bool]:
    """Options of XLA for the programs of steps on such devices.

    For TPU7x it would copy all weights in front of the loop over the layers, in every step: into tiles of twice as many
    rows, which it takes to pay over the rounds of a loop, although each layer is read in one of them alone. On a CPU
    most of the time of a program is spent to compile it: its newer code generator and the later passes of LLVM take
    twice as long, and steps take no less time for them, of 1 row rather more.
    """
    if device_kind == "cpu":
        return {"xla_cpu_use_fusion_emitters": False, "xla_backend_optimization_level": "1"}
    return {"xla_tpu_control_large_2nd_minor_layout_for_x16": "false"} if device_kind.startswith("TPU7x") else {}


def _round(
    params: Params, state: ServeState, batch: StepBatch, index: Int[Array, ""], model: Model
) -> tuple[ServeState, StepOutput]:
    """One round: the first computes what was planned for each row, the others a token that was sampled before."""
    split, sequences = model.split, state.sequences
    draw, read_logprobs = (split.sample, split.token_logprobs) if split else (sample, token_logprobs)
    rows = _rows(sequences, batch, index)
    tokens = _tokens(batch, rows, state.slots, index)
    page_table = sequences.page_table.at[rows.slot].get(mode="clip")
    carry = AttentionCarry(state.kv_pages, rows.kv_lens, page_table, rows.cu_q_lens, batch.num_rows)
    hidden, carry = decoder.forward(params, model.arch, tokens.token_ids, tokens.position, model.attend, carry)
    logits = decoder.compute_logits(params, model.arch, hidden.at[rows.cu_q_lens[1:] - 1].get(mode="clip"))
    sampling = SamplingRows(sequences.records.at[rows.slot].get(mode="clip"), rows.kv_lens, rows.samples)
    with jax.named_scope("sample"):
        sampled = draw(logits, sampling, state.slots, batch.base_seed)
        slots = _remember(state.slots, rows, tokens, sampled)
        counts = count_sampled(slots.token_counts, sampling, sampled, split.first_id if split else 0)
    with jax.named_scope("logprobs"):
        logprobs, prompt_logprobs = _logprobs(
            params, model.arch, batch, rows, tokens, read_logprobs, model.logprobs, logits, sampled, hidden
        )
    state = ServeState(
        kv_pages=carry.kv_pages,
        sequences=_advance(sequences, rows, sampling, slots, sampled),
        slots=dataclasses.replace(slots, token_counts=counts),
    )
    counted = jnp.stack([rows.samples.astype(jnp.int32), sampled], axis=1)
    return state, StepOutput(counted, logprobs[:, None], prompt_logprobs)


def _append(sampled: Int[Array, "R columns"], new: Int[Array, "R 2"], index: Int[Array, ""]) -> Int[Array, "R columns"]:
    """Add the tokens of a round."""
    sampled = sampled.at[:, 0].add(new[:, 0])
    return lax.dynamic_update_slice(sampled, new[:, 1:], (0, index + 1))


def _set_pages(sequences: Sequences, entries: PageEntries) -> Sequences:
    table = sequences.page_table.at[entries.slot, entries.column].set(entries.page, mode="drop")
    return dataclasses.replace(sequences, page_table=table)


def _takes_part(sequences: Sequences, batch: StepBatch, index: Int[Array, ""]) -> Bool[Array, " R"]:
    """Mask of rows that compute something in a round: all that go on in the first, then those that sample more."""
    goes_on = batch.is_row & ~sequences.stopped.at[batch.slot].get(mode="clip")
    return goes_on & (index < jnp.maximum(batch.max_new, 1))


def _rows(sequences: Sequences, batch: StepBatch, index: Int[Array, ""]) -> Rows:
    takes_part = _takes_part(sequences, batch, index)
    planned = batch.cu_q_lens[1:] - batch.cu_q_lens[:-1]
    q_lens = jnp.where(takes_part, jnp.where(index == 0, planned, 1), 0)
    return Rows(
        slot=batch.slot,
        start=sequences.length.at[batch.slot].get(mode="clip"),
        q_lens=q_lens,
        cu_q_lens=jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(q_lens, dtype=jnp.int32)]),
        samples=takes_part & (batch.max_new > 0),
    )


def _tokens(batch: StepBatch, rows: Rows, slots: SlotTable, index: Int[Array, ""]) -> Tokens:
    T, R = batch.token_ids.shape[0], rows.slot.shape[0]
    token = jnp.arange(T, dtype=jnp.int32)
    row = jnp.sum(token[:, None] >= rows.cu_q_lens[None, 1:], axis=1, dtype=jnp.int32)  # less to compile than a search
    live, row = row < R, jnp.minimum(row, R - 1)
    offset = token - rows.cu_q_lens[row]
    position = jnp.where(live, rows.start[row] + offset, 0)
    planned = jnp.where(live, batch.cu_q_lens[row] + offset, T)
    sent = jnp.where(index == 0, batch.token_ids.at[planned].get(mode="clip"), -1)
    sampled = slots.token_history.at[rows.slot[row], position].get(mode="clip")
    return Tokens(row, position, live, planned, token_ids=jnp.where(sent < 0, sampled, sent))


def _remember(slots: SlotTable, rows: Rows, tokens: Tokens, sampled: Int[Array, " R"]) -> SlotTable:
    """Write the tokens of a round, and those it sampled, to the history of their sequences."""
    S = slots.token_history.shape[0]  # out of range, dropped
    slot = [jnp.where(tokens.live, rows.slot[tokens.row], S), jnp.where(rows.samples, rows.slot, S)]
    position, token_ids = [tokens.position, rows.kv_lens], [tokens.token_ids, sampled]
    place = jnp.concatenate(slot), jnp.concatenate(position)
    history = slots.token_history.at[place].set(jnp.concatenate(token_ids), mode="drop")
    return dataclasses.replace(slots, token_history=history)


def _advance(
    sequences: Sequences, rows: Rows, sampling: SamplingRows, slots: SlotTable, sampled: Int[Array, " R"]
) -> Sequences:
    """Count what was computed, and stop the sequences that a token has ended or that are as long as they may be."""
    S = sequences.length.shape[0]
    stop_ids = slots.stop_ids.at[rows.slot].get(mode="clip")
    is_stop = jnp.any(sampled[:, None] == stop_ids, axis=1) & (rows.kv_lens >= sampling.min_position)
    is_full = rows.kv_lens + 1 >= sequences.max_len.at[rows.slot].get(mode="clip")
    length = sequences.length.at[jnp.where(rows.q_lens > 0, rows.slot, S)].set(rows.kv_lens, mode="drop")
    ends = rows.samples & (is_stop | is_full)
    stopped = sequences.stopped.at[jnp.where(ends, rows.slot, S)].set(True, mode="drop")
    return dataclasses.replace(sequences, length=length, stopped=stopped)


def _logprobs(
    params: Params,
    arch: ArchConfig,
    batch: StepBatch,
    rows: Rows,
    tokens: Tokens,
    read_logprobs: ReadLogprobs,
    layout: LogprobLayout,
    logits: Float[Array, "R V"],
    sampled: Int[Array, " R"],
    hidden: Float[Array, "T D"],
) -> tuple[Int[Array, "R words"], Int[Array, "T words"]]:
    """Packed logprobs of the sampled tokens, and of the token that follows each token of the step; zeros if unwanted.

    One loop over blocks of both, so that they are one piece of code, and so that logits of all tokens never exist.
    Tokens that follow are prompt tokens, whose ids the host sends. Ids from the token history must not be read here:
    without an order between this reading and the writing of new ids, XLA copies the whole table.
    """
    T, R = hidden.shape[0], sampled.shape[0]
    block = min(T, LOGPROB_BLOCK)
    row_blocks = -(-R // block)
    padding = row_blocks * block - R
    is_last = jnp.arange(T) == rows.cu_q_lens[1:][tokens.row] - 1
    next_sent = batch.token_ids.at[tokens.planned + 1].get(mode="clip")
    following = jnp.where(is_last, batch.next_ids[tokens.row], next_sent)
    wants_rows, wants_tokens = batch.wants_logprobs > 0, batch.wants_prompt_logprobs > 0
    empty = jnp.zeros((row_blocks * block + T, layout.num_words), jnp.int32)

    def compute() -> Int[Array, "N words"]:
        padded_logits = jnp.pad(logits, ((0, padding), (0, 0)))
        token_ids = jnp.concatenate([jnp.pad(sampled, (0, padding)), following])

        def read(index: Int[Array, ""], out: Int[Array, "N words"]) -> Int[Array, "N words"]:
            is_rows = index < row_blocks
            start = jnp.where(is_rows, index * block, jnp.minimum((index - row_blocks) * block, T - block))
            place = jnp.where(is_rows, start, row_blocks * block + start)
            block_logits = lax.cond(
                is_rows,
                lambda: lax.dynamic_slice_in_dim(padded_logits, start, block),
                lambda: decoder.compute_logits(params, arch, lax.dynamic_slice_in_dim(hidden, start, block)),
            )
            found = read_logprobs(block_logits, lax.dynamic_slice_in_dim(token_ids, place, block), layout.num_top)
            return lax.dynamic_update_slice_in_dim(out, found.pack(), place, 0)

        num_blocks = jnp.where(wants_tokens, -(-rows.cu_q_lens[-1] // block), 0)
        found = lax.fori_loop(jnp.where(wants_rows, 0, row_blocks), row_blocks + num_blocks, read, empty)
        own, of_tokens = found[: row_blocks * block], found[row_blocks * block :]
        return jnp.concatenate([own, jnp.zeros_like(of_tokens).at[tokens.planned].set(of_tokens, mode="drop")])

    # Not a loop of no rounds: XLA moves what does not depend on the round in front of it, and computes it always.
    out: Array = lax.cond(wants_rows | wants_tokens, compute, lambda: empty)
    return out[:R], out[row_blocks * block :]


def make_admit(layout: AdmissionLayout) -> Admit:
    """The program that lets requests enter their slots; donates the state. The same on every device."""

    def admit(state: ServeState, blob: Array) -> ServeState:
        new = layout.unpack(blob)
        sequences = _set_pages(state.sequences, new.new_pages)
        padding = ((0, 0), (0, MAX_STOP_IDS - ADMITTED_STOP_IDS))
        stop_ids = jnp.pad(new.stop_ids, padding, constant_values=-1)
        sequences = dataclasses.replace(
            sequences,
            length=sequences.length.at[new.slot].set(new.start, mode="drop"),
            max_len=sequences.max_len.at[new.slot].set(new.max_len, mode="drop"),
            stopped=sequences.stopped.at[new.slot].set(False, mode="drop"),
            records=sequences.records.at[new.slot].set(new.records, mode="drop"),
        )
        slots = dataclasses.replace(state.slots, stop_ids=state.slots.stop_ids.at[new.slot].set(stop_ids, mode="drop"))
        return dataclasses.replace(state, sequences=sequences, slots=slots)

    return admit


def make_set_slot(arch: ArchConfig, *, num_devices: int = 1) -> SetSlot:
    """The program that enters an admitted request whose sampling looks at more than its logits; donates the state."""
    split = vocab_split(arch, num_devices)

    def set_slot(state: ServeState, slot: Int[Array, ""], row: SlotRow) -> ServeState:
        first_id, part_size = split.first_id if split else 0, state.slots.token_counts.shape[1]
        counts = count_tokens(row.token_ids, row.prompt_len, first_id, part_size)
        new = SlotTable(
            token_history=jnp.maximum(row.token_ids, 0),
            token_counts=counts,
            prompt_len=row.prompt_len,
            allowed=mask_part(row.allowed, split.first_id, part_size) if split else row.allowed,
            bad_words=row.bad_words,
            bias_ids=row.bias_ids,
            bias_values=row.bias_values,
            stop_ids=row.stop_ids,
        )
        slots = jax.tree.map(lambda table, new: table.at[slot].set(new), state.slots, new)
        return dataclasses.replace(state, slots=slots)

    return set_slot
