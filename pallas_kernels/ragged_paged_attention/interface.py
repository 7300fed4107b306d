"""Interface between the operation and its backends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxserve.pallas_kernels.ragged_paged_attention.layout import Layout
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import Pages
from jaxserve.pallas_kernels.ragged_paged_attention.rope import apply_rope
from jaxtyping import Array, Bool, Float, Float32, Int32


@dataclass(frozen=True)
class AttentionOptions:
    """Static options of attention; a value to hash and compare, since each has a program of its own.

    Attributes:
        scale: factor on the scores, usually `H ** -0.5`.
        window: number of tokens that a query sees: at position p the keys in `(p - window, p]`; None for all up to p.
        soft_cap: bound of the scores, which become `soft_cap * tanh(scores / soft_cap)`; None to leave them.

    Raises:
        ValueError: an option has no meaning.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1 token, got {self.window}; pass None to see the whole sequence")
        if self.soft_cap is not None and self.soft_cap <= 0:
            raise ValueError(f"soft_cap must be positive, got {self.soft_cap}; pass None to leave the scores uncapped")


class PagesToRead(NamedTuple):
    """Pages of R rows of a step that their new tokens see.

    A row reads whole pages of its own, in their order; the pages that it writes to in the step are always among them.
    Keys keep the rotation that they were stored with, and new tokens that of their own position, whatever lies between.
    A layer with a sliding window takes no such pages: it counts tokens in the pool, and would count past the gaps.
    """

    columns: Int32[Array, "R W"]
    """Columns of these pages in the page table, ascending."""
    num_skipped: Int32[Array, "R"]
    """Pages of each row that are not among them; further columns are never followed."""


class RaggedRows(NamedTuple):
    """Assignment of a step's tokens to rows and pages.

    Rows from `num_rows` on and tokens from `cu_q_lens[num_rows]` on are padding and may hold anything; no backend may
    let their content reach a live output or the pool.
    """

    kv_lens: Int32[Array, "R"]
    """Tokens of each row in the pool, those of this step included."""
    page_table: Int32[Array, "table_rows M"]
    """Pages of sequences in order; entries past `ceil(kv_lens / P)` are never followed."""
    cu_q_lens: Int32[Array, "R+1"]
    """Row bounds: row r owns tokens `cu_q_lens[r]:cu_q_lens[r+1]` of the step, the last ones of its sequence."""
    num_rows: Int32[Array, ""]
    """Number of live rows."""
    table_row: Int32[Array, "R"] | None = None
    """Row of the page table that has the pages of each row of the step; None if these are its rows in order."""
    pages_to_read: PagesToRead | None = None
    """Pages that the rows attend to; None for all of theirs."""

    def table_rows(self, row_id: Int32[Array, "*n"]) -> Int32[Array, "*n"]:
        """Return the rows of the page table that have the pages of some rows of the step."""
        return row_id if self.table_row is None else self.table_row.at[row_id].get(mode="clip")

    def with_own_table(self) -> RaggedRows:
        """Return the same rows with a page table that has theirs in order."""
        if self.table_row is None:
            return self
        return self._replace(page_table=self.page_table.at[self.table_row].get(mode="clip"), table_row=None)

    def with_read_pages(self, page_size: int) -> RaggedRows:
        """Return the same rows as rows of the pages that they read and no others.

        New tokens have the same places: those are in the last pages, and as far from a page's first token.
        """
        if self.pages_to_read is None:
            return self
        columns, num_skipped = self.pages_to_read
        row = self.table_rows(jnp.arange(self.kv_lens.shape[0], dtype=jnp.int32))
        page_table = self.page_table.at[row[:, None], columns].get(mode="clip", wrap_negative_indices=False)
        return RaggedRows(self.kv_lens - num_skipped * page_size, page_table, self.cu_q_lens, self.num_rows)

    def is_live(self) -> Bool[Array, "R"]:
        """Return a mask of the rows that are not padding."""
        return jnp.arange(self.kv_lens.shape[0], dtype=jnp.int32) < self.num_rows

    def live_q_lens(self) -> Int32[Array, "R"]:
        """Return the tokens of each row in this step, zero for padding rows."""
        return jnp.where(self.is_live(), self.cu_q_lens[1:] - self.cu_q_lens[:-1], 0)

    def row_ids(self, token_id: Int32[Array, "T"]) -> Int32[Array, "T"]:
        """Return the row of each of some tokens of the step; padding tokens get any row."""
        starts_by = (self.cu_q_lens[None, 1:] <= token_id[:, None]) & self.is_live()[None, :]  # [T, R]
        return jnp.minimum(jnp.sum(starts_by, axis=1, dtype=jnp.int32), self.kv_lens.shape[0] - 1)

    def place(self, num_tokens: int, *, num_pages: int, page_size: int) -> tuple[Int32[Array, "T"], Int32[Array, "T"]]:
        """Return the page of each token of the step and its offset there; padding tokens get pages that do not exist.

        So do tokens past the last column of the page table, which belong to nobody's pages. All places differ, those of
        padding tokens too: a scatter that drops places outside the pool may be declared free of collisions.
        """
        token_id = jnp.arange(num_tokens, dtype=jnp.int32)
        row_id = self.row_ids(token_id)
        position = token_id + (self.kv_lens - self.cu_q_lens[1:])[row_id]
        column = position // page_size
        page_id = self.page_table.at[self.table_rows(row_id), column].get(mode="clip")
        is_live = (token_id < self.cu_q_lens[self.num_rows]) & (column < self.page_table.shape[1])
        return jnp.where(is_live, page_id, num_pages + token_id), position % page_size


class AttentionInputs(NamedTuple):
    """Arrays of one call, except the pool."""

    q: Float[Array, "T Q H"]
    """Queries; Q is a multiple of K, query head h reads KV head h // (Q / K)."""
    k: Float[Array, "T K H"]
    """New keys, cast or quantised to the dtype of the pool."""
    v: Float[Array, "T K H"]
    """New values, cast or quantised to the dtype of the pool."""
    rows: RaggedRows
    rope: Float32[Array, "2 T half"] | None = None
    """Cosines and sines of every token's angles, which rotate `q` and `k` in float32 before use, as `apply_rope` does;
    None to use them as they are."""
    sinks: Float[Array, "Q"] | None = None
    """Extra logit per query head that takes part in the softmax and carries no value."""
    tree_mask: Int32[Array, "T"] | None = None
    """Tree of drafts of each row, a word per token; None if the new tokens of every row follow each other.

    The nodes of a row are its last new tokens, up to 32, parents before children, and bit j of a token's word stands
    for node j: it is set if node j is an ancestor of the token, which then sees it. Whatever the bits say, a token sees
    itself, none after itself, and all tokens of its row before the nodes. A word of ones (-1) makes a row without a
    tree. A window shows the last `window` of the tokens that are seen: it compares the depth of nodes, not their order
    in the pool. `rope` must have the angles of each node's depth."""

    def rotated(self) -> AttentionInputs:
        """Return the inputs with rotated queries and keys."""
        if self.rope is None:
            return self
        return self._replace(q=apply_rope(self.q, self.rope), k=apply_rope(self.k, self.rope), rope=None)


@dataclass(frozen=True)
class Problem:
    """Static facts of a call, by which a backend decides if it can run it."""

    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    kv_dtype: jnp.dtype
    platform: str


@runtime_checkable
class Backend(Protocol):
    """Module that stores pages, writes to them and attends over them in one particular way."""

    @property
    def LAYOUT(self) -> Layout:  # noqa: N802 (a constant of a module)
        """Layout of its pool."""

    @property
    def SPLITS_PAGES(self) -> bool:  # noqa: N802
        """True if it takes a pool for other heads as it is, so that XLA has no other shape of it to copy."""

    @property
    def WANTS_OWN_TABLE(self) -> bool:  # noqa: N802
        """True if all layers read the pages of a step's rows faster from a table of their own."""

    def supports(self, problem: Problem) -> str | None:
        """Return the reason why this backend cannot run the problem, or None if it can."""

    def write_and_attend(
        self, inputs: AttentionInputs, kv_pages: Pages, layer: int | Int32[Array, ""], options: AttentionOptions
    ) -> tuple[Float[Array, "T Q H"], Pages]:
        """Return the outputs of all rows in the dtype of `q`, and the pool with this step's keys and values.

        A backend must write the keys and values of all rows before any row attends: rows of one call may share pages
        that one of them writes in this call.
        """
