"""Products with quantised matrices compile for TPUs, and steps read the matrices where and as they are."""

import math
import re

import jax
import jax.numpy as jnp
import pytest

from jaxserve.engine.memory import tree_bytes
from jaxserve.pallas_kernels.deviceless import TPU7X, TPU_V5E, TPU_V5P, TPU_V6E
from jaxserve.pallas_kernels.quantized_matmul import Quantized, quantized_matmul
from jaxserve.pallas_kernels.ragged_paged_attention import default_page_size
from jaxserve.planner.plan import read_model
from jaxserve.planner.program import StepCompiler, abstract_params, temp_bytes
from jaxserve.schedule_config import ScheduleConfig

pytestmark = pytest.mark.deviceless

BFLOAT16 = jnp.dtype("bfloat16")
DTYPES = {"int4": "uint8", "int8": "int8", "e4m3": "float8_e4m3fn"}
SHAPES = [  # rows, outputs, inputs, group size, elements, whether there are zero points
    (64, 6144, 4096, 64, "int4", False),
    (64, 4096, 14336, 128, "int4", True),
    (256, 4096, 14336, None, "int8", False),
    (1, 28672, 4096, 128, "e4m3", False),
    (256, 384, 1792, 128, "int4", False),
]


def lower(chip, rows, outputs, inputs, group, kind, has_zero, num_layers=32):
    """Lower the product with the matrix of one of several layers."""
    grid = (num_layers, inputs // (group or inputs), outputs)
    row_bytes = inputs // 2 if kind == "int4" else inputs
    shapes = [((rows, inputs), "bfloat16"), ((num_layers, outputs, row_bytes), DTYPES[kind]), (grid, "float32")]
    shapes += [((), "int32"), *([(grid, "uint8")] if has_zero else [])]

    def multiply(x, elements, scale, layer, zero=None):
        matrix = Quantized(elements, scale, zero, kind)
        return quantized_matmul(x, matrix, layer, by_xla=lambda: x, dtype=BFLOAT16, backend="mosaic_tpu")

    return chip.lower(multiply, [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes])


@pytest.mark.parametrize(
    ("chip", "shape"),
    [*[(TPU_V6E, shape) for shape in SHAPES], *[(chip, SHAPES[1]) for chip in (TPU_V5E, TPU_V5P, TPU7X)]],
    ids=lambda value: getattr(value, "topology_name", str(value)),
)
def test_products_compile_for_tpus(tpu, chip, shape):
    (compiled,) = chip.compile_all([lower(chip, *shape)])
    rows, outputs, inputs, group, kind, has_zero = shape
    assert compiled.memory_analysis().temp_size_in_bytes <= 2**20 + 2 * 16 * inputs  # perhaps x padded to 16 rows
    elements = outputs * inputs // (2 if kind == "int4" else 1)
    grid = outputs * inputs // (group or inputs) * (4 + has_zero)
    x_bytes = 2 * rows * inputs
    by_hand, accessed = elements + grid + x_bytes + 2 * rows * outputs, compiled.cost_analysis()["bytes accessed"]
    copies = 4 * x_bytes  # XLA may copy x to vector memory, and counts both ends of a copy where it starts and ends
    assert min(abs(accessed - by_hand), abs(accessed - copies - by_hand)) <= 0.05 * by_hand


def test_a_step_makes_no_floats_of_a_matrix(targets):
    """Temporaries are small beside the logits of all rows, and no array but the weights has the size of a matrix."""
    (_, arch), target, num_rows = read_model("llama-3.1-8b"), targets("v6e:1x1"), 64
    page_size = default_page_size("mosaic_tpu", num_kv_heads=8, head_dim=128, kv_dtype=BFLOAT16)
    schedule = ScheduleConfig(num_rows, 2048, 8192, page_size, 20_000 // page_size)
    (program,) = StepCompiler(target, schedule, BFLOAT16, BFLOAT16, "mosaic_tpu", "int4").compile(arch, (num_rows,))
    assert temp_bytes(program) <= num_rows * arch.vocab_size * 4 + 64e6
    planned = tree_bytes(abstract_params(arch, BFLOAT16, "int4"))
    assert planned <= program.memory_analysis().argument_size_in_bytes <= planned + 3e9, "weights and a pool of 2.6 GB"
    text = program.as_text()
    made = re.findall(r"= (bf16|f32)\[([\d,]+)\]\S* ([a-z-]+)\(", text)
    of_a_matrix = {arch.hidden_size, arch.ffn_size, 2 * arch.ffn_size, arch.vocab_size}
    wide = {
        (dtype, shape, maker)
        for dtype, shape, maker in made
        if len(sizes := [int(size) for size in shape.split(",") if size]) >= 2
        and set(sizes[-2:]) <= of_a_matrix
        and math.prod(sizes) >= arch.hidden_size**2
    }
    assert not wide
    kernels = re.findall(r"custom-call\(.*/(\w+)/quantized_matmul", text)
    assert len(kernels) >= 4, "in the loop over the layers"
