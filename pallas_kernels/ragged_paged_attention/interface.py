"""Interface between the operation and its backends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from jaxserve.pallas_kernels.ragged_paged_attention.quantized import Pages


class PoolDims(NamedTuple):
    """Sizes of a page pool, whatever the order of its axes."""

    num_layers: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int


class RaggedRows(NamedTuple):
    """Assignment of a step's tokens to rows and pages.

    Rows from `num_rows` on and tokens from `cu_q_lens[num_rows]` on are padding and may hold anything; no backend may
    let their content reach a live output or the pool.
    """

    kv_lens: Int32[Array, "R"]
    """Tokens of each row in the pool, those of this step included."""
    page_table: Int32[Array, "R M"]
    """Pages of each row in order; entries past `ceil(kv_lens / P)` are never followed."""
    cu_q_lens: Int32[Array, "R+1"]
    """Row bounds: row r owns tokens `cu_q_lens[r]:cu_q_lens[r+1]` of the step, the last ones of its sequence."""
    num_rows: Int32[Array, ""]
    """Number of live rows."""

    def is_live(self) -> Bool[Array, "R"]:
        """Return a mask of the rows that are not padding."""
        return jnp.arange(self.kv_lens.shape[0], dtype=jnp.int32) < self.num_rows

    def live_q_lens(self) -> Int32[Array, "R"]:
        """Return the tokens of each row in this step, zero for padding rows."""
        return jnp.where(self.is_live(), self.cu_q_lens[1:] - self.cu_q_lens[:-1], 0)

    def place(self, num_tokens: int, *, num_pages: int, page_size: int) -> tuple[Int32[Array, "T"], Int32[Array, "T"]]:
        """Return the page of each token of the step and its offset there; padding tokens get pages that do not exist.

        All places differ, those of padding tokens too: a scatter that drops places outside the pool may be declared
        free of collisions.
        """
        token_id = jnp.arange(num_tokens, dtype=jnp.int32)
        starts_by = (self.cu_q_lens[None, 1:] <= token_id[:, None]) & self.is_live()[None, :]  # [T, R]
        row_id = jnp.minimum(jnp.sum(starts_by, axis=1, dtype=jnp.int32), self.kv_lens.shape[0] - 1)
        position = token_id + (self.kv_lens - self.cu_q_lens[1:])[row_id]
        page_id = self.page_table.at[row_id, position // page_size].get(mode="clip")
        is_live = token_id < self.cu_q_lens[self.num_rows]
        return jnp.where(is_live, page_id, num_pages + token_id), position % page_size


@dataclass(frozen=True)
class Problem:
    """Static facts of a call, by which a backend decides if it can run it."""

    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    kv_dtype: jnp.dtype
    platform: str
    has_tree_mask: bool = False


@runtime_checkable
class Backend(Protocol):
    """Module that stores pages, writes to them and attends over them in one particular way."""

    def supports(self, problem: Problem) -> str | None:
        """Return the reason why this backend cannot run the problem, or None if it can."""

    def default_page_size(self, num_kv_heads: int, head_dim: int, kv_dtype: jnp.dtype) -> int:
        """Return the default page size in tokens."""

    def kv_shape(
        self, num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int
    ) -> tuple[int, ...]:
        """Return the shape of the pool's values in this backend's layout."""

    def scale_shape(self, num_layers: int, num_pages: int, page_size: int, num_kv_heads: int) -> tuple[int, ...]:
        """Return the shape of the scales of a quantised pool; called only if `supports` accepts such a pool."""

    def pool_dims(self, shape: tuple[int, ...]) -> PoolDims:
        """Invert `kv_shape`; raise ValueError for a shape that is not in this layout."""

    def to_canonical(self, kv_pages: Pages) -> Pages:
        """Return the pool as `[L, N, P, 2K, H]`, K of head h at 2h and V at 2h + 1; its scales as `[L, N, P, 2K]`."""

    def from_canonical(self, kv_pages: Pages) -> Pages:
        """Invert `to_canonical`."""

    def write_and_attend(
        self,
        q: Float[Array, "T Q H"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"],
        kv_pages: Pages,
        layer: int | Int32[Array, ""],
        rows: RaggedRows,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        sinks: Float[Array, "Q"] | None,
        rope: Float32[Array, "2 T half"] | None,
        tree_mask: Int32[Array, "T words"] | None,
    ) -> tuple[Float[Array, "T Q H"], Pages]:
        """Return the outputs of all rows in the dtype of `q`, and the pool with this step's keys and values.

        A backend must write the keys and values of all rows before any row attends: rows of one call may share pages
        that one of them writes in this call.
        """
