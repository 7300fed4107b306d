"""Speculative rounds: tokens are drafted, the model computes all of them at once, and sampling keeps those it accepts.

Verification reads the weights once for the last known token of a row and its drafted ones. Then the tokens of a row are
sampled one after the other, each exactly as in a plain round, with the same adjustments, counts and stops; a row goes
on as long as what it samples is what was drafted. So drafts change how many tokens a round yields, never which ones a
greedy row gets, nor how those of the others are distributed.

Drafted tokens are a chain, or a tree of several continuations. In a tree each token sees its own ancestors alone
(SpecInfer, Miao et al. 2023), and a row goes on as long as one of a token's children is what it samples. The keys and
values of the path that it took are then moved together. Those of drafted tokens that were not accepted stay in the
row's own pages, behind its length, until the next round overwrites them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, no_type_check, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxserve.execution.batch import BatchLayout, SpeculativeBatch
from jaxserve.execution.round import (
    Model,
    Rows,
    StepOutput,
    Tokens,
    advance,
    ends_sequence,
    place_tokens,
    planned_rows,
    run_model,
    takes_part,
    with_counts,
    without_counts,
)
from jaxserve.execution.state import CLIPPED, ServeState, set_pages
from jaxserve.models import decoder
from jaxserve.models.arch import ArchConfig
from jaxserve.models.params import Params
from jaxserve.pallas_kernels.ragged_paged_attention import Pages
from jaxserve.sampling import DraftedTokens, SamplingRows, count_sampled, sample

BothParams = tuple[Params, Params]  # parameters of the model and of the proposer


@no_type_check  # rebuilt around shapes and placeholders too, as every pytree is
@struct.dataclass
class Drafts:
    """Tokens proposed for R rows, N at most for each. Node 0 is a row's last known token, node n its n-th proposal.

    Attributes:
        token_ids: proposed ids; parents before their children.
        count: number of tokens proposed for each row.
        weights: weights that each token of a chain was drawn by, up to a factor; None where the proposer does not draw.
        ancestors: word per proposed token of a tree: bit n is set if node n is on the path to it, bit 0 always. None
            for chains.
    """

    token_ids: Int[Array, "R N"]
    count: Int[Array, " R"]
    weights: Float[Array, "N R V"] | None
    ancestors: Int[Array, "R N"] | None = None

    @property
    def words(self) -> Int[Array, "R N1"]:
        """Ancestors of each node, that of node 0 first."""
        R, N = self.token_ids.shape
        chain = jnp.asarray((1 << np.arange(1, N + 1)) - 1, jnp.int32)
        words = jnp.broadcast_to(chain, (R, N)) if self.ancestors is None else self.ancestors
        return jnp.pad(words, ((0, 0), (1, 0)))

    @property
    def depth(self) -> Int[Array, "R N1"]:
        """Tokens between node 0 and each node, the node included."""
        return lax.population_count(self.words)

    @property
    def parent(self) -> Int[Array, "R N"]:
        """Node that each proposed token follows."""
        return 31 - lax.clz(self.words[:, 1:])

    @property
    def num_levels(self) -> Int[Array, " R"]:
        """Tokens of the longest continuation that is proposed for each row."""
        return jnp.max(jnp.where(jnp.arange(self.words.shape[1])[None] <= self.count[:, None], self.depth, 0), axis=1)

    def children(self, sampled: Int[Array, "R N1"]) -> Bool[Array, "R N"]:
        """Return the mask of proposed tokens that were sampled at their parents; of equal siblings only the first."""
        N, parent = self.token_ids.shape[1], self.parent
        index = jnp.arange(N)[None]
        fits = (index < self.count[:, None]) & (self.token_ids == jnp.take_along_axis(sampled, parent, axis=1))
        if self.ancestors is None:
            return fits
        same = (parent[:, :, None] == parent[:, None]) & fits[:, :, None] & (index[:, :, None] < index[:, None])
        return fits & ~jnp.any(same, axis=1)


@runtime_checkable
class Proposer(Protocol):
    """Source of drafted tokens on the device. Hashable; its arrays are parameters and state of the programs."""

    @property
    def max_drafts(self) -> int:
        """Most tokens of a continuation that it proposes for a row, K."""

    @property
    def max_nodes(self) -> int:
        """Most tokens that it proposes for a row, N: more than K if it proposes trees."""

    def new_state(self) -> Any:
        """Return its state before the first request; None where it needs none."""

    def admit(self, state: Any, slot: Int[Array, " A"]) -> Any:
        """Return its state with new requests in some slots; slots out of range pad."""

    def propose(
        self,
        params: BothParams,
        state: ServeState,
        rows: Rows,
        num_drafts: Int[Array, " R"],
        base_seed: UInt32[Array, ""],
    ) -> tuple[Drafts, Any]:
        """Propose tokens to follow the last known one of each row, which is at `rows.start`.

        Args:
            params: parameters of the model and of the proposer.
            state: state of all sequences; its `draft` is the proposer's own.
            rows: rows of the round.
            num_drafts: tokens of a continuation wanted for each row; 0 for those that take no part.
            base_seed: seed of the engine.

        Returns:
            The tokens, and the proposer's new state.
        """

    def settle(self, state: ServeState, rows: Rows, drafts: Drafts, path: Int[Array, "R N1"]) -> Any:
        """Return its new state after a round.

        Args:
            state: state of all sequences, whose lengths are those after the round.
            rows: rows of the round.
            drafts: tokens proposed.
            path: node that each row took at each depth, node 0 first; the depth itself where it had ended.
        """


@runtime_checkable
class Observer(Proposer, Protocol):
    """Proposer that reads hidden states of the model, in plain steps too."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Layers whose inputs it reads, each once; none for the hidden states after the final norm.

        The number of layers stands for the output of the last one.
        """

    def observe(
        self,
        params: BothParams,
        state: ServeState,
        rows: Rows,
        token_ids: Int[Array, " T"],
        observed: Float[Array, "T observed"],
    ) -> Any:
        """Return its state after the model has computed tokens that belong to the sequences for certain.

        Args:
            params: parameters of the model and of the proposer.
            state: state of all sequences; its `draft` is the proposer's own.
            rows: rows of the tokens.
            token_ids: tokens on the axis of the rows.
            observed: hidden states of the tokens, those of several layers side by side, whole on each device.
        """


def make_speculative_step(
    arch: ArchConfig, layout: BatchLayout, proposer: Proposer, *, backend: str, max_rounds: int, num_devices: int = 1
) -> Any:
    """The speculative step of one bucket: rows in decode go several rounds, each with up to K drafted tokens.

    To be jitted with `state` donated; over several devices, in a shard_map. Parameters are a pair, the model's and the
    proposer's.

    Args:
        arch: sizes of the whole model.
        layout: layout of the bucket's upload.
        proposer: proposer of tokens.
        backend: backend of attention.
        max_rounds: rounds that one dispatch may go.
        num_devices: number of devices that the model is split over.
    """
    model = Model.of(
        arch,
        backend=backend,
        num_devices=num_devices,
        max_logprobs=layout.max_logprobs,
        feature_layers=proposer.feature_layers if isinstance(proposer, Observer) else (),
    )
    R, num_words = layout.num_rows, model.logprobs.num_words
    num_columns = max_rounds * (proposer.max_drafts + 1)

    def serve_step(params: BothParams, state: ServeState, blob: Array) -> tuple[ServeState, StepOutput]:
        batch = layout.unpack(blob)
        assert isinstance(batch, SpeculativeBatch), "the layout is that of a speculative step"
        state = dataclasses.replace(without_counts(state), sequences=set_pages(state.sequences, batch.new_pages))
        state = _with_sent_tokens(state, batch)

        def goes_on(carry: tuple[ServeState, StepOutput, Array]) -> Bool[Array, ""]:
            state, out, index = carry
            return (index < batch.num_rounds) & jnp.any(takes_part(state.sequences, batch, out.sampled[:, 0]))

        def run(carry: tuple[ServeState, StepOutput, Array]) -> tuple[ServeState, StepOutput, Array]:
            state, out, index = carry
            state, out, round_word = _round(params, state, batch, out, model, proposer)
            sampled = lax.dynamic_update_slice(out.sampled, round_word[:, None], (0, 1 + num_columns + index))
            return state, dataclasses.replace(out, sampled=sampled), index + 1

        out = StepOutput(
            sampled=jnp.zeros((R, 1 + num_columns + max_rounds), jnp.int32),
            logprobs=jnp.zeros((R, layout.num_logprob_steps(num_columns), num_words), jnp.int32),
            prompt_logprobs=jnp.zeros((0, num_words), jnp.int32),
        )
        state, out, _ = lax.while_loop(goes_on, run, (state, out, jnp.int32(0)))
        return with_counts(state, out)

    return serve_step


def _with_sent_tokens(state: ServeState, batch: SpeculativeBatch) -> ServeState:
    """Return the state whose history has the tokens that the host sends: a prompt's last one, if it alone was left.

    All other last known tokens have been sampled, or were known when their request was admitted.
    """
    slots = state.slots
    token_ids = batch.token_ids.at[batch.cu_q_lens[:-1]].get(**CLIPPED)
    slot = jnp.where(batch.is_row & (token_ids >= 0), batch.slot, slots.token_history.shape[0])  # out of range, dropped
    position = state.sequences.length.at[batch.slot].get(**CLIPPED)
    history = slots.token_history.at[slot, position].set(token_ids, mode="drop")
    return dataclasses.replace(state, slots=dataclasses.replace(slots, token_history=history))


def _round(
    params: BothParams,
    state: ServeState,
    batch: SpeculativeBatch,
    out: StepOutput,
    model: Model,
    proposer: Proposer,
) -> tuple[ServeState, StepOutput, Int[Array, " R"]]:
    """Draft, verify, sample; returns a word per row that describes the round: see `round_words`."""
    target_params, _ = params
    num_sampled = out.sampled[:, 0]
    rows = planned_rows(state.sequences, batch, num_sampled)
    wanted = jnp.minimum(batch.num_drafts, batch.max_new - num_sampled - 1)
    wanted = jnp.where(rows.samples, jnp.maximum(wanted, 0), 0)
    with jax.named_scope("propose"):
        drafts, draft_state = proposer.propose(params, state, rows, wanted, batch.base_seed)
        room = state.sequences.max_len.at[rows.slot].get(**CLIPPED) - 2 - rows.start  # pages end there
        drafts = dataclasses.replace(drafts, count=jnp.minimum(drafts.count, jnp.maximum(room, 0)))
        state = dataclasses.replace(state, draft=draft_state)
    with jax.named_scope("verify"):
        logits, observed, state = _verify(target_params, state, rows, drafts, batch.num_rows, model)
    with jax.named_scope("accept"):
        state, out, path, num_accepted = _accept(state, batch, rows, drafts, logits, out, model)
    if drafts.ancestors is not None:
        with jax.named_scope("compact"):
            state = dataclasses.replace(state, kv_pages=_compact(state, rows, path, model))
    state = dataclasses.replace(state, draft=proposer.settle(state, rows, drafts, path))
    if isinstance(proposer, Observer):
        with jax.named_scope("observe"):
            kept = Rows.of(rows.slot, rows.start, out.sampled[:, 0] - num_sampled, rows.samples)
            row, node, position, _ = place_tokens(kept, rows.slot.shape[0] * (proposer.max_drafts + 1))
            place = row * (proposer.max_nodes + 1) + path.at[row, node].get(**CLIPPED)
            token_ids = state.slots.token_history.at[kept.slot[row], position].get(**CLIPPED)
            draft_state = proposer.observe(params, state, kept, token_ids, observed[place])
        state = dataclasses.replace(state, draft=draft_state)
    return state, out, round_words(wanted, drafts.num_levels, num_accepted, out.sampled[:, 0] - num_sampled)


def round_words(wanted: Array, drafted: Array, accepted: Array, sampled: Array) -> Int[Array, " R"]:
    """Pack the counts of tokens in a round, each i32[R]; `executor.RoundCounts.unpack` reads them."""
    return wanted << 24 | drafted << 16 | accepted << 8 | sampled


def _verify(
    params: Params, state: ServeState, rows: Rows, drafts: Drafts, num_rows: Int[Array, ""], model: Model
) -> tuple[Float[Array, "N1 R V"], Float[Array, "RN1 observed"], ServeState]:
    """Return logits after the last known token of each row and after each drafted one, and the state: see `run_model`.

    The second result is what a proposer observes of the tokens, row after row.
    """
    R, N = drafts.token_ids.shape
    all_rows = Rows.of(rows.slot, rows.start, rows.q_lens + drafts.count, rows.samples)
    row, node, position, live = place_tokens(all_rows, R * (N + 1))
    known = state.slots.token_history.at[rows.slot[row], position].get(**CLIPPED)
    drafted = drafts.token_ids[row, jnp.maximum(node - 1, 0)]
    tree_mask = None
    if drafts.ancestors is not None:
        tree_mask = drafts.words.at[row, node].get(**CLIPPED)
        position = jnp.where(live, rows.start[row] + lax.population_count(tree_mask), 0)
    tokens = Tokens(row, position, live, position, token_ids=jnp.where(node == 0, known, drafted))
    hidden, observed, state = run_model(params, state, all_rows, tokens, num_rows, model, tree_mask)
    place = all_rows.cu_q_lens[None, :-1] + jnp.arange(N + 1)[:, None]
    logits = decoder.compute_logits(params, model.arch, hidden.at[place.reshape(-1)].get(**CLIPPED))
    return logits.reshape(N + 1, R, -1), observed.at[place.T.reshape(-1)].get(**CLIPPED), state


def _compact(state: ServeState, rows: Rows, path: Int[Array, "R N1"], model: Model) -> Pages:
    """Return the pool in which the tokens of each row's path follow each other."""
    kv_pages = state.kv_pages
    sequences, forms = state.sequences, model.arch.kv_group_forms
    for form, table_row in zip(forms, sequences.table_rows(rows.slot), strict=True):
        kv_pages = form.move_tokens(model.backend, kv_pages, sequences.page_table, table_row, rows.start, path)
    return kv_pages


def _accept(
    state: ServeState,
    batch: SpeculativeBatch,
    rows: Rows,
    drafts: Drafts,
    logits: Float[Array, "N1 R V"],
    out: StepOutput,
    model: Model,
) -> tuple[ServeState, StepOutput, Int[Array, "R N1"], Int[Array, " R"]]:
    """Sample the tokens of each row up to the first that was not drafted; return their nodes and the accepted drafts.

    All are sampled at once if each depends on those before it through its logits alone, and one after the other if
    penalties, masks or log probabilities are wanted.
    """
    at_once = _SampledAtOnce.of(state, batch, rows, drafts, logits, model)
    state, out = at_once.write(state, rows, out)
    live = rows.samples & ~at_once.is_done
    state, out, path, num_accepted = _accept_in_turn(state, batch, rows, drafts, logits, out, model, live, at_once.path)
    return state, out, path, at_once.num_accepted + num_accepted


@no_type_check  # rebuilt around shapes and placeholders too, as every pytree is
@struct.dataclass
class _SampledAtOnce:
    """Tokens of all nodes of a round, sampled independently of each other.

    Attributes:
        is_done: False if the tokens depend on each other; then none is kept.
        token_ids: token that each row sampled at each depth.
        num_kept: tokens that each row keeps.
        path: node that each row took at each depth; the depth itself where it had ended.
        ends: True for rows whose last token ends the sequence.
        num_accepted: drafted tokens that each row keeps.
    """

    is_done: Bool[Array, ""]
    token_ids: Int[Array, "R N1"]
    num_kept: Int[Array, " R"]
    path: Int[Array, "R N1"]
    ends: Bool[Array, " R"]
    num_accepted: Int[Array, " R"]

    @staticmethod
    def of(
        state: ServeState,
        batch: SpeculativeBatch,
        rows: Rows,
        drafts: Drafts,
        logits: Float[Array, "N1 R V"],
        model: Model,
    ) -> _SampledAtOnce:
        """Sample at all nodes; keep each row's path from node 0 as long as a child is what its parent sampled."""
        R, N = drafts.token_ids.shape
        draw = model.split.sample if model.split else sample

        def flat(of_rows: Array) -> Array:
            return jnp.broadcast_to(of_rows, (N + 1, *of_rows.shape)).reshape(-1, *of_rows.shape[1:])

        depth = drafts.depth
        position = (rows.start + rows.q_lens)[None] + depth.T
        records = flat(state.sequences.records.at[rows.slot].get(**CLIPPED))
        sampling = SamplingRows(records, position.reshape(-1), flat(rows.samples))
        depends = sampling.is_masked | sampling.is_biased | sampling.is_penalised
        is_done = ~(jnp.any(depends) | (batch.wants_logprobs > 0))
        drawn = None
        if drafts.weights is not None:
            token_ids = jnp.pad(drafts.token_ids.T, ((0, 1), (0, 0))).reshape(-1)
            is_there = (jnp.arange(N + 1)[:, None] < drafts.count[None]) & rows.samples[None]
            weights = jnp.pad(drafts.weights, ((0, 1), (0, 0), (0, 0)))
            drawn = DraftedTokens(token_ids, is_there.reshape(-1), weights.reshape(-1, weights.shape[2]))
        sampled = lax.cond(
            is_done,
            lambda: draw(logits.reshape((N + 1) * R, -1), sampling, state.slots, batch.base_seed, drawn),
            lambda: jnp.zeros((N + 1) * R, jnp.int32),
        )
        is_last = ends_sequence(
            state.sequences, flat(rows.slot), sampling.position, sampling.min_position, state.slots, sampled
        )
        sampled, is_last = (x.reshape(N + 1, R).T for x in (sampled, is_last))
        parent, words = drafts.parent, drafts.words
        is_child = drafts.children(sampled)
        goes_on = is_child & ~jnp.take_along_axis(is_last, parent, axis=1)
        bits = jnp.asarray(1 << np.arange(N + 1), jnp.int32)  # N is 31 at most
        reached = jnp.pad(goes_on, ((0, 0), (1, 0)), constant_values=True)
        seen = jnp.sum(jnp.where(reached, bits[None], 0), axis=1, keepdims=True, dtype=jnp.int32)
        live = reached & (words & ~seen == 0) & rows.samples[:, None] & is_done
        level = jnp.arange(N + 1)[None]
        at_level = live[:, None] & (depth[:, None] == level[:, :, None])  # [R, N1, N1], one node at most in a level
        num_kept = jnp.sum(live, axis=1, dtype=jnp.int32)
        path = jnp.sum(jnp.where(at_level, jnp.arange(N + 1)[None, None], 0), axis=2, dtype=jnp.int32)
        path = jnp.where(level < num_kept[:, None], path, level)
        return _SampledAtOnce(
            is_done,
            jnp.take_along_axis(sampled, path, axis=1),
            num_kept,
            path,
            jnp.any(live & is_last, axis=1),
            jnp.sum(is_child & jnp.take_along_axis(live, parent, axis=1), axis=1, dtype=jnp.int32),
        )

    def write(self, state: ServeState, rows: Rows, out: StepOutput) -> tuple[ServeState, StepOutput]:
        """Return state and output with the tokens that rows keep."""
        sequences, slots, S = state.sequences, state.slots, state.sequences.length.shape[0]
        R, num_levels = self.token_ids.shape
        index = jnp.arange(num_levels)[None]
        is_kept = index < self.num_kept[:, None]
        slot = jnp.where(is_kept, rows.slot[:, None], S)  # out of range, dropped
        position = (rows.start + rows.q_lens)[:, None] + index
        history = slots.token_history.at[slot, position].set(self.token_ids, mode="drop")
        length = sequences.length.at[slot[:, 0]].set(rows.start + rows.q_lens + self.num_kept - 1, mode="drop")
        stopped = sequences.stopped.at[jnp.where(self.ends, rows.slot, S)].set(True, mode="drop")
        state = dataclasses.replace(
            state,
            sequences=dataclasses.replace(sequences, length=length, stopped=stopped),
            slots=dataclasses.replace(slots, token_history=history),
        )
        row = jnp.where(is_kept, jnp.arange(R)[:, None], R)
        sampled = out.sampled.at[row, 1 + out.sampled[:, :1] + index].set(self.token_ids, mode="drop")
        return state, dataclasses.replace(out, sampled=sampled.at[:, 0].add(self.num_kept))


def _accept_in_turn(
    state: ServeState,
    batch: SpeculativeBatch,
    rows: Rows,
    drafts: Drafts,
    logits: Float[Array, "N1 R V"],
    out: StepOutput,
    model: Model,
    live: Bool[Array, " R"],
    path: Int[Array, "R N1"],
) -> tuple[ServeState, StepOutput, Int[Array, "R N1"], Int[Array, " R"]]:
    """Sample the tokens of the live rows one after the other."""
    R, N = drafts.token_ids.shape
    split = model.split
    draw = split.sample if split else sample
    records = state.sequences.records.at[rows.slot].get(**CLIPPED)
    S = state.slots.token_history.shape[0]  # out of range, dropped
    row = jnp.arange(R)

    def goes_on(carry: tuple[Any, ...]) -> Bool[Array, ""]:
        return jnp.any(carry[1])

    def sample_next(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        index, live, state, out, path, num_accepted = carry
        node = lax.dynamic_index_in_dim(path, index, axis=1, keepdims=False)
        at = dataclasses.replace(rows, q_lens=jnp.where(live, rows.q_lens + index, 0), samples=live)
        logits_at = logits[node, row]
        drawn = None
        if drafts.weights is not None:
            following = jnp.minimum(index, N - 1)
            weights = lax.dynamic_index_in_dim(drafts.weights, following, 0, keepdims=False)
            drawn = DraftedTokens(drafts.token_ids[:, following], live & (index < drafts.count), weights)
        sampling = SamplingRows(records, rows.start + rows.q_lens + index, live)
        sampled = draw(logits_at, sampling, state.slots, batch.base_seed, drawn)
        history = state.slots.token_history.at[jnp.where(live, rows.slot, S), sampling.position]
        slots = dataclasses.replace(state.slots, token_history=history.set(sampled, mode="drop"))
        counts = count_sampled(slots.token_counts, sampling, sampled, split.first_id if split else 0)
        sequences = advance(state.sequences, at, sampling, slots, sampled)
        state = dataclasses.replace(state, sequences=sequences, slots=dataclasses.replace(slots, token_counts=counts))
        column = out.sampled[:, 0]
        to_row = jnp.where(live, row, R)
        words = lax.cond(
            batch.wants_logprobs > 0,
            lambda: model.read_logprobs(logits_at, sampled, model.logprobs.num_top).pack(),
            lambda: jnp.zeros((R, model.logprobs.num_words), jnp.int32),
        )
        out = dataclasses.replace(
            out,
            sampled=out.sampled.at[to_row, 1 + column].set(sampled, mode="drop").at[:, 0].add(live.astype(jnp.int32)),
            logprobs=out.logprobs.at[to_row, column].set(words, mode="drop"),
        )
        is_child = drafts.children(jnp.broadcast_to(sampled[:, None], (R, N + 1))) & (drafts.parent == node[:, None])
        is_accepted = live & jnp.any(is_child, axis=1)
        child = jnp.where(is_accepted, 1 + jnp.argmax(is_child, axis=1), index + 1)
        path = path.at[:, index + 1].set(jnp.where(live, child, path.at[:, index + 1].get(**CLIPPED)), mode="drop")
        stopped = sequences.stopped.at[rows.slot].get(**CLIPPED)
        return index + 1, is_accepted & ~stopped, state, out, path, num_accepted + is_accepted

    start = (jnp.int32(0), live, state, out, path, jnp.zeros(R, jnp.int32))
    _, _, state, out, path, num_accepted = lax.while_loop(goes_on, sample_next, start)
    return state, out, path, num_accepted
