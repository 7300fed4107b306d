"""Log probabilities of tokens under the model's raw logits."""

from dataclasses import dataclass
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int
from numpy.typing import NDArray

from jaxserve.execution.sampling.log_sum_exp import log_sum_exp
from jaxserve.execution.sampling.token_gather import top_tokens


@no_type_check  # also rebuilt around shapes and placeholders, like every pytree
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenLogprobs:
    """Log probabilities at R positions.

    Attributes:
        logprob: log probability of the given token.
        rank: rank of the given token; 1 is the most likely, equal logits have the same rank.
        top_ids: most likely tokens, best first; no columns if `top_logprobs` holds all tokens in id order.
        top_logprobs: their log probabilities.
    """

    logprob: Float[Array, " R"]
    rank: Int[Array, " R"]
    top_ids: Int[Array, "R ids"]
    top_logprobs: Float[Array, "R k"]

    def pack(self) -> Int[Array, "R words"]:
        """Join all fields in one array, for a single program output and download."""
        columns = (_bits(self.logprob)[:, None], self.rank[:, None], self.top_ids, _bits(self.top_logprobs))
        return jnp.concatenate(columns, axis=1)


@dataclass(frozen=True)
class LogprobLayout:
    """Columns of packed log probabilities: the given token's, its rank, the most likely ids and their log
    probabilities.

    A layout with all tokens has no ids: in id order there is half as much to send, and the vocabulary need not be
    sorted. XLA takes a minute to compile a sort of 128,000 tokens for TPUs.

    Attributes:
        num_top: log probabilities per position besides the given token's.
        vocab_size: vocabulary size.
    """

    num_top: int
    vocab_size: int

    @staticmethod
    def from_sizes(max_logprobs: int, vocab_size: int) -> "LogprobLayout":
        """Return the layout for EngineConfig.max_logprobs; -1, or more than the vocabulary, means all tokens."""
        num_top = vocab_size if max_logprobs < 0 else min(max(max_logprobs, 1), vocab_size)
        return LogprobLayout(num_top, vocab_size)

    @property
    def num_ids(self) -> int:
        """Number of token ids per position; 0 in a layout with all tokens, which are in id order."""
        return 0 if self.num_top == self.vocab_size else self.num_top

    @property
    def num_words(self) -> int:
        """Number of 4-byte words per position."""
        return 2 + self.num_ids + self.num_top

    def unpack(self, words: NDArray[np.int32]) -> TokenLogprobs:
        """Return views of the packed fields as numpy arrays; leading axes stay."""
        ids: Any = words
        floats: Any = words.view(np.float32)
        stop = 2 + self.num_ids
        return TokenLogprobs(floats[..., 0], ids[..., 1], ids[..., 2:stop], floats[..., stop:])


def _bits(values: Array) -> Array:
    """Return the bits of float32 values as int32."""
    return lax.bitcast_convert_type(values, jnp.int32)


def token_logprobs(logits: Float[Array, "R V"], token_ids: Int[Array, " R"], num_top: int) -> TokenLogprobs:
    """Return log probability and rank of `token_ids` [R], and the `num_top` most likely tokens, by raw `logits` [R, V].

    "Raw" is before bias, penalties, temperature and filters, as in vLLM. Reads the logits a few times and, unless
    `num_top` is V, holds no second [R, V] array.
    """
    logits = logits.astype(jnp.float32)
    total = log_sum_exp(logits)
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=1, mode="clip")  # [R, 1]
    if num_top >= logits.shape[1]:
        top_logits, top_ids = logits, jnp.zeros((logits.shape[0], 0), jnp.int32)
    else:
        top_logits, top_ids = top_tokens(logits, num_top)
    return TokenLogprobs(
        logprob=chosen[:, 0] - total,
        rank=1 + jnp.sum(logits > chosen, axis=1, dtype=jnp.int32),
        top_ids=top_ids,
        top_logprobs=top_logits - total[:, None],
    )
