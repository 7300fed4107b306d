"""Attention for Hopper GPUs: every case compiles to machine code for an H200, in place and without spilling.

XLA's backend, which serves int4 pools there, compiles too.
"""

import re

import jax
import pytest

from jaxserve.pallas_kernels.ragged_paged_attention import (
    Heads,
    from_canonical,
    new_pages,
    ragged_paged_attention,
    select_backend,
)
from jaxserve.pallas_kernels.ragged_paged_attention.mosaic_gpu.tiling import MIN_TALL_TOKENS
from tests.kernels.attention_cases import GPU_CASES, Case

pytestmark = pytest.mark.deviceless

# Calls of serving beside the cases of tests: wide steps, which use tall tiles, of current models.
_MANY = ((*([1] * 40), 200, 300), (*range(500, 540), 1200, 300))
WIDE = [
    Case(
        f"group_of_{group}_head_dim_{H}_pages_of_{P}_of_{options.get('kv_dtype', dtype)}",
        *_MANY,
        group * K,
        K,
        H,
        P,
        **{"dtype": dtype, "kv_dtype": dtype, **options},
    )
    for group, K, H, P, dtype, options in [
        (4, 8, 128, 16, "bfloat16", {}),
        (8, 8, 128, 64, "bfloat16", {}),
        (1, 4, 64, 8, "float16", {"window": 100}),
        (3, 3, 64, 32, "bfloat16", {"soft_cap": 30.0, "has_sinks": True}),
        (7, 2, 96, 128, "bfloat16", {}),
        (16, 1, 128, 16, "bfloat16", {"window": 300, "has_sinks": True}),
        (2, 2, 256, 16, "bfloat16", {"window": 300, "soft_cap": 30.0, "has_sinks": True}),
        (8, 4, 512, 16, "bfloat16", {}),
        (8, 1, 512, 32, "float16", {"tree": "random", "window": 300, "soft_cap": 30.0, "has_sinks": True}),
        (4, 8, 128, 16, "bfloat16", {"kv_dtype": "float8_e4m3fn"}),
        (4, 8, 128, 64, "bfloat16", {"kv_dtype": "int8"}),
        (8, 3, 64, 8, "float16", {"kv_dtype": "float8_e4m3fn", "window": 300}),
        (16, 1, 128, 128, "bfloat16", {"kv_dtype": "int8", "soft_cap": 30.0, "has_sinks": True}),
        (7, 2, 96, 32, "bfloat16", {"kv_dtype": "float8_e4m3fn"}),
        (16, 1, 128, 8, "bfloat16", {"kv_dtype": "int8", "window": 300, "soft_cap": 30.0, "has_sinks": True}),
        (4, 8, 128, 16, "bfloat16", {"tree": "random"}),
        (2, 2, 256, 16, "bfloat16", {"tree": "random", "window": 300, "soft_cap": 30.0, "has_sinks": True}),
        (16, 1, 128, 8, "bfloat16", {"tree": "random", "kv_dtype": "int8", "window": 300, "soft_cap": 30.0}),
    ]
]


def _program(case):
    """Return what distinguishes the kernels of two cases, so that equal kernels are assembled once.

    The numbers of tokens, rows and pages do not, except for one token, which needs no search for its row, and for many
    tokens, which have tall tiles too.
    """
    sizes = (case.num_query_heads, case.num_kv_heads, case.head_dim, case.page_size, case.dtype, case.kv_dtype)
    options = (case.window is None, case.soft_cap, case.has_sinks, case.tree is None, case.has_rope)
    return min(case.num_tokens, 2), case.num_tokens >= MIN_TALL_TOKENS, sizes, options


DISTINCT = list({_program(case): case for case in reversed([*GPU_CASES, *WIDE])}.values())
BATCHES = [DISTINCT[start : start + 8] for start in range(0, len(DISTINCT), 8)]  # assembled in parallel


def lower(chip, case):
    inputs, kv_pages, layer = case.arguments()

    def attend(inputs, kv_pages):
        return ragged_paged_attention(inputs, kv_pages, layer, case.options, backend="mosaic_gpu")

    return chip.lower(attend, (inputs, from_canonical("mosaic_gpu", kv_pages)), donate_argnums=(1,))


def check_memory(case, memory):
    inputs, kv_pages, _ = case.arguments()
    pool_bytes = sum(x.nbytes for x in jax.tree.leaves(from_canonical("mosaic_gpu", kv_pages)))
    assert memory.alias_size_in_bytes >= pool_bytes, case.name
    parts = 2 * 2 * 132 * 2 * 128 * (case.head_dim + 2) * 4  # two kinds of tiles, two splits per worker
    assert memory.temp_size_in_bytes <= parts + 4 * inputs.q.nbytes * 2 + 2**20, case.name


@pytest.mark.parametrize("cases", BATCHES, ids=lambda cases: f"{cases[0].name}_and_{len(cases) - 1}_more")
def test_compile_without_spills_in_place(h200, cases, capfd, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    programs = h200.compile_all([lower(h200, case) for case in cases])
    report = capfd.readouterr()
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report.out + report.err)
    # One may be missing: programs of two cases share a kernel, and one assembled before is not reported again.
    assert len(spills) >= len(cases) - 1, "the assembler reported nothing of some"
    assert set(spills) == {("0", "0")}, [case.name for case in cases]
    for case, program in zip(cases, programs, strict=True):
        check_memory(case, program.memory_analysis())


def test_xla_serves_int4_pools_in_place(h200):
    case = Case("int4", *_MANY, 32, 8, 128, dtype="bfloat16", kv_dtype="int4", has_rope=True)
    heads, sizes = Heads(8, 128), {"page_size": 16}
    assert select_backend(kind=heads, num_query_heads=32, **sizes, kv_dtype="int4", platform="gpu") == "xla"
    inputs = jax.eval_shape(case.arguments).inputs
    pool = jax.eval_shape(lambda: new_pages("xla", heads, num_layers=2, num_pages=20_000, **sizes, dtype="int4"))

    def attend(inputs, kv_pages, layer):
        return ragged_paged_attention(inputs, kv_pages, layer, case.options, backend="xla")

    args = (inputs, pool, jax.ShapeDtypeStruct((), "int32"))
    memory = h200.compile(attend, args, donate_argnums=(1,)).memory_analysis()
    assert memory.alias_size_in_bytes >= pool.size == 2 * 20_000 * 16 * 16 * 72
    assert memory.temp_size_in_bytes < pool.size / 8
