"""Log probabilities of tokens, from the logits as the model gave them."""

from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int
from numpy.typing import NDArray

from jaxserve.request import MAX_LOGPROBS
from jaxserve.sampling.by_token import top_tokens

PACKED_WORDS = 2 + 2 * MAX_LOGPROBS  # of one position, see `TokenLogprobs.pack`


@no_type_check  # rebuilt around shapes and placeholders too, as every pytree is
@struct.dataclass
class TokenLogprobs:
    """Log probabilities at R positions.

    Attributes:
        logprob: of the given token.
        rank: of the given token; 1 is the most likely, equal logits share a rank.
        top_ids: the most likely tokens, best first; a vocabulary below 20 tokens pads with -1.
        top_logprobs: theirs; the padding is -inf.
    """

    logprob: Float[Array, " R"]
    rank: Int[Array, " R"]
    top_ids: Int[Array, "R 20"]
    top_logprobs: Float[Array, "R 20"]

    @staticmethod
    def unpack(words: NDArray[np.int32]) -> "TokenLogprobs":
        """Views of what `pack` has made, as numpy arrays; axes in front of the last one stay."""
        num_top = (words.shape[-1] - 2) // 2
        floats: Any = words.view(np.float32)
        ids: Any = words
        return TokenLogprobs(floats[..., 0], ids[..., 1], ids[..., 2 : 2 + num_top], floats[..., 2 + num_top :])

    def pack(self) -> Int[Array, "R words"]:
        """All of it in one array, which is one output of a program and one download."""
        columns = (_bits(self.logprob)[:, None], self.rank[:, None], self.top_ids, _bits(self.top_logprobs))
        return jnp.concatenate(columns, axis=1)


def _bits(values: Array) -> Array:
    return lax.bitcast_convert_type(values, jnp.int32)


def token_logprobs(logits: Float[Array, "R V"], token_ids: Int[Array, " R"]) -> TokenLogprobs:
    """Log probability and rank of `token_ids` [R], and the 20 most likely tokens, under raw `logits` [R, V].

    "Raw" is before bias, penalties, temperature and filters, as in vLLM. Reads the logits a few times and
    holds no second [R, V] array.
    """
    logits = logits.astype(jnp.float32)
    total = jax.nn.logsumexp(logits, axis=1)
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=1, mode="clip")  # [R, 1]
    num_top = min(MAX_LOGPROBS, logits.shape[1])
    top_logits, top_ids = top_tokens(logits, num_top)
    padding = ((0, 0), (0, MAX_LOGPROBS - num_top))
    return TokenLogprobs(
        logprob=chosen[:, 0] - total,
        rank=1 + jnp.sum(logits > chosen, axis=1, dtype=jnp.int32),
        top_ids=jnp.pad(top_ids, padding, constant_values=-1),
        top_logprobs=jnp.pad(top_logits - total[:, None], padding, constant_values=-jnp.inf),
    )
