"""Grouped products compile for chips, and steps of mixtures read the matrices of experts where they are."""

import math
import re

import jax
import jax.numpy as jnp
import pytest

from jaxserve.pallas_kernels.deviceless import TPU7X, TPU_V4, TPU_V5E, TPU_V5P, TPU_V6E
from jaxserve.pallas_kernels.grouped_matmul import grouped_matmul
from jaxserve.pallas_kernels.ragged_paged_attention import Heads, default_page_size
from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.tools.planner.models import read_model
from jaxserve.tools.planner.program import StepCompiler, temp_bytes
from tests.deviceless.layers import first_layers

pytestmark = pytest.mark.deviceless

BFLOAT16 = jnp.dtype("bfloat16")
POOL_TOKENS = 20_000
BACKENDS = {"gpu": "mosaic_gpu", "tpu": "mosaic_tpu"}
SHAPES = [  # rows, groups, outputs, inputs, dtype
    (512, 128, 1536, 2048, "bfloat16"),
    (16384, 128, 2048, 768, "bfloat16"),
    (8, 8, 2048, 128, "bfloat16"),
    (4096, 8, 4096, 14336, "bfloat16"),
]


def lower(chip, rows, groups, outputs, inputs, dtype, num_layers=2):
    """Lower the product with the matrices of one of several layers."""
    shapes = (
        ((rows, inputs), dtype),
        ((num_layers, groups * outputs, inputs), dtype),
        ((groups,), "int32"),
        ((), "int32"),
    )
    args = [jax.ShapeDtypeStruct(shape, kind) for shape, kind in shapes]

    def multiply(x, matrices, group_sizes, layer):
        return grouped_matmul(x, matrices, group_sizes, layer=layer, backend=BACKENDS[chip.platform])

    return chip.lower(multiply, args)


def check_product(compiled, rows, groups, outputs, inputs, dtype):
    """Check that temporaries have at most the size of rows and results."""
    result_bytes, row_bytes = rows * outputs * 4, rows * inputs * jnp.dtype(dtype).itemsize
    assert compiled.memory_analysis().temp_size_in_bytes <= result_bytes + row_bytes + 2**20


@pytest.mark.parametrize(
    ("chip", "shape"),
    [
        *[(TPU_V6E, shape) for shape in (*SHAPES, (512, 8, 1536, 2048, "float32"))],
        *[(chip, SHAPES[0]) for chip in (TPU_V4, TPU_V5E, TPU_V5P, TPU7X)],
    ],
    ids=lambda value: getattr(value, "topology_name", str(value)),
)
def test_products_compile_for_tpus(tpu, chip, shape):
    (compiled,) = chip.compile_all([lower(chip, *shape)])
    check_product(compiled, *shape)
    rows, groups, outputs, inputs, dtype = shape
    cost = compiled.cost_analysis()
    assert cost["flops"] >= 2 * rows * outputs * inputs
    assert cost["bytes accessed"] >= min(rows, groups) * outputs * inputs * jnp.dtype(dtype).itemsize


def test_products_compile_for_gpus_without_spills(h200, capfd, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    shapes = [*SHAPES, (300, 4, 192, 96, "float16")]
    programs = h200.compile_all([lower(h200, *shape) for shape in shapes])
    report = capfd.readouterr()
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report.out + report.err)
    assert len(spills) >= len(shapes), "the assembler reported nothing of some"
    assert set(spills) == {("0", "0")}
    for shape, program in zip(shapes, programs, strict=True):
        check_product(program, *shape)


@pytest.mark.parametrize(("name", "num_layers", "megabytes"), [("h200", 1, 250), ("v6e:1x1", 2, 100)])
def test_steps_of_mixtures_read_experts_in_place(targets, name, num_layers, megabytes):
    """Temporaries are far below one layer's experts, 1.2 GB, and no instruction copies or transposes their matrices."""
    target, arch = targets(name), first_layers(read_model("qwen3-30b-a3b")[1], num_layers)
    backend, experts = BACKENDS[target.sheet.chip.platform], arch.experts
    page_size = default_page_size(backend, Heads(4, 128), BFLOAT16)
    schedule = ScheduleConfig(64, 2048, 8192, page_size, POOL_TOKENS // page_size)
    (program,) = StepCompiler(target, schedule, BFLOAT16, BFLOAT16, backend).compile(arch, (256,))
    assert temp_bytes(program) <= megabytes * 1e6
    makers = re.findall(r"= [a-z0-9]+\[([\d,]+)\]\S* ([a-z-]+)\(", program.as_text())
    least = experts.num_experts * experts.ffn_size * arch.hidden_size
    of_experts = {
        (shape, maker)
        for shape, maker in makers
        if math.prod(sizes := [int(size) for size in shape.split(",")]) >= least and arch.vocab_size not in sizes
    }
    assert of_experts, "the matrices are in the program"
    assert {maker for _, maker in of_experts} <= {"parameter", "get-tuple-element", "bitcast"}
    kernels = re.findall(r"custom-call\(.*grouped_matmul", program.as_text())
    assert len(kernels) == 2, "in the only layer, or in the loop over the layers"
