"""Prefixes of prompts before tokenisation, for a router that has no tokenizer."""

from __future__ import annotations

from hashlib import blake2b

from jaxserve.scheduling.router import Prefix, sample_depths

_BLOCK_BYTES = 256  # bytes between consecutive prefix hashes
TOKEN_BYTES = 4  # estimated text bytes per token, and exact bytes per token id


def byte_prefix(data: bytes, salt: bytes, kind: bytes) -> Prefix:
    """Return the sampled prefixes of a prompt's bytes, with lengths in estimated tokens.

    Args:
        data: text or token ids.
        salt: namespace of the prefix cache.
        kind: form of the bytes, at most 16 bytes; prompts of different kinds have no prefix in common.
    """
    state, start = blake2b(salt, digest_size=16, person=kind), 0
    lengths: list[int] = []
    hashes: list[bytes] = []
    for depth in sample_depths(len(data) // _BLOCK_BYTES):
        state.update(data[start : depth * _BLOCK_BYTES])
        start = depth * _BLOCK_BYTES
        lengths.append(start // TOKEN_BYTES)
        hashes.append(state.digest())
    return Prefix(lengths, hashes)
