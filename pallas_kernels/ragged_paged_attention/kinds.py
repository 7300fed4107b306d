"""The vectors that a pool stores for each token: keys and values per head, or latents (MLA)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Heads:
    """Vectors that a pool stores for a token: a key and a value for each KV head.

    Attributes:
        num_kv_heads: number of KV heads, K.
        head_dim: size of a key or value, H.
    """

    num_kv_heads: int
    head_dim: int

    @property
    def token_shape(self) -> tuple[int, ...]:
        """Shape of a token's vectors: keys and values, interleaved."""
        return (2 * self.num_kv_heads, self.head_dim)

    @property
    def key_dim(self) -> int:
        """Number of elements in a key."""
        return self.head_dim

    @property
    def value_dim(self) -> int:
        """Number of elements in a value."""
        return self.head_dim

    @property
    def rope_dim(self) -> int:
        """Number of elements at the end of a key that RoPE rotates."""
        return self.head_dim

    def __str__(self) -> str:
        return f"{self.num_kv_heads} kv heads of {self.head_dim}"


@dataclass(frozen=True)
class Latents:
    """Vector that a pool stores for a token in MLA: one latent for all query heads, which begins with the value.

    Attributes:
        rank: size of the value, r.
        rope_dim: number of further elements, which RoPE rotates.
    """

    rank: int
    rope_dim: int
    num_kv_heads = 1

    @property
    def token_shape(self) -> tuple[int, ...]:
        """Shape of a token's vector, `(W,)`."""
        return (self.key_dim,)

    @property
    def key_dim(self) -> int:
        """Size of a latent, W."""
        return self.rank + self.rope_dim

    @property
    def value_dim(self) -> int:
        """Number of elements in a value, r."""
        return self.rank

    def __str__(self) -> str:
        return f"latents of {self.key_dim}"


KVKind = Heads | Latents
