"""Products with quantised matrices compile for chips, and steps read the matrices where and as they are."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import pytest

from jaxserve.assembly.memory import tree_bytes
from jaxserve.pallas_kernels.deviceless import H200, TPU7X, TPU_V5E, TPU_V5P, TPU_V6E
from jaxserve.pallas_kernels.elements import FLOAT16_BITS, PACKED
from jaxserve.pallas_kernels.grouped_matmul import QuantizedStack, grouped_matmul
from jaxserve.pallas_kernels.ragged_paged_attention import Heads, default_page_size
from jaxserve.scheduling.schedule_config import ScheduleConfig
from jaxserve.tools.planner.models import read_model
from jaxserve.tools.planner.program import StepCompiler, abstract_params, temp_bytes
from jaxserve.weights.quantized import read_schemes
from tests.deviceless.layers import first_layers

pytestmark = pytest.mark.deviceless

BFLOAT16 = jnp.dtype("bfloat16")
BACKENDS = {"gpu": "mosaic_gpu", "tpu": "mosaic_tpu"}
DTYPES = {"int4": "uint8", "e2m1": "uint8", "int8": "int8", "e4m3": "float8_e4m3fn"}
SCALES = {"e2m1": "float8_e4m3fn", "float16": FLOAT16_BITS.name}  # dtypes of scales other than float32
OFFSETS = {"zero": "uint8", "minimum": "float32"}
SHAPES = [  # rows, outputs, inputs, group size, elements, what else groups have or what their scales are
    (64, 6144, 4096, 64, "int4", None),
    (64, 4096, 14336, 128, "int4", "zero"),
    (64, 6144, 4096, 128, "int4", "zero"),  # three warpgroups would copy 192 zero points at once
    (256, 4096, 14336, None, "int8", None),
    (1, 28672, 4096, 128, "e4m3", None),
    (16, 6144, 3072, 128, "int4", None),
    (64, 32064, 4096, 64, "int4", None),  # a share of a vocabulary
    (64, 4096, 14336, 32, "int4", "minimum"),
    (16, 6144, 4096, 16, "e2m1", None),
    (64, 4096, 14336, 32, "int8", "float16"),
    (8, 128256, 4096, 32, "int4", "float16"),
]


def scale_dtype(kind, more):
    """Return the dtype of the scales of a shape."""
    return jnp.dtype(SCALES.get(kind, SCALES.get(more, "float32")))


def lower(chip, rows, outputs, inputs, group, kind, more, num_layers=32):
    """Lower the product with the matrix of one of several layers."""
    grid = (num_layers, inputs // (group or inputs), outputs)
    row_bytes = inputs // 2 if kind in PACKED else inputs
    shapes = [((rows, inputs), "bfloat16"), ((num_layers, outputs, row_bytes), DTYPES[kind])]
    shapes += [(grid, scale_dtype(kind, more)), ((), "int32"), *([(grid, OFFSETS[more])] if more in OFFSETS else [])]

    def multiply(x, elements, scale, layer, values=None):
        matrix = QuantizedStack(elements, scale, None, kind)._replace(**({more: values} if more in OFFSETS else {}))
        options = {"dtype": BFLOAT16, "backend": BACKENDS[chip.platform]}
        return grouped_matmul(x, matrix, layer=layer, xla_matmul=lambda: x, **options)

    return chip.lower(multiply, [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes])


@pytest.mark.parametrize(
    ("chip", "shape"),
    [*[(TPU_V6E, shape) for shape in SHAPES], *[(chip, SHAPES[1]) for chip in (TPU_V5E, TPU_V5P, TPU7X)]],
    ids=lambda value: getattr(value, "topology_name", str(value)),
)
def test_products_compile_for_tpus(tpu, chip, shape):
    (compiled,) = chip.compile_all([lower(chip, *shape)])
    rows, outputs, inputs, group, kind, more = shape
    assert compiled.memory_analysis().temp_size_in_bytes <= 2**20 + 2 * 16 * inputs  # perhaps x padded to 16 rows
    elements = outputs * inputs // (2 if kind in PACKED else 1)
    num_bytes = scale_dtype(kind, more).itemsize + (jnp.dtype(OFFSETS[more]).itemsize if more in OFFSETS else 0)
    grid = outputs * inputs // (group or inputs) * num_bytes
    x_bytes = 2 * rows * inputs
    by_hand, accessed = elements + grid + x_bytes + 2 * rows * outputs, compiled.cost_analysis()["bytes accessed"]
    copies = 4 * x_bytes  # XLA may copy x to vector memory, and counts both ends of a copy where it starts and ends
    assert min(abs(accessed - by_hand), abs(accessed - copies - by_hand)) <= 0.05 * by_hand


def test_products_compile_for_gpus_without_spills(h200, capfd, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    shapes = [*SHAPES, (2048, 4096, 14336, 128, "int4", "zero"), (8, 128256, 4096, 64, "int4", None)]
    programs = h200.compile_all([lower(h200, *shape) for shape in shapes])
    report = capfd.readouterr()
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report.out + report.err)
    assert len(spills) >= len(shapes), "the assembler reported nothing of some"
    assert set(spills) == {("0", "0")}
    for (rows, outputs, inputs, *_), program in zip(shapes, programs, strict=True):
        num_rows = -(-rows // 128) * 128
        # Splits have sums of their own where there are few.
        sums = 4 * max(num_rows * outputs, H200.num_cores * 128 * 128)
        assert program.memory_analysis().temp_size_in_bytes <= 2 * sums + 2 * num_rows * inputs


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": False}


@pytest.mark.parametrize(
    ("name", "num_layers", "megabytes", "num_kernels", "checkpoint"),
    [
        ("v6e:1x1", None, 64, 4, None),
        ("v6e:2x2", None, 64, 4, None),
        ("v6e:2x2", None, 64, 4, GPTQ),
        ("h200", 1, 110, 5, None),
        ("h200x4", 1, 110, 5, None),
        ("h200x2", 1, 110, 4, GPTQ),
        pytest.param("h200", None, 110, 32 * 4 + 1, None, marks=[pytest.mark.full, pytest.mark.exhaustive]),
    ],
)
def test_a_step_makes_no_floats_of_a_matrix(targets, name, num_layers, megabytes, num_kernels, checkpoint):
    """Temporaries are small beside the logits of all rows, and no array of floats has the size of a matrix.

    Without a checkpoint in activation order, whose inputs all devices exchange, the embedding and the head are
    quantised as well.
    """
    target, arch, num_rows = targets(name), first_layers(read_model("llama-3.1-8b")[1], num_layers), 64
    arch = dataclasses.replace(arch, schemes=read_schemes({"quantization_config": checkpoint}))
    quantization = None if checkpoint else "int4"
    local, backend = arch.local(target.num_devices), BACKENDS[target.sheet.chip.platform]
    page_size = default_page_size(backend, Heads(local.attention.num_kv_heads, 128), BFLOAT16)
    schedule = ScheduleConfig(num_rows, 2048, 8192, page_size, 20_000 // page_size)
    (program,) = StepCompiler(target, schedule, BFLOAT16, BFLOAT16, backend, quantization).compile(arch, (num_rows,))
    assert temp_bytes(program) <= num_rows * arch.vocab_size * 4 + megabytes * 1e6
    planned = tree_bytes(abstract_params(arch, BFLOAT16, quantization, target.num_devices))
    assert planned <= program.memory_analysis().argument_size_in_bytes <= planned + 3e9, "weights and a pool of 2.6 GB"
    text, ffn_size = program.as_text(), local.layers[0].mlp.ffn_size
    sizes_of_matrices = {local.hidden_size, ffn_size, 2 * ffn_size}
    sizes_of_matrices |= set() if checkpoint else {local.vocab_size}
    sizes_of_matrices |= {
        num * local.attention.head_dim
        for num in (local.attention.num_heads, local.attention.num_heads + 2 * local.attention.num_kv_heads)
    }
    wide = {
        (dtype, shape)
        for dtype, shape in re.findall(r"= (bf16|f16|f32)\[([\d,]+)\]", text)
        if len(sizes := [int(size) for size in shape.split(",")]) >= 2
        and set(sizes[-2:]) <= sizes_of_matrices
        and math.prod(sizes) >= arch.hidden_size**2 // target.num_devices
    }
    assert not wide
    assert len(re.findall(r"custom-call\(.*quantized_matmul", text)) >= num_kernels
