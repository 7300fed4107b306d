"""serve_step: the engine's main program. Tokens in, sampled tokens out, the pool updated in place.

It may run several rounds: each sampling row continues with its sampled token, without the host in between, until it
stops or has its planned tokens.

Sequences live here, by slot: their lengths, pages, sampling parameters and whether they have ended. The host plans with
upper bounds and reads the results later. A row that has stopped computes nothing, in this or any later plan, until
another request is admitted to its slot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, UInt32

from jaxserve.execution.batch import ADMITTED_STOP_IDS, MAX_STOP_IDS, Admission, BatchLayout, BlobLayout
from jaxserve.execution.proposer import Proposer
from jaxserve.execution.round import Model, StepOutput, begin, compute_tokens, plain_round, sample_rows, with_counts
from jaxserve.execution.rows import planned_rows, round_tokens, takes_part
from jaxserve.execution.sampling import SlotRow, SlotTable, VocabSplit, count_tokens, mask_part
from jaxserve.execution.state import ServeState, set_pages
from jaxserve.models.params import Params

Program = Callable[[Params, ServeState, Array], tuple[ServeState, StepOutput]]

Compute = Callable[[Any, ServeState, Array], tuple[ServeState, Array]]  # returns logits [R, V]

Sample = Callable[[Array, ServeState, Array, Array], tuple[ServeState, StepOutput]]

Admit = Callable[[ServeState, Array], ServeState]

SetSlot = Callable[[ServeState, Array, SlotRow], ServeState]

SetMasks = Callable[[Array, Array], Array]


# Operations that XLA records in CUDA graphs: its defaults for one device, and control flow.
_GRAPH_NODES = (
    *("FUSION", "CUBLAS", "CUBLASLT", "CUDNN", "CUSTOM_CALL", "DYNAMIC_SLICE_FUSION"),
    *("CONDITIONAL", "WHILE"),
)


def make_serve_step(model: Model, layout: BatchLayout, max_steps: int = 1) -> Program:
    """Return the program (params, state, blob) -> (state, output) for one step of up to `max_steps` rounds.

    To be jitted with `state` donated; on several devices, in a shard_map. If `model` has an observer, params is a pair:
    the model's parameters and the observer's.

    Args:
        model: static parameters.
        layout: sizes of the step's bucket, and layout of the blob with its inputs.
        max_steps: maximum rounds.
    """
    R, num_words = layout.num_rows, model.logprobs.num_words

    def serve_step(all_params: Any, state: ServeState, blob: Array) -> tuple[ServeState, StepOutput]:
        params, observe = model.observing(all_params)
        state, batch = begin(state, layout, blob)
        if max_steps == 1:
            return with_counts(*plain_round(params, state, batch, jnp.int32(0), model, observe))

        def goes_on(carry: tuple[ServeState, StepOutput, Array]) -> Bool[Array, ""]:
            state, _, index = carry
            return jnp.any(takes_part(state.sequences, batch, index))

        def run(carry: tuple[ServeState, StepOutput, Array]) -> tuple[ServeState, StepOutput, Array]:
            state, outputs, index = carry
            state, out = plain_round(params, state, batch, index, model, observe)
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
        return with_counts(state, outputs)

    return serve_step


def make_split_step(model: Model, layout: BatchLayout, masks: BlobLayout) -> tuple[Compute, Sample]:
    """Return the two programs of a step for decoding rows whose token masks arrive while the model runs.

    The first, (params, state, blob) -> (state, logits), runs the model. The second, (logits, state, blob, mask blob) ->
    (state, output), sets masks and samples. Both take the plan's blob, and only masks may change between them.

    Args:
        model: static parameters.
        layout: sizes of the step's bucket, and layout of the blob with its inputs.
        masks: layout of the mask blob.
    """
    R, num_words, first_round = layout.num_rows, model.logprobs.num_words, jnp.int32(0)
    set_masks = make_set_masks(model, masks)

    def compute(all_params: Any, state: ServeState, blob: Array) -> tuple[ServeState, Array]:
        params, observe = model.observing(all_params)
        state, batch = begin(state, layout, blob)
        rows = planned_rows(state.sequences, batch, first_round)
        tokens = round_tokens(batch, rows, state.slots, first_round, model.arch.image_token_id)
        state, logits, _ = compute_tokens(params, state, batch, rows, tokens, model, observe)
        return state, logits

    def sample(logits: Array, state: ServeState, blob: Array, masks_blob: Array) -> tuple[ServeState, StepOutput]:
        batch = layout.unpack(blob)
        slots = dataclasses.replace(state.slots, allowed=set_masks(state.slots.allowed, masks_blob))
        state = dataclasses.replace(state, slots=slots)
        rows = planned_rows(state.sequences, batch, first_round)
        tokens = round_tokens(batch, rows, state.slots, first_round, model.arch.image_token_id)
        state, sampled = sample_rows(state, batch, rows, tokens, logits, model)
        logprobs = lax.cond(
            batch.wants_logprobs > 0,
            lambda: model.read_logprobs(logits, sampled, model.logprobs.num_top).pack(),
            lambda: jnp.zeros((R, num_words), jnp.int32),
        )
        counted = jnp.stack([rows.samples.astype(jnp.int32), sampled], axis=1)
        return with_counts(state, StepOutput(counted, logprobs[:, None], jnp.zeros((0, num_words), jnp.int32)))

    return compute, sample


def step_options(device_kind: str) -> dict[str, str | bool]:
    """Return XLA's compiler options for step programs, given jax's `device_kind`, such as "cpu" or "TPU7x".

    For TPU7x, XLA would copy all weights before the loop over the layers, in every step: it expects tiles with twice as
    many rows to pay over all iterations, although each layer is read in only one of them. On a CPU compilation takes
    most of a program's time: XLA's newer code generator and the later LLVM passes take twice as long and make no step
    faster, single-row steps rather slower. XLA in jax 0.12 no longer has the older generator, and compiles 1.4 times as
    long. On GPUs a whole step is one CUDA graph that includes its branches and loops as nodes; otherwise host and
    device would wait for each other at each of them: on an H100, with four layers of 8B, twice the time for a step with
    8 rows. Nodes follow each other in program order: if they waited only for their inputs, a step would save 0.3 ms,
    but buffers for all layers would exist simultaneously.
    """
    if device_kind == "cpu":
        return {"xla_cpu_use_fusion_emitters": False, "xla_backend_optimization_level": "1"}
    if "NVIDIA" in device_kind:
        return {"xla_gpu_enable_command_buffer": ",".join(_GRAPH_NODES)}
    return {"xla_tpu_control_large_2nd_minor_layout_for_x16": "false"} if device_kind.startswith("TPU7x") else {}


def _append(sampled: Int[Array, "R columns"], new: Int[Array, "R 2"], index: Int[Array, ""]) -> Int[Array, "R columns"]:
    """Return a step's tokens with the tokens of round `index`: column 0 has token counts, column 1 + i round i's ids.

    Args:
        sampled: tokens of the earlier rounds.
        new: per row, the number of tokens in this round, 0 or 1, and the token id.
        index: round.
    """
    sampled = sampled.at[:, 0].add(new[:, 0])
    return lax.dynamic_update_slice(sampled, new[:, 1:], (0, index + 1))


def make_admit(layout: BlobLayout, proposer: Proposer | None = None) -> Admit:
    """Return the program (state, blob) -> state that writes an `Admission` blob to the slots of its requests.

    To be jitted with `state` donated. It is the same on every device.
    """

    def admit(state: ServeState, blob: Array) -> ServeState:
        new = Admission(**layout.unpack(blob))
        sequences = set_pages(state.sequences, new.new_pages)
        padding = ((0, 0), (0, MAX_STOP_IDS - ADMITTED_STOP_IDS))
        stop_ids = jnp.pad(new.stop_ids, padding, constant_values=-1)
        ends = new.end_position - new.position_offset
        columns = ends, new.position_offset, new.cache_offset, new.num_prompt, new.adapter, new.adapter_start
        numbers = jnp.stack(columns)
        sequences = dataclasses.replace(
            sequences,
            length=sequences.length.at[new.slot].set(new.start, mode="drop"),
            admitted=sequences.admitted.at[:, new.slot].set(numbers, mode="drop"),
            stopped=sequences.stopped.at[new.slot].set(False, mode="drop"),
            records=sequences.records.at[new.slot].set(new.records, mode="drop"),
        )
        slots = dataclasses.replace(state.slots, stop_ids=state.slots.stop_ids.at[new.slot].set(stop_ids, mode="drop"))
        draft = state.draft if proposer is None else proposer.admit(state.draft, new.slot)
        return dataclasses.replace(state, sequences=sequences, slots=slots, draft=draft)

    return admit


def make_set_slot(split: VocabSplit | None) -> SetSlot:
    """Return the program (state, slot, row) -> state that writes a request's `SlotRow` to the slot tables.

    Only requests with penalties, biases, masks, bad words or many stop ids need it. To be jitted with `state` donated.

    Args:
        split: division of the vocabulary over devices; None if each has all of it.
    """

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


def make_set_masks(model: Model, layout: BlobLayout) -> SetMasks:
    """Return the program (masks, blob) -> masks that sets the allowed-token masks of some slots.

    To be jitted with the masks donated. `layout` is the layout of a blob with slots and whole masks; with a split
    vocabulary, each device keeps the part for its shard.
    """
    split, part_size = model.split, model.arch.vocab_size

    def set_masks(allowed: UInt32[Array, "S W"], blob: Int[Array, " words"]) -> UInt32[Array, "S W"]:
        new = layout.unpack(blob)
        words = lax.bitcast_convert_type(new["words"], jnp.uint32)
        if split:
            first_id = split.first_id
            words = jax.vmap(lambda mask: mask_part(mask, first_id, part_size))(words)
        return allowed.at[new["slot"]].set(words, mode="drop")

    return set_masks
