"""Products of the kernel for TPUs with quantised matrices: values in the interpreter, planted bugs, plans, choices."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import interpreted
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.layers.linear import LinearContext, StackedMatrix, linear
from jaxserve.models.params import ParamSpec
from jaxserve.pallas_kernels.deviceless import TPU7X, TPU_V5E, TPU_V5P, TPU_V6E
from jaxserve.pallas_kernels.dispatch import UnsupportedBackendError
from jaxserve.pallas_kernels.quantized_matmul import BACKENDS, Problem, mosaic_tpu, quantized_matmul, settings
from jaxserve.pallas_kernels.quantized_matmul.cases import BY_NAME, CASES
from jaxserve.pallas_kernels.quantized_matmul.mosaic_tpu.plan import LANES, block_bytes
from jaxserve.quant import products, weight_format

QUICK = ["zero_points"]
"""Case of the default run, which shows if the kernel does not run at all."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case.name in QUICK else pytest.mark.interpreter, id=case.name) for case in CASES],
)
def test_the_tpu_kernel_matches_the_reference(case):
    found = interpreted.run_quantized(case, "quantized_tpu")
    assert found.error <= (1e-6 * case.num_inputs**0.5 if case.result_dtype == "float32" else 4e-3)
    assert found.is_finite
    assert not found.races


PLANTED = {  # {bug: (case, old code, new code)}
    "none": ("zero_points", "", ""),
    "the matrix is that of the first layer": (
        "a_layer_among_others",
        "lambda t, n, layer: (layer[0], n, 0)",
        "lambda t, n, layer: (0, n, 0)",
    ),
    "scales are those of the first layer": (
        "a_layer_among_others",
        "lambda t, n, layer: (layer[0], 0, n)",
        "lambda t, n, layer: (0, 0, n)",
    ),
    "scales are those of the first half of the columns": (
        "int4_by_group",
        "(part * problem.row_bytes + start) // size",
        "start // size",
    ),
    "both halves of the columns are low bits": (
        "int4_by_channel",
        "codes & 15 if part == 0 else codes >> 4",
        "codes & 15",
    ),
    "sums begin with those of the block before": ("int8_by_channel", "    sums[...] = jnp.zeros_like(sums)\n", ""),
    "zero points are left out": ("zero_points", "weight -= _spread", "_spread"),
    "scales of rows are left out": ("int8_by_channel", "y * scale[...] if", "y if"),
    "the first group of some columns stands for all": (
        "small_groups",
        "rows[first : first + columns // size], size",
        "rows[first : first + 1], columns",
    ),
    "the first groups of each half stand for all": (
        "many_groups",
        "_at(turn, GRID_ROWS, part",
        "_at(0, GRID_ROWS, part",
    ),
    "x is that of the first half": (
        "many_groups",
        "part * problem.row_bytes + start), tiles",
        "start), tiles",
    ),
}


@pytest.mark.interpreter
@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_caught(bug, tmp_path):
    case, old, new = PLANTED[bug]
    if old:
        assert len(interpreted.places_of("quantized_tpu", old)) == 1, "there is no such place any more"
    script = [sys.executable, str(Path(interpreted.__file__)), "quantized_tpu", case, old, new]
    done = subprocess.run(script, capture_output=True, text=True, timeout=100, cwd=tmp_path, check=False)
    print(done.stdout, done.stderr)  # shown where the test fails
    found = None if done.returncode else interpreted.Found(**json.loads(done.stdout.splitlines()[-1]))
    assert (found is None or found.error > 1e-4 or not found.is_finite or found.races) == bool(old)


FACTS = {
    "num_rows": 64,
    "num_outputs": 6144,
    "num_inputs": 4096,
    "num_groups": 64,
    "elements": "int4",
    "has_zero": False,
    "further": (),
    "dtype": jnp.dtype("bfloat16"),
    "scale_dtype": jnp.dtype("float32"),
    "result_dtype": jnp.dtype("bfloat16"),
    "platform": "tpu",
}


@pytest.mark.parametrize("chip", [TPU_V5E, TPU_V5P, TPU_V6E, TPU7X], ids=lambda chip: chip.topology_name)
def test_blocks_fit_the_memory_of_tpus(chip):
    shapes = ((6144, 4096), (4096, 14336), (28672, 4096), (128256, 4096), (8192, 28672), (384, 1792))
    for rows, (N, K), size, elements in itertools.product((1, 64, 2048), shapes, (32, 64, 128, None), ("int4", "int8")):
        facts = {"num_rows": rows, "num_outputs": N, "num_inputs": K, "num_groups": K // (size or K)}
        problem = Problem(**FACTS | facts | {"elements": elements})
        with jax.sharding.use_abstract_mesh(chip.mesh()):
            assert mosaic_tpu.supports(problem) is None
            call = mosaic_tpu.call_for(problem)
        tiles = call.tiles
        assert block_bytes(problem, tiles) <= call.vmem_bytes
        assert tiles.outputs % LANES == problem.row_bytes % tiles.columns == tiles.columns % LANES == 0
        assert call.row_tiles * tiles.rows >= rows
        assert call.output_tiles * tiles.outputs >= N


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"platform": "cpu"}, "TPUs only"),
        ({"elements": "e2m1"}, "not e2m1"),
        ({"further": ("order of columns",)}, "no order of columns"),
        ({"dtype": jnp.dtype("float32")}, "not float32 and float32"),
        ({"num_inputs": 4160}, "multiple of 128 bytes, not 2080"),
        ({"num_outputs": 6160}, "multiple of 128, not 6160"),
        ({"num_inputs": 4608, "num_groups": 128}, "not of 36"),
    ],
)
def test_refuses_with_a_reason(changed, reason):
    with jax.sharding.use_abstract_mesh(TPU_V6E.mesh()):
        found = mosaic_tpu.supports(Problem(**FACTS | changed))
    assert found is None if reason is None else reason in found


def test_sizes_must_be_known():
    mesh = jax.sharding.use_abstract_mesh(TPU_V6E.mesh())
    with settings.sized(stages=3), mesh, pytest.raises(ValueError, match="stages"):
        mosaic_tpu.call_for(Problem(**FACTS))


def test_on_cpus_the_format_multiplies():
    x, matrix, layer = BY_NAME["int8_by_group"].arguments()
    y = quantized_matmul(x, matrix, layer, by_xla=lambda: x[:, :256], dtype=jnp.float32)
    assert (y == x[:, :256]).all()
    for backend in BACKENDS:
        with pytest.raises(UnsupportedBackendError, match=r"runs on .PUs only; use one of \['xla'\]"):
            quantized_matmul(x, matrix, layer, by_xla=lambda: x, backend=backend)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_layers_of_a_stack_reach_the_kernel(name, monkeypatch):
    """Products are those of the layer's own matrix, rounded to the dtype of x."""
    rng, spec = np.random.default_rng(0), ParamSpec(("w",), (128, 256), (None, None), ("w",), (128,))
    form, dtype = weight_format(name), np.dtype("float32")
    leaves = form.leaves(spec, spec.shape, dtype)
    buffers = [np.zeros((2, *leaf.shape), leaf.dtype) for leaf in leaves]
    for layer in range(2):
        encoded = form.encode(rng.normal(size=spec.shape).astype(np.float32), leaves)
        for leaf, buffer, rows in zip(leaves, buffers, encoded, strict=True):
            leaf.write(buffer[layer], 0, rows)
    x = jnp.asarray(rng.normal(size=(3, 256)), jnp.bfloat16)
    own = form.weight(*(jnp.asarray(buffer[1]) for buffer in buffers))
    matrix = own.dequantize(*own.rows_arrays()).astype(jnp.bfloat16)
    expected = np.asarray(x, np.float32) @ np.asarray(matrix, np.float32).T
    stack = form.weight(*map(jnp.asarray, buffers))
    monkeypatch.setattr(products, "multiply", lambda *_: pytest.fail("XLA multiplies"))
    with settings.interpreted(interpreted._params("tpu")):
        found = linear(x, StackedMatrix(stack, jnp.int32(1)), LinearContext(dtype=jnp.float32))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
