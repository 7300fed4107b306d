"""Cases of the operation, shared by tests, benchmarks, tuning and deviceless compilation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Int32

from jaxserve.pallas_kernels.ragged_paged_attention.interface import AttentionInputs, AttentionOptions
from jaxserve.pallas_kernels.ragged_paged_attention.kinds import Heads, KVKind, Latents
from jaxserve.pallas_kernels.ragged_paged_attention.quantized import QUANTIZED, Pages, pool_dtype
from jaxserve.pallas_kernels.ragged_paged_attention.rows import RaggedRows
from tests.kernels import attention_reference

STEPS = {
    "float32": 2**-23,
    "float16": 2**-10,
    "bfloat16": 2**-7,
    "int8": 1 / 127,
    "float8_e4m3fn": 32 / 448,
    "int4": 2 / 15,  # step of a vector whose extremes are alike on either side of zero
}
"""Relative distance of neighbouring values of a dtype; of quantised values relative to the vector's largest element."""


class Arguments(NamedTuple):
    """Arrays of one call; `kv_pages` in the canonical layout."""

    inputs: AttentionInputs
    kv_pages: Pages
    layer: int | Int32[Array, ""]

    def changed(self, **changes: Any) -> Arguments:
        """Return the arguments with some fields replaced, those of the inputs and of their rows included."""
        rows = self.inputs.rows._replace(**_popped(changes, RaggedRows._fields))
        inputs = self.inputs._replace(rows=rows, **_popped(changes, AttentionInputs._fields))
        return self._replace(**{"inputs": inputs, **changes})


def _popped(changes: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: changes.pop(name) for name in names if name in changes}


@dataclass(frozen=True)
class Case:
    """One call: lengths of its rows, sizes of the model, and content of the padding.

    Random pages hold the past of each row; every position that no live row sees holds `stale`, so that a leak shows.
    """

    name: str
    q_lens: tuple[int, ...]
    """New tokens of each live row."""
    kv_lens: tuple[int, ...]
    """Tokens of each live row after the step."""
    num_query_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    page_size: int = 16
    num_layers: int = 2
    layer: int = 1
    padding_rows: int = 0
    padding_tokens: int = 0
    shared_pages: int = 0
    """Leading pages that all rows share. Their tokens must all be past ones, except that the first row may write them
    in this step."""
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    has_rope: bool = False
    tree: Literal["chain", "binary", "random"] | None = None
    """Shape of the trees of rows that have up to 32 new tokens, or of all rows if random; None for no tree mask."""
    rank: int | None = None
    """Leading elements of a key that are its value, for latents; None for keys and values of heads."""
    dtype: str = "float32"
    kv_dtype: str = "float32"
    stale: float = 1e4
    last_only: bool = False
    """True if only each row's last new token attends."""

    @property
    def options(self) -> AttentionOptions:
        """Static options of the call."""
        scale = float(self.head_dim**-0.5)
        return AttentionOptions(scale, self.window, self.soft_cap, self.rank, last_only=self.last_only)

    @property
    def kind(self) -> KVKind:
        """Vectors that the pool stores for a token."""
        if self.rank is None:
            return Heads(self.num_kv_heads, self.head_dim)
        return Latents(self.rank, self.head_dim - self.rank)

    @property
    def pool_tolerance(self) -> float:
        """Largest `pool_error` allowed: rotated keys may round to the neighbouring value, all others must be exact."""
        if not self.has_rope:
            return 0.0
        rounding = 1.02 if self.kv_dtype == "int4" else 1.01 if self.kv_dtype in QUANTIZED else 1  # rounding of scales
        return STEPS[self.kv_dtype] * rounding

    @property
    def num_tokens(self) -> int:
        """Tokens of the step, padding included."""
        return sum(self.q_lens) + self.padding_tokens

    @property
    def num_live(self) -> int:
        """Queries that are not padding."""
        return sum(q_len > 0 for q_len in self.q_lens) if self.last_only else sum(self.q_lens)

    @property
    def pages_per_row(self) -> tuple[int, ...]:
        """Pages that each row occupies."""
        return tuple(-(-kv_len // self.page_size) for kv_len in self.kv_lens)

    @property
    def num_pages(self) -> int:
        """Pages of the pool: those in use and a few that no row refers to."""
        own = sum(max(0, pages - self.shared_pages) for pages in self.pages_per_row)
        return self.shared_pages + own + 3

    def arguments(self, seed: int = 0) -> Arguments:
        """Return random arguments, the same for the same seed."""
        rng = np.random.default_rng(seed)
        T, Q, K, H = self.num_tokens, self.num_query_heads, self.num_kv_heads, self.head_dim
        page_table = self._page_table(rng)
        sinks = rng.normal(size=Q) if self.has_sinks else None
        q, k, v = (rng.normal(size=(T, heads, H)) for heads in (Q, K, K))
        kv_pages = self._stored(self._pool(rng, page_table))
        rows = RaggedRows(
            kv_lens=self._pad_rows(rng, np.array(self.kv_lens)),
            page_table=_array(page_table, jnp.int32),
            cu_q_lens=self._pad_rows(rng, np.concatenate([[0], np.cumsum(self.q_lens)])),
            num_rows=_array(len(self.q_lens), jnp.int32),
        )
        if self.last_only:  # padding queries are any others
            last = [end - 1 for q_len, end in zip(self.q_lens, np.cumsum(self.q_lens), strict=True) if q_len]
            q = q[np.resize(last, rows.kv_lens.size)]
        inputs = AttentionInputs(
            _array(q, self.dtype),
            _array(k, self.dtype),
            _array(v, self.dtype) if self.rank is None else None,
            rows,
            rope=_array(self._rope(rng), jnp.float32) if self.has_rope else None,
            sinks=None if sinks is None else _array(sinks, jnp.float32),
            tree_mask=_array(self._tree_mask(rng), jnp.int32) if self.tree else None,
        )
        return Arguments(inputs, kv_pages, self.layer)

    def _tree_mask(self, rng: np.random.Generator) -> np.ndarray:
        """Return words of ancestors, with random bits from a token's own on; garbage for padding tokens."""
        mask = rng.integers(-(2**31), 2**31, size=self.num_tokens)
        for q_len, end in zip(self.q_lens, np.cumsum(self.q_lens), strict=True):
            num_nodes = min(q_len, 32)
            if q_len > num_nodes and self.tree != "random":
                mask[end - q_len : end] = -1
                continue
            parents = {
                "chain": np.arange(num_nodes) - 1,
                "binary": (np.arange(num_nodes) - 1) // 2,
                "random": rng.integers(-1, np.arange(num_nodes)),
            }
            words = ancestors(parents[self.tree or ""])
            later = -1 << np.arange(num_nodes)
            mask[end - num_nodes : end] = words | (mask[end - num_nodes : end] & later)
        return mask

    def _rope(self, rng: np.random.Generator) -> np.ndarray:
        """Return cosines and sines of every live token's angles, `[2, T, half]`; garbage for padding tokens."""
        past = zip(self.q_lens, self.kv_lens, strict=True)
        positions = [position for q_len, kv_len in past for position in range(kv_len - q_len, kv_len)]
        half = self.kind.rope_dim // 2
        frequencies = 1e4 ** -np.linspace(0, 1, half, endpoint=False)
        angles = np.outer(positions, frequencies)
        garbage = rng.normal(0, 100, size=(2, self.padding_tokens, half))
        return np.concatenate([[np.cos(angles), np.sin(angles)], garbage], axis=1)

    def _page_table(self, rng: np.random.Generator) -> np.ndarray:
        """Return shuffled pages for live rows, and ids in and out of range everywhere else."""
        ids = list(rng.permutation(self.num_pages))
        shared = [ids.pop() for _ in range(self.shared_pages)]
        shape = (len(self.q_lens) + self.padding_rows, max(self.pages_per_row, default=0) + 2)
        table = rng.integers(-self.num_pages, 2 * self.num_pages, size=shape)
        for row_id, num_pages in enumerate(self.pages_per_row):
            pages = (shared + [ids.pop() for _ in range(num_pages - len(shared))])[:num_pages]
            table[row_id, :num_pages] = pages
        return table

    def _pool(self, rng: np.random.Generator, page_table: np.ndarray) -> np.ndarray:
        """Return random pages, with `stale` past the end of each row and in pages of no row."""
        page_shape = (self.num_layers, self.num_pages, self.page_size, *self.kind.token_shape)
        pool = rng.normal(size=page_shape)
        is_seen = np.zeros((self.num_pages, self.page_size), bool)
        for row_id, kv_len in enumerate(self.kv_lens):
            positions = np.arange(kv_len)
            is_seen[page_table[row_id, positions // self.page_size], positions % self.page_size] = True
        pool[:, ~is_seen] = self.stale
        return pool

    def _stored(self, pool: np.ndarray) -> Pages:
        """Return the pool in its dtype; stale elements of a quantised pool have stale scales."""
        return jax.device_put(attention_reference.encode(pool.astype(np.float32), jnp.dtype(self.kv_dtype)))

    def _pad_rows(self, rng: np.random.Generator, values: np.ndarray) -> Int32[Array, "n"]:
        garbage = rng.integers(-100, 100, size=self.padding_rows)
        return _array(np.concatenate([values, garbage]), jnp.int32)


def _array(x: np.ndarray | int, dtype: DTypeLike) -> Array:
    """Return an array on the device, converted on the host: XLA would compile a program for each shape."""
    return jax.device_put(np.asarray(x, dtype))


def ancestors(parents: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return a word per node that has the bits of its ancestors; roots have a parent below zero."""
    words = np.zeros(len(parents), np.int64)
    for node, parent in enumerate(parents):
        words[node] = words[parent] | 1 << parent if parent >= 0 else 0
    return words


def pool_error(found: Pages, expected: Pages, num_rotated: int = 0) -> float:
    """Return the largest relative error in a pool in the canonical layout; infinite if stale infinities or NaN changed.

    Errors of a quantised pool are relative to the largest element of their vector, other errors to the element itself,
    or to the larger one of a pair: each is a difference of products of both, which may nearly cancel. Vectors of an
    int4 pool are compared as they are stored, rotated.

    Args:
      found: pool to check.
      expected: right pool.
      num_rotated: last elements of each vector that are pairs, one in each half.
    """
    (numbers, stale), (right, right_stale) = (_numbers(kv_pages) for kv_pages in (found, expected))
    if not np.array_equal(stale, right_stale, equal_nan=True):
        return float("inf")
    sizes = np.abs(right)
    if pool_dtype(expected).name in QUANTIZED:
        sizes = sizes.max(axis=-1, keepdims=True)
    elif num_rotated:
        pairs = sizes[..., -num_rotated:]
        sizes = np.concatenate(
            [sizes[..., :-num_rotated], np.maximum(pairs, np.roll(pairs, num_rotated // 2, axis=-1))], axis=-1
        )
    return float(np.max(np.abs(numbers - right) / np.maximum(sizes, 1e-6), initial=0))


def _numbers(kv_pages: Pages) -> tuple[np.ndarray, np.ndarray]:
    """Return the finite elements of the pages in float32, then the others, each with zeros for the rest."""
    x = attention_reference.decode(jax.tree.map(np.asarray, kv_pages))
    finite = np.isfinite(x)
    return np.where(finite, x, 0), np.where(finite, 0, x)


_NAN = float("nan")
_RAGGED = ((1, 7, 1, 20, 1), (50, 7, 1, 61, 16))
_EMPTY_TOO = ((9, 0, 1, 20, 0, 1, 3), (9, 5, 50, 61, 12, 16, 130))
_SHARING = ((1,) * 9 + (7, 1, 20, 1), (129, 130, 191, 192, 193, 144, 160, 200, 140, 150, 135, 170, 131))

_WRITTEN_NOW = ((150, *(1,) * 9, 7, 20), (150, 129, 130, 191, 192, 193, 144, 160, 200, 140, 150, 170))

_TREES = (32, 1, 33, 150, 5, 2), (77, 90, 33, 210, 300, 2)
_SHARED_TREES = ((3,) * 9 + (7, 1, 20, 32), tuple(kv_len + 40 for kv_len in _SHARING[1]))

_QUANTIZED = tuple(
    replace(case, name=f"{dtype}_{case.name}", kv_dtype=dtype)
    for dtype in QUANTIZED
    for case in (
        Case("ragged", *_RAGGED, padding_rows=2, padding_tokens=3),
        Case("pages_of_8_rope", *_RAGGED, num_query_heads=9, num_kv_heads=3, page_size=8, has_rope=True),
        Case("shared_prefix_window_sinks", *_SHARING, shared_pages=8, window=100, has_sinks=True),
        Case("shared_prefix_written_now", *_WRITTEN_NOW, shared_pages=8, has_rope=True),
        Case("stale_nan", *_RAGGED, num_query_heads=8, head_dim=64, stale=float("nan")),
    )
)

CASES: tuple[Case, ...] = (
    Case("one_row_of_one_token", (1,), (1,)),
    Case("one_row_decoding", (1,), (40,)),
    Case("all_decode_ragged", (1,) * 6, (1, 15, 16, 17, 100, 130)),
    Case("decode_more_rows_than_a_group", (1,) * 21, tuple(range(1, 85, 4))),
    Case("rows_without_tokens", (1, 0, 3, 0), (9, 0, 5, 12)),
    Case("one_whole_prompt", (70,), (70,)),
    Case("one_long_chunk_after_context", (96,), (300,)),
    Case("two_prompts_of_many_tiles", (150, 90), (150, 220)),
    Case("mixed", *_RAGGED),
    Case("lengths_at_page_edges", (1, 1, 1, 16, 17, 15), (16, 17, 32, 32, 33, 31)),
    Case("padding_rows", *_RAGGED, padding_rows=3),
    Case("padding_tokens", *_RAGGED, padding_tokens=6),
    Case("padding_rows_and_tokens", *_RAGGED, padding_rows=4, padding_tokens=10),
    Case("no_live_rows", (), (), padding_rows=2, padding_tokens=4),
    Case("shared_prefix", (1, 5, 1, 9), (40, 41, 64, 45), shared_pages=2),
    Case("many_rows_share_a_prefix", *_SHARING, shared_pages=8),
    Case("many_rows_share_a_prefix_of_wide_heads", *_SHARING, shared_pages=8, num_query_heads=6, head_dim=128),
    Case("shared_prefix_sinks_soft_cap", *_SHARING, shared_pages=8, has_sinks=True, soft_cap=5.0),
    Case("shared_prefix_window", *_SHARING, shared_pages=8, window=100),
    Case("shared_prefix_written_now", *_WRITTEN_NOW, shared_pages=8),
    Case("shared_token_written_now", (1, 1, 1, 9, 1), (32, 33, 40, 45, 64), shared_pages=2),
    Case("window_inside_a_page", *_RAGGED, window=5),
    Case("window_of_one_token", *_RAGGED, window=1),
    Case("window_across_pages", (1, 90, 1, 1), (200, 210, 3, 17), window=40),
    Case("window_wider_than_rows", *_RAGGED, window=1000),
    Case("soft_cap", *_RAGGED, soft_cap=5.0),
    Case("sinks", *_RAGGED, has_sinks=True, padding_tokens=3),
    Case("sinks_window_soft_cap", *_RAGGED, has_sinks=True, window=20, soft_cap=10.0),
    Case("stale_infinity", *_RAGGED, stale=float("inf")),
    Case("stale_nan_window", *_RAGGED, stale=float("nan"), window=9),
    Case("one_head", *_RAGGED, num_query_heads=1, num_kv_heads=1),
    Case("no_groups", *_RAGGED, num_query_heads=4, num_kv_heads=4),
    Case("group_of_3", *_RAGGED, num_query_heads=9, num_kv_heads=3, head_dim=64),
    Case("group_of_4", *_RAGGED, num_query_heads=8, num_kv_heads=2, head_dim=64),
    Case("group_of_8", *_RAGGED, num_query_heads=8, num_kv_heads=1, head_dim=128),
    Case("head_dim_96", *_RAGGED, head_dim=96),
    Case("pages_of_8", *_RAGGED, page_size=8),
    Case("pages_of_32", *_RAGGED, page_size=32),
    Case("pages_of_256", *_RAGGED, page_size=256),
    Case("bfloat16_pool", *_RAGGED, kv_dtype="bfloat16"),
    Case("bfloat16", *_RAGGED, dtype="bfloat16", kv_dtype="bfloat16"),
    *_QUANTIZED,
    Case("rope", *_RAGGED, has_rope=True, padding_rows=4, padding_tokens=10),
    Case("rope_one_row_decoding", (1,), (40,), has_rope=True),
    Case("rope_all_decode_ragged", (1,) * 6, (1, 15, 16, 17, 100, 130), has_rope=True),
    Case("rope_two_prompts_of_many_tiles", (150, 90), (150, 220), has_rope=True),
    Case("rope_no_live_rows", (), (), has_rope=True, padding_rows=2, padding_tokens=4),
    Case("rope_shared_prefix", *_SHARING, has_rope=True, shared_pages=8),
    Case("rope_sinks_window_soft_cap", *_RAGGED, has_rope=True, has_sinks=True, window=20, soft_cap=10.0),
    Case("last_only", *_EMPTY_TOO, padding_rows=2, padding_tokens=5, has_rope=True, last_only=True),
    Case("last_only_window_sinks", *_RAGGED, window=20, has_sinks=True, stale=_NAN, last_only=True),
    Case("last_only_shared_prefix_written_now", *_WRITTEN_NOW, shared_pages=8, kv_dtype="int8", last_only=True),
    Case("tree_chain", *_RAGGED, tree="chain", padding_rows=2, padding_tokens=3),
    Case("tree_binary", (1, 31, 1, 70, 7), (300, 40, 1, 100, 7), tree="binary", has_rope=True),
    Case("tree_random", *_TREES, tree="random", padding_rows=2, padding_tokens=3),
    Case("tree_across_pages_of_8", *_TREES, tree="random", page_size=8, has_rope=True),
    Case("tree_sinks_soft_cap", *_RAGGED, tree="random", has_sinks=True, soft_cap=5.0),
    Case("tree_window", *_TREES, tree="random", window=40),
    Case("tree_window_inside", *_TREES, tree="random", window=3, has_sinks=True, stale=float("nan")),
    Case("tree_window_of_one_token", *_RAGGED, tree="binary", window=1),
    Case("tree_shared_prefix", *_SHARED_TREES, tree="random", shared_pages=8),
    Case("tree_int8", *_TREES, tree="random", page_size=32, kv_dtype="int8"),
    Case("tree_int4", *_TREES, tree="random", page_size=32, kv_dtype="int4", head_dim=64, has_rope=True),
    Case("int4_head_dim_128_soft_cap", *_SHARING, shared_pages=8, soft_cap=5.0, kv_dtype="int4", head_dim=128),
    Case("int4_head_dim_96_window", *_RAGGED, window=20, num_query_heads=6, head_dim=96, kv_dtype="int4"),
    Case("int4_head_dim_8", *_RAGGED, head_dim=8, page_size=4, kv_dtype="int4"),
    Case("rope_head_dim_12", *_RAGGED, has_rope=True, head_dim=12),
    Case("rope_head_dim_96", *_RAGGED, has_rope=True, head_dim=96),
    Case("rope_head_dim_128", *_RAGGED, has_rope=True, head_dim=128, num_query_heads=8, num_kv_heads=1),
    Case("rope_bfloat16_pool", *_RAGGED, has_rope=True, kv_dtype="bfloat16"),
    Case("rope_bfloat16", *_RAGGED, has_rope=True, dtype="bfloat16", kv_dtype="bfloat16"),
)

GPU_CASES: tuple[Case, ...] = (
    *(
        replace(case, dtype="bfloat16", kv_dtype="bfloat16" if case.kv_dtype == "float32" else case.kv_dtype)
        for case in CASES
        if case.name != "rope_head_dim_12" and case.kv_dtype != "int4"
    ),
    Case("float16", *_RAGGED, dtype="float16", kv_dtype="float16"),
    Case("head_dim_64", *_RAGGED, head_dim=64, dtype="bfloat16", kv_dtype="bfloat16"),
    Case("head_dim_256", *_RAGGED, head_dim=256, dtype="bfloat16", kv_dtype="bfloat16"),
    Case("group_of_5", *_RAGGED, num_query_heads=10, num_kv_heads=2, dtype="bfloat16", kv_dtype="bfloat16"),
    Case("group_of_16", *_RAGGED, num_query_heads=16, num_kv_heads=1, dtype="bfloat16", kv_dtype="bfloat16"),
    Case("pages_of_64", *_RAGGED, page_size=64, dtype="bfloat16", kv_dtype="bfloat16"),
    Case("pages_of_128", (1, 1, 90), (63, 200, 270), page_size=128, dtype="bfloat16", kv_dtype="bfloat16"),
    Case("head_dim_512", *_RAGGED, head_dim=512, has_rope=True, dtype="bfloat16", kv_dtype="bfloat16"),
    Case("head_dim_512_group_of_8", *_RAGGED, 8, 1, 512, 64, stale=_NAN, dtype="bfloat16", kv_dtype="bfloat16"),
    Case("parts_of_wide_heads", (1, 3, 1), (1500, 20, 1), 4, 2, 256, dtype="bfloat16", kv_dtype="bfloat16"),
    Case("parts_of_heads_of_512", (1, 3, 1), (700, 20, 1), 4, 2, 512, dtype="bfloat16", kv_dtype="bfloat16"),
    Case("int8_group_of_16", *_RAGGED, 16, 1, page_size=32, dtype="bfloat16", kv_dtype="int8"),
    Case("int8_pages_of_64", *_RAGGED, 14, 2, 96, 64, dtype="bfloat16", kv_dtype="int8"),
    Case("int8_tall_tiles", (1, 300, 1, 230), (70, 300, 17, 260), padding_tokens=9, dtype="bfloat16", kv_dtype="int8"),
    Case("fp8_pages_of_128", (1, 1, 90), (63, 200, 270), 16, 1, 128, 128, dtype="bfloat16", kv_dtype="float8_e4m3fn"),
    Case("fp8_float16_soft_cap", *_RAGGED, soft_cap=5.0, dtype="float16", kv_dtype="float8_e4m3fn"),
    Case("parts_of_many_workers", (1, 3, 1), (1500, 20, 1), 2, 1, dtype="bfloat16", kv_dtype="bfloat16"),
    Case("tall_tiles", (1, 300, 1, 230), (70, 300, 17, 260), dtype="bfloat16", kv_dtype="bfloat16", padding_tokens=9),
    Case(
        "tall_tiles_of_wide_groups_window",
        (200, 1, 320),
        (200, 170, 321),
        num_query_heads=9,
        num_kv_heads=1,
        window=70,
        dtype="bfloat16",
        kv_dtype="bfloat16",
    ),
)
"""Cases in half precision, as the GPU kernels take them, and cases that only those kernels distinguish."""


def widened(case: Case) -> Case:
    """Return the case with heads as wide as the TPU kernel takes them."""
    return replace(case, head_dim=max(case.head_dim, 64))


TPU_CASES: tuple[Case, ...] = (
    Case("head_dim_512", *_RAGGED, num_query_heads=8, num_kv_heads=1, head_dim=512, has_rope=True, stale=_NAN),
    Case(
        "int8_pages_of_256",
        (1, 20),
        (300, 270),
        page_size=256,
        window=200,
        has_sinks=True,
        kv_dtype="int8",
        stale=float("nan"),
    ),
    Case(
        "fp8_pages_of_32_rope",
        (1, 33, 1),
        (70, 50, 32),
        num_query_heads=9,
        num_kv_heads=3,
        page_size=32,
        padding_rows=1,
        padding_tokens=3,
        has_rope=True,
        kv_dtype="float8_e4m3fn",
        stale=float("nan"),
    ),
)
"""The largest heads, and quantised pools with the largest pages of the TPU kernel, of several slabs and of one."""
