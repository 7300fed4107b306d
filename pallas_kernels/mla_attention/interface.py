"""Interface between the operation and its backends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import lax
from jaxserve.pallas_kernels.mla_attention.layout import Layout
from jaxserve.pallas_kernels.ragged_paged_attention.interface import RaggedRows
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import Pages
from jaxserve.pallas_kernels.ragged_paged_attention.rope import apply_rope
from jaxtyping import Array, Float, Float32, Int32


@dataclass(frozen=True)
class LatentOptions:
    """Static options of attention over latents; a value to hash and compare, since each has a program of its own.

    Attributes:
        rank: leading elements of a latent that are its value, r.
        scale: factor on the scores.
        max_queries: most new tokens of a row that attends: rows with more are written only, and their outputs have no
            meaning. None for all rows. Only of backends that expand.

    Raises:
        ValueError: an option has no meaning.
    """

    rank: int
    scale: float
    max_queries: int | None = None

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank must be at least 1, got {self.rank}")
        if self.max_queries is not None and self.max_queries < 1:
            raise ValueError(f"max_queries must be at least 1 or None, got {self.max_queries}")


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


class HeadMatrices(NamedTuple):
    """Matrices that expand the first r elements of a latent to the keys, but for their rotated part, and the values."""

    to_keys: Float[Array, "Q n r"]
    to_values: Float[Array, "Q v r"]

    def latent_q(self, q: Float[Array, "T Q H"]) -> Float[Array, "T Q W"]:
        """Return queries of latents."""
        nope_dim = self.to_keys.shape[1]
        own = per_head("tqn,qnr->tqr", q[..., :nope_dim], self.to_keys)
        return jnp.concatenate([own, q[..., nope_dim:]], axis=-1)

    def values(self, out: Float[Array, "T Q rank"]) -> Float[Array, "T Q v"]:
        """Return the values of heads, of outputs in latents."""
        return per_head("tqr,qvr->tqv", out, self.to_values)


class HeadInputs(NamedTuple):
    """Arrays of one call of `head_attention`, except the pool; see `LatentInputs`."""

    q: Float[Array, "T Q H"]
    """Queries of heads, of n elements and d that are rotated."""
    latents: Float[Array, "T W"]
    matrices: HeadMatrices
    rows: RaggedRows
    rope: Float32[Array, "2 T half"] | None = None
    tree_mask: Int32[Array, "T"] | None = None

    def absorbed(self, q: Float[Array, "T Q W"]) -> LatentInputs:
        """Return the inputs with these queries of latents."""
        return LatentInputs(q, self.latents, self.rows, self.rope, self.tree_mask)

    def rotated_q(self) -> Float[Array, "T Q H"]:
        """Return the queries with their last elements rotated."""
        if self.rope is None:
            return self.q
        nope_dim = self.matrices.to_keys.shape[1]
        turned = apply_rope(self.q[..., nope_dim:], self.rope)
        return jnp.concatenate([self.q[..., :nope_dim].astype(jnp.float32), turned], axis=-1)


def per_head(products: str, x: Float[Array, "T Q a"], matrices: Float[Array, "Q b c"]) -> Float[Array, "T Q d"]:
    """Return the product of each head with its own matrix in the dtype of x; exact where that is float32."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(products, x, matrices.astype(x.dtype), precision=precision)


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

    @property
    def EXPANDS(self) -> bool:  # noqa: N802
        """True if rows of many new tokens should attend over the keys and values of heads instead; see `expanded`."""

    def supports(self, problem: Problem) -> str | None:
        """Return the reason why this backend cannot run the problem, or None if it can."""

    def write_and_attend(
        self, inputs: LatentInputs, kv_pages: Pages, layer: int | Int32[Array, ""], options: LatentOptions
    ) -> tuple[Float[Array, "T Q rank"], Pages]:
        """Return the outputs of all rows in the dtype of `q`, and the pool with this step's latents.

        A backend must write the latents of all rows before any row attends.
        """
