"""The precision that `linear` asks for; on CPU every choice computes the same. Activations and deltas of any matrix."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.layers.linear import embed, linear
from jaxserve.layers.norm import Norm
from jaxserve.layers.weight_formats.packed import NativeMatrix
from jaxserve.pallas_kernels import narrow_floats, packed_linear
from tests.own_programs import UNOPTIMIZED


@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize(("dtype", "exact"), [("float32", True), ("bfloat16", False)])
def test_float32_products_are_exact(monkeypatch, num_tokens, dtype, exact):
    monkeypatch.setattr(narrow_floats, "target_platform", lambda: "gpu")
    weight, x = jnp.ones((5, 4), dtype), jnp.ones((num_tokens, 4), dtype)
    with jax.default_matmul_precision("default"):
        (dot,) = [e for e in jax.make_jaxpr(linear)(x, weight).eqns if e.primitive.name == "dot_general"]
    assert ("HIGHEST" in str(dot.params["precision"])) is exact


@pytest.mark.skipif(packed_linear.unsupported("float32", "cpu") is not None, reason="needs the native kernels")
def test_packed_matrices_take_activations_that_their_kernel_does_not_have():
    rng = np.random.default_rng(0)
    shapes = {"x": (3, 8), "weight": (20, 8), "norm": (8,), "bias": (20,), "residual": (3, 20)}
    arrays = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    x, weight, norm = arrays.pop("x"), arrays.pop("weight"), arrays.pop("norm")
    packed = NativeMatrix(packed_linear.pack(weight))

    @partial(jax.jit, compiler_options=UNOPTIMIZED)
    def multiply(matrix, x, norm, arrays):
        return linear(x, matrix, activation=jax.nn.gelu, norm=Norm(norm, 1e-6), **arrays)

    y, expected = (multiply(matrix, x, norm, arrays) for matrix in (packed, weight))
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-5)
    jaxpr = jax.make_jaxpr(partial(linear, activation=jnp.tanh, norm=Norm(norm, 1e-6)))(x, packed, bias=arrays["bias"])
    assert [e.primitive.name for e in jaxpr.eqns][-2:] == ["ffi_call", "tanh"]  # the kernel adds the bias


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_cpu_converts_no_whole_matrix_of_16_bits(dtype):
    """XLA would do so before the product and before the look-up, and in front of a loop around them."""

    def rounds(of_tokens, weight):
        def following(_, ids):
            return linear(embed(ids, weight), weight).argmax(axis=1)

        return [jax.lax.fori_loop(0, 3, following, ids) for ids in of_tokens]

    of_tokens = [jax.ShapeDtypeStruct((num_tokens,), jnp.int32) for num_tokens in (1, 3, 17)]
    memory = jax.jit(rounds).lower(of_tokens, jax.ShapeDtypeStruct((32768, 1024), dtype)).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 32768 * 1024 * 2 // 8


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_products_and_rows_on_a_cpu(dtype):
    rng, nums_tokens = np.random.default_rng(0), (1, 3, 17)
    weight, *inputs = (rng.normal(size=(rows, 300)).astype(jnp.dtype(dtype)) for rows in (1000, *nums_tokens))
    of_tokens = [rng.integers(-3, 1003, num_tokens).astype(np.int32) for num_tokens in nums_tokens]

    @partial(jax.jit, compiler_options=UNOPTIMIZED)
    def computed(weight, inputs, of_tokens):
        products = [linear(x, weight, dtype=jnp.float32) for x in inputs]
        return products, [embed(ids, weight) for ids in of_tokens]

    for x, ids, y, rows in zip(inputs, of_tokens, *computed(weight, inputs, of_tokens), strict=True):
        np.testing.assert_allclose(y, x.astype(np.float64) @ weight.astype(np.float64).T, rtol=0, atol=2e-4)
        assert rows.dtype == dtype
        np.testing.assert_array_equal(rows, weight[np.clip(ids, 0, 999)])
