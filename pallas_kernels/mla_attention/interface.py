"""Interface between the operation and its backends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.pallas_kernels.mla_attention.layout import Layout
from jaxserve.pallas_kernels.ragged_paged_attention.interface import RaggedRows
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import Pages
from jaxserve.pallas_kernels.ragged_paged_attention.rope import apply_rope


@dataclass(frozen=True)
class LatentOptions:
    """Static options of attention over latents; a value to hash and compare, since each has a program of its own.

    Attributes:
        rank: leading elements of a latent that are its value, r.
        scale: factor on the scores.

    Raises:
        ValueError: an option has no meaning.
    """

    rank: int
    scale: float

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank must be at least 1, got {self.rank}")


class LatentInputs(NamedTuple):
    """Arrays of one call, except the pool."""

    q: Float[Array, "T Q W"]
    """Queries of latents: of each, the first r elements come from the product with a matrix of the head."""
    latents: Float[Array, "T W"]
    """New latents, cast or quantised to the dtype of the pool."""
    rows: RaggedRows
    rope: Float32[Array, "2 T half"] | None = None
    """Cosines and sines of every token's angles, which rotate the last W - r elements of `q` and `latents` in float32
    before use, as `apply_rope` does; None to use them as they are."""
    tree_mask: Int32[Array, "T"] | None = None
    """Tree of drafts of each row, a word per token: see `ragged_paged_attention.AttentionInputs`."""

    def rotated(self, rank: int) -> LatentInputs:
        """Return the inputs with rotated queries and latents."""
        if self.rope is None:
            return self
        q, latents = (
            jnp.concatenate([x[..., :rank].astype(jnp.float32), apply_rope(x[..., rank:], self.rope)], axis=-1)
            for x in (self.q, self.latents[:, None])
        )
        return self._replace(q=q, latents=latents[:, 0], rope=None)


@dataclass(frozen=True)
class Problem:
    """Static facts of a call, by which a backend decides if it can run it."""

    num_query_heads: int
    rank: int
    rope_dim: int
    page_size: int
    kv_dtype: jnp.dtype
    platform: str


@runtime_checkable
class Backend(Protocol):
    """Module that stores latents, writes to them and attends over them in one particular way."""

    @property
    def LAYOUT(self) -> Layout:  # noqa: N802 (a constant of a module)
        """Layout of its pool."""

    @property
    def WANTS_OWN_TABLE(self) -> bool:  # noqa: N802
        """True if all layers read the pages of a step's rows faster from a table of their own."""

    def supports(self, problem: Problem) -> str | None:
        """Return the reason why this backend cannot run the problem, or None if it can."""

    def write_and_attend(
        self, inputs: LatentInputs, kv_pages: Pages, layer: int | Int32[Array, ""], options: LatentOptions
    ) -> tuple[Float[Array, "T Q rank"], Pages]:
        """Return the outputs of all rows in the dtype of `q`, and the pool with this step's latents.

        A backend must write the latents of all rows before any row attends.
        """
