"""Vectors that layers store per token in the pool, and attention to them.

A model's form determines its pool, backend and attention; only `models.kv_layout` chooses it.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from jaxserve.pallas_kernels import ragged_paged_attention as ops
from jaxserve.pallas_kernels.op import UnsupportedBackendError
from jaxserve.pallas_kernels.ragged_paged_attention import (
    QUANTIZED,
    AttentionInputs,
    AttentionOptions,
    ChosenTokens,
    HeadMatrices,
    IndexInputs,
    KVKind,
    MLAInputs,
    Pages,
    RaggedRows,
)


class NewTokens(NamedTuple):
    """A step's queries, and the vectors that it stores.

    Attributes:
        q: queries; for the rows' last tokens, R instead of T, if the attention is `last_only`.
        k: keys by KV head; latents as keys for a single head.
        v: values; for latents, the matrices that expand them to each head's keys and values.
        rope: cosines and sines that rotate queries and keys; None for no rotation.
        sinks: logits that take part in the softmax without values, or None.
        tree_mask: draft-token trees, or None.
        ahead: number of later tokens that each token sees, or None.
        indexer: an indexer's queries, weights and keys, see `indexed_latents`; None in a layer without an indexer.
        choosing: rows that choose the pages that they attend to, see `page_bounds`; None if none do.
    """

    q: Float[Array, "N Q W"]
    k: Float[Array, "T K S"]
    v: Float[Array, "T K H"] | HeadMatrices
    rope: Float32[Array, "2 T half"] | None = None
    sinks: Float[Array, " Q"] | None = None
    tree_mask: Int32[Array, " T"] | None = None
    indexer: IndexInputs | None = None
    choosing: Bool[Array, " R"] | None = None
    ahead: Int32[Array, " T"] | None = None


PoolT = TypeVar("PoolT")  # a device's pool


class KVForm(ABC, Generic[PoolT]):
    """Vectors that a layer stores per token in a device's pool; hashable."""

    @property
    @abstractmethod
    def kind(self) -> KVKind:
        """The kernels' description of these vectors."""

    @property
    def score_size(self) -> int:
        """Multiplications per query head and key: the key's and the value's elements."""
        return self.kind.key_dim + self.kind.value_dim

    @property
    def token_size(self) -> int:
        """Elements stored per token and layer."""
        return math.prod(self.kind.token_shape)

    def select_backend(
        self, backend: str, *, num_query_heads: int, page_size: int | None, kv_dtype: jnp.dtype, platform: str | None
    ) -> str:
        """Return the name of the backend that serves these vectors; see `ragged_paged_attention.select_backend`."""
        facts: dict[str, Any] = {"page_size": page_size, "kv_dtype": kv_dtype, "platform": platform}
        return ops.select_backend(backend, kind=self.kind, num_query_heads=num_query_heads, **facts)

    def default_page_size(self, backend: str, kv_dtype: jnp.dtype) -> int:
        """Return a named backend's default page size in tokens."""
        return ops.default_page_size(backend, self.kind, kv_dtype)

    @abstractmethod
    def new_pages(self, backend: str, *, num_layers: int, num_pages: int, page_size: int, dtype: jnp.dtype) -> PoolT:
        """Return an empty pool for a named backend."""

    @abstractmethod
    def move_tokens(self, backend: str, kv_pages: PoolT, page_table: Int[Array, "rows M"], *moves: Array) -> PoolT:
        """Copy tokens within their rows, in all layers; see `ragged_paged_attention.move_tokens`."""

    def choice_bytes(self, num_rows: int, num_tokens: int, num_heads: int, max_len: int, page_size: int) -> int:
        """Return a step's bytes for rows that choose among their tokens; 0 if they attend to all.

        Args:
            num_rows: number of rows.
            num_tokens: number of tokens.
            num_heads: query heads.
            max_len: maximum tokens in a row.
            page_size: tokens per page.
        """
        return 0

    def step_rows(self, backend: str, rows: RaggedRows) -> RaggedRows:
        """Return a step's rows, prepared once for all layers; see `ragged_paged_attention.step_rows`."""
        return ops.step_rows(backend, rows)

    def no_choice(self, backend: str, kv_pages: PoolT, rows: RaggedRows, num_tokens: int) -> ChosenTokens | None:
        """Return the tokens chosen before a step's first layer; None if no layer shares an earlier layer's choice."""
        return None

    @abstractmethod
    def attend(
        self,
        new: NewTokens,
        rows: RaggedRows,
        kv_pages: PoolT,
        layer: Int[Array, ""],
        options: AttentionOptions,
        *,
        backend: str,
    ) -> tuple[Float[Array, "N Q V"], PoolT]:
        """Rotate the new tokens, write them to the pool and attend; return outputs and the updated pool.

        Args:
            new: queries, and the vectors to be stored.
            rows: the step's rows.
            kv_pages: a device's pool.
            layer: the layer's position in the pool.
            options: scale, window and soft cap.
            backend: name of the attention backend.
        """


class PlainForm(KVForm[Pages]):
    """Vectors in a pool that holds nothing else."""

    def new_pages(self, backend: str, *, num_layers: int, num_pages: int, page_size: int, dtype: jnp.dtype) -> Pages:
        """Return an empty pool for a named backend."""
        sizes = {"num_layers": num_layers, "num_pages": num_pages, "page_size": page_size}
        return ops.new_pages(backend, self.kind, **sizes, dtype=dtype)

    def move_tokens(self, backend: str, kv_pages: Pages, page_table: Int[Array, "rows M"], *moves: Array) -> Pages:
        """Copy tokens within their rows, in all layers; see `ragged_paged_attention.move_tokens`."""
        return ops.move_tokens(backend, self.kind, kv_pages, page_table, *moves)


@dataclass(frozen=True)
class HeadForm(KVForm[PoolT]):
    """Keys and values for every KV head, in any pool.

    Attributes:
        num_kv_heads: number of KV heads, K.
        head_dim: key and value size, H.
    """

    num_kv_heads: int
    head_dim: int

    @property
    def kind(self) -> ops.Heads:
        """Number and size of KV heads, as the attention kernels take them."""
        return ops.Heads(self.num_kv_heads, self.head_dim)


@dataclass(frozen=True)
class HeadVectors(PlainForm, HeadForm[Pages]):
    """Keys and values for every KV head."""

    def attend(
        self,
        new: NewTokens,
        rows: RaggedRows,
        kv_pages: Pages,
        layer: Int[Array, ""],
        options: AttentionOptions,
        *,
        backend: str,
        num_parts: int | None = None,
    ) -> tuple[Float[Array, "N Q V"], Pages]:
        """Rotate, write the new keys and values to the pool and attend; see `KVForm.attend`.

        `num_parts` is the number of layers that share the pages, None if none do.
        """
        assert isinstance(new.v, Array), "only latents have matrices"
        inputs = AttentionInputs(new.q, new.k, new.v, rows, new.rope, new.sinks, new.tree_mask, new.ahead)
        return ops.ragged_paged_attention(inputs, kv_pages, layer, options, num_parts=num_parts, backend=backend)


@dataclass(frozen=True)
class MixedHeads(HeadVectors):
    """Larger heads in a model with two head sizes; the pool is made for these.

    Attributes:
        smaller: heads in the other layers.
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
        larger = HeadVectors(self.num_kv_heads, self.head_dim)
        facts: dict[str, Any] = {"num_query_heads": num_query_heads, "kv_dtype": kv_dtype, "platform": platform}
        found = [form.select_backend(backend, page_size=page_size, **facts) for form in (larger, self.smaller)]
        chosen = max(found, key=list(ops.BACKENDS).index)  # a more preferred one serves only one size
        for form in (larger, self.smaller):
            form.select_backend(chosen, page_size=page_size or self.default_page_size(chosen, kv_dtype), **facts)
        return chosen


@dataclass(frozen=True)
class PartOfPages(HeadVectors):
    """Smaller heads in a pool made for larger ones: several layers share the pages for one pool layer.

    Attributes:
        num_parts: number of layers that share these pages.
    """

    num_parts: int

    def move_tokens(self, backend: str, kv_pages: Pages, page_table: Int[Array, "rows M"], *moves: Array) -> Pages:
        """Copy tokens within their rows, in every layer's part."""
        pool: Pages = ops.split_pages(backend, kv_pages, self.kind, self.num_parts)
        for part in range(self.num_parts):
            pool = super().move_tokens(backend, pool, page_table * self.num_parts + part, *moves)
        assert isinstance(pool, Array), "a pool that is split has no scales"
        assert isinstance(kv_pages, Array), "a pool that is split has no scales"
        return pool.reshape(kv_pages.shape)

    def step_rows(self, backend: str, rows: RaggedRows) -> RaggedRows:
        """Return the rows with a gathered page table; each layer computes its page ids from it."""
        return rows.with_gathered_table()

    def attend(
        self,
        new: NewTokens,
        rows: RaggedRows,
        kv_pages: Pages,
        layer: Int[Array, ""],
        options: AttentionOptions,
        *,
        backend: str,
        num_parts: int | None = None,
    ) -> tuple[Float[Array, "N Q V"], Pages]:
        """Attend in this layer's part of the shared pages; see `KVForm.attend`."""
        rows = rows.with_gathered_table()
        rows = rows._replace(page_table=rows.page_table * self.num_parts + layer % self.num_parts)
        layer //= self.num_parts
        return super().attend(new, rows, kv_pages, layer, options, backend=backend, num_parts=self.num_parts)


@dataclass(frozen=True)
class LatentForm(KVForm[PoolT]):
    """MLA (multi-head latent attention), in any pool: one latent for all heads, whose first elements are the value.

    Attributes:
        rank: value size, r.
        rope_dim: number of further elements, which are rotated.
    """

    rank: int
    rope_dim: int

    @property
    def kind(self) -> ops.Latents:
        """Parameters of MLA in the attention kernels."""
        return ops.Latents(self.rank, self.rope_dim)


@dataclass(frozen=True)
class Latents(PlainForm, LatentForm[Pages]):
    """MLA latents."""

    def attend(
        self,
        new: NewTokens,
        rows: RaggedRows,
        kv_pages: Pages,
        layer: Int[Array, ""],
        options: AttentionOptions,
        *,
        backend: str,
    ) -> tuple[Float[Array, "N Q V"], Pages]:
        """Rotate, write the new latents to the pool and attend by MLA; see `KVForm.attend`."""
        assert new.sinks is None, "no family with latents has sinks"
        assert isinstance(new.v, HeadMatrices), "latents are expanded by matrices"
        inputs = MLAInputs(new.q, new.k[:, 0], new.v, rows, new.rope, new.tree_mask)
        return ops.mla_attention(inputs, kv_pages, layer, replace(options, rank=self.rank), backend=backend)
