"""One round of a step: the model computes tokens of some rows, each of which may sample a further one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int

from jaxserve.api.sampling_params import DEFAULT_MAX_LOGPROBS
from jaxserve.execution.batch import BatchLayout, StepBatch
from jaxserve.execution.paged_attention import PagedAttention
from jaxserve.execution.rows import Rows, Tokens, advance, planned_rows, ragged_rows, remember, state_rows, tokens_of
from jaxserve.execution.sampling import (
    LogprobLayout,
    SamplingRows,
    TokenLogprobs,
    VocabSplit,
    count_sampled,
    sample,
    token_logprobs,
)
from jaxserve.execution.shard_rows import Shares
from jaxserve.execution.state import CLIPPED, ServeState, set_pages
from jaxserve.layers.own_tokens import all_tokens
from jaxserve.layers.state_forms import StateRows
from jaxserve.layers.token_context import TokenContext
from jaxserve.models import decoder
from jaxserve.models.arch import ArchConfig
from jaxserve.models.params import Params

if TYPE_CHECKING:
    from jaxserve.execution.proposer import Observer

LOGPROB_BLOCK = 64  # positions whose logprobs are computed at once: of all tokens of a step there are no logits


@no_type_check  # rebuilt around shapes and placeholders too, as every pytree is
@struct.dataclass
class StepOutput:
    """Results of a step. Entries of rows that did not sample are meaningless.

    Attributes:
        sampled: number of tokens that each row sampled, then those tokens: one array, which is one download.
        logprobs: log probabilities of the sampled tokens, as `TokenLogprobs.pack` lays them out; zeros unless the step
            wants them. Those of a whole vocabulary are of the first round alone.
        prompt_logprobs: log probabilities of the token after each token that the host packed for the first round; zeros
            unless wanted.
        pooled: vectors of a model that pools, which has no log probabilities; None of one that generates.
        expert_tokens: tokens of each expert in all rounds, by mixture; None where they are not counted.
    """

    sampled: Int[Array, "R columns"]
    logprobs: Int[Array, "R logprob_steps words"]
    prompt_logprobs: Int[Array, "T words"]
    pooled: Float[Array, "R outputs"] | None = None
    expert_tokens: Int[Array, "L E"] | None = None


ReadLogprobs = Callable[
    [Array, Array, int], TokenLogprobs
]  # arguments: logits [N, V], ids [N] and the number of top tokens

# observe(state, rows, token ids [T], what it observes of them [T, observed]) -> state of the proposer
Observe = Callable[[ServeState, Rows, Array, Array], Any]


@dataclass(frozen=True)
class Model:
    """Static parts of the step.

    Attributes:
        arch: sizes of the whole model, or of one device's part of it.
        backend: backend of attention.
        logprobs: columns of packed log probabilities.
        split: layout of the logits on several devices; None where they are whole.
        observer: proposer that observes the tokens of all steps; None without one.
    """

    arch: ArchConfig
    backend: str
    logprobs: LogprobLayout
    split: VocabSplit | None = None
    observer: Observer | None = None

    @staticmethod
    def from_arch(
        arch: ArchConfig,
        *,
        backend: str,
        num_devices: int = 1,
        max_logprobs: int = DEFAULT_MAX_LOGPROBS,
        observer: Observer | None = None,
    ) -> Model:
        """Return the model of the whole `arch`, or of its part on one of several devices, for a shard_map over them."""
        local, layout = arch.local(num_devices), LogprobLayout.from_sizes(max_logprobs, arch.vocab_size)
        split = VocabSplit(local.vocab_axis, num_devices, arch.vocab_size) if local.vocab_axis else None
        return Model(local, backend, layout, split, observer)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Layers whose inputs the observer reads, instead of the hidden states after the final norm."""
        return () if self.observer is None else self.observer.feature_layers

    def observing(self, params: Any) -> tuple[Params, Observe | None]:
        """Return the model's parameters among those of a program, and the function that observes its tokens, if any."""
        return (params, None) if self.observer is None else (params[0], partial(self.observer.observe, params))

    @property
    def read_logprobs(self) -> ReadLogprobs:
        """Function that computes log probabilities from logits."""
        return self.split.token_logprobs if self.split else token_logprobs


def begin(state: ServeState, layout: BatchLayout, blob: Array) -> tuple[ServeState, Any]:
    """Return the state of a step that has got its pages and has counted no tokens of experts yet, and its batch."""
    batch, counts = layout.unpack(blob), state.expert_tokens
    counts = None if counts is None else jnp.zeros_like(counts)
    return dataclasses.replace(
        state, sequences=set_pages(state.sequences, batch.new_pages), expert_tokens=counts
    ), batch


def plain_round(
    params: Params,
    state: ServeState,
    batch: StepBatch,
    index: Int[Array, ""],
    model: Model,
    observe: Observe | None = None,
) -> tuple[ServeState, StepOutput]:
    """One round: the first computes what was planned for each row, the others a token that was sampled before."""
    rows = planned_rows(state.sequences, batch, index)
    tokens = tokens_of(batch, rows, state.slots, index)
    state, logits, hidden = compute_tokens(params, state, batch, rows, tokens, model, observe)
    state, sampled = sample_rows(state, batch, rows, tokens, logits, model)
    with jax.named_scope("logprobs"):
        logprobs, prompt_logprobs = step_logprobs(
            params, model.arch, batch, rows, tokens, model.read_logprobs, model.logprobs, logits, sampled, hidden
        )
    counted = jnp.stack([rows.samples.astype(jnp.int32), sampled], axis=1)
    return state, StepOutput(counted, logprobs[:, None], prompt_logprobs)


def compute_tokens(
    params: Params,
    state: ServeState,
    batch: StepBatch,
    rows: Rows,
    tokens: Tokens,
    model: Model,
    observe: Observe | None = None,
) -> tuple[ServeState, Float[Array, "R V"], Float[Array, "T D"]]:
    """Run the model; return the state with keys and values, the logits of each row's last token, the hidden states.

    How long the sequences are does not change: sampling counts what was computed.
    """
    hidden, observed, state = run_model(
        params, state, rows, tokens, batch.num_rows, model, state_rows=state_rows(batch, rows, tokens)
    )
    if observe is not None:
        with jax.named_scope("observe"):
            state = dataclasses.replace(state, draft=observe(state, rows, tokens.token_ids, observed))
    logits = decoder.compute_logits(params, model.arch, hidden.at[rows.cu_q_lens[1:] - 1].get(**CLIPPED))
    return state, logits, hidden


def sample_rows(
    state: ServeState, batch: StepBatch, rows: Rows, tokens: Tokens, logits: Float[Array, "R V"], model: Model
) -> tuple[ServeState, Int[Array, " R"]]:
    """Sample from logits, and count what the round has computed; return the state and the tokens."""
    split, sequences = model.split, state.sequences
    sampling = SamplingRows(sequences.records.at[rows.slot].get(**CLIPPED), rows.end.history, rows.samples)
    with jax.named_scope("sample"):
        sampled = (split.sample if split else sample)(logits, sampling, state.slots, batch.base_seed)
        slots = remember(state.slots, rows, tokens, sampled)
        counts = count_sampled(slots.token_counts, sampling, sampled, split.first_id if split else 0)
    state = dataclasses.replace(
        state,
        sequences=advance(sequences, rows, sampling, slots, sampled),
        slots=dataclasses.replace(slots, token_counts=counts),
    )
    return state, sampled


def run_model(
    params: Params,
    state: ServeState,
    rows: Rows,
    tokens: Tokens,
    num_rows: Int[Array, ""],
    model: Model,
    tree_mask: Int[Array, " T"] | None = None,
    state_rows: StateRows | None = None,
) -> tuple[Float[Array, "T D"], Float[Array, "T observed"], ServeState]:
    """Return the hidden states of all tokens, what a proposer observes of them, and the state.

    The state has what layers keep of the tokens, and their experts in the counts.
    """
    arch, live, shares = model.arch, tokens.live, None
    if arch.token_axis is not None:
        shares = Shares.from_rows(rows, tokens, state.sequences.length.shape[0], arch.num_data_shards)
        rows, tokens, num_rows = shares.own(rows, tokens, lax.axis_index(arch.token_axis))
        live = shares.live
    forms = zip(arch.kv_layout.forms, ragged_rows(state.sequences, rows, num_rows), strict=True)
    groups = tuple(form.step_rows(model.backend, group) for form, group in forms)
    attention = PagedAttention(model.backend, state.kv_pages, groups, tree_mask, state.states, state_rows)
    slot = rows.slot.at[tokens.row].get(**CLIPPED)
    context = TokenContext(tokens.position, attention, tokens.row, slot, live, state.expert_tokens)
    hidden, features, context = decoder.forward_with_features(
        params, arch, tokens.token_ids, context, model.feature_layers
    )
    attention = PagedAttention.after(context)
    if shares is not None:
        hidden = all_tokens(hidden, arch.token_axis).at[shares.place].get(**CLIPPED)
    state = dataclasses.replace(
        state, kv_pages=attention.kv_pages, states=attention.states, expert_tokens=context.expert_tokens
    )
    return hidden, features if model.feature_layers else hidden, state


def with_counts(state: ServeState, output: StepOutput) -> tuple[ServeState, StepOutput]:
    """Return the state and the output of a step with the tokens of experts that it has counted."""
    return state, dataclasses.replace(output, expert_tokens=state.expert_tokens)


def step_logprobs(
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
    next_sent = batch.token_ids.at[tokens.planned + 1].get(**CLIPPED)
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
