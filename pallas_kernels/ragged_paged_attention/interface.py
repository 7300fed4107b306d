"""What the operation and its backends say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from jaxserve.pallas_kernels.ragged_paged_attention.quantized import Pages


class PoolDims(NamedTuple):
    """The sizes of a page pool, whatever the order of its axes."""

    num_layers: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int


class RaggedRows(NamedTuple):
    """Where the tokens of a step belong.

    Rows from `num_rows` on, and tokens from `cu_q_lens[num_rows]` on, are padding, and may hold anything: no
    backend may let it reach a live output or the pool.
    """

    kv_lens: Int32[Array, "R"]
    """Tokens of each row in the pool, those of this step included."""
    page_table: Int32[Array, "R M"]
    """Pages of each row in order; entries past `ceil(kv_lens / P)` are never followed."""
    cu_q_lens: Int32[Array, "R+1"]
    """Row r owns tokens `cu_q_lens[r]:cu_q_lens[r+1]` of the step, the last ones of its sequence."""
    num_rows: Int32[Array, ""]
    """Number of live rows."""

    def is_live(self) -> Bool[Array, "R"]:
        """Which rows are not padding."""
        return jnp.arange(self.kv_lens.shape[0], dtype=jnp.int32) < self.num_rows

    def live_q_lens(self) -> Int32[Array, "R"]:
        """Tokens of each row in this step; zero for padding rows."""
        return jnp.where(self.is_live(), self.cu_q_lens[1:] - self.cu_q_lens[:-1], 0)

    def place(self, num_tokens: int, *, num_pages: int, page_size: int) -> tuple[Int32[Array, "T"], Int32[Array, "T"]]:
        """The page of each token of the step and its place there; of padding tokens, pages that do not exist.

        All places are different, those of padding tokens too: a scatter that drops what is outside of the pool may be
        declared free of collisions.
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
    """The static facts of a call: what a backend needs to know to tell whether it can run it."""

    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    kv_dtype: jnp.dtype
    platform: str
    has_tree_mask: bool = False


@runtime_checkable
class Backend(Protocol):
    """One way to store pages, write to them and attend over them. A module with these functions is a backend."""

    def supports(self, problem: Problem) -> str | None:
        """Why this backend cannot run the problem; None if it can."""

    def default_page_size(self, num_kv_heads: int, head_dim: int, kv_dtype: jnp.dtype) -> int:
        """Tokens of a page where nobody says otherwise."""

    def kv_shape(
        self, num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int
    ) -> tuple[int, ...]:
        """Shape of the pool's numbers in this backend's layout."""

    def scale_shape(self, num_layers: int, num_pages: int, page_size: int, num_kv_heads: int) -> tuple[int, ...]:
        """Shape of the scales of a quantized pool, which is asked for only where `supports` accepts one."""

    def pool_dims(self, shape: tuple[int, ...]) -> PoolDims:
        """The inverse of `kv_shape`. Raises ValueError for a shape that is none of this layout."""

    def to_canonical(self, kv_pages: Pages) -> Pages:
        """The pool as `[L, N, P, 2K, H]`, K of head h at 2h and V at 2h + 1; scales as `[L, N, P, 2K]`."""

    def from_canonical(self, kv_pages: Pages) -> Pages:
        """The inverse of `to_canonical`."""

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
        """Attention of every row, in the dtype of `q`, and the pool with this step's keys and values in their pages.

        A backend must write the keys and values of all rows before any row attends: rows of one call may share pages
        that one of them writes in this call.
        """
