"""Cases of attention to latents, with one KV head whose keys are the latents."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.kernels.attention_cases import Case


def _case(name: str, q_lens: tuple[int, ...], kv_lens: tuple[int, ...], rank: int = 32, **facts: Any) -> Case:
    sizes = {"num_query_heads": 4, "head_dim": 48, **facts}
    return Case(name, q_lens, kv_lens, num_kv_heads=1, rank=rank, **sizes)


_RAGGED = ((1, 7, 1, 20, 1), (50, 7, 1, 61, 16))
_SHARING = ((1,) * 9 + (7, 1, 20, 1), (129, 130, 191, 192, 193, 144, 160, 200, 140, 150, 135, 170, 131))
_WRITTEN_NOW = ((150, *(1,) * 9, 7, 20), (150, 129, 130, 191, 192, 193, 144, 160, 200, 140, 150, 170))
_NAN = float("nan")

CASES: tuple[Case, ...] = (
    _case("one_row_of_one_token", (1,), (1,)),
    _case("all_decode_ragged", (1,) * 6, (1, 15, 16, 17, 100, 130), has_rope=True),
    _case("two_prompts_of_many_tiles", (150, 90), (150, 220), has_rope=True, padding_rows=2, padding_tokens=9),
    _case("ragged", *_RAGGED, padding_rows=4, padding_tokens=10),
    _case("no_live_rows", (), (), padding_rows=2, padding_tokens=4),
    _case("shared_prefix", *_SHARING, has_rope=True, shared_pages=8),
    _case("shared_prefix_written_now", *_WRITTEN_NOW, has_rope=True, shared_pages=8),
    _case("stale_nan", *_RAGGED, has_rope=True, stale=_NAN),
    _case("one_head_without_rotation", *_RAGGED, num_query_heads=1, rank=48),
    _case(
        "pages_of_64_of_published_sizes", *_RAGGED, 512, num_query_heads=16, head_dim=576, page_size=64, has_rope=True
    ),
    _case("bfloat16", *_RAGGED, has_rope=True, dtype="bfloat16", kv_dtype="bfloat16"),
    _case("float8", *_RAGGED, page_size=32, has_rope=True, kv_dtype="float8_e4m3fn", stale=_NAN),
    _case("last_only", (9, 0, 1, 20), (9, 5, 50, 61), has_rope=True, padding_rows=2, padding_tokens=3, last_only=True),
    _case("tree", (32, 1, 33, 150, 5, 2), (77, 90, 33, 210, 300, 2), has_rope=True, tree="random", padding_tokens=3),
)


def halved(case: Case, head_dim: int, rank: int) -> Case:
    """Return the case with other latents, in half precision, as the GPU kernel takes them."""
    return replace(case, head_dim=head_dim, rank=rank, dtype="bfloat16", kv_dtype="bfloat16")


_HALF: dict[str, Any] = {"dtype": "bfloat16", "kv_dtype": "bfloat16"}
_MIXED = ((1, 3, 1, 20), (700, 20, 1, 90))

GPU_CASES: tuple[Case, ...] = (
    *(
        halved(case, 96 if case.rank < case.head_dim else 64, 64)
        for case in CASES
        if case.kv_dtype == "float32" and case.rank < 512
    ),
    _case("float16", *_RAGGED, 128, head_dim=192, has_rope=True, dtype="float16", kv_dtype="float16"),
    _case("rank_of_256", *_RAGGED, 256, num_query_heads=40, head_dim=288, has_rope=True, **_HALF),
    _case("published", *_MIXED, 512, num_query_heads=16, head_dim=576, page_size=64, has_rope=True, **_HALF),
    _case("published_20_heads", *_MIXED, 512, num_query_heads=20, head_dim=576, has_rope=True, stale=_NAN, **_HALF),
    _case("published_128_heads", (1, 2), (70, 200), 512, num_query_heads=128, head_dim=576, has_rope=True, **_HALF),
    _case(
        "published_tree",
        (5, 1, 33),
        (90, 70, 210),
        512,
        num_query_heads=12,
        head_dim=576,
        has_rope=True,
        tree="random",
        padding_tokens=3,
        **_HALF,
    ),
)
"""Cases in half precision, as the GPU kernel takes them, and cases of published sizes."""
