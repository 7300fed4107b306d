"""serve_step: the one program of the engine. Tokens in, sampled tokens out, the pool updated in place.

serve_burst runs the same step several times over, for rows in decode, without the host in between.
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
from jaxserve.engine.batch import MAX_STOP_IDS, BatchLayout, StepBatch
from jaxserve.models import decoder
from jaxserve.models.arch import ArchConfig
from jaxserve.models.params import Params
from jaxserve.pallas_kernels.ragged_paged_attention import Pages, new_pages, ragged_paged_attention
from jaxserve.request import DEFAULT_MAX_LOGPROBS, MAX_BAD_SEQUENCE_TOKENS, MAX_BAD_SEQUENCES, MAX_LOGIT_BIAS
from jaxserve.sampling import (
    LogprobLayout,
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
class ServeState:
    """What lives on the device between steps; donated to every step and returned by it."""

    kv_pages: Pages  # in the layout of the attention backend
    slots: SlotTable  # tokens, their counts, biases and stop ids of every running request
    burst_cut: Bool[Array, ""]  # whether the last burst ran fewer steps than it was to


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


def new_state(arch: ArchConfig, schedule: ScheduleConfig, *, kv_dtype: DTypeLike, backend: str) -> ServeState:
    """The state before the first step, all zero: the pool, and what each slot remembers."""
    pool = new_pool(arch, schedule.num_pages, schedule.page_size, kv_dtype=kv_dtype, backend=backend)
    slots = new_slots(arch, schedule.max_num_seqs, schedule.max_model_len)
    return ServeState(kv_pages=pool, slots=slots, burst_cut=jnp.bool_(False))


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
    """What a step or burst sends back. Entries of rows that did not sample are meaningless.

    Attributes:
        token_ids: of a burst one row per step; those of steps that did not run are -1.
        logprobs: of `token_ids`, as `TokenLogprobs.pack` lays them out; zeros unless the step wants logprobs. Those of
            a whole vocabulary are of the first step alone.
        prompt_logprobs: per token of the (first) step, of the token after it; zeros unless wanted.
    """

    token_ids: Int[Array, "*steps R"]
    logprobs: Int[Array, "*steps R words"]
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
    window: int | None,
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
        scale=q.shape[-1] ** -0.5,
        window=window,
        rope=rope,
        backend=backend,
    )
    return out, dataclasses.replace(carry, kv_pages=kv_pages)


Program = Callable[[Params, ServeState, Array], tuple[ServeState, StepOutput]]
SetSlot = Callable[[ServeState, Array, SlotRow], ServeState]
ReadLogprobs = Callable[[Array, Array, int], TokenLogprobs]  # of logits [N, V], ids [N] and how many of the top


def vocab_split(arch: ArchConfig, num_devices: int) -> VocabSplit | None:
    """How logits lie on the devices of a whole model; None where one has all of them."""
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
    """What the step runs, all of it static.

    Attributes:
        arch: of the whole model, or of one device's part of it.
        attend: attention over the pool.
        split: how the logits lie on several devices; None where they are whole.
        logprobs: columns of packed log probabilities.
    """

    arch: ArchConfig
    attend: decoder.Attend
    logprobs: LogprobLayout
    split: VocabSplit | None = None

    @staticmethod
    def of(arch: ArchConfig, *, backend: str, num_devices: int = 1, max_logprobs: int = DEFAULT_MAX_LOGPROBS) -> Model:
        """That of the whole `arch`; of its part on one of several devices, to be run in a shard_map over them all."""
        return Model(
            arch.local(num_devices),
            partial(paged_attend, backend=backend),
            LogprobLayout.of(max_logprobs, arch.vocab_size),
            vocab_split(arch, num_devices),
        )


def make_serve_step(arch: ArchConfig, layout: BatchLayout, *, backend: str, num_devices: int = 1) -> Program:
    """The step of one bucket, to be jitted with `state` donated; over several devices, in a shard_map."""
    model = Model.of(arch, backend=backend, num_devices=num_devices, max_logprobs=layout.max_logprobs)

    def serve_step(params: Params, state: ServeState, blob: Array) -> tuple[ServeState, StepOutput]:
        return _step(params, state, layout.unpack(blob), model)

    return serve_step


def make_serve_burst(
    arch: ArchConfig, layout: BatchLayout, *, backend: str, max_steps: int, num_devices: int = 1
) -> Program:
    """Up to `max_steps` decode steps of one bucket, to be jitted as those of `make_serve_step`.

    In a dispatch of several steps every row has one token, and pages for all; a single step may be any. Ends after
    `num_steps` steps, or with the first stop id. One that `follows_burst` was planned as if that would run all its
    steps; if it did not, this one runs none.
    """
    model = Model.of(arch, backend=backend, num_devices=num_devices, max_logprobs=layout.max_logprobs)

    def serve_burst(params: Params, state: ServeState, blob: Array) -> tuple[ServeState, StepOutput]:
        batch = layout.unpack(blob)
        num_steps = jnp.minimum(batch.num_steps, max_steps)
        void = state.burst_cut & (batch.follows_burst > 0)

        def goes_on(carry: tuple[ServeState, StepOutput, Array, Array]) -> Bool[Array, ""]:
            _, _, step, stopped = carry
            return (step < num_steps) & ~stopped

        def run(carry: tuple[ServeState, StepOutput, Array, Array]) -> tuple[ServeState, StepOutput, Array, Array]:
            state, outputs, step, _ = carry
            state, out = _step(params, state, _later(batch, step), model)
            outputs = StepOutput(
                token_ids=outputs.token_ids.at[step].set(out.token_ids),
                logprobs=outputs.logprobs.at[step].set(out.logprobs, mode="drop"),
                prompt_logprobs=out.prompt_logprobs,
            )
            return state, outputs, step + 1, _any_stops(batch, out.token_ids)

        R, num_words = layout.num_rows, model.logprobs.num_words
        outputs = StepOutput(
            token_ids=jnp.full((max_steps, R), -1, jnp.int32),
            logprobs=jnp.zeros((layout.num_logprob_steps(max_steps), R, num_words), jnp.int32),
            prompt_logprobs=jnp.zeros((layout.num_tokens, num_words), jnp.int32),
        )
        state, outputs, step, _ = lax.while_loop(goes_on, run, (state, outputs, jnp.int32(0), void))
        return dataclasses.replace(state, burst_cut=step < num_steps), outputs

    return serve_burst


def step_options(device_kind: str) -> dict[str, str | bool]:
    """Options of XLA for the programs of steps and bursts on such devices.

    For TPU7x it would copy all weights in front of the loop over the layers, in every step: into tiles of twice as many
    rows, which it takes to pay over the rounds of a loop, although each layer is read in one of them alone. On a CPU
    most of the time of a program is spent to compile it: its newer code generator and the later passes of LLVM take
    twice as long, and steps take no less time for them, of 1 row rather more.
    """
    if device_kind == "cpu":
        return {"xla_cpu_use_fusion_emitters": False, "xla_backend_optimization_level": "1"}
    return {"xla_tpu_control_large_2nd_minor_layout_for_x16": "false"} if device_kind.startswith("TPU7x") else {}


def _step(params: Params, state: ServeState, batch: StepBatch, model: Model) -> tuple[ServeState, StepOutput]:
    split = model.split
    draw, read_logprobs = (split.sample, split.token_logprobs) if split else (sample, token_logprobs)
    row_ids, positions = locate_tokens(batch)
    token_ids = _input_ids(batch, state.slots, row_ids, positions)
    carry = AttentionCarry(state.kv_pages, batch.kv_lens, batch.page_table, batch.cu_q_lens, batch.num_rows)
    hidden, carry = decoder.forward(params, model.arch, token_ids, positions, model.attend, carry)
    logits = decoder.compute_logits(params, hidden.at[batch.cu_q_lens[1:] - 1].get(mode="clip"))
    with jax.named_scope("sample"):
        sampled = draw(logits, batch.sampling, state.slots, batch.base_seed)
        slots = _remember(state.slots, batch, sampled, split.first_id if split else 0)
    with jax.named_scope("logprobs"):
        logprobs, prompt_logprobs = _logprobs(
            params, batch, read_logprobs, model.logprobs, logits, sampled, hidden, row_ids
        )
    out = StepOutput(sampled, logprobs, prompt_logprobs)
    return dataclasses.replace(state, kv_pages=carry.kv_pages, slots=slots), out


def _later(batch: StepBatch, step: Int[Array, ""]) -> StepBatch:
    """The batch as it is `step` steps later: each row one token longer per step, the last one in its history."""
    token_ids = jnp.where(step > 0, -1, batch.token_ids)
    return dataclasses.replace(batch, token_ids=token_ids, kv_lens=batch.kv_lens + step)


def _any_stops(batch: StepBatch, sampled: Int[Array, " R"]) -> Bool[Array, ""]:
    stops = jnp.any(sampled[:, None] == batch.stop_ids, axis=1)  # [R]
    return jnp.any(stops & batch.live)


def locate_tokens(batch: StepBatch) -> tuple[Int[Array, " T"], Int[Array, " T"]]:
    """Row and absolute position of every token; clipped to valid values for padding."""
    T, R = batch.token_ids.shape[0], batch.kv_lens.shape[0]
    tokens = jnp.arange(T, dtype=jnp.int32)
    ends = jnp.where(jnp.arange(R) < batch.num_rows, batch.cu_q_lens[1:], T)  # sorted, whatever padding rows hold
    row_ids = jnp.sum(tokens[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)  # less to compile than a search
    row_ids = jnp.minimum(row_ids, R - 1)
    from_end = ends[row_ids] - tokens  # 1 for the row's last token
    return row_ids, jnp.maximum(batch.kv_lens[row_ids] - from_end, 0)


def _input_ids(
    batch: StepBatch, slots: SlotTable, row_ids: Int[Array, " T"], positions: Int[Array, " T"]
) -> Int[Array, " T"]:
    """Ids the host knew, and for the others what an earlier step sampled."""
    sampled = slots.token_history.at[batch.slot[row_ids], positions].get(mode="clip")
    return jnp.where(batch.token_ids < 0, sampled, batch.token_ids)


def _remember(
    slots: SlotTable, batch: StepBatch, sampled: Int[Array, " R"], first_id: Int[Array, ""] | int
) -> SlotTable:
    """Write each sampled token to its request's history, where the next step reads its input, and count it."""
    S, C = slots.token_history.shape
    slot = jnp.where(batch.live, batch.slot, S)  # S: out of range, dropped
    history = slots.token_history.at[slot, jnp.minimum(batch.kv_lens, C)].set(sampled, mode="drop")
    counts = count_sampled(slots.token_counts, batch.sampling, sampled, first_id)
    return dataclasses.replace(slots, token_history=history, token_counts=counts)


def _logprobs(
    params: Params,
    batch: StepBatch,
    read_logprobs: ReadLogprobs,
    layout: LogprobLayout,
    logits: Float[Array, "R V"],
    sampled: Int[Array, " R"],
    hidden: Float[Array, "T D"],
    row_ids: Int[Array, " T"],
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
    is_last = jnp.arange(T) == batch.cu_q_lens[1:][row_ids] - 1
    following = jnp.where(is_last, batch.next_ids[row_ids], jnp.roll(batch.token_ids, -1))
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
                lambda: decoder.compute_logits(params, lax.dynamic_slice_in_dim(hidden, start, block)),
            )
            found = read_logprobs(block_logits, lax.dynamic_slice_in_dim(token_ids, place, block), layout.num_top)
            return lax.dynamic_update_slice_in_dim(out, found.pack(), place, 0)

        num_blocks = jnp.where(wants_tokens, -(-batch.cu_q_lens[batch.num_rows] // block), 0)
        return lax.fori_loop(jnp.where(wants_rows, 0, row_blocks), row_blocks + num_blocks, read, empty)

    # Not a loop of no rounds: XLA moves what does not depend on the round in front of it, and computes it always.
    out: Array = lax.cond(wants_rows | wants_tokens, compute, lambda: empty)
    return out[:R], out[row_blocks * block :]


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
