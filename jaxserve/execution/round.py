"""One round in a step: the model computes tokens for some rows, each of which may sample another one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, no_type_check

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxserve.api.sampling_params import DEFAULT_MAX_LOGPROBS
from jaxserve.execution.batch import BatchLayout, StepBatch
from jaxserve.execution.paged_attention import PagedAttention
from jaxserve.execution.rows import (
    Rows,
    Tokens,
    advance,
    image_rows,
    planned_rows,
    ragged_rows,
    remember,
    round_tokens,
    state_rows,
    visible_pages,
)
from jaxserve.execution.sampling import (
    LogprobLayout,
    SamplingRows,
    TokenLogprobs,
    VocabSplit,
    count_sampled,
    sample,
    token_logprobs,
)
from jaxserve.execution.shard_rows import ShardRows
from jaxserve.execution.state import CLIPPED, ServeState, set_pages
from jaxserve.layers.state_forms import StateRows
from jaxserve.layers.token_context import TokenAdapters, TokenContext, TokenImages
from jaxserve.layers.token_exchange import all_tokens
from jaxserve.models import decoder
from jaxserve.models.adapted_params import with_adapters
from jaxserve.models.arch import ArchConfig
from jaxserve.models.params import Params
from jaxserve.pallas_kernels.target import target_platform
from jaxserve.scheduling.kv_cache.sparsity import Sparsity

if TYPE_CHECKING:
    from jaxserve.execution.proposer import Observer

LOGPROB_BLOCK = 64  # positions whose log probabilities are computed together: logits of all tokens never exist


@no_type_check  # also rebuilt around shapes and placeholders, like every pytree
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutput:
    """Step results. Entries for rows that did not sample are meaningless.

    Attributes:
        sampled: token count per row, then those tokens: one array for a single download.
        logprobs: log probabilities for the sampled tokens, packed by `TokenLogprobs.pack`; zeros unless the step wants
            them. For a whole vocabulary, only in the first round.
        prompt_logprobs: log probabilities for each token's successor, packed for the first round; zeros unless wanted.
        pooled: vectors from a pooling model, which has no log probabilities; None for a generating model.
        expert_tokens: tokens per expert in all rounds, by MoE layer; None if not counted.
    """

    sampled: Int[Array, "R columns"]
    logprobs: Int[Array, "R logprob_steps words"]
    prompt_logprobs: Int[Array, "T words"]
    pooled: Float[Array, "R outputs"] | None = None
    expert_tokens: Int[Array, "L E"] | None = None


# read_logprobs(logits [N, V], token ids [N], number of top tokens)
ReadLogprobs = Callable[[Array, Array, int], TokenLogprobs]

# observe(state, rows, token ids [T], their observed hidden states [T, observed]) -> proposer state
Observe = Callable[[ServeState, Rows, Array, Array], Any]


@dataclass(frozen=True)
class Model:
    """Static step parameters.

    Attributes:
        arch: sizes for the whole model or one device's shard.
        backend: attention backend.
        logprobs: packed log probability layout.
        split: logits layout over devices; None if they are whole.
        observer: proposer that observes all steps; None without one.
        features: layers of the whole model whose inputs an observer reads, here or in the last pipeline stage; empty if
            it reads the hidden states after the final norm.
        sparsity: rule by which output tokens see fewer keys and values; None if they see all.
        num_adapters: adapters in the state's stacks.
    """

    arch: ArchConfig
    backend: str
    logprobs: LogprobLayout
    split: VocabSplit | None = None
    observer: Observer | None = None
    features: tuple[int, ...] = ()
    sparsity: Sparsity | None = None
    num_adapters: int = 0

    @staticmethod
    def from_arch(
        arch: ArchConfig,
        *,
        backend: str,
        num_devices: int = 1,
        max_logprobs: int = DEFAULT_MAX_LOGPROBS,
        observer: Observer | None = None,
        features: tuple[int, ...] = (),
        sparsity: Sparsity | None = None,
        num_adapters: int = 0,
    ) -> Model:
        """Return the static parameters of steps for `arch`: for one of `num_devices` shards of it, in a shard_map."""
        local, layout = arch.local(num_devices), LogprobLayout.from_sizes(max_logprobs, arch.vocab_size)
        split = VocabSplit(local.vocab_axis, num_devices, arch.vocab_size) if local.vocab_axis else None
        return Model(local, backend, layout, split, observer, features, sparsity, num_adapters)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Layers here whose inputs the observer reads; the last layer's output also has an index."""
        stage, count = self.arch.stage, self.arch.num_layers
        if stage.is_whole:
            return self.features
        local = (layer - stage.first_layer for layer in sorted(self.features))
        return tuple(layer for layer in local if 0 <= layer < count + stage.is_last)

    @property
    def num_carried(self) -> int:
        """Number of features from earlier pipeline stages, which accompany the hidden states."""
        return sum(layer < self.arch.stage.first_layer for layer in self.features)

    @property
    def can_leave_out_tokens(self) -> bool:
        """True if the last layers, after those that write keys and values, may skip tokens whose logits are not wanted.

        That is so if nothing else reads their hidden states. On accelerators, and with their kernels interpreted,
        nothing is skipped yet: the second variant of the last layers takes temporaries there, and its gain has not been
        measured.
        """
        layer, is_cpu = self.arch.last_kv_layer, target_platform() == "cpu" and self.backend in ("native", "xla")
        if layer is None or self.arch.token_axis is not None or not is_cpu:
            return False
        return self.observer is None or (self.features != () and max(self.feature_layers, default=0) <= layer)

    def observing(self, params: Any) -> tuple[Params, Observe | None]:
        """Split a program's parameters: return the model's, and the observer's `observe` bound to all of them.

        Without an observer, `params` are the model's, and the function is None.
        """
        return (params, None) if self.observer is None else (params[0], partial(self.observer.observe, params))

    @property
    def read_logprobs(self) -> ReadLogprobs:
        """Function (logits, token_ids, num_top) -> TokenLogprobs, for the layout of the logits over devices."""
        return self.split.token_logprobs if self.split else token_logprobs


def begin(state: ServeState, layout: BatchLayout, blob: Array) -> tuple[ServeState, Any]:
    """Unpack a step's `blob` of inputs; return the state with new page table entries and zero expert counts, and the
    batch.
    """
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
    before: Float[Array, "T before"] | None = None,
) -> tuple[ServeState, StepOutput]:
    """Run the model on one round's tokens, and sample; return the state, and the output of this round.

    Round 0 computes each row's planned tokens, a later one the token that the previous round has sampled.

    Args:
        params: the model's parameters.
        state: device state.
        batch: inputs of the step.
        index: round.
        model: static parameters.
        observe: function that observes the tokens for a proposer, if any.
        before: hidden states from the previous pipeline stage; None in the first one.
    """
    rows = planned_rows(state.sequences, batch, index)
    tokens = round_tokens(batch, rows, state.slots, index, model.arch.image_token_id)
    state, logits, hidden = compute_tokens(params, state, batch, rows, tokens, model, observe, before)
    state, sampled = sample_rows(state, batch, rows, tokens, logits, model)
    with jax.named_scope("logprobs"):
        logprobs, prompt_logprobs = step_logprobs(params, state, batch, rows, tokens, logits, sampled, hidden, model)
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
    before: Float[Array, "T before"] | None = None,
) -> tuple[ServeState, Float[Array, "R V"], Float[Array, "T D"]]:
    """Run the model; return the state with new keys and values, each row's last logits, and hidden states.

    `before` has the hidden states from the previous pipeline stage; None in the first one.

    Sequence lengths do not change here: sampling updates them.
    """
    hidden, observed, state = run_model(
        params,
        state,
        rows,
        tokens,
        batch.num_rows,
        model,
        state_rows=state_rows(batch, rows, tokens),
        last_only=batch.wants_prompt_logprobs == 0,
        before=before,
    )
    if observe is not None:
        with jax.named_scope("observe"):
            state = dataclasses.replace(state, draft=observe(state, rows, tokens.token_ids, observed))
    last = rows.cu_q_lens[1:] - 1
    slots = adapter_slots(state, rows, tokens)
    if slots is not None:
        slots = jnp.where(rows.q_lens > 0, slots.at[last].get(**CLIPPED), 0)
    return state, token_logits(params, state, hidden.at[last].get(**CLIPPED), slots, model, batch.num_rows), hidden


def adapter_slots(state: ServeState, rows: Rows, tokens: Tokens) -> Int[Array, " T"] | None:
    """Return the tokens' adapter slots, 0 for the base model and for padding; None without adapters."""
    if state.adapters is None:
        return None
    slot = rows.slot.at[tokens.row].get(**CLIPPED)
    return jnp.where(tokens.live, state.sequences.adapter(slot, tokens.history), 0)


def token_logits(
    params: Params,
    state: ServeState,
    hidden: Float[Array, "N D"],
    slots: Int[Array, " N"] | None,
    model: Model,
    num_live: Int[Array, ""] | None = None,
) -> Float[Array, "N V"]:
    """Return the logits of some tokens.

    Args:
        params: the model's parameters.
        state: device state, which has the adapters.
        hidden: the tokens' hidden states.
        slots: their adapter slots; None without adapters.
        model: static parameters.
        num_live: number of tokens before all padding; None if all may be live.
    """
    adapters = None if slots is None else TokenAdapters(slots, model.num_adapters)
    return decoder.compute_logits(with_adapters(params, state.adapters), model.arch, hidden, num_live, adapters)


def sample_rows(
    state: ServeState, batch: StepBatch, rows: Rows, tokens: Tokens, logits: Float[Array, "R V"], model: Model
) -> tuple[ServeState, Int[Array, " R"]]:
    """Sample a token from each row's `logits`; return the state after the round, and the token ids.

    The state then has the round's tokens and the sampled ones in its histories and counts, and ended sequences stopped.
    """
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
    last_only: Bool[Array, ""] | bool = False,
    before: Float[Array, "T before"] | None = None,
) -> tuple[Float[Array, "T after"], Float[Array, "T observed"], ServeState]:
    """Run the model's layers on `tokens`; return their hidden states, their features for an observer, and the state.

    Features are the inputs of `model.features`, or the hidden states if there are none; between pipeline stages they
    follow the hidden states in one array. The state has the tokens' keys, values, recurrent states and expert counts.

    Args:
        params: the model's parameters.
        state: device state.
        rows: rows that the tokens belong to.
        tokens: tokens to compute, T with padding.
        num_rows: number of rows that are not padding.
        model: static parameters.
        tree_mask: ancestor bits of tokens in drafted trees; None without trees.
        state_rows: rows for recurrent layers; None without them.
        last_only: True if hidden states may be zero except for the rows' last tokens.
        before: hidden states from the previous pipeline stage; None in the first one.
    """
    arch, live, shards = model.arch, tokens.live, None
    choosing = None
    if model.sparsity is not None and model.sparsity.hides_pages:
        pages = visible_pages(state.sequences, rows, model.sparsity)
        selected = tuple(pages if window is None else None for window in arch.kv_layout.windows)
        rows = dataclasses.replace(rows, pages_to_read=selected)
    if arch.token_axis is not None:
        shards = ShardRows.from_rows(rows, tokens, state.sequences.length.shape[0], arch.num_data_shards)
        rows, tokens, num_rows = shards.select(rows, tokens, lax.axis_index(arch.token_axis))
        live = shards.live
    forms = zip(arch.kv_layout.forms, ragged_rows(state.sequences, rows, num_rows), strict=True)
    groups = tuple(form.step_rows(model.backend, group) for form, group in forms)
    if arch.page_budget is not None:
        choosing = (rows.q_lens == 1) & (rows.start.history >= state.sequences.num_prompt(rows.slot))
    attention = PagedAttention(
        *(model.backend, state.kv_pages, groups, tree_mask, state.states, state_rows),
        choosing=choosing,
        ahead=tokens.ahead,
        chosen=arch.kv_layout.pool.no_choice(model.backend, state.kv_pages, groups[0], tokens.row.shape[0]),
    )
    slot = rows.slot.at[tokens.row].get(**CLIPPED)
    slots = adapter_slots(state, rows, tokens)
    adapters = None if slots is None else TokenAdapters(slots, model.num_adapters)
    context = TokenContext(
        tokens.position,
        attention,
        tokens.row,
        slot,
        live,
        state.expert_tokens,
        num_live=rows.cu_q_lens[-1],
        adapters=adapters,
        axes=tokens.axes,
    )
    if tokens.image_row is not None and state.encoder_cache is not None:  # the first stage has embedded them
        context = dataclasses.replace(context, images=TokenImages(state.encoder_cache, tokens.image_row))
    needs_all = None
    can_leave_out = model.can_leave_out_tokens and state.expert_tokens is None  # tokens are counted in all layers
    if last_only is not False and can_leave_out and rows.slot.shape[0] < tokens.row.shape[0]:
        context = dataclasses.replace(context, last=groups[0].last_tokens()[1])
        needs_all = None if last_only is True else ~last_only
    stage_input = None if before is None else before[:, : arch.hidden_size]
    hidden, features, context = decoder.forward_with_features(
        with_adapters(params, state.adapters),
        *(arch, tokens.token_ids, context, model.feature_layers, needs_all, stage_input),
    )
    if before is not None and model.features:
        features = jnp.concatenate([before[:, arch.hidden_size :], features], axis=1)
        if arch.stage.is_last:  # so far by layer
            order = [sorted(model.features).index(layer) for layer in model.features]
            parts = jnp.split(features, len(order), axis=1)
            features = jnp.concatenate([parts[index] for index in order], axis=1)
    attention = PagedAttention.after(context)
    if shards is not None:
        hidden = all_tokens(hidden, arch.token_axis).at[shards.padded_index].get(**CLIPPED)
    state = dataclasses.replace(
        state, kv_pages=attention.kv_pages, states=attention.states, expert_tokens=context.expert_tokens
    )
    if not arch.stage.is_last:
        return jnp.concatenate([hidden, features], axis=1), features, state
    return hidden, features if model.features else hidden, state


def with_counts(state: ServeState, output: StepOutput) -> tuple[ServeState, StepOutput]:
    """Return the state, and the output with the tokens per expert that the state has counted in this step."""
    return state, dataclasses.replace(output, expert_tokens=state.expert_tokens)


def step_logprobs(
    params: Params,
    state: ServeState,
    batch: StepBatch,
    rows: Rows,
    tokens: Tokens,
    logits: Float[Array, "R V"],
    sampled: Int[Array, " R"],
    hidden: Float[Array, "T D"],
    model: Model,
) -> tuple[Int[Array, "R words"], Int[Array, "T words"]]:
    """Return packed log probabilities for the sampled tokens, and for each token's successor; zeros if unwanted.

    One loop over blocks of both, so that they share code, and so that logits of all tokens never exist. Successors are
    prompt tokens, whose ids the host sends. Ids in the token history must not be read here: without an order between
    this read and the write of new ids, XLA copies the whole table.

    Args:
        params: the model's parameters.
        state: device state, which has the adapters.
        batch: step inputs, which specify the wanted outputs.
        rows: rows of the round.
        tokens: tokens of the round.
        logits: each row's last logits.
        sampled: token sampled from them.
        hidden: hidden states of all tokens.
        model: static parameters.
    """
    T, R = hidden.shape[0], sampled.shape[0]
    block = min(T, LOGPROB_BLOCK)
    row_blocks = -(-R // block)
    padding = row_blocks * block - R
    is_last = jnp.arange(T) == rows.cu_q_lens[1:][tokens.row] - 1
    next_sent = batch.token_ids.at[tokens.planned + 1].get(**CLIPPED)
    if (image_token_id := model.arch.image_token_id) is not None:
        next_sent = jnp.where(image_rows(next_sent) >= 0, image_token_id, next_sent)
    following = jnp.where(is_last, batch.next_ids[tokens.row], next_sent)
    wants_rows, wants_tokens = batch.wants_logprobs > 0, batch.wants_prompt_logprobs > 0
    slots = adapter_slots(state, rows, tokens)
    empty = jnp.zeros((row_blocks * block + T, model.logprobs.num_words), jnp.int32)

    def compute() -> Int[Array, "N words"]:
        padded_logits = jnp.pad(logits, ((0, padding), (0, 0)))
        token_ids = jnp.concatenate([jnp.pad(sampled, (0, padding)), following])

        def read(index: Int[Array, ""], out: Int[Array, "N words"]) -> Int[Array, "N words"]:
            is_rows = index < row_blocks
            start = jnp.where(is_rows, index * block, jnp.minimum((index - row_blocks) * block, T - block))
            position = jnp.where(is_rows, start, row_blocks * block + start)

            def part(x: Shaped[Array, "T *D"]) -> Shaped[Array, "N *D"]:
                return lax.dynamic_slice_in_dim(x, start, block)

            block_logits = lax.cond(
                is_rows,
                lambda: lax.dynamic_slice_in_dim(padded_logits, start, block),
                lambda: token_logits(params, state, part(hidden), None if slots is None else part(slots), model),
            )
            block_ids = lax.dynamic_slice_in_dim(token_ids, position, block)
            found = model.read_logprobs(block_logits, block_ids, model.logprobs.num_top)
            return lax.dynamic_update_slice_in_dim(out, found.pack(), position, 0)

        num_blocks = jnp.where(wants_tokens, -(-rows.cu_q_lens[-1] // block), 0)
        found = lax.fori_loop(jnp.where(wants_rows, 0, row_blocks), row_blocks + num_blocks, read, empty)
        row_words, token_words = found[: row_blocks * block], found[row_blocks * block :]
        return jnp.concatenate(
            [row_words, jnp.zeros_like(token_words).at[tokens.planned].set(token_words, mode="drop")]
        )

    # Not a loop with zero rounds: XLA hoists the loop-invariant part, and would always compute it.
    out: Array = lax.cond(wants_rows | wants_tokens, compute, lambda: empty)
    return out[:R], out[row_blocks * block :]
