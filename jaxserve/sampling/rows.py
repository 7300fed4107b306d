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

# Parameters of one row, as the host writes them, in 4-byte words.
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
    """Return one field of all records, [R] or [R, n]; floats keep their bits."""
    assert record.fields is not None, "a record has fields"
    dtype, offset = record.fields[name][:2]
    base, shape = dtype.subdtype or (dtype, ())
    words = records[:, offset // 4 : offset // 4 + dtype.itemsize // 4]
    column = words if base == _INT else lax.bitcast_convert_type(words, base)
    return column if shape else column[:, 0]


@no_type_check  # pytrees are also rebuilt around shapes and placeholders
@struct.dataclass
class SamplingRows:
    """Rows of one step as sampling sees them, R entries each. Rows that are not `live` may hold garbage.

    Parameters are read from the records where they are used. As separate arrays each would be an operand of a branch,
    for which XLA compiles and runs a kernel even if the branch is not taken.

    Attributes:
        records: words of SAMPLING_RECORD, possibly followed by others.
        position: index of the token to sample, i.e. the number of tokens before it.
        live: False for padding and for rows whose sample is not used.
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
        """Number of largest logits to keep; 0 or less keeps all."""
        return record_column(self.records, SAMPLING_RECORD, "top_k")

    @property
    def top_p(self) -> Float[Array, " R"]:
        """Probability mass that the kept most likely tokens must reach; 1 keeps all."""
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
        """Slot of the row in `SlotTable`."""
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


@no_type_check  # pytrees are also rebuilt around shapes and placeholders
@struct.dataclass
class SlotTable:
    """Per-request device state, S slots; a request keeps its slot while it runs.

    Attributes:
        token_history: tokens of the request, C at most; entries from the row's `position` on are stale.
        token_counts: counts in the form of `penalties.count_tokens` for each token of the vocabulary, or of one
        device's part of it, and possibly of some beyond; stale for requests without penalties.
        prompt_len: tokens of the prompt, after which the output begins.
        allowed: bits of the tokens that may be sampled, see `token_mask.pack_mask`; of one device's part too.
        bad_words: token ids of each bad word, padded in front with -1.
        bias_ids: token ids with a logit bias, each at most once; padded with -1.
        bias_values: biases of those tokens' logits.
        stop_ids: ids that end the output, masked before `min_position`; padded with -1.
    """

    token_history: Int[Array, "S C"]
    token_counts: Int[Array, "S V"]
    prompt_len: Int[Array, " S"]
    allowed: UInt32[Array, "S W"]
    bad_words: Int[Array, "S N L"]
    bias_ids: Int[Array, "S B"]
    bias_values: Float[Array, "S B"]
    stop_ids: Int[Array, "S E"]


@no_type_check  # pytrees are also rebuilt around shapes and placeholders
@struct.dataclass
class SlotRow:
    """A request as the host writes it to its slot of the table.

    Attributes:
        token_ids: all known tokens, the prompt first; padded with -1.
        prompt_len: tokens of the prompt.
        allowed: bits of the allowed tokens of the whole vocabulary.
        bad_words: see `SlotTable`, as for the following fields.
    """

    token_ids: Int[Array, " C"]
    prompt_len: Int[Array, ""]
    allowed: UInt32[Array, " W"]
    bad_words: Int[Array, "N L"]
    bias_ids: Int[Array, " B"]
    bias_values: Float[Array, " B"]
    stop_ids: Int[Array, " E"]


def by_blocks(compute: Callable[[Any], Any], rows: Any, block: int) -> Any:
    """Return `compute(rows)`, computed for `block` rows at a time to bound its temporary memory.

    Args:
        compute: function from arrays with entries per row to arrays with entries per row; rows must be independent.
        rows: pytree of such arrays.
        block: rows at a time, if there are more.
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
