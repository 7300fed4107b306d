"""Interface between the operation and its backends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int32

from jaxserve.pallas_kernels.ragged_paged_attention.kinds import Heads, KVKind, Latents
from jaxserve.pallas_kernels.ragged_paged_attention.layout import Layout
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import Pages
from jaxserve.pallas_kernels.ragged_paged_attention.rope import apply_rope
from jaxserve.pallas_kernels.ragged_paged_attention.rows import RaggedRows, next_index


@dataclass(frozen=True)
class AttentionOptions:
    """Static attention options; hashable, since each combination is compiled separately.

    Attributes:
        scale: factor on the scores, usually `H ** -0.5`.
        window: number of tokens that a query sees: at position p the keys in `(p - window, p]`; None for all up to p.
        soft_cap: bound on the scores, which become `soft_cap * tanh(scores / soft_cap)`; None for no bound.
        rank: size of the value at the beginning of a latent; None for keys and values per head.
        max_queries: maximum number of new tokens in a row that attends: longer rows are only written, and their outputs
            are undefined. None for no maximum. Only for latents, and backends that expand them.
        last_only: True if only each row's last new token attends: queries and outputs are those of
            `RaggedRows.last_tokens`; outputs after the last row are finite.

    Raises:
        ValueError: an option is out of range.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    rank: int | None = None
    max_queries: int | None = None
    last_only: bool = False

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1 token, got {self.window}; pass None to see the whole sequence")
        if self.soft_cap is not None and self.soft_cap <= 0:
            raise ValueError(f"soft_cap must be positive, got {self.soft_cap}; pass None to leave the scores uncapped")
        for name in ("rank", "max_queries"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1 or None, got {value}")


class AttentionInputs(NamedTuple):
    """Array arguments for `ragged_paged_attention`, except the pool: a step's new queries, keys, values, and rows."""

    q: Float[Array, "N Q H"]
    """Queries; Q is a multiple of K, query head h reads KV head h // (Q / K). N is T, or R with `last_only`."""
    k: Float[Array, "T K H"]
    """New keys, cast or quantised to the pool dtype; latents as the keys of one head."""
    v: Float[Array, "T K H"] | None
    """New values, cast or quantised to the pool dtype; None with latents, which begin with the values."""
    rows: RaggedRows
    rope: Float32[Array, "2 T half"] | None = None
    """Cosines and sines per token; they rotate the last `2 * half` elements in `q` and `k` in float32 before use, as
    `apply_rope` does: all elements per head, or the end of a latent. None to use `q` and `k` unchanged.
    """
    sinks: Float[Array, "Q"] | None = None
    """Extra logit per query head that takes part in the softmax and carries no value."""
    tree_mask: Int32[Array, "T"] | None = None
    """Draft tree per row, one word per token; None if every row's new tokens are a plain sequence.

    A row's nodes are its last new tokens, up to 32, parents before children. Bit j in a token's word is set if node j
    is an ancestor of the token, which then sees it. Regardless of the bits, a token sees itself, no later token, and
    all tokens in its row before the nodes. If all words in a row are -1 (all bits set), it has no tree. A window shows
    the last `window` visible tokens: it compares the nodes' depths, not their order in the pool. `rope` must have the
    angles for each node's depth."""
    ahead: Int32[Array, "T"] | None = None
    """Number of later tokens in its row and in this step that each token sees; None for none. A window does not hide
    them."""

    def kind(self, options: AttentionOptions) -> KVKind:
        """Return the vectors that these inputs store for a token: heads, or latents if `options` has a rank."""
        _, num_heads, size = self.k.shape
        return Heads(num_heads, size) if options.rank is None else Latents(options.rank, size - options.rank)

    def vectors(self) -> Float[Array, "T *token"]:
        """Return the vectors to store per new token: keys and values interleaved, `[2K, H]`, or a latent, `[W]`."""
        if self.v is None:
            return self.k[:, 0]
        T, K, H = self.k.shape
        return jnp.stack([self.k, self.v], axis=2).reshape(T, 2 * K, H)

    def rotated(self, *, last_only: bool = False) -> AttentionInputs:
        """Return the inputs with RoPE applied to queries and keys (float32), and without `rope`.

        With `last_only`, there are queries only for the last tokens.
        """
        if (rope := self.rope) is None:
            return self
        q_rope = rope.at[:, self.rows.last_tokens()[1]].get(mode="clip") if last_only else rope
        return self._replace(q=apply_rope(self.q, q_rope), k=apply_rope(self.k, rope), rope=None)

    def with_all_queries(self) -> AttentionInputs:
        """Return the inputs with the last tokens' queries at their indices, and any of them for the other tokens."""
        index = next_index(self.rows.last_tokens()[1], self.k.shape[0])
        return self._replace(q=self.q.at[index].get(mode="clip"))

    def last_outputs(self, out: Float[Array, "T Q V"]) -> Float[Array, "R Q V"]:
        """Return the outputs of the rows' last tokens."""
        return out.at[self.rows.last_tokens()[1]].get(mode="fill", fill_value=0)


class HeadTerms(NamedTuple):
    """Low-rank terms of `HeadMatrices` that depend on the row, as LoRA adapters have.

    A row with adapter s expands all its latents by the matrices plus `b[s] @ a[s]`, of rank k.
    """

    is_own: Bool[Array, "N S"]
    """Mask of each query's adapter, the same for all of a row; all False for a query without terms."""
    a: Float[Array, "S k r"]
    b: Float[Array, "S k Q rows"]
    """Rows by head: n for keys, then v for values."""

    def absorbed(self, nope: Float[Array, "N Q n"]) -> Float[Array, "N Q r"]:
        """Return the terms of absorbed queries."""
        inner = _exact("tqn,skqn->tskq", nope, self.b[..., : nope.shape[-1]])
        return _exact("tskq,skr->tqr", self._own(inner), self.a)

    def values(self, out: Float[Array, "N Q r"], num_values: int) -> Float[Array, "N Q v"]:
        """Return the terms of per-head outputs."""
        inner = _exact("tqr,skr->tskq", out, self.a)
        return _exact("tskq,skqv->tqv", self._own(inner), self.b[..., -num_values:])

    def added(
        self,
        keys: Float32[Array, "Q B n"],
        values: Float32[Array, "Q B v"],
        latents: Float32[Array, "B r"],
        query: Int32[Array, ""],
    ) -> tuple[Float32[Array, "Q B n"], Float32[Array, "Q B v"]]:
        """Return a row's expanded keys and values with their terms, unchanged for a row without terms.

        Args:
            keys: keys expanded by the matrices.
            values: values expanded by the matrices.
            latents: first r elements of the latents.
            query: index of one of the row's queries.
        """
        is_own = self.is_own[query]

        def add() -> tuple[Float32[Array, "Q B n"], Float32[Array, "Q B v"]]:
            a, b = (factor[jnp.argmax(is_own)] for factor in (self.a, self.b))
            terms = _exact("bk,kqn->qbn", _exact("br,kr->bk", latents, a), b)
            return keys + terms[..., : keys.shape[-1]], values + terms[..., keys.shape[-1] :]

        return lax.cond(jnp.any(is_own), add, lambda: (keys, values))

    def _own(self, inner: Float[Array, "N S k Q"]) -> Float[Array, "N S k Q"]:
        return jnp.where(self.is_own[:, :, None, None], inner, 0)


class HeadMatrices(NamedTuple):
    """Per-head matrices by which MLA expands a latent's first r elements to keys and values."""

    to_keys: Float[Array, "Q n r"]
    """For the n elements of a key that RoPE does not rotate."""
    to_values: Float[Array, "Q v r"]
    terms: HeadTerms | None = None
    """Terms of the call's queries; None without any."""

    def for_queries(self, start: Int32[Array, ""] | int, size: int) -> HeadMatrices:
        """Return the matrices for some of the call's queries."""
        if self.terms is None:
            return self
        is_own = lax.dynamic_slice_in_dim(self.terms.is_own, start, size)
        return self._replace(terms=self.terms._replace(is_own=is_own))

    def absorb(self, q: Float[Array, "T Q H"]) -> Float[Array, "T Q W"]:
        """Convert per-head queries, n elements and the rotated ones, to queries whose keys are latents: the first n
        elements are multiplied by `to_keys`.
        """
        nope_dim = self.to_keys.shape[1]
        nope = _per_head("tqn,qnr->tqr", q[..., :nope_dim], self.to_keys)
        if self.terms is not None:
            nope += self.terms.absorbed(q[..., :nope_dim]).astype(nope.dtype)
        return jnp.concatenate([nope, q[..., nope_dim:]], axis=-1)

    def values(self, out: Float[Array, "T Q rank"]) -> Float[Array, "T Q v"]:
        """Convert attention outputs over latents, the weighted sums of their first r elements, to per-head outputs."""
        values = _per_head("tqr,qvr->tqv", out, self.to_values)
        if self.terms is None:
            return values
        return values + self.terms.values(out, values.shape[-1]).astype(values.dtype)


class MLAInputs(NamedTuple):
    """Array arguments for `mla_attention`, except the pool: a step's new queries, latents, and rows.

    Fields without a text are as in `AttentionInputs`.
    """

    q: Float[Array, "N Q H"]
    """Per-head queries: n elements without position, and d that RoPE rotates. N is T, or R with `last_only`."""
    latents: Float[Array, "T W"]
    """New latents, cast or quantised to the pool dtype."""
    matrices: HeadMatrices
    rows: RaggedRows
    rope: Float32[Array, "2 T half"] | None = None
    tree_mask: Int32[Array, "T"] | None = None

    def absorbed(self, q: Float[Array, "N Q W"]) -> AttentionInputs:
        """Return these inputs as `AttentionInputs` with latents as keys, for queries from `HeadMatrices.absorb`."""
        return AttentionInputs(q, self.latents[:, None], None, self.rows, self.rope, tree_mask=self.tree_mask)

    def rotated_q(self) -> Float[Array, "T Q H"]:
        """Return the per-head queries after RoPE on their last elements."""
        return self.q if self.rope is None else apply_rope(self.q, self.rope)


@dataclass(frozen=True)
class Problem:
    """Static parameters by which a backend decides if it can run a call.

    Attributes:
        kind: vectors that the pool stores for a token.
        num_query_heads: number of query heads, Q.
        page_size: tokens per page, P.
        kv_dtype: pool dtype.
        platform: platform to compile for, "cpu", "gpu" or "tpu".
    """

    kind: KVKind
    num_query_heads: int
    page_size: int
    kv_dtype: jnp.dtype
    platform: str


class Backend(ABC):
    """Implementation of attention, with its layout of the pool.

    Attributes:
        layout: layout of its pools.
        splits_pages: True if `write_and_attend` takes a pool that was made for larger heads without a reshape, which
            XLA would perform as a copy.
        gathers_table: True if it reads pages faster from a page table ordered like the step's rows.
        expands_latents: True if rows with many new tokens should attend to keys and values expanded from latents; see
            `expanded`.
    """

    layout: ClassVar[type[Layout]]
    splits_pages: ClassVar[bool] = False
    gathers_table: ClassVar[bool] = False
    expands_latents: ClassVar[bool] = False

    @staticmethod
    def zeros(shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """Return a new pool array."""
        return jnp.zeros(shape, dtype)

    @abstractmethod
    def unsupported_reason(self, problem: Problem) -> str | None:
        """Return why this backend cannot run a problem, or None if it can."""

    @abstractmethod
    def write_and_attend(
        self, inputs: AttentionInputs, kv_pages: Pages, layer: int | Int32[Array, ""], options: AttentionOptions
    ) -> tuple[Float[Array, "N Q V"], Pages]:
        """Write all rows' new vectors to the pool, and only then attend with all rows.

        Rows may share pages that one of them writes in this call.

        Args:
            inputs: the step's tokens and rows; no row has `pages_to_read`.
            kv_pages: pool; donated.
            layer: layer in the pool.
            options: static options.

        Returns:
            All queries' outputs in the dtype of `q`, and the updated pool.
        """


def _exact(equation: str, *operands: Float[Array, "..."]) -> Float32[Array, "..."]:
    """Return an einsum in float32."""
    floats = [x.astype(jnp.float32) for x in operands]
    result: Array = jnp.einsum(equation, *floats, precision=lax.Precision.HIGHEST)
    return result


def _per_head(equation: str, x: Float[Array, "T Q a"], matrices: Float[Array, "Q b c"]) -> Float[Array, "T Q d"]:
    """Multiply each head of x by its own matrix, as the einsum `equation` specifies; exactly if x is float32."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(equation, x, matrices.astype(x.dtype), precision=precision)
