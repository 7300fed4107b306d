"""IndexedLatents: MLA latents with index keys, which decide the tokens that a query attends to (DSA).

Index keys have the latents' page ids: their pages are written, shared, moved and evicted together. vLLM and SGLang
call them the indexer cache. DeepSeek's kernels multiply index queries and keys by a Hadamard matrix before they round
them to fp8; exact scores are equal without it. Here, as in transformers, scores are float32, without the matrix. Index
keys have the pool's dtype, bfloat16 in a pool of fp8.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.layers.kv_forms import LatentForm, NewTokens
from jaxserve.pallas_kernels import ragged_paged_attention as ops
from jaxserve.pallas_kernels.ragged_paged_attention import (
    AttentionOptions,
    ChosenTokens,
    HeadMatrices,
    IndexedPages,
    MLAInputs,
    Pages,
    RaggedRows,
    has_canonical_layout,
    indexed,
    pool_page_size,
)


@dataclass(frozen=True)
class IndexedLatents(LatentForm[IndexedPages]):
    """MLA latents, and an index key per token.

    Attributes:
        num_index_heads: query heads of the indexer.
        index_dim: elements per index query and key, of which the last `rope_dim` are rotated.
        top_k: maximum tokens that a query attends to.
        num_indexers: layers in the pool with index keys, if the others share an earlier layer's choice; None if all
            layers have index keys.
    """

    num_index_heads: int
    index_dim: int
    top_k: int
    num_indexers: int | None = None

    @property
    def _index_kind(self) -> ops.Latents:
        """Index keys, as vectors that a pool stores."""
        return ops.Latents(self.index_dim, 0)

    @property
    def token_size(self) -> int:
        """Elements stored per token and layer."""
        return super().token_size + self.index_dim

    def _key_backend(self, backend: str) -> str:
        """Return the backend whose layout index keys have: single ones are written, so it is the canonical layout."""
        return backend if has_canonical_layout(backend, self._index_kind, jnp.bfloat16) else "xla"

    def new_pages(
        self, backend: str, *, num_layers: int, num_pages: int, page_size: int, dtype: jnp.dtype
    ) -> IndexedPages:
        """Return an empty pool for a named backend."""
        sizes = {"num_layers": num_layers, "num_pages": num_pages, "page_size": page_size}
        is_wide = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize > 1
        latents: Pages = ops.new_pages(backend, self.kind, **sizes, dtype=dtype)
        sizes["num_layers"] = num_layers if self.num_indexers is None else self.num_indexers
        keys: Pages = ops.new_pages(
            self._key_backend(backend), self._index_kind, **sizes, dtype=dtype if is_wide else jnp.bfloat16
        )
        assert isinstance(keys, Array), "index keys have no scales"
        return IndexedPages(latents, keys)

    def move_tokens(
        self, backend: str, kv_pages: IndexedPages, page_table: Int[Array, "rows M"], *moves: Array
    ) -> IndexedPages:
        """Copy latents and index keys within their rows, in all layers."""
        latents: Pages = ops.move_tokens(backend, self.kind, kv_pages.latents, page_table, *moves)
        user, index_keys = self._key_backend(backend), kv_pages.index_keys
        keys: Pages = ops.move_tokens(user, self._index_kind, index_keys, page_table, *moves)
        assert isinstance(keys, Array), "index keys have no scales"
        return IndexedPages(latents, keys)

    def choice_bytes(self, num_rows: int, num_tokens: int, num_heads: int, max_len: int, page_size: int) -> int:
        """Return the bytes for a layer's scores and gathered latents, and for the bits that layers share, twice."""
        shared = 0 if self.num_indexers is None else 2 * num_tokens * max_len // 8
        return shared + indexed.working_bytes(self.rank + self.rope_dim, num_heads, self.top_k, max_len)

    def no_choice(self, backend: str, kv_pages: IndexedPages, rows: RaggedRows, num_tokens: int) -> ChosenTokens | None:
        """Return the choice before a step's first layer; None if layers share none."""
        if self.num_indexers is None:
            return None
        max_len = rows.page_table.shape[1] * pool_page_size(backend, kv_pages.latents)
        return ChosenTokens.none(num_tokens, max_len, self.top_k)

    def attend(
        self,
        new: NewTokens,
        rows: RaggedRows,
        kv_pages: IndexedPages,
        layer: Int[Array, ""],
        options: AttentionOptions,
        *,
        backend: str,
    ) -> tuple[Float[Array, "N Q V"], IndexedPages]:
        """Rotate, write the new latents and index keys, and attend to the chosen tokens; see `KVForm.attend`."""
        out, pages, _ = self.attend_chosen(new, rows, kv_pages, layer, options, backend=backend, earlier=None)
        return out, pages

    def attend_chosen(
        self,
        new: NewTokens,
        rows: RaggedRows,
        kv_pages: IndexedPages,
        layer: Int[Array, ""],
        options: AttentionOptions,
        *,
        backend: str,
        earlier: ChosenTokens | None,
    ) -> tuple[Float[Array, "N Q V"], IndexedPages, ChosenTokens | None]:
        """Return the results of `attend`, and the choice for later layers, given the `earlier` one."""
        assert isinstance(new.v, HeadMatrices), "latents are expanded by matrices"
        inputs = MLAInputs(new.q, new.k[:, 0], new.v, rows, new.rope, new.tree_mask)
        options = replace(options, rank=self.rank)
        return indexed.indexed_mla_attention(
            inputs, new.indexer, kv_pages, layer, options, top_k=self.top_k, backend=backend, earlier=earlier
        )
