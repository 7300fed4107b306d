"""Forms in which layers keep their tokens in the pool, and the attention over each of them.

Pool, backend and attention of a model follow from its form alone: `ArchConfig.kv` is the only place that chooses one.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32

from jaxserve.pallas_kernels import mla_attention, ragged_paged_attention
from jaxserve.pallas_kernels.mla_attention import LatentInputs, LatentOptions
from jaxserve.pallas_kernels.ragged_paged_attention import AttentionInputs, AttentionOptions, Pages, RaggedRows


class NewTokens(NamedTuple):
    """Queries of a step and what it stores, as a block makes them.

    Attributes:
        q: queries, in the form's own size W.
        k: keys of each KV head; latents as those of one head.
        v: values; None where they are in the keys.
        rope: cosines and sines that rotate queries and keys; None where nothing is rotated.
        sinks: logits that take part in the softmax without values, or None.
        tree_mask: trees of drafts, or None.
    """

    q: Float[Array, "T Q W"]
    k: Float[Array, "T K W"]
    v: Float[Array, "T K H"] | None = None
    rope: Float32[Array, "2 T half"] | None = None
    sinks: Float[Array, " Q"] | None = None
    tree_mask: Int32[Array, " T"] | None = None


@runtime_checkable
class KVForm(Protocol):
    """Form of a token in the pool of a device; hashable."""

    @property
    def score_size(self) -> int:
        """Elements of a query-key pair that are multiplied for one head: those of its key and those of its value."""

    def select_backend(
        self, backend: str, *, num_query_heads: int, page_size: int | None, kv_dtype: jnp.dtype, platform: str | None
    ) -> str:
        """Return the backend that serves this form; see `ragged_paged_attention.select_backend`."""

    def default_page_size(self, backend: str, kv_dtype: jnp.dtype) -> int:
        """Return the default page size in tokens of a named backend."""

    def new_pages(self, backend: str, *, num_layers: int, num_pages: int, page_size: int, dtype: jnp.dtype) -> Pages:
        """Return an empty pool of a named backend."""

    def move_tokens(
        self,
        backend: str,
        kv_pages: Pages,
        page_table: Int[Array, "table_rows M"],
        table_row: Int[Array, " R"],
        first: Int[Array, " R"],
        source: Int[Array, "R N"],
    ) -> Pages:
        """Copy tokens within their rows, in all layers; see `ragged_paged_attention.move_tokens`."""

    def step_rows(self, backend: str, rows: RaggedRows) -> RaggedRows:
        """Return the rows of a step for all of its layers; see `ragged_paged_attention.step_rows`."""

    def attend(
        self,
        new: NewTokens,
        rows: RaggedRows,
        kv_pages: Pages,
        layer: Int[Array, ""],
        options: AttentionOptions,
        *,
        backend: str,
    ) -> tuple[Float[Array, "T Q V"], Pages]:
        """Rotate, write the new tokens to the pool and attend over it."""


@dataclass(frozen=True)
class HeadVectors:
    """Keys and values of every KV head.

    Attributes:
        num_kv_heads: number of KV heads, K.
        head_dim: size of a key and of a value, H.
    """

    num_kv_heads: int
    head_dim: int

    @property
    def score_size(self) -> int:
        """Elements of a key and of a value."""
        return 2 * self.head_dim

    def select_backend(
        self, backend: str, *, num_query_heads: int, page_size: int | None, kv_dtype: jnp.dtype, platform: str | None
    ) -> str:
        """Return the backend of `ragged_paged_attention` for these sizes."""
        return ragged_paged_attention.select_backend(
            backend,
            num_query_heads=num_query_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=page_size,
            kv_dtype=kv_dtype,
            platform=platform,
        )

    def default_page_size(self, backend: str, kv_dtype: jnp.dtype) -> int:
        """Return the default page size in tokens of a named backend."""
        sizes = {"num_kv_heads": self.num_kv_heads, "head_dim": self.head_dim}
        return ragged_paged_attention.default_page_size(backend, **sizes, kv_dtype=kv_dtype)

    def new_pages(self, backend: str, *, num_layers: int, num_pages: int, page_size: int, dtype: jnp.dtype) -> Pages:
        """Return an empty pool of a named backend."""
        return ragged_paged_attention.new_pages(
            backend,
            num_layers=num_layers,
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=dtype,
        )

    def move_tokens(
        self,
        backend: str,
        kv_pages: Pages,
        page_table: Int[Array, "table_rows M"],
        table_row: Int[Array, " R"],
        first: Int[Array, " R"],
        source: Int[Array, "R N"],
    ) -> Pages:
        """Copy keys and values within their rows."""
        return ragged_paged_attention.move_tokens(backend, kv_pages, page_table, table_row, first, source)

    def step_rows(self, backend: str, rows: RaggedRows) -> RaggedRows:
        """Return the rows as the backend of `ragged_paged_attention` wants them."""
        return ragged_paged_attention.step_rows(backend, rows)

    def attend(
        self,
        new: NewTokens,
        rows: RaggedRows,
        kv_pages: Pages,
        layer: Int[Array, ""],
        options: AttentionOptions,
        *,
        backend: str,
    ) -> tuple[Float[Array, "T Q V"], Pages]:
        """Run `ragged_paged_attention`."""
        assert new.v is not None, "keys and values differ"
        inputs = AttentionInputs(new.q, new.k, new.v, rows, new.rope, new.sinks, new.tree_mask)
        return ragged_paged_attention.ragged_paged_attention(inputs, kv_pages, layer, options, backend=backend)


@dataclass(frozen=True)
class Latents:
    """One latent for all heads, whose beginning is its value (multi-head latent attention).

    Attributes:
        rank: elements of the value, r.
        rope_dim: elements behind them, which are rotated.
    """

    rank: int
    rope_dim: int

    @property
    def score_size(self) -> int:
        """Elements of a latent, and again of its value."""
        return 2 * self.rank + self.rope_dim

    def select_backend(
        self, backend: str, *, num_query_heads: int, page_size: int | None, kv_dtype: jnp.dtype, platform: str | None
    ) -> str:
        """Return the backend of `mla_attention` for these sizes."""
        return mla_attention.select_backend(
            backend,
            num_query_heads=num_query_heads,
            rank=self.rank,
            rope_dim=self.rope_dim,
            page_size=page_size,
            kv_dtype=kv_dtype,
            platform=platform,
        )

    def default_page_size(self, backend: str, kv_dtype: jnp.dtype) -> int:
        """Return the default page size in tokens of a named backend."""
        return mla_attention.default_page_size(backend, width=self.rank + self.rope_dim, kv_dtype=kv_dtype)

    def new_pages(self, backend: str, *, num_layers: int, num_pages: int, page_size: int, dtype: jnp.dtype) -> Pages:
        """Return an empty pool of a named backend."""
        width = self.rank + self.rope_dim
        sizes = {"num_layers": num_layers, "num_pages": num_pages, "page_size": page_size, "width": width}
        return mla_attention.new_pages(backend, **sizes, dtype=dtype)

    def move_tokens(
        self,
        backend: str,
        kv_pages: Pages,
        page_table: Int[Array, "table_rows M"],
        table_row: Int[Array, " R"],
        first: Int[Array, " R"],
        source: Int[Array, "R N"],
    ) -> Pages:
        """Copy latents within their rows."""
        return mla_attention.move_tokens(backend, kv_pages, page_table, table_row, first, source)

    def step_rows(self, backend: str, rows: RaggedRows) -> RaggedRows:
        """Return the rows as the backend of `mla_attention` wants them."""
        return mla_attention.step_rows(backend, rows)

    def attend(
        self,
        new: NewTokens,
        rows: RaggedRows,
        kv_pages: Pages,
        layer: Int[Array, ""],
        options: AttentionOptions,
        *,
        backend: str,
    ) -> tuple[Float[Array, "T Q V"], Pages]:
        """Run `mla_attention`."""
        assert (new.sinks, options.window, options.soft_cap) == (None,) * 3, "no family with latents has these"
        inputs = LatentInputs(new.q, new.k[:, 0], rows, new.rope, new.tree_mask)
        own = LatentOptions(self.rank, options.scale)
        return mla_attention.mla_attention(inputs, kv_pages, layer, own, backend=backend)
