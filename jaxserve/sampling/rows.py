"""What sampling reads besides logits: one entry per row of the step, one table by slot that outlives steps."""

from collections.abc import Callable
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32


@no_type_check  # rebuilt around shapes and placeholders too, as every pytree is
@struct.dataclass
class SamplingRows:
    """The rows of one step as sampling sees them, R entries each. Rows that are not `live` may hold garbage.

    Attributes:
        temperature: divides the logits; below 1e-5 the row is greedy.
        top_k: keep the `top_k` largest logits; 0 or less keeps all.
        top_p: keep the most likely tokens whose mass reaches `top_p`; 1 keeps all.
        min_p: keep tokens at least `min_p` times as likely as the most likely one; 0 keeps all.
        seed: low and high word of the request's 64-bit seed.
        position: index of the token to sample, which is the number of tokens before it.
        prompt_len: tokens of the prompt; the output begins there.
        min_position: stop ids are masked while `position < min_position`.
        presence_penalty: subtracted once from the logits of tokens in the output.
        frequency_penalty: subtracted for every occurrence in the output.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output.
        slot: the row's entry in `SlotTable`.
        use_bias: whether the slot's logit bias applies.
        live: False for padding and for rows whose sample nobody reads.
    """

    temperature: Float[Array, " R"]
    top_k: Int[Array, " R"]
    top_p: Float[Array, " R"]
    min_p: Float[Array, " R"]
    seed: UInt32[Array, "R 2"]
    position: Int[Array, " R"]
    prompt_len: Int[Array, " R"]
    min_position: Int[Array, " R"]
    presence_penalty: Float[Array, " R"]
    frequency_penalty: Float[Array, " R"]
    repetition_penalty: Float[Array, " R"]
    slot: Int[Array, " R"]
    use_bias: Bool[Array, " R"]
    live: Bool[Array, " R"]


@no_type_check  # rebuilt around shapes and placeholders too, as every pytree is
@struct.dataclass
class SlotTable:
    """Per-request device state, S slots; a request keeps its slot while it runs.

    Attributes:
        token_history: tokens of the request, C at most; those at the row's `position` and beyond are stale.
        bias_ids: token ids with a logit bias, each at most once; -1 pads.
        bias_values: what to add to their logits.
        stop_ids: ids that end the output, masked before `min_position`; -1 pads.
    """

    token_history: Int[Array, "S C"]
    bias_ids: Int[Array, "S B"]
    bias_values: Float[Array, "S B"]
    stop_ids: Int[Array, "S E"]


def by_blocks(
    compute: Callable[[Any], Any], rows: Any, block: int, num_blocks: Int[Array, ""] | int | None = None
) -> Any:
    """`compute(rows)` for `block` rows at a time, so that what it needs meanwhile exists for those alone.

    Args:
        compute: of arrays with entries per row to arrays with entries per row, each from its own alone.
        rows: such arrays, in a pytree.
        block: rows at a time, where there are more.
        num_blocks: that are wanted, zeros after them; None for all.
    """
    num_rows = jax.tree.leaves(rows)[0].shape[0]
    block = min(block, num_rows)
    if num_rows == block and num_blocks is None:
        return compute(rows)

    def one(start: Array) -> Any:
        return compute(jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, block), rows))

    def body(index: Array, out: Any) -> Any:
        start = jnp.minimum(index * block, num_rows - block)
        return jax.tree.map(lambda to, x: lax.dynamic_update_slice_in_dim(to, x, start, 0), out, one(start))

    shapes = jax.eval_shape(one, jax.ShapeDtypeStruct((), jnp.int32))
    empty = jax.tree.map(lambda s: jnp.zeros((num_rows, *s.shape[1:]), s.dtype), shapes)
    return lax.fori_loop(0, -(-num_rows // block) if num_blocks is None else num_blocks, body, empty)
