"""Repetition, presence and frequency penalties, from token counts stored by slot.

A count is an int32: a token's occurrences in the output, plus PROMPT if it occurred only in the prompt at admission. 16
bits would suffice for most requests and halve the memory, which is a hundredth of an accelerator's. But they do not
suffice for all, and not every compiler updates single 16-bit elements in place.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxserve.execution.sampling.rows import SamplingRows, SlotTable
from jaxserve.execution.sampling.token_gather import add_at, take_rows

HISTORY_BLOCK = 128  # prompt tokens counted together
PROMPT = 1 << 30  # more than any request has tokens
# weight of a prompt token in sums whose integer part counts the output; 2**22 prompt tokens make a half
_PROMPT_TOKEN = 2.0**-23


def apply_penalties(logits: Float[Array, "R V"], rows: SamplingRows, table: SlotTable) -> Float[Array, "R V"]:
    """Apply each row's repetition penalty to its logits [R, V], then its frequency and presence penalties.

    Repetition (Keskar et al. 2019, section 4.1) considers prompt and output, the other two (OpenAI's API) only the
    output. Rows without penalties are bit-identical.
    """
    counts = take_rows(table.token_counts, rows.slot)[:, : logits.shape[1]]
    in_output = (counts % PROMPT).astype(jnp.float32)
    repetition = jnp.where(counts > 0, rows.repetition_penalty[:, None], 1.0)
    adjusted = jnp.where(logits > 0, logits / repetition, logits * repetition)
    adjusted -= rows.frequency_penalty[:, None] * in_output
    adjusted -= jnp.where(in_output > 0, rows.presence_penalty[:, None], 0.0)
    adjusted = jnp.minimum(adjusted, np.finfo(np.float32).max)  # a tiny repetition penalty overflows to inf
    return jnp.where(rows.is_penalised[:, None], adjusted, logits)


def count_sampled(
    counts: Int[Array, "S V"], rows: SamplingRows, sampled: Int[Array, " R"], first_id: Int[Array, ""] | int = 0
) -> Int[Array, "S V"]:
    """Return `counts` with each row's sampled token added in its slot, if the row has penalties.

    Args:
        counts: token counts by slot, for consecutive token ids.
        rows: row sampling parameters.
        sampled: sampled token ids; ids outside the columns are not counted.
        first_id: token id for column 0; above 0 in later shards of a sharded vocabulary.
    """
    num_slots, size = counts.shape
    token = sampled - first_id
    counted = rows.is_penalised & (token >= 0) & (token < size)
    slot = jnp.where(counted, rows.slot, num_slots)  # out of range, dropped
    return counts.at[slot, token].add(1, mode="drop")


def count_tokens(
    token_ids: Int[Array, " C"], prompt_len: Int[Array, ""], first_id: Int[Array, ""] | int, size: int
) -> Int[Array, " V"]:
    """Return a count for each token id: its occurrences in a request's output, or PROMPT if only the prompt has it.

    Args:
        token_ids: prompt and output tokens, padded with -1.
        prompt_len: number of prompt tokens.
        first_id: token id for the first count; above 0 in later shards of a sharded vocabulary.
        size: number of token ids counted, V: a shard's if the vocabulary is sharded.
    """
    num_blocks = -(-token_ids.shape[0] // HISTORY_BLOCK)
    padding = num_blocks * HISTORY_BLOCK - token_ids.shape[0]
    blocks = jnp.pad(token_ids, (0, padding), constant_values=-1).reshape(num_blocks, 1, HISTORY_BLOCK)
    num_tokens = jnp.sum(token_ids >= 0)

    def add_block(index: Int[Array, ""], sums: Float[Array, "1 V"]) -> Float[Array, "1 V"]:
        position = index * HISTORY_BLOCK + jnp.arange(HISTORY_BLOCK)[None, :]
        block = blocks[index]
        ids = jnp.where(block >= 0, block - first_id, -1)
        return add_at(sums, ids, jnp.where(position < prompt_len, _PROMPT_TOKEN, 1.0))

    sums = jnp.zeros((1, size), jnp.float32)
    sums = lax.fori_loop(0, (num_tokens + HISTORY_BLOCK - 1) // HISTORY_BLOCK, add_block, sums)[0]
    in_output = jnp.floor(sums)
    return jnp.where((sums > 0) & (in_output == 0), PROMPT, in_output.astype(jnp.int32))
