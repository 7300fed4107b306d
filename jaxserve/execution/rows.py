"""Rows and tokens of a round: which rows compute, the positions of their tokens, and the updates of sequences."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxserve.execution.batch import FIRST_IMAGE_ID, StateBatch, StepBatch
from jaxserve.execution.sampling import SamplingRows, SlotTable
from jaxserve.execution.state import CLIPPED, DROPPED, Lengths, Sequences
from jaxserve.layers.state_forms import StateRows
from jaxserve.pallas_kernels.ragged_paged_attention import PagesToRead, RaggedRows
from jaxserve.scheduling.kv_cache.sparsity import Sparsity


@no_type_check  # also rebuilt around shapes and placeholders, like every pytree
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """The R rows of one round, as found by the device. A row that has stopped has no tokens.

    Attributes:
        slot: slot per row.
        start: sequence lengths before this round.
        q_lens: number of tokens to compute.
        cu_q_lens: first token of each row, and the end of the last one.
        samples: True if the row's last token is the last of its sequence, so that another one is sampled.
        pages_to_read: pages that the rows attend to in each KV group, None for all of the group; None for all in every
            group. Groups with windows read all.
    """

    slot: Int[Array, " R"]
    start: Lengths
    q_lens: Int[Array, " R"]
    cu_q_lens: Int[Array, " R1"]
    samples: Bool[Array, " R"]
    pages_to_read: tuple[PagesToRead | None, ...] | None = None

    @staticmethod
    def packed(
        slot: Array,
        start: Lengths,
        q_lens: Array,
        samples: Array,
        pages_to_read: tuple[PagesToRead | None, ...] | None = None,
    ) -> Rows:
        """Return rows with `q_lens` tokens each, contiguous on the token axis; see `Rows` for the arguments."""
        cu_q_lens = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(q_lens, dtype=jnp.int32)])
        return Rows(slot, start, q_lens, cu_q_lens, samples, pages_to_read)

    def moved(self, by: Array, q_lens: Array) -> Rows:
        """Return rows of the same sequences with `q_lens` tokens, which begin `by` tokens later (or earlier)."""
        return Rows.packed(self.slot, self.start.plus(by), q_lens, self.samples)

    @property
    def end(self) -> Lengths:
        """Sequence lengths after this round's tokens."""
        return self.start.plus(self.q_lens)


@no_type_check  # also rebuilt around shapes and placeholders, like every pytree
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tokens:
    """The token axis of one round, with length T.

    Attributes:
        row: row per token; clipped to a valid one for padding.
        history: index in its sequence's token history; 0 for padding.
        position: position; 0 for padding.
        live: True if the token is not padding.
        planned: index on the token axis packed by the host, which still includes stopped rows.
        token_ids: token ids; arbitrary for padding.
        image_row: row of the encoder cache that each token takes as its embedding, -1 for its id's; None if no token
            can be an image's.
        axes: M-RoPE positions on each axis; None if all have `position`.
        ahead: number of later tokens that each token sees; None if none sees any.
    """

    row: Int[Array, " T"]
    history: Int[Array, " T"]
    position: Int[Array, " T"]
    live: Bool[Array, " T"]
    planned: Int[Array, " T"]
    token_ids: Int[Array, " T"]
    image_row: Int[Array, " T"] | None = None
    axes: Int[Array, "T 3"] | None = None
    ahead: Int[Array, " T"] | None = None

    def at(self, index: Int[Array, " N"], row: Array, before: Lengths, live: Array) -> Tokens:
        """Return the tokens at `index` for a shard with rows of its own.

        Args:
            index: indices of the shard's tokens; arbitrary for padding.
            row: the shard's row per token.
            before: lengths of its sequence before it.
            live: mask of tokens that are no padding.
        """
        columns = self.planned, self.token_ids, self.image_row, self.axes, self.ahead
        taken = jax.tree.map(lambda column: column.at[index].get(**CLIPPED), columns)
        return Tokens(row, before.history, before.position, live, *taken)


def ragged_rows(sequences: Sequences, rows: Rows, num_rows: Int[Array, ""]) -> list[RaggedRows]:
    """Return the attention kernel's input for a round's rows, one entry per KV group with its page table rows.

    `num_rows` is the number of rows that are not padding.
    """
    page_table, kv_lens, cu_q_lens = sequences.page_table, rows.end.cached, rows.cu_q_lens
    table_rows = sequences.table_rows(rows.slot)
    to_read = zip(table_rows, rows.pages_to_read or [None] * len(table_rows), strict=True)
    return [RaggedRows(kv_lens, page_table, cu_q_lens, num_rows, row, pages) for row, pages in to_read]


def visible_pages(sequences: Sequences, rows: Rows, sparsity: Sparsity) -> PagesToRead:
    """Return the pages that are not hidden from rows of output tokens; rows of prompt tokens see all of theirs."""
    start = rows.start.history
    num_prompt = sequences.num_prompt(rows.slot)
    num_hidden = jnp.where(start < num_prompt, 0, sparsity.num_hidden(start, num_prompt))
    column = jnp.arange(sequences.page_table.shape[1], dtype=jnp.int32)[None, :]
    return PagesToRead(column + jnp.where(column < sparsity.num_sink_pages, 0, num_hidden[:, None]), num_hidden)


def state_rows(batch: StepBatch, rows: Rows, tokens: Tokens) -> StateRows | None:
    """Return the rows for recurrent layers: the state entries that each row reads and writes, and its tokens.

    None for a model without such layers. In a plan with several rounds each row continues in its slot's entry, and none
    takes a snapshot.
    """
    if not isinstance(batch, StateBatch):
        return None
    return StateRows(
        source=batch.source,
        target=rows.slot,
        start=rows.start.history,
        cu_q_lens=rows.cu_q_lens,
        row=tokens.row,
        offset=jnp.arange(tokens.row.shape[0], dtype=jnp.int32) - rows.cu_q_lens[tokens.row],
        kept_len=jnp.where(rows.q_lens > 0, batch.kept_len, 0),
        kept=batch.kept,
    )


def takes_part(sequences: Sequences, batch: StepBatch, index: Int[Array, "*R"]) -> Bool[Array, " R"]:
    """Return the mask of rows that compute tokens in a round: first all that have not stopped, then those that sample
    more.

    Args:
        sequences: sequences by slot.
        batch: inputs of the step.
        index: number of tokens sampled in earlier rounds, per row or for all.
    """
    goes_on = batch.is_row & ~sequences.stopped.at[batch.slot].get(**CLIPPED)
    return goes_on & (index < jnp.maximum(batch.max_new, 1))


def planned_rows(sequences: Sequences, batch: StepBatch, index: Int[Array, "*R"]) -> Rows:
    """Return the rows of a round, with their planned tokens in the first one and then one token each.

    Rows that do not take part have no tokens; see `takes_part`, also for the arguments.
    """
    is_on = takes_part(sequences, batch, index)
    planned = batch.cu_q_lens[1:] - batch.cu_q_lens[:-1]
    q_lens = jnp.where(is_on, jnp.where(index == 0, planned, 1), 0)
    return Rows.packed(batch.slot, sequences.lengths(batch.slot), q_lens, samples=is_on & (batch.max_new > 0))


def num_draftable(sequences: Sequences, rows: Rows, sparsity: Sparsity | None = None) -> Int[Array, " R"]:
    """Return the number of drafted tokens, after each row's first token, that its sequence has positions for.

    A sequence's last token needs no page. All tokens of a row must see the same keys and values.
    """
    start, stop = rows.start.history, sequences.max_len(rows.slot) - 1
    if sparsity is not None:
        num_prompt = sequences.num_prompt(rows.slot)
        stop = jnp.minimum(stop, jnp.where(start < num_prompt, num_prompt, sparsity.row_end(start)))
    return jnp.maximum(stop - 1 - start, 0)


def place_tokens(rows: Rows, num_tokens: int) -> tuple[Array, Array, Lengths, Array]:
    """Find each token's row on the token axis, for `num_tokens` tokens.

    Returns, per token: its row, its offset in the row, its sequence's lengths before it, and whether it is no padding.
    """
    R = rows.slot.shape[0]
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    row = jnp.sum(token[:, None] >= rows.cu_q_lens[None, 1:], axis=1, dtype=jnp.int32)  # compiles faster than a search
    live, row = row < R, jnp.minimum(row, R - 1)
    offset = token - rows.cu_q_lens[row]
    return row, offset, Lengths(*(jnp.where(live, start[row] + offset, 0) for start in rows.start)), live


def round_tokens(
    batch: StepBatch, rows: Rows, slots: SlotTable, index: Int[Array, ""], image_token_id: int | None = None
) -> Tokens:
    """Return a round's tokens, with ids from the host in the first round, or sampled ones from the token history.

    Args:
        batch: inputs of the step.
        rows: rows of the round.
        slots: slot tables with the token history.
        index: number of tokens sampled in earlier rounds.
        image_token_id: id of tokens that take images' embeddings; None without images.
    """
    T = batch.token_ids.shape[0]
    row, offset, before, live = place_tokens(rows, T)
    planned = jnp.where(live, batch.cu_q_lens[row] + offset, T)
    sent = jnp.where(index == 0, batch.token_ids.at[planned].get(**CLIPPED), -1)
    sampled = slots.token_history.at[rows.slot[row], before.history].get(**CLIPPED)
    token_ids = jnp.where(sent < 0, sampled, sent)
    image_row = axes = ahead = None
    if image_token_id is not None:
        image_row = jnp.where(live, image_rows(sent), -1)
        token_ids = jnp.where(image_row >= 0, image_token_id, token_ids)
    if batch.axes is not None:
        given = jnp.where(index == 0, batch.axes.at[:, planned].get(**CLIPPED), -1)
        axes = jnp.where(given < 0, before.position, given).T
    if batch.ahead is not None:
        ahead = jnp.where((index == 0) & live, batch.ahead.at[planned].get(**CLIPPED), 0)
    return Tokens(row, before.history, before.position, live, planned, token_ids, image_row, axes, ahead)


def image_rows(sent: Int[Array, " T"]) -> Int[Array, " T"]:
    """Return the encoder cache's rows for token ids as `StepBatch.token_ids` has them; negative for other tokens."""
    return FIRST_IMAGE_ID - sent


def remember(slots: SlotTable, rows: Rows, tokens: Tokens, sampled: Int[Array, " R"]) -> SlotTable:
    """Return the slot tables with a round's tokens, and each row's `sampled` token after them, in the history."""
    S = slots.token_history.shape[0]  # out of range, dropped
    slot = [jnp.where(tokens.live, rows.slot[tokens.row], S), jnp.where(rows.samples, rows.slot, S)]
    index, token_ids = [tokens.history, rows.end.history], [tokens.token_ids, sampled]
    indices = jnp.concatenate(slot), jnp.concatenate(index)
    history = slots.token_history.at[indices].set(jnp.concatenate(token_ids), **DROPPED)
    return dataclasses.replace(slots, token_history=history)


def remember_unsampled(slots: SlotTable, rows: Rows, tokens: Tokens) -> SlotTable:
    """Return the slot tables with a round's tokens in the history."""
    slot = jnp.where(tokens.live, rows.slot[tokens.row], slots.token_history.shape[0])  # out of range, dropped
    history = slots.token_history.at[slot, tokens.history].set(tokens.token_ids, **DROPPED)
    return dataclasses.replace(slots, token_history=history)


def advance(
    sequences: Sequences, rows: Rows, sampling: SamplingRows, slots: SlotTable, sampled: Int[Array, " R"]
) -> Sequences:
    """Return the sequences after a round: its tokens count as computed, and sequences that have ended are stopped.

    A sequence ends by its `sampled` token, or at its maximum length.
    """
    S = sequences.length.shape[0]
    is_last = ends_sequence(sequences, rows.slot, rows.end.history, sampling.min_history_len, slots, sampled)
    length = sequences.length.at[jnp.where(rows.q_lens > 0, rows.slot, S)].set(rows.end.history, **DROPPED)
    stopped = sequences.stopped.at[jnp.where(rows.samples & is_last, rows.slot, S)].set(True, **DROPPED)
    return dataclasses.replace(sequences, length=length, stopped=stopped)


def ends_sequence(
    sequences: Sequences,
    slot: Int[Array, " R"],
    history_len: Int[Array, " R"],
    min_history_len: Int[Array, " R"],
    slots: SlotTable,
    sampled: Int[Array, " R"],
) -> Bool[Array, " R"]:
    """Return the mask of `sampled` tokens that end their sequences: stop ids, and tokens at the maximum length.

    Args:
        sequences: sequences by slot.
        slot: slot per row.
        history_len: tokens before the sampled one.
        min_history_len: minimum `history_len` at which a stop id counts.
        slots: slot tables with the stop ids.
        sampled: sampled token per row.
    """
    stop_ids = slots.stop_ids.at[slot].get(**CLIPPED)
    is_stop = jnp.any(sampled[:, None] == stop_ids, axis=1) & (history_len >= min_history_len)
    is_full = history_len + 1 >= sequences.max_len(slot)
    return is_stop | is_full
