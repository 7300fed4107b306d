"""Forbidden tokens: all except a request's allowed ones, and ids that would complete a bad word."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int, UInt32
from numpy.typing import NDArray

from jaxserve.execution.sampling.token_gather import LANES, padded_to_lanes

WORD_BITS = 32  # tokens per mask word; bit i in word w is token 32 * w + i, as in grammar libraries


def mask_size(vocab_size: int) -> int:
    """Return the number of 32-bit words in the mask of a vocabulary, a multiple of LANES."""
    return padded_to_lanes(-(-vocab_size // WORD_BITS))


def pack_mask(token_ids: Sequence[int] | None, vocab_size: int) -> NDArray[np.uint32]:
    """Return the mask, as numpy words, that allows only `token_ids`; None allows all tokens."""
    allowed = np.full(mask_size(vocab_size) * WORD_BITS, token_ids is None)
    if token_ids is not None:
        allowed[np.asarray(token_ids, np.int64)] = True
    return np.packbits(allowed, bitorder="little").view("<u4").astype(np.uint32)


def unpack_mask(words: UInt32[Array, "R W"], size: int) -> Bool[Array, "R V"]:
    """Unpack the bits of each row's mask: True for allowed tokens.

    LANES tokens at a time are unpacked from their LANES / WORD_BITS words by selecting a word in each lane. An array
    with a word's 32 bits as last axis would fill a quarter of a TPU's lanes and take four times the memory.

    Args:
        words: mask words, as from `pack_mask`.
        size: number of tokens, V; further bits are padding.
    """
    per_group = LANES // WORD_BITS
    groups = words.reshape(words.shape[0], -1, per_group)
    lane = jnp.arange(LANES, dtype=jnp.uint32)
    own = jnp.zeros((words.shape[0], groups.shape[1], LANES), jnp.uint32)
    for index in range(per_group):
        own = jnp.where((lane // WORD_BITS == index)[None, None], groups[:, :, index, None], own)
    bits = (own >> (lane % WORD_BITS)[None, None]) & jnp.uint32(1)
    return bits.reshape(words.shape[0], -1)[:, :size] > 0


def mask_part(words: UInt32[Array, " W"], first_id: Int[Array, ""], size: int) -> UInt32[Array, " part"]:
    """Cut a mask: return the words for `size` tokens from `first_id` on, which are one device's vocabulary shard."""
    words = jnp.pad(words, (0, mask_size(size) + 1))  # a slice beyond the end would be clamped
    window = lax.dynamic_slice(words, (first_id // WORD_BITS,), (mask_size(size) + 1,))
    shift = (first_id % WORD_BITS).astype(jnp.uint32)
    low, high = window[:-1] >> shift, window[1:] << (jnp.uint32(WORD_BITS) - shift)
    return jnp.where(shift > 0, low | high, low)  # a shift by all bits is undefined


def bad_word_ends(bad_words: Int[Array, "R B L"], recent: Int[Array, "R before"]) -> Int[Array, "R B"]:
    """Return the ids that would complete a bad word; -1 for bad words that cannot be completed now.

    Args:
        bad_words: token ids per bad word, left-padded with -1.
        recent: last L - 1 output ids per row, with -2 before its first token.
    """
    begins = bad_words[:, :, :-1]
    is_begun = jnp.all((begins < 0) | (begins == recent[:, None, :]), axis=2)
    return jnp.where(is_begun, bad_words[:, :, -1], -1)
