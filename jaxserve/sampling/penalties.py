"""Repetition, presence and frequency penalties, counted on device from the token history."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxserve.sampling.rows import SamplingRows, SlotTable

HISTORY_BLOCK = 128  # positions counted at a time; the longest penalised row decides how many blocks


def penalised_rows(rows: SamplingRows) -> Bool[Array, " R"]:
    """The live rows that ask for any penalty."""
    asked = (rows.presence_penalty != 0) | (rows.frequency_penalty != 0) | (rows.repetition_penalty != 1)
    return rows.live & asked


def apply_penalties(logits: Float[Array, "R V"], rows: SamplingRows, table: SlotTable) -> Float[Array, "R V"]:
    """Logits [R, V] after the repetition, then frequency and presence penalties of each row.

    Repetition (Keskar et al. 2019, section 4.1) looks at prompt and output, the other two (OpenAI's API) at the
    output alone. Rows without penalties come back unchanged, bit for bit; without any such row nothing is done.
    """
    wanted = penalised_rows(rows)

    def penalise() -> Float[Array, "R V"]:
        seen, counts = count_tokens(rows, table, wanted, logits.shape[1])
        repetition = jnp.where(seen, rows.repetition_penalty[:, None], 1.0)
        adjusted = jnp.where(logits > 0, logits / repetition, logits * repetition)
        adjusted -= rows.frequency_penalty[:, None] * counts.astype(jnp.float32)
        adjusted -= jnp.where(counts > 0, rows.presence_penalty[:, None], 0.0)
        return jnp.minimum(adjusted, np.finfo(np.float32).max)  # a tiny repetition penalty overflows to inf

    penalised: Array = lax.cond(jnp.any(wanted), penalise, lambda: logits)
    return penalised


def count_tokens(
    rows: SamplingRows, table: SlotTable, wanted: Bool[Array, " R"], vocab_size: int
) -> tuple[Bool[Array, "R V"], Int[Array, "R V"]]:
    """Which tokens the `wanted` rows have seen at all, and how often in their output; nothing for other rows."""
    num_rows = wanted.shape[0]
    row = jnp.arange(num_rows)[:, None]
    length = jnp.where(wanted, rows.position, 0)[:, None]

    def add_block(block: Int[Array, ""], carry: tuple[Array, Array]) -> tuple[Array, Array]:
        seen, counts = carry
        position = (block * HISTORY_BLOCK + jnp.arange(HISTORY_BLOCK))[None, :]
        token_ids = table.token_history.at[rows.slot[:, None], position].get(mode="clip")  # [R, HISTORY_BLOCK]
        token_ids = jnp.where(position < length, token_ids, vocab_size)  # out of range, so dropped
        output_ids = jnp.where(position >= rows.prompt_len[:, None], token_ids, vocab_size)
        return (
            seen.at[row, token_ids].set(True, mode="drop"),
            counts.at[row, output_ids].add(1, mode="drop"),
        )

    start = (jnp.zeros((num_rows, vocab_size), bool), jnp.zeros((num_rows, vocab_size), jnp.int32))
    num_blocks = (jnp.max(length) + HISTORY_BLOCK - 1) // HISTORY_BLOCK
    counted: tuple[Array, Array] = lax.fori_loop(0, num_blocks, add_block, start)
    return counted
