"""The precision that `linear` asks for; on CPU every choice computes the same."""

import jax
import jax.numpy as jnp
import pytest

from jaxserve.layers.linear import linear


@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize(("dtype", "exact"), [("float32", True), ("bfloat16", False)])
def test_float32_products_are_exact(num_tokens, dtype, exact):
    weight, x = jnp.ones((5, 4), dtype), jnp.ones((num_tokens, 4), dtype)
    with jax.default_matmul_precision("default"):
        (dot,) = [e for e in jax.make_jaxpr(linear)(weight, x).eqns if e.primitive.name == "dot_general"]
    assert ("HIGHEST" in str(dot.params["precision"])) is exact
