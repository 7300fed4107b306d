"""A device's pool, of any token layout."""

from jaxserve.layers.page_bounds import BoundedPages
from jaxserve.pallas_kernels import ragged_paged_attention as ops
from jaxserve.pallas_kernels.ragged_paged_attention import IndexedPages, KVKind, Pages

Pool = Pages | BoundedPages | IndexedPages


def read_pages(pool: Pool) -> Pages | IndexedPages:
    """Return the arrays that rows read token by token: a pool without the bounds of its pages."""
    return pool.pages if isinstance(pool, BoundedPages) else pool


def to_canonical(backend: str, pool: Pool, kind: KVKind) -> Pool:
    """Convert a pool, or a few pages, to the canonical layout, which index keys have in any pool."""
    assert not isinstance(pool, BoundedPages), "pages with bounds stay on the device"
    if isinstance(pool, IndexedPages):
        return pool._replace(latents=ops.to_canonical(backend, pool.latents, kind))
    return ops.to_canonical(backend, pool, kind)


def from_canonical(backend: str, pages: Pool) -> Pool:
    """Convert a pool, or a few pages, from the canonical layout to the layout of the backend named `backend`."""
    assert not isinstance(pages, BoundedPages), "pages with bounds stay on the device"
    if isinstance(pages, IndexedPages):
        return pages._replace(latents=ops.from_canonical(backend, pages.latents))
    return ops.from_canonical(backend, pages)
