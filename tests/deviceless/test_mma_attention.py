"""Attention by warp-level matrix instructions compiles for each generation of GPUs, in place and without spilling.

A100 stands for compute capability 8.0, L40S for L4 and RTX 4090 (8.9), RTX 5090 for RTX PRO 6000 (12.0): chips of one
capability differ in the number of multiprocessors alone, which is the size of the grid.
"""

import json
import re

import jax
import jax.numpy as jnp
import pytest

from jaxserve.execution.step import step_options
from jaxserve.pallas_kernels import deviceless
from jaxserve.pallas_kernels.ragged_paged_attention import from_canonical, ragged_paged_attention
from jaxserve.scheduling.schedule_config import ScheduleConfig
from tests.deviceless.test_h200_step import DEFAULT_MODEL, check, lower_step
from tests.deviceless.thunks import dump_options, thunks_of_step
from tests.kernels.attention_cases import Case

pytestmark = [
    pytest.mark.deviceless,
    pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="Pallas has mma from jax 0.12 on"),
]

CHIPS = {chip.capability: chip for chip in (deviceless.A100, deviceless.L40S, deviceless.RTX_5090, deviceless.B200)}
OTHERS = ("8.0", "10.0")  # these have the instructions of 8.9 and 12.0, and more shared memory
_MANY = ((*([1] * 40), 200, 300), (*range(500, 540), 1200, 300))
ALL = {"window": 300, "soft_cap": 30.0, "has_sinks": True}
CASES = [
    Case(
        f"group_of_{group}_head_dim_{H}_pages_of_{P}",
        *_MANY,
        group * K,
        K,
        H,
        P,
        kv_dtype=dtype,
        dtype=dtype,
        **options,
    )
    for group, K, H, P, dtype, options in [
        (4, 8, 128, 16, "bfloat16", {}),
        (8, 1, 128, 64, "bfloat16", {"tree": "random", **ALL}),
        (7, 2, 64, 8, "float16", {"window": 100}),
        (3, 3, 96, 32, "bfloat16", ALL),
        (2, 2, 256, 128, "bfloat16", {"tree": "random", **ALL}),
    ]
]


@pytest.fixture(
    scope="module",
    params=[pytest.param(capability, marks=pytest.mark.full if capability in OTHERS else []) for capability in CHIPS],
    ids="sm_{}".format,
)
def chip(request):
    chip = CHIPS[request.param]
    if (reason := chip.unavailable()) is not None:
        pytest.skip(reason)
    return chip


def lower(chip, case):
    inputs, kv_pages, layer = case.arguments()

    def attend(inputs, kv_pages):
        return ragged_paged_attention(inputs, kv_pages, layer, case.options, backend="mosaic_mma")

    return chip.lower(attend, (inputs, from_canonical("mosaic_mma", kv_pages)), donate_argnums=(1,))


def test_cases_compile_without_spills_in_place(chip, capfd, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    programs = chip.compile_all([lower(chip, case) for case in CASES])
    report = capfd.readouterr()
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report.out + report.err)
    assert len(spills) >= 2 * len(CASES), "attention and merge of each case"
    assert set(spills) == {("0", "0")}
    for case, program in zip(CASES, programs, strict=True):
        pool = from_canonical("mosaic_mma", case.arguments().kv_pages)
        assert program.memory_analysis().alias_size_in_bytes >= sum(x.nbytes for x in jax.tree.leaves(pool)), case.name


def test_a_step_is_one_cuda_graph_and_does_not_copy_the_pool(chip, tmp_path):
    schedule, config = ScheduleConfig(256, 2048, 1024, 16, num_pages=50_000), json.loads(DEFAULT_MODEL.read_text())
    options = step_options(chip.device_kind) | dump_options(chip.device_kind, tmp_path)
    pool, step = lower_step(chip, config, schedule, 64, 1, jnp.dtype("bfloat16"), options, backend="mosaic_mma")
    (program,) = chip.compile_all([step])
    check(pool, program, 24e6, num_kinds=1)
    assert thunks_of_step(tmp_path) == ["kCommandBuffer"]
