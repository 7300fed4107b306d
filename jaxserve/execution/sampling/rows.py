"""Sampling inputs besides the logits: one entry per row of a step, and a slot table that outlives steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, no_type_check, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32
from numpy.typing import DTypeLike, NDArray

from jaxserve.scheduling.request import Request

GREEDY_TEMPERATURE = 1e-5  # below this a row is greedy, as in vLLM


class RowParameter:
    """Descriptor of a SamplingRows attribute that is a column of its records, which the host packs from requests.

    Args:
        dtype: dtype of one entry, in whole 4-byte words.
        source: Request attribute with the entry; by default the sampling parameter with the same name.
    """

    def __init__(self, dtype: DTypeLike, source: str = "") -> None:
        self.dtype, self.source = np.dtype(dtype), source

    def __set_name__(self, owner: type, name: str) -> None:
        self.name, self.source = name, self.source or f"params.{name}"

    @overload
    def __get__(self, rows: None, owner: type) -> "RowParameter": ...
    @overload
    def __get__(self, rows: "SamplingRows", owner: type) -> Array: ...
    def __get__(self, rows: "SamplingRows | None", owner: type) -> "Array | RowParameter":
        """Return all rows' entries, [R] or [R, n], bit-cast from words; for the class, return the parameter."""
        if rows is None:
            return self
        assert SAMPLING_RECORD.fields is not None, "a record has fields"
        first = SAMPLING_RECORD.fields[self.name][1] // 4
        words = rows.records[:, first : first + self.dtype.itemsize // 4]
        column = words if self.dtype.base == np.int32 else lax.bitcast_convert_type(words, self.dtype.base)
        return column if self.dtype.shape else column[:, 0]


@no_type_check  # also rebuilt around shapes and placeholders, like every pytree
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingRows:
    """The R rows that sampling sees in one step. Rows that are not `live` may hold garbage.

    Parameters are columns of the records, read where they are used. As separate arrays each would be an operand of a
    branch, for which XLA compiles and runs a kernel even if the branch is not taken.

    Attributes:
        records: words of SAMPLING_RECORD, possibly followed by others.
        history_len: tokens before the one to sample, and thus its index in the token history.
        live: False for padding and for rows whose sample is not used.
    """

    records: Int[Array, "R words"]
    history_len: Int[Array, " R"]
    live: Bool[Array, " R"]

    slot = RowParameter(np.int32, "slot")  # slot of the row in `SlotTable`
    top_k = RowParameter(np.int32)  # number of largest logits to keep; 0 or less keeps all
    # minimum number of tokens after which stop ids are allowed
    min_history_len = RowParameter(np.int32, "min_position")
    # 1 if the slot's bias, bad words and allowed tokens apply, 2 if only the allowed tokens do
    use_bias = RowParameter(np.int32, "bias_kind")
    seed = RowParameter((np.uint32, 2), "seed_words")  # low and high words of the request's seed
    temperature = RowParameter(np.float32)  # divisor of the logits; below 1e-5 the row is greedy
    top_p = RowParameter(np.float32)  # probability mass that the kept most likely tokens must reach; 1 keeps all
    min_p = RowParameter(np.float32)  # minimum probability relative to the most likely token's; 0 keeps all
    presence_penalty = RowParameter(np.float32)  # number subtracted once from the logits of tokens in the output
    frequency_penalty = RowParameter(np.float32)  # number subtracted for every occurrence in the output
    # divides positive and multiplies negative logits of tokens in prompt or output
    repetition_penalty = RowParameter(np.float32)

    @property
    def is_sampled(self) -> Bool[Array, " R"]:
        """Mask of live rows that are not greedy."""
        return self.live & (self.temperature >= GREEDY_TEMPERATURE)

    @property
    def is_biased(self) -> Bool[Array, " R"]:
        """Mask of live rows with a logit bias, allowed tokens or bad words."""
        return self.live & (self.use_bias > 0)

    @property
    def has_biased_ids(self) -> Bool[Array, " R"]:
        """Mask of live rows with a logit bias or bad words."""
        return self.live & (self.use_bias == 1)

    @property
    def is_masked(self) -> Bool[Array, " R"]:
        """Mask of live rows that may not stop yet, so that stop ids are forbidden."""
        return self.live & (self.history_len < self.min_history_len)

    @property
    def is_penalised(self) -> Bool[Array, " R"]:
        """Mask of live rows with a repetition, presence or frequency penalty."""
        asked = (self.presence_penalty != 0) | (self.frequency_penalty != 0) | (self.repetition_penalty != 1)
        return self.live & asked


_PARAMETERS = [value for value in vars(SamplingRows).values() if isinstance(value, RowParameter)]
SAMPLING_RECORD = np.dtype([(parameter.name, parameter.dtype) for parameter in _PARAMETERS])
RECORD_WORDS = SAMPLING_RECORD.itemsize // 4
_read_record = attrgetter(*(parameter.source for parameter in _PARAMETERS))


def pack_records(requests: Sequence[Request]) -> NDArray[np.int32]:
    """Return the words of SAMPLING_RECORD of each request, [R, words]."""
    records = np.array(list(map(_read_record, requests)), SAMPLING_RECORD)
    return records.view(np.int32).reshape(len(requests), RECORD_WORDS)


@no_type_check  # also rebuilt around shapes and placeholders, like every pytree
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotTable:
    """Per-request device state in S slots; a request keeps its slot while it runs.

    Attributes:
        token_history: up to C tokens; entries from the row's `history_len` on are stale.
        token_counts: counts as in `penalties.count_tokens`, for each token in the vocabulary or in one device's shard,
            possibly padded; stale for requests without penalties.
        prompt_len: prompt length.
        allowed: allowed-token bits, see `token_mask.pack_mask`; for one device's shard likewise.
        bad_words: token ids per bad word, left-padded with -1.
        bias_ids: token ids with a logit bias, each at most once; padded with -1.
        bias_values: biases for those tokens' logits.
        stop_ids: ids that end the output, masked before `min_history_len`; padded with -1.
    """

    token_history: Int[Array, "S C"]
    token_counts: Int[Array, "S V"]
    prompt_len: Int[Array, " S"]
    allowed: UInt32[Array, "S W"]
    bad_words: Int[Array, "S N L"]
    bias_ids: Int[Array, "S B"]
    bias_values: Float[Array, "S B"]
    stop_ids: Int[Array, "S E"]


@no_type_check  # also rebuilt around shapes and placeholders, like every pytree
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotRow:
    """A request's slot table entries, as sent by the host.

    Attributes:
        token_ids: all known tokens, the prompt first; padded with -1.
        prompt_len: prompt length.
        allowed: allowed-token bits for the whole vocabulary.
        bad_words: this and the following fields as in `SlotTable`.
    """

    token_ids: Int[Array, " C"]
    prompt_len: Int[Array, ""]
    allowed: UInt32[Array, " W"]
    bad_words: Int[Array, "N L"]
    bias_ids: Int[Array, " B"]
    bias_values: Float[Array, " B"]
    stop_ids: Int[Array, " E"]


def by_blocks(compute: Callable[[Any], Any], rows: Any, block: int) -> Any:
    """Return `compute(rows)`, computed by blocks of rows in a loop to limit temporary memory.

    Args:
        compute: function from a pytree of arrays with an entry per row to another one; rows must be independent.
        rows: pytree of arrays with an entry per row.
        block: maximum rows per block.
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
