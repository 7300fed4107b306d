"""CanonicalPages: one layer of a pool in any layout, read by plain XLA."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from jaxserve.pallas_kernels.ragged_paged_attention.blockwise import LayerPages
from jaxserve.pallas_kernels.ragged_paged_attention.kinds import Latents
from jaxserve.pallas_kernels.ragged_paged_attention.layout import Layout
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import decode, values_of


@dataclass(frozen=True)
class CanonicalPages(LayerPages):
    """One layer in any layout, converted page by page.

    Attributes:
        layout: pool layout.
    """

    layout: Layout

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.layout.pool_dims(values_of(self.kv_pages).shape).page_size

    def read(self, page_id: Int32[Array, "B b"]) -> tuple[Float32[Array, "B K S H"], Float32[Array, "B K S V"]]:
        """Return the results of `LayerPages.read`."""
        ids, (B, num_pages) = page_id.reshape(-1), page_id.shape
        pages = jax.tree.map(lambda x: x.at[self.layer, ids].get(mode="clip")[None], self.kv_pages)
        vectors = decode(self.layout.to_canonical(pages))
        vectors = vectors.reshape(B, num_pages * self.page_size, *vectors.shape[3:])
        if isinstance(self.kind, Latents):
            return vectors[:, None], vectors[:, None, :, : self.kind.rank]
        return jnp.swapaxes(vectors[:, :, 0::2], 1, 2), jnp.swapaxes(vectors[:, :, 1::2], 1, 2)

    def latents_at(self, page: Int32[Array, "B k"], offset: Int32[Array, "B k"]) -> Float32[Array, "B k W"]:
        """Return single tokens' latents, given their pages and indices in these."""
        return decode(self.layout.latents_at(self.kv_pages, self.layer, page, offset))
