"""Speculative rounds: tokens are drafted, verified by the model together, and kept as far as sampling accepts them.

Verification reads the weights once for a row's last known token and its drafted ones. Then the row's tokens are sampled
one after the other, each exactly as in a plain round, with the same adjustments, counts and stops, as long as the
samples match the draft. Drafts thus change the number of tokens per round, but neither a greedy row's tokens nor
another row's distribution.

Drafted tokens are a chain, or a tree of several continuations. In a tree each token sees only its own ancestors
(SpecInfer, Miao et al. 2023), and a row continues as long as its sample matches one of a token's children. The keys and
values on the accepted path are then moved together. Those of rejected tokens stay in the row's own pages, beyond its
length, until the next round overwrites them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxserve.execution.acceptance import accept
from jaxserve.execution.batch import BatchLayout, SpeculativeBatch
from jaxserve.execution.proposer import BothParams, Drafts, Proposer
from jaxserve.execution.round import Model, StepOutput, adapter_slots, begin, run_model, token_logits, with_counts
from jaxserve.execution.rows import Rows, Tokens, num_draftable, place_tokens, planned_rows, takes_part
from jaxserve.execution.state import CLIPPED, ServeState
from jaxserve.layers.pools import Pool
from jaxserve.models.params import Params

# From a pipeline stage to the next one in a speculative round: hidden states and features, drafted tokens, and their
# number per row.
Before = tuple[Float[Array, "T before"], Int[Array, "R N"], Int[Array, " R"]]


def make_speculative_step(model: Model, layout: BatchLayout, proposer: Proposer, max_rounds: int) -> Any:
    """Return the program (params, state, blob) -> (state, output) for several speculative rounds of decoding rows.

    To be jitted with `state` donated; on several devices, in a shard_map. `params` is a pair: the model's parameters
    and the proposer's. A round has up to K drafted tokens per row.

    Args:
        model: static parameters.
        layout: sizes of the step's bucket, and layout of the blob with its inputs.
        proposer: drafts the tokens.
        max_rounds: maximum rounds.
    """

    def serve_step(params: BothParams, state: ServeState, blob: Array) -> tuple[ServeState, StepOutput]:
        state, batch = begin(state, layout, blob)
        return run_rounds(params, state, batch, layout, model, proposer, max_rounds)

    return serve_step


def run_rounds(
    params: BothParams,
    state: ServeState,
    batch: SpeculativeBatch,
    layout: BatchLayout,
    model: Model,
    proposer: Proposer,
    max_rounds: int,
    before: Before | None = None,
) -> tuple[ServeState, StepOutput]:
    """Run speculative rounds of a batch; return the state and the output. See `make_speculative_step`.

    `before` comes from the previous pipeline stage, for a single round; None in the first one.
    """
    R, num_words = layout.num_rows, model.logprobs.num_words
    num_columns = max_rounds * (proposer.max_drafts + 1)
    state = with_sent_tokens(state, batch)

    def goes_on(carry: tuple[ServeState, StepOutput, Array]) -> Bool[Array, ""]:
        state, out, index = carry
        return (index < batch.num_rounds) & jnp.any(takes_part(state.sequences, batch, out.sampled[:, 0]))

    def run(carry: tuple[ServeState, StepOutput, Array]) -> tuple[ServeState, StepOutput, Array]:
        state, out, index = carry
        state, out, round_word = _round(params, state, batch, out, model, proposer, before)
        sampled = lax.dynamic_update_slice(out.sampled, round_word[:, None], (0, 1 + num_columns + index))
        return state, dataclasses.replace(out, sampled=sampled), index + 1

    out = StepOutput(
        sampled=jnp.zeros((R, 1 + num_columns + max_rounds), jnp.int32),
        logprobs=jnp.zeros((R, layout.num_logprob_steps(num_columns), num_words), jnp.int32),
        prompt_logprobs=jnp.zeros((0, num_words), jnp.int32),
    )
    state, out, _ = lax.while_loop(goes_on, run, (state, out, jnp.int32(0)))
    return with_counts(state, out)


def with_sent_tokens(state: ServeState, batch: SpeculativeBatch) -> ServeState:
    """Return the state with the token ids sent by the host written to the token history.

    The host sends a prompt's last token if only that was left to compute. All other last known tokens have been
    sampled, or were known at admission.
    """
    slots = state.slots
    token_ids = batch.token_ids.at[batch.cu_q_lens[:-1]].get(**CLIPPED)
    slot = jnp.where(batch.is_row & (token_ids >= 0), batch.slot, slots.token_history.shape[0])  # out of range, dropped
    last = state.sequences.length.at[batch.slot].get(**CLIPPED)
    history = slots.token_history.at[slot, last].set(token_ids, mode="drop")
    return dataclasses.replace(state, slots=dataclasses.replace(slots, token_history=history))


def _round(
    params: BothParams,
    state: ServeState,
    batch: SpeculativeBatch,
    out: StepOutput,
    model: Model,
    proposer: Proposer,
    before: Before | None,
) -> tuple[ServeState, StepOutput, Int[Array, " R"]]:
    """Run one speculative round: draft tokens, verify them with the model, and sample as far as they are accepted.

    Returns the state, `out` with the sampled tokens appended, and one word per row that describes the round: see
    `round_words`.
    """
    target_params, _ = params
    num_sampled = out.sampled[:, 0]
    state, rows, drafts, wanted = draft(params, state, batch, num_sampled, model, proposer, before)
    with jax.named_scope("verify"):
        logits, observed, state = _verify(
            target_params, state, rows, drafts, batch.num_rows, model, None if before is None else before[0]
        )
    with jax.named_scope("accept"):
        state, out, path, num_accepted = accept(state, batch, rows, drafts, logits, out, model)
    if drafts.ancestors is not None:
        with jax.named_scope("compact"):
            state = dataclasses.replace(state, kv_pages=_compact(state, rows, path, model))
    state = dataclasses.replace(state, draft=proposer.settle(state, rows, drafts, path))
    if model.observer is not None:
        with jax.named_scope("observe"):
            kept = Rows.packed(rows.slot, rows.start, out.sampled[:, 0] - num_sampled, rows.samples)
            row, node, lengths, _ = place_tokens(kept, rows.slot.shape[0] * (proposer.max_drafts + 1))
            node_index = row * (proposer.max_nodes + 1) + path.at[row, node].get(**CLIPPED)
            token_ids = state.slots.token_history.at[kept.slot[row], lengths.history].get(**CLIPPED)
            draft_state = model.observer.observe(params, state, kept, token_ids, observed[node_index])
        state = dataclasses.replace(state, draft=draft_state)
    return state, out, round_words(wanted, drafts.num_levels, num_accepted, out.sampled[:, 0] - num_sampled)


def draft(
    params: BothParams,
    state: ServeState,
    batch: SpeculativeBatch,
    num_sampled: Int[Array, " R"],
    model: Model,
    proposer: Proposer,
    before: Before | None = None,
) -> tuple[ServeState, Rows, Drafts, Int[Array, " R"]]:
    """Draft tokens for the rows of a round; return the state, the rows, their drafts, and the tokens wanted per row.

    Args:
        params: parameters for model and proposer.
        state: device state.
        batch: inputs of the step.
        num_sampled: tokens that each row has sampled in earlier rounds.
        model: static parameters.
        proposer: drafts the tokens, in the first pipeline stage.
        before: what the previous stage has returned, with its drafts; None in the first one.
    """
    rows = planned_rows(state.sequences, batch, num_sampled)
    wanted = jnp.minimum(batch.num_drafts, batch.max_new - num_sampled - 1)
    wanted = jnp.where(rows.samples, jnp.maximum(wanted, 0), 0)
    if before is not None:
        _, token_ids, count = before
        return state, rows, Drafts(token_ids, count, None), wanted
    with jax.named_scope("propose"):
        drafts, draft_state = proposer.propose(params, state, rows, wanted, batch.base_seed)
        count = jnp.minimum(drafts.count, num_draftable(state.sequences, rows, model.sparsity))
    state = dataclasses.replace(state, draft=draft_state)
    return state, rows, dataclasses.replace(drafts, count=count), wanted


def round_words(wanted: Array, drafted: Array, accepted: Array, sampled: Array) -> Int[Array, " R"]:
    """Pack the numbers of tokens wanted, drafted, accepted and sampled in a round, below 256 each, into one word per
    row.

    `executor_protocol.RoundCounts.unpack` reads them.
    """
    return wanted << 24 | drafted << 16 | accepted << 8 | sampled


def _verify(
    params: Params,
    state: ServeState,
    rows: Rows,
    drafts: Drafts,
    num_rows: Int[Array, ""],
    model: Model,
    before: Float[Array, "T before"] | None,
) -> tuple[Float[Array, "N1 R V"], Float[Array, "RN1 observed"], ServeState]:
    """Run the model on each row's last known token and its drafted ones, N1 nodes per row.

    Returns the logits at each node, the features at each node for an observer, row after row, and the state: see
    `run_model`. `num_rows` is the number of rows that are not padding.
    """
    R, N = drafts.token_ids.shape
    all_rows, tokens, tree_mask = place_nodes(state, rows, drafts)
    hidden, observed, state = run_model(params, state, all_rows, tokens, num_rows, model, tree_mask, before=before)
    node_index = all_rows.cu_q_lens[None, :-1] + jnp.arange(N + 1)[:, None]
    index, slots = node_index.reshape(-1), adapter_slots(state, all_rows, tokens)
    slots = None if slots is None else slots.at[index].get(**CLIPPED)
    logits = token_logits(params, state, hidden.at[index].get(**CLIPPED), slots, model)
    return logits.reshape(N + 1, R, -1), observed.at[node_index.T.reshape(-1)].get(**CLIPPED), state


def place_nodes(state: ServeState, rows: Rows, drafts: Drafts) -> tuple[Rows, Tokens, Int[Array, " T"] | None]:
    """Return rows of the last known tokens and the drafted ones, these tokens, and their ancestor bits in trees."""
    R, N = drafts.token_ids.shape
    all_rows = Rows.packed(rows.slot, rows.start, rows.q_lens + drafts.count, rows.samples, rows.pages_to_read)
    row, node, (history, position, _), live = place_tokens(all_rows, R * (N + 1))
    known = state.slots.token_history.at[rows.slot[row], history].get(**CLIPPED)
    drafted = drafts.token_ids[row, jnp.maximum(node - 1, 0)]
    tree_mask = None
    if drafts.ancestors is not None:
        tree_mask = drafts.words.at[row, node].get(**CLIPPED)
        position = jnp.where(live, rows.start.position[row] + lax.population_count(tree_mask), 0)
    token_ids = jnp.where(node == 0, known, drafted)
    return all_rows, Tokens(row, history, position, live, planned=history, token_ids=token_ids), tree_mask


def _compact(state: ServeState, rows: Rows, path: Int[Array, "R N1"], model: Model) -> Pool:
    """Return the KV pool with the tokens on each row's accepted path of nodes moved together, in all KV groups."""
    kv_pages = state.kv_pages
    sequences, forms = state.sequences, model.arch.kv_layout.forms
    for form, table_row in zip(forms, sequences.table_rows(rows.slot), strict=True):
        kv_pages = form.move_tokens(model.backend, kv_pages, sequences.page_table, table_row, rows.start.cached, path)
    return kv_pages
