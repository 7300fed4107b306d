"""ArchConfig: the engine's description of a model of any family."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.layers.rope import RopeConfig
from jaxserve.sharding import TENSOR, held_heads


@dataclass(frozen=True)
class ArchConfig:
    """Sizes and switches of a decoder-only transformer, in this order: V D L Q K H F of the shape annotations.

    For a model split over devices, `local` gives the sizes of one device: its V, Q, K and F.
    """

    architecture: str  # Hugging Face class name
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    max_position: int  # longest sequence, RoPE scaling included: see hf_config.max_position
    norm_eps: float
    rope: RopeConfig
    windows: tuple[int | None, ...]  # sliding window of each layer in tokens, None for full attention
    tied_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    eos_ids: frozenset[int] = frozenset()
    dtype: str = "float32"  # dtype of the checkpoint
    tensor_axis: str | None = None  # mesh axis of the split if the sizes are those of one device

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads must be a multiple of num_key_value_heads, "
                f"got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")

    def local(self, num_devices: int) -> "ArchConfig":
        """Return the sizes on one of `num_devices`; the vocabulary is padded on the last device if it does not divide.

        Raises:
            ConfigError: `num_devices` does not divide the query heads or the feed-forward size.
        """
        if num_devices == 1:
            return self
        for name, size in (("num_attention_heads", self.num_heads), ("intermediate_size", self.ffn_size)):
            if size % num_devices:
                raise ConfigError(
                    f"tensor_parallel_size must divide {name}, got {num_devices} and {size}; "
                    f"set it to a divisor of {math.gcd(self.num_heads, self.ffn_size)}"
                )
        return dataclasses.replace(
            self,
            vocab_size=-(-self.vocab_size // num_devices),
            num_heads=self.num_heads // num_devices,
            num_kv_heads=len(held_heads(self.num_kv_heads, 0, num_devices)),
            ffn_size=self.ffn_size // num_devices,
            tensor_axis=TENSOR,
        )

    def times(self, factor: int) -> "ArchConfig":
        """Return the config with heads and vocabulary multiplied by `factor`."""
        return dataclasses.replace(
            self,
            vocab_size=self.vocab_size * factor,
            num_heads=self.num_heads * factor,
            num_kv_heads=self.num_kv_heads * factor,
        )

    @property
    def num_params(self) -> int:
        """Number of matrix parameters; tied embeddings count once."""
        layer = self.hidden_size * (self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads) + 3 * self.ffn_size)
        return self.num_layers * layer + (1 if self.tied_embeddings else 2) * self.vocab_size * self.hidden_size

    def step_flops(self, num_tokens: int, num_rows: int, num_scores: int) -> int:
        """Return the floating-point operations of a step: matrices for its tokens, logits for its rows, attention.

        Args:
            num_tokens: length of the token axis, padding included.
            num_rows: number of rows whose logits are computed.
            num_scores: query-key pairs of one head, summed over the layers.
        """
        head = self.vocab_size * self.hidden_size
        body = self.num_params - (1 if self.tied_embeddings else 2) * head
        scores = 2 * num_scores * self.num_heads * self.head_dim
        return 2 * (num_tokens * body + num_rows * head + scores)


def token_id_set(value: Any) -> frozenset[int]:
    """Parse the end-of-sequence ids of Hugging Face: null, a number or a list; ConfigError for anything else."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ConfigError(f"eos_token_id must be a token id, a list of them or null, got {value!r}")
    return frozenset(ids)
