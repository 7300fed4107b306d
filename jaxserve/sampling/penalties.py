"""Repetition, presence and frequency penalties, counted on device from the token history."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxserve.sampling.by_token import add_at
from jaxserve.sampling.rows import SamplingRows, SlotTable

HISTORY_BLOCK = 128  # positions counted at a time; the longest penalised row decides how many blocks
PROMPT_TOKEN = 2.0**-23  # in a sum whose whole part counts the output; fewer than 2**22 of them are below a half


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
        adjusted -= rows.frequency_penalty[:, None] * counts
        adjusted -= jnp.where(counts > 0, rows.presence_penalty[:, None], 0.0)
        return jnp.minimum(adjusted, np.finfo(np.float32).max)  # a tiny repetition penalty overflows to inf

    penalised: Array = lax.cond(jnp.any(wanted), penalise, lambda: logits)
    return penalised


def count_tokens(
    rows: SamplingRows, table: SlotTable, wanted: Bool[Array, " R"], vocab_size: int
) -> tuple[Bool[Array, "R V"], Float[Array, "R V"]]:
    """Which tokens the `wanted` rows have seen at all, and how often in their output; nothing for other rows."""
    length = jnp.where(wanted, rows.position, 0)[:, None]

    def add_block(block: Int[Array, ""], sums: Float[Array, "R V"]) -> Float[Array, "R V"]:
        position = (block * HISTORY_BLOCK + jnp.arange(HISTORY_BLOCK))[None, :]
        token_ids = table.token_history.at[rows.slot[:, None], position].get(mode="clip")  # [R, HISTORY_BLOCK]
        in_prompt = position < rows.prompt_len[:, None]
        return add_at(sums, jnp.where(position < length, token_ids, -1), jnp.where(in_prompt, PROMPT_TOKEN, 1.0))

    num_blocks = (jnp.max(length) + HISTORY_BLOCK - 1) // HISTORY_BLOCK
    start = jnp.zeros((wanted.shape[0], vocab_size), jnp.float32)
    sums = lax.fori_loop(0, num_blocks, add_block, start)
    return sums > 0, jnp.floor(sums)
