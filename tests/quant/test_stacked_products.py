"""Quantised matrices in the arrays of all layers, multiplied by the kernel for TPUs in the interpreter."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxserve.layers.linear import StackedMatrix, linear
from jaxserve.layers.weight_formats import scaled_matrix, weight_format
from jaxserve.models.params import ParamSpec
from jaxserve.pallas_kernels.grouped_matmul import QUANTIZED_MATMUL
from jaxserve.pallas_kernels.grouped_matmul.launch import SETTINGS
from jaxserve.weights.rows import leaf_at
from tests.quant.loaded import ONE_LAYER, loaded
from tests.quant.quantized_checkpoints import CASES, write_quantized


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
    matrix = own.dequantize(*(rows.whole() for rows in own.rows_arrays())).astype(jnp.bfloat16)
    expected = np.asarray(x, np.float32) @ np.asarray(matrix, np.float32).T
    stack = form.weight(*map(jnp.asarray, buffers))
    monkeypatch.delitem(QUANTIZED_MATMUL.backends, "mosaic_gpu")  # TPU kernels alone run in this interpreter
    monkeypatch.setattr(scaled_matrix, "multiply", lambda *_: pytest.fail("XLA multiplies"))
    with SETTINGS.interpreted(pltpu.InterpretParams()):
        found = linear(x, StackedMatrix(stack, jnp.int32(1)), dtype=jnp.float32)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "gptq-order" else pytest.mark.interpreter)
        for name in ("gptq-order", "modelopt-int4-awq", "ct-nvfp4-weights", "ct-mxfp4-weights", "awq")
    ],
)
def test_matrices_of_checkpoints_reach_the_kernel(name, monkeypatch, tmp_path):
    """Scales of tensors, factors of inputs and orders of columns go around the kernel."""
    write_quantized(tmp_path, CASES[name], **ONE_LAYER, hidden_size=128, head_dim=32, intermediate_size=256)
    _, specs, params = loaded(tmp_path, jnp.bfloat16)
    (spec,) = [spec for spec in specs if spec.path[-1] == "down_proj"]
    matrix = leaf_at(params, spec.path)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 256)), jnp.bfloat16)
    expected = np.asarray(x, np.float32) @ np.asarray(matrix.rows(jnp.arange(128))).T
    monkeypatch.delitem(QUANTIZED_MATMUL.backends, "mosaic_gpu")  # TPU kernels alone run in this interpreter
    monkeypatch.setattr(scaled_matrix, "multiply", lambda *_: pytest.fail("XLA multiplies"))
    with SETTINGS.interpreted(pltpu.InterpretParams()):
        found = linear(x, matrix, dtype=jnp.float32)
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.01 * np.abs(expected).max())
