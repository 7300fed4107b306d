"""Attention over latents compiles for TPUs and H200s, in place, with the sizes of published models."""

import re

import jax
import jax.numpy as jnp
import pytest

from jaxserve.assembly.memory import tree_bytes
from jaxserve.pallas_kernels.deviceless import TPU7X, TPU_V5E, TPU_V6E
from jaxserve.pallas_kernels.ragged_paged_attention import (
    Latents,
    default_page_size,
    new_pages,
    ragged_paged_attention,
    select_backend,
)
from tests.kernels.attention_cases import Case
from tests.kernels.latent_cases import GPU_CASES

pytestmark = pytest.mark.deviceless

CHIPS = {"v5e": TPU_V5E, "v6e": TPU_V6E, "tpu7x": TPU7X}
DECODE = ((1,) * 64, (100,) * 64)
PREFILL = ((256,), (300,))


def published(name, lengths, num_query_heads, kv_dtype="bfloat16", **facts):
    """Return a case with latents of 576 elements, in pages of default size."""
    sizes = {"num_kv_heads": 1, "head_dim": 576, "rank": 512}
    sizes["page_size"] = default_page_size("mosaic_tpu", Latents(512, 64), kv_dtype)
    return Case(name, *lengths, num_query_heads, **sizes, dtype="bfloat16", kv_dtype=kv_dtype, **facts)


def shapes(case):
    """Return the shapes of a case's arguments, which NumPy makes."""
    return jax.eval_shape(lambda arguments: arguments, case.arguments())


PUBLISHED = [
    published("deepseek_over_8_decode", DECODE, 16, has_rope=True),
    published("deepseek_over_8_prefill", PREFILL, 16, has_rope=True),
    published("glm_flash_decode", DECODE, 20, has_rope=True),
    published("glm_flash_prefill", PREFILL, 20, has_rope=True),
]
OTHERS = [
    published("deepseek_over_4_drafts", ((1,) * 32 + (8,) * 8, (100,) * 40), 32, has_rope=True, tree="random"),
    published("deepseek_over_8_fp8", ((1,) * 32 + (100,), (200,) * 33), 16, "float8_e4m3fn", has_rope=True),
]


@pytest.mark.parametrize(
    ("chip", "case"),
    [
        *[(chip, PUBLISHED[0]) for chip in CHIPS],
        *[("v6e", case) for case in (PUBLISHED[3], *OTHERS)],
        *[pytest.param("v6e", case, marks=pytest.mark.full) for case in PUBLISHED[1:3]],
        *[
            pytest.param(chip, case, marks=pytest.mark.full)
            for chip in ("v5e", "tpu7x")
            for case in (*PUBLISHED[1:], *OTHERS)
        ],
    ],
    ids=lambda value: getattr(value, "name", value),
)
@pytest.mark.usefixtures("tpu")
def test_compiles_in_place(chip, case):
    inputs, *_ = shapes(case)
    pool = {"num_pages": 20_000, "page_size": case.page_size, "dtype": case.kv_dtype}
    # XLA moves pools and scales that fit the vector memory there, and back.
    kv_pages = jax.eval_shape(lambda: new_pages("mosaic_tpu", case.kind, num_layers=4, **pool))
    sizes = {"kind": case.kind, "num_query_heads": case.num_query_heads}
    with jax.sharding.use_abstract_mesh(CHIPS[chip].mesh()):
        assert select_backend(**sizes, page_size=case.page_size, kv_dtype=case.kv_dtype) == "mosaic_tpu"

    def attend(inputs, kv_pages, layer):
        return ragged_paged_attention(inputs, kv_pages, layer, case.options)

    args = (inputs, kv_pages, jax.ShapeDtypeStruct((), jnp.int32))
    compiled = CHIPS[chip].compile(attend, args, donate_argnums=(1,))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= tree_bytes(kv_pages)
    # The kernel keeps all else in its own memory: the bound covers queries and outputs in its layouts.
    assert memory.temp_size_in_bytes <= inputs.q.size * 4 + 2**21
    for x in jax.tree.leaves(kv_pages):
        shape = ",".join(map(str, x.shape))
        makers = re.findall(rf"= [a-z0-9]+\[{shape}\]\S* ([a-z-]+)\(", compiled.as_text())
        assert makers, "the pool is in the program"
        assert set(makers) <= {"parameter", "get-tuple-element", "custom-call", "bitcast"}
    cost = compiled.cost_analysis()
    keys = case.q_lens.count(1) * inputs.rows.page_table.shape[1] * case.page_size
    assert cost["bytes accessed"] >= keys * 576 * jnp.dtype(case.kv_dtype).itemsize
    assert cost["flops"] >= 2 * keys * case.num_query_heads * (576 + 512)


def _program(case):
    """Return what distinguishes the kernels of two cases, so that equal kernels are assembled once."""
    sizes = (case.num_query_heads, case.head_dim, case.rank, case.page_size, case.dtype)
    return min(case.num_tokens, 2), sizes, case.tree is None, case.has_rope


ON_GPU = list({_program(case): case for case in reversed(GPU_CASES)}.values())


def lower_for_h200(h200, case):
    inputs, kv_pages, _ = shapes(case)

    def attend(inputs, kv_pages, layer):
        return ragged_paged_attention(inputs, kv_pages, layer, case.options, backend="mosaic_gpu")

    pool = jax.ShapeDtypeStruct((4, 20_000, *kv_pages.shape[2:]), kv_pages.dtype)
    args = (inputs, pool, jax.ShapeDtypeStruct((), jnp.int32))
    return pool, h200.lower(attend, args, donate_argnums=(1,))


@pytest.mark.parametrize("cases", [ON_GPU[:6], ON_GPU[6:]], ids=lambda cases: f"{cases[0].name}_and_{len(cases) - 1}")
def test_compiles_for_h200_without_spills_in_place(h200, cases, capfd, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    pools, lowered = zip(*(lower_for_h200(h200, case) for case in cases), strict=True)
    programs = h200.compile_all(lowered)
    report = capfd.readouterr()
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report.out + report.err)
    assert len(spills) >= len(cases), "the assembler reported nothing of some"
    assert set(spills) == {("0", "0")}, [case.name for case in cases]
    for case, pool, program in zip(cases, pools, programs, strict=True):
        memory = program.memory_analysis()
        assert memory.alias_size_in_bytes >= tree_bytes(pool), case.name
        elements = shapes(case).inputs.q.size
        splits = 132 * 2 * 2 * 2 * 64 * (case.rank + 2) * 4  # two workers, two splits of each, two kinds of tiles
        assert memory.temp_size_in_bytes <= splits + 24 * elements + 2**21, case.name
        shape = ",".join(map(str, pool.shape))
        makers = re.findall(rf"= [a-z0-9]+\[{shape}\]\S* ([a-z-]+)\(", program.as_text())
        assert makers, "the pool is in the program"
        assert not {"copy", "copy-start", "transpose", "concatenate", "pad", "convert"} & set(makers)
