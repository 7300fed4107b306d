"""The precision that `linear` asks for; on CPU every choice computes the same. Activations after any matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.layers.linear import LinearContext, linear
from jaxserve.layers.norm import RmsNorm
from jaxserve.pallas_kernels import packed_linear
from jaxserve.quant.packed import NativeMatrix


@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize(("dtype", "exact"), [("float32", True), ("bfloat16", False)])
def test_float32_products_are_exact(num_tokens, dtype, exact):
    weight, x = jnp.ones((5, 4), dtype), jnp.ones((num_tokens, 4), dtype)
    with jax.default_matmul_precision("default"):
        (dot,) = [e for e in jax.make_jaxpr(linear)(x, weight).eqns if e.primitive.name == "dot_general"]
    assert ("HIGHEST" in str(dot.params["precision"])) is exact


@pytest.mark.skipif(packed_linear.unsupported("float32", "cpu") is not None, reason="needs the native kernels")
def test_packed_matrices_take_activations_that_their_kernel_does_not_have():
    rng = np.random.default_rng(0)
    shapes = {"x": (3, 8), "weight": (20, 8), "norm": (8,), "bias": (20,), "residual": (3, 20)}
    arrays = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    x, weight, norm = arrays.pop("x"), arrays.pop("weight"), RmsNorm(arrays.pop("norm"), 1e-6)
    packed = NativeMatrix(packed_linear.pack(weight))
    y, expected = (linear(x, w, LinearContext(activation=jax.nn.gelu), norm=norm, **arrays) for w in (packed, weight))
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-5)
