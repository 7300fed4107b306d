"""Forms in which layers keep their tokens in the pool, and the attention over each of them.

Pool, backend and attention of a model follow from its form alone: `models.kv_layout` alone chooses one.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32

from jaxserve.pallas_kernels import mla_attention, ragged_paged_attention
from jaxserve.pallas_kernels.mla_attention import HeadInputs, HeadMatrices, LatentOptions
from jaxserve.pallas_kernels.op import UnsupportedBackendError
from jaxserve.pallas_kernels.ragged_paged_attention import (
    QUANTIZED,
    AttentionInputs,
    AttentionOptions,
    Pages,
    RaggedRows,
)


class NewTokens(NamedTuple):
    """Queries of a step and what it stores, as a block makes them.

    Attributes:
        q: queries.
        k: keys of each KV head; latents as those of one head.
        v: values; of latents, the matrices that make keys and values of them.
        rope: cosines and sines that rotate queries and keys; None where nothing is rotated.
        sinks: logits that take part in the softmax without values, or None.
        tree_mask: trees of drafts, or None.
    """

    q: Float[Array, "T Q W"]
    k: Float[Array, "T K S"]
    v: Float[Array, "T K H"] | HeadMatrices
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

    @property
    def token_size(self) -> int:
        """Elements of a token's keys and values in a layer."""
        return 2 * self.num_kv_heads * self.head_dim

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
        assert isinstance(new.v, Array), "values are no matrices"
        inputs = AttentionInputs(new.q, new.k, new.v, rows, new.rope, new.sinks, new.tree_mask)
        return ragged_paged_attention.ragged_paged_attention(inputs, kv_pages, layer, options, backend=backend)


@dataclass(frozen=True)
class MixedHeads(HeadVectors):
    """Keys and values in the pool of a model whose layers have heads of two sizes, as the larger ones take them.

    Attributes:
        smaller: heads of the other layers.
    """

    smaller: HeadVectors

    def select_backend(
        self, backend: str, *, num_query_heads: int, page_size: int | None, kv_dtype: jnp.dtype, platform: str | None
    ) -> str:
        """Return the best backend that serves both sizes; not for a pool with scales, whose pages cannot be split."""
        if jnp.dtype(kv_dtype).name in QUANTIZED:
            raise UnsupportedBackendError(
                f"kv_cache_dtype must be auto or a floating point type for layers with KV heads of two sizes "
                f"({self.num_kv_heads} of {self.head_dim} and {self.smaller.num_kv_heads} of {self.smaller.head_dim}), "
                f"got {kv_dtype}"
            )
        own = HeadVectors(self.num_kv_heads, self.head_dim)
        facts: dict[str, Any] = {"num_query_heads": num_query_heads, "kv_dtype": kv_dtype, "platform": platform}
        found = [form.select_backend(backend, page_size=page_size, **facts) for form in (own, self.smaller)]
        chosen = max(found, key=list(ragged_paged_attention.BACKENDS).index)  # the better one serves one size alone
        for form in (own, self.smaller):
            form.select_backend(chosen, page_size=page_size or self.default_page_size(chosen, kv_dtype), **facts)
        return chosen


@dataclass(frozen=True)
class PartOfPages(HeadVectors):
    """Keys and values of layers several of which take the room of one layer of the pool.

    Attributes:
        num_parts: number of layers that take the room of one.
    """

    num_parts: int

    def move_tokens(
        self,
        backend: str,
        kv_pages: Pages,
        page_table: Int[Array, "table_rows M"],
        table_row: Int[Array, " R"],
        first: Int[Array, " R"],
        source: Int[Array, "R N"],
    ) -> Pages:
        """Copy keys and values within their rows, in every part of the pages."""
        seen: Pages = self._split(backend, kv_pages)
        for part in range(self.num_parts):
            seen = super().move_tokens(backend, seen, page_table * self.num_parts + part, table_row, first, source)
        return _joined(seen, kv_pages)

    def step_rows(self, backend: str, rows: RaggedRows) -> RaggedRows:
        """Return the rows with a table of their own, in which each layer finds its part."""
        return rows.with_own_table()

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
        """Run `ragged_paged_attention` over the part of each page that a layer has."""
        assert isinstance(new.v, Array), "values are no matrices"
        rows = rows.with_own_table()
        rows = rows._replace(page_table=rows.page_table * self.num_parts + layer % self.num_parts)
        inputs = AttentionInputs(new.q, new.k, new.v, rows, new.rope, new.sinks, new.tree_mask)
        layer //= self.num_parts
        return ragged_paged_attention.ragged_paged_attention(
            inputs, kv_pages, layer, options, num_parts=self.num_parts, backend=backend
        )

    def _split(self, backend: str, kv_pages: Pages) -> Array:
        """Return a pool for larger heads as one of `num_parts` times as many pages."""
        sizes = {"num_kv_heads": self.num_kv_heads, "head_dim": self.head_dim}
        return ragged_paged_attention.split_pages(backend, kv_pages, num_parts=self.num_parts, **sizes)


def _joined(seen: Pages, kv_pages: Pages) -> Pages:
    """Return a pool that was split in the shape that it had before."""
    assert isinstance(seen, Array), "a pool that is split has no scales"
    assert isinstance(kv_pages, Array), "a pool that is split has no scales"
    return seen.reshape(kv_pages.shape)


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
        """Run `mla_attention.head_attention`."""
        assert (new.sinks, options.window, options.soft_cap) == (None,) * 3, "no family with latents has these"
        assert isinstance(new.v, HeadMatrices), "latents are expanded by matrices"
        inputs = HeadInputs(new.q, new.k[:, 0], new.v, rows, new.rope, new.tree_mask)
        own = LatentOptions(self.rank, options.scale)
        return mla_attention.head_attention(inputs, kv_pages, layer, own, backend=backend)
