"""Inputs of sampling besides the logits: one entry per row of the step, and one table by slot that outlives steps."""

from collections.abc import Callable
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

GREEDY_TEMPERATURE = 1e-5  # below this a row is greedy, as in vLLM
_INT, _UINT, _FLOAT = np.dtype(np.int32), np.dtype(np.uint32), np.dtype(np.float32)

# One row's parameters, as the host writes them: 4-byte words.
SAMPLING_FIELDS: list[Any] = [
    ("slot", _INT),
    ("top_k", _INT),
    ("min_position", _INT),
    ("use_bias", _INT),
    ("seed", _UINT, (2,)),
    ("temperature", _FLOAT),
    ("top_p", _FLOAT),
    ("min_p", _FLOAT),
    ("presence_penalty", _FLOAT),
    ("frequency_penalty", _FLOAT),
    ("repetition_penalty", _FLOAT),
]
SAMPLING_RECORD = np.dtype(SAMPLING_FIELDS)


def record_column(records: Int[Array, "R words"], record: np.dtype[Any], name: str) -> Array:
    """One field of all records, [R] or [R, n], floats by their bits."""
    assert record.fields is not None, "a record has fields"
    dtype, offset = record.fields[name][:2]
    base, shape = dtype.subdtype or (dtype, ())
    words = records[:, offset // 4 : offset // 4 + dtype.itemsize // 4]
    column = words if base == _INT else lax.bitcast_convert_type(words, base)
    return column if shape else column[:, 0]


@no_type_check  # rebuilt around shapes and placeholders too, as every pytree is
@struct.dataclass
class SamplingRows:
    """The rows of one step as sampling sees them, R entries each. Rows that are not `live` may hold garbage.

    Parameters are read from the records where they are used. As arrays of their own each would be the operand of a
    branch, for which XLA compiles and runs a kernel whether or not the branch is taken.

    Attributes:
        records: words of SAMPLING_RECORD, perhaps with others behind them.
        position: index of the token to sample, which is the number of tokens before it.
        live: False for padding and for rows whose sample nobody reads.
    """

    records: Int[Array, "R words"]
    position: Int[Array, " R"]
    live: Bool[Array, " R"]

    @property
    def temperature(self) -> Float[Array, " R"]:
        """Divisor of the logits; below 1e-5 the row is greedy."""
        return record_column(self.records, SAMPLING_RECORD, "temperature")

    @property
    def top_k(self) -> Int[Array, " R"]:
        """Number of the largest logits to keep; 0 or less keeps all."""
        return record_column(self.records, SAMPLING_RECORD, "top_k")

    @property
    def top_p(self) -> Float[Array, " R"]:
        """Mass that the most likely tokens to keep must reach; 1 keeps all."""
        return record_column(self.records, SAMPLING_RECORD, "top_p")

    @property
    def min_p(self) -> Float[Array, " R"]:
        """Least probability to keep, as a share of the most likely token's; 0 keeps all."""
        return record_column(self.records, SAMPLING_RECORD, "min_p")

    @property
    def seed(self) -> UInt32[Array, "R 2"]:
        """Low and high word of the request's 64-bit seed."""
        return record_column(self.records, SAMPLING_RECORD, "seed")

    @property
    def min_position(self) -> Int[Array, " R"]:
        """First position at which stop ids are not masked."""
        return record_column(self.records, SAMPLING_RECORD, "min_position")

    @property
    def presence_penalty(self) -> Float[Array, " R"]:
        """Number subtracted once from the logits of tokens in the output."""
        return record_column(self.records, SAMPLING_RECORD, "presence_penalty")

    @property
    def frequency_penalty(self) -> Float[Array, " R"]:
        """Number subtracted for every occurrence in the output."""
        return record_column(self.records, SAMPLING_RECORD, "frequency_penalty")

    @property
    def repetition_penalty(self) -> Float[Array, " R"]:
        """Divisor of positive and factor of negative logits of tokens in prompt or output."""
        return record_column(self.records, SAMPLING_RECORD, "repetition_penalty")

    @property
    def slot(self) -> Int[Array, " R"]:
        """The row's entry in `SlotTable`."""
        return record_column(self.records, SAMPLING_RECORD, "slot")

    @property
    def use_bias(self) -> Bool[Array, " R"]:
        """Mask of rows to which the bias, the allowed tokens and the bad words of their slot apply."""
        return record_column(self.records, SAMPLING_RECORD, "use_bias") > 0

    @property
    def is_sampled(self) -> Bool[Array, " R"]:
        """Mask of live rows that are not greedy."""
        return self.live & (self.temperature >= GREEDY_TEMPERATURE)

    @property
    def is_biased(self) -> Bool[Array, " R"]:
        """Mask of live rows with a logit bias, allowed tokens or bad words."""
        return self.live & self.use_bias

    @property
    def is_masked(self) -> Bool[Array, " R"]:
        """Mask of live rows that may not stop yet."""
        return self.live & (self.position < self.min_position)

    @property
    def is_penalised(self) -> Bool[Array, " R"]:
        """Mask of live rows that ask for any penalty."""
        asked = (self.presence_penalty != 0) | (self.frequency_penalty != 0) | (self.repetition_penalty != 1)
        return self.live & asked


@no_type_check  # rebuilt around shapes and placeholders too, as every pytree is
@struct.dataclass
class SlotTable:
    """Per-request device state, S slots; a request keeps its slot while it runs.

    Attributes:
        token_history: tokens of the request, C at most; those at the row's `position` and beyond are stale.
        token_counts: what penalties look at of each token of the vocabulary (or of one device's part of it, and perhaps
            of some beyond), in the form of `penalties.count_tokens`; kept for requests with penalties alone, stale for
            others.
        prompt_len: tokens of the prompt, behind which the output begins.
        allowed: bits of the tokens that may be sampled, as of `token_mask.pack_mask`; of one device's part too.
        bad_words: token ids of each bad word, padded in front with -1.
        bias_ids: token ids with a logit bias, each at most once; -1 pads.
        bias_values: what to add to their logits.
        stop_ids: ids that end the output, masked before `min_position`; -1 pads.
    """

    token_history: Int[Array, "S C"]
    token_counts: Int[Array, "S V"]
    prompt_len: Int[Array, " S"]
    allowed: UInt32[Array, "S W"]
    bad_words: Int[Array, "S N L"]
    bias_ids: Int[Array, "S B"]
    bias_values: Float[Array, "S B"]
    stop_ids: Int[Array, "S E"]


@no_type_check  # rebuilt around shapes and placeholders too, as every pytree is
@struct.dataclass
class SlotRow:
    """A request as the host enters it into its slot of the table.

    Attributes:
        token_ids: all that are known, the prompt first; -1 pads.
        prompt_len: tokens of the prompt.
        allowed: bits of the allowed tokens of the whole vocabulary.
        bad_words: as in `SlotTable`, like those that follow.
    """

    token_ids: Int[Array, " C"]
    prompt_len: Int[Array, ""]
    allowed: UInt32[Array, " W"]
    bad_words: Int[Array, "N L"]
    bias_ids: Int[Array, " B"]
    bias_values: Float[Array, " B"]
    stop_ids: Int[Array, " E"]


def by_blocks(compute: Callable[[Any], Any], rows: Any, block: int) -> Any:
    """`compute(rows)` for `block` rows at a time, so that what it needs meanwhile exists for those alone.

    Args:
        compute: of arrays with entries per row to arrays with entries per row, each from its own alone.
        rows: such arrays, in a pytree.
        block: rows at a time, where there are more.
    """
    num_rows = jax.tree.leaves(rows)[0].shape[0]
    if num_rows <= block:
        return compute(rows)

    def one(start: Array) -> Any:
        return compute(jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, block), rows))

    def body(index: Array, out: Any) -> Any:
        start = jnp.minimum(index * block, num_rows - block)
        return jax.tree.map(lambda to, x: lax.dynamic_update_slice_in_dim(to, x, start, 0), out, one(start))

    shapes = jax.eval_shape(one, jax.ShapeDtypeStruct((), jnp.int32))
    empty = jax.tree.map(lambda s: jnp.zeros((num_rows, *s.shape[1:]), s.dtype), shapes)
    return lax.fori_loop(0, -(-num_rows // block), body, empty)
