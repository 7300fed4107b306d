"""Rows of a step: which tokens belong to which sequence, and which pages store each sequence."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

NO_TOKEN = 2**31 - 1  # index of a token that does not exist


def next_index(tokens: Int32[Array, "R"], num_tokens: int) -> Int32[Array, "T"]:
    """Return for each of `num_tokens` tokens the index of the first of `tokens`, ascending, that is not before it.

    A gather by it serves where a scatter of a few rows would: XLA:CPU scatters row after row.
    """
    return jnp.sum(tokens[:, None] < jnp.arange(num_tokens, dtype=jnp.int32)[None, :], axis=0, dtype=jnp.int32)


class PagesToRead(NamedTuple):
    """Selection of the pages that each row's new tokens attend to, if these are not all of the row's pages.

    They must include the pages that a row writes in the step. Keys keep the rotation that they were stored with, and
    new tokens are rotated by their own positions, regardless of gaps. Layers with a sliding window take no such list: a
    window counts tokens in the pool and would count past the gaps.
    """

    columns: Int32[Array, "R W"]
    """Columns of these pages in the row's page table, ascending."""
    num_skipped: Int32[Array, "R"]
    """Number of pages that each row leaves out; further elements of `columns` are ignored."""


class RaggedRows(NamedTuple):
    """Assignment of a step's tokens to rows and pages.

    Rows from `num_rows` on and tokens from `cu_q_lens[num_rows]` on are padding and may hold anything; no backend may
    let their content reach a live output or the pool.
    """

    kv_lens: Int32[Array, "R"]
    """Number of tokens per row in the pool, including this step's."""
    page_table: Int32[Array, "table_rows M"]
    """Page ids per sequence, in order; entries past `ceil(kv_lens / P)` are never followed."""
    cu_q_lens: Int32[Array, "R+1"]
    """Row bounds: row r has the step's tokens `cu_q_lens[r]:cu_q_lens[r+1]`, the last ones in its sequence."""
    num_rows: Int32[Array, ""]
    """Number of live rows."""
    table_row: Int32[Array, "R"] | None = None
    """Page-table row for each row in the step; None if both have the same order."""
    pages_to_read: PagesToRead | None = None
    """Pages that the rows attend to; None for all."""

    def table_rows(self, row_id: Int32[Array, "*n"]) -> Int32[Array, "*n"]:
        """Return each given row's index in the page table."""
        return row_id if self.table_row is None else self.table_row.at[row_id].get(mode="clip")

    def with_gathered_table(self) -> RaggedRows:
        """Return these rows with a page table ordered like the step's rows, so that `table_row` is None."""
        if self.table_row is None:
            return self
        return self._replace(page_table=self.page_table.at[self.table_row].get(mode="clip"), table_row=None)

    def with_read_pages(self, page_size: int) -> RaggedRows:
        """Return these rows with page tables and lengths that include only the pages in `pages_to_read`.

        New tokens keep their offsets in the pages: they are in the last pages, all of which are read.
        """
        if self.pages_to_read is None:
            return self
        columns, num_skipped = self.pages_to_read
        row = self.table_rows(jnp.arange(self.kv_lens.shape[0], dtype=jnp.int32))
        page_table = self.page_table.at[row[:, None], columns].get(mode="clip", wrap_negative_indices=False)
        return RaggedRows(self.kv_lens - num_skipped * page_size, page_table, self.cu_q_lens, self.num_rows)

    def last_tokens(self) -> tuple[RaggedRows, Int32[Array, "R"]]:
        """Return the rows with only their last new tokens, packed, and these tokens' indices in the step.

        Rows without new tokens have none; the indices end with as many `NO_TOKEN`.
        """
        index = jnp.arange(self.kv_lens.shape[0], dtype=jnp.int32)
        ends = jnp.cumsum(self.live_q_lens() > 0, dtype=jnp.int32)
        row = jnp.sum(ends[None, :] <= index[:, None], axis=1, dtype=jnp.int32)
        token = self.cu_q_lens.at[row + 1].get(mode="clip") - 1
        rows = self._replace(cu_q_lens=jnp.concatenate([jnp.zeros(1, jnp.int32), ends]))
        return rows, jnp.where(index < ends[-1], token, NO_TOKEN)

    def part(self, start: Int32[Array, ""], num_tokens: int) -> RaggedRows:
        """Return the rows with only the step's tokens from `start` on; the rows' later tokens are not in the pool."""
        cu_q_lens = jnp.clip(self.cu_q_lens - start, 0, num_tokens)
        num_later = self.cu_q_lens[1:] - start - cu_q_lens[1:]
        kv_lens = jnp.where(cu_q_lens[1:] > cu_q_lens[:-1], self.kv_lens - num_later, self.kv_lens)
        return self._replace(kv_lens=kv_lens, cu_q_lens=cu_q_lens)

    def is_live(self) -> Bool[Array, "R"]:
        """Return a mask of the rows that are not padding."""
        return jnp.arange(self.kv_lens.shape[0], dtype=jnp.int32) < self.num_rows

    def live_q_lens(self) -> Int32[Array, "R"]:
        """Return each row's number of new tokens, zero for padding rows."""
        return jnp.where(self.is_live(), self.cu_q_lens[1:] - self.cu_q_lens[:-1], 0)

    def row_ids(self, token_id: Int32[Array, "T"]) -> Int32[Array, "T"]:
        """Return the index of the row that each given token belongs to, any row for padding tokens."""
        starts_by = (self.cu_q_lens[None, 1:] <= token_id[:, None]) & self.is_live()[None, :]  # [T, R]
        return jnp.minimum(jnp.sum(starts_by, axis=1, dtype=jnp.int32), self.kv_lens.shape[0] - 1)

    def slot_mapping(
        self, num_tokens: int, *, num_pages: int, page_size: int
    ) -> tuple[Int32[Array, "T"], Int32[Array, "T"]]:
        """Return the page to which each of the step's tokens is written, and its offset in the page.

        Padding tokens, and tokens past the page table's last column, get pages that do not exist. All slots differ,
        also outside the pool: a scatter that drops these may be declared to have unique indices.
        """
        token_id = jnp.arange(num_tokens, dtype=jnp.int32)
        row_id = self.row_ids(token_id)
        position = token_id + (self.kv_lens - self.cu_q_lens[1:])[row_id]
        column = position // page_size
        page_id = self.page_table.at[self.table_rows(row_id), column].get(mode="clip")
        is_live = (token_id < self.cu_q_lens[self.num_rows]) & (column < self.page_table.shape[1])
        return jnp.where(is_live, page_id, num_pages + token_id), position % page_size
