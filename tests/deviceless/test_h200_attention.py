"""Every case of the attention of Hopper GPUs becomes machine code for an H200, in place and without spilling."""

import re

import jax
import pytest

from pallas_kernels.ragged_paged_attention import from_canonical, ragged_paged_attention
from pallas_kernels.ragged_paged_attention.cases import GPU_CASES, Case
from pallas_kernels.ragged_paged_attention.quantized import values_of

# What serving compiles beside the cases of tests: wide steps, where tall tiles take part, of models in use.
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
        (4, 8, 128, 16, "bfloat16", {"kv_dtype": "float8_e4m3fn"}),
        (4, 8, 128, 64, "bfloat16", {"kv_dtype": "int8"}),
        (8, 3, 64, 8, "float16", {"kv_dtype": "float8_e4m3fn", "window": 300}),
        (16, 1, 128, 128, "bfloat16", {"kv_dtype": "int8", "soft_cap": 30.0, "has_sinks": True}),
        (7, 2, 96, 32, "bfloat16", {"kv_dtype": "float8_e4m3fn"}),
        (16, 1, 128, 8, "bfloat16", {"kv_dtype": "int8", "window": 300, "soft_cap": 30.0, "has_sinks": True}),
    ]
]


def _program(case):
    """What distinguishes the kernels of two cases: one that was assembled before is not assembled again."""
    inputs = case.inputs()
    shapes = tuple(x.shape for x in (inputs.q, values_of(inputs.kv_pages), inputs.kv_lens, inputs.page_table))
    return shapes, case.dtype, case.kv_dtype, case.window, case.soft_cap, case.has_sinks, case.tree_words


DISTINCT = {_program(case): case for case in reversed([*GPU_CASES, *WIDE])}.values()


@pytest.mark.parametrize("case", DISTINCT, ids=lambda case: case.name)
def test_compiles_without_spills_in_place(h200, case, capfd, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    inputs = case.inputs()

    def attend(q, k, v, kv_pages, arrays):
        return ragged_paged_attention(q, k, v, kv_pages, case.layer, **arrays, backend="mosaic_gpu", **case.options)

    names = ("kv_lens", "page_table", "cu_q_lens", "num_rows", "sinks", "rope", "tree_mask")
    kv_pages = from_canonical("mosaic_gpu", inputs.kv_pages)
    args = (inputs.q, inputs.k, inputs.v, kv_pages, {name: getattr(inputs, name) for name in names})
    compiled = h200.compile(attend, args, donate_argnums=(3,))
    report = capfd.readouterr()
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report.out + report.err)
    assert spills, "the assembler reported nothing"
    assert set(spills) == {("0", "0")}
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(x.nbytes for x in jax.tree.leaves(kv_pages))
    parts = 2 * 2 * 132 * 2 * 128 * (case.head_dim + 2) * 4  # two kinds of tiles, two parts a worker
    assert memory.temp_size_in_bytes <= parts + 4 * inputs.q.nbytes * 2 + 2**20
