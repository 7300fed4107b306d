"""Sampling: adjusts each row's logits, computes token weights, and draws one token.

All features are data, and costly ones run under `lax.cond` only if a live row needs them. XLA takes some milliseconds
to compile each kernel for each step size, so everything exists once, with few operands.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxserve.execution.sampling.penalties import apply_penalties
from jaxserve.execution.sampling.random_bits import ACCEPT, RESIDUAL, TARGET, gumbel_noise, uniform_noise
from jaxserve.execution.sampling.rows import SamplingRows, SlotTable, by_blocks
from jaxserve.execution.sampling.token_gather import add_at, first_argmax, plain_argmax
from jaxserve.execution.sampling.token_mask import bad_word_ends, unpack_mask
from jaxserve.pallas_kernels.target import target_platform

ADJUST_ROWS = 64  # rows adjusted together if more are sampled: adjusting takes three times the memory of their logits
DRAW_BLOCK = 128  # tokens per block of the two-stage draw
TPU_ROWS = 16  # rows that a TPU samples together, so that repeatedly read weights can stay in its vector memory
_FORBIDDEN = -(2.0**126)  # added to logits of masked ids; finite, as `add_at` requires, in bfloat16 too
_GREEDY_DIVISOR = 1e-30  # divisor for greedy rows' logits: the largest keep a weight of 1, all others get 0


@no_type_check  # also rebuilt around shapes and placeholders, like every pytree
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftedTokens:
    """At most one drafted token per row, proposed for the position being sampled.

    Attributes:
        token_ids: proposed ids; arbitrary if there is none.
        is_there: True for rows with a proposal.
        weights: unnormalised draft probabilities per row.
    """

    token_ids: Int[Array, " R"]
    is_there: Bool[Array, " R"]
    weights: Float[Array, "R V"]


def sample(
    logits: Float[Array, "R V"],
    rows: SamplingRows,
    table: SlotTable,
    base_seed: UInt32[Array, ""],
    drafted: DraftedTokens | None = None,
) -> Int[Array, " R"]:
    """Return token ids i32[R] sampled from `logits` [R, V]; rows that are not live get any id in [0, V).

    The order is vLLM's: logit bias, stop ids before `min_history_len`, penalties; then greedy rows take the most likely
    token, the others apply temperature, min_p, top_k and top_p. A row's draw depends only on its logits, its seed and
    position, and the base seed, whatever its neighbours.

    A drafted token is returned if it is accepted; it does not change the distribution of the row's token.
    """

    def adjust_and_draw(block: tuple[Array, SamplingRows, DraftedTokens | None]) -> Int[Array, " R"]:
        logits, rows, drafted = block
        return draw_tokens(adjust_logits(logits, rows, table), rows, base_seed, drafted)

    token_ids: Array = lax.cond(
        takes_most_likely(rows),
        lambda: first_argmax(logits.astype(jnp.float32)),
        lambda: by_blocks(adjust_and_draw, (logits, rows, drafted), rows_at_a_time(logits.shape[0])),
    )
    return token_ids


def rows_at_a_time(num_rows: int) -> int:
    """Return the maximum number of rows, out of `num_rows`, that the target platform samples together."""
    return TPU_ROWS if target_platform() == "tpu" else num_rows


def takes_most_likely(rows: SamplingRows) -> Bool[Array, ""]:
    """Return whether every live row is greedy and nothing changes its logits."""
    return ~jnp.any(rows.is_sampled | rows.is_masked | rows.is_biased | rows.is_penalised)


def adjust_logits(
    logits: Float[Array, "R V"], rows: SamplingRows, table: SlotTable, first_id: Int[Array, ""] | int = 0
) -> Float[Array, "R V"]:
    """Return logits f32[R, V] after everything that affects greedy rows too: bias, forbidden tokens, penalties.

    If the vocabulary is split over devices, `first_id` is the first token of this device's shard.
    """
    logits = logits.astype(jnp.float32)

    def adjust(block: tuple[Array, SamplingRows]) -> Float[Array, "R V"]:
        out, rows = block
        out = lax.cond(
            jnp.any(rows.is_biased | rows.is_masked), lambda: _bias_and_mask(out, rows, table, first_id), lambda: out
        )
        return apply_penalties(out, rows, table)

    wanted = jnp.any(rows.is_masked | rows.is_biased | rows.is_penalised)
    adjusted: Array = lax.cond(wanted, lambda: by_blocks(adjust, (logits, rows), ADJUST_ROWS), lambda: logits)
    return adjusted


def _bias_and_mask(
    logits: Float[Array, "R V"], rows: SamplingRows, table: SlotTable, first_id: Int[Array, ""] | int
) -> Float[Array, "R V"]:
    """Return logits with each row's biases added, and with -inf for the ids that it must not sample.

    These are ids that are not allowed or complete a bad word, and stop ids before `min_history_len`. `first_id` is the
    token of the first column.
    """

    def at_slots(values: Array) -> Array:
        return values.at[rows.slot].get(mode="clip")

    def local_ids(ids: Int[Array, "R B"], wanted: Bool[Array, " R"]) -> Int[Array, "R B"]:
        return jnp.where(wanted[:, None] & (ids >= 0), ids - first_id, -1)

    def add_at_slots() -> Float[Array, "R V"]:
        bad_words = at_slots(table.bad_words)
        bad_ids = bad_word_ends(bad_words, _recent_output(rows, table, bad_words.shape[2] - 1))
        bias_ids = local_ids(at_slots(table.bias_ids), biased)
        forbidden_ids = jnp.concatenate(
            [local_ids(at_slots(table.stop_ids), rows.is_masked), local_ids(bad_ids, biased)], axis=1
        )
        token_ids = jnp.concatenate([bias_ids, forbidden_ids], axis=1)
        values = [at_slots(table.bias_values), jnp.full(forbidden_ids.shape, _FORBIDDEN, jnp.float32)]
        return add_at(logits, token_ids, jnp.concatenate(values, axis=1))

    biased = rows.is_biased
    out = lax.cond(jnp.any(rows.is_masked | rows.has_biased_ids), add_at_slots, lambda: logits)
    allowed = unpack_mask(at_slots(table.allowed), logits.shape[1]) | ~biased[:, None]
    return jnp.where(allowed & (out > _FORBIDDEN / 2), out, -jnp.inf)


def _recent_output(rows: SamplingRows, table: SlotTable, count: int) -> Int[Array, "R N"]:
    """Return the last `count` output tokens of each row, [R, count], with -2 before its first one."""
    index = rows.history_len[:, None] - jnp.arange(count, 0, -1)[None]
    slot = rows.slot[:, None]
    token_ids = table.token_history.at[slot, jnp.maximum(index, 0)].get(mode="clip")
    return jnp.where(index >= table.prompt_len.at[slot].get(mode="clip"), token_ids, -2)


def draw_tokens(
    logits: Float[Array, "R V"],
    rows: SamplingRows,
    base_seed: UInt32[Array, ""],
    drafted: DraftedTokens | None = None,
) -> Int[Array, " R"]:
    """Return token ids i32[R] from adjusted logits: the most likely one for greedy rows, a sampled one for others.

    If `drafted` is given, a sampled row keeps its drafted token if it is accepted.
    """

    def draw() -> Int[Array, " R"]:
        weights = token_weights(logits, rows)
        if drafted is None:
            return draw_by_weight(weights, rows, base_seed)
        return accept_or_draw(weights, rows, base_seed, drafted)

    token_ids: Array = lax.cond(jnp.any(rows.is_sampled), draw, lambda: plain_argmax(logits))
    return token_ids


def accept_or_draw(
    weights: Float[Array, "R V"], rows: SamplingRows, base_seed: UInt32[Array, ""], drafted: DraftedTokens
) -> Int[Array, " R"]:
    """Draw token ids i32[R] in proportion to `weights` [R, V]; drafted ones that are accepted are kept.

    Modified rejection sampling (Leviathan et al. 2023; Chen et al. 2023): with p and q the distributions of target and
    draft, a drafted token is accepted with probability min(1, p / q); otherwise the token is drawn from the positive
    part of p - q. Greedy rows and rows without a draft sample as usual.
    """
    vocab_size = weights.shape[1]
    has_draft = drafted.is_there & rows.is_sampled
    p = weights / jnp.sum(weights, axis=1, keepdims=True)
    q = drafted.weights / jnp.maximum(jnp.sum(drafted.weights, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    residual = jnp.maximum(p - q, 0.0)
    own = jnp.clip(drafted.token_ids, 0, vocab_size - 1)[:, None]
    p_own, q_own = (jnp.take_along_axis(x, own, axis=1)[:, 0] for x in (p, q))
    uniform = uniform_noise(rows.seed, rows.history_len, base_seed, 1, ACCEPT)[:, 0]
    # If p and q differ only by rounding, nothing is left to draw from.
    accepted = has_draft & ((uniform * q_own < p_own) | (jnp.max(residual, axis=1) <= 0))
    stream = jnp.where(has_draft, RESIDUAL, TARGET).astype(jnp.uint32)
    drawn = draw_by_weight(jnp.where(has_draft[:, None], residual, weights), rows, base_seed, stream)
    return jnp.where(accepted, drafted.token_ids, drawn)


def token_weights(logits: Float[Array, "R V"], rows: SamplingRows) -> Float[Array, "R V"]:
    """Return weights f32[R, V] after temperature, min_p, top_k and top_p: the largest is 1, filtered tokens have 0.

    All three filters keep the tokens with at least a threshold weight, so tied tokens stay or go together: top_k keeps
    every token as likely as the k-th; top_p keeps the smallest such set that reaches the fraction `top_p` of the mass
    left by min_p and top_k. The most likely token always stays. A greedy row's largest logits have weight 1.
    """
    sampled = rows.is_sampled
    temperature = jnp.where(sampled, rows.temperature, _GREEDY_DIVISOR)
    weights = jnp.exp((logits - jnp.max(logits, axis=1, keepdims=True)) / temperature[:, None])
    threshold = jnp.maximum(rows.min_p, np.finfo(np.float32).tiny)  # weights that underflow are never drawn
    use_top_k = sampled & (rows.top_k > 0) & (rows.top_k < logits.shape[1])
    use_top_p = sampled & (rows.top_p < 1)

    def filtered(step: Array, threshold: Array) -> Float[Array, " R"]:
        """Return the threshold for top_k in step 0 (counts weights), or for top_p in step 1 (adds weights)."""
        by_mass = step == 1

        def measure(threshold: Array) -> Array:
            kept = weights >= threshold[:, None]
            return jnp.sum(jnp.where(kept, jnp.where(by_mass, weights, 1.0), 0.0), axis=1)  # counts: exact below 2**24

        total = measure(threshold)
        top_k = jnp.where(use_top_k, rows.top_k.astype(jnp.float32), jnp.inf)
        top_p = jnp.where(use_top_p, rows.top_p * total, jnp.inf)
        target = jnp.where(by_mass, top_p, top_k)
        return _largest_threshold(measure, lambda t: jnp.where(by_mass, t, 1.0), threshold, total, target)

    first, last = jnp.where(jnp.any(use_top_k), 0, 1), jnp.where(jnp.any(use_top_p), 2, 1)
    threshold = lax.fori_loop(first, last, filtered, threshold)
    return jnp.where(weights >= threshold[:, None], weights, 0.0)


def draw_by_weight(
    weights: Float[Array, "R V"],
    rows: SamplingRows,
    base_seed: UInt32[Array, ""],
    stream: UInt32[Array, " R"] | int = TARGET,
) -> Int[Array, " R"]:
    """Draw token ids i32[R] in proportion to `weights` [R, V] by the Gumbel-max trick (Maddison et al. 2014).

    The draw has two stages, first a block by its total weight, then a token in it: the same distribution with V / 128 +
    128 random numbers per row instead of V. A greedy row, with weights 0 and 1, gets its first 1.
    """
    num_rows, vocab_size = weights.shape
    num_blocks = -(-vocab_size // DRAW_BLOCK)
    sampled = rows.is_sampled[:, None]
    noise = gumbel_noise(rows.seed, rows.history_len, base_seed, num_blocks + DRAW_BLOCK, stream)
    noise = jnp.where(sampled, noise, 0.0)

    padded = jnp.pad(weights, ((0, 0), (0, num_blocks * DRAW_BLOCK - vocab_size)))
    block_weights = jnp.sum(padded.reshape(num_rows, num_blocks, DRAW_BLOCK), axis=2)  # [R, num_blocks]
    block_weights = jnp.where(sampled, block_weights, jnp.minimum(block_weights, 1.0))
    block = jnp.argmax(jnp.log(block_weights) + noise[:, :num_blocks], axis=1)

    token_ids = block[:, None] * DRAW_BLOCK + jnp.arange(DRAW_BLOCK)[None, :]  # [R, DRAW_BLOCK]
    in_block = jnp.take_along_axis(weights, token_ids, axis=1, mode="fill", fill_value=0.0)
    within = jnp.argmax(jnp.log(in_block) + noise[:, num_blocks:], axis=1)
    return jnp.minimum(block * DRAW_BLOCK + within, vocab_size - 1).astype(jnp.int32)


def _largest_threshold(
    measure: Callable[[Array], Array],
    unit: Callable[[Array], Array],
    floor: Float[Array, " R"],
    floor_measure: Float[Array, " R"],
    target: Float[Array, " R"],
) -> Float[Array, " R"]:
    """Return the threshold in [floor, 1] for the smallest set {weight >= threshold} that reaches `target`, or `floor`.

    `measure(t)` [R] is the measure of the weights >= t, each of which contributes `unit(t)` or more. The search bisects
    the bits of t, which order non-negative floats as integers and are about even in log t: at most 30 steps, and about
    17 until a single weight lies between the bounds, which ends it. Each step reads the weights once; nothing is
    sorted.
    """

    def bits(x: Array) -> Array:
        return lax.bitcast_convert_type(x, jnp.int32)

    def value(x: Array) -> Array:
        return lax.bitcast_convert_type(x, jnp.float32)

    # Low and high ends are rows of one array, and so are their measures: each array in a loop is a kernel to compile.
    def pending(ends: Int[Array, "2 R"], measures: Float[Array, "2 R"]) -> Bool[Array, " R"]:
        several_between = measures[0] - measures[1] >= 2 * unit(value(ends[0]))
        return (measures[0] >= target) & several_between & (ends[1] - ends[0] > 1)

    def step(state: tuple[Array, Array]) -> tuple[Array, Array]:
        ends, measures = state
        middle = ends[0] + (ends[1] - ends[0]) // 2
        middle_measure = measure(value(middle))
        # Finished rows stay unchanged: the number of steps for their neighbours must not move their threshold.
        is_high = jnp.arange(2)[:, None] == 1
        moves = pending(ends, measures)[None] & ((middle_measure < target)[None] == is_high)
        return jnp.where(moves, middle[None], ends), jnp.where(moves, middle_measure[None], measures)

    above_all = jnp.full_like(floor, 1.0 + np.finfo(np.float32).eps)
    ends = jnp.stack([bits(floor), bits(above_all)])
    measures = jnp.stack([floor_measure, jnp.zeros_like(floor)])
    ends, _ = lax.while_loop(lambda state: jnp.any(pending(*state)), step, (ends, measures))
    return value(ends[0])
