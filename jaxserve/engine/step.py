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
from jaxserve.request import MAX_LOGIT_BIAS
from jaxserve.sampling import SamplingRows, SlotTable, TokenLogprobs, VocabSplit, by_blocks, sample, token_logprobs
from jaxserve.sharding import joined

MANY_HEADS = 4  # times as many are more, however a backend fills them up
PROMPT_LOGPROB_BLOCK = 64  # tokens whose logits exist at once


@no_type_check  # rebuilt around shapes and placeholders too, as every pytree is
@struct.dataclass
class ServeState:
    """What lives on the device between steps; donated to every step and returned by it."""

    kv_pages: Pages  # in the layout of the attention backend
    slots: SlotTable  # tokens, biases and stop ids of every running request
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


def new_state(arch: ArchConfig, schedule: ScheduleConfig, *, kv_dtype: DTypeLike, backend: str) -> ServeState:
    """The state before the first step, all zero: the pool, and what each slot remembers."""
    S = schedule.max_num_seqs
    pool = new_pool(arch, schedule.num_pages, schedule.page_size, kv_dtype=kv_dtype, backend=backend)
    slots = SlotTable(
        token_history=jnp.zeros((S, schedule.max_model_len), jnp.int32),
        bias_ids=jnp.zeros((S, MAX_LOGIT_BIAS), jnp.int32),
        bias_values=jnp.zeros((S, MAX_LOGIT_BIAS), jnp.float32),
        stop_ids=jnp.zeros((S, MAX_STOP_IDS), jnp.int32),
    )
    return ServeState(kv_pages=pool, slots=slots, burst_cut=jnp.bool_(False))


def abstract_state(
    arch: ArchConfig, schedule: ScheduleConfig, *, kv_dtype: DTypeLike, backend: str, mesh: Mesh | None = None
) -> ServeState:
    """Shapes and dtypes of the state; over the devices of a mesh, shardings too: the pool is split by its kv heads."""

    def shapes(arch: ArchConfig) -> ServeState:
        return jax.eval_shape(partial(new_state, arch, schedule, kv_dtype=kv_dtype, backend=backend))

    if mesh is None:
        return shapes(arch)
    local = arch.local(mesh.size)
    # A backend may fill heads up, each device its own: what there is in all follows from what one of them has.
    return joined(mesh, shapes(local), shapes(local.times(MANY_HEADS)))


@no_type_check  # rebuilt around shapes and placeholders too, as every pytree is
@struct.dataclass
class StepOutput:
    """What a step or burst sends back. Entries of rows that did not sample are meaningless.

    Attributes:
        token_ids: of a burst one row per step; those of steps that did not run are -1.
        logprobs: of `token_ids`; zeros unless the step wants logprobs; None of a burst.
        prompt_logprobs: per token of the step, of the token after it; zeros unless wanted; None of a burst.
    """

    token_ids: Int[Array, "*steps R"]
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None


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
ReadLogprobs = Callable[[Array, Array], TokenLogprobs]  # of logits [N, V] and ids [N]


@dataclass(frozen=True)
class Model:
    """What the step runs, all of it static.

    Attributes:
        arch: of the whole model, or of one device's part of it.
        attend: attention over the pool.
        split: how the logits lie on several devices; None where they are whole.
    """

    arch: ArchConfig
    attend: decoder.Attend
    split: VocabSplit | None = None

    @staticmethod
    def of(arch: ArchConfig, *, backend: str, num_devices: int = 1) -> Model:
        """That of the whole `arch`; of its part on one of several devices, to be run in a shard_map over them all."""
        local = arch.local(num_devices)
        split = VocabSplit(local.tensor_axis, num_devices, arch.vocab_size) if local.tensor_axis else None
        return Model(local, partial(paged_attend, backend=backend), split)


def make_serve_step(arch: ArchConfig, layout: BatchLayout, *, backend: str, num_devices: int = 1) -> Program:
    """The step of one bucket, to be jitted with `state` donated; over several devices, in a shard_map."""
    model = Model.of(arch, backend=backend, num_devices=num_devices)

    def serve_step(params: Params, state: ServeState, blob: Array) -> tuple[ServeState, StepOutput]:
        return _step(params, state, layout.unpack(blob), model)

    return serve_step


def make_serve_burst(
    arch: ArchConfig, layout: BatchLayout, *, backend: str, max_steps: int, num_devices: int = 1
) -> Program:
    """Up to `max_steps` decode steps of one bucket, to be jitted as those of `make_serve_step`.

    Every row has one token, and pages for all steps. Ends after `num_steps` steps, or with the first stop id. One that
    `follows_burst` was planned as if that would run all its steps; if it did not, this one runs none.
    """
    model = Model.of(arch, backend=backend, num_devices=num_devices)

    def serve_burst(params: Params, state: ServeState, blob: Array) -> tuple[ServeState, StepOutput]:
        batch = layout.unpack(blob)
        num_steps = jnp.minimum(batch.num_steps, max_steps)
        void = state.burst_cut & (batch.follows_burst > 0)

        def goes_on(carry: tuple[ServeState, Array, Array, Array]) -> Bool[Array, ""]:
            _, _, step, stopped = carry
            return (step < num_steps) & ~stopped

        def run(carry: tuple[ServeState, Array, Array, Array]) -> tuple[ServeState, Array, Array, Array]:
            state, token_ids, step, _ = carry
            state, out = _step(params, state, _later(batch, step), model)
            token_ids = token_ids.at[step].set(out.token_ids)
            return state, token_ids, step + 1, _any_stops(batch, out.token_ids)

        token_ids = jnp.full((max_steps, layout.num_rows), -1, jnp.int32)
        state, token_ids, step, _ = lax.while_loop(goes_on, run, (state, token_ids, jnp.int32(0), void))
        return dataclasses.replace(state, burst_cut=step < num_steps), StepOutput(token_ids)

    return serve_burst


def step_options(device_kind: str) -> dict[str, str]:
    """What XLA is told where it compiles steps and bursts for such devices.

    For TPU7x it would copy all weights in front of the loop over the layers, in every step: into tiles of twice as many
    rows, which it takes to pay over the rounds of a loop, although each layer is read in one of them alone.
    """
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
        rows = _sampling_rows(batch)
        sampled = draw(logits, rows, state.slots, jax.random.key(batch.base_seed, impl="threefry2x32"))
        slots = _remember(state.slots, batch, sampled)
    out = StepOutput(
        token_ids=sampled,
        logprobs=_logprobs_if(batch.wants_logprobs, lambda: read_logprobs(logits, sampled)),
        prompt_logprobs=_prompt_logprobs(params, batch, read_logprobs, hidden, row_ids),
    )
    return dataclasses.replace(state, kv_pages=carry.kv_pages, slots=slots), out


def _later(batch: StepBatch, step: Int[Array, ""]) -> StepBatch:
    """The batch as it is `step` steps later: each row one token longer per step, the last one in its history."""
    token_ids = jnp.where(step > 0, -1, batch.token_ids)
    return dataclasses.replace(batch, token_ids=token_ids, kv_lens=batch.kv_lens + step)


def _any_stops(batch: StepBatch, sampled: Int[Array, " R"]) -> Bool[Array, ""]:
    stops = jnp.any(sampled[:, None] == batch.stop_ids, axis=1)  # [R]
    return jnp.any(stops & _samples(batch))


def locate_tokens(batch: StepBatch) -> tuple[Int[Array, " T"], Int[Array, " T"]]:
    """Row and absolute position of every token; clipped to valid values for padding."""
    T, R = batch.token_ids.shape[0], batch.kv_lens.shape[0]
    tokens = jnp.arange(T, dtype=jnp.int32)
    ends = jnp.where(jnp.arange(R) < batch.num_rows, batch.cu_q_lens[1:], T)  # sorted, whatever padding rows hold
    row_ids = jnp.searchsorted(ends, tokens, side="right").astype(jnp.int32)
    row_ids = jnp.minimum(row_ids, R - 1)
    from_end = ends[row_ids] - tokens  # 1 for the row's last token
    return row_ids, jnp.maximum(batch.kv_lens[row_ids] - from_end, 0)


def _input_ids(
    batch: StepBatch, slots: SlotTable, row_ids: Int[Array, " T"], positions: Int[Array, " T"]
) -> Int[Array, " T"]:
    """Ids the host knew, and for the others what an earlier step sampled."""
    sampled = slots.token_history.at[batch.slot[row_ids], positions].get(mode="clip")
    return jnp.where(batch.token_ids < 0, sampled, batch.token_ids)


def _samples(batch: StepBatch) -> Bool[Array, " R"]:
    return (jnp.arange(batch.samples.shape[0]) < batch.num_rows) & (batch.samples > 0)


def _sampling_rows(batch: StepBatch) -> SamplingRows:
    return SamplingRows(
        temperature=batch.temperature,
        top_k=batch.top_k,
        top_p=batch.top_p,
        min_p=batch.min_p,
        seed=batch.seed,
        position=batch.kv_lens,
        prompt_len=batch.prompt_len,
        min_position=batch.min_position,
        presence_penalty=batch.presence_penalty,
        frequency_penalty=batch.frequency_penalty,
        repetition_penalty=batch.repetition_penalty,
        slot=batch.slot,
        use_bias=batch.use_bias > 0,
        live=_samples(batch),
    )


def _remember(slots: SlotTable, batch: StepBatch, sampled: Int[Array, " R"]) -> SlotTable:
    """Write each sampled token to its request's history, where the next step reads its input."""
    S, C = slots.token_history.shape
    slot = jnp.where(_samples(batch), batch.slot, S)  # S: out of range, dropped
    history = slots.token_history.at[slot, jnp.minimum(batch.kv_lens, C)].set(sampled, mode="drop")
    return dataclasses.replace(slots, token_history=history)


def _logprobs_if(wanted: Int[Array, ""], read: Callable[[], TokenLogprobs]) -> TokenLogprobs:
    shapes = jax.eval_shape(read)
    return lax.cond(wanted > 0, read, lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes))


def _prompt_logprobs(
    params: Params,
    batch: StepBatch,
    read_logprobs: ReadLogprobs,
    hidden: Float[Array, "T D"],
    row_ids: Int[Array, " T"],
) -> TokenLogprobs:
    """Logprobs of the token that follows each token of the step, in blocks so that [T, V] never exists.

    Of prompt tokens, that is, whose ids the host sends. Ids from the token history must not be read here: without an
    order between this reading and the writing of new ids, XLA copies the whole table.
    """
    T = hidden.shape[0]
    block = min(T, PROMPT_LOGPROB_BLOCK)
    is_last = jnp.arange(T) == batch.cu_q_lens[1:][row_ids] - 1
    following = jnp.where(is_last, batch.next_ids[row_ids], jnp.roll(batch.token_ids, -1))

    def read(tokens: tuple[Array, Array]) -> TokenLogprobs:
        hidden, following = tokens
        return read_logprobs(decoder.compute_logits(params, hidden), following)

    def compute() -> TokenLogprobs:
        num_blocks = -(-batch.cu_q_lens[batch.num_rows] // block)
        out: TokenLogprobs = by_blocks(read, (hidden, following), block, num_blocks)
        return out

    # Not a loop of no rounds: XLA moves what does not depend on the round in front of it, and computes it always.
    return _logprobs_if(batch.wants_prompt_logprobs, compute)


def set_slot(state: ServeState, slot: Int[Array, ""], row: SlotTable) -> ServeState:
    """Enter an admitted request whose sampling looks at more than its logits. `row` has no S axis. Donates `state`."""
    slots = jax.tree.map(lambda table, new: table.at[slot].set(new), state.slots, row)
    return dataclasses.replace(state, slots=slots)
