"""int4 by blocks against numpy in float64, and against the same elements in the native kernels."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import EngineConfig, weights
from jaxserve.layers.linear import embed, linear
from jaxserve.layers.stored_rows import multiply_by_slabs, multiply_whole
from jaxserve.layers.weight_formats import weight_format
from jaxserve.layers.weight_formats.int4 import paired
from jaxserve.layers.weight_formats.int8 import BlockMatrix, block_size, quantize
from jaxserve.models import registry
from jaxserve.models.params import device_bytes, matrix_transform
from jaxserve.pallas_kernels import packed_linear
from jaxserve.tools.planner.plan import make_plan
from jaxserve.tools.planner.program import abstract_params
from jaxserve.tools.planner.targets import parse_target
from tests.checkpoints import write_checkpoint
from tests.models.test_parity import run
from tests.quant.loaded import UNOPTIMIZED

SHAPES = [(1, 8), (3, 31), (7, 131), (200, 1536), (40, 96)]


def random_matrix(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def quantized(matrix) -> BlockMatrix:
    q, scale = quantize(matrix, largest=7)
    is_paired = block_size(matrix.shape[1]) % 2 == 0
    return BlockMatrix(jnp.asarray(paired(q) if is_paired else q), jnp.asarray(scale.T))


def dequantized(matrix):
    q, scale = (np.asarray(x, np.float64) for x in quantize(matrix, largest=7))
    return (q.reshape(*scale.shape, -1) * scale[..., None]).reshape(matrix.shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_number_is_within_half_a_scale(shape):
    matrix = random_matrix(*shape)
    q, scale = quantize(matrix, largest=7)
    assert np.abs(q).max() == 7
    error = np.abs(matrix - dequantized(matrix)).reshape(*scale.shape, -1)
    assert (error <= scale[..., None] * (0.5 + 1e-5)).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_products(shape):
    """Both forms of a product, for few and for many tokens, and the one that a CPU takes."""
    weight = quantized(random_matrix(*shape))
    assert weight.shape == shape
    inputs = [random_matrix(num_tokens, shape[1], seed=1) for num_tokens in (1, 17)]

    @partial(jax.jit, compiler_options=UNOPTIMIZED)
    def products(weight, inputs):
        forms = [partial(form, weight.dequantize, weight.rows_arrays()) for form in (multiply_by_slabs, multiply_whole)]
        return [[*(form(x) for form in forms), linear(x, weight)] for x in inputs]

    for x, found in zip(inputs, products(weight, inputs), strict=True):
        expected = x.astype(np.float64) @ dequantized(random_matrix(*shape)).T
        for y in found:
            np.testing.assert_allclose(y, expected, rtol=0, atol=3e-6 * shape[1] ** 0.5 * np.abs(x).max())


@pytest.mark.parametrize("shape", [(10, 96), (10, 31)])
def test_embedded_rows_are_those_of_the_matrix(shape):
    matrix = random_matrix(*shape)
    look_up = jax.jit(partial(embed, dtype=jnp.float32), compiler_options=UNOPTIMIZED)
    rows = look_up(np.array([3, 9, 0, 12, -1], np.int32), quantized(matrix))
    np.testing.assert_allclose(rows, dequantized(matrix)[[3, 9, 0, 9, 9]], rtol=1e-6)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    write_checkpoint(path, "llama", dtype="bfloat16")
    return path


@pytest.mark.skipif(packed_linear.unsupported("int4", "cpu") is not None, reason="needs the native kernels")
def test_native_kernels_compute_what_xla_computes(checkpoint: Path) -> None:
    arch = registry.from_hf_config(weights.read_config(checkpoint))
    specs, form = registry.param_specs(arch), weight_format("int4")
    ids, logits = jnp.arange(3, 30, dtype=jnp.int32), []
    for native in (False, True):
        transform = matrix_transform(specs, form, native=native)
        params = weights.load(checkpoint, specs, jnp.float32, transform=transform)
        logits.append(np.asarray(run(params, arch, ids)[0]))
    np.testing.assert_allclose(*logits, rtol=0, atol=2e-5 * np.abs(logits[0]).max())


@pytest.mark.parametrize("num_devices", [1, 2])
def test_plans_count_the_bytes_that_are_loaded(checkpoint: Path, num_devices: int) -> None:
    arch = registry.from_hf_config(weights.read_config(checkpoint))
    specs = registry.param_specs(arch)
    transform = matrix_transform(specs, weight_format("int4"))
    loaded = weights.load(checkpoint, specs, jnp.float32, transform=transform)
    planned = abstract_params(arch, jnp.dtype("float32"), "int4", num_devices)
    assert jax.tree.structure(planned) == jax.tree.structure(loaded)
    held, plain = device_bytes(loaded), 4 * sum(np.prod(spec.shape) for spec in specs)
    assert held < 0.2 * plain
    sizes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(planned))
    assert sizes == held if num_devices == 1 else held / 2 < sizes < held
    options = {"tensor_parallel_size": num_devices, "linear_backend": "xla"}  # matrices are not packed
    config = EngineConfig(str(checkpoint), quantization="int4", dtype="float32", **options)
    assert make_plan(config, parse_target("cpu")).memory.weights == held
