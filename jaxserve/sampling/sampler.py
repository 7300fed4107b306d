"""One token per row from its logits: adjust, weigh, draw.

Every feature rides as data, and what is costly stands under `lax.cond` on whether a live row asks for it.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from jaxserve.pallas_kernels.dispatch import target_platform
from jaxserve.sampling.by_token import add_at, first_argmax
from jaxserve.sampling.penalties import apply_penalties, penalised_rows
from jaxserve.sampling.rows import SamplingRows, SlotTable, by_blocks

GREEDY_TEMPERATURE = 1e-5  # below this a row is greedy, as in vLLM
ADJUST_ROWS = 64  # whose logits are adjusted at a time where more are sampled: meanwhile there are three times as many
DRAW_BLOCK = 128  # tokens per block of the two-stage draw
TPU_ROWS = 16  # that a TPU samples at a time, so that what is read again and again may stay in its vector memory


def sample(
    logits: Float[Array, "R V"], rows: SamplingRows, table: SlotTable, base_key: PRNGKeyArray
) -> Int[Array, " R"]:
    """Token ids i32[R] drawn from `logits` [R, V] as each row asks; in [0, V) for rows that are not live too.

    Order as in vLLM: logit bias, stop ids before `min_position`, penalties; then greedy rows take the most
    likely token, the others go through temperature, min_p, top_k and top_p. A row's draw depends on its logits, seed
    and position alone, whatever its neighbours. `base_key` must be a threefry key: other generators give a batch of
    keys different bits than each key alone.
    """
    at_a_time = TPU_ROWS if target_platform() == "tpu" else logits.shape[0]
    token_ids: Array = lax.cond(
        takes_most_likely(rows),
        lambda: first_argmax(logits.astype(jnp.float32)),
        lambda: by_blocks(lambda block: _adjust_and_draw(block, table, base_key), (logits, rows), at_a_time),
    )
    return token_ids


def _adjust_and_draw(
    block: tuple[Float[Array, "R V"], SamplingRows], table: SlotTable, base_key: PRNGKeyArray
) -> Int[Array, " R"]:
    logits, rows = block
    logits = adjust_logits(logits.astype(jnp.float32), rows, table)
    most_likely = first_argmax(logits)
    sampled = _sampled_rows(rows)

    def draw() -> Int[Array, " R"]:
        drawn = draw_tokens(token_weights(logits, rows), rows, base_key)
        return jnp.where(sampled, drawn, most_likely)

    token_ids: Array = lax.cond(jnp.any(sampled), draw, lambda: most_likely)
    return token_ids


def adjust_logits(logits: Float[Array, "R V"], rows: SamplingRows, table: SlotTable) -> Float[Array, "R V"]:
    """Logits f32[R, V] after what may change even a greedy row's token: bias, stop-id mask, penalties."""

    def adjust(block: tuple[Array, SamplingRows]) -> Float[Array, "R V"]:
        out, rows = block
        masked, biased = _masked_rows(rows), _biased_rows(rows)
        out = lax.cond(jnp.any(biased), lambda: _add_bias(out, rows, table, biased), lambda: out)
        out = lax.cond(jnp.any(masked), lambda: _mask_stop_ids(out, rows, table, masked), lambda: out)
        return apply_penalties(out, rows, table)

    wanted = jnp.any(_masked_rows(rows) | _biased_rows(rows) | penalised_rows(rows))
    adjusted: Array = lax.cond(wanted, lambda: by_blocks(adjust, (logits, rows), ADJUST_ROWS), lambda: logits)
    return adjusted


def token_weights(logits: Float[Array, "R V"], rows: SamplingRows) -> Float[Array, "R V"]:
    """Unnormalised probabilities f32[R, V] after temperature, min_p, top_k and top_p: the largest is 1, filtered are 0.

    All three filters keep the tokens whose weight is at least some threshold, so tied tokens stay or go together:
    top_k keeps every token as likely as the k-th, top_p the smallest such set whose share of the mass that
    min_p and top_k left reaches `top_p`. The most likely token always stays.
    """
    sampled = _sampled_rows(rows)
    temperature = jnp.where(sampled, rows.temperature, 1.0)
    weights = jnp.exp((logits - jnp.max(logits, axis=1, keepdims=True)) / temperature[:, None])
    threshold = jnp.maximum(rows.min_p, np.finfo(np.float32).tiny)  # weights that underflow are never drawn

    use_top_k = sampled & (rows.top_k > 0) & (rows.top_k < logits.shape[1])
    threshold = lax.cond(
        jnp.any(use_top_k), lambda: _top_k_threshold(weights, threshold, rows.top_k, use_top_k), lambda: threshold
    )
    use_top_p = sampled & (rows.top_p < 1)
    threshold = lax.cond(
        jnp.any(use_top_p), lambda: _top_p_threshold(weights, threshold, rows.top_p, use_top_p), lambda: threshold
    )
    return jnp.where(weights >= threshold[:, None], weights, 0.0)


def draw_tokens(weights: Float[Array, "R V"], rows: SamplingRows, base_key: PRNGKeyArray) -> Int[Array, " R"]:
    """Token ids i32[R] drawn in proportion to `weights` [R, V] by the Gumbel-max trick (Maddison et al. 2014).

    In two stages, first a block of tokens by its total weight, then a token in it: the same distribution for
    V / 128 + 128 random numbers a row instead of V.
    """
    num_rows, vocab_size = weights.shape
    num_blocks = -(-vocab_size // DRAW_BLOCK)
    noise = _gumbel_noise(rows, base_key, num_blocks + DRAW_BLOCK)

    padded = jnp.pad(weights, ((0, 0), (0, num_blocks * DRAW_BLOCK - vocab_size)))
    block_weights = jnp.sum(padded.reshape(num_rows, num_blocks, DRAW_BLOCK), axis=2)  # [R, num_blocks]
    block = jnp.argmax(jnp.log(block_weights) + noise[:, :num_blocks], axis=1)

    token_ids = block[:, None] * DRAW_BLOCK + jnp.arange(DRAW_BLOCK)[None, :]  # [R, DRAW_BLOCK]
    in_block = jnp.take_along_axis(weights, token_ids, axis=1, mode="fill", fill_value=0.0)
    within = jnp.argmax(jnp.log(in_block) + noise[:, num_blocks:], axis=1)
    return jnp.minimum(block * DRAW_BLOCK + within, vocab_size - 1).astype(jnp.int32)


def takes_most_likely(rows: SamplingRows) -> Bool[Array, ""]:
    """Whether every live row is greedy, and nothing changes its logits."""
    return ~jnp.any(_sampled_rows(rows) | _masked_rows(rows) | _biased_rows(rows) | penalised_rows(rows))


def _masked_rows(rows: SamplingRows) -> Bool[Array, " R"]:
    return rows.live & (rows.position < rows.min_position)


def _biased_rows(rows: SamplingRows) -> Bool[Array, " R"]:
    return rows.live & rows.use_bias


def _sampled_rows(rows: SamplingRows) -> Bool[Array, " R"]:
    return rows.live & (rows.temperature >= GREEDY_TEMPERATURE)


def _add_bias(logits: Array, rows: SamplingRows, table: SlotTable, biased: Bool[Array, " R"]) -> Array:
    values = table.bias_values.at[rows.slot].get(mode="clip")  # [R, B]
    return add_at(logits, _slot_ids(table.bias_ids, rows, biased), values)


def _mask_stop_ids(logits: Array, rows: SamplingRows, table: SlotTable, masked: Bool[Array, " R"]) -> Array:
    token_ids = _slot_ids(table.stop_ids, rows, masked)
    times = add_at(jnp.zeros_like(logits), token_ids, jnp.ones(token_ids.shape, logits.dtype))
    return jnp.where(times > 0, -jnp.inf, logits)


def _slot_ids(ids: Int[Array, "S B"], rows: SamplingRows, wanted: Bool[Array, " R"]) -> Int[Array, "R B"]:
    """Ids of each row's slot, -1 where none counts."""
    return jnp.where(wanted[:, None], ids.at[rows.slot].get(mode="clip"), -1)


def _top_k_threshold(weights: Array, floor: Array, top_k: Array, wanted: Bool[Array, " R"]) -> Float[Array, " R"]:
    def count(threshold: Array) -> Array:
        return jnp.sum(jnp.where(weights >= threshold[:, None], 1.0, 0.0), axis=1)  # exact below 2**24

    target = jnp.where(wanted, top_k.astype(jnp.float32), jnp.inf)
    return _largest_threshold(count, jnp.ones_like, floor, count(floor), target)


def _top_p_threshold(weights: Array, floor: Array, top_p: Array, wanted: Bool[Array, " R"]) -> Float[Array, " R"]:
    def mass(threshold: Array) -> Array:
        return jnp.sum(jnp.where(weights >= threshold[:, None], weights, 0.0), axis=1)

    total = mass(floor)
    target = jnp.where(wanted, top_p * total, jnp.inf)
    return _largest_threshold(mass, lambda threshold: threshold, floor, total, target)


def _largest_threshold(
    measure: Callable[[Array], Array],
    unit: Callable[[Array], Array],
    floor: Float[Array, " R"],
    floor_measure: Float[Array, " R"],
    target: Float[Array, " R"],
) -> Float[Array, " R"]:
    """A threshold in [floor, 1] whose set {weight >= threshold} is the smallest to reach `target`; else `floor`.

    `measure(t)` [R] is that of the weights >= t, each of which contributes `unit(t)` or more. Bisection on the bits
    of t, which order non-negative floats as integers and are about even in log t: at most 30 steps, and about 17
    until a single weight lies between the bounds, which ends it. Each step reads the weights once; nothing is sorted.
    """

    def bits(x: Array) -> Array:
        return lax.bitcast_convert_type(x, jnp.int32)

    def value(x: Array) -> Array:
        return lax.bitcast_convert_type(x, jnp.float32)

    def pending(low: Array, high: Array, low_measure: Array, high_measure: Array) -> Array:
        several_between = low_measure - high_measure >= 2 * unit(value(low))
        return (low_measure >= target) & several_between & (high - low > 1)

    def step(state: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        low, high, low_measure, high_measure = state
        middle = low + (high - low) // 2
        middle_measure = measure(value(middle))
        # Rows that are done stay as they are: how long their neighbours take must not move their threshold.
        raise_low = pending(*state) & (middle_measure >= target)
        lower_high = pending(*state) & (middle_measure < target)
        return (
            jnp.where(raise_low, middle, low),
            jnp.where(lower_high, middle, high),
            jnp.where(raise_low, middle_measure, low_measure),
            jnp.where(lower_high, middle_measure, high_measure),
        )

    above_all = jnp.full_like(floor, 1.0 + np.finfo(np.float32).eps)
    start = (bits(floor), bits(above_all), floor_measure, jnp.zeros_like(floor))
    low, *_ = lax.while_loop(lambda state: jnp.any(pending(*state)), step, start)
    return value(low)


def _gumbel_noise(rows: SamplingRows, base_key: PRNGKeyArray, num_draws: int) -> Float[Array, "R N"]:
    """Standard Gumbel noise f32[R, num_draws], each row's from its own seed and position."""

    def one_row(seed: Array, position: Array) -> Array:
        key = base_key
        for word in (seed[0], seed[1], position):
            key = jax.random.fold_in(key, word)
        return jax.random.gumbel(key, (num_draws,), jnp.float32)

    return jax.vmap(one_row)(rows.seed, rows.position)
